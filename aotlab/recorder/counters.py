"""Version counters that inputs share although no byte of theirs is shared.

    flat = torch.zeros(8)
    a, b = flat[:4].detach().requires_grad_(), flat[4:].detach()
    f(a, b)                        # f computes a.abs(), and writes b

A write to ``b`` counts for ``a`` too: what autograd saved of ``a`` before is spoilt in eager, and its backward raises.
The traced stand-ins of inputs that share no memory have counters of their own, which are moved together here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from aotlab import torch_internals as internals


class SharedCounters(TorchFunctionMode):
    """Moves the counters of traced tensors together, after each function that may have written one of them.

    Parameters
    ----------
    groups
        The tensors that are to count together, group by group; those that share a counter already stand together in a
        tuple. Their counters begin at 0 again. ``given`` says by `id` by how much a tensor's counter was moved for
        writes to others.
    """

    def __init__(self, groups: Sequence[Sequence[tuple[Tensor, ...]]]) -> None:
        super().__init__()
        self._groups = tuple(groups)
        self.given: Counter[int] = Counter()
        for tensor in (tensors[0] for group in groups for tensors in group):
            internals.set_version(tensor, 0)  # autograd tells the number in its error

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and see what it counted; modes see no ``set_``, which comes before the next one."""
        self.level()
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.level()

    def level(self) -> None:
        """Move the counters that are behind."""
        with internals.disable_torch_function():  # other modes refuse to look at versions
            for group in self._groups:
                self._level(group)

    def _level(self, group: Sequence[tuple[Tensor, ...]]) -> None:
        versions = [internals.version_of(tensors[0]) for tensors in group]
        top = max(versions)
        for tensors, version in zip(group, versions, strict=True):
            if version < top:
                self.given.update({id(tensor): top - version for tensor in tensors})
                internals.set_version(tensors[0], top)
