"""Records of a notebook cell: its lines, and the graph breaks in it."""

from __future__ import annotations

from dataclasses import dataclass

from aotlab.errors import UserLine
from aotlab.report.model.tensors import Group, Input


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPart:
    """Some consecutive lines of a cell that ran in the same way.

    Attributes
    ----------
    first_line, last_line
        The numbers of the first and the last line, counted from 1. The magic's line counts too.
    how
        ``"compiled"`` (compiled graphs ran at least some of it), ``"eager"`` (it computes with tensors, and none of it
        is compiled), ``"python"`` (plain Python, which was not given to the compiler) or ``"not run"``.
    frames
        The names of the report's frames (functions) with the graphs that ran the part.
    reason
        Why the part, or some of it, is not compiled; empty if all of it is.
    compared
        What the compiled lines were compared with: ``"python"`` (their own Python, run eagerly on copies), ``"graph"``
        (only the graph that Dynamo captured from them) or ``"nothing"``. Empty for other lines.
    ways
        How each line ran, if they did not all run as ``how`` says: ``"compiled"``, ``"in part"``, ``"eager"``,
        ``"python"``, ``"calls compiled code"`` (Python ran the line, and the line called functions that are compiled),
        or empty for a line of a branch that is in no graph.
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
        The line of the cell that raised the exception; None if the line is unknown.
    parts
        How the lines of the cell ran, in order.
    mutated_outside
        The tensors that existed before the cell and that the cell changed outside of every compiled graph: in Python,
        or while autograd accumulated gradients. Gradients that did not exist before are listed too.
    groups
        The groups of the rows in ``mutated_outside``.
    """

    source: str
    identifier: str | None = None
    execution_count: int | None = None
    options: str = ""
    kind: str = "statements"
    error: str | None = None
    error_line: int | None = None
    parts: tuple[CellPart, ...] = ()
    mutated_outside: tuple[Input, ...] = ()
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreakRow:
    """A place where Dynamo split a function, or left it to Python.

    Attributes
    ----------
    frame
        The place as ``file:line``; empty if it is unknown.
    where
        The place in the form that a page shows: the number of a line of the report's cell, or the numbers of the cell
        and the line for another cell.
    line
        The place with its function and its code.
    cell_line
        The line of the report's cell that led to the graph break; None if no line of the cell did.
    words
        The reason in a few words.
    reason
        The reason in Dynamo's words.
    at_ns
        When it happened, counted from the beginning of the recording.
    library
        The library without tensors that the line calls, or ``"torch.optim"`` for an optimizer step, which runs eagerly
        by design. Python runs such a call, and it does not count as a graph break.
    """

    frame: str
    where: str = ""
    line: UserLine | None = None
    cell_line: int | None = None
    library: str = ""
    words: str = ""
    reason: str
    at_ns: int = 0
