"""Hold the values that a compiled forward saves for the backward, with the same checks as autograd's saved tensors."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Any, NoReturn

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.errors import MetadataMutationError
from aotlab.ir.specs import spec_of
from aotlab.trace.history import LASTING

#: The default of `SavedValues`' argument ``places``: no saved value is one of the caller's own tensors.
_NOWHERE: Mapping[int, Any] = {}


class _SaveForBackward(torch.autograd.Function):
    """Saves one tensor, and reads it in its backward.

    If the tensor was written or freed in between, autograd itself raises its usual error.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return leaf.clone()

    @staticmethod
    @internals.unseen_by_dynamo
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        return gradient, None


def _save_for_backward(tensor: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = torch.ones((), requires_grad=True)
        return leaf, _SaveForBackward.apply(leaf, tensor)  # type: ignore[no-untyped-call]  # untyped in torch


def _raise_for_written_value(value: Tensor, version: int, present: int) -> NoReturn:
    # After a write to a view, reading `grad_fn` makes autograd build the history again. If that raises another error,
    # it also does so in eager.
    node = value.grad_fn
    # Autograd's message has the dtype, the sizes and the versions. So a tensor of one element that is expanded to the
    # shape of the value gives the same message, without a copy of the value.
    with torch.enable_grad():
        element = torch.empty((), dtype=value.dtype, device=value.device, requires_grad=node is not None)
        replica = element.expand(value.shape)
    internals.set_version(replica, version)
    leaf, out = _save_for_backward(replica)
    internals.set_version(replica, present)
    try:
        torch.autograd.grad(out, leaf)
    except RuntimeError as error:
        if node is not None:  # torch 2.11 writes `MulBackward0`, later ones `Mul`
            name = node.name() if "Backward0, is at version" in str(error) else re.sub(r"Backward\d*$", "", node.name())
            clause = f"which is output {value.output_nr} of {name}, is at version"
            error.args = (re.sub(r"which is output \d+ of [^,]+, is at version", clause, str(error)), *error.args[1:])
        raise
    raise RuntimeError(f"a value saved for the backward was written: version {present}, saved at version {version}")


class SavedValues:
    """The values that the forward of one call saved, with the same checks as autograd's own saved tensors.

    The innermost ``saved_tensors_hooks`` pack and unpack the values. A backward that uses the values checks their
    version counters. The values are released after a backward, unless it keeps the graph (``retain_graph=True``).

    The masks here are bit masks: each autograd node of the traced program that saves tensors has one bit.

    - ``hooked`` says whether there were saved-tensor hooks.
    - ``released`` is the mask of the nodes whose saved values are released. A second backward that reaches such a node
      fails as in eager. A backward that reaches only other nodes succeeds. Values that a custom function stores as an
      attribute of ``ctx`` are never released.
    - ``pending`` are gradients of higher order that enter at inner edges. They are stored here until the backward of
      the segment runs (`aotlab.derivatives.create_graph`).
    - ``nodes`` maps edges of the traced autograd graph to run-time autograd nodes. It has the edges of the results that
      autograd nodes of the traced program save.
    - ``places`` is about the saved values that are the caller's own tensors. It maps the position of such a value to
      the strides for which the backward was compiled, or to None if the backward accepts all strides. If the tensor has
      other memory when the backward runs, the backward raises. An exception are parameters that FSDP2 has freed after
      the forward and has gathered again: the backward reads them again, as in eager.
    - ``sizes`` are the symbolic sizes, which every backward takes as inputs.
    - ``once`` has one mask for each selective checkpoint, with the bits of its nodes. The cached values of such a
      checkpoint serve only one backward, even if the graph is kept.
    - ``eager_masks`` maps the position of a saved value to the nodes that save its tensor in eager. A backward that
      reaches such a node checks the version counter, even if it does not use the value.
    - ``live`` are tensors of the caller whose values at the time of the backward are read and written by the backward.
    """

    __slots__ = ("_eager_masks", "_hooks", "_live_specs", "_places", "_spent_caches", "_values", "_versions",
                 "_watched", "hooked", "live", "nodes", "once", "pending", "released", "sizes")  # fmt: skip

    def __init__(
        self,
        values: Sequence[Tensor],
        places: Mapping[int, tuple[int, ...] | None] = _NOWHERE,
        sizes: Sequence[int] = (),
        live: Sequence[Tensor] = (),
        once: Sequence[int] = (),
        eager_masks: Mapping[int, int] = _NOWHERE,
    ) -> None:
        hooks = internals.saved_tensor_hooks()
        self.released = self._spent_caches = 0
        self.once = once
        self._eager_masks = eager_masks
        self.sizes = sizes
        self.live = live
        self._live_specs = [spec_of(tensor) for tensor in live]
        self.hooked = hooks is not None
        self.pending: dict[tuple[int, int], dict[Any, Tensor]] | None = None
        self.nodes: dict[Any, tuple[weakref.ref[Any], int]] | None = None
        self._watched: list[tuple[Tensor, int, int]] = []
        self._hooks = hooks
        for value in values:
            if value.is_inference():
                _save_for_backward(value)  # autograd raises its error about inference tensors
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
        """Note a tensor of the caller whose later writes the checks of the saved values would not find.

        In eager, the nodes in ``mask`` save this tensor. If the tensor is written later, a backward that reaches one of
        these nodes raises, as in eager.
        """
        if self._hooks is None:  # with saved-tensor hooks, the user decides which value the backward gets
            alias = tensor.detach()  # without its history, which would be a reference cycle
            self._watched.append((alias, internals.version_of(alias), mask))

    def noting(self, edges: Sequence[Any]) -> Callable[[Any], None]:
        """Return a callback that stores, in ``nodes``, a weak reference to the autograd node that it is called with.

        ``edges`` are the edges of the traced autograd graph that belong to the results of this node, in order.
        """

        def note(node: Any) -> None:
            if self.nodes is None:
                self.nodes = {}
            self.nodes.update((edge, (weakref.ref(node), place)) for place, edge in enumerate(edges))

        return note

    def kept_result(self, edge: Any) -> Tensor | None:
        """Return the caller's result at an edge of the traced autograd graph; its ``grad_fn`` is the identity node.

        The result is None if no identity node was noted for this edge, or if the node is dead.
        """
        reference, place = (self.nodes or {}).get(edge, (None, 0))
        node = None if reference is None else reference()
        return None if node is None else internals.outputs_saved_by(node)[place]

    def keep(self, n: int, tensor: Tensor) -> None:
        """Hold the caller's ``tensor`` in place of saved value ``n``, which the epilogue copied into that tensor."""
        if self._values is not None and self._hooks is None:
            self._values[n] = tensor.detach()

    def remember_versions(self) -> None:
        """Store the present version counters of the saved values, after the write-backs of the epilogue.

        A write-back increments the version counter of each saved value that shares a counter with the written tensor.
        Such a write is not an error.
        """
        if self._values is not None and self._hooks is None:
            self._versions = internals.versions_of(self._values)

    def use(self, mask: int, needs: Sequence[int], *, reaches_all: bool = True) -> list[Tensor]:
        """Return the saved values at the positions ``needs``, for a backward that reaches nodes in ``mask``.

        Nodes that are reached from the same entries share a bit. ``reaches_all`` is true if the backward reaches all
        nodes of the bits. A backward that begins at an inner edge may reach only some of them.

        Raises autograd's errors if the graph was freed or a value was written in place. Raises `MetadataMutationError`
        if one of the caller's tensors has other memory or other sizes than after the forward.
        """
        if self.released & mask or (needs and self._values is None):
            leaf, out = _save_for_backward(torch.ones(()))
            for _ in range(2):
                torch.autograd.grad(out, leaf)  # the second run raises autograd's error about a freed graph
        if self._spent_caches & mask:
            raise RuntimeError(internals.SPENT_CACHE)
        for tensor, version, own_mask in self._watched:
            if own_mask & mask and internals.version_of(tensor) != version:
                _raise_for_written_value(tensor, version, internals.version_of(tensor))
        self._check_memory(bool(self.live) and self._live_specs != [spec_of(tensor) for tensor in self.live])
        if self._values is None:
            return []
        if self._hooks is not None:
            return [self._hooks[1](self._values[n]) for n in needs]
        versions = internals.versions_of(self._values)
        if versions != self._versions:
            unused = [n for n, nodes in self._eager_masks.items() if reaches_all and nodes & mask]
            for n in (*needs, *unused):
                if versions[n] != self._versions[n]:
                    _raise_for_written_value(self._values[n], self._versions[n], versions[n])
        for n, stride, address in self._places:
            value = self._values[n]
            has_moved = internals.address_of(value) != address or value.stride() != stride
            if has_moved and n in needs:
                self._check_memory(value.stride() != stride or not internals.is_gathered(value))
        return [self._values[n] for n in needs]

    def _check_memory(self, is_other: bool) -> None:
        if is_other:
            raise MetadataMutationError(
                "a tensor that was saved for the backward was given other sizes or other memory after the call",
                why="the backward was compiled for its earlier sizes, and would read its new contents",
                suggestion="run the backward first, or call the original function",
            )

    def tensors(self) -> list[Tensor]:
        """Return the saved values. The list is empty if they are released, or if saved-tensor hooks packed them."""
        return [] if self._values is None or self._hooks is not None else self._values

    def put_pending(self, backwards: int, edge: Any, gradient: Tensor) -> None:
        """Store a gradient until the object with the id ``backwards`` runs in the present backward pass.

        This object is a `aotlab.derivatives.create_graph.LevelBackwards`. Gradients that enter at the same ``edge`` are
        summed.
        """
        if self.pending is None:
            self.pending = {}
        gradients = self.pending.setdefault((backwards, internals.current_graph_task()), {})
        gradients[edge] = gradients[edge] + gradient if edge in gradients else gradient

    def take_pending(self, backwards: int) -> dict[Any, Tensor]:
        """Remove and return the gradients, by edge, that `put_pending` stored for the object with the id ``backwards``.

        Only gradients of the present backward pass are returned.
        """
        if self.pending is None:
            return {}
        gradients = self.pending.pop((backwards, internals.current_graph_task()), {})
        if not self.pending:
            self.pending = None
        return gradients

    def release(self, mask: int, all_masks: Sequence[int]) -> None:
        """Note that a backward has read its values, and release the saved values that no other backward can use.

        ``mask`` has the nodes that the backward reaches. ``all_masks`` are the masks of all entries of all segments:
        the values are released when all nodes in these masks are released.
        """
        if internals.keeps_graph():
            self._spent_caches |= reduce(or_, (nodes for nodes in self.once if nodes & mask), 0)
            return
        self.released |= mask & ~LASTING
        if not any(m & ~self.released for m in all_masks):
            self._values = None if any(all_masks) else self._values
            self._watched = []


def restride(tangent: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Copy a tangent into the strides that the backward was compiled for."""
    dense = tangent.to_dense() if tangent.layout != torch.strided else tangent
    return dense.new_empty_strided(dense.shape, stride).copy_(dense)  # a method, so that the copy has the subclass
