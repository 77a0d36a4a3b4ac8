"""Read graphs from the code that torch prints for them.

A log has no graph objects, only code like this::

    class GraphModule(torch.nn.Module):
        def forward(
            self,
            primals_1: "f32[4, 4][4, 1]cpu",  # PlainAOTInput(idx=0)
        ):
            # File: /tmp/program.py:4 in f, code: return x * 2
            mul: "f32[4, 4][4, 1]cpu" = torch.ops.aten.mul.Tensor(primals_1, 2);  primals_1 = None
            return (
                mul,  # PlainAOTOutput(idx=0)
            )

The code is parsed and not executed.
"""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from aotlab import _torch as internals
from aotlab.errors import UserLine
from aotlab.ir.specs import Size, SymExpr
from aotlab.report.model import TensorInfo

_FILE = re.compile(r"\s*# (?:Backward of forward node: )?File: (.*):(\d+) in (\S+), code: ?(.*)")
_NO_FILE = re.compile(r"\s*# No stacktrace")
_VIEW = re.compile(r"\b(?:slice|select|as_strided|as_strided_scatter)\.\w+$")
_TENSOR = re.compile(r"(\w+)\[([^\]]*)\](?:\[([^\]]*)\])?(.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedNode:
    """One node of a printed graph.

    ``annotation`` is the description of the node's value (``"f32[4, 4][4, 1]cpu"``), ``comment`` the comment behind an
    input, ``inputs`` the names of the nodes that it reads. ``arguments`` are the arguments of a view op and of a write
    through a view, after the first: numbers and lists of numbers, and None for anything else.
    """

    name: str
    op: str
    target: str
    annotation: str = ""
    comment: str = ""
    inputs: tuple[str, ...] = ()
    arguments: tuple[Any, ...] = ()
    line: UserLine | None = None


@dataclass(slots=True)
class PrintedGraph:
    """A printed graph: its nodes (the inputs first), and the name and the comment of each value that it returns.

    The name is empty for a value that is not a node.
    """

    nodes: list[PrintedNode] = field(default_factory=list)
    returned: list[tuple[str, str]] = field(default_factory=list)

    @property
    def inputs(self) -> list[PrintedNode]:
        """The inputs of the graph."""
        return [node for node in self.nodes if node.op == "placeholder"]


@lru_cache(maxsize=16)  # a graph is read for its stage and for the tables
def read_graph(code: str) -> PrintedGraph | None:
    """Read a printed graph. Return None if the text is no graph, for example because the log was cut off."""
    lines = code.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith("class ")), None)
    if start is None:
        return None
    lines = ["class GraphModule:", *lines[start + 1 :]]
    try:
        module = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return None
    body = module.body[0].body if isinstance(module.body[0], ast.ClassDef) else []
    forward = next((each for each in body if isinstance(each, ast.FunctionDef) and each.name == "forward"), None)
    return None if forward is None else _Reader(lines).read(forward)


class _Reader:
    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._graph = PrintedGraph()
        self._names: set[str] = set()

    def read(self, forward: ast.FunctionDef) -> PrintedGraph:
        """Read the arguments and the statements of a printed ``forward``."""
        for argument in forward.args.args[1:]:
            if argument.annotation is not None:
                self._input(argument.arg, argument.annotation, argument.lineno)
        line: UserLine | None = None
        last = max([forward.lineno, *(argument.end_lineno or 0 for argument in forward.args.args)])
        for statement in forward.body:
            for text in self._lines[last : statement.lineno - 1]:
                line = self._user_line(text, line)
            last = statement.end_lineno or statement.lineno
            self._statement(statement, line)
        return self._graph

    def _user_line(self, text: str, line: UserLine | None) -> UserLine | None:
        """Return the user's line that the comment ``text`` names; without such a comment, the last one holds."""
        if found := _FILE.match(text):
            return UserLine(file=found[1], line=int(found[2]), function=found[3].rstrip(","), code=found[4])
        return None if _NO_FILE.match(text) else line

    def _comment(self, lineno: int) -> str:
        return self._lines[lineno - 1].partition("  # ")[2].strip()

    def _input(self, name: str, annotation: ast.expr, lineno: int) -> None:
        self._add(name, "placeholder", name, _text(annotation), comment=self._comment(lineno))

    def _add(self, name: str, op: str, target: str, annotation: str = "", **others: object) -> None:
        self._names.add(name)
        self._graph.nodes.append(
            PrintedNode(name=name, op=op, target=target, annotation=annotation, **others)  # type: ignore[arg-type]
        )

    def _statement(self, statement: ast.stmt, line: UserLine | None) -> None:
        if isinstance(statement, ast.Return):
            values = statement.value.elts if isinstance(statement.value, ast.Tuple | ast.List) else [statement.value]
            for value in values:
                name = value.id if isinstance(value, ast.Name) else ""
                self._graph.returned.append((name, self._comment(value.lineno) if value is not None else ""))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if statement.value is None:  # a joint graph lists its inputs in this form
                self._input(statement.target.id, statement.annotation, statement.lineno)
            else:
                self._op(statement.target.id, statement.value, _text(statement.annotation), line)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            self._op(statement.targets[0].id, statement.value, "", line)

    def _op(self, name: str, value: ast.expr, annotation: str, line: UserLine | None) -> None:
        if isinstance(value, ast.Constant) and value.value is None:
            return  # the code deletes a value that it does not need any more
        read = [each.id for each in ast.walk(value) if isinstance(each, ast.Name) and each.id in self._names]
        target = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if isinstance(value, ast.Subscript):
            target = "getitem"
        elif isinstance(value, ast.Name | ast.Attribute) and not read:
            target = ast.unparse(value)
        self._add(
            name,
            "call_function" if isinstance(value, ast.Call) or read else "get_attr",
            re.sub(r"^(?:torch\.ops\.(?:higher_order\.)?|self\.)", "", target) or ast.unparse(value),
            annotation,
            inputs=tuple(dict.fromkeys(read)),
            arguments=tuple(map(_literal, value.args[1:]))
            if isinstance(value, ast.Call) and _VIEW.search(target)
            else (),
            line=line,
        )


def _literal(argument: ast.expr) -> Any:
    try:
        return ast.literal_eval(argument)
    except (ValueError, TypeError):
        return None


def _text(annotation: ast.expr) -> str:
    return str(annotation.value) if isinstance(annotation, ast.Constant) else ""


def tensor_of(annotation: str, *, requires_grad: bool = False) -> TensorInfo | None:
    """Read the description of a tensor, for example ``f32[4, s0][s0, 1]cpu``; return None for anything else.

    The offset of the tensor is unknown and given as 0.
    """
    found = _TENSOR.fullmatch(annotation)
    dtype = internals.DTYPES_BY_ABBREVIATION.get(found[1]) if found else None
    if found is None or dtype is None:
        return None
    shape, stride = _sizes(found[2]), _sizes(found[3] or "")
    known = [size for size in shape if isinstance(size, int)]
    product = " * ".join([*map(str, shape), str(dtype.itemsize)])
    return TensorInfo(
        dtype=str(dtype).removeprefix("torch."),
        device=found[4],
        shape=shape,
        stride=stride,
        nbytes=math.prod(known) * dtype.itemsize if len(known) == len(shape) else SymExpr(expression=product),
        requires_grad=requires_grad,
    )


def _sizes(text: str) -> tuple[Size, ...]:
    sizes = [each.strip() for each in text.split(",") if each.strip()]
    return tuple(int(size) if size.lstrip("-").isdigit() else SymExpr(expression=size) for size in sizes)
