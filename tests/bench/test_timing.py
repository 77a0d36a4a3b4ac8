"""The paired timer: orders, units, what is timed and what is not."""

from __future__ import annotations

import gc
import time
from functools import partial

import pytest
import torch

from aotlab.bench.timing import Call, Case, Comparison, Paired, Samples, compare, tensors_in, training_cases
from aotlab.errors import UsageError


class Clock:
    """A clock that stands still unless a case moves it, so that no test depends on the machine."""

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


def test_a_hiccup_does_not_decide_how_many_calls_make_a_sample(clock: Clock) -> None:
    """One slow trial of a fast call is tried again before the call is taken for a slow one."""
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
    """What ``prepare`` does stays out of the sample, and every call gets a preparation of its own."""
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
    """The timer restores what it found, not what is usual."""
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
    """Median, minimum and percentiles are those of the samples."""
    samples = Samples(name="x", inner=1, ns=(5.0, 1.0, 3.0, 2.0, 4.0))
    assert (samples.median_ns, samples.min_ns, samples.p10_ns, samples.p90_ns, samples.n) == (3.0, 1.0, 1.4, 4.6, 5)


def test_ratios_are_formed_within_a_round() -> None:
    """On a machine that gets slower from round to round the ratio stays what it is in every round."""
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
    """Asking for what was not timed says what was."""
    with pytest.raises(KeyError, match="only a, b"):
        _measured(a=(1.0,), b=(1.0,))["c"]


@pytest.mark.parametrize(
    ("cases", "arguments", "message"),
    [
        ([], {}, "nothing to time"),
        ([Case(name="a", call=int)], {"rounds": 0}, "nothing to time"),
        ([Case(name="a", call=int), Case(name="a", call=int)], {}, "one name"),
        ([Case(name="a", call=int)], {"again": "b"}, "none of the cases a"),
    ],
)
def test_malformed_comparisons_are_refused(cases: list[Case], arguments: dict[str, object], message: str) -> None:
    """What cannot be timed is an error before anything runs."""
    with pytest.raises(UsageError, match=message):
        compare(cases, **arguments)  # type: ignore[arg-type]


def test_a_case_is_called_or_prepared() -> None:
    """A case with both or neither is an error."""
    with pytest.raises(UsageError, match="either call or prepare"):
        Case(name="neither")
    with pytest.raises(UsageError, match="either call or prepare"):
        Case(name="both", call=int, prepare=lambda: int)


def test_backward_is_timed_apart_from_forward(clock: Clock) -> None:
    """The forward's time shows in the forward's case only, the backward's in the backward's only."""

    class Timed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            clock.sleep(200)
            return x * 2

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            clock.sleep(30)
            return grads[0] * 2

    leaf = torch.ones(2, requires_grad=True)
    ahead, back = training_cases("timed", partial(Timed.apply, leaf), [leaf])
    assert compare([ahead], rounds=2, inner=2)["timed"].ns == (200.0, 200.0)
    assert compare([back], rounds=2, inner=2)["timed"].ns == (30.0, 30.0)
    assert leaf.grad is None


def test_a_backward_needs_an_output_that_requires_grad() -> None:
    """Asking for the backward of a function without one is an error that names the case."""
    _, back = training_cases("flat", lambda: torch.ones(2), [])
    with pytest.raises(UsageError, match="flat: no output requires grad"):
        compare([back], rounds=1)


def test_outputs_without_gradient_are_left_out_of_the_backward() -> None:
    """Of several outputs, nested, those that require grad are differentiated."""
    leaf = torch.ones(2, requires_grad=True)
    _, back = training_cases("mixed", lambda: {"a": leaf.detach(), "b": [leaf * 3, None]}, [leaf])
    assert back.prepare is not None
    (gradient,) = tensors_in(back.prepare()())
    assert gradient.tolist() == [3.0, 3.0]


def test_tensors_are_found_in_containers() -> None:
    """Tuples, lists and dicts are searched in order; everything else holds no tensors."""
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
