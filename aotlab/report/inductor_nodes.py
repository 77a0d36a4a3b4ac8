"""Read the code that Inductor generated around its kernels, to see which buffers it allocates, reuses and frees.

    buf0 = empty_strided_cpu((8, 16), (16, 1), torch.float32)
    extern_kernels.mm(primals_1, primals_2, out=buf0)
    buf1 = buf0; del buf0  # reuse
    cpp_fused_relu_0(buf1)
    return (buf1, )

Each statement becomes a `NodeRecord`, so that `aotlab.report.memory` can treat the code as a graph. Inductor frees a
buffer after its last use, as the generated code of a graph does. So the statements with ``del`` are not needed.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from aotlab.ir.fx_graphs import NodeRecord
from aotlab.ir.specs import Size, SymExpr
from aotlab.report.text import known_size

if TYPE_CHECKING:
    from aotlab.backends.compile_stage import CompiledGraphRecord


def inductor_nodes(graph: CompiledGraphRecord) -> tuple[NodeRecord, ...]:
    """Return the statements of the generated code as nodes; empty if there is no such code, or if it cannot be read."""
    try:
        functions = [each for each in ast.walk(ast.parse(graph.wrapper or "")) if isinstance(each, ast.FunctionDef)]
        call = next(each for each in functions if each.name == "call")
        return _Reader(graph).read(list(_flat(call.body)))
    except (StopIteration, SyntaxError, KeyError, ValueError, AttributeError):
        return ()


def _flat(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, and the statements inside of ``with`` blocks."""
    for each in statements:
        if isinstance(each, ast.With):
            yield from _flat(each.body)
        else:
            yield each


@dataclass(slots=True)
class _Reader:
    """Turns the statements of one function into nodes.

    ``numbers`` maps each variable to the number of its storage, and ``values`` each symbolic size to its value in the
    traced call.
    """

    graph: CompiledGraphRecord
    nodes: list[NodeRecord] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)

    def read(self, statements: Sequence[ast.stmt]) -> tuple[NodeRecord, ...]:
        inputs = {node.name: node for node in self.graph.nodes if node.op == "placeholder"}
        asserted = {
            names[0]: (call.args[1], call.args[2])
            for each in statements
            if (call := _call(each)) is not None and ast.unparse(call.func) == "assert_size_stride"
            if (names := _names(call.args[0]))
        }
        for name, (shape, _) in asserted.items():
            spec = inputs[name].spec if name in inputs else None
            if spec is not None and isinstance(shape, ast.Tuple):
                sizes = zip(shape.elts, map(known_size, spec.shape), strict=False)
                self.values.update({each.id: size for each, size in sizes if isinstance(each, ast.Name)})
        makers = self._makers(statements)
        for each in statements:
            call, used = _call(each), _names(each)
            if isinstance(each, ast.Assign) and _names(each.value) == ["args"]:
                for name in _names(each.targets[0]):
                    self._add(inputs[name], inputs[name].storages)
            elif isinstance(each, ast.Return):
                returned = each.value.elts if isinstance(each.value, ast.Tuple) else []
                self._add(_node("output", "output", tuple([(_names(item) or [""])[0] for item in returned])), ())
            elif isinstance(each, ast.Assign) and isinstance(target := each.targets[0], ast.Name):
                maker = makers.get(target.id) or _node(target.id, "call_function", ())
                node = replace(maker, name=target.id, op="call_function", inputs=tuple(_names(each.value)))
                self._add(node, self._storages(target.id, each.value, asserted, maker))
            elif isinstance(each, ast.Expr) and call is not None and not ast.unparse(call.func).startswith("assert_"):
                self._add(_node(f"call_{len(self.nodes)}", "call_function", tuple(used)), ())
        return tuple(self.nodes)

    def _add(self, node: NodeRecord, storages: Sequence[tuple[int, Size]]) -> None:
        self.nodes.append(replace(node, storages=tuple(storages)))
        for number, _ in storages:
            self.numbers[node.name] = number

    def _makers(self, statements: Sequence[ast.stmt]) -> dict[str, NodeRecord]:
        """Map each variable to the graph's node that its first kernel computes, for its line and module.

        A kernel may be called several times, for example once for each layer of a network. Its nodes are listed call by
        call, so each call gets an equal part of the list.
        """
        by_name = {node.name: node for node in self.graph.nodes}
        nodes_of: dict[str, list[NodeRecord]] = {}
        for kernel in self.graph.kernels:
            known = [by_name[name] for name in kernel.nodes if name in by_name]
            nodes_of[_key(kernel.source) if kernel.language == "extern" else kernel.name] = known
        makers: dict[str, NodeRecord] = {}
        kernels = [_kernel(each) for each in statements]
        calls, done = Counter(kernels), Counter[str]()
        for each, kernel_name in zip(statements, kernels, strict=True):
            nodes = nodes_of.get(kernel_name) or nodes_of.get(ast.unparse(each), [])
            if kernel_name in nodes_of and len(nodes) % calls[kernel_name] == 0:
                size = len(nodes) // calls[kernel_name]
                nodes = nodes[size * done[kernel_name] :][:size]
                done[kernel_name] += 1
            lines = [node for node in nodes if node.line is not None] or nodes
            for name in _names(each) if lines else ():
                makers.setdefault(name, lines[-1])
        return makers

    def _storages(
        self, name: str, value: ast.expr, asserted: Mapping[str, tuple[ast.expr, ast.expr]], maker: NodeRecord
    ) -> Sequence[tuple[int, Size]]:
        """Return the storage of a variable: a new one, or the storage of another variable."""
        call = value if isinstance(value, ast.Call) else None
        function = "" if call is None else ast.unparse(call.func)
        number = len(self.nodes) + len(self.graph.nodes) * 8  # different from the numbers of the inputs
        if call is not None and function.startswith("empty_strided"):
            dtype = getattr(torch, ast.unparse(call.args[2]).removeprefix("torch."))
            return [(number, _size(call.args[0], call.args[1], dtype.itemsize, self.values))]
        if isinstance(value, ast.Name) or function in ("reinterpret_tensor", "alias"):
            source = _names(value if call is None else call.args[0])[0]
            return [(self.numbers[source], 0)] if source in self.numbers else []
        if name in asserted:
            shape, stride = asserted[name]
            return [(number, _size(shape, stride, self._itemsize(shape, maker), self.values))]
        return []

    def _itemsize(self, shape: ast.expr, maker: NodeRecord) -> int:
        """Return the size of an element of an extern op's result: the code has only the shape of the result."""
        text = ast.unparse(shape)
        specs = [each.spec for each in (maker, *self.graph.nodes) if each.spec is not None]
        same = [spec for spec in specs if str(tuple([str(size) for size in spec.shape])).replace("'", "") == text]
        return (same or specs)[0].dtype.itemsize


def _node(name: str, op: str, inputs: tuple[str, ...]) -> NodeRecord:
    return NodeRecord(
        name=name, op=op, target=name, phase="forward", spec=None, inputs=inputs, users=0, line=None, module=""
    )


def _kernel(statement: ast.stmt) -> str:
    """Return the name of the kernel that a statement calls; empty if it calls none."""
    call = _call(statement)
    return "" if call is None else ast.unparse(call.func).removesuffix(".run")


def _call(statement: ast.stmt) -> ast.Call | None:
    value = getattr(statement, "value", None)
    return value if isinstance(value, ast.Call) else None


def _names(node: ast.AST) -> list[str]:
    """Return the variables in a statement or expression, without the names of called functions."""
    called = {id(each.func) for each in ast.walk(node) if isinstance(each, ast.Call)}
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and id(each) not in called]


def _key(source: str) -> str:
    """Write a statement as `ast.unparse` does."""
    try:
        return ast.unparse(ast.parse(source))
    except SyntaxError:
        return source


def _size(shape: ast.expr, stride: ast.expr, itemsize: int, values: Mapping[str, int]) -> Size:
    """Return the bytes of a tensor's storage. ``values`` has the values of symbolic sizes."""
    try:
        # These are parts of the code that Inductor generated in this process, and that runs in any case.
        sizes, strides = (eval(ast.unparse(each), {"__builtins__": {}}, dict(values)) for each in (shape, stride))
    except (NameError, TypeError):
        return SymExpr(expression=ast.unparse(shape))
    if 0 in sizes:
        return 0
    return int(itemsize * (1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))))
