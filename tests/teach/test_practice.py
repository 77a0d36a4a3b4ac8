"""Practice: programs without end, true to their topic and level, that follow how one fares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aotlab import teach
from aotlab.errors import UsageError
from aotlab.teach import progress_file
from aotlab.teach.programs import TOPICS

#: Those whose programs take a second or two to be found.
FULL = pytest.mark.tier("full")


@pytest.mark.parametrize("topic", [each if each == "writes" else pytest.param(each, marks=FULL) for each in TOPICS])
def test_programs(topic: str) -> None:
    """The same seed gives the same program, another seed another; the answer is computed, and is not nothing."""
    first, again, other = (teach.practice(topic, 1, seed) for seed in (0, 0, 1))
    assert first.code == again.code != other.code
    facts = {key: {name: fact.value for name, fact in first.facts(key).items()} for key in first.ask}
    assert any(any(values.values()) for values in facts.values())
    body = first.code.partition("\n\ndef ")[2].partition("\n\n")[0].splitlines()
    assert len(body) == 3  # the first line, one statement, and the return


def test_no_result_stands_there_twice() -> None:
    """There would be nothing to find out."""
    for seed in range(6):
        same = teach.practice("writes", 1, seed).facts("same").values()
        assert not any(str(fact.value).startswith("out") for fact in same)


def test_levels() -> None:
    """A level is a number of statements."""
    body = teach.practice("writes", 4, 0).code.partition("\n\ndef ")[2].partition("\n\n")[0].splitlines()
    assert len(body) == 6


def test_arguments_are_what_the_listing_names() -> None:
    """None of them comes in a tuple, or in a dict."""
    assert [seed for seed in range(4) if "rest" in teach.practice("inputs", 3, seed).code] == []


def right_answer(program: teach.Prediction) -> dict[str, object]:
    """Answer as one who knows."""
    return {"writes": [name for name, fact in program.facts("writes").items() if fact.value],
            "shares": {name: list(fact.value) for name, fact in program.facts("shares").items()}}  # type: ignore[call-overload]  # fmt: skip


def test_practice_follows_how_one_fares() -> None:
    """Three right answers in a row lead to the next level, a miss leads back; one program counts once."""
    titles = set()
    for number in range(3):
        program = teach.practice("writes")
        titles.add(program.code)
        answered = program.answer(**right_answer(program))
        assert answered.right, answered
        assert f"{number + 1} of {number + 1} right so far" in answered.note
    assert len(titles) == 3
    assert progress_file.entry("practice", "writes") == {"level": 2, "asked": 3, "right": 3, "streak": 0}
    program = teach.practice("writes")
    assert not program.answer(writes="", shares="").right
    program.answer(**right_answer(program))
    assert progress_file.entry("practice", "writes") == {"level": 1, "asked": 4, "right": 3, "streak": 0}
    (row,) = [row for row in teach.progress().rows if row[0] == "writes"]
    assert row[-1] == "level 1: 3 of 4 right"


def test_what_is_not_understood_counts_for_nothing() -> None:
    """One may write it again."""
    program = teach.practice("writes")
    answers = right_answer(program)
    misspelt = program.answer(**{**answers, "writes": "aa"})
    assert misspelt.title.endswith(" Not understood, so not counted: `writes`.")
    assert progress_file.entry("practice", "writes")["asked"] == 0
    assert program.answer(**answers).right
    assert progress_file.entry("practice", "writes")["asked"] == 1


@FULL
@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_some_input_collects_a_gradient_or_none(level: int) -> None:
    """Of inputs that are no leaves alone there would be nothing to find out."""
    for seed in range(4):
        assert ", a leaf" in teach.practice("autograd", level, seed).code


def test_a_level_that_there_is_not(file: Path) -> None:
    """A file of another version, or edited by hand, does not lead astray."""
    file.parent.mkdir()
    file.write_text('{"practice": {"writes": {"level": 99, "asked": 0, "right": 0, "streak": 0}}}')
    assert not teach.practice("writes").answer(writes="", shares="").right
    assert progress_file.entry("practice", "writes")["level"] == progress_file.HARDEST - 1


def test_what_is_not_answered_yet_is_asked_again() -> None:
    """A restart loses nothing: the next program is the first one that has no answer."""
    assert teach.practice("inputs").code == teach.practice("inputs").code


@pytest.mark.parametrize(
    ("topic", "level", "said"),
    [("all", 1, "there is no topic 'all'; there are storages"), ("writes", 5, "there are 1 to 4")],
)
def test_mistakes(topic: str, level: int, said: str) -> None:
    """Topics and levels that there are not."""
    with pytest.raises(UsageError, match=said):
        teach.practice(topic, level)


@pytest.mark.tier("full")
def test_without_hypothesis() -> None:
    """A plain installation has no Hypothesis; the course, practice included, does without."""
    code = """
import sys
sys.modules["hypothesis"] = None
from aotlab import teach
print(teach.practice("storages", 1, 0).answer(shares=...).title)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "Not answered yet: `shares`.\n"
