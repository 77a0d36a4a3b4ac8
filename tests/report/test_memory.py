"""The memory over time: the modelled lifetimes, their agreement with the measured memory, the tables and the figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aotlab
from aotlab.backends.base import KernelSource
from aotlab.bench import memory_curve
from aotlab.report.cut import cleaned, fitting
from aotlab.report.inductor_nodes import inductor_nodes
from aotlab.report.memory import below
from aotlab.report.model import MEMORY_KINDS, Memory, MemoryCurve, Report

FLOAT = 4


def recorded(function: Callable[..., Any], *inputs: Tensor, backward: bool = True) -> tuple[Report, Memory]:
    """Compile a function with the eager backend, run a step of it, and return its report and its modelled memory."""
    with Report.record() as recording:
        result = aotlab.compile(function, backend="eager")(*inputs)
        if backward:
            result.backward()
    report = recording.report()
    memory = report.frames[0].graphs[0].memory
    assert memory is not None
    return report, memory


def test_lifetimes() -> None:
    """Each storage has its kind, is alive from its op to its last use, and a view keeps its base alive."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu().t().exp().sum()

    x, w = torch.ones(8, 4), torch.ones(4, 16, requires_grad=True)
    _, memory = recorded(step, x, w)
    rows = {(each.name, each.kind, each.nbytes // FLOAT) for each in memory.tensors()}
    product = 8 * 16
    assert {("primals_1", "inputs", 32), ("primals_2", "inputs", 64), ("sum_1", "outputs", 1)} <= rows
    assert ("relu", "saved", product) in rows
    assert ("mm", "temporary", product) in rows
    of = {each.name: each for each in memory.tensors()}
    # `t` is a view of `relu`, and makes no step. `mm` is dead when `exp` runs.
    assert (of["mm"].begin, of["mm"].end, of["relu"].begin) == (1, 2, 2)
    assert of["exp"].begin == 3
    assert of["sum_1"].end == memory.steps - 1
    gradients = [each for each in memory.tensors() if each.kind == "gradients"]
    assert sorted(each.nbytes // FLOAT for each in gradients) == [1, 64]
    assert memory.totals()[-1] == FLOAT * (32 + 64 + 1 + 1 + 64)
    assert memory.totals()[memory.forward_steps - 1] == sum(
        each.nbytes for each in memory.tensors() if each.kind in ("inputs", "outputs", "saved")
    )


def test_mutated_input() -> None:
    """The new values of a mutated input are dead after the copy into the input; views of the input take no memory."""

    def step(x: Tensor) -> None:
        x.add_(1)
        y = x.t()
        y[0].mul_(2)

    _, memory = recorded(step, torch.ones(5, 3), backward=False)
    assert memory.forward_steps == memory.steps
    assert [each.kind for each in memory.tensors()] == ["inputs", "temporary", "temporary", "temporary"]
    assert memory.totals() == [FLOAT * n for n in (15, 30, 15 + 15 + 5, 15 + 15 + 5 + 15, 15)]


def test_written_back_value() -> None:
    """In training, the epilogue copies the new value of an input, and the backward reads the input in its place."""

    def step(x: Tensor, w: Tensor) -> Tensor:
        x.add_(1)
        return (x @ w).sum()

    _, memory = recorded(step, torch.ones(8, 4), torch.ones(4, 16, requires_grad=True))
    (new_value,) = (each for each in memory.tensors() if each.name == "add")
    assert (new_value.kind, new_value.end) == ("temporary", memory.forward_steps - 1)
    assert "saved" not in {each.kind for each in memory.tensors()}


class Attention(nn.Module):
    """A block of a transformer, with a norm that has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.mix = nn.Linear(32, 96)
        self.out = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.5), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).view(4, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(4, 16, 32)
        result: Tensor = (x + self.out(x)).square().mean()
        return result


class Convolutions(nn.Module):
    """A small network for images with a connection that skips a level."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.low = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2))
        self.up = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        result: Tensor = self.up(torch.cat([x, self.low(x)], 1)).sigmoid().mean()
        return result


@pytest.mark.parametrize(("model", "shape"), [(Attention, (4, 16, 32)), (Convolutions, (2, 3, 32, 32))])
def test_model_agrees_with_the_measured_memory(model: type[nn.Module], shape: tuple[int, ...]) -> None:
    """At the peak, the model differs from the allocator by at most 5 %, parameters and inputs not counted."""
    torch.manual_seed(0)
    module, x = model(), torch.randn(shape)
    compiled = aotlab.compile(module, backend="eager", frontend="dynamo")
    with Report.record() as recording:
        compiled(x).backward()
    module.zero_grad()
    losses: list[Tensor] = []
    parts = ("forward", lambda: losses.append(compiled(x))), ("backward", lambda: losses[0].backward())
    measured = memory_curve(parts)
    memory = recording.report().frames[0].graphs[0].memory
    assert memory is not None
    assert max(memory.totals()) - memory.base_bytes == pytest.approx(max(map(max, measured.values())), rel=0.05)
    saved = memory.totals()[memory.forward_steps - 1] - memory.base_bytes
    assert saved == pytest.approx(measured["forward"][-1], rel=0.05)


def test_tables_and_figure() -> None:
    """The tables, the record and the figure agree, and survive a file. A figure of nothing says so."""
    weight = torch.ones(64, 64, requires_grad=True)
    report, memory = recorded(lambda x, w: (x @ w).relu().sum(), torch.ones(8, 64), weight)
    frame = report.frames[0].name
    report = report.with_memory_curves(
        [MemoryCurve(engine="eager", forward=(8, 4), backward=(6,), frame=frame, graph=0)]
    )
    assert Report.from_json(report.to_json()) == report
    curve = report.memory_curve
    modelled = curve[curve["source"] == "modelled"]
    assert modelled["total_bytes"].tolist() == memory.totals()
    kinds = modelled[[f"{kind}_bytes" for kind in MEMORY_KINDS]]
    assert kinds.sum(axis=1).tolist() == memory.totals()
    assert curve[curve["source"] == "measured"]["total_bytes"].tolist() == [8, 4, 6]
    at_peak = report.memory[report.memory["at_peak"]]
    assert at_peak["nbytes"].sum() == modelled["total_bytes"].max()
    (panel,) = report.plot_memory().axes
    assert len(panel.lines) == 3  # the measured curve, the peak, and the border between forward and backward
    empty = Report(environment=report.environment).plot_memory()
    assert "unknown" in empty.axes[0].texts[0].get_text()


def test_a_long_record_is_left_out_of_a_cut_report() -> None:
    """With some of its storages, the curve would be wrong. A note says that the record is missing."""
    report, _ = recorded(lambda x: x.sin().sum(), torch.ones(8, requires_grad=True))
    graph = report.frames[0].graphs[0]
    count = 5000
    columns: dict[str, Any] = dict.fromkeys(("nbytes", "begins", "ends", "lines", "modules"), (0,) * count)
    memory = Memory(steps=1, names=("mul",) * count, kinds=("saved",) * count, module_table=("",), **columns)
    frame = replace(report.frames[0], graphs=(replace(graph, memory=memory),))
    small = fitting(replace(report, frames=(frame,)), lambda each: len(each.to_json()) < 100_000)
    assert small.frames[0].graphs[0].memory is None
    assert "in Memory 0 of 5,000 rows" in small.notes[-1]
    assert small.frames[0].graphs[0].saved == cleaned(graph.saved)


CODE = """
def call(args):
    primals_1, primals_2 = args
    args.clear()
    assert_size_stride(primals_1, (s7, 4), (4, 1), 'input')
    buf0 = empty_strided_cpu((8, 16), (16, 1), torch.float32)
    # [Provenance debug handles] extern_kernels.mm:1
    extern_kernels.mm(primals_1, primals_2, out=buf0)
    buf1 = buf0; del buf0  # reuse
    cpp_fused_relu_0(buf1)
    buf2 = torch.ops.aten.sort.default(buf1)
    buf3 = buf2[0]
    assert_size_stride(buf3, (8, 16), (16, 1), 'torch.ops.aten.sort.default')
    buf5 = empty_strided_cpu((2*s7, ), (1, ), torch.float32)
    cpp_fused_sum_1(buf3, buf5)
    return (buf5, reinterpret_tensor(buf1, (16, 8), (1, 16), 0), )
"""


def test_generated_code() -> None:
    """The model reads buffers, reuses, views and results of extern ops, with their lines, from Inductor's code."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).relu().sort().values.sum()

    compiled = aotlab.compile(function, backend="eager")
    with Report.record():
        compiled(torch.ones(8, 4), torch.ones(4, 16, requires_grad=True))
    graph = compiled.entries[0].records.compile.graphs[0]
    call = "extern_kernels.mm(primals_1, primals_2, out=buf0)"
    kernels = (
        KernelSource(name="cpp_fused_relu_0", language="c++", source="", nodes=("relu",)),
        KernelSource(name="extern_kernels.mm", language="extern", source=call, nodes=("mm",)),
    )
    nodes = {each.name: each for each in inductor_nodes(replace(graph, wrapper=CODE, kernels=kernels))}
    sizes = {name: nbytes for name, each in nodes.items() for _, nbytes in each.storages}
    assert sizes == {"primals_1": 128, "primals_2": 256, "buf0": 512, "buf1": 0, "buf3": 512, "buf5": 64}
    assert [number for number, _ in nodes["buf0"].storages] == [number for number, _ in nodes["buf1"].storages]
    assert nodes["output"].inputs == ("buf5", "buf1")
    assert nodes["buf0"].line is not None
    assert "x @ w" in nodes["buf0"].line.code
    assert inductor_nodes(replace(graph, wrapper="no code")) == ()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("gpt.transformer.h.0", "transformer.h.0"),
        ("transformer.h.0", "transformer.h.0"),
        ("gpt.lm_head", "lm_head"),
        ("other.h.0", "other.h.0"),
        ("", ""),
    ],
)
def test_parameters_have_the_paths_of_nodes(path: str, expected: str) -> None:
    """If Dynamo captured a part of a module, the path of a parameter begins where the paths of nodes begin."""
    assert below(path, {"transformer", "lm_head"}) == expected
