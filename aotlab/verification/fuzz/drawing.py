"""Where the programs come from: a seed each, and Hypothesis to make a failing one small.

Programs are decided by the same code in two ways (see `aotlab.verification.programs.choices`). A run takes a plain
random generator with a seed of its own for each program: it is several times as fast as Hypothesis, draws hardly
anything twice, and gives the same program wherever and whenever it is asked, whatever version of Hypothesis is
installed. The decisions are written down; from them Hypothesis makes the very same program again, and shrinks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, Verbosity, find, reject, settings
from hypothesis import strategies as st
from hypothesis.database import ExampleDatabase, choices_to_bytes

from aotlab.verification.fuzz.plan import Plan
from aotlab.verification.programs import Program
from aotlab.verification.programs.choices import Choices, DrawnChoices, RandomChoices, RejectedError
from aotlab.verification.programs.drawing import draw_program
from aotlab.verification.programs.related import draw_related
from aotlab.verification.programs.wrapped import wrapped

#: The bounds of a program, as `aotlab.verification.programs.programs` has them.
_STATEMENTS, _CALLS = 8, 3

#: Those of a program that is called with several sizes.
_SIZED_STATEMENTS, _SIZED_CALLS = 5, 4

#: Attempts for one program after which something must be wrong.
_ATTEMPTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A program, its place in the block, and the decisions that made it; ``discarded`` attempts came to nothing."""

    program: Program
    index: int
    decisions: tuple[int, ...]
    discarded: int


class _Recorded(RandomChoices):
    """Decides at random and writes down what Hypothesis would have to decide."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.decisions: list[int] = []

    def below(self, count: int) -> int:
        """Choose one of 0, 1, …, ``count - 1``."""
        decided = super().below(count)
        if count > 1:
            # Where there is nothing to choose Hypothesis is not asked.
            self.decisions.append(decided)
        return decided


class _OneExample(ExampleDatabase):
    """Makes Hypothesis begin with one given example, as if it had failed before.

    Hypothesis keeps its smallest failures under a key of their own, and what led to them under a second one. An example
    that came from under the first would not be shrunk any further.
    """

    def __init__(self, example: bytes) -> None:
        super().__init__()
        self._example = example

    def fetch(self, key: bytes) -> Iterable[bytes]:
        """Give out the example."""
        return (self._example,) if key == b"one.secondary" else ()

    def save(self, key: bytes, value: bytes) -> None:
        """Keep nothing."""

    def delete(self, key: bytes, value: bytes) -> None:
        """Forget nothing."""


def draw(plan: Plan, block: int, index: int) -> Drawn:
    """Draw one program of a block."""
    for attempt in range(_ATTEMPTS):
        choices = _Recorded(f"{plan.key}/{block}/{index}/{attempt}")
        try:
            # True means: only these; None leaves it to the generator.
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
    """Draw these programs of a block, one when the last one is done with."""
    return (draw(plan, block, index) for index in indices)


def shrink(plan: Plan, decisions: tuple[int, ...], fails: Callable[[Program], bool]) -> None:
    """Have Hypothesis call ``fails`` on ever simpler programs, beginning with the one that ``decisions`` make.

    What ``fails`` raises ends it.
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
