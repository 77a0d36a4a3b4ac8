"""The tape: the ops of one trace in order, and the fx graphs that can be written from it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab._torch import OpOverload
from aotlab.errors import GraphInvariantError, UserLine
from aotlab.guards.places import Place, stack_trace
from aotlab.ir.graphs import STAYS, Phase, acts
from aotlab.trace.random_state import SET_STATE, STATE_OF, draws, original


class Untraceable(Exception):  # noqa: N818  # not an error of the program's: it says why eager has to run it
    """Raised in a trace by a program that eager runs and a graph cannot hold."""


@dataclass(slots=True, eq=False)
class Operation:
    """One recorded op: what was called on which fake tensors, what came out, and where it comes from.

    ``original`` is the op that was being decomposed when this one was called, else this one; kernels are named by it.
    """

    index: int
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    phase: Phase
    place: Callable[[], UserLine | None] | None
    sequence: int | None
    meta: dict[str, Any] | None
    original: OpOverload

    @property
    def is_random(self) -> bool:
        """Whether it draws from a random generator, or reads or sets its state."""
        return self.target in (STATE_OF, SET_STATE) or draws(self.target, self.args, self.kwargs)

    @property
    def draws_as(self) -> OpOverload | None:
        """The random op that it is, or that it does with a state; None if it draws nothing."""
        if self.target in (STATE_OF, SET_STATE):
            return None
        return self.target if self.is_random else original(self.target)

    @property
    def is_impure(self) -> bool:
        """Whether it must stay although nobody uses its result."""
        acting = acts(self.target) or self.target is internals.SET_GRAD_ENABLED
        return acting or (self.is_random and self.target is not STATE_OF) or self.may_raise

    @property
    def may_raise(self) -> bool:
        """Whether its kernel may refuse what its fake took."""
        return internals.may_raise(original(self.target) or self.target, tensors_in((self.args, self.kwargs)))

    @property
    def may_raise_late(self) -> bool:
        """Whether its kernel may refuse some values of what it takes."""
        return internals.may_raise_late(original(self.target) or self.target, tensors_in((self.args, self.kwargs)))


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
        self._origin: dict[int, _Origin] = {}
        self.entered: list[Tensor] = []

    def enter(self, fake: Tensor, constant: str = "") -> Tensor:
        """Make ``fake`` known as a value from outside; graphs that use it name it among their inputs, or hold it."""
        self.entered.append(fake)
        self._origin[id(fake)] = constant
        return fake

    def add_constant(self, real: Tensor, fake: Tensor) -> Tensor:
        """Make ``fake`` stand for ``real``, which graphs carry as an attribute."""
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = real
        return self.enter(fake, name)

    def knows(self, fake: Tensor) -> bool:
        """Tell whether ``fake`` is a value of this tape."""
        return id(fake) in self._origin

    def name_of_constant(self, fake: Tensor) -> str:
        """Return the name of the constant that ``fake`` stands for; empty for other values."""
        origin = self._origin.get(id(fake), "")
        return origin if isinstance(origin, str) else ""

    def constant(self, fake: Tensor) -> Tensor | None:
        """Return the tensor that ``fake`` stands for as a constant; None for other values."""
        return self.constants.get(self.name_of_constant(fake))

    def producer(self, fake: Tensor) -> tuple[Operation, tuple[int, ...]] | None:
        """Return the op that made ``fake`` and the path in its results; None for a value from outside."""
        origin = self._origin.get(id(fake))
        if origin is None:
            raise Untraceable(
                "a tensor was made around the trace, as by nn.Parameter(…), as_subclass(…) or in a thread"
            )
        return None if isinstance(origin, str) else origin

    def append(self, operation: Operation) -> None:
        """Add an op; results that are also arguments keep their first origin."""
        self.operations.append(operation)
        self._register(operation, operation.result, ())

    def replace(self, operation: Operation, target: Any, args: tuple[Any, ...], result: tuple[Any, ...]) -> None:
        """Let an op be another one, among whose results are those of the first."""
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
        """Return the devices of the generators that the ops of a phase draw from."""
        drawing = (operation for operation in self.operations if operation.phase == phase and operation.is_random)
        return {tensor.device for operation in drawing for tensor in tensors_in(operation.result)}

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
            made = self.producer(value)
            if made is None:
                if not self.name_of_constant(value):
                    outside[id(value)] = value
            elif made[0].index not in found:
                found.add(made[0].index)
                todo += tensors_in((made[0].args, made[0].kwargs))
        return found, list(outside.values())

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
        """Write the graph that computes ``outputs`` from ``inputs``, which may be any values of the tape.

        Of the phase ``keep_impure``, random and asserting ops and those that may raise stay even if nobody uses them.
        ``write_back`` are pairs of an input and the value that the graph writes into it at its end, ``same`` are pairs
        of a value and the input that stands for it.
        """
        stop = {id(fake) for _, fake in inputs} | {id(fake) for fake, _ in same}
        stays = {o.index for o in self.operations if o.phase == keep_impure and o.is_impure}
        results = [*outputs, *(value for _, value in write_back)]
        wanted, unused, outside = self._chosen(results, stays, stop)
        if outside:
            raise GraphInvariantError(f"graph {name} uses {len(outside)} value(s) that are not among its inputs")
        writer = _GraphWriter(self, inputs, same)
        for index in sorted(wanted):
            writer.write(self.operations[index], stays=index in unused)
        return writer.finish(name, outputs, write_back)

    def _chosen(
        self, results: Sequence[Tensor | None], stays: set[int], stop: set[int]
    ) -> tuple[set[int], set[int], list[Tensor]]:
        """Return the ops that a graph consists of, those whose results nobody uses, and the values from outside."""
        wanted, outside = self.needed(results, stop)
        impure = [self.operations[i] for i in sorted(stays - wanted)]
        more, further = self.needed([t for o in impure for t in tensors_in((o.args, o.kwargs))], stop)
        unused = {o.index for o in impure} - more
        return wanted | more | unused, unused, outside + further


class _GraphWriter:
    """Writes one fx graph, op by op; each value gets its node when it is first used."""

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
        self._nodes.update((id(fake), self._nodes[id(standing)]) for fake, standing in same)

    def write(self, operation: Operation, *, stays: bool) -> None:
        """Write one op and, right behind it, where partitioners look for them, the parts of its result."""
        self._phase = operation.phase
        args = tuple([self._convert(arg) for arg in operation.args])
        kwargs = {key: self._convert(arg) for key, arg in operation.kwargs.items()}
        named = operation.target.overloadpacket if isinstance(operation.target, OpOverload) else operation.target
        name = str(getattr(named, "__name__", "call"))
        node = self._graph.create_node("call_function", operation.target, args, kwargs, name)
        _inherit(node, operation)
        if stays:
            node.meta[STAYS] = True
        self._results[operation.index] = node
        if isinstance(operation.result, Tensor):
            _describe(node, operation.result)
            self._nodes.setdefault(id(operation.result), node)
        else:
            node.meta["val"] = operation.result
            for fake in tensors_in(operation.result):
                self._use(fake)

    def finish(
        self, name: str, outputs: Sequence[Tensor | None], write_back: Sequence[tuple[Tensor, Tensor]]
    ) -> fx.GraphModule:
        """Write what is returned and what is written into inputs, and make the module."""
        returned = [None if output is None else self._use(output) for output in outputs]
        for target, value in write_back:
            node = self._graph.call_function(torch.ops.aten.copy_.default, (self._use(target), self._use(value)))
            node.meta.update(val=target, phase="forward")
        self._graph.output(tuple(returned))
        for node in reversed(self._graph.nodes):
            if node.target is operator.getitem and not node.users:
                self._graph.erase_node(node)
        return internals.graph_module(self._root, self._graph, name)

    def _use(self, fake: Tensor) -> fx.Node:
        node = self._nodes.get(id(fake))
        if node is not None:
            return node
        made = self._tape.producer(fake)
        if made is None:
            constant = self._tape.name_of_constant(fake)
            setattr(self._root, constant, self._tape.constants[constant])
            node = self._graph.get_attr(constant)
        else:
            operation, path = made
            node = self._results[operation.index]
            for item in path:
                node = self._graph.create_node("call_function", operator.getitem, (node, item), {})
                _inherit(node, operation)
        _describe(node, fake)
        self._nodes[id(fake)] = node
        return node

    def _convert(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._use(value)
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return self._size(value)
        if isinstance(value, list | torch.Size):
            return [self._convert(item) for item in value]
        if type(value) is tuple:
            return tuple([self._convert(item) for item in value])
        if isinstance(value, fx.GraphModule):
            earlier = [type(each).__name__ for each in self._root.children()]
            self._root.add_module(name := f"{type(value).__name__}_{earlier.count(type(value).__name__)}", value)
            return self._graph.get_attr(name)
        if type(value) is complex and 0.0 in (value.real, value.imag):
            # written as `-0j` it would come back with another sign
            return self._graph.call_function(complex, (value.real, value.imag))
        return value

    def _size(self, value: Any) -> Any:
        """Write a size by the symbols that it is computed from, in each half of the graph anew."""
        key = (value.node.expr, self._phase)
        if key not in self._sizes:
            self._sizes[key] = internals.write_size(value, self._symbols)
            for node in self._graph.nodes:
                if "val" not in node.meta and node.op == "call_function":
                    node.meta.update(val=value, phase=self._phase, partitioner_tag=f"is_{self._phase}")
        return self._sizes[key]


def _inherit(node: fx.Node, operation: Operation) -> None:
    meta = node.meta
    meta.update(phase=operation.phase, operation=operation.index, original_aten=operation.original)
    if operation.place is not None:
        meta["user_line"] = operation.place
        if isinstance(operation.place, Place):
            meta["stack_trace"] = stack_trace(operation.place)
    if operation.sequence is not None:
        meta["seq_nr"] = operation.sequence
    # by this tag upstream's partitioners know which half a node belongs to
    meta["partitioner_tag"] = f"is_{operation.phase}"
    if operation.meta:
        meta.update(operation.meta)


#: The ``tensor_meta`` of each kind of tensor; they hold no tensors and are few.
_tensor_metas: dict[Any, Any] = {}


def _describe(node: fx.Node, fake: Tensor) -> None:
    node.meta["val"] = fake
    metas, key = _tensor_metas, (fake.shape, fake.stride(), fake.dtype)
    try:
        known = metas.get(key)
    except TypeError:  # sizes that vary have no hash
        metas = internals.known_of(fake)
        key = (*map(internals.expression_of, fake.shape), *map(internals.expression_of, fake.stride()), fake.dtype)
        known = metas.get(key)
    if known is None:
        contiguous = internals.surely_contiguous(fake.shape, fake.stride())  # torch would compare symbols
        known = internals.extract_tensor_metadata(fake, not contiguous)
        metas[key] = known = known._replace(memory_format=torch.contiguous_format) if contiguous else known
    node.meta["tensor_meta"] = known
    node.meta.setdefault("phase", "forward")
