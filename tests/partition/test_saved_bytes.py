"""The memory that a compiled forward keeps for its backward, compared with eager's.

The rematerializing partitioner never keeps more than the default partitioner, and neither keeps more than eager.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional

import aotlab
from aotlab._torch import pytree, storage_key
from aotlab.bench.memory import kept_by_eager
from aotlab.partition.default import default_partition
from tests.engine_helpers import behind, compiled, leaf, record
from tests.partition.random_training_programs import drawn
from tests.partition.test_min_cut import MODELS, partition

BUDGETS = (1.0, 0.6, 0.3, 0.0)
DECOMPOSITIONS = pytest.mark.parametrize("decomposed", [False, True], ids=["as traced", "Inductor's decompositions"])


def storages(values):
    """Return the sizes of the storages of all tensors in ``values``."""
    tensors = [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def kept(function, args, partitioner, *, decomposed=False):
    """Count the bytes that a forward's graph returns for the backward, without inputs and outputs.

    Return None if the function ran eagerly, or if nothing is differentiated.
    """
    runs = []

    def forward_compiler(graph, _):
        def run(*values):
            runs.append((values, graph(*values)))
            return runs[-1][1]

        return run

    wrap = aotlab.aot_module if isinstance(function, nn.Module) else aotlab.aot_function
    table = select_decomp_table() if decomposed else None
    f = wrap(function, forward_compiler, lambda graph, _: graph, partition_fn=partitioner, decompositions=table)
    f(*args)
    entries = behind(f).entries
    if not entries or (found := entries[0].records.partition).backward is None:
        return None
    (values, returned), count = runs[0], found.num_forward_outputs
    free = storages((values, returned[:count]))
    return sum(nbytes for key, nbytes in storages(returned[count:]).items() if key not in free)


def check(function, args, decomposed):
    """Compare the bytes that all partitioners keep; return them, the default's first."""
    eager = kept_by_eager(function, *args)
    default = kept(function, args, default_partition, decomposed=decomposed)
    if default is None:
        return None
    ours = [kept(function, args, partition(budget), decomposed=decomposed) for budget in BUDGETS]
    assert default <= eager
    assert [default, *ours] == sorted([default, *ours], reverse=True)
    return [default, *ours]


@DECOMPOSITIONS
def test_random_programs(decomposed):
    """For sixty random programs, most of which leave a choice, the partitioners keep no more than they should."""
    found = [check(*drawn(seed), decomposed) for seed in range(60)]
    kept_something = [each for each in found if each is not None and each[0]]
    assert len(kept_something) > 30
    assert sum(each[1] < each[0] for each in kept_something) > 15
    assert sum(each[-1] < each[1] for each in kept_something) > 15


@DECOMPOSITIONS
@pytest.mark.parametrize("name", MODELS)
def test_models(name, decomposed):
    """At no budget does a model keep more memory than in eager."""
    assert check(*(lambda f, x: (f, (x,)))(*MODELS[name]()), decomposed)


def results(function, args, partitioner):
    """Call a compiled function and go back; return the results, all gradients, and the generator's state."""
    for argument in args:
        argument.grad = None
    torch.manual_seed(0)
    f = compiled(function, partitioner=partitioner)
    returned = f(*args)
    assert f.calls.compiled == 1
    sum(value.sum() for value in returned if value.requires_grad).backward()
    return [*returned, *(argument.grad for argument in args), torch.get_rng_state()]


@pytest.mark.parametrize(
    "first", [0, 30, *(pytest.param(first, marks=pytest.mark.tier("long")) for first in (10, 20, 40, 50))]
)
def test_random_programs_compute_the_same(first):
    """Results, gradients and random numbers equal the default partitioner's bit for bit, at any budget."""
    for seed in range(first, first + 10):
        function, args = drawn(seed)
        if any(value.requires_grad for value in function(*args)):
            expected = results(function, args, default_partition)
            for budget in BUDGETS:
                found = results(function, args, partition(budget))
                for a, b in zip(expected, found, strict=True):
                    message = f"program {seed} at {budget}: {function.__doc__}"
                    assert (a is None) == (b is None), message
                    if a is not None:
                        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True, msg=message)


def test_copies_never_cost_more_than_they_spare():
    """A choice that would need a copy is not made if the copy is larger than the memory that the default keeps.

    To recompute ``x[:, 0] * 3``, the backward needs a copy of ``x``.
    """

    def f(x, w):
        return (x.t()[0] * w.sum()).sin().sum()

    x, w = leaf(4, 100), leaf(3)
    assert kept(f, (x, w), partition(1.0)) <= kept(f, (x, w), default_partition)

    def sums(*xs):
        return sum((x * 3).sum(0).exp().sin().sum() for x in xs)

    args = [leaf(100, 4, seed=n) for n in range(5)]
    assert kept(sums, args, partition(1.0)) <= kept(sums, args, default_partition) <= kept_by_eager(sums, *args)


def test_a_choice_that_keeps_more_gives_way(monkeypatch):
    """If the fastest choice would keep more than the default partitioner, another choice is made.

    In this test copies cost no time.
    """
    from aotlab.partition import joint_analysis

    real = joint_analysis.cost_of

    def free_copies(node, **settings):
        cost = real(node, **settings)
        return cost if cost.kind != "a copy" else type(cost)(save=0, nbytes=cost.nbytes, recompute=None, kind=cost.kind)

    monkeypatch.setattr(joint_analysis, "cost_of", free_copies)

    def f(x, w):
        return (x[:, :1] * w).exp().sin().sum()

    x, w = leaf(50, 40), leaf(50, 1)
    assert kept(f, (x, w), partition(1.0)) <= kept(f, (x, w), default_partition)


def test_overwritten_inputs_count_as_clones():
    """Both partitioners save a clone of an input that the call overwrites."""

    def f(x, w):
        out = (x.clone() * w).sin()
        x.mul_(2)
        return out.sum()

    args = torch.ones(10), leaf(10)
    assert kept(f, args, partition(1.0)) <= kept(f, args, default_partition)


def test_equal_memory_counts_once():
    """Several saved parts of one result count as one piece of memory."""

    def f(x):
        a, b, c = (x * 2).chunk(3)
        return (a.sin() * b.sin() * c.sin()).sum()

    (x,) = args = (leaf(30),)
    assert kept(f, args, default_partition) <= kept_by_eager(f, x)
    assert kept(f, args, partition(0.5)) <= kept(f, args, partition(1.0)) <= kept(f, args, default_partition)


def test_an_expanded_tensor_is_saved_before_its_expansion():
    """Attention of grouped queries expands its keys. A compiler could return an expanded tensor in other memory."""

    def grouped(queries, keys):
        keys = keys.cumsum(0)[:, :, None].expand(2, 2, 2, 8, 4).reshape(2, 4, 8, 4)
        return functional.scaled_dot_product_attention(queries, keys, queries).sum()

    f = compiled(grouped, partitioner=partition(1.0))
    f(leaf(2, 4, 8, 4), leaf(2, 2, 8, 4)).backward()
    parts = record(f, "partition")
    assert "cumsum" in [saved.name for saved in parts.saved]
    forward = parts.forward.graph.output_node().args[0]
    assert not [node for node in forward if node is not None and 0 in node.meta["val"].stride()]


def test_budgets_are_met():
    """The kept memory lies within the budget between the minimum and the maximum, and uses most of it."""
    model = nn.Sequential(*(m for _ in range(20) for m in (nn.Linear(16, 16), nn.Tanh())))
    x = leaf(8, 16)
    amounts = {budget / 10: kept(model, (x,), partition(budget / 10)) for budget in range(11)}
    assert [*amounts.values()] == sorted(amounts.values())
    for budget, nbytes in amounts.items():
        assert nbytes <= amounts[0.0] + budget * (amounts[1.0] - amounts[0.0])
        assert nbytes >= amounts[0.0] + (budget - 0.1) * (amounts[1.0] - amounts[0.0])


def test_the_record_says_what_is_kept_in_truth():
    """The record has the saved bytes and the user's lines."""
    f = compiled(lambda x, w: functional.softmax(x @ w, -1).sum(0).sin(), partitioner=partition(1.0))
    f(leaf(20, 8), leaf(8, 30))
    for value in record(f, "partition").saved:
        if not value.is_input:
            assert value.nbytes == value.spec.storage_bytes or value.spec.storage is None
            assert value.line.code.startswith("f = compiled(lambda x, w: functional.softmax")
