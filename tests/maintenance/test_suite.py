"""``aotlab bench engine``: its measurements, the checks before them, and its output."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from aotlab.errors import RandomOpError
from aotlab.maintenance.bench import suite
from aotlab.maintenance.bench.programs import SMALL_PROGRAMS, ModelProgram, SmallProgram, mlp
from aotlab.maintenance.bench.suite import Engine, Figure

CPU = torch.device("cpu")
Function = Callable[..., object]


def _engine(name: str, wrap: Callable[[Function], Function]) -> Engine:
    return Engine(name=name, function=wrap, module=wrap)


def _unchanged(function: Function) -> Function:
    return lambda *args: function(*args)


def _wrong(function: Function) -> Function:
    def call(*args: torch.Tensor) -> object:
        result = function(*args)
        return result + 1 if isinstance(result, torch.Tensor) else result

    return call


def _refusing(function: Function) -> Function:
    def call(*args: torch.Tensor) -> object:
        raise RandomOpError("aten.rand is random", suggestion="seed it")

    return call


def _forgetful(function: Function) -> Function:
    """Compute on copies, so that the caller's tensors are not written."""
    return lambda *args: function(*[argument.clone() for argument in args])


TRIVIAL, MUTATING = SMALL_PROGRAMS[:2]
TINY = ModelProgram(
    name="tiny", description="one layer", make=lambda device: (mlp(1).to(device), (torch.ones(2, 32, device=device),))
)


def _overhead(ours: Engine, theirs: Engine, mode: suite.Mode = "inference", program: SmallProgram = TRIVIAL) -> Figure:
    return suite.overhead_figure(program, mode, (ours, theirs), CPU, rounds=5, sample_ns=200_000)


def test_overheads_are_taken_above_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,300 ns against 1,100 ns where eager takes 1,000 the overheads are 300 and 100, and their ratio is 3."""
    now_ns = 0
    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns)

    def spending(ns: int) -> Callable[[Function], Function]:
        def wrap(function: Function) -> Function:
            def call(*args: torch.Tensor) -> object:
                nonlocal now_ns
                now_ns += ns
                return function(*args)

            return call

        return wrap

    program = replace(TRIVIAL, function=spending(1_000)(TRIVIAL.function))
    figure = _overhead(_engine("ours", spending(300)), _engine("theirs", spending(100)), program=program)
    assert figure.problem == ""
    assert (figure.eager_ns, figure.ours_ns, figure.theirs_ns) == (1_000, 1_300, 1_100)
    assert (figure.ours_over_ns, figure.theirs_over_ns) == (300, 100)
    assert (figure.ratio, figure.ratio_p10, figure.ratio_p90, figure.again) == (3, 3, 3, 1)


@pytest.mark.parametrize("mode", ["inference", "training, forward", "training, forward + backward"])
@pytest.mark.parametrize("program", SMALL_PROGRAMS, ids=lambda program: program.name)
def test_every_program_can_be_measured_in_every_mode(program: SmallProgram, mode: suite.Mode) -> None:
    """With engines that are eager, all programs verify and give times."""
    figure = suite.overhead_figure(
        program, mode, (_engine("a", _unchanged), _engine("b", _unchanged)), CPU, rounds=2, sample_ns=1
    )
    assert (figure.problem, figure.program, figure.mode) == ("", program.name, mode)
    assert min(figure.eager_ns, figure.ours_ns, figure.theirs_ns) > 0


def test_wrong_results_are_not_timed() -> None:
    """An engine whose values differ from eager's gets a sentence and no figure."""
    figure = _overhead(_engine("ours", _wrong), _engine("theirs", _unchanged))
    assert "ours differs from eager" in figure.problem
    assert math.isnan(figure.ours_ns)


def test_a_missing_mutation_is_a_wrong_result() -> None:
    """An engine that returns the right values and does not write to its inputs is caught, in both modes."""
    for mode in ("inference", "training, forward"):
        figure = _overhead(_engine("ours", _forgetful), _engine("theirs", _unchanged), mode, MUTATING)
        assert "ours differs from eager" in figure.problem


def test_the_other_engine_is_checked_as_well() -> None:
    """Upstream's result is compared with eager's too: a ratio to something wrong would mean nothing."""
    assert "theirs differs" in _overhead(_engine("ours", _unchanged), _engine("theirs", _wrong)).problem


def test_wrong_gradients_are_seen() -> None:
    """In training the gradients are compared as well as the values."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * 2

    def doubling(function: Function) -> Function:
        make: Function = Doubled.apply
        return lambda *args: function(*[make(argument) for argument in args])

    engines = _engine("ours", doubling), _engine("theirs", _unchanged)
    assert _overhead(*engines).problem == ""
    assert "ours differs from eager" in _overhead(*engines, "training, forward").problem


def test_refusals_are_reported_by_class() -> None:
    """An engine's error is given in the row, and the benchmark continues."""
    figure = _overhead(_engine("ours", _refusing), _engine("theirs", _unchanged))
    assert "ours raised RandomOpError: aten.rand is random" in figure.problem


def test_a_trace_is_made_anew_for_every_round() -> None:
    """Each round wraps the module again, so that it is the first call that is timed, and the A/A is as well."""
    wrapped: list[str] = []

    def counting(name: str) -> Engine:
        def wrap(module: nn.Module) -> Function:
            wrapped.append(name)
            return module

        return Engine(name=name, function=_unchanged, module=wrap)

    figure = suite.trace_figure(TINY, (counting("ours"), counting("theirs")), CPU, backward=True, rounds=2)
    # Once each to be checked; then ours, theirs and ours again, in both rounds.
    assert ["ours", "theirs", *["ours", "theirs", "ours"], *["ours", "theirs", "ours"]] == wrapped
    assert (figure.mode, figure.problem) == ("first forward + backward", "")
    assert figure.ratio > 0
    assert figure.again > 0


def test_a_wrong_trace_is_not_timed() -> None:
    """A model whose compiled result differs has no trace time."""
    figure = suite.trace_figure(
        TINY, (_engine("ours", _wrong), _engine("theirs", _unchanged)), CPU, backward=False, rounds=1
    )
    assert "ours differs from eager" in figure.problem


def test_the_command_prints_tables_and_writes_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tables, the machine and torch's version are printed. The JSON contains every figure in ns."""
    monkeypatch.setattr(suite, "SMALL_PROGRAMS", (TRIVIAL,))
    monkeypatch.setattr(suite, "model_programs", lambda quick: (TINY,))
    out, path = io.StringIO(), tmp_path / "figures.json"
    engines = _engine("ours", _unchanged), _engine("theirs", _unchanged)
    assert suite.main(["engine", "--quick", "--json", str(path)], engines, out) == 0
    text = out.getvalue()
    for expected in ("Trace time", "Call overhead over eager", "tiny", "trivial", torch.__version__, "A/A", "ours ms"):
        assert expected in text
    written = json.loads(path.read_text())
    assert written["machine"]["torch"] == torch.__version__
    assert [row["figure"] for row in written["figures"]] == ["call overhead"] * 3 + ["trace time"] * 2
    assert written["figures"][-1]["eager_ns"] is None
    assert written["figures"][0]["eager_ns"] > 100


def test_the_command_fails_when_something_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing figure is named under the tables, and the exit status is 1."""
    monkeypatch.setattr(suite, "SMALL_PROGRAMS", (TRIVIAL,))
    monkeypatch.setattr(suite, "model_programs", lambda quick: (TINY,))
    engines = _engine("ours", _refusing), _engine("theirs", _unchanged)
    assert suite.main(["engine", "--quick"], engines) == 1
    captured = capsys.readouterr()
    assert "Not measured:" in captured.out
    assert "call overhead, trivial, inference, beside theirs: ours raised RandomOpError" in captured.out
    assert "trace time: tiny, first step" in captured.err


def test_unknown_suites_are_refused() -> None:
    """There is one suite, and argparse says so."""
    with pytest.raises(SystemExit) as stopped:
        suite.main(["nothing"])
    assert stopped.value.code == 2


@pytest.mark.parametrize("mode", ["inference", "training, forward", "training, forward + backward"])
def test_all_shipped_engines_give_figures(mode: suite.Mode) -> None:
    """All three are reached by public functions and agree with eager on every small program."""
    ours, *others = suite.shipped_engines()
    for program, other in product(SMALL_PROGRAMS, others):
        figure = suite.overhead_figure(program, mode, (ours, other), CPU, rounds=2, sample_ns=1)
        assert (figure.problem, program.name, figure.against) == ("", program.name, other.name)


def test_both_shipped_engines_trace_a_model() -> None:
    """A module goes through both, forward and backward."""
    figure = suite.trace_figure(TINY, suite.shipped_engines()[:2], CPU, backward=True, rounds=1)
    assert figure.problem == ""
    assert figure.ours_ns > 0
