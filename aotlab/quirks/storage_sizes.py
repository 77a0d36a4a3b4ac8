"""Storages of arguments that are freed and allocated again, as fully sharded training (FSDP) does with parameters.

    resize_ = torch.ops.inductor.resize_storage_bytes_    # Dynamo calls it for ``w.untyped_storage().resize_(size)``
    resize_(w, w.nbytes)                                   # allocate the memory of the parameter `w`
    with torch.no_grad():
        w.copy_(gathered)
    y = x @ w
    resize_(w, 0)                                          # free it

The graph is functional, so it does not need the storage of an argument that it overwrites. The prologue allocates the
memory, so that the graph or the epilogue can write it. The epilogue frees it. Eager reads undefined values between an
allocation and a write, so these values need not be the same.

The backward of a custom Function may also allocate, write and free the storage of an argument. Then
`aotlab.derivatives.backwards` allocates the memory before the graph of the backward runs, and frees it afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.guards.user_code import user_line
from aotlab.runtime.draft import Draft
from aotlab.runtime.emitting_quirk import EmittingQuirk, Point
from aotlab.trace.boundary import RESIZES_STORAGE
from aotlab.trace.escapes import EscapeGuard, Handler
from aotlab.trace.findings import Findings


class StorageSizes(EmittingQuirk):
    """Allocates the storages of arguments in the prologue, and frees them in the epilogue."""

    name = "storage_sizes"

    def __init__(self) -> None:
        self._allocated: set[int] = set()
        self._freed: set[int] = set()
        self._storages: set[int] = set()

    def claims(self) -> Mapping[Any, Handler]:
        return dict.fromkeys(RESIZES_STORAGE, self._resize)

    def _resize(self, guard: EscapeGuard, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensor, size = args if len(args) == 2 else (args[0], kwargs["new_size"])
        item = guard.inputs.get(id(tensor))
        frees = size == 0
        fits = (frees or size == tensor.numel() * tensor.element_size()) and tensor.storage_offset() == 0
        if fits and id(tensor) in guard.writable:  # in a backward
            guard.resized[guard.writable[id(tensor)]] = frees
            return
        if item is None or item.base is not None or item.takes_memory or not fits:
            raise RunEagerly("resizes-storage", op="resize_storage_bytes_", at=user_line())
        k = next(k for k, each in enumerate(guard.inputs.values()) if each is item)
        self._storages.add(item.storage)
        (self._freed if frees else self._allocated).add(k)
        if not frees:
            self._freed.discard(k)

    def check(self, findings: Findings) -> None:
        """Run eagerly if an output shares memory with a freed argument."""
        if any(
            internals.is_functional(tensor) and internals.storage_key(tensor) in self._storages
            for tensor in findings.outputs.tensors.values()
        ):
            raise RunEagerly("resizes-storage", op="resize_storage_bytes_")

    def emit(self, draft: Draft, at: Point) -> None:
        for k in sorted(self._allocated if at == "prologue" else self._freed):
            size = f"{draft.kept(k)}.nbytes" if at == "prologue" else "0"
            draft.w.add(f"{draft.kept(k)}.untyped_storage().resize_({size})")
