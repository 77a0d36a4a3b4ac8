"""Functional random ops: each takes the state of a random generator as an argument, and returns the next state.

    aten.bernoulli.p(x, 0.5)                            # draws from the generator, and changes its state
    aotlab.drawn_aten_bernoulli_p(state, x, 0.5)        # draws the same numbers, and returns (result, next state)

A functional random op may run twice or not at all, and in any order that its arguments allow. In a recorded graph the
op `READ_STATE` reads a generator's state, and the op `SET_STATE` sets it. Later, `aotlab.backends.states` turns these
two ops into graph inputs and graph outputs. `GeneratorStates` tracks the state from which the next recorded op draws:
the current state of torch's generator (the *live* generator), or a state that is a value of the graph.

    def f(x):
        return checkpoint(lambda y: F.dropout(y.sin()), x, use_reentrant=False)

A checkpoint reads the generator's state in the forward. In the backward it sets this state, and then runs its function
again. In a graph, the forward saves the state, and the backward draws from the saved state. If the backward also draws
from another state, the call runs eagerly. A trace draws no numbers, so it cannot distinguish states by their values.
Therefore it identifies a state by the tensor object that torch returned for the state.

Under `config.functionalize_rng_ops` all random ops take a state.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab._torch import HigherOrderOperator, OpOverload
from aotlab.capture.signals import RunEagerly
from aotlab.ir.fx_graphs import is_random, nodes_in

_LIBRARY = torch.library.Library("aotlab", "FRAGMENT")
_RANDOM = (torch.Tag.nondeterministic_seeded,)
#: Matches the generator argument in the text of a schema: the first keyword-only argument, or the last argument.
_GENERATOR = re.compile(r"(?<=\*, )Generator\? generator=None, |(, \*)?, Generator\? generator=None(?=\))")


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: tuple[torch.Tag, ...] = ()) -> Any:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"aotlab::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.aotlab, name).default


def state_size(device: torch.device) -> int:
    """Return the number of bytes in the state of a device's generator."""
    return int(internals.default_generator(device).get_state().numel())


def _set(state: Tensor, device: torch.device) -> Tensor:
    internals.default_generator(device).set_state(state)
    return state.clone()


#: ``(device) -> state``: read the state of a device's generator.
READ_STATE: OpOverload = _define(
    "state_of_generator(Device device) -> Tensor",
    lambda device: internals.default_generator(device).get_state(),
    lambda device: torch.empty(state_size(device), dtype=torch.uint8),
    _RANDOM,
)
#: ``(state, device) -> state``: set the state of a device's generator. A graph can return the result, so
#: that no compiler removes the op as unused.
SET_STATE: OpOverload = _define(
    "set_generator(Tensor state, Device device) -> Tensor", _set, lambda state, device: state.clone(), _RANDOM
)


@functools.cache
def functional_random_op(op: OpOverload) -> OpOverload:
    """Return the functional form of a random op; it takes a state as its first argument, and no generator."""
    schema = _GENERATOR.sub("", str(op._schema))
    name, arguments, returns = re.fullmatch(r"aten::([\w.]+)\((.*)\) -> (.*)", schema).groups()  # type: ignore[union-attr]
    kinds = [part.split(" ")[0] for part in returns.strip("()").split(", ")]
    functional_name = f"drawn_aten_{name.replace('.', '_')}"

    def run(state: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        generator = internals.default_generator(_device(args, kwargs))
        caller_state = generator.get_state()
        try:
            generator.set_state(state)
            results = op(*args, **kwargs)
            next_state = generator.get_state()
        finally:
            generator.set_state(caller_state)
        return (*_tuple(results), next_state)

    def fake(state: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (*_tuple(op(*args, **kwargs)), torch.empty_like(state))

    if not hasattr(
        torch.ops.aotlab, functional_name
    ):  # a second import of this module finds the op that the first one defined
        _define(f"{functional_name}(Tensor state, {arguments}) -> ({', '.join(kinds)}, Tensor)", run, fake)
    functional: OpOverload = getattr(torch.ops.aotlab, functional_name).default
    _RANDOM_OPS[functional] = op
    return functional


_RANDOM_OPS: dict[Any, OpOverload] = {}


def random_op_of(op: Any) -> OpOverload | None:
    """Return the random op whose functional form is ``op`` (see `functional_random_op`), or None for other ops."""
    return _RANDOM_OPS.get(op)


def _tuple(results: Any) -> tuple[Any, ...]:
    return (results,) if isinstance(results, Tensor) else tuple(results)


def _device(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Return the device whose generator an op uses.

    It is the device of the first tensor argument. Without a tensor argument it is the ``device`` argument.
    """
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else kwargs.get("device")
    return torch.device("cpu") if device is None else torch.device(device)


def without_generator(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments of an op without its ``generator`` argument, which is None."""
    names = [argument.name for argument in op._schema.arguments]
    position = names.index("generator") if "generator" in names else len(args)
    return (*args[:position], *args[position + 1 :]), {k: v for k, v in kwargs.items() if k != "generator"}


_RANDOM_BETWEEN = getattr(torch.ops.aten.random, "from")
_NAMED_RANDOM_BETWEEN = _define(
    "random_between(Tensor self, int low, int? high) -> Tensor", _RANDOM_BETWEEN, _RANDOM_BETWEEN, _RANDOM
)


def with_name(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
    """Return a random op and its arguments, for the code of a graph.

    The code cannot contain `aten.random.from`, because ``from`` is a Python keyword. So this op is replaced by an op
    of ours that calls it.
    """
    return (
        (_NAMED_RANDOM_BETWEEN, *without_generator(op, args, kwargs)) if op is _RANDOM_BETWEEN else (op, args, kwargs)
    )


# --- which state the next op draws from ------------------------------------------------------------------------------

_CPU = torch.device("cpu")

#: A function that records an op that reads or sets a state: it takes the op and its arguments, and returns a fake
#: state.
RecordStateOp = Callable[[OpOverload, tuple[Any, ...]], Tensor]


class GeneratorStates:
    """The state from which the next random op draws, for each device.

    If ``functional`` is true, all random ops take a state. Otherwise random ops draw from the live generator, except in
    the backward of a checkpoint. ``record`` records an op that reads or sets a state.
    """

    def __init__(self, record: RecordStateOp, *, functional: bool) -> None:
        self._record = record
        self._functional = functional
        self._states: dict[torch.device, Tensor] = {}
        self._first: dict[torch.device, Tensor] = {}
        self._replays = False
        #: The results of random ops, as fake tensors.
        self.drawn: list[Tensor] = []
        #: If given, these are the results of the next random ops, which are not recorded.
        self.repeated: Iterator[Tensor] | None = None
        # The reads of a generator's state by torch's checkpoint. The keys are the ids of the real state tensors that
        # the checkpoint got. The values are the tensor, and the graph's states at that time (None if a backward read
        # the state of the live generator).
        self._noted_reads: dict[int, tuple[Tensor, dict[torch.device, Tensor] | None]] = {}

    @property
    def are_live(self) -> bool:
        """Whether the next random ops draw from the live generators."""
        return not (self._functional or self._states)

    def live(self) -> GeneratorStates:
        """Make states for the functions of a higher-order op, in which random ops draw from the live generators."""
        return GeneratorStates(self._record, functional=False)

    def begin(self) -> None:
        """Start a forward or a backward: the next random ops draw from the live generators."""
        self._states, self._first, self._replays = {}, {}, False

    def end(self) -> None:
        """End a forward or a backward: record ops that set the generators to the states after the last draw."""
        for device, state in self._states.items():
            if self._functional and state is not self._first.get(device):
                self._record(SET_STATE, (state, device))
        self.begin()

    def note_read(self, real: Tensor, *, in_forward: bool) -> None:
        """Note that torch's checkpoint read the state of the CPU's generator and got the tensor ``real``.

        ``in_forward`` says whether it did so in the forward.
        """
        states = dict(self._states) if in_forward or self._replays else None
        if in_forward and states is not None and _CPU not in states:
            states[_CPU] = self._read(_CPU)
        self._noted_reads[id(real)] = real, states  # the tensor is kept alive so that its id is not reused

    def replay(self, real: Tensor) -> None:
        """Let the next random ops of a backward draw from the state ``real``, which a checkpoint read before.

        In this way the checkpoint repeats its random numbers. (`Deriver.recording` refuses other draws in a backward.)
        """
        self.begin()
        _, states = self._noted_reads.get(id(real), (real, None))
        if states is not None:
            self._states, self._replays = dict(states), True

    def _read(self, device: torch.device) -> Tensor:
        state = self._record(READ_STATE, (device,))
        if self._functional:
            self._states[device] = self._first[device] = state
        return state

    def next_state(self, device: torch.device) -> Tensor | None:
        """Return the state that the next random op on a device takes, or None if it draws from the live generator."""
        if self._replays and device not in self._states:
            raise RunEagerly("checkpoint-draws-on-gpu")
        if self._functional and device not in self._states:
            self._read(device)
        return self._states.get(device)

    def set_next_state(self, device: torch.device, state: Tensor) -> None:
        """Note the state after a random op: the next op on ``device`` draws from it."""
        self._states[device] = state


def draws(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Tell whether a call of an op draws random numbers, or a function does that the op takes.

    The ops that read or set a generator's state draw none, nor does attention without dropout.
    """
    if not isinstance(target, OpOverload) and isinstance(target, HigherOrderOperator):  # the second check is slow
        nodes = nodes_in(each for each in args if isinstance(each, fx.GraphModule))
        return any(draws(node.target, node.args, node.kwargs) for node in nodes)
    if not is_random(target) or target in (READ_STATE, SET_STATE):
        return False
    names = [argument.name for argument in target._schema.arguments]
    return "dropout_p" not in names or (dict(zip(names, args, strict=False)) | kwargs).get("dropout_p", 0.0) != 0
