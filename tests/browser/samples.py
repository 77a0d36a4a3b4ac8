"""Reports to show: one of real work, and the same with hostile words wherever a report has words."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import torch

import aotlab
from aotlab.report.model import Report

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


def hostile(*, also_chosen: bool) -> Report:
    """Return the training step's report with hostile words added to every string that can be anything, or to all."""

    def spoil(value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: spoil(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [spoil(each, key) for each in value]
        return value + HOSTILE if isinstance(value, str) and (also_chosen or key not in CHOSEN) else value

    return Report.from_json(json.dumps(spoil(training_step().to_dict(), "")))
