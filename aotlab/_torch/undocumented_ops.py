"""Ops that torch does not document, and the choice of kernels for an op."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch._decomp.decompositions import upsample_compute_output_size
from torch._ops import HigherOrderOperator, OpOverload

from aotlab._torch.replaced import replaced

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Makes a `functools.partial`. It returns the same object for the same function and arguments, so that caches that have
#: the object as a key find it again.
_bound = functools.lru_cache(maxsize=256)(partial)

#: The ops of ``bilinear``, ``affine_grid`` and ``pinv``. Under autocast their kernels compute in a lower precision,
#: because they call matrix products, whose arguments autocast casts.
CASTS_INSIDE: tuple[OpOverload, ...] = (
    torch.ops.aten._trilinear.default, torch.ops.aten.affine_grid_generator.default,
    torch.ops.aten.linalg_pinv.atol_rtol_tensor,
)  # fmt: skip
#: The function behind ``torch.nn.functional.one_hot``.
ONE_HOT = torch._C._nn.one_hot
#: The ops that compute batch norm. Most are private. The normalized tensor is the first result.
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
#: The function that Dynamo's graphs call for ``tensor.data``. Function modes do not see it.
DATA_OF: Callable[[Tensor], Tensor] = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]  # not in the stubs
#: The op that torch 2.15's Dynamo writes for ``x.data = y``. Earlier versions write the assignment itself.
SETS_DATA: Any = getattr(torch.ops.aten, "shallow_copy_data_", None)


def lowers_version(target: Any) -> bool:
    """Tell whether Dynamo of older torches calls this function after ``set_``, for an assignment to ``.data``."""
    return getattr(target, "__name__", "") == "_lower_version_count_by_1"


#: The op that Dynamo writes for a custom autograd function. If a graph with this op runs without compilation, the op
#: stores all tensors in a closure, and a backward does not free them.
FUNCTION_APPLY: HigherOrderOperator = torch._functorch.autograd_function.autograd_function_apply
#: The ``apply`` of `torch.autograd.Function` in C++. The ``apply`` in Python also checks whether a transform is active.
#: Compiled calls do not need this check, because the guards of an entry have already checked it.
APPLY_OF_C: Any = torch._C._FunctionBase.__dict__["apply"]
#: An op whose result is a view of its argument, although functionalization and autograd treat it as a new tensor.
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
#: The op that `torch.fft.rfftn` and similar functions call first.
FFT_OF_REAL = torch.ops.aten._fft_r2c.default
#: The ops that `torch.profiler.record_function` calls on entry and exit. Function modes do not see them.
PROFILER_MARKS: tuple[OpOverload, ...] = (
    torch.ops.profiler._record_function_enter_new.default, torch.ops.profiler._record_function_exit._RecordFunction,
)  # fmt: skip
#: The op that `torch.softmax` calls.
SOFTMAX = torch.ops.aten._softmax.default
#: The op by which functionalization casts a result that is written to a tensor of another dtype.
CAST = torch.ops.aten._to_copy.default
#: Ops that decompose a matrix, each with the name of its third argument. This argument says whether the op computes
#: vectors, or only values.
VECTORS_FLAG = {torch.ops.aten._linalg_svd.default: "compute_uv", torch.ops.aten._linalg_eigh.default: "compute_v"}
#: The op that returns the lazy conjugate of a tensor, a view with the conjugate bit.
CONJUGATE = torch.ops.aten._conj.default
#: Ops that put values into a copy of a tensor. Inductor puts them into the tensor itself if nothing reads it later.
PUTS = (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default)
#: The op that calls eager's kernel of ``index_put``.
PUT_BY_KERNEL = torch.ops.aten._index_put_impl.default
#: The namespaces of torch's own ops. If such an op runs again, it computes the same result, unless torch has tagged it
#: as random. A custom op may return another result.
TORCHS_OWN = frozenset(("aten", "prims", "prim", "inductor", "quantized", "quantized_decomposed", "mkldnn", "onednn"))
#: The op of `Tensor.item`, and the op that raises if a number is false.
ITEM = torch.ops.aten._local_scalar_dense.default
ASSERT_SCALAR = torch.ops.aten._assert_scalar.default
#: Ops that raise if a condition is false. They must stay in a graph although their results are not used.
ASSERTIONS = frozenset(
    (
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
        ASSERT_SCALAR,
        torch.ops.aten._assert_tensor_metadata.default,
        torch.ops.aten._linalg_check_errors.default,
    )
)
#: The higher-order op around an op with side effects, and the ops at both ends of the chain of their tokens.
WITH_EFFECTS: HigherOrderOperator = torch.ops.higher_order.with_effects
MAKE_TOKEN, SINK_TOKENS = torch.ops.prims._make_token.default, torch.ops.prims._sink_tokens.default
#: The op by which eager runs one layer of an LSTM with oneDNN.
ONEDNN_RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
#: The name of our op that runs it with grad mode on.
KEEPING_RNN_LAYER = "aotlab::onednn_rnn_layer"
#: Lets composite ops run their C++ decompositions in a block, as eager does, and not those that Python registers.
no_python_dispatcher: Callable[[], AbstractContextManager[None]] = torch._C._DisablePythonDispatcher
#: The functions that read or set the state of random generators.
_RANDOM_STATE = ("manual_seed", "seed", "set_rng_state", "get_rng_state", "initial_seed")


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Switch oneDNN off for a block. The public context manager warns."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@functools.cache
def _rewritten_in_python() -> tuple[tuple[OpOverload, set[str], dict[Any, Any], dict[Any, Any]], ...]:
    """List the ops for which torch has a decomposition in Python at autograd's dispatch keys, for `eager_kernels`.

    Each row has an op, the names of its packet and overload, the Python kernels without these decompositions, and an
    empty dispatch cache. A few ops are left out because a trace needs their decompositions: the decomposition of batch
    norm shows that the statistics are written, and the one of ``one_hot`` reads no values.
    """
    needed = ("native_batch_norm", "cudnn_batch_norm", "one_hot")
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name not in needed]
    found: list[Any] = []
    for op in [getattr(p, o) for p in packets if hasattr(p, "overloads") for o in p.overloads()]:
        kernels = {k: f for k, f in op.py_kernels.items() if k not in (composite, torch._C.DispatchKey.Autograd)}
        if len(kernels) < len(op.py_kernels):
            if op._overloadname == "vec" and composite in op.py_kernels:
                kernels[composite] = partial(_upsampled, getattr(torch.ops.aten, op._opname).default)
            found.append((op, {op._overloadname, op._opname}, kernels, {}))
    return tuple(found)


def _upsampled(kernel: OpOverload, x: Tensor, size: Any, *rest: Any) -> Any:
    """Upsample as eager's C++ code does, but to a size that may be symbolic. The C++ code would specialize the size."""
    *flags, scales = rest
    sizes = upsample_compute_output_size(x.size(), size, scales)
    return kernel(x, sizes, *flags, *(scales or [None] * len(sizes)))


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    """Compute dropout with one op, as torch's decomposition does.

    If nothing is dropped, return the tensor itself, as eager does; torch's decomposition copies it.
    """
    return torch.ops.aten.native_dropout(x, p, train)[0] if train and p else x


@contextlib.contextmanager
def eager_kernels(*, but: Sequence[str] = ()) -> Iterator[None]:
    """Keep torch's Python dispatcher from decomposing ops in a block, so that they round as in eager.

    For symbolic shapes, torch registers Python decompositions of upsampling, recurrent layers, dropout and a few
    activations. They are registered at autograd's dispatch keys, so that they replace the C++ code in every trace. The
    block removes them, and restores them at its end. It keeps them for the ops and overloads whose names are in
    ``but``; ``"vec"`` is the name of upsampling's overloads.

    In the block, functionalization also decomposes composite ops. This matters in inference mode. Otherwise autograd
    has already decomposed them.
    """
    ordinary, composite = OpOverload._get_dispatch, torch._C.DispatchKey.CompositeImplicitAutograd

    def dispatch(op: OpOverload, key: Any) -> Any:
        if key == torch._C.DispatchKey.Functionalize and has_composite_kernel_only(op, "cpu"):
            return op._dispatch_cache.setdefault(key, op.py_kernels.get(composite, composite))
        return ordinary(op, key)

    changed = [(op, kernels, cache) for op, names, kernels, cache in _rewritten_in_python() if names.isdisjoint(but)]
    if "dropout" in but:
        changed.append((torch.ops.aten.dropout.default, {composite: _dropout}, {}))
    before = [(op, op.py_kernels, op._dispatch_cache) for op, _, _ in changed]
    try:
        for op, kernels, cache in changed:
            op.py_kernels, op._dispatch_cache = kernels, cache
        with replaced(OpOverload, "_get_dispatch", dispatch):
            yield
    finally:
        for op, kernels, cache in before:
            op.py_kernels, op._dispatch_cache = kernels, cache


def has_composite_kernel_only(op: OpOverload, device_type: str) -> bool:
    """Tell whether ``op`` has no kernel on a device and is computed by calls of other ops.

    A trace must record these other ops in place of ``op``.
    """
    backend = device_type.upper() if device_type in ("cpu", "cuda") else "CPU"
    # users may add kernels to their own ops at any time, so the cached answer is only for torch's ops
    has_kernel = _has_kernel if op.namespace in TORCHS_OWN else _has_kernel.__wrapped__
    return not has_kernel(op, backend) and op._can_decompose()


@functools.cache
def _has_kernel(op: OpOverload, key: str) -> bool:
    # Some overloads belong to TorchScript, work on lists and numbers, and are unknown to the dispatcher.
    return torch._C._dispatch_has_kernel(op.name()) and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def _calling_higher_order_op(frame: types.FrameType | None) -> str | None:
    """Return the name of the higher-order op that called this frame, or None if no such op is running."""
    name = None
    while frame is not None and ("_higher_order_ops" in (file := frame.f_code.co_filename) or "flex_attention" in file):
        name, frame = frame.f_code.co_name, frame.f_back
    return name


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random ops on a device use by default."""
    if device.type == "cuda":
        number: int | None = device.index  # the stubs forget that the index may be None
        return torch.cuda.default_generators[torch.cuda.current_device() if number is None else number]
    return torch.default_generator


def _functionalizes() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Functionalize)


def _called_by_checkpoint() -> bool:
    """Tell whether torch's checkpoint is among the nearest callers.

    Checkpoint saves and restores the random state itself, so its calls must not be replaced.
    """
    frame = sys._getframe(2)
    for _ in range(5):
        if frame.f_code.co_filename.endswith(("torch/utils/checkpoint.py", "torch\\utils\\checkpoint.py")):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


@functools.lru_cache(maxsize=256)
def _in_thread(thread: int, replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``replacement`` in the thread with the id ``thread``, and ``original`` in others.

    In a call from torch's checkpoint, the returned function calls ``original`` in every thread (see
    `_called_by_checkpoint`).
    """

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        mine = threading.get_ident() == thread and not _called_by_checkpoint()
        return (replacement if mine else original)(*args, **kwargs)

    return call


@functools.lru_cache(maxsize=256)
def _of_state(
    thread: int,
    refuse: Callable[..., Any],
    checkpoint_state: Callable[[str, Tensor], None],
    name: str,
    original: Callable[..., Any],
) -> Callable[..., Any]:
    """Return the replacement of a function that reads or sets the state of a random generator.

    In the thread of the trace, a call by the user's program calls ``refuse`` with the function's name. A call by
    torch's checkpoint runs the function, and passes the random state to ``checkpoint_state``.
    """

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


@contextlib.contextmanager
def replace_unguarded(
    refuse: Callable[..., Any],
    checkpoint_state: Callable[[str, Tensor], None],
    checkpoint_starts: Callable[[], None],
    push_hooks: Callable[..., Any],
    leave: Callable[..., Any],
    higher_order: Callable[[str], Any],
) -> Iterator[None]:
    """Replace functions of torch that no function mode sees, in this thread and for the length of a block.

    A trace uses it to notice calls that a graph cannot contain. Most of the replacements call ``refuse`` with the
    function's name and arguments. For functions that read or set the state of random generators, ``refuse`` gets only
    the name. ``push_hooks`` is called when ``saved_tensors_hooks`` are set. ``leave`` replaces the methods ``set_``,
    ``apply_``, ``map_`` and ``map2_``, and gets the original method as ``otherwise``. ``checkpoint_state`` receives
    each random state that torch's checkpoint reads or sets. ``checkpoint_starts`` is called before a checkpoint runs
    its function. ``higher_order`` gets the name of a higher-order op before Dynamo captures the op's functions.
    """
    thread = threading.get_ident()
    compile_ = torch.compile
    here, of_state = partial(_in_thread, thread), partial(_of_state, thread, refuse, checkpoint_state)
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

    swap, to_dlpack = _bound(refuse, "swap_tensors"), _bound(refuse, "to_dlpack")
    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch._C, "_swap_tensor_impl", swap),
        (torch.utils, "swap_tensors", swap),
        (torch._C, "_to_dlpack", to_dlpack),
        (torch, "to_dlpack", to_dlpack),
        (torch.utils.dlpack, "to_dlpack", to_dlpack),
        *(
            (torch.Tensor, name, _bound(leave, otherwise=getattr(torch.Tensor, name)))
            for name in ("set_", "apply_", "map_", "map2_")
        ),
    ]
    states = [(owner, name) for name in _RANDOM_STATE for owner in (torch, torch.random)]
    new = [(owner, name, here(replacement, getattr(owner, name))) for owner, name, replacement in places]
    new += [(owner, name, of_state(name, getattr(owner, name))) for owner, name in states]
    new += [(torch._C._autograd, "_push_saved_tensors_default_hooks", push), (torch, "compile", compiles)]
    before = [getattr(owner, name) for owner, name, _ in new]
    try:  # an interrupt may come between two replacements; `before` has all originals already
        for owner, name, replacement in new:
            setattr(owner, name, replacement)
        yield
    finally:
        for (owner, name, _), own in zip(new, before, strict=True):
            setattr(owner, name, own)


def unseen_by_dynamo(function: _Function) -> _Function:
    """Keep Dynamo from capturing a function that autograd calls in a backward, and the functions that it calls.

    This decorator costs nothing at a call; `torch.compiler.disable` costs 2 µs.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
