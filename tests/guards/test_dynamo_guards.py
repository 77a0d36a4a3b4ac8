"""Guards behind Dynamo: a change is noticed by Dynamo's guards or by ours, and the value is eager's.

Each test calls a compiled function, changes one thing, calls it again, changes it back and calls it a third time. If
Dynamo's own guards notice the change, Dynamo captures a second graph. Dynamo does not guard how tensors share memory;
our guards behind its graph do. Each test asserts which of the two noticed, and that the third call compiles nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

from tests.guards.test_overlap import OVERLAPS, THREE, write_first, write_one_of_three, write_second
from tests.guards.two_calls import MODES, ROOTS, assigned, by_dynamo, entered, nothing, observed, var

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def noticed(function, first, second=None, *, by, reason=None, change=nothing, undo=nothing):
    """Call three times and assert who notices the change.

    ``by`` is "us" or "Dynamo", ``reason`` a part of our sentence.
    """
    made = []
    f = by_dynamo(made)(function)
    try:
        for step, arguments in ((nothing, first), (change, second or first), (undo, first)):
            step()
            expected = observed(function, arguments)
            assert expected == observed(f, arguments)
    finally:
        undo()
    assert [each.calls.eager for each in made] == [0] * len(made)
    sentences = [text for each in made for text in each.recompiles]
    if by == "us":
        assert len(made) == 1
        (said,) = sentences
        assert reason in said
        assert [entry.calls for entry in made[0].entries] == [1, 2]
    else:
        assert sentences == []
        assert [[entry.calls for entry in each.entries] for each in made] == [[2], [1]]


# --- how inputs share memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [write_first, write_second])
@pytest.mark.parametrize("pattern", OVERLAPS)
def test_overlap(pattern, function):
    """Two windows of a buffer start or stop overlapping, or one of them moves. Only our guards notice."""
    first, second = OVERLAPS[pattern]
    noticed(function, first, second, by="us", reason="memory, and the function writes to an input")


def test_overlap_among_three():
    """Of three windows, other pairs overlap."""
    noticed(write_one_of_three, *THREE, by="us", reason="memory")


@MODES
def test_an_alias_without_a_view(grad):
    """``x`` and ``x.detach()`` share memory without an autograd relation; the other call has two separate tensors."""

    def separate():
        x = var([1.0, 2.0], grad=grad, nonleaf=True)
        return x, torch.tensor([5.0, 6.0])

    def alias():
        x = var([1.0, 2.0], grad=grad, nonleaf=True)
        return x, x.detach()

    if not grad:
        noticed(write_first, separate, alias, by="us", reason="`x` and `y` share memory")
        return
    made = []
    f = by_dynamo(made)(write_first)
    for arguments in (separate, alias, separate):
        assert observed(write_first, arguments) == observed(f, arguments)
    assert sum(each.calls.eager for each in made) == 1  # the write gives a history to memory that is shared


@MODES
def test_the_same_tensor_twice(grad):
    """One tensor is passed twice, and the other call has two tensors: Dynamo notices that itself."""

    def two():
        return var([1.0, 2.0], grad=grad, nonleaf=True), var([3.0, 4.0], grad=grad, nonleaf=True)

    def one():
        x = var([1.0, 2.0], grad=grad, nonleaf=True)
        return x, x

    noticed(write_first, two, one, by="Dynamo")


@MODES
def test_an_offset_that_moves(grad):
    """``as_strided`` reads where a window begins in its storage, which Dynamo's guards know nothing of."""

    def window(start):
        def make():
            base = torch.arange(1.0, 9.0)
            if grad:
                ROOTS.append(base.requires_grad_())
            return (base[start : start + 4],)

        return make

    noticed(
        lambda x: x * x.as_strided((2,), (2,)).sum(),
        window(0),
        window(3),
        by="us",
        reason="begins at element 3 of its storage where the compiled entry expects 0",
    )


# --- properties of tensors, and modes ----------------------------------------------------------------------------


def test_requires_grad():
    """An input that begins to require grad, and one that ceases."""
    plain, training = (lambda g=g: (var([1.0, 2.0], grad=g),) for g in (False, True))
    noticed(lambda x: x * 2, plain, training, by="Dynamo")
    noticed(lambda x: x * 2, training, plain, by="Dynamo")


@MODES
def test_is_leaf(grad):
    """A leaf instead of a non-leaf. Only a non-leaf may be written in grad mode."""

    def f(x):
        with torch.no_grad():
            x.mul_(2)
        return x * 3

    noticed(
        f,
        lambda: (var([1.0, 2.0], grad=True, nonleaf=grad),),
        lambda: (var([1.0, 2.0], grad=True, nonleaf=not grad),),
        by="us",
        reason=f"`x` has is_leaf={grad} where the compiled entry expects {not grad}",
    )


@MODES
def test_autocast(grad):
    """A call under autocast after one without, and under another dtype of it."""

    def autocast(enabled, dtype=torch.bfloat16):
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)
        torch.clear_autocast_cache()

    make = lambda: (var([[1.0, 2.0], [3.0, 4.0]], grad=grad),)  # noqa: E731  # short
    noticed(lambda x: x @ x, make, by="Dynamo", change=lambda: autocast(True), undo=lambda: autocast(False))
    autocast(True)
    try:
        noticed(
            lambda x: x @ x + 1,
            make,
            by="Dynamo",
            change=lambda: autocast(True, torch.float16),
            undo=lambda: autocast(True),
        )
    finally:
        autocast(False)


CHANGED_MODES = {
    "grad mode": (lambda x: x * 2, lambda: entered(torch.no_grad)),
    "inference mode": (lambda x: x * 2, lambda: entered(torch.inference_mode)),
    "deterministic algorithms": (
        lambda x: x * (3 if torch.are_deterministic_algorithms_enabled() else 2),
        lambda: assigned(torch.use_deterministic_algorithms, True, torch.are_deterministic_algorithms_enabled),
    ),
}


@MODES
@pytest.mark.parametrize("mode", CHANGED_MODES)
def test_mode(mode, grad):
    """Dynamo notices a call in another mode. Under inference_mode the result is an inference tensor."""
    function, make = CHANGED_MODES[mode]
    change, undo = make()
    noticed(function, lambda: (var([1.0, 2.0], grad=grad),), by="Dynamo", change=change, undo=undo)


# --- flags of torch's backends -----------------------------------------------------------------------------------


@MODES
def test_attention_kernels(grad):
    """Which kernels attention may use: Dynamo does not look, and the kernel would stay the same."""

    def make():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, 2, 8, 16, generator=generator)
        if grad:
            ROOTS.append(x.requires_grad_())
        return (x,)

    noticed(
        lambda x: F.scaled_dot_product_attention(x, x, x),
        make,
        by="us",
        reason="torch.backends.cuda.flash_sdp_enabled() is False where the compiled entry expects True",
        change=lambda: torch.backends.cuda.enable_flash_sdp(False),
        undo=lambda: torch.backends.cuda.enable_flash_sdp(True),
    )
