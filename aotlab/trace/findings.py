"""The findings of the run of a user's function, from which the later steps of the trace make the joint graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from aotlab.capture.call import Call
from aotlab.capture.dedupe import DedupeRecord
from aotlab.ir.metadata import InputAliasInfo
from aotlab.trace.inputs import TracedInput
from aotlab.trace.output_aliases import Outputs
from aotlab.trace.program_calls import Program
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import Hook
from aotlab.trace.storage_notes import StorageNotes


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything that the engine learned when the function ran. `aotlab.trace.function_run` collects it."""

    call: Call
    dedupe: DedupeRecord
    recorder: Recorder
    #: The traced tensors of the kept inputs (the inputs after deduplication), and a description of the writes to each.
    inputs: list[TracedInput]
    infos: tuple[InputAliasInfo, ...]
    #: The function's outputs, and their pytree structure.
    outputs: Outputs
    out_spec: Any
    #: The grad mode after the function, or None if the function did not change it.
    left_grad_mode: bool | None
    #: The indices of the kept inputs whose storage offset the function read.
    offsets_read: tuple[int, ...]
    #: The hooks that the function registered.
    hooks: Sequence[Hook]
    #: Notes on when the function made views of inputs, and when it wrote to inputs.
    storage_notes: StorageNotes
    #: A function that returns a context manager in which the user's modules hold the traced parameters and buffers
    #: (`Target.holder`).
    holder: Callable[[], AbstractContextManager[None]]
    #: The calls of the program; None if nobody records a report.
    program: Program | None
