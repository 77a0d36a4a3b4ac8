"""The helpers of the engine's tests: they compare programs with eager and read the records of compiled functions."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import aotlab
from aotlab import config, events
from aotlab.cache import CompiledFunction, Entry
from aotlab.errors import RefusedError
from aotlab.frontends import dynamo_frontend as dynamo
from aotlab.ir.metadata import ViewAndMutationMeta
from aotlab.verification import Verification, compare


def compiled(function: Callable[..., Any], **settings: Any) -> Any:
    """Compile for the eager backend, whose results are eager's bit for bit."""
    return aotlab.compile(function, **{"backend": "eager", **settings})


def behind_dynamo(function: Callable[..., Any]) -> Any:
    """Compile behind Dynamo, for the eager backend."""
    return torch.compile(function, backend="aotlab", options={"compiler": "eager"})


def keeping_graphs(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    """Return a backend for `torch.compile` that appends each captured graph to ``graphs`` and runs it eagerly."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return backend


def keeping_functions(functions: list[CompiledFunction]) -> Callable[..., Any]:
    """Return aotlab's backend for `torch.compile`, with eager kernels; it appends each graph's compiled function."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        call = dynamo.backend(graph, inputs, options={"compiler": "eager"})
        functions.append(call.compiled)
        return call

    return backend


def by_min_cut(function: Callable[..., Any]) -> Any:
    """Compile with the partitioner that computes again."""
    return compiled(function, partitioner=aotlab.min_cut_rematerialization_partition)


def behind(callable_: Any) -> CompiledFunction:
    """Return the `CompiledFunction` behind a public function's result."""
    return callable_ if isinstance(callable_, CompiledFunction) else callable_.compiled


def same(
    function: Callable[..., Any],
    *args: Any,
    backward: Any = "all",
    calls: int = 2,
    messages: bool = True,
    eagerly: bool = False,
    entries: int | None = 1,
    make: Callable[[Callable[..., Any]], Any] = compiled,
    kwargs: dict[str, Any] | None = None,
) -> Verification:
    """Assert that the compiled function equals eager in all observables, and that it was compiled.

    Without the second assertion a function that quietly ran eagerly would pass. ``eagerly=True`` expects that eager
    runs it; ``entries`` is the expected number of entries after the calls.
    """
    made: list[CompiledFunction] = []

    def candidate(f: Callable[..., Any]) -> Callable[..., Any]:
        result = make(f)
        made.append(behind(result))
        return result

    result = compare(function, args, kwargs, candidate=candidate, backward=backward, calls=calls, messages=messages)
    assert result.first is None, result.first
    log = made[0].calls
    assert (log.eager if eagerly else log.compiled) == calls, log
    if entries is not None and not eagerly:
        assert len(made[0].entries) == entries, made[0].recompiles
    return result


def alike(use: Callable[[Callable[..., Any]], Any], function: Callable[..., Any]) -> bool:
    """Return whether Dynamo, which runs its graphs as they are, equals eager. If it does not, no backend can."""
    torch.compiler.reset()
    try:
        found = use(torch.compile(function, backend="eager"))
    except Exception:  # noqa: BLE001  # whatever Dynamo raises
        return False
    finally:
        torch.compiler.reset()
    return bool(found == use(function))


def entry_of(callable_: Any) -> Entry:
    """Return the newest entry."""
    return behind(callable_).entries[0]


def record(callable_: Any, stage: str) -> Any:
    """Return a stage's record of the newest entry."""
    return getattr(entry_of(callable_).records, stage)


def metadata(callable_: Any) -> ViewAndMutationMeta:
    """Return the metadata that the trace of the newest entry recorded."""
    return record(callable_, "trace").metadata


def traced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compile a function, call it once, and return the compiled function."""
    result = compiled(function)
    result(*args, **kwargs)
    return result


def targets(module: torch.fx.GraphModule) -> list[str]:
    """List the ops of a graph by name."""
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a leaf that requires grad."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()


def nonleaf(*shape: int, seed: int = 0) -> torch.Tensor:
    """Make a tensor that requires grad and may be mutated."""
    return leaf(*shape, seed=seed) * 1


@contextmanager
def refusing(kind: Any = RefusedError, match: str | None = None) -> Iterator[Any]:
    """Assert that a program is refused, with the fallback to eager switched off."""
    with config.patch(fallback="error"), pytest.raises(kind, match=match) as caught:
        yield caught


@contextmanager
def heard_events() -> Iterator[list[Any]]:
    """Collect the engine's events."""
    heard: list[Any] = []
    with events.listen(heard.append):
        yield heard


def global_torch_state() -> dict[str, Any]:
    """Return all global state that a trace touches, to check that it is restored."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "python dispatcher": torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL),
        "functionalization": torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Functionalize),
        "python dispatcher key": torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher),
        "random state": hash(torch.get_rng_state().numpy().tobytes()),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "garbage collection": gc.isenabled(),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
    }
