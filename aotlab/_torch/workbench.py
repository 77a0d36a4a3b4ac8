"""What reports, notebooks, verification and benchmarks need of torch, and the engine does not."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from aotlab._torch.replaced import replaced

#: How Dynamo names the function that holds the rest of a frame after a graph break.
RESUME_PREFIX = "torch_dynamo_resume_in_"


def recurrent_layers_captured() -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo capture LSTM, GRU and RNN, which it leaves to eager by itself."""
    from torch._dynamo import config

    return config.patch(allow_rnn=True)  # type: ignore[no-any-return]  # untyped in torch


@contextlib.contextmanager
def dynamo_settings(*, exact: bool, varying: bool) -> Iterator[None]:
    """Let Dynamo capture what it computes as eager does; ``exact``: less of optimizers, ``varying``: for all sizes."""
    from torch._dynamo import config

    changes = {
        "suppress_errors": True,
        "trace_numpy": False,
        "rewrite_assert_with_torch_assert": False,
        "automatic_dynamic_shapes": varying,
    }
    with config.patch(changes), _eager_optimizers() if exact else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _eager_optimizers() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, replacement in _optimizer_modules():
            stack.enter_context(replaced(module, "_get_value", replacement))
        yield


def unmark_static(tensor: Tensor) -> None:
    """Take away the mark that Dynamo leaves on parameters, buffers and what optimizers keep."""
    tensor.__dict__.pop("_dynamo_static_input_type", None)


def stock_compiled(module: fx.GraphModule, inputs: Sequence[Any], backend: str) -> Callable[..., Any]:
    """Compile a graph like Dynamo's by a backend of torch's, which changes it and is told what keeps its address."""
    from torch._dynamo import lookup_backend

    module.meta["dynamo_compile_id"] = None
    for node, value in zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node._dynamo_source = None
        if isinstance(value, torch.nn.Parameter):
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    if not [*module.parameters(), *module.buffers()]:  # else those are taken to keep their addresses, without marks
        module._param_name_to_source = {}  # type: ignore[assignment]
    return lookup_backend(backend)(module, list(inputs))


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
    """Return the hooks that will take away what Dynamo put into ``scope``; each has a ``scope`` and a ``name``."""
    from torch._dynamo.utils import CleanupManager

    return [hook for hooks in list(CleanupManager.instance.values.values()) for hook in hooks if hook.scope is scope]


def dynamo_reasons() -> dict[str, int]:
    """Return what Dynamo has counted so far of the reasons for which it did not go on capturing."""
    from torch._dynamo.utils import counters

    kinds = ("graph_break", "unimplemented")
    return {str(reason): count for kind in kinds for reason, count in counters[kind].items()}


def dynamo_graphs() -> int:
    """Return how many graphs Dynamo has handed to backends so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@functools.cache
def log_handlers() -> tuple[logging.Handler, ...]:
    """Return the handlers that print what torch logs; torch sets them up when Dynamo is imported."""
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("torch")]
    return tuple(dict.fromkeys(handler for logger in loggers for handler in logger.handlers))


def eager_draws_by_inductor() -> contextlib.AbstractContextManager[Any]:
    """Let Inductor draw random numbers as eager does, for the length of a block."""
    from torch._inductor import config

    return config.patch(fallback_random=True)  # type: ignore[no-any-return]  # untyped in torch


def cold_caches() -> contextlib.AbstractContextManager[None]:
    """Let Inductor find nothing that it compiled before, in memory or on disk, and keep nothing of what it compiles."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


@functools.cache
def _optimizer_modules() -> tuple[tuple[Any, Any], ...]:
    """Return the modules whose optimizers ask a step counter for its number, each with a form that Dynamo leaves."""
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.optim.")]
    return tuple((m, torch.compiler.disable(m._get_value)) for m in modules if hasattr(m, "_get_value"))


def wrapper_like(kind: type[Tensor], like: Tensor) -> Any:
    """Make the outside of a subclass that wraps tensors: the shape, strides and dtype of one, and no memory."""
    return Tensor._make_wrapper_subclass(kind, like.shape, dtype=like.dtype, strides=like.stride())
