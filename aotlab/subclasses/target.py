"""The function that the engine compiles: it takes and returns plain tensors, and wraps and unwraps in its body.

    f(x, y)                                    # x is a TwoTensor
    body((x.a, x.b, "TwoTensor(a, b)"), y)     # wraps x, calls f, unwraps the result

With the parts of a wrapper, the body takes a text that describes all other assumptions about the wrapper. The engine
guards this text like any Python value. Only the trace runs the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import parts_of
from aotlab.capture import nesting
from aotlab.capture.call import ArgumentKind, Target
from aotlab.capture.signals import RunEagerly
from aotlab.guards.call_state import check_tensor
from aotlab.guards.guarded_values import Mentioned
from aotlab.guards.reached import Reached
from aotlab.ir.subclass_records import AnchoredGradient, SubclassInput
from aotlab.runtime.draft import Draft
from aotlab.subclasses.edges import (
    Anchor,
    GradientLayout,
    InputGradientLayout,
    TraceFindings,
    Unwrap,
    Wrap,
    copy_of,
)
from aotlab.subclasses.mode import AboveFunctionalization, LeavesStayLeaves
from aotlab.subclasses.parts import is_differentiable, sizes, spec_of, state_of, wrap_parts
from aotlab.subclasses.results import Results, TracedInput, read_results
from aotlab.subclasses.rewrap import RewrapMode, rewrap
from aotlab.trace.recorder import running


class UnwrappedTarget(Target):
    """The function of plain tensors that the engine compiles in place of ``target`` (see the module).

    Its arguments are the parts of the wrappers in ``args`` and ``kwargs``, and the arguments that are not wrappers. It
    serves calls whose arguments have the same types and nesting. ``findings`` are the findings of earlier traces of
    this call.
    """

    def __init__(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], findings: TraceFindings) -> None:
        self.target = target
        self.name, self.line, self.frontend = target.name, target.line, target.frontend
        self.function = getattr(target, "function", None)
        self._reached = target.reached()
        lifted, self._kinds = list(target.lifted()), list(target.lifted_names())
        leaves, self.tree = nesting.flatten((args, kwargs))
        names = [*(name for name, _ in self._kinds), *target.argument_names(args, kwargs)]
        values = [*lifted, *leaves]
        self.lifted_count = len(lifted)
        self.inputs: list[SubclassInput] = []
        first: dict[int, int] = {}
        for n, (name, value) in enumerate(zip(names, values, strict=True)):
            if isinstance(value, Tensor) and not internals.is_wrapper(value):
                check_tensor(value, name)
            if internals.is_wrapper(value) or _is_watched(n, value, findings) or id(value) in first:
                k = first.setdefault(id(value), len(self.inputs))
                item = _input(name, self._kind(n), n, value, k, findings)
                if k < len(self.inputs):  # the same tensor again: its first position has the findings
                    item = replace(self.inputs[k], name=name, kind=self._kind(n), position=n)
                self.inputs.append(item)
        ours = {each.position for each in self.inputs}
        self._plain_lifted = [n for n in range(len(lifted)) if n not in ours]
        self._names, self._findings = names, findings
        self._check_copied(values)
        # each trace replaces these layouts
        self.gradient_layouts = [InputGradientLayout(each, (), findings) for each in self.inputs]
        self.results: Results | None = None
        self.rewrapped_outputs: set[int] = set()  # outputs whose wrapper `after_node` has already written
        self._lifted_values: list[Tensor] = []
        self._calls_to_rewrap = frozenset(findings.rewrapped_calls)

    def _kind(self, n: int) -> str:
        return self._kinds[n][1] if n < self.lifted_count else "input"

    def _check_copied(self, values: Sequence[Any]) -> None:
        """Run the call eagerly if an input must be copied and another argument shares its memory."""
        memory: dict[int, int] = {}
        for n, value in enumerate(values):
            for tensor in parts_of(value) if isinstance(value, Tensor) else ():
                key = internals.storage_key(tensor)
                other = memory.setdefault(key, n)
                pair = [item for item in self.inputs if item.is_copied and item.position in (n, other)]
                if other != n and values[other] is not value and pair:
                    raise RunEagerly("subclass-changed-and-shared", name=f"`{pair[0].name}`", other="another argument")

    # --- the `Target` interface for the engine

    def reached(self) -> tuple[Reached, ...]:
        """Return the values that the function reads besides its arguments."""
        return self._reached

    def mentioned(self) -> Mentioned:
        """Return the names of the attributes that the function may read."""
        return self.target.mentioned()

    def lifted(self) -> Sequence[Tensor]:
        """Return the lifted tensors that are not wrappers."""
        return self.lifter()()

    def lifter(self) -> Callable[[], Sequence[Tensor]]:
        """Return a function that reads the lifted tensors that are not wrappers."""
        read, plain = self.target.lifter(), self._plain_lifted

        def read_plain() -> list[Tensor]:
            tensors = read()
            return [tensors[n] for n in plain]

        return read_plain

    def lifted_names(self) -> Sequence[tuple[str, ArgumentKind]]:
        """Return the names and kinds of the lifted tensors that are not wrappers."""
        return [self._kinds[n] for n in self._plain_lifted]

    def holder(self, lifted: Sequence[Tensor]) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that makes a context manager: in it, the user's modules have the traced parameters.

        The traced parameters include the wrappers.
        """
        return self.target.holder(self._lifted_values)

    def objects(self) -> list[Any]:
        """Return the objects that the function reaches."""
        return self.target.objects()

    def still_same(self) -> Callable[[], bool] | None:
        """Return a fast check that the values that the function reads are still the same."""
        return self.target.still_same()

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Return the names of the flat arguments; a part is named by its wrapper and attribute."""
        of_inputs = {item.position: self._names_of(item) for item in self.inputs}
        lifted = [name for n in range(self.lifted_count) for name in of_inputs.get(n, [])]
        rest = range(self.lifted_count, len(self._names))
        return lifted + [name for n in rest for name in of_inputs.get(n, [self._names[n]])]

    @staticmethod
    def _names_of(item: SubclassInput) -> list[str]:
        return [*item.paths, *item.anchors, f"type({item.name})"]

    @property
    def structure(self) -> str:
        """A text with the types and the nesting of the arguments; the reason for a recompile shows it."""
        specs = {item.position: str(item.spec or "*") for item in self.inputs}
        flat = (specs.get(n, "*") for n in range(self.lifted_count, len(self._names)))
        return f"({', '.join([*(specs[n] for n in specs if n < self.lifted_count), *flat])})"

    # --- a call

    def unwrap(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the body for the arguments of a call of the function."""
        leaves, _ = nesting.flatten((args, kwargs))
        values = [*self.target.lifted(), *leaves]
        groups: list[tuple[Any, ...]] = []
        for item, layout in zip(self.inputs, self.gradient_layouts, strict=True):
            if item.same_as < len(groups):
                groups.append(groups[item.same_as])
            else:
                groups.append((*tensors_of(values[item.position], item, layout, values), item.fact))
        for item, group in zip(self.inputs, groups, strict=True):
            values[item.position] = group
        lifted = [item.position for item in self.inputs if item.position < self.lifted_count]
        args, kwargs = nesting.unflatten(values[self.lifted_count :], self.tree)
        return (*(values[n] for n in lifted), *args), kwargs

    def run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrap the arguments, call the function, and unwrap its result."""
        self._findings.is_tracing = True
        running.recorders[-1].subclass_mode = mode = AboveFunctionalization()
        with mode:
            return self._run(lifted, args, kwargs, mode)

    def _run(
        self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], mode: AboveFunctionalization
    ) -> Any:
        with internals.disable_torch_function():
            flat = iter(nesting.flatten((args, kwargs))[0])
            plain = dict(zip(self._plain_lifted, lifted, strict=True))
            by_position = {item.position: item for item in self.inputs}
            traced: list[TracedInput] = []
            values: list[Any] = []
            for n in range(len(self._names)):
                if n in by_position:
                    traced.append(self._enter(by_position[n], flat, traced))
                    values.append(traced[-1].wrapper)
                else:
                    values.append(plain[n] if n in plain else next(flat))
            self._lifted_values = values[: self.lifted_count]
            mode.values = values
            given_args, given_kwargs = nesting.unflatten(values[self.lifted_count :], self.tree)
        leaves = [each.wrapper for each in traced if each.item.is_leaf]
        with LeavesStayLeaves(leaves), RewrapMode(self._calls_to_rewrap) as rewrapping:
            result = self.target.run(self._lifted_values, tuple(given_args), given_kwargs)
        with internals.disable_torch_function():
            now, tree = nesting.flatten((given_args, given_kwargs))
            if tree != self.tree or any(a is not b for a, b in zip(now, values[self.lifted_count :], strict=True)):
                raise RunEagerly("container-beside-subclass-changed")
            if not mode.lookups.keys() <= {item.position for item in self.inputs if item.anchors}:
                self._findings.anchor_gradients(mode.lookups)
            objects_before = {id(part): None for part, _ in nesting.parts_of((given_args, given_kwargs))} | {
                id(each): None for each in self.target.objects()
            }
            self.results, returned = read_results(
                result, traced, _containers(objects_before, values), self._findings, {*mode.mixed}, rewrapping
            )
        return returned

    def end_trace(self) -> None:
        """Raise `RetraceNeeded` if the trace added a finding."""
        self._findings.is_tracing = False
        self._findings.check()

    def after_node(self, draft: Draft, positions: Sequence[int]) -> None:
        """Write the lines that wrap and unwrap the parts of an output from which other outputs are computed.

        The engine calls this method after it has written an autograd node, whose results are the forward outputs at
        ``positions``. See `aotlab.subclasses.rewrap`.
        """
        assert self.results is not None
        outputs, writes = draft.trace.returned_outputs, len(draft.trace.writes)
        own_results = {outputs[i - writes]: i for i in positions if writes <= i < writes + len(outputs)}
        for n, each in enumerate([*self.results.outputs, *self.results.extra_bases]):
            if each.is_rewrapped and each.spec is not None and each.first in own_results:
                names = ", ".join(draft.results[own_results[each.first + k]] for k in range(each.spec.count))
                layout = draft.w.constant("gradient", GradientLayout(f"output {n}", each.tangent))
                arguments = f"{draft.w.constant('spec', each.spec)}, {layout}, {names}"
                draft.with_grad(f"{names}, = {draft.w.shared('rewrap', rewrap)}({arguments})")
                self.rewrapped_outputs.add(n)

    def _enter(self, item: SubclassInput, flat: Iterator[Any], traced: list[TracedInput]) -> TracedInput:
        parts, anchors = [next(flat) for _ in item.paths], [next(flat) for _ in item.anchors]
        next(flat)
        if item.same_as < len(traced):
            return replace(traced[item.same_as], item=item)
        if item.gradient is not None:
            layout = self.gradient_layouts[item.same_as] = InputGradientLayout(item, parts, self._findings)
            arguments = item.spec, layout, len(anchors), item.is_copied, *anchors, *parts
            with torch.enable_grad():
                wrapper = Wrap.apply(*arguments)  # type: ignore[no-untyped-call]  # untyped in torch
        else:
            parts = [copy_of(part) for part in parts] if item.is_copied else parts
            wrapper = parts[0] if item.spec is None else wrap_parts(item.spec, parts)
        return TracedInput(
            item=item,
            wrapper=wrapper,
            parts=parts_of(wrapper),
            version=0 if wrapper.is_inference() else internals.version_of(wrapper),
            history=wrapper.grad_fn,
            state=state_of(wrapper),
        )


def _containers(ids: dict[int, None], values: Sequence[Any]) -> dict[int, None]:
    """Return the ids of containers and objects, without the ids of ``values``."""
    leaves = {id(value) for value in values}
    return {key: None for key in ids if key not in leaves}


def _is_watched(position: int, value: Any, findings: TraceFindings) -> bool:
    """Tell whether a plain tensor is treated like a wrapper, because its gradient is, or could be, a wrapper."""
    may_be = findings.checks_plain_inputs and isinstance(value, Tensor) and value.requires_grad
    return may_be or position in findings.gradients


def _input(name: str, kind: str, position: int, tensor: Tensor, same_as: int, findings: TraceFindings) -> SubclassInput:
    gradient: Literal["parts"] | AnchoredGradient | None = None
    spec = spec_of(tensor, name) if internals.is_wrapper(tensor) else None
    if tensor.requires_grad and not torch.is_inference_mode_enabled():
        gradient = findings.gradients.get(position, "parts")
        if gradient == "parts" and not is_differentiable(parts_of(tensor)):
            layout = [] if spec is None else spec.layout.size
            gradient = AnchoredGradient(spec=None, anchors=((tensor.dtype, tuple(layout)),))
    return SubclassInput(
        name=name,
        kind=kind,
        position=position,
        spec=spec,
        same_as=same_as,
        requires_grad=tensor.requires_grad,
        is_leaf=tensor.is_leaf,
        gradient=gradient,
        is_copied=position in findings.copied,
    )


def tensors_of(tensor: Tensor, item: SubclassInput, layout: GradientLayout, inputs: Sequence[Any]) -> Sequence[Tensor]:
    """Return the tensors that the body takes for a wrapper ``tensor``, which ``item`` describes.

    These are the parts of the wrapper. If the gradient of the wrapper has the same parts, the parts have a ``grad_fn``.
    If the gradient has other parts, its anchors follow the parts. ``layout`` unwraps and wraps the gradient.
    ``inputs`` are all values of the call, because sizes of anchors may depend on other arguments.
    """
    if item.gradient == "parts":
        with torch.enable_grad():
            unwrapped: Sequence[Tensor] = Unwrap.apply(tensor, layout)  # type: ignore[no-untyped-call]
        return unwrapped
    parts = [part.detach() if part.requires_grad else part for part in parts_of(tensor)]
    if item.gradient is not None:
        anchors = [(dtype, sizes(size, [*parts, *inputs])) for dtype, size in item.gradient.anchors]
        with torch.enable_grad():
            parts += Anchor.apply(tensor, layout, *anchors)  # type: ignore[no-untyped-call]
    return parts
