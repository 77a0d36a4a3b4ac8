"""What a trace raises when it stops without being wrong."""

from __future__ import annotations


class RunEagerly(Exception):  # noqa: N818  # a signal, not an error: nothing of it reaches the caller
    """Raised in a trace when eager itself has to have its say, most often by raising its own error."""
