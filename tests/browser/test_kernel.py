"""Events in the kernel: interrupts, restarts, two notebooks at once, widgets, and hostile names that were run."""

from __future__ import annotations

import re

import pytest

from tests.browser.drawn import DRAWN, TABS, compared, panel, spans, tables, unfold
from tests.browser.lab import THEMES, Lab, write_notebook
from tests.browser.looks import hard_to_read
from tests.browser.samples import HOSTILE

pytestmark = pytest.mark.tier("full")

SETUP = "%load_ext aotlab\nimport torch\nx = torch.zeros(4)"
STEP = "%%aotcompile --backend eager\nx.add_(1)\ny = x[1:] * 2"
# Within another widget a dashboard is a widget, not the report that our renderer draws.
WIDGET = "from ipywidgets import HBox\nfrom aotlab.notebook.dashboard import Dashboard\nHBox([Dashboard(report)])"
LONG = {
    "running": (
        "%%aotcompile --backend eager\nn = 0\nwhile True:\n    x = x * 1\n    n += 1\n"
        "    if n == 50: print('begun', flush=True)"
    ),
    "compiling": (
        "%%aotcompile --backend eager\n"
        "print('begun', flush=True)\n"
        "z = x.sin()\n"
        + "z = (z * 2).sin()\n" * 1500
    ),
}  # fmt: skip


@pytest.mark.parametrize("doing", LONG)
def test_interrupt(lab: Lab, extension: None, doing: str) -> None:
    """An interrupt ends a compiled cell that runs or compiles for long, and the notebook can be used afterwards."""
    write_notebook(lab.server.root / "interrupt.ipynb", [SETUP, LONG[doing], STEP, "print(x.tolist(), y.tolist())"])
    lab.open("interrupt.ipynb")
    lab.run_cell(0)
    lab.start_cell(1)
    lab.cell(1).locator(".jp-RenderedText", has_text="begun").wait_for()
    lab.interrupt()
    lab.wait_until_done(timeout=30)
    assert "KeyboardInterrupt" in [output.get("ename") for output in lab.outputs(1)]
    assert lab.execute("print('z' in globals())") == "False\n"
    lab.shoot(f"interrupted-while-{doing}")
    lab.run_cell(2)
    lab.run_cell(3)
    assert lab.cell(3).locator(".jp-OutputArea-output").inner_text().strip() == "[1.0, 1.0, 1.0, 1.0] [2.0, 2.0, 2.0]"
    report = lab.cell(2).locator(f"{DRAWN}[data-live=true]")
    report.wait_for()
    (rows,) = tables(report, "inputs").values()
    assert [(row["name"], row["marks"][0]) for row in rows] == [("x", "data mutated")]


def test_restarted_kernel(lab: Lab, extension: None) -> None:
    """Reports of the previous kernel are still shown, but not live.

    A cell that runs in the new kernel has a live report, also if it runs a second time.
    """
    write_notebook(lab.server.root / "restart.ipynb", [SETUP, STEP, STEP + "\nz = y + 1"])
    lab.open("restart.ipynb")
    lab.run_all()
    old, new = (lab.cell(index).locator(DRAWN) for index in (1, 2))
    for index in (1, 2):
        lab.cell(index).locator(f"{DRAWN}[data-live=true]").wait_for()
    before = tables(old, "inputs")
    lab.restart_kernel()
    for index in (1, 2):
        lab.cell(index).locator(f"{DRAWN}[data-live=false]").wait_for()
    assert before == tables(old, "inputs")
    lab.run_cell(0)
    for _ in range(2):
        lab.run_cell(2)
        lab.cell(2).locator(f"{DRAWN}[data-live=true]").wait_for()
        lab.wait_for_outputs(2, 1)
    assert old.get_attribute("data-live") == "false"
    assert old.get_attribute("data-identifier") != new.get_attribute("data-identifier")


def test_equal_cells(lab: Lab, extension: None) -> None:
    """Two cells of the same text share compiled entries, and each has a report of its run."""
    write_notebook(lab.server.root / "equal.ipynb", [SETUP, STEP, STEP])
    lab.open("equal.ipynb")
    lab.run_all()
    for index in (1, 2):
        report = lab.cell(index).locator(f"{DRAWN}[data-live=true]")
        report.wait_for()
        lab.wait_for_outputs(index, 1)
        assert f"In [{index + 1}]" in panel(report, "overview").inner_text()


def test_report_in_a_tab(lab: Lab, extension: None) -> None:
    """A report opens beside its notebook, once, is live as long as the kernel answers, and can be closed."""
    write_notebook(lab.server.root / "tab.ipynb", [SETUP, STEP])
    lab.open("tab.ipynb")
    lab.run_all()
    report = lab.cell(1).locator(f"{DRAWN}[data-live=true]")
    report.locator("[data-action=open]").click()
    tab = lab.page.locator(f".aotlab-tab {DRAWN}")
    lab.page.locator(f".aotlab-tab {DRAWN}[data-live=true]").wait_for()
    assert tab.locator("[data-action=open]").count() == 0
    assert tables(report, "inputs") == tables(tab, "inputs")
    lab.shoot("tab")
    report.locator("[data-action=open]").click()
    assert tab.count() == 1
    title = lab.page.locator(".lm-TabBar-tab", has_text="report of [2] – tab.ipynb")
    assert title.count() == 1
    lab.open("tab.ipynb")
    lab.shut_down_kernel()
    lab.page.locator(f".aotlab-tab {DRAWN}[data-live=false]").wait_for()
    title.locator(".lm-TabBar-tabCloseIcon").click()
    tab.wait_for(state="detached")


def test_two_notebooks(lab: Lab, extension: None) -> None:
    """Two notebooks side by side, each with its kernel, do not meddle with each other's reports."""
    define = "%%aotcompile --backend eager\ndef f(t):\n    return t.{}()"
    for name, op in (("left", "sin"), ("right", "cos")):
        write_notebook(
            lab.server.root / f"{name}.ipynb", [SETUP, define.format(op), "print(f(x).tolist())", "f(x);", "f(x[:2]);"]
        )
    lab.open("left.ipynb")
    lab.run_all()
    lab.open("right.ipynb", mode="split-right")
    lab.run_cell(0)
    lab.run_cell(1)
    lab.run_cell(2)
    lab.shoot("two-notebooks")
    seen = {}
    for name, result, calls in (("left", "0.0", 3), ("right", "1.0", 1)):
        lab.open(f"{name}.ipynb")
        assert lab.cell(2).locator(".jp-OutputArea-output").inner_text().strip() == f"[{', '.join([result] * 4)}]"
        report = lab.cell(1).locator(f"{DRAWN}[data-live=true]")
        report.wait_for()
        panel(report, "calls").locator("[data-count=total]", has_text=f"{calls} in all").wait_for()
        seen[name] = report.get_attribute("data-identifier")
    assert seen["left"] != seen["right"]
    # One kernel goes; the other notebook's report does not care, and grows when its function is called.
    lab.shut_down_kernel()
    lab.cell(1).locator(f"{DRAWN}[data-live=false]").wait_for()
    lab.open("left.ipynb")
    report = lab.cell(1).locator(f"{DRAWN}[data-live=true]")
    for index, calls, graphs in ((3, 4, 2), (4, 5, 2)):
        lab.run_cell(index)
        panel(report, "calls").locator("[data-count=total]", has_text=f"{calls} in all").wait_for()
        assert report.locator("table[data-table=recompiles] tr[data-name]").count() == graphs


def test_dashboard(lab: Lab, extension: None) -> None:
    """The widget draws the same report as the cell's output, and can also measure."""
    cells = [
        SETUP,
        STEP.replace("%%aotcompile", "%%aotcompile -o report"),
        WIDGET,
        "Dashboard(report)",
    ]
    write_notebook(lab.server.root / "dashboard.ipynb", cells)
    lab.open("dashboard.ipynb")
    lab.run_all()
    output, widget, displayed = (lab.cell(index).locator(DRAWN) for index in (1, 2, 3))
    for drawn in (widget, displayed):
        drawn.wait_for()
        assert drawn.get_attribute("data-state") == output.get_attribute("data-state") == "verified"
        for name in ("inputs", "outputs"):
            assert compared(tables(output, name), name) == compared(tables(drawn, name), name)
        assert spans(output) == spans(drawn)
    lab.cell(2).locator(f".jupyter-widgets {DRAWN}[data-live=true]").wait_for()
    timing = panel(widget, "timing")
    timing.locator("button", has_text="Measure").click()
    timing.locator("table[data-table=timings]").first.wait_for(timeout=120_000)
    panel(output, "timing").locator("table[data-table=timings]").first.wait_for()
    for theme in THEMES:
        lab.theme(theme)
        assert "\n".join(hard_to_read(widget)) == ""
        lab.shoot(f"dashboard-{theme.split()[-1].lower()}", widget)


def test_hostile_names(lab: Lab, extension: None) -> None:
    """Names in the user's own program are shown as they are, also by a report that is live."""
    name = HOSTILE.replace("\n", "")
    cells = [
        SETUP,
        f"name = {name!r}\nstate = {{name: torch.zeros(3)}}",
        "%%aotcompile -o report --backend eager --name " + "<img/src=x/onerror=window.hacked=1>" + "\n"
        "def f(state):\n    return {k: v.add_(1) for k, v in state.items()}",
        "f(state);",
        WIDGET,
        f"%%aotcompile --backend eager\nraise ValueError({name!r})",
    ]
    write_notebook(lab.server.root / "hostile-live.ipynb", cells)
    lab.open("hostile-live.ipynb")
    for index in range(len(cells)):
        lab.run_cell(index)
    for index in (2, 4):
        report = lab.cell(index).locator(DRAWN)
        report.wait_for()
        for tab in TABS:
            content = panel(report, tab)
            unfold(content)
            assert report.locator("img, script, a, svg[onload]").count() == 0
        assert "<img src=x onerror=" in panel(report, "inputs").inner_text()
    assert lab.cell(5).locator("img, script, svg[onload], a[href^=javascript]").count() == 0
    lab.shoot("hostile-live")
    assert lab.page.evaluate("() => window.hacked ?? null") is None


LARGE = "%%aotcompile --backend eager --no-verify\nouts = [(w * i).sin() for i in range(450)]"


@pytest.mark.tier("full")
def test_large_report(lab: Lab, extension: None) -> None:
    """Nothing is cut, with a kernel and without one: the saved notebook has all rows and nodes."""
    setup = f"{SETUP}\nw = torch.zeros(4, requires_grad=True)"
    write_notebook(lab.server.root / "large.ipynb", [setup, LARGE])
    lab.open("large.ipynb")
    lab.run_all()
    report = lab.cell(1).locator(f"{DRAWN}[data-live=true]")
    report.wait_for()
    cut = report.locator(".al-note", has_text="This output is cut to fit a notebook")
    heading = "450 outputs, 0 aliased"
    saved = r"450 values, 7\.03 KiB of new memory"
    assert heading in panel(report, "outputs").inner_text()
    outputs = panel(report, "outputs")
    # All rows can be reached; those in sight are drawn.
    outputs.locator("table[aria-rowcount='451']").wait_for()
    outputs.locator(".al-scroll").evaluate("box => { box.scrollTop = box.scrollHeight; }")
    outputs.locator("tr[aria-rowindex='451']").wait_for()
    assert outputs.locator("tr[data-name]").count() < 100
    nodes = panel(report, "stages").locator("details[data-nodes]")
    nodes.locator("summary").click()
    nodes.locator("tr[data-name]").first.wait_for()
    assert re.search(saved, panel(report, "overview").locator("[data-fact=saved]").inner_text())
    assert not cut.count()
    lab.shoot("large-live")
    lab.save()
    lab.shut_down_kernel()
    lab.reload()
    still = lab.cell(1).locator(f"{DRAWN}[data-live=false]")
    still.wait_for()
    assert heading in panel(still, "outputs").inner_text()
    panel(still, "outputs").locator("table[aria-rowcount='451']").wait_for()
    assert not still.locator("[data-cut]").count()
    nodes = panel(still, "stages").locator("details[data-nodes]")
    nodes.locator("summary").click()
    nodes.locator("tr[data-name]").first.wait_for()
    assert re.search(saved, panel(still, "overview").locator("[data-fact=saved]").inner_text())
    assert re.search(saved, panel(still, "saved").inner_text())
    lab.shoot("large-still")
