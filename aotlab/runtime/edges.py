"""What the caller's tensors are called where a gradient of the traced graph arrives, and the hooks on them."""

from __future__ import annotations

from collections.abc import Collection

from aotlab import _torch as internals
from aotlab.runtime.draft import Draft
from aotlab.runtime.outputs import Outputs
from aotlab.trace.records import Source


class Edges:
    """Names what stands for the traced graph's edges; histories from before a write were kept under their own names."""

    def __init__(self, draft: Draft, outputs: Outputs) -> None:
        self._draft = draft
        self._outputs = outputs
        self._hooked: set[int] = set()  # which of the trace's hooks are registered

    def through(self, source: Source, done: Collection[int]) -> str:
        """Return the expression of what stands for an edge once the writes ``done`` are made."""
        draft = self._draft
        match source.kind:
            case "input" if self.is_written(source, done):
                return f"before_{source.index}"
            case "input":
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

    def is_written(self, source: Source, done: Collection[int] | None = None) -> bool:
        """Tell whether one of the visible writes ``done``, or any, gives the tensor another history."""
        writes = self._draft.trace.writes
        chosen = writes if done is None else [writes[n] for n in done]
        return any(write.visible and write.index == source.index for write in chosen)

    def as_it_is(self, source: Source) -> str:
        """Return the expression of what stands for an edge, whatever was done to it since."""
        return self._draft.kept(source.index) if source.kind == "input" else self.through(source, ())

    def keep_old_histories(self) -> None:
        """Write what keeps the history that an input has before a segment's write, for the segments after it."""
        draft, trace = self._draft, self._draft.trace
        done: set[int] = set()
        for number, part in enumerate(trace.segments):
            for way, connected in zip(trace.slots[number], trace.connected[number], strict=True):
                if way is None or not connected:
                    continue
                source = trace.sources[way[0]]
                if source.kind == "input" and self.is_written(source, done):
                    keep = draft.w.constant("pass_on", internals.pass_on)
                    draft.with_grad(f"before_{source.index} = {keep}({draft.kept(source.index)})")
            done |= {n for n in range(len(trace.writes)) if n in [trace.roots[root] for root in part.roots]}

    def register_hooks(self, *kinds: str) -> None:
        """Write what registers hooks on what is there: inputs before they are written, the others as they come."""
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
            # a view whose history is to be made anew has to be looked at first: torch before 2.15 crashes where it is
            # given a hook
            draft.w.add(f"{target}.grad_fn")
            draft.w.add(f"{target}.register_hook({draft.w.constant('hook', function)})")
