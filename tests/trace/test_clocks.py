"""A function that reads the clock is run by eager, and everybody else reads it as before."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from aotlab.capture.signals import RunEagerly
from aotlab.trace.surroundings import clocks_watched
from tests.engine_helpers import behind, compiled


def test_each_call_has_its_own_time() -> None:
    """Of two calls the later one sees a later time, and it is said why nothing was compiled."""

    def function(x: Tensor) -> Tensor:
        return x + time.perf_counter()

    candidate = compiled(function)
    x = torch.zeros((), dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match=r"runs eagerly: it reads the clock by `time\.perf_counter`"):
        first = candidate(x)
    assert first < candidate(x)
    assert behind(candidate).calls.eager == 2


def test_the_clocks_are_put_back() -> None:
    """After the block, and where it raises, they are the functions that they were; libraries may read them inside."""
    before = time.time, time.monotonic_ns
    with clocks_watched():
        torch.ones(1).tolist()
        assert eval("time.time() > 0", {"__name__": "logging", "time": time})
        with pytest.raises(RunEagerly, match=r"`time\.time`"):
            time.time()
    with pytest.raises(ValueError, match="mine"), clocks_watched():
        raise ValueError("mine")
    assert before == (time.time, time.monotonic_ns)
