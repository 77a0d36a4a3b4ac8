"""The file in which a run stores its finished blocks, so that a stopped run can continue.

The first line is JSON about the run. Each further line is the JSON of one finished block. Nothing in the file is
executed. A line with other contents raises an error with the number of the line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_args

from aotlab.errors import UsageError
from aotlab.maintenance.fuzz.block import Block, Failure, Row, Status
from aotlab.maintenance.fuzz.plan import Plan

_FORMAT = 2
_T = TypeVar("_T")


class State:
    """The finished blocks of the run that ``plan`` describes, in memory (``blocks``) and in a file in ``folder``.

    Raises
    ------
    UsageError
        If the file exists and is not a state file of the fuzzer.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.file = folder / f"{plan.name}.jsonl"
        self._header = {"format": _FORMAT, "run": plan.name}
        self.blocks: dict[int, Block] = {}
        if self.file.exists():
            self._read()
        else:
            folder.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self._header) + "\n", encoding="utf-8")

    def add(self, block: Block) -> None:
        """Store a finished block, in memory and in the file."""
        self.blocks[block.number] = block
        # Use one write, so that an interrupt leaves the whole line, or a part of it without a newline, which `_read`
        # removes.
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_encode(block)) + "\n")

    def _read(self) -> None:
        lines = self.file.read_text(encoding="utf-8").splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):
            # The process was killed while it wrote the last line. That block is run again.
            lines.pop()
            self.file.write_text("".join(lines), encoding="utf-8")
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line)
                if number == 1:
                    _expect(value == self._header, f"not the header {json.dumps(self._header)}")
                else:
                    block = _decode(value)
                    self.blocks[block.number] = block
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{self.file}:{number} is not a line of a fuzzer run ({error}); remove the file to start again"
                ) from error
        if not lines:
            self.file.write_text(json.dumps(self._header) + "\n", encoding="utf-8")


def _encode(block: Block) -> dict[str, Any]:
    value = asdict(block)
    # Most of the file consists of rows, so write each row as a list without field names.
    value["rows"] = [
        [row.program, row.status, row.reasons, row.categories, row.graphs, row.served] for row in block.rows
    ]
    # Cells are saved in separate files.
    value["failures"] = [{**asdict(failure), "cell": None} for failure in block.failures]
    return value


def _decode(value: Any) -> Block:
    _expect(isinstance(value, dict), "no object")
    return Block(
        number=_natural(value["number"]),
        size=_natural(value["size"]),
        rows=_list(value["rows"], _row),
        failures=_list(value["failures"], _failure),
        discarded=_natural(value["discarded"]),
        seconds=float(value["seconds"]),
    )


def _row(value: Any) -> Row:
    program, status, reasons, categories, graphs, (calls, entries, others) = value
    _expect(status in get_args(Status), f"status {status!r}")
    return Row(
        program=_text(program),
        status=status,
        reasons=_list(reasons, _text),
        categories=_list(categories, _text),
        graphs=_list(graphs, _text),
        served=(_natural(calls), _natural(entries), _natural(others)),
    )


def _failure(value: Any) -> Failure:
    signature = value["signature"]
    return Failure(
        block=_natural(value["block"]),
        index=_natural(value["index"]),
        program=_text(value["program"]),
        name=_text(value["name"]),
        signature=None if signature is None else _text(signature),
    )


def _list(values: Any, decode: Callable[[Any], _T]) -> tuple[_T, ...]:
    _expect(isinstance(values, list), "no list")
    items: Iterable[Any] = values
    return tuple(decode(value) for value in items)


def _natural(value: Any) -> int:
    _expect(type(value) is int and value >= 0, f"no count: {value!r}")
    return int(value)


def _text(value: Any) -> str:
    _expect(isinstance(value, str), f"no text: {value!r}")
    return str(value)


def _expect(holds: bool, wrong: str) -> None:
    if not holds:
        raise ValueError(wrong)
