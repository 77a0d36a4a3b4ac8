"""Inputs that share memory: found on byte intervals, and written as eager writes them."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest
import torch

from aotlab.frontends import dynamo
from aotlab.frontends.direct import FunctionTarget
from aotlab.stages import capture, dedupe, synthetic_bases
from aotlab.verification.fuzz.compare import differences
from tests.engine_helpers import behind, compiled, nonleaf, record, same
from tests.functions import Viewed


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
    same(lambda a, b, w: ((w * a.clone()).sum() + (w * b.clone()).sum(), a.mul_(5))[0], flat[:4], flat[2:6], w)
    same(lambda a, b, w: ((w * a).sum() + (w * b).sum(), a.mul_(5))[0], flat[:4], flat[2:6], w, eagerly=True)
    # the windows are views of one tensor that is no input: they count writes together, and share no byte
    same(lambda a, b, w: ((w * b).sum(), a.mul_(5))[0], flat[:4], flat[4:], w, backward=None, eagerly=True)
    same(lambda a, b, w: (a.mul_(5), (w * b).sum())[1], flat[:4], flat[4:], w, eagerly=True)


# --- an input that is a view of a tensor with a history, which is no input


def of_a_history(base: torch.Tensor | None = None) -> torch.Tensor:
    """Make a view of a tensor that requires grad and is no leaf."""
    return (nonleaf(3, 2) if base is None else base)[1:]


def steps_of(program, make, caller):
    """Return what the caller's steps give after ``program``, and after it compiled; the latter has to be compiled."""
    found = []
    for function in (program, compiled(program)):
        results = []
        for _ in range(2):
            args, base = make()
            out = function(*args)
            results.append([None if g is None else g.tolist() for g in caller(out, *args, base)])
        found.append(results)
    assert behind(function).calls.compiled == 2
    return found


def lone():
    """One view, and what it is a view of."""
    base = nonleaf(3, 2)
    return (base[1:],), base


def two():
    """Two views of one tensor, which is no input."""
    base = nonleaf(4, 2)
    return (base[:2], base[2:]), base


def gradient(out, tensor):
    """Return the gradient of one tensor with respect to another, None where there is no way."""
    return torch.autograd.grad(out, tensor, torch.ones_like(out), allow_unused=True, retain_graph=True)[0]


def view_then_write(a):
    """Return a view from before a write."""
    v = a.view(-1)
    a.mul_(2)
    return v


def write_then_view(a):
    """Return a view from after a write."""
    a.mul_(2)
    return a.view(-1)


def both_views(a):
    """Return one of each, and a view of the former."""
    v = a[0]
    a.mul_(2)
    return v, a[0], v[:1]


def hidden_write(a):
    """Write under no_grad between two results and views."""
    v, before = a[...], a * 3
    with torch.no_grad():
        a.mul_(2)
    return v, before, a * 5, a[...]


def write_and_use(a):
    """Use the input before and after a write."""
    before = a.exp()
    a.mul_(a.detach())
    return before, a.sin()


@pytest.mark.parametrize("program", [view_then_write, write_then_view, write_and_use], ids=lambda f: f.__name__)
def test_gradients_of_a_written_view_go_by_its_base(program):
    """Which results hang on the view, and which on what it is a view of only, is as in eager; so are the gradients."""

    def caller(out, a, base):
        outs = out if isinstance(out, tuple) else (out,)
        return [gradient(o, t) for o in outs for t in (a, base)]

    eager, ours = steps_of(program, lone, caller)
    assert eager == ours
    same(program, of_a_history(), entries=1)


@pytest.mark.parametrize("program", [both_views, hidden_write], ids=lambda f: f.__name__)
def test_views_from_before_a_write_run_eagerly(program):
    """Where they are used after it, or autograd did not see it."""
    same(program, of_a_history(), eagerly=True)


def test_a_view_from_before_a_write_does_not_hang_on_the_input():
    """The caller's view gets its history from the base: no gradient for the input, one for the base."""
    x = nonleaf(3, 2)
    a = x[1:]
    v = compiled(view_then_write)(a)
    assert gradient(v, a) is None
    assert gradient(v, x) is not None
    b = nonleaf(3, 2)[1:]
    assert gradient(compiled(write_then_view)(b), b) is not None


@pytest.mark.parametrize("kind", ["view", "result"])
def test_other_views_after_a_write(kind):
    """A write to one of two views gives the other an edge of its own: results after it hang on that."""

    def program(a, b):
        early = b[...] if kind == "view" else b * 3
        a.mul_(2)
        return early, b * 5, b[...]

    def caller(out, a, b, base):
        return [gradient(o, t) for o in out for t in (b, a, base)]

    if kind == "view":  # a view from before has its history from the base by now
        same(program, *two()[0], eagerly=True)
        return
    eager, ours = steps_of(program, two, caller)
    assert eager == ours
    assert [gradient is None for gradient in eager[0][:3]] == [True, True, True]


def test_hooks_of_a_written_view_do_not_fire():
    """A gradient that goes by the base passes the view's old place no more; that of an earlier use passes it."""

    def program(a):
        before = a * 3
        a.mul_(2)
        return before, a * 1

    counts = []
    for function in (program, compiled(program)):
        seen: list[float] = []
        for hooked in (True, False, True):
            a = of_a_history()
            if hooked:
                a.register_hook(lambda g, seen=seen: seen.append(g.sum().item()))
            for out in function(a):
                out.sum().backward(retain_graph=True)
                seen.append(a._base.grad_fn.name())
        counts.append(seen)
    assert counts[0] == counts[1]
    assert [entry for entry in counts[0] if isinstance(entry, float)] == [12.0, 12.0]
    assert behind(function).calls.compiled == 3
    assert len(behind(function).entries) == 1


def test_hooks_of_one_of_two_views():
    """A write to the other view makes both histories anew, and leaves the hook behind."""

    def program(a, b):
        before = a * 3
        b.mul_(2)
        return before, a * 5, b * 7

    counts = []
    for function in (program, compiled(program)):
        seen: list[float] = []
        for _ in range(2):
            (a, b), base = two()
            for view in (a, b):
                view.register_hook(lambda g, seen=seen: seen.append(g.sum().item()))
            seen += [None if (g := gradient(out, base)) is None else g.tolist() for out in function(a, b)]
        counts.append(seen)
    assert counts[0] == counts[1]
    assert behind(function).calls.compiled == 2


def test_a_written_view_has_a_base_of_its_own():
    """The graph takes the memory of what it is a view of; where nothing is written, the view."""
    g = compiled(write_then_view)
    g(of_a_history())
    assert len(record(g, "synthetic_bases").views) == 1
    assert record(g, "trace").module.graph.find_nodes(op="placeholder")[0].meta["val"].shape == (6,)
    h = compiled(lambda a: a * 2)
    h(of_a_history())
    assert record(h, "trace").module.graph.find_nodes(op="placeholder")[0].meta["val"].shape == (2, 2)


def test_view_or_not_is_guarded():
    """An entry for a view with a history serves no other tensor, and the other way around; where it is written."""
    g = compiled(write_then_view)
    for n, make in enumerate((lambda: of_a_history(), lambda: nonleaf(2, 2), lambda: of_a_history())):
        a = make()
        out = g(a)
        assert gradient(out, a) is not None
        assert len(behind(g).entries) == min(n + 1, 2)
    other = compiled(write_then_view)
    other(nonleaf(2, 2))
    other(of_a_history())
    other(nonleaf(5, 2)[1:3])  # of a larger base
    assert len(behind(other).entries) == 3
    h = compiled(lambda a: a * 2)
    h(nonleaf(2, 2))
    h(of_a_history())
    assert len(behind(h).entries) == 1


def test_a_view_without_a_base_is_left_to_eager():
    """Where it is left with fewer elements, a write to it runs eagerly; reading is compiled, and so is a move."""
    gaps = nonleaf(2, 4)[:, ::2].detach().clone().as_strided((2, 2), (2, 1)).requires_grad_() * 1
    same(write_then_view, torch.empty_strided((3, 2), (4, 1)).fill_(1.0).requires_grad_().mul(1)[1:])

    def step(a):
        a.t_()
        a.mul_(2)
        return a * 1

    def narrow(a):
        a.as_strided_((2,), (1,))
        a.mul_(2)
        return a * 1

    same(step, of_a_history())
    same(narrow, of_a_history(), eagerly=True)
    same(lambda a: (a.t_(), a * 2)[1], of_a_history())
    same(lambda a: a.view(-1) * 2, gaps[1:])


def test_views_of_a_leaf():
    """A view of a parameter may be written under no_grad only; its history is then made anew too."""

    def program(a):
        early = a * 2
        with torch.no_grad():
            a.add_(1)
        return early, a * 3

    def make():
        leaf = torch.ones(3, 2).requires_grad_()
        return (leaf[1:],), leaf

    eager, ours = steps_of(program, make, lambda out, a, base: [gradient(o, t) for o in out for t in (a, base)])
    assert eager == ours
    assert eager[0][0] is None
    assert eager[0][2] is not None
    h = compiled(program)
    h(torch.arange(6.0).view(3, 2).requires_grad_()[1:])  # whose base requires no grad
    assert behind(h).calls.eager == 1


def test_a_custom_function_that_returns_a_view():
    """The caller's gradient passes the user's backward, though both are views of one tensor."""

    def program(a):
        return Viewed.apply(a).view(-1) * 1

    same(program, of_a_history())


def test_an_expanded_view_that_is_written_by_data():
    """A write to a part of a view that overlaps itself shows in all of it."""

    def program(a, b):
        a.data[0].add_(2)
        return b * 1

    results = []
    for function in (program, compiled(program)):
        base = nonleaf(1, 2)
        a = base.expand(2, 2)
        function(a, torch.ones(2))
        results.append(a.tolist())
    assert results[0] == results[1]


def test_empty_views():
    """A view of nothing needs no base."""
    same(lambda a, b: (a.mul_(2), b * 1)[1], torch.zeros(2, 0), nonleaf(1, 0).expand(2, 0))
    same(lambda b: (b.mul_(2), b * 1)[1], nonleaf(2, 0)[1:])


# --- places in storages


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_offset_of_what_was_written(requires_grad):
    """It is the caller's, before and after a write, of views too, and in other dtypes."""

    def program(a):
        v = a[1:]
        offsets = [a.storage_offset(), v.storage_offset()]
        a.mul_(2)
        offsets += [a.storage_offset(), v.storage_offset(), a[0, 1:].storage_offset()]
        if not a.requires_grad:
            offsets.append(a.view(torch.int16)[1:].storage_offset())
        return a * 1, offsets

    same(program, of_a_history() if requires_grad else torch.arange(6.0).view(3, 2)[1:])


def test_offsets_in_shared_memory():
    """Inputs that share memory tell their places in the caller's storage, and other places are compiled anew."""

    def program(a, b):
        a.mul_(2)
        return b * b.storage_offset(), a.storage_offset(), b[1:].storage_offset()

    base = torch.arange(8.0)
    same(program, base[2:6], base[3:7])
    same(lambda a, b: b * b.storage_offset() + a, base[2:6], base[3:7])
    g = compiled(program)
    for start in (2, 3, 2):
        x = torch.arange(8.0)
        out, first, second = g(x[start : start + 2], x[start + 1 : start + 4])
        assert (first, second) == (start, start + 2)
        assert out[2].item() == (start + 3) * (start + 1)
    assert len(behind(g).entries) == 2


def test_as_strided_between_the_elements():
    """A window may reach into the gaps of an input; the graph has them only if it takes all of the storage."""
    for grad, make in ((False, lambda: torch.arange(8.0)), (True, lambda: torch.arange(8.0).requires_grad_() * 1)):
        same(lambda a: a.as_strided((2,), (4,)) * 2, make().view(2, 4)[:, ::2])
        same(lambda a: (a.as_strided((2,), (4,)).mul_(2), a * 1)[1], make().view(2, 4)[:, ::2], eagerly=grad)
        same(lambda a: (a.as_strided((2,), (1,)).mul_(2), a * 1)[0], make().view(2, 4)[:, ::2], eagerly=grad)


def test_as_strided_by_an_offset_of_its_own():
    """An offset counts from the beginning of the storage, which a written input has left in the trace."""
    whole = torch.arange(8.0)
    same(lambda a: (a.as_strided((2,), (1,), 2).mul_(2), a * 1)[1], whole[2:6])
    same(lambda a: (a.mul_(2), a.as_strided((2,), (1,), 2) * 1)[1], whole[2:6])
    same(lambda a: a.as_strided((2,), (1,), 3) * 1, whole[2:6])
    for grad in (False, True):
        made = (nonleaf(8) if grad else whole)[2:6]
        same(lambda a: (a.as_strided((2,), (1,), 3).mul_(2), a * 1)[1], made, eagerly=grad)
        same(lambda a: (a.mul_(2), a.as_strided((2,), (1,), 3) * 1)[1], made, eagerly=grad)


def test_as_strided_of_a_transposed_input_that_requires_grad():
    """Torch's functional form of a write to it wants a contiguous tensor: eager writes; reading is compiled."""
    same(lambda a: (a.as_strided((1,), (1,)).neg_(), a * 1)[1], nonleaf(2, 2).t().contiguous())
    make = torch.empty_strided((2, 2), (1, 2)).fill_(2.0).requires_grad_()
    same(lambda a: (a.as_strided((1,), (1,)).neg_(), a * 1)[1], make.mul(1), eagerly=True)
    same(lambda a: a.as_strided((1,), (1,)) * 2, make.mul(1))


@pytest.mark.parametrize("windows", [(2, 2), (2, 3), (4, 4), (2, 1), (1, 2)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_writes_to_unfolded_windows(windows, requires_grad):
    """Windows that tile a tensor are written; where they leave elements out or overlap, eager writes; all are read."""

    def program(a):
        a.unfold(0, *windows).zero_()
        return a * 1

    def intermediate(a):
        b = a * 2
        b.unfold(dimension=0, size=windows[0], step=windows[1]).zero_()
        return b

    def make():
        return nonleaf(6) if requires_grad else torch.arange(6.0)

    for each in (program, intermediate):
        same(each, make(), eagerly=windows != (2, 2) and (requires_grad or each is intermediate))
    same(lambda a: (a * 2).unfold(0, *windows) * 3, make())


# --- inputs that share memory and are left as they are


@pytest.mark.parametrize("requires_grad", [False, True])
def test_inputs_that_no_base_can_hold_are_read(requires_grad):
    """Where no base can be made of inputs that share memory they are inputs of their own, as long as none changes."""

    def program(a, b):
        return a * 2, b.sum(), b[0]

    whole = torch.arange(18.0)
    if requires_grad:
        whole = whole.requires_grad_() * 1
    pair = whole[:16].view(2, 8)[:, ::3], whole.as_strided((2, 3), (3, 2), 1)
    same(program, *pair)
    same(lambda a, b: (a.mul_(2), b * 1)[1], *pair, eagerly=requires_grad)
    same(lambda a, b: (a.detach().mul_(2), b * 1)[1], *pair, eagerly=requires_grad)
    same(lambda a, b: (a.t_(), b * 1)[1], *pair, eagerly=requires_grad)


def test_memory_behind_an_input_is_read_beside_others():
    """`as_strided` of what shares memory is compiled; one that reaches beyond its tensor only without a gradient."""
    whole = torch.arange(8.0)
    same(lambda a, b: (a.as_strided((2,), (2,)) * 1, b * 2), whole[:4], whole[2:])
    same(lambda a, b: (b.mul_(2), a.as_strided((2,), (2,)) * 1)[1], whole[:4], whole[2:])
    same(lambda a, b: (b.mul_(2), b.as_strided((2,), (2,), 2) * 1)[1], whole[:4], whole[2:])
    for grad in (False, True):
        made = nonleaf(8) if grad else whole
        same(lambda a, b: (b.mul_(2), a.as_strided((5,), (1,)) * 1)[1], made[:4], made[2:], eagerly=grad)
        same(lambda a, b: (b.mul_(2), b.as_strided((2,), (2,), 3) * 1)[1], made[:4], made[2:], eagerly=grad)
        same(lambda a, b: (a.as_strided((2,), (2,)), b.mul_(2))[0] * 1, made[:4], made[2:], eagerly=grad)


@pytest.mark.parametrize("written", [0, 1])
def test_parts_of_complex_numbers_share_memory_with_them(written):
    """The real parts of all numbers but the end of the last one are rows of their memory."""

    def program(*pair):
        pair[written].mul_(3)
        return pair[1 - written] * 1

    whole = torch.arange(8.0).view(2, 2, 2)
    numbers = torch.view_as_complex(whole)
    same(program, numbers, numbers.real)
    same(program, numbers, numbers.imag)
    integers = torch.arange(4, dtype=torch.int64).view(2, 2)
    same(program, integers, integers.view(torch.int16)[..., 1:])
    same(program, integers[1:], integers.view(torch.int16)[..., 1:])


@pytest.mark.parametrize("windows", [(2, 3), (2, 1), (1, 2)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_tensor_is_written_that_is_seen_in_windows(windows, requires_grad):
    """Windows that leave elements out or overlap show what is written to the tensor itself, or through other views."""

    def program(a):
        b = a.unfold(0, *windows)
        a.mul_(2)
        a[1:3].add_(1)
        return b * 1, a * 1

    def intermediate(a):
        b = a * 2
        c = b.unfold(0, *windows)
        b.mul_(a)
        return c, c * 1

    def through(a):
        b = a * 2
        b.unfold(0, *windows)[0].mul_(2)
        return b

    def make():
        return nonleaf(6) if requires_grad else torch.arange(6.0)

    same(program, make(), eagerly=requires_grad)
    same(intermediate, make(), eagerly=requires_grad)
    same(through, make(), eagerly=True)


def test_unseen_writes_to_views_that_autograd_does_not_let_be_written():
    """What a view of a leaf does not allow is a write that autograd sees; one through `detach` or `.data` is none."""

    def detached(a):
        a.detach().mul_(2)
        return a * 3

    def data(a):
        a.data.mul_(2)
        return a * 3

    def beside(a, b):
        b.detach().mul_(2)
        return a * 3, b * b

    def part(whole):
        return whole[1:4]

    leaf_ = torch.arange(6.0).requires_grad_()
    same(detached, part(leaf_))
    same(data, part(leaf_))
    same(beside, part(leaf_), leaf_[2:5])
    same(beside, leaf_[:3], leaf_[3:])
    hooked = part(leaf_ * 1)
    hooked.register_hook(lambda gradient: gradient * 2)
    one, other = ((leaf_.view(2, 3) * 1).unbind()[0] for _ in range(2))
    cases = ((hooked, detached, 1), (one, lambda a: (a.detach().mul_(2), 1)[1], 1), (other, data, 0))
    for view, program, eager in cases:
        function = compiled(program)
        with warnings.catch_warnings(action="error"):  # an entry that does not serve the very call would be warned of
            warnings.filterwarnings("ignore", ".* runs eagerly: ", RuntimeWarning)
            function(view)
        assert behind(function).calls.eager == eager


def test_an_entry_for_unseen_writes_is_for_views_that_can_be_used_after_them():
    """A view of several made at once raises in eager at the next look; an entry made for a view of a leaf misses it."""

    def program(a):
        a.detach().mul_(2)
        return a * 3

    function = compiled(program)
    leaf_ = torch.arange(6.0).requires_grad_()
    assert torch.equal(function(leaf_[:3]), torch.tensor([0.0, 6.0, 12.0]))
    hooked = (leaf_ * 1)[:3]
    hooked.register_hook(lambda gradient: gradient * 2)
    function(hooked)
    assert behind(function).calls.eager == 1
    for run in (program, function):
        with pytest.raises(RuntimeError, match="is a view and its base or another view of its base has been modified"):
            run((torch.arange(6.0).requires_grad_().view(2, 3) * 1).unbind()[0])


# --- which input an output is made of, and steps


def test_an_output_is_a_view_of_the_very_input():
    """Where nothing is written no guard holds two inputs on one memory together."""

    def program(a, b):
        return b.view(-1)

    g = compiled(program)
    a = torch.arange(4.0)
    g(a, a[...])
    b = torch.arange(4.0)
    assert g(a, b).data_ptr() == b.data_ptr()


def moves(a, b):
    """Change the strides of one of two inputs."""
    a.t_()
    return a * 2, b + 1


def moves_and_writes(a, b):
    """Change one and write the other."""
    a.t_()
    b.mul_(2)
    return a * 2, b + 1


def moves_between_writes(a, b):
    """Write one, change it, write it again, change the other."""
    a.mul_(3)
    a.t_()
    a.add_(1)
    b.unsqueeze_(0)
    return a[0], a, b * 2


MOVED = {
    "inside": lambda x: (x.view(2, 3), x[1:5].view(1, 4)),
    "columns": lambda x: (x.view(2, 3)[:, :2], x.view(2, 3)[:1, 1:]),
    "the same place": lambda x: (x.view(2, 3), x.view(2, 3).detach()),
    "data": lambda x: (x.view(2, 3).data, x.view(3, 2)),
}


@pytest.mark.parametrize("windows", MOVED)
@pytest.mark.parametrize("program", [moves, moves_and_writes, moves_between_writes], ids=lambda f: f.__name__)
def test_steps_on_windows(program, windows):
    """A step on one input shows in no other on the same memory, but in the histories of those that share its own."""
    same(program, *MOVED[windows](torch.arange(6.0)))
    same(program, *MOVED[windows](torch.arange(6.0).requires_grad_() * 1))


def whole_and_part():
    """Make a tensor with a history and a view of it."""
    whole = nonleaf(3, 3)
    return whole, whole.diagonal()


def overlapping():
    """Make two views of one tensor with a history."""
    whole = nonleaf(3, 4)
    return whole[:2], whole[1:]


def apart():
    """Make two views of one tensor that have no element in common."""
    whole = nonleaf(1, 6)
    return whole[:, :2], whole[:, 4:]


def gradients_to_each(run, program, make):
    """Differentiate each output by each input, as it is after the call, and by what that is a view of."""
    inputs = make()
    outs = run(program)(*inputs)
    wanted = [*inputs, *(i._base for i in inputs if i._base is not None)]
    found = [
        torch.autograd.grad(out.sum(), wanted, retain_graph=True, allow_unused=True)
        for out in outs
        if out.requires_grad
    ]
    return [None if gradient is None else gradient.tolist() for own in found for gradient in own]


def moves_the_first(a, b):
    """Use the second before the first is moved, and after."""
    early = b * 3
    a.t_()
    return early, a * 2, b * 3


def moves_the_second(a, b):
    """Use the second before and after it is moved, and write the first."""
    early = b * 3
    b.unsqueeze_(0)
    late = b * 3
    a.mul_(2)
    return early, late, a * 2, b


@pytest.mark.parametrize("make", [whole_and_part, overlapping, apart], ids=lambda f: f.__name__)
@pytest.mark.parametrize("program", [moves_the_first, moves_the_second], ids=lambda f: f.__name__)
def test_a_step_and_what_autograd_connects(make, program):
    """What is computed before a step hangs on the old history of all views of one tensor, what comes later on the new.

    Gradients are asked for with respect to each of them, too.
    """
    same(program, *make())
    assert gradients_to_each(lambda f: f, program, make) == gradients_to_each(compiled, program, make)


def views_before_and_after(a):
    """Return views of a view from before, between and after two moves."""
    first = a[0]
    a.unsqueeze_(0)
    second = a.select(1, 0)
    a.mul_(3)
    third = a[0]
    a.transpose_(0, 1)
    return first, second, third, a, first * 2


def views_before_a_move(a):
    """Return views of a written view from before and after a move."""
    a.mul_(2)
    first = a[0]
    a.t_()
    return first, a[1], first + 1


@pytest.mark.parametrize("program", [views_before_and_after, views_before_a_move], ids=lambda f: f.__name__)
def test_views_of_a_view_that_is_moved(program):
    """A view from before the move hangs on what the input is a view of, one from after it on the input."""
    same(program, of_a_history(), eagerly=True)


def test_an_operand_of_a_write_to_a_view_is_watched():
    """Autograd keeps the operand of ``mul_`` also where it hides that: a later write makes the backward an error."""

    def program(a, c):
        a.mul_(2)
        c *= a
        return a, c

    for run in (program, compiled(program)):
        a, c = (nonleaf(3, 4)[1:] for _ in range(2))
        run(a, c)
        a.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            c.sum().backward()


@pytest.mark.usefixtures("fresh_dynamo")
def test_views_with_a_history_behind_dynamo():
    """Behind torch.compile a written view has the base's history too, and the entry is for such views only."""

    def program(a):
        early = a.view(-1)
        a.mul_(2)
        return early, a * 3

    def gradients(function):
        found = []
        for make in (of_a_history, lambda: nonleaf(2, 2), of_a_history):
            a = make()
            found += [None if (g := gradient(out, a)) is None else g.tolist() for out in function(a)]
        return found

    ours = torch.compile(program, backend=lambda gm, inputs: dynamo.backend(gm, inputs, options={"compiler": "eager"}))
    assert gradients(program) == gradients(ours)


def test_two_windows_that_a_write_makes_require_grad():
    """The write to the first gives the second its history, at the next look; no error comes in between."""

    def f(a, b, c):
        a.mul_(c)
        return c * 2

    w = torch.arange(6.0)
    same(f, w[0:4].view(2, 2), w[1:5].view(2, 2), torch.ones(2, 2, requires_grad=True))
    same(lambda a, b, c: b.mul_(c).sum(), w[0:4].view(2, 2), w[1:5].view(2, 2), torch.ones(2, 2, requires_grad=True))


def test_inputs_with_a_common_history_are_not_parted():
    """A function that differentiates one by the other can tell, though it writes neither: eager has the call.

    The trace with a base fails at the offset of its own that `as_strided` has.
    """

    def f(a, v):
        (gradient,) = torch.autograd.grad((v * v).sum(), a, allow_unused=True)
        window = a.as_strided((2,), (2,), 1)
        return v * 2 if gradient is None else v + gradient[1:] + window.sum()

    a = nonleaf(4)
    same(f, a, a[1:], eagerly=True)


def test_inputs_without_one_are_parted():
    """The same function of a detached view is compiled, each input for itself."""

    def f(a, v):
        return a.as_strided((2,), (2,), 1).sum() + v

    a = nonleaf(4)
    same(f, a, a[1:].detach())


LAYOUTS = {
    "permuted": ((1, 1, 3), (1, 1, 1)),
    "none that is stepped": ((1, 1), (7, 5)),
    "gaps": ((2, 1, 2, 1), (4, 9, 2, 3)),
    "in the middle": ((2, 1, 3), (3, 1, 1)),
}


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "grad"])
@pytest.mark.parametrize("with_another", [False, True], ids=["lone", "group"])
@pytest.mark.parametrize(("shape", "stride"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_steps_of_dimensions_of_size_one_are_the_callers(shape, stride, with_another, requires_grad):
    """The function may ask for them, and the offsets of empty parts hang on them."""

    def f(a, b):
        a.detach()[:].mul_(2)
        empty = a[1:1]
        asked = [a.stride(), a[:, None].stride(), a.is_contiguous(), empty.storage_offset(), empty.stride()]
        return asked, b * 2, a.view_as(a)

    base = nonleaf(24) if requires_grad else torch.arange(24.0)
    same(f, base.as_strided(shape, stride, 2), base[1:] if with_another else torch.ones(2))


# --- histories that come with a write


def _complex_and_real():
    a = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]], dtype=torch.complex64)
    return a, torch.view_as_real(a)[..., 0], torch.ones(1)


def _real_and_complex():
    a, b, other = _complex_and_real()
    return b, a, other


def _floats_and_their_bits():
    a = torch.arange(4.0).view(2, 2)
    return a, a[0:], a.view(torch.int32)


def _bits_and_floats():
    a = torch.arange(4.0).view(2, 2)
    return a.view(torch.int32), a[0:], torch.ones(1)


def _windows_of_one_dtype():
    buffer = torch.arange(8.0)
    return buffer[:4].view(2, 2), buffer[2:6].view(2, 2), torch.ones(1)


behind_dynamo = partial(compiled, frontend="dynamo")


def _adds(a, b, w, other):
    b.add_(w)
    return w * 2


def _writes_both(a, b, w, other):
    a.mul_(2)
    b[...].add_(w)
    return w * 2, a * 1


def _writes_a_part(a, b, w, other):
    b[0].mul_(w[0])
    return a * 1, b * 1


def _writes_unseen_first(a, b, w, other):
    with torch.no_grad():
        a.mul_(3)
    b.copy_(w)
    return a * 1


@pytest.mark.parametrize(
    "kind", [_complex_and_real, _real_and_complex, _floats_and_their_bits, _bits_and_floats, _windows_of_one_dtype]
)
@pytest.mark.parametrize(
    ("program", "make"),
    [
        *((program, compiled) for program in (_adds, _writes_both, _writes_a_part, _writes_unseen_first)),
        # Dynamo by itself fails on the other
        *((program, behind_dynamo) for program in (_adds, _writes_both, _writes_unseen_first)),
    ],
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_write_that_brings_a_history(kind, program, make):
    """What is written requires grad, the memory did not: all that autograd takes for views of it do so then."""

    def inputs():
        a, b, other = kind()
        w = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]]).requires_grad_()
        return (a, b, w, other), {}

    assert differences(program, make(program), [inputs, inputs], backward="each") == []
