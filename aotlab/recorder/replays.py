"""Random numbers that a checkpoint draws again, when it computes its body once more for the backward.

    def f(x):
        return checkpoint(lambda y: F.dropout(y.sin()), x, use_reentrant=False)

Before it runs its body a checkpoint takes the generator's state, and sets it again before it runs the body once more:
so the second run draws the first one's numbers. A graph cannot set the state of a generator, and need not: the second
run's draws are given the first one's results, which the compiled forward then saves.

A trace draws nothing, so all states that a checkpoint takes in it are equal. They are told apart by which they are, and
stand for a place on the tape. From there on, draws are what the forward drew, as long as they are the like of it: in
eager too the generator would give these very numbers. A draw that is not is no replay, and recorded.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from aotlab.recorder.memo import NoKey, memo_key
from aotlab.recorder.tape import Operation, Tape, tensors_in
from aotlab.torch_internals import OpOverload


class Replays:
    """Finds what the forward drew for the draws of a checkpoint's second run.

    Parameters
    ----------
    tape
        Where the forward's draws are.
    by_size
        Random ops that look at no value of the tensors that they are given.
    """

    def __init__(self, tape: Tape, by_size: Collection[OpOverload]) -> None:
        self._tape = tape
        self._by_size = by_size
        self._places: dict[int, tuple[Tensor, int | None]] = {}
        self._next: int | None = None

    def taken(self, state: Tensor, *, in_forward: bool) -> None:
        """Note where the tape was when a checkpoint took the generator's state."""
        place = len(self._tape.operations) if in_forward else self._next
        self._places[id(state)] = (state, place)  # which is kept, so that no other state gets its number

    def set(self, state: Tensor) -> None:
        """Go to where the state was taken; where it was taken outside of any second run there is nothing to replay."""
        self._next = self._places.get(id(state), (state, None))[1]

    def draw(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the forward drew, None if this is no replay of it."""
        if self._next is None or not Operation.draws(func):
            return None
        drawn = self._following(self._next)
        self._next = None
        if drawn is None or drawn.target is not func or not self._is_like(drawn, args, kwargs):
            return None
        # what else a generator's state comprises, on other devices, a checkpoint may not have kept
        if any(tensor.device.type != "cpu" for tensor in tensors_in(drawn.result)):
            return None
        self._next = drawn.index + 1
        return drawn.result

    def _following(self, place: int) -> Operation | None:
        """Return the forward's first draw from a place on."""
        operations = self._tape.operations[place:]
        return next((each for each in operations if each.phase == "forward" and each.is_random), None)

    def _is_like(self, drawn: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if drawn.target not in self._by_size:
            now = tensors_in((args, kwargs))
            then = tensors_in((drawn.args, drawn.kwargs))
            if len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
                return False
        try:
            return bool(memo_key((args, kwargs)) == memo_key((drawn.args, drawn.kwargs)))
        except NoKey:
            return False
