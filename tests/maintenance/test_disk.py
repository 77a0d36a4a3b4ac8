"""The benchmark of a second process."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from aotlab.maintenance.bench import disk


def test_table_and_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table divides the times of the two processes and of the engines; another loss is a problem."""
    seconds = {
        "direct": [(60.0, 1.0), (6.0, 1.0)],
        "Dynamo": [(50.0, 1.0), (5.0, 2.0)],
        "torch.compile": [(30.0, 1.0)] * 2,
    }
    monkeypatch.setattr(disk, "_run", lambda _model, engine, *_: seconds[engine].pop(0))
    out = io.StringIO()
    assert disk.main(["--only", "U-Net"], out) == 1
    *_, head, rule, row = out.getvalue().splitlines()
    assert row == "| U-Net | 10.0 | 10.0 | 1.0 | 0.2 | 0.2 |"
    assert rule.count("---:") == row.count("|") - 2
    assert "U-Net, Dynamo: 50.0 s, then 5.0 s  the losses are 1.0 and 2.0" in out.getvalue()
    assert head in Path(disk.__file__).with_name("RESULTS.md").read_text()


@pytest.mark.tier("long")
def test_processes_are_measured() -> None:
    """Both processes of an engine run; on the eager backend nothing is cached, and the losses are equal."""
    figures = list(disk.measure(["U-Net"], "eager", "small"))
    assert [each.engine for each in figures] == list(disk.ENGINES)
    for each in figures:
        assert each.first > 0 < each.second
        assert not each.problem
        assert math.isfinite(each.first + each.second)
