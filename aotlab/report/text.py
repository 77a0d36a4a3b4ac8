"""Numbers and lists in words, as the report's lines and pages write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from aotlab.errors import UserLine
from aotlab.ir.specs import Size, SymExpr

if TYPE_CHECKING:
    from aotlab.report.model import CellPart

#: The file names that IPython (with the cell's number) and its kernel give to the code of cells.
_CELL_FILE = re.compile(r"^<ipython-input-(\d+)-\w+>$|[\\/]ipykernel_\d+[\\/](\d+)\.py$")
#: Tell the numbers of cells by the names of their files, one for each shell in which aotlab is loaded.
cell_numbers: list[Callable[[str], int | None]] = []


def duration(ns: int | None) -> str:
    """Write a time with three digits and the unit that fits: ``"1.24 s"``, ``"820 µs"``."""
    if ns is None:
        return "–"
    value = float(ns)
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if value >= size * 0.9995:
            return f"{_three(value / size)} {unit}"
    return f"{ns} ns"


def data_size(nbytes: Size | None) -> str:
    """Write a number of bytes with the unit that fits: ``"1.5 KiB"``."""
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
    """Write ``"a, b and c"``; with more than ``most`` items the rest is counted."""
    if len(items) > most:
        return f"{', '.join(items[:most])} and {len(items) - most} more"
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else list(items))


def first_line(text: str, most: int) -> str:
    """Return the first line of ``text`` that says something, cut to ``most`` characters, between words if it can be."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if len(line) <= most:
        return line
    whole, _, rest = line[: most - 1].rpartition(" ")
    return f"{whole if len(rest) < most // 4 else line[: most - 2]} …"


def in_cell(line: UserLine) -> UserLine:
    """Name the file of a line as IPython does, with the cell's number, where its kernel has named it without."""
    found = _CELL_FILE.search(line.file)
    known = [number for each in cell_numbers if (number := each(line.file)) is not None]
    if found is None or found[2] is None or not known:
        return line
    return replace(line, file=f"<ipython-input-{known[-1]}-{found[2]}>")


def is_of_cell(line: UserLine, file: str) -> bool:
    """Tell whether a line is one of the cell whose code has this file, whatever number it had when it ran."""
    found = _CELL_FILE.search(file)
    return line.file == file or (
        found is not None and found[2] is not None and line.file.startswith("<") and line.file.endswith(f"-{found[2]}>")
    )


def place(line: UserLine) -> str:
    """Name a line; of a long path the last two parts say enough, of a notebook's cell its number."""
    line = in_cell(line)
    cell = _CELL_FILE.search(line.file)
    if cell is not None:
        return f"In [{cell[1]}], line {line.line}" if cell[1] else f"notebook cell, line {line.line}"
    parts = re.split(r"[\\/]", line.file)
    name = line.file if line.file.startswith("<") else "/".join(parts[-2:])
    return f"{name}:{line.line}"


def place_in(text: str) -> str:
    """Do the same for a line that was written as ``file:line``; leave other text as it is."""
    file, _, number = text.rpartition(":")
    return place(UserLine(file=file, line=int(number), function="", code="")) if file and number.isdecimal() else text


def places_in(text: str) -> str:
    """Name the lines of notebooks' cells in a text as a page does."""
    return re.sub(r"(?:<ipython-input-\d+-\w+>|\S*[\\/]ipykernel_\d+[\\/]\d+\.py):\d+", lambda m: place_in(m[0]), text)


def lines_of(part: CellPart) -> str:
    """Write ``"line 3"`` or ``"lines 3–5"``."""
    if part.first_line == part.last_line:
        return f"line {part.first_line}"
    return f"lines {part.first_line}–{part.last_line}"


def sizes(values: Sequence[Size] | None) -> str:
    """Write a shape or strides: ``"[2, 3]"``."""
    return "" if values is None else f"[{', '.join(map(str, values))}]"


def known_size(size: Size) -> int:
    """Return a size as a number: for a symbolic one that of the traced call, 0 where not even that is known."""
    return (size.hint or 0) if isinstance(size, SymExpr) else size


def known_sizes(values: Sequence[Size]) -> tuple[int, ...]:
    """Do the same for a shape or strides."""
    return tuple([known_size(value) for value in values])


def _three(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def new_memory(nbytes: int) -> str:
    """Write ``"no new memory"`` or ``"12 B of new memory"``."""
    return f"{data_size(nbytes)} of new memory" if nbytes else "no new memory"


def plain_names(text: str) -> str:
    """Write variables as the user does where Dynamo writes them as items of its dictionaries."""
    return re.sub(r"[`']?\b[GL]\['(\w+)'\]([\w.\[\]]*)[`']?", r"`\1\2`", text)


#: Why calls run eagerly of which no graph break tells.
RECOMPILE_LIMIT = "Dynamo's recompile limit is reached: calls that no graph of it fits run eagerly"

#: Why Dynamo stops, by what its text says; the rest is told in its own words.
_STOPS = [(re.compile(pattern, re.DOTALL), words) for pattern, words in (
    (r"^generic_jump|^Data-dependent branching", "a branch depends on the value of a tensor"),
    (r"builtin operator `(\w+)`", r"`\1()` is called"),
    (r"^Unsupported Tensor\.item\(\)", "`.item()` asks for the value of a tensor"),
    (r"^(?:Unsupported )?Tensor\.(\w+)\(\)", r"`.\1()` of a tensor is called"),
    (r"Call to `(torch\._dynamo\.\w+)\(\)`", r"`\1()` is called"),
    (r"^Dynamic slicing with Tensor", "a slice has a tensor as its bound"),
    (r"^Dynamic shape operator.*?Explanation: Operator `(.+?)`", r"the size of what `\1` returns depends on values"),
    (r"^Data dependent operator.*?Explanation: Operator `(.+?)`", r"`\1` returns a number that depends on values"),
    (r"^Attempted to \w+ function marked as skipped.*?qualname: ([\w.]+)", r"Dynamo does not look into `\1`"),
    (r"^logging\.Logger", "it logs"),
    (r"^step_unsupported", "Dynamo cannot go on in the middle of it"),
    (r"^Attempted to wrap RNN", "Dynamo captures no LSTM, GRU or RNN"),
    (r"sparse [Tt]ensor", "Dynamo takes no sparse tensors"),
    (r"^Dynamo recompile limit", RECOMPILE_LIMIT),
    (r"^aotlab: .*?Explanation: (.+?)\n", r"\1"),
    (r"graph break should occur when calling `?(\S+?)`?\. Reason: (.+?)\.?\s*(?:\n|$)", r"`\1` is called: \2"),
)]  # fmt: skip


def why_dynamo_stopped(text: str) -> str:
    """Say in a clause why Dynamo ended a graph, which it explains over several lines."""
    for pattern, words in _STOPS:
        found = pattern.search(text)
        if found is not None:
            return plain_names(found.expand(words)).rstrip(".")
    met = next((line.strip() for line in text.splitlines() if line.strip()), "")
    found = re.search(r"^\s*Explanation: (.*)$", text, re.MULTILINE)
    why = "" if found is None else found[1].strip()
    said = set(re.findall(r"\w+", met.lower()))
    if why and len(said & set(re.findall(r"\w+", why.lower()))) * 2 >= len(said):  # the same once more, at length
        met, why = why, ""
    return plain_names(f"{met}: {why}" if why else met).rstrip(".")
