"""Compare two runs: the reports of the same code at two times, or of two forms of a program.

The functions are paired by name, and the rest in order. Graphs are paired by index. The nodes of two graphs are aligned
as `difflib` aligns the lines of two texts. Two nodes can be a pair if they run the same op; if their results or their
inputs differ, the row says how.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from itertools import zip_longest

from aotlab.report.engines import memory, mutation, times
from aotlab.report.model import Frame, Graph, Kernel, Node, Report, RunRow, Saved, TimingRow
from aotlab.report.model.measured import QUIET
from aotlab.report.text import amount, data_size, duration, known_size, listed, sizes
from aotlab.report.verdict import verdict

#: The graphs whose nodes are compared: the words for each, and the stage and part that contain it.
PARTS = {
    "inference graph": ("trace", "inference"),
    "forward graph": ("partition", "forward"),
    "backward graph": ("partition", "backward"),
}
#: At most this many rows are made for the nodes of a graph, and for the lines of a cell.
MOST_ROWS = 200
#: If the keys of two sequences have more equal pairs than this, `difflib` would take seconds.
_MOST_PAIRS = 1_000_000
#: A time is compared only if at least this many calls were measured.
_FEWEST_CALLS = 5


def compared(before: Report, after: Report, *, names: tuple[str, str] = ("before", "after")) -> Report:
    """Return the report ``after`` with the table ``runs``, which compares it with the report ``before``.

    Parameters
    ----------
    before, after
        The two reports.
    names
        The names of the two runs, as the page writes them.
    """
    rows = (*_run_facts(before, after), *_code(before, after), *_graphs(before, after), *_times(before, after))
    return replace(
        after,
        identifier=uuid.uuid4().hex,
        run_names=tuple(names),
        run_rows=rows,
        name=" and ".join(names),
        summary=None,
    )


def differences(report: Report) -> list[str]:
    """Write the comparison of two runs as lines of text: the number of differences, and a line for each."""
    different = [row for row in report.run_rows if row.same is False]
    words = amount(len(different), "difference") if different else "no differences"
    lines = [f"{' and '.join(report.run_names)}: {words}, in {amount(len(report.run_rows), 'fact')}"]
    for row in different[:MOST_ROWS]:
        where = "" if row.frame is None else f"{row.frame}, graph {row.graph}, "
        change = f"  ({row.change})" if row.change not in ("", "added", "removed") else ""
        values = (
            f"{row.before} → {row.after}" if row.before and row.after else f"{row.change}: {row.before or row.after}"
        )
        lines.append(f"  {where}{row.part or row.fact} {row.subject}: {values}{change}")
    return lines


def _run_facts(before: Report, after: Report) -> Iterator[RunRow]:
    def fact(subject: str, read: Callable[[Report], str], *, comparable: bool = True) -> RunRow:
        left, right = read(before), read(after)
        return RunRow(fact="run", subject=subject, before=left, after=right, same=left == right if comparable else None)

    yield fact("started", lambda each: each.created.replace("T", " ")[:16], comparable=False)
    yield fact("verdict", lambda each: verdict(each).status)
    yield fact("options", lambda each: "" if each.cell is None else each.cell.options)
    yield fact("torch", lambda each: each.environment.torch)
    yield fact("aotlab", lambda each: each.environment.aotlab)
    yield fact("Python", lambda each: each.environment.python)
    yield fact("machine", _machine)
    for name in [each.name for each in after.environment.config]:
        row = fact(f"config.{name}", partial(_setting, name))
        if not row.same:
            yield row
    yield fact("graph breaks", lambda each: str(sum(not row.library for row in each.graph_break_rows)))


def _setting(name: str, report: Report) -> str:
    return next((repr(each.value) for each in report.environment.config if each.name == name), "")


def _machine(report: Report) -> str:
    return f"{listed([str(each) for each in report.environment.devices])}, {report.environment.threads} threads"


def _code(before: Report, after: Report) -> Iterator[RunRow]:
    """Compare the lines of the code."""
    left, right = ([] if each.cell is None else each.cell.source.splitlines() for each in (before, after))
    rows = []
    for i, j in aligned(left, right):
        if i is None or j is None:
            texts = "" if i is None else left[i], "" if j is None else right[j]
            change = "added" if i is None else "removed"
            subject = f"line {((j if i is None else i) or 0) + 1}"
            rows.append(
                RunRow(fact="code", subject=subject, before=texts[0], after=texts[1], same=False, change=change)
            )
    yield from rows[:MOST_ROWS]
    if right and not rows:
        words = amount(len(right), "line")
        yield RunRow(fact="code", subject="all lines", before=words, after=words, same=True)


def _graphs(before: Report, after: Report) -> Iterator[RunRow]:
    for earlier, later in _pairs(before.frames, after.frames):
        for index in range(max(len(each.graphs) if each is not None else 0 for each in (earlier, later))):
            graphs = [each.graphs[index] if each and index < len(each.graphs) else None for each in (earlier, later)]
            frame = later or earlier
            assert frame is not None
            for row in _graph_rows(*graphs):
                yield replace(row, frame=frame.name, graph=index)


def _pairs(before: Sequence[Frame], after: Sequence[Frame]) -> Iterator[tuple[Frame | None, Frame | None]]:
    """Pair the functions of two runs that have the same name, and the other functions in order."""
    names = {(frame.name, frame.engine): frame for frame in before}
    rest = [frame for frame in before if (frame.name, frame.engine) not in {(each.name, each.engine) for each in after}]
    for frame in after:
        yield names.get((frame.name, frame.engine)) or (rest.pop(0) if rest else None), frame
    yield from ((frame, None) for frame in rest)


def _graph_rows(before: Graph | None, after: Graph | None) -> Iterator[RunRow]:
    if before is None or after is None:
        words = [f"{each.status}, {_ops(each)}" if each is not None else "" for each in (before, after)]
        change = "added" if before is None else "removed"
        yield RunRow(fact="graph", subject="the graph", before=words[0], after=words[1], same=False, change=change)
        return
    if before.status != after.status:
        yield _row("graph", "the graph", before.status, after.status)
    for name, part in PARTS.items():
        nodes = [[node for node in graph.nodes if (node.stage, node.part) == part] for graph in (before, after)]
        if any(nodes):
            yield from _node_rows(name, *nodes)
    mutated = [{row.name: mutation(row) for row in graph.inputs if row.mutated} for graph in (before, after)]
    yield from _rows("mutation", "mutated inputs", *mutated)
    outputs = [[row for row in graph.outputs if not row.part_of] for graph in (before, after)]
    # The names of outputs depend on the variables that exist, so outputs are paired in order.
    pairs = list(zip_longest(*outputs))
    names = [(right or left).name for left, right in pairs]
    relations = [{name: pair[n].relation for name, pair in zip(names, pairs, strict=True) if pair[n]} for n in (0, 1)]
    yield from _rows("output", "outputs", *relations)
    yield from _saved_rows(before, after)
    yield from _kernel_rows(before.kernels, after.kernels)
    yield from _rows("guard", "guards", *[_guard_sentences(graph) for graph in (before, after)])
    took = duration(before.duration_ns), duration(after.duration_ns)
    change = "measured once in each run, not compared"
    yield RunRow(fact="time", part="compilation", subject="aotlab", before=took[0], after=took[1], change=change)


def _guard_sentences(graph: Graph) -> dict[str, str]:
    """Map each value that the graph guards to the sentences of its guards."""
    sentences: dict[str, list[str]] = {}
    for guard in graph.guards:
        sentences.setdefault(guard.subject, []).append(guard.sentence)
    return {subject: "; ".join(each) for subject, each in sentences.items()}


def _rows(fact: str, things: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[RunRow]:
    """Compare the things of two graphs by name: first their number, then each thing that differs."""
    names = [name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)]
    if before or after:
        row = _row(fact, f"all {things}", str(len(before)), str(len(after)))
        yield replace(row, same=not names, change=_differ(len(names)))
    for name in names[:MOST_ROWS]:
        yield _row(fact, name, before.get(name, ""), after.get(name, ""))


def _row(fact: str, subject: str, before: str, after: str, change: str = "", part: str = "") -> RunRow:
    same = before == after
    change = change or ("" if same else "added" if not before else "removed" if not after else "")
    return RunRow(fact=fact, part=part, subject=subject, before=before, after=after, same=same, change=change)


def _differ(count: int) -> str:
    return "" if not count else "1 differs" if count == 1 else f"{count:,} differ"


def _ops(graph: Graph) -> str:
    return amount(sum(node.op == "call_function" and node.stage == "trace" for node in graph.nodes), "op")


def _saved_rows(before: Graph, after: Graph) -> Iterator[RunRow]:
    """Compare the saved values: values of the same code, dtype and sizes are a pair."""
    if not before.saved and not after.saved:
        return
    left, right = (sum(known_size(row.nbytes) for row in graph.saved) for graph in (before, after))
    change = f"{'+' if right > left else '−'}{data_size(abs(right - left))}" if left != right else ""
    yield _row("saved", "all values", memory(before.saved), memory(after.saved), change)
    counts = [Counter(_value(row, graph) for row in graph.saved) for graph in (before, after)]
    for value in dict.fromkeys([*counts[0], *counts[1]]):
        if counts[0][value] != counts[1][value]:
            change = "" if counts[0][value] and counts[1][value] else "removed" if counts[0][value] else "added"
            yield _row("saved", value, times(counts[0][value]), times(counts[1][value]), change)


def _value(row: Saved, graph: Graph) -> str:
    users = {each.name: each.user_name for each in graph.placeholders}
    origin = f"input {users.get(row.name, '')}".strip() if row.is_input else row.line.code if row.line else row.module
    return f"{row.tensor.dtype}{sizes(row.tensor.shape)}{f' of {origin}' if origin else ''}"


# --- nodes -------------------------------------------------------------------------------------------------------


def _node_rows(part: str, before: Sequence[Node], after: Sequence[Node]) -> Iterator[RunRow]:
    """Compare the nodes of two graphs: first their number, then each node that differs."""
    keys = [_key(node) for node in before], [_key(node) for node in after]
    pairs = _with_moved(aligned(*keys, loosely=_op), *keys)
    partners = {before[i].name: after[j].name for i, j in pairs if i is not None and j is not None}
    rows = []
    for i, j in pairs:
        left, right = None if i is None else before[i], None if j is None else after[j]
        change = _node_change(left, right, partners)
        if change:
            name = next(node.name for node in (right, left) if node is not None)
            texts = ["" if node is None else _words(node) for node in (left, right)]
            rows.append(
                RunRow(fact="node", part=part, subject=name, before=texts[0], after=texts[1], same=False, change=change)
            )
    words = [amount(sum(node.op == "call_function" for node in nodes), "op") for nodes in (before, after)]
    yield replace(_row("node", "all nodes", words[0], words[1], _differ(len(rows)), part), same=not rows)
    yield from rows[:MOST_ROWS]
    if len(rows) > MOST_ROWS:
        more = f"{len(rows) - MOST_ROWS:,} more nodes differ"
        yield RunRow(fact="node", part=part, subject="…", before=more, after=more, same=False)


def _with_moved(
    pairs: list[tuple[int | None, int | None]], before: Sequence[Hashable], after: Sequence[Hashable]
) -> list[tuple[int | None, int | None]]:
    """Pair equal nodes at other positions: a node that was removed at one place and added at another has moved."""
    lost: dict[Hashable, list[int]] = {}
    for i, j in reversed(pairs):
        if i is not None and j is None:
            lost.setdefault(before[i], []).append(i)
    found = [(lost[after[j]].pop() if i is None and j is not None and lost.get(after[j]) else i, j) for i, j in pairs]
    moved = {i for (i, _), (old, _) in zip(found, pairs, strict=True) if i is not None and old is None}
    return [(i, j) for i, j in found if j is not None or i not in moved]


def _key(node: Node) -> tuple[Hashable, ...]:
    return (*_op(node), node.dtype, node.shape, node.module, None if node.line is None else node.line.code)


def _op(node: Node | tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """Return the op of a node, or of the key of a node."""
    return node[:2] if isinstance(node, tuple) else (node.op, node.target if node.op == "call_function" else "")


def _node_change(before: Node | None, after: Node | None, partners: dict[str, str]) -> str:
    if before is None or after is None:
        return "added" if before is None else "removed"
    if (before.dtype, before.device) != (after.dtype, after.device):
        return "other dtype" if before.dtype != after.dtype else "other device"
    if before.shape != after.shape:
        return "other shape"
    # An input that has no partner was added or removed itself.
    return "" if [partners.get(name) for name in before.inputs] == [*after.inputs] else "other inputs"


def _words(node: Node) -> str:
    value = f" {node.dtype}{sizes(node.shape)}" if node.dtype is not None and node.shape is not None else ""
    op = node.target.removesuffix(".default") if node.op == "call_function" else node.op
    inputs = f"({', '.join(node.inputs)})" if node.inputs else ""
    return f"{op}{inputs}{value}"


def aligned(
    before: Sequence[Hashable],
    after: Sequence[Hashable],
    *,
    loosely: Callable[[tuple[Hashable, ...]], Hashable] | None = None,
) -> list[tuple[int | None, int | None]]:
    """Align two sequences, and return the pairs of indices in order.

    An element without partner has None as its partner. If ``loosely`` is given, elements between two pairs for which it
    returns the same value become pairs, too.
    """
    start = next(
        (n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
    )
    stop = 0
    while stop < min(len(before), len(after)) - start and before[-1 - stop] == after[-1 - stop]:
        stop += 1
    left, right = before[start : len(before) - stop], after[start : len(after) - stop]
    pairs: list[tuple[int | None, int | None]] = [(n, n) for n in range(start)]
    for tag, i, i2, j, j2 in SequenceMatcher(None, *_distinct(left, right), autojunk=False).get_opcodes():
        if tag == "equal":
            pairs += [(start + i + n, start + j + n) for n in range(i2 - i)]
        elif loosely is not None and tag == "replace":
            inner = aligned([loosely(each) for each in left[i:i2]], [loosely(each) for each in right[j:j2]])  # type: ignore[arg-type]
            pairs += [(None if a is None else start + i + a, None if b is None else start + j + b) for a, b in inner]
        else:
            pairs += [(start + n, None) for n in range(i, i2)] + [(None, start + n) for n in range(j, j2)]
    return pairs + [(len(before) - n, len(after) - n) for n in range(stop, 0, -1)]


def _distinct(before: Sequence[Hashable], after: Sequence[Hashable]) -> tuple[Sequence[Hashable], Sequence[Hashable]]:
    """Return the sequences; if too many of their elements are equal, each with the number of its occurrence."""
    counts = Counter(before), Counter(after)
    if sum(count * counts[1][key] for key, count in counts[0].items()) <= _MOST_PAIRS:
        return before, after
    numbered: list[list[Hashable]] = []
    for sequence in (before, after):
        so_far: Counter[Hashable] = Counter()
        numbered.append([])
        for each in sequence:
            so_far[each] += 1
            numbered[-1].append((each, so_far[each]))
    return numbered[0], numbered[1]


def _kernel_rows(before: Sequence[Kernel], after: Sequence[Kernel]) -> Iterator[RunRow]:
    """Compare the kernels: their numbers, and those whose source differs."""
    if not before and not after:
        return
    languages = [Counter(each.language for each in kernels) for kernels in (before, after)]
    words = [", ".join(f"{count} {language}" for language, count in sorted(each.items())) for each in languages]
    counts = [Counter(map(_kernel, kernels)) for kernels in (before, after)]
    rows = []
    for kernel in (*before, *after):
        key = _kernel(kernel)
        numbers = [each.pop(key, 0) for each in counts]
        if numbers[0] != numbers[1]:
            texts = [f"{number} × {kernel.kind}, {kernel.language}{_resources(kernel)}" for number in numbers]
            rows.append(
                _row(
                    "kernel",
                    kernel.name,
                    *[text if number else "" for text, number in zip(texts, numbers, strict=True)],
                )
            )
    yield replace(_row("kernel", "all kernels", words[0], words[1], _differ(len(rows))), same=not rows)
    yield from rows[:MOST_ROWS]


def _kernel(kernel: Kernel) -> tuple[str, ...]:
    """Return the facts that two equal kernels have in common.

    The name of a generated kernel has a number, and is in its source, so it is taken out. The source of a call of a
    library has the names of buffers, so the name of the function is used.
    """
    code = kernel.name if kernel.language == "extern" else kernel.source.replace(kernel.name, "")
    return kernel.kind, kernel.language, code, _resources(kernel)


def _resources(kernel: Kernel) -> str:
    numbers = {
        "registers": kernel.registers, "bytes shared": kernel.shared_bytes, "bytes spilled": kernel.spilled_bytes,
        "blocks": kernel.blocks,
    }  # fmt: skip
    return "".join(f", {number} {name}" for name, number in numbers.items() if number is not None)


# --- times -------------------------------------------------------------------------------------------------------


def _times(before: Report, after: Report) -> Iterator[RunRow]:
    """Compare the times of the calls. No row names a factor that a second measurement could reverse."""
    names = {later.name: earlier.name for earlier, later in _pairs(before.frames, after.frames) if earlier and later}
    earlier = {(row.frame, row.graph, row.phase, row.engine): row for row in before.timing_rows}
    pairs = {}
    for row in after.timing_rows:
        key = row.graph, row.phase, row.engine
        if (other := earlier.get((names.get(row.frame or "", row.frame), *key))) is not None:
            pairs[row.frame, *key] = other, row
    for (frame, graph, phase, engine), (other, row) in pairs.items():
        subject = "stock torch.compile" if engine == "upstream" else engine
        change, same = _time_change(other, row)
        if same is False and _machine(before) != _machine(after):
            change, same = "not comparable: other machine", None
        elif same is False and engine != "eager" and (eager := pairs.get((frame, graph, phase, "eager"))):
            # Eager is the control. If its time differs, the machine or the model differs.
            control, unchanged = _time_change(*eager)
            if unchanged is False:
                change, same = f"not comparable: eager is {control}", None
        yield RunRow(
            frame=frame, graph=graph, fact="time", part=phase, subject=subject,
            before=_time(other), after=_time(row), same=same, change=change,
        )  # fmt: skip


def _time(row: TimingRow) -> str:
    return f"{duration(row.median_ns)} ({duration(row.p10_ns)} to {duration(row.p90_ns)})"


def _time_change(before: TimingRow, after: TimingRow) -> tuple[str, bool | None]:
    """Say how a time changed, and whether it is the same within the noise; None if that is unknown.

    The noise is the range from the 10th to the 90th percentile of both measurements, widened by the difference between
    two measurements of the same code (the A/A ratio).
    """
    if reason := before.incomparable or after.incomparable:
        return reason, None
    if min(before.repeats, after.repeats) < _FEWEST_CALLS:
        return f"not comparable: fewer than {_FEWEST_CALLS} calls", None
    noise = max(QUIET, *(abs(each.again - 1) for each in (before, after) if each.again > 0))
    if before.p10_ns <= after.p90_ns * (1 + noise) and after.p10_ns <= before.p90_ns * (1 + noise):
        return "no difference beyond the noise", True
    ratio = before.median_ns / max(1, after.median_ns)
    return (f"about {ratio:.1f}× faster" if ratio > 1 else f"about {1 / max(ratio, 1e-9):.1f}× slower"), False
