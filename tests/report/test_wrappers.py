"""Tensor subclasses in a report: arguments and results as trees, and the memory below them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import aotlab
from aotlab.report import Report
from aotlab.report.counts import count
from aotlab.report.mime import plain
from aotlab.report.model import Graph, Input, Output


def two(*shape: int) -> TwoTensor:
    """Make a wrapper of two tensors."""
    return TwoTensor(torch.randn(shape), torch.randn(shape))


def reported(function: Any, *args: Any, backward: bool = False) -> Report:
    """Compile a function and call it; return the report."""
    with Report.record() as recording:
        out = aotlab.compile(function, backend="eager")(*args)
        if backward:
            out[0].sum().backward()
    return recording.report()


def only(report: Report) -> Graph:
    """Return the only graph."""
    ((graph,),) = [frame.graphs for frame in report.frames]
    return graph


def tree(rows: tuple[Input, ...] | tuple[Output, ...]) -> dict[str, str]:
    """Return for each row the row that it is a part of."""
    return {row.name: row.part_of for row in rows}


def test_inputs_nested_two_deep_lead_to_the_inputs_of_the_graph() -> None:
    """Each part is a row below its wrapper, and says which placeholder it is and which node its gradient."""
    x = TwoTensor(two(3, 2), two(3, 2)).requires_grad_()
    graph = only(reported(lambda x, s: ((x * x) * s,), x, torch.ones(()), backward=True))
    assert tree(graph.inputs) == {
        "x": "",
        "x.a": "x",
        "x.a.a": "x.a",
        "x.a.b": "x.a",
        "x.b": "x",
        "x.b.a": "x.b",
        "x.b.b": "x.b",
        "s": "",
    }
    rows = {row.name: row for row in graph.inputs}
    assert [rows[name].placeholder for name in ("x.a.a", "x.a.b", "x.b.a", "x.b.b", "s")] == [
        f"primals_{n}" for n in range(1, 6)
    ]
    assert rows["x"].placeholder == rows["x.a"].placeholder == ""
    assert rows["x"].tensor is not None
    assert (rows["x"].tensor.shape, rows["x"].tensor.nbytes) == ((3, 2), 4 * 3 * 2 * 4)
    assert rows["x"].tensor.type_name.endswith(".TwoTensor")
    assert [part.name for part in rows["x"].tensor.inner] == ["a", "b"]
    returned = {each.name: each for each in graph.results}
    for name in ("x.a.a", "x.b.b"):
        assert (returned[rows[name].gradient].kind, returned[rows[name].gradient].target) == ("gradient", name)


def test_outputs_lead_to_nodes_and_to_tangents() -> None:
    """The parts of a result have the names that the caller knows, whatever stands before it."""
    graph = only(reported(lambda x, p: (p + 1, {"w": x * 2}), two(2).requires_grad_(), torch.ones(2)))
    assert tree(graph.outputs) == {
        "out[0]": "",
        "out[1]['w']": "",
        "out[1]['w'].a": "out[1]['w']",
        "out[1]['w'].b": "out[1]['w']",
    }
    rows = {row.name: row for row in graph.outputs}
    nodes = {node.name for node in graph.nodes if node.stage == "trace"}
    assert {rows["out[0]"].node, rows["out[1]['w'].a"].node} <= nodes
    assert [rows[f"out[1]['w'].{part}"].tangent for part in "ab"] == ["tangents_1", "tangents_2"]
    assert rows["out[1]['w']"].tensor is not None
    assert rows["out[1]['w']"].tensor.type_name.endswith(".TwoTensor")
    assert graph.autograd[0].makes == ("out[1]['w'].a", "out[1]['w'].b")


def test_outputs_that_are_inputs_or_views() -> None:
    """An output that is an input or a view has no parts. The base of a view is listed below it."""
    graph = only(reported(lambda x: (x, x.detach(), (x * 2).t(), x.t()), two(3, 2)))
    rows = {row.name: row for row in graph.outputs}
    assert (rows["out[0]"].base, rows["out[0]"].relation) == ("x", "is input x itself")
    assert rows["out[1]"].relation == "input x, detached"
    assert rows["out[3]"].relation == "view of input x"
    assert rows["base of out[2]"].part_of == "out[2]"
    assert rows["base of out[2].a"].part_of == "base of out[2]"
    assert (count(graph).outputs, count(graph).aliased) == (4, 4)


def test_a_write_is_told_of_the_wrapper_and_its_parts() -> None:
    """One argument is mutated, whether the graph writes its parts or another value takes their place."""

    def hidden(x: Any, w: Any) -> Any:
        x.mul_(w)
        return (w.sin(),)

    for given in (two(2), two(2).requires_grad_()):
        graph = only(reported(hidden, two(2), given))
        rows = {row.name: row for row in graph.inputs}
        assert [rows[name].mutates_data for name in ("x", "x.a", "x.b", "w", "w.a")] == [True] * 3 + [False] * 2
        assert (count(graph).inputs, count(graph).mutated) == (2, 1)


def test_gradients_of_another_kind() -> None:
    """A plain parameter can have a wrapper as its gradient.

    The rows of that gradient follow the parameter's row and take no memory.
    """
    module = torch.nn.Linear(2, 2)
    report = reported(lambda x: (module(x),), two(3, 2), backward=True)
    rows = {row.name: row for row in only(report).inputs}
    assert rows["module.bias"].kind == "parameter"
    assert rows["module.bias.grad"].part_of == "module.bias"
    assert [rows[f"module.bias.grad.{part}"].kind for part in "ab"] == ["gradient"] * 2
    assert all(rows[f"module.bias.grad.{part}"].gradient for part in "ab")
    spans = [span.name for storage in only(report).storages for span in storage.spans]
    assert not any("grad" in name for name in spans)


def test_the_kind_of_a_wrapped_parameter_and_buffer() -> None:
    """They keep it, with their parts, though the compiled function takes these as arguments."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(two(2))
    module.register_buffer("seen", two(2))
    graph = only(reported(lambda x: (x * module.weight + module.seen,), two(2)))
    kinds = {row.name: row.kind for row in graph.inputs}
    assert [kinds[name] for name in ("module.weight", "module.weight.a", "module.seen.b", "x.a")] == [
        *("parameter", "parameter", "buffer", "input")
    ]
    given = {each.user_name: each.kind for each in graph.placeholders if each.kind != "tangent"}
    assert given == {name: kinds[name] for name in given}
    assert len(given) == 6


def test_the_storage_map_shows_who_shares_memory_below_wrappers() -> None:
    """Two wrappers with a common tensor, and one around another argument's memory."""
    common, plain_one = torch.randn(4), torch.randn(4)
    x, y = TwoTensor(common, torch.randn(4)), TwoTensor(torch.randn(4), common)
    z = TwoTensor(plain_one, torch.randn(4))
    report = reported(lambda x, y, z, p: (x + y + z, p.sin()), x, y, z, plain_one)
    shared = [storage for storage in only(report).storages if len(storage.spans) > 1]
    assert [[(span.name, span.part_of) for span in storage.spans] for storage in shared] == [
        [("x.a", "x"), ("y.b", "y")],
        [("z.a", "z"), ("p", "")],
    ]
    found = report.storages
    assert found[found["tensor"] == "y.b"]["part_of"].tolist() == ["y"]


def test_sizes_that_vary() -> None:
    """The wrapper's sizes equal the sizes of its parts."""

    def f(x: Any) -> Any:
        return (x * 2,)

    with Report.record() as recording:
        compiled = aotlab.compile(f, backend="eager", dynamic=True)
        for rows in (3, 5):
            compiled(two(rows, 2))
    row = next(row for row in only(recording.report()).inputs if row.name == "x")
    assert row.varies
    assert row.tensor is not None
    assert str(row.tensor) == "float32[x.a.size(0)=3, x.b.size(1)=2]"


def test_tables_and_text() -> None:
    """The tables have columns for it, and the text draws the trees."""
    report = reported(lambda x: (x * x,), two(2).requires_grad_(), backward=True)
    found = report.inputs.fillna({"part_of": "", "placeholder": ""})
    assert found["part_of"].tolist() == ["", "x", "x"]
    assert found["placeholder"].tolist() == ["", "primals_1", "primals_2"]
    assert found["gradient"].notna().tolist() == [False, True, True]
    assert report.outputs["part_of"].fillna("").tolist() == ["", "out[0]", "out[0]"]
    lines = plain(report).splitlines()
    assert lines[3] == "      x: TwoTensor float32[2]"
    assert lines[4].startswith("        x.a: float32[2] → primals_1, gradient ")
    assert lines[7].startswith("        out[0].a: float32[2] ← ")
    assert lines[7].endswith(", gradient tangents_1")


def test_a_report_with_trees_is_written_and_read() -> None:
    """A report with wrappers is read back equal, and its stages include the code that unwraps and wraps."""
    report = reported(lambda x: (x * x,), two(2))
    assert Report.from_json(report.to_json()) == report
    (stage,) = [stage for stage in only(report).stages if stage.name == "subclasses"]
    assert stage.summary == "1 argument taken apart, 1 output put together"
    assert "__tensor_unflatten__" in stage.codes[0].text


@pytest.mark.parametrize("count", [3, 14])
def test_a_text_draws_ten_trees(count: int) -> None:
    """The rest is counted."""
    report = reported(lambda *args: (torch.stack([each.a for each in args]),), *[two(2) for _ in range(count)])
    text = plain(report)
    assert ("and 4 more" in text) == (count == 14)
    assert f"args[{min(count, 10) - 1}].b: " in text


def test_the_memory_below_a_result_keeps_its_numbers_in_a_later_graph() -> None:
    """The parts of a wrapper that one graph makes and another takes are the same storages."""
    make, use = (aotlab.compile(f, backend="eager") for f in (lambda x: (x * 2, x.sum()), lambda y: y + 1))
    with Report.record() as recording:
        use(make(two(3))[0])
    (made,), (used,) = (frame.graphs for frame in recording.frames)
    parts = [row.storage for row in made.outputs if row.part_of == "out[0]"]
    assert len(set(parts)) == 2
    assert [row.storage for row in used.inputs if row.part_of] == parts
