"""Backwards under vmap, one sample after the other.

    torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)

calls the backward of ``y`` once, with a tensor that stands for three. Compiled kernels cannot take it, as it has no
memory, nor autograd nodes of ours, whose results would have a history that the samples know nothing of. For these the
vmap is left, each sample taken by itself, and what comes of them put together again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.errors import TransformError
from aotlab.runtime.saved import SavedValues

#: Takes tensors, or None where there is none, and returns the like.
Function = Callable[[list[Tensor | None]], list[Tensor | None]]


def by_samples(function: Function, saved: SavedValues, values: list[Tensor | None], name: str) -> list[Tensor | None]:
    """Call ``function`` with the backward's values, or each sample's; `TransformError`: another transform than vmap."""
    if internals.forward_ad_active() and any(map(internals.has_tangent, values)):
        raise TransformError(
            f"the backward of compiled `{name}` was called with a dual tensor",
            why="compiled derivatives have no forward mode",
            suggestion='compile with backend="eager" and leave out create_graph, or call the original function',
        )
    if not internals.transforms_active() and not any(v is not None and internals.is_batched(v) for v in values):
        return function(values)
    before = saved.snapshot()

    def of_one(given: list[Tensor | None]) -> list[Tensor | None]:
        saved.restore(before)
        return function(given)

    return _for_each_sample(of_one, values, name)


def _for_each_sample(function: Function, values: list[Tensor | None], name: str) -> list[Tensor | None]:
    """Call ``function`` outside of all transforms, once for each sample; the samples' results are put together."""
    older = any(v is not None and internals.is_older_batched(v) for v in values)
    level = internals.older_batch_level() if older else internals.batch_level()
    if level is None:
        if not internals.transforms_active():
            return function(values)
        below = [None if value is None else internals.below_innermost_transform(value) for value in values]
        if any((value is None) != (v is None) for value, v in zip(values, below, strict=True)):
            raise TransformError(
                f"the backward of compiled `{name}` was called under grad, vjp or jvp of torch.func",
                why="it has no derivatives of their kind",
                suggestion="call the compiled function inside of the transform, or call the original function",
            )
        with internals.innermost_transform_left():
            return _for_each_sample(function, below, name)
    with_samples = [None if value is None else level.taken_apart(value) for value in values]
    counts = [len(samples) for samples in with_samples if samples is not None]
    with level.left():
        if not counts:
            return _for_each_sample(function, values, name)
        found = []
        for n in range(counts[0]):
            of_one = [v if s is None else s[n] for v, s in zip(values, with_samples, strict=True)]
            found.append(_for_each_sample(function, of_one, name))
        # what is None is None for all of them: that depends on what is defined, not on values
        stacked = [None if None in of_all else torch.stack(of_all) for of_all in zip(*found, strict=True)]
    return [None if samples is None else level.put_together(samples) for samples in stacked]
