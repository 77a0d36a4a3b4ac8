"""Symbolic sizes and numbers: torch's shape environment, which knows what a trace assumed of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import LocalSource
from torch._guards import SLoc
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.sym_node import METHOD_TO_OPERATOR, SymNode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from aotlab._torch.callers_symbols import OF_SIZES, noting_guards, of_hints
from aotlab._torch.replaced import replaced

#: How torch writes the input that was entered as number 3 in a guard, or a size, a stride or the offset of it.
_PART = re.compile(r"L\['t(\d+)'\](?:\.(size|stride|storage_offset)\(\)(?:\[(\d+)\])?)?")
#: How steps of arithmetic are written in Python.
_STEPS = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "mod": "({} % {})", "neg": "(-{})", "abs": "abs({})",
    "float_truediv": "({} / {})", "int_truediv": "({} / {})", "float_pow": "({} ** {})", "pow_by_natural": "({} ** {})",
    "int_floordiv": "({} // {})", "sym_float": "float({})", "sym_sqrt": "math.sqrt({})", "floor": "math.floor({})",
    "ceil": "math.ceil({})", "trunc": "math.trunc({})",
    "sym_max": "torch.sym_max({}, {})", "sym_min": "torch.sym_min({}, {})",
}  # fmt: skip

#: Where more sizes vary, those that are equal in the traced call share a symbol: each symbol has its price.
MOST_SYMBOLS = 16

#: What makes a node of a plain number, as for a product that C++ code begins with one.
_WRAPS = ("wrap_int", "wrap_float")

#: What torch computes of the sizes of each tensor anew.
_OF_SIZES = ("wrap_int", "add", "sub", "mul", "mod", "int_floordiv", "eq", "ne", "ge", "gt", "le", "lt", "sym_max")


class _Number(SymNode):
    """A symbolic number that remembers how floats were computed: sympy would compute them in another order."""

    steps: tuple[str, tuple[Any, ...]] | None = None


def _remembering(name: str) -> Callable[..., Any]:
    plain = getattr(SymNode, name)

    def method(self: _Number, *others: Any) -> Any:
        result = plain(self, *others)
        if type(result) is SymNode and result.pytype is not bool:
            result.__class__ = _Number
            operands = (self, *others)
            if name in _WRAPS:
                return result
            if result.pytype is float or any(each.pytype is float or steps_of(each) for each in operands):
                if name not in _STEPS:
                    raise RuntimeError(f"`{name}` is computed of a number that varies")
                result.__dict__["steps"] = (name, operands)
        return result

    def of_sizes(self: _Number, other: Any) -> Any:
        if name != "wrap_int" and (self.pytype is not int or other.pytype is not int):
            return method(self, other)
        env: Any = self.shape_env
        known, key = env.known, other if name == "wrap_int" else (name, self._expr, other._expr)
        if key in known:
            return known[key]
        result = method(self, other)
        if not steps_of(result):
            known[key] = result
        return result

    return of_sizes if name in _OF_SIZES else method


for _name in (*METHOD_TO_OPERATOR, *_WRAPS):
    if _name in _OF_SIZES or _name not in ("and", "or", "xor", "sym_not", "is_integer"):
        setattr(_Number, _name, _remembering(_name))


def steps_of(node: Any) -> tuple[str, tuple[Any, ...]] | None:
    return getattr(node, "steps", None)


class _Environment(ShapeEnv):
    """Torch's, of numbers that remember, with what the user calls symbols, and the places that assumed something.

    ``known`` has what was computed of sizes, which torch computes anew for each tensor.
    """

    known: dict[Any, Any]
    shown: dict[Any, str]
    places: list[Any]
    place: Callable[[], Any] = staticmethod(lambda: None)  # finds the one that runs

    def _get_sloc(self, framework_loc: str | None = None) -> SLoc:
        """Write the number of the place that runs; a default has none."""
        self.places.append(None if framework_loc else self.place())
        return SLoc(str(len(self.places) - 1), None)

    def create_symintnode(self, *args: Any, **kwargs: Any) -> Any:
        """Make the number of a symbol."""
        made = super().create_symintnode(*args, **kwargs)
        if isinstance(made, torch.SymInt):
            made.node.__class__ = _Number
        return made


class Sizes:
    """The sizes and numbers that vary in one trace: symbols, and what the trace assumed of them."""

    def __init__(self, names: Sequence[str], count: int) -> None:
        self._kind = DimDynamic.DUCK if count > MOST_SYMBOLS else DimDynamic.DYNAMIC
        # what hangs on values is no size: such programs run eagerly
        self.env = _Environment(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.env.known, self.env.places, self.env.shown, self._names = {}, [], {}, names
        #: The numbers among the flat inputs, by position.
        self.numbers: dict[int, Any] = {}
        self._inputs: list[tuple[int, Any]] = []
        self._varying: list[tuple[int, int, Any]] = []
        self._told = -1
        self._texts: list[str] = []

    def enter(self, mode: FakeTensorMode, position: int, real: Tensor, dims: Collection[int]) -> FakeTensor:
        """Make the fake of the flat input ``position``, whose sizes ``dims`` vary."""
        kinds = [self._kind if d in dims else DimDynamic.STATIC for d in range(real.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        fake = mode.from_tensor(of_hints(real), source=LocalSource(f"t{len(self._inputs)}"), symbolic_context=context)
        sizes = [expression_of(size) for size in fake.shape if is_symbolic(size)]
        for step in (fake.storage_offset(), *fake.stride()):
            if is_symbolic(step) and expression_of(step).is_symbol and expression_of(step) not in sizes:
                int(step)  # it does not follow from sizes: as it is in this call
        self._inputs.append((position, fake))
        self._varying += [(position, dim, fake.shape[dim]) for dim in dims if is_symbolic(fake.shape[dim])]
        name = self._names[position]
        self.env.shown |= {expression_of(s): f"{name}.size({d})" for d, s in enumerate(fake.shape) if is_symbolic(s)}
        return fake

    def enter_number(self, position: int, value: float) -> None:
        """Make the symbol of the flat input ``position``, an int or a float."""
        source = LocalSource(f"t{len(self._inputs)}")
        symbol = self.env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        make = self.env.create_symintnode if type(value) is int else self.env.create_symfloatnode
        number: Any = make(symbol, hint=value, source=source)
        number.node.__class__ = _Number
        self.numbers[position] = number
        self._inputs.append((position, number))
        self.env.shown[expression_of(number)] = self._names[position]

    def symbols(self) -> list[tuple[Any, str, int, int | None]]:
        """Return each symbol with its name, and the flat input that it is, or of which dimension it is the size."""
        found: dict[Any, tuple[Any, str, int, int | None]] = {}
        for position, value in self._inputs:
            for dim, size in enumerate(value.shape) if isinstance(value, Tensor) else [(None, value)]:
                if is_symbolic(size) and (symbol := expression_of(size)).is_symbol:
                    found.setdefault(symbol, (size, str(symbol), position, dim))
        return list(found.values())

    def guards(self, name: Callable[[int, str, int | None], str]) -> list[tuple[str, Any]]:
        """Write each thing that was assumed so far as a Python expression, with the place of the user's that did so.

        ``name`` gives the expression of a flat input's ``"size"``, ``"stride"`` or ``"storage_offset"``, or of itself:
        its ``"value"``.
        """
        fakes = [fake for _, fake in self._inputs]
        sources = [LocalSource(f"t{n}") for n, _ in enumerate(self._inputs)]
        if self._told != len(self.env.guards):  # each time takes milliseconds
            self._told = len(self.env.guards)
            written = self.env.produce_guards_verbose(fakes, sources, ignore_static=True, langs=("verbose_python",))
            self._texts = written[0].exprs
        made = [*self._texts]

        def named(found: re.Match[str]) -> str:
            what, dim = found[2] or "value", None if found[3] is None else int(found[3])
            return name(self._inputs[int(found[1])][0], what, dim)

        equal = self.env.replacements_slocs
        for position, dim, size in self._varying:
            if expression_of(size).is_number:
                made.append(f"{name(position, 'size', dim)} == {int(size)}  # {equal.get(size.node._expr)}")
        made.sort(key=lambda text: bool(re.search(r"[/%]|\*\*", text)))  # what something is divided by is not 0
        found = []
        for text, _, where in (each.partition("  # ") for each in made):
            if where.startswith("(unknown"):  # one that is equal to another, or to a number
                where = "".join(str(equal[s]) for s in equal if self.env.var_to_sources[s][0].name in text)
            numbers = [] if "stride" in text else re.findall(r"\((\d+)\)", where)
            place = self.env.places[int(numbers[-1])] if numbers else None
            found.append((_PART.sub(named, f"({text})" if " or " in text else text), place))
        return found

    def assumed_since(self, names: Sequence[str]) -> Callable[..., bool] | None:
        """Make a check, of the symbols by these names, of what was assumed since `guards`; None if nothing was."""
        later = [f"({PythonPrinter().doprint(self.env.replace(each.expr))})" for each in self.env.guards[self._told :]]
        fixed = ((str(symbol), self.env.replace(symbol)) for symbol in self.env.replacements)
        later += [f"{name} == {PythonPrinter().doprint(expression)}" for name, expression in fixed if name in names]
        text = f"lambda {', '.join(names)}: {' and '.join(later)}"
        made: Callable[..., bool] | None = eval(text, OF_SIZES) if later else None
        return made


def is_symbolic(value: Any) -> bool:
    """Tell whether a number is symbolic, or one of the sizes and strides of a tensor, or in a `torch.Size` or slice."""
    if isinstance(value, Tensor):
        return any(map(is_symbolic, (*value.shape, *value.stride(), value.storage_offset())))
    if isinstance(value, slice):
        return any(map(is_symbolic, (value.start, value.stop, value.step)))
    if isinstance(value, torch.Size):
        return any(map(is_symbolic, value))
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def expression_of(value: Any) -> Any:
    """Return a number, or what a symbolic one is computed by, which can be compared without a guard."""
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat)) else value


def known_of(fake: Any) -> dict[Any, Any]:
    """Return what its trace remembers of tensors with sizes that vary."""
    return getattr(fake.fake_mode.shape_env, "known", {})


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
                dims.setdefault(expression_of(size), (position, dim))
    numbers = ((n, value.node.expr) for n, value in enumerate(values) if isinstance(value, torch.SymInt))
    return {n: dims[expr] for n, expr in numbers if expr in dims}


def marked_dims(tensor: Tensor) -> tuple[set[int], set[int]]:
    """Return the dimensions that the user marked as dynamic, or perhaps so, and those marked as static."""
    marks = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_static_indices")
    dynamic, weak, static = (set(getattr(tensor, mark, ())) for mark in marks)
    return dynamic | weak, static


def symbolic_dims(value: Any) -> set[int]:
    """Say which dimensions of a tensor are symbolic."""
    return {dim for dim, size in enumerate(value.shape) if is_symbolic(size)} if isinstance(value, Tensor) else set()


def shown_size(value: Any) -> str:
    """Write a symbolic number as the user would."""
    env, expression = value.node.shape_env, expression_of(value)
    known, shown = getattr(env, "known", {}), getattr(env, "shown", {})
    if expression not in shown and ("shown", expression) not in known:
        names = {s: type(s)(name, integer=True) for s, name in shown.items()}
        known["shown", expression] = str(expression.xreplace(names))
    return str(shown.get(expression) or known["shown", expression])


def size_text(value: Any) -> str:
    """Write symbolic numbers, or what they are nested in, as Python."""
    if isinstance(value, slice):
        return f"slice({size_text(value.start)}, {size_text(value.stop)}, {size_text(value.step)})"
    if isinstance(value, torch.Size):
        return f"torch.Size({size_text(tuple(value))})"
    if isinstance(value, (list, tuple)):
        inner = "".join(f"{size_text(item)}, " for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return _text(value.node) if is_symbolic(value) else repr(value)


def _text(node: SymNode) -> str:
    if (steps := steps_of(node)) is not None:
        return _STEPS[steps[0]].format(*map(_text, steps[1]))
    return repr(node.hint) if node.expr.is_number else str(PythonPrinter().doprint(node.expr))


def sizes_function(values: Any, names: Sequence[str]) -> Callable[..., Any]:
    """Make the function that computes nested symbolic numbers from the symbols of these names."""
    made: Callable[..., Any] = eval(f"lambda {', '.join(names)}: {size_text(values)}", OF_SIZES)
    return made


class _Written(PythonReferenceAnalysis):
    """How symbolic numbers are computed in a graph."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        """Divide without asking how large the numbers are."""
        return a / b


def write_size(value: Any, symbols: Mapping[Any, fx.Node]) -> Any:
    """Write what computes a symbolic number into the graph of its ``symbols``; return the node, or the number."""
    return _write(value.node, symbols)


def _write(node: SymNode, symbols: Mapping[Any, fx.Node]) -> Any:
    if (steps := steps_of(node)) is not None:
        operation: Any = METHOD_TO_OPERATOR[steps[0]]
        operands = tuple([_write(each, symbols) for each in steps[1]])
        return next(iter(symbols.values())).graph.call_function(operation, operands)
    if node.expr.is_number:
        return node.hint
    tracer = fx.proxy.GraphAppendingTracer(next(iter(symbols.values())).graph)
    proxies = {symbol: fx.Proxy(each, tracer) for symbol, each in symbols.items()}
    return sympy_interp(_Written, proxies, node.expr).node


_TORCH = str(Path(torch.__file__).parent)


@contextmanager
def symbols_as_numbers(sizes: Sizes, place: Callable[[], Any]) -> Iterator[None]:
    """Let symbolic numbers be an `int` or a `float`, for code outside of torch that asks with `isinstance`.

    Such code gets the number of this call when it writes one as text, and a `bool` when it compares one. ``place``
    finds the place of what runs.
    """

    def foreign() -> bool:
        return not sys._getframe(2).f_code.co_filename.startswith(_TORCH)

    with ExitStack() as stack:
        stack.enter_context(noting_guards(sizes.env))
        stack.enter_context(replaced(sizes.env, "place", place))
        for kind, plain in ((torch.SymInt, int), (torch.SymFloat, float)):

            def look(self: Any, name: str, plain: type = plain) -> Any:
                return plain if name == "__class__" and foreign() else object.__getattribute__(self, name)

            def text(self: Any, plain: type = plain, before: Callable[..., str] = kind.__repr__) -> str:
                return repr(plain(self)) if foreign() else before(self)

            for name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
                comparison = getattr(kind, name)

                def compare(self: Any, other: Any, before: Callable[..., Any] = comparison) -> Any:
                    result = before(self, other)
                    return bool(result) if isinstance(result, torch.SymBool) and foreign() else result

                stack.enter_context(replaced(kind, name, compare))
            stack.enter_context(replaced(kind, "__getattribute__", look))
            stack.enter_context(replaced(kind, "__repr__", text))
        yield
