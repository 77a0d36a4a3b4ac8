"""Receive the records that torch writes about each compilation: its structured trace.

torch calls ``trace_structured`` with each result of `torch.compile`, and hands it to the logger ``torch.__trace`` if
this logger has a handler. ``TORCH_TRACE`` is torch's own handler. A second handler receives the same records.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_LOGGER = "torch.__trace"


class _Handler(logging.Handler):
    def __init__(self, heard: Callable[[Mapping[str, Any], str], None]) -> None:
        super().__init__()
        self._heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on the metadata and the payload, which torch attaches to the log record."""
        metadata, payload = getattr(record, "metadata", None), getattr(record, "payload", None)
        if isinstance(metadata, dict):
            self._heard(metadata, payload or "")


@contextlib.contextmanager
def structured_trace(heard: Callable[[Mapping[str, Any], str], None]) -> Iterator[None]:
    """Call ``heard`` with the metadata and the payload of each record, for the length of a block."""
    logger, handler = logging.getLogger(_LOGGER), _Handler(heard)
    logger.addHandler(handler)
    # torch's own handler removes itself at the first record if there is no folder. The handler behind it would miss it.
    logger.handlers.insert(0, logger.handlers.pop())
    try:
        yield
    finally:
        logger.removeHandler(handler)


def interned_files() -> dict[int, str]:
    """Return the names of files for which records contain a number, by this number."""
    from torch._logging.structured import INTERN_TABLE

    return {number: name for name, number in INTERN_TABLE.items()}


@contextlib.contextmanager
def compiling_without_caches() -> Iterator[None]:
    """Let `torch.compile` compile graphs again in a block, instead of taking them from the caches of earlier runs.

    Compiled kernels are still taken from the cache.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config

    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        yield
