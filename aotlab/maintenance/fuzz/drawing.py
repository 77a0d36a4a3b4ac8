"""Draw the programs of a run, each from a separate seed, and shrink a failing program with Hypothesis.

Programs are drawn from random decisions (see `aotlab.verification.programs.choices`). A run makes the decisions with
Python's random generator, with one seed for each program. This generator is several times as fast as Hypothesis and
rarely draws a program twice. A seed gives the same program in every process and with every version of Hypothesis. The
decisions are recorded. From the recorded decisions, Hypothesis draws the same program again and shrinks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, Verbosity, find, reject, settings
from hypothesis import strategies as st
from hypothesis.database import ExampleDatabase, choices_to_bytes

from aotlab.maintenance.fuzz.plan import Plan
from aotlab.verification.programs import Program
from aotlab.verification.programs.choices import Choices, DrawnChoices, RandomChoices, RejectedError
from aotlab.verification.programs.drawing import draw_program
from aotlab.verification.programs.related import draw_related
from aotlab.verification.programs.wrapped import wrapped

#: The largest numbers of statements and of calls in a program, as in `aotlab.verification.programs.programs`.
_STATEMENTS, _CALLS = 8, 3

#: The largest numbers of statements and of calls in a program whose calls have different sizes.
_SIZED_STATEMENTS, _SIZED_CALLS = 5, 4

#: After this many rejected attempts to draw one program, drawing fails with an error.
_ATTEMPTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A program, its index in its block, and the random decisions from which it was drawn.

    ``discarded`` is the number of attempts that were rejected before this program.
    """

    program: Program
    index: int
    decisions: tuple[int, ...]
    discarded: int


class _Recorded(RandomChoices):
    """Makes the decisions with Python's random generator, and records them, so that Hypothesis can repeat them."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.decisions: list[int] = []

    def below(self, count: int) -> int:
        """Choose one of 0, 1, …, ``count - 1``."""
        decided = super().below(count)
        if count > 1:
            # If there is only one choice, `DrawnChoices` does not ask Hypothesis, so there is nothing to repeat.
            self.decisions.append(decided)
        return decided


class _OneExample(ExampleDatabase):
    """A Hypothesis database with one example. Hypothesis begins with the example, as if it had failed earlier.

    Hypothesis stores its smallest failures under one key, and larger, earlier failures under a secondary key. It
    shrinks only the examples under the secondary key, so the example is returned for this key.
    """

    def __init__(self, example: bytes) -> None:
        super().__init__()
        self._example = example

    def fetch(self, key: bytes) -> Iterable[bytes]:
        """Return the example."""
        return (self._example,) if key == b"one.secondary" else ()

    def save(self, key: bytes, value: bytes) -> None:
        """Do nothing."""

    def delete(self, key: bytes, value: bytes) -> None:
        """Do nothing."""


def draw(plan: Plan, block: int, index: int) -> Drawn:
    """Draw the program number ``index`` of block number ``block``, the same one in every run with this plan."""
    for attempt in range(_ATTEMPTS):
        choices = _Recorded(f"{plan.key}/{block}/{index}/{attempt}")
        try:
            program = _draw(plan, choices)
        except RejectedError:
            continue
        return Drawn(program=program, index=index, decisions=tuple(choices.decisions), discarded=attempt)
    raise RuntimeError(f"program {index} of block {block} was discarded {_ATTEMPTS} times")


def _draw(plan: Plan, choices: Choices) -> Program:
    if plan.related:
        return draw_related(choices, dynamo=plan.dynamo)
    bounds = (_SIZED_STATEMENTS, _SIZED_CALLS) if plan.sizes else (_STATEMENTS, _CALLS)
    grad = True if plan.grad else None
    program = draw_program(choices, *bounds, grad=grad, dynamo=plan.dynamo, sized=plan.sizes)
    return wrapped(program, choices) if plan.subclasses else program


@st.composite
def _strategy(draw: st.DrawFn, plan: Plan) -> Program:
    try:
        return _draw(plan, DrawnChoices(draw))
    except RejectedError:
        reject()


def draw_block(plan: Plan, block: int, indices: Iterable[int]) -> Iterator[Drawn]:
    """Draw the programs of a block that have the given indices. Each is drawn when the iterator reaches it."""
    return (draw(plan, block, index) for index in indices)


def shrink(plan: Plan, decisions: tuple[int, ...], fails: Callable[[Program], bool]) -> None:
    """Let Hypothesis call ``fails`` on simpler and simpler programs, starting with the program drawn by ``decisions``.

    Nothing is returned: the caller records in ``fails`` which programs fail. An exception from ``fails`` ends the
    search.
    """
    find(
        _strategy(plan),
        fails,
        settings=settings(
            database=_OneExample(choices_to_bytes(decisions)),
            derandomize=False,
            deadline=None,
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.reuse, Phase.shrink],
        ),
        database_key=b"one",
    )
