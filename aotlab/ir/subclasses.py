"""What is known of tensors that wrap others: how each is taken apart, and how results are put together.

    x = TwoTensor(a, b)            SubclassSpec(type=TwoTensor, parts=(("a", 0), ("b", 1)), …)

The counterparts of upstream's ``SubclassCreationMeta``, ``PlainTensorMeta`` and ``MemoryFormatMeta`` are
`SubclassSpec`, the number of a part, and `Layout`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from aotlab.ir.specs import TensorSpec


@dataclass(frozen=True, slots=True)
class SizeOfPart:
    """A size, or a stride, that is the one of part ``part`` in dimension ``dim``; -1: its number of elements."""

    part: int
    dim: int


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """An attribute that is no tensor, and the same object at each call, as the mesh of a `DTensor` (``OpaqueMeta``)."""

    value: Any = field(repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes and strides of a wrapper: numbers, or those of its parts."""

    size: tuple[int | SizeOfPart, ...]
    stride: tuple[int | SizeOfPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubclassSpec:
    """How a wrapper is taken apart, and put together again.

    ``parts`` are its attributes with the tensors: the number of a plain one among all that it consists of, or the spec
    of another wrapper; or the `Opaque` one, an object of torch's. ``context`` is what ``__tensor_flatten__`` returns
    besides the names.
    """

    type: type
    dtype: torch.dtype
    parts: tuple[tuple[str, int | SubclassSpec | Opaque], ...]
    context: Any
    layout: Layout

    def paths(self, name: str) -> Iterator[str]:
        """Name the plain tensors, in the order of their numbers: ``x.a``, ``x.b``."""
        for attribute, part in self.parts:
            path = f"{name}.{attribute}"
            if isinstance(part, SubclassSpec):
                yield from part.paths(path)
            elif isinstance(part, int):
                yield path

    @property
    def count(self) -> int:
        """How many plain tensors it consists of."""
        return sum(1 for _ in self.paths(""))

    def __str__(self) -> str:
        inner = (f"{n}: {part}" if isinstance(part, SubclassSpec) else n for n, part in self.parts)
        context = "" if self.context is None else f" with {self.context!r:.200}"
        return f"{self.type.__qualname__}({', '.join(inner)}){context}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchoredGradient:
    """The gradient of an argument whose parts are not the argument's: a plain tensor, or what ``spec`` says.

    ``anchors`` have the dtype and the sizes of each part of it, where all arguments count as parts behind its own.
    """

    spec: SubclassSpec | None
    anchors: tuple[tuple[torch.dtype, tuple[int | SizeOfPart, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubclassInput:
    """An argument, parameter or buffer that is a wrapper; or whose gradient is one, without a ``spec``.

    ``position`` is its place among what is lifted and the flat arguments, ``same_as`` the number of the first input
    that is the same tensor. ``hidden``: the function writes it where autograd sees it, and it is written at the end.
    """

    name: str
    kind: str
    position: int
    spec: SubclassSpec | None
    same_as: int
    requires_grad: bool
    is_leaf: bool
    gradient: Literal["parts"] | AnchoredGradient | None
    hidden: bool

    @property
    def paths(self) -> list[str]:
        """Name its parts."""
        return [self.name] if self.spec is None else list(self.spec.paths(self.name))

    @property
    def anchors(self) -> list[str]:
        """Name its anchors."""
        if not isinstance(self.gradient, AnchoredGradient):
            return []
        name = f"{self.name}.grad"
        return [name] if self.gradient.spec is None else list(self.gradient.spec.paths(name))

    @property
    def counted(self) -> list[int]:
        """Return the positions of the arguments whose elements are counted for its anchors."""
        sizes = self.gradient.anchors if isinstance(self.gradient, AnchoredGradient) else ()
        found = (n for _, size in sizes for n in size if isinstance(n, SizeOfPart) and n.dim < 0)
        return [n.part - len(self.paths) for n in found]

    @property
    def fact(self) -> str:
        """What the entry assumes of it besides its parts, as text."""
        layout = None if self.spec is None else self.spec.layout
        fixed = [n for n in (() if layout is None else layout.size + layout.stride) if isinstance(n, int)]
        grad = ", requires grad" + (" and is a leaf" if self.is_leaf else "") if self.requires_grad else ""
        return f"{self.spec or 'a tensor'}{f' of sizes {fixed}' if fixed else ''}{grad}"


#: What an output is: a plain value; a new wrapper; input ``of`` itself, a view of it, or it detached; a view of the
#: new wrapper ``of``; the same as output ``of``.
OutputKind = Literal["plain", "new", "input", "view of input", "detached input", "view of output", "same"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubclassOutput:
    """One output of the function, or what is returned besides: bases of views, and the new values of inputs.

    ``first`` is where its tensors begin among what the compiled function returns; one without a ``spec`` is plain.
    ``tangent`` says how its gradient is taken apart; one that ``passes`` is in the way from others to their gradients.
    """

    kind: OutputKind
    first: int = 0
    of: int = 0
    spec: SubclassSpec | None = None
    tangent: SubclassSpec | None = None
    requires_grad: bool = False
    passes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SubclassWrite:
    """An input that is written: it gets its value from ``value``, or already has it, and ``versions`` count.

    ``history``: the value has one.
    """

    input: int
    versions: int
    value: SubclassOutput | None = None
    history: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SubclassRecord:
    """What is taken apart, and put together by the lines of ``source``; ``results`` name and describe the outputs."""

    inputs: tuple[SubclassInput, ...]
    outputs: tuple[SubclassOutput, ...]
    results: tuple[tuple[str, TensorSpec | None], ...]
    besides: tuple[SubclassOutput, ...]
    writes: tuple[SubclassWrite, ...]
    source: str
