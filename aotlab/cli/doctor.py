"""The command ``aotlab doctor``: check the requirements of aotlab, and say how to install the missing ones.

Each check tests one requirement. `examine` turns an exception of a check into a finding.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

from aotlab import __version__

#: The torch versions that aotlab is tested with: the first bound is included, the second is not.
SUPPORTED_TORCH = ((2, 11), (2, 16))
SUPPORTED_PYTHON = (3, 11)
#: The oldest JupyterLab version that our extension supports.
SUPPORTED_JUPYTERLAB = (4, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    ``subject`` names the checked requirement. ``status`` is ``"ok"``, ``"problem"`` or ``"note"`` (useful to know, but
    nothing is broken). ``seen`` is the observation, and ``advice`` is a remedy.
    """

    subject: str
    status: Literal["ok", "problem", "note"]
    seen: str
    advice: str = ""

    def __str__(self) -> str:
        line = f"{self.status:<8} {self.subject:<16} {self.seen}"
        return f"{line}\n{'':<25} → {self.advice}" if self.advice else line


def run(*, quick: bool, out: TextIO) -> int:
    """Run the checks, print each finding, and return the exit status.

    Parameters
    ----------
    quick
        Whether to leave out the checks that compile.
    out
        The stream on which to print.

    Returns
    -------
    int
        0, or 1 if a finding is a problem.
    """
    problems = 0
    for subject, check in QUICK_CHECKS if quick else (*QUICK_CHECKS, *COMPILING_CHECKS):
        if check is check_inductor:
            print("         (Inductor's first compilation on a machine takes up to a minute)", file=out, flush=True)
        finding = examine(subject, check)
        problems += finding.status == "problem"
        print(finding, file=out, flush=True)
    print({0: "\nNo problems.", 1: "\n1 problem."}.get(problems, f"\n{problems} problems."), file=out)
    return 1 if problems else 0


def examine(subject: str, check: Callable[[], Finding]) -> Finding:
    """Run one check. If it raises an exception, return a finding with the status ``"problem"``."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - the exception is the finding
        said = str(error).strip().splitlines() or ["(no message)"]
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        return Finding(
            subject=subject,
            status="problem",
            seen=f"{type(error).__name__}: {said[0]}",
            advice=f"pip install {missing}" if missing == subject else "the other findings may say why",
        )


def check_python() -> Finding:
    """Check the version of Python."""
    seen = f"{platform.python_version()} on {platform.system()} {platform.machine()} ({sys.executable})"
    if sys.version_info < SUPPORTED_PYTHON:
        return Finding(subject="python", status="problem", seen=seen, advice="use Python 3.11 or later")
    return Finding(subject="python", status="ok", seen=seen)


def check_aotlab() -> Finding:
    """Report the version of aotlab, and whether ``torch.compile(backend="aotlab")`` can find it."""
    seen = f"{__version__} ({Path(__file__).parents[1]})"
    registered = {entry.name for entry in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    if "aotlab" not in registered:
        return Finding(
            subject="aotlab",
            status="note",
            seen=f"{seen}, run from a checkout",
            advice='torch.compile(backend="aotlab") is found only once aotlab is installed: pip install -e .',
        )
    return Finding(subject="aotlab", status="ok", seen=seen)


def check_torch() -> Finding:
    """Check the version of torch."""
    import torch

    (first_major, first_minor), (major, minor) = SUPPORTED_TORCH
    seen = str(torch.__version__)
    numbers = re.match(r"(\d+)\.(\d+)", seen)
    if numbers and (first_major, first_minor) <= (int(numbers[1]), int(numbers[2])) < (major, minor):
        return Finding(subject="torch", status="ok", seen=seen)
    wanted = f"torch>={first_major}.{first_minor},<{major}.{minor}"
    return Finding(
        subject="torch",
        status="problem",
        seen=f"{seen}, which aotlab is not tested with",
        advice=f"pip install '{wanted}'",
    )


def check_numpy() -> Finding:
    """Check that numpy can be imported."""
    import numpy

    return Finding(subject="numpy", status="ok", seen=numpy.__version__)


def check_pandas() -> Finding:
    """Check that pandas can be imported. The report's tables need it."""
    import pandas

    return Finding(subject="pandas", status="ok", seen=pandas.__version__)


def check_notebook() -> Finding:
    """Check the packages that only the notebook needs."""
    names = ("jupyterlab", "ipywidgets", "anywidget", "matplotlib")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        return Finding(
            subject="notebook",
            status="note",
            seen=f"without {', '.join(missing)}; the command line does not need them",
            advice=f"for the notebook: pip install {' '.join(missing)}",
        )
    seen = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    numbers = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("jupyterlab"))
    if numbers and (int(numbers[1]), int(numbers[2])) < SUPPORTED_JUPYTERLAB:
        wanted = ".".join(map(str, SUPPORTED_JUPYTERLAB))
        return Finding(
            subject="notebook",
            status="problem",
            seen=f"{seen}; aotlab's extension needs JupyterLab {wanted}",
            advice=f"pip install 'jupyterlab>={wanted}'",
        )
    return Finding(subject="notebook", status="ok", seen=seen)


def check_extension() -> Finding:
    """Check the JupyterLab extension, which draws the reports in a notebook."""
    # A checkout that is not installed has no extension. It works without the extension, so this is no problem.
    missing: Literal["problem", "note"] = "problem" if _installed() else "note"
    if importlib.util.find_spec("jupyter_core") is None:
        return Finding(subject="extension", status="note", seen="not checked, because JupyterLab is not installed")
    from jupyter_core.paths import jupyter_path

    candidates = [Path(folder) / "aotlab" / "package.json" for folder in jupyter_path("labextensions")]
    present = [path for path in candidates if path.is_file()]
    if not present:
        return Finding(
            subject="extension",
            status=missing,
            seen="the JupyterLab extension is not installed: notebooks show reports as static pages",
            advice=_install_again(),
        )
    version = json.loads(present[0].read_text(encoding="utf-8")).get("version")
    if version != __version__:
        return Finding(
            subject="extension",
            status=missing,
            seen=f"the JupyterLab extension in {present[0].parent} is of version {version}, aotlab of {__version__}",
            advice=_install_again(),
        )
    return Finding(subject="extension", status="ok", seen=f"{version} ({present[0].parent})")


def check_dashboard() -> Finding:
    """Check that the package contains the dashboard's JavaScript, which the build of ``extension/`` writes."""
    bundle = Path(__file__).parents[1] / "report" / "static" / "dashboard.js"
    if bundle.is_file():
        return Finding(subject="dashboard", status="ok", seen=str(bundle))
    return Finding(
        subject="dashboard",
        status="problem" if _installed() else "note",
        seen=f"{bundle} is not there: notebooks show reports as static pages",
        advice=_install_again(),
    )


def _installed() -> bool:
    """Return True if aotlab is installed in any way, and False if it only runs from the folder of a checkout."""
    try:
        importlib.metadata.distribution("aotlab")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _install_again() -> str:
    """Return advice on how to install aotlab's files for the notebook."""
    root = Path(__file__).parents[2]
    if (root / "pyproject.toml").is_file():
        return f"{sys.executable} -m pip install -e {root}"
    return "install aotlab's wheel again, with pip's --force-reinstall"


def check_device() -> Finding:
    """Report the device that ``--device auto`` selects."""
    import torch

    if not torch.cuda.is_available():
        cuda = f"torch was built for CUDA {torch.version.cuda} but finds no GPU" if torch.version.cuda else "no CUDA"
        return Finding(subject="device", status="ok", seen=f"cpu, {torch.get_num_threads()} threads; {cuda}")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    listed = "; ".join(f"cuda:{index} {name}" for index, name in enumerate(names))
    return Finding(subject="device", status="ok", seen=f"{listed} (CUDA {torch.version.cuda})")


def check_compiler() -> Finding:
    """Check the C++ compiler for Inductor's CPU kernels: ``$CXX``, or the platform's default compiler."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    compiler = os.environ.get("CXX", default)
    if shutil.which(compiler):
        answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=60)
        if answer.returncode == 0:
            first = answer.stdout.splitlines()[0] if answer.stdout else "(says no version)"
            return Finding(subject="C++ compiler", status="ok", seen=f"{compiler}: {first}")
        seen = f"{compiler} --version failed with status {answer.returncode}"
    else:
        seen = f"{compiler!r} is not on the PATH" + (", although CXX names it" if "CXX" in os.environ else "")
    others = [name for name in ("g++", "clang++", "c++") if name != compiler and shutil.which(name)]
    advice = (
        f"export CXX={others[0]}"
        if others
        else "install a C++ compiler (Debian, Ubuntu: apt-get install g++; macOS: xcode-select --install; "
        "conda: conda install cxx-compiler), or use the eager backend, which compiles nothing"
    )
    return Finding(subject="C++ compiler", status="problem", seen=seen, advice=advice)


def check_headers() -> Finding:
    """Check Python's C headers, which every Inductor kernel includes."""
    folder = Path(sysconfig.get_paths()["include"])
    if (folder / "Python.h").is_file():
        return Finding(subject="Python headers", status="ok", seen=str(folder))
    return Finding(
        subject="Python headers",
        status="problem",
        seen=f"{folder / 'Python.h'} is not there, and Inductor's kernels include it",
        advice="install Python's headers (Debian, Ubuntu: apt-get install python3-dev)",
    )


def check_triton() -> Finding:
    """Check Triton, which Inductor only needs on a GPU."""
    import torch

    there = importlib.util.find_spec("triton") is not None
    if there:
        return Finding(subject="triton", status="ok", seen=importlib.metadata.version("triton"))
    if torch.cuda.is_available():
        return Finding(
            subject="triton",
            status="problem",
            seen="not installed, and Inductor cannot compile for the GPU without it",
            advice="reinstall torch from PyPI, because its CUDA builds install Triton",
        )
    return Finding(subject="triton", status="ok", seen="not installed, and not needed on the CPU")


def check_caches() -> Finding:
    """Check that Inductor's cache folder for compiled kernels is writable; show its size and its number of graphs."""
    from aotlab import config
    from aotlab.backends import kernel_cache

    folder = kernel_cache.cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"aotlab")
    except OSError as error:
        return Finding(
            subject="kernel cache",
            status="problem",
            seen=f"{folder} cannot be written to ({error.strerror})",
            advice=kernel_cache.ADVICE,
        )
    if problem := kernel_cache.strangers(folder):
        return Finding(
            subject="kernel cache",
            status="problem",
            seen=f"{folder}: {problem}, so aotlab does not load compiled graphs from it",
            advice=kernel_cache.ADVICE,
        )
    free = shutil.disk_usage(folder).free / 1e9
    if free < 1:
        return Finding(
            subject="kernel cache",
            status="problem",
            seen=f"{folder}: {free:.1f} GB left on that disk",
            advice="free some disk space, or set TORCHINDUCTOR_CACHE_DIR to a folder on another disk",
        )
    sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    graphs = sum(folder / "fxgraph" in file.parents for file in sizes)
    seen = f"{folder} ({graphs} graphs, {sum(sizes.values()) / 1e6:.0f} MB; {free:.0f} GB free)"
    if not config.cache:
        return Finding(
            subject="kernel cache", status="note", seen=f"off for aotlab's graphs (aotlab.config.cache); {seen}"
        )
    return Finding(subject="kernel cache", status="ok", seen=seen)


def check_assertions() -> Finding:
    """Report whether compiled outputs are checked at each call."""
    from aotlab import config

    if config.debug_assert:
        return Finding(
            subject="debug assertions",
            status="note",
            seen="on: every output and gradient of a compiled graph is checked at each call",
            advice="set aotlab.config.debug_assert = False before measuring anything",
        )
    return Finding(subject="debug assertions", status="ok", seen="off (aotlab.config.debug_assert)")


def check_engine() -> Finding:
    """Trace a small training step with aotlab's own engine and compare it with eager."""
    import aotlab

    return _compiles("engine", lambda function: aotlab.compile(function, backend="eager"))


def check_inductor() -> Finding:
    """Compile a small training step with stock ``torch.compile`` and Inductor, and compare it with eager."""
    import torch

    return _compiles("inductor", lambda function: torch.compile(function, backend="inductor"))


def _compiles(subject: str, compiler: Callable[[Callable[..., object]], Callable[..., object]]) -> Finding:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ w).square().sum()

    def measure(function: Callable[..., object]) -> tuple[torch.Tensor, ...]:
        w = torch.linspace(-1, 1, 32, device=device).reshape(8, 4).requires_grad_()
        loss = function(torch.linspace(0, 1, 16, device=device).reshape(2, 8), w)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        assert w.grad is not None
        return loss.detach(), w.grad

    expected = measure(step)
    begin = time.perf_counter()
    actual = measure(compiler(step))
    seconds = time.perf_counter() - begin
    if not all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(actual, expected, strict=True)):
        return Finding(
            subject=subject,
            status="problem",
            seen=f"a compiled training step gave {actual}, eager {expected}",
            advice="please report this, with the output of `aotlab doctor`",
        )
    return Finding(
        subject=subject, status="ok", seen=f"compiled a training step for {device} in {seconds:.1f} s, as eager"
    )


#: The checks that `run` makes, by subject. `COMPILING_CHECKS` are left out with ``quick``.
QUICK_CHECKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("python", check_python),
    ("aotlab", check_aotlab),
    ("torch", check_torch),
    ("numpy", check_numpy),
    ("pandas", check_pandas),
    ("notebook", check_notebook),
    ("extension", check_extension),
    ("dashboard", check_dashboard),
    ("device", check_device),
    ("C++ compiler", check_compiler),
    ("Python headers", check_headers),
    ("triton", check_triton),
    ("kernel cache", check_caches),
    ("debug assertions", check_assertions),
)
COMPILING_CHECKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("engine", check_engine),
    ("inductor", check_inductor),
)
