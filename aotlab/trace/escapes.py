"""Ways around the trace, refused at the Python level."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.errors import DataDependentError, EscapeError, HooksError
from aotlab.trace.boundary import (
    EAGER_OPS,
    OF_A_TENSOR,
    check_look,
    explain_escape,
    explain_question,
    is_captured,
    leave_call_back,
    refuse_higher_order,
    refuse_unasked,
    spoken_name,
)
from aotlab.trace.chronicle import Chronicle
from aotlab.trace.hooks import Hooks
from aotlab.trace.naming import called
from aotlab.trace.places import user_line
from aotlab.trace.recurrent import lstm
from aotlab.trace.reshapes import DETACHES, METHODS_OF_STEPS, RESIZES, STEPS, Reshapes, keeps_size
from aotlab.trace.running import note_checkpoint, note_random_state, strides_are_certain
from aotlab.trace.storage_looks import Ground, StorageLooks
from aotlab.trace.tape import tensors_in
from aotlab.trace.write_calls import SEES_AS_DTYPE, VIEWS, Writes, op_name, overlaps_itself, share_memory

_READS_DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # a slot wrapper
_ASSIGNS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a slot wrapper


class EscapeGuard(TorchFunctionMode):
    """Refuse, at the Python level, what would look behind a traced tensor or write around the trace.

    ``grounds`` are the inputs' memory by `torch_internals.storage_key`. ``reshapes`` notes what changes inputs
    other than in their values; a backward has no inputs. ``owners`` are as in `Chronicle`. ``histories_unknown`` are
    the keys of memory of which a trace does not know as eager does what is a leaf. ``sets_saved_hooks`` says whether
    the function sets ``saved_tensors_hooks``, ``differentiates`` whether it calls ``torch.autograd.grad``.
    """

    def __init__(
        self,
        grounds: Mapping[int, Ground] | None = None,
        reshapes: Reshapes | None = None,
        owners: Sequence[Tensor] = (),
        *,
        histories_unknown: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.grounds = grounds or {}
        self.looks = StorageLooks(self.grounds)
        self.reshapes = reshapes or Reshapes()
        self.hooks = Hooks()
        self.chronicle = Chronicle(set(self.grounds), owners)
        self._histories_unknown = histories_unknown
        self.sets_saved_hooks = False
        self.differentiates = False
        self._inference = torch.is_inference_mode_enabled()
        self._writes = Writes(self.looks, self.reshapes, self.chronicle)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let a function pass, or refuse it."""
        if func in _PARTS_FROM_ITS_BASE and args and internals.is_functional(args[0]):
            self._writes.note_owner(args[0])
            inside = args[0].is_inference() and internals.storage_key(args[0]) not in self.grounds
            if inside and not torch.is_inference_mode_enabled():
                # of all aliases of an inference tensor it is the one that may be written outside
                raise RunEagerly(f"an inference tensor is detached outside of inference_mode, at {user_line()}")
        with internals.disable_torch_function():  # in hooks of a backward this mode is in force twice
            self.chronicle.uses((args, kwargs))
        try:
            result = self._pass(func, args, kwargs)
        except DataDependentError as error:
            explain_question(error, func, args, kwargs or {})
            raise
        except RuntimeError as error:
            explain_escape(error, func, args, kwargs or {})
            raise
        with internals.disable_torch_function():
            self.chronicle.made(result, (*args, kwargs["out"]) if kwargs and "out" in kwargs else args)
        if self._inference and func == _READS_DATA and internals.is_functional(args[0]):
            self.chronicle.reads_data(args[0])
        return result

    def _pass(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        func = METHODS_OF_STEPS.get(func, func)
        if func == _ASSIGNS_DATA and internals.is_functional(args[0]):
            raise self._gets_memory(args[0], "an assignment to `.data`")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and func in _LOOKS:
            self._check_look(func, first)
        if op_name(func) in EAGER_OPS:
            why, instead = EAGER_OPS[op_name(func)]
            raise RunEagerly(f"`{op_name(func)}` {why}, at {user_line()}", suggestion=instead)
        if func is torch.autograd.grad:
            self.differentiates = True
            if self.hooks.all:  # which are registered when the compiled function runs
                raise RunEagerly(f"`torch.autograd.grad` is called where there may be hooks, at {user_line()}")
        if func in _WRITES_STATISTICS and share_memory(tensors_in((args, kwargs))):
            raise RunEagerly(f"`{spoken_name(func)}` is given statistics that share memory, at {user_line()}")
        if func is torch.lstm and torch.is_grad_enabled():
            return lstm(func, args, kwargs or {})
        if func is internals.SET_GRAD_ENABLED and args[0] and torch.is_inference_mode_enabled():
            # custom Functions then make inference tensors with a history, and nothing else does
            raise RunEagerly(f"grad mode is turned on under inference_mode, at {user_line()}")
        if first is not None and internals.is_functional(first):
            return self._pass_traced(func, first, args, kwargs or {})
        return self._writes.let_pass(func, args, kwargs or {})

    def _pass_traced(self, func: Any, first: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let a function of a traced tensor pass, or refuse it."""
        if func in _HOOKS:
            return self._hook(func, args, kwargs)
        if func in STEPS:
            return self._reshape(func, args, kwargs)
        if func is Tensor.storage_offset:
            with internals.disable_torch_function():
                base = internals.base_of(first)
            if base is not None and internals.storage_key(base) not in self.grounds:
                self._check_strides(base)  # a part of it begins behind so many strides
            return self.looks.offset(first)
        if func in _WINDOWS:
            return self.looks.as_strided(func, args, kwargs)
        if (kwargs.get("inplace") or args[-1] is True) and overlaps_itself(first):
            raise RunEagerly(f"`{spoken_name(func)}` may write a tensor that overlaps itself, at {user_line()}")
        if func in _READS_STRIDES:
            self._check_strides(first)
        if func in SEES_AS_DTYPE:
            given = args[1] if len(args) > 1 else kwargs.get("dtype")
            dtype = given if isinstance(given, torch.dtype) else None
            if func not in VIEWS or (dtype is not None and dtype.itemsize != first.dtype.itemsize):
                self._check_strides(first)  # of which a view as elements of another size demands things
            inside = torch.is_inference_mode_enabled() and not self._inference
            if inside and dtype is not None and not first.is_inference():
                # the one view of an ordinary tensor that is an inference tensor: outside neither written nor saved
                raise RunEagerly(f"a tensor is viewed as another dtype under inference_mode, at {user_line()}")
        return self._writes.let_pass(func, args, kwargs)

    def _check_look(self, func: Any, tensor: Tensor) -> None:
        """Refuse what asks for a tensor's memory, or does to it what no op shows."""
        traced = internals.is_functional(tensor)
        with internals.disable_torch_function():  # in hooks of a backward this mode is in force twice
            key = internals.storage_key(tensor) if traced else None
        if func == internals.BASE_GETTER and key in self.grounds:
            raise RunEagerly(f"`_base` of {self._called(tensor, 'a view')} is asked for, at {user_line()}")
        if func in _ABOUT_HISTORIES and key in self._histories_unknown:
            name = self._called(tensor, "a view")
            raise RunEagerly(f"{name}, made under no_grad, is asked for its history, at {user_line()}")
        if func in _LETS_REQUIRE_GRAD and traced and internals.base_of(tensor) is not None:
            # it is a leaf then, and a view of what may get a history, or be written by others
            raise RunEagerly(f"{self._called(tensor, 'a view')} is made to require grad, at {user_line()}")
        check_look(func, tensor, self.reshapes.name_of(tensor))
        if (func in _CHANGES or func in _HOOKS) and is_captured(tensor):
            raise (HooksError if func in _HOOKS else EscapeError)(
                f"`{spoken_name(func)}` of {called(tensor)}, which is not an argument, was called inside the function",
                line=user_line(),
                why="it would happen while tracing only",
                suggestion="move it out of the compiled function",
            )

    def _check_strides(self, tensor: Tensor) -> None:
        """Leave to eager who reads strides that it may give otherwise."""
        if not self.reshapes.is_input(tensor) and not strides_are_certain(tensor):
            raise RunEagerly(
                f"the strides of {self._called(tensor, 'a traced tensor')} are read, which a trace does not know where "
                f"a dimension has the size one, at {user_line()}",
                suggestion="compute with the shape, or with contiguous tensors, to have it compiled",
            )

    def __enter__(self) -> EscapeGuard:
        """Guard the block; some functions do not ask function modes and are replaced for its length."""
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._replaced = internals.replace_unguarded(
            refuse_unasked,
            note_random_state,
            note_checkpoint,
            self._set,
            self._push_saved_hooks,
            leave_call_back,
            refuse_higher_order,
        )
        self._replaced.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the guard."""
        self._replaced.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch

    def _push_saved_hooks(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        """Set the function's own ``saved_tensors_hooks``: they are traced, and guarded as the function is.

        They are called below autograd, where no function mode is on. `unpack` is called when the run is over.
        """
        self.sets_saved_hooks = True
        internals.push_saved_tensor_hooks(_guarded(pack, self), _guarded(unpack, EscapeGuard()))

    def _hook(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a hook for the run time; where eager has an error to raise, it does."""
        tensor = args[0]
        if func is _RETAINS_GRAD:
            return self.hooks.retains(tensor) or func(*args, **kwargs)
        leaf_only = func is Tensor.register_post_accumulate_grad_hook
        if not tensor.requires_grad or (leaf_only and not tensor.is_leaf):
            return func(*args, **kwargs)
        if func is Tensor.retain_grad:
            if not tensor.is_leaf and not self.hooks.retains(tensor):
                self.hooks.add("retain_grad", tensor)
            return None
        view = internals.base_of(tensor) is not None
        if view and tensor.grad_fn is None:
            raise RunEagerly(f"a hook on a view made under no_grad, at {user_line()}")
        if view and self.hooks.has_older(tensor):
            # before torch 2.15 such a hook stays with the older ones, unless the view itself was written
            raise RunEagerly(f"a view gets another hook after a write, at {user_line()}")
        return self.hooks.add(_HOOKS[func], tensor, kwargs.get("hook", args[1] if len(args) > 1 else None))

    def _set(self, tensor: Tensor, *args: Any, otherwise: Callable[..., Any], **kwargs: Any) -> Any:
        """Stand for ``set_``."""
        if not internals.is_functional(tensor):
            return otherwise(tensor, *args, **kwargs)
        with internals.disable_torch_function():  # the mode is still on: it does not get to see ``set_``
            raise self._gets_memory(tensor, "`set_`")

    def _gets_memory(self, tensor: Tensor, what: str) -> RunEagerly:
        return RunEagerly(
            f"{what} gives {self._called(tensor)} other memory, at {user_line()}",
            suggestion="copy the values with `copy_`, or return the new tensor, to have it compiled",
        )

    def _called(self, tensor: Tensor, otherwise: str = "a tensor") -> str:
        """Name a tensor for an error."""
        name = self.reshapes.name_of(tensor)
        return called(tensor, otherwise) if name is None else f"`{name}`"

    def _reshape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take a step that changes sizes, strides or storage in place, or refuse it."""
        tensor = args[0]
        same_size = func in RESIZES and keeps_size(tensor, *args[1:], **kwargs)
        if func in RESIZES and tensor.requires_grad and (same_size or torch.is_inference_mode_enabled()):
            # an error also if the size is the same, and none under inference_mode
            raise RunEagerly(f"`{func.__name__}` of a tensor that requires grad, at {user_line()}")
        if same_size:
            return tensor  # nothing happens, whatever its strides
        if func in DETACHES and torch.is_inference_mode_enabled():
            return tensor  # autograd is out of the way there, and nobody else does anything
        if tensor.is_inference() and func not in DETACHES and not torch.is_inference_mode_enabled():
            raise RunEagerly(f"an inference tensor changes outside of inference_mode, at {user_line()}")
        if self.hooks.retains(tensor):  # of the history that it had when it was asked to
            how = "is detached" if func in DETACHES else "changes its sizes"
            raise RunEagerly(f"{self._called(tensor)} retains its gradient and {how}, at {user_line()}")
        if func not in DETACHES and self.hooks.has(tensor):  # later hooks, of the caller's too, go with these in eager
            raise RunEagerly(f"{self._called(tensor)} has a hook and changes its sizes, at {user_line()}")
        if func in DETACHES:
            has_history = tensor.requires_grad or internals.base_of(tensor) is not None
            if has_history or self.reshapes.is_input(tensor):
                self.chronicle.detaches(tensor)
        return self.reshapes.run(func, args, kwargs)


def _guarded(hook: Callable[..., Any], guard: EscapeGuard) -> Callable[..., Any]:
    """Let a function mode see what a hook does."""

    def call(value: Any) -> Any:
        TorchFunctionMode.__enter__(guard)
        try:
            return hook(value)
        finally:
            TorchFunctionMode.__exit__(guard, None, None, None)

    return call


_RETAINS_GRAD = Tensor.retains_grad.__get__  # type: ignore[attr-defined]  # a getter
_HOOKS: dict[Any, Any] = {
    Tensor.register_hook: "hook",
    Tensor.register_post_accumulate_grad_hook: "post_accumulate",
    Tensor.retain_grad: "retain_grad",
    _RETAINS_GRAD: "retain_grad",
}

_LETS_REQUIRE_GRAD = frozenset(
    (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]  # a setter
)

#: What tells, or hangs on, whether a tensor has a history.
_ABOUT_HISTORIES = _LETS_REQUIRE_GRAD | frozenset(
    (
        Tensor.is_leaf.__get__,  # type: ignore[attr-defined]  # a getter
        Tensor.grad_fn.__get__,  # type: ignore[union-attr]  # a getter
    )
)

#: What changes a tensor without an op that the recorder would see.
_CHANGES = _LETS_REQUIRE_GRAD | frozenset(
    (Tensor.data.__get__,)  # type: ignore[attr-defined]  # what is done to its result is done to the tensor
)


#: All that is not called for a result alone.
_LOOKS = frozenset((*OF_A_TENSOR, *_HOOKS, *_CHANGES, *_ABOUT_HISTORIES, internals.BASE_GETTER))
_READS_STRIDES = frozenset((Tensor.stride, Tensor.dim_order))
#: What writes two tensors, the running mean and variance.
_WRITES_STATISTICS = frozenset(
    (functional.batch_norm, functional.instance_norm, torch.batch_norm, torch.instance_norm, torch.native_batch_norm)
)
_WINDOWS = frozenset((Tensor.as_strided, torch.as_strided))


#: What makes aliases that autograd does not take for views.
_PARTS_FROM_ITS_BASE = frozenset(
    (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]  # a getter
)
