"""The table at the end of a run: how many programs of each category had each result. Each program counts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from aotlab.maintenance.fuzz.block import Block, Failure, Row

#: The columns of the table in order, each with its heading and the field of `Line` that it shows.
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
    """The counts of the programs of one category.

    Attributes
    ----------
    category, programs
        The category of `Program.categories`, or ``"all"``, and the number of its programs.
    accepted
        Programs that were compiled for every call.
    static
        Programs that were compiled for every call, in a plan that compiles for all sizes, although no entry ran a call
        with other sizes than the sizes for which the entry was traced.
    refused, eager
        Programs with a call that the engine refused, or ran eagerly.
    alike
        Programs that raise as in eager, before anything was compiled.
    dynamo
        Programs that differ from eager in the same way with Dynamo alone, so that the engine is not the cause.
    asserts
        Programs for which eager itself fails an internal assertion of torch, and the engine does something else.
    wrong, error, raises
        The failures. Programs with a result that differs; programs that raise in eager, and raise nothing or another
        error in the engine; programs that raise only in the engine.
    graphs
        The number of distinct graphs.
    share
        The share of accepted programs among the programs that are neither ``alike``, ``dynamo`` nor ``asserts``. It is
        None if there is no such program.
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
    """The counts of a whole run.

    ``lines`` begins with the line of all programs, and has one line for each category. ``refusals`` and ``fallbacks``
    count programs by the reason why they were refused or ran eagerly. ``dynamos`` counts the programs that differ with
    Dynamo alone, and ``asserts`` the programs for which eager fails an internal assertion of torch, both by the coarse
    name of their differences. ``discarded`` is the number of programs that were rejected while they were drawn, and
    ``repeated`` the number of programs that were drawn before. `block.Row` explains ``served``.
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
        """Return the table and the lists below it as text."""
        parts = [_table(self.lines), f"discarded by the generator: {self.discarded}; drawn twice: {self.repeated}"]
        calls, entries, others = self.served
        if others:
            share = f"{others} of them ({others / calls:.1%}) ran an entry that was traced for other sizes"
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
        """Return the summary as plain data."""
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
    """Count the programs of all blocks; a program that was drawn twice counts once."""
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
    all_rows = list(rows.values())
    lines = [_line("all", all_rows)]
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
        served=(
            sum(row.served[0] for row in all_rows),
            sum(row.served[1] for row in all_rows),
            sum(n.served[2] for n in all_rows),
        ),
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
