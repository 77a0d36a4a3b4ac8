"""The call of the compiled forward, followed by an autograd node for each segment of the traced graph.

Where the caller can get hold of a tensor in the middle of the graph, by a view of an input that is then written for
instance, one node for the whole call would hide its history. So the graph runs first, without any, and each segment's
node then hands its results on::

    out = forward([x, y])
    saved = SavedValues(out[2:])
    new_x = Segment_1.apply(saved, (out[0],), x)
    x.copy_(new_x)
    out_0 = Segment_2.apply(saved, (out[1],), x, y)      # from the x that the caller sees
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.runtime.draft import Draft
from aotlab.runtime.edges import Edges
from aotlab.runtime.forward_call import OwnNodes, anchor, call_forward, graph_inputs, hang, hung_on
from aotlab.runtime.keeping import Keeping
from aotlab.runtime.mutations import Mutations
from aotlab.runtime.outputs import Outputs
from aotlab.runtime.saved import SavedValues
from aotlab.trace.edges import Edge
from aotlab.trace.segments import Exit
from aotlab.trace.sums import in_order_of_nodes


class PassOn(torch.autograd.Function):
    """An autograd node that hands on its gradient, and nothing else."""

    @staticmethod
    def forward(ctx: Any, like: Tensor, through: Tensor) -> Tensor:  # its history is what matters
        """Return something that has a history."""
        ctx.set_materialize_grads(False)
        return like.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, Tensor | None]:
        """Hand the gradient on."""
        return None, gradient


class SegmentCalls:
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
        self._in_order = in_order_of_nodes(self.trace.segments) if draft.parts.exact else {}
        self._passing: dict[Exit, str] = {}

    def write(self) -> None:
        """Write all of it; note the expression for each forward output."""
        draft, w = self.draft, self.w
        w.add("# compiled forward")
        self._mutations.note_versions()
        inputs = graph_inputs(draft)
        call_forward(draft, inputs, grad_mode=False if draft.grad_on else None)
        w.namespace["SavedValues"] = SavedValues
        w.add(f"saved = SavedValues({self._keeping.expression()})")
        self._mutations.require_grad()
        self._edges.register_hooks("input")
        self._edges.keep_old_histories()
        self._mutations.without_writes()
        for i in range(len(self.trace.forward_outputs)):
            if i not in self.trace.roots:
                draft.results[i] = w.local(draft.label(i))
                w.add(f"{draft.results[i]} = out[{i}]{'.detach()' if draft.needs_detach(i) else ''}")
        for edge in self._in_order:
            if trace_input := self._unwritten_input(edge):
                self._pass_on(edge, trace_input)
        self._mutations.write(draft.results)
        for number in range(len(self.trace.segments)):
            self._segment(number)
            self._mutations.write(draft.results)
            self._edges.register_hooks("root", "carrier")

    def _segment(self, number: int) -> None:
        """Write the node of one segment."""
        draft, trace, w = self.draft, self.trace, self.w
        part = trace.segments[number]
        w.add()
        w.add(f"# segment {number + 1} of {len(trace.segments)}: an autograd node of its own")
        pairs = zip(trace.slots[number], trace.connected[number], strict=True)
        done = set(draft.written)
        through = [
            self._passing.get(way) or self._edges.through(trace.sources[way[0]], done) for way, c in pairs if way and c
        ]
        anchored = not through
        if anchored:
            through = [anchor(draft)]
        positions = [trace.roots[n] for n in part.roots]
        names = [w.local(draft.label(i)) for i in positions]
        carried = part.entries[len(part.roots) :]
        carriers = [f"carrier_{trace.sources[edge].index}" for edge in carried]
        values = [self._value(i) for i in positions]
        values += [f"{self._like(edge)}.detach()" for edge in carried]
        hanging = hung_on(trace, number)
        results = [*names, *carriers, *(["_"] if hanging is None else [])]
        comma = "," if len(results) == 1 else ""
        draft.with_grad(
            f"{', '.join(results)}{comma} = Segment_{number + 1}.apply(saved, ({', '.join(values)},), "
            f"{', '.join(through)})"
        )
        self._segment_class(number, len(values), hanging, anchored=anchored)
        draft.results.update(zip(positions, names, strict=True))
        draft.carriers.update(carriers)
        entries = list(zip(part.entries, [*positions, *(None for _ in carried)], strict=True))
        OwnNodes(draft, number, entries).write([*names, *carriers])
        for edge, name in zip(carried, carriers, strict=True):
            self._pass_on(edge, name)
        for edge, i, name in zip(part.entries, positions, names, strict=False):
            source = trace.sources.get(edge)
            if source is not None and source.kind == "root" and i == trace.roots[source.index] >= len(trace.writes):
                self._pass_on(edge, name)

    def _unwritten_input(self, edge: Edge) -> str | None:
        """Return the expression of the input at an edge, if it keeps its history."""
        source = self.trace.sources[edge]
        if source.kind != "input" or self._edges.is_written(source):
            return None
        return self._edges.through(source, ())

    def _pass_on(self, edge: Edge, name: str) -> None:
        """Write a node for each gradient that several segments send to an edge.

        They are made in the order of the traced program's own nodes, before any node that sends something there. So
        autograd runs them when all of those are done, and sums in eager's order.
        """
        for way in self._in_order.get(edge, ()):
            self._passing[way] = self.w.local("passing")
            pass_on = self.w.constant("pass_on", PassOn.apply)
            self.draft.with_grad(f"{self._passing[way]} = {pass_on}({self._like(edge)}, {name})")

    def _value(self, i: int) -> str:
        """Return the expression of the forward output ``i`` as the node takes it.

        A view of an input that a custom Function made is made of the caller's tensor, as it is by now.
        """
        output = self.draft.function_view(i)
        if output is None:
            return f"out[{i}]{'.detach()' if self.trace.is_view(i) else ''}"
        return self._outputs.view_without_history(output)

    def _like(self, edge: Edge) -> str:
        """Return the name of a tensor without memory that looks like the value whose gradient an edge carries."""
        shape, dtype, device = internals.edge_metadata(*edge)
        return self.w.constant("like", torch.empty((), dtype=dtype, device=device).expand(shape))

    def _segment_class(self, number: int, results: int, hanging: tuple[int, ...] | None, *, anchored: bool) -> None:
        """Write the autograd.Function of a segment; its forward only hands on what the compiled forward returned."""
        returned = [f"results[{n}]" for n in range(results)]
        lines = hang(self.draft, returned, hanging, "saved")
        names = self.w.namespace
        names["Function"] = torch.autograd.Function
        names[f"backward_{number + 1}"] = self.draft.parts.backward[number]
        anchor = ", None" if anchored else ""
        tangents = "tangents[:-1]" if hanging is None else "tangents"
        self.draft.heads += [
            f"class Segment_{number + 1}(Function):",
            "    @staticmethod",
            "    def forward(ctx, saved, results, *inputs):",
            "        ctx.set_materialize_grads(False)",
            "        ctx.values = saved",
            *lines,
            f"        return {', '.join(returned)}{',' if len(returned) == 1 else ''}",
            "",
            "    @staticmethod",
            "    def backward(ctx, *tangents):",
            f"        return None, None{anchor}, *backward_{number + 1}(ctx.values, {tangents})",
            "",
            "",
        ]
