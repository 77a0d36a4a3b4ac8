"""The function as far as it is written: what all the writers of its parts share."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from aotlab.backends.base import Boxed
from aotlab.capture.call import Call
from aotlab.capture.dedupe import DedupeRecord
from aotlab.capture.synthetic_bases import Base
from aotlab.ir.metadata import OutputAliasInfo
from aotlab.partition.stage import PartitionRecord, Split
from aotlab.trace.live import Trace
from aotlab.trace.records import SizeOf

if TYPE_CHECKING:
    from aotlab.derivatives.backwards import Backward


class Miss:
    """What a generated function returns for a call that its guards do not hold for."""

    def __repr__(self) -> str:
        return "MISS"


MISS = Miss()


class Writer:
    """Collects the lines of the generated source and the objects that it refers to."""

    def __init__(self, reserved: Sequence[str] = ()) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self.namespace: dict[str, Any] = {"torch": torch, "math": math, "MISS": MISS}
        self._taken: set[str] = {
            "args", "kwargs", "forward", "torch", "MISS", "run", "Compiled", "results", "lifted", "parameters", "saved",
            "leaves", "nesting", "len", "tuple", "type", "list", "dict", "map", "str", "int", "float", "abs", "math",
            *reserved,
        }  # fmt: skip

    def add(self, line: str = "") -> None:
        """Add a line at the present depth."""
        self.lines.append("    " * self.depth + line if line else "")

    def local(self, wanted: str) -> str:
        """Make up a local name that reads like ``wanted``."""
        name = wanted if wanted.isalnum() else re.sub(r"\W+", "_", wanted).strip("_") or "value"
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

    def call(self, name: str, function: Any, *arguments: str) -> str:
        """Return the expression of a call of ``function``, which gets a name like ``name``."""
        return f"{self.constant(name, function)}({', '.join(arguments)})"

    def shared(self, name: str, value: Any) -> str:
        """Make ``value`` reachable under this very name, which always stands for it."""
        self.namespace[name] = value
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the function is made of.

    ``settings_hold`` and ``tensors_hold`` are torch's C++ guards, made while the call's own settings were in force.
    ``repeatable``: a call whose compiled forward raises can be run again from its beginning; ``exact``: the backend
    computes bit for bit what eager does.
    """

    call: Call
    dedupe: DedupeRecord
    trace: Trace
    partition: PartitionRecord
    split: Split
    forward: Boxed
    backward: Sequence[Backward]
    settings_hold: Callable[[], bool]
    tensors_hold: Callable[..., bool]
    entry: int
    repeatable: bool = False
    exact: bool = False


class Draft:
    """The lines so far, and the expressions of what is there at this point of the function."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.trace = parts.trace
        self.meta = parts.trace.metadata
        self.state = parts.call.state
        self.w = Writer(parts.trace.size_names)
        self.grad_on = bool(dict(self.state.settings)["grad mode"])
        self.expressions: dict[int, str] = {}  # flat position → that argument
        self.many: list[str] = []  # the names of all that ``args`` holds, if it is long
        self.results: dict[int, str] = {}  # position among the forward outputs → that output
        self.sizes: dict[SizeOf, str] = {}  # the sizes that the graphs take
        self.cut_edges: set[str] = set()
        #: Which of the trace's writes are done, and which of the inputs are changed as the function did.
        self.written: set[int] = set()
        self.changed: set[int] = set()

    # --- what is there

    def kept(self, k: int) -> str:
        """Return the expression of the kept input ``k``."""
        return self.expressions[self.parts.dedupe.kept[k]]

    def all_kept(self) -> list[str]:
        """Return the expressions of all kept inputs."""
        return [self.expressions[i] for i in self.parts.dedupe.kept]

    def star(self, expressions: Sequence[str]) -> str:
        """Write an argument list, with ``*parameters`` for all the lifted ones where they stand in order."""
        if self.many and list(expressions) == self.many:
            return "*args"
        count = self.parts.call.lifted_count
        if count and list(expressions[:count]) == [f"parameters[{i}]" for i in range(count)]:
            return ", ".join(["*parameters", *expressions[count:]])
        return ", ".join(expressions)

    def base_with(self, k: int) -> Base | None:
        """Return the synthetic base of which the kept input ``k`` is a part."""
        bases = (each for each in self.trace.inputs.sources if isinstance(each, Base))
        return next((base for base in bases if k in base.members), None)

    # --- the forward outputs: new values of inputs, then what is returned, then intermediate bases

    def returned_output(self, i: int) -> OutputAliasInfo | None:
        """Return the user's output that the forward output ``i`` is; None for new values of inputs, and for bases."""
        n = i - len(self.trace.writes)
        returned = self.trace.returned_outputs
        return self.meta.output_info[returned[n]] if 0 <= n < len(returned) else None

    def label(self, i: int) -> str:
        """Name the forward output ``i``."""
        writes, output = self.trace.writes, self.returned_output(i)
        if i < len(writes):
            return f"new {self.meta.input_info[writes[i].index].name}"
        return f"base {i - len(writes) - len(self.trace.returned_outputs)}" if output is None else output.name

    # --- lines

    def miss(self, conditions: Sequence[str]) -> None:
        """Write that under any of these conditions the entry does not serve the call."""
        line = f"if {' or '.join(conditions)}:"
        if len(line) < 100:
            self.w.add(line)
        else:  # one below the other
            self.w.add("if (")
            for n, condition in enumerate(conditions):
                self.w.add(f"    {'or ' if n else ''}{condition}")
            self.w.add("):")
        self.w.add("    return MISS")

    def in_context(self, line: str, *, grad_mode: bool | None) -> None:
        """Write a line that runs in this grad mode (None: the one that is on)."""
        w = self.w
        if grad_mode is None:
            w.add(line)
        else:
            w.add("try:")
            w.add(f"    set_grad_mode({grad_mode})")  # in here, since an interrupt may come behind it
            w.add("    " + line)
            w.add("finally:")
            w.add(f"    set_grad_mode({not grad_mode})")

    def with_grad(self, line: str) -> None:
        """Write a line that runs with grad mode on."""
        self.in_context(line, grad_mode=None if self.grad_on else True)
