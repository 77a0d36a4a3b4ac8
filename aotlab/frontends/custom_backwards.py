"""The backward of a user's `torch.autograd.Function` as Dynamo wrote it, when it is to be differentiated itself.

Dynamo writes the backward between a node that switches grad mode off and one that switches it on; without those two the
graph is the user's backward, unless that switches grad mode itself, of which nothing is left in the graph. What the
user wrote is known by the stack traces of the graph's nodes: a function with a ``with`` statement, or one that mentions
grad mode, is not differentiated.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import fx

from aotlab import _torch as internals
from aotlab.errors import DoubleBackwardError

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in ')
_TORCH = str(Path(torch.__file__).parent)
_GRAD_MODE = {"no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "_set_grad_enabled"}


def is_once_differentiable(graph: fx.GraphModule) -> bool:
    """Tell whether the user's backward is marked with `torch.autograd.function.once_differentiable`."""
    return any(internals.ONCE_DIFFERENTIABLE in node.meta.get("stack_trace", "") for node in graph.graph.nodes)


def switches_around(graph: fx.GraphModule, called_at: str) -> list[fx.Node]:
    """Return the nodes by which Dynamo runs a backward without grad mode.

    ``called_at`` is the stack trace of the call of the user's function.

    Raises `DoubleBackwardError`: the user's backward may switch grad mode itself.
    """
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    switches = [node for node in calls if node.target is internals.SET_GRAD_ENABLED]
    around = [(calls[0], False), (calls[-1], True)] if len(calls) > 1 else []
    known = not switches or switches == [node for node, is_on in around if node.args == (is_on,)]
    frames = {frame for node in graph.graph.nodes for frame in _frames_inside(node, called_at)}
    if not known or any(_may_switch(file, line) for file, line in frames):
        raise DoubleBackwardError(
            "the backward of a torch.autograd.Function is to be differentiated, and has a `with` statement or may "
            "switch grad mode",
            why="Dynamo writes it as if grad mode were off around it",
            suggestion="take aotlab.compile(…, frontend='direct'), or keep the Function out of the compiled one",
        )
    return switches


def _frames_inside(node: fx.Node, called_at: str) -> Iterator[tuple[str, int]]:
    """List the frames of a node that lie within the user's backward."""
    outer = len(_FRAME.findall(called_at))
    for found in _FRAME.findall(node.meta.get("stack_trace") or "")[outer:]:
        yield found[0], int(found[1])


@cache
def _may_switch(file: str, line: int) -> bool:
    """Tell whether the function at a line of code may switch grad mode; torch's own do so in one place."""
    if file.startswith(_TORCH):
        return file.endswith("_contextlib.py")
    lines = linecache.getlines(file)
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        return True
    functions = (part for part in ast.walk(tree) if isinstance(part, (ast.FunctionDef, ast.Lambda)))
    around = [each for each in functions if each.lineno <= line <= (each.end_lineno or 0)]
    innermost = max(around, key=lambda each: each.lineno, default=None)
    if innermost is None:
        return True
    parts = list(ast.walk(innermost))
    names = {getattr(part, "attr", getattr(part, "id", None)) for part in parts}
    return bool(names & _GRAD_MODE) or any(isinstance(part, (ast.With, ast.AsyncWith)) for part in parts)
