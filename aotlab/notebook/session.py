"""What aotlab keeps for one IPython shell: the compiled cells, and Dynamo's names in the shell's namespace."""

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

#: How many cells are kept compiled for the case that they run again unchanged.
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
        The error that ended a cell, with the traceback that eager would show; until it has been shown.
    """

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.playground = Playground(shell.user_ns)
        self._kept: OrderedDict[tuple[str, ...], CompiledCell] = OrderedDict()
        self._all: weakref.WeakSet[CompiledCell] = weakref.WeakSet()
        self.failed: tuple[BaseException, types.TracebackType | None] | None = None
        self._listening = ExitStack()
        self._listening.enter_context(observe.listen(self._hear))
        text.cell_numbers.append(self._number_of)
        self._listening.callback(text.cell_numbers.remove, self._number_of)

    def close(self) -> None:
        """Forget everything; functions that were compiled go on working, unrecorded."""
        self._listening.close()
        self._kept.clear()

    def _number_of(self, file: str) -> int | None:
        """Return the number of the cell whose code has this file, as IPython words it for tracebacks."""
        named = self.shell.compile.format_code_name(file)
        found = re.search(r"\[(\d+)\]", named[1]) if named else None
        return int(found[1]) if found else None

    def find(self, key: tuple[str, ...]) -> CompiledCell | None:
        """Return the cell that was compiled for ``key``, if it is still kept."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, key: tuple[str, ...], cell: CompiledCell) -> None:
        """Keep a cell for the next time that it runs unchanged."""
        self._kept[key] = cell
        while len(self._kept) > MOST_CELLS:
            self._kept.popitem(last=False)

    def show_changes(self, *_event: object) -> None:
        """Bring the outputs of cells up to date whose functions were called by another cell."""
        for cell in list(self._all):
            if cell.code.defines_only:
                cell.show()

    def hear_of(self, cell: CompiledCell) -> None:
        """Tell ``cell`` what the engine does, as long as somebody holds it."""
        self._all.add(cell)

    def _hear(self, event: observe.Event) -> None:
        for cell in list(self._all):
            cell.recording.hear(event)
        if isinstance(event, observe.CompileStarted | observe.StageFinished):
            for cell in list(self._all):
                cell.tell(event)
