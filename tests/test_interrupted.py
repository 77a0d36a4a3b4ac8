"""An interrupt while something is compiled, outside of notebooks: at any moment, all is as it was, and works on."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import nn

import aotlab
from aotlab._torch import undocumented_ops
from aotlab.guards.reached import Place

#: The object and the name of the function that replaces something and restores it. The interrupt comes before a call
#: that restores something, after this many other such calls.
MOMENTS = {
    "functions are put back, the first": (undocumented_ops, "setattr", 0),
    "functions are put back, in the midst": (undocumented_ops, "setattr", 5),
    "parameters are put back, the first": (Place, "write", 0),
    "parameters are put back, the second": (Place, "write", 1),
}


def interrupting(function, skip):
    """Return ``function``, but send an interrupt before one of the calls that restore what earlier calls replaced."""
    replaced = set()
    left = [skip]

    def replacement(*args):
        key = id(args[0]), args[1:-1]  # the last argument is the value to store
        if key in replaced:
            if left[0] == 0:
                signal.raise_signal(signal.SIGINT)
            left[0] -= 1
        replaced.add(key)
        return function(*args)

    return replacement


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """Restore Python's handler of SIGINT, because it is ignored if the tests run in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("fresh_dynamo")  # which replaces some functions of torch's when it is loaded
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupt_while_all_is_put_back(moment, monkeypatch):
    """It is put off until all is in its place; the model is the user's, torch is torch, and the next call compiles."""
    model = nn.Linear(4, 4)
    before = [id(p) for p in model.parameters()], torch.manual_seed, torch.from_numpy
    handler = signal.getsignal(signal.SIGINT)
    function = aotlab.compile(model, backend="eager")
    x = torch.ones(3, 4)
    owner, name, skip = MOMENTS[moment]
    monkeypatch.setattr(owner, name, interrupting(getattr(owner, name, setattr), skip), raising=False)

    def calls():
        for _ in range(1000):  # it may come a moment later, and after the first call
            function(x)

    with pytest.raises(KeyboardInterrupt):
        calls()
    assert ([id(p) for p in model.parameters()], torch.manual_seed, torch.from_numpy) == before
    assert signal.getsignal(signal.SIGINT) is handler
    torch.manual_seed(0)
    assert torch.equal(function(x), model(x))
    function(x).sum().backward()
    assert model.weight.grad is not None
