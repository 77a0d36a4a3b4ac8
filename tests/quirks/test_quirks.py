"""Quirks: each can be switched off, and then its case runs eagerly, with eager's results and a notice."""

from __future__ import annotations

import secrets
import warnings

import pytest
import torch

from aotlab import config, quirks
from aotlab.maintenance.fuzz.plan import Plan
from aotlab.quirks import random_order
from aotlab.trace.boundary import CLAIMABLE
from tests.engine_helpers import compiled, leaf, refusing, same
from tests.maintenance.fuzz_blocks import Blocks, check
from tests.maintenance.test_fuzz_corpus import FOUND_DIRECTLY, differs

NAMES = tuple(quirk.name for quirk in quirks.ALL)
#: Whether eager's random kernels on this machine draw along the memory order of a permuted tensor.
ALONG_MEMORY = random_order._goes_along_memory(torch.float32)


def hooked(x):
    """Register a hook on an intermediate."""
    y = x * 2
    y.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return y.exp()


def moving(x):
    """Transpose in place."""
    x = x * 2
    x.t_()
    return x + 1


def striding(x):
    """View an intermediate by sizes and strides."""
    return (x * 2).as_strided((2,), (1,)) + 1


def offset(x):
    """Ask where a view begins."""
    return x[1:] * x[1:].storage_offset()


def differentiating(x):
    """Take a gradient."""
    return torch.autograd.grad(x.exp().sum(), x, create_graph=True)[0].sin()


def warning(x):
    """Warn."""
    warnings.warn("slow path", stacklevel=1)
    return x * 2


def drawing(x):
    """Draw into a tensor that is not row-major."""
    return torch.empty_like(x).t().contiguous().t().bernoulli_(0.5) * x


def recurrent(x):
    """Run an LSTM."""
    state, weights = torch.zeros(1, 1, 4), [torch.ones(16, 3), torch.ones(16, 4)]
    return torch.lstm(x[:, None], (state, state), weights, False, 1, 0.0, True, False, False)[0]


def singular(x):
    """Compute singular values."""
    return torch.linalg.svdvals(x)


def choosing(x):
    """Choose by an op that takes functions."""
    return torch.ops.higher_order.cond(x.sum() > 0, lambda x: (x.sin(),), lambda x: (x.cos(),), (x,))


def borrowing(x):
    """Give the argument other memory."""
    with torch.no_grad():
        x.set_(x.detach() * 2)
    return x + 1


def allocating(x):
    """Allocate memory that is already allocated."""
    torch.ops.inductor.resize_storage_bytes_(x, 24)
    return x * 2


PROGRAMS = [
    ("hooks", hooked, "`register_hook` is called, and the quirk hooks is switched off"),
    ("metadata_changes", moving, "`t_` is called, and the quirk metadata_changes is switched off"),
    ("storage_offsets", striding, "`as_strided` is called, and the quirk storage_offsets is switched off"),
    ("storage_offsets", offset, "`storage_offset` is called, and the quirk storage_offsets is switched off"),
    ("gradients", differentiating, "`grad` is called, and the quirk gradients is switched off"),
    ("warnings", warning, "`warn` is called, and the quirk warnings is switched off"),
    ("random_order", drawing, "draws random numbers into a tensor that is not contiguous"),
    ("lstm", recurrent, "`lstm` is called, and the quirk lstm is switched off"),
    ("kernels", singular, "`linalg_svdvals` is called, and the quirk kernels is switched off"),
    ("hops", choosing, "`cond` is called, and the quirk hops is switched off"),
    ("storage_sizes", allocating, "`resize_storage_bytes_` is called, and the quirk storage_sizes is switched off"),
    ("other_memory", borrowing, "`set_` is called, and the quirk other_memory is switched off"),
]


@pytest.mark.tier("quick")
def test_all_are_on():
    """The default switches all quirks on, and an unknown name raises at the first call."""
    assert config.quirks == NAMES
    with (
        config.patch(quirks=("nonesuch",)),
        pytest.raises(ValueError, match="there are hooks, metadata_changes"),
    ):
        compiled(hooked)(leaf(2, 3))


@pytest.mark.tier("quick")
def test_each_row_has_its_quirk():
    """What may be claimed is claimed by one quirk, and nothing else is."""
    claims = [(func, quirk.name) for quirk in quirks.ALL for func in quirk().claims()]
    assert len(claims) == len(dict(claims))
    assert dict(claims) == CLAIMABLE


@pytest.mark.tier("quick")
@pytest.mark.parametrize(("name", "program", "sentence"), PROGRAMS)
def test_a_quirk_is_one_corner(name, program, sentence):
    """A program is compiled with its quirk alone, and runs eagerly with a notice if only that quirk is off."""
    with config.patch(quirks=(name,)):
        same(program, leaf(2, 3), eagerly=name == "random_order" and not ALONG_MEMORY)
    with config.patch(quirks=tuple(other for other in NAMES if other != name)):
        same(program, leaf(2, 3), eagerly=True)
        with refusing(match=sentence):
            compiled(program)(leaf(2, 3))


@pytest.mark.tier("quick")
@pytest.mark.parametrize("cell", FOUND_DIRECTLY, ids=[cell.stem for cell in FOUND_DIRECTLY])
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_corpus_without_quirks(cell, capsys):
    """Without quirks, the programs in the fuzzer's corpus still give eager's results."""
    with config.patch(quirks=()):
        if differs(cell, cell.read_text(encoding="utf-8")):
            pytest.fail(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("without", "programs"),
    [
        pytest.param(NAMES, 100, id="all", marks=pytest.mark.tier("quick")),
        *(pytest.param((name,), 8, id=name, marks=pytest.mark.tier("full")) for name in NAMES),
    ],
)
def test_random_programs_without_quirks(without, programs):
    """Random programs agree with eager with all quirks off, and with each one off."""
    plan = Plan(seed=secrets.randbits(32), programs=programs, without=without)
    blocks = Blocks(plan, [0])
    try:
        check(plan, blocks[0])
    finally:
        blocks.close()
