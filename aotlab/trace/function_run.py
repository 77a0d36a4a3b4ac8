"""Run the user's function once under the recorder, and collect the findings for the later steps of the trace."""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from aotlab import _torch as internals
from aotlab.capture import nesting
from aotlab.capture.call import Call
from aotlab.capture.caller_objects import caller_objects, check_containers
from aotlab.capture.dedupe import DedupeRecord
from aotlab.capture.signals import RunEagerly
from aotlab.events import listening
from aotlab.guards.user_code import user_code_position
from aotlab.ir.metadata import InputAliasInfo
from aotlab.ir.specs import StorageNumbers
from aotlab.trace import surroundings
from aotlab.trace.escapes import EscapeGuard
from aotlab.trace.findings import Findings
from aotlab.trace.inputs import TracedInput, bases_of, input_info
from aotlab.trace.output_aliases import OutputReader, Outputs
from aotlab.trace.program_calls import ProgramCalls
from aotlab.trace.quirk import Quirk, claims_of
from aotlab.trace.recorder import Recorder
from aotlab.trace.storage_notes import InputStorage


def run_function(
    call: Call, dedupe: DedupeRecord, recorder: Recorder, inputs: list[TracedInput], quirks: Sequence[Quirk]
) -> Findings:
    """Run the function under the recorder. Then read the mutations and the outputs from the traced tensors."""
    values = list(call.values)
    for position, source in zip(dedupe.positions, dedupe.source, strict=True):
        values[position] = inputs[source].traced
    for position, number in {} if recorder.sizes is None else recorder.sizes.numbers.items():
        values[position] = number
    lifted, args, kwargs = call.rebuild(values)
    grad_mode = torch.is_grad_enabled()
    recorder.names = {id(item.fake): item.name for item in inputs}
    symbols = (
        nullcontext() if recorder.sizes is None else internals.symbols_as_numbers(recorder.sizes, user_code_position)
    )
    unchanged = surroundings.global_state_checked(recorder, call.state.settings)
    with unchanged, surroundings.trace_failures(), surroundings.tracing(recorder):
        try:
            named = [(item.name, item.traced) for item in inputs]
            calls = ProgramCalls(recorder.tape, named) if listening() else None
            escapes = _escape_guard(inputs, quirks, calls)
            outside = surroundings.outside_of_inference_mode(call.outside)
            with surroundings.warnings_noted() as warned, outside, escapes, surroundings.clocks_watched(), symbols:
                # in a copied context, so that a refused call cannot change the caller's context variables
                result = contextvars.copy_context().run(call.target.run, lifted, args, kwargs)
            if recorder.unbacked is not None:
                recorder.unbacked.finish()
            recorder.states.end()
            left_grad_mode = torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(grad_mode)
        for item in inputs:
            item.check_attributes()
            if item.storage in escapes.storage_notes.viewed_under_no_grad and internals.is_over_another(item.real):
                raise RunEagerly("no-grad-view-of-leaf-view", name=item.name)
        for quirk in quirks:
            quirk.after_run(inputs)
        check_containers(call, values, args, kwargs)
        leaves, names, out_spec = nesting.flatten_result(result, caller_objects(args, kwargs, call.target.objects()))
        infos = _input_infos(recorder, inputs)
        outputs = OutputReader(recorder.tape, leaves, names, inputs, escapes.storage_notes).run()
        _check_made_to_require_grad(inputs, infos, outputs, escapes)
        _check_counters(call, dedupe, inputs, infos, outputs, escapes)
    if warned:
        escapes.claimed(warnings.warn, tuple(warned), {})
    findings = Findings(
        call=call,
        dedupe=dedupe,
        recorder=recorder,
        inputs=inputs,
        infos=infos,
        outputs=outputs,
        out_spec=out_spec,
        left_grad_mode=None if left_grad_mode == grad_mode else left_grad_mode,
        offsets_read=tuple(sorted(escapes.storage_notes.offsets_read)),
        storage_notes=escapes.storage_notes,
        hooks=tuple(escapes.hooks.values()),
        program=None if calls is None else calls.program(outputs.tensors),
        holder=call.target.holder(lifted),
    )
    for quirk in quirks:
        quirk.check(findings)
    return findings


def _check_counters(
    call: Call, dedupe: DedupeRecord, inputs: Sequence[TracedInput], infos: Sequence[InputAliasInfo],
    outputs: Outputs, escapes: EscapeGuard,
) -> None:  # fmt: skip
    """Run eagerly if inputs in different memory share a version counter, one is written, and autograd checks it.

        flat = torch.zeros(8)
        a, b = flat[:4].detach().requires_grad_(), flat[4:].detach()
        f(a, b)                        # f computes a.abs(), and writes b: the backward raises in eager

    Autograd checks the version counters of tensors that it saved, and of views that were made before the write. (For
    example, a view that was made under ``no_grad`` must not be used after the write.) In the trace, inputs in different
    memory have different version counters, so these checks would not fail where eager's do.
    """
    index = {position: k for k, position in enumerate(dedupe.kept)}
    tensors = outputs.tensors.values()
    in_grad = any(t.requires_grad for t in tensors) or any(item.written_visibly for item in inputs)
    for first in {first for first, _ in call.state.counters}:
        group = [index[n] for pair in call.state.counters for n in pair if pair[0] == first]
        memory = {inputs[k].storage for k in group}
        viewed = any(internals.storage_key(t) in memory and internals.base_of(t) is not None for t in tensors)
        viewed = viewed or (torch.is_grad_enabled() and not memory.isdisjoint(escapes.storage_notes.fragile_views))
        if len(memory) > 1 and any(infos[k].moves_version for k in group) and (in_grad or viewed):
            names = " and ".join(f"`{inputs[k].name}`" for k in sorted(set(group)))
            raise RunEagerly("shared-version-counter", names=names)


def _check_made_to_require_grad(
    inputs: Sequence[TracedInput], infos: Sequence[InputAliasInfo], outputs: Outputs, escapes: EscapeGuard
) -> None:
    """Run eagerly if an input on which the function called ``requires_grad_()`` has views or hooks.

    The input is then a leaf, but in eager its views have the history that they had before, or that of another base.
    """
    tensors = outputs.tensors.values()
    for info, item in zip(infos, inputs, strict=True):
        viewed = any(t is not item.traced and internals.storage_key(t) == item.storage for t in tensors)
        unlike = info.moves_version or item.storage in escapes.storage_notes.viewed
        is_other = viewed or item.steps or escapes.hooks_of(item.traced)
        if info.made_to_require_grad and (is_other or (internals.base_of(item.real) is not None and unlike)):
            raise RunEagerly("changes-requires-grad", name=item.name)


def _escape_guard(inputs: Sequence[TracedInput], quirks: Sequence[Quirk], calls: ProgramCalls | None) -> EscapeGuard:
    storages = {i.storage: InputStorage((k,), i.name, i.traced) for k, i in enumerate(inputs) if i.base is None}
    for k, item in enumerate(inputs):
        if item.has_views:
            members = (k, *(n for n, other in enumerate(inputs) if other.view_of == k))
            storages[item.storage] = InputStorage(members, item.name, item.traced, is_base=True)
    for base in bases_of(inputs):
        assert base.traced is not None
        first = inputs[base.members[0]]
        storages[first.storage] = InputStorage(base.members, first.name, base.traced, is_base=True, is_synthetic=True)
    return EscapeGuard(storages, inputs, claims=claims_of(quirks), calls=calls)


def _input_infos(recorder: Recorder, inputs: list[TracedInput]) -> tuple[InputAliasInfo, ...]:
    """Describe the mutations of each input; run eagerly if the epilogue cannot repeat a mutation."""
    storages = StorageNumbers()
    infos = tuple(input_info(k, item, recorder.tape, storages) for k, item in enumerate(inputs))
    for info, item in zip(infos, inputs, strict=True):
        if info.mutates_data and item.real.is_inference() and not torch.is_inference_mode_enabled():
            raise RunEagerly("inference-tensor-written", name=item.name)
    return infos
