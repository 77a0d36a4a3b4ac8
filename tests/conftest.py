"""The setup of every test: one kernel cache for the run, a fixed seed, and GPU tests that say why they skip."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

# Set before anything imports Inductor, and inherited by xdist's workers and by subprocesses. A first compilation costs
# half a minute of C++ headers; with one folder for the run it is paid once. An outer setting (CI's) is kept.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"aotlab-tests-{os.getuid()}"))
# Inductor would start a pool of compile workers in every xdist worker.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# The tests store no runs in the developer's own data directory, nor do their subprocesses.
os.environ["AOTLAB_RUNS"] = "off"
# A shell starts what runs in its background deaf to ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from hypothesis import settings

from tests import tiers

# Tracing takes longer than Hypothesis' default deadline, and a run must be repeatable: the same examples every time.
settings.register_profile("aotlab", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("aotlab")


if sys.version_info[:3] == (3, 13, 0):
    # On this release alone, Dynamo warns at every guard of a module. Tests that count warnings would count this one.
    import torch._dynamo.guards

    def _warn(message: str, *arguments: object) -> None:
        if not message.startswith("Guards may run slower on Python 3.13.0"):
            warnings.warn(message, *arguments, stacklevel=2)  # type: ignore[call-overload]

    torch._dynamo.guards.warnings = SimpleNamespace(**vars(warnings) | {"warn": _warn})  # type: ignore[attr-defined]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--tier``."""
    about = "quick, full, long (see tests/tiers.py) or all; default: quick, but all of tests that are named"
    parser.addoption("--tier", choices=(*tiers.TIERS, "all"), help=about)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the tier, and pass it to xdist's workers."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    config.option.tier = config.option.tier or ("quick" if whole else "all")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(_FailuresAtOnce(config))


class _FailuresAtOnce:
    """Print a test that failed when it fails. A run that is stopped before its end prints no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the test's name and its error."""
        if report.failed:
            error = next((line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")), "")
            self.config.pluginmanager.getplugin("terminalreporter").write_line(f"\n{report.nodeid} failed: {error}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect other tiers' tests, and skip tests marked ``gpu`` if there is no GPU."""
    if config.option.tier != "all":
        items[:], left_out = tiers.choose(items, config.option.tier)
        config.hook.pytest_deselected(items=left_out)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Seed torch before each test, so that no test depends on the ones before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> Iterator[None]:
    """Exclude objects that a module leaves in torch's caches from later collections.

    Soon these are a million objects.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Reset Dynamo before and after a test that uses ``torch.compile``."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print, over all test processes, how many of the cells that Dynamo can capture compiled something."""
    graphs = [
        value
        for report in terminalreporter.stats.get("passed", [])
        for name, value in getattr(report, "user_properties", ())
        if name == "compiled_graphs" and report.when == "call"
    ]
    if graphs:
        compiled = sum(count > 0 for count in graphs)
        terminalreporter.write_line(f"cells that compiled something: {compiled} of {len(graphs)} that can be captured")
