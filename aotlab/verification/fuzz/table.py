"""The table at the end of a run: what became of the programs, by category, each program counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from aotlab.verification.fuzz.block import Block, Failure, Row

#: Heading and field, in order.
_COLUMNS = (
    ("category", "category"),
    ("programs", "programs"),
    ("accepted", "accepted"),
    ("each size", "static"),
    ("refused", "refused"),
    ("ran eagerly", "eager"),
    ("raise alike", "alike"),
    ("Dynamo's own", "dynamo"),
    ("eager asserts", "asserts"),
    ("wrong", "wrong"),
    ("other error", "error"),
    ("raise alone", "raises"),
    ("graphs", "graphs"),
    ("compiled", "share"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The programs of one category.

    Attributes
    ----------
    static
        Compiled for every call, but not for other sizes than those of a call, where that was asked.
    accepted, refused, eager
        Compiled for every call; refused in some call; run eagerly in some call.
    alike
        They raise as in eager, before there was anything to compile.
    dynamo
        They differ just as they do with Dynamo alone: the engine gets a graph that is wrong already, or none.
    asserts
        Eager itself ends in an internal assertion of torch, and the engine does something else.
    wrong, error, raises
        The failures: a result that differs; another error than eager's, or none; an error where eager has none.
    graphs
        Distinct graphs.
    share
        Accepted ones among those that are neither ``alike`` nor torch's own failures; None if there are none.
    """

    category: str
    programs: int
    accepted: int
    static: int
    refused: int
    eager: int
    alike: int
    dynamo: int
    asserts: int
    wrong: int
    error: int
    raises: int
    graphs: int
    share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A whole run.

    ``lines`` begins with all programs; ``refusals`` and ``fallbacks`` count programs by why they were refused or ran
    eagerly, ``dynamos`` those that differ with Dynamo alone by how, ``asserts`` those at which eager itself trips over
    an assertion of torch; ``discarded`` ones were begun and given up by the generator, ``repeated`` ones drawn before.
    ``served`` are the calls, the entries made for them, and the calls that an entry served which other sizes had made.
    """

    lines: tuple[Line, ...]
    refusals: dict[str, int]
    fallbacks: dict[str, int]
    dynamos: dict[str, int]
    asserts: dict[str, int]
    failures: tuple[Failure, ...]
    discarded: int
    repeated: int
    served: tuple[int, int, int] = (0, 0, 0)

    @property
    def all(self) -> Line:
        """The line of all programs."""
        return self.lines[0]

    def text(self) -> str:
        """Write the table and what belongs under it."""
        parts = [_table(self.lines), f"discarded by the generator: {self.discarded}; drawn twice: {self.repeated}"]
        calls, entries, others = self.served
        if others:
            share = f"{others} of them ({others / calls:.1%}) were served by an entry that other sizes had made"
            parts.append(f"{calls} calls made {entries} entries; {share}")
        told = {
            "refused": self.refusals,
            "ran eagerly": self.fallbacks,
            "differ with Dynamo alone": self.dynamos,
            "differ where eager asserts": self.asserts,
        }
        for what, counts in told.items():
            if counts:
                parts.append(f"{what}:")
                parts += [f"  {count} × {why}" for why, count in Counter(counts).most_common()]
        if self.failures:
            parts.append("failed:")
            names = Counter(failure.name for failure in self.failures)
            parts += [f"  {count} × {name}" for name, count in names.most_common()]
        return "\n".join(parts)

    def json(self) -> dict[str, Any]:
        """Return the same as plain data."""
        return {
            "lines": [asdict(line) for line in self.lines],
            "refusals": self.refusals,
            "fallbacks": self.fallbacks,
            "dynamos": self.dynamos,
            "asserts": self.asserts,
            "failures": [{k: v for k, v in asdict(failure).items() if k != "cell"} for failure in self.failures],
            "discarded": self.discarded,
            "repeated": self.repeated,
            "served": self.served,
        }


def summarize(blocks: Iterable[Block]) -> Summary:
    """Count the programs of all blocks, those that were drawn twice once."""
    rows: dict[str, Row] = {}
    reasons: dict[str, Counter[str]] = {name: Counter() for name in ("refused", "eager", "dynamo", "asserts")}
    failures: dict[str, Failure] = {}
    discarded = repeated = 0
    for block in sorted(blocks, key=lambda block: block.number):
        for row in block.rows:
            if row.program in rows:
                repeated += 1
                continue
            rows[row.program] = row
            if row.status in reasons:
                reasons[row.status].update(row.reasons)
        for failure in block.failures:
            failures.setdefault(failure.program, failure)
        discarded += block.discarded
    categories = sorted({category for row in rows.values() for category in row.categories})
    kept = list(rows.values())
    lines = [_line("all", kept)]
    lines += [_line(name, [row for row in rows.values() if name in row.categories]) for name in categories]
    return Summary(
        lines=tuple(lines),
        refusals=dict(reasons["refused"]),
        fallbacks=dict(reasons["eager"]),
        dynamos=dict(reasons["dynamo"]),
        asserts=dict(reasons["asserts"]),
        failures=tuple(failures.values()),
        discarded=discarded,
        repeated=repeated,
        served=(sum(row.served[0] for row in kept), sum(row.served[1] for row in kept), sum(n.served[2] for n in kept)),
    )


def _line(category: str, rows: list[Row]) -> Line:
    counts = Counter(row.status for row in rows)
    asked = len(rows) - counts["alike"] - counts["dynamo"] - counts["asserts"]
    return Line(
        category=category,
        programs=len(rows),
        accepted=counts["accepted"],
        static=counts["static"],
        refused=counts["refused"],
        eager=counts["eager"],
        alike=counts["alike"],
        dynamo=counts["dynamo"],
        asserts=counts["asserts"],
        wrong=counts["wrong"],
        error=counts["error"],
        raises=counts["raises"],
        graphs=len({graph for row in rows for graph in row.graphs}),
        share=counts["accepted"] / asked if asked else None,
    )


def _table(lines: Iterable[Line]) -> str:
    lines = list(lines)
    rare = ("static", "dynamo", "asserts")
    columns = [column for column in _COLUMNS if column[1] not in rare or any(getattr(n, column[1]) for n in lines)]
    cells = [[heading for heading, _ in columns]]
    for line in lines:
        share = "–" if line.share is None else f"{line.share:.1%}"
        cells.append([share if name == "share" else str(getattr(line, name)) for _, name in columns])
    widths = [max(len(row[index]) for row in cells) for index in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if index == 0 else text.rjust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
