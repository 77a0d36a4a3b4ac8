"""A cell taken apart: what Python runs, and the stretches between that are handed to Dynamo.

    x = torch.rand(3)          ⎫
    y = model(x).sum()         ⎬ region 1
    print(y)                     Python
    for step in range(100):      Python
        opt.zero_grad()          Python
        loss = f(model(x))         region 2
        loss.backward()            Python
        opt.step()                 region 3

What Python runs is the cell's own code at module level, statement by statement, with calls in place of the regions. A
region is a function without arguments whose globals are the notebook's and which declares every name that it binds
``global``: cut anywhere, the statements mean the same. Lines are counted as the user sees them, the magic's included.
"""

from __future__ import annotations

import ast
import copy
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from aotlab.notebook.classify import (
    COMPOUND,
    VARIES,
    Scope,
    batches_derivatives,
    bound_names,
    looks_at_tracebacks,
    own_nodes,
)
from aotlab.notebook.playground import TORCH

#: How IPython says which expressions of a cell are displayed (``InteractiveShell.ast_node_interactivity``).
Interactivity = Literal["all", "last", "last_expr", "none", "last_expr_or_assign"]

#: Compiles a tree as the shell would: ``(tree, file name, mode) -> code``.
Compile = Callable[[Any, str, str], types.CodeType]

_REGION = "aotlab region {}"
_SHOW = "aotlab shows"
_RESULT = "aotlab result"
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCode:
    """A stretch of a cell that is handed to Dynamo.

    Attributes
    ----------
    number
        Its number in the cell.
    code
        A function's code without arguments; it returns the value of its last expression if that is displayed.
    pieces
        The same statement by statement, where there are several: to run one after the other if the whole is refused.
    bound
        The names that it binds, in the order of the text.
    first_line, last_line
        Where it stands in the cell.
    """

    number: int
    code: types.CodeType
    pieces: tuple[RegionCode, ...] = ()
    bound: tuple[str, ...]
    first_line: int
    last_line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonLines:
    """Lines that Python runs, and why they are not handed to Dynamo."""

    first_line: int
    last_line: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCode:
    """A cell, ready to run.

    Attributes
    ----------
    statements
        What Python runs, one tree per statement, with calls of constants in place of the regions; see `linked`.
    regions
        The stretches that are handed to Dynamo.
    python
        The lines that are not.
    defines_only
        Whether it only imports things and defines functions.
    functions
        The names of the functions that it defines at its outermost level.
    called
        Those of them that lines left to Python call, to be compiled by themselves, with their first and last lines.
    bound
        The names that it binds.
    """

    statements: tuple[ast.stmt, ...]
    regions: tuple[RegionCode, ...]
    python: tuple[PythonLines, ...]
    defines_only: bool
    functions: tuple[str, ...]
    called: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    bound: tuple[str, ...] = ()


def take_apart(
    tree: ast.Module,
    *,
    namespace: Mapping[str, Any],
    file: str,
    compile_tree: Compile,
    interactivity: Interactivity = "last_expr",
    exact: bool = False,
) -> CellCode:
    """Split a cell.

    Parameters
    ----------
    tree
        The cell, with lines counted as the user sees them.
    namespace
        The notebook's variables, which tell what the cell's names mean. They are only looked at.
    file
        The file name of the cell's code.
    compile_tree
        Compiles a region's tree.
    interactivity
        Which expressions are displayed.
    exact
        Whether results have to be eager's bit for bit, so that what Dynamo rounds otherwise is left to Python.
    """
    body = list(tree.body)
    if interactivity == "last_expr_or_assign" and body:
        body += _named_again(body[-1])
    shown = _shown(body, interactivity)
    definitions = [each for each in body if isinstance(each, ast.FunctionDef)]
    defines_only = bool(definitions) and all(_defines(each) for each in body)
    if defines_only:
        python = tuple([_lines(each, "defines") for each in body])
        return CellCode(
            statements=tuple(body),
            regions=(),
            python=python,
            defines_only=True,
            functions=tuple(each.name for each in definitions),
        )
    splitter = _Splitter(
        Scope(namespace, exact=exact, batched=batches_derivatives(tree)), file, looks_at_tracebacks(tree), compile_tree
    )
    names = bound_names(body)
    statements = splitter.split(body, shown=shown, last=body[-1] if body else None)
    return CellCode(
        statements=tuple(statements),
        regions=tuple(splitter.regions),
        python=tuple(splitter.python),
        defines_only=False,
        functions=(),
        called=splitter.called,
        bound=tuple(names),
    )


def linked(
    code: types.CodeType, regions: Mapping[int | str, Callable[..., Any]], show: Any, result: Any
) -> types.CodeType:
    """Put callables in the place of the constants that `take_apart` left in the code of a statement.

    Regions go by their numbers, functions that are compiled by themselves by their names.
    """
    callables = {_REGION.format(number): region for number, region in regions.items()}
    callables |= {_SHOW: show, _RESULT: result}
    constants = tuple(callables.get(each, each) if type(each) is str else each for each in code.co_consts)
    return code.replace(co_consts=constants)


@dataclass(slots=True)
class _Splitter:
    scope: Scope
    file: str
    tracebacks: bool
    compile_tree: Compile
    regions: list[RegionCode] = field(default_factory=list)
    python: list[PythonLines] = field(default_factory=list)
    defined: dict[str, tuple[int, int]] = field(default_factory=dict)
    called: dict[str, tuple[int, int]] = field(default_factory=dict)

    def split(
        self,
        body: Sequence[ast.stmt],
        *,
        shown: Sequence[ast.stmt] = (),
        last: ast.stmt | None = None,
        in_loop: bool = False,
    ) -> list[ast.stmt]:
        """Replace what is worth compiling by calls of regions."""
        out: list[ast.stmt] = []
        pending: list[ast.stmt] = []

        def flush() -> None:
            rest: list[ast.stmt] = []
            while pending and not self.scope.tensorish(pending[-1]):
                rest.insert(0, pending.pop())
            if pending:
                call = self._region(pending)
                if call is None:
                    out.extend(pending)
                    self.python += [_lines(each, "cannot be cut out") for each in pending]
                else:
                    out.append(ast.copy_location(ast.Expr(call), pending[0]))
            out.extend(rest)
            self.python += [_lines(each, "no computation with tensors") for each in rest]
            pending.clear()

        for statement in body:
            reason = self.scope.refusal(statement, in_loop=in_loop)
            if any(statement is each for each in shown):
                assert isinstance(statement, ast.Expr)
                value = statement.value
                if reason is None and self.scope.tensorish(statement):
                    returned = ast.copy_location(ast.Return(value), statement)
                    call = self._region([*pending, returned])
                    if call is not None:
                        pending.clear()
                        value = call
                else:
                    flush()
                    lifted = self._lifted(statement, in_loop=in_loop)
                    if lifted is None:
                        self.python.append(_lines(statement, reason or "no computation with tensors"))
                    else:
                        assert isinstance(lifted, ast.Expr)
                        value = lifted.value
                keeper = _RESULT if statement is last else _SHOW
                out.append(ast.copy_location(ast.Expr(_called(keeper, statement, value)), statement))
            elif reason is None and (pending or self.scope.tensorish(statement)):
                pending.append(statement)
            else:
                flush()
                out.append(self._left(statement, reason or "no computation with tensors", in_loop=in_loop))
            self.scope.learn(statement)
            for name in bound_names([statement]):
                self.defined.pop(name, None)
            if isinstance(statement, ast.FunctionDef) and not in_loop:
                lines = _lines(statement, "")
                self.defined[statement.name] = (lines.first_line, lines.last_line)
        flush()
        return out

    def _left(self, statement: ast.stmt, reason: str, *, in_loop: bool) -> ast.stmt:
        """Leave a statement to Python, but take regions out of the statements that it holds."""
        if isinstance(statement, ast.Try | ast.TryStar) and self.tracebacks:
            self.python.append(_lines(statement, "looks at tracebacks"))
            return statement
        if not isinstance(statement, COMPOUND):
            lifted = self._lifted(statement, in_loop=in_loop)
            if lifted is not None:
                return lifted
            self.python.append(_lines(statement, reason))
            if reason.endswith(VARIES):
                calls = _OwnCalls(self.defined, self.scope)
                statement = calls.visit(copy.deepcopy(statement))
                self.called |= {name: self.defined[name] for name in calls.found}
            return statement
        statement = copy.copy(statement)
        looping = isinstance(statement, ast.For | ast.AsyncFor | ast.While)
        header = min((each.lineno for each in _held(statement)), default=statement.lineno + 1) - 1
        self.python.append(
            PythonLines(first_line=statement.lineno, last_line=max(header, statement.lineno), reason=reason)
        )
        if looping:
            self._note_rounds(statement)
        self.scope.kinds.update(dict.fromkeys(bound_names([statement]).keys() - self.scope.kinds.keys(), "unknown"))
        for name, value in ast.iter_fields(statement):
            if isinstance(value, list) and value and all(isinstance(each, ast.stmt) for each in value):
                inside = looping and name == "body"
                setattr(statement, name, self.split(value, in_loop=in_loop or inside))
            elif isinstance(value, list) and value and isinstance(value[0], ast.ExceptHandler | ast.match_case):
                handlers = [copy.copy(each) for each in value]
                for each in handlers:
                    each.body = self.split(each.body, in_loop=in_loop)
                setattr(statement, name, handlers)
        return statement

    def _lifted(self, statement: ast.stmt, *, in_loop: bool) -> ast.stmt | None:
        """Take out of a statement what it computes before it calls a method that is left to Python."""
        receiver = self.scope.receiver(statement, in_loop=in_loop)
        if receiver is None:
            return None
        call = self._region([ast.copy_location(ast.Return(receiver), statement)])
        return None if call is None else _Replaced(receiver, call).visit(copy.deepcopy(statement))

    def _note_rounds(self, statement: ast.stmt) -> None:
        """Note the names that are plain numbers, another in each round of a loop."""
        varying: set[str] = set()
        if isinstance(statement, ast.For):
            call = statement.iter
            function = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
            if function == "range" or not self.scope.tensorish(call):
                varying |= bound_names([statement.target]).keys()
            elif function == "enumerate" and isinstance(statement.target, ast.Tuple):
                varying |= bound_names([statement.target.elts[0]]).keys()
        assert isinstance(statement, ast.For | ast.AsyncFor | ast.While)
        self.scope.kinds.update(dict.fromkeys(varying, "varying"))
        for each in own_nodes(statement.body):
            if not isinstance(each, ast.Assign | ast.AugAssign) or self.scope.tensorish(each):
                continue
            if isinstance(each, ast.AugAssign) or any(isinstance(node, ast.Name) for node in ast.walk(each.value)):
                varying |= bound_names([each]).keys()
        self.scope.kinds.update(dict.fromkeys(varying, "varying"))

    def _region(self, statements: Sequence[ast.stmt]) -> ast.expr | None:
        """Make a region of ``statements``; return its call."""
        try:
            whole = self._region_code(statements)
            pieces = tuple([self._region_code([each]) for each in statements]) if len(statements) > 1 else ()
        except SyntaxError:
            return None
        self.regions.append(replace(whole, pieces=pieces))
        return _called(_REGION.format(whole.number), statements[0])

    def _region_code(self, statements: Sequence[ast.stmt]) -> RegionCode:
        bound = list(bound_names(statements))
        body: list[ast.stmt] = [ast.Global(bound)] if bound else []
        function = ast.FunctionDef(
            name="region",
            args=ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]),
            body=[*body, *statements],
            decorator_list=[],
        )
        # At the cell's first line, as a module's code is: IPython counts the lines that it shows from there.
        function.lineno, function.col_offset = 1, 0
        function.end_lineno, function.end_col_offset = statements[-1].end_lineno, statements[-1].end_col_offset
        if hasattr(function, "type_params"):
            function.type_params = []
        module = ast.fix_missing_locations(ast.Module(body=[function], type_ignores=[]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outer = self.compile_tree(module, self.file, "exec")
        return RegionCode(
            number=len(self.regions),
            code=_at_module_level(next(each for each in outer.co_consts if isinstance(each, types.CodeType))),
            bound=tuple(bound),
            first_line=statements[0].lineno,
            last_line=max(each.end_lineno or each.lineno for each in statements),
        )


class _OwnCalls(ast.NodeTransformer):
    """Lets a statement call the compiled forms of functions that the cell defines, but for other numbers each time."""

    def __init__(self, defined: Mapping[str, object], scope: Scope) -> None:
        self._defined = defined
        self._scope = scope
        self.found: dict[str, None] = {}

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Replace the function, if it is one of them."""
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in self._defined and not any(map(self._scope.varies, (*node.args, *node.keywords))):
            self.found[name] = None
            node.func = ast.copy_location(ast.Constant(_REGION.format(name)), node.func)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Look into what is not a scope of its own."""
        return node if isinstance(node, _SCOPES) else super().generic_visit(node)


class _Replaced(ast.NodeTransformer):
    """Puts one expression in the place of another, which is known by where it stands."""

    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._place = _place(old)
        self._new = new

    def visit(self, node: ast.AST) -> Any:
        """Replace the expression, or look into what is not it."""
        if isinstance(node, ast.expr) and _place(node) == self._place:
            return self._new
        return self.generic_visit(node)


def _place(node: ast.expr) -> tuple[object, ...]:
    return (type(node), node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)


def _called(constant: str, where: ast.AST, *arguments: ast.expr) -> ast.expr:
    """Write the call of a constant, which `linked` replaces by something that can be called."""
    function = ast.copy_location(ast.Constant(constant), where)
    return ast.fix_missing_locations(ast.copy_location(ast.Call(function, list(arguments), []), where))


def _at_module_level(code: types.CodeType) -> types.CodeType:
    """Name a function's code, and what is nested in it, as if it stood at module level."""
    prefix = f"{code.co_name}.<locals>."

    def renamed(inner: types.CodeType) -> types.CodeType:
        constants = tuple(renamed(each) if isinstance(each, types.CodeType) else each for each in inner.co_consts)
        return inner.replace(co_consts=constants, co_qualname=inner.co_qualname.removeprefix(prefix))

    # The last name is read by nobody; it tells Dynamo that the code has to do with torch.
    return renamed(code).replace(co_name="<module>", co_qualname="<module>", co_names=(*code.co_names, TORCH))


def _shown(body: Sequence[ast.stmt], interactivity: Interactivity) -> list[ast.stmt]:
    if interactivity == "none" or not body:
        return []
    if interactivity == "all":
        return [each for each in body if isinstance(each, ast.Expr)]
    return [body[-1]] if isinstance(body[-1], ast.Expr) else []


def _named_again(statement: ast.stmt) -> list[ast.stmt]:
    target: ast.AST | None = None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AugAssign | ast.AnnAssign):
        target = statement.target
    if not isinstance(target, ast.Name):
        return []
    name = ast.copy_location(ast.Name(target.id, ast.Load()), statement)
    return [ast.copy_location(ast.Expr(name), statement)]


def _defines(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return isinstance(statement.value.value, str)
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef)


def _held(statement: ast.stmt) -> Iterator[ast.stmt]:
    for _name, value in ast.iter_fields(statement):
        for each in value if isinstance(value, list) else ():
            if isinstance(each, ast.stmt):
                yield each
            elif isinstance(each, ast.ExceptHandler | ast.match_case):
                yield from each.body


def _lines(statement: ast.stmt, reason: str) -> PythonLines:
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(each.lineno for each in decorators)])
    return PythonLines(first_line=first, last_line=statement.end_lineno or statement.lineno, reason=reason)
