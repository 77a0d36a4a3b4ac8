"""The displays: maps of storages, code, tables as text and as HTML."""

from __future__ import annotations

import pytest
import torch

import aotlab
from aotlab import teach
from aotlab.errors import UsageError


def test_a_map() -> None:
    """A map has one table for each storage.

    Elements at one position share a cell, and the rest of a long storage is left out.
    """
    x = torch.arange(2.0)
    shown = repr(teach.storage_map(x=x, twice=x.expand(2, 2), other=torch.zeros(40)))
    first, second = shown.split("\n\n")
    assert first.splitlines()[-1].split("  ") == ["twice", "[0,0] [1,0]", "[0,1] [1,1]"]
    assert second.startswith("Storage 1: 40 elements of float32, 160 bytes")
    assert second.endswith("Only the first 32 elements are drawn.")
    html = teach.storage_map(x=x)._repr_html_()
    assert html.count("background:") == 2
    assert html.count('scope="row"') == 2


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"x": 3}, "`x` is of type int"),
        ({"x": torch.ones(2, dtype=torch.complex64)}, "real tensors"),
        ({"x": (x := torch.ones(2)), "y": x.view(torch.int32)}, "x, y view one storage as different dtypes"),
    ],
)
def test_what_no_map_is_drawn_of(tensors: dict[str, object], said: str) -> None:
    """If no map can be drawn, the reason is shown."""
    with pytest.raises(UsageError, match=said):
        teach.storage_map(**tensors)


def test_figures_have_no_box() -> None:
    """JupyterLab puts a white box behind one that is transparent and whose labels are all dark, or all light."""
    backend = pytest.importorskip("matplotlib_inline.backend_inline")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    with pyplot.style.context(teach.PLOT):
        figure, _ = pyplot.subplots()
        assert backend._fetch_figure_metadata(figure) is None
        assert figure.get_facecolor()[3] == 0
        pyplot.close(figure)


def test_code() -> None:
    """The code of each part is shown; the wrapper without its checks. A missing part is named."""
    with aotlab.Report.record() as report:
        aotlab.compile(lambda x, w: x.mul_(2) * w, backend="eager")(torch.ones(2), torch.ones(2, requires_grad=True))
    assert "def joint(self, primals_1, primals_2, tangents_1)" in repr(teach.code(report, "joint"))
    assert "tangents_1" in repr(teach.code(report, "backward"))
    assert "tangents_1" not in repr(teach.code(report))
    wrapper = repr(teach.code(report, "wrapper"))
    assert "x.copy_(" in wrapper
    assert "MISS" not in wrapper
    assert teach.code(report)._repr_html_().count(">def forward(self, primals_1") == 1
    with pytest.raises(UsageError, match="no code 'all'"):
        teach.code(report, "all")


def test_code_of_the_last_graph() -> None:
    """A report of several graphs shows the newest."""
    with aotlab.Report.record() as report:
        compiled = aotlab.compile(lambda x: x * 2, backend="eager", dynamic=False)
        compiled(torch.ones(2))
        compiled(torch.ones(3))
    assert "float32[3]" in repr(teach.code(report))
