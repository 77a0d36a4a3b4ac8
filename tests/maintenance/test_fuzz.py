"""The fuzzer itself: how it draws, classifies, shrinks, saves and counts programs, stops and continues.

In most of these tests, eager with a deliberate mistake replaces an engine.
"""

from __future__ import annotations

import io
import json
import linecache
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import aotlab
from aotlab.errors import PythonValueError, UsageError
from aotlab.maintenance.fuzz import block as block_module
from aotlab.maintenance.fuzz import cell, corpus, drawing, engines, failures, plan, progress, table, workers
from aotlab.maintenance.fuzz.block import Block, Failure, Row
from aotlab.maintenance.fuzz.plan import Plan, engine_revision
from aotlab.maintenance.fuzz.run import run
from aotlab.maintenance.fuzz.state import State
from aotlab.verification.comparisons import Difference
from aotlab.verification.programs import Outcome, Program, Setup


class Played(engines.Watch):
    """Eager, except that ``mistake`` changes the result of a program that multiplies in place."""

    mistake = staticmethod(lambda result: result)
    eagerly = False

    def candidate(self, function):
        """Play an engine."""

        def call(*args):
            result = function(*args)
            self.eager_calls += self.eagerly
            return self.mistake(result) if "mul_" in function.__code__.co_names else result

        return call

    def graphs(self):
        """One graph for all."""
        return frozenset({"graph"})


@pytest.fixture
def play(monkeypatch):
    """Replace the engine by eager with the test's mistake."""

    def install(mistake=lambda result: result, **attributes):
        kind = type("Played", (Played,), {"mistake": staticmethod(mistake), **attributes})
        monkeypatch.setattr(failures, "watch", lambda plan: kind())

    return install


def boom(result):
    """Raise where eager does not."""
    raise RuntimeError("boom 17")


def refuse(result):
    """Refuse. The writes are visible, because Played has run the program before."""
    raise PythonValueError("a overlaps b")


def blocks_of(run_plan, shrink=0.0):
    """Run a plan in this process."""
    return list(workers.run_here(run_plan, run_plan.blocks(), {}, shrink, lambda _: None, lambda _: None))


def example(*body, result="(a,)", grad=True):
    """Write a program of one non-leaf argument by hand."""
    setup = Setup(
        lines=(f"a_leaf = numbers(1, 2, 3, dtype=torch.float32).requires_grad_({grad})", "a = a_leaf * 1"),
        arguments=("a",),
        watched=("a_leaf",),
    )
    return Program(parameters=("a",), body=body, result=result, setups=(setup,))


# --- drawing -----------------------------------------------------------------------------------------------------


def test_a_program_is_the_same_wherever_it_is_drawn():
    """Seed, block and place decide about a program, in whichever process and order."""
    drawn = [drawing.draw(Plan(seed=7), 3, index).program.source for index in range(12)]
    code = (
        "from aotlab.maintenance.fuzz import drawing; from aotlab.maintenance.fuzz.plan import Plan; import json; "
        "print(json.dumps([drawing.draw(Plan(seed=7), 3, index).program.source for index in reversed(range(12))]))"
    )
    root = os.path.dirname(os.path.dirname(aotlab.__file__))
    env = {**os.environ, "PYTHONPATH": root, "PYTHONHASHSEED": "11"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert json.loads(done.stdout)[::-1] == drawn


def test_hardly_anything_is_drawn_twice():
    """Of 300 programs at least 295 are different, and another seed, block or option gives other programs."""
    plans = [(Plan(seed=1), 0), (Plan(seed=1), 1), (Plan(seed=2), 0), (Plan(seed=1, grad=True), 0)]
    drawn = [{each.program.source for each in drawing.draw_block(of, number, range(75))} for of, number in plans]
    assert len(set().union(*drawn)) >= 295


def test_grad_draws_what_differentiates():
    """With ``grad`` every program has something that requires grad, and a backward."""
    programs = [drawing.draw(Plan(grad=True), 0, index).program for index in range(30)]
    assert all("requires_grad_(" in program.source and program.backward is not None for program in programs)


def test_blocks_cover_the_programs():
    """Blocks are whole except for the last one."""
    assert Plan(programs=450).blocks() == [(0, 200), (1, 200), (2, 50)]
    assert Plan(programs=200).blocks() == [(0, 200)]


def test_hypothesis_begins_with_the_very_program():
    """From the decisions Hypothesis makes the program again, before it looks for simpler ones."""
    drawn = drawing.draw(Plan(seed=5), 0, 4)
    asked = []

    def fails(program):
        asked.append(program.source)
        return "view" in program.source

    assert "view" in drawn.program.source
    drawing.shrink(Plan(seed=5), drawn.decisions, fails)
    assert asked[0] == drawn.program.source
    assert min(map(len, asked)) < len(asked[0])


# --- what becomes of a program -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "status", "name"),
    [
        (lambda result: result, "accepted", None),
        (lambda result: [result], "wrong", "wrong: container of an output"),
        (boom, "raises", "raises: RuntimeError: boom 0 in the call, eager nothing"),
        (refuse, "wrong", "wrong: mutated before refusal of an input"),
    ],
)
def test_outcomes_are_told_apart(play, mistake, status, name):
    """A program is accepted, wrong, or raises where eager does not; failures are named without numbers."""
    play(mistake)
    drawn = drawing.Drawn(program=example("a.mul_(2)"), index=0, decisions=(), discarded=0)
    row, _, found = block_module._run(Plan(), drawn)
    assert (row.status, found, row.graphs) == (status, name, ("graph",))


def test_another_error_than_eagers_is_a_failure(play):
    """A program that raises in eager must raise the same error."""
    play(lambda result: result)
    failing = example("v1 = a.view(7)", result="v1")
    assert failures.run(Plan(), failing)[0].status == "ok"

    class Swallows(Played):
        def candidate(self, function):
            return lambda a: a

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "watch", lambda plan: Swallows())
        outcome, _ = failures.run(Plan(), failing)
    assert failures.kind(outcome.differences) == "error"
    assert failures.coarse(outcome.differences).startswith("error: none in the call, eager RuntimeError")


#: Programs that Dynamo makes something else of before an engine sees them, and how that is told.
DYNAMOS_OWN = {
    "another type of error": (example("v1 = a.view(7)", result="v1"), "error: TorchRuntimeError"),
    "one object for two": (example("a.mul_(2)", result="([a.mT], (a.mT,))", grad=False), "wrong: identity"),
}


MAKES_ONE_OBJECT = not torch.__version__.startswith("2.15")


@pytest.mark.parametrize("engine", ["aotlab", "upstream"])
@pytest.mark.parametrize("name", DYNAMOS_OWN)
def test_what_dynamo_does_by_itself_is_counted_apart(engine, name):
    """A difference that Dynamo's own eager backend shows too is counted separately.

    It is neither a failure nor a success of the engine.
    """
    if name == "one object for two" and not MAKES_ONE_OBJECT:
        pytest.skip("this torch's Dynamo makes two objects of it, as eager does")
    program, told = DYNAMOS_OWN[name]
    drawn = drawing.Drawn(program=program, index=0, decisions=(), discarded=0)
    row, outcome, failure = block_module._run(Plan(engine=engine, dynamo=True), drawn)
    assert (row.status, failure, outcome.differences) == ("dynamo", None, ())
    assert len(row.reasons) == 1
    assert row.reasons[0].startswith(told)


@pytest.mark.skipif(not MAKES_ONE_OBJECT, reason="this torch's Dynamo makes two objects of it, as eager does")
def test_dynamos_own_differences_hide_none_of_the_engines(monkeypatch):
    """A program in which Dynamo differs in one thing and the engine in another fails by the latter alone."""

    class Adds(engines.DynamoAlone):
        def candidate(self, function):
            compiled = super().candidate(function)

            def call(*args):
                result = compiled(*args)
                result[0][0].add_(1)
                return result

            return call

    monkeypatch.setattr(failures, "watch", lambda plan: Adds())
    program, _ = DYNAMOS_OWN["one object for two"]
    outcome, watched = failures.run(Plan(dynamo=True), program)
    assert {each.kind for each in watched.dynamos} == {"identity"}
    assert outcome.status == "failed"
    assert "identity" not in {each.kind for each in outcome.differences}
    assert failures.coarse(outcome.differences).startswith("wrong: value")


@pytest.mark.parametrize("asserts", ["eager", "engine"])
def test_where_eager_asserts_nothing_is_judged(monkeypatch, asserts):
    """An internal assertion of torch in eager is counted apart; one in the engine alone is a failure."""
    error = "RuntimeError: out != nullptr INTERNAL ASSERT FAILED at variable.cpp:207, please report a bug to PyTorch."
    expected, actual = (error, "none") if asserts == "eager" else ("none", error)
    difference = Difference(kind="exception", subject="the call", expected=expected, actual=actual, sentence="differs")
    outcome = Outcome(status="failed", differences=(difference,))
    monkeypatch.setattr(failures, "run_program", lambda program, candidate: candidate(lambda a: a) and outcome)
    drawn = drawing.Drawn(program=example("v1 = a * 2"), index=0, decisions=(), discarded=0)
    row, judged, failure = block_module._run(Plan(), drawn)
    if asserts == "engine":
        assert (row.status, judged) == ("raises", outcome)
        return
    assert (row.status, failure, judged.differences) == ("asserts", None, ())
    assert "INTERNAL ASSERT" in row.reasons[0]
    summary = table.summarize([Block(number=0, size=1, rows=(row,))])
    assert (summary.all.asserts, summary.all.share, list(summary.asserts.values())) == (1, None, [1])
    assert "eager asserts" in summary.text()


def test_our_engine_is_watched():
    """Compiled, run eagerly with the reason, and raised as in eager before anything was compiled."""
    rows = {}
    for name, program in {
        "compiled": example("v1 = a * 2", result="v1"),
        "eager": example("a.unfold(1, 2, 1).mul_(2)", result="a", grad=False),
        "raises": example("v1 = a.view(7)", result="v1"),
    }.items():
        rows[name] = block_module._run(Plan(), drawing.Drawn(program=program, index=0, decisions=(), discarded=0))[0]
    assert {name: row.status for name, row in rows.items()} == {
        "compiled": "accepted",
        "eager": "eager",
        "raises": "alike",
    }
    assert len(rows["compiled"].graphs) == 1
    (reason,) = rows["eager"].reasons
    assert "writes a part of an unfolded tensor" in reason


@pytest.mark.parametrize("engine", ["aotlab", "upstream"])
@pytest.mark.parametrize("dynamo", [False, True])
def test_every_engine_runs(engine, dynamo):
    """A plain program is right on all four, and its graphs are seen where they can be."""
    outcome, watched = failures.run(Plan(engine=engine, dynamo=dynamo), example("v1 = a.sin()", result="v1.sum()"))
    assert (outcome.status, watched.compiled, watched.eager_calls) == ("ok", True, 0)
    assert bool(watched.graphs()) == ((engine, dynamo) != ("upstream", True))


@pytest.mark.parametrize("dynamo", [False, True])
def test_the_other_partitioner(dynamo):
    """With ``min_cut`` programs are cut by it, and cells say so."""
    plan_of_it = Plan(min_cut=True, dynamo=dynamo)
    program = example("v1 = (a + 1).cos().exp()", result="v1.sum()")
    outcome, watched = failures.run(plan_of_it, program)
    assert (outcome.status, watched.compiled, watched.eager_calls) == ("ok", True, 0)
    functions = watched._parts if dynamo else [watched._compiled]
    names = {entry.records.partition.partitioner for each in functions for entry in each.entries}
    assert names == {"min_cut_rematerialization_partition"}
    assert "partitioner=aotlab.min_cut_rematerialization_partition)" in cell.write(plan_of_it, program, "")[0]


def test_equal_graphs_are_one():
    """Graphs are counted by their computation, not by shapes or by the program that they come from."""
    graphs = []
    for program in (
        example("v1 = a.sin()", result="v1"),
        example("w = a.sin()", result="(w,)"),
        example("v1 = a.cos()"),
    ):
        graphs.append(failures.run(Plan(), program)[1].graphs())
    assert graphs[0] == graphs[1]
    assert graphs[2] != graphs[0]


# --- failures ----------------------------------------------------------------------------------------------------


def test_a_failure_is_shrunk_and_saved_once(play, tmp_path):
    """Of many programs with one mistake, one small program is saved.

    All are counted, and the run continues after them.
    """
    play(boom)
    out = io.StringIO()
    status = run(Plan(programs=60, seed=1), save=tmp_path, out=out, err=io.StringIO(), jobs=0, shrink=20.0)
    (saved,) = tmp_path.glob("failures/*.py")
    (state,) = tmp_path.glob("*.jsonl")
    rows = json.loads(state.read_text().splitlines()[1])["rows"]
    assert (status, len(rows)) == (1, 60)
    failing = sum(row[1] == "raises" for row in rows)
    assert failing > block_module.SHRUNK
    text = saved.read_text()
    body = text.partition("def program(")[2].partition("\n\n\ndef inputs_0")[0].splitlines()[1:]
    assert (len(body), ".mul_(" in text, "inputs_1" in text) == (2, True, False)
    assert f"{failing} × raises: RuntimeError: boom 0 in the call, eager nothing" in out.getvalue()
    assert str(saved) in out.getvalue()
    assert f"engine {engine_revision('aotlab')} in {Path(aotlab.__file__).parent}\n" in out.getvalue()


def test_a_cell_runs_by_itself(tmp_path, monkeypatch):
    """A saved cell is a complete script: it prints the difference, or says that there is no difference any more."""
    text, by_itself = cell.write(Plan(), example("v1 = a * 2", result="v1"), "wrong: value\n`out` differs")
    assert (by_itself, text.splitlines()[0]) == (False, "# Without the rest of the run, this cell shows no difference.")
    file = tmp_path / "cell.py"
    file.write_text(text)
    env = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(aotlab.__file__))}
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, cwd=tmp_path, env=env, check=False
    )
    assert done.returncode == 1
    assert done.stderr.endswith("AssertionError: no difference: it is mended\n")
    monkeypatch.setattr(aotlab, "compile", lambda function, **_: lambda *args: function(*args) + 1)
    text, by_itself = cell.write(Plan(), example("v1 = a * 2", result="v1"), "wrong: value\n`out` differs")
    assert by_itself
    assert "a_leaf = torch.tensor([[-1.25, 1.25, -1.75], [0.75, -2.25, 0.25]]).requires_grad_(True)" in text
    assert "numbers" not in text


def test_a_cell_brings_the_caller_along(monkeypatch):
    """Hooks, steps of the caller and grad modes of a program are in its cell, and count there."""
    monkeypatch.setattr(aotlab, "compile", lambda function, **_: function)
    found = 0
    for index in range(60):
        program = drawing.draw(Plan(seed=3), 0, index).program
        if program.before or program.after or "hook(" in program.source:
            found += 1
            text, _ = cell.write(Plan(), program, "nothing")
            used = text.partition("found = ")[2].splitlines()[0]
            assert ("before=before" in used, "after=after" in used) == (bool(program.before), bool(program.after))
            assert ("seen=seen" in used) == ("seen" in program.source)
            # Equal to itself: the cell ran to its last line.
            with pytest.raises(AssertionError, match="it is mended"):
                exec(compile(text, "<cell>", "exec"), {"__name__": "__main__"})
    assert found > 10


def test_what_the_caller_does_is_compared():
    """A cell's comparison includes the caller's steps, on inputs by name, and finds differences that only they show."""
    from aotlab.maintenance.fuzz.compare import differences

    seen: list[tuple[str, torch.Tensor]] = []

    def inputs():
        leaf = torch.tensor([1.0, 2.0], requires_grad=True)
        return (leaf * 1,), {"leaf": leaf}

    def before(out, a):
        return [
            lambda: out[0].register_hook(lambda gradient: seen.append(("out", gradient.clone()))),
            lambda: torch.autograd.grad(out[0].sum(), a, retain_graph=True),
        ]

    def twice(a):
        return (a * 2).mul(1.0)

    def detached(a):
        return (a * 2).detach().requires_grad_()

    assert differences(twice, twice, [inputs], before=before, seen=seen) == []
    assert any("before[1]" in text for text in differences(twice, detached, [inputs], before=before, seen=seen))


# --- stopping and going on ---------------------------------------------------------------------------------------


def test_a_run_goes_on_where_it_was_stopped(play, monkeypatch, tmp_path):
    """ctrl-C loses the block at hand and nothing else; the next run does the rest and counts all."""
    monkeypatch.setattr(plan, "BLOCK", 10)
    ran = []

    class Counts(Played):
        def candidate(self, function):
            ran.append(function)
            if len(ran) == 15:
                raise KeyboardInterrupt
            return super().candidate(function)

    monkeypatch.setattr(failures, "watch", lambda plan: Counts())
    out, options = io.StringIO(), {"save": tmp_path, "err": io.StringIO(), "jobs": 0}
    with pytest.raises(KeyboardInterrupt):
        run(Plan(programs=30), out=out, **options)
    assert out.getvalue().splitlines()[2].split()[:2] == ["all", "10"]
    assert run(Plan(programs=30), out=out, **options) == 0
    assert len(ran) == 15 + 20
    counts = table.summarize(State(tmp_path, Plan(programs=30)).blocks.values())
    straight = table.summarize(blocks_of(Plan(programs=30)))
    assert counts == straight


def test_time_is_up(play, tmp_path):
    """``--minutes`` ends a run in the middle of a block, and prints the table of the finished programs."""
    play()
    out = io.StringIO()
    assert run(Plan(programs=50), save=tmp_path, out=out, err=io.StringIO(), jobs=0, minutes=1e-6) == 0
    assert out.getvalue().splitlines()[2].split()[:2] == ["all", "0"]


def test_a_state_file_is_read_with_care(tmp_path):
    """A line that was cut off is run again. Any other foreign content is refused, and nothing is executed."""
    state = State(tmp_path, Plan())
    row = Row(program="abc", status="refused", reasons=("Output",), categories=("views",), graphs=("f",))
    failure = Failure(block=0, index=3, program="abc", name="wrong: value", signature="s")
    finished = Block(number=0, size=1, rows=(row,), failures=(failure,), discarded=2, seconds=1.5)
    state.add(finished)
    with state.file.open("a") as file:
        file.write('{"number": 1, "si')
    assert State(tmp_path, Plan()).blocks == {0: finished}
    lines = state.file.read_text().splitlines()
    assert len(lines) == 2
    for wrong in (
        "[1]",
        "{}",
        "nothing",
        lines[1].replace('"refused"', '"fine"'),
        lines[1].replace('"size": 1', '"size": -1'),
    ):
        state.file.write_text(f"{lines[0]}\n{wrong}\n")
        with pytest.raises(UsageError, match=r"\.jsonl:2 is not a line of a fuzzer run"):
            State(tmp_path, Plan())
    state.file.write_text("import os\n")
    with pytest.raises(UsageError, match=r"\.jsonl:1 is not a line"):
        State(tmp_path, Plan())


def test_another_engine_or_generator_is_another_run(monkeypatch):
    """A run on other sources is not taken for this run."""
    plans = [Plan(), Plan(seed=1), Plan(grad=True), Plan(dynamo=True), Plan(engine="upstream"), Plan(min_cut=True)]
    plans += [Plan(related=True), Plan(without=("metadata_changes",))]
    names = {each.name for each in plans}
    with monkeypatch.context() as patch:
        patch.setattr(plan, "engine_revision", lambda engine: "other")
        names.add(Plan().name)
    with monkeypatch.context() as patch:
        patch.setattr(plan, "generator_version", lambda: "other")
        names.add(Plan().name)
    assert len(names) == 10


# --- processes and their state -----------------------------------------------------------------------------------


def test_torch_is_left_as_it_was(play):
    """Threads, grad mode, random numbers, logging and the lines for tracebacks are restored."""
    play(lambda result: [result])
    torch.set_grad_enabled(False)
    before = (torch.get_num_threads(), torch.get_rng_state().tolist(), logging.root.manager.disable)
    lines = {name for name in linecache.cache if name.startswith("<program")}
    try:
        blocks_of(Plan(programs=10))
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    assert (torch.get_num_threads(), torch.get_rng_state().tolist(), logging.root.manager.disable) == before
    assert {name for name in linecache.cache if name.startswith("<program")} <= lines


def test_processes_give_what_one_gives(monkeypatch):
    """Two processes run the same blocks to the same rows, in whatever order; a killed one is replaced."""
    # Nobody dies of these programs, and asking takes a process more.
    monkeypatch.setattr(workers, "_dies_in_eager", lambda *_: False)
    small = Plan(programs=16, seed=2)
    sizes = [(0, 8), (1, 8)]
    killed = []

    def kill_once(_row):
        if not killed:
            killed.append(multiprocessing.active_children()[0].pid)
            os.kill(killed[0], signal.SIGKILL)

    there = list(workers.run_there(small, sizes, {}, 0.0, kill_once, lambda _: None, jobs=2))
    here = list(workers.run_here(small, sizes, {}, 0.0, lambda _: None, lambda _: None))

    def rows(blocks):
        return {(block.number, row.program): row.status for block in blocks for row in block.rows}

    assert killed
    assert not multiprocessing.active_children()
    # Of the killed one it looks as if the program that it was at had been its death, if it was at one.
    assert len(rows(here).items() - rows(there).items()) <= 1
    assert rows(there).keys() <= rows(here).keys()


def test_a_worker_that_nobody_hears_ends_quietly():
    """A run that is killed (SIGTERM) left a traceback of each of its processes in the log."""
    worker = workers._Worker(Plan(programs=8, seed=2))
    try:
        worker.start(workers._Unfinished(number=0, size=8, left=workers.deque(range(8))), {}, 0.0)
        worker.hear()
        worker.pipe.close()
        worker.process.join(60)
        assert worker.process.exitcode == 0
    finally:
        worker.stop()


@pytest.mark.parametrize("eager_dies", [True, False])
def test_a_death_is_the_engines_if_eager_survives(monkeypatch, eager_dies):
    """A program that kills the process is discarded if it kills eager too.

    Otherwise it is a failure, and the run continues.
    """
    monkeypatch.setattr(workers, "_dies_in_eager", lambda *_: eager_dies)
    block = workers._Unfinished(number=2, size=3, left=workers.deque([1, 2]), at=("running", 1, "the program"))
    told = []
    workers._died(Plan(), block, -11, lambda row: told.append(row.status), lambda failure: told.append(failure.name))
    assert list(block.left) == [2]
    assert block.discarded == int(eager_dies)
    assert told == ([] if eager_dies else ["error: the process died with exit code -11", "error"])


def test_a_death_while_drawing_or_shrinking():
    """A process that dies while drawing has no program, and the next one is drawn.

    If it dies while shrinking, the program is not shrunk.
    """
    block = workers._Unfinished(number=0, size=2, left=workers.deque([0, 1]))
    workers._died(Plan(), block, -11, pytest.fail, pytest.fail)
    assert (list(block.left), block.discarded) == ([1], 1)
    block.at = ("shrinking", 1, "the program")
    workers._died(Plan(), block, -11, pytest.fail, pytest.fail)
    assert (list(block.left), block.unshrunk) == ([1], True)


def test_a_death_after_the_last_program_discards_nothing():
    """A process that was stopped and killed when it had nothing left ended the whole run with an IndexError."""
    block = workers._Unfinished(number=0, size=2, left=workers.deque())
    workers._died(Plan(), block, -9, pytest.fail, pytest.fail)
    assert block.discarded == 0


# --- counting ----------------------------------------------------------------------------------------------------


def rows_of(*statuses):
    """Make rows of these statuses, each for a different program."""
    return tuple(
        Row(
            program=f"p{index}",
            status=status,
            reasons=("Output",) if status == "refused" else (),
            graphs=(f"g{index % 2}",),
        )
        for index, status in enumerate(statuses)
    )


def test_the_table_counts_each_program_once():
    """Outcomes, graphs and shares by category; a program that two blocks have in common counts in one."""
    views = Row(program="v", status="accepted", categories=("views",), graphs=("g0",))
    first = Block(number=0, size=4, rows=(*rows_of("accepted", "refused", "alike"), views), discarded=3)
    second = Block(number=1, size=2, rows=(views, Row(program="w", status="wrong", categories=("hooks",))))
    found = table.summarize([second, first])
    assert [line.category for line in found.lines] == ["all", "hooks", "views"]
    every = found.all
    assert (every.programs, every.accepted, every.refused, every.alike, every.wrong, every.graphs) == (5, 2, 1, 1, 1, 2)
    assert every.share == 2 / 4
    assert (found.discarded, found.repeated, found.refusals) == (3, 1, {"Output": 1})
    lines = found.text().splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["category", "all", "hooks", "views"]
    assert lines[1].split()[-1] == "50.0%"
    assert found.json()["lines"][0]["programs"] == 5


def test_counts_are_carried_and_never_twice(tmp_path, monkeypatch):
    """Merging a block again changes nothing. A failure resets the count of clean programs."""
    monkeypatch.setattr(plan, "BLOCK", 2)
    file = tmp_path / "counts.json"
    blocks = [
        Block(number=0, size=2, rows=rows_of("accepted", "accepted")),
        Block(number=1, size=2, rows=rows_of("accepted", "raises")),
        Block(number=2, size=2, rows=rows_of("accepted", "refused")),
        Block(number=3, size=2, rows=rows_of("accepted", "static")),
        Block(number=4, size=1, rows=rows_of("accepted")),
    ]
    for _ in range(2):
        corpus.merge(file, Plan(programs=7), blocks)
    (entry,) = corpus.load(file)
    assert (entry.accepted, entry.static, entry.refused, entry.failed, entry.clean) == (5, 1, 1, 1, 2)
    assert entry.runs == {"0": [[0, 3]]}
    corpus.merge(file, Plan(programs=7, seed=1), blocks[:1])
    assert corpus.carried(corpus.load(file)) == (7, 4)
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "engine_revision", lambda engine: "newer")
        corpus.merge(file, Plan(programs=7), blocks[:1])
    assert [entry.revision == "newer" for entry in corpus.load(file)] == [False, True]
    assert corpus.carried(corpus.load(file)) == (9, 6)
    assert corpus.carried(corpus.load(file), "upstream") == (0, 0)


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"format": 2, "entries": []}', '{"format": 1, "entries": [{"engine": "aotlab"}]}', "import os"],
)
def test_counts_are_read_with_care(tmp_path, text):
    """A file with other content is refused before anything is run."""
    file = tmp_path / "counts.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="does not contain counts of the fuzzer"):
        run(Plan(programs=1), save=tmp_path, out=io.StringIO(), err=io.StringIO(), jobs=0, corpus_file=file)


def test_a_run_adds_to_the_counts_and_writes_json(play, tmp_path, monkeypatch):
    """``--corpus`` and ``--json``: the totals are in the file, in the table and in the JSON."""
    play()
    monkeypatch.setattr(plan, "BLOCK", 5)
    out, file, counts = io.StringIO(), tmp_path / "table.json", tmp_path / "counts.json"
    options = {"save": tmp_path, "err": io.StringIO(), "jobs": 0, "corpus_file": counts}
    assert run(Plan(programs=12), out=out, json_path=file, **options) == 0
    assert "carried: 10 programs accepted by aotlab, the last 10 without a failure" in out.getvalue()
    value = json.loads(file.read_text())
    assert (value["lines"][0]["programs"], value["carried"]) == (12, {"accepted": 10, "since a failure": 10})
    only = io.StringIO()
    run(Plan(programs=12), out=only, json_path=type(file)("-"), **options)
    assert json.loads(only.getvalue())["lines"] == value["lines"]


def test_wrong_numbers_are_said(tmp_path):
    """A run of nothing is wrong usage."""
    for wrong in ({"minutes": 0}, {"jobs": -1}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))} is"):
            run(Plan(), save=tmp_path, out=io.StringIO(), err=io.StringIO(), **wrong)
    with pytest.raises(UsageError, match="programs is 0"):
        run(Plan(programs=0), save=tmp_path, out=io.StringIO(), err=io.StringIO())


# --- the bar -----------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self):
        """Say so."""
        return True


def test_the_bar_on_a_terminal():
    """On a terminal one line is drawn over and over, at most five times a second."""
    out, now = Terminal(), [0.0]
    bar = progress.Progress(100, 20, out, clock=lambda: now[0])
    for index in range(30):
        now[0] += 0.1
        bar.ran(index == 7)
    bar.close()
    text = out.getvalue()
    assert 10 <= text.count("\r") <= 17
    assert text.endswith("50/100 programs, 10/s, 0:05 left, 1 failed\x1b[K\n")


def test_no_bar_in_a_file_unless_asked_for():
    """Elsewhere nothing is written, or a line every five seconds."""
    now = [0.0]
    quiet, asked = io.StringIO(), io.StringIO()
    for out, shown in ((quiet, None), (asked, True)):
        bar = progress.Progress(100, 0, out, shown, clock=lambda: now[0])
        for _ in range(10):
            now[0] += 1.0
            bar.ran(False)
        bar.close()
    assert quiet.getvalue() == ""
    lines = asked.getvalue().splitlines()
    assert [line.partition(" ")[2].partition(",")[0] for line in lines] == [f"{n}/100 programs" for n in (5, 10, 10)]
