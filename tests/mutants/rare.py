"""Mutants that random programs rarely catch; each of them has a program that was written for it.

``test_rare_mutants.py`` has the programs. Some need a second call that differs from the first in
exactly one thing. Others need something that the random programs do not do: differentiate one output by another, give
an object the address of an object that is gone, or use another partitioner than the default.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from aotlab.derivatives.backwards import Backward
from aotlab.guards import guarded_values as values
from aotlab.partition import partition_stage as partition
from aotlab.runtime.draft import Draft
from aotlab.runtime.edge_tensors import Edges
from aotlab.trace import memo, recorder
from aotlab.trace import sources as edges
from aotlab.trace.records import Source
from tests.mutants.guards import without_conditions
from tests.mutants.mutant import Mutant, skip
from tests.mutants.tracing import key_without


class _Address:
    """A guard that compares an object by its address and does not keep the object alive."""

    def __init__(self, value: Any) -> None:
        self.address = id(value)

    def holds(self, now: Any) -> bool:
        """Tell whether the address is the same."""
        return id(now) == self.address


def _know_by_address(original: Callable[..., Any]) -> Callable[..., Any]:
    def snapshot(value: Any, *settings: Any, **more: Any) -> Any:
        found = original(value, *settings, **more)
        return _Address(value) if isinstance(found, values.Value) and not found.is_plain else found

    return snapshot


def _see_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: {}


def _history_of_now(original: Callable[..., Any]) -> Callable[..., Any]:
    def through(self: Any, source: Source, done: Collection[int]) -> Any:
        return original(self, source, ())

    return through


def _zeros_for_undefined(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, saved: Any, tangents: Any) -> list[torch.Tensor | None]:
        tangents_of = self.trace.tangents
        numbers = next(
            given
            for given in tangents_of.of_entries
            if len(given) == len(tangents) and [tuple(tangents_of.fakes[n].stride()) for n in given] == self.strides
        )
        fakes = [tangents_of.fakes[n] for n in numbers]
        filled = [
            torch.zeros(fake.shape, dtype=fake.dtype) if tangent is None else tangent
            for fake, tangent in zip(fakes, tangents, strict=True)
        ]
        found: list[torch.Tensor | None] = original(self, saved, filled)
        return found

    return call


RARE: tuple[Mutant, ...] = (
    Mutant(
        name="stale window guard",
        breaks="An entry that was compiled for windows of one base serves windows that lie otherwise.",
        changes=((Draft, "miss", without_conditions("shares_memory_otherwise")),),
    ),
    Mutant(
        name="mutated input saved",
        breaks="The backward uses an input that the epilogue has overwritten since.",
        changes=((partition, "save_clones", skip),),
    ),
    Mutant(
        name="stale leaf guard",
        breaks="An entry that was compiled for a result serves a leaf.",
        changes=((Draft, "miss", without_conditions(r"\.is_leaf$")),),
    ),
    Mutant(
        name="objects known by address",
        breaks="An object that got the address of one that is gone passes for that one.",
        changes=((values, "snapshot", _know_by_address),),
    ),
    Mutant(
        name="views unseen",
        breaks="A gradient passes by an output that is a view of an input or of another output.",
        changes=((edges, "_view_edges", _see_nothing),),
    ),
    Mutant(
        name="history after the write",
        breaks="What was computed from an input before it was written gets the history that it has after.",
        changes=((Edges, "through", _history_of_now),),
    ),
    Mutant(
        name="strides not in the key",
        breaks="The recorder takes what an op gave on a tensor with other strides.",
        changes=((memo, "memo_key", key_without(1)), (recorder, "memo_key", key_without(1))),
    ),
    Mutant(
        name="dtype not in the key",
        breaks="The recorder takes what an op gave on a tensor of another dtype.",
        changes=((memo, "memo_key", key_without(2)), (recorder, "memo_key", key_without(2))),
    ),
    Mutant(
        name="undefined tangents as zeros",
        breaks="An output that was not used counts as used with a gradient of zeros.",
        changes=((Backward, "__call__", _zeros_for_undefined),),
    ),
)
