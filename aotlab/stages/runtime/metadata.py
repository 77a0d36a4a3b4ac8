"""The part of the epilogue that changes the caller's tensors other than in their values.

    x.t_()                           # the steps that the function took, in its order ...
    x.copy_(new_x)                   # ... and the new values, where they stand among them
    x.requires_grad_(True)

The steps are taken on the caller's own tensor, in the grad mode in which the function took them: so autograd records
for it what it would have recorded in eager, and whoever holds a view of it sees what eager would show. Steps that only
move elements come before the new values, which have the final sizes; a step that narrows comes after them, since it may
hide what was written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aotlab.ir.metadata import SET_TO_ITSELF, InputAliasInfo, MetadataStep


def before_write(info: InputAliasInfo) -> Sequence[MetadataStep]:
    """Return the steps that come before an input's new values are written."""
    return info.metadata_steps[: info.write_after]


def after_write(info: InputAliasInfo) -> Sequence[MetadataStep]:
    """Return the steps that come after."""
    return info.metadata_steps[info.write_after :]


def lines(target: str, steps: Sequence[MetadataStep]) -> Iterator[tuple[str, bool]]:
    """Write each step on ``target`` as a line, with the grad mode that it needs."""
    for step in steps:
        call = f"set_({target})" if step.method == SET_TO_ITSELF else str(step)
        yield f"{target}.{call}", step.grad_mode


def gives(target: str, info: InputAliasInfo, value: str) -> Iterator[str]:
    """Write that ``target`` is given the memory of ``value``, as it was by the function."""
    if info.given == "set_":
        yield f"{target}.set_({value})"
        return
    yield f"{target}.data = {value}"
    if info.moves_version:
        yield f"torch.autograd.graph.increment_version({target})"


def is_detached(info: InputAliasInfo) -> bool:
    """Tell whether one of the steps is ``detach_``, which views refuse."""
    return any(step.method == "detach_" for step in info.metadata_steps)


def needs_leave_of_autograd(info: InputAliasInfo) -> bool:
    """Tell whether what happens to an input is something that autograd forbids for some views."""
    unseen = info.mutations_under_no_grad_or_inference_mode or info.mutations_hidden_from_autograd
    if info.mutates_data and info.requires_grad and not unseen:
        return True
    return info.requires_grad and any(step.grad_mode for step in info.metadata_steps)
