"""The one run of the user's function, and what it showed."""

from __future__ import annotations

import contextvars
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from aotlab import _torch as internals
from aotlab.capture import nesting
from aotlab.capture.call import Call
from aotlab.capture.dedupe import DedupeRecord
from aotlab.capture.given import check_containers, given_objects
from aotlab.capture.signals import RunEagerly
from aotlab.guards.places import user_place
from aotlab.ir.metadata import InputAliasInfo
from aotlab.ir.specs import StorageNumbers
from aotlab.trace import surroundings
from aotlab.trace.chronicle import Chronicle, InputStorage
from aotlab.trace.escapes import EscapeGuard
from aotlab.trace.inputs import Entered, bases_of, input_info
from aotlab.trace.outputs import OutputReader, Outputs
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import Hook


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the run showed."""

    call: Call
    dedupe: DedupeRecord
    recorder: Recorder
    #: The traced stand-ins of the kept inputs, and what became of each.
    inputs: list[Entered]
    infos: tuple[InputAliasInfo, ...]
    #: What was returned, and how it is nested.
    outputs: Outputs
    out_spec: Any
    #: The grad mode that the function leaves behind; None if it is the one that it found.
    left_grad_mode: bool | None
    #: The kept inputs whose offset in their storage the function looked at.
    offsets_read: tuple[int, ...]
    #: The hooks that it registered.
    hooks: Sequence[Hook]
    #: When it made views of inputs, and wrote them.
    chronicle: Chronicle
    #: What puts the traced parameters and buffers in their place again; see `Target.holder`.
    holder: Callable[[], AbstractContextManager[None]]


def run_function(call: Call, dedupe: DedupeRecord, recorder: Recorder, inputs: list[Entered]) -> Findings:
    """Run the function under the recorder, and ask the wrappers what happened."""
    values = list(call.values)
    for position, source in zip(dedupe.positions, dedupe.source, strict=True):
        values[position] = inputs[source].wrapper
    for position, number in {} if recorder.sizes is None else recorder.sizes.numbers.items():
        values[position] = number
    lifted, args, kwargs = call.rebuild(values)
    grad_mode = torch.is_grad_enabled()
    recorder.names = {id(item.fake): item.name for item in inputs}
    symbols = nullcontext() if recorder.sizes is None else internals.symbols_as_numbers(recorder.sizes, user_place)
    world = surroundings.world_unchanged(recorder, call.state.settings)
    with world, surroundings.failures_told_apart(), surroundings.tracing(recorder):
        try:
            escapes = _escape_guard(inputs, recorder)
            outside = surroundings.outside_of_inference_mode(call.outside)
            with surroundings.warnings_noted() as warned, outside, escapes, surroundings.clocks_watched(), symbols:
                # in a context of its own: no variable of the caller's can be left otherwise by a call that is refused
                result = contextvars.copy_context().run(call.target.run, lifted, args, kwargs)
            recorder.states.end()
            left_grad_mode = torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(grad_mode)
        for item in inputs:
            item.check_attributes()
            if item.storage in escapes.chronicle.viewed_unseen and internals.is_over_another(item.real):
                raise RunEagerly(
                    f"a view of `{item.name}`, a view itself, is made without autograd",
                    suggestion="pass a tensor that is no view, to have it compiled",
                )
        check_containers(call, values, args, kwargs)
        leaves, names, out_spec = nesting.flatten_result(result, given_objects(args, kwargs, call.target.objects()))
        infos = _input_infos(recorder, inputs)
        outputs = OutputReader(recorder.tape, leaves, names, inputs, escapes.chronicle).run()
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
        offsets_read=tuple(sorted(escapes.chronicle.offsets_read)),
        chronicle=escapes.chronicle,
        hooks=tuple(escapes.hooks.values()),
        holder=call.target.holder(lifted),
    )
    for quirk in recorder.quirks:
        quirk.check(findings)
    return findings


def _check_counters(
    call: Call, dedupe: DedupeRecord, inputs: Sequence[Entered], infos: Sequence[InputAliasInfo],
    outputs: Outputs, escapes: EscapeGuard,
) -> None:  # fmt: skip
    """Leave to eager a write that counts for an input in other memory where autograd looks at what was counted.

        flat = torch.zeros(8)
        a, b = flat[:4].detach().requires_grad_(), flat[4:].detach()
        f(a, b)                        # f computes a.abs(), and writes b: the backward raises in eager

    It does so for what it saved, and for views from before: those made under ``no_grad`` must not be used any more.
    """
    index = {position: k for k, position in enumerate(dedupe.kept)}
    tensors = outputs.tensors.values()
    in_grad = any(t.requires_grad for t in tensors) or any(item.written_visibly for item in inputs)
    for first in {first for first, _ in call.state.counters}:
        group = [index[n] for pair in call.state.counters for n in pair if pair[0] == first]
        memory = {inputs[k].storage for k in group}
        viewed = any(internals.storage_key(t) in memory and internals.base_of(t) is not None for t in tensors)
        viewed = viewed or (torch.is_grad_enabled() and not memory.isdisjoint(escapes.chronicle.fragile))
        if len(memory) > 1 and any(infos[k].moves_version for k in group) and (in_grad or viewed):
            names = " and ".join(f"`{inputs[k].name}`" for k in sorted(set(group)))
            raise RunEagerly(f"{names} count writes together, as parts of one buffer, and one is written")


def _escape_guard(inputs: Sequence[Entered], recorder: Recorder) -> EscapeGuard:
    storages = {i.storage: InputStorage((k,), i.name, i.wrapper) for k, i in enumerate(inputs) if i.base is None}
    for base in bases_of(inputs):
        assert base.wrapper is not None
        first = inputs[base.members[0]]
        storages[first.storage] = InputStorage(base.members, first.name, base.wrapper, is_base=True)
    return EscapeGuard(storages, inputs, quirks=recorder.quirks)


def _input_infos(recorder: Recorder, inputs: list[Entered]) -> tuple[InputAliasInfo, ...]:
    """Say what became of each input; refuse a write that the epilogue could not repeat."""
    storages = StorageNumbers()
    infos = tuple(input_info(k, item, recorder.tape, storages) for k, item in enumerate(inputs))
    for info, item in zip(infos, inputs, strict=True):
        if info.mutates_data and item.real.is_inference() and not torch.is_inference_mode_enabled():
            raise RunEagerly(
                f"`{item.name}` was made under inference_mode and is written",
                suggestion="call the function under torch.inference_mode(), or pass a clone that was made outside",
            )
    return infos
