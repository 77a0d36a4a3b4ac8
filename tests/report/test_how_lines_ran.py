"""How each line of a cell ran, also inside of the functions and classes that the cell defines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aotlab.report.how_lines_ran import CALLS, Lines, how_line_ran, with_ways
from aotlab.report.model import CellPart

CELL = """%%aotcompile
g = h.sin()
if h.sum() > 0:
    k = h * 3
else:
    k = h * 2
t.unsqueeze_(0)
m = helper(k)
m.detach()
"""
DEFINITIONS = """%%aotcompile
@decorated
def train(data):
    for x in data:
        step(x)

class Net:
    size = 3
    def __init__(self):
        self.a = 1
    def forward(self, t):
        return t * self.a

def layers(t):
    while t:
        t = t - 1
        if t > 1:
            k = 2
        else:
            t = t + 1
    return t
"""


def captured(*lines: int) -> dict[int, set[str]]:
    """Make the records of a graph that contains ops from these lines."""
    return {line: {"f"} for line in lines}


@pytest.mark.parametrize(
    ("first", "last", "how", "lines", "expected"),
    [
        (  # the branch that the trace did not take
            2,
            9,
            "compiled",
            Lines(captured=captured(2, 3, 4, 7, 8, 9)),
            ("compiled", "compiled", "compiled", "", "", "compiled", "compiled", "compiled"),
        ),
        (
            2,
            9,
            "compiled",
            Lines(captured=captured(2, 3, 4), calls={8}, stops={3, 7, 8}),
            ("compiled", "in part", "compiled", "", "", "eager", "in part", "compiled"),
        ),
        # A reason that is at no line of the part.
        (2, 3, "compiled", Lines(stops={8}), ()),
        (2, 3, "compiled", Lines(stops={2}), ("eager", "compiled")),
        # Dynamo stops at `optimizer.step()`, and compiles the code that the line calls.
        (2, 2, "compiled", Lines(stops={2}), ("in part",)),
        # A region that calls compiled code was handed to Dynamo; a line of Python's was not.
        (7, 8, "compiled", Lines(calls={8}, stops={7}), ("eager", "compiled")),
        (7, 8, "python", Lines(calls={8}), ("python", CALLS)),
        (7, 8, "python", Lines(), ()),
    ],
)
def test_lines_of_a_part(first: int, last: int, how: str, lines: Lines, expected: tuple[str, ...]) -> None:
    """Each line has its own state. If all lines have the part's state, the part shows it."""
    part = CellPart(first_line=first, last_line=last, how=how, reason="why")
    (found,) = with_ways([part], lines, CELL)
    assert expected == found.ways


@pytest.mark.parametrize(
    ("first", "last", "how", "lines", "expected"),
    [
        # Python ran the function, which called compiled code.
        (2, 5, "python", Lines(calls={5}), ("python", "python", "python", CALLS)),
        (2, 5, "python", Lines(calls={5}, stops={4}), ("python", "python", "eager", CALLS)),
        # Dynamo captured the function.
        (2, 5, "compiled", Lines(captured=captured(5)), ()),
        (2, 5, "compiled", Lines(captured=captured(5), stops={5}), ("compiled", "compiled", "compiled", "in part")),
        # Python's own lines of a loop that Dynamo captured ran, and a branch without captured lines may not have run.
        (14, 21, "compiled", Lines(captured=captured(16, 17)), (*["compiled"] * 4, "", "", "", "compiled")),
        # Of a class only the methods of which graphs hold something.
        (7, 12, "compiled", Lines(captured=captured(12)), (*["python"] * 4, "compiled", "compiled")),
    ],
)
def test_lines_inside_functions(first: int, last: int, how: str, lines: Lines, expected: tuple[str, ...]) -> None:
    """A function's line is compiled if a graph contains ops from it. Otherwise it is Python's."""
    part = CellPart(first_line=first, last_line=last, how=how)
    (found,) = with_ways([part], lines, DEFINITIONS)
    assert expected == found.ways


def test_a_cell_that_only_ipython_reads() -> None:
    """A cell that Python cannot parse does no harm."""
    part = CellPart(first_line=2, last_line=3, how="compiled", reason="why")
    (found,) = with_ways([part], Lines(stops={2}), "%%aotcompile\n!ls\ny = x + 1")
    assert found.ways == ("eager", "compiled")


def test_the_way_of_a_line() -> None:
    """A line without an own word ran as its part did: in part, if the part has a reason why some is not compiled."""
    part = CellPart(first_line=2, last_line=3, how="compiled", ways=("in part", ""))
    assert [how_line_ran(part, 2), how_line_ran(part, 3)] == ["compiled in part", ""]
    whole = CellPart(first_line=2, last_line=3, how="compiled")
    assert how_line_ran(whole, 3) == "compiled"
    assert how_line_ran(replace(whole, reason="why"), 3) == "compiled in part"
    assert how_line_ran(replace(whole, reason="why", ways=("compiled", "eager")), 2) == "compiled"
    assert how_line_ran(replace(whole, how="python", reason="why"), 3) == "python"
