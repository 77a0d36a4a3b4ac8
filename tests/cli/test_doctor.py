"""``aotlab doctor``: each check is seen to find its problem."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.specifiers import SpecifierSet

import aotlab
from aotlab.backends import kernel_cache
from aotlab.cli import doctor
from aotlab.cli.doctor import Finding

ROOT = Path(__file__).parents[2]


def test_versions_are_the_packages() -> None:
    """The doctor requires the versions of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (low, high) = (".".join(map(str, version)) for version in doctor.SUPPORTED_TORCH)
    assert f"torch>={low},<{high}" in project["dependencies"]
    assert project["requires-python"] == ">=" + ".".join(map(str, doctor.SUPPORTED_PYTHON))
    assert "jupyterlab>=" + ".".join(map(str, doctor.SUPPORTED_JUPYTERLAB)) in project["dependencies"]


@pytest.mark.parametrize("version", ["2.10.1", "2.11.0", "2.13.0+cpu", "2.15.3+cu132", "2.16.0", "3.0.0", "2.9.0"])
def test_torch_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch version outside the supported range is a problem, one inside is not."""
    monkeypatch.setattr(torch, "__version__", version)
    expected = "ok" if SpecifierSet(">=2.11,<2.16").contains(version) else "problem"
    assert doctor.check_torch().status == expected


def test_an_exception_is_a_finding() -> None:
    """A check that raises is reported under its name, and the other checks run."""

    def broken() -> Finding:
        raise ImportError("libfoo.so is not there\nand more")

    finding = doctor.examine("torch", broken)
    assert (finding.subject, finding.status, finding.seen) == (
        "torch",
        "problem",
        "ImportError: libfoo.so is not there",
    )


@pytest.mark.parametrize(
    ("statuses", "status", "closing"), [("on", 0, "No problems."), ("op", 1, "1 problem."), ("pp", 1, "2 problems.")]
)
def test_exit_status(statuses: str, status: int, closing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is 1 if there is a problem. Notes do not count."""
    names = {"o": "ok", "n": "note", "p": "problem"}

    def check(letter: str) -> Callable[[], Finding]:
        return lambda: Finding(subject="x", status=names[letter], seen="y")  # type: ignore[arg-type]

    monkeypatch.setattr(doctor, "QUICK_CHECKS", tuple(("x", check(letter)) for letter in statuses))
    out = io.StringIO()
    assert doctor.run(quick=True, out=out) == status
    assert out.getvalue().splitlines()[-1] == closing


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a compiler on the PATH there is a problem with an advice; with another one there, the advice names it."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    finding = doctor.check_compiler()
    assert finding.status == "problem"
    assert "install a C++ compiler" in finding.advice
    other = tmp_path / "c++"
    other.write_text("#!/bin/sh\necho 'a compiler 1.0'\n")
    other.chmod(0o755)
    assert doctor.check_compiler().advice == "export CXX=c++"
    monkeypatch.setenv("CXX", "c++")
    assert str(doctor.check_compiler()) == "ok       C++ compiler     c++: a compiler 1.0"


def test_broken_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compiler that cannot even say its version is a problem."""
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert doctor.check_compiler().seen == f"{broken} --version failed with status 3"


def test_missing_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Python without its C headers (Debian's, without python3-dev) is a problem."""
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert doctor.check_headers().status == "problem"
    (tmp_path / "Python.h").touch()
    assert doctor.check_headers().status == "ok"


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A required package that is not installed is a problem; one of the notebook's is a note."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert doctor.examine("pandas", doctor.check_pandas).status == "problem"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert doctor.check_notebook().status == "note"


@pytest.mark.parametrize("version", ["4.3.9", "4.4.0", "4.10.1", "5.0.0a1", "3.6.8"])
def test_jupyterlab_range(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JupyterLab that is too old for the extension is a problem."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("importlib.metadata.version", lambda name: version if name == "jupyterlab" else "1.0")
    finding = doctor.check_notebook()
    expected = "ok" if SpecifierSet(">=4.4", prereleases=True).contains(version) else "problem"
    assert (finding.status, f"jupyterlab {version}" in finding.seen) == (expected, True)


@pytest.fixture
def labextensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let Jupyter look for extensions in an empty folder only, and return that folder."""
    paths = pytest.importorskip("jupyter_core.paths", reason="needs JupyterLab")
    monkeypatch.setattr(paths, "jupyter_path", lambda *names: [str(tmp_path.joinpath(*names))])
    return tmp_path / "labextensions"


@pytest.mark.parametrize(("installed", "status"), [(True, "problem"), (False, "note")])
def test_missing_extension(installed: bool, status: str, labextensions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed aotlab without its extension, or with another version's, is a problem; a mere checkout's a note."""
    monkeypatch.setattr(doctor, "_installed", lambda: installed)
    finding = doctor.check_extension()
    assert (finding.status, finding.seen.partition(":")[0], finding.advice) == (
        status,
        "the JupyterLab extension is not installed",
        f"{sys.executable} -m pip install -e {ROOT}",
    )
    (labextensions / "aotlab").mkdir(parents=True)
    package = labextensions / "aotlab" / "package.json"
    package.write_text('{"name": "aotlab", "version": "0.0.1"}')
    finding = doctor.check_extension()
    assert (finding.status, f"is of version 0.0.1, aotlab of {aotlab.__version__}" in finding.seen) == (status, True)
    package.write_text(f'{{"name": "aotlab", "version": "{aotlab.__version__}"}}')
    assert doctor.check_extension().status == "ok"


def test_extension_without_jupyterlab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no JupyterLab, its extension is not missed."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert doctor.check_extension().status == "note"


def test_missing_dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package without the dashboard's JavaScript is a problem, and the message names the searched places."""
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "aotlab" / "cli" / "doctor.py"))
    monkeypatch.setattr(doctor, "_installed", lambda: True)
    bundle = tmp_path / "aotlab" / "report" / "static" / "dashboard.js"
    finding = doctor.check_dashboard()
    assert (finding.status, finding.seen.startswith(f"{bundle} is not there"), finding.advice) == (
        "problem",
        True,
        "install aotlab's wheel again, with pip's --force-reinstall",
    )
    bundle.parent.mkdir(parents=True)
    bundle.touch()
    assert doctor.check_dashboard().status == "ok"


def test_missing_package_is_named() -> None:
    """The advice for a package that is not there is the command that installs it."""

    def check() -> Finding:
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    assert doctor.examine("numpy", check).advice == "pip install numpy"


def test_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder that cannot be made is a problem; a good one leaves no trace of the check."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert doctor.check_caches().status == "problem"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert doctor.check_caches().status == "ok"
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_that_others_can_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache folder that everybody can write to is a problem. A cache that is switched off is a note."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with aotlab.config.patch(cache=False):
        assert doctor.check_caches().status == "note"
    tmp_path.chmod(0o777)
    finding = doctor.check_caches()
    assert (finding.status, "every user can write to it" in finding.seen) == ("problem", True)


def test_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a gigabyte left for kernels is a problem."""
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: SimpleNamespace(free=5e8))
    assert doctor.check_caches().status == "problem"


def test_default_cache_is_inductors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The folder that is checked is the one that Inductor uses when nothing is set."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    code = "from torch._inductor.runtime.cache_dir_utils import default_cache_dir; print(default_cache_dir())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert str(kernel_cache.cache_folder()) == done.stdout.strip()


def test_triton_is_needed_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing Triton is a problem where there is a GPU, and only there."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert doctor.check_triton().status == "ok"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.check_triton().status == "problem"


def test_wrong_results_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that compiles but computes something else is found out."""
    assert doctor.check_engine().status == "ok"
    monkeypatch.setattr(aotlab, "compile", lambda function, backend: lambda x, w: function(x, w) * 1.01)
    finding = doctor.check_engine()
    assert (finding.status, finding.advice) == ("problem", "please report this, with the output of `aotlab doctor`")


@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor_compiles() -> None:
    """Inductor compiles on a machine that runs these tests."""
    finding = doctor.check_inductor()
    assert (finding.status, re.sub(r"[\d.]+ s", "N s", finding.seen)) == (
        "ok",
        f"compiled a training step for {'cuda' if torch.cuda.is_available() else 'cpu'} in N s, as eager",
    )
