"""``aotlab acceptance``: its checks fail where they should, and its output is right."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aotlab.cli import OK, WRONG_USAGE, main
from aotlab.maintenance import acceptance

CPU = torch.device("cpu")
ON_THE_CPU = ["random numbers", "mutation and aliases", "synchronisation", "devices and precisions"]


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, **checks: Callable[[torch.device], Any]) -> tuple[int, Any, str]:
    """Run these checks; return the exit status, the JSON and the page."""
    monkeypatch.setattr(acceptance, "CHECKS", tuple(checks.items()))
    status = acceptance.run("cpu", folder / "made", (), io.StringIO())
    written = [(folder / "made" / f"acceptance.{kind}").read_text() for kind in ("json", "html")]
    return status, json.loads(written[0])["checks"], written[1]


def test_a_failure_stops_nothing(tmp_path, monkeypatch):
    """A check that fails is a row with its error; the others run; the exit status says so."""

    def fails(device):
        """Compare something."""
        raise AssertionError("<b>3</b> is not 4")

    def left_out(device):
        """Look for a GPU."""
        raise acceptance.LeftOut("it needs CUDA")

    status, rows, page = run(tmp_path, monkeypatch, first=fails, second=left_out, third=lambda device: {"speed": 1.5})
    assert status == 1
    assert [(row["name"], row["state"]) for row in rows] == [
        ("first", "failed"), ("second", "left out"), ("third", "passed"),
    ]  # fmt: skip
    assert rows[0]["note"] == "AssertionError: <b>3</b> is not 4"
    assert rows[2]["figures"] == {"speed": 1.5}
    assert "&lt;b&gt;3" in page
    assert "<b>3" not in page
    assert "1 passed, 1 failed, 1 left out" in page


def test_all_passed(tmp_path, monkeypatch):
    """Without a failure the exit status is 0."""
    assert run(tmp_path, monkeypatch, one=lambda device: {})[0] == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens where there is no GPU, and here is one")
def test_without_a_gpu(capsys):
    """CUDA is the default. If it is missing, the command says so."""
    assert main(["acceptance"]) == WRONG_USAGE
    assert "use --device cpu" in capsys.readouterr().err


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", ON_THE_CPU)
def test_checks_on_the_cpu(name, tmp_path):
    """They pass on the CPU."""
    assert main(["acceptance", "--device", "cpu", "--only", name, "--to", str(tmp_path)]) == OK
    (row,) = json.loads((tmp_path / "acceptance.json").read_text())["checks"]
    assert row["state"] == "passed"


def wrong(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Replace an engine by one that computes something else and reads a value."""

    def other(*args: Any) -> Any:
        result = function(*args)
        if isinstance(result, Tensor) and result.is_floating_point():
            return result * (1.01 if result.sum().item() else 1.02)
        return result

    return other


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", ON_THE_CPU)
def test_they_can_fail(name, tmp_path, monkeypatch):
    """They fail with an engine that is wrong."""
    monkeypatch.setattr(acceptance.api, "compile", wrong)
    assert acceptance.run("cpu", tmp_path, [name], io.StringIO()) == 1


@pytest.mark.parametrize("function", [acceptance.check_streams, acceptance.check_cuda_graph, acceptance.check_tests])
def test_what_needs_cuda_is_left_out_by_name(function):
    """On the CPU these say that they need CUDA."""
    with pytest.raises(acceptance.LeftOut, match="CUDA"):
        function(CPU)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    """Streams, a CUDA graph and calls that never wait for the device."""
    names = ["streams", "CUDA graph", "synchronisation", "devices and precisions", "random numbers"]
    assert acceptance.run("cuda", tmp_path, names, io.StringIO()) == 0
