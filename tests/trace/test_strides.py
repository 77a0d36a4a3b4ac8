"""Programs that read strides where a dimension has the size one: kernels and their fakes do not choose the same."""

from __future__ import annotations

import pytest
import torch

from tests.both_ways import BOTH, Case, check_behind_dynamo, check_direct
from tests.engine_helpers import compiled, same

ROW = torch.arange(8)[None, 1:]

COLUMN = torch.arange(3.0).reshape(3, 1, 1).permute(2, 1, 0)

UNCERTAIN = {
    "times a number": lambda c: c * 2,
    "plus a number": lambda c: c + 1,
    "compared": lambda c: c > 1,
    "without values": torch.empty_like,
    "relu": torch.relu,
    "row by row behind": lambda c: (c * 2) @ torch.ones(3, 2) + 1,
    "a view of it": lambda c: (c * 2).squeeze(0).unsqueeze(1),
    "written": lambda c: (c * 2).add_(1),
    "viewed by its sizes": lambda c: c[..., :2].view(1, 1, 2),
    "reshaped": lambda c: c.reshape(1, 3),
    "beside it": lambda c: torch.ones(1, 3) * 2,
    "a view of the input": lambda c: c.transpose(0, 2)[0],
}

CERTAIN = {
    "the input": lambda c: c,
    "the input written": lambda c: c.add_(1),
    "no such dimension": lambda c: (c * 2).squeeze(),
}


def test_a_view_of_one_row_lies_as_in_eager():
    """A product that eager computes as one matrix is one in the graph too, with the same rounding."""
    w = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 2, 1, 4, generator=torch.Generator().manual_seed(1))
    same(lambda x: torch.nn.functional.linear(x.transpose(1, 2).reshape(2, 1, 8), w), x)


@pytest.mark.parametrize("read", [torch.Tensor.stride, torch.Tensor.dim_order], ids=["stride", "dim_order"])
@pytest.mark.parametrize("kind", [*UNCERTAIN, *CERTAIN])
def test_strides_that_are_read(kind, read):
    """Eager runs the program where its strides are not certain, and says so; where they are it is compiled."""
    make = {**UNCERTAIN, **CERTAIN}[kind]

    def program(c):
        made = make(c)
        return c.sum() * sum(place * (number + 1) for number, place in enumerate(read(made)))

    f = compiled(program)
    expected = program(COLUMN.clone())
    if kind in UNCERTAIN:
        with pytest.warns(RuntimeWarning, match="reads the strides of .*, which a trace does not know .*, at .*py:"):
            found = f(COLUMN.clone())
    else:
        found = f(COLUMN.clone())
    assert expected.item() == found.item()
    assert (f.calls.eager, f.calls.compiled) == ((1, 0) if kind in UNCERTAIN else (0, 1))


def test_strides_where_all_lie_row_by_row():
    """With nothing else in the trace, dimensions of size one have the strides that eager gives them."""
    read = lambda x: x.sum() * torch.relu(x[:1] + torch.ones(2, 1)).unsqueeze(0).stride(0)  # noqa: E731
    same(read, torch.ones(2, 3))
    same(lambda x: x.sum() * (x * 2).stride(0), torch.ones(1, 3))


def test_windows_that_may_be_read_by_other_strides():
    """Eager refuses a write to memory that the op reads with other strides, even if only dimensions of size one differ.

    `fuzz --seed 910000`: the fake view of a row with a gap before it had the row's own strides.
    """

    def program(row):
        view = row.view_as(row)
        return torch.neg(row, out=view)

    assert ROW.stride() != ROW.view_as(ROW).stride()
    for candidate in (program, compiled(program)):
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            candidate(ROW)
    assert torch.equal(-torch.arange(8)[None], compiled(program)(torch.arange(8)[None]))


def _column(c):
    c[:, 0] += c[:, 1] * 2
    return c


def _window(c):
    c[:, :1] += c[:, 1:2]
    return c


def _kept(c):
    first = c[:, 0]
    first -= 1
    c[:, 0] = first
    return c


def _of_a_view(c):
    c.transpose(0, 1)[0] += 1
    return c


def _of_a_new_dimension(c):
    c[:, None][:, 0] /= 2
    return c


def _into_itself(c):
    c[:, 0].add_(c[:, 0])
    return c


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("check", [check_direct, check_behind_dynamo])
@pytest.mark.parametrize("size", [(1, 3), (1, 3, 4), (2, 3), (1, 3, 1)], ids=str)
@pytest.mark.parametrize("write", [_column, _window, _kept, _of_a_view, _of_a_new_dimension, _into_itself])
def test_batches_of_one(write, size, check, mode):
    """A batch of one is written in place, and compiled, as a batch of several."""
    check(Case(program=lambda b: write(b.sin()), size=size), mode)
    if mode == "inference":
        check(Case(program=write, size=size), mode)


def test_other_dtypes_of_what_is_empty():
    """Such a view demands a last stride of one, which eager has or has not (`fuzz --seed 920000`)."""

    def program(table):
        return (table.t() * 2).view(torch.int32)

    for candidate in (program, compiled(program)):
        with pytest.raises(RuntimeError, match="must be 1 to view Long as Int"):
            candidate(torch.zeros(0, 2, dtype=torch.int64))
    compiled_one = compiled(program)
    assert (
        program(torch.ones(2, 2, dtype=torch.int64).t()).tolist() == compiled_one(torch.ones(2, 2).long().t()).tolist()
    )
    assert compiled_one.calls.compiled == 1


def test_fakes_are_still_wrong():
    """Fake tensors still have other strides than eager. If this test fails, our corrections can be removed."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        promised = (mode.from_tensor(COLUMN) * 2).stride()
        row = mode.from_tensor(ROW)
        viewed = row.view(row.shape).stride()
    assert (COLUMN * 2).stride() != promised
    assert ROW.view(ROW.shape).stride() != viewed


GAPPY = {
    "asked for": lambda v: (v.stride(), v.is_contiguous(), v.clone()),
    "copied": lambda v: v.contiguous(),
    "viewed": lambda v: v.view(2, -1),
}


@pytest.mark.parametrize("then", [lambda a: None, lambda a: a.add_(1), lambda a: a.zero_()])
@pytest.mark.parametrize("read", GAPPY)
def test_view_with_gaps_that_is_written(read, then):
    """A view of a tensor with gaps keeps its strides after a write to the view or to its base."""

    def program(a):
        v = a.view(-1)
        v.mul_(2)
        then(a)
        return GAPPY[read](v)

    same(program, torch.arange(8.0).view(2, 4)[..., ::2])
