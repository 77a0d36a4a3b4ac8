"""Eager against candidates that are right, and against candidates broken in one observable each."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from aotlab.errors import PythonValueError, UsageError
from aotlab.verification import compare, eager, verify
from aotlab.verification.comparisons import Verification
from aotlab.verification.judgement import judge
from aotlab.verification.observables import Call, CallerStep, observe

Pair = namedtuple("Pair", ["left", "right"])


def function(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
    """Mutate an input, and return a new tensor, a view of an input, an input, a sum and Python values."""
    x.mul_(2)
    new = x * y
    return new, x[1:], y, (y * 3).sum(), {"count": 3, "nothing": None}


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    """Make a non-leaf that may be mutated, and a leaf."""
    leaf = torch.arange(1.0, 7.0).reshape(2, 3).requires_grad_()
    return leaf * 1, torch.full((2, 3), 0.5, requires_grad=True)


def against(broken: Callable[..., Any], original: Callable[..., Any] = function, **options: Any) -> Verification:
    """Compare ``original`` with ``broken``, whatever the candidate is given."""
    return compare(original, arguments(), candidate=lambda _: broken, **options)


def test_a_function_equals_itself():
    """Nothing differs, all kinds of observables were looked at, for both calls."""
    result = compare(function, arguments(), candidate=eager)
    assert result
    assert (result.ok, result.first, result.differences, result.refused) == (True, None, (), None)
    assert set(result.table["call"]) == {1, 2}
    assert {
        "container",
        "grad mode",
        "random state",
        "python type",
        "python value",
        "identity",
        "type",
        "dtype",
        "shape",
        "stride",
        "offset",
        "device",
        "requires_grad",
        "is_leaf",
        "storage",
        "storage bytes",
        "version",
        "value",
        "differentiable",
        "gradient",
    } == set(result.table["kind"])


def test_the_arguments_are_left_alone():
    """The arguments are neither written nor given gradients."""
    x, y = arguments()
    before = x.detach().clone(), x._version, y.detach().clone()
    compare(function, (x, y), candidate=eager)
    assert torch.equal(x, before[0])
    assert (x._version, y.grad) == (before[1], None)
    assert torch.equal(y, before[2])


class Broken:
    """Candidates for `function`. The name of each describes its mistake."""

    @staticmethod
    def wrong_value(x, y):
        first, *rest = function(x, y)
        return first + 1, *rest

    @staticmethod
    def wrong_dtype(x, y):
        first, *rest = function(x, y)
        return first.double(), *rest

    @staticmethod
    def wrong_shape(x, y):
        first, *rest = function(x, y)
        return first[None], *rest

    @staticmethod
    def dropped_gradient(x, y):
        x.mul_(2)
        return x * y.detach(), x[1:], y, (y * 3).sum(), {"count": 3, "nothing": None}

    @staticmethod
    def forgotten_mutation(x, y):
        new = x * 2
        return new * y, new[1:], y, (y * 3).sum(), {"count": 3, "nothing": None}

    @staticmethod
    def wrong_mutation(x, y):
        result = function(x, y)
        with torch.no_grad():
            x.detach().add_(1)
        return result

    @staticmethod
    def clone_instead_of_view(x, y):
        new, view, *rest = function(x, y)
        return new, view.clone(), *rest

    @staticmethod
    def wrong_offset(x, y):
        new, _, *rest = function(x, y)
        return new, x[:1], *rest

    @staticmethod
    def wrong_strides(x, y):
        new, *rest = function(x, y)
        return new.t().contiguous().t(), *rest

    @staticmethod
    def requires_grad_lost(x, y):
        new, *rest = function(x, y)
        return new.detach(), *rest

    @staticmethod
    def leaf_instead_of_result(x, y):
        new, *rest = function(x, y)
        return new.detach().requires_grad_(), *rest

    @staticmethod
    def identity_lost(x, y):
        new, view, same, *rest = function(x, y)
        return new, view, same.view_as(same), *rest

    @staticmethod
    def grad_mode_left(x, y):
        result = function(x, y)
        torch.set_grad_enabled(False)
        return result

    @staticmethod
    def list_instead_of_tuple(x, y):
        return list(function(x, y))

    @staticmethod
    def other_key(x, y):
        *rest, _ = function(x, y)
        return *rest, {"count": 3, "none": None}

    @staticmethod
    def wrong_number(x, y):
        *rest, _ = function(x, y)
        return *rest, {"count": 4, "nothing": None}

    @staticmethod
    def wrong_type(x, y):
        *rest, _ = function(x, y)
        return *rest, {"count": 3.0, "nothing": None}

    @staticmethod
    def swapped_outputs(x, y):
        new, view, same, *rest = function(x, y)
        return same, view, new, *rest

    @staticmethod
    def larger_storage(x, y):
        new, *rest = function(x, y)
        return torch.cat([new, new])[:2], *rest

    @staticmethod
    def random_number_drawn(x, y):
        torch.rand(1)
        return function(x, y)

    @staticmethod
    def random_number_drawn_late(x, y):
        first, *rest = function(x, y)
        first.register_hook(lambda gradient: [gradient, torch.rand(1)][0])
        return first, *rest

    @staticmethod
    def raises(x, y):
        raise ValueError("no")

    @staticmethod
    def parameter_instead_of_tensor(x, y):
        *rest, total, last = function(x, y)
        return *rest, nn.Parameter(total.detach()), last


@pytest.mark.parametrize(
    ("broken", "kind", "subject"),
    [
        (Broken.wrong_value, "value", "out[0]"),
        (Broken.wrong_dtype, "dtype", "out[0]"),
        (Broken.wrong_shape, "shape", "out[0]"),
        (Broken.dropped_gradient, "gradient", "y"),
        (Broken.forgotten_mutation, "value", "x"),
        (Broken.forgotten_mutation, "version", "x"),
        (Broken.wrong_mutation, "value", "x"),
        (Broken.clone_instead_of_view, "storage", "out[1]"),
        (Broken.wrong_offset, "offset", "out[1]"),
        (Broken.wrong_strides, "stride", "out[0]"),
        (Broken.requires_grad_lost, "requires_grad", "out[0]"),
        (Broken.requires_grad_lost, "differentiable", "call"),
        (Broken.leaf_instead_of_result, "is_leaf", "out[0]"),
        (Broken.identity_lost, "identity", "out[2]"),
        (Broken.grad_mode_left, "grad mode", "after the call"),
        (Broken.list_instead_of_tuple, "container", "out"),
        (Broken.other_key, "container", "out"),
        (Broken.wrong_number, "python value", "out[4]['count']"),
        (Broken.wrong_type, "python type", "out[4]['count']"),
        (Broken.swapped_outputs, "identity", "out[0]"),
        (Broken.larger_storage, "storage bytes", "out[0]"),
        (Broken.random_number_drawn, "random state", "after the call"),
        (Broken.random_number_drawn_late, "random state", "after the backward"),
        (Broken.raises, "exception", "call"),
        (Broken.parameter_instead_of_tensor, "type", "out[3]"),
    ],
)
def test_each_observable_is_caught_when_broken(broken, kind, subject):
    """A candidate that is wrong in one thing is caught, by a difference of that kind about that subject."""
    result = against(broken)
    assert not result
    assert (kind, subject) in {(difference.kind, difference.subject) for difference in result.differences}


def test_where_an_empty_part_begins_in_new_memory_is_not_compared():
    """The storage offset of an empty tensor in new memory is not compared.

    It depends on strides that lead to no element. In an argument's memory it is compared.
    """

    def of_new_memory(x, y):
        return (x * 2)[:0]

    def at_its_end(x, y):
        return (x * 2)[2:]

    def of_an_argument(x, y):
        return x[:0]

    def at_the_end_of_an_argument(x, y):
        return x[2:]

    assert against(at_its_end, of_new_memory)
    kinds = {difference.kind for difference in against(at_the_end_of_an_argument, of_an_argument).differences}
    assert kinds == {"offset"}


def test_zeros_instead_of_none():
    """A leaf that no output reaches has no gradient; zeros are another answer."""

    def unreached(x, y):
        return (x * 2).sum()

    def zeros(x, y):
        return (x * 2).sum() + (y * 0).sum()

    (difference,) = against(zeros, unreached, calls=1).differences
    assert (difference.kind, difference.subject, difference.expected) == ("gradient", "y", "None")
    assert difference.actual == "float32[2, 3] 0, 0, 0, 0, 0, 0"


def test_a_gradient_missing_from_one_output_only():
    """A gradient that is lost for the second output shows when each output is backwarded."""

    def two(x, y):
        return x * 2, y * 3

    def lost(x, y):
        return x * 2, (y * 3).detach() + 0 * y + y.detach() * 0

    assert "gradient" in {difference.kind for difference in against(lost, two, backward="each").differences}
    assert against(lost, two, backward="first").ok


def test_mutation_hidden_from_autograd():
    """The right value written past autograd has the wrong gradient."""

    def mutate(x, y):
        x.mul_(y)

    def hidden(x, y):
        x.detach().mul_(y.detach())

    kinds = {difference.kind for difference in against(hidden, mutate).differences}
    assert "gradient" in kinds
    assert "value" not in kinds


def test_other_exceptions():
    """Another exception type is a difference. Another message is one only if messages are compared."""

    def fails(x, y):
        raise ValueError("one")

    def otherwise(x, y):
        raise ValueError("two")

    def another_type(x, y):
        raise TypeError("one")

    assert against(otherwise, fails).ok
    assert [difference.kind for difference in against(otherwise, fails, messages=True, calls=1).differences] == [
        "exception message"
    ]
    assert not against(another_type, fails)
    assert not against(function, fails)


def test_exception_in_the_backward():
    """A candidate whose backward Broken.raises is caught."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("broken")

    def ours(x, y):
        return Broken.apply(x * y)

    result = against(ours, lambda x, y: x * y, calls=1)
    assert [(difference.kind, difference.subject) for difference in result.differences] == [("exception", "backward")]


def test_only_a_later_call_is_wrong():
    """The second call is compared as well, and the sentence says that it was the second."""
    count = 0

    def stale(x, y):
        nonlocal count
        count += 1
        return Broken.wrong_value(x, y) if count == 2 else function(x, y)

    result = against(stale)
    assert result.first == "call 2: `out[0]` differs in 6 of 6 elements: at (0, 0) eager has 1.0, the engine 2.0"


def test_state_of_a_module():
    """Buffers that a module mutates are compared from call to call, on a copy of the module."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    x = torch.arange(12.0).reshape(4, 3).sin()
    assert compare(model, (x,), candidate=eager)

    def forgetful(copy: Callable[..., Any]) -> Callable[..., Any]:
        def call(value: torch.Tensor) -> Any:
            saved = [buffer.clone() for buffer in copy.buffers()]
            result = copy(value)
            for buffer, old in zip(copy.buffers(), saved, strict=True):
                buffer.copy_(old)
            return result

        return call

    result = compare(model, (x,), candidate=forgetful)
    assert {difference.subject for difference in result.differences if difference.kind == "value"} == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    assert model[1].num_batches_tracked.item() == 0


def test_refusals_are_differences_of_their_own():
    """A refused call is not ok; that it left the arguments alone is checked."""

    def refuse(x, y):
        raise PythonValueError("x overlaps y")

    def mutate_and_refuse(x, y):
        y.detach().add_(1)
        raise PythonValueError("x overlaps y")

    polite, rude = against(refuse, calls=1), against(mutate_and_refuse, calls=1)
    assert [difference.kind for difference in polite.differences] == ["refused"]
    assert polite.refused == (
        "the call was refused with PythonValueError: x overlaps y [python-value], eager: no refusal"
    )
    assert [(difference.kind, difference.subject) for difference in rude.differences] == [
        ("refused", "call"),
        ("mutated before refusal", "y"),
    ]


def test_bit_for_bit():
    """Exact means NaN equals NaN, zeros have signs, and one unit in the last place is a difference."""

    def make(value: float) -> Callable[..., Any]:
        return lambda x, y: torch.full((2,), value, dtype=torch.float64)

    nan, zero = float("nan"), 0.0
    assert against(make(nan), make(nan))
    assert not against(make(-zero), make(zero))
    assert against(make(-zero), make(zero)).first == "`out` has zeros of another sign"
    assert not against(make(1.0 + 2.0**-52), make(1.0))
    assert against(make(1.0 + 2.0**-52), make(1.0), tolerance="close")
    assert not against(make(1.001), make(1.0), tolerance="close")


@pytest.mark.parametrize(("units", "accepted"), [(0, True), (3, True), (9, False)])
def test_another_rounding_is_accepted_and_named(units: int, accepted: bool) -> None:
    """With the tolerance "rounded", a few units in the last place are accepted, and only they: no other strides."""

    def of(factor: float) -> Callable[..., Any]:
        return lambda x, y: (x.detach() * 0 + factor, y.int())

    result = against(of(1.0 + units * 2.0**-23), of(1.0), tolerance="rounded", calls=1)
    assert result.ok == accepted
    rules = {row.subject: row.tolerance for row in result.comparisons if row.kind == "value"}
    assert (rules["out[0]"], rules["out[1]"]) == ("up to rounding" if units else "bit for bit", "bit for bit")
    assert against(of(1.0 + units * 2.0**-23), of(1.0), calls=1).ok == (units == 0)
    assert not against(Broken.wrong_strides, tolerance="rounded")
    assert not against(lambda x, y: (x.detach() * 0 + 1.0, y.int() + 1), of(1.0), tolerance="rounded", calls=1)


def noisy(scale: float) -> Callable[..., Any]:
    """Make a mean of float16 numbers with an error of ``scale``. In float64 there is no error."""

    def mean(x: torch.Tensor) -> torch.Tensor:
        return x.mean() + (scale if x.dtype == torch.float16 else 0.0)

    return mean


@pytest.mark.parametrize(("error", "accepted"), [(0.001, True), (0.15, True), (0.25, False)])
def test_the_yardstick(error, accepted):
    """A difference that assert_close rejects is accepted up to twice the yardstick's error against float64."""
    x = torch.ones(8, dtype=torch.float16)
    result = compare(
        noisy(0.0),
        (x,),
        candidate=lambda _: noisy(error),
        yardstick=lambda function: noisy(0.1) if function is not None else function,
        tolerance="close",
    )
    assert bool(result) is accepted


def off_by(error: float, sums: float = 0.0) -> Callable[..., Any]:
    """Make two sums with relative errors in float32: ``sums`` for the first, ``error`` for the second."""

    def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded = x.dtype == torch.float32
        return x.sum() * (1 + sums * rounded), x.sum() * 2 * (1 + error * rounded)

    return two


@pytest.mark.parametrize(
    ("error", "stock", "accepted"),
    [
        (1e-6, off_by(0.0), True),
        (1e-5, off_by(5e-6), True),  # twice the yardstick's error
        (1e-5, off_by(3e-6), False),
        (1e-5, off_by(1e-7, sums=5e-6), True),  # the yardstick has such an error in another value
        (1e-5, off_by(0.0, sums=0.5), True),
        (2e-4, off_by(0.0, sums=0.5), False),  # but that is no excuse for more than rounding
        (1e-3, off_by(0.0, sums=1e-5), False),
        (1e-2, off_by(1e-5, sums=1e-5), False),
    ],
)
def test_the_error_against_float64(error: float, stock: Callable[..., Any], accepted: bool) -> None:
    """Where assert_close says no, stock torch.compile's error decides; errors of 0.1 % are differences in any case."""
    result = compare(
        off_by(0.0), (torch.arange(1.0, 9.0),), candidate=lambda _: off_by(error), yardstick=lambda _: stock,
        tolerance="close", backward=None,
    )  # fmt: skip
    assert bool(result) is accepted


def test_an_error_of_eagers_own_is_no_difference() -> None:
    """An engine may be nearer to the float64 run than eager is."""
    result = compare(
        off_by(5e-5), (torch.arange(1.0, 9.0),), candidate=lambda _: off_by(0.0), yardstick=lambda _: off_by(0.0),
        tolerance="close", backward=None,
    )  # fmt: skip
    assert result


def test_what_the_result_says_of_its_tolerance() -> None:
    """Each value has its rule and its distance from eager; the text names the rules and the largest differences."""
    result = compare(
        off_by(0.0), (torch.arange(1.0, 9.0),), candidate=lambda _: off_by(8e-6), yardstick=lambda _: off_by(5e-6),
        tolerance="close", backward=None,
    )  # fmt: skip
    values = result.table[result.table["kind"] == "value"].set_index("subject")
    assert values["tolerance"].iloc[:3].to_dict() == {
        "x": "assert_close's defaults",
        "out[0]": "assert_close's defaults",
        "out[1]": "twice stock torch.compile's error against float64",
    }
    assert values["absolute"].iloc[2] == pytest.approx(72 * 8e-6, rel=0.05)
    assert values["relative"].iloc[2] == pytest.approx(8e-6, rel=0.05)
    assert repr(result).endswith(
        "; tolerance: assert_close's defaults or twice stock torch.compile's error against float64; "
        "largest difference 0.00057 (`out[1]`), relative to the largest element 7.9e-06 (`out[1]`)"
    )


def test_other_random_numbers_in_float64_are_no_reference() -> None:
    """Where a float64 run draws other numbers, every error would seem small beside its own; assert_close decides."""

    def noise(factor: float) -> Callable[..., Any]:
        return lambda x: torch.rand_like(x) * factor

    result = compare(
        noise(1.0), (torch.ones(64),), candidate=lambda _: noise(1.01), yardstick=lambda _: noise(1.0),
        tolerance="close",
    )  # fmt: skip
    assert not result
    rules = "tolerance: assert_close's defaults or assert_close's defaults, because there is no float64 run"
    assert rules in repr(result)


@pytest.mark.parametrize("size", [32, 64])
def test_the_last_bits_of_inductors_sums_are_no_differences(size: int) -> None:
    """Gradients of a group norm are sums of thousands of terms: in Inductor's order they are as near to float64."""
    torch.compiler.reset()
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 3))
        found = verify(model, torch.randn(2, 3, size, size), calls=1)
        assert found, found
        assert "twice stock torch.compile's error against float64" in repr(found)


def test_without_a_float64_run_assert_close_decides():
    """Where the yardstick cannot be applied, nothing is forgiven."""
    weight = torch.ones(8, dtype=torch.float16)

    def function(x):
        return (x * weight).sum()

    result = compare(
        function,
        (torch.ones(8, dtype=torch.float16),),
        candidate=lambda _: lambda x: function(x) + 1,
        yardstick=lambda _: lambda x: function(x) + 5,
        tolerance="close",
    )
    assert not result


def test_relaxed_layout():
    """Within a compiler's tolerance, a new result may have any strides. A view of an input may not."""

    def padded(x, y):
        new, *rest = function(x, y)
        return torch.cat([new, new])[2:], *rest

    assert not against(padded)
    assert against(padded, tolerance="close")
    assert not against(Broken.wrong_offset, tolerance="close")
    assert not against(Broken.clone_instead_of_view, tolerance="close")
    assert not against(Broken.wrong_strides, tolerance="close")


def test_table_and_text():
    """The table has the documented columns and dtypes; text and HTML begin with the verdict, escaped."""
    good = against(function)
    bad = against(Broken.wrong_type, subject="<f>")
    columns = ["kind", "subject", "expected", "actual", "equal", "call", "tolerance", "absolute", "relative"]
    assert list(good.table.columns) == columns
    assert (good.table["equal"].dtype, good.table["call"].dtype) == (bool, "int64")
    told = f"all {len(good.table)} observables equal to those of its Python, run eagerly"
    assert repr(good) == f"Verification of function: {told}; tolerance: bit for bit"
    told = f"4 of {len(bad.table)} observables differ from its Python, run eagerly; `out[4]['count']` is"
    assert repr(bad).startswith(f"Verification of <f>: {told}")
    page = bad._repr_html_()
    assert page.startswith("<p>Verification of &lt;f&gt;: 4 of")
    first, _, folded = page.partition(f"<details><summary>{len(bad.table) - 4} equal observables</summary>")
    assert (first.count("<tr>"), folded.count("<tr>")) == (4, len(bad.table) - 4)
    assert good._repr_html_().count("<table") == good._repr_html_().count("<details>") == 1
    assert isinstance(bad.table[~bad.table["equal"]], pd.DataFrame)
    with pytest.raises(FrozenInstanceError):
        good.subject = "other"  # type: ignore[misc]


def test_container_types():
    """A named tuple is not a tuple, though it compares equal to one."""
    assert not against(lambda x, y: (x, y), lambda x, y: Pair(x, y))
    assert against(lambda x, y: Pair(x, y), lambda x, y: Pair(x, y))


def test_random_functions_are_given_the_same_numbers():
    """Each side draws the same random numbers, and the caller's generator does not move."""
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert compare(lambda x: x + torch.rand(3), (torch.ones(3),), candidate=eager)
    assert torch.equal(torch.rand(1), expected)


def test_captured_tensors_take_part():
    """A tensor that a function captures is compared like a parameter and restored afterwards."""
    weight = torch.ones(3, requires_grad=True)

    def uses(x):
        return x * weight

    def detaches(x):
        return x * weight.detach() + 0 * weight

    result = compare(uses, (torch.ones(3),), candidate=lambda _: detaches)
    assert {(difference.kind, difference.subject) for difference in result.differences} == {("gradient", "weight")}
    assert weight.grad is None


def test_the_engine_is_verified():
    """Our engine passes on a function and on a module, and the verification knows that they were compiled."""
    for backward in ("all", "first", "each", None):
        assert verify(function, *arguments(), backend="eager", backward=backward).first is None
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
    found = verify(model, torch.arange(12.0).reshape(4, 3).sin(), backend="eager")
    assert (found.first, found.ran_eagerly) == (None, 0)


def test_calls_that_ran_eagerly_are_told():
    """Agreement of a call that was never compiled is not passed off as the engine's."""

    def invalid(x):
        return x.view(7)

    found = verify(invalid, torch.ones(3), backend="eager")
    assert (found.ok, found.ran_eagerly) == (True, 2)
    assert repr(found).endswith("; 2 calls were not compiled and ran eagerly")


def test_unknown_engine():
    """A misspelt engine is a usage error."""
    with pytest.raises(UsageError, match="engine 'upsteam'"):
        verify(function, *arguments(), engine="upsteam")


def test_upstream_is_verified_too():
    """Stock torch.compile passes on a function that mutates and aliases its inputs."""
    assert verify(function, *arguments(), engine="upstream", backend="eager").first is None


def test_an_argument_named_like_an_output():
    """A parameter that is called `out` is not taken for the output of that name."""

    def f(out, y):
        return out * y

    result = compare(f, (torch.ones(2, requires_grad=True), torch.ones(2)), candidate=lambda f: f)
    assert result.ok, result.first


def chained(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return two tensors of which the second is made from the first, and a view of the input."""
    first = x * 2
    return first, first * 3, x[:1]


def unchained(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the same values, and the same gradient of the input, with another history."""
    second = x * 6
    return x * 2, second, x[:1]


def retaining(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the same again, but retain a gradient."""
    first, second, view = chained(x)
    second.retain_grad()
    return first, second, view


def copying(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the same values, with a view of something else than the input."""
    first, second, _ = chained(x)
    return first, second, (x * 1)[:1]


def splitting(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the same values, with a view that may not be written."""
    first, second, _ = chained(x)
    return first, second, x.split(1)[0]


def same_input(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the input itself."""
    return (x,)


def view_of_input(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a view of the input in its place."""
    return (x.view_as(x),)


def weights(tensor: torch.Tensor) -> torch.Tensor:
    """Make a gradient to begin a backward with."""
    return torch.full_like(tensor, 0.5)


def differing(left: Any, right: Any, before: dict[str, Any], after: dict[str, Any], **options: Any) -> dict[str, str]:
    """Return the kinds in which ``right`` differs from ``left`` when the caller does something afterwards."""
    observations = []
    for function in (left, right):
        seen: list[tuple[str, torch.Tensor]] = []
        leaf = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        x = leaf * 1

        def steps(texts: dict[str, Any], seen: Any = seen, x: torch.Tensor = x) -> Any:
            return lambda out: [
                CallerStep(text=text, run=lambda run=run: run(out, x, seen), differentiates="grad" in text)
                for text, run in texts.items()
            ]

        call = Call(
            args=(x,), inputs=(("x", x),), watched=(("leaf", leaf),),
            before=steps(before), after=steps(after), seen=seen,
        )  # fmt: skip
        observations.append(observe(function, call, **options))
    return {row.kind: row.sentence for row in judge(*observations, terse=True)}


def hook(name: str) -> Any:
    """Make a step that puts a hook on an output."""
    number = int(name[4])
    return lambda out, x, seen: out[number].register_hook(lambda gradient: seen.append((name, gradient.clone())))


@pytest.mark.parametrize(
    ("right", "before", "after", "backward", "kind"),
    [
        (
            unchained,
            {"grad": lambda out, x, seen: torch.autograd.grad(out[1], out[0], weights(out[1]), allow_unused=True)},
            {},
            None,
            "step",
        ),
        (splitting, {"write": lambda out, x, seen: out[2].mul_(2)}, {}, None, "exception"),
        (
            unchained,
            {"hook": hook("out[0]"), "grad": lambda out, x, seen: out[1].backward(weights(out[1]))},
            {},
            None,
            "hook calls",
        ),
        (unchained, {"hook": hook("out[0]")}, {}, "all", "hook"),
        (unchained, {"one": hook("out[0]"), "two": hook("out[1]")}, {}, "all", "hook order"),
        (unchained, {"retain": lambda out, x, seen: out[0].retain_grad()}, {}, "all", "gradient"),
        (retaining, {}, {}, "all", "retains_grad"),
        (copying, {"write": lambda out, x, seen: out[2].detach().mul_(2)}, {}, None, "value afterwards"),
        (
            unchained,
            {"retain": lambda out, x, seen: out[0].retain_grad()},
            {"grad": lambda out, x, seen: out[1].backward(weights(out[1]))},
            None,
            "gradient afterwards",
        ),
    ],
)
def test_what_the_caller_does_shows_differences(right, before, after, backward, kind):
    """A difference that only appears when the caller uses the outputs is found and named."""
    assert differing(chained, chained, before, after, backward=backward) == {}
    found = differing(chained, right, before, after, backward=backward)
    assert found.get(kind), found


def test_the_state_at_the_end_is_compared():
    """The caller changes the shape of a returned tensor. The test detects whether this tensor was the input itself."""
    turned = {"turn": lambda out, x, seen: out[0].unsqueeze_(0)}
    assert "state afterwards" in differing(same_input, view_of_input, turned, {}, backward=None)
    assert differing(same_input, same_input, turned, {}, backward=None) == {}


def test_terse_leaves_out_only_what_is_equal():
    """The differences are the same, and there is nothing else."""
    calls = [observe(side, Call(args=(torch.ones(2),))) for side in (lambda x: x * 2, lambda x: x * 3)]
    rows = [row for row in judge(*calls) if not row.equal]
    assert rows == judge(*calls, terse=True) != []
    assert judge(calls[0], calls[0], terse=True) == []


def test_strides_are_told_as_they_are() -> None:
    """Also of dimensions with one element, whose strides do not count."""

    def rows(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).t()

    told = verify(rows, torch.ones(4, 1), backend="eager").comparisons
    strides = {row.subject: (row.expected, row.equal) for row in told if row.kind == "stride"}
    assert strides == {"x": ("(1, 1)", True), "out": (str(rows(torch.ones(4, 1)).stride()), True)}
