"""The command ``aotlab lab``: open JupyterLab on the course.

In a checkout the course is the folder ``notebooks/`` itself. An installed aotlab has the notebooks inside the package,
where nobody should edit them, so they are copied to a folder of the user. If a file in that folder exists and differs,
it is not overwritten, because it may contain the user's work.

JupyterLab runs in a separate process, so that this program does not import Jupyter. The process has its own session,
so that ctrl-C in the terminal only reaches this program, which then ends JupyterLab without asking for confirmation.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from aotlab.cli import doctor
from aotlab.errors import AotlabError, UsageError

#: The notebook that opens first.
FIRST_PAGE = "00_start.ipynb"
#: The default folder for the copies of the notebooks.
FOLDER = Path("aotlab-notebooks")

_PACKAGE = Path(__file__).parents[1]
#: The time, in seconds, that JupyterLab has to end its kernels before it is killed.
_PATIENCE = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The location of the notebooks.

    Attributes
    ----------
    folder
        The folder that contains the notebooks.
    checkout
        The checkout that contains the folder, or None if the notebooks are part of an installed aotlab.
    """

    folder: Path
    checkout: Path | None = None


def run(directory: Path | None, port: int | None, browser: bool, server_arguments: Sequence[str], out: TextIO) -> int:
    """Open JupyterLab on the course and wait until it ends.

    Parameters
    ----------
    directory
        The folder to copy the notebooks to. If None, a checkout's notebooks are opened in place, and an installed
        aotlab's notebooks are copied to `FOLDER`.
    port
        The port to listen on. If None, JupyterLab uses 8888 or the next free port.
    browser
        Whether to open a browser.
    server_arguments
        Additional arguments for JupyterLab.
    out
        The stream for messages about the opened and copied files.

    Returns
    -------
    int
        0 if JupyterLab was shut down, 1 if it is not installed or failed.

    Raises
    ------
    UsageError
        The port is not available, the folder is a file or not writable, or root may not run JupyterLab.
    KeyboardInterrupt
        After ctrl-C, once JupyterLab has ended.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        packages = "jupyterlab ipywidgets anywidget matplotlib"
        print(f"aotlab: JupyterLab is not installed here: {sys.executable} -m pip install {packages}", file=sys.stderr)
        return 1
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in server_arguments:
        raise UsageError(
            "JupyterLab does not run as root without an option that allows it: aotlab lab -- "
            + " ".join(["--allow-root", *server_arguments])
        )
    if port is not None:
        _check_port(port)
    course = find_course()
    folder = course.folder if directory is None and course.checkout is not None else directory or FOLDER
    if folder != course.folder:
        for line in copy(course.folder, folder):
            print(line, file=out)
    finding = doctor.examine("extension", doctor.check_extension)
    if finding.status != "ok":
        print(f"aotlab: {finding.seen}; {finding.advice}", file=sys.stderr)
    print(f"Opening {folder.resolve() / FIRST_PAGE} in JupyterLab; ctrl-C here ends it.", file=out, flush=True)
    environment = dict(os.environ)
    if course.checkout is not None:
        # The kernel runs in the notebooks' folder. From there, it could not import a checkout that is not installed.
        paths = [str(course.checkout), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return 1 if _stay(arguments(folder, port, browser, server_arguments), environment) else 0


def arguments(folder: Path, port: int | None, browser: bool, server_arguments: Sequence[str]) -> list[str]:
    """Return the command that starts JupyterLab on ``folder``."""
    command = [sys.executable, "-m", "jupyterlab"]
    command += [f"--ServerApp.root_dir={folder.resolve()}", f"--LabApp.default_url=/lab/tree/{FIRST_PAGE}"]
    if port is not None:
        # If the requested port is not free, fail; do not use the next free port.
        command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if not browser:
        command.append("--no-browser")
    return [*command, *server_arguments]


def find_course() -> Course:
    """Return the location of the notebooks: the checkout's, or the package's copies.

    Raises
    ------
    AotlabError
        This installation has no notebooks.
    """
    root = _PACKAGE.parent
    if (root / "pyproject.toml").is_file() and (root / "notebooks" / FIRST_PAGE).is_file():
        return Course(folder=root / "notebooks", checkout=root)
    if (_PACKAGE / "course" / FIRST_PAGE).is_file():
        return Course(folder=_PACKAGE / "course")
    raise AotlabError(f"the notebooks are missing from this installation ({_PACKAGE}); install aotlab again")


def copy(course: Path, folder: Path) -> list[str]:
    """Copy the notebooks of ``course`` to ``folder`` and return messages about the copied and kept files.

    A file that exists and differs is not overwritten.

    Raises
    ------
    UsageError
        ``folder`` cannot be created or written to.
    """
    added, changed = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in sorted(course.glob("*.ipynb")):
            target = folder / source.name
            if not target.exists():
                # Write to a temporary file first, so that an interrupted copy is never mistaken for the user's work.
                half = target.with_name(f".{target.name}.part")
                shutil.copyfile(source, half)
                half.rename(target)
                added.append(source.name)
            elif target.read_bytes() != source.read_bytes():
                changed.append(source.name)
    except OSError as error:
        raise UsageError(f"the notebooks cannot be copied to {folder}: {error.strerror or error}") from None
    said = [f"Copied {', '.join(added)} to {folder.resolve()}."] if added else []
    if changed:
        said.append(
            f"Kept {', '.join(changed)} in {folder.resolve()}: changed by you, or from another version of aotlab. "
            "Rename or delete a file to get the course's."
        )
    return said


def _check_port(port: int) -> None:
    """Raise an error if JupyterLab, which listens on every address of localhost, could not listen on ``port``."""
    for family, kind, protocol, _, address in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM):
        with suppress(OSError), socket.socket(family, kind, protocol) as listener:
            # Set the same option as servers, so that an old connection in the TIME_WAIT state does not block the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
            except OSError as error:
                if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                    why = "taken" if error.errno == errno.EADDRINUSE else "not permitted"
                    raise UsageError(
                        f"port {port} is {why}: use another port, or leave out --port to get a free one"
                    ) from None


def _stay(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run JupyterLab until it ends, and return its exit status.

    If a signal ends this process, this process terminates JupyterLab first.
    """
    with _signals_as_exits():
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            return process.wait()
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a running process; kill it after `_PATIENCE` seconds, or if the user presses ctrl-C again."""
    if process.poll() is not None:
        return
    print("aotlab: ending JupyterLab and its kernels", file=sys.stderr)
    process.terminate()
    try:
        process.wait(timeout=_PATIENCE)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Convert the signals of a closed terminal or a service manager to `SystemExit`, so that ``finally`` blocks run."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signals = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # A signal that is ignored (for example, under nohup) stays ignored.
    heeded = [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
