"""Exercises: a task, a check that runs the answer, and three hints. Any right answer passes.

An exercise has a solution only if its page uses the answer in later cells. The reader can display the solution.

A teacher writes an exercise as a function. Its docstring is the task and three hints. Its calls of `require` are the
check.

>>> @new_exercise("mine")
... def twice(answer):
...     \"\"\"Write `answer(x)`, which returns twice `x`.
...
...     - It is a product.
...     - One factor is `x`.
...     - The other one is 2.
...     \"\"\"
...     require(answer(3) == 6, f"of 3 it makes {answer(3)}")
>>> exercise("twice").task, twice.hints[0]
('Write `answer(x)`, which returns twice `x`.', 'It is a product.')
>>> twice.judge(lambda x: x + 2)
Traceback (most recent call last):
aotlab.teach.exercises.NotYetError: of 3 it makes 5
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aotlab.errors import UsageError
from aotlab.teach import progress_file
from aotlab.teach.shown import Shown

_KINDS = {"function": Callable, "number": (int, float), "text": str, "names": (str, list, tuple, set), "": object}
_EXERCISES: dict[str, Exercise] = {}
_HINTS = 3
#: The type annotations, which are removed from a program before it is shown.
_TYPES = r": (torch\.Tensor|int)\b| -> [\w.]+"


class NotYetError(Exception):
    """The answer is not right yet.

    The message is the observation of the check. ``code`` is the program for which the check made the observation, or
    empty.
    """

    def __init__(self, seen: str, code: str = "") -> None:
        super().__init__(seen)
        self.code = code


def require(right: object, seen: str, code: str = "") -> None:
    """Raise unless a condition of an answer holds.

    Parameters
    ----------
    right
        The condition; true if the answer passes.
    seen
        The observation of the check, as a clause without a capital letter and a period.
    code
        The program for which the check made this observation. It is shown below the message.

    Raises
    ------
    NotYetError
        The condition does not hold.
    """
    if not right:
        raise NotYetError(seen, code)


class Said(Shown):
    """The reply to a reader: one or two sentences, and possibly a program."""

    def __init__(self, title: str, note: str = "", code: str = "") -> None:
        self.title, self.note, self.code = title, note, code


@dataclass(frozen=True, repr=False)
class Exercise(Shown):
    """A task with a check and hints.

    Attributes
    ----------
    name, topic
        The name of the exercise, and the topic under which `progress` lists it.
    task
        The text of the task.
    hints
        Three hints. Each hint says more than the one before.
    judge
        The check. It is called with the answer, and raises `NotYetError` if the answer is wrong.
    takes
        The kind of answer: ``"function"``, ``"number"``, ``"text"``, ``"names"``, or ``""`` for any kind.
    code
        The program that the task is about, if there is one.
    reference, reference_code
        The course's own answer and its text, for a page that uses the answer in later cells.
    """

    name: str
    topic: str
    task: str
    hints: tuple[str, ...]
    judge: Callable[[Any], None] = field(compare=False)
    takes: str = "function"
    code: str = ""
    reference: Callable[..., Any] | None = field(default=None, compare=False)
    reference_code: str = ""

    @property
    def title(self) -> str:  # type: ignore[override]  # a property overrides an attribute
        """The task, which begins with "Done:" if the exercise is done."""
        return f"{'Done: ' if progress_file.entry('exercises', self.name)['done'] else ''}{self.task}"

    @property
    def note(self) -> str:  # type: ignore[override]  # a property overrides an attribute
        """A sentence that says how to answer."""
        if self.reference_code:
            return f'`teach.exercise("{self.name}").hint()` gives a hint, `.solution()` shows a solution.'
        sample = {"names": '"x, y"', "number": "0"}.get(self.takes, "answer")
        return f'`teach.exercise("{self.name}").check({sample})` checks an answer, `.hint()` gives a hint.'

    def check(self, answer: object) -> Said:
        """Run an answer, and say whether it is right. If it is wrong, give the observation of the check."""
        if answer is None or answer is ... or _is_blank(answer):
            return Said("Not yet: there is no answer.", self._help())
        if not isinstance(answer, _KINDS[self.takes]):  # type: ignore[arg-type]  # Callable is fine there
            wanted = self.takes if self.takes == "names" else f"a {self.takes}"
            return Said(f"Not yet: the answer must be {wanted}, but this is of type {type(answer).__name__}.")
        wrong = code = ""
        try:
            self.judge(answer)
        except NotYetError as error:
            wrong, code = str(error), error.code
        except Exception as error:  # noqa: BLE001  # the answer may raise anything
            wrong = f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"

        def tried(entry: dict[str, Any]) -> None:
            entry.update(topic=self.topic, tries=entry["tries"] + 1, done=entry["done"] or not wrong)

        _, note = progress_file.change("exercises", self.name, tried)
        return Said(f"Not yet: {wrong.rstrip('.')}.", note or self._help(), code) if wrong else Said("Right.", note)

    def take(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Check an answer and print the result. Return a function for the later cells of the page.

        Return the answer if it is right, or if the exercise has no reference answer. Otherwise return the reference
        answer.
        """
        said = self.check(answer)
        print(said)
        if said.title == "Right." or self.reference is None:
            return answer
        print("Until the answer is right, the page uses the course's answer; `.solution()` shows it.")
        return self.reference

    def solution(self) -> Said:
        """Show the course's own answer, if this exercise has one."""
        return Said(
            "" if self.reference_code else "There is no solution; any right answer passes.", code=self.reference_code
        )

    def hint(self) -> Said:
        """Show the hints that were given before, and the next of the three hints."""

        def asked(entry: dict[str, Any]) -> None:
            entry.update(topic=self.topic, hints=min(_HINTS, entry["hints"] + 1))

        before = progress_file.entry("exercises", self.name)["hints"]
        entry, note = progress_file.change("exercises", self.name, asked)
        hints = self.hints[: entry["hints"]]
        return Said(" ".join(hints), note or ("There are no more hints." if before == _HINTS else ""))

    def _help(self) -> str:
        return f'`teach.exercise("{self.name}").hint()` gives a hint.'


def _is_blank(answer: object) -> bool:
    """Return whether an answer is a function that has no body yet."""
    if not inspect.isfunction(answer):
        return False
    steps = {
        (each.opname, each.argval) for each in dis.get_instructions(answer) if each.opname not in ("RESUME", "NOP")
    }
    return steps <= {("LOAD_CONST", None), ("RETURN_CONST", None), ("RETURN_VALUE", None)}


def new_exercise(
    topic: str,
    *,
    takes: str = "function",
    program: Callable[..., Any] | None = None,
    reference: tuple[Callable[..., Any] | None, str] = (None, ""),
) -> Callable[[Callable[[Any], None]], Exercise]:
    """Return a decorator that turns a check into an exercise with the name of the function.

    The docstring of the function is the task and the list of three hints. Its calls of `require` are the check.

    Parameters
    ----------
    topic
        The topic under which `progress` lists the exercise.
    takes
        The kind of answer; see `Exercise`.
    program
        The function that the task calls "this program". Its source is shown below the task.
    reference
        The course's own answer and its text, for a page that uses the answer in later cells.

    Raises
    ------
    UsageError
        The docstring is not a task with a list of three hints, or ``takes`` is not a kind of answer.
    """

    def decorator(judge: Callable[[Any], None]) -> Exercise:
        name = judge.__name__.replace("_", "-")
        task, *hints = (" ".join(part.split()) for part in re.split(r"\n *- ", inspect.cleandoc(judge.__doc__ or "")))
        if not task or len(hints) != _HINTS or takes not in _KINDS:
            raise UsageError(
                f"exercise `{name}` needs a task, a list of three hints, and takes one of {', '.join(_KINDS)}"
            )
        code = "" if program is None else re.sub(_TYPES, "", inspect.getsource(program)).strip()
        _EXERCISES[name] = Exercise(name, topic, task, tuple(hints), judge, takes, code, *reference)
        return _EXERCISES[name]

    return decorator


def exercise(name: str) -> Exercise:
    """Return the exercise with this name.

    Raises
    ------
    UsageError
        There is no exercise with this name.
    """
    if name not in _EXERCISES:
        raise UsageError(f"there is no exercise `{name}`; there are {', '.join(_EXERCISES)}")
    return _EXERCISES[name]


def progress() -> progress_file.Progress:
    """Show the exercises and the practice that are done, by topic. The result can be exported and reset."""
    topics: dict[str, list[str]] = {}
    for each in _EXERCISES.values():
        topics.setdefault(each.topic, []).append(each.name)
    for topic in progress_file.read()["practice"]:
        topics.setdefault(topic, [])
    return progress_file.Progress(topics)
