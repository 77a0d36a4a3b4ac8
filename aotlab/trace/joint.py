"""From what the run showed to the joint graph: choose what the forward returns, make tangents, differentiate, write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.capture.synthetic_bases import Base
from aotlab.ir.metadata import TangentInfo, TangentSource, ViewAndMutationMeta
from aotlab.ir.specs import spec_of
from aotlab.trace.backward_writes import unwritten
from aotlab.trace.edges import Edge
from aotlab.trace.entering import placeholders_of
from aotlab.trace.forward_outputs import ForwardOutputs, Returned, forward_outputs
from aotlab.trace.function import Findings
from aotlab.trace.gradients import check_histories, check_out_of_sight, differentiate_all
from aotlab.trace.history import node_bits, read_by_themselves, state_masks, survey, watches
from aotlab.trace.hooked import check_partners, check_passed
from aotlab.trace.inputs import value_of
from aotlab.trace.live import Trace
from aotlab.trace.nodes import autograd_nodes
from aotlab.trace.owners import check_owners
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import Source, TraceRecord
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.sources import divide, made_through, place_hooks
from aotlab.trace.write_calls import may_overlap_itself


def make_joint(
    findings: Findings, *, keep_input_mutations: bool, static_inputs: int, exact: bool
) -> tuple[TraceRecord, Trace]:
    """Make the tangents, differentiate, and write the joint graph."""
    forward = forward_outputs(findings, keep_input_mutations=keep_input_mutations)
    placeholders, placeholder_sources = placeholders_of(findings, forward.writes, training=forward.training)
    known, parts = divide(findings, forward, exact=exact)
    tangents = _Tangents(findings.recorder, forward.roots, parts)
    known.update(tangents.carriers)
    through = made_through(findings.outputs)
    slots = _slots(parts, known, placeholder_sources, findings.dedupe.kept)
    bits = node_bits(parts, findings.chronicle.keeping_nothing)
    check_partners(findings.hooks, findings.outputs, findings.inputs)
    check_passed(findings.hooks, findings.outputs, findings.inputs, through)
    metadata = ViewAndMutationMeta(
        input_info=forward.infos,
        output_info=tuple(findings.outputs.infos),
        intermediate_bases=tuple(spec_of(value) for value, _ in findings.outputs.bases),
        tangents=tuple(tangents.infos),
        keep_input_mutations=keep_input_mutations and not forward.training,
        grad_enabled_mutation=findings.left_grad_mode,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        static_input_indices=tuple(range(static_inputs)),
    )
    chronicle, visible = findings.chronicle, _visible(findings)
    masks = watches(bits, list(visible.values()), chronicle.kept_by)
    trace = Trace(
        tape=findings.recorder.tape,
        recorder=findings.recorder,
        fake_mode=findings.recorder.fake_mode,
        call_name=findings.call.target.name,
        input_fakes=[i.fake for i in findings.inputs],
        placeholders=placeholders,
        placeholder_sources=placeholder_sources,
        forward_outputs=[item.value for item in forward.returned],
        writes=forward.writes,
        counted=[write.index for write in forward.counted],
        write_back=forward.write_back,
        roots=forward.positions,
        root_wrappers=[item.root for item in forward.returned if item.root is not None],
        segments=parts,
        entry_tangents=tangents.of_entries,
        tangents=tangents.fakes,
        tangent_wrappers=[internals.to_functional(tangent) for tangent in tangents.fakes],
        slots=slots,
        connected=[[way is not None for way in own] for own in slots],
        sources=known,
        full={},
        bits=bits,
        state_masks=state_masks(parts, bits),
        watch={s: mask for s, mask in zip(visible, masks, strict=True) if mask},
        fragile=frozenset(k for k, item in enumerate(findings.inputs) if chronicle.has_fragile_views(item.storage)),
        viewed_unseen=frozenset(k for k, i in enumerate(findings.inputs) if chronicle.was_viewed_unseen(i.storage)),
        viewed_late=frozenset(k for k, i in enumerate(findings.inputs) if chronicle.used_late(i.storage)),
        out_spec=findings.out_spec,
        out_constants=findings.outputs.constants,
        offsets_read=findings.offsets_read,
        warned=findings.warned,
        returned_outputs=[i for i, _, _ in findings.outputs.returned],
        made_through=through,
        final_offsets=[int(i.wrapper.storage_offset()) for i in findings.inputs],
        visible_outputs=findings.visible,
        hooks=place_hooks(findings.hooks, known, findings.outputs, findings.inputs),
        sets_saved_hooks=findings.sets_saved_hooks,
        differentiates=findings.differentiates,
        holder=findings.holder if findings.recorder.has_checkpoints else nullcontext,
        metadata=metadata,
    )
    seen = survey(parts)
    has_checkpoints = findings.recorder.has_checkpoints
    reads_by_itself = trace.training and (bool(seen.custom) or has_checkpoints)
    if reads_by_itself and any(item.real.is_inference() for item in findings.inputs):
        raise RunEagerly("a custom Function or a checkpoint may keep an inference tensor, which autograd does not save")
    with unwritten(_callers(findings, trace), seen.custom, has_checkpoints=has_checkpoints):
        gradients = differentiate_all(trace)
    if sum(map(bool, trace.drawn_of_full.values())) > 1:
        raise RunEagerly(
            "several parts of the backward draw random numbers, each in its turn, where eager may draw by turns",
            suggestion="return results together, as one tensor, to have it compiled",
        )
    if trace.training:
        callers = [tensor for _, tensor in _callers(findings, trace)]
        check_out_of_sight(seen, callers, hooked=bool(findings.hooks))
        check_histories(trace, findings.inputs)
        if reads_by_itself:
            read = read_by_themselves(trace.tape, [*seen.custom, *bits], bits)
            for source, tensor in visible.items():
                key = internals.storage_key(value_of(tensor, "a result")) if internals.is_functional(tensor) else 0
                if mask := read.get(key, 0):
                    trace.watch[source] = trace.watch.get(source, 0) | mask
    if trace.training or torch.is_grad_enabled():
        check_owners(trace, findings)
    return _record(trace, forward, gradients), trace


class _Tangents:
    """The fake tangents: one for each root, then one for each carrier, which goes from one segment to another.

    Attributes
    ----------
    fakes, infos
        Each with what it is.
    of_entries
        For each segment, the numbers of the tangents that come into it.
    carriers
        The carrier at each edge where one segment ends and another begins.
    """

    def __init__(self, recorder: Recorder, roots: Sequence[Returned], parts: Sequence[Segment]) -> None:
        self.fakes: list[Tensor] = []
        self.infos: list[TangentInfo] = []
        self.of_entries: list[list[int]] = []
        self.carriers: dict[Edge, Source] = {}
        tape, fake_mode = recorder.tape, recorder.fake_mode
        for item in roots:
            value = item.value
            with fake_mode:
                # the gradient of something expanded or unfolded has memory for each of its elements
                shared = may_overlap_itself(value.shape, value.stride())
                like = torch.empty(value.shape, device="meta") if shared else value
                tangent = torch.empty_strided(value.shape, like.stride(), dtype=value.dtype, device=value.device)
            self._add(tape.enter(tangent), item.source, item.index)
        for part in parts:
            numbers = list(part.roots)
            for edge in part.entries[len(part.roots) :]:
                shape, dtype, device = internals.edge_metadata(*edge)
                with fake_mode:
                    tangent = tape.enter(torch.empty(shape, dtype=dtype, device=device))
                carrier = len(self.fakes) - len(roots)
                self.carriers[edge] = Source("carrier", carrier)
                numbers.append(len(self.fakes))
                self._add(tangent, TangentSource.CARRIER, carrier)
            self.of_entries.append(numbers)

    def _add(self, fake: Tensor, source: TangentSource, index: int) -> None:
        self.fakes.append(fake)
        self.infos.append(TangentInfo(source=source, index=index, spec=spec_of(fake)))


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


def _callers(findings: Findings, trace: Trace) -> list[tuple[str, Tensor]]:
    """List the wrappers of what the caller can see: inputs, outputs, and the gradients that come in."""
    infos = findings.outputs.infos
    named = [(f"`{item.name}`", item.wrapper) for item in findings.inputs]
    named += [(f"`{infos[i].name}`", tensor) for i, tensor in findings.outputs.tensors.items()]
    return named + [("the gradient that it is given", wrapper) for wrapper in trace.tangent_wrappers]


def _record(trace: Trace, forward: ForwardOutputs, gradients: Sequence[Tensor | None]) -> TraceRecord:
    """Write the joint graph, and what a reader of the trace wants to know."""
    tape, training = trace.tape, trace.training
    backward_draws = {index for drawn in trace.drawn_of_full.values() for index in drawn}
    tangents = [(f"tangents_{n + 1}", t) for n, t in enumerate(trace.tangents)]
    module = tape.graph(
        "Joint" if training else "Forward",
        [*trace.placeholders, *tangents],
        [*trace.forward_outputs, *gradients],
        keep_impure="forward",
        write_back=trace.write_back,
        keep=backward_draws,
    )
    return TraceRecord(
        tracer="aotlab",
        module=module,
        metadata=trace.metadata,
        training=training,
        inputs=tuple(name for name, _ in trace.placeholders),
        outputs=tuple(item.label for item in forward.returned),
        random_ops=tuple(
            str(o.draws_as)
            for o in tape.operations
            if o.draws_as is not None and (o.phase == "forward" or o.index in backward_draws)
        ),
        operations=len(tape.operations),
        autograd_nodes=autograd_nodes(trace, forward.roots),
        bases=tuple(tuple(source.members) for source in trace.placeholder_sources if isinstance(source, Base)),
    )
