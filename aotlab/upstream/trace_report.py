"""Make a report from a folder that was recorded with ``TORCH_TRACE``."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import FrameSummary

from aotlab.errors import UserLine
from aotlab.report.dynamo_breaks import graph_break
from aotlab.report.environment import environment
from aotlab.report.model import Frame, GraphBreakRow, Report, TimelineRow, TimeRow
from aotlab.report.timeline import with_moments
from aotlab.upstream.compilations import Compilation, graph_of, is_empty, refusal_of, with_indices
from aotlab.upstream.frame_names import function_names, is_wrapper, stack_of
from aotlab.upstream.phases import REST, STAGES, Phase, phases_of
from aotlab.upstream.storages import numbered
from aotlab.upstream.trace_log import CompileId, Record, TraceLog, read_logs

_LACKS = (
    "The records of stock torch.compile contain no calls, and no storages except those of arguments: an output has one "
    "only if it is a view of an argument. A storage that two graphs use has two numbers."
)
_AGAIN = "To compile again, run the program with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1."
_BROKE_AT = re.compile(r"Graph break in user code at (.+):(\d+)")
_REASON = re.compile(r"Graph Break Reason: (.*?)(?:\n\s*\nUser code traceback|\Z)", re.DOTALL)
#: Records that belong to no compilation, and that are read.
_READ = frozenset({"str", "torch_version", "chromium_event", "dynamo_graph_break_reason"})
_LAST_LINE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.*)')


def read_trace(folder: str | Path, *, name: str = "") -> Report:
    """Read the logs of stock `torch.compile` that were recorded with ``TORCH_TRACE``, and return a report.

    The report has the tables of a report of aotlab's engine: arguments with their mutations, outputs, saved values,
    nodes with the user's lines, kernels, guards, recompiles, graph breaks, stages and times. The machine needs neither
    the recorded program nor its GPU. Nothing in the logs is executed.

    Parameters
    ----------
    folder
        The folder ``TORCH_TRACE``, with one log for each process, or one log file.
    name
        A title for the report. The default is the name of the folder.

    Returns
    -------
    Report
        The report. Facts that a log does not have are empty: calls, the storages and offsets of tensors that the
        graphs allocate, and the times of stages whose results came from a cache.

    Raises
    ------
    UsageError
        There is no such folder, or it contains no such log.

    Examples
    --------
    >>> report = aotlab.read_trace("/tmp/trace")  # doctest: +SKIP
    >>> report.to_html("report.html")  # doctest: +SKIP
    """
    here = environment(())
    logs = read_logs(folder)
    versions = [each for log in logs for each in log.records if each.kind == "torch_version"]
    recorded = replace(here, torch=_torch_version(versions), devices=(), threads=None)
    return replace(report_of(logs, name=name or Path(folder).name, again=_AGAIN), environment=recorded)


def report_of(logs: Sequence[TraceLog], *, name: str, again: str) -> Report:
    """Make a report from the records of one or several processes. The report has the environment of this process.

    ``again`` is a sentence that tells the user how to compile again what came from a cache.
    """
    frames: list[Frame] = []
    breaks: list[GraphBreakRow] = []
    notes: list[str] = []
    phases: list[Phase] = []
    timeline: list[TimelineRow] = []
    for log, process in zip(logs, _processes(logs), strict=True):
        of_log = phases_of(log.records)
        compilations = compilations_of(log, of_log)
        names: dict[CompileId, tuple[str, int]] = {}
        frames += _frames(log, compilations, process, names)
        phases += of_log
        timeline += timeline_rows(of_log, names, process.strip(" ()"))
        breaks += [_graph_break(each.payload) for each in log.records if each.kind == "dynamo_graph_break_reason"]
        notes += _notes(log, process, again)
    return Report(
        name=name,
        duration_ns=sum(each.own_ns for each in phases),
        environment=environment(()),
        frames=numbered(frames),
        graph_break_rows=tuple(breaks),
        time_rows=tuple(_times(phases)),
        timeline_rows=with_moments(from_zero(timeline), frames, breaks),
        notes=(_LACKS, *notes),
    )


def _processes(logs: Sequence[TraceLog]) -> list[str]:
    """Return for each log the text that tells its functions from those of other processes."""
    if len(logs) == 1:
        return [""]
    ranks = [next((each.rank for each in log.records if each.rank is not None), None) for log in logs]
    distinct = None not in ranks and len(set(ranks)) == len(logs)
    names = [f"rank {rank}" for rank in ranks] if distinct else [log.name for log in logs]
    return [f" ({name})" for name in names]


def compilations_of(log: TraceLog, phases: Sequence[Phase] | None = None) -> dict[CompileId, Compilation]:
    """Sort the records and the phases of a log by compilation."""
    compilations: dict[CompileId, Compilation] = {}
    for record in log.records:
        key = record.compile_id
        if key is not None:
            compilations.setdefault(key, Compilation(compile_id=key)).add(record)
    for phase in phases_of(log.records) if phases is None else phases:
        if phase.compile_id is not None:
            compilations[phase.compile_id].phases.append(phase)
    return compilations


def _frames(
    log: TraceLog,
    compilations: Mapping[CompileId, Compilation],
    process: str,
    names: dict[CompileId, tuple[str, int]],
) -> list[Frame]:
    """Make the frames of a process. Dynamo has one frame for all modules of libraries; each gets its own here.

    Enter in ``names`` the frame and the graph's number of each compilation.
    """
    by_frame: dict[tuple[int, int, str], list[Compilation]] = {}
    stacks: dict[tuple[int, int, str], list[UserLine]] = {}
    for key, compilation in compilations.items():
        start = compilation.last("dynamo_start")
        if is_empty(compilation):
            continue
        stack = [] if start is None else stack_of(start.data.get("stack"), log.files)
        module = function_names(stack)[0] if stack and is_wrapper(stack[-1]) else ""
        by_frame.setdefault((key.resets, key.frame, module), []).append(compilation)
        stacks[key.resets, key.frame, module] = stacks.get((key.resets, key.frame, module)) or stack
    frames: list[Frame] = []
    taken: list[str] = []
    for place, members in sorted(by_frame.items(), key=lambda each: each[0][:2]):
        stack, unnamed = stacks[place], f"frame {place[1]}"
        function, name = function_names(stack) if stack else (unnamed, unnamed)
        taken.append(name)
        same = taken.count(name)
        first = sum(len(frame.graphs) for frame in frames)
        numbers: dict[int | None, int] = {each.compile_id.number: n for n, each in enumerate(members)}
        graphs = [graph_of(each, n, first + n) for n, each in enumerate(members)]
        line = stack[-1] if stack else None
        refusals = [found for n, each in enumerate(members) if (found := refusal_of(each, n)) is not None]
        unique = f"{name}{f' #{same}' if same > 1 else ''}{process}"
        names.update({each.compile_id: (unique, n) for n, each in enumerate(members)})
        frames.append(
            Frame(
                name=unique,
                function=function,
                engine="upstream",
                line=line,
                graphs=tuple([with_indices(each, numbers) for each in graphs]),
                refusals=tuple([replace(each, line=each.line or line) for each in refusals]),
            )
        )
    return frames


def _graph_break(text: str) -> GraphBreakRow:
    """Make the row of a graph break from Dynamo's explanation."""
    place, reason, stack = _BROKE_AT.search(text), _REASON.search(text), _LAST_LINE.findall(text)
    at = None
    if place is not None:
        file, line = place[1], int(place[2])
        inside = next((each for each in stack if (each[0], int(each[1])) == (file, line)), ("", "", "", ""))
        at = FrameSummary(file, line, inside[2], lookup_line=False, line=inside[3])
    return graph_break(at, reason[1].strip() if reason is not None else text.strip(), 0)


def _notes(log: TraceLog, process: str, again: str) -> list[str]:
    """Return notes about compilations that came from a cache, and about lines that could not be read.

    ``again`` tells the user how to compile again.
    """
    hits = [each for each in log.records if each.kind.endswith("cache_hit")]
    notes = []
    if hits:
        kinds = sorted({each.kind.removesuffix("_cache_hit").replace("_", " ") for each in hits})
        notes.append(
            f"{len(hits)} results came from a cache ({', '.join(kinds)}){process}, so the log has no times of the "
            f"stages that made them. {again}"
        )
    unowned = Counter(each.kind for each in log.records if each.compile_id is None and each.kind not in _READ)
    if unowned:
        kinds = [f"{kind} ({count})" for kind, count in sorted(unowned.items())]
        notes.append(f"The log has records that belong to no compilation{process}: {', '.join(kinds)}.")
    if log.damaged:
        notes.append(f"{log.damaged} lines of {log.name} could not be read.")
    return notes


def _times(phases: Sequence[Phase]) -> Iterable[TimeRow]:
    """Return the time of each stage, and the number of compilations in which it took time."""
    for kind in (*[name for name, _, _ in STAGES], REST):
        own = [each for each in phases if each.stage == kind and each.own_ns]
        if own or kind == REST:
            count = len({each.compile_id for each in own})
            yield TimeRow(kind=kind, duration_ns=sum(each.own_ns for each in own), count=count, engine="upstream")


def timeline_rows(
    phases: Iterable[Phase], names: Mapping[CompileId, tuple[str, int]], process: str = ""
) -> Iterable[TimelineRow]:
    """Return the rows of the time line of a process. Their times are times of the clock."""
    for phase in phases:
        frame, graph = (None, None) if phase.compile_id is None else names.get(phase.compile_id, (None, None))
        yield TimelineRow(
            process=process,
            frame=frame,
            graph=graph,
            phase=phase.name,
            stage=phase.stage,
            start_ns=phase.start_ns,
            duration_ns=phase.end_ns - phase.start_ns,
            own_ns=phase.own_ns,
            thread=phase.thread,
            depth=phase.depth,
            engine="upstream",
        )


def from_zero(rows: Sequence[TimelineRow]) -> tuple[TimelineRow, ...]:
    """Count the times of a time line from the begin of its first phase."""
    begin = min((row.start_ns for row in rows), default=0)
    return tuple([replace(row, start_ns=row.start_ns - begin) for row in rows])


def _torch_version(records: Sequence[Record]) -> str:
    """Return the version of torch that wrote the logs, or "unknown": torch 2.11 does not write it."""
    for record in records:
        try:
            return str(json.loads(record.payload)["pytorch_version"])
        except (ValueError, KeyError, TypeError):
            continue
    return "unknown"
