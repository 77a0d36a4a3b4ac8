"""The quirks: each can be switched off, and then its corner runs eagerly, with eager's results and a sentence."""

from __future__ import annotations

import secrets
import warnings

import pytest
import torch

from aotlab import config, quirks
from aotlab.quirks import draws
from aotlab.trace.boundary import CLAIMABLE
from aotlab.verification.fuzz.plan import Plan
from tests.engine_helpers import compiled, leaf, refusing, same
from tests.verification.fuzz_blocks import Blocks, check
from tests.verification.test_fuzz_corpus import FOUND_DIRECTLY, differs

NAMES = tuple(quirk.name for quirk in quirks.ALL)
#: What eager's kernel of this machine does with a permuted tensor.
ALONG_MEMORY = draws._goes_along_memory(torch.float32)


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
    """Draw into a tensor that does not lie row by row."""
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


PROGRAMS = [
    ("hooks", hooked, "a hook is registered"),
    ("moves", moving, "`t_` changes a tensor in place"),
    ("windows", striding, "`as_strided` looks at"),
    ("windows", offset, "`storage_offset` looks at"),
    ("gradients", differentiating, r"`torch.autograd.grad` is called inside"),
    ("warnings", warning, "it warns"),
    ("draws", drawing, "draws in the order of the memory"),
    ("lstm", recurrent, "an LSTM looks at grad mode"),
    ("kernels", singular, "eager computes `linalg_svdvals` by another kernel"),
    ("hops", choosing, "`cond` is given functions"),
]


@pytest.mark.tier("quick")
def test_all_are_on():
    """The switch names every quirk, and a name that is none is an error at the first call."""
    assert config.quirks == NAMES
    with config.patch(quirks=("nonesuch",)), pytest.raises(ValueError, match="'nonesuch'; there are hooks, moves"):
        compiled(hooked)(leaf(2, 3))


@pytest.mark.tier("quick")
def test_each_row_has_its_quirk():
    """What may be claimed is claimed by one quirk, and nothing else is."""
    claims = [func for quirk in quirks.ALL for func in quirk().claims()]
    assert len(claims) == len(set(claims))
    assert set(claims) == set(CLAIMABLE)


@pytest.mark.tier("quick")
@pytest.mark.parametrize(("name", "program", "sentence"), PROGRAMS)
def test_a_quirk_is_one_corner(name, program, sentence):
    """With the quirk alone its corner is compiled; with all others it runs eagerly, and says so."""
    with config.patch(quirks=(name,)):
        same(program, leaf(2, 3), eagerly=name == "draws" and not ALONG_MEMORY)
    with config.patch(quirks=tuple(other for other in NAMES if other != name)):
        same(program, leaf(2, 3), eagerly=True)
        with refusing(match=sentence):
            compiled(program)(leaf(2, 3))


@pytest.mark.tier("quick")
@pytest.mark.parametrize("cell", FOUND_DIRECTLY, ids=[cell.stem for cell in FOUND_DIRECTLY])
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_corpus_without_quirks(cell, capsys):
    """What the fuzzer once found does not differ where the core is alone."""
    with config.patch(quirks=()):
        if differs(cell, cell.read_text(encoding="utf-8")):
            pytest.fail(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("without", "programs"),
    [
        pytest.param(NAMES, 100, id="all", marks=pytest.mark.tier("quick")),
        *(pytest.param((name,), 15, id=name, marks=pytest.mark.tier("full")) for name in NAMES),
    ],
)
def test_random_programs_without_quirks(without, programs):
    """Programs that nobody has seen before are eager's equal, with all quirks off and with each one off."""
    plan = Plan(seed=secrets.randbits(32), programs=programs, without=without)
    blocks = Blocks(plan, [0])
    try:
        check(plan, blocks[0])
    finally:
        blocks.close()
