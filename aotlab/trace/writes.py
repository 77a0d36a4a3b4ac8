"""Which of the caller's tensors the epilogue writes.

def f(a, b):           # b = a[2:], so both are windows of one base
    a.mul_(2)          # a is written; b shows it, and gets nothing of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.capture.synthetic_bases import Base, extent
from aotlab.ir.metadata import InputAliasInfo
from aotlab.trace.inputs import Entered
from aotlab.trace.records import Write
from aotlab.trace.write_calls import overlaps_itself


def writes_of(inputs: Sequence[Entered], infos: Sequence[InputAliasInfo]) -> list[Write]:
    """Decide into which of the caller's tensors the epilogue writes.

    Of tensors that share memory those are written that the program wrote, and the others only where that leaves bytes
    of theirs out.
    """
    found: list[Write] = []
    for k, info in enumerate(infos):
        if info.mutates_data and inputs[k].base is None:
            found.append(Write(k, inputs[k].written_visibly, info.moves_version))
    for base in {id(i.base): i.base for i in inputs if i.base is not None}.values():
        if base.written and all(start == end for start, end in base.written):
            raise RunEagerly(f"a part of `{inputs[base.members[0]].name}` that holds nothing is written")
        if not _is_written(base, inputs):
            continue
        covered: list[tuple[int, int]] = []
        order = sorted(base.members, key=lambda k: (not infos[k].moves_version, -extent(inputs[k].real)))
        for k in order:
            real = inputs[k].real
            start = real.data_ptr()
            inside = any(a <= start and start + extent(real) <= b for a, b in covered)
            if _is_untouched(base, inputs, k):
                continue
            if overlaps_itself(real):
                if inside:
                    continue  # eager lets nobody write it: what it shows was written through the others
                raise RunEagerly(f"`{inputs[k].name}` overlaps itself and may be written")
            if inside or any(_are_one_window(inputs[w.index].real, real) for w in found):
                if infos[k].moves_version and not any(_count_together(inputs[w.index], inputs[k]) for w in found):
                    found.append(Write(k, visible=False, counts=True, only_counts=True))
                continue
            found.append(Write(k, visible=False, counts=infos[k].moves_version))
            if internals.is_dense(real):
                covered.append((start, start + extent(real)))
    # After a write that requires grad torch lets nobody write another part of the memory through a view without a
    # history: such writes come last.
    return sorted(found, key=lambda write: (write.only_counts, write.visible, write.index))


def written_bases(inputs: Sequence[Entered], writes: Sequence[Write]) -> list[Base]:
    """Return the bases that the graph is to take as inputs."""
    members = [inputs[write.index] for write in writes]
    return list({id(item.base): item.base for item in members if item.base is not None}.values())


def _are_one_window(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.dtype, a.shape, a.stride()) == (b.data_ptr(), b.dtype, b.shape, b.stride())


def _is_untouched(base: Base, inputs: Sequence[Entered], k: int) -> bool:
    """Tell whether surely none of the writes to a base reached the bytes of one of its windows."""
    if base.written is None:
        return False
    start = inputs[k].real.data_ptr() - inputs[base.members[0]].real.data_ptr() - base.shift
    return all(stop <= start or start + extent(inputs[k].real) <= begin for begin, stop in base.written)


def _is_written(base: Base, inputs: Sequence[Entered]) -> bool:
    """Tell whether a write to a base's memory was recorded that left something else in one of its windows."""
    assert base.wrapper is not None
    return internals.has_data_mutation(base.wrapper) and any(
        internals.from_functional(inputs[k].wrapper) is not inputs[k].fake for k in base.members
    )


def _count_together(a: Entered, b: Entered) -> bool:
    return internals.share_version(a.real, b.real)


def with_uncounted_writes(inputs: Sequence[Entered], infos: tuple[InputAliasInfo, ...]) -> tuple[InputAliasInfo, ...]:
    """If no version counter tells through which window a base was written, mark all its windows as written."""
    written: set[int] = set()
    for base in {id(i.base): i.base for i in inputs if i.base is not None}.values():
        if _is_written(base, inputs) and not any(infos[k].mutates_data for k in base.members):
            written.update(base.members)
    return tuple(
        replace(
            info,
            mutates_data=True,
            mutations_hidden_from_autograd=info.requires_grad and not inputs[info.index].counts_unseen,
            moves_version=info.moves_version or inputs[info.index].counts_unseen,
        )
        if info.index in written
        else info
        for info in infos
    )
