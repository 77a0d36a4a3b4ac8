"""The page of a cell that runs: it is there at once, with seconds, steps and tables. Then it shows the report."""

from __future__ import annotations

import re
import time

import pytest

from tests.browser.drawn import DRAWN, tables
from tests.browser.lab import Lab, write_notebook

pytestmark = pytest.mark.tier("full")

# The comparison with eager waits for the file `go`, so that the page can be looked at meanwhile.
SETUP = """%load_ext aotlab
import pathlib, time, torch
from aotlab.notebook import traced
x, w, compare = torch.ones(4, 4), torch.ones(4, requires_grad=True), traced.compare
def waiting(*args, **named):
    while not pathlib.Path("go").exists():
        time.sleep(0.05)
    return compare(*args, **named)
traced.compare = waiting"""
STEP = "%%aotcompile -o {0} --backend eager {1}\nprint('begun')\nz = (x * w).sin()\nz.sum().backward()\nprint('done')"


def test_a_running_cell(lab: Lab, extension: None) -> None:
    """Before the comparison ends, the page shows seconds, steps and tables; then the report of a quiet run."""
    write_notebook(
        lab.server.root / "running.ipynb", [SETUP, STEP.format("shown", ""), STEP.format("quiet", "--quiet")]
    )
    (lab.server.root / "go").unlink(missing_ok=True)
    lab.open("running.ipynb")
    lab.run_cell(0)
    began = time.monotonic()
    lab.start_cell(1)
    page = lab.cell(1).locator(DRAWN)
    page.wait_for(timeout=10_000)
    seconds = time.monotonic() - began
    page.locator("[data-table=steps] tr[data-name=trace]").wait_for()
    lab.cell(1).locator(f"{DRAWN}[data-live=true]").wait_for()
    # The tables of the graph come while the graph is compared.
    page.locator("[role=tab][data-tab=outputs]:not(.al-empty)").wait_for()
    page.locator(".al-status", has_text="are compared with eager").wait_for()
    assert page.get_attribute("data-state") == "running"
    assert re.fullmatch(r"◌ \d+ s · .* are compared with eager", page.locator(".al-status").inner_text())
    assert "1 not yet compared with eager" in page.locator(".al-sentence").inner_text()
    assert [row["name"] for row in next(iter(tables(page, "outputs").values()))] == ["z"]
    first = page.locator(".al-clock").first
    before = first.inner_text()
    lab.wait_until(
        "([selector, before]) => document.querySelector(selector)?.textContent !== before",
        [f"{DRAWN} .al-clock", before],
    )
    lab.shoot("running")
    assert lab.cell(1).locator(".jp-OutputArea-output", has_text="begun").count() == 1
    identifier = page.evaluate("element => (element.dataset.seen = element.dataset.identifier)")
    (lab.server.root / "go").touch()
    lab.wait_until_done()
    lab.cell(1).locator(f"{DRAWN}[data-state=verified]").wait_for()
    # It is the same element: nothing was drawn beside it or in its place.
    assert page.get_attribute("data-seen") == identifier
    assert page.locator(".al-now, [data-table=steps]").count() == 0
    shown = [output for output in lab.outputs(1) if "data" in output]
    assert len(shown) == 1
    assert shown[0]["data"]["application/vnd.aotlab.report.v1+json"]["summary"]["state"] == "verified"
    lab.run_cell(2)
    same = "[each[['frame', 'name', 'shape', 'relation']].values.tolist() for each in ({0}.outputs,)]"
    assert lab.execute(f"print({same.format('shown')} == {same.format('quiet')})") == "True\n"
    assert lab.execute("print(shown.verdict.split(', in ')[0] == quiet.verdict.split(', in ')[0])") == "True\n"
    # The machine of the tests is busy; alone, the frame is there after a tenth of a second.
    assert seconds < 5


def test_an_interrupt_while_the_page_shows_the_cell(lab: Lab, extension: None) -> None:
    """The stop button ends the cell: the page says after how many seconds and where, and no clock goes on."""
    write_notebook(lab.server.root / "stopped.ipynb", [SETUP, STEP.format("shown", "")])
    (lab.server.root / "go").unlink(missing_ok=True)
    lab.open("stopped.ipynb")
    lab.run_cell(0)
    lab.start_cell(1)
    page = lab.cell(1).locator(DRAWN)
    page.locator(".al-now", has_text="are compared with eager").wait_for()
    lab.interrupt()
    lab.wait_until_done()
    page.locator(".al-sentence", has_text="in the comparison with eager").wait_for()
    assert re.search(
        r"interrupted at line 3 after [\d.]+ m?s, in the comparison", page.locator(".al-sentence").inner_text()
    )
    assert page.locator(".al-now, .al-clock").count() == 0
    assert lab.execute("print('z' in globals())") == "False\n"
    lab.shoot("stopped")
    (lab.server.root / "go").touch()
    lab.run_cell(1)
    lab.cell(1).locator(f"{DRAWN}[data-state=verified]").wait_for()
