"""Inputs that share memory, entered into a trace as windows of one synthetic base.

    buffer = torch.zeros(4)
    f(buffer[:3], buffer[1:])        # and f writes to its first argument

The two traced inputs must share memory as the caller's do: a write to one shows in the other. So both are made from one
traced *base*, whose memory covers theirs, as windows of it. They share memory only: those that share a version counter
share one in the trace too, but each has a history of its own, whatever it is a view of. So a write that autograd sees
runs eagerly; it would give the other inputs a new history.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import FakeTensorMode
from aotlab.capture.signals import NeedsInputsApart
from aotlab.capture.synthetic_bases import Base
from aotlab.trace.inputs import Entered, entered, non_leaf
from aotlab.trace.tape import Tape


def window(source: Tensor, start: int, like: Tensor) -> Tensor:
    """Make the window of ``source`` that lies where ``like`` does, as ``like`` sees it, by ordinary view ops.

    Functionalization can write through any chain of those, but not through ``as_strided`` behind another view.
    ``start`` is how many bytes ``like`` lies behind the first byte of ``source``, whose elements are dense.

    Raises
    ------
    NeedsInputsApart
        There is no such chain.
    """
    flat = _flat(source)
    size = like.element_size()
    if flat.dtype == like.dtype:
        return _strided(flat, start // size, like)
    if flat.dtype.is_complex and like.is_floating_point() and flat.dtype.itemsize == 2 * size:
        return _strided(torch.view_as_real(flat).view(-1), start // size, like)
    if like.is_complex() and flat.dtype.is_floating_point and 2 * flat.dtype.itemsize == size:
        first = 2 * start // size % 2
        pairs = flat.narrow(0, first, (flat.numel() - first) // 2 * 2).view(-1, 2)
        return _strided(torch.view_as_complex(pairs), start // size, like)
    if flat.requires_grad:
        raise NeedsInputsApart("inputs share memory as tensors of dtypes between which autograd knows no view")
    if flat.dtype != torch.uint8:
        flat = flat.view(torch.uint8)
    first = start % size
    whole = flat.narrow(0, first, (flat.numel() - first) // size * size)  # rows are made of more than they hold
    return _strided(whole.view(like.dtype), start // size, like)


def _flat(source: Tensor) -> Tensor:
    if source.dim() == 1 and source.stride(0) == 1:
        return source
    if not internals.is_dense(source):
        raise NeedsInputsApart("inputs share memory with a tensor that has gaps")
    strides, shape = source.stride(), source.shape
    order = sorted(range(source.dim()), key=lambda d: (-strides[d], -shape[d]))
    return source.permute(order).reshape(-1)


def _strided(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    """Make a window with the sizes and strides of ``like`` of a one-dimensional tensor."""
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
            raise NeedsInputsApart("inputs share memory in windows that ordinary view ops do not make")
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


def enter_base(tape: Tape, fake_mode: FakeTensorMode, base: Base, device: torch.device) -> None:
    """Make the traced form of a base."""
    base.fake = tape.enter(internals.new_fake(fake_mode, (base.count,), (1,), base.dtype, device))
    base.wrapper = internals.to_functional(base.fake)


def enter_windows(base: Base, names: Sequence[str], tensors: Sequence[Tensor]) -> list[Entered]:
    """Make the traced stand-ins of the inputs that share a base; runs under the recorder, as it records their views."""
    assert base.wrapper is not None
    origin = tensors[0].data_ptr() + base.shift
    made: dict[int, Tensor] = {}
    families = sorted(_families(tensors), key=len, reverse=True)
    with torch.enable_grad():
        for number, family in enumerate(families):
            # the first family counts writes with the base; an alias by `data` has a counter of its own
            counter = base.wrapper if number == 0 else base.wrapper.data
            made.update({id(real): _placed(counter, real, origin) for real in family})
    result = []
    for name, real in zip(names, tensors, strict=True):
        wrapper = made[id(real)]
        internals.sync(wrapper)
        result.append(entered(name, real, internals.from_functional(wrapper), wrapper, base))
    return result


def _families(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divide tensors by the version counter that they have in common."""
    found: list[list[Tensor]] = []
    for tensor in tensors:
        for family in found:
            if internals.share_version(family[0], tensor):
                family.append(tensor)
                break
        else:
            found.append([tensor])
    return found


def _placed(counter: Tensor, real: Tensor, origin: int) -> Tensor:
    """Make the window of ``real``, which requires grad as that does: a leaf, or something that was computed."""

    def make() -> Tensor:
        return window(counter, real.data_ptr() - origin, real).detach()

    if not real.requires_grad:
        return make()
    if real.is_leaf:
        leaf: Tensor = make().requires_grad_(True)
        return leaf
    leaf = internals.to_functional(internals.from_functional(make())).requires_grad_(True)
    return non_leaf(leaf, make)
