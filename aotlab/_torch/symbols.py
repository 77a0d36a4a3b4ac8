"""Symbolic sizes: torch's shape environment, which knows what a trace assumed of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import LocalSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

#: How torch writes a size, a stride or an offset of the input ``t3`` in a guard.
_PART = re.compile(r"L\['t(\d+)'\]\.(size|stride|storage_offset)\(\)(?:\[(\d+)\])?")


class Sizes:
    """The sizes that vary in one trace: symbols in its fake tensors, and what the trace assumed of them."""

    def __init__(self) -> None:
        # what hangs on values is no size: such programs run eagerly
        self.env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self._inputs: list[tuple[int, FakeTensor]] = []
        self._told = 0

    def enter(self, mode: FakeTensorMode, position: int, real: Tensor, dims: Collection[int]) -> FakeTensor:
        """Make the fake of the flat input ``position``, whose sizes ``dims`` vary."""
        kinds = [DimDynamic.DYNAMIC if d in dims else DimDynamic.STATIC for d in range(real.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        fake = mode.from_tensor(real.detach(), source=LocalSource(f"t{position}"), symbolic_context=context)
        sizes = [_expression(size) for size in fake.shape if is_symbolic(size)]
        for step in (fake.storage_offset(), *fake.stride()):
            if is_symbolic(step) and _expression(step).is_symbol and _expression(step) not in sizes:
                int(step)  # it does not follow from sizes: as it is in this call
        self._inputs.append((position, fake))
        return fake

    def symbols(self) -> list[tuple[Any, str, int, int]]:
        """Return each symbol with its name, and the flat input and dimension that it is the size of."""
        found: dict[Any, tuple[Any, str, int, int]] = {}
        for position, fake in self._inputs:
            for dim, size in enumerate(fake.shape):
                if is_symbolic(size) and (symbol := _expression(size)).is_symbol:
                    found.setdefault(symbol, (size, str(symbol), position, dim))
        return list(found.values())

    def guards(self, name: Callable[[int, str, int | None], str]) -> list[str]:
        """Write each thing that was assumed so far as a Python expression.

        ``name`` gives the expression of a ``"size"``, ``"stride"`` or ``"storage_offset"`` of a flat input.
        """
        self._told = len(self.env.guards)
        fakes = [fake for _, fake in self._inputs]
        texts = self.env.produce_guards(fakes, [LocalSource(f"t{n}") for n in range(len(fakes))], ignore_static=True)

        def named(found: re.Match[str]) -> str:
            return name(self._inputs[int(found[1])][0], found[2], None if found[3] is None else int(found[3]))

        return [_PART.sub(named, text) for text in texts]

    def assumed_since(self, names: Sequence[str]) -> Callable[..., bool] | None:
        """Make a check, of the symbols by these names, of what was assumed since `guards`; None if nothing was."""
        expressions = (self.env.replace(guard.expr) for guard in self.env.guards[self._told :])
        later = [f"({PythonPrinter().doprint(expression)})" for expression in expressions]
        made: Callable[..., bool] | None = eval(f"lambda {', '.join(names)}: {' and '.join(later)}") if later else None
        return made


def _expression(value: Any) -> Any:
    return value.node.expr


def is_symbolic(value: Any) -> bool:
    """Tell whether a number is symbolic, or one of the sizes and strides of a tensor, or in a `torch.Size` or slice."""
    if isinstance(value, Tensor):
        return any(map(is_symbolic, (*value.shape, *value.stride(), value.storage_offset())))
    if isinstance(value, slice):
        return any(map(is_symbolic, (value.start, value.stop, value.step)))
    if isinstance(value, torch.Size):
        return any(map(is_symbolic, value))
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def fixed(sizes: Sequence[Any]) -> tuple[int | None, ...]:
    """Return sizes or strides with None for those that may be any."""
    return tuple([n if type(n) is int else int(n.node.expr) if n.node.expr.is_number else None for n in sizes])


def traced(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes or strides as they were in the traced call."""
    return tuple([n if type(n) is int else n.node.hint for n in sizes])


def sizes_of_others(values: Sequence[Any]) -> dict[int, tuple[int, int]]:
    """Say which symbolic numbers among Dynamo's placeholders are sizes of tensors among them: of which, and where."""
    dims: dict[Any, tuple[int, int]] = {}
    for position, value in enumerate(values):
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if is_symbolic(size):
                dims.setdefault(_expression(size), (position, dim))
    numbers = ((n, value.node.expr) for n, value in enumerate(values) if isinstance(value, torch.SymInt))
    return {n: dims[expr] for n, expr in numbers if expr in dims}


def varying_dims(values: Sequence[Any]) -> dict[int, set[int]]:
    """Say which dimensions of the tensors among Dynamo's placeholders are symbolic."""
    shapes = ((n, value.shape) for n, value in enumerate(values) if isinstance(value, Tensor))
    found = {n: {dim for dim, size in enumerate(shape) if is_symbolic(size)} for n, shape in shapes}
    return {n: dims for n, dims in found.items() if dims}


def size_text(value: Any) -> str:
    """Write symbolic numbers, or what they are nested in, as Python."""
    if isinstance(value, slice):
        return f"slice({size_text(value.start)}, {size_text(value.stop)}, {size_text(value.step)})"
    if isinstance(value, torch.Size):
        return f"torch.Size({size_text(tuple(value))})"
    if isinstance(value, (list, tuple)):
        inner = "".join(f"{size_text(item)}, " for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return str(PythonPrinter().doprint(value.node.expr)) if is_symbolic(value) else repr(value)


def sizes_function(values: Any, names: Sequence[str]) -> Callable[..., Any]:
    """Make the function that computes nested symbolic numbers from the symbols of these names."""
    made: Callable[..., Any] = eval(f"lambda {', '.join(names)}: {size_text(values)}")
    return made


class _Written(PythonReferenceAnalysis):
    """How symbolic numbers are computed in a graph."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        """Divide without asking how large the numbers are."""
        return a / b


def write_size(value: Any, symbols: Mapping[Any, fx.Node]) -> Any:
    """Write what computes a symbolic number into the graph of its ``symbols``; return the node, or the number."""
    expr = value.node.expr
    if expr.is_number:
        return type(value.node.hint)(expr)
    made = sympy_interp(_Written, {symbol: fx.Proxy(node) for symbol, node in symbols.items()}, expr)
    return made.node
