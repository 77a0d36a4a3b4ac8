"""Exported graphs, compiled by Inductor's own entry, against eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table

import aotlab
from tests.test_export import Of, Tied, values_of


def classify(m, x, labels):
    """Compute a loss."""
    return nn.functional.cross_entropy(m.net(x), labels)


def convolution():
    """Make random layers."""
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), nn.Flatten(1)
    )
    return Of(lambda m, x: m.net(x).square().mean(), net=net)


#: name → (the module, its arguments by how many)
MODULES = {
    "an MLP with a batch norm": (
        lambda: Of(classify, net=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))),
        lambda n: (torch.randn(n, 6), torch.randint(0, 3, (n,))),
    ),
    "tied parameters": (Tied, lambda n: (torch.randint(0, 5, (n,)),)),
    "convolutions": (convolution, lambda n: (torch.randn(n, 2, 8, 8),)),
}


@pytest.mark.tier("full")
@pytest.mark.parametrize("joint", [False, True], ids=["forward", "joint"])
@pytest.mark.parametrize("name", MODULES)
def test_by_inductor(name, joint):
    """New values of buffers, the loss and gradients are eager's, for two sizes of one graph."""
    make, arguments = MODULES[name]
    module = make()
    graph, signature = aotlab.aot_export_module(
        module,
        arguments(4),
        trace_joint=joint,
        output_loss_index=0 if joint else None,
        dynamic_shapes=True,
        decompositions=select_decomp_table(),
    )
    fakes = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with tracing(TracingContext(fakes[0].fake_mode)):
        compiled = compile_fx_inner(graph, fakes)
    for count in 4, 7:
        eager, args = copy.deepcopy(module), arguments(count)
        found = list(compiled([*(t.detach().clone() for t in values_of(module).values()), *args]))
        loss = eager(*args)
        loss.backward()
        tensors = values_of(eager)
        expected = [*(tensors[each] for each in signature.buffers_to_mutate.values()), loss.detach()]
        if joint:
            expected += [tensors[each].grad for each in signature.backward_signature.gradients_to_parameters.values()]
        torch.testing.assert_close(found, expected)
