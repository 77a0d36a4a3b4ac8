"""Our partitioners in upstream's functions, upstream's in ours, and the parameters of both."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from functorch.compile import aot_function, aot_module, nop
from functorch.compile import default_partition as their_default
from functorch.compile import min_cut_rematerialization_partition as their_min_cut
from torch import nn

import aotlab
from aotlab.errors import RefusedError
from aotlab.partition.default import default_partition
from aotlab.partition.min_cut import min_cut_rematerialization_partition
from tests.engine_helpers import leaf, record, traced
from tests.partition.random_training_programs import drawn

OURS = {
    "default": default_partition,
    "min cut": min_cut_rematerialization_partition,
    "half": functools.partial(min_cut_rematerialization_partition, memory_budget=0.5),
    "none": functools.partial(min_cut_rematerialization_partition, memory_budget=0.0),
}
THEIRS = {"default": their_default, "min cut": their_min_cut}


@pytest.mark.parametrize("name", ["default", "min cut"])
def test_parameters(name):
    """Our partitioners have all of upstream's parameters, in the same order and with the same defaults.

    Our additional parameters are keyword-only.
    """
    ours = [*inspect.signature(OURS[name]).parameters.values()]
    theirs = [*inspect.signature(THEIRS[name]).parameters.values()]
    for a, b in zip(ours, theirs, strict=False):
        assert (a.name, a.kind, a.default) == (b.name, b.kind, b.default)
    assert len(ours) >= len(theirs)
    assert {parameter.kind for parameter in ours[len(theirs) :]} <= {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", ["default", "min cut"])
def test_every_parameter_of_upstreams_can_be_given(name):
    """Every parameter of upstream's can be given, by position or by name.

    Parameters without an effect change nothing.
    """
    module = record(traced(lambda x, w: (x @ w).sin(), leaf(3, 3), leaf(3, 3)), "trace").module
    theirs = inspect.signature(THEIRS[name]).parameters
    values = {
        "joint_module": module,
        "_joint_inputs": ([], []),
        "compiler": "nvfuser",
        "num_fwd_outputs": 1,
        "static_lifetime_input_indices": [1],
        "static_lifetime_input_nodes": None,
    }
    assert set(theirs) <= set(values)
    positional = [values[key] for key, each in theirs.items() if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    keywords = {key: values[key] for key, each in theirs.items() if each.kind is inspect.Parameter.KEYWORD_ONLY}
    forward, backward = OURS[name](*positional, **keywords)
    plain = OURS[name](module, None, num_fwd_outputs=1)
    assert [str(forward.graph), str(backward.graph)] == [str(each.graph) for each in plain]
    OURS[name](**{key: values[key] for key in theirs})


def gradients(function, args):
    """Call, differentiate the sum of the results that require grad, and return results and gradients."""
    for argument in args:
        argument.grad = None
    torch.manual_seed(0)
    returned = function(*args)
    sum(value.sum() for value in returned if value.requires_grad).backward()
    return [*returned, *(argument.grad for argument in args)]


def differentiable(seeds):
    """Draw programs with a result that requires grad."""
    for seed in seeds:
        function, args = drawn(seed)
        if any(value.requires_grad for value in function(*args)):
            yield seed, function, args


@pytest.mark.parametrize("name", OURS)
def test_ours_in_upstreams_function(name):
    """Random programs through torch's own `aot_function` equal the results of its default partitioner bit for bit."""
    for _, function, args in differentiable(range(100, 115)):
        expected = gradients(aot_function(function, nop, partition_fn=their_default), args)
        found = gradients(aot_function(function, nop, partition_fn=OURS[name]), args)
        for a, b in zip(expected, found, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OURS)
def test_ours_in_upstreams_module(name):
    """Our partitioners work in upstream's `aot_module`, with parameters and buffers."""
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.SiLU(), nn.Flatten(), nn.Linear(24, 2))
    x = leaf(5, 3, 8)
    expected = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    compiled = aot_module(model, nop, partition_fn=OURS[name])
    found = torch.autograd.grad(compiled(x).square().sum(), [x, *model.parameters()])
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a)


@pytest.mark.parametrize("name", THEIRS)
def test_theirs_in_our_function(name):
    """Random programs through our `aot_function` with upstream's partitioners equal our default's results.

    Partial backwards may raise our error.
    """
    refused = 0
    for _, function, args in differentiable(range(100, 115)):
        expected = gradients(aotlab.aot_function(function, aotlab.nop), args)
        try:
            found = gradients(aotlab.aot_function(function, aotlab.nop, partition_fn=THEIRS[name]), args)
        except RefusedError:
            refused += 1
            continue
        for a, b in zip(expected, found, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
    assert refused <= 2


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("value", [3, 2.5, True, "text", None])
def test_plain_results_in_upstreams_function(value, name):
    """Upstream's graphs return plain values unchanged."""
    x = torch.ones(3, requires_grad=True)
    out, same = aot_function(lambda x: (x.sin().exp(), value), nop, nop, partition_fn=OURS[name])(x)
    out.sum().backward()
    assert (same, type(same)) == (value, type(value))
    expected = torch.ones(3, requires_grad=True)
    expected.sin().exp().sum().backward()
    assert torch.equal(x.grad, expected.grad)
