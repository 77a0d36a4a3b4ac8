"""Walk, describe, check and print fx graphs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from aotlab._torch import ASSERTIONS, TORCHS_OWN, UNSAFE_VIEW, OpOverload, has_effects
from aotlab.errors import GraphInvariantError, UserLine
from aotlab.ir.specs import Size, StorageNumbers, TensorSpec, size_of, spec_of

Phase = Literal["forward", "backward"]

#: A key of ``node.meta``. It marks a node that must not be removed even if no node uses its result, because the node
#: may raise or have side effects.
STAYS = "stays"
#: A key of ``node.meta``. It marks a copy that a partitioner inserted, so that the backward reads the value from before
#: any write by the caller. ``node.meta["saved_value"]`` is the fake tensor of the original.
COPY = "copy_for_recomputation"

_VARIABLE = re.compile(r"[LG]\['(\w+)'\](.*)")
#: The prefixes by which the frontends and Dynamo refer to the compiled module: ``self.layer``, ``fn.layer``.
_ITSELF = re.compile(r"(?:self|fn)(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """The description of one fx node; it holds no reference to the graph.

    ``op`` is the kind of the node (``fx.Node.op``), and ``target`` the full name of the op that it calls. ``phase`` is
    the half of the trace in which the node was recorded. ``spec`` describes the node's value; it is None if the value
    is not a tensor. ``inputs`` are the names of the nodes that it reads, and ``users`` is the number of nodes that read
    it. ``line`` is the user line, and ``module`` the path of the ``nn.Module`` that called the op. A node of the
    backward has the line and the module of the forward op that it differentiates. ``storages`` has the number and the
    size in bytes of each storage of the node's value, which may be several tensors. Nodes of one graph that share
    memory have equal numbers.
    """

    name: str
    op: str
    target: str
    phase: Phase
    spec: TensorSpec | None
    inputs: tuple[str, ...]
    users: int
    line: UserLine | None
    module: str
    storages: tuple[tuple[int, Size], ...] = ()


def shares_memory(node: NodeRecord, inputs: Iterable[NodeRecord]) -> bool:
    """Tell whether a node that reads ``inputs`` allocates no memory: its result is a view, or an item of a result."""
    return node.op == "call_function" and set(node.storages).issubset(each for one in inputs for each in one.storages)


def target_name(target: object) -> str:
    """Return the name of a node's target: ``aten.add.Tensor``, ``operator.getitem``, or an attribute path."""
    if isinstance(target, str | OpOverload):
        return str(target)
    module = getattr(target, "__module__", "") or ""
    return f"{module.removeprefix('_')}.{getattr(target, '__name__', target)}"


def line_of(node: fx.Node) -> UserLine | None:
    """Return the user line that caused ``node``, or None if it is not known."""
    line = node.meta.get("user_line")
    if callable(line):
        line = node.meta["user_line"] = line()
    return line if isinstance(line, UserLine) else None


def module_of(node: fx.Node) -> str:
    """Return the path of the innermost module that ran an op, such as ``transformer.h.3.mlp``, or an empty string.

    If the user compiled a module, the path is relative to this module. Otherwise the path begins with the name of the
    variable that holds the outermost module.
    """
    stack = node.meta.get("nn_module_stack")
    path = expression_of(next(reversed(stack.values()))[0]) if stack else None
    return "" if path is None else _ITSELF.sub("", path)


def expression_of(source: str) -> str | None:
    """Turn the name of a Dynamo guard source, ``L['net']._modules['l']``, into the expression ``net.l``.

    Return None if the name does not begin with a local or global variable.
    """
    match = _VARIABLE.fullmatch(source)
    if match is None:
        return None
    name = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", match[1] + match[2])
    return re.sub(r"getattr\((\w+), '(\w+)'\)", r"\1.\2", name)


def node_records(graph: fx.Graph) -> tuple[NodeRecord, ...]:
    """Describe all nodes of ``graph`` in order."""
    numbers = StorageNumbers()
    return tuple(
        NodeRecord(
            name=node.name,
            op=node.op,
            target=target_name(node.target),
            phase=node.meta.get("phase", "forward"),
            spec=spec_of(value) if isinstance(value := node.meta.get("val"), torch.Tensor) else None,
            inputs=tuple(n.name for n in node.all_input_nodes),
            users=len(node.users),
            line=line_of(node),
            module=module_of(node),
            storages=_storages_of(node, numbers),
        )
        for node in graph.nodes
    )


def captured_records(graph: fx.Graph, locate: Callable[[str | None], UserLine | None]) -> tuple[NodeRecord, ...]:
    """Describe all nodes of a graph that Dynamo captured. ``locate`` finds the user line of a node's stack trace."""
    return tuple(
        replace(
            record,
            spec=spec_of(value) if isinstance(value := node.meta.get("example_value"), torch.Tensor) else None,
            line=locate(node.meta.get("stack_trace")),
        )
        for node, record in zip(graph.nodes, node_records(graph), strict=True)
    )


def _storages_of(node: fx.Node, numbers: StorageNumbers) -> tuple[tuple[int, Size], ...]:
    value = node.meta.get("val")
    storages: dict[int, Size] = {}
    for tensor in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(tensor, torch.Tensor) and (number := numbers.number(tensor)) is not None:
            storages[number] = size_of(tensor.untyped_storage().nbytes())
    return tuple(storages.items())


def phase_of(node: fx.Node) -> Phase:
    """Return the half of the trace in which a node was recorded. Upstream stores it as ``partitioner_tag``."""
    phase: Phase | None = node.meta.get("phase")
    return phase or ("backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward")


@functools.cache
def is_view_op(target: object) -> bool:
    """Tell from an op's schema whether its results (one or several) are views of its first argument."""
    if not isinstance(target, OpOverload) or not target._schema.arguments or not target._schema.returns:
        return False
    first, result = target._schema.arguments[0].alias_info, target._schema.returns[0].alias_info
    return first is not None and not first.is_write and result is not None


def is_view(node: fx.Node) -> bool:
    """Tell whether a node calls a view op that returns a single view; ``split``, for example, returns several."""
    return is_view_op(node.target) and isinstance(node.meta.get("val"), torch.Tensor)


def moves_nothing(target: OpOverload) -> bool:
    """Tell whether an op copies no data: a view op, or `aten._unsafe_view`, whose schema does not declare the alias."""
    return target is UNSAFE_VIEW or is_view_op(target)


@functools.cache
def is_random(target: object) -> bool:
    """Tell whether an op draws from a random generator, or reads or sets the state of a generator."""
    if not isinstance(target, OpOverload) or target.overloadpacket.__name__.endswith("attention_backward"):
        return False  # attention's backward reuses the random values of the forward, although its tags say otherwise
    return torch.Tag.nondeterministic_seeded in target.tags


@functools.cache
def may_have_effects(target: object) -> bool:
    """Tell whether an op may have side effects: a user's custom op, or an op that is registered as having effects."""
    if not isinstance(target, OpOverload) or target in ASSERTIONS:
        return False
    return target.namespace not in (*TORCHS_OWN, "aotlab") or has_effects(target)


def nodes_in(modules: Iterable[fx.GraphModule]) -> Iterator[fx.Node]:
    """Iterate over the nodes of graphs, and of the graphs in them: the functions that higher-order ops take."""
    graphs = (each.graph for module in modules for each in module.modules() if isinstance(each, fx.GraphModule))
    return (node for graph in graphs for node in graph.nodes)


def drop_unused(graph: fx.Graph, stays: Callable[[fx.Node], bool] | None = None) -> None:
    """Remove the nodes whose results are not used, except nodes for which ``stays`` (default: `must_stay`) is true.

    This function does not change nested graph modules (the functions that a higher-order op calls). Torch's own pass,
    ``eliminate_dead_code``, would change them.
    """
    for node in reversed(graph.nodes):
        if not node.users and not (stays or must_stay)(node):
            graph.erase_node(node)


def must_stay(node: fx.Node) -> bool:
    """Tell whether a node must stay in a forward graph even if no node uses its result."""
    if node.op in ("placeholder", "output"):
        return True
    if not isinstance(node.target, OpOverload):
        return STAYS in node.meta
    return is_random(node.target) or node.target._schema.is_mutable or node.target in ASSERTIONS or STAYS in node.meta


def op_count(graph: fx.Graph) -> int:
    """Count the calls in ``graph``, without placeholders and the output."""
    return sum(node.op == "call_function" for node in graph.nodes)


def readable(module: fx.GraphModule, name: str) -> str:
    """Return the code of ``module`` as a function ``name``, followed by the code of its nested graph modules.

    Comments in the code show the shapes of the values, and the values of the inputs that are symbolic sizes.
    """
    body = module.graph.python_code("self", verbose=False).src
    values = {node.name: node.meta.get("val") for node in module.graph.nodes}
    shapes = {name: str(spec_of(value)) for name, value in values.items() if isinstance(value, torch.Tensor)}
    lines = []
    for line in body.strip().splitlines():
        stripped = line.split(";  ")[0].rstrip()
        result_name = stripped.strip().split(" = ")[0]
        lines.append(
            f"{stripped}  # {shapes[result_name]}" if result_name in shapes and " = " in stripped else stripped
        )
    sizes = ", ".join(f"{n.name}: {size_of(n.meta['val'])}" for n in filter(is_size, module.graph.nodes))
    lines[0] += f"  # {sizes}" * bool(sizes)
    held = [readable(each, name) for name, each in module.named_children() if isinstance(each, fx.GraphModule)]
    return "\n\n".join(["\n".join(lines).replace("def forward(", f"def {name}(", 1), *held])


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """Return the placeholders of ``graph`` in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def is_size(node: fx.Node) -> bool:
    """Tell whether a node is a placeholder for a symbolic size or number.

    Forward and backward graphs both have such placeholders.
    """
    return node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat)


def output_args(graph: fx.Graph) -> tuple[fx.Node | None, ...]:
    """Return the nodes that ``graph`` returns, as a flat tuple."""
    returned: Any = graph.output_node().args[0]
    return tuple(returned)


def return_from(graph: fx.Graph, outputs: Sequence[fx.Node | None]) -> None:
    """Make ``graph`` return the nodes ``outputs`` in place of its present outputs."""
    graph.output_node().args = (tuple(outputs),)


def check_graph(module: fx.GraphModule, name: str, *, writes_inputs: bool = False) -> None:
    """Check that a graph is well-formed and functional. With ``writes_inputs``, its ops may write to placeholders.

    ``name`` is the graph's name in errors. Raises `GraphInvariantError` if an op writes to any other value, if a
    placeholder follows an op, or if a placeholder has no fake value. Torch's ``lint`` raises if a node uses a value
    before the value is computed.
    """
    module.graph.lint()
    body = False
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if body:
                raise GraphInvariantError(f"{name} graph: placeholder `{node.name}` comes after an op")
            if not isinstance(node.meta.get("val"), torch.Tensor | torch.SymInt | torch.SymFloat):
                raise GraphInvariantError(f"{name} graph: placeholder `{node.name}` has no value")
            continue
        body = True
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            target = node.args[0] if node.args else None
            if not (writes_inputs and isinstance(target, fx.Node) and target.op == "placeholder"):
                raise GraphInvariantError(f"{name} graph: `{node.name}` ({node.target}) writes to its argument")


def copied_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph and of the graphs inside of it. The tensors in their attributes are not copied."""
    copied = fx.GraphModule(graph, deepcopy(graph.graph))
    for name, inner in list(copied.named_children()):
        if isinstance(inner, fx.GraphModule):
            setattr(copied, name, copied_graph(inner))
    return copied
