"""The state that aotlab keeps for one IPython shell: the compiled cells, and Dynamo's names in the namespace."""

from __future__ import annotations

import re
import types
import weakref
from collections import OrderedDict
from contextlib import ExitStack
from typing import Any

from aotlab import observe
from aotlab.notebook.compiled_cell import CompiledCell
from aotlab.notebook.playground import Playground
from aotlab.report import text

#: How many cells stay compiled in case they run again unchanged.
MOST_CELLS = 64


class Session:
    """The compiled cells of one shell.

    Parameters
    ----------
    shell
        The IPython shell.

    Attributes
    ----------
    failed
        The error that ended a cell, and the traceback that eager would show. It is cleared when the error is shown.
    """

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.playground = Playground(shell.user_ns)
        self._cells: OrderedDict[tuple[str, ...], CompiledCell] = OrderedDict()
        self._all: weakref.WeakSet[CompiledCell] = weakref.WeakSet()
        self.failed: tuple[BaseException, types.TracebackType | None] | None = None
        self._listening = ExitStack()
        self._listening.enter_context(observe.listen(self._hear))
        text.cell_numbers.append(self._number_of)
        self._listening.callback(text.cell_numbers.remove, self._number_of)

    def close(self) -> None:
        """Drop all compiled cells and stop listening to the engine's events.

        Functions that were compiled keep working, but their calls are not recorded.
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
        """Return the cell that was compiled for ``key``, if it is still kept."""
        if key in self._cells:
            self._cells.move_to_end(key)
        return self._cells.get(key)

    def keep(self, key: tuple[str, ...], cell: CompiledCell) -> None:
        """Keep a cell, in case it runs again unchanged."""
        self._cells[key] = cell
        while len(self._cells) > MOST_CELLS:
            self._cells.popitem(last=False)

    def show_changes(self, *_event: object) -> None:
        """Update the outputs of cells whose functions were called by another cell."""
        for cell in list(self._all):
            if cell.code.defines_only:
                cell.show()

    def hear_of(self, cell: CompiledCell) -> None:
        """Send the engine's events to ``cell`` as long as the cell is referenced."""
        self._all.add(cell)

    def _hear(self, event: observe.Event) -> None:
        for cell in list(self._all):
            cell.recording.hear(event)
        if isinstance(event, observe.CompileStarted | observe.StageFinished):
            for cell in list(self._all):
                cell.tell(event)
