"""Ops with side effects, chained by tokens: each takes the token that the one before it returned.

    say(x)                                       # becomes
    token, result = with_effects(token, say, x)

In a backward graph the trace adds the tokens, because a backward graph keeps only the ops that its gradients need. The
op that returns one of the gradients takes the last token, so the whole chain is needed. In a forward graph the trace
leaves the ops as they are. Inductor removes ops with unused results, and reorders ops. Therefore a graph gets tokens
before it is passed to Inductor (`chain_effects`).
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
from aotlab.ir.fx_graphs import Phase, may_have_effects
from aotlab.trace.autograd_edges import next_edges
from aotlab.trace.history import nodes_of, reachable_stops
from aotlab.trace.recorder import Recorder
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.tape import Operation


def names_of_effects(operations: Sequence[Operation], phase: Phase) -> tuple[str, ...]:
    """Return the names of the ops with side effects that were recorded in a phase, in order."""
    calls = [o.args[1] if o.target is internals.WITH_EFFECTS else o.target for o in operations if o.phase == phase]
    effectful = set(filter(internals.has_effects, set(calls)))
    return tuple(str(target) for target in calls if target in effectful)


def effects_in(operations: Sequence[Operation], error: type[RefusedError] | None = None) -> list[Operation]:
    """Return the ops with side effects among ``operations``. If ``error`` is given, raise it if there is such an op."""
    effectful = [each for each in operations if may_have_effects(each.target) and internals.has_effects(each.target)]
    if effectful and error:
        fact = f"a backward calls `{effectful[0].target}`, which has side effects"
        raise error(fact, suggestion="call it in the forward")
    return effectful


def chain_backward_effects(recorder: Recorder, segment: Segment, gradients: dict[Exit, Tensor], first: int) -> None:
    """Chain the ops with side effects of a segment's backward by tokens.

    The ops of this backward begin at index ``first`` of the tape. ``gradients`` are the results of the backward, by
    exit. One of them is replaced by a clone that takes the last token. Run eagerly if an op with side effects is needed
    for some gradients and not for others. The reason: eager runs only the nodes that the requested gradients need, but
    the caller chooses these gradients after the trace.
    """
    effectful = effects_in(recorder.tape.operations[first:])
    if not effectful:
        return
    token, reached_stops = None, reachable_stops(segment)
    for operation in effectful:
        starts = [(node, 0) for node in nodes_of(segment) if internals.sequence_of(node) == operation.sequence]
        behind = {edge for node in nodes_of(segment, starts) for edge in next_edges(node)}
        if segment.nodes is not None or recorder.has_checkpoints or not gradients or not reached_stops <= behind:
            raise RunEagerly("effects-in-backward", op=effectful[0].target)
    with internals.disable_torch_function(), internals.outside_of_trace():
        exit_ = next(iter(gradients))
        gradients[exit_] = recorder.record(torch.ops.aten.clone.default, (gradients[exit_],), {})
        effectful.append(recorder.tape.operations[-1])
        for operation in effectful:
            results = operation.result if isinstance(operation.result, tuple) else (operation.result,)
            args = (token, operation.target, *operation.args)
            token = internals.new_fake(recorder.fake_mode, (0,), (1,), torch.float32, torch.device("cpu"))
            recorder.tape.replace(operation, internals.WITH_EFFECTS, args, (token, *results))


def chain_effects(module: fx.GraphModule, fake_mode: internals.FakeTensorMode) -> None:
    """Chain the ops with side effects in a graph for Inductor by tokens.

    The graph makes the first token, and passes the last token to the op ``_sink_tokens``. Run eagerly if the graph has
    a custom op that returns nothing and is not registered as having side effects, because Inductor would remove it.
    """
    graph, token = module.graph, None
    with fake_mode:
        token_value = torch.empty(0)

    def add(target: Any, args: tuple[Any, ...], val: Any, kwargs: Any = None) -> fx.Node:
        call_node = graph.call_function(target, args, kwargs)
        call_node.meta["val"] = val
        return call_node

    for node in [node for node in graph.nodes if node.op == "call_function" and may_have_effects(node.target)]:
        result_value = node.meta.get("val")
        if not internals.has_effects(node.target):
            if result_value is None:
                raise RunEagerly("unregistered-effect", op=node.target)
            continue
        results = result_value if isinstance(result_value, tuple) else (result_value,)
        with graph.inserting_before(node):
            call = add(internals.WITH_EFFECTS, (token, node.target, *node.args), (token_value, *results), node.kwargs)
            call.meta = node.meta | call.meta
            token = add(operator.getitem, (call, 0), token_value)
            if results is not result_value:
                node.replace_all_uses_with(add(operator.getitem, (call, 1), result_value))
        for user in list(node.users):  # each is a `getitem`; the token shifts the items by one
            user.args = (call, user.args[1] + 1)
        graph.erase_node(node)
    for call in graph.find_nodes(op="call_function", target=internals.WITH_EFFECTS):
        with graph.inserting_before(call):
            call.update_arg(0, call.args[0] or add(internals.MAKE_TOKEN, (), token_value))
        if call.args[1] is torch.ops.aten.clone.default:  # a clone by `chain_backward_effects`
            (result,), (token, _, gradient) = call.users, call.args
            result.replace_all_uses_with(gradient)
            graph.erase_node(result)
            graph.erase_node(call)
    if token is not None:
        with graph.inserting_before(next(iter(reversed(graph.nodes)))):
            add(internals.SINK_TOKENS, ([token],), None)
