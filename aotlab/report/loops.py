"""Find the loops of a cell that were unrolled.

If Dynamo or a trace runs a Python loop, the graph contains the ops of the loop's body once for each iteration.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from aotlab.errors import UserLine
from aotlab.report.how_lines_ran import parsed, recorded_way
from aotlab.report.model import Cell, Graph, Report

_LEAVES = (ast.Break, ast.Return, ast.Raise)
_OPERATIONS = (ast.AugAssign, ast.BinOp, ast.Call, ast.Compare, ast.UnaryOp)
#: A node of a graph: the name of its op, and the stack of user lines that caused the node, from the innermost line to
#: the line in the loop.
_Operation = tuple[str, tuple[UserLine, ...]]


def unrolled_loops(report: Report) -> dict[int, set[int]]:
    """Map the first line of each unrolled loop of a report's cell to the numbers of iterations that graphs contain.

    A loop that Python runs is not unrolled, even if it calls graphs that repeat nodes. The number 0 means that the
    number of iterations is unknown, for example because the nodes are not the same in all iterations.
    """
    steps_of_lines: dict[int, set[int]] = {}
    if report.cell is None:
        return steps_of_lines
    graphs = [graph for frame in report.frames for graph in frame.graphs if graph.status == "compiled"]
    for loop in _captured_loops(report.cell):
        for steps in [steps for graph in graphs for steps in _steps(graph, report.cell, loop)]:
            if steps != 1:
                steps_of_lines.setdefault(loop.lineno, set()).add(steps)
    return steps_of_lines


def _captured_loops(cell: Cell) -> Iterator[ast.For | ast.While]:
    """Yield the loops of a cell that are part of compiled code."""
    for node in ast.walk(parsed(cell.source)):
        if isinstance(node, ast.For | ast.While):
            parts = [part for part in cell.parts if part.first_line <= node.lineno <= part.last_line]
            if any(recorded_way(part, node.lineno) == "compiled" for part in parts):
                yield node


def _steps(graph: Graph, cell: Cell, loop: ast.For | ast.While) -> Iterator[int]:
    """Yield the number of iterations of a loop in a graph.

    If the function with the loop was called from several lines, yield a number for each of these calls.
    """
    text = [line.strip() for line in cell.source.split("\n")]
    body = range(loop.body[0].lineno, (loop.body[-1].end_lineno or loop.body[-1].lineno) + 1)

    def is_inside(line: UserLine) -> bool:
        return line.line in body and text[line.line - 1] == line.code

    nodes: dict[tuple[UserLine, ...], list[_Operation]] = {}
    for node in graph.nodes:
        stack = () if node.line is None else (node.line, *node.line.callers)
        inside = [n for n, line in enumerate(stack) if is_inside(line)]
        if node.stage == "trace" and node.phase == "forward" and node.op == "call_function" and inside:
            nodes.setdefault(stack[inside[-1] + 1 :], []).append((node.target, stack[: inside[-1] + 1]))
    operations = Counter(each.lineno for part in loop.body for each in ast.walk(part) if isinstance(each, _OPERATIONS))
    for sequence in nodes.values():
        yield _known_steps(loop) or _repeats(sequence, operations)


def _known_steps(loop: ast.For | ast.While) -> int | None:
    """Return the number of iterations of a loop over a range with literal bounds; None for other loops."""
    call = loop.iter if isinstance(loop, ast.For) else None
    if not isinstance(call, ast.Call) or any(isinstance(node, _LEAVES) for node in ast.walk(loop)):
        return None
    numbers = [each.value for each in call.args if isinstance(each, ast.Constant) and type(each.value) is int]
    if not isinstance(call.func, ast.Name) or call.func.id != "range" or not 0 < len(numbers) == len(call.args) <= 3:
        return None
    return len(range(*numbers)) if 0 not in numbers[2:] else None


def _repeats(sequence: Sequence[_Operation], operations: Mapping[int, int]) -> int:
    """Return the number of iterations of a loop whose nodes are ``sequence``: how often it repeats its beginning.

    The number is 1 if no node is repeated, and 0 if it is unknown. It is unknown if the repeats are not equal. It is
    also unknown if a repeat has fewer nodes for a line than the line's source has operations, because then several
    repeats may belong to one iteration. ``operations`` maps each line to the number of its operations.
    """
    count = len(sequence)
    for length in range(1, count // 2 + 1):
        step = list(sequence[:length])
        if count % length == 0 and step * (count // length) == list(sequence):
            nodes = Counter(lines[-1].line for _, lines in step)
            # A single node from a called function may occur several times in one iteration.
            called = length == 1 and len(step[0][1]) > 1
            whole = not called and all(nodes[line] >= operations[line] for line in nodes)
            return count // length if whole else 0
    return 1 if len(set(sequence)) == count else 0
