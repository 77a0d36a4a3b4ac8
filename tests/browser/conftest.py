"""Fixtures of the browser tests: one server and one browser per process, one page per test.

Without playwright or Chromium the tests are skipped and say so; with ``AOTLAB_BROWSER=required`` in the environment
they fail instead. With ``AOTLAB_LABEXTENSION=checkout``, JupyterLab uses the extension that was built in this checkout,
not an installed one. The server's log, and screenshots and messages of failed pages, go to the folder that
``AOTLAB_ARTEFACTS`` names, or to pytest's temporary folder. Other screenshots are taken only if a folder is named.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import FLAGS, Lab, Shared
from tests.browser.server import Server, running

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each browser test time for a browser on a busy machine."""
    for item in items:
        if item.path.is_relative_to(HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(500))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Save a screenshot of the page when a test fails."""
    report = yield
    if report.when == "call" and report.failed:
        for value in getattr(item, "funcargs", {}).values():
            if isinstance(value, Lab):
                value.keep_failure(item.name)
    return report


def _missing(reason: str) -> None:
    """Skip for ``reason``, or fail where a browser is required."""
    if os.environ.get("AOTLAB_BROWSER") == "required":
        pytest.fail(f"{reason}, and AOTLAB_BROWSER=required")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for screenshots and logs."""
    named = os.environ.get("AOTLAB_ARTEFACTS")
    folder = Path(named) if named else tmp_path_factory.getbasetemp() / "browser-artefacts"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# The scope is the package: playwright's event loop must not run while other packages' tests start their own loops.
@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """Run Chromium without a window."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _missing("needs playwright (pip install playwright)")
    chromium = shutil.which("chromium")
    if chromium is None:
        _missing("needs Chromium (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def jupyterlab(
    browser: Any, tmp_path_factory: pytest.TempPathFactory, artefacts: Path, worker: str
) -> Iterator[Server]:
    """Run a JupyterLab server.

    It requests ``browser``, so that nothing is started if there is no browser.
    """
    log = artefacts / f"jupyterlab-{worker}.log"
    log.unlink(missing_ok=True)
    with running(tmp_path_factory.mktemp("jupyterlab"), log) as server:
        yield server


@pytest.fixture(scope="session")
def worker() -> str:
    """Name this process among xdist's."""
    return os.environ.get("PYTEST_XDIST_WORKER", "main")


@pytest.fixture(scope="package")
def shared(browser: Any, jupyterlab: Server, artefacts: Path) -> Shared:
    """Return the objects that all pages of this process share."""
    return Shared(browser=browser, server=jupyterlab, artefacts=artefacts)


@pytest.fixture(scope="package")
def extension(jupyterlab: Server) -> None:
    """Ask for aotlab's extension in JupyterLab."""
    if not jupyterlab.extension:
        _missing("JupyterLab does not list aotlab's extension as enabled and OK (build it, or install aotlab)")


@pytest.fixture
def lab(shared: Shared) -> Iterator[Lab]:
    """Open an empty JupyterLab page; afterwards it must not have complained, and its kernels are stopped."""
    with shared.page() as lab:
        yield lab
    lab.raise_complaints()
