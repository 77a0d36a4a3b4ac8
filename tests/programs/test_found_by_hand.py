"""What programs that were written by hand, outside of the fuzzer's space, once made go wrong."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn

from aotlab.errors import LeakedTensorError
from aotlab.frontends import dynamo
from aotlab.verification import verify
from tests.engine_helpers import compiled, nonleaf, refusing, same


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_random_numbers_between_two(dtype):
    """`random_(from, to)` is compiled: its op's name is a keyword of Python, which the graph's code cannot contain."""
    same(lambda x: (x.random_(3, 90), x * 2)[1], torch.zeros(5, 4, dtype=dtype))
    same(lambda x: (x * 2).random_(-5, 5), torch.zeros(4, dtype=dtype))


def test_random_numbers_between_two_in_training():
    """A tensor with a history may be filled with them."""
    x = torch.ones(4, requires_grad=True)
    same(lambda x: (x * 2).random_(0, 5) + x, x)
    same(lambda x: x.random_(0, 5) * 2, x * 1)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_list_and_an_out_behind_dynamo():
    """Dynamo's graph holds the tensors that are joined in a list of fx's own; the trace once crashed the process."""
    out, x = torch.zeros(4, 3), torch.ones(2, 3)
    options = {"compiler": "eager"}
    program = torch.compile(
        lambda x, out: (torch.cat([x, x * 2], out=out), out + 1)[1], backend=dynamo.backend, options=options
    )
    assert program(x, out).tolist() == [[2.0] * 3] * 2 + [[3.0] * 3] * 2
    assert out.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2


class Tables(nn.Module):
    """Makes a table once for each size, as rotary embeddings do."""

    @functools.lru_cache  # noqa: B019  # as many models do
    def table(self, size: int) -> dict[str, list[torch.Tensor]]:
        """Make the table."""
        return {"of": [torch.arange(float(size))]}

    def forward(self, x):
        """Use it."""
        return x * self.table(3)["of"][0]


def test_a_cache_in_c_keeps_no_traced_tensor():
    """What `functools.lru_cache` would keep of a trace is refused and forgotten: eager calls go on as before."""

    @functools.lru_cache(None)
    def table(size):
        return torch.arange(float(size))

    table(2)
    module = Tables()
    for function in (lambda x: x * table(3), module):
        with refusing(LeakedTensorError, match=r"`the cache of (Tables\.)?table`"):
            compiled(function)(torch.ones(3))
        assert function(torch.ones(3)).tolist() == [0.0, 1.0, 2.0]


def test_a_cache_of_numbers_is_kept():
    """A cache that holds no tensor is no obstacle, and is as it was."""

    @functools.lru_cache  # as many models do
    def double(number):
        return number * 2

    double(1)
    assert compiled(lambda x: x * double(3))(torch.ones(2)).tolist() == [6.0, 6.0]
    assert double.cache_info().currsize == 2


def test_statistics_of_batch_norm_that_share_memory():
    """Eager writes the mean, then the variance, over one another; a trace would keep one of them."""
    x, one = torch.randn(4, 3), torch.ones(4)
    same(lambda x, m: nn.functional.batch_norm(x, m[:3], m[:3], training=True), x, one, eagerly=True)
    two = torch.ones(2, 3)
    same(lambda x, m: nn.functional.batch_norm(x, m[0], m[1], training=True), x, two)
    x.requires_grad_()
    same(lambda x, m: nn.functional.batch_norm(x, m[:3], m[:3], training=True), x, one, eagerly=True)
    same(lambda x, m: nn.functional.instance_norm(x[None], m[:4], m[:4]), x, one, eagerly=True)


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_are_trained_by_inductor(channels_last):
    """Inductor converts images for a convolution, and would save them so; the backward expects them as they were."""
    torch.manual_seed(0)
    image = torch.randn(2, 2, 6, 6)
    if channels_last:
        image = image.to(memory_format=torch.channels_last)
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3))
    found = verify(module, image.requires_grad_())
    assert found.first is None, found.first
    assert found.ran_eagerly == 0


def _window_of_an_intermediate(a):
    v = a * 1.5
    window = v.diagonal().as_strided((2,), (1,))
    v.neg_()
    return window * 2


def _window_of_an_input(a):
    window = a.diagonal().as_strided((2,), (1,))
    a.neg_()
    return window * 2


def _window_in_place(a):
    part = a[..., ::2].view(-1)
    part.as_strided_((2,), (1,))
    return part


def _window_of_all(a):
    v = a * 1.5
    window = v.t().as_strided((3,), (1,))
    v.neg_()
    return window * 2


@pytest.mark.parametrize(
    ("program", "eagerly"),
    [
        (_window_of_an_intermediate, True),
        (_window_of_an_input, True),
        (_window_in_place, True),
        (_window_of_all, True),
    ],
)
def test_windows_on_what_leaves_out_elements(program, eagerly):
    """A write to the base makes their history anew, by another way than the program's; else they are compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert same(program, nonleaf(2, 2), eagerly=eagerly, messages=False)


@pytest.mark.parametrize("change", ["t_", "squeeze_", "unsqueeze_", "as_strided_", "detach_"])
def test_sizes_of_inference_tensors(change):
    """Outside of inference_mode they do not change, nor do those of views of one."""

    def program(x):
        with torch.inference_mode():
            made = x * 2
        view = made.view(2, 2)
        {"unsqueeze_": lambda: view.unsqueeze_(0), "as_strided_": lambda: view.as_strided_((2,), (1,))}.get(
            change, getattr(view, change)
        )()
        return view

    def outcome(call):
        try:
            return call(torch.ones(2, 2)).shape
        except RuntimeError as error:
            return str(error)[:40]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert outcome(program) == outcome(compiled(program))
