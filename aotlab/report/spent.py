"""Divide the time of a recording among kinds of activity; each moment counts once, for the innermost activity then.

A call that compiles contains a compilation, a compilation contains stages, and a stage may contain a comparison with
eager. The time of an activity does not include the activities inside of it. The row `REST` has all time without an
activity that sends an event: Python, the backward, and everything else.
"""

from __future__ import annotations

from collections import deque

from aotlab.report.model import TimeRow

#: The number of latest intervals that `Spent` stores, because an interval that ends later may contain them.
_OPEN = 10_000
REST = "rest"
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
    "runtime": "the run-time function is written",
    "between": "guards, and between the stages",
    "backward": "further backwards are derived",
    "verification": "comparison with eager",
    "recording": "the report itself",
    "compiled": "compiled calls",
    "eager": "calls that run eagerly",
    "timing": "measurements for --time",
    REST: "Python, backward, everything else",
}


class Spent:
    """Add up the time of each kind of activity.

    The recording adds the interval of an activity when the activity ends. If the activity began before the run, its
    interval counts from ``begin_ns``, the beginning of the run.
    """

    def __init__(self, begin_ns: int) -> None:
        self._begin_ns = begin_ns
        self._ended: deque[tuple[int, int, int]] = deque(maxlen=_OPEN)  # begin, end, time of Dynamo captures in it
        self._sums: dict[str, list[int]] = {}
        self._rest: int | None = None

    def end(self, end_ns: int) -> None:
        """End the run, and fix the time of the row `REST`.

        The functions that the run defined may be called later. The intervals of these calls do not change the row
        `REST`.
        """
        self._rest = self._left(end_ns)

    def add(self, kind: str, end_ns: int, duration_ns: int) -> None:
        """Add an interval of the activity ``kind``, without the time of earlier intervals inside of this interval.

        There is one exception. A comparison with eager runs ``torch.compile``, which captures with Dynamo. The time of
        these captures counts as comparison.
        """
        begin = outer = max(end_ns - duration_ns, self._begin_ns)
        own_ns, captured = end_ns - begin, 0
        while self._ended and self._ended[-1][1] > begin:
            start, stop, inner = self._ended.pop()
            own_ns -= min(stop, end_ns) - max(start, begin)
            captured += inner
            outer, end_ns = min(outer, start), max(end_ns, stop)  # intervals of two threads may overlap
        sums = self._sums.setdefault(kind, [0, 0])
        sums[0] += max(own_ns, 0)
        sums[1] += 1
        if kind == "verification" and captured:
            sums[0] += captured
            self._sums["dynamo"][0] -= captured
            captured = 0
        self._ended.append((outer, end_ns, captured + (max(own_ns, 0) if kind == "dynamo" else 0)))

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
