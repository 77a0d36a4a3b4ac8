"""Find the run-time tensors that correspond to edges of the traced autograd graph, and register hooks on them.

For the trace, an edge is an autograd node and the number of one of its results. At run time this node does not exist.
The tensor that has this edge as its history is then an input, an output, or a tensor made for a cut edge. Its kind and
index are in a `aotlab.trace.records.Source`.
"""

from __future__ import annotations

from collections.abc import Collection

from aotlab import _torch as internals
from aotlab.runtime.draft import Draft
from aotlab.runtime.output_expressions import Outputs
from aotlab.trace.records import Source


class Edges:
    """Gives the Python expression by which the generated function reads the tensor that an edge belongs to.

    The writer of the autograd nodes passes these expressions to the nodes as inputs, so that the gradients of a segment
    flow to these tensors. A write changes the autograd history of an input. If a later segment needs the history from
    before the write, a variable ``before_…`` holds a tensor with that history.
    """

    def __init__(self, draft: Draft, outputs: Outputs) -> None:
        self._draft = draft
        self._outputs = outputs
        self._hooked: set[int] = set()  # the indices of the trace's hooks whose registration is written

    def through(self, source: Source, writes_done: Collection[int]) -> str:
        """Return the expression of the tensor through which gradients flow along an edge.

        ``source`` is the run-time tensor of the edge. ``writes_done`` are the indices of the write-backs that precede
        the segment that sends the gradient. If one of them has changed the history of the input, the expression is
        ``before_…``.
        """
        draft = self._draft
        match source.kind:
            case "input" if self.is_written(source, writes_done):
                return f"before_{source.index}"
            case "input" | "view":
                return draft.kept(source.index)
            case "output":
                return self._outputs.expression(source.index)
            case "cut":
                return f"cut_{source.index}"
            case "root":
                position = draft.trace.roots[source.index]
                if position < len(draft.trace.writes):
                    return draft.kept(draft.trace.writes[position].index)
                return draft.results[position]

    def is_written(self, source: Source, writes_done: Collection[int] | None = None) -> bool:
        """Tell whether a write-back or a change of metadata changes the history of the input ``source``.

        ``writes_done`` are the indices of the write-backs to consider; None means all of them.
        """
        trace, k = self._draft.trace, source.index
        base = trace.inputs.view_of.get(k)
        for n, write in enumerate(trace.writes):
            # Each write to a base that changes its version makes autograd regenerate the histories of its views.
            changes = (write.visible and write.index == k) or (write.index == base and write.moves_version)
            if changes and (writes_done is None or n in writes_done):
                return True
        # `write_metadata_changes` runs before the segments, and changes the history of a tensor that is not written.
        changes_early = not (trace.is_whole or any(write.visible and write.index == k for write in trace.writes))
        return changes_early and bool(self._draft.meta.input_info[k].metadata_steps)

    def as_it_is(self, source: Source) -> str:
        """Return the expression of the caller's tensor itself, with the history that it has after all writes so far."""
        return self._draft.kept(source.index) if source.kind in ("input", "view") else self.through(source, ())

    def keep_old_histories(self) -> None:
        """Write the lines ``before_… = pass_on(…)``, which store the history that an input has before it is written.

        Such a line is needed for an input to which a segment sends gradients although an earlier segment writes the
        input.
        """
        draft, trace = self._draft, self._draft.trace
        writes_done = set(range(len(trace.writes))) - set(trace.roots)  # these come before all segments
        for number, segment in enumerate(trace.segments):
            for exit_, connected in zip(trace.slots[number], trace.connected[number], strict=True):
                if exit_ is None or not connected:
                    continue
                source = trace.sources[exit_[0]]
                if source.kind == "input" and self.is_written(source, writes_done):
                    pass_on = draft.w.constant("pass_on", internals.pass_on)
                    draft.with_grad(f"before_{source.index} = {pass_on}({draft.kept(source.index)})")
            writes_done |= {n for n in range(len(trace.writes)) if n in [trace.roots[root] for root in segment.roots]}

    def register_hooks(self, *kinds: str) -> None:
        """Write the registration of hooks on the tensors that exist by now.

        ``kinds`` are the kinds of tensors (`Source.kind`) that exist at this point. Hooks on inputs are registered
        before the inputs are written, and hooks on other tensors as soon as the tensor exists.
        """
        draft, trace = self._draft, self._draft.trace
        for n, (source, function) in enumerate(trace.side_effects.hooks):
            if n in self._hooked or source.kind not in kinds:
                continue
            if source.kind == "cut" and f"cut_{source.index}" not in draft.cut_edges:
                continue
            if source.kind == "root" and trace.roots[source.index] not in draft.results:
                continue
            self._hooked.add(n)
            target = self.as_it_is(source)
            # Read `grad_fn` first: it makes autograd build the history of a view again after a write. torch before 2.15
            # crashes if a hook is registered before that.
            draft.w.add(f"{target}.grad_fn")
            draft.w.add(f"{target}.register_hook({draft.w.constant('hook', function)})")
