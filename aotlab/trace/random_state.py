"""Ops that take the state of a random generator as an argument, and return the state that it is in then.

    aten.bernoulli.p(x, 0.5)                            # draws from the generator, and moves it on
    aotlab.drawn_aten_bernoulli_p(state, x, 0.5)        # draws the same numbers, and gives (result, next state)

What draws so may run twice, not at all, and in any order that its arguments allow. `STATE_OF` reads a generator's
state, `SET_STATE` sets it, where draws would stand, until `aotlab.backends.states` makes inputs and outputs of them.
`States` knows which state a recorded op draws from: the live one, or one that the graph carries.

    def f(x):
        return checkpoint(lambda y: F.dropout(y.sin()), x, use_reentrant=False)

A checkpoint takes the generator's state and sets it again before it runs its body once more for the backward. In a
graph the forward saves that state, and the backward draws with it. A backward that draws besides runs eagerly. As a
trace draws nothing, states are told apart by which tensors they are.

Under `config.functionalize_rng_ops` all draws take a state.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import OpOverload
from aotlab.capture.signals import RunEagerly
from aotlab.ir.graphs import is_random

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


#: ``(device) -> state``: what state a device's generator is in.
STATE_OF: OpOverload = _define(
    "state_of_generator(Device device) -> Tensor",
    lambda device: internals.default_generator(device).get_state(),
    lambda device: torch.empty(state_size(device), dtype=torch.uint8),
    _RANDOM,
)
#: ``(state, device) -> state``: set the state of a device's generator; the result is there to be held on to.
SET_STATE: OpOverload = _define(
    "set_generator(Tensor state, Device device) -> Tensor", _set, lambda state, device: state.clone(), _RANDOM
)


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
        return (*_tuple(op(*args, **kwargs)), torch.empty_like(state))

    if not hasattr(torch.ops.aotlab, made):  # a module that is loaded once more finds what the first one defined
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


# --- which state the next op draws from ------------------------------------------------------------------------------

_CPU = torch.device("cpu")

#: What records an op that reads or sets a state: the op and its arguments in, the fake of the state out.
Write = Callable[[OpOverload, tuple[Any, ...]], Tensor]


class States:
    """The states that the next draws take; ``functional`` says that no draw is live."""

    def __init__(self, write: Write, *, functional: bool) -> None:
        self._write = write
        self._functional = functional
        self._states: dict[torch.device, Tensor] = {}
        self._first: dict[torch.device, Tensor] = {}
        self._replays = False
        # of real tensors that hold a state what stands for it; None where a backward took that of the live generator
        self._taken: dict[int, tuple[Tensor, dict[torch.device, Tensor] | None]] = {}

    def begin(self) -> None:
        """Start a forward or a backward, which draws from the generators as they are."""
        self._states, self._first, self._replays = {}, {}, False

    def end(self) -> None:
        """Set the generators to where the draws of a forward or a backward have led."""
        for device, state in self._states.items():
            if self._functional and state is not self._first.get(device):
                self._write(SET_STATE, (state, device))
        self.begin()

    def taken(self, real: Tensor, *, in_forward: bool) -> None:
        """Note that the CPU's generator was asked for its state."""
        states = dict(self._states) if in_forward or self._replays else None
        if in_forward and states is not None and _CPU not in states:
            states[_CPU] = self._read(_CPU)
        self._taken[id(real)] = real, states  # which is kept: no other gets its number

    def set(self, real: Tensor) -> None:
        """Let the next draws of a backward be from a state that was taken; but for replays, no backward draws."""
        self.begin()
        _, states = self._taken.get(id(real), (real, None))
        if states is not None:
            self._states, self._replays = dict(states), True

    def _read(self, device: torch.device) -> Tensor:
        state = self._write(STATE_OF, (device,))
        if self._functional:
            self._states[device] = self._first[device] = state
        return state

    def before(self, device: torch.device) -> Tensor | None:
        """Return the state that the next draw on a device takes; None if it draws from the live generator."""
        if self._replays and device not in self._states:
            raise RunEagerly(
                "a checkpoint draws random numbers on a GPU, and to draw them again takes the state of its generator",
                suggestion="keep that out of the checkpoint, to have it compiled",
            )
        if self._functional and device not in self._states:
            self._read(device)
        return self._states.get(device)

    def after(self, device: torch.device, state: Tensor) -> None:
        """Note the state after a draw."""
        self._states[device] = state


def draws(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call draws: not one that only reads or sets the state, nor attention without dropout."""
    if not is_random(target) or target in (STATE_OF, SET_STATE):
        return False
    names = [argument.name for argument in target._schema.arguments]
    return "dropout_p" not in names or (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0) != 0
