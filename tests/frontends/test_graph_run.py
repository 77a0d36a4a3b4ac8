"""Runs of Dynamo's graphs: whatever happens in them, the modes are as the user's program would have left them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody writes it
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab.frontends.dynamo_frontend import backend
from aotlab.frontends.graph_run import GraphRun, needs_care
from tests.engine_helpers import keeping_graphs, leaf

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

BLOCKS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


def modes():
    """Return the modes that a graph can leave behind."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")


def graph_of(function, *args):
    """Let Dynamo capture one graph."""
    found = []

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(function, backend=keeping_graphs(found))(*args)
    return found[-1]


def inputs_of(graph, x, index):
    """Put a float and an integer argument into the order in which the graph takes them."""
    kinds = [node.meta["example_value"].dtype for node in graph.graph.nodes if node.op == "placeholder"]
    return [x if kind == x.dtype else index for kind in kinds]


@pytest.mark.parametrize("name", BLOCKS)
def test_modes_are_put_back_when_an_op_raises(name):
    """A graph that raises within a block leaves it, as Python would; grad mode included."""

    def f(x, index):
        with BLOCKS[name]():
            return (x * 2)[index]

    x = torch.ones(3)
    graph = graph_of(f, x, torch.tensor([1]))
    assert needs_care(graph.graph)
    inputs = inputs_of(graph, x, torch.tensor([7]))
    before = modes()
    with pytest.raises(IndexError) as caught:
        GraphRun(graph).run(*inputs)
    assert before == modes()  # while the error, whose frames hold what entered the mode, still lives
    del caught
    assert before == modes()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_graph_that_runs_eagerly_and_raises_leaves_no_mode(name):
    """The same through ``torch.compile``, where aotlab lets the graph run as Dynamo wrote it."""

    def f(x, index):
        with BLOCKS[name]():
            return (x * 2)[index]

    compiled = aotlab.compile(f, frontend="dynamo", backend="eager")
    before = modes()
    with aotlab.config.patch(enabled=False), pytest.raises(IndexError):
        compiled(torch.ones(3), torch.tensor([7]))
    assert before == modes()


def test_a_graph_without_modes_runs_as_it_is():
    """Only graphs that change modes are run node by node."""
    assert not needs_care(graph_of(lambda x: x.sin() + 1, torch.ones(2)).graph)


def test_a_trace_that_fails_within_inference_mode_leaves_no_trace_of_itself():
    """A context that a failed trace entered does not put torch back into the trace later."""

    def f(x, y):
        z = y * 2
        with torch.inference_mode():
            x.mul_(2)
            v = x.view(-1)
        return z, v.shape[0]

    compiled = aotlab.compile(f, frontend="dynamo", backend="eager")
    x, y = torch.ones(2, 2), leaf(3)
    before = modes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        z, size = compiled(x, y)
    assert before == modes()
    assert (x.tolist(), size) == ([[2.0, 2.0], [2.0, 2.0]], 4)
    assert torch.equal(z, y * 2)
    z.sum().backward()
    assert y.grad.tolist() == [2.0, 2.0, 2.0]


def test_nested_blocks_are_left_in_turn():
    """The innermost first: the modes around are restored in the order in which Python would leave the blocks."""

    def f(x, index):
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), torch.no_grad():
            with torch.autocast("cpu", dtype=torch.float16):
                y = x * 2
            return y[index]

    x = torch.ones(3)
    graph = graph_of(f, x, torch.tensor([1]))
    inputs = inputs_of(graph, x, torch.tensor([7]))
    before = modes(), torch.get_autocast_dtype("cpu")
    with pytest.raises(IndexError):
        GraphRun(graph).run(*inputs)
    assert before == (modes(), torch.get_autocast_dtype("cpu"))


def _masked(x, buffer):
    return checkpoint(lambda y: F.dropout(y.sin()), x, use_reentrant=False)


def _masked_in_masked(x, buffer):
    def outer(y):
        return F.dropout(checkpoint(lambda z: F.dropout(z.sin()), y, use_reentrant=False), 0.2)

    return checkpoint(outer, x, use_reentrant=False)


def _in_place(x, buffer):
    return checkpoint(lambda y: F.dropout(F.relu(y.sin(), inplace=True)), x, use_reentrant=False)


def _drawn_anew(x, buffer):
    return checkpoint(lambda y: F.dropout(y.sin()), x, use_reentrant=False, preserve_rng_state=False)


def _reentrant(x, buffer):
    return checkpoint(lambda y: F.dropout(y.sin()), x, use_reentrant=True)


def _nothing_random(x, buffer):
    return checkpoint(lambda y: y.sin().square(), x, use_reentrant=False)


def _by_values(x, buffer):
    return checkpoint(lambda y: torch.bernoulli(y.detach()) * y.sin(), x, use_reentrant=False)


COMPILED_CHECKPOINTS = (_masked, _masked_in_masked, _in_place, _nothing_random, _by_values)
CHECKPOINTS = (*COMPILED_CHECKPOINTS, _reentrant, _drawn_anew)


@pytest.mark.filterwarnings("ignore:.*eagerly")
@pytest.mark.parametrize("function", CHECKPOINTS, ids=lambda f: f.__name__)
def test_the_random_numbers_of_a_checkpoint_are_those_of_its_forward(function):
    """A checkpoint's backward draws the same random numbers as its forward.

    Dynamo's op would draw others. If eager's numbers cannot be compiled, the call runs eagerly.
    """
    torch.compiler.reset()
    made = []

    def keep(graph, inputs):
        made.append(backend(graph, inputs, options={"compiler": "eager"}))
        return made[-1]

    found = []
    for run in (function, torch.compile(function, backend=keep)):
        for call in range(2):
            x, buffer = torch.linspace(0.1, 1, 20).requires_grad_(), torch.zeros(20)
            torch.manual_seed(call)
            y = run(x, buffer)
            torch.manual_seed(call + 7)
            y.sum().backward()
            found.append((y.tolist(), x.grad.tolist(), buffer.tolist()))
    assert found[:2] == found[2:]
    if made:
        log = made[0].compiled.calls
        assert (log.compiled, log.eager) == ((2, 0) if function in COMPILED_CHECKPOINTS else (0, 2))


@pytest.mark.parametrize("dropout", [False, True])
def test_a_checkpoint_over_batch_statistics(dropout):
    """Its body writes the module's buffers, at the call and again in the backward; they are no arguments of it."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            parts = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), *([nn.Dropout()] if dropout else [])]
            self.body = nn.Sequential(*parts)

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False).sum()

    def train(compile_model):
        torch.manual_seed(0)
        model, x = Checkpointed(), torch.randn(8, 4)
        call = compile_model(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is left to eager
            losses = [call(x) for _ in range(2)]
            for loss in losses:
                loss.backward()
        gradients = [parameter.grad.tolist() for parameter in model.parameters()]
        return [loss.item() for loss in losses], gradients, [buffer.tolist() for buffer in model.buffers()]

    expected = train(lambda model: model)
    assert expected == train(lambda model: aotlab.compile(model, backend="eager", frontend="dynamo"))
