"""When views of the inputs were made and when the inputs were written, where that order can be seen afterwards.

    v = x[0]                         # a view of what x was before the write
    x.mul_(2)
    w = x[1]                         # a view of what x is after it
    return v, w

Autograd makes the history of a view anew when the memory below it has been written since: for ``v`` it starts at the
tensor that ``x`` is itself a view of, for ``w`` at ``x``. So the epilogue has to make ``v`` before its own write and
``w`` after it. Which is which the graph does not say; the versions do.

Noted is also which of several inputs in one memory the program made a view from, since a write makes all windows of a
base anew; what the node of a write to a view keeps, which Python does not see; and which views were made together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.trace.places import user_line
from aotlab.trace.tape import tensors_in


class Chronicle:
    """Notes views and writes while the traced function runs; ``storages`` are the keys of the inputs' memory.

    ``viewed_unseen`` has those of which views were made or used without autograd, ``fragile`` those of which views were
    made that must not be used once the version moved; ``kept_by`` says what autograd's nodes of writes to views keep.
    """

    def __init__(self, storages: Collection[int] = ()) -> None:
        self._storages = storages
        self.viewed_unseen: set[int] = set()
        self.fragile: set[int] = set()
        self.kept_by: dict[Any, list[Tensor]] = {}
        self._made: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._origins: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        self._data_read: set[int] = set()
        self._several: list[tuple[Sequence[Tensor], int]] = []

    def made(self, result: Any, args: tuple[Any, ...] = ()) -> None:
        """Note at which version a view of an input is made, and from which of all that the op was given."""
        if isinstance(result, tuple | list) and _are_several_views(result):
            self._several.append((result, internals.version_of(result[0])))
        found = [result] if isinstance(result, Tensor) else tensors_in(result)
        given = tensors_in(args)
        if found and torch.is_grad_enabled() and any(self.is_made_again(tensor) for tensor in given):
            raise RunEagerly(f"a view is used after a write to what it is a view of, at {user_line()}")
        for tensor in filter(internals.is_functional, found):
            if any(tensor is each for each in given):  # an op in place or with `out=`, or one that returns its argument
                continue
            key = internals.storage_key(tensor)
            if key in self._storages:
                self._note_origin(tensor, given)
            if internals.base_of(tensor) is None:
                continue
            self._made[id(tensor)] = weakref.ref(tensor), internals.version_of(tensor)
            if key in self._storages:
                if not torch.is_grad_enabled():
                    self.viewed_unseen.add(key)
                if not internals.keeps_through_writes(tensor):
                    self.fragile.add(key)

    @property
    def several(self) -> list[Sequence[Tensor]]:
        """The views that were made together, where their history is still the one that they were made with."""
        return [views for views, moment in self._several if internals.version_of(views[0]) == moment]

    def _note_origin(self, view: Tensor, given: Iterable[Tensor]) -> None:
        key = internals.storage_key(view)
        below = [tensor for tensor in given if internals.is_functional(tensor) and internals.storage_key(tensor) == key]
        origins = {id(origin): origin for origin in map(self.origin_of, below)}
        self._origins.pop(id(view), None)
        if len(origins) == 1:
            self._origins[id(view)] = weakref.ref(view), weakref.ref(next(iter(origins.values())))

    def origin_of(self, tensor: Tensor) -> Tensor:
        """Return the input of which the program made a view, by one op or several; else the tensor itself."""
        view, origin = self._origins.get(id(tensor), (None, None))
        found = origin() if origin is not None and view is not None and view() is tensor else None
        return tensor if found is None else found

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
        """Look for views of inputs that were made before a write and are used after it."""
        for tensor in tensors_in(given) if self._made else ():
            if not self.is_older(tensor) or not tensor.requires_grad:
                continue
            key = internals.storage_key(tensor)
            if key in self._storages:
                if torch.is_grad_enabled():
                    raise RunEagerly(f"a view of an argument is used after a write to that, at {user_line()}")
                self.viewed_unseen.add(key)

    def writes(self, written: Tensor) -> None:
        """Look at a tensor that is about to be written."""
        read = bool(self._data_read) and internals.is_functional(written)
        if read and internals.storage_key(written) in self._data_read:
            raise RunEagerly(f"a tensor whose `.data` was read is written under inference_mode, at {user_line()}")

    def reads_data(self, tensor: Tensor) -> None:
        """Note under inference_mode that somebody has ``.data`` of a tensor: writes through it count for nobody."""
        self._data_read.add(internals.storage_key(tensor))

    def wrote(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, required_grad: bool) -> None:
        """Note what the op in place on a view keeps; ``required_grad`` says what the view did before."""
        base = internals.base_of(args[0])
        if base is None or not base.requires_grad or not torch.is_grad_enabled():
            return
        kept = _kept(func, args, kwargs, required_grad=required_grad)
        if kept:
            self.kept_by[base.grad_fn] = kept


def _are_several_views(result: Sequence[Any]) -> bool:
    plain = len(result) > 1 and all(isinstance(each, Tensor) and internals.is_functional(each) for each in result)
    return plain and result[0].requires_grad and internals.is_one_of_several_views(result[0])


def _kept(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, required_grad: bool
) -> list[Tensor] | None:
    """Return which of its tensors an op in place keeps for its backward, by a look at how it does elsewhere.

    None if that cannot be seen.
    """
    twins: dict[int, tuple[Tensor, Tensor]] = {}

    def twin(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in twins:
                like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                wanted = required_grad if value is args[0] else value.requires_grad
                twins[id(value)] = value, like.requires_grad_().clone() if wanted else like
            return twins[id(value)][1]
        if type(value) in (list, tuple):
            return type(value)(map(twin, value))
        return value

    try:
        with internals.outside_of_trace(), torch.enable_grad():
            func(*map(twin, args), **{key: twin(value) for key, value in kwargs.items()})
            keys = {internals.storage_key(kept) for kept in internals.saved_tensors_of(twin(args[0]).grad_fn)}
            return [tensor for tensor, own in twins.values() if internals.storage_key(own) in keys]
    except Exception:  # noqa: BLE001  # an op that has other wishes for its arguments
        return None
