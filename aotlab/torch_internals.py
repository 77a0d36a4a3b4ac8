"""The one door to torch's private APIs.

Every name that torch does not document comes in here, with a line of why; the rest of aotlab imports it from
here. ``tests/test_torch_internals.py`` asserts that each still exists, and behaves as used, on the installed torch.
Inductor is loaded only when it is first asked for: importing it takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import logging
import os
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, fx

# Higher-order ops are not OpOverloads; the recorder must tell them apart to refuse them.
from torch._C import _len_torch_dispatch_stack as dispatch_mode_count
from torch._C import _len_torch_function_stack as function_mode_count

# What Dynamo does at a frame, noted with its code: `torch.compiler.disable` would cost 2 µs at each call.
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

# The guards that Dynamo runs in C++: 0.2 µs for all global state, 0.2 µs for a few tensors.
from torch._C._dynamo.guards import GlobalStateGuard, TensorGuards

# Kernels that Python implements for fake tensors (batch norm's statistics among them) hang on this dispatcher.
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing

# Fake tensors: shapes without data. The exceptions say which op could not be run on them.
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# Modules whose Python is written when it is first looked at: the compilers that read the graph never need it.
from torch.fx._lazy_graph_module import _LazyGraphModule, _make_graph_module, _use_lazy_graph_module

# Writes a graph's Python so that it takes its inputs in one list, which it empties.
from torch.fx.graph import _BoxedCodeGen

# Sizes, strides and dtype in the form that passes over fx graphs look for in ``meta["tensor_meta"]``.
from torch.fx.passes.shape_prop import _extract_tensor_metadata as extract_tensor_metadata

# Where the tensors of parametrized modules are cached.
from torch.nn.utils import parametrize

# Swaps a module's parameters and buffers for the length of a block, ties included.
from torch.nn.utils.stateless import _reparametrize_module as reparametrize_module

# The containers that users have registered; every torch that we support has them under this name only.
from torch.utils import _pytree as pytree

# A mode that sees every op below autograd and functionalization.
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from aotlab.errors import UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GlobalStateGuard",
    "HigherOrderOperator",
    "OpOverload",
    "TensorGuards",
    "TorchDispatchMode",
    "TracingContext",
    "dispatch_mode_count",
    "enable_python_dispatcher",
    "extract_tensor_metadata",
    "function_mode_count",
    "functionalization",
    "outside_of_trace",
    "pytree",
    "registered_container",
    "reparametrize_module",
    "tracing",
]


# --- pytrees -----------------------------------------------------------------------------------------------------


def registered_container(kind: type) -> Any:
    """Return the functions by which a type registered with ``torch.utils._pytree`` is flattened; None if it is not."""
    return pytree.SUPPORTED_NODES.get(kind)


# --- functionalization -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def functionalization() -> Iterator[None]:
    """Make factory functions return functional wrappers too; views stay views in the graph."""
    torch._enable_functionalization(reapply_views=True)
    try:
        yield
    finally:
        torch._disable_functionalization()


def to_functional(tensor: Tensor) -> Tensor:
    """Wrap ``tensor`` so that mutations of the wrapper become functional ops."""
    return torch._to_functional_tensor(tensor)


def is_functional(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is such a wrapper."""
    return torch._is_functional_tensor(tensor)


def sync(tensor: Tensor) -> None:
    """Apply mutations that were made through other views of the wrapper's storage."""
    torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]  # not in the stubs


def from_functional(tensor: Tensor) -> Tensor:
    """Return the value that a wrapper holds now; `sync` it first."""
    return torch._from_functional_tensor(tensor)


def is_seen_through(wrapper: Tensor, operator: str) -> bool:
    """Tell whether a view op of this name lies on the way from the memory of a wrapper to the wrapper."""
    # only functionalization knows by which views it will write back, and it names them by their classes
    ways = torch._C._functionalization.get_view_meta_sequence(wrapper)
    return any(type(way).__name__ == f"{operator}_ViewMeta" for way in ways)


def replace_value(wrapper: Tensor, value: Tensor) -> None:
    """Let ``wrapper`` hold ``value`` from now on, and its aliases what follows from that."""
    torch._functionalize_replace(wrapper, value)
    torch._functionalize_commit_update(wrapper)
    sync(wrapper)


@contextlib.contextmanager
def outside_of_trace() -> Iterator[None]:
    """Let ops in the block be ordinary ones again: neither recorded, nor on wrappers."""
    functionalize = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
    with (
        _disable_current_modes(),
        torch._C._DisablePythonDispatcher(),
        torch._C._ExcludeDispatchKeyGuard(functionalize),
    ):
        yield


def has_data_mutation(wrapper: Tensor) -> bool:
    """Tell whether a wrapper's values were written (zero-size and self-copy writes count)."""
    return bool(torch._functionalize_has_data_mutation(wrapper))  # type: ignore[attr-defined]  # not in the stubs


def has_metadata_mutation(wrapper: Tensor) -> bool:
    """Tell whether a wrapper's sizes, strides or offset changed in place."""
    return bool(torch._functionalize_has_metadata_mutation(wrapper))


def was_storage_changed(wrapper: Tensor) -> bool:
    """Tell whether a wrapper was given another storage."""
    return bool(torch._functionalize_was_storage_changed(wrapper))


def mutations_under_no_grad(wrapper: Tensor) -> bool:
    """Tell whether all writes happened under ``no_grad`` or ``inference_mode``."""
    return bool(torch._functionalize_are_all_mutations_under_no_grad_or_inference_mode(wrapper))


def new_fake(
    mode: FakeTensorMode, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> FakeTensor:
    """Make a fake tensor with a storage of its own, without asking a kernel; a third of the time of a fake op."""
    below = torch.ops.aten.empty_strided.default(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, below, device)


def new_fake_view(
    mode: FakeTensorMode, base: FakeTensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, offset: int
) -> FakeTensor:
    """Make a fake tensor on the storage of ``base``; ``offset`` in elements of ``dtype``."""
    below = torch.ops.aten.empty_strided.default((0,), (1,), dtype=dtype, device="meta")
    torch.ops.aten.set_.source_Storage_storage_offset(below, base.untyped_storage(), offset, shape, stride)
    return FakeTensor(mode, below, base.device)


def enter_fake(mode: FakeTensorMode, real: Tensor) -> FakeTensor:
    """Make the fake of a plain dense input; others go the long way."""
    shape, stride = real.shape, real.stride()
    elements = real.numel()
    last = sum([(size - 1) * step for size, step in zip(shape, stride, strict=True)]) + 1
    whole = real.storage_offset() == 0 and real.untyped_storage().nbytes() == elements * real.element_size()
    if whole and last == elements:
        return new_fake(mode, shape, stride, real.dtype, real.device)
    return mode.from_tensor(real.detach(), static_shapes=True)


# --- modules -----------------------------------------------------------------------------------------------------

#: The dictionaries in which a module keeps its tensors and submodules, and the set of names that it does not save.
MODULE_DICTIONARIES = (
    "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def parameters_held(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary in which ``module`` itself keeps its parameters."""
    return module._parameters  # type: ignore[return-value]  # parameters are tensors


def buffers_held(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary in which ``module`` itself keeps its buffers."""
    return module._buffers


def children_held(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """Return the dictionary in which ``module`` itself keeps its submodules."""
    return module._modules


def has_backward_hooks(module: torch.nn.Module) -> bool:
    """Tell whether a module, or all modules, have hooks on their backward."""
    everywhere = torch.nn.modules.module._global_backward_hooks or torch.nn.modules.module._global_backward_pre_hooks
    return bool(module._backward_hooks or module._backward_pre_hooks or everywhere)


#: One layer of oneDNN's recurrent nets.
ONEDNN_RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default


def no_python_dispatcher() -> AbstractContextManager[None]:
    """Let composite ops be those of C++, which eager runs, and not Python's."""
    return torch._C._DisablePythonDispatcher()


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Switch oneDNN off for a block; the public context manager warns."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def hooks_held(module: torch.nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries in which ``module`` keeps its forward hooks and forward pre-hooks."""
    return module._forward_hooks, module._forward_pre_hooks


def parametrization_cache(module: torch.nn.Module) -> tuple[dict[str, Any], str] | None:
    """Return where it is kept whether parametrized tensors are cached; None if the module has none."""
    if not parametrize.is_parametrized(module):
        return None
    return vars(parametrize), "_cache_enabled"


def global_hooks_held() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dictionaries of the forward hooks and forward pre-hooks of all modules."""
    return torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks


def nesting_text(nesting: Any) -> str:
    """Write a nesting as Python would, with ``*`` for each leaf: ``(*, {'a': *})``."""
    inner = [nesting_text(child) for child in nesting.children()]
    if nesting.is_leaf():
        return "*"
    if nesting.type is list:
        return f"[{', '.join(inner)}]"
    if nesting.type is tuple:
        return f"({inner[0]},)" if len(inner) == 1 else f"({', '.join(inner)})"
    if nesting.type is dict:
        return "{" + ", ".join(f"{key!r}: {text}" for key, text in zip(nesting.context, inner, strict=True)) + "}"
    name = nesting.context if isinstance(nesting.context, type) else nesting.type  # a namedtuple's class
    about = "" if nesting.context is None or isinstance(nesting.context, type) else f"{nesting.context!r}: "
    return f"{name.__qualname__}({about}{', '.join(inner)})"


# --- graphs ------------------------------------------------------------------------------------------------------


def graph_module(root: torch.nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    """Make a module of a graph; its Python is written when it is first asked for."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph, name)


def forward_of(module: fx.GraphModule) -> Callable[..., Any]:
    """Return a module's compiled Python, without the checks of ``Module.__call__``."""
    _LazyGraphModule.force_recompile(module)
    return module.forward


def boxed_forward_of(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a graph as a function that takes its inputs in one list and empties it, so that each can die in time."""
    graph = module.graph
    before = graph._codegen
    graph._codegen = _BoxedCodeGen()
    try:
        code = graph.python_code("self")
    finally:
        graph._codegen = before
    name = f"<aotlab graph {next(_graphs)}>"
    linecache.cache[name] = (len(code.src), None, code.src.splitlines(keepends=True), name)
    namespace = dict(code.globals)
    exec(compile(code.src, name, "exec"), namespace)
    weakref.finalize(namespace["forward"], linecache.cache.pop, name, None).atexit = False
    call: Callable[[list[Any]], Any] = functools.partial(namespace.pop("forward"), module)
    call._boxed_call = True  # type: ignore[attr-defined]  # the mark that upstream's users look for
    return call


_graphs = itertools.count()


def quantizing_ops() -> frozenset[OpOverload]:
    """Return the ops whose results are quantized; their fakes do not say so."""
    packets = (
        torch.ops.aten.quantize_per_tensor, torch.ops.aten.quantize_per_channel,
        torch.ops.aten.quantize_per_tensor_dynamic, torch.ops.aten._empty_affine_quantized,
        torch.ops.aten._empty_per_channel_affine_quantized,
    )  # fmt: skip
    return frozenset(getattr(packet, overload) for packet in packets for overload in packet.overloads())


# --- dispatch ----------------------------------------------------------------------------------------------------


@functools.cache
def _rewritten_in_python() -> tuple[OpOverload, ...]:
    """Return the ops that torch rewrites in Python under autograd's keys, but for those that a trace needs so.

    Batch norm's rewriting shows that the statistics are written; that of ``one_hot`` does without looking at values.
    """
    needed = ("native_batch_norm", "cudnn_batch_norm", "one_hot")
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name not in needed]
    ops = [getattr(p, o) for p in packets if hasattr(p, "overloads") for o in p.overloads()]
    return tuple(op for op in ops if any(key in op.py_kernels for key in keys))


@contextlib.contextmanager
def eager_kernels(*, but: Container[OpOverload] = ()) -> Iterator[None]:
    """Let ops through that torch's Python dispatcher would otherwise rewrite, so that they round as eager does.

    Upsampling, recurrent layers, dropout and a few activations have rewritings for symbolic shapes that hang on
    autograd's keys and replace the C++ code on every trace. They come back after the block. ``but`` are rewritten.
    """
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    taken = []
    for op in _rewritten_in_python():
        for key in keys:
            if key in op.py_kernels and op not in but:
                taken.append((op, key, op.py_kernels.pop(key)))
                op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, key, kernel in taken:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keep fake tensors from logging a traceback for each op that fails; eager tells the user."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def quiet(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING

    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)


def has_composite_kernel_only(op: OpOverload, device_type: str) -> bool:
    """Tell whether eager computes ``op`` on that device by calling other ops, so that it is to be decomposed."""
    if not op._can_decompose():
        return False
    backend = device_type.upper() if device_type in ("cpu", "cuda") else "CPU"
    return not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), backend)


#: What computes ``bilinear``; its kernel calls products of matrices, for which autocast casts.
TRILINEAR: OpOverload = torch.ops.aten._trilinear.default


def autocast_knows(op: Any) -> bool:
    """Tell whether autocast, as it is on now, casts the arguments of ``op``."""
    return any(
        torch.is_autocast_enabled(device)
        and isinstance(op, OpOverload)
        and _has_kernel(op, f"Autocast{device.upper()}")
        for device in ("cpu", "cuda")
    )


@functools.cache
def _has_kernel(op: OpOverload, key: str) -> bool:
    # some overloads are TorchScript's, on lists and numbers, and unknown to the dispatcher
    known = torch._C._dispatch_has_kernel(op.name())
    return known and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def forget_tensors(fake_mode: FakeTensorMode) -> None:
    """Drop a fake mode's memory of which tensors it made fakes of: the mode itself lives until cycles are collected."""
    fake_mode.fake_tensor_converter = type(fake_mode.fake_tensor_converter)(copy_data=False)


def call_by_fake_mode(
    mode: FakeTensorMode, op: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``op`` on fake tensors under ``mode``, with ``mode`` itself on the stack as its kernels expect."""
    with mode:
        return op(*args, **kwargs)


#: What ``torch.nn.functional.one_hot`` is.
ONE_HOT = torch._C._nn.one_hot
#: The ops by which batch norm computes, of which most are private; the result comes first.
BATCH_NORMS = (
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten._native_batch_norm_legit_functional.default,
    torch.ops.aten._native_batch_norm_legit_no_training.default,
    torch.ops.aten._batch_norm_no_update.default,
    torch.ops.aten._batch_norm_with_update.default,
    torch.ops.aten._batch_norm_with_update_functional.default,
)


def suggest_memory_format(tensor: Tensor) -> torch.memory_format:
    """Return the memory format that kernels give their results when ``tensor`` comes in."""
    from torch._prims_common import suggest_memory_format

    return suggest_memory_format(tensor)


#: Set grad mode without the 2 µs of a context manager; generated code pairs each call with its undoing.
set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled


def disable_torch_function() -> AbstractContextManager[None]:
    """Keep function modes from seeing what we ourselves call."""
    return torch._C.DisableTorchFunction()


def disable_autocast() -> AbstractContextManager[None]:
    """Keep autocast from casting again what a trace under autocast has cast already."""
    return torch._C._DisableAutocast()


def autocast_nesting() -> int:
    """Return how many autocast blocks are open; what they cast of weights is kept until there are none."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def restore_autocast_nesting(depth: int) -> None:
    """Close the autocast blocks that were left open, and let go of what they cast; or open those that were closed."""
    while autocast_nesting() > depth:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
    while autocast_nesting() < depth:
        torch.autocast_increment_nesting()


#: What Dynamo's graphs enter modes with, and what leaves them again.
MODE_EXITS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.autograd.grad_mode._enter_inference_mode: torch.autograd.grad_mode._exit_inference_mode,
    torch.amp.autocast_mode._enter_autocast: torch.amp.autocast_mode._exit_autocast,
}

#: What Dynamo's graphs set the grad mode with.
SET_GRAD_ENABLED: Callable[[bool], None] = torch._C._set_grad_enabled

#: What Dynamo puts for ``tensor.data``; no function mode sees it.
DATA_OF: Callable[[Tensor], Tensor] = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]  # not in the stubs

#: What torch 2.15's Dynamo writes for ``x.data = y``; earlier ones write the assignment itself.
SETS_DATA: Any = getattr(torch.ops.aten, "shallow_copy_data_", None)

#: What Dynamo puts for a call of ``torch.utils.checkpoint.checkpoint``; run as it is, it draws random numbers anew.
CHECKPOINT: HigherOrderOperator = torch.ops.higher_order.tag_activation_checkpoint

#: The key in the ``meta`` of the graph that it runs under which Dynamo keeps a checkpoint's ``context_fn``.
CHECKPOINT_CONTEXTS = "_checkpoint_context_fn"


#: By this a stack trace of Dynamo's names the wrapper of `once_differentiable`.
ONCE_DIFFERENTIABLE = f'{torch.autograd.function.__file__}", line '

#: What makes a derivative of a custom Function's backward an error.
once_differentiable: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.autograd.function.once_differentiable

#: What Dynamo puts for a call of a user's `torch.autograd.Function`; run as it is, it keeps everything in a closure.
FUNCTION_APPLY: HigherOrderOperator = torch._functorch.autograd_function.autograd_function_apply


def checkpoint_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Take those keyword arguments of a `CHECKPOINT` that are the checkpoint's, not its function's."""
    return dict(CHECKPOINT.divide_kwargs(settings)[0])  # type: ignore[attr-defined]  # of this one op


def any_autocast_enabled() -> bool:
    """Tell whether autocast is on for any device."""
    return bool(torch._C._is_any_autocast_enabled())


def _called_by_checkpoint() -> bool:
    """Tell whether torch's checkpoint, which keeps the random state to compute again, is among the next callers."""
    frame = sys._getframe(2)
    for _ in range(5):
        if frame.f_code.co_filename.endswith(("torch/utils/checkpoint.py", "torch\\utils\\checkpoint.py")):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _calling_higher_order_op(frame: types.FrameType | None) -> str | None:
    """Return the name of the function of ``torch._higher_order_ops`` that a user called; None if none is running."""
    name = None
    while frame is not None and "_higher_order_ops" in frame.f_code.co_filename:
        name, frame = frame.f_code.co_name, frame.f_back
    return name


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random ops on a device draw from if they are given none."""
    if device.type == "cuda":
        number: int | None = device.index  # the stubs forget that there may be none
        return torch.cuda.default_generators[torch.cuda.current_device() if number is None else number]
    return torch.default_generator


_RANDOM_STATE = ("manual_seed", "seed", "set_rng_state", "get_rng_state", "initial_seed")


class Surroundings:
    """What this thread has on around a call: to be put back where an interrupt hit between two of our own steps.

    A ``KeyboardInterrupt`` may come while a context is entered or left, which Python then leaves half done.
    """

    def __init__(self) -> None:
        self._function_modes = function_mode_count()
        self._dispatch_modes = dispatch_mode_count()
        self._functionalizes = _functionalizes()
        self._grad_mode = torch.is_grad_enabled()

    def restore(self) -> None:
        """Take off what was put on since, innermost first."""
        while function_mode_count() > self._function_modes:
            torch._C._pop_torch_function_stack()
        while dispatch_mode_count() > self._dispatch_modes:
            torch._C._pop_torch_dispatch_stack(None)
        if _functionalizes() and not self._functionalizes:
            torch._disable_functionalization()
        torch.set_grad_enabled(self._grad_mode)


def _functionalizes() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Functionalize)


@contextlib.contextmanager
def replace_unguarded(
    refuse: Callable[..., Any],
    checkpoint_state: Callable[[str, Tensor], None],
    checkpoint_starts: Callable[[], None],
    set_: Callable[..., Any],
    push_hooks: Callable[..., Any],
    call_back: Callable[..., Any],
    higher_order: Callable[[str], Any],
) -> Iterator[None]:
    """Replace, for this thread and the length of a block, functions that no mode gets to see.

    Most call ``refuse`` instead, with their name and arguments: such as touch random generators, with that alone.
    ``set_`` and ``call_back``, which stands for ``apply_``, ``map_`` and ``map2_``, get the original as
    ``otherwise``. ``checkpoint_state`` is told which state of the random generator torch's checkpoint takes or sets,
    ``checkpoint_starts`` that one begins to run its function. ``higher_order`` is told which higher-order op is about
    to have its functions captured by Dynamo, which would meet the trace's tensors.
    """
    thread = threading.get_ident()
    compile_ = torch.compile

    def here(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            mine = threading.get_ident() == thread and not _called_by_checkpoint()
            return (replacement if mine else original)(*args, **kwargs)

        return call

    def of_state(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            if not _called_by_checkpoint():
                return refuse(name)
            result = original(*args, **kwargs)
            state = result if result is not None else next(iter((*args, *kwargs.values())), None)
            if isinstance(state, torch.Tensor):
                checkpoint_state(name, state)
            return result

        return call

    pushes = here(push_hooks, torch._C._autograd._push_saved_tensors_default_hooks)

    def push(*args: Any) -> Any:
        if threading.get_ident() == thread and _called_by_checkpoint():
            checkpoint_starts()
        return pushes(*args)

    @functools.wraps(compile_)
    def compiles(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and (name := _calling_higher_order_op(sys._getframe(1))):
            return higher_order(name)
        return compile_(*args, **kwargs)

    swap, to_dlpack = functools.partial(refuse, "swap_tensors"), functools.partial(refuse, "to_dlpack")
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch._C, "_swap_tensor_impl", swap),
        (torch.utils, "swap_tensors", swap),
        (torch._C, "_to_dlpack", to_dlpack),
        (torch, "to_dlpack", to_dlpack),
        (torch.utils.dlpack, "to_dlpack", to_dlpack),
        (torch.Tensor, "set_", functools.partial(set_, otherwise=torch.Tensor.set_)),
        *(
            (torch.Tensor, name, functools.partial(call_back, otherwise=getattr(torch.Tensor, name)))
            for name in ("apply_", "map_", "map2_")
        ),
    ]
    states = [(owner, name) for name in _RANDOM_STATE for owner in (torch, torch.random)]
    new = [(owner, name, here(replacement, getattr(owner, name))) for owner, name, replacement in places]
    new += [(owner, name, of_state(name, getattr(owner, name))) for owner, name in states]
    new += [(torch._C._autograd, "_push_saved_tensors_default_hooks", push), (torch, "compile", compiles)]
    before = [getattr(owner, name) for owner, name, _ in new]
    try:  # before the first replacement, since an interrupt may come between two of them
        for owner, name, replacement in new:
            setattr(owner, name, replacement)
        yield
    finally:
        for (owner, name, _), own in zip(new, before, strict=True):
            setattr(owner, name, own)


def is_custom_function_node(node: Any) -> bool:
    """Tell whether an autograd node belongs to a user's `torch.autograd.Function`."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def is_lone_function_result(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is the only result of a user's `torch.autograd.Function`."""
    node = tensor.grad_fn
    return node is not None and is_custom_function_node(node) and len(node._input_metadata) == 1


def only_default_devices() -> bool:
    """Tell whether all function modes that are on do nothing but set a default device."""
    from torch.utils._device import DeviceContext

    return all(isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack())


def is_transformed(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is the wrapper by which a ``torch.func`` transform follows another tensor."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def transforms_active() -> bool:
    """Tell whether a ``torch.func`` transform is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


#: What Dynamo's graphs begin a transform of ``torch.func`` with, or forward-mode differentiation; another function of
#: the same name in some versions.
_OPENING = frozenset(
    {
        "_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting", "_func_increment_nesting",
        "_enter_dual_level", "_set_fwd_grad_enabled", "_saved_tensors_hooks_disable",
        "set_inplace_requires_grad_allowed",
    }
)  # fmt: skip


def opens_transform(target: Any) -> bool:
    """Tell whether a function in a graph of Dynamo's changes which transforms are on, until another one is called."""
    return getattr(target, "__name__", None) in _OPENING


def is_enter_dual_level(target: Any) -> bool:
    """Tell whether a function in a graph of Dynamo's opens a level of forward-mode differentiation."""
    return getattr(target, "__name__", None) == "_enter_dual_level"


def is_exit_dual_level(target: Any) -> bool:
    """Tell whether a function in a graph of Dynamo's closes a level of forward-mode differentiation."""
    return getattr(target, "__name__", None) == "_exit_dual_level"


_LEAVING: dict[Any, Callable[[], int]] = {
    torch._C._functorch.TransformType.Vmap: torch._C._functorch._vmap_decrement_nesting,
    torch._C._functorch.TransformType.Grad: torch._C._functorch._grad_decrement_nesting,
    torch._C._functorch.TransformType.Jvp: torch._C._functorch._jvp_decrement_nesting,
    torch._C._functorch.TransformType.Functionalize: torch._C._functorch._func_decrement_nesting,
}


class TransformState:
    """Which transforms are on now, to be put back after an error: Dynamo's graphs have no ``finally``."""

    def __init__(self) -> None:
        functorch = torch._C._functorch
        self._depth = functorch.get_dynamic_layer_stack_depth()
        self._forward_grad = torch._C._is_fwd_grad_enabled()
        self._may_require_grad = functorch.get_inplace_requires_grad_allowed()
        self._hooks_disabled = saved_tensor_hooks_disabled()

    def restore(self, dual_levels: Sequence[int] = ()) -> None:
        """Leave the levels that were opened since; ``dual_levels`` are those of forward-mode differentiation."""
        functorch = torch._C._functorch
        for level in reversed(dual_levels):
            torch._C._exit_dual_level(level=level)
        while functorch.get_dynamic_layer_stack_depth() > self._depth:  # torch 2.11's own function leaves two at a time
            _LEAVING[functorch.peek_interpreter_stack().key()]()
        torch._C._set_fwd_grad_enabled(self._forward_grad)
        if functorch.get_inplace_requires_grad_allowed() != self._may_require_grad:
            functorch.set_inplace_requires_grad_allowed(self._may_require_grad)
        if saved_tensor_hooks_disabled() and not self._hooks_disabled:
            torch._C._autograd._saved_tensors_hooks_enable()


def is_batched(tensor: Tensor) -> bool:
    """Tell whether a tensor stands for several, in a vmap or a backward of batched gradients."""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


class BatchLevel:
    """A vmap that is running: of ``torch.func``, or the older one of ``is_grads_batched=True`` (``is_older``)."""

    def __init__(self, level: int, *, is_older: bool) -> None:
        self._level = level
        self._is_older = is_older

    def taken_apart(self, tensor: Tensor) -> Tensor | None:
        """Return the samples that ``tensor`` stands for, shape (samples, ...); None if it is one for all of them."""
        if not self._is_older:
            value, dimension = torch._C._functorch._unwrap_batched(tensor, self._level)
            return None if dimension is None else value.movedim(dimension, 0)
        if not torch._C._functorch.is_legacy_batchedtensor(tensor):
            return None
        # what has no samples at this level is expanded to as many as are asked for
        samples, others = (torch._remove_batch_dim(tensor, self._level, n, 0) for n in (1, 2))
        return None if samples.shape != others.shape else samples

    def put_together(self, samples: Tensor) -> Tensor:
        """Return a tensor that stands for ``samples``, shape (samples, ...), in this vmap."""
        if self._is_older:
            return torch._add_batch_dim(samples, 0, self._level)
        added: Tensor = torch._C._functorch._add_batch_dim(samples, 0, self._level)
        return added

    @contextmanager
    def left(self) -> Iterator[None]:
        """Leave the vmap for the length of a ``with`` block."""
        if self._is_older:
            torch._C._vmapmode_decrement_nesting()
            try:
                yield
            finally:
                torch._C._vmapmode_increment_nesting()
        else:
            with torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack():
                yield


def older_batch_level() -> BatchLevel | None:
    """Return the innermost vmap of the older kind that is running, None if there is none."""
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return BatchLevel(level, is_older=True) if level > 0 else None


def batch_level() -> BatchLevel | None:
    """Return the innermost transform of ``torch.func`` that is running if it is a vmap; None if it is another one."""
    if not transforms_active():
        return None
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if interpreter.key() != torch._C._functorch.TransformType.Vmap:
        return None
    return BatchLevel(interpreter.level(), is_older=False)


@contextmanager
def innermost_transform_left() -> Iterator[None]:
    """Leave one transform of ``torch.func`` for the length of a ``with`` block."""
    with torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack():
        yield


def below_innermost_transform(tensor: Tensor) -> Tensor | None:
    """Return what a tensor stands for outside of the innermost grad, vjp or jvp; None if that follows it.

    Tensors that are made under one belong to it, also those that it does not differentiate.
    """
    if (tensor.requires_grad and is_transformed(tensor)) or (forward_ad_active() and has_tangent(tensor)):
        return None
    interpreter = torch._C._functorch.peek_interpreter_stack()
    below: Tensor = torch._C._functorch._unwrap_for_grad(tensor, interpreter.level())
    return below


def has_tangent(tensor: Tensor | None) -> bool:
    """Tell whether forward-mode differentiation follows a tensor."""
    return tensor is not None and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def is_older_batched(tensor: Tensor) -> bool:
    """Tell whether a tensor stands for several in the older vmap."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def forward_ad_active() -> bool:
    """Tell whether a level of forward-mode differentiation is open."""
    return torch.autograd.forward_ad._current_level >= 0


def under_transform(
    peek: Callable[[], object] = torch._C._functorch.peek_interpreter_stack, forward_ad: Any = torch.autograd.forward_ad
) -> bool:
    """Tell whether a transform is running or such a level is open: both at once, for what is asked at each call."""
    return peek() is not None or forward_ad._current_level >= 0


class SettingsGuard:
    """Torch's C++ check of grad mode, autocast, determinism, precision, threads and default dtype, as they are now."""

    def __init__(self) -> None:
        guard = GlobalStateGuard()
        self.holds: Callable[[], bool] = guard.check
        self._reason: Callable[[], str] = guard.reason

    def reason(self) -> str | None:
        """Name what has changed since, in torch's words; None if nothing has."""
        return None if self.holds() else self._reason().strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """A flag of torch's backends that decides what a trace records, or that a function may read itself.

    ``read`` and ``write`` are torch's own functions, which take some 20 ns where the public ones take 100. Where
    ``chooses`` holds, the flag decides how some functions are traced, and entries check it at each call; others are
    read by kernels when they run, so that only entries check them whose code mentions one of the names ``read_as``.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    chooses: bool
    read_as: frozenset[str]

    def counts(self, names: Container[str]) -> bool:
        """Tell whether an entry checks it whose code mentions ``names``."""
        return self.chooses or any(name in names for name in self.read_as)


class Environment:
    """The environment variables as they were; shown by their number alone, since there may be secrets among them."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables

    @classmethod
    def now(cls) -> Environment:
        """Take them as they are."""
        return cls(dict(os.environ))

    def restore(self) -> None:
        """Make them what they were."""
        for name in set(os.environ) - set(self._variables):
            del os.environ[name]
        os.environ.update(self._variables)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Environment) and self._variables == other._variables

    def __hash__(self) -> int:
        return hash(frozenset(self._variables.items()))

    def __repr__(self) -> str:
        return f"<environment of {len(self._variables)} variables>"


def _switches() -> Iterator[Switch]:
    """List them. Attention, recurrences and norms are traced as other ops where another library may serve them."""
    c = torch._C
    gpu = torch.backends.cuda.is_built()
    plain: tuple[tuple[str, Callable[[], Any], Callable[[Any], object], bool], ...] = (
        ("cuda.flash_sdp_enabled()", c._get_flash_sdp_enabled, c._set_sdp_use_flash, True),
        ("cuda.math_sdp_enabled()", c._get_math_sdp_enabled, c._set_sdp_use_math, True),
        ("cuda.mem_efficient_sdp_enabled()", c._get_mem_efficient_sdp_enabled, c._set_sdp_use_mem_efficient, gpu),
        ("cuda.cudnn_sdp_enabled()", c._get_cudnn_sdp_enabled, c._set_sdp_use_cudnn, gpu),
        ("cuda.fp16_bf16_reduction_math_sdp_allowed()", c._get_math_sdp_allow_fp16_bf16_reduction,
         c._set_math_sdp_allow_fp16_bf16_reduction, True),
        ("cudnn.enabled", c._get_cudnn_enabled, c._set_cudnn_enabled, gpu),
        ("cudnn.benchmark", c._get_cudnn_benchmark, c._set_cudnn_benchmark, False),
        ("cudnn.deterministic", c._get_cudnn_deterministic, c._set_cudnn_deterministic, False),
        ("mkldnn.enabled", c._get_mkldnn_enabled, c._set_mkldnn_enabled, True),
        ("mkldnn.deterministic", c._get_mkldnn_deterministic, c._set_mkldnn_deterministic, False),
        # torch's own modules ask for it, but take the fast path under no function mode, and so under no trace
        ("mha.get_fastpath_enabled()", torch.backends.mha.get_fastpath_enabled,
         torch.backends.mha.set_fastpath_enabled, False),
    )  # fmt: skip
    for name, read, write, chooses in plain:
        last = name.rpartition(".")[2].removesuffix("()")
        yield Switch(name=f"torch.backends.{name}", read=read, write=write, chooses=chooses, read_as=frozenset((last,)))
    name = "fill_uninitialized_memory"
    read, write = c._get_deterministic_fill_uninitialized_memory, c._set_deterministic_fill_uninitialized_memory
    # Inductor writes it into its kernels, if deterministic algorithms are asked for
    yield Switch(
        name=f"torch.utils.deterministic.{name}", read=read, write=write, chooses=True, read_as=frozenset((name,))
    )
    if gpu:
        yield Switch(
            name="the order of torch.nn.attention's kernels",
            read=c._get_sdp_priority_order,
            write=c._set_sdp_priority_order,
            chooses=True,
            read_as=frozenset(),
        )
    # the older flags for the precision of float32 cannot be read where these contradict them
    readers = frozenset(("fp32_precision", "allow_tf32", "get_float32_matmul_precision"))
    for place, backend, op in (
        ("", "generic", "all"),
        *(("cuda." if op == "matmul" else "cudnn.", "cuda", op) for op in ("all", "matmul", "conv", "rnn")),
        *(("mkldnn.", "mkldnn", op) for op in ("all", "matmul", "conv", "rnn")),
    ):
        yield Switch(
            name=f"torch.backends.{place}{'' if op == 'all' else op + '.'}fp32_precision",
            read=functools.partial(c._get_fp32_precision_getter, backend, op),
            write=functools.partial(c._set_fp32_precision_setter, backend, op),
            chooses=gpu and (backend, op) == ("cuda", "conv"),  # Inductor writes it into its kernels
            read_as=readers,
        )


#: What a function reads by ``os.environ`` and `os.getenv` is guarded as the flags of torch's backends are.
ENVIRONMENT = Switch(
    name="os.environ",
    read=Environment.now,
    write=Environment.restore,
    chooses=False,
    read_as=frozenset(("environ", "getenv")),
)
SWITCHES: tuple[Switch, ...] = (*_switches(), ENVIRONMENT)
#: The names of functions and attributes by which code reads them.
SWITCH_NAMES = frozenset(name for switch in SWITCHES for name in switch.read_as)


def matmul_precision() -> str | None:
    """Read the precision of matrix products; None where torch refuses to, because newer settings contradict it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def tensor_guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Make a C++ check that as many tensors have the types, dtypes, devices, sizes, strides and so on of these.

    It also fails if two of them are the same object.
    """
    # one list of sizes and one of strides per tensor; the stubs say otherwise
    sizes: list[Any] = [list(t.shape) for t in tensors]
    strides: list[Any] = [list(t.stride()) for t in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


#: A view in C++ that functionalization takes for a fresh tensor.
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default

#: What `torch.fft.rfftn` and its like call first.
FFT_OF_REAL = torch.ops.aten._fft_r2c.default

#: What `torch.softmax` calls.
SOFTMAX = torch.ops.aten._softmax.default

#: By this op functionalization casts a result that is to take the place of a tensor of another dtype.
CAST = torch.ops.aten._to_copy.default

#: Which argument, the third of each, says that a decomposition's vectors are wanted, too.
VECTORS_FLAG = {torch.ops.aten._linalg_svd.default: "compute_uv", torch.ops.aten._linalg_eigh.default: "compute_v"}

#: The lazy conjugate of a tensor.
CONJUGATE = torch.ops.aten._conj.default

#: Ops that put parts into a tensor, which Inductor does in place if nothing reads the tensor later.
PUTS = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)

#: The same as the first of them, by eager's kernel.
PUT_BY_KERNEL = torch.ops.aten._index_put_impl.default

#: The namespaces of operators that are torch's own: they are known to compute the same again, but for those tagged.
TORCHS_OWN = frozenset(("aten", "prims", "prim", "inductor", "quantized", "quantized_decomposed", "mkldnn", "onednn"))

#: Ops that raise or return nothing; nobody uses what they return, and they must stay.
ASSERTIONS = frozenset(
    (
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten._assert_tensor_metadata.default,
        torch.ops.aten._linalg_check_errors.default,
    )
)


def unseen_by_dynamo(function: _Function) -> _Function:
    """Keep Dynamo from looking into what autograd calls in a backward, and into what that calls in turn.

    A backward in the middle of a compiled function is a graph break, after which Dynamo looks at each new frame.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function


class _OwnNode(torch.autograd.Function):
    """Hangs a node behind a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def with_own_node(tensor: Tensor) -> Tensor:
    """Return a new tensor, that nobody else has yet, behind an autograd node of its own."""
    if tensor.is_complex():  # `lift` has no derivative for complex numbers
        found: Tensor = _OwnNode.apply(tensor)  # type: ignore[no-untyped-call]  # untyped in torch
        return found
    return _lift(tensor)  # type: ignore[no-any-return]  # this very tensor


#: Hangs a node behind a tensor, in place.
_lift: Any = torch.ops.aten.lift.default._op


class _CommonNode(torch.autograd.Function):
    """Hangs one node behind several tensors; the gradients that do not come are None to it, and to their hooks."""

    @staticmethod
    def forward(ctx: Any, note: Callable[[Any], None] | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        results = tuple([tensor.detach() for tensor in tensors])
        if note is not None:  # it keeps them, as the node of an op like ``exp`` keeps what it made
            ctx.to_save = results
            note(ctx)
        return results

    @staticmethod
    @unseen_by_dynamo
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *gradients


def with_common_node(note: Callable[[Any], None] | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors behind one autograd node, as behind the results of one function.

    If there is a ``note``, `outputs_saved_by` finds them by the node, which it is given. Only a weak reference to it
    may be kept, if what is kept can be reached from the tensors.
    """
    return _CommonNode.apply(note, *tensors)  # type: ignore[no-any-return, no-untyped-call]  # untyped in torch


def viewing_function(name: str) -> Callable[[Tensor], Tensor]:
    """Make a custom Function that returns a view, by the name by which autograd's errors are to call it."""

    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @unseen_by_dynamo
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    made: Any = type(name, (torch.autograd.Function,), members)
    return made.apply  # type: ignore[no-any-return]  # untyped in torch


#: How `torch.overrides` names the reading of a version counter.
VERSION_GETTER = Tensor._version.__get__  # type: ignore[attr-defined]  # a getter

#: How it names the reading of what a tensor is a view of.
BASE_GETTER = Tensor._base.__get__  # type: ignore[union-attr]  # a getter


# --- autograd ----------------------------------------------------------------------------------------------------


def settle_without_gpus() -> None:
    """Where torch is built for CUDA and finds no GPU, have it take that in before a fake mode says otherwise.

    Entering a fake mode there registers eight GPUs for the whole process. That did two kinds of harm:

    - At its first backward autograd counts devices, once, and starts a thread for each; no child that is forked
      afterwards can differentiate. So one small backward comes first.
    - In torch 2.11 what is registered goes with the thread that registered it, and the next thread to enter a fake mode
      reads freed memory. So this thread registers it, which is the one that imports, and mostly the main one.
    """
    if not torch.backends.cuda.is_built() or torch.cuda.device_count():
        return
    with torch.inference_mode(False), torch.enable_grad(), no_dispatch_modes(), disable_torch_function():
        one = torch.ones((), requires_grad=True, device="cpu")
        torch.autograd.grad(one, one)
        with FakeTensorMode():
            pass


def sequence_number() -> int:
    """Return the number that the next autograd node will get."""
    return int(torch._C._autograd._get_sequence_nr())


def may_be_written(view: Tensor) -> bool:
    """Tell whether autograd lets ``view`` be written in grad mode, by what it is a view of and how it was made."""
    base = view._base
    if base is None or not base.requires_grad:
        return True
    return not base.is_leaf and keeps_through_writes(view)


def may_be_written_with_base(view: Tensor) -> bool:
    """Tell whether autograd lets ``view`` be written in grad mode, if its gradient is led to its base as eager does."""
    base = view._base
    if base is None or not base.requires_grad:
        return True
    return not base.is_leaf and _is_plain_view(view)


def is_hooked(tensor: Tensor) -> bool:
    """Tell whether something is called, or kept, when a gradient comes to a tensor."""
    return bool(tensor._backward_hooks) or tensor.retains_grad


def is_leaf_by_its_base(tensor: Tensor) -> bool:
    """Tell whether a tensor is a leaf that requires grad because what it is a view of does: a view of ``no_grad``."""
    return tensor.is_leaf and tensor.requires_grad and tensor._base is not None and tensor._base.requires_grad


def is_hooked_view(tensor: Tensor) -> bool:
    """Tell whether a tensor is a view with a history and hooks on it, which that history made anew goes past."""
    return bool(tensor._backward_hooks) and tensor._base is not None and not tensor.is_leaf


def keeps_through_writes(view: Tensor) -> bool:
    """Tell whether ``view`` can be used after a write that autograd does not see as it can be before."""
    base = view._base
    if base is None or not base.requires_grad:
        return True
    if view._backward_hooks:
        return False  # eager's gradient goes straight to the base then, past these hooks, and ours would not
    return _is_plain_view(view)


def _is_plain_view(view: Tensor) -> bool:
    """Tell whether autograd makes the history of a view again after a write; for other kinds, eager raises then."""
    return bool(torch._C._autograd._get_creation_meta(view) == torch._C._autograd.CreationMeta.DEFAULT)


def is_over_another(tensor: Tensor) -> bool:
    """Tell whether a tensor that requires grad is a view of one that does not, of which its views are views, too."""
    return tensor.requires_grad and tensor._base is not None and not tensor._base.requires_grad


def is_one_of_several_views(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is a view, or a view of one, that was made together with others, as by ``unbind``."""
    return _was_created(tensor, torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE)


def call_of_several_views(node: Any) -> tuple[str, tuple[Any, ...]] | None:
    """Return the view op with several results that an autograd node is for, and its arguments; None for other nodes."""
    kind = node.name()
    if kind not in ("SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0"):
        return None
    dim = node._saved_dim
    dim -= 2**64 if dim >= 2**63 else 0  # the node shows what counts from the end as an unsigned number
    if kind == "UnbindBackward0":
        return "aten.unbind.int", (dim,)
    if kind == "SplitBackward0":
        return "aten.split.Tensor", (int(node._saved_split_size), dim)
    return "aten.split_with_sizes.default", ([int(size) for size in node._saved_split_sizes], dim)


def is_view_by_custom_function(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is a view, or a view of one, that a user's `torch.autograd.Function` returned."""
    return _was_created(tensor, torch._C._autograd.CreationMeta.IN_CUSTOM_FUNCTION)


def was_made_under_no_grad(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is a view, or a view of one, that was made under `torch.no_grad` or inference mode."""
    kinds = torch._C._autograd.CreationMeta
    return _was_created(tensor, kinds.NO_GRAD_MODE) or _was_created(tensor, kinds.INFERENCE_MODE)


def _was_created(tensor: Tensor, how: Any) -> bool:
    return tensor._base is not None and torch._C._autograd._get_creation_meta(tensor) == how


def sequence_of(node: Any) -> int:
    """Return the number of an autograd node: the later it was made, the higher, and the earlier it runs."""
    return int(node._sequence_nr())


def current_node_sequence() -> int | None:
    """Return the number of the autograd node that is being run, None outside a backward."""
    node = current_node()
    return None if node is None else int(node._sequence_nr())


def current_node() -> Any:
    """Return the autograd node that is being run, None outside a backward."""
    return torch._C._current_autograd_node()


#: The autograd nodes of an extremum of all elements, which share its gradient out among those that are it.
_EXTREMA = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")


def fills_by_mask(mask: Tensor) -> bool:
    """Tell whether ``mask`` times a gradient is what eager's kernels write by that mask; it is so on the CPU."""
    if mask.dtype != torch.bool or mask.device.type != "cpu":
        return False
    node = current_node()
    return node is not None and node.name() in _EXTREMA


def is_to_be_run(node: Any) -> bool:
    """Tell whether the backward that is being run will come to an autograd node, or has."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return True  # a leaf whose gradient is asked for: there torch has no answer


def raise_of(node: Any, given: dict[int, Tensor]) -> None:
    """Run an autograd node that stands for an error (`always_raises`), which raises it."""
    numbers = sorted(given)
    edges = [torch.autograd.graph.GradientEdge(node, number) for number in numbers]
    torch.autograd.backward(edges, [given[number] for number in numbers], retain_graph=True)


def outputs_saved_by(node: Any) -> tuple[Tensor, ...]:
    """Return what the node of a custom function of ours saved of what it made, each with its history.

    Only the history matters here, so that a write to one of them since is no error.
    """
    try:
        found: tuple[Tensor, ...] = node.saved_tensors
    except RuntimeError as error:
        if not is_about_a_write(error):
            raise
        values = [data for raw in node._raw_saved_tensors if isinstance(data := raw.data, Tensor)]
        are_at = versions_of(values)
        try:
            return _at_saved_versions(node, values)
        finally:
            for value, version in zip(values, are_at, strict=True):
                set_version(value, version)
    return found


def _at_saved_versions(node: Any, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Count down the versions of what a node saved until autograd hands it out."""
    for version in range(max(versions_of(values)), -1, -1):
        for value in values:
            set_version(value, version)
        try:
            found: tuple[Tensor, ...] = node.saved_tensors
        except RuntimeError:
            continue
        return found
    return ()


def current_graph_task() -> int:
    """Return the number of the backward that is being run."""
    return int(torch._C._current_graph_task_id())


def leaf_of(node: Any) -> Tensor | None:
    """Return the leaf into which an autograd node accumulates; None if it is another node."""
    variable: Tensor | None = getattr(node, "variable", None)
    return variable


@contextlib.contextmanager
def arrivals(edges: Sequence[tuple[Any, int]], seen: list[tuple[Any, int]] | None) -> Iterator[None]:
    """Append those of ``edges`` that end at leaves to ``seen``, as their gradients arrive."""
    leaves = [] if seen is None else [(edge, getattr(edge[0], "variable", None)) for edge in edges]

    def listener(edge: tuple[Any, int]) -> Callable[[Tensor], None]:
        return lambda _: None if seen is None else seen.append(edge)

    with torch._C.DisableTorchFunction():
        handles = [
            leaf.register_hook(listener(edge)) for edge, leaf in leaves if leaf is not None and leaf.requires_grad
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def turns(count: int) -> list[int]:
    """Return in which order autograd serves ``count`` leaves that get their gradients from one node at once.

    It keeps what is ready in a heap, in which all leaves are equal: this is C++'s way to take the first of equals.
    """
    heap, order = list(range(count)), []
    while heap:
        order.append(heap[0])
        last = heap.pop()
        hole, length = 0, len(heap)
        while 2 * hole + 2 < length:
            heap[hole], hole = heap[2 * hole + 2], 2 * hole + 2
        if 2 * hole + 2 == length:
            heap[hole], hole = heap[2 * hole + 1], 2 * hole + 1
        if heap:
            heap[hole] = last
    return order


def is_copy_slices(node: Any) -> bool:
    """Tell whether an autograd node is that of a write to a view."""
    return type(node).__name__ == "CopySlices"


def accumulates(node: Any) -> bool:
    """Tell whether an autograd node adds to a leaf's gradient."""
    return type(node).__name__ == "AccumulateGrad"


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost ``saved_tensors_hooks`` as (pack, unpack), None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def foreign_saved_tensor_hooks() -> bool:
    """Tell whether ``saved_tensors_hooks`` are set that are not torch's own, and see what is saved now.

    Torch's own, which offload or compute again, unpack the values that they packed.
    """
    return torch.is_grad_enabled() and hooks_are_foreign()


def hooks_are_foreign() -> bool:
    """Tell whether ``saved_tensors_hooks`` are set that are not torch's own."""
    hooks = saved_tensor_hooks()
    if hooks is None:
        return False
    module: str = getattr(hooks[0], "__module__", type(hooks[0]).__module__)
    return module.split(".")[0] not in ("torch", "aotlab")


def saved_tensor_hooks_disabled() -> bool:
    """Tell whether setting ``saved_tensors_hooks`` is an error now."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


#: Sets saved_tensors_hooks; kept here because `replace_unguarded` replaces it.
push_saved_tensor_hooks = torch._C._autograd._push_saved_tensors_default_hooks


@contextlib.contextmanager
def saved_tensor_hooks_hidden() -> Iterator[None]:
    """Keep the caller's ``saved_tensors_hooks`` from seeing what is saved in the block."""
    if saved_tensor_hooks() is None:
        yield
    else:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield


def keeps_graph() -> bool:
    """Tell whether the backward that is running was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor``'s storage was written through tensors that share its counter."""
    return 0 if tensor.is_inference() else int(tensor._version)  # inference tensors do not count


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the versions of many tensors; none of them may be an inference tensor."""
    return [tensor._version for tensor in tensors]


def set_version(tensor: Tensor, version: int) -> None:
    """Set a tensor's version counter."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def has_its_memory_to_itself(tensor: Tensor) -> bool:
    """Tell whether no view or alias of ``tensor`` is alive, nor kept by an autograd node."""
    storage = tensor.untyped_storage()  # which counts for one beside the tensor
    return int(torch._C._storage_Use_Count(storage._cdata)) <= 2


def share_version(a: Tensor, b: Tensor) -> bool:
    """Tell whether a write to one tensor counts for the other: moves one counter, looks at the other, moves it back."""
    if a is b or a.is_inference() or b.is_inference() or a._version != b._version:
        return a is b
    before = a._version
    set_version(a, before + 1)
    shared = b._version == before + 1
    set_version(a, before)
    return shared


def is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor fills the memory between its first and its last element."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.numel() == last


class _Seen(Exception):  # noqa: N818  # a signal, not an error
    """Stops autograd behind one node."""


def run_node(
    node: Any, given: dict[int, Tensor], wanted: Sequence[tuple[Any, int]], *, create_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Run one autograd node alone, with autograd's preparations, and return its gradients as it makes them.

    ``given`` are gradients by the number of the forward output; ``wanted`` are edges behind the node. Autograd has no
    call for this: asked for the edges alone, it goes on to whatever lies between the node and them.
    """
    seen: list[tuple[Tensor | None, ...]] = []

    def look(gradients: tuple[Tensor | None, ...], _: Any) -> None:
        seen.append(gradients)
        raise _Seen

    numbers = sorted(given)
    handle = node.register_hook(look)
    try:
        torch.autograd.grad(
            [torch.autograd.graph.GradientEdge(node, number) for number in numbers],
            [torch.autograd.graph.GradientEdge(*edge) for edge in wanted],
            [given[number] for number in numbers],
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
    except _Seen:
        pass
    finally:
        handle.remove()
    return seen[0]


def edge_metadata(node: Any, number: int) -> tuple[tuple[int, ...], torch.dtype, torch.device]:
    """Return what the gradient looks like that an autograd node takes for one of its forward outputs."""
    described = node._input_metadata[number]
    return tuple(described.shape), described.dtype, described.device


def memory_window(first: Tensor, shift: int, count: int, dtype: torch.dtype) -> Tensor:
    """Make a one-dimensional tensor of memory that begins ``shift`` bytes behind the first byte of ``first``.

    It begins its own storage, so that compiled code may count from there, and it does not keep the memory alive.
    """
    storage = torch._C._construct_storage_from_data_pointer(
        first.data_ptr() + shift, first.device, count * dtype.itemsize
    )
    return torch.empty(0, dtype=dtype, device=first.device).set_(storage, 0, (count,), (1,))


def as_inference_tensor(tensor: Tensor) -> Tensor:
    """Return an inference tensor over the memory of ``tensor``, which nobody else holds."""
    with torch.inference_mode():
        fresh = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        fresh.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return fresh


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor of which ``tensor`` is a differentiable view."""
    return tensor._base


@functools.cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name.removeprefix("_raw") for name in dir(kind) if name.startswith("_raw_saved_"))


def _holds_tensor(saved: Any) -> bool:
    return isinstance(saved, Tensor) or (isinstance(saved, (tuple, list)) and any(map(_holds_tensor, saved)))


def saves_tensors(node: Any) -> bool:
    """Tell whether an autograd node keeps tensors for its backward, which a second backward would miss."""
    if is_checkpointed(node):
        return True
    try:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return bool(node.saved_tensors)
        kind: Any = type(node)
        if kind.__name__ == "CopySlices":  # a write to a view; autograd lets go of the node inside after one backward
            return True
        return any(_holds_tensor(getattr(node, name, None)) for name in _saved_names(kind))
    except Exception:  # noqa: BLE001  # it was written since, or the user's unpack raises: then it was saved
        return True


def keeps_unsaved(node: Any) -> bool:
    """Tell whether the node of a custom function may keep tensors unsaved, as attributes or in its backward's closure.

    Autograd does not let go of those after a backward.
    """
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    function: Any = type(node)._forward_cls  # type: ignore[attr-defined]  # set by the metaclass
    closures = [getattr(getattr(function, name, None), "__closure__", None) for name in ("backward", "vjp")]
    return bool(vars(node)) or any(closures)


def is_about_a_write(error: BaseException) -> bool:
    """Tell whether autograd raised an error because something that a node kept has been written."""
    return "modified by an inplace operation" in str(error)


def always_raises(node: Any) -> bool:
    """Tell whether an autograd node is one that stands for an error, as that of an op without a derivative."""
    return type(node).__name__ in ("NotImplemented", "DelayedError", "Error")


def kept_is_written(node: Any) -> bool:
    """Tell whether an autograd node may raise because a tensor that it keeps has been written since."""
    try:
        if is_checkpointed(node):
            for frame in _checkpoint_frames(node):
                _unpack_arguments(frame)
            return False
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return node.saved_tensors is None
        kind: Any = type(node)
        if kind.__name__ == "CopySlices":  # hides the node inside
            return True
        for name in _saved_names(kind):
            getattr(node, name, None)
    except RuntimeError:
        return True
    return False


def saved_tensors_of(node: Any) -> list[Tensor]:
    """Return the tensors that an autograd node keeps, as far as they can be seen; none if one was written since."""
    if is_checkpointed(node):
        return []
    try:
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            kept: tuple[Tensor | None, ...] = node.saved_tensors
            return [tensor for tensor in kept if tensor is not None]
        kind: Any = type(node)
        found = [getattr(node, name, None) for name in _saved_names(kind)]
    except Exception:  # noqa: BLE001  # the same
        return []
    flat: list[Tensor] = []
    for item in found:
        flat += [item] if isinstance(item, Tensor) else []
        flat += [t for t in item if isinstance(t, Tensor)] if isinstance(item, (tuple, list)) else []
    return flat


@functools.cache
def _raw_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def is_checkpointed(node: Any) -> bool:
    """Tell whether torch's checkpoint stands for what an autograd node keeps: to look at it runs the function again."""
    return next(_checkpoint_hooks(node), None) is not None


def _checkpoint_hooks(node: Any) -> Iterator[Any]:
    """Go through the hooks by which checkpoint computes once more what an autograd node keeps."""
    kind: Any = type(node)
    for name in _raw_names(kind):
        try:
            saved = getattr(node, name, None)
        except RuntimeError:  # autograd has let go of it
            continue
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            hook: Any = getattr(each, "unpack_hook", None)
            if getattr(hook, "__module__", None) == "torch.utils.checkpoint":
                yield hook


def _checkpoint_frames(node: Any) -> list[Any]:
    """Return what stands for the runs of checkpointed functions that an autograd node needs."""
    return [cell.cell_contents for hook in _checkpoint_hooks(node) for cell in hook.__closure__ or ()]


def kept_by_checkpoint(node: Any) -> list[Tensor]:
    """Return the arguments of the checkpointed function that an autograd node would run again to have what it keeps.

    Checkpoint keeps them as autograd would, and looks at their versions; they are had from the hook that it sets.
    """
    found: dict[int, Tensor] = {}
    for frame in _checkpoint_frames(node):
        with contextlib.suppress(RuntimeError):  # one of them was written since: the backward raises
            found.update((id(t), t) for t in _unpack_arguments(frame))
    return list(found.values())


class _RecomputedError(RuntimeError):
    """What a checkpoint keeps is computed again by one around it, which keeps something else."""


@contextlib.contextmanager
def _nothing_computed_again() -> Iterator[None]:
    """Let a checkpoint of this thread raise where it would run its function again: only backwards may."""
    module: Any = sys.modules["torch.utils.checkpoint"]
    before, thread = module._recomputation_hook, threading.get_ident()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise _RecomputedError
        return before(*args, **kwargs)

    module._recomputation_hook = refuse
    try:
        yield
    finally:
        module._recomputation_hook = before


def _unpack_arguments(frame: Any) -> list[Tensor]:
    """Return what a frame of checkpoint keeps: as saved tensors, before torch 2.13 as those of an autograd node.

    What lies in a checkpoint around it is not kept.
    """
    with _nothing_computed_again():
        if hasattr(frame, "saved_args"):
            found = []
            for each in frame.saved_args:
                if hasattr(each, "unpack"):
                    with contextlib.suppress(_RecomputedError):
                        found.append(each.unpack())
            return found
        if hasattr(frame, "input_saver"):
            with contextlib.suppress(_RecomputedError):
                return list(frame.input_saver.grad_fn.saved_tensors[1:])  # the first is checkpoint's own
        return []


def storage_key(tensor: Tensor) -> int:
    """Return a number that tensors on one storage share, as long as one of them lives."""
    return int(tensor.untyped_storage()._cdata)


# --- Dynamo and Inductor, loaded late ----------------------------------------------------------------------------


def dynamo_disable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo from looking into ``function``."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]  # untyped in torch


def no_dispatch_modes() -> AbstractContextManager[Any]:
    """Let no mode see what is run: neither a trace a real kernel in its middle, nor the caller's modes a trace."""
    return _disable_current_modes()


def recurrent_layers_captured() -> AbstractContextManager[Any]:
    """Let Dynamo capture LSTM, GRU and RNN, which it leaves to eager by itself."""
    from torch._dynamo import config

    return config.patch(allow_rnn=True)  # type: ignore[no-any-return]  # untyped in torch


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions that Inductor traces with under its present configuration."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def inductor_draws_as_eager() -> bool:
    """Tell whether Inductor is set to take random numbers from torch's generators, op by op."""
    from torch._inductor import config

    return bool(config.fallback_random)


def eager_draws_by_inductor() -> AbstractContextManager[Any]:
    """Set Inductor to that for the length of a block."""
    from torch._inductor import config

    return config.patch(fallback_random=True)  # type: ignore[no-any-return]  # untyped in torch


def inductor_keeps_draws_in_order() -> bool:
    """Tell whether Inductor lets what draws from a generator draw in the order of the graph; torch 2.11's does not."""
    from torch._inductor.fx_passes import post_grad

    return hasattr(post_grad, "_chain_random_ops_for_ordering")


def is_inductors_draw(target: Any) -> bool:
    """Tell whether an op is one of Inductor's own, which makes random numbers of a seed."""
    from torch._inductor import inductor_prims

    return target in (inductor_prims.random, inductor_prims.randint)


def inductor_joint_passes(module: fx.GraphModule, fake_mode: FakeTensorMode, *, exact_random: bool) -> None:
    """Run Inductor's pattern matching over a joint or inference graph, in place."""
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    with (
        config.patch(fallback_random=exact_random),
        V.set_fake_mode(fake_mode),
        _constants_allowed(fake_mode),
        fake_mode,
    ):
        joint_graph_passes(module)


def inductor_replace_random(module: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
    """Let random ops take their numbers from seeds, in place; this is one of the joint-graph passes."""
    from torch._inductor import config
    from torch._inductor.fx_passes.replace_random import replace_random_passes
    from torch._inductor.virtualized import V

    with config.patch(fallback_random=False), V.set_fake_mode(fake_mode), fake_mode:
        replace_random_passes(module)


@contextlib.contextmanager
def _constants_allowed(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Let ops on fake tensors take real ones too, which a graph's constants are."""
    before = fake_mode.allow_non_fake_inputs
    fake_mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        fake_mode.allow_non_fake_inputs = before


@contextlib.contextmanager
def tracing_context(fake_mode: FakeTensorMode) -> Iterator[None]:
    """Give Inductor the context in which it expects to find the fake mode."""
    with tracing(TracingContext(fake_mode)):
        yield


def inductor_compile(
    module: fx.GraphModule,
    example_inputs: Sequence[Tensor],
    *,
    fake_mode: FakeTensorMode,
    is_inference: bool,
    is_backward: bool,
    static_inputs: Sequence[int],
    graph_id: int,
    shared: dict[str, Any],
    exact_random: bool,
) -> Any:
    """Compile one graph by Inductor's inner entry and return its boxed callable.

    ``shared`` is what the forward and the backward of one entry have in common; it is filled here at first use.
    With ``exact_random`` random ops take their numbers from torch's generators, as eager does; else from a seed each.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    if not shared:
        shared["cudagraphs"] = BoxedBool(config.triton.cudagraphs)
        shared["boxed_forward_device_index"] = BoxedDeviceIndex(None)
    with (
        config.patch(fallback_random=exact_random),
        V.set_fake_mode(fake_mode),
        _constants_allowed(fake_mode),
        _lowered(module),
        _falling_back(),
        _writes_before_reads(),
        fake_mode,
    ):
        return compile_fx_inner(
            module,
            list(example_inputs),
            is_inference=is_inference,
            is_backward=is_backward,
            static_input_idxs=list(static_inputs),
            graph_id=graph_id,
            **shared,
        )


_ordering = threading.local()


@functools.cache
def _remember_writes() -> None:
    """Let nodes of Inductor's scheduler, in the block of `_writes_before_reads`, keep what they know of writes."""
    from torch._inductor.scheduler import SchedulerNode

    recompute = SchedulerNode.recompute_size_and_body

    @functools.wraps(recompute)
    def recompute_and_rename(self: Any, *args: Any, **kwargs: Any) -> None:
        recompute(self, *args, **kwargs)
        if getattr(_ordering, "active", False):
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_and_rename  # type: ignore[method-assign]


@contextlib.contextmanager
def _writes_before_reads() -> Iterator[None]:
    """Let Inductor's C++ kernels read a buffer after the op in place that fills it.

    Inductor writes the results of ``bernoulli``, ``index_put``, ``scatter`` and others in place. Where it fits a loop
    to another one, to fuse both, it forgets that the loop reads what such an op wrote (torch 2.11 to 2.14), and may
    run the loop first: a mask of dropout is read before it is drawn. Kernels that were cached without this are not
    used.
    """
    from torch.compiler import config

    _remember_writes()
    before = getattr(_ordering, "active", False)
    _ordering.active = True
    try:
        with config.patch(cache_key_tag=f"{config.cache_key_tag}aotlab: writes before reads"):  # type: ignore[attr-defined]
            yield
    finally:
        _ordering.active = before


@contextlib.contextmanager
def _lowered(module: fx.GraphModule) -> Iterator[None]:
    """Let Inductor call the kernels of ops that it expects to be decomposed; by itself it refuses to."""
    from torch._inductor import lowering
    from torch._inductor.decomposition import decompositions

    found = {node.target for node in module.graph.nodes if isinstance(node.target, OpOverload)}
    missing = [op for op in found if op in decompositions and op not in lowering.lowerings]
    lowering.lowerings.update({op: lowering.fallback_handler(op, add_to_fallback_set=False) for op in missing})
    try:
        yield
    finally:
        for op in missing:
            lowering.lowerings.pop(op, None)


@contextlib.contextmanager
def _falling_back() -> Iterator[None]:
    """Let Inductor call kernels of ops that torch can also decompose, under the environment variable ``CI`` too.

    `torch.compile` decomposes some of them (``upsample_bilinear2d``) above autograd, in a way of its own; where the
    variable is set, Inductor takes a call of such an op for a mistake of its own lowerings.
    """
    from torch._inductor import graph

    names = vars(graph)
    make_fallback = names["make_fallback"]
    names["make_fallback"] = functools.partial(make_fallback, warn=False)
    try:
        yield
    finally:
        names["make_fallback"] = make_fallback


def inductor_source(compiled: Any) -> str | None:
    """Return the Python that Inductor wrote for a compiled graph, None if it wrote none."""
    source = getattr(compiled, "source_code", None)
    return source if isinstance(source, str) and source else None


# --- Dynamo, as a notebook's cells need it -----------------------------------------------------------------------

#: How Dynamo names the function that holds the rest of a frame after a graph break.
RESUME_PREFIX = "torch_dynamo_resume_in_"


@contextlib.contextmanager
def dynamo_settings(*, exact: bool) -> Iterator[None]:
    """Let Dynamo capture as little as keeps eager's meaning, and run by itself whatever it cannot capture.

    Assertions stay Python's, numpy stays numpy, numbers are never made symbolic, and an error while capturing leaves
    the frame to Python. With ``exact`` Dynamo does not capture what torch's optimizers compute otherwise for it than
    for eager.
    """
    from torch._dynamo import config

    changes = {
        "suppress_errors": True,
        "trace_numpy": False,
        "rewrite_assert_with_torch_assert": False,
        "automatic_dynamic_shapes": False,
    }
    with config.patch(changes), _eager_optimizers() if exact else contextlib.nullcontext():
        yield


@functools.cache
def _optimizer_modules() -> tuple[tuple[Any, Any], ...]:
    """Return the modules whose optimizers ask a step counter for its number, each with a form that Dynamo leaves."""
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.optim.")]
    return tuple((m, torch.compiler.disable(m._get_value)) for m in modules if hasattr(m, "_get_value"))


@contextlib.contextmanager
def _eager_optimizers() -> Iterator[None]:
    before = [(module, module._get_value) for module, _ in _optimizer_modules()]
    for module, replacement in _optimizer_modules():
        module._get_value = replacement
    try:
        yield
    finally:
        for module, original in before:
            module._get_value = original


def module_call() -> Callable[..., Any]:
    """Return what ``torch.nn.Module.__call__`` calls; a class's own ``__call__`` is dear to replace."""
    return torch.nn.Module._call_impl


def set_module_call(call: Callable[..., Any]) -> None:
    """Let ``torch.nn.Module.__call__`` call something else."""
    torch.nn.Module._call_impl = call  # type: ignore[method-assign]


def in_guard(frame: types.FrameType | None) -> bool:
    """Tell whether a frame belongs to the making or the check of a guard of Dynamo's."""
    from torch._dynamo import guards

    while frame is not None and frame.f_code.co_filename != guards.__file__:
        frame = frame.f_back
    return frame is not None


def unmark_static(tensor: Tensor) -> None:
    """Take away the mark that Dynamo leaves on parameters, buffers and what optimizers keep."""
    tensor.__dict__.pop("_dynamo_static_input_type", None)


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

    every = list(CleanupManager.instance.values.values())
    return [hook for hooks in every for hook in hooks if hook.scope is scope]


def as_made_by_dynamo(wrapper: _Function) -> _Function:
    """Let Dynamo take a function that was given the attributes of a compiled one for that one, and not look into it."""
    wrapper._torchdynamo_wrapper_id = id(wrapper)  # type: ignore[attr-defined]
    return wrapper


def innermost_backend(backend: object) -> object:
    """Return the function that ``torch.compile`` was given as a backend, without what it has put around it."""
    for _ in range(8):  # it has put a few around; an object that has every attribute would never end
        inner = getattr(backend, "_torchdynamo_orig_backend", None) or getattr(backend, "compiler_fn", None)
        if inner is None:
            inner = backend.func if isinstance(backend, functools.partial) else None
        if inner is None:
            break
        backend = inner
    return backend


def hear_refused_transforms(hear: Callable[[object, types.CodeType, dict[str, Any], dict[str, Any]], None]) -> None:
    """Call ``hear`` from now on with each frame that Dynamo refuses as it runs under a transform of ``torch.func``.

    It gets what holds the backend, one for each ``torch.compile``, the frame's code, its local and global variables.
    Dynamo has no hook for such frames, and asks no backend; so this puts another function in place of the one that
    refuses them, for the whole process. It refuses the same.
    """
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.symbolic_convert import InstructionTranslator

    refuse = InstructionTranslator._throw_if_in_functorch

    @functools.wraps(refuse)
    def refuse_and_tell(translator: InstructionTranslator) -> None:
        try:
            refuse(translator)
        except Unsupported:
            output = translator.output
            hear(output.compiler_fn, translator.f_code, output.local_scope, output.global_scope)
            raise

    setattr(InstructionTranslator, refuse.__name__, refuse_and_tell)


def leaves_padding_out(module: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a module called with these arguments takes eager's way without padded places.

    `torch.nn.TransformerEncoder` does where nothing is differentiated: it returns zeros at padded places, and as many
    places as the longest sequence has. A trace and Dynamo take the other way. Dynamo's variables stand for arguments.
    """
    if not isinstance(module, torch.nn.TransformerEncoder) or not module.use_nested_tensor:
        return False
    mask = kwargs.get("src_key_padding_mask", args[2] if len(args) > 2 else None)
    if mask is None or getattr(mask, "value", mask) is None or module.layers[0].training:
        return False
    return not (torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()))


def let_dynamo_follow_eager(is_ours: Callable[[object], bool]) -> None:
    """Let Dynamo see, where it captures for a backend of ours, what it passes over otherwise (torch 2.11 to 2.15).

    - It guards that modules have no hooks; by default it does not look whether there are some by now.
    - It breaks the graph at ``ctx.set_materialize_grads``, which it forgets.
    - It breaks the graph at numpy's random functions, which it would let draw from, and seed, torch's generator.
    - Where it does not trace numpy, it leaves arrays to Python; by itself it writes ``array += 1`` while it captures.
    - It leaves a transformer's encoder to Python that leaves padded places out.

    ``is_ours`` gets what `innermost_backend` returns. There are no hooks for this in Dynamo; so this puts other methods
    in the place of five, for the whole process. For other backends they do the same as before.
    """
    from torch._dynamo import config, variables
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator
    from torch._dynamo.variables import builder, misc

    def ours(output: Any) -> bool:
        return is_ours(innermost_backend(getattr(output, "compiler_fn", None)))

    def break_graph(what: str, why: str) -> NoReturn:
        unimplemented(gb_type=f"aotlab: {what}", context=what, explanation=why, hints=[])

    guards: Any = GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT
    context: Any = misc.AutogradFunctionContextVariable
    attribute = next(name for name in ("var_getattr", "tp_getattro_impl") if name in vars(context))  # torch 2.15's last
    looks_up: Any = getattr(context, attribute)
    numpy: Any = misc.NumpyVariable
    calls: Any = numpy.call_function
    wraps: Any = builder.VariableBuilder._wrap
    arrays = getattr(getattr(builder, "np", None), "ndarray", ())  # none without numpy
    translator: Any = InliningInstructionTranslator
    inlines: Any = translator.inline_call
    encoder = torch.nn.TransformerEncoder.forward.__code__

    @functools.wraps(guards)
    def guard_hooks(self: Any, guard: Any) -> None:
        (self.SEQUENCE_LENGTH if ours(self.check_fn_manager.output_graph) else functools.partial(guards, self))(guard)

    @functools.wraps(looks_up)
    def look_up(self: Any, tx: Any, name: Any, *more: Any) -> Any:
        if name == "set_materialize_grads" and ours(tx.output):
            break_graph("ctx.set_materialize_grads", "Dynamo forgets it: the backward would get zeros for None.")
        return looks_up(self, tx, name, *more)

    @functools.wraps(calls)
    def call(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        with config.patch(use_numpy_random_stream=True) if ours(tx.output) else contextlib.nullcontext():
            return calls(self, tx, *args, **kwargs)

    @functools.wraps(wraps)
    def wrap(self: Any, value: Any) -> Any:
        if isinstance(value, arrays) and not config.trace_numpy and ours(self.tx.output):
            break_graph("a numpy array", "Dynamo would compute with it, and write it, while it captures.")
        return wraps(self, value)

    def inline(parent: Any, func: Any, args: Any, kwargs: Any, *more: Any, **others: Any) -> Any:
        is_encoder = isinstance(func, variables.UserFunctionVariable) and func.get_code() is encoder
        if is_encoder and ours(parent.output) and leaves_padding_out(getattr(args[0], "value", None), args[1:], kwargs):
            set_code_exec_strategy(encoder, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))
            break_graph(
                "TransformerEncoder with a padding mask",
                "Eager leaves padded places out where nothing is differentiated; Dynamo does not.",
            )
        return inlines(parent, func, args, kwargs, *more, **others)

    GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT = guard_hooks  # type: ignore[method-assign]
    setattr(context, attribute, look_up)
    numpy.call_function = call
    builder.VariableBuilder._wrap = wrap  # type: ignore[method-assign]
    translator.inline_call = staticmethod(inline)


def dynamo_makes_symbols() -> bool:
    """Tell whether Dynamo makes a symbol of each size, as it does under ``torch.compile(…, dynamic=True)``."""
    from torch._dynamo import config

    return not config.assume_static_by_default


def dynamo_reasons() -> dict[str, int]:
    """Return what Dynamo has counted so far of the reasons for which it did not go on capturing."""
    from torch._dynamo.utils import counters

    kinds = ("graph_break", "unimplemented")
    return {str(reason): count for kind in kinds for reason, count in counters[kind].items()}


@functools.cache
def log_handlers() -> tuple[logging.Handler, ...]:
    """Return the handlers that print what torch logs; torch sets them up when Dynamo is imported."""
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith("torch")]
    return tuple(dict.fromkeys(handler for logger in loggers for handler in logger.handlers))


def dynamo_compile_id() -> tuple[int | None, str]:
    """Return Dynamo's number for the code that it is compiling, or None, and the name of this compilation."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return (None, "") if current is None else (current.frame_id, str(current))


def dynamo_recompile_reasons() -> dict[str, str]:
    """Return, by the name of a compilation, why the earlier compilations of the same code did not serve."""
    from torch._dynamo.utils import get_compilation_metrics

    return {
        str(each.compile_id): str(each.recompile_reason)
        for each in get_compilation_metrics()
        if each.compile_id is not None and getattr(each, "recompile_reason", None)
    }


# --- the databases of samples that ship in torch, loaded when first asked for --------------------------------------


@contextlib.contextmanager
def _testing_leaves_no_trace() -> Iterator[None]:
    """Put back what importing torch's own test helpers changes in the whole process."""
    flags = torch.backends.disable_global_flags.__globals__  # they call it, which forbids assigning to such flags
    allowed = flags["__allow_nonbracketed_mutation_flag"]
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    random_state = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        flags["__allow_nonbracketed_mutation_flag"] = allowed
        torch.set_rng_state(random_state)
        if cache is None:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


@functools.cache
def op_database() -> tuple[Any, ...]:
    """Return torch's OpInfo entries: each an operator with what it supports and samples of its arguments.

    Raises
    ------
    UsageError
        A package that torch's own tests need is not installed.
    """
    try:
        with _testing_leaves_no_trace():
            from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as error:
        raise _testing_not_there(error) from error
    return tuple(op_db)


@functools.cache
def module_database() -> tuple[Any, ...]:
    """Return torch's ModuleInfo entries: each a module class with samples of how it is made and called.

    Raises
    ------
    UsageError
        A package that torch's own tests need is not installed.
    """
    try:
        with _testing_leaves_no_trace():
            from torch.testing._internal.common_modules import module_db
    except ModuleNotFoundError as error:
        raise _testing_not_there(error) from error
    return tuple(module_db)


@contextlib.contextmanager
def samples_do_not_seed() -> Iterator[None]:
    """Let the database's random operators draw from the generator as it is; they would seed it at every call."""
    import torch.testing._internal.common_methods_invocations

    entries: Any = torch.testing._internal.common_methods_invocations

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    seeding = entries.wrapper_set_seed
    entries.wrapper_set_seed = call
    try:
        yield
    finally:
        entries.wrapper_set_seed = seeding


def _testing_not_there(error: ModuleNotFoundError) -> UsageError:
    return UsageError(
        f"torch's database of operators needs the package {error.name!r}, which is not installed: "
        "pip install 'aotlab[ops]'"
    )


def has_effects(op: OpOverload | HigherOrderOperator) -> bool:
    """Tell whether an op was registered as one with effects besides its results, as `torch.ops.aten._print`."""
    from torch._higher_order_ops.effects import has_effects as registered

    return bool(registered(op))


def marked_budget(meta: dict[str, Any]) -> float | None:
    """Return the budget by which ``torch.autograd.graph.region_activation_memory_budget`` marked a node, if it did."""
    custom = meta.get("custom")
    return custom.get("_region_activation_memory_budget") if isinstance(custom, dict) else None
