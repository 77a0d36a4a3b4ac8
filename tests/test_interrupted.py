"""An interrupt while something is compiled, outside of notebooks: at any moment, all is as it was, and works on."""

from __future__ import annotations

import inspect
import signal
import sys

import pytest
import torch
from torch import nn

import aotlab
from aotlab import _torch as internals
from aotlab.frontends import direct

SWAPPED = "setattr(owner, name, own)"
HELD = "slot.place.write(before)"
#: The function in whose last lines the interrupt comes, the line, and how often it was run before.
MOMENTS = {
    "functions are put back, the first": (internals.replace_unguarded, SWAPPED, 0),
    "functions are put back, in the midst": (internals.replace_unguarded, SWAPPED, 5),
    "parameters are put back, the first": (direct.tensors_replaced, HELD, 0),
    "parameters are put back, the second": (direct.tensors_replaced, HELD, 1),
}


def interrupting(function, line, skip):
    """Return a trace function of Python's that sends an interrupt when a line of a function is run."""
    code = inspect.unwrap(function).__code__
    lines, first = inspect.getsourcelines(code)
    number = next(first + i for i, text in enumerate(lines) if line in text)
    left = [skip]

    def inside(frame, event, argument):
        if event == "line" and frame.f_lineno == number:
            if left[0] == 0:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            left[0] -= 1
        return inside

    return lambda frame, event, argument: inside if frame.f_code is code else None


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """Restore Python's handler of SIGINT, because it is ignored if the tests run in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("fresh_dynamo")  # which replaces some functions of torch's when it is loaded
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_while_all_is_put_back(moment):
    """It is put off until all is in its place; the model is the user's, torch is torch, and the next call compiles."""
    model = nn.Linear(4, 4)
    before = [id(p) for p in model.parameters()], torch.manual_seed, torch.from_numpy
    handler = signal.getsignal(signal.SIGINT)
    function = aotlab.compile(model, backend="eager")
    x = torch.ones(3, 4)
    tracer = sys.gettrace()

    def calls():
        for _ in range(1000):  # it may come a moment later, and after the first call
            function(x)

    sys.settrace(interrupting(*MOMENTS[moment]))
    try:
        with pytest.raises(KeyboardInterrupt):
            calls()
    finally:
        sys.settrace(tracer)
    assert ([id(p) for p in model.parameters()], torch.manual_seed, torch.from_numpy) == before
    assert signal.getsignal(signal.SIGINT) is handler
    torch.manual_seed(0)
    assert torch.equal(function(x), model(x))
    function(x).sum().backward()
    assert model.weight.grad is not None
