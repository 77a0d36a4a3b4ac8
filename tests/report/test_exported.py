"""`report.export`: the graphs of a compilation and their signature."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import aotlab
from aotlab.errors import UsageError
from aotlab.report import ExportedGraph, Report


def reported(*calls: tuple[Any, tuple[Any, ...]], backend: str = "eager") -> Report:
    """Compile functions and call each. Return the report after a round trip through JSON."""
    with Report.record() as recording:
        for function, args in calls:
            compiled: Any = aotlab.compile(function, backend=backend)
            compiled(*args)
    return Report.from_json(recording.to_json())


def rows(found: ExportedGraph, direction: str) -> list[tuple[str, str]]:
    """Return kind and target of the inputs or outputs."""
    signature = found.signature
    signature = signature[signature["direction"] == direction]
    return list(zip(signature["kind"], signature["target"], strict=True))


def training() -> tuple[Any, tuple[Any, ...]]:
    """Make a function with parameters, buffers that it writes, an argument that it writes, and several outputs."""
    norm = torch.nn.BatchNorm1d(3)

    def step(x: Any, scale: Any) -> Any:
        scale.mul_(2)
        y = norm(x)
        return y.sum() * scale, scale + 1

    return step, (torch.randn(4, 3, requires_grad=True), torch.ones(()))


def test_the_signature_says_what_everything_is() -> None:
    """Inputs and outputs of the joint graph, with their names in the program, dtypes and shapes."""
    found = reported(training()).export("step")
    assert rows(found, "input") == [
        ("parameter", "norm.weight"),
        ("parameter", "norm.bias"),
        ("buffer", "norm.running_mean"),
        ("buffer", "norm.running_var"),
        ("buffer", "norm.num_batches_tracked"),
        ("user input", "x"),
        ("user input", "scale"),
        ("tangent", "out[0]"),
    ]
    assert rows(found, "output") == [
        ("mutated buffer", "norm.running_mean"),
        ("mutated buffer", "norm.running_var"),
        ("mutated buffer", "norm.num_batches_tracked"),
        ("mutated input", "scale"),
        ("user output", "out[0]"),
        ("user output", "out[1]"),
        ("gradient", "norm.weight"),
        ("gradient", "norm.bias"),
        ("gradient", "x"),
    ]
    last = found.signature.iloc[-1]
    assert (last["dtype"], last["shape"], last["index"]) == ("float32", "[4, 3]", 8)
    assert found.joint is not None
    assert found.forward is not None
    for row in found.signature.itertuples():
        assert str(row.node) in found.joint
    assert found.forward.startswith("def forward(self, primals_1")
    assert found.backward is not None
    assert found.backward.startswith("def backward(")
    assert found.nodes("joint")["name"].iloc[0] == "primals_1"
    with pytest.raises(UsageError, match="its graphs are: joint, forward and backward"):
        found.nodes("other")


def test_the_joint_graph_returns_what_the_signature_says() -> None:
    """The joint graph's ``return`` lists the names in the order of the signature."""
    found = reported(training()).export()
    assert found.joint is not None
    returned = found.joint.rpartition("return (")[2].rstrip(")\n").split(", ")
    outputs = found.signature[found.signature["direction"] == "output"]
    assert outputs["node"].tolist() == [name for name in returned if name != "None"]


def test_gradients_between_autograd_nodes() -> None:
    """Where the caller can see the middle of the autograd graph, gradients go from node to node."""

    def f(x: Any) -> Any:
        y = x.sin()
        return y.sum(), y.t(), y.exp()

    found = reported((f, (torch.ones(2, 3, requires_grad=True),))).export()
    gradients = [target for kind, target in rows(found, "output") if kind == "gradient"]
    assert "x" in gradients
    assert len(gradients) > 1
    tangents = [target for kind, target in rows(found, "input") if kind == "tangent"]
    assert tangents[:3] == ["out[0]", "out[2]", "intermediate base 0"]


@pytest.mark.tier("full")
def test_inference_and_writes_in_the_graph() -> None:
    """Without gradients there is no joint graph. Writes that Inductor's graph makes itself are listed."""

    def f(x: Any, n: int) -> Any:
        x.add_(n)
        return x * 2

    found = reported((f, (torch.ones(3), 2)), backend="inductor").export(0)
    assert (found.joint, found.backward) == (None, None)
    assert rows(found, "output") == [("user output", "out"), ("mutated input", "x")]
    assert found.signature["in_graph"].fillna(value=False).tolist() == [False, False, True]


def test_parts_of_wrappers() -> None:
    """The parts have their own names."""
    x = TwoTensor(torch.ones(2), torch.ones(2)).requires_grad_()
    found = reported((lambda x: (x * 2,), (x,))).export()
    assert rows(found, "input")[:2] == [("user input", "x.a"), ("user input", "x.b")]
    assert rows(found, "output")[-2:] == [("gradient", "x.a"), ("gradient", "x.b")]
    assert rows(found, "output")[0] == ("user output", "out[0].a")


def test_sizes_that_vary() -> None:
    """They are inputs of the graph."""
    with Report.record() as recording:
        aotlab.compile(lambda x: x * 2, backend="eager", dynamic=True)(torch.ones(3, 4))
    found = recording.report().export()
    assert rows(found, "input") == [("user input", "x"), ("size", "x.size(0)"), ("size", "x.size(1)")]


def test_which_graph_is_meant() -> None:
    """A graph is chosen by number and frame, by the frame's name, or by the compiled graph's name.

    Otherwise the error lists the graphs.
    """

    def f(x: Any) -> Any:
        return x * 2

    def g(x: Any) -> Any:
        return x + 1

    report = reported((f, (torch.ones(2),)), (g, (torch.ones(2),)))
    name = report.frames[1].name
    assert report.export(name).frame == name
    assert report.export(0, frame=name).frame == name
    assert report.export(report.frames[1].graphs[0].compiled[0].name).frame == name
    with pytest.raises(UsageError, match=r"several graphs are meant; choose one of: graph=0, frame='.*f' and graph=0"):
        report.export(0)
    with pytest.raises(UsageError, match=r"no traced graph 3 of '.*g'; choose one of: graph=0"):
        report.export(3, frame=name)
    with Report.record() as nothing:
        pass
    with pytest.raises(UsageError, match="no graph that was traced"):
        nothing.report().export()


def test_it_is_shown_as_tables() -> None:
    """A notebook shows the export as tables. Texts from the report are escaped."""
    report = json.loads(reported(training()).to_json())
    report["frames"][0]["graphs"][0]["placeholders"][0]["user_name"] = "<b>"
    found = Report.from_dict(report).export()
    html = found._repr_html_()
    assert html.count("<table>") == 4
    assert "<b>" not in html
    assert "&lt;b&gt;" in html
    text = repr(found)
    assert text.splitlines()[2].split() == ["direction", "node", "kind", "target", "dtype", "shape"]
    assert "def joint(" in text


def test_nothing_is_traced_or_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loaded report is enough."""
    report = reported(training())
    for name in ("exec", "eval", "compile"):
        monkeypatch.setattr(f"builtins.{name}", None)
    assert report.export("step").joint
