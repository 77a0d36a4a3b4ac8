"""Write the part of the epilogue that mutates the caller's tensors: their values, version counters and metadata."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from aotlab.ir.metadata import InputAliasInfo, MutationType
from aotlab.runtime.draft import Draft
from aotlab.runtime.output_expressions import Outputs
from aotlab.trace.records import Write


class Mutations:
    """Writes the code of each mutation of an input, once, as soon as the variable with the new value is written."""

    def __init__(self, draft: Draft, outputs: Outputs) -> None:
        self.draft = draft
        self.w = draft.w
        self._outputs = outputs
        self._versions_corrected = False  # whether the code that corrects version counters is written
        self._versions: dict[int, str] = {}  # input → the expression of its version before the graph ran

    def write(self, results: Mapping[int, str]) -> None:
        """Write the write-backs whose new values are in ``results``, and the changes of metadata.

        ``results`` maps positions among the forward outputs to expressions. Call this method again when more forward
        outputs have an expression.
        """
        for output in self.draft.meta.output_info:
            if output.precedes_write:
                self._outputs.expression(output.index)
        draft, writes = self.draft, self.draft.trace.writes
        for n, write in enumerate(writes):
            if n not in draft.written and n in results:
                draft.written.add(n)
                self._change(draft.meta.input_info[write.index], write, results[n])
        self.write_metadata_changes()
        if len(draft.written) == len(writes) and not self._versions_corrected:
            self._versions_corrected = True
            for k in list(self._versions):
                self._correct_version(k)

    def write_metadata_changes(self) -> None:
        """Write the metadata changes (for example ``x.t_()``) of the inputs whose data does not change."""
        data_mutated = {write.index for write in self.draft.trace.writes}
        for info in self.draft.meta.input_info:
            if info.metadata_steps and info.index not in data_mutated | self.draft.changed:
                self._change(info, None, "")

    def let_require_grad(self) -> None:
        """Write ``x.requires_grad_(True)`` for the inputs on which the function called it."""
        for info in self.draft.meta.input_info:
            if info.made_to_require_grad:
                self.w.add(f"{self.draft.kept(info.index)}.requires_grad_(True)")

    def note_versions(self) -> None:
        """Write lines that store the version counters of the inputs that the graph itself writes.

        Some kernels increment the counter of an input that they write, and others do not. The code that
        `_correct_version` writes compares the counters after the graph has run.
        """
        for info in self.draft.meta.input_info:
            if info.moves_version and info.mutation_type is MutationType.MUTATED_IN_GRAPH:
                target = self.draft.kept(info.index)
                self._versions[info.index] = self.w.local(f"version_of_{target}")
                self.w.add(f"{self._versions[info.index]} = {target}._version")

    def _correct_version(self, k: int) -> None:
        """Write code that increments the version counter of kept input ``k`` if no kernel of the graph has done so."""
        bump = self.w.constant("increment_version", torch.autograd.graph.increment_version)
        self.w.add(f"if {self.draft.kept(k)}._version == {self._versions.pop(k)}:")
        self.w.add(f"    {bump}({self.draft.kept(k)})")

    def _change(self, info: InputAliasInfo, write: Write | None, value: str) -> None:
        """Write the mutation of one of the caller's tensors: first its metadata, then its values.

        ``write`` is the write-back, and ``value`` is the expression of the new value. If only the metadata changes,
        ``write`` is None.
        """
        target = self.draft.kept(info.index)
        self.draft.changed.add(info.index)
        for step in info.metadata_steps:
            self.w.add(f"{target}.{step}")
        if write is not None:
            self._copy(target, info, write, value)

    def _copy(self, target: str, info: InputAliasInfo, write: Write, value: str) -> None:
        line = f"{target}.copy_({value})"
        if not write.moves_version:
            self.w.add(f"{target}.data.copy_({value})  # eager does not count this write either")
        elif write.visible:
            self.draft.with_grad(line)
        else:
            quiet = self.draft.grad_on and (info.requires_grad or info.requires_grad_after)
            self.draft.in_context(line, grad_mode=False if quiet else None)
