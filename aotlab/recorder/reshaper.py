"""Steps that change a tensor other than in its values, and what the guard asks of who writes them down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from aotlab.recorder.memory import WholeStorages

RESIZES = frozenset((Tensor.resize_, Tensor.resize_as_, torch.resize_as_))
WINDOWS = frozenset((Tensor.as_strided_, torch.as_strided_))
DETACHES = frozenset((Tensor.detach_, torch.detach_))
RESHAPES_IN_PLACE = RESIZES | WINDOWS | frozenset(
    (
        Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_, Tensor.unsqueeze_,
        Tensor.detach_, torch.detach_, Tensor.set_,
    )
)  # fmt: skip
#: The same steps as they are called below Python's methods.
METHODS_OF_STEPS: dict[Any, Any] = {
    op: method
    for method in RESHAPES_IN_PLACE
    if (packet := getattr(torch.ops.aten, method.__name__, None)) is not None and method is not Tensor.set_
    for op in (packet, *(getattr(packet, overload) for overload in packet.overloads()))
}


class Reshaper(Protocol):
    """Runs what changes an input other than in its values, and remembers it; see `aotlab.recorder.reshapes`."""

    unseen: list[tuple[Tensor, tuple[Any, int], int]]
    moved: bool

    def is_input(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` is an input itself."""

    def is_inference(self, tensor: Tensor) -> bool:
        """Tell whether ``tensor`` has the memory of an input that is an inference tensor."""

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of an input, None for other tensors."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take a step."""

    def narrows(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tell whether a tensor is resized to its first elements."""

    def run_in(self, memory: WholeStorages, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Take a step of a tensor in a base that is a whole storage."""

    def set_to_itself(self, tensor: Tensor, run: Callable[[], Tensor]) -> Tensor:
        """Let ``run`` give a tensor the memory that it has."""

    def give(self, tensor: Tensor, source: Tensor, how: str) -> None:
        """Give a tensor the memory of an intermediate."""

    def leaves_its_memory(self, tensor: Tensor, source: Tensor) -> None:
        """Look at a tensor before ``set_`` gives it the memory of another one."""

    def written(self, tensor: Tensor) -> None:
        """Look at a tensor that was written."""


def keeps_size(tensor: Tensor, *size: Any, **others: Any) -> bool:
    """Tell whether ``resize_`` or ``resize_as_`` is asked for the size that ``tensor`` has."""
    if len(size) == 1 and not others:
        wanted = size[0].shape if isinstance(size[0], Tensor) else size[0]
        return (tuple(wanted) if isinstance(wanted, (tuple, list)) else (wanted,)) == tuple(tensor.shape)
    return not others and size == tuple(tensor.shape)
