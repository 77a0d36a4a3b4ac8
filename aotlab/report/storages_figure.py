"""Draw the storages of a report's graphs, step by step, as a matplotlib figure; see `aotlab.report.figures`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from aotlab.report.figures import INK, empty_figure, new_figure, own_style, shortened
from aotlab.report.markup import clean
from aotlab.report.model import Access, Graph, Input, Output, Report, Step, Storage, Written
from aotlab.report.rows import extent, reach
from aotlab.report.text import data_size, known_size
from aotlab.report.writes import Range, runs, stop_of

#: The colours of the bytes that a step makes, reads and writes (after Okabe and Ito), and their hatches.
_LOOKS = {"tensor": ("none", ""), "read": ("#0072b2", "...."), "written": ("#d55e00", "////")}

#: The figure shows at most this many storages, and at most this many steps of each.
_MOST_STORAGES, _MOST_STEPS = 6, 24

#: The longest label of a step, in characters.
_LONGEST = 44


@dataclass(frozen=True, slots=True)
class _Row:
    """A step or a tensor: its bytes in the storage, and those of them that are read and written."""

    label: str
    tensor: Sequence[Range]
    read: Sequence[Range] = ()
    written: Sequence[Range] = ()
    is_program: bool = True


def storages_figure(report: Report) -> Figure:
    """Draw the storages that are shared or written.

    There is one panel for each storage, with bytes from left to right and the steps of the program from top to bottom.
    A report of stock torch.compile has no steps. Then the rows are the tensors of the storage.

    Parameters
    ----------
    report
        A report. If none of its storages is shared or written, the figure says so.

    Returns
    -------
    matplotlib.figure.Figure
        A figure that is not registered with pyplot. Display it, or save it with its method ``savefig``.
    """
    graphs = [(frame, graph) for frame in report.frames for graph in frame.graphs]
    chosen = [(frame, graph, each) for frame, graph in graphs for each in graph.storages if _is_shared(graph, each)]
    with own_style():
        if not any(graph.storages for _, graph in graphs):
            return empty_figure("There are no storages: nothing was compiled.")
        if not chosen:
            return empty_figure("No storage is shared or written: each tensor has memory of its own.")
        shown = [(frame, graph, storage, list(_rows(graph, storage))) for frame, graph, storage in chosen]
        shown = sorted(shown, key=lambda each: -len(each[3]))[:_MOST_STORAGES]
        heights = [0.6 + 0.27 * min(len(rows), _MOST_STEPS) for *_, rows in shown]
        figure = new_figure(sum(heights) + 0.8)
        panels = figure.subplots(len(shown), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        for axes, (frame, _, storage, rows) in zip(panels, shown, strict=True):
            left_out = len(rows) - _MOST_STEPS
            note = f", the last {_MOST_STEPS} of {len(rows)} steps" if left_out > 0 else ""
            title = f"{shortened(frame.name)}: storage #{storage.number}, {data_size(storage.nbytes or 0)}{note}"
            axes.set_title(title, loc="left", fontsize=10)
            _draw(axes, rows[-_MOST_STEPS:], storage)
        handles = [
            Patch(facecolor="none", edgecolor=INK if colour == "none" else colour, hatch=hatch, label=label)
            for label, (colour, hatch) in _LOOKS.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _is_shared(graph: Graph, storage: Storage) -> bool:
    written = any(access.storage == storage.number for step in graph.steps for access in step.writes)
    mutated = any(span.mutated for span in storage.spans)
    return written or mutated or len(storage.spans) > 1 or storage.owner == "intermediate"


def _rows(graph: Graph, storage: Storage) -> Iterator[_Row]:
    """Yield the steps that touch a storage; without steps, its tensors."""
    for step in graph.steps:
        read, written, made = [_ranges(_in(each, storage)) for each in (step.reads, step.writes, step.makes)]
        if read or written or made:
            yield _Row(_label(step), [*made, *read, *written], read, written, step.kind == "call")
    if not graph.steps:
        rows: tuple[Input | Output, ...] = (*graph.inputs, *graph.outputs)
        tensors = {row.name: row.tensor for row in rows}
        for span in storage.spans:
            tensor = tensors.get(span.name)
            ranges = [] if tensor is None or reach(tensor) is None else _ranges(extent(tensor))
            yield _Row(shortened(f"{span.role} {span.name}{', mutated' if span.mutated else ''}"), ranges)
        if storage.written:
            yield _Row("written bytes", [], (), _ranges(storage.written))


def _label(step: Step) -> str:
    text = clean(step.text if step.line is None else f"line {step.line.line}: {step.text}")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _in(accesses: Iterable[Access], storage: Storage) -> list[Written]:
    return [each.bytes for each in accesses if each.storage == storage.number and each.bytes is not None]


def _ranges(windows: Sequence[Written]) -> list[Range]:
    """Return the runs of bytes in windows; for very many runs, the whole extent of each window."""
    found = runs(windows)
    return [(each.start, stop_of(each)) for each in windows] if found is None else found


def _draw(axes: Axes, rows: Sequence[_Row], storage: Storage) -> None:
    total = max([stop for row in rows for _, stop in row.tensor], default=1)
    nbytes = max(known_size(storage.nbytes or 0), total)
    for place, row in enumerate(rows):
        _bars(axes, row.tensor, place - 0.35, 0.7, ("none", ""))
        _bars(axes, row.read, place - 0.35, 0.35, _LOOKS["read"])
        _bars(axes, row.written, place, 0.35, _LOOKS["written"])
    ended = next((place for place, row in enumerate(rows) if not row.is_program), None)
    if ended:
        axes.axhline(ended - 0.5, color=INK, linewidth=1, linestyle="--")
        axes.annotate(
            "after the graph", (nbytes, ended - 0.5), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, nbytes)
    axes.set_xlabel("byte of the storage", fontsize=8)
    axes.patch.set_alpha(0.0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _bars(axes: Axes, ranges: Sequence[Range], bottom: float, height: float, look: tuple[str, str]) -> None:
    colour, hatch = look
    spans = [(start, stop - start) for start, stop in ranges]
    edge = INK if colour == "none" else colour
    axes.broken_barh(
        spans, (bottom, height), facecolor="none", edgecolor=edge, hatch=hatch, linewidth=0.8, clip_on=False
    )
