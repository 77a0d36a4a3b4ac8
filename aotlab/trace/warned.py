"""What a function warns of while it is traced is held back: eager, or the quirk `aotlab.quirks.warned`, gives it."""

from __future__ import annotations

import sys
import threading
import warnings
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned:
    """One warning: its text or object, its place, and the module's globals; ``by_caller`` if it names the caller."""

    message: Warning | str
    category: type[Warning]
    file: str
    line: int
    scope: dict[str, Any]
    by_caller: bool


def _frame_of(file: str, line: int) -> FrameType | None:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (frame.f_code.co_filename != file or frame.f_lineno != line):
        frame = frame.f_back
    return frame


def is_engine(scope: dict[str, Any]) -> bool:
    """Tell by a frame's globals whether it is one of aotlab's."""
    return str(scope.get("__name__", "")).partition(".")[0] == "aotlab"


class WarningTape:
    """Notes, for the length of a block and in this thread, what is warned instead of letting it out."""

    def __init__(self) -> None:
        self.noted: list[Warned] = []
        self._catch = warnings.catch_warnings()
        self._thread = threading.get_ident()

    def __enter__(self) -> WarningTape:
        """Start."""
        self._catch.__enter__()
        self._others = warnings.showwarning
        warnings.simplefilter("always")
        warnings.showwarning = self._note
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let warnings out again."""
        self._catch.__exit__(kind, error, trace)

    def _note(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        if threading.get_ident() != self._thread:
            self._others(message, category, filename, lineno, file, line)
            return
        if "Triggered internally at" in str(message):
            return  # a kernel's own, which warns again when it runs
        frame = _frame_of(filename, lineno)
        scope = frame.f_globals if frame is not None else {}
        self.noted.append(
            Warned(
                message=message,
                category=category,
                file=filename,
                line=lineno,
                scope=scope,
                by_caller=is_engine(scope),
            )
        )
