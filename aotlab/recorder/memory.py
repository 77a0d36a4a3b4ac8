"""Inputs in a base that is a whole storage, where each window is made from the base itself.

    v = x.expand(3, 4)[0]
    v.mul_(2)                        # in eager, this writes x; here, a window of the base that lies where v does
    v.resize_(100)                   # the storage grows, for all that look at it

Functionalization makes a tensor anew from what was written through its views, view by view. It cannot do so through
windows that overlap themselves, nor through ``as_strided`` behind another view, and it takes a tensor that grows for
another one. Where inputs require no grad there is nothing that depends on the views between: each write goes to a
window of the base with the place, sizes and strides of the tensor that is written, and all others are read from the
base again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.recorder.places import user_line
from aotlab.recorder.signals import NeedsRoom, RunEagerly
from aotlab.recorder.storage_looks import Ground


def place_in(base: Tensor, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Make a window of a one-dimensional base, by nothing that cannot be written through.

    Raises
    ------
    RunEagerly
        The base has other elements, which are no bytes.
    """
    if dtype == base.dtype:
        return base.as_strided(tuple(shape), tuple(stride), offset)
    if base.dtype != torch.uint8:
        raise RunEagerly("the memory of an input is viewed as another dtype and used in place")
    size = dtype.itemsize
    steps = [step * size for step in stride]
    return base.as_strided((*shape, size), (*steps, 1), offset * size).view(dtype).select(-1, 0)


class WholeStorages:
    """What a trace does with tensors in such bases."""

    def __init__(self, grounds: Mapping[int, Ground]) -> None:
        self._grounds = {key: ground for key, ground in grounds.items() if ground.whole}

    def ground(self, tensor: Any) -> Ground | None:
        """Return the base that a tensor lies in; None if it lies in none of these."""
        if not self._grounds or not isinstance(tensor, Tensor) or not internals.is_functional(tensor):
            return None
        return self._grounds.get(internals.storage_key(tensor))

    def window(self, tensor: Tensor, *, of_one_value: bool) -> Tensor:
        """Return a window of its base that lies where ``tensor`` does, with a version counter of its own.

        ``of_one_value`` says that all of it is about to be written with one value.

        Raises
        ------
        RunEagerly
            Two of its elements may be one in memory: which is written last is the kernel's choice, and whether it reads
            what the other wrote.
        """
        ground = self._ground_of(tensor)
        shape, stride, offset = _layout(tensor)
        if not of_one_value and may_overlap_itself(shape, stride):
            raise RunEagerly(f"windows that may overlap are written in place, at {user_line()}")
        return place_in(ground.wrapper.data, tensor.dtype, shape, stride, offset)

    def wrote(self, tensor: Tensor, window: Tensor, version: int) -> None:
        """Count for ``tensor`` the writes to its window, which had ``version`` before.

        Raises
        ------
        RunEagerly
            It has a history now.
        """
        if window.requires_grad or window.shape != tensor.shape:
            raise RunEagerly(f"memory of an input is written with something that requires grad, at {user_line()}")
        for _ in range(0 if tensor.is_inference() else max(1, internals.version_of(window) - version)):
            torch.autograd.graph.increment_version(tensor)

    def as_strided(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Take a window of the memory that a tensor lies in."""
        tensor = args[0]
        ground = self._ground_of(tensor)
        size, stride, given = _window_arguments(args[1:], kwargs)
        _, _, offset = _layout(tensor)
        offset = offset if given is None else given
        self._check_room(ground, tensor, size, stride, offset)
        if not internals.share_version(tensor, ground.wrapper):
            raise RunEagerly(f"`as_strided` of an alias that counts its writes apart, at {user_line()}")
        return place_in(ground.wrapper.detach(), tensor.dtype, size, stride, offset)

    def restride(self, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take ``as_strided_``."""
        ground = self._ground_of(tensor)
        size, stride, given = _window_arguments(args, kwargs)
        _, _, offset = _layout(tensor)
        offset = offset if given is None else given
        self._check_room(ground, tensor, size, stride, offset)
        tensor.as_strided_(size, stride, offset)
        internals.refresh_count(tensor)

    def resize(self, tensor: Tensor, size: tuple[int, ...]) -> None:
        """Take ``resize_`` to another size.

        Raises
        ------
        NeedsRoom
            The storage has to grow for it.
        """
        ground = self._ground_of(tensor)
        _, _, offset = _layout(tensor)
        end = (offset + math.prod(size)) * tensor.element_size() if math.prod(size) else 0
        if end > ground.place.stop:
            raise NeedsRoom(ground.members[0], end)  # and all before it has been seen to fit into what there was
        with internals.outside_of_trace():
            stride = torch.empty(size, device="meta").stride()
        tensor.as_strided_(size, stride, offset)
        internals.refresh_count(tensor)

    def _ground_of(self, tensor: Tensor) -> Ground:
        ground = self.ground(tensor)
        assert ground is not None
        if tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or torch.is_inference_mode_enabled():
            raise RunEagerly(f"memory of an input is used in place in a way that cannot be followed, at {user_line()}")
        if tensor.dtype not in (ground.wrapper.dtype, torch.uint8) and ground.wrapper.dtype != torch.uint8:
            raise RunEagerly(f"memory of an input is viewed as another dtype and used in place, at {user_line()}")
        return ground

    def _check_room(
        self, ground: Ground, tensor: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int
    ) -> None:
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if offset < 0 or (0 not in size and (last + 1) * tensor.element_size() > ground.place.stop):
            raise RunEagerly(f"`as_strided` reaches beyond the storage, at {user_line()}")


def _layout(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    internals.sync(tensor)
    value = internals.from_functional(tensor)
    return tuple(value.shape), tuple(value.stride()), int(value.storage_offset())


def may_overlap_itself(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Tell whether two indices may mean the same element; False only if each step is longer than all smaller ones."""
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _window_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[int, ...], tuple[int, ...], int | None]:
    """Read size, stride and offset from the arguments of ``as_strided``."""
    given = dict(zip(("size", "stride", "storage_offset"), args, strict=False)) | dict(kwargs)
    return tuple(given["size"]), tuple(given["stride"]), given.get("storage_offset")
