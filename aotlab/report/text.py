"""Write numbers, lists, lines of the program and Dynamo's reasons in words, for the report's texts and pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from aotlab.errors import CELL_FILE, UserLine
from aotlab.ir.specs import Size, SymExpr

#: Functions that map the file name of code to the number of the notebook cell with this code, or to None if the code is
#: of no cell. Each IPython shell that loads aotlab adds one function.
cell_numbers: list[Callable[[str], int | None]] = []


def duration(ns: int | None) -> str:
    """Write a time with three digits and a suitable unit: ``"1.24 s"``, ``"820 µs"``."""
    if ns is None:
        return "–"
    value = float(ns)
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if value >= size * 0.9995:
            return f"{_three(value / size)} {unit}"
    return f"{ns} ns"


#: The name of the rule for values that differ by a few units in the last place; see `aotlab.verification.judgement`.
ROUNDED = "up to rounding"


def tolerance_words(rows: Sequence[Any]) -> str:
    """Write the tolerances with which values were compared, and the largest differences.

    ``rows`` are the comparisons of `aotlab.verify`, or rows of the report's table ``verification``. The text is empty
    if no value was compared.
    """
    rules = sorted({row.tolerance for row in rows if row.tolerance})
    if not rules:
        return ""
    words = f"tolerance: {' or '.join(rules)}"
    furthest = max(rows, key=lambda row: row.absolute or 0.0)
    if not furthest.absolute:
        return words
    relative = max(rows, key=lambda row: row.relative or 0.0)
    words += f"; largest difference {furthest.absolute:.2g} (`{furthest.subject}`)"
    return f"{words}, relative to the largest element {relative.relative:.2g} (`{relative.subject}`)"


def data_size(nbytes: Size | None) -> str:
    """Write a number of bytes with a suitable unit: ``"1.5 KiB"``."""
    if nbytes is None:
        return "–"
    if isinstance(nbytes, SymExpr):
        return f"{nbytes} B" if nbytes.hint is None else data_size(nbytes.hint)
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{_three(nbytes / size)} {unit}"
    return f"{nbytes} B"


def amount(count: int, noun: str) -> str:
    """Write ``"1 graph"`` or ``"3 graphs"``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def listed(items: Sequence[str], most: int = 6) -> str:
    """Write ``"a, b and c"``; if there are more than ``most`` items, only count the rest."""
    if len(items) > most:
        return f"{', '.join(items[:most])} and {len(items) - most} more"
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else list(items))


def first_line(text: str, most: int) -> str:
    """Return the first line of ``text`` that is not blank, cut to ``most`` characters, between words if possible."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if len(line) <= most:
        return line
    whole, _, last_word = line[: most - 1].rpartition(" ")
    return f"{whole if len(last_word) < most // 4 else line[: most - 2]} …"


def in_cell(line: UserLine) -> UserLine:
    """Replace the file name of a notebook cell's line by IPython's name, which contains the number of the cell.

    For example, the kernel names the file ``/tmp/ipykernel_12/345.py``, and IPython's name for it is
    ``<ipython-input-7-345>``. The lines in ``callers`` are changed in the same way. Lines that are not in a cell are
    returned unchanged.
    """
    if line.callers:
        line = replace(line, callers=tuple(map(in_cell, line.callers)))
    match = CELL_FILE.search(line.file)
    numbers = [number for each in cell_numbers if (number := each(line.file)) is not None]
    if match is None or match[2] is None or not numbers:
        return line
    return replace(line, file=f"<ipython-input-{numbers[-1]}-{match[2]}>")


def is_of_cell(line: UserLine, file: str) -> bool:
    """Tell whether a line belongs to the cell whose code has the file name ``file``.

    If the file of the line has IPython's name, the number of the cell in this name is ignored, because a cell that runs
    again gets a new number.
    """
    match = CELL_FILE.search(file)
    return line.file == file or (
        match is not None and match[2] is not None and line.file.startswith("<") and line.file.endswith(f"-{match[2]}>")
    )


def place(line: UserLine) -> str:
    """Write the place of a line: ``"src/train.py:12"`` (the end of the path), or ``"In [3], line 12"`` for a cell."""
    line = in_cell(line)
    cell = CELL_FILE.search(line.file)
    if cell is not None:
        return f"In [{cell[1]}], line {line.line}" if cell[1] else f"notebook cell, line {line.line}"
    parts = re.split(r"[\\/]", line.file)
    name = line.file if line.file.startswith("<") else "/".join(parts[-2:])
    return f"{name}:{line.line}"


def place_in(text: str) -> str:
    """Convert a text ``file:line`` to the form that `place` returns; return any other text unchanged."""
    file, _, number = text.rpartition(":")
    return place(UserLine(file=file, line=int(number), function="", code="")) if file and number.isdecimal() else text


def places_in(text: str) -> str:
    """Convert each ``file:line`` in a text to the form that `place` returns, if the file is a notebook cell."""
    return re.sub(r"(?:<ipython-input-\d+-\w+>|\S*[\\/]ipykernel_\d+[\\/]\d+\.py):\d+", lambda m: place_in(m[0]), text)


def sizes(values: Sequence[Size] | None) -> str:
    """Write a shape or strides: ``"[2, 3]"``."""
    return "" if values is None else f"[{', '.join(map(str, values))}]"


def known_size(size: Size) -> int:
    """Return a size as a number: for a symbolic size, its value in the traced call, or 0 if this value is unknown."""
    return (size.hint or 0) if isinstance(size, SymExpr) else size


def known_sizes(values: Sequence[Size]) -> tuple[int, ...]:
    """Return a shape or strides as numbers; see `known_size`."""
    return tuple([known_size(value) for value in values])


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def new_memory(nbytes: int) -> str:
    """Write ``"no new memory"`` or ``"12 B of new memory"``."""
    return f"{data_size(nbytes)} of new memory" if nbytes else "no new memory"


def plain_names(text: str) -> str:
    """Replace Dynamo's names of variables by the user's: ``L['x']`` and ``G['x']`` become ``x``, in backticks."""
    return re.sub(r"[`']?\b[GL]\['(\w+)'\]([\w.\[\]]*)[`']?", r"`\1\2`", text)


#: Libraries whose objects contain no tensors. A graph break at a call of such a library is not a fault.
DATA_LIBRARIES = frozenset(("PIL", "matplotlib", "numpy", "pandas", "plotly", "scipy", "seaborn", "sklearn"))

#: The reason that a report gives for calls that run eagerly because Dynamo's recompile limit is reached.
RECOMPILE_LIMIT = "Dynamo's recompile limit is reached: calls that no compiled graph accepts run eagerly"

#: Patterns of Dynamo's reasons, each with a short form; a reason that matches none is shown in Dynamo's words.
_STOPS = [(re.compile(pattern, re.DOTALL), words) for pattern, words in (
    (r"^generic_jump|^Data-dependent branching", "a branch depends on the value of a tensor"),
    (r"builtin operator `(\w+)`", r"`\1()` is called"),
    (r"^Unsupported Tensor\.item\(\)", "`.item()` needs the value of a tensor"),
    (r"^(?:Unsupported )?Tensor\.(\w+)\(\)", r"`.\1()` of a tensor is called"),
    (r"Call to `(torch\._dynamo\.\w+)\(\)`", r"`\1()` is called"),
    (r"^Dynamic slicing with Tensor", "a slice has a tensor as its bound"),
    (r"^Dynamic shape operator.*?Explanation: Operator `(.+?)`", r"the size of the result of `\1` depends on values"),
    (r"^Data dependent operator.*?Explanation: Operator `(.+?)`", r"`\1` returns a number that depends on values"),
    (r"^Attempted to \w+ function marked as skipped.*?qualname: ([\w.]+)", r"Dynamo does not look into `\1`"),
    (r"^logging\.Logger", "a logger is called"),
    (r"^step_unsupported", "Dynamo cannot continue in the middle of this line"),
    (r"^Attempted to wrap RNN", "Dynamo captures no LSTM, GRU or RNN"),
    (r"sparse [Tt]ensor", "Dynamo takes no sparse tensors"),
    (r"^Dynamo recompile limit", RECOMPILE_LIMIT),
    (r"^aotlab: .*?Explanation: (.+?)\n", r"\1"),
    (r"graph break should occur when calling `?(\S+?)`?\. Reason: (.+?)\.?\s*(?:\n|$)", r"`\1` is called: \2"),
)]  # fmt: skip


def why_dynamo_stopped(text: str) -> str:
    """Say in a few words why Dynamo ended a graph; ``text`` is Dynamo's explanation in several lines."""
    for pattern, words in _STOPS:
        match = pattern.search(text)
        if match is not None:
            return plain_names(match.expand(words)).rstrip(".")
    met = next((line.strip() for line in text.splitlines() if line.strip()), "")
    match = re.search(r"^\s*Explanation: (.*)$", text, re.MULTILINE)
    why = "" if match is None else match[1].strip()
    said = set(re.findall(r"\w+", met.lower()))
    if why and len(said & set(re.findall(r"\w+", why.lower()))) * 2 >= len(said):  # it has most words of the first line
        met, why = why, ""
    return plain_names(f"{met}: {why}" if why else met).rstrip(".")
