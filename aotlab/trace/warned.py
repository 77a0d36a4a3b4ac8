"""Warnings that a traced function gives: noted, and given again at each call.

    def f(x):
        warnings.warn("slow path")
        return x * 2

Eager warns at each call (and Python's filters decide what becomes of it); the line does not run in a compiled call. So
what was warned, and where, is noted during the trace, and the run-time function warns in the function's stead.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Sequence
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


def _is_engine(scope: dict[str, Any]) -> bool:
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
                by_caller=_is_engine(scope),
            )
        )


def would_raise(noted: Sequence[Warned]) -> bool:
    """Tell whether Python's filters turn one of some warnings into an error."""
    return any(_action(each) == "error" for each in noted)


def _action(warned: Warned) -> str:
    text = str(warned.message)
    module = str(warned.scope.get("__name__", "<unknown>"))
    for action, pattern, category, where, line in warnings.filters:
        if (
            (pattern is None or _matches(pattern, text))
            and issubclass(warned.category, category)
            and (where is None or _matches(where, module))
            and line in (0, warned.line)
        ):
            return str(action)
    return str(warnings.defaultaction)  # type: ignore[attr-defined]  # not in the stubs


def _matches(pattern: Any, text: str) -> bool:
    return bool(text.startswith(pattern) if isinstance(pattern, str) else pattern.match(text))


def warn_again(noted: Sequence[Warned]) -> None:
    """Warn of all of them, as if from their own lines."""
    for each in noted:
        file, line, scope = each.file, each.line, each.scope
        if each.by_caller:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and (_is_engine(frame.f_globals) or frame.f_code.co_filename.startswith("<aotlab")):
                frame = frame.f_back
            if frame is not None:
                file, line, scope = frame.f_code.co_filename, frame.f_lineno, frame.f_globals
        warnings.warn_explicit(
            each.message,
            each.category,
            file,
            line,
            module=scope.get("__name__"),
            registry=scope.setdefault("__warningregistry__", {}),
        )
