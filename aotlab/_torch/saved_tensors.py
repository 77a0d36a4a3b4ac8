"""The tensors that autograd nodes save, the hooks that pack and unpack them, and checkpoints, which recompute them."""

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
from aotlab._torch.version_counters import is_about_a_write, set_version, versions_of
from aotlab._torch.wrapper_subclasses import parts_of

#: The op that Dynamo writes for `torch.utils.checkpoint.checkpoint`. If a graph with it runs without compilation, the
#: recomputation draws new random numbers.
CHECKPOINT: HigherOrderOperator = torch.ops.higher_order.tag_activation_checkpoint
#: The key in a graph's ``meta`` under which Dynamo stores the ``context_fn`` of a checkpoint.
CHECKPOINT_CONTEXTS = "_checkpoint_context_fn"
#: torch's error for a second backward through a selective checkpoint. The checkpoint caches some results for the first
#: backward only.
SPENT_CACHE = "Trying to backward an extra time. You are only allowed to backward once on any region computed under"
SPENT_CACHE += " selective activation checkpoint."


def checkpoint_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return those keyword arguments of a `CHECKPOINT` op that `torch.utils.checkpoint` takes itself.

    The other arguments are passed to the checkpointed function.
    """
    return dict(CHECKPOINT.divide_kwargs(settings)[0])  # type: ignore[attr-defined]  # only this op has the method


def outputs_saved_by(node: Any) -> tuple[Tensor, ...]:
    """Return the results that an identity node of `with_common_node` saved, with their autograd history.

    Autograd raises if a saved result was written in place later. This function returns such results, too: it resets
    their version counters for a moment.
    """
    try:
        outputs: tuple[Tensor, ...] = node.saved_tensors
    except RuntimeError as error:
        if not is_about_a_write(error):
            raise
        values = [data for raw in node._raw_saved_tensors if isinstance(data := raw.data, Tensor)]
        versions = versions_of(values)
        try:
            return _at_saved_versions(node, values)
        finally:
            for value, version in zip(values, versions, strict=True):
                set_version(value, version)
    return outputs


def _at_saved_versions(node: Any, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Lower the version counters of saved tensors until autograd accepts them, and return the tensors.

    ``values`` are the saved tensors of ``node``. The caller restores their counters.
    """
    for version in range(max(versions_of(values)), -1, -1):
        for value in values:
            set_version(value, version)
        try:
            tensors: tuple[Tensor, ...] = node.saved_tensors
        except RuntimeError:
            continue
        return tensors
    return ()


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Return the innermost ``saved_tensors_hooks`` as (pack, unpack), or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def hooks_are_foreign() -> bool:
    """Tell whether the innermost ``saved_tensors_hooks`` are the user's own, and not torch's (such as ``save_on_cpu``).

    torch's hooks can be applied to the values that a compiled forward saves, because their unpack hook returns the
    value that was packed.
    """
    hooks = saved_tensor_hooks()
    if hooks is None:
        return False
    module: str = getattr(hooks[0], "__module__", type(hooks[0]).__module__)
    return module.split(".")[0] not in ("torch", "aotlab")


def is_in_checkpoint() -> bool:
    """Tell whether a checkpoint installed the innermost ``saved_tensors_hooks``, in its first or its second run."""
    hooks = saved_tensor_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def saved_tensor_hooks_disabled() -> bool:
    """Tell whether ``saved_tensors_hooks`` are disabled (transforms do this), so that setting them raises an error."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


def saved_tensor_hooks_hidden() -> contextlib.AbstractContextManager[Any]:
    """Keep the caller's ``saved_tensors_hooks`` from packing the tensors that are saved in a block."""
    hidden = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    return contextlib.nullcontext() if saved_tensor_hooks() is None else hidden


def _tensors_saved_by(node: Any) -> list[Tensor]:
    """Return the tensors that an autograd node saved. The node must not belong to a checkpointed function.

    Raise autograd's error if one of the tensors was written after it had been saved.
    """
    if is_custom_function_node(node):
        values = node.saved_tensors
    else:
        kind: Any = type(node)
        values = [getattr(node, name.removeprefix("_raw"), None) for name in _raw_names(kind)]
    groups = (item if isinstance(item, (tuple, list)) else (item,) for item in values)
    return [tensor for items in groups for tensor in items if isinstance(tensor, Tensor)]


def saves_tensors(node: Any) -> bool:
    """Tell whether an autograd node saves tensors for its backward.

    A backward without ``retain_graph`` frees such tensors, so a second backward through the node raises.
    """
    if is_checkpointed(node) or is_copy_slices(node):
        return True
    try:
        return bool(node.saved_tensors if is_custom_function_node(node) else _tensors_saved_by(node))
    except Exception:  # noqa: BLE001  # a saved tensor was written later, or an unpack hook raises
        return True


def keeps_unsaved(node: Any) -> bool:
    """Tell whether a custom autograd function may hold tensors that it did not save with ``save_for_backward``.

    ``node`` is the function's autograd node. The function may store tensors as attributes of ``ctx`` or in the closure
    of its backward. A backward does not free such tensors, so they live as long as the node.
    """
    if not is_custom_function_node(node):
        return False
    function: Any = type(node)._forward_cls  # set by the metaclass
    closures = [getattr(getattr(function, name, None), "__closure__", None) for name in ("backward", "vjp")]
    return bool(vars(node)) or any(closures)


def kept_is_written(node: Any) -> bool:
    """Tell whether the backward of an autograd node may raise because a tensor that it saved was written later.

    The result is also true for a ``CopySlices`` node, because Python cannot read which tensors it saved.
    """
    try:
        if not is_checkpointed(node):
            _tensors_saved_by(node)
            return is_copy_slices(node)
        for frame in _checkpoint_frames(node):
            _unpack_arguments(frame)
    except RuntimeError:
        return True
    return False


def saved_tensors_of(node: Any) -> list[Tensor]:
    """Return the plain tensors that an autograd node saved, if they can be read.

    The list is empty if one of the tensors was written later, or if a checkpoint recomputes them.
    """
    try:
        return [] if is_checkpointed(node) else [part for kept in _tensors_saved_by(node) for part in parts_of(kept)]
    except Exception:  # noqa: BLE001  # as in `saves_tensors`
        return []


# --- checkpoints


@functools.cache
def _raw_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def is_checkpointed(node: Any) -> bool:
    """Tell whether torch's checkpoint recomputes a node's saved tensors.

    Reading the saved tensors of such a node would run the checkpointed function again.
    """
    return next(_checkpoint_hooks(node), None) is not None


def _checkpoint_hooks(node: Any) -> Iterator[Any]:
    """Yield the hooks with which checkpoint recomputes the tensors that an autograd node saved."""
    kind: Any = type(node)
    for name in _raw_names(kind):
        try:
            saved = getattr(node, name, None)
        except RuntimeError:  # autograd has freed the saved tensor
            continue
        for each in saved if isinstance(saved, (tuple, list)) else (saved,):
            hook: Any = getattr(each, "unpack_hook", None)
            if getattr(hook, "__module__", None) == "torch.utils.checkpoint":
                yield hook


@contextlib.contextmanager
def caches_kept(spent: set[Any]) -> Iterator[None]:
    """Let the caches of selective checkpoints serve several backwards, in this thread and for the length of a block.

    A selective checkpoint caches the results of some ops of its function, and its backward takes them out of the cache.
    The trace runs such a backward, but the caller's backward needs the results again. So the block puts the results
    back into the cache. The caches that were used in the block are added to ``spent``.
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
    """Tell whether a tensor in the cache of a selective checkpoint was written after it had been cached."""
    entries = pytree.tree_leaves(list(cached.storage.values()))
    entries_of_tensors = [entry for entry in entries if isinstance(getattr(entry, "val", None), Tensor)]
    return any(entry.version != entry.val._version for entry in entries_of_tensors)


def is_cached_in(node: Any, cached: Any) -> bool:
    """Tell whether a selective checkpoint with this cache recomputes the tensors that an autograd node saved."""
    runs = (frame.recompute_fn for frame in _checkpoint_frames(node) if hasattr(frame, "recompute_fn"))
    cells = (zip(run.__code__.co_freevars, run.__closure__ or (), strict=True) for run in runs)
    return any(name == "recompute_context" and cell.cell_contents is cached for each in cells for name, cell in each)


def _checkpoint_frames(node: Any) -> list[Any]:
    """Return checkpoint's records (frames) of the checkpointed calls that recompute the saved tensors of a node."""
    return [cell.cell_contents for hook in _checkpoint_hooks(node) for cell in hook.__closure__ or ()]


def kept_by_checkpoint(node: Any) -> list[Tensor]:
    """Return the tensor arguments of the checkpointed functions that the backward of a node would run again.

    The checkpoints hold references to these tensors until that backward runs.
    """
    arguments: dict[int, Tensor] = {}
    for frame in _checkpoint_frames(node):
        with contextlib.suppress(RuntimeError):  # an argument was written later, so the backward raises anyway
            arguments.update((id(t), t) for t in _unpack_arguments(frame))
    return list(arguments.values())


class _RecomputedError(RuntimeError):
    """Raised if the arguments of a checkpoint are not stored, because an outer checkpoint would recompute them."""


@contextlib.contextmanager
def _nothing_computed_again() -> Iterator[None]:
    """Make checkpoints in this thread raise `_RecomputedError` if they would run their function again, for a block.

    A backward may run the function again. Code that only inspects saved tensors must not.
    """
    module: Any = sys.modules["torch.utils.checkpoint"]
    before, thread = module._recomputation_hook, threading.get_ident()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise _RecomputedError
        return before(*args, **kwargs)

    with replaced(module, "_recomputation_hook", refuse):
        yield


def _unpack_arguments(frame: Any) -> list[Tensor]:
    """Return the arguments that a checkpointed call saved in its ``frame``, except those that must be recomputed.

    torch 2.13 stores the arguments in ``frame.saved_args``. Earlier versions save them in the autograd node of the
    tensor ``frame.input_saver``.
    """
    arguments: list[Tensor] = []
    with _nothing_computed_again():
        for each in getattr(frame, "saved_args", ()):
            with contextlib.suppress(_RecomputedError):
                arguments += [each.unpack()] if hasattr(each, "unpack") else []
        if hasattr(frame, "input_saver"):
            with contextlib.suppress(_RecomputedError):
                arguments += frame.input_saver.grad_fn.saved_tensors[1:]  # the first tensor is no argument
    return arguments
