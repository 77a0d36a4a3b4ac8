"""Ops that torch does not document, and which kernels run for an op."""

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
#: The same partial object for the same function and arguments.
_bound = functools.lru_cache(maxsize=256)(partial)

#: What computes ``bilinear``, ``affine_grid`` and ``pinv``: their kernels call products, for which autocast casts.
CASTS_INSIDE: tuple[OpOverload, ...] = (
    torch.ops.aten._trilinear.default, torch.ops.aten.affine_grid_generator.default,
    torch.ops.aten.linalg_pinv.atol_rtol_tensor,
)  # fmt: skip
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
#: What Dynamo puts for ``tensor.data``; no function mode sees it.
DATA_OF: Callable[[Tensor], Tensor] = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]  # not in the stubs
#: What torch 2.15's Dynamo writes for ``x.data = y``; earlier ones write the assignment itself.
SETS_DATA: Any = getattr(torch.ops.aten, "shallow_copy_data_", None)
#: What Dynamo puts for a call of a user's `torch.autograd.Function`; run as it is, it keeps everything in a closure.
FUNCTION_APPLY: HigherOrderOperator = torch._functorch.autograd_function.autograd_function_apply
#: A custom Function's ``apply`` without Python's look for transforms, at every argument too; guards have made it.
APPLY_OF_C: Any = torch._C._FunctionBase.__dict__["apply"]
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
#: The first of them by eager's kernel.
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
#: What Inductor takes for an op with effects, and what begins and ends the chain of those.
WITH_EFFECTS: HigherOrderOperator = torch.ops.higher_order.with_effects
MAKE_TOKEN, SINK_TOKENS = torch.ops.prims._make_token.default, torch.ops.prims._sink_tokens.default
#: One layer of oneDNN's recurrent nets.
ONEDNN_RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
#: Lets composite ops be those of C++, which eager runs, and not Python's.
no_python_dispatcher: Callable[[], AbstractContextManager[None]] = torch._C._DisablePythonDispatcher
#: The functions that touch random generators.
_RANDOM_STATE = ("manual_seed", "seed", "set_rng_state", "get_rng_state", "initial_seed")


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Switch oneDNN off for a block; the public context manager warns."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


@functools.cache
def _rewritten_in_python() -> tuple[tuple[OpOverload, set[str], dict[Any, Any], dict[Any, Any]], ...]:
    """List the ops that torch rewrites in Python for autograd's keys, with their names, other kernels and a cache.

    A trace needs some: batch norm's shows that the statistics are written; ``one_hot``'s looks at no values.
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
    """Upsample as eager does, to a size that may be symbolic, which the C++ code reads as numbers."""
    *flags, scales = rest
    sizes = upsample_compute_output_size(x.size(), size, scales)
    return kernel(x, sizes, *flags, *(scales or [None] * len(sizes)))


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    """Drop by one op; where nothing is dropped, return the tensor itself, of which torch's own makes a copy."""
    return torch.ops.aten.native_dropout(x, p, train)[0] if train and p else x


@contextlib.contextmanager
def eager_kernels(*, but: Sequence[str] = ()) -> Iterator[None]:
    """Let ops through that torch's Python dispatcher would otherwise rewrite, so that they round as eager does.

    Upsampling, recurrent layers, dropout and a few activations have rewritings for symbolic shapes that hang on
    autograd's keys and replace the C++ code on every trace. They come back after the block. Overloads by the names in
    ``but`` are rewritten; ``"vec"`` are those of upsampling.

    And let functionalization see what composite ops call, in inference mode too, where autograd takes none apart.
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
    """Tell whether eager computes ``op`` on that device by calling other ops, so that it is to be decomposed."""
    backend = device_type.upper() if device_type in ("cpu", "cuda") else "CPU"
    has_kernel = _has_kernel if op.namespace in TORCHS_OWN else _has_kernel.__wrapped__  # users may add some to theirs
    return not has_kernel(op, backend) and op._can_decompose()


@functools.cache
def _has_kernel(op: OpOverload, key: str) -> bool:
    # some overloads are TorchScript's, on lists and numbers, and unknown to the dispatcher
    return torch._C._dispatch_has_kernel(op.name()) and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def _calling_higher_order_op(frame: types.FrameType | None) -> str | None:
    """Return the name of the higher-order op that a user called; None if none is running."""
    name = None
    while frame is not None and ("_higher_order_ops" in (file := frame.f_code.co_filename) or "flex_attention" in file):
        name, frame = frame.f_code.co_name, frame.f_back
    return name


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random ops on a device draw from if they are given none."""
    if device.type == "cuda":
        number: int | None = device.index  # the stubs forget that there may be none
        return torch.cuda.default_generators[torch.cuda.current_device() if number is None else number]
    return torch.default_generator


def _functionalizes() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Functionalize)


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


@functools.lru_cache(maxsize=256)
def _in_thread(thread: int, replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function in one thread, but where torch's checkpoint calls it."""

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
    """Refuse a function that touches random generators; of what torch's checkpoint does with them, tell the states."""

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
    """Replace, for this thread and the length of a block, functions that no mode gets to see.

    Most call ``refuse`` instead, with their name and arguments (those that touch random generators: the name alone).
    ``leave``, for ``set_``, ``apply_``, ``map_`` and ``map2_``, gets the original as ``otherwise``.
    ``checkpoint_state`` is told which random state torch's checkpoint takes or sets, ``checkpoint_starts`` that one
    begins to run its function, ``higher_order`` which higher-order op is about to have Dynamo capture its functions.
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
    try:  # before the first replacement, since an interrupt may come between two of them
        for owner, name, replacement in new:
            setattr(owner, name, replacement)
        yield
    finally:
        for (owner, name, _), own in zip(new, before, strict=True):
            setattr(owner, name, own)


def unseen_by_dynamo(function: _Function) -> _Function:
    """Keep Dynamo out of what autograd calls in a backward, at once and in turn (torch's own way costs 2 µs a call)."""
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
