"""Backwards under ``create_graph``, and the backwards of the gradients that they return.

    y = f(x)                                                    # node 1, the compiled call
    (g,) = torch.autograd.grad(y, x, t, create_graph=True)      # node 2, made by the backward of node 1
    (g.sum() + y.sum()).backward()

If a backward is called in grad mode, it computes its gradients inside a second `torch.autograd.Function`. The backward
of that function belongs to the next level (`aotlab.derivatives.levels`) and is compiled when autograd first requests
it. Node 2 sends gradients to ``t``, to inputs of ``f``, and to *inner edges*: edges between autograd nodes of the
traced program that are inside node 1. The caller has no tensor for an inner edge. So node 2 stores such a gradient with
the saved values of node 1 (`SavedValues.put_pending`). It also has an autograd edge to an output of node 1 and always
sends None along that edge. Because of that edge, autograd runs node 1 only after node 2, and node 1 then finds the
pending gradients. As a result each autograd node of the function runs once, as in eager, and gradients are summed in
eager's order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab._torch.compiling import made_once
from aotlab.backends.base import Boxed
from aotlab.derivatives.backward_graphs import BY_GRAPH, casting_of, write_backward
from aotlab.derivatives.levels import DifferentiatedLevel, IncomingGradients, Level
from aotlab.errors import DoubleBackwardError, TransformError
from aotlab.partition.partition_stage import Split
from aotlab.runtime.saved_values import SavedValues, restride
from aotlab.trace.autograd_edges import Edge
from aotlab.trace.history import nodes_of
from aotlab.trace.view_ops import root_among

#: The name of an autograd node that `aotlab._torch.pass_on` makes between a segment and an input. It passes the
#: gradient on to the input unchanged.
_PASS_ON = "PassOnBackward"

#: At most this many layouts of incoming gradients get their own backward. Gradients with another layout are copied into
#: the traced strides.
MOST_LAYOUTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDestination:
    """The destination of a gradient of the next level.

    The gradient is either returned to autograd for ``tensor``, or stored as pending for the inner ``edge`` of ``node``.
    In the second case ``tensor`` is an output of ``node``, and ``backwards`` are the `LevelBackwards` that take the
    gradient.
    """

    tensor: Tensor
    node: Any = None
    edge: Edge | None = None
    backwards: LevelBackwards | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """One compiled backward of a level, for one `IncomingGradients`.

    ``derived`` is the result of the differentiation. ``compute`` takes the saved values at the positions ``needs``, and
    the incoming gradients. It returns a gradient or None for each slot, then the new values that ``next_level`` saves.
    ``next_saved`` says for each value that the next level saves where it comes from: "saved" (the saved values of this
    level), "incoming" (the incoming gradients) or "computed" (the results of ``compute``), with its position among
    these. ``takes`` has the positions of all saved values that are used, by ``compute`` or by the next level. ``mask``
    is the bit mask of the autograd nodes of the level that run.
    """

    derived: DifferentiatedLevel
    compute: Boxed
    needs: tuple[int, ...]
    takes: tuple[int, ...]
    mask: int
    next_saved: tuple[tuple[str, int], ...]
    next_level: LevelBackwards | None


class SegmentCompiler(Protocol):
    """The part of a segment's `aotlab.derivatives.backwards.Backward` that the levels above it use.

    ``exact`` says that the backend's results equal eager's bit for bit.
    """

    name: str
    exact: bool

    def sized(self, values: Sequence[Any], saved: SavedValues) -> list[Any]:
        """Replace symbolic sizes in ``values`` by the sizes of the current call."""

    def compile_module(self, module: fx.GraphModule, pattern: Sequence[Any], *, by_graph: bool = False) -> Boxed:
        """Compile a backward graph for a pattern of defined tangents. With ``by_graph``, it runs as Python code."""


class LevelBackwards:
    """The backwards of one level of a segment under ``create_graph``; ``base`` is the segment's `Backward`.

    ``is_first`` is true for the level of the function's own autograd nodes. ``split`` has the values that the level
    saves. ``gradient_slots`` are the slots whose gradients are returned, in this order. The last edges of the autograd
    node that is running (its ``next_functions``) belong to these gradients. ``all_masks`` are the masks of all entries
    that share the saved values, over all segments. If the backend is exact, incoming gradients keep their strides;
    otherwise they are copied into the traced strides.
    """

    def __init__(
        self,
        base: SegmentCompiler,
        level: Level,
        split: Split,
        *,
        gradient_slots: Sequence[int],
        all_masks: Sequence[int],
        is_first: bool = False,
    ) -> None:
        self._base = base
        self.level = level
        self._split = split
        self.gradient_slots = gradient_slots
        self._all_masks = all_masks
        self.name = base.name
        self._exact = base.exact
        self.is_first = is_first
        self.slot_of = {
            exit_[0]: position for position, i in enumerate(gradient_slots) if (exit_ := level.slots[i]) is not None
        }
        self.entry_of = {edge: n for n, edge in enumerate(level.segment.entries)}
        #: Nodes that only raise an error, for example the node of `once_differentiable`. They have no next nodes, and
        #: autograd runs them only if all gradients are requested (`backward` without ``inputs``).
        self._raising = set() if is_first else set(filter(internals.always_raises, level.segment.nodes or ()))
        #: For each input that gradients reach: the number of edges over which nodes send gradients to it.
        edges = (edge for node in (nodes_of(level.segment) if is_first else ()) for edge in node.next_functions)
        self.arrivals = Counter(edge for edge in edges if edge in level.segment.inputs)
        self._plans: dict[IncomingGradients, _Plan] = {}

    def __call__(self, saved: SavedValues, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of ``gradient_slots``; in grad mode they have a ``grad_fn``.

        ``tangents`` are the gradients of the level's entries. The pending gradients in ``saved`` are used, too.
        """
        pending = saved.take_pending(id(self))
        if torch.is_grad_enabled() and internals.is_beyond_kernels([*tangents, *pending.values()]):
            raise TransformError(
                f"the backward of compiled `{self.name}` was called with create_graph=True under a transform, or with "
                "is_grads_batched=True",
                why="its autograd nodes cannot represent several samples",
                suggestion="call the original function",
            )
        direct = {e: value for e, value in pending.items() if e in self.slot_of and not self.level.segment.sums(e)}
        inner_edges = tuple(edge for edge in pending if edge not in direct)
        pattern = tuple(t is not None for t in tangents)
        gradients: list[Tensor | None] = [None] * len(self.gradient_slots)
        if True in pattern or inner_edges:
            values = [*(t for t in tangents if t is not None), *(pending[edge] for edge in inner_edges)]
            gradients = self._gradients(saved, pattern, inner_edges, values)
        for edge, value in direct.items():
            position = self.slot_of[edge]
            gradient = gradients[position]
            gradients[position] = value if gradient is None else value + gradient
        return gradients

    def _gradients(
        self, saved: SavedValues, pattern: tuple[bool, ...], inner_edges: tuple[Edge, ...], incoming: list[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of ``gradient_slots``.

        ``incoming`` are the gradients of the defined entries of ``pattern``, then the gradients at ``inner_edges``.
        """
        defined = zip(self.level.tangents, pattern, strict=True)
        usual = self._base.sized([fake.stride() for fake, is_defined in defined if is_defined], saved)
        usual += [torch.empty(value.shape, device="meta").stride() for value in incoming[len(usual) :]]
        casting = casting_of(incoming, exact=self._exact)
        keeps_strides = (
            (self._exact or casting[-1:] == BY_GRAPH) and len(self._plans) < MOST_LAYOUTS and not saved.sizes
        )
        restrided = [
            t if t.stride() == s or (keeps_strides and t.layout is torch.strided) else restride(t, s)
            for t, s in zip(incoming, usual, strict=True)
        ]
        kind = IncomingGradients(
            pattern=pattern,
            inner_edges=inner_edges,
            strides=() if saved.sizes else tuple(t.stride() for t in restrided),
            requires=tuple(t.requires_grad for t in restrided) if torch.is_grad_enabled() else None,
            casting=casting,
        )
        # Edge 0 of the running node leads to the anchor, a leaf. Autograd runs the node of the anchor only if all
        # gradients are requested.
        if self._raising and internals.is_to_be_run(internals.current_node().next_functions[0][0]):
            starts = [edge for edge, defined in zip(self.level.segment.entries, pattern, strict=True) if defined]
            for node in self._raising.intersection(nodes_of(self.level.segment, starts)):
                node(torch.zeros(()))
        plan: _Plan = made_once(self._plans, kind, lambda: self._make_plan(kind))
        arguments = saved.use(plan.mask, plan.takes, reaches_all=not inner_edges)
        ends = self._destinations(plan, saved, restrided)
        saved.release(plan.mask, self._all_masks)
        with internals.disable_autocast():
            if plan.next_level is None:
                with torch.no_grad():
                    gradients = list(plan.compute([*arguments, *saved.sizes, *restrided]))
            else:
                gradients = _differentiable(plan, arguments, restrided, ends, saved.sizes)
        for slot, n in plan.derived.same_as.items():
            gradients[slot] = incoming[n]
        return [gradients[i] for i in self.gradient_slots]

    def _make_plan(self, kind: IncomingGradients) -> _Plan:
        """Differentiate the level for one kind of incoming gradients, and compile its backward."""
        level = self.level
        with internals.no_dispatch_modes():  # the caller's modes must not see fake tensors
            derived = level.derive(kind)
        places = {id(value): ("saved", n) for n, value in reversed(list(enumerate(self._split.saved_values)))}
        places.update((id(other), places[id(value)]) for other, value in self._split.same)
        places.update((id(value), ("incoming", n)) for n, value in enumerate(derived.incoming))
        computed_values: list[Tensor] = []
        next_saved: dict[int, tuple[Tensor, tuple[str, int]]] = {}
        for value in () if derived.next_level is None else derived.next_level.saved:
            root = root_among(level.trace.tape, value, places)
            if root is None:
                next_saved[id(value)] = (value, ("computed", len(level.slots) + len(computed_values)))
                computed_values.append(value)
            else:
                next_saved[id(root)] = (root, places[id(root)])
        defined = [(f"tangents_{n + 1}", fake) for n, fake in enumerate(derived.incoming)]
        written = write_backward(level.trace, self._split, [*derived.gradients, *computed_values], defined)
        if written is None:
            raise DoubleBackwardError(
                f"a derivative of the backward of compiled `{self.name}` needs a value that the forward did not save",
                why="the partitioner chose the saved values for first derivatives only",
                suggestion="use aotlab.default_partition if you chose another one, or call the original function",
            )
        module, needs = written
        next_level = None
        if derived.next_level is not None:
            names = [f"saved_{n}" for n in range(len(next_saved))]
            split = Split(saved_values=[value for value, _ in next_saved.values()], saved_names=names)
            slots = range(len(derived.next_level.slots))
            next_level = LevelBackwards(
                self._base, derived.next_level, split, gradient_slots=slots, all_masks=derived.next_level.masks
            )
        lasting = (n for _, (kind_of, n) in next_saved.values() if kind_of == "saved" and n not in needs)
        return _Plan(
            derived=derived,
            compute=self._base.compile_module(module, kind.pattern, by_graph=kind.casting[-1:] == BY_GRAPH),
            needs=needs,
            takes=(*needs, *dict.fromkeys(lasting)),
            mask=level.mask(kind.pattern, kind.inner_edges),
            next_saved=tuple(place for _, place in next_saved.values()),
            next_level=next_level,
        )

    def _destinations(self, plan: _Plan, saved: SavedValues, incoming: Sequence[Tensor]) -> list[GradientDestination]:
        """Return the run-time destinations of the next level's gradients.

        Suppose that this level sends several gradients to an input, and other gradients go to inner edges anyway. Then
        the next level's gradient for that input is stored as pending, too, and this level sums all gradients of the
        input one by one, as eager does.
        """
        level, node = self.level, internals.current_node()
        goes_inside = any(not isinstance(end, int) and end not in self.slot_of for end in plan.derived.ends)
        node_outputs: tuple[Tensor, ...] | None = None
        destinations: list[GradientDestination] = []
        for edge in plan.derived.ends:
            if isinstance(edge, int):
                destinations.append(GradientDestination(tensor=incoming[edge]))
                continue
            if not self.is_first and edge in node.ends:
                destinations.append(node.ends[edge])
                continue
            is_input = self.is_first and edge in self.slot_of
            by_itself = is_input and not (goes_inside and self.arrivals[edge] > 1)
            tensor = self._input_tensor(node, saved, edge) if by_itself else None
            if tensor is not None:
                destinations.append(GradientDestination(tensor=tensor))
                continue
            entry = self.entry_of.get(edge)
            if edge in level.trace.written_views:
                raise self.no_derivative("a result is a view that was written, and autograd nodes may hold it")
            if entry is None and not is_input and not level.segment.has(edge[0]):
                raise self.no_derivative("a gradient flows to a node to which the compiled call cannot send it")
            if node_outputs is None:  # unpack only once: a checkpoint around the call does not allow a second time
                node_outputs = internals.outputs_saved_by(node)
            if not node_outputs:
                raise self.no_derivative("the call was made under saved_tensors_hooks")
            if entry in level.self_saved_entries and len(node_outputs) >= len(level.self_saved_entries):
                result = saved.kept_result(edge) if self.is_first else None
                destinations.append(
                    GradientDestination(
                        tensor=node_outputs[level.self_saved_entries.index(entry)] if result is None else result
                    )
                )
            else:
                destinations.append(GradientDestination(tensor=node_outputs[-1], node=node, edge=edge, backwards=self))
        return destinations

    def no_derivative(self, why: str) -> DoubleBackwardError:
        """Return the error for a backward that cannot be differentiated."""
        return DoubleBackwardError(
            f"the backward of compiled `{self.name}` was called with create_graph=True",
            why=why,
            suggestion="call the original function where higher derivatives are needed",
        )

    def _input_tensor(self, node: Any, saved: SavedValues, edge: Edge) -> Tensor | None:
        """Return the tensor that was the input of the function at an edge, with the history that it had at the call.

        ``node`` is the autograd node that is running. If the input is not a leaf, this method searches for it among the
        saved values. The result is None if the input is not saved.
        """
        node, number = node.next_functions[-len(self.gradient_slots) :][self.slot_of[edge]]
        while node is not None and node.name() == _PASS_ON:
            node, number = node.next_functions[0]
        if node is None:
            return None
        if (leaf := internals.leaf_of(node)) is not None:
            return leaf
        return next((t for t in saved.tensors() if t.grad_fn is node and t.output_nr == number), None)


def _differentiable(
    plan: _Plan, arguments: list[Tensor], incoming: list[Tensor], ends: list[GradientDestination], sizes: Sequence[int]
) -> list[Tensor | None]:
    """Compute gradients with a plan inside an autograd node (`Derivative`), whose backward belongs to the next level.

    ``arguments`` are the saved values, ``incoming`` the incoming gradients, ``ends`` the destinations of the next
    level's gradients, and ``sizes`` the symbolic sizes of the call. The node takes one tensor for each gradient that
    its backward returns, so that autograd sums these gradients as in eager. It also takes one tensor for each node for
    which its backward stores pending gradients.
    """
    through = [end.tensor for end in ends if end.node is None]
    through += {id(end.node): end.tensor for end in ends if end.node is not None}.values()
    anchor = torch.empty(0, requires_grad=True)  # makes the node require grad even if no other tensor does
    gradients: list[Tensor | None] = []
    results: tuple[Tensor, ...] = Derivative.apply(plan, arguments, incoming, ends, sizes, gradients, anchor, *through)  # type: ignore[no-untyped-call]  # untyped in torch
    if len(plan.derived.roots) > 1:
        results = tuple([internals.with_own_node(result) for result in results[:-1]])
    for slot, result in zip(plan.derived.roots, results, strict=False):
        gradients[slot] = result
    return gradients


def _detached_if_shared(value: Any, shared_storages: set[int]) -> Any:
    """Return a gradient as a new tensor object if it shares memory with a saved or an incoming tensor.

    ``shared_storages`` has the storage keys of these tensors. The new object is an alias, made by ``detach``. Without
    it, autograd might change the history of the saved or incoming tensor.
    """
    if isinstance(value, Tensor) and value.layout == torch.strided and internals.storage_key(value) in shared_storages:
        return value.detach()
    return value


class Derivative(torch.autograd.Function):
    """The autograd node of gradients that were computed under ``create_graph``."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        arguments: list[Tensor],
        incoming: list[Tensor],
        ends: list[GradientDestination],
        sizes: Sequence[int],
        other_gradients: list[Tensor | None],
        anchor: Tensor,
        *through: Tensor,
    ) -> tuple[Tensor, ...]:
        """Compute the gradients; return those that can be differentiated again, then an empty tensor.

        Later derivatives use the empty tensor to get an autograd edge to this node. The other arguments are as in
        `_differentiable`. The list ``other_gradients`` is filled with the gradients that cannot be differentiated, and
        with None for the returned ones. The values of ``anchor`` and ``through`` are not used: autograd gives the node
        edges to them, along which the backward returns gradients.
        """
        ctx.set_materialize_grads(False)
        computed = list(plan.compute([*arguments[: len(plan.needs)], *sizes, *incoming]))
        memory = {internals.storage_key(t) for t in (*arguments, *incoming) if t.layout == torch.strided}
        gradients = [_detached_if_shared(gradient, memory) for gradient in computed[: len(plan.derived.gradients)]]
        saved_values = dict(zip(plan.takes, arguments, strict=True))
        next_saved = [
            computed[n].detach() if k == "computed" else saved_values[n] if k == "saved" else incoming[n]
            for k, n in plan.next_saved
        ]
        ctx.values, ctx.backwards = SavedValues(next_saved, sizes=sizes), plan.next_level
        ctx.all_ends, ctx.count = ends, len(through)
        slots, self_saved = (
            ((), ())
            if plan.next_level is None
            else (plan.next_level.level.slots, plan.next_level.level.self_saved_entries)
        )
        ctx.ends = {exit_[0]: end for exit_, end in zip(slots, ends, strict=True) if exit_ is not None}
        results = [gradients[i] for i in plan.derived.roots]
        other_gradients += [None if i in plan.derived.roots else gradient for i, gradient in enumerate(gradients)]
        node_outputs = torch.empty(0)
        ctx.to_save = (*(results[n] for n in self_saved), node_outputs)
        return (*results, node_outputs)

    @staticmethod
    @internals.unseen_by_dynamo
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of gradients; return them, or store them as pending gradients of another node."""
        returned: list[Tensor | None] = []
        for end, gradient in zip(ctx.all_ends, ctx.backwards(ctx.values, tangents[:-1]), strict=True):
            if end.node is None:
                returned.append(gradient)
            elif gradient is not None and internals.is_to_be_run(end.node):
                end.node.values.put_pending(id(end.backwards), end.edge, gradient)
        return *([None] * 7), *returned, *([None] * (ctx.count - len(returned)))
