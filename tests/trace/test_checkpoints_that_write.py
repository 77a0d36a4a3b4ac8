"""Checkpoints that write buffers. Each backward reads the buffers' current values, and writes them again."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import aotlab
from aotlab.errors import DoubleBackwardError, MetadataMutationError, RefusedError
from tests.engine_helpers import behind, compiled, leaf, record


def checkpointed(function, *args):
    """Use checkpoint as everybody does."""
    return checkpoint(function, *args, use_reentrant=False)


class Buffers(nn.Module):
    """Runs ``body`` with two buffers, ``n`` and ``m``, and two parameters."""

    def __init__(self, body):
        """Make them."""
        super().__init__()
        self.register_buffer("n", torch.zeros(3))
        self.register_buffer("m", torch.ones(3))
        self.w, self.v = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 0.5))
        self.body = body

    def forward(self, x):
        """Run it."""
        return self.body(self, x)


def before_the_last_saved(s, x):
    """Compute with the buffer after writing it."""

    def inner(y):
        s.n.add_(1)
        return (y * s.w * s.n).sin()

    return checkpointed(inner, x).sum()


def behind_the_last_saved(s, x):
    """Write where the second run has stopped."""

    def inner(y):
        made = (y * s.w).sin()
        s.n.add_(1)
        return made

    return checkpointed(inner, x).sum()


def read_and_then_written(s, x):
    """Read the buffer, then write it after the point where the second run stops.

    The second run therefore reads the values that other forwards have left in the buffer.
    """

    def inner(y):
        made = (y * s.w * s.n.cos()).sin()
        with torch.no_grad():
            s.n.mul_(0.5).add_(y)
        return made

    return checkpointed(inner, x).sum()


def written_and_then_read(s, x):
    """Read in a checkpoint a buffer that was written before the checkpoint."""
    s.n.add_(1)
    return checkpointed(lambda y: (y * s.w * s.n.cos()).sin(), x).sum()


def one_behind_the_other(s, x):
    """Write a buffer in two checkpoints. Backwards run the second one first."""

    def first(y):
        s.n.mul_(2).add_(1)
        return (y * s.w * s.n).sin()

    def second(y):
        s.n.add_(s.m)
        s.m.add_(y.detach())
        return (y * s.v * s.n * s.m).sin()

    return checkpointed(second, checkpointed(first, x)).sum()


def one_beside_the_other(s, x):
    """Write a buffer in two checkpoints. A gradient may need only one of them."""

    def inner(w):
        def body(y):
            s.n.mul_(2).add_(1)
            return (y * w * s.n).sin()

        return body

    return (checkpointed(inner(s.w), x.detach()) + checkpointed(inner(s.v), x)).sum()


def nested(s, x):
    """Write in a checkpoint in a checkpoint, and around it."""

    def inner(y):
        s.n.add_(1)
        return (y * s.n).exp()

    def outer(y):
        s.m.mul_(0.5)
        y = checkpointed(inner, y * s.w)
        s.m.add_(1)
        return (y * s.m).sin()

    return checkpointed(outer, x).sum()


def by_views(s, x):
    """Write parts."""

    def inner(y):
        s.n[1:].add_(1)
        s.n[0] = y.detach().sum()
        return (y * s.w * s.n).sin()

    return checkpointed(inner, x).sum()


def unseen_by_versions(s, x):
    """Write by ``.data``, which counts nothing."""

    def inner(y):
        s.n.data.add_(1)
        return (y * s.w * s.n).sin()

    return checkpointed(inner, x).sum()


def with_draws(s, x):
    """Draw, too."""

    def inner(y):
        s.n.add_(1)
        return functional.dropout(y * s.w * s.n, 0.5).sin() * torch.rand(3)

    return checkpointed(inner, x).sum()


def written_around(s, x):
    """Write outside of the checkpoint as well, and return the buffer."""

    def inner(y):
        s.n.add_(1)
        return (y * s.w * s.n).sin()

    made = checkpointed(inner, x).sum()
    s.n.mul_(3)
    return made, s.n


def several_results(s, x):
    """Return several results: one is a checkpoint's result, and the others depend on it."""

    def inner(y):
        s.n.add_(1)
        return functional.dropout((y * s.w * s.n).sin() * s.v, 0.3)

    made = checkpointed(inner, x)
    return (made * s.v).exp().sum(), made, made.cos() * s.w


def several_checkpoints(s, x):
    """Write a buffer in each of two autograd nodes."""

    def first(y):
        s.n.mul_(2).add_(1)
        return (y * s.w * s.n).sin()

    def second(y):
        s.m.add_(y.detach())
        return (y * s.v * s.m).cos()

    made = checkpointed(first, x)
    return checkpointed(second, made).sum(), made


BODIES = [
    before_the_last_saved, behind_the_last_saved, read_and_then_written, written_and_then_read,
    one_behind_the_other, one_beside_the_other, nested, by_views,
    unseen_by_versions, with_draws, written_around, several_results, several_checkpoints,
]  # fmt: skip


def outcome(body, call):
    """Run two forwards before two backwards, more backwards of one, and backwards for some gradients alone."""
    module, found = Buffers(body), []
    function = call(module)

    def note(*values):
        held = [*values, module.n, module.m, module.w.grad, module.v.grad]
        found.append([None if value is None else value.tolist() for value in held])

    def run(x):
        result = function(x)
        return result[0] if isinstance(result, tuple) else result

    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(3, requires_grad=True)
        first, second = run(x), run(x + 1)
        note(first, second)
        for result, keep in ((first, True), (second, False), (first, False)):
            version = module.n._version
            result.backward(retain_graph=keep)
            note(x.grad, torch.tensor(module.n._version > version))
        for wanted in (module.w, module.v, x):
            note(*torch.autograd.grad(run(x), wanted, allow_unused=True))
        for result in pytree.tree_leaves(function(x)):
            if result.requires_grad:
                note(*torch.autograd.grad(result.sum(), (x, module.w), retain_graph=True, allow_unused=True))
        with torch.no_grad():
            note(run(x))
    return found


WAYS = {
    "direct": {"frontend": "direct"},
    "dynamo": {"frontend": "dynamo"},
    "min cut": {"frontend": "direct", "partitioner": aotlab.min_cut_rematerialization_partition},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", BODIES)
def test_buffers(body, way):
    """Results, gradients and buffers are eager's after each step, bit for bit."""
    torch.compiler.reset()
    functions = []

    def call(module):
        functions.append(compiled(module, **WAYS[way]))
        return functions[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = outcome(body, call)
    assert outcome(body, lambda module: module) == found
    if way != "dynamo":
        entries = 2  # with gradients, and without
        assert (behind(functions[0]).calls.eager, len(behind(functions[0]).entries)) == (0, entries)


class Convolutions(nn.Module):
    """Batch norms in checkpoints: one that is run twice, and one in a checkpoint within another one."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, momentum=0.3))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.end = nn.Linear(4, 2)

    def forward(self, x):
        """Return one number."""
        y = checkpointed(self.first, x)
        for _ in range(2):
            y = checkpointed(self.second, y).relu()
        y = checkpointed(lambda value: checkpointed(self.inner, value.tanh()).sigmoid(), y)
        return self.end(y.mean((2, 3))).square().mean()


def train(module, call, *, casts=False):
    """Accumulate gradients over two batches, three times in training and once in between in eval mode."""
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.1), []
    for step in range(4):
        torch.manual_seed(step)
        module.train(step != 1)
        with torch.autocast("cpu", enabled=casts):
            losses = [call(torch.randn(3, 2, 4, 4)) for _ in range(2)]
        for loss in losses:
            loss.backward()
        found += [each.detach().clone() for each in (*losses, *module.buffers())]
        found += [each.grad.clone() for each in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("by", "casts", "frontend"),
    [
        *(("eager", casts, frontend) for casts in (False, True) for frontend in ("direct", "dynamo")),
        pytest.param("inductor", False, "direct", marks=pytest.mark.tier("full")),
        pytest.param("inductor", False, "dynamo", marks=pytest.mark.tier("long")),
    ],
)
def test_batch_norms(by, frontend, casts):
    """The running statistics include each batch twice, as in eager."""
    torch.compiler.reset()
    module, expected = Convolutions(), Convolutions()
    f = aotlab.compile(module, backend=by, frontend=frontend)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = train(module, f, casts=casts)
    wanted = train(expected, expected, casts=casts)
    if by == "eager":
        assert [each.tolist() for each in found] == [each.tolist() for each in wanted]
    else:
        torch.testing.assert_close(found, wanted)
    assert [int(module.first[1].num_batches_tracked), int(module.second[1].num_batches_tracked)] == [12, 24]
    if frontend == "direct":
        assert (behind(f).calls.compiled, len(behind(f).entries)) == (8, 2)


def test_sizes_that_vary():
    """A second batch size makes the size dynamic."""

    def use(call, module):
        for size in (4, 5, 7):
            torch.manual_seed(size)
            call(torch.randn(size, 3)).square().sum().backward()
        return [each.tolist() for each in (*module.buffers(), *(p.grad for p in module.parameters()))]

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return checkpointed(self.norm, x)

    module, expected = Normed(), Normed()
    f = compiled(module, dynamic=None)
    assert use(expected, expected) == use(f, module)
    assert (behind(f).calls.compiled, len(behind(f).entries)) == (3, 2)


def test_how_far_a_second_run_goes():
    """The second run reads the early-stop setting at each call."""

    def use(call):
        module, found = Buffers(behind_the_last_saved), []
        function = call(module)
        for early in (True, False, True):
            with set_checkpoint_early_stop(early):
                loss = function(leaf(3))
            loss.backward()
            found.append(module.n.tolist())
        return found

    expected = use(lambda module: module)
    assert [each[0] for each in expected] == [1, 3, 4]
    assert use(lambda module: compiled(module)) == expected


def test_what_the_graphs_take_and_return():
    """The buffer is the backward's last input, after the tangents, and its new value is an output."""
    f = compiled(Buffers(before_the_last_saved))
    f(leaf(3)).backward()
    part = record(f, "partition")
    assert all("n" not in saved.name.split("_") for saved in part.saved)
    inputs = [node.name for node in part.backward.graph.nodes if node.op == "placeholder"]
    assert [name.rstrip("0123456789") for name in inputs[-2:]] == ["tangents_", "tangents_live_"]
    assert "live=[" in behind(f).entries[0].source


def kept_elsewhere(s, x):
    """Save the buffer outside the checkpoint by a node that does not check versions."""
    made = checkpointed(lambda y: functional.batch_norm(y, s.n, s.m, training=True), torch.stack([x, x + 1]))
    return functional.batch_norm(made, s.n, s.m, s.w, s.v, training=True).square().sum()


def shared_by_nodes(s, x):
    """Write a buffer in two checkpoints. One result needs one of them, and another result needs both."""

    def inner(y):
        s.n.add_(1)
        return (y * s.w * s.n).sin()

    made = checkpointed(inner, x)
    return checkpointed(inner, made).sum(), made


@pytest.mark.parametrize("body", [kept_elsewhere, shared_by_nodes])
def test_what_is_left_to_eager(body):
    """A checkpoint that no graph can repeat runs eagerly with a notice."""
    with pytest.warns(RuntimeWarning, match="computes other results|several autograd nodes"):
        found = outcome(body, compiled)
    assert outcome(body, lambda module: module) == found


def test_what_cannot_be_done_in_a_backward():
    """A backward raises before it writes anything, if the buffer was replaced or under ``create_graph``."""
    module = Buffers(before_the_last_saved)
    f, x = compiled(module), leaf(3)
    with pytest.raises(DoubleBackwardError, match="it writes an input or its incoming gradient"):
        torch.autograd.grad(f(x), x, create_graph=True)
    assert module.n.tolist() == [1, 1, 1]
    loss = f(x)
    module.n.data = torch.full((3,), 5.0)
    loss.backward()
    assert module.n.tolist() == [6, 6, 6]
    loss = f(x)
    module.n.data = module.n.data.double()
    with pytest.raises(MetadataMutationError, match="given other sizes or other memory"):
        loss.backward()
    assert module.n.tolist() == [7, 7, 7]


def test_exports():
    """Exporting a function with a checkpoint that writes a buffer is refused."""

    def program(x, w):
        def inner(y):
            w.add_(0.1)
            return torch.sin(w) * y.sin()

        return (checkpointed(inner, x),)

    with pytest.raises(RefusedError, match="or writes a tensor"):
        aotlab.aot_export_joint_simple(program, (leaf(3), torch.ones(3)), trace_joint=True)
