"""Programs whose arguments are tensor subclasses: `aotlab fuzz --subclasses`."""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from aotlab.maintenance.fuzz.drawing import draw
from aotlab.maintenance.fuzz.plan import Plan
from aotlab.verification.programs.program import Program, Setup
from aotlab.verification.programs.running import run_program

PROGRAM = Program(
    parameters=("a", "b"),
    body=("a.mul_(b)",),
    result="a + 1",
    setups=(
        Setup(
            lines=(
                "a = numbers(1, 2, 3).requires_grad_() * 1",
                "b = numbers(2, 3)",
                "a_two, a = two(a)",
            ),
            arguments=("a", "b"),
            watched=("a_two",),
        ),
    ),
)


def test_arguments_are_wrapped():
    """All programs have wrapped arguments, some of them leaves and some not, and some plain arguments."""
    kinds = set()
    for index in range(12):
        program = draw(Plan(seed=1, subclasses=True), 0, index).program
        _, makers = program.build()
        tensors = [tensor for _, tensor in makers[0]().inputs]
        kinds |= {(isinstance(each, TwoTensor), each.is_leaf) for each in tensors}
        assert any(isinstance(each, TwoTensor) for each in tensors)
    assert len(kinds) == 4


def test_nothing_differs_of_eager_from_itself():
    """Parts, gradients and all."""
    assert run_program(PROGRAM, lambda function: function).status == "ok"


def _swapped(out, _a):
    return TwoTensor(out.b, out.a)


def _plain(out, _a):
    return out.a


def _written(out, a):
    with torch.no_grad():
        a.b.add_(1)
    return out


@pytest.mark.parametrize(
    ("change", "subject"),
    [(_swapped, "out.a"), (_plain, "out"), (_written, "a.b")],
    ids=["swapped", "plain", "written"],
)
def test_what_is_wrong_is_found(change, subject):
    """Parts in another order, a plain tensor in place of a wrapper, and a part that is written."""
    outcome = run_program(PROGRAM, lambda function: lambda a, b: change(function(a, b), a))
    assert outcome.status == "failed"
    assert subject in {each.subject for each in outcome.differences}
