"""What is kept for the backward, and what it has to be told."""

from __future__ import annotations

from aotlab import torch_internals as internals
from aotlab.ir.graphs import output_args
from aotlab.stages.runtime.draft import Draft
from aotlab.stages.runtime.edges import Edges
from aotlab.stages.trace.records import Source


class Keeping:
    """Knows how the run-time function makes its `SavedValues`."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._watched = self._find_watched()

    def expression(self) -> str:
        """Write the list of saved values.

        An output is saved detached, lest it keep itself alive; so is an input where the epilogue changes the sizes of
        inputs, since the backward needs it as it was.
        """
        saved = self._draft.parts.partition.saved
        count = len(self._draft.trace.forward_outputs)
        reshaped = any(info.is_changed or info.mutates_metadata for info in self._draft.meta.input_info)
        detached = [s.is_returned or (reshaped and s.is_input) for s in saved]
        if not any(detached):
            return f"out[{count}:]"
        items = [f"out[{count + i}]{'.detach()' if apart else ''}" for i, apart in enumerate(detached)]
        return f"[{', '.join(items)}]"

    @property
    def settles(self) -> bool:
        """Whether the saved values have to be told that the epilogue's own writes are done.

        A saved input may share its version counter with a written one without sharing memory.
        """
        trace, meta = self._draft.trace, self._draft.meta
        changed = bool(trace.writes) or any(info.mutates_metadata for info in meta.input_info)
        changed = changed and any(s.is_input for s in self._draft.parts.partition.saved)
        return trace.training and (changed or bool(self._watched))

    def remember(self) -> None:
        """Write that the saved values remember the versions that they have now."""
        for n, k in self._kept_in_inputs():
            self._draft.w.add(f"saved.keep_in({n}, {self._draft.kept(k)})")
        if self.settles:
            self._draft.w.add("saved.remember_versions()")

    def watch(self, edges: Edges) -> None:
        """Write which tensors of the caller's the saved values have to watch besides."""
        for source, mask in self._watched.items():
            self._draft.w.add(f"saved.watch({edges.as_it_is(source)}, {mask})")

    def _kept_in_inputs(self) -> list[tuple[int, int]]:
        """Return which saved values are the new values of inputs that eager keeps: (saved value, input).

        Of ``x.tanh_()`` eager keeps ``x`` itself; what is then done to ``x.data`` shows in its gradient.
        """
        draft, trace = self._draft, self._draft.trace
        count = len(trace.forward_outputs)
        returned = output_args(draft.parts.partition.forward.graph)
        found = []
        for source in self._watched:
            at = next(
                (n for n, w in enumerate(trace.writes) if (source.kind, w.index) == ("input", source.index)), None
            )
            if at is None or not trace.writes[at].counts or draft.base_with(source.index) is not None:
                continue
            info, own = draft.meta.input_info[source.index], trace.input_fakes[source.index]
            like = trace.forward_outputs[at]
            # the backward was written for the layout of the new value; a GPU's kernels for its alignment as well
            fits = (like.shape, like.stride(), like.dtype) == (own.shape, own.stride(), own.dtype)
            plain = not (info.is_changed or info.mutates_metadata or info.given) and own.device.type == "cpu"
            if fits and plain:
                found += [(n, source.index) for n, node in enumerate(returned[count:]) if node is returned[at]]
        return found

    def _find_watched(self) -> dict[Source, int]:
        """Return the inputs and outputs of which another write would go unnoticed.

        A saved value that is the caller's tensor, or shares its memory and version counter, notices itself.
        """
        trace, meta = self._draft.trace, self._draft.meta
        if not trace.watch:
            return {}
        count = len(trace.forward_outputs)
        returned = output_args(self._draft.parts.partition.forward.graph)
        saved = {internals.storage_key(node.meta["val"]) for node in returned[count:] if node is not None}
        written = {write.index for write in trace.writes}
        found = {}
        for source, mask in trace.watch.items():
            if source.kind == "input":
                own = trace.input_fakes[source.index]
                noticed = source.index not in written and self._draft.base_with(source.index) is None
            else:
                info = meta.output_info[source.index]
                if info.same_as is not None or source.index not in trace.returned_outputs:
                    continue  # what it is made from is watched
                position = len(trace.writes) + trace.returned_outputs.index(source.index)
                own, noticed = trace.forward_outputs[position], True
            if not (noticed and internals.storage_key(own) in saved):
                found[source] = mask
        return found
