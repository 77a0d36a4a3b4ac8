"""Which state of the random generators a recorded op draws from: the live one, or one that the graph carries.

    def f(x):
        return checkpoint(lambda y: F.dropout(y.sin()), x, use_reentrant=False)

Before it runs its body a checkpoint takes the generator's state, and sets it again before it runs the body once more
for the backward: so the second run draws the first one's numbers. In a graph that state is a value: the forward reads
and saves it, and the backward's draws take it as an argument and hand on the next one (`aotlab.ir.random_state`). What
a backward draws besides comes from the generator as it is by then, as in eager.

A trace draws nothing, so all states that are taken in it are equal. They are told apart by which tensors they are.

Under `config.functionalize_rng_ops` all draws take a state: the first one reads the generator's, and at the end the
generator is set to the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aotlab._torch import OpOverload
from aotlab.ir.graphs import is_random
from aotlab.ir.random_state import SET_STATE, STATE_OF, device_of, drawn, without_generator

_CPU = torch.device("cpu")

#: What records an op that reads or sets a state: the op and its arguments in, the fake of the state out.
Write = Callable[[OpOverload, tuple[Any, ...]], Tensor]


class _Taken(NamedTuple):
    """A state that was taken: the real tensor, what stands for it, and where that was."""

    real: Tensor
    states: dict[torch.device, Tensor]
    replays: bool
    draws: int | None


class States:
    """The states that the next draws take; ``functional`` says that no draw is live."""

    def __init__(self, write: Write, *, functional: bool) -> None:
        self._write = write
        self._functional = functional
        self._states: dict[torch.device, Tensor] = {}
        self._first: dict[torch.device, Tensor] = {}
        self._replays = False
        self._draws = 0  # live ones so far
        self._taken: dict[int, _Taken] = {}

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
        if in_forward or (not self._replays and not self._functional):
            state = self._states.get(_CPU)
            states = {**self._states, _CPU: self._read(_CPU) if state is None else state}
        else:
            states = dict(self._states)
        draws = None if in_forward else self._draws
        self._taken[id(real)] = _Taken(real, states, self._replays, draws)  # which is kept: no other gets its number

    def set(self, real: Tensor) -> None:
        """Let the next draws be from a state that was taken."""
        taken = self._taken.get(id(real))
        if taken is None:
            self.begin()
        elif taken.replays or taken.draws is None:
            self._states, self._replays = dict(taken.states), True
        elif self._functional:
            self._states, self._replays = dict(taken.states), False
        elif taken.draws == self._draws:  # nothing was drawn since but by replays: the generator is there still
            self._states, self._replays = {}, False
        else:
            self._states, self._replays = dict(taken.states), True

    def _read(self, device: torch.device) -> Tensor:
        state = self._write(STATE_OF, (device,))
        if self._functional:
            self._states[device] = self._first[device] = state
        return state

    def is_unknown(self, results: Any) -> bool:
        """Tell whether a replay draws on a device whose generator's state was not taken."""
        return self._replays and device_of(results) not in self._states

    def draw(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any
    ) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any], Tensor] | None:
        """Return with what op and arguments to draw, and the state before; None if that is live."""
        device = device_of(results)
        state = self._states.get(device)
        if state is None and self._functional:
            state = self._read(device)
        if state is None:
            self._draws += 1
            return None
        args, kwargs = without_generator(func, args, kwargs)
        return drawn(func), (state, *args), kwargs, state

    def drew(self, results: Any, state: Tensor) -> None:
        """Note the state after a draw."""
        self._states[device_of(results)] = state


def draws(target: Any) -> bool:
    """Tell whether an op draws from a generator, and does not only read or set its state."""
    return is_random(target) and target not in (STATE_OF, SET_STATE)
