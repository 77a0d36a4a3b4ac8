"""The recording of one cell: the events about its compilations, its calls and its graph breaks."""

from __future__ import annotations

import traceback
from dataclasses import replace

from aotlab import events
from aotlab.notebook import live
from aotlab.notebook.progress import Progress
from aotlab.report import Recording, Report
from aotlab.report.dynamo_breaks import function_of
from aotlab.report.model import Frame, GraphBreakRow
from aotlab.report.text import is_of_cell, why_dynamo_stopped

#: Dynamo's reason for a graph break that the code itself requests by ``torch._dynamo.graph_break()``. Torch's
#: optimizers request such a break before and after each step. The optimizers' breaks are not reported, because Dynamo
#: compiles the code before and after them.
EXPLICIT_BREAK = "User-inserted graph break"


class CellRecording(Recording):
    """A recording that ignores all events except those about one cell.

    Parameters
    ----------
    name
        The title of the report.
    file
        The file name of the cell's code.

    Attributes
    ----------
    numbers
        The numbers by which events identify the functions and code objects of the cell.
    inside
        Whether compiled code of the cell is running now, or being compiled.
    progress
        The present activity of the cell, if it runs.
    """

    def __init__(self, name: str | None = None, file: str = "") -> None:
        super().__init__(name)
        self._file = file
        self.numbers: set[int] = set()
        self.inside = False
        self.progress = Progress()
        #: The cell's lines at which Dynamo ended a graph, because of the line itself or of a function that it calls.
        self.stops: set[int] = set()
        #: The cell's lines that call a library that does not use tensors, directly or through a function.
        self.library_lines: set[int] = set()
        #: The calls of such libraries at which Dynamo ended a graph. The key is Dynamo's reason (`why_dynamo_stopped`),
        #: and the value is the description of the call in the report.
        self.libraries: dict[str, str] = {}

    def begin_run(self, began_ns: int, *, again: bool) -> None:
        """Begin a run of the cell at ``began_ns``."""
        super().begin_run(began_ns, again=again)
        self.progress.begin(began_ns)

    def end_run(self) -> None:
        """Fix the time of the run."""
        super().end_run()
        self.progress.end()

    def knows(self, entry: int) -> bool:
        """Tell whether an entry belongs to this cell."""
        return entry in self._entries

    def forget(self, number: int) -> None:
        """Drop all records about the function or region with this number, because the direct frontend declined it."""
        with self._lock:
            self.numbers.discard(number)
            for key in [key for key in self._frames if key[0] == number]:
                for entry in self._frames.pop(key).entries:
                    self._entries.pop(entry, None)
            self._built = None

    def frames_without(self, report: Report, numbers: set[int]) -> tuple[Frame, ...]:
        """Return the frames of ``report``, except the frames of some functions that have no compiled graph.

        A frame is left out if it has no compiled graph, and ``numbers`` contains its function's number in events.
        """
        frames = [
            frame
            for frame, (number, _) in zip(report.frames, list(self._frames), strict=False)
            if number not in numbers or any(graph.status == "compiled" for graph in frame.graphs)
        ]
        return (*frames, *report.frames[len(self._frames) :])

    def calls_so_far(self) -> dict[int, int]:
        """Return the count of recorded calls of each function. The key is the function's number in events."""
        return {number: log.compiled + log.eager for (number, _), log in list(self._frames.items())}

    def hear(self, event: events.Event) -> None:
        """Record an event if it is about this cell."""
        match event:
            case events.CompileStarted() | events.CapturedAgain() | events.Called():
                mine = event.function_id in self.numbers
            case events.Spent() | events.Begun():
                mine = self.inside or event.kind == "timing"
            case events.GraphBreak():
                mine = self.inside and not (EXPLICIT_BREAK in event.reason and "/torch/" in str(event.stack[-1:]))
            case _:
                mine = getattr(event, "entry", None) in self._entries
        if mine:
            self.progress.hear(event)
            super().hear(event)
            if isinstance(event, events.CompileFinished):
                live.changed(self.identifier)  # a comparison with eager may follow, which takes long

    def _in_cell(self, row: GraphBreakRow, event: events.GraphBreak) -> GraphBreakRow:
        """Return ``row``, the row of a graph break, with the line of the cell at which the graph ended.

        The line is taken from the Python frames that run now, and from the frames that Dynamo was capturing.
        """
        running = [(frame.f_code, line) for frame, line in traceback.walk_stack(None)]
        lines = [(function_of(code.co_name), line) for code, line in running[::-1] if code.co_filename == self._file]
        captured = [each for each in event.stack if each.filename == self._file]
        lines += [(function_of(each.name), each.lineno or 0) for each in captured]
        numbers = {each.lineno or 0 for each in captured}
        if row.library:
            self.library_lines |= numbers
            self.libraries[why_dynamo_stopped(event.reason)] = row.words
        else:
            self.stops |= numbers
        # The cell's outermost function can occur twice here: as the frame that is running, and as the frame that Dynamo
        # was capturing (the rest of the function after an earlier break). The later one has the line of this break.
        line = next((line for name, line in reversed(lines) if name == lines[0][0]), None)
        in_cell = row.line is not None and is_of_cell(row.line, self._file)
        return replace(row, cell_line=line, where=f"line {row.line.line}" if in_cell and row.line else row.where)
