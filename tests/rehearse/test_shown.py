"""A rehearsal in reports, in the demo and in a notebook's cell."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton: pip install 'aotlab[rehearse]'")
if torch.cuda.is_available():
    pytest.skip("there is a GPU here", allow_module_level=True)

import aotlab
from aotlab.cli import OK, WRONG_USAGE, demo, main
from aotlab.rehearse import RehearsalBackend

pytestmark = pytest.mark.tier("full")
MEASURES = ["registers", "shared_bytes", "spilled_bytes", "blocks", "bytes_read", "bytes_written"]


def test_a_report_has_what_became_of_each_kernel() -> None:
    """A report has the figures of each kernel that Triton compiled, also in the JSON.

    A library's kernels have no figures.
    """
    layer, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()), torch.randn(32, 64)
    backend = RehearsalBackend("h100")
    with aotlab.Report.record() as recording:
        result = aotlab.compile(layer, backend=backend)(x)
        result.sum().backward()
    torch.testing.assert_close(result, layer(x))
    for report in (recording.report(), aotlab.Report.from_json(recording.report().to_json())):
        written = report.kernels[report.kernels["language"] == "triton"]
        called = report.kernels[report.kernels["language"] == "extern"]
        assert set(written["kind"]) == {"forward", "backward"}
        assert (written["registers"] > 0).all()
        assert called[MEASURES].isna().all(axis=None)
        made = {kernel.name: kernel for kernel in backend.kernels_made}
        assert written["bytes_read"].tolist() == [made[name].bytes_read for name in written["name"]]
        assert written["shared_bytes"].tolist() == [made[name].shared for name in written["name"]]


def test_kernels_that_were_not_rehearsed_have_no_numbers() -> None:
    """The kernels of the CPU have no figures."""
    with aotlab.Report.record() as recording:
        aotlab.compile(lambda x: x.sin() * 2, backend="inductor")(torch.randn(8))
    assert recording.report().kernels[MEASURES].isna().all(axis=None)


def test_the_demo() -> None:
    """Both programs are compiled for the card, and compute eager's results."""
    out = io.StringIO()
    assert demo.rehearse("h100", json_path=None, html_path=None, out=out) == OK
    assert out.getvalue().count("triton_") > 10
    assert "mutate_and_alias" in out.getvalue()
    assert main(["demo", "--rehearse", "a typewriter"]) == WRONG_USAGE


def test_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on the CPU, as eager; its report has the card's kernels."""
    testing = pytest.importorskip("IPython.testing.globalipapp")
    shell: Any = testing.start_ipython() or testing.get_ipython()
    shell.run_line_magic("load_ext", "aotlab")
    shell.run_cell("import torch\nx = torch.randn(8, 8)\ndef wave(x):\n    return x.sin() + x.cos()")
    result = shell.run_cell("%%aotcompile -o report --device cuda --rehearse h100 --quiet\ny = wave(x)")
    result.raise_error()
    names = shell.user_ns
    torch.testing.assert_close(names["y"], names["x"].sin() + names["x"].cos())
    assert names["y"].device.type == "cpu"
    kernels = names["report"].kernels
    assert kernels["language"].tolist() == ["triton"]
    assert kernels["registers"].tolist()[0] > 0
