"""Grad mode, autocast, dispatch modes and random state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack as dispatch_mode_count
from torch._C import _len_torch_function_stack as function_mode_count
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from aotlab._torch.ops import _functionalizes, _has_kernel

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
    return any(
        torch.is_autocast_enabled(device)
        and isinstance(op, OpOverload)
        and _has_kernel(op, f"Autocast{device.upper()}")
        for device in ("cpu", "cuda")
    )


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


def only_default_devices() -> bool:
    """Tell whether all function modes that are on do nothing but set a default device."""
    from torch.utils._device import DeviceContext

    return all(isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack())


def forward_ad_active() -> bool:
    """Tell whether a level of forward-mode differentiation is open."""
    return torch.autograd.forward_ad._current_level >= 0


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
