"""The public functions of the engine.

Most users call `compile`. The other functions have the names and signatures of upstream's functions, so that code that
was written for upstream runs after the import is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import fx, nn

from aotlab._torch import OpOverload, is_sharded
from aotlab.backends import CallableBackend, InductorBackend, boxed, resolve
from aotlab.backends.base import Backend, Compiler
from aotlab.backends.compile_stage import get_aot_compilation_context
from aotlab.cache import CompiledFunction
from aotlab.capture.nesting import is_container
from aotlab.errors import UsageError
from aotlab.frontends.compiled_module import AotModule, InsideParallel
from aotlab.frontends.direct import FunctionTarget, ModuleTarget
from aotlab.frontends.dynamo_frontend import compile_by_dynamo
from aotlab.partition.default import default_partition
from aotlab.partition.partition_stage import Partitioner
from aotlab.subclasses import Options, function_for

__all__ = [
    "AotModule", "aot_function", "aot_module", "aot_module_simplified", "compile", "compiled_function",
    "compiled_module", "get_aot_compilation_context", "make_boxed_compiler", "make_boxed_func", "nop",
]  # fmt: skip

Function = Callable[..., Any]
Decompositions = Mapping[OpOverload, Callable[..., Any]]


def nop(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> fx.GraphModule:
    """Compile nothing: return the graph itself."""
    return gm


def make_boxed_func(f: Function) -> Function:
    """Return a function with the boxed calling convention: it takes one list of inputs, and may empty it.

    Examples
    --------
    >>> import aotlab
    >>> aotlab.make_boxed_func(lambda x, y: (x + y,))([1, 2])
    (3,)
    """
    if not callable(f):
        raise UsageError(f"make_boxed_func takes a function, not {f!r:.80}")
    return boxed(f)


def make_boxed_compiler(compiler: Compiler) -> Compiler:
    """Wrap a compiler so that it returns boxed callables.

    Source: ``torch._functorch.aot_autograd.make_boxed_compiler``.
    """

    def compile_boxed(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Function:
        compiled: Any = compiler(gm, example_inputs)
        return boxed(compiled) if callable(compiled) else compiled  # otherwise `CallableBackend` raises `UsageError`

    compile_boxed.__name__ = str(getattr(compiler, "__name__", "compile_boxed"))
    return compile_boxed


#: Parameters of upstream's functions, in torch 2.11 to 2.15, that our functions accept and ignore.
_WITHOUT_EFFECT = frozenset((
    "enable_log", "_disable_torch_fn_metadata_mode", "cudagraphs", "boxed_forward_device_index", "ignore_shape_env",
    "compiler_config_extra", "compile_region_name",
))  # fmt: skip
#: Parameters of upstream's functions for which our functions accept only the default value, each with the reason.
_DEFAULT_ONLY = {
    "disable_functionalization": "aotlab's graphs are always functional",
    "pre_grad_passes": "rewrite the module before you pass it",
}


def _check_upstream(name: str, options: Mapping[str, Any]) -> None:
    """Check ``options``: the keyword arguments that our functions do not have and that upstream's functions may have.

    Raises `UsageError` for a value that aotlab does not support, and `TypeError` for an unknown keyword. ``name`` is
    the name of the called function, for the message.
    """
    for key, value in options.items():
        if key in _DEFAULT_ONLY:
            if value:
                raise UsageError(f"{key}={value!r:.80} is not supported: {_DEFAULT_ONLY[key]}")
        elif key not in _WITHOUT_EFFECT:
            raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")


def aot_function(
    fn: Function,
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Partitioner = default_partition,
    decompositions: Decompositions | None = None,
    num_params_buffers: int = 0,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    dynamic: bool = False,
    static_argnums: tuple[int, ...] | None = None,
    **upstream: Any,
) -> CompiledFunction:
    """Trace ``fn`` and its gradient ahead of time and compile both.

    The signature equals the one of ``torch._functorch.aot_autograd.aot_function`` in torch 2.13.

    Parameters
    ----------
    fn
        A function of any pytrees of tensors and plain values. It may mutate its arguments and return aliases of them.
    fw_compiler, bw_compiler, inference_compiler
        Compilers for the forward, for the backward, and for calls without differentiation. They take ``(graph_module,
        example_inputs)``, where the example inputs are fake tensors, and return a callable. ``fw_compiler`` is the
        default for the other two.
    partition_fn
        The partitioner, which splits the joint graph.
    decompositions
        A table that maps ops to functions that the trace records in their place.
    num_params_buffers
        The number of parameters and buffers. They must be the first flat arguments, and must keep their addresses
        between calls.
    keep_inference_input_mutations
        If true, an inference graph itself writes mutated inputs. Otherwise it returns their new values, and the
        epilogue copies these into the inputs.
    dynamic
        True compiles for all sizes of the arguments at once, if possible. False compiles for the sizes of the first
        call, and again at a call with other sizes.
    static_argnums
        Not supported.
    **upstream
        Other parameters of upstream's function, of any supported version of torch. They have no effect here.

    Returns a `CompiledFunction`. It compiles at its first call, and again at each call for which the guards of all its
    compiled entries fail. (Upstream's function compiles only once.) If a call cannot be compiled faithfully, Dynamo
    captures it, or it runs eagerly with one warning; see `config.fallback`.

    Examples
    --------
    >>> import torch, aotlab
    >>> f = aotlab.aot_function(lambda x, y: x.mul_(y).sum(), aotlab.nop)
    >>> x, y = torch.ones(3), torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    >>> f(x, y).backward()
    >>> x.detach(), y.grad
    (tensor([1., 2., 3.]), tensor([1., 1., 1.]))
    """
    if not callable(fn):
        raise UsageError(f"aot_function takes a function, not {fn!r:.80}")
    if static_argnums is not None:
        raise UsageError(
            "static_argnums is not supported: pass Python values as ordinary arguments (each new value is compiled "
            "and guarded), or bind them with functools.partial"
        )
    _check_upstream("aot_function", upstream)
    return _compiled(
        fn, CallableBackend(fw_compiler, bw_compiler, inference_compiler, dict(decompositions or {})), partition_fn,
        keep_inference_input_mutations=keep_inference_input_mutations, dynamic=dynamic,
        static_inputs=num_params_buffers or None,
    )  # fmt: skip


def aot_module(mod: nn.Module, *args: Any, **kwargs: Any) -> AotModule:
    """Trace a module and its gradient ahead of time and compile both.

    Parameters
    ----------
    mod
        The module. Its parameters and buffers become inputs of the graphs, and are read again at each call.
    *args, **kwargs
        As for `aot_function`.

    Returns an `AotModule` with the same parameters and buffers. Raises `UsageError` if ``mod`` is not a module.

    Examples
    --------
    >>> import torch, aotlab
    >>> layer = torch.nn.Linear(2, 1)
    >>> compiled = aotlab.aot_module(layer, aotlab.nop)
    >>> compiled(torch.ones(1, 2)).sum().backward()
    >>> layer.weight.grad
    tensor([[1., 1.]])
    """
    if not isinstance(mod, nn.Module):
        raise UsageError(f"aot_module takes a module, not {mod!r:.80}; for functions, use aot_function")
    return AotModule(mod, aot_function(_compiled_part(mod), *args, **kwargs))


def _compiled_part(fn: Function) -> Function:
    """Return the callable to compile: the ``forward`` of a module that FSDP2 has sharded, or ``fn`` itself.

    The compiled module runs the hooks of FSDP2 around the compiled ``forward``.
    """
    return fn.forward if is_sharded(fn) else fn


def _compiled(
    fn: Function | nn.Module, compiler: Backend, partitioner: Partitioner, **settings: Any
) -> CompiledFunction:
    """Return the compiled function of ``fn``. If a call cannot be traced directly, Dynamo captures it.

    ``settings`` are fields of `aotlab.subclasses.Options`.
    """
    options = Options(backend=compiler, partitioner=partitioner, **settings)
    by_dynamo = partial(compile_by_dynamo, compiler=compiler, partitioner=partitioner, dynamic=options.dynamic)
    return function_for(_target(fn), options, by_dynamo=by_dynamo)


def _target(fn: Function | nn.Module) -> FunctionTarget | ModuleTarget:
    return ModuleTarget(fn) if isinstance(fn, nn.Module) else FunctionTarget(fn)


def aot_module_simplified(
    mod: nn.Module,
    args: Sequence[Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Partitioner = default_partition,
    decompositions: Decompositions | None = None,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    **upstream: Any,
) -> Function:
    """Compile a module that takes and returns flat values, for callers that flatten arguments and results themselves.

    Parameters
    ----------
    mod
        A module that takes flat arguments (tensors and plain values, no containers) and returns a flat tuple.
    args
        Example arguments. They are only checked to be flat: the module does not run on them.
    fw_compiler, bw_compiler, partition_fn, decompositions, keep_inference_input_mutations, inference_compiler
        As for `aot_function`.
    **upstream
        As for `aot_function`. Parameters that only Dynamo and Inductor pass (``cudagraphs``, ``compiler_config_extra``,
        …) have no effect here, and ``pre_grad_passes`` is not supported.

    Returns a function that takes the flat arguments and returns a tuple. It has the module's ``zero_grad``,
    ``named_parameters`` and ``named_buffers``. The graphs have one placeholder per parameter, buffer and tensor
    argument, even if two of these are the same tensor. Raises `UsageError` for nested arguments, and, at a call, if the
    module does not return a tuple. Source: ``torch._functorch.aot_autograd.aot_module_simplified`` of torch 2.13.
    """
    _check_upstream("aot_module_simplified", upstream)
    nested = [type(a).__qualname__ for a in args if is_container(a)]
    if nested:
        raise UsageError(f"aot_module_simplified takes flat arguments, not a {nested[0]}: use aot_module")
    compiler = CallableBackend(fw_compiler, bw_compiler, inference_compiler, dict(decompositions or {}))
    settings: dict[str, Any] = {"keep_inference_input_mutations": keep_inference_input_mutations, "duplicates": "keep"}
    compiled = _compiled(mod, compiler, partition_fn, **settings)

    def forward(*runtime_args: Any) -> tuple[Any, ...]:
        result = compiled(*runtime_args)
        if not isinstance(result, tuple):
            raise UsageError(f"the module returned a {type(result).__qualname__}; aot_module_simplified needs a tuple")
        return result

    forward.compiled = compiled  # type: ignore[attr-defined]  # for inspection
    forward.zero_grad = mod.zero_grad  # type: ignore[attr-defined]  # upstream's callers use these three attributes
    forward.named_parameters = mod.named_parameters  # type: ignore[attr-defined]
    forward.named_buffers = mod.named_buffers  # type: ignore[attr-defined]
    return forward


compiled_function = aot_function
compiled_module = aot_module

Engine = Literal["aotlab", "upstream", "eager"]

#: The modes of `torch.compile`, each with the reason why aotlab does not support it. For a mode that aotlab supports,
#: the reason is empty.
_MODES = {
    "default": "",
    "max-autotune-no-cudagraphs": "",
    "reduce-overhead": "it replays CUDA graphs, which aotlab does not use",
    "max-autotune": "it replays CUDA graphs, which aotlab does not use; use 'max-autotune-no-cudagraphs'",
}


def _check_choices(
    fn_or_module: object, backend: object, frontend: str, partitioner: object, engine: str, mode: str | None
) -> None:
    if not callable(fn_or_module):
        raise UsageError(f"compile takes a function or a module, not {fn_or_module!r:.80}")
    if isinstance(fn_or_module, type) and issubclass(fn_or_module, nn.Module):
        name = fn_or_module.__qualname__
        raise UsageError(f"`{name}` is a module class: compile an instance, for example aotlab.compile({name}(…))")
    if partitioner is not None and not callable(partitioner):
        raise UsageError(f"partitioner {partitioner!r:.80}: pass a function, for example aotlab.default_partition")
    if frontend not in ("direct", "dynamo"):
        raise UsageError(f"frontend {frontend!r}: use 'direct' or 'dynamo'")
    if engine not in ("aotlab", "upstream", "eager"):
        raise UsageError(f"engine {engine!r}: use 'aotlab', 'upstream' or 'eager'")
    refusal = _MODES.get(mode or "default", f"use one of {', '.join(map(repr, _MODES))}")
    if engine == "aotlab" and (refusal or (backend != "inductor" and mode not in (None, "default"))):
        raise UsageError(f"mode {mode!r}: {refusal or 'only the backend inductor has this mode'}")


def compile(
    fn_or_module: Function | nn.Module | None = None,
    *,
    backend: str | Backend | Compiler = "inductor",
    frontend: Literal["direct", "dynamo"] = "direct",
    dynamic: bool | None = None,
    fullgraph: bool = False,
    mode: str | None = None,
    partitioner: Partitioner | None = None,
    engine: Engine = "aotlab",
) -> Any:
    """Compile a function or module. Without one, return a decorator.

    Parameters
    ----------
    backend
        ``"inductor"``, ``"eager"`` (run the graphs op by op), or a compiler ``(graph_module, example_inputs)``.
        Random numbers equal eager's, except with Inductor. With Inductor, they equal `torch.compile`'s, or eager's if
        ``torch._inductor.config.fallback_random`` is set when the function is compiled.
    frontend
        ``"direct"`` traces the Python function itself. If that fails, Dynamo captures the call, unless
        `config.fallback` forbids it. ``"dynamo"`` lets `torch.compile` capture every call, with graph breaks.
    dynamic
        None compiles the first call for its own sizes and numbers. If a size or number differs at a later call, the
        function is compiled again for all values of that size or number. True compiles for all sizes at once. False
        compiles for the sizes of the first call, and again at a call with other sizes. Sizes of 0 and 1, and sizes of
        parameters and buffers, are never dynamic. The marks of ``torch._dynamo.mark_dynamic``, ``maybe_mark_dynamic``
        and ``mark_static`` are respected. The Dynamo frontend passes this argument to `torch.compile`.
    fullgraph
        Raise `RefusedError` if a call cannot be compiled as a whole, whatever `config.fallback` is.
    mode
        `torch.compile`'s mode ``"default"`` or ``"max-autotune-no-cudagraphs"``. aotlab does not use CUDA graphs.
    partitioner
        Splits the joint graph. The default is `default_partition`.
    engine
        ``"aotlab"`` compiles with this package. The other two are for comparisons: ``"upstream"`` compiles with stock
        `torch.compile`, and ``"eager"`` returns the function or module itself.

    Returns an `AotModule` for a module. For a function, returns a `CompiledFunction`, or with the Dynamo frontend a
    plain Python function, as `torch.compile` does.

    Examples
    --------
    >>> import torch, aotlab
    >>> @aotlab.compile(backend="eager")
    ... def step(x):
    ...     x.add_(1)
    ...     return x.view(-1)
    >>> x = torch.zeros(2, 1)
    >>> step(x), x.sum()
    (tensor([1., 1.]), tensor(2.))
    """
    settings: dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph}
    if fn_or_module is None:
        settings |= {"backend": backend, "frontend": frontend, "mode": mode}
        return partial(compile, partitioner=partitioner, engine=engine, **settings)
    _check_choices(fn_or_module, backend, frontend, partitioner, engine, mode)
    if engine == "eager":
        return fn_or_module
    if engine == "upstream":
        stock: Any = "aot_eager" if backend == "eager" else backend
        return torch.compile(fn_or_module, backend=stock, mode=mode, **settings)
    chosen = partitioner or default_partition
    compiler = InductorBackend(max_autotune=True) if mode not in (None, "default") else resolve(backend)
    by_dynamo: Function = partial(compile_by_dynamo, compiler=compiler, partitioner=chosen, **settings)
    if frontend == "dynamo":
        function_by_dynamo = by_dynamo(_compiled_part(fn_or_module))
        return (
            AotModule(fn_or_module, function_by_dynamo) if isinstance(fn_or_module, nn.Module) else function_by_dynamo
        )
    settings_of_options: dict[str, Any] = {"dynamic": dynamic, "by_dynamo": not fullgraph}
    options = Options(backend=compiler, partitioner=chosen, keep_inference_input_mutations=True, **settings_of_options)
    if isinstance(fn_or_module, nn.parallel.DistributedDataParallel):
        function = function_for(_target(fn_or_module.module), options, by_dynamo=by_dynamo, whole=fullgraph)
        return AotModule(fn_or_module, InsideParallel(fn_or_module, function))
    function = function_for(_target(_compiled_part(fn_or_module)), options, by_dynamo=by_dynamo, whole=fullgraph)
    return AotModule(fn_or_module, function) if isinstance(fn_or_module, nn.Module) else function
