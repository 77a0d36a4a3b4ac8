"""The base class of quirks that add lines to the run-time function.

    class RepeatedWarnings(EmittingQuirk):
        def emit(self, draft, at):
            if at == "epilogue":
                draft.w.add(f"{draft.w.constant('warn_again', warn_again)}()")

The writers of the prologue and the epilogue call `emit_quirks`.
"""

from __future__ import annotations

from typing import Literal

from aotlab.runtime.draft import Draft
from aotlab.trace.quirk import Quirk

#: The two places where a quirk can add lines to the run-time function: after the guards, and after the graph has run.
Point = Literal["prologue", "epilogue"]


class EmittingQuirk(Quirk):
    """A quirk that adds lines to the run-time function."""

    def emit(self, draft: Draft, at: Point) -> None:
        """Add lines to the run-time function. The method is called once for each `Point`, ``at``."""
        raise NotImplementedError


def emit_quirks(draft: Draft, at: Point) -> None:
    """Let the quirks of the trace add their lines at this point."""
    for quirk in draft.trace.side_effects.quirks:
        if isinstance(quirk, EmittingQuirk):
            quirk.emit(draft, at)
