"""How each line ran of lines that are compiled in part only: most of them are compiled as a whole."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from aotlab.report.model import CellPart, GraphBreakRow

_BRANCHES = (ast.If, ast.For, ast.While, ast.Try, ast.Match)


def with_ways(
    parts: Sequence[CellPart], breaks: Sequence[GraphBreakRow], captured: Collection[int], source: str
) -> Iterator[CellPart]:
    """Say how each line ran of the parts that are compiled only in part, where it is known at which lines they are not.

    ``captured`` are the lines of the cell, whose text is ``source``, of which graphs hold something.
    """
    stops = {row.cell_line: row.where for row in breaks if row.cell_line is not None}
    branches = set(_in_branches(source))
    for part in parts:
        lines = range(part.first_line, part.last_line + 1)
        if part.how != "compiled" or not part.reason or not any(line in stops for line in lines):
            yield part
            continue
        ways = []
        for line in lines:
            if line in stops:  # the line itself stops, or something that it calls
                ways.append("eager" if stops[line] == f"line {line}" and line not in captured else "in part")
            else:
                ways.append("" if line in branches and line not in captured else "compiled")
        # Of one line that has graphs something is compiled, if only of what it calls, as an optimizer's step.
        yield replace(part, ways=tuple(ways) if len(ways) > 1 else ("in part",))


def _in_branches(source: str) -> Iterator[int]:
    """List the lines of a cell that may not have run: those within branches and loops."""
    magic, _, rest = source.partition("\n")
    try:
        tree = ast.parse(f"\n{rest}" if magic.startswith("%%") else source)
    except SyntaxError:  # it holds what only IPython reads
        return
    for node in ast.walk(tree):
        if isinstance(node, _BRANCHES):
            yield from range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
