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
    ("refused", "refused"),
    ("ran eagerly", "eager"),
    ("raise alike", "alike"),
    ("Dynamo's own", "dynamo"),
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
    accepted, refused, eager
        Compiled for every call; refused in some call; run eagerly in some call.
    alike
        They raise as in eager, before there was anything to compile.
    dynamo
        They differ just as they do with Dynamo alone: the engine gets a graph that is wrong already, or none.
    wrong, error, raises
        The failures: a result that differs; another error than eager's, or none; an error where eager has none.
    graphs
        Distinct graphs.
    share
        Accepted ones among those that are neither ``alike`` nor Dynamo's own; None if there are none.
    """

    category: str
    programs: int
    accepted: int
    refused: int
    eager: int
    alike: int
    dynamo: int
    wrong: int
    error: int
    raises: int
    graphs: int
    share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A whole run.

    ``lines`` begins with all programs; ``refusals`` and ``fallbacks`` count programs by why they were refused or ran
    eagerly, ``dynamos`` those that differ with Dynamo alone by how; ``discarded`` ones were begun and given up by the
    generator, ``repeated`` ones drawn before.
    """

    lines: tuple[Line, ...]
    refusals: dict[str, int]
    fallbacks: dict[str, int]
    dynamos: dict[str, int]
    failures: tuple[Failure, ...]
    discarded: int
    repeated: int

    @property
    def all(self) -> Line:
        """The line of all programs."""
        return self.lines[0]

    def text(self) -> str:
        """Write the table and what belongs under it."""
        parts = [_table(self.lines), f"discarded by the generator: {self.discarded}; drawn twice: {self.repeated}"]
        told = {"refused": self.refusals, "ran eagerly": self.fallbacks, "differ with Dynamo alone": self.dynamos}
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
            "failures": [{k: v for k, v in asdict(failure).items() if k != "cell"} for failure in self.failures],
            "discarded": self.discarded,
            "repeated": self.repeated,
        }


def summarize(blocks: Iterable[Block]) -> Summary:
    """Count the programs of all blocks, those that were drawn twice once."""
    rows: dict[str, Row] = {}
    reasons: dict[str, Counter[str]] = {"refused": Counter(), "eager": Counter(), "dynamo": Counter()}
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
    lines = [_line("all", list(rows.values()))]
    lines += [_line(name, [row for row in rows.values() if name in row.categories]) for name in categories]
    return Summary(
        lines=tuple(lines),
        refusals=dict(reasons["refused"]),
        fallbacks=dict(reasons["eager"]),
        dynamos=dict(reasons["dynamo"]),
        failures=tuple(failures.values()),
        discarded=discarded,
        repeated=repeated,
    )


def _line(category: str, rows: list[Row]) -> Line:
    counts = Counter(row.status for row in rows)
    asked = len(rows) - counts["alike"] - counts["dynamo"]
    return Line(
        category=category,
        programs=len(rows),
        accepted=counts["accepted"],
        refused=counts["refused"],
        eager=counts["eager"],
        alike=counts["alike"],
        dynamo=counts["dynamo"],
        wrong=counts["wrong"],
        error=counts["error"],
        raises=counts["raises"],
        graphs=len({graph for row in rows for graph in row.graphs}),
        share=counts["accepted"] / asked if asked else None,
    )


def _table(lines: Iterable[Line]) -> str:
    lines = list(lines)
    columns = [column for column in _COLUMNS if column[1] != "dynamo" or any(line.dynamo for line in lines)]
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
