"""Where a generator's decisions come from: Hypothesis, or a plain random generator.

The same writer serves both. Hypothesis records what it decides and shrinks it; a random generator is several times as
fast and never decides the same thing twice, which is what a run of many thousand programs wants.
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
    """What was drawn is not worth having; draw another."""


class Choices(Protocol):
    """Decides, one number at a time; 0 is the simplest."""

    def below(self, count: int) -> int:
        """Choose one of 0, 1, …, ``count - 1``."""


class DrawnChoices:
    """Decisions drawn by Hypothesis."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def below(self, count: int) -> int:
        """Choose one of 0, 1, …, ``count - 1``; shrinks towards 0."""
        return 0 if count == 1 else self._draw(_below(count))


class RandomChoices:
    """Decisions of a random generator with a seed."""

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
    """Say yes in so many of a thousand cases; shrinks to no."""
    return choices.below(1000) >= 1000 - per_mille


def one_of(choices: Choices, values: Sequence[T]) -> T:
    """Choose one; shrinks towards the first."""
    return values[choices.below(len(values))]


def weighted(*pairs: tuple[int, T]) -> tuple[T, ...]:
    """Lay out values for `one_of`, each as often as its weight says."""
    return tuple(value for weight, value in pairs for _ in range(weight))


def shuffled(choices: Choices, values: Sequence[Any]) -> list[Any]:
    """Choose an order; shrinks towards the given one."""
    left = list(values)
    return [left.pop(choices.below(len(left))) for _ in range(len(left))]
