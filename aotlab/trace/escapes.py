"""Ways around the trace, refused at the Python level."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.errors import DataDependentError, RefusedError
from aotlab.guards.places import called, user_line
from aotlab.trace import boundary
from aotlab.trace.chronicle import Chronicle, InputStorage
from aotlab.trace.inputs import Entered
from aotlab.trace.quirk import Quirk
from aotlab.trace.records import Hook
from aotlab.trace.running import note_checkpoint, note_random_state, strides_are_certain
from aotlab.trace.tape import tensors_in
from aotlab.trace.write_calls import overlaps_itself, run, share_memory

_READS_DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # a slot wrapper


class EscapeGuard(TorchFunctionMode):
    """Refuse looks behind traced tensors, and writes around the trace; ``hooks`` by handle are for each call."""

    def __init__(
        self,
        storages: Mapping[int, InputStorage] | None = None,
        inputs: Sequence[Entered] = (),
        *,
        quirks: Sequence[Quirk] = (),
    ) -> None:
        super().__init__()
        self.chronicle = Chronicle(storages or {})
        self.inputs = {id(item.wrapper): item for item in inputs}
        self.hooks: OrderedDict[int, Hook] = OrderedDict()
        # of these memories eager knows by the base, which the trace does not have, what is a leaf
        self._unknown_histories = {item.storage for item in inputs if internals.is_leaf_by_its_base(item.real)}
        self._claims = {func: handler for quirk in quirks for func, handler in quirk.claims().items()}
        self._inference = torch.is_inference_mode_enabled()
        self._refusal: Exception | None = None  # which the program may catch, and go on as it would not in eager

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function, which may write."""
        return run(self.chronicle, func, args, kwargs)

    def claimed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let the quirk that claims a function of `CLAIMABLE` do it; fall back to eager if there is none."""
        handler = self._claims.get(func)
        if handler is None:
            what, instead = boundary.CLAIMABLE[func]
            raise RunEagerly(f"{what.format(boundary.spoken_name(func))}, at {user_line()}", suggestion=instead)
        return handler(self, func, args, kwargs)

    def hooks_of(self, tensor: Tensor) -> list[Hook]:
        """List the hooks on a tensor, on whatever history it had."""
        return [hook for hook in self.hooks.values() if hook.tensor is tensor]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with internals.disable_torch_function():  # in hooks of a backward this mode is in force twice
            self.chronicle.uses((args, kwargs))
        try:
            result = self._pass(func, args, kwargs or {})
        except (RunEagerly, RefusedError) as error:
            self._refusal = self._refusal or error
            if isinstance(error, DataDependentError):
                boundary.explain_question(error, func, args, kwargs or {})
            raise
        except RuntimeError as error:
            boundary.explain_escape(error, func, args, kwargs or {})
            raise
        with internals.disable_torch_function():
            self.chronicle.made(result, (args, kwargs))
            if func in _MAKES_ALIASES and args and internals.is_functional(args[0]):
                self.chronicle.aliased.add(internals.storage_key(args[0]))
                if self._inference and func == _READS_DATA:  # writes through it count for nobody
                    self.chronicle.fix(args[0], "has its `.data` read under inference_mode")
        return result

    def _pass(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = boundary.spoken_name(func)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and func in _LOOKS:
            self._check_look(func, first)
        traced = first is not None and internals.is_functional(first)
        in_place = traced and (args[-1] is True or kwargs.get("inplace")) and not isinstance(func, internals.OpOverload)
        if first is not None and in_place and overlaps_itself(first):
            raise RunEagerly(f"`{name}` may write a tensor that overlaps itself, at {user_line()}")
        if func in boundary.CLAIMABLE and (traced or first is None or func in boundary.CLAIMED_ANYHOW):
            return self.claimed(func, args, kwargs)
        op = boundary.op_name(func)
        if op in boundary.EAGER_FUNCTIONS:
            why, instead = boundary.EAGER_FUNCTIONS[op]
            raise RunEagerly(f"`{op}` {why}, at {user_line()}", suggestion=instead)
        if func in _WRITES_STATISTICS and share_memory(tensors_in((args, kwargs))):
            raise RunEagerly(f"`{name}` is given statistics that share memory, at {user_line()}")
        if func is internals.SET_GRAD_ENABLED and args[0] and torch.is_inference_mode_enabled():
            # custom Functions then make inference tensors with a history, and nothing else does
            raise RunEagerly(f"grad mode is turned on under inference_mode, at {user_line()}")
        if first is None or not traced:
            return self.run(func, args, kwargs)
        if func in _READS_STRIDES:
            self.check_strides(first)
        result = self.run(func, args, kwargs)
        if func in _SEES_AS_DTYPE:
            if result.element_size() != first.element_size():
                self.check_strides(first)  # of which a view as elements of another size demands things
            self.chronicle.sees_as_dtype(first, result)
        return result

    def _check_look(self, func: Any, tensor: Tensor) -> None:
        """Refuse what asks for a tensor's memory, or does to it what no op shows."""
        what = ""
        if internals.is_functional(tensor):
            with internals.disable_torch_function():  # in hooks of a backward this mode is in force twice
                key, is_view = internals.storage_key(tensor), internals.base_of(tensor) is not None
            self.chronicle.looked_at.add(key)
            if key in self._unknown_histories and func in _LETS_REQUIRE_GRAD | _READS_HISTORY:
                what = ", made under no_grad, is asked for its history"
            elif func in _LETS_REQUIRE_GRAD and is_view:
                what = " is made to require grad"  # a leaf then, and a view of what others may write
        if what:
            raise RunEagerly(f"{self._called(tensor, 'a view')}{what}, at {user_line()}")
        item = self.inputs.get(id(tensor))
        if func not in _READS_HISTORY:
            boundary.check_look(func, tensor, None if item is None else item.name)

    def check_strides(self, tensor: Tensor) -> None:
        """Leave to eager who reads strides that it may give otherwise."""
        if id(tensor) not in self.inputs and not strides_are_certain(tensor):
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
        self._replaced.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch
        refusal, self._refusal = self._refusal, None
        if refusal is not None and error[0] is None:
            raise refusal

    def _called(self, tensor: Tensor, otherwise: str = "a tensor") -> str:
        item = self.inputs.get(id(tensor))
        return called(tensor, otherwise) if item is None else f"`{item.name}`"


def _leave_saved_hooks(*hooks: Any) -> NoReturn:
    """Leave ``saved_tensors_hooks`` to eager: they run wherever autograd saves, or asks for what it saved."""
    raise RunEagerly(f"`saved_tensors_hooks` are set inside, at {user_line()}", suggestion="set them outside")


_HOOKS = frozenset(func for func, said in boundary.CLAIMABLE.items() if said is boundary.HOOKED)
_LETS_REQUIRE_GRAD = frozenset((Tensor.requires_grad_, Tensor.requires_grad.__set__))  # type: ignore[attr-defined]  # a setter
_READS_HISTORY = frozenset((Tensor.is_leaf.__get__, Tensor.grad_fn.__get__))  # type: ignore[attr-defined, union-attr]  # getters
#: All that is not called for a result alone; what is done to the result of `.data` is done to the tensor.
_LOOKS = frozenset((*boundary.OF_A_TENSOR, *_HOOKS, *_LETS_REQUIRE_GRAD, *_READS_HISTORY, _READS_DATA))
_READS_STRIDES = frozenset((Tensor.stride, Tensor.dim_order))
_ATEN = torch.ops.aten
_SEES_AS_DTYPE = frozenset(
    (Tensor.view, _ATEN.view, _ATEN.view.dtype, torch.view_as_complex, _ATEN.view_as_complex)
) | {_ATEN.view_as_complex.default}
#: What writes two tensors, the running mean and variance.
_WRITES_STATISTICS = frozenset(
    (functional.batch_norm, functional.instance_norm, torch.batch_norm, torch.instance_norm, torch.native_batch_norm)
)
#: What makes aliases that autograd does not take for views.
_MAKES_ALIASES = frozenset((Tensor.detach, torch.detach, _READS_DATA))
