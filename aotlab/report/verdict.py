"""The report in one line: what was compiled, on what, and whether it was verified; of a cell also how it ran."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast, get_args

from aotlab.report.text import RECOMPILE_LIMIT, amount, duration, first_line, lines_of, listed, place_in

if TYPE_CHECKING:
    from aotlab.report.model import Cell, CellPart, Frame, Graph, Refusal, Report, TimingRow

State = Literal["verified", "unverified", "different", "partly", "nothing"]

#: How the refusal of a graph begins whose results, compared before its first use, were not eager's.
DIFFERS = "its compiled form differs from eager"
#: How the reason ends for lines in which there is nothing to compile.
NO_TENSORS = "no computation with tensors"
#: What the verification showed, in a few words.
_STATUS = {
    "verified": "equal to eager",
    "unverified": "not compared with eager",
    "different": "NOT equal to eager",
    "partly": "not all of it compared with eager",
}
#: What lines were compared with.
_AGAINST = {"python": "Python", "graph": "the captured graph", "nothing": "nothing"}
#: How many characters of one reason the sentence holds; the page has all of it.
_LONGEST_REASON = 200
#: A line as errors name it: the file, the number, and perhaps the code.
_PLACE = re.compile(r", at (\S+:\d+|In \[\d+\], line \d+)(?: \(.*?\)(?=[:;]|$))?")


#: How the names of the second and later pieces end of what Dynamo captured in pieces.
_PIECE = re.compile(r" \(\d+\)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The first line of a report.

    Attributes
    ----------
    sentence
        The line.
    state
        ``"verified"``, ``"unverified"``, ``"different"`` (an engine's results are not eager's, or those of a graph
        that therefore was not used), ``"partly"`` (something was refused, or lines of a cell ran eagerly, beside what
        was compiled) or ``"nothing"`` (nothing was compiled).
    status
        The line in a few words.
    """

    sentence: str
    state: State
    status: str = field(default="", compare=False)


def verdict(report: Report) -> Verdict:
    """Say in one line what ``report`` tells; of a report that was cut, what the whole one told."""
    if report.summary is not None and report.summary.state in get_args(State):
        head = report.summary
        return Verdict(sentence=head.sentence, state=cast("State", head.state), status=head.status)
    differing = [each for each in _refusals(report) if each[1].message.startswith(DIFFERS)]
    graphs = [graph for frame in report.frames for graph in frame.graphs if served(graph)]
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
        sentences.append(_sentence(f"not all of {lines_of(parts[0])} was captured ({_gist(parts[0].reason)})"))
        told.update(part.reason for part in parts)
    for frame in limited:
        calls = f"{frame.calls.eager} of {amount(frame.calls.total, 'call')} of {_short(frame.function)}"
        sentences.append(f"{calls} ran eagerly, past Dynamo's recompile limit.")
    unknown = report.cell is None and any(row.words == RECOMPILE_LIMIT for row in report.graph_break_rows)
    if unknown:
        sentences.append(f"{RECOMPILE_LIMIT}, nobody knows how many; torch._dynamo.config.recompile_limit sets more.")
    refused = [(frame, refusal) for frame, refusal in _refusals(report) if refusal.message not in told]
    if refused:
        frame, refusal = refused[0]
        sentences.append(
            f"{amount(len(refused), 'compilation')} refused, first {_short(frame.function)} ({refusal.reason})."
        )
    if report.cell is not None and report.cell.error is not None:
        sentences.append(_sentence(f"the cell {_ended(report.cell)}"))
    if state != "different" and (eager or breaks or parts or limited or unknown or refused):
        state, status = "partly", f"compiled in part, {status}"
    return Verdict(sentence=_one_line(" ".join(sentences)), state=state, status=status)


def served(graph: Graph) -> bool:
    """Tell whether a graph was compiled, and in this run of the cell or for use in it."""
    return graph.status == "compiled" and (not graph.reused or graph.calls > 0)


# What was compiled


def _compiled(report: Report, graphs: list[Graph]) -> str:
    """Say what was compiled now, and what an earlier run of the cell left."""
    new = [graph for graph in graphs if not graph.reused]
    training = sum(bool(graph.training) for graph in graphs)
    kind = "training" if training == len(graphs) else f"{training} for training" if training else "inference"
    old = len(graphs) - len(new)
    if new:
        functions = [
            # a part that Dynamo captured in pieces is named once
            _PIECE.sub("", _short(frame.function))
            for frame in report.frames
            if any(served(graph) and not graph.reused for graph in frame.graphs)
        ]
        sentence = f"Compiled {listed(list(dict.fromkeys(functions)), 3)}: {amount(len(new), 'graph')}"
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
    # less than a tenth of it is not worth a word
    beside = [f"{duration(spent[kind])} {what}" for kind, what in kinds.items() if spent.get(kind, 0) * 10 > took]
    sentence += f", in {duration(took)}"
    return f"{sentence}, beside {listed(beside)}" if beside else sentence


def _verified(report: Report) -> tuple[State, str]:
    """Say what the verification of aotlab showed, and for which of the compiled functions.

    Rows about another engine say nothing of what was compiled here, and those about a graph that was refused say
    nothing of what is used.
    """
    refused = {(frame.name, refusal.graph) for frame, refusal in _refusals(report)}
    rows = [row for row in report.verification_rows if row.engine == "aotlab" and (row.frame, row.graph) not in refused]
    if not rows:
        return "unverified", "not verified"
    compared = amount(len(rows), "observable")
    different = [row for row in rows if not row.equal]
    if different:
        return "different", f"NOT equal to eager: {len(different)} of {compared} differ"
    compiled = [frame for frame in report.frames if any(served(graph) for graph in frame.graphs)]
    covered = {row.frame for row in rows}
    # A row that names no function is about all of them.
    missing = [] if None in covered else [_short(frame.function) for frame in compiled if frame.name not in covered]
    lines = compared_lines(report)
    if "graph" not in lines:
        found = f"verified: equal to eager on {compared}"
    elif "python" in lines:
        found = f"verified: equal to eager on {compared}; {lines['graph']} to the captured graph"
    else:
        found = f"verified: equal to the captured graph on {compared}"
    if missing or "nothing" in lines:
        return "partly", f"{found}, but {listed(missing, 3) or lines['nothing']} not verified"
    return "verified", found


def compared_lines(report: Report, *, gradients: bool = False) -> dict[str, str]:
    """Return which compiled lines of a cell were compared with Python, with the captured graph, with nothing.

    With ``gradients`` it is also told where these were not compared as the lines were: of what Dynamo captured they are
    compared with the captured graph's.
    """
    found: dict[str, str] = {}
    graphs = [graph for frame in report.frames for graph in frame.graphs if graph.status == "compiled"]
    gradients = gradients and any(graph.training and graph.frontend == "dynamo" for graph in graphs)
    for kind in ("python", "graph", "nothing"):
        parts = () if report.cell is None else report.cell.parts
        lines = [lines_of(part) for part in parts if part.compared == kind]
        if kind == "graph" and gradients and "python" in found:
            lines.insert(0, "gradients")
        if lines:
            found[kind] = listed(lines, 4)
    return found


def compared_sentence(report: Report) -> str:
    """Say the same in a line; nothing of a report that does not tell."""
    lines = compared_lines(report, gradients=True)
    words = ", ".join(f"{each} with {_AGAINST[kind]}" for kind, each in lines.items())
    return words.replace(" with ", " compared with ", 1)


def _timed(report: Report) -> list[str]:
    """Say how many times as long as eager and stock ``torch.compile`` the graph takes that takes longest.

    Of the other graphs that were timed each has a clause; nothing is said if none was.
    """
    rows = _longest_first(report)
    if not rows:
        return []
    first, *others = rows
    total = first.phase == "total"
    what = "forward and backward" if total else f"a {first.phase}"
    if others:
        what += f" of {_short(first.frame or 'it')}, which of {amount(len(rows), 'graph')} takes longest,"
    clauses: list[str] = []
    for ratio in first.ratios:
        whose = {"eager": "eager's time", "upstream": "stock torch.compile's"}.get(ratio.over, ratio.over)
        about = [
            f"{ratio.p10:.2f}–{ratio.p90:.2f}{'' if clauses else ' in eight rounds of ten'}",
            f"noise: {ratio.noise}" if ratio.noise else first.beside(ratio),
        ]
        clauses.append(f"{ratio.median:.2f}× {whose} ({'; '.join(each for each in about if each)})")
    sentences = [_sentence(f"{what} took {listed(clauses)}")]
    if others:
        told = [f"{_short(each.frame or 'it')} {_beside_eager(each)}" for each in others]
        sentences.append(_sentence(f"beside eager: {listed(told, 3)}"))
    return sentences


def _beside_eager(row: TimingRow) -> str:
    """Write the ratio to eager's time of a graph, and whether that is noise."""
    ratio = next((each for each in row.ratios if each.over == "eager"), row.ratios[0])
    about = "noise" if ratio.noise else row.beside(ratio)
    return f"{ratio.median:.2f}×" + (f" ({about})" if about else "")


def speed(report: Report) -> str:
    """Say in a word how the graph that takes longest compares with eager; if that is noise, that first."""
    for row in _longest_first(report)[:1]:
        for ratio in row.ratios:
            if ratio.over == "eager" and ratio.median > 0:
                factor, how = (1 / ratio.median, "faster") if ratio.median < 1 else (ratio.median, "slower")
                about = f" ({beside})" if (beside := row.beside(ratio)) else ""
                return f"{'noise: ' if ratio.noise else ''}{factor:.{1 if factor >= 1.995 else 2}f}× {how}{about}"
    return ""


def _longest_first(report: Report) -> list[TimingRow]:
    """Return the timing of each graph that was set beside others: of its step, or where it has none of its forward."""
    rows: dict[tuple[str | None, int | None], TimingRow] = {}
    for row in report.timing_rows:
        before = rows.get((row.frame, row.graph), row)
        if row.engine == "aotlab" and row.ratios and row.phase in ("total", before.phase):
            rows[row.frame, row.graph] = row
    return sorted(rows.values(), key=lambda row: row.median_ns, reverse=True)


def eager_lines(cell: Cell) -> int:
    """Count the lines of a cell that the compiler was given for nothing."""
    return sum(_length(part) for part in _eager(cell))


# What was not


def _why_nothing(report: Report, differing: list[tuple[Frame, Refusal]]) -> str:
    """Give the reason for which there is no compiled graph."""
    cell = report.cell
    if cell is not None and (cell.parts or not report.frames):
        return _why_nothing_in(cell, differing)
    refused = _refusals(report)
    if refused:
        frame, refusal = refused[0]
        more = f" ({amount(len(refused) - 1, 'more refusal')})" if len(refused) > 1 else ""
        place = "" if refusal.line is None or str(refusal.line) in refusal.message else f", at {refusal.line}"
        message = refusal.message.splitlines()[0] if refusal.message else "no message"
        return f"{_short(frame.function)} {_outcome(refusal.outcome)}, {refusal.error}: {message}{place}{more}"
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
    """Give the reason, and the line, for which there is no compiled graph of a cell."""
    ended = "" if cell.error is None else " " + _sentence(f"the cell {_ended(cell)}")
    if differing:
        return f"NOT equal to eager, so not used: {_difference(differing)}.{ended}"
    eager = _eager(cell)
    if eager:
        return f"{_ran_eagerly(eager)}.{ended}"
    if cell.error is not None:
        return f"the cell {_ended(cell)}."
    if cell.kind == "definitions" and any(part.how == "not run" for part in cell.parts):
        return "no function of the cell was called yet."
    reasons: dict[str, CellPart] = {}
    for part in cell.parts:
        # "compiled" without a graph that served: in an earlier run of the cell.
        reasons.setdefault(part.reason if part.how in ("python", "eager") else "not run", part)
    if all(reason.endswith(NO_TENSORS) for reason in reasons):
        return f"there is {NO_TENSORS} in the cell."
    clauses = [f"{lines_of(part)} ({_gist(reason)})" for reason, part in reasons.items()]
    return f"no line was handed to the compiler: {listed(clauses, 4)}."


def _ended(cell: Cell) -> str:
    at = "" if cell.error_line is None else f" at line {cell.error_line}"
    return f"ended{at} with {_gist(cell.error or '')}"


def _eager(cell: Cell) -> list[CellPart]:
    """Return the parts that the compiler was given for nothing, though there was something to compile."""
    return [part for part in cell.parts if part.how == "eager" and not part.reason.endswith(NO_TENSORS)]


def _ran_eagerly(parts: list[CellPart]) -> str:
    """Say how many lines ran eagerly, and why the first did."""
    first = parts[0]
    why = f" ({_gist(first.reason)})" if first.reason else ""
    if len(parts) == 1:
        return f"{lines_of(first)} ran eagerly{why}"
    return f"{amount(sum(_length(part) for part in parts), 'line')} ran eagerly, first {lines_of(first)}{why}"


def _incomplete(cell: Cell, told: set[str]) -> list[CellPart]:
    """Return the parts of which only some was compiled, for a reason that was not told yet."""
    return [part for part in cell.parts if part.how == "compiled" and part.reason and part.reason not in told]


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """A place where Dynamo stopped and Python took over: in words, and the cell's line if it is one."""

    place: str
    line: int | None
    reason: str


def breaks_of(report: Report) -> list[Break]:
    """Return the graph breaks of a report, with the lines of its cell."""
    found = []
    for row in report.graph_break_rows:
        place = row.where if row.cell_line is None else f"line {row.cell_line}"
        elsewhere = f", at {row.where}" if row.where != place else ""
        found.append(Break(place=place, line=row.cell_line, reason=row.words + elsewhere))
    return found


def _length(part: CellPart) -> int:
    return part.last_line - part.first_line + 1


def _difference(differing: list[tuple[Frame, Refusal]]) -> str:
    """Say whose compiled form is not equal to eager, and what the first difference is."""
    names = list(dict.fromkeys(_short(frame.function) for frame, _ in differing))
    gist = _gist(differing[0][1].message.removeprefix(DIFFERS).lstrip(": "))
    return f"the compiled form of {listed(names, 3)}{f' ({gist})' if gist else ''}"


# Words


def _refusals(report: Report) -> list[tuple[Frame, Refusal]]:
    return [(frame, refusal) for frame in report.frames for refusal in frame.refusals]


def _gist(text: str) -> str:
    """Shorten a reason to what a line of text can hold, after a sentence if it can be, without the full stop."""
    line = _PLACE.sub(lambda found: f", at {place_in(found[1])}", first_line(text, len(text)))
    cut = max(line.rfind(mark, 0, _LONGEST_REASON) for mark in (". ", "; "))
    if len(line) > _LONGEST_REASON and cut > _LONGEST_REASON // 3:
        return line[:cut]
    return first_line(line, _LONGEST_REASON).rstrip(".")


def _sentence(text: str) -> str:
    """Begin with a capital letter, and end with a full stop."""
    return f"{text[0].upper()}{text[1:]}" + ("" if text.endswith("…") else ".")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _short(function: str) -> str:
    """Name a function without the function around it."""
    return function.rpartition("<locals>.")[2]


def _outcome(outcome: str) -> str:
    return "ran eagerly" if outcome == "ran eagerly" else "was refused"


def _earlier_calls(frame: Frame) -> int:
    return sum(graph.calls for graph in frame.graphs if graph.status == "earlier")


def _devices(graphs: list[Graph]) -> list[str]:
    """Name the devices of all tensors that go in or come out, in order of appearance."""
    found: dict[str, None] = {}
    for graph in graphs:
        for argument in graph.inputs:
            if argument.tensor is not None:
                found.setdefault(argument.tensor.device)
        for output in graph.outputs:
            if output.tensor is not None:
                found.setdefault(output.tensor.device)
    return list(found)
