"""The command ``aotlab bench cells``: the first run of a cell with each frontend, beside eager and `torch.compile`.

Each program is a cell with a step of a training. All forms of a cell run in one process, one after the other, several
times. Before each run, everything that was compiled is dropped, and the setup of the program runs again. So each run is
cold, but torch, Dynamo and aotlab are imported already. The time is the CPU time of the process, in seconds, because
other programs may use the machine, too. The backend runs torch's own kernels, so the capture, the compilation, the
comparison with eager and the report take nearly all of the time.

With ``--warm``, the later runs of the cells are timed, each cell in a kernel as JupyterLab starts it.
"""

from __future__ import annotations

import argparse
import math
import queue
import statistics
import sys
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from jupyter_client.manager import start_new_kernel
from traitlets.config import Config

from aotlab.maintenance.bench.suite import machine
from aotlab.notebook.extension import load_ipython_extension, unload_ipython_extension
from aotlab.report import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class CellProgram:
    """A program whose cell is timed.

    Attributes
    ----------
    name
        A name for the tables.
    setup, cell
        The text of the cell before the timed cell, and of the timed cell.
    stock
        The statements with which a user lets stock `torch.compile` capture the work.
    stock_cell
        The cell after ``stock``, if it is another text than ``cell``.
    """

    name: str
    setup: str
    cell: str
    stock: str = "model = torch.compile(model, backend='aot_eager')"
    stock_cell: str = ""


_HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\ntorch.manual_seed(0)\n"
_SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
_STEP = "optimizer.zero_grad()\nloss = {}\nloss.backward()\noptimizer.step()\n"

PROGRAMS = (
    CellProgram(
        name="GPT-2",
        setup="""
from transformers import GPT2Config, GPT2LMHeadModel
model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=96, n_head=4, vocab_size=512))
tokens = torch.randint(512, (2, 64))
"""
        + _SGD,
        cell=_STEP.format("model(tokens, labels=tokens).loss"),
    ),
    CellProgram(
        name="ViT",
        setup="""
from transformers import ViTConfig, ViTForImageClassification
model = ViTForImageClassification(ViTConfig(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8,
    num_labels=10))
images, labels = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
"""
        + _SGD,
        cell=_STEP.format("F.cross_entropy(model(images).logits, labels)"),
    ),
    CellProgram(
        name="LSTM",
        setup="""
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(100, 32), nn.LSTM(32, 32, 2, batch_first=True), nn.Linear(32, 9)
    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])
model = Tagger()
tokens, tags = torch.randint(100, (4, 20)), torch.randint(9, (4, 20))
"""
        + _SGD,
        cell=_STEP.format("F.cross_entropy(model(tokens).flatten(0, 1), tags.flatten())"),
    ),
    CellProgram(
        name="U-Net",
        setup="""
def double(inner, outer):
    layers = []
    for width in (inner, outer):
        layers += [nn.Conv2d(width, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)
class UNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.second = double(3, width), double(width, 2 * width)
        self.bottom, self.join_second = double(2 * width, 4 * width), double(4 * width, 2 * width)
        self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.up_first = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join_first, self.head = double(2 * width, width), nn.Conv2d(width, 4, 1)
    def forward(self, images):
        first = self.first(images)
        second = self.second(F.max_pool2d(first, 2))
        up = self.join_second(torch.cat([self.up_second(self.bottom(F.max_pool2d(second, 2))), second], 1))
        return self.head(self.join_first(torch.cat([self.up_first(up), first], 1)))
model = UNet()
images, labels = torch.randn(2, 3, 16, 16), torch.randint(4, (2, 16, 16))
"""
        + _SGD,
        cell=_STEP.format("F.cross_entropy(model(images), labels)"),
    ),
    CellProgram(
        name="PINN",
        setup="""
model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
points = torch.rand(100, 2, requires_grad=True)
def residual(flow, points):
    slopes, = torch.autograd.grad(flow.sum(), points, create_graph=True)
    bends, = torch.autograd.grad(slopes[:, 0].sum(), points, create_graph=True)
    return slopes[:, 1] + flow[:, 0] * slopes[:, 0] - 0.01 * bends[:, 0]
"""
        + _SGD,
        cell=_STEP.format("residual(model(points), points).square().mean()"),
    ),
    CellProgram(
        name="aliases",
        setup="""
table, weight = torch.rand(8, 8), torch.rand(8, 8, requires_grad=True)
def step():
    top, rest = table[:1], table[1:]
    rest.mul_(2)
    flat = table.view(-1)
    flat[::2].add_(top.sum())
    return top, rest, flat, (table * weight).sum()
""",
        cell="""
top, rest = table[:1], table[1:]
rest.mul_(2)
flat = table.view(-1)
flat[::2].add_(top.sum())
total = (table * weight).sum()
total.backward()
""",
        stock="step = torch.compile(step, backend='aot_eager')",
        stock_cell="top, rest, flat, total = step()\ntotal.backward()\n",
    ),
)

#: The forms of a cell that are compared with stock `torch.compile`, with the options of the magic.
FORMS: Mapping[str, str] = {
    "dynamo, not verified": "--frontend dynamo --no-verify",
    "auto, not verified": "--no-verify",
    "dynamo": "--frontend dynamo",
    "auto": "",
}
#: The number of later runs of which the median is taken, and of earlier runs that are not timed.
_WARM_RUNS, _COLD_RUNS = 15, 3


def seconds(program: CellProgram, form: str) -> tuple[float, Report | None]:
    """Run a cell cold in a new shell; return the CPU time of the run in seconds, and the report of a form of ``FORMS``.

    ``form`` is ``"eager"``, ``"stock"``, or a key of ``FORMS``. If stock `torch.compile` raises, the time is NaN.
    """
    torch.compiler.reset()
    config = Config(HistoryManager={"enabled": False})
    main = types.ModuleType("__main__")
    shell: Any = InteractiveShell(user_module=main, config=config)  # type: ignore[no-untyped-call]  # IPython's
    load_ipython_extension(shell)
    text = program.cell
    if form in FORMS:
        text = f"%%aotcompile -o report --backend eager {FORMS[form]}\n{program.cell}"
    elif form == "stock":
        text = program.stock_cell or program.cell
    try:
        shell.run_cell(_HEAD + program.setup).raise_error()
        if form == "stock":
            shell.run_cell(program.stock).raise_error()
        began = time.process_time()
        with capture_output():
            result = shell.run_cell(text)
        spent = time.process_time() - began
        if form == "stock" and result.error_in_exec is not None:
            return math.nan, None
        result.raise_error()
        return spent, shell.user_ns["report"].report() if form in FORMS else None
    finally:
        unload_ipython_extension(shell)


def warm_seconds(program: CellProgram) -> dict[str, float]:
    """Run a cell many times in a kernel; return the median wall time of the later runs, in seconds.

    The forms are ``"eager"``, ``"stock"`` and ``"auto"``. The time of a run ends when the kernel replies that it is
    ready for the next cell.
    """
    manager, client = start_new_kernel(kernel_name="python3")
    try:

        def run(text: str) -> float:
            began = time.perf_counter()
            number = client.execute(text)
            while True:
                reply = client.get_shell_msg(timeout=600)
                if reply["parent_header"].get("msg_id") == number:
                    break
            took = time.perf_counter() - began
            with suppress(queue.Empty):  # wait until the report has been shown
                while True:
                    client.get_iopub_msg(timeout=0.5)
            return took if reply["content"]["status"] == "ok" else math.nan

        def median(text: str) -> float:
            return statistics.median([run(text) for _ in range(_COLD_RUNS + _WARM_RUNS)][_COLD_RUNS:])

        run("%load_ext aotlab")
        run(_HEAD + program.setup)
        found = {"eager": median(program.cell), "auto": median(f"%%aotcompile --backend eager\n{program.cell}")}
        run(_HEAD + program.setup)
        run(program.stock)
        return {**found, "stock": median(program.stock_cell or program.cell)}
    finally:
        manager.shutdown_kernel(now=True)


def main(argv: Sequence[str], out: TextIO | None = None) -> int:
    """Run ``aotlab bench cells ARGV``."""
    parser = argparse.ArgumentParser(
        prog="aotlab bench cells", description="Time the first run of cells with each frontend, beside torch.compile."
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each form runs (default: 3)")
    parser.add_argument("--warm", action="store_true", help="time the later runs in a kernel, not the first ones")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[each.name for each in PROGRAMS], help="programs")
    options = parser.parse_args(argv)
    stream = sys.stdout if out is None else out
    programs = [each for each in PROGRAMS if options.only is None or each.name in options.only]
    where = machine(torch.device("cpu"))
    print("\n".join(f"{key:>7}: {value}" for key, value in where.items()), file=stream)
    if options.warm:
        print("\nLater runs of a cell, median wall time until the kernel is ready for the next cell\n", file=stream)
        print("| cell | eager, ms | stock, ms | auto / stock | auto / eager |", file=stream)
        print("| --- | ---: | ---: | ---: | ---: |", file=stream)
        for program in programs:
            found = warm_seconds(program)
            eager, stock, auto = (found[form] for form in ("eager", "stock", "auto"))
            row = (
                program.name,
                f"{eager * 1e3:.1f}",
                f"{stock * 1e3:.1f}",
                f"{auto / stock:.2f}",
                f"{auto / eager:.2f}",
            )
            print(f"| {' | '.join(row)} |".replace("nan", "–"), file=stream, flush=True)
        return 0
    for form in ("eager", "stock", *FORMS):  # import the modules that the forms need
        seconds(PROGRAMS[-1], form)
    print(
        "\nCPU seconds of eager and of stock torch.compile; the forms divided by the latter, median (range)\n",
        file=stream,
    )
    print(f"| cell | eager, s | stock, s | {' | '.join(FORMS)} | auto captured by |", file=stream)
    print(f"| --- | {' | '.join('---:' for _ in ('eager', 'stock', *FORMS))} | --- |", file=stream)
    for program in programs:
        print(_row(program, options.rounds), file=stream, flush=True)
    return 0


def _row(program: CellProgram, rounds: int) -> str:
    times: dict[str, list[float]] = {form: [] for form in ("eager", "stock", *FORMS)}
    report = None
    for _ in range(rounds):
        for form, spent in times.items():
            took, report = seconds(program, form)
            spent.append(took)
    assert report is not None  # of the last form
    by = sorted({graph.frontend for frame in report.frames for graph in frame.graphs})
    cells = [program.name, *(f"{statistics.median(times[form]):.2f}" for form in ("eager", "stock"))]
    for form in FORMS:
        ratios = [ours / stock for ours, stock in zip(times[form], times["stock"], strict=True)]
        middle = statistics.median(ratios)
        cells.append("–" if math.isnan(middle) else f"{middle:.2f} ({min(ratios):.2f}–{max(ratios):.2f})")
    return f"| {' | '.join([*cells, ', '.join(by)]).replace('nan', '–')} |"
