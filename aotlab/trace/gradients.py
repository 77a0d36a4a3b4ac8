"""Differentiating the trace for all tangents together, and what eager has to do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.errors import HigherOrderOpError, RefusedError
from aotlab.ir.metadata import InputAliasInfo
from aotlab.trace.again import check_again
from aotlab.trace.deriver import Deriver
from aotlab.trace.history import Survey, reachable
from aotlab.trace.inputs import Entered
from aotlab.trace.records import TraceFailed
from aotlab.trace.tape import Untraceable


def differentiate_all(deriver: Deriver) -> list[list[bool]]:
    """Differentiate each segment for all its tangents; say for each slot whether a gradient can reach it.

    Raises
    ------
    RunEagerly
        The backward raises, of itself or since the function is wrong: eager says so when it is asked for.
    """
    connected = []
    for number, part in enumerate(deriver.segments):
        try:
            found = deriver.derive(number, [True] * len(part.entries))
            check_again(deriver, number, found)
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
    """Leave to eager what autograd makes of an input's history when its sizes change without autograd's knowledge."""
    for info, item in zip(infos, inputs, strict=True):
        if info.may_write_a_view and internals.base_of(item.real) is not None and item.real.retains_grad:
            raise RunEagerly(f"`{info.name}` is a view that retains its gradient, and is written", passing=True)
        if info.changes_history_twice and item.real.retains_grad:
            raise RunEagerly(f"`{info.name}` retains its gradient, changes its sizes and is written", passing=True)


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
