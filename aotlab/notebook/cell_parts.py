"""Tell how each part of a cell ran (compiled, eagerly, or as plain Python), and why.

A part is a region, a function that the cell defines, or lines that do not go to Dynamo.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from aotlab.notebook.cell import PythonLines
from aotlab.notebook.cell_recording import CellRecording
from aotlab.notebook.cell_state import CellState, PartState
from aotlab.notebook.classify import LEFT_OUT
from aotlab.notebook.graphs import CapturedGraph
from aotlab.notebook.traced import TracedFunction
from aotlab.report.how_lines_ran import Lines, with_ways
from aotlab.report.model import CellPart, Frame
from aotlab.report.text import RECOMPILE_LIMIT, is_of_cell, places_in

#: The references that the results of a part may have been compared with, the weakest one first: no reference, the
#: captured graph run eagerly, the part's Python code run eagerly.
_COMPARISONS = ("nothing", "graph", "python")
#: Dynamo reports this about a generator if it does not capture the function that uses the generator.
_GENERATOR = "Attempt to trace generator"


def cell_parts(state: CellState, frames: Sequence[Frame]) -> Iterator[CellPart]:
    """Describe the parts of a cell and how each of their lines ran.

    Parameters
    ----------
    state
        The state of the cell.
    frames
        The frames of the cell's report.
    """
    captured: dict[int, set[str]] = {}
    calls: set[int] = set()
    traced = {frame.name: _traced_lines(frame, state) for frame in frames}
    for graph in state.graphs():
        if graph.compiled.entries:
            inside = graph.lines if isinstance(graph, CapturedGraph) else traced.get(graph.name, ())
            for line in inside:
                captured.setdefault(line, set()).add(graph.name)
            calls |= {each.line for each in graph.callers if each.file == state.file}
    recording = state.recording
    lines = Lines(captured=captured, calls=calls, stops=recording.stops, python=recording.library_lines)
    return with_ways(_parts(state, frames, captured), lines, state.source)


def _traced_lines(frame: Frame, state: CellState) -> set[int]:
    """Return the lines of the cell that the direct frontend has traced for the function or region of ``frame``.

    The lines of a graph are stored in ``state``, because a graph can have thousands of nodes.
    """
    every: set[int] = set()
    for graph in (each for each in frame.graphs if each.frontend == "direct"):
        nodes, lines = state.traced_lines.get(graph.entry, ((), set()))
        if nodes is not graph.nodes:
            lines = set()
            for node in graph.nodes:
                for line in () if node.line is None else (node.line, *node.line.callers):
                    if is_of_cell(line, state.file):
                        lines.add(line.line)
                    if line.function in (frame.name, "<module>"):  # the remaining lines belong to the callers
                        break
            state.traced_lines[graph.entry] = graph.nodes, lines
        every |= lines
    return every


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frames:
    """Facts from the frames of a report. Frames are given by their names.

    Attributes
    ----------
    compiled
        The frames that have a compiled graph and ran at least one call with it.
    refusals
        The message of the first refusal, by frame.
    captured
        The frames whose graphs contain ops of a line, by line number.
    """

    compiled: set[str]
    refusals: Mapping[str, str]
    captured: Mapping[int, set[str]]


def _parts(state: CellState, frames: Sequence[Frame], captured: Mapping[int, set[str]]) -> list[CellPart]:
    compiled = [
        frame.name
        for frame in frames
        if frame.calls.compiled and any(graph.status == "compiled" for graph in frame.graphs)
    ]
    refusals = {frame.name: frame.refusals[0].message for frame in frames if frame.refusals}
    facts = _Frames(compiled=set(compiled), refusals=refusals, captured=captured)
    parts: list[CellPart] = []
    for part in list(state.parts.values()):
        if part.replaced:
            continue
        how, used, reason = _how(part, state.recording, facts)
        last_line, error_line = part.last_line, state.run.error_line
        if error_line is not None and part.calls == 1 and part.first_line <= error_line:
            for first, last in part.statements:
                if error_line < first:  # the error ended the cell before this statement
                    last_line = min(last_line, first - 1)
                    parts.append(CellPart(first_line=first, last_line=last, how="not run"))
        compared = _compared(part) if how == "compiled" else ""
        row = CellPart(first_line=part.first_line, last_line=last_line, how=how, frames=used, reason=reason)
        parts.append(replace(row, compared=compared))
    functions = {part.first_line for part in state.parts.values() if part.function is not None}
    for each in state.code.python:
        if each.first_line not in functions:
            parts.append(_python_part(each, state.run.finished_lines, captured))
    for index, called in enumerate(parts):  # a function in its callers' graphs was compared together with them
        callers = {one.compared for one in parts if one.compared and set(one.frames) & set(called.frames)}
        if called.how == "compiled" and not called.compared and callers:
            parts[index] = replace(called, compared=min(callers, key=_COMPARISONS.index))
    return _merged(sorted(parts, key=lambda part: (part.first_line, part.last_line)))


def _how(part: PartState, recording: CellRecording, frames: _Frames) -> tuple[str, tuple[str, ...], str]:
    """Return how a part ran, the names of the frames whose graphs it ran, and the reason if it was not compiled."""
    used = tuple([name for name in dict.fromkeys(each.name for each in part.graphs) if name in frames.compiled])
    lines = range(part.first_line, part.last_line + 1) if part.function is not None else ()
    inside = tuple(sorted(set().union(*[frames.captured.get(line, ()) for line in lines])))
    reason, library = _reasons(part, recording, frames.refusals)
    if part.differs and part.in_eager:
        return "eager", (), part.differs
    if part.off:
        return "eager", used, "aotlab is switched off: aotlab.disable() was called"
    if part.interrupted and part.calls <= 1:
        return "not run", used, "interrupted while it was being compiled or run"
    if inside and not used:
        return "compiled", inside, ""  # as a part of the graphs of functions that call this one
    if not part.calls:
        return "not run", used, "" if part.function is None else "a function that was not called yet"
    if used:
        return "compiled", used, part.differs or reason
    if reason:
        return "eager", used, reason
    if library:
        statements = part.statements or ((part.first_line, part.last_line),)
        library_lines = recording.library_lines
        every = all(library_lines.intersection(range(first, last + 1)) for first, last in statements)
        return "python" if every else "eager", used, library
    if part.function is not None:
        return "eager", used, "Dynamo captured nothing in its first call, and does not try again"
    return "python", used, "no computation with tensors"


def _reasons(part: PartState, recording: CellRecording, refusals: Mapping[str, str]) -> tuple[str, str]:
    """Return the first reason why a part was not compiled, and the report's words for a call of a library in it.

    Either text is "" if there is nothing to say. The call of a library that does not use tensors is returned
    separately, because Python is the right way to run such a call.
    """
    names = dict.fromkeys(each.name for each in part.graphs)
    refused = [refusals[each] for each in names if each in refusals]
    refused += [graph.refused for graph in part.graphs if graph.refused is not None]
    libraries = recording.libraries
    library = next((libraries[each] for each in part.reasons if each in libraries), "")
    # Dynamo also reports the generators in a library, once in a process.
    others = [each for each in part.reasons if each not in libraries and not (library and _GENERATOR in each)]
    others.sort(key=lambda each: each != RECOMPILE_LIMIT)
    reasons = [places_in(each.strip().splitlines()[0]) for each in (*refused, *others) if each.strip()]
    return next(iter(reasons), ""), library


def against(graph: CapturedGraph | TracedFunction) -> str:
    """Return the reference that the entries of ``graph`` are compared with.

    For the direct frontend it is ``"python"``: the function itself, run eagerly. For Dynamo it is ``"graph"``: the
    graph that Dynamo captured, run eagerly.
    """
    return "python" if isinstance(graph, TracedFunction) else "graph"


def _compared(part: PartState) -> str:
    """Return the reference that all compiled entries of a part were compared with, one of `_COMPARISONS`.

    If the entries have different references, the weakest one is returned. If the part has no entries, "" is returned.
    """
    every = [(graph, entry.number) for graph in part.graphs for entry in graph.compiled.entries]
    if not every:
        return ""  # the part's lines are in the graphs of its callers
    if any(number not in graph.verified for graph, number in every):
        return "nothing"
    whole = all(against(graph) == "python" or number in part.as_python for graph, number in every)
    return "python" if whole else "graph"


def _python_part(lines: PythonLines, reached: int, captured: Mapping[int, set[str]]) -> CellPart:
    run = lines.first_line <= reached
    inside = [captured[line] for line in range(lines.first_line, lines.last_line + 1) if line in captured]
    if run and inside and lines.reason in ("defines a function", "defines a class"):  # called by compiled lines
        return CellPart(
            first_line=lines.first_line,
            last_line=lines.last_line,
            how="compiled",
            frames=tuple(dict.fromkeys(sorted(set().union(*inside)))),
        )
    eager = lines.advice or lines.reason.endswith(LEFT_OUT)
    return CellPart(
        first_line=lines.first_line,
        last_line=lines.last_line,
        how="not run" if not run else "eager" if eager else "python",
        reason=f"{lines.reason}; {lines.advice}" if run and lines.advice else lines.reason if run else "",
    )


def _merged(parts: Sequence[CellPart]) -> list[CellPart]:
    """Join neighbouring lines that ran in the same way for the same reason."""
    merged: list[CellPart] = []
    for part in parts:
        last = merged[-1] if merged else None
        if (
            last is not None
            and not part.frames
            and not last.frames
            and (last.how, last.reason) == (part.how, part.reason)
        ):
            merged[-1] = replace(last, last_line=max(last.last_line, part.last_line))
        else:
            merged.append(part)
    return merged
