"""What stands for the inputs: traced stand-ins while the function runs, placeholders in the graph.

Inputs that share memory are entered as windows of one synthetic base::

    buffer = torch.zeros(4)
    f(buffer[:3], buffer[1:])        # and f writes to its first argument

The two traced inputs must share memory as the caller's do: a write to one shows in the other. So both are made from one
traced *base*, whose memory covers theirs. Where there can be none (some are views that require grad, say), each is
entered by itself, and the call runs eagerly if the function changes one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.call import Call
from aotlab.capture.dedupe import DedupeRecord
from aotlab.capture.synthetic_bases import Base
from aotlab.trace.function import Findings
from aotlab.trace.inputs import Entered, enter, entered, non_leaf
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import Write
from aotlab.trace.surroundings import tracing


def enter_inputs(recorder: Recorder, call: Call, dedupe: DedupeRecord, bases: Sequence[Base]) -> list[Entered]:
    """Make the traced stand-ins of all inputs; a base that cannot be made has no ``wrapper`` afterwards."""
    tape, fake_mode = recorder.tape, recorder.fake_mode
    tensors = [call.values[position] for position in dedupe.kept]
    found: dict[int, Entered] = {}
    for base in bases:
        for k, wrapper in zip(base.members, _windows(recorder, base, [tensors[k] for k in base.members]), strict=False):
            internals.sync(wrapper)
            found[k] = entered(dedupe.names[k], tensors[k], internals.from_functional(wrapper), wrapper, base)
    for k, (name, real) in enumerate(zip(dedupe.names, tensors, strict=True)):
        if k not in found:
            found[k] = enter(tape, fake_mode, name, real)
    return [found[k] for k in range(len(tensors))]


def _windows(recorder: Recorder, base: Base, members: Sequence[Tensor]) -> list[Tensor]:
    """Make the traced form of a base and its windows, whose views are recorded; none if there can be no such base.

    They share memory and a version counter, and no history: so none of them may be a view that requires grad.
    """
    first = members[0]
    origin = first.data_ptr() + base.shift
    dtypes = {real.dtype for real in members}
    for real in members:
        aligned = (real.data_ptr() - origin) % real.element_size() == 0
        together = internals.share_version(first, real) or (first.is_inference() and real.is_inference())
        related = real.requires_grad and (len(dtypes) > 1 or internals.base_of(real) is not None)
        if related or not aligned or not together or (len(dtypes) > 1 and torch.bool in dtypes):
            return []
    fake = internals.new_fake(recorder.fake_mode, (base.count,), (1,), base.dtype, first.device)
    base.fake = recorder.tape.enter(fake)
    wrapper = internals.to_functional(base.fake)
    with tracing(recorder):
        offsets = [(real.data_ptr() - origin) // real.element_size() for real in members]
        made = [_window(wrapper, offset, real) for offset, real in zip(offsets, members, strict=True)]
        found = [_placed(window, real) for window, real in zip(made, members, strict=True) if window is not None]
    if len(found) < len(members):
        return []
    base.wrapper = wrapper
    return found


def _placed(window: Tensor, real: Tensor) -> Tensor:
    """Make what stands for ``real`` of its window; it requires grad as that does: a leaf, or something computed."""
    if not real.requires_grad or real.is_leaf:
        return window.detach().requires_grad_(real.requires_grad)
    leaf = internals.to_functional(internals.from_functional(window.detach())).requires_grad_(True)
    return non_leaf(leaf, window.detach)


def _window(flat: Tensor, offset: int, like: Tensor) -> Tensor | None:
    """Make a window with the sizes and strides of ``like`` of a one-dimensional tensor; None if it cannot be written.

    Functionalization cannot write through ``as_strided`` behind another view, as a window of bytes would be.
    """
    of_bytes = flat.dtype != like.dtype
    if of_bytes:
        size = like.element_size()
        flat = flat.narrow(0, 0, flat.numel() // size * size).view(like.dtype)
    if like.is_contiguous():
        window = flat.narrow(0, offset, like.numel()).view(like.shape)
        if window.stride() == like.stride():
            return window
    return None if of_bytes else flat.as_strided(like.shape, like.stride(), offset)


def placeholders_of(
    findings: Findings, writes: Sequence[Write], *, training: bool
) -> tuple[list[tuple[str, Tensor]], list[int | Base]]:
    """Name the graph's inputs: the flat arguments, and for those that share memory which is changed their base."""
    dedupe, inputs = findings.dedupe, findings.inputs
    tape, fake_mode = findings.recorder.tape, findings.recorder.fake_mode
    written = {id(inputs[write.index].base) for write in writes}
    prefix = ("primals_{}", 1) if training else ("arg{}_1", 0)
    kept_at = {p: k for k, p in enumerate(dedupe.kept)}
    fakes: list[Tensor] = []
    sources: list[int | Base] = []
    for position in dedupe.placeholders:
        k = kept_at.get(position)
        if k is None:  # a duplicate that keeps its placeholder, which nothing uses
            real = findings.call.values[position]
            fakes.append(tape.enter(fake_mode.from_tensor(real.detach().view_as(real), static_shapes=True)))
            sources.append(position)
            continue
        base = inputs[k].base
        if base is None or id(base) not in written:
            fakes.append(inputs[k].fake)
            sources.append(position)
        elif base not in sources:
            assert base.fake is not None
            fakes.append(base.fake)
            sources.append(base)
    return [(prefix[0].format(n + prefix[1]), fake) for n, fake in enumerate(fakes)], sources
