"""Count the programs of all runs of the fuzzer in a small file in the repository.

An entry of the file belongs to one state of the sources: the engine's revision, the generator's version and torch's
version. A block is merged into the file when it is finished. Merging it a second time changes nothing.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from aotlab.errors import UsageError
from aotlab.maintenance.fuzz.block import FAILED, Block
from aotlab.maintenance.fuzz.plan import Plan, engine_revision, generator_version

_FORMAT = 1
_COUNTS = ("accepted", "static", "refused", "eager", "alike", "dynamo", "asserts", "failed", "clean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Counts of the programs that ran at one state of the sources.

    `block.Status` explains the counts from ``accepted`` to ``asserts``. ``failed`` is the number of failing programs,
    and ``clean`` the number of accepted programs since the last block with a failure. ``runs`` maps a run's seed and
    options to the numbers of its finished blocks, as ranges ``[first, last]``.
    """

    engine: str
    revision: str
    generator: str
    torch: str
    date: str
    accepted: int = 0
    static: int = 0
    refused: int = 0
    eager: int = 0
    alike: int = 0
    dynamo: int = 0
    asserts: int = 0
    failed: int = 0
    clean: int = 0
    runs: dict[str, list[list[int]]] = field(default_factory=dict)


def merge(file: Path, plan: Plan, blocks: Iterable[Block]) -> None:
    """Add finished blocks to the counts in ``file``.

    A short last block is left out, because a later run may finish the whole block under the same number.
    """
    entries = load(file)
    key = (plan.engine, engine_revision(plan.engine), generator_version(), torch.__version__)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    entry = next(
        (entry for entry in entries if (entry.engine, entry.revision, entry.generator, entry.torch) == key),
        Entry(engine=key[0], revision=key[1], generator=key[2], torch=key[3], date=today),
    )
    others = [other for other in entries if other != entry]
    numbers = {n for first, last in entry.runs.get(plan.key, []) for n in range(first, last + 1)}
    changed = False
    for block in sorted(blocks, key=lambda block: block.number):
        if plan.is_whole(block.size) and block.number not in numbers:
            changed = True
            numbers.add(block.number)
            entry = _add(entry, block)
    if changed:
        runs = {**entry.runs, plan.key: _ranges(numbers)}
        # Put the changed entry last, so that the entries are in the order of their dates.
        write(file, [*others, replace(entry, runs=runs, date=today)])


def carried(entries: Iterable[Entry], engine: str = "aotlab") -> tuple[int, int]:
    """Return how many programs an engine has accepted in all entries, and how many of them since the last failure."""
    total = clean = 0
    failed = False
    for entry in reversed([entry for entry in entries if entry.engine == engine]):
        total += entry.accepted
        if not failed:
            clean += entry.clean
        failed = failed or entry.failed > 0
    return total, clean


def load(file: Path) -> list[Entry]:
    """Read the entries, oldest first; return an empty list if there is no file.

    Raises
    ------
    UsageError
        If the file does not contain counts of the fuzzer.
    """
    if not file.exists():
        return []
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if value["format"] != _FORMAT:
            raise ValueError(f"format {value['format']!r}, not {_FORMAT}")
        return [_decode(entry) for entry in value["entries"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} does not contain counts of the fuzzer: {error}") from error


def write(file: Path, entries: Iterable[Entry]) -> None:
    """Write the entries to the file atomically."""
    lines = ",\n".join("  " + json.dumps(asdict(entry)) for entry in entries)
    part = file.with_suffix(".part")
    part.write_text(f'{{"format": {_FORMAT}, "entries": [\n{lines}\n]}}\n', encoding="utf-8")
    part.replace(file)


def _add(entry: Entry, block: Block) -> Entry:
    counts: Counter[str] = Counter(row.status for row in block.rows)
    failed = sum(counts[status] for status in FAILED)
    return replace(
        entry,
        accepted=entry.accepted + counts["accepted"],
        static=entry.static + counts["static"],
        refused=entry.refused + counts["refused"],
        eager=entry.eager + counts["eager"],
        alike=entry.alike + counts["alike"],
        dynamo=entry.dynamo + counts["dynamo"],
        asserts=entry.asserts + counts["asserts"],
        failed=entry.failed + failed,
        clean=0 if failed else entry.clean + counts["accepted"],
    )


def _ranges(numbers: set[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def _decode(value: Any) -> Entry:
    entry = Entry(**value)
    texts = (entry.engine, entry.revision, entry.generator, entry.torch, entry.date, *entry.runs)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("an entry has a text field, or a key of its runs, that is not a string")
    if not all(type(getattr(entry, name)) is int and getattr(entry, name) >= 0 for name in _COUNTS):
        raise ValueError("an entry has a count that is not an integer of at least 0")
    for key, ranges in entry.runs.items():
        if not all(
            len(pair) == 2 and type(pair[0]) is type(pair[1]) is int and 0 <= pair[0] <= pair[1] for pair in ranges
        ):
            raise ValueError(f"the runs of {key!r} are {ranges!r:.80}, not pairs [first, last] with 0 <= first <= last")
    return entry
