"""A JupyterLab server of the tests' own: its folders in a temporary place, gone for certain when it is done with."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat.sign import NotebookNotary

CHECKOUT = Path(__file__).parents[2]
BUILT = CHECKOUT / "extension" / "dist" / "labextension"
#: Every process that a server starts inherits this variable with the server's own value: that is how they are found.
MARK = "AOTLAB_BROWSER_SERVER"
#: Settings that switch off the news and the notices of updates.
SETTINGS = {"@jupyterlab/apputils-extension": {"notification": {"fetchNews": "false", "checkForUpdates": False}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running JupyterLab.

    Attributes
    ----------
    url
        Its address, without a slash at the end.
    token
        The token that the server requires.
    data
        The server's data folder: signatures of trusted notebooks, and extensions.
    root
        The folder whose notebooks it shows.
    log
        The output of the server and its kernels.
    extension
        Whether it has aotlab's extension.
    """

    url: str
    token: str
    data: Path
    root: Path
    log: Path
    extension: bool

    def ask(self, method: str, path: str, body: object = None) -> object:
        """Call the server's REST interface and return its answer."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"token {self.token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/api/{path}", data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def trust(self, name: str) -> None:
        """Sign a notebook, as ``jupyter trust`` does."""
        NotebookNotary(data_dir=str(self.data)).sign(nbformat.read(self.root / name, as_version=4))

    def stop_kernels(self) -> None:
        """Shut down every session, and the kernels with them."""
        sessions = self.ask("GET", "sessions")
        assert isinstance(sessions, list)
        for session in sessions:
            with suppress(urllib.error.HTTPError):  # it may have ended since
                self.ask("DELETE", f"sessions/{session['id']}")


@contextmanager
def running(folder: Path, log: Path) -> Iterator[Server]:
    """Start JupyterLab with all of its folders inside of ``folder``, and stop it and its kernels afterwards."""
    mark = secrets.token_hex(16)
    environment, extension = _environment(folder, mark)
    (folder / "root").mkdir()
    try:
        # Between the choice of a free port and its use somebody else may take it; then another one is tried.
        for _ in range(3):
            process, server = _start(environment, folder, log, extension)
            if _answers(process, server):
                break
        else:
            raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")
        yield server
        # A server that has obeyed may still hang in its own extensions' ends; it is not waited for any longer.
        with suppress(OSError, subprocess.TimeoutExpired):
            server.stop_kernels()
            server.ask("POST", "shutdown")
            process.wait(5)
    finally:
        _kill_marked(mark)


def extension_is_installed(environment: dict[str, str]) -> bool:
    """Whether JupyterLab finds aotlab's extension, enabled and in order."""
    found = subprocess.run(
        [sys.executable, "-m", "jupyter", "labextension", "list"], env=environment, capture_output=True, text=True
    )
    lines = (found.stdout + found.stderr).splitlines()
    return any(line.split()[:1] == ["aotlab"] and "enabled" in line and "OK" in line for line in lines)


def _environment(folder: Path, mark: str) -> tuple[dict[str, str], bool]:
    """Make the server's folders, name them in its environment, and say whether it will find the extension."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "IPYTHON"))}
    for name in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR"):
        environment[f"JUPYTER_{name}"] = str(folder / name.lower())
    for name in ("SETTINGS_DIR", "WORKSPACES_DIR"):
        environment[f"JUPYTERLAB_{name}"] = str(folder / name.lower())
    for plugin, groups in SETTINGS.items():
        for group, values in groups.items():
            path = folder / "settings_dir" / plugin / f"{group}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values), encoding="utf-8")
    environment |= {
        "IPYTHONDIR": str(folder / "ipython"),
        "HOME": str(folder),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        # A checkout that is not installed can be tested as well.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")])),
        MARK: mark,
    }
    own = os.environ.get("AOTLAB_LABEXTENSION") == "checkout"
    found = not own and extension_is_installed(environment)
    if not found and BUILT.is_dir():
        # Use the checkout's build: no extension is installed, or the environment asks for this build.
        (folder / "lent" / "labextensions").mkdir(parents=True)
        (folder / "lent" / "labextensions" / "aotlab").symlink_to(BUILT)
        environment["JUPYTER_PATH"] = str(folder / "lent")
        found = extension_is_installed(environment)
    return environment, found


def _start(
    environment: dict[str, str], folder: Path, log: Path, extension: bool
) -> tuple[subprocess.Popen[bytes], Server]:
    with socket.socket() as chooser:
        chooser.bind(("127.0.0.1", 0))
        port = chooser.getsockname()[1]
    token, root = secrets.token_hex(16), folder / "root"
    command = [
        *(sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ServerApp.ip=127.0.0.1"),
        *(f"--port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"),
        *(f"--ServerApp.root_dir={root}", "--LabApp.expose_app_in_browser=True"),
    ]
    with log.open("ab") as sink:
        # A separate session: an interrupt of the tests does not reach the server, which is stopped in order.
        process = subprocess.Popen(
            command, env=environment, cwd=root, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink,
            start_new_session=True,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    server = Server(url=url, token=token, data=folder / "data_dir", root=root, log=log, extension=extension)
    return process, server


def _answers(process: subprocess.Popen[bytes], server: Server) -> bool:
    """Wait until the server answers, at most a minute; return whether it does."""
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            server.ask("GET", "status")
            return True
        time.sleep(0.1)
    return False


def _kill_marked(mark: str) -> None:
    """Kill the remaining processes of a server: itself if it did not stop, and kernels that are still running."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # processes end while we look
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
