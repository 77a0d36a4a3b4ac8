"""Guards on overlap: two calls whose inputs start or stop overlapping, or overlap elsewhere.

Only entries that write an input check overlaps. The overlap is computed from bytes, not from storage objects or dtypes.
Each test calls a compiled function with one pattern, with another, and with the first again. The second call is
compiled again with a sentence, the first entry serves the third call, and all results are eager's.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

import aotlab
from aotlab.ir.extents import byte_interval, extent_bytes, overlapping_pairs
from tests.engine_helpers import behind, compiled
from tests.guards.two_calls import MODES, ROOTS, by_dynamo, observed, two_calls

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def windows(one, two, *, grad=False, dtype=torch.float32):
    """Make two windows (slices) of one buffer."""

    def make():
        base = torch.arange(1.0, 13.0)
        if grad:
            ROOTS.append(base.requires_grad_())
            base = base * 1
        return base[one], (base if dtype is base.dtype else base.view(dtype))[two]

    return make


def from_memory(kind, one, two):
    """Make two tensors over one buffer that torch does not own: their storage objects differ."""

    def make():
        if kind == "numpy":
            array = np.arange(1, 13, dtype=np.float32)
            return torch.from_numpy(array[one]), torch.from_numpy(array[two])
        raw = (ctypes.c_float * 12)(*range(1, 13)) if kind == "ctypes" else bytearray(np.arange(1, 13, dtype="f4"))
        whole = memoryview(raw).cast("B")

        def piece(part):
            return torch.frombuffer(whole[4 * part.start : 4 * part.stop], dtype=torch.float32)

        return piece(one), piece(two)

    return make


def write_first(x, y):
    """Write one argument, then read the other."""
    x.mul_(2)
    return x.sum() + y.sum() * 3


def write_second(x, y):
    """Write the second argument."""
    y.add_(1)
    return x * 2


OVERLAPS = {
    "begins": (windows(slice(0, 4), slice(4, 8)), windows(slice(0, 4), slice(2, 6))),
    "begins, whole": (windows(slice(0, 4), slice(4, 8)), windows(slice(0, 4), slice(0, 4))),
    "ceases": (windows(slice(0, 4), slice(2, 6)), windows(slice(0, 4), slice(4, 8))),
    "moves": (windows(slice(0, 4), slice(1, 5)), windows(slice(0, 4), slice(2, 6))),
    "changes sides": (windows(slice(2, 6), slice(0, 4)), windows(slice(0, 4), slice(2, 6))),
    "strided": (windows(slice(0, 6, 2), slice(6, 9)), windows(slice(0, 6, 2), slice(1, 4))),
}
EXTERNAL = {
    "begins": (slice(0, 4), slice(4, 8), slice(0, 4), slice(2, 6)),
    "ceases": (slice(0, 4), slice(2, 6), slice(0, 4), slice(4, 8)),
    "moves": (slice(0, 6), slice(4, 8), slice(0, 6), slice(2, 6)),
}


@pytest.mark.parametrize("function", [write_first, write_second])
@pytest.mark.parametrize("pattern", OVERLAPS)
def test_overlap(pattern, function):
    """How the bytes of a written input overlap another's: from nothing to something, back, or elsewhere."""
    first, second = OVERLAPS[pattern]
    two_calls(function, first, second, reason="memory")


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
def test_overlap_of_other_dtypes(frontend):
    """Overlap is computed in bytes: a write to memory that an input of another dtype shares runs eagerly."""
    makes = [windows(slice(0, 4), part, dtype=torch.int32) for part in (slice(4, 8), slice(3, 7), slice(4, 8))]
    made = []
    f = by_dynamo(made)(write_first) if frontend == "dynamo" else compiled(write_first)
    for make in makes:
        assert observed(write_first, make) == observed(f, make)
    (behind_it,) = made or [behind(f)]
    assert (behind_it.calls.compiled, behind_it.calls.eager) == (2, 1)


@pytest.mark.filterwarnings("ignore:.*no synthetic base can replace them")
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("kind", ["numpy", "ctypes", "bytearray"])
@pytest.mark.parametrize("pattern", EXTERNAL)
def test_overlap_in_external_memory(pattern, kind, frontend):
    """Tensors over one external buffer have two storages: a call that writes where their bytes overlap runs eagerly."""
    a, b, c, d = EXTERNAL[pattern]
    makes = [from_memory(kind, a, b), from_memory(kind, c, d)]
    made = []
    f = by_dynamo(made)(write_first) if frontend == "dynamo" else compiled(write_first)
    for make in (*makes, makes[0]):
        assert observed(write_first, make) == observed(f, make)
    behind_it = made if frontend == "dynamo" else [behind(f)]
    apart = {"begins": 2, "ceases": 1, "moves": 0}[pattern]
    assert sum(each.calls.compiled for each in behind_it) == apart
    assert sum(each.calls.eager for each in behind_it) == 3 - apart


def several(*slices):
    """Make several windows of one buffer."""

    def make():
        base = torch.arange(1.0, 21.0)
        return tuple(base[part] for part in slices)

    return make


def write_one_of_three(x, y, z):
    """Write the second argument, and read all."""
    y.mul_(2)
    return x + y * z


#: The first and the second window overlap in one call, the second and the third in the other.
THREE = (several(slice(0, 3), slice(2, 5), slice(6, 9)), several(slice(0, 3), slice(5, 8), slice(6, 9)))


def test_overlap_among_three():
    """Of three windows, other pairs overlap from call to call."""
    two_calls(write_one_of_three, *THREE, reason="memory")


@MODES
def test_overlap_of_inputs_that_are_only_read(grad):
    """If no input is written, a change of the overlap compiles nothing again."""
    f = compiled(lambda x, y: x + y * 2)
    for pattern in ("begins", "ceases", "moves"):
        for make in OVERLAPS[pattern]:
            assert observed(lambda x, y: x + y * 2, make) == observed(f, make)
    assert f.recompiles == ()
    if grad:
        g = compiled(lambda x, y: x * y)
        for two in (slice(4, 8), slice(2, 6), slice(1, 5)):
            make = windows(slice(0, 4), two, grad=True)
            assert observed(lambda x, y: x * y, make) == observed(g, make)
        assert g.recompiles == ()


ALIASES = {
    "view": lambda a: (a, a.view(-1)),
    "view of an alias": lambda a: (a, a.detach().view(-1)),
    "view of its data": lambda a: (a, a.data.view(-1)),
    "behind": lambda a: (a.view(-1), a),
    "behind a view of an alias": lambda a: (a.detach().view(-1), a),
    "real": lambda a: (a, torch.view_as_real(a)),
    "real of an alias": lambda a: (a, torch.view_as_real(a.detach())),
}


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize(
    "pair",
    [
        ("view", "view of an alias"), ("view", "view of its data"), ("behind", "behind a view of an alias"),
        ("real", "real of an alias"),
    ],
)  # fmt: skip
def test_views_of_an_input_and_of_an_alias_of_it(pair, is_complex):
    """A write to a view gives its base a history.

    This concerns the other input if it is the base, but not if it is an alias of the base.
    """

    def f(a, b, c):
        b.mul_(c.sum())
        return a + 1, b + 1

    def outcome(function, kind):
        a = torch.arange(4.0) + (0j if is_complex or pair[0] == "real" else 0)
        a, b = ALIASES[kind](a)
        c = torch.ones(2, requires_grad=True)
        results = function(a, b, c)
        return [(each.tolist(), each.requires_grad, each.is_leaf) for each in (a, b, *results)]

    for kinds in (pair, pair[::-1]):
        g = compiled(f)
        for kind in (*kinds, kinds[0]):
            assert outcome(f, kind) == outcome(g, kind)
        assert g.calls.total == 3


def test_a_report_says_which_inputs_share_bytes():
    """Or that none do."""

    def f(a, b):
        a.mul_(2)
        return a + b

    base = torch.arange(6.0)
    for one, two, said in (
        (base[:4], base[2:], "`a` and `b` share bytes as they did"),
        (base[:3], base[3:], "no input shares bytes with an input that is written"),
    ):
        with aotlab.Report.record() as report:
            compiled(f)(one, two)
        guards = report.guards
        assert guards[guards.kind == "overlap"].sentence.tolist() == [said]


def test_overlap_among_many_inputs():
    """With many inputs, only overlaps with the written input are guarded; the others may overlap."""

    def f(a, b, c, d):
        c.mul_(2)
        return a + b + d

    g = compiled(f)
    windows = [slice(0, 3), slice(4, 7), slice(8, 11), slice(12, 15)]
    for i, window in ((0, slice(0, 3)), (0, slice(9, 12)), (1, slice(6, 9)), (3, slice(10, 13)), (3, slice(8, 11))):
        make = several(*windows[:i], window, *windows[i + 1 :])
        assert observed(f, make) == observed(g, make)
    assert [reason.split(" share")[0] for reason in g.recompiles] == [
        "`a` and `c`",
        "`b` and `c`",
        *["`c` and `d`"] * 2,
    ]


def test_overlap_arithmetic():
    """Byte intervals and pairs by themselves: offsets, strides, empty tensors, three in a row."""
    base = torch.zeros(10)
    start = base.data_ptr()
    assert byte_interval(base[2:5]) == (start + 8, start + 20)
    assert byte_interval(base[::3]) == (start, start + 40)
    assert byte_interval(base[:0]) == (0, 0)
    assert extent_bytes((2, 3), (3, 1), 4) == 24
    assert extent_bytes((2, 3), (1, 2), 8) == 48
    assert extent_bytes((), (), 2) == 2
    assert extent_bytes((0, 3), (3, 1), 4) == 0
    tensors = [base[0:4], base[3:6], base[5:8], base[8:10], base[:0]]
    assert overlapping_pairs(list(enumerate(tensors))) == ((0, 1, 12), (1, 2, 8))
    assert overlapping_pairs([(7, base[1:2]), (3, base)]) == ((3, 7, 4),)
