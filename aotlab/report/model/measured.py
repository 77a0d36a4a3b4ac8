"""Records of measurements and comparisons, and the summary of a report."""

from __future__ import annotations

from dataclasses import dataclass

from aotlab.report.model.graphs import Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """The time that one kind of work took.

    All rows add up to the recording's ``duration_ns``; in a report of stock `torch.compile`, to the wall time of the
    compilations.

    Attributes
    ----------
    kind
        The name of a stage, or ``"dynamo"`` (capture), ``"between"`` (guards, and the time between stages),
        ``"backward"`` (compiled after the forward), ``"header"`` (the header of Inductor's C++ kernels),
        ``"upstream"`` (compilation by stock `torch.compile`), ``"verification"``, ``"timing"``, ``"recording"`` (the
        report itself), ``"compiled"`` and ``"eager"`` (calls), or ``"rest"`` (Python and everything else).
    duration_ns
        The time of this work, without the time of other kinds of work inside of it, which have separate rows.
    count
        How often this work was done.
    engine
        The engine that did the work: ``"aotlab"``, or ``"upstream"`` for stock `torch.compile`.
    """

    kind: str
    duration_ns: int
    count: int = 1
    engine: str = "aotlab"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRow:
    """One activity on the time line: a stage, a phase of a compilation, a comparison with eager, a call.

    Attributes
    ----------
    process
        The rank of the process, or the name of its log; empty if the report is about one process. In the report of a
        cell, it is ``"stock torch.compile"`` for the phases that torch logged.
    frame, graph
        The graph's key in the report's tables; None if the phase belongs to no compilation.
    phase
        The activity, or torch's name for the phase.
    stage
        The ``kind`` of the `TimeRow` to which the phase's own time belongs; ``"kernel"`` for the compilation of one
        kernel, which has no `TimeRow`, because the compiling thread waits for it in another stage.
    start_ns, duration_ns
        When the phase began, counted from the begin of the recording, and how long it took. In a report that was read
        from logs, times count from the begin of the first phase.
    own_ns
        How long the phase took without the phases inside of it. It is 0 for the work of other threads, because the
        thread that compiles waits for them.
    thread
        0 for the thread that compiles; a higher number for work at the same time.
    depth
        The number of phases around this phase in its thread.
    engine
        The engine that compiled: ``"aotlab"``, or ``"upstream"`` for stock `torch.compile`.
    """

    process: str = ""
    frame: str | None = None
    graph: int | None = None
    phase: str
    stage: str = ""
    start_ns: int
    duration_ns: int
    own_ns: int = 0
    thread: int = 0
    depth: int = 0
    engine: str = "aotlab"


#: The A/A ratio compares two measurements of the same code, so its distance from 1 is noise. Texts about timings
#: mention the noise only if it is larger than this.
QUIET = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The time of one engine divided by the time of another engine, computed within each round of the measurement.

    Attributes
    ----------
    over
        The engine whose time is the divisor: ``"eager"`` or ``"upstream"``.
    median, p10, p90
        The median, the 10th percentile and the 90th percentile of the ratio over the rounds.
    noise
        Why the ratio may be only noise, in a few words; empty if neither the spread of the ratio nor the A/A ratio
        suggests noise.
    """

    over: str
    median: float
    p10: float
    p90: float
    noise: str = ""

    def __str__(self) -> str:
        """Write the ratio, with the word "noise" before it if it may be only noise."""
        other = "torch.compile" if self.over == "upstream" else self.over
        return f"{'noise: ' if self.noise else ''}{self.median:.2f}× {other} ({self.p10:.2f}–{self.p90:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRow:
    """One measurement: the time of many calls of one phase with one engine.

    Attributes
    ----------
    engine
        ``"eager"``, ``"upstream"`` (stock ``torch.compile``) or ``"aotlab"``.
    phase
        ``"forward"``, ``"backward"`` or ``"total"``, the sum of both within each call.
    median_ns, min_ns, p10_ns, p90_ns
        The median, the minimum, the 10th and the 90th percentile of the time of one call, over the rounds.
    repeats
        The number of timed calls in all rounds.
    device
        The device that ran the calls.
    frame, graph
        The frame and the graph that were measured, if they are in this report.
    ratios
        How the time compares with eager, and with stock ``torch.compile``.
    again
        The A/A ratio: the time of a second measurement of the same code divided by the time of the first measurement; 0
        if there was no second measurement.
    incomparable
        Why the row has no ratios although other engines were timed too, in a few words; empty if it has ratios.
    ended
        The number of rounds and the reason why there were no more: ``"24 rounds, until the ratios varied by at most
        2%"``. Empty if it is not known.
    """

    engine: str
    phase: str
    median_ns: int
    min_ns: int
    p10_ns: int
    p90_ns: int
    repeats: int
    device: str = "cpu"
    frame: str | None = None
    graph: int | None = None
    ratios: tuple[Ratio, ...] = ()
    again: float = 0.0
    incomparable: str = ""
    ended: str = ""

    @property
    def comparisons(self) -> list[str]:
        """The ratios in words. If other engines were timed but there are no ratios, the reason for that."""
        return [str(each) for each in self.ratios] or [self.incomparable] * bool(self.incomparable)

    @property
    def noise(self) -> str:
        """Why some of the ratios may be only noise; empty if nothing suggests noise."""
        return "; ".join(dict.fromkeys(each.noise for each in self.ratios if each.noise))

    def noise_note(self, ratio: Ratio) -> str:
        """Write how far the A/A ratio is from 1: ``"12% noise"``.

        The text is empty if the A/A ratio is close to 1 or unknown, or if ``ratio`` is marked as noise already.
        """
        off = abs(self.again - 1) if self.again > 0 else 0.0
        return f"{off:.0%} noise" if off > QUIET and not ratio.noise else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRow:
    """One observable of one call, compared with eager.

    Attributes
    ----------
    engine
        ``"aotlab"`` or ``"upstream"``.
    kind
        The property that was compared: ``"value"``, ``"stride"``, ``"storage"``, ``"gradient"`` and so on.
    subject
        The name of the input or output that was compared.
    equal
        Whether eager and the engine agree, within the tolerance.
    expected, actual
        Eager's value and the engine's value, as short texts.
    sentence
        The difference in words; empty if eager and the engine agree.
    call
        The number of the call within the verification, counted from 1.
    frame, graph
        The frame and the graph that were compared, if they are in this report.
    against
        The code whose observable was the expected one: ``"python"`` (the user's own code, run eagerly) or ``"graph"``
        (the graph that Dynamo captured from the user's code, run eagerly); empty for a row that a caller added.
    tolerance
        For a row that compares tensor values: the tolerance rule in words.
    absolute, relative
        For a row that compares tensor values: the largest difference from eager, and this difference divided by the
        largest element of eager's value.
    """

    engine: str
    kind: str
    subject: str
    equal: bool
    expected: str = ""
    actual: str = ""
    sentence: str = ""
    call: int | None = None
    frame: str | None = None
    graph: int | None = None
    against: str = ""
    tolerance: str = ""
    absolute: float | None = None
    relative: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact about the user's tensors: one line of the page's head.

    Attributes
    ----------
    key
        The topic, for programs: ``"error"``, ``"interrupted"``, ``"limit"``, ``"mutated"``, ``"new"``, ``"aliases"``,
        ``"varies"``, ``"static"``, ``"unrolled"`` or ``"saved"``.
    title
        The topic, for readers.
    sentence
        The fact.
    """

    key: str
    title: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One fact about a graph that both engines compiled, in the words for each engine.

    Attributes
    ----------
    frame, graph
        The frame and the index of aotlab's graph. The index is None if the fact is about the whole frame.
    fact
        ``"graph"``, ``"graphs"``, ``"mutation"``, ``"output"``, ``"saved"``, ``"size"``, ``"guards"``,
        ``"recompile"`` or ``"time"``.
    subject
        The input, output, value or number that the fact is about.
    aotlab, upstream
        The fact for each engine; ``upstream`` is stock `torch.compile`.
    same
        Whether the engines agree; None if the facts cannot be compared, such as times.
    """

    frame: str
    graph: int | None = None
    fact: str
    subject: str
    aotlab: str
    upstream: str
    same: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One fact about two runs, in the words for each run.

    Attributes
    ----------
    frame, graph
        The frame and the index of the graph in the later run, or in the earlier run if only that run has it. They are
        None if the fact is about the whole run.
    fact
        ``"run"`` (versions, devices, verdict), ``"code"`` (a line of the cell), ``"graph"``, ``"node"``,
        ``"mutation"``, ``"output"``, ``"saved"``, ``"kernel"``, ``"guard"`` or ``"time"``.
    part
        For a node, the graph that contains it: ``"forward graph"``, ``"backward graph"`` or ``"inference graph"``. For
        a time, the phase.
    subject
        The name of the thing that the fact is about.
    before, after
        The fact for the earlier and for the later run; empty if a run does not have the thing.
    same
        Whether the runs agree; None if the facts cannot be compared.
    change
        The difference in a few words: ``"added"``, ``"other shape"``, ``"-1.5 MB"``, ``"1.4× faster"``. For times that
        cannot be compared, the reason.
    """

    frame: str | None = None
    graph: int | None = None
    fact: str
    part: str = ""
    subject: str
    before: str
    after: str
    same: bool | None = None
    change: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One difference between two ranks. A rank is the number of a process of a distributed job.

    Attributes
    ----------
    rank, reference
        The rank that differs, and the rank that it is compared with, which did as most ranks did. They are equal if
        the rank is compared with none: it sent no report, or it ended early. For ``"waiting"``, the reference is the
        rank with the second-shortest time.
    fact
        ``"missing"`` (the rank sent no report), ``"ended"`` (an error ended its block or script), ``"recompile"``,
        ``"refusal"``, ``"graph break"``, ``"waiting"`` (it spent much less time in collectives), or a fact of `RunRow`.
    frame, graph, part, subject
        As in `RunRow`.
    value, expected
        The fact for the rank and for the reference; empty if a rank does not have the thing.
    change
        The difference in a few words.
    sentence
        The difference as a sentence, for facts that can stop the whole job: the facts from ``"missing"`` to
        ``"graph break"``. Empty for all other facts.
    suggestion
        For a recompile: a change that would avoid it.
    """

    rank: int
    reference: int
    fact: str
    frame: str | None = None
    graph: int | None = None
    part: str = ""
    subject: str
    value: str = ""
    expected: str = ""
    change: str = ""
    sentence: str = ""
    suggestion: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRow:
    """The time that a process spent in the collectives of one kind; see the parameter ``waits`` of `Report.record`.

    Attributes
    ----------
    op
        The collective, as the backend of the process group names it: ``"all_reduce"`` and so on.
    count
        How often it was called.
    duration_ns
        The total duration of the collectives: for gloo, from the call to the result; for NCCL, the duration of the
        kernel on the GPU. If several collectives run at the same time, this time is added to the one that began first.
        Computation may run at the same time, too.
    """

    op: str
    count: int
    duration_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The head of the page, computed before anything was cut from the report.

    Attributes
    ----------
    sentence
        The verdict in one line.
    state
        ``"verified"``, ``"unverified"``, ``"different"``, ``"partly"``, ``"nothing"`` or ``"idle"``; see
        `aotlab.report.verdict.Verdict`.
    facts
        The facts about the user's tensors: which were mutated, which share memory, which are saved for the backward.
    frames
        The number of functions that were compiled or called.
    compared, different
        The number of observables that were compared with eager, and the number of observables that differ.
    status
        The verdict in a few words: ``"equal to eager"``.
    graphs
        The number of graphs that were compiled in this run, or compiled earlier and used in this run.
    recompiles
        The number of graphs that were compiled because no earlier graph accepted the call.
    refused
        The number of compilations that failed or were refused.
    listed
        The number of all graphs, including those that were refused.
    mutated
        The number of tensors that existed before and changed, in a graph or outside of the graphs.
    new
        The number of gradients that did not exist before.
    outside
        The number of rows of the cell's ``mutated_outside``.
    breaks
        The number of graph breaks, without calls of libraries that have no tensors.
    eager_lines
        The number of lines of the cell that the compiler received but did not compile.
    speed
        How the slowest graph compares with eager, for example ``"3.8× faster"``; empty if nothing was timed.
    tolerance
        The tolerance rules with which values were compared with eager, and the largest differences; empty if no value
        was compared.
    against
        A sentence that says with which code each compiled line of the cell was compared; empty if no line was compared.
    engines, apart
        The number of facts about which two engines are compared, and the number of facts in which they differ; 0 in a
        report of one engine.
    runs, runs_apart
        The number of facts about which two runs are compared, and the number of facts in which they differ; 0 in a
        report of one run.
    apart_ranks
        The number of differences between the ranks; 0 in a report of one process.
    alone
        The most important of these differences in a few words, for example ``"rank 1 recompiled alone"``; empty if no
        difference can stop the job.
    counts
        The sums of the counts of all graphs, with two exceptions. The saved memory is the memory that one call of each
        function saves. A storage that several graphs use is counted once.
    """

    sentence: str
    state: str
    facts: tuple[Fact, ...] = ()
    frames: int = 0
    compared: int = 0
    different: int = 0
    status: str = ""
    graphs: int = 0
    recompiles: int = 0
    refused: int = 0
    mutated: int = 0
    new: int = 0
    outside: int = 0
    breaks: int = 0
    eager_lines: int = 0
    speed: str = ""
    tolerance: str = ""
    against: str = ""
    engines: int = 0
    apart: int = 0
    runs: int = 0
    runs_apart: int = 0
    apart_ranks: int = 0
    alone: str = ""
    counts: Counts = Counts()  # noqa: RUF009  # the record is frozen
    listed: int = 0
