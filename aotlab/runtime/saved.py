"""The values that a compiled forward saves, kept as autograd keeps its own."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, NoReturn

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.errors import MetadataMutationError
from aotlab.ir.metadata import OutputType
from aotlab.ir.specs import spec_of
from aotlab.runtime.draft import Draft
from aotlab.runtime.edges import Edges
from aotlab.trace.history import LASTING
from aotlab.trace.records import Source

#: The default of ``places``: no saved value is a tensor of the caller's own.
_NOWHERE: Mapping[int, tuple[int, ...] | None] = {}


class _Keeps(torch.autograd.Function):
    """Saves one tensor and asks for it in its backward: what autograd has to say about it, it then says itself."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return leaf.clone()

    @staticmethod
    @internals.unseen_by_dynamo
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        return gradient, None


def _keep(kept: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = torch.ones((), requires_grad=True)
        return leaf, _Keeps.apply(leaf, kept)  # type: ignore[no-untyped-call]  # untyped in torch


def _raise_for_written_value(value: Tensor, version: int, is_at: int) -> NoReturn:
    node = value.grad_fn  # of a view it is made anew, which may be an error of its own, here as in eager
    # autograd names type, sizes and versions; a stand-in of one element has them all
    with torch.enable_grad():
        one = torch.empty((), dtype=value.dtype, device=value.device, requires_grad=node is not None)
        stand_in = one.expand(value.shape)
    internals.set_version(stand_in, version)
    leaf, out = _keep(stand_in)
    internals.set_version(stand_in, is_at)
    try:
        torch.autograd.grad(out, leaf)
    except RuntimeError as error:
        if node is not None:  # torch 2.11 writes `MulBackward0`, later ones `Mul`
            name = node.name() if "Backward0, is at version" in str(error) else re.sub(r"Backward\d*$", "", node.name())
            named = f"which is output {value.output_nr} of {name}, is at version"
            error.args = (re.sub(r"which is output \d+ of [^,]+, is at version", named, str(error)), *error.args[1:])
        raise
    raise RuntimeError(f"a value saved for the backward was written: version {is_at}, saved at version {version}")


class SavedValues:
    """The values that one call's forward saved, kept as autograd keeps its own.

    They go through the innermost ``saved_tensors_hooks`` (``hooked``: there are some); their versions are checked when
    they are used; they are let go after a backward unless the graph is kept. ``released`` has a bit for each autograd
    node of the traced program that is used up: a second backward that reaches one of those fails as in eager, another
    goes through. What a custom function's node keeps as an attribute is never used up.

    ``pending`` are gradients that wait for the backward into whose midst they belong. By edges of the traced program,
    ``nodes`` are the autograd nodes behind results that the function's own nodes keep. ``places`` has the numbers of
    those values that are the caller's tensors themselves, with the strides that the backward was compiled for, None if
    for any: other memory since is an error. ``sizes`` are those that vary, which every backward takes. ``once`` has the
    bits of the nodes of each selective checkpoint: what it keeps serves one backward, also if the graph is kept.
    ``live`` are the caller's tensors that a backward takes as they are by then, and writes.
    """

    __slots__ = ("_hooks", "_looks", "_places", "_spent", "_values", "_versions", "_watched", "hooked",
                 "live", "nodes", "once", "pending", "released", "sizes")  # fmt: skip

    def __init__(
        self,
        values: Sequence[Tensor],
        places: Mapping[int, tuple[int, ...] | None] = _NOWHERE,
        sizes: Sequence[int] = (),
        live: Sequence[Tensor] = (),
        once: Sequence[int] = (),
    ) -> None:
        hooks = internals.saved_tensor_hooks()
        self.released = self._spent = 0
        self.once = once
        self.sizes = sizes
        self.live = live
        self._looks = [spec_of(tensor) for tensor in live]
        self.hooked = hooks is not None
        self.pending: dict[tuple[int, int], dict[Any, Tensor]] | None = None
        self.nodes: dict[Any, tuple[weakref.ref[Any], int]] | None = None
        self._watched: list[tuple[Tensor, int, int]] = []
        self._hooks = hooks
        for value in values:
            if value.is_inference():
                _keep(value)  # which autograd refuses
        self._versions = internals.versions_of(values)
        self._places = [
            (n, values[n].stride() if stride is None else stride, internals.address_of(values[n]))
            for n, stride in places.items()
        ]
        self._values: list[Any] | None = list(values)
        if hooks is not None:
            with torch.no_grad():
                self._values = [hooks[0](value) for value in values]

    def watch(self, tensor: Tensor, mask: int) -> None:
        """Let a later write to ``tensor`` be an error for the nodes in ``mask``, which keep it in eager."""
        if self._hooks is None:  # what hooks have packed may be something else
            alias = tensor.detach()  # without a history, which would lead back to here
            self._watched.append((alias, internals.version_of(alias), mask))

    def noting(self, edges: Sequence[Any]) -> Callable[[Any], None]:
        """Return what notes the autograd node behind the results at some edges; no strong reference leads back."""

        def note(node: Any) -> None:
            if self.nodes is None:
                self.nodes = {}
            self.nodes.update((edge, (weakref.ref(node), place)) for place, edge in enumerate(edges))

        return note

    def kept_result(self, edge: Any) -> Tensor | None:
        """Return the result at an edge that the function's own node keeps, behind the node that was put there."""
        reference, place = (self.nodes or {}).get(edge, (None, 0))
        node = None if reference is None else reference()
        return None if node is None else internals.outputs_saved_by(node)[place]

    def keep(self, n: int, tensor: Tensor) -> None:
        """Keep the caller's ``tensor`` in place of the ``n``-th value, which has been copied there."""
        if self._values is not None and self._hooks is None:
            self._values[n] = tensor.detach()

    def remember_versions(self) -> None:
        """Take the versions after the epilogue's own writes, which count for all that shares their target's counter."""
        if self._values is not None and self._hooks is None:
            self._versions = internals.versions_of(self._values)

    def use(self, mask: int, needs: Sequence[int]) -> list[Tensor]:
        """Return the values that a backward needs which reaches the nodes in ``mask``.

        Raises autograd's errors if the graph has been freed or a value was written; `MetadataMutationError` if one of
        the caller's tensors was given other memory or sizes.
        """
        if self.released & mask or (needs and self._values is None):
            leaf, out = _keep(torch.ones(()))
            for _ in range(2):
                torch.autograd.grad(out, leaf)  # the second one raises as eager's would
        if self._spent & mask:
            raise RuntimeError(internals.SPENT_CACHE)
        for tensor, version, own in self._watched:
            if own & mask and internals.version_of(tensor) != version:
                _raise_for_written_value(tensor, version, internals.version_of(tensor))
        self._check_memory(bool(self.live) and self._looks != [spec_of(tensor) for tensor in self.live])
        if self._values is None:
            return []
        if self._hooks is not None:
            return [self._hooks[1](self._values[n]) for n in needs]
        now = internals.versions_of(self._values)
        if now != self._versions:
            for n in needs:
                if now[n] != self._versions[n]:
                    _raise_for_written_value(self._values[n], self._versions[n], now[n])
        for n, stride, start in self._places:
            is_other = internals.address_of(self._values[n]) != start or self._values[n].stride() != stride
            self._check_memory(is_other and n in needs)
        return [self._values[n] for n in needs]

    def _check_memory(self, is_other: bool) -> None:
        if is_other:
            raise MetadataMutationError(
                "a tensor that was saved for the backward was given other sizes or other memory after the call",
                why="the backward would compute with what is there now, and was compiled for the sizes before",
                suggestion="run the backward first, or call the original function",
            )

    def tensors(self) -> list[Tensor]:
        """Return the values, as far as they are there and not packed."""
        return [] if self._values is None or self._hooks is not None else self._values

    def put_pending(self, backwards: int, edge: Any, gradient: Tensor) -> None:
        """Keep a gradient for some backwards of the backward that is being run; at one edge they are summed."""
        if self.pending is None:
            self.pending = {}
        waiting = self.pending.setdefault((backwards, internals.current_graph_task()), {})
        waiting[edge] = waiting[edge] + gradient if edge in waiting else gradient

    def take_pending(self, backwards: int) -> dict[Any, Tensor]:
        """Hand out what waits for some backwards."""
        if self.pending is None:
            return {}
        found = self.pending.pop((backwards, internals.current_graph_task()), {})
        if not self.pending:
            self.pending = None
        return found

    def release(self, mask: int, all_masks: Sequence[int]) -> None:
        """Note that a backward over ``mask`` has its values, and let go of what no other backward may still use."""
        if internals.keeps_graph():
            self._spent |= reduce(or_, (own for own in self.once if own & mask), 0)
            return
        self.released |= mask & ~LASTING
        if not any(m & ~self.released for m in all_masks):
            self._values = None if any(all_masks) else self._values
            self._watched = []


def restride(tangent: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Copy a tangent into the strides that the backward was traced with."""
    dense = tangent.to_dense() if tangent.layout != torch.strided else tangent
    return dense.new_empty_strided(dense.shape, stride).copy_(dense)  # a wrapper if that is one


class Keeping:
    """Knows how the run-time function makes its `SavedValues`."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._watched = self._find_watched()

    def _detached(self) -> list[bool]:
        """Say which saved values are kept as detached aliases.

        An output is, lest it keep itself alive; so are inputs if the epilogue changes the sizes of some, since the
        backward needs them as they were.
        """
        reshapes = any(info.mutates_metadata for info in self._draft.meta.input_info)
        return [s.is_returned or (s.is_input and reshapes) for s in self._draft.parts.partition.saved]

    def saved_values(self) -> Callable[..., SavedValues]:
        """Return what makes the `SavedValues` of a call, with the strides of those that are the caller's tensors."""
        saved, detached = self._draft.parts.split.graph_values, self._detached()
        values = {n: saved[n] for n in self._draft.parts.partition.own if not detached[n]}
        strided = {n: v for n, v in values.items() if v is not None and v.layout == torch.strided}
        places = {n: None if internals.is_symbolic(v) else v.stride() for n, v in strided.items()}
        once = self._draft.trace.saving.once
        return partial(SavedValues, places=places, once=once) if places or once else SavedValues

    def expression(self) -> str:
        """Write the list of saved values."""
        count, detached = len(self._draft.trace.forward_outputs), self._detached()
        if not any(detached):
            return f"results[{count}:]"
        items = [f"results[{count + i}]{'.detach()' if apart else ''}" for i, apart in enumerate(detached)]
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
        """Return which saved values are the new value of an input, which is then kept instead.

        Of ``x.tanh_()`` eager keeps ``x``. A GPU's kernels are written for the alignment of the new value, which the
        caller's tensor need not have.
        """
        draft, trace, found = self._draft, self._draft.trace, {}
        for write, final in zip(trace.writes, trace.forward_outputs, strict=False):
            real = draft.parts.call.values[draft.parts.dedupe.kept[write.index]]
            moved = draft.meta.input_info[write.index].mutates_metadata
            if (
                not moved
                and draft.base_with(write.index) is None
                and real.device.type == "cpu"
                and _lie_alike(final, trace.inputs.fakes[write.index])
            ):
                values = enumerate(draft.parts.split.graph_values)
                found.update({n: write.index for n, value in values if value is final})
        return found

    def watch(self, edges: Edges) -> None:
        """Write which tensors of the caller's the saved values have to watch besides."""
        for source, mask in self._watched.items():
            self._draft.w.add(f"saved.watch({edges.as_it_is(source)}, {mask})")

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


def _lie_alike(value: Tensor, given: Tensor) -> bool:
    """Tell whether the elements of a value have the places among each other that those of an input have."""
    places = [[s for n, s in zip(t.shape, t.stride(), strict=True) if n > 1] for t in (value, given)]
    return value.dtype == given.dtype and value.shape == given.shape and places[0] == places[1] and value.numel() > 0
