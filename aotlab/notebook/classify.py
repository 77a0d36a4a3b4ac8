"""Which statements of a cell are worth handing to Dynamo, told from their text and from what their names mean.

Nothing here decides what a cell does: a statement that is handed over for nothing runs as plain Python, and one that
is held back does too. What it decides is how large the graphs are. Dynamo ends a graph at a ``print``, and does not
capture a loop in which a graph ends; told apart beforehand, the statements around them are whole graphs.
"""

from __future__ import annotations

import ast
import builtins
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

#: What is known of a name that the cell has bound: a plain Python value, one that changes from round to round of a
#: loop, or anything.
Kind = Literal["python", "varying", "unknown"]

_UNKNOWN = object()

#: Loops of more rounds are not unrolled into one graph.
LONGEST_UNROLLED = 16

_FOREIGN = frozenset((
    "IPython", "PIL", "aotlab", "collections", "copy", "csv", "dataclasses", "enum", "datetime", "io", "ipywidgets",
    "json", "logging", "matplotlib", "numpy", "os", "pandas", "pathlib", "pickle", "plotly", "random",
    "requests", "scipy", "seaborn", "shutil", "sklearn", "subprocess", "sys", "threading", "time", "tqdm",
    "typing", "warnings",
))  # fmt: skip
_PLAIN_BUILTINS = frozenset((
    "__import__", "breakpoint", "compile", "delattr", "dir", "display", "eval", "exec", "exit", "get_ipython",
    "globals", "hash", "help", "id", "input", "iter", "locals", "next", "open", "print", "quit", "repr",
    "setattr", "vars",
))  # fmt: skip
PURE_BUILTINS = frozenset((
    "abs", "bool", "dict", "enumerate", "float", "frozenset", "int", "len", "list", "max", "min", "range",
    "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip",
))  # fmt: skip
PLAIN_METHODS = frozenset((
    "__setattr__", "apply_", "backward", "cuda", "data_ptr", "eval", "item", "load_state_dict", "manual_seed",
    "map_", "numpy", "requires_grad", "requires_grad_", "retain_grad", "seed", "share_memory_", "state_dict",
    "storage", "tolist", "train", "untyped_storage", "zero_grad",
))  # fmt: skip
PLAIN_TORCH = frozenset((
    "compile", "from_numpy", "grad", "load", "save", "seed",
))  # fmt: skip
_PLAIN_TARGETS = frozenset({"data", "grad", "requires_grad"})
_GRAD_MODES = (
    torch.no_grad,
    torch.enable_grad,
    torch.set_grad_enabled,
    torch.autocast,
    torch.amp.autocast,
)
_CONTAINERS = (list, dict, tuple, set, frozenset, int, float, str, bool, range, zip, enumerate, slice, torch.Size)

#: The optimizers whose step is the same arithmetic when Dynamo captures it. The others compute their corrections in
#: Python's doubles in eager, and in tensors when captured.
_CAPTURED_EXACTLY = (torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Rprop)
#: How the reason ends for lines that are not compiled, since they would be in each round anew.
VARIES = "which is another number in each round"
#: How reasons end for which computations with tensors are left out: these lines count as run eagerly.
LEFT_OUT = ("which compiled graphs do not have yet", "whose captured form rounds otherwise than eager")

_DERIVATIVES = frozenset({"hessian", "hvp", "jvp", "vhp"})
_BATCHED = frozenset({"is_grads_batched", "vectorize"})
_TRACEBACKS = frozenset({"__traceback__", "exc_info", "format_exc", "print_exc", "traceback"})

#: Statements that hold others, which can be run by Python while what they hold is compiled.
COMPOUND = (
    ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match,
)  # fmt: skip

_NEVER: dict[type[ast.AST], str] = {
    ast.Import: "imports",
    ast.ImportFrom: "imports",
    ast.FunctionDef: "defines a function",
    ast.AsyncFunctionDef: "defines a function",
    ast.ClassDef: "defines a class",
    ast.Lambda: "makes a function",
    ast.GeneratorExp: "makes a generator",
    ast.Await: "awaits",
    ast.Yield: "yields",
    ast.YieldFrom: "yields",
    ast.AsyncFor: "awaits",
    ast.AsyncWith: "awaits",
    ast.AnnAssign: "is annotated",
    ast.Delete: "deletes",
    ast.Global: "declares names",
    ast.Nonlocal: "declares names",
    ast.Try: "handles exceptions",
    ast.TryStar: "handles exceptions",
    ast.Match: "matches patterns",
    ast.Raise: "raises",
    ast.Assert: "asserts",
    ast.Return: "returns",
    ast.While: "loops until something changes",
    ast.Break: "leaves a loop",
    ast.Continue: "goes on in a loop",
}


class Scope:
    """What the names of a cell mean, as far as it is known before the cell runs.

    Parameters
    ----------
    namespace
        The notebook's variables.
    exact
        Whether results have to be eager's bit for bit.
    batched
        Whether the cell takes several derivatives of derivatives at once.
    """

    def __init__(self, namespace: Mapping[str, Any], *, exact: bool = False, batched: bool = False) -> None:
        self._namespace = namespace
        self._exact = exact
        self._batched = batched
        self.kinds: dict[str, Kind] = {}
        self._imported: dict[str, object] = {}

    def value(self, node: ast.AST) -> object:
        """Return what a name, or a chain of attributes of modules and classes, means before the cell runs."""
        if isinstance(node, ast.Name):
            if node.id in self._imported:
                return self._imported[node.id]
            if node.id in self.kinds:
                return _UNKNOWN
            if node.id in self._namespace:
                return self._namespace[node.id]
            return vars(builtins).get(node.id, _UNKNOWN)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            if isinstance(owner, types.ModuleType | type):
                return vars(owner).get(node.attr, _UNKNOWN)
        return _UNKNOWN

    def learn(self, statement: ast.stmt) -> None:
        """Note what a statement binds."""
        kind: Kind = "unknown"
        # Another name for a tensor is no computation, but computations with it are.
        value = statement.value if isinstance(statement, ast.Assign) else statement
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign) and not self.tensorish(value):
            kind = "python"
        for name in bound_names([statement]):
            self._imported.pop(name, None)
            if not (self.kinds.get(name) == "varying" and kind == "python"):
                self.kinds[name] = kind

        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._imported.update(_imports(statement))

    def tensorish(self, node: ast.AST) -> bool:
        """Tell whether evaluating ``node`` may compute with tensors."""
        if isinstance(node, ast.Constant | ast.Pass):
            return False
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store):
                return False
            if node.id in self.kinds:
                return self.kinds[node.id] == "unknown"
            return not _is_plain(self.value(node))
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in PURE_BUILTINS:
                if self.value(node.func) is not vars(builtins)[node.func.id]:
                    return True
                return any(self.tensorish(each) for each in (*node.args, *node.keywords))
            return True
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            target = ast.Name(node.target.id, ast.Load())
            return self.tensorish(target) or self.tensorish(node.value)
        if isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            # Another name for a thing, or a look at a gradient, is no computation.
            value = node.value
            if isinstance(value, ast.Name) or (isinstance(value, ast.Attribute) and value.attr == "grad"):
                return False
        return any(self.tensorish(each) for each in ast.iter_child_nodes(node) if not isinstance(each, _MARKS))

    def varies(self, node: ast.AST) -> bool:
        """Tell whether ``node`` is no tensor, and another thing in each round of a loop."""
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        return not self.tensorish(node) and any(self.kinds.get(name) == "varying" for name in names)

    def refusal(self, statement: ast.stmt, *, in_loop: bool) -> str | None:
        """Say why a statement is left to Python; None if it is worth handing over whole.

        Parameters
        ----------
        in_loop
            Whether Python runs it round by round of a loop.
        """
        if self._batched:
            return f"is part of a cell that takes several derivatives of derivatives at once, {LEFT_OUT[0]}"
        value = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(value, ast.Attribute) and value.attr == "grad":
            return "looks at a gradient"
        return next(self._objections(statement, in_loop=in_loop, depth=0), None)

    def receiver(self, statement: ast.stmt, *, in_loop: bool) -> ast.expr | None:
        """Return what a statement computes before it calls a method that is left to Python.

        In ``y = (x + 1).sum().item()`` that is ``(x + 1).sum()``: it is what is evaluated first.
        """
        value = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not self._batched:
            value = value.func.value
            if isinstance(value, ast.Name | ast.Attribute):
                return None
            if not any(True for _ in self._objections(value, in_loop=in_loop, depth=0)):
                return value if self.tensorish(value) else None
        return None

    def _objections(self, node: ast.AST, *, in_loop: bool, depth: int) -> Iterator[str]:
        if isinstance(node, ast.Break | ast.Continue) and depth:
            return
        if isinstance(node, ast.GeneratorExp):
            yield _NEVER[ast.GeneratorExp]
        elif type(node) in _NEVER or type(node).__name__ == "TypeAlias":
            yield _NEVER.get(type(node), "names a type")
        elif isinstance(node, ast.For):
            yield from self._loop(node)
            depth += 1
        elif isinstance(node, ast.With):
            for item in node.items:
                manager = item.context_expr
                if not (isinstance(manager, ast.Call) and self.value(manager.func) in _GRAD_MODES):
                    yield "enters a context"
        elif isinstance(node, ast.Compare):
            if any(isinstance(each, ast.In | ast.NotIn) for each in node.ops) and self.tensorish(node):
                yield "looks for a thing in others"
        elif isinstance(node, ast.Call):
            yield from self._call(node)
            if len(node.args) == 1 and isinstance(node.args[0], ast.GeneratorExp) and self._consumes(node.func):
                for part in ast.iter_child_nodes(node.args[0]):
                    yield from self._objections(part, in_loop=in_loop, depth=depth)
                return
            if _package_of(getattr(self.value(node.func), "__module__", None)) == "torch":
                # A function that only torch gets, as `torch.cond` and `torch.vmap` do, is not kept.
                parts = [each.body if isinstance(each, ast.Lambda) else each for each in node.args]
                for part in (node.func, *parts, *node.keywords):
                    yield from self._objections(part, in_loop=in_loop, depth=depth)
                return
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                if in_loop and self.kinds.get(node.id) == "varying":
                    yield f"depends on `{node.id}`, {VARIES}"
                value = self.value(node)
                if not isinstance(value, types.ModuleType | type) and _package(type(value)) in _FOREIGN:
                    yield f"works on a {type(value).__name__}"
        elif isinstance(node, ast.Attribute):
            if isinstance(node.ctx, ast.Store) and node.attr in _PLAIN_TARGETS:
                yield f"assigns to .{node.attr}"
            owner = self.value(node.value)
            if isinstance(owner, types.ModuleType) and _package_of(owner.__name__) in _FOREIGN:
                yield f"uses {owner.__name__}"
        for child in ast.iter_child_nodes(node):
            yield from self._objections(child, in_loop=in_loop, depth=depth)

    def _loop(self, node: ast.For) -> Iterator[str]:
        if node.orelse:
            yield "has an else"
        if any(isinstance(each, ast.Break | ast.Continue) for each in own_nodes(node.body)):
            yield "may be left early"
        count = self._rounds(node.iter)
        if count is None:
            yield "loops over something whose length shows when it runs"
        elif count > LONGEST_UNROLLED:
            yield f"loops {count} times"

    def _rounds(self, node: ast.expr) -> int | None:
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return len(node.elts)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            if node.func.id == "range":
                numbers = [self._number(each) for each in node.args]
                known = [each for each in numbers if each is not None]
                return len(range(*known)) if 0 < len(known) == len(numbers) <= 3 and 0 not in known[2:] else None
            if node.func.id in ("zip", "enumerate", "reversed") and node.args:
                counts = [self._rounds(each) for each in node.args]
                known = [each for each in counts if each is not None]
                return min(known) if len(known) == len(counts) else None
            return None
        value = self.value(node)
        return (
            len(value) if isinstance(value, list | tuple | dict | torch.nn.ModuleList | torch.nn.Sequential) else None
        )

    def _number(self, node: ast.expr) -> int | None:
        value = node.value if isinstance(node, ast.Constant) else self.value(node)
        return value if type(value) is int else None

    def _consumes(self, function: ast.expr) -> bool:
        return isinstance(function, ast.Name) and function.id in PURE_BUILTINS | {"any", "all"}

    def _call(self, node: ast.Call) -> Iterator[str]:
        function = node.func
        if any(keyword.arg == "requires_grad" for keyword in node.keywords):
            yield "makes a leaf"
        value = self.value(function)
        if isinstance(function, ast.Name) and function.id in _PLAIN_BUILTINS and function.id not in self.kinds:
            yield f"calls {function.id}"
        if isinstance(value, type) and not issubclass(value, (*_CONTAINERS, *_GRAD_MODES)):
            yield f"makes a {value.__name__}"
        package = _package_of(getattr(value, "__module__", None))
        if package in _FOREIGN:
            yield f"calls {package}"
        # Of tensors Dynamo takes the larger elements, and compares elements, where Python takes and compares objects.
        if isinstance(function, ast.Name) and function.id in ("max", "min") and any(map(self.tensorish, node.args)):
            yield f"calls {function.id}"
        if isinstance(function, ast.Attribute) and function.attr in ("count", "index", "remove"):
            yield f"calls .{function.attr}()"
        if not isinstance(function, ast.Attribute):
            return
        owner = self.value(function.value)
        name = function.attr
        if isinstance(owner, types.ModuleType) and _package_of(owner.__name__) == "torch":
            if name in PLAIN_TORCH or name.startswith(("set_", "manual_seed", "use_")):
                yield f"calls {ast.unparse(function)}"
        elif name in PLAIN_METHODS or name.startswith("register_"):
            yield f"calls .{name}()"
        elif name == "step" and isinstance(owner, torch.optim.lr_scheduler.LRScheduler):
            yield "steps a scheduler"
        elif name == "step" and isinstance(owner, torch.optim.Optimizer) and self._exact:
            if type(owner) not in _CAPTURED_EXACTLY:
                yield f"steps {type(owner).__name__}, {LEFT_OUT[1]}"
        elif name in ("to", "cpu") and isinstance(owner, torch.nn.Module):
            yield "moves a module"


_MARKS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)


def bound_names(statements: Sequence[ast.AST]) -> dict[str, None]:
    """Return the names that ``statements`` bind in the scope in which they stand, in the order of the text."""
    found: dict[str, None] = {}
    for node in own_nodes(statements):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            found[node.id] = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = None
        elif isinstance(node, ast.alias):
            found[(node.asname or node.name).partition(".")[0]] = None
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            found[node.name] = None
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found[node.rest] = None
    return found


def batches_derivatives(tree: ast.Module) -> bool:
    """Tell whether the text of a cell asks for several derivatives of derivatives at once.

    Or rather for derivatives that can be differentiated again, and, somewhere, for several at once.
    """
    named = {name for node in ast.walk(tree) for name in _asked(node)}
    return bool(named & _BATCHED) and bool(named & {"create_graph", *_DERIVATIVES})


def _asked(node: ast.AST) -> Iterator[str]:
    """Name what a part of a text asks for: the keywords that are not False, and the attributes."""
    if isinstance(node, ast.keyword) and node.arg is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is False):
            yield node.arg
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.alias):
        yield node.name.rpartition(".")[2]


def own_nodes(statements: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Walk ``statements`` without entering scopes of their own: functions, classes, the targets of comprehensions."""
    pending = list(reversed(statements))
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        pending += reversed(list(_evaluated(node)))


def _imports(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, object]]:
    """Yield what an import will bind, as far as it is known before it runs; of other modules the name is known."""
    for each in statement.names:
        if isinstance(statement, ast.Import):
            module = each.name if each.asname else each.name.partition(".")[0]
            yield each.asname or module, sys.modules.get(module, types.ModuleType(module))
        elif statement.module is not None and each.name != "*" and not statement.level:
            owner = sys.modules.get(statement.module)
            unknown = types.ModuleType(f"{statement.module}.{each.name}")
            yield each.asname or each.name, vars(owner).get(each.name, _UNKNOWN) if owner is not None else unknown


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a node in the order of their evaluation, without the targets of comprehensions."""
    match node:
        case ast.comprehension():
            yield from (node.iter, *node.ifs)
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
            yield from (*node.generators, node.elt)
        case ast.DictComp():
            yield from (*node.generators, node.key, node.value)
        case ast.Assign():
            yield from (node.value, *node.targets)
        case ast.NamedExpr():
            yield from (node.value, node.target)
        case ast.For() | ast.AsyncFor():
            yield from (node.iter, node.target, *node.body, *node.orelse)
        case _:
            yield from ast.iter_child_nodes(node)


def looks_at_tracebacks(tree: ast.Module) -> bool:
    """Tell whether the text of a cell has to do with tracebacks, in which compiled code would be seen."""
    for node in ast.walk(tree):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None
        if name in _TRACEBACKS:
            return True
    return False


def _is_plain(value: object) -> bool:
    if isinstance(value, int | float | complex | str | bytes | bool | range | type(None)):
        return True
    if type(value) in (list, tuple, set, frozenset, dict):
        assert isinstance(value, list | tuple | set | frozenset | dict)
        return len(value) <= 100 and all(map(_is_plain, value)) and all(map(_is_plain, _values(value)))
    return value is torch or isinstance(value, torch.dtype | torch.device | torch.Size)


def _values(value: object) -> Sequence[object]:
    return list(value.values()) if isinstance(value, dict) else ()


def _package(kind: type) -> str | None:
    return _package_of(getattr(kind, "__module__", None))


def _package_of(module: object) -> str | None:
    return module.partition(".")[0].lstrip("_") if isinstance(module, str) else None
