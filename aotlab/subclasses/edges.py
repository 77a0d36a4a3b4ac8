"""The autograd functions that unwrap and wrap tensors with gradients, used both in the trace and in compiled calls.

    x (a wrapper)  ──Unwrap──▶  x.a, x.b  ──the compiled function──▶  out.a, out.b  ──Wrap──▶  out (a wrapper)

In the trace the order is reversed: the function's body wraps its inputs and unwraps its outputs. A gradient that is a
wrapper flows through the same nodes, as parts. Sometimes an argument's gradient has another type than the argument; for
instance, a quantized weight may have a plain gradient. Such a gradient flows through *anchors*: tensors without memory,
one for each part of the gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import parts_of
from aotlab.capture.signals import RetraceNeeded, RunEagerly
from aotlab.errors import GraphInvariantError, SubclassError
from aotlab.ir.subclass_records import AnchoredGradient, SubclassInput, SubclassSpec
from aotlab.subclasses.parts import fits, is_differentiable, size_like_part, spec_of, wrap_parts
from aotlab.subclasses.sparse import SparseGradient


@dataclass(slots=True)
class TraceFindings:
    """Facts that one trace of a call finds and that the next trace needs.

    An input is identified by its position among the values of the call (`SubclassInput.position`).

    - ``gradients`` maps an input to the description of its gradient, if the gradient has other parts than the input.
    - ``copied`` has the inputs that the function changes so that autograd sees the change. In the next trace, the
      function gets a copy of each.
    - ``rewrapped_calls`` has the numbers of torch calls. The function returns the result of such a call, and also
      computes other results from it (`aotlab.subclasses.rewrap`).
    - ``checks_plain_inputs`` is true if the next trace also checks whether the gradients of plain inputs are wrappers.
    - ``is_tracing`` is true during a trace.
    - ``has_news`` is true if the last trace, or code after it, added a finding. Then the call is traced again.
    """

    gradients: dict[int, AnchoredGradient] = field(default_factory=dict)
    copied: set[int] = field(default_factory=set)
    rewrapped_calls: set[int] = field(default_factory=set)
    checks_plain_inputs: bool = False
    is_tracing: bool = False
    has_news: bool = False

    def copy_input(self, position: int) -> None:
        """Let the next trace pass a copy of the input at ``position`` to the function.

        Then the traced function changes only the copy, and the compiled call copies the new value into the caller's
        tensor at the end.
        """
        self.copied.add(position)
        self.has_news = True

    def rewrap_calls(self, numbers: Collection[int]) -> None:
        """Let the next trace unwrap the results of the torch calls with these ``numbers``, and wrap them again."""
        self.rewrapped_calls.update(numbers)
        self.has_news = self.has_news or bool(numbers)

    def anchor_gradients(self, gradients: Mapping[int, AnchoredGradient]) -> None:
        """Let the next trace use anchors for the gradients of these inputs."""
        self.gradients |= {n: gradient for n, gradient in gradients.items() if n not in self.gradients}
        self.checks_plain_inputs = False
        self.has_news = True

    def check(self) -> None:
        """Raise `RetraceNeeded` if this trace added a finding."""
        if self.has_news:
            raise RetraceNeeded


class GradientLayout:
    """The layout of the gradient of one tensor: how the gradient is unwrapped into parts, and wrapped from them.

    ``spec`` describes the gradient. It is None if the gradient is a plain tensor. ``name`` is the name of the tensor in
    errors.
    """

    def __init__(self, name: str, spec: SubclassSpec | None) -> None:
        self.name = name
        self.spec = spec

    def parts(self, gradient: Tensor) -> Sequence[Tensor | None]:
        """Return the parts of a gradient.

        If the output is a wrapper and the caller passes a plain gradient, that gradient is the first part, and each
        other part is None. The backward graph is then derived for the first part alone, and may give plain gradients.
        """
        if self.spec is None:
            if internals.is_wrapper(gradient):
                raise self._wrong(gradient)
            return [gradient]
        if not internals.is_wrapper(gradient) and self.spec.count > 1 and self.spec.type is not SparseGradient:
            return [gradient, *[None] * (self.spec.count - 1)]
        return unwrap(self._coerced(gradient, self.spec), self.spec)

    def _coerced(self, gradient: Tensor, spec: SubclassSpec) -> Tensor:
        """Convert a gradient to the type and layout for which the backward was traced; raise if that is impossible.

        A gradient of the right type is made contiguous. Otherwise the gradient's class may convert it, by its method
        ``__coerce_same_metadata_as_tangent__``. A plain gradient is multiplied by a wrapper of ones.
        """
        if self._fits(gradient, spec):
            return gradient
        kind: type = type(gradient)
        coerced = gradient.contiguous() if kind is spec.type else gradient
        coerce = getattr(coerced, "__coerce_same_metadata_as_tangent__", None)
        if coerce is not None and not self._fits(coerced, spec):
            coerced = coerce(spec.context, None if kind is spec.type else spec.type)
        elif not internals.is_wrapper(gradient) and spec.type is not SparseGradient:
            coerced = wrap_parts(spec, [torch.ones_like(gradient)] * spec.count) * gradient
        if self._fits(coerced, spec):
            return coerced
        raise self._wrong(gradient)

    @staticmethod
    def _fits(gradient: Tensor | None, spec: SubclassSpec) -> bool:
        # The context of a `DTensor` says whether it requires grad. So a detached gradient is compared as well.
        return gradient is not None and (fits(gradient, spec) or fits(gradient.detach(), spec))

    def _wrong(self, gradient: Tensor) -> SubclassError:
        return SubclassError(
            f"a gradient of `{self.name}` is a `{type(gradient).__qualname__}`",
            why=f"its backward was compiled for {'a plain tensor' if self.spec is None else f'a `{self.spec}`'}",
            suggestion="pass a gradient of that type, or call the original function",
            argument=self.name,
        )


class InputGradientLayout(GradientLayout):
    """The layout of the gradient of an input. The trace finds this layout only when it runs the backward.

    ``is_known`` is true if an earlier trace of the call has found that the gradient has other parts than the input.
    """

    def __init__(self, item: SubclassInput, parts: Sequence[Tensor], findings: TraceFindings) -> None:
        self.is_known = isinstance(item.gradient, AnchoredGradient)
        super().__init__(item.name, item.gradient.spec if isinstance(item.gradient, AnchoredGradient) else None)
        self._position, self._findings = item.position, findings
        self._kind = None if item.spec is None else item.spec.type
        self._sizes = [part.shape for part in parts]
        self._like = parts

    def parts(self, gradient: Tensor) -> Sequence[Tensor | None]:
        """Return the parts of a gradient. If they do not match the parts of the input, request another trace.

        The present trace then continues with no gradient for this input (an empty list), to find the gradients of the
        other inputs.
        """
        if self.is_known or (self.spec is not None and fits(gradient, self.spec)):
            return super().parts(gradient)
        if self._kind is None and not internals.is_wrapper(gradient):
            return [gradient]
        parts = parts_of(gradient) if internals.is_wrapper(gradient) else [gradient]
        spec = spec_of(gradient, f"the gradient of {self.name}") if internals.is_wrapper(gradient) else None
        if not is_differentiable(parts):
            raise RunEagerly("subclass-parts-without-gradient", name=f"the gradient of `{self.name}`", kind=spec)
        if spec is None or self._kind is not spec.type or [part.shape for part in parts] != self._sizes:
            if self.spec is not None:
                return super().parts(gradient)
            sizes = [tuple([size_like_part(n, d, self._like) for d, n in enumerate(part.shape)]) for part in parts]
            anchors = tuple(zip([part.dtype for part in parts], sizes, strict=True))
            self._findings.anchor_gradients({self._position: AnchoredGradient(spec=spec, anchors=anchors)})
            if not self._findings.is_tracing:
                raise self._wrong(gradient)
            return []
        if self.spec is not None:
            return super().parts(gradient)
        self.spec = spec
        return unwrap(gradient, spec)


def unwrap(tensor: Tensor, spec: SubclassSpec) -> Sequence[Tensor]:
    """Return the parts of a wrapper; they have a ``grad_fn`` if the wrapper requires grad and grad mode is on."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        parts: Sequence[Tensor] = Unwrap.apply(tensor, GradientLayout("a gradient", spec))  # type: ignore[no-untyped-call]
        return parts
    return parts_of(tensor)


def wrap(spec: SubclassSpec, parts: Sequence[Any]) -> Any:
    """Make the wrapper that ``spec`` describes; it has a ``grad_fn`` if a part requires grad and grad mode is on."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return Wrap.apply(spec, GradientLayout("a gradient", spec), 0, False, *parts)  # type: ignore[no-untyped-call]
    return wrap_parts(spec, parts)


class Unwrap(torch.autograd.Function):
    """The autograd function that unwraps a wrapper into its parts."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: GradientLayout) -> tuple[Tensor, ...]:
        """Return the parts of ``tensor``; ``layout`` is the layout of the gradient of ``tensor``."""
        ctx.set_materialize_grads(False)
        ctx.layout = layout
        parts = tuple([part.detach() for part in parts_of(tensor)])
        ctx.mark_non_differentiable(*[part for part in parts if not is_differentiable([part])])
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        """Make the gradient of the wrapper from the gradients of its parts."""
        return _wrap_gradient(ctx.layout, gradients), None


class Wrap(torch.autograd.Function):
    """The autograd function that makes a wrapper from its parts.

    If the gradient of the wrapper has other parts than the wrapper, the parts of the gradient flow to anchors. In
    the arguments of the function, the anchors come before the parts.
    """

    @staticmethod
    def forward(
        ctx: Any,
        spec: SubclassSpec | None,
        layout: GradientLayout,
        anchor_count: int,
        is_copied: bool,
        *anchors_and_parts: Tensor,
    ) -> Any:
        """Return the wrapper. Without a ``spec``, return the single part, a plain tensor.

        ``layout`` is the layout of the gradient of the wrapper. With ``is_copied`` (only in a trace), the wrapper gets
        copies of the parts, so that a write to the wrapper does not change the inputs.
        """
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.anchor_count, ctx.count = layout, anchor_count, len(anchors_and_parts)
        parts = [copy_of(part) if is_copied else part.detach() for part in anchors_and_parts[anchor_count:]]
        wrapper = parts[0] if spec is None else wrap_parts(spec, parts)
        return wrapper.detach() if wrapper.requires_grad else wrapper

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        """Return the parts of the gradient: the gradients of the anchors, or of the parts if there are no anchors."""
        parts: Sequence[Tensor | None] = [] if gradient is None else ctx.layout.parts(gradient)
        return (None, None, None, None, *parts, *[None] * (ctx.count - len(parts)))


def unwrap_result(tensor: Tensor, name: str) -> tuple[SubclassSpec, Sequence[Tensor]]:
    """Unwrap a result; return the spec of its gradient, and its parts with their ``grad_fn``.

    ``name`` is the name of the result in errors.
    """
    if not is_differentiable(parts_of(tensor)):
        raise RunEagerly("subclass-parts-without-gradient", name=f"`{name}`", kind=type(tensor).__qualname__)
    detached = tensor.detach()
    coerce = getattr(detached, "__coerce_tangent_metadata__", None)
    tangent = spec_of(detached if coerce is None else coerce(), name)
    with torch.enable_grad():  # the function may have turned grad mode off
        return tangent, Unwrap.apply(tensor, GradientLayout(name, tangent))  # type: ignore[no-untyped-call]


def copy_of(part: Tensor) -> Tensor:
    """Return a traced tensor with the same value in other memory."""
    return internals.to_functional(internals.from_functional(part))


def detect_writes(results: Any, wrappers: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> None:
    """Make the backward of ``results`` raise if one of the wrappers is written after the call.

    ``wrappers`` has pairs: a wrapper, and tensors that the compiled function may have saved and whose values are copied
    into the parts of the wrapper.

    A write to a wrapper does not change the version counters of its parts, and the compiled function saves the parts.
    So a hook before the backward reads the version counter of each wrapper. If the counter has changed, the hook
    increments the counters of the wrapper's parts, and of the copies of these parts. Then autograd's own check of saved
    tensors fails.
    """
    nodes = {each.grad_fn for each in results if isinstance(each, Tensor) and each.grad_fn is not None}
    versions = [(weakref.ref(each), internals.version_of(each), copies) for each, copies in wrappers] if nodes else []

    def count_writes(_: Any) -> None:
        for reference, version, copies in versions:
            wrapper = reference()
            if wrapper is not None and internals.version_of(wrapper) != version:
                for part in (*parts_of(wrapper), *copies):
                    torch.autograd.graph.increment_version(part)

    for node in nodes:
        node.register_prehook(count_writes)


class Anchor(torch.autograd.Function):
    """The autograd function that makes the anchors of a tensor, one for each part of the tensor's gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, layout: GradientLayout, *anchors: tuple[torch.dtype, Sequence[int]]) -> Any:
        """Return one anchor for each part of the gradient of ``tensor``.

        ``layout`` describes how the gradient is wrapped from its parts. ``anchors`` has a pair for each part: the dtype
        and the sizes of the part, which are also those of its anchor.
        """
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.count = layout, len(anchors)
        return tuple([torch.empty((), dtype=dtype, device=tensor.device).expand(size) for dtype, size in anchors])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Make the gradient of the tensor. Its parts are the gradients of the anchors."""
        return (_wrap_gradient(ctx.layout, gradients), *[None] * (1 + ctx.count))


def _wrap_gradient(layout: GradientLayout, parts: Sequence[Tensor | None]) -> Tensor | None:
    defined = [part for part in parts if part is not None]
    if defined and len(defined) != len(parts):
        if defined == [parts[0]]:
            return defined[0]  # the caller passed a plain gradient for a wrapper; see `GradientLayout.parts`
        raise GraphInvariantError(f"a gradient of `{layout.name}` has only some of its parts")
    if any(internals.is_wrapper(part) for part in defined):
        raise SubclassError(
            f"the gradient of a plain output is a `{type(defined[0]).__qualname__}`",
            why=f"the backward of `{layout.name}` was compiled for plain gradients",
            suggestion="call the original function",
        )
    if layout.spec is None or not defined:
        return defined[0] if defined else None
    wrapped: Tensor = wrap(layout.spec, defined)
    return wrapped
