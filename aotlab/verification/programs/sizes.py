"""Draw arguments for several calls that differ in their sizes and in almost nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from aotlab.verification.programs.changes import draw_change
from aotlab.verification.programs.choices import Choices, chance, one_of, weighted
from aotlab.verification.programs.recipes import Recipe, Sizes, draw_recipes

_FIRST = (4, 3, 6, 5, 2, 8)

#: The changes of a size in a later call. The sizes 1 ("one") and 0 ("none") are separate changes, because compilers
#: specialize them.
_OTHERS = weighted((9, "same"), (6, "twice"), (12, "any"), (3, "another's"), (1, "one"), (1, "none"))
_ANY = (2, 3, 4, 5, 6, 7, 8, 9, 12)


class _Recorded:
    """Makes the decisions of ``choices`` and records them, so that `_Replayed` can repeat them for other sizes."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self.decisions: list[int] = []

    def below(self, count: int) -> int:
        """Choose one of 0, 1, …, ``count - 1``."""
        self.decisions.append(self._choices.below(count))
        return self.decisions[-1]


class _Replayed:
    """Repeats the decisions that `_Recorded` has recorded."""

    def __init__(self, decisions: list[int]) -> None:
        self._decisions = iter(decisions)

    def below(self, count: int) -> int:
        """Return the next recorded decision, or ``count - 1`` if the recorded decision is not below ``count``."""
        return min(count - 1, next(self._decisions))


def draw_sized(
    choices: Choices, grad: bool | None, calls: int
) -> tuple[tuple[Recipe, ...], Iterator[tuple[tuple[Recipe, ...], str, bool]]]:
    """Draw the arguments of a first call and of ``calls`` later calls.

    Return the recipes of the first call, and an iterator over the later calls. Each item of the iterator has the
    recipes of one call, the change from the first call in words, and whether grad mode is on. ``grad`` is explained at
    `draw_recipes`.
    """
    sizes = one_of(choices, _FIRST), one_of(choices, _FIRST), one_of(choices, _FIRST)
    recorded = _Recorded(choices)
    first = draw_recipes(recorded, grad, sizes)

    def further_calls() -> Iterator[tuple[tuple[Recipe, ...], str, bool]]:
        for _ in range(calls):
            other = _other(choices, sizes)
            recipes = draw_recipes(_Replayed(recorded.decisions), grad, other)
            change, grad_mode = "sizes {}, {}, {}".format(*other), True
            if chance(choices, 100):
                recipes, other_change, grad_mode = draw_change(choices, recipes, grad)
                change = f"{change}; {other_change}"
            yield recipes, change, grad_mode

    return first, further_calls()


def _other(choices: Choices, sizes: Sizes) -> Sizes:
    kinds = [one_of(choices, _OTHERS) for _ in sizes]
    if set(kinds) == {"same"}:
        kinds[choices.below(3)] = "any"

    def now(kind: str, size: int) -> int:
        if kind in ("any", "another's"):
            return one_of(choices, _ANY if kind == "any" else sizes)
        return {"same": size, "twice": 2 * size, "one": 1, "none": 0}[kind]

    n, m, k = map(now, kinds, sizes)
    return n, m, k
