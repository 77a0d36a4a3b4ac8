"""Tensors that a function does not receive as arguments: their identity, their attributes and their lifetime.

Guards neither keep such tensors alive nor hold weak references to them: `torch.utils.swap_tensors`, and with it
``module.to(…)`` and ``load_state_dict`` under `set_swap_module_params_on_conversion`, refuse tensors that have any.
"""

from __future__ import annotations

import gc
import types
import weakref

import pytest
import torch
from torch import nn

from aotlab.guards.guarded_values import snapshot
from tests.engine_helpers import behind, compiled
from tests.guards.two_calls import MODES, by_dynamo, set_attribute, two_calls, var

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture
def swapping():
    """Let modules swap their parameters where they are converted."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


# --- swapped, replaced -------------------------------------------------------------------------------------------


@MODES
def test_a_tensor_outside_is_swapped(grad):
    """`swap_tensors` works after a compiled call. A tensor with other metadata recompiles."""
    held, other = torch.ones(2, 3), torch.ones(5)

    def swap():
        torch.utils.swap_tensors(held, other)

    two_calls(
        lambda x: x * held.shape[0],
        lambda: (var([1.0, 2.0], grad=grad),),
        change=swap,
        undo=swap,
        reason="`held` has shape (5,) where the compiled entry expects (2, 3)",
    )


def test_a_tensor_outside_is_swapped_for_its_like():
    """Swapping in a tensor with equal metadata compiles nothing, because no trace reads its values."""
    held = torch.ones(2, 3)
    f = compiled(lambda x: x * held.shape[0])
    assert f(torch.ones(1)).item() == 2.0
    torch.utils.swap_tensors(held, torch.zeros(2, 3))
    assert f(torch.ones(1)).item() == 2.0
    assert f.recompiles == ()


@MODES
def test_arguments_are_swapped(grad):
    """Neither a compiled call nor its backward leaves a weak reference to an argument."""
    f = compiled(lambda x, y: x * y)
    x, y = (torch.ones(2, requires_grad=grad) for _ in range(2))
    out = f(x, y)
    if grad:
        out.sum().backward()
    del out
    for tensor in (x, y):
        assert weakref.getweakrefs(tensor) == []
        torch.utils.swap_tensors(tensor, torch.full((2,), 3.0, requires_grad=grad))
    assert f(x, y).tolist() == [9.0, 9.0]


MAKERS = {"direct": compiled, "dynamo": lambda module: by_dynamo([])(module)}


def trained(module, x):
    """Call a module, and give its gradients to its parameters."""
    out = module(x)
    out.sum().backward()
    return out.detach()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.usefixtures("swapping")
def test_a_module_is_converted_by_swapping(make):
    """``module.to(torch.float64)`` in place of its parameters, after a compiled training step; the next is eager's."""
    module = nn.Linear(2, 3)
    kept = dict(module.named_parameters())
    f = MAKERS[make](module)
    trained(f, torch.ones(1, 2))
    module.to(torch.float64)
    assert {name: id(p) for name, p in module.named_parameters()} == {name: id(p) for name, p in kept.items()}
    module.zero_grad()
    x = torch.full((1, 2), 2.0, dtype=torch.float64)
    out = trained(f, x)
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    assert torch.equal(trained(module, x), out)
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(module.parameters(), gradients, strict=True))
    if make == "direct":
        assert behind(f).recompiles == (
            "`weight` has dtype torch.float64 where the compiled entry expects torch.float32",
        )


@pytest.mark.parametrize("swap", [False, True], ids=["assigned", "swapped"])
@pytest.mark.parametrize("make", MAKERS)
def test_a_state_is_loaded_by_assignment(make, swap):
    """``load_state_dict(assign=True)``: the parameters are others, and so is the result."""
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        module, other = nn.Linear(2, 3), nn.Linear(2, 3)
        f = MAKERS[make](module)
        x = torch.ones(1, 2)
        trained(f, x)
        module.load_state_dict(other.state_dict(), assign=True)
        module.requires_grad_()
        expected = other(x)
        assert torch.equal(expected, trained(f, x))
        assert module.weight.grad.tolist() == [[1.0, 1.0]] * 3
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# --- lifetimes ---------------------------------------------------------------------------------------------------


def test_tensors_are_not_kept_alive():
    """The entries do not keep a tensor alive that a closure, a container, an object or a module no longer holds."""
    space = types.SimpleNamespace(tensor=torch.ones(3))
    tensors, module = [torch.ones(4)], nn.Linear(2, 2)
    many = [torch.ones(1) for _ in range(9)]

    def f(x):
        return x * space.tensor.shape[0] * tensors[0].shape[0] * many[0].dim()

    compiled_f, compiled_module = compiled(f), compiled(module)
    compiled_f(torch.ones(1))
    compiled_module(torch.ones(1, 2))
    references = [weakref.ref(t) for t in (space.tensor, tensors[0], module.weight, many[0])]
    space.tensor = tensors[0] = many[0] = None
    module.weight = nn.Parameter(torch.ones(2, 2))
    gc.collect()
    assert [reference() is None for reference in references] == [True] * 4
    assert (len(compiled_f.entries), len(behind(compiled_module).entries)) == (1, 1)


def test_a_tensor_at_the_address_of_another():
    """A tensor at the address of a freed one is accepted only if it has the same metadata."""
    for _ in range(10):  # an object of another thread may have taken the address meanwhile
        held = torch.ones(2)
        known = snapshot((held,))
        address = id(held)
        assert known.holds((held,))
        del held
        others = []  # kept alive, so that the free memory is used up; the address is usually reused at once
        while len(others) < 20_000 and (not others or id(others[-1]) != address):
            others.append(torch.ones(3))
            assert not known.holds((others[-1],))
        if id(others[-1]) == address:
            return
    raise AssertionError("no tensor got the address of the one that is gone")


# --- attributes --------------------------------------------------------------------------------------------------

OUTSIDE = torch.ones(1)
OUTSIDE.scale = 2.0
OUTSIDE.unread = 0
HELD = {"tensor": OUTSIDE}

ATTRIBUTES = {
    "plain": (lambda x: x * OUTSIDE.scale, "scale"),
    "in a container": (lambda x: x * HELD["tensor"].scale, "scale"),
    "by string": (lambda x: x * getattr(OUTSIDE, "un" + "read"), "unread"),
    "absent": (lambda x: x * getattr(OUTSIDE, "later", 1), "later"),
}


@MODES
@pytest.mark.parametrize("kind", ATTRIBUTES)
def test_attributes_of_a_tensor_outside(kind, grad):
    """A function that reads an attribute of a captured tensor runs eagerly."""
    function, name = ATTRIBUTES[kind]
    change, undo = set_attribute(OUTSIDE, name, 3.0)
    f = compiled(function)
    try:
        for _ in range(2):
            x = var([1.0, 2.0], grad=grad)
            assert torch.equal(f(x), function(x))
            change()
    finally:
        undo()
    assert f.calls.compiled == 0


def test_an_attribute_that_comes_later():
    """Code that reads an attribute by a computed name sees an attribute that is set later."""
    held = torch.ones(1)
    f = compiled(lambda x: x * getattr(held, "sca" + "le", 1))
    assert f(torch.ones(1)).item() == 1.0
    held.scale = 2.0
    assert f(torch.ones(1)).item() == 2.0


def test_attributes_that_the_code_does_not_mention():
    """Attributes of a tensor that the code does not mention may change without a recompile."""
    held = torch.ones(1)
    held.unread = 0
    f = compiled(lambda x: x * len(held.shape))
    f(torch.ones(1))
    held.unread, held.new = 1, 2
    assert f(torch.ones(1)).item() == 1.0
    assert f.recompiles == ()
    assert f.calls.compiled == 2
