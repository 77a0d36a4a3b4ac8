"""Read the logs that torch writes into the folder ``TORCH_TRACE``, one file for each process.

A record is a line of JSON behind a prefix such as ``V1129 17:49:57.620000 14840 torch/_dynamo/utils.py:2350]``. The
payload of a record, for example a graph, follows in lines that begin with a tab.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from aotlab.errors import UsageError

_PREFIX = re.compile(r"V\d{4} [\d:.]+ (\d+) [^\]]*\] (?=\{)")
#: The event with which Dynamo starts to compile.
_STARTS = re.compile(r'(?s)\A\s*\{\s*"name": "dynamo",.*"ph": "B"')
#: The keys of a record that do not name its kind.
_COMMON = frozenset((
    "rank", "compiled_autograd_id", "frame_id", "frame_compile_id", "attempt", "severity", "timestamp", "pathname",
    "lineno", "thread", "process", "subgraph_name", "has_payload", "stack",
))  # fmt: skip


class CompileId(NamedTuple):
    """The id of a compilation: the number of the captured code, and the number of its compilation.

    `torch.compiler.reset` lets both numbers begin at 0 again; ``resets`` is the number of resets before.
    """

    resets: int
    frame: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record of a log.

    ``kind`` is the kind of the record (``"aot_forward_graph"``); for an artifact it is the name of the artifact.
    ``data`` is its metadata. ``attempt`` counts the attempts to capture the code: Dynamo starts again after a graph
    break. ``rank`` is the rank of a distributed process, or None. ``compile_id`` is None if the record belongs to no
    compilation.
    """

    kind: str
    data: Mapping[str, Any]
    payload: str
    compile_id: CompileId | None
    attempt: int
    rank: int | None


@dataclass(slots=True)
class TraceLog:
    """The records of one process.

    ``name`` is the name of the log file. ``damaged`` is the number of its lines that could not be read. ``files`` maps
    the numbers that replace the names of files in records to the names.
    """

    name: str
    records: list[Record] = field(default_factory=list)
    files: dict[int, str] = field(default_factory=dict)
    damaged: int = 0
    _started: set[CompileId | None] = field(default_factory=set)
    _resets: int = 0

    def compile_id(self, frame: int, number: int) -> CompileId:
        """Return the id of the present compilation with these numbers."""
        return CompileId(self._resets, frame, number)

    def add(self, head: Mapping[str, Any], payload: str) -> None:
        """Add a record, given as its metadata and its payload."""
        kind = next((key for key in head if key not in _COMMON), "")
        value = head.get(kind)
        if kind == "str" and isinstance(value, list | tuple) and len(value) == 2:
            self.files[value[1]] = value[0]
        if kind:
            record = _record(kind, head, payload, self._resets)
            starts = kind == "dynamo_start" or (kind == "chromium_event" and _STARTS.search(payload) is not None)
            if starts and not record.attempt and record.compile_id in self._started:
                self._resets += 1
                record = _record(kind, head, payload, self._resets)
            if kind == "dynamo_start":
                self._started.add(record.compile_id)
            self.records.append(record)


def read_log(path: Path) -> TraceLog:
    """Read a log file. A record that is cut off, because its process died, is counted in ``damaged``."""
    log = TraceLog(name=path.name)
    with path.open(encoding="utf-8", errors="replace") as lines:
        for head, payload in _entries(lines, log):
            log.add(head, payload)
    return log


def _entries(lines: Iterable[str], log: TraceLog) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the JSON object and the payload of each record."""
    head: dict[str, Any] | None = None
    payload: list[str] = []
    for line in lines:
        if line.startswith("\t"):
            payload.append(line[1:])
            continue
        if head is not None:
            yield head, "".join(payload).removesuffix("\n")
        head, payload = None, []
        prefix = _PREFIX.match(line)
        try:
            value = json.loads(line[prefix.end() :]) if prefix else None
        except ValueError:
            value = None
        if isinstance(value, dict):
            head = value
        else:
            log.damaged += 1
    if head is not None:
        yield head, "".join(payload).removesuffix("\n")


def _record(kind: str, head: Mapping[str, Any], payload: str, resets: int) -> Record:
    data = head[kind] if isinstance(head[kind], dict) else {}
    if kind == "artifact":
        kind = str(data.get("name", "artifact"))
    frame, number = head.get("frame_id"), head.get("frame_compile_id")
    has_id = isinstance(frame, int) and isinstance(number, int)
    return Record(
        kind=kind,
        data=data,
        payload=payload,
        compile_id=CompileId(resets, frame, number) if has_id else None,  # type: ignore[arg-type]  # both are int
        attempt=head.get("attempt") or 0,
        rank=head.get("rank"),
    )


def read_logs(folder: str | Path) -> list[TraceLog]:
    """Read all logs in a folder, or one log file.

    Raises
    ------
    UsageError
        There is no such folder or file, or it contains no records of a structured trace.
    """
    place = Path(folder)
    paths = sorted(each for each in place.iterdir() if each.is_file()) if place.is_dir() else [place]
    if not all(path.is_file() for path in paths):
        raise UsageError(f"there is no folder or file {str(place)!r}")
    logs = [log for path in paths if (log := read_log(path)).records]
    if not logs:
        raise UsageError(f"{str(place)!r} contains no log that torch wrote; set TORCH_TRACE to a folder to record one")
    return logs
