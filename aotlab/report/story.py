"""A notebook's cell on the page: its lines with how each ran, and the tensors that it mutated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from aotlab.report.legend import WAYS
from aotlab.report.markup import Child, Markup, element, join
from aotlab.report.model import Cell, CellPart, Frame, Input, Report
from aotlab.report.parts import cell, fold, grid, heading, mark, preformatted, tensor_cell
from aotlab.report.sections import mutation_marks
from aotlab.report.text import amount, listed
from aotlab.report.verdict import Break, breaks_of, served

#: How many mutated tensors the page lists; `report.inputs` has them all.
MOST_MUTATED = 200


def cell_section(report: Report, *, short: bool) -> Markup | None:
    """Write the section about the cell, if ``short`` only its lines; None if the report is about none."""
    if report.cell is None:
        return None
    about = [
        f"In [{report.cell.execution_count}]" if report.cell.execution_count is not None else "",
        "its functions are compiled when they are called" if report.cell.kind == "definitions" else "",
    ]
    title = " · ".join(part for part in about if part)
    if not report.cell.parts:
        return fold("The cell", title, preformatted(report.cell.source))
    error = report.cell.error
    return element(
        "section",
        heading("The cell", title),
        element("p", mark("ended with", "bad"), error, kind="note") if error is not None else None,
        _lines(report, report.cell),
        None if short else _mutated(report, report.cell),
    )


# Line by line


def _lines(report: Report, source: Cell) -> Markup:
    frames = {frame.name: frame for frame in report.frames}
    width = len(str(len(_text_lines(source))))
    breaks = breaks_of(report)
    rows = [
        [
            cell(_code(lines, width), kind=f"code ran-{part.how.replace(' ', '-')}" if part is not None else "code"),
            cell(mark(part.how, WAYS[part.how][0]) if part.how in WAYS else part.how) if part is not None else cell(),
            cell(*_why(part, frames, breaks), kind="words") if part is not None else cell(),
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
    pieces: list[Child] = []
    for number, text in lines:
        pieces += [element("span", f"{number:>{width}} ", kind="soft"), f"{text}\n"]
    return element("pre", *pieces)


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


# What was mutated


def _mutated(report: Report, source: Cell) -> Markup | None:
    found = [(_place(frame, index), row) for frame, index, row in _in_graphs(report)]
    found += [
        (element("span", "under another name" if row.kind == "alias" else "outside of the graphs"), row)
        for row in source.mutated_outside
    ]
    if not found:
        if source.kind == "definitions":
            return None
        return join(
            heading("Mutated tensors", "none"),
            element("p", "The cell wrote no tensor that a variable of the notebook leads to.", kind="soft"),
        )
    rows = [
        [
            cell(row.name, kind="name"),
            cell(tensor_cell(row.tensor)) if row.tensor is not None else cell(),
            cell(where),
            cell(*_what_happened(row), kind="words"),
        ]
        for where, row in found[:MOST_MUTATED]
    ]
    more = len(found) - len(rows)
    names = len({row.name for _, row in found})
    return join(
        heading("Mutated tensors", f"{names}, in the graphs and outside of them"),
        grid(("name", "tensor", "where", "what happened to it"), rows),
        element("p", f"{more:,} more: see report.inputs.", kind="note") if more else None,
    )


def _in_graphs(report: Report) -> Iterator[tuple[Frame, int | None, Input]]:
    """Yield what graphs mutate, with the graph's number where a frame has several."""
    for frame in report.frames:
        graphs = [graph for graph in frame.graphs if served(graph)]
        for graph in graphs:
            for row in graph.inputs:
                if row.mutated:
                    yield frame, graph.index if len(graphs) > 1 else None, row


def _place(frame: Frame, index: int | None) -> Markup:
    return join(element("code", frame.name), "" if index is None else f", graph {index}")


def _what_happened(row: Input) -> list[Markup]:
    if row.kind == "alias" and row.overlaps:
        return [mark("data mutated", "write"), mark(f"written through {listed(row.overlaps)}", "alias")]
    return mutation_marks(row)
