"""What a trace assumed of the sizes that vary, as sentences, and which of it does not hold for a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aotlab import _torch as internals

#: Sizes and strides, None for those that may be any.
_Layout = tuple[tuple[int | None, ...], tuple[int | None, ...]]


@dataclass(frozen=True, slots=True)
class Rules:
    """What each argument with sizes that vary may look like; and what else was assumed of them.

    Of the latter, ``texts`` are as the user would write it, ``expressions`` read the facts of the arguments.
    """

    layouts: Mapping[int, _Layout]
    texts: tuple[str, ...]
    expressions: tuple[str, ...]

    def admits(self, position: int, facts: Any) -> bool:
        """Tell whether an argument's sizes and strides may vary, and are such as they may be."""
        layout = self.layouts.get(position)
        pairs = zip(layout or (), (facts.shape, facts.stride), strict=False)
        return layout is not None and all(
            len(wanted) == len(given) and all(n is None or n == m for n, m in zip(wanted, given, strict=True))
            for wanted, given in pairs
        )

    def broken(self, leaves: Sequence[Any]) -> str | None:
        """Return the first that does not hold for the arguments of which ``leaves`` are the facts."""
        rules = zip(self.texts, self.expressions, strict=True)
        return next((text for text, expression in rules if not eval(expression, {"leaves": leaves})), None)


def rules_of(sizes: internals.Sizes | None, names: Sequence[str], fakes: Mapping[int, Tensor]) -> Rules | None:
    """Take them from a trace, of whose flat arguments ``fakes`` are the tensors."""
    if sizes is None:
        return None
    fields = {"size": "shape", "stride": "stride", "storage_offset": "offset"}

    def shown(position: int, what: str, dim: int | None) -> str:
        return f"{names[position]}.{what}({'' if dim is None else dim})"

    def read(position: int, what: str, dim: int | None) -> str:
        return f"leaves[{position}].{fields[what]}{'' if dim is None else f'[{dim}]'}"

    layouts = {n: (internals.fixed(fake.shape), internals.fixed(fake.stride())) for n, fake in fakes.items()}
    layouts = {n: layout for n, layout in layouts.items() if None in layout[0]}
    return Rules(layouts, tuple(sizes.guards(shown)), tuple(sizes.guards(read)))
