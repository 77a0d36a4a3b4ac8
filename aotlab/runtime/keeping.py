"""What is kept for the backward, and what it has to be told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.ir.metadata import OutputType
from aotlab.runtime.draft import Draft
from aotlab.runtime.edges import Edges
from aotlab.runtime.saved import SavedValues
from aotlab.trace.records import Source


def _lie_alike(value: Tensor, real: Tensor) -> bool:
    """Tell whether the elements of a value have the places among each other that those of a caller's tensor have."""
    places = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (value, real)]
    return value.dtype == real.dtype and value.shape == real.shape and places[0] == places[1] and value.numel() > 0


class Keeping:
    """Knows how the run-time function makes its `SavedValues`."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._watched = self._find_watched()
        self._views = draft.trace.written_views if draft.trace.training else {}

    def _detached(self) -> list[bool]:
        """Say which saved values are kept as detached aliases.

        An output is, lest it keep itself alive; so are inputs if the epilogue changes the sizes of some, since the
        backward needs them as they were.
        """
        reshapes = any(info.requires_grad_set is not None for info in self._draft.meta.input_info)
        return [s.is_returned or (s.is_input and reshapes) for s in self._draft.parts.partition.saved]

    def saved_values(self) -> Callable[..., SavedValues]:
        """Return what makes the `SavedValues` of a call, with the strides of those that are the caller's tensors."""
        saved, detached = self._draft.parts.split.graph_values, self._detached()
        values = {n: saved[n] for n in self._draft.parts.partition.own if not detached[n]}
        places = {n: v.stride() for n, v in values.items() if v is not None and v.layout == torch.strided}
        return partial(SavedValues, places=places) if places else SavedValues

    def expression(self) -> str:
        """Write the list of saved values."""
        count, detached = len(self._draft.trace.forward_outputs), self._detached()
        if not any(detached):
            return f"out[{count}:]"
        items = [f"out[{count + i}]{'.detach()' if apart else ''}" for i, apart in enumerate(detached)]
        return f"[{', '.join(items)}]"

    @property
    def settles(self) -> bool:
        """Whether the saved values have to be told that the epilogue's own writes are done.

        A saved input may share its version counter with a written one without sharing memory.
        """
        trace, saved = self._draft.trace, self._draft.parts.partition.saved
        moved = any(info.moves_version for info in self._draft.meta.input_info)
        changed = (bool(trace.writes) or moved) and any(s.is_input for s in saved)
        return trace.training and (changed or bool(self._watched) or bool(self._taken()))

    def remember(self) -> None:
        """Write that the saved values remember the versions that they have now."""
        if self.settles:
            for n, k in self._taken().items():
                self._draft.w.add(f"saved.keep({n}, {self._draft.kept(k)})")
            self._draft.w.add("saved.remember_versions()")

    def _taken(self) -> dict[int, int]:
        """Return which saved values are the new value of an input, that is then kept in their place.

        Of ``x.tanh_()`` eager keeps ``x``. A GPU's kernels are written for the alignment of the new value, which the
        caller's tensor need not have.
        """
        draft, found = self._draft, {}
        for write, final in zip(draft.trace.writes, draft.trace.forward_outputs, strict=False):
            real = draft.parts.call.values[draft.parts.dedupe.kept[write.index]]
            if draft.base_with(write.index) is None and real.device.type == "cpu" and _lie_alike(final, real):
                values = enumerate(draft.parts.split.graph_values)
                found.update({n: write.index for n, value in values if value is final})
        return found

    def watch(self, edges: Edges) -> None:
        """Write which tensors of the caller's the saved values have to watch besides."""
        for source, mask in self._watched.items():
            self._draft.w.add(f"saved.watch({edges.as_it_is(source)}, {mask})")
        if self._views:
            views = [edges.as_it_is(source) for source in self._views.values()]
            written = self._draft.w.constant("edges", tuple(self._views))
            self._draft.w.add(f"saved.note_views({', '.join([written, *views])})")

    def counted_together(self) -> set[int]:
        """Return the watched inputs whose versions move with another's: the node keeps one of them, whichever that is.

        In a call in which they do not move together a write to the others is no error.
        """
        values, kept = self._draft.parts.call.values, self._draft.parts.dedupe.kept
        watched = {source.index: values[kept[source.index]] for source in self._watched if source.kind == "input"}
        pairs = ((k, a, b) for k, a in watched.items() for j, b in watched.items() if k != j)
        return {k for k, a, b in pairs if a is b or internals.share_version(a, b)}

    def _find_watched(self) -> dict[Source, int]:
        """Return the inputs and outputs of which another write would go unnoticed.

        A saved value that is the caller's tensor, or shares its memory and version counter, notices itself.
        """
        trace = self._draft.trace
        saved = {internals.storage_key(value) for value in self._draft.parts.split.graph_values if value is not None}
        written = {write.index for write in trace.writes}
        found = {}
        bases: dict[int, int] = {}
        for source, mask in trace.saving.watch.items():
            if source.kind == "input":
                own = trace.inputs.fakes[source.index]
                noticed = source.index not in written and self._draft.base_with(source.index) is None
            elif (n := self._intermediate(source)) is not None:
                mask &= ~bases.get(n, 0)  # one of its views notices what is written to any
                bases[n] = bases.get(n, 0) | mask
                own, noticed = trace.forward_outputs[len(trace.writes) + len(trace.returned_outputs) + n], True
            elif not self._is_made(source):
                continue  # what it is made from is watched
            else:
                position = len(trace.writes) + trace.returned_outputs.index(source.index)
                own, noticed = trace.forward_outputs[position], True
            if mask and not (noticed and internals.storage_key(own) in saved):
                found[source] = mask
        return found

    def _intermediate(self, source: Source) -> int | None:
        """Return the number of the intermediate base that an output is made from; None if from something else."""
        info = None if source.kind == "input" else self._draft.meta.output_info[source.index]
        of_user = OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT
        return info.base_idx if info and info.aliases_intermediate and info.output_type is not of_user else None

    def _is_made(self, source: Source) -> bool:
        """Tell whether this is an input, or an output that is not made from another or from an input."""
        if source.kind == "input":
            return True
        same_as = self._draft.meta.output_info[source.index].same_as
        return same_as is None and source.index in self._draft.trace.returned_outputs
