"""Anomaly mode: which of the user's lines a nan in the backward comes from.

Under `torch.autograd.detect_anomaly` eager looks at what each autograd node returns and raises for the first nan. A
compiled backward is one node. So the traced program's own nodes are run once more under the recorder, each telling
what it returns; the values of all of them are computed from this call's saved values and tangents, and the first nan
is raised in eager's words, with the user's line in a warning as eager prints it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.analysis import value_of
from aotlab.errors import RefusedError, UserLine
from aotlab.ir.random_state import noted
from aotlab.stages.partition import Split
from aotlab.stages.trace.live import Trace
from aotlab.stages.trace.records import Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one autograd node of the traced program returned: its name, the user's line, (place, number of value)."""

    name: str
    line: UserLine | None
    returned: tuple[tuple[int, int], ...]


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
        with torch.no_grad(), internals.disable_autocast(), torch.autograd.set_detect_anomaly(False):
            put_back = noted(self._trace.tape.draws("backward"))()
            values = compute(*arguments)
            put_back()  # the backward itself draws the same once more
            for step in steps:
                for place, number in step.returned:
                    if values[number].isnan().any():
                        _complain(step, place)

    def _walk(
        self, pattern: Pattern, needs: Sequence[int], *, autocast: bool
    ) -> tuple[list[Step], Callable[..., Any]] | None:
        """Run the nodes on fake tensors; return what each returned and a function that computes all of it."""
        trace, split = self._trace, self._split
        steps: list[Step] = []
        values: list[Tensor] = []
        handles = [node.register_hook(self._listener(node, steps, values)) for node in self._nodes()]
        try:
            trace.derive(self._segment, pattern, autocast=autocast, again=True)
        except RefusedError:
            return None
        finally:
            for handle in handles:
                handle.remove()
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

    def _nodes(self) -> list[Any]:
        """List the segment's nodes."""
        part = self._trace.segments[self._segment]
        found: dict[Any, None] = {}
        todo = [node for node, _ in part.entries]
        while todo:
            node = todo.pop()
            if node is None or node in found or not part.has(node):
                continue
            found[node] = None
            todo += [following for following, _ in node.next_functions]
        return list(found)

    def _listener(self, node: Any, steps: list[Step], values: list[Tensor]) -> Callable[..., None]:
        name, sequence = node.name(), internals.sequence_of(node)

        def listen(returned: Sequence[Tensor | None], _: Any) -> None:
            numbers = []
            for place, gradient in enumerate(returned):
                if isinstance(gradient, Tensor) and (gradient.is_floating_point() or gradient.is_complex()):
                    numbers.append((place, len(values)))
                    values.append(value_of(gradient, "a gradient"))
            steps.append(Step(name=name, line=self._trace.recorder.line_of(sequence), returned=tuple(numbers)))

        return listen


def _complain(step: Step, place: int) -> None:
    where = "No forward pass information available."
    if step.line is not None:
        where = (
            f'Traceback of forward call that caused the error:\n  File "{step.line.file}", line {step.line.line}, in '
            f"{step.line.function}\n    {step.line.code}\n"
        )
    warnings.warn(f"Error detected in {step.name}. {where}", UserWarning, stacklevel=2)
    raise RuntimeError(f"Function '{step.name}' returned nan values in its {place}th output.")
