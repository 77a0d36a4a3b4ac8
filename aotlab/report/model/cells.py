"""Records of a notebook cell: its lines, and the graph breaks in it."""

from __future__ import annotations

from dataclasses import dataclass

from aotlab.errors import UserLine
from aotlab.report.model.measured import TimelineRow
from aotlab.report.model.tensors import Group, Input


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPart:
    """Some consecutive lines of a cell that ran in the same way.

    Attributes
    ----------
    first_line, last_line
        The numbers of the first and the last line in the cell. The magic's line is line 1.
    how
        ``"compiled"`` (compiled graphs ran at least some of the lines), ``"eager"`` (the lines compute with tensors,
        and none of them is compiled), ``"python"`` (plain Python, which was not given to the compiler) or
        ``"not run"``.
    frames
        The names of the report's frames (functions) whose graphs ran these lines.
    reason
        Why some or all of these lines are not compiled; empty if all of them are compiled.
    compared
        The code whose results were compared with the results of compiled lines: ``"python"`` (the same lines, run
        eagerly on copies), ``"graph"`` (only the graph that Dynamo captured from the lines) or ``"nothing"``. Empty for
        lines that are not compiled.
    ways
        How each line ran, one word per line: ``"compiled"``, ``"in part"`` (Dynamo stopped at the line or in a function
        that the line calls; graphs ran the rest), ``"eager"``, ``"python"``, ``"calls compiled code"`` (Python ran the
        line, and the line called functions that are compiled), or ``""`` for a line of a branch that is in no graph.
        The field is empty if all lines ran as ``how`` says.
    """

    first_line: int
    last_line: int
    how: str
    frames: tuple[str, ...] = ()
    reason: str = ""
    compared: str = ""
    ways: tuple[str, ...] = ()

    @property
    def lines(self) -> str:
        """The lines in words: ``"line 3"`` or ``"lines 3–5"``."""
        if self.first_line == self.last_line:
            return f"line {self.first_line}"
        return f"lines {self.first_line}–{self.last_line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The notebook cell that was compiled.

    Attributes
    ----------
    source
        The cell's text as the user wrote it, including the magic's line.
    identifier
        The notebook's id of the cell.
    execution_count
        The number in ``In [n]``.
    options
        The text after the magic's name.
    kind
        ``"statements"``, or ``"definitions"`` if the cell only defines functions. Such functions are compiled when they
        are called.
    error
        The exception that ended the cell, as one line; None if the cell ran to its end.
    error_line
        The number of the cell's line that raised the exception; None if the line is unknown.
    stopped
        When and in which activity the user interrupted the cell: ``"after 12 s, in Dynamo"``. Empty if the cell was not
        interrupted.
    parts
        How the lines of the cell ran, in the order of the lines.
    mutated_outside
        The tensors that existed before the cell ran and that the cell changed outside of every compiled graph: in
        Python, or while autograd accumulated gradients. Gradients that did not exist before are listed too.
    groups
        The groups of rows in ``mutated_outside`` that the page shows as one row each.
    """

    source: str
    identifier: str | None = None
    execution_count: int | None = None
    options: str = ""
    kind: str = "statements"
    error: str | None = None
    error_line: int | None = None
    stopped: str = ""
    parts: tuple[CellPart, ...] = ()
    mutated_outside: tuple[Input, ...] = ()
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreakRow:
    """A graph break: a place where Dynamo ended a graph, or a function that Dynamo did not capture at all.

    Attributes
    ----------
    frame
        The place as ``file:line``; empty if it is unknown.
    where
        The place in the form that a page shows: ``"line 3"`` for a line of the report's cell, ``"In [2], line 3"`` for
        a line of another cell, and the file and the line for other code.
    line
        The place as a record, with the function and the code of the line.
    cell_line
        The number of the line of the report's cell that ran the code with the graph break; None if the code was not
        called from the cell.
    words
        The reason in a few words.
    reason
        The reason in Dynamo's words.
    at_ns
        When the graph break happened, counted from the beginning of the recording.
    library
        The library without tensors (such as numpy) that the line calls, or ``"torch.optim"`` for an optimizer's step,
        which runs eagerly by design. Such a row is not counted as a graph break. Empty for all other graph breaks.
    """

    frame: str
    where: str = ""
    line: UserLine | None = None
    cell_line: int | None = None
    library: str = ""
    words: str = ""
    reason: str
    at_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The activity of a cell that still runs.

    Attributes
    ----------
    text
        The activity in words: ``"Dynamo captures lines 3–5"``.
    kind
        The kind of the activity, as in the column ``stage`` of the time line; empty for the cell's own Python.
    since_ns, elapsed_ns
        When the activity began, and the time of this report. Both count from the begin of the run.
    kernels, kernels_done
        The number of kernels in the graph that the backend compiles now, as far as it is known, and the number of those
        that are ready. Both are 0 if no backend compiles.
    steps
        The stages, captures and comparisons that have ended.
    """

    text: str
    kind: str = ""
    since_ns: int
    elapsed_ns: int
    kernels: int = 0
    kernels_done: int = 0
    steps: tuple[TimelineRow, ...] = ()
