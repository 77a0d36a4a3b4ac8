"""Unused ops of the forward that may raise or draw are kept, or the call runs eagerly."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition

import aotlab
from tests.engine_helpers import compiled, leaf, record, same, targets

PARTITIONERS = [aotlab.default_partition, min_cut_rematerialization_partition]
PART = pytest.mark.parametrize("partitioner", PARTITIONERS, ids=["default", "min cut"])
GRAD = pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
BAD = torch.tensor([5])


def new_memory(x, i):
    """Index a tensor that the function allocated."""
    x.new_zeros(3)[i]
    return x.sin() * x


def embedding(x, i):
    """Look rows up."""
    torch.nn.functional.embedding(i, x.detach().reshape(3, 1))
    return x.sin() * x


def assertion(x, i):
    """Assert, which has no result at all."""
    torch._assert_async((i < 3).all())
    return x.sin() * x


def several(x, i):
    """Have two results, and go through a multi-output op."""
    torch.gather(torch.topk(x, 2)[0], 0, i)
    torch.take(x, i)
    return x.sin() * x


def called(function, x, i, backward):
    """Call and perhaps go back; return the type and text of the error, or None."""
    try:
        out = function(x, i)
        if backward:
            out.sum().backward()
    except Exception as error:  # noqa: BLE001  # whatever eager raises
        return type(error), str(error)
    return None


@PART
@GRAD
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("function", [new_memory, embedding, assertion, several])
def test_what_may_raise_stays(function, frontend, grad, partitioner):
    """An unused op that may raise is not removed: with a bad index the second call raises eager's error."""
    if frontend == "dynamo":
        torch.compiler.reset()
        stock = torch.compile(function, backend="eager")
        if called(stock, torch.ones(3), BAD, False) is None:
            pytest.skip("Dynamo itself leaves the op out of its graph")
        torch.compiler.reset()

    def x():
        return leaf(3) if grad else torch.arange(3.0)

    compiled_function = compiled(function, partitioner=partitioner, frontend=frontend)
    assert called(compiled_function, x(), torch.tensor([1]), grad) is None
    expected = called(function, x(), BAD, grad)
    assert expected is not None
    assert expected == called(compiled_function, x(), BAD, grad)


@PART
@GRAD
def test_what_draws_stays(grad, partitioner):
    """An unused random op is not removed, so that later draws are eager's."""

    def f(x):
        torch.rand_like(x)
        return x.sin() * x * torch.rand_like(x)

    eagerly = grad and partitioner is not aotlab.default_partition
    same(f, leaf(3) if grad else torch.ones(3), make=lambda f: compiled(f, partitioner=partitioner), eagerly=eagerly)


def test_they_are_in_the_forward():
    """Kept unused ops are in the forward and not in the backward."""
    f = compiled(several)
    f(leaf(3), torch.tensor([1]))
    part = record(f, "partition")
    assert {"aten.gather.default", "aten.take.default"} <= set(targets(part.forward))
    assert not {"aten.gather.default", "aten.take.default"} & set(targets(part.backward))


def test_partitioners_of_others_leave_them_out():
    """So eager runs the call, and says which op it is."""
    with pytest.warns(RuntimeWarning, match=r"the partitioner would drop `aten\.gather\.default`.*default_partition"):
        compiled(several, partitioner=min_cut_rematerialization_partition)(leaf(3), torch.tensor([1]))


def test_linalg_checks_stay():
    """Checks that return nothing are kept, in inference and in training."""
    for x in (torch.zeros(2, 2), torch.zeros(2, 2, requires_grad=True)):
        with pytest.raises(torch.linalg.LinAlgError):
            compiled(torch.linalg.inv)(x)
