"""Make a report small enough to be kept in a notebook, and say what was left out.

A notebook stores every output. A graph of a thousand nodes with its kernels takes megabytes, and a reader looks at
little of it; so what a cell's output embeds is cut until it fits: code, then long tables, then whole graphs. Nodes, for
which a page asks the kernel, are never in it. The verdict and all counts are those of the whole report, and each cut
is noted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import TypeVar, cast

from aotlab.report.counts import count, count_frame, summary
from aotlab.report.markup import clean
from aotlab.report.model import Frame, Graph, Report, VerificationRow
from aotlab.report.text import amount, listed

R = TypeVar("R")

#: The fields of a graph that no notebook holds.
_UNSEEN = frozenset({"nodes", "autograd", "compiled", "results"})

#: In which tab of the page stands what a field holds, where it is not that of this name.
_TABS = {
    "mutated_outside": "Inputs",
    "storages": "Storage map",
    "codes": "Stages",
    "text": "Stages",
    "source": "Kernels",
    "frames": "Overview",
    "parts": "Overview",
    "graph_break_rows": "Graph breaks",
    "timing_rows": "Timing",
    "verification_rows": "Verification",
    **{name: name.capitalize() for name in ("inputs", "outputs", "stages", "saved", "kernels")},
}
_OTHERS = "Recompiles & calls"  # graphs, guards, placeholders, calls, refusals

#: The fields that hold code.
_CODE_FIELDS = frozenset({"text", "source"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much of a report may stay.

    ``graphs`` and ``rows`` are the most records that a table of graphs or frames, and any other table, may have;
    ``code`` and ``text`` the most characters that a piece of code, and any other text, may have.
    """

    code: int
    rows: int
    graphs: int
    text: int


#: From the mildest to the harshest; the last leaves a few kilobytes whatever the report holds.
_LADDER = (
    Limits(code=40_000, rows=1000, graphs=50, text=20_000),
    Limits(code=15_000, rows=300, graphs=30, text=5000),
    Limits(code=15_000, rows=200, graphs=20, text=2000),
    Limits(code=6000, rows=100, graphs=10, text=1000),
    Limits(code=2000, rows=60, graphs=5, text=500),
    Limits(code=1000, rows=20, graphs=3, text=200),
    Limits(code=200, rows=5, graphs=1, text=100),
    Limits(code=0, rows=0, graphs=0, text=100),
)


def fitting(report: Report, fits: Callable[[Report], bool], most: int | None = None) -> Report:
    """Return ``report``, or the least cut form of it for which ``fits`` is true.

    The result carries ``summary`` and ``counts``, made from the whole report; what was cut is said in ``notes``. With
    more than ``most`` characters of text a report does not fit. A cut is cheap if it leaves little: so it begins with
    the harshest, or with the one that was right for a report of the same graphs.
    """
    told = replace(report, summary=summary(report))
    graphs = [(frame.name, graph) for frame in report.frames for graph in frame.graphs]
    key = tuple([(name, graph.entry, graph.duration_ns, len(graph.guards)) for name, graph in graphs])
    known = _rungs.get(key) if most is not None else None
    if known is not None and fits(small := _cut(told, _LADDER[known])):
        return small
    if most is None or _characters(told, most) <= most:
        whole = _Cutter(None).visit("", told)
        if fits(whole):
            return whole
    best = _cut(told, _LADDER[-1])
    for rung in reversed(range(len(_LADDER) - 1)):
        small = _cut(told, _LADDER[rung])
        if not fits(small):
            break
        best = small
        if most is not None:
            if len(_rungs) >= _MOST_RUNGS:
                _rungs.clear()
            _rungs[key] = rung
    return best


def cleaned(value: R) -> R:
    """Return a record of a report with what a message cannot carry replaced in its texts."""
    return _Cutter(None).visit("", value)


#: For the latest reports, by their graphs, how far they had to be cut.
_rungs: dict[object, int] = {}
_MOST_RUNGS = 64


def _cut(report: Report, limits: Limits) -> Report:
    cutter = _Cutter(limits)
    small = cutter.visit("", report)
    options = "" if report.cell is None else report.cell.options
    named = re.search(r"(?:^|\s)(?:-o|--output)[ =]*(\w+)", options)
    return replace(small, notes=(*small.notes, *cutter.notes("report" if named is None else named[1])))


def _characters(value: object, most: int) -> int:
    """Count the characters of text in a report, until there are more than ``most``."""
    count, todo = 0, [value]
    while todo and count <= most:
        value = todo.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, tuple):
            todo += value
        elif is_dataclass(value) and not isinstance(value, type):
            todo += [getattr(value, name) for name in _names_of(type(value))]
    return count


@cache
def _names_of(kind: type) -> tuple[str, ...]:
    return tuple([field.name for field in fields(kind) if kind is not Graph or field.name not in _UNSEEN])


class _Cutter:
    """Walk a report, shorten what is too long, and keep count."""

    def __init__(self, limits: Limits | None) -> None:
        self._limits = limits
        self._rows: dict[str, tuple[int, int]] = {}
        self._characters: dict[str, int] = {}

    def notes(self, variable: str) -> Iterator[str]:
        """Say what was cut in which tab, and how the report that is in ``variable`` is seen whole."""
        parts: dict[str, list[str]] = {}
        for name, (kept, total) in self._rows.items():
            tab = _TABS.get(name, _OTHERS)
            words = f"{kept:,} of {total:,} {'rows' if tab == name.capitalize() else name.replace('_', ' ')}"
            parts.setdefault(tab, []).append(words)
        for tab, lost in self._characters.items():
            parts.setdefault(tab, []).append(f"{amount(lost, 'character')} of code and text left out")
        if parts:
            told = "; ".join(f"in {tab} {listed(words)}" for tab, words in parts.items())
            yield f"This output is cut to fit a notebook: {told}. {variable}.to_html(path) writes all of it."

    def visit(self, name: str, value: R) -> R:
        """Return ``value`` with everything in it shortened; ``name`` is the field that holds it."""
        if isinstance(value, str):
            return cast("R", self._text(name, value))
        if isinstance(value, tuple):
            return cast("R", tuple([self.visit(name, item) for item in self._table(name, value)]))
        if isinstance(value, Graph) and self._limits is not None and value.counts is None:
            value = cast("R", replace(value, counts=count(value)))
        if isinstance(value, Frame) and self._limits is not None and value.counts is None:
            value = cast("R", replace(value, counts=count_frame(value)))
        if is_dataclass(value) and not isinstance(value, type):
            kind = type(value)
            return cast("R", kind(**{name: self.visit(name, getattr(value, name)) for name in _names_of(kind)}))
        return value

    def _text(self, name: str, value: str) -> str:
        value = clean(value)
        if self._limits is None:
            return value
        most = self._limits.code if name in _CODE_FIELDS else self._limits.text
        if name == "sentence" and most < 600:
            most = 600  # the verdict
        if len(value) <= most:
            return value
        cut = len(value) - most
        tab = _TABS.get(name, "Overview")
        self._characters[tab] = self._characters.get(tab, 0) + cut
        return f"{value[:most]}\n… {amount(cut, 'character')} cut …" if most else f"… {amount(cut, 'character')} cut …"

    def _table(self, name: str, rows: tuple[object, ...]) -> tuple[object, ...]:
        if self._limits is None or not rows:
            return rows
        if name == "notes":
            return rows[:20]
        # a shape, names, windows belong to one row; the facts are few, and the head of the page
        if not is_dataclass(rows[0]) or name in ("facts", "written"):
            return rows
        most = self._limits.graphs if name in ("frames", "graphs") else self._limits.rows
        if len(rows) <= most:
            return rows
        kept, total = self._rows.get(name, (0, 0))
        self._rows[name] = (kept + most, total + len(rows))
        if isinstance(rows[0], VerificationRow):
            # What differs is what the reader must see.
            rows = tuple(sorted(rows, key=lambda row: cast("VerificationRow", row).equal))
        return rows[-most:] if name == "recent" and most else rows[:most]
