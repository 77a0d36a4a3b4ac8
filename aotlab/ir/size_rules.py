"""The assumptions of a trace about dynamic sizes, as texts for the user, and the check of a call against them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.errors import UserLine

#: The sizes and the strides of a tensor. A size or stride that may have any value is None.
_Layout = tuple[tuple[int | None, ...], tuple[int | None, ...]]


@dataclass(frozen=True, slots=True)
class Rules:
    """The sizes that arguments may have, and the other assumptions about sizes. `CallState.rules` holds them.

    ``layouts`` maps the position of a tensor argument with dynamic sizes to its sizes and strides. ``numbers`` are the
    positions of the arguments that are dynamic numbers; only their type is checked. Each other assumption is stored
    twice: in ``texts`` as the user would write it (``x.size(0) > 4``), and in ``expressions`` as Python code that reads
    the facts about the arguments (``leaves[0].shape[0] > 4``). ``lines`` maps a text to the user line that caused it.
    """

    layouts: Mapping[int, _Layout]
    numbers: frozenset[int]
    texts: tuple[str, ...]
    expressions: tuple[str, ...]
    lines: Mapping[str, UserLine]

    def admits(self, position: int, facts: Any) -> bool:
        """Tell whether the argument at ``position`` is dynamic and may have the sizes and strides in ``facts``."""
        layout = self.layouts.get(position)
        if layout is None:
            return position in self.numbers
        return all(
            len(allowed) == len(actual) and all(n is None or n == m for n, m in zip(allowed, actual, strict=True))
            for allowed, actual in zip(layout, (facts.shape, facts.stride), strict=True)
        )

    def broken(self, leaves: Sequence[Any]) -> str | None:
        """Return the text of the first assumption that fails, or None if all hold.

        ``leaves`` has the facts (shape, stride, offset or value) about each flat argument of a call.
        """
        scope = {"leaves": leaves, "math": math, "torch": torch}
        rules = zip(self.texts, self.expressions, strict=True)
        return next((text for text, expression in rules if not eval(expression, scope)), None)


def rules_of(sizes: internals.Sizes | None, names: Sequence[str], fakes: Mapping[int, Tensor]) -> Rules | None:
    """Return the rules of a trace, or None if no size is dynamic.

    ``sizes`` are the symbolic sizes of the trace. ``names`` are the names of the flat arguments. ``fakes`` maps the
    position of each tensor among them to its fake tensor.
    """
    if sizes is None:
        return None
    fields = {"size": "shape", "stride": "stride", "storage_offset": "offset", "value": "value"}

    def shown(position: int, fact: str, dim: int | None) -> str:
        return names[position] if fact == "value" else f"{names[position]}.{fact}({'' if dim is None else dim})"

    def read_expression(position: int, fact: str, dim: int | None) -> str:
        return f"leaves[{position}].{fields[fact]}{'' if dim is None else f'[{dim}]'}"

    layouts = {n: (internals.fixed(fake.shape), internals.fixed(fake.stride())) for n, fake in fakes.items()}
    layouts = {n: layout for n, layout in layouts.items() if None in layout[0]}
    shown_guards, expressions = sizes.guards(shown), tuple(text for text, _ in sizes.guards(read_expression))
    lines = {text: position() for text, position in shown_guards if position is not None}
    return Rules(layouts, frozenset(sizes.numbers), tuple(text for text, _ in shown_guards), expressions, lines)
