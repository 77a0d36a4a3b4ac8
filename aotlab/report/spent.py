"""Where a recording's time went: each moment counts once, for the innermost of what was going on.

A cold call holds a compilation, that its stages, and a stage perhaps a comparison with eager. What holds others gets
the time that these leave; what is left of the whole is Python and whatever nobody announces.
"""

from __future__ import annotations

from collections import deque

from aotlab.report.model import TimeRow

#: How many of the latest stretches a longer one may still hold; a loop has a stretch for each call.
_OPEN = 10_000
REST = "rest"
#: What may take time, in the order in which a report lists it, and how it is called there.
KINDS = {
    "dynamo": "Dynamo captures",
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
    """Adds up stretches of time that end one after the other, as they end; ``begin_ns`` is when the first may begin."""

    def __init__(self, begin_ns: int) -> None:
        self._begin_ns = begin_ns
        self._ended: deque[tuple[int, int, int]] = deque(maxlen=_OPEN)  # from, to, of that Dynamo's; the latest last
        self._sums: dict[str, list[int]] = {}
        self._rest: int | None = None

    def end(self, end_ns: int) -> None:
        """End the run: what is added later, as functions of it are called, has no rest."""
        self._rest = self._left(end_ns)

    def add(self, kind: str, end_ns: int, duration_ns: int) -> None:
        """Add a stretch; what was added before and lies within it keeps its time.

        But for captures in a comparison, which are those of the ``torch.compile`` that this compares with.
        """
        begin = outer = max(end_ns - duration_ns, self._begin_ns)
        own, captured = end_ns - begin, 0
        while self._ended and self._ended[-1][1] > begin:
            start, stop, inner = self._ended.pop()
            own -= min(stop, end_ns) - max(start, begin)
            captured += inner
            outer, end_ns = min(outer, start), max(end_ns, stop)  # of two threads, stretches may lie across
        sums = self._sums.setdefault(kind, [0, 0])
        sums[0] += max(own, 0)
        sums[1] += 1
        if kind == "verification" and captured:
            sums[0] += captured
            self._sums["dynamo"][0] -= captured
            captured = 0
        self._ended.append((outer, end_ns, captured + (max(own, 0) if kind == "dynamo" else 0)))

    def _left(self, end_ns: int) -> int:
        return max(end_ns - self._begin_ns - sum(own for own, _ in self._sums.values()), 0)

    def rows(self, end_ns: int) -> tuple[TimeRow, ...]:
        """List what took how long; together as long as from the beginning to ``end_ns``, or to the run's end."""
        rest = self._left(end_ns) if self._rest is None else self._rest
        sums = {**self._sums, REST: [rest, 1]}
        return tuple([TimeRow(kind=k, duration_ns=sums[k][0], count=sums[k][1]) for k in KINDS if k in sums])
