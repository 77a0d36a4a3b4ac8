"""The base class of quirks. A quirk is code for one rare case, which the rest of the engine need not handle.

    class Clocks(Quirk):
        name = "clocks"

        def claims(self):
            return {time.time: self._read}        # instead of running eagerly

A quirk may claim the functions in `aotlab.trace.boundary.CLAIMABLE`. A quirk that adds lines to the run-time function
is an `aotlab.runtime.emitting_quirk.EmittingQuirk`. The quirks themselves are in `aotlab.quirks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from aotlab.trace.escapes import Handler
from aotlab.trace.findings import Findings
from aotlab.trace.inputs import TracedInput
from aotlab.trace.recorder import OpHandler


class Quirk:
    """The code for one rare case; each trace has its own instance, and no other quirk reads its attributes."""

    name: ClassVar[str]

    def claims(self) -> Mapping[Any, Handler]:
        """Return the functions of `CLAIMABLE` that the quirk claims, each with the handler that replaces it."""
        return {}

    def ops(self) -> Mapping[Any, OpHandler]:
        """Return the ops that the quirk records itself, each with its handler."""
        return {}

    def after_run(self, inputs: Sequence[TracedInput]) -> None:
        """Correct the traced inputs after the function has run, before anything is read from them."""

    def check(self, findings: Findings) -> None:
        """Check the findings of the run; raise `RunEagerly` if the compiled call would differ from eager."""


def claims_of(quirks: Iterable[Quirk]) -> dict[Any, Handler]:
    """Return the functions that the quirks claim, each with its handler. `EscapeGuard` calls the handlers."""
    return {function: handler for quirk in quirks for function, handler in quirk.claims().items()}


def op_handlers_of(quirks: Iterable[Quirk]) -> dict[Any, OpHandler]:
    """Return the ops that the quirks record themselves, each with its handler. The `Recorder` calls the handlers."""
    return {op: handler for quirk in quirks for op, handler in quirk.ops().items()}
