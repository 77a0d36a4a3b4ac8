"""Describe dynamic sizes and numbers in words: the guards on them, and whether a recompile made them dynamic."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from aotlab.errors import UserLine
from aotlab.report.model import Guard, Miss
from aotlab.report.recompiles import DYNAMIC, PASS_A_TENSOR
from aotlab.report.text import first_line, in_cell

#: `_NAME` matches the name of a tensor or a number in a guard (``x``, ``args[0].w``). `_PART` also matches a size or a
#: stride of a tensor (``x.size(0)``).
_NAME = r"(?:[A-Za-z_][\w.]*(?:\[[^\]]*\][\w.]*)*)"
_PART = rf"{_NAME}(?:\(\d*\))?"
_SIZE = re.compile(rf"^({_NAME})\.size\((\d+)\)$")
#: Patterns of guards that are Python expressions, each with a function that writes such a guard in words.
_WORDS: list[tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), words)
    for pattern, words in (
        (rf"^({_PART}) == (-?[\d.]+)$", lambda m: f"`{m[1]}` is {m[2]}: the program fixes it"),
        (rf"^({_PART}) != (-?[\d.]+)$", lambda m: f"`{m[1]}` is not {m[2]}"),
        (rf"^(-?[\d.]+) <= ({_PART})$", lambda m: f"`{m[2]}` is at least {m[1]}"),
        (rf"^({_PART}) <= (-?[\d.]+)$", lambda m: f"`{m[1]}` is at most {m[2]}"),
        (rf"^(-?[\d.]+) <= ({_PART}) <= (-?[\d.]+)$", lambda m: f"`{m[2]}` is from {m[1]} to {m[3]}"),
        (rf"^not math\.isnan\(({_PART})\)$", lambda m: f"`{m[1]}` is not nan"),
        (r"^\((.+) % (\d+)\) == 0$", lambda m: f"`{_bare(m[1])}` is divisible by {m[2]}"),
        (r"^\((.+) % (\d+)\) != 0$", lambda m: f"`{_bare(m[1])}` is not divisible by {m[2]}"),
    )
]
_ERROR = re.compile(
    r"^(?P<reason>.*), at (?P<file>\S+):(?P<line>\d+)(?: \((?P<code>.*)\))?(?:[:;] (?P<instead>[^;]*))?$", re.DOTALL
)
_FIXED = re.compile(rf"^{_PART} == -?(?:[\d.]+(?:e[-+]?\d+)?|inf)$")
_AT_LEAST = re.compile(r"^`.+` is at least (\d+)$")
_FUNCTIONS = re.compile(r"\b(?:math\.\w+|not|and|or|if|else|float|int|abs|max|min)\b", re.IGNORECASE)
_BROKEN = re.compile(r"^the (?:compiled entry|earlier graph) expects `(.+)`, which does not hold for this call$")


def guard(kind: str, subject: str, sentence: str, lines: Mapping[str, UserLine]) -> Guard:
    """Make the row of a guard.

    The ``sentence`` of a guard on a size (``kind`` is ``"size"``) is a Python expression, which this function converts
    to words. Other guards are sentences already. ``lines`` maps the text of a guard on a size or of a condition to the
    user line that caused the guard.
    """
    text = sentence.strip("`")
    if kind != "size":
        line = lines.get(sentence)  # the page shows it behind the sentence
        shown = sentence if line is None else re.sub(r"(`) at .+:\d+( is \w+)$", r"\1\2", sentence)
        return Guard(kind=kind, subject=subject, sentence=shown, line=line)
    for pattern, words in _WORDS:
        match = pattern.match(text)
        if match is not None:
            sentence = words(match)
            break
    return Guard(kind=kind, subject=_names(text) or subject, sentence=sentence, line=lines.get(text))


def limits(guards: Collection[Guard]) -> dict[str, str]:
    """Map each guarded size or number to words for the values that a graph accepts: ``{"x.size(0)": " from 2 on"}``.

    ``guards`` are the graph's guards. A dynamic size or number without guards is not in the result, because the graph
    accepts all its values.
    """
    limit_words: dict[str, str] = {}
    for each in (each for each in guards if each.kind == "size"):
        low = _AT_LEAST.match(each.sentence)
        for name in each.subject.split(", "):
            alone = low is not None and name not in limit_words
            limit_words[name] = f" from {low[1]} on" if low is not None and alone else " that its guards allow"
    return limit_words


def settled(
    miss: Miss,
    *,
    vary: Collection[str],
    why: str,
    guards: Collection[Guard],
    caused_by: Mapping[str, UserLine],
    earlier: Mapping[str, UserLine],
) -> Miss:
    """Complete a miss: say whether the size or number that differed is dynamic in the new graph, and what to change.

    A *miss* is the reason why an earlier graph did not accept a call, so that a new graph was compiled. ``vary`` has
    the names of the sizes and numbers that are dynamic in the new graph. If some sizes or numbers should be dynamic in
    the new graph and are not, ``why`` is the reason. Otherwise ``why`` is empty. ``guards`` are the new graph's guards.
    ``caused_by`` and ``earlier`` map the expression of each guard on a size to the user line that caused the guard:
    ``caused_by`` for the new graph, ``earlier`` for the graph that did not accept the call.
    """
    broken = _BROKEN.match(miss.sentence)
    if broken is not None:
        what = "sizes" if ".size(" in broken[1] else "values"
        suggestion = f"keep to {what} for which the program takes one branch, or have a graph for each branch"
        line = earlier.get(broken[1], miss.line)
        return replace(miss, subject=_names(broken[1]), line=line, suggestion=suggestion)
    names = [name for name in miss.subject.split(", ") if name]
    size = _SIZE.match(names[0]) if names else None
    tied = {name for name, _, other in (text.partition(" == ") for text in caused_by) if other in vary}
    if names and all(name in vary or name in tied for name in names):
        held = limits(guards)
        which = ", ".join(dict.fromkeys(held[name] for name in names if name in held))
        sentence = f"{miss.sentence}; compiled for all {'sizes' if size else 'numbers'} of it{which}"
        if size is None:
            return replace(miss, sentence=sentence, suggestion="pass it as a tensor")
        call = f"torch._dynamo.mark_dynamic({size[1]}, {size[2]})"
        return replace(miss, sentence=sentence, suggestion=f"call {call} before, or let it vary at once ({DYNAMIC})")
    fixed = next((text for text in caused_by if _FIXED.match(text) and text.partition(" == ")[0] in names), None)
    if fixed is not None:
        sentence = f"{miss.sentence}; compiled for this one alone, since the program fixes it"
        return replace(miss, sentence=sentence, line=caused_by[fixed], suggestion="keep to a few values of it")
    if names and why and (size or miss.suggestion == PASS_A_TENSOR):
        reason, line, instead = apart(why)
        sentence = f"{miss.sentence}; compiled for this one alone: {reason}"
        return replace(miss, sentence=sentence, line=line or miss.line, suggestion=instead or miss.suggestion)
    if size is not None and miss.after in ("0", "1"):
        return replace(miss, suggestion="keep it at 2 or more, or have a graph for each of 0 and 1")
    return miss


def apart(why: str) -> tuple[str, UserLine | None, str]:
    """Split an error's message into the reason, the user line (None if unknown), and a way to avoid the error.

    ``why`` says why a function was traced without dynamic sizes. It is usually the message of the error that ended the
    trace with dynamic sizes.
    """
    told = _ERROR.match(why)
    if told is None:
        return first_line(why, 200), None, ""
    line = UserLine(file=told["file"], line=int(told["line"]), code=told["code"] or "")
    return first_line(told["reason"], 200), in_cell(line), told["instead"] or ""


def _names(text: str) -> str:
    """Return the names of the sizes and numbers in an expression, separated by commas."""
    return ", ".join(dict.fromkeys(re.findall(_PART, _FUNCTIONS.sub("", text))))


def _bare(text: str) -> str:
    """Remove the parentheses around an expression, if there are any."""
    inner = text[1:-1]
    whole = text[:1] == "(" and text[-1:] == ")" and inner.find(")") >= inner.find("(")
    return inner if whole and inner.count("(") == inner.count(")") else text
