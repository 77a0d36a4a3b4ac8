"""The report in one line: what was compiled, on what, and whether it was verified."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast, get_args

from aotlab.report.text import amount, duration, listed

if TYPE_CHECKING:
    from aotlab.report.model import Frame, Graph, Report

State = Literal["verified", "unverified", "different", "partly", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The first line of a report.

    Attributes
    ----------
    sentence
        The line.
    state
        ``"verified"``, ``"unverified"``, ``"different"`` (an engine's results are not eager's), ``"partly"`` (something
        was refused beside what was compiled) or ``"nothing"`` (nothing was compiled).
    """

    sentence: str
    state: State


def verdict(report: Report) -> Verdict:
    """Say in one line what ``report`` tells; of a report that was cut, what the whole one told."""
    if report.summary is not None and report.summary.state in get_args(State):
        return Verdict(sentence=report.summary.sentence, state=cast("State", report.summary.state))
    graphs = [graph for frame in report.frames for graph in frame.graphs if graph.status == "compiled"]
    if not graphs:
        return Verdict(sentence=f"Nothing was compiled: {_why_nothing(report)}", state="nothing")

    functions = [_short(frame.function) for frame in report.frames if any(g.status == "compiled" for g in frame.graphs)]
    training = sum(bool(graph.training) for graph in graphs)
    kind = "training" if training == len(graphs) else f"{training} for training" if training else "inference"
    backends = listed(sorted({graph.backend for graph in graphs if graph.backend}))
    devices = listed(_devices(graphs))
    took = duration(sum(graph.duration_ns or 0 for graph in graphs))
    sentence = f"Compiled {listed(functions, 3)}: {amount(len(graphs), 'graph')} ({kind})"
    if backends:
        sentence += f", backend {backends}"
    if devices:
        sentence += f", on {devices}"
    sentence += f", in {took}"

    state, ending = _verified(report)
    sentence += f"; {ending}."
    refused = [(frame, refusal) for frame in report.frames for refusal in frame.refusals]
    if refused:
        frame, refusal = refused[0]
        sentence += (
            f" {amount(len(refused), 'compilation')} refused, first {_short(frame.function)} ({refusal.reason})."
        )
        state = state if state == "different" else "partly"
    return Verdict(sentence=sentence, state=state)


def _verified(report: Report) -> tuple[State, str]:
    """Say what the verification of aotlab showed, and for which of the compiled functions.

    Rows about another engine say nothing of what was compiled here.
    """
    rows = [row for row in report.verification_rows if row.engine == "aotlab"]
    if not rows:
        return "unverified", "not verified"
    compared = amount(len(rows), "observable")
    different = [row for row in rows if not row.equal]
    if different:
        return "different", f"NOT equal to eager: {len(different)} of {compared} differ"
    compiled = [frame for frame in report.frames if any(graph.status == "compiled" for graph in frame.graphs)]
    covered = {row.frame for row in rows}
    # A row that names no function is about all of them.
    missing = [] if None in covered else [_short(frame.function) for frame in compiled if frame.name not in covered]
    if missing:
        return "partly", f"verified: equal to eager on {compared}, but {listed(missing, 3)} not verified"
    return "verified", f"verified: equal to eager on {compared}"


def _why_nothing(report: Report) -> str:
    refused = [(frame, refusal) for frame in report.frames for refusal in frame.refusals]
    if refused:
        frame, refusal = refused[0]
        more = f" ({amount(len(refused) - 1, 'more refusal')})" if len(refused) > 1 else ""
        place = "" if refusal.line is None or str(refusal.line) in refusal.message else f", at {refusal.line}"
        message = refusal.message.splitlines()[0] if refusal.message else "no message"
        return f"{_short(frame.function)} {_outcome(refusal.outcome)}, {refusal.error}: {message}{place}{more}"
    earlier = sum(_earlier_calls(frame) for frame in report.frames)
    if earlier:
        return f"{amount(earlier, 'call')} ran code that was compiled before the recording began."
    if any(frame.graphs for frame in report.frames):
        return "the recording ended before a compilation did."
    eager = sum(frame.calls.eager for frame in report.frames)
    if eager:
        return f"{amount(eager, 'call')} ran eagerly."
    return "no function compiled by aotlab was called during the recording."


def _short(function: str) -> str:
    """Name a function without the function around it."""
    return function.rpartition("<locals>.")[2]


def _outcome(outcome: str) -> str:
    return "ran eagerly" if outcome == "ran eagerly" else "was refused"


def _earlier_calls(frame: Frame) -> int:
    return sum(graph.calls for graph in frame.graphs if graph.status == "earlier")


def _devices(graphs: list[Graph]) -> list[str]:
    """Name the devices of all tensors that go in or come out, in order of appearance."""
    found: dict[str, None] = {}
    for graph in graphs:
        for argument in graph.inputs:
            if argument.tensor is not None:
                found.setdefault(argument.tensor.device)
        for output in graph.outputs:
            if output.tensor is not None:
                found.setdefault(output.tensor.device)
    return list(found)
