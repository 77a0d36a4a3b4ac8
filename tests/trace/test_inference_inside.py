"""Views that a function makes under ``inference_mode`` or ``no_grad``, and what it does to them there."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from aotlab.verification.fuzz.compare import differences
from tests.engine_helpers import compiled


def leaf_input():
    """Make a leaf."""
    a = torch.arange(4.0).reshape(2, 2).clone().requires_grad_()  # no view: those of a view are left to eager
    return (a,), {"a": a}


def computed_input():
    """Make a tensor with a history."""
    leaf = torch.arange(4.0).reshape(2, 2).requires_grad_()
    return (leaf * 1,), {"leaf": leaf}


def plain_input():
    """Make a tensor that requires no grad."""
    return (torch.arange(4.0).reshape(2, 2),), {}


INPUTS = pytest.mark.parametrize("inputs", [leaf_input, computed_input, plain_input])
WRITES = [None, lambda out: [lambda: out[0].mul_(2)], lambda out: [lambda: out[-1].mul_(2)]]


def agree(program, inputs, **settings):
    """Compare with eager, also in what the caller may write afterwards; return the compiled function."""
    function = compiled(program)
    for write in WRITES:
        assert differences(program, function, [inputs, inputs], after=write, **settings) == []
        assert differences(program, function, [inputs], before=write, **settings) == []
    return function


# --- a view of a view that was made without a history ends where that begins


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("first", [lambda t: t[0], lambda t: t.unbind(0)[0], lambda t: t.view_as(t)])
def test_a_view_of_a_view_without_a_history(first, mode):
    """Nobody may write it in grad mode, and its gradient goes nowhere, as in eager."""

    def program(a):
        made = a * 2
        with mode():
            one = first(made)
        return made, one[..., -1]

    agree(program, leaf_input)


# --- detach_


@INPUTS
@pytest.mark.parametrize("then", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("made", ["before", "after"])
def test_detaching_in_place(made, then, inputs):
    """Under inference_mode it does nothing at all, to whatever tensor."""

    def program(a):
        early = a.view(-1)
        with torch.inference_mode():
            a.detach_()
        with then():
            return (early if made == "before" else a.view(-1)).unsqueeze(0)

    assert agree(program, inputs).calls.compiled > 0


def test_detaching_views_and_intermediates_in_place():
    """The same for what the function made."""

    def program(a):
        made = a * 2
        view, other = made.view(-1), a.t()
        with torch.inference_mode():
            view.detach_()
            made.detach_()
            torch.detach_(other)
        return made, view * 2, other * 3

    assert agree(program, computed_input).calls.compiled > 0


def test_a_call_that_detaches_in_inference_mode():
    """The same where the call is under inference_mode as a whole."""

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


# --- views as another dtype

USES = {
    "returned": lambda a, view: view,
    "viewed": lambda a, view: view.view(-1)[::2],
    "used": lambda a, view: view * a,
    "written": lambda a, view: view.mul_(2),
    "with the input": lambda a, view: (view, a),
}


@INPUTS
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
@pytest.mark.parametrize("use", USES)
def test_a_view_as_another_dtype(use, dtype, inputs):
    """Under inference_mode this one is an inference tensor, whatever it is a view of: eager runs it."""

    def program(a):
        with torch.inference_mode():
            view = a.view(dtype)
        return USES[use](a, view)

    function = agree(program, inputs)
    assert function.calls.compiled == 0


def test_views_as_another_dtype_that_are_compiled():
    """Outside, and of what was made inside, there is nothing special about it."""

    def outside(a):
        return a.view(torch.int32)[1:]

    def of_new(a):
        with torch.inference_mode():
            return (a * 2).view(torch.int32) + 1

    for program in (outside, of_new):
        assert agree(program, plain_input).calls.compiled > 0
    function = compiled(outside)
    with torch.inference_mode():
        assert function(torch.ones(2, 2)).is_inference()
    assert function.calls.compiled == 1


@INPUTS
@pytest.mark.parametrize("part", [lambda t: t, lambda t: t.view(-1), lambda t: t[0], lambda t: t.t()])
def test_what_inference_mode_made_is_written_outside(part, inputs):
    """Eager refuses that, of the tensor and of its views, and so do we with its words."""

    def program(a):
        with torch.inference_mode():
            made = a * 2
        part(made).zero_()
        return a * 3

    function = compiled(program)
    assert differences(program, function, [inputs]) == []
    assert function.calls.compiled == 0
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        function(*inputs()[0])
