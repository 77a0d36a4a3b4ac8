"""Train a model in two processes, for `test_observe`. Each process has a log in the folder ``TORCH_TRACE``.

It takes the rank, and a folder in which the processes find each other.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")


@torch.compile(backend="aot_eager")
def total(x):
    """Add the values of both processes."""
    return all_reduce(x * 2, "sum", dist.group.WORLD)


class Model(torch.nn.Module):
    """A layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        """Apply the layer."""
        return self.layer(x).relu()


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    assert total(torch.full((3,), rank + 1.0)).tolist() == [6.0] * 3
    model = DistributedDataParallel(Model())
    compiled = torch.compile(model, backend="aot_eager")
    compiled(torch.ones(2 + rank, 4)).sum().backward()
    dist.destroy_process_group()
