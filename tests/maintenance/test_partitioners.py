"""``aotlab bench partitioners``: its measurements and its output."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from aotlab.bench.memory import kept_by_eager
from aotlab.maintenance.bench import partitioners
from aotlab.maintenance.bench.partitioners import JointGraph
from aotlab.maintenance.bench.programs import mlp
from aotlab.partition.default import default_partition
from aotlab.partition.min_cut import min_cut_rematerialization_partition

CPU = torch.device("cpu")


def test_a_joint_graph_is_split_without_being_changed() -> None:
    """The parameters are known by their numbers; splitting happens on copies."""
    joint = JointGraph.of(mlp(2), [torch.ones(2, 32)])
    before = str(joint.module.graph)
    assert (joint.outputs, joint.static) == (1, (0, 1, 2, 3))
    joint.split(min_cut_rematerialization_partition)
    assert str(joint.module.graph) == before


def test_kept_memory() -> None:
    """Of an MLP all activations but the last, which is an output, are kept, by us as by eager."""
    model, batch = mlp(3), torch.ones(2, 32)
    joint = JointGraph.of(model, [batch])
    assert joint.saved_bytes(default_partition) == kept_by_eager(model, batch) == 2 * 2 * 32 * 4


def test_kept_by_eager() -> None:
    """Storages count once, and neither parameters and buffers nor arguments and results count."""
    x = torch.ones(10, requires_grad=True)
    assert kept_by_eager(lambda x: x.sin().sin().exp(), x) == 40
    assert kept_by_eager(lambda x: (y := x.exp()) * y.view(2, 5).view(10), x) == 40
    assert kept_by_eager(nn.BatchNorm1d(2), torch.ones(3, 2)) == 2 * 2 * 4  # mean and deviation of the batch


def test_the_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A row for each partitioner of each graph; the growth is that from half the layers."""
    out, path = io.StringIO(), tmp_path / "figures.json"
    assert partitioners.main(["--quick", "--json", str(path)], out=out) == 0
    figures = json.loads(path.read_text())["figures"]
    assert len(figures) == 4 * len(partitioners.OURS)
    assert [f["growth"] is None for f in figures[:6]] == [True] * 3 + [False] * 3
    for figure in figures:
        assert figure["ratio"] > 0
        assert figure["ours_bytes"] <= figure["eager_bytes"]
    assert "Kept memory" in out.getvalue()
    assert "MLP, 10 layers" in out.getvalue()
    assert "MLP, 5 layers, MLP, 10 layers" in capsys.readouterr().err
    assert not any(math.isnan(f["ours_ns"]) for f in figures)
