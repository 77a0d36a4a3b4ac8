"""Random programs whose callers take higher-order derivatives: results are eager's, or an error says why not.

Hundreds more are run with ``AOTLAB_RANDOM_DERIVATIVES=3000 pytest tests/derivatives/test_random_derivatives.py``.
"""

from __future__ import annotations

import functools
import os
import warnings

import pytest
import torch

import aotlab
from aotlab.errors import DoubleBackwardError, OutputError, RefusedError
from tests.derivatives.random_derivatives import Program, derivatives, drawn
from tests.engine_helpers import compiled

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

min_cut = aotlab.min_cut_rematerialization_partition
WAYS = {
    "directly": compiled,
    "min_cut": functools.partial(compiled, partitioner=min_cut),
    "a budget of 0.3": functools.partial(compiled, partitioner=functools.partial(min_cut, memory_budget=0.3)),
    "behind Dynamo": functools.partial(compiled, frontend="dynamo"),
}
COUNT = int(os.environ.get("AOTLAB_RANDOM_DERIVATIVES", "0"))


@pytest.fixture(autouse=True)
def in_float64():
    """Compute in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def outcome(function, program):
    """Return the derivatives, or the error."""
    try:
        return derivatives(function, program)
    except (RuntimeError, RefusedError) as error:
        return error


def may_be_refused(error: Exception, way: str) -> bool:
    """Tell whether README says that such a thing is refused."""
    if isinstance(error, DoubleBackwardError):
        said = "that Dynamo captured" if way == "behind Dynamo" else "did not save"
        return way != "directly" and said in str(error)
    # rematerialization from a tensor that was written since the forward raises
    written = "modified by an inplace operation" in str(error)
    return isinstance(error, OutputError) or (written and way == "a budget of 0.3")


def difference(program: Program, way: str) -> str | None:
    """Compare two calls with eager.

    Return a description of the difference, or "" if they agree or the call was refused.
    """
    expected = outcome(program.function(), program)
    call = WAYS[way](program.function())
    for _ in range(2):
        found = outcome(call, program)
        if isinstance(found, Exception) and may_be_refused(found, way):
            return ""
        if isinstance(expected, Exception) or isinstance(found, Exception):
            if isinstance(expected, Exception) and isinstance(found, Exception):
                continue
            if way == "behind Dynamo" and isinstance(expected, Exception):
                continue  # Dynamo drops unused saved tensors of a custom Function
            return f"eager: {expected}\nours: {found}"
        if len(expected) != len(found):
            return f"{len(found)} things came, in eager {len(expected)}"
        for (name, theirs), (_, ours) in zip(expected, found, strict=True):
            if (theirs is None) != (ours is None):
                return f"{name} is {ours}, in eager {theirs}"
            if theirs is not None and not torch.allclose(theirs, ours, rtol=1e-8, atol=1e-10, equal_nan=True):
                return f"{name} is {ours}, in eager {theirs}"
    return None


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("writes_arguments", [False, True], ids=["", "arguments written"])
@pytest.mark.parametrize("way", WAYS)
def test_random_derivatives(way, writes_arguments):
    """No result differs from eager's, and few programs are refused."""
    count = COUNT or (25 if way == "behind Dynamo" else 50)
    refused = 0
    for seed in range(count):
        program = drawn(seed + 100_000 * list(WAYS).index(way), writes_arguments=writes_arguments)
        if way == "behind Dynamo":
            torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notices of eager runs
            found = difference(program, way)
        assert not found, f"seed {program.seed}, {way}: {found}\n{program}\n{program.source}"
        refused += found == ""
    # behind Dynamo those by way of a custom Function are errors, too
    assert refused <= (0.3 if way == "behind Dynamo" else 0.2) * count
