"""What a report holds in numbers, which stay those of the whole report when its tables are cut to fit a notebook."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, fields, replace
from typing import get_args

from aotlab.report.model import Counts, Fact, Frame, FrameCounts, Graph, Input, Output, Report, Summary
from aotlab.report.text import amount, known_size, listed, new_memory, place
from aotlab.report.varying import apart, limits
from aotlab.report.verdict import State, eager_lines, served, speed, verdict

#: So many names, and so many sentences, stand in one fact.
_MOST_NAMES, _MOST_SENTENCES = 8, 4
#: So many tensors of one variable are counted instead.
_MANY = 4


def count(graph: Graph) -> Counts:
    """Count what the tables of a graph hold; of one that was cut, what they held before."""
    if graph.counts is not None:
        return graph.counts
    held = [row for row in graph.saved if (row.is_input or row.is_output) and not row.shares]
    called = sum(kernel.language == "extern" for kernel in graph.kernels)
    inputs = [row for row in graph.inputs if not row.part_of]
    shared = {whole(row, graph.outputs) for row in graph.outputs if row.part_of and row.base is not None}
    return Counts(
        stages=len(graph.stages),
        stages_ns=sum(stage.duration_ns for stage in graph.stages),
        nodes=sum(node.stage == "trace" for node in graph.nodes),
        inputs=len(inputs),
        mutated=sum(row.mutated for row in inputs if row.duplicate_of is None),
        outputs=sum(not row.part_of for row in graph.outputs),
        aliased=sum(row.base is not None or row.name in shared for row in graph.outputs if not row.part_of),
        storages=len(graph.storages),
        shared=sum(len(storage.spans) > 1 for storage in graph.storages),
        storage_bytes=sum(known_size(storage.nbytes) for storage in graph.storages if storage.nbytes is not None),
        saved=len(graph.saved),
        saved_bytes=sum(row.new_bytes for row in graph.saved),
        held_bytes=sum(known_size(row.nbytes) for row in held),
        kernels=len(graph.kernels),
        kernels_called=called,
        guards=len(graph.guards),
    )


def whole(row: Input | Output, rows: Sequence[Input | Output]) -> str:
    """Return the name of the argument or output that a row is a part of, or its own."""
    above = {each.name: each.part_of for each in rows} if row.part_of else {}
    name = row.name
    while part_of := above.pop(name, ""):  # once each: a report that was loaded may say anything
        name = part_of
    return name


def count_frame(frame: Frame) -> FrameCounts:
    """Count the graphs and refusals of a frame; of one that was cut, those that there were before."""
    if frame.counts is not None:
        return frame.counts
    compile_ns = sum(graph.duration_ns or 0 for graph in frame.graphs)
    return FrameCounts(graphs=len(frame.graphs), refusals=len(frame.refusals), compile_ns=compile_ns)


def summary(report: Report) -> Summary:
    """Return the head of the page: that of a report that was cut is the whole one's."""
    if report.summary is not None and report.summary.state in get_args(State):
        return report.summary
    found = verdict(report)
    graphs = [graph for frame in report.frames for graph in frame.graphs]
    return Summary(
        sentence=found.sentence,
        state=found.state,
        status=found.status,
        facts=tuple(_facts(report)),
        frames=len(report.frames),
        compared=len(report.verification_rows),
        different=sum(not row.equal for row in report.verification_rows),
        graphs=sum(map(served, graphs)),
        recompiles=sum(bool(graph.misses) for graph in graphs),
        refused=sum(count_frame(frame).refusals for frame in report.frames),
        mutated=len(_changed(report, graphs)),
        new=len(_new(report)),
        outside=0 if report.cell is None else len(report.cell.mutated_outside),
        breaks=len(report.graph_break_rows),
        eager_lines=0 if report.cell is None else eager_lines(report.cell),
        speed=speed(report),
        counts=_of_one_call(report, _added(map(count, graphs))),
    )


def _added(counts: Iterable[Counts]) -> Counts:
    """Add up the counts of graphs."""
    found = [astuple(each) for each in counts]
    return Counts(**{field.name: sum(each[i] for each in found) for i, field in enumerate(fields(Counts))})


def _largest(report: Report) -> list[Counts]:
    """Count what that graph of each function holds which saves most: a call is served by one."""
    training = [[count(graph) for graph in frame.graphs if graph.training] for frame in report.frames]
    return [max(counts, key=lambda each: each.saved_bytes) for counts in training if counts]


def _of_one_call(report: Report, counts: Counts) -> Counts:
    largest = _largest(report)
    saved, held = sum(each.saved_bytes for each in largest), sum(each.held_bytes for each in largest)
    return replace(counts, saved_bytes=saved, held_bytes=held)


def _facts(report: Report) -> Iterator[Fact]:
    """Say what happened to the user's tensors: what was mutated, what shares memory, what varies, what is saved."""
    graphs = [graph for frame in report.frames for graph in frame.graphs]
    traced = any(graph.status == "compiled" for graph in graphs)  # a refused one says nothing of what the function did
    if report.cell is not None and report.cell.error is not None:
        at = "" if report.cell.error_line is None else f" (line {report.cell.error_line})"
        yield Fact(key="error", title="ended with", sentence=report.cell.error + at)
    for frame in report.frames:
        if frame.limit and frame.calls.eager:
            eager = f"{frame.calls.eager} of {amount(frame.calls.total, 'call')} of {frame.name} ran eagerly"
            yield Fact(key="limit", title="recompile limit", sentence=f"{eager}: {frame.limit}")
    changed = _changed(report, graphs)
    if traced or changed:
        names = [f"{what} ({how})" for what, how in _together(changed)]
        text = listed(names, _MOST_NAMES) if names else _nothing(report)
        yield Fact(key="mutated", title="mutated", sentence=text)
    if new := _new(report):
        names = [what for what, _ in _together(dict.fromkeys(new, ""))]
        yield Fact(key="new", title="new gradients", sentence=listed(names, _MOST_NAMES))
    if traced:
        aliases = [f"{row.name}: {row.relation}" for graph in graphs for row in graph.outputs if row.base is not None]
        told = list(dict.fromkeys(aliases)) or ["no output shares memory"]
        more = [f"{len(told) - _MOST_SENTENCES} more"] if len(told) > _MOST_SENTENCES else []
        for index, sentence in enumerate([*told[:_MOST_SENTENCES], *more]):
            yield Fact(key="aliases", title="" if index else "aliases", sentence=sentence)
    varying: dict[str, None] = {}
    for graph in graphs:
        held = limits(graph.guards)
        names = [each.user_name for each in graph.placeholders if each.value]
        varying |= dict.fromkeys(name + held.get(name, "") for name in names)
    if varying:
        yield Fact(key="varies", title="for any value of", sentence=listed(list(varying), _MOST_NAMES))
    for why in list(dict.fromkeys(graph.static_since for graph in graphs if graph.static_since))[:_MOST_SENTENCES]:
        reason, line, _ = apart(why)
        sentence = reason if line is None else f"{reason}, at {place(line)}"
        yield Fact(key="static", title="for one value alone", sentence=sentence)
    if largest := _largest(report):
        values = amount(sum(each.saved for each in largest), "value")
        memory = new_memory(sum(each.saved_bytes for each in largest))
        most = ", at most, by one call of each function" if len(largest) < sum(bool(g.training) for g in graphs) else ""
        yield Fact(key="saved", title="saved for backward", sentence=f"{values}, {memory}{most}")


def _changed(report: Report, graphs: list[Graph]) -> dict[str, str]:
    """Say how each tensor changed that was there before: in graphs, and outside of them."""
    new = set(_new(report))
    found: dict[str, dict[str, None]] = {}
    for name, how in _changes(report, graphs):
        if name not in new:
            found.setdefault(name, {})[how] = None
    return {name: "; ".join(every) for name, every in found.items()}


def _changes(report: Report, graphs: list[Graph]) -> Iterator[tuple[str, str]]:
    for graph in graphs:
        for row in graph.inputs:
            if row.mutated and row.duplicate_of is None and not row.part_of:
                yield row.name, _how(row)
    for row in () if report.cell is None else report.cell.mutated_outside:
        where = f"through {', '.join(row.overlaps)}" if row.kind == "alias" else "outside the graphs"
        if row.kind != "new":
            yield row.name, f"{_how(row)}, {where}"


def _new(report: Report) -> list[str]:
    """Name the gradients that there were not before the cell."""
    return [row.name for row in (() if report.cell is None else report.cell.mutated_outside) if row.kind == "new"]


def _together(changed: dict[str, str]) -> dict[tuple[str, str], None]:
    """Say what changed, and how; many tensors of one variable, to which the same happened, are counted."""
    owners = {name: re.match(r"\w+(?=[.\[])", name) for name in changed}
    nouns = {name: "gradients" if name.endswith(".grad") else "tensors" for name in changed}
    keys = {n: (n if (owner := owners[n]) is None else owner[0], nouns[n], how) for n, how in changed.items()}
    times = Counter(keys.values())
    many = {name: times[key] for name, key in keys.items()}
    said = {n: n if many[n] < _MANY else f"{many[n]} {nouns[n]} of {keys[n][0]}" for n in changed}
    return {(said[name], how): None for name, how in changed.items()}


def _how(row: Input) -> str:
    kinds = (("data", row.mutates_data), ("metadata", row.mutates_metadata), ("storage", row.mutates_storage))
    return ", ".join(kind for kind, changed in kinds if changed)


def _nothing(report: Report) -> str:
    broken = report.cell is not None and report.cell.kind == "definitions" and bool(report.graph_break_rows)
    # between the graphs of a broken function Python runs; of what it writes only the arguments are watched
    return "no argument; what else Python wrote between the graphs is not watched" if broken else "nothing"
