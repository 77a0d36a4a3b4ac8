"""Grad mode, autocast, dispatch modes, transforms of `torch.func` and forward-mode differentiation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_mode_count
from torch._C import _len_torch_function_stack as function_mode_count
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes

from aotlab._torch.saved_tensors import saved_tensor_hooks_disabled
from aotlab._torch.undocumented_ops import _functionalizes, _has_kernel
from aotlab._torch.wrapper_subclasses import is_wrapper

#: Sets grad mode. Generated code calls this function to set and to restore the mode, because a context manager would
#: take 2 µs.
set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled
#: The function that Dynamo's graphs call to set grad mode.
SET_GRAD_ENABLED = set_grad_mode
#: The functions that Dynamo's graphs call to enter inference mode and autocast, each with the function that exits it.
MODE_EXITS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.autograd.grad_mode._enter_inference_mode: torch.autograd.grad_mode._exit_inference_mode,
    torch.amp.autocast_mode._enter_autocast: torch.amp.autocast_mode._exit_autocast,
}
#: Tells whether autocast is on for any device.
any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
#: Switches autocast off for a block. Compiled graphs run in such a block, because a trace under autocast has already
#: recorded autocast's casts.
disable_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast
#: Hides the torch calls of aotlab itself from function modes.
disable_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
#: Switches all dispatch modes off for a block. With it, the recorder does not record ops on real tensors in the block,
#: and the caller's modes do not see the ops of a trace.
no_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes


def autocast_knows(op: Any) -> bool:
    """Tell whether autocast casts the arguments of ``op`` on a device for which autocast is on now."""
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return isinstance(op, OpOverload) and any(_has_kernel(op, f"Autocast{device.upper()}") for device in on)


def autocast_nesting() -> int:
    """Return how many autocast blocks are open. At the end of the outermost one, autocast clears its cache of casts."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def restore_autocast_nesting(depth: int) -> None:
    """Set the number of open autocast blocks to ``depth``. Clear autocast's cache if no block is left open."""
    while autocast_nesting() > depth:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
    while autocast_nesting() < depth:
        torch.autocast_increment_nesting()


class Surroundings:
    """The modes of this thread before a call, so that they can be restored after an interrupt."""

    def __init__(self) -> None:
        self._function_modes = function_mode_count()
        self._dispatch_modes = dispatch_mode_count()
        self._functionalizes = _functionalizes()
        self._grad_mode = torch.is_grad_enabled()

    def restore(self) -> None:
        """Leave the modes that were entered after this object was made, innermost first, and restore grad mode."""
        while function_mode_count() > self._function_modes:
            torch._C._pop_torch_function_stack()
        while dispatch_mode_count() > self._dispatch_modes:
            torch._C._pop_torch_dispatch_stack(None)
        if _functionalizes() and not self._functionalizes:
            torch._disable_functionalization()
        torch.set_grad_enabled(self._grad_mode)


def only_default_devices() -> bool:
    """Tell whether all active function modes only set a default device."""
    return all(isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack())


def under_default_devices_only(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it runs without its caller's function modes, except those that set a default device.

    ``call`` runs a graph of Dynamo. Dynamo has already traced the effects of the other modes into the graph.
    """

    @functools.wraps(call)
    def run(*args: Any) -> Any:
        if only_default_devices():
            return call(*args)
        modes = torch.overrides._get_current_function_mode_stack()
        _put_on(mode for mode in modes if isinstance(mode, DeviceContext))
        try:
            return call(*args)
        finally:
            _put_on(modes)

    return run


def _put_on(modes: Iterable[Any]) -> None:
    """Replace all active function modes by ``modes``; the last one becomes the innermost mode."""
    while function_mode_count():
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def forward_ad_active() -> bool:
    """Tell whether a level of forward-mode differentiation is open."""
    return torch.autograd.forward_ad._current_level >= 0


def settle_without_gpus() -> None:
    """Initialize autograd before the first fake mode, if torch is built for CUDA and the machine has no GPU.

    Entering a fake mode registers eight pretended GPUs for the process. Autograd's first backward starts a thread for
    each registered GPU, and after that a forked child cannot differentiate. So this function runs a small backward
    first. In torch 2.11 the registration becomes invalid when the thread that made it ends, and the next fake mode
    reads freed memory. So this function also enters a fake mode, in the thread that imports aotlab.
    """
    if not torch.backends.cuda.is_built() or torch.cuda.device_count():
        return
    with torch.inference_mode(False), torch.enable_grad(), no_dispatch_modes(), disable_torch_function():
        one = torch.ones((), requires_grad=True, device="cpu")
        torch.autograd.grad(one, one)
        with FakeTensorMode():
            pass


# --- transforms -----------------------------------------------------------------------------------------------------

_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
#: Tells whether a tensor is the wrapper that a ``torch.func`` transform puts around another tensor.
is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
#: The names of functions by which Dynamo's graphs begin a ``torch.func`` transform or forward-mode differentiation.
_OPENING = frozenset(
    {
        "_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting", "_func_increment_nesting",
        "_enter_dual_level", "_set_fwd_grad_enabled", "_saved_tensors_hooks_disable",
        "set_inplace_requires_grad_allowed",
    }
)  # fmt: skip
_LEAVING: dict[Any, Callable[[], int]] = {
    torch._C._functorch.TransformType.Vmap: torch._C._functorch._vmap_decrement_nesting,
    torch._C._functorch.TransformType.Grad: torch._C._functorch._grad_decrement_nesting,
    torch._C._functorch.TransformType.Jvp: torch._C._functorch._jvp_decrement_nesting,
    torch._C._functorch.TransformType.Functionalize: torch._C._functorch._func_decrement_nesting,
}


def transforms_active() -> bool:
    """Tell whether a ``torch.func`` transform is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def opens_transform(target: Any) -> bool:
    """Tell whether a function that a Dynamo graph calls begins a transform, or changes a setting for transforms.

    Later in the graph, another function ends the transform. If an op in between raises, that function is not called.
    """
    return getattr(target, "__name__", None) in _OPENING


def opens_dual_level(target: Any) -> bool | None:
    """Tell whether a function in a Dynamo graph opens (True) or closes (False) a level of forward-mode differentiation.

    The result is None for all other functions.
    """
    return {"_enter_dual_level": True, "_exit_dual_level": False}.get(getattr(target, "__name__", ""))


class TransformState:
    """The active transforms, so that they can be restored after an error: Dynamo's graphs have no ``finally``."""

    def __init__(self) -> None:
        functorch = torch._C._functorch
        self._depth = functorch.get_dynamic_layer_stack_depth()
        self._forward_grad = torch._C._is_fwd_grad_enabled()
        self._may_require_grad = functorch.get_inplace_requires_grad_allowed()
        self._hooks_disabled = saved_tensor_hooks_disabled()

    def restore(self, dual_levels: Sequence[int] = ()) -> None:
        """Leave the transforms that were entered after this object was made.

        ``dual_levels`` are the levels of forward-mode differentiation that were opened since and are still open.
        """
        functorch = torch._C._functorch
        for level in reversed(dual_levels):
            torch._C._exit_dual_level(level=level)
        # torch has a function for this, but in torch 2.11 it leaves two levels at a time
        while functorch.get_dynamic_layer_stack_depth() > self._depth:
            _LEAVING[functorch.peek_interpreter_stack().key()]()
        torch._C._set_fwd_grad_enabled(self._forward_grad)
        if functorch.get_inplace_requires_grad_allowed() != self._may_require_grad:
            functorch.set_inplace_requires_grad_allowed(self._may_require_grad)
        if saved_tensor_hooks_disabled() and not self._hooks_disabled:
            torch._C._autograd._saved_tensors_hooks_enable()


def is_beyond_kernels(values: Sequence[Tensor | None]) -> bool:
    """Tell whether compiled kernels cannot take the tensors ``values``.

    They can take no tensors under a transform of ``torch.func``. They also cannot take a wrapper subclass, a batched
    tensor of ``torch.autograd.grad(…, is_grads_batched=True)``, or a dual tensor of forward-mode differentiation.
    """
    for value in values:
        if value is not None and (_is_batched(value) or is_wrapper(value)):
            return True
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    is_dual = (value is not None and unpack(value).tangent is not None for value in values)
    return under_transform() and (transforms_active() or any(is_dual))


def under_transform(
    peek: Callable[[], object] = torch._C._functorch.peek_interpreter_stack, forward_ad: Any = torch.autograd.forward_ad
) -> bool:
    """Tell whether a transform is running or a level of forward-mode differentiation is open.

    Functions that Dynamo compiles for aotlab ask this at each call. So both checks are in one function, and the default
    values of its parameters make the look-ups fast.
    """
    return peek() is not None or forward_ad._current_level >= 0
