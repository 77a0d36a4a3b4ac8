"""The signals by which a trace ends without an error in the user's program."""

from __future__ import annotations

from typing import Any

from aotlab import fallbacks
from aotlab.errors import UserLine


class TraceEnds(Exception):  # noqa: N818  # a signal, not an error
    """Base class of the signals. `aotlab.pipeline` and `aotlab.subclasses` catch them."""


class RunEagerly(TraceEnds):
    """The call must run eagerly, for the reason of one row of `aotlab.fallbacks`.

    Parameters
    ----------
    case
        The id of the row.
    at
        The line of the user's program, or None if the engine does not know it.
    transient
        Whether the engine tries again to compile the next call with the same state. If false, such calls run eagerly
        without another attempt.
    facts
        The values for the fields in braces in the row's sentence and suggestion.
    """

    def __init__(self, case: str, *, at: UserLine | str | None = None, transient: bool = False, **facts: Any) -> None:
        row = fallbacks.ROWS[case]
        self.sentence = row.sentence.format(**facts)
        super().__init__(self.sentence if at is None else f"{self.sentence}, at {at}")
        self.case = case
        self.at = at
        self.transient = transient
        self.suggestion = row.suggestion.format(**facts)


class RetraceNeeded(TraceEnds):
    """The trace found a fact that it needed from the beginning.

    The target stores the fact, and the call is traced again.

    Example: a wrapper subclass has a gradient with other parts than the subclass itself.
    """


class NumbersChange(TraceEnds):
    """The function changes a number in the caller's Python objects. The call is compiled again with it as an input."""


class EntersInferenceMode(TraceEnds):
    """The function itself enters inference mode before its first op. The pipeline then traces it again in that mode."""
