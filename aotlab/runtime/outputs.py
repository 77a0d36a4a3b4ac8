"""The part of the epilogue that makes what the caller gets: constants, inputs, results of the graph, views of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture import nesting
from aotlab.capture.nesting import Given, Leaf, Tree
from aotlab.ir.metadata import OutputAliasInfo, OutputType, ViewStep
from aotlab.runtime.arguments import DEEPEST, step_text
from aotlab.runtime.draft import Draft, Writer


class Outputs:
    """Writes each of the user's outputs once, when it is first asked for."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.meta = draft.meta
        self.w = draft.w
        self._views = ViewCalls(draft)
        self._made: dict[int, str] = {}

    def write(self) -> list[str]:
        """Write the outputs; return their expressions in the user's order."""
        for i in self.draft.trace.returned_outputs:
            self.expression(i)
        return [self.expression(i) for i in range(len(self.meta.output_info))]

    def expression(self, i: int) -> str:
        """Return the expression of one of the user's outputs; write what makes it, once."""
        if i not in self._made:
            self._made[i] = self._make(self.meta.output_info[i])
        return self._made[i]

    def _make(self, output: OutputAliasInfo) -> str:
        trace = self.draft.trace
        if output.index in trace.outputs.constants:
            value = trace.outputs.constants[output.index]
            if internals.is_symbolic(value):
                return internals.size_text(value)
            plain = value is None or type(value) in (int, str, bool)
            return repr(value) if plain else self.w.constant("constant", value)
        if output.same_as is not None:
            return self.expression(output.same_as)
        if output.index in trace.returned_outputs:
            return self.draft.results[len(trace.writes) + trace.returned_outputs.index(output.index)]
        return self._make_alias(output)

    def _make_alias(self, output: OutputAliasInfo) -> str:
        """Write what makes an output that is, or is a view of, something that the caller can see."""
        base = self._base(output)
        if not output.views:
            return base
        through = self.draft.trace.outputs.made_through.get(output.index)
        if through is not None:
            other = self.meta.output_info[through]
            rest = output.views[len(other.views) :]
            base, output = self.expression(through), replace(output, views=rest)
        name = self.w.local(output.name)
        want = not output.made_under_no_grad
        self._views.write(name, base, output, want if want != self.draft.grad_on else None)
        return name

    def _base(self, output: OutputAliasInfo) -> str:
        """Return the expression of what an output is a view of."""
        trace, k = self.draft.trace, output.base_idx
        assert k is not None
        if output.output_type in (OutputType.ALIAS_OF_INPUT, OutputType.IS_INPUT):
            return self.draft.kept(k)
        if output.output_type is OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT:
            return self.expression(k)
        return self.draft.results[len(trace.writes) + len(trace.returned_outputs) + k]


class ViewCalls:
    """Writes the lines that make an output which shares memory, by the views that led to it.

    out_0 = x.t()
    views = x.split(2, 1)      # what comes from a function with several outputs comes from it again
    out_1 = views[0]
    """

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.w = draft.w
        self._several: dict[tuple[str, str], tuple[str, set[int]]] = {}  # call → its name, and the items handed out

    def write(self, name: str, base: str, output: OutputAliasInfo, grad_mode: bool | None) -> None:
        """Make ``output`` from ``base`` under ``name``."""
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

    def _call(self, base: str, step: ViewStep) -> str:
        arguments = [self._literal(a) for a in step.args] + [f"{k}={self._literal(v)}" for k, v in step.kwargs]
        method = step.target.split(".")[1]
        if not step.kwargs and not method.startswith("_") and callable(getattr(Tensor, method, None)):
            return f"{base}.{method}({', '.join(arguments)})"
        name = step.target.replace(".", "_")
        if name not in self.w.namespace:
            packet, overload = step.target.removeprefix("aten.").rsplit(".", 1)
            self.w.namespace[name] = getattr(getattr(torch.ops.aten, packet), overload)
        return f"{name}({', '.join([base, *arguments])})"

    def _literal(self, value: Any) -> str:
        if internals.is_symbolic(value):
            return internals.size_text(value)
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self._literal(item) for item in value)
            return f"[{inner}]"
        if value is None or type(value) in (int, bool, float, str) or isinstance(value, torch.dtype):
            return repr(value)
        return self.w.constant("argument", value)


# --- the nesting of the result


def write_result(writer: Writer, tree: Tree, outputs: Sequence[str]) -> str:
    """Write the expression that nests the outputs as the function did."""
    text = _text(writer, tree, iter(outputs), 0)
    if text is not None:
        return text
    given = dict.fromkeys(nesting.givens(tree))

    def build(leaves: list[Any], known: list[Any]) -> Any:
        return nesting.unflatten(leaves, tree, dict(zip(given, known, strict=True)))

    found = ", ".join(_given_text(writer, each) for each in given)
    return f"{writer.constant('build', build)}([{', '.join(outputs)}], [{found}])"


def _given_text(writer: Writer, given: Given) -> str:
    (_, root), *steps = given.steps
    return ("kwargs" if root else "args") + "".join(step_text(writer, step) for step in steps)


def _text(writer: Writer, tree: Tree, outputs: Iterator[str], depth: int) -> str | None:
    """Write a nesting as an expression; None if it has other containers than tuple, list and dict."""
    if isinstance(tree, Leaf):
        return next(outputs)
    if isinstance(tree, Given):
        return _given_text(writer, tree)
    if tree.kind not in (tuple, list, dict) or depth > DEEPEST:
        return None
    items = [_text(writer, child, outputs, depth + 1) for child in tree.children]
    if any(item is None for item in items):
        return None
    if tree.kind is dict:
        keys = [repr(key) if type(key) in (str, int) else writer.constant("key", key) for key in tree.keys]
        return "{" + ", ".join(f"{key}: {item}" for key, item in zip(keys, items, strict=True)) + "}"
    inner = ", ".join(item for item in items if item is not None)
    if tree.kind is list:
        return f"[{inner}]"
    return f"({inner},)" if len(items) == 1 else f"({inner})"
