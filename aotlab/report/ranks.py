"""Join the reports of the ranks of a distributed job to one report, and list the differences between the ranks.

A rank is the number of a process. The ranks of a job usually do the same: a collective, such as DDP's exchange of
gradients, waits until every rank calls it. So a difference between the ranks can stop the whole job, for example if one
rank compiles again while the others wait. These differences come first. `aotlab.report.compare` finds
the other differences, as it does for two runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import NamedTuple

from aotlab.report.compare import MOST_ROWS, compared
from aotlab.report.model import RankRow, Report
from aotlab.report.text import amount, duration, first_line, listed

#: The facts about a run that all ranks have in common, or that other rows say.
_NOT_COMPARED = ("verdict", "graph breaks")
#: A rank is slow if it waited less than this share of the time that each other rank waited ...
_LEAST_WAIT = 0.5
#: ... and if the difference is more than this share of the recorded time.
_CLEAR_WAIT = 0.05
#: A sentence has at most this many characters of a reason.
_LONGEST_REASON = 200


class _Event(NamedTuple):
    """Something that happened on a rank: the frame and graph, and a subject and a reason in words."""

    frame: str | None
    graph: int | None
    subject: str
    reason: str
    took: str = ""
    suggestion: str = ""


#: For each kind of event: the words for a rank on which it happened, and for a rank on which it did not.
_VERBS = {
    "recompile": ("recompiled", "did not recompile"),
    "refusal": ("refused to compile", "did not refuse to compile"),
    "graph break": ("had a graph break in", "had no graph break in"),
}


def joined(reports: Iterable[Report], missing: Mapping[int, str]) -> Report:
    """Return the report of the lowest rank, with the reports of the other ranks and the differences between the ranks.

    Parameters
    ----------
    reports
        The reports of the ranks that have one. There is at least one; each has its ``rank``.
    missing
        For each other rank: why it has no report, in words that follow "rank 1".
    """
    by_rank = {each.rank or 0: each for each in reports}
    ordered = dict(sorted(by_rank.items()))
    first, *others = ordered.values()
    rows = [
        *[_lost(rank, "missing", why) for rank, why in missing.items()],
        *[_lost(rank, "ended", f"ended with {each.ended}") for rank, each in ordered.items() if each.ended],
        *chain.from_iterable(_events_apart(ordered, fact, read) for fact, read in _EVENTS.items()),
        *_compared(ordered),
        *_waited(ordered),
    ]
    return replace(first, rank_reports=tuple(others), rank_rows=tuple(rows), summary=None)


def differences_of_ranks(report: Report) -> list[str]:
    """Write the differences between the ranks as lines of text: their number, and a line for each."""
    rows = report.rank_rows
    words = amount(len(rows), "difference") if rows else "no differences"
    lines = [f"{amount(report.world_size, 'rank')}: {words} between the ranks"]
    lines += [f"  {sentence}" for sentence in dict.fromkeys(row.sentence for row in rows) if sentence]
    for row in [row for row in rows if not row.sentence][:MOST_ROWS]:
        where = "" if row.frame is None else f"{row.frame}, graph {row.graph}, "
        values = f"{row.expected or 'nothing'} on rank {row.reference}, {row.value or 'nothing'} on rank {row.rank}"
        lines.append(f"  {where}{row.part or row.fact} {row.subject}: {values}")
    return lines


def alone(report: Report) -> str:
    """Return the first difference that can stop the job, in a few words; empty if no difference can."""
    first = next(iter(report.rank_rows), None)
    return "" if first is None or not first.sentence else f"rank {first.rank} {first.change}"


def _lost(rank: int, fact: str, why: str) -> RankRow:
    return RankRow(
        rank=rank,
        reference=rank,
        fact=fact,
        subject=f"rank {rank}",
        value=why,
        change="is missing" if fact == "missing" else "ended early",
        sentence=f"Rank {rank} {first_line(why, _LONGEST_REASON)}.",
    )


def _recompiles(report: Report) -> Iterator[_Event]:
    for frame in report.frames:
        for graph in frame.graphs:
            if graph.misses and graph.status != "refused":
                miss = graph.misses[0]
                yield _Event(
                    frame.name, graph.index, miss.subject, miss.sentence, duration(graph.duration_ns), miss.suggestion
                )


def _refusals(report: Report) -> Iterator[_Event]:
    for frame in report.frames:
        for row in frame.refusals:
            yield _Event(frame.name, row.graph, frame.name, f"{row.reason}; the call {row.outcome}")


def _breaks(report: Report) -> Iterator[_Event]:
    for row in report.graph_break_rows:
        if not row.library:
            yield _Event(row.frame, None, row.where, row.words)


_EVENTS = {"recompile": _recompiles, "refusal": _refusals, "graph break": _breaks}


def _events_apart(
    reports: Mapping[int, Report], fact: str, read: Callable[[Report], Iterable[_Event]]
) -> Iterator[RankRow]:
    """Yield the events that happened on some ranks only. The n-th event of a frame is the same event on all ranks.

    The rows are about the smaller group of ranks: those on which the event happened, or the others.
    """
    events: dict[tuple[str | None, int], dict[int, _Event]] = {}
    for rank, report in reports.items():
        counts: Counter[str | None] = Counter()
        for event in read(report):
            events.setdefault((event.frame, counts[event.frame]), {})[rank] = event
            counts[event.frame] += 1
    for on_ranks in events.values():
        others = [rank for rank in reports if rank not in on_ranks]
        happened = len(on_ranks) <= len(others)
        ranks, references = (list(on_ranks), others) if happened else (others, list(on_ranks))
        for rank in ranks if others else ():
            event = on_ranks[rank if happened else references[0]]
            yield RankRow(
                rank=rank,
                reference=references[0],
                fact=fact,
                frame=event.frame,
                graph=event.graph,
                subject=event.subject,
                value=event.reason if happened else "",
                expected="" if happened else event.reason,
                change=f"{_short(fact, happened=happened)}{' alone' if len(ranks) == 1 else ''}",
                sentence=_sentence(fact, ranks, event, happened=happened),
                suggestion=event.suggestion,
            )


def _short(fact: str, *, happened: bool) -> str:
    return _VERBS[fact][not happened].removesuffix(" in")


def _sentence(fact: str, ranks: Sequence[int], event: _Event, *, happened: bool) -> str:
    names = listed([str(rank) for rank in ranks])
    subject = f"Rank {names} alone" if len(ranks) == 1 else f"Only ranks {names}"
    graph = "" if event.graph is None else f" (graph {event.graph}{event.took and f', {event.took}'})"
    name = (event.frame or "").rpartition("<locals>.")[2]  # without the enclosing functions
    where = f" `{name}`{graph}" if name else f" {event.subject}"
    return f"{subject} {_VERBS[fact][not happened]}{where}: {first_line(event.reason, _LONGEST_REASON)}."


def _compared(reports: Mapping[int, Report]) -> Iterator[RankRow]:
    """Compare the report of each rank with the report of the reference, which has as many graphs as most ranks."""
    shapes = {rank: tuple([(frame.name, len(frame.graphs)) for frame in each.frames]) for rank, each in reports.items()}
    usual = Counter(shapes.values()).most_common(1)[0][0]
    reference = next(rank for rank, shape in shapes.items() if shape == usual)
    for rank, report in reports.items():
        recompiled = {(each.frame, each.graph) for pair in (report, reports[reference]) for each in _recompiles(pair)}
        for row in compared(reports[reference], report).run_rows if rank != reference else ():
            is_told = row.change in ("added", "removed") and (row.frame, row.graph) in recompiled
            if row.same is False and row.subject not in _NOT_COMPARED and not (row.fact == "graph" and is_told):
                yield RankRow(
                    rank=rank, reference=reference, fact=row.fact, frame=row.frame, graph=row.graph, part=row.part,
                    subject=row.subject, value=row.after, expected=row.before, change=row.change,
                )  # fmt: skip


def _waited(reports: Mapping[int, Report]) -> Iterator[RankRow]:
    """Yield a row about the rank that waited least in collectives, if the difference is clear."""
    waits = {rank: sum(row.duration_ns for row in each.wait_rows) for rank, each in reports.items() if each.wait_rows}
    for least, other in pairwise(sorted(waits, key=waits.__getitem__)[:2]):
        clear = waits[least] < _LEAST_WAIT * waits[other]
        if clear and waits[other] - waits[least] > _CLEAR_WAIT * reports[other].duration_ns:
            value, expected = (f"{duration(waits[n])} of {duration(reports[n].duration_ns)}" for n in (least, other))
            yield RankRow(
                rank=least, reference=other, fact="waiting", subject="in collectives", value=value, expected=expected,
                change="the others probably waited for it",
            )  # fmt: skip
