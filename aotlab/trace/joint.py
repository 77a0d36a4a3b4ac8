"""From what the run showed to the joint graph: choose what the forward returns, make tangents, differentiate, write."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.capture.synthetic_bases import Base
from aotlab.ir.metadata import TangentInfo, TangentSource, ViewAndMutationMeta
from aotlab.ir.specs import spec_of
from aotlab.trace.deriver import Deriver, Tangents, tangent_like
from aotlab.trace.edges import Edge
from aotlab.trace.entering import placeholders_of
from aotlab.trace.forward_outputs import ForwardOutputs, Returned, forward_outputs
from aotlab.trace.function import Findings
from aotlab.trace.gradients import check_histories, check_out_of_sight, differentiate_all, unwritten
from aotlab.trace.history import node_bits, read_by_themselves, state_masks, survey, watches
from aotlab.trace.inputs import value_of
from aotlab.trace.live import Effects, GraphInputs, ProgramOutputs, SavingNodes, Trace
from aotlab.trace.owners import check_owners
from aotlab.trace.passed_views import check_passed
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import AutogradNode, Source, TraceRecord
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.sources import divide, made_through, place_hooks


def make_joint(
    findings: Findings, *, keep_input_mutations: bool, static_inputs: int, exact: bool
) -> tuple[TraceRecord, Trace]:
    """Make the tangents, differentiate, and write the joint graph."""
    recorder, outputs = findings.recorder, findings.outputs
    forward = forward_outputs(findings, keep_input_mutations=keep_input_mutations)
    inputs = _graph_inputs(findings, forward)
    sources, parts = divide(findings, forward, exact=exact)
    tangents, tangent_infos, carriers = _make_tangents(recorder, forward.roots, parts)
    sources.update(carriers)
    through = made_through(outputs)
    check_passed(outputs, findings.inputs, through)
    effects = _effects(findings, forward, sources)
    slots = _slots(parts, sources, inputs.sources, findings.dedupe.kept)
    holder = findings.holder if recorder.has_checkpoints else nullcontext
    deriver = Deriver(recorder, parts, slots, tangents, holder)
    bits = node_bits(parts)
    connected, watch = _differentiate(findings, forward, deriver, bits)
    trace = Trace(
        call_name=findings.call.target.name,
        recorder=recorder,
        metadata=ViewAndMutationMeta(
            input_info=forward.infos,
            output_info=tuple(outputs.infos),
            intermediate_bases=tuple(spec_of(value) for value, _ in outputs.bases),
            tangents=tangent_infos,
            keep_input_mutations=keep_input_mutations and not forward.training,
            grad_enabled_mutation=findings.left_grad_mode,
            static_input_indices=tuple(range(static_inputs)),
        ),
        inputs=inputs,
        outputs=ProgramOutputs(
            spec=findings.out_spec, constants=outputs.constants, visible=findings.visible, made_through=through
        ),
        effects=effects,
        forward_outputs=[item.value for item in forward.returned],
        returned_outputs=[i for i, _, _ in outputs.returned],
        writes=forward.writes,
        roots=forward.positions,
        root_wrappers=[item.root for item in forward.returned if item.root is not None],
        segments=parts,
        slots=slots,
        connected=connected,
        sources=sources,
        tangents=tangents,
        saving=SavingNodes(bits=bits, masks=state_masks(parts, bits), watch=watch),
        deriver=deriver,
    )
    if trace.training or torch.is_grad_enabled():
        check_owners(trace, findings)
    return _record(trace, forward), trace


def _graph_inputs(findings: Findings, forward: ForwardOutputs) -> GraphInputs:
    placeholders, sources = placeholders_of(findings, forward.writes, training=forward.training)
    return GraphInputs(
        fakes=[item.fake for item in findings.inputs],
        placeholders=placeholders,
        sources=sources,
        offsets_read=findings.offsets_read,
        final_offsets=[int(item.wrapper.storage_offset()) for item in findings.inputs],
    )


def _effects(findings: Findings, forward: ForwardOutputs, sources: Mapping[Edge, Source]) -> Effects:
    chronicle = findings.chronicle

    def inputs_of(memory: Collection[int]) -> frozenset[int]:
        return frozenset(k for k, item in enumerate(findings.inputs) if item.storage in memory)

    return Effects(
        write_back=forward.write_back,
        hooks=place_hooks(findings.hooks, sources, findings.outputs, findings.inputs),
        quirks=findings.recorder.quirks,
        fragile=inputs_of(chronicle.fragile),
        viewed_unseen=inputs_of(chronicle.viewed_unseen),
        viewed_late=inputs_of(chronicle.used_late),
    )


def _differentiate(
    findings: Findings, forward: ForwardOutputs, deriver: Deriver, bits: Mapping[Any, int]
) -> tuple[list[list[bool]], dict[Source, int]]:
    """Differentiate all segments; say which slots a gradient can reach, and what nodes keep of the caller's tensors."""
    parts, has_checkpoints = deriver.segments, findings.recorder.has_checkpoints
    seen = survey(parts)
    reads_by_itself = forward.training and (bool(seen.custom) or has_checkpoints)
    if reads_by_itself and any(item.real.is_inference() for item in findings.inputs):
        raise RunEagerly("a custom Function or a checkpoint may keep an inference tensor, which autograd does not save")
    callers = _callers(findings, deriver.tangents)
    visible = _visible(findings)
    masks = watches(bits, list(visible.values()), findings.chronicle.kept_by)
    with unwritten(callers, seen.custom, has_checkpoints=has_checkpoints):
        connected = differentiate_all(deriver)
    if len(deriver.draws) > 1:
        raise RunEagerly(
            "several parts of the backward draw random numbers, each in its turn, where eager may draw by turns",
            suggestion="return results together, as one tensor, to have it compiled",
        )
    if forward.training:
        check_out_of_sight(seen, [tensor for _, tensor in callers], hooked=bool(findings.hooks))
        check_histories(forward.infos, findings.inputs)
    if reads_by_itself:
        read = read_by_themselves(findings.recorder.tape, [*seen.custom, *bits], bits)
        for n, tensor in enumerate(visible.values()):
            if internals.is_functional(tensor):
                masks[n] |= read.get(internals.storage_key(value_of(tensor, "a result")), 0)
    return connected, {source: mask for source, mask in zip(visible, masks, strict=True) if mask}


def _make_tangents(
    recorder: Recorder, roots: Sequence[Returned], parts: Sequence[Segment]
) -> tuple[Tangents, tuple[TangentInfo, ...], dict[Edge, Source]]:
    """Make a tangent for each root, then one for each carrier; return with them the carriers, by their edges."""
    fakes: list[Tensor] = []
    infos: list[TangentInfo] = []
    carriers: dict[Edge, Source] = {}

    def add(fake: Tensor, source: TangentSource, index: int) -> None:
        fakes.append(fake)
        infos.append(TangentInfo(source=source, index=index, spec=spec_of(fake)))

    for item in roots:
        add(tangent_like(recorder, item.value), item.source, item.index)
    of_entries = []
    for part in parts:
        numbers = list(part.roots)
        for edge in part.entries[len(part.roots) :]:
            shape, dtype, device = internals.edge_metadata(*edge)
            with recorder.fake_mode:
                tangent = recorder.tape.enter(torch.empty(shape, dtype=dtype, device=device))
            carriers[edge] = Source("carrier", len(carriers))
            numbers.append(len(fakes))
            add(tangent, TangentSource.CARRIER, carriers[edge].index)
        of_entries.append(numbers)
    wrappers = [internals.to_functional(fake) for fake in fakes]
    return Tangents(fakes=fakes, wrappers=wrappers, of_entries=of_entries), tuple(infos), carriers


def _slots(
    parts: Sequence[Segment], known: Mapping[Edge, Source], sources: Sequence[int | Base], kept: Sequence[int]
) -> list[list[Exit | None]]:
    """List where the gradients leave each segment; of the only one, in the order of the graph's inputs."""
    if not parts or parts[0].nodes is not None:
        return [list(part.exits) for part in parts]
    exits = parts[0].exits
    at = {kept[known[way[0]].index]: way for way in exits if known[way[0]].kind == "input"}
    first: list[Exit | None] = [None if isinstance(p, Base) else at.pop(p, None) for p in sources]
    return [[*first, *(way for way in exits if way not in first)]]


def _visible(findings: Findings) -> dict[Source, Tensor]:
    """Return the inputs and outputs, as wrappers."""
    visible = {Source("input", k): item.wrapper for k, item in enumerate(findings.inputs)}
    return {**visible, **{Source("output", i): tensor for i, tensor in findings.outputs.tensors.items()}}


def _callers(findings: Findings, tangents: Tangents) -> list[tuple[str, Tensor]]:
    """List the wrappers of what the caller can see: inputs, outputs, and the gradients that come in."""
    infos = findings.outputs.infos
    named = [(f"`{item.name}`", item.wrapper) for item in findings.inputs]
    named += [(f"`{infos[i].name}`", tensor) for i, tensor in findings.outputs.tensors.items()]
    return named + [("the gradient that it is given", wrapper) for wrapper in tangents.wrappers]


def _record(trace: Trace, forward: ForwardOutputs) -> TraceRecord:
    """Write the joint graph, and what a reader of the trace wants to know."""
    tape, training = trace.tape, trace.training
    gradients = [gradient for segment in sorted(trace.deriver.full) for gradient in trace.deriver.full[segment]]
    backward_draws = {index for drawn in trace.deriver.draws for index in drawn}
    tangents = [(f"tangents_{n + 1}", fake) for n, fake in enumerate(trace.tangents.fakes)]
    module = tape.graph(
        "Joint" if training else "Forward",
        [*trace.inputs.placeholders, *tangents],
        [*trace.forward_outputs, *gradients],
        keep_impure="forward",
        write_back=trace.effects.write_back,
        keep=backward_draws,
    )
    return TraceRecord(
        tracer="aotlab",
        module=module,
        metadata=trace.metadata,
        training=training,
        inputs=tuple(name for name, _ in trace.inputs.placeholders),
        outputs=tuple(item.label for item in forward.returned),
        random_ops=tuple(
            str(o.draws_as)
            for o in tape.operations
            if o.draws_as is not None and (o.phase == "forward" or o.index in backward_draws)
        ),
        operations=len(tape.operations),
        autograd_nodes=_autograd_nodes(trace, forward.roots),
        bases=tuple(tuple(source.members) for source in trace.inputs.sources if isinstance(source, Base)),
    )


def _autograd_nodes(trace: Trace, roots: Sequence[Returned]) -> tuple[AutogradNode, ...]:
    """Say what each autograd node of the call makes, and where its gradients go."""
    arrives = {entry: number for number, part in enumerate(trace.segments) for entry in part.entries[len(part.roots) :]}
    found = []
    for number, part in enumerate(trace.segments):
        makes = [roots[n].label for n in part.roots]
        if len(part.entries) > len(part.roots):
            makes.append("what other nodes use")
        goes_to: dict[str, None] = {}
        for way in trace.slots[number]:
            if way is not None:
                edge = way[0]
                text = f"node {arrives[edge]}" if edge in arrives else _named(trace, roots, trace.sources.get(edge))
                goes_to[text] = None
        found.append(AutogradNode(number=number, makes=tuple(makes), goes_to=tuple(goes_to)))
    return tuple(found)


def _named(trace: Trace, roots: Sequence[Returned], source: Source | None) -> str:
    if source is None:
        return "nothing that the caller sees"
    infos = trace.metadata.input_info
    match source.kind:
        case "input":
            return infos[source.index].name
        case "root":
            return roots[source.index].label
        case "output":
            return trace.metadata.output_info[source.index].name
        case "carrier":
            return "another node"
