"""What is kept for the backward, and what it has to be told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.guards import extent_bytes
from aotlab.ir.graphs import placeholders
from aotlab.ir.metadata import MetadataStep, OutputType
from aotlab.recorder import RunEagerly, replayed
from aotlab.stages.runtime.draft import Draft
from aotlab.stages.runtime.edges import Edges
from aotlab.stages.runtime.metadata import before_write
from aotlab.stages.runtime.saved import Part, Place
from aotlab.stages.trace.records import Source


def _count_together(a: Tensor, b: Tensor) -> bool:
    return a is b or internals.share_version(a, b)


def _lie_in_one(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and internals.storage_key(a) == internals.storage_key(b)


def _lie_alike(value: Tensor, real: Tensor) -> bool:
    """Tell whether the elements of a value have the places among each other that those of a caller's tensor have."""
    places = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (value, real)]
    return value.dtype == real.dtype and value.shape == real.shape and places[0] == places[1] and value.numel() > 0


def _is_inside(start: int, value: Tensor, whole: Tensor) -> bool:
    """Tell whether a value that begins at a byte of a storage lies in ``whole``, as elements that are not larger.

    Where the memory of the caller's ``whole`` begins, larger ones need not be aligned.
    """
    first = int(whole.storage_offset()) * whole.itemsize
    reaches = [extent_bytes(tuple(t.shape), tuple(t.stride()), t.itemsize) for t in (value, whole)]
    return first <= start and start + reaches[0] <= first + reaches[1] and value.itemsize <= whole.itemsize


def _is_same(saved: Tensor | None, value: Tensor) -> bool:
    """Tell whether a saved value is this one, or a view of it that shows all of it as it is."""
    if saved is None or saved is value:
        return saved is value
    places = [(internals.storage_key(t), t.storage_offset(), t.shape, t.stride(), t.dtype) for t in (saved, value)]
    return places[0] == places[1]


def _part_of(saved: Tensor, value: Tensor) -> Part | None:
    """Return which part of a saved value another is; None if it is not inside, or has two elements in one place."""
    if saved.dtype != value.dtype or internals.storage_key(saved) != internals.storage_key(value):
        return None
    reach = 1
    for step, n in sorted((step, n) for n, step in zip(value.shape, value.stride(), strict=True) if n > 1):
        if step < reach:
            return None
        reach += (n - 1) * step
    shift = int(value.storage_offset() - saved.storage_offset())
    whole = extent_bytes(tuple(saved.shape), tuple(saved.stride()), saved.itemsize) == saved.numel() * saved.itemsize
    inside = whole and value.numel() > 0 and shift >= 0 and shift + reach <= saved.numel()
    return (tuple(value.shape), tuple(value.stride()), shift) if inside else None


def _moved(real: Tensor, steps: Sequence[MetadataStep]) -> Tensor:
    """Return where an input lies after some steps."""
    return replayed(real, steps) if steps else real


class Keeping:
    """Knows how the run-time function makes its `SavedValues`."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._watched = self._find_watched()
        self._itself = self._find_kept_itself()
        self._views = draft.trace.written_views if draft.trace.training else {}

    def expression(self) -> str:
        """Write the list of saved values, and which of them are lent and loose.

        An output is saved detached, lest it keep itself alive; so is an input of which the epilogue changes the sizes,
        since the backward needs it as it was, and one of which the backward needs the memory that it had.
        """
        saved = self._draft.parts.partition.saved
        count = len(self._draft.trace.forward_outputs)
        values = zip(saved, self._draft.trace.saved_values, strict=True)
        detached = [s.is_returned or s.is_alias or (s.is_input and self._is_reshaped(value)) for s, value in values]
        lent, loose = self._draft.parts.partition.lent, self._draft.parts.partition.loose
        late = (f", {lent}" if lent else "") + (f", {loose}" if loose else "")
        if not any(detached):
            return f"out[{count}:]{late}"
        items = [f"out[{count + i}]{'.detach()' if apart else ''}" for i, apart in enumerate(detached)]
        return f"[{', '.join(items)}]{late}"

    @property
    def is_told(self) -> bool:
        """Whether the saved values have to be told anything after the call of the compiled forward."""
        return self.settles or (self._draft.trace.training and bool(self._itself or self._views))

    @property
    def settles(self) -> bool:
        """Whether the saved values have to be told that the epilogue's own writes are done.

        A saved input may share its version counter with a written one without sharing memory.
        """
        trace, meta = self._draft.trace, self._draft.meta
        changed = bool(trace.writes) or any(info.mutates_metadata or info.moves_version for info in meta.input_info)
        changed = changed and any(s.is_input for s in self._draft.parts.partition.saved)
        reshaped = any(info.is_changed or info.mutates_metadata for info in meta.input_info)
        lent = bool(self._draft.parts.partition.lent) and (bool(trace.writes) or reshaped)
        return trace.training and (changed or lent or bool(self._watched))

    def remember(self) -> None:
        """Write that the saved values remember the versions that they have now."""
        if self.settles:
            for line in self._takes():
                self._draft.w.add(line)
            self._draft.w.add("saved.remember_versions()")

    def _takes(self) -> list[str]:
        """Write which new values are kept as the tensors that they were copied into, if eager keeps those.

        Of ``x.tanh_()`` eager keeps ``x``; what is then done to ``x.data`` shows in its gradient. A GPU's kernels
        are written for the alignment of the new value, too, which the caller's tensor need not have.

        Raises
        ------
        RunEagerly
            A backward reads such a value as it is by then, and it cannot be kept so.
        """
        lent = self._draft.parts.partition.lent
        trace, meta, values = self._draft.trace, self._draft.meta, self._draft.parts.call.values
        tensors = [values[position] for position in self._draft.parts.dedupe.kept]
        found: dict[int, str] = {}
        for write, final in zip(trace.writes, trace.forward_outputs, strict=False):
            info, real, base = meta.input_info[write.index], tensors[write.index], self._draft.base_with(write.index)
            together = [write.index] if base is None else base.members
            kept = [k for k in together if self._watched.get(Source("input", k)) and _lie_in_one(tensors[k], real)]
            # what is kept notices a write that counts for it: the tensor's own, not that of an alias by itself
            counted = not kept or any(_count_together(tensors[k], real) for k in kept)
            written = _moved(real, before_write(info))
            wholes = {k: written if k == write.index else tensors[k] for k in ([write.index] if counted else []) + kept}
            plain = not (info.given or info.mutates_storage_metadata) and real.device.type == "cpu"
            fits = plain and _lie_alike(final, written)
            for n, value in enumerate(trace.saved_values):
                if value is None or n in found or not ((kept and fits) or n in lent):
                    continue
                if not value.numel() or internals.storage_key(value) != internals.storage_key(final):
                    continue
                # where the value lies in the caller's memory, in which what is written has its place among the others
                start = int(written.storage_offset() - final.storage_offset()) * final.itemsize
                start += int(value.storage_offset()) * value.itemsize
                keeper = next((k for k, whole in wholes.items() if _is_inside(start, value, whole)), None)
                if n in lent and (keeper is None or not fits):
                    raise RunEagerly(f"a backward reads `{info.name}` as it is by then, and the function writes it")
                if keeper is not None:
                    then = _moved(tensors[keeper], meta.input_info[keeper].metadata_steps)
                    shift = (start - then.storage_offset() * then.itemsize) // value.itemsize
                    dtype = "" if value.dtype == final.dtype else f", {value.dtype}"
                    place = f"{tuple(value.shape)}, {tuple(value.stride())}, {shift}{dtype}"
                    found[n] = f"saved.keep_in({n}, {self._draft.kept(keeper)}, {place})"
                    if n in lent and (origin := self._origin(keeper)) is not None:
                        found[n] += f"; saved.stands_for({n}, {self._draft.kept(origin)})"
        return [*found.values(), *self._names_detached()]

    def _origin(self, k: int) -> int | None:
        """Return which input a backward reads late in the memory of the ``k``-th, if that is one itself, and no view.

        Given other memory, it is then what the backward reads; a view keeps the memory that it had.

        Raises
        ------
        RunEagerly
            It reads several of them, of which one saved value cannot tell.
        """
        trace, fakes = self._draft.trace, self._draft.trace.input_fakes
        places = {j: internals.storage_key(fakes[j]) for j in {k, *trace.read_late_themselves}}
        read = [j for j in trace.read_late_themselves if places[j] == places[k]]
        if len(read) + (k in trace.read_late_by_aliases) > 1:
            name = self._draft.meta.input_info[k].name
            raise RunEagerly(f"a backward reads `{name}` and a view of it as they are by then, and it is changed")
        return read[0] if read else None

    def _is_reshaped(self, value: Tensor | None) -> bool:
        """Tell whether a value may lie in an input of which the epilogue changes the sizes or the history."""
        trace, infos = self._draft.trace, self._draft.meta.input_info
        changed = [info.index for info in infos if info.is_changed or info.mutates_metadata]
        if value is None or any(self._draft.base_with(k) is not None for k in changed):
            return bool(changed)
        written = zip(trace.writes, trace.forward_outputs, strict=False)
        fakes = [trace.input_fakes[k] for k in changed] + [final for write, final in written if write.index in changed]
        return internals.storage_key(value) in {internals.storage_key(f) for f in fakes if f.layout == torch.strided}

    def _names_detached(self) -> Iterator[str]:
        """Write which inputs lent values stand for that are saved detached."""
        partition, meta, values = self._draft.parts.partition, self._draft.meta, self._draft.trace.saved_values
        if any(info.is_changed or info.mutates_metadata for info in meta.input_info):
            fakes = enumerate(self._draft.trace.input_fakes)
            places = {internals.storage_key(fake): k for k, fake in fakes if fake.layout == torch.strided}
            for n in partition.lent:
                value = values[n]
                k = None if value is None else places.get(internals.storage_key(value))
                if not (partition.saved[n].is_input and k is not None and self._is_reshaped(value)):
                    continue
                if (origin := self._origin(k)) is not None:
                    yield f"saved.stands_for({n}, {self._draft.kept(origin)})"

    def watch(self, edges: Edges) -> None:
        """Write which tensors of the caller's the saved values have to watch besides."""
        for source, mask in self._watched.items():
            self._draft.w.add(f"saved.watch({edges.as_it_is(source)}, {mask})")
        for source, settings in self._itself.items():
            self._draft.w.add(f"saved.watch_itself({edges.as_it_is(source)}, {settings})")
        if self._views:
            written = self._draft.w.constant("edges", tuple(self._views))
            views = ", ".join(edges.as_it_is(source) for source in self._views.values())
            self._draft.w.add(f"saved.note_views({written}, {views})")

    def counted_together(self) -> set[int]:
        """Return the watched inputs whose versions move with another's: the node keeps one of them, whichever that is.

        In a call in which they do not move together a write to the others is no error.
        """
        values, kept = self._draft.parts.call.values, self._draft.parts.dedupe.kept
        watched = [source.index for source in self._watched if source.kind == "input"]
        return {k for k in watched for j in watched if k != j and _count_together(values[kept[k]], values[kept[j]])}

    def _find_watched(self) -> dict[Source, int]:
        """Return the inputs and outputs of which another write would go unnoticed.

        A saved value that is the caller's tensor, or shares its memory and version counter, notices itself.
        """
        trace = self._draft.trace
        if not trace.watch:
            return {}
        lent = self._draft.parts.partition.lent
        own_saved = [value for n, value in enumerate(trace.saved_values) if value is not None and n not in lent]
        saved = {internals.storage_key(value) for value in own_saved}
        written = {write.index for write in trace.writes}
        found = {}
        bases: dict[int, int] = {}
        for source, mask in trace.watch.items():
            if source.kind == "input":
                own = trace.input_fakes[source.index]
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
            if not mask:
                continue
            if not (noticed and internals.storage_key(own) in saved):
                found[source] = mask
            elif source in trace.unread:  # nor is it among what a backward takes that goes by those nodes alone
                found[source] = trace.unread[source]
        return found

    def _find_kept_itself(self) -> dict[Source, str]:
        """Return the inputs and outputs that nodes keep themselves, and the further arguments of `watch_itself`.

        An input that is saved as it is needs to be watched only if it may be detached.
        """
        trace, partition = self._draft.trace, self._draft.parts.partition
        places = {internals.storage_key(value) for value in trace.saved_values if value is not None}
        found = {}
        for source, kept in trace.kept_itself.items():
            info = self._draft.meta.output_info[source.index] if source.kind == "output" else None
            if info is not None and (info.same_as is not None or info.views == ()):
                continue  # another one is this very tensor
            value = None if self._shows_a_write_to_another(source) else trace.value_of(source)
            given = f", {kept.given}, {kept.later}" if kept.asking & kept.given else ""
            if value is None:  # a view, of which it is not known where it lies in what is saved
                found[source] = f"{kept.asking}, {kept.nodes}, (){given}"
                continue
            reshaped = self._is_reshaped(value)
            saved = zip(trace.saved_values, partition.saved, strict=True)
            slots = [n for n, (each, record) in enumerate(saved) if _is_same(each, value) and not record.is_alias]
            own = any(n in partition.own for n in slots) and not reshaped
            # what the graph overwrites is kept as a clone, of whatever input
            may_be_kept = internals.storage_key(value) in places or None in trace.saved_values
            nodes = kept.nodes if may_be_kept and not own else 0
            sure = bool(slots) and not reshaped and (kept.alone or self._are_told_apart(slots[0]))
            if kept.twice and not self._has_alias(value):
                sure = False  # the alias is made again in the backward, by the node that keeps the tensor too
            lies: list[Place] = [(slots[0], None)] if nodes and sure else []
            if nodes and kept.alone and not (reshaped or kept.twice):
                lies += [(n, part) for n, part in self._parts_of(value) if n not in slots]
            if kept.asking or nodes:
                found[source] = f"{kept.asking}, {nodes}, {tuple(lies)}{given}"
        return found

    def _shows_a_write_to_another(self, source: Source) -> bool:
        """Tell whether an input is as another one that shares its memory was written."""
        base = self._draft.base_with(source.index) if source.kind == "input" else None
        written = {write.index for write in self._draft.trace.writes}
        return base is not None and source.index not in written and not written.isdisjoint(base.members)

    def _parts_of(self, value: Tensor) -> Iterator[tuple[int, Part]]:
        """Find the saved values that a value is a view of, and which part of each."""
        saved = zip(self._draft.trace.saved_values, self._draft.parts.partition.saved, strict=True)
        for n, (each, record) in enumerate(saved):
            if each is not None and not record.is_alias and (part := _part_of(each, value)):
                yield n, part

    def _has_alias(self, value: Tensor) -> bool:
        """Tell whether a value is saved as an alias, too."""
        saved = zip(self._draft.trace.saved_values, self._draft.parts.partition.saved, strict=True)
        return any(each is value and record.is_alias for each, record in saved)

    def _are_told_apart(self, n: int) -> bool:
        """Tell whether it is known of all uses of a saved value for which autograd node they are."""
        backward = self._draft.parts.partition.backward
        users = [] if backward is None else placeholders(backward.graph)[n].users
        return all("seq_nr" in user.meta for user in users if user.op == "call_function")

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
