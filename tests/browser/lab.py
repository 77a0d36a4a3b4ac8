"""A JupyterLab page for a test: open, run, switch the theme, reload, and read the page."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat

from tests.browser.server import Server

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
THEMES = ("JupyterLab Light", "JupyterLab Dark")

#: Errors on the console that are JupyterLab's own, each with the reason why it says nothing about aotlab.
OWN_ERRORS = {
    "Could not restore the debugger state: Canceled future": "its debugger's question to a kernel that goes away",
    r"(?s)'removeChild' on 'Node'.*/static/lab/jlab_core\S+\s*$": "its splash, removed by two theme changes",
    r"(?s)reading 'kernel'.*jupyter-widgets/jupyterlab-manager": "ipywidgets expects a kernel of every notebook",
}

# The beginning of the scripts below: the panel of the current notebook.
_PANEL = "const panel = window.jupyterapp.shell.currentWidget;"
#: The outputs of the current notebook's cells, as the notebook stores them, and how many of them are drawn.
_ALL_OUTPUTS = f"""() => {{
    {_PANEL}
    return (panel?.content?.widgets ?? []).filter(cell => cell.model?.outputs).map(cell => [
        cell.model.outputs.toJSON(), cell.node.querySelectorAll('.jp-OutputArea-output').length,
    ]);
}}"""
_COUNT = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The objects that the pages of one process share: a browser, a server, a folder for screenshots."""

    browser: Any
    server: Server
    artefacts: Path

    @contextmanager
    def page(self) -> Iterator[Lab]:
        """Open JupyterLab in a fresh profile; when the page is closed, its server's kernels are stopped."""
        context = self.browser.new_context(viewport={"width": 1400, "height": 1000})
        context.set_default_timeout(60_000)
        lab = Lab(page=context.new_page(), server=self.server, artefacts=self.artefacts)
        try:
            lab.start()
            yield lab
        finally:
            context.close()
            self.server.stop_kernels()


@dataclass(slots=True, kw_only=True)
class Lab:
    """JupyterLab in a browser.

    Attributes
    ----------
    page
        Playwright's page.
    server
        The server of the page.
    artefacts
        The folder for screenshots.
    complaints
        Messages of the console, uncaught exceptions, and requests to other machines.
    """

    page: Any
    server: Server
    artefacts: Path
    complaints: list[str] = field(default_factory=list)
    workspace: str = ""

    # The page

    def start(self) -> None:
        """Load JupyterLab in a new workspace."""
        self.page.on("console", lambda message: self._hear(message.type, message.text, message.location))
        self.page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}\n{error.stack or ''}"))
        self.page.on("request", lambda request: self._watch(request))
        # Other tests' pages leave their layout in other workspaces; this one starts empty and is found again by reload.
        self.workspace = f"page-{next(_COUNT)}"
        url = f"{self.server.url}/lab/workspaces/{self.workspace}"
        self.page.goto(f"{url}?token={self.server.token}")
        self._wait_for_lab()
        if self.page.evaluate("() => document.body.dataset.jpThemeName") != THEMES[0]:
            self.theme(THEMES[0])  # the server remembers what another page chose

    def reload(self) -> None:
        """Load the page again, and wait until JupyterLab has restored the open documents."""
        self._wait_for_saved_layout()
        self.page.reload()
        self._wait_for_lab()
        self.wait_for_notebook()

    def theme(self, name: str) -> None:
        """Switch to a theme and wait until its style is there."""
        self.command("apputils:change-theme", {"theme": name})
        light = "true" if name == THEMES[0] else "false"
        self.page.wait_for_function(
            "([name, light]) => document.body.dataset.jpThemeName === name"
            " && document.body.dataset.jpThemeLight === light && !document.getElementById('jupyterlab-splash')",
            arg=[name, light],
        )

    def command(self, identifier: str, arguments: dict[str, object] | None = None) -> None:
        """Execute one of JupyterLab's commands and wait until it is done."""
        self.page.evaluate(
            "async ([id, args]) => { await window.jupyterapp.commands.execute(id, args); }",
            [identifier, arguments or {}],
        )

    def shoot(self, name: str, locator: Any = None) -> None:
        """Take a screenshot of the page, or of a part of it, if the environment names a folder for artefacts."""
        if os.environ.get("AOTLAB_ARTEFACTS"):
            (locator or self.page).screenshot(path=self.artefacts / f"{name}.png")

    def raise_complaints(self) -> None:
        """Fail if the page complained about anything but JupyterLab's own affairs."""
        mine = [text for text in self.complaints if not any(re.search(own, text) for own in OWN_ERRORS)]
        assert not mine, "the page complained:\n" + "\n".join(mine)

    def keep_failure(self, name: str) -> None:
        """Save the screenshot and the console messages of a failed test."""
        stem = re.sub(r"\W+", "-", name).strip("-")
        seen = list(self.complaints)
        if not self.page.is_closed():
            self.page.screenshot(path=self.artefacts / f"failed-{stem}.png")
            seen.append(json.dumps(self.page.evaluate(_ALL_OUTPUTS), indent=1))
        (self.artefacts / f"failed-{stem}.txt").write_text("\n".join(seen), encoding="utf-8")

    # Notebooks

    def open(self, path: str, *, kernel: bool = True, mode: str | None = None) -> None:
        """Open a notebook, with a kernel or without, or go to it if it is open; wait until it can be used."""
        preference = {"name": "python3"} if kernel else {"shouldStart": False, "canStart": False}
        self.page.evaluate(
            """async ([path, kernelPreference, mode]) => {
                const options = {path, factory: 'Notebook', kernelPreference, options: mode ? {mode} : {}};
                await window.jupyterapp.commands.execute('docmanager:open', options);
            }""",
            [path, preference, mode],
        )
        self.page.wait_for_function(f"path => {{ {_PANEL} return panel?.context?.path === path; }}", arg=path)
        self.wait_for_notebook(kernel=kernel)

    def wait_for_notebook(self, *, kernel: bool = True) -> None:
        """Wait until the current notebook is drawn and its kernel, if one is expected, is idle."""
        self.page.wait_for_function(
            f"""kernel => {{
                {_PANEL}
                if (!panel?.context?.isReady || !panel.content?.widgets?.length) return false;
                if (document.querySelector('.jp-Spinner')) return false;
                return !kernel || panel.sessionContext.session?.kernel?.status === 'idle';
            }}""",
            arg=kernel,
        )

    def run_all(self, *, timeout: float = 360) -> None:
        """Run all cells and wait until the last one is done, at most ``timeout`` seconds."""
        self.start_running("notebook:run-all-cells")
        self.wait_until_done(timeout=timeout)

    def run_cell(self, index: int, source: str | None = None, *, timeout: float = 120) -> float:
        """Run one cell, with another source if one is given, and wait until it is done; return the seconds it took."""
        began = time.monotonic()
        self.start_cell(index, source)
        self.wait_until_done(timeout=timeout)
        return time.monotonic() - began

    def start_cell(self, index: int, source: str | None = None) -> None:
        """Begin to run one cell."""
        self.page.evaluate(
            f"""([index, source]) => {{
                {_PANEL}
                panel.content.activeCellIndex = index;
                if (source !== null) panel.content.activeCell.model.sharedModel.setSource(source);
            }}""",
            [index, source],
        )
        self.start_running("notebook:run-cell")

    def start_running(self, command: str) -> None:
        """Begin a command that runs cells; `wait_until_done` waits for its end."""
        self.page.evaluate(
            """id => {
                window.aotlabTestDone = false;
                const done = () => { window.aotlabTestDone = true; };
                window.jupyterapp.commands.execute(id).then(done, done);
            }""",
            command,
        )

    def wait_until_done(self, *, timeout: float = 120) -> None:
        """Wait until the cells that were begun are done and the kernel is idle."""
        self.page.wait_for_function(
            f"""() => {{
                {_PANEL}
                return window.aotlabTestDone && panel.sessionContext.session?.kernel?.status === 'idle'
                    && panel.content.widgets.every(cell => cell.model.executionState !== 'running');
            }}""",
            timeout=timeout * 1000,
        )

    def append(self, source: str) -> int:
        """Add a code cell at the end and return its index."""
        index: int = self.page.evaluate(
            f"""source => {{
                {_PANEL}
                const cells = panel.content.model.sharedModel;
                cells.insertCell(cells.cells.length, {{cell_type: 'code', source}});
                return cells.cells.length - 1;
            }}""",
            source,
        )
        return index

    def execute(self, code: str) -> str:
        """Run code in the notebook's kernel outside of any cell, and return its printed text."""
        text: str = self.page.evaluate(
            f"""async code => {{
                {_PANEL}
                const future = panel.sessionContext.session.kernel.requestExecute({{code, store_history: false}});
                let text = '';
                future.onIOPub = message => {{
                    if (message.header.msg_type === 'stream') text += message.content.text;
                    if (message.header.msg_type === 'error') text += message.content.traceback.join('\\n');
                }};
                await future.done;
                return text;
            }}""",
            code,
        )
        return text

    def shut_down_kernel(self) -> None:
        """Shut the notebook's kernel down and wait until the page knows."""
        self.page.evaluate(f"async () => {{ {_PANEL} await panel.sessionContext.shutdown(); }}")
        self.page.wait_for_function(f"() => {{ {_PANEL} return !panel.sessionContext.session?.kernel; }}")

    def restart_kernel(self) -> None:
        """Restart the notebook's kernel."""
        self.page.evaluate(f"async () => {{ {_PANEL} await panel.sessionContext.restartKernel(); }}")
        self.wait_for_notebook()

    def interrupt(self) -> None:
        """Interrupt the notebook's kernel."""
        self.page.evaluate(f"async () => {{ {_PANEL} await panel.sessionContext.session.kernel.interrupt(); }}")

    def save(self) -> dict[str, Any]:
        """Save the notebook and return the content of its file."""
        path = self.page.evaluate(f"async () => {{ {_PANEL} await panel.context.save(); return panel.context.path; }}")
        saved: dict[str, Any] = json.loads((self.server.root / path).read_text(encoding="utf-8"))
        return saved

    def close(self) -> None:
        """Close the current notebook, changes or not; its kernel lives on."""
        self.page.evaluate(f"() => {{ {_PANEL} panel.dispose(); }}")

    def outputs(self, index: int) -> list[dict[str, Any]]:
        """Return the outputs of one cell as the notebook stores them."""
        found: list[dict[str, Any]] = self.page.evaluate(
            f"index => {{ {_PANEL} return panel.content.widgets[index].model.outputs.toJSON(); }}", index
        )
        return found

    def wait_for_outputs(self, index: int, count: int) -> None:
        """Wait until a cell shows so many outputs; that of the run before goes a moment after the new one has come."""
        self.page.wait_for_function(
            f"""([index, count]) => {{
                {_PANEL}
                const cell = panel.content.widgets[index];
                return cell.node.querySelectorAll('.jp-OutputArea-output').length === count
                    && cell.model.outputs.length === count;
            }}""",
            arg=[index, count],
        )

    # The drawn page

    @property
    def notebook(self) -> Any:
        """The current notebook."""
        return self.page.locator(f"#{self.page.evaluate(f'() => {{ {_PANEL} return panel.id; }}')}")

    def cell(self, index: int) -> Any:
        """Return one cell of the notebook, counted from 0, text cells included."""
        return self.notebook.locator(".jp-Notebook .jp-Cell").nth(index)

    def wait_until(self, condition: str, argument: object = None, *, timeout: float = 60) -> None:
        """Wait until a JavaScript function returns something true."""
        self.page.wait_for_function(condition, arg=argument, timeout=timeout * 1000)

    # Inside

    def _hear(self, kind: str, text: str, location: dict[str, object]) -> None:
        if kind == "error":
            self.complaints.append(f"console: {text} ({location.get('url')}:{location.get('lineNumber')})")

    def _watch(self, request: Any) -> None:
        """Record requests to other machines, because everything must come from the server."""
        address = urlsplit(request.url)
        if address.scheme in ("http", "https", "ws", "wss") and address.netloc != urlsplit(self.server.url).netloc:
            self.complaints.append(f"a request to another machine: {request.url}")

    def _wait_for_lab(self) -> None:
        self.page.wait_for_function("() => window.jupyterapp?.shell && !document.getElementById('jupyterlab-splash')")
        self.page.evaluate("async () => { await window.jupyterapp.restored; }")

    def _wait_for_saved_layout(self) -> None:
        """Wait until the server knows which notebook is open in this workspace."""
        path = self.page.evaluate(f"() => {{ {_PANEL} return panel.context.path; }}")
        self.page.evaluate(
            """async ([workspace, path]) => {
                const workspaces = window.jupyterapp.serviceManager.workspaces;
                for (;;) {
                    const saved = await workspaces.fetch(workspace).catch(() => null);
                    if (saved?.data?.[`notebook:${path}`]) return;
                    await new Promise(resolve => setTimeout(resolve, 100));
                }
            }""",
            [self.workspace, path],
        )


def write_notebook(path: Path, cells: list[str | dict[str, Any]], **metadata: object) -> None:
    """Write a notebook file that nobody signed.

    A cell is its source, or a dict with ``source`` and ``outputs`` (MIME bundles that it displayed).
    """
    notebook = nbformat.v4.new_notebook(metadata=metadata)
    for cell in cells:
        if isinstance(cell, str):
            notebook.cells.append(nbformat.v4.new_code_cell(cell))
        else:
            outputs = [nbformat.v4.new_output("display_data", data=data) for data in cell["outputs"]]
            notebook.cells.append(nbformat.v4.new_code_cell(cell["source"], outputs=outputs, execution_count=1))
    nbformat.write(notebook, path)
