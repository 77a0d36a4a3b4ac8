"""`DistributedDataParallel` around compiled modules, and compiled, on two processes, beside DDP run eagerly."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist

import aotlab
from tests.distributed.models import MODELS, Unused, loss_of
from tests.distributed.processes import assert_same, run

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package"),
    pytest.mark.tier("full"),
]
if dist.is_available():
    from torch.nn.parallel import DistributedDataParallel

#: Small buckets, so that the small models fill several.
BYTES = 8_000


def _inside(model, backend, **settings):
    return DistributedDataParallel(aotlab.compile(model, backend=backend), **settings)


def _compiled(model, backend, **settings):
    return aotlab.compile(DistributedDataParallel(model, **settings), backend=backend)


def _registered(model, backend, **settings):
    options = {"compiler": backend}
    return torch.compile(DistributedDataParallel(model, **settings), backend="aotlab", options=options)


WAYS = {"inside": _inside, "compiled": _compiled, "registered": _registered}


class Log:
    """Notes when graphs run and when buckets are exchanged. Each backward begins an empty list."""

    def __init__(self):
        self.lines = []

    def compiler(self, graph, inputs):
        """Return the graph itself, and note its runs."""

        def call(*args):
            self.lines.append("graph")
            return graph(*args)

        return call

    def hook(self, _state, bucket):
        """Average a bucket, as DDP does itself."""
        self.lines.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def train(way, kind, rank, *, steps=10, rounds=1, log=None, unused=False, **settings):
    """Train, and return all losses, the last gradients, the parameters and the buffers.

    Gradients are accumulated over ``rounds`` batches. ``way`` is None for eager.
    """
    torch.manual_seed(0)
    model = Unused(MODELS[kind]()) if unused else MODELS[kind]()
    if way is None:
        call = DistributedDataParallel(model, **settings)
    else:
        call = WAYS[way](model, "eager" if log is None else log.compiler, **settings)
    if log is not None:
        call.register_comm_hook(None, log.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    results = []
    for step in range(steps):
        optimizer.zero_grad()
        for n in range(rounds):
            inputs, wanted = MODELS[kind].batch(1000 * rank + 10 * step + n)
            with call.no_sync() if n + 1 < rounds else contextlib.nullcontext():
                loss = loss_of(call(inputs), wanted)
                if log is not None:
                    log.lines.clear()
                loss.backward()
            results.append(loss.detach())
        optimizer.step()
    if way == "compiled":
        assert (call.compiled.calls.eager, call.compiled.calls.by_dynamo) == (0, 0)
        assert len(call.compiled.entries) == 1
    return [*results, *(p.grad for p in model.parameters()), *(t.detach() for t in model.state_dict().values())]


def _ways(rank):
    for kind in MODELS:
        wanted = train(None, kind, rank)
        for way in WAYS if kind == "llama" else ("inside", "compiled"):
            assert_same((kind, way), train(way, kind, rank), wanted)


def test_ten_steps(tmp_path):
    """Ten steps equal eager bit for bit: compiled inside of DDP or with it, by both frontends."""
    run(_ways, tmp_path / "meeting")


def _on_four(rank):
    for kind in MODELS:
        assert_same(kind, train("compiled", kind, rank), train(None, kind, rank))


def test_ten_steps_on_four_processes(tmp_path):
    """Ten steps on four processes equal eager bit for bit."""
    run(_on_four, tmp_path / "meeting", count=4)


SETTINGS = {
    "accumulated": {"rounds": 3},
    "unused parameters": {"unused": True, "find_unused_parameters": True, "rounds": 2},
    "static graph": {"unused": True, "static_graph": True},
    "views of buckets": {"gradient_as_bucket_view": True},
}


def _settings(rank):
    for name, settings in SETTINGS.items():
        wanted = train(None, "resnet", rank, steps=3, **settings)
        for way in ("compiled", "registered") if name == "accumulated" else ("compiled",):
            assert_same((name, way), train(way, "resnet", rank, steps=3, **settings), wanted)


def test_settings(tmp_path):
    """Gradient accumulation, unused parameters, a static graph and gradients in buckets agree with eager."""
    run(_settings, tmp_path / "meeting")


def _overlap(rank):
    dist._DEFAULT_FIRST_BUCKET_BYTES = BYTES
    eager = Log()
    wanted = train(None, "llama", rank, steps=3, log=eager, bucket_cap_mb=BYTES / 2**20)
    assert len(eager.lines) > 2
    for way in ("inside", "registered"):
        log = Log()
        assert_same(way, train(way, "llama", rank, steps=3, log=log, bucket_cap_mb=BYTES / 2**20), wanted)
        first_exchange = next(n for n, line in enumerate(log.lines) if line != "graph")
        assert "graph" in log.lines[first_exchange:], (way, log.lines)


def test_exchange_overlaps_with_the_backward(tmp_path):
    """DDP exchanges the first buckets before the last graph of the backward runs."""
    run(_overlap, tmp_path / "meeting")
