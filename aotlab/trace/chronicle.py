"""The memory of a trace: when views of it were made, when it was written, and when it must not be.

    v = x[0]                         # a view of what x was before the write
    x.mul_(2)
    w = x[1]                         # a view of what x is after it
    return v, w

Autograd makes the history of a view anew when the memory below it has been written since: for ``v`` it starts at the
tensor that ``x`` is itself a view of, for ``w`` at ``x``. Which is which the graph does not say; the versions do.
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
from aotlab.guards.places import user_line
from aotlab.trace.tape import tensors_in


def span(tensor: Tensor) -> tuple[int, int]:
    """Return where the elements of a tensor begin in its storage, and where they end, in bytes."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size if tensor.numel() else start


class InputStorage(NamedTuple):
    """Memory of the kept inputs ``members``, ``name`` being the first's; ``wrapper``: the input or its base."""

    members: tuple[int, ...]
    name: str
    wrapper: Tensor
    is_base: bool = False


class Chronicle:
    """Notes views and writes while the traced function runs; ``storages`` are the inputs' memory by its keys.

    Of memory, by its keys: views of ``viewed_unseen`` were made or used without autograd, of ``fragile`` must not be
    used once the version moved; ``aliased`` has aliases that know no base; ``looked_at`` was asked what it is to
    autograd. ``kept_by`` is what nodes of writes to views keep unseen by Python, ``offsets_read`` the inputs whose
    offset mattered.
    """

    def __init__(self, storages: Mapping[int, InputStorage]) -> None:
        self.storages = storages
        self.viewed_unseen: set[int] = set()
        self.fragile: set[int] = set()
        self.aliased: set[int] = set()
        self.looked_at: set[int] = set()
        self.kept_by: dict[Any, list[Tensor]] = {}
        self.offsets_read: set[int] = set()
        self._made: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._fixed: dict[int, tuple[str, Tensor]] = {}  # why; the tensor lest its key becomes another's

    # --- views

    def made(self, result: Any, given: Any) -> None:
        """Note at which version a view is made by an op that was ``given`` these arguments."""
        found = [result] if isinstance(result, Tensor) else tensors_in(result)
        before = tensors_in(given) if found else []
        for tensor in filter(internals.is_functional, found):
            # not an op in place or with `out=`, nor one that returns its argument
            if internals.base_of(tensor) is None or any(tensor is each for each in before):
                continue
            self._made[id(tensor)] = weakref.ref(tensor), internals.version_of(tensor)
            key = internals.storage_key(tensor)
            if key in self.storages:
                if not torch.is_grad_enabled():
                    self.viewed_unseen.add(key)
                if not internals.keeps_through_writes(tensor):
                    self.fragile.add(key)

    def is_older(self, view: Tensor) -> bool:
        """Tell whether a view was made before its memory was written."""
        known = self._made.get(id(view))
        return known is not None and known[0]() is view and known[1] != internals.version_of(view)

    def is_made_again(self, view: Tensor) -> bool:
        """Tell whether eager makes a view's history again by sizes and strides, and a trace by the view's own op.

        The gradient then has other strides, unless the last write went through a view: its node copies what comes.
        """
        if not self.is_older(view) or not view.requires_grad:
            return False
        base = internals.base_of(view)
        return base is None or base.grad_fn is None or not internals.is_copy_slices(base.grad_fn)

    def uses(self, given: Any) -> None:
        """Look for views that were made before a write and are used after it."""
        for tensor in tensors_in(given) if self._made else ():
            if not (self.is_older(tensor) and tensor.requires_grad):
                continue
            key = internals.storage_key(tensor)
            if torch.is_grad_enabled():
                if key in self.storages or self.is_made_again(tensor):
                    raise RunEagerly(f"a view is used after a write to what it is a view of, at {user_line()}")
            elif key in self.storages:
                self.viewed_unseen.add(key)

    def sees_as_dtype(self, tensor: Tensor, view: Tensor) -> None:
        """Note that a view sees a tensor's bytes, as another dtype perhaps.

        Larger elements begin where eager wants them to; other bytes than 0 and 1 in a bool tensor would be copied as 1.
        """
        storage = self.storages.get(internals.storage_key(tensor))
        if storage is not None and view.element_size() > tensor.element_size():
            if storage.is_base or span(storage.wrapper)[0] % view.element_size():
                raise RunEagerly(f"a part of some memory is viewed as {view.dtype}, at {user_line()}")
            self.offsets_read.update(storage.members)
        if (view.dtype is torch.bool) != (tensor.dtype is torch.bool):
            self.fix(view, "is seen as bool and as another dtype")

    # --- writes

    def fix(self, view: Tensor, why: str) -> None:
        """Leave later writes to the memory of a view to eager."""
        self._fixed[internals.storage_key(view)] = why, view

    def check_writes(self, written: Sequence[Tensor]) -> None:
        """Leave to eager a write after which a window would not be what it was."""
        for tensor in filter(internals.is_functional, written):
            for way in ("expand", "unfold"):
                if internals.is_seen_through(tensor, way):
                    # functionalization adds the difference to what was there, which rounds, or has zeros beside it
                    raise RunEagerly(f"a part of an {way}ed tensor is written, at {user_line()}")
            key = internals.storage_key(tensor)
            if key in self._fixed:
                name = f"`{self.storages[key].name}`" if key in self.storages else "an intermediate"
                raise RunEagerly(f"{name} {self._fixed[key][0]} and is written, at {user_line()}")

    def wrote(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, required_grad: bool) -> None:
        """Note what the op in place on a view keeps; ``required_grad`` says what the view did before."""
        base = internals.base_of(args[0])
        if base is not None and base.requires_grad and torch.is_grad_enabled():
            self.kept_by[base.grad_fn] = _kept(func, args, kwargs, required_grad=required_grad)


def _kept(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, required_grad: bool
) -> list[Tensor]:
    """Return which of its tensors an op in place keeps for its backward, by a look at how it does elsewhere."""
    twins: dict[int, tuple[Tensor, Tensor]] = {}

    def twin(value: Tensor) -> Tensor:
        if id(value) not in twins:
            like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            wanted = required_grad if value is args[0] else value.requires_grad
            twins[id(value)] = value, like.requires_grad_().clone() if wanted else like
        return twins[id(value)][1]

    try:
        with internals.outside_of_trace(), torch.enable_grad():
            like_args, like_kwargs = pytree.tree_map_only(Tensor, twin, (args, kwargs))
            func(*like_args, **like_kwargs)
            keys = {internals.storage_key(kept) for kept in internals.saved_tensors_of(twin(args[0]).grad_fn)}
            return [tensor for tensor, own in twins.values() if internals.storage_key(own) in keys]
    except Exception:  # noqa: BLE001  # an op that has other wishes for its arguments
        return []
