"""The code around compiled graphs never waits for a device: guards, writes, saved values, the backward.

The profiler names each op of a call; those that would copy from a GPU to the host are refused. The source that Inductor
generates for a card is searched for such calls.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import aotlab
from aotlab.maintenance.acceptance import waiting_is_an_error
from aotlab.rehearse import RehearsalBackend
from aotlab.runtime.prologue import Prologue
from tests.engine_helpers import behind

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]
#: Calls in generated source that would wait for the device or read a value.
WAITS = r"\.item\(|\.tolist\(|\.cpu\(|\.numpy\(|nonzero|torch\.equal|synchronize|wait_|\.to\("

Made = tuple[Callable[..., Any], tuple[Any, ...]]


def leaf(device: torch.device, *shape: int) -> Tensor:
    """Make a leaf that requires grad."""
    return torch.randn(shape, device=device, requires_grad=True)


def mutation(device: torch.device) -> Made:
    """Write arguments, one through a view."""

    def step(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        x.mul_(2)
        y[:, 1:3].add_(x)
        return (x @ w).sum(1) + y.sum(1)

    return step, (torch.randn(6, 2, device=device), torch.randn(6, 5, device=device), leaf(device, 2, 2))


def views(device: torch.device) -> Made:
    """Write one of several arguments that share memory, and return views."""
    base = torch.randn(8, 10, device=device)

    def step(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        x[0].add_(1)
        return x.sin().t(), y[1:] * w, w.view(-1)

    return step, (base[:4], base[2:], leaf(device, 10))


def training(device: torch.device) -> Made:
    """Train a network with batch norm."""
    model = nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.GELU(), nn.Linear(20, 5)).to(device)
    labels = torch.randint(5, (16,), device=device)
    return lambda x: functional.cross_entropy(model(x), labels), (torch.randn(16, 12, device=device),)


def dropout(device: torch.device) -> Made:
    """Draw in the forward."""
    return lambda x: functional.dropout(x, 0.4) * 2, (leaf(device, 64, 4),)


def saved_values(device: torch.device) -> Made:
    """Save a mask, an input and results; a scalar on the CPU is among the inputs."""

    def step(x: Tensor, scale: Tensor) -> Tensor:
        y = x.exp() * scale
        return torch.where(x > 0, y, y.sigmoid()).cumsum(0)

    return step, (leaf(device, 9, 5), torch.tensor(1.5))


PROGRAMS = [mutation, views, training, dropout, saved_values]


def run(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Call it, and backward."""
    results = function(*args)
    results = [results] if isinstance(results, Tensor) else results
    wanted = [each for each in results if each.requires_grad]
    torch.autograd.backward(wanted, [torch.ones_like(each) for each in wanted])


def warm(make: Callable[[torch.device], Made], device: torch.device) -> tuple[Any, tuple[Any, ...]]:
    """Compile a program by its first calls."""
    function, args = make(device)
    compiled = aotlab.compile(function, backend="eager", fullgraph=True)
    for _ in range(2):
        run(compiled, args)
    return compiled, args


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_no_value_is_asked_for(make: Callable[[torch.device], Made], device: torch.device) -> None:
    """A call that was compiled before, and its backward; nor does the generated source look as if it would."""
    compiled, args = warm(make, device)
    with aotlab.Report.record() as recording, waiting_is_an_error(device):
        run(compiled, args)
    assert recording.report().calls["compiled"].tolist() == [True]
    (entry,) = behind(compiled).entries
    assert re.findall(WAITS, entry.source) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a rehearsal is for machines without a GPU")
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_none_by_what_inductor_writes(make: Callable[[torch.device], Made]) -> None:
    """The lines that launch kernels on a card, forward and backward."""
    pytest.importorskip("triton", reason="needs Triton: pip install 'aotlab[rehearse]'")
    function, args = make(CPU)
    with aotlab.Report.record() as recording:
        run(aotlab.compile(function, backend=RehearsalBackend("h100"), fullgraph=True), args)
    graphs = recording.report().frames[0].graphs
    codes = [code.text for graph in graphs for each in graph.stages for code in each.codes]
    launching = [text.partition("def call(self, args):")[2].partition("\nrunner = ")[0] for text in codes]
    found = [text for text in launching if text]
    assert len(found) == 2
    assert all("cuda" in text for text in found)
    assert [re.findall(WAITS, text) for text in found] == [[], []]


@pytest.mark.parametrize("line", ["{}.sum().item()", "bool({}.any())"], ids=["item", "bool"])
def test_one_that_is_asked_for_is_seen(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """In the prologue."""
    write = Prologue.write

    def asking(self: Prologue) -> None:
        write(self)
        self.w.add(line.format(self.draft.expressions[0]))

    monkeypatch.setattr(Prologue, "write", asking)
    compiled, args = warm(dropout, CPU)
    with pytest.raises(AssertionError, match="would make the host wait for a GPU: aten::"), waiting_is_an_error(CPU):
        run(compiled, args)
