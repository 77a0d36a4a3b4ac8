"""Exported graphs in files: they come back as they were, and a file runs no code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aotlab
from aotlab.errors import UsageError
from aotlab.export import load, save


class Model(nn.Module):
    """Parameters, buffers that are written, and what graphs are given: dtypes, infinities, lists, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.norm(self.linear(x)).masked_fill(mask, -math.inf)
        z = y.softmax(-1).to(torch.float64).nan_to_num(0.5, posinf=math.inf)
        both = torch.cat([z[:, :2], z[:, 2:].flip(1)], dim=1)
        return {"loss": (both * x.shape[0]).sum(), "last": both[-1].detach()}


def exported(*, joint: bool, dynamic: bool = False) -> tuple[Any, Any, list[torch.Tensor]]:
    """Export the model; return the graph, the signature, and arguments."""
    torch.manual_seed(0)
    model = Model()
    args = torch.randn(5, 3), torch.rand(5, 4) > 0.8
    index = 0 if joint else None
    graph, signature = aotlab.aot_export_module(
        model, args, trace_joint=joint, output_loss_index=index, dynamic_shapes=dynamic
    )
    return graph, signature, [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *args)]


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_comes_back_as_it_was(tmp_path: Path, joint: bool, dynamic: bool) -> None:
    """A saved graph is loaded with the same code, signature, values, and guards on sizes."""
    graph, signature, args = exported(joint=joint, dynamic=dynamic)
    path = save(tmp_path / "model.json", graph, signature)
    again, read = load(path)
    assert again.code == graph.code
    assert read == signature
    assert again.meta["assumes"] == tuple(graph.meta["assumes"])
    for before, after in zip(graph(*args), again(*args), strict=True):
        assert torch.equal(
            before,
            after,
        )
    if dynamic:
        args[-2], args[-1] = args[-2][:3], args[-1][:3]
        assert torch.equal(graph(*args)[-1], again(*args)[-1])


def test_values_are_described_so_that_a_loaded_graph_is_partitioned(tmp_path: Path) -> None:
    """The joint graph of a function is split after loading as before."""
    x = torch.ones(2, 3, requires_grad=True)
    graph = aotlab.aot_export_joint_simple(lambda x: (x.sin() * x,), (x,), trace_joint=True)
    again, signature = load(save(tmp_path / "joint.json", graph))
    assert signature is None
    parts = [aotlab.default_partition(each, (), num_fwd_outputs=1) for each in (graph, again)]
    for before, after in zip(*parts, strict=True):
        assert before.code == after.code


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    """Constants and graphs inside are refused, and nothing is written."""
    constant = torch.ones(2)
    graph = torch.fx.symbolic_trace(Model().linear)
    for module in (graph, torch.fx.symbolic_trace(lambda x: math.cos(x))):
        with pytest.raises(UsageError, match=r"torch\.export\.save"):
            save(tmp_path / "no.json", module)
    made = aotlab.aot_export_joint_simple(lambda x: (x + 1,), (constant,), trace_joint=False)
    made.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[0].args = (object(), 1)
    with pytest.raises(UsageError, match="takes a `object`"):
        save(tmp_path / "no.json", made)
    assert not (tmp_path / "no.json").exists()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("format",), "another"),
        (("version",), 2),
        (("signature",), {"parameters": []}),
        (("nodes",), 3),
        (("nodes", 0, "op"), "call_module"),
        (("nodes", 0, "op"), "get_attr"),
        (("nodes", 0, "name"), "x; import os"),
        (("nodes", 0, "name"), "class"),
        (("nodes", 0, "like"), ["load", [1], [1], "cpu"]),
        (("nodes", 1, "target"), "os::system"),
        (("nodes", 1, "target"), "builtins::eval"),
        (("nodes", 1, "target"), "aten::no_such_op"),
        (("nodes", 1, "target"), "aten::from_file"),
        (("nodes", 1, "target"), "__class__::__init__.__globals__"),
        (("nodes", 1, "args", 0), {"node": "later"}),
        (("nodes", 1, "args", 0), {"torch": "load"}),
        (("nodes", 1, "args", 0), ["set", 1]),
        (("nodes", 1, "kwargs"), {"x=print(1), y": 2}),
    ],
    ids=lambda each: "-".join(map(str, each)) if isinstance(each, tuple) else "",
)
def test_damaged_files(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    """They are refused with one kind of error, whatever is wrong, and nothing of them is run."""
    graph = aotlab.aot_export_joint_simple(lambda x: (x + 1,), (torch.ones(2),), trace_joint=False)
    path = save(tmp_path / "graph.json", graph)
    form = json.loads(path.read_text())
    *way, last = place
    inside = form
    for step in way:
        inside = inside[step]
    inside[last] = value
    path.write_text(json.dumps(form))
    with pytest.raises(UsageError, match=r"graph\.json is"):
        load(path)


def test_no_json(tmp_path: Path) -> None:
    """A pickle is not read."""
    path = tmp_path / "model.pt"
    torch.save({}, path)
    with pytest.raises(UsageError, match="is not an exported graph"):
        load(path)
