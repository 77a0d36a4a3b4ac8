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

And so are views that were made together: a hook on one of them is called when a gradient comes to another.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.recorder.older_views import OlderViews
from aotlab.recorder.signals import RunEagerly
from aotlab.recorder.tape import tensors_in


class Chronicle:
    """Notes views and writes while the traced function runs.

    Parameters
    ----------
    storages
        The keys of the inputs' storages.
    over_others
        The inputs that autograd takes for views of another tensor each, though they have their memory to themselves.
    owners
        The inputs that are views in the trace only, of the memory that they share with others.

    Attributes
    ----------
    older
        The views that a write made older, of inputs and all else.
    keeps_itself
        Whether something was written with itself for an operand: its history keeps it, and so itself, for good.
    orders_uses
        Whether to note when inputs are used, for `is_used_before_a_write`.
    """

    def __init__(
        self, storages: Collection[int] = (), over_others: Sequence[Tensor] = (), owners: Sequence[Tensor] = ()
    ) -> None:
        self._storages = storages
        self._calls = 0
        self._first_uses: dict[int, int] = {}
        self._last_writes: dict[int, int] = {}
        self._over_others = over_others
        self._owners = owners
        self._keeping_nothing: set[Any] = set()
        self._windows: list[tuple[Tensor, int]] = []
        self._made: dict[int, tuple[weakref.ref[Tensor], tuple[int, int]]] = {}
        self._origins: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        self._written: dict[int, int] = {}
        self._written_through: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._stepped: dict[int, weakref.ref[Tensor]] = {}
        self._moved_unseen: dict[int, int] = {}
        self._used_late: dict[int, dict[int, Tensor]] = {}
        self._detached: dict[int, int] = {}
        self._kept_by: dict[Any, list[Tensor]] = {}
        self._kept_themselves_by: dict[Any, list[Tensor]] = {}
        self._apart: dict[int, weakref.ref[Tensor]] = {}
        self._counted: set[int] = set()
        self._fragile: set[int] = set()
        self._viewed_unseen: set[int] = set()
        self._viewed: set[int] = set()
        self._several: list[tuple[Sequence[Tensor], tuple[int, int]]] = []
        self.older = OlderViews()
        self.keeps_itself = False
        self.orders_uses = False

    def made(self, result: Any, args: tuple[Any, ...] = ()) -> None:
        """Note at which version a view of an input is made, and from which of all that the op was given."""
        if isinstance(result, tuple | list) and _are_several_views(result):
            self._several.append((result, self._moment(result[0])))
        self.older.made(result)
        if not self._storages:
            return
        for tensor in [result] if isinstance(result, Tensor) else tensors_in(result):
            if not internals.is_functional(tensor) or internals.storage_key(tensor) not in self._storages:
                continue
            self._note_origin(tensor, args)
            if internals.base_of(tensor) is not None and not any(tensor is item for item in self._over_others):
                known = self._made.get(id(tensor))
                if known is None or known[0]() is not tensor:
                    self._made[id(tensor)] = weakref.ref(tensor), self._moment(tensor)
                    self._viewed.add(internals.storage_key(tensor))
                    if not torch.is_grad_enabled():
                        self._viewed_unseen.add(internals.storage_key(tensor))
                    if not internals.keeps_through_writes(tensor):
                        self._fragile.add(internals.storage_key(tensor))

    def has_fragile_views(self, storage: int) -> bool:
        """Tell whether views of an input were made that must not be used once its version has moved."""
        return storage in self._fragile

    def was_viewed(self, storage: int) -> bool:
        """Tell whether views of an input were made."""
        return storage in self._viewed

    def was_viewed_unseen(self, storage: int) -> bool:
        """Tell whether views of an input were made without autograd; they require grad if its base does."""
        return storage in self._viewed_unseen

    @property
    def several(self) -> list[Sequence[Tensor]]:
        """The views that were made together, where their history is still the one that they were made with."""
        return [views for views, moment in self._several if self._moment(views[0]) == moment]

    def _note_origin(self, view: Tensor, args: tuple[Any, ...]) -> None:
        known = self._origins.get(id(view))
        if known is not None and known[0]() is view:
            return
        key = internals.storage_key(view)
        given = tensors_in(args)
        if any(tensor is view for tensor in given):  # an op in place or with `out=`, or one that returns its argument
            return
        for tensor in given:
            if internals.is_functional(tensor) and internals.storage_key(tensor) == key:
                self._origins[id(view)] = weakref.ref(view), weakref.ref(self.origin_of(tensor))
                return

    def origin_of(self, tensor: Tensor) -> Tensor:
        """Return the input of which the program made a view, by one op or several; else the tensor itself."""
        view, origin = self._origins.get(id(tensor), (None, None))
        found = origin() if origin is not None and view is not None and view() is tensor else None
        return tensor if found is None else found

    def precedes_a_write(self, view: Tensor) -> bool:
        """Tell whether an input was written, or detached in place, after this view of it was made.

        Raises
        ------
        RunEagerly
            It was detached after it, and written before: the epilogue makes views before all changes or after them,
            and one of several views must not be made before a write.
        """
        if not self.is_older(view):
            return False
        known = self._made[id(view)]
        written = known[1][0] == internals.version_of(view) and internals.storage_key(view) in self._written
        if written and internals.is_one_of_several_views(view):
            raise RunEagerly("one of several views is returned, made between a write and a detachment in place")
        return True

    def is_older(self, view: Tensor) -> bool:
        """Tell whether a view of an input was made before its memory was written, or detached in place."""
        known = self._made.get(id(view))
        return known is not None and known[0]() is view and known[1] != self._moment(view)

    def uses(self, given: Any) -> None:
        """Note which views of an input that were made before a write are used after it, and when inputs are used."""
        if self.orders_uses:
            self._calls += 1
            for tensor in filter(internals.is_functional, tensors_in(given)):
                self._first_uses.setdefault(internals.storage_key(tensor), self._calls)
        if self._made:
            for tensor in tensors_in(given):
                if self.is_older(tensor):
                    self._used_late.setdefault(internals.storage_key(tensor), {})[id(tensor)] = tensor

    def used_late(self, storage: int) -> bool:
        """Tell whether a view of an input was made before a write to its memory and used after it."""
        return storage in self._used_late

    def is_used_before_a_write(self, storage: int, other: int) -> bool:
        """Tell whether an input was used before the last change in place of another, in other memory."""
        return self._first_uses.get(storage, math.inf) < self._last_writes.get(other, 0)

    def views_used_late(self, storage: int) -> list[Tensor]:
        """Return those views."""
        return list(self._used_late.get(storage, {}).values())

    def _moment(self, tensor: Tensor) -> tuple[int, int]:
        return internals.version_of(tensor), self._detached.get(internals.storage_key(tensor), 0)

    def windows(self, window: Tensor, source: Tensor) -> None:
        """Note a tensor with a history that was made by sizes and strides of one that leaves out elements."""
        if internals.is_functional(window) and window.requires_grad and not internals.is_dense(source):
            self._windows.append((window, internals.version_of(window)))

    @property
    def wrote_below_windows(self) -> bool:
        """Whether such windows were made of what was written afterwards.

        Their history is made anew then, straight from the base, and so reaches the elements that were left out.
        """
        return any(internals.version_of(window) != version for window, version in self._windows)

    def detaches(self, tensor: Tensor) -> None:
        """Note that an input, or a view of it, is detached in place, which moves no version."""
        key = internals.storage_key(tensor)
        self._detached[key] = self._detached.get(key, 0) + 1

    def writes(self, written: Tensor) -> None:
        """Note that an input, or a view of it, is about to be written."""
        if self._storages and internals.is_functional(written):
            self._written.setdefault(internals.storage_key(written), internals.sequence_number())
            self._last_writes[internals.storage_key(written)] = self._calls
            origin = self.origin_of(written)
            self._written_through.setdefault(id(origin), (weakref.ref(origin), len(self._written_through)))
            if not self._counts_apart(written):
                self._counted.add(internals.storage_key(written))
            if not (torch.is_grad_enabled() and written.requires_grad):
                self.moves_unseen(written)

    def takes(self, result: Any, given: Any, *, data: bool) -> None:
        """Note an alias that counts its writes apart: what ``.data`` gives, as ``data`` says, or a view of such a one.

        Under inference_mode no version tells.
        """
        operands = tensors_in(given)
        for tensor in tensors_in(result):
            if not internals.is_functional(tensor) or any(tensor is each for each in operands):
                continue
            key = internals.storage_key(tensor)
            if data or any(self._counts_apart(each) and internals.storage_key(each) == key for each in operands):
                self._apart[id(tensor)] = weakref.ref(tensor)

    def _counts_apart(self, tensor: Tensor) -> bool:
        known = self._apart.get(id(tensor))
        return known is not None and known() is tensor

    def wrote_apart_only(self, storage: int) -> bool:
        """Tell whether an input was written, and only through aliases that count apart."""
        return storage in self._written and storage not in self._counted

    def moves_unseen(self, tensor: Tensor) -> None:
        """Note that the version of an input's memory moves without a node of autograd's that says so."""
        self._moved_unseen.setdefault(internals.storage_key(tensor), internals.sequence_number())

    def moved_unseen(self, storage: int) -> int | None:
        """Return the number that the next autograd node would have had when an input first moved like that."""
        return self._moved_unseen.get(storage)

    def first_write(self, wrapper: Tensor) -> int | None:
        """Return the number that the next autograd node would have had at the first write to an input's memory."""
        return self._written.get(internals.storage_key(wrapper))

    def place_among_writes(self, wrapper: Tensor) -> float:
        """Return how many tensors had been written before an input first was, itself or a view of it; else infinity."""
        known = self._written_through.get(id(wrapper))
        return known[1] if known is not None and known[0]() is wrapper else math.inf

    def steps(self, tensor: Tensor) -> None:
        """Note that the sizes or strides of a tensor, or its history, are changed in place."""
        self._stepped.pop(id(tensor), None)
        self._stepped[id(tensor)] = weakref.ref(tensor)
        self._last_writes[internals.storage_key(tensor)] = self._calls

    def place_among_steps(self, wrapper: Tensor) -> int:
        """Return how many tensors had been changed like that for the last time when an input was; 0 if it was not."""
        order = list(self._stepped)
        known = self._stepped.get(id(wrapper))
        return order.index(id(wrapper)) if known is not None and known() is wrapper else 0

    def wrote(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, required_grad: bool) -> None:
        """Note what the op in place on a view keeps; ``required_grad`` says what the view did before."""
        if torch.is_grad_enabled() and any(tensor is args[0] for tensor in tensors_in((args[1:], kwargs))):
            self.keeps_itself = True
        base = internals.base_of(args[0])
        if base is None or not base.requires_grad or not torch.is_grad_enabled():
            return
        kept = _kept(func, args, kwargs, required_grad=required_grad)
        if kept:
            self._kept_by[base.grad_fn] = [tensor for tensor, _ in kept]
            self._kept_themselves_by[base.grad_fn] = [tensor for tensor, itself in kept if itself]
        elif kept is not None and any(args[0] is owner for owner in self._owners):
            self._keeping_nothing.add(base.grad_fn)

    @property
    def keeping_nothing(self) -> set[Any]:
        """The nodes of writes to inputs that are no views in eager, where autograd so has nothing to let go of."""
        return self._keeping_nothing

    @property
    def kept_by(self) -> dict[Any, list[Tensor]]:
        """The tensors that autograd's nodes of writes to views keep, as far as torch does not show it."""
        return self._kept_by

    @property
    def kept_themselves_by(self) -> dict[Any, list[Tensor]]:
        """Those of them that the nodes keep themselves, not as aliases."""
        return self._kept_themselves_by


def _are_several_views(result: Sequence[Any]) -> bool:
    plain = len(result) > 1 and all(isinstance(each, Tensor) and internals.is_functional(each) for each in result)
    return plain and result[0].requires_grad and internals.is_one_of_several_views(result[0])


def _kept(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, required_grad: bool
) -> list[tuple[Tensor, bool]] | None:
    """Return which of its tensors an op in place keeps for its backward, by a look at how it does elsewhere.

    With each there is whether it is kept itself; None if that cannot be seen.
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
            saved = internals.saved_tensors_of(twin(args[0]).grad_fn)
            keys = {internals.storage_key(kept) for kept in saved}
            return [
                (tensor, tensor is not args[0] and any(own is kept for kept in saved))
                for tensor, own in twins.values()
                if internals.storage_key(own) in keys
            ]
    except Exception:  # noqa: BLE001  # an op that has other wishes for its arguments
        return None
