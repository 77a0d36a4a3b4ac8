"""Say why a function was compiled again: the guard that failed, the expected and the actual value, and a remedy.

The direct frontend describes a failed guard in a sentence. Dynamo gives the guard as Python code, or as a message, with
the user line that caused it. This module converts both to a `Miss`. Here is a text of each kind from Dynamo:

    L['scale'] == 1.0          # return t / t.norm() * scale  # train.py:7 in normalize
    tensor 't' size mismatch at index 0. expected 4, actual 5
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from aotlab import events
from aotlab.errors import UserLine
from aotlab.report.model import Graph, Miss
from aotlab.report.text import in_cell, listed, plain_names

#: Match a sentence in which the direct frontend describes a failed guard.
_OURS = re.compile(r"^`(.+?)` (?:is|has ([a-z_]+)) ?=?(?:on )?(.+) where the compiled entry expects (.+)$")
#: Match such a sentence about the guard of a condition.
_CONDITION = re.compile(
    r"^the condition in `(.+)` at (.+):(\d+) is (True|False) where the compiled entry expects (.+)$"
)
_COMMENT = re.compile(r"^(.*?)\s+# (.*?)  # (\S+):(\d+) in (\S+)", re.DOTALL)
_NO_SOURCE = re.compile(r"\s+# \(unknown source .*\)$")
_OF_A_TENSOR = re.compile(
    r"tensor '(.+?)' (?:Tensor )?(.+?) mismatch(?: at index (\d+))?\. [Ee]xpected (.+?)(?:, actual (.+))?$"
)
_EQUAL = re.compile(r"^(?P<path>[LG]\[.*?) == (?P<before>.+)$")
_LENGTH = re.compile(r"^len\((?P<path>[LG]\[.*)\) == (?P<before>\d+)$")
_EMPTY = re.compile(r"^not (?P<path>[LG]\[.*)$")
_NONE = re.compile(r"^(?P<path>[LG]\[.*?) is (?P<before>None|not None)$")
_TYPE = re.compile(r"^___check_type_id\((?P<path>[LG]\[.*), \d+\)(?:, type=<class '(?P<before>[^']+)'>)?")
_OBJECT = re.compile(r"^___check_obj_id\((?P<path>[LG]\[.*), \d+\)")
_GLOBAL = "GLOBAL_STATE changed:"
_HEAVIEST = 10
_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "Long": "int64", "Int": "int32"} | {
    "Short": "int16", "Char": "int8", "Byte": "uint8", "ComplexFloat": "complex64", "ComplexDouble": "complex128"
}  # fmt: skip
_MODES = {
    "grad_mode": "grad mode",
    "training": "grad mode",
    "num_threads": "the number of threads",
    "default_dtype": "the default dtype",
    "deterministic_algorithms": "deterministic algorithms",
}

#: How to compile one graph for all values of a size or a number.
DYNAMIC = "dynamic=True, in a cell %%aotcompile --dynamic"
PASS_A_TENSOR = f"each value is compiled for itself; let it vary ({DYNAMIC}), pass it as a tensor, or keep to a few"
_KEEP_TO_A_FEW = "each value is compiled for itself; keep to a few"
_TWO_STATES = "keep to one of the two, or have a graph for each"
_CHOOSE = "each answer has its own graph; torch.where, on tensors, needs only one"
_KEEP_TYPE = "pass the same type in each call"
_KEEP_OBJECT = "reuse one object instead of making another for each call"
_KEEP_LENGTH = "pass the same number of items, or one stacked tensor"
#: The properties of a tensor that Dynamo guards: how to write each property, and how to avoid the recompile. Dynamo
#: checks the properties of this table from the last row to the first. So if it reports a property, the properties in
#: the rows below it are equal.
_OF_TENSORS = {
    "stride": ("{}.stride({})", "call contiguous() on it before"),
    "size": ("{}.size({})", f"let sizes vary ({DYNAMIC}), or pad to a few sizes"),
    "rank": ("{}.dim()", "pass tensors of the same number of dimensions"),
    "is_leaf": ("{}.is_leaf", "detach() results before, to pass leaves only, or have a graph for each"),
    "requires_grad": ("{}.requires_grad", _TWO_STATES),
    "device index": ("{}.device", "keep to one device"),
    "dtype": ("{}.dtype", "convert to one dtype before"),
}


class _Guard(NamedTuple):
    """A guard of Dynamo that failed. The first four fields have the same meaning as the fields of `Miss`."""

    subject: str
    before: str
    after: str
    suggestion: str
    # The size of the difference, by which `misses` sorts the earlier graphs: small for a Python value, larger for a
    # property of a tensor, and largest for a global mode.
    weight: int = 0


def misses(event: events.CompileStarted | events.CapturedAgain) -> tuple[tuple[int | None, Miss], ...]:
    """Return the number of each earlier entry, and the reason why the entry did not accept a call.

    The entry with the fewest and smallest differences comes first. Dynamo reports its earlier captures. For a capture
    from which no entry was compiled, the number is None.
    """
    if isinstance(event, events.CompileStarted):
        return tuple((each.entry, _of_a_sentence(each.sentence)) for each in event.misses)
    rows = []
    for entry, words, differing in event.failed:
        text, line = _apart(words, event.file)
        guard = _read(text, event.scope)
        rows.append(((differing, guard.weight, -(entry or 0)), entry, _miss(guard, line)))
    return tuple((entry, row) for _, entry, row in sorted(rows, key=lambda row: row[0]))


def limit_words(name: str, most: int, graphs: Sequence[Graph], *, several: bool) -> str:
    """Say which Dynamo limit a function has reached, and how to avoid reaching it.

    ``name`` is the setting of ``torch._dynamo.config`` that has the value ``most``. ``graphs`` are the graphs of the
    function. ``several`` is true if one run of the cell's lines perhaps called the function several times; the report
    counts only one of these calls.
    """
    last = next((each for graph in reversed(graphs) for each in graph.misses), None)
    advice = [f"set torch._dynamo.config.{name} higher, or call torch._dynamo.reset() to begin anew"]
    if last is not None and last.suggestion:
        subject = f"{last.subject}: " if last.subject else ""
        advice.insert(0, f"{subject}{last.suggestion}")
    counted = "; of several calls in one run of the cell's lines, only one is counted" if several else ""
    return (
        f"Dynamo compiles one function at most {most} times ({name}), and calls that no graph accepts then run eagerly"
        f"{counted}. To avoid it: {'; or '.join(advice)}"
    )


def _of_a_sentence(sentence: str) -> Miss:
    """Parse the sentence in which the direct frontend describes a failed guard."""
    if (match := _CONDITION.match(sentence)) is not None:
        code, file, line, after, before = match.groups()
        return Miss(
            subject=code,
            before=before,
            after=after,
            sentence=f"the condition in `{code}` is {after} where the compiled entry expects {before}",
            suggestion=_CHOOSE,
            line=in_cell(UserLine(file=file, line=int(line), code=code)),
        )
    match = _OURS.match(sentence)
    if match is None:
        return Miss(sentence=sentence)
    name, what, after, before = match[1], match[2] or "", match[3], match[4]
    if what == "shape" and after.count(",") == before.count(","):
        return _of_sizes(name, _sizes(after), _sizes(before))
    subject = f"{name}.{'stride' if what == 'strides' else what}" if what else name
    suggestion = {"shape": _OF_TENSORS["size"][1], "strides": _OF_TENSORS["stride"][1]}.get(what)
    if suggestion is None:
        suggestion = _OF_TENSORS[what][1] if what in _OF_TENSORS else "" if what else PASS_A_TENSOR
    if not what and after[:1] in ("'", '"'):
        suggestion = _KEEP_TO_A_FEW
    if after in ("True", "False") and not what:
        suggestion = _TWO_STATES
    if "left out" in (after, before.removeprefix("it to be ")):
        suggestion = "give it in each call, or in none"
    return Miss(subject=subject, before=before, after=after, sentence=sentence, suggestion=suggestion)


def _sizes(shape: str) -> list[str]:
    return [size.strip() for size in shape.strip("()").split(",") if size.strip()]


def _of_sizes(name: str, after: list[str], before: list[str]) -> Miss:
    """Describe a miss by the sizes that differ.

    ``after`` are the sizes of the tensor ``name`` in the call, and ``before`` the sizes that the entry expects.
    """
    pairs = enumerate(zip(after, before, strict=False))
    changed = [(f"{name}.size({dim})", is_now, was) for dim, (is_now, was) in pairs if is_now != was]
    told = listed([f"`{size}` is {is_now}" for size, is_now, _ in changed])
    return Miss(
        subject=", ".join(size for size, _, _ in changed),
        before=", ".join(was for _, _, was in changed),
        after=", ".join(is_now for _, is_now, _ in changed),
        sentence=f"{told} where the compiled entry expects {listed([was for _, _, was in changed])}",
        suggestion=_OF_TENSORS["size"][1],
    )


def _miss(guard: _Guard, line: UserLine | None) -> Miss:
    if not guard.before:
        sentence = guard.subject
        guard = guard._replace(subject="")
    else:
        sentence = f"`{guard.subject}` is {guard.after} where the earlier graph expects {guard.before}"
    return Miss(
        subject=guard.subject,
        before=guard.before,
        after=guard.after,
        sentence=sentence,
        suggestion=guard.suggestion,
        line=line,
    )


def _apart(text: str, file: str) -> tuple[str, UserLine | None]:
    """Split a guard's text into the guard and the user line that caused it.

    ``file`` is the full path of the file with the captured code. Dynamo shortens long file names at the beginning, so
    the name in the text is sometimes only the end of ``file``.
    """
    first = text.strip().splitlines()[0] if text.strip() else ""
    comment = _COMMENT.match(first)
    if comment is None:
        return _NO_SOURCE.sub("", first), None
    named = file if file.endswith(comment[3]) else comment[3]
    return comment[1], in_cell(UserLine(file=named, line=int(comment[4]), function=comment[5], code=comment[2].strip()))


def _read(text: str, scope: Mapping[str, Any]) -> _Guard:
    """Parse the text of a guard, and read the actual value from ``scope``, which has the variables of the call."""
    text = re.sub(r"\.(size|stride)\(\)\[(\d+)\]", r".\1(\2)", text)
    if text.startswith(_GLOBAL):
        names = [_MODES.get(name, name.removesuffix("_enabled")) for name in text.removeprefix(_GLOBAL).split()]
        if names == ["grad mode"]:
            now = torch.is_grad_enabled()
            return _Guard("grad mode", "on" if not now else "off", "on" if now else "off", _TWO_STATES, _HEAVIEST)
        return _Guard(f"{' and '.join(names) or 'a global setting'} changed", "", "", _TWO_STATES, _HEAVIEST)
    match = _OF_A_TENSOR.match(text)
    if match is not None and match[2] in _OF_TENSORS:
        return _of_a_tensor(*match.groups())
    for pattern, reading in ((_LENGTH, _length), (_EQUAL, _equal), (_NONE, _none), (_TYPE, _type), (_EMPTY, _empty)):
        match = pattern.match(text)
        if match is not None:
            path = match["path"]
            before = re.sub(r"\b[LG]\['(\w+)'\](?=\.size\()", r"\1", match.groupdict().get("before") or "another")
            return reading(_spoken(path), before, _value(path, scope))
    match = _OBJECT.match(text)
    if match is not None:
        return _Guard(_spoken(match["path"]), "that of the earlier call", "another object", _KEEP_OBJECT)
    if ".size(" in text:
        expected = plain_names(text).replace("`", "")
        return _Guard(f"the earlier graph expects `{expected}`, which does not hold for this call", "", "", "")
    return _Guard(f"a guard of Dynamo's failed: {plain_names(text)}", "", "", "", _HEAVIEST)


def _of_a_tensor(name: str, what: str, index: str | None, before: str, after: str | None) -> _Guard:
    words, suggestion = _OF_TENSORS[what]
    path = name if name[:2] in ("L[", "G[") else f"L['{name}']"
    if what == "requires_grad":
        was = before.endswith("1")
        before, after = str(was), str(not was)
    if what == "dtype":
        before, after = (_DTYPES.get(each, each.lower()) for each in (before, after or ""))
    weight = 1 + list(_OF_TENSORS).index(what)
    return _Guard(words.format(_spoken(path), index), before, after or "another", suggestion, weight)


def _length(subject: str, before: str, value: Any) -> _Guard:
    return _Guard(f"len({subject})", before, _length_of(value), _KEEP_LENGTH)


def _empty(subject: str, _before: str, value: Any) -> _Guard:
    return _Guard(f"len({subject})", "0", _length_of(value), _KEEP_LENGTH)


def _length_of(value: Any) -> str:
    return str(len(value)) if isinstance(value, (list, tuple, dict, set, str)) else "another"


def _equal(subject: str, before: str, value: Any) -> _Guard:
    other = _OF_TENSORS["size"][1] if ".size(" in subject else PASS_A_TENSOR
    other = _KEEP_TO_A_FEW if isinstance(value, str) else other
    return _Guard(subject, before, _shown(value), _TWO_STATES if isinstance(value, bool) else other)


def _none(subject: str, before: str, value: Any) -> _Guard:
    return _Guard(subject, before, _shown(value), _TWO_STATES)


def _type(subject: str, before: str, value: Any) -> _Guard:
    return _Guard(f"type({subject})", before, type(value).__qualname__, _KEEP_TYPE)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.Size)


def _shown(value: Any) -> str:
    """Write a value of the user's program: the repr of a plain value, or the type of another value.

    The repr of other values is not used, because it would run user code.
    """
    if value is _UNKNOWN:
        return "another"
    if isinstance(value, type):
        return value.__qualname__
    text = repr(value) if type(value) in _PLAIN else f"a {type(value).__qualname__}"
    return text if len(text) <= 60 else f"{text[:57]}…"


_UNKNOWN: Any = object()


def _value(path: str, scope: Mapping[str, Any]) -> Any:
    """Look up the value that a guard checked: evaluate ``path``, a variable with attributes and items, in ``scope``."""

    def look_up(node: ast.AST) -> Any:
        match node:
            case ast.Name(id=name):
                return scope[name]
            case ast.Attribute(value=inner, attr=name):
                return getattr(look_up(inner), name)
            case ast.Call(
                func=ast.Attribute(value=inner, attr="size" | "stride" as name), args=[ast.Constant(value=dim)]
            ):
                return getattr(look_up(inner), name)(dim)
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                return look_up(inner)[key]
        raise LookupError

    try:
        return look_up(ast.parse(path, mode="eval").body)
    except Exception:  # noqa: BLE001  # an unknown form of path, or an error in the object's `__getattr__`
        return _UNKNOWN


def _spoken(path: str) -> str:
    """Write a variable of Dynamo as in the program: ``self.fc.weight`` for ``L['self']._modules['fc'].weight``."""
    path = re.sub(r"^[LG]\['(\w+)'\]", r"\1", path)
    path = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", path)
    return re.sub(r"\.__closure__\[\d+\]\.cell_contents", "", path)
