"""Time several callables against each other in one run.

Two timings made one after the other differ by whatever the machine did in between. Here every case is timed
once per round, and the order turns round from round to round (A B C, then C B A), so that a drift of the
machine falls on all of them alike. What is compared is compared within a round: `Comparison.ratio` is the
median of the rounds' ratios, not the ratio of two medians. One case may be timed a second time under another
name (``again``); that ratio, which ought to be 1, says how far the others can be trusted.

    cases = [Case(name="eager", call=lambda: f(x)), Case(name="aotlab", call=lambda: g(x))]
    compare(cases, again="eager").ratio("aotlab", "eager").median

A case that needs something fresh for every call gives ``prepare`` in place of ``call``: what it does is not timed,
what it returns is. One that consists of several parts, as a training step does of forward and backward, gives
``parts``: the parts are timed one after another within the same calls, and the whole is their sum, so that they add
up. All times are in nanoseconds per call.
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

Call = Callable[[], object]
Parts = Iterator[tuple[str, Call]]

#: A ratio says something where it differs from 1 so many times as much as the same code, timed twice, from itself.
CLEAR = 2.0

#: Prepared calls are kept alive until their sample is over; more than this many at a time would measure memory.
_MOST_PREPARED = 1000

_AGAIN = " (again)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to time: a ``call`` that can be repeated, ``prepare``, which returns a fresh one untimed, or ``parts``.

    The latter yields the parts of a call, each by name, in order; what it does between them is not timed. The samples
    of a part bear the name of the case, a space, and its own; those of the case are the sums.

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
            raise UsageError(f"case {self.name!r} needs either call or prepare or parts, and no two of them")

    def calls(self, count: int) -> Iterable[Call]:
        """Make ``count`` calls ready to be timed."""
        if self.call is not None:
            return itertools.repeat(self.call, count)
        assert self.prepare is not None
        return [self.prepare() for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The times of one case or part: ``ns`` per call, one sample per round in order.

    Each is the mean of ``inner`` calls, or their median where the calls were timed one by one, in parts.
    """

    name: str
    inner: int
    ns: tuple[float, ...]

    @property
    def n(self) -> int:
        """How many samples there are."""
        return len(self.ns)

    @property
    def median_ns(self) -> float:
        """The median time per call."""
        return float(np.median(self.ns))

    @property
    def min_ns(self) -> float:
        """The shortest time per call."""
        return min(self.ns)

    @property
    def p10_ns(self) -> float:
        """The time per call that a tenth of the samples stay under."""
        return float(np.percentile(self.ns, 10))

    @property
    def p90_ns(self) -> float:
        """The time per call that nine tenths of the samples stay under."""
        return float(np.percentile(self.ns, 90))


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """A quantity computed round by round: its ``median``, tenth and ninetieth percentile over ``n`` rounds."""

    median: float
    p10: float
    p90: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Paired:
        """Summarize one value per round."""
        low, middle, high = np.percentile(values, (10, 50, 90))
        return cls(median=float(middle), p10=float(low), p90=float(high), n=len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `compare` measured: ``samples`` per case, on which ``device``, and which case ran twice (``again``)."""

    samples: tuple[Samples, ...]
    device: str
    again: str | None = None

    def __getitem__(self, name: str) -> Samples:
        for samples in self.samples:
            if samples.name == name:
                return samples
        raise KeyError(f"no case {name!r} was timed, only {', '.join(s.name for s in self.samples)}")

    def ratio(self, name: str, baseline: str) -> Paired:
        """Divide ``name``'s time by ``baseline``'s, round by round."""
        return Paired.of([a / b for a, b in zip(self[name].ns, self[baseline].ns, strict=True)])

    def difference(self, name: str, baseline: str) -> Paired:
        """Subtract ``baseline``'s time from ``name``'s, round by round, in ns."""
        return Paired.of([a - b for a, b in zip(self[name].ns, self[baseline].ns, strict=True)])

    def overhead_ratio(self, name: str, other: str, baseline: str) -> Paired:
        """Divide what ``name`` takes more than ``baseline`` by what ``other`` takes more, round by round.

        The result is NaN where ``other`` is not slower than the baseline in most rounds: there is nothing to
        divide by then.
        """
        above = [other_ns - base_ns for other_ns, base_ns in zip(self[other].ns, self[baseline].ns, strict=True)]
        if float(np.median(above)) <= 0:
            return Paired(median=float("nan"), p10=float("nan"), p90=float("nan"), n=len(above))
        ours = [name_ns - base_ns for name_ns, base_ns in zip(self[name].ns, self[baseline].ns, strict=True)]
        return Paired.of([a / b if b else float("inf") for a, b in zip(ours, above, strict=True)])

    @property
    def noise(self) -> Paired | None:
        """The A/A ratio: the second timing of the case ``again`` over its first; None if no case ran twice."""
        return self._noise_of("")

    def _noise_of(self, part: str) -> Paired | None:
        return None if self.again is None else self.ratio(self.again + _AGAIN + part, self.again + part)

    def rows(self, *, frame: str | None = None, graph: int | None = None) -> list[TimingRow]:
        """Make a report's rows of cases that are engines, with the parts ``forward`` and, in training, ``backward``.

        Each row but eager's has its ratio to eager's time and that of stock ``torch.compile``, where they were timed.
        """
        names = [samples.name for samples in self.samples]
        engines = [name for name in ("eager", "upstream", "aotlab") if name in names]
        parts = {"forward": " forward", "backward": " backward", "total": ""}
        phases = parts if f"{engines[0]} backward" in names else ("forward",)
        return [self._row(engine, phase, parts[phase], frame, graph) for phase in phases for engine in engines]

    def _row(self, engine: str, phase: str, part: str, frame: str | None, graph: int | None) -> TimingRow:
        names = [samples.name for samples in self.samples]
        samples, again = self[engine + part], self._noise_of(part)
        ratios = []
        for other in ("eager", "upstream"):
            if other in names and engine not in ("eager", other):
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
        )

    @property
    def again_name(self) -> str | None:
        """The name under which the case ``again`` was timed a second time."""
        return None if self.again is None else self.again + _AGAIN


def compare(
    cases: Sequence[Case],
    *,
    rounds: int = 30,
    warmup: int = 3,
    sample_ns: int = 5_000_000,
    inner: int | None = None,
    limit_ns: int | None = None,
    device: str | torch.device = "cpu",
    again: str | None = None,
) -> Comparison:
    """Time ``cases`` in turns.

    Parameters
    ----------
    cases
        What to time, with different names.
    rounds
        How many samples each case gets.
    warmup
        How often each case is called before anything is measured.
    sample_ns
        How long a sample should last at least; a case that is faster is called several times per sample.
    inner
        How many calls make a sample, in place of the number that ``sample_ns`` asks for and trial calls find.
    limit_ns
        After this long no further pair of rounds (there and back) begins, however many are left.
    device
        Where the work is done. On cuda the clock is read only when the device has finished, before and after a sample.
    again
        The name of a case to be timed twice, for an A/A ratio.

    Raises
    ------
    UsageError
        No cases, fewer than one round, two cases of one name, or ``again`` is no case.

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
        raise UsageError(f"two cases bear one name: {', '.join(names)}")
    if again is not None and again not in names:
        raise UsageError(f"again={again!r} is none of the cases {', '.join(names)}")
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
            # The same case measured the same way, or the A/A ratio would show the lengths of the loops.
            lengths.append(lengths[names.index(again)])
        with _what_exists_frozen():
            begin = time.perf_counter_ns()
            for turn in range(rounds):
                if limit_ns is not None and turn and turn % 2 == 0 and time.perf_counter_ns() - begin > limit_ns:
                    break
                order = range(len(line_up)) if turn % 2 == 0 else reversed(range(len(line_up)))
                for index in order:
                    gc.collect()
                    for name, ns in _sample(line_up[index], lengths[index], wait).items():
                        times.setdefault(name, (lengths[index], []))[1].append(ns)
    samples = tuple(Samples(name=name, inner=count, ns=tuple(ns)) for name, (count, ns) in times.items())
    return Comparison(samples=samples, device=str(device), again=again)


def doubt(ratio: Paired, again: Paired | None) -> str:
    """Say why a ratio may be noise, by the A/A ratio ``again`` and its own spread; an empty text if neither says so."""
    if ratio.n < 2:
        return "it was timed only once"
    if ratio.p10 <= 1 <= ratio.p90:
        return "the faster one changed from round to round"
    if again is not None and abs(again.median - 1) > QUIET:
        # As factors: twice as fast is as far from 1 as twice as slow.
        ours, own = (abs(math.log(each.median)) if each.median > 0 else math.inf for each in (ratio, again))
        if ours < CLEAR * own:
            return f"the same code, timed twice, differed by {abs(again.median - 1):.0%}"
    return ""


def training_case(name: str, forward: Call, leaves: Sequence[torch.Tensor]) -> Case:
    """Make the case of a training step, with its parts ``"forward"`` and ``"backward"``; see `training_parts`.

    The backward starts from every output that requires grad.

    Raises
    ------
    UsageError
        When the backward is prepared: no output requires grad.
    """

    def roots(result: object) -> list[torch.Tensor]:
        found = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        if not found:
            raise UsageError(f"{name}: no output requires grad, so there is no backward to time")
        return found

    return Case(name=name, parts=lambda: training_parts(forward, roots, leaves))


def training_parts(
    forward: Call, roots_of: Callable[[object], Sequence[torch.Tensor]], leaves: Sequence[torch.Tensor]
) -> Parts:
    """Yield a forward and the backward from ``roots_of`` its result, by tangents of ones, which are not timed.

    Gradients are taken with respect to ``leaves`` and dropped, so that no call adds to what an earlier one left in
    ``.grad``. What the forward has kept is let go of within the backward, as in a training step.
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
    """Collect the tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return tuple(tensor for item in value for tensor in tensors_in(item))
    return ()


def _sample(case: Case, inner: int, wait: Callable[[], None]) -> dict[str, float]:
    """Return how long one of ``inner`` calls takes, and each of its parts, by name."""
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
    """Choose how many calls make a sample of at least ``sample_ns``, from growing trials."""
    most = 10_000_000 if case.call is not None else _MOST_PREPARED
    count = 1
    while True:
        took = max(count * _sample(case, count, wait)[case.name], 1)
        if took >= sample_ns:
            # Once more: a hiccup of the machine would leave a fast case with samples of one call.
            took = max(min(took, count * _sample(case, count, wait)[case.name]), 1)
        if took >= sample_ns or count >= most:
            return count
        # Up to ten times more at a step: the first trial of a fast call is mostly the clock.
        count = min(most, max(count + 1, min(10 * count, int(1.2 * count * sample_ns / took))))


def _waiter(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return partial(torch.cuda.synchronize, device)
    return lambda: None


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keep the garbage collector from starting by itself, which it would do within samples."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _what_exists_frozen() -> Iterator[None]:
    """Let collections look only at objects made from now on.

    One that looks at everything that torch has loaded and compiled takes longer than most samples. If the caller has
    frozen objects of his own nothing is done, because unfreezing knows no difference.
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
