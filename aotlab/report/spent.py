"""Divide the time of a recording among kinds of activity; each moment counts once, for the innermost activity then.

A call that compiles contains a compilation, a compilation contains stages, and a stage may contain a comparison with
eager. The time of an activity does not include the activities inside of it. The row `REST` has all time without an
activity that sends an event: Python, the backward, and everything else.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from aotlab.report.model import TimelineRow, TimeRow

#: The number of latest intervals that `Spent` stores, because an interval that ends later may contain them.
_OPEN = 10_000
#: The number of intervals of each kind that the time line of a report shows; the first ones.
_SHOWN = 1000
#: Shorter intervals of the report itself are not shown.
_SHORT_NS = 1_000_000
REST = "rest"
#: The stage of the rows of kernels on the time line. They have no `TimeRow`, because kernels compile at the same time
#: as each other, while the compiling thread waits for them in the stage ``compile``.
KERNEL = "kernel"
#: The kinds of activity in the order in which a report lists them, each with the name that a page shows.
KINDS = {
    "dynamo": "Dynamo captures",
    "upstream": "compilation by stock torch.compile",
    "capture": "capture of the arguments",
    "dedupe": "duplicates",
    "synthetic_bases": "synthetic bases",
    "trace": "trace",
    "partition": "partition",
    "compile": "compilation by the backend",
    "header": "the header of the C++ kernels is prepared",
    "runtime": "the run-time function is written",
    "subclasses": "wrapping of tensor subclasses",
    "between": "guards, and work between the stages",
    "backward": "further backwards are derived",
    "verification": "comparison with eager",
    "recording": "the report itself",
    "compiled": "compiled calls",
    "eager": "calls that run eagerly",
    "timing": "measurements for --time",
    REST: "Python, backward, everything else",
}


#: The names of activities on the time line, where each row is one of them, with the activities inside of it.
_PHASES = {"between": "compilation", "compiled": "compiled call", "eager": "call that runs eagerly"}


class _Interval(NamedTuple):
    """An activity of one thread. ``entry`` is the compiled entry that it belongs to; None if it belongs to no entry.

    ``name`` is the name of a kernel, and empty for all other activities. ``engine`` is the engine that needs it.
    """

    begin_ns: int
    end_ns: int
    kind: str
    entry: int | None
    thread: int
    name: str = ""
    engine: str = "aotlab"


class Spent:
    """Add up the time of each kind of activity.

    The recording adds the interval of an activity when the activity ends. If the activity began before the run, its
    interval counts from ``begin_ns``, the beginning of the run.
    """

    def __init__(self, begin_ns: int) -> None:
        self._begin_ns = begin_ns
        self._ended: deque[tuple[int, int, int]] = deque(maxlen=_OPEN)  # begin, end, time of Dynamo captures in it
        self._sums: dict[str, list[int]] = {}
        self._intervals: list[_Interval] = []
        self._kernels: list[_Interval] = []
        self._rest: int | None = None

    def end(self, end_ns: int) -> None:
        """End the run, and fix the time of the row `REST`.

        The functions that the run defined may be called later. The intervals of these calls do not change the row
        `REST`.
        """
        self._rest = self._left(end_ns)

    def add(self, kind: str, end_ns: int, duration_ns: int, entry: int | None = None) -> None:
        """Add an interval of the activity ``kind``, without the time of earlier intervals inside of this interval.

        The interval belongs to this thread, and to the compiled entry with the number ``entry``, if there is one.

        There is one exception. A comparison with eager runs ``torch.compile``, which captures with Dynamo. The time of
        these captures counts as comparison.
        """
        begin = outer = max(end_ns - duration_ns, self._begin_ns)
        own_ns, captured = end_ns - begin, 0
        interval = _Interval(begin, end_ns, kind, entry, threading.get_ident())
        while self._ended and self._ended[-1][1] > begin:
            start, stop, inner = self._ended.pop()
            own_ns -= min(stop, end_ns) - max(start, begin)
            captured += inner
            outer, end_ns = min(outer, start), max(end_ns, stop)  # intervals of two threads may overlap
        sums = self._sums.setdefault(kind, [0, 0])
        sums[0] += max(own_ns, 0)
        sums[1] += 1
        if sums[1] <= _SHOWN and (kind != "recording" or duration_ns > _SHORT_NS):
            self._intervals.append(interval)
        if kind == "verification" and captured:
            sums[0] += captured
            self._sums["dynamo"][0] -= captured
            captured = 0
        self._ended.append((outer, end_ns, captured + (max(own_ns, 0) if kind == "dynamo" else 0)))

    def add_kernel(self, name: str, end_ns: int, duration_ns: int, entry: int, engine: str = "aotlab") -> None:
        """Add the compilation of a kernel to the time line. Its time is a part of the time of the stage."""
        begin_ns = max(end_ns - duration_ns, self._begin_ns)
        if len(self._kernels) < _SHOWN:
            self._kernels.append(_Interval(begin_ns, end_ns, KERNEL, entry, 0, name, engine))

    def _left(self, end_ns: int) -> int:
        return max(end_ns - self._begin_ns - sum(spent_ns for spent_ns, _ in self._sums.values()), 0)

    def rows(self, end_ns: int) -> tuple[TimeRow, ...]:
        """Return one row for each kind of activity.

        If the run has not ended, the rows add up to its duration until ``end_ns``. Otherwise they add up to the
        duration of the run and of the activities after its end.
        """
        rest_ns = self._left(end_ns) if self._rest is None else self._rest
        sums = {**self._sums, REST: [rest_ns, 1]}
        return tuple(
            [
                TimeRow(
                    kind=kind,
                    duration_ns=sums[kind][0],
                    count=sums[kind][1],
                    engine="upstream" if kind == "upstream" else "aotlab",
                )
                for kind in KINDS
                if kind in sums
            ]
        )

    def timeline(self, graphs: Mapping[int, tuple[str, int]]) -> tuple[TimelineRow, ...]:
        """Return the activities on the clock, in the order of their begins. Times count from the begin of the run.

        ``graphs`` maps the numbers of entries to the keys of their graphs in the report: frame and index.
        """
        numbers = {each: n for n, each in enumerate(dict.fromkeys(each.thread for each in self._intervals))}
        threads: list[list[_Interval]] = [[] for _ in numbers]
        for interval in self._intervals:
            threads[numbers[interval.thread]].append(interval)
        threads += _without_overlap(self._kernels)
        rows = []
        for number, intervals in enumerate(threads):
            ordered = sorted(intervals, key=lambda i: (i[0], -i[1]))
            rows += [self._row(*nested, number, graphs) for nested in _nested(ordered)]
        return tuple(sorted(rows, key=lambda row: row.start_ns))

    def _row(
        self, interval: _Interval, depth: int, own_ns: int, thread: int, graphs: Mapping[int, tuple[str, int]]
    ) -> TimelineRow:
        phase = interval.name or _PHASES.get(interval.kind) or KINDS.get(interval.kind, interval.kind)
        if interval.kind == "compiled" and 2 * own_ns < interval.end_ns - interval.begin_ns:
            phase = "call that compiles"
        frame, graph = graphs.get(-1 if interval.entry is None else interval.entry, (None, None))
        return TimelineRow(
            frame=frame,
            graph=graph,
            phase=phase,
            stage=interval.kind,
            start_ns=interval.begin_ns - self._begin_ns,
            duration_ns=interval.end_ns - interval.begin_ns,
            own_ns=0 if interval.kind == KERNEL else own_ns,
            thread=thread,
            depth=depth,
            engine="upstream" if interval.kind == "upstream" else interval.engine,
        )


def _without_overlap(intervals: Iterable[_Interval]) -> list[list[_Interval]]:
    """Divide intervals into as few lists as possible, so that no two intervals in one list overlap."""
    lists: list[list[_Interval]] = []
    for interval in sorted(intervals):
        free = next((each for each in lists if each[-1].end_ns <= interval.begin_ns), None)
        if free is None:
            lists.append([interval])
        else:
            free.append(interval)
    return lists


def _nested(intervals: Iterable[_Interval]) -> Iterator[tuple[_Interval, int, int]]:
    """Return each interval of a thread, the number of intervals around it, and its time without those inside of it.

    If two intervals overlap in part, the later one begins at the end of the earlier one.
    """
    around: list[int] = []
    found: list[tuple[_Interval, int]] = []
    own: list[int] = []
    for number, interval in enumerate(intervals):
        begin = interval.begin_ns
        while around and found[around[-1]][0].end_ns < interval.end_ns:
            begin = max(begin, found[around.pop()][0].end_ns)
        if around:
            own[around[-1]] -= interval.end_ns - begin
        found.append((interval._replace(begin_ns=begin), len(around)))
        own.append(interval.end_ns - begin)
        around.append(number)
    return ((interval, depth, own_ns) for (interval, depth), own_ns in zip(found, own, strict=True))
