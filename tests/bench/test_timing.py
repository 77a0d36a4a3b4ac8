"""The paired timer: orders, units, and which code is timed."""

from __future__ import annotations

import gc
import itertools
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from aotlab.bench.timing import Call, Case, Comparison, Paired, Samples, compare, doubt, tensors_in, training_case
from aotlab.errors import UsageError
from aotlab.report.model import Ratio


class Clock:
    """A clock that only moves if a case moves it, so that no test depends on the machine."""

    def __init__(self) -> None:
        self.now_ns = 0

    def sleep(self, ns: int) -> None:
        """Let ``ns`` pass."""
        self.now_ns += ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Put a `Clock` in the place of the machine's."""
    found = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: found.now_ns)
    return found


def _logging(log: list[str], name: str) -> Case:
    return Case(name=name, call=lambda: log.append(name))


def test_rounds_turn_round() -> None:
    """Every round times each case once, in turns from the front and from the back."""
    log: list[str] = []
    compare([_logging(log, "a"), _logging(log, "b"), _logging(log, "c")], rounds=3, warmup=0, inner=1)
    assert list("abc" + "cba" + "abc") == log


def test_the_case_timed_again_stands_at_the_other_end() -> None:
    """An A/A case is called as often as its first self, from the opposite end of the round."""
    log: list[str] = []
    result = compare([_logging(log, "a"), _logging(log, "b")], rounds=2, warmup=0, inner=1, again="a")
    assert list("aba" + "aba") == log
    assert [samples.name for samples in result.samples] == ["a", "b", "a (again)"]
    assert result.again_name == "a (again)"
    assert result.noise == result.ratio("a (again)", "a")


def test_warm_up_is_not_timed(clock: Clock) -> None:
    """The first calls, which may compile, do not reach the samples."""
    costs = iter([1_000_000, 1_000])
    result = compare([Case(name="cold", call=lambda: clock.sleep(next(costs, 7)))], rounds=2, warmup=2, inner=1)
    assert result["cold"].ns == (7.0, 7.0)


def test_times_are_nanoseconds_per_call(clock: Clock) -> None:
    """A sample of three calls of 4 ms says 4 ms, in ns."""
    result = compare([Case(name="x", call=lambda: clock.sleep(4_000_000))], rounds=2, warmup=0, inner=3)
    assert (result["x"].inner, result["x"].ns) == (3, (4e6, 4e6))


def test_the_real_clock_counts_nanoseconds() -> None:
    """A call that sleeps for 4 ms takes at least that, and not a thousand times that."""
    result = compare([Case(name="sleep", call=lambda: time.sleep(0.004))], rounds=2, warmup=0, inner=1)
    assert 4_000_000 <= result["sleep"].min_ns < 1_000_000_000


def test_fast_calls_are_repeated_until_a_sample_is_long_enough(clock: Clock) -> None:
    """A call of 1 µs is looped until a sample lasts 2 ms, not ten times longer; one of 3 ms is called once."""
    result = compare(
        [Case(name="fast", call=lambda: clock.sleep(1_000)), Case(name="slow", call=lambda: clock.sleep(3_000_000))],
        rounds=2,
        sample_ns=2_000_000,
    )
    assert result["slow"].inner == 1
    assert 2_000 <= result["fast"].inner <= 4_000
    assert result["fast"].median_ns == 1_000.0


def test_a_limit_ends_the_rounds_in_pairs(clock: Clock) -> None:
    """Whoever has little time gets fewer rounds, as many there as back, and at least two."""
    cases = [Case(name="a", call=lambda: clock.sleep(10)), Case(name="b", call=lambda: clock.sleep(10))]
    assert compare(cases, rounds=10, inner=1, limit_ns=70)["a"].n == 4
    assert compare(cases, rounds=10, inner=1, limit_ns=0)["a"].n == 2
    assert compare(cases, rounds=3, inner=1, limit_ns=10_000)["a"].n == 3
    assert compare(cases, rounds=10, inner=1, limit_ns=0, fewest=5)["a"].n == 6


def test_a_hiccup_does_not_decide_how_many_calls_make_a_sample(clock: Clock) -> None:
    """A slow trial of a fast call is repeated before the call is classified as slow."""
    costs = iter([5_000_000])
    result = compare(
        [Case(name="fast", call=lambda: clock.sleep(next(costs, 1_000)))], rounds=1, warmup=0, sample_ns=2_000_000
    )
    assert result["fast"].inner >= 2_000


def test_prepared_calls_are_not_heaped_up_without_bound(clock: Clock) -> None:
    """A prepared call that takes next to nothing stops at a thousand at a time, each holding memory."""
    result = compare([Case(name="fresh", prepare=lambda: lambda: clock.sleep(1))], rounds=1, sample_ns=10**9)
    assert result["fresh"].inner == 1000


def test_preparation_is_not_timed(clock: Clock) -> None:
    """``prepare`` is not timed, and runs before every call."""
    prepared: list[object] = []
    used: list[object] = []

    def prepare() -> Call:
        clock.sleep(5_000)
        token = object()
        prepared.append(token)

        def call() -> None:
            clock.sleep(3)
            used.append(token)

        return call

    result = compare([Case(name="prepared", prepare=prepare)], rounds=2, warmup=1, inner=2)
    assert prepared == used
    assert len(used) == 1 + 2 * 2
    assert result["prepared"].ns == (3.0, 3.0)


def test_the_collector_is_left_as_it_was() -> None:
    """Garbage collection is off while something is timed and on again afterwards, an exception included."""
    gc.unfreeze()  # what earlier test modules left
    seen: list[bool] = []
    compare([Case(name="look", call=lambda: seen.append(gc.isenabled()))], rounds=1, warmup=1, inner=1)
    assert seen == [False, False]
    assert gc.isenabled()

    def fail() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        compare([Case(name="fail", call=fail)], rounds=1)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_caller_that_has_switched_the_collector_off_finds_it_off() -> None:
    """The timer restores the collector's previous state, not its default."""
    gc.disable()
    try:
        compare([Case(name="nothing", call=lambda: None)], rounds=1, inner=1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_frozen_objects_of_the_caller_stay_frozen() -> None:
    """Whoever froze objects before finds them frozen."""
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        compare([Case(name="nothing", call=lambda: None)], rounds=1, inner=1)
        # other threads may let go of some meanwhile; unfreezing would leave none
        assert 0 < gc.get_freeze_count() <= frozen
    finally:
        gc.unfreeze()


def _measured(**ns: tuple[float, ...]) -> Comparison:
    return Comparison(
        samples=tuple(Samples(name=name, inner=1, ns=values) for name, values in ns.items()), device="cpu"
    )


def test_statistics_of_samples() -> None:
    """Median, minimum and percentiles are computed from the samples."""
    samples = Samples(name="x", inner=1, ns=(5.0, 1.0, 3.0, 2.0, 4.0))
    assert (samples.median_ns, samples.min_ns, samples.p10_ns, samples.p90_ns, samples.n) == (3.0, 1.0, 1.4, 4.6, 5)


def test_ratios_are_formed_within_a_round() -> None:
    """If a machine gets slower from round to round, the ratio is still the ratio within each round."""
    result = _measured(a=(1.0, 10.0, 100.0), b=(2.0, 20.0, 200.0))
    assert Paired(median=0.5, p10=0.5, p90=0.5, n=3) == result.ratio("a", "b")
    assert result.difference("a", "b").median == -10.0


def test_a_ratio_is_the_median_of_the_rounds_ratios() -> None:
    """The ratio of the medians would be 3 here; the rounds say 1, 1 and 9."""
    result = _measured(a=(1.0, 3.0, 9.0), b=(1.0, 3.0, 1.0))
    assert result.ratio("a", "b").median == 1.0


def test_overhead_ratios_subtract_the_baseline_first() -> None:
    """12 over 10 against 14 over 10 is half the overhead."""
    result = _measured(eager=(10.0, 10.0), ours=(12.0, 12.0), theirs=(14.0, 14.0))
    assert result.overhead_ratio("ours", "theirs", "eager").median == 0.5


def test_there_is_no_overhead_ratio_without_an_overhead() -> None:
    """Where the other is as fast as the baseline there is nothing to divide by."""
    result = _measured(eager=(10.0, 10.0), ours=(12.0, 12.0), theirs=(10.0, 9.0))
    median = result.overhead_ratio("ours", "theirs", "eager").median
    assert median != median


def test_a_missing_case_is_named() -> None:
    """A request for a case that was not timed raises an error that lists the timed cases."""
    with pytest.raises(KeyError, match="only a, b"):
        _measured(a=(1.0,), b=(1.0,))["c"]


@pytest.mark.parametrize(
    ("cases", "arguments", "message"),
    [
        ([], {}, "nothing to time"),
        ([Case(name="a", call=int)], {"rounds": 0}, "nothing to time"),
        ([Case(name="a", call=int), Case(name="a", call=int)], {}, "the same name"),
        ([Case(name="a", call=int)], {"again": "b"}, "not one of the cases a"),
    ],
)
def test_malformed_comparisons_are_refused(cases: list[Case], arguments: dict[str, object], message: str) -> None:
    """A case that cannot be timed is an error before anything runs."""
    with pytest.raises(UsageError, match=message):
        compare(cases, **arguments)  # type: ignore[arg-type]


def test_a_case_is_called_or_prepared() -> None:
    """A case with both or neither is an error."""
    with pytest.raises(UsageError, match="exactly one of call, prepare"):
        Case(name="neither")
    with pytest.raises(UsageError, match="exactly one of call, prepare"):
        Case(name="both", call=int, prepare=lambda: int)


def test_forward_and_backward_add_up_to_the_step(clock: Clock) -> None:
    """All three come from the same calls. Freeing the forward's graph counts once, for the backward."""

    class Kept:
        def __del__(self) -> None:
            clock.sleep(4)

    class Timed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            clock.sleep(200)
            ctx.kept = Kept()
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            clock.sleep(next(costs))
            return grads[0] * 2

    # Not one backward takes as long as another, in whichever phase it would be timed again.
    costs = itertools.count(30, 10)
    leaf = torch.ones(2, requires_grad=True)
    found = compare([training_case("timed", partial(Timed.apply, leaf), [leaf])], rounds=2, warmup=1, inner=1)
    assert found["timed forward"].ns == (200.0, 200.0)
    assert found["timed backward"].ns == (44.0, 54.0)
    assert found["timed"].ns == (244.0, 254.0)
    assert leaf.grad is None


def test_a_backward_needs_an_output_that_requires_grad() -> None:
    """Asking for the backward of a function without one is an error that names the case."""
    with pytest.raises(UsageError, match="flat: no output requires grad"):
        compare([training_case("flat", lambda: torch.ones(2), [])], rounds=1)


def test_outputs_without_gradient_are_left_out_of_the_backward() -> None:
    """Of several nested outputs, only those that require grad are differentiated."""
    leaf = torch.ones(2, requires_grad=True)
    gradients: list[list[float]] = []
    leaf.register_hook(lambda gradient: gradients.append(gradient.tolist()))
    compare(
        [training_case("mixed", lambda: {"a": leaf.detach(), "b": [leaf * 3, None]}, [leaf])],
        rounds=1,
        warmup=0,
        inner=1,
    )
    assert gradients == [[3.0, 3.0]]


@pytest.mark.parametrize(
    ("ratio", "again", "expected"),
    [
        ((1.2, 1.3, 1.4), 1.0, ""),
        ((0.6, 0.7, 0.8), 0.96, ""),
        ((0.9, 1.3, 1.4), 1.0, "sometimes one was faster, sometimes the other"),
        ((1.2, 1.3, 1.4), 1.5, "the same code, timed twice, differed by 50%"),
        ((1.05, 1.1, 1.2), 0.9, "the same code, timed twice, differed by 10%"),
        ((0.13, 0.18, 0.27), 1.1, ""),  # far more than the noise
    ],
)
def test_noise_is_recognized(ratio: tuple[float, ...], again: float, expected: str) -> None:
    """A ratio is doubted if its spread or the A/A ratio says so."""
    assert doubt(Paired.of(ratio), Paired.of([again])) == expected


def _timed(rounds: int) -> Comparison:
    """Make a comparison of a training step; each round takes one unit less than the one before."""
    units = range(8 + rounds, 8, -1)
    unit_ns = {
        "eager": 3.0,
        "eager forward": 1.0,
        "eager backward": 2.0,
        "upstream": 1.5,
        "upstream forward": 0.5,
        "upstream backward": 1.0,
        "aotlab": 6.0,
        "aotlab forward": 2.0,
        "aotlab backward": 4.0,
        "aotlab (again)": 6.0,
        "aotlab (again) forward": 2.0,
        "aotlab (again) backward": 8.0,
    }
    samples = {name: tuple([ns * unit for unit in units]) for name, ns in unit_ns.items()}
    return replace(_measured(**samples), again="aotlab")


def test_rows_hold_the_ratios_of_each_phase() -> None:
    """Ratios to eager and stock are computed within rounds. The noise of the same phase precedes them."""
    rows = _timed(5).rows(frame="f", graph=1)
    assert [(row.phase, row.engine) for row in rows] == [
        (phase, engine) for phase in ("forward", "backward", "total") for engine in ("eager", "upstream", "aotlab")
    ]
    assert {(row.frame, row.graph, row.device) for row in rows} == {("f", 1, "cpu")}
    ours = {row.phase: row for row in rows if row.engine == "aotlab"}
    assert {phase: (row.median_ns, row.again) for phase, row in ours.items()} == {
        "forward": (22, 1.0),
        "backward": (44, 2.0),
        "total": (66, 1.0),
    }
    assert ours["total"].ratios == (
        Ratio(over="eager", median=2.0, p10=2.0, p90=2.0),
        Ratio(over="upstream", median=4.0, p10=4.0, p90=4.0),
    )
    assert [bool(row.noise) for row in ours.values()] == [False, True, False]
    assert [len(row.ratios) for row in rows[:3]] == [0, 1, 2]
    assert str(ours["backward"].ratios[0]) == "noise: 2.00× eager (2.00–2.00)"
    assert {row.incomparable for row in rows} == {""}


@pytest.mark.parametrize(("rounds", "words"), [(1, "1 round"), (4, "4 rounds")])
def test_few_rounds_give_no_ratio(rounds: int, words: str) -> None:
    """After fewer than five rounds the rows have medians and no ratio, and say after how many rounds."""
    rows = _timed(rounds).rows()
    assert {(row.ratios, row.again) for row in rows} == {((), 0.0)}
    assert [row.incomparable for row in rows] == 3 * ["", f"not comparable: {words}", f"not comparable: {words}"]
    assert all(row.median_ns > 0 for row in rows)


def test_a_measurement_ends_when_the_ratios_are_known() -> None:
    """It ends after the fewest rounds if any accuracy suffices, at its budget, or after all rounds; and says which."""
    cases = [Case(name=name, call=lambda: None) for name in ("eager", "aotlab")]
    several = {"warmup": 0, "inner": 1}
    assert compare(cases, rounds=20, spread=1e9, **several).ended == (
        "8 rounds, until the ratios varied by at most 100000000000%"
    )
    assert compare(cases, rounds=12, spread=0.0, **several).ended == "12 rounds"
    limited = compare(cases, rounds=1000, spread=0.0, limit_ns=1, fewest=5, **several)
    assert limited.ended == "6 rounds, until the budget of 1 ns was spent"
    assert limited["eager"].n == 6


def test_spread_of_a_median() -> None:
    """The spread is half of the 95 % confidence interval. Outliers outside of the interval do not change it."""
    values = [*[1.0] * 4, *[2.0] * 12, *[100.0] * 4]
    assert Paired.spread(values) == 0.0
    assert Paired.spread([1.0, 2.0, 3.0]) == 0.5
    assert Paired.spread([0.9, 1.0] * 50) == pytest.approx(0.05 / 0.95)


def test_one_engine_alone_is_not_said_to_be_incomparable() -> None:
    """Where nothing was timed beside an engine, few rounds are no reason for a missing ratio."""
    (row,) = _measured(**{"aotlab": (1.0,), "aotlab forward": (1.0,)}).rows()
    assert row.incomparable == ""


def test_tensors_are_found_in_containers() -> None:
    """Tuples, lists and dicts are searched in order. Other objects are not searched."""
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    found = tensors_in((a, {"x": [b, 3], "y": None}, "text", c))
    assert [id(a), id(b), id(c)] == [id(tensor) for tensor in found]


@pytest.mark.gpu
def test_the_clock_waits_for_the_device() -> None:
    """On cuda a sample lasts until the device has finished, not until the kernels were launched."""
    x = torch.randn(8192, 8192, device="cuda")
    result = compare([Case(name="matmul", call=lambda: x @ x)], rounds=3, inner=2, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    x @ x
    end.record()
    end.synchronize()
    assert result["matmul"].median_ns > 0.5 * begin.elapsed_time(end) * 1e6
