"""Version counters, and the facts that autograd stores about views: the base, and how the view was made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from aotlab._torch.fake import is_inference

#: The functions that a torch function mode gets when a program reads ``tensor._version`` and ``tensor._base``.
VERSION_GETTER = Tensor._version.__get__  # type: ignore[attr-defined]  # a getter
BASE_GETTER = Tensor._base.__get__  # type: ignore[union-attr]  # a getter
#: Autograd calls this when it gives a tensor another history. During the call, the history of a view is locked.
HOOKS_SETTER = Tensor._backward_hooks.__set__  # type: ignore[union-attr]  # a setter
#: Returns the base of a differentiable view, or None for other tensors.
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")


def may_be_written(view: Tensor) -> bool:
    """Tell whether an in-place write to ``view`` in grad mode works in a compiled call as in eager.

    The result is true if ``view`` has no base that requires grad. It is false for a view of a leaf that requires grad,
    because autograd raises an error at the write. For any other view it is the result of `keeps_through_writes`.
    """
    base = _base_with_grad(view)
    return base is None or (not base.is_leaf and keeps_through_writes(view))


def is_strided_view(view: Tensor) -> bool:
    """Tell whether ``base.as_strided(...)`` makes a tensor that autograd treats like ``view``; ``base`` is its base.

    The result is false if a write to ``view`` would not regenerate its history, if hooks are on it, if its elements
    share memory, or if the base has another dtype or ``requires_grad``, or is not contiguous.
    """
    base = view._base
    return (
        base is not None
        and torch._C._autograd._get_creation_meta(view) == torch._C._autograd.CreationMeta.DEFAULT
        and type(base) in (Tensor, torch.nn.Parameter)
        and base.layout == torch.strided
        and (view.dtype, view.requires_grad) == (base.dtype, base.requires_grad)
        and not is_hooked(view)
        and not (view.is_conj() or base.is_conj() or view.is_neg() or base.is_neg() or base.is_inference())
        and base.is_contiguous()
        and base.storage_offset() == 0
    )


def is_hooked(tensor: Tensor) -> bool:
    """Tell whether a tensor has hooks, or retains its gradient."""
    return bool(tensor._backward_hooks) or tensor.retains_grad


def is_leaf(tensor: Tensor) -> bool:
    """Tell whether a tensor is a leaf. If autograd refuses to give the history of a view, return False.

    Autograd does so for a view that was made under ``no_grad`` and whose base was written afterwards.
    """
    try:
        return bool(tensor.is_leaf)
    except RuntimeError:
        return False


def gradient_of(tensor: Tensor) -> Tensor | None:
    """Return the gradient of a leaf; None for another tensor, or if there is no gradient."""
    return tensor.grad if is_leaf(tensor) else None


def is_leaf_by_its_base(tensor: Tensor) -> bool:
    """Tell whether a tensor is a leaf that requires grad only because its base requires grad.

    For example, a view that was made under ``no_grad`` has no ``grad_fn``, but autograd takes its ``requires_grad``
    from its base.
    """
    return is_leaf(tensor) and tensor.requires_grad and _base_with_grad(tensor) is not None


def keeps_through_writes(view: Tensor) -> bool:
    """Tell whether ``view`` has the right autograd history after a write to its memory that autograd did not see.

    After a write, autograd regenerates the history of a plain view from the view's base. For a view that was made under
    ``no_grad``, or by an op that returns several views, autograd raises an error instead.
    """
    # The result is false for a view with hooks. After the write, eager's gradient flows directly to the base, and the
    # hooks do not run. In a compiled call they would run.
    kind_of, plain = torch._C._autograd._get_creation_meta, torch._C._autograd.CreationMeta.DEFAULT
    return _base_with_grad(view) is None or bool(not view._backward_hooks and kind_of(view) == plain)


def _base_with_grad(view: Tensor) -> Tensor | None:
    """Return the base of a view if the base requires grad, or None."""
    base = view._base
    return base if base is not None and base.requires_grad else None


def is_over_another(tensor: Tensor) -> bool:
    """Tell whether a tensor requires grad and is a view of a base that does not require grad.

    Example: ``base[0].requires_grad_()``. A view of this tensor has the same ``_base``. So the ``_base`` of that view
    does not require grad, although the tensor that was viewed does.
    """
    return tensor.requires_grad and tensor._base is not None and not tensor._base.requires_grad


def is_one_of_several_views(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is a view from an op that returns several views, such as ``unbind``.

    The result is also true for a view of such a view.
    """
    return _was_created(tensor, torch._C._autograd.CreationMeta.MULTI_OUTPUT_NODE)


def is_call_of_several_views(node: Any) -> bool:
    """Tell whether an autograd node belongs to a view op that returns several views (``split`` and ``unbind``)."""
    return node.name() in ("SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0")


def first_view_copies(view: Tensor) -> bool:
    """Tell whether the backward of the first of the view ops that make ``view`` from its base makes a new gradient.

    This gradient has the sizes and strides of the base, which is contiguous. The backwards of other view ops return a
    view of the gradient; one such op is ``t``.
    """
    node, base = view.grad_fn, view._base
    while node is not None and base is not None:
        following = node.next_functions[0][0] if len(node.next_functions) == 1 else None
        if following is base.grad_fn or getattr(following, "variable", None) is base:
            return node.name() in ("SelectBackward0", "SliceBackward0", "DiagonalBackward0", "AsStridedBackward0")
        node = following
    return False


def was_made_under_no_grad(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is a view that was made under `torch.no_grad` or inference mode.

    The result is also true for a view of such a view.
    """
    kinds = torch._C._autograd.CreationMeta
    return _was_created(tensor, kinds.NO_GRAD_MODE) or _was_created(tensor, kinds.INFERENCE_MODE)


def was_made_in_function(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is a view that a custom Function made of a tensor that does not require grad."""
    made = _was_created(tensor, torch._C._autograd.CreationMeta.IN_CUSTOM_FUNCTION)
    return made and _base_with_grad(tensor) is None


def _was_created(tensor: Tensor, how: Any) -> bool:
    """Tell whether a tensor is a view for which autograd has stored the ``CreationMeta`` ``how``."""
    return tensor._base is not None and torch._C._autograd._get_creation_meta(tensor) == how


def version_of(tensor: Tensor) -> int:
    """Return the value of a tensor's version counter. It is 0 for inference tensors, which have no counter."""
    return 0 if is_inference(tensor) else int(tensor._version)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the versions of many tensors. No inference tensor may be among them."""
    return [tensor._version for tensor in tensors]


def set_version(tensor: Tensor, version: int) -> None:
    """Set a tensor's version counter."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def share_version(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors share a version counter: change one counter, read the other, and restore it."""
    if a is b or is_inference(a) or is_inference(b) or a._version != b._version:
        return a is b
    before = a._version
    set_version(a, before + 1)
    shared = b._version == before + 1
    set_version(a, before)
    return shared


def is_about_a_write(error: BaseException) -> bool:
    """Tell whether an error is autograd's error about a saved tensor that was written in place."""
    return "modified by an inplace operation" in str(error)
