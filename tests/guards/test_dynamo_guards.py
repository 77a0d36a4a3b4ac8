"""Guards behind Dynamo: who notices what changed, and that the value is eager's.

Each test calls a compiled function, changes one thing, calls it again, changes it back and calls it a third time.
Dynamo notices what its own guards look at, and captures a second graph; how tensors share memory it does not look at,
and our guards behind its graph do. Both are asserted: which of the two noticed, and that nothing was compiled again.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # as everybody calls it

from tests.guards.test_kinds import MODES, ROOTS, by_dynamo, nothing, observed, var
from tests.guards.test_overlap import OVERLAPS, write_first, write_second

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def noticed(function, first, second=None, *, by, reason=None, change=nothing, undo=nothing):
    """Assert what the module's text says; ``by`` is "us" or "Dynamo", ``reason`` a part of our sentence."""
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
    """Two windows of a buffer begin or cease to overlap, or one of them moves; the code is the same for Dynamo."""
    first, second = OVERLAPS[pattern]
    noticed(function, first, second, by="us", reason="memory, and the function writes to an input")


def test_overlap_among_three():
    """Of three windows other pairs overlap."""

    def make(*parts):
        def arguments():
            base = torch.arange(1.0, 13.0)
            return tuple(base[part] for part in parts)

        return arguments

    def f(x, y, z):
        y.mul_(2)
        return x + y * z

    first = make(slice(0, 3), slice(2, 5), slice(6, 9))
    noticed(f, first, make(slice(0, 3), slice(5, 8), slice(6, 9)), by="us", reason="memory")


@MODES
def test_an_alias_without_a_view(grad):
    """``x`` and ``x.detach()``: one memory without an autograd relation, where there were two."""

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
    """One tensor in two places, where there were two: Dynamo looks at that itself."""

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


# --- what tensors are, and modes ---------------------------------------------------------------------------------


def test_requires_grad():
    """An input that begins to require grad, and one that ceases."""
    plain, training = (lambda g=g: (var([1.0, 2.0], grad=g),) for g in (False, True))
    noticed(lambda x: x * 2, plain, training, by="Dynamo")
    noticed(lambda x: x * 2, training, plain, by="Dynamo")


@MODES
def test_is_leaf(grad):
    """A leaf in place of a result, which a function may write only if it is none, or without grad mode."""

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


def test_grad_mode():
    """A call under no_grad after one with grad mode on."""
    noticed(
        lambda x: x * 2,
        lambda: (var([1.0, 2.0], grad=True),),
        by="Dynamo",
        change=lambda: torch.set_grad_enabled(False),
        undo=lambda: torch.set_grad_enabled(True),
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


def entered(manager):
    """Make a (change, undo) pair that enters and leaves a context manager."""
    made = []

    def change():
        made.append(manager())
        made[-1].__enter__()

    def undo():
        while made:
            made.pop().__exit__(None, None, None)

    return change, undo


@MODES
def test_inference_mode(grad):
    """A call under inference_mode after one without: what it returns is an inference tensor, or none."""
    change, undo = entered(torch.inference_mode)
    noticed(lambda x: x * 2, lambda: (var([1.0, 2.0], grad=grad),), by="Dynamo", change=change, undo=undo)


@MODES
def test_deterministic_algorithms(grad):
    """Deterministic algorithms, asked for after the trace; the function reads whether they are."""
    noticed(
        lambda x: x * (3 if torch.are_deterministic_algorithms_enabled() else 2),
        lambda: (var([1.0, 2.0], grad=grad),),
        by="Dynamo",
        change=lambda: torch.use_deterministic_algorithms(True),
        undo=lambda: torch.use_deterministic_algorithms(False),
    )


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
