"""Ways around the trace, refused at the Python level."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.errors import DataDependentError, EscapeError, HooksError
from aotlab.trace import boundary
from aotlab.trace.chronicle import Chronicle
from aotlab.trace.inputs import Entered
from aotlab.trace.places import called, user_line
from aotlab.trace.quirk import Quirk
from aotlab.trace.records import Hook
from aotlab.trace.running import note_checkpoint, note_random_state, strides_are_certain
from aotlab.trace.storage_looks import Ground, StorageLooks
from aotlab.trace.tape import tensors_in
from aotlab.trace.write_calls import SEES_AS_DTYPE, VIEWS, Writes, op_name, overlaps_itself, share_memory

_READS_DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # a slot wrapper
_ASSIGNS_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a slot wrapper


class Inputs:
    """The inputs of a trace, by the wrappers that the function was given."""

    def __init__(self, inputs: Iterable[Entered] = ()) -> None:
        self._items = {id(item.wrapper): item for item in inputs}
        items = self._items.values()
        self._inference = {internals.storage_key(item.wrapper) for item in items if item.real.is_inference()}

    def get(self, tensor: Tensor) -> Entered | None:
        """Return the input that ``tensor`` is itself, None for a view of one and for other tensors."""
        return self._items.get(id(tensor))

    def is_inference(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` has the memory of an input that is an inference tensor."""
        return internals.storage_key(tensor) in self._inference if self._inference else False

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of an input, None for other tensors."""
        item = self.get(tensor)
        return None if item is None else item.name


class EscapeGuard(TorchFunctionMode):
    """Refuse, at the Python level, what would look behind a traced tensor or write around the trace.

    ``grounds`` are the inputs' memory by `_torch.storage_key`; a backward has no inputs. ``histories_unknown``
    are the keys of memory of which a trace does not know as eager does what is a leaf. ``hooks`` are what each compiled
    call is to register, by the number of its handle.
    """

    def __init__(
        self,
        grounds: Mapping[int, Ground] | None = None,
        inputs: Iterable[Entered] = (),
        *,
        histories_unknown: Collection[int] = (),
        quirks: Sequence[Quirk] = (),
    ) -> None:
        super().__init__()
        self.grounds = grounds or {}
        self.looks = StorageLooks(self.grounds)
        self.inputs = Inputs(inputs)
        self.hooks: OrderedDict[int, Hook] = OrderedDict()
        self.chronicle = Chronicle(set(self.grounds))
        self._histories_unknown = histories_unknown
        self._claims = {func: handler for quirk in quirks for func, handler in quirk.claims().items()}
        self._inference = torch.is_inference_mode_enabled()
        self._writes = Writes(self.looks, self.inputs.is_inference, self.chronicle)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function, which may write."""
        return self._writes.let_pass(func, args, kwargs)

    def claimed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the quirk that claims a function of `CLAIMABLE` do it; fall back to eager if there is none."""
        handler = self._claims.get(func)
        if handler is None:
            raise boundary.unclaimed(func)
        return handler(self, func, args, kwargs)

    def hooks_of(self, tensor: Tensor) -> list[Hook]:
        """List the hooks on a tensor, on whatever history it had."""
        return [hook for hook in self.hooks.values() if hook.tensor is tensor]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let a function pass, or refuse it."""
        if func in _PARTS_FROM_ITS_BASE and args and internals.is_functional(args[0]):
            self._writes.note_owner(args[0])
        with internals.disable_torch_function():  # in hooks of a backward this mode is in force twice
            self.chronicle.uses((args, kwargs))
        try:
            result = self._pass(func, args, kwargs or {})
        except DataDependentError as error:
            boundary.explain_question(error, func, args, kwargs or {})
            raise
        except RuntimeError as error:
            boundary.explain_escape(error, func, args, kwargs or {})
            raise
        with internals.disable_torch_function():
            self.chronicle.made(result, (*args, kwargs["out"]) if kwargs and "out" in kwargs else args)
        if self._inference and func == _READS_DATA and internals.is_functional(args[0]):
            self.chronicle.reads_data(args[0])
        return result

    def _pass(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        func = boundary.METHODS_OF_OPS.get(func, func)
        if func == _ASSIGNS_DATA and internals.is_functional(args[0]):
            raise boundary.gets_memory(self._called(args[0]), "an assignment to `.data`")
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and func in _LOOKS:
            self._check_look(func, first)
        if op_name(func) in boundary.EAGER_OPS:
            why, instead = boundary.EAGER_OPS[op_name(func)]
            raise RunEagerly(f"`{op_name(func)}` {why}, at {user_line()}", suggestion=instead)
        traced = first is not None and internals.is_functional(first)
        if first is not None and traced and (args[-1] is True or kwargs.get("inplace")) and overlaps_itself(first):
            raise RunEagerly(
                f"`{boundary.spoken_name(func)}` may write a tensor that overlaps itself, at {user_line()}"
            )
        if func in boundary.CLAIMABLE and (traced or first is None or func in boundary.CLAIMED_ANYHOW):
            return self.claimed(func, args, kwargs)
        if func in _WRITES_STATISTICS and share_memory(tensors_in((args, kwargs))):
            raise RunEagerly(f"`{boundary.spoken_name(func)}` is given statistics that share memory, at {user_line()}")
        if func is internals.SET_GRAD_ENABLED and args[0] and torch.is_inference_mode_enabled():
            # custom Functions then make inference tensors with a history, and nothing else does
            raise RunEagerly(f"grad mode is turned on under inference_mode, at {user_line()}")
        if first is not None and traced:
            return self._pass_traced(func, first, args, kwargs)
        return self._writes.let_pass(func, args, kwargs)

    def _pass_traced(self, func: Any, first: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let a function of a traced tensor pass, or refuse it."""
        if func in _READS_STRIDES:
            self.check_strides(first)
        if func in SEES_AS_DTYPE:
            given = args[1] if len(args) > 1 else kwargs.get("dtype")
            dtype = given if isinstance(given, torch.dtype) else None
            if func not in VIEWS or (dtype is not None and dtype.itemsize != first.dtype.itemsize):
                self.check_strides(first)  # of which a view as elements of another size demands things
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
        boundary.check_look(func, tensor, self.inputs.name_of(tensor))
        if (func in _CHANGES or func in _HOOKS) and boundary.is_captured(tensor):
            name = boundary.spoken_name(func)
            raise (HooksError if func in _HOOKS else EscapeError)(
                f"`{name}` of {called(tensor)}, which is not an argument, was called inside the function",
                line=user_line(),
                why="it would happen while tracing only",
                suggestion="move it out of the compiled function",
            )

    def check_strides(self, tensor: Tensor) -> None:
        """Leave to eager who reads strides that it may give otherwise."""
        if self.inputs.get(tensor) is None and not strides_are_certain(tensor):
            raise RunEagerly(
                f"the strides of {self._called(tensor, 'a traced tensor')} are read, which a trace does not know where "
                f"a dimension has the size one, at {user_line()}",
                suggestion="compute with the shape, or with contiguous tensors, to have it compiled",
            )

    def __enter__(self) -> EscapeGuard:
        """Guard the block; some functions do not ask function modes and are replaced for its length."""
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._replaced = internals.replace_unguarded(
            boundary.refuse_unasked,
            note_random_state,
            note_checkpoint,
            _leave_saved_hooks,
            boundary.leave_unasked,
            boundary.refuse_higher_order,
        )
        self._replaced.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the guard."""
        self._replaced.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch

    def _called(self, tensor: Tensor, otherwise: str = "a tensor") -> str:
        """Name a tensor for an error."""
        name = self.inputs.name_of(tensor)
        return called(tensor, otherwise) if name is None else f"`{name}`"


def _leave_saved_hooks(*hooks: Any) -> NoReturn:
    """Leave ``saved_tensors_hooks`` to eager: they run wherever autograd saves, or asks for what it saved."""
    raise RunEagerly(f"`saved_tensors_hooks` are set inside, at {user_line()}", suggestion="set them outside")


def guard_of_backward(quirks: Sequence[Quirk]) -> EscapeGuard:
    """Make a guard for what runs in a backward; ``quirks`` are those of the trace."""
    return EscapeGuard(quirks=[type(quirk)() for quirk in quirks])


_HOOKS = frozenset(
    (
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
        Tensor.retain_grad,
        Tensor.retains_grad.__get__,  # type: ignore[attr-defined]  # a getter
    )
)

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
_LOOKS = frozenset((*boundary.OF_A_TENSOR, *_HOOKS, *_CHANGES, *_ABOUT_HISTORIES, internals.BASE_GETTER))
_READS_STRIDES = frozenset((Tensor.stride, Tensor.dim_order))
#: What writes two tensors, the running mean and variance.
_WRITES_STATISTICS = frozenset(
    (functional.batch_norm, functional.instance_norm, torch.batch_norm, torch.instance_norm, torch.native_batch_norm)
)

#: What makes aliases that autograd does not take for views.
_PARTS_FROM_ITS_BASE = frozenset(
    (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]  # a getter
)
