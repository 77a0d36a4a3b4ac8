"""Write the call of the compiled forward, and the autograd nodes that become the ``grad_fn`` of its results.

The graph runs without autograd. Then each segment of the traced autograd graph becomes one autograd node. The node's
inputs are the tensors that can get a gradient; its outputs are the results that the graph returned for the segment.
Most programs have one segment::

    results = forward([x, w])
    saved = SavedValues(results[1:])
    y, = Compiled.apply(backward, saved, (results[0],), w)

Sometimes the caller can get a tensor from the middle of the autograd graph, for example through a view of an input that
is written later. One node for the whole call would hide that tensor's history. Then the function has several nodes,
with the writes between them::

    new_x, = Compiled.apply(backward, saved, (results[0],), x)
    x.copy_(new_x)
    out_0, = Compiled.apply(backward_2, saved, (results[1],), x, y)  # from the x that the caller sees
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.backends.base import Boxed
from aotlab.capture.synthetic_bases import Base
from aotlab.errors import AotlabError
from aotlab.ir.fx_graphs import may_have_effects
from aotlab.runtime.draft import Draft, SegmentBackward
from aotlab.runtime.edge_tensors import Edges
from aotlab.runtime.mutations import Mutations
from aotlab.runtime.output_expressions import Outputs
from aotlab.runtime.saved_values import SavedValues
from aotlab.runtime.saved_values_writer import SavedValuesWriter
from aotlab.trace.autograd_edges import Edge
from aotlab.trace.live_trace import Trace
from aotlab.trace.records import SizeOf
from aotlab.trace.segments import Exit, exits_in_node_order


class ForwardCall:
    """Writes the call of the forward, the autograd nodes, and the writes between the nodes.

    The inputs of a segment's node are tensors that the caller can see: outputs of the earlier segments as they are
    returned, and inputs as they are after their write.
    """

    def __init__(
        self, draft: Draft, edges: Edges, outputs: Outputs, mutations: Mutations, saving: SavedValuesWriter
    ) -> None:
        self.draft = draft
        self.trace = draft.trace
        self.w = draft.w
        self._edges = edges
        self._outputs = outputs
        self._mutations = mutations
        self._saving = saving
        self._pass_through: dict[Exit, str] = {}

    def write(self) -> None:
        """Write the call of the compiled forward, the autograd nodes and the write-backs.

        Store the expression of each forward output in the draft.
        """
        trace, w = self.trace, self.w
        w.add("# compiled forward")
        self._mutations.note_versions()
        inputs = self._graph_inputs()
        if not trace.training:
            # Register the hooks before the graph runs, because the graph may write inputs. torch crashes if a hook is
            # registered on a view after a write under no_grad.
            self._edges.register_hooks("input")
        w.namespace["forward"] = self._forward()
        w.add(f"results = forward([{self.draft.star(inputs)}])")
        for i, (name, _) in trace.bound_sizes.items():
            w.add(f"{name} = results[{i}]")
        self._mutations.let_require_grad()
        if trace.training:
            saved = w.constant("SavedValues", self._saving.saved_values())
            live = [self.draft.kept(k) for k in trace.deriver.live if k >= 0]
            bound = [name for name, _ in trace.bound_sizes.values()]
            lists = {"sizes": [*self.draft.sizes.values(), *bound], "live": live}
            keywords = [f"{name}=[{', '.join(items)}]" for name, items in lists.items() if items]
            w.add(f"saved = {saved}({', '.join([self._saving.expression(), *keywords])})")
        if not trace.training or trace.is_whole:
            self._note_results()
            if trace.training:
                self._segment(0)
                self._edges.register_hooks("input")
        else:
            self._segments()
        w.add()
        w.add("# epilogue: what the caller can see")
        self._mutations.write(self.draft.results)  # with several segments, most inputs are already written
        self._edges.register_hooks("view")

    def _forward(self) -> Callable[..., Any]:
        """Return a callable that runs the compiled forward under the grad and autocast modes that it needs."""
        draft = self.draft
        forward = draft.parts.forward
        differentiable = self.trace.training or any(info.requires_grad for info in draft.meta.input_info)
        if draft.grad_on and differentiable:
            forward = _without_grad(forward)
        if any(value for name, value in draft.state.settings if name in ("autocast on cpu", "autocast on cuda")):
            forward = _without_autocast(forward)
        return _repeatable(forward, self.trace) if draft.parts.repeatable else forward

    def _graph_inputs(self) -> list[str]:
        """Return the expressions of the graph's inputs, and write the lines that build synthetic bases."""
        expressions = []
        for source in self.trace.inputs.sources:
            if isinstance(source, Base):
                name = self.w.local("base")
                window: dict[str, Any] = {"shift": source.shift, "count": source.count, "dtype": source.dtype}
                maker = self.w.constant("memory_of", partial(internals.memory_window, **window))
                self.w.add(f"{name} = {maker}({self.draft.kept(source.members[0])})")
                expressions.append(name)
            elif isinstance(source, SizeOf):
                expressions.append(self.draft.sizes[source])
            else:
                expressions.append(self.draft.expressions[source])
        return expressions

    def _note_results(self) -> None:
        """Store the expressions of the forward outputs that cannot be differentiated."""
        draft = self.draft
        for i in range(len(self.trace.forward_outputs)):
            if i not in self.trace.roots:
                draft.results[i] = f"results[{i}]"
                if i >= len(self.trace.writes) and self.trace.is_view(i):
                    # The graph made this view with grad mode off. So torch would raise if the caller wrote the view in
                    # place and autograd recorded the write. For a detached alias, torch does not raise.
                    draft.results[i] = self.w.local(draft.label(i))
                    self.w.add(f"{draft.results[i]} = results[{i}].detach()")

    # --- autograd nodes

    def _segments(self) -> None:
        """Write the autograd nodes of several segments. After each node come the write-backs of its new values."""
        self._edges.register_hooks("input")
        self._edges.keep_old_histories()
        self._mutations.write_metadata_changes()
        self._note_results()
        in_order = exits_in_node_order(self.trace.segments) if self.draft.parts.exact else {}
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
        """Write the autograd node of one segment.

        Returns the edges along which other segments send gradients to this segment. With each edge comes the name of
        the variable that holds its tensor.
        """
        draft, trace, w = self.draft, self.trace, self.w
        segment = trace.segments[number]
        exits = [exit_ for i in trace.gradient_slots(number) if (exit_ := trace.slots[number][i])]
        writes_done = set(draft.written)
        node_inputs = [
            self._pass_through.get(exit_) or self._edges.through(trace.sources[exit_[0]], writes_done)
            for exit_ in exits
        ]
        if not node_inputs:
            # the results require grad, but no input gets a gradient: the anchor makes autograd add a node
            node_inputs = [w.constant("anchor", torch.empty(0, requires_grad=True))]
        positions = [trace.roots[n] for n in segment.roots]
        carried = segment.entries[len(segment.roots) :]
        names = [w.local(draft.label(i)) for i in positions]
        cut_edges = [f"cut_{trace.sources[edge].index}" for edge in carried]
        values = [f"results[{i}]{'.detach()' if trace.is_view(i) else ''}" for i in positions]
        # A cut edge has no value. A tensor of one element, expanded to the shape of the edge's gradient, replaces it.
        for shape, dtype, device in (internals.edge_metadata(*edge) for edge in carried):
            like = w.constant("like", torch.empty((), dtype=dtype, device=device))
            # If the caller's tensors are fake and have symbolic sizes, the new tensor must be of the same fake mode.
            if internals.ADMITTED.get():
                like = f"{node_inputs[0]}.new_empty((), dtype={dtype}, device={w.constant('device', device)})"
            values.append(f"{like}.expand({internals.size_text(tuple(shape))})")
        backward = draft.parts.backward[number]
        results = ", ".join([*names, *cut_edges, *([] if backward.anchors else ["_"])])
        w.shared("Compiled", Compiled)
        arguments = f"{w.constant('backward', backward)}, saved, ({', '.join(values)},), {draft.star(node_inputs)}"
        comma = "," if "," not in results else ""
        draft.with_grad(f"{results}{comma} = Compiled.apply({arguments})")
        draft.results.update(zip(positions, names, strict=True))
        draft.cut_edges.update(cut_edges)
        entries = list(zip(segment.entries, [*positions, *(None for _ in carried)], strict=True))
        OwnNodes(draft, number, entries).write([*names, *cut_edges])
        for i, name in zip(positions, names, strict=True):
            if (output := draft.returned_output(i)) is not None and output.made_in_function:
                made = w.shared("view_in_function", internals.view_in_function)
                draft.with_grad(f"{name} = {made}({name})")
        if draft.parts.after_node is not None:
            draft.parts.after_node(draft, positions)
        edges_of_returned = [
            (edge, name)
            for edge, i, name in zip(segment.entries, positions, names, strict=False)
            if i >= len(trace.writes) and (source := trace.sources.get(edge)) is not None and source.kind == "root"
            if trace.roots[source.index] == i
        ]
        return [*zip(carried, cut_edges, strict=True), *edges_of_returned]

    def _pass_on(self, exits: Sequence[Exit], name: str) -> None:
        """Write an autograd node for each of ``exits`` that passes the gradient on to the tensor ``name`` unchanged.

        Along these exits, several segments send gradients to that tensor. The pass-on nodes are made in the order of
        the traced program's nodes, and before every node that sends gradients to them. Autograd runs nodes in the
        reverse order of their creation. So the pass-on nodes run after all nodes that send gradients to them, and
        autograd sums the gradients in the same order as in eager.
        """
        for exit_ in exits:
            self._pass_through[exit_] = self.w.local("passing")
            self.draft.with_grad(
                f"{self._pass_through[exit_]} = {self.w.constant('pass_on', internals.pass_on)}({name})"
            )


class OwnNodes:
    """Gives each output its own identity node, so that hooks on one output run only for gradients of that output.

    `Compiled` has several outputs. Without identity nodes, autograd would run the hooks of all outputs when one of them
    gets a gradient. Even with a single output, it would run the hooks when a second-order gradient flows inside the
    call. An output that is returned as a detached alias also gets its own node, because autograd sometimes fails if the
    user calls ``retain_grad`` on such an alias and then writes it.

    If a node of the traced program saves an output, second-order gradients enter at that output. They must pass through
    the identity node and its hooks too. So `SavedValues` holds a reference to this identity node.

    ``entries`` are the edges along which gradients enter the segment ``segment``. Each comes with the position of its
    forward output; the position is None for a cut edge.
    """

    def __init__(self, draft: Draft, segment: int, entries: Sequence[tuple[Edge, int | None]]) -> None:
        self._draft = draft
        self._entries = entries
        kept_entries = draft.parts.backward[segment].kept_entries
        self._kept_edges = {entries[n][0] for n in kept_entries}
        may_pass_inside = not kept_entries and any(value is not None for value in draft.parts.split.graph_values)
        self._is_shared = len(entries) > 1 or may_pass_inside

    def _groups(self) -> list[list[int]]:
        """Return the indices of the entries that need identity nodes, grouped by the traced autograd node."""
        draft, trace = self._draft, self._draft.trace
        hooked = {trace.roots[source.index] for source, _ in trace.side_effects.hooks if source.kind == "root"}
        by_node: dict[Any, list[int]] = {}
        needed: list[int] = []
        for n, ((node, _), i) in enumerate(self._entries):
            output = None if i is None else draft.returned_output(i)
            if output is None and i is not None and i < len(trace.writes):
                continue
            by_node.setdefault(node, []).append(n)
            if (self._is_shared and (output or i in hooked)) or (output and i is not None and trace.is_view(i)):
                needed.append(n)
        groups = [group for group in by_node.values() if len(group) > 1 and any(n in needed for n in group)]
        return groups + [[n] for n in needed if not any(n in group for group in groups)]

    def write(self, names: Sequence[str]) -> None:
        """Write the identity nodes; ``names`` are the variables of the tensors at ``entries``."""
        draft = self._draft
        lines = []
        for group in self._groups():
            variables = ", ".join(names[n] for n in group)
            edges = tuple(self._entries[n][0] for n in group)
            is_kept = not self._kept_edges.isdisjoint(edges)
            if is_kept or len(group) > 1:
                common = draft.w.shared("with_common_node", internals.with_common_node)
                callback = f"saved.noting({draft.w.constant('edges', edges)})" if is_kept else "None"
                lines.append(f"{variables}, = {common}({callback}, {variables})")
            else:
                lines.append(f"{variables} = {draft.w.shared('own_node', internals.with_own_node)}({variables})")
        if lines:
            draft.with_grad("; ".join(lines))


class Compiled(torch.autograd.Function):
    """The autograd node of a compiled call, or of one segment of it.

    The compiled forward has already computed the results, so the node only becomes their ``grad_fn``. It saves some
    results as anchors, at which second-order gradients enter (`aotlab.derivatives.create_graph`).
    """

    @staticmethod
    def forward(
        ctx: Any, backward: SegmentBackward, saved: SavedValues, results: tuple[Tensor, ...], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Return ``results`` as outputs of this node; if none of them is an anchor, append an empty tensor as anchor.

        ``saved`` are the saved values that ``backward`` reads. ``inputs`` are the tensors that can get a gradient.
        """
        ctx.set_materialize_grads(False)
        ctx.compiled, ctx.values = backward, saved
        if not backward.anchors:
            results = (*results, torch.empty(0))
        # Eager does not save the anchors. So the user's saved-tensor hooks must not see them.
        if not (saved.hooked and internals.hooks_are_foreign()):
            ctx.to_save = tuple([results[n] for n in backward.anchors or (-1,)])
        return results

    @staticmethod
    @internals.unseen_by_dynamo
    def backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the compiled backward.

        The last None in the result is for the anchor that `ForwardCall` passes as input if no other input gets a
        gradient.
        """
        # Graphs read the memory of tangents, which does not show a lazy conjugation or negation.
        plain_tangents = [
            t if t is None or not (t.is_conj() or t.is_neg()) else t.resolve_conj().resolve_neg()
            for t in tangents[: len(ctx.compiled.masks)]
        ]
        return None, None, None, *ctx.compiled(ctx.values, plain_tangents), None

    apply = internals.APPLY_OF_C


class ForwardFailed(Exception):  # noqa: N818  # a signal to whoever called the generated function
    """A compiled forward raised ``error``, and nothing that the caller can see has changed.

        def f(x, i):
            x.add_(1)
            return x[i]        # i is out of range: eager raises here, and has written x

    The graph is pure, and only the epilogue writes ``x``. So after the error ``x`` still has its old value, unlike in
    eager, and the error may differ from eager's. `aotlab.cache.CompiledFunction` catches this exception and runs the
    call eagerly.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error


def can_be_repeated(trace: Trace, *, writes_last: bool) -> bool:
    """Tell whether a call whose compiled forward raises can be run again from its beginning.

    ``writes_last`` is true if the backend's graphs write inputs only after all operations that may raise.
    """
    operations = [o for o in trace.tape.operations if o.phase == "forward"]
    has_effects = any(may_have_effects(o.target) and internals.has_effects(o.target) for o in operations)
    if has_effects or (trace.side_effects.write_back and not writes_last):
        return False
    kinds = {device.type for device in trace.tape.draws("forward")}
    if not kinds:
        return True
    # To repeat random ops, `_repeatable` must read the state of their generators, which takes time. So do this only if
    # an op may raise.
    raises = any(o.may_raise_late or (o.may_raise and not o.is_random) for o in operations)
    return raises and kinds <= {"cpu", "cuda"}


def _repeatable(forward: Boxed, trace: Trace) -> Boxed:
    """Wrap a compiled forward: if a kernel raises, restore the generators' states and raise `ForwardFailed`."""
    generators = [internals.default_generator(device) for device in trace.tape.draws("forward")]

    def call(inputs: list[Any]) -> Any:
        states = [generator.get_state() for generator in generators]
        try:
            return forward(inputs)
        except AotlabError:  # aotlab raised this error, not a kernel
            raise
        except Exception as error:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
            raise ForwardFailed(error) from error

    return call


def _without_grad(forward: Boxed) -> Boxed:
    """Wrap a forward so that it runs with grad mode off. Grad mode must be on when it is called."""

    def call(inputs: list[Any]) -> Any:
        try:
            internals.set_grad_mode(False)  # inside of `try`: a KeyboardInterrupt may follow at once
            return forward(inputs)
        finally:
            internals.set_grad_mode(True)

    return call


def _without_autocast(forward: Boxed) -> Boxed:
    """Wrap a forward so that it runs without autocast: the graph contains autocast's casts already."""

    def call(inputs: list[Any]) -> Any:
        with internals.disable_autocast():
            return forward(inputs)

    return call
