"""The command line: the arguments that it passes on, its answers, and that it runs without an installation."""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import aotlab
from aotlab import cli, config
from aotlab.errors import RandomOpError, UsageError

ROOT = Path(__file__).parents[2]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """``--version`` prints the version that Python sees."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert (stop.value.code, capsys.readouterr().out) == (0, f"aotlab {aotlab.__version__}\n")


def test_demo_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option of ``demo`` reaches `aotlab.cli.demo.run`, and its status is the command's."""
    from aotlab.cli import demo

    calls: list[dict[str, object]] = []

    def run(**options: object) -> int:
        calls.append(options)
        return 1

    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(cli, "_check_cuda", lambda _device: None)
    assert cli.main(["demo"]) == 1
    cli.main(["demo", "--device", "cuda:1", "--backend", "eager", "--json", "a.json", "--html", "b.html"])
    assert calls == [
        {
            "device": "auto",
            "backend": "inductor",
            "json_path": None,
            "html_path": Path("aotlab-report.html"),
            "out": sys.stdout,
        },
        {
            "device": "cuda:1",
            "backend": "eager",
            "json_path": Path("a.json"),
            "html_path": Path("b.html"),
            "out": sys.stdout,
        },
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--html", "nowhere/x.html"], "nowhere/x.html cannot be written: there is no folder "),
        (["--html", "."], ". cannot be written: it is a folder; name a file in it"),
        (["--json", "nowhere/x.json"], "nowhere/x.json cannot be written: there is no folder "),
        (["--device", "cuda"], "--device cuda: torch 2.13.0+cpu is built without CUDA; use --device cpu"),
    ],
)
def test_demo_says_at_once_what_cannot_be(arguments: list[str], message: str, tmp_path: Path) -> None:
    """An impossible path or device is reported before torch is even imported."""
    code = (
        "import sys\nfrom aotlab import cli\ncli.version = lambda _name: '2.13.0+cpu'\n"
        f"print(cli.main({['demo', *arguments]!r}), 'torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert (done.stdout, done.stderr.startswith(f"aotlab: {message}")) == ("2 False\n", True), done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens where there is no GPU, and here is one")
def test_demo_looks_for_the_gpu_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing GPU is reported before the demo is imported, even if torch is built with CUDA."""
    monkeypatch.setattr(cli, "version", lambda _name: "2.13.0")
    monkeypatch.setitem(sys.modules, "aotlab.cli.demo", None)
    assert cli.main(["demo", "--device", "cuda"]) == 2
    assert "there is no cuda device here" in capsys.readouterr().err


def test_bench_engine_hands_the_rest_to_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    """``bench engine`` has separate options, including ``--help``."""
    from aotlab.maintenance.bench import suite

    calls: list[list[str]] = []

    def main(argv: list[str]) -> int:
        calls.append(argv)
        return 0

    monkeypatch.setattr(suite, "main", main)
    assert cli.main(["bench", "engine", "--quick", "--json", "figures.json", "--help"]) == 0
    assert calls == [["engine", "--quick", "--json", "figures.json", "--help"]]


def test_bench_partitioners_hands_the_rest_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """``bench partitioners`` has separate options, too."""
    from aotlab.maintenance.bench import partitioners

    calls: list[list[str]] = []

    def main(argv: list[str]) -> int:
        calls.append(argv)
        return 0

    monkeypatch.setattr(partitioners, "main", main)
    assert cli.main(["bench", "partitioners", "--quick", "--help"]) == 0
    assert calls == [["--quick", "--help"]]


def test_fuzz_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option of ``fuzz`` reaches the run, and its status is the command's."""
    from aotlab.maintenance.fuzz import run as module
    from aotlab.maintenance.fuzz.plan import Plan

    calls: list[tuple[object, dict[str, object]]] = []

    def run(plan: object, **options: object) -> int:
        calls.append((plan, options))
        return 1

    monkeypatch.setattr(module, "run", run)
    assert cli.main(["fuzz"]) == 1
    words = "--engine upstream --programs 7 --seed 3 --grad --dynamo --minutes 1.5 --jobs 2 --save s --shrink 4"
    cli.main(["fuzz", *words.split(), *["--json", "t.json", "--corpus", "c.json", "--no-progress"]])
    cli.main(["fuzz", "--min-cut"])
    assert calls.pop()[0] == Plan(min_cut=True)
    assert cli.main(["fuzz", "--min-cut", "--engine", "upstream"]) == 2
    cli.main(["fuzz", "--without", "all"])
    assert calls.pop()[0] == Plan(without=config.quirks)
    assert cli.main(["fuzz", "--without", "nonesuch"]) == 2
    cli.main(["fuzz", "--related"])
    assert calls.pop()[0] == Plan(related=True)
    assert cli.main(["fuzz", "--related", "--grad"]) == 2
    cli.main(["fuzz", "--sizes", "--grad"])
    assert calls.pop()[0] == Plan(sizes=True, grad=True)
    assert cli.main(["fuzz", "--sizes", "--related"]) == 2
    always = {"out": sys.stdout, "err": sys.stderr}
    assert calls == [
        (
            Plan(engine="aotlab", programs=1000, seed=0, grad=False, dynamo=False),
            {
                **always,
                "save": Path("aotlab-fuzz"),
                "minutes": None,
                "jobs": 1,
                "shrink": 20.0,
                "json_path": None,
                "corpus_file": None,
                "progress": None,
            },
        ),
        (
            Plan(engine="upstream", programs=7, seed=3, grad=True, dynamo=True),
            {
                **always,
                "save": Path("s"),
                "minutes": 1.5,
                "jobs": 2,
                "shrink": 4.0,
                "json_path": Path("t.json"),
                "corpus_file": Path("c.json"),
                "progress": False,
            },
        ),
    ]


def test_fuzz_prints_what_is_carried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--carried`` runs nothing and prints the total of the file, which has to be named."""
    words = ["fuzz", "--carried"]
    assert cli.main(words) == cli.WRONG_USAGE
    assert "name this file with --corpus" in capsys.readouterr().err
    assert cli.main([*words, "--corpus", str(tmp_path / "none.json")]) == cli.OK
    assert capsys.readouterr().out == "carried: 0 programs accepted by aotlab, the last 0 without a failure\n"


def test_fuzz_says_that_it_needs_hypothesis(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Hypothesis, the command ends with status 2 and names the package to install."""
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    assert cli.main(["fuzz"]) == cli.WRONG_USAGE
    assert capsys.readouterr().err == "aotlab: fuzz needs Hypothesis: pip install 'aotlab[fuzz]'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["demo", "--device", "tpu"], "'tpu' is not one of auto, cpu, cuda, cuda:N"),
        (["demo", "--devices", "cpu"], "unrecognized arguments: --devices cpu"),
        (["doctor", "extra"], "unrecognized arguments: extra"),
        (["bench"], "the following arguments are required: SUITE"),
        (["fuzz", "--engine", "other"], "invalid choice: 'other'"),
        (["fuzz", "--programs", "0"], "'0' is not a count: pass a whole number from 1"),
        (["fuzz", "--jobs", "-1"], "'-1' is not a count: pass a whole number from 1"),
    ],
)
def test_wrong_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong command line ends with status 2 and names the mistake."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == cli.WRONG_USAGE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UsageError("no such device"), cli.WRONG_USAGE, "aotlab: no such device\n"),
        (RandomOpError("dropout"), cli.FAILED, "aotlab: RandomOpError: dropout [random-op]\n"),
        (KeyboardInterrupt(), cli.INTERRUPTED, "aotlab: interrupted\n"),
    ],
)
def test_our_errors_are_sentences(
    error: BaseException,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An error of aotlab becomes one line on stderr and an exit status, without a traceback."""
    from aotlab.cli import doctor

    def run(**_options: object) -> int:
        raise error

    monkeypatch.setattr(doctor, "run", run)
    assert (cli.main(["doctor"]), capsys.readouterr().err) == (status, message)


@pytest.fixture(scope="module")
def bare_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a site folder that contains only torch, numpy, pandas and their requirements."""
    folder = tmp_path_factory.mktemp("site")
    waiting, seen = ["torch", "numpy", "pandas"], set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # required on another platform only
        requirements = [Requirement(text) for text in distribution.requires or []]
        waiting += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
        for file in distribution.files or []:
            top = file.parts[0]
            if top not in {"..", "__pycache__"} and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder


def bare(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m aotlab`` from the checkout with the packages in ``site`` alone, in ``folder``."""
    path = os.pathsep.join([str(ROOT), str(site)])
    return subprocess.run(
        # -S keeps this interpreter's own site-packages out.
        [sys.executable, "-S", "-m", "aotlab", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_help_needs_no_torch(tmp_path: Path) -> None:
    """``--help`` works, and lists the commands, where not even torch is installed."""
    empty = tmp_path / "site"
    empty.mkdir()
    done = bare(empty, tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    names = re.findall(r"^ {4}(\w+)\b", done.stdout, re.MULTILINE)
    assert sorted(names) == ["acceptance", "bench", "demo", "doctor", "fuzz", "lab", "report", "run", "runs", "verify"]


def test_bare_checkout(bare_site: Path, tmp_path: Path) -> None:
    """``python -m aotlab doctor`` runs from a checkout with torch, numpy and pandas, and lists the missing packages."""
    done = bare(bare_site, tmp_path, "doctor", "--quick")
    assert done.returncode in {0, 1}, done.stderr
    found = {line[9:25].strip(): line for line in done.stdout.splitlines() if line[:1].strip()}
    assert found["notebook"].startswith(
        "note     notebook         without jupyterlab, ipywidgets, anywidget, matplotlib"
    )
    assert found["aotlab"].startswith("note ")
    assert [found[name].split()[0] for name in ("python", "torch", "numpy", "pandas")] == ["ok"] * 4


def test_bare_checkout_runs_the_demo(bare_site: Path, tmp_path: Path) -> None:
    """The whole demo runs from a checkout with torch, numpy and pandas alone, and writes both reports."""
    done = bare(bare_site, tmp_path, "demo", "--device", "cpu", "--backend", "eager", "--json", "report.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.glob("*report*")) == ["aotlab-report.html", "report.json"]


def test_output_goes_where_it_is_told() -> None:
    """``doctor`` prints to the stream that it is given."""
    from aotlab.cli import doctor

    out = io.StringIO()
    doctor.run(quick=True, out=out)
    assert out.getvalue().startswith("ok       python ")
