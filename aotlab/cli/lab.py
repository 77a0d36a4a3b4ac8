"""``aotlab lab``: JupyterLab, opened on the course.

In a checkout the course is the folder ``notebooks/`` itself. An installed aotlab carries the notebooks inside of the
package, where nobody should edit them: they are copied to a folder of the user's. A file that is there already and
differs stays as it is, since it may hold the user's work.

JupyterLab runs as a process of its own, so that nothing of Jupyter is imported here, and in a session of its own, so
that ctrl-C in the terminal reaches only this program, which then ends JupyterLab without a question.
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

#: The page that opens first.
FIRST_PAGE = "00_start.ipynb"
#: Where the notebooks are copied to if no folder is named.
FOLDER = Path("aotlab-notebooks")

_PACKAGE = Path(__file__).parents[1]
#: How long JupyterLab may take to end its kernels before it is killed, in seconds.
_PATIENCE = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Where the notebooks are.

    Attributes
    ----------
    folder
        The folder that holds them.
    checkout
        The checkout that the folder belongs to; None if the notebooks came with an installed aotlab.
    """

    folder: Path
    checkout: Path | None = None


def run(directory: Path | None, port: int | None, browser: bool, more: Sequence[str], out: TextIO) -> int:
    """Open JupyterLab on the course and stay until it ends.

    Parameters
    ----------
    directory
        Where to copy the notebooks. Without it a checkout's own are opened, and an installed aotlab's are copied to
        `FOLDER`.
    port
        The port to listen on. Without it, JupyterLab takes 8888 or the next one that is free.
    browser
        Open a browser.
    more
        Further arguments for JupyterLab.
    out
        Where to say what is opened, and what was copied.

    Returns
    -------
    int
        0 if JupyterLab was shut down, 1 if it is missing or failed.

    Raises
    ------
    UsageError
        The port is taken, the folder is a file or cannot be written to, or root may not run JupyterLab.
    KeyboardInterrupt
        After ctrl-C, when JupyterLab has ended.
    """
    if importlib.util.find_spec("jupyterlab") is None:
        packages = "jupyterlab ipywidgets anywidget matplotlib"
        print(f"aotlab: JupyterLab is not installed here: {sys.executable} -m pip install {packages}", file=sys.stderr)
        return 1
    if hasattr(os, "geteuid") and os.geteuid() == 0 and "--allow-root" not in more:
        raise UsageError(
            "JupyterLab does not run as root unless it is told to: aotlab lab -- " + " ".join(["--allow-root", *more])
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
        # The kernel's folder is the notebooks', from which a checkout that nobody installed could not be imported.
        paths = [str(course.checkout), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return 1 if _stay(arguments(folder, port, browser, more), environment) else 0


def arguments(folder: Path, port: int | None, browser: bool, more: Sequence[str]) -> list[str]:
    """Make the command that starts JupyterLab on ``folder``."""
    made = [sys.executable, "-m", "jupyterlab"]
    made += [f"--ServerApp.root_dir={folder.resolve()}", f"--LabApp.default_url=/lab/tree/{FIRST_PAGE}"]
    if port is not None:
        # A port that was asked for is that port or an error, not the next free one.
        made += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if not browser:
        made.append("--no-browser")
    return [*made, *more]


def find_course() -> Course:
    """Find the notebooks: the checkout's, or those that the package carries.

    Raises
    ------
    AotlabError
        This aotlab has no notebooks.
    """
    root = _PACKAGE.parent
    if (root / "pyproject.toml").is_file() and (root / "notebooks" / FIRST_PAGE).is_file():
        return Course(folder=root / "notebooks", checkout=root)
    if (_PACKAGE / "course" / FIRST_PAGE).is_file():
        return Course(folder=_PACKAGE / "course")
    raise AotlabError(f"the notebooks are missing from this installation ({_PACKAGE}); install aotlab again")


def copy(course: Path, folder: Path) -> list[str]:
    """Copy the notebooks of ``course`` to ``folder`` and say in sentences what was done.

    A file that is there and differs is kept.

    Raises
    ------
    UsageError
        ``folder`` cannot be made or written to.
    """
    added, kept = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source in sorted(course.glob("*.ipynb")):
            target = folder / source.name
            if not target.exists():
                # By way of a second file, so that a copy that was cut short is never taken for the user's work.
                half = target.with_name(f".{target.name}.part")
                shutil.copyfile(source, half)
                half.rename(target)
                added.append(source.name)
            elif target.read_bytes() != source.read_bytes():
                kept.append(source.name)
    except OSError as error:
        raise UsageError(f"the notebooks cannot be copied to {folder}: {error.strerror or error}") from None
    said = [f"Copied {', '.join(added)} to {folder.resolve()}."] if added else []
    if kept:
        said.append(
            f"Kept {', '.join(kept)} in {folder.resolve()}: changed by you, or from another version of aotlab. "
            "Rename or delete a file to get the course's."
        )
    return said


def _check_port(port: int) -> None:
    """Raise if JupyterLab, which listens on every address that localhost has, could not listen on ``port``."""
    for family, kind, protocol, _, address in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM):
        with suppress(OSError), socket.socket(family, kind, protocol) as listener:
            # As servers do: an old connection that lingers does not make a port taken.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
            except OSError as error:
                if error.errno in {errno.EADDRINUSE, errno.EACCES}:
                    why = "taken" if error.errno == errno.EADDRINUSE else "not yours to listen on"
                    raise UsageError(
                        f"port {port} is {why}: name another one, or leave --port out to get one that is free"
                    ) from None


def _stay(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run JupyterLab until it ends, or end it when this process is told to end; return its exit status."""
    with _signals_as_exits():
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            return process.wait()
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end if it has not, and kill it if it takes long or the user is impatient."""
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
    """Turn the signals that a closed terminal or a service manager sends into exits, which run ``finally``."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    known = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # What is ignored (by nohup, say) stays ignored.
    heeded = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, leave) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
