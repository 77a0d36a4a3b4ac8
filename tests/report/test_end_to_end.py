"""Real programs through the real engine on the eager backend; the tables against truth derived by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pandas as pd
import pytest
import torch
from torch import nn

import aotlab
from aotlab.backends.base import CompileRequest, EagerBackend
from aotlab.errors import EscapeError
from aotlab.report import Report
from aotlab.report.collect import Recording
from aotlab.report.counts import summary
from tests.engine_helpers import refusing

HERE = Path(__file__).name


def mutate_and_alias(x: torch.Tensor, y: torch.Tensor, again: torch.Tensor, scale: float) -> tuple[Any, ...]:
    """Write ``x``; return a view of it, ``y`` itself, two views of one new tensor, a new tensor, a number."""
    x.mul_(scale)
    h = x + y
    return x.t(), y, h[0], h[1], h.sum(), 7


class Net(nn.Module):
    """A linear layer, a batch norm (whose buffers are mutated), a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(x)))  # the layer


def rows(table: pd.DataFrame, *columns: str) -> list[list[Any]]:
    """Return the columns as plain lists, with None for missing values."""
    return [[None if value is pd.NA else value for value in row] for row in table[list(columns)].values.tolist()]


@pytest.fixture(scope="module")
def aliasing() -> Recording:
    """Record four calls of the mutating function: two alike, one of another size, one like the first."""
    compiled = aotlab.compile(mutate_and_alias, backend="eager")
    with Report.record("aliasing") as recording:
        for size in (2, 2, 5, 2):
            x, y = torch.ones(size, 3), torch.arange(3.0)
            compiled(x, y, x, 2.0)
    return recording


@pytest.fixture(scope="module")
def training() -> Recording:
    """Record one training step of the net."""
    torch.manual_seed(0)
    net = Net()
    compiled: Callable[[torch.Tensor], torch.Tensor] = aotlab.compile(net, backend="eager")
    with Report.record("training") as recording:
        compiled(torch.randn(5, 4)).pow(2).mean().backward()
    return recording


def test_inputs_of_the_mutating_function(aliasing: Recording) -> None:
    """``x`` is mutated and ``again`` is the same tensor; ``y`` is not; 2 × 3 floats are 24 bytes."""
    table = aliasing.inputs.query("graph == 0")
    assert rows(table, "name", "kind", "shape", "nbytes", "storage", "duplicate_of", "mutates_data", "value") == [
        ["x", "input", "[2, 3]", 24, 0, None, True, None],
        ["y", "input", "[3]", 12, 1, None, False, None],
        ["again", "input", "[2, 3]", 24, 0, "x", True, None],
        ["scale", "python", None, None, None, None, None, "2.0"],
    ]
    assert table.mutates_metadata.dropna().tolist() == [False] * 3
    assert table.mutates_storage.dropna().tolist() == [False] * 3


def test_outputs_of_the_mutating_function(aliasing: Recording) -> None:
    """``x.t()`` lives in ``x``'s storage, ``y`` in its own, ``h[0]`` and ``h[1]`` share one, the sum is new."""
    table = aliasing.outputs.query("graph == 0")
    assert rows(table, "name", "output_type", "base", "shape", "stride", "byte_offset", "storage") == [
        ["out[0]", "alias of input", "x", "[3, 2]", "[1, 3]", 0, 0],
        ["out[1]", "is input", "y", "[3]", "[1]", 0, 1],
        ["out[2]", "alias of intermediate, base saved as output", "intermediate 0", "[3]", "[1]", 0, 2],
        ["out[3]", "alias of intermediate, base already saved", "intermediate 0", "[3]", "[1]", 12, 2],
        ["out[4]", "non-alias", None, "[]", "[]", 0, 3],
        ["out[5]", "non-alias", None, None, None, None, None],
    ]
    assert table.views.dropna().tolist() == ["x.t()", "intermediate_0.select(0, 0)", "intermediate_0.select(0, 1)"]
    assert table.raw_type.tolist() == ["torch.Tensor"] * 5 + ["int"]


def test_storages_of_the_mutating_function(aliasing: Recording) -> None:
    """Who lives where, in bytes."""
    table = aliasing.storages.query("graph == 0")
    assert rows(table, "storage", "owner", "nbytes", "tensor", "start", "stop", "mutated") == [
        [0, "input", 24, "x", 0, 24, True],
        [0, "input", 24, "again", 0, 24, True],
        [0, "input", 24, "out[0]", 0, 24, False],
        [1, "input", 12, "y", 0, 12, False],
        [1, "input", 12, "out[1]", 0, 12, False],
        [2, "intermediate", 24, "out[2]", 0, 12, False],
        [2, "intermediate", 24, "out[3]", 12, 24, False],
        [3, "output", 4, "out[4]", 0, 4, False],
    ]


def shift(x: torch.Tensor) -> torch.Tensor:
    """Write the input and return a view of it."""
    x.add_(1)
    return x.t()


def double_a_row(y: torch.Tensor) -> torch.Tensor:
    """Write a view of the input and return new memory."""
    y[0].mul_(2)
    return y * 2


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return new memory."""
    return a + b


@pytest.mark.parametrize("how", ["direct", "behind Dynamo"])
def test_one_storage_has_one_number_in_all_graphs(how: str, fresh_dynamo: None) -> None:
    """An input, its view, and a result that a later graph takes keep their numbers; new memory gets a new number."""
    by_dynamo = torch.compile(backend="aotlab", options={"compiler": "eager"})
    compiled = aotlab.compile(backend="eager") if how == "direct" else by_dynamo
    first, second, third = map(compiled, (shift, double_a_row, add))
    x = torch.ones(3, 4)
    with Report.record() as recording:
        view = first(x)
        made = second(view)
        total = third(view, made)
        del made, total
        third(torch.ones(2, 2), torch.ones(2, 2))  # these may lie where the deleted tensors did
        third(x.t()[:, 0], torch.ones(4))
    tables = [(recording.inputs, "input"), (recording.outputs, "output")]
    found = {
        (row.frame, row.graph, role, row.index): row.storage for table, role in tables for row in table.itertuples()
    }
    assert found == {
        ("shift", 0, "input", 0): 0,
        ("shift", 0, "output", 0): 0,
        ("double_a_row", 0, "input", 0): 0,
        ("double_a_row", 0, "output", 0): 1,
        ("add", 0, "input", 0): 0,
        ("add", 0, "input", 1): 1,
        ("add", 0, "output", 0): 2,
        ("add", 1, "input", 0): 3,
        ("add", 1, "input", 1): 4,
        ("add", 1, "output", 0): 5,
        ("add", 2, "input", 0): 0,
        ("add", 2, "input", 1): 6,
        ("add", 2, "output", 0): 7,
    }
    counts = summary(recording.report()).counts
    nbytes = [48, 48, 48, 16, 16, 16, 16, 16]
    assert (counts.storages, counts.storage_bytes) == (len(nbytes), sum(nbytes))


def test_calls_and_recompiles(aliasing: Recording) -> None:
    """The third call has another size and is compiled for all sizes. The other calls use existing entries."""
    assert rows(aliasing.calls, "graph", "compiled", "cold") == [
        [0, True, True],
        [0, True, False],
        [1, True, True],
        [1, True, False],
    ]
    (frame,) = aliasing.report().frames
    assert (frame.function, frame.calls.total, frame.calls.compiled, frame.calls.eager) == (
        "mutate_and_alias",
        4,
        4,
        0,
    )
    assert [graph.calls for graph in frame.graphs] == [2, 2]
    assert rows(aliasing.recompiles, "frame", "graph", "status") == [["mutate_and_alias", 1, "compiled"]]
    (reason,) = aliasing.recompiles.reason
    assert reason == "`x.size(0)` is 5 where the compiled entry expects 2; compiled for all sizes of it from 2 on"


def test_all_stages_and_their_code(aliasing: Recording) -> None:
    """Seven stages are listed in order. The generated program is shown and returns the function's results."""
    stages = aliasing.report().frames[0].graphs[0].stages
    assert [stage.name for stage in stages] == [
        "capture",
        "dedupe",
        "synthetic_bases",
        "trace",
        "partition",
        "compile",
        "runtime",
    ]
    assert all(stage.duration_ns > 0 for stage in stages)
    program = stages[-1].codes[0].text
    compile(program, "<runtime>", "exec")
    assert "if again is not x:" in program
    assert "x.t()" in program
    assert [code.title for code in stages[3].codes] == ["forward graph"]


def test_nodes_know_the_users_lines(aliasing: Recording) -> None:
    """Each op of the trace points to the line above that caused it."""
    table = aliasing.nodes.query("graph == 0 and stage == 'trace' and op == 'call_function'")
    found = dict(rows(table, "target", "code"))
    assert found["aten.mul.Tensor"] == "x.mul_(scale)"
    assert found["aten.add.Tensor"] == "h = x + y"
    assert found["aten.sum.default"] == "return x.t(), y, h[0], h[1], h.sum(), 7"
    files = table[table.code.notna()].file
    assert {Path(file).name for file in files} == {HERE}


def test_guards_name_the_duplicate_and_the_number(aliasing: Recording) -> None:
    """The report lists the assumptions of the entry as guards."""
    found = aliasing.guards.query("graph == 0").sentence.tolist()
    assert "`again` is the same tensor as `x`" in found
    assert "`scale` is 2.0" in found


def test_the_engine_is_ours(aliasing: Recording, training: Recording) -> None:
    """The tables name the engine that compiled the graphs."""
    assert {engine for each in (aliasing, training) for engine in each.nodes["engine"]} == {"aotlab"}


def test_inputs_of_the_training_step(training: Recording) -> None:
    """Parameters and buffers are lifted; batch norm mutates its three buffers and nothing else."""
    table = training.inputs
    assert sorted(rows(table, "name", "kind", "requires_grad", "mutated")) == sorted(
        [
            ["linear.weight", "parameter", True, False],
            ["linear.bias", "parameter", True, False],
            ["norm.weight", "parameter", True, False],
            ["norm.bias", "parameter", True, False],
            ["norm.running_mean", "buffer", False, True],
            ["norm.running_var", "buffer", False, True],
            ["norm.num_batches_tracked", "buffer", False, True],
            ["x", "input", False, False],
        ]
    )


def test_placeholders_go_by_the_names_of_the_arguments(aliasing: Recording, training: Recording) -> None:
    """Each placeholder of the trace has a name that the user knows. A duplicate has no placeholder."""
    for recording in (aliasing, training):
        for graph in recording.report().frames[0].graphs:
            placeholders = [node.name for node in graph.nodes if (node.stage, node.op) == ("trace", "placeholder")]
            assert [each.name for each in graph.placeholders] == placeholders
    assert [each.user_name for each in graph.placeholders][-2:] == ["x", "grad_of_out"]
    assert "norm.running_mean" in [each.user_name for each in graph.placeholders]


def test_saved_values_of_the_training_step(training: Recording) -> None:
    """Saved values are listed with bytes, reason and users among the backward's nodes. Inputs take no new memory."""
    (graph,) = training.report().frames[0].graphs
    assert (graph.training, graph.status) == (True, "compiled")
    assert len(graph.saved) > 0
    backward = {node.name for node in graph.nodes if node.stage == "partition" and node.part == "backward"}
    for value in graph.saved:
        assert value.reason
        assert value.used_by
        assert set(value.used_by) <= backward
        assert value.nbytes == value.tensor.nbytes
    assert any(value.is_input for value in graph.saved)
    assert [compiled.kind for compiled in graph.compiled] == ["forward", "backward"]


def test_both_phases_of_the_joint_graph_point_to_the_layer(training: Recording) -> None:
    """Backward nodes carry the line of the forward op that they differentiate."""
    table = training.nodes.query("stage == 'trace' and op == 'call_function'")
    assert set(table.phase) == {"forward", "backward"}
    backward = table.query("phase == 'backward'")
    code = "return torch.relu(self.norm(self.linear(x)))  # the layer"
    assert backward[backward.target.str.startswith("aten.threshold_backward")].code.tolist() == [code]


def test_real_reports_fulfil_the_schema_and_survive(aliasing: Recording, training: Recording) -> None:
    """Reports from real events are valid, round-trip exactly, and contain no note about a failed recording."""
    text = resources.files("aotlab.report").joinpath("schema/report.v1.json").read_text(encoding="utf-8")
    validator = jsonschema.Draft202012Validator(json.loads(text))
    for recording in (aliasing, training):
        report = recording.report()
        validator.validate(json.loads(report.to_json()))
        assert Report.from_json(report.to_json()) == report
        assert report.notes == ()


def test_verdict_with_verification(aliasing: Recording) -> None:
    """Rows of `aotlab.verify` go in as they are, and decide the verdict."""
    x = torch.ones(2, 3)
    found = aotlab.verify(mutate_and_alias, x, torch.arange(3.0), x, 2.0, backend="eager")
    report = aliasing.report().with_verification(found.comparisons, frame="mutate_and_alias")
    assert len(report.verification) == len(found.comparisons) > 0
    assert report.verdict.startswith("Compiled mutate_and_alias: 2 graphs (inference), backend eager, on cpu, in ")
    assert report.verdict.endswith(f"; verified: equal to eager on {len(found.comparisons)} observables.")


def test_a_refusal_arrives_with_its_line() -> None:
    """The storage of an input may not be resized; run eagerly, the report's first line says so, and why."""

    def turn(x: torch.Tensor) -> torch.Tensor:
        x.untyped_storage().resize_(24)
        return x + 1

    with Report.record() as raised, refusing(EscapeError):
        aotlab.compile(turn, backend="eager")(torch.ones(2, 3))
    assert rows(raised.refusals, "reason", "argument", "outcome") == [["Escape", "x", "raised"]]
    assert raised.verdict.startswith(
        "Nothing was compiled: turn was refused, EscapeError: the function calls `untyped_storage()`"
    )
    assert raised.refusals.code.tolist() == ["x.untyped_storage().resize_(24)"]
    assert raised.inputs.name.tolist() == ["x"]
    assert raised.inputs.mutated.tolist() == [pd.NA]
    with (
        aotlab.config.patch(fallback="eager"),
        Report.record() as eager,
        pytest.warns(RuntimeWarning, match="turn` runs eagerly"),
    ):
        aotlab.compile(turn, backend="eager")(torch.ones(2, 3))
    assert rows(eager.refusals, "reason", "outcome") == [["Escape", "ran eagerly"]]
    assert rows(eager.calls, "graph", "compiled") == [[None, False]]
    assert " ran eagerly, EscapeError: " in eager.verdict


def test_a_backward_that_is_derived_later(training: Recording) -> None:
    """When only one of two outputs is differentiated, the backward for that pattern appears as a stage."""

    @aotlab.compile(backend="eager")
    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()

    with Report.record() as recording:
        first, _ = two(torch.ones(3, requires_grad=True))
        first.sum().backward()
    (graph,) = recording.report().frames[0].graphs
    patterns = [compiled.pattern for compiled in graph.compiled if compiled.pattern]
    assert patterns == [(True, False)]
    assert [stage.name for stage in graph.stages][-1] == "backward"


def test_graphs_behind_dynamo(fresh_dynamo: None) -> None:
    """With the dynamo frontend a graph break makes two graphs, and the report has both."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        print("between")
        return y.cos()

    compiled = aotlab.compile(broken, backend="eager", frontend="dynamo")
    with Report.record() as recording:
        compiled(torch.ones(3))
    report = recording.report()
    graphs = [graph for frame in report.frames for graph in frame.graphs]
    assert {(graph.frontend, graph.status) for graph in graphs} == {("dynamo", "compiled")}
    assert len(graphs) == 2
    assert report.notes == ()


class Halving(EagerBackend):
    """A backend whose passes multiply by a half, instead of dividing by two."""

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Rewrite the graph in place."""
        for node in request.module.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor):
            node.target, node.args = torch.ops.aten.mul.Tensor, (node.args[0], 0.5)
        request.module.recompile()
        return super().compile(request)


def test_nodes_of_the_captured_graph_and_after_the_passes(fresh_dynamo: None) -> None:
    """The report has the graph that Dynamo captured, and each graph that the backend changed, node by node."""

    def step(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x / 2  # halved

    compiled = aotlab.compile(step, backend=Halving(), frontend="dynamo")
    with Report.record() as recording:
        compiled(torch.ones(3))
    ops = recording.report().nodes.query("op.str.startswith('call') and stage in ('capture', 'compile', 'passes')")
    assert rows(ops, "stage", "part", "target", "shape") == [
        ["capture", "captured", "add_", "[3]"],
        ["capture", "captured", "operator.truediv", "[3]"],
        ["compile", "inference", "aten.add.Tensor", "[3]"],
        ["compile", "inference", "aten.div.Tensor", "[3]"],
        ["compile", "inference", "aten.copy_.default", "[3]"],
        ["passes", "inference", "aten.add.Tensor", "[3]"],
        ["passes", "inference", "aten.mul.Tensor", "[3]"],
        ["passes", "inference", "aten.copy_.default", "[3]"],
    ]
    assert [code for code in ops.code if "halved" in str(code)] == ["return x / 2  # halved"] * 3


def test_the_autograd_nodes_and_the_synthetic_bases() -> None:
    """The report lists each autograd node with its outputs and edges.

    It also lists the synthetic bases and the in-place operations.
    """

    def chained(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x.mul_(2)
        w.t_()
        first = y * w * v
        return first, (first * 3).sum()

    x = torch.arange(6.0)
    w, v = torch.ones(3, 2), torch.ones(3, requires_grad=True)
    compiled = aotlab.compile(chained, backend="eager")
    with Report.record() as recording:
        compiled(x, x[:3], w, v)
    assert rows(recording.autograd, "node", "makes", "goes_to") == [
        [0, "out[0]", "v"],
        [1, "out[1]", "out[0]"],
    ]
    assert rows(recording.inputs, "name", "steps", "synthetic_base") == [
        ["x", None, 0],
        ["y", None, 0],
        ["w", "t_()", None],
        ["v", None, None],
    ]
    (graph,) = recording.report().frames[0].graphs
    assert [(each.name, each.user_name) for each in graph.placeholders] == [
        ("primals_1", "base_of_x"),
        ("primals_2", "w"),
        ("primals_3", "v"),
        ("tangents_1", "grad_of_out[0]"),
        ("tangents_2", "grad_of_out[1]"),
    ]
    assert Report.from_json(recording.to_json()) == recording.report()
    assert "window of synthetic base 0" in recording.report()._repr_html_()


def test_one_autograd_node_where_that_is_enough(training: Recording) -> None:
    """A call with independent outputs has one autograd node. In inference it has no node."""
    assert set(rows(training.autograd, "node")[0]) == {0}
    compiled = aotlab.compile(lambda x: x * 2, backend="eager")
    with Report.record() as recording:
        compiled(torch.ones(2))
    assert len(recording.autograd) == 0
