"""Programs that change or share memory, in inference and in training, called directly and behind Dynamo.

Each program tests one promise: metadata changes by each method, storages, hidden writes, overlapping inputs.
"""

from __future__ import annotations

import pytest
import torch

from tests.both_ways import BOTH, Case, both_ways, check_direct
from tests.functions import Viewed

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# --- metadata, of an input and of an intermediate that was viewed


def _of_an_input(step):
    def f(x):
        y = x * 2
        step(x)
        return y, x + 1

    return f


def _of_an_intermediate(step):
    def f(x):
        y = x * 2
        row = y[0]
        step(y)
        y.mul_(3)
        return row, y

    return f


STEPS = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "squeeze_": lambda x: x.squeeze_(0),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
}
METADATA = {
    **{f"{name} of an input": Case(program=_of_an_input(step), size=(1, 3)) for name, step in STEPS.items()},
    **{
        f"{name} of an intermediate": Case(program=_of_an_intermediate(step), size=(1, 3), eager=BOTH, breaks=BOTH)
        for name, step in STEPS.items()
    },
}


# --- storages


def _shrink(x):
    y = x.detach() * 2
    y.resize_(2)
    return y, x + 1


def _shrink_viewed(x):
    y = x.detach() * 2
    row = y[1]
    y.resize_(2)
    row.add_(1)
    return y, row


def _grow(x):
    y = x.detach() * 2
    y.resize_(3, 3)
    return y.fill_(1), x + 1


def _grow_viewed(x):
    y = x.detach() * 2
    flat = y.view(-1)
    y.resize_(3, 3)
    y.fill_(1)
    return flat, y


def _set(x):
    y = x.detach() * 2
    y.set_(x.detach().t() * 3)
    return y.add_(1)


def _set_viewed(x):
    y = x.detach() * 2
    row = y[0]
    y.set_(x.detach().t() * 3)
    y.add_(1)
    return row, y


def _out(x):
    y = torch.empty(2, 3)
    turned = y.t()
    torch.mul(x.detach(), 2, out=y)
    return turned, y


def _out_of_an_input(x):
    with torch.no_grad():
        torch.exp(x, out=x)
    return x * 2


def _freed(x):
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(24)
    with torch.no_grad():
        return x.fill_(1) * 2


STORAGES = {
    "resize_ shrinks": Case(program=_shrink, eager=BOTH, breaks=BOTH),
    "resize_ shrinks what was viewed": Case(program=_shrink_viewed, eager=BOTH, breaks=BOTH),
    "resize_ grows": Case(program=_grow, eager=BOTH, breaks=BOTH),
    "resize_ grows what was viewed": Case(program=_grow_viewed, eager=BOTH),
    "set_": Case(program=_set, eager=BOTH, breaks=BOTH),
    "set_ of what was viewed": Case(program=_set_viewed, eager=BOTH, breaks=BOTH),
    "out=": Case(program=_out),
    "out= of an input": Case(program=_out_of_an_input),
    "storage": Case(program=_freed, eager=BOTH, breaks=BOTH),
}


# --- writes that autograd does not see


class Square(torch.autograd.Function):
    """A function that saves its argument."""

    @staticmethod
    def forward(ctx, x):
        """Square."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        """Use the saved tensor."""
        return gradient * 2 * ctx.saved_tensors[0]


def _by_data(x):
    x.data.mul_(2)


def _by_detach(x):
    x.detach().mul_(2)


def _by_no_grad(x):
    with torch.no_grad():
        x.mul_(2)


def _by_inference_mode(x):
    with torch.inference_mode():
        x.mul_(2)


WAYS = {"data": _by_data, "detach": _by_detach, "no_grad": _by_no_grad, "inference_mode": _by_inference_mode}
#: Programs that write a tensor. The key names the tensor, and says whether it is used after the write.
TARGETS = {
    "an input": lambda write: lambda x: (x * 3, write(x), x * x)[::2],
    "saved": lambda write: lambda x: (x * x, write(x))[0],
    "saved by a Function": lambda write: lambda x: (Square.apply(x), write(x))[0],
    "a Function's view": lambda write: lambda x: (write(Viewed.apply(x)), x * 3)[1],
    "a Function's view, used": lambda write: lambda x: (v := Viewed.apply(x), write(v), v * 3)[2],
    "a part of several": lambda write: lambda x: (write(x.unbind(0)[0]), x * 2)[1],
    "a part of several, used": lambda write: lambda x: (parts := x.unbind(0), write(parts[0]), parts[1] * 3)[2],
    "an intermediate's part": lambda write: lambda x: (y := x * 2, write(y.split(1)[1]), y * y)[::2],
}
#: Eager protects views of Functions and views of several: they may not be used after a write that moves their version.
#: If a saved tensor is written in this way, the backward raises, and the call runs eagerly.
PROTECTED = {"eager": ("training",), "breaks": ("training",)}


def _expected(target, way):
    if way == "inference_mode":  # entered inside the function
        return {"eager": BOTH, "breaks": BOTH}
    return PROTECTED if (target.endswith(", used") or target.startswith("saved")) and way != "data" else {}


HIDDEN = {
    f"{target}, {way}, {kind}": Case(
        program=make(write),
        arguments=(lambda x: (x,)) if kind == "leaf" else (lambda x: (x + 0,)),
        **_expected(target, way),
    )
    for target, make in TARGETS.items()
    for way, write in WAYS.items()
    for kind in ("leaf", "nonleaf")
}


# --- overlapping inputs, some of which are written


def _saved_before(a, b):
    s = a.exp()
    b.add_(1)
    return s.sum(), b * 2


def _several_written(a, b, c):
    a.mul_(2)
    s = c.sin()
    b.add_(1)
    return s, a[1:], c * 3


def _detached_written(a, b):
    y = b * 2
    a.add_(1)
    return y, b * 3


def _parameters(a, b):
    loss = (a * a).sum() + (b * b).sum()
    with torch.no_grad():
        a.sub_(0.5)
    return loss, b + 1


def _offsets(a, b):
    b.mul_(2)
    return a[1:], b[1:], a * 1


def _numbers(a, b):
    s = b.sin()
    a.mul_(2j)
    return s.sum(), a.abs().sum(), b[3:]


def _integers(a, b):
    a.add_(7)
    b[2:4].fill_(3)
    return a * 2, b[1:]


def _apart(a, b, x):
    a.sub_(x)
    return b * 2


def _apart_and_asked(a, b, x):
    a.sub_(x)
    return a * (2 if b.requires_grad else 3)


def _written_by_a_function(a, b, x):
    a.sub_(x)
    return Scaled.apply(b)


def _required_later(a, b, x):
    v = b.view(-1)
    a.mul_(2)
    b.requires_grad_()
    return v, x * 2


def _parts_without_a_base(x):
    return (*tuple(part.detach() for part in _parts_of_a_buffer(x)[:2]), x[:3])


def _parts_of_a_buffer(x):
    buffer = torch.arange(8.0)
    return buffer[:3], buffer[5:], x[:3]


class Scaled(torch.autograd.Function):
    """A function that writes its argument."""

    @staticmethod
    def forward(ctx, x):
        """Write it."""
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx, gradient):
        """Scale."""
        return gradient * 3


def _base_too(x):
    y = x + 0
    return y[:5], y[3:], y


OVERLAPS = {
    "saved before the write": Case(
        program=_saved_before, arguments=lambda x: _base_too(x)[:2], backward="each", breaks=("training",)
    ),
    "several written, the base too": Case(
        program=_several_written, arguments=_base_too, backward="each", eager=("training",), breaks=BOTH
    ),
    "x.detach() and x": Case(program=_detached_written, arguments=lambda x: (x.detach()[:5], x)),
    "parts of a flat buffer": Case(
        program=_parameters,
        arguments=lambda x: tuple(part.detach().requires_grad_(x.requires_grad) for part in (x[:5], x[3:])),
        **PROTECTED,
    ),
    "views at an offset": Case(program=_offsets, arguments=lambda x: (x.add(0)[1:4], x.detach().add(0)[2:6])),
    "apart, one of which gets a history": Case(program=_apart, arguments=_parts_of_a_buffer, breaks=("training",)),
    "apart, and the other is asked": Case(program=_apart_and_asked, arguments=_parts_of_a_buffer, breaks=("training",)),
    "apart, and a function writes the other": Case(
        program=_written_by_a_function, arguments=_parts_of_a_buffer, breaks=BOTH
    ),
    "complex and real": Case(
        program=_numbers,
        arguments=lambda x: (lambda y: (torch.view_as_complex(y.view(4, 2)), y))(x + 0),
        eager=BOTH,
        breaks=BOTH,
    ),
    "int32 over int8": Case(
        program=_integers,
        arguments=lambda x: (lambda y: (y.view(torch.int32)[:3], y.view(torch.int8)[5:20]))(x.detach() + 0),
        eager=BOTH,
        breaks=BOTH,
    ),
}
CASES = {
    **METADATA,
    **STORAGES,
    **{f"hidden: {name}": case for name, case in HIDDEN.items()},
    **{
        f"overlap: {name}": Case(**{**{n: getattr(case, n) for n in case.__slots__}, "size": (8,)})
        for name, case in OVERLAPS.items()
    },
}

test_called_directly, test_behind_dynamo = both_ways(CASES)


@pytest.mark.parametrize("mode", BOTH)
def test_made_to_require_grad_after_a_write_that_counts_for_it(mode):
    """A view from before a write to shared memory gets its history when it is read.

    Behind Dynamo the view is made after the write.
    """
    check_direct(Case(program=_required_later, arguments=_parts_without_a_base, size=(8,), eager=BOTH), mode)
