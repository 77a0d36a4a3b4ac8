"""Names of tensors: the names in a namespace, and the names in running functions."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aotlab
from aotlab.frontends.tensor_names import named_tensors, names_on_stack
from aotlab.report import Report

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Holder:
    """An object of a program, with a module and its optimizer."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step(self, x: Tensor) -> None:
        """Make one step of training."""
        self.net(x).sum().backward()
        self.opt.step()

    def names(self) -> dict[str, Tensor]:
        """Return the tensors that running functions know, by name."""
        return dict(names_on_stack().values())


Holder.__module__ = "__main__"


def trained() -> tuple[nn.Linear, torch.optim.Optimizer]:
    """Make a layer and an optimizer that has a momentum for each of its parameters."""
    net = nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(1, 2)).sum().backward()
    opt.step()
    return net, opt


@pytest.mark.parametrize(
    ("held", "path"),
    [
        (lambda opt: {"opt": opt}, "opt"),
        (lambda opt: {"opts": [opt]}, "opts[0]"),
        (lambda opt: {"all": {"sgd": opt}}, "all['sgd']"),
    ],
)
def test_the_state_of_an_optimizer_is_named_by_the_parameter(held: Any, path: str) -> None:
    """An optimizer is found wherever tensors are found; its parameter has the name that the module gives it."""
    net, opt = trained()
    names = dict(named_tensors({**held(opt), "net": net}).values())
    assert list(names) == [
        "net.weight",
        "net.bias",
        "net.weight.grad",
        "net.bias.grad",
        f"{path}.state[net.weight]['momentum_buffer']",
        f"{path}.state[net.bias]['momentum_buffer']",
    ]
    assert names[f"{path}.state[net.weight]['momentum_buffer']"] is opt.state[net.weight]["momentum_buffer"]


def test_a_parameter_that_only_its_optimizer_holds_has_a_place_there() -> None:
    """No variable leads to the module: the parameter groups do."""
    _, opt = trained()
    assert list(dict(named_tensors({"opt": opt}).values())) == [
        "opt.state[0]['momentum_buffer']",
        "opt.param_groups[0]['params'][0]",
        "opt.param_groups[0]['params'][0].grad",
        "opt.state[1]['momentum_buffer']",
        "opt.param_groups[0]['params'][1]",
        "opt.param_groups[0]['params'][1].grad",
    ]


def test_a_caller_names_a_tensor_before_the_function_that_it_calls() -> None:
    """The outermost running function comes first; a tensor that only an inner one knows has its name there."""

    def inner(given: Tensor) -> dict[str, Tensor]:
        own = given + 1
        assert own is not given
        return dict(names_on_stack().values())

    def outer() -> dict[str, Tensor]:
        batch = torch.ones(3)
        return inner(batch)

    names = outer()
    assert "batch" in names
    assert "own" in names
    assert "given" not in names


def test_names_on_the_stack_keep_no_variable_alive() -> None:
    """A variable that its function deletes after it was named is freed at once."""

    def function() -> Any:
        tensor = torch.ones(3)
        weak = weakref.ref(tensor)
        assert "tensor" in dict(names_on_stack().values())
        del tensor
        return weak()

    gc.disable()
    try:
        assert function() is None
    finally:
        gc.enable()


def stepped(step: Any) -> set[str]:
    """Compile the step of an optimizer with our backend; return the names of the inputs of its graphs."""
    compiled = torch.compile(step, backend="aotlab", options={"compiler": "eager"})
    with Report.record("step") as recording:
        compiled()
    return set(recording.report().inputs["name"])


def test_inputs_from_an_optimizer_have_the_names_of_variables() -> None:
    """Dynamo has other names for the parameters and the state that a graph contains.

    The report has the user's names.
    """
    net, opt = trained()
    names = stepped(opt.step)
    assert {f"net.{name}" for name, _ in net.named_parameters()} <= names
    assert {f"opt.state[net.{name}]['momentum_buffer']" for name in ("weight", "bias")} <= names


def test_an_optimizer_that_no_variable_leads_to_names_its_state() -> None:
    """Then the ``self`` of the step names parameters and state, and no name is Dynamo's."""
    names = stepped(trained()[1].step)
    assert "self.state[0]['momentum_buffer']" in names
    assert not [name for name in names if "___" in name]


def test_objects_of_the_program_are_opened() -> None:
    """The optimizer of an object is found by the object's name."""
    holder = Holder(nn.Linear(2, 1))
    holder.step(torch.ones(1, 2))
    names = dict(named_tensors({"holder": holder}).values())
    assert "holder.opt.state[holder.net.weight]['momentum_buffer']" in names


class Block(nn.Module):
    """A layer and a nonlinearity."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).tanh()


class Stack(nn.Module):
    """Two blocks, and a larger tensor after them."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x.repeat(3, 1).sigmoid()


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
def test_nodes_and_saved_values_have_module_paths(frontend: Any) -> None:
    """Nodes of both halves and saved values name the module that ran them; the largest saved value comes first."""
    model = Stack()
    compiled = aotlab.compile(model, backend="eager", frontend=frontend)
    with Report.record("modules") as recording:
        compiled(torch.ones(2, 4, requires_grad=True)).sum().backward()
    report = recording.report()
    nodes = report.nodes.query("stage == 'trace' and op == 'call_function'")
    paths = {(row.phase, row.target.split(".")[1]): row.module for row in nodes.itertuples()}
    assert paths["forward", "tanh"] == "h.1"
    assert paths["forward", "addmm"] == "h.1.fc"
    assert paths["backward", "tanh_backward"] == "h.0"
    saved = {row.name: row.module for row in report.saved.itertuples()}
    assert [saved["tanh"], saved["tanh_1"]] == ["h.0", "h.1"]
    assert report.saved["nbytes"].tolist() == sorted(report.saved["nbytes"], reverse=True)
    assert report.saved["name"][0] == "sigmoid"


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
def test_a_module_that_a_function_uses_is_named_by_its_variable(frontend: Any) -> None:
    """The path begins with the variable for the outermost module."""
    model = Stack()

    def loss_of(x: Tensor) -> Tensor:
        return model(x).sum()

    with Report.record("modules") as recording:
        aotlab.compile(loss_of, backend="eager", frontend=frontend)(torch.ones(2, 4, requires_grad=True))
    nodes = recording.report().nodes.query("stage == 'trace' and op == 'call_function'")
    assert "model.h.1.fc" in set(nodes["module"].dropna())
