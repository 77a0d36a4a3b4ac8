"""What a trace assumed of the sizes that vary, as sentences, and which of it does not hold for a call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.errors import UserLine

#: Sizes and strides, None for those that may be any.
_Layout = tuple[tuple[int | None, ...], tuple[int | None, ...]]


@dataclass(frozen=True, slots=True)
class Rules:
    """What each argument with sizes that vary may look like; and what else was assumed of them.

    Of the latter, ``texts`` are as the user would write it, ``expressions`` read the facts of the arguments, and
    ``lines`` are those of the program that did so. Of the arguments in ``numbers``, only the type counts else.
    """

    layouts: Mapping[int, _Layout]
    numbers: frozenset[int]
    texts: tuple[str, ...]
    expressions: tuple[str, ...]
    lines: Mapping[str, UserLine]

    def admits(self, position: int, facts: Any) -> bool:
        """Tell whether an argument may vary, and is such as it may be."""
        layout = self.layouts.get(position)
        if layout is None:
            return position in self.numbers
        return all(
            len(wanted) == len(given) and all(n is None or n == m for n, m in zip(wanted, given, strict=True))
            for wanted, given in zip(layout, (facts.shape, facts.stride), strict=True)
        )

    def broken(self, leaves: Sequence[Any]) -> str | None:
        """Return the first that does not hold for the arguments of which ``leaves`` are the facts."""
        scope = {"leaves": leaves, "math": math, "torch": torch}
        rules = zip(self.texts, self.expressions, strict=True)
        return next((text for text, expression in rules if not eval(expression, scope)), None)


def rules_of(sizes: internals.Sizes | None, names: Sequence[str], fakes: Mapping[int, Tensor]) -> Rules | None:
    """Take them from a trace, of whose flat arguments ``fakes`` are the tensors."""
    if sizes is None:
        return None
    fields = {"size": "shape", "stride": "stride", "storage_offset": "offset", "value": "value"}

    def shown(position: int, what: str, dim: int | None) -> str:
        return names[position] if what == "value" else f"{names[position]}.{what}({'' if dim is None else dim})"

    def read(position: int, what: str, dim: int | None) -> str:
        return f"leaves[{position}].{fields[what]}{'' if dim is None else f'[{dim}]'}"

    layouts = {n: (internals.fixed(fake.shape), internals.fixed(fake.stride())) for n, fake in fakes.items()}
    layouts = {n: layout for n, layout in layouts.items() if None in layout[0]}
    told, expressions = sizes.guards(shown), tuple(text for text, _ in sizes.guards(read))
    lines = {text: place() for text, place in told if place is not None}
    return Rules(layouts, frozenset(sizes.numbers), tuple(text for text, _ in told), expressions, lines)
