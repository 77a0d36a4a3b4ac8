"""What a function prints while it is traced is held back: eager prints it where the trace is given up."""

from __future__ import annotations

import sys
import threading
from typing import Any


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
