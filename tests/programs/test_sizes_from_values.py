"""Sizes and numbers that depend on the values of tensors: one entry serves all values, in both frontends."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import aotlab
from aotlab.errors import RefusedError
from aotlab.frontends.dynamo_frontend import prepare_dynamo
from aotlab.maintenance.fuzz.compare import differences
from tests.both_ways import BOTH, quietly
from tests.engine_helpers import behind, by_min_cut, compiled, keeping_functions, leaf, record


@torch.library.custom_op("tests_values::positive", mutates_args=())
def positive(x: Tensor) -> Tensor:
    """Return the positive elements."""
    return x[x > 0].clone()


@positive.register_fake
def _(x):
    return x.new_empty([torch.library.get_ctx().new_dynamic_size()])


def _positive_backward(ctx, gradient):
    (x,) = ctx.saved_tensors
    return torch.zeros_like(x).masked_scatter(x > 0, gradient)


positive.register_autograd(_positive_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def _routed(x, n):
    """Route rows to experts by `nonzero`, and add the results up."""
    out = torch.zeros_like(x)
    for expert in range(3):
        rows = ((n % 3) == expert).nonzero()[:, 0]
        out = out.index_add(0, rows, torch.tanh(x[rows] * (expert + 1)))
    return out


def _routed_in_place(x, n):
    """Route rows to experts, as models do it: two indices, and `+=` on the rows."""
    weights, out = x.softmax(-1), torch.zeros_like(x)
    for expert in range(3):
        (row,) = ((n % 3) == expert).nonzero(as_tuple=True)
        out[row] += (x[row] @ x.new_ones(3, 3)).relu() * weights[row, expert, None]
    return out


def _first(x, n):
    k = n[0].item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return x[:k] * 2


def _made(x, n):
    k = n[0].item()
    torch._check(k >= 0)
    return torch.ones(2, k) @ torch.ones(k, 3) + x[:2]


def _written_first(x, n):
    k = n[0].item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    x[:k].mul_(3)
    return x.sin()


def _slices(x, n):
    return x[: n[0].item()].sin(), x[:, : n[1].item()].t() * 2


def _view_of_input(x, n):
    k = n[0].item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return x[:k], x[:k].t()


def _view_of_intermediate(x, n):
    chosen = x[x > 0] * 2
    return chosen, chosen.view(-1, 1), chosen[::2]


def _two_masks(x, n):
    return x[x > 0].exp(), (x[n > 1] ** 2).sum()


def _assigned(x, n):
    y = x * 2
    y[y > 0] = y[y > 0].exp()
    return y


def _assigned_values(x, n):
    y = x.clone()
    y[n > 1] = x[n > 1].cos()
    return y * x


def _assigned_in_argument(x, n):
    x[x > 0.5] = 0.5
    return x * 2


def _counted(x, n):
    return torch.unique(n, return_inverse=True, return_counts=True), x * n.unique().shape[0]


def _number(x, n):
    return x * n.sum().item(), n[0].item() + 1


def _loss(x, n):
    kept = n > 1
    return torch.nn.functional.cross_entropy(x[kept], n[kept] % 3, reduction="sum")


PROGRAMS: Mapping[str, Callable[..., Any]] = {
    "nonzero": lambda x, n: (x > 0).nonzero(),
    "mask": lambda x, n: x[x > 0] * 2,
    "mask of rows": lambda x, n: (x[n > 1] @ x.t()).relu(),
    "rows of a transpose": lambda x, n: x.t()[:, n > 1] * 2,
    "two masks": _two_masks,
    "masked_select": lambda x, n: torch.masked_select(x, x > 0).exp(),
    "item as a size": _first,
    "item in a factory": _made,
    "item in a slice": _slices,
    "item as a number": _number,
    "repeat_interleave": lambda x, n: x.repeat_interleave(n, 0).sin(),
    "unique": _counted,
    "custom op": lambda x, n: positive(x) * 3,
    "mask =": _assigned,
    "mask = tensor": _assigned_values,
    "mask = of an argument": _assigned_in_argument,
    "slice written": _written_first,
    "experts": _routed,
    "experts in place": _routed_in_place,
    "views of an argument": _view_of_input,
    "views of a result": _view_of_intermediate,
    "loss of some rows": _loss,
}
#: Values of the second argument. In the last row, no element is greater than 1, so sizes are 0.
VALUES = ((4, 0, 2, 5, 1, 2), (2, 2, 0, 0, 0, 3), (6, 1, 1, 0, 9, 1), (0, 1, 0, 1, 0, 1))


def _calls(mode: str) -> list[Callable[[], tuple[tuple[Any, ...], dict[str, Tensor]]]]:
    def call(seed: int, values: tuple[int, ...]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
        source = leaf(6, 3, seed=seed).detach()
        source = (source if seed else -source.abs()).requires_grad_(mode == "training")
        return (source + 0, torch.tensor(values)), {"leaf": source}

    return [
        lambda seed=seed, values=values: call(seed, values) for seed, values in zip((3, 1, 2, 0), VALUES, strict=True)
    ]


def _skip_on_old_torch(name: str, mode: str) -> None:
    if (name, mode) == ("slice written", "training") and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 asks whether the length of the slice is 1, so the call runs eagerly")


@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "varying"])
@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("name", PROGRAMS)
def test_called_directly(name: str, mode: str, dynamic: bool | None) -> None:
    """One entry serves calls with four values, and each call equals eager's in all observables."""
    _skip_on_old_torch(name, mode)
    function = PROGRAMS[name]
    with quietly():
        call = compiled(function, dynamic=dynamic)
        assert differences(function, call, _calls(mode)) == []
    assert (call.calls.compiled, call.calls.eager, len(call.entries)) == (4, 0, 1), call.recompiles


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("name", PROGRAMS)
def test_behind_dynamo(name: str, mode: str) -> None:
    """Dynamo captures one graph without a break, and one entry of the graph serves calls with four values."""
    _skip_on_old_torch(name, mode)
    prepare_dynamo()
    function, made = PROGRAMS[name], []
    backend = keeping_functions(made)
    backend.is_aotlabs = True
    with quietly():
        assert differences(function, torch.compile(function, backend=backend), _calls(mode)) == []
    assert [(each.calls.compiled, each.calls.eager, len(each.entries)) for each in made] == [(4, 0, 1)]


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("name", ["mask", "item as a size", "repeat_interleave", "mask = tensor", "experts in place"])
def test_on_inductor(name: str, frontend: str, fresh_dynamo: None) -> None:
    """On Inductor, results and gradients of calls with other values equal eager's within the usual tolerance."""
    function = PROGRAMS[name]
    call = aotlab.compile(function, frontend=frontend)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs eagerly.*")
        for make in _calls("training"):
            results = []
            for each in (function, call):
                (x, n), leaves = make()
                out = each(x, n)
                out.square().sum().backward()
                results.append((out, leaves["leaf"].grad))
            torch.testing.assert_close(*results)


def _mask_twice(x: Tensor, n: Tensor, state: dict[str, float]) -> Any:
    mask = n > 1
    return x[mask].sin(), x[mask.detach()] * 2, mask.detach().nonzero()


def _mean_twice(x: Tensor, n: Tensor, state: dict[str, float]) -> Any:
    mean = x.mean()
    return mean.item(), mean.detach().item() * x


def _number_twice(x: Tensor, n: Tensor, state: dict[str, float]) -> Any:
    number = n[0]
    return x.new_zeros(number.item()), x.new_ones(number.detach().item())


def _unique_twice(x: Tensor, n: Tensor, state: dict[str, float]) -> Any:
    return n.unique() + 1, n.detach().unique() * 2, n.detach().unique(return_inverse=True)


def _running_mean(x: Tensor, n: Tensor, state: dict[str, float]) -> Any:
    loss = x.square().mean()
    state["total"] += loss.item()
    state["count"] += 1
    return loss, state["total"] / state["count"]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("program", [_mask_twice, _mean_twice, _number_twice, _unique_twice, _running_mean])
def test_values_read_twice_on_inductor(program: Callable[..., Any], training: bool, fresh_dynamo: None) -> None:
    """Two reads of one tensor, and a read that is added to a number in state, crashed Inductor."""
    results: list[list[Any]] = []
    for call in (program, aotlab.compile(program)):
        state, found = {"total": 0.0, "count": 0}, []
        for make in _calls("training" if training else "inference"):
            (x, n), leaves = make()
            found.append([call(x, n, state), leaves["leaf"].grad])
            tensors = [each for each in torch.utils._pytree.tree_leaves(found[-1]) if isinstance(each, Tensor)]
            if differentiable := [each.sum() for each in tensors if each.requires_grad]:
                torch.stack(differentiable).sum().backward()
                found.append(leaves["leaf"].grad)
        results.append([*found, state])
    torch.testing.assert_close(results[1], results[0], check_stride=False)


def test_a_failed_check_raises_before_a_write() -> None:
    """`torch._check` raises eager's error at each call for which its condition is false, and nothing is written."""

    def f(x, n):
        k = n.item()
        torch._check(k < 3)
        x.add_(k)
        return x * k

    call = compiled(f)
    x = torch.zeros(2)
    assert call(x, torch.tensor(2)).tolist() == [4.0, 4.0]
    for function in (call, f):
        with quietly(), pytest.raises(RuntimeError, match="Expected cond to be True"):
            function(x, torch.tensor(3))
    assert x.tolist() == [2.0, 2.0]
    assert call(x, torch.tensor(1)).tolist() == [3.0, 3.0]
    assert (call.calls.compiled, len(call.entries)) == (2, 1)


def _reshaped(x, n):
    columns = x[:, : n[0].item()]
    flat = columns.reshape(-1)
    flat.add_(1)
    return flat, columns


def _contiguous(x, n):
    rows = x[n > 1].t()
    return rows, rows.contiguous()


def _flattened(x, n):
    rows = x[n > 1].t()
    flat = rows.flatten()
    rows.add_(1)
    return flat * 1


@pytest.mark.parametrize(("program", "views"), [(_reshaped, 3), (_contiguous, 2), (_flattened, 2)])
def test_a_copy_that_may_be_a_view(program: Callable[..., Any], views: int) -> None:
    """`reshape` copies some columns, but returns a view of one column or of all. A call with a view runs eagerly."""
    call = compiled(program)
    values = ((3, 2, 2, 0, 0, 0), (1, 0, 0, 0, 2, 0), (6, 0, 0, 0, 0, 0), (2, 0, 0, 0, 0, 4))
    calls = [lambda values=values: ((leaf(6, 3).detach(), torch.tensor(values)), {}) for values in values]
    with quietly():
        assert differences(program, call, calls) == []
    assert (call.calls.compiled, call.calls.eager) == (4 - views, views)


def test_an_unused_part_that_does_not_exist_raises() -> None:
    """An index raises eager's error if the call has too few elements, even if the result is not used."""

    def f(x):
        x[x > 0].select(0, 1)
        return x * 2

    call = compiled(f)
    assert call(torch.tensor([1.0, 2.0])).tolist() == [2.0, 4.0]
    for function in (call, f):
        with quietly(), pytest.raises(IndexError, match="index 1 out of range"):
            function(torch.tensor([1.0, -2.0]))


def test_min_cut_counts_the_bytes_of_a_size_that_was_fixed() -> None:
    """The program fixes a size that depends on values; `expand` requires one of two values."""

    def f(x):
        y = x[x > 0].exp()
        return y.expand(2, 2).sin()

    x = torch.tensor([1.0, -1.0, 2.0], requires_grad=True)
    expected = torch.autograd.grad(f(x).sum(), x)
    assert torch.equal(*expected, *torch.autograd.grad(by_min_cut(f)(x).sum(), x))


def test_the_op_that_makes_a_size_binds_it() -> None:
    """The forward graph reads the size from the op's result and returns it, and the backward takes it."""
    call = compiled(lambda x: x[x > 0].exp().sum())
    call(leaf(4))
    parts = record(call, "partition")
    (size,) = [node for node in parts.forward.graph.nodes if node.target is torch.ops.aten.sym_size.int]
    assert "unbacked_bindings" in size.args[0].meta
    assert size in parts.forward.graph.output_node().args[0]
    assert size.name in [node.name for node in parts.backward.graph.nodes if node.op == "placeholder"]
    assert "u0 = results[1]" in record(call, "runtime").source


@pytest.mark.parametrize("compiles", [compiled, by_min_cut])
def test_parts_of_backwards(compiles: Callable[..., Any]) -> None:
    """A backward from one of two outputs, and a second-order backward, take the sizes of their call."""

    def f(x):
        return x[x > 0] ** 3, x[x > 1].exp()

    call = compiles(f)
    for seed in range(3):
        found = []
        for function in (f, call):
            x = leaf(12, seed=seed)
            first, second = function(x)
            (gradient,) = torch.autograd.grad(first.sum(), x, create_graph=True)
            (again,) = torch.autograd.grad(gradient.square().sum(), x)
            found.append([*torch.autograd.grad(second.sum(), x), gradient, again])
        for expected, actual in zip(*found, strict=True):
            assert torch.equal(expected, actual)
    assert behind(call).calls.compiled == 3


def _branches(x, n):
    return x * 2 if x[x > 0].shape[0] > 2 else x * 3


def _loops(x, n):
    for _ in range(n[0].item()):
        x = x * 2
    return x


def _catches(x, n):
    try:
        return x * 2 if n[0].item() > 2 else x * 3
    except Exception:  # noqa: BLE001  # as users write it
        return x * 5


def _looks_up(x, n):
    return x * [1, 2, 3, 4, 5, 6, 7][n[0]]


def _indexes(x, n):
    return x[n[1].item(), 1:]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("program", [_branches, _loops, _catches, _looks_up, _indexes])
def test_python_that_needs_the_value(program: Callable[..., Any]) -> None:
    """A branch, a loop or a look-up by such a number runs eagerly, and behind Dynamo as Python code."""
    with quietly():
        call = compiled(program)
        assert differences(program, call, _calls("training")) == []
        assert call.calls.eager == 4
        assert differences(program, compiled(program, frontend="dynamo"), _calls("training")) == []
    with aotlab.config.patch(fallback="error"), pytest.raises(RefusedError, match=r"values? of"):
        compiled(program)(torch.ones(6, 3), torch.tensor(VALUES[0]))
