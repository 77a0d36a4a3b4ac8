"""Reports to show: one of real work, and the same with hostile words wherever a report has words."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import torch

import aotlab
from aotlab.errors import UserLine
from aotlab.report.counts import counted
from aotlab.report.model import Code, Guard, Node, Report

#: Runs if it is taken for markup in text, in an attribute, or in a script.
HOSTILE = (
    "'\"></code></td><img src=x onerror=\"window.hacked='img'\"></script></style>"
    "<script>window.hacked='script'</script>"
    "<svg onload=\"window.hacked='svg'\"></svg><a href=\"javascript:window.hacked='a'\">a</a>"
)
#: Fields whose values are chosen from a few words; the rest of a report's strings can be anything.
CHOSEN = {
    "status", "state", "kind", "how", "role", "owner", "language", "phase", "engine", "outcome", "base_kind",
    "output_type", "mutation_type", "dtype", "device", "layout", "stage", "part", "op", "identifier", "created",
}  # fmt: skip


@cache
def training_step() -> Report:
    """Compile, run and verify a function that mutates one input and returns a view of another."""

    def step(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return (x @ weight).relu().sum(), y[1:].t()

    compiled = aotlab.compile(step, backend="eager")
    with aotlab.Report.record("training step") as recording:
        for rows in (2, 2, 3):
            loss, _ = compiled(torch.ones(rows, 3), torch.ones(4, 5), torch.ones(3, 4, requires_grad=True))
            loss.backward()
    return recording.report()


def large(nodes: int = 10_000, rows: int = 400) -> Report:
    """Return the training step's report with so many nodes and the code of them, inputs, storages and saved values."""
    report = training_step()
    frame = report.frames[0]
    graph = frame.graphs[0]
    x, value = graph.inputs[0], graph.saved[0]
    line = UserLine(file="/home/me/model.py", line=7, function="forward", code="x = self.layer(x).relu() + x")
    node = Node(stage="trace", part="joint", name="", op="call_function", target="aten.add.Tensor", phase="forward")
    node = replace(node, dtype="float32", shape=(64, 128), device="cpu", nbytes=32768, users=1)
    names = [f"add_{i}" for i in range(nodes)]
    made = [
        replace(node, name=name, nbytes=i + 1, inputs=(f"add_{i - 1}",), line=replace(line, line=i % 100 + 1))
        for i, name in enumerate(names)
    ]
    code = "\n".join(f"    {name} = aten.add.Tensor(add, 1)  # float32[64, 128], model.py:7" for name in names)
    stages = [
        replace(stage, codes=tuple(Code(title=each.title, language="python", text=code) for each in stage.codes))
        for stage in graph.stages
    ]
    graph = replace(
        graph,
        nodes=tuple(made),
        stages=tuple(stages),
        inputs=tuple(replace(x, name=f"model.layers.{i}.weight", storage=i) for i in range(rows)),
        storages=tuple(replace(graph.storages[0], number=i) for i in range(rows)),
        saved=tuple(replace(value, name=f"add_{i}", nbytes=1000 - i) for i in range(rows)),
        guards=tuple(Guard(kind="shape", subject=f"x{i}", sentence=f"`x{i}` has shape (2, 3)") for i in range(500)),
    )
    return replace(report, frames=(replace(frame, graphs=(graph,)),))


def hostile(*, also_chosen: bool) -> Report:
    """Return the training step's report with hostile words added to every string that can be anything, or to all."""

    def spoil(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: spoil(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [spoil(each, key) for each in value]
        return value + HOSTILE if isinstance(value, str) and (also_chosen or key not in CHOSEN) else value

    return Report.from_json(json.dumps(spoil(counted(training_step()).to_dict(), "")))
