"""Versions of tensors, and what autograd knows of views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from aotlab._torch.fake import is_inference

#: How `torch.overrides` names the reading of a version counter, and of what a tensor is a view of.
VERSION_GETTER = Tensor._version.__get__  # type: ignore[attr-defined]  # a getter
BASE_GETTER = Tensor._base.__get__  # type: ignore[union-attr]  # a getter
#: Returns the tensor of which another one is a differentiable view.
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")


def may_be_written(view: Tensor) -> bool:
    """Tell whether autograd lets ``view`` be written in grad mode, by what it is a view of and how it was made."""
    base = _base_with_grad(view)
    return base is None or (not base.is_leaf and keeps_through_writes(view))


def is_hooked(tensor: Tensor) -> bool:
    """Tell whether something is called, or kept, when a gradient comes to a tensor."""
    return bool(tensor._backward_hooks) or tensor.retains_grad


def is_leaf_by_its_base(tensor: Tensor) -> bool:
    """Tell whether a tensor is a leaf that requires grad because what it is a view of does: a view of ``no_grad``."""
    return tensor.is_leaf and tensor.requires_grad and _base_with_grad(tensor) is not None


def keeps_through_writes(view: Tensor) -> bool:
    """Tell whether ``view`` can be used after a write that autograd does not see as it can be before."""
    # with hooks, eager's gradient goes straight to the base then, past these, and ours would not
    # autograd makes the histories of plain views again; for other kinds, eager raises
    kind_of, plain = torch._C._autograd._get_creation_meta, torch._C._autograd.CreationMeta.DEFAULT
    return _base_with_grad(view) is None or bool(not view._backward_hooks and kind_of(view) == plain)


def _base_with_grad(view: Tensor) -> Tensor | None:
    base = view._base
    return base if base is not None and base.requires_grad else None


def is_over_another(tensor: Tensor) -> bool:
    """Tell whether a tensor that requires grad is a view of one that does not, of which its views are views, too."""
    return tensor.requires_grad and tensor._base is not None and not tensor._base.requires_grad


def is_one_of_several_views(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is a view, or a view of one, that was made together with others, as by ``unbind``."""
    return _was_created(tensor, torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE)


def is_call_of_several_views(node: Any) -> bool:
    """Tell whether an autograd node is that of a view op with several results."""
    return node.name() in ("SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0")


def was_made_under_no_grad(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is a view, or a view of one, that was made under `torch.no_grad` or inference mode."""
    kinds = torch._C._autograd.CreationMeta
    return _was_created(tensor, kinds.NO_GRAD_MODE) or _was_created(tensor, kinds.INFERENCE_MODE)


def _was_created(tensor: Tensor, how: Any) -> bool:
    return tensor._base is not None and torch._C._autograd._get_creation_meta(tensor) == how


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor``'s storage was written through tensors that share its counter."""
    return 0 if is_inference(tensor) else int(tensor._version)  # inference tensors do not count


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the versions of many tensors; none of them may be an inference tensor."""
    return [tensor._version for tensor in tensors]


def set_version(tensor: Tensor, version: int) -> None:
    """Set a tensor's version counter."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def share_version(a: Tensor, b: Tensor) -> bool:
    """Tell whether a write to one tensor counts for the other: moves one counter, looks at the other, moves it back."""
    if a is b or is_inference(a) or is_inference(b) or a._version != b._version:
        return a is b
    before = a._version
    set_version(a, before + 1)
    shared = b._version == before + 1
    set_version(a, before)
    return shared


def is_about_a_write(error: BaseException) -> bool:
    """Tell whether autograd raised an error because something that a node kept has been written."""
    return "modified by an inplace operation" in str(error)
