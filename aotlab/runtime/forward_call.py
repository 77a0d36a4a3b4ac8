"""The call of the compiled forward, where it is called once and its backward is at most one autograd node.

In training the graph runs inside an `torch.autograd.Function`. Inputs that can get a gradient go through ``apply``; the
others pass by it in a list, in which results that cannot be differentiated come back::

    box = [mask]
    out_0 = Compiled.apply(box, x, w)
    new_running_mean, = box
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.synthetic_bases import Base
from aotlab.runtime.draft import Draft
from aotlab.runtime.edges import Edges
from aotlab.runtime.failing import watched
from aotlab.runtime.keeping import Keeping
from aotlab.runtime.mutations import Mutations
from aotlab.runtime.saved import SavedValues
from aotlab.trace.edges import Edge, edge_of
from aotlab.trace.history import kept_entries
from aotlab.trace.live import Trace


class ForwardCall:
    """Writes the call, and the autograd.Function that makes it."""

    def __init__(self, draft: Draft, edges: Edges, mutations: Mutations, keeping: Keeping) -> None:
        self.draft = draft
        self.trace = draft.trace
        self.w = draft.w
        self._edges = edges
        self._mutations = mutations
        self._keeping = keeping

    def write(self) -> None:
        """Write the call; note the expression for each forward output."""
        self.w.add("# compiled forward")
        self._mutations.note_versions()
        inputs = graph_inputs(self.draft)
        if self.trace.training:
            self._apply(inputs)
        else:
            self._infer(inputs)

    def _infer(self, inputs: Sequence[str]) -> None:
        """Write the call for a function of which nothing can be differentiated."""
        draft, count = self.draft, len(self.trace.forward_outputs)
        # the graph may write inputs; on a view that was written under no_grad torch crashes when a hook comes
        self._edges.register_hooks("input")
        requires = any(i.requires_grad for i in draft.meta.input_info)
        call_forward(draft, inputs, grad_mode=False if draft.grad_on and requires else None)
        draft.results.update({i: f"out[{i}]" for i in range(count)})
        for i in filter(draft.needs_detach, range(count)):
            draft.results[i] = self.w.local(draft.label(i))
            self.w.add(f"{draft.results[i]} = out[{i}].detach()")

    def _apply(self, inputs: Sequence[str]) -> None:
        draft, trace, w = self.draft, self.trace, self.w
        slots, connected = trace.slots[0], trace.connected[0]
        ways = [slots[i] for i in trace.through(0)]
        through = [self._edges.through(trace.sources[way[0]], ()) for way in ways if way]
        beside = [e for e, c in zip(inputs, connected, strict=False) if not c]
        names = draft.results
        for i in range(len(trace.forward_outputs)):
            names[i] = w.local(draft.label(i))
        w.add(f"box = [{', '.join(beside)}]")
        anchored = not through
        if anchored:  # the outputs require grad, but no input gets any; something has to say so
            through = [anchor(draft)]
        hanging = hung_on(trace, 0)
        results = ", ".join([*(names[i] for i in trace.roots), *(["_"] if hanging is None else [])])
        with self._mutations.requiring_grad():
            draft.with_grad(f"{results} = Compiled.apply(box, {draft.star(through)})")
        entries = [(edge_of(wrapper), i) for wrapper, i in zip(trace.root_wrappers, trace.roots, strict=True)]
        nodes = OwnNodes(draft, 0, entries)
        told = self._keeping.is_told or nodes.are_noted
        others = [names[i] for i in self._others()] + ["saved"] * told
        if others:
            w.add(f"{', '.join(others)}{',' if len(others) == 1 else ''} = box")
        nodes.write([names[i] for i in trace.roots])
        self._function_class(len(inputs), hanging, anchored=anchored, told=told)

    def _others(self) -> list[int]:
        """Return the forward outputs that cannot be differentiated."""
        return [i for i in range(len(self.trace.forward_outputs)) if i not in self.trace.roots]

    def _function_class(self, inputs: int, hanging: tuple[int, ...] | None, *, anchored: bool, told: bool) -> None:
        """Write the autograd.Function; ``hanging`` is as `hung_on` says; ``told``: its saved values come back."""
        draft, trace = self.draft, self.trace
        (backward,) = draft.parts.backward
        draft.w.namespace.update(Function=torch.autograd.Function, SavedValues=SavedValues, backward=backward)
        listed, boxed_inputs = self._graph_arguments(inputs)
        lines = ["class Compiled(Function):", "    @staticmethod", "    def forward(ctx, box, *inputs):"]
        lines.append("        ctx.set_materialize_grads(False)")
        with watched(draft, lines, "        ") as indent:
            if draft.casts:
                lines += [f"{indent}with disable_autocast():", f"{indent}    out = forward({listed})"]
            else:
                lines.append(f"{indent}out = forward({listed})")
        lines.append(f"        ctx.values = SavedValues({self._keeping.expression()})")
        boxed = [f"out[{i}]{'.detach()' if draft.needs_detach(i) else ''}" for i in self._others()]
        boxed += ["ctx.values"] * told
        if boxed_inputs or boxed:
            lines.append(f"        box[:] = [{', '.join(boxed)}]")
        returned = [f"out[{i}]{'.detach()' if trace.is_view(i) else ''}" for i in trace.roots]
        lines += hang(draft, returned, hanging, "ctx.values")
        lines.append(f"        return {', '.join(returned)}")
        lines += ["", "    @staticmethod", "    def backward(ctx, *tangents):"]
        tangents = "tangents[:-1]" if hanging is None else "tangents"
        lines.append(f"        return None{', None' if anchored else ''}, *backward(ctx.values, {tangents})")
        draft.heads += [*lines, "", ""]

    def _graph_arguments(self, inputs: int) -> tuple[str, int]:
        """Write the list of the graph's inputs inside the Function; say how many of them come in the box."""
        through = self.trace.through(0)
        order, box_index = [], 0
        for i in range(inputs):
            if i in through:
                order.append(f"inputs[{through.index(i)}]")
            else:
                order.append(f"box[{box_index}]")
                box_index += 1
        if not box_index and through == list(range(inputs)):
            return "list(inputs)" if through else "[]", box_index
        return f"[{', '.join(order)}]", box_index


#: An output of so many bytes, as a loss, may be kept only for what hangs on it.
_SMALL = 64


def hung_on(trace: Trace, segment: int) -> tuple[int, ...] | None:
    """Choose the results on which nodes of derivatives of derivatives hang: see `aotlab.derivatives.higher`.

    They are kept as autograd keeps results, without a cycle: those that eager keeps, else the smallest. None if that
    takes memory; then there has to be another result, without any.
    """
    part = trace.segments[segment]
    own = kept_entries(part, trace.saving.bits)
    if own:
        return own
    carriers = range(len(part.roots), len(part.entries))  # without memory
    if carriers:
        return (carriers[0],)
    sizes = [(value.numel() * value.itemsize, n) for n, value in enumerate(trace.tangents.fakes[n] for n in part.roots)]
    size, smallest = min(sizes)
    return (smallest,) if size <= _SMALL else None


def hang(draft: Draft, returned: list[str], hanging: tuple[int, ...] | None, values: str) -> list[str]:
    """Write the lines that keep results of a Function to hang on; change the expressions of what it returns."""
    lines = []
    for n in hanging or ():
        if not returned[n].isidentifier():
            lines.append(f"        hung_{n} = {returned[n]}")
            returned[n] = f"hung_{n}"
    if hanging is None:
        draft.w.namespace["nothing"] = torch.empty(0)
        lines.append("        hung = nothing.detach()")
        returned.append("hung")
    kept = ", ".join(returned[n] for n in hanging or (-1,))
    draft.w.namespace["foreign_hooks"] = internals.hooks_are_foreign  # which are not to see what eager has not
    return [*lines, f"        if not ({values}.hooked and foreign_hooks()):", f"            ctx.to_save = ({kept},)"]


def call_forward(draft: Draft, inputs: Sequence[str], *, grad_mode: bool | None) -> None:
    """Write the call of the compiled forward in this grad mode (None: the one that is on)."""
    with watched(draft, draft.w.lines, "    " * draft.w.depth) as indent:
        depth, draft.w.depth = draft.w.depth, len(indent) // 4
        draft.in_context(f"out = forward([{draft.star(inputs)}])", grad_mode=grad_mode, autocast_off=draft.casts)
        draft.w.depth = depth


def graph_inputs(draft: Draft) -> list[str]:
    """Return the expressions of the graph's inputs; write what makes synthetic bases."""
    listed = []
    for source in draft.trace.inputs.sources:
        if isinstance(source, Base):
            name = draft.w.local("base")
            maker = draft.w.constant("memory_of", _base_maker(source))
            first = draft.kept(source.members[0])
            draft.w.add(f"{name} = {maker}({first})")
            listed.append(name)
        else:
            listed.append(draft.expressions[source])
    return listed


def _base_maker(base: Base) -> Callable[[Tensor], Tensor]:
    """Make the function that makes a synthetic base from its first member; it keeps nothing of the trace."""
    shift, count, dtype = base.shift, base.count, base.dtype
    return lambda first: internals.memory_window(first, shift, count, dtype)


def anchor(draft: Draft) -> str:
    """Return something that requires grad, for a node into which nothing else goes that does."""
    return draft.w.constant("anchor", torch.empty(0, requires_grad=True))


class OwnNodes:
    """Gives outputs that the caller gets as they are autograd nodes like those that they have in eager.

    A node with several outputs runs the hooks of all of them whenever one gets a gradient, with None for the others; so
    does one with a single output when a gradient of a gradient passes only the midst of the call. And autograd's
    bookkeeping of a tensor that was detached fails if gradients are retained before a write. The former matters to
    bases of outputs too, if the function has hooks on them.

    Where the traced program's own node keeps an output, gradients of gradients come in at that, and are to pass these
    nodes and their hooks as well: so the saved values know them.

    Parameters
    ----------
    draft, segment
        The segment whose node was called.
    entries
        Where gradients come into it, each with the position of the forward output that it is, None for a carrier.
    """

    def __init__(self, draft: Draft, segment: int, entries: Sequence[tuple[Edge, int | None]]) -> None:
        self._draft = draft
        self._entries = entries
        trace = draft.trace
        kept = kept_entries(trace.segments[segment], trace.saving.bits)
        self._kept = {entries[n][0] for n in kept}
        passes_by = not kept and any(value is not None for value in draft.parts.split.graph_values)
        self._is_shared = len(entries) > 1 or passes_by
        #: The outputs in need of nodes, by their numbers; those of one node of the traced program's together.
        self._groups = self._grouped()
        self.are_noted = any(self._edges(group) & self._kept for group in self._groups)

    def _grouped(self) -> list[list[int]]:
        draft, trace = self._draft, self._draft.trace
        first = len(trace.writes)
        last = first + len(trace.returned_outputs)
        hooked = {trace.roots[source.index] for _, source, _ in trace.effects.hooks if source.kind == "root"}
        together: dict[Any, list[int]] = {}
        own: list[int] = []
        for n, ((node, _), i) in enumerate(self._entries):
            if i is None or i >= last:
                together.setdefault(node, []).append(n)
                if i in hooked and self._is_shared:
                    own.append(n)
                continue
            # eager's own rules forbid to write the latter, and what is viewed by a function has the view's node
            if i < first or draft.function_view(i) is not None or self._viewed_by(i) is not None:
                continue
            together.setdefault(node, []).append(n)
            if self._is_shared or trace.is_view(i):
                own.append(n)
        groups = [group for group in together.values() if len(group) > 1 and any(n in own for n in group)]
        return groups + [[n] for n in own if not any(n in group for group in groups)]

    def _viewed_by(self, i: int) -> str | None:
        """Return the function that made the view which the forward output ``i`` is and that nobody may write."""
        trace = self._draft.trace
        place = i - len(trace.writes)
        if not 0 <= place < len(trace.returned_outputs):
            return None
        return self._draft.meta.output_info[trace.returned_outputs[place]].made_by

    def _edges(self, group: Sequence[int]) -> set[Edge]:
        return {self._entries[n][0] for n in group}

    def write(self, names: Sequence[str]) -> None:
        """Write it; ``names`` are the expressions of the entries."""
        draft = self._draft
        for (_, i), name in zip(self._entries, names, strict=True):
            function = None if i is None else self._viewed_by(i)
            if function is not None and i is not None and draft.function_view(i) is None:
                view = draft.w.constant(function, internals.viewing_function(function))
                draft.with_grad(f"{name} = {view}({name})")
        lines = []
        for group in self._groups:
            listed = ", ".join(names[n] for n in group)
            is_kept = bool(self._edges(group) & self._kept)
            if is_kept or len(group) > 1:
                draft.w.namespace["with_common_node"] = internals.with_common_node
                edges = draft.w.constant("edges", tuple(self._entries[n][0] for n in group)) if is_kept else ""
                note = f"saved.noting({edges})" if is_kept else "None"
                lines.append(f"{listed}, = with_common_node({note}, {listed})")
            else:
                draft.w.namespace["own_node"] = internals.with_own_node
                lines.append(f"{listed} = own_node({listed})")
        if lines:
            draft.with_grad("; ".join(lines))
