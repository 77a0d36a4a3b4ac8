"""Endless small programs to predict, by topic and level, drawn by the generator that also tests the engine.

What is true of each is computed when it is answered. Levels are numbers of statements; without one, practice is at the
level that the answers so far call for: up after three right in a row, down after a miss.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotlab.errors import UsageError
from aotlab.teach import kept
from aotlab.teach.prediction import Prediction
from aotlab.verification.programs import program_of

#: What is too much to reason about by head, or about something else.
_LEFT_OUT = frozenset({
    "around the trace", "checkpoint", "containers", "custom functions", "dtypes", "hooks", "out=", "random", "raises",
})  # fmt: skip
_ODD = re.compile(
    r"storage_offset|requires_grad\b|\.shape|is_leaf|as_strided|set_grad_enabled|inference_mode|unfold|movedim"
    r"|swapaxes|masked|addcmul|None|text|\brest\b"
)
#: An argument with a history, made of a leaf that nobody sees; without it the argument is the leaf.
_LEAF = re.compile(r"(?m)^\w+_leaf = (?=.*\n(\w+) = \w+_leaf \* 1$)(.*)\n.*$")
_NUMBERS = re.compile(r"numbers\(\d+(?:, )?([\d, ]*), dtype=[\w.]+\)")
#: Up to this level no argument that requires grad has a history.
_NO_HIDDEN_LEAVES = 2
_RIGHT_IN_A_ROW, _MOST_RESULTS = 3, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """What a topic asks, what its programs are about and are not, whether they differentiate, what their text has."""

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
    """Draw a small program and ask about it; answer by the ``answer`` of what comes back.

    Parameters
    ----------
    topic
        One of `TOPICS`.
    level
        How many statements, 1 to 4; None for the level that the answers so far call for.
    seed
        Which program; None for the next one that was not answered yet.

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
    if level is not None and level not in range(1, kept.HARDEST + 1):
        raise UsageError(f"level {level!r} is none; there are 1 to {kept.HARDEST}")
    so_far = kept.entry("practice", topic)
    level = max(1, min(kept.HARDEST, so_far["level"])) if level is None else level
    chosen = TOPICS[topic]
    counted = False

    def done(prediction: Prediction) -> str:
        nonlocal counted
        if counted:
            return ""
        counted = True
        entry, note = kept.change("practice", topic, lambda entry: _count(entry, level, prediction.right))
        so_far = f"{entry['right']} of {entry['asked']} right so far."
        return note or f"{so_far} `teach.practice` draws the next one, of level {entry['level']}: run its cell again."

    for text, function, args in _programs(chosen, level, so_far["asked"] if seed is None else seed):
        made = Prediction(function, args, ask=chosen.ask, program=text, done=done)
        same = [fact.value for fact in made.facts("same").values()]
        again = any(isinstance(value, frozenset) and value and not value & {*made.truth.inputs} for value in same)
        differentiated = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
        again = again or ("grad_none" in chosen.ask and not any(x.is_leaf for x in differentiated))
        if again or not chosen.results <= len(made.truth.outputs) <= _MOST_RESULTS:
            continue
        values = [fact.value for key in chosen.ask for fact in made.facts(key).values()]
        if any(values) and "raises" not in values and "eager" not in values:
            return made
    raise AssertionError  # the programs never end


def _count(entry: dict[str, Any], level: int, right: bool) -> None:
    """Write down an answer, and choose the level of the next program."""
    streak = entry["streak"] + 1 if right else 0
    up = streak == _RIGHT_IN_A_ROW
    entry.update(asked=entry["asked"] + 1, right=entry["right"] + right, streak=0 if up else streak)
    entry["level"] = min(kept.HARDEST, level + 1) if up else level if right else max(1, level - 1)


def _programs(topic: Topic, level: int, seed: int) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Yield programs that fit: their text, the function and its arguments."""
    for number in range(seed * 1_000_000, (seed + 1) * 1_000_000):
        program = program_of(number, max_statements=level, max_calls=1, grad=topic.grad)
        (setup,) = program.setups
        program = replace(program, before=(), after=())  # what a caller does with the results is not asked
        made = [_NUMBERS.sub(lambda found: f"torch.ones({found[1] or '()'})", line) for line in setup.lines]
        made = _LEAF.sub(r"\1 = \2", "\n".join(made)).splitlines() if level <= _NO_HIDDEN_LEAVES else made
        text = "\n".join((*made, *program.body, program.result))
        fits = setup.grad_mode and len(program.body) == level and len(program.parameters) <= 1 + (level + 1) // 2
        fits = fits and not _ODD.search(text) and (level > _NO_HIDDEN_LEAVES or "_leaf" not in text)
        fits = fits and bool(re.search(topic.text, "\n".join(program.body)))
        about = not topic.about or program.categories & topic.about
        if fits and about and not program.categories & (_LEFT_OUT | topic.without):
            lines = [*made, "", f"def program({', '.join(program.parameters)}):"]
            lines += [f"    {line}" for line in (*program.body, f"return {program.result}")]
            yield _run("\n".join(lines), setup.arguments)


def _run(text: str, arguments: tuple[str, ...]) -> tuple[str, Any, tuple[Any, ...]]:
    file = f"<practice {hash(text)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"torch": torch, "__name__": "practice"}
    exec(compile(text, file, "exec", dont_inherit=True), names)
    return text, names["program"], tuple(eval(argument, names) for argument in arguments)
