"""Storages of arguments that the function allocates and frees, as FSDP does with parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aotlab
from aotlab.errors import RefusedError
from tests.engine_helpers import behind, compiled, keeping_functions, refusing

resize_ = torch.ops.inductor.resize_storage_bytes_


def gather(w: Tensor, values: Tensor) -> None:
    """Allocate the memory of a parameter, and fill it."""
    resize_(w, w.numel() * w.element_size())
    with torch.no_grad():
        w.copy_(values)


def freed(*shape: int, grad: bool = True) -> Tensor:
    """Make a parameter whose storage is free."""
    w = nn.Parameter(torch.zeros(shape), requires_grad=grad)
    w.untyped_storage().resize_(0)
    return w


def gathers(x, w, values):
    """Leave the parameter allocated."""
    gather(w, values)
    return (x @ w).relu()


def frees(x, w, values):
    """Free a parameter that was allocated before the call."""
    y = x * 2 + w.detach().sum() * values
    resize_(w, 0)
    return y


def gathers_and_frees(x, w, values):
    """Allocate, use and free, as a layer of FSDP."""
    gather(w, values)
    y = x @ w
    resize_(w, 0)
    return y.sin()


def gathers_twice(x, w, values):
    """Allocate and free for each of two uses."""
    gather(w, values)
    y = x @ w
    resize_(w, 0)
    gather(w, values * 2)
    y = y.relu() @ w
    resize_(w, 0)
    return y


def two_layers(x, w, v, values):
    """Allocate the parameter of the second layer before the first is freed."""
    gather(w, values)
    gather(v, values + 1)
    y = (x @ w).relu()
    resize_(w, 0)
    y = y @ v
    resize_(v, 0)
    return y


def writes_twice(x, w, values):
    """Scale the parameter after the copy."""
    gather(w, values)
    with torch.no_grad():
        w.mul_(0.5)
    y = x @ w
    resize_(w, 0)
    return y


def fills(x, w, values):
    """Fill the parameter by another op than `copy_`."""
    resize_(w, w.numel() * w.element_size())
    with torch.no_grad():
        w.fill_(3)
    return x @ w + values[0]


def frees_and_gathers(x, w, values):
    """Free the memory, and allocate it again."""
    resize_(w, 0)
    gather(w, values)
    return x @ w


def by_storage(x, w, values):
    """Resize the storage in Python; only Dynamo can capture this."""
    w.untyped_storage().resize_(w.numel() * w.element_size())
    with torch.no_grad():
        w.copy_(values)
    y = x @ w
    w.untyped_storage().resize_(0)
    return y


def arguments(grad: bool) -> tuple[Tensor, ...]:
    """Make an input, a freed parameter, and the gathered values."""
    return torch.ones(2, 3, requires_grad=grad), freed(3, 3, grad=grad), torch.arange(9.0).reshape(3, 3)


def allocated(grad: bool) -> tuple[Tensor, ...]:
    """Make an input, an allocated parameter, and values."""
    return torch.ones(2, 3, requires_grad=grad), nn.Parameter(torch.ones(3, 3), requires_grad=grad), torch.tensor(2.0)


def two_freed(grad: bool) -> tuple[Tensor, ...]:
    """Make an input, two freed parameters, and the gathered values."""
    x, w, values = arguments(grad)
    return x, w, freed(3, 3, grad=grad), values


def mixed(grad: bool) -> tuple[Tensor, ...]:
    """Make an input, an allocated parameter, and the gathered values."""
    return (*allocated(grad)[:2], torch.arange(9.0).reshape(3, 3))


#: For each program: its arguments, and the values that the caller gathers again before the backward, one for each
#: parameter. With None, only inference is tested: eager's backward raises, because it needs a parameter in two states.
PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[[bool], tuple[Tensor, ...]], Any]] = {
    "gathers": (gathers, arguments, lambda values: [values]),
    "frees": (frees, allocated, lambda values: [torch.ones(3, 3)]),
    "gathers and frees": (gathers_and_frees, arguments, lambda values: [values]),
    "gathers twice": (gathers_twice, arguments, None),
    "two layers": (two_layers, two_freed, lambda values: [values, values + 1]),
    "writes twice": (writes_twice, arguments, lambda values: [values * 0.5]),
    "fills": (fills, arguments, lambda values: [torch.full((3, 3), 3.0)]),
    "frees and gathers": (frees_and_gathers, mixed, lambda values: [values]),
    "gathers an allocated parameter": (gathers_and_frees, mixed, lambda values: [values]),
    "by storage": (by_storage, arguments, lambda values: [values]),
}


def observed(name: str, call: Callable[..., Any], grad: bool) -> list[Any]:
    """Return everything that the caller of two calls sees; before a backward, the caller gathers all parameters."""
    _, make, again = PROGRAMS[name]
    seen: list[Any] = []
    for _ in range(2):
        args = make(grad)
        out = call(*args)
        seen += [out.detach().clone(), str(out.grad_fn is None)]
        seen += [(each.untyped_storage().nbytes(), each._version > 0, each.requires_grad) for each in args]
        seen += [each.detach().clone() for each in args if each.untyped_storage().nbytes()]
        if grad:
            for w, values in zip(args[1:-1], again(args[-1]), strict=True):
                with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(w):
                    w.untyped_storage().resize_(w.numel() * w.element_size())
                    w.copy_(values)
            out.sum().backward()
            seen += [each.grad for each in args[:-1]]
    return seen


@pytest.fixture(autouse=True)
def _notices_are_errors():
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* runs eagerly", RuntimeWarning)
        yield


def assert_equal(expected: list[Any], found: list[Any]) -> None:
    """Compare two results of `observed`, bit for bit."""
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other, (one, other)


CASES = [(name, grad) for name, (*_, again) in PROGRAMS.items() for grad in ((False, True) if again else (False,))]


@pytest.mark.parametrize(("name", "grad"), [case for case in CASES if case[0] != "by storage"])
def test_called_directly(name, grad):
    """Values, gradients, versions and the sizes of the storages are eager's, and one entry serves all calls."""
    candidate = compiled(PROGRAMS[name][0], frontend="direct")
    assert_equal(observed(name, PROGRAMS[name][0], grad), observed(name, candidate, grad))
    assert (behind(candidate).calls.compiled, len(behind(candidate).entries)) == (2, 1)


@pytest.mark.parametrize(("name", "grad"), CASES)
def test_behind_dynamo(name, grad):
    """The same behind Dynamo, in one graph."""
    made: list[Any] = []
    candidate = torch.compile(PROGRAMS[name][0], backend=keeping_functions(made))
    assert_equal(observed(name, PROGRAMS[name][0], grad), observed(name, candidate, grad))
    assert [(each.calls.compiled, each.calls.eager) for each in made] == [(2, 0)]


@pytest.mark.parametrize("name", ["gathers and frees", "two layers"])
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
def test_inductor(name, frontend):
    """Inductor's kernels write the parameter's memory after it was allocated."""
    candidate = compiled(PROGRAMS[name][0], frontend=frontend, backend="inductor")
    for grad in (False, True):
        expected, found = observed(name, PROGRAMS[name][0], grad), observed(name, candidate, grad)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one) if isinstance(one, Tensor) else None
            assert isinstance(one, Tensor) or one == other


def test_varying_sizes():
    """One entry serves parameters of all sizes."""
    candidate = compiled(gathers_and_frees, dynamic=True)
    for n in (3, 5, 8):
        found = []
        for call in (gathers_and_frees, candidate):
            w = freed(n, n + 1, grad=False)
            found.append([call(torch.ones(2, n), w, torch.ones(n, n + 1)), w.untyped_storage().nbytes(), w._version])
        assert torch.equal(found[0][0], found[1][0])
        assert found[0][1:] == found[1][1:]
    assert len(behind(candidate).entries) == 1


def test_a_backward_without_the_memory_raises():
    """As in eager: the caller must gather the parameter before the backward."""
    for call in (gathers_and_frees, compiled(gathers_and_frees)):
        out = call(*arguments(True))
        with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
            out.sum().backward()


def a_part(x, w, values):
    """Allocate only a part of the memory."""
    resize_(w, 12)
    return x * 2


def an_intermediate(x, w, values):
    """Free the memory of an intermediate."""
    y = x * 2
    resize_(y, 0)
    return x + 1


def returns_it(x, w, values):
    """Return a view of the freed parameter."""
    v = w.view(9)
    resize_(w, 0)
    return v.detach()


@pytest.mark.parametrize("program", [a_part, an_intermediate, returns_it])
def test_other_sizes_run_eagerly(program):
    """Parts of the memory, intermediates and freed results are not compiled."""
    with refusing(match="resizes a storage"):
        compiled(program, frontend="direct")(*mixed(False))


class Gathers(torch.autograd.Function):
    """Multiplies by the gathered values, and gathers the parameter in the backward."""

    @staticmethod
    def forward(ctx, x, w, values):
        ctx.save_for_backward(x, values)
        ctx.w = w
        return x @ values

    @staticmethod
    def backward(ctx, gradient):
        x, values = ctx.saved_tensors
        gather(ctx.w, values)
        return gradient @ ctx.w.t(), x.t() @ gradient, None


class GathersAndFrees(Gathers):
    """Gathers in the backward, and frees the parameter at the end of the backward, as FSDP does."""

    @staticmethod
    def backward(ctx, gradient):
        x, values = ctx.saved_tensors
        gather(ctx.w, values)
        gradients = gradient @ ctx.w.t(), x.t() @ gradient, None
        resize_(ctx.w, 0)
        return gradients


class Scales(Gathers):
    """Writes the gathered parameter again before its use."""

    @staticmethod
    def backward(ctx, gradient):
        values = ctx.saved_tensors[1]
        gather(ctx.w, values)
        with torch.no_grad():
            ctx.w.mul_(2)
        gradient = gradient @ ctx.w.t()
        resize_(ctx.w, 0)
        return gradient, None, None


class WritesOnly(Gathers):
    """Writes a parameter that it does not resize."""

    @staticmethod
    def backward(ctx, gradient):
        ctx.w.mul_(2)
        return gradient @ ctx.w.t(), None, None


class OnlyFrees(Gathers):
    """Frees the parameter without a write."""

    @staticmethod
    def backward(ctx, gradient):
        resize_(ctx.w, 0)
        return gradient @ ctx.saved_tensors[1].t(), None, None


class AllocatesAPart(Gathers):
    """Allocates a part of the memory."""

    @staticmethod
    def backward(ctx, gradient):
        resize_(ctx.w, 12)
        return gradient @ ctx.saved_tensors[1].t(), None, None


def backwards_of(call: Callable[..., Any], w: Tensor) -> list[Any]:
    """Return everything that the caller of two calls sees: a backward, two backwards, or one for some inputs only."""
    seen: list[Any] = []
    for inputs in ((0, 1), (0,), (1,)):
        x, values = torch.arange(6.0).view(2, 3).requires_grad_(), torch.arange(9.0).view(3, 3)
        w = freed(3, 3) if w.requires_grad else freed(3, 3, grad=False)
        out = call(x, w, values)
        seen += [out.detach(), w.untyped_storage().nbytes(), w._version]
        chosen = [each for n, each in enumerate((x, w)) if n in inputs and each.requires_grad]
        for _ in range(2) if chosen else ():
            seen += torch.autograd.grad(out.sum(), chosen, retain_graph=True, allow_unused=True)
            seen += [w.untyped_storage().nbytes(), w._version > 0]
            seen += [w.detach().clone()] if w.untyped_storage().nbytes() else []
    return seen


@pytest.mark.parametrize("function", [Gathers, GathersAndFrees, Scales])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("frontend", "backend"), [("direct", "eager"), ("dynamo", "eager"), ("direct", "inductor")])
def test_resizes_in_a_backward(function, grad, frontend, backend):
    """The storage is resized when the backward runs, for parameters and for buffers."""

    def program(x, w, values):
        return function.apply(x, w, values).sin()

    candidate = compiled(program, frontend=frontend, backend=backend)
    expected, found = (backwards_of(call, freed(3, 3, grad=grad)) for call in (program, candidate))
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, **({"rtol": 0, "atol": 0} if backend == "eager" else {}))
    if frontend == "direct":
        assert (behind(candidate).calls.compiled, behind(candidate).calls.eager) == (3, 0)


def test_a_backward_of_another_output():
    """It does not resize the storage, because autograd does not run the Function."""
    for call in (two_outputs, compiled(two_outputs, frontend="direct")):
        x, w, values = arguments(True)
        gathered, other = call(x, w, values)
        other.sum().backward(retain_graph=True)
        sizes = [w.untyped_storage().nbytes()]
        gathered.sum().backward()
        assert [*sizes, w.untyped_storage().nbytes()] == [0, 36]


def two_outputs(x, w, values):
    """Return an output that needs the parameter, and one that does not."""
    return Gathers.apply(x, w, values), x * 3


def test_a_write_without_a_resize_runs_eagerly():
    """A backward that writes a parameter that requires grad is compiled only if it resizes the storage."""
    with refusing(match="the backward writes in place"):
        compiled(lambda *args: WritesOnly.apply(*args), frontend="direct")(*mixed(True))


def test_verification_and_report(tmp_path):
    """Both handle a parameter whose storage a backward resizes."""

    def program(x, w, values):
        return GathersAndFrees.apply(x, w, values).sin()

    assert aotlab.verify(program, *arguments(True)).first is None
    with aotlab.Report.record() as report:
        compiled(program)(*arguments(True)).sum().backward()
    report.to_html(tmp_path / "report.html")
    assert report.inputs["name"].tolist() == ["x", "w", "values"]


@pytest.mark.parametrize("function", [OnlyFrees, AllocatesAPart])
def test_other_resizes_in_a_backward_run_eagerly(function):
    """A backward that writes no values, or allocates a part of the memory, is not compiled."""
    with refusing(match="resizes a storage"):
        compiled(lambda *args: function.apply(*args), frontend="direct")(*arguments(True))


def test_an_export_is_refused():
    """An exported graph has nothing that could allocate the memory."""
    with pytest.raises(RefusedError, match="storage_sizes"):
        aotlab.aot_export_joint_simple(lambda x, w, v: (gathers(x, w, v),), arguments(False), trace_joint=False)
