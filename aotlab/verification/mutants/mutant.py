"""What a mutant is, and the changes that several of them make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

#: Replaces a function: gets the original, returns what takes its place.
Change = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A mistake: its ``name``, what it ``breaks`` as a sentence, and the functions of the engine that it changes.

    Each of ``changes`` is (owner, name of the function, change). One is enough, except where a second guard stands
    behind the first and would let the call run eagerly.
    """

    name: str
    breaks: str
    changes: tuple[tuple[Any, str, Change], ...]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Break the engine for the length of a ``with`` block."""
        originals = [(owner, name, vars(owner)[name]) for owner, name, _ in self.changes]
        for (owner, name, change), (_, _, original) in zip(self.changes, originals, strict=True):
            setattr(owner, name, change(original))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


def skip(_: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function do nothing."""
    return lambda *args, **kwargs: None
