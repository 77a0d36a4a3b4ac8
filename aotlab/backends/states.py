"""Make graphs that read and set the states of random generators functional: states become inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from aotlab import _torch as internals
from aotlab.ir.fx_graphs import output_args, return_from
from aotlab.trace.random_state import READ_STATE, SET_STATE


def with_states(module: fx.GraphModule) -> tuple[torch.device, ...]:
    """Turn the generator states that a graph reads into its last inputs, and those that it sets into its last outputs.

    Returns the devices whose generators the graph sets, in the order of these outputs.
    """
    graph = module.graph
    sets = {node.args[1]: node for node in graph.nodes if node.target is SET_STATE}
    if not sets:
        return ()
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for device in sets:
        for node in [n for n in graph.nodes if n.target is READ_STATE and n.args[0] == device]:
            with graph.inserting_before(first):
                state = graph.placeholder(f"rng_state_{device.type}")
            state.meta.update(node.meta)
            node.replace_all_uses_with(state)
            if node is first:
                first = node.next
            graph.erase_node(node)
    return_from(graph, (*output_args(graph), *(node.args[0] for node in sets.values())))
    for node in sets.values():
        graph.erase_node(node)
    module.recompile()
    return tuple(sets)


def keeping_states(
    compiled: Callable[[list[Any]], Sequence[Any]], devices: Sequence[torch.device], results: int
) -> Callable[[list[Any]], Sequence[Any]]:
    """Wrap a compiled graph that `with_states` changed: pass the states of the generators, and set the new states.

    ``devices`` is the result of `with_states`. ``results`` is the number of the graph's own outputs; the new states
    follow them.
    """
    generators = [internals.default_generator(device) for device in devices]

    def call(inputs: list[Any]) -> Sequence[Any]:
        inputs += [generator.get_state() for generator in generators]
        outputs = compiled(inputs)
        for generator, state in zip(generators, outputs[results:], strict=False):
            generator.set_state(state)
        return outputs[:results]

    call._boxed_call = True  # type: ignore[attr-defined]  # the mark that upstream's users look for
    return call
