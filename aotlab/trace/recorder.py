"""The recorder: the dispatch mode that records each op of a trace on the tape."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab import errors
from aotlab._torch import FakeTensor, FakeTensorMode, HigherOrderOperator, OpOverload, TorchDispatchMode
from aotlab._torch.replaced import replaced
from aotlab.capture.signals import EntersInferenceMode, RunEagerly
from aotlab.errors import BY_DYNAMO, UserLine
from aotlab.guards.conditions import Condition
from aotlab.guards.user_code import Locator, called, name_of, user_code_position, user_line
from aotlab.ir.fx_graphs import Phase, may_have_effects
from aotlab.trace.boundary import refuse_higher_order
from aotlab.trace.corrections import draws_otherwise, strides_may_differ, with_strides_of
from aotlab.trace.memo import NoKey, memo_key, memo_value, remake
from aotlab.trace.random_state import (
    GeneratorStates,
    draws,
    functional_random_op,
    state_size,
    with_name,
    without_generator,
)
from aotlab.trace.tape import Operation, Tape, Untraceable, tensors_in
from aotlab.trace.unbacked_symbols import UnbackedSymbols

_NOT_RECORDED: dict[Any, Callable[..., Any]] = {
    torch.ops.prim.device.default: lambda tensor: tensor.device,
    torch.ops.aten.size.default: lambda tensor: tensor.shape,
    torch.ops.aten.sym_size.int: lambda tensor, dim: tensor.shape[dim],
    torch.ops.aten.sym_stride.int: lambda tensor, dim: tensor.stride(dim),
    torch.ops.aten.sym_numel.default: lambda tensor: tensor.numel(),
    torch.ops.aten.sym_storage_offset.default: lambda tensor: tensor.storage_offset(),
    **{mark: mark for mark in internals.PROFILER_MARKS},  # marks in a profile, which a graph does not need
}
_LIFTS = frozenset(
    (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift.default)
)

_QUANTIZED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))


def _settings() -> dict[str, Any]:
    """Return the global settings that kernels read when they run. A graph does not record these settings."""
    return {
        "the default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the precision of matmuls": internals.matmul_precision(),
    }


def _unrepresentable(func: OpOverload, value: Any) -> str | None:
    """Return a description of an op's result ``value`` if a trace cannot represent it, otherwise None."""
    if isinstance(value, torch.ScriptObject):
        return "an object that is not a tensor"
    if not isinstance(value, Tensor):
        return None
    # the fake of `quantize_per_tensor` has the dtype of its argument
    if value.dtype in _QUANTIZED or func.overloadpacket is torch.ops.aten.quantize_per_tensor:
        return "a quantized tensor"
    if value.layout != torch.strided:
        return f"a tensor of the layout {value.layout}"
    return "a meta tensor" if value.device.type == "meta" else None


class _RunningRecorders(threading.local):
    """The running recorders of this thread, the innermost last. They do not record ops of other threads."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []


running = _RunningRecorders()


class Recorder(TorchDispatchMode):
    """A dispatch mode that runs each op on fake tensors and appends it to the tape.

    If the program calls an op that a graph cannot contain, the recorder raises.

    - ``decompositions`` maps an op to a function; the ops that the function calls replace the op.
    - ``functional``: random ops take the state of their generator and return its next state.
    - ``op_handlers`` maps an op to the handler of a quirk, which records the op instead of the recorder.
    - ``exact``: graphs must give bit for bit the same results as eager.
    - ``exact_draws``: random ops must draw eager's numbers.
    - ``shared_memo``: the cached results of torch's own ops under the call's settings (`aotlab.trace.memo`).
    - ``sizes``: the symbolic sizes, if any size is dynamic.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        tape: Tape,
        fake_mode: FakeTensorMode,
        decompositions: dict[Any, Callable[..., Any]] | None = None,
        *,
        exact: bool = False,
        exact_draws: bool = True,
        functional: bool = False,
        op_handlers: Mapping[Any, OpHandler] | None = None,
        shared_memo: dict[Any, Any] | internals.SymbolicMemo | None = None,
        sizes: internals.Sizes | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.tape = tape
        self.fake_mode = fake_mode
        self.decompositions = decompositions or {}
        self.phase: Phase = "forward"
        self.meta: dict[str, Any] | None = None
        self._settings = _settings()
        self._inference = torch.is_inference_mode_enabled()
        self.names: dict[int, str] = {}  # the user's names of the inputs, by the ids of their fake tensors
        self.values_only = False
        self._original: OpOverload | None = None
        self._decomposes: dict[Any, Callable[..., Any] | None] = {}
        self._memo: dict[Any, Any] = {}
        self._shared_memo = {} if shared_memo is None else shared_memo
        self.states = GeneratorStates(self._append_on_state, functional=functional)
        self.has_checkpoints = False
        self.exact = exact
        self.exact_draws = exact_draws
        self._unmemoisable: set[OpOverload] = set()
        self._origins: dict[int, tuple[Locator | None, dict[str, Any] | None]] = {}  # keys: autograd's sequence numbers
        self.sizes = sizes
        self.unbacked = UnbackedSymbols(tape, sizes) if sizes is not None and sizes.from_values else None
        self.answer: Callable[..., bool | None] | None = None  # `Conditions.answer`, while the function runs
        self.conditions: list[Condition] = []
        self.subclass_mode: Any = None  # the mode of `aotlab.subclasses`, if the call has wrapper subclasses
        self._op_handlers = op_handlers or {}

    def __enter__(self) -> Recorder:
        """Start recording."""
        running.recorders.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop recording."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch
        running.recorders.pop()

    def _decomposition(self, op: OpOverload, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        if op not in self._decomposes:
            decomposition = self.decompositions.get(op)
            first = next(iter(tensors_in(args)), None)
            device = "cpu" if first is None else first.device.type
            if decomposition is None and internals.has_composite_kernel_only(op, device):
                decomposition = op.decompose
            self._decomposes[op] = decomposition
        return self._decomposes[op]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record one op."""
        if any(kind is not FakeTensor for kind in types):
            raise errors.SubclassError(f"`{func}` is called with a tensor subclass", line=self._line())
        if self.subclass_mode is None and internals.padding_of_lookup(func, args) is not None:
            raise errors.SubclassError(f"`{func}` has a sparse gradient", line=self._line())
        if self.phase == "backward":
            # When autograd calls this method in a backward, `EscapeGuard` is active, and must not see the engine's own
            # calls. In the forward it is not active here.
            with internals.disable_torch_function():
                return self.record(func, args, kwargs or {})
        if torch.is_inference_mode_enabled() != self._inference:
            if self._inference or self.tape.operations:
                raise RunEagerly("inference-mode-between-ops", at=self._line())
            raise EntersInferenceMode
        return self.record(func, args, kwargs or {})

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on fake tensors and append it, or the ops that replace it, to the tape."""
        if func in _NOT_RECORDED:
            return _NOT_RECORDED[func](*args)
        if not isinstance(func, OpOverload):
            if isinstance(func, HigherOrderOperator):
                refuse_higher_order(func, self._line())
            return func(*args, **kwargs)
        if self.values_only and func in internals.VECTORS_FLAG:
            args, kwargs = args[:2], {**kwargs, internals.VECTORS_FLAG[func]: False}
        result = self._decomposed(func, args, kwargs)
        if result is not NotImplemented:
            return result
        if func in _LIFTS and not isinstance(args[0], FakeTensor):
            return self._lift(args[0])
        self._check_arguments(func, args, kwargs)
        if func in self._op_handlers:
            result = self._op_handlers[func](self, args, kwargs)
            if result is not NotImplemented:
                return result
        self._check_draws(func, args, kwargs)
        self._check_settings(func)
        if self.phase == "backward" and func is torch.ops.aten.mul.Tensor and internals.fills_by_mask(args[0]):
            # In this case eager's kernel on the CPU copies the elements at which the mask is true into a tensor of
            # zeros. A product with the mask would give NaN for the other elements if they are not finite.
            return self.record(torch.ops.aten.where.ScalarOther, (*args, 0.0), kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            if self._is_constant((args, kwargs)):
                return self._run_on_constants(func, args, kwargs)
            answer = None if self.answer is None else self.answer(func, args)
            if answer is not None:
                return answer
        if self.unbacked and func is internals.ITEM and args[0].dtype is torch.bool:
            return self.record(func, (self.record(internals.CAST, args, {"dtype": torch.int64}),), {}) == 1
        try:
            result = self._run_on_fakes(func, args, kwargs)
        except (internals.DataDependentOutputException, internals.DynamicOutputShapeException) as error:
            raise self._needs_values_error(func, (args, kwargs), error) from error
        return self._append_call(func, args, kwargs, result)

    def _decomposed(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the decomposition of an op, and return its result.

        Return NotImplemented if the op must be recorded as it is, because no decomposition applies.
        """
        decomposition = self._decomposition(func, args)
        if decomposition is None:
            return NotImplemented
        outermost = self._original is None
        with replaced(self, "_original", self._original or func):
            with self:
                result = decomposition(*args, **kwargs)
            if outermost and result is not NotImplemented and func in self.decompositions:
                result = self._with_op_strides(func, args, kwargs, result)
        return result

    def _check_arguments(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse tensors that are not on the tape, and mutating ops that functionalization did not replace."""
        for tensor in tensors_in(args) if not kwargs else tensors_in((args, kwargs)):
            if not self.tape.knows(tensor):
                self._refuse_foreign(func, tensor)
        if func._schema.is_mutable:
            raise errors.HigherOrderOpError(
                f"`{func}` changes its arguments and functionalization has no rule for it",
                line=self._line(),
                why="the write would be lost or done at the wrong time",
                suggestion="call it outside of the compiled function, or use an op that returns its result",
            )

    def _check_draws(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse random ops that would draw other numbers in a graph."""
        if draws_otherwise(func, args, exact=self.exact_draws):
            op = func.overloadpacket.__name__.removesuffix("_functional")
            raise RunEagerly("draws-in-order-of-memory", op=op, at=self._line())
        if draws(func, args, kwargs) and any(
            isinstance(argument, torch.Generator) for argument in (*args, *kwargs.values())
        ):
            raise errors.RandomOpError(
                f"`{func}` draws from a generator that is passed to it",
                line=self._line(),
                why="a graph cannot contain a generator",
                suggestion=f"use the default generator, or {BY_DYNAMO}",
            )

    def _append_call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Append an op with its fake ``result``, and return the result that the program gets.

        The program may get another tensor, if further ops are recorded that correct the result.
        """
        if draws(func, args, kwargs):
            result = self._append_draw(func, args, kwargs, result)
            return self._from_mask(result) if func is torch.ops.aten.bernoulli.p else result
        if func in internals.LAID_OUT and self.decompositions and strides_may_differ(func, args, kwargs):
            # If a backend decomposes the op later, the result has the strides of torch's own fake result, so the fake
            # result is recorded. The program gets a copy with eager's strides.
            promised = internals.call_by_fake_mode(self.fake_mode, func, args, kwargs)
            self.append(func, args, kwargs, promised)
            return with_strides_of(promised, result, self.record)
        self.append(func, args, kwargs, result)
        return result

    def _append_draw(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Append a random op, or its functional form if it must draw from a state that is a value of the graph."""
        repeated = self.states.repeated
        if repeated is not None:
            result = internals.pytree.tree_map_only(Tensor, lambda _: next(repeated), result)
        results = tensors_in(result)
        self.states.drawn += results
        if repeated is not None:
            return result
        device = results[0].device
        current_state = self.states.next_state(device)
        if current_state is None:
            self.append(*with_name(func, args, kwargs), result)
            return result
        next_state = internals.new_fake(
            self.fake_mode, current_state.shape, current_state.stride(), current_state.dtype, current_state.device
        )
        args, kwargs = without_generator(func, args, kwargs)
        self.append(functional_random_op(func), (current_state, *args), kwargs, (*results, next_state))
        self.states.set_next_state(device, next_state)
        return result

    def _from_mask(self, zeros_and_ones: Tensor) -> Tensor:
        """Record a bool mask and its conversion to zeros and ones, and return the converted tensor.

        Then the backward can save the mask, which takes less memory than ``zeros_and_ones``.
        """
        if not (zeros_and_ones.is_floating_point() and self.phase == "forward" and torch.is_grad_enabled()):
            return zeros_and_ones
        mask = self.record(torch.ops.aten.ne.Scalar, (zeros_and_ones, 0), {})
        result: Tensor = self.record(internals.CAST, (mask,), {"dtype": zeros_and_ones.dtype})
        return result

    def _append_on_state(self, op: OpOverload, args: tuple[Any, ...]) -> Tensor:
        """Append an op that reads or sets the state of a generator, and return the fake state."""
        with internals.outside_of_trace():
            shape = (state_size(args[-1]),)
            state = internals.new_fake(self.fake_mode, shape, (1,), torch.uint8, torch.device("cpu"))
        self.tape.append(Operation(len(self.tape.operations), op, args, {}, state, self.phase, None, None, None, op))
        return state

    def _with_op_strides(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Return the result of a decomposition of ``func`` with the strides of the op's own result."""
        if func._schema.is_mutable or not strides_may_differ(func, args, kwargs):
            return result
        try:
            fake = self._run_on_fakes(func, args, kwargs)
        except (internals.DataDependentOutputException, internals.DynamicOutputShapeException, NotImplementedError):
            return result  # the op itself has no fake kernel for these arguments
        return with_strides_of(result, fake, self.record)

    def _needs_values_error(self, func: OpOverload, arguments: Any, error: Exception) -> errors.DataDependentError:
        """Return the error for an op that needs values. `boundary.explain_values_needed` later rewords its message."""
        of_size = isinstance(error, internals.DynamicOutputShapeException)
        refusal = errors.DataDependentError(
            f"`{func}` {'has a result whose size depends on' if of_size else 'needs'} the values of a tensor",
            line=self._line(),
            why="a traced tensor has no values, and a graph has one size for each result",
            suggestion=f"move it out of the compiled function, or {BY_DYNAMO}",
        )
        refusal.of_size = of_size
        outside = self.tape.needed(tensors_in(arguments), set())[1]
        refusal.inputs = tuple(self.names[id(fake)] for fake in outside if id(fake) in self.names)
        return refusal

    def _run_on_fakes(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func`` on fake tensors, or make its results from the cache if equal arguments occurred before.

        Tensors are equal here if they have the same sizes, strides, offset, dtype and device (see `aotlab.trace.memo`).
        """
        key, memo = None, self._shared_memo if func.namespace in internals.TORCHS_OWN else self._memo
        if func not in self._unmemoisable:
            try:
                # In the forward no setting can differ, because `_check_settings` raises if one changes.
                settings = None if self.phase == "forward" else tuple(_settings().values())
                key = (func, memo_key(args), memo_key(kwargs) if kwargs else None, settings)
            except NoKey:
                pass
        cached = memo.get(key) if key is not None else None
        if cached is not None:
            if len(cached) == 5:
                return internals.new_fake_view(self.fake_mode, args[0], *cached[:4])
            return remake(self.fake_mode, cached)
        result = internals.call_by_fake_mode(self.fake_mode, func, args, kwargs)
        for value in result if isinstance(result, (tuple, list)) else (result,):
            kind = _unrepresentable(func, value)
            if kind is not None:
                fact = f"`{func}` makes {kind}"
                if internals.forward_ad_active():
                    fact = "forward-mode differentiation uses zeros without memory for a missing tangent"
                advice = f"at {self._line()}; do this outside of the compiled function"
                raise Untraceable(f"{fact}, which a trace cannot represent, {advice}")
        result = internals.as_in_eager(func, args, kwargs, result, self.fake_mode)
        if key is not None and not (self.unbacked and self.unbacked.depend_on_values(result, (args, kwargs))):
            memo[key] = described = memo_value(result, args, kwargs)
            if described is None:
                self._unmemoisable.add(func)
        return result

    def _check_settings(self, func: Any) -> None:
        """Raise if the function changed a global setting before it calls an op.

        The graph runs under the settings of the call, so the op would run under another setting than in eager.
        """
        now = _settings()
        if now != self._settings and self.phase == "forward":
            name = next(name for name, value in now.items() if value != self._settings[name])
            raise errors.EscapeError(
                f"the function changes a global setting, {name}, before it calls `{func}`",
                line=self._line(),
                why="the graph runs under the setting of the call",
                suggestion="change it outside of the compiled function",
            )

    def _is_constant(self, arguments: Any) -> bool:
        """Tell whether the tensors in ``arguments`` are the same at every call.

        They are the same if they depend on no input, no symbolic size, no random op, and no op with side effects.
        """
        needed, outside = self.tape.needed(tensors_in(arguments), set())
        operations = [self.tape.operations[index] for index in needed]
        leaves = internals.pytree.tree_leaves([(operation.args, operation.kwargs) for operation in operations])
        varies = any(map(internals.is_symbolic, leaves))
        return not (
            outside
            or varies
            or any(operation.draws_as or may_have_effects(operation.target) for operation in operations)
        )

    def _run_on_constants(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that needs the values of its arguments. They are constants, so their values are computed first."""
        module = self.tape.graph("Constants", [], tensors_in((args, kwargs)))
        values = iter(internals.forward_of(module)())

        def real(value: Any) -> Any:
            if isinstance(value, Tensor):
                return next(values)
            if isinstance(value, list | tuple):
                return type(value)([real(item) for item in value])
            return value

        return func(*[real(arg) for arg in args], **{name: real(value) for name, value in kwargs.items()})

    def append(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Append an op with its ``result``, its user line and its autograd sequence number."""
        if self.unbacked is not None and self.phase == "forward":
            self.unbacked.record_assertions()
        if self.phase == "forward":
            sequence: int | None = internals.sequence_number() - 1
            position, meta = user_code_position(), self.meta
            self._origins.setdefault(sequence, (position, meta))  # type: ignore[arg-type]  # an int on this branch
        else:
            sequence = internals.current_node_sequence()
            position, meta = (None, None) if sequence is None else self._origins.get(sequence, (None, None))
        original = self._original or func
        index = len(self.tape.operations)
        operation = Operation(index, func, args, kwargs, result, self.phase, position, sequence, meta, original)
        self.tape.append(operation)
        if self.unbacked is not None:
            self.unbacked.bind(operation)

    def _line(self) -> UserLine | None:
        if self.phase == "backward":
            sequence = internals.current_node_sequence()
            position, _ = (None, None) if sequence is None else self._origins.get(sequence, (None, None))
            return None if position is None else position()
        return user_line()

    def _lift(self, real: Tensor) -> Tensor:
        """Make a constant of a real tensor that the program built from Python data, for example `torch.tensor([1, 2])`.

        Return a fake tensor for a copy of the constant.
        """
        copy = real.detach().clone()
        constant = self.tape.add_constant(copy, self.fake_mode.from_tensor(copy, static_shapes=True))
        # The program gets a copy of the constant, because in eager it makes a new tensor at each call. The fake tensor
        # of the copy is made from a real tensor, so that the fake mode knows its values. This is a second real tensor,
        # so that the fake mode does not return the fake tensor of the constant.
        another = real.detach().clone()
        with self.fake_mode:
            fake: Tensor = torch.ops.aten.lift_fresh_copy.default(another)
        self.append(torch.ops.aten.clone.default, (constant,), {}, fake)
        return fake

    def _refuse_foreign(self, func: Any, tensor: Tensor) -> NoReturn:
        if isinstance(tensor, FakeTensor):
            raise Untraceable(
                f"`{func}` takes a tensor that the trace did not record, at {self._line()}. Perhaps the function calls "
                "nn.Parameter(…) or builds a module. Create the parameter or the module outside of the function. Then "
                "pass the parameter as an argument, or compile the module"
            )
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            fact = f"{called(tensor, 'a tensor')} is a `{type(tensor).__qualname__}`, and `{func}` is called with it"
            raise errors.SubclassError(fact, line=self._line(), why="it has no inner tensors for a graph")
        name = name_of(tensor)
        raise errors.CapturedTensorError(
            f"`{func}` takes {'' if name is None else f'`{name}`, '}"
            f"a tensor of shape {tuple(tensor.shape)} that is not an argument",
            line=self._line(),
            why="its values would become constants of the graph",
            suggestion=f"pass it as an argument, or {BY_DYNAMO}",
        )


#: Records an op, or returns NotImplemented. Its arguments: the recorder, the positional arguments, the keyword
#: arguments.
OpHandler = Callable[[Recorder, tuple[Any, ...], dict[str, Any]], Any]
