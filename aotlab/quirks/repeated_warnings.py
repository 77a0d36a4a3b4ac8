"""Warnings of a function: the trace notes them, and each compiled call gives them again, subject to Python's filters.

    def f(x):
        warnings.warn("slow path")
        return x * 2

A compiled call does not run the line with the warning, so the run-time function warns instead.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from aotlab.capture.signals import RunEagerly
from aotlab.runtime.draft import Draft
from aotlab.runtime.emitting_quirk import EmittingQuirk, Point
from aotlab.trace.escapes import EscapeGuard, Handler
from aotlab.trace.surroundings import Warned


class RepeatedWarnings(EmittingQuirk):
    """Writes the warnings of the traced function into the run-time function."""

    name = "warnings"

    def __init__(self) -> None:
        self._noted: tuple[Warned, ...] = ()

    def claims(self) -> Mapping[Any, Handler]:
        return {warnings.warn: self._note}

    def _note(self, guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._noted = args
        if would_raise(args):
            raise RunEagerly("warning-turned-into-error", transient=True)

    def emit(self, draft: Draft, at: Point) -> None:
        if self._noted:
            noted = draft.w.constant("noted", self._noted)
            if at == "prologue":
                draft.miss([f"{draft.w.constant('would_raise', would_raise)}({noted})"])
            # The warnings come after the graph has run. If the graph raises, the call runs eagerly, and eager warns.
            else:
                draft.w.add(f"{draft.w.constant('warn_again', warn_again)}({noted})  # as the function does")


def would_raise(noted: Sequence[Warned]) -> bool:
    """Tell whether Python's filters turn one of the warnings into an error."""
    return any(map(_would_raise, noted))


def _would_raise(warned: Warned) -> bool:
    text, name = str(warned.message), str(warned.scope.get("__name__", "<unknown>"))
    for action, message, category, module, line in warnings.filters:
        fits = all(pattern is None or re.match(pattern, text) for pattern, text in ((message, text), (module, name)))
        if fits and issubclass(warned.category, category) and line in (0, warned.line):
            return action == "error"
    return False


def _is_engine(scope: Mapping[str, Any]) -> bool:
    return str(scope.get("__name__", "")).partition(".")[0] == "aotlab"


def warn_again(noted: Sequence[Warned]) -> None:
    """Give all noted warnings again, each with the file and line at which the traced function gave it."""
    for each in noted:
        file, line, scope = each.file, each.line, each.scope
        if _is_engine(scope):  # the `stacklevel` led out of the function: name its present caller
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and (_is_engine(frame.f_globals) or frame.f_code.co_filename.startswith("<aotlab")):
                frame = frame.f_back
            if frame is not None:
                file, line, scope = frame.f_code.co_filename, frame.f_lineno, frame.f_globals
        module, registry = scope.get("__name__"), scope.setdefault("__warningregistry__", {})
        warnings.warn_explicit(each.message, each.category, file, line, module=module, registry=registry)
