"""The memory of the inputs: which bytes are written, and which must not be, because of how they were looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.trace.places import user_line


def span(tensor: Tensor) -> tuple[int, int]:
    """Return where the elements of a tensor begin in its storage, and where they end, in bytes."""
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size if tensor.numel() else start


class Ground(NamedTuple):
    """Memory that inputs have in the trace.

    ``members`` are the kept inputs in it, ``name`` that of the first; ``wrapper`` is the input, or the base of several.
    """

    members: tuple[int, ...]
    name: str
    wrapper: Tensor
    is_base: bool = False


class StorageLooks:
    """Answers for one trace; ``offsets_read`` has the inputs whose offset mattered."""

    def __init__(self, grounds: Mapping[int, Ground]) -> None:
        self.grounds = grounds
        self.offsets_read: set[int] = set()
        self._fixed: dict[int, str] = {}  # memory that must not be written any more, and why
        self._pinned: list[Tensor] = []  # so that the key of such memory does not become another's

    def as_dtype(self, tensor: Tensor, view: Tensor) -> None:
        """Note that the bytes of a tensor are seen by a view, as another dtype perhaps.

        Larger elements have to begin where eager wants them to. A write through the one would put bytes other than 0
        and 1 into a bool tensor, and copies of it take them for 1.
        """
        ground = self.grounds.get(internals.storage_key(tensor))
        if ground is not None and view.element_size() > tensor.element_size():
            if ground.is_base or span(ground.wrapper)[0] % view.element_size():
                raise RunEagerly(f"a part of some memory is viewed as {view.dtype}, at {user_line()}")
            self.offsets_read.update(ground.members)
        if (view.dtype is torch.bool) != (tensor.dtype is torch.bool):
            self.fix(view, "is seen as bool and as another dtype")

    def check_writes(self, written: Sequence[Tensor]) -> None:
        """Leave to eager a write after which a window would not be what it was."""
        for tensor in filter(internals.is_functional, written):
            for way in ("expand", "unfold"):
                if internals.is_seen_through(tensor, way):
                    # functionalization adds the difference to what was there, which rounds, or has zeros beside it
                    raise RunEagerly(f"a part of an {way}ed tensor is written, at {user_line()}")
            key = internals.storage_key(tensor)
            if key in self._fixed:
                ground = self.grounds.get(key)
                name = "an intermediate" if ground is None else f"`{ground.name}`"
                raise RunEagerly(f"{name} {self._fixed[key]} and is written, at {user_line()}")

    def fix(self, view: Tensor, why: str) -> None:
        """Leave later writes to the memory of a view to eager."""
        self._fixed[internals.storage_key(view)] = why
        self._pinned.append(view)
