"""Torch's own code that calls compiled functions, or is called in them: higher-order ops, FSDP, compiled autograd."""

from __future__ import annotations

import inspect

import functorch.compile
import pytest
import torch
import torch._dynamo.compiled_autograd
import torch._inductor.inductor_prims
from torch import nn
from torch._functorch import aot_autograd

import aotlab
from aotlab.errors import HigherOrderOpError, UsageError
from tests.engine_helpers import refusing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

layer = nn.Linear(2, 2)
HIGHER_ORDER = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda x: layer(x), lambda x: x - 1, (x,)),
    "while_loop": lambda x: torch._higher_order_ops.while_loop(lambda x: x.sum() < 10, lambda x: (x + 1,), (x,)),
    "map": lambda x: torch._higher_order_ops.map(lambda row: row + 1, x),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", HIGHER_ORDER)
def test_higher_order_ops_are_refused_before_dynamo_sees_them(name, grad):
    """The error is ours; eager works afterwards, which it does not once Dynamo has met the trace's tensors."""
    x = torch.ones(2, 2, requires_grad=grad and name == "cond")
    with refusing(HigherOrderOpError, match=f"`{name}` takes functions"):
        aotlab.compile(HIGHER_ORDER[name], backend="eager")(x)
    HIGHER_ORDER[name](x)


def test_torch_compile_is_put_back():
    """`torch.compile` is replaced only during a trace, for higher-order ops, and is restored."""
    before = torch.compile
    compiled = aotlab.compile(lambda x: torch.compile(torch.sin, backend="eager")(x), backend="eager")
    torch.testing.assert_close(compiled(torch.ones(2)), torch.ones(2).sin())
    assert torch.compile is before


def test_a_resized_storage():
    """A parameter whose storage the function allocates and fills has the new storage and values after the call."""
    a, b = nn.Parameter(torch.ones(8)), torch.arange(8.0)
    a.untyped_storage().resize_(0)

    def f(a, b):
        torch.ops.inductor.resize_storage_bytes_(a, 32)
        with torch.no_grad():
            a.copy_(b)
        return a + 1

    compiled = aotlab.aot_function(f, aotlab.nop, keep_inference_input_mutations=True)
    with torch.no_grad():
        result = compiled(a, b)
    assert torch.equal(result, b + 1)
    assert torch.equal(a, b)


def test_compiled_autograd():
    """Graphs of compiled autograd, which take a list and bypass function modes, are compiled."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    x = torch.ones(2, 3)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    compiler = torch.compile(backend="aotlab", options={"compiler": "eager"})
    with aotlab.config.patch(fallback="error"), torch._dynamo.compiled_autograd._enable(compiler):
        model(x).sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected)


def test_another_class_for_a_compiled_module():
    """Assigning ``__class__``, as ``fully_shard`` does, changes the compiled module's class and not the original's."""
    compiled = aotlab.compile(nn.Linear(3, 3), backend="eager")
    kind = type(compiled)
    compiled.__class__ = type("Sharded", (kind,), {})
    assert type(compiled).__name__ == "Sharded"
    assert type(compiled.orig_module) is nn.Linear
    compiled.note = 1
    assert compiled.orig_module.note == 1
    assert torch.equal(compiled(torch.ones(1, 3)), compiled.orig_module(torch.ones(1, 3)))


def test_graphs_can_be_scripted():
    """TorchScript compiles forward and backward."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU())
    x = torch.ones(3, 4, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), x)
    compiled = aotlab.aot_module(model, functorch.compile.ts_compile)
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x), expected)


@pytest.mark.parametrize("name", ["aot_function", "aot_module_simplified"])
def test_every_parameter_of_upstreams_is_taken(name):
    """Every parameter of upstream's is accepted with its default, for every version of torch."""
    ours = {"aot_function": lambda x: (x + 1,), "aot_module_simplified": nn.Identity()}[name]
    args = {"aot_function": (), "aot_module_simplified": ([torch.ones(2)],)}[name]
    parameters = inspect.signature(getattr(aot_autograd, name)).parameters.values()
    options = {p.name: p.default for p in parameters if p.default is not p.empty and p.name != "partition_fn"}
    assert "disable_functionalization" in options
    getattr(aotlab, name)(ours, *args, aotlab.nop, **options)
    with pytest.raises(UsageError, match="disable_functionalization=True is not supported"):
        getattr(aotlab, name)(ours, *args, aotlab.nop, disable_functionalization=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        getattr(aotlab, name)(ours, *args, aotlab.nop, no_such=1)


def test_a_line_of_ours_is_not_the_users():
    """If only code of torch's module runs, the user's line is the line of the call."""
    compiled = aotlab.compile(nn.BatchNorm1d(3, momentum=None), backend="eager")
    with refusing(aotlab.errors.DataDependentError) as caught:
        compiled(torch.randn(4, 3))  # this line
    assert caught.value.line.file == __file__
    assert "# this line" in caught.value.line.code
