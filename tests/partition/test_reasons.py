"""The reason why each value is saved and not recomputed: a ban, or the edge of the cut."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional

import aotlab
from aotlab.partition.min_cut import in_bytes
from tests.engine_helpers import compiled, leaf, nonleaf, record
from tests.partition.test_min_cut import partition


def reasons(function, *args, by=None):
    """Map the names of saved values to the reasons."""
    f = compiled(function, partitioner=by or partition(1.0))
    f(*args)
    return {value.name: value.reason for value in record(f, "partition").saved}


def test_the_cut_edge():
    """The reason compares the bytes that saving moves with the bytes that recomputing moves."""
    found = reasons(lambda x, w: (x @ w).sin(), leaf(4, 4), leaf(4, 4))
    assert re.search(
        r"`mm`; the backward needs it for `cos`; saving it moves 128 bytes, computing it again, as a product, \d+ "
        r"bytes$",
        found["mm"],
    ), found["mm"]


def test_what_would_be_computed_again_with_it():
    """The reason shows the cost of recomputing a whole chain, which is higher than the cost of saving its end."""
    found = reasons(lambda x: (x * 2).cumsum(0).sum(-1).sin(), leaf(10, 20))
    assert found["sum_1"].endswith(
        "saving it moves 80 bytes, computing it again, as an op that reads all of its inputs, 4.046 KiB, with "
        "`cumsum` and `mul` computed again, with `primals_1_as_it_was` saved for it"
    )


def test_a_random_op():
    """The result of a random op, and an item of its results, must not be computed twice."""
    x = leaf(20)
    found = reasons(lambda x: x * torch.rand_like(x), x)
    assert "`aten.rand_like.default` must not run twice: it would draw other random numbers" in found["rand_like"]
    found = reasons(lambda x: functional.dropout(x.sin()), x)
    assert found["ne"].endswith(
        "computing it again, as a pointwise op, needs `bernoulli`, which is not saved either: `aten.bernoulli.p` must "
        "not run twice: it would draw other random numbers"
    )


def test_a_copy_and_what_the_caller_can_reach():
    """At the full budget, the backward recomputes from a copy; an output that the backward uses is saved itself."""
    found = reasons(lambda x, scale: ((x + 1) * scale).exp().sin().sum(), leaf(64, 4), leaf(4))
    assert found["primals_2_as_it_was"].startswith("a copy of `scale`, which the caller may write;")
    assert found["primals_2_as_it_was"].endswith("again from this copy must not see the caller's writes")
    found = reasons(lambda x: ((y := x * 2), (y * y).sin()), leaf(4), by=partition(0.0))
    assert found["mul"].startswith("an output; the backward needs it for ")
    assert found["mul"].endswith("the caller can write it, and eager saves it too")


def test_inputs():
    """The reason for an input names the input and gives no costs."""
    found = reasons(lambda x, w: x * w, nonleaf(3), leaf(3))
    assert found["primals_1"] == "the input `x`; the backward needs it for `mul_1`"


def test_memory_that_would_be_held_instead():
    """Below the full budget memory matters too: larger values are not saved."""
    args = [leaf(1000), leaf(10)]

    def f(x, w):
        return (x.sum() * w).sin().sum() + (x * 2).sin().sum()

    for budget in (0.7, 0.3, 0.0):
        for reason in reasons(f, *args, by=partition(budget)).values():
            assert "were chosen before" not in reason


def test_the_default_partitioner():
    """The default partitioner gives the reason that it recomputes nothing."""
    found = reasons(lambda x: x.exp().sin().sin(), leaf(3), by=aotlab.default_partition)
    assert found["exp"] == (
        "computed by `exp`; the backward needs it for `cos_1`, `mul_2`; this partitioner recomputes nothing"
    )


@pytest.mark.parametrize("budget", [1.0, 0.5, 0.0])
def test_every_kept_value_has_a_line_bytes_and_a_reason(budget):
    """In a whole model, at any budget, each saved value has a line, its bytes and a reason.

    No reason names a recomputation that would cost less than saving the value.
    """
    model = torch.nn.Sequential(
        *(
            layer
            for _ in range(3)
            for layer in (torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Dropout(0.2))
        )
    )
    f = compiled(model, partitioner=partition(budget))
    f(leaf(16, 8))
    saved = record(f, "partition").saved
    assert saved
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20}
    for value in saved:
        assert value.reason
        if value.is_input:
            continue
        assert value.nbytes > 0
        assert value.line is not None
        figures = re.search(r"saving it moves ([\d.]+) (\w+), computing .* ([\d.]+) (bytes|KiB|MiB)\b", value.reason)
        if figures is None:
            assert "must not run twice" in value.reason
        elif "but that would hold" not in value.reason:
            keep, again = (float(figures[n]) * units[figures[n + 1]] for n in (1, 3))
            assert again >= keep


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5 * 2**40, "5120 GiB")]
)
def test_bytes_in_words(count, text):
    """Bytes are printed in units of 1024."""
    assert in_bytes(count) == text
