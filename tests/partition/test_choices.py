"""Explicit choices of saved values, and the model of all choices, agree with the graphs that are then compiled."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import aotlab
from aotlab.errors import UsageError
from aotlab.partition.min_cut import min_cut_rematerialization_partition
from aotlab.report.model import Choices, Graph, Report
from tests.engine_helpers import leaf
from tests.partition.test_min_cut import MODELS


def in_place(x):
    """Write to views of a copy of the argument."""
    y = x * 1.0
    y.add_(1)
    z = y.t()
    z[0].mul_(2)
    return (z.sin() * y.t().cos()).exp()


class Overwriting(nn.Module):
    """A module that overwrites a buffer. The backward may compute values again from a clone of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.ones(1))

    def forward(self, x):
        factor = (self.state.expand(64) * 2).cos().exp()
        self.state.add_(1)
        return x * factor


def with_dropout():
    """Make a network with dropout."""
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Tanh()), leaf(4, 8)


PROGRAMS = {
    **MODELS,
    "dropout": with_dropout,
    "in place": lambda: (in_place, leaf(4, 4)),
    "overwriting": lambda: (Overwriting(), leaf(64)),
}


def graph_of(function, x, partitioner, seed=0) -> tuple[Graph, torch.Tensor, torch.Tensor]:
    """Compile and run a training step; return the report's graph, the result and the gradient."""
    compiled = aotlab.compile(function, backend="eager", partitioner=partitioner)
    torch.manual_seed(seed)
    x.grad = None
    with Report.record() as recording:
        out = compiled(x)
        out.backward(torch.ones_like(out))
    return recording.report().frames[0].graphs[0], out.detach(), x.grad


def names(choices: Choices, positions) -> set[str]:
    """Return the names of values that take memory if they are saved."""
    return {choices.names[n] for n in positions if choices.nbytes[n] > 0}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_model_agrees_with_the_graphs(program):
    """Each row of the memory budgets has the saved values and the peak of the graphs that this budget compiles."""
    function, x = PROGRAMS[program]()
    choices = graph_of(function, x, aotlab.default_partition)[0].choices
    assert choices is not None
    assert [row.current for row in choices.rows].count(True) == 1
    assert choices.rows[-1].current or choices.rows[-1].partitioner == "default"
    budgets = [row.budget for row in choices.rows if row.budget is not None]
    assert budgets == sorted(set(budgets))
    for row in choices.rows:
        by_budget = partial(min_cut_rematerialization_partition, memory_budget=row.budget)
        graph = graph_of(function, x, aotlab.default_partition if row.budget is None else by_budget)[0]
        assert graph.memory is not None
        assert (row.budget, max(graph.memory.totals())) == (row.budget, row.peak_bytes)
        assert names(choices, row.saved) <= {each.name for each in graph.saved}
        assert graph.choices is not None
        current = next(each for each in graph.choices.rows if each.current)
        assert (current.saved, current.recomputed) == (row.saved, row.recomputed)
        again = [node for node in graph.nodes if (node.stage, node.part) == ("partition", "backward")]
        again = [node for node in again if (node.op, node.phase, node.view) == ("call_function", "forward", False)]
        assert len(again) == row.recomputed


def test_choices_are_followed_bit_for_bit():
    """The values in `recompute` are not saved, those in `save` are, and results and gradients do not change."""
    function, x = with_dropout()
    graph, out, grad = graph_of(function, x, aotlab.default_partition)
    saved = {each.name for each in graph.saved if each.new_bytes}
    assert {"addmm", "ne"} <= saved
    chosen = partial(min_cut_rematerialization_partition, memory_budget=None, recompute=("addmm",))
    again, out_again, grad_again = graph_of(function, x, chosen)
    assert "addmm" not in {each.name for each in again.saved}
    assert "ne" in {each.name for each in again.saved}
    assert torch.equal(out, out_again)
    assert torch.equal(grad, grad_again)
    least = partial(min_cut_rematerialization_partition, memory_budget=0.0)
    assert "addmm" not in {each.name for each in graph_of(function, x, least)[0].saved}
    kept = graph_of(function, x, partial(least, save=("addmm", "a name of another graph")))[0]
    assert "option `save`" in next(each.reason for each in kept.saved if each.name == "addmm")


def test_a_random_op_is_not_computed_again():
    """A choice that would draw other random numbers in the backward is an error with the reason."""
    function, x = with_dropout()
    choices = graph_of(function, x, aotlab.default_partition)[0].choices
    assert choices is not None
    banned = [n for n, ban in enumerate(choices.bans) if ban >= 0 and "random" in choices.ban_table[ban]]
    assert banned
    for n in banned:
        chosen = partial(min_cut_rematerialization_partition, memory_budget=0.5, recompute=(choices.names[n],))
        with pytest.raises(UsageError, match="other random numbers"):
            aotlab.compile(function, backend="eager", partitioner=chosen)(x)


def test_the_backward_computes_values_again_late():
    """A backward for a tangent with unusual strides also computes each value again just before its use."""
    network, x = MODELS["transformer"]()
    chosen = partial(min_cut_rematerialization_partition, memory_budget=0.5)
    compiled = aotlab.compile(network, backend="eager", partitioner=chosen)
    with Report.record() as recording:
        compiled(x).sum().backward()  # the tangent is an expanded number
    graph = recording.report().frames[0].graphs[0]
    assert any(stage.name == "backward" for stage in graph.stages)
    nodes = [row for row in graph.nodes if (row.stage, row.op) == ("backward", "call_function")]
    products = [n for n, row in enumerate(nodes) if (row.phase, row.target) == ("forward", "aten.addmm.default")]
    backward_ops = [n for n, row in enumerate(nodes) if (row.phase, row.target) == ("backward", "aten.mm.default")]
    assert backward_ops[0] < products[0] < products[-1] < backward_ops[-1]
