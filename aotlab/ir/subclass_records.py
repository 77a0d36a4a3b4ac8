"""Descriptions of wrapper subclasses: how each is unwrapped into parts, and how results are wrapped.

    x = TwoTensor(a, b)            SubclassSpec(type=TwoTensor, parts=(("a", 0), ("b", 1)), …)

In this file, a *wrapper* is a tensor whose type is a wrapper subclass. Upstream's ``SubclassCreationMeta`` is our
`SubclassSpec`, its ``PlainTensorMeta`` is the number of a part, and its ``MemoryFormatMeta`` is `Layout`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from aotlab.ir.specs import TensorSpec


@dataclass(frozen=True, slots=True)
class SizeOfPart:
    """A size or stride that equals that of part ``part`` in dimension ``dim`` (-1: the part's number of elements)."""

    part: int
    dim: int


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """An attribute that is not a tensor and stays the same object, such as a `DTensor`'s mesh (``OpaqueMeta``)."""

    value: Any = field(repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes and strides of a wrapper. Each is a number, or is read from a part at each call."""

    size: tuple[int | SizeOfPart, ...]
    stride: tuple[int | SizeOfPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubclassSpec:
    """How a wrapper is unwrapped, and wrapped again.

    ``parts`` are the attributes that ``__tensor_flatten__`` names, in order. An attribute that is a plain tensor is
    represented by its number among all plain parts. An inner wrapper is represented by its own spec, and an object that
    is not a tensor by `Opaque`. ``context`` is the second result of ``__tensor_flatten__``.
    """

    type: type
    dtype: torch.dtype
    parts: tuple[tuple[str, int | SubclassSpec | Opaque], ...]
    context: Any
    layout: Layout

    def paths(self, name: str) -> Iterator[str]:
        """Yield the names of the plain parts of wrapper ``name``, in the order of their numbers: ``x.a``, ``x.b``."""
        for attribute, part in self.parts:
            path = f"{name}.{attribute}"
            if isinstance(part, SubclassSpec):
                yield from part.paths(path)
            elif isinstance(part, int):
                yield path

    @property
    def count(self) -> int:
        """The number of plain parts, including the plain parts of inner wrappers."""
        return sum(1 for _ in self.paths(""))

    def __str__(self) -> str:
        inner = (f"{n}: {part}" if isinstance(part, SubclassSpec) else n for n, part in self.parts)
        context = "" if self.context is None else f" with {self.context!r:.200}"
        return f"{self.type.__qualname__}({', '.join(inner)}){context}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchoredGradient:
    """The description of an argument's gradient, if the gradient has other parts than the argument.

    For example, the gradient of a quantized weight may be a plain tensor (then ``spec`` is None). For such an argument
    the compiled function also takes *anchors*: tensors without memory, one for each part of the gradient. The backward
    returns the gradients of the anchors, and the autograd node that made the anchors builds the argument's gradient
    from these gradients. ``anchors`` are the dtype and the sizes of each anchor. If such a size is a `SizeOfPart`, its
    ``part`` is an index that counts the argument's own parts first, then the lifted inputs and the flat arguments.
    """

    spec: SubclassSpec | None
    anchors: tuple[tuple[torch.dtype, tuple[int | SizeOfPart, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubclassInput:
    """An argument, parameter or buffer that is a wrapper. If ``spec`` is None, only its gradient is a wrapper.

    ``position`` is its number among the values of a call: the lifted inputs, then the flat arguments. ``same_as`` is
    the number of the first input that is the same tensor. ``gradient`` is ``"parts"`` if the gradient has the same
    parts as the input, and None if the input gets no gradient. ``is_copied`` is true if the function writes the input
    and autograd sees the write. Then the trace writes a copy of the input, and the epilogue writes the input itself.
    """

    name: str
    kind: str
    position: int
    spec: SubclassSpec | None
    same_as: int
    requires_grad: bool
    is_leaf: bool
    gradient: Literal["parts"] | AnchoredGradient | None
    is_copied: bool

    @property
    def paths(self) -> list[str]:
        """The names of the parts, or the name of the input itself if it is a plain tensor."""
        return [self.name] if self.spec is None else list(self.spec.paths(self.name))

    @property
    def anchors(self) -> list[str]:
        """The names of the anchors of the input's gradient (see `AnchoredGradient`). Most inputs have no anchors."""
        if not isinstance(self.gradient, AnchoredGradient):
            return []
        name = f"{self.name}.grad"
        return [name] if self.gradient.spec is None else list(self.gradient.spec.paths(name))

    @property
    def counted(self) -> list[int]:
        """The positions of the arguments whose number of elements is a size of an anchor of this input."""
        sizes = self.gradient.anchors if isinstance(self.gradient, AnchoredGradient) else ()
        part_sizes = (n for _, size in sizes for n in size if isinstance(n, SizeOfPart) and n.dim < 0)
        return [n.part - len(self.paths) for n in part_sizes]

    @property
    def fact(self) -> str:
        """The entry's guards on this input as text, without the guards on its parts."""
        layout = None if self.spec is None else self.spec.layout
        fixed = [n for n in (() if layout is None else layout.size + layout.stride) if isinstance(n, int)]
        grad = ", requires grad" + (" and is a leaf" if self.is_leaf else "") if self.requires_grad else ""
        return f"{self.spec or 'a tensor'}{f' of sizes {fixed}' if fixed else ''}{grad}"


#: The kinds of outputs: a plain value; a new wrapper; input ``of`` itself, a view of it, or its detached alias; a view
#: of the new wrapper that is output ``of``; the same object as output ``of``. (``of`` is `SubclassOutput.of`.)
OutputKind = Literal["plain", "new", "input", "view of input", "detached input", "view of output", "same"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubclassOutput:
    """One output of the function, or another result of an entry: the base of a view, or the new value of an input.

    ``first`` is the position of the output's first part among the results of the compiled function. If ``spec`` is
    None, the output is a plain tensor. ``of`` is the index of the input or output that ``kind`` refers to. ``tangent``
    describes the parts of the output's gradient. ``is_rewrapped`` is true if other results are computed from this
    wrapper. Their gradients must flow through the wrapper, so it is unwrapped and wrapped again.
    """

    kind: OutputKind
    first: int = 0
    of: int = 0
    spec: SubclassSpec | None = None
    tangent: SubclassSpec | None = None
    requires_grad: bool = False
    is_rewrapped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SubclassWrite:
    """The writes to one input, which increase its version counter by ``versions``.

    ``input`` is the index of the input. The epilogue copies ``value`` into the input. ``value`` is None if the compiled
    function itself wrote the input's parts. ``history`` is true if the new value has an autograd history. Then the
    epilogue copies the value in grad mode.
    """

    input: int
    versions: int
    value: SubclassOutput | None = None
    history: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SubclassRecord:
    """The wrappers of one compiled entry: the inputs that it unwraps, and the outputs that it wraps.

    ``source`` is the Python code of the generated function that does both around the compiled function (see
    `aotlab.subclasses.around`). ``results`` has the name and the spec of each output. ``extra_bases`` are wrappers that
    are not outputs, but of which outputs are views.
    """

    inputs: tuple[SubclassInput, ...]
    outputs: tuple[SubclassOutput, ...]
    results: tuple[tuple[str, TensorSpec | None], ...]
    extra_bases: tuple[SubclassOutput, ...]
    writes: tuple[SubclassWrite, ...]
    source: str
