"""Split a cell into regions, which go to Dynamo, and the other statements, which Python runs.

    x = torch.rand(3)          ⎫
    y = model(x).sum()         ⎬ region 1
    print(y)                     Python
    for step in range(100):      Python
        opt.zero_grad()          Python
        loss = f(model(x))         region 2
        loss.backward()            Python
        opt.step()                 region 3

A region is a function without arguments that contains consecutive statements of the cell. Python runs the cell at
module level, statement by statement, and calls each region in the place of its statements. The globals of a region are
the notebook's variables, and it declares every name that it binds ``global``. So a statement has the same effect
inside of a region as at module level. Lines are numbered as the user sees them: the magic's line counts, too.
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
from aotlab.notebook.reads import read_first

#: IPython's setting that says which expressions of a cell are displayed (``InteractiveShell.ast_node_interactivity``).
Interactivity = Literal["all", "last", "last_expr", "none", "last_expr_or_assign"]

#: A function that compiles a syntax tree as the shell would: ``(tree, file name, mode) -> code``.
Compile = Callable[[Any, str, str], types.CodeType]

#: `take_apart` puts these texts into the trees in place of functions, as in ``"aotlab region 0"()``. Later, `linked`
#: replaces each text by a callable: a region, a function that displays a value, or a function that receives the value
#: of the cell's last expression.
_REGION = "aotlab region {}"
_SHOW = "aotlab shows"
_RESULT = "aotlab result"
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
#: The syntax of statements that only bind, show or collect the values of variables.
_PLAIN_NODES = (
    ast.Assign, ast.Expr, ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred,
    ast.expr_context,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionCode:
    """A region: consecutive statements of a cell that go to Dynamo together.

    Attributes
    ----------
    number
        The number of the region in the cell.
    code
        The code of a function without arguments. If the last expression is displayed, the function returns its value.
    pieces
        One region for each statement, if the region has several statements. If aotlab refuses the graph of the whole
        region, the pieces run one after the other, so that only the refused statements run eagerly.
    bound
        The names that the region binds, in the order of the text.
    first_line, last_line
        The lines of the region in the cell.
    traced
        The code of a function for the direct frontend, or None if only Dynamo captures the region. The names that the
        region binds are variables of this function. Its arguments are the names among them whose values from before the
        region the statements may read. It returns a tuple: a dictionary of the variables, and the value that ``code``
        returns, if it is displayed.
    """

    number: int
    code: types.CodeType
    pieces: tuple[RegionCode, ...] = ()
    bound: tuple[str, ...]
    first_line: int
    last_line: int
    traced: types.CodeType | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonLines:
    """Lines that Python runs, and the reason why they do not go to Dynamo.

    If the lines compute with tensors, ``advice`` says how they could be compiled.
    """

    first_line: int
    last_line: int
    reason: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellCode:
    """A cell that was split and is ready to run.

    Attributes
    ----------
    statements
        The statements that Python runs, one tree per statement. Each region is replaced by the call of a string
        constant, ``"aotlab region 0"()``. `linked` replaces the constant by the callable that runs the region.
    regions
        The regions, which go to Dynamo.
    python
        The lines that do not go to Dynamo.
    defines_only
        Whether the cell only imports things and defines functions.
    functions
        The names of the functions that the cell defines at its outermost level.
    called
        The functions of the cell that are not compiled as a part of a region: their first and last lines, by name.
        Such a function is called by a line that Python runs, for example because this line depends on a number that
        changes in each round of a loop.
    bound
        The names that the cell binds.
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
    calls: bool = False,
    traced: bool = False,
) -> CellCode:
    """Split a cell into statements for Python and regions for Dynamo.

    Parameters
    ----------
    tree
        The syntax tree of the cell, with line numbers as the user sees them.
    namespace
        The notebook's variables. The cell's names refer to them. They are only read.
    file
        The file name of the cell's code.
    compile_tree
        Compiles a region's tree.
    interactivity
        Which expressions are displayed; see `Interactivity`.
    exact
        Whether results must be bitwise equal to eager's. If so, Python runs the optimizer steps whose captured form
        rounds differently.
    calls
        Whether all lines that Python runs call the compiled forms of the functions that the code defines. If not, only
        lines do that depend on a number that changes in each round of a loop. A script needs it for
        ``sys.exit(main())``.
    traced
        Whether the direct frontend tries the regions before Dynamo. If so, Python runs the steps of optimizers.
    """
    body = list(tree.body)
    if interactivity == "last_expr_or_assign" and body:
        body += _named_again(body[-1])
    shown = _shown(body, interactivity)
    definitions = [each for each in body if isinstance(each, ast.FunctionDef)]
    functions = tuple([each.name for each in definitions])
    defines_only = bool(definitions) and all(_defines(each) for each in body)
    if defines_only:
        python = tuple([_lines(each, "defines") for each in body])
        return CellCode(
            statements=tuple(body),
            regions=(),
            python=python,
            defines_only=True,
            functions=functions,
        )
    splitter = _Splitter(
        Scope(namespace, exact=exact, batched=batches_derivatives(tree), traced=traced),
        file,
        looks_at_tracebacks(tree),
        compile_tree,
        calls,
        traced,
    )
    names = bound_names(body)
    statements = splitter.split(body, shown=shown, last=body[-1] if body else None)
    return CellCode(
        statements=tuple(statements),
        regions=tuple(splitter.regions),
        python=tuple(splitter.python),
        defines_only=False,
        functions=functions,
        called=splitter.called,
        bound=tuple(names),
    )


def linked(
    code: types.CodeType, regions: Mapping[int | str, Callable[..., Any]], show: Any, result: Any
) -> types.CodeType:
    """Replace the constants that `take_apart` left in the code of a statement by callables.

    Parameters
    ----------
    code
        The compiled statement.
    regions
        The callables of the regions, by number, and of the functions that are compiled separately, by name.
    show
        Called with the value of each displayed expression except the last one.
    result
        Called with the value of the cell's last expression.
    """
    callables = {_REGION.format(number): region for number, region in regions.items()}
    callables |= {_SHOW: show, _RESULT: result}
    constants = tuple(callables.get(each, each) if type(each) is str else each for each in code.co_consts)
    return code.replace(co_consts=constants)


@dataclass(slots=True)
class _Splitter:
    """Splits the statements of one cell for `take_apart`.

    ``scope`` has the meanings of the cell's names. ``tracebacks`` is true if the cell's text uses tracebacks. ``calls``
    and ``traced`` are described at `take_apart`.
    ``regions`` and ``python`` collect the results while the statements are split. ``defined`` has the functions that
    the statements so far define, with their first and last lines. ``called`` has the functions that are compiled apart
    from all regions (see `CellCode.called`).
    """

    scope: Scope
    file: str
    tracebacks: bool
    compile_tree: Compile
    calls: bool
    traced: bool
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
        """Return ``body`` with calls of regions in place of the statements that can be compiled.

        ``shown`` are the statements whose values are displayed. ``last`` is the cell's last statement, whose value is
        the cell's result. ``in_loop`` is true if the statements are in the body of a loop that Python runs.
        """
        out: list[ast.stmt] = []
        pending: list[ast.stmt] = []

        def flush() -> None:
            trailing: list[ast.stmt] = []
            while pending and not (self.scope.tensorish(pending[-1]) and any(map(_computes, pending))):
                trailing.insert(0, pending.pop())
            if pending:
                call = self._region(pending)
                if call is None:
                    out.extend(pending)
                    self.python += [_lines(each, "cannot be cut out") for each in pending]
                else:
                    out.append(ast.copy_location(ast.Expr(call), pending[0]))
            out.extend(trailing)
            self.python += [_lines(each, "no computation with tensors") for each in trailing]
            pending.clear()

        for statement in body:
            reason = self.scope.refusal(statement, in_loop=in_loop)
            if any(statement is each for each in shown):
                assert isinstance(statement, ast.Expr)
                value = statement.value
                call = None
                if reason is None and self.scope.tensorish(statement) and not isinstance(value, ast.Name):
                    returned = ast.copy_location(ast.Return(value), statement)
                    call = self._region([*pending, returned])
                    reason = "cannot be cut out"
                if call is not None:
                    pending.clear()
                    value = call
                else:
                    # The pending statements must run before this one, whether or not they can become a region.
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
        """Return a statement as Python will run it; if it has a body, make regions of the statements in the body.

        ``reason`` says why Python runs the statement. ``in_loop`` is true if a loop that Python runs contains it.
        """
        if isinstance(statement, ast.Try | ast.TryStar) and self.tracebacks:
            self.python.append(_lines(statement, "looks at tracebacks"))
            return statement
        if not isinstance(statement, COMPOUND):
            lifted = self._lifted(statement, in_loop=in_loop)
            if lifted is not None:
                return lifted
            advice = self.scope.advice(statement, reason, in_loop=in_loop)
            if self.calls or reason.endswith(VARIES):
                calls = _OwnCalls(self.defined, self.scope)
                statement = calls.visit(copy.deepcopy(statement))
                self.called |= {name: self.defined[name] for name in calls.replaced}
                advice = "" if calls.replaced else advice
            self.python.append(replace(_lines(statement, reason), advice=advice))
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
        """Make a region of the expression that a statement computes before it calls a method that Python has to run.

        For ``y = (x + 1).sum().item()`` the region computes ``(x + 1).sum()``. Return the statement with a call of the
        region in place of the expression, or None if the statement contains no such expression.
        """
        receiver = self.scope.receiver(statement, in_loop=in_loop)
        if receiver is None:
            return None
        call = self._region([ast.copy_location(ast.Return(receiver), statement)])
        return None if call is None else _Replaced(receiver, call).visit(copy.deepcopy(statement))

    def _note_rounds(self, statement: ast.stmt) -> None:
        """Record the names of plain Python values that change in each round of the loop ``statement``.

        A graph would contain such a value as a constant, so each round would need its own graph.
        """
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
        """Make a region of ``statements``, and return the expression that calls it.

        Return None if a function cannot contain the statements, because they would be a syntax error there.
        """
        try:
            whole = self._region_code(statements)
            pieces = tuple([self._region_code([each]) for each in statements]) if len(statements) > 1 else ()
            traced = self._traced_code(statements, whole.bound) if self.traced else None
        except SyntaxError:
            return None
        self.regions.append(replace(whole, pieces=pieces, traced=traced))
        return _called(_REGION.format(whole.number), statements[0])

    def _region_code(self, statements: Sequence[ast.stmt]) -> RegionCode:
        bound = list(bound_names(statements))
        body: list[ast.stmt] = [ast.Global(bound)] if bound else []
        return RegionCode(
            number=len(self.regions),
            code=self._function_code([], [*body, *statements]),
            bound=tuple(bound),
            first_line=statements[0].lineno,
            last_line=max(each.end_lineno or each.lineno for each in statements),
        )

    def _traced_code(self, statements: Sequence[ast.stmt], bound: Sequence[str]) -> types.CodeType:
        """Return the code of a region's function for the direct frontend (see `RegionCode.traced`)."""
        last = statements[-1]
        value = [last.value] if isinstance(last, ast.Return) and last.value is not None else []
        results = ast.Tuple([ast.Call(ast.Name("locals", ast.Load()), [], []), *value], ast.Load())
        returned = ast.copy_location(ast.Return(ast.copy_location(results, last)), last)
        body = [*(statements[:-1] if value else statements), returned]
        before = set(read_first(statements, set()))
        return self._function_code([name for name in bound if name in before], body)

    def _function_code(self, arguments: Sequence[str], body: Sequence[ast.stmt]) -> types.CodeType:
        """Return the code of a function with the given names of arguments and the given body."""
        function = ast.FunctionDef(
            name="region",
            args=ast.arguments(
                posonlyargs=[], args=[ast.arg(name) for name in arguments], kwonlyargs=[], kw_defaults=[], defaults=[]
            ),
            body=list(body),
            decorator_list=[],
        )
        # IPython's tracebacks count the source lines from the first line of the code object. Code at module level
        # starts at line 1, so this function must start at line 1, too.
        function.lineno, function.col_offset = 1, 0
        function.end_lineno, function.end_col_offset = body[-1].end_lineno, body[-1].end_col_offset
        if hasattr(function, "type_params"):
            function.type_params = []
        module = ast.fix_missing_locations(ast.Module(body=[function], type_ignores=[]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outer = self.compile_tree(module, self.file, "exec")
        return _at_module_level(next(each for each in outer.co_consts if isinstance(each, types.CodeType)))


def _computes(statement: ast.stmt) -> bool:
    """Tell whether a statement does more than to bind, show or collect the values of variables."""
    return not all(isinstance(node, _PLAIN_NODES) for node in ast.walk(statement))


class _OwnCalls(ast.NodeTransformer):
    """Replaces the calls of the cell's functions in a statement that Python runs by calls of their compiled forms.

    A call whose arguments change in each round of a loop is not replaced, because each round would compile the function
    again.
    """

    def __init__(self, defined: Mapping[str, object], scope: Scope) -> None:
        self._defined = defined
        self._scope = scope
        self.replaced: dict[str, None] = {}

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Replace the called function if the cell defines it."""
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in self._defined and not any(map(self._scope.varies, (*node.args, *node.keywords))):
            self.replaced[name] = None
            node.func = ast.copy_location(ast.Constant(_REGION.format(name)), node.func)
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Visit the children of a node, unless the node opens a scope (a function, a class or a comprehension)."""
        scopes = (*_SCOPES, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        return node if isinstance(node, scopes) else super().generic_visit(node)


class _Replaced(ast.NodeTransformer):
    """Replaces the expression ``old`` by ``new``. The position in the text identifies ``old``."""

    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self._place = _place(old)
        self._new = new

    def visit(self, node: ast.AST) -> Any:
        """Return the new expression in place of the old one; visit the children of all other nodes."""
        if isinstance(node, ast.expr) and _place(node) == self._place:
            return self._new
        return self.generic_visit(node)


def _place(node: ast.expr) -> tuple[object, ...]:
    return (type(node), node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)


def _called(constant: str, where: ast.AST, *arguments: ast.expr) -> ast.expr:
    """Return an expression that calls a string constant. `linked` later replaces the constant by a callable.

    ``where`` is the node whose position in the text the expression gets.
    """
    function = ast.copy_location(ast.Constant(constant), where)
    return ast.fix_missing_locations(ast.copy_location(ast.Call(function, list(arguments), []), where))


def _at_module_level(code: types.CodeType) -> types.CodeType:
    """Rename a region's code, and the functions that the region defines, as if they were at module level.

    The region itself gets the name ``<module>``. A function that the region defines loses the prefix
    ``region.<locals>.`` of its qualified name. So tracebacks and ``__qualname__`` are as in eager.
    """
    prefix = f"{code.co_name}.<locals>."

    def renamed(inner: types.CodeType) -> types.CodeType:
        constants = tuple(renamed(each) if isinstance(each, types.CodeType) else each for each in inner.co_consts)
        return inner.replace(co_consts=constants, co_qualname=inner.co_qualname.removeprefix(prefix))

    # Dynamo captures code only if one of the names in `co_names` refers to torch. So the name `TORCH` is added,
    # although no instruction reads it.
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
