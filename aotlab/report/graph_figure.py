"""Draw a report's largest graph, module by module, as a matplotlib figure; see `aotlab.report.figures`.

Each module has one row. Its forward is a box on the left, read from top to bottom, and its backward is a box on the
right, read from bottom to top. The order of the modules is the layout: no algorithm moves the boxes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from aotlab.report.figures import INK, empty_figure, new_figure, own_style, shortened
from aotlab.report.markup import clean
from aotlab.report.model import Frame, Graph, Node, Report
from aotlab.report.text import data_size, place

#: The colours of boxes, saved values and frames (after Okabe and Ito).
_FORWARD, _BACKWARD, _SAVED, _MUTATED = "#8dcdf1", "#f0c24b", "#0072b2", "#d55e00"
#: The colour of text in a box.
_TEXT = "#1a1a1a"

#: A figure has at most this many rows.
_MOST_ROWS = 28
#: The horizontal extent of a box of the forward, and of a box of the backward.
_LEFT, _RIGHT = (0.0, 2.0), (3.2, 4.4)
#: The width in points of the line of all saved bytes of the row that saves most.
_WIDEST = 7.0
#: The title of a row has at most this many characters.
_MOST_CHARACTERS = 34


@dataclass(slots=True)
class _Row:
    """One module, one line of code or one op: its nodes in both halves, and the bytes that it saves for other rows.

    ``y`` is the place from the top.
    """

    title: str
    y: int
    forward: list[Node] = field(default_factory=list)
    backward: list[Node] = field(default_factory=list)
    saves: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    mutated: list[str] = field(default_factory=list)


def graph_figure(report: Report) -> Figure:
    """Draw the graph with the most nodes, forward and backward, with the bytes that each module saves.

    Thick lines lead from the module that saves values to the module whose backward reads them first; the width shows
    the bytes. Thin arrows show which module reads results of which other module. A module that computes the new
    value of a mutated input has a frame.

    Parameters
    ----------
    report
        A report. If it has no nodes, the figure says so.

    Returns
    -------
    matplotlib.figure.Figure
        A figure that is not registered with pyplot. Display it, or save it with its method ``savefig``.
    """
    graphs = [(frame, graph) for frame in report.frames for graph in frame.graphs if _ops(graph)]
    with own_style():
        if not graphs:
            return empty_figure("There is no graph to draw: the report has no nodes.")
        frame, graph = max(graphs, key=lambda each: len(_ops(each[1])))
        rows, edges = _rows(graph)
        height = max(row.y for row in rows) + 1
        figure = new_figure(0.9 + 0.36 * height)
        axes = figure.add_subplot()
        _draw_boxes(axes, rows)
        _draw_edges(axes, rows, edges)
        _draw_saved(axes, rows)
        axes.set_title(_title(frame, graph, len(graphs)), loc="left", fontsize=10)
        axes.set_xlim(_LEFT[0] - 0.6, _RIGHT[1] + 0.6)
        axes.set_ylim(height - 0.4, -1.1)
        axes.set_axis_off()
    return figure


def _title(frame: Frame, graph: Graph, graphs: int) -> str:
    number = f", graph {graph.index}" if len(frame.graphs) > 1 else ""
    saved = sum(each.new_bytes for each in graph.saved)
    note = f"; the largest of {graphs} graphs" if graphs > 1 else ""
    return f"{shortened(frame.name)}{number}: {len(_ops(graph))} ops, saves {data_size(saved)}{note}"


# --- the rows ----------------------------------------------------------------------------------------------------


def _ops(graph: Graph) -> list[Node]:
    """Return the ops of the forward and the backward, or of the joint graph if it was not divided."""
    for stage in ("partition", "trace", "capture"):
        ops = [node for node in graph.nodes if node.stage == stage and node.op not in ("placeholder", "output")]
        if ops:
            return ops
    return []


def _rows(graph: Graph) -> tuple[list[_Row], set[tuple[str, int, int]]]:
    """Divide the ops into rows. Return the rows, and the pairs of rows between which a value flows in each half."""
    ops = _ops(graph)
    title = _titles(ops)
    rows: list[_Row] = []
    places: dict[str, int] = {}
    owners: dict[tuple[str, str], int] = {}
    current = 0
    for node in ops:
        name = title(node)
        if name or not rows:
            current = places.setdefault(name, len(rows))
        if current == len(rows):
            rows.append(_Row(_shown(name, node), current))
        half = _half(node)
        (rows[current].backward if half == "backward" else rows[current].forward).append(node)
        owners[half, node.name] = current
    if all(len(row.forward) + len(row.backward) == 1 for row in rows):  # the ops of the backward, from bottom to top
        halves = [row for row in rows if row.forward], [row for row in rows if row.backward]
        for number, row in enumerate(halves[1], start=1):
            row.y = max(map(len, halves)) - number
    edges = {
        (_half(node), source, owners[_half(node), node.name])
        for node in ops
        for source in [owners.get((_half(node), name)) for name in node.inputs]
        if source is not None and source != owners[_half(node), node.name]
    }
    for saved in graph.saved:
        source = owners.get(("forward", saved.name))
        readers = [owners[key] for name in saved.used_by if (key := ("backward", name)) in owners]
        if source is not None and readers and saved.new_bytes:
            rows[source].saves[max(readers)] += saved.new_bytes
    for result in graph.results:
        if result.kind.startswith("mutated") and ("forward", result.name) in owners:
            rows[owners["forward", result.name]].mutated.append(str(result.target))
    return rows, edges


def _half(node: Node) -> str:
    return "backward" if "backward" in (node.part, node.phase if node.part == "joint" else "") else "forward"


def _titles(ops: Sequence[Node]) -> Callable[[Node], str]:
    """Choose the finest division into rows that fits: ops, lines of code, or modules to some depth.

    Return a function that names the row of a node. An op without a name belongs to the row of the op before it.
    """
    deepest = max(len(node.module.split(".")) if node.module else 0 for node in ops)
    choices: list[Callable[[Node], str]] = [
        *[lambda node, depth=depth: _module(node, depth) for depth in range(deepest, 0, -1)],
        *([] if deepest else [lambda node: node.name, _line]),
    ]
    fitting = (each for each in choices if len({each(node) for node in ops}) <= _MOST_ROWS)
    return next(fitting, lambda node: "all ops")


def _module(node: Node, depth: int) -> str:
    """Return the path of the node's module to some depth, or the line of code of a node without a module."""
    return ".".join(node.module.split(".")[:depth]) if node.module else _line(node)


def _line(node: Node) -> str:
    return f"{node.line.file}:{node.line.line}" if node.line else ""


def _shown(key: str, node: Node) -> str:
    """Return the text of a row: the end of a module's path, or the beginning of a line of code."""
    if node.line is None or key != _line(node):
        text = key or node.name
        return text if len(text) <= _MOST_CHARACTERS else f"…{text[1 - _MOST_CHARACTERS :]}"
    code = clean(node.line.code.strip() or place(node.line))
    return code if len(code) <= _MOST_CHARACTERS else f"{code[: _MOST_CHARACTERS - 1]}…"


# --- drawing -----------------------------------------------------------------------------------------------------


def _draw_boxes(axes: Axes, rows: Sequence[_Row]) -> None:
    for row in rows:
        if row.forward:
            written = f"writes {row.mutated[0] if len(row.mutated) == 1 else f'{len(row.mutated)} inputs'}"
            _draw_box(axes, _LEFT, row.y, _FORWARD, row.title, row.forward, written if row.mutated else "")
        if row.backward:
            recomputed = sum(node.phase == "forward" for node in row.backward)
            note = f"{recomputed} recomputed" if recomputed else ""
            _draw_box(axes, _RIGHT, row.y, _BACKWARD, "" if row.forward else row.title, row.backward, note)
    axes.text(sum(_LEFT) / 2, -0.75, "forward ↓", ha="center", fontsize=9)
    if any(row.backward for row in rows):
        axes.text(sum(_RIGHT) / 2, -0.75, "backward ↑", ha="center", fontsize=9)


def _draw_box(
    axes: Axes, extent: tuple[float, float], y: int, colour: str, title: str, nodes: Sequence[Node], note: str
) -> None:
    """Draw a box. Its text is the title, the number of ops if there are several or no title, and the note."""
    left, right = extent
    box = Rectangle((left, y - 0.34), right - left, 0.68, facecolor=colour, edgecolor="none")
    axes.add_patch(box)
    if note.startswith("writes"):
        axes.add_patch(Rectangle((left, y - 0.34), right - left, 0.68, fill=False, edgecolor=_MUTATED, linewidth=1.3))
    count = "" if title and len(nodes) == 1 else f"{len(nodes)} op{'s' * (len(nodes) > 1)}"
    facts = ", ".join(filter(None, [count, note]))
    text = f"{title}\n{facts}" if title and facts else title or facts
    axes.text((left + right) / 2, y, text, ha="center", va="center", fontsize=6.5, linespacing=1.1, color=_TEXT)


def _draw_edges(axes: Axes, rows: Sequence[_Row], edges: set[tuple[str, int, int]]) -> None:
    """Draw a short arrow between neighbours, and an arc beside the boxes between other rows."""
    for half, source, target in sorted(edges):
        begin, end = rows[source].y, rows[target].y
        left, right = _RIGHT if half == "backward" else _LEFT
        sign = 1 if end > begin else -1
        if abs(end - begin) == 1:
            ends = ((left + right) / 2, begin + 0.34 * sign), ((left + right) / 2, end - 0.34 * sign)
            style = "arc3"
        else:
            outer = right if half == "backward" else left
            ends = (outer, begin + 0.1 * sign), (outer, end - 0.1 * sign)
            bend = min(0.3, 1.5 / abs(end - begin)) * (-1 if (half == "backward") == (sign > 0) else 1)
            style = f"arc3,rad={bend}"
        arrow = FancyArrowPatch(
            *ends, connectionstyle=style, arrowstyle="-|>", mutation_scale=6, color=INK, linewidth=0.7, alpha=0.8
        )
        axes.add_patch(arrow)


def _draw_saved(axes: Axes, rows: Sequence[_Row]) -> None:
    most = max((sum(row.saves.values()) for row in rows), default=0)
    for row in rows:
        for target, nbytes in row.saves.items():
            width = max(0.6, _WIDEST * nbytes / most)
            ends = [row.y, rows[target].y]
            axes.plot([_LEFT[1], _RIGHT[0]], ends, color=_SAVED, linewidth=width, alpha=0.75, zorder=0)
        if row.saves:
            text = data_size(sum(row.saves.values()))
            axes.text(_LEFT[1] + 0.05, row.y - 0.1, text, va="bottom", fontsize=7)
