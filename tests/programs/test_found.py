"""What people found who tried to break the engine: each was once a silent difference from eager or an unclear crash."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

import aotlab
from aotlab.errors import EscapeError, HigherOrderOpError, OutputError
from tests.engine_helpers import compiled, leaf, refusing, same

FACTOR = 2
CONTAINER: dict[str, object] = {"k": 2, "act": torch.relu, "deep": [collections.deque([1])]}
TENSOR: torch.Tensor | None = torch.ones(3)


def test_storage_offset_is_guarded_where_it_is_read():
    """An entry that looked at an input's offset is not used for another offset, and says so."""
    base = torch.arange(10.0)
    f = compiled(lambda x: x + x.storage_offset())
    f(base[:3])
    assert torch.equal(f(base[4:7]), base[4:7] + 4)
    assert "begins at element 4" in f.recompiles[0]


def test_globals_of_module_forwards_and_their_methods_are_guarded(monkeypatch):
    """What a module's own methods read is guarded like what a function reads, also through a function that calls it."""

    class Scales(nn.Module):
        def helper(self, x):
            return x * FACTOR

        def forward(self, x):
            return self.helper(x)

    module = Scales()
    ours, through = compiled(module), compiled(lambda x: module(x))
    for factor in (2, 5):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        assert ours(torch.ones(1)).item() == factor
        assert through(torch.ones(1)).item() == factor


@pytest.mark.parametrize("change", ["value", "deque", "function"])
def test_contents_of_containers_are_guarded(monkeypatch, change):
    """Containers are guarded item by item, whatever else they hold."""
    changed = dict(CONTAINER)
    f = compiled(lambda x: CONTAINER["act"](x) * CONTAINER["k"] + CONTAINER["deep"][0][0])
    assert f(torch.ones(1)).item() == 3
    if change == "value":
        changed["k"] = 7
    elif change == "deque":
        changed["deep"] = [collections.deque([2])]
    else:
        changed["act"] = torch.neg
    monkeypatch.setitem(globals(), "CONTAINER", changed)
    assert f(torch.ones(1)).item() == {"value": 8, "deque": 4, "function": -1}[change]


def test_tensors_that_are_only_looked_at_are_guarded(monkeypatch):
    """A global tensor whose presence or shape is read is guarded, although its values are not used."""
    f = compiled(lambda x: x * 2 if TENSOR is not None else x)
    assert f(torch.ones(1)).item() == 2
    monkeypatch.setitem(globals(), "TENSOR", None)
    assert f(torch.ones(1)).item() == 1


def test_a_lone_view_may_be_written_by_the_caller():
    """An output that is a view of an intermediate can be changed in place, as in eager."""
    x = leaf(2, 3)
    out = compiled(lambda x: x.sin().reshape(-1))(x)
    out += 1
    out.sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())


def test_linalg_checks_stay():
    """Checks without a result are kept, in inference and in training."""
    for x in (torch.zeros(2, 2), torch.zeros(2, 2, requires_grad=True)):
        with pytest.raises(torch.linalg.LinAlgError):
            compiled(torch.linalg.inv)(x)


_FILLS = {
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "exponential_": lambda x: x.exponential_(),
    "geometric_": lambda x: x.geometric_(0.5),
    "bernoulli_ by a tensor": lambda x: x.bernoulli_(torch.full((4, 3), 0.5)),
    "bernoulli_ of a part": lambda x: x[1:].bernoulli_(0.5),
}


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("fill", _FILLS.values(), ids=_FILLS)
def test_random_writes_to_non_contiguous_tensors_run_eagerly(fill, frontend):
    """A graph would draw eager's numbers in another order."""
    torch.compiler.reset()
    if frontend == "direct":
        same(fill, torch.rand(3, 4).t(), eagerly=True)
    text = r"order of the memory of a tensor that is not contiguous.*, at .*test_found\.py:\d+.*; call contiguous\(\)"
    candidate = compiled(lambda x: fill(x), frontend=frontend)

    def use(call):
        torch.manual_seed(0)
        x = torch.ones(3, 4).t()
        return [call(x), x, torch.get_rng_state()]

    with pytest.warns(RuntimeWarning, match=text):
        found = use(candidate)
    torch.testing.assert_close(use(fill), found, rtol=0, atol=0)


_HALVES = torch.full((4, 5), 0.5)

_DRAWS = {
    "rand": lambda out: torch.rand((4, 5), out=out),
    "randn": lambda out: torch.randn((4, 5), out=out),
    "bernoulli": lambda out, halves: torch.bernoulli(halves, out=out),
    "normal": lambda out, halves: torch.normal(halves, halves, out=out),
}


@pytest.mark.parametrize("make", [lambda: torch.zeros(5, 4).t(), lambda: torch.zeros(4, 10)[:, ::2]], ids=["t", "gaps"])
@pytest.mark.parametrize("draw", _DRAWS.values(), ids=_DRAWS)
def test_random_numbers_for_an_out_with_other_strides_are_eagers(draw, make):
    """Kernels draw in the order of the memory that they write: `verify ops` found other numbers in `randn(out=)`."""
    more = (_HALVES,) * (draw.__code__.co_argcount - 1)
    same(draw, make(), *more, eagerly=True)
    same(draw, make().contiguous(), *more)


def test_hooks_are_guarded_by_identity():
    """A forward hook that is exchanged for another one counts as a change."""
    module = nn.Sequential(nn.Identity())
    f = compiled(module)
    hook = module[0].register_forward_hook(lambda m, i, o: o * 2)
    assert f(torch.ones(1)).item() == 2
    hook.remove()
    module[0].register_forward_hook(lambda m, i, o: o * 3)
    assert f(torch.ones(1)).item() == 3


def test_a_default_device_of_cpu_is_no_obstacle():
    """`torch.set_default_device("cpu")` leaves calls compiled."""
    try:
        torch.set_default_device("cpu")
        assert compiled(lambda x: x + torch.ones(3))(torch.ones(3)).tolist() == [2, 2, 2]
    finally:
        torch.set_default_device(None)


def test_parameters_are_parameters_inside():
    """`isinstance(x, nn.Parameter)` and attributes of arguments are as outside; new attributes are refused."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.flag = True
    assert compiled(lambda x: isinstance(x, nn.Parameter) and x.flag)(parameter) is True

    def tags(x):
        y = x * 2
        y.tag = 5
        return y

    with refusing(OutputError, match="tag"):
        compiled(tags)(torch.ones(1))


def test_conjugates_are_not_taken_for_plain_tensors():
    """Metadata remembered of a plain tensor does not serve a lazy conjugate."""
    x = torch.randn(3, dtype=torch.complex64)
    same(lambda x: (x.resolve_conj(), x.conj().resolve_conj(), x.conj().resolve_conj()), x)


def test_writes_by_inductors_kernels_are_counted():
    """A write that a compiled graph makes itself moves the version counter, so that a stale backward raises."""
    x, w = torch.ones(3), torch.ones(3, requires_grad=True)
    y = (w * x).sum()
    aotlab.compile(lambda x: x.add_(1))(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_the_nearest_entry_gives_the_reason():
    """A recompile is explained by the entry that the call is nearest to."""
    f = compiled(lambda x, k: x * k)
    for x, k in ((torch.ones(3), 2), (torch.ones(3), 3), (torch.ones(4), 3)):
        f(x, k)
    f(torch.ones(3, requires_grad=True), 3)
    assert "requires_grad=True" in f.recompiles[-1]


def test_reentrant_checkpoints_are_refused():
    """A reentrant checkpoint is refused when compiling, not by a message about something else in the backward."""
    from torch.utils.checkpoint import checkpoint

    with refusing(HigherOrderOpError, match="use_reentrant"):
        compiled(lambda a: checkpoint(torch.sin, a, use_reentrant=True) * 2)(leaf(3))


def test_a_refused_trace_puts_settings_back():
    """A function that changes a setting and is then refused leaves the setting as it was."""

    def f(x):
        torch.set_default_dtype(torch.float64)
        return x.numpy()

    with refusing(EscapeError):
        compiled(f)(torch.ones(2))
    assert torch.get_default_dtype() == torch.float32


def test_an_output_that_was_written_through_a_view_is_no_view():
    """What only the graph knows as a view reaches the caller as a tensor of its own, which may be written in place."""

    def f(w):
        x = torch.ones(3)
        y = x.view(3)
        y.add_(1)
        return x, y, (w * y).sum()

    w = leaf(3)
    for function in (f, compiled(f)):
        x, y, _ = function(w)
        assert y._base is x
        assert not x._is_view()
        x.mul_(w)
        assert y.grad_fn is not None


def test_foreach_writes_move_version_counters():
    """An in-place op on a list of tensors counts as a write to each of them, as in eager."""

    def f(a, b, factor):
        torch._foreach_mul_([a, b], factor)
        torch._foreach_add_([a], 1)

    assert same(f, torch.ones(3), torch.ones(2), torch.tensor(0.5))


def test_disabled_functions_run_eagerly_and_come_back():
    """`aotlab.disable` switches compiled functions off; `aotlab.enable` brings their entries back."""
    f = compiled(lambda x: x + 1)
    f(torch.ones(2))
    aotlab.disable()
    try:
        f(torch.ones(3))
        assert (f.calls.eager, len(f.entries)) == (1, 1)
    finally:
        aotlab.enable()
    f(torch.ones(2))
    assert (f.calls.compiled, len(f.entries)) == (2, 1)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.unsafe_split(2)[0],
        lambda x: torch.unsafe_split(x, 2)[1],
        lambda x: x.unsafe_chunk(2)[0],
        lambda x: torch.unsafe_split_with_sizes(x, [1, 3])[1],
        lambda x: torch.ops.aten.unsafe_split.Tensor(x, 2)[0],
        lambda x: torch.ops.aten._unsafe_view(x, [2, 2]),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_views_that_are_called_copies(view, grad):
    """`unsafe_split` and the like share memory but tell the trace otherwise: a write through them was lost."""

    def f(x):
        y = view(x)
        y.mul_(2)
        return y, x

    same(f, leaf(4) * 1 if grad else torch.arange(4.0), eagerly=True)


def test_an_lstm_is_still_compiled():
    """Below Python torch's own code splits unsafely, and writes nothing to the parts."""
    cell = nn.LSTM(2, 3)
    g = compiled(cell)
    g(torch.ones(4, 1, 2))[0].sum().backward()
    assert g.compiled.calls.compiled == 1


def test_a_backward_that_cannot_be_traced_leaves_the_call_to_eager():
    """A sparse gradient: the trace's own exception was taken for an error of eager's backward and raised there."""
    weight = nn.Parameter(torch.ones(5))
    g = compiled(lambda i: weight.gather(0, i, sparse_grad=True).sum())
    g(torch.tensor([0, 1, 1])).backward()
    assert weight.grad.is_sparse
    assert torch.equal(torch.tensor([1.0, 2, 0, 0, 0]), weight.grad.to_dense())
    assert g.calls.eager == 1


@pytest.mark.parametrize("own", [False, True], ids=["input", "intermediate"])
def test_a_write_beyond_the_view_in_between(own):
    """A window may show more than the view that it was made of; a write to it reaches all of that."""

    def f(a):
        a = a * 2 if own else a
        a[:, 0].as_strided((2,), (1,)).neg_()
        return a * 1

    def quiet(a):
        a = a * 2 if own else a
        return a[:, 0].as_strided((2,), (1,)) * 3

    same(f, torch.arange(4.0).view(2, 2), eagerly=True)
    same(quiet, torch.arange(4.0).view(2, 2))


ALIASES = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
}


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
def test_a_write_through_an_alias_keeps_strides(alias):
    """What is written through an alias that does not know its base is strided as it was, which eager sees to."""

    def f(a):
        made = torch.cat([a, a], 0)
        alias(made.permute(1, 0).unfold(0, 1, 1)).mul_(2)
        return made, made.as_strided((2,), (1,))

    same(f, torch.arange(4.0).view(2, 2), eagerly=True)


def test_one_of_several_views_between_a_write_and_a_detachment():
    """The epilogue makes views before all changes or after all; between them eager has to."""

    def several(a):
        a.detach().mul_(3)
        view = a.split(1)[0]
        a.detach_()
        return view

    def one(a):
        a.detach().mul_(3)
        view = a[0]
        a.detach_()
        return view

    same(several, leaf(2, 2), eagerly=True, backward=None)
    same(one, leaf(2, 2), eagerly=True, backward=None)
