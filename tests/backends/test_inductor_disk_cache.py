"""Inductor keeps compiled graphs in its cache on disk, and takes them from there in the next process."""

from __future__ import annotations

import torch
from torch import fx

import aotlab
from aotlab._torch import inductor_internals
from aotlab.report import Report


def test_a_second_compilation_takes_both_graphs_from_the_cache() -> None:
    """Also for fixed sizes, a second function with the same graphs compiles neither forward nor backward.

    The report has the same nodes and kernels, also the nodes after Inductor's passes.
    """
    from torch._dynamo.utils import counters
    from torch._inductor.utils import fresh_cache

    def step() -> tuple[list[torch.Tensor], Report]:
        counters.clear()
        x, w = torch.arange(12.0).view(3, 4).requires_grad_(), torch.ones(4, 5)
        with Report.record() as recording:
            out = aotlab.compile(lambda x: (x @ w + 1.5).view(-1).relu())(x)
            out.sum().backward()
        assert x.grad is not None
        return [out, x.grad], recording.report()

    with fresh_cache():
        first, report = step()
        assert (counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]) == (2, 0)
        second, report_of_hit = step()
        assert (counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]) == (0, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    passed = report.nodes.query("stage == 'passes'")
    assert "aten.reshape.default" in passed.target.tolist()
    assert (set(report.kernels.from_cache), set(report_of_hit.kernels.from_cache)) == ({False}, {True})
    for table in ("nodes", "kernels"):
        columns = (
            ["part", "stage", "name", "target", "shape"] if table == "nodes" else ["kind", "name", "language", "source"]
        )
        rows, rows_of_hit = (getattr(each, table)[columns].values.tolist() for each in (report, report_of_hit))
        assert rows == rows_of_hit


def test_kernels_for_other_outputs_are_not_used() -> None:
    """The key of the cache contains the outputs whose strides the caller sees, and stock torch.compile has another."""
    from torch.compiler import config

    keys = {config.cache_key_tag}
    for visible in ([0], [0, 1]):
        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output((x, x)).meta["user_visible_output_idxs"] = visible
        with inductor_internals._distinguished(fx.GraphModule({}, graph)):
            keys.add(config.cache_key_tag)
    assert len(keys) == 3
