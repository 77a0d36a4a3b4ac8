"""Call a function, change one thing, call it again, change it back and call it a third time, as eager and compiled."""

from __future__ import annotations

import pytest
import torch
from torch.utils import _pytree as pytree

from aotlab.errors import RefusedError
from tests.engine_helpers import behind, compiled, keeping_functions

ROOTS: list[torch.Tensor] = []
MODES = pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])


def var(values, *, grad, dtype=None, nonleaf=False):
    """Make a tensor of given values, and remember its leaf so that its gradient is compared."""
    tensor = torch.tensor(values, dtype=dtype)
    if not grad or not tensor.dtype.is_floating_point:
        return tensor
    ROOTS.append(tensor.requires_grad_())
    return tensor * 1 if nonleaf else tensor


def described(value):
    """Turn a result into something that compares by value, nan and -0.0 included."""
    if isinstance(value, torch.Tensor):
        flags = str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad, value.is_leaf
        return *flags, [repr(v) for v in value.detach().flatten().tolist()]
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [described(v) for v in value]
    return repr(value)


def observed(run, make):
    """Call ``run`` with fresh arguments; return everything that a caller could see, gradients included."""
    ROOTS.clear()
    arguments = make()
    try:
        out = run(*arguments)
    except RefusedError:
        raise
    except Exception as error:  # noqa: BLE001  # eager's own, to be compared
        return type(error), str(error)
    tensors = [leaf for leaf in pytree.tree_leaves((out, arguments)) if isinstance(leaf, torch.Tensor)]
    roots = list(ROOTS)
    outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if outputs:
        torch.autograd.backward([o.sum().abs() if o.is_complex() else o.sum() for o in outputs])
    gradients = [None if root.grad is None else described(root.grad) for root in roots]
    return described(out), [described(t) for t in tensors], gradients


def nothing():
    """Change nothing: the arguments differ."""


def two_calls(function, first, second=None, *, reason, change=nothing, undo=nothing, make=compiled):
    """Call three times and check the entries and values; ``reason`` is the sentence, or a part of it."""
    made = make(function)
    try:
        for step, arguments in ((nothing, first), (change, second or first), (undo, first)):
            step()
            expected = observed(function, arguments)
            assert expected == observed(made, arguments)
        entries = behind(made).entries
        assert len(entries) == 2, behind(made).recompiles
        (said,) = behind(made).recompiles
        assert reason in said
        assert behind(made).calls.eager == 0
        assert sorted(entry.calls for entry in entries) == [1, 2]  # a number that varies: the second entry serves all
    finally:
        undo()
    return made


def by_dynamo(made):
    """Return a compiler that uses `torch.compile` with our backend.

    Each graph's compiled function is added to ``made``.
    """
    return lambda function: torch.compile(function, backend=keeping_functions(made))


def dynamo_two_calls(function, first, second=None, *, change=nothing, undo=nothing, reason=None):
    """Assert that each call behind Dynamo is eager's; with ``reason`` also that our own guards noticed the change."""
    made = []
    f = by_dynamo(made)(function)
    try:
        for step, arguments in ((nothing, first), (change, second or first), (undo, first)):
            step()
            assert observed(function, arguments) == observed(f, arguments)
    finally:
        undo()
    assert sum(each.calls.compiled for each in made) == 3, [each.calls for each in made]
    if reason is not None:
        (said,) = [text for each in made for text in each.recompiles]
        assert reason in said
        assert len(made) == 1
    return made


def entered(*managers):
    """Make a (change, undo) pair that enters and leaves context managers."""
    made = []

    def change():
        for manager in managers:
            made.append(manager())
            made[-1].__enter__()

    def undo():
        while made:
            made.pop().__exit__(None, None, None)

    return change, undo


def assigned(setter, value, read):
    """Make a (change, undo) pair that calls a setter."""
    before = read()
    setter(before)  # on torch 2.15, setting a value to itself leaves other settings than never setting it
    return lambda: setter(value), lambda: setter(before)


def set_item(owner, key, value):
    """Make a (change, undo) pair for an item."""
    missing = object()
    before = owner.get(key, missing) if isinstance(owner, dict) else owner[key]

    def undo():
        if before is missing:
            owner.pop(key, None)
        else:
            owner[key] = before

    return lambda: owner.__setitem__(key, value), undo


def set_attribute(owner, name, value):
    """Make a (change, undo) pair for an attribute."""
    missing = object()
    in_dictionary = hasattr(owner, "__dict__") and not name.startswith("__")
    before = vars(owner).get(name, missing) if in_dictionary else getattr(owner, name)

    def undo():
        if before is missing:
            if name in vars(owner):
                delattr(owner, name)
        else:
            setattr(owner, name, before)

    return lambda: setattr(owner, name, value), undo


def hook(module, register, function):
    """Make a (change, undo) pair that registers a hook."""
    handles = []

    def undo():
        while handles:
            handles.pop().remove()

    return lambda: handles.append(getattr(module, register)(function)), undo


def set_attribute_of(tensor, name):
    """Make a (change, undo) pair that flips a tensor's requires_grad."""
    before = getattr(tensor, name)
    return lambda: setattr(tensor, name, not before), lambda: setattr(tensor, name, before)
