"""What Dynamo would print into a cell while it gives up on a piece of code goes into the report instead."""

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

#: Warnings from files with these parts are the compilers', not the user's.
_MACHINERY = (
    *(f"/torch/{name}/" for name in ("_dynamo", "_functorch", "_inductor", "fx")),
    str(Path(__file__).resolve().parents[1]),
)


#: How Dynamo tells what an op raised when it was run on fake tensors.
_RAISED = re.compile(r"Explanation: .*\bgot (\w+)\((['\"])(.*?)\2\)")
#: How it tells that it compiles a function no more.
_LIMIT = re.compile(r"hit config\.(\w*recompile_limit) \((\d+)\)(?:\s+function: '(.+?)')?")


class _Collect(logging.Filter):
    def __init__(self, reasons: dict[str, None], limited: Callable[[str, str, int], None]) -> None:
        super().__init__()
        self._reasons = reasons
        self._limited = limited

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the gist of a warning, and let it go no further."""
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
    """Collect what Dynamo logs and warns of for the length of a block; with ``TORCH_LOGS`` set all is printed.

    Parameters
    ----------
    reasons
        Gets what the log says of the code at hand.
    compiling
        Tells whether Dynamo is compiling at this moment: whatever is warned of then, eager does not warn of, or will.
    limited
        Hears of a function that Dynamo compiles no more: its name, that of the limit, and the limit.
    """
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    collect = _Collect(reasons, limited)
    handlers = internals.log_handlers()
    shown: Any = warnings.showwarning

    def show(message: Any, category: Any, filename: str, *rest: Any, **named: Any) -> None:
        if not compiling() and not any(part in filename for part in _MACHINERY):
            shown(message, category, filename, *rest, **named)

    for handler in handlers:
        handler.addFilter(collect)
    # Not `warnings.catch_warnings`: it would make Python forget which warnings it has shown.
    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = shown
        for handler in handlers:
            handler.removeFilter(collect)


def _gist(text: str) -> str:
    """Return the line of a log message that names the error, empty if it only repeats what counters tell."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    raised = _RAISED.search(text)
    if raised is not None:  # Dynamo says that an op raised; what a user can use is what the op said
        return f"{raised[1]}: {raised[3]}"
    named = [line for line in lines if line.startswith(("torch._dynamo.exc.", "RuntimeError", "NotImplementedError"))]
    said = named[-1].removeprefix("torch._dynamo.exc.") if named else ""
    return said.replace("InternalTorchDynamoError:", "an error inside Dynamo:")
