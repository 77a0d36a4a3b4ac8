"""The time line of a report: its graph breaks and recompiles as moments, and its export for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from aotlab.report.model import Frame, GraphBreakRow, Report, TimelineRow

#: The stages of the rows that are moments and have no duration.
GRAPH_BREAK, RECOMPILE = "graph break", "recompile"


def with_moments(
    rows: Iterable[TimelineRow], frames: Sequence[Frame], breaks: Sequence[GraphBreakRow]
) -> tuple[TimelineRow, ...]:
    """Add a row for each recompile, at the begin of the new compilation, and for each graph break of known time.

    A graph that an earlier run compiled is no recompile of this run.
    """
    rows = list(rows)
    begins: dict[tuple[str | None, int | None], TimelineRow] = {}
    for row in sorted(rows, key=lambda row: row.start_ns):
        begins.setdefault((row.frame, row.graph), row)
    moments = [
        TimelineRow(
            process=begin.process,
            frame=frame.name,
            graph=graph.index,
            phase=graph.misses[0].sentence,
            stage=RECOMPILE,
            start_ns=begin.start_ns,
            duration_ns=0,
            engine=frame.engine,
        )
        for frame in frames
        for graph in frame.graphs
        if graph.misses and not graph.reused and (begin := begins.get((frame.name, graph.index))) is not None
    ]
    moments += [
        TimelineRow(
            phase=", at ".join(filter(None, (each.words, each.where))),
            stage=GRAPH_BREAK,
            start_ns=each.at_ns,
            duration_ns=0,
        )
        for each in breaks
        if each.at_ns > 0
    ]
    return tuple(sorted([*rows, *moments], key=lambda row: row.start_ns))


def write_perfetto(report: Report, path: Path) -> None:
    """Write the time line in Chrome's trace format, which https://ui.perfetto.dev and chrome://tracing read."""
    processes = {name: number for number, name in enumerate(dict.fromkeys(row.process for row in report.timeline_rows))}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name or report.name or "aotlab"}}
        for name, number in processes.items()
    ]
    for row in report.timeline_rows:
        event = {
            "name": row.phase,
            "cat": row.stage,
            "ts": row.start_ns / 1000,
            "pid": processes[row.process],
            "tid": row.thread,
            "args": {"frame": row.frame, "graph": row.graph, "engine": row.engine},
        }
        moment = row.stage in (GRAPH_BREAK, RECOMPILE)
        events.append(event | ({"ph": "i", "s": "p"} if moment else {"ph": "X", "dur": row.duration_ns / 1000}))
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
