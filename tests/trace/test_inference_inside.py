"""Views that a function makes under ``no_grad`` or in a call under ``inference_mode``, and writes to them."""

from __future__ import annotations

import warnings

import pytest
import torch

from aotlab.maintenance.fuzz.compare import differences
from tests.engine_helpers import compiled


def leaf_input():
    """Make a leaf."""
    a = torch.arange(4.0).reshape(2, 2).clone().requires_grad_()  # no view: those of a view are left to eager
    return (a,), {"a": a}


def computed_input():
    """Make a tensor with a history."""
    leaf = torch.arange(4.0).reshape(2, 2).requires_grad_()
    return (leaf * 1,), {"leaf": leaf}


WRITES = [None, lambda out: [lambda: out[0].mul_(2)], lambda out: [lambda: out[-1].mul_(2)]]


@pytest.mark.parametrize("first", [lambda t: t[0], lambda t: t.unbind(0)[0], lambda t: t.view_as(t)])
def test_a_view_of_a_view_without_a_history(first):
    """Nobody may write it in grad mode, and its gradient goes nowhere, as in eager, also when the caller writes."""

    def program(a):
        made = a * 2
        with torch.no_grad():
            one = first(made)
        return made, one[..., -1]

    function = compiled(program)
    for write in WRITES:
        assert differences(program, function, [leaf_input, leaf_input], after=write) == []
        assert differences(program, function, [leaf_input], before=write) == []


def test_a_call_that_detaches_in_inference_mode():
    """`detach_` does nothing at all under the call's inference_mode, to whatever tensor."""

    def program(a):
        a.detach_()
        return a * 2

    for inputs in (leaf_input, computed_input):
        (eager,), _ = inputs()
        (own,), _ = inputs()
        function = compiled(program)
        with torch.inference_mode():
            program(eager)
            function(own)
        assert (own.requires_grad, own.is_leaf) == (eager.requires_grad, eager.is_leaf) == (True, inputs is leaf_input)
        assert function.calls.compiled == 1


def test_views_as_another_dtype_in_inference_mode():
    """They are inference tensors, as in eager."""
    function = compiled(lambda a: a.view(torch.int32)[1:])
    with torch.inference_mode():
        assert function(torch.ones(2, 2)).is_inference()
    assert function.calls.compiled == 1


@pytest.mark.parametrize("change", ["t_", "squeeze_", "unsqueeze_", "as_strided_", "detach_"])
def test_sizes_of_inference_tensors(change):
    """Outside of inference_mode, a size change of an inference tensor or of its view behaves as in eager."""

    def program(x):
        with torch.inference_mode():
            made = x * 2
        view = made.view(2, 2)
        {"unsqueeze_": lambda: view.unsqueeze_(0), "as_strided_": lambda: view.as_strided_((2,), (1,))}.get(
            change, getattr(view, change)
        )()
        return view

    def outcome(call):
        try:
            return call(torch.ones(2, 2)).shape
        except RuntimeError as error:
            return str(error)[:40]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert outcome(program) == outcome(compiled(program))
