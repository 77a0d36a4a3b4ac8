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
from aotlab.errors import HigherOrderOpError, RefusedError
from aotlab.ir.metadata import TangentInfo, TangentSource, ViewAndMutationMeta
from aotlab.ir.specs import spec_of
from aotlab.trace.deriver import Deriver, Tangents, tangent_like
from aotlab.trace.edges import Edge
from aotlab.trace.effects import names_of_effects
from aotlab.trace.entering import placeholders_of
from aotlab.trace.forward_outputs import ForwardOutputs, Returned, forward_outputs
from aotlab.trace.function import Findings
from aotlab.trace.history import node_bits, reachable, read_by_themselves, state_masks, survey, watches
from aotlab.trace.inputs import owner_of, value_of
from aotlab.trace.live import GraphInputs, ProgramOutputs, SavingNodes, SideEffects, Trace
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import AutogradNode, SizeOf, Source, TraceFailed, TraceRecord
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.sources import check_passed, divide, made_through, place_hooks
from aotlab.trace.tangent_layouts import spelled
from aotlab.trace.tape import Operation, Untraceable


def make_joint(
    findings: Findings, *, keep_input_mutations: bool, static_inputs: int, exact: bool
) -> tuple[TraceRecord, Trace]:
    """Make the tangents, differentiate, and write the joint graph."""
    recorder, outputs = findings.recorder, findings.outputs
    forward = forward_outputs(findings, keep_input_mutations=keep_input_mutations)
    placeholders, taken = placeholders_of(findings, forward.writes, training=forward.training)
    fakes = [item.fake for item in findings.inputs]
    sources, parts = divide(findings, forward, exact=exact)
    tangents, tangent_infos, cut_edges = _make_tangents(recorder, forward.roots, parts)
    sources.update(cut_edges)
    check_passed(findings)
    side_effects = _side_effects(findings, forward, sources)
    slots = _slots(parts, sources, taken, findings.dedupe.kept)
    deriver = Deriver(recorder, parts, slots, tangents, findings.holder if recorder.has_checkpoints else nullcontext)
    bits = node_bits(parts)
    connected, watch = _differentiate(findings, forward, deriver, bits)
    if any(map(internals.cache_is_written, deriver.spent)):
        raise RunEagerly("a tensor that a selective checkpoint keeps is written in place")
    once = [sum({1 << bits[node] for node in bits if internals.is_cached_in(node, each)}) for each in deriver.spent]
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
        inputs=GraphInputs(fakes=fakes, placeholders=placeholders, sources=taken, offsets_read=findings.offsets_read),
        outputs=ProgramOutputs(
            spec=findings.out_spec, constants=outputs.constants, made_through=made_through(outputs, findings.inputs)
        ),
        side_effects=side_effects,
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
        saving=SavingNodes(bits=bits, masks=state_masks(parts, bits), watch=watch, once=once),
        deriver=deriver,
    )
    if trace.training or torch.is_grad_enabled():
        _check_owners(trace, findings)
    return _record(trace, forward), trace


def _check_owners(trace: Trace, findings: Findings) -> None:
    """Leave to eager writes to a view whose owner has a history, to which the gradient goes then, unseen in a trace."""
    hooked = {id(hook.tensor) for hook in findings.hooks}
    for info, item in zip(trace.metadata.input_info, findings.inputs, strict=True):
        is_view, is_hooked = internals.base_of(item.real) is not None, id(item.wrapper) in hooked
        gets_history = not item.real.requires_grad and item.written_visibly
        if not item.wrapper.requires_grad or not (is_view or gets_history):
            continue
        own, owner = item.real, owner_of(item.real)
        others = [(k, other.real) for k, other in enumerate(findings.inputs) if other is not item]
        related = [k for k, real in others if owner_of(real) is owner or internals.share_version(real, own)]
        if gets_history and (related or is_view):
            raise RunEagerly(f"a write gives `{info.name}` a history, and another input shares it")
        moved = info.moves_version or any(trace.metadata.input_info[k].moves_version for k in related)
        if is_view and moved and (is_hooked or item.real.requires_grad):
            raise RunEagerly(
                f"`{info.name}` is a view, of a tensor that requires grad or with a hook, and is written",
                suggestion="pass that tensor, or a clone of the view, to have it compiled",
            )


def _side_effects(findings: Findings, forward: ForwardOutputs, sources: Mapping[Edge, Source]) -> SideEffects:
    chronicle = findings.chronicle

    def inputs_of(memory: Collection[int]) -> frozenset[int]:
        return frozenset(k for k, item in enumerate(findings.inputs) if item.storage in memory)

    return SideEffects(
        write_back=forward.write_back,
        hooks=place_hooks(findings.hooks, sources),
        quirks=findings.recorder.quirks,
        fragile=inputs_of(chronicle.fragile),
        viewed_unseen=inputs_of(chronicle.viewed_unseen),
        looked_at=inputs_of(chronicle.looked_at),
    )


def _differentiate(
    findings: Findings, forward: ForwardOutputs, deriver: Deriver, bits: Mapping[Any, int]
) -> tuple[list[list[bool]], dict[Source, int]]:
    """Differentiate all segments; say which slots a gradient can reach, and what nodes keep of the caller's tensors."""
    parts, has_checkpoints = deriver.segments, findings.recorder.has_checkpoints
    custom, hidden, lost = survey(parts)
    reads_by_itself = forward.training and (bool(custom) or has_checkpoints)
    if reads_by_itself and any(item.real.is_inference() for item in findings.inputs):
        raise RunEagerly("a custom Function or a checkpoint may keep an inference tensor, which autograd does not save")
    visible = {Source("input", k): item.wrapper for k, item in enumerate(findings.inputs)}
    visible.update((Source("output", i), tensor) for i, tensor in findings.outputs.tensors.items())
    callers = [*visible.values(), *deriver.tangents.wrappers]
    masks = watches(bits, list(visible.values()), findings.chronicle.kept_by)
    kept = [value for node in custom for value in (*internals.saved_tensors_of(node), *vars(node).values())]
    watched = [*callers, *(value for value in kept if isinstance(value, Tensor) and internals.is_functional(value))]
    before = [(tensor, value_of(tensor, "a tensor")) for tensor in watched] if reads_by_itself else []
    deriver.writable = _writable(findings, forward, masks) if has_checkpoints else {}
    connected = _differentiate_all(deriver)
    above = findings.recorder.above
    for n, (k, touching) in enumerate(deriver.touching.items()):
        name = f"`{findings.inputs[k].name}`"
        if len(touching) > 1:
            raise RunEagerly(f"{name}, which checkpoints in several autograd nodes read or write, is written")
        number = next(iter(touching))
        is_written = deriver.full[number][len(deriver.slots[number]) + n] is not None
        if above and is_written and all(each is not deriver.writable[k] for each in above.values):
            raise RunEagerly(f"a checkpoint writes {name}, a part of a tensor subclass")
    if any(value_of(tensor, "a tensor") is not value for tensor, value in before):
        raise RunEagerly("the backward writes a tensor in place that it is given or keeps, or that the caller has")
    if hidden:
        _check_out_of_sight(hidden, lost, callers, hooked=bool(findings.hooks), is_divided=len(parts) > 1)
    for info, item in zip(forward.infos, findings.inputs if forward.training else (), strict=False):
        if info.is_written_non_leaf and internals.base_of(item.real) is not None and item.real.retains_grad:
            raise RunEagerly(f"`{info.name}` is a view that retains its gradient, and is written", passing=True)
    if reads_by_itself:
        read = read_by_themselves(findings.recorder.tape, [*custom, *bits], bits)
        for n, tensor in enumerate(visible.values()):
            if internals.is_functional(tensor):
                masks[n] |= read.get(internals.storage_key(value_of(tensor, "a result")), 0)
    return connected, {source: mask for source, mask in zip(visible, masks, strict=True) if mask}


def _writable(findings: Findings, forward: ForwardOutputs, masks: Sequence[int]) -> dict[int, Tensor]:
    """Return the wrappers of the inputs that a checkpoint may write, too: buffers as those of a batch norm."""
    return {
        info.index: item.wrapper
        for info, item in zip(forward.infos, findings.inputs, strict=True)
        if info.mutates_data and not (info.requires_grad_after or item.base or item.steps or masks[info.index])
        if not internals.is_symbolic(item.fake) and value_of(item.wrapper, "an input").stride() == item.fake.stride()
    }


def _differentiate_all(deriver: Deriver) -> list[list[bool]]:
    """Differentiate each segment for all its tangents; say for each slot whether a gradient can reach it."""
    connected, operations = [], deriver.recorder.tape.operations
    for number, part in enumerate(deriver.segments):
        try:
            while number not in deriver.full:
                first = len(operations)
                if deriver.recorder.has_checkpoints:
                    torch.clear_autocast_cache()
                found = deriver.derive(number, [True] * len(part.entries))
            if deriver.recorder.has_checkpoints:
                _check_again(deriver, number, operations[first:], found)
            # a custom Function may return None for what it keeps, to which derivatives of its gradients go
            reached = reachable(part) if None in found else set()
            ways = zip(found, deriver.slots[number], strict=False)  # behind them come new values of inputs
            connected.append([g is not None or (way is not None and way[0] in reached) for g, way in ways])
        except (RefusedError, RunEagerly):
            raise
        except Untraceable as error:  # the trace's shortcoming, not an error that eager's backward raises
            raise TraceFailed(str(error)) from error
        except Exception as error:  # whatever the traced program's backward raises
            if "use_reentrant=True" in str(error):
                raise HigherOrderOpError(
                    "a checkpoint with use_reentrant=True is used inside the function",
                    why="it calls a backward of its own, which a graph cannot hold",
                    suggestion="pass use_reentrant=False",
                    pattern=r"checkpoint\w*\(",
                ) from error
            text = str(error).partition("\n")[0]
            raise RunEagerly(
                f"the backward raises {type(error).__name__}{': ' * bool(text)}{text}",
                suggestion="call it under torch.no_grad() where nothing is to be differentiated",
            ) from error
    return connected


def _check_out_of_sight(
    hidden: Sequence[Any], lost: Sequence[Any], callers: Sequence[Tensor], *, hooked: bool, is_divided: bool
) -> None:
    """Leave to eager what happens in a backward on its way to tensors that nobody can see.

    Eager computes these gradients, which calls hooks and custom Functions, raises if what a node kept was written,
    perhaps through ``callers``, or has no derivative, and uses up what nodes keep, unknown to other segments.
    """
    kept = {internals.storage_key(tensor) for node in lost for tensor in internals.saved_tensors_of(node)}
    if (
        hooked
        or any(map(internals.kept_is_written, hidden))
        or any(internals.always_raises(node) or internals.is_custom_function_node(node) for node in lost)
        or any(internals.storage_key(tensor) in kept for tensor in callers)
        or (is_divided and any(map(internals.saves_tensors, lost)))
    ):
        raise RunEagerly(
            "a gradient that reaches no input calls hooks or a custom Function, or may raise",
            suggestion="detach what needs no gradient, to have it compiled",
        )


def _check_again(deriver: Deriver, segment: int, recorded: Sequence[Operation], gradients: Sequence[Any]) -> None:
    """Leave to eager a checkpoint whose function does not do the same each time that it is run, op by op.

    Eager runs it in each backward, a compiled backward does what was ``recorded`` for the ``gradients``.
    """
    tape = deriver.recorder.tape
    first, raises = len(tape.operations), ""
    try:
        torch.clear_autocast_cache()
        kept = deriver.full.pop(segment)
        second = deriver.derive(segment, [True] * len(deriver.segments[segment].entries))
        again = spelled(tape.operations[first:], {}, second, tape)
        is_same = segment in deriver.full and spelled(recorded, {}, gradients, tape) == again
        deriver.full[segment] = kept
    except Exception as error:  # noqa: BLE001  # whatever the function raises when it is run again
        is_same, raises = False, f": the next time it raises {type(error).__name__}"
    if not is_same:
        raise RunEagerly(
            f"a checkpoint computes something else each time that it runs its function{raises}",
            suggestion="let the function change nothing that it acts on, to have it compiled",
        )


def _make_tangents(
    recorder: Recorder, roots: Sequence[Returned], parts: Sequence[Segment]
) -> tuple[Tangents, tuple[TangentInfo, ...], dict[Edge, Source]]:
    """Make a tangent for each root, then one for each cut edge; return with them the sources of the latter."""
    fakes: list[Tensor] = []
    infos: list[TangentInfo] = []
    cut_edges: dict[Edge, Source] = {}

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
            cut_edges[edge] = Source("cut", len(cut_edges))
            numbers.append(len(fakes))
            add(tangent, TangentSource.CUT, cut_edges[edge].index)
        of_entries.append(numbers)
    wrappers = [internals.to_functional(fake) for fake in fakes]
    return Tangents(fakes=fakes, wrappers=wrappers, of_entries=of_entries), tuple(infos), cut_edges


def _slots(
    parts: Sequence[Segment], known: Mapping[Edge, Source], sources: Sequence[int | Base | SizeOf], kept: Sequence[int]
) -> list[list[Exit | None]]:
    """List where the gradients leave each segment; of the only one, in the order of the graph's inputs."""
    if not parts or parts[0].nodes is not None:
        return [list(part.exits) for part in parts]
    exits = parts[0].exits
    at = {kept[known[way[0]].index]: way for way in exits if known[way[0]].kind == "input"}
    first: list[Exit | None] = [at.pop(p, None) if isinstance(p, int) else None for p in sources]
    return [[*first, *(way for way in exits if way not in first)]]


def _record(trace: Trace, forward: ForwardOutputs) -> TraceRecord:
    tape, training = trace.tape, trace.training
    gradients = [gradient for segment in sorted(trace.deriver.full) for gradient in trace.deriver.full[segment]]
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
        tracer="aotlab",
        module=module,
        metadata=trace.metadata,
        training=training,
        inputs=tuple(name for name, _ in trace.inputs.placeholders),
        outputs=tuple(item.label for item in forward.returned),
        random_ops=tuple(str(o.draws_as) for o in tape.operations if o.draws_as is not None and o.phase == "forward"),
        operations=len(tape.operations),
        autograd_nodes=_autograd_nodes(trace, forward.roots),
        bases=tuple(tuple(source.members) for source in trace.inputs.sources if isinstance(source, Base)),
        sizes=tuple(source for source in trace.inputs.sources if isinstance(source, SizeOf)),
    )


def _autograd_nodes(trace: Trace, roots: Sequence[Returned]) -> tuple[AutogradNode, ...]:
    """Say what each autograd node of the call makes, and where its gradients go."""
    names = {Source("input", k): info.name for k, info in enumerate(trace.metadata.input_info)}
    names.update((Source("root", n), item.label) for n, item in enumerate(roots))
    names.update((Source("output", i), info.name) for i, info in enumerate(trace.metadata.output_info))
    ends = {edge: names.get(source, "another node") for edge, source in trace.sources.items()}
    ends |= {edge: f"node {n}" for n, part in enumerate(trace.segments) for edge in part.entries[len(part.roots) :]}
    found = []
    for number, part in enumerate(trace.segments):
        makes = [roots[n].label for n in part.roots]
        if len(part.entries) > len(part.roots):
            makes.append("what other nodes use")
        to = [way and ends.get(way[0], "nothing that the caller sees") for way in trace.slots[number]]
        gradients = (*to, *(None for _ in trace.deriver.live))  # behind them come new values of inputs
        goes_to = tuple(dict.fromkeys(filter(None, gradients)))
        found.append(AutogradNode(number=number, makes=tuple(makes), goes_to=goes_to, gradients=gradients))
    return tuple(found)
