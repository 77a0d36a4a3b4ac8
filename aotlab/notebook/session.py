"""The state that aotlab keeps for one IPython shell: the compiled cells, and Dynamo's names in the namespace."""

from __future__ import annotations

import os
import re
import types
import weakref
from collections import OrderedDict
from contextlib import ExitStack
from typing import Any

from aotlab import events
from aotlab.notebook.compiled_cell import CompiledCell
from aotlab.notebook.playground import Playground
from aotlab.report import Report, text
from aotlab.runs import saving

#: How many compiled cells a session keeps, so that they need not be compiled again if they run again unchanged.
MOST_CELLS = 64


class Session:
    """The compiled cells of one shell.

    Parameters
    ----------
    shell
        The IPython shell.

    Attributes
    ----------
    notebook
        The path of the notebook; empty if the shell does not know it.
    collected
        The last report of each cell, by its identifier, in a program that nobody watches: its cells display no reports.
        None in a notebook.
    failed
        The error that ended a cell, and the traceback that eager would show. It is None again after the error is shown.
    """

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        # Jupyter's server and VS Code tell the kernel the path of the notebook.
        self.notebook = str(shell.user_ns.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME") or "")
        self.collected: dict[str, Report] | None = None
        self.playground = Playground(shell.user_ns)
        self._cells: OrderedDict[tuple[str, ...], CompiledCell] = OrderedDict()
        self._all: weakref.WeakSet[CompiledCell] = weakref.WeakSet()
        self.failed: tuple[BaseException, types.TracebackType | None] | None = None
        self._listening = ExitStack()
        self._listening.enter_context(events.listen(self._hear))
        text.cell_numbers.append(self._number_of)
        self._listening.callback(text.cell_numbers.remove, self._number_of)

    def close(self) -> None:
        """Drop all compiled cells and stop listening to the engine's events.

        Compiled functions can still be called, but their calls are no longer recorded.
        """
        self._listening.close()
        self._cells.clear()

    def _number_of(self, file: str) -> int | None:
        """Return the execution number of the cell whose code has this file name, or None.

        IPython's name for the cell contains the number, as in ``Cell In[3]``.
        """
        named = self.shell.compile.format_code_name(file)
        match = re.search(r"\[(\d+)\]", named[1]) if named else None
        return int(match[1]) if match else None

    def find(self, key: tuple[str, ...]) -> CompiledCell | None:
        """Return the compiled cell that was stored under ``key``, or None if it was not stored or was dropped."""
        if key in self._cells:
            self._cells.move_to_end(key)
        return self._cells.get(key)

    def keep(self, key: tuple[str, ...], cell: CompiledCell) -> None:
        """Store a compiled cell under ``key``, in case the cell runs again. Drop the least recently used cells."""
        self._cells[key] = cell
        while len(self._cells) > MOST_CELLS:
            self._cells.popitem(last=False)

    def keep_run(self, report: Report) -> None:
        """Store the report of a cell, so that later sessions find it."""
        saving.keep(report, notebook=self.notebook)
        if self.collected is not None:
            self.collected[report.identifier] = report

    def show_changes(self, *_event: object) -> None:
        """Show new reports in the outputs of cells that define functions, if another cell has called the functions."""
        for cell in list(self._all):
            if cell.code.defines_only:
                cell.show()

    def hear_of(self, cell: CompiledCell) -> None:
        """Send the engine's events to ``cell`` until the cell is garbage-collected."""
        self._all.add(cell)

    def _hear(self, event: events.Event) -> None:
        for cell in list(self._all):
            cell.recording.hear(event)
