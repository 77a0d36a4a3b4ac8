"""Read the comments behind the inputs and outputs of AOTAutograd's graphs: ``PlainAOTInput(idx=0)``."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aotlab.upstream.arguments import Argument
from aotlab.upstream.printed_graphs import PrintedGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptor:
    """An input of AOTAutograd's graph, or a value that a tangent belongs to.

    ``name`` is the user's name. ``kind`` is ``"input"``, ``"base"``, ``"size"``, ``"tangent"``, ``"output"`` or
    ``"other"`` (a random seed, a token). ``argument`` is the index of the argument that it is, or is made from.
    ``whole`` is the comment of the tensor that it is a part of, or its own comment.
    """

    name: str
    kind: str
    argument: int | None = None
    whole: str = ""


class Comments:
    """The comments behind the inputs and outputs of a graph, read with the names of its arguments."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        self._known = {
            each.comment: Descriptor(name=each.name, kind="input", argument=n, whole=each.comment)
            for n, each in enumerate(arguments)
        }

    def read(self, comment: str) -> Descriptor | None:
        """Return the meaning of a comment; None if the comment has another form."""
        try:
            return self._known.get(comment) or self._read(ast.parse(comment, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError):
            return None

    def inputs(self, graph: PrintedGraph | None) -> list[Descriptor]:
        """Return the meaning of each input of a graph. Without comments, they are the arguments in their order."""
        nodes = graph.inputs if graph is not None else []
        found = [self.read(node.comment or f"PlainAOTInput(idx={n})") for n, node in enumerate(nodes)]
        return [each or Descriptor(name=node.name, kind="other") for each, node in zip(found, nodes, strict=True)]

    def wholes(self, graph: PrintedGraph | None) -> dict[str, Descriptor]:
        """Return the inputs of a graph as AOTAutograd's metadata describes them: subclasses before they are unwrapped.

        The keys are the comments.
        """
        texts = dict.fromkeys(each.whole for each in self.inputs(graph) if each.whole)
        return {text: whole for text in texts if (whole := self.read(text)) is not None}

    def _read(self, node: ast.expr | None) -> Descriptor | None:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return None
        fields = {each.arg: each.value for each in node.keywords}
        kind, text = node.func.id, ast.unparse(node)
        if text in self._known:
            return self._known[text]
        value = fields.get("idx", fields.get("attr"))
        index = value.value if isinstance(value, ast.Constant) and isinstance(value.value, int | str) else ""
        if kind == "PlainAOTOutput":
            return Descriptor(name=f"out[{index}]", kind="output")
        inner = next((each for name, each in fields.items() if name not in ("idx", "attr")), None)
        of = self._read(inner)
        if of is None:
            return Descriptor(name=text, kind="other")
        if kind in ("ViewBaseAOTInput", "SyntheticBaseAOTInput"):
            return replace(of, name=f"base_of_{of.name}", kind="base", whole=text)
        if kind.startswith("Subclass"):
            is_attribute = "attr" in fields
            step = index if is_attribute else f"{'stride' if 'Stride' in kind else 'size'}({index})"
            return replace(of, name=f"{of.name}.{step}", kind=of.kind if is_attribute else "size")
        if kind == "TangentAOTInput":
            return replace(of, name=f"grad_of_{of.name}", kind="tangent", whole="")
        return replace(of, name=f"base_of_{of.name}") if kind == "IntermediateBaseAOTOutput" else of
