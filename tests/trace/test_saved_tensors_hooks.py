"""``saved_tensors_hooks`` set inside a compiled function, and around a call of one."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from aotlab import config
from aotlab.errors import HooksError
from tests.engine_helpers import compiled, leaf, refusing, same

FRONTENDS = ["direct", "dynamo"]


def half(tensor):
    """Keep a tensor with less precision."""
    return tensor.half()


def back(packed):
    """Give back its dtype, not its value."""
    return packed.float()


def in_part(x):
    """Round the tensors that a part of the function saves."""
    y = x.sin()
    with saved_tensors_hooks(half, back):
        z = y.exp() * x
    return z * y


def nested(x):
    """Set hooks inside of others."""
    with saved_tensors_hooks(half, back):
        z = x.sin()
        with saved_tensors_hooks(lambda t: t * 2, lambda t: t / 3):
            z = z.exp()
        return z.sin()


def kept_in_a_list(x):
    """Pack into a list of the call."""
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return len(kept) - 1

    with saved_tensors_hooks(pack, lambda n: kept[n]):
        return x.sin().exp()


def to_the_cpu(x):
    """Use torch's own hooks."""
    with save_on_cpu():
        return x.sin().exp()


def before_a_write(x):
    """Pack a copy of what is written afterwards."""
    with saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        y = x * 1
        z = y.sin()
        y.mul_(5)
        return z + y


def under_no_grad(x):
    """Set hooks where nothing is saved."""
    with torch.no_grad(), saved_tensors_hooks(half, back):
        y = x.sin()
    return y * x


def forbidden(x):
    """Forbid hooks where none are set."""
    with disable_saved_tensors_hooks("no"):
        return x.sin().exp()


def recomputed(x):
    """Use checkpoint, which sets hooks."""
    return checkpoint(lambda a: a.sin().exp(), x, use_reentrant=False)


def gradients(function):
    """Call twice with other values; return values and gradients."""
    found = []
    for seed in range(2):
        x = leaf(3, seed=seed)
        out = function(x)
        out.backward(torch.arange(1.0, 4.0))
        found.append((out.tolist(), x.grad.tolist()))
    return found


@pytest.mark.parametrize(
    "function",
    [in_part, nested, kept_in_a_list, to_the_cpu, before_a_write, under_no_grad],
    ids=lambda f: f.__name__,
)
def test_inside(function):
    """A function that sets hooks runs eagerly."""
    same(function, leaf(3), eagerly=True)
    with config.patch(fallback="error"), refusing(match="`saved_tensors_hooks` are set inside of the function"):
        compiled(function)(leaf(3))


@pytest.mark.parametrize("function", [forbidden, recomputed], ids=lambda f: f.__name__)
def test_what_is_compiled(function):
    """A function that forbids hooks, or has a checkpoint, stays compiled."""
    same(function, leaf(3))


@pytest.mark.parametrize("function", [in_part, to_the_cpu, recomputed], ids=lambda f: f.__name__)
@pytest.mark.usefixtures("fresh_dynamo")
def test_inside_of_dynamo(function):
    """Behind Dynamo, hooks see the tensors that eager saves."""
    assert gradients(function) == gradients(compiled(function, frontend="dynamo"))


# --- around a call -----------------------------------------------------------------------------------------------


def plain(x):
    """Save two values in eager."""
    return x.sin().exp()


def around(function, pack, unpack):
    """Call once without hooks, twice with, once without; return what pack saw, and all gradients."""
    seen, found = [], []

    def packing(tensor):
        seen.append(tensor.tolist())
        return pack(tensor)

    def unpacking(packed):
        seen.append("unpack")
        return unpack(packed)

    for hooked in (False, True, True, False):
        x = leaf(3)
        if hooked:
            with saved_tensors_hooks(packing, unpacking):
                out = function(x)
        else:
            out = function(x)
        out.backward(torch.arange(1.0, 4.0))
        found.append((out.tolist(), x.grad.tolist()))
    return found, seen


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.usefixtures("fresh_dynamo")
def test_around(frontend):
    """Hooks that change values, or count them, see eager's: such calls run eagerly, with one warning; others do not."""
    g = compiled(plain, frontend=frontend)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        actual = around(g, half, back)
    assert around(plain, half, back) == actual
    assert len(actual[1]) == 8
    texts = [str(w.message) for w in warned if "saved_tensors_hooks" in str(w.message)]
    assert len(texts) == 1
    if frontend == "direct":
        assert (g.calls.compiled, g.calls.eager) == (2, 2)


def test_around_when_hooks_are_applied():
    """With `saved_tensors_hooks="apply"` the call is compiled; identity hooks do not change values or gradients."""
    g = compiled(plain)
    with config.patch(saved_tensors_hooks="apply"):
        found, seen = around(g, lambda t: [t], lambda p: p[0])
    assert around(plain, lambda t: [t], lambda p: p[0])[0] == found
    assert "unpack" in seen
    assert (g.calls.compiled, g.calls.eager) == (4, 0)


def test_around_when_nothing_shall_run_eagerly():
    """Under fallback = "error" it is an error, which says what to try."""
    g = compiled(plain)
    with (
        config.patch(fallback="error"),
        saved_tensors_hooks(half, back),
        refusing(HooksError, match="set aotlab"),
    ):
        g(leaf(3))


def test_around_without_grad_mode():
    """Nothing is saved, so the hooks do not matter."""
    g = compiled(plain)
    with saved_tensors_hooks(half, back), torch.no_grad():
        assert torch.equal(g(leaf(3)), plain(leaf(3)))
    assert (g.calls.compiled, g.calls.eager) == (1, 0)


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(
    "use",
    [
        lambda f: _under(save_on_cpu, f),
        lambda f: _under(lambda: disable_saved_tensors_hooks("no"), f),
        lambda f: lambda x: checkpoint(f, x, use_reentrant=False),
    ],
    ids=["save_on_cpu", "disabled", "checkpoint"],
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_torchs_own_around(use, frontend):
    """Torch's own hooks unpack the tensors that they packed, so the call stays compiled."""
    g = compiled(plain, frontend=frontend)
    assert gradients(use(plain)) == gradients(use(g))
    if frontend == "direct":
        assert g.calls.eager == 0
        assert g.calls.compiled >= 2


def _under(context, function):
    def call(x):
        with context():
            return function(x)

    return call
