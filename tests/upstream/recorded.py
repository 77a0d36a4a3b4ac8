"""A program that stock `torch.compile` compiles, for `test_read_trace`.

It is run in a process with ``TORCH_TRACE``. It prints, as JSON, facts about the compilations that it takes from objects
and from counters, not from the trace.
"""

from __future__ import annotations

import json
import re
import sys
import warnings

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._guards import CompileContext, TracingContext
from torch._inductor.utils import run_and_get_code

warnings.simplefilter("ignore")
graphs = []


def describe(kind):
    """Make a compiler that notes the nodes of the graph that it gets, and the metadata of the function."""

    def compiler(module, example_inputs):
        nodes = []
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if node.op != "output":
                shown = isinstance(value, torch.Tensor)
                nodes.append(
                    {
                        "name": node.name,
                        "op": node.op,
                        "target": str(node.target),
                        "dtype": str(value.dtype).removeprefix("torch.") if shown else None,
                        "shape": [str(size) for size in value.shape] if shown else None,
                        "inputs": [each.name for each in node.all_input_nodes],
                        "line": re.findall(r"File .*", node.meta.get("stack_trace") or "")[-1:],
                    }
                )
        context = TracingContext.try_get()
        metadata = context.fw_metadata if context is not None else None
        compile_id = CompileContext.current_compile_id()
        graphs.append(
            {
                "kind": kind,
                "id": [compile_id.frame_id, compile_id.frame_compile_id] if compile_id is not None else None,
                "nodes": nodes,
                "inputs": [
                    [each.mutates_data, each.mutates_metadata, each.requires_grad, each.mutation_type.name]
                    for each in metadata.input_info
                ],
                "outputs": [
                    [each.output_type.name, each.base_idx, each.requires_grad] for each in metadata.output_info
                ],
            }
        )
        return make_boxed_func(module.forward)

    return compiler


backend = aot_autograd(
    fw_compiler=describe("forward"), bw_compiler=describe("backward"), inference_compiler=describe("inference")
)


@torch.compile(backend=backend)
def step(x, w):
    """Write an argument, and return a loss and a view of the argument."""
    x.mul_(2)
    y = (x @ w).relu()
    return y.sum(), x.t()


@torch.compile(backend=backend)
def broken(x):
    """Break the graph."""
    y = x + 1
    print(end="")
    return y * 2


@torch.compile(backend=backend)
def skipped(x):
    """Branch on a value inside of a block that Dynamo cannot leave."""
    try:
        if x.sum() > 0:
            return x + 1
    finally:
        x.add_(1)


class Model(torch.nn.Module):
    """A module whose parameters are inputs of the graph."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        """Count the calls in a buffer."""
        self.calls += 1
        return torch.tanh(self.inner(x))


def fused(x):
    """Compute with a kernel and a library call."""
    return (x.sin() + 1) @ x


if __name__ == "__main__":
    w = torch.randn(4, 4, requires_grad=True)
    for rows in (4, 5):
        step(torch.randn(rows, 4), w)[0].backward()
    broken(torch.ones(3))
    skipped(torch.ones(3))
    torch.compile(Model(), backend=backend)(torch.ones(2, 3)).sum().backward()
    breaks = sum(counters["graph_break"].values())
    codes = []
    for _ in range(2):  # the second time, the cache has the code
        torch.compiler.reset()
        codes += run_and_get_code(torch.compile(fused), torch.ones(8, 8))[1]
    hits = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]
    json.dump({"graphs": graphs, "breaks": breaks, "codes": codes, "hits": hits}, sys.stdout)
