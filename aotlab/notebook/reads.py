"""Find the names that statements read before they bind them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from aotlab.notebook.classify import bound_names, own_nodes


def read_first(statements: Sequence[ast.stmt], settled: set[str]) -> Iterator[str]:
    """Yield the names that ``statements`` may read in their own scope before they bind them, in the order of the text.

    ``settled`` are the names that are bound already. Names that the statements bind in any case are added.
    """
    for each in statements:
        heads: Sequence[ast.AST] = [each]
        if isinstance(each, ast.For):
            heads = [each.iter]
        elif isinstance(each, ast.If):
            heads = [each.test]
        elif isinstance(each, ast.With):
            heads = each.items
        for node in own_nodes(heads):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in settled:
                yield node.id
        if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name) and each.target.id not in settled:
            yield each.target.id
        if isinstance(each, ast.For):
            yield from read_first(each.body, settled | bound_names([each.target]).keys())
        elif isinstance(each, ast.If):
            then, otherwise = set(settled), set(settled)
            yield from read_first(each.body, then)
            yield from read_first(each.orelse, otherwise)
            settled |= then & otherwise
        elif isinstance(each, ast.With):
            settled.update(bound_names(each.items))
            yield from read_first(each.body, settled)
        elif isinstance(each, ast.Assign | ast.AugAssign):
            settled.update(bound_names([each.target] if isinstance(each, ast.AugAssign) else each.targets))
