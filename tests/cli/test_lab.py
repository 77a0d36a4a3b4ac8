"""``aotlab lab``: which page it opens, which files it copies, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from aotlab import cli
from aotlab.cli import doctor, lab
from aotlab.errors import AotlabError, UsageError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sequence[str], Mapping[str, str]]]:
    """Start nothing: keep the commands and environments instead."""
    calls: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def stay(command: Sequence[str], environment: Mapping[str, str]) -> int:
        calls.append((command, environment))
        return 0

    monkeypatch.setattr(lab, "_stay", stay)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    return calls


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put aotlab into a folder like an installed wheel's, and work in another folder."""
    package = tmp_path / "site-packages" / "aotlab"
    (package / "course").mkdir(parents=True)
    for name in ("00_start.ipynb", "01_more.ipynb"):
        (package / "course" / name).write_text(f"the course's {name}")
    monkeypatch.setattr(lab, "_PACKAGE", package)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return package


def call(*, directory: Path | None = None, port: int | None = None, more: Sequence[str] = ()) -> tuple[int, str]:
    """Run the command without a browser, and return its status and its output."""
    out = io.StringIO()
    status = lab.run(directory=directory, port=port, browser=False, server_arguments=more, out=out)
    return status, out.getvalue()


def test_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option reaches `aotlab.cli.lab.run`, and the arguments after ``--`` are passed to JupyterLab."""
    calls: list[dict[str, object]] = []

    def run(**options: object) -> int:
        calls.append(options)
        return 1

    monkeypatch.setattr(lab, "run", run)
    assert cli.main(["lab"]) == 1
    cli.main(["lab", "there", "--port", "9000", "--no-browser", "--", "--allow-root", "--", "x"])
    cli.main(["lab", "--", "--allow-root"])
    nothing = {"directory": None, "port": None, "browser": True, "server_arguments": [], "out": sys.stdout}
    assert calls == [
        nothing,
        {
            **nothing,
            "directory": Path("there"),
            "port": 9000,
            "browser": False,
            "server_arguments": ["--allow-root", "--", "x"],
        },
        {**nothing, "server_arguments": ["--allow-root"]},
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "0"], "'0' is not a port: pass a number from 1 to 65535"),
        (["--port", "http"], "'http' is not a port"),
        (["--allow-root"], "unrecognized arguments: --allow-root"),
        (["here", "there"], "unrecognized arguments: there"),
    ],
)
def test_wrong_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """JupyterLab's options are accepted only after ``--``, and a port is a number."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["lab", *arguments])
    assert stop.value.code == cli.WRONG_USAGE
    assert message in capsys.readouterr().err


def test_a_checkout_opens_its_own_notebooks(started: list[tuple[list[str], dict[str, str]]]) -> None:
    """In a checkout, JupyterLab opens ``notebooks/`` on its first page, and kernels can import the checkout."""
    status, said = call()
    ((command, environment),) = started
    assert (status, command) == (
        0,
        [
            *(sys.executable, "-m", "jupyterlab"),
            f"--ServerApp.root_dir={ROOT / 'notebooks'}",
            "--LabApp.default_url=/lab/tree/00_start.ipynb",
            "--no-browser",
        ],
    )
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert said == f"Opening {ROOT / 'notebooks' / '00_start.ipynb'} in JupyterLab; ctrl-C here ends it.\n"


def test_a_checkout_copies_to_a_named_folder(started: list[tuple[list[str], dict[str, str]]], tmp_path: Path) -> None:
    """A folder that is named gets a copy, in a checkout too."""
    _, said = call(directory=tmp_path / "mine")
    ((command, _),) = started
    assert f"--ServerApp.root_dir={tmp_path / 'mine'}" in command
    course = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == course
    assert said.splitlines()[0] == f"Copied {', '.join(course)} to {tmp_path / 'mine'}."


def test_a_wheel_copies_its_notebooks(
    started: list[tuple[list[str], dict[str, str]]], wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed aotlab copies its notebooks to ``./aotlab-notebooks``, opens that, and leaves PYTHONPATH alone."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    folder = tmp_path / "work" / "aotlab-notebooks"
    _, said = call()
    ((command, environment),) = started
    assert f"--ServerApp.root_dir={folder}" in command
    assert "PYTHONPATH" not in environment
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        path.name: path.read_text() for path in (wheel / "course").iterdir()
    }
    assert said.splitlines()[0] == f"Copied 00_start.ipynb, 01_more.ipynb to {folder}."


@pytest.mark.usefixtures("started")
def test_changed_files_are_kept(wheel: Path, tmp_path: Path) -> None:
    """A file that the user changed stays; one that is missing is copied; one that is the same is not spoken of."""
    folder = tmp_path / "work" / "aotlab-notebooks"
    call()
    (folder / "00_start.ipynb").write_text("my answers")
    (wheel / "course" / "02_new.ipynb").write_text("the course's 02_new.ipynb")
    _, said = call()
    assert [path.read_text() for path in sorted(folder.iterdir())] == [
        *("my answers", "the course's 01_more.ipynb", "the course's 02_new.ipynb")
    ]
    assert said.splitlines()[:2] == [
        f"Copied 02_new.ipynb to {folder}.",
        f"Kept 00_start.ipynb in {folder}: changed by you, or from another version of aotlab. "
        "Rename or delete a file to get the course's.",
    ]


@pytest.mark.usefixtures("wheel", "started")
def test_a_copy_that_was_cut_short_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that fails midway leaves no notebook that could be mistaken for the user's work."""

    def half(source: Path, target: Path) -> None:
        target.write_text(source.read_text()[:5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", half)
        with pytest.raises(UsageError, match="cannot be copied to aotlab-notebooks: No space left on device"):
            call()
    call()
    assert {path.name: path.read_text() for path in (tmp_path / "work" / "aotlab-notebooks").iterdir()} == {
        name: f"the course's {name}" for name in ("00_start.ipynb", "01_more.ipynb")
    }


@pytest.mark.usefixtures("wheel", "started")
def test_a_file_in_the_way(tmp_path: Path) -> None:
    """A file where the folder should be is an error of one line."""
    (tmp_path / "work" / "aotlab-notebooks").touch()
    with pytest.raises(UsageError, match="the notebooks cannot be copied to aotlab-notebooks: File exists"):
        call()


@pytest.mark.usefixtures("started")
def test_no_notebooks(wheel: Path) -> None:
    """An installation without its notebooks says so."""
    shutil.rmtree(wheel / "course")
    with pytest.raises(AotlabError, match="the notebooks are missing from this installation"):
        call()


def test_a_port_that_is_taken(started: list[tuple[list[str], dict[str, str]]]) -> None:
    """A port in use is an error before anything starts. A free port is used, and no other."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} is taken: use another port, or leave out --port"):
            call(port=port)
    assert started == []
    call(port=port)
    assert {f"--ServerApp.port={port}", "--ServerApp.port_retries=0"} <= set(started[0][0])


def test_root_is_told(started: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``--allow-root``, root gets an error that names the option. With it, JupyterLab starts."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(UsageError, match=r"without an option that allows it: aotlab lab -- --allow-root$"):
        call()
    assert started == []
    call(more=["--allow-root"])
    assert started[0][0][-1] == "--allow-root"


def test_without_jupyterlab(
    started: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where JupyterLab is missing, the answer is the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert (call(), started) == ((1, ""), [])
    assert capsys.readouterr().err == (
        f"aotlab: JupyterLab is not installed here: {sys.executable} -m pip install "
        "jupyterlab ipywidgets anywidget matplotlib\n"
    )


def test_without_the_extension(
    started: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without the extension, JupyterLab still opens. The user is told about the missing extension and the remedy."""
    finding = doctor.Finding(subject="extension", status="note", seen="it is not there", advice="pip install it")
    monkeypatch.setattr(doctor, "check_extension", lambda: finding)
    assert call()[0] == 0
    assert (len(started), capsys.readouterr().err) == (1, "aotlab: it is not there; pip install it\n")


def test_a_failing_jupyterlab(monkeypatch: pytest.MonkeyPatch) -> None:
    """If JupyterLab fails with any status, the command's status is 1."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(lab, "arguments", lambda *_: [sys.executable, "-c", "raise SystemExit(7)"])
    assert call()[0] == cli.FAILED


#: A stand-in for JupyterLab: says that it is there, and ends on SIGTERM or, told to be stubborn, does not.
STAND_IN = """
import pathlib, signal, sys, time
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


class Remember:
    """`subprocess.Popen`, which remembers the process that it started."""

    def __init__(self) -> None:
        self.make = subprocess.Popen
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, *arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        self.processes.append(self.make(*arguments, **options))
        return self.processes[-1]


@contextlib.contextmanager
def once(condition: Callable[[], bool], action: Callable[[], None]) -> Iterator[None]:
    """Run ``action`` in another thread as soon as ``condition`` holds."""

    def watch() -> None:
        if until(condition):
            action()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def until(condition: Callable[[], bool], seconds: float = 120) -> bool:
    """Wait until ``condition`` is true, and return whether it became true."""
    end = time.monotonic() + seconds
    while not (there := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return there


@pytest.mark.parametrize("manner", ["polite", "stubborn"])
def test_an_exit_takes_jupyterlab_along(manner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the command, SIGTERM here, ends JupyterLab; one that does not listen is killed."""
    monkeypatch.setattr(lab, "_PATIENCE", 0.5)
    monkeypatch.setattr(subprocess, "Popen", made := Remember())
    ready = tmp_path / "ready"
    handler = signal.getsignal(signal.SIGTERM)

    def leave() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with once(ready.exists, leave), pytest.raises(SystemExit) as stop:
        lab._stay([sys.executable, "-c", STAND_IN, str(ready), manner], dict(os.environ))
    (process,) = made.processes
    expected = signal.SIGTERM if manner == "polite" else signal.SIGKILL
    assert (stop.value.code, process.returncode) == (128 + signal.SIGTERM, -expected)
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.skipif(importlib.util.find_spec("jupyterlab") is None, reason="needs JupyterLab")
def test_jupyterlab_opens_and_ends(tmp_path: Path) -> None:
    """A real JupyterLab shows the first page, on this machine's own addresses; ctrl-C ends it and its kernel, 130."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folders = {f"JUPYTER_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    environment = {**os.environ, **folders, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path / "ipython")}
    command = [sys.executable, "-m", "aotlab", "lab", str(tmp_path / "mine"), "--no-browser", "--port", str(port)]
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--", "--allow-root", "--IdentityProvider.token=secret"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=tmp_path,
            start_new_session=True,
        )
    try:

        def ask(path: str, method: str = "GET") -> tuple[int, bytes]:
            connection = http.client.HTTPConnection("localhost", port, timeout=20)
            try:
                connection.request(method, path, headers={"Authorization": "token secret"})
                answer = connection.getresponse()
                return answer.status, answer.read()
            except OSError:
                return 0, b""
            finally:
                connection.close()

        assert until(lambda: process.poll() is not None or ask("/api/status")[0] == 200)
        status, body = ask("/api/contents/00_start.ipynb?content=0")
        assert (status, json.loads(body)["type"]) == (200, "notebook"), log.read_text()
        assert ask("/lab/tree/00_start.ipynb")[0] == 200
        server = json.loads(next((tmp_path / "RUNTIME").glob("jpserver-*.json")).read_text())
        assert server["hostname"] in {"localhost", "127.0.0.1"}
        status, body = ask("/api/kernels", "POST")
        assert status == 201, log.read_text()
        connection = f"kernel-{json.loads(body)['id']}*"
        assert len(list((tmp_path / "RUNTIME").glob(connection))) == 1
        # As a terminal does it: to every process of the foreground group. JupyterLab must not be among them, since it
        # would ask whether it should end.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == cli.INTERRUPTED
    finally:
        process.kill()
    said = log.read_text()
    assert said.endswith("aotlab: interrupted\n"), said
    assert "ServerApp] interrupted" not in said
    # JupyterLab removes a kernel's connection file when it has shut the kernel down.
    assert list((tmp_path / "RUNTIME").glob(connection)) == []
    assert ask("/api/status") == (0, b"")
    with contextlib.suppress(ProcessLookupError):
        os.kill(server["pid"], 0)
        pytest.fail(f"JupyterLab still runs\n{said}")
