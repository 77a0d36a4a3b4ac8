"""The dispatch mode that writes the tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab import errors
from aotlab._torch import FakeTensor, FakeTensorMode, HigherOrderOperator, OpOverload, TorchDispatchMode
from aotlab._torch.replaced import replaced
from aotlab.capture.signals import EntersInferenceMode, RunEagerly
from aotlab.errors import BY_DYNAMO, UserLine
from aotlab.guards.places import Locator, called, name_of, user_line, user_place
from aotlab.ir.graphs import Phase, acts
from aotlab.trace.boundary import refuse_higher_order
from aotlab.trace.corrections import laid_out, needs_look
from aotlab.trace.memo import NoKey, memo_key, memo_value, remake
from aotlab.trace.quirk import Quirk
from aotlab.trace.random_state import States, drawn, draws, state_size, without_generator
from aotlab.trace.running import here
from aotlab.trace.tape import Operation, Tape, Untraceable, tensors_in

_ANSWERED_BY_THE_FAKE: dict[Any, Callable[..., Any]] = {
    torch.ops.prim.device.default: lambda tensor: tensor.device,
    torch.ops.aten.size.default: lambda tensor: tensor.shape,
    torch.ops.aten.sym_size.int: lambda tensor, dim: tensor.shape[dim],
    torch.ops.aten.sym_stride.int: lambda tensor, dim: tensor.stride(dim),
    torch.ops.aten.sym_numel.default: lambda tensor: tensor.numel(),
    torch.ops.aten.sym_storage_offset.default: lambda tensor: tensor.storage_offset(),
}
_LIFTS = frozenset(
    (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift.default)
)

_QUANTIZED = frozenset((torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4))

#: What functionalization puts for random ops in place: it fills in the order of indices, they in that of memory.
_TWINS_OF_RANDOM_WRITES = frozenset(
    ("bernoulli", "uniform", "normal_functional", "exponential", "geometric", "log_normal", "cauchy", "random")
)
_RANDOM_BETWEEN = getattr(torch.ops.aten.random, "from")


def _settings() -> dict[str, Any]:
    """Return what kernels look at when they run and the graph does not say."""
    return {
        "the default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the precision of matmuls": internals.matmul_precision(),
    }


class Recorder(TorchDispatchMode):
    """Run each op on fake tensors and append it to the tape; refuse what no graph can hold, at the op concerned.

    ``decompositions`` are ops that are replaced by what their function calls; ``functional`` says that random ops take
    the state of their generator and return the next one; ``exact``, that graphs compute bit for bit what eager does;
    ``known``, what torch's own ops give under the call's settings (`aotlab.trace.memo`); ``sizes``, those that vary.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        tape: Tape,
        fake_mode: FakeTensorMode,
        decompositions: dict[Any, Callable[..., Any]] | None = None,
        *,
        exact: bool = False,
        functional: bool = False,
        quirks: Sequence[Quirk] = (),
        known: dict[Any, Any] | internals.SymbolicMemo | None = None,
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
        self.names: dict[int, str] = {}  # what the user calls the inputs, by the ids of their fakes
        self.values_only = False
        self._original: OpOverload | None = None
        self._decomposes: dict[Any, Callable[..., Any] | None] = {}
        self._memo: dict[Any, Any] = {}
        self._known = {} if known is None else known
        self.states = States(self._append_on_state, functional=functional)
        self.has_checkpoints = False
        self.exact = exact
        self._unmemoisable: set[OpOverload] = set()
        self._origins: dict[int, tuple[Locator | None, dict[str, Any] | None]] = {}  # by autograd's sequence numbers
        self.quirks = quirks
        self.sizes = sizes
        self.draws_in_choices = False  # whether functions of `torch.cond` may: nobody differentiates them
        self.above: Any = None  # the mode of `aotlab.subclasses`, if that takes part
        self._claims = {op: handler for quirk in quirks for op, handler in quirk.ops().items()}

    def __enter__(self) -> Recorder:
        """Start recording."""
        here.active.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop recording."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch
        here.active.pop()

    def _decomposition(self, op: OpOverload, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        if op not in self._decomposes:
            found = self.decompositions.get(op)
            first = next(iter(tensors_in(args)), None)
            device = "cpu" if first is None else first.device.type
            if found is None and internals.has_composite_kernel_only(op, device):
                found = op.decompose
            self._decomposes[op] = found
        return self._decomposes[op]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record one op."""
        if any(kind is not FakeTensor for kind in types):
            raise errors.SubclassError(f"`{func}` is called with a tensor subclass", line=self._line())
        if self.above is None and internals.padding_of_lookup(func, args) is not None:
            raise errors.SubclassError(f"`{func}` has a sparse gradient", line=self._line())
        if self.phase == "backward":
            # in the forward the function mode that guards the trace has stepped aside; autograd calls us under it
            with internals.disable_torch_function():
                return self.record(func, args, kwargs or {})
        if torch.is_inference_mode_enabled() != self._inference:
            kind = RunEagerly if self._inference or self.tape.operations else EntersInferenceMode
            raise kind(
                f"inference_mode is turned on or off between ops, at {self._line()}",
                suggestion="use no_grad there, or inference_mode around all of it, to have it compiled",
            )
        return self.record(func, args, kwargs or {})

    def record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on fake tensors and append it, or what stands for it, to the tape."""
        if func in _ANSWERED_BY_THE_FAKE:
            return _ANSWERED_BY_THE_FAKE[func](*args)
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
        if func in self._claims:
            result = self._claims[func](self, args, kwargs)
            if result is not NotImplemented:
                return result
        if func is _RANDOM_BETWEEN and args[2] is not None and args[0].is_contiguous() and not kwargs.get("generator"):
            # "from" cannot be written in the Python of a graph; this fills new memory by the same kernel
            like = {"dtype": args[0].dtype, "device": args[0].device}
            return self.record(torch.ops.aten.randint.low, (args[1], args[2], list(args[0].shape)), like)
        self._check_draws(func, args, kwargs)
        self._check_settings(func)
        if self.phase == "backward" and func is torch.ops.aten.mul.Tensor and internals.fills_by_mask(args[0]):
            # on the CPU, eager writes into zeros where the mask says so; a product would make NaN of what is not finite
            return self.record(torch.ops.aten.where.ScalarOther, (*args, 0.0), kwargs)
        try:
            result = self._run_on_fakes(func, args, kwargs)
        except (internals.DataDependentOutputException, internals.DynamicOutputShapeException) as error:
            if isinstance(error, internals.DataDependentOutputException) and self._is_constant((args, kwargs)):
                return self._ask_constants(func, args, kwargs)
            raise self._no_values(func, (args, kwargs), error) from error
        return self._appended(func, args, kwargs, result)

    def _decomposed(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what an op is decomposed into; NotImplemented if it is to be recorded as it is."""
        decomposition = self._decomposition(func, args)
        if decomposition is None:
            return NotImplemented
        outermost = self._original is None
        with replaced(self, "_original", self._original or func):
            with self:
                result = decomposition(*args, **kwargs)
            if outermost and result is not NotImplemented and func in self.decompositions:
                result = self._laid_out(func, args, kwargs, result)
        return result

    def _check_arguments(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse tensors that the tape does not know, and ops that functionalization has let pass."""
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
        """Refuse random ops that a graph would draw otherwise."""
        if func.overloadpacket.__name__ in _TWINS_OF_RANDOM_WRITES and not args[0].is_contiguous():
            line = self._line()
            raise RunEagerly(
                f"`{func}` draws in the order of the memory of a tensor that is not contiguous"
                + ("" if line is None else f", at {line}"),
                suggestion="call contiguous() before, or draw into a contiguous tensor, to have it compiled",
            )
        if draws(func, args, kwargs) and any(isinstance(given, torch.Generator) for given in (*args, *kwargs.values())):
            raise errors.RandomOpError(
                f"`{func}` draws from a generator of its own",
                line=self._line(),
                why="a graph cannot hold a generator",
                suggestion=f"use the default generator, or {BY_DYNAMO}",
            )

    def _appended(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Append an op that gave ``result`` on fake tensors; return what the program gets."""
        if draws(func, args, kwargs):
            result = self._append_draw(func, args, kwargs, result)
            return self._by_mask(result) if func is torch.ops.aten.bernoulli.p else result
        if func in internals.LAID_OUT and self.decompositions and needs_look(func, args, kwargs):
            # a backend that decomposes lays out what it computes as torch's own fakes say
            promised = internals.call_by_fake_mode(self.fake_mode, func, args, kwargs)
            self.append(func, args, kwargs, promised)
            return laid_out(promised, result, self.record)
        self.append(func, args, kwargs, result)
        return result

    def _append_draw(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Append a random op, by the form that takes a state if it is not to draw from the generator as it is."""
        results = tensors_in(result)
        device = results[0].device
        before = self.states.before(device)
        if before is None:
            self.append(func, args, kwargs, result)
            return result
        state = internals.new_fake(self.fake_mode, before.shape, before.stride(), before.dtype, before.device)
        args, kwargs = without_generator(func, args, kwargs)
        self.append(drawn(func), (before, *args), kwargs, (*results, state))
        self.states.after(device, state)
        return result

    def _by_mask(self, zeros_and_ones: Tensor) -> Tensor:
        """Compute zeros and ones from the bools of them, which are a fraction to save for the backward."""
        if not (zeros_and_ones.is_floating_point() and self.phase == "forward" and torch.is_grad_enabled()):
            return zeros_and_ones
        mask = self.record(torch.ops.aten.ne.Scalar, (zeros_and_ones, 0), {})
        result: Tensor = self.record(internals.CAST, (mask,), {"dtype": zeros_and_ones.dtype})
        return result

    def _append_on_state(self, op: OpOverload, args: tuple[Any, ...]) -> Tensor:
        """Append an op that reads or sets the state of a generator."""
        with internals.outside_of_trace():
            shape = (state_size(args[-1]),)
            state = internals.new_fake(self.fake_mode, shape, (1,), torch.uint8, torch.device("cpu"))
        self.tape.append(Operation(len(self.tape.operations), op, args, {}, state, self.phase, None, None, None, op))
        return state

    def _laid_out(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Give what a decomposition of ``func`` computed the strides of the op itself."""
        if func._schema.is_mutable or not needs_look(func, args, kwargs):
            return result
        try:
            fake = self._run_on_fakes(func, args, kwargs)
        except (internals.DataDependentOutputException, internals.DynamicOutputShapeException, NotImplementedError):
            return result  # the op has no fake result of its own
        return laid_out(result, fake, self.record)

    def _no_values(self, func: OpOverload, arguments: Any, error: Exception) -> errors.DataDependentError:
        """Make the error for an op that asks for values; see `aotlab.trace.boundary` for its final words."""
        of_size = isinstance(error, internals.DynamicOutputShapeException)
        made = errors.DataDependentError(
            f"`{func}` {'has a result whose size depends on' if of_size else 'asks for'} the values of a tensor",
            line=self._line(),
            why="a graph traced ahead of time has no values and one size for each result",
            suggestion=f"move it out of the compiled function, or {BY_DYNAMO}",
        )
        made.of_size = of_size
        outside = self.tape.needed(tensors_in(arguments), set())[1]
        made.inputs = tuple(self.names[id(fake)] for fake in outside if id(fake) in self.names)
        return made

    def _run_on_fakes(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``func``; if it ran before on tensors of the same kind, make its results from what is known of them."""
        key, memo = None, self._known if func.namespace in internals.TORCHS_OWN else self._memo
        if func not in self._unmemoisable:
            try:
                settings = None if self.phase == "forward" else tuple(_settings().values())  # in the forward they stay
                key = (func, memo_key(args), memo_key(kwargs) if kwargs else None, settings)
            except NoKey:
                pass
        known = memo.get(key) if key is not None else None
        if known is not None:
            if len(known) == 5:
                return internals.new_fake_view(self.fake_mode, args[0], *known[:4])
            return remake(self.fake_mode, known)
        result = internals.call_by_fake_mode(self.fake_mode, func, args, kwargs)
        name = func.overloadpacket.__name__  # fakes do not say that results are quantized
        quantizes = "quantized" in name or name.startswith("quantize_per")
        for tensor in tensors_in(result):
            dense = tensor.layout == torch.strided and tensor.device.type != "meta"
            if quantizes or not dense or tensor.dtype in _QUANTIZED:
                what = f"`{func}` makes a sparse, quantized, opaque or meta tensor"
                if internals.forward_ad_active():
                    what = "forward-mode differentiation takes a number, or what has no tangent, for zeros of no memory"
                where = f"at {self._line()}; do that outside of the compiled function"
                raise Untraceable(f"{what}, which a trace cannot represent, {where}")
        result = internals.as_in_eager(func, args, kwargs, result, self.fake_mode)
        if key is not None:
            memo[key] = described = memo_value(result, args, kwargs)
            if described is None:
                self._unmemoisable.add(func)
        return result

    def _check_settings(self, func: Any) -> None:
        """Refuse an op under another setting than the call's: the graph will run under the call's."""
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
        """Tell whether tensors are the same at every call: computed from no input, and nothing random among them."""
        needed, outside = self.tape.needed(tensors_in(arguments), set())
        found = [self.tape.operations[index] for index in needed]
        given = internals.pytree.tree_leaves([(each.args, each.kwargs) for each in found])
        varies = any(map(internals.is_symbolic, given))
        return not (outside or varies or any(each.draws_as or acts(each.target) for each in found))

    def _ask_constants(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a question about the values of constants by computing them."""
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
        """Append an op that gave ``result``."""
        if self.phase == "forward":
            sequence: int | None = internals.sequence_number() - 1
            place, meta = user_place(), self.meta
            self._origins.setdefault(sequence, (place, meta))  # type: ignore[arg-type]  # an int on this branch
        else:
            sequence = internals.current_node_sequence()
            place, meta = (None, None) if sequence is None else self._origins.get(sequence, (None, None))
        original = self._original or func
        index = len(self.tape.operations)
        self.tape.append(Operation(index, func, args, kwargs, result, self.phase, place, sequence, meta, original))

    def _line(self) -> UserLine | None:
        if self.phase == "backward":
            sequence = internals.current_node_sequence()
            place, _ = (None, None) if sequence is None else self._origins.get(sequence, (None, None))
            return None if place is None else place()
        return user_line()

    def _lift(self, real: Tensor) -> Tensor:
        """Take a tensor that Python data was just turned into as a constant of the graph."""
        copy = real.detach().clone()
        constant = self.tape.add_constant(copy, self.fake_mode.from_tensor(copy, static_shapes=True))
        # the program gets a copy at each call, as it makes the tensor anew at each call
        # made of a real tensor, so that the fake mode knows its values; of another one, so that it is another fake
        another = real.detach().clone()
        with self.fake_mode:
            fake: Tensor = torch.ops.aten.lift_fresh_copy.default(another)
        self.append(torch.ops.aten.clone.default, (constant,), {}, fake)
        return fake

    def _refuse_foreign(self, func: Any, tensor: Tensor) -> NoReturn:
        if isinstance(tensor, FakeTensor):
            raise Untraceable(
                f"`{func}` was given a tensor that was made around the trace, as by nn.Parameter(…) or in a module "
                f"that is made inside the function, at {self._line()}; make it outside, and pass it in or compile the "
                "module"
            )
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            what = f"{called(tensor, 'a tensor')} is a `{type(tensor).__qualname__}`, and `{func}` is called with it"
            raise errors.SubclassError(what, line=self._line(), why="it wraps no tensors that a graph could hold")
        name = name_of(tensor)
        raise errors.CapturedTensorError(
            f"`{func}` was given {'' if name is None else f'`{name}`, '}"
            f"a tensor of shape {tuple(tensor.shape)} that is not an argument",
            line=self._line(),
            why="its values, or a write to it, would be frozen into the graph",
            suggestion=f"pass it as an argument, or {BY_DYNAMO}",
        )
