"""A notebook's cell on the page.

The page shows how each line ran and why, and which tensors were mutated where. All texts are escaped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from aotlab.report import Report
from aotlab.report.html import fragment
from aotlab.report.mime import CAP, bundle, embedded_size, plain
from aotlab.report.model import Cell, CellPart, Frame, Graph, GraphBreakRow, Input, Refusal, TensorInfo
from aotlab.report.verdict import DIFFERS

SOURCE = """\
%%aotcompile
for step in range(3):

    # the heart of it
    x.mul_(2)
    y = x @ weight
    print(y)
z = x.t_()
"""
WHY = "Dynamo does not capture an in-place view of an input"


class Tables(HTMLParser):
    """The tables of a page, each under the heading before it, as rows of texts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.rows: dict[str, list[list[str]]] = {}
        self._title = ""
        self._cell: list[str] | None = None
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("h3", "summary") and self._cell is None:
            self._title, self._in_title = "", True
        elif tag == "tr":
            self.rows.setdefault(self._title.partition(" ")[0], []).append([])
        elif tag == "td":
            self._cell = []
        elif tag == "small":
            self._in_title = False

    def handle_endtag(self, tag: str) -> None:
        if tag in ("h3", "summary"):
            self._in_title = False
        elif tag == "td" and self._cell is not None:
            self.rows[self._title.partition(" ")[0]][-1].append("".join(self._cell).strip("\n"))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self._title += data
        if self._cell is not None:
            self._cell.append(data)

    def of(self, title: str) -> list[list[str]]:
        """Return the rows of the tables under a heading, without those that hold titles, blanks at the ends dropped."""
        return [[text.rstrip() for text in row] for row in self.rows[title] if row]


def tensor() -> TensorInfo:
    """Describe some tensor."""
    return TensorInfo(dtype="float32", device="cpu", shape=(4, 5), stride=(5, 1), nbytes=80)


@pytest.fixture
def told(report: Report) -> Report:
    """Return the report of a cell with lines of every kind."""
    frame = replace(report.frames[0], name="lines 5–6", function="lines 5–6")
    parts = (
        CellPart(first_line=2, last_line=8, how="python", reason="loops 3 times"),
        CellPart(first_line=5, last_line=6, how="compiled", frames=("lines 5–6",)),
        CellPart(first_line=7, last_line=7, how="python", reason="calls print"),
        CellPart(first_line=8, last_line=8, how="eager", reason=WHY),
        CellPart(first_line=9, last_line=9, how="not run"),
    )
    outside = (
        Input(name="w.grad", kind="outside", tensor=tensor(), mutates_data=True),
        Input(name="v", kind="alias", tensor=tensor(), overlaps=("x",), mutates_data=True),
    )
    cell = Cell(
        source=f"{SOURCE}last = 1",
        execution_count=7,
        parts=parts,
        mutated_outside=outside,
        error="ValueError: no",
    )
    return replace(report, frames=(frame,), cell=cell)


def test_every_line_says_how_it_ran(told: Report) -> None:
    """Lines that ran in the same way are shown together. Of two parts around a line, the inner one counts."""
    assert Tables(fragment(told)).of("The") == [
        ["1 %%aotcompile", "", ""],
        ["2 for step in range(3):\n3 \n4     # the heart of it", "python", "loops 3 times"],
        ["5     x.mul_(2)\n6     y = x @ weight", "compiled", "lines 5–6: 2 graphs, 4 calls, traced directly"],
        ["7     print(y)", "python", "calls print"],
        ["8 z = x.t_()", "eager", WHY],
        ["9 last = 1", "not run", ""],
    ]


def test_lines_of_no_part(told: Report) -> None:
    """A comment belongs to no part. A blank line does not split the part that contains it."""
    assert told.cell is not None
    parts = (
        CellPart(first_line=1, last_line=1, how="compiled"),
        CellPart(first_line=4, last_line=4, how="compiled", reason="the rest draws"),
    )
    made = told.with_cell(replace(told.cell, source="a = x + 1\n\n# then\nb = a * 2", parts=parts))
    assert Tables(fragment(made)).of("The") == [
        ["1 a = x + 1\n2", "compiled", ""],
        ["3 # then", "", ""],
        ["4 b = a * 2", "compiled in part", "not all of it was captured: the rest draws"],
    ]


def test_lines_are_aligned_and_pieces_apart(told: Report) -> None:
    """Line numbers have the same width in all rows, and the graphs of one part are listed."""
    assert told.cell is not None
    parts = (CellPart(first_line=9, last_line=10, how="compiled", frames=("lines 5–6", "gone")),)
    made = told.with_cell(replace(told.cell, source="\n" * 8 + "a = 1\nb = 2\n", parts=parts))
    assert Tables(fragment(made)).of("The")[1] == [
        " 9 a = 1\n10 b = 2",
        "compiled",
        "lines 5–6: 2 graphs, 4 calls, traced directly; gone",
    ]


def test_graph_breaks_stand_with_their_lines(told: Report) -> None:
    """A graph break in a compiled line of this cell, or in a function that it calls, is shown at that line."""
    words = "calls `x.t_`"
    rows = (
        GraphBreakRow(frame="/tmp/cell.py:6", where="line 6", cell_line=6, words=words, reason="…"),
        GraphBreakRow(frame="/tmp/u.py:8", where="tmp/u.py:8", cell_line=5, words="it logs", reason="…"),
        GraphBreakRow(frame="/tmp/u.py:9", where="tmp/u.py:9", words="elsewhere", reason="…"),
    )
    made = replace(told, frames=(replace(told.frames[0], refusals=()),), graph_break_rows=rows)
    assert Tables(fragment(made)).of("The")[2][2] == (
        "lines 5–6: 2 graphs, 4 calls, traced directly; Python took over at line 6: calls `x.t_`; "
        "Python took over at line 5: it logs, at tmp/u.py:8"
    )
    assert "3 graph breaks, where Python took over, first at line 6 (calls `x.t_`)." in made.verdict
    other = replace(made, graph_break_rows=rows[1:])
    assert "first at line 5 (it logs, at tmp/u.py:8)." in other.verdict
    other = replace(made, graph_break_rows=rows[2:])
    assert "1 graph break, where Python took over, at tmp/u.py:9 (elsewhere)." in other.verdict
    assert Tables(fragment(other)).of("The")[2][2] == "lines 5–6: 2 graphs, 4 calls, traced directly"


def test_reuse_is_said(told: Report) -> None:
    """Old graphs are marked with the lines, at the graph, and among the recompiles."""

    def of(*graphs: Graph) -> str:
        return fragment(replace(told, frames=(replace(told.frames[0], graphs=graphs),)))

    first, second = told.frames[0].graphs
    text = of(replace(first, reused=True), replace(second, reused=True))
    assert "lines 5–6</code>: 2 graphs, 4 calls, traced directly, compiled in an earlier run<" in text
    assert "compiled in an earlier run of the cell · training" in text
    assert "<td>compiled in an earlier run</td>" in text
    assert "4 calls, traced directly, 1 from an earlier run<" in of(replace(first, reused=True), second)
    assert "earlier run" not in of(first, second)


def test_the_error_is_at_the_top(told: Report) -> None:
    """The error that ended the cell is shown above the cell's lines."""
    text = fragment(told)
    assert text.index("ended with") < text.index("ValueError: no</p>") < text.index("%%aotcompile")


def test_a_graph_that_differs_is_prominent(told: Report) -> None:
    """A graph that was found different from eager is marked as bad, at the top and in its place."""
    assert told.cell is not None
    refused = replace(told.frames[0].graphs[0], status="refused")
    refusal = Refusal(
        graph=0,
        error="RefusedError",
        reason="Refused",
        message=f"{DIFFERS}: other values",
        outcome="ran eagerly",
        at_ns=1,
    )
    made = replace(told, frames=(Frame(name="line 8", function="line 8", graphs=(refused,), refusals=(refusal,)),))
    text = fragment(made)
    assert '<p class="verdict different">✗ Nothing was compiled: NOT equal to eager' in text
    assert "<p><b>differs from eager, not used</b> " in text


def test_only_the_first_stretches_are_open(told: Report) -> None:
    """A cell of many stretches shows a line for each of the later ones."""
    frames = tuple(replace(told.frames[0], name=f"line {i}") for i in range(5))
    assert fragment(replace(told, frames=frames)).count("<details open") == 3


def test_all_of_it_is_escaped(told: Report, tell: Callable[..., Any]) -> None:
    """Source, reasons, names and errors full of markup stay text."""
    evil = "<script>alert(1)</script>\" onload='x'</pre></td>"
    assert told.cell is not None
    cell = Cell(
        source=evil,
        error=evil,
        options=evil,
        parts=(CellPart(first_line=1, last_line=1, how=evil, frames=(evil,), reason=evil),),
        mutated_outside=(Input(name=evil, kind="alias", overlaps=(evil,), mutates_data=True),),
    )
    text = fragment(replace(told, cell=cell, frames=(replace(told.frames[0], name=evil),)))
    assert "<script" not in text
    assert Tables(text).of("The") == [[f"1 {evil}", evil, f"{evil}: 2 graphs, 4 calls, traced directly; {evil}"]]


def test_a_large_cell_fits(told: Report) -> None:
    """A cell of thousands of lines, reasons and tensors stays below the cap, and its verdict is whole."""
    parts = tuple(
        CellPart(first_line=i, last_line=i, how="eager", reason=f"reason {i} " + "word " * 50) for i in range(1, 3000)
    )
    rows = tuple(Input(name=f"p{i}", kind="outside", tensor=tensor(), mutates_data=True) for i in range(3000))
    cell = Cell(source="y = x + 1\n" * 3000, parts=parts, mutated_outside=rows)
    found = bundle(told.with_cell(cell))
    assert embedded_size(found) <= CAP
    read = Report.from_dict(found["application/vnd.aotlab.report.v1+json"])
    assert read.verdict == told.with_cell(cell).verdict
    assert "2,999 lines ran eagerly, first line 1 (reason 1 word" in read.verdict


def test_plain_text_says_what_ran_eagerly(told: Report) -> None:
    """A terminal learns the lines and the reasons, too."""
    assert plain(told).splitlines()[1] == f"  line 8 ran eagerly: {WHY}"
