"""Fake tensors whose sizes are symbols of the caller, compared with eager on the same tensors: results and guards."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional

import aotlab


class Symbolic:
    """Makes fake tensors with symbolic sizes only. Equal sizes share a symbol."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv())

    def __call__(self, *shape: int, grad: bool = False) -> Tensor:
        return self.mode.from_tensor(torch.empty(shape).requires_grad_(grad), static_shapes=False)

    @property
    def guards(self) -> set[str]:
        """Return the guards on the symbols."""
        return {str(guard.expr) for guard in self.mode.shape_env.guards}


def _shown(value: Any) -> Any:
    """Say all that can be known of a tensor without data, in symbols."""
    if not isinstance(value, FakeTensor):
        return str(value)
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    facts = (value.dtype, value.requires_grad, value.is_leaf, value._version, value._is_view())
    return [str(n.node.expr) if isinstance(n, torch.SymInt) else str(n) for n in numbers], facts


def _branch(x: Tensor) -> Tensor:
    return x.relu().sum(0) if x.shape[0] > 3 else x * 2


def _write(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    x.add_(y)
    return x * 2, x.view(-1), x[1:]


PROGRAMS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "matmul": (lambda x, w: (x @ w).relu().sum(1), [(6, 4), (4, 7)]),
    "a branch": (_branch, [(6, 4)]),
    "the other branch": (_branch, [(2, 4)]),
    "a write, views": (_write, [(6, 4), (6, 4)]),
    "sizes": (lambda x: (x.shape[0], x.numel(), x * x.shape[1]), [(6, 4)]),
    "a size as an int": (lambda x: x.new_zeros(int(x.shape[0]), 2) + x[:, :2], [(6, 4)]),
    "broadcasting": (lambda x, y: x + y, [(6, 4), (4,)]),
    "two results": (lambda x, y: (torch.cat([x, y], 1), torch.stack([x, y])), [(6, 4), (6, 4)]),
    "a size that is the larger of two": (lambda x: functional.max_pool2d(x, 2), [(2, 3, 8, 8)]),
    "attention": (lambda q: functional.scaled_dot_product_attention(q, q, q), [(2, 3, 5, 4)]),
    "group norm": (lambda x: functional.group_norm(x, 2), [(2, 4, 5)]),
    "the very argument": (lambda x: {"x": x, "y": [x.t()]}, [(6, 4)]),
}
ENTRANCES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "compile": lambda function: aotlab.compile(function, backend="inductor"),
    "aot_function": lambda function: aotlab.aot_function(function, fw_compiler=aotlab.nop),
    "torch.compile": lambda function: torch.compile(function, backend="aotlab"),
}


def _outcome(function: Callable[..., Any], shapes: list[tuple[int, ...]], grad: bool, under: bool) -> Any:
    made = Symbolic()
    leaves = [made(*shape, grad=grad) for shape in shapes]
    with made.mode if under else contextlib.nullcontext():
        given = [leaf.clone() for leaf in leaves] if grad else leaves
        results = torch.utils._pytree.tree_leaves(function(*given))
        sums = [(value * value).sum() for value in results if isinstance(value, Tensor) and value.requires_grad]
        gradients = torch.autograd.grad(sums, leaves) if grad else ()
    return [*map(_shown, (*results, *given)), *[_shown(each)[0] for each in gradients]], made.guards


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("under", [False, True], ids=["outside of the mode", "under the mode"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results(name: str, under: bool, grad: bool) -> None:
    """Results and gradients have the caller's symbols, with the same guards as in eager."""
    function, shapes = PROGRAMS[name]
    compiled = aotlab.compile(function, backend="eager")
    expected, guards = _outcome(function, shapes, grad, under)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert _outcome(compiled, shapes, grad, under) == (expected, guards)
    assert (compiled.calls.compiled, len(compiled.entries)) == (2, 1)


@pytest.mark.parametrize(
    "name", ["compile", "aot_function", pytest.param("torch.compile", marks=pytest.mark.tier("full"))]
)
def test_second_derivatives(name: str) -> None:
    """However the function was compiled, also for kernels that need memory."""
    found = []
    for around in (lambda function: function, ENTRANCES[name]):
        made = Symbolic()
        x = made(3, 4, grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # the notice of what runs eagerly
            (first,) = torch.autograd.grad(around(lambda x: (x**3).sum())(x), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
        found.append([_shown(first), _shown(second), made.guards])
    assert found[0] == found[1]


def test_entries() -> None:
    """The lookup of an entry compares sizes without adding guards. Entries for fixed sizes do not serve symbols."""
    compiled = aotlab.compile(_branch, backend="eager")
    plain = FakeTensorMode()
    compiled(plain.from_tensor(torch.empty(6, 4)))
    for rows, guard in ((6, "> 3"), (7, "> 3"), (2, "<= 3"), (9, "> 3")):
        made = Symbolic()
        result = compiled(made(rows, 4))
        assert isinstance(result, FakeTensor)
        assert isinstance(result.shape[0], torch.SymInt)
        assert [each.endswith(guard) for each in made.guards] == [True]
    assert compiled(plain.from_tensor(torch.empty(8, 4))).shape == (4,)
    assert compiled.calls.compiled == 6
    assert len(compiled.entries) == 3


def test_a_plan() -> None:
    """The report has the graph and the saved values, from which a model is planned for all sizes of its batch."""
    made = Symbolic()
    x = made(5, 8)
    with aotlab.Report.record() as recording, made.mode:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
        aotlab.compile(model, backend="eager")(x).sum().backward()
        assert all(isinstance(parameter.grad, FakeTensor) for parameter in model.parameters())
    report = recording.report()
    assert report.calls["compiled"].tolist() == [True]
    assert len(report.saved) > 0


def _resized(x: Tensor) -> Tensor:
    return functional.interpolate(x[None, None], size=(4, 4), mode="bilinear")


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[Tensor], tuple[Any, ...]], str]] = {
    "shared memory": (lambda x, y: x.mul_(2) + y, lambda x: (x[1:], x[:-1]), "share memory"),
    "nobody knows the size": (lambda x: x * 2, lambda x: (x.nonzero(),), "is unknown"),
    "a size of one": (lambda x: x * 2, lambda x: (x[: x.shape[0] // 6],), "0 or 1"),
    "a column": (lambda x: x * 2, lambda x: (x[:, 0],), "stride"),
    "a kernel that asks for integers": (_resized, lambda x: (x.requires_grad_(),), "IntList"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_runs_eagerly(name: str) -> None:
    """A program that would specialize the sizes of one call runs eagerly, so that only eager's guards are added."""
    function, give, why = REFUSED[name]
    found = []
    for each in (function, aotlab.compile(function, backend="eager")):
        made = Symbolic()
        x = made(6, 4)
        with made.mode:
            given = give(x)
            with pytest.warns(RuntimeWarning, match=why) if found else contextlib.nullcontext():
                found.append([_shown(each(*given)), made.guards])
    assert found[0] == found[1]


def test_export() -> None:
    """Sizes that are symbols vary in an exported graph."""
    made = Symbolic()
    graph, _ = aotlab.aot_export_module(nn.Linear(4, 2), (made(3, 4),), trace_joint=False)
    assert made.guards == set()
    assert graph.meta["assumes"] == ("2 <= input.size(0)", "input.size(1) == 4")
    assert graph(torch.ones(2, 4), torch.ones(2), torch.ones(5, 4))[0].tolist() == [[5.0, 5.0]] * 5
    joint = aotlab.aot_export_joint_simple(lambda x: (x.sin(),), (made(3, grad=True),), trace_joint=True)
    x = torch.randn(5)
    assert torch.equal(joint(x, torch.ones(5))[1], x.cos())
