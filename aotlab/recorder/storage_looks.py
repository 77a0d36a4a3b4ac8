"""What a traced function learns of the place of its inputs in the caller's storages.

    x = buffer[2:]
    x.mul_(2)
    x.storage_offset()               # 2, also where the written x is a tensor of its own in the trace
    x.as_strided((2,), (1,))         # a window that reaches no memory but that of x

The trace has its own memory for each input: at the caller's offset as long as it was not written, then at the beginning
of a new storage; inputs that share memory lie in a base, which begins a storage too. So an offset is told as the
caller's tensor has it, and the entry is guarded to be for inputs with that offset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.recorder.places import user_line
from aotlab.recorder.signals import NeedsInputsApart, RunEagerly

#: Of windows with gaps each element is looked at, if they are not more than this.
_MOST_ELEMENTS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in its storage in the trace, in bytes, and how."""

    start: int
    stop: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    @property
    def has_gaps(self) -> bool:
        count = 1
        for size in self.shape:
            count *= size
        return count * self.itemsize != self.stop - self.start

    def elements(self) -> set[int]:
        """Return the first byte of each element, counted from that of the first."""
        found = [0]
        for size, step in zip(self.shape, self.stride, strict=True):
            found = [byte + i * step * self.itemsize for byte in found for i in range(size)]
        return set(found)


def _place(tensor: Tensor) -> _Place:
    size, shape, stride = tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride())
    start = int(tensor.storage_offset()) * size
    last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return _Place(start, start + (last + 1) * size if tensor.numel() else start, shape, stride, size)


@dataclass(frozen=True, slots=True)
class Ground:
    """Memory that inputs have in the trace.

    ``members`` are the kept inputs that lie in it, ``name`` that of the first; ``wrapper`` is the input, or the base of
    several, which is at ``start`` in the caller's storage, in bytes (None: they have several storages).
    """

    members: tuple[int, ...]
    name: str
    wrapper: Tensor
    is_base: bool = False
    start: int | None = None
    place: _Place = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", _place(self.wrapper))

    def moved(self) -> int:
        """Return how many bytes the caller's memory lies behind that of the trace, each in its storage."""
        wrapper, place = self.wrapper, self.place
        if self.is_base:
            if self.start is None:
                raise NeedsInputsApart(f"the offset of an input whose memory has several storages, at {user_line()}")
            return self.start
        if not place.start or not internals.has_data_mutation(wrapper):
            return 0
        if internals.has_metadata_mutation(wrapper):
            raise RunEagerly(f"the offset of `{self.name}`, which is written and changed, at {user_line()}")
        internals.sync(wrapper)
        return place.start - int(internals.from_functional(wrapper).storage_offset()) * place.itemsize


class StorageLooks:
    """Answers for one trace; ``offsets_read`` has the inputs whose offset mattered."""

    def __init__(self, grounds: Mapping[int, Ground]) -> None:
        self.grounds = grounds
        self.offsets_read: set[int] = set()
        self._fixed: dict[int, str] = {}  # memory that must not be written any more, and why
        self._unfolded: set[int] = set()  # memory that must not be written through `unfold`
        self._pinned: list[Tensor] = []
        self._writes: dict[int, list[tuple[Tensor, int, int]]] = {}  # memory → what was written, from where to where

    def offset(self, tensor: Tensor) -> int:
        """Return the offset that the caller's tensor would tell."""
        ground = self._look(tensor)
        if ground is None:
            return int(tensor.storage_offset())
        moved = ground.moved()
        internals.sync(tensor)
        return int(internals.from_functional(tensor).storage_offset()) + moved // tensor.element_size()

    def as_strided(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take a window of a tensor, if that is in memory that the graph sees."""
        tensor = args[0]
        ground = self._look(tensor)
        if ground is None:
            result = func(*args, **kwargs)
            if _place(result).stop > tensor.untyped_storage().nbytes():  # fake tensors do not look
                raise RunEagerly(f"`as_strided` reaches beyond the storage, at {user_line()}")
            return result
        key, given = internals.storage_key(tensor), kwargs.get("storage_offset", args[3] if len(args) > 3 else None)
        if ground.is_base:
            return self._as_strided_in_base(func, args, kwargs, given)
        if given is not None and given == self.offset(tensor):
            # without a number it keeps its meaning when the memory gets new values, at another offset
            args, kwargs = args[:3], {name: value for name, value in kwargs.items() if name != "storage_offset"}
        elif given is not None and ground.place.start:
            if ground.moved():
                raise RunEagerly(f"`as_strided` counts from elsewhere in what was written, at {user_line()}")
            self._fixed[key] = "is viewed by `as_strided` with an offset of its own"
        # torch's out-of-place form of a write to such a window wants more of the memory below
        if ground.place.has_gaps:
            self._fixed[key] = "has gaps, is viewed by `as_strided`"
        elif ground.wrapper.requires_grad and not ground.wrapper.is_contiguous():
            self._fixed[key] = "is not contiguous, requires grad, is viewed by `as_strided`"
        result = func(*args, **kwargs)
        self.check_window(result)
        return result

    def _as_strided_in_base(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: int | None) -> Any:
        """Take a window of a tensor in memory that inputs share; of nothing but what that tensor shows."""
        tensor, reason = args[0], f"`as_strided` of an input that shares memory with another, at {user_line()}"
        if given is not None:
            if given != self.offset(tensor):
                raise NeedsInputsApart(reason)
            args, kwargs = args[:3], {name: value for name, value in kwargs.items() if name != "storage_offset"}
        internals.sync(tensor)
        result = func(*args, **kwargs)
        if max(result.numel(), tensor.numel()) > _MOST_ELEMENTS or not result.numel():
            raise NeedsInputsApart(reason)
        own, whole = _place(result), _place(tensor)
        if own.start != whole.start or not own.elements() <= whole.elements():
            raise NeedsInputsApart(reason)
        # in a written base the window would have to be made again through the views that lead to the tensor
        self._fixed[internals.storage_key(tensor)] = "shares memory with another input, is viewed by `as_strided`"
        return result

    def unfold(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take windows of a tensor; where they leave elements out or overlap, no write to them can be traced.

        Functionalization makes a tensor anew from its written windows alone, and zeros of what lies in none.
        """
        result, (tensor, *given) = func(*args, **kwargs), args
        names = ("dimension", "size", "step")
        dimension, size, step = (given[i] if i < len(given) else kwargs[name] for i, name in enumerate(names))
        length = tensor.shape[dimension] if tensor.dim() else 1
        if size != step or length % size:
            self._unfolded.add(internals.storage_key(result))
            self._pinned.append(result)  # the number of its memory is not to be another's
        return result

    def as_dtype(self, tensor: Tensor, view: Any) -> None:
        """Note that the bytes of a tensor are seen as another dtype, by a view that was made of it.

        A write through the one would put bytes other than 0 and 1 into a bool tensor, and copies of it take them for 1.

        Raises
        ------
        RunEagerly
            The elements of the other dtype are larger, and do not begin where eager wants them to.
        """
        if not isinstance(view, Tensor):
            return
        larger = view.element_size() > tensor.element_size() and self.grounds.get(internals.storage_key(tensor))
        if larger and self.offset(tensor) % (view.element_size() // tensor.element_size()):
            raise RunEagerly(f"a tensor at an odd place in its memory is viewed as {view.dtype}, at {user_line()}")
        if (view.dtype is torch.bool) != (tensor.dtype is torch.bool):
            self.is_partly_bool(internals.storage_key(tensor))
            self._pinned.append(view)

    def is_partly_bool(self, key: int) -> None:
        """Note that some of the tensors in a memory are of bools."""
        self._fixed[key] = "is seen as bool and as another dtype"

    def check_window(self, window: Tensor) -> None:
        """Look at a window of an input.

        Raises
        ------
        RunEagerly
            It reaches memory that the graph does not see.
        """
        ground = self._look(window)
        if ground is None or not window.numel():
            return
        place, own, moved = ground.place, _place(window), ground.moved()
        inside = place.start <= own.start + moved and own.stop + moved <= place.stop
        if inside and place.has_gaps:
            if max(window.numel(), ground.wrapper.numel()) > _MOST_ELEMENTS or own.itemsize != place.itemsize:
                raise RunEagerly(f"`as_strided` of a large input with gaps, at {user_line()}")
            shift = own.start + moved - place.start
            inside = {byte + shift for byte in own.elements()} <= place.elements()
        if not inside:
            raise RunEagerly(f"`as_strided` reaches memory beside `{ground.name}`, at {user_line()}")

    def note_writes(self, written: Sequence[Tensor]) -> None:
        """Note which bytes of a base were written."""
        for tensor in written:
            if not internals.is_functional(tensor):
                continue
            key = internals.storage_key(tensor)
            if key in self.grounds and self.grounds[key].is_base:
                place = _place(tensor)
                self._writes.setdefault(key, []).append((tensor.detach(), place.start, place.stop))

    def writes_to(self, key: int, windows: Sequence[tuple[Tensor, int]]) -> list[tuple[int, int]] | None:
        """Return the bytes of a base that were written; None if its ``windows`` count more writes than were noted.

        Each window comes with its version at the beginning.
        """
        noted = self._writes.get(key, [])
        for window, version in windows:
            counted = sum(tensor is window or internals.share_version(tensor, window) for tensor, _, _ in noted)
            if window.is_inference() or internals.version_of(window) - version != counted:
                return None
        return [(start, stop) for _, start, stop in noted]

    def check_writes(self, written: Sequence[Tensor]) -> None:
        """Leave to eager a write after which a window would not be what it was.

        Raises
        ------
        RunEagerly
            It would not.
        """
        for tensor in written:
            if not internals.is_functional(tensor):
                continue
            if internals.is_seen_through(tensor, "expand"):
                # functionalization adds the difference to what was there, which rounds
                raise RunEagerly(f"a part of an expanded tensor is written, at {user_line()}")
            key = internals.storage_key(tensor)
            why = self._fixed.get(key)
            if why is None and key in self._unfolded and internals.is_seen_through(tensor, "unfold"):
                why = "is viewed by `unfold` in windows that leave out or overlap"
            if why is not None:
                ground = self.grounds.get(key)
                name = "an intermediate" if ground is None else f"`{ground.name}`"
                raise RunEagerly(f"{name} {why} and is written, at {user_line()}")

    def _look(self, tensor: Tensor) -> Ground | None:
        ground = self.grounds.get(internals.storage_key(tensor))
        if ground is not None:
            self.offsets_read.update(ground.members)
        return ground
