"""The exercises: right answers pass, wrong ones get a specific message, and no answer is revealed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from aotlab import teach
from aotlab.errors import UsageError
from aotlab.teach import exercises
from tests.teach.answers import ANSWERS

OF_THE_COURSE = [name for name, each in exercises._EXERCISES.items() if each.topic != "mine"]


def test_every_exercise_has_answers() -> None:
    """A right answer and two wrong ones of each are tried."""
    assert sorted(ANSWERS) == sorted(OF_THE_COURSE)
    assert [name for name, (right, wrong) in ANSWERS.items() if not right or len(wrong) < 2] == []


@pytest.mark.parametrize(("name", "answer"), [(name, each) for name, (right, _) in ANSWERS.items() for each in right])
def test_right_answers_pass(name: str, answer: Any) -> None:
    """Any right answer does, and the exercise is done then."""
    assert repr(teach.exercise(name).check(answer)) == "Right."
    assert teach.exercise(name).title.startswith("Done: ")


@pytest.mark.parametrize(
    ("name", "answer", "said"), [(name, *each) for name, (_, wrong) in ANSWERS.items() for each in wrong]
)
def test_wrong_answers_are_told_apart(
    name: str, answer: Any, said: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong answer gets its observed facts as a message and does not complete the exercise.

    The message has no traceback of a graph and no log of Dynamo.
    """
    found = repr(teach.exercise(name).check(answer))
    assert found.startswith("Not yet: ")
    assert said in found
    assert capsys.readouterr() == ("", "")
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []
    assert not teach.exercise(name).title.startswith("Done")


def blank(shape: object, strides: object, offset: object) -> Any:
    """Stand in an answer cell."""


@pytest.mark.parametrize("answer", [..., None, blank, lambda: None])
def test_no_answer(answer: object) -> None:
    """An unchanged answer cell of a page does not count as a try."""
    assert repr(teach.exercise("room").check(answer)).startswith("Not yet: there is no answer.")
    assert exercises.progress_file.entry("exercises", "room")["tries"] == 0


def test_answers_of_a_wrong_type_and_such_that_raise() -> None:
    """Both are said in a sentence; neither raises."""
    said = repr(teach.exercise("room").check(3))
    assert said == "Not yet: the answer must be a function, but this is of type int."
    said = repr(teach.exercise("diagonal-stride").check(lambda: 1))
    assert said.startswith("Not yet: it raises TypeError: ")


def test_an_answer_that_is_a_constant() -> None:
    """It is an answer."""
    assert repr(teach.exercise("diagonal-stride").check(lambda n: 7)).startswith("Not yet: for n = 2 it returns 7")


def test_hints_come_one_by_one() -> None:
    """Each hint is given after the previous ones. A fourth request says that there are no more."""
    exercise = teach.exercise("room")
    given = [repr(exercise.hint()) for _ in range(4)]
    assert given[:3] == [" ".join(exercise.hints[:count]) for count in (1, 2, 3)]
    assert given[3] == f"{given[2]}\nThere are no more hints."
    assert exercises.progress_file.entry("exercises", "room")["hints"] == 3


def test_a_page_goes_on_with_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """A right answer is used. A wrong or missing one is replaced by the course's answer, which is shown on request."""
    exercise = teach.exercise("guards")
    reference = exercise.reference
    assert reference is not None
    right = lambda args: reference(args)  # noqa: E731  # another object, as a reader's is
    assert exercise.take(right) is right
    assert capsys.readouterr().out == "Right.\n"
    for wrong in (blank, len):
        assert exercise.take(wrong) is reference
        assert capsys.readouterr().out.endswith("the course's answer; `.solution()` shows it.\n")
    assert repr(exercise.solution()).startswith("def guards(args):\n")
    assert repr(teach.exercise("room").solution()).startswith("There is no solution")
    assert teach.exercise("room").take(len) is len


def test_what_is_done_stays_done() -> None:
    """A later mistake does not undo a completed exercise."""
    exercise = teach.exercise("diagonal-stride")
    exercise.check(lambda n: n + 1)
    exercise.check(lambda n: n)
    assert exercises.progress_file.entry("exercises", "diagonal-stride") == {
        "topic": "storages", "done": True, "tries": 2, "hints": 0,
    }  # fmt: skip


def test_an_exercise_of_a_teachers(file: Path) -> None:
    """A teacher's function with a docstring is an exercise: it is found, checked, and shown on the map."""

    @teach.new_exercise("mine", takes="number")
    def threes(answer: Any) -> None:
        """How many
        are three?

        - It is odd.
        - It is prime,
          and not 2.
        - It is small.
        """  # noqa: D205, D400
        teach.require(answer == 3, f"{answer} are not three")

    try:
        assert teach.exercise("threes").task == "How many are three?"
        assert threes.hints == ("It is odd.", "It is prime, and not 2.", "It is small.")
        assert repr(threes.check(4)).startswith("Not yet: 4 are not three.")
        assert repr(threes.check(3)) == "Right."
        (row,) = [row for row in teach.progress().rows if row[0] == "mine"]
        assert row == ("mine", "1 of 1", "✓\N{NO-BREAK SPACE}threes", "")
    finally:
        del exercises._EXERCISES["threes"]


def test_mistakes_of_a_teachers() -> None:
    """A teacher's exercise with too few hints, or with an unknown kind of answer, is an error."""

    def bad(answer: object) -> None:
        """Do it.

        - A hint.
        """

    for takes in ("function", "anything"):
        with pytest.raises(UsageError, match="`bad` needs a task, a list of three hints"):
            teach.new_exercise("mine", takes=takes)(bad)
    with pytest.raises(UsageError, match="there is no exercise `bad`; there are second-column"):
        teach.exercise("bad")
