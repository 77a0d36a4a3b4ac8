"""Write the section of the HTML summary about a notebook's cell: its lines, how each ran, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from aotlab.report.counts import count_frame, summary
from aotlab.report.how_lines_ran import how_line_ran
from aotlab.report.markup import Child, Markup, element
from aotlab.report.model import Cell, CellPart, Frame, Report
from aotlab.report.parts import cell, fold, grid, heading, mark
from aotlab.report.text import amount
from aotlab.report.verdict import Break, breaks_of


def cell_section(report: Report) -> Markup | None:
    """Write the section about the cell; return None if the report is not about a cell."""
    if report.cell is None:
        return None
    about = [
        f"In [{report.cell.execution_count}]" if report.cell.execution_count is not None else "",
        "its functions are compiled when they are called" if report.cell.kind == "definitions" else "",
    ]
    title = " · ".join(part for part in about if part)
    if not report.cell.parts:
        return fold("The cell", title, element("pre", report.cell.source))
    error = report.cell.error
    return element(
        "section",
        heading("The cell", title),
        element("p", mark("ended with"), error) if error is not None else None,
        element("p", against) if (against := summary(report).against) else None,
        element("p", tolerance) if (tolerance := summary(report).tolerance) else None,
        _lines(report, report.cell),
    )


# Line by line


def _lines(report: Report, source: Cell) -> Markup:
    frames = {frame.name: frame for frame in report.frames}
    width = len(str(len(_text_lines(source))))
    breaks = breaks_of(report)
    stretches = list(_stretches(source))
    rows = [
        [
            cell(_code(lines, width)),
            cell(way_of_lines if part is not None else None),
            cell(*_why(part, frames, breaks) if part is not None and part is not before else ()),
        ]
        for before, (part, way_of_lines, lines) in zip(
            (None, *(each[0] for each in stretches)), stretches, strict=False
        )
    ]
    return grid(("line and code", "how it ran", "why, or by which graphs"), rows)


def _stretches(source: Cell) -> Iterator[tuple[CellPart | None, str, list[tuple[int, str]]]]:
    """Yield runs of neighbouring lines of the cell that ran in the same way.

    A run is a tuple: the part of the cell that contains the lines (None for lines in no part), words that say how the
    lines ran, and the lines with their numbers.
    """
    before: tuple[CellPart | None, str] = (None, "")
    lines: list[tuple[int, str]] = []
    for number, text in enumerate(_text_lines(source), 1):
        part = _part_of(number, source.parts)
        now = part, "" if part is None else how_line_ran(part, number)
        blank = part is None and not text.strip() and bool(lines)
        if not blank and lines and now != before:
            yield *before, lines
            lines = []
        if not blank:
            before = now
        lines.append((number, text))
    if lines:
        yield *before, lines


def _text_lines(source: Cell) -> list[str]:
    """Split the source into lines as Python does; `str.splitlines` splits at more characters."""
    return source.source.removesuffix("\n").split("\n")


def _part_of(line: int, parts: Sequence[CellPart]) -> CellPart | None:
    """Return the part of the cell that contains a line; if several do, return the innermost."""
    around = [part for part in parts if part.first_line <= line <= part.last_line]
    return min(around, key=lambda part: part.last_line - part.first_line, default=None)


def _code(lines: Sequence[tuple[int, str]], width: int) -> Markup:
    return element("pre", *[f"{number:>{width}} {text}\n" for number, text in lines])


def _why(part: CellPart, frames: Mapping[str, Frame], breaks: Sequence[Break]) -> list[Child]:
    """Say which graphs ran a part of the cell, and why some or all lines of the part were not compiled."""
    children: list[Child] = []
    for name in part.frames:
        children += [
            "; " if children else None,
            element("code", name),
            _service(frames[name]) if name in frames else None,
        ]
    reasons = [part.reason] if part.reason else []
    if part.how == "compiled":
        stops = [each for each in breaks if each.line is not None and part.first_line <= each.line <= part.last_line]
        # The part's reason is the reason of its first graph break. The rows of the graph breaks also have the line, so
        # prefer these.
        reasons = [f"Python took over at line {each.line}: {each.reason.rstrip('.')}" for each in stops] or [
            f"not all of it was captured: {reason}" for reason in reasons
        ]
    for reason in reasons:
        children += ["; " if children else None, reason]
    return children


def _service(frame: Frame) -> str:
    """Say how many graphs serve a function, whether an earlier run compiled them, and how often they ran."""
    counts = count_frame(frame)
    facts = [amount(counts.served, "graph"), amount(frame.calls.compiled, "call")]
    if any(graph.frontend == "direct" for graph in frame.graphs):
        facts.append("traced directly")
    if counts.reused:
        all_reused = counts.reused == counts.served
        facts.append("compiled in an earlier run" if all_reused else f"{counts.reused} from an earlier run")
    return f": {', '.join(facts)}"
