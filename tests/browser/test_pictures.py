"""All pictures of three cells: a GPT-2 training step, a diffusion U-Net, and a program with views and writes.

The cells run in another process, which writes their pages. Each page is opened at two widths, in both color schemes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aotlab.report.model import Report
from aotlab.report.text import data_size
from tests.browser.drawn import DRAWN, beyond, panel
from tests.browser.lab import Shared
from tests.browser.looks import hard_to_read

pytest.importorskip("transformers")
pytestmark = [pytest.mark.tier("full"), pytest.mark.timeout(900)]

GPT2 = """config = transformers.GPT2Config(n_layer=6, n_embd=48, n_head=4, vocab_size=100, n_positions=64,
    bos_token_id=0, eos_token_id=0)
gpt = transformers.GPT2LMHeadModel(config)
tokens = torch.randint(0, 100, (2, 16))
sgd = torch.optim.SGD(gpt.parameters(), lr=0.1)"""
UNET = """class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)
        self.time = nn.Linear(32, outputs)

    def forward(self, image, time):
        return (self.norm(self.first(image)) + self.time(time)[:, :, None, None]).relu()


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 32), nn.SiLU())
        self.down, self.middle, self.up = Block(1, 16), Block(16, 32), Block(48, 16)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, image, step):
        time = self.time(step[:, None])
        down = self.down(image, time)
        middle = self.middle(nn.functional.max_pool2d(down, 2), time)
        up = nn.functional.interpolate(middle, scale_factor=2)
        return self.out(self.up(torch.cat([down, up], 1), time))


unet = UNet()
image, noise, step = torch.randn(4, 1, 32, 32), torch.randn(4, 1, 32, 32), torch.rand(4)"""
MUTATE = """def mutate(x):
    x.add_(1)
    y = x.t()
    y[0].mul_(2)
    return y"""
#: The cells under the magic by the names of their reports, with the code before and after each.
CELLS = {
    "gpt2": (GPT2, "sgd.zero_grad()\nloss = gpt(tokens, labels=tokens).loss\nloss.backward()\nsgd.step()", ""),
    "diffusion": (
        UNET,
        "noisy = image + noise * step[:, None, None, None]\n"
        "loss = nn.functional.mse_loss(unet(noisy, step), noise)\nloss.backward()",
        "",
    ),
    "alias": ("", MUTATE, "x = torch.arange(6.0).view(2, 3)\ny, z = mutate(x), mutate(torch.zeros(4, 4))"),
}
#: The tabs with pictures, and a selector of an element of each picture.
PICTURES = {
    "graph": ".al-graph-view .al-graph-shape",
    "storages": ".al-player input",
    "memory": "figure.al-memory svg",
    "timing": ".al-phase",
}
#: Runs the cells, and writes each page and the report's tables into the folder.
SCRIPT = """
import json, sys
from pathlib import Path
from IPython.core.interactiveshell import InteractiveShell
from tests.browser.test_pictures import CELLS
shell, folder = InteractiveShell.instance(), Path(sys.argv[1])
sources = ["%load_ext aotlab\\nimport torch, transformers\\nfrom torch import nn\\ntorch.manual_seed(0)"]
for name, (before, cell, after) in CELLS.items():
    sources += [before, f"%%aotcompile -o {name} --backend eager\\n{cell}", after]
for source in sources:
    shell.run_cell(source, store_history=True).raise_error()
for name in CELLS:
    report = shell.user_ns[name]
    report.to_html(folder / f"{name}.html")
    (folder / f"{name}.json").write_text(report.report().to_json())
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the cells in another process, and return the folder with their pages."""
    folder = tmp_path_factory.mktemp("pictures")
    ran = subprocess.run([sys.executable, "-c", SCRIPT, folder], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


_LATER = [pytest.param(each, marks=pytest.mark.tier("long")) for each in ((1000, "dark"), (1600, "light"))]


@pytest.fixture(params=[(1000, "light"), (1600, "dark"), *_LATER], ids=str)
def page(request: pytest.FixtureRequest, shared: Shared) -> Iterator[Any]:
    """Open an empty page of one width and one color scheme. It must not complain."""
    width, scheme = request.param
    context = shared.browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert complaints == []


@pytest.mark.parametrize("name", CELLS)
def test_every_picture_is_drawn_and_can_be_read(page: Any, pages: Path, name: str, shared: Shared) -> None:
    """Each picture has content, lies within the page, and its texts can be read."""
    page.goto((pages / f"{name}.html").as_uri())
    report = page.locator(DRAWN)
    cut = []
    for tab, drawn in PICTURES.items():
        content = panel(report, tab)
        content.locator(drawn).first.wait_for()
        cut += [f"{tab}: {each}" for each in (*beyond(report), *hard_to_read(report))]
        if os.environ.get("AOTLAB_ARTEFACTS"):
            page.screenshot(path=shared.artefacts / f"pictures-{name}-{tab}-{page.viewport_size['width']}.png")
    assert "\n".join(cut) == ""


def test_the_pictures_agree_with_the_tables(pages: Path, shared: Shared) -> None:
    """The storage map has the steps of the table, Memory has the peak, and the time line has a mark per recompile."""
    context = shared.browser.new_context(viewport={"width": 1400, "height": 1000})
    page = context.new_page()
    for name in CELLS:
        found = Report.from_json((pages / f"{name}.json").read_text(encoding="utf-8"))
        page.goto((pages / f"{name}.html").as_uri())
        report = page.locator(DRAWN)
        content = panel(report, "storages")
        for button in content.locator("button[data-action=all]").all():
            button.click()
        longest = [int(each.get_attribute("max") or 0) for each in content.locator(".al-player input").all()]
        steps = found.steps.groupby(["frame", "graph"], sort=False).size()
        assert sorted(longest) == sorted(steps.tolist())
        assert len(steps) == sum(len(frame.graphs) for frame in found.frames)
        peak = found.memory_curve.groupby(["frame", "graph"])["total_bytes"].max().max()
        assert f"The peak is {data_size(int(peak))}" in panel(report, "memory").inner_text()
        moments = panel(report, "timing").locator("[data-moment]")
        assert moments.count() == len(found.recompiles) + len(found.graph_breaks)
    context.close()
