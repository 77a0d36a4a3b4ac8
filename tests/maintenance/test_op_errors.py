"""Erroneous calls from torch's op database: if eager raises, ours raises too, even if the result is unused.

Fakes have no values and do not know which kernels there are; see `aotlab.trace.tape`.
"""

from __future__ import annotations

import pytest
import torch

from aotlab import _torch as internals
from aotlab.maintenance.op_database import Outcome, Variant, campaign, error_variants, judge_errors
from tests.engine_helpers import compiled, leaf, same

#: Compiled, with eager's errors where eager raises; or refused as other calls of that operator are.
RIGHT = (Outcome.EQUAL, Outcome.RAISES, Outcome.NOT_COMPARED)


@pytest.fixture(scope="module")
def by_entry() -> dict[str, Variant]:
    """Load torch's database once."""
    return {variant.entry: variant for variant in error_variants()}


def test_a_twelfth_of_the_operators(by_entry: dict[str, Variant]):
    """If eager refuses an erroneous call, or operands of other dtypes, ours does too, in inference and training."""
    results = [judge_errors(variant) for variant in list(by_entry.values())[:: campaign.STEP]]
    assert [(result.name, result.reason) for result in results if result.outcome not in RIGHT] == []
    assert sum(result.cases for result in results) > 300
    assert sum(result.cases - result.compiled for result in results) > 100


def test_a_missed_error_is_noticed(by_entry: dict[str, Variant], monkeypatch: pytest.MonkeyPatch):
    """If unused ops are not kept in the graph, the sweep names the call that eager refuses and its error."""
    monkeypatch.setattr(internals, "may_raise", lambda *_: False)
    broken = judge_errors(by_entry["mm"])
    assert broken.outcome is Outcome.DIFFERENT
    assert "tensor 0 as int64: eager gives RuntimeError: " in broken.reason
    assert "aotlab no error" in broken.reason


def test_each_operator_once(by_entry: dict[str, Variant]):
    """The names equal the names in the table and for ``--only``."""
    variants = error_variants()
    assert len(by_entry) == len(variants) > 500
    assert by_entry["matmul"].name == "matmul errors float32"


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_unused_results_that_raise(grad):
    """A product of two dtypes, and an index out of range: eager's error, in a training graph as well."""

    def product(a, mask):
        _ = a @ mask
        return a + 1

    def index(a, mask):
        v = a.detach() * 2
        v.index_fill_(0, torch.tensor([5]), 2)
        return a + 1

    a = leaf(2, 2) if grad else torch.ones(2, 2)
    for function, kind in ((product, RuntimeError), (index, IndexError)):
        messages = []
        for call in (function, compiled(function)):
            with pytest.raises(kind) as caught:
                call(a, torch.ones(2, 2, dtype=torch.bool))
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    same(lambda a, b: (a @ b, a + 1)[1], a, torch.ones(2, 2))
