"""What autograd nodes save, the hooks through which it goes, and checkpoints, which compute it again."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree

from aotlab._torch.nodes import is_copy_slices, is_custom_function_node
from aotlab._torch.replaced import replaced
from aotlab._torch.subclasses import parts_of
from aotlab._torch.views import is_about_a_write, set_version, versions_of

#: What Dynamo puts for a call of ``torch.utils.checkpoint.checkpoint``; run as it is, it draws random numbers anew.
CHECKPOINT: HigherOrderOperator = torch.ops.higher_order.tag_activation_checkpoint
#: The key in the ``meta`` of the graph that it runs under which Dynamo keeps a checkpoint's ``context_fn``.
CHECKPOINT_CONTEXTS = "_checkpoint_context_fn"
#: What torch says where a selective checkpoint, whose cache serves one backward, would have to serve another.
SPENT_CACHE = "Trying to backward an extra time. You are only allowed to backward once on any region computed under"
SPENT_CACHE += " selective activation checkpoint."


def checkpoint_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Take those keyword arguments of a `CHECKPOINT` that are the checkpoint's, not its function's."""
    return dict(CHECKPOINT.divide_kwargs(settings)[0])  # type: ignore[attr-defined]  # of this one op


def outputs_saved_by(node: Any) -> tuple[Tensor, ...]:
    """Return what the node of a custom function of ours saved of what it made, with histories, written since or not."""
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


def hooks_are_foreign() -> bool:
    """Tell whether ``saved_tensors_hooks`` are set that are not torch's own, which unpack what they packed."""
    hooks = saved_tensor_hooks()
    if hooks is None:
        return False
    module: str = getattr(hooks[0], "__module__", type(hooks[0]).__module__)
    return module.split(".")[0] not in ("torch", "aotlab")


def saved_tensor_hooks_disabled() -> bool:
    """Tell whether setting ``saved_tensors_hooks`` is an error now."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


def saved_tensor_hooks_hidden() -> contextlib.AbstractContextManager[Any]:
    """Keep the caller's ``saved_tensors_hooks``, if there are any, from seeing what is saved in the block."""
    hidden = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    return contextlib.nullcontext() if saved_tensor_hooks() is None else hidden


def _kept(node: Any) -> list[Tensor]:
    """Return the tensors that an autograd node keeps, if no checkpoint does it; raise if one was written since."""
    if is_custom_function_node(node):
        found = node.saved_tensors
    else:
        kind: Any = type(node)
        found = [getattr(node, name.removeprefix("_raw"), None) for name in _raw_names(kind)]
    several = (item if isinstance(item, (tuple, list)) else (item,) for item in found)
    return [tensor for items in several for tensor in items if isinstance(tensor, Tensor)]


def saves_tensors(node: Any) -> bool:
    """Tell whether an autograd node keeps tensors for its backward, which a second backward would miss."""
    if is_checkpointed(node) or is_copy_slices(node):
        return True
    try:
        return bool(node.saved_tensors if is_custom_function_node(node) else _kept(node))
    except Exception:  # noqa: BLE001  # it was written since, or the user's unpack raises: then it was saved
        return True


def keeps_unsaved(node: Any) -> bool:
    """Tell whether a custom function's node may keep tensors as attributes or in a closure, which no backward frees."""
    if not is_custom_function_node(node):
        return False
    function: Any = type(node)._forward_cls  # set by the metaclass
    closures = [getattr(getattr(function, name, None), "__closure__", None) for name in ("backward", "vjp")]
    return bool(vars(node)) or any(closures)


def kept_is_written(node: Any) -> bool:
    """Tell whether an autograd node may raise because a tensor that it keeps has been written since."""
    try:
        if not is_checkpointed(node):
            _kept(node)
            return is_copy_slices(node)
        for frame in _checkpoint_frames(node):
            _unpack_arguments(frame)
    except RuntimeError:
        return True
    return False


def saved_tensors_of(node: Any) -> list[Tensor]:
    """Return the tensors that an autograd node keeps, as far as they can be seen; none if one was written since."""
    try:
        return [] if is_checkpointed(node) else [part for kept in _kept(node) for part in parts_of(kept)]
    except Exception:  # noqa: BLE001  # the same
        return []


# --- checkpoints


@functools.cache
def _raw_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def is_checkpointed(node: Any) -> bool:
    """Tell whether torch's checkpoint stands for what an autograd node keeps: to look at it runs the function again."""
    return next(_checkpoint_hooks(node), None) is not None


def _checkpoint_hooks(node: Any) -> Iterator[Any]:
    """Go through the hooks by which checkpoint computes once more what an autograd node keeps."""
    kind: Any = type(node)
    for name in _raw_names(kind):
        try:
            saved = getattr(node, name, None)
        except RuntimeError:  # autograd has let go of it
            continue
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            hook: Any = getattr(each, "unpack_hook", None)
            if getattr(hook, "__module__", None) == "torch.utils.checkpoint":
                yield hook


@contextlib.contextmanager
def caches_kept(spent: set[Any]) -> Iterator[None]:
    """Let selective checkpoints of this thread keep their caches, of which each serves one backward.

    Those that are used in the block are added to ``spent``.
    """
    kind: Any = sys.modules["torch.utils.checkpoint"]._CachedTorchDispatchMode
    enter, leave, thread = kind.__enter__, kind.__exit__, threading.get_ident()
    before: dict[Any, dict[Any, Any]] = {}

    def entering(cached: Any) -> Any:
        if threading.get_ident() == thread:
            before[cached] = {key: entries.copy() for key, entries in cached.storage.items()}
        return enter(cached)

    def leaving(cached: Any, *error: Any) -> Any:
        entries = before.pop(cached, None)
        if entries is not None and entries != cached.storage:
            spent.add(cached)
            cached.storage.update(entries)
        return leave(cached, *error)

    with replaced(kind, "__enter__", entering), replaced(kind, "__exit__", leaving):
        yield


def cache_is_written(cached: Any) -> bool:
    """Tell whether a tensor in the cache of a selective checkpoint has been written since."""
    entries = pytree.tree_leaves(list(cached.storage.values()))
    kept = [entry for entry in entries if isinstance(getattr(entry, "val", None), Tensor)]
    return any(entry.version != entry.val._version for entry in kept)


def is_cached_in(node: Any, cached: Any) -> bool:
    """Tell whether what an autograd node keeps is computed again by a selective checkpoint with this cache."""
    runs = (frame.recompute_fn for frame in _checkpoint_frames(node) if hasattr(frame, "recompute_fn"))
    cells = (zip(run.__code__.co_freevars, run.__closure__ or (), strict=True) for run in runs)
    return any(name == "recompute_context" and cell.cell_contents is cached for each in cells for name, cell in each)


def _checkpoint_frames(node: Any) -> list[Any]:
    """Return what stands for the runs of checkpointed functions that an autograd node needs."""
    return [cell.cell_contents for hook in _checkpoint_hooks(node) for cell in hook.__closure__ or ()]


def kept_by_checkpoint(node: Any) -> list[Tensor]:
    """Return the arguments of the checkpointed function that an autograd node would run again, by the hook it sets."""
    found: dict[int, Tensor] = {}
    for frame in _checkpoint_frames(node):
        with contextlib.suppress(RuntimeError):  # one of them was written since: the backward raises
            found.update((id(t), t) for t in _unpack_arguments(frame))
    return list(found.values())


class _RecomputedError(RuntimeError):
    """What a checkpoint keeps is computed again by one around it, which keeps something else."""


@contextlib.contextmanager
def _nothing_computed_again() -> Iterator[None]:
    """Let a checkpoint of this thread raise where it would run its function again: only backwards may."""
    module: Any = sys.modules["torch.utils.checkpoint"]
    before, thread = module._recomputation_hook, threading.get_ident()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise _RecomputedError
        return before(*args, **kwargs)

    with replaced(module, "_recomputation_hook", refuse):
        yield


def _unpack_arguments(frame: Any) -> list[Tensor]:
    """Return what a checkpoint's frame keeps, but for what lies in one around it; before torch 2.13 a node keeps it."""
    found: list[Tensor] = []
    with _nothing_computed_again():
        for each in getattr(frame, "saved_args", ()):
            with contextlib.suppress(_RecomputedError):
                found += [each.unpack()] if hasattr(each, "unpack") else []
        if hasattr(frame, "input_saver"):
            with contextlib.suppress(_RecomputedError):
                found += frame.input_saver.grad_fn.saved_tensors[1:]  # the first is checkpoint's own
    return found
