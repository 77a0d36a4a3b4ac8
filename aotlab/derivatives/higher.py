"""Backwards under ``create_graph``, and those of the gradients that they return.

    y = f(x)                                                    # node 1, the compiled call
    (g,) = torch.autograd.grad(y, x, t, create_graph=True)      # node 2, made by the backward of node 1
    (g.sum() + y.sum()).backward()

A backward that is called in grad mode computes its gradients inside another `torch.autograd.Function`, whose backward
is the next level's (`aotlab.derivatives.levels`), compiled when it is first asked for. Node 2 sends gradients to
``t``, to inputs of ``f``, and into the midst of ``f``. For the latter there is no tensor: autograd knows an edge from
node 2 to one of node 1's outputs, along which nothing comes, and what belongs into the midst lies with node 1's saved
values when autograd gets there. It has seen to it that all that comes for node 1 has come by then. So each of the
function's own nodes runs once, as in eager, and sums are added up in eager's order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch.compiling import made_once
from aotlab.backends.base import Boxed
from aotlab.derivatives.graphs import BY_GRAPH, casting_of, write_backward
from aotlab.derivatives.levels import Derived, Kind, Level
from aotlab.errors import DoubleBackwardError, TransformError
from aotlab.partition.stage import Split
from aotlab.runtime.saved import SavedValues, restride
from aotlab.trace.edges import Edge
from aotlab.trace.history import nodes_of
from aotlab.trace.views import root_among

if TYPE_CHECKING:
    from aotlab.derivatives.backwards import Backward

#: The autograd node that hands on what a segment sends to an input; see `aotlab._torch.pass_on`.
_HANDS_ON = "PassOnBackward"

#: For so many layouts of what comes in a backward is compiled anew; then those of others are copied.
MOST_LAYOUTS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Where a gradient goes: to ``tensor``; or, for an ``edge`` in the midst of ``node``, with its saved values.

    In the latter case ``tensor`` hangs on ``node``, whose backward is ``backwards``.
    """

    tensor: Tensor
    node: Any = None
    edge: Edge | None = None
    backwards: Higher | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """One compiled backward, of what was ``derived``.

    ``compute`` takes the saved values ``needs`` and what came in, and returns a gradient or None for each slot, then
    what the level ``above`` keeps and is not there yet. ``kept`` says of each value that this level keeps where it is:
    among the saved values, of which so ``takes`` are used, what came in, or what was computed.
    """

    derived: Derived
    compute: Boxed
    needs: tuple[int, ...]
    takes: tuple[int, ...]
    mask: int
    kept: tuple[tuple[str, int], ...]
    above: Higher | None


class Higher:
    """The backwards of one level above the backward ``base`` of a segment; ``is_first`` is that of its own nodes.

    ``split`` says what the level keeps. ``wanted`` are the slots whose gradients are returned, in this order; the last
    edges of the running node are theirs. ``all_masks`` are those of all segments that share the saved values. If the
    backend is exact, gradients are summed as they are laid out; else they are copied into the usual strides.
    """

    def __init__(
        self,
        base: Backward,
        level: Level,
        split: Split,
        *,
        wanted: Sequence[int],
        all_masks: Sequence[int],
        is_first: bool = False,
    ) -> None:
        self._base = base
        self.level = level
        self._split = split
        self.wanted = wanted
        self._all_masks = all_masks
        self.name = base.name
        self._exact = base.exact
        self.is_first = is_first
        self.slot_of = {way[0]: place for place, i in enumerate(wanted) if (way := level.slots[i]) is not None}
        self.entry_of = {edge: n for n, edge in enumerate(level.part.entries)}
        #: The nodes that stand for an error, as that of `once_differentiable`: they lead nowhere, and are run only
        #: where autograd was asked for all gradients there are.
        self._raising = set() if is_first else set(filter(internals.always_raises, level.part.nodes or ()))
        #: Of the inputs that gradients reach, how many nodes send them some.
        edges = (edge for node in (nodes_of(level.part) if is_first else ()) for edge in node.next_functions)
        self.arrivals = Counter(edge for edge in edges if edge in level.part.inputs)
        self._plans: dict[Kind, _Plan] = {}

    def __call__(self, saved: SavedValues, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of ``wanted``; in grad mode they have histories."""
        came = saved.take_pending(id(self))
        if torch.is_grad_enabled() and internals.is_beyond_kernels([*tangents, *came.values()]):
            raise TransformError(
                f"the backward of compiled `{self.name}` was called with create_graph=True under a transform, or with "
                "is_grads_batched=True",
                why="its autograd nodes cannot stand for several samples",
                suggestion="call the original function",
            )
        direct = {e: value for e, value in came.items() if e in self.slot_of and not self.level.part.sums(e)}
        extras = tuple(edge for edge in came if edge not in direct)
        pattern = tuple(t is not None for t in tangents)
        gradients: list[Tensor | None] = [None] * len(self.wanted)
        if True in pattern or extras:
            values = [*(t for t in tangents if t is not None), *(came[edge] for edge in extras)]
            gradients = self._gradients(saved, pattern, extras, values)
        for edge, value in direct.items():
            place = self.slot_of[edge]
            own = gradients[place]
            gradients[place] = value if own is None else value + own
        return gradients

    def _gradients(
        self, saved: SavedValues, pattern: tuple[bool, ...], extras: tuple[Edge, ...], came: list[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of ``wanted`` for what came in: the defined tangents, and what came at ``extras``."""
        defined = zip(self.level.tangents, pattern, strict=True)
        usual = self._base.sized([fake.stride() for fake, is_defined in defined if is_defined], saved)
        usual += [torch.empty(value.shape, device="meta").stride() for value in came[len(usual) :]]
        casting = casting_of(came, exact=self._exact)
        own = (self._exact or casting[-1:] == BY_GRAPH) and len(self._plans) < MOST_LAYOUTS and not saved.sizes
        given = [
            t if t.stride() == s or (own and t.layout is torch.strided) else restride(t, s)
            for t, s in zip(came, usual, strict=True)
        ]
        kind = Kind(
            pattern=pattern,
            extras=extras,
            strides=() if saved.sizes else tuple(t.stride() for t in given),
            requires=tuple(t.requires_grad for t in given) if torch.is_grad_enabled() else None,
            casting=casting,
        )
        # the anchor is a leaf
        if self._raising and internals.is_to_be_run(internals.current_node().next_functions[0][0]):
            starts = [edge for edge, defined in zip(self.level.part.entries, pattern, strict=True) if defined]
            for node in self._raising.intersection(nodes_of(self.level.part, starts)):
                node(torch.zeros(()))
        plan: _Plan = made_once(self._plans, kind, lambda: self._make(kind))
        arguments = saved.use(plan.mask, plan.takes)
        ends = self._ends(plan, saved, given)
        saved.release(plan.mask, self._all_masks)
        with internals.disable_autocast():
            if plan.above is None:
                with torch.no_grad():
                    gradients = list(plan.compute([*arguments, *saved.sizes, *given]))
            else:
                gradients = _differentiable(plan, arguments, given, ends, saved.sizes)
        for slot, n in plan.derived.same_as.items():
            gradients[slot] = came[n]
        return [gradients[i] for i in self.wanted]

    def _make(self, kind: Kind) -> _Plan:
        """Differentiate the level, and compile what comes of it."""
        level = self.level
        with internals.no_dispatch_modes():  # the caller's are not asked about fake tensors
            found = level.derive(kind)
        known = {id(value): ("saved", n) for n, value in reversed(list(enumerate(self._split.saved_values)))}
        known.update((id(other), known[id(value)]) for other, value in self._split.same)
        known.update((id(value), ("given", n)) for n, value in enumerate(found.given))
        more: list[Tensor] = []
        kept: dict[int, tuple[Tensor, tuple[str, int]]] = {}
        for value in () if found.above is None else found.above.saved:
            root = root_among(level.trace.tape, value, known)
            if root is None:
                kept[id(value)] = (value, ("made", len(level.slots) + len(more)))
                more.append(value)
            else:
                kept[id(root)] = (root, known[id(root)])
        defined = [(f"tangents_{n + 1}", fake) for n, fake in enumerate(found.given)]
        written = write_backward(level.trace, self._split, [*found.gradients, *more], defined)
        if written is None:
            raise DoubleBackwardError(
                f"a derivative of the backward of compiled `{self.name}` needs a value that the forward did not save",
                why="the partitioner chose what to save for first derivatives",
                suggestion="use aotlab.default_partition if you chose another one, or call the original function",
            )
        module, needs = written
        above = None
        if found.above is not None:
            names = [f"saved_{n}" for n in range(len(kept))]
            split = Split(saved_values=[value for value, _ in kept.values()], saved_names=names)
            slots = range(len(found.above.slots))
            above = Higher(self._base, found.above, split, wanted=slots, all_masks=found.above.masks)
        lasting = (n for _, (kind_of, n) in kept.values() if kind_of == "saved" and n not in needs)
        return _Plan(
            derived=found,
            compute=self._base.compile_module(module, kind.pattern, by_graph=kind.casting[-1:] == BY_GRAPH),
            needs=needs,
            takes=(*needs, *dict.fromkeys(lasting)),
            mask=level.mask(kind.pattern, kind.extras),
            kept=tuple(place for _, place in kept.values()),
            above=above,
        )

    def _ends(self, plan: _Plan, saved: SavedValues, given: Sequence[Tensor]) -> list[End]:
        """Say where at run time the gradients of the next level go.

        What goes to an input to which this level has several ways goes there by way of this level, if others go there
        anyhow: there all of them are summed one by one.
        """
        level, node = self.level, internals.current_node()
        goes_inside = any(not isinstance(end, int) and end not in self.slot_of for end in plan.derived.ends)
        hanging: tuple[Tensor, ...] | None = None
        found: list[End] = []
        for edge in plan.derived.ends:
            if isinstance(edge, int):
                found.append(End(tensor=given[edge]))
                continue
            if not self.is_first and edge in node.ends:
                found.append(node.ends[edge])
                continue
            is_input = self.is_first and edge in self.slot_of
            by_itself = is_input and not (goes_inside and self.arrivals[edge] > 1)
            tensor = self._input(node, saved, edge) if by_itself else None
            if tensor is not None:
                found.append(End(tensor=tensor))
                continue
            entry = self.entry_of.get(edge)
            if edge in level.trace.written_views:
                raise self.nowhere("a result is a view that was written, which nodes may keep")
            if entry is None and not is_input and not level.part.has(edge[0]):
                raise self.nowhere("a gradient goes to where the compiled call has no way")
            if hanging is None:  # once: a checkpoint around the call allows no more
                hanging = internals.outputs_saved_by(node)
            if not hanging:
                raise self.nowhere("the call was made under saved_tensors_hooks")
            if entry in level.own and len(hanging) >= len(level.own):
                kept = saved.kept_result(edge) if self.is_first else None
                found.append(End(tensor=hanging[level.own.index(entry)] if kept is None else kept))
            else:
                found.append(End(tensor=hanging[-1], node=node, edge=edge, backwards=self))
        return found

    def nowhere(self, why: str) -> DoubleBackwardError:
        """Make the error of a backward that cannot be differentiated."""
        return DoubleBackwardError(
            f"the backward of compiled `{self.name}` was called with create_graph=True",
            why=why,
            suggestion="call the original function where higher derivatives are needed",
        )

    def _input(self, node: Any, saved: SavedValues, edge: Edge) -> Tensor | None:
        """Return an input of the function with the history that it had at the call, if it is at hand."""
        node, number = node.next_functions[-len(self.wanted) :][self.slot_of[edge]]
        while node is not None and node.name() == _HANDS_ON:
            node, number = node.next_functions[0]
        if node is None:
            return None
        if (leaf := internals.leaf_of(node)) is not None:
            return leaf
        return next((t for t in saved.tensors() if t.grad_fn is node and t.output_nr == number), None)


def _differentiable(
    plan: _Plan, arguments: list[Tensor], given: list[Tensor], ends: list[End], sizes: Sequence[int]
) -> list[Tensor | None]:
    """Compute gradients by an autograd node whose backward is the next level's.

    What goes through autograd is a tensor for each gradient that comes back, so that autograd sums them as it does
    in eager, and one for each node into whose midst some go.
    """
    through = [end.tensor for end in ends if end.node is None]
    through += {id(end.node): end.tensor for end in ends if end.node is not None}.values()
    anchor = torch.empty(0, requires_grad=True)  # without it nothing says that a node that leads nowhere requires grad
    gradients: list[Tensor | None] = []
    results: tuple[Tensor, ...] = Derivative.apply(plan, arguments, given, ends, sizes, gradients, anchor, *through)  # type: ignore[no-untyped-call]  # untyped in torch
    if len(plan.derived.roots) > 1:
        results = tuple([internals.with_own_node(result) for result in results[:-1]])
    for slot, result in zip(plan.derived.roots, results, strict=False):
        gradients[slot] = result
    return gradients


def _apart(value: Any, others: set[int]) -> Any:
    """Return a gradient, as an alias if it lies in the memory of something else."""
    if isinstance(value, Tensor) and value.layout == torch.strided and internals.storage_key(value) in others:
        return value.detach()
    return value


class Derivative(torch.autograd.Function):
    """The autograd node of gradients that were computed under ``create_graph``."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        arguments: list[Tensor],
        given: list[Tensor],
        ends: list[End],
        sizes: Sequence[int],
        others: list[Tensor | None],
        anchor: Tensor,
        *through: Tensor,
    ) -> tuple[Tensor, ...]:
        """Compute the gradients; return those that can be differentiated, and something for others to hang on.

        Those that cannot are put into ``others``.
        """
        ctx.set_materialize_grads(False)
        computed = list(plan.compute([*arguments[: len(plan.needs)], *sizes, *given]))
        memory = {internals.storage_key(t) for t in (*arguments, *given) if t.layout == torch.strided}
        gradients = [_apart(gradient, memory) for gradient in computed[: len(plan.derived.gradients)]]
        taken = dict(zip(plan.takes, arguments, strict=True))
        kept = [computed[n].detach() if k == "made" else taken[n] if k == "saved" else given[n] for k, n in plan.kept]
        ctx.values, ctx.backwards = SavedValues(kept, sizes=sizes), plan.above
        ctx.all_ends, ctx.count = ends, len(through)
        ways, own = ((), ()) if plan.above is None else (plan.above.level.slots, plan.above.level.own)
        ctx.ends = {way[0]: end for way, end in zip(ways, ends, strict=True) if way is not None}
        results = [gradients[i] for i in plan.derived.roots]
        others += [None if i in plan.derived.roots else gradient for i, gradient in enumerate(gradients)]
        hanging = torch.empty(0)
        ctx.to_save = (*(results[n] for n in own), hanging)
        return (*results, hanging)

    @staticmethod
    @internals.unseen_by_dynamo
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of gradients, and send them to where they go."""
        returned: list[Tensor | None] = []
        for end, gradient in zip(ctx.all_ends, ctx.backwards(ctx.values, tangents[:-1]), strict=True):
            if end.node is None:
                returned.append(gradient)
            elif gradient is not None and internals.is_to_be_run(end.node):
                end.node.values.put_pending(id(end.backwards), end.edge, gradient)
        return *([None] * 7), *returned, *([None] * (ctx.count - len(returned)))
