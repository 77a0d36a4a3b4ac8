"""``aotlab demo``: the printed facts are true, and its exit status says whether all went well."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aotlab.cli import demo
from aotlab.errors import UsageError
from aotlab.frontends import api
from aotlab.report import Report
from aotlab.report.counts import summary

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")

#: Packages that a server without Jupyter lacks, and packages that only developers have.
ABSENT = ("matplotlib", "IPython", "ipywidgets", "anywidget", "jupyterlab", "hypothesis", "pytest", "jsonschema")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, Report, str]:
    """Run the demo once on the eager backend; give its status, its text, its report and its page."""
    folder, out = tmp_path_factory.mktemp("demo"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        _make_quick(patch)
        status = demo.run("cpu", "eager", folder / "report.json", folder / "report.html", out)
    assert status == 0, out.getvalue()
    report = Report.from_json((folder / "report.json").read_text())
    return status, out.getvalue(), report, (folder / "report.html").read_text()


def _make_quick(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(demo, "_ROUNDS", 2)
    patch.setattr(demo, "_SAMPLE_NS", 1)


def _rows(report: Report, table: str, frame: int) -> list[dict[str, object]]:
    found = getattr(report, table)
    return list(found[found["frame"] == report.frames[frame].name].to_dict("records"))


def test_both_programs_compile_and_verify(shown: tuple[int, str, Report, str]) -> None:
    """The status is 0, both programs have a frame, and everything that was compared is equal."""
    status, text, report, _ = shown
    assert status == 0
    assert "FAILED" not in text
    assert [frame.function.split(".")[-1] for frame in report.frames] == ["ByteModel", "mutate_and_alias"]
    assert len(report.refusals) == 0
    assert len(report.verification) > 100
    assert report.verification["equal"].all()
    assert report.verification["frame"].notna().all()


def test_the_table_of_inputs_is_true(shown: tuple[int, str, Report, str]) -> None:
    """The state is mutated under no_grad, it comes twice, the others are left alone, the weight requires grad."""
    state, same, x, weight = _rows(shown[2], "inputs", 1)
    assert [row["name"] for row in (state, same, x, weight)] == ["state", "same_state", "x", "weight"]
    assert same["duplicate_of"] == "state"
    assert same["storage"] == state["storage"]
    assert len({state["storage"], x["storage"], weight["storage"]}) == 3
    assert (state["mutates_data"], state["mutates_metadata"], state["mutation_under_no_grad"]) == (True, False, True)
    assert (x["mutates_data"], weight["mutates_data"]) == (False, False)
    assert (x["requires_grad"], weight["requires_grad"]) == (False, True)


def test_the_table_of_outputs_is_true(shown: tuple[int, str, Report, str]) -> None:
    """One output is an input, one a view of an input, two are views of one intermediate."""
    first, second, third, fourth = _rows(shown[2], "outputs", 1)
    assert (first["output_type"], first["base"]) == ("is input", "x")
    assert (second["output_type"], second["base"]) == ("alias of input", "weight")
    assert "alias of intermediate" in str(third["output_type"])
    assert "alias of intermediate" in str(fourth["output_type"])
    assert third["storage"] == fourth["storage"]
    assert len({first["storage"], second["storage"], third["storage"]}) == 3
    assert [row["shape"] for row in (first, second, third, fourth)] == ["[6, 3]", "[4, 3]", "[6, 2]", "[4, 6]"]
    assert [row["requires_grad"] for row in (first, second, third, fourth)] == [False, True, True, True]


def test_the_transformer_is_lifted_and_trained(shown: tuple[int, str, Report, str]) -> None:
    """All parameters are inputs that require grad and are not mutated by the graph; the output is the loss."""
    report = shown[2]
    inputs = _rows(report, "inputs", 0)
    parameters = [row for row in inputs if row["kind"] == "parameter"]
    assert len(parameters) == sum(1 for _ in demo.ByteModel().parameters())
    assert all(row["requires_grad"] and not row["mutates_data"] for row in parameters)
    assert [row["dtype"] for row in inputs if row["kind"] == "input"] == ["int64", "int64"]
    (loss,) = _rows(report, "outputs", 0)
    assert (loss["output_type"], loss["shape"], loss["requires_grad"]) == ("non-alias", "[]", True)
    # Three steps and no recompilation: the optimizer changes values, which nobody guards.
    assert len(report.frames[0].graphs) == 1
    assert report.frames[0].calls.compiled == demo.STEPS


def test_all_stages_are_there(shown: tuple[int, str, Report, str]) -> None:
    """Both programs went through all seven stages."""
    for frame in (0, 1):
        assert [row["stage"] for row in _rows(shown[2], "stages", frame)] == [
            "capture",
            "dedupe",
            "synthetic_bases",
            "trace",
            "partition",
            "compile",
            "runtime",
        ]


def test_three_engines_are_timed_in_both_directions(shown: tuple[int, str, Report, str]) -> None:
    """The timings of both programs contain forward, backward and total, each for eager, upstream and aotlab."""
    for frame in (0, 1):
        timed = [(row["phase"], row["engine"]) for row in _rows(shown[2], "timings", frame)]
        assert timed == [(p, e) for p in ("forward", "backward", "total") for e in ("eager", "upstream", "aotlab")]
    assert (shown[2].timings["median_ns"] > 1000).all()


def test_two_rounds_of_the_demo_give_no_ratio(shown: tuple[int, str, Report, str]) -> None:
    """With only two rounds, the demo gives no ratio, and the tables, the text and the chip say so."""
    _, text, report, _ = shown
    timings = report.timings
    assert timings["over_eager"].isna().all()
    assert set(timings.loc[timings["engine"] != "eager", "incomparable"]) == {"not comparable: 2 rounds"}
    assert text.count("not comparable: 2 rounds") > 6
    assert "×" not in text
    assert summary(report).speed == "not comparable: 2 rounds"


def test_everything_is_printed(shown: tuple[int, str, Report, str]) -> None:
    """The text has all tables of both programs, the verdict, and where the reports are."""
    _, text, report, _ = shown
    titles = ("Inputs:", "Outputs:", "Stages", "Kernels", "Timings:", "Verification")
    assert [text.count(f"\n{title}") for title in titles] == [2] * len(titles)
    assert report.verdict in text
    assert "report.html" in text
    assert "report.json" in text


def test_the_page_shows_both_programs(shown: tuple[int, str, Report, str]) -> None:
    """The HTML report names both functions."""
    assert "ByteModel" in shown[3]
    assert "mutate_and_alias" in shown[3]


def test_programs_are_the_same_at_every_call() -> None:
    """Two sets of programs start from equal values and share no memory, so that one can check the other."""
    for one, other in zip(demo.programs(CPU), demo.programs(CPU), strict=True):
        for left, right in zip((*one.arguments, *one.leaves), (*other.arguments, *other.leaves), strict=True):
            assert torch.equal(left, right)
            assert left.data_ptr() != right.data_ptr()


def test_training_lowers_the_loss() -> None:
    """The three steps are steps of training."""
    training, _ = demo.programs(CPU)
    results = training.job(training.function)
    losses = [float(results[f"loss of step {step + 1}"]) for step in range(demo.STEPS)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


def _without_mutation(function: Callable[..., object], **_: object) -> Callable[..., object]:
    """Compile wrongly: the function writes to copies instead of its arguments."""
    if isinstance(function, torch.nn.Module):
        return function
    return lambda *args: function(*[arg if arg.requires_grad else arg.clone() for arg in args])


def test_a_wrong_engine_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that loses the mutation gives status 1 and a sentence about the mutated input."""
    _make_quick(monkeypatch)
    monkeypatch.setattr(api, "compile", _without_mutation)
    out = io.StringIO()
    assert demo.run("cpu", "eager", None, None, out) == 1
    failures = [line for line in out.getvalue().splitlines() if line.startswith("FAILED: mutate_and_alias")]
    assert any("state afterwards differs from eager" in line for line in failures)
    assert "FAILED: ByteModel: " not in out.getvalue()


def test_what_ran_eagerly_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that returns the function uncompiled equals eager, but fails the demo."""
    _make_quick(monkeypatch)
    monkeypatch.setattr(api, "compile", lambda function, **_: function)
    out = io.StringIO()
    assert demo.run("cpu", "eager", None, None, out) == 1
    failures = [line for line in out.getvalue().splitlines() if line.startswith("FAILED")]
    assert [line.split(",")[0] for line in failures] == [
        "FAILED: ByteModel was not compiled",
        "FAILED: mutate_and_alias was not compiled",
    ]


def test_one_program_that_cannot_run_leaves_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error in one program is shown with its traceback, and the other program is still shown."""
    _make_quick(monkeypatch)
    compile_: Callable[..., Callable[..., object]] = api.compile

    def broken(*_: object) -> object:
        raise ValueError("broken on purpose")

    def failing(function: Callable[..., object], **options: object) -> Callable[..., object]:
        return broken if isinstance(function, torch.nn.Module) else compile_(function, **options)

    monkeypatch.setattr(api, "compile", failing)
    out = io.StringIO()
    assert demo.run("cpu", "eager", None, None, out) == 1
    assert "FAILED: ByteModel could not be run: ValueError: broken on purpose" in out.getvalue()
    assert "FAILED: mutate_and_alias" not in out.getvalue()
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Ctrl-C leaves no half-written report and no traceback."""

    def interrupted(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "compile", lambda *_, **__: interrupted)
    assert demo.run("cpu", "eager", tmp_path / "r.json", tmp_path / "r.html", io.StringIO()) == 130
    assert list(tmp_path.iterdir()) == []
    captured = capsys.readouterr().err
    assert "interrupted" in captured
    assert "Traceback" not in captured


def test_paths_are_checked_before_anything_runs(tmp_path: Path) -> None:
    """A report that could not be written is an error at once, not after a minute."""
    with pytest.raises(UsageError, match="there is no folder"):
        demo.run("cpu", "eager", tmp_path / "nowhere" / "report.json", None, io.StringIO())


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens where there is no GPU, and here is one")
def test_a_missing_device_is_named() -> None:
    """If cuda is requested but missing, the error suggests a remedy."""
    with pytest.raises(UsageError, match="use --device cpu"):
        demo.run("cuda", "eager", None, None, io.StringIO())


def _command(*arguments: str) -> list[str]:
    """Make a command that runs aotlab where only torch, numpy and pandas can be imported."""
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}));"
        f"from aotlab.cli import main; sys.exit(main({list(arguments)!r}))"
    )
    return [sys.executable, "-c", program]


@pytest.mark.timeout(600)
def test_the_command_on_inductor_without_jupyter(tmp_path: Path) -> None:
    """From a bare checkout, with torch, numpy and pandas alone: status 0, kernels listed, both files written."""
    arguments = ("demo", "--device", "cpu", "--json", "r.json", "--html", "r.html")
    done = subprocess.run(
        _command(*arguments), cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "r.json").read_text())
    kernels = [[k["language"] for g in frame["graphs"] for k in g["kernels"]] for frame in report["frames"]]
    assert len(kernels) == 2
    assert all("c++" in languages for languages in kernels)
    assert (tmp_path / "r.html").stat().st_size > 1000
    assert "[1/6," in done.stderr
    assert "[6/6," in done.stderr


def test_the_command_can_be_interrupted(tmp_path: Path) -> None:
    """A real SIGINT while the demo works ends the process with status 130."""
    process = subprocess.Popen(
        _command("demo", "--device", "cpu", "--backend", "eager", "--html", "r.html"),
        cwd=tmp_path,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "[1/6," not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not (tmp_path / "r.html").exists()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
