"""Collect for the report the messages that Dynamo would print below a cell when it cannot capture the cell's code."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aotlab import _torch as internals

#: Warnings from files whose path contains one of these belong to the compilers, not to the user.
_MACHINERY = (
    *(f"/torch/{name}/" for name in ("_dynamo", "_functorch", "_inductor", "fx")),
    str(Path(__file__).resolve().parents[1]),
)


#: Matches Dynamo's message about an error that an op raised on fake tensors.
_RAISED = re.compile(r"Explanation: .*\bgot (\w+)\((['\"])(.*?)\2\)")
#: Matches Dynamo's message that it no longer compiles a function, because a recompile limit was reached.
_LIMIT = re.compile(r"hit config\.(\w*recompile_limit) \((\d+)\)(?:\s+function: '(.+?)')?")


class _Collect(logging.Filter):
    def __init__(self, reasons: dict[str, None], limited: Callable[[str, str, int], None]) -> None:
        super().__init__()
        self._reasons = reasons
        self._limited = limited

    def filter(self, record: logging.LogRecord) -> bool:
        """Record the main line of a warning or error in the log, and drop the message: return False.

        Other messages are printed.
        """
        if record.levelno < logging.WARNING or record.levelno > logging.ERROR:
            return True
        text = record.getMessage()
        limit = _LIMIT.search(text)
        if limit is not None:
            self._limited(limit[3] or "", limit[1], int(limit[2]))
        gist = "" if limit is not None else _gist(text)
        if gist:
            self._reasons[gist] = None
        return False


@contextmanager
def quiet_dynamo(
    reasons: dict[str, None], compiling: Callable[[], bool], limited: Callable[[str, str, int], None]
) -> Iterator[None]:
    """Collect Dynamo's log messages and warnings during a block. If ``TORCH_LOGS`` is set, everything is printed.

    Parameters
    ----------
    reasons
        A dict whose keys are sentences, in order. Each message in the log that says why Dynamo did not capture code in
        the block adds a sentence.
    compiling
        A function that returns whether Dynamo is compiling now. Warnings during a compilation are dropped, because
        eager does not give them, or gives them when the code runs.
    limited
        A function that is called if Dynamo stops compiling a function because of a recompile limit. Its arguments are
        the name of the function, and the name and the value of the limit.
    """
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    collect = _Collect(reasons, limited)
    handlers = internals.log_handlers()
    shown: Any = warnings.showwarning

    def show(message: Any, category: Any, filename: str, *arguments: Any, **named: Any) -> None:
        if not compiling() and not any(part in filename for part in _MACHINERY):
            shown(message, category, filename, *arguments, **named)

    for handler in handlers:
        handler.addFilter(collect)
    # `warnings.catch_warnings` would make Python forget which warnings it has shown already.
    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = shown
        for handler in handlers:
            handler.removeFilter(collect)


def _gist(text: str) -> str:
    """Return the line of a log message that names an error, or "" if there is no such line.

    A message without an error only gives reasons that Dynamo's counters have, too (see `dynamo_reasons`).
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    raised = _RAISED.search(text)
    if raised is not None:  # the op's own message helps more than Dynamo's
        return f"{raised[1]}: {raised[3]}"
    named = [line for line in lines if line.startswith(("torch._dynamo.exc.", "RuntimeError", "NotImplementedError"))]
    said = named[-1].removeprefix("torch._dynamo.exc.") if named else ""
    return said.replace("InternalTorchDynamoError:", "an error inside Dynamo:")
