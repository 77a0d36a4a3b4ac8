"""What a trace raises when it stops without being wrong."""

from __future__ import annotations

#: What nearly all of them have in common: something is changed in place by rules that only eager knows.
_ELSEWHERE = "return a new tensor, or change a clone, to have it compiled"


class RunEagerly(Exception):  # noqa: N818  # a signal, not an error: the caller gets eager's result
    """Raised in a trace when eager itself has to have its say, perhaps by raising its own error.

    ``passing``: the next call that looks the same need not be like it; ``suggestion``: what would let it be compiled.
    """

    def __init__(self, reason: str, *, passing: bool = False, suggestion: str = _ELSEWHERE) -> None:
        super().__init__(reason)
        self.passing = passing
        self.suggestion = suggestion


class EntersInferenceMode(RunEagerly):
    """Raised where a function enters inference mode before it computes anything; it is traced in that mode."""
