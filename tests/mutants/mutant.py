"""The record of a mutant, and a change that several mutants use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

#: Takes the original function and returns its replacement.
Change = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A mistake: its ``name``, its effect as a sentence (``breaks``), and the functions of the engine that it changes.

    Each of ``changes`` is (owner, name of the function, change). Usually one is enough. More are needed if a second
    guard would notice the mistake and let the call run eagerly.
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
    """Return a function that does nothing."""
    return lambda *args, **kwargs: None
