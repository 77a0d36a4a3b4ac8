"""Differentiating the trace for all tangents together, and what to do where that raises."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from traceback import walk_tb

from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.analysis import Entered
from aotlab.analysis.history import Edge, Survey, edge_of, reachable, users_of
from aotlab.errors import HigherOrderOpError, RefusedError
from aotlab.recorder import Recorder, RunEagerly, Untraceable
from aotlab.stages.trace.again import check_again
from aotlab.stages.trace.function import Findings
from aotlab.stages.trace.live import Trace
from aotlab.stages.trace.records import TraceFailed

#: Where a backward raises, so many ways through it are looked at.
_MOST_WAYS = 64


def differentiate_all(trace: Trace, *, moved: bool = False) -> list[Tensor | None]:
    """Return the gradients for all tangents together.

    If that raises, the function is compiled all the same: its backward raises when it is asked for, as in eager. What
    can be differentiated from single outputs, or to single inputs, still can; then those gradients are returned, one
    list after the other, so that the partitioner sees what their backwards need.

    ``moved`` says that the function gave a tensor with a history other sizes in place. Autograd looks at the history of
    what was kept before it compares versions, and the views that make it on a wrapper may not fit these sizes.
    """
    if not trace.training:
        return []
    gradients: list[Tensor | None] = []
    for number, part in enumerate(trace.segments):
        count = len(part.entries)
        try:
            found = trace.derive(number, [True] * count)
            check_again(trace, number, found)
            # a custom Function may return None for what it keeps, to which derivatives of its gradients go
            reached = reachable(part) if None in found else set()
            trace.connected[number] = [
                gradient is not None or (way is not None and way[0] in reached)
                for gradient, way in zip(found, trace.slots[number], strict=True)
            ]
            trace.full[number] = found
            gradients += found
        except (RefusedError, RunEagerly):
            raise
        except Untraceable as error:  # the trace's shortcoming, not an error that eager's backward raises
            raise TraceFailed(str(error)) from error
        except Exception as error:  # whatever the traced program's backward raises
            if "use_reentrant=True" in str(error):
                raise HigherOrderOpError(
                    "a checkpoint with use_reentrant=True is used inside the function",
                    why="it calls a backward of its own, which a graph cannot hold",
                    suggestion="pass use_reentrant=False",
                    pattern=r"checkpoint\w*\(",
                ) from error
            if "version_counter for inference tensor" in str(error):
                # the trace's stand-in became one; the caller's tensor may have been none
                raise RunEagerly("the backward takes what was written under inference_mode") from error
            if moved and not _is_autograds(error):
                raise RunEagerly("the backward raises, and a tensor with a history is given other sizes") from error
            check_again(trace, number, error)
            trace.backward_error = _without_frames(error)
            singles: list[Tensor | None] = []
            for i in range(count if count > 1 else 0):
                with suppress(Exception):
                    singles += trace.derive(number, [i == j for j in range(count)])
            for pattern, slot in _single_ways(trace, number) if internals.is_about_a_write(error) else ():
                with suppress(Exception):
                    singles += trace.derive(number, pattern, asked=(slot,))
            reached = reachable(part)
            trace.connected[number] = [way is not None and way[0] in reached for way in trace.slots[number]]
            gradients += singles
    return gradients


def check_histories(trace: Trace, inputs: Sequence[Entered]) -> None:
    """Leave to eager what autograd makes of an input's history when its sizes change without autograd's knowledge."""
    for k, (info, item) in enumerate(zip(trace.metadata.input_info, inputs, strict=True)):
        if info.may_write_a_view and internals.base_of(item.real) is not None and item.real.retains_grad:
            raise RunEagerly(f"`{info.name}` is a view that retains its gradient, and is written", passing=True)
        if info.changes_unseen and item.base is None and internals.base_of(item.real) is not None:
            raise RunEagerly(f"`{info.name}` is a view that changes without autograd's knowledge: its history moves")
        if not info.metadata_steps:
            continue
        if info.changes_history_twice and item.real.retains_grad:
            raise RunEagerly(f"`{info.name}` retains its gradient, changes its sizes and is written", passing=True)
        if item.wrapper.is_leaf and item.wrapper.shape != item.fake.shape and trace.gets_gradient(k):
            raise RunEagerly(f"`{info.name}` is a leaf that changes its shape and gets a gradient")


def check_leaves(inputs: Sequence[Entered]) -> None:
    """Leave to eager a leaf that changes its shape while its node, which takes the former one, may be kept for good.

    The history of ``v.mul_(v)`` keeps ``v``, and so itself.
    """
    for item in inputs:
        leaf = item.wrapper
        if leaf.is_leaf and leaf.requires_grad and leaf.shape != item.fake.shape:
            shape, _, _ = internals.edge_metadata(*edge_of(leaf))
            if shape != tuple(leaf.shape):
                raise RunEagerly(
                    "a leaf changes its shape, and its node may be kept, as it was, by a tensor that keeps itself"
                )


def check_moved_unseen(findings: Findings, roots: Sequence[Edge]) -> None:
    """Leave to eager what autograd makes of a gradient for a tensor that was moved without its knowledge."""
    outputs = findings.outputs.tensors.values()
    for tensor, edge, first in findings.moved_unseen:
        returned = any(output is tensor or internals.base_of(output) is tensor for output in outputs)
        if returned or any(internals.sequence_of(node) >= first for node in users_of(edge, roots)):
            raise RunEagerly("a tensor with a history is moved under no_grad and used")


def check_out_of_sight(seen: Survey, callers: Sequence[Tensor], *, hooked: bool) -> None:
    """Leave to eager what happens in a backward on its way to tensors that nobody can see.

    Gradients that reach leaves of the function's own are not computed. In eager they are, which calls hooks, and
    raises if what a node kept has been written, by the function or later by the caller: ``callers`` are the tensors
    that are in reach then. So it does at an op that has no derivative. Of a custom Function's backward there it is not
    known what else it does.
    """
    written = any(internals.kept_is_written(node) for node in seen.hidden)
    unknown = any(internals.always_raises(node) or internals.is_custom_function_node(node) for node in seen.lost)
    kept = {internals.storage_key(tensor) for node in seen.lost for tensor in internals.saved_tensors_of(node)}
    if seen.hidden and (
        hooked or written or unknown or any(internals.storage_key(tensor) in kept for tensor in callers)
    ):
        raise RunEagerly(
            "a gradient that reaches no input calls hooks or a custom Function, or may raise",
            suggestion="detach what needs no gradient, to have it compiled",
        )


def _single_ways(trace: Trace, number: int) -> list[tuple[list[bool], int]]:
    """List the ways through a segment, from one of its entries or all to one of its exits, if they are few."""
    count, slots = len(trace.segments[number].entries), [i for i, way in enumerate(trace.slots[number]) if way]
    if count * len(slots) > _MOST_WAYS:
        return []
    patterns = [[i == j for j in range(count)] for i in range(count)] + ([[True] * count] if count > 1 else [])
    return [(pattern, slot) for pattern in patterns for slot in slots]


def _is_autograds(error: BaseException) -> bool:
    """Tell whether autograd itself raised an error, rather than an operation that was recorded."""
    recording = Recorder.__module__
    return all(frame.f_globals.get("__name__") != recording for frame, _ in walk_tb(error.__traceback__))


def _without_frames(error: BaseException) -> BaseException:
    """Drop what would keep the traced call's tensors alive."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
