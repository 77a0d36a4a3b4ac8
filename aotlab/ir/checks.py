"""The invariants that hold between stages."""

from __future__ import annotations

from torch import Tensor, fx

from aotlab._torch import OpOverload
from aotlab.errors import GraphInvariantError


def check_graph(module: fx.GraphModule, name: str, *, writes_inputs: bool = False) -> None:
    """Check that a graph is well-formed and functional.

    Parameters
    ----------
    module
        The graph.
    name
        How to call it in the error.
    writes_inputs
        Allow ``copy_`` into placeholders.

    Raises
    ------
    GraphInvariantError
        A node uses a value before it is made, writes to a value, or a placeholder comes after an op.
    """
    module.graph.lint()
    body = False
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if body:
                raise GraphInvariantError(f"{name} graph: placeholder `{node.name}` stands after an op")
            if not isinstance(node.meta.get("val"), Tensor):
                raise GraphInvariantError(f"{name} graph: placeholder `{node.name}` has no value")
            continue
        body = True
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            target = node.args[0] if node.args else None
            allowed = writes_inputs and isinstance(target, fx.Node) and target.op == "placeholder"
            if not allowed:
                raise GraphInvariantError(f"{name} graph: `{node.name}` ({node.target}) writes to its argument")
