"""`aotlab.observe`: what stock `torch.compile` compiles in a block, and that observing it changes nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import warnings

import pytest
import torch

import aotlab

_TRACE = logging.getLogger("torch.__trace")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Let each test capture its functions for the first time."""
    torch.compiler.reset()


def _scale(x, factor):
    x.mul_(factor)
    return x.t()


def _names(report):
    return sorted(set(report.inputs["frame"]))


def test_facts_of_a_block():
    """Arguments, mutations, outputs, recompiles and guards appear in the report; compilations outside do not."""

    def before(x):
        return x + 1

    def after(x):
        return x - 1

    torch.compile(before, backend="aot_eager")(torch.ones(2))
    with aotlab.observe("two sizes") as report:
        compiled = torch.compile(_scale, backend="aot_eager")
        compiled(torch.ones(2, 3), 2.0)
        first = report.report()
        compiled(torch.ones(4, 3), 2.0)
    torch.compile(after, backend="aot_eager")(torch.ones(2))
    assert len(first.frames[0].graphs) == 1
    assert _names(report) == ["_scale"]
    assert report.inputs[report.inputs["kind"] != "python"][["name", "mutated"]].values.tolist() == [["x", True]] * 2
    assert report.outputs["relation"].tolist() == ["view of input x"] * 2
    assert report.recompiles[["graph", "earlier"]].values.tolist() == [[1, 0]]
    assert "size mismatch at index 0" in report.recompiles["reason"][0]
    assert not report.guards.empty
    assert report.report().name == "two sizes"
    assert report.report() is report.report()


def test_a_training_step():
    """A backward that is compiled after the forward has run appears in the report of its forward."""
    x = torch.ones(3, 4, requires_grad=True)
    with aotlab.observe() as report:
        torch.compile(lambda x: x.exp().sum(), backend="aot_eager", dynamic=True)(x).backward()
    assert set(report.nodes["part"]) == {"joint", "forward", "backward"}
    assert len(report.saved) == 1
    assert torch.equal(x.grad, x.detach().exp())


def test_observing_changes_nothing():
    """The block leaves torch's logging and the settings of its caches as they were, also after an error."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    def state():
        return list(_TRACE.handlers), inductor_config.fx_graph_cache, functorch_config.enable_autograd_cache

    torch.compile(lambda x: x + 2, backend="aot_eager")(torch.ones(2))  # torch removes its unused handler now
    before = state()
    within = []

    def fail():
        with aotlab.observe(caches=False):
            within.append(state())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert within[0][0][1:] == before[0]
    assert within[0][1:] == (False, False)
    assert state() == before


def test_threads():
    """Compilations of other threads are observed, too."""

    def work(x):
        return x * 3

    with aotlab.observe() as report:
        thread = threading.Thread(target=lambda: torch.compile(work, backend="aot_eager")(torch.ones(2)))
        thread.start()
        thread.join()
    assert _names(report) == ["work"]


def test_two_observations():
    """An observation inside of another one has a part of its compilations."""

    def outer(x):
        return x + 1

    def inner(x):
        return x - 1

    with aotlab.observe() as whole:
        torch.compile(outer, backend="aot_eager")(torch.ones(2))
        with aotlab.observe() as part:
            torch.compile(inner, backend="aot_eager")(torch.ones(2))
    assert _names(whole) == ["inner", "outer"]
    assert _names(part) == ["inner"]


def test_logging_that_is_set_up_again():
    """A program may set up torch's logging in the block."""
    program = (
        "import aotlab, torch\n"
        "with aotlab.observe() as report:\n"
        "    torch.compile(lambda x: x + 1, backend='aot_eager')(torch.ones(2))\n"
        "    torch._logging.set_logs(recompiles=True)\n"
        "    torch.compile(lambda x: x + 2, backend='aot_eager')(torch.ones(2))\n"
        "print(len(report.frames))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout == "2\n"


def test_cache_hits():
    """A note says what came from a cache, and how to compile it again."""

    def cached(x):
        return (x * 2.5).cos()

    def seen(**options):
        torch.compiler.reset()
        with aotlab.observe(**options) as report:
            torch.compile(cached)(torch.ones(7))
        assert not report.nodes.empty
        notes = [note for note in report.notes if "came from a cache" in note]
        assert all("aotlab.observe(caches=False)" in note for note in notes)
        return "lowering" in report.time["kind"].tolist(), len(notes)

    seen()
    assert seen() == (False, 1)
    assert seen(caches=False) == (True, 0)


@pytest.mark.parametrize("error", ["return 1 / 0", "raise KeyboardInterrupt", "raise SystemExit(7)", "pass"])
def test_run_a_script(tmp_path, monkeypatch, capsys, error):
    """``aotlab run --observe`` reports a script's compilations, and ends as the script does."""
    from aotlab.cli import main

    (tmp_path / "beside.py").write_text("FACTOR = 2\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, os, torch\n"
        "from beside import FACTOR\n"
        "def work(x):\n    x.mul_(FACTOR)\n"
        "torch.compile(work, backend='aot_eager')(torch.ones(2))\n"
        "print(sys.argv[1:], __name__)\n"
        "os.chdir('/')\n"
        f"def end():\n    {error}\n"
        "end()\n"
    )
    monkeypatch.chdir(tmp_path)
    path, argv = list(sys.path), sys.argv
    with warnings.catch_warnings():
        status = main(["run", "--observe", "--json", "r.json", str(script), "--html", "x"])
    printed = capsys.readouterr()
    assert status == {"return 1 / 0": 1, "raise KeyboardInterrupt": 130, "raise SystemExit(7)": 7, "pass": 0}[error]
    assert "['--html', 'x'] __main__" in printed.out
    assert ("ZeroDivisionError" in printed.err) == (error == "return 1 / 0")
    assert "aotlab/" not in printed.err.partition("torch.compile")[0]  # the traceback is the script's
    assert (path, argv) == (sys.path, sys.argv)
    report = aotlab.Report.load(tmp_path / "r.json")
    assert report.inputs[["name", "mutated"]].values.tolist() == [["x", True]]
    assert (tmp_path / "aotlab-report.html").stat().st_size > 10_000


def test_run_needs_a_script(tmp_path, capsys):
    """A file that does not exist, and an option that has no meaning, are errors of usage."""
    from aotlab.cli import main

    assert main(["run", str(tmp_path / "none.py")]) == 2
    (tmp_path / "a.py").write_text("")
    assert main(["run", "--no-caches", str(tmp_path / "a.py")]) == 2
    assert "add --observe" in capsys.readouterr().err
    for options in (["--cell", "1"], ["--options=--time"], ["--waits"], ["--observe", "--all"]):
        assert main(["run", *options, str(tmp_path / "a.py")]) == 2
