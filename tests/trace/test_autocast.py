"""Autocast casts for ops that return new tensors, and not for ops that write, as in eager. Some ops run eagerly."""

from __future__ import annotations

import pytest
import torch
from torch.amp import custom_bwd, custom_fwd
from torch.nn import functional as F  # noqa: N812  # as everybody writes it
from torch.utils.checkpoint import checkpoint

from tests.engine_helpers import compiled, leaf


def casting(dtype=torch.bfloat16, *, enabled=True, cache=None):
    """Return autocast on the CPU."""
    return torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache)


class Product(torch.autograd.Function):
    """A product whose backward runs under the forward's autocast."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx, a, b):
        """Save both."""
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        """Multiply, and let autocast cast."""
        a, b = ctx.saved_tensors
        return gradient @ b.t(), a.t() @ gradient


class InFull(Product):
    """The same in full precision, whatever is on."""

    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, a, b):
        """Save both."""
        ctx.save_for_backward(a, b)
        return a @ b


def in_place(x, w):
    """Write into a tensor: autocast does not cast for that."""
    y = x * 1
    y += x @ w
    y[0] = (x @ w)[1].to(y.dtype)
    return y.mul_(2)


def dtypes(x, w):
    """Mix ops that autocast casts to the low precision, to float32, and to the widest dtype."""
    h = x @ w
    mean = F.mse_loss(h, w)
    return torch.cat([x, h]), F.binary_cross_entropy_with_logits(h, w.sigmoid()), mean, F.gelu(h), h.sum()


def asked(x, w):
    """Act on whether it is on, and for which dtype."""
    return (x @ w).to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x + w


def nested(x, w):
    """Switch it off, and on for another dtype."""
    with casting():
        a = x @ w
        with casting(enabled=False):
            b = a.float() @ w
        with casting(torch.float16, cache=False):
            c = b @ w
    return a, b, c


def hooked(x, w):
    """Multiply in a hook, which runs under the backward's autocast."""
    y = x @ w
    if y.requires_grad:
        y.register_hook(lambda gradient: (gradient.float() @ gradient.float().t()).to(gradient.dtype))
    return y.sin()


PROGRAMS = {
    "custom_fwd": lambda x, w: Product.apply(x, w).exp(),
    "custom_fwd, cast_inputs": lambda x, w: InFull.apply(x, w).exp(),
    "in place": in_place,
    "dtypes": dtypes,
    "asked": asked,
    "nested": nested,
    "hooked": hooked,
    "checkpoint": lambda x, w: checkpoint(lambda a, b: (a @ b).softmax(-1) @ b, x, w, use_reentrant=False),
}

AROUND = {
    "off": lambda: casting(enabled=False),
    "bfloat16": casting,
    "float16": lambda: casting(torch.float16),
    "no cache": lambda: casting(cache=False),
}


def outcome(function, forward, backward, *, grad=True):
    """Return the results and gradients of two calls, each inside the given context managers."""
    found = []
    for call in range(2):
        x, w = (leaf(8, 8, seed=2 * call + n).detach().requires_grad_(grad) for n in range(2))
        with forward():
            results = function(x, w)
        results = results if isinstance(results, tuple) else (results,)
        if grad:
            with backward():
                torch.autograd.backward(results, [torch.full_like(result, 0.3) for result in results])
        found += [*(result.detach() for result in results), x.grad, w.grad]
    return [None if each is None else (each.dtype, each.nan_to_num(9).tolist()) for each in found]


@pytest.mark.parametrize("backward", AROUND)
@pytest.mark.parametrize("forward", AROUND)
@pytest.mark.parametrize("program", PROGRAMS)
def test_around_forward_and_backward(program, forward, backward):
    """Results and gradients equal eager's bit for bit, in the same dtypes, and no call runs eagerly."""
    f = compiled(PROGRAMS[program])
    around = AROUND[forward], AROUND[backward]
    assert outcome(PROGRAMS[program], *around) == outcome(f, *around)
    assert outcome(PROGRAMS[program], *around, grad=False) == outcome(f, *around, grad=False)
    assert f.calls.eager == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("around", ["off", "bfloat16"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_behind_dynamo(program, around):
    """Behind Dynamo, values and gradients under autocast are eager's too."""
    if program == "hooked" and torch.__version__.startswith("2.11"):
        pytest.skip("on torch 2.11 Dynamo itself loses what the hook holds")
    torch.compiler.reset()
    expected = outcome(PROGRAMS[program], AROUND[around], AROUND[around])
    assert outcome(compiled(PROGRAMS[program], frontend="dynamo"), AROUND[around], AROUND[around]) == expected


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: F.bilinear(x, w, torch.ones(3, 8, 8)),
        lambda x, w: torch.matmul(x.detach(), w.detach(), out=torch.empty(8, 8)) + x,
        lambda x, w: (x * 1).addmm_(x, w),
    ],
    ids=["in a kernel", "matmul, out", "addmm_"],
)
def test_what_only_eager_casts_for(program):
    """Under autocast, an op that casts inside its kernel, or casts and writes, runs eagerly.

    Otherwise it is compiled.
    """
    f = compiled(program)
    with pytest.warns(RuntimeWarning, match="under autocast, `.*` casts its operands|`out` has another shape, dtype"):
        found = outcome(f, casting, AROUND["off"])
    assert outcome(program, casting, AROUND["off"]) == found
    assert (f.calls.compiled, f.calls.eager) == (0, 2)
    f = compiled(program)
    outcome(f, AROUND["off"], AROUND["off"])
    assert (f.calls.compiled, f.calls.eager) == (2, 0)


def test_one_entry_for_each_kind_of_autocast():
    """Enabled, dtype and cache are guarded, and each entry serves later calls of its kind."""
    f = compiled(lambda x, w: x @ w)
    x = torch.ones(2, 2)
    for _ in range(2):
        for around in AROUND.values():
            with around():
                f(x, x)
    assert (len(f.entries), f.calls.compiled) == (4, 8)
    assert all("autocast" in reason for reason in f.recompiles)


def test_a_scaler_of_gradients():
    """A gradient scaler scales, unscales and steps as in eager, and skips a step with an infinite gradient."""
    found = []
    for make in (lambda f: f, compiled):
        model = torch.nn.Linear(4, 1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        call, optimizer = make(model), torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            with casting(torch.float16):
                loss = call(torch.full((3, 4), 6e4 if step == 1 else 1.0)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            found.append((loss.item(), scaler.get_scale(), [p.tolist() for p in model.parameters()]))
    assert str(found[:4]) == str(found[4:])  # a nan is no other nan
