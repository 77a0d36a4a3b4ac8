"""The part of the epilogue that changes the caller's tensors: their values, versions and sizes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from aotlab.ir.metadata import InputAliasInfo, MutationType
from aotlab.runtime.draft import Draft
from aotlab.runtime.outputs import Outputs
from aotlab.trace.records import Write


class Mutations:
    """Writes each change once, as soon as the new value is there."""

    def __init__(self, draft: Draft, outputs: Outputs) -> None:
        self.draft = draft
        self.w = draft.w
        self._outputs = outputs
        self._counted = False  # whether the versions of inputs that the graph writes are seen to
        self._versions: dict[int, str] = {}  # input → the expression of its version before the graph ran

    def write(self, results: Mapping[int, str]) -> None:
        """Write the new values that are there into the caller's tensors, and take their other changes."""
        for output in self.draft.meta.output_info:
            if output.precedes_write:
                self._outputs.expression(output.index)
        draft, writes = self.draft, self.draft.trace.writes
        for n, write in enumerate(writes):
            if n not in draft.written and n in results:
                draft.written.add(n)
                self._change(draft.meta.input_info[write.index], write, results[n])
        self.without_writes()
        if len(draft.written) == len(writes) and not self._counted:
            self._counted = True
            for k in list(self._versions):
                self._count(k)

    def without_writes(self) -> None:
        """Change those of the caller's tensors that get no new values."""
        written = {write.index for write in self.draft.trace.writes}
        for info in self.draft.meta.input_info:
            if info.metadata_steps and info.index not in written | self.draft.changed:
                self._change(info, None, "")

    def note_versions(self) -> None:
        """Write what notes the versions of the inputs that the graph writes: of kernels some count, some do not."""
        for info in self.draft.meta.input_info:
            if info.moves_version and info.mutation_type is MutationType.MUTATED_IN_GRAPH:
                target = self.draft.kept(info.index)
                self._versions[info.index] = self.w.local(f"version_of_{target}")
                self.w.add(f"{self._versions[info.index]} = {target}._version")

    def _count(self, k: int) -> None:
        """Move the version counter of an input, which should have moved by now, if it has not."""
        bump = self.w.constant("increment_version", torch.autograd.graph.increment_version)
        self.w.add(f"if {self.draft.kept(k)}._version == {self._versions.pop(k)}:")
        self.w.add(f"    {bump}({self.draft.kept(k)})")

    def _change(self, info: InputAliasInfo, write: Write | None, value: str) -> None:
        """Change one of the caller's tensors as the function did: its values, and all else."""
        target = self.draft.kept(info.index)
        self.draft.changed.add(info.index)
        for step in info.metadata_steps:
            self.w.add(f"{target}.{step}")
        if write is not None:
            self._copy(target, info, write, value)

    def _copy(self, target: str, info: InputAliasInfo, write: Write, value: str) -> None:
        line = f"{target}.copy_({value})"
        if not write.counts:
            self.w.add(f"{target}.data.copy_({value})  # eager does not count this write either")
        elif write.visible:
            self.draft.with_grad(line)
        else:
            quiet = self.draft.grad_on and (info.requires_grad or info.requires_grad_after)
            self.draft.in_context(line, grad_mode=False if quiet else None)
