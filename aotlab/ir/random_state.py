"""Ops that take the state of a random generator as an argument, and return the state that it is in then.

    aten.bernoulli.p(x, 0.5)                            # draws from the generator, and moves it on
    aotlab.drawn_aten_bernoulli_p(state, x, 0.5)        # draws the same numbers, and gives (result, next state)

What draws so is a function of its arguments: it may run twice, not at all, and in any order that its arguments allow.
`STATE_OF` reads a generator's state, `SET_STATE` sets it; both stand in a graph where an op that draws from the
generator would. `with_states` turns them into inputs and outputs of the graph, which then is a function as a whole.

A state is what the generator's ``get_state()`` returns, a tensor of bytes on the CPU: 5056 for a CPU's Mersenne
twister, 16 for a GPU's Philox, its seed and its offset.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab._torch import OpOverload
from aotlab.ir.graphs import output_args, return_from

_LIBRARY = torch.library.Library("aotlab", "FRAGMENT")
_RANDOM = (torch.Tag.nondeterministic_seeded,)
#: How a schema writes a generator: by keyword and before others, or last.
_GENERATOR = re.compile(r"(?<=\*, )Generator\? generator=None, |(, \*)?, Generator\? generator=None(?=\))")


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"aotlab::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.aotlab, name).default


def state_size(device: torch.device) -> int:
    """Return how many bytes the state of a device's generator has."""
    return int(internals.default_generator(device).get_state().numel())


def _set(state: Tensor, device: torch.device) -> Tensor:
    internals.default_generator(device).set_state(state)
    return state.clone()


def empty_state(device: torch.device) -> Tensor:
    """Make a tensor for a state, of what kind the mode makes that is on."""
    return torch.empty(state_size(device), dtype=torch.uint8, device="cpu")


#: ``(device) -> state``: what state a device's generator is in.
STATE_OF: OpOverload = _define(
    "state_of_generator(Device device) -> Tensor",
    lambda device: internals.default_generator(device).get_state(),
    empty_state,
    _RANDOM,
)
#: ``(state, device) -> state``: set the state of a device's generator; the result is there to be held on to.
SET_STATE: OpOverload = _define(
    "set_generator(Tensor state, Device device) -> Tensor", _set, lambda state, device: empty_state(device), _RANDOM
)


def device_of(results: Any) -> torch.device:
    """Return the device of what an op drew."""
    first = results if isinstance(results, Tensor) else results[0]
    return torch.device(first.device.type, first.device.index)


@functools.cache
def drawn(op: OpOverload) -> OpOverload:
    """Return the op that does what the random ``op`` does with a state; it takes no generator."""
    schema = _GENERATOR.sub("", str(op._schema))
    name, arguments, returns = re.fullmatch(r"aten::([\w.]+)\((.*)\) -> (.*)", schema).groups()  # type: ignore[union-attr]
    kinds = [part.split(" ")[0] for part in returns.strip("()").split(", ")]
    made = f"drawn_aten_{name.replace('.', '_')}"

    def run(state: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        generator = internals.default_generator(_device(args, kwargs))
        before = generator.get_state()
        try:
            generator.set_state(state)
            results = op(*args, **kwargs)
            after = generator.get_state()
        finally:
            generator.set_state(before)
        return (*_tuple(results), after)

    def fake(state: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        results = _tuple(op(*args, **kwargs))
        return (*results, torch.empty_like(state))

    # a module that is loaded once more finds what the first one defined
    if not hasattr(torch.ops.aotlab, made):
        _define(f"{made}(Tensor state, {arguments}) -> ({', '.join(kinds)}, Tensor)", run, fake)
    found: OpOverload = getattr(torch.ops.aotlab, made).default
    _DRAWN[found] = op
    return found


_DRAWN: dict[Any, OpOverload] = {}


def original(op: Any) -> OpOverload | None:
    """Return the random op that an op of `drawn`'s stands for; None for others."""
    return _DRAWN.get(op)


def _tuple(results: Any) -> tuple[Any, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _device(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Return the device whose generator an op draws from: that of its tensors, or the one that it is told."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    found = tensors[0].device if tensors else kwargs.get("device")
    return torch.device("cpu") if found is None else torch.device(found)


def without_generator(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Drop a ``generator=None`` from the arguments of an op."""
    names = [argument.name for argument in op._schema.arguments]
    place = names.index("generator") if "generator" in names else len(args)
    return (*args[:place], *args[place + 1 :]), {k: v for k, v in kwargs.items() if k != "generator"}


def with_states(module: fx.GraphModule) -> tuple[torch.device, ...]:
    """Make inputs of what a graph reads of generators' states and outputs of what it sets, both behind the others.

    Returned are the devices of the generators whose states it takes and returns from now on; none if it sets none.
    """
    graph = module.graph
    sets = {node.args[1]: node for node in graph.nodes if node.target is SET_STATE}
    if not sets:
        return ()
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for device in sets:
        for node in [n for n in graph.nodes if n.target is STATE_OF and n.args[0] == device]:
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
    """Give a graph of `with_states` its generators' states, and set them to what it returns behind its results."""
    generators = [internals.default_generator(device) for device in devices]

    def call(inputs: list[Any]) -> Sequence[Any]:
        inputs += [generator.get_state() for generator in generators]
        outputs = compiled(inputs)
        for generator, state in zip(generators, outputs[results:], strict=False):
            generator.set_state(state)
        return outputs[:results]

    call._boxed_call = True  # type: ignore[attr-defined]  # the mark that upstream's users look for
    return call


def noted(devices: Collection[torch.device]) -> Callable[[], Callable[[], None]]:
    """Make what notes the state of the devices' generators; it returns what puts that state back."""
    generators = [internals.default_generator(device) for device in devices]

    def note() -> Callable[[], None]:
        states = [generator.get_state() for generator in generators]

        def put_back() -> None:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

        return put_back

    return note
