"""The first line of a report about a cell: which lines were compiled, and which ran eagerly and why.

The first line of reports without a cell is tested with their recordings, in ``test_collect.py``.
"""

from __future__ import annotations

from dataclasses import replace
from traceback import FrameSummary
from typing import Any

import pytest

from aotlab.report import Report
from aotlab.report.counts import summary
from aotlab.report.dynamo_breaks import graph_break
from aotlab.report.model import Cell, CellPart, Frame, Graph, Ratio, Refusal, TimeRow, TimingRow
from aotlab.report.verdict import BY_DESIGN, DIFFERS, Verdict, speed, verdict

SOURCE = "%%aotcompile\ny = x + 1\nprint(y)\nz = y.relu()\nz.sum()"


def part(first: int, last: int, how: str, reason: str = "", *frames: str) -> CellPart:
    """Make a part."""
    return CellPart(first_line=first, last_line=last, how=how, frames=frames, reason=reason)


def cell(*parts: CellPart, error: str | None = None, kind: str = "statements") -> Cell:
    """Make a cell."""
    return Cell(source=SOURCE, parts=parts, error=error, kind=kind)


def refusal(message: str, *, graph: int = 0) -> Refusal:
    """Make a refusal."""
    return Refusal(graph=graph, error="RefusedError", reason="Refused", message=message, outcome="ran eagerly", at_ns=1)


@pytest.fixture
def nothing(report: Report) -> Report:
    """Return a report in which nothing happened."""
    return replace(report, frames=(), graph_break_rows=())


@pytest.fixture
def one(report: Report) -> Report:
    """Return a report of one compiled graph, verified, in the frame ``line 2``."""
    graph = replace(report.frames[0].graphs[0], training=False, calls=1, duration_ns=10_000_000)
    frame = Frame(name="line 2", function="line 2", graphs=(graph,))
    made = replace(report, frames=(frame,), graph_break_rows=())
    return made.with_verification([{"kind": "value", "subject": "y", "equal": True, "frame": "line 2", "graph": 0}])


COMPILED = (
    "Compiled line 2: 1 graph (inference), backend inductor, on cpu, in 10.0 ms; "
    "verified: equal to eager on 1 observable."
)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (
            cell(part(2, 3, "python", "calls print"), part(4, 5, "eager", "it draws\n\nat length.")),
            "lines 4–5 ran eagerly (it draws).",
        ),
        (
            cell(part(2, 3, "eager", "it draws."), part(5, 5, "eager", "another reason")),
            "3 lines ran eagerly, first lines 2–3 (it draws).",
        ),
        (cell(part(3, 3, "not run"), error="NameError: no x."), "the cell ended with NameError: no x."),
        (
            cell(part(2, 2, "eager", "it draws"), error="NameError: no x"),
            "line 2 ran eagerly (it draws). The cell ended with NameError: no x.",
        ),
        (
            cell(part(2, 2, "eager", "it draws"), error="KeyboardInterrupt"),
            "line 2 ran eagerly (it draws). The cell was interrupted.",
        ),
        (cell(part(2, 3, "eager", "it draws"), kind="definitions"), "lines 2–3 ran eagerly (it draws)."),
    ],
)
def test_nothing_compiled_gives_the_reason_and_the_line(nothing: Report, told: Cell, expected: str) -> None:
    """The first reason that is one is given, with its lines, in one line of text."""
    assert Verdict(sentence=f"Nothing was compiled: {expected}", state="nothing") == verdict(nothing.with_cell(told))


NOTHING = "Nothing to compile: there is no computation with tensors in the cell."


@pytest.mark.parametrize(
    ("told", "sentence", "status"),
    [
        (cell(), NOTHING, "nothing to compile"),
        (cell(part(2, 5, "python", "no computation with tensors")), NOTHING, "nothing to compile"),
        (cell(part(2, 2, "eager", "it holds no computation with tensors")), NOTHING, "nothing to compile"),
        (
            cell(part(2, 2, "python", "imports"), part(3, 4, "python", "defines a class"), part(5, 5, "not run")),
            "Nothing was compiled: no line was handed to the compiler: line 2 (imports), lines 3–4 (defines a class) "
            "and line 5 (not run).",
            "nothing was compiled",
        ),
        (
            cell(part(2, 2, "python", "imports"), part(3, 5, "python", "defines a function")),
            NOTHING,
            "nothing to compile",
        ),
        (
            cell(part(2, 2, "python", "no computation with tensors"), part(3, 5, "python", "calls pandas")),
            "Nothing was compiled: no line was handed to the compiler: line 2 (no computation with tensors) and "
            "lines 3–5 (calls pandas).",
            "nothing was compiled",
        ),
        (
            cell(part(2, 3, "not run", "a function that was not called yet"), kind="definitions"),
            "Nothing to compile yet: the functions of the cell are compiled when they are called.",
            "nothing to compile yet",
        ),
        (
            replace(cell(part(3, 3, "not run"), error="KeyboardInterrupt: while aotlab compiled"), error_line=3),
            "Nothing was compiled: the cell was interrupted at line 3.",
            "interrupted",
        ),
    ],
)
def test_without_a_fault_nothing_is_wrong(nothing: Report, told: Cell, sentence: str, status: str) -> None:
    """A cell in which there was nothing to compile, or that was interrupted, gets a quiet state."""
    found = verdict(nothing.with_cell(told))
    assert (sentence, "idle", status) == (found.sentence, found.state, found.status)


def test_lines_that_run_eagerly_by_design_are_no_fault(one: Report) -> None:
    """Such lines are named once, and the state does not change."""
    reason = f"steps Adam, {BY_DESIGN}: why"
    made = cell(part(2, 2, "compiled", "", "line 2"), part(3, 3, "python", reason), part(5, 5, "python", reason))
    found = verdict(one.with_cell(made))
    assert Verdict(sentence=f"{COMPILED} Line 3 steps Adam, {BY_DESIGN}: why.", state="verified") == found
    assert found.status == "equal to eager"


def test_an_interrupted_cell(one: Report) -> None:
    """An interrupt is no error of the cell."""
    made = one.with_cell(cell(part(2, 2, "compiled", "", "line 2"), part(3, 3, "not run"), error="KeyboardInterrupt"))
    assert Verdict(sentence=f"{COMPILED} The cell was interrupted.", state="verified") == verdict(made)
    assert [(fact.key, fact.title) for fact in summary(made).facts if "KeyboardInterrupt" in fact.sentence] == [
        ("interrupted", "interrupted")
    ]


def test_a_long_reason_is_cut(nothing: Report) -> None:
    """A long reason is cut to keep the sentence short, and the cut is marked."""
    reason = "Unsupported: " + "word " * 100
    found = verdict(nothing.with_cell(cell(part(2, 2, "eager", reason)))).sentence
    assert found.startswith("Nothing was compiled: line 2 ran eagerly (Unsupported: word word")
    assert found.endswith("word …).")
    assert len(found) < 260


def test_a_reason_is_not_cut_within_a_sentence(nothing: Report) -> None:
    """A short error of torch is quoted whole. Of a longer one, only whole sentences are kept."""
    why = "RuntimeError: Attempting to broadcast a dimension of length 4 at -1! Mismatching argument at index 1 had "
    why += "torch.Size([4]); but expected shape should be broadcastable to [3]"
    assert f"({why})" in verdict(nothing.with_cell(cell(part(2, 2, "eager", why)))).sentence
    two = f"{'one ' * 20}call. Reason: {'two ' * 40}"
    assert verdict(nothing.with_cell(cell(part(2, 2, "eager", two)))).sentence.endswith("one call).")


def test_a_reason_ends_with_a_clause_and_names_the_cells_line(nothing: Report) -> None:
    """For an error of ours, the heading gives the fact and the cell's line, without the kernel's file and the code."""
    where = "/tmp/ipykernel_39/22.py:2 (columns.bernoulli_(1.0))"
    why = "a traced tensor has no values, and a graph must be right for all values; " + "advice " * 20
    found = verdict(nothing.with_cell(cell(part(2, 2, "eager", f"`columns` is read, at {where}: {why}")))).sentence
    told = "`columns` is read, at notebook cell, line 2: a traced tensor has no values, and a graph must be right"
    assert found.startswith(f"Nothing was compiled: line 2 ran eagerly ({told}")
    assert found.endswith("must be right for all values).")


def test_lines_that_ran_eagerly_are_counted(one: Report) -> None:
    """Beside the compiled lines, the sentence counts the eager lines and gives the reason for the first.

    The state is partly.
    """
    made = cell(part(2, 2, "compiled", "", "line 2"), part(3, 3, "eager", "it draws"), part(4, 5, "eager", "else"))
    expected = f"{COMPILED} 3 lines ran eagerly, first line 3 (it draws)."
    assert Verdict(sentence=expected, state="partly") == verdict(one.with_cell(made))


def test_plain_python_is_no_fault(one: Report) -> None:
    """Lines without tensor computation, or not meant for the compiler, do not change the verdict."""
    made = cell(
        part(2, 2, "compiled", "", "line 2"),
        part(3, 3, "python", "calls print"),
        part(4, 4, "eager", "it holds no computation with tensors"),
        part(5, 5, "not run"),
    )
    assert Verdict(sentence=COMPILED, state="verified") == verdict(one.with_cell(made))


def test_a_part_that_is_compiled_in_part(one: Report) -> None:
    """A graph break within compiled lines is named, with the part's reason or with the place where Dynamo stopped."""
    made = cell(part(2, 3, "compiled", "calls t_ on an input", "line 2"))
    expected = f"{COMPILED} Not all of lines 2–3 was captured (calls t_ on an input)."
    assert Verdict(sentence=expected, state="partly") == verdict(one.with_cell(made))
    rows = (
        graph_break(
            FrameSummary("<ipython-input-7-0af>", 3, "f"), "Unsupported\n  Explanation: t_ of an input.\n\n", 0
        ),
        graph_break(FrameSummary("<ipython-input-7-0af>", 4, "f"), "generic_jump TensorVariable()", 0),
    )
    made = cell(part(2, 3, "compiled", "", "line 2"))
    found = verdict(replace(one.with_cell(made), graph_break_rows=rows))
    first = "In [7], line 3 (Unsupported: t_ of an input)"
    assert f"{COMPILED} 2 graph breaks, where Python took over, first at {first}." == found.sentence
    found = verdict(replace(one.with_cell(made), graph_break_rows=rows[1:]))
    last = "In [7], line 4 (a branch depends on the value of a tensor)"
    assert f"{COMPILED} 1 graph break, where Python took over, at {last}." == found.sentence


def test_a_part_with_a_graph_that_differs(one: Report) -> None:
    """If only one graph of a part differs, the difference is named once."""
    message = f"{DIFFERS}: other values"
    frame = Frame(name="line 3", function="line 3", refusals=(refusal(message),))
    made = replace(one, frames=(*one.frames, frame)).with_cell(cell(part(2, 3, "compiled", message, "line 2")))
    told = "NOT equal to eager, so not used: the compiled form of line 3 (other values)."
    assert Verdict(sentence=f"{told} {COMPILED}", state="different") == verdict(made)
    refused = replace(frame, refusals=(refusal("it draws"),))
    made = replace(one, frames=(*one.frames, refused)).with_cell(cell(part(2, 3, "compiled", "it draws", "line 2")))
    expected = f"{COMPILED} Not all of lines 2–3 was captured (it draws)."
    assert Verdict(sentence=expected, state="partly") == verdict(made)


def test_the_error_that_ended_the_cell(one: Report) -> None:
    """The verdict lists the compiled lines although the cell ended with an error."""
    made = cell(part(2, 2, "compiled", "", "line 2"), part(3, 3, "not run"), error="ValueError: no")
    assert verdict(one.with_cell(made)).sentence == f"{COMPILED} The cell ended with ValueError: no."


def test_an_unchanged_cell_serves_again(one: Report) -> None:
    """Graphs of an earlier run count as such, if this run called them; no time was spent on them."""
    old = replace(one.frames[0].graphs[0], reused=True, calls=3)
    new = replace(one.frames[0].graphs[0], index=1)
    unused = replace(old, index=2, calls=0)
    made = one.with_cell(cell(part(2, 2, "compiled", "", "line 2")))

    def of(*graphs: Graph) -> str:
        return verdict(replace(made, frames=(replace(made.frames[0], graphs=graphs),))).sentence

    ending = "backend inductor, on cpu; verified: equal to eager on 1 observable."
    once = "Nothing new was compiled: 1 graph (inference) of an earlier run of the unchanged cell serves again"
    twice = "Nothing new was compiled: 2 graphs (inference) of an earlier run of the unchanged cell serve again"
    assert of(old, unused) == f"{once}, {ending}"
    assert of(old, replace(old, index=1)) == f"{twice}, {ending}"
    assert of(old, new, unused) == COMPILED.replace(
        "1 graph (inference)", "1 graph, beside 1 of an earlier run of the unchanged cell (inference)"
    )
    assert of(unused) == "Nothing was compiled: no line was handed to the compiler: line 2 (not run)."


def test_a_form_that_differs_from_eager_is_told_first(one: Report) -> None:
    """A compiled form that differs from eager is named first.

    It was not used, so the other lines are judged without it.
    """
    message = f"{DIFFERS}: `out[0]` has other values"
    frame = Frame(name="line 4", function="line 4", refusals=(refusal(message),))
    parts = (part(2, 2, "compiled", "", "line 2"), part(4, 4, "eager", message))
    row: dict[str, Any] = {"kind": "value", "subject": "z", "equal": False, "frame": "line 4", "graph": 0}
    made = replace(one, frames=(*one.frames, frame)).with_cell(cell(*parts)).with_verification([row])
    told = "NOT equal to eager, so not used: the compiled form of line 4 (`out[0]` has other values)."
    assert Verdict(sentence=f"{told} {COMPILED}", state="different") == verdict(made)
    alone = replace(made, frames=(frame,), cell=cell(parts[1]))
    assert Verdict(sentence=f"Nothing was compiled: {told}", state="different") == verdict(alone)


def test_refusals_are_told_once(one: Report) -> None:
    """A refusal that is the reason of eager lines is not counted a second time; another one is."""
    frame = Frame(name="line 3", function="line 3", refusals=(refusal("it draws"), refusal("it grows", graph=1)))
    made = replace(one, frames=(*one.frames, frame)).with_cell(
        cell(part(2, 2, "compiled", "", "line 2"), part(3, 3, "eager", "it draws"))
    )
    expected = f"{COMPILED} Line 3 ran eagerly (it draws). 1 compilation refused, first line 3 (Refused)."
    assert Verdict(sentence=expected, state="partly") == verdict(made)


def timed(phase: str, median_ns: int, *ratios: Ratio, frame: str = "line 2") -> TimingRow:
    """Make a timing of aotlab."""
    times = dict.fromkeys(("min_ns", "p10_ns", "p90_ns"), median_ns)
    return TimingRow(
        engine="aotlab", phase=phase, median_ns=median_ns, **times, repeats=9, frame=frame, graph=0, ratios=ratios
    )


def ratio(over: str, median: float, noise: str = "") -> Ratio:
    """Make a ratio with a range around it."""
    return Ratio(over=over, median=median, p10=median - 0.25, p90=median + 0.25, noise=noise)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], ""),
        # The step counts, not its parts; and of several measurements the last.
        (
            [
                timed("total", 90, ratio("eager", 9)),
                timed("forward", 10, ratio("eager", 2)),
                timed("total", 20, ratio("eager", 1.5), ratio("upstream", 0.5)),
            ],
            " Forward and backward took 1.50× eager's time (1.25–1.75 in eight rounds of ten) "
            "and 0.50× stock torch.compile's (0.25–0.75).",
        ),
        # Of several graphs that which takes longest comes first, whether or not it is trained.
        (
            [
                timed("forward", 10, ratio("eager", 2)),
                timed("forward", 30, ratio("eager", 3), frame="line 3"),
                timed("total", 20, ratio("eager", 1, "it changed"), frame="line 4"),
            ],
            " A forward of line 3, which of 3 graphs takes longest, took 3.00× eager's time "
            "(2.75–3.25 in eight rounds of ten). Beside eager: line 4 1.00× (noise) and line 2 2.00×.",
        ),
        # Only a ratio that is no more than noise is called so; beside another the noise is told.
        (
            [replace(timed("total", 20, ratio("eager", 1.5), ratio("upstream", 1, "it changed")), again=0.9)],
            " Forward and backward took 1.50× eager's time (1.25–1.75 in eight rounds of ten; 10% noise) "
            "and 1.00× stock torch.compile's (0.75–1.25; noise: it changed).",
        ),
        (
            [replace(timed("total", 2_000_000), incomparable="not comparable: 2 rounds")],
            " Forward and backward took 2.00 ms (not comparable: 2 rounds).",
        ),
        (
            [
                timed("forward", 30, ratio("eager", 3)),
                replace(timed("total", 9, frame="g"), incomparable="too few"),
            ],
            " A forward of line 2, which of 2 graphs takes longest, took 3.00× eager's time "
            "(2.75–3.25 in eight rounds of ten). Beside eager: g too few.",
        ),
    ],
)
def test_timings_have_their_headline(one: Report, rows: list[TimingRow], expected: str) -> None:
    """The verdict gives the ratio of a step with its range and its noise."""
    assert verdict(one.with_timings(rows)).sentence == COMPILED + expected


def test_the_speed_of_few_rounds_is_no_ratio(one: Report) -> None:
    """The chip of a measurement without a ratio gives the reason."""
    made = replace(timed("total", 2_000_000), incomparable="not comparable: 2 rounds")
    assert speed(one.with_timings([made])) == "not comparable: 2 rounds"
    assert speed(one.with_timings([timed("total", 20, ratio("eager", 0.5))])) == "2.0× faster"


@pytest.mark.parametrize(
    ("compared", "told", "status", "state"),
    [
        (("python", "python"), "verified: equal to eager on 1 observable.", "equal to eager", "verified"),
        (
            ("python", "graph"),
            "verified: equal to eager on 1 observable; lines 5–8 to the captured graph.",
            "equal to eager, in part to the captured graph",
            "verified",
        ),
        (
            ("graph", "graph"),
            "verified: equal to the captured graph on 1 observable.",
            "equal to the captured graph",
            "verified",
        ),
        (
            ("python", "nothing"),
            "verified: equal to eager on 1 observable, but lines 5–8 not verified.",
            "not all of it compared with eager",
            "partly",
        ),
        (("", ""), "verified: equal to eager on 1 observable.", "equal to eager", "verified"),  # an older report
    ],
)
def test_equal_to_eager_is_said_of_what_was_compared_with_python(
    one: Report, compared: tuple[str, str], told: str, status: str, state: str
) -> None:
    """For the other lines, the sentence names the run that they were compared with."""
    parts = [part(2, 2, "compiled", "", "line 2"), part(5, 8, "compiled", "", "line 2")]
    made = cell(*[replace(each, compared=how) for each, how in zip(parts, compared, strict=True)])
    found = verdict(one.with_cell(made))
    assert found.sentence.endswith(told)
    assert (found.status, found.state) == (status, state)


def test_a_part_in_pieces_is_named_once(one: Report) -> None:
    """Dynamo's second piece of a line has the same name. The time that Dynamo took is given separately."""
    frame = replace(one.frames[0], name="line 2 (2)", function="line 2 (2)")
    rows = (
        TimeRow(kind="dynamo", duration_ns=2_000_000_000, count=3),
        TimeRow(kind="backward", duration_ns=5_000_000, count=1),
    )
    sentence = verdict(replace(one, frames=(*one.frames, frame), time_rows=rows)).sentence
    assert sentence.startswith("Compiled line 2: 2 graphs (inference)")
    assert "in 20.0 ms, beside 2.00 s in Dynamo and 5.00 ms in later backwards;" in sentence
