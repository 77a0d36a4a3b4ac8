"""Differentiating the trace for all tangents together, and what eager has to do."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.errors import HigherOrderOpError, RefusedError
from aotlab.ir.metadata import InputAliasInfo
from aotlab.trace.deriver import Deriver
from aotlab.trace.history import Survey, reachable
from aotlab.trace.inputs import Entered
from aotlab.trace.records import TraceFailed
from aotlab.trace.tape import Operation, Tape, Untraceable


def differentiate_all(deriver: Deriver) -> list[list[bool]]:
    """Differentiate each segment for all its tangents; say for each slot whether a gradient can reach it."""
    connected = []
    for number, part in enumerate(deriver.segments):
        try:
            found = deriver.derive(number, [True] * len(part.entries))
            _check_again(deriver, number, found)
            # a custom Function may return None for what it keeps, to which derivatives of its gradients go
            reached = reachable(part) if None in found else set()
            connected.append(
                [
                    gradient is not None or (way is not None and way[0] in reached)
                    for gradient, way in zip(found, deriver.slots[number], strict=True)
                ]
            )
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
            text = str(error).partition("\n")[0]
            raise RunEagerly(
                f"the backward raises {type(error).__name__}{': ' * bool(text)}{text}",
                suggestion="call it under torch.no_grad() where nothing is to be differentiated",
            ) from error
    return connected


def check_histories(infos: Sequence[InputAliasInfo], inputs: Sequence[Entered]) -> None:
    """Leave to eager a write to a view that retains its gradient."""
    for info, item in zip(infos, inputs, strict=True):
        if info.may_write_a_view and internals.base_of(item.real) is not None and item.real.retains_grad:
            raise RunEagerly(f"`{info.name}` is a view that retains its gradient, and is written", passing=True)


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


def _check_again(deriver: Deriver, segment: int, first: Sequence[Tensor | None]) -> None:
    """Leave to eager a checkpoint whose function does not do the same each time that it is run.

        def body(y):
            runs.append(y)
            return y.cos() if len(runs) == 2 else y.sin()

    Eager runs the body once more in each backward, a compiled backward computes what it did in the trace. So it is
    derived twice; the two have to be the same, op by op, as they are not for a selective checkpoint either, whose cache
    serves one backward. ``first`` came of the first time.
    """
    if not deriver.recorder.has_checkpoints:
        return
    try:
        second = deriver.derive(segment, [True] * len(deriver.segments[segment].entries), again=True)
        is_same, raises = _are_same(deriver.recorder.tape, first, second), ""
    except Exception as error:  # noqa: BLE001  # whatever the function raises when it is run again
        is_same, raises = False, f": the next time it raises {type(error).__name__}"
    if not is_same:
        raise RunEagerly(
            f"a checkpoint computes something else each time that it runs its function{raises}",
            suggestion="let the function change nothing that it acts on, to have it compiled",
        )


def _are_same(tape: Tape, first: Any, second: Any) -> bool:
    """Tell whether values are computed by the same ops from the same inputs."""
    compared: set[tuple[int, int]] = set()
    todo = [(first, second)]
    while todo:
        one, other = todo.pop()
        if one is other:
            continue
        if type(one) is not type(other):
            return False
        if isinstance(one, Tensor):
            if (id(one), id(other)) in compared:
                continue
            compared.add((id(one), id(other)))
            made, again = tape.producer(one), tape.producer(other)
            if made is None or again is None:
                if not _are_equal_constants(tape, one, other):
                    return False
                continue
            if made[0].target is not again[0].target or not _are_in_one_place(made, again):
                return False
            todo += [(made[0].args, again[0].args), (made[0].kwargs, again[0].kwargs)]
        elif isinstance(one, (list, tuple)):
            if len(one) != len(other):
                return False
            todo += zip(one, other, strict=True)
        elif isinstance(one, dict):
            if one.keys() != other.keys():
                return False
            todo += [(value, other[key]) for key, value in one.items()]
        elif one != other and not (one != one and other != other):  # a nan is no other nan
            return False
    return True


def _are_in_one_place(made: tuple[Operation, tuple[int, ...]], again: tuple[Operation, tuple[int, ...]]) -> bool:
    """Tell whether two are the same of the results of an op, which may return one tensor in two places."""
    places = made[1], again[1]
    return places[0] == places[1] or any(
        functools.reduce(operator.getitem, places[0], operation.result)
        is functools.reduce(operator.getitem, places[1], operation.result)
        for operation, _ in (made, again)
    )


def _are_equal_constants(tape: Tape, one: Tensor, other: Tensor) -> bool:
    """Tell whether both are constants, which each run of a function makes anew, with the same values."""
    first, second = tape.constant(one), tape.constant(other)
    if first is None or second is None or (first.dtype, first.device) != (second.dtype, second.device):
        return False
    return torch.equal(first, second)


@contextmanager
def unwritten(
    named: Sequence[tuple[str, Tensor]], custom: Sequence[Any], *, has_checkpoints: bool = False
) -> Iterator[None]:
    """Leave to eager a backward, traced in a ``with`` block, that writes in place.

        def backward(ctx, gradient):
            (count,) = ctx.saved_tensors
            count.add_(1)
            return gradient.mul_(2)

    The caller may hold the first tensor and the gradient; so it is with a buffer that a checkpointed function counts
    with. ``named`` are the wrappers that stand for the caller's tensors and gradients, ``custom`` the nodes of custom
    functions, of which what they keep is watched too. Without these and checkpoints nothing can be written.
    """
    if not custom and not has_checkpoints:
        yield
        return
    watched = [*named, *((f"what `{type(node).__name__}` keeps", kept) for node in custom for kept in _kept(node))]
    before = [_value(tensor) for _, tensor in watched]

    def check() -> None:
        for (name, tensor), value in zip(watched, before, strict=True):
            if _value(tensor) is not value:
                raise RunEagerly(f"the backward writes {name} in place")

    try:
        yield
    except (RefusedError, RunEagerly):  # a write is the better reason, and eager takes it
        check()
        raise
    check()


def _value(wrapper: Tensor) -> Tensor:
    internals.sync(wrapper)
    return internals.from_functional(wrapper)


def _kept(node: Any) -> list[Tensor]:
    kept = [*internals.saved_tensors_of(node), *vars(node).values()]
    return [value for value in kept if isinstance(value, Tensor) and internals.is_functional(value)]
