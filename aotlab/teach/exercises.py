"""Exercises: a task, a check that runs the answer, three hints; any right answer passes.

A solution is kept only where a page goes on with the answer, and shown when asked for.

A teacher writes one as a function: its docstring is the task and three hints, its `require` lines are the check.

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
from aotlab.teach import kept
from aotlab.teach.shown import Shown

_KINDS = {"function": Callable, "number": (int, float), "text": str, "names": (str, list, tuple, set), "": object}
_KNOWN: dict[str, Exercise] = {}
_HINTS = 3
#: What is not shown of a program.
_TYPES = r": (torch\.Tensor|int)\b| -> [\w.]+"


class NotYetError(Exception):
    """An answer that is not right yet; the text says what was seen, ``code`` of which program."""

    def __init__(self, seen: str, code: str = "") -> None:
        super().__init__(seen)
        self.code = code


def require(right: object, seen: str, code: str = "") -> None:
    """Go on if something holds of an answer; else say what was seen, as a clause, and of which program.

    Raises
    ------
    NotYetError
        It does not hold.
    """
    if not right:
        raise NotYetError(seen, code)


class Said(Shown):
    """One or two sentences, and a program."""

    def __init__(self, title: str, note: str = "", code: str = "") -> None:
        self.title, self.note, self.code = title, note, code


@dataclass(frozen=True, repr=False)
class Exercise(Shown):
    """A task with a check and hints.

    Attributes
    ----------
    name, topic
        What it is called by, and the topic under which `progress` shows it.
    task
        What to do.
    hints
        Three sentences, each of which says more than the one before.
    judge
        Called with the answer; raises `NotYetError` where that is wrong.
    takes
        What an answer has to be: ``"function"``, ``"number"``, ``"text"``, ``"names"``, or ``""`` for anything.
    code
        The program that the task is about, if there is one.
    own, own_code
        An answer of the course's, and its text, for a page that needs one to go on.
    """

    name: str
    topic: str
    task: str
    hints: tuple[str, ...]
    judge: Callable[[Any], None] = field(compare=False)
    takes: str = "function"
    code: str = ""
    own: Callable[..., Any] | None = field(default=None, compare=False)
    own_code: str = ""

    @property
    def title(self) -> str:  # type: ignore[override]  # what is shown above
        """The task, and whether it is done."""
        return f"{'Done: ' if kept.entry('exercises', self.name)['done'] else ''}{self.task}"

    @property
    def note(self) -> str:  # type: ignore[override]  # what is shown below
        """How to answer."""
        if self.own_code:
            return f'`teach.exercise("{self.name}").hint()` gives a hint, `.solution()` shows a solution.'
        sample = {"names": '"x, y"', "number": "0"}.get(self.takes, "answer")
        return f'`teach.exercise("{self.name}").check({sample})` checks an answer, `.hint()` gives a hint.'

    def check(self, answer: object) -> Said:
        """Run an answer, and say whether it is right, or what was seen instead."""
        if answer is None or answer is ... or _is_blank(answer):
            return Said("Not yet: there is no answer.", self._help())
        if not isinstance(answer, _KINDS[self.takes]):  # type: ignore[arg-type]  # Callable is fine there
            wanted = self.takes if self.takes == "names" else f"a {self.takes}"
            return Said(f"Not yet: the answer is to be {wanted}, and this is of type {type(answer).__name__}.")
        wrong = code = ""
        try:
            self.judge(answer)
        except NotYetError as error:
            wrong, code = str(error), error.code
        except Exception as error:  # noqa: BLE001  # the answer's own
            wrong = f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"

        def tried(entry: dict[str, Any]) -> None:
            entry.update(topic=self.topic, tries=entry["tries"] + 1, done=entry["done"] or not wrong)

        _, note = kept.change("exercises", self.name, tried)
        return Said(f"Not yet: {wrong.rstrip('.')}.", note or self._help(), code) if wrong else Said("Right.", note)

    def take(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Check an answer, print what is said of it, and return it if it is right; else the course's own."""
        said = self.check(answer)
        print(said)
        if said.title == "Right." or self.own is None:
            return answer
        print("Until then the page goes on with the course's own; `.solution()` shows it.")
        return self.own

    def solution(self) -> Said:
        """Show the course's own answer, where a page has one to go on with."""
        return Said("" if self.own_code else "There is no solution; any right answer passes.", code=self.own_code)

    def hint(self) -> Said:
        """Give the next of three hints, after those that were given before."""

        def asked(entry: dict[str, Any]) -> None:
            entry.update(topic=self.topic, hints=min(_HINTS, entry["hints"] + 1))

        before = kept.entry("exercises", self.name)["hints"]
        entry, note = kept.change("exercises", self.name, asked)
        given = self.hints[: entry["hints"]]
        return Said(" ".join(given), note or ("There are no more hints." if before == _HINTS else ""))

    def _help(self) -> str:
        return f'`teach.exercise("{self.name}").hint()` gives a hint.'


def _is_blank(answer: object) -> bool:
    """Whether an answer is a function that has no body yet."""
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
    own: tuple[Callable[..., Any] | None, str] = (None, ""),
) -> Callable[[Callable[[Any], None]], Exercise]:
    """Make a function an exercise of its name: its docstring is the task and the hints, what it requires is the check.

    What the task calls "this program" is the source of ``program``, shown below it. ``own`` is an answer, and its text,
    for a page that goes on with it.

    Raises
    ------
    UsageError
        The docstring is no task with a list of three hints, or ``takes`` is none of the kinds.
    """

    def made(judge: Callable[[Any], None]) -> Exercise:
        name = judge.__name__.replace("_", "-")
        task, *hints = (" ".join(part.split()) for part in re.split(r"\n *- ", inspect.cleandoc(judge.__doc__ or "")))
        if not task or len(hints) != _HINTS or takes not in _KINDS:
            raise UsageError(
                f"exercise `{name}` needs a task, a list of three hints, and takes one of {', '.join(_KINDS)}"
            )
        code = "" if program is None else re.sub(_TYPES, "", inspect.getsource(program)).strip()
        _KNOWN[name] = Exercise(name, topic, task, tuple(hints), judge, takes, code, *own)
        return _KNOWN[name]

    return made


def exercise(name: str) -> Exercise:
    """Return an exercise by its name.

    Raises
    ------
    UsageError
        There is none of that name.
    """
    if name not in _KNOWN:
        raise UsageError(f"there is no exercise `{name}`; there are {', '.join(_KNOWN)}")
    return _KNOWN[name]


def progress() -> kept.Progress:
    """Show what was done, topic by topic; it can be exported and reset."""
    topics: dict[str, list[str]] = {}
    for each in _KNOWN.values():
        topics.setdefault(each.topic, []).append(each.name)
    for topic in kept.read()["practice"]:
        topics.setdefault(topic, [])
    return kept.Progress(topics)
