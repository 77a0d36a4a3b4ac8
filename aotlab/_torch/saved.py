"""What autograd nodes save, and the hooks through which it goes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab._torch.checkpoints import _checkpoint_frames, _unpack_arguments, is_checkpointed
from aotlab._torch.views import is_about_a_write, set_version, versions_of

#: Sets saved_tensors_hooks; kept here because `replace_unguarded` replaces it.
push_saved_tensor_hooks = torch._C._autograd._push_saved_tensors_default_hooks


def outputs_saved_by(node: Any) -> tuple[Tensor, ...]:
    """Return what the node of a custom function of ours saved of what it made, each with its history.

    Only the history matters here, so that a write to one of them since is no error.
    """
    try:
        found: tuple[Tensor, ...] = node.saved_tensors
    except RuntimeError as error:
        if not is_about_a_write(error):
            raise
        values = [data for raw in node._raw_saved_tensors if isinstance(data := raw.data, Tensor)]
        are_at = versions_of(values)
        try:
            return _at_saved_versions(node, values)
        finally:
            for value, version in zip(values, are_at, strict=True):
                set_version(value, version)
    return found


def _at_saved_versions(node: Any, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Count down the versions of what a node saved until autograd hands it out."""
    for version in range(max(versions_of(values)), -1, -1):
        for value in values:
            set_version(value, version)
        try:
            found: tuple[Tensor, ...] = node.saved_tensors
        except RuntimeError:
            continue
        return found
    return ()


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost ``saved_tensors_hooks`` as (pack, unpack), None without any."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def foreign_saved_tensor_hooks() -> bool:
    """Tell whether ``saved_tensors_hooks`` are set that are not torch's own, and see what is saved now.

    Torch's own, which offload or compute again, unpack the values that they packed.
    """
    return torch.is_grad_enabled() and hooks_are_foreign()


def hooks_are_foreign() -> bool:
    """Tell whether ``saved_tensors_hooks`` are set that are not torch's own."""
    hooks = saved_tensor_hooks()
    if hooks is None:
        return False
    module: str = getattr(hooks[0], "__module__", type(hooks[0]).__module__)
    return module.split(".")[0] not in ("torch", "aotlab")


def saved_tensor_hooks_disabled() -> bool:
    """Tell whether setting ``saved_tensors_hooks`` is an error now."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


@contextlib.contextmanager
def saved_tensor_hooks_hidden() -> Iterator[None]:
    """Keep the caller's ``saved_tensors_hooks`` from seeing what is saved in the block."""
    if saved_tensor_hooks() is None:
        yield
    else:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            yield


@functools.cache
def _saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name.removeprefix("_raw") for name in dir(kind) if name.startswith("_raw_saved_"))


def _kept(node: Any) -> list[Tensor]:
    """Return the tensors that an autograd node keeps, if no checkpoint does it; raise if one was written since."""
    kind: Any = type(node)
    found = node.saved_tensors if _is_custom(node) else [getattr(node, name, None) for name in _saved_names(kind)]
    several = (item if isinstance(item, (tuple, list)) else (item,) for item in found)
    return [tensor for items in several for tensor in items if isinstance(tensor, Tensor)]


def _is_custom(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _hides_another(node: Any) -> bool:
    """Tell whether it is a write to a view; autograd lets go of the node inside after one backward."""
    return type(node).__name__ == "CopySlices"


def saves_tensors(node: Any) -> bool:
    """Tell whether an autograd node keeps tensors for its backward, which a second backward would miss."""
    if is_checkpointed(node) or _hides_another(node):
        return True
    try:
        return bool(node.saved_tensors if _is_custom(node) else _kept(node))
    except Exception:  # noqa: BLE001  # it was written since, or the user's unpack raises: then it was saved
        return True


def keeps_unsaved(node: Any) -> bool:
    """Tell whether the node of a custom function may keep tensors unsaved, as attributes or in its backward's closure.

    Autograd does not let go of those after a backward.
    """
    if not _is_custom(node):
        return False
    function: Any = type(node)._forward_cls  # set by the metaclass
    closures = [getattr(getattr(function, name, None), "__closure__", None) for name in ("backward", "vjp")]
    return bool(vars(node)) or any(closures)


def kept_is_written(node: Any) -> bool:
    """Tell whether an autograd node may raise because a tensor that it keeps has been written since."""
    try:
        if not is_checkpointed(node):
            _kept(node)
            return _hides_another(node)
        for frame in _checkpoint_frames(node):
            _unpack_arguments(frame)
    except RuntimeError:
        return True
    return False


def saved_tensors_of(node: Any) -> list[Tensor]:
    """Return the tensors that an autograd node keeps, as far as they can be seen; none if one was written since."""
    try:
        return [] if is_checkpointed(node) else _kept(node)
    except Exception:  # noqa: BLE001  # the same
        return []
