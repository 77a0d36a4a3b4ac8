"""When views of the inputs were made and when the inputs were written, where that order can be seen afterwards.

    v = x[0]                         # a view of what x was before the write
    x.mul_(2)
    w = x[1]                         # a view of what x is after it
    return v, w

Autograd makes the history of a view anew when the memory below it has been written since: for ``v`` it starts at the
tensor that ``x`` is itself a view of, for ``w`` at ``x``. So the epilogue has to make ``v`` before its own write and
``w`` after it. Which is which the graph does not say; the versions do.

The same happens, and without a node of the op in place, after writes that autograd does not see and after changes of a
view's sizes.

Of views in memory that several inputs share, it notes which of these inputs the program made them from: their gradients
pass that one, and the graph, in which a write makes all windows anew, does not tell.

A write to a view hides from Python the node of the op in place, and with it what the op keeps: ``relu_`` its result,
``mul_`` its operand, which the caller must not write any more before the backward. That is noted too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.recorder.signals import RunEagerly
from aotlab.recorder.tape import tensors_in


class Chronicle:
    """Notes views and writes while the traced function runs.

    Parameters
    ----------
    storages
        The keys of the inputs' storages.
    """

    def __init__(self, storages: Collection[int] = ()) -> None:
        self._storages = storages
        self._made: dict[int, tuple[weakref.ref[Tensor], tuple[int, int]]] = {}
        self._origins: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        self._earlier: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], tuple[Any, ...]]] = {}
        self._written: dict[int, int] = {}
        self._moved_unseen: dict[int, int] = {}
        self._used_late: set[int] = set()
        self._detached: dict[int, int] = {}
        self._kept_by: dict[Any, list[Tensor]] = {}

    def made(self, result: Any, args: tuple[Any, ...] = ()) -> None:
        """Note at which version a view of an input is made, and from which of the ``args``."""
        if not self._storages:
            return
        for tensor in [result] if isinstance(result, Tensor) else tensors_in(result):
            if not internals.is_functional(tensor) or internals.storage_key(tensor) not in self._storages:
                continue
            self._note_origin(tensor, args)
            if internals.base_of(tensor) is not None:
                known = self._made.get(id(tensor))
                if known is None or known[0]() is not tensor:
                    self._made[id(tensor)] = weakref.ref(tensor), self._moment(tensor)

    def _note_origin(self, view: Tensor, args: tuple[Any, ...]) -> None:
        known = self._origins.get(id(view))
        if known is not None and known[0]() is view:
            return
        key = internals.storage_key(view)
        for tensor in tensors_in(args):
            if tensor is view:  # an op in place, or one that returns its argument
                return
            if internals.is_functional(tensor) and internals.storage_key(tensor) == key:
                self._origins[id(view)] = weakref.ref(view), weakref.ref(self.origin_of(tensor))
                if self._is_older(tensor):
                    place = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
                    self._earlier[id(view)] = weakref.ref(view), weakref.ref(tensor), place
                elif self._hangs_on_earlier(tensor):
                    self._earlier[id(view)] = weakref.ref(view), *self._earlier[id(tensor)][1:]
                return

    def origin_of(self, tensor: Tensor) -> Tensor:
        """Return the input of which the program made a view, by one op or several; else the tensor itself."""
        view, origin = self._origins.get(id(tensor), (None, None))
        found = origin() if origin is not None and view is not None and view() is tensor else None
        return tensor if found is None else found

    def earlier_view(self, view: Tensor, others: Collection[Tensor]) -> tuple[Any, ...] | None:
        """Return the place of the earlier view that a view was made of, if there was a write between the two.

        Its shape, strides and offset, that is. The history of the earlier one was made anew by the write, and bypasses
        the input. One that is among ``others``, which are returned too, does not count: at run time the later view is
        made from it.
        """
        if not self._hangs_on_earlier(view):
            return None
        _, reference, place = self._earlier[id(view)]
        earlier = reference()
        return None if any(earlier is other for other in others) else place

    def _hangs_on_earlier(self, view: Tensor) -> bool:
        known = self._earlier.get(id(view))
        return known is not None and known[0]() is view

    def precedes_a_write(self, view: Tensor) -> bool:
        """Tell whether an input was written, or detached in place, after this view of it was made.

        Raises
        ------
        RunEagerly
            It was detached after it, and written before: the epilogue makes views before all changes or after them,
            and one of several views must not be made before a write.
        """
        if not self._is_older(view):
            return False
        known = self._made[id(view)]
        written = known[1][0] == internals.version_of(view) and internals.storage_key(view) in self._written
        if written and internals.is_one_of_several_views(view):
            raise RunEagerly("one of several views is returned, made between a write and a detachment in place")
        return True

    def _is_older(self, view: Tensor) -> bool:
        known = self._made.get(id(view))
        return known is not None and known[0]() is view and known[1] != self._moment(view)

    def uses(self, given: Any) -> None:
        """Note which views of an input that were made before a write are used after it."""
        if self._made:
            for tensor in tensors_in(given):
                if self._is_older(tensor):
                    self._used_late.add(internals.storage_key(tensor))

    def used_late(self, storage: int) -> bool:
        """Tell whether a view of an input was made before a write to its memory and used after it."""
        return storage in self._used_late

    def _moment(self, tensor: Tensor) -> tuple[int, int]:
        return internals.version_of(tensor), self._detached.get(internals.storage_key(tensor), 0)

    def detaches(self, tensor: Tensor) -> None:
        """Note that an input, or a view of it, is detached in place, which moves no version."""
        key = internals.storage_key(tensor)
        self._detached[key] = self._detached.get(key, 0) + 1

    def writes(self, written: Tensor) -> None:
        """Note that an input, or a view of it, is about to be written."""
        if self._storages and internals.is_functional(written):
            self._written.setdefault(internals.storage_key(written), internals.sequence_number())
            if not (torch.is_grad_enabled() and written.requires_grad):
                self.moves_unseen(written)

    def moves_unseen(self, tensor: Tensor) -> None:
        """Note that the version of an input's memory moves without a node of autograd's that says so."""
        self._moved_unseen.setdefault(internals.storage_key(tensor), internals.sequence_number())

    def moved_unseen(self, storage: int) -> int | None:
        """Return the number that the next autograd node would have had when an input first moved like that."""
        return self._moved_unseen.get(storage)

    def first_write(self, wrapper: Tensor) -> int | None:
        """Return the number that the next autograd node would have had at the first write to an input's memory."""
        return self._written.get(internals.storage_key(wrapper))

    def wrote(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note what the op in place on a view keeps."""
        base = internals.base_of(args[0])
        if base is None or not base.requires_grad or not torch.is_grad_enabled():
            return
        kept = _kept(func, args, kwargs)
        if kept:
            self._kept_by[base.grad_fn] = kept

    @property
    def kept_by(self) -> dict[Any, list[Tensor]]:
        """The tensors that autograd's nodes of writes to views keep, as far as torch does not show it."""
        return self._kept_by


def _kept(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return which of its tensors an op in place keeps for its backward, by a look at how it does elsewhere."""
    twins: dict[int, tuple[Tensor, Tensor]] = {}

    def twin(value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in twins:
                like = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                wanted = value is args[0] or value.requires_grad
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
        return []
