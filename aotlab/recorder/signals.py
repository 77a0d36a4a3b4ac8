"""What a trace raises when it stops without being wrong."""

from __future__ import annotations

#: What nearly all of them have in common: something is changed in place by rules that only eager knows.
_ELSEWHERE = "return a new tensor, or change a clone, to have it compiled"


class RunEagerly(Exception):  # noqa: N818  # a signal, not an error: the caller gets eager's result
    """Raised in a trace when eager itself has to have its say, perhaps by raising its own error.

    ``passing`` says that the next call that looks the same need not be like this one; ``suggestion`` what would let it
    be compiled.
    """

    def __init__(self, reason: str, *, passing: bool = False, suggestion: str = _ELSEWHERE) -> None:
        super().__init__(reason)
        self.passing = passing
        self.suggestion = suggestion


class LeftToPython(RunEagerly):
    """Raised where it is not memory that keeps a call from being traced: the call is not traced again."""


class NeedsRoom(RunEagerly):
    """Raised where the storage of the kept input ``member`` has to have at least ``nbytes`` bytes."""

    def __init__(self, member: int, nbytes: int) -> None:
        super().__init__(f"the storage of an input grows to {nbytes} bytes")
        self.member = member
        self.nbytes = nbytes


class NeedsAnother(RunEagerly):
    """Raised where it matters that an input is a view of a tensor that requires no grad, which the trace has not."""
