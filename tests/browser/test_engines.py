"""A cell with ``--engine both`` in JupyterLab: two engines side by side."""

from __future__ import annotations

import pytest

from tests.browser.drawn import DRAWN
from tests.browser.lab import THEMES, Lab, write_notebook
from tests.browser.looks import hard_to_read

pytestmark = pytest.mark.tier("full")

SETUP = """%load_ext aotlab
import torch
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
x, state = torch.ones(4, 8), torch.zeros(3)"""
STEP = """%%aotcompile --engine both --backend eager -o report
state.add_(1)
loss = net(x).square().mean() + state.sum()
view = x.t()
loss.backward()"""


@pytest.mark.parametrize("theme", [THEMES[0], pytest.param(THEMES[1], marks=pytest.mark.tier("long"))])
def test_two_engines(lab: Lab, extension: None, theme: str) -> None:
    """The tab Engines has the rows of `report.engines`, the reopened notebook too; upstream's graph can be chosen."""
    file = f"engines-{theme.replace(' ', '-')}.ipynb"
    write_notebook(lab.server.root / file, [SETUP, STEP])
    lab.theme(theme)
    lab.open(file)
    lab.run_all()
    lab.cell(1).locator(f"{DRAWN}[data-live=true]").wait_for()
    facts = lab.execute(
        "for row in report.engines.itertuples():\n"
        "    same = {True: 'yes', False: 'differs'}.get(row.same, '')\n"
        "    print(row.subject, row.aotlab, row.upstream, same, sep='|')"
    )
    expected = sorted(facts.splitlines())
    assert "state|data: mutated out of graph|data: mutated in graph|differs" in expected
    for live in ("true", "false"):
        page = lab.cell(1).locator(f"{DRAWN}[data-live={live}]")
        page.wait_for()
        page.locator("[data-chip=engines]").click()
        columns = ("subject", "aotlab", "upstream", "same")
        rows = page.locator("[data-panel=engines] tbody tr").all()
        drawn = ["|".join(row.locator(f"[data-column={name}]").inner_text() for name in columns) for row in rows]
        assert sorted(drawn) == expected
        lab.shoot(f"engines-{theme}-{live}", page)
        assert hard_to_read(page) == []
        page.locator("[data-key=graphs]").select_option("lines 2–4 [upstream]/0")
        page.locator("[data-tab=inputs]").click()
        first = page.locator("[data-panel=inputs] tr[data-frame]").first
        assert first.get_attribute("data-frame") == "lines 2–4 [upstream]"
        if live == "true":
            lab.save()
            lab.shut_down_kernel()
            lab.reload()
            lab.open(file, kernel=False)
