"""Notes on each storage in a trace: when views of it were made, when it was written, and whether it may be written.

    v = x[0]                         # a view of x from before the write
    x.mul_(2)
    w = x[1]                         # a view of x from after the write
    return v, w

If a storage has been written since a view of it was made, autograd regenerates the view's history. The history of ``v``
then starts at the base of ``x`` (if ``x`` is a view), and the history of ``w`` at ``x``. The recorded ops do not
show this difference. So the class `StorageNotes` notes the version of the storage when a view is made, and compares it
with the version when the view is used or returned.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import pytree
from aotlab.capture.signals import RunEagerly
from aotlab.guards.user_code import user_line
from aotlab.trace.tape import tensors_in


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the byte offsets in the storage at which the tensor's elements begin and end."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size if tensor.numel() else start


class InputStorage(NamedTuple):
    """The storage of one input, or of several inputs that share it.

    ``members`` are the indices of these inputs, and ``name`` is the name of the first. ``traced`` is the traced input,
    or the traced tensor of their base (then ``is_base`` is true). ``is_synthetic`` is true for a synthetic base.
    """

    members: tuple[int, ...]
    name: str
    traced: Tensor
    is_base: bool = False
    is_synthetic: bool = False


class StorageNotes:
    """Notes on the views of each storage, and on the writes to it, made while the traced function runs.

    ``storages`` maps storage keys to the inputs in that storage. These sets hold storage keys:

    - ``viewed``: views of the storage were made.
    - ``viewed_under_no_grad``: views of the storage were made, or used, while grad mode was off, or were made before a
      write to the storage and used after it.
    - ``fragile_views``: the storage has views that must not be used after its version counter has changed.
    - ``aliased``: the storage has aliases that autograd does not treat as views (made by ``detach()`` or ``.data``).
    - ``autograd_state_read``: the function read `is_leaf` or `grad_fn` of a tensor in the storage, or another attribute
      that `EscapeGuard` checks.

    ``hidden_saved`` has, for the autograd node of each in-place write to a view, the tensors that the node saves and
    that Python cannot see. ``offsets_read`` has the indices of the inputs whose storage offset the result depends on.
    """

    def __init__(self, storages: Mapping[int, InputStorage]) -> None:
        self.storages = storages
        self.viewed: set[int] = set()
        self.viewed_under_no_grad: set[int] = set()
        self.fragile_views: set[int] = set()
        self.aliased: set[int] = set()
        self.autograd_state_read: set[int] = set()
        self.hidden_saved: dict[Any, list[Tensor]] = {}
        self.offsets_read: set[int] = set()
        self._noted_views: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}
        # By storage key: the reason, and a tensor with this storage. The tensor is kept alive so that the key is not
        # reused.
        self._writes_forbidden: dict[int, tuple[str, Tensor]] = {}

    # --- views

    def note_views(self, result: Any, arguments: Any) -> None:
        """Note the version at which each view in ``result`` was made; ``arguments`` are the arguments of the op."""
        tensors = [result] if isinstance(result, Tensor) else tensors_in(result)
        argument_tensors = tensors_in(arguments) if tensors else []
        for tensor in filter(internals.is_functional, tensors):
            # no new view: the result of an in-place op, of an op with `out=`, or of an op that returns an argument
            if internals.base_of(tensor) is None or any(tensor is each for each in argument_tensors):
                continue
            version = internals.version_of(tensor)
            self._noted_views[id(tensor)] = weakref.ref(tensor), version, tensor.requires_grad
            key = internals.storage_key(tensor)
            if key in self.storages:
                self.viewed.add(key)
                if not torch.is_grad_enabled():
                    self.viewed_under_no_grad.add(key)
                if not internals.keeps_through_writes(tensor):
                    self.fragile_views.add(key)

    def is_older(self, view: Tensor) -> bool:
        """Tell whether a view was made before the last write to its memory."""
        noted_view = self._noted_views.get(id(view))
        return noted_view is not None and noted_view[0]() is view and noted_view[1] != internals.version_of(view)

    def is_regenerated_differently(self, view: Tensor, *, locked: bool = False) -> bool:
        """Tell whether a view was made before a write, and its regenerated history in eager differs from the trace's.

        Eager regenerates the history from sizes and strides (``as_strided``), a trace regenerates it from the view ops.
        The gradients of the two histories may have different strides. Their strides are the same in two cases: the last
        write went through a view, because the autograd node of such a write copies its gradient; or the base is
        contiguous, and the backward of the first view op makes a new gradient of the base's sizes.

        ``locked`` says that autograd has locked the view to regenerate its history. Then the history cannot be read,
        and counts as different.
        """
        if not self.is_older(view) or not view.requires_grad:
            return False
        base = internals.base_of(view)
        if base is None or not self._noted_views[id(view)][2]:
            return True  # if the base got its history later, eager takes the view for a leaf until `grad_fn` is read
        if base.grad_fn is not None and internals.is_copy_slices(base.grad_fn):
            return False
        return locked or not base.is_contiguous() or not internals.first_view_copies(view)

    def check_uses(self, arguments: Any, *, locked: bool = False) -> None:
        """Run eagerly if an op uses a view from before a write, and the view's history would differ from eager's.

        ``arguments`` are the arguments of the op. With grad mode off, the history has no effect. The storage is added
        to ``viewed_under_no_grad``, because the histories also differ if an input is a view of another base.
        """
        for tensor in tensors_in(arguments) if self._noted_views else ():
            if not (self.is_older(tensor) and tensor.requires_grad):
                continue
            storage = self.storages.get(internals.storage_key(tensor))
            is_synthetic = storage is not None and storage.is_synthetic
            if torch.is_grad_enabled() and (is_synthetic or self.is_regenerated_differently(tensor, locked=locked)):
                raise RunEagerly("view-before-write", at=user_line())
            if storage is not None:
                self.viewed_under_no_grad.add(internals.storage_key(tensor))

    def note_dtype_view(self, tensor: Tensor, view: Tensor) -> None:
        """Note that ``view`` shows the bytes of ``tensor``, possibly as another dtype.

        If the elements of ``view`` are larger, eager requires that they are aligned. Then the result depends on the
        input's storage offset. A view of a bool tensor as another dtype, or the reverse, must not be written later: the
        epilogue's copy would change each byte of a bool tensor that is neither 0 nor 1 into 1.
        """
        storage = self.storages.get(internals.storage_key(tensor))
        if storage is not None and view.element_size() > tensor.element_size():
            if storage.is_base or span(storage.traced)[0] % view.element_size():
                raise RunEagerly("view-with-larger-elements", dtype=view.dtype, at=user_line())
            self.offsets_read.update(storage.members)
        if (view.dtype is torch.bool) != (tensor.dtype is torch.bool):
            self.forbid_writes(view, "is viewed as bool and as another dtype")

    # --- writes

    def forbid_writes(self, view: Tensor, why: str) -> None:
        """Run eagerly if the memory of ``view`` is written later; ``why`` is part of the message."""
        self._writes_forbidden[internals.storage_key(view)] = why, view

    def check_writes(self, written: Sequence[Tensor]) -> None:
        """Run eagerly if a write goes through an expanded or unfolded view, or if `forbid_writes` forbids it."""
        for tensor in filter(internals.is_functional, written):
            for view_op in ("expand", "unfold"):
                if internals.is_seen_through(tensor, view_op):
                    # To write through such a view, functionalization adds the difference of the values to the base,
                    # which rounds, or it fills the other elements of the base with zeros.
                    raise RunEagerly("writes-part-of-expanded", way=f"{view_op}ed", at=user_line())
            key = internals.storage_key(tensor)
            if key in self._writes_forbidden:
                name = f"`{self.storages[key].name}`" if key in self.storages else "an intermediate"
                raise RunEagerly(
                    "writes-behind-special-view", name=name, why=self._writes_forbidden[key][0], at=user_line()
                )

    def note_write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, required_grad: bool) -> None:
        """Note which tensors the autograd node of an in-place op on a view saves, in ``hidden_saved``.

        ``func``, ``args`` and ``kwargs`` are the call of the op; its first argument is the view. ``required_grad`` says
        whether the view required grad before the op.
        """
        base = internals.base_of(args[0])
        if base is not None and base.requires_grad and torch.is_grad_enabled():
            self.hidden_saved[base.grad_fn] = _saved_arguments(func, args, kwargs, required_grad=required_grad)


def _saved_arguments(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, required_grad: bool
) -> list[Tensor]:
    """Return the arguments that an in-place op saves for its backward, found by running the op on meta tensors."""
    twins: dict[int, tuple[Tensor, Tensor]] = {}

    def twin(value: Tensor) -> Tensor:
        if id(value) not in twins:
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            needs_grad = required_grad if value is args[0] else value.requires_grad
            twins[id(value)] = value, like.requires_grad_().clone() if needs_grad else like
        return twins[id(value)][1]

    try:
        with internals.outside_of_trace(), torch.enable_grad():
            like_args, like_kwargs = pytree.tree_map_only(Tensor, twin, (args, kwargs))
            func(*like_args, **like_kwargs)
            keys = {internals.storage_key(saved) for saved in internals.saved_tensors_of(twin(args[0]).grad_fn)}
            return [tensor for tensor, meta_twin in twins.values() if internals.storage_key(meta_twin) in keys]
    except Exception:  # noqa: BLE001  # the op does not accept such meta tensors
        return []
