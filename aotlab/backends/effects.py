"""Ops with effects besides their results, in a graph for Inductor, which leaves out and reorders what nobody uses.

    say(x)                                       # becomes
    token, result = with_effects(token, say, x)

Each takes the token of the one before it; the first is made, the last is sunk.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from aotlab import _torch as internals
from aotlab._torch import FakeTensorMode
from aotlab.capture.signals import RunEagerly
from aotlab.ir.graphs import acts


def thread_tokens(module: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
    """Let each op with effects take the token of the one before it; raise `RunEagerly` for one that would be lost."""
    graph, token = module.graph, None
    with fake_mode:
        value = torch.empty(0)

    def add(target: Any, args: tuple[Any, ...], val: Any, kwargs: Any = None) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta["val"] = val
        return made

    for node in [node for node in graph.nodes if node.op == "call_function" and acts(node.target)]:
        found = node.meta.get("val")
        if not internals.has_effects(node.target):
            if found is None:
                raise RunEagerly(f"`{node.target}` returns nothing, and is not registered to have effects")
            continue
        results = found if isinstance(found, tuple) else (found,)
        with graph.inserting_before(node):
            token = add(internals.MAKE_TOKEN, (), value) if token is None else token
            call = add(internals.WITH_EFFECTS, (token, node.target, *node.args), (value, *results), node.kwargs)
            call.meta = node.meta | call.meta
            token = add(operator.getitem, (call, 0), value)
            if results is not found:
                node.replace_all_uses_with(add(operator.getitem, (call, 1), found))
        for user in list(node.users):  # which take items of a tuple
            user.args = (call, user.args[1] + 1)
        graph.erase_node(node)
    if token is not None:
        with graph.inserting_before(next(iter(reversed(graph.nodes)))):
            add(internals.SINK_TOKENS, ([token],), None)
