"""Make a report small enough for a notebook, and note which rows and texts were left out.

A notebook stores every output. The report of a graph with a thousand nodes and its kernels takes megabytes, and a
reader looks at a small part of it. So a cell's output contains a shorter form of the report, a *cut* report. First long
code is shortened, then long tables, and finally graphs are left out. The nodes are not part of a cut report; the
notebook's output has them beside it, graph by graph, if there is room. The verdict, the groups of rows and all counts
still describe the whole report. A note names the tables and texts that were shortened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import TypeVar, cast

from aotlab.report.counts import counted
from aotlab.report.groups import most_telling
from aotlab.report.markup import clean
from aotlab.report.model import (
    Choices,
    Graph,
    Input,
    Memory,
    Report,
    Saved,
    Step,
    Storage,
    TimelineRow,
    VerificationRow,
)
from aotlab.report.text import amount, listed

R = TypeVar("R")

#: The fields of `Graph` that a cut report never contains.
_UNSEEN = frozenset({"nodes", "autograd", "compiled", "results"})

#: For a field of the report: the tab of the page that shows it.
_TABS = {
    "mutated_outside": "Inputs",
    "storages": "Storage map",
    "steps": "Storage map",
    "codes": "Stages",
    "text": "Stages",
    "source": "Kernels",
    "frames": "Overview",
    "parts": "Overview",
    "graph_break_rows": "Graph breaks",
    "timing_rows": "Timing",
    "timeline_rows": "Timing",
    "verification_rows": "Verification",
    "engine_rows": "Engines",
    "run_rows": "Two runs",
    "memory_curves": "Memory",
    "choices": "Memory",
    "applied_rows": "Memory",
    **{name: name.capitalize() for name in ("inputs", "outputs", "stages", "saved", "memory", "kernels")},
}
#: The tab that shows all other fields: graphs, guards, placeholders, calls and refusals.
_OTHERS = "Recompiles & calls"

#: The types of values that a cut leaves unchanged.
_NUMBERS = frozenset({int, bool, float, type(None)})

#: The fields that contain code.
_CODE_FIELDS = frozenset({"text", "source"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The largest sizes of a report's tables and texts; everything beyond them is cut.

    ``graphs`` is the largest number of records in a table of graphs or frames, and ``rows`` the largest number in any
    other table. ``code`` is the largest number of characters in a piece of code, and ``text`` the largest number in any
    other text.
    """

    code: int
    rows: int
    graphs: int
    text: int


#: The limits that `fitting` tries, from the mildest to the harshest. With the last limits, any report has a few
#: kilobytes.
_LIMITS = (
    Limits(code=1_000_000, rows=10_000, graphs=300, text=100_000),
    Limits(code=400_000, rows=2000, graphs=150, text=50_000),
    Limits(code=120_000, rows=1000, graphs=100, text=20_000),
    Limits(code=60_000, rows=1000, graphs=50, text=20_000),
    Limits(code=40_000, rows=1000, graphs=50, text=20_000),
    Limits(code=25_000, rows=400, graphs=30, text=10_000),
    Limits(code=15_000, rows=300, graphs=30, text=5000),
    Limits(code=15_000, rows=200, graphs=20, text=2000),
    Limits(code=6000, rows=100, graphs=10, text=1000),
    Limits(code=2000, rows=60, graphs=5, text=500),
    Limits(code=1000, rows=20, graphs=3, text=200),
    Limits(code=200, rows=5, graphs=1, text=100),
    Limits(code=0, rows=0, graphs=0, text=100),
)


def fitting(report: Report, fits: Callable[[Report], bool], most: int | None = None, purpose: str = "") -> Report:
    """Cut as little of ``report`` as possible, so that ``fits`` returns true for the result.

    The result has the ``summary`` and the ``counts`` of the whole report, and ``notes`` that name the cuts. If no
    limits fit, the result is the report with the harshest limits.

    ``most`` is a number of characters. A report with more text certainly does not fit, so ``fits``, which is slower, is
    not called for the uncut report. The mildest limits that fit are found by bisection, because each attempt writes the
    report. If ``most`` is given, they are stored, and the next search for a report with the same graphs, for the same
    ``purpose``, tries them first.
    """
    told = counted(report)
    key = _key(report, purpose)
    last_position = _fitting_limits.get(key) if most is not None else None
    if last_position is not None and fits(small := _cut(told, _LIMITS[last_position])):
        return small
    if most is None or _characters(told, most) <= most:
        whole = _Cutter(None).visit("", told)
        if fits(whole):
            return whole
    best, low, high = None, 0, len(_LIMITS) - 1
    while low < high:
        middle = (low + high) // 2
        if fits(small := _cut(told, _LIMITS[middle])):
            best, high = small, middle
        else:
            low = middle + 1
    if most is not None and best is not None:
        if len(_fitting_limits) >= _MOST_REMEMBERED:
            _fitting_limits.clear()
        _fitting_limits[key] = high
    return best or _cut(told, _LIMITS[-1])


def whole_or_cut(report: Report, fits: Callable[[Report], bool], purpose: str) -> Report:
    """Return ``report`` unchanged if ``fits`` is true for it, else the result of `fitting`.

    If a report with the same graphs was cut for this ``purpose`` before, this report is cut at once.
    """
    if _key(report, purpose) not in _fitting_limits and fits(report):
        return report
    return fitting(report, fits, 0, purpose)


def _key(report: Report, purpose: str) -> object:
    graphs = [(frame.name, graph) for frame in report.frames for graph in frame.graphs]
    return (purpose, *[(name, graph.entry, graph.duration_ns, len(graph.guards)) for name, graph in graphs])


def cleaned(value: R) -> R:
    """Return a copy of a report's record in which `clean` has replaced characters that cannot be displayed or sent."""
    return _Cutter(None).visit("", value)


#: For at most `_MOST_REMEMBERED` reports: the position in `_LIMITS` of the limits with which a report was small enough
#: last time. While a report is recorded, it is sent to the page often, and each search for limits tries this position
#: first. The key describes the report's graphs, because reports with the same graphs have about the same size.
_fitting_limits: dict[object, int] = {}
_MOST_REMEMBERED = 64


def _cut(report: Report, limits: Limits) -> Report:
    cutter = _Cutter(limits)
    small = cutter.visit("", report)
    options = "" if report.cell is None else report.cell.options
    named = re.search(r"(?:^|\s)(?:-o|--output)[ =]*(\w+)", options)
    return replace(small, notes=(*small.notes, *cutter.notes("report" if named is None else named[1])))


def _characters(value: object, most: int) -> int:
    """Count the characters of text in a report; stop when there are more than ``most``."""
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
    """Walk through a report, clean its texts, shorten long texts and tables, and count the cuts.

    Without limits, the texts are cleaned, and nothing is shortened.
    """

    def __init__(self, limits: Limits | None) -> None:
        self._limits = limits
        self._rows: dict[str, tuple[int, int]] = {}
        self._characters: dict[str, int] = {}

    def notes(self, variable: str) -> Iterator[str]:
        """Yield a note that says which tabs of the page were cut and by how much; if nothing was cut, yield nothing.

        The note also says how to see the whole report, which is in the user's variable ``variable``.
        """
        parts: dict[str, list[str]] = {}
        for name, (shown, total) in self._rows.items():
            tab = _TABS.get(name, _OTHERS)
            words = f"{shown:,} of {total:,} {'rows' if tab == name.capitalize() else name.replace('_', ' ')}"
            parts.setdefault(tab, []).append(words)
        for tab, lost in self._characters.items():
            parts.setdefault(tab, []).append(f"{amount(lost, 'character')} of code and text left out")
        if parts:
            told = "; ".join(f"in {tab} {listed(words)}" for tab, words in parts.items())
            yield f"This output is cut to fit a notebook: {told}. {variable}.to_html(path) writes all of it."

    def visit(self, name: str, value: R) -> R:
        """Return ``value`` with its texts and tables shortened; ``name`` is the report's field that contains it."""
        if isinstance(value, str):
            return cast("R", self._text(name, value))
        if isinstance(value, tuple):
            return cast("R", tuple([self.visit(name, item) for item in self._table(name, value)]))
        if isinstance(value, Memory | Choices):
            return cast("R", self._whole(name, value))
        if isinstance(value, Graph) and self._limits is not None:
            value = cast("R", replace(value, cut=True))
        if is_dataclass(value) and not isinstance(value, type):
            kind = type(value)
            values = {name: getattr(value, name) for name in _names_of(kind)}
            # A call for each number would take most of the time.
            visited = {k: each if type(each) in _NUMBERS else self.visit(k, each) for k, each in values.items()}
            return cast("R", kind(**visited))
        return value

    def _whole(self, field: str, value: Memory | Choices) -> Memory | Choices | None:
        """Return the record without changes, or None if it is long. With missing items the curve would be wrong.

        ``field`` is the field of the graph that contains the record.
        """
        count = len(value.names)
        if self._limits is None or count <= 10 * self._limits.rows:
            whole = _Cutter(None)
            return replace(value, **{name: whole.visit(name, getattr(value, name)) for name in value.__slots__})
        _, total = self._rows.get(field, (0, 0))
        self._rows[field] = (0, total + count)
        return None

    def _text(self, name: str, value: str) -> str:
        value = clean(value)
        if self._limits is None:
            return value
        most = self._limits.code if name in _CODE_FIELDS else self._limits.text
        if name == "sentence" and most < 600:
            most = 600  # show the whole verdict, which is a field `sentence`
        if len(value) <= most:
            return value
        cut = len(value) - most
        note = f"… {amount(cut, 'character')} cut …"
        if cut <= len(note) + 1:  # the note would be as long as the text that it replaces
            return value
        tab = _TABS.get(name, "Overview")
        self._characters[tab] = self._characters.get(tab, 0) + cut
        return f"{value[:most]}\n{note}" if most else note

    def _table(self, name: str, rows: tuple[object, ...]) -> tuple[object, ...]:
        if self._limits is None or not rows:
            return rows
        if name == "notes":
            return rows[:20]
        # Tuples of plain values (such as shapes), the field `written` and the tensors of a step belong to one row, so
        # they are not shortened. Nor are the facts, because they are few, and the page needs all of them.
        if not is_dataclass(rows[0]) or name in ("facts", "written", "reads", "writes", "makes"):
            return rows
        most = self._limits.graphs if name in ("frames", "graphs") else self._limits.rows
        if len(rows) <= most:
            return rows
        shown, total = self._rows.get(name, (0, 0))
        self._rows[name] = (shown + most, total + len(rows))
        if isinstance(rows[0], (Input, Storage, Saved)):
            return most_telling(cast("tuple[Input | Storage | Saved, ...]", rows), most)
        if isinstance(rows[0], TimelineRow):
            phases = cast("tuple[TimelineRow, ...]", rows)
            longest = set(sorted(range(len(phases)), key=lambda n: -phases[n].duration_ns)[:most])
            return tuple([phase for n, phase in enumerate(phases) if n in longest])
        if isinstance(rows[0], Step):
            steps = cast("tuple[Step, ...]", rows)
            order = sorted(range(len(steps)), key=lambda n: steps[n].kind == "call" and not steps[n].writes)
            return tuple([steps[n] for n in sorted(order[:most])])
        if isinstance(rows[0], VerificationRow):
            # The reader must see the differences, so they come first.
            rows = tuple(sorted(rows, key=lambda row: cast("VerificationRow", row).equal))
        return rows[-most:] if name == "recent" and most else rows[:most]
