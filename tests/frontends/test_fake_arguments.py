"""Fake tensors as arguments: programs are planned without data, and compared with eager on the same fake tensors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

import aotlab

UNDER = pytest.mark.parametrize("under", [False, True], ids=["outside of the mode", "under the mode"])


class Fakes:
    """Makes fake tensors of one mode."""

    def __init__(self, device: str) -> None:
        self.mode, self.device = FakeTensorMode(), device

    def __call__(self, *shape: int, grad: bool = False) -> Tensor:
        with self.mode:
            return torch.empty(shape, device=self.device).requires_grad_(grad)

    def around(self, under: bool) -> Any:
        return self.mode if under else contextlib.nullcontext()

    def shown(self, value: Any) -> Any:
        """Say all that can be known of a tensor without data."""
        if not isinstance(value, Tensor):
            return value
        assert isinstance(value, FakeTensor)
        assert value.fake_mode is self.mode
        facts = (tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device)
        return (*facts, value.requires_grad, value.is_leaf, value._version, value._is_view())


def _write(x: Tensor) -> tuple[Tensor, Tensor]:
    x.add_(1)
    return x * 2, x.view(-1)


def _through_a_view(x: Tensor, y: Tensor) -> Tensor:
    x.select(0, 0).mul_(2)  # torch without CUDA cannot index fake CUDA tensors
    return x.sum() + y


def _windows(fakes: Fakes) -> tuple[Tensor, Tensor]:
    memory = fakes(8)
    return memory.narrow(0, 0, 3), memory.narrow(0, 3, 3)


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[Fakes], tuple[Tensor, ...]]]] = {
    "matmul": (lambda x, w: (x @ w).relu().sum(1), lambda made: (made(4, 8), made(8, 3))),
    "a write": (_write, lambda made: (made(4, 8),)),
    "a write through a view": (_through_a_view, lambda made: (made(4, 8), made(4, 8))),
    "the same tensor twice": (_through_a_view, lambda made: (made(4, 8),) * 2),
    "windows of one storage": (lambda x, y: x.mul_(2) + y, _windows),
    "a transposed input": (lambda x: x.t() * 2, lambda made: (made(4, 8).t(),)),
    "dropout": (lambda x: functional.dropout(x, 0.5), lambda made: (made(4, 8),)),
    "attention": (lambda q: functional.scaled_dot_product_attention(q, q, q), lambda made: (made(1, 2, 4, 8),)),
    "a convolution": (lambda x, w: functional.conv2d(x, w), lambda made: (made(1, 3, 8, 8), made(4, 3, 3, 3))),
}


def _outcome(
    function: Callable[..., Any], fakes: Fakes, make: Callable[[Fakes], tuple[Tensor, ...]], under: bool
) -> Any:
    given = make(fakes)
    with fakes.around(under):
        result = function(*given)
    outputs = result if isinstance(result, tuple) else (result,)
    shared = [a.untyped_storage()._cdata == b.untyped_storage()._cdata for a in outputs for b in given]
    return [*map(fakes.shown, (*outputs, *given)), shared]


@UNDER
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results(name: str, device: str, under: bool) -> None:
    """They are eager's in all but the data that nobody has, and are compiled, also for a GPU that is not here."""
    function, make = PROGRAMS[name]
    fakes, compiled = Fakes(device), aotlab.compile(function, backend="eager")
    expected = _outcome(function, fakes, make, under)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [_outcome(compiled, fakes, make, under) for _ in range(2)] == [expected] * 2
    assert (compiled.calls.compiled, len(compiled.entries)) == (2, 1)


@UNDER
def test_gradients(under: bool) -> None:
    """A backward gives fake gradients."""
    found = []
    compiled = aotlab.compile(lambda x, w: (x @ w).relu().sum(), backend="eager")
    for function in (lambda x, w: (x @ w).relu().sum(), compiled):
        fakes = Fakes("cpu")
        x, w = fakes(4, 8), fakes(8, 3, grad=True)
        with fakes.around(under):
            function(x, w).backward()
        found.append(fakes.shown(w.grad))
    assert found[0] == found[1]
    assert compiled.calls.compiled == 1


ENTRANCES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "compile": lambda function: aotlab.compile(function, backend="eager"),
    "aot_function": lambda function: aotlab.aot_function(function, fw_compiler=lambda graph, _: graph),
    "torch.compile": lambda function: torch.compile(function, backend="aotlab"),
}


@pytest.mark.parametrize(
    "name", ["compile", "aot_function", pytest.param("torch.compile", marks=pytest.mark.tier("full"))]
)
def test_second_derivatives(name: str) -> None:
    """They are fakes of the mode, too, however the function was compiled."""

    def cubes(x: Tensor) -> Tensor:
        return (x**3).sum()

    found = []
    for function in (cubes, ENTRANCES[name](cubes)):
        fakes = Fakes("cpu")
        x = fakes(3, 4, grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # the notice of what runs eagerly
            (first,) = torch.autograd.grad(function(x), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
        found.append([*map(fakes.shown, (first, second))])
    assert found[0] == found[1]


def test_shared_memory_is_told_by_storages() -> None:
    """Fakes have no addresses. An entry for two storages does not serve overlapping windows of one storage."""
    compiled = aotlab.compile(lambda x, y: x.mul_(2) + y, backend="eager")
    fakes = Fakes("cpu")
    memory = fakes(8)
    compiled(fakes(5), fakes(5))
    compiled(memory.narrow(0, 0, 5), memory.narrow(0, 3, 5))
    assert len(compiled.entries) == 2
    compiled(fakes(5), fakes(5))
    compiled(memory.narrow(0, 0, 5), memory.narrow(0, 3, 5))
    assert len(compiled.entries) == 2
    assert compiled.calls.compiled == 4


def test_a_model_that_was_made_under_the_mode() -> None:
    """It is trained without data, and the report lists the values that would be saved."""
    mode = FakeTensorMode()
    with mode, aotlab.Report.record() as recording:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = aotlab.compile(model, backend="eager")
        before = model[2].num_batches_tracked._version
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.empty(4, 8)).sum().backward()
            assert all(isinstance(parameter.grad, FakeTensor) for parameter in model.parameters())
            optimizer.step()
    assert model[2].num_batches_tracked._version == before + 3
    report = recording.report()
    assert report.calls["compiled"].tolist() == [True] * 3
    assert report.saved["nbytes"].sum() > 0


def test_inductor_is_not_asked() -> None:
    """Its kernels need memory: the graphs are run op by op."""
    fakes = Fakes("cpu")
    compiled = aotlab.compile(lambda x: x.sin() * 2, backend="inductor")
    assert isinstance(compiled(fakes(3)), FakeTensor)
    assert compiled.calls.compiled == 1


def test_real_and_fake_tensors_have_entries_of_their_own() -> None:
    """Real and fake tensors have separate entries. A mode of the caller that accepts real tensors has one as well."""
    compiled = aotlab.compile(lambda x: x * 2, backend="eager")
    real = torch.randn(3)
    for _ in range(2):
        assert torch.equal(compiled(real), real * 2)
        assert isinstance(compiled(Fakes("cpu")(3)), FakeTensor)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(compiled(real), FakeTensor)
    kinds = {(entry.state.dispatch_modes, entry.state.leaves[0].type) for entry in compiled.entries}
    assert len(kinds) == 3
    assert any("a fake mode is on" in reason for reason in compiled.recompiles)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this torch was built with CUDA")
def test_gradients_on_a_gpu_that_is_not_here() -> None:
    """Torch would end the process there, so that it is not tried."""
    fakes = Fakes("cuda")
    with pytest.raises(RuntimeError, match="aborts the process"):
        aotlab.compile(lambda x: x * 2)(fakes(3, grad=True))


def test_export() -> None:
    """Graphs are exported by fake arguments, and of modules that are fake themselves."""
    fakes = Fakes("cpu")
    with fakes.mode:
        module = nn.Linear(4, 2)
    for each in (module, nn.Linear(4, 2)):
        graph, signature = aotlab.aot_export_module(each, (fakes(3, 4),), trace_joint=False)
        assert signature.parameters == ["weight", "bias"]
        assert graph(torch.ones(2, 4), torch.ones(2), torch.ones(3, 4))[0].tolist() == [[5.0, 5.0]] * 3
    joint = aotlab.aot_export_joint_simple(lambda x: (x.sin(),), (fakes(3, grad=True),), trace_joint=True)
    x = torch.randn(3)
    assert torch.equal(joint(x, torch.ones(3))[1], x.cos())
