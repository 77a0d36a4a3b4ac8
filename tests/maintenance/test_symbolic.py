"""``aotlab bench symbolic``: ratios of times with symbols over times without, of results that are eager's."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from aotlab.bench.timing import Case, Comparison, Samples
from aotlab.maintenance.bench import symbolic
from aotlab.maintenance.bench.programs import SMALL_PROGRAMS

Function = Callable[..., object]


def test_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine is compared with itself, ours also with the other, both with symbols."""
    times = {"ours, one": 2.0, "ours, all": 5.0, "theirs, one": 10.0, "theirs, all": 20.0, "ours, one (again)": 3.0}

    def compare(cases: list[Case], *, again: str, **settings: object) -> Comparison:
        assert {case.name for case in cases} | {"ours, one (again)"} == set(times)
        samples = tuple(Samples(name=name, inner=1, ns=(ns,)) for name, ns in times.items())
        return Comparison(samples=samples, device="cpu", again=again)

    monkeypatch.setattr(symbolic, "compare", compare)
    wraps: dict[str, symbolic.Wrap] = {name: lambda function, dynamic: function for name in ("ours", "theirs")}
    rows = list(symbolic.figures_of(SMALL_PROGRAMS[0], wraps, quick=True))
    assert [row.what for row in rows] == ["first step", "call", "training step"]
    assert {(row.ours, row.theirs, row.over_theirs, row.again) for row in rows} == {(2.5, 2.0, 0.25, 1.5)}


def test_what_differs_is_not_measured() -> None:
    """Wrong results, and wrong gradients, of either engine, with symbols or without."""

    def value(function: Function, dynamic: bool) -> Function:
        return lambda x: function(x + 1) if dynamic else function(x)

    def gradient(function: Function, dynamic: bool) -> Function:
        return lambda x: function(x) + (x - x.detach() if dynamic else 0)

    def right(function: Function, dynamic: bool) -> Function:
        return function

    for wraps, name in (({"ours": right, "theirs": value}, "theirs"), ({"ours": gradient, "theirs": right}, "ours")):
        (row,) = symbolic.figures_of(SMALL_PROGRAMS[0], wraps, quick=True)
        assert row.problem.startswith(f"{name}, all: AssertionError")
        assert row.ours != row.ours


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints ratios of both engines' results, and writes them."""
    monkeypatch.setattr(symbolic, "SMALL_PROGRAMS", [each for each in SMALL_PROGRAMS if each.name == "mutating"])
    out, path = io.StringIO(), tmp_path / "figures.json"
    assert symbolic.main(["--quick", "--json", str(path)], out=out) == 0
    rows = json.loads(path.read_text())["figures"]
    assert [row["what"] for row in rows] == ["first step", "call", "training step"]
    assert all(min(row["ours"], row["theirs"], row["over_theirs"]) > 0 for row in rows)
    assert "mutating" in out.getvalue()
    assert torch.__version__ in out.getvalue()
