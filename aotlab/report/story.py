"""A notebook's cell in the summary: its lines, with how each ran and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from aotlab.report.markup import Child, Markup, element
from aotlab.report.model import Cell, CellPart, Frame, Report
from aotlab.report.parts import cell, fold, grid, heading, mark
from aotlab.report.text import amount
from aotlab.report.verdict import Break, breaks_of, compared_sentence, served


def cell_section(report: Report) -> Markup | None:
    """Write the section about the cell; None if the report is about none."""
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
        element("p", against) if (against := compared_sentence(report)) else None,
        _lines(report, report.cell),
    )


# Line by line


def _lines(report: Report, source: Cell) -> Markup:
    frames = {frame.name: frame for frame in report.frames}
    width = len(str(len(_text_lines(source))))
    breaks = breaks_of(report)
    rows = [
        [
            cell(_code(lines, width)),
            cell(part.how if part is not None else None),
            cell(*_why(part, frames, breaks) if part is not None else ()),
        ]
        for part, lines in _stretches(source)
    ]
    return grid(("line and code", "how it ran", "why, or by which graphs"), rows)


def _stretches(source: Cell) -> Iterator[tuple[CellPart | None, list[tuple[int, str]]]]:
    """Yield the cell's lines, those together that stand together and ran in one way."""
    before: CellPart | None = None
    lines: list[tuple[int, str]] = []
    for number, text in enumerate(_text_lines(source), 1):
        part = _part_of(number, source.parts)
        blank = part is None and not text.strip() and bool(lines)
        if not blank and lines and part is not before:
            yield before, lines
            lines = []
        if not blank:
            before = part
        lines.append((number, text))
    if lines:
        yield before, lines


def _text_lines(source: Cell) -> list[str]:
    """Split the source as Python counts lines; `str.splitlines` knows more ends than one."""
    return source.source.removesuffix("\n").split("\n")


def _part_of(line: int, parts: Sequence[CellPart]) -> CellPart | None:
    """Return the part that a line belongs to: where one holds another, the inner one."""
    around = [part for part in parts if part.first_line <= line <= part.last_line]
    return min(around, key=lambda part: part.last_line - part.first_line, default=None)


def _code(lines: Sequence[tuple[int, str]], width: int) -> Markup:
    return element("pre", *[f"{number:>{width}} {text}\n" for number, text in lines])


def _why(part: CellPart, frames: Mapping[str, Frame], breaks: Sequence[Break]) -> list[Child]:
    """Say which graphs ran a part, and why others, or none, did not."""
    found: list[Child] = []
    for name in part.frames:
        found += ["; " if found else None, element("code", name), _service(frames[name]) if name in frames else None]
    reasons = [part.reason] if part.reason else []
    if part.how == "compiled":
        stops = [each for each in breaks if each.line is not None and part.first_line <= each.line <= part.last_line]
        # A part's reason is that of its first break; the breaks themselves know the line, too.
        reasons = [f"Python took over at line {each.line}: {each.reason.rstrip('.')}" for each in stops] or [
            f"not all of it was captured: {reason}" for reason in reasons
        ]
    for reason in reasons:
        found += ["; " if found else None, reason]
    return found


def _service(frame: Frame) -> str:
    """Say how many graphs serve a frame, whether they are old, and how often they ran."""
    graphs = [graph for graph in frame.graphs if served(graph)]
    facts = [amount(len(graphs), "graph"), amount(sum(graph.calls for graph in graphs), "call")]
    reused = sum(graph.reused for graph in graphs)
    if reused:
        facts.append("compiled in an earlier run" if reused == len(graphs) else f"{reused} from an earlier run")
    return f": {', '.join(facts)}"
