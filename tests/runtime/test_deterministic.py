"""Deterministic mode at the call and at the backward: values, errors and filling of new memory are eager's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional as F  # noqa: N812  # as everybody writes it

from tests.engine_helpers import compiled


def index(*shape):
    """Make an index inside of the function, which may not capture one."""
    return torch.tensor([0, 1, 1]).view(shape or 3)


PROGRAMS = {
    "index_add": lambda x: torch.zeros(3, 4).index_add(0, index(), x[:3]),
    "an index, which the backward adds at": lambda x: x[index()],
    "gather": lambda x: x.gather(0, index(3, 1)),
    "embedding": lambda x: F.embedding(index(), x),
    "scatter_reduce": lambda x: x.scatter_reduce(0, index(3, 1), x[:3], "mean"),
    "put_, which has no such form": lambda x: (x * 1).put_(index(), torch.ones(3)),
    "max_unpool1d, which has none": lambda x: F.max_unpool1d(*F.max_pool1d(x.view(1, 4, 4), 2, return_indices=True), 2),
    "bilinear": lambda x: F.interpolate(x.view(1, 1, 4, 4), scale_factor=2, mode="bilinear"),
    "whether it is on": lambda x: x * 2 if torch.are_deterministic_algorithms_enabled() else x * 3,
    "whether it warns": lambda x: x * 2 if torch.is_deterministic_algorithms_warn_only_enabled() else x * 3,
    "whether it fills": lambda x: x * 2 if torch.utils.deterministic.fill_uninitialized_memory else x * 3,
}

FRESH = {
    "empty": lambda x: torch.empty(3) if x.dim() else x,
    "empty, integers": lambda x: torch.empty(3, dtype=torch.int32) if x.dim() else x,
    "empty_like": torch.empty_like,
    "new_empty": lambda x: x.new_empty(2),
}

#: Whether it is on, whether it only warns, and whether fresh memory is filled.
MODES = {
    "off": (False, False, True),
    "on": (True, False, True),
    "warns": (True, True, True),
    "fills nothing": (True, False, False),
}


@contextmanager
def mode(name: str) -> Iterator[None]:
    """Set it for a block."""
    on, warns, fills = MODES[name]
    torch.use_deterministic_algorithms(on, warn_only=warns)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


def outcome(function, forward, backward, *, grad=True):
    """Return the results or errors of two calls."""
    found = []
    for _ in range(2):
        x = torch.linspace(0, 1, 16).view(4, 4).requires_grad_(grad)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # ops of a graph write theirs to stderr, past Python
            try:
                with mode(forward):
                    y = function(x)
                found.append(str(y.tolist()))  # as text: a nan is no other nan
                if y.requires_grad:
                    with mode(backward):
                        y.sum().backward()
                    found.append(x.grad.tolist())
            except RuntimeError as error:
                found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("forward", "backward"), [("off", "on"), ("on", "off"), ("warns", "on"), ("fills nothing", "off")]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_at_the_call_and_at_the_backward(program, forward, backward):
    """Forward and backward each use the deterministic mode that is active when they run."""
    f = compiled(PROGRAMS[program])
    assert outcome(PROGRAMS[program], forward, backward) == outcome(f, forward, backward)


@pytest.mark.parametrize("around", ["on", "warns"])
@pytest.mark.parametrize("program", FRESH)
def test_fresh_memory_is_filled(program, around):
    """Uninitialized memory is filled with nan or the largest integer."""
    f = compiled(FRESH[program])
    assert outcome(FRESH[program], around, "off", grad=False) == outcome(f, around, "off", grad=False)
    assert f.calls.compiled == 2


@pytest.mark.parametrize("program", PROGRAMS)
def test_switched_from_call_to_call(program):
    """One function follows the mode of each call."""
    f = compiled(PROGRAMS[program])
    for each in ("off", "on", "warns", "off", "fills nothing", "on"):
        assert outcome(PROGRAMS[program], each, "off") == outcome(f, each, "off")


@pytest.mark.parametrize("program", PROGRAMS)
def test_behind_dynamo(program):
    """Behind Dynamo, the call and the backward also follow the current mode."""
    torch.compiler.reset()
    f = torch.compile(PROGRAMS[program], backend="aotlab", options={"compiler": "eager"})
    for forward, backward in (("off", "on"), ("on", "off"), ("warns", "on"), ("fills nothing", "off"), ("off", "on")):
        assert outcome(PROGRAMS[program], forward, backward) == outcome(f, forward, backward)


@pytest.mark.parametrize("program", FRESH)
def test_fresh_memory_is_filled_behind_dynamo(program):
    """Behind Dynamo, uninitialized memory is filled with nan or the largest integer if the run-time mode demands it."""
    torch.compiler.reset()
    f = torch.compile(FRESH[program], backend="aotlab", options={"compiler": "eager"})
    for around in ("on", "warns"):
        assert outcome(FRESH[program], around, "off", grad=False) == outcome(f, around, "off", grad=False)
