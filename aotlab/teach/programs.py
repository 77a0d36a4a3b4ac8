"""Small programs to predict, by topic and level. The random generator that also tests aotlab draws them.

The facts about a program are computed when the reader answers. The level is the number of statements. If the reader
chooses no level, it depends on the answers so far: it goes up after three right answers in a row, and down after a
wrong answer.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotlab.errors import UsageError
from aotlab.teach import progress_file
from aotlab.teach.prediction import Prediction
from aotlab.verification.programs import program_of

#: Categories of the generator whose programs are left out, because they are too hard to predict without running them,
#: or are about another subject. `_ODD` finds more such programs by their text.
_LEFT_OUT = frozenset({
    "around the trace", "checkpoint", "containers", "custom functions", "dtypes", "hooks", "out=", "random", "raises",
    "numbers in state", "sizes from values", "storage sizes",
})  # fmt: skip
_ODD = re.compile(
    r"storage_offset|requires_grad\b|\.shape|is_leaf|as_strided|set_grad_enabled|inference_mode|unfold|movedim"
    r"|swapaxes|masked|addcmul|None|text|\brest\b"
)
#: Two lines that compute a non-leaf argument from a leaf. In easy programs, the leaf itself is the argument.
_LEAF = re.compile(r"(?m)^\w+_leaf = (?=.*\n(\w+) = \w+_leaf \* 1$)(.*)\n.*$")
_NUMBERS = re.compile(r"numbers\(\d+(?:, )?([\d, ]*), dtype=[\w.]+\)")
#: Up to this level, all arguments that require grad are leaves.
_NO_HIDDEN_LEAVES = 2
_RIGHT_IN_A_ROW, _MOST_RESULTS = 3, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic of `practice`: its questions, and the conditions for its programs.

    Attributes
    ----------
    ask
        The keywords of the topic's questions, which are keys of `questions.QUESTIONS`.
    about, without
        Names of features, as in `Program.categories`. A program of the topic must have a feature of ``about``, unless
        ``about`` is empty, and must not have a feature of ``without``.
    grad
        True for programs that differentiate, False for programs in which no argument requires grad.
    text
        A regular expression that must match in the body of a program.
    results
        The smallest number of results that a program must have.
    """

    ask: tuple[str, ...]
    about: frozenset[str]
    without: frozenset[str] = frozenset()
    grad: bool = False
    text: str = ""
    results: int = 1


_TOGETHER = frozenset({"overlapping inputs", "duplicates"})
_WRITES = frozenset({"in-place", "hidden writes", "in-place metadata"})
TOPICS = {
    "storages": Topic(ask=("shares",), about=frozenset({"views"}), without=_TOGETHER | _WRITES),
    "writes": Topic(ask=("writes", "shares"), about=frozenset({"in-place"}), without=_TOGETHER | {"in-place metadata"}),
    "metadata": Topic(ask=("writes", "metadata", "storage"), about=frozenset({"in-place metadata"}), without=_TOGETHER),
    "autograd": Topic(ask=("grad_none",), about=frozenset(), without=_TOGETHER, grad=True),
    "outputs": Topic(ask=("shares", "same"), about=frozenset({"views"}), without=_TOGETHER, results=2),
    "inputs": Topic(ask=("writes", "shares"), about=_TOGETHER),
    "saved": Topic(
        ask=("saved",),
        about=frozenset(),
        without=_TOGETHER | {"in-place metadata"},
        grad=True,
        text=r"sin|exp|square|softmax| @ |\b(\w+) \* (?!\1$)[a-dv]",
    ),
}


def practice(topic: str = "storages", level: int | None = None, seed: int | None = None) -> Prediction:
    """Draw a small program and ask about it. The ``answer`` method of the result takes the answers.

    Parameters
    ----------
    topic
        One of `TOPICS`.
    level
        The number of statements, 1 to 4. None chooses the level from the answers so far.
    seed
        The number of the program. None chooses the next program that was not answered yet.

    Raises
    ------
    UsageError
        There is no such topic or level.

    Examples
    --------
    >>> practice("storages", 1, 0).ask
    ('shares',)
    """
    if topic not in TOPICS:
        raise UsageError(f"there is no topic {topic!r}; there are {', '.join(TOPICS)}")
    if level is not None and level not in range(1, progress_file.HARDEST + 1):
        raise UsageError(f"there is no level {level!r}; there are 1 to {progress_file.HARDEST}")
    so_far = progress_file.entry("practice", topic)
    level = max(1, min(progress_file.HARDEST, so_far["level"])) if level is None else level
    chosen = TOPICS[topic]
    counted = False

    def done(prediction: Prediction) -> str:
        nonlocal counted
        if counted:
            return ""
        counted = True
        entry, note = progress_file.change("practice", topic, lambda entry: _count(entry, level, prediction.right))
        so_far = f"{entry['right']} of {entry['asked']} right so far."
        return note or f"{so_far} `teach.practice` draws the next one, of level {entry['level']}: run its cell again."

    for text, function, args in _programs(chosen, level, so_far["asked"] if seed is None else seed):
        candidate = Prediction(function, args, ask=chosen.ask, program=text, done=done)
        same = [fact.value for fact in candidate.facts("same").values()]
        again = any(isinstance(value, frozenset) and value and not value & {*candidate.truth.inputs} for value in same)
        differentiated = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
        again = again or ("grad_none" in chosen.ask and not any(x.is_leaf for x in differentiated))
        if again or not chosen.results <= len(candidate.truth.outputs) <= _MOST_RESULTS:
            continue
        values = [fact.value for key in chosen.ask for fact in candidate.facts(key).values()]
        if any(values) and "raises" not in values and "eager" not in values:
            return candidate
    raise AssertionError  # the loop never runs out of programs


def _count(entry: dict[str, Any], level: int, right: bool) -> None:
    """Record an answer, and choose the level of the next program."""
    streak = entry["streak"] + 1 if right else 0
    up = streak == _RIGHT_IN_A_ROW
    entry.update(asked=entry["asked"] + 1, right=entry["right"] + right, streak=0 if up else streak)
    entry["level"] = min(progress_file.HARDEST, level + 1) if up else level if right else max(1, level - 1)


def _programs(topic: Topic, level: int, seed: int) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield programs that fit the topic and the level: the text, the function and its arguments."""
    for number in range(seed * 1_000_000, (seed + 1) * 1_000_000):
        program = program_of(number, max_statements=level, max_calls=1, grad=topic.grad)
        (setup,) = program.setups
        program = replace(program, before=(), after=())  # no question is about the caller's use of the results
        setup_lines = [_NUMBERS.sub(lambda match: f"torch.ones({match[1] or '()'})", line) for line in setup.lines]
        setup_lines = (
            _LEAF.sub(r"\1 = \2", "\n".join(setup_lines)).splitlines() if level <= _NO_HIDDEN_LEAVES else setup_lines
        )
        text = "\n".join((*setup_lines, *program.body, program.result))
        fits = setup.grad_mode and len(program.body) == level and len(program.parameters) <= 1 + (level + 1) // 2
        fits = fits and not _ODD.search(text) and (level > _NO_HIDDEN_LEAVES or "_leaf" not in text)
        fits = fits and bool(re.search(topic.text, "\n".join(program.body)))
        about = not topic.about or program.categories & topic.about
        if fits and about and not program.categories & (_LEFT_OUT | topic.without):
            lines = [*setup_lines, "", f"def program({', '.join(program.parameters)}):"]
            lines += [f"    {line}" for line in (*program.body, f"return {program.result}")]
            yield _run("\n".join(lines), setup.arguments)


def _run(text: str, arguments: tuple[str, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    file = f"<practice {hash(text)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"torch": torch, "__name__": "practice"}
    exec(compile(text, file, "exec", dont_inherit=True), names)
    return text, names["program"], tuple(eval(argument, names) for argument in arguments)
