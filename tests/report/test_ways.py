"""How each line of a cell ran that is compiled in part only."""

from __future__ import annotations

from aotlab.report.model import CellPart, GraphBreakRow
from aotlab.report.ways import with_ways

CELL = """%%aotcompile
g = h.sin()
if h.sum() > 0:
    k = h * 3
else:
    k = h * 2
t.unsqueeze_(0)
m = helper(k)
return m.detach()
"""


def stop(line: int, where: str) -> GraphBreakRow:
    """Make a break at a line of the cell."""
    return GraphBreakRow(frame="f", where=where, cell_line=line, reason="why")


def test_only_lines_that_stop_are_not_wholly_compiled() -> None:
    """A line that stops is compiled in part, or not at all; a branch that never ran is not said to be compiled."""
    part = CellPart(first_line=2, last_line=9, how="compiled", reason="why")
    breaks = [stop(3, "line 3"), stop(7, "line 7"), stop(8, "In [1], line 2")]
    (found,) = with_ways([part], breaks, {2, 3, 4}, CELL.replace("return ", ""))
    assert found.ways == ("compiled", "in part", "compiled", "", "", "eager", "in part", "compiled")


def test_where_no_line_stops_all_may_be_in_part() -> None:
    """A reason that is at no line, and a cell that Python cannot read, do no harm."""
    part = CellPart(first_line=2, last_line=3, how="compiled", reason="why")
    assert list(with_ways([part], [stop(8, "line 8")], set(), CELL)) == [part]
    (found,) = with_ways([part], [stop(2, "line 2")], set(), CELL)
    assert found.ways == ("eager", "compiled")


def test_one_line_with_graphs_is_compiled_in_part() -> None:
    """What it calls may be: Dynamo stops at `optimizer.step()`, and compiles what is within."""
    part = CellPart(first_line=2, last_line=2, how="compiled", frames=("step",), reason="why")
    (found,) = with_ways([part], [stop(2, "line 2")], set(), CELL)
    assert found.ways == ("in part",)
