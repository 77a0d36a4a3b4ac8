"""The autograd nodes between wrappers and their parts; the same ones stand in the trace and in compiled calls.

    x (a wrapper)  ──Unwrap──▶  x.a, x.b  ──the compiled function──▶  out.a, out.b  ──Wrap──▶  out (a wrapper)

In the trace they stand the other way round: the function's body wraps its inputs and unwraps its outputs. Gradients
that are wrappers take the same way back, in parts. Where an argument's gradient is of another kind than the argument,
as the plain one of a quantized weight, it goes through *anchors*: tensors without memory that stand for its parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import parts_of
from aotlab.capture.signals import RunEagerly
from aotlab.errors import GraphInvariantError, SubclassError
from aotlab.ir.subclasses import AnchoredGradient, SubclassInput, SubclassSpec
from aotlab.subclasses.parts import fits, is_differentiable, like_part, spec_of, together
from aotlab.subclasses.sparse import SparseGradient


class Again(RunEagerly):
    """Raised in a trace that is to be made once more, with what was found noted in ``ways``."""

    def __init__(self) -> None:
        super().__init__("it would have to be traced once more")


@dataclass(slots=True)
class Ways:
    """What earlier traces found: inputs by position, with gradients of other parts than theirs, or that are written.

    ``passing`` are the calls in the trace that return what other results are computed of. With ``watches`` the
    gradients of plain inputs are looked at, too.
    """

    gradients: dict[int, AnchoredGradient] = field(default_factory=dict)
    hidden: set[int] = field(default_factory=set)
    passing: set[int] = field(default_factory=set)
    watches: bool = False
    traces: int = 0

    def hide(self, position: int) -> NoReturn:
        """Trace once more, with the writes of an input apart from it."""
        self.hidden.add(position)
        raise Again

    def anchor(self, position: int, gradient: AnchoredGradient) -> NoReturn:
        """Trace once more, with anchors for the gradient of an input."""
        self.gradients[position] = gradient
        self.watches = False
        raise Again


class Gradient:
    """How the gradient of a wrapper is taken apart and put together: it is a plain tensor if there is no ``spec``."""

    def __init__(self, name: str, spec: SubclassSpec | None) -> None:
        self.name = name
        self.spec = spec

    def parts(self, gradient: Tensor) -> Sequence[Tensor]:
        """Take a gradient apart."""
        if self.spec is None:
            if internals.is_wrapper(gradient):
                raise self._wrong(gradient)
            return [gradient]
        return taken_apart(self._coerced(gradient, self.spec), self.spec)

    def _coerced(self, gradient: Tensor, spec: SubclassSpec) -> Tensor:
        """Turn a gradient into what the backward was traced for: by its layout, by its class, or by multiplying."""
        if self._fits(gradient, spec):
            return gradient
        kind: type = type(gradient)
        made = gradient.contiguous() if kind is spec.type else gradient
        coerce = getattr(made, "__coerce_same_metadata_as_tangent__", None)
        if coerce is not None and not self._fits(made, spec):
            made = coerce(spec.context, None if kind is spec.type else spec.type)
        elif not internals.is_wrapper(gradient) and spec.type is not SparseGradient:
            made = together(spec, [torch.ones_like(gradient)] * spec.count) * gradient
        if self._fits(made, spec):
            return made
        raise self._wrong(gradient)

    @staticmethod
    def _fits(gradient: Tensor | None, spec: SubclassSpec) -> bool:
        # a `DTensor` counts in its context whether it requires grad
        return gradient is not None and (fits(gradient, spec) or fits(gradient.detach(), spec))

    def _wrong(self, gradient: Tensor) -> SubclassError:
        return SubclassError(
            f"a gradient of `{self.name}` is a `{type(gradient).__qualname__}`",
            why=f"its backward was compiled for {'a plain tensor' if self.spec is None else f'a `{self.spec}`'}",
            suggestion="pass a gradient of that type, or call the original function",
            argument=self.name,
        )


class GradientOfInput(Gradient):
    """The gradient of an input, which the trace finds; ``is_known``: it was found by an earlier trace."""

    def __init__(self, item: SubclassInput, parts: Sequence[Tensor], ways: Ways) -> None:
        self.is_known = isinstance(item.gradient, AnchoredGradient)
        super().__init__(item.name, item.gradient.spec if isinstance(item.gradient, AnchoredGradient) else None)
        self._position, self._ways = item.position, ways
        self._kind = None if item.spec is None else item.spec.type
        self._sizes = [part.shape for part in parts]
        self._like = parts

    def parts(self, gradient: Tensor) -> Sequence[Tensor]:
        """Take a gradient apart; ask for another trace if it does not consist of the parts of the input."""
        if self.is_known or (self.spec is not None and fits(gradient, self.spec)):
            return super().parts(gradient)
        if self._kind is None and not internals.is_wrapper(gradient):
            return [gradient]
        parts = parts_of(gradient) if internals.is_wrapper(gradient) else [gradient]
        spec = spec_of(gradient, f"the gradient of {self.name}") if internals.is_wrapper(gradient) else None
        if not is_differentiable(parts):
            raise RunEagerly(f"the gradient of `{self.name}` is a `{spec}`")
        if spec is None or self._kind is not spec.type or [part.shape for part in parts] != self._sizes:
            if self.spec is not None:
                return super().parts(gradient)
            like = [tuple([like_part(n, d, self._like) for d, n in enumerate(part.shape)]) for part in parts]
            anchors = tuple(zip([part.dtype for part in parts], like, strict=True))
            self._ways.anchor(self._position, AnchoredGradient(spec=spec, anchors=anchors))
        if self.spec is not None:
            return super().parts(gradient)
        self.spec = spec
        return taken_apart(gradient, spec)


def taken_apart(tensor: Tensor, spec: SubclassSpec) -> Sequence[Tensor]:
    """Return the parts of a wrapper, with its history if that counts."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        found: Sequence[Tensor] = Unwrap.apply(tensor, Gradient("a gradient", spec))  # type: ignore[no-untyped-call]
        return found
    return parts_of(tensor)


def put_together(spec: SubclassSpec, parts: Sequence[Any]) -> Any:
    """Return the wrapper of some parts, with their history if that counts."""
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        return Wrap.apply(spec, Gradient("a gradient", spec), 0, False, *parts)  # type: ignore[no-untyped-call]
    return together(spec, parts)


class Unwrap(torch.autograd.Function):
    """From a wrapper to its parts."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Gradient) -> tuple[Tensor, ...]:
        """Take it apart."""
        ctx.set_materialize_grads(False)
        ctx.gradient = gradient
        parts = tuple([part.detach() for part in parts_of(tensor)])
        ctx.mark_non_differentiable(*[part for part in parts if not is_differentiable([part])])
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        """Put the gradient together."""
        return _whole(ctx.gradient, gradients), None


class Wrap(torch.autograd.Function):
    """From parts to the wrapper; the first of what is given are ``anchors``, if these take its gradient."""

    @staticmethod
    def forward(
        ctx: Any, spec: SubclassSpec | None, gradient: Gradient, anchors: int, hidden: bool, *given: Tensor
    ) -> Any:
        """Put it together: of the parts themselves, or of ``hidden`` ones, whose writes they do not see."""
        ctx.set_materialize_grads(False)
        ctx.gradient, ctx.anchors, ctx.count = gradient, anchors, len(given)
        parts = [apart_of(part) if hidden else part.detach() for part in given[anchors:]]
        made = parts[0] if spec is None else together(spec, parts)
        return made.detach() if made.requires_grad else made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        """Hand the gradient on, in parts."""
        parts: Sequence[Tensor] = [] if gradient is None else ctx.gradient.parts(gradient)
        return (None, None, None, None, *parts, *[None] * (ctx.count - len(parts)))


def unwrapped(tensor: Tensor, name: str) -> tuple[SubclassSpec, Sequence[Tensor]]:
    """Return the parts of a result with its history, and how its gradient is taken apart."""
    if not is_differentiable(parts_of(tensor)):
        raise RunEagerly(f"`{name}`, a `{type(tensor).__qualname__}`, has parts whose gradients are not compiled")
    detached = tensor.detach()
    coerce = getattr(detached, "__coerce_tangent_metadata__", None)
    tangent = spec_of(detached if coerce is None else coerce(), name)
    with torch.enable_grad():  # which the function may have left
        return tangent, Unwrap.apply(tensor, Gradient(name, tangent))  # type: ignore[no-untyped-call]


def apart_of(part: Tensor) -> Tensor:
    """Return what stands in a trace for the same value in other memory."""
    return internals.to_functional(internals.from_functional(part))


def watch(results: Any, wrappers: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> None:
    """Let a backward see which wrappers were written since, by the versions of the parts that hold the same values.

    A write to a wrapper does not move the versions of its parts, which the compiled function keeps for its backward.
    """
    nodes = {each.grad_fn for each in results if isinstance(each, Tensor) and each.grad_fn is not None}
    seen = [(weakref.ref(each), internals.version_of(each), beside) for each, beside in wrappers] if nodes else []

    def look(_: Any) -> None:
        for reference, version, beside in seen:
            wrapper = reference()
            if wrapper is not None and internals.version_of(wrapper) != version:
                for part in (*parts_of(wrapper), *beside):
                    torch.autograd.graph.increment_version(part)

    for node in nodes:
        node.register_prehook(look)


class Anchor(torch.autograd.Function):
    """From a tensor to plain ones that stand for the parts of its gradient, without memory for their elements."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Gradient, *anchors: tuple[torch.dtype, Sequence[int]]) -> Any:
        """Make them."""
        ctx.set_materialize_grads(False)
        ctx.gradient, ctx.count = gradient, len(anchors)
        return tuple([torch.empty((), dtype=dtype, device=tensor.device).expand(size) for dtype, size in anchors])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        """Put the gradient together."""
        return (_whole(ctx.gradient, gradients), *[None] * (1 + ctx.count))


def _whole(gradient: Gradient, parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    if given and len(given) != len(parts):
        raise GraphInvariantError(f"a gradient of `{gradient.name}` has some of its parts only")
    if any(internals.is_wrapper(part) for part in given):
        raise SubclassError(
            f"the gradient of a plain output is a `{type(given[0]).__qualname__}`",
            why=f"the backward, which gives `{gradient.name}` a gradient of its own, was compiled for plain ones",
            suggestion="call the original function",
        )
    if gradient.spec is None or not given:
        return given[0] if given else None
    found: Tensor = put_together(gradient.spec, given)
    return found
