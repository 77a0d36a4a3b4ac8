"""Sparse gradients, as from `nn.Embedding(sparse=True)`: graphs compute the rows, and the gradient is eager's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab.errors import SubclassError


def table(**settings):
    """Make an embedding."""
    torch.manual_seed(0)
    return nn.Embedding(10, 4, sparse=True, **settings)


def bags(**settings):
    """Make one of bags."""
    torch.manual_seed(0)
    return nn.EmbeddingBag(10, 4, sparse=True, **settings)


def numbers(*size):
    """Make indices."""
    return torch.randint(10, size, generator=torch.Generator().manual_seed(sum(size)))


def described(gradient):
    """Return all properties of a gradient."""
    if gradient is None or not gradient.is_sparse:
        return gradient
    indices, values = gradient._indices(), gradient._values()
    looks = [(t.dtype, t.shape, t.stride()) for t in (indices, values)]
    return indices, values.detach().clone(), looks, gradient.shape, gradient.is_coalesced(), gradient.requires_grad


def same(one, other, rtol=0.0):
    """Tell whether nested values are the same."""
    if isinstance(one, torch.Tensor):
        return torch.allclose(one, other, rtol=rtol, atol=rtol)
    if isinstance(one, list | tuple) and not isinstance(one, torch.Size):
        return len(one) == len(other) and all(same(*pair, rtol=rtol) for pair in zip(one, other, strict=True))
    return one == other


class Net(nn.Module):
    """An embedding, called in some way, before a layer."""

    def __init__(self, make, call):
        """Make the layers."""
        super().__init__()
        self.table, self.layer, self.call = make(), nn.Linear(4, 2), call

    def forward(self, *given):
        """Return a loss."""
        return self.layer(self.call(self.table, *given).float()).tanh().sum()


def plainly(module, *given):
    """Call it."""
    return module(*given)


#: How to make the embedding, how it is called, and batches: these have one size more each time.
LOOKUPS = {
    "rows": (table, plainly, [(numbers(n, 5),) for n in (3, 4, 6)]),
    "padding": (lambda: table(padding_idx=2), plainly, [(numbers(n),) for n in (7, 20, 9)]),
    "int32": (lambda: table(padding_idx=-1), plainly, [(numbers(n).int(),) for n in (7, 8, 9)]),
    "bags of one size": (bags, plainly, [(numbers(n, 5),) for n in (3, 4, 6)]),
    "sums": (lambda: bags(mode="sum"), plainly, [(numbers(n), torch.tensor([0, 3, 3])) for n in (7, 9, 12)]),
    "padding in bags": (lambda: bags(padding_idx=3), plainly, [(numbers(n), torch.tensor([0, 3])) for n in (7, 9, 12)]),
    "last offset": (
        lambda: bags(mode="sum", include_last_offset=True),
        lambda e, i: e(i, torch.tensor([0, 3, i.numel()])),
        [(numbers(7),)],
    ),
    "weighted": (
        lambda: bags(mode="sum"),
        lambda e, i, o, w: e(i, o, w.exp()),
        [(numbers(n), torch.tensor([0, 3]), torch.arange(n) / 9) for n in (7, 9, 12)],
    ),
    "half": (lambda: bags(mode="sum").bfloat16(), plainly, [(numbers(n), torch.tensor([0, 3])) for n in (7, 9)]),
    "one row": (table, plainly, [(torch.tensor(3),)]),
    "no rows": (lambda: table(padding_idx=3), plainly, [(torch.tensor([3, 3]),)]),
    "computed": (table, lambda e, i: e(i[:, 1:] * 2 % 10), [(numbers(n, 5),) for n in (3, 4, 6)]),
}


def trained(module, call, batches):
    """Take a step for each batch, with two backwards; return losses, gradients and parameters."""
    optimizers = [torch.optim.SparseAdam([module.table.weight]), torch.optim.SGD(module.layer.parameters(), lr=0.1)]
    if module.table.weight.dtype == torch.bfloat16:  # which that one does not take
        optimizers[0] = torch.optim.SGD([module.table.weight], lr=0.1)
    found = []
    for batch in batches:
        for _ in range(2):
            loss = call(*batch)
            loss.backward()
            found.append((loss.detach(), *[described(p.grad) for p in module.parameters()]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found, [p.detach().clone() for p in module.parameters()]


BACKENDS = ["eager", pytest.param("inductor", marks=pytest.mark.tier("full"))]


@pytest.mark.parametrize("by", BACKENDS)
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("name", LOOKUPS)
def test_training(name, frontend, by):
    """Gradients and steps equal eager's bit for bit on the eager backend, and gradients are sparse tensors."""
    torch.compiler.reset()
    make, call, batches = LOOKUPS[name]
    mine, wanted = Net(make, call), Net(make, call)
    compiled = aotlab.compile(mine, backend=by, frontend=frontend)
    rtol = 0 if by == "eager" else 2e-2 if name == "half" else 1e-4
    ours, theirs = trained(mine, compiled, batches), trained(wanted, wanted, batches)
    assert theirs[0][0][1][3] == (10, 4)
    assert same(ours, theirs, rtol=rtol)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", LOOKUPS)
def test_sizes(name, dynamic):
    """The number of rows is dynamic: the second entry serves all numbers, or the first if ``dynamic=True``."""
    make, call, batches = LOOKUPS[name]
    mine, wanted = Net(make, call), Net(make, call)
    compiled = aotlab.compile(mine, backend="eager", dynamic=dynamic)
    assert same(trained(mine, compiled, batches), trained(wanted, wanted, batches))
    entries = min(len(batches), 1 if dynamic else 2)
    assert len(compiled.compiled.entries) == (len(batches) if name == "computed" else entries)


ROWS = torch.tensor([[1, 2, 2], [0, 3, 9]])


def _asked_for(compiled):
    e = table(padding_idx=0)
    return torch.autograd.grad(compiled(lambda i: e(i).tanh().sum())(ROWS), [e.weight])


def _of_two(compiled):
    one, two = table(), table(padding_idx=3)
    a, b = compiled(lambda i: (one(i).tanh().sum(), two(i).sin().sum()))(ROWS)
    b.backward(retain_graph=True)
    found = [one.weight.grad, described(two.weight.grad)]
    a.backward()
    b.backward()
    return [*found, one.weight.grad, two.weight.grad]


def _hooked(compiled):
    e, seen = table(), []
    e.weight.register_hook(lambda g: seen.append(described(g)) or g * 2)
    e.weight.register_post_accumulate_grad_hook(lambda p: seen.append(described(p.grad)))
    compiled(lambda i: e(i).tanh().sum())(ROWS).backward()
    return seen


def _checkpointed(compiled):
    e, w = table(padding_idx=2), nn.Parameter(torch.ones(4))

    def part(i):
        return e(i[torch.tensor([1, 0])]) * w * ((i != 7) * i).sum()

    compiled(lambda i: checkpoint(part, i, use_reentrant=False).sum())(ROWS).backward()
    return [e.weight.grad, w.grad]


def _run_again_by_the_lookup(compiled):
    e = table(padding_idx=2)
    result = compiled(lambda i: checkpoint(lambda j: e(j[torch.tensor([1, 0])]), i, use_reentrant=False))(ROWS)
    result.backward(torch.linspace(0, 1, 24).view(2, 3, 4))
    return [e.weight.grad]


def _with_a_batch_norm(compiled):
    e, norm = table(), nn.BatchNorm1d(4)
    result = compiled(lambda i: checkpoint(lambda j: norm(e(j)), i, use_reentrant=False).pow(3).sum())(numbers(7))
    result.backward(retain_graph=True)
    result.backward()
    return [e.weight.grad, norm.weight.grad, *norm.buffers()]


def _weights(compiled):
    e, w = bags(mode="sum"), torch.linspace(0, 1, 6).view(2, 3).requires_grad_()
    compiled(lambda i, w: e(i, per_sample_weights=w).tanh().sum())(ROWS, w).backward()
    return [e.weight.grad, w.grad]


def _argument(compiled):
    w = table().weight
    result = compiled(lambda d, w: functional.embedding(d["i"][0], w, sparse=True))({"i": [ROWS]}, w=w)
    result.backward(torch.linspace(0, 1, 24).view(2, 3, 4))
    return [w.grad]


def _penalty(compiled):
    e, x = table(padding_idx=2), torch.linspace(0, 1, 24).view(2, 3, 4).requires_grad_()
    result = compiled(lambda i, x: (e(i) * x).tanh().sum())(ROWS, x)
    (gradient,) = torch.autograd.grad(result, x, create_graph=True)
    (gradient**2).sum().backward()
    return [e.weight.grad, x.grad]


def _with_a_graph(compiled):
    e = table()
    return torch.autograd.grad(compiled(lambda i: e(i).tanh().sum())(ROWS), [e.weight], create_graph=True)


def _far(compiled):
    w, i = nn.Parameter(torch.zeros(2**24 + 2, 1)), torch.tensor([2**24 + 1, 2**24, 0])
    compiled(lambda i: functional.embedding(i, w, sparse=True).sin().sum())(i).backward()
    return [w.grad]


def _frozen(compiled):
    e, other, layer = table().requires_grad_(False), table(), nn.Linear(4, 2)
    nn.init.ones_(layer.weight)

    def function(i):
        with torch.no_grad():
            rows = other(i)
        return (layer(e(i) + rows)).sin().sum()

    compiled(function)(ROWS).backward()
    return [layer.weight.grad, e.weight.grad, other.weight.grad]


@pytest.mark.parametrize(
    "program",
    [
        *(
            _asked_for,
            _of_two,
            _hooked,
            _checkpointed,
            _run_again_by_the_lookup,
            _with_a_batch_norm,
            _weights,
            _argument,
            _penalty,
            _far,
            _frozen,
        ),
        pytest.param(_with_a_graph, marks=pytest.mark.filterwarnings("ignore")),
    ],
)
def test_gradients(program):
    """Sparse gradients through other uses of a weight are eager's."""
    made = []

    def compiled(function):
        made.append(aotlab.compile(function, backend="eager"))
        return made[-1]

    ours, theirs = (
        [described(g) if isinstance(g, torch.Tensor) else g for g in program(by)] for by in (compiled, lambda f: f)
    )
    assert same(ours, theirs)
    assert made[0].calls.compiled == 1


def test_by_aot_function():
    """`aot_function` gives eager's sparse gradients too."""
    mine, wanted = table(padding_idx=2), table(padding_idx=2)
    compiled = aotlab.aot_function(lambda w, i: functional.embedding(i, w, 2, sparse=True).sin(), aotlab.nop)
    compiled(mine.weight, ROWS).sum().backward()
    wanted(ROWS).sin().sum().backward()
    assert same(described(mine.weight.grad), described(wanted.weight.grad))


def test_differentiated():
    """A second derivative through a sparse gradient is refused."""
    e = table()
    (gradient,) = torch.autograd.grad(aotlab.compile(e, backend="eager")(ROWS).sin().sum(), e.weight, create_graph=True)
    with pytest.raises(SubclassError, match="call the original function"):
        gradient.to_dense().square().sum().backward()


def _left(what):
    e = table(max_norm=1.0) if what == "max_norm" else table()
    flat = nn.Parameter(torch.linspace(0, 1, 40))
    function = {
        "twice": lambda i: (e(i) * e(i + 0)).sum(),
        "tied": lambda i: functional.linear(e(i).tanh(), e.weight).sum(),
        "a dense gradient alone": lambda i: functional.linear(e(i).detach(), e.weight).sum(),
        "max_norm": lambda i: e(i).sum(),
        "a view": lambda i: functional.embedding(i, flat.view(10, 4), sparse=True).sum(),
        "gather": lambda i: flat.gather(0, i[0], sparse_grad=True).sum(),
    }[what]
    return function, flat if what in ("a view", "gather") else e.weight


MORE = "the gradient of a weight is sparse, and is more than the gradient of one lookup: "
LEFT = {
    "twice": f"{MORE}the weight is looked up twice, at .*; use sparse=False",
    "tied": f"{MORE}`aten.add.Tensor` computes with it, at .*; use sparse=False",
    "a dense gradient alone": "a gradient of `e.weight` is a `Tensor`",
    "max_norm": "the function increases the version counter of `e.weight`",
    "a view": f"{MORE}`aten.view.default` computes with it",
    "gather": ".* makes a tensor of the layout torch.sparse_coo",
}


@pytest.mark.parametrize("what", LEFT)
def test_left_to_eager(what, monkeypatch):
    """A gradient that is not simply the gradient of an argument runs eagerly, and the notice says why."""
    monkeypatch.setattr(aotlab.config, "fallback", "eager")
    (function, mine), (plain, wanted) = _left(what), _left(what)
    compiled = aotlab.compile(function, backend="eager")
    with pytest.warns(RuntimeWarning, match=f"runs eagerly: {LEFT[what]}"):
        result = compiled(ROWS)
    results = []
    for loss, weight in ((result, mine), (plain(ROWS), wanted)):
        try:
            loss.backward()
            results.append(described(weight.grad))
        except RuntimeError as error:
            results.append(str(error))
    assert same(*results)
    assert compiled.calls.eager == 1


def test_a_report():
    """The report shows the parts of a sparse gradient, which the backward returns."""
    e = table(padding_idx=2)
    with aotlab.Report.record() as report:
        aotlab.compile(lambda i: e(i).sin().sum(), backend="eager")(ROWS).backward()
    assert "1 call, 1 compiled, 0 eager" in str(report)
    rows = report.report().inputs.fillna({"part_of": "", "gradient": ""})
    assert rows["name"].tolist() == ["e.weight", "e.weight.grad", "e.weight.grad.places", "e.weight.grad.rows", "i"]
    assert rows["gradient"].astype(bool).tolist() == [False, False, True, True, False]
