"""Flags and strings that a function sets in the caller's objects."""

from __future__ import annotations

import uuid
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import aotlab
from tests.engine_helpers import behind

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
_mode: str | None = None


class Model(nn.Module):
    """A module with plain values in its state; ``body`` computes its result."""

    kind = "new"

    def __init__(self, body):
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), 0.5))
        self.flags = [True]
        self.first, self.size, self.options = True, None, SimpleNamespace(mode=None, scale=2)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def _once(m, x):
    if m.first:
        m.first = False
        return x * m.w
    return x + m.w


def _not_read(m, x):
    m.first = False
    return x * m.w


def _of_an_object(m, x):
    if m.options.mode is None:
        m.options.mode = "regression" if x.dim() == 1 else "classes"
    return x * m.w if m.options.mode == "regression" else x


def _toggled(m, x):
    m.first = False if m.first else True  # noqa: SIM211  # written in the code, unlike the result of `not`
    return x * m.w if m.first else x - m.w


def _of_the_class(m, x):
    if Model.kind == "new":
        Model.kind = "old"
    return x * m.w


def _beside_a_counter(m, x):
    m.first = False
    m.options.scale += 1
    return x * m.w * m.options.scale


def _global(m, x):
    global _mode
    if _mode is None:
        _mode = "set"
        return x * m.w
    return x - m.w


class _Flagged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        ctx.m = m
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return (grad * 2 if ctx.m.first else grad * 20), None


def _read_in_a_backward(m, x):
    y = _Flagged.apply(x * m.w, m)
    m.first = False
    return y


def _read_in_a_hook(m, x):
    y = x * m.w
    y.register_hook(lambda grad: grad if m.first else grad * 3)
    m.first = False
    return y


def _read_in_a_checkpoint(m, x):
    y = checkpoint(lambda x: (x * m.w).sin() * (2 if m.first else 3), x, use_reentrant=False)
    m.first = False
    return y


def _counted_in_a_hook(m, x):
    m.options.scale += 1
    y = x * m.w
    y.register_hook(lambda grad: grad * (m.options.scale if m.first else 3))
    m.first = False
    return y


def _deleted(m, x):
    if "size" in m.__dict__:
        del m.size
    m.size = "again"
    return x * m.w


def _observed(call, m, calls=4):
    global _mode
    _mode, Model.kind = None, "new"
    seen = []
    for i in range(calls):
        x = (torch.arange(3.0) + i).requires_grad_()
        out = call(x)
        state = str((m.first, m.size, m.options, m.flags, _mode, Model.kind))
        out.sum().backward()
        seen += [out.tolist(), x.grad.tolist(), m.w.grad.tolist(), state]
    return seen


#: The bodies that are compiled as a whole, with the number of entries.
COMPILED = {
    "once": (_once, 2), "not read": (_not_read, 2), "deleted": (_deleted, 2), "of an object": (_of_an_object, 2),
    "toggled": (_toggled, 2), "beside a counter": (_beside_a_counter, 2), "global": (_global, 2),
    "counted in a hook": (_counted_in_a_hook, 2), "read in a hook": (_read_in_a_hook, 2),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, False])
@pytest.mark.parametrize("partitioner", [aotlab.default_partition, aotlab.min_cut_rematerialization_partition])
@pytest.mark.parametrize("name", COMPILED)
def test_they_are_set_once_per_call(name, partitioner, dynamic):
    """All calls are compiled. Outputs, gradients and the values equal eager's after each call."""
    body, entries = COMPILED[name]
    if "count" in name and dynamic is False:
        pytest.skip("a counter is an input only for dynamic sizes")
    m = Model(body)
    expected = _observed(m, m)
    m = Model(body)
    call = aotlab.compile(m, backend="eager", partitioner=partitioner, dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert expected == _observed(call, m)
    log = behind(call).calls
    assert (log.eager, log.by_dynamo, len(behind(call).entries)) == (0, 0, entries)


def _cached(m, x):
    if m.size is None:
        m.size = x.shape[0]
    return x * m.w / m.size


def _cached_size(m, x):
    if m.size is None:
        m.size = x.shape
    return x * m.w


def _by_call(m, x):
    m.options.mode = f"call {len(m.options.mode or '') + 1}"
    return x * m.w


def _type_of_a_size(m, x):
    m.options.mode = type(x.shape[0]).__name__
    return x * m.w


def _either_type_of_a_size(m, x):
    m.options.mode = "int" if isinstance(x.shape[0], int) and type(x.shape[0]) is int else "symbol"
    return x * m.w


def _own_identifier(m, x):
    m.options.mode = "" if m.options.mode else uuid.UUID(int=m.options.scale).hex
    return x * m.w


def _in_a_list(m, x):
    m.flags[0] = False
    return x * m.w


@torch.library.custom_op("aotlab_tests::by_mode", mutates_args=())
def _by_mode(x: torch.Tensor) -> torch.Tensor:
    return x * (2 if _mode else 3)


_by_mode.register_fake(torch.empty_like)


def _read_in_an_op(m, x):
    global _mode
    _mode = "set"
    return _by_mode(x) * m.w.detach()


REFUSED = [
    _cached,
    _cached_size,
    _by_call,
    _type_of_a_size,
    _either_type_of_a_size,
    _own_identifier,
    _in_a_list,
    _of_the_class,
]
READ_LATER = [_read_in_a_backward, _read_in_a_checkpoint]


@pytest.mark.parametrize("body", REFUSED)
def test_other_values(body):
    """Computed values, items of lists and attributes of classes are left to Dynamo. The results are eager's."""
    m = Model(body)
    expected = _observed(m, m, 8)
    m = Model(body)
    call = aotlab.compile(m, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert expected == _observed(call, m, 8)
    assert behind(call).calls.by_dynamo


@pytest.mark.parametrize("body", [*READ_LATER, _read_in_an_op])
def test_values_that_python_reads_later(body):
    """A backward or a custom op may read the value before a compiled call sets it, so the function runs eagerly."""
    m = Model(body)
    call = aotlab.compile(m, backend="eager")
    reason = "a custom op may read it" if body is _read_in_an_op else "its backward may read it"
    with pytest.warns(RuntimeWarning, match=reason):
        call(torch.ones(3, requires_grad=body is not _read_in_an_op))
    assert not behind(call).entries
    if body is not _read_in_an_op:  # which has no derivative
        m, alone = Model(body), Model(body)
        assert _observed(alone, alone) == _observed(aotlab.compile(m, backend="eager"), m)


def test_accumulation():
    """A second forward toggles the value before the backward of the first one runs."""

    def function(x):
        m.first = False if m.first else True  # noqa: SIM211
        return (x * m.w).sin() * (2 if m.first else 3)

    seen = []
    for make in (lambda f: f, lambda f: aotlab.compile(f, backend="eager")):
        m, x = Model(None), torch.ones(3, requires_grad=True)
        call = make(function)
        (call(x) + call(x)).sum().backward()
        seen.append([x.grad.tolist(), m.w.grad.tolist(), m.first])
    assert seen[0] == seen[1]
    assert (behind(call).calls.eager, behind(call).calls.by_dynamo, len(behind(call).entries)) == (0, 0, 2)


@pytest.mark.parametrize("counts", [True, False])
def test_a_checkpoint_around_the_call(counts):
    """A checkpoint ends the second run of its function early. The call runs eagerly there and says so."""

    def function(x):
        options.mode = None if options.mode else "set"
        options.scale += counts
        return x.sin()

    seen = []
    for make in (lambda f: f, lambda f: aotlab.compile(f, backend="eager", frontend="direct")):
        options, x = SimpleNamespace(mode=None, scale=2), torch.zeros(1, requires_grad=True)
        call = make(function)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            checkpoint(call, x, use_reentrant=False).sum().backward()
        seen.append([x.grad.tolist(), options])
    assert seen[0] == seen[1]
    with pytest.warns(RuntimeWarning, match="a checkpoint may end the call early"):
        checkpoint(aotlab.compile(function, backend="eager", frontend="direct"), x, use_reentrant=False)


def test_a_value_that_differs_at_each_call_is_refused_in_the_end():
    """After four entries that set the same place, the function is captured by Dynamo."""

    def body(m, x):
        m.options.mode = "a" if m.options.mode is None else "b" if m.options.mode == "a" else "c"
        return x * m.w

    m = Model(body)
    call = aotlab.compile(m, backend="eager")
    for mode in (None, "a", "x", "y"):
        m.options.mode = mode
        call(torch.ones(3))
    m.options.mode = "z"
    with pytest.warns(RuntimeWarning, match=r"is captured by Dynamo: the function changes `self\.options\.mode`"):
        call(torch.ones(3))
    assert m.options.mode == "c"
    assert len(behind(call).entries) == 4


def test_an_error_sets_them_once():
    """If the compiled call raises, eager runs the call and sets the value."""

    def body(m, x):
        m.first = False if m.first else True  # noqa: SIM211
        return m.w[x]

    m = Model(body)
    call = aotlab.compile(m, backend="eager")
    call(torch.tensor([0, 1]))
    m.first = True
    with pytest.raises(IndexError):
        call(torch.tensor([0, 9]))
    assert m.first is False
    assert (len(behind(call).entries), behind(call).calls.eager) == (1, 1)


def test_an_export_refuses_them():
    """An exported graph has no place for a value of Python."""
    with pytest.raises(aotlab.errors.AotlabError, match=r"the function changes `self\.first`"):
        aotlab.aot_export_module(Model(_once), (torch.ones(3),), trace_joint=False)
