"""The values that a compiled forward saves, kept as autograd keeps its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from aotlab import torch_internals as internals
from aotlab.analysis.history import LASTING
from aotlab.analysis.kept_values import with_node
from aotlab.errors import MetadataMutationError

#: Shape, strides and dtype.
Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]

#: Shape and strides of a part of a saved value, and how many elements after the first of that it begins.
Part = tuple[tuple[int, ...], tuple[int, ...], int]

#: The number of a saved value, and where in it a tensor is; None if it is the whole.
Place = tuple[int, Part | None]


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


def _raise_for_inference_tensor(value: Tensor) -> NoReturn:
    _keep(value)
    raise RuntimeError("an inference tensor was to be saved for a backward")


def _raise_for_second_backward() -> NoReturn:
    leaf, out = _keep(torch.ones(()))
    for _ in range(2):
        torch.autograd.grad(out, leaf)
    raise RuntimeError("a backward was called a second time, and what it needs has been let go")


def _raise_for_detached() -> NoReturn:
    with torch.enable_grad():
        leaf = torch.ones((), requires_grad=True)
        kept = leaf * 1
        out = kept * kept
    kept.detach_()
    torch.autograd.grad(out, leaf)
    raise RuntimeError("a tensor saved for the backward was detached in place")


def _raise_for_detached_argument(*, of_leaf: bool) -> NoReturn:
    with torch.enable_grad():
        leaf = torch.ones((), requires_grad=True)
        given = leaf if of_leaf else leaf * 1
        out = checkpoint(torch.sin, given, use_reentrant=False)
    given.detach_()
    out.backward()
    raise RuntimeError("an argument of a checkpoint was detached in place")


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
        if node is not None:
            error.args = (with_node(str(error), node.name(), value.output_nr), *error.args[1:])
        raise
    raise RuntimeError(f"a value saved for the backward was written: version {is_at}, saved at version {version}")


def _layout(value: Tensor) -> Layout:
    return value.shape, value.stride(), value.dtype


#: A tensor that nodes keep itself; the nodes that ask for its history, and those that keep it; where it was; its places
#: among the saved values; whether it was a leaf; the nodes of checkpoints; those that a backward comes to before.
_KeptItself = tuple[weakref.ref[Tensor], int, int, tuple[int, Layout] | None, Sequence[Place], bool, int, int]


class SavedValues:
    """The values that one call's forward saved, kept as autograd keeps its own.

    They go through the innermost ``saved_tensors_hooks``; their versions are checked when they are used; they are let
    go after a backward unless the graph is kept. ``released`` has one bit for each autograd node of the traced program
    that held tensors and has been used up: a second backward that reaches one of those fails as in eager, while one
    that does not goes through. What a custom function's node keeps as an attribute is never used up.

    ``pending`` are the gradients that wait for a backward to come by, since they belong into its midst; ``hooked`` says
    that there are hooks.

    ``nodes`` are the autograd nodes behind results that the function's own nodes keep, by the edges of the traced
    program; dead ones are those of results that nobody has any more.

    ``views`` are results that are views and were written: nodes may keep them with their histories.

    ``lent`` are the numbers of values that a backward may read as they are by then, ``loose`` of those that autograd
    would not keep: neither hooks nor version checks are for these.
    """

    __slots__ = (
        "_hooks", "_itself", "_layouts", "_loose", "_origins", "_parts", "_values", "_versions", "_watched", "hooked",
        "nodes", "pending", "released", "views"
    )  # fmt: skip

    def __init__(self, values: Sequence[Tensor], lent: Sequence[int] = (), loose: Collection[int] = ()) -> None:
        hooks = internals.saved_tensor_hooks()
        self.released = 0
        self.hooked = hooks is not None
        self.pending: dict[tuple[int, int], dict[Any, Tensor]] | None = None
        self.nodes: dict[Any, tuple[weakref.ref[Any], int]] | None = None
        self.views: dict[Any, tuple[weakref.ref[Tensor], int]] | None = None
        self._watched: list[tuple[Tensor, int, int]] = []
        self._itself: list[_KeptItself] = []
        self._parts: dict[tuple[int, int], tuple[Tensor, Part | None]] = {}
        self._hooks = hooks
        for n, value in enumerate(values):
            if value.is_inference() and n not in loose:
                _raise_for_inference_tensor(value)
        self._loose = loose
        self._origins: dict[int, tuple[weakref.ref[Tensor], int, Layout]] = {}
        self._layouts = {n: _layout(values[n]) for n in lent}
        self._versions = self._versions_of(values)
        self._values: list[Any] | None = list(values)
        if hooks is not None:
            self._values = [value if n in loose else hooks[0](value) for n, value in enumerate(values)]

    def _versions_of(self, values: Sequence[Tensor]) -> list[int]:
        """Return the versions; inference tensors, of which loose ones may be, do not count."""
        return [internals.version_of(v) for v in values] if self._loose else internals.versions_of(values)

    def watch(self, tensor: Tensor, mask: int) -> None:
        """Let a later write to ``tensor`` be an error for the nodes in ``mask``, which keep it in eager.

        What hooks have packed is not compared: it may be something else.
        """
        if self._hooks is not None:
            return
        alias = tensor.detach()  # without a history, which would lead back to here
        self._watched.append((alias, internals.version_of(alias), mask))

    def watch_itself(
        self, tensor: Tensor, asking: int, nodes: int, places: Sequence[Place] = (), given: int = 0, later: int = 0
    ) -> None:
        """Look in the backward at what became of a ``tensor`` that eager keeps itself.

        Detached in place, it is an error for the nodes in ``asking``, and a checkpoint's for those in ``given``, unless
        a backward comes to one in ``later`` before. Given other memory, that is what those in ``nodes`` compute with,
        in its ``places``; if those are not known, it is an error of ours. A strong reference to an output would lead
        back to here.
        """
        if self._hooks is None:
            lies = (tensor.data_ptr(), _layout(tensor)) if nodes else None
            self._itself.append((weakref.ref(tensor), asking, nodes, lies, places, tensor.is_leaf, given, later))

    def noting(self, edges: Sequence[Any]) -> Callable[[Any], None]:
        """Return what notes the autograd node behind the results at some edges; no strong reference leads back."""

        def note(node: Any) -> None:
            if self.nodes is None:
                self.nodes = {}
            self.nodes.update((edge, (weakref.ref(node), place)) for place, edge in enumerate(edges))

        return note

    def note_views(self, edges: Sequence[Any], *views: Tensor) -> None:
        """Note the results that are behind some edges of the traced program, as long as somebody has them."""
        self.views = {e: (weakref.ref(v), internals.version_of(v)) for e, v in zip(edges, views, strict=True)}

    def views_now(self) -> dict[Any, Tensor]:
        """Return those that are there and were not written since, by their edges."""
        if self.views is None:
            return {}
        found = {edge: (view(), version) for edge, (view, version) in self.views.items()}
        return {e: v for e, (v, version) in found.items() if v is not None and internals.version_of(v) == version}

    def kept_result(self, edge: Any) -> Tensor | None:
        """Return the result at an edge that the function's own node keeps, behind the node that was put there."""
        reference, place = (self.nodes or {}).get(edge, (None, 0))
        node = None if reference is None else reference()
        return None if node is None else internals.outputs_saved_by(node)[place]

    def keep_in(
        self,
        n: int,
        tensor: Tensor,
        shape: Sequence[int],
        stride: Sequence[int],
        shift: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Keep a window of the caller's ``tensor``, which by now holds the value too, in place of the ``n``-th.

        Eager keeps the tensor itself: what is written to it by ways that do not count is there in its backward. A
        window of another ``dtype``, in whose elements ``shift`` counts then, has elements that are not larger.
        """
        if self._values is not None and (self._hooks is None or n in self._loose):
            alias = tensor.detach()
            if dtype is not None:
                reach = 1 + sum((m - 1) * s for m, s in zip(alias.shape, alias.stride(), strict=True))
                alias = alias.as_strided((reach,), (1,)).view(dtype)
            self._values[n] = alias.as_strided(shape, stride, alias.storage_offset() + shift)

    def stands_for(self, n: int, tensor: Tensor) -> None:
        """Note that the ``n``-th, a lent one, is in the memory of the caller's ``tensor``, which eager may keep itself.

        Given other memory or sizes, that is no longer what is kept here. A strong reference might lead back to here.
        """
        self._origins[n] = (weakref.ref(tensor), tensor.data_ptr(), _layout(tensor))

    def remember_versions(self) -> None:
        """Take the versions after the epilogue's own writes, which count for all that shares their target's counter."""
        if self._values is not None and self._hooks is None:
            self._versions = self._versions_of(self._values)

    def use(self, mask: int, needs: Sequence[int], late: Collection[int] = ()) -> list[Tensor]:
        """Return those of the values that are needed by a backward that reaches the nodes in ``mask``.

        It reads those in ``late`` as they are by now, which must not be of other sizes though.

        Raises
        ------
        RuntimeError
            As autograd does: when the graph has been freed, or a value was written in place.
        MetadataMutationError
            One in ``late`` is of other sizes by now, or the caller's tensor that it stands for.
        """
        if self.released & mask or (needs and self._values is None):
            _raise_for_second_backward()
        moved = []
        for i, (kept_itself, asking, nodes, before, places, was_leaf, given, later) in enumerate(self._itself):
            if (now_is := kept_itself()) is None:
                continue
            if asking & mask and was_leaf and not now_is.requires_grad:
                _raise_for_detached_argument(of_leaf=True)
            if asking & mask and now_is.grad_fn is None and not was_leaf:
                if given & mask and not later & mask:
                    _raise_for_detached_argument(of_leaf=False)
                _raise_for_detached()
            if nodes & mask and before != (lies := (now_is.data_ptr(), _layout(now_is))):
                moved.append((i, now_is, lies, places))
        for tensor, version, own in self._watched:
            if own & mask and internals.version_of(tensor) != version:
                _raise_for_written_value(tensor, version, internals.version_of(tensor))
        for i, now_is, lies, places in moved:
            self._take_in(i, now_is, places)
            # by the next backward it may be back where it was
            self._itself[i] = (*self._itself[i][:3], lies, *self._itself[i][4:])
        if self._values is None:
            return []
        if self._hooks is not None:
            used = [self._values[n] if n in self._loose else self._hooks[1](self._values[n]) for n in needs]
            late = self._loose
        else:
            now = self._versions_of(self._values)
            if now != self._versions:
                for n in needs:
                    if now[n] != self._versions[n] and n not in late:
                        _raise_for_written_value(self._values[n], self._versions[n], now[n])
            used = list(map(self._values.__getitem__, needs))
        for (_, n), (alias, part) in self._parts.items():
            if n in needs:
                used[needs.index(n)] = _with_part(used[needs.index(n)], alias, part)
        for place, n in enumerate(needs if late else ()):
            if n in late:
                used[place] = self._by_now(n, used[place])
        return used

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

    def _take_in(self, i: int, tensor: Tensor, places: Sequence[Place]) -> None:
        """Let a tensor of the caller's, which was given other memory, stand for what is kept of it."""
        if not places or self._values is None:
            raise other_memory("a tensor that autograd keeps")
        self._parts = {key: part for key, part in self._parts.items() if key[0] != i}
        for n, part in places:
            value, alias = self._values[n], tensor.detach()
            _with_part(value, alias, part)
            if part is None and internals.version_of(value) != self._versions[n]:
                continue  # it was written, which is an error
            if part is None and alias.stride() == value.stride():
                self._values[n] = alias
                self._versions[n] = internals.version_of(alias)
            else:
                self._parts[i, n] = (alias, part)  # what will be there by then

    def _by_now(self, n: int, value: Tensor) -> Tensor:
        """Return what is read as it is by now, with the strides for which the backward was compiled."""
        what = "a tensor that a custom Function keeps as an attribute, or that a checkpoint's function uses,"
        if n in self._origins:
            reference, address, layout = self._origins[n]
            origin = reference()
            put = any(k == n and self._itself[i][0]() is origin for i, k in self._parts)
            if not put and origin is not None and (origin.data_ptr() != address or _layout(origin) != layout):
                if layout != self._layouts[n]:
                    raise other_memory(what)
                value = origin.detach()
        return laid_out_as(value, *self._layouts[n], what)

    def release(self, mask: int, all_masks: Sequence[int]) -> None:
        """Note that a backward over ``mask`` has its values, and let go of what no other backward may still use."""
        if internals.keeps_graph():
            return
        self.released |= mask & ~LASTING
        if not any(m & ~self.released for m in all_masks):
            self._values = None if any(all_masks) else self._values
            self._watched = []
            self._itself = []
            self._parts = {}

    def kept(self) -> tuple[Any, ...]:
        """Say what is kept now, for `keep`."""
        return self.released, self._values, self._watched, self._itself, self._parts

    def keep(self, kept: tuple[Any, ...]) -> None:
        """Keep what was kept before a backward: it is run once more, for another sample."""
        self.released, self._values, self._watched, self._itself, self._parts = kept


def other_memory(what: str) -> MetadataMutationError:
    """Make the error for a tensor that the backward cannot read as it is by then."""
    return MetadataMutationError(
        f"{what} was given other sizes or other memory after the call",
        why="the backward reads it as it is by then, and was compiled for its sizes and its memory",
        suggestion="run the backward first, use ctx.save_for_backward, or call the original function",
    )


def _with_part(value: Tensor, tensor: Tensor, part: Part | None) -> Tensor:
    """Return what has a tensor of the caller's in place of a saved value, or of a part of it."""
    if part is None:
        return laid_out_as(tensor, *_layout(value))
    shape, stride, shift = part
    if tensor.shape != shape or tensor.dtype != value.dtype:
        raise other_memory("a tensor that autograd keeps")
    whole = value.detach().clone()
    whole.as_strided(shape, stride, shift).copy_(tensor)
    return whole


def laid_out_as(
    value: Tensor,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    what: str = "a tensor that autograd keeps",
) -> Tensor:
    """Return a tensor of the caller's with the strides for which a backward was compiled.

    Raises
    ------
    MetadataMutationError
        It is of another shape or dtype, or has elements of its own where there was one for several.
    """
    same = value.stride() == stride
    if value.shape != shape or value.dtype != dtype or not (same or writable(shape, stride)):
        raise other_memory(what)
    return value if same else restride(value, stride)


def writable(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether no dimension is expanded, so that a tensor of these strides can be filled element by element."""
    return all(n < 2 or step for n, step in zip(shape, stride, strict=True))


def restride(tangent: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Copy a tangent into the strides that the backward was traced with."""
    dense = tangent.to_dense() if tangent.layout != torch.strided else tangent
    return torch.empty_strided(dense.shape, stride, dtype=dense.dtype, device=dense.device).copy_(dense)
