"""The engine, broken on purpose: each mutant makes one mistake that a rewrite of a stage could make.

The random programs are worth what they catch. Each mutant here is a plausible bug (a rule of the run-time
wrapper left out, a guard forgotten, a wrong value saved); the test-suite installs them one after the other and
demands that the programs notice. A mutant patches functions of the stages for the length of a ``with`` block; functions
compiled before or after the block are not touched.

Examples
--------
>>> [mutant.name for mutant in MUTANTS][:3]
['epilogue skipped', 'mutation hidden from autograd', 'wrong mutated value']
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotlab.ir.metadata import OutputType
from aotlab.stages import dedupe, partition, runtime, trace

#: Replaces a function: gets the original, returns what takes its place.
Change = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A mistake: its ``name``, what it ``breaks`` as a sentence, and the functions of the engine that it changes.

    Each of ``changes`` is (owner, name of the function, change). One is enough, except where a second guard stands
    behind the first and would let the call run eagerly.
    """

    name: str
    breaks: str
    changes: tuple[tuple[Any, str, Change], ...]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Break the engine for the length of a ``with`` block."""
        originals = [(owner, name, vars(owner)[name]) for owner, name, _ in self.changes]
        for (owner, name, change), (_, _, original) in zip(self.changes, originals, strict=True):
            setattr(owner, name, change(original))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


# --- the epilogue ------------------------------------------------------------------------------------------------


def _skip(_: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: None


def _hide_mutations(original: Callable[..., Any]) -> Callable[..., Any]:
    def mutations(self: Any, results: dict[int, str]) -> None:
        first = len(self.w.lines)
        original(self, results)
        for index in range(first, len(self.w.lines)):
            self.w.lines[index] = re.sub(r"(\w+)\.copy_\(", r"\1.detach().copy_(", self.w.lines[index])

    return mutations


def _wrong_mutations(original: Callable[..., Any]) -> Callable[..., Any]:
    def mutations(self: Any, results: dict[int, str]) -> None:
        original(self, {index: f"{expression}.mul(2)" for index, expression in results.items()})

    return mutations


def _swap_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def outputs(self: Any, results: dict[int, str]) -> list[str]:
        expressions: list[str] = original(self, results)
        return expressions[::-1]

    return outputs


def _detach_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def outputs(self: Any, results: dict[int, str]) -> list[str]:
        expressions: list[str] = original(self, results)
        return [
            f"{expression}.detach()" if info.requires_grad and info.output_type is OutputType.NON_ALIAS else expression
            for expression, info in zip(expressions, self.meta.output_info, strict=True)
        ]

    return outputs


def _lose_identity(original: Callable[..., Any]) -> Callable[..., Any]:
    def outputs(self: Any, results: dict[int, str]) -> list[str]:
        expressions: list[str] = original(self, results)
        return [
            f"{expression}.view_as({expression})" if info.views == () else expression
            for expression, info in zip(expressions, self.meta.output_info, strict=True)
        ]

    return outputs


def _copy_views(original: Callable[..., Any]) -> Callable[..., Any]:
    def write_views(self: Any, name: str, *rest: Any) -> None:
        original(self, name, *rest)
        self.w.add(f"{name} = {name}.clone()")

    return write_views


def _first_window(original: Callable[..., Any]) -> Callable[..., Any]:
    def view_call(self: Any, base: str, step: Any) -> str:
        if step.target in ("aten.select.int", "aten.slice.Tensor") and len(step.args) > 1 and step.args[1]:
            dim, start, *rest = step.args
            if step.target == "aten.slice.Tensor" and rest and isinstance(rest[0], int):
                # As long as before, but from the beginning.
                rest[0] -= start
            step = replace(step, args=(dim, 0, *rest))
        return str(original(self, base, step))

    return view_call


# --- guards and calling convention -------------------------------------------------------------------------------


def _without_conditions(pattern: str) -> Change:
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
    """Let calls with duplicates pass torch's own guards, which want every tensor once."""

    def guards(self: Any) -> None:
        if any(first != position for position, first in enumerate(self.state.same_as)):
            self.parts = replace(self.parts, tensors_hold=lambda *tensors: True)
        original(self)

    return guards


# --- the backward ------------------------------------------------------------------------------------------------


def _drop_tangent(original: Callable[..., Any]) -> Callable[..., Any]:
    def derive(self: Any, segment: int, pattern: Sequence[bool]) -> list[torch.Tensor | None]:
        defined = [index for index, wanted in enumerate(pattern) if wanted]
        if len(defined) > 1:
            pattern = [wanted and index != defined[-1] for index, wanted in enumerate(pattern)]
        result: list[torch.Tensor | None] = original(self, segment, pattern)
        return result

    return derive


def _zeros_for_none(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, saved: Any, tangents: Any) -> list[torch.Tensor]:
        found = original(self, saved, tangents)
        fakes = [fake for _, fake in self._trace.placeholders]
        return [
            torch.zeros(fakes[i].shape, dtype=fakes[i].dtype, device=fakes[i].device)
            if gradient is None and i < len(fakes)
            else gradient
            for gradient, i in zip(found, self.wanted, strict=True)
        ]

    return call


def _swap_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, saved: Any, tangents: Any) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = original(self, saved, tangents)
        return found[::-1]

    return call


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="epilogue skipped",
        breaks="The new value of a mutated input is computed and never written.",
        changes=((runtime.Generator, "_mutations", _skip),),
    ),
    Mutant(
        name="mutation hidden from autograd",
        breaks="A mutated input gets its new value, but the gradient does not flow through it.",
        changes=((runtime.Generator, "_mutations", _hide_mutations),),
    ),
    Mutant(
        name="wrong mutated value",
        breaks="A mutated input is given something else than its new value.",
        changes=((runtime.Generator, "_mutations", _wrong_mutations),),
    ),
    Mutant(
        name="swapped outputs",
        breaks="The outputs come back in reverse order.",
        changes=((runtime.Generator, "_outputs", _swap_outputs),),
    ),
    Mutant(
        name="requires_grad lost",
        breaks="A differentiable output comes back detached.",
        changes=((runtime.Generator, "_outputs", _detach_outputs),),
    ),
    Mutant(
        name="identity lost",
        breaks="An output that is an input, or another output, comes back as a view of it.",
        changes=((runtime.Generator, "_outputs", _lose_identity),),
    ),
    Mutant(
        name="view returned as a copy",
        breaks="An output that aliases something comes back with memory of its own.",
        changes=((runtime.Generator, "_write_views", _copy_views),),
    ),
    Mutant(
        name="wrong offset",
        breaks="A window into a tensor is made again at its beginning.",
        changes=((runtime.Generator, "_view_call", _first_window),),
    ),
    Mutant(
        name="grad mode forgotten",
        breaks="The grad mode that the function leaves behind is not set.",
        changes=((runtime.Generator, "_grad_mode_left", _skip),),
    ),
    Mutant(
        name="stale tensor guard",
        breaks="An entry serves tensors of other shapes, dtypes and requires_grad.",
        changes=((runtime.Generator, "_miss", _without_conditions("tensors_hold")),),
    ),
    Mutant(
        name="stale identity guard",
        breaks="An entry that was compiled for one tensor passed twice serves two tensors.",
        changes=((runtime.Generator, "_miss", _without_conditions(r"^\w+ is not \w+$")),),
    ),
    Mutant(
        name="stale value guard",
        breaks="An entry serves another Python number than it was compiled for.",
        changes=((runtime.Generator, "_miss", _without_conditions(r"^\w+ != -?\d+$")),),
    ),
    Mutant(
        name="missing dedupe",
        breaks="A tensor that is passed twice becomes two inputs.",
        changes=(
            (dedupe, "run", _keep_duplicates),
            (runtime.Generator, "_overlap_guard", _skip),
            (runtime.Generator, "_guards", _allow_duplicates),
        ),
    ),
    Mutant(
        name="dropped tangent",
        breaks="The last of several outputs contributes nothing to the gradients.",
        changes=((trace.Trace, "derive", _drop_tangent),),
    ),
    Mutant(
        name="zeros for None",
        breaks="An input that no output depends on gets zeros for a gradient.",
        changes=((runtime.Backward, "__call__", _zeros_for_none),),
    ),
    Mutant(
        name="swapped gradients",
        breaks="The gradients of the inputs are given to one another.",
        changes=((runtime.Backward, "__call__", _swap_gradients),),
    ),
    Mutant(
        name="mutated input saved",
        breaks="The backward uses an input that the epilogue has overwritten since.",
        changes=((partition, "_save_clones", _skip),),
    ),
)
