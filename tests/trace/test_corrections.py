"""Differences that the op database found: functions whose trace did not match their eager run."""

from __future__ import annotations

import pytest
import torch

import aotlab
from aotlab._torch import FakeTensorMode, as_in_eager
from aotlab.errors import DataDependentError
from aotlab.frontends.dynamo_frontend import backend
from tests.engine_helpers import behind, compiled, leaf, nonleaf, refusing, same, traced


def behind_dynamo(function, compiler: str = "eager"):
    """Compile as users of torch.compile do."""
    torch.compiler.reset()
    return torch.compile(function, backend=backend, options={"compiler": compiler})


def spread(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor with a gap behind each element."""
    return torch.zeros(*shape, 2, dtype=dtype)[..., 0]


def test_results_that_do_not_fit_raise_as_in_eager():
    """Of dtypes that eager would have to cast."""
    assert same(lambda x, y: x.ldexp_(y), torch.ones(2, dtype=torch.int64), torch.ones(2), eagerly=True)


def test_rounding_division_of_integers_stays_among_integers():
    """Other than true division, it is compiled in place."""
    x, y = torch.tensor([7, -7, 5]), torch.tensor([2, 2, 3])
    assert same(lambda x, y: x.div_(y, rounding_mode="floor"), x, y)
    assert same(lambda x, y: x.div_(y), x, y, eagerly=True)


@pytest.mark.parametrize("training", [False, True])
def test_writes_of_another_shape_raise_as_in_eager(training):
    """Functionalization would let the broadcast result take the tensor's place; eager says that it does not fit."""
    x = nonleaf(3) if training else torch.ones(3)
    assert same(lambda x, y: x.add_(y), x, torch.ones(2, 3), eagerly=True)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        compiled(lambda x, y: x.add_(y))(x, torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        behind_dynamo(lambda x, y: x.clone().mul_(y))(torch.ones(3), torch.ones(2, 3))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, out: torch.amax(x, 0, out=out),
        lambda x, out: torch.gather(x, 0, torch.zeros(3, dtype=torch.int64), out=out),
        lambda x, out: torch.add(x, 1, out=out),
    ],
    ids=["amax", "gather", "add"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_results_of_another_dtype_are_eagers_affair(function, dtype):
    """Some functions cast their result to the dtype of `out`, some raise; functionalization would always cast."""
    x = torch.arange(3.0)
    shape = () if "amax" in function.__code__.co_names else (3,)
    assert same(function, x, torch.zeros(shape, dtype=dtype), eagerly=True)
    assert same(function, x, torch.zeros(shape))


def test_casts_in_place():
    """Where the kind of number stays, eager casts in place, and so does the graph; views too; copies cast anything."""
    x, y = torch.ones(3, 2), torch.full((2,), 2.5, dtype=torch.float64)
    assert same(lambda x, y: x.mul_(y), x, y)
    assert same(lambda x, y: x[0].mul_(y), x, y)
    assert same(lambda x, y: x.copy_(y), torch.ones(2, dtype=torch.int64), y)
    assert same(lambda x, y: x.__setitem__(0, y[0]), torch.ones(2, dtype=torch.int64), y)
    assert same(lambda x, y: x.mul_(y), torch.ones(2, dtype=torch.int64), y, eagerly=True)


def test_not_implemented_comes_back():
    """A reflected operator returns it where it cannot help."""
    assert same(lambda x: x.__rsub__("text"), torch.ones(2))


def test_rank_is_written():
    """`matrix_rank(out=)` hands its result on where functionalization does not see it: zero came back for any rank."""
    x, out = torch.eye(3), torch.zeros((), dtype=torch.int64)
    f = compiled(lambda x, out: torch.linalg.matrix_rank(x, out=out))
    f(x, out)
    assert (out.item(), f.calls.compiled) == (3, 1)
    assert same(lambda x, out: torch.linalg.matrix_rank(x, out=out), x, out)
    assert same(lambda x, out: torch.linalg.matrix_rank(x, out=out), x, torch.zeros(()), eagerly=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, out: torch.narrow_copy(x, 1, 0, 3, out=out),
        lambda x, out: torch._C._nn.gelu(x, out=out),
    ],
    ids=["narrow_copy", "gelu"],
)
def test_kernels_that_take_gaps_for_elements_run_eagerly(function):
    """Kernels that ignore the strides of an `out` with gaps write outside its elements; such calls run eagerly."""
    x = torch.arange(12.0).reshape(4, 3)
    assert same(function, x, torch.zeros(4, 3))
    assert same(function, x, spread(4, 3), eagerly=True)


def test_statistics_of_a_batch_with_gaps():
    """Eager's batch norm with `out` reads an input with gaps as if it had none; so it is left to eager."""
    x = spread(4, 3, 2)
    x.copy_(torch.randn(4, 3, 2))
    out = (torch.zeros(4, 3, 2), torch.zeros(3), torch.zeros(3))

    def f(x, weight, bias, mean, variance, *out):
        return torch.native_batch_norm(x, weight, bias, mean, variance, True, 0.1, 1e-5, out=out)

    rest = (torch.ones(3), torch.zeros(3), torch.zeros(3), torch.ones(3), *out)
    assert same(f, x, *rest, eagerly=True)


def test_values_without_vectors():
    """Where no gradient needs them, eager computes no vectors, by another algorithm; in training it does."""
    matrix = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    symmetric = matrix + matrix.T
    for function in (torch.linalg.svdvals, torch.linalg.eigvalsh, torch.linalg.cond, lambda x: torch.norm(x, "nuc")):
        assert same(function, symmetric)
        assert same(function, symmetric.clone().requires_grad_())
    module = behind(traced(torch.linalg.svdvals, matrix)).entries[0].records.trace.module
    call = next(node for node in module.graph.nodes if "svd" in str(node.target))
    assert call.kwargs == {"compute_uv": False}
    # the vectors of a decomposition that happens to be used for its values are computed
    assert same(lambda x: torch.linalg.svd(x)[1], matrix)


@pytest.mark.parametrize("function", [torch.linalg.eig, torch.linalg.eigh, torch.linalg.svd, torch.svd])
def test_complex_vectors_with_a_gradient_run_eagerly(function):
    """Complex decompositions with a gradient run eagerly, because eager's backward checks values to refuse some losses.

    Real inputs, and inputs that require no grad, are compiled.
    """
    x = torch.randn(3, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))

    def ill_defined(x):
        return torch.view_as_real(function(x)[0 if "svd" in function.__name__ else 1]).sum()

    same(ill_defined, x.clone().requires_grad_(), eagerly=True)
    same(ill_defined, x)
    if function is not torch.linalg.eig:
        same(lambda x: function(x + x.mT)[1].sum(), leaf(3, 3))


def test_sizes_that_fake_tensors_promise():
    """A single sample has a single loss; torch's fake tensors say that it is a vector of one."""
    target = torch.tensor([1, -1, 0])

    def g(x, target):
        loss = torch.nn.functional.multilabel_margin_loss(x, target, reduction="none")
        return loss.dim(), loss

    assert same(g, leaf(3), target)
    assert same(g, torch.ones(2, 3), torch.stack([target, target]))


def test_strides_that_fake_tensors_promise():
    """Unpooling keeps the memory format; torch's fake tensors say that its result is contiguous."""
    x = leaf(2, 2, 2, 3).to(memory_format=torch.channels_last)
    pooled, indices = torch.nn.functional.max_pool2d(leaf(2, 2, 4, 6), 2, return_indices=True)

    def f(x, indices):
        whole = torch.nn.functional.max_unpool2d(x, indices, 2)
        return whole.stride(), whole.is_contiguous(), whole

    assert same(f, x, indices)
    assert same(f, pooled, indices)


@pytest.mark.parametrize("shape", [(2,), ()], ids=["vector", "scalar"])
def test_dimensions_that_fake_tensors_do_not_look_at(shape):
    """A softmax over a dimension that does not exist raises as in eager, after the writes that precede it."""

    def f(x, y):
        y.add_(1)
        x.softmax(1)
        return y * 2

    for function in (f, aotlab.compile(f, backend="eager")):
        y = torch.zeros(2)
        with pytest.raises(IndexError, match="Dimension out of range"):
            function(torch.ones(shape), y)
        assert y.tolist() == [1.0, 1.0]
    assert same(lambda x: x.softmax(-1), torch.ones(shape))


def test_questions_about_constants_are_answered():
    """Values that depend on no input are the same at every call: they can decide a branch and can be returned."""

    def f(x):
        steps = torch.arange(4).cumsum(0)
        return x * steps.max().item() if torch.equal(steps, torch.tensor([0, 1, 3, 6])) else x

    assert same(f, leaf(3))
    assert same(torch.cov, leaf(3, 5))
    assert same(torch.corrcoef, torch.rand(3, 5))


@pytest.mark.parametrize(
    "function",
    [lambda x: x * int(torch.ones_like(x).add(x).max().item()), lambda x: x * int(torch.rand(3).max().item())],
    ids=["an input", "random numbers"],
)
def test_questions_about_other_values_are_refused(function):
    """If Python needs it, `.item()` raises for a value that depends on an input or on a random draw.

    The next call would have another value.
    """
    with refusing(DataDependentError, match=r"`\.item\(\)` needs the value"):
        compiled(function)(torch.ones(3))


def test_a_view_without_elements_keeps_its_place():
    """A view without elements has its base's storage offset and storage, whatever another fake mode cached."""
    mode = FakeTensorMode()
    with mode:
        tail, wrong = torch.empty(2, 2)[2:], torch.empty(0, 2)
    made = as_in_eager(torch.ops.aten.view.default, (tail, [0, 2]), {}, wrong, mode)
    assert (made.shape, made.storage_offset()) == ((0, 2), 4)
    assert made.untyped_storage()._cdata == tail.untyped_storage()._cdata


@pytest.mark.parametrize("name", ["max", "min", "median", "nanmedian"])
def test_gradients_of_extrema_are_written_by_a_mask(name):
    """Where they are not finite, those of the other elements are zeros all the same, and zeros are positive."""
    assert same(lambda x: (getattr(x, name)() * 0).sqrt(), nonleaf(3))
    function = compiled(lambda x: -getattr(x, name)())
    found = []
    for call in (function, lambda x: -getattr(x, name)()):
        x = torch.tensor([1.0, float("nan") if name == "nanmedian" else 3.0, 2.0], requires_grad=True)
        call(x).backward()
        found.append(str(x.grad.tolist()))
    assert found[0] == found[1]
    assert "-0.0" not in found[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.ops.aten.lift_fresh(x),
        lambda x: torch.ops.aten.lift_fresh.default(x) * 2,
        lambda x: x.clone().polygamma_(1),
        lambda x: torch.ops.aten.polygamma_.default(x.clone(), 0).sum(),
        lambda x: torch.unsafe_split(x, 1)[0].mul_(2),
    ],
)
def test_ops_that_are_something_else_to_a_trace(function):
    """They run eagerly, and the notice names an op to call instead."""
    same(function, torch.rand(3) + 1, eagerly=True)
    same(function, leaf(3), eagerly=True)
    with pytest.warns(RuntimeWarning, match=r"; (use|write) .* \[(aliases-differ-in-trace|polygamma-in-place)\]$"):
        compiled(function)(torch.ones(3))


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (2, 0, 1)])
def test_transforms_of_real_values(dims: tuple[int, ...]) -> None:
    """The strides of a transform are the kernel's, also where torch's fake has others."""
    function = lambda x: torch.fft.rfftn(x, dim=dims)  # noqa: E731
    for x in (torch.randn(4, 5, 6), torch.randn(6, 5, 4).transpose(0, 2)):
        with aotlab.config.patch(debug_assert=True, fallback="error"):
            result = aotlab.compile(function, backend="eager")(x)
        assert function(x).stride() == result.stride()
        assert torch.equal(function(x), result)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_shuffled_channels(layout):
    """They keep their memory format, by which dropout draws; torch's fake does not, and other elements were dropped."""
    x = torch.rand(2, 4, 4, 5).to(memory_format=layout)
    for function in (
        lambda x: torch.nn.functional.channel_shuffle(x, 2),
        lambda x: torch.nn.functional.dropout(torch.nn.functional.channel_shuffle(x, 2), 0.5),
    ):
        results = []
        for candidate in (function, aotlab.compile(function, backend="eager")):
            torch.manual_seed(0)
            results.append(candidate(x))
        assert results[0].stride() == results[1].stride()
        assert torch.equal(*results)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize("sizes", [(3, 2), (6,), (1, 3, 2), (2, 3)])
def test_a_view_around_a_dimension_of_size_one(backend, is_used, sizes):
    """Fakes take tensors for viewable that are not; the error is eager's, used or not, and not other values."""

    def f(x):
        view = x.view(sizes)
        return view * 2 if is_used else x * 2

    x = torch.arange(6.0).reshape(3, 1, 2).permute(2, 1, 0)
    for frontend in ("direct", "dynamo"):
        call = aotlab.compile(f, backend=backend, frontend=frontend)
        if sizes == (2, 3):
            assert torch.equal(f(x), call(x))
        else:
            with pytest.raises(RuntimeError, match="view size is not compatible"):
                call(x)
