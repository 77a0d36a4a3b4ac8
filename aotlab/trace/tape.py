"""The tape: the ops of one trace in order, and the fx graphs that can be written from it."""

from __future__ import annotations

import cmath
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab._torch import OpOverload
from aotlab.errors import GraphInvariantError, UserLine
from aotlab.guards.user_code import CodePosition, stack_trace
from aotlab.ir.fx_graphs import STAYS, Phase, may_have_effects
from aotlab.trace.random_state import READ_STATE, SET_STATE, draws, random_op_of


class Untraceable(Exception):  # noqa: N818  # not an error in the program; it gives the reason to run eagerly
    """Raised if a trace cannot represent a program that eager can run."""


@dataclass(slots=True, eq=False)
class Operation:
    """One recorded op, with its arguments and its result as fake tensors.

    ``code_position`` returns the user line. ``sequence`` is the sequence number of an autograd node: for an op of the
    forward the node that autograd makes for the op, for an op of the backward the node that called the op. ``meta`` is
    metadata from the frontend for the fx node. If a decomposition called the op, ``original`` is the decomposed op,
    otherwise it is the op itself. Inductor names its kernels after ``original``. ``binds`` are the unbacked symbols in
    the op's result, with their paths in it.
    """

    index: int
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    phase: Phase
    code_position: Callable[[], UserLine | None] | None
    sequence: int | None
    meta: dict[str, Any] | None
    original: OpOverload
    binds: dict[Any, Any] | None = None

    @property
    def is_random(self) -> bool:
        """Whether the op draws random numbers, or reads or sets the state of a random generator."""
        return self.target in (READ_STATE, SET_STATE) or draws(self.target, self.args, self.kwargs)

    @property
    def draws_as(self) -> OpOverload | None:
        """The random op by which this op draws numbers, or None if it draws none.

        For a functional random op (`aotlab.trace.random_state`), this is torch's op without a state.
        """
        if self.target in (READ_STATE, SET_STATE):
            return None
        return self.target if self.is_random else random_op_of(self.target)

    @property
    def is_impure(self) -> bool:
        """Whether a graph must keep the op even if no other op uses its result."""
        acting = may_have_effects(self.target) or self.target is internals.SET_GRAD_ENABLED
        return acting or (self.is_random and self.target is not READ_STATE) or self.may_raise

    @property
    def may_raise(self) -> bool:
        """Whether the op's kernel may raise for arguments that its fake implementation accepted."""
        return internals.may_raise(random_op_of(self.target) or self.target, tensors_in((self.args, self.kwargs)))

    @property
    def may_raise_late(self) -> bool:
        """Whether the op's kernel may raise at one call although it accepted another, because it checks values."""
        return internals.may_raise_late(random_op_of(self.target) or self.target, tensors_in((self.args, self.kwargs)))


#: The origin of a value: the op that made it and the path in the op's result; or the name of the constant, which is
#: empty for an input.
_Origin = tuple[Operation, tuple[int, ...]] | str


def tensors_in(value: Any) -> list[Tensor]:
    """List the tensors in an op's arguments or results. Only lists, tuples and the values of dicts are searched."""
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
        self._origin: dict[int, _Origin] = {}
        self.entered: list[Tensor] = []
        #: The op that bound each unbacked symbol, and the symbolic number: a size of the op's result, or the result.
        self.bound: dict[Any, tuple[Operation, Any]] = {}

    def enter(self, fake: Tensor, constant: str = "") -> Tensor:
        """Register ``fake`` as a value from outside of the tape: an input, or the constant named ``constant``."""
        self.entered.append(fake)
        self._origin[id(fake)] = constant
        return fake

    def add_constant(self, real: Tensor, fake: Tensor) -> Tensor:
        """Register ``fake`` as the fake tensor of the constant ``real``, which graphs store as an attribute."""
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = real
        return self.enter(fake, name)

    def knows(self, fake: Tensor) -> bool:
        """Tell whether ``fake`` is a value of this tape."""
        return id(fake) in self._origin

    def name_of_constant(self, fake: Tensor) -> str:
        """Return the name of the constant whose fake tensor is ``fake``, or an empty string for other values."""
        origin = self._origin.get(id(fake), "")
        return origin if isinstance(origin, str) else ""

    def constant(self, fake: Tensor) -> Tensor | None:
        """Return the constant whose fake tensor is ``fake``, or None for other values."""
        return self.constants.get(self.name_of_constant(fake))

    def producer(self, fake: Tensor) -> tuple[Operation, tuple[int, ...]] | None:
        """Return the op that made ``fake`` and the path (indices) to it in the op's results.

        The result is None for a value from outside of the tape (see `enter`).
        """
        origin = self._origin.get(id(fake))
        if origin is None:
            raise Untraceable(
                "the trace did not record a tensor. Perhaps the function calls nn.Parameter(…) or as_subclass(…), or "
                "makes a tensor in another thread"
            )
        return None if isinstance(origin, str) else origin

    def append(self, operation: Operation) -> None:
        """Append an op. If it returns one of its arguments, the producer of that tensor stays the earlier op."""
        self.operations.append(operation)
        self._register(operation, operation.result, ())

    def replace(self, operation: Operation, target: Any, args: tuple[Any, ...], result: tuple[Any, ...]) -> None:
        """Replace the target of a recorded op. The new op's results must include the results of the old op."""
        operation.target, operation.args, operation.result = target, args, result
        for tensor in tensors_in(result):
            self._origin.pop(id(tensor), None)
        self._register(operation, result, ())

    def _register(self, operation: Operation, value: Any, path: tuple[int, ...]) -> None:
        if isinstance(value, Tensor):
            self._origin.setdefault(id(value), (operation, path))
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                self._register(operation, item, (*path, i))

    def draws(self, phase: Phase) -> set[torch.device]:
        """Return the devices of the random generators that the ops of a phase use."""
        drawing = (operation for operation in self.operations if operation.phase == phase and operation.is_random)
        return {tensor.device for operation in drawing for tensor in tensors_in(operation.result)}

    def bind(self, operation: Operation, symbol: Any) -> None:
        """Register that ``operation``, whose result is a symbolic number, binds an unbacked symbol."""
        self.bound[symbol] = operation, operation.result

    def _binding(self, value: Any, stop: Collection[Any]) -> list[Operation]:
        """Return the ops that bind the unbacked symbols in an op's arguments, except the symbols in ``stop``."""
        if not self.bound:
            return []
        expressions = [expr for each in numbers_in(value) for expr in (each.node.expr, each.node._expr)]
        symbols = {symbol for expression in expressions for symbol in internals.unbacked_in(expression)}
        return [self.bound[symbol][0] for symbol in symbols if symbol not in stop]

    def needed(self, outputs: Sequence[Any], stop: Collection[Any]) -> tuple[set[int], list[Tensor]]:
        """Return the indices of the ops that compute ``outputs``, and the values from outside that these ops use.

        Values whose ``id`` is in ``stop`` count as given, so the result has no ops that compute them. So do unbacked
        symbols in ``stop``.
        """
        indices: set[int] = set()
        outside: dict[int, Tensor] = {}
        todo = [o for o in outputs if isinstance(o, Tensor)]
        operations = self._binding(outputs, stop)
        while todo or operations:
            if todo:
                value = todo.pop()
                if id(value) in stop:
                    continue
                producer = self.producer(value)
                if producer is None:
                    if not self.name_of_constant(value):
                        outside[id(value)] = value
                    continue
                operations.append(producer[0])
            operation = operations.pop()
            if operation.index not in indices:
                indices.add(operation.index)
                todo += tensors_in((operation.args, operation.kwargs))
                operations += self._binding((operation.args, operation.kwargs), stop)
        return indices, list(outside.values())

    def graph(
        self,
        name: str,
        inputs: Sequence[tuple[str, Any]],
        outputs: Sequence[Tensor | None],
        *,
        keep_impure: Phase | None = None,
        write_back: Sequence[tuple[Tensor, Tensor]] = (),
        same: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> fx.GraphModule:
        """Write the fx graph that computes ``outputs`` from ``inputs``, which may be any values of the tape.

        The graph keeps the impure ops of the phase ``keep_impure`` (random ops, assertions, ops that may raise) even
        if their results are not used. ``write_back`` are pairs of an input and the value that the graph copies into it
        at its end. ``same`` are pairs of a value and an input; the graph uses the input wherever the value is used.
        """
        stop = {id(fake) for _, fake in inputs} | {id(fake) for fake, _ in same}
        stop |= {
            symbol for _, value in inputs if not isinstance(value, Tensor) for symbol in internals.unbacked_in(value)
        }
        stays = {o.index for o in self.operations if o.phase == keep_impure and o.is_impure}
        results = [*outputs, *(value for _, value in write_back)]
        chosen, unused, outside = self._choose_ops(results, stays, stop)
        if outside:
            raise GraphInvariantError(f"graph {name} uses {len(outside)} value(s) that are not among its inputs")
        writer = _GraphWriter(self, inputs, same)
        for index in sorted(chosen):
            writer.write(self.operations[index], stays=index in unused)
        return writer.finish(name, outputs, write_back)

    def _choose_ops(
        self, results: Sequence[Any], stays: set[int], stop: Collection[Any]
    ) -> tuple[set[int], set[int], list[Tensor]]:
        """Choose the ops of a graph that computes ``results``, with the ops ``stays`` even if they are not needed.

        Return the indices of all its ops, the indices of the ops among them whose results are unused, and the values
        from outside that the ops use. ``stop`` is as in `needed`.
        """
        needed, outside = self.needed(results, stop)
        impure = [self.operations[i] for i in sorted(stays - needed)]
        needed_by_impure, further = self.needed([v for o in impure for v in _values_in((o.args, o.kwargs))], stop)
        unused = {o.index for o in impure} - needed_by_impure
        return needed | needed_by_impure | unused, unused, outside + further


#: The classes of symbolic numbers and bools.
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _values_in(value: Any) -> list[Any]:
    """List the tensors and the symbolic numbers in an op's arguments."""
    return [*tensors_in(value), *numbers_in(value)]


def numbers_in(value: Any) -> list[Any]:
    """List the symbolic numbers and bools in an op's arguments."""
    return [each for each in internals.pytree.tree_leaves(value) if isinstance(each, _NUMBERS)]


class _GraphWriter:
    """Writes one fx graph, op by op. A constant gets its node when it is first used."""

    def __init__(self, tape: Tape, inputs: Sequence[tuple[str, Any]], same: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._tape = tape
        self._graph = fx.Graph()
        self._root = torch.nn.Module()
        self._results: dict[int, fx.Node] = {}
        self._nodes: dict[int, fx.Node] = {}
        self._symbols: dict[Any, fx.Node] = {}
        self._sizes: dict[Any, Any] = {}
        self._phase: Phase = "forward"
        for placeholder, fake in inputs:
            node = self._graph.placeholder(placeholder)
            if not isinstance(fake, Tensor):
                node.meta.update(val=fake, phase="forward")
                if isinstance(fake, torch.SymInt | torch.SymFloat):
                    self._symbols[fake.node.expr] = node
                continue
            _describe(node, fake)
            if placeholder.startswith("tangents"):
                node.meta["phase"] = "backward"
            self._nodes[id(fake)] = node
        self._nodes.update((id(fake), self._nodes[id(replacement)]) for fake, replacement in same)

    def write(self, operation: Operation, *, stays: bool) -> None:
        """Write one op, and directly after it the ``getitem`` nodes of its results, where partitioners expect them."""
        self._phase = operation.phase
        args = tuple([self._convert(arg) for arg in operation.args])
        kwargs = {key: self._convert(arg) for key, arg in operation.kwargs.items()}
        named = operation.target.overloadpacket if isinstance(operation.target, OpOverload) else operation.target
        name = str(getattr(named, "__name__", "call"))
        node = self._graph.create_node("call_function", operation.target, args, kwargs, name)
        _copy_op_meta(node, operation)
        if stays:
            node.meta[STAYS] = True
        if operation.binds:
            node.meta["unbacked_bindings"] = operation.binds
        self._results[operation.index] = node
        if isinstance(operation.result, Tensor):
            _describe(node, operation.result)
            self._nodes.setdefault(id(operation.result), node)
        elif isinstance(operation.result, _NUMBERS):
            node.meta["val"] = operation.result
            self._symbols.setdefault(operation.result.node._expr, node)
        else:
            node.meta["val"] = operation.result
            for fake in tensors_in(operation.result):
                self._node_of(fake)

    def finish(
        self, name: str, outputs: Sequence[Tensor | None], write_back: Sequence[tuple[Tensor, Tensor]]
    ) -> fx.GraphModule:
        """Write the copies into inputs and the output node, and return the graph module."""
        returned = [None if output is None else self._convert(output) for output in outputs]
        for target, value in write_back:
            node = self._graph.call_function(
                torch.ops.aten.copy_.default, (self._node_of(target), self._node_of(value))
            )
            node.meta.update(val=target, phase="forward")
        self._graph.output(tuple(returned))
        for node in reversed(self._graph.nodes):
            if node.target is operator.getitem and not node.users:
                self._graph.erase_node(node)
        return internals.graph_module(self._root, self._graph, name)

    def _node_of(self, fake: Tensor) -> fx.Node:
        node = self._nodes.get(id(fake))
        if node is not None:
            return node
        producer = self._tape.producer(fake)
        if producer is None:
            constant = self._tape.name_of_constant(fake)
            setattr(self._root, constant, self._tape.constants[constant])
            node = self._graph.get_attr(constant)
        else:
            operation, path = producer
            node = self._results[operation.index]
            for item in path:
                node = self._graph.create_node("call_function", operator.getitem, (node, item), {})
                _copy_op_meta(node, operation)
        _describe(node, fake)
        self._nodes[id(fake)] = node
        return node

    def _convert(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._node_of(value)
        if isinstance(value, _NUMBERS):
            return self._size(value)
        if isinstance(value, list | torch.Size):
            return [self._convert(item) for item in value]
        if type(value) is tuple:
            return tuple([self._convert(item) for item in value])
        if isinstance(value, fx.GraphModule):
            earlier = [type(each).__name__ for each in self._root.children()]
            self._root.add_module(name := f"{type(value).__name__}_{earlier.count(type(value).__name__)}", value)
            return self._graph.get_attr(name)
        if type(value) is complex and (0.0 in (value.real, value.imag) or not cmath.isfinite(value)):
            # in graph code, `-0j` would lose its sign, and `infj` and `nanj` are not Python literals
            return self._graph.call_function(complex, (value.real, value.imag))
        if isinstance(value, torch.ScriptObject):
            setattr(self._root, name := f"_object{len(self._graph.nodes)}", value)
            return self._graph.get_attr(name)
        return value

    def _size(self, value: Any) -> Any:
        """Write a symbolic size as an expression of its symbols, once in each half (forward, backward) of the graph."""
        key = (value.node.expr if value.node.pytype is not bool else value.node._expr, self._phase)
        if key not in self._sizes:
            self._sizes[key] = internals.write_size(value, self._symbols)
            for node in self._graph.nodes:
                if "val" not in node.meta and node.op == "call_function":
                    node.meta.update(val=value, phase=self._phase, partitioner_tag=f"is_{self._phase}")
        return self._sizes[key]


def _copy_op_meta(node: fx.Node, operation: Operation) -> None:
    meta = node.meta
    meta.update(phase=operation.phase, operation=operation.index, original_aten=operation.original)
    if operation.code_position is not None:
        meta["user_line"] = operation.code_position
        if isinstance(operation.code_position, CodePosition):
            meta["stack_trace"] = stack_trace(operation.code_position)
    if operation.sequence is not None:
        meta["seq_nr"] = operation.sequence
    # upstream's partitioners read from this tag whether a node belongs to the forward or the backward
    meta["partitioner_tag"] = f"is_{operation.phase}"
    if operation.meta:
        meta.update(operation.meta)


#: A cache of ``tensor_meta`` by shape, stride and dtype; the entries are few and contain no tensors.
_tensor_metas: dict[Any, Any] = {}


def _describe(node: fx.Node, fake: Tensor) -> None:
    node.meta["val"] = fake
    metas, key = _tensor_metas, (fake.shape, fake.stride(), fake.dtype)
    try:
        described = metas.get(key)
    except TypeError:  # symbolic sizes are not hashable
        metas = internals.known_of(fake)
        key = (*map(internals.expression_of, fake.shape), *map(internals.expression_of, fake.stride()), fake.dtype)
        described = metas.get(key)
    if described is None:
        contiguous = internals.surely_contiguous(fake.shape, fake.stride())  # torch would compare symbols
        described = internals.extract_tensor_metadata(fake, not contiguous)
        metas[key] = described = described._replace(memory_format=torch.contiguous_format) if contiguous else described
    node.meta["tensor_meta"] = described
    node.meta.setdefault("phase", "forward")
