"""The function mode of a trace. It sees each torch function that the program calls, and refuses some of them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly, TraceEnds
from aotlab.errors import DataDependentError, RefusedError
from aotlab.guards.user_code import called, user_line
from aotlab.trace import boundary
from aotlab.trace.inputs import TracedInput
from aotlab.trace.program_calls import ProgramCalls
from aotlab.trace.records import Hook
from aotlab.trace.running_recorder import note_checkpoint, note_random_state, strides_are_certain
from aotlab.trace.storage_notes import InputStorage, StorageNotes
from aotlab.trace.tape import tensors_in
from aotlab.trace.write_calls import WRITES_STATISTICS, overlaps_itself, run, share_memory

_READS_DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # a slot wrapper


class EscapeGuard(TorchFunctionMode):
    """A function mode that refuses operations that a graph cannot contain (see `aotlab.trace.boundary`).

    It also passes each write to `aotlab.trace.write_calls`, and each function that a quirk claims to that quirk.
    ``hooks`` are the hooks that the function registered, by the id of their handle. Each compiled call registers them
    again. ``storages`` and ``inputs`` describe the traced inputs. Both are empty while a backward is derived.
    ``claims`` maps each claimed function to the handler of a quirk. ``writable`` and ``resized`` are those of the
    `Deriver` while a backward is derived. ``calls`` notes the calls of the program for a report.
    """

    def __init__(
        self,
        storages: Mapping[int, InputStorage] | None = None,
        inputs: Sequence[TracedInput] = (),
        *,
        claims: Mapping[Any, Handler] | None = None,
        writable: Mapping[int, Tensor] = MappingProxyType({}),
        resized: dict[int, bool] | None = None,
        calls: ProgramCalls | None = None,
    ) -> None:
        super().__init__()
        self.storage_notes = StorageNotes(storages or {})
        self.inputs = {id(item.traced): item for item in inputs}
        self.hooks: OrderedDict[int, Hook] = OrderedDict()
        # Storages of inputs that require grad only because their base does. In eager, `is_leaf` of a tensor in such a
        # storage depends on that base, which the trace does not have.
        self._unknown_histories = {item.storage for item in inputs if internals.is_leaf_by_its_base(item.real)}
        self._claims = claims or {}
        self._calls = calls
        self.writable = {id(traced): k for k, traced in writable.items()}
        self.resized = {} if resized is None else resized
        self._inference = torch.is_inference_mode_enabled()
        # The first refusal. It is raised again at the end, because the program may catch it.
        self._refusal: Exception | None = None

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function that may write to its arguments (see `aotlab.trace.write_calls.run`). Quirks use this too."""
        return run(self.storage_notes, func, args, kwargs)

    def claimed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the handler of the quirk that claims ``func``, a function of `CLAIMABLE`.

        Run eagerly if no quirk claims it, because the quirk is switched off.
        """
        handler = self._claims.get(func)
        if handler is None:
            quirk = boundary.CLAIMABLE[func]
            raise RunEagerly("quirk-is-off", op=boundary.user_name(func), quirk=quirk, at=user_line())
        return handler(self, func, args, kwargs)

    def hooks_of(self, tensor: Tensor) -> list[Hook]:
        """Return the hooks that were registered on a traced tensor, including those from before its last write."""
        return [hook for hook in self.hooks.values() if hook.tensor is tensor]

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # in hooks of a backward two of these modes are active, and the other one must not see the engine's own calls
        with internals.disable_torch_function():
            self.storage_notes.check_uses((args, kwargs), locked=func == internals.HOOKS_SETTER)
            begun = None if self._calls is None else self._calls.begin(func, args, kwargs or {})
        try:
            result = self._call(func, args, kwargs or {})
        except (TraceEnds, RefusedError) as error:
            self._refusal = self._refusal or error
            if isinstance(error, DataDependentError):
                boundary.explain_values_needed(error, func, args, kwargs or {})
            raise
        except RuntimeError as error:
            boundary.explain_escape(error, func, args, kwargs or {})
            raise
        with internals.disable_torch_function():
            self.storage_notes.note_views(result, (args, kwargs))
            if func in _MAKES_ALIASES and args and internals.is_functional(args[0]):
                self.storage_notes.aliased.add(internals.storage_key(args[0]))
                if self._inference and func == _READS_DATA:  # a write to the result changes no counter
                    self.storage_notes.forbid_writes(args[0], "has its `.data` read under inference_mode")
            if self._calls is not None and begun is not None:
                self._calls.end(begun, result)
        return result

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = boundary.user_name(func)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is not None and func in _CHECKED_ACCESSES:
            self._check_access(func, first)
        traced = first is not None and internals.is_functional(first)
        in_place = traced and (args[-1] is True or kwargs.get("inplace")) and not isinstance(func, internals.OpOverload)
        if first is not None and in_place and overlaps_itself(first):
            raise RunEagerly("writes-overlapping-elements", op=name, at=user_line())
        if func in boundary.CLAIMABLE and (traced or first is None or func in boundary.CLAIMED_ALWAYS):
            return self.claimed(func, args, kwargs)
        op = boundary.op_name(func)
        if op in boundary.EAGER_FUNCTIONS:
            case, facts = boundary.EAGER_FUNCTIONS[op]
            raise RunEagerly(case, op=op, at=user_line(), **facts)
        if func in WRITES_STATISTICS and share_memory(tensors_in((args, kwargs))):
            raise RunEagerly("writes-one-of-aliases", op=name, at=user_line())
        if func is internals.SET_GRAD_ENABLED and args[0] and torch.is_inference_mode_enabled():
            # in this combination, custom Functions make inference tensors that have an autograd history
            raise RunEagerly("grad-mode-in-inference-mode", at=user_line())
        if first is None or not traced:
            return self.run(func, args, kwargs)
        if func in _READS_STRIDES:
            self.check_strides(first)
        result = self.run(func, args, kwargs)
        if func in _SEES_AS_DTYPE:
            if result.element_size() != first.element_size():
                self.check_strides(first)  # torch allows a view as a dtype of another size only for some strides
            self.storage_notes.note_dtype_view(first, result)
        if func in _MAY_COPY and internals.storage_key(result) != internals.storage_key(first):
            with internals.disable_torch_function():
                internals.assume_copy(first)
        return result

    def _check_access(self, func: Any, tensor: Tensor) -> None:
        """Refuse a function if it reads a tensor's memory or autograd state, or changes the tensor without an op."""
        if internals.is_functional(tensor):
            with internals.disable_torch_function():  # see `__torch_function__`
                key, is_view = internals.storage_key(tensor), internals.base_of(tensor) is not None
            self.storage_notes.autograd_state_read.add(key)
            if key in self._unknown_histories and func in _LETS_REQUIRE_GRAD | _READS_HISTORY:
                raise RunEagerly("history-of-no-grad-view", name=self._called(tensor, "a view"), at=user_line())
            if func in _LETS_REQUIRE_GRAD and is_view:  # it would be a leaf that a write to its base changes
                raise RunEagerly("view-set-to-require-grad", name=self._called(tensor, "a view"), at=user_line())
        item = self.inputs.get(id(tensor))
        if func not in _READS_HISTORY and not (func in self._claims and internals.is_functional(tensor)):
            boundary.check_access(func, tensor, None if item is None else item.name)

    def check_strides(self, tensor: Tensor) -> None:
        """Run eagerly if the program reads strides of a traced tensor that may differ from eager's."""
        if id(tensor) not in self.inputs and not strides_are_certain(tensor):
            name = self._called(tensor, "a traced tensor")
            raise RunEagerly("reads-uncertain-strides", name=name, at=user_line())

    def __enter__(self) -> EscapeGuard:
        """Enter the mode. For the length of the block, replace the functions that no `TorchFunctionMode` sees."""
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._replaced = internals.replace_unguarded(
            boundary.refuse_unguarded,
            note_random_state,
            note_checkpoint,
            _refuse_saved_hooks,
            # The guard must die with the trace, because derivatives depend on which traced tensors are alive.
            partial(boundary.check_unguarded_method, weakref.WeakMethod(self.claimed)),
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


#: Runs a function that the program called. Its arguments: the `EscapeGuard` of the trace, the function, the positional
#: arguments, the keyword arguments.
Handler = Callable[[EscapeGuard, Any, tuple[Any, ...], dict[str, Any]], Any]


def _refuse_saved_hooks(*hooks: Any) -> NoReturn:
    """Run eagerly because the program sets ``saved_tensors_hooks``.

    During the trace, this function replaces torch's function that sets these hooks. Autograd calls the hooks
    whenever it saves or unpacks a tensor, and a compiled call saves other tensors.
    """
    raise RunEagerly("saved-tensors-hooks-inside", at=user_line())


_HOOKS = frozenset(func for func, quirk in boundary.CLAIMABLE.items() if quirk == "hooks")
_LETS_REQUIRE_GRAD = frozenset((Tensor.requires_grad_, Tensor.requires_grad.__set__))  # type: ignore[attr-defined]  # a setter
_READS_HISTORY = frozenset((Tensor.is_leaf.__get__, Tensor.grad_fn.__get__))  # type: ignore[attr-defined, union-attr]  # getters
#: Functions that `EscapeGuard` checks because they read or change more than values. `.data` is one of them because a
#: write to its result changes the tensor.
_CHECKED_ACCESSES = frozenset(
    (*boundary.REFUSED_ON_TENSORS, *_HOOKS, *_LETS_REQUIRE_GRAD, *_READS_HISTORY, _READS_DATA)
)
_READS_STRIDES = frozenset((Tensor.stride, Tensor.dim_order))
_ATEN = torch.ops.aten
_SEES_AS_DTYPE = frozenset(
    (Tensor.view, _ATEN.view, _ATEN.view.dtype, torch.view_as_complex, _ATEN.view_as_complex)
) | {_ATEN.view_as_complex.default}
#: Functions that return a view, or a copy if no view has the new sizes or strides.
_MAY_COPY = frozenset(
    (Tensor.reshape, torch.reshape, Tensor.reshape_as, Tensor.flatten, torch.flatten, Tensor.ravel, torch.ravel)
) | {Tensor.contiguous}
#: Functions that make aliases that autograd does not treat as views.
_MAKES_ALIASES = frozenset((Tensor.detach, torch.detach, _READS_DATA))
