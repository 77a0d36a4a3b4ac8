"""Make the joint graph from the findings of the run.

The steps: choose the outputs of the forward, make the tangents, differentiate, write the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly, TraceEnds
from aotlab.capture.synthetic_bases import Base
from aotlab.errors import HigherOrderOpError, RefusedError
from aotlab.ir.metadata import TangentInfo, TangentSource, ViewAndMutationMeta
from aotlab.ir.specs import spec_of
from aotlab.trace.autograd_edges import Edge
from aotlab.trace.deriver import Deriver, Tangents, tangent_like
from aotlab.trace.effects import names_of_effects
from aotlab.trace.entering import placeholders_of
from aotlab.trace.findings import Findings
from aotlab.trace.forward_outputs import ForwardOutputs, Returned, forward_outputs
from aotlab.trace.history import (
    check_readers,
    classify_nodes,
    hidden_read_masks,
    keeping_masks,
    node_bits,
    reachable_stops,
    state_masks,
)
from aotlab.trace.inputs import owner_of, value_of
from aotlab.trace.live_trace import GraphInputs, ProgramOutputs, SavingNodes, SideEffects, Trace
from aotlab.trace.program_calls import Program
from aotlab.trace.quirk import Quirk
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import AutogradNode, SizeOf, Source, TraceFailed, TraceRecord
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.sources import check_multi_output_views, divide_into_segments, parent_outputs, place_hooks
from aotlab.trace.tangent_layouts import describe_ops
from aotlab.trace.tape import Operation, Untraceable

_AS_STRIDED = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_scatter.default)


def make_joint(
    findings: Findings, quirks: Sequence[Quirk], *, keep_input_mutations: bool, static_inputs: int, exact: bool
) -> tuple[TraceRecord, Trace]:
    """Make the tangents, differentiate, and write the joint graph. See `trace_stage.run` for the arguments.

    Return the frozen record of the trace, and the trace with its live objects (tensors and autograd nodes).
    """
    recorder, outputs = findings.recorder, findings.outputs
    forward = forward_outputs(findings, keep_input_mutations=keep_input_mutations)
    placeholders, input_sources = placeholders_of(findings, forward.writes, training=forward.training)
    fakes, dedupe = [item.fake for item in findings.inputs], findings.dedupe
    view_of = {k: item.view_of for k, item in enumerate(findings.inputs) if item.view_of is not None}
    sources, segments = divide_into_segments(findings, forward, exact=exact)
    tangents, tangent_infos, cut_edges = _make_tangents(recorder, forward.roots, segments)
    sources.update(cut_edges)
    check_multi_output_views(findings)
    side_effects = _side_effects(findings, quirks, forward, sources)
    slots = _slots(segments, sources, input_sources, findings.dedupe.kept)
    deriver = Deriver(recorder, quirks, segments, slots, tangents, _holder(findings, segments))
    bits = node_bits(segments)
    connected, watch = _differentiate(findings, forward, deriver, bits)
    if any(map(internals.cache_is_written, deriver.checkpoint_caches)):
        raise RunEagerly("selective-checkpoint-keeps-written")
    once = [
        sum({1 << bits[node] for node in bits if internals.is_cached_in(node, cache)})
        for cache in deriver.checkpoint_caches
    ]
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
            tokens=names_of_effects(recorder.tape.operations, "forward"),
            backward_tokens=names_of_effects(recorder.tape.operations, "backward"),
        ),
        inputs=GraphInputs(
            fakes=fakes,
            placeholders=placeholders,
            sources=input_sources,
            offsets_read=findings.offsets_read,
            conditions=recorder.conditions,
            view_of=view_of,
            families=_families({k: base for k, base in view_of.items() if dedupe.kept[k] not in input_sources}),
        ),
        outputs=ProgramOutputs(
            spec=findings.out_spec, constants=outputs.constants, parent_outputs=parent_outputs(outputs, findings.inputs)
        ),
        side_effects=side_effects,
        forward_outputs=[item.value for item in forward.returned],
        returned_outputs=[i for i, _, _ in outputs.returned],
        writes=forward.writes,
        roots=forward.positions,
        traced_roots=[item.root for item in forward.returned if item.root is not None],
        segments=segments,
        slots=slots,
        connected=connected,
        sources=sources,
        tangents=tangents,
        saving=SavingNodes(bits=bits, masks=state_masks(segments, bits), watch=watch, once=once),
        deriver=deriver,
    )
    if trace.training or torch.is_grad_enabled():
        _check_view_bases(trace, findings)
    _check_strides(trace, findings)
    return _record(trace, forward, findings.program), trace


def _holder(findings: Findings, segments: Sequence[Segment]) -> Callable[[], AbstractContextManager[None]]:
    """Return `Findings.holder` if the backward runs Python code that may read the user's objects."""
    call, has_checkpoints = findings.call, findings.recorder.has_checkpoints
    if call.target.sets_constants:
        check_readers(segments, findings.recorder.tape, has_checkpoints=has_checkpoints)
    lifts_numbers = not all(isinstance(value, Tensor) for value in call.values[: call.lifted_count])
    return findings.holder if has_checkpoints or (lifts_numbers and classify_nodes(segments)[0]) else nullcontext


def _families(view_of: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Group views by their base: {0: 2, 1: 2, 3: 4} gives [(2, 0, 1), (4, 3)]."""
    return [(base, *(k for k in view_of if view_of[k] == base)) for base in dict.fromkeys(view_of.values())]


def _check_view_bases(trace: Trace, findings: Findings) -> None:
    """Run eagerly if a write changes the autograd history of an input that is a view or shares memory with another.

    In eager, the write also changes the history of the view's base. Gradients then flow to the base, which is not an
    input of the trace.
    """
    hooked = {id(hook.tensor) for hook in findings.hooks}
    for info, item in zip(trace.metadata.input_info, findings.inputs, strict=True):
        is_view, is_hooked = internals.base_of(item.real) is not None, id(item.traced) in hooked
        gets_history = not item.real.requires_grad and item.written_visibly
        if item.view_of is not None or not item.traced.requires_grad or not (is_view or gets_history):
            continue  # the base of a family is written, and its views follow
        tensor, owner = item.real, owner_of(item.real)
        family = {k for k, other in enumerate(findings.inputs) if item.has_views and other.view_of == info.index}
        other_inputs = [(k, e.real) for k, e in enumerate(findings.inputs) if e is not item and k not in family]
        related = [k for k, real in other_inputs if owner_of(real) is owner or internals.share_version(real, tensor)]
        if gets_history and (related or is_view):
            raise RunEagerly("shared-input-gains-history", name=info.name)
        moved = info.moves_version or any(trace.metadata.input_info[k].moves_version for k in related)
        if is_view and moved and (is_hooked or item.real.requires_grad):
            raise RunEagerly("writes-view-with-grad-base", name=info.name)


def _check_strides(trace: Trace, findings: Findings) -> None:
    """Run eagerly if an `as_strided` reads the memory of a base that is an input, but in other strides than the base's.

    Functionalization makes the new value of a view by `as_strided` from the new value of its base. If an op gave this
    value other strides, `as_strided` would address other elements.
    """
    layouts = {item.fake.shape: item.fake.stride() for item in findings.inputs if item.has_views}
    for operation in trace.tape.operations if layouts else ():
        if operation.target in _AS_STRIDED:
            value = operation.args[0]
            if layouts.get(value.shape, value.stride()) != value.stride():
                raise RunEagerly("no-synthetic-base")


def _side_effects(
    findings: Findings, quirks: Sequence[Quirk], forward: ForwardOutputs, sources: Mapping[Edge, Source]
) -> SideEffects:
    notes = findings.storage_notes

    def inputs_of(memory: Collection[int]) -> frozenset[int]:
        return frozenset(k for k, item in enumerate(findings.inputs) if item.storage in memory)

    return SideEffects(
        write_back=forward.write_back,
        hooks=place_hooks(findings.hooks, sources),
        quirks=quirks,
        fragile_views=inputs_of(notes.fragile_views),
        viewed_under_no_grad=inputs_of(notes.viewed_under_no_grad),
        autograd_state_read=inputs_of(notes.autograd_state_read),
    )


def _differentiate(
    findings: Findings, forward: ForwardOutputs, deriver: Deriver, bits: Mapping[Any, int]
) -> tuple[list[list[bool]], dict[Source, int]]:
    """Differentiate all segments, and run eagerly if the compiled backward would differ from eager's.

    ``bits`` is the result of `aotlab.trace.history.node_bits`: it maps autograd nodes to the indices of their bits.

    Return two results. The first says for each slot of each segment whether a gradient can reach the slot. The second
    has a mask for each input and output that the backward of an autograd node may read. The mask has the bits of the
    nodes that save the tensor, or that read it in their backward without saving it.
    """
    all_segments, has_checkpoints = deriver.segments, findings.recorder.has_checkpoints
    custom, hidden, lost = classify_nodes(all_segments)
    reads_by_itself = forward.training and (bool(custom) or has_checkpoints)
    if reads_by_itself and any(item.real.is_inference() for item in findings.inputs):
        raise RunEagerly("inference-tensor-kept")
    visible = {Source("input", k): item.traced for k, item in enumerate(findings.inputs)}
    visible.update((Source("output", i), tensor) for i, tensor in findings.outputs.tensors.items())
    callers = [*visible.values(), *deriver.tangents.traced]
    masks = keeping_masks(bits, list(visible.values()), findings.storage_notes.hidden_saved)
    kept_values = [value for node in custom for value in (*internals.saved_tensors_of(node), *vars(node).values())]
    watched = [
        *callers,
        *(value for value in kept_values if isinstance(value, Tensor) and internals.is_functional(value)),
    ]
    values_before = [(tensor, value_of(tensor, "a tensor")) for tensor in watched] if reads_by_itself else []
    if reads_by_itself:
        deriver.writable, deriver.rerun = _writable(findings, forward, masks, custom=bool(custom))
        deriver.writes_tangents = bool(custom)
    connected = _differentiate_all(deriver)
    if not deriver.resized.keys() <= deriver.live.keys():
        raise RunEagerly("resizes-storage", op="resize_storage_bytes_")
    if any(k >= 0 and forward.infos[k].requires_grad_after and k not in deriver.resized for k in deriver.live):
        raise RunEagerly("backward-writes-in-place")
    subclass_mode = findings.recorder.subclass_mode
    for n, k in enumerate(deriver.live):
        name, using_segments = "a gradient" if k < 0 else findings.inputs[k].name, deriver.segments_using[k]
        if len(using_segments) > 1:
            raise RunEagerly("backwards-share-written-input", name=name)
        number = next(iter(using_segments))
        is_written = k >= 0 and deriver.full[number][len(deriver.slots[number]) + n] is not None
        if subclass_mode and is_written and all(each is not deriver.writable[k] for each in subclass_mode.values):
            raise RunEagerly("checkpoint-writes-subclass", name=name)
    if any(value_of(tensor, "a tensor") is not value for tensor, value in values_before):
        raise RunEagerly("backward-writes-in-place")
    if hidden:
        _check_hidden_gradients(hidden, lost, callers, hooked=bool(findings.hooks), is_divided=len(all_segments) > 1)
    for info, item in zip(forward.infos, findings.inputs if forward.training else (), strict=False):
        moves = internals.base_of(item.real) is not None or item.steps
        if info.is_written_non_leaf and moves and item.real.retains_grad:
            raise RunEagerly("writes-view-that-retains-grad", name=info.name, transient=True)
    if reads_by_itself:
        read_masks = hidden_read_masks(findings.recorder.tape, [*custom, *bits], bits)
        for n, tensor in enumerate(visible.values()):
            if internals.is_functional(tensor):
                read_mask = read_masks.get(internals.storage_key(value_of(tensor, "a result")), 0)
                if read_mask and n in deriver.live:
                    raise RunEagerly("backwards-share-written-input", name=findings.inputs[n].name)
                masks[n] |= read_mask
    return connected, {source: mask for source, mask in zip(visible, masks, strict=True) if mask}


def _writable(
    findings: Findings, forward: ForwardOutputs, masks: Sequence[int], *, custom: bool
) -> tuple[dict[int, Tensor], list[int]]:
    """Return the traced inputs that a backward may write, and the indices of those that a checkpoint may write.

    A checkpoint runs its function again in the backward. It may write mutated buffers, for example the running
    statistics of a batch norm. The backward of a ``custom`` Function may write any input without a gradient, and
    parameters whose storage it resizes.
    """
    infos = {
        info.index: info
        for info, item in zip(forward.infos, findings.inputs, strict=True)
        if not (
            (info.requires_grad_after and not info.is_leaf)
            or item.base
            or item.is_family
            or item.steps
            or item.takes_memory
        )
        if value_of(item.traced, "an input").stride() == item.fake.stride()
    }
    rerun = [
        k
        for k, info in infos.items()
        if findings.recorder.has_checkpoints and info.mutates_data and not (masks[k] or info.requires_grad_after)
        if not internals.is_symbolic(findings.inputs[k].fake)
    ]
    return {k: findings.inputs[k].traced for k in (infos if custom else rerun)}, rerun


def _differentiate_all(deriver: Deriver) -> list[list[bool]]:
    """Differentiate each segment with all its tangents defined.

    Return for each slot of each segment whether a gradient can reach it.
    """
    connected, operations = [], deriver.recorder.tape.operations
    for number, segment in enumerate(deriver.segments):
        try:
            while number not in deriver.full:
                first = len(operations)
                if deriver.recorder.has_checkpoints:
                    torch.clear_autocast_cache()
                gradients = deriver.derive(number, [True] * len(segment.entries))
            if deriver.recorder.has_checkpoints:
                _check_checkpoint_repeats(deriver, number, operations[first:], gradients)
            # If a gradient is None, its slot may still be connected: a custom Function may return None for a tensor
            # that it holds, and the second-order backward may send a gradient to that tensor.
            reached = reachable_stops(segment) if None in gradients else set()
            # `gradients` is longer than the slots: after the gradients come new values of inputs
            pairs = zip(gradients, deriver.slots[number], strict=False)
            connected.append([g is not None or (exit_ is not None and exit_[0] in reached) for g, exit_ in pairs])
        except (RefusedError, TraceEnds):
            raise
        except Untraceable as error:  # the trace cannot represent the backward, but eager can run it
            raise TraceFailed(str(error)) from error
        except Exception as error:  # whatever the traced program's backward raises
            if "use_reentrant=True" in str(error):
                raise HigherOrderOpError(
                    "a checkpoint with use_reentrant=True is used inside the function",
                    why="it runs a separate backward, which a graph cannot contain",
                    suggestion="pass use_reentrant=False",
                    pattern=r"checkpoint\w*\(",
                ) from error
            text = str(error).partition("\n")[0]
            message = f"{type(error).__name__}{': ' * bool(text)}{text}"
            raise RunEagerly("backward-raises", error=message) from error
    return connected


def _check_hidden_gradients(
    hidden: Sequence[Any], lost: Sequence[Any], callers: Sequence[Tensor], *, hooked: bool, is_divided: bool
) -> None:
    """Run eagerly if eager's backward has observable effects on its path to leaves that the caller cannot see.

    ``hidden`` and ``lost`` are the nodes on these paths (see `classify_nodes`). A compiled backward does not run the
    lost nodes. Eager runs them, which may have these effects:

    - It calls hooks and custom Functions.
    - It raises if a node has no derivative, or if a saved tensor of a node was written. The caller may write such a
      tensor through an alias: ``callers`` are the tensors that the caller has (inputs, outputs and tangents).
    - It frees saved tensors. If the graph is divided into segments, another segment's backward then raises.
    """
    saved_storages = {internals.storage_key(tensor) for node in lost for tensor in internals.saved_tensors_of(node)}
    if (
        hooked
        or any(map(internals.kept_is_written, hidden))
        or any(internals.always_raises(node) or internals.is_custom_function_node(node) for node in lost)
        or any(internals.storage_key(tensor) in saved_storages for tensor in callers)
        or (is_divided and any(map(internals.saves_tensors, lost)))
    ):
        raise RunEagerly("gradient-reaches-no-input")


def _check_checkpoint_repeats(
    deriver: Deriver, number: int, recorded: Sequence[Operation], gradients: Sequence[Any]
) -> None:
    """Run eagerly if a checkpoint's function does not call the same ops each time that it runs.

    Eager runs the function again in each backward. A compiled backward always repeats the ``recorded`` ops, which
    compute the ``gradients`` of segment ``number``. So this function derives that backward a second time, and compares
    the ops.
    """
    tape = deriver.recorder.tape
    first, raises = len(tape.operations), ""
    try:
        torch.clear_autocast_cache()
        first_gradients = deriver.full.pop(number)
        second_gradients = deriver.derive(number, [True] * len(deriver.segments[number].entries))
        second_run = describe_ops(tape.operations[first:], {}, second_gradients, tape)
        is_same = number in deriver.full and describe_ops(recorded, {}, gradients, tape) == second_run
        deriver.full[number] = first_gradients
    except Exception as error:  # noqa: BLE001  # whatever the function raises when it is run again
        is_same, raises = False, f": the second time it raises {type(error).__name__}"
    if not is_same:
        raise RunEagerly("checkpoint-differs-when-repeated", raises=raises)


def _make_tangents(
    recorder: Recorder, roots: Sequence[Returned], segments: Sequence[Segment]
) -> tuple[Tangents, tuple[TangentInfo, ...], dict[Edge, Source]]:
    """Make a tangent for each root, then one for each cut edge.

    Return the tangents, their descriptions, and a `Source` (the run-time value) for each cut edge.
    """
    fakes: list[Tensor] = []
    infos: list[TangentInfo] = []
    cut_edges: dict[Edge, Source] = {}

    def add(fake: Tensor, source: TangentSource, index: int) -> None:
        fakes.append(fake)
        infos.append(TangentInfo(source=source, index=index, spec=spec_of(fake)))

    for item in roots:
        add(tangent_like(recorder, item.value), item.source, item.index)
    of_entries = []
    for segment in segments:
        numbers = list(segment.roots)
        for edge in segment.entries[len(segment.roots) :]:
            shape, dtype, device = internals.edge_metadata(*edge)
            with recorder.fake_mode:
                tangent = recorder.tape.enter(torch.empty(shape, dtype=dtype, device=device))
            cut_edges[edge] = Source("cut", len(cut_edges))
            numbers.append(len(fakes))
            add(tangent, TangentSource.CUT, cut_edges[edge].index)
        of_entries.append(numbers)
    traced = [internals.to_functional(fake) for fake in fakes]
    return Tangents(fakes=fakes, traced=traced, of_entries=of_entries), tuple(infos), cut_edges


def _slots(
    segments: Sequence[Segment],
    edge_sources: Mapping[Edge, Source],
    sources: Sequence[int | Base | SizeOf],
    kept_positions: Sequence[int],
) -> list[list[Exit | None]]:
    """Return the slots of each segment: its exits, in the order in which the segment's backward returns gradients.

    If there is only one segment, the slots have the order of the graph's inputs. A graph input without a gradient has
    the slot None. ``edge_sources`` are the run-time values of edges. ``sources`` are the origins of the graph's inputs,
    and ``kept_positions`` are the positions of the kept inputs among the flat arguments.
    """
    if not segments or segments[0].nodes is not None:
        return [list(segment.exits) for segment in segments]
    exits = segments[0].exits
    exit_at = {
        kept_positions[edge_sources[exit_[0]].index]: exit_ for exit_ in exits if edge_sources[exit_[0]].kind == "input"
    }
    first: list[Exit | None] = [exit_at.pop(p, None) if isinstance(p, int) else None for p in sources]
    return [[*first, *(exit_ for exit_ in exits if exit_ not in first)]]


def _record(trace: Trace, forward: ForwardOutputs, program: Program | None) -> TraceRecord:
    tape, training = trace.tape, trace.training
    gradients = [gradient for number in sorted(trace.deriver.full) for gradient in trace.deriver.full[number]]
    tangents = [(f"tangents_{n + 1}", fake) for n, fake in enumerate(trace.tangents.fakes)]
    tangents += trace.deriver.live_inputs
    module = tape.graph(
        "Joint" if training else "Forward",
        [*trace.inputs.placeholders, *tangents],
        [*trace.forward_outputs, *gradients],
        keep_impure="forward",
        write_back=trace.side_effects.write_back,
    )
    return TraceRecord(
        module=module,
        metadata=trace.metadata,
        training=training,
        inputs=tuple(name for name, _ in trace.inputs.placeholders),
        outputs=tuple(item.label for item in forward.returned),
        random_ops=tuple(str(o.draws_as) for o in tape.operations if o.draws_as is not None and o.phase == "forward"),
        operations=len(tape.operations),
        autograd_nodes=_autograd_nodes(trace, forward.roots),
        bases=(
            *(tuple(source.members) for source in trace.inputs.sources if isinstance(source, Base)),
            *trace.inputs.families,
        ),
        sizes=tuple(source for source in trace.inputs.sources if isinstance(source, SizeOf)),
        program=program,
    )


def _autograd_nodes(trace: Trace, roots: Sequence[Returned]) -> tuple[AutogradNode, ...]:
    """Describe each autograd node of the call: the results that it makes, and the destinations of its gradients."""
    names = {Source("input", k): info.name for k, info in enumerate(trace.metadata.input_info)}
    names.update((Source("view", k), info.name) for k, info in enumerate(trace.metadata.input_info))
    names.update((Source("root", n), item.label) for n, item in enumerate(roots))
    names.update((Source("output", i), info.name) for i, info in enumerate(trace.metadata.output_info))
    ends = {edge: names.get(source, "another node") for edge, source in trace.sources.items()}
    ends |= {
        edge: f"node {n}" for n, segment in enumerate(trace.segments) for edge in segment.entries[len(segment.roots) :]
    }
    nodes = []
    for number, segment in enumerate(trace.segments):
        makes = [roots[n].label for n in segment.roots]
        if len(segment.entries) > len(segment.roots):
            makes.append("values for other nodes")
        to = [exit_ and ends.get(exit_[0], "nothing that the caller sees") for exit_ in trace.slots[number]]
        gradients = (*to, *(None for _ in trace.deriver.live))  # after the gradients come new values of inputs
        goes_to = tuple(dict.fromkeys(filter(None, gradients)))
        nodes.append(AutogradNode(number=number, makes=tuple(makes), goes_to=goes_to, gradients=gradients))
    return tuple(nodes)
