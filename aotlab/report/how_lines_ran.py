"""Determine how each line of a cell ran: compiled, eagerly, or as plain Python.

This includes the lines inside of functions and classes that the cell defines.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aotlab.report.model import CellPart

_BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.Match)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
#: The word, in `CellPart.ways`, for a line that Python ran and that called functions whose lines are compiled.
CALLS = "calls compiled code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Facts about the lines of a cell, by line number, from which `with_ways` determines how each line ran.

    Attributes
    ----------
    captured
        The lines from which a graph has nodes. Each line is mapped to the names of the report's frames with these
        graphs.
    calls
        The lines that Python ran and that called captured code.
    stops
        The lines with a graph break: Dynamo stopped at the line itself, or in a function that the line calls.
    python
        The lines that call a library without tensors (such as numpy), or a function that calls such a library.
    """

    captured: Mapping[int, Collection[str]] = field(default_factory=dict)
    calls: Collection[int] = ()
    stops: Collection[int] = ()
    python: Collection[int] = ()

    def known(self, line: int) -> str | None:
        """Return how a line ran, as a word of `CellPart.ways`; None if none of these facts is about the line."""
        if line in self.stops:
            return "in part" if line in self.captured or line in self.calls else "eager"
        way = "compiled" if line in self.captured else CALLS if line in self.calls else None
        return "python" if way is None and line in self.python else way


def with_ways(parts: Sequence[CellPart], lines: Lines, source: str) -> Iterator[CellPart]:
    """Yield the parts of a cell; if the lines of a part ran in different ways, set the part's field ``ways``.

    Parameters
    ----------
    parts
        The parts of the cell.
    lines
        Facts about its lines.
    source
        The cell's text.
    """
    tree = parsed(source)
    branches = set(_in_branches(tree, lines.captured))
    functions = [_range(node) for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    for part in parts:
        numbers = range(part.first_line, part.last_line + 1)
        inside = [each for each in functions if each[0] in numbers]
        broken = part.how == "compiled" and part.reason and any(line in lines.stops for line in numbers)
        calls_library = part.how == "compiled" and any(line in lines.python for line in numbers)
        called = part.how == "python" and any(line in lines.calls for line in numbers)
        divided = part.how == "compiled" and (inside or not branches.isdisjoint(numbers))
        if not (broken or calls_library or called or divided):
            yield part
            continue
        ways = [_way(line, part, lines, inside, branches) for line in numbers]
        if broken and len(ways) == 1:
            # The line is part of the compiled code, and only a function that it calls was not compiled in full.
            ways = ["in part"]
        yield part if set(ways) == {part.how} else replace(part, ways=tuple(ways))


def how_line_ran(part: CellPart, line: int) -> str:
    """Return how a line of a part ran, in the page's words; empty if the line is in a branch without graph nodes.

    If a compiled part has a reason why some of it is not compiled, and does not say which lines that concerns, each of
    its lines is compiled in part.
    """
    way = recorded_way(part, line)
    return "compiled in part" if way == "in part" or (way == "compiled" and part.reason and not part.ways) else way


def recorded_way(part: CellPart, line: int) -> str:
    """Return the word for a line in `CellPart.ways`, or `CellPart.how` if the lines of the part have no own words."""
    return part.ways[line - part.first_line] if part.ways else part.how


def _way(
    line: int, part: CellPart, lines: Lines, functions: Sequence[tuple[int, int]], branches: Collection[int]
) -> str:
    """Return how a line of a part ran, as a word of `CellPart.ways`.

    If no fact in ``lines`` is about the line, use the facts about the function that contains the line, or else
    ``part.how``. ``functions`` has the first and the last line of each function that the part defines. ``branches`` are
    the lines of branches that perhaps did not run.
    """
    known_way = lines.known(line)
    if known_way is not None:
        # In a compiled part, Dynamo captured the calling line together with the called code. So the line is "compiled".
        return "compiled" if known_way == CALLS and part.how == "compiled" and not functions else known_way
    if functions:
        around = [each for each in functions if each[0] <= line <= each[1]]
        first, last = max(around, default=(0, -1))
        if not any(number in lines.captured for number in range(first, last + 1)):
            return "python"
    return part.how if part.how != "compiled" or line not in branches else ""


def parsed(source: str) -> ast.AST:
    """Parse a cell; the magic's line, if there is one, is line 1. Return an empty tree if it is not plain Python."""
    magic, _, body = source.partition("\n")
    try:
        return ast.parse(f"\n{body}" if magic.startswith("%%") else source)
    except (SyntaxError, ValueError):  # the cell has IPython's own syntax, or null bytes
        return ast.Module([], [])


def _in_branches(tree: ast.AST, captured: Collection[int]) -> Iterator[int]:
    """Yield the lines that perhaps did not run: the blocks of branches and loops in which no line was captured."""
    for node in ast.walk(tree):
        if isinstance(node, _BRANCHES):
            first = node.lineno + 1
            for block in _blocks(node):
                last = block[-1].end_lineno or block[-1].lineno
                if not any(line in captured for line in range(first, last + 1)):
                    yield from range(first, last + 1)
                first = last + 1


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of statements of a branch or a loop, in the order of the source."""
    for _name, value in ast.iter_fields(node):
        for each in value if isinstance(value, list) else ():
            if isinstance(each, ast.ExceptHandler | ast.match_case):
                yield each.body
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            yield value


def _range(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[int, int]:
    """Return the first and the last line of a function, including its decorators."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)]), node.end_lineno or node.lineno
