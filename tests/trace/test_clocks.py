"""A function that reads the clock runs eagerly, and other code reads the clock as before."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from aotlab.capture.signals import RunEagerly
from aotlab.trace.surroundings import clocks_watched
from tests.engine_helpers import behind, compiled


def test_each_call_has_its_own_time() -> None:
    """Two calls see different times, and the notice says why nothing was compiled."""

    def function(x: Tensor) -> Tensor:
        return x + time.perf_counter()

    candidate = compiled(function)
    x = torch.zeros((), dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match=r"runs eagerly: `time\.perf_counter` returns another time"):
        first = candidate(x)
    assert first < candidate(x)
    assert behind(candidate).calls.eager == 2


def test_the_clocks_are_put_back() -> None:
    """The clock functions are restored after the trace and after an error, and libraries may read the clock inside."""
    before = time.time, time.monotonic_ns
    with clocks_watched():
        torch.ones(1).tolist()
        assert eval("time.time() > 0", {"__name__": "logging", "time": time})
        with pytest.raises(RunEagerly, match=r"`time\.time`"):
            time.time()
    with pytest.raises(ValueError, match="mine"), clocks_watched():
        raise ValueError("mine")
    assert before == (time.time, time.monotonic_ns)
