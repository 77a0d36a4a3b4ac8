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
        The user's line, or None if it is not known.
    transient
        Whether the next call that looks the same may be compiled.
    facts
        The values for the fields of the row's sentence and suggestion.
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
    """The trace found a fact that it should have known from the beginning. The target stores it for the next trace.

    Example: a wrapper subclass has a gradient with other parts than the subclass itself.
    """


class EntersInferenceMode(TraceEnds):
    """The function enters inference mode before it computes anything; it is traced in that mode."""
