"""Symbolic sizes and numbers, and torch's shape environment, which stores the guards that a trace adds on them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import LocalSource
from torch._guards import SLoc
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.sym_node import METHOD_TO_OPERATOR, SymNode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    compute_unbacked_bindings,
)
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode as GuardOnDataDependentSymNode,
)
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.symbol import SymT, symbol_is_type

from aotlab._torch.callers_symbols import OF_SIZES, noting_guards, of_hints
from aotlab._torch.replaced import replaced

#: The part of a guard's text that torch writes for the input number 3 (``L['t3']``), or for a size, a stride or the
#: storage offset of this input. `Sizes.guards` replaces it.
_PART = re.compile(r"L\['t(\d+)'\](?:\.(size|stride|storage_offset)\(\)(?:\[(\d+)\])?)?")
#: The Python expression of each arithmetic operation on symbolic numbers.
_STEPS = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "mod": "({} % {})", "neg": "(-{})", "abs": "abs({})",
    "float_truediv": "({} / {})", "int_truediv": "({} / {})", "float_pow": "({} ** {})", "pow_by_natural": "({} ** {})",
    "int_floordiv": "({} // {})", "sym_float": "float({})", "sym_sqrt": "math.sqrt({})", "floor": "math.floor({})",
    "ceil": "math.ceil({})", "trunc": "math.trunc({})",
    "sym_max": "torch.sym_max({}, {})", "sym_min": "torch.sym_min({}, {})",
}  # fmt: skip

#: Estimates assume this value of an unbacked symbol.
_ASSUMED = 64

#: Each symbol costs time. If more sizes than this vary, sizes that are equal in the traced call share one symbol.
MOST_SYMBOLS = 16

#: The methods of `SymNode` that make a symbolic number from a plain one. C++ code calls them, for example at the
#: beginning of a product of sizes.
_WRAPS = ("wrap_int", "wrap_float")

#: The operations that torch repeats on the sizes of each tensor. `_Number` caches their results.
_OF_SIZES = ("wrap_int", "add", "sub", "mul", "mod", "int_floordiv", "eq", "ne", "ge", "gt", "le", "lt", "sym_max")


class _Number(SymNode):
    """The node of a symbolic number. If the number was computed from floats, it stores the operation in ``steps``.

    ``steps`` are the name of the operation and its operands. The sympy expression of the number is not enough, because
    sympy may reorder the operations, and then floats would be rounded differently.
    """

    steps: tuple[str, tuple[Any, ...]] | None = None


def _remembering(name: str) -> Callable[..., Any]:
    """Return the method of `_Number` that replaces the `SymNode` method ``name``.

    The new method stores ``steps`` in a result that is computed from floats. If ``name`` is in `_OF_SIZES`, the method
    also caches its results on sizes.
    """
    original = getattr(SymNode, name)

    def method(self: _Number, *others: Any) -> Any:
        result = original(self, *others)
        if type(result) is SymNode and result.pytype is not bool:
            result.__class__ = _Number
            operands = (self, *others)
            if name in _WRAPS:
                return result
            if result.pytype is float or any(each.pytype is float or steps_of(each) for each in operands):
                if name not in _STEPS:
                    raise RuntimeError(f"`{name}` is computed from a number that varies")
                result.__dict__["steps"] = (name, operands)
        return result

    def of_sizes(self: _Number, other: Any) -> Any:
        if name != "wrap_int" and (self.pytype is not int or other.pytype is not int):
            return method(self, other)
        env: Any = self.shape_env
        cache, key = env.known, other if name == "wrap_int" else (name, self._expr, other._expr)
        if key in cache:
            return cache[key]
        result = method(self, other)
        if not steps_of(result):
            cache[key] = result
        return result

    return of_sizes if name in _OF_SIZES else method


for _name in (*METHOD_TO_OPERATOR, *_WRAPS):
    if _name in _OF_SIZES or _name not in ("and", "or", "xor", "sym_not", "is_integer"):
        setattr(_Number, _name, _remembering(_name))


def steps_of(node: Any) -> tuple[str, tuple[Any, ...]] | None:
    """Return the operation and operands of a number that was computed from floats (see `_Number`), or None."""
    return getattr(node, "steps", None)


class _Environment(ShapeEnv):
    """torch's shape environment with a cache, names for symbols, and the user's code that caused each guard.

    ``known`` caches results of operations on sizes, which torch would compute again for each tensor. ``shown`` maps a
    symbol to the user's name for it, such as ``x.size(0)``. ``code_positions`` lists, for each guard, the position in
    the user's code that ran when torch added the guard (`aotlab.guards.user_code.CodePosition`).
    """

    known: dict[Any, Any]
    shown: dict[Any, str]
    code_positions: list[Any]
    #: Returns the position in the user's code that runs now.
    code_position: Callable[[], Any] = staticmethod(lambda: None)
    #: The assertions about unbacked symbols that the trace has not recorded yet (see `Sizes.assertions`).
    asserted: list[Any]
    #: The text of the error if the program asked for a fact about an unbacked symbol that no trace can know.
    asked_in_vain: str = ""

    def _get_sloc(self, framework_loc: str | None = None) -> SLoc:
        """Return the source location that torch stores with a new guard. Its text is an index into ``code_positions``.

        If torch names a location in its own code, the user's program did not cause the guard, and the position is None.
        """
        self.code_positions.append(None if framework_loc else self.code_position())
        return SLoc(str(len(self.code_positions) - 1), None)

    def create_symintnode(self, *args: Any, **kwargs: Any) -> Any:
        """Make the symbolic number of a symbol, with a `_Number` as its node."""
        return _with_number(super().create_symintnode(*args, **kwargs))

    def create_unbacked_symint(self, *args: Any, **kwargs: Any) -> Any:
        """Make an unbacked symbol: an integer that depends on the values of a tensor."""
        return _with_number(super().create_unbacked_symint(*args, **kwargs))

    def create_unbacked_symfloat(self, *args: Any, **kwargs: Any) -> Any:
        """Make an unbacked symbol: a float that depends on the values of a tensor."""
        return _with_number(super().create_unbacked_symfloat(*args, **kwargs))

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate an expression. Keep the error's text if that is impossible, because the program may catch it."""
        try:
            return super().evaluate_expr(*args, **kwargs)
        except GuardOnDataDependentSymNode as error:
            self.asked_in_vain = str(error)
            raise

    def guard_or_defer_runtime_assert(self, *args: Any, **kwargs: Any) -> bool:  # type: ignore[override]  # cached there
        """Guard an expression or, if it has unbacked symbols, note that the graph must assert it."""
        before = {key: len(each) for key, each in self.deferred_runtime_asserts.items()}
        result = super().guard_or_defer_runtime_assert(*args, **kwargs)
        for key, each in self.deferred_runtime_asserts.items():
            self.asserted += each[before.get(key, 0) :]
        return result


def _with_number(value: Any) -> Any:
    if isinstance(value, torch.SymInt | torch.SymFloat):
        value.node.__class__ = _Number
    return value


class Sizes:
    """The sizes and numbers that are symbols in one trace, and the guards of the trace on these symbols.

    ``names`` are the user's names of the flat inputs. ``count`` is how many sizes vary. If ``from_values`` is true, a
    size or a number may depend on the values of tensors. Then it is an *unbacked* symbol.
    """

    def __init__(self, names: Sequence[str], count: int, *, from_values: bool = False) -> None:
        self._kind = DimDynamic.DUCK if count > MOST_SYMBOLS else DimDynamic.DYNAMIC
        self.from_values = from_values
        self.env = _Environment(allow_scalar_outputs=from_values, allow_dynamic_output_shape_ops=from_values)
        self.env.known, self.env.code_positions, self.env.shown, self._names = {}, [], {}, names
        self.env.asserted = []
        #: The symbolic numbers for flat inputs that are an int or a float, by position.
        self.numbers: dict[int, Any] = {}
        self._inputs: list[tuple[int, Any]] = []
        self._varying: list[tuple[int, int, Any]] = []
        self._guards_written = -1
        self._texts: list[str] = []

    def enter(self, mode: FakeTensorMode, position: int, real: Tensor, dims: Collection[int]) -> FakeTensor:
        """Make the fake tensor of the flat input ``position``; the sizes of its dimensions ``dims`` become symbols."""
        kinds = [self._kind if d in dims else DimDynamic.STATIC for d in range(real.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        fake = mode.from_tensor(of_hints(real), source=LocalSource(f"t{len(self._inputs)}"), symbolic_context=context)
        sizes = [expression_of(size) for size in fake.shape if is_symbolic(size)]
        for step in (fake.storage_offset(), *fake.stride()):
            if is_symbolic(step) and expression_of(step).is_symbol and expression_of(step) not in sizes:
                int(step)  # specialize a stride or offset that is a symbol and not a function of the sizes
        self._inputs.append((position, fake))
        self._varying += [(position, dim, fake.shape[dim]) for dim in dims if is_symbolic(fake.shape[dim])]
        name = self._names[position]
        self.env.shown |= {expression_of(s): f"{name}.size({d})" for d, s in enumerate(fake.shape) if is_symbolic(s)}
        return fake

    def enter_number(self, position: int, value: float) -> None:
        """Make the symbol of the flat input ``position``, which is an int or a float."""
        source = LocalSource(f"t{len(self._inputs)}")
        symbol = self.env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        make = self.env.create_symintnode if type(value) is int else self.env.create_symfloatnode
        number: Any = make(symbol, hint=value, source=source)
        number.node.__class__ = _Number
        self.numbers[position] = number
        self._inputs.append((position, number))
        self.env.shown[expression_of(number)] = self._names[position]

    def new_symbols(self, result: Any) -> dict[Any, Any]:
        """Return the unbacked symbols that an op has made for its ``result``. Each is mapped to its path in the result.

        This is the metadata ``unbacked_bindings`` that Inductor reads from the node of the op.
        """
        return compute_unbacked_bindings(self.env, result) or {} if self.env.pending_fresh_unbacked_symbols else {}

    def assertions(self, bound: Collection[Any]) -> list[tuple[Any, str]]:
        """Return the assertions that are not recorded yet and whose unbacked symbols are all in ``bound``.

        Each is a pair of a `torch.SymBool` and a message.
        """
        ready = [each for each in self.env.asserted if unbacked_in(each.expr) <= {*bound}]
        self.env.asserted = [each for each in self.env.asserted if each not in ready]
        return [(torch.SymBool(SymNode(each.expr, self.env, bool, None)), each.msg) for each in ready]

    def symbols(self) -> list[tuple[Any, str, int, int | None]]:
        """Return each symbol as a symbolic number, with its name, the position of a flat input, and a dimension.

        The symbol is the size of this dimension of the input. If the dimension is None, the input is a number, and the
        symbol is this number.
        """
        by_symbol: dict[Any, tuple[Any, str, int, int | None]] = {}
        for position, value in self._inputs:
            for dim, size in enumerate(value.shape) if isinstance(value, Tensor) else [(None, value)]:
                if is_symbolic(size) and (symbol := expression_of(size)).is_symbol:
                    by_symbol.setdefault(symbol, (size, str(symbol), position, dim))
        return list(by_symbol.values())

    def guards(self, name: Callable[[int, str, int | None], str]) -> list[tuple[str, Any]]:
        """Return each guard so far as a Python expression, with the position in the user's code that caused it.

        ``name`` returns the text by which these expressions refer to a fact about an input, for example ``x.size(0)``.
        It takes the position of a flat input, a quantity, and a dimension or None. The quantity is ``"size"``,
        ``"stride"`` or ``"storage_offset"``, or ``"value"`` if the input is a number.
        """
        fakes = [fake for _, fake in self._inputs]
        sources = [LocalSource(f"t{n}") for n, _ in enumerate(self._inputs)]
        if self._guards_written != len(self.env.guards):  # only then, because it takes milliseconds
            self._guards_written = len(self.env.guards)
            produced = self.env.produce_guards_verbose(fakes, sources, ignore_static=True, langs=("verbose_python",))
            self._texts = produced[0].exprs
        texts = [*self._texts]

        def named(match: re.Match[str]) -> str:
            quantity, dim = match[2] or "value", None if match[3] is None else int(match[3])
            return name(self._inputs[int(match[1])][0], quantity, dim)

        equal = self.env.replacements_slocs
        for position, dim, size in self._varying:
            if expression_of(size).is_number:
                texts.append(f"{name(position, 'size', dim)} == {int(size)}  # {equal.get(size.node._expr)}")
        # Expressions with a division come last, because earlier ones check that the divisor is not 0.
        texts.sort(key=lambda text: bool(re.search(r"[/%]|\*\*", text)))
        conditions = []
        for text, _, location in (each.partition("  # ") for each in texts):
            if location.startswith("(unknown"):  # torch has replaced the symbol: find the location of the replacement
                backed = [s for s in equal if s in self.env.var_to_sources]
                location = "".join(str(equal[s]) for s in backed if self.env.var_to_sources[s][0].name in text)
            numbers = [] if "stride" in text else re.findall(r"\((\d+)\)", location)
            code_position = self.env.code_positions[int(numbers[-1])] if numbers else None
            conditions.append((_PART.sub(named, f"({text})" if " or " in text else text), code_position))
        return conditions

    def assumed_since(self, names: Sequence[str]) -> Callable[..., bool] | None:
        """Return a check of the guards that were added since the last call of `guards`. Return None if none was added.

        ``names`` are the names of symbols. The check takes the values of these symbols, in this order.
        """
        conditions = [
            f"({PythonPrinter().doprint(self.env.replace(each.expr))})"
            for each in self.env.guards[self._guards_written :]
        ]
        fixed = ((str(symbol), self.env.replace(symbol)) for symbol in self.env.replacements)
        conditions += [
            f"{name} == {PythonPrinter().doprint(expression)}" for name, expression in fixed if name in names
        ]
        text = f"lambda {', '.join(names)}: {' and '.join(conditions)}"
        check: Callable[..., bool] | None = eval(text, OF_SIZES) if conditions else None
        return check


def is_symbolic(value: Any) -> bool:
    """Tell whether a value is symbolic: a number, or any number in a tensor's metadata, a `torch.Size` or a slice."""
    if isinstance(value, Tensor):
        return any(map(is_symbolic, (*value.shape, *value.stride(), value.storage_offset())))
    if isinstance(value, slice):
        return any(map(is_symbolic, (value.start, value.stop, value.step)))
    if isinstance(value, torch.Size):
        return any(map(is_symbolic, value))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def equate_symbols(fake_mode: FakeTensorMode, symbols: Iterable[Any], others: Iterable[Any]) -> None:
    """Replace each of ``symbols`` by the symbol of ``others`` at the same position, in all sizes and numbers."""
    env: Any = fake_mode.shape_env
    for symbol, other in zip(symbols, others, strict=True):
        env._set_replacement(symbol, other, "both are computed from the same values")


def unbacked_in(expression: Any) -> set[Any]:
    """Return the unbacked symbols that occur in a sympy expression or in a symbolic number."""
    if isinstance(expression, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        expression = expression.node.expr
    kinds = (SymT.UNBACKED_INT, SymT.UNBACKED_FLOAT)
    return {symbol for symbol in getattr(expression, "free_symbols", ()) if symbol_is_type(symbol, kinds)}


def expression_of(value: Any) -> Any:
    """Return the expression of a symbolic number. Return any other value unchanged.

    Unlike symbolic numbers, expressions can be compared without adding a guard.
    """
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def known_of(fake: Any) -> dict[Any, Any]:
    """Return `_Environment.known`, the cache of results on sizes, of the trace to which a fake tensor belongs."""
    return getattr(fake.fake_mode.shape_env, "known", {})


def fixed(sizes: Sequence[Any]) -> tuple[int | None, ...]:
    """Return sizes or strides as a tuple in which None replaces each symbolic one."""
    return tuple([n if type(n) is int else int(n.node.expr) if n.node.expr.is_number else None for n in sizes])


def traced(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes or strides as a tuple in which each symbolic one is replaced by its value in the traced call."""
    return tuple([n if type(n) is int else _traced(n.node) for n in sizes])


def _traced(node: SymNode) -> Any:
    if node.hint is not None:
        return node.hint
    env: Any = node.shape_env
    values = {**env.backed_var_to_val, **dict.fromkeys(unbacked_in(node.expr), _ASSUMED)}
    return node.pytype(node.expr.xreplace(values))


def sizes_of_others(values: Sequence[Any]) -> dict[int, tuple[int, int]]:
    """Find the inputs of a Dynamo graph that are sizes of other inputs. ``values`` are the values of the placeholders.

    The result maps the position of a number to the position of a tensor and one of its dimensions.
    """
    dims: dict[Any, tuple[int, int]] = {}
    for position, value in enumerate(values):
        for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
            if is_symbolic(size):
                dims.setdefault(expression_of(size), (position, dim))
    numbers = ((n, value.node.expr) for n, value in enumerate(values) if isinstance(value, torch.SymInt))
    return {n: dims[expr] for n, expr in numbers if expr in dims}


def marked_dims(tensor: Tensor) -> tuple[set[int], set[int]]:
    """Return the dimensions that the user marked as dynamic (or as perhaps dynamic), and those marked as static."""
    marks = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices", "_dynamo_static_indices")
    dynamic, weak, static = (set(getattr(tensor, mark, ())) for mark in marks)
    return dynamic | weak, static


def symbolic_dims(value: Any) -> set[int]:
    """Return the dimensions of a tensor whose sizes are symbolic."""
    return {dim for dim, size in enumerate(value.shape) if is_symbolic(size)} if isinstance(value, Tensor) else set()


def shown_size(value: Any) -> str:
    """Return a symbolic number as text in which the user's names, for example ``x.size(0)``, replace the symbols."""
    env, expression = value.node.shape_env, expression_of(value)
    cache, names_shown = getattr(env, "known", {}), getattr(env, "shown", {})
    if expression not in names_shown and ("shown", expression) not in cache:
        names = {s: type(s)(name, integer=True) for s, name in names_shown.items()}
        cache["shown", expression] = str(expression.xreplace(names))
    return str(names_shown.get(expression) or cache["shown", expression])


def size_text(value: Any) -> str:
    """Return the Python expression of a number, or of a list, tuple, slice or `torch.Size` of numbers.

    In the expression, a symbol is written as its name, for example ``s0 + 1``.
    """
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
    return repr(_traced(node)) if node.expr.is_number else str(PythonPrinter().doprint(node.expr))


def sizes_function(values: Any, names: Sequence[str]) -> Callable[..., Any]:
    """Make the function that computes ``values``, symbolic numbers in containers, from the values of the symbols.

    ``names`` are the names of the symbols, in the order of the function's parameters.
    """
    function: Callable[..., Any] = eval(f"lambda {', '.join(names)}: {size_text(values)}", OF_SIZES)
    return function


class _Written(PythonReferenceAnalysis):
    """The operations by which `write_size` writes a sympy expression into a graph."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        """Divide two integers with Python's ``/``. The method of the base class would call a sympy function."""
        return a / b


def write_size(value: Any, symbols: Mapping[Any, fx.Node]) -> Any:
    """Add nodes that compute a symbolic number or bool to a graph. Return the last node, or a plain number.

    ``symbols`` maps each symbol to its node in the graph.
    """
    return _write(value.node, symbols)


def _write(node: Any, symbols: Mapping[Any, fx.Node]) -> Any:
    if (steps := steps_of(node)) is not None:
        operation: Any = METHOD_TO_OPERATOR[steps[0]]
        operands = tuple([_write(each, symbols) for each in steps[1]])
        if not any(isinstance(each, fx.Node) for each in operands):
            return operation(*operands)  # the sizes were specialized
        return next(iter(symbols.values())).graph.call_function(operation, operands)
    if node.pytype is bool:
        # The condition of an assertion counts as a known fact about its symbols. With these facts, the condition would
        # become true. So only symbols that the graph does not have are replaced.
        asserted, env = node._expr, node.shape_env
        expression = asserted.xreplace({s: env.replace(s) for s in asserted.free_symbols - {*symbols}})
    elif node.expr.is_number:
        return int(node.expr) if node.hint is None else node.hint
    else:
        expression = node.expr if node.expr.free_symbols <= symbols.keys() else node._expr
    tracer = fx.proxy.GraphAppendingTracer(next(iter(symbols.values())).graph)
    proxies = {symbol: fx.Proxy(each, tracer) for symbol, each in symbols.items()}
    return sympy_interp(_Written, proxies, expression).node


_TORCH = str(Path(torch.__file__).parent)


@contextmanager
def symbols_as_numbers(sizes: Sizes, code_position: Callable[[], Any]) -> Iterator[None]:
    """Make symbolic numbers look like `int` or `float` to code outside of torch, for the length of a block.

    In code outside of torch, ``isinstance(size, int)`` is true, and ``repr(size)`` shows the value that the size has in
    the traced call. A comparison of two sizes returns a `bool`, and therefore adds a guard. ``code_position`` returns
    the position in the user's program that runs now. The shape environment of ``sizes`` stores this position with each
    guard.
    """

    def foreign() -> bool:
        return not sys._getframe(2).f_code.co_filename.startswith(_TORCH)

    with ExitStack() as stack:
        stack.enter_context(noting_guards(sizes.env))
        stack.enter_context(replaced(sizes.env, "code_position", code_position))
        for kind, plain in ((torch.SymInt, int), (torch.SymFloat, float)):

            def look(self: Any, name: str, plain: type = plain) -> Any:
                return plain if name == "__class__" and foreign() else object.__getattribute__(self, name)

            def text(self: Any, plain: type = plain, before: Callable[..., str] = kind.__repr__) -> str:
                return repr(plain(self)) if foreign() else before(self)

            for name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
                comparison = getattr(kind, name)

                def compare(self: Any, other: Any, before: Callable[..., Any] = comparison) -> Any:
                    result = before(self, other)
                    if isinstance(result, torch.SymBool) and foreign() and not unbacked_in(result):
                        return bool(result)
                    return result

                stack.enter_context(replaced(kind, name, compare))
            stack.enter_context(replaced(kind, "__getattribute__", look))
            stack.enter_context(replaced(kind, "__repr__", text))
        yield
