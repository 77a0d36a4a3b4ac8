"""The recorder: a dispatch mode that writes down every op while the program runs on fake tensors.

It stands below autograd and functionalization, so what it sees is already pure: no mutation, no
wrappers. There are no proxies. An op that arrives is run on fake tensors and appended to a `Tape`;
which op made a value is looked up by the identity of the fake tensor, all of which the tape keeps
alive. Only when the trace is over are fx graphs written from the tape, each with just the ops that
its outputs need. One tape serves the joint graph and every later backward::

    tape = Tape()
    x = tape.enter(fake_mode.from_tensor(real))
    with Recorder(tape, fake_mode, {}):
        y = x * 2
    module = tape.graph("double", inputs=[("primals_1", x)], outputs=[y])
"""

from __future__ import annotations

import linecache
import operator
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from aotlab import torch_internals as internals
from aotlab.errors import (
    CapturedTensorError,
    DataDependentError,
    EscapeError,
    GraphInvariantError,
    HigherOrderOpError,
    HooksError,
    MetadataMutationError,
    RefusedError,
    StorageMutationError,
    SubclassError,
    UserLine,
)
from aotlab.ir.graphs import Phase
from aotlab.torch_internals import FakeTensor, FakeTensorMode, HigherOrderOperator, OpOverload, TorchDispatchMode

_TORCH = str(Path(torch.__file__).parent)
_HERE = Path(__file__).parent
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_ENGINE = tuple(
    str(_HERE / name)
    for name in ("recorder.py", "stages", "frontends", "pipeline.py", "cache.py", "api.py", "torch_internals.py")
)


# --- where the user is -------------------------------------------------------------------------------------------


class Place:
    """A place in running code, kept as code object and instruction, symbolised only when asked for."""

    __slots__ = ("code", "instruction")

    def __init__(self, code: CodeType, instruction: int) -> None:
        self.code = code
        self.instruction = instruction

    def __call__(self) -> UserLine:
        """Look the line up."""
        number = self.code.co_firstlineno
        for start, end, line in self.code.co_lines():
            if start <= self.instruction < end and line is not None:
                number = line
        return UserLine(
            file=self.code.co_filename,
            line=number,
            function=self.code.co_name,
            code=linecache.getline(self.code.co_filename, number).strip(),
        )


_is_user_code: dict[CodeType, bool] = {}


def user_place() -> Place | None:
    """Find the innermost running frame that belongs to neither torch, the engine nor the standard library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        known = _is_user_code.get(code)
        if known is None:
            file = code.co_filename
            known = not file.startswith((_TORCH, *_ENGINE, "<frozen", "<aotlab", "<eval_with_key>"))
            if file.startswith(_STANDARD_LIBRARY) and "-packages" not in file:
                known = False
            _is_user_code[code] = known
        if known:
            return Place(code, frame.f_lasti)
        frame = frame.f_back
    return None


def user_line() -> UserLine | None:
    """Return the line of the innermost user frame, for an error."""
    place = user_place()
    return None if place is None else place()


# --- the tape ----------------------------------------------------------------------------------------------------


class Operation:
    """One recorded op: what was called on which fake tensors, what came out, and where it comes from.

    ``original`` is the op that was being decomposed when this one was called, else this one; kernels are named by it.
    """

    __slots__ = ("args", "index", "kwargs", "meta", "original", "phase", "place", "result", "sequence", "target")

    def __init__(
        self,
        index: int,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        phase: Phase,
        place: Callable[[], UserLine | None] | None,
        sequence: int | None,
        meta: dict[str, Any] | None,
        original: OpOverload,
    ) -> None:
        self.original = original
        self.index = index
        self.target = target
        self.args = args
        self.kwargs = kwargs
        self.result = result
        self.phase = phase
        self.place = place
        self.sequence = sequence
        self.meta = meta

    @property
    def is_random(self) -> bool:
        """Whether it draws from a random generator."""
        return isinstance(self.target, OpOverload) and torch.Tag.nondeterministic_seeded in self.target.tags

    @property
    def is_impure(self) -> bool:
        """Whether it must stay although nobody uses its result."""
        return self.is_random or self.target in _ASSERTIONS


_ASSERTIONS = frozenset(
    op
    for op in (
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten._assert_tensor_metadata.default,
    )
)

#: Where a value comes from: an input or constant by name, or an op's result at a path.
_Origin = tuple[Operation, tuple[int, ...]] | str


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in an op's arguments or results, which nest in lists and tuples only."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


class Tape:
    """The ops of one trace in order, and the fx graphs that can be written from them."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.constants: dict[str, Tensor] = {}
        self.constant_fakes: dict[str, Tensor] = {}
        self._origin: dict[int, _Origin] = {}
        self._entered: list[Tensor] = []

    def enter(self, fake: Tensor) -> Tensor:
        """Make ``fake`` known as a value from outside; graphs that use it must name it among their inputs."""
        self._entered.append(fake)
        self._origin[id(fake)] = ""
        return fake

    def add_constant(self, real: Tensor, fake: Tensor) -> Tensor:
        """Make ``fake`` stand for ``real``, which graphs carry as an attribute."""
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = real
        self.constant_fakes[name] = fake
        self._origin[id(fake)] = name
        return fake

    def knows(self, fake: Tensor) -> bool:
        """Tell whether ``fake`` is a value of this tape."""
        return id(fake) in self._origin

    def producer(self, fake: Tensor) -> tuple[Operation, tuple[int, ...]] | None:
        """Return the op that made ``fake`` and the path in its results; None for a value from outside."""
        origin = self._origin[id(fake)]
        return None if isinstance(origin, str) else origin

    def append(self, operation: Operation) -> None:
        """Add an op; results that are also arguments keep their first origin."""
        self.operations.append(operation)
        result = operation.result
        if isinstance(result, Tensor):
            self._origin.setdefault(id(result), (operation, ()))
        else:
            self._register(operation, result, ())

    def _register(self, operation: Operation, value: Any, path: tuple[int, ...]) -> None:
        if isinstance(value, Tensor):
            self._origin.setdefault(id(value), (operation, path))
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                self._register(operation, item, (*path, i))

    def needed(self, outputs: Sequence[Tensor | None], stop: set[int]) -> tuple[set[int], list[Tensor]]:
        """Return the indices of the ops that ``outputs`` need, and the values from outside that those use.

        The walk ends at values whose ``id`` is in ``stop``.
        """
        found: set[int] = set()
        outside: dict[int, Tensor] = {}
        todo = [o for o in outputs if o is not None]
        while todo:
            value = todo.pop()
            if id(value) in stop:
                continue
            origin = self._origin[id(value)]
            if isinstance(origin, str):
                if not origin:
                    outside[id(value)] = value
                continue
            operation = origin[0]
            if operation.index in found:
                continue
            found.add(operation.index)
            todo.extend(tensors_in(operation.args))
            if operation.kwargs:
                todo.extend(tensors_in(operation.kwargs))
        return found, list(outside.values())

    def graph(
        self,
        name: str,
        inputs: Sequence[tuple[str, Tensor]],
        outputs: Sequence[Tensor | None],
        *,
        keep_impure: Phase | None = None,
        write_back: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> fx.GraphModule:
        """Write the graph that computes ``outputs`` from ``inputs``.

        Parameters
        ----------
        name
            The class name of the module.
        inputs
            Placeholder names and the fake tensors that they stand for; may be any values of the tape.
        outputs
            Fake tensors of the tape; None stays None.
        keep_impure
            Keep random and asserting ops of that phase even if nobody uses them.
        write_back
            Pairs of an input and the value that the graph writes into it at its end.

        Raises
        ------
        GraphInvariantError
            An output needs a value from outside that is not among the inputs.
        """
        stop = {id(fake) for _, fake in inputs}
        wanted, outside = self.needed([*outputs, *(value for _, value in write_back)], stop)
        if keep_impure is not None:
            impure = [o for o in self.operations if o.phase == keep_impure and o.is_impure and o.index not in wanted]
            more, further = self.needed([t for o in impure for t in tensors_in((o.args, o.kwargs))], stop)
            wanted |= more | {o.index for o in impure}
            outside += further
        if outside:
            raise GraphInvariantError(f"graph {name} uses {len(outside)} value(s) that are not among its inputs")

        graph = fx.Graph()
        root = torch.nn.Module()
        nodes: dict[int, fx.Node] = {}
        for placeholder, fake in inputs:
            node = graph.placeholder(placeholder)
            _describe(node, fake)
            nodes[id(fake)] = node

        def use(fake: Tensor) -> fx.Node:
            node = nodes.get(id(fake))
            if node is not None:
                return node
            origin = self._origin[id(fake)]
            if isinstance(origin, str):
                setattr(root, origin, self.constants[origin])
                node = graph.get_attr(origin)
            else:
                operation, path = origin
                node = results[operation.index]
                for item in path:
                    node = graph.create_node("call_function", operator.getitem, (node, item), {})
                    _inherit(node, operation)
            _describe(node, fake)
            nodes[id(fake)] = node
            return node

        def convert(value: Any) -> Any:
            if isinstance(value, Tensor):
                return use(value)
            if type(value) is list or isinstance(value, torch.Size):
                return [convert(item) for item in value]
            if type(value) is tuple:
                return tuple([convert(item) for item in value])
            if type(value) is complex and 0.0 in (value.real, value.imag):
                # written as `-0j` it would come back with another sign
                return graph.call_function(complex, (value.real, value.imag))
            return value

        results: dict[int, fx.Node] = {}
        for index in sorted(wanted):
            operation = self.operations[index]
            args = tuple([convert(arg) for arg in operation.args])
            kwargs = {key: convert(arg) for key, arg in operation.kwargs.items()}
            node = graph.create_node("call_function", operation.target, args, kwargs, _name_of(operation.target))
            _inherit(node, operation)
            results[index] = node
            if isinstance(operation.result, Tensor):
                _describe(node, operation.result)
                nodes.setdefault(id(operation.result), node)
            else:
                node.meta["val"] = operation.result
        returned = [None if o is None else use(o) for o in outputs]
        for target, value in write_back:
            node = graph.call_function(torch.ops.aten.copy_.default, (use(target), use(value)))
            node.meta["val"] = target
            node.meta["phase"] = "forward"
        graph.output(tuple(returned))
        return internals.graph_module(root, graph, name)


def _name_of(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target.overloadpacket.__name__)
    return str(getattr(target, "__name__", "call"))


def _inherit(node: fx.Node, operation: Operation) -> None:
    meta = node.meta
    meta["phase"] = operation.phase
    meta["operation"] = operation.index
    meta["original_aten"] = operation.original
    if operation.place is not None:
        meta["user_line"] = operation.place
    if operation.sequence is not None:
        meta["seq_nr"] = operation.sequence
    if operation.phase == "backward":
        # the tag by which upstream's partitioners know the backward's nodes
        meta["partitioner_tag"] = "is_backward"
    if operation.meta:
        meta.update(operation.meta)


#: The ``tensor_meta`` of each kind of tensor; they hold no tensors and are few.
_tensor_metas: dict[Any, Any] = {}


def _describe(node: fx.Node, fake: Tensor) -> None:
    node.meta["val"] = fake
    key = (fake.shape, fake.stride(), fake.dtype)
    known = _tensor_metas.get(key)
    if known is None:
        known = _tensor_metas[key] = internals.extract_tensor_metadata(fake)
    node.meta["tensor_meta"] = known
    node.meta.setdefault("phase", "forward")


# --- the dispatch mode -------------------------------------------------------------------------------------------

_ANSWERED_BY_THE_FAKE = {torch.ops.prim.device.default: lambda tensor: tensor.device}
_LIFTS = frozenset(
    (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift.default)
)


class Recorder(TorchDispatchMode):
    """Run each op on fake tensors and append it to the tape.

    Parameters
    ----------
    tape
        Where ops go.
    fake_mode
        The mode that made the inputs.
    decompositions
        Ops that are replaced by what their function calls.

    Raises
    ------
    CapturedTensorError, HigherOrderOpError, SubclassError, DataDependentError
        From inside the traced program, at the op concerned.
    """

    supports_higher_order_operators = True

    def __init__(
        self, tape: Tape, fake_mode: FakeTensorMode, decompositions: dict[Any, Callable[..., Any]] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.tape = tape
        self.fake_mode = fake_mode
        self.decompositions = decompositions or {}
        self.phase: Phase = "forward"
        self.place: Callable[[], UserLine | None] | None = None
        self.meta: dict[str, Any] | None = None
        self._original: OpOverload | None = None
        self._decomposes: dict[Any, Callable[..., Any] | None] = {}
        self._memo: dict[Any, Any] = {}
        self._unmemoisable: set[OpOverload] = set()
        self._places: dict[int, Callable[[], UserLine | None]] = {}
        self._metas: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Recorder:
        """Start recording."""
        _active.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop recording."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch
        _active.pop()

    def _decomposition(self, op: Any) -> Callable[..., Any] | None:
        if op not in self._decomposes:
            found = self.decompositions.get(op)
            if found is None and internals.has_composite_implicit_kernel(op):
                found = op.decompose
            self._decomposes[op] = found
        return self._decomposes[op]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record one op."""
        kwargs = kwargs or {}
        answer = _ANSWERED_BY_THE_FAKE.get(func)
        if answer is not None:
            return answer(*args)
        if not isinstance(func, OpOverload):
            if isinstance(func, HigherOrderOperator):
                self._refuse_higher_order(func)
            return func(*args, **kwargs)
        decomposition = self._decomposition(func)
        if decomposition is not None:
            outermost = self._original is None
            if outermost:
                self._original = func
            try:
                with self:
                    result = decomposition(*args, **kwargs)
            finally:
                if outermost:
                    self._original = None
            if result is not NotImplemented:
                return result
        if func in _LIFTS and not isinstance(args[0], FakeTensor):
            return self._lift(args[0])
        tape = self.tape
        for tensor in tensors_in(args) if not kwargs else tensors_in((args, kwargs)):
            if not tape.knows(tensor):
                self._refuse_foreign(func, tensor)
        if func._schema.is_mutable:
            self._refuse_mutation(func)
        try:
            result = self._run_on_fakes(func, types, args, kwargs)
        except (internals.DataDependentOutputException, internals.DynamicOutputShapeException) as error:
            raise DataDependentError(
                f"`{func}` has a result that depends on the values of a tensor",
                line=self._line(),
                why="a graph traced ahead of time has no values and one size for each result",
                suggestion="move it out of the compiled function, or use torch.where in place of `if`",
            ) from error
        self._append(func, args, kwargs, result)
        return result

    def _run_on_fakes(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run ``func``; if it ran before on tensors of the same kind, make its results from what is known of them."""
        key = None
        if func not in self._unmemoisable:
            try:
                key = (func, _memo_key(args), _memo_key(kwargs) if kwargs else None, *_settings_in_key())
            except _NoKey:
                key = None
        known = self._memo.get(key) if key is not None else None
        if known is not None:
            if len(known) == 5:
                return internals.new_fake_view(self.fake_mode, args[0], *known[:4])
            return _remake(self.fake_mode, known)
        result = internals.call_by_fake_mode(self.fake_mode, func, types, args, kwargs)
        if key is not None:
            description = _memo_value(result, args, kwargs)
            if description is None:
                self._unmemoisable.add(func)
            else:
                self._memo[key] = description
        return result

    def _append(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tape = self.tape
        place, meta = self.place, self.meta
        if self.phase == "forward":
            sequence: int | None = internals.sequence_number() - 1
            if place is None:
                place = user_place()
            if place is not None:
                self._places.setdefault(sequence, place)  # type: ignore[arg-type]  # an int on this branch
            if meta is not None:
                self._metas.setdefault(sequence, meta)  # type: ignore[arg-type]  # an int on this branch
        else:
            sequence = internals.current_node_sequence()
            if sequence is not None:
                place = self._places.get(sequence)
                meta = self._metas.get(sequence)
        original = self._original or func
        index = len(tape.operations)
        tape.append(Operation(index, func, args, kwargs, result, self.phase, place, sequence, meta, original))

    def _line(self) -> UserLine | None:
        if self.phase == "backward":
            sequence = internals.current_node_sequence()
            place = None if sequence is None else self._places.get(sequence)
            return None if place is None else place()
        return self.place() if self.place is not None else user_line()

    def _lift(self, real: Tensor) -> Tensor:
        """Take a tensor that Python data was just turned into as a constant of the graph."""
        copy = real.detach().clone()
        constant = self.tape.add_constant(copy, self.fake_mode.from_tensor(copy, static_shapes=True))
        # the program gets a copy at each call, as it makes the tensor anew at each call
        # made of a real tensor, so that the fake mode knows its values; of another one, so that it is another fake
        another = real.detach().clone()
        with self.fake_mode:
            fake: Tensor = torch.ops.aten.lift_fresh_copy.default(another)
        self._append(torch.ops.aten.clone.default, (constant,), {}, fake)
        return fake

    def _refuse_foreign(self, func: Any, tensor: Tensor) -> NoReturn:
        if isinstance(tensor, FakeTensor):
            raise GraphInvariantError(f"`{func}` was given a fake tensor of another trace, at {self._line()}")
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise SubclassError(
                f"`{func}` was given a `{type(tensor).__qualname__}`",
                line=self._line(),
                why="tensor subclasses are not supported yet",
            )
        raise CapturedTensorError(
            f"`{func}` was given a tensor of shape {tuple(tensor.shape)} that is not an argument",
            line=self._line(),
            why="its values, or a write to it, would be frozen into the graph",
            suggestion="pass it as an argument, or make it a parameter or buffer of a module given to aot_module",
        )

    def _refuse_mutation(self, func: Any) -> NoReturn:
        raise HigherOrderOpError(
            f"`{func}` changes its arguments and functionalization has no rule for it",
            line=self._line(),
            why="the write would be lost or done at the wrong time",
        )

    def _refuse_higher_order(self, func: Any) -> NoReturn:
        raise HigherOrderOpError(
            f"higher-order op `{func}` has no tracing rule yet",
            line=self._line(),
            suggestion="move it out of the compiled function",
        )


class _NoKey(Exception):  # noqa: N818  # a signal within this file
    """An argument cannot be part of a key."""


def _settings_in_key() -> tuple[Any, ...]:
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def _memo_key(value: Any) -> Any:
    """Turn arguments into a key in which tensors of the same kind are equal, but 1, True and 1.0 are not."""
    if isinstance(value, FakeTensor):
        if value.constant is not None:
            raise _NoKey
        return (value.shape, value.stride(), value.dtype, value.device, value.storage_offset())
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *[_memo_key(item) for item in value])
    if kind is dict:
        return tuple([(name, _memo_key(item)) for name, item in value.items()])
    if kind is float:
        return (kind, value.hex())  # tells 0.0 from -0.0
    if kind in (int, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format) or value is None:
        return (kind, value)
    raise _NoKey


def _memo_value(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Describe results so that they can be made again; None if that cannot be done.

    It can for plain tensors on storages of their own, and for a single view of the first argument.
    """
    if result is None:
        return ()
    if isinstance(result, (tuple, list)):
        items = [_memo_value(item, args, kwargs) for item in result]
        return None if any(item is None or len(item) == 5 for item in items) else (type(result), items)
    if type(result) is not FakeTensor or result.constant is not None or result.layout != torch.strided:
        return None
    if args and isinstance(args[0], FakeTensor) and internals.storage_key(args[0]) == internals.storage_key(result):
        return (result.shape, result.stride(), result.dtype, result.storage_offset(), None)
    own = result.storage_offset() == 0 and result.untyped_storage().nbytes() == result.numel() * result.element_size()
    mine = internals.storage_key(result)
    if not own or any(internals.storage_key(tensor) == mine for tensor in tensors_in((args, kwargs))):
        return None
    return (result.shape, result.stride(), result.dtype, result.device)


def _remake(mode: FakeTensorMode, known: Any) -> Any:
    if not known:
        return None
    if len(known) == 2:
        kind, items = known
        return kind([_remake(mode, item) for item in items])
    return internals.new_fake(mode, *known)


_active: list[Recorder] = []


def locate(place: Callable[[], UserLine | None] | None, meta: dict[str, Any] | None) -> None:
    """Tell the running recorder where the following ops come from; for frontends that know better than the stack."""
    if _active:
        _active[-1].place = place
        _active[-1].meta = meta


# --- ways around the trace ---------------------------------------------------------------------------------------


class RunEagerly(Exception):  # noqa: N818  # a signal, not an error: nothing of it reaches the caller
    """Raised in a trace when eager itself has to have its say, most often by raising its own error."""


def _refuse_swap(first: Tensor, second: Tensor) -> NoReturn:
    raise EscapeError(
        "`torch.utils.swap_tensors` was called inside the function",
        line=user_line(),
        why="it would exchange a traced tensor for another behind the trace's back",
        suggestion="move it out of the compiled function",
    )


def _refuse_dlpack(tensor: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
    raise EscapeError(
        "`to_dlpack` was called inside the function",
        line=user_line(),
        why="the compiled function would see the memory of this one trace",
        suggestion="move it out of the compiled function",
    )


_MEMORY = "the compiled function would see the memory of this one trace"
_ESCAPES: dict[Any, tuple[type[RefusedError], str, str]] = {
    Tensor.numpy: (EscapeError, "`numpy()`", _MEMORY),
    Tensor.__array__: (EscapeError, "`__array__` (numpy)", _MEMORY),
    Tensor.data_ptr: (EscapeError, "`data_ptr()`", _MEMORY),
    Tensor.__dlpack__: (EscapeError, "`__dlpack__`", _MEMORY),
    Tensor.untyped_storage: (EscapeError, "`untyped_storage()`", _MEMORY),
    Tensor.storage: (EscapeError, "`storage()`", _MEMORY),
    Tensor.data.__set__: (EscapeError, "an assignment to `.data`", "the trace cannot see what it does"),  # type: ignore[attr-defined]  # a slot wrapper
    Tensor._version.__get__: (EscapeError, "`_version`", "a compiled call counts versions at other moments"),  # type: ignore[attr-defined]  # a getter
    Tensor.grad.__get__: (EscapeError, "`.grad`", "it belongs to the caller's tensor, not to the traced one"),  # type: ignore[union-attr]  # a getter
    Tensor.grad.__set__: (EscapeError, "an assignment to `.grad`", "it would be lost"),  # type: ignore[union-attr]  # a getter
    Tensor.backward: (EscapeError, "`backward()`", "gradients would be added to traced tensors, not to the caller's"),
    Tensor.tolist: (DataDependentError, "`tolist()`", "a trace has no values"),
    Tensor.__repr__: (DataDependentError, "the text", "a trace has no values"),
    Tensor.__format__: (DataDependentError, "the text", "a trace has no values"),
    Tensor.__deepcopy__: (EscapeError, "`copy.deepcopy`", _MEMORY),
    Tensor.__reduce_ex__: (EscapeError, "a pickle", _MEMORY),
    Tensor.register_hook: (HooksError, "`register_hook`", "the hook would run at trace time only"),
    Tensor.register_post_accumulate_grad_hook: (
        HooksError, "`register_post_accumulate_grad_hook`", "the hook would run at trace time only",
    ),
    Tensor.retain_grad: (HooksError, "`retain_grad()`", "intermediates of a compiled function have no `.grad`"),
}  # fmt: skip


class EscapeGuard(TorchFunctionMode):
    """Refuse, at the Python level, what would look behind a traced tensor or write around the trace.

    ``input_storages`` names the inputs by `torch_internals.storage_key`.
    """

    def __init__(self, input_storages: Mapping[int, str] | None = None) -> None:
        super().__init__()
        self.input_storages = input_storages or {}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let a function pass, or refuse it."""
        escape = _ESCAPES.get(func)
        if escape is not None and args and isinstance(args[0], Tensor) and internals.is_functional(args[0]):
            kind, what, why = escape
            raise kind(
                f"{what} of a traced tensor was asked for",
                line=user_line(),
                why=why,
                suggestion="move it out of the compiled function",
            )
        if func in _RESHAPES_IN_PLACE and args and isinstance(args[0], Tensor) and internals.is_functional(args[0]):
            self._refuse_reshape(func, args[0])
        written = kwargs.get("out") if kwargs else None
        if _writes_in_place(func) and args:
            written = args[0]
        if not isinstance(written, Tensor):
            return func(*args, **(kwargs or {}))
        if overlaps_itself(written):
            raise RunEagerly(f"in-place write to a tensor that overlaps itself, at {user_line()}")
        base = internals.base_of(written)
        owner = written if base is None else base
        shape, stride = owner.shape, owner.stride()
        result = func(*args, **(kwargs or {}))
        if internals.is_functional(owner) and func not in _RESHAPES_IN_PLACE:
            keep_strides(owner, shape, stride)
        return result

    def __enter__(self) -> EscapeGuard:
        """Guard the block; some functions do not ask function modes and are replaced for its length."""
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._replaced = internals.replace_unguarded(_refuse_swap, _refuse_dlpack)
        self._replaced.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the guard."""
        self._replaced.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch

    def _refuse_reshape(self, func: Any, tensor: Tensor) -> None:
        name = self.input_storages.get(internals.storage_key(tensor))
        if func in (Tensor.set_, Tensor.resize_, Tensor.resize_as_):
            if name is None and func is not Tensor.set_:
                return
            raise StorageMutationError(
                f"`{func.__name__}` gives {f'`{name}`' if name else 'an intermediate'} another storage or size",
                line=user_line(),
                why="that is not supported yet",
                suggestion="return a new tensor",
                argument=name,
            )
        if name is not None:
            raise MetadataMutationError(
                f"`{func.__name__}` changes `{name}`, or a view of it, other than in its values",
                line=user_line(),
                why="that is not supported yet",
                suggestion=f"use the out-of-place form, as `{func.__name__.removesuffix('_')}`",
                argument=name,
            )


def keep_strides(wrapper: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> None:
    """Give a wrapper that was written the strides back that it had, where they differ.

    An op in place keeps its tensor's strides; its out-of-place twin, which functionalization puts in its stead, is free
    to choose, and what is computed from its result inherits the choice.
    """
    internals.sync(wrapper)
    if wrapper.shape != shape or internals.from_functional(wrapper).stride() == stride:
        return
    with torch.no_grad():
        fresh = torch.empty_strided(shape, stride, dtype=wrapper.dtype, device=wrapper.device)
        fresh.copy_(wrapper)
        internals.sync(fresh)
        internals.replace_value(wrapper, internals.from_functional(fresh))


_RESHAPES_IN_PLACE = frozenset(
    (
        Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_, Tensor.unsqueeze_,
        Tensor.as_strided_, Tensor.detach_, Tensor.set_, Tensor.resize_, Tensor.resize_as_,
    )
)  # fmt: skip
_in_place: dict[Any, bool] = {}


def _writes_in_place(func: Any) -> bool:
    known = _in_place.get(func)
    if known is None:
        name = getattr(func, "__name__", "")
        known = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        known = known or (
            name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
        )
        _in_place[func] = known
    return known


def overlaps_itself(tensor: Tensor) -> bool:
    """Tell whether two indices of ``tensor`` surely share memory, as after ``expand``."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
