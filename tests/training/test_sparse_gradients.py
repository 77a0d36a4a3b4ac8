"""Sparse gradients, which no graph returns: the function runs eagerly, and trains as in eager."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aotlab

KINDS = {"embedding": nn.Embedding, "bag": nn.EmbeddingBag}


class Net(nn.Module):
    """A sparse embedding before a layer, which is dense."""

    def __init__(self, kind, sparse):
        """Make the layers."""
        super().__init__()
        torch.manual_seed(0)
        self.embedding = KINDS[kind](10, 4, sparse=sparse)
        self.layer = nn.Linear(4, 2)

    def forward(self, index):
        """Return a loss."""
        return self.layer(self.embedding(index)).tanh().sum()


def train(module, call, sparse=True):
    """Take some steps, with batches of two sizes."""
    of_embedding = torch.optim.SparseAdam if sparse else torch.optim.Adam
    optimizers = [of_embedding(module.embedding.parameters()), torch.optim.Adam(module.layer.parameters())]
    found = []
    for step in range(4):
        loss = call(torch.randint(10, (3 + step % 2, 5), generator=torch.Generator().manual_seed(step)))
        loss.backward()
        gradient = module.embedding.weight.grad
        assert gradient.is_sparse == sparse
        found += [loss.item(), gradient.to_dense().tolist()]
        if sparse:
            found += [gradient._indices().tolist(), gradient._values().tolist(), gradient.is_coalesced()]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found, [each.tolist() for each in module.parameters()]


@pytest.mark.parametrize("by", ["eager", pytest.param("inductor", marks=pytest.mark.tier("full"))])
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_gradients(kind, frontend, by):
    """Eager runs it whole, with a notice, and all is eager's bit for bit."""
    torch.compiler.reset()
    module, expected = Net(kind, sparse=True), Net(kind, sparse=True)
    f = aotlab.compile(module, backend=by, frontend=frontend)
    with pytest.warns(RuntimeWarning, match=r"runs eagerly: a gradient is sparse, as with `sparse=True`"):
        found = train(module, f)
    assert train(expected, expected) == found


@pytest.mark.parametrize("kind", KINDS)
def test_dense_gradients(kind):
    """What the notice says: without it the same is compiled."""
    module, expected = Net(kind, sparse=False), Net(kind, sparse=False)
    f = aotlab.compile(module, backend="eager")
    assert train(expected, expected, sparse=False) == train(module, f, sparse=False)
    assert f.compiled.calls.eager == 0
