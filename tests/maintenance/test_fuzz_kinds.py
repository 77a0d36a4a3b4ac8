"""The fuzzer draws sizes and numbers from values, draws in place, backwards that write, and storages that are freed."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from aotlab.maintenance.fuzz import failures
from aotlab.maintenance.fuzz.drawing import draw
from aotlab.maintenance.fuzz.engines import Watch
from aotlab.maintenance.fuzz.plan import Plan
from aotlab.verification.programs import run_program, shrink
from aotlab.verification.programs.defined import NotDefinedError, OnlyDefined
from aotlab.verification.programs.prelude import helpers

PLAN = Plan(seed=9)
KINDS = {
    "a part by a mask": r" = \w+\[\w+ > 0\]",
    "a write by a mask": r"\w+\[\w+ > 0\] \*= 2",
    "nonzero": r"nonzero\(",
    "masked_select": r"masked_select\(",
    "unique": r"unique\(",
    "item as a size": r"leading\(",
    "experts": r"routed\(",
    "repeat_interleave": r"repeat_interleave\(torch",
    "a counter": r"state\.steps \+= 1",
    "a counter in a dictionary": r"state\.counts\[.n.\] \+= 2",
    "arithmetic with a counter": r"mul_\(state\.steps\)|add_\(state\.counts",
    "a list of numbers": r"state\.history\.append",
    "draws in place": r"(uniform|normal|bernoulli|random)_\(",
    "draws in place out of order": r"(t\(\)|transpose\(.*\))\.(uniform|random)_\(",
    "a backward that draws": r"Noisy\.apply",
    "a backward that writes an argument": r"Logged\.apply",
    "a backward that writes its gradient": r"Overwrites\.apply",
    "requires_grad_": r"\.requires_grad_\(\)",
    "a storage freed and allocated": r"gathered\(",
    "other strides in place": r"\.(t|transpose|swapaxes|as_strided)_\(",
    "other sizes in place": r"\.(un)?squeeze_\(",
}


@pytest.fixture(scope="module")
def drawn():
    """Draw some programs, once for this file."""
    return [draw(PLAN, 0, index).program for index in range(1200)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_drawn_and_right(kind, drawn):
    """Some programs of each kind are drawn. They equal themselves, and the first of them is right in the engine."""
    programs = [program for program in drawn if re.search(KINDS[kind], "\n".join(program.body))][:3]
    assert len(programs) == 3
    assert {run_program(program, lambda function: function).status for program in programs} == {"ok"}
    assert failures.run(PLAN, programs[0])[0].differences == ()


def test_numbers_in_state_begin_anew(drawn):
    """The numbers have other values in each call, are returned, and shrinking keeps the line that sets them."""
    program = next(each for each in drawn if "state." in "".join(each.body) and len(each.setups) == 3)
    assert [setup.lines[-1] for setup in program.setups] == [f"state.restart({n})" for n in (1, 2, 3)]
    assert "state.steps" in program.result
    small = shrink(program, lambda each: "state." in "".join(each.body))
    assert [setup.lines[-1] for setup in small.setups] == ["state.restart(1)"]
    unused = next(each for each in drawn if "state." not in "".join(each.body))
    assert "state" not in unused.source


def test_memory_is_safe():
    """A storage is freed only for a tensor that fills it, and no tensor is large."""
    gathered, x = helpers()["gathered"], torch.ones(3, 4)
    with OnlyDefined():
        gathered(x.t())
        for part in (x[:2], torch.ones(3).expand(2, 3)):
            with pytest.raises(NotDefinedError, match="other memory of a freed storage"):
                gathered(part)
        with pytest.raises(NotDefinedError, match="a large tensor"):
            x.repeat(1000, 1)
    assert x.tolist() == [[1.0] * 4] * 3


def test_calls_after_one_that_raised_are_counted():
    """An entry whose first call raised may run the next call. `fuzz --dynamo --seed 111` raised KeyError there."""
    part = SimpleNamespace(calls=SimpleNamespace(per_entry={}, eager=0))

    def function(x):
        part.calls.per_entry[3] = part.calls.per_entry.get(3, 0) + 1
        return 1 / x

    watch = Watch()
    call = watch._watched(function, lambda: [part])
    with pytest.raises(ZeroDivisionError):
        call(0)
    assert call(1) == 1
    assert (watch.served.calls, watch.served.others) == (2, 0)
