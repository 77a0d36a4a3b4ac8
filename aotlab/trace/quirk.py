"""What a quirk is: a corner of Python or torch that is compiled by one file, of which the core knows nothing.

    class Clocks(Quirk):
        name = "clocks"

        def claims(self):
            return {time.time: self._read}        # in the place of "it runs eagerly"

What it may claim has a row in `aotlab.trace.boundary.CLAIMABLE`. The quirks themselves are in `aotlab.quirks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    from aotlab.runtime.draft import Draft
    from aotlab.trace.escapes import EscapeGuard
    from aotlab.trace.function import Findings
    from aotlab.trace.recorder import Recorder

#: Does what the program called: it is given the guard of the trace, the function, its arguments.
Handler = Callable[["EscapeGuard", Any, tuple[Any, ...], dict[str, Any]], Any]
#: Records an op, or returns NotImplemented: it is given the recorder and the arguments.
OpHandler = Callable[["Recorder", tuple[Any, ...], dict[str, Any]], Any]
#: Where lines can be added to the run-time function: the last guards, and what follows when the graph has run.
Point = Literal["prologue", "epilogue"]


class Quirk:
    """One corner, for one trace: what it remembers are its own attributes, which no other quirk reads."""

    name: ClassVar[str]

    def claims(self) -> Mapping[Any, Handler]:
        """Return what it does in the place of functions in `CLAIMABLE`."""
        return {}

    def ops(self) -> Mapping[Any, OpHandler]:
        """Return how it records ops."""
        return {}

    def check(self, findings: Findings) -> None:
        """Look at what the run showed; raise `RunEagerly` if the compiled call would not be eager's equal."""

    def emit(self, draft: Draft, at: Point) -> None:
        """Write lines of the run-time function."""
