"""Count the rows and sum the sizes of a report. If the report was cut, return the counts from before the cut."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, fields, replace
from typing import get_args

from aotlab.report.engines import serving
from aotlab.report.loops import unrolled_loops
from aotlab.report.model import Counts, Fact, Frame, FrameCounts, Graph, Input, Output, Report, Summary
from aotlab.report.ranks import alone
from aotlab.report.text import amount, known_size, listed, new_memory, place, tolerance_words
from aotlab.report.varying import apart, limits
from aotlab.report.verdict import State, compared_sentence, eager_lines, interrupted, served, speed, verdict

#: A fact contains at most `_MOST_NAMES` names. At most `_MOST_SENTENCES` sentences are about aliases, and as many about
#: sizes that are not dynamic.
_MOST_NAMES, _MOST_SENTENCES = 8, 4
#: If this many tensors of one variable changed in the same way, they are counted and not named.
_MANY = 4


def count(graph: Graph) -> Counts:
    """Count the rows in the tables of a graph; if they were counted before the report was cut, return these counts."""
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
    """Return the name of the outermost argument or output whose tree of wrappers contains ``row``.

    If ``row`` is itself an argument or output, return its own name. ``rows`` are all rows of the table that contains
    ``row``.
    """
    above = {each.name: each.part_of for each in rows} if row.part_of else {}
    name = row.name
    while part_of := above.pop(name, ""):  # pop, because in a damaged file the rows may refer to each other in a cycle
        name = part_of
    return name


def count_frame(frame: Frame) -> FrameCounts:
    """Count the graphs and refusals of a frame; if they were counted before the report was cut, return these counts."""
    if frame.counts is not None:
        return frame.counts
    serving = [graph for graph in frame.graphs if served(graph)]
    return FrameCounts(
        graphs=len(frame.graphs),
        refusals=len(frame.refusals),
        compile_ns=sum(graph.duration_ns or 0 for graph in frame.graphs),
        recompiles=sum(bool(graph.misses) for graph in frame.graphs),
        served=len(serving),
        reused=sum(graph.reused for graph in serving),
    )


def counted(report: Report) -> Report:
    """Return ``report`` with the summary and all counts set.

    The page reads these numbers instead of counting rows, because the tables that it receives may have been cut.
    """
    graphs = [tuple([replace(graph, counts=count(graph)) for graph in frame.graphs]) for frame in report.frames]
    frames = zip(report.frames, graphs, strict=True)
    counted_frames = [replace(frame, graphs=each, counts=count_frame(frame)) for frame, each in frames]
    ranks = tuple(map(counted, report.rank_reports))
    return replace(report, frames=tuple(counted_frames), rank_reports=ranks, summary=summary(report))


def summary(report: Report) -> Summary:
    """Compute the head of the page: the verdict, facts about tensors, and totals.

    If the report has a summary already, return it, because the report may have been cut since it was computed.
    """
    if report.summary is not None and report.summary.state in get_args(State):
        return report.summary
    every, report = report, serving(report)
    result = verdict(every)
    graphs = [graph for frame in report.frames for graph in frame.graphs]
    return Summary(
        sentence=result.sentence,
        state=result.state,
        status=result.status,
        facts=tuple(_facts(report)),
        frames=len(report.frames),
        compared=len(report.verification_rows),
        different=sum(not row.equal for row in report.verification_rows),
        engines=len(report.engine_rows),
        apart=sum(row.same is False for row in report.engine_rows),
        runs=len(report.run_rows),
        runs_apart=sum(row.same is False for row in report.run_rows),
        apart_ranks=len(report.rank_rows),
        alone=alone(report),
        graphs=sum(map(served, graphs)),
        recompiles=sum(bool(graph.misses) for graph in graphs),
        refused=sum(count_frame(frame).refusals for frame in report.frames),
        mutated=len(_changed(report, graphs)),
        new=len(_new(report)),
        outside=0 if report.cell is None else len(report.cell.mutated_outside),
        breaks=sum(not row.library for row in report.graph_break_rows),
        eager_lines=0 if report.cell is None else eager_lines(report.cell),
        speed=speed(report),
        tolerance=tolerance_words(report.verification_rows),
        against=compared_sentence(report),
        counts=_of_one_call(report, _added(map(count, graphs))),
        listed=len(graphs),
    )


def _added(counts: Iterable[Counts]) -> Counts:
    """Add up the counts of graphs."""
    rows = [astuple(each) for each in counts]
    return Counts(**{field.name: sum(each[i] for each in rows) for i, field in enumerate(fields(Counts))})


def _largest(report: Report) -> list[Counts]:
    """Return for each function with a backward the counts of the graph that saves the most memory for the backward.

    One graph serves a call, so these counts have the most memory that one call of the function saves.
    """
    training = [[count(graph) for graph in frame.graphs if graph.training] for frame in report.frames]
    return [max(counts, key=lambda each: each.saved_bytes) for counts in training if counts]


def _of_one_call(report: Report, counts: Counts) -> Counts:
    """Correct ``counts``, the sums over all graphs, for values that graphs have in common.

    The saved memory is replaced by the memory that one call of each function saves. A storage that several graphs use
    is counted once.
    """
    largest = _largest(report)
    saved, held = sum(each.saved_bytes for each in largest), sum(each.held_bytes for each in largest)
    storages = {each.number: each for frame in report.frames for graph in frame.graphs for each in graph.storages}
    nbytes = sum(known_size(each.nbytes) for each in storages.values() if each.nbytes is not None)
    return replace(counts, saved_bytes=saved, held_bytes=held, storages=len(storages), storage_bytes=nbytes)


def _facts(report: Report) -> Iterator[Fact]:
    """List facts about the user's tensors: mutations, shared memory, sizes that vary, values saved for backward."""
    graphs = [graph for frame in report.frames for graph in frame.graphs]
    # Without a compiled graph, it is unknown whether the function mutates or returns its arguments.
    traced = any(graph.status == "compiled" for graph in graphs)
    if report.cell is not None and report.cell.error is not None:
        at = "" if report.cell.error_line is None else f" (line {report.cell.error_line})"
        key, title = ("interrupted", "interrupted") if interrupted(report.cell) else ("error", "ended with")
        yield Fact(key=key, title=title, sentence=(report.cell.stopped or report.cell.error) + at)
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
        left_out = [f"{len(told) - _MOST_SENTENCES} more"] if len(told) > _MOST_SENTENCES else []
        for index, sentence in enumerate([*told[:_MOST_SENTENCES], *left_out]):
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
    for number, steps in unrolled_loops(report).items():
        counted = f"{listed([f'{each:,}' for each in sorted(steps)])} steps"
        words = f"{'all of its steps are' if 0 in steps else counted} in one graph"
        yield Fact(key="unrolled", title="unrolled", sentence=f"the loop in line {number} was unrolled: {words}")
    if largest := _largest(report):
        values = amount(sum(each.saved for each in largest), "value")
        memory = new_memory(sum(each.saved_bytes for each in largest))
        most = ", at most, by one call of each function" if len(largest) < sum(bool(g.training) for g in graphs) else ""
        yield Fact(key="saved", title="saved for backward", sentence=f"{values}, {memory}{most}")


def _changed(report: Report, graphs: list[Graph]) -> dict[str, str]:
    """Map the name of each tensor that changed, in graphs or outside of them, to words that describe the changes.

    Gradients that did not exist before are left out; `_new` returns them.
    """
    new = set(_new(report))
    changes: dict[str, dict[str, None]] = {}
    for name, how in _changes(report, graphs):
        if name not in new:
            changes.setdefault(name, {})[how] = None
    return {name: "; ".join(every) for name, every in changes.items()}


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
    """Return the names of the gradients that did not exist before the cell."""
    return [row.name for row in (() if report.cell is None else report.cell.mutated_outside) if row.kind == "new"]


def _together(changed: dict[str, str]) -> dict[tuple[str, str], None]:
    """Return pairs of a tensor's name and its change, in the order of ``changed``, as the keys of a dict.

    If at least `_MANY` tensors of one variable changed in the same way, they have one pair:
    ``("40 tensors of model", "data")``.
    """
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
    # In a function with graph breaks, Python runs between the graphs. Only the function's arguments are checked for
    # changes, so "nothing" could be wrong.
    return "no argument; other writes by the Python code between the graphs are not recorded" if broken else "nothing"
