"""What stands for the inputs: traced stand-ins while the function runs, placeholders in the graph.

enter_inputs    each tensor of the call becomes a wrapper; those that share memory become windows of a base
placeholders_of the graph takes the flat arguments, or for those that share memory which is changed their base
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from aotlab.capture.call import Call
from aotlab.capture.dedupe import DedupeRecord
from aotlab.capture.synthetic_bases import Base
from aotlab.trace.function import Findings
from aotlab.trace.inputs import Entered, enter
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import Write
from aotlab.trace.surroundings import tracing
from aotlab.trace.windows import enter_base, enter_windows
from aotlab.trace.writes import written_bases


def enter_inputs(recorder: Recorder, call: Call, dedupe: DedupeRecord, bases: Sequence[Base]) -> list[Entered]:
    """Make the traced stand-ins of all inputs."""
    tape, fake_mode = recorder.tape, recorder.fake_mode
    tensors = [call.values[position] for position in dedupe.kept]
    found: dict[int, Entered] = {}
    for base in bases:
        names = [dedupe.names[k] for k in base.members]
        enter_base(tape, fake_mode, base, tensors[base.members[0]].device)
        with tracing(recorder):
            entered = enter_windows(base, names, [tensors[k] for k in base.members])
        found.update(zip(base.members, entered, strict=True))
    for k, (name, real) in enumerate(zip(dedupe.names, tensors, strict=True)):
        if k not in found:
            found[k] = enter(tape, fake_mode, name, real)
    return [found[k] for k in range(len(tensors))]


def placeholders_of(
    findings: Findings, writes: Sequence[Write], *, training: bool
) -> tuple[list[tuple[str, Tensor]], list[int | Base]]:
    """Name the graph's inputs: the flat arguments, and for those that share memory which is changed their base."""
    dedupe, inputs = findings.dedupe, findings.inputs
    tape, fake_mode = findings.recorder.tape, findings.recorder.fake_mode
    written = {id(base) for base in written_bases(inputs, writes)}
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
            fakes.append(base.fake)
            sources.append(base)
    return [(prefix[0].format(n + prefix[1]), fake) for n, fake in enumerate(fakes)], sources
