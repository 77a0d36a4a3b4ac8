"""The public functions of the engine.

`compile` is what most people call. The others have the names and calling conventions of upstream's functions, so that
code written for those runs on these after changing the import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import fx, nn

from aotlab._torch import OpOverload
from aotlab.backends import CallableBackend, InductorBackend, boxed, resolve
from aotlab.backends.base import Backend, Compiler
from aotlab.backends.stage import get_aot_compilation_context
from aotlab.cache import CompiledFunction
from aotlab.capture.nesting import is_container
from aotlab.errors import UsageError
from aotlab.frontends.direct import FunctionTarget, ModuleTarget
from aotlab.frontends.dynamo import compile_by_dynamo
from aotlab.frontends.modules import AotModule
from aotlab.partition.default import default_partition
from aotlab.partition.stage import Partitioner
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
    """Give a function that takes its inputs one by one the boxed convention: one list, which it may empty.

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
    """Make a compiler return boxed callables, whatever it returned before.

    Source: ``torch._functorch.aot_autograd.make_boxed_compiler``.
    """

    def compile_boxed(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Function:
        compiled: Any = compiler(gm, example_inputs)
        return boxed(compiled) if callable(compiled) else compiled  # what is wrong with it is said where it is used

    compile_boxed.__name__ = str(getattr(compiler, "__name__", "compile_boxed"))
    return compile_boxed


#: Further parameters of upstream's functions, torch 2.11 to 2.15, that change nothing here ...
_WITHOUT_EFFECT = frozenset((
    "enable_log", "_disable_torch_fn_metadata_mode", "cudagraphs", "boxed_forward_device_index", "ignore_shape_env",
    "compiler_config_extra", "compile_region_name",
))  # fmt: skip
#: ... and those of which only the default can be had, with the reason.
_DEFAULT_ONLY = {
    "disable_functionalization": "aotlab's graphs are always functional",
    "pre_grad_passes": "rewrite the module before you pass it",
}


def _check_upstream(name: str, options: Mapping[str, Any]) -> None:
    """Check what a function was given of upstream's further parameters."""
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

    The signature is that of ``torch._functorch.aot_autograd.aot_function`` of torch 2.13.

    Parameters
    ----------
    fn
        Takes and returns any pytrees of tensors and plain values; may mutate and alias its arguments.
    fw_compiler, bw_compiler, inference_compiler
        Take ``(graph_module, example_inputs)``, the latter fake, and return a callable: for the forward, the backward
        and calls without anything to differentiate. The last two are the first by default.
    partition_fn
        Splits the joint graph.
    decompositions
        Ops to be replaced while tracing.
    num_params_buffers
        How many of the first flat arguments are parameters and buffers, whose addresses do not change.
    keep_inference_input_mutations
        Let inference graphs write mutated inputs themselves.
    dynamic
        Compile for all sizes of the arguments at once, where that can be; False: for those of each call.
    static_argnums
        Not supported.
    **upstream
        Upstream's other parameters, of any supported torch, as far as they make no difference here.

    Returns a `CompiledFunction`, which compiles at its first call and, other than upstream's, whenever its guards fail.
    What cannot be compiled faithfully is left to Dynamo, or runs eagerly, with one warning; see `config.fallback`.

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
            "static_argnums is not supported: pass Python values as arguments, each new value is guarded and compiled "
            "for, or bind them with functools.partial"
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
        The module; its parameters and buffers become inputs of the graphs, read anew at each call.
    *args, **kwargs
        As for `aot_function`.

    Returns an `AotModule` with the same parameters and buffers; raises `UsageError` if one of these is a fake tensor.

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
    return AotModule(mod, aot_function(mod, *args, **kwargs))


def _compiled(fn: Function | nn.Module, compiler: Backend, partitioner: Partitioner, **ways: Any) -> CompiledFunction:
    """Compile a call as the options in ``ways`` say; Dynamo captures what cannot be traced."""
    options = Options(backend=compiler, partitioner=partitioner, **ways)
    by_dynamo = partial(compile_by_dynamo, compiler=compiler, partitioner=partitioner, dynamic=options.dynamic)
    return function_for(_target(fn), options, by_dynamo=by_dynamo)


def _target(called: Function | nn.Module) -> FunctionTarget | ModuleTarget:
    return ModuleTarget(called) if isinstance(called, nn.Module) else FunctionTarget(called)


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
    """Compile a module with a flat calling convention, for callers that flatten for themselves.

    Parameters
    ----------
    mod
        Takes flat arguments (tensors and plain values, no containers) and returns a tuple of the same.
    args
        Example arguments; nothing is run on them before the first call, but their flatness is checked.
    fw_compiler, bw_compiler, partition_fn, decompositions, keep_inference_input_mutations, inference_compiler
        As for `aot_function`.
    **upstream
        As for `aot_function`; what only Dynamo and Inductor pass (``cudagraphs``, ``compiler_config_extra``, …) has no
        effect here, and ``pre_grad_passes`` is not supported.

    Returns a function that takes the flat arguments and returns a tuple, with the module's ``zero_grad``,
    ``named_parameters`` and ``named_buffers``. The graphs have one placeholder per parameter, buffer and tensor
    argument, also where two are the same tensor. Raises `UsageError` for nested arguments, or (at a call) if the module
    does not return a tuple. After ``torch._functorch.aot_autograd.aot_module_simplified`` of torch 2.13.
    """
    _check_upstream("aot_module_simplified", upstream)
    nested = [type(a).__qualname__ for a in args if is_container(a)]
    if nested:
        raise UsageError(f"aot_module_simplified takes flat arguments; there is a {nested[0]}: use aot_module")
    compiler = CallableBackend(fw_compiler, bw_compiler, inference_compiler, dict(decompositions or {}))
    ways: dict[str, Any] = {"keep_inference_input_mutations": keep_inference_input_mutations, "duplicates": "keep"}
    compiled = _compiled(mod, compiler, partition_fn, **ways)

    def forward(*runtime_args: Any) -> tuple[Any, ...]:
        out = compiled(*runtime_args)
        if not isinstance(out, tuple):
            raise UsageError(f"the module returned a {type(out).__qualname__}; aot_module_simplified needs a tuple")
        return out

    forward.compiled = compiled  # type: ignore[attr-defined]  # for those who look behind it
    forward.zero_grad = mod.zero_grad  # type: ignore[attr-defined]  # upstream's callers rely on these three
    forward.named_parameters = mod.named_parameters  # type: ignore[attr-defined]
    forward.named_buffers = mod.named_buffers  # type: ignore[attr-defined]
    return forward


compiled_function = aot_function
compiled_module = aot_module

Engine = Literal["aotlab", "upstream", "eager"]

#: The modes of `torch.compile`, and why some are refused.
_MODES = {
    "default": "",
    "max-autotune-no-cudagraphs": "",
    "reduce-overhead": "it replays CUDA graphs, which aotlab has not been tried with",
    "max-autotune": "it replays CUDA graphs, which aotlab has not been tried with; take 'max-autotune-no-cudagraphs'",
}


def _check_choices(
    fn_or_module: object, backend: object, frontend: str, partitioner: object, engine: str, mode: str | None
) -> None:
    if not callable(fn_or_module):
        raise UsageError(f"compile takes a function or a module, not {fn_or_module!r:.80}")
    if isinstance(fn_or_module, type) and issubclass(fn_or_module, nn.Module):
        name = fn_or_module.__qualname__
        raise UsageError(f"`{name}` is a class of modules: compile a module, as in aotlab.compile({name}(…))")
    if partitioner is not None and not callable(partitioner):
        raise UsageError(f"partitioner {partitioner!r:.80}: pass a function, as aotlab.default_partition is one")
    if frontend not in ("direct", "dynamo"):
        raise UsageError(f"frontend {frontend!r}: there are 'direct' and 'dynamo'")
    if engine not in ("aotlab", "upstream", "eager"):
        raise UsageError(f"engine {engine!r}: there are 'aotlab', 'upstream' and 'eager'")
    why = _MODES.get(mode or "default", f"there are {', '.join(map(repr, _MODES))}")
    if engine == "aotlab" and (why or (backend != "inductor" and mode not in (None, "default"))):
        raise UsageError(f"mode {mode!r}: {why or 'it is a mode of the backend inductor'}")


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
    """Compile a function or module; without one, return a decorator.

    Parameters
    ----------
    backend
        ``"inductor"``, ``"eager"`` (run the graphs op by op), or a compiler ``(graph_module, example_inputs)``.
        Random numbers are eager's but with Inductor, where they are those of `torch.compile` (eager's, if
        ``torch._inductor.config.fallback_random`` is set when the function is compiled).
    frontend
        ``"direct"`` traces the call itself, and has Dynamo capture what it cannot, unless `config.fallback` forbids it;
        ``"dynamo"`` lets `torch.compile` capture, graph breaks included.
    dynamic
        None compiles the first call for its own sizes and numbers, and once for all values of a size or a number that
        is another one at a later call; True compiles for all sizes at once; False for those of each call. Sizes of 0
        and 1, and those of parameters and buffers, stay as they are. The marks of ``torch._dynamo.mark_dynamic``,
        ``maybe_mark_dynamic`` and ``mark_static`` count. With Dynamo it is `torch.compile`'s.
    fullgraph
        Raise `RefusedError` where a call would not be compiled as a whole, whatever `config.fallback` is.
    mode
        ``"default"`` or ``"max-autotune-no-cudagraphs"``, `torch.compile`'s; aotlab does not use CUDA graphs.
    partitioner
        Splits the joint graph; `default_partition` if not given.
    engine
        ``"aotlab"``; ``"upstream"`` is stock `torch.compile`, ``"eager"`` the function itself, for comparisons.

    Returns a `CompiledFunction`; of a module an `AotModule`; with Dynamo a function, as `torch.compile` does.

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
        made = by_dynamo(fn_or_module)
        return AotModule(fn_or_module, made) if isinstance(fn_or_module, nn.Module) else made
    ways: dict[str, Any] = {"dynamic": dynamic, "by_dynamo": not fullgraph}
    options = Options(backend=compiler, partitioner=chosen, keep_inference_input_mutations=True, **ways)
    function = function_for(_target(fn_or_module), options, by_dynamo=by_dynamo, whole=fullgraph)
    return AotModule(fn_or_module, function) if isinstance(fn_or_module, nn.Module) else function
