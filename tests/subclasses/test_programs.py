"""Random programs over wrappers and tensors agree with eager."""

from __future__ import annotations

import warnings

import pytest
import torch

import aotlab
from aotlab.errors import SubclassError
from tests.subclasses.kinds import aliases, parts, same, tensors
from tests.subclasses.programs import program


def outcome(call, make):
    """Call a program; return its exception's type, or its results, arguments and gradients."""
    arguments = make()
    try:
        results = call(*arguments)
    except Exception as error:  # noqa: BLE001  # whatever eager raises
        return type(error)
    outs = [each for each in tensors(results) if each.requires_grad]
    try:
        if outs:
            sum((n + 1) * each.sum() for n, each in enumerate(outs)).backward()
    except Exception as error:  # noqa: BLE001
        return results, arguments, type(error)
    return results, arguments, [each.grad if each.is_leaf else None for each in arguments]


def near(one, other):
    """Tell whether gradients are of one kind, with the same values up to the order of sums."""
    if one is None or other is None or isinstance(one, type):
        return one is other
    (kind, mine), (wanted, theirs) = parts(one), parts(other)
    return kind == wanted and all(map(torch.allclose, mine, theirs))


@pytest.mark.tier("full")
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("block", range(20))
def test_beside_eager(block, dynamic, monkeypatch):
    """Results equal eager bit for bit, as do arguments, shared memory and gradients; eager runs have a notice."""
    monkeypatch.setattr(aotlab.config, "fallback", "eager")
    compiled = 0
    for seed in range(10 * block, 10 * block + 10):
        function, make, text = program(seed)
        call = aotlab.compile(function, backend="eager", dynamic=dynamic)
        for _ in range(2):
            wanted = outcome(function, make)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = outcome(call, make)
            if isinstance(wanted, type):
                assert found is wanted, text
                break
            assert same(found[:2], wanted[:2], versions=False), text
            assert aliases(*map(tensors, found[:2])) == aliases(*map(tensors, wanted[:2])), text
            if found[2] is SubclassError:  # gradients of several kinds are summed up outside
                continue
            if isinstance(wanted[2], type):
                assert isinstance(found[2], type), text
            else:
                assert all(map(near, found[2], wanted[2])), text
        compiled += call.calls.eager == 0
    assert compiled >= 4
