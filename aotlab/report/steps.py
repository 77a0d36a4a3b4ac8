"""Make the steps of a graph: the calls of the traced program, then the copies and the views of the epilogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aotlab.ir.specs import Size, SymExpr, TensorSpec
from aotlab.report.model import Access, Input, Output, Result, Step, Storage, Written
from aotlab.report.rows import TraceFacts, extent, reach, tensor_info
from aotlab.report.text import in_cell, known_size

if TYPE_CHECKING:
    from aotlab.trace.program_calls import Touched


@dataclass(slots=True)
class _Storages:
    """The storages of a traced program.

    ``numbers`` maps the storage of each traced tensor to its number in the report, and to the distance in bytes from
    the beginning of the caller's storage to the beginning of the traced storage. ``made`` are the storages that a step
    has made.
    """

    numbers: dict[int | None, tuple[int, int]]
    made: set[int] = field(default_factory=set)

    def access(self, touched: Touched, made_by: str | None = None) -> Access:
        """Describe a traced tensor that a step reads or writes, or that the call ``made_by`` makes."""
        temporaries = sum(number < 0 for number, _ in self.numbers.values())
        number, shift = self.numbers.setdefault(touched.storage, (-1 - temporaries, 0))
        nbytes = touched.nbytes if made_by is not None and number not in self.made else None
        if made_by is not None:
            self.made.add(number)
        window = _window(touched.spec)
        if window is not None:
            window = replace(window, start=window.start + shift, certain=touched.certain)
        name = "" if touched.name == made_by else touched.name
        return Access(storage=number, tensor=name, bytes=window, nbytes=nbytes)


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
    numbers: dict[int | None, tuple[int, int]] = {}
    for touched, row in zip(facts.program.inputs, inputs, strict=True):
        if row.storage is not None and row.tensor is not None:
            shift = _value(row.tensor.byte_offset) - _value(touched.spec.byte_offset)
            numbers.setdefault(touched.storage, (row.storage, shift))
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
    return (Access(storage=row.storage, tensor=row.name, bytes=windows[0] if windows else _empty(known=known)),)


def _window(spec: TensorSpec) -> Written | None:
    tensor = tensor_info(spec)
    if reach(tensor) is None:
        return None
    windows = extent(tensor)
    return windows[0] if windows else _empty(known=True)


def _empty(*, known: bool) -> Written | None:
    return Written(start=0, length=0) if known else None


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
