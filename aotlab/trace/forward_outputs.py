"""What the forward graph returns: the new values of written inputs, the outputs, the intermediate bases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.ir.extents import byte_interval
from aotlab.ir.metadata import InputAliasInfo, MutationType, TangentSource
from aotlab.trace.edges import Edge, edge_of
from aotlab.trace.function import Findings
from aotlab.trace.inputs import Entered, bases_of
from aotlab.trace.records import Write
from aotlab.trace.write_calls import overlaps_itself


@dataclass(frozen=True, slots=True)
class Returned:
    """One output of the forward graph: what it is, its value, and the wrapper to differentiate (None: nothing to)."""

    source: TangentSource
    index: int
    value: Tensor
    root: Tensor | None
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutputs:
    """All of them: ``returned``, first the values for ``writes``; the graph does ``write_back``: (input, new value)."""

    returned: list[Returned]
    writes: list[Write]
    write_back: list[tuple[Tensor, Tensor]]
    infos: tuple[InputAliasInfo, ...]

    @property
    def training(self) -> bool:
        """Whether anything can be differentiated."""
        return bool(self.positions)

    @property
    def positions(self) -> list[int]:
        """The positions of those that can be differentiated."""
        return [position for position, item in enumerate(self.returned) if item.root is not None]

    @property
    def roots(self) -> list[Returned]:
        """Those that can be differentiated."""
        return [item for item in self.returned if item.root is not None]

    @property
    def edges(self) -> list[Edge]:
        """Where the autograd graph of each root begins."""
        return [edge_of(item.root) for item in self.returned if item.root is not None]


def writes_of(inputs: Sequence[Entered], infos: Sequence[InputAliasInfo]) -> list[Write]:
    """Decide into which of the caller's tensors the epilogue writes: of shared memory, not into a part of another."""
    alone = [k for k, info in enumerate(infos) if info.mutates_data and inputs[k].base is None]
    found = [Write(k, inputs[k].written_visibly, infos[k].moves_version) for k in alone]
    for base in bases_of(inputs):
        if not any(infos[k].mutates_data for k in base.members):
            if any(infos[k].moves_version for k in base.members):
                raise RunEagerly(f"a write to `{inputs[base.members[0]].name}`, which shares memory, changes nothing")
            continue
        covered: list[tuple[int, int]] = []
        spans = {k: byte_interval(inputs[k].real) for k in base.members}
        for k in sorted(base.members, key=lambda k: spans[k][0] - spans[k][1]):  # the longest first
            real, (start, stop) = inputs[k].real, spans[k]
            if any(a <= start and stop <= b for a, b in covered):
                continue
            if overlaps_itself(real):  # eager lets nobody write it
                raise RunEagerly(f"`{inputs[k].name}` overlaps itself and may be written")
            found.append(Write(k, visible=False, counts=infos[k].moves_version))
            if internals.is_dense(real):
                covered.append((start, stop))
    # last those that require grad: after them torch lets nobody write the memory through a view without a history
    return sorted(found, key=lambda write: (write.visible, write.index))


def forward_outputs(findings: Findings, *, keep_input_mutations: bool) -> ForwardOutputs:
    """List what the forward graph returns; with ``keep_input_mutations`` it writes inputs itself where it can."""
    inputs, infos, outputs = findings.inputs, findings.infos, findings.outputs
    finals = [internals.from_functional(item.wrapper) for item in inputs]
    results = [Returned(TangentSource.OUTPUT, i, v, root, outputs.infos[i].name) for i, v, root in outputs.returned]
    for i, (value, root) in enumerate(outputs.bases):
        results.append(Returned(TangentSource.INTERMEDIATE_BASE, i, value, root, f"intermediate base {i}"))
    new_values = []
    writes = writes_of(inputs, infos)
    for write in writes:
        wrapper, label = inputs[write.index].wrapper, f"mutated input {infos[write.index].name}"
        root = wrapper if write.visible and wrapper.requires_grad else None
        new_values.append(Returned(TangentSource.MUTATED_INPUT, write.index, finals[write.index], root, label))
    kept: set[int] = set()
    early = (operation for operation in findings.recorder.tape.operations if operation.phase == "forward")
    # a graph that may raise writes nothing, nor where a view is to be made before a write
    unfit = not any(info.moves_version for info in infos) or any(info.precedes_write for info in outputs.infos)
    unfit = unfit or any(operation.may_raise_late for operation in early)
    if keep_input_mutations and not unfit and all(item.root is None for item in (*new_values, *results)):
        # a write in the graph moves the version counter; where eager's does not, the epilogue writes
        infos = tuple(
            replace(info, keep_input_mutations=True) if info.moves_version and item.base is None else info
            for info, item in zip(infos, inputs, strict=True)
        )
        kept = {info.index for info in infos if info.mutation_type is MutationType.MUTATED_IN_GRAPH}
    return ForwardOutputs(
        returned=[*(item for item in new_values if item.index not in kept), *results],
        writes=[write for write in writes if write.index not in kept],
        write_back=[(inputs[k].fake, finals[k]) for k in sorted(kept)],
        infos=infos,
    )
