"""The rematerializing partitioner: it saves and recomputes the expected values, and changes nothing else."""

from __future__ import annotations

import copy
import functools
import inspect
import random
import sys

import networkx
import pytest
import torch
from torch import nn
from torch.nn import functional

import aotlab
from aotlab.errors import UsageError
from aotlab.ir.fx_graphs import output_args
from aotlab.partition.choice import Network
from aotlab.partition.joint_analysis import caller_reachable, with_copies
from aotlab.partition.min_cut import min_cut_rematerialization_partition
from tests.engine_helpers import compiled, leaf, nonleaf, record, same, targets, traced

BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)


def partition(budget=1.0):
    """Make the partitioner of a memory budget."""
    return functools.partial(min_cut_rematerialization_partition, memory_budget=budget)


def split(function, *args, by=min_cut_rematerialization_partition):
    """Trace a function's joint graph and split it; return the partition's record."""
    f = compiled(function, partitioner=by)
    f(*args)
    return record(f, "partition")


def held(partition_record):
    """Return the bytes that are saved for the backward, without inputs and outputs, which are alive in any case."""
    return sum(value.nbytes for value in partition_record.saved if not (value.is_input or value.is_output))


class Block(nn.Module):
    """A transformer block without dropout."""

    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


MODELS = {
    "mlp": lambda: (nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(8, 8), nn.ReLU()))), leaf(4, 8)),
    "transformer": lambda: (nn.Sequential(*(Block(8) for _ in range(4))), leaf(2, 5, 8)),
    "convolutions": lambda: (
        nn.Sequential(*(m for _ in range(4) for m in (nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.SiLU()))),
        leaf(2, 3, 12, 12),
    ),
    "pointwise": lambda: (lambda x: (x.cos().exp().sin() * x).tanh().log1p(), leaf(20)),
}


@pytest.mark.parametrize("seed", range(40))
def test_minimum_cuts_are_those_of_networkx(seed):
    """A minimum cut has networkx's cost and separates source and sink; among several, it is the closest to the sink."""
    draw = random.Random(seed)
    count = draw.randint(2, 12)
    network, reference, capacities = Network(), networkx.DiGraph(), []
    reference.add_nodes_from(range(count))
    for _ in range(count - 2):
        network.node()
    for _ in range(draw.randint(1, 50)):
        start, end = draw.sample(range(count), 2)
        if not reference.has_edge(start, end):
            capacity = draw.randint(0, 9)
            reference.add_edge(start, end, capacity=capacity)
            assert network.edge(start, end) == len(capacities)
            capacities.append(capacity)
    late = {node for node, is_late in enumerate(network.late_cut(capacities)) if is_late}
    cost = sum(d["capacity"] for start, end, d in reference.edges(data=True) if start not in late and end in late)
    assert cost == networkx.minimum_cut_value(reference, 0, 1)
    assert network.late_cut(capacities) == network.late_cut(capacities)
    assert (0 in late, 1 in late) == (False, True)


def test_of_two_cheapest_cuts_the_later_one():
    """A chain of equal edges is cut at its end: later values are saved if they cost no more."""
    network = Network()
    middle = network.node()
    network.edge(network.source, middle)
    network.edge(middle, network.sink)
    assert network.late_cut([5, 5]) == [False, True, False]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", MODELS)
def test_results_are_eagers(name, budget):
    """Values and gradients equal eager's bit for bit, whatever is recomputed."""
    function, x = MODELS[name]()
    same(function, x, make=lambda f: compiled(f, partitioner=partition(budget)))


@pytest.mark.parametrize("name", MODELS)
def test_less_memory_for_more_ops_with_a_falling_budget(name):
    """With a smaller budget the forward saves fewer bytes, down to inputs and a small rest.

    The backward's op count does not fall, and no budget saves more than the default partitioner.
    """
    function, x = MODELS[name]()
    records = [split(function, x, by=partition(budget)) for budget in BUDGETS]
    kept = [held(each) for each in records]
    most = held(split(function, x, by=aotlab.default_partition))
    assert kept == sorted(kept, reverse=True)
    assert kept[0] <= most
    assert kept[-1] <= most / 20
    for budget, nbytes in zip(BUDGETS, kept, strict=True):
        assert nbytes <= kept[-1] + budget * (kept[0] - kept[-1]) * 1.05
    ops = [sum(node.op == "call_function" for node in each.backward.graph.nodes) for each in records]
    assert ops == sorted(ops)


def test_pointwise_ops_are_computed_again():
    """Of a chain of pointwise ops only the start is saved; the default saves the values that each derivative uses."""
    f = lambda x: (x + 1).cos().exp().sin()  # noqa: E731
    ours, default = split(f, leaf(50)), split(f, leaf(50), by=aotlab.default_partition)
    assert [value.name for value in ours.saved] == ["add"]
    assert [value.name for value in default.saved] == ["add", "exp"]
    assert {"aten.cos.default", "aten.exp.default"} <= set(targets(ours.backward))


def test_products_are_not_computed_again_unless_memory_is_short():
    """A matrix product runs once at the full budget; at none, it runs again."""
    f = lambda x, w, v: ((x @ w).sin() @ v).sin()  # noqa: E731
    args = leaf(8, 8), leaf(8, 8), leaf(8, 8)
    products = [targets(split(f, *args, by=partition(b)).backward).count("aten.mm.default") for b in (1.0, 0.0)]
    assert products == [4, 6]


def test_random_ops_are_not_computed_again():
    """Dropout's mask is saved at every budget, because a second draw would give another mask."""
    f = lambda x: functional.dropout(x.sin(), 0.5).exp()  # noqa: E731
    for budget in BUDGETS:
        found = split(f, leaf(20), by=partition(budget))
        assert "aten.native_dropout.default" not in targets(found.backward)
        torch.manual_seed(0)
        same(f, leaf(20), make=lambda g, b=budget: compiled(g, partitioner=partition(b)))


def test_a_value_that_is_cheaper_kept_than_its_inputs():
    """A sum is saved instead of the larger tensor from which it could be recomputed."""
    found = split(lambda x, y: (x * y).sum(0).exp(), leaf(100, 4), leaf(100, 4))
    assert all(value.nbytes <= 16 for value in found.saved if not value.is_input)


def test_equal_expressions_are_computed_once():
    """Equal expressions are computed and saved once; ops whose arguments differ as `1` and `True` stay separate."""

    def f(x, w):
        return (x @ w).exp() * (x @ w).sin() + (x + 1) * (x + 1)

    found = split(f, leaf(4, 4), leaf(4, 4))
    assert targets(found.forward).count("aten.mm.default") == 1
    assert targets(found.forward).count("aten.add.Tensor") == 2
    same(f, leaf(4, 4), leaf(4, 4), make=lambda g: compiled(g, partitioner=partition()))


def test_equal_results_stay_apart():
    """Two results of one expression share no memory with each other, and neither do their views."""

    def f(x):
        return x + 1, x + 1, (x * 2).view(-1), (x * 2).view(-1)

    same(f, leaf(2, 3), make=lambda g: compiled(g, partitioner=partition()))


@pytest.mark.parametrize("backward", ["all", "first", "each", "reversed"])
@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_backwards_from_some_of_the_outputs(backward, budget):
    """A backward from one output uses the values that were saved for all outputs, also for equal expressions."""

    def f(x, w):
        h = (x @ w).sin()
        return h.exp(), (h * x.sum()).cos(), (x @ w).sin().tanh()

    same(
        f, leaf(3, 3), leaf(3, 3, seed=1), backward=backward, make=lambda g: compiled(g, partitioner=partition(budget))
    )


@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_overwritten_inputs(budget):
    """If a saved input is overwritten, its old value, or a value computed from it, is saved."""

    def f(x, y):
        out = (x.clone() * y).sin()
        x.mul_(2)
        return out + x

    same(f, nonleaf(3), leaf(3, seed=1), make=lambda g: compiled(g, partitioner=partition(budget)))


def test_reasons():
    """The record explains for each saved value why it is not recomputed."""
    found = split(lambda x, w: functional.dropout((x @ w).sin()), leaf(4, 4), leaf(4, 4))
    reasons = {value.name: value.reason for value in found.saved if not value.is_input}
    assert "saving it moves 128 bytes, computing it again, as a product, " in reasons["mm"]
    assert any("must not run twice" in reason for reason in reasons.values())


def test_in_upstreams_function():
    """The partitioner also splits upstream's joint graph."""
    from functorch.compile import aot_function, nop

    def f(x, w):
        return (x @ w).sin().exp(), x * 2

    x, w, y, v = leaf(2, 3), leaf(3, 4), leaf(2, 3), leaf(3, 4)
    out = aot_function(f, nop, partition_fn=min_cut_rematerialization_partition)(x, w)
    (out[0].sum() + out[1].sum()).backward()
    (f(y, v)[0].sum() + f(y, v)[1].sum()).backward()
    assert (torch.equal(x.grad, y.grad), torch.equal(w.grad, v.grad)) == (True, True)


def test_signature_is_upstreams():
    """Every parameter of upstream's, of the same kind, before ours."""
    from functorch.compile import min_cut_rematerialization_partition as theirs

    ours = inspect.signature(min_cut_rematerialization_partition).parameters
    for name, parameter in inspect.signature(theirs).parameters.items():
        assert (name, ours[name].kind) == (name, parameter.kind)
    assert ours["memory_budget"].kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.parametrize("budget", [-0.1, 1.5, float("nan")])
def test_budgets_that_mean_nothing(budget):
    """A budget outside 0 to 1 is an error."""
    with pytest.raises(UsageError, match="memory_budget is a number from 0"):
        split(lambda x: x.sin(), leaf(2), by=partition(budget))


def test_the_parts_compute_what_the_whole_does():
    """The forward and then the backward compute the joint graph's results."""
    f = compiled(lambda x, w: ((x @ w).sin().exp(), x * 2), partitioner=partition(0.0))
    f(leaf(2, 3), leaf(3, 4))
    module, found = record(f, "trace").module, record(f, "partition")
    count = found.num_forward_outputs
    primals, tangents = (torch.randn(2, 3), torch.randn(3, 4)), (torch.randn(2, 4), torch.randn(2, 3))
    whole, out = module(*primals, *tangents), found.forward(*primals)
    gradients = found.backward(*out[count:], *tangents)
    assert len(output_args(found.forward.graph)) == len(out)
    assert all(torch.equal(a, b) for a, b in zip((*out[:count], *gradients), whole, strict=True))


def joint_of_mlp(layers):
    """Trace the joint graph of an MLP; it has one output."""
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(32, 32), nn.ReLU())))
    return record(traced(model, leaf(4, 32)), "trace").module


def calls_of(partitioner, module):
    """Count the calls of functions that a partitioner makes for a copy of a graph."""
    joint, count = copy.deepcopy(module), 0

    def note(_frame, event, _arg):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        partitioner(joint, None, num_fwd_outputs=1)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_its_work_is_nearly_linear(budget):
    """Four times the layers need about four times, and not sixteen times, the function calls."""
    small, large = (calls_of(partition(budget), joint_of_mlp(layers)) for layers in (40, 160))
    assert 3 * small < large < 6 * small


def _written(x):
    x.mul_(2)


def _written_uncounted(x):
    x.data.mul_(2)


@pytest.mark.parametrize("write", [_written, _written_uncounted])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x * 2).exp().sum() + w.sum(),
        lambda x, w: (x * w * 3).sin().sum(),
        lambda x, w: (x.view(2, 2) * w.view(2, 2) * 3).sin().sum(),
        lambda x, w: ((x + w).sigmoid() * x).sum(),
    ],
)
def test_what_is_computed_again_does_not_see_what_the_caller_writes(function, write):
    """Recomputed values do not change after the caller's writes: they are computed from the inputs' old values."""

    def gradients(call):
        x, w = leaf(4), leaf(4)
        y = call(function)(x, w)
        with torch.no_grad():
            write(x)
        try:
            y.backward()
        except RuntimeError as error:
            return str(error)[:90]  # the rest of the text has the sizes of the saved tensor, which may be a view
        return x.grad.tolist(), w.grad.tolist()

    found = gradients(lambda f: compiled(f, partitioner=min_cut_rematerialization_partition))
    assert found == gradients(lambda f: f)
    assert found == gradients(compiled)


def test_copies_are_made_where_they_are_smaller_than_what_they_spare():
    """An input is copied if the copy is smaller than the memory that it saves.

    Here a norm's scale is copied and its sum is not. Below the full budget there are no copies, because writes to
    inputs are errors.
    """
    f = lambda x, scale: ((x + 1) * scale).exp().sin().sum()  # noqa: E731
    x, scale = leaf(64, 4), leaf(4)
    saved = {value.name: value.reason for value in split(f, x, scale).saved}
    assert saved["primals_2_as_it_was"].startswith(
        "a copy of `scale`, which the caller may write; the backward needs it"
    )
    assert set(saved) == {"primals_2", "add", "primals_2_as_it_was"}
    assert "primals_2_as_it_was" not in {value.name for value in split(f, x, scale, by=partition(0.5)).saved}
    y = compiled(f, partitioner=partition(0.5))(x, scale)
    with torch.no_grad():
        scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_graphs_are_left_as_they_were():
    """The joint graph contains copies only while it is partitioned."""
    f = traced(lambda x, w: (x * w * 3).sin(), leaf(4), leaf(4))
    module = record(f, "trace").module
    before = str(module.graph)
    min_cut_rematerialization_partition(module, None, num_fwd_outputs=1)
    assert str(module.graph) == before


@pytest.mark.parametrize("breaks_at", [0, 1])
def test_graphs_are_left_as_they_were_by_an_error(breaks_at):
    """An error leaves the joint graph unchanged, even if it is raised at the second of several copies."""
    module = record(traced(lambda x, w: (x * w * 3).sin(), leaf(4), leaf(4)), "trace").module
    before = str(module.graph)
    asked = []

    def worth(node):
        asked.append(node)
        if len(asked) > breaks_at:
            raise KeyError(breaks_at)
        return True

    with pytest.raises(KeyError), with_copies(caller_reachable(module.graph, 1), worth):
        pytest.fail("the copies were made")
    assert str(module.graph) == before


def test_results_in_reach_are_kept_and_not_computed_again():
    """A caller's write to an output changes the gradient of an op that saves the output, as in eager."""

    def gradients(call):
        x = leaf(4)
        y, z = call(lambda x: ((y := x * 2), y * y))(x)
        y.data.mul_(2)
        z.sum().backward()
        return x.grad.tolist()

    assert gradients(lambda f: compiled(f, partitioner=partition(0))) == gradients(lambda f: f)
