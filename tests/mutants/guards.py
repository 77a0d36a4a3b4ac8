"""Mutants of the guards, and of the deduplication and the memory of a call's arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from aotlab.capture import dedupe
from aotlab.runtime.draft import Draft
from aotlab.runtime.prologue import Prologue
from tests.mutants.mutant import Change, Mutant, skip


def without_conditions(pattern: str) -> Change:
    """Leave out the guards that match ``pattern``."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def miss(self: Any, conditions: Sequence[str]) -> None:
            kept = [condition for condition in conditions if not re.search(pattern, condition)]
            if kept:
                original(self, kept)

        return miss

    return change


def _keep_duplicates(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(call: Any, strategy: Any) -> dedupe.DedupeRecord:
        positions = call.tensor_positions
        return dedupe.DedupeRecord(
            strategy=strategy,
            kept=positions,
            source=tuple(range(len(positions))),
            positions=positions,
            names=tuple(call.state.names[position] for position in positions),
        )

    return run


def _allow_duplicates(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let calls with duplicate tensors pass torch's own guards, which require that all tensors are distinct."""

    def write(self: Any) -> Any:
        if any(first != position for position, first in enumerate(self.state.same_as)):
            self.parts = replace(self.parts, tensors_hold=lambda *tensors: True)
        return original(self)

    return write


GUARDS: tuple[Mutant, ...] = (
    Mutant(
        name="stale tensor guard",
        breaks="An entry serves tensors of other shapes, dtypes and requires_grad.",
        changes=((Draft, "miss", without_conditions("tensors_hold")),),
    ),
    Mutant(
        name="stale identity guard",
        breaks="An entry that was compiled for one tensor passed twice serves two tensors.",
        changes=((Draft, "miss", without_conditions(r"^\w+ is not \w+$")),),
    ),
    Mutant(
        name="stale value guard",
        breaks="An entry serves another Python number than it was compiled for.",
        changes=((Draft, "miss", without_conditions(r"^\w+ != -?\d+$")),),
    ),
    Mutant(
        name="missing dedupe",
        breaks="A tensor that is passed twice becomes two inputs.",
        changes=(
            (dedupe, "run", _keep_duplicates),
            (Prologue, "_overlaps", skip),
            (Prologue, "write", _allow_duplicates),
        ),
    ),
    Mutant(
        name="stale flag guard",
        breaks="An entry serves another flag, or something else in place of None.",
        changes=((Draft, "miss", without_conditions(r" is not (True|False|None)$")),),
    ),
    Mutant(
        name="stale text guard",
        breaks="An entry serves another text, or something that is none.",
        changes=((Draft, "miss", without_conditions(r"is not str$|^\w+ != '")),),
    ),
    Mutant(
        name="stale settings guard",
        breaks="An entry that was compiled in one grad mode serves calls in the other.",
        changes=((Draft, "miss", without_conditions("settings_hold")),),
    ),
    Mutant(
        name="stale overlap guard",
        breaks="An entry that was compiled for inputs apart serves inputs that share memory.",
        changes=((Prologue, "_overlaps", skip),),
    ),
    Mutant(
        name="stale offset guard",
        breaks="An entry that read where an input begins serves inputs that begin elsewhere.",
        changes=((Draft, "miss", without_conditions(r"\.storage_offset\(\) != ")),),
    ),
)
