"""Make the random decisions from which a program is drawn: with Hypothesis, or with Python's random generator.

All code that draws programs takes one of the two as a `Choices` object. Hypothesis records its decisions and can shrink
a failing program. A random generator is several times as fast and rarely makes the same program twice. So the fuzzer
uses a generator for runs of many thousand programs.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from hypothesis import strategies as st

T = TypeVar("T")


class RejectedError(Exception):
    """Raised while a program is drawn, if the program is useless for a comparison. The caller draws another one."""


class Choices(Protocol):
    """Makes random decisions. Each decision is a number below a bound, and 0 leads to the simplest program."""

    def below(self, count: int) -> int:
        """Choose one of 0, 1, …, ``count - 1``."""


class DrawnChoices:
    """Makes the decisions with Hypothesis, which can replay and shrink them. ``draw`` comes from ``st.composite``."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def below(self, count: int) -> int:
        """Choose one of 0, 1, …, ``count - 1``; shrinks towards 0."""
        return 0 if count == 1 else self._draw(_below(count))


class RandomChoices:
    """Makes the decisions with Python's random generator. Equal seeds give equal decisions."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed).random

    def below(self, count: int) -> int:
        """Choose one of 0, 1, …, ``count - 1``."""
        return int(self._random() * count)


@functools.cache
def _below(count: int) -> st.SearchStrategy[int]:
    from hypothesis import strategies as st

    return st.integers(0, count - 1)


def chance(choices: Choices, per_mille: int) -> bool:
    """Return True with a probability of ``per_mille`` / 1000; shrinks towards False."""
    return choices.below(1000) >= 1000 - per_mille


def one_of(choices: Choices, values: Sequence[T]) -> T:
    """Choose one of ``values``; shrinks towards the first."""
    return values[choices.below(len(values))]


def weighted(*pairs: tuple[int, T]) -> tuple[T, ...]:
    """Repeat each value of the pairs (weight, value) as often as its weight says, as a table for `one_of`."""
    return tuple(value for weight, value in pairs for _ in range(weight))


def shuffled(choices: Choices, values: Sequence[Any]) -> list[Any]:
    """Return ``values`` in a random order; shrinks towards the given order."""
    left = list(values)
    return [left.pop(choices.below(len(left))) for _ in range(len(left))]
