"""With Inductor, random numbers equal `torch.compile`'s under the same settings, and eager's if the settings say so."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config
from torch.nn import functional as F  # noqa: N812  # as everybody writes it
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab import config
from aotlab.backends import InductorBackend
from tests.engine_helpers import behind, leaf

OLD = torch.__version__.startswith("2.11")


def mixed(x, w):
    """Draw with ops that have Inductor kernels, and with one that has not. One result is unused."""
    torch.rand(3)
    y = F.dropout(x, 0.5) * torch.randn(8, 4) + torch.rand_like(x) * w
    return y, torch.randint(0, 9, (4,)), F.dropout(w, 0.3) * torch.bernoulli(x.detach().sigmoid())


def checkpointed(x, w):
    """Draw in a checkpoint, and around it."""
    y = checkpoint(lambda y: F.dropout(y.sin(), 0.5) * torch.rand(8, 4), F.dropout(x * w, 0.2), use_reentrant=False)
    return y * torch.rand(8, 4)


def outcome(function, *, grad=True):
    """Return results, gradients and the generator's state of two calls."""
    torch.manual_seed(0)
    found = []
    for _ in range(2):
        x, w = (leaf(8, 4, seed=seed).detach().requires_grad_(grad) for seed in range(2))
        results = function(x, w)
        results = results if isinstance(results, tuple) else (results,)
        found += [result.detach() for result in results]
        if grad:
            sum(result.sum() for result in results if result.requires_grad).backward()
            found += [x.grad, w.grad]
        found.append(torch.get_rng_state())
    return found


@pytest.mark.parametrize("program", [mixed, checkpointed])
def test_eagers_numbers_where_inductor_is_set_to_them(program):
    """With ``fallback_random``, also in the backward, and also on a torch whose Inductor changes their order."""
    with torch._inductor.config.patch(fallback_random=True):
        f = aotlab.compile(program)
        torch.testing.assert_close(outcome(f), outcome(program))
    assert f.calls.compiled == 2


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_the_numbers_of_torch_compile_by_default(grad, frontend):
    """The same seeds in the same order; the generator is left where torch.compile leaves it; not eager's numbers."""
    torch.compiler.reset()
    expected = outcome(torch.compile(mixed), grad=grad)
    torch.compiler.reset()
    found = outcome(aotlab.compile(mixed, frontend=frontend), grad=grad)
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found[0], outcome(mixed, grad=grad)[0])


def dropped(x):
    """Apply a dropout that is visible in the gradient."""
    y = F.dropout(x + 1, 0.5)
    return checkpoint(lambda value: F.dropout(value.sin(), 0.5) * value, y, use_reentrant=False)


@pytest.mark.parametrize(
    "partitioner", [aotlab.default_partition, aotlab.min_cut_rematerialization_partition], ids=["default", "min cut"]
)
def test_forward_and_backward_agree(partitioner):
    """Whosever numbers they are: where the forward drops there is no gradient, elsewhere there is."""
    x = torch.zeros(400, requires_grad=True)
    y = aotlab.compile(dropped, partitioner=partitioner)(x)
    y.sum().backward()
    assert torch.equal(y == 0, x.grad == 0)
    assert 0 < (y == 0).sum() < 400


def test_functional_numbers_are_eagers():
    """Under the switch nothing draws from a seed of Inductor's."""
    with config.patch(functionalize_rng_ops=True):
        found = outcome(aotlab.compile(mixed))
    torch.testing.assert_close(found, outcome(mixed))


def test_a_cells_numbers_are_eagers():
    """Functions that notebooks compile draw as eager does."""
    f = aotlab.compile(mixed, backend=InductorBackend(draws="eager"))
    torch.testing.assert_close(outcome(f, grad=False), outcome(mixed, grad=False))
    assert behind(f).calls.compiled == 2


def test_verification_compares_with_eagers_numbers():
    """A layer with dropout is not called different for its numbers."""
    assert aotlab.verify(lambda x: F.dropout(x, 0.4) * torch.rand(3), torch.ones(3, requires_grad=True)).ok


@pytest.mark.skipif(not OLD, reason="this torch's Inductor keeps the order of random ops")
def test_where_inductor_changes_the_order():
    """There the ops are chained by the states that they take."""
    assert InductorBackend(draws="eager").needs_states(None)
    assert not InductorBackend().needs_states(None)
