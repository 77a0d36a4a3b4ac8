"""Walk, describe, check and print fx graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from aotlab._torch import ASSERTIONS, TORCHS_OWN, UNSAFE_VIEW, OpOverload, has_effects
from aotlab.errors import GraphInvariantError, UserLine
from aotlab.ir.specs import TensorSpec, size_of, spec_of

Phase = Literal["forward", "backward"]

#: In the ``meta`` of a node that nobody uses and that stays all the same, since it may raise or do something besides.
STAYS = "stays"
#: In the ``meta`` of a copy that a partitioner made; the value that it copies is its "saved_value".
COPY = "copy_for_recomputation"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One fx node, without the graph.

    ``target`` is the op's full name, ``phase`` says during which half of the trace it was recorded, ``spec``
    describes its value where that is a tensor, ``users`` counts its users, ``line`` is the user's line that caused it
    (for a node of the backward, the line of the forward op that it differentiates).
    """

    name: str
    op: str
    target: str
    phase: Phase
    spec: TensorSpec | None
    inputs: tuple[str, ...]
    users: int
    line: UserLine | None


def target_name(target: object) -> str:
    """Name a node's target: ``aten.add.Tensor``, ``operator.getitem``, or an attribute path."""
    if isinstance(target, str | OpOverload):
        return str(target)
    module = getattr(target, "__module__", "") or ""
    return f"{module.removeprefix('_')}.{getattr(target, '__name__', target)}"


def line_of(node: fx.Node) -> UserLine | None:
    """Find the user's line that caused ``node``."""
    found = node.meta.get("user_line")
    if callable(found):
        found = node.meta["user_line"] = found()
    return found if isinstance(found, UserLine) else None


def node_records(graph: fx.Graph) -> tuple[NodeRecord, ...]:
    """Describe all nodes of ``graph`` in order."""
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
        )
        for node in graph.nodes
    )


def phase_of(node: fx.Node) -> Phase:
    """Tell during which half of the trace a node was recorded; upstream's tracer writes it down in a tag."""
    phase: Phase | None = node.meta.get("phase")
    return phase or ("backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward")


@functools.cache
def is_view_op(target: object) -> bool:
    """Tell whether the results of an op are views, one or several, of its first argument, by its schema."""
    if not isinstance(target, OpOverload) or not target._schema.arguments or not target._schema.returns:
        return False
    first, result = target._schema.arguments[0].alias_info, target._schema.returns[0].alias_info
    return first is not None and not first.is_write and result is not None


def is_view(node: fx.Node) -> bool:
    """Tell whether a node makes one view of its first argument."""
    return is_view_op(node.target) and isinstance(node.meta.get("val"), torch.Tensor)


def moves_nothing(target: OpOverload) -> bool:
    """Tell whether an op's results are views, one or several, or would be if its schema said so."""
    return target is UNSAFE_VIEW or is_view_op(target)


@functools.cache
def is_random(target: object) -> bool:
    """Tell whether an op draws from a random generator, or reads or sets its state."""
    if not isinstance(target, OpOverload) or target.overloadpacket.__name__.endswith("attention_backward"):
        return False  # attention's backwards take what the forward drew, whatever their tags say
    return torch.Tag.nondeterministic_seeded in target.tags


@functools.cache
def acts(target: object) -> bool:
    """Tell whether an op may do more than compute its result: one of the user's, or registered to have effects."""
    if not isinstance(target, OpOverload) or target in ASSERTIONS:
        return False
    return target.namespace not in (*TORCHS_OWN, "aotlab") or has_effects(target)


def drop_unused(graph: fx.Graph, stays: Callable[[fx.Node], bool] | None = None) -> None:
    """Drop the nodes that nobody uses and that need not stay, but none of the graphs of functions, as torch would."""
    for node in reversed(graph.nodes):
        if not node.users and not (stays or must_stay)(node):
            graph.erase_node(node)


def must_stay(node: fx.Node) -> bool:
    """Tell whether a node stays in a forward though nobody uses it."""
    if node.op in ("placeholder", "output"):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    return is_random(node.target) or node.target._schema.is_mutable or node.target in ASSERTIONS or STAYS in node.meta


def op_count(graph: fx.Graph) -> int:
    """Count the calls in ``graph``: neither placeholders nor the output."""
    return sum(node.op == "call_function" for node in graph.nodes)


def readable(module: fx.GraphModule, name: str) -> str:
    """Print ``module`` as Python with shapes behind values, sizes behind inputs, and the graphs that it holds."""
    body = module.graph.python_code("self", verbose=False).src
    values = {node.name: node.meta.get("val") for node in module.graph.nodes}
    shapes = {name: str(spec_of(value)) for name, value in values.items() if isinstance(value, torch.Tensor)}
    lines = []
    for line in body.strip().splitlines():
        stripped = line.split(";  ")[0].rstrip()
        left = stripped.strip().split(" = ")[0]
        lines.append(f"{stripped}  # {shapes[left]}" if left in shapes and " = " in stripped else stripped)
    sizes = ", ".join(f"{n.name}: {size_of(n.meta['val'])}" for n in filter(is_size, module.graph.nodes))
    lines[0] += f"  # {sizes}" * bool(sizes)
    held = [readable(each, name) for name, each in module.named_children() if isinstance(each, fx.GraphModule)]
    return "\n\n".join(["\n".join(lines).replace("def forward(", f"def {name}(", 1), *held])


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    """List the placeholders of ``graph`` in order."""
    return [node for node in graph.nodes if node.op == "placeholder"]


def is_size(node: fx.Node) -> bool:
    """Tell whether a placeholder is a size or a number, which both halves take."""
    return node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat)


def output_args(graph: fx.Graph) -> tuple[fx.Node | None, ...]:
    """Return what ``graph`` returns, as a flat tuple."""
    returned: Any = graph.output_node().args[0]
    return tuple(returned)


def return_from(graph: fx.Graph, outputs: Sequence[fx.Node | None]) -> None:
    """Let ``graph`` return something else."""
    graph.output_node().args = (tuple(outputs),)


def check_graph(module: fx.GraphModule, name: str, *, writes_inputs: bool = False) -> None:
    """Check that a graph, ``name`` in errors, is well-formed and functional, but for ``writes_inputs`` by ``copy_``.

    Raises `GraphInvariantError`: a node uses a value before it is made, writes to a value, or a placeholder comes after
    an op.
    """
    module.graph.lint()
    body = False
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if body:
                raise GraphInvariantError(f"{name} graph: placeholder `{node.name}` stands after an op")
            if not isinstance(node.meta.get("val"), torch.Tensor | torch.SymInt | torch.SymFloat):
                raise GraphInvariantError(f"{name} graph: placeholder `{node.name}` has no value")
            continue
        body = True
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            target = node.args[0] if node.args else None
            if not (writes_inputs and isinstance(target, fx.Node) and target.op == "placeholder"):
                raise GraphInvariantError(f"{name} graph: `{node.name}` ({node.target}) writes to its argument")
