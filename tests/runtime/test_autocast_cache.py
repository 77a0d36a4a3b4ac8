"""What autocast keeps of leaves until a region ends is shared by compiled calls and eager code, as eager calls do."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody writes it

import aotlab
from aotlab import torch_internals as internals
from tests.engine_helpers import compiled, leaf


def casting(dtype=torch.bfloat16, *, cache=None):
    """Return autocast on the CPU."""
    return torch.autocast("cpu", dtype=dtype, cache_enabled=cache)


def multiply(x, w):
    """Cast both."""
    return x @ w


def twice(x, w):
    """Use one cast at two places."""
    return (x @ w).sin() @ w


def waves(x, w):
    """Have second derivatives."""
    return (x @ w).sin()


def both(x, w):
    """Use the leaf itself as well."""
    return x @ w + w.sum()


def differentiated(x, w):
    """Take a gradient inside, with respect to the leaf."""
    y = (x @ w).float().square()
    return y * torch.autograd.grad(y.sum(), w, create_graph=True)[0].sum()


def renewed(x, w):
    """Write the leaf after its use."""
    y = x @ w
    with torch.no_grad():
        w.mul_(0.5)
    return y


PROGRAMS = {"multiply": multiply, "both": both, "renewed": renewed}

BETWEEN = {
    "nothing": lambda x, w: [],
    "written": lambda x, w: [w.data.mul_(2)][1:],
    "eager": lambda x, w: [x @ w],
    "without gradients": torch.no_grad()(lambda x, w: [(x @ w).clone()]),
    "emptied": lambda x, w: [torch.clear_autocast_cache()][1:],
}


def region(function, between, *, around=casting, first=False, calls=3):
    """Call several times in a region; return all results, and gradients of the leaves."""
    w = leaf(8, 8, seed=1)
    xs = [leaf(8, 8, seed=2 + n) for n in range(calls)]
    results = []
    with around():
        for n, x in enumerate(xs):
            if n or first:
                results += between(x, w)
            results.append(function(x, w))
        loss = sum(result.float().square().sum() for result in results if result.requires_grad)
    loss.backward()
    return [*(result.detach() for result in results), w.grad, *(x.grad for x in xs)]


def same(expected, actual):
    """Compare bit for bit, dtypes too."""
    assert len(expected) == len(actual)
    for e, a in zip(expected, actual, strict=True):
        assert (e is None) == (a is None)
        assert e is None or (e.dtype == a.dtype and torch.equal(e, a))


@pytest.mark.parametrize("partitioner", ["default_partition", "min_cut_rematerialization_partition"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("program", PROGRAMS)
def test_calls_in_one_region(program, between, first, partitioner):
    """Results and gradients are eager's, also where the first call compiles in the midst of the region."""
    f = compiled(PROGRAMS[program], partitioner=getattr(aotlab, partitioner))
    for _ in range(2):
        same(region(PROGRAMS[program], BETWEEN[between], first=first), region(f, BETWEEN[between], first=first))
    assert f.calls.eager == 0
    assert len(f.entries) == 1


@pytest.mark.parametrize("around", [lambda: casting(cache=False), lambda: torch.autocast("cpu", enabled=False)])
def test_where_nothing_is_kept(around):
    """Without the cache, or without autocast, the graph casts, and no input is added."""
    f = compiled(multiply)
    same(region(multiply, BETWEEN["written"], around=around), region(f, BETWEEN["written"], around=around))
    assert "kept_casts" not in f.entries[0].source


@pytest.mark.parametrize("program", [twice, differentiated])
def test_one_call_each_region(program):
    """Several uses in one call are summed as in eager, and gradients taken inside reach the leaf."""
    f = compiled(program)
    same(region(program, BETWEEN["nothing"], calls=1), region(f, BETWEEN["nothing"], calls=1))
    assert f.calls.eager == 0


def test_two_functions_and_a_compilation_between():
    """The second is compiled in the region in which the first has run; both use one cast."""
    f, g = compiled(multiply), compiled(both)
    same(
        region(lambda x, w: multiply(x, w) + both(x, w), BETWEEN["nothing"]),
        region(lambda x, w: f(x, w) + g(x, w), BETWEEN["nothing"]),
    )


def test_regions_of_other_dtypes():
    """A region of another dtype recompiles; one inside of the other that keeps a cast first is left to eager."""
    f = compiled(multiply)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        same(*(region(each, BETWEEN["written"], around=lambda d=dtype: casting(d)) for each in (multiply, f)))
    assert len(f.entries) == 2
    x, w = leaf(8, 8, seed=1), leaf(8, 8, seed=2)
    for each in (multiply, f):
        with casting(torch.float16):
            with casting():
                x.detach() @ w
            with pytest.raises(RuntimeError, match="dtype"):
                each(x, w)


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
def test_a_module_and_its_layers(frontend):
    """A model with norms and convolutions of other layouts, called several times before one backward, as eager."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
            self.norm = nn.GroupNorm(2, 4)
            self.head = nn.Linear(4 * 25, 3)

        def forward(self, x):
            return self.head(self.norm(self.convolution(x)).relu().flatten(1))

    torch.compiler.reset()
    torch.manual_seed(0)
    net = Net()
    xs = torch.randn(3, 4, 2, 5, 5)
    found = []
    for call in (net, aotlab.compile(net, backend="eager", frontend=frontend)):
        for _ in range(2):
            net.zero_grad()
            with casting():
                loss = sum(F.cross_entropy(call(x), torch.tensor([0, 1, 2, 0])) for x in xs)
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in net.parameters())])
    for each in found[1:]:
        same(found[0], each)


def test_derivatives_of_derivatives():
    """They pass the cast as well; terms that meet in bfloat16 may be summed in another order, a unit of the largest."""
    f = compiled(waves)

    def second(call):
        w, x = leaf(8, 8, seed=1), leaf(8, 8, seed=2)
        with casting():
            loss = call(x, w).float().square().mean() + call(x * 2, w).float().sin().mean()
        first = torch.autograd.grad(loss, (x, w), create_graph=True)
        return [*(g.detach() for g in first), *torch.autograd.grad(sum(g.square().sum() for g in first), (x, w))]

    expected, actual = second(waves), second(f)
    same(expected[:2], actual[:2])
    for e, a in zip(expected[2:], actual[2:], strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=e.abs().max().item() * torch.finfo(torch.bfloat16).eps)


def test_what_is_kept_goes_with_the_region():
    """Neither the caller's leaf nor what was traced outlives it."""
    f = compiled(multiply)
    w = leaf(8, 8, seed=1)
    with casting():
        f(leaf(8, 8, seed=2), w).sum().backward()
        [kept] = internals.kept_casts([w])
        assert internals.kept_casts([w])[0] is kept
    gone = [weakref.ref(kept), weakref.ref(w)]
    with casting():
        assert internals.kept_casts([w])[0] is not kept
    del kept, w
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_the_report_names_the_casts():
    """As a stage, with the inputs that they become."""
    with aotlab.Report.record() as recording, casting():
        compiled(multiply)(leaf(4, 4), leaf(4, 4, seed=1))
    stages = recording.report().stages.set_index("stage")["summary"]
    assert stages["casts"] == "2 further inputs: autocast(x) and autocast(w)"


def strided(*shape):
    """Make a leaf, no view, whose elements lie in another order."""
    made = torch.empty_strided(shape, torch.empty(shape[::-1]).permute(*range(len(shape))[::-1]).stride())
    return made.normal_().requires_grad_()


@pytest.mark.parametrize("make", [lambda *shape: torch.randn(shape, requires_grad=True), strided])
@pytest.mark.parametrize("shape", [(4, 3), (3,), (2, 4, 3), (2, 2, 4, 3), (2, 3, 2, 2, 3), (0, 3), (3, 0), (2, 0, 3)])
@pytest.mark.parametrize("grad", [True, False])
def test_finding_what_is_kept(shape, make, grad):
    """It is the same tensor each time, with the leaf's elements and strides, and a history that ends at the leaf."""
    w = make(*shape)
    with casting():
        if not internals.may_keep_cast_of(w):
            assert w.numel() == 0
            return
        with torch.set_grad_enabled(grad):
            [kept] = internals.kept_casts([w])
        again = F.prelu(w, torch.ones(1))  # what eager code does with it
        assert internals.kept_casts([w])[0] is kept
    assert again.grad_fn._saved_self is kept
    assert kept.stride() == w.stride()
    assert torch.equal(kept, w.to(torch.bfloat16))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 3),
        torch.randn(3, 3, dtype=torch.float64, requires_grad=True),
        torch.randn(3, 3, requires_grad=True) * 1,
        torch.randn(3, 3, requires_grad=True).detach()[:2].requires_grad_(),
        torch.randn((), requires_grad=True),
    ],
)
def test_what_is_not_kept(tensor):
    """Of other tensors nothing is kept, and they are returned as they are."""
    with casting():
        assert internals.kept_casts([tensor]) == [tensor]
