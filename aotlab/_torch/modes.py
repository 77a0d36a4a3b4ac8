"""Grad mode, autocast, dispatch modes, transforms of `torch.func` and forward-mode differentiation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as dispatch_mode_count
from torch._C import _len_torch_function_stack as function_mode_count
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from aotlab._torch.ops import _functionalizes, _has_kernel
from aotlab._torch.saved import saved_tensor_hooks_disabled
from aotlab._torch.subclasses import is_wrapper

#: Sets grad mode without the 2 µs of a context manager; generated code pairs each call with its undoing.
set_grad_mode: Callable[[bool], None] = torch._C._set_grad_enabled
#: What Dynamo's graphs set the grad mode with, what they enter other modes with, and what leaves those again.
SET_GRAD_ENABLED = set_grad_mode
MODE_EXITS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.autograd.grad_mode._enter_inference_mode: torch.autograd.grad_mode._exit_inference_mode,
    torch.amp.autocast_mode._enter_autocast: torch.amp.autocast_mode._exit_autocast,
}
#: Tells whether autocast is on for any device.
any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
#: Keeps autocast from casting again what a trace under autocast has cast already.
disable_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast
#: Keeps function modes from seeing what we ourselves call.
disable_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
#: Lets no mode see what is run: neither a trace a real kernel in its middle, nor the caller's modes a trace.
no_dispatch_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes


def autocast_knows(op: Any) -> bool:
    """Tell whether autocast, as it is on now, casts the arguments of ``op``."""
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return isinstance(op, OpOverload) and any(_has_kernel(op, f"Autocast{device.upper()}") for device in on)


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


class Surroundings:
    """What this thread has on around a call: to be put back where an interrupt came while a context was entered."""

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


def only_default_devices() -> bool:
    """Tell whether all function modes that are on do nothing but set a default device."""
    from torch.utils._device import DeviceContext

    return all(isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack())


def forward_ad_active() -> bool:
    """Tell whether a level of forward-mode differentiation is open."""
    return torch.autograd.forward_ad._current_level >= 0


def settle_without_gpus() -> None:
    """Where torch is built for CUDA and finds no GPU, have it take that in before a fake mode says otherwise.

    Entering a fake mode registers eight GPUs for the process; autograd's first backward starts a thread for each, after
    which no forked child can differentiate: so one small backward comes first. In torch 2.11 what is registered goes
    with its thread, and the next fake mode reads freed memory: so the thread that imports registers it.
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
#: Tells whether a tensor is the wrapper by which a ``torch.func`` transform follows another tensor.
is_transformed: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
#: How what Dynamo's graphs begin a transform of ``torch.func`` with, or forward-mode differentiation, is called.
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
    """Tell whether a function in a graph of Dynamo's changes which transforms are on, until another one is called."""
    return getattr(target, "__name__", None) in _OPENING


def opens_dual_level(target: Any) -> bool | None:
    """Tell whether a function in a graph of Dynamo's opens or closes a level of forward-mode differentiation."""
    return {"_enter_dual_level": True, "_exit_dual_level": False}.get(getattr(target, "__name__", ""))


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


def is_beyond_kernels(values: Sequence[Tensor | None]) -> bool:
    """Tell whether a transform runs, or one of some tensors wraps or stands for several, or has a tangent."""
    for value in values:
        if value is not None and (_is_batched(value) or is_wrapper(value)):
            return True
    unpack: Any = torch.autograd.forward_ad.unpack_dual
    is_dual = (value is not None and unpack(value).tangent is not None for value in values)
    return under_transform() and (transforms_active() or any(is_dual))


def under_transform(
    peek: Callable[[], object] = torch._C._functorch.peek_interpreter_stack, forward_ad: Any = torch.autograd.forward_ad
) -> bool:
    """Tell whether a transform is running or such a level is open: both at once, for what is asked at each call."""
    return peek() is not None or forward_ad._current_level >= 0
