"""Which bytes a report says that a function writes, against a look at memory before and after eager does it.

The memory is filled with one byte, and each program writes values none of whose bytes is that one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import aotlab
from aotlab import _torch as internals
from aotlab.report import Report, writes
from aotlab.report.model import Graph, Written
from aotlab.report.writes import MOST_WINDOWS, bytes_written, runs, strided

FILLED = 0x5A
#: No byte of it is that one, nor becomes it where it is added or comes in place of what was filled.
V = 0x01020304

Program = Callable[..., object]


def filled(rows: int = 6, columns: int = 8) -> Tensor:
    """Make an int32 matrix of one byte."""
    return torch.full((rows * columns * 4,), FILLED, dtype=torch.uint8).view(torch.int32).view(rows, columns)


def one(program: Callable[[Tensor], object]) -> tuple[Program, Callable[[Tensor], list[Tensor]]]:
    """Let a program be given the whole matrix."""
    return program, lambda memory: [memory]


def _set(place: Callable[[Tensor], Tensor]) -> Callable[[Tensor], object]:
    def program(x: Tensor) -> None:
        place(x).fill_(V)

    return program


def row_and_column(x: Tensor) -> Tensor:
    """Write two windows that cross."""
    x[:, 1] = V
    x[2] += V
    return x.sum()


def column_by_column(x: Tensor) -> None:
    """Write all columns but the first two, one after the other."""
    for column in range(2, 8):
        x[:, column] = V


def many(x: Tensor) -> None:
    """Write every other column of three rows, one element at a time."""
    for row in (0, 2, 5):
        for column in range(0, 8, 2):
            x[row, column] = V


def loop_over_rows(x: Tensor) -> None:
    """Write one element of some rows, and two of others, one after the other."""
    for row in range(4):
        x[row, row] = V
    for row in (1, 3, 5):
        x[row, 6:] = V


def view_from_before(x: Tensor) -> None:
    """Write through a view that was made before another write."""
    view = x[4:]
    x[0].fill_(V)
    view[:, 3:5].fill_(V)


def in_a_list(x: Tensor) -> None:
    """Write two rows by one call."""
    torch._foreach_add_([x[1], x[3, 2:]], V)


def into_out(x: Tensor) -> None:
    """Write a row by way of ``out``."""
    torch.mul(x[0], 2, out=x[5])


def row_to_row(x: Tensor) -> None:
    """Copy a row that was changed to another."""
    x[1] = x[0] + V


def part_then_whole(x: Tensor) -> None:
    """Write a part, then all."""
    x[1] = V
    x.bitwise_not_()


def turned(x: Tensor) -> None:
    """Change the sizes in place, then write."""
    x.t_()
    x[0].fill_(V)


def both(a: Tensor, b: Tensor) -> None:
    """Write parts of two windows of one memory."""
    a[1].fill_(V)
    b[:, 0].fill_(V)


def one_of_two(a: Tensor, b: Tensor) -> Tensor:
    """Write a window; a part of it is also a separate argument."""
    a[1:].fill_(V)
    return b + 1


EXACT: dict[str, tuple[Program, Callable[[Tensor], list[Tensor]]]] = {
    "whole": one(_set(lambda x: x)),
    "row": one(_set(lambda x: x[2])),
    "column": one(_set(lambda x: x[:, 1])),
    "rows": one(_set(lambda x: x[1:3])),
    "block": one(_set(lambda x: x[1:3, 2:5])),
    "every third": one(_set(lambda x: x.view(-1)[::3])),
    "every other row and column": one(_set(lambda x: x[::2, 1::2])),
    "transposed": one(_set(lambda x: x.t()[3][1:4])),
    "diagonal": one(_set(lambda x: x.diagonal())),
    "one of several views": one(_set(lambda x: x.split(2)[1].unbind(1)[4])),
    "in three dimensions": one(_set(lambda x: x.view(3, 2, 8).permute(2, 0, 1)[5, 1:])),
    "as another dtype": one(lambda x: x.view(torch.uint8)[:, 5].fill_(1)),
    "element": one(_set(lambda x: x[3, 3])),
    "nothing": one(_set(lambda x: x[3:3])),
    "row and column": one(row_and_column),
    "column by column": one(column_by_column),
    "many": one(many),
    "loop over rows": one(loop_over_rows),
    "view from before": one(view_from_before),
    "in a list": one(in_a_list),
    "into out": one(into_out),
    "row to row": one(row_to_row),
    "part, then whole": one(part_then_whole),
    "turned": one(turned),
    "part of a view": (_set(lambda x: x[1]), lambda memory: [memory[1:5, 2:7]]),
    "whole of a view": (_set(lambda x: x), lambda memory: [memory[1:, 3]]),
    "row of columns": (_set(lambda x: x[1]), lambda memory: [memory.t()]),
    "two that overlap": (both, lambda memory: [memory[1:4], memory[2:]]),
    "two with gaps that overlap": (both, lambda memory: [memory[1:4, :3], memory[2:, 2:5]]),
    "one of two": (one_of_two, lambda memory: [memory[1:4], memory[3]]),
}

IN_PART: dict[str, Program] = {
    "mask": lambda x: x.__setitem__(x == x[0, 0], V),
    "masked_fill_": lambda x: x[1].masked_fill_(x[1] > 0, V),
    "index": lambda x: x.__setitem__(torch.tensor([0, 2]), V),
    "index_fill_": lambda x: x[:, 2:].index_fill_(1, torch.tensor([3]), V),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([3]), torch.full((1, 8), V, dtype=torch.int32)),
    "scatter_": lambda x: x[4:].scatter_(1, torch.tensor([[3], [1]]), V),
    "tril_": lambda x: x[2:].tril_(),
}


def graph_of(program: Program, arguments: list[Tensor], *, decomposed: bool = False) -> Graph:
    """Compile a program with or without Inductor's decompositions, and return the graph in the report."""
    decompositions = internals.inductor_decompositions() if decomposed else {}
    with Report.record() as recording:
        aotlab.aot_function(program, aotlab.nop, decompositions=decompositions)(*arguments)
    [frame] = recording.report().frames
    return frame.graphs[0]


def changed(program: Program, take: Callable[[Tensor], list[Tensor]]) -> set[int]:
    """Run a program eagerly; return which bytes of the memory are others then."""
    memory = filled()
    seen = memory.view(-1).view(torch.uint8)
    program(*take(memory))
    return set((seen != FILLED).nonzero().flatten().tolist())


def said(windows: tuple[Written, ...] | None) -> set[int]:
    """Return the bytes in windows."""
    assert windows is not None
    found = runs(windows)
    assert found is not None
    return {byte for start, stop in found for byte in range(start, stop)}


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_windows_are_the_bytes_that_eager_changes(name: str, *, decomposed: bool) -> None:
    """Of writes whose place the program says, the windows are the bytes that change, and are counted by tensor."""
    program, take = EXACT[name]
    expected = changed(program, take)
    arguments = take(filled())
    storage = graph_of(program, arguments, decomposed=decomposed).storages[0]
    if name == "nothing":
        assert not expected
        assert storage.written in (None, ())
        return
    assert storage.written is not None
    assert all(window.certain for window in storage.written)
    assert said(storage.written) == expected
    for span, tensor in zip(storage.spans, arguments, strict=False):
        own = said(strided(tensor.storage_offset() * 4, *_layout(tensor), 4))
        assert (span.writes, span.may_write) == (len(own & expected), 0)


def _layout(tensor: Tensor) -> tuple[list[int], list[int]]:
    return list(tensor.shape), list(tensor.stride())


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("name", IN_PART)
def test_where_values_say_what_is_written_the_window_is_what_they_may_reach(name: str, *, decomposed: bool) -> None:
    """Of a mask or an index only the tensor or view that it chooses from is known."""
    expected = changed(IN_PART[name], lambda memory: [memory])
    [storage] = graph_of(IN_PART[name], [filled()], decomposed=decomposed).storages
    assert storage.written is not None
    assert not any(window.certain for window in storage.written)
    assert expected
    assert expected <= said(storage.written)
    assert storage.spans[0].writes == 0
    assert storage.spans[0].may_write == len(said(storage.written))
    assert len(said(storage.written)) < 192 or name in ("mask", "index", "index_add_")


def test_of_what_is_not_known_the_whole_may_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an op's views cannot be made again, the tensor is written at least in part."""
    monkeypatch.setitem(writes._SCATTERS, torch.ops.aten.select_scatter.default, torch.ops.aten.sum.default)
    [storage] = graph_of(row_to_row, [filled()]).storages
    assert storage.written == (Written(start=0, length=192, certain=False),)


def test_sizes_that_change_write_no_byte() -> None:
    """A tensor that is only turned is mutated, and nothing of it is written."""
    [storage] = graph_of(lambda x: x.t_(), [filled()]).storages
    assert [(span.mutated, span.writes) for span in storage.spans if span.role == "input"] == [(True, 0)]
    assert storage.written == ()


def test_statistics_are_written_as_a_whole() -> None:
    """The running statistics that a kernel writes itself are counted, too."""
    with torch.no_grad():
        graph = graph_of(
            lambda *given: torch.nn.functional.batch_norm(*given, training=True),
            [torch.randn(4, 3), torch.zeros(3), torch.ones(3)],
        )
    found = {s.name: (s.writes, s.may_write) for storage in graph.storages for s in storage.spans if s.mutated}
    assert found == {"given[1]": (12, 0), "given[2]": (12, 0)}


def test_windows_are_few_and_counted() -> None:
    """Windows that touch are one; too many become the bytes between which they lie; large ones are counted."""

    def scattered(x: Tensor) -> None:
        for i in range(MOST_WINDOWS + 6):
            x[i * i] = V

    [storage] = graph_of(scattered, [filled(100, 60).view(-1)]).storages
    assert storage.written == (Written(start=0, length=4 * 69 * 69 + 4, certain=False),)
    [storage] = graph_of(column_by_column, [filled()]).storages
    assert storage.written == (Written(start=8, length=24, counts=(6,), steps=(32,)),)
    [storage] = graph_of(loop_over_rows, [filled()]).storages
    assert storage.written == (
        Written(start=0, length=4, counts=(4,), steps=(36,)),
        Written(start=56, length=8, counts=(3,), steps=(64,)),
    )
    large = strided(0, (1_000_000, 8), (8, 1), 4)
    columns = (Written(start=0, length=4, counts=(1_000_000,), steps=(32,)),)
    assert bytes_written(large, columns) == (4_000_000, 0)
    crossing = (*columns, Written(start=32, length=4, counts=(999_999,), steps=(32,)))
    assert bytes_written(large, crossing) == (None, 0)
    assert bytes_written(large, ()) == (0, 0)


NORMALIZED = "return torch.nn.functional.batch_norm(y, mean, var, training=True)"


def lines(program: Program, *arguments: Tensor) -> dict[str, list[str]]:
    """Return for each argument that a program writes the code of the lines that write it."""
    graph = graph_of(program, list(arguments))
    return {row.name: [line.code for line in row.written_at] for row in graph.inputs if row.mutated}


def test_the_lines_that_write_are_known() -> None:
    """Each line that writes an argument is named, the last one first, and no line that only reads it."""

    def aliases(x: Tensor) -> Tensor:
        x.add_(1)
        y = x.t()
        y[0].mul_(2)
        return y

    def copied(x: Tensor, y: Tensor) -> None:
        z = x.relu()
        z = z + y
        x.copy_(z)
        y[:, 1] = 3.0
        y += x

    def normalized(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        y = x.relu()
        return torch.nn.functional.batch_norm(y, mean, var, training=True)

    assert lines(aliases, torch.zeros(3, 4)) == {"x": ["y[0].mul_(2)", "x.add_(1)"]}
    found = lines(copied, torch.zeros(3, 4), torch.ones(3, 4))
    assert found["y"] == ["y += x", "y[:, 1] = 3.0"]
    assert found["x"] == ["x.copy_(z)"]
    statistics = torch.zeros(3), torch.ones(3)
    assert set(map(tuple, lines(normalized, torch.randn(4, 3), *statistics).values())) == {(NORMALIZED,)}
