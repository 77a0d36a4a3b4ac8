"""The engine, broken on purpose: each mutant makes one mistake that a rewrite of a stage could make.

The random programs are worth what they catch. Each mutant here is a plausible bug (a rule of the run-time
wrapper left out, a guard forgotten, a wrong value saved); the test-suite installs them one after the other and
demands that the programs notice. A mutant patches one function of a stage for the length of a ``with`` block; functions
compiled before or after the block are not touched.

Examples
--------
>>> [mutant.name for mutant in MUTANTS][:3]
['epilogue skipped', 'mutation hidden from autograd', 'wrong mutated value']
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotlab import torch_internals
from aotlab.ir.metadata import OutputType
from aotlab.stages import dedupe, partition, runtime, trace

#: Replaces a function: gets the original, returns what takes its place.
Change = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A mistake: its ``name``, what it ``breaks`` as a sentence, and the function of the engine that it changes."""

    name: str
    breaks: str
    owner: Any
    function: str
    change: Change

    def installed(self) -> AbstractContextManager[None]:
        """Break the engine for the length of a ``with`` block."""
        return _patched(self.owner, self.function, self.change)


@contextmanager
def _patched(owner: Any, name: str, change: Change) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, change(original))
    try:
        yield
    finally:
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


# --- the backward ------------------------------------------------------------------------------------------------


def _drop_tangent(original: Callable[..., Any]) -> Callable[..., Any]:
    def derive(self: Any, pattern: Sequence[bool]) -> list[torch.Tensor | None]:
        defined = [index for index, wanted in enumerate(pattern) if wanted]
        if len(defined) > 1:
            pattern = [wanted and index != defined[-1] for index, wanted in enumerate(pattern)]
        result: list[torch.Tensor | None] = original(self, pattern)
        return result

    return derive


def _zeros_for_none(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, saved: Any, tangents: Any) -> list[torch.Tensor]:
        found = original(self, saved, tangents)
        leaves = [leaf for leaf in self._trace.leaves if leaf is not None]
        return [
            torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device) if gradient is None else gradient
            for gradient, leaf in zip(found, leaves, strict=True)
        ]

    return call


def _swap_gradients(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, saved: Any, tangents: Any) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = original(self, saved, tangents)
        return found[::-1]

    return call


def _forget_versions(original: Callable[..., Any]) -> Callable[..., Any]:
    def use(self: Any, mask: int) -> list[torch.Tensor]:
        if self._values is not None:
            self._versions = [torch_internals.version_of(value) for value in self._values]
        values: list[torch.Tensor] = original(self, mask)
        return values

    return use


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="epilogue skipped",
        breaks="The new value of a mutated input is computed and never written.",
        owner=runtime._Generator,
        function="_mutations",
        change=_skip,
    ),
    Mutant(
        name="mutation hidden from autograd",
        breaks="A mutated input gets its new value, but the gradient does not flow through it.",
        owner=runtime._Generator,
        function="_mutations",
        change=_hide_mutations,
    ),
    Mutant(
        name="wrong mutated value",
        breaks="A mutated input is given something else than its new value.",
        owner=runtime._Generator,
        function="_mutations",
        change=_wrong_mutations,
    ),
    Mutant(
        name="swapped outputs",
        breaks="The outputs come back in reverse order.",
        owner=runtime._Generator,
        function="_outputs",
        change=_swap_outputs,
    ),
    Mutant(
        name="requires_grad lost",
        breaks="A differentiable output comes back detached.",
        owner=runtime._Generator,
        function="_outputs",
        change=_detach_outputs,
    ),
    Mutant(
        name="identity lost",
        breaks="An output that is an input, or another output, comes back as a view of it.",
        owner=runtime._Generator,
        function="_outputs",
        change=_lose_identity,
    ),
    Mutant(
        name="view returned as a copy",
        breaks="An output that aliases something comes back with memory of its own.",
        owner=runtime._Generator,
        function="_write_views",
        change=_copy_views,
    ),
    Mutant(
        name="wrong offset",
        breaks="A window into a tensor is made again at its beginning.",
        owner=runtime._Generator,
        function="_view_call",
        change=_first_window,
    ),
    Mutant(
        name="grad mode forgotten",
        breaks="The grad mode that the function leaves behind is not set.",
        owner=runtime._Generator,
        function="_grad_mode_left",
        change=_skip,
    ),
    Mutant(
        name="stale tensor guard",
        breaks="An entry serves tensors of other shapes, dtypes and requires_grad.",
        owner=runtime._Generator,
        function="_miss",
        change=_without_conditions("tensors_hold"),
    ),
    Mutant(
        name="stale identity guard",
        breaks="An entry that was compiled for one tensor passed twice serves two tensors.",
        owner=runtime._Generator,
        function="_miss",
        change=_without_conditions(r"^\w+ is not \w+$"),
    ),
    Mutant(
        name="stale value guard",
        breaks="An entry serves another Python number than it was compiled for.",
        owner=runtime._Generator,
        function="_miss",
        change=_without_conditions(r"^\w+ != -?\d+$"),
    ),
    Mutant(
        name="missing dedupe",
        breaks="A tensor that is passed twice becomes two inputs.",
        owner=dedupe,
        function="run",
        change=_keep_duplicates,
    ),
    Mutant(
        name="dropped tangent",
        breaks="The last of several outputs contributes nothing to the gradients.",
        owner=trace.Trace,
        function="derive",
        change=_drop_tangent,
    ),
    Mutant(
        name="zeros for None",
        breaks="An input that no output depends on gets zeros for a gradient.",
        owner=runtime.Backward,
        function="__call__",
        change=_zeros_for_none,
    ),
    Mutant(
        name="swapped gradients",
        breaks="The gradients of the inputs are given to one another.",
        owner=runtime.Backward,
        function="__call__",
        change=_swap_gradients,
    ),
    Mutant(
        name="mutated input saved",
        breaks="The backward uses an input that the epilogue has overwritten since.",
        owner=partition,
        function="_save_clones",
        change=_skip,
    ),
    Mutant(
        name="versions not checked",
        breaks="A backward uses saved values that were written in place since, where eager raises.",
        owner=runtime.SavedValues,
        function="use",
        change=_forget_versions,
    ),
)
