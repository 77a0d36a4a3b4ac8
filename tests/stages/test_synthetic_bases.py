"""Overlaps among inputs: found on byte intervals, refused where it matters."""

from __future__ import annotations

import pytest
import torch

from aotlab.errors import OverlappingInputsError
from aotlab.frontends.direct import FunctionTarget
from aotlab.ir.metadata import InputAliasInfo
from aotlab.ir.specs import spec_of
from aotlab.stages import capture, dedupe, synthetic_bases
from tests.engine_helpers import compiled, nonleaf, record, same


def found(*args):
    """Run the first stages on a call."""
    _, call = capture.run(FunctionTarget(lambda *args: None), args, {})
    deduped = dedupe.run(call, "drop")
    return synthetic_bases.run(call, deduped), call, deduped


def test_overlaps_in_bytes():
    """Positions among the kept inputs, and how many bytes are shared, across dtypes."""
    base = torch.zeros(8)
    record_, _, _ = found(base[:4], 3, base[:4].view(torch.int16)[6:], base[4:], base[2:5])
    assert [(o.first, o.second, o.bytes) for o in record_.overlaps] == [(0, 1, 4), (0, 3, 8), (1, 3, 4), (2, 3, 4)]
    assert record_.bases == ()


def test_neighbours_and_duplicates_do_not_overlap():
    """Windows that touch, and the same tensor twice, are no overlaps."""
    base = torch.zeros(8)
    assert found(base[:4], base[4:], base[:0])[0].overlaps == ()
    assert found(base, base)[0].overlaps == ()


def infos(*args, written):
    """Make the records of inputs of which some were written."""
    return tuple(
        InputAliasInfo(
            index=i, name=f"args[{i}]", spec=spec_of(a), is_leaf=True, requires_grad=False, mutates_data=i in written
        )
        for i, a in enumerate(args)
    )


def test_check():
    """Only an overlap with a written input is refused; the text has names, shapes, dtypes, offsets and bytes."""
    base = torch.zeros(8)
    windows = base[:4], base[2:6], base[6:]
    record_, call, deduped = found(*windows)
    synthetic_bases.check(record_, infos(*windows, written={2}), call, deduped)
    synthetic_bases.check(record_, infos(*windows, written=set()), call, deduped)
    with pytest.raises(OverlappingInputsError) as caught:
        synthetic_bases.check(record_, infos(*windows, written={1}), call, deduped)
    text = str(caught.value)
    assert caught.value.argument == "args[1]"
    for part in ("`args[1]` (shape (4,), torch.float32, offset 2) is mutated", "8 bytes", "`args[0]`", "clone"):
        assert part in text


def test_interleaved_windows():
    """Windows whose intervals overlap though their elements do not (columns) are refused or right, never wrong."""
    base = torch.arange(12.0).reshape(3, 4)

    def f(x, y):
        x.mul_(2)
        return x + y

    g = compiled(f)
    state = base.clone()
    try:
        out = g(base[:, :2], base[:, 2:])
    except OverlappingInputsError:
        assert torch.equal(base, state)
    else:
        assert torch.equal(out, state[:, :2] * 2 + state[:, 2:])


def test_views_with_autograd_relation():
    """Overlapping views of one non-leaf, of which one is written, are refused; read-only they are right."""
    x = nonleaf(6)
    g = compiled(lambda a, b: (a.mul_(2), a + b)[1])
    with pytest.raises(OverlappingInputsError):
        g(x[:4], x[2:])
    same(lambda a, b: a * b, x[:4], x[2:])
    h = compiled(lambda a, b: a * b)
    h(x[:4], x[2:])
    assert len(record(h, "synthetic_bases").overlaps) == 1


def test_an_input_beside_its_own_view():
    """An input and a view of it are two inputs; outputs that alias one are made from that one."""
    base = torch.randn(2, 3)
    same(lambda a, b: (a.t(), b[1:], a * 1), base, base.view(-1))
