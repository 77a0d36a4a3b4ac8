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
    """Make a window with the sizes and strides of ``like`` of a one-dimensional tensor, by ordinary view ops.

    Functionalization can write through any chain of those, but not through ``as_strided`` behind another view. None if
    there is no such chain.
    """
    if flat.dtype != like.dtype:  # it is of bytes
        size = like.element_size()
        flat = flat.narrow(0, 0, flat.numel() // size * size).view(like.dtype)
    shape, stride = tuple(like.shape), tuple(like.stride())
    dims = [d for d in range(len(shape)) if shape[d] > 1 and stride[d] > 0]
    dims.sort(key=lambda d: -stride[d])
    result = flat
    for position, d in enumerate(dims):
        length = int(result.shape[-1])
        inner = 1 + sum((shape[e] - 1) * stride[e] for e in dims[position + 1 :])
        count, step = shape[d], stride[d]
        if inner == 1:
            result, offset = result[..., offset : offset + (count - 1) * step + 1 : step], -1
            break
        first = offset - offset % step
        if offset - first + inner > step or first + count * step > length:
            first = min(offset, length - count * step)  # rows may begin anywhere if each holds what is wanted of it
        if first < 0 or offset - first + inner > step:
            return None
        result = result.narrow(-1, first, count * step).unflatten(-1, (count, step))
        offset -= first
    if offset >= 0:
        result = result.select(-1, offset)
    for d in (d for d in range(len(shape)) if shape[d] == 1 and stride[d] > 0):
        result = result.unsqueeze(-1)[..., :: stride[d]]  # the step to where another element would be can be seen
        dims.append(d)
    result = result.permute([dims.index(d) for d in sorted(dims)])
    for d in range(len(shape)):
        if d not in dims:
            result = result.unsqueeze(d)
    return result.expand(shape) if any(n > 1 and step == 0 for n, step in zip(shape, stride, strict=True)) else result


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
