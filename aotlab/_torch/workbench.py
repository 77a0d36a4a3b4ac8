"""Functions that reports, notebooks, verification and benchmarks need, and the engine does not."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._dtype_abbrs import dtype_abbrs

from aotlab._torch.dynamo_internals import inexact_steps_left_to_python

#: The prefix of Dynamo's names for functions that run the rest of a frame after a graph break.
RESUME_PREFIX = "torch_dynamo_resume_in_"

#: The dtypes by their abbreviations in printed graphs: ``"f32"``.
DTYPES_BY_ABBREVIATION = {short: dtype for dtype, short in dtype_abbrs.items()}


def recurrent_layers_captured() -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo capture LSTM, GRU and RNN for a block. By default it leaves them to eager."""
    from torch._dynamo import config

    return config.patch(allow_rnn=True)  # type: ignore[no-any-return]  # untyped in torch


@contextlib.contextmanager
def dynamo_settings(*, exact: bool, varying: bool) -> Iterator[None]:
    """Set options of Dynamo for a block, so that it captures only code whose captured form gives eager's results.

    With ``exact``, Python runs the ``step`` methods of most optimizers, because their captured form would round
    differently. With ``varying``, a size that differs at a later call becomes dynamic.
    """
    from torch._dynamo import config

    changes = {
        "suppress_errors": True,
        "trace_numpy": False,
        "rewrite_assert_with_torch_assert": False,
        "automatic_dynamic_shapes": varying,
    }
    with config.patch(changes), inexact_steps_left_to_python() if exact else contextlib.nullcontext():
        yield


def unmark_static(tensor: Tensor) -> None:
    """Remove the attribute by which Dynamo marks parameters, buffers and optimizer states as static inputs."""
    tensor.__dict__.pop("_dynamo_static_input_type", None)


def stock_backend(name: str) -> Callable[..., Any]:
    """Return the stock backend of `torch.compile` with this name."""
    from torch._dynamo import lookup_backend

    backend: Callable[..., Any] = lookup_backend(name)
    return backend


def stock_compiled(module: fx.GraphModule, inputs: Sequence[Any], backend: str) -> Callable[..., Any]:
    """Compile a graph of Dynamo with the stock backend named ``backend``, and return the callable.

    ``inputs`` are inputs for the graph's placeholders. The graph gets the metadata by which Dynamo tells its backends
    that parameters keep their addresses. The backend may change the graph.
    """
    module.meta["dynamo_compile_id"] = None
    for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node._dynamo_source = None
        if isinstance(value, torch.nn.Parameter):
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    # If the graph has parameters as attributes, the backend knows without this metadata that their addresses stay.
    if not [*module.parameters(), *module.buffers()]:
        module._param_name_to_source = {}  # type: ignore[assignment]
    compiled: Callable[..., Any] = stock_backend(backend)(module, list(inputs))
    return compiled


def dynamo_errors_suppressed() -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo run code eagerly, for the length of a block, if Dynamo itself raises an error while it captures."""
    from torch._dynamo import config

    return config.patch(suppress_errors=True)  # type: ignore[no-any-return]  # untyped in torch


def dynamo_restart() -> type[Exception]:
    """Return the class of the exceptions by which a backend asks Dynamo to capture the code again."""
    from torch._dynamo.exc import RestartAnalysis

    return RestartAnalysis


@contextlib.contextmanager
def dynamo_compiles(start: Callable[[Any], None], end: Callable[[Any], None]) -> Iterator[None]:
    """Call ``start`` before and ``end`` after Dynamo compiles a frame, for the length of a block."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)


def dynamo_cleanups(scope: dict[str, Any]) -> list[Any]:
    """Return Dynamo's clean-up hooks for the namespace ``scope``.

    Dynamo stores objects in this namespace, such as compiled code. Each hook removes one of them, ``hook.name``, from
    ``hook.scope`` when the object is no longer needed.
    """
    from torch._dynamo.utils import CleanupManager

    return [hook for hooks in list(CleanupManager.instance.values.values()) for hook in hooks if hook.scope is scope]


def dynamo_reasons() -> dict[str, int]:
    """Return Dynamo's counts of graph breaks and unsupported features so far, by reason."""
    from torch._dynamo.utils import counters

    kinds = ("graph_break", "unimplemented")
    return {str(reason): count for kind in kinds for reason, count in counters[kind].items()}


def dynamo_graphs() -> int:
    """Return how many graphs Dynamo has passed to backends so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@functools.cache
def log_handlers() -> tuple[logging.Handler, ...]:
    """Return the handlers that print torch's log. torch sets them up when Dynamo is imported."""
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("torch")]
    return tuple(dict.fromkeys(handler for logger in loggers for handler in logger.handlers))


def eager_draws_by_inductor() -> contextlib.AbstractContextManager[Any]:
    """Make Inductor's kernels draw the same random numbers as eager's, for the length of a block."""
    from torch._inductor import config

    return config.patch(fallback_random=True)  # type: ignore[no-any-return]  # untyped in torch


def cold_caches() -> contextlib.AbstractContextManager[None]:
    """Give Inductor empty caches for a block, in memory and on disk, so that it compiles everything.

    These caches are deleted at the end of the block.
    """
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def wrapper_like(kind: type[Tensor], like: Tensor) -> Any:
    """Make the outer tensor of a wrapper subclass, with the shape, strides and dtype of ``like`` and no memory."""
    return Tensor._make_wrapper_subclass(kind, like.shape, dtype=like.dtype, strides=like.stride())
