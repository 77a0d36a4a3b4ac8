"""The call of the compiled forward, and of the autograd nodes that stand behind its results.

The graph runs without autograd. Then each segment of the traced program's autograd graph becomes one node, which takes
what the graph returned for it as its results, and the inputs that can get a gradient. Most programs have one segment::

    results = forward([x, w])
    saved = SavedValues(results[1:])
    y, = Compiled.apply(backward, saved, (results[0],), w)

Where the caller can get hold of a tensor in the middle of the graph, by a view of an input that is then written for
instance, one node for the whole call would hide its history. So there are several, and what stands between them::

    new_x, = Compiled.apply(backward, saved, (results[0],), x)
    x.copy_(new_x)
    out_0, = Compiled.apply(backward_2, saved, (results[1],), x, y)  # from the x that the caller sees
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.backends.base import Boxed
from aotlab.capture.synthetic_bases import Base
from aotlab.errors import AotlabError
from aotlab.ir.graphs import acts
from aotlab.runtime.draft import Draft
from aotlab.runtime.edges import Edges
from aotlab.runtime.mutations import Mutations
from aotlab.runtime.outputs import Outputs
from aotlab.runtime.saved import Keeping, SavedValues
from aotlab.trace.edges import Edge
from aotlab.trace.live import Trace
from aotlab.trace.records import SizeOf
from aotlab.trace.segments import Exit, in_order_of_nodes

if TYPE_CHECKING:
    from aotlab.derivatives.backwards import Backward


class ForwardCall:
    """Writes the call and the nodes, with what stands between.

    A segment's node takes what the caller can see of the segments before it: their outputs as they are returned,
    and inputs as they are after their write.
    """

    def __init__(self, draft: Draft, edges: Edges, outputs: Outputs, mutations: Mutations, keeping: Keeping) -> None:
        self.draft = draft
        self.trace = draft.trace
        self.w = draft.w
        self._edges = edges
        self._outputs = outputs
        self._mutations = mutations
        self._keeping = keeping
        self._passing: dict[Exit, str] = {}

    def write(self) -> None:
        """Write all of it; note the expression for each forward output."""
        trace, w = self.trace, self.w
        w.add("# compiled forward")
        self._mutations.note_versions()
        inputs = self._graph_inputs()
        if not trace.training:
            # the graph may write inputs; on a view that was written under no_grad torch crashes when a hook comes
            self._edges.register_hooks("input")
        w.namespace["forward"] = self._forward()
        w.add(f"results = forward([{self.draft.star(inputs)}])")
        if trace.training:
            saved = w.constant("SavedValues", self._keeping.saved_values())
            more = {"sizes": [*self.draft.sizes.values()], "live": list(map(self.draft.kept, trace.deriver.live))}
            given = [f"{name}=[{', '.join(each)}]" for name, each in more.items() if each]
            w.add(f"saved = {saved}({', '.join([self._keeping.expression(), *given])})")
        if not trace.training or trace.is_whole:
            self._note_results()
            if trace.training:
                self._segment(0)
                self._edges.register_hooks("input")
        else:
            self._segments()
        w.add()
        w.add("# epilogue: what the caller can see")
        self._mutations.write(self.draft.results)  # of several segments, each was written behind its node

    def _forward(self) -> Callable[..., Any]:
        """Return what runs the compiled forward under the settings that it needs."""
        draft = self.draft
        forward = draft.parts.forward
        differentiable = self.trace.training or any(info.requires_grad for info in draft.meta.input_info)
        if draft.grad_on and differentiable:
            forward = _without_grad(forward)
        if any(value for name, value in draft.state.settings if name in ("autocast on cpu", "autocast on cuda")):
            forward = _without_autocast(forward)
        return _repeatable(forward, self.trace) if draft.parts.repeatable else forward

    def _graph_inputs(self) -> list[str]:
        """Return the expressions of the graph's inputs; write what makes synthetic bases."""
        listed = []
        for source in self.trace.inputs.sources:
            if isinstance(source, Base):
                name = self.w.local("base")
                window: dict[str, Any] = {"shift": source.shift, "count": source.count, "dtype": source.dtype}
                maker = self.w.constant("memory_of", partial(internals.memory_window, **window))
                self.w.add(f"{name} = {maker}({self.draft.kept(source.members[0])})")
                listed.append(name)
            elif isinstance(source, SizeOf):
                listed.append(self.draft.sizes[source])
            else:
                listed.append(self.draft.expressions[source])
        return listed

    def _note_results(self) -> None:
        """Note the forward outputs that cannot be differentiated."""
        draft = self.draft
        for i in range(len(self.trace.forward_outputs)):
            if i not in self.trace.roots:
                draft.results[i] = f"results[{i}]"
                if i >= len(self.trace.writes) and self.trace.is_view(i):
                    # made without grad mode, a view of what only the graph knows could not be written; an alias can
                    draft.results[i] = self.w.local(draft.label(i))
                    self.w.add(f"{draft.results[i]} = results[{i}].detach()")

    # --- autograd nodes

    def _segments(self) -> None:
        """Write the nodes of several segments, each followed by the writes that it has the values for."""
        self._edges.register_hooks("input")
        self._edges.keep_old_histories()
        self._mutations.without_writes()
        self._note_results()
        in_order = in_order_of_nodes(self.trace.segments) if self.draft.parts.exact else {}
        for edge in in_order:
            source = self.trace.sources[edge]
            if source.kind == "input" and not self._edges.is_written(source):
                self._pass_on(in_order[edge], self._edges.through(source, ()))
        self._mutations.write(self.draft.results)
        for number in range(len(self.trace.segments)):
            self.w.add()
            self.w.add(f"# segment {number + 1} of {len(self.trace.segments)}: an autograd node of its own")
            for edge, name in self._segment(number):
                self._pass_on(in_order.get(edge, ()), name)
            self._mutations.write(self.draft.results)
            self._edges.register_hooks("root", "cut")

    def _segment(self, number: int) -> list[tuple[Edge, str]]:
        """Write the node of one segment; return the edges at which others send gradients to it, with their names."""
        draft, trace, w = self.draft, self.trace, self.w
        part = trace.segments[number]
        ways = [way for i in trace.through(number) if (way := trace.slots[number][i])]
        done = set(draft.written)
        through = [self._passing.get(way) or self._edges.through(trace.sources[way[0]], done) for way in ways]
        if not through:  # the results require grad, but no input gets any; something has to say so
            through = [w.constant("anchor", torch.empty(0, requires_grad=True))]
        positions = [trace.roots[n] for n in part.roots]
        carried = part.entries[len(part.roots) :]
        names = [w.local(draft.label(i)) for i in positions]
        cut_edges = [f"cut_{trace.sources[edge].index}" for edge in carried]
        values = [f"results[{i}]{'.detach()' if trace.is_view(i) else ''}" for i in positions]
        for shape, dtype, device in (internals.edge_metadata(*edge) for edge in carried):  # they have no memory
            like = w.constant("like", torch.empty((), dtype=dtype, device=device))
            if internals.ADMITTED.get():  # symbols belong to fakes of the caller's mode
                like = f"{through[0]}.new_empty((), dtype={dtype}, device={w.constant('device', device)})"
            values.append(f"{like}.expand({internals.size_text(tuple(shape))})")
        backward = draft.parts.backward[number]
        results = ", ".join([*names, *cut_edges, *([] if backward.anchors else ["_"])])
        w.shared("Compiled", Compiled)
        arguments = f"{w.constant('backward', backward)}, saved, ({', '.join(values)},), {draft.star(through)}"
        comma = "," if "," not in results else ""
        draft.with_grad(f"{results}{comma} = Compiled.apply({arguments})")
        draft.results.update(zip(positions, names, strict=True))
        draft.cut_edges.update(cut_edges)
        entries = list(zip(part.entries, [*positions, *(None for _ in carried)], strict=True))
        OwnNodes(draft, number, entries).write([*names, *cut_edges])
        draft.parts.call.target.between(draft, positions)
        returned = [
            (edge, name)
            for edge, i, name in zip(part.entries, positions, names, strict=False)
            if i >= len(trace.writes) and (source := trace.sources.get(edge)) is not None and source.kind == "root"
            if trace.roots[source.index] == i
        ]
        return [*zip(carried, cut_edges, strict=True), *returned]

    def _pass_on(self, ways: Sequence[Exit], name: str) -> None:
        """Write a node for each gradient that several segments send to one place.

        They are made in the order of the traced program's own nodes, before any node that sends something there. So
        autograd runs them when all of those are done, and sums in eager's order.
        """
        for way in ways:
            self._passing[way] = self.w.local("passing")
            self.draft.with_grad(f"{self._passing[way]} = {self.w.constant('pass_on', internals.pass_on)}({name})")


class OwnNodes:
    """Gives outputs an identity node each, so that hooks on one run only for gradients of that one, as in eager.

    `Compiled` has several outputs, and would run the hooks of all of them whenever one gets a gradient; with a single
    output, it would when a gradient of a gradient passes inside the call. And retaining gradients of a detached tensor
    before a write fails in autograd. Where the traced program's own node keeps an output, gradients of gradients come
    in there and are to pass these nodes and their hooks as well: so the saved values know them.

    ``entries`` are where gradients come into the segment, each with its forward output (None: a cut edge).
    """

    def __init__(self, draft: Draft, segment: int, entries: Sequence[tuple[Edge, int | None]]) -> None:
        self._draft = draft
        self._entries = entries
        kept = draft.parts.backward[segment].kept_entries
        self._kept = {entries[n][0] for n in kept}
        passes_by = not kept and any(value is not None for value in draft.parts.split.graph_values)
        self._is_shared = len(entries) > 1 or passes_by

    def _groups(self) -> list[list[int]]:
        """Return the entries in need of nodes, by their numbers; those of one node of the traced program's together."""
        draft, trace = self._draft, self._draft.trace
        hooked = {trace.roots[source.index] for source, _ in trace.side_effects.hooks if source.kind == "root"}
        together: dict[Any, list[int]] = {}
        own: list[int] = []
        for n, ((node, _), i) in enumerate(self._entries):
            output = None if i is None else draft.returned_output(i)
            if output is None and i is not None and i < len(trace.writes):
                continue
            together.setdefault(node, []).append(n)
            if (self._is_shared and (output or i in hooked)) or (output and i is not None and trace.is_view(i)):
                own.append(n)
        groups = [group for group in together.values() if len(group) > 1 and any(n in own for n in group)]
        return groups + [[n] for n in own if not any(n in group for group in groups)]

    def write(self, names: Sequence[str]) -> None:
        """Write it; ``names`` are the expressions of the entries."""
        draft = self._draft
        lines = []
        for group in self._groups():
            listed = ", ".join(names[n] for n in group)
            edges = tuple(self._entries[n][0] for n in group)
            is_kept = not self._kept.isdisjoint(edges)
            if is_kept or len(group) > 1:
                common = draft.w.shared("with_common_node", internals.with_common_node)
                note = f"saved.noting({draft.w.constant('edges', edges)})" if is_kept else "None"
                lines.append(f"{listed}, = {common}({note}, {listed})")
            else:
                lines.append(f"{listed} = {draft.w.shared('own_node', internals.with_own_node)}({listed})")
        if lines:
            draft.with_grad("; ".join(lines))


class Compiled(torch.autograd.Function):
    """The node of a compiled call, or of one segment of it; the results that it stands behind were computed before.

    It keeps some of them as anchors: gradients of gradients come in there (`aotlab.derivatives.higher`).
    """

    @staticmethod
    def forward(
        ctx: Any, backward: Backward, saved: SavedValues, results: tuple[Tensor, ...], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the results; behind them an empty one, if that is to be the anchor."""
        ctx.set_materialize_grads(False)
        ctx.compiled, ctx.values = backward, saved
        if not backward.anchors:
            results = (*results, torch.empty(0))
        if not (saved.hooked and internals.hooks_are_foreign()):  # those are not to see what eager does not keep
            ctx.to_save = tuple([results[n] for n in backward.anchors or (-1,)])
        return results

    @staticmethod
    @internals.unseen_by_dynamo
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the compiled backward. The last None is for an input that only requires grad, if there is no other."""
        # graphs take tangents whose memory has their values: no lazy conjugates or negatives
        given = [
            t if t is None or not (t.is_conj() or t.is_neg()) else t.resolve_conj().resolve_neg()
            for t in tangents[: len(ctx.compiled.masks)]
        ]
        return None, None, None, *ctx.compiled(ctx.values, given), None

    apply = internals.APPLY_OF_C


class ForwardFailed(Exception):  # noqa: N818  # a signal to whoever called the generated function
    """A compiled forward raised ``error``; nothing that the caller can see has changed.

        def f(x, i):
            x.add_(1)
            return x[i]        # i is out of range: eager raises here, and has written x

    The graph is pure, and the epilogue writes ``x`` after it; so ``x`` is as it was, which in eager it is not, and the
    error may be another than eager's. So the caller, `aotlab.cache.CompiledFunction`, then runs the call eagerly.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


def can_be_repeated(trace: Trace, *, writes_last: bool) -> bool:
    """Tell whether a call whose compiled forward raises can be run again from its beginning.

    ``writes_last`` says that a graph which writes inputs itself does so when nothing can raise any more.
    """
    operations = [o for o in trace.tape.operations if o.phase == "forward"]
    acting = any(acts(o.target) and internals.has_effects(o.target) for o in operations)
    if acting or (trace.side_effects.write_back and not writes_last):
        return False
    kinds = {device.type for device in trace.tape.draws("forward")}
    if not kinds:
        return True
    # to note the state of a generator takes time; where nothing is known to raise that is not spent
    raises = any(o.may_raise_late or (o.may_raise and not o.is_random) for o in operations)
    return raises and kinds <= {"cpu", "cuda"}


def _repeatable(forward: Boxed, trace: Trace) -> Boxed:
    """Make a compiled forward raise `ForwardFailed` if a kernel raises, with the generators as they were."""
    generators = [internals.default_generator(device) for device in trace.tape.draws("forward")]

    def call(inputs: list[Any]) -> Any:
        states = [generator.get_state() for generator in generators]
        try:
            return forward(inputs)
        except AotlabError:  # ours, and no kernel's
            raise
        except Exception as error:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            raise ForwardFailed(error) from error

    return call


def _without_grad(forward: Boxed) -> Boxed:
    """Make a forward run without grad mode, where that is on."""

    def call(inputs: list[Any]) -> Any:
        try:
            internals.set_grad_mode(False)  # in here, since an interrupt may come behind it
            return forward(inputs)
        finally:
            internals.set_grad_mode(True)

    return call


def _without_autocast(forward: Boxed) -> Boxed:
    """Make a forward run without autocast: the graph has its casts."""

    def call(inputs: list[Any]) -> Any:
        with internals.disable_autocast():
            return forward(inputs)

    return call
