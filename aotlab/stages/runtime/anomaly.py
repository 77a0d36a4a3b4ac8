"""Anomaly mode: which of the user's lines a nan in the backward comes from.

Under `torch.autograd.detect_anomaly` eager looks at what each autograd node returns and raises for the first nan. A
compiled backward is one node. So the traced program's own nodes are run once more under the recorder, each telling
what it returns; the values of all of them are computed from this call's saved values and tangents, and the first nan
is raised in eager's words, with the user's line in a warning as eager prints it. Derivatives of derivatives are looked
through in the same way: their nodes were made by a backward, of which eager shows the call, and the node that was run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import torch_internals as internals
from aotlab.analysis import value_of
from aotlab.analysis.history import Edge, Segment, edges_behind
from aotlab.errors import RefusedError, UserLine
from aotlab.ir.random_state import noted
from aotlab.stages.partition import Split
from aotlab.stages.trace.levels import Level
from aotlab.stages.trace.live import Trace
from aotlab.stages.trace.records import Pattern

#: Writes the graph that computes values from those of the saved ones that it needs, whose numbers it returns, and from
#: what came in; None if that is not possible.
Write = Callable[
    [Split, Sequence[Tensor | None], Sequence[tuple[str, Tensor]]], tuple[fx.GraphModule, tuple[int, ...]] | None
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one autograd node of the traced program returned: its name, the user's line, (place, number of value).

    ``made_by`` are the names and lines of the nodes that made it, if a backward did, from the last to the first.
    """

    name: str
    line: UserLine | None
    returned: tuple[tuple[int, int], ...]
    made_by: tuple[tuple[str, UserLine | None], ...] = ()


class NanFinder:
    """Looks for the first nan in the backwards of one segment."""

    def __init__(self, trace: Trace, split: Split, segment: int) -> None:
        self._trace = trace
        self._split = split
        self._segment = segment
        self._known: dict[Any, tuple[list[Step], Callable[..., Any]] | None] = {}

    def check(self, pattern: Pattern, needs: Sequence[int], arguments: Sequence[Tensor], *, autocast: bool) -> None:
        """Raise eager's error if a node returns a nan.

        Parameters
        ----------
        pattern
            Which tangents are defined, and how.
        needs
            The numbers of the saved values among ``arguments``, which end with the defined tangents.
        autocast
            Whether the backward runs under autocast.

        Raises
        ------
        RuntimeError
            With the name of the node, after a warning with the user's line.
        """
        key = (tuple(pattern), tuple(needs), autocast)
        if key not in self._known:
            self._known[key] = self._walk(pattern, needs, autocast=autocast)
        known = self._known[key]
        if known is None:
            return
        steps, compute = known
        _look_through(self._trace, steps, compute, arguments)

    def _walk(
        self, pattern: Pattern, needs: Sequence[int], *, autocast: bool
    ) -> tuple[list[Step], Callable[..., Any]] | None:
        """Run the nodes on fake tensors; return what each returned and a function that computes all of it."""
        trace, split = self._trace, self._split
        steps: list[Step] = []
        values: list[Tensor] = []
        try:
            with _listening(trace, trace.segments[self._segment], steps, values):
                trace.derive(self._segment, pattern, autocast=autocast, again=True)
        except RefusedError:
            return None
        inputs = [(split.saved_names[n], split.saved_values[n]) for n in needs]
        inputs += [
            (f"tangents_{n + 1}", given[0])
            for n, given in zip(trace.entry_tangents[self._segment], trace.given(self._segment, pattern), strict=True)
            if given is not None
        ]
        stop = {id(fake) for _, fake in inputs}
        if trace.tape.needed(values, stop)[1]:
            return None  # something was not saved; then autograd itself looks at the gradients
        given = [(name, fake) for name, fake in inputs if fake is not None]
        module = trace.tape.graph("Anomaly", given, values, keep=trace.drawn)
        return steps, internals.forward_of(module)


class NanFinderAbove:
    """Looks for the first nan in the backwards of one level of derivatives."""

    def __init__(self, level: Level, split: Split, write: Write) -> None:
        self._level = level
        self._split = split
        self._write = write
        self._known: dict[Any, tuple[list[Step], Callable[..., Any], tuple[int, ...]] | None] = {}

    def check(
        self,
        pattern: tuple[bool, ...],
        extras: tuple[Edge, ...],
        strides: tuple[tuple[int, ...], ...],
        given: Sequence[Tensor],
        use: Callable[[tuple[int, ...], frozenset[int]], list[Tensor]],
        *,
        autocast: bool,
        made_at: tuple[str, ...],
    ) -> None:
        """Raise eager's error if a node returns a nan.

        Parameters
        ----------
        pattern, extras, strides
            As in `aotlab.stages.trace.levels.Level.derive`.
        given
            What came in.
        use
            Returns saved values by their numbers, of which it is told which ones are read as they are by then.
        autocast
            Whether the backward runs under autocast.
        made_at
            As the function of that name says of the running node; not looked at for the function's own nodes.

        Raises
        ------
        RuntimeError
            As `NanFinder.check`.
        """
        key = (pattern, extras, strides, autocast)
        if key not in self._known:
            with internals.no_dispatch_modes():
                self._known[key] = self._walk(pattern, extras, strides, autocast=autocast)
        known = self._known[key]
        if known is not None:
            steps, compute, needs = known
            late = frozenset(needs) & frozenset(self._split.lent)
            _look_through(self._level.trace, steps, compute, [*use(needs, late), *given], made_at)

    def _walk(
        self, pattern: Sequence[bool], extras: Sequence[Edge], strides: Sequence[tuple[int, ...]], *, autocast: bool
    ) -> tuple[list[Step], Callable[..., Any], tuple[int, ...]] | None:
        level = self._level
        steps: list[Step] = []
        values: list[Tensor] = []
        try:
            with _listening(level.trace, level.part, steps, values):
                found = level.derive(pattern, extras, strides, None, autocast=autocast, everything=False)
        except RefusedError:
            return None
        defined = [(f"tangents_{n + 1}", fake) for n, fake in enumerate(found.given)]
        written = self._write(self._split, values, defined)
        return None if written is None else (steps, internals.forward_of(written[0]), written[1])


def made_at(node: Any) -> tuple[str, ...]:
    """Return the user's lines under which a node was made, and the node whose backward made it, and so on.

    Anomaly mode has noted them; where it was off they are empty.
    """
    own = ("<aotlab", str(Path(__file__).parents[2]), torch.autograd.function.__file__)
    found = []
    while node is not None:
        try:
            metadata = node.metadata
        except RuntimeError:  # torch 2.11 lets a custom Function's node go before those that it made
            break
        lines = []
        for line in metadata.get("traceback_", ()):
            if line.lstrip().startswith(tuple(f'File "{place}' for place in own)):
                break
            lines.append(line)
        found.append("".join(lines))
        node = metadata.get("parent_")
    return tuple(found)


@contextmanager
def _listening(trace: Trace, part: Segment, steps: list[Step], values: list[Tensor]) -> Iterator[None]:
    """Let the nodes of a part of the traced program tell what they return meanwhile."""
    nodes = {node for node, _ in edges_behind(part.entries) if node is not None and part.has(node)}
    handles = [node.register_hook(_listener(trace, node, steps, values)) for node in nodes]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _listener(trace: Trace, node: Any, steps: list[Step], values: list[Tensor]) -> Callable[..., None]:
    line_of = trace.recorder.line_of
    name, sequence = node.name(), internals.sequence_of(node)
    made_by: list[tuple[str, UserLine | None]] = []
    parent = node.metadata.get("parent_")
    while parent is not None:
        made_by.append((parent.name(), line_of(internals.sequence_of(parent))))
        parent = parent.metadata.get("parent_")

    def listen(returned: Sequence[Tensor | None], _: Any) -> None:
        numbers = []
        for place, gradient in enumerate(returned):
            if isinstance(gradient, Tensor) and (gradient.is_floating_point() or gradient.is_complex()):
                numbers.append((place, len(values)))
                values.append(value_of(gradient, "a gradient"))
        steps.append(Step(name=name, line=line_of(sequence), returned=tuple(numbers), made_by=tuple(made_by)))

    return listen


def _look_through(
    trace: Trace,
    steps: Sequence[Step],
    compute: Callable[..., Any],
    arguments: Sequence[Tensor],
    made_at: Sequence[str] = (),
) -> None:
    """Compute what all nodes return, and raise for the first nan."""
    with torch.no_grad(), internals.disable_autocast(), torch.autograd.set_detect_anomaly(False):
        put_back = noted(trace.tape.draws("backward"))()
        values = compute(*arguments)
        put_back()  # the backward itself draws the same once more
        for step in steps:
            for place, number in step.returned:
                if values[number].isnan().any():
                    _complain(step, place, made_at)


def _complain(step: Step, place: int, made_at: Sequence[str] = ()) -> None:
    for n, (name, line) in enumerate(((step.name, step.line), *step.made_by)):
        text = "".join(made_at[n : n + 1])
        if line is not None:
            text = f'  File "{line.file}", line {line.line}, in {line.function}\n    {line.code}\n'
        error, call = ("Error detected in", "caused the error") if n == 0 else _INDUCED
        where = f"Traceback of forward call that {call}:\n{text}" if text else "No forward pass information available."
        warnings.warn(f"{error} {name}. {where}", UserWarning, stacklevel=2)
    raise RuntimeError(f"Function '{step.name}' returned nan values in its {place}th output.")


#: Eager's words for the node that made another.
_INDUCED = ("\n\nPrevious calculation was induced by", "induced the previous calculation")
