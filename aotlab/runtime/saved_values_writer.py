"""Write the lines that create the `SavedValues` of a call and keep them up to date."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.ir.metadata import OutputType
from aotlab.runtime.draft import Draft
from aotlab.runtime.edge_tensors import Edges
from aotlab.runtime.saved_values import SavedValues
from aotlab.trace.records import Source


class SavedValuesWriter:
    """Writes the lines that create the `SavedValues` of a call and keep them up to date.

    It also decides which tensors of the caller are *watched*. Eager saves these inputs and outputs for the backward. If
    the caller writes one of them after the call, the backward must raise, as in eager. But the checks of our saved
    values would not find the write, for example because the forward saved a clone. So the generated function passes
    watched tensors to `SavedValues.watch`.
    """

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._eager_masks: dict[int, int] = {}  # see `SavedValues`
        self._watched = self._find_watched()

    def _detached(self) -> list[bool]:
        """Return for each saved value whether `SavedValues` holds a detached alias in its place.

        An output is detached, because an output that its own autograd node holds would never be freed. An input is
        detached if the epilogue changes the metadata of any input, because the backward needs the old sizes.
        """
        reshapes = any(info.mutates_metadata for info in self._draft.meta.input_info)
        return [s.is_returned or (s.is_input and reshapes) for s in self._draft.parts.partition.saved]

    def saved_values(self) -> Callable[..., SavedValues]:
        """Return a callable that creates the `SavedValues` of a call.

        The callable is a partial of the class with the arguments that are the same in each call.
        """
        saved, detached = self._draft.parts.split.graph_values, self._detached()
        values = {n: saved[n] for n in self._draft.parts.partition.saved_inputs if not detached[n]}
        strided = {n: v for n, v in values.items() if v is not None and v.layout == torch.strided}
        places = {n: None if internals.is_symbolic(v) else v.stride() for n, v in strided.items()}
        once = self._draft.trace.saving.once
        return partial(SavedValues, places=places, once=once, eager_masks=self._eager_masks)

    def expression(self) -> str:
        """Return the expression of the list of saved values."""
        count, detached = len(self._draft.trace.forward_outputs), self._detached()
        if not any(detached):
            return f"results[{count}:]"
        items = [f"results[{count + i}]{'.detach()' if is_detached else ''}" for i, is_detached in enumerate(detached)]
        return f"[{', '.join(items)}]"

    @property
    def must_remember_versions(self) -> bool:
        """Whether the function must call `SavedValues.remember_versions` after the epilogue's writes.

        A saved input may share its version counter with a written input, even if they share no memory.
        """
        trace, saved = self._draft.trace, self._draft.parts.partition.saved
        moved = any(info.moves_version for info in self._draft.meta.input_info)
        changed = (bool(trace.writes) or moved) and any(s.is_input for s in saved)
        return trace.training and (changed or bool(self._watched) or bool(self._values_in_inputs()))

    def remember(self) -> None:
        """Write the lines that make `SavedValues` store the present version counters, if that is needed."""
        if self.must_remember_versions:
            for n, k in self._values_in_inputs().items():
                self._draft.w.add(f"saved.keep({n}, {self._draft.kept(k)})")
            self._draft.w.add("saved.remember_versions()")

    def _values_in_inputs(self) -> dict[int, int]:
        """Map each saved value that is the new value of a mutated input to the index of this kept input.

        The input is then saved in place of the value: for ``x.tanh_()``, eager saves ``x`` itself. This is done only on
        the CPU. A GPU kernel is compiled for the alignment of the new value, and the caller's tensor may be aligned
        differently.
        """
        draft, trace, input_of_value = self._draft, self._draft.trace, {}
        for write, new_value in zip(trace.writes, trace.forward_outputs, strict=False):
            argument = draft.parts.call.values[draft.parts.dedupe.kept[write.index]]
            moved = draft.meta.input_info[write.index].mutates_metadata
            if (
                not moved
                and draft.base_with(write.index) is None
                and argument.device.type == "cpu"
                and _have_same_layout(new_value, trace.inputs.fakes[write.index])
            ):
                values = enumerate(draft.parts.split.graph_values)
                input_of_value.update({n: write.index for n, value in values if value is new_value})
        return input_of_value

    def watch(self, edges: Edges) -> None:
        """Write calls of `SavedValues.watch` for the watched tensors (see the class)."""
        for source, mask in self._watched.items():
            self._draft.w.add(f"saved.watch({edges.as_it_is(source)}, {mask})")

    def counted_together(self) -> set[int]:
        """Return the watched inputs that share a version counter with another watched input.

        The traced autograd node saves only one of the inputs that share a counter, and the trace cannot find out which
        one. In a call whose inputs do not share a counter, a write to the other inputs is no error in eager. So the
        prologue guards that the inputs share a counter.
        """
        values, kept = self._draft.parts.call.values, self._draft.parts.dedupe.kept
        watched = {source.index: values[kept[source.index]] for source in self._watched if source.kind == "input"}
        pairs = ((k, a, b) for k, a in watched.items() for j, b in watched.items() if k != j)
        return {k for k, a, b in pairs if a is b or internals.share_version(a, b)}

    def _find_watched(self) -> dict[Source, int]:
        """Return the watched inputs and outputs, each with the mask of the autograd nodes that save it in eager.

        A tensor need not be watched if one of our saved values is this tensor, or shares its memory and its version
        counter. Then the check of the saved value finds the write, with the mask in ``_eager_masks``.
        """
        trace = self._draft.trace
        values = enumerate(self._draft.parts.split.graph_values)
        saved = {internals.storage_key(value): n for n, value in values if value is not None}
        mutated = {write.index for write in trace.writes}
        masks = {}
        bases: dict[int, int] = {}
        for source, mask in trace.saving.watch.items():
            if source.kind == "input":
                fake = trace.inputs.fakes[source.index]
                is_noticed = source.index not in mutated and self._draft.base_with(source.index) is None
            elif (n := self._intermediate(source)) is not None:
                mask &= ~bases.get(n, 0)  # all views of a base share its version counter: watch one
                bases[n] = bases.get(n, 0) | mask
                fake, is_noticed = trace.forward_outputs[len(trace.writes) + len(trace.returned_outputs) + n], True
            elif not self._has_own_tensor(source):
                continue  # this output is made from another tensor, and that tensor is watched
            else:
                n = len(trace.writes) + trace.returned_outputs.index(source.index)
                fake, is_noticed = trace.forward_outputs[n], True
            position = saved.get(internals.storage_key(fake)) if is_noticed else None
            if position is not None:
                self._eager_masks[position] = self._eager_masks.get(position, 0) | mask
            elif mask:
                masks[source] = mask
        return masks

    def _intermediate(self, source: Source) -> int | None:
        """Return the index of the intermediate base of an output.

        The result is None if ``source`` is an input, or an output that is not a view of an intermediate base.
        """
        info = None if source.kind == "input" else self._draft.meta.output_info[source.index]
        of_user = OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT
        return info.base_idx if info and info.aliases_intermediate and info.output_type is not of_user else None

    def _has_own_tensor(self, source: Source) -> bool:
        """Tell whether ``source`` is an input, or an output that the graph returns (not a regenerated alias)."""
        if source.kind == "input":
            return True
        same_as = self._draft.meta.output_info[source.index].same_as
        return same_as is None and source.index in self._draft.trace.returned_outputs


def _have_same_layout(value: Tensor, other: Tensor) -> bool:
    """Tell whether a value and an input have equal dtype, shape and strides, and at least one element."""
    strides = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (value, other)]
    return value.dtype == other.dtype and value.shape == other.shape and strides[0] == strides[1] and value.numel() > 0
