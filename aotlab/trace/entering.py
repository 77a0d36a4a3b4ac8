"""Make the traced tensors that replace the inputs while the function runs, and the placeholders of the graph.

Inputs that share memory become windows of one synthetic base::

    buffer = torch.zeros(4)
    f(buffer[:3], buffer[1:])        # and f writes to its first argument

The two traced tensors must share memory like the caller's tensors: a write to one is visible in the other. So both are
views of one traced *base*, whose memory covers both. Some inputs cannot have a base, for example views that require
grad. Then each gets its own memory, and the trace ends if the function changes one of them. If the base of these views
can be an input (`aotlab.capture.view_bases`), the next trace makes each of them as a view of the traced base.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.call import Call
from aotlab.capture.dedupe import DedupeRecord
from aotlab.capture.synthetic_bases import Base
from aotlab.trace.autograd_edges import non_leaf
from aotlab.trace.findings import Findings
from aotlab.trace.inputs import TracedInput, enter_input, note_initial_state
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import SizeOf, Write
from aotlab.trace.surroundings import tracing
from aotlab.trace.write_calls import may_overlap_itself


def enter_inputs(
    recorder: Recorder, call: Call, dedupe: DedupeRecord, bases: Sequence[Base], varying: Mapping[int, Collection[int]]
) -> list[TracedInput]:
    """Make the traced tensors of all kept inputs, and of the synthetic bases.

    ``varying`` has, by the position of a flat argument, the dimensions whose sizes become symbols. If no traced tensor
    can be made for a base, its ``traced`` stays None, and its members are entered like other inputs.
    """
    tape, fake_mode = recorder.tape, recorder.fake_mode
    tensors = [call.values[position] for position in dedupe.kept]
    entered_inputs: dict[int, TracedInput] = {}
    for base in bases:
        for k, traced in zip(base.members, _windows(recorder, base, [tensors[k] for k in base.members]), strict=False):
            internals.sync(traced)
            entered_inputs[k] = note_initial_state(
                dedupe.names[k], tensors[k], internals.from_functional(traced), traced, base
            )
    index = {position: k for k, position in enumerate(dedupe.kept)}
    view_of = {index[i]: index[base_position] for i, base_position in call.view_bases.items()}
    for k, (name, real) in enumerate(zip(dedupe.names, tensors, strict=True)):
        if k not in entered_inputs and k not in view_of:
            fake = None
            if recorder.sizes is not None and dedupe.kept[k] in varying:
                fake = recorder.sizes.enter(fake_mode, dedupe.kept[k], real, varying[dedupe.kept[k]])
            entered_inputs[k] = enter_input(tape, fake_mode, name, real, fake)
    for k, parent in view_of.items():
        entered_inputs[k] = _enter_view(recorder, dedupe.names[k], tensors[k], entered_inputs[parent])
        entered_inputs[k].view_of = parent
    return [entered_inputs[k] for k in range(len(tensors))]


def _enter_view(recorder: Recorder, name: str, real: Tensor, base: TracedInput) -> TracedInput:
    """Make the traced tensor of an input that is a view of another input, ``base``."""
    # One `as_strided` directly on the base, because functionalization cannot write through a chain of views that
    # contains `as_strided` at another place.
    with tracing(recorder), torch.enable_grad():
        traced = base.traced.as_strided(real.shape, real.stride(), real.storage_offset())
    internals.sync(traced)
    base.has_views = True
    return note_initial_state(name, real, internals.from_functional(traced), traced, None)


def _windows(recorder: Recorder, base: Base, members: Sequence[Tensor]) -> list[Tensor]:
    """Make the traced tensor of a base, and return its windows.

    ``members`` are the caller's tensors that share the memory of the base. The result has one window per member, which
    replaces this tensor in the trace. The recorder records the view ops that make the windows. The windows share
    memory and a version counter, but they have no common autograd history. Therefore no member may be a view that
    requires grad. A lazy conjugate cannot be a window either. If a member cannot be a window, the result is empty.
    """
    first = members[0]
    origin = internals.address_of(first) + base.shift
    shifts = [internals.address_of(real) - origin for real in members]
    for real, shift in zip(members, shifts, strict=True):
        together = internals.share_version(first, real) or (first.is_inference() and real.is_inference())
        is_view = real.requires_grad and internals.base_of(real) is not None
        aligned = real.dtype == first.dtype and shift % real.element_size() == 0
        if (
            is_view
            or real.is_conj()
            or not together
            or not aligned
            or may_overlap_itself(_unexpanded_sizes(real), real.stride())
        ):
            return []
    fake = internals.new_fake(recorder.fake_mode, (base.count,), (1,), base.dtype, first.device)
    base.fake = recorder.tape.enter(fake)
    base.traced = internals.to_functional(base.fake)
    with tracing(recorder):
        return [_window(base.traced, n // real.element_size(), real) for real, n in zip(members, shifts, strict=True)]


def _window(memory: Tensor, offset: int, real: Tensor) -> Tensor:
    """Make the traced tensor that replaces the input ``real``: a view of ``memory``, the traced tensor of the base.

    The view begins ``offset`` elements after the beginning of the base.
    """
    window = memory
    if real.is_contiguous():  # a slice, which compilers fuse better
        window = memory.narrow(0, offset, real.numel()).view(real.shape)
    if window.stride() != real.stride():
        window = memory.as_strided(_unexpanded_sizes(real), real.stride(), offset)
    if window.shape != real.shape:
        window = window.expand(real.shape)
    if not real.requires_grad or real.is_leaf:
        return window.detach().requires_grad_(real.requires_grad)
    leaf = internals.to_functional(internals.from_functional(window.detach())).requires_grad_(True)
    return non_leaf(leaf, window.detach)


def _unexpanded_sizes(tensor: Tensor) -> list[int]:
    """Return the sizes of a tensor, with size 1 for each expanded dimension.

    Elements of an expanded dimension share memory. PyTorch does not allow writes to such elements, so an input may be
    a window although it is expanded.
    """
    return [size if step else min(size, 1) for size, step in zip(tensor.shape, tensor.stride(), strict=True)]


def placeholders_of(
    findings: Findings, writes: Sequence[Write], *, training: bool
) -> tuple[list[tuple[str, Any]], list[int | Base | SizeOf]]:
    """Return the placeholders of the graph as pairs (name, fake tensor or symbolic size), and the origin of each.

    The origin says where the run-time value of a placeholder comes from. There are three kinds:

    - The position of a flat argument that is a tensor, or of the base of a view. If ``writes`` include this base, it
      replaces its views.
    - A synthetic base. If ``writes``, the write-backs of the epilogue, include a window of a base, then the base
      replaces all of its windows.
    - A `SizeOf`, for a symbolic size. The symbolic sizes come last.

    ``training`` says whether there is a backward. The names of the placeholders are upstream's, which depend on this.
    """
    dedupe, inputs = findings.dedupe, findings.inputs
    tape, fake_mode = findings.recorder.tape, findings.recorder.fake_mode
    written = {id(inputs[write.index].base) for write in writes}
    written_bases = {write.index for write in writes}
    prefix = ("primals_{}", 1) if training else ("arg{}_1", 0)
    kept_at = {p: k for k, p in enumerate(dedupe.kept)}
    fakes: list[Tensor] = []
    sources: list[int | Base | SizeOf] = []
    for position in dedupe.placeholders:
        k = kept_at.get(position)
        if k is None:  # a duplicate: it keeps its placeholder, but no op uses it
            real = findings.call.values[position]
            fakes.append(tape.enter(fake_mode.from_tensor(real.detach().view_as(real), static_shapes=True)))
            sources.append(position)
            continue
        base, parent = inputs[k].base, inputs[k].view_of
        k = k if parent is None or parent not in written_bases else parent  # the base replaces its views
        if base is None or id(base) not in written:
            if dedupe.kept[k] not in sources:
                fakes.append(inputs[k].fake)
                sources.append(dedupe.kept[k])
        elif base not in sources:
            assert base.fake is not None
            fakes.append(base.fake)
            sources.append(base)
    named = [(prefix[0].format(n + prefix[1]), fake) for n, fake in enumerate(fakes)]
    for symbol, name, position, dim in findings.recorder.sizes.symbols() if findings.recorder.sizes is not None else ():
        named.append((f"size_{len(sources) - len(fakes)}", symbol))
        sources.append(SizeOf(name, position, dim))
    return named, sources
