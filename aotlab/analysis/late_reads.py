"""Saved values that a backward reads as they are by then, whatever was written since.

    @staticmethod
    def forward(ctx, x, w):
        ctx.w = w                   # not save_for_backward
        return x * w

Autograd neither compares versions of such a tensor nor hands it to ``saved_tensors_hooks``: the backward sees what the
caller has written to ``w`` since. A checkpoint's function likewise sees it of all that it was not given. So a saved
value is read late where every op of the backward that takes it was called by such a node, from the very memory. What
the node keeps as autograd does besides is watched by itself, for the nodes that keep it.

Who is given other memory (``x.data = y``) takes along what reads ``x`` itself, but not what reads a view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from aotlab import torch_internals as internals
from aotlab.ir.graphs import READS_LATE, is_view, phase_of, placeholders
from aotlab.recorder import Tape, tensors_in


def read_late(tape: Tape) -> frozenset[int]:
    """Return the keys of the storages that some op of the backward reads late."""
    late = (operation for operation in tape.operations if operation.reads_late)
    return frozenset(
        internals.storage_key(tensor)
        for operation in late
        for tensor in tensors_in((operation.args, operation.kwargs))
        if tensor.layout == torch.strided
    )


class ReadersNoted(TorchFunctionMode):
    """Notes by which tensors custom functions and checkpoints read the memory of inputs in a backward that is traced.

    Parameters
    ----------
    inputs
        The wrappers that stand for the inputs.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self._wrappers = list(inputs)
        self._inputs = {id(wrapper): k for k, wrapper in enumerate(self._wrappers)}
        self._made: dict[int, Tensor] = {}
        self._themselves: set[int] = set()
        self._aliases: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Look at what a function is given, and remember what the backward makes itself.

        Of what it saves, autograd makes aliases, too, at which a checkpoint looks and which it detaches.
        """
        given = [tensor for tensor in tensors_in((args, kwargs or {})) if internals.is_functional(tensor)]
        try:
            result = func(*args, **(kwargs or {}))
        except BaseException:  # so a checkpoint ends its function when it has all that it needs
            self._note(given)
            raise
        made = tensors_in(result)
        if made and not (func is Tensor.detach and self._aliases_among(given)):
            self._note(given)
            known = {id(tensor) for tensor in given}
            self._made.update((id(tensor), tensor) for tensor in made if id(tensor) not in known)
        return result

    def _note(self, given: Sequence[Tensor]) -> None:
        aliases = self._aliases_among(given)
        self._aliases.update(map(internals.storage_key, aliases))
        self._themselves.update(self._inputs[id(tensor)] for tensor in given if id(tensor) in self._inputs)

    def _aliases_among(self, given: Sequence[Tensor]) -> list[Tensor]:
        return [tensor for tensor in given if id(tensor) not in self._made and id(tensor) not in self._inputs]

    @property
    def themselves(self) -> frozenset[int]:
        """The numbers of the inputs that are read themselves."""
        return frozenset(self._themselves)

    @property
    def by_aliases(self) -> frozenset[int]:
        """Those whose memory is read by views that the forward made, or by what ``detach`` made of them."""
        wrappers = enumerate(self._wrappers)
        return frozenset(k for k, wrapper in wrappers if internals.storage_key(wrapper) in self._aliases)


def saved_properly(nodes: Collection[object]) -> frozenset[int]:
    """Return the keys of the storages of what autograd nodes keep as autograd does, as the trace knows it."""
    kept = (t for node in nodes for t in (*internals.saved_tensors_of(node), *internals.kept_by_checkpoint(node)))
    return frozenset(
        internals.storage_key(internals.from_functional(tensor)) for tensor in kept if internals.is_functional(tensor)
    )


def only_read_late(graph: fx.Graph, numbers: Sequence[int], lent: Collection[int]) -> frozenset[int]:
    """Return those of the saved values, by their ``numbers``, that the graph of a backward reads late and not else.

    ``lent`` are those that may be.
    """
    if not lent:
        return frozenset()
    pairs = zip(numbers, placeholders(graph), strict=False)
    return frozenset(n for n, node in pairs if n in lent and _is_read_late(node, node.meta.get("val")))


def _is_read_late(node: fx.Node, value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided or not node.users:
        return False
    key = internals.storage_key(value)
    return all(
        key in user.meta.get(READS_LATE, ())
        or (is_view(user) and phase_of(user) == "forward" and _is_read_late(user, value))
        for user in node.users
    )
