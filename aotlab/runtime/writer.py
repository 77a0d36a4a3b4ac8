"""A writer of Python source: lines, fresh names, and the objects that the lines refer to."""

from __future__ import annotations

import keyword
import re
from typing import Any

import torch


class Miss:
    """What a generated function returns for a call that its guards do not hold for."""

    def __repr__(self) -> str:
        return "MISS"


MISS = Miss()


class Writer:
    """Collects the lines of the generated source and the objects that it refers to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self.namespace: dict[str, Any] = {"torch": torch, "MISS": MISS}
        self._taken: set[str] = {
            "args", "kwargs", "forward", "torch", "MISS", "run", "Compiled", "out", "lifted", "parameters", "saved",
            "leaves", "nesting", "len", "tuple", "type", "list", "dict", "map", "str",
        }  # fmt: skip

    def add(self, line: str = "") -> None:
        """Add a line at the present depth."""
        self.lines.append("    " * self.depth + line if line else "")

    def local(self, wanted: str) -> str:
        """Make up a local name that reads like ``wanted``."""
        name = re.sub(r"\W+", "_", wanted).strip("_") or "value"
        if name[0].isdigit():
            name = f"v{name}"
        if keyword.iskeyword(name):
            name = f"{name}_"
        stem, n = name, 1
        while name in self._taken:
            n += 1
            name = f"{stem}_{n}"
        self._taken.add(name)
        return name

    def constant(self, wanted: str, value: Any) -> str:
        """Make ``value`` reachable under a name like ``wanted``."""
        name = self.local(wanted)
        self.namespace[name] = value
        return name

    def shared(self, name: str, value: Any) -> str:
        """Make ``value`` reachable under this very name, which always stands for it."""
        self.namespace[name] = value
        return name
