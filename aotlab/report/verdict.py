"""Write the verdict: one line that says which functions were compiled, on which device, and whether they were verified.

For a cell the verdict also says which lines ran eagerly, and where graph breaks are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

from aotlab.report.engines import UPSTREAM, serving
from aotlab.report.model import Cell, CellPart, Frame, Graph, Refusal, Report, TimingRow
from aotlab.report.text import RECOMPILE_LIMIT, ROUNDED, amount, duration, first_line, listed, place_in

State = Literal["verified", "unverified", "different", "partly", "nothing", "idle", "running"]

#: Before its first use, a graph is compared with eager. If it differs, it is refused, and the message of the refusal
#: begins with these words.
DIFFERS = "its compiled form differs from eager"
#: The end of the reason why lines were not compiled, if they compute nothing with tensors.
NO_TENSORS = "no computation with tensors"
#: The endings of the reasons for lines that are not compiled because there is nothing to compile in them.
_NOTHING_TO_COMPILE = (NO_TENSORS, "imports", "defines a function", "defines a class")
#: Words in the reason for lines that aotlab could compile but deliberately does not compile.
BY_DESIGN = "which runs eagerly by design"
#: The reason why aotlab does not compile the step of an optimizer.
ROUNDS = f"{BY_DESIGN}: its captured form rounds differently than eager"
#: For each state of the verification: its `Verdict.status`.
_STATUS = {
    "verified": "equal to eager",
    "unverified": "not compared with eager",
    "different": "NOT equal to eager",
    "partly": "not all of it compared with eager",
}
#: For each value of `CellPart.compared`: the words for the code with which a line was compared.
_AGAINST = {"python": "Python", "graph": "the captured graph", "nothing": "nothing"}
#: The verdict contains at most this many characters of a reason; the page shows the whole reason.
_LONGEST_REASON = 200
#: Match the place in an error's message: the file and the number of a line, and the code of the line if it follows.
_PLACE = re.compile(r", at (\S+:\d+|In \[\d+\], line \d+)(?: \(.*?\)(?=[:;]|$))?")


#: Match the end of the name of the second and later pieces of a function that Dynamo captured in pieces.
_PIECE = re.compile(r" \(\d+\)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The verdict on a report, which the page shows at its head.

    Attributes
    ----------
    sentence
        The verdict in one line.
    state
        ``"verified"``, ``"unverified"``, ``"different"`` (the results of compiled code differ from eager, or the
        results of a graph differ and the graph was therefore not used), ``"partly"`` (something was compiled, but
        something else was refused, ran eagerly or was not compared with eager), ``"nothing"`` (nothing was compiled),
        ``"idle"`` (nothing was compiled, and this is not a fault: the cell computes nothing with tensors, only defines
        functions, or was interrupted) or ``"running"`` (the cell has not ended).
    status
        The verdict in a few words: ``"equal to eager"``.
    """

    sentence: str
    state: State
    status: str = field(default="", compare=False)


def verdict(report: Report) -> Verdict:
    """Return the verdict on ``report``. If the report was cut, return the verdict that was computed before the cut."""
    if report.summary is not None and report.summary.state in get_args(State):
        head = report.summary
        return Verdict(sentence=head.sentence, state=cast("State", head.state), status=head.status)
    if report.running is not None:
        return Verdict(sentence=_running(report), state="running", status="running")
    ours = serving(report)
    if ours is not report:
        result = verdict(ours)
        return replace(result, sentence=f"{result.sentence} {_beside(report)}")
    if report.rank_rows and (sentence := report.rank_rows[0].sentence):
        result = verdict(replace(report, rank_rows=()))
        return replace(result, sentence=_one_line(f"{sentence} {result.sentence}"))
    differing = [each for each in _refusals(report) if each[1].message.startswith(DIFFERS)]
    graphs = [graph for frame in report.frames for graph in frame.graphs if served(graph)]
    if not graphs and report.cell is not None and not _faults(report, report.cell):
        return _idle(report.cell)
    if not graphs:
        return Verdict(
            sentence=_one_line(f"Nothing was compiled: {_why_nothing(report, differing)}"),
            state="different" if differing else "nothing",
            status=f"{_STATUS['different']}, not used" if differing else "nothing was compiled",
        )
    state, ending = _verified(report)
    status = _STATUS["different" if differing else state]
    less = {} if state != "verified" else compared_lines(report)
    if "graph" in less:
        status = f"{status}, in part to the captured graph" if "python" in less else "equal to the captured graph"
    sentences = [f"{_compiled(report, graphs)}; {ending}.", *_timed(report)]
    if differing:
        state = "different"
        sentences.insert(0, f"NOT equal to eager, so not used: {_difference(differing)}.")
    told = {refusal.message for _, refusal in differing}
    eager = [] if report.cell is None else [part for part in _eager(report.cell) if part.reason not in told]
    if eager:
        sentences.append(_sentence(_ran_eagerly(eager)))
        told.update(part.reason for part in eager)
    limited = [frame for frame in report.frames if frame.limit and frame.calls.eager]
    told |= {RECOMPILE_LIMIT} if limited else set()
    breaks = [] if report.cell is None else breaks_of(report)
    parts = [] if report.cell is None else _incomplete(report.cell, told)
    if breaks:
        where = "at" if len(breaks) == 1 else "first at"
        first = f"{breaks[0].place} ({_gist(breaks[0].reason)})"
        count = amount(len(breaks), "graph break")
        sentences.append(_sentence(f"{count}, where Python took over, {where} {first}"))
    elif parts:
        sentences.append(_sentence(f"not all of {parts[0].lines} was captured ({_gist(parts[0].reason)})"))
        told.update(part.reason for part in parts)
    for frame in limited:
        calls = f"{frame.calls.eager} of {amount(frame.calls.total, 'call')} of {_short(frame.function)}"
        sentences.append(f"{calls} ran eagerly, past Dynamo's recompile limit.")
    unknown = report.cell is None and any(row.words == RECOMPILE_LIMIT for row in report.graph_break_rows)
    if unknown:
        sentences.append(f"{RECOMPILE_LIMIT}, and their number is unknown; raise torch._dynamo.config.recompile_limit.")
    refused = [(frame, refusal) for frame, refusal in _refusals(report) if refusal.message not in told]
    if refused:
        frame, refusal = refused[0]
        sentences.append(
            f"{amount(len(refused), 'compilation')} refused, first {_short(frame.function)} ({refusal.reason})."
        )
    sentences += [] if report.cell is None else _by_design(report, report.cell)
    if report.cell is not None and report.cell.error is not None:
        sentences.append(_sentence(f"the cell {_ended(report.cell)}"))
    if state != "different" and (eager or breaks or parts or limited or unknown or refused):
        state, status = "partly", f"compiled in part, {status}"
    return Verdict(sentence=_one_line(" ".join(sentences)), state=state, status=status)


def served(graph: Graph) -> bool:
    """Return whether a graph was compiled in this run of the cell, or was compiled earlier and used in this run."""
    return graph.status == "compiled" and (not graph.reused or graph.calls > 0)


def _running(report: Report) -> str:
    """Say how many graphs a running cell has so far, and whether they were compared with eager."""
    ours = serving(report)
    graphs = [graph for frame in ours.frames for graph in frame.graphs if served(graph)]
    if not graphs:
        return "The cell is running."
    compared = {(row.frame, row.graph) for row in ours.verification_rows}
    waiting = sum((frame.name, graph.index) not in compared for frame in ours.frames for graph in frame.graphs)
    ending = f"{waiting} not yet compared with eager" if waiting else _verified(ours)[1]
    return f"The cell is running. {amount(len(graphs), 'graph')} compiled, {ending}."


# Compiled code


def _compiled(report: Report, graphs: list[Graph]) -> str:
    """Say which functions this run compiled, and how many graphs of an earlier run of the cell it used."""
    new = [graph for graph in graphs if not graph.reused]
    training = sum(bool(graph.training) for graph in graphs)
    kind = "training" if training == len(graphs) else f"{training} for training" if training else "inference"
    old = len(graphs) - len(new)
    if new:
        functions = [
            # name a function once even if Dynamo captured it in pieces
            _PIECE.sub("", _short(frame.function))
            for frame in report.frames
            if any(served(graph) and not graph.reused for graph in frame.graphs)
        ]
        by = "Stock torch.compile compiled" if _engine(report) == "upstream" else "Compiled"
        sentence = f"{by} {listed(list(dict.fromkeys(functions)), 3)}: {amount(len(new), 'graph')}"
        sentence += f", beside {old} of an earlier run of the unchanged cell ({kind})" if old else f" ({kind})"
    else:
        serve = "serves" if old == 1 else "serve"
        sentence = f"Nothing new was compiled: {amount(old, 'graph')} ({kind}) of an earlier run "
        sentence += f"of the unchanged cell {serve} again"
    backends = listed(sorted({graph.backend for graph in graphs if graph.backend}))
    devices = listed(_devices(graphs))
    if backends:
        sentence += f", backend {backends}"
    if devices:
        sentence += f", on {devices}"
    if not new:
        return sentence
    spent = {row.kind: row.duration_ns for row in report.time_rows}
    kinds = {"dynamo": "in Dynamo", "backward": "in later backwards"}
    took = sum(graph.duration_ns or 0 for graph in new)
    # Mention the time in Dynamo and in later backwards only if it is more than a tenth of the compilation time.
    beside = [f"{duration(spent[kind])} {what}" for kind, what in kinds.items() if spent.get(kind, 0) * 10 > took]
    sentence += f", in {duration(took)}"
    return f"{sentence}, beside {listed(beside)}" if beside else sentence


def _engine(report: Report) -> str:
    """Return the engine whose graphs a report describes."""
    return next((frame.engine for frame in report.frames), "aotlab")


def _beside(report: Report) -> str:
    """Say what became of the graphs that stock `torch.compile` made beside aotlab's."""
    frames = [frame for frame in report.frames if frame.engine == "upstream"]
    names = {frame.name for frame in frames}
    refusals = [(frame, refusal) for frame in frames for refusal in frame.refusals]
    rows = [row for row in report.verification_rows if row.frame in names]
    apart = sum(row.same is False for row in report.engine_rows)
    if refusals:
        frame, refusal = refusals[0]
        return _sentence(f"stock torch.compile's form of {frame.name.removesuffix(UPSTREAM)}: {refusal.message}")
    compared = amount(len(rows), "observable")
    different = [row for row in rows if not row.equal]
    equal = f"equal to eager on {compared}" if rows else "not verified"
    if different:
        equal = f"NOT equal to eager on {len(different)} of {compared} ({_gist(different[0].sentence)})"
    differ = f"{amount(apart, 'fact')} {'differs' if apart == 1 else 'differ'} from aotlab's"
    return f"Stock torch.compile's graphs of the same code: {equal}; {differ}."


def _verified(report: Report) -> tuple[State, str]:
    """Return the state of the verification, and a clause with the number of comparisons and with the code not compared.

    Rows about another engine are ignored, because they do not concern the compiled code. Rows about a refused graph are
    ignored, because the graph is not used.
    """
    refused = {(frame.name, refusal.graph) for frame, refusal in _refusals(report)}
    engine = _engine(report)
    rows = [row for row in report.verification_rows if row.engine == engine and (row.frame, row.graph) not in refused]
    if not rows:
        return "unverified", "not verified"
    compared = amount(len(rows), "observable")
    if rounded := sum(row.equal and row.tolerance == ROUNDED for row in rows):
        compared += f" ({rounded:,} {ROUNDED})"
    different = [row for row in rows if not row.equal]
    if different:
        return "different", f"NOT equal to eager: {len(different)} of {compared} differ"
    compiled = [frame for frame in report.frames if any(served(graph) for graph in frame.graphs)]
    covered = {row.frame for row in rows}
    # A row whose frame is None is about all functions.
    missing = [] if None in covered else [_short(frame.function) for frame in compiled if frame.name not in covered]
    lines = compared_lines(report)
    if "graph" not in lines:
        comparison = f"verified: equal to eager on {compared}"
    elif "python" in lines:
        comparison = f"verified: equal to eager on {compared}; {lines['graph']} to the captured graph"
    else:
        comparison = f"verified: equal to the captured graph on {compared}"
    if missing or "nothing" in lines:
        return "partly", f"{comparison}, but {listed(missing, 3) or lines['nothing']} not verified"
    return "verified", comparison


def compared_lines(report: Report, *, gradients: bool = False) -> dict[str, str]:
    """Say which compiled lines of a cell were compared with Python, with the captured graph, and with nothing.

    The result maps ``"python"``, ``"graph"`` and ``"nothing"`` to words like ``"lines 2–3"``; it lacks a key if there
    are no such lines. The gradients of code that Dynamo captured are compared with the gradients of the captured graph,
    even if the code's results were compared with Python. If ``gradients`` is true, the words for ``"graph"`` mention
    these gradients.
    """
    lines_by_kind: dict[str, str] = {}
    graphs = [graph for frame in report.frames for graph in frame.graphs if graph.status == "compiled"]
    gradients = gradients and any(graph.training and graph.frontend == "dynamo" for graph in graphs)
    for kind in ("python", "graph", "nothing"):
        parts = () if report.cell is None else report.cell.parts
        lines = [part.lines for part in parts if part.compared == kind]
        if kind == "graph" and gradients and "python" in lines_by_kind:
            lines.insert(0, "gradients")
        if lines:
            lines_by_kind[kind] = listed(lines, 4)
    return lines_by_kind


def compared_sentence(report: Report) -> str:
    """Say in one sentence with which results the compiled lines and their gradients were compared.

    The sentence is empty if no line was compared. An example is ``"line 2 compared with Python, line 5 with the
    captured graph"``.
    """
    lines = compared_lines(report, gradients=True)
    words = ", ".join(f"{each} with {_AGAINST[kind]}" for kind, each in lines.items())
    return words.replace(" with ", " compared with ", 1)


def _timed(report: Report) -> list[str]:
    """Return a sentence that compares the time of the slowest graph with eager and with stock ``torch.compile``.

    If other graphs were timed, a second sentence compares them with eager. If no graph was timed, the list is empty.
    """
    rows = _longest_first(report)
    if not rows:
        return []
    first, *others = rows
    total = first.phase == "total"
    what = "forward and backward" if total else f"a {first.phase}"
    if others:
        what += f" of {_short(first.frame or 'it')}, which of {amount(len(rows), 'graph')} takes longest,"
    clauses: list[str] = [f"{duration(first.median_ns)} ({first.incomparable})"] if first.incomparable else []
    for ratio in first.ratios:
        whose = {"eager": "eager's time", "upstream": "stock torch.compile's"}.get(ratio.over, ratio.over)
        about = [
            f"{ratio.p10:.2f}–{ratio.p90:.2f}{'' if clauses else ' in eight rounds of ten'}",
            f"noise: {ratio.noise}" if ratio.noise else first.noise_note(ratio),
        ]
        clauses.append(f"{ratio.median:.2f}× {whose} ({'; '.join(each for each in about if each)})")
    sentences = [_sentence(f"{what} took {listed(clauses)}")]
    if others:
        told = [f"{_short(each.frame or 'it')} {_beside_eager(each)}" for each in others]
        sentences.append(_sentence(f"beside eager: {listed(told, 3)}"))
    return sentences


def _beside_eager(row: TimingRow) -> str:
    """Write the ratio of a graph's time to eager's, with a note if the ratio may be noise; or why there is no ratio."""
    if row.incomparable:
        return row.incomparable
    ratio = next((each for each in row.ratios if each.over == "eager"), row.ratios[0])
    about = "noise" if ratio.noise else row.noise_note(ratio)
    return f"{ratio.median:.2f}×" + (f" ({about})" if about else "")


def speed(report: Report) -> str:
    """Say in a few words how the slowest graph compares with eager: ``"3.8× faster"``.

    The words begin with "noise" if the difference may be noise. The text is empty if nothing was timed.
    """
    for row in _longest_first(report)[:1]:
        if row.incomparable:
            return row.incomparable
        for ratio in row.ratios:
            if ratio.over == "eager" and ratio.median > 0:
                factor, how = (1 / ratio.median, "faster") if ratio.median < 1 else (ratio.median, "slower")
                about = f" ({note})" if (note := row.noise_note(ratio)) else ""
                return f"{'noise: ' if ratio.noise else ''}{factor:.{1 if factor >= 1.995 else 2}f}× {how}{about}"
    return ""


def _longest_first(report: Report) -> list[TimingRow]:
    """Return one timing of aotlab for each graph that was timed beside other engines, slowest first.

    If forward and backward were timed together (the phase ``"total"``), it is this timing. Otherwise it is the timing
    of the first phase in the report.
    """
    rows: dict[tuple[str | None, int | None], TimingRow] = {}
    for row in report.timing_rows:
        before = rows.get((row.frame, row.graph), row)
        if row.engine == _engine(report) and row.comparisons and row.phase in ("total", before.phase):
            rows[row.frame, row.graph] = row
    return sorted(rows.values(), key=lambda row: row.median_ns, reverse=True)


def eager_lines(cell: Cell) -> int:
    """Count the lines of a cell that the compiler received but did not compile."""
    return sum(_length(part) for part in _eager(cell))


# Code that was not compiled


def _why_nothing(report: Report, differing: list[tuple[Frame, Refusal]]) -> str:
    """Return the reason why there is no compiled graph."""
    cell = report.cell
    if cell is not None and (cell.parts or not report.frames):
        return _why_nothing_in(cell, differing)
    refused = _refusals(report)
    if refused:
        frame, refusal = refused[0]
        others = f" ({amount(len(refused) - 1, 'more refusal')})" if len(refused) > 1 else ""
        place = "" if refusal.line is None or str(refusal.line) in refusal.message else f", at {refusal.line}"
        message = refusal.message.splitlines()[0] if refusal.message else "no message"
        return f"{_short(frame.function)} {_outcome(refusal.outcome)}, {refusal.error}: {message}{place}{others}"
    earlier = sum(_earlier_calls(frame) for frame in report.frames)
    if earlier:
        return f"{amount(earlier, 'call')} ran code that was compiled before the recording began."
    if any(frame.graphs for frame in report.frames):
        return "the recording ended before a compilation did."
    if report.graph_break_rows:
        return f"Dynamo handed over nothing ({_gist(report.graph_break_rows[0].words)})."
    eager = sum(frame.calls.eager for frame in report.frames)
    if eager:
        return f"{amount(eager, 'call')} ran eagerly."
    return "no function compiled by aotlab was called during the recording."


def _why_nothing_in(cell: Cell, differing: list[tuple[Frame, Refusal]]) -> str:
    """Return the reason why no graph of a cell was compiled, with the line of the cell."""
    ended = "" if cell.error is None else " " + _sentence(f"the cell {_ended(cell)}")
    if differing:
        return f"NOT equal to eager, so not used: {_difference(differing)}.{ended}"
    eager = _eager(cell)
    if eager:
        return f"{_ran_eagerly(eager)}.{ended}"
    if cell.error is not None:
        return f"the cell {_ended(cell)}."
    return _python_lines(cell)


def _python_lines(cell: Cell) -> str:
    """Say for the lines of a cell why they were not given to the compiler; lines with equal reasons are named once."""
    reasons: dict[str, CellPart] = {}
    for part in cell.parts:
        # No graph was used in this run. So a part that is marked "compiled" was compiled in an earlier run of the cell,
        # and its lines did not run.
        reasons.setdefault(part.reason if part.how in ("python", "eager") else "not run", part)
    clauses = [f"{part.lines} ({_gist(reason)})" for reason, part in reasons.items()]
    return f"no line was handed to the compiler: {listed(clauses, 4)}."


def _faults(report: Report, cell: Cell) -> bool:
    """Return whether a cell without compiled graphs has a fault: an error, a refusal, or lines that ran eagerly."""
    failed = cell.error is not None and not interrupted(cell)
    calls = any(frame.calls.eager for frame in report.frames)
    return failed or calls or bool(_refusals(report) or _eager(cell) or (report.frames and not cell.parts))


def _idle(cell: Cell) -> Verdict:
    """Say that there was nothing to compile, or that the user interrupted the cell before anything was compiled."""
    if interrupted(cell):
        sentence, status = f"Nothing was compiled: the cell {_ended(cell)}.", "interrupted"
    elif cell.kind == "definitions" and any(part.how == "not run" for part in cell.parts):
        sentence = "Nothing to compile yet: the functions of the cell are compiled when they are called."
        status = "nothing to compile yet"
    elif all(part.reason.endswith(_NOTHING_TO_COMPILE) for part in cell.parts):
        sentence, status = f"Nothing to compile: there is {NO_TENSORS} in the cell.", "nothing to compile"
    else:
        sentence, status = f"Nothing was compiled: {_python_lines(cell)}", "nothing was compiled"
    return Verdict(sentence=_one_line(sentence), state="idle", status=status)


def interrupted(cell: Cell) -> bool:
    """Return whether the user interrupted the cell."""
    return cell.error is not None and cell.error.startswith("KeyboardInterrupt")


def _ended(cell: Cell) -> str:
    at = "" if cell.error_line is None else f" at line {cell.error_line}"
    after = f" {cell.stopped}" if cell.stopped else ""
    return f"was interrupted{at}{after}" if interrupted(cell) else f"ended{at} with {_gist(cell.error or '')}"


def _by_design(report: Report, cell: Cell) -> list[str]:
    """Say which lines of the cell call code that runs eagerly by design, such as an optimizer's step."""
    rows = [(row.words, f"line {row.cell_line}") for row in report.graph_break_rows if row.cell_line is not None]
    first = {words: place for words, place in reversed(rows) if BY_DESIGN in words}
    first |= {part.reason: part.lines for part in reversed(cell.parts) if BY_DESIGN in part.reason}
    return [_sentence(f"{place} {words}") for words, place in reversed(first.items())]


def _eager(cell: Cell) -> list[CellPart]:
    """Return the parts of a cell that the compiler received and did not compile, although they compute with tensors."""
    return [part for part in cell.parts if part.how == "eager" and not part.reason.endswith(NO_TENSORS)]


def _ran_eagerly(parts: list[CellPart]) -> str:
    """Say how many lines ``parts``, the parts of a cell that ran eagerly, have, and why the first part ran eagerly."""
    first = parts[0]
    why = f" ({_gist(first.reason)})" if first.reason else ""
    if len(parts) == 1:
        return f"{first.lines} ran eagerly{why}"
    return f"{amount(sum(_length(part) for part in parts), 'line')} ran eagerly, first {first.lines}{why}"


def _incomplete(cell: Cell, told: set[str]) -> list[CellPart]:
    """Return the parts of a cell of which only some lines were compiled.

    ``told`` has the reasons that the verdict mentions already; parts with these reasons are left out.
    """
    return [part for part in cell.parts if part.how == "compiled" and part.reason and part.reason not in told]


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """A graph break.

    ``line`` is the line of the cell that ran the code with the graph break, and ``place`` is this line in words. If the
    code did not run from a cell, ``line`` is None, and ``place`` is the line with the graph break. ``reason`` says why
    Dynamo stopped, and where, if this is not at ``place``.
    """

    place: str
    line: int | None
    reason: str


def breaks_of(report: Report) -> list[Break]:
    """Return the graph breaks of a report, with the lines of its cell that ran the code with the graph breaks.

    Calls of libraries without tensors are left out, because there is nothing to compile in them.
    """
    breaks = []
    for row in [row for row in report.graph_break_rows if not row.library]:
        place = row.where if row.cell_line is None else f"line {row.cell_line}"
        elsewhere = f", at {row.where}" if row.where != place else ""
        breaks.append(Break(place=place, line=row.cell_line, reason=row.words + elsewhere))
    return breaks


def _length(part: CellPart) -> int:
    return part.last_line - part.first_line + 1


def _difference(differing: list[tuple[Frame, Refusal]]) -> str:
    """Name the functions whose compiled form differs from eager, and describe the first difference."""
    names = list(dict.fromkeys(_short(frame.function) for frame, _ in differing))
    gist = _gist(differing[0][1].message.removeprefix(DIFFERS).lstrip(": "))
    return f"the compiled form of {listed(names, 3)}{f' ({gist})' if gist else ''}"


# Words


def _refusals(report: Report) -> list[tuple[Frame, Refusal]]:
    return [(frame, refusal) for frame in report.frames for refusal in frame.refusals]


def _gist(text: str) -> str:
    """Shorten a reason so that it fits into a line of text.

    The reason is cut at the end of a sentence if possible, and loses its full stop.
    """
    line = _PLACE.sub(lambda match: f", at {place_in(match[1])}", first_line(text, len(text)))
    cut = max(line.rfind(mark, 0, _LONGEST_REASON) for mark in (". ", "; "))
    if len(line) > _LONGEST_REASON and cut > _LONGEST_REASON // 3:
        return line[:cut]
    return first_line(line, _LONGEST_REASON).rstrip(".")


def _sentence(text: str) -> str:
    """Add a capital letter at the beginning and a full stop at the end."""
    return f"{text[0].upper()}{text[1:]}" + ("" if text.endswith("…") else ".")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _short(function: str) -> str:
    """Return a function's name without the enclosing function."""
    return function.rpartition("<locals>.")[2]


def _outcome(outcome: str) -> str:
    return "ran eagerly" if outcome == "ran eagerly" else "was refused"


def _earlier_calls(frame: Frame) -> int:
    return sum(graph.calls for graph in frame.graphs if graph.status == "earlier")


def _devices(graphs: list[Graph]) -> list[str]:
    """Return the devices of all inputs and outputs, in order of appearance."""
    devices: dict[str, None] = {}
    for graph in graphs:
        for argument in graph.inputs:
            if argument.tensor is not None:
                devices.setdefault(argument.tensor.device)
        for output in graph.outputs:
            if output.tensor is not None:
                devices.setdefault(output.tensor.device)
    return list(devices)
