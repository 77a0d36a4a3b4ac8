"""The outputs of the forward graph: the new values of written inputs, the user's outputs, the intermediate bases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.ir.extents import byte_interval
from aotlab.ir.metadata import InputAliasInfo, MutationType, TangentSource
from aotlab.trace.autograd_edges import Edge, edge_of
from aotlab.trace.findings import Findings
from aotlab.trace.inputs import TracedInput, bases_of
from aotlab.trace.records import Write
from aotlab.trace.write_calls import overlaps_itself


@dataclass(frozen=True, slots=True)
class Returned:
    """One output of the forward graph.

    ``source`` and ``index`` say which tensor it is, for example the mutated input with the index 2. ``value`` is its
    fake tensor; for a size that depends on values, it is a symbolic number. ``root`` is the traced tensor from which
    gradients are computed, or None if the output does not require grad. ``label`` names the output in messages.
    """

    source: TangentSource
    index: int
    value: Any
    root: Tensor | None
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutputs:
    """All outputs of the forward graph.

    ``returned`` starts with the values for the ``writes`` of the epilogue. ``write_back`` are the pairs (input, new
    value) that the graph itself writes. ``infos`` describe the inputs.
    """

    returned: list[Returned]
    writes: list[Write]
    write_back: list[tuple[Tensor, Tensor]]
    infos: tuple[InputAliasInfo, ...]

    @property
    def training(self) -> bool:
        """Whether there is a root. If not, there is no backward."""
        return bool(self.positions)

    @property
    def positions(self) -> list[int]:
        """The positions of the roots in ``returned``."""
        return [position for position, item in enumerate(self.returned) if item.root is not None]

    @property
    def roots(self) -> list[Returned]:
        """The roots: the outputs that can be differentiated."""
        return [item for item in self.returned if item.root is not None]

    @property
    def edges(self) -> list[Edge]:
        """The autograd edge of each root."""
        return [edge_of(item.root) for item in self.returned if item.root is not None]


def writes_of(inputs: Sequence[TracedInput], infos: Sequence[InputAliasInfo]) -> list[Write]:
    """Choose the inputs that the epilogue writes.

    If the memory of one input is a part of another input's memory, writing the larger input is enough.
    """
    separate = [k for k, item in enumerate(inputs) if item.base is None and item.view_of is None]
    alone = [k for k in separate if infos[k].mutates_data]
    for k in [k for k in separate if inputs[k].has_views and infos[k].moves_version]:
        if not infos[k].mutates_data and not any(item.steps for item in inputs if item.view_of == k):
            raise RunEagerly("version-moves-without-write", name=inputs[k].name)
    writes = [Write(k, inputs[k].written_visibly, infos[k].moves_version) for k in alone]
    for base in bases_of(inputs):
        if not any(infos[k].mutates_data for k in base.members):
            if any(infos[k].moves_version for k in base.members):
                raise RunEagerly("version-moves-without-write", name=inputs[base.members[0]].name)
            continue
        covered: list[tuple[int, int]] = []
        spans = {k: byte_interval(inputs[k].real) for k in base.members}
        for k in sorted(base.members, key=lambda k: spans[k][0] - spans[k][1]):  # the longest first
            real, (start, stop) = inputs[k].real, spans[k]
            if any(a <= start and stop <= b for a, b in covered):
                continue
            if overlaps_itself(real):  # eager does not allow a write to it
                raise RunEagerly("writes-part-of-expanded", way="expanded")
            writes.append(Write(k, visible=False, moves_version=infos[k].moves_version))
            if internals.is_dense(real):
                covered.append((start, stop))
    # Writes that autograd sees come last. After such a write, torch does not allow a write to the same memory through a
    # view that has no autograd history.
    return sorted(writes, key=lambda write: (write.visible, write.index))


def _bound(findings: Findings) -> list[Returned]:
    """Return the unbacked symbols of the forward, because the epilogue and later backwards may need their values."""
    bound = findings.recorder.tape.bound.items()
    numbers = [number for symbol, (_, number) in bound if internals.expression_of(number) == symbol]
    return [Returned(TangentSource.SIZE, i, number, None, str(number.node.expr)) for i, number in enumerate(numbers)]


def forward_outputs(findings: Findings, *, keep_input_mutations: bool) -> ForwardOutputs:
    """Choose the forward graph's outputs.

    With ``keep_input_mutations``, the graph itself writes the mutated inputs, unless an output requires grad or the
    result would differ from eager's. Otherwise the graph returns their new values, and the epilogue writes these back.
    """
    inputs, infos, outputs = findings.inputs, findings.infos, findings.outputs
    finals = [item.final for item in inputs]
    results = [Returned(TangentSource.OUTPUT, i, v, root, outputs.infos[i].name) for i, v, root in outputs.returned]
    for i, (value, root) in enumerate(outputs.bases):
        results.append(Returned(TangentSource.INTERMEDIATE_BASE, i, value, root, f"intermediate base {i}"))
    new_values = []
    writes = writes_of(inputs, infos)
    for write in writes:
        traced, label = inputs[write.index].traced, f"mutated input {infos[write.index].name}"
        root = traced if write.visible and traced.requires_grad else None
        new_values.append(Returned(TangentSource.MUTATED_INPUT, write.index, finals[write.index], root, label))
    written_in_graph: set[int] = set()
    early = (operation for operation in findings.recorder.tape.operations if operation.phase == "forward")
    # The graph does not write inputs if one of its ops may raise, because inputs may be partly written at that time.
    # Nor does it if the epilogue must make a view before the write.
    unfit = not any(info.moves_version for info in infos) or any(info.precedes_write for info in outputs.infos)
    unfit = unfit or any(operation.may_raise_late for operation in early)
    if keep_input_mutations and not unfit and all(item.root is None for item in (*new_values, *results)):
        # A write in the graph changes the version counter of the input. So the epilogue, not the graph, writes an input
        # whose counter eager does not change. The epilogue also writes the inputs that synthetic bases replace, and the
        # bases of views.
        infos = tuple(
            replace(info, keep_input_mutations=True)
            if info.moves_version and item.base is None and not item.is_family
            else info
            for info, item in zip(infos, inputs, strict=True)
        )
        written_in_graph = {info.index for info in infos if info.mutation_type is MutationType.MUTATED_IN_GRAPH}
    return ForwardOutputs(
        returned=[*(item for item in new_values if item.index not in written_in_graph), *results, *_bound(findings)],
        writes=[write for write in writes if write.index not in written_in_graph],
        write_back=[(inputs[k].fake, finals[k]) for k in sorted(written_in_graph)],
        infos=infos,
    )
