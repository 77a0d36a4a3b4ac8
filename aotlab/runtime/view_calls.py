"""The lines that make an output which shares memory, by the views that led to it.

out_0 = x.t()
views = x.split(2, 1)      # what comes from a function with several outputs comes from it again
out_1 = views[0]
"""

from __future__ import annotations

from typing import Any

import torch

from aotlab.ir.metadata import OutputAliasInfo, OutputType, ViewStep
from aotlab.runtime.draft import Draft

_METHODS = {
    "aten.t.default": "t",
    "aten.transpose.int": "transpose",
    "aten.view.default": "view",
    "aten.view.dtype": "view",
    "aten.unsqueeze.default": "unsqueeze",
    "aten.squeeze.default": "squeeze",
    "aten.squeeze.dim": "squeeze",
    "aten.squeeze.dims": "squeeze",
    "aten.permute.default": "permute",
    "aten.expand.default": "expand",
    "aten.select.int": "select",
    "aten.diagonal.default": "diagonal",
    "aten.detach.default": "detach",
    "aten.unbind.int": "unbind",
    "aten.split.Tensor": "split",
    "aten.split_with_sizes.default": "split_with_sizes",
    "aten.unfold.default": "unfold",
}


class ViewCalls:
    """Writes chains of view calls."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.w = draft.w
        self._several: dict[tuple[str, str], tuple[str, set[int]]] = {}  # call → its name, and the items handed out

    def write(self, name: str, base: str, output: OutputAliasInfo, grad_mode: bool | None) -> None:
        """Make ``output`` from ``base`` under ``name``."""
        if output.views is None:
            spec = output.spec
            assert spec is not None
            offset = self._as_strided_offset(base, output)
            line = f"{name} = {base}.as_strided({spec.shape}, {spec.stride}, {offset})"
            self.draft.in_context(line, grad_mode=grad_mode)
            return
        expression = base
        for n, step in enumerate(output.views):
            call = self._call(expression, step)
            if step.item is None:
                expression = call
                continue
            whole = ViewStep(target=step.target, args=step.args, kwargs=step.kwargs)
            # arguments may be lists; views from before and from after a write are not of one call
            place = (grad_mode, len(self.draft.written), output.made_together)
            key = (base, repr((*output.views[:n], whole, *place)))
            made, given = self._several.get(key, ("", set()))
            if not made or step.item in given:  # each view is handed out once
                made, given = self.w.local("views"), set()
                self._several[key] = (made, given)
                self.draft.in_context(f"{made} = {call}", grad_mode=grad_mode)
            given.add(step.item)
            expression = f"{made}[{step.item}]"
        self.draft.in_context(f"{name} = {expression}", grad_mode=grad_mode)

    def _as_strided_offset(self, base: str, output: OutputAliasInfo) -> str:
        assert output.spec is not None
        assert output.base_idx is not None
        if output.output_type is OutputType.ALIAS_OF_INPUT:
            here = self.draft.trace.inputs.final_offsets[output.base_idx]
            assert isinstance(output.spec.offset, int)
            return f"{base}.storage_offset() + {output.spec.offset - here}"
        return str(output.spec.offset)

    def _call(self, base: str, step: ViewStep) -> str:
        arguments = [self._literal(a) for a in step.args] + [f"{k}={self._literal(v)}" for k, v in step.kwargs]
        method = _METHODS.get(step.target)
        if method is not None and not step.kwargs:
            return f"{base}.{method}({', '.join(arguments)})"
        name = step.target.replace(".", "_")
        if name not in self.w.namespace:
            packet, overload = step.target.removeprefix("aten.").rsplit(".", 1)
            self.w.namespace[name] = getattr(getattr(torch.ops.aten, packet), overload)
        return f"{name}({', '.join([base, *arguments])})"

    def _literal(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self._literal(item) for item in value)
            return f"[{inner}]"
        if value is None or type(value) in (int, bool, float, str) or isinstance(value, torch.dtype):
            return repr(value)
        return self.w.constant("argument", value)
