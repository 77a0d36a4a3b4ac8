"""Regions: parts of a graph with a memory budget of their own, by the modules that made them.

    region_budgets={"layers.*": 0.0, "layers.3": 1.0, Attention: 0.5}

A region is named by a path in the compiled module, in which ``*`` stands for one name and ``?`` for one letter, or by a
class; what runs inside of a module belongs to it, a view to where the memory was made. Where a function calls
``model(x)``, both ``layers.0`` and ``model.layers.0`` name the layer. Of two modules around an op the inner one counts,
of two names of one module the later one. A budget is for all modules of its entry together: between what their values
take when time alone counts and the least that they can take while what is kept elsewhere stays.

Behind Dynamo, what has one mark of ``torch.autograd.graph.region_activation_memory_budget(budget)`` (from torch 2.13)
is a region, too, unless it belongs to one by its module.
"""

from __future__ import annotations

import functools
import operator
import re
import warnings
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import fx, nn

from aotlab import _torch as internals
from aotlab.errors import UsageError
from aotlab.ir.graphs import moves_nothing

#: A path of a module, or a class of modules.
Name = str | type[nn.Module]


class Region(NamedTuple):
    """Some values of a graph, and the part of the memory that they would take which they may take."""

    budget: float
    nodes: frozenset[fx.Node]


class Budgets:
    """Knows the budget of each node; `UsageError`: one of ``region_budgets`` is no number from 0 to 1."""

    def __init__(self, memory_budget: float, region_budgets: Mapping[Name, float]) -> None:
        given: list[tuple[Any, Any]] = [("memory_budget", memory_budget), *region_budgets.items()]
        for where, budget in given:
            called = where if where == "memory_budget" else f"region_budgets[{_name(where)}]"
            if not isinstance(budget, (int, float)) or isinstance(budget, bool) or not 0 <= budget <= 1:
                raise UsageError(f"{called} is a number from 0 (least memory) to 1 (least time), not {budget}")
        self._rest = memory_budget
        self._named = tuple(region_budgets.items())
        self._found: dict[tuple[str, Any], list[int]] = {}  # of modules seen, the numbers of their names

    def of(self, node: fx.Node) -> float:
        """Return the budget of the region in which a node is."""
        return self._region(node)[1]

    def regions(self, nodes: Iterable[fx.Node]) -> list[Region]:
        """Sort nodes into regions: those of no region first, then those of marks, and those named, in their order."""
        found: dict[tuple[int, float], set[fx.Node]] = {}
        for node in nodes:
            found.setdefault(self._region(node), set()).add(node)
        return [Region(budget=key[1], nodes=frozenset(found[key])) for key in sorted(found)]

    def warn_of_unknown(self, graph: fx.Graph) -> None:
        """Warn of regions that are nowhere in a graph."""
        for node in graph.nodes if self._named else ():
            self._region(node)
        there = {number for numbers in self._found.values() for number in numbers}
        paths = [f"`{path}`" for path in sorted({path for path, _ in self._found if path})]
        known = ", ".join(paths[:8]) + (" and others" if len(paths) > 8 else "")
        has = f"which has {known}" if known else "which says of no op by which module it was made"
        for number, (name, _) in enumerate(self._named):
            if number not in there:
                text = f"region_budgets[{_name(name)}] names no module of this graph, {has}"
                warnings.warn(text, UserWarning, stacklevel=2)

    def _region(self, node: fx.Node) -> tuple[int, float]:
        node = _owner(node)
        for path, kind in reversed(module_stack(node)) if self._named else ():
            key = (path, kind)
            if key not in self._found:
                self._found[key] = [n for n, (name, _) in enumerate(self._named) if _names(name, path, kind)]
            if self._found[key]:
                number = self._found[key][-1]
                return number, self._named[number][1]
        marked = internals.marked_budget(node.meta)
        return (-2, self._rest) if marked is None else (-1, marked)


def _owner(node: fx.Node) -> fx.Node:
    """Return the node that made the memory which a node views."""
    while True:
        maker = node.args[0] if node.target is operator.getitem else node  # an item is a view if its maker makes views
        if not isinstance(maker, fx.Node) or not isinstance(maker.target, internals.OpOverload):
            return node
        source = maker.args[0] if moves_nothing(maker.target) else None
        if not isinstance(source, fx.Node):
            return node
        node = source


def module_stack(node: fx.Node) -> list[tuple[str, Any]]:
    """Return the modules in which a node was made, the outermost first: path (``self.layers.0``) and class."""
    stack = node.meta.get("nn_module_stack")
    return [(_readable(path), kind) for path, kind in stack.values()] if stack else []


@functools.cache
def _readable(path: str) -> str:
    path = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", path)
    return re.sub(r"^[LG]\['(\w+)'\]", r"\1", path)


def _names(name: Name, path: str, kind: Any) -> bool:
    if not isinstance(name, str):
        return isinstance(kind, type) and issubclass(kind, name)
    pattern = name.split(".")
    for way in (path, path.partition(".")[2]):
        parts = way.split(".")
        if way and len(parts) == len(pattern) and all(map(fnmatchcase, parts, pattern)):
            return True
    return False


def _name(name: Name) -> str:
    return repr(name) if isinstance(name, str) else name.__qualname__
