"""Inputs whose whole storage the graph takes: what overlaps itself, `as_strided` anywhere, storages that grow."""

from __future__ import annotations

import pytest
import torch

from aotlab.frontends import dynamo
from aotlab.verification.fuzz.compare import differences
from tests.engine_helpers import behind, compiled, leaf, nonleaf, same

BUFFERS = {
    "alone": lambda: (torch.arange(9.0).view(3, 3), torch.ones(3)),
    "gaps": lambda: (torch.arange(18.0).view(3, 6)[:, ::2], torch.ones(3)),
    "offset": lambda: (torch.arange(12.0)[3:].view(3, 3), torch.ones(3)),
    "shared": lambda: ((buffer := torch.arange(12.0))[:9].view(3, 3), buffer[6:9]),
    "counted apart": lambda: (a := torch.arange(9.0).view(3, 3), a.data[0]),
    "two dtypes": lambda: (a := torch.arange(9.0).view(3, 3), a.view(torch.int32)[0]),
    "beside a gradient": lambda: (torch.arange(9.0).view(3, 3), leaf(3)),
}

buffers = pytest.mark.parametrize("make", BUFFERS.values(), ids=BUFFERS.keys())


def part_of_expanded(a, b):
    """Write one of the places that an expanded tensor shows."""
    v = a.expand(2, 3, 3)
    v[1].mul_(2)
    v[:1] += 1
    a.expand(2, 3, 3)[0] = 1.5
    return v[0], a + 1, b * 2


def strided_behind_a_view(a, b):
    """Write through `as_strided` of a view."""
    v = a.t()
    v.as_strided((2,), (1,)).mul_(3)
    return v, a.sum(), b


def between(a, b):
    """Read and write what lies beside the elements."""
    v = a.as_strided((2, 2), (1, 2))
    saved = (v.sum() * b).sum() + (a[0] * b).sum()
    v.mul_(2)
    return saved, v, a * 1


def grown_view(a, b):
    """Let a view grow, over the memory of the others and beyond."""
    v = a[1:]
    v.resize_(20).fill_(2.0)
    return a * 2, v, b


def grown_twice(a, b):
    """Let views grow one after the other."""
    v = a[:1]
    v.resize_(30).fill_(1.0)
    w = a[:1]
    w.resize_(40).fill_(2.0)
    return w, v, a


def grown_and_seen(a, b):
    """Look at what a view has grown over."""
    a[:1].resize_(30).fill_(2.0)
    a.as_strided((3,), (1,), a.storage_offset() + 20).mul_(2)
    return a.as_strided((20,), (1,)) * 1, a, b


def viewed_and_grown(a, b):
    """Let a tensor grow of which there are views."""
    v = a.unsqueeze(0)
    a.resize_(20).fill_(3.0)
    v.mul_(2)
    return a, v, v[0, :1]


def shrunk_and_grown(a, b):
    """Hide elements, write the others, and show all again."""
    a.mul_(2)
    a.resize_(2).add_(1)
    a.resize_(5)
    return a * 1, b * 1


def restrided(a, b):
    """Change strides in place, between writes."""
    a[..., 1:].neg_()
    a.as_strided_((2,), (2,))
    a.mul_(2)
    return a, b + 1


def unseen(a, b):
    """Write an alias that counts its writes apart."""
    a.data.as_strided_((2,), (2,)).mul_(2)
    a.data.expand(2, 3, 3)[1].mul_(2)
    return a * 1


@buffers
@pytest.mark.parametrize(
    "function",
    [
        part_of_expanded, strided_behind_a_view, grown_view, grown_twice, grown_and_seen, viewed_and_grown,
        shrunk_and_grown, restrided, unseen,
    ],
)  # fmt: skip
def test_what_is_done_to_memory(function, make):
    """Values, versions, sharing and offsets are eager's, whoever looks into the storage besides."""
    same(function, *make())


@pytest.mark.parametrize("kind", [kind for kind in BUFFERS if kind != "shared"])
def test_what_lies_beside_the_elements(kind):
    """It is read and written, and saved for a backward before it is written."""
    same(between, *BUFFERS[kind]())


def expanded_input(x):
    """Write an input that overlaps itself where it does not."""
    x.diagonal().abs_()
    x[0] = 2
    return x * 1, x[1]


@pytest.mark.parametrize("where", ["whole", "part"])
def test_inputs_that_overlap_themselves(where):
    """A write to one row shows in all."""
    source = torch.arange(-3.0, 3.0)
    same(expanded_input, (source[:2] if where == "whole" else source[2:4]).expand(2, 2))


def test_writing_all_of_what_overlaps_itself():
    """It is eager's error."""
    same(lambda x: x.mul_(2), torch.ones(2).expand(2, 2), eagerly=True)


def test_differentiable_writes_are_left_to_eager():
    """A write gives the input a history, of which the memory knows nothing."""

    def f(x, w):
        x.as_strided((2,), (1,), 0).mul_(w)
        return x * 2

    same(f, torch.ones(4)[1:3], leaf(2), eagerly=True)
    same(f, torch.ones(4)[1:3], leaf(2).detach())


def test_windows_beyond_the_storage():
    """Eager's error, also where the storage grows only later."""

    def f(x):
        v = x.as_strided((20,), (1,))
        x[:1].resize_(30).fill_(1)
        return v

    same(f, torch.ones(3), eagerly=True)


def test_the_storage_is_guarded():
    """An entry is for storages of one size and windows in one place; the storage of the first call has grown."""

    def f(x):
        x[1:].resize_(5).fill_(2)
        return x * 1

    g = compiled(f)
    x = torch.arange(3.0)
    for expected in (24, 24, 24):
        assert g(x).tolist() == [0.0, 2.0, 2.0]
        assert x.untyped_storage().nbytes() == expected
    assert (len(behind(g).entries), behind(g).calls.eager) == (2, 0)
    whole = torch.arange(9.0)
    assert g(whole[2:5]).tolist() == [2.0, 2.0, 2.0]
    assert whole.tolist() == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 8.0]


def test_other_inputs_in_the_storage_are_guarded():
    """Memory that the graph gives back as a whole must not be what another input is."""

    def f(x, y):
        x.as_strided((2,), (1,), 0).mul_(2)
        y.add_(1)
        return x * 1

    g = compiled(f)
    g(torch.arange(8.0)[4:], torch.zeros(2))
    for make in (lambda s: (s[4:], s.data[2:4]), lambda s: (s[4:], s.data[:2])):
        expected, found = torch.arange(8.0), torch.arange(8.0)
        f(*make(expected))
        g(*make(found))
        assert expected.tolist() == found.tolist()


def test_much_memory_is_left_to_eager():
    """The graph does not take a large storage for a small window of it."""
    same(lambda x: x.as_strided((2,), (1,), 0) * 2, torch.zeros(1 << 16)[4:8], eagerly=True)


def test_with_a_history_it_is_left_to_eager():
    """What autograd makes of views depends on how they were made."""
    same(lambda x: (x.t().as_strided((2,), (1,)).mul_(2), x * 1)[1], nonleaf(2, 2), eagerly=True)
    same(lambda x: x.as_strided((2,), (1,), 0) * 2, nonleaf(8)[4:8], eagerly=True)


def test_behind_dynamo():
    """The same inside a graph of Dynamo's."""
    f = torch.compile(part_of_expanded, backend=dynamo.backend, options={"compiler": "eager"})
    a, b = BUFFERS["gaps"]()
    c, d = BUFFERS["gaps"]()
    for expected, found in zip(part_of_expanded(a, b), f(c, d), strict=True):
        assert torch.equal(expected, found)
    assert torch.equal(a, c)


def test_windows_beyond_the_storage_of_an_intermediate():
    """Eager's error too, though nothing uses the window."""
    same(lambda x: ((y := x * 2).as_strided((2,), (2,)), y)[1], leaf(2), eagerly=True)
    same(lambda x: (x * 2).as_strided((2,), (1,)), leaf(2))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_part_of_an_expanded_tensor_is_written_exactly(grad):
    """Functionalization would add the difference to what was there, which rounds: here, to zero."""

    def of_input(x):
        x.expand(2, 1)[1].fill_(0.1)
        return x * 1

    def of_intermediate(x):
        y = x * 1
        y.expand(2, 1)[1].fill_(0.1)
        return y

    x = torch.tensor([1e8], requires_grad=grad) * 1
    same(of_input, x, eagerly=grad)
    same(of_intermediate, x, eagerly=True)


@pytest.mark.parametrize("op", [lambda t: t.mul_(2), lambda t: t.add_(1), lambda t: t.sin_()])
def test_windows_that_overlap_are_written_by_eager(op):
    """Its kernel reads what it has written for another window; windows that lie apart are compiled."""

    def f(x, step):
        op(x.unfold(0, 2, step))
        return x

    same(f, torch.arange(5.0), 1, eagerly=True)
    same(f, torch.arange(5.0), 2)


@pytest.mark.parametrize("kind", ["plain", "view of a history", "two views of it"])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_write_to_a_part_that_holds_nothing(kind, hidden):
    """No byte changes, and the version and the history move all the same."""

    def f(x, y):
        part = x[2:]
        (part.detach() if hidden else part).add_(1)
        return x * 1, y

    def inputs():
        base = torch.arange(6.0).reshape(3, 2)
        if kind == "plain":
            return (base[1:], torch.ones(2)), {"base": base}
        leaf = base.requires_grad_()
        computed = leaf * 1
        other = computed[:2] if kind.startswith("two") else torch.ones(2)
        return (computed[1:], other), {"leaf": leaf, "computed": computed}

    assert differences(f, compiled(f), [inputs, inputs]) == []


@pytest.mark.parametrize("weights", [lambda: torch.ones(3), lambda: leaf(3)], ids=["plain", "grad"])
def test_a_call_that_raises_before_a_storage_grows(weights):
    """The storage is as large as it was, as eager leaves it that runs the call then; the next call is compiled."""

    def f(a, b, i):
        chosen = b.detach()[i]
        view = a.t()
        a.resize_(100).fill_(2.0)
        return view * chosen, b * 2

    def use(g):
        found = []
        for index in (1, 7, 2):
            a = torch.arange(6.0).view(2, 3)
            try:
                out = [t.tolist() for t in g(a, weights(), torch.tensor([index]))]
            except IndexError as error:
                out = str(error).splitlines()[:1]
            found.append((out, a.untyped_storage().nbytes(), a.shape, a.tolist()))
        return found

    g = compiled(f)
    assert use(f) == use(g)
    assert (g.calls.compiled, g.calls.eager) == (2, 1)
