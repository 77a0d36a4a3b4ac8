"""Recurrent nets on packed sequences, whose sizes are the values of their lengths."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import aotlab

FULL = pytest.param("inductor", marks=pytest.mark.tier("full"))


class Net(nn.Module):
    """Packs its padded input, or takes packed input if ``packed``."""

    def __init__(self, kind, *, packed):
        """Make the layers."""
        super().__init__()
        torch.manual_seed(0)
        self.net = kind(4, 3, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3)
        self.layer = nn.Linear(6, 2)
        self.packed = packed

    def forward(self, x, lengths=None):
        """Return a loss and the net's output for each sequence."""
        if not self.packed:
            x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, state = self.net(x)
        padded, _ = pad_packed_sequence(output, batch_first=True)
        state = state[0] if isinstance(state, tuple) else state
        return self.layer(padded).tanh().sum() + state.square().sum(), padded


def train(module, call):
    """Take some steps, with other lengths in each."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    found = []
    for step, lengths in enumerate([[2, 5, 3], [5, 1, 2, 3], [4, 4, 1], [2, 5, 3]]):
        torch.manual_seed(step)
        given = [torch.randn(len(lengths), 5, 4), torch.tensor(lengths)]
        if module.packed:
            given = [pack_padded_sequence(*given, batch_first=True, enforce_sorted=False)]
        loss, padded = call(*given)
        loss.backward()
        found += [loss.detach(), padded.detach(), *(each.grad for each in module.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:.* runs eagerly")
@pytest.mark.parametrize("by", ["eager", FULL])
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("packed", [False, True], ids=["packs", "is given packed"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_training(kind, packed, frontend, by):
    """Losses, outputs and gradients are eager's, by whatever part of it is compiled."""
    torch.compiler.reset()
    module, expected = Net(kind, packed=packed), Net(kind, packed=packed)
    found = train(module, aotlab.compile(module, backend=by, frontend=frontend))
    rounding = 0 if by == "eager" else 1e-5
    torch.testing.assert_close(found, train(expected, expected), rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    ("packed", "why"),
    [(False, "the size of the result of `_pack_padded_sequence`"), (True, "`zeros` takes its size from the values")],
)
def test_the_direct_frontend_leaves_it_to_dynamo(packed, why):
    """Sizes that are values are no trace's."""
    module = Net(nn.GRU, packed=packed)
    f = aotlab.compile(module, backend="eager")
    with pytest.warns(RuntimeWarning, match=f"`Net` is captured by Dynamo: .*{why}.*test_packed_sequences.py"):
        train(module, f)
    assert (f.compiled.calls.by_dynamo, f.compiled.calls.eager) == (4, 0)


class Tagger(nn.Module):
    """Layers before and behind a net on packed sequences."""

    def __init__(self, kind):
        """Make the layers."""
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 4)
        self.before = nn.Linear(4, 4)
        self.net = kind(4, 4, batch_first=True)
        self.behind = nn.Linear(4, 10)

    def forward(self, words, lengths):
        """Return how likely each word is in each place."""
        x = self.before(self.embedding(words)).tanh()
        x, _ = self.net(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        x, _ = pad_packed_sequence(x, batch_first=True)
        return self.behind(x.relu()).log_softmax(-1)


@pytest.mark.parametrize("by", ["eager", FULL])
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_what_is_around_it_is_compiled(kind, by):
    """The layers before and behind are a graph each, for all lengths; the net itself runs by eager's kernels."""
    torch.compiler.reset()
    found = []
    module, expected = Tagger(kind), Tagger(kind)
    with aotlab.Report.record() as report:
        for call, trained in ((aotlab.compile(module, backend=by, frontend="dynamo"), module), (expected, expected)):
            for step, lengths in enumerate([[2, 5, 3], [5, 1, 2], [4, 4, 1], [2, 6, 3]]):
                torch.manual_seed(step)
                words = torch.randint(10, (3, 6))
                call(words, torch.tensor(lengths)).square().mean().backward()
            found.append([each.grad for each in trained.parameters()])
    rounding = 0 if by == "eager" else 1e-5
    torch.testing.assert_close(*found, rtol=rounding, atol=rounding)
    assert report.calls["compiled"].tolist() == [True] * 8
    assert report.calls["frame"].nunique() == 2
    assert "aten.embedding.default" in report.nodes["target"].tolist()
