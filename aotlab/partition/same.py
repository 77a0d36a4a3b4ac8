"""Common subexpressions: which nodes of a joint graph compute what an earlier one has computed."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from typing import Any

from torch import Tensor, fx

from aotlab._torch import OpOverload
from aotlab.ir.graphs import phase_of
from aotlab.ir.specs import StorageNumbers
from aotlab.partition.costs import must_not_run_twice


def common_subexpressions(graph: fx.Graph, returned: Iterable[fx.Node | None]) -> dict[fx.Node, fx.Node]:
    """Find nodes that an earlier node of the same half can stand for: from each to the one that does.

    Forward and backward are never merged: what the backward computes once more may be a checkpoint's. Nothing that
    shares memory with what is ``returned`` is merged: two results that eager keeps apart must not become one.
    """
    storages = StorageNumbers()
    kept = {memory for node in returned if isinstance(node, fx.Node) for memory in _memory(node, storages)}
    same: dict[fx.Node, fx.Node] = {}
    known: dict[Hashable, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not _is_pure(node) or not kept.isdisjoint(_memory(node, storages)):
            continue
        try:
            key = (node.target, phase_of(node), _key(node.args, same), _key(node.kwargs, same))
            first = known.setdefault(key, node)
        except TypeError:  # an argument that cannot be hashed
            continue
        if first is not node:
            same[node] = first
    return same


def _is_pure(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and not must_not_run_twice(node)


def _memory(node: fx.Node, storages: StorageNumbers) -> set[int | None]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return {storages.number(each) for each in values if isinstance(each, Tensor)} - {None}


def _key(value: Any, same: dict[fx.Node, fx.Node]) -> Hashable:
    """Make arguments comparable; ``1``, ``True`` and ``1.0`` are different arguments, as are ``0.0`` and ``-0.0``."""
    if isinstance(value, fx.Node):
        return same.get(value, value)
    if isinstance(value, (list, tuple)):
        return (type(value), *(_key(each, same) for each in value))
    if isinstance(value, dict):
        return tuple((name, _key(each, same)) for name, each in sorted(value.items()))
    if isinstance(value, (float, complex)):
        return (type(value), repr(value))
    hash(value)
    return (type(value), value)
