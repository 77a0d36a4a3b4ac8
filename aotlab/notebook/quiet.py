"""What Dynamo would print into a cell while it gives up on a piece of code goes into the report instead."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from aotlab import torch_internals as internals


class _Collect(logging.Filter):
    def __init__(self, reasons: dict[str, None]) -> None:
        super().__init__()
        self._reasons = reasons

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the gist of a warning, and let it go no further."""
        if record.levelno < logging.WARNING:
            return True
        gist = _gist(record.getMessage())
        if gist:
            self._reasons[gist] = None
        return False


@contextmanager
def quiet_dynamo(reasons: dict[str, None]) -> Iterator[None]:
    """Collect Dynamo's warnings in ``reasons`` for the length of a block; with ``TORCH_LOGS`` set they are printed."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    collect = _Collect(reasons)
    loggers = internals.dynamo_loggers()
    for logger in loggers:
        logger.addFilter(collect)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(collect)


def _gist(text: str) -> str:
    """Return the line of a log message that names the error, empty if it only repeats what counters tell."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    if "recompile_limit" in lines[0]:
        return "Dynamo compiled it again too often (torch._dynamo.config.recompile_limit)"
    named = [line for line in lines if line.startswith(("torch._dynamo.exc.", "RuntimeError", "NotImplementedError"))]
    return named[-1].removeprefix("torch._dynamo.exc.") if named else ""
