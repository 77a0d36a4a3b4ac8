"""Time several callables against each other in one run.

If two functions are timed one after the other, the load and the clock rate of the machine may differ between the two
timings. Here every case is timed once per round, and the order alternates between rounds (A B C, then C B A), so that a
drift of the machine affects all cases equally. Cases are compared within a round: `Comparison.ratio` is the median of
the rounds' ratios, not the ratio of two medians. One case can be timed a second time under another name (``again``).
The ratio of its two timings should be 1. The difference of this ratio from 1 shows how large the noise of the other
ratios is.

    cases = [Case(name="eager", call=lambda: f(x)), Case(name="aotlab", call=lambda: g(x))]
    compare(cases, again="eager").ratio("aotlab", "eager").median

A case that needs new arguments for every call has ``prepare`` instead of ``call``. ``prepare`` itself is not timed, but
the callable that it returns is timed. A case that consists of several parts, for example the forward and the backward
of a training step, has ``parts``. In each call, the parts are timed one after another, and the time of the call is the
sum of the parts' times. All times are in nanoseconds per call.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from aotlab.errors import UsageError
from aotlab.report.model import QUIET, Ratio, TimingRow
from aotlab.report.text import amount, duration

Call = Callable[[], object]
Parts = Iterator[tuple[str, Call]]

#: A ratio is significant if it differs from 1 by at least this many times the difference of the A/A ratio (of two
#: timings of the same code) from 1.
CLEAR = 2.0

#: A report shows a ratio only after this many rounds. The median and the range of fewer rounds depend on chance.
FEWEST_ROUNDS = 5

#: A measurement with a limit for the spread has at least this many rounds: the fewest from which the 95 % confidence
#: interval of a median does not reach from the smallest to the largest value.
_FEWEST_FOR_SPREAD = 8

#: The largest number of prepared calls in a sample. They and their arguments stay alive until the end of the sample, so
#: a sample with more of them would measure the allocation of memory.
_MOST_PREPARED = 1000

#: The second timing of a case has the name of the case with this ending.
_AGAIN = " (again)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One function, or sequence of functions, to time. It has exactly one of ``call``, ``prepare`` and ``parts``.

    ``call`` is called repeatedly. ``prepare`` returns a new callable for each call, and only this callable is timed.
    ``parts`` returns an iterator over the parts of one call, each with its name, for example ``"forward"``. The time
    between the parts is not measured. The samples of a part are named after the case and the part, separated by a
    space. The samples of the case are the sums over its parts.

    Raises
    ------
    UsageError
        Not exactly one of ``call``, ``prepare`` and ``parts`` is given.
    """

    name: str
    call: Call | None = None
    prepare: Callable[[], Call] | None = None
    parts: Callable[[], Parts] | None = None

    def __post_init__(self) -> None:
        if (self.call, self.prepare, self.parts).count(None) != 2:
            raise UsageError(f"case {self.name!r} needs exactly one of call, prepare and parts")

    def calls(self, count: int) -> Iterable[Call]:
        """Return ``count`` callables to time, for a case with ``call`` or ``prepare``."""
        if self.call is not None:
            return itertools.repeat(self.call, count)
        assert self.prepare is not None
        return [self.prepare() for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The times of one case, or of one part of a case. ``ns`` has one sample per round: the time of a call in ns.

    Each sample is the mean time of ``inner`` calls. If the case has parts, the calls are timed one by one, and the
    sample is the median of their times.
    """

    name: str
    inner: int
    ns: tuple[float, ...]

    @property
    def n(self) -> int:
        """The number of samples."""
        return len(self.ns)

    @property
    def median_ns(self) -> float:
        """The median of the samples."""
        return float(np.median(self.ns))

    @property
    def min_ns(self) -> float:
        """The smallest sample."""
        return min(self.ns)

    @property
    def p10_ns(self) -> float:
        """The tenth percentile of the samples."""
        return float(np.percentile(self.ns, 10))

    @property
    def p90_ns(self) -> float:
        """The ninetieth percentile of the samples."""
        return float(np.percentile(self.ns, 90))


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """Statistics over ``n`` rounds of a quantity that is computed in each round, for example a ratio of two times."""

    median: float
    p10: float
    p90: float
    n: int

    @staticmethod
    def spread(values: Sequence[float]) -> float:
        """Return half of the width of the median's 95 % confidence interval, divided by the median.

        The interval lies between two order statistics (the sign test), so it needs no assumption about the values.
        """
        ordered, count = sorted(values), len(values)
        reach = 0.98 * math.sqrt(count)
        low, high = max(math.floor(count / 2 - reach), 0), min(math.ceil(count / 2 + reach), count - 1)
        return (ordered[high] - ordered[low]) / 2 / abs(float(np.median(ordered)))

    @classmethod
    def of(cls, values: Sequence[float]) -> Paired:
        """Compute the statistics of ``values``, which has one value per round."""
        low, middle, high = np.percentile(values, (10, 50, 90))
        return cls(median=float(middle), p10=float(low), p90=float(high), n=len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of `compare`: the ``samples`` of each case, and the ``device``.

    ``again`` is the name of the case that was timed twice; None if there was no such case. ``ended`` says why the
    measurement ended, in words: ``"24 rounds, until the ratios varied by at most 2%"``.
    """

    samples: tuple[Samples, ...]
    device: str
    again: str | None = None
    ended: str = ""

    def __getitem__(self, name: str) -> Samples:
        for samples in self.samples:
            if samples.name == name:
                return samples
        raise KeyError(f"no case {name!r} was timed, only {', '.join(s.name for s in self.samples)}")

    def ratio(self, name: str, baseline: str) -> Paired:
        """Divide the time of the case ``name`` by the time of the case ``baseline``, round by round."""
        return Paired.of([a / b for a, b in zip(self[name].ns, self[baseline].ns, strict=True)])

    def difference(self, name: str, baseline: str) -> Paired:
        """Subtract the time of the case ``baseline`` from the time of the case ``name``, round by round, in ns."""
        return Paired.of([a - b for a, b in zip(self[name].ns, self[baseline].ns, strict=True)])

    def overhead_ratio(self, name: str, other: str, baseline: str) -> Paired:
        """Divide the overhead of the case ``name`` by the overhead of the case ``other``, round by round.

        The overhead of a case is its time minus the time of the case ``baseline``. The result is NaN if the median
        overhead of ``other`` is not positive, because it is the divisor.
        """
        above = [other_ns - base_ns for other_ns, base_ns in zip(self[other].ns, self[baseline].ns, strict=True)]
        if float(np.median(above)) <= 0:
            return Paired(median=float("nan"), p10=float("nan"), p90=float("nan"), n=len(above))
        ours = [name_ns - base_ns for name_ns, base_ns in zip(self[name].ns, self[baseline].ns, strict=True)]
        return Paired.of([a / b if b else float("inf") for a, b in zip(ours, above, strict=True)])

    @property
    def noise(self) -> Paired | None:
        """The A/A ratio: the second timing of the case ``again``, divided by its first timing.

        None if no case was timed twice.
        """
        return self._noise_of("")

    def _noise_of(self, part: str) -> Paired | None:
        return None if self.again is None else self.ratio(self.again + _AGAIN + part, self.again + part)

    def rows(self, *, frame: str | None = None, graph: int | None = None) -> list[TimingRow]:
        """Return the rows of a report's table ``timings``, one per engine and phase.

        The engines are the cases with the names ``eager``, ``upstream``, ``before`` and ``aotlab``. The
        phases are the part ``forward`` and, if the cases have a part ``backward``, also ``backward`` and ``total``.
        Each row except eager's row contains the ratios to the times of eager and of stock ``torch.compile``, if these
        were timed. After fewer than `FEWEST_ROUNDS` rounds, the rows have no ratios, and ``incomparable`` says why.
        ``frame`` and ``graph`` name the graph that was timed.
        """
        names = [samples.name for samples in self.samples]
        engines = [name for name in ("eager", "upstream", "before", "aotlab") if name in names]
        parts = {"forward": " forward", "backward": " backward", "total": ""}
        phases = parts if f"{engines[0]} backward" in names else ("forward",)
        return [self._row(engine, phase, parts[phase], frame, graph) for phase in phases for engine in engines]

    def _row(self, engine: str, phase: str, part: str, frame: str | None, graph: int | None) -> TimingRow:
        names = [samples.name for samples in self.samples]
        samples = self[engine + part]
        others = [each for each in ("eager", "upstream") if each in names and engine not in ("eager", each)]
        enough = samples.n >= FEWEST_ROUNDS
        again = self._noise_of(part) if enough else None
        ratios = []
        for other in others if enough else ():
            ratio = self.ratio(engine + part, other + part)
            low, middle, high = (round(each, 4) for each in (ratio.p10, ratio.median, ratio.p90))
            ratios.append(Ratio(over=other, median=middle, p10=low, p90=high, noise=doubt(ratio, again)))
        return TimingRow(
            engine=engine,
            phase=phase,
            median_ns=round(samples.median_ns),
            min_ns=round(samples.min_ns),
            p10_ns=round(samples.p10_ns),
            p90_ns=round(samples.p90_ns),
            repeats=samples.n * samples.inner,
            device=self.device,
            frame=frame,
            graph=graph,
            ratios=tuple(ratios),
            again=0.0 if again is None else round(again.median, 4),
            ended=self.ended,
            incomparable=f"not comparable: {amount(samples.n, 'round')}" if others and not enough else "",
        )

    @property
    def again_name(self) -> str | None:
        """The name of the samples of the second timing of the case ``again``; None if no case was timed twice."""
        return None if self.again is None else self.again + _AGAIN


def compare(
    cases: Sequence[Case],
    *,
    rounds: int = 30,
    warmup: int = 3,
    sample_ns: int = 5_000_000,
    inner: int | None = None,
    limit_ns: int | None = None,
    fewest: int = 1,
    spread: float | None = None,
    device: str | torch.device = "cpu",
    again: str | None = None,
) -> Comparison:
    """Time ``cases`` against each other: take one sample of each case per round, in alternating order.

    Parameters
    ----------
    cases
        The cases to time. Their names must differ.
    rounds
        The number of rounds, and thus of samples per case.
    warmup
        How often each case is called before the measurement.
    sample_ns
        The minimal duration of a sample, in ns. If a call is shorter, a sample has several calls.
    inner
        The number of calls per sample. If it is None, trial calls determine a number for each case, so that a sample
        takes about ``sample_ns``.
    limit_ns
        A time in ns after which no new pair of rounds begins (a pair has both orders of the cases); None for no limit.
    fewest
        The number of rounds that run even if they take longer than ``limit_ns``.
    spread
        If the ratio of each case (and of each of its parts) to the first case is known to this accuracy, no further
        pair of rounds begins; see `Paired.spread`. None to make all rounds.
    device
        The device on which the cases run. On CUDA, the clock is read only after the device has finished its work.
    again
        The name of a case to time twice, for an A/A ratio; None for no such case.

    Raises
    ------
    UsageError
        There is no case, ``rounds`` is less than one, two cases have the same name, or ``again`` is not the name of a
        case.

    Examples
    --------
    >>> result = compare([Case(name="sum", call=lambda: sum(range(100)))], rounds=2, sample_ns=1000)
    >>> result["sum"].n
    2
    """
    names = [case.name for case in cases]
    if not cases or rounds < 1:
        raise UsageError(f"there is nothing to time: {len(cases)} cases, {rounds} rounds")
    if len(set(names)) < len(names):
        raise UsageError(f"two cases have the same name: {', '.join(names)}")
    if again is not None and again not in names:
        raise UsageError(f"again={again!r} is not one of the cases {', '.join(names)}")
    line_up = list(cases)
    if again is not None:
        twice = cases[names.index(again)]
        line_up.append(replace(twice, name=again + _AGAIN))
    wait = _waiter(torch.device(device))
    times: dict[str, tuple[int, list[float]]] = {}
    with _collector_off():
        for case in line_up:
            if warmup:
                _sample(case, warmup, wait)
        lengths = [inner if inner is not None else _inner_calls(case, sample_ns, wait) for case in cases]
        if again is not None:
            # Both timings of the case must have equally many calls per sample. Otherwise the A/A ratio would also
            # contain the effect of the number of calls.
            lengths.append(lengths[names.index(again)])
        with _what_exists_frozen():
            begin, ended = time.perf_counter_ns(), amount(rounds, "round")
            for turn in range(rounds):
                late = limit_ns is not None and time.perf_counter_ns() - begin > limit_ns
                pair = turn % 2 == 0
                if late and turn >= fewest and pair:
                    ended = f"{amount(turn, 'round')}, until the budget of {duration(limit_ns)} was spent"
                    break
                if spread is not None and pair and turn >= _FEWEST_FOR_SPREAD and _widest(times, cases) <= spread:
                    ended = f"{amount(turn, 'round')}, until the ratios varied by at most {spread:.0%}"
                    break
                order = range(len(line_up)) if turn % 2 == 0 else reversed(range(len(line_up)))
                for index in order:
                    gc.collect()
                    for name, ns in _sample(line_up[index], lengths[index], wait).items():
                        times.setdefault(name, (lengths[index], []))[1].append(ns)
    samples = tuple(Samples(name=name, inner=count, ns=tuple(ns)) for name, (count, ns) in times.items())
    return Comparison(samples=samples, device=str(device), again=again, ended=ended)


def _widest(times: dict[str, tuple[int, list[float]]], cases: Sequence[Case]) -> float:
    """Return the largest spread of the ratios of cases, and of their parts, to the first case."""
    first, *others = [case.name for case in cases]
    parts = [name.removeprefix(first) for name in times if name == first or name.startswith(f"{first} ")]
    ratios = [
        [a / b for a, b in zip(times[other + part][1], times[first + part][1], strict=True)]
        for other in others
        for part in parts
    ]
    return max((Paired.spread(each) for each in ratios), default=0.0)


def doubt(ratio: Paired, again: Paired | None) -> str:
    """Return the reason why a ratio may be noise, as text, or an empty string if there is no reason.

    A ratio may be noise if its 10th percentile is at most 1 and its 90th percentile is at least 1. It may also be noise
    if the A/A ratio ``again`` differs from 1 by more than `QUIET`, and the difference of ``ratio`` from 1 is less than
    `CLEAR` times that difference.
    """
    if ratio.p10 <= 1 <= ratio.p90:
        return "sometimes one was faster, sometimes the other"
    if again is not None and abs(again.median - 1) > QUIET:
        # Compare logarithms, so that the ratios 0.5 and 2 differ from 1 by the same amount.
        ours, noise = (abs(math.log(each.median)) if each.median > 0 else math.inf for each in (ratio, again))
        if ours < CLEAR * noise:
            return f"the same code, timed twice, differed by {abs(again.median - 1):.0%}"
    return ""


def training_case(name: str, forward: Call, leaves: Sequence[torch.Tensor]) -> Case:
    """Return the case of a training step, with the parts ``"forward"`` and ``"backward"``; see `training_parts`.

    The backward starts from every output of ``forward()`` that requires grad.

    Raises
    ------
    UsageError
        No output requires grad. The error is raised when the case is timed.
    """

    def roots(result: object) -> list[torch.Tensor]:
        outputs = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        if not outputs:
            raise UsageError(f"{name}: no output requires grad, so there is no backward to time")
        return outputs

    return Case(name=name, parts=lambda: training_parts(forward, roots, leaves))


def training_parts(
    forward: Call, roots_of: Callable[[object], Sequence[torch.Tensor]], leaves: Sequence[torch.Tensor]
) -> Parts:
    """Yield the parts of a training step for `Case`: ``"forward"`` and ``"backward"``.

    ``roots_of`` is a function that takes the result of the forward and returns the tensors from which the backward
    starts. Their tangents are tensors of ones, which are made before the backward is timed. The gradients of
    ``leaves`` are computed but not stored, so that no call adds to ``.grad``. The values that the forward saved are
    freed during the backward, as in a training step.
    """
    results: list[object] = []
    yield "forward", lambda: results.append(forward())
    roots = list(roots_of(results.pop()))
    tangents = [torch.ones_like(root) for root in roots]

    def backward() -> None:
        torch.autograd.grad(roots, leaves, tangents, allow_unused=True)
        roots.clear()

    yield "backward", backward


def tensors_in(value: object) -> tuple[torch.Tensor, ...]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return tuple(tensor for item in value for tensor in tensors_in(item))
    return ()


def _sample(case: Case, inner: int, wait: Callable[[], None]) -> dict[str, float]:
    """Run ``inner`` calls of a case, and return the time of one call in ns, with the name of the case as its key.

    If the case has parts, return the time of each part too. ``wait`` is a function that waits until the device has
    finished its work.
    """
    if case.parts is not None:
        laps = [_laps(case.parts(), wait) for _ in range(inner)]
        of_parts = {f"{case.name} {part}": float(np.median([lap[part] for lap in laps])) for part in laps[0]}
        return {case.name: float(np.median([sum(lap.values()) for lap in laps])), **of_parts}
    calls = case.calls(inner)
    wait()
    begin = time.perf_counter_ns()
    for call in calls:
        call()
    wait()
    return {case.name: (time.perf_counter_ns() - begin) / inner}


def _laps(parts: Parts, wait: Callable[[], None]) -> dict[str, int]:
    laps = {}
    for name, call in parts:
        wait()
        begin = time.perf_counter_ns()
        call()
        wait()
        laps[name] = time.perf_counter_ns() - begin
    return laps


def _inner_calls(case: Case, sample_ns: int, wait: Callable[[], None]) -> int:
    """Return a number of calls that together take at least ``sample_ns``, found by trials with more and more calls.

    The number is limited, so the calls of a very fast case may take less time.
    """
    most = 10_000_000 if case.call is not None else _MOST_PREPARED
    count = 1
    while True:
        took = max(count * _sample(case, count, wait)[case.name], 1)
        if took >= sample_ns:
            # Try the same count again. If another process delayed the first trial of a fast case, this count would be
            # too small.
            took = max(min(took, count * _sample(case, count, wait)[case.name]), 1)
        if took >= sample_ns or count >= most:
            return count
        # Increase the count at most tenfold, because the first trial of a fast call mostly measures the clock.
        count = min(most, max(count + 1, min(10 * count, int(1.2 * count * sample_ns / took))))


def _waiter(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return partial(torch.cuda.synchronize, device)
    return lambda: None


@contextmanager
def _collector_off() -> Iterator[None]:
    """Disable automatic garbage collection for a block, so that no collection runs during a sample."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _what_exists_frozen() -> Iterator[None]:
    """For a block, make garbage collections examine only objects that are created in the block.

    A collection that examines everything that torch has loaded and compiled takes longer than most samples. If the
    caller has frozen objects already, this function does nothing, because `gc.unfreeze` would unfreeze these too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
