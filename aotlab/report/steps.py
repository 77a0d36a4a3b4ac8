"""Make the steps of a graph: the calls of the traced program, then the copies and the views of the epilogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aotlab.ir.specs import Size, SymExpr
from aotlab.report.model import Access, Input, Output, Result, Step, Storage, Written
from aotlab.report.rows import TraceFacts, extent, reach
from aotlab.report.text import in_cell, known_size
from aotlab.report.writes import strided

if TYPE_CHECKING:
    from aotlab.trace.program_calls import Layout, Program, Touched


@dataclass(slots=True)
class _Storages:
    """The storages of a traced program.

    ``numbers`` maps the storage of each traced tensor to its number in the report, and to the position of the first
    byte of the inputs in it. ``made`` are the storages that a step has made, and ``temporaries`` is the number of those
    that only the program uses.
    """

    numbers: dict[int | None, tuple[int, int]]
    made: set[int] = field(default_factory=set)
    temporaries: int = 0

    def access(self, touched: Touched, made_by: str | None = None) -> Access:
        """Describe a traced tensor that a step reads or writes, or that the call ``made_by`` makes."""
        if touched.storage not in self.numbers:
            self.temporaries += 1
            self.numbers[touched.storage] = (-self.temporaries, 0)
        number, shift = self.numbers[touched.storage]
        nbytes = touched.nbytes if made_by is not None and number not in self.made else None
        if made_by is not None:
            self.made.add(number)
        window = None if touched.layout is None else _window(touched.layout, shift, certain=touched.certain)
        name = "" if touched.name == made_by else touched.name
        return Access(storage=number, tensor=name, bytes=window, nbytes=nbytes)


def _storages_of_inputs(program: Program, inputs: Sequence[Input]) -> dict[int | None, tuple[int, int]]:
    """Map each traced storage of an input to its number, and to the position of the first byte of the inputs in it."""
    numbers: dict[int | None, tuple[int, int]] = {}
    for touched, row in zip(program.inputs, inputs, strict=True):
        if row.storage is not None and row.tensor is not None:
            begin = _value(row.tensor.byte_offset)
            _, first = numbers.get(touched.storage, (None, begin))
            numbers[touched.storage] = (row.storage, min(begin, first))
    return numbers


def located(facts: TraceFacts, inputs: Sequence[Input], outputs: Sequence[Output]) -> tuple[Output, ...]:
    """Set the offsets of the outputs that are views of inputs.

    After a write, the offsets of traced tensors count from the first byte of the input, not of the input's storage.
    """
    program, rows = facts.program, list(outputs)
    if program is None:
        return tuple(rows)
    numbers = _storages_of_inputs(program, inputs)
    for index, touched in program.outputs:
        row, layout = rows[index], touched.layout
        if row.tensor is not None and layout is not None and touched.storage in numbers and row.base_kind == "input":
            start = numbers[touched.storage][1] + layout.start
            tensor = replace(row.tensor, byte_offset=start, offset=start // layout.itemsize)
            rows[index] = replace(row, tensor=tensor)
    return tuple(rows)


def step_rows(
    facts: TraceFacts,
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    results: Sequence[Result],
    storages: Sequence[Storage],
) -> tuple[Step, ...]:
    """Make the steps of a graph. The storages that only its calls use have negative numbers, from -1.

    ``inputs`` are the rows of the inputs that remain after deduplication, and ``outputs``, ``results`` and ``storages``
    the rows of the graph.
    """
    if facts.program is None:
        return ()
    numbers = _storages_of_inputs(facts.program, inputs)
    callers = {number for number, _ in numbers.values()}
    for index, touched in facts.program.outputs:
        storage = outputs[index].storage
        if storage is not None:
            numbers.setdefault(touched.storage, (storage, 0))
    known = _Storages(numbers, callers)
    calls = [
        Step(
            kind="call",
            text=call.text,
            line=None if call.line is None else in_cell(call.line),
            nodes=tuple([name for index in call.operations for name in facts.operation_nodes.get(index, ())]),
            reads=tuple([known.access(each) for each in call.reads]),
            writes=tuple([known.access(each) for each in call.writes]),
            makes=tuple([known.access(each, made_by=call.text) for each in call.made]),
        )
        for call in facts.program.calls
    ]
    return (*calls, *_epilogue(facts, inputs, outputs, results, {each.number: each.nbytes for each in storages}))


def _epilogue(
    facts: TraceFacts,
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    results: Sequence[Result],
    sizes: Mapping[int, Size | None],
) -> Iterator[Step]:
    """Yield the steps after the graph in the order of the generated code. ``sizes`` has the size of each storage."""
    rows, infos = {row.name: row for row in inputs}, facts.metadata.output_info
    copies = {each.target: each for each in results if each.kind.startswith("mutated")}
    for target, copy in copies.items():
        if copy.in_graph and target in rows:
            yield _copy(rows[target], copy, "graph")
    bases = {f"intermediate {n}": each for n, each in enumerate([r for r in results if r.kind == "base"])}
    for output in outputs:
        base = bases.pop(output.base or "", None)
        if base is not None and output.storage is not None:
            yield _base(base, output, output.storage, sizes.get(output.storage))
    early = {info.index for info in infos if info.precedes_write}
    views = {n: _view(row) for n, row in enumerate(outputs) if row.base_kind is not None and row.storage is not None}
    yield from [step for n, step in views.items() if n in early]
    for row in sorted(inputs, key=lambda row: row.name not in copies):
        for change in row.steps:
            yield Step(kind="epilogue", text=f"{row.name}.{change}")
        if row.name in copies and not copies[row.name].in_graph:
            yield _copy(row, copies[row.name], "epilogue")
    yield from [step for n, step in views.items() if n not in early]


def _copy(row: Input, result: Result, kind: str) -> Step:
    text = f"{row.name}.copy_({result.name if kind == 'epilogue' else '…'})"
    return Step(kind=kind, text=text, nodes=(result.name,), writes=_accesses(row))


def _base(result: Result, row: Output, storage: int, nbytes: Size | None) -> Step:
    name, size = (row.base or "").replace(" ", "_"), _value(nbytes)
    whole = Access(storage=storage, tensor=name, bytes=Written(start=0, length=size) if size else None)
    return Step(kind="epilogue", text=f"{name} = {result.name}", nodes=(result.name,), makes=(whole,))


def _view(row: Output) -> Step:
    return Step(kind="epilogue", text=f"{row.name} = {row.views or row.base}", makes=_accesses(row))


def _accesses(row: Input | Output) -> tuple[Access, ...]:
    if row.storage is None or row.tensor is None:
        return ()
    known = reach(row.tensor) is not None
    windows = extent(row.tensor) if known else ()
    empty = Written(start=0, length=0) if known else None
    return (Access(storage=row.storage, tensor=row.name, bytes=windows[0] if windows else empty),)


def _window(layout: Layout, shift: int, *, certain: bool) -> Written:
    start = layout.start + shift
    windows = strided(start, layout.shape, layout.stride, layout.itemsize, certain=certain)
    return windows[0] if windows else Written(start=start, length=0)


def _value(size: Size | None) -> int:
    return 0 if size is None or (isinstance(size, SymExpr) and size.hint is None) else known_size(size)


def shown_bytes(access: Access) -> str:
    """Describe the bytes of an access: ``"#0 bytes 0–4, 16–20"``; ``"t1"`` is a storage of the program only."""
    number = f"#{access.storage}" if access.storage >= 0 else f"t{-access.storage}"
    window = access.bytes
    if window is None:
        return f"{number}, bytes unknown"
    if not window.length:
        return f"{number}, no bytes"
    starts = [window.start]
    for count, step in zip(window.counts, window.steps, strict=True):
        starts = [start + k * step for start in starts[:4] for k in range(min(count, 4))]
    runs = ", ".join([f"{start:,}–{start + window.length:,}" for start in starts[:3]])
    return f"{number} bytes {runs}{', …' if len(starts) > 3 else ''}{'' if window.certain else ' (perhaps)'}"
