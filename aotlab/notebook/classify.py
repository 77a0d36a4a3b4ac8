"""Decide which statements of a cell go to Dynamo, from their text and from the objects that their names refer to.

These decisions never change the results of a cell. A statement that Python runs, and a statement that goes to Dynamo
although it computes nothing with tensors, give the same results as in eager. The decisions change the size of the
graphs: Dynamo ends a graph at a ``print``, and does not capture a loop that contains a graph break. If such statements
are separated beforehand, the statements around them become whole graphs.
"""

from __future__ import annotations

import ast
import builtins
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from aotlab._torch import EXACT_OPTIMIZERS
from aotlab.report.text import DATA_LIBRARIES
from aotlab.report.verdict import ROUNDS

#: The kind of value that a name of the cell is bound to: a plain Python value, a plain value that changes from round
#: to round of a loop, an object of a library that does not use tensors, a class, or anything.
Kind = Literal["python", "varying", "foreign", "class", "unknown"]

_UNKNOWN = object()

#: A loop is unrolled into one graph if it has at most this many rounds.
LONGEST_UNROLLED = 16

#: Packages that are left to Python: a statement that uses their functions or objects does not go to Dynamo.
_FOREIGN = frozenset((
    "IPython", "PIL", "aotlab", "collections", "copy", "csv", "dataclasses", "enum", "datetime", "io", "ipywidgets",
    "json", "logging", "matplotlib", "numpy", "os", "pandas", "pathlib", "pickle", "plotly", "random",
    "requests", "scipy", "seaborn", "shutil", "sklearn", "subprocess", "sys", "threading", "time", "tqdm",
    "typing", "warnings",
))  # fmt: skip
#: Packages whose functions may have effects that a trace does not see. The packages of the second set have no such
#: effects, or the direct frontend notices them.
EFFECTS = (_FOREIGN | sys.stdlib_module_names) - frozenset((
    "__main__", "abc", "aotlab", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses", "enum",
    "functools", "itertools", "math", "numbers", "numpy", "operator", "re", "string", "types", "typing", "warnings",
))  # fmt: skip
#: Builtin functions that are left to Python: a statement that calls one of them does not go to Dynamo.
PLAIN_BUILTINS = frozenset((
    "__import__", "breakpoint", "compile", "delattr", "dir", "display", "eval", "exec", "exit", "get_ipython",
    "globals", "hash", "help", "id", "input", "iter", "locals", "next", "open", "print", "quit", "repr",
    "setattr", "vars",
))  # fmt: skip
#: Builtin functions that only compute a value from their arguments.
PURE_BUILTINS = frozenset((
    "abs", "bool", "dict", "enumerate", "float", "frozenset", "int", "len", "list", "max", "min", "range",
    "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip",
))  # fmt: skip
#: Methods that are left to Python, for example because they return a Python value or change state outside of graphs.
PLAIN_METHODS = frozenset((
    "__setattr__", "apply_", "backward", "cuda", "data_ptr", "eval", "item", "load_state_dict", "manual_seed",
    "map_", "numpy", "requires_grad", "requires_grad_", "retain_grad", "seed", "share_memory_", "state_dict",
    "storage", "tolist", "train", "untyped_storage", "zero_grad",
))  # fmt: skip
#: Functions of torch that are left to Python.
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

#: The end of the reason for lines that are not compiled because each round of the loop would need a new compilation.
VARIES = "which has another value in each round"
#: The end of the reason for tensor computations that are not supported. The report counts these lines as run eagerly.
LEFT_OUT = "which compiled graphs do not support yet"

_DERIVATIVES = frozenset({"hessian", "hvp", "jvp", "vhp"})
_BATCHED = frozenset({"is_grads_batched", "vectorize"})
_TRACEBACKS = frozenset({"__traceback__", "exc_info", "format_exc", "print_exc", "traceback"})

#: Compound statements. Python can run them while the statements in their bodies are compiled.
COMPOUND = (
    ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match,
)  # fmt: skip

#: Kinds of syntax that Python runs, with the reason. A statement that contains one of them does not go to Dynamo.
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
    ast.Continue: "continues a loop",
}


class Scope:
    """The meaning of the names of a cell, as far as it is known before the cell runs.

    Parameters
    ----------
    namespace
        The notebook's variables.
    exact
        Whether results must be bitwise equal to eager's.
    batched
        Whether the cell computes derivatives of derivatives in batches (``is_grads_batched``, ``vectorize``).
    traced
        Whether the direct frontend tries statements before Dynamo.
    """

    def __init__(
        self, namespace: Mapping[str, Any], *, exact: bool = False, batched: bool = False, traced: bool = False
    ) -> None:
        self._namespace = namespace
        self._traced = traced
        self._exact = exact
        self._batched = batched
        self.kinds: dict[str, Kind] = {}
        self._imported: dict[str, object] = {}

    def value(self, node: ast.AST) -> object:
        """Return the object that a name or a dotted chain of attributes refers to before the cell runs.

        Return `_UNKNOWN` if this cannot be known, for example because the cell binds the name.
        """
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
        """Record the names that a statement binds, and the kind of their values."""
        kind: Kind = "unknown"
        # The statement `y = x` computes nothing, but afterwards `y` may be a tensor. So the value is tested, and not
        # the assignment.
        value = statement.value if isinstance(statement, ast.Assign) else statement
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign) and not self.tensorish(value):
            kind = "python"
        elif isinstance(statement, ast.Assign) and self._foreign(statement.value):
            kind = "foreign"
        elif isinstance(statement, ast.ClassDef):
            kind = "class"
        for name in bound_names([statement]):
            self._imported.pop(name, None)
            if not (self.kinds.get(name) == "varying" and kind == "python"):
                self.kinds[name] = kind

        if isinstance(statement, ast.Import | ast.ImportFrom):
            self._imported.update(_imports(statement))

    def _foreign(self, node: ast.expr) -> bool:
        """Tell whether an expression seems to be an object of a library that does not use tensors."""
        if isinstance(node, ast.Name) and self.kinds.get(node.id) == "foreign":
            return True
        value = self.value(node)
        if isinstance(value, types.ModuleType):
            return _package_of(value.__name__) in DATA_LIBRARIES
        if value is not _UNKNOWN:
            return _package_of(getattr(value, "__module__", None) or type(value).__module__) in DATA_LIBRARIES
        inner = node.func if isinstance(node, ast.Call) else None
        inner = node.value if isinstance(node, ast.Attribute | ast.Subscript) else inner
        return inner is not None and self._foreign(inner)

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
            # Binding a name to an existing object, or to a gradient, is not a computation.
            value = node.value
            if isinstance(value, ast.Name) or (isinstance(value, ast.Attribute) and value.attr == "grad"):
                return False
        return any(self.tensorish(each) for each in ast.iter_child_nodes(node) if not isinstance(each, _MARKS))

    def varies(self, node: ast.AST) -> bool:
        """Tell whether ``node`` does not compute with tensors, and has a different value in each round of a loop."""
        names = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
        return not self.tensorish(node) and any(self.kinds.get(name) == "varying" for name in names)

    def refusal(self, statement: ast.stmt, *, in_loop: bool) -> str | None:
        """Return the reason why Python runs a statement, or None if the whole statement can go to Dynamo.

        Parameters
        ----------
        in_loop
            Whether the statement is in the body of a loop that Python runs.
        """
        if self._batched:
            return f"is part of a cell that takes several derivatives of derivatives at once, {LEFT_OUT}"
        value = statement.value if isinstance(statement, ast.Assign) else None
        if isinstance(value, ast.Attribute) and value.attr == "grad":
            return "reads a gradient"
        return next(self._objections(statement, in_loop=in_loop, depth=0), None)

    def receiver(self, statement: ast.stmt, *, in_loop: bool) -> ast.expr | None:
        """Return the expression that a statement computes before it calls a method that Python has to run.

        For ``y = (x + 1).sum().item()`` this is ``(x + 1).sum()``. Return None if there is no such expression, or if it
        cannot go to Dynamo. ``in_loop`` is true if the statement is in the body of a loop that Python runs.
        """
        value = statement.value if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr) else None
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not self._batched:
            value = value.func.value
            if isinstance(value, ast.Name | ast.Attribute):
                return None
            if not any(True for _ in self._objections(value, in_loop=in_loop, depth=0)):
                return value if self.tensorish(value) else None
        return None

    def advice(self, statement: ast.stmt, reason: str, *, in_loop: bool) -> str:
        """Return advice on how to compile a statement in a loop that Python runs for ``reason``.

        Return "" if the statement is not in a loop (``in_loop``), or does not compute with tensors.
        """
        if not in_loop or not self._computes(statement):
            return ""
        if not reason.endswith(VARIES):
            return "compute the tensors on a line of their own"
        items = (each for each in ast.walk(statement) if isinstance(each, ast.Subscript))
        for item in items:
            if isinstance(item.ctx, ast.Load) and self.varies(item.slice):
                return f"loop over the items of `{ast.unparse(item.value)}` instead of their indices"
        name = reason.split("`")[1]
        return f"make `{name}` a tensor by `torch.tensor({name})`"

    def _computes(self, node: ast.AST) -> bool:
        """Tell whether a statement calls a module or a function with tensors, or does arithmetic with tensors."""
        if isinstance(node, ast.BinOp) and any(map(self._holds_tensor, (node.left, node.right))):
            return True
        if isinstance(node, ast.Call):
            function = self.value(node.func)
            computes = isinstance(function, torch.nn.Module | types.FunctionType | types.BuiltinFunctionType)
            computes = computes and _package_of(getattr(function, "__module__", None)) not in (*_FOREIGN, "builtins")
            computes = computes or (isinstance(node.func, ast.Name) and self.kinds.get(node.func.id) == "unknown")
            if computes and any(map(self._holds_tensor, (*node.args, *node.keywords))):
                return True
            method = node.func if isinstance(node.func, ast.Attribute) else None
            if method and method.attr not in PLAIN_METHODS and isinstance(self.value(method.value), torch.Tensor):
                return True
        return not isinstance(node, _SCOPES) and any(map(self._computes, ast.iter_child_nodes(node)))

    def _holds_tensor(self, node: ast.AST) -> bool:
        """Tell whether an expression contains a name that is or may be a tensor."""
        if isinstance(node, ast.Name):
            value = self.value(node)
            if node.id in self.kinds:
                return self.kinds[node.id] == "unknown"
            return isinstance(value, torch.Tensor | list | tuple | dict) and not _is_plain(value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PLAIN_METHODS:
            return False
        return any(map(self._holds_tensor, ast.iter_child_nodes(node)))

    def _objections(self, node: ast.AST, *, in_loop: bool, depth: int) -> Iterator[str]:
        """Yield the reasons why Python has to run the statement that contains ``node``.

        ``in_loop`` is true if the statement is in the body of a loop that Python runs. ``depth`` is the number of loops
        inside of the statement that contain ``node``. A ``break`` in such a loop is no reason, because it does not
        leave the statement.
        """
        if isinstance(node, ast.Break | ast.Continue) and depth:
            return
        if isinstance(node, ast.GeneratorExp):
            yield _NEVER[ast.GeneratorExp]
        elif type(node) in _NEVER or type(node).__name__ == "TypeAlias":
            yield _NEVER.get(type(node), "names a type")
        elif isinstance(node, ast.comprehension) and node.is_async:
            yield _NEVER[ast.AsyncFor]
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
                yield "searches a container"
        elif isinstance(node, ast.Call):
            yield from self._call(node)
            if len(node.args) == 1 and isinstance(node.args[0], ast.GeneratorExp) and self._consumes(node.func):
                for part in ast.iter_child_nodes(node.args[0]):
                    yield from self._objections(part, in_loop=in_loop, depth=depth)
                return
            if _package_of(getattr(self.value(node.func), "__module__", None)) == "torch":
                # A lambda that is passed to a function of torch (`torch.cond`, `torch.vmap`) does not outlive the call.
                # So only its body is checked: that the statement makes a function is no reason.
                parts = [each.body if isinstance(each, ast.Lambda) else each for each in node.args]
                for part in (node.func, *parts, *node.keywords):
                    yield from self._objections(part, in_loop=in_loop, depth=depth)
                return
        elif isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                if in_loop and self.kinds.get(node.id) == "varying":
                    yield f"depends on `{node.id}`, {VARIES}"
                if self.kinds.get(node.id) == "foreign":
                    yield f"works on `{node.id}`, an object of another library"
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
            yield "loops a number of times that is known only when it runs"
        elif count > LONGEST_UNROLLED:
            yield f"loops {count} times"

    def _rounds(self, node: ast.expr) -> int | None:
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return len(node.elts)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            if node.func.id == "range":
                numbers = [self._number(each) for each in node.args]
                bounds = [each for each in numbers if each is not None]
                return len(range(*bounds)) if 0 < len(bounds) == len(numbers) <= 3 and 0 not in bounds[2:] else None
            if node.func.id in ("zip", "enumerate", "reversed") and node.args:
                counts = [self._rounds(each) for each in node.args]
                lengths = [each for each in counts if each is not None]
                return min(lengths) if len(lengths) == len(counts) else None
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
        if isinstance(function, ast.Name) and function.id in PLAIN_BUILTINS and function.id not in self.kinds:
            yield f"calls {function.id}"
        if isinstance(value, type) and not issubclass(value, (*_CONTAINERS, *_GRAD_MODES)):
            yield f"makes a {value.__name__}"
        if isinstance(function, ast.Name) and self.kinds.get(function.id) == "class":
            yield f"makes a {function.id}"
        package = _package_of(getattr(value, "__module__", None))
        if package in _FOREIGN:
            yield f"calls {package}"
        # For tensors, Dynamo would compute an elementwise maximum or minimum. Python compares the tensors and returns
        # one of them, so Python has to run the call.
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
        elif (
            name == "step"
            and isinstance(owner, torch.optim.Optimizer)
            and self._exact
            and type(owner) not in EXACT_OPTIMIZERS
        ):
            yield f"steps {type(owner).__name__}, {ROUNDS}"
        elif name == "step" and self._traced and (owner is _UNKNOWN or isinstance(owner, torch.optim.Optimizer)):
            yield "steps an optimizer, which only `--frontend dynamo` compiles"
        elif name in ("to", "cpu") and isinstance(owner, torch.nn.Module):
            yield "moves a module"


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_MARKS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)


def bound_names(statements: Sequence[ast.AST]) -> dict[str, None]:
    """Return the names that ``statements`` bind in their own scope, in the order of the text."""
    names: dict[str, None] = {}
    for node in own_nodes(statements):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            names[node.id] = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = None
        elif isinstance(node, ast.alias):
            names[(node.asname or node.name).partition(".")[0]] = None
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names[node.name] = None
        elif isinstance(node, ast.MatchMapping) and node.rest:
            names[node.rest] = None
    return names


def batches_derivatives(tree: ast.Module) -> bool:
    """Tell whether the text of a cell computes derivatives of derivatives in batches.

    The test is coarse. It is true if the text requests, anywhere, derivatives that can be differentiated again
    (``create_graph``), and, anywhere, several derivatives at once (``vectorize``).
    """
    named = {name for node in ast.walk(tree) for name in _asked(node)}
    return bool(named & _BATCHED) and bool(named & {"create_graph", *_DERIVATIVES})


def _asked(node: ast.AST) -> Iterator[str]:
    """Yield the names of options and functions that a syntax node uses.

    These are the names of attributes, of imported objects, and of keyword arguments with a value other than False.
    """
    if isinstance(node, ast.keyword) and node.arg is not None:
        if not (isinstance(node.value, ast.Constant) and node.value.value is False):
            yield node.arg
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.alias):
        yield node.name.rpartition(".")[2]


def own_nodes(statements: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """Yield the syntax nodes of ``statements`` that are in their own scope.

    Nodes inside of functions and classes, and the targets of comprehensions, are in other scopes.
    """
    pending = list(reversed(statements))
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        pending += reversed(list(_evaluated(node)))


def _imports(statement: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, object]]:
    """Yield the names that an import will bind, with their objects.

    If a module is not imported yet, an empty module with its name is yielded instead.
    """
    for each in statement.names:
        if isinstance(statement, ast.Import):
            module = each.name if each.asname else each.name.partition(".")[0]
            yield each.asname or module, sys.modules.get(module, types.ModuleType(module))
        elif statement.module is not None and each.name != "*" and not statement.level:
            owner = sys.modules.get(statement.module)
            unknown = types.ModuleType(f"{statement.module}.{each.name}")
            yield each.asname or each.name, vars(owner).get(each.name, _UNKNOWN) if owner is not None else unknown


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the children of a node in the order of evaluation, without the targets of comprehensions."""
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
    """Tell whether the text of a cell uses tracebacks.

    A traceback would show compiled code. So Python runs the ``try`` statements of such a cell, including their bodies.
    """
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
