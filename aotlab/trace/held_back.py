"""What a function prints and warns of while it is traced is held back.

Eager prints it, and warns, where the trace is given up; `aotlab.quirks.warned` warns in compiled calls.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple


class Printed:
    """Holds back, in ``with`` blocks, what this thread writes to standard output and error; of the last block alone."""

    def __init__(self) -> None:
        self._held: list[tuple[str, str]] = []

    def __enter__(self) -> None:
        self._held.clear()
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (_Stream(name, getattr(sys, name), self._held) for name in ("stdout", "stderr"))

    def __exit__(self, *error: object) -> None:
        sys.stdout, sys.stderr = self._before

    def release(self) -> None:
        """Write what was held back."""
        held, self._held = self._held, []
        for name, text in held:
            getattr(sys, name).write(text)


class _Stream:
    """Stands for one stream; other threads write through it."""

    def __init__(self, name: str, stream: Any, held: list[tuple[str, str]]) -> None:
        self._name = name
        self._stream = stream
        self._held = held
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            return int(self._stream.write(text))
        self._held.append((self._name, text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)


class Warned(NamedTuple):
    """One warning: its text or object, its place, and the module's globals; ``by_caller`` if it names the caller."""

    message: Warning | str
    category: type[Warning]
    file: str
    line: int
    scope: dict[str, Any]
    by_caller: bool


def is_engine(scope: dict[str, Any]) -> bool:
    """Tell by a frame's globals whether it is one of aotlab's."""
    return str(scope.get("__name__", "")).partition(".")[0] == "aotlab"


@contextmanager
def warnings_noted() -> Iterator[list[Warned]]:
    """Note, for the length of a block and in this thread, what is warned instead of letting it out."""
    noted: list[Warned] = []
    thread = threading.get_ident()

    def note(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if threading.get_ident() != thread:
            others(message, category, filename, lineno, file, line)
        elif "Triggered internally at" not in str(message):  # a kernel's own, which warns again when it runs
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (filename, lineno):
                frame = frame.f_back
            scope = {} if frame is None else frame.f_globals
            noted.append(Warned(message, category, filename, lineno, scope, is_engine(scope)))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        others, warnings.showwarning = warnings.showwarning, note
        yield noted
