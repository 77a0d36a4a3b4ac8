"""Numbers and lists in words, as the report's lines and pages write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aotlab.ir.specs import Size, SymExpr

if TYPE_CHECKING:
    from aotlab.report.model import CellPart


def duration(ns: int | None) -> str:
    """Write a time with three digits and the unit that fits: ``"1.24 s"``, ``"820 µs"``."""
    if ns is None:
        return "–"
    value = float(ns)
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if value >= size * 0.9995:
            return f"{_three(value / size)} {unit}"
    return f"{ns} ns"


def data_size(nbytes: Size | None) -> str:
    """Write a number of bytes with the unit that fits: ``"1.5 KiB"``."""
    if nbytes is None:
        return "–"
    if isinstance(nbytes, SymExpr):
        return f"{nbytes} B"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{_three(nbytes / size)} {unit}"
    return f"{nbytes} B"


def amount(count: int, noun: str) -> str:
    """Write ``"1 graph"`` or ``"3 graphs"``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(items: Sequence[str], most: int = 6) -> str:
    """Write ``"a, b and c"``; with more than ``most`` items the rest is counted."""
    if len(items) > most:
        return f"{', '.join(items[:most])} and {len(items) - most} more"
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else list(items))


def first_line(text: str, most: int) -> str:
    """Return the first line of ``text`` that says something, cut to ``most`` characters, between words if it can be."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if len(line) <= most:
        return line
    whole, _, rest = line[: most - 1].rpartition(" ")
    return f"{whole if len(rest) < most // 4 else line[: most - 2]} …"


def lines_of(part: CellPart) -> str:
    """Write ``"line 3"`` or ``"lines 3–5"``."""
    if part.first_line == part.last_line:
        return f"line {part.first_line}"
    return f"lines {part.first_line}–{part.last_line}"


def sizes(values: Sequence[Size] | None) -> str:
    """Write a shape or strides: ``"[2, 3]"``."""
    return "" if values is None else f"[{', '.join(map(str, values))}]"


def known_size(size: Size) -> int:
    """Return a size as a number: for a symbolic one that of the traced call, 0 where not even that is known."""
    return (size.hint or 0) if isinstance(size, SymExpr) else size


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
