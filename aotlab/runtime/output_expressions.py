"""Write the part of the epilogue that builds the outputs: constants, inputs, results of the graph and their views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture import nesting
from aotlab.capture.nesting import CallerObject, Leaf, Tree
from aotlab.ir.metadata import OutputAliasInfo, OutputType, ViewStep
from aotlab.runtime.arguments import DEEPEST, step_text
from aotlab.runtime.draft import Draft, Writer


class Outputs:
    """Writes the code that builds each of the user's outputs, once, when its expression is first needed."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.meta = draft.meta
        self.w = draft.w
        self._views = ViewCalls(draft)
        self._expressions: dict[int, str] = {}

    def write(self) -> list[str]:
        """Write all outputs, and return their expressions in the user's order."""
        for i in self.draft.trace.returned_outputs:
            self.expression(i)
        return [self.expression(i) for i in range(len(self.meta.output_info))]

    def expression(self, i: int) -> str:
        """Return the expression of one of the user's outputs. The first call writes the lines that build it."""
        if i not in self._expressions:
            self._expressions[i] = self._make(self.meta.output_info[i])
            if self.meta.output_info[i].is_new_leaf and self.meta.output_info[i].same_as is None:
                self.w.add(f"{self._expressions[i]}.requires_grad_(True)")
        return self._expressions[i]

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
        """Write the lines that build an output that is a regenerated alias of another tensor of the caller."""
        base = self._base(output)
        if not output.views:
            return base
        parent = self.draft.trace.outputs.parent_outputs.get(output.index)
        if parent is not None:
            parent_info = self.meta.output_info[parent]
            remaining_views = output.views[len(parent_info.views) :]
            base, output = self.expression(parent), replace(output, views=remaining_views)
        name = self.w.local(output.name)
        wants_grad = not output.made_under_no_grad
        self._views.write(name, base, output, wants_grad if wants_grad != self.draft.grad_on else None)
        return name

    def _base(self, output: OutputAliasInfo) -> str:
        """Return the expression of the tensor that an output is a view of."""
        trace, k = self.draft.trace, output.base_idx
        assert k is not None
        if output.output_type in (OutputType.ALIAS_OF_INPUT, OutputType.IS_INPUT):
            return self.draft.kept(k)
        if output.output_type is OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT:
            return self.expression(k)
        return self.draft.results[len(trace.writes) + len(trace.returned_outputs) + k]


class ViewCalls:
    """Writes the view ops that regenerate an alias: the same ops that the traced program called.

    For example::

        out_0 = x.t()
        views = x.split(2, 1)      # an op that returns several views is called once for all of them
        out_1 = views[0]
        out_2 = views[1]
    """

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.w = draft.w
        # a call of an op that returns several views → the variable of its result, and the items that outputs use
        self._multi_view_calls: dict[tuple[str, str], tuple[str, set[int]]] = {}

    def write(self, name: str, base: str, output: OutputAliasInfo, grad_mode: bool | None) -> None:
        """Write the lines that make ``output`` from ``base`` and store it in the variable ``name``.

        ``grad_mode`` is the grad mode under which the view ops must run; None means the grad mode of the caller.
        """
        expression = base
        for n, step in enumerate(output.views):
            call = self._call(expression, step)
            if step.item is None:
                expression = call
                continue
            whole = ViewStep(target=step.target, args=step.args, kwargs=step.kwargs)
            # A view that was made before a write and a view that was made after it must not come from the same call of
            # the op. The key is a string (`repr`) because arguments may be lists, which are not hashable.
            context = (grad_mode, len(self.draft.written), output.made_together)
            key = (base, repr((*output.views[:n], whole, *context)))
            views_variable, used_items = self._multi_view_calls.get(key, ("", set()))
            if not views_variable or step.item in used_items:  # each view is used for one output only
                views_variable, used_items = self.w.local("views"), set()
                self._multi_view_calls[key] = (views_variable, used_items)
                self.draft.in_context(f"{views_variable} = {call}", grad_mode=grad_mode)
            used_items.add(step.item)
            expression = f"{views_variable}[{step.item}]"
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
        if value is None or type(value) in (int, bool, str) or isinstance(value, torch.dtype):
            return repr(value)
        return self.w.constant("argument", value)


# --- the nesting of the result


def write_result(writer: Writer, tree: Tree, outputs: Sequence[str]) -> str:
    """Return the expression that builds the function's result: the outputs in the pytree structure ``tree``."""
    text = _text(writer, tree, iter(outputs), 0)
    if text is not None:
        return text
    references = dict.fromkeys(nesting.caller_objects_in(tree))

    def build(leaves: list[Any], caller_objects: list[Any]) -> Any:
        return nesting.unflatten(leaves, tree, dict(zip(references, caller_objects, strict=True)))

    expressions = ", ".join(_caller_object_text(writer, reference) for reference in references)
    return f"{writer.constant('build', build)}([{', '.join(outputs)}], [{expressions}])"


def _caller_object_text(writer: Writer, reference: CallerObject) -> str:
    (_, root), *steps = reference.steps
    return ("kwargs" if root else "args") + "".join(step_text(writer, step) for step in steps)


def _text(writer: Writer, tree: Tree, outputs: Iterator[str], depth: int) -> str | None:
    """Return the expression of a pytree; ``outputs`` yields the expressions of its leaves.

    The result is None if the pytree has containers other than tuple, list and dict, or is nested too deeply.
    """
    if isinstance(tree, Leaf):
        return next(outputs)
    if isinstance(tree, CallerObject):
        return _caller_object_text(writer, tree)
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
