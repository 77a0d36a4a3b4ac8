"""One rule for tensors that a backward uses: they are saved, their version is checked, and autograd reports a write."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab.errors import MetadataMutationError
from tests.engine_helpers import behind, compiled, leaf, same

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
FRONTENDS = pytest.mark.parametrize("frontend", ["direct", "dynamo"])
WRITTEN = "modified by an inplace operation"


class Attribute(torch.autograd.Function):
    """Keeps an input and an intermediate as attributes."""

    @staticmethod
    def forward(ctx, x, w):
        """Keep one of each."""
        ctx.w, ctx.made = w, w * 2
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        """Use both."""
        return gradient * (ctx.w + ctx.made - ctx.w * 2), gradient * 0


class Saved(torch.autograd.Function):
    """Saves its input by ``save_for_backward``."""

    @staticmethod
    def forward(ctx, x, w):
        """Save it."""
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        """Use it."""
        return gradient * ctx.saved_tensors[0], gradient * 0


def captured(x, w):
    """Use a tensor that the checkpoint is not given."""
    return checkpoint(lambda value: (value * w).sin(), x, use_reentrant=False)


def given(x, w):
    """Give both."""
    return checkpoint(lambda value, by: (value * by).sin(), x, w, use_reentrant=False)


def written_by_the_function(x, w):
    """Write a tensor that is kept as an attribute after its use: eager's backward reads the new value."""
    y = Attribute.apply(x, w)
    w.add_(1)
    return y


PROGRAMS = {
    "product": lambda x, w: x * w,
    "linear": lambda x, w: torch.nn.functional.linear(x, w),
    "attribute": Attribute.apply,
    "saved": Saved.apply,
    "captured": captured,
    "given": given,
    "written": written_by_the_function,
}


def use(call, change):
    """Call, change the tensor, and return the gradient or the error."""
    x, w = leaf(3, 3), torch.linspace(0, 1, 9).view(3, 3)
    y = call(x, w)
    change(w)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)[:100]
    return x.grad.tolist()


@FRONTENDS
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_nobody_writes(name, frontend):
    """Without a write the call is compiled and gives eager's gradients.

    So does a write through ``data`` to a saved tensor.
    """
    f = compiled(PROGRAMS[name], frontend=frontend)
    for change in (lambda w: None, lambda w: w.data.mul_(3)):
        assert use(PROGRAMS[name], change) == use(f, change)
    if frontend == "direct":
        assert (behind(f).calls.compiled, behind(f).calls.eager) == (2, 0)


@FRONTENDS
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_caller_writes(name, frontend):
    """A caller's write raises autograd's error, even if eager's backward would silently read the new value."""
    found = use(compiled(PROGRAMS[name], frontend=frontend), lambda w: w.add_(1))
    assert WRITTEN in found
    if name in ("product", "linear", "saved", "given"):
        assert found == use(PROGRAMS[name], lambda w: w.add_(1))


@FRONTENDS
@pytest.mark.parametrize("output", [0, 1])
def test_a_written_tensor_that_the_backward_saves_but_does_not_read(output, frontend):
    """Eager's ``gather`` saves its input, so its backward raises after a write to the input. Other backwards run."""

    def function(x, w):
        return x.gather(0, torch.zeros_like(x, dtype=torch.int64)), w * 2

    def run(call):
        x, w = leaf(3, 3) * 1, leaf(3, 3)
        results = call(x, w)
        x.mul_(2)
        results[output].sum().backward()
        return w.grad

    calls = function, compiled(function, frontend=frontend)
    if output == 0:
        for call in calls:
            with pytest.raises(RuntimeError, match=WRITTEN):
                run(call)
    else:
        assert torch.equal(*[run(call) for call in calls])


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["captured", "attribute"])
def test_what_a_partitioner_keeps_instead(name, backend):
    """A write to a tensor that the backward reads is an error, whatever the partitioner saved instead."""
    partitioner = aotlab.min_cut_rematerialization_partition
    f = aotlab.compile(PROGRAMS[name], backend=backend, partitioner=partitioner)
    torch.testing.assert_close(use(f, lambda w: None), use(PROGRAMS[name], lambda w: None))
    assert WRITTEN in use(f, lambda w: w.add_(1))


@pytest.mark.parametrize("change", [lambda w: torch.zeros(3, 3), lambda w: w.t()], ids=["memory", "strides"])
@pytest.mark.parametrize("name", ["product", "linear", "captured"])
def test_other_memory(name, change):
    """Eager's nodes keep the tensor or an alias. Our error says that the tensor has other sizes or other memory."""
    with pytest.raises(MetadataMutationError, match="was given other sizes or other memory"):
        use_other(compiled(PROGRAMS[name]), change)


def test_memory_that_is_filled_again():
    """A backward does not read new memory of the caller's tensor, except of parameters of FSDP2."""
    w = torch.ones(3, 3)
    y = compiled(PROGRAMS["product"])(leaf(3, 3), w)
    w.untyped_storage().resize_(0)
    w.neighbour = torch.zeros(3, 3)  # takes the memory that was freed
    w.untyped_storage().resize_(36)
    with torch.no_grad():
        w.data.zero_()
    with pytest.raises(MetadataMutationError, match="was given other sizes or other memory"):
        y.sum().backward()


def use_other(call, change):
    """Give the tensor other memory between call and backward."""
    w = torch.ones(3, 3)
    y = call(leaf(3, 3), w)
    w.data = change(w)
    y.sum().backward()


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize(
    "function",
    [Attribute.apply, lambda x, w: checkpoint(lambda value: (value + w).sin(), x, use_reentrant=False)],
    ids=["attribute", "captured"],
)
def test_an_inference_tensor(function):
    """Autograd cannot save an inference tensor.

    Such a call runs eagerly, and the function may keep it as an attribute.
    """
    with torch.inference_mode():
        w = torch.ones(3, 3)
    f = compiled(function)
    f(leaf(3, 3), w).sum().backward()
    assert (behind(f).calls.compiled, behind(f).calls.eager) == (0, 1)


class Failing(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx, x):
        """Compute something."""
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        """Raise."""
        raise ValueError("no gradient today")


def spoilt(x):
    """Write a saved tensor."""
    y = x * x
    x.add_(1)
    return y


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("function", [Failing.apply, spoilt])
def test_a_backward_that_raises(function):
    """A function whose backward raises runs eagerly, and the backward raises. Without gradients it is compiled."""
    same(function, leaf(3) * 1, eagerly=True)
    with torch.no_grad():
        same(function, leaf(3) * 1)
