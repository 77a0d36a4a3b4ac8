"""The direct frontend: functions and modules as targets."""

from __future__ import annotations

import copy
import functools
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import aotlab
from aotlab.errors import LeakedTensorError
from aotlab.frontends.direct import FunctionTarget, ModuleTarget
from tests.engine_helpers import behind, compiled, leaf, refusing, same


def test_function_target():
    """Name, line, nothing lifted."""

    def program(x):
        return x

    target = FunctionTarget(program)
    assert target.name.endswith("program")
    assert (target.line.file, target.line.line) == (__file__, program.__code__.co_firstlineno)
    assert list(target.lifted()) == list(target.lifted_names()) == []
    assert target.frontend == "direct"
    assert FunctionTarget(torch.sin).line is None
    assert FunctionTarget(torch.sin).name.endswith("sin")
    assert FunctionTarget(functools.partial(program)).name


def test_module_target():
    """Parameters and buffers in order, with names and kinds; None entries are skipped."""
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    target = ModuleTarget(module)
    target.reached()
    assert list(target.lifted_names()) == [
        ("0.weight", "parameter"),
        ("1.running_mean", "buffer"),
        ("1.running_var", "buffer"),
        ("1.num_batches_tracked", "buffer"),
    ]
    assert target.lifted()[0] is module[0].weight
    assert target.name == "Sequential"


def test_a_module_is_as_before_after_a_trace():
    """After a trace, also one that fails, parameters and buffers are the very objects they were."""

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count.add_(1)
            return x * self.weight * int((self.weight * x).sum().item())

    module = Fails()
    own = module.weight, module.count
    with refusing(match="needs the value of a tensor computed from `x` and `weight`"):
        compiled(module)(torch.ones(2))
    assert (module.weight, module.count) == own or all(
        a is b for a, b in zip((module.weight, module.count), own, strict=True)
    )
    assert module.weight is own[0]
    assert module.count is own[1]
    assert module.count.item() == 0.0
    assert isinstance(module.weight, nn.Parameter)


def test_still_same():
    """The fast check sees flags, replaced submodules and added parameters."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    target = ModuleTarget(module)
    check = target.still_same()
    assert check()
    module.eval()
    assert not check()
    module.train()
    assert check()
    module[1] = nn.Tanh()
    assert not check()
    check = ModuleTarget(module).still_same()
    module[0].register_parameter("extra", nn.Parameter(torch.ones(1)))
    assert not check()
    check = ModuleTarget(module).still_same()
    module.add_module("more", nn.ReLU())
    assert not check()


def test_what_a_function_changes_is_put_back():
    """A container that a traced function assigns is refused and restored."""
    words = ()

    def f(x):
        nonlocal words
        words += ("a",)
        return x * 2

    with refusing(LeakedTensorError, match="changes `words`"):
        compiled(f)(torch.ones(1))
    assert words == ()


def test_modules_that_count_calls():
    """A module that counts its calls in a Python attribute is compiled, and each call counts."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * 2

    module = Counts()
    call = compiled(module)
    for _ in range(3):
        call(torch.ones(1))
    assert (module.calls, len(behind(call).entries)) == (3, 1)


def test_functional_call_style():
    """Parameters that are passed as a dictionary."""
    module = nn.Linear(3, 2)

    def f(parameters, x):
        return torch.func.functional_call(module, parameters, (x,))

    same(f, {name: p.detach().clone().requires_grad_() for name, p in module.named_parameters()}, leaf(2, 3))


@pytest.fixture
def alone_in_a_group(tmp_path):
    """Be the only process of a group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    gc.collect()  # torch may hang where the last wrapper dies after its group
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
@pytest.mark.usefixtures("alone_in_a_group", "fresh_dynamo")
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("unused", [False, True])
def test_data_in_parallel(unused, frontend):
    """A `DistributedDataParallel` does its part at each call, in Python, and its inner module is compiled."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    ours, theirs = (
        nn.parallel.DistributedDataParallel(copy.deepcopy(net), find_unused_parameters=unused) for _ in range(2)
    )
    f = aotlab.compile(ours, backend="eager", frontend=frontend)
    with warnings.catch_warnings(record=True) as notices:
        warnings.simplefilter("always", RuntimeWarning)
        for step in range(3):
            for call, module in ((f, ours), (theirs, theirs)):
                module.zero_grad()
                call(leaf(5, 3, seed=step).detach()).square().mean().backward()
            for mine, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(mine.grad, wanted.grad)
        with f.no_sync():
            assert torch.equal(f(torch.ones(2, 3)), theirs(torch.ones(2, 3)))
    assert not [each for each in notices if "DistributedDataParallel" in str(each.message)]
    if frontend == "direct":
        assert f.compiled.calls.compiled == 4


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_dtype_of_gradients(dtype):
    """A parameter's `grad_dtype` keeps the rounding of its gradient, as FSDP2 needs it for mixed precision."""
    gradients = []
    for compiles in (False, True):
        norm = nn.RMSNorm(32, dtype=torch.bfloat16)
        norm.weight.grad_dtype = dtype
        call = aotlab.compile(norm, backend="eager") if compiles else norm
        call(leaf(8, 32).detach().bfloat16()).square().sum().backward()
        gradients.append(norm.weight.grad)
    assert gradients[0].dtype == gradients[1].dtype
    assert torch.equal(*gradients)
