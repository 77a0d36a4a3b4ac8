"""Code that Dynamo left to Python without a graph: the recording gives Dynamo's reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aotlab

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore")]


def positive(x):
    """Choose by a tensor's values."""
    rows = x[x[:, 0] > 0]
    return rows.sum() if rows.sum() > 0 else rows


def sparse(x):
    """Multiply."""
    return torch.sparse.mm(x, torch.ones(3, 2))


CALLS = {
    "LSTM": (nn.LSTM(3, 4), lambda: torch.randn(2, 1, 3), "Dynamo captures no LSTM, GRU or RNN"),
    "sparse": (sparse, lambda: torch.eye(3).to_sparse(), "Dynamo takes no sparse tensors"),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_was_compiled(name):
    """The first line says why, and so does the table of graph breaks."""
    function, argument, why = CALLS[name]
    with aotlab.Report.record() as report:
        aotlab.compile(function, backend="eager", frontend="dynamo")(argument())
    assert report.verdict.startswith("Nothing was compiled: Dynamo handed over nothing")
    assert why in report.verdict
    assert report.graph_breaks["reason"].str.contains(why).sum() == 1


def test_a_break_between_two_graphs_is_told_once():
    """By the graph that follows it."""
    with aotlab.Report.record() as report:
        aotlab.compile(positive, backend="eager", frontend="dynamo")(torch.ones(4, 3))
    assert len(report.graph_breaks) == 1
    assert "branch" in report.graph_breaks["reason"][0]
    assert report.graph_breaks["frame"][0]


def test_a_limit_that_was_reached_is_told():
    """Calls past the limit run eagerly, and Dynamo logs only the first."""

    def function(x, mode):
        return x.sin() if mode != "a" else x.cos()

    compiled = aotlab.compile(function, backend="eager", frontend="dynamo")
    with aotlab.Report.record() as report:
        for mode in range(torch._dynamo.config.recompile_limit + 2):
            compiled(torch.ones(3), str(mode))
    assert "Dynamo's recompile limit is reached" in report.verdict
    assert "their number is unknown" in report.verdict
    assert "torch._dynamo.config.recompile_limit" in report.verdict


def test_what_dynamo_said_before_is_not_repeated():
    """A recording has its own reasons only."""
    aotlab.compile(sparse, backend="eager", frontend="dynamo")(torch.eye(3).to_sparse())
    with aotlab.Report.record() as report:
        aotlab.compile(torch.sin, backend="eager")(torch.ones(2))
    assert len(report.graph_breaks) == 0
