"""Ops with effects besides their results, of which each takes the token of the one before it.

    say(x)                                       # becomes
    token, result = with_effects(token, say, x)

In a backward the trace does so, where nothing else keeps them, and lets a gradient take the last token. In a forward
they stay as they are; Inductor, which leaves out and reorders what nobody uses, gets both with tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.errors import RefusedError
from aotlab.ir.graphs import Phase, acts
from aotlab.trace.edges import next_edges
from aotlab.trace.history import nodes_of, reachable
from aotlab.trace.recorder import Recorder
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.tape import Operation


def names_of_effects(operations: Sequence[Operation], phase: Phase) -> tuple[str, ...]:
    """Name the ops with effects of a phase, in order."""
    calls = [o.args[1] if o.target is internals.WITH_EFFECTS else o.target for o in operations if o.phase == phase]
    effectful = set(filter(internals.has_effects, set(calls)))
    return tuple(str(target) for target in calls if target in effectful)


def effects_in(
    operations: Sequence[Operation], error: type[RunEagerly | RefusedError] | None = None
) -> list[Operation]:
    """Return the ops with effects of a backward; or raise an error, if there are any."""
    found = [each for each in operations if acts(each.target) and internals.has_effects(each.target)]
    if found and error:
        what = f"a backward calls `{found[0].target}`, which has effects besides its results"
        raise error(what, suggestion="call it in the forward, to have it compiled")
    return found


def thread_backward(recorder: Recorder, part: Segment, gradients: dict[Exit, Tensor], first: int) -> None:
    """Thread the ops with effects that were recorded from ``first`` on; those on the way to some gradients are refused.

    Eager runs what is on the way to the gradients that are asked for, which nobody knows yet.
    """
    found = effects_in(recorder.tape.operations[first:])
    if not found:
        return
    token, ways = None, reachable(part)
    for operation in found:
        starts = [(node, 0) for node in nodes_of(part) if internals.sequence_of(node) == operation.sequence]
        behind = {edge for node in nodes_of(part, starts) for edge in next_edges(node)}
        if part.nodes is not None or recorder.has_checkpoints or not gradients or not ways <= behind:
            effects_in(found, RunEagerly)
    with internals.disable_torch_function(), internals.outside_of_trace():
        way = next(iter(gradients))
        gradients[way] = recorder.record(torch.ops.aten.clone.default, (gradients[way],), {})
        found.append(recorder.tape.operations[-1])
        for operation in found:
            results = operation.result if isinstance(operation.result, tuple) else (operation.result,)
            args = (token, operation.target, *operation.args)
            token = internals.new_fake(recorder.fake_mode, (0,), (1,), torch.float32, torch.device("cpu"))
            recorder.tape.replace(operation, internals.WITH_EFFECTS, args, (token, *results))


def thread_tokens(module: fx.GraphModule, fake_mode: internals.FakeTensorMode) -> None:
    """Do so in a graph for Inductor, which makes the first token and sinks the last; refuse what it would lose."""
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
            call = add(internals.WITH_EFFECTS, (token, node.target, *node.args), (value, *results), node.kwargs)
            call.meta = node.meta | call.meta
            token = add(operator.getitem, (call, 0), value)
            if results is not found:
                node.replace_all_uses_with(add(operator.getitem, (call, 1), found))
        for user in list(node.users):  # which take items of a tuple
            user.args = (call, user.args[1] + 1)
        graph.erase_node(node)
    for call in graph.find_nodes(op="call_function", target=internals.WITH_EFFECTS):
        with graph.inserting_before(call):
            call.update_arg(0, call.args[0] or add(internals.MAKE_TOKEN, (), value))
        if call.args[1] is torch.ops.aten.clone.default:  # the gradient that takes the last token
            (result,), (token, _, gradient) = call.users, call.args
            result.replace_all_uses_with(gradient)
            graph.erase_node(result)
            graph.erase_node(call)
    if token is not None:
        with graph.inserting_before(next(iter(reversed(graph.nodes)))):
            add(internals.SINK_TOKENS, ([token],), None)
