"""Memory budgets of modules: what each keeps, that it obeys its budget, and that the rest stays as it was."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import fx, nn

import aotlab
from aotlab.errors import UsageError
from aotlab.ir.graphs import output_args
from aotlab.partition.min_cut import min_cut_rematerialization_partition
from aotlab.partition.regions import Budgets, module_stack
from tests.engine_helpers import compiled, leaf, record, same
from tests.partition.test_min_cut import Block

PARTS = ("embed", "layers.0", "layers.1", "layers.2", "layers.3", "head")


class Model(nn.Module):
    """A small transformer: a layer before the blocks, four blocks, and a head."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(width, width), nn.GELU())
        self.layers = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3), nn.Tanh())

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().sum()


@pytest.fixture(scope="module")
def model():
    """Make one model for all tests."""
    torch.manual_seed(0)
    return Model()


def by(**settings):
    """Make a partitioner with these settings."""
    return functools.partial(min_cut_rematerialization_partition, **settings)


def kept(function, x, settings, frontend="direct"):
    """Count the bytes that each part of the model keeps, inputs and outputs left out."""
    forwards = []

    def partitioner(*args, **kwargs):
        forward, backward = min_cut_rematerialization_partition(*args, **kwargs, **settings)
        forwards.append((forward, kwargs["num_fwd_outputs"]))
        return forward, backward

    compiled(function, partitioner=partitioner, frontend=frontend)(x)
    ((forward, count),) = forwards
    found: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
    for node in output_args(forward.graph)[count:]:
        if node.op != "placeholder" and node not in output_args(forward.graph)[:count]:
            paths = [path.partition(".")[2] for path, _ in module_stack(node)]
            part = next((path for path in paths if path in PARTS), "")
            found[part] += node.meta["val"].untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("name", ["layers.2", "head"])
def test_a_region_obeys_its_budget_and_the_others_stay(model, name, frontend):
    """Its bytes fall with its budget, within the budget; every other part keeps to the byte what it kept."""
    torch.compiler.reset()
    x = leaf(2, 5, 8)
    full = kept(model, x, {}, frontend)
    assert full[name] > 0
    budgets = (1.0, 0.8, 0.5, 0.2, 0.0)
    amounts = [kept(model, x, {"region_budgets": {name: budget}}, frontend) for budget in budgets]
    own = [amount.pop(name) for amount in amounts]
    assert own[0] == full.pop(name)
    assert own == sorted(own, reverse=True)
    assert own[-1] == 0
    for budget, nbytes in zip(budgets, own, strict=True):
        assert nbytes <= budget * own[0]
    assert all(amount == full for amount in amounts)


def test_a_name_for_several_modules_is_one_region(model):
    """``layers.*`` are all blocks, and they share their budget; a later entry takes one of them out."""
    x = leaf(2, 5, 8)
    full = kept(model, x, {})
    blocks = [name for name in PARTS if name.startswith("layers")]
    half = kept(model, x, {"region_budgets": {"layers.*": 0.5}})
    assert 0 < sum(half[name] for name in blocks) <= sum(full[name] for name in blocks) / 2
    assert (half["embed"], half["head"]) == (full["embed"], full["head"])
    but_one = kept(model, x, {"region_budgets": {"layers.*": 0.0, "layers.1": 1.0}})
    assert [but_one[name] for name in blocks] == [0, full["layers.1"], 0, 0]
    other_order = kept(model, x, {"region_budgets": {"layers.1": 1.0, "layers.*": 0.0}})
    assert [other_order[name] for name in blocks] == [0, 0, 0, 0]


def test_the_rest_has_the_memory_budget(model):
    """``memory_budget`` is for what is in no region, which may be everything but one module."""
    found = kept(model, leaf(2, 5, 8), {"memory_budget": 0.0, "region_budgets": {"layers.3": 1.0}})
    assert [name for name in PARTS if found[name]] == ["layers.3"]


def test_a_class_names_its_modules(model):
    """Subclasses too; the inner of two modules around an op counts."""
    x = leaf(2, 5, 8)
    assert sum(kept(model, x, {"region_budgets": {nn.Module: 0.0}}).values()) == 0
    found = kept(model, x, {"region_budgets": {Block: 0.0, nn.LayerNorm: 1.0}})
    full = kept(model, x, {})
    assert all(0 < found[name] < full[name] / 4 for name in PARTS if name.startswith("layers"))
    assert found["embed"] == full["embed"]


def test_a_region_may_have_more_than_the_rest(model):
    """All budgets lie between the same ends: a region at 1 keeps what it keeps where everything is at 1."""
    x = leaf(2, 5, 8)
    found = kept(model, x, {"memory_budget": 0.3, "region_budgets": {"layers.0": 1.0}})
    assert found["layers.0"] == kept(model, x, {})["layers.0"]


@pytest.mark.parametrize(
    "settings",
    [
        {"region_budgets": {"layers.*": 0.0}},
        {"region_budgets": {"layers.1": 0.0, "head": 0.5}},
        {"region_budgets": {"layers.0": 0.0, "layers.1": 0.2, "layers.2": 0.7, nn.LayerNorm: 0.0}},
        {"memory_budget": 0.0, "region_budgets": {"layers.2": 1.0}},
        {"memory_budget": 0.2, "region_budgets": {"embed": 0.9, Block: 0.1}},
    ],
)
def test_results_are_eagers(model, settings):
    """Bit for bit, whatever is computed again where."""
    same(model, leaf(2, 5, 8), make=lambda f: compiled(f, partitioner=by(**settings)))


def test_random_ops_in_regions():
    """Dropout is not drawn again in a region without memory."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU()))
    torch.manual_seed(0)
    same(model, leaf(4, 8), make=lambda f: compiled(f, partitioner=by(region_budgets={"2": 0.0})))
    same(model, leaf(4, 8), make=lambda f: compiled(f, partitioner=by(region_budgets={"*": 0.0})))


def test_never_more_than_without_regions(model):
    """Neither in total, in any mixture."""
    x = leaf(2, 5, 8)
    most = sum(kept(model, x, {}).values())
    for first in (0.0, 0.4, 1.0):
        for second in (0.0, 0.6):
            settings = {"region_budgets": {"layers.0": first, "layers.2": second, "head": first}}
            assert sum(kept(model, x, settings).values()) <= most


def test_marks_of_torchs_own():
    """Behind Dynamo `torch.autograd.graph.region_activation_memory_budget` marks a region, of a part of a graph too."""
    mark = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
    if mark is None:
        pytest.skip("this torch has no such marks")
    torch.compiler.reset()

    def f(x, w):
        x = (x @ w).sin()
        with mark(0.0):
            x = (x @ w).sin() @ w
        return (x.sin() @ w).sum()

    found = {}

    def partitioner(*args, **kwargs):
        forward, backward = min_cut_rematerialization_partition(*args, **kwargs)
        saved = output_args(forward.graph)[kwargs["num_fwd_outputs"] :]
        found["lines"] = [aotlab.ir.graphs.line_of(node).code for node in saved if node.op != "placeholder"]
        return forward, backward

    compiled(f, partitioner=partitioner, frontend="dynamo")(leaf(4, 4), leaf(4, 4, seed=1))
    assert found["lines"]
    assert not [line for line in found["lines"] if line == "x = (x @ w).sin() @ w"]
    assert "x = (x @ w).sin()" in found["lines"]


def test_a_function_that_calls_a_model(model):
    """Behind Dynamo the path begins with the model's name, which may be left out."""
    torch.compiler.reset()

    def step(x):
        return model(x) * 2

    x = leaf(2, 5, 8)
    one = kept(step, x, {"region_budgets": {"layers.*": 0.0}}, "dynamo")
    torch.compiler.reset()
    other = kept(step, x, {"region_budgets": {"model.layers.*": 0.0}}, "dynamo")
    assert one == other
    assert [one[name] for name in PARTS if name.startswith("layers")] == [0] * 4
    assert one["head"] > 0


def test_names_that_name_nothing(model):
    """A warning says which modules there are."""
    with pytest.warns(
        UserWarning, match=r"region_budgets\['layer.0'\] names no module of this graph, which has `self`"
    ):
        kept(model, leaf(2, 5, 8), {"region_budgets": {"layer.0": 0.0}})
    with pytest.warns(UserWarning, match=r"region_budgets\[Conv2d\] names no module"):
        kept(model, leaf(2, 5, 8), {"region_budgets": {nn.Conv2d: 0.0}})
    with pytest.warns(UserWarning, match="which says of no op by which module it was made"):
        compiled(lambda x: x.sin().sum(), partitioner=by(region_budgets={"a": 0.0}))(leaf(2))


@pytest.mark.parametrize("budget", [-0.1, 1.5, float("nan"), "half", None, True])
def test_budgets_that_mean_nothing(model, budget):
    """The error names the region."""
    with pytest.raises(UsageError, match=r"region_budgets\['head'\] is a number from 0 \(least memory\) to 1"):
        compiled(model, partitioner=by(region_budgets={"head": budget}))(leaf(2, 5, 8))


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("layers.*", "self.layers.0", True),
        ("layers.*", "self.layers", False),
        ("layers.*", "self.layers.0.mlp", False),
        ("*.layers.0", "model.layers.0", True),
        ("layers.?", "self.layers.11", False),
        ("self", "self", True),
        ("0", "self.layers.0", False),
    ],
)
def test_patterns(pattern, path, matches):
    """``*`` is one name; a path is known with its first name and without."""
    node = fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"1": (path, nn.Linear)}
    assert Budgets(1.0, {pattern: 0.5}).of(node) == (0.5 if matches else 1.0)


def test_module_stacks_on_both_halves(model):
    """Ops of the backward are in the module of the op that they differentiate; the module class is as it was."""
    call = nn.Module._call_impl
    f = compiled(model)
    f(leaf(2, 5, 8)).backward()
    assert nn.Module._call_impl is call
    graph = record(f, "trace").module.graph
    stacks = {
        (node.meta["phase"], module_stack(node)[-1][0])
        for node in graph.nodes
        if node.op == "call_function" and module_stack(node)
    }
    for phase in ("forward", "backward"):
        assert {(phase, "self.layers.1.norms.0"), (phase, "self.head.2"), (phase, "self.layers.3")} <= stacks
    assert all(module_stack(node) for node in graph.nodes if node.op == "call_function")


def test_module_calls_are_put_back_after_errors():
    """Also when a module raises in the trace; what other threads call meanwhile is not written down."""
    call = nn.Module._call_impl

    class Raising(nn.Module):
        def forward(self, x):
            raise KeyError("no")

    with pytest.raises(KeyError):
        compiled(nn.Sequential(nn.Linear(2, 2), Raising()))(leaf(2))
    assert nn.Module._call_impl is call
