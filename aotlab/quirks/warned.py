"""Warnings that a function gives: noted while it is traced, and given again at each call, for Python's filters.

    def f(x):
        warnings.warn("slow path")
        return x * 2

The line does not run in a compiled call, so the run-time function warns in its stead.
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
from aotlab.trace.escapes import EscapeGuard
from aotlab.trace.quirk import Handler, Point, Quirk
from aotlab.trace.surroundings import Warned


class Warnings(Quirk):
    """Lets the run-time function give the warnings of the traced one."""

    name = "warnings"

    def __init__(self) -> None:
        self._noted: tuple[Warned, ...] = ()

    def claims(self) -> Mapping[Any, Handler]:
        return {warnings.warn: self._note}

    def _note(self, guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._noted = args
        if would_raise(args):
            raise RunEagerly(
                "a warning of the function is turned into an error", passing=True, suggestion="mend what it warns of"
            )

    def emit(self, draft: Draft, at: Point) -> None:
        if self._noted:
            noted = draft.w.constant("noted", self._noted)
            if at == "prologue":
                draft.miss([f"{draft.w.constant('would_raise', would_raise)}({noted})"])
            else:  # not before the graph ran: where that raises, eager warns
                draft.w.add(f"{draft.w.constant('warn_again', warn_again)}({noted})  # as the function does")


def would_raise(noted: Sequence[Warned]) -> bool:
    """Tell whether Python's filters turn one of some warnings into an error."""
    return any(map(_would_raise, noted))


def _would_raise(warned: Warned) -> bool:
    text, name = str(warned.message), str(warned.scope.get("__name__", "<unknown>"))
    for action, message, category, module, line in warnings.filters:
        fits = all(pattern is None or re.match(pattern, given) for pattern, given in ((message, text), (module, name)))
        if fits and issubclass(warned.category, category) and line in (0, warned.line):
            return action == "error"
    return False


def _is_engine(scope: Mapping[str, Any]) -> bool:
    return str(scope.get("__name__", "")).partition(".")[0] == "aotlab"


def warn_again(noted: Sequence[Warned]) -> None:
    """Warn of all of them, as if from their own lines."""
    for each in noted:
        file, line, scope = each.file, each.line, each.scope
        if _is_engine(scope):  # the warning names whoever called the function
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and (_is_engine(frame.f_globals) or frame.f_code.co_filename.startswith("<aotlab")):
                frame = frame.f_back
            if frame is not None:
                file, line, scope = frame.f_code.co_filename, frame.f_lineno, frame.f_globals
        module, registry = scope.get("__name__"), scope.setdefault("__warningregistry__", {})
        warnings.warn_explicit(each.message, each.category, file, line, module=module, registry=registry)
