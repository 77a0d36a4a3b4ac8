"""Inputs and intermediates that are given other memory: ``out=``, ``resize_``, ``set_``, storages, ``.data =``."""

from __future__ import annotations

import warnings

import pytest
import torch

from aotlab.errors import EscapeError, MetadataMutationError, StorageMutationError
from aotlab.ir.metadata import MutationType
from tests.engine_helpers import compiled, leaf, metadata, nonleaf, refusing, same
from tests.stages.test_metadata_mutation import behind_dynamo

pytestmark = pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")

# --- out=


def test_out_that_fits():
    """A plain write."""

    def f(a, x):
        torch.mul(a, 2, out=x)
        return x + 1

    same(f, torch.randn(2, 3), torch.empty(2, 3))
    behind_dynamo(f, torch.randn(2, 3), torch.zeros(2, 3))


@pytest.mark.parametrize(
    "x", [torch.zeros(3, 2).t(), torch.zeros(4, 6)[::2, ::2], torch.zeros(6)[None, :3].expand(2, 3).clone()]
)
def test_out_that_is_not_contiguous(x):
    """It keeps its strides; what lies between its elements is left alone."""

    def f(a, x):
        torch.mul(a, 2, out=x)
        return x.t()

    same(f, torch.randn(2, 3), x)
    behind_dynamo(f, torch.randn(2, 3), x)


@pytest.mark.parametrize("x", [torch.zeros(0), torch.zeros(7), torch.zeros(1, 1), torch.zeros(9).resize_(0)])
def test_out_that_is_resized(x):
    """Eager gives it the result's shape, and new memory where it is too small."""

    def f(a, x):
        torch.mul(a, 2, out=x)
        return x + 1, x

    same(f, torch.randn(2, 3), x, eagerly=True)


@pytest.mark.parametrize("step", [lambda x: x.squeeze_(), lambda x: x.unsqueeze_(0), lambda x: x.t_()])
@pytest.mark.parametrize(
    "op",
    [
        lambda a, x: torch.neg(a, out=x),
        lambda a, x: torch.stack([a[:, 0]], out=x),
    ],
)
def test_out_that_is_resized_after_a_step(op, step):
    """The step is over by then, and not to be taken again: left to eager, unless what the op gives fits."""

    def f(a, x):
        step(x)
        op(a, x)
        return x

    inputs = torch.randn(2, 1), torch.randn(2, 1)
    fits = step(inputs[1].clone()).shape == f(inputs[0], inputs[1].clone()).shape
    same(f, *inputs, eagerly=not fits)


@pytest.mark.parametrize("step", [lambda x: x.squeeze_(), lambda x: x.unsqueeze_(0), lambda x: x.t_().t_()])
def test_an_intermediate_that_is_resized_to_more_after_a_step(step):
    """Likewise: the step is over by then."""

    def f(a):
        v = a / 2
        step(v)
        return v.resize_(6).fill_(2)

    expected, made = f(torch.randn(2, 1)), compiled(f)
    assert torch.equal(made(torch.randn(2, 1)), expected)


def test_out_that_is_written_before_and_is_narrowed():
    """What lies behind the result keeps what was written: left to eager."""

    def f(a, x):
        view = x[1:]
        x.add_(1)
        torch.mul(a, 2, out=x)
        return view

    same(f, torch.randn(2), torch.zeros(6), eagerly=True)


def test_out_that_is_a_view_of_an_input():
    """Fitting it is a write to the input; resized it is left to eager."""

    def f(a, x):
        torch.mul(a, 2, out=x[1:3])
        return x + 1

    same(f, torch.randn(2), torch.zeros(4))
    same(f, torch.randn(3), torch.zeros(4), eagerly=True)


def test_out_that_is_an_intermediate():
    """Made inside, where it fits."""

    def f(a):
        x = torch.empty(2, 3)
        torch.mul(a, 2, out=x)
        return x

    def g(a):
        x = torch.empty(0)
        torch.mul(a, 2, out=x)
        return x, x[0]

    same(f, torch.randn(2, 3))
    same(g, torch.randn(2, 3), eagerly=True)
    behind_dynamo(f, torch.randn(2, 3))


def test_out_with_gradients_is_eagers_error():
    """``out=`` does not differentiate."""

    def f(a, x):
        torch.mul(a, 2, out=x)
        return x

    same(f, leaf(2), torch.zeros(2), eagerly=True)


# --- resize_


@pytest.mark.parametrize("shape", [(5,), (2, 3), (6,)])
def test_growing_an_input(shape):
    """The caller's tensor grows; the old elements stay, the new ones are written by the function."""

    def f(x):
        count = x.numel()
        x.resize_(shape)
        x.view(-1)[count:] = 7
        return x * 2

    same(f, torch.randn(3))
    same(f, torch.empty(0))


def test_growing_an_input_that_was_written():
    """The write is there."""

    def f(x):
        x.mul_(2)
        x.resize_(4)
        x[3] = 1
        x.unsqueeze_(0)
        return x + 1

    same(f, torch.randn(3))


def test_growing_into_memory_that_is_there():
    """The graph takes what lies behind the input in its storage too."""

    def f(x):
        x.resize_(5)
        return x * 2

    same(f, torch.arange(8.0)[:3])
    g = compiled(lambda x: x.resize_(5).fill_(1))
    g(torch.zeros(3))
    buffer = torch.arange(8.0)
    compiled(f)(torch.zeros(3))
    assert compiled(f)(buffer[:3]).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_an_entry_that_grows_does_not_serve_what_has_memory_behind_it():
    """Compiled for a tensor that fills its storage, called with one that does not."""

    def f(x):
        x.resize_(5)
        return x * 2

    g = compiled(f)
    g(torch.zeros(3))
    assert g(torch.arange(8.0)[:3]).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_shrinking_and_growing():
    """The old elements come back."""

    def f(x):
        x.mul_(2)
        x.resize_(2)
        x.resize_(6)
        return x + 1

    same(f, torch.randn(6))


def test_narrowed_tensors_are_counted_anew():
    """The number of elements after narrowing is the new one, for Python and for ops."""

    def f(x):
        y = x * 2
        y.resize_(2)
        x.as_strided_((3,), (2,))
        return torch.full((1,), x.numel() * 10 + y.numel()), x.mean(), y.mean(), x.reshape(-1), y.flatten()

    same(f, torch.randn(6))


def test_growing_an_input_that_was_viewed():
    """The view looks at the storage that has grown."""

    def f(x):
        view = x[:2]
        x.resize_(5).fill_(1)
        return view

    same(f, torch.randn(3))


def test_resizing_what_requires_grad_is_eagers_error():
    """Torch refuses that itself."""

    def f(x):
        x.resize_(2)
        return x

    same(f, leaf(3), eagerly=True)
    same(f, nonleaf(3), eagerly=True)


def test_resizing_intermediates():
    """Grown, shrunk, and viewed before."""

    def grown(x):
        y = x * 2
        y.resize_(5)
        y[3:] = 1
        return y

    def shrunk(x):
        y = x * 2
        y.resize_(2)
        return y, y[1:]

    def viewed(x):
        y = x * 2
        view = y[1:]
        y.resize_(2)
        y.add_(1)
        return y, view

    def viewed_and_grown(x):
        y = x * 2
        view = y[1:]
        y.resize_(4)
        y.fill_(1)
        return view

    for f in (grown, shrunk, viewed):
        same(f, torch.randn(3))
    same(viewed_and_grown, torch.randn(3), eagerly=True)


def test_metadata_of_growth():
    """The records say that the storage changed."""

    def f(x):
        x.resize_(4)
        return x.fill_(1)

    g = compiled(f)
    g(torch.zeros(3))
    info = metadata(g).input_info[0]
    assert (info.mutates_metadata, info.mutates_data, info.mutates_storage_metadata) == (True, True, True)
    assert info.mutation_type is MutationType.MUTATED_OUT_GRAPH


# --- set_, storages, .data =, swap_tensors


@pytest.mark.parametrize(
    "change",
    [
        lambda x, y: x.set_(y),
        lambda x, y: x.set_(),
        lambda x, y: x.set_(y.untyped_storage()),
    ],
    ids=["input", "nothing", "storage"],
)
def test_set_is_refused_before_anything_happened(change):
    """Clearly, and nothing was changed."""

    def f(x, y):
        y.add_(1)
        change(x, y)
        return x * 2

    x, y = torch.zeros(3), torch.ones(2)
    with refusing((StorageMutationError, MetadataMutationError, EscapeError)):
        compiled(f)(x, y)
    assert (x._version, y._version, y.tolist()) == (0, 0, [1.0, 1.0])


def fsdp(x):
    """Free an input's memory and take it again, as fully sharded training does."""
    storage = x.untyped_storage()
    storage.resize_(0)
    storage.resize_(12)
    return x.fill_(1) * 2


def swapped(x):
    """Exchange an input for another tensor."""
    torch.utils.swap_tensors(x, torch.ones(3))
    return x * 2


@pytest.mark.parametrize("function", [fsdp, swapped])
def test_other_ways_are_refused_before_anything_happened(function):
    """Each is refused with its line."""

    def f(y, x):
        y.add_(1)
        return function(x)

    y, x = torch.zeros(2), torch.arange(3.0)
    with refusing(EscapeError) as caught:
        compiled(f)(y, x)
    assert caught.value.line is not None
    assert (y._version, x._version, x.tolist()) == (0, 0, [0.0, 1.0, 2.0])


@pytest.mark.parametrize("function", [fsdp])
def test_other_ways_behind_dynamo_run_eagerly(function):
    """Or Dynamo breaks the graph there; the values are right in any case."""
    torch._dynamo.reset()
    x, expected = torch.arange(3.0), torch.arange(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = torch.compile(function, backend=_backend)(x)
    assert torch.equal(function(expected), out)
    assert torch.equal(expected, x)


def _backend(graph, inputs):
    from aotlab.frontends.dynamo import backend

    return backend(graph, inputs, options={"compiler": "eager"})


def test_resize_to_the_same_size_does_nothing():
    """Not even to the strides, of an input, a part of one or an intermediate."""
    same(lambda x: x.t().resize_(3, 2), torch.randn(2, 3))
    same(lambda x: x.resize_(2, 3), torch.randn(3, 2).t())
    same(lambda x: (x * 2).resize_(2, 3), torch.randn(3, 2).t())
    same(lambda x: x.unbind(0)[0].resize_(2), torch.randn(9)[0:8:2].view(2, 2))


def test_resize_of_an_intermediate_with_gaps_is_eagers():
    """It has the memory of more elements than one sees."""
    same(lambda x: (x * 2).t().resize_(2, 2), torch.randn(2, 3), eagerly=True)
    same(lambda x: (x * 2).t()[0].resize_(2), torch.randn(2, 3))


@pytest.mark.parametrize("size", [2, 3])
def test_an_input_is_given_the_memory_of_an_intermediate(size):
    """By `set_` or by assignment to `.data`, whatever its shape; the input's old memory keeps its values."""

    def by_set(x, y):
        x.set_(torch.ones(size) + y[0])
        return x * 2

    def by_data(x, y):
        x.data = torch.ones(size) + y[0]
        return x * 2

    for f in (by_set, by_data):
        same(f, torch.zeros(3), torch.arange(2.0))
        x = torch.zeros(3)
        old = x[...]
        compiled(f)(x, torch.arange(2.0))
        assert (x.tolist(), old.tolist()) == ([1.0] * size, [0.0] * 3)
