"""Inputs that share memory: found on byte intervals, and written as eager writes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aotlab.frontends.direct import FunctionTarget
from aotlab.stages import capture, dedupe, synthetic_bases
from tests.engine_helpers import behind, compiled, nonleaf, record, same


def found(*args):
    """Run the first stages on a call."""
    _, call = capture.run(FunctionTarget(lambda *args: None), args, {})
    return synthetic_bases.run(call, dedupe.run(call, "drop"))[0]


def test_overlaps_in_bytes():
    """Positions among the kept inputs, and how many bytes are shared, across dtypes."""
    base = torch.zeros(8)
    overlaps = found(base[:4], 3, base[:4].view(torch.int16)[6:], base[4:], base[2:5])
    assert [(o.first, o.second, o.bytes) for o in overlaps.overlaps] == [(0, 1, 4), (0, 3, 8), (1, 3, 4), (2, 3, 4)]
    assert [(b.members, b.nbytes, b.dtype) for b in overlaps.bases] == [((0, 1, 2, 3), 32, "torch.uint8")]


def test_groups_are_apart():
    """Inputs that share nothing with each other belong to different bases, of their own dtypes."""
    one, other = torch.zeros(8), torch.zeros(8, dtype=torch.int64)
    bases = found(one[:4], other[:4], one[2:], other[3:], torch.zeros(2)).bases
    assert [(b.members, b.nbytes, b.dtype) for b in bases] == [
        ((0, 2), 32, "torch.float32"),
        ((1, 3), 64, "torch.int64"),
    ]


def test_neighbours_and_duplicates_do_not_overlap():
    """Windows that touch, and the same tensor twice, are no overlaps."""
    base = torch.zeros(8)
    assert found(base[:4], base[4:], base[:0]).overlaps == ()
    assert found(base, base).overlaps == ()
    assert found(base[:4], base[4:]).bases == ()


def test_views_of_one_tensor_that_requires_grad_belong_together():
    """A write to one view gives the others a new history, whether their bytes overlap or not."""
    x = nonleaf(6)
    apart = found(x[:3], x[3:])
    assert apart.overlaps == ()
    assert [b.members for b in apart.bases] == [(0, 1)]


def write_first(a, b):
    """Write one of two inputs and use both."""
    a.mul_(2)
    return a.sum() + b.sum(), b * 1


def both(a, b):
    """Write both inputs, one after the other, and return an alias of one."""
    a.add_(1)
    b.mul_(3)
    a.mul_(2)
    return a * 1, b[1:]


def second(a, b):
    """Write the second input under no_grad, and use the first before and after."""
    before = a * 2
    with torch.no_grad():
        b.add_(1)
    return before + a


def through_view(a, b):
    """Write a part of one input by a view of it."""
    a[0].fill_(7.0)
    return b.clone(), a


WINDOWS = {
    "part": lambda x: (x[:4], x[2:]),
    "inside": lambda x: (x, x[2:5]),
    "inside first": lambda x: (x[2:5], x),
    "columns": lambda x: (x.view(2, 3)[:, :2], x.view(2, 3)[:, 1:]),
    "apart": lambda x: (x[:3], x[3:]),
    "transposed": lambda x: (x.view(2, 3).t(), x.view(2, 3)[:, 1:]),
    "steps": lambda x: (x[::2], x[1:4]),
    "one element": lambda x: (x[3:4], x[3]),
    "expanded": lambda x: (x[:2], x[1:2].expand(3)),
}


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("program", [write_first, both, second, through_view], ids=lambda f: f.__name__)
def test_windows(program, windows):
    """Windows of all kinds, without gradients and as views of a tensor with a history."""
    for make in (lambda: torch.randn(6), lambda: torch.arange(6.0).requires_grad_() * 1):
        a, b = WINDOWS[windows](make())
        if program in (both, second) and (windows == "expanded" or a.dim() == 0 or b.dim() == 0):
            continue  # eager refuses to write what overlaps itself
        if program is through_view and windows == "one element":
            continue
        same(program, a, b, eagerly=False, entries=1)


def test_no_relation():
    """Aliases that autograd does not connect share their memory, and each keeps its own gradient."""
    x = nonleaf(4)
    same(lambda a, b: (b.mul_(2), a * a)[1], x, x.detach())
    leaf = torch.arange(4.0).requires_grad_()
    same(lambda a, b: (b.mul_(2), a * 3)[1], leaf, leaf.detach())
    flat = torch.arange(8.0)
    parts = flat[:5].requires_grad_(), flat[3:].detach().requires_grad_()

    def step(a, b):
        with torch.no_grad():
            a.sub_(b.clone())
        return (a * 2).sum() + (b * b).sum()

    same(step, *parts)


def test_other_dtypes():
    """Integers over floats, bytes over numbers, and the parts of complex numbers."""
    base = torch.arange(6.0)
    same(lambda a, b: (a.add_(1 << 23), b * 2)[1], base.view(torch.int32)[1:], base[:4])
    same(lambda a, b: (a.zero_(), b * 2)[1], base.view(torch.uint8)[4:12], base)
    numbers = torch.complex(torch.arange(4.0), torch.ones(4))
    same(lambda a, b: (a.mul_(2), b * 1j)[1], torch.view_as_real(numbers), numbers)
    same(lambda a, b: (b.mul_(2j), a * 1)[1], torch.view_as_real(numbers), numbers[1:])


def test_two_storages_over_one_buffer():
    """Two tensors made from one array share memory though their storage objects differ."""
    for step in (lambda a, b: (a.mul_(2), a[3:] + b[:2])[1], lambda a, b: (b.add_(1), a * 2)[1]):
        results = []
        for function in (step, compiled(step)):
            array = np.arange(8, dtype=np.float32)
            a, b = torch.from_numpy(array[:5]), torch.from_numpy(array[3:])
            results.append((function(a, b).tolist(), array.tolist(), a.tolist(), b.tolist()))
        assert results[0] == results[1]


def test_gradients_before_and_after():
    """A write to one view of a tensor with a history: gradients of leaf, of the views before, and through both."""
    for program in (
        lambda a, b: (a.mul_(2), (a * b[:4]).sum())[1],
        lambda a, b: (a.mul_(b[:4].clone()), b * 2)[1],
        lambda a, b: (b.copy_(a.sum().expand(4)), a * a)[1],
    ):
        x = torch.arange(6.0).requires_grad_() * 1
        same(program, x[:4], x[2:])
        same(program, x[:4], x[2:], backward="first")
        same(program, x[:4], x[2:], backward=None)


def test_only_read_they_are_inputs_of_their_own():
    """Without a write there is no base: the graph takes both windows."""
    x = nonleaf(6)
    same(lambda a, b: a * b, x[:4], x[2:])
    h = compiled(lambda a, b: a * b)
    h(x[:4], x[2:])
    assert len(record(h, "synthetic_bases").overlaps) == 1
    assert len(record(h, "trace").inputs) == 2
    g = compiled(lambda a, b: (a.mul_(2), a * b)[1])
    base = torch.arange(6.0)
    g(base[:4], base[2:])
    assert len(record(g, "trace").inputs) == 1


def test_an_input_beside_its_own_view():
    """An input and a view of it are two inputs; outputs that alias one are made from that one."""
    base = torch.randn(2, 3)
    same(lambda a, b: (a.t(), b[1:], a * 1), base, base.view(-1))
    same(lambda a, b: (a.mul_(2), a.t(), b[1:], a * 1)[1:], base, base.view(-1))


def test_an_offset_that_moves_is_compiled_anew():
    """The entry is for one way of sharing memory: another distance recompiles, and says why."""
    g = compiled(lambda a, b: (a.mul_(2), a + b)[1])
    for start in (1, 2, 1):
        base, wanted = torch.arange(8.0), torch.arange(8.0)
        expected = (lambda a, b: (a.mul_(2), a + b)[1])(wanted[:4], wanted[start : start + 4])
        assert torch.equal(g(base[:4], base[start : start + 4]), expected)
        assert torch.equal(base, wanted)
    (reason,) = behind(g).recompiles
    assert "`a` and `b` share another part of their memory" in reason


def test_a_saved_value_is_the_old_one():
    """What the backward needs of a window that is overwritten is kept as it was, also in a window beside it."""
    flat = torch.arange(8.0)
    w = torch.ones(4, requires_grad=True)
    same(lambda a, b, w: (((w * a).sum() + (w * b).sum()), a.mul_(5))[0], flat[:4], flat[2:6], w, eagerly=False)
    # the windows are views of one tensor that is no input: they count writes together, and share no byte
    same(lambda a, b, w: ((w * b).sum(), a.mul_(5))[0], flat[:4], flat[4:], w, backward=None)
    same(lambda a, b, w: (a.mul_(5), (w * b).sum())[1], flat[:4], flat[4:], w)
