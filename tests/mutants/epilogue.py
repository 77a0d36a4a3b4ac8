"""Mutants of the results of a call: write-backs, outputs, views, containers, grad mode."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aotlab.ir.metadata import OutputType
from aotlab.runtime import runtime_stage as runtime
from aotlab.runtime.draft import Draft
from aotlab.runtime.mutations import Mutations
from aotlab.runtime.output_expressions import Outputs, ViewCalls
from tests.mutants.mutant import Change, Mutant, skip


def _hide_mutations(original: Callable[..., Any]) -> Callable[..., Any]:
    def mutations(self: Any, results: dict[int, str]) -> None:
        first = len(self.w.lines)
        original(self, results)
        for index in range(first, len(self.w.lines)):
            self.w.lines[index] = re.sub(r"([\w\[\]]+)\.copy_\(", r"\1.detach().copy_(", self.w.lines[index])

    return mutations


def _wrong_mutations(original: Callable[..., Any]) -> Callable[..., Any]:
    def mutations(self: Any, results: dict[int, str]) -> None:
        original(self, {index: f"{expression}.mul(2)" for index, expression in results.items()})

    return mutations


def _swap_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def outputs(self: Any) -> list[str]:
        expressions: list[str] = original(self)
        return expressions[::-1]

    return outputs


def _detach_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    def outputs(self: Any) -> list[str]:
        expressions: list[str] = original(self)
        return [
            f"{expression}.detach()" if info.requires_grad and info.output_type is OutputType.NON_ALIAS else expression
            for expression, info in zip(expressions, self.meta.output_info, strict=True)
        ]

    return outputs


def _lose_identity(original: Callable[..., Any]) -> Callable[..., Any]:
    def outputs(self: Any) -> list[str]:
        expressions: list[str] = original(self)
        return [
            f"{expression}.view_as({expression})" if info.views == () else expression
            for expression, info in zip(expressions, self.meta.output_info, strict=True)
        ]

    return outputs


def _copy_views(original: Callable[..., Any]) -> Callable[..., Any]:
    def write_views(self: Any, name: str, *rest: Any) -> None:
        original(self, name, *rest)
        self.w.add(f"{name} = {name}.clone()")

    return write_views


def _first_window(original: Callable[..., Any]) -> Callable[..., Any]:
    def view_call(self: Any, base: str, step: Any) -> str:
        if step.target in ("aten.select.int", "aten.slice.Tensor") and len(step.args) > 1 and step.args[1]:
            dim, start, *rest = step.args
            if step.target == "aten.slice.Tensor" and rest and isinstance(rest[0], int):
                # Keep the length of the slice, but start at 0.
                rest[0] -= start
            step = replace(step, args=(dim, 0, *rest))
        return str(original(self, base, step))

    return view_call


def _edited_source(*edits: tuple[str, str]) -> Change:
    """Replace patterns in the source of the generated run-time function."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(self: Any) -> tuple[str, dict[str, Any]]:
            source, namespace = original(self)
            for pattern, text in edits:
                source = re.sub(pattern, text, source, flags=re.MULTILINE)
            return source, namespace

        return generate

    return change


def _outputs_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the outputs before the write-back of mutated inputs."""

    def outputs(self: Any) -> list[str]:
        found = [at for at, line in enumerate(self.w.lines) if ".copy_(" in line]
        blocks = [(at - 2, at + 3) if self.w.lines[at].startswith("        ") else (at, at + 1) for at in found]
        moved = [line for start, stop in blocks for line in self.w.lines[start:stop]]
        for start, stop in reversed(blocks):
            del self.w.lines[start:stop]
        expressions: list[str] = original(self)
        self.w.lines += moved
        return expressions

    return outputs


def _in_any_grad_mode(pattern: str) -> Change:
    """Do not set the grad mode around generated lines that match ``pattern``."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def in_context(self: Any, line: str, *, grad_mode: bool | None, autocast_off: bool = False) -> None:
            forgotten = re.search(pattern, line) is not None
            original(self, line, grad_mode=None if forgotten else grad_mode, autocast_off=autocast_off)

        return in_context

    return change


def _views_in_any_grad_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    def write_views(self: Any, name: str, base: str, output: Any, grad_mode: bool | None) -> None:
        original(self, name, base, output, None)

    return write_views


def _single_views(original: Callable[..., Any]) -> Callable[..., Any]:
    def write_views(self: Any, name: str, base: str, output: Any, grad_mode: bool | None) -> None:
        views = output.views
        if views is not None:
            views = tuple(
                replace(step, target="aten.select.int", args=((*step.args, 0)[0], step.item), item=None)
                if step.target == "aten.unbind.int"
                else step
                for step in views
            )
        original(self, name, base, replace(output, views=views), grad_mode)

    return write_views


def _of_outputs(expression: str, *kinds: OutputType) -> Change:
    """Return ``expression`` of an output instead of the output, if the output has one of these types."""

    def change(original: Callable[..., Any]) -> Callable[..., Any]:
        def outputs(self: Any) -> list[str]:
            expressions: list[str] = original(self)
            return [
                expression.format(given) if info.output_type in kinds and info.spec is not None else given
                for given, info in zip(expressions, self.meta.output_info, strict=True)
            ]

        return outputs

    return change


def _own_bases(original: Callable[..., Any]) -> Callable[..., Any]:
    def write_views(self: Any, name: str, base: str, output: Any, grad_mode: bool | None) -> None:
        kinds = (OutputType.ALIAS_OF_INTERMEDIATE, OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT)
        own = f"{base}.clone()" if output.output_type in kinds else base
        original(self, name, own, output, grad_mode)

    return write_views


def _numbers_for_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    def make_output(self: Any, output: Any) -> str:
        text = str(original(self, output))
        return {"True": "1", "False": "0"}.get(text, text)

    return make_output


def _tuples_for_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    def write_result(*args: Any) -> str:
        text = str(original(*args))
        return f"({text[1:-1]},)" if text.startswith("[") and text.endswith("]") and len(text) > 2 else text

    return write_result


EPILOGUE: tuple[Mutant, ...] = (
    Mutant(
        name="epilogue skipped",
        breaks="The new value of a mutated input is computed and never written.",
        changes=((Mutations, "write", skip),),
    ),
    Mutant(
        name="mutation hidden from autograd",
        breaks="A mutated input gets its new value, but the gradient does not flow through it.",
        changes=((Mutations, "write", _hide_mutations),),
    ),
    Mutant(
        name="wrong mutated value",
        breaks="A mutated input is given something else than its new value.",
        changes=((Mutations, "write", _wrong_mutations),),
    ),
    Mutant(
        name="swapped outputs",
        breaks="The outputs come back in reverse order.",
        changes=((Outputs, "write", _swap_outputs),),
    ),
    Mutant(
        name="requires_grad lost",
        breaks="A differentiable output comes back detached.",
        changes=((Outputs, "write", _detach_outputs),),
    ),
    Mutant(
        name="identity lost",
        breaks="An output that is an input, or another output, comes back as a view of it.",
        changes=((Outputs, "write", _lose_identity),),
    ),
    Mutant(
        name="view returned as a copy",
        breaks="An output that aliases something comes back with memory of its own.",
        changes=((ViewCalls, "write", _copy_views),),
    ),
    Mutant(
        name="wrong offset",
        breaks="A window into a tensor is made again at its beginning.",
        changes=((ViewCalls, "_call", _first_window),),
    ),
    Mutant(
        name="grad mode forgotten",
        breaks="The grad mode that the function leaves behind is not set.",
        changes=((runtime, "generate", _edited_source((r"set_grad_mode\(\w+\)", "pass"))),),
    ),
    Mutant(
        name="views of the graph's own",
        breaks="An output that the graph makes as a view comes back as a view that may not be written.",
        changes=((runtime, "generate", _edited_source((r"(results\[\d+\])\.detach\(\)", r"\1"))),),
    ),
    Mutant(
        name="uncounted write counted",
        breaks="A write through .data moves the version counter.",
        changes=((runtime, "generate", _edited_source((r"\.data\.copy_\(", ".detach().copy_("))),),
    ),
    Mutant(
        name="writes uncounted",
        breaks="A write moves no version counter.",
        changes=(
            (
                runtime,
                "generate",
                _edited_source((r"^( +)(\w+)\.copy_\(", r"\1\2.data.copy_("), (r"increment_version\(.*$", "pass")),
            ),
        ),
    ),
    Mutant(
        name="hidden write made visible",
        breaks="What the function writes under no_grad, or through detach(), becomes part of the caller's history.",
        changes=((Draft, "in_context", _in_any_grad_mode(r"\.copy_\(")),),
    ),
    Mutant(
        name="grad mode of a view forgotten",
        breaks="A view that the function made under no_grad is made with grad mode on.",
        changes=((ViewCalls, "write", _views_in_any_grad_mode),),
    ),
    Mutant(
        name="outputs before writes",
        breaks="Outputs that are views of an input are made before the input is written.",
        changes=((Outputs, "write", _outputs_first),),
    ),
    Mutant(
        name="multi-output view made singly",
        breaks="A view that comes from a function with several may be written by the caller.",
        changes=((ViewCalls, "write", _single_views),),
    ),
    Mutant(
        name="strides lost",
        breaks="A new output comes back contiguous.",
        changes=((Outputs, "write", _of_outputs("{}.contiguous()", OutputType.NON_ALIAS)),),
    ),
    Mutant(
        name="aliases of an intermediate come apart",
        breaks="Two outputs that share the memory of an intermediate come back without sharing any.",
        changes=((ViewCalls, "write", _own_bases),),
    ),
    Mutant(
        name="flag returned as a number",
        breaks="True comes back as 1.",
        changes=((Outputs, "_make", _numbers_for_flags),),
    ),
    Mutant(
        name="list returned as a tuple",
        breaks="A list comes back as a tuple.",
        changes=((runtime, "write_result", _tuples_for_lists),),
    ),
)
