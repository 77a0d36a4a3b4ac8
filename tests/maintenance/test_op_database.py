"""300 of torch's own operators and modules, by aotlab and by eager; and that a broken engine would be noticed."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch

from aotlab import _torch as torch_internals
from aotlab._torch import FakeTensorMode
from aotlab.errors import UsageError
from aotlab.maintenance.op_database import SAMPLE, Outcome, Variant, cases_of, judge_variant, variants
from aotlab.maintenance.op_database.engines import BehindDynamo, Direct
from tests.mutants import MUTANTS

#: Compiled and right, or an error of eager's that aotlab raises as well.
RIGHT = (Outcome.EQUAL, Outcome.ROUNDED, Outcome.SHAPES, Outcome.RAISES)

_VALUES = (Outcome.EAGERLY, "DataDependentError: ")
_OWN_OUT = (
    Outcome.EAGERLY,
    "writes into `out`, and copying its result into `out` would differ from eager: it has its own rule for `out`",
)
#: What of the sample is not compiled, and why: the outcome, and words of its reason.
NOT_COMPILED: dict[str, tuple[Outcome, str]] = {
    "mode out float32": _OWN_OUT,
    "kron out float32": _OWN_OUT,
    "linalg.eigh call complex64": (Outcome.EAGERLY, "returns complex vectors that require grad"),
    "normal out float32": (Outcome.EAGERLY, "it draws random numbers, and `out` is not contiguous"),
    "addbmm in-place complex64": (Outcome.EAGERLY, "the requested shape has too few dimensions"),
    **dict.fromkeys(
        ("as_strided in-place complex64", "resize_ in-place float32", "resize_as_ call int64"),
        (Outcome.EAGERLY, "changes the size or the memory of a tensor in place"),
    ),
    "nn.functional.gelu out float32": (Outcome.EAGERLY, "it writes tensors with gaps as if they were contiguous"),
    "tensor_split call complex64": (Outcome.EAGERLY, "reads the values of a traced tensor"),
    **dict.fromkeys(
        (
            "svd out float32", "cummin out int64", "max.reduction_with_dim out int64", "sort out int64",
            "linalg.cholesky_ex out complex64", "linalg.eig out float32", "linalg.inv_ex out complex64",
        ),
        _OWN_OUT,
    ),
    "polygamma.polygamma_n_0 in-place float32": (Outcome.EAGERLY, "a trace cannot record `polygamma_`"),
    "empty out int64": _OWN_OUT,
    "H call complex64": (Outcome.EAGERLY, "no view ops can regenerate the output"),
    "to_sparse call int64": (Outcome.EAGERLY, "makes a tensor of the layout torch.sparse_coo"),
    "nn.functional.ctc_loss call float32": _VALUES,
    "nn.LazyConv3d eval float32": (Outcome.EAGERLY, "UninitializedParameter"),
    "nn.GaussianNLLLoss train float32": _VALUES,
}  # fmt: skip


@pytest.fixture(scope="module")
def by_name() -> dict[str, Variant]:
    """Load torch's databases once."""
    return {variant.name: variant for variant in variants()}


@pytest.mark.parametrize(
    "dynamic", [False, pytest.param(True, marks=pytest.mark.tier("full"))], ids=["static", "sizes"]
)
@pytest.mark.parametrize("name", SAMPLE)
def test_sample(name: str, dynamic: bool, by_name: dict[str, Variant]):
    """The variant is eager's equal, forward and backward, in all that is observable; or it is known why not.

    For the sizes of each call, and for all sizes at once.
    """
    if name not in by_name:
        pytest.skip(f"torch {torch.__version__} does not have it")
    if name == "fft.rfftn call float32" and torch.__version__.startswith("2.11"):
        pytest.skip("torch 2.11's fake tensors promise other strides than its kernel gives")
    result = judge_variant(by_name[name], limit=4, make=partial(Direct, dynamic=dynamic))
    known = NOT_COMPILED.get(name)
    allowed = RIGHT if known is None else (*RIGHT, known[0])
    assert result.outcome in allowed, result.reason
    assert result.outcome in RIGHT or known is None or known[1] in result.reason


def test_the_sample_is_there(by_name: dict[str, Variant]):
    """All 300 are different, and nearly all are in this version of torch."""
    assert len(set(SAMPLE)) == 300
    assert sum(name in by_name for name in SAMPLE) >= 290
    assert set(NOT_COMPILED) <= set(SAMPLE)


def test_every_entry_has_variants(by_name: dict[str, Variant]):
    """All operators and modules are included, except those that no CPU runs or that only support float8.

    Most have several forms.
    """
    entries = {variant.entry for variant in by_name.values()}
    left_out = {info.full_name for info in torch_internals.op_database()} - entries
    assert all("_scaled_mm" in name or "_attention_forward" in name or "cudnn" in name for name in left_out), left_out
    assert {info.name for info in torch_internals.module_database()} <= entries
    assert len(by_name) > 2500
    assert {"add call float32", "add in-place int64", "add out complex64", "nn.Linear train float32"} <= set(by_name)


def test_cases_are_the_same_each_time(by_name: dict[str, Variant]):
    """Samples depend on the variant's name only, and making them leaves torch's random state alone."""
    variant = by_name["addmm call float32"]
    before = torch.get_rng_state()
    first = [each for case in cases_of(variant) for each in case.args]
    torch.manual_seed(1)
    second = [each for case in cases_of(variant) for each in case.args]
    assert len(first) == len(second) > 10
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
    torch.set_rng_state(before)
    list(cases_of(variant))
    assert torch.equal(before, torch.get_rng_state())


def test_cases_of_each_form(by_name: dict[str, Variant]):
    """Each form has the cases that it needs: gradients, gaps, writable tensors for in-place ops, and `out=` results."""
    called = list(cases_of(by_name["mul call float32"]))
    assert any(case.differentiated for case in called)
    assert any(not case.differentiated for case in called)
    assert any(not case.args[0].is_contiguous() for case in called)
    assert any(case.label.startswith("error") for case in cases_of(by_name["gather call float32"]))
    in_place = list(cases_of(by_name["mul in-place float32"]))
    assert all(not case.args[0].is_leaf for case in in_place if case.differentiated)
    written = list(cases_of(by_name["mul out float32"]))
    assert {case.kwargs["out"].is_contiguous() for case in written if case.kwargs["out"].dim() > 1} == {True, False}
    assert len(list(cases_of(by_name["mul call float32"], limit=None))) > len(called)


CAUGHT_BY = {
    "epilogue skipped": "mul in-place float32",
    "wrong mutated value": "mul in-place float32",
}


@pytest.mark.parametrize("mutant", [each for each in MUTANTS if each.name in CAUGHT_BY], ids=lambda each: each.name)
def test_a_broken_engine_is_noticed(mutant, by_name: dict[str, Variant]):
    """With a mistake in the engine, the variant is not equal, and the reason is given.

    Without it, the variant is equal.
    """
    variant = by_name[CAUGHT_BY[mutant.name]]
    with mutant.installed():
        broken = judge_variant(variant)
    assert (broken.outcome, judge_variant(variant).outcome) == (Outcome.DIFFERENT, Outcome.EQUAL)
    assert "args[0]" in broken.reason


@pytest.mark.usefixtures("fresh_dynamo")
def test_behind_dynamo(by_name: dict[str, Variant]):
    """A broken engine is noticed there as well. Differences that Dynamo alone causes are listed separately."""
    variant = by_name["mul in-place float32"]
    whole = judge_variant(variant, limit=1, make=BehindDynamo)
    with next(each for each in MUTANTS if each.name == "epilogue skipped").installed():
        broken = judge_variant(variant, limit=1, make=BehindDynamo)
    assert (broken.outcome, whole.outcome) == (Outcome.DIFFERENT, Outcome.EQUAL)
    assert whole.compiled == whole.cases > 1
    module = judge_variant(by_name["nn.Linear train float32"], limit=1, make=BehindDynamo)
    assert module.outcome is Outcome.EQUAL
    refused = judge_variant(by_name["sin in-place int64"], limit=1, make=BehindDynamo)
    assert refused.outcome is Outcome.DYNAMOS  # its error has Dynamo's words around eager's


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_dynamo_leaves_to_python(by_name: dict[str, Variant]):
    """Calls in which Dynamo captures nothing are listed with the reason.

    They are separate from calls that it captures and that we run eagerly.
    """
    uncaptured = judge_variant(by_name["squeeze in-place int64"], limit=1, make=BehindDynamo)
    assert (uncaptured.outcome, uncaptured.compiled) == (Outcome.UNCAPTURED, 0)
    assert "inplace view op" in uncaptured.reason
    eagerly = judge_variant(by_name["empty out int64"], limit=1, make=BehindDynamo)
    assert (eagerly.outcome, eagerly.compiled) == (Outcome.EAGERLY, 0)
    assert "`empty` writes into `out`, and copying its result into `out` would differ from eager" in eagerly.reason
    assert "it has its own rule for `out`" in eagerly.reason


@pytest.mark.usefixtures("fresh_dynamo")
def test_what_dynamo_does_only_once_in_a_process(by_name: dict[str, Variant]):
    """An error of Dynamo's that its cached fake results hide at the second time counts as its own all the same."""
    FakeTensorMode.cache_clear()
    torn = judge_variant(by_name["addr in-place float32"], make=BehindDynamo)
    assert torn.outcome in (Outcome.DYNAMOS, Outcome.EQUAL), torn  # the latter on torches that do not fail there


def test_outcomes_that_are_not_equal(by_name: dict[str, Variant]):
    """Eager runs, eager's own errors and uninitialized memory are separate outcomes, with the reason."""
    outcomes = {
        name: judge_variant(by_name[name], limit=1)
        for name in (
            "nn.functional.ctc_loss call float32",
            "sin in-place int64",
            "empty_like call float32",
            "equal out float32",
        )
    }
    assert [result.outcome for result in outcomes.values()] == [
        Outcome.EAGERLY, Outcome.RAISES, Outcome.SHAPES, Outcome.NOT_COMPARED,
    ]  # fmt: skip
    assert "DataDependentError: " in outcomes["nn.functional.ctc_loss call float32"].reason
    assert "can't be cast to the desired output type Long" in outcomes["sin in-place int64"].reason


def test_the_databases_leave_no_trace():
    """Torch's test helpers forbid assignments to torch's flags when they are imported.

    The database module restores this.
    """
    program = (
        "import os, torch, warnings\n"
        "from aotlab import _torch as t\n"
        "before = (len(warnings.filters), dict(os.environ), torch.get_rng_state().sum().item())\n"
        "t.op_database(), t.module_database()\n"
        "assert before == (len(warnings.filters), dict(os.environ), torch.get_rng_state().sum().item())\n"
        "torch.backends.cudnn.benchmark = True\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    """Torch's databases need a package that torch does not install. The error says what to install."""
    for name in [name for name in sys.modules if name.startswith("torch.testing._internal.common_")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "expecttest", None)
    torch_internals.op_database.cache_clear()
    try:
        with pytest.raises(UsageError, match=r"'expecttest'.*aotlab\[ops\]"):
            torch_internals.op_database()
    finally:
        torch_internals.op_database.cache_clear()
