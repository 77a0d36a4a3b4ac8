"""Compare two engines: the graphs of aotlab and of stock `torch.compile` for the same code, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from aotlab.report.model import EngineRow, Frame, Graph, Input, Report, Saved
from aotlab.report.text import amount, data_size, duration, known_size, sizes

#: The end of the names of upstream's frames in a report of both engines. Without it, it is the name of aotlab's frame.
UPSTREAM = " [upstream]"
#: The graphs whose ops are counted: for each name, the stages and parts that contain the graph of one of the engines.
_PARTS = {
    "joint graph": [("trace", "joint")],
    "inference graph": [("trace", "inference"), ("trace", "forward")],
    "forward graph": [("partition", "forward")],
    "backward graph": [("partition", "backward")],
}


def serving(report: Report) -> Report:
    """Return a report of both engines without the frames of upstream, whose graphs did not serve the calls.

    A report of one engine is returned unchanged.
    """
    ours = tuple([frame for frame in report.frames if frame.engine == "aotlab"])
    both = 0 < len(ours) < len(report.frames)
    return replace(report, frames=ours) if both else report


def engine_rows(report: Report) -> tuple[EngineRow, ...]:
    """Compare the graphs that both engines made of the same code. The result is empty for a report of one engine."""
    theirs = {frame.name.removesuffix(UPSTREAM): frame for frame in report.frames if frame.engine == "upstream"}
    rows: list[EngineRow] = []
    for frame in report.frames:
        other = theirs.get(frame.name)
        if frame.engine == "aotlab" and other is not None:
            for ours, upstreams in zip(frame.graphs, other.graphs, strict=False):
                rows += _graph_rows(frame, ours, upstreams)
            if len(frame.graphs) != len(other.graphs):
                counts = [amount(len(each.graphs), "graph") for each in (frame, other)]
                rows.append(_row(frame, None, "graphs", "graphs", *counts))
    return tuple(rows)


def _row(frame: Frame, graph: Graph | None, fact: str, subject: str, ours: str, theirs: str) -> EngineRow:
    return EngineRow(
        frame=frame.name,
        graph=None if graph is None else graph.index,
        fact=fact,
        subject=subject,
        aotlab=ours,
        upstream=theirs,
        same=ours == theirs,
    )


def _graph_rows(frame: Frame, ours: Graph, theirs: Graph) -> Iterator[EngineRow]:
    if ours.status != theirs.status:
        yield _row(frame, ours, "graph", "the graph", ours.status, theirs.status)
    yield from _mutations(frame, ours, theirs)
    yield from _outputs(frame, ours, theirs)
    yield from _saved(frame, ours, theirs)
    for name, parts in _PARTS.items():
        counts = [_ops(each, parts) for each in (ours, theirs)]
        if any(counts) and ("inference" in name) != bool(ours.training):
            yield _row(frame, ours, "size", name, amount(counts[0], "op"), amount(counts[1], "op"))
    if ours.kernels or theirs.kernels:
        yield _row(frame, ours, "size", "kernels", _kernels(ours), _kernels(theirs))
    checks = f"{amount(len(ours.guards), 'guard')} behind Dynamo's", f"{amount(len(theirs.guards), 'guard')} of Dynamo"
    yield replace(_row(frame, ours, "guards", "checks before each call", *checks), same=None)
    if ours.misses or theirs.misses:
        yield replace(_row(frame, ours, "recompile", "reason", _reason(ours), _reason(theirs)), same=None)
    times = duration(ours.duration_ns), duration(theirs.duration_ns)
    yield replace(_row(frame, ours, "time", "compile time, without Dynamo's", *times), same=None)


def _ops(graph: Graph, parts: Sequence[tuple[str, str]]) -> int:
    """Count the ops in the first of some parts of a graph that exists. A part is a stage and the name of its graph."""
    for part in parts:
        nodes = [node for node in graph.nodes if (node.stage, node.part) == part]
        if nodes:
            return sum(node.op == "call_function" for node in nodes)
    return 0


def _reason(graph: Graph) -> str:
    return graph.misses[0].sentence if graph.misses else "none"


def _mutations(frame: Frame, ours: Graph, theirs: Graph) -> Iterator[EngineRow]:
    """Compare the mutations of the inputs, and where each engine makes them."""
    others = {row.name: row for row in theirs.inputs}
    names = dict.fromkeys([row.name for row in (*ours.inputs, *theirs.inputs) if row.tensor is not None])
    rows = {row.name: row for row in ours.inputs}
    for name in names:
        pair = rows.get(name), others.get(name)
        if any(row is not None and row.mutated for row in pair):
            yield _row(frame, ours, "mutation", name, mutation(pair[0]), mutation(pair[1]))


def mutation(row: Input | None) -> str:
    """Write in words how an input of a graph is mutated."""
    if row is None:
        return "no input of the graph"
    kinds = (("data", row.mutates_data), ("metadata", row.mutates_metadata), ("storage", row.mutates_storage))
    changed = ", ".join(kind for kind, changes in kinds if changes)
    return f"{changed}: {row.mutation_type}" if changed else str(row.mutation_type or "not mutated")


def _outputs(frame: Frame, ours: Graph, theirs: Graph) -> Iterator[EngineRow]:
    """Compare the outputs: which own their memory, and from which tensors the runtime regenerates the others."""
    whole = [row for row in ours.outputs if not row.part_of]
    for row, other in zip(whole, theirs.outputs, strict=False):
        # upstream's relation does not name the view op
        same = row.relation.partition(":")[0].removeprefix("is ").removesuffix(" itself") == other.relation
        yield replace(_row(frame, ours, "output", row.name, row.relation, other.relation), same=same)


def _saved(frame: Frame, ours: Graph, theirs: Graph) -> Iterator[EngineRow]:
    """Compare the values that are saved for the backward: values of the same line, dtype and sizes are a pair."""
    if not ours.saved and not theirs.saved:
        return
    left, right = [Counter(_value(row, each) for row in each.saved) for each in (ours, theirs)]
    yield _row(frame, ours, "saved", "all values", memory(ours.saved), memory(theirs.saved))
    # those that differ come first
    for value in sorted(dict.fromkeys([*left, *right]), key=lambda each: left[each] == right[each]):
        yield _row(frame, ours, "saved", value, times(left[value]), times(right[value]))


def _value(row: Saved, graph: Graph) -> str:
    """Describe a saved value in words that are the same for both engines."""
    users = {each.name: each.user_name for each in graph.placeholders}
    origin = f"input {users.get(row.name, '')}".strip() if row.is_input else ""
    if row.line is not None and not row.is_input:
        origin = f"line {row.line.line}"
    return f"{row.tensor.dtype}{sizes(row.tensor.shape)}{f' of {origin}' if origin else ''}"


def times(count: int) -> str:
    """Write how often a value is saved."""
    return "not saved" if not count else "saved" if count == 1 else f"saved {count} times"


def memory(rows: Sequence[Saved]) -> str:
    """Write the number of saved values, and their bytes."""
    total = sum(known_size(row.nbytes) for row in rows)
    return f"{amount(len(rows), 'value')}, {data_size(total)}"


def _kernels(graph: Graph) -> str:
    if not graph.kernels:
        return ""
    called = sum(kernel.language == "extern" for kernel in graph.kernels)
    return f"{len(graph.kernels) - called} generated, {called} called"
