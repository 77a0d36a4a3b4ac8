"""The unfinished run-time function. The classes that write its sections share one `Draft`."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from aotlab.backends.base import Boxed
from aotlab.capture.call import Call
from aotlab.capture.dedupe import DedupeRecord
from aotlab.capture.synthetic_bases import Base
from aotlab.ir.metadata import OutputAliasInfo
from aotlab.partition.partition_stage import PartitionRecord, Split
from aotlab.runtime.saved_values import SavedValues
from aotlab.trace.live_trace import Trace
from aotlab.trace.records import SizeOf


class Miss:
    """The type of `MISS`, which a generated function returns if one of its guards fails."""

    def __repr__(self) -> str:
        return "MISS"


MISS = Miss()


class Writer:
    """Collects the lines of the generated source, and the objects that the source refers to."""

    def __init__(self, reserved: Sequence[str] = ()) -> None:
        self.lines: list[str] = []
        self.depth = 1
        self.namespace: dict[str, Any] = {"torch": torch, "math": math, "MISS": MISS}
        self._used_names: set[str] = {
            "args", "kwargs", "forward", "torch", "MISS", "run", "Compiled", "results", "lifted", "parameters", "saved",
            "leaves", "nesting", "len", "tuple", "type", "list", "dict", "map", "str", "int", "float", "abs", "math",
            *reserved,
        }  # fmt: skip

    def add(self, line: str = "") -> None:
        """Add a line at the current indentation."""
        self.lines.append("    " * self.depth + line if line else "")

    def local(self, suggestion: str) -> str:
        """Return a local variable's name that resembles ``suggestion`` and is not used yet."""
        name = suggestion if suggestion.isalnum() else re.sub(r"\W+", "_", suggestion).strip("_") or "value"
        if name[0].isdigit():
            name = f"v{name}"
        if keyword.iskeyword(name):
            name = f"{name}_"
        stem, n = name, 1
        while name in self._used_names:
            n += 1
            name = f"{stem}_{n}"
        self._used_names.add(name)
        return name

    def constant(self, suggestion: str, value: Any) -> str:
        """Put ``value`` into the function's globals under an unused name like ``suggestion``; return the name."""
        name = self.local(suggestion)
        self.namespace[name] = value
        return name

    def call(self, name: str, function: Any, *arguments: str) -> str:
        """Return the text of a call of ``function``. The function becomes a global whose name resembles ``name``."""
        return f"{self.constant(name, function)}({', '.join(arguments)})"

    def shared(self, name: str, value: Any) -> str:
        """Put ``value`` into the function's globals under exactly this name. The name always means this value."""
        self.namespace[name] = value
        return name


class SegmentBackward(Protocol):
    """The interface of a segment's backward that the run-time function uses.

    `aotlab.derivatives.backwards.Backward` implements it.

    ``masks`` has for each tangent a bit mask of the traced autograd nodes that gradients reach from it. ``anchors`` are
    the positions of the segment's results that its run-time autograd node saves, so that higher derivatives find the
    node. ``kept_entries`` are the positions of the results that autograd nodes of the traced program save.
    """

    masks: Sequence[int]
    anchors: tuple[int, ...]
    kept_entries: tuple[int, ...]

    def __call__(self, saved: SavedValues, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs of the segment's node, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The results of the earlier stages, from which the run-time function is generated.

    ``forward`` is the compiled forward, and ``backward`` has the backward of each segment. ``settings_hold`` and
    ``tensors_hold`` are torch's C++ guards of settings and of tensors, made under the settings of the traced call.
    ``entry`` is the number of the compiled entry. If ``repeatable`` is true and the compiled forward raises, the call
    can be run again from its beginning. ``exact`` says that the backend's results equal eager's bit for bit.
    ``after_node`` is called when the autograd node of a segment is written, with the draft and the positions of the
    node's results among the forward outputs. It may write further lines; `aotlab.subclasses` uses it.
    """

    call: Call
    dedupe: DedupeRecord
    trace: Trace
    partition: PartitionRecord
    split: Split
    forward: Boxed
    backward: Sequence[SegmentBackward]
    settings_hold: Callable[[], bool]
    tensors_hold: Callable[..., bool]
    entry: int
    repeatable: bool = False
    exact: bool = False
    after_node: Callable[[Draft, Sequence[int]], None] | None = None


class Draft:
    """The lines written so far, and the Python expressions of the values that exist at this point of the function.

    ``w`` collects the lines. The other attributes map values to expressions, or note which code is already written.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.trace = parts.trace
        self.meta = parts.trace.metadata
        self.state = parts.call.state
        self.w = Writer(parts.trace.size_names)
        self.grad_on = bool(dict(self.state.settings)["grad mode"])
        self.expressions: dict[int, str] = {}  # flat position → the expression of the argument
        self.many_names: list[str] = []  # the names of all positional arguments, if there are more than 20
        self.results: dict[int, str] = {}  # position among the forward outputs → the expression of that output
        self.sizes: dict[SizeOf, str] = {}  # symbolic size that is a graph input → the variable that holds it
        self.cut_edges: set[str] = set()  # the variables of the cut edges (see `aotlab.trace.segments`)
        #: The indices of the write-backs whose code is written, and of the kept inputs whose mutations are written.
        self.written: set[int] = set()
        self.changed: set[int] = set()

    # --- expressions of values

    def kept(self, k: int) -> str:
        """Return the expression of kept input ``k`` (the ``k``-th input after deduplication)."""
        return self.expressions[self.parts.dedupe.kept[k]]

    def all_kept(self) -> list[str]:
        """Return the expressions of all inputs that remain after deduplication."""
        return [self.expressions[i] for i in self.parts.dedupe.kept]

    def star(self, expressions: Sequence[str]) -> str:
        """Return the text of an argument list with these expressions.

        The text is ``*args`` if the expressions are exactly the positional arguments of the call, and there are many.
        If the expressions begin with all lifted inputs in order, ``*parameters`` replaces the lifted inputs.
        """
        if self.many_names and list(expressions) == self.many_names:
            return "*args"
        count = self.parts.call.lifted_count
        if count and list(expressions[:count]) == [f"parameters[{i}]" for i in range(count)]:
            return ", ".join(["*parameters", *expressions[count:]])
        return ", ".join(expressions)

    def base_with(self, k: int) -> Base | None:
        """Return the synthetic base that replaces kept input ``k``, or None if no base replaces it."""
        bases = (each for each in self.trace.inputs.sources if isinstance(each, Base))
        return next((base for base in bases if k in base.members), None)

    # --- the forward outputs: new values of mutated inputs, then the user's outputs, then intermediate bases

    def returned_output(self, i: int) -> OutputAliasInfo | None:
        """Return the record of the user's output that is forward output ``i``.

        The result is None if forward output ``i`` is the new value of a mutated input or an intermediate base.
        """
        n = i - len(self.trace.writes)
        returned = self.trace.returned_outputs
        return self.meta.output_info[returned[n]] if 0 <= n < len(returned) else None

    def label(self, i: int) -> str:
        """Return a readable name of forward output ``i``."""
        writes, output = self.trace.writes, self.returned_output(i)
        if i < len(writes):
            return f"new {self.meta.input_info[writes[i].index].name}"
        return f"base {i - len(writes) - len(self.trace.returned_outputs)}" if output is None else output.name

    # --- lines

    def miss(self, conditions: Sequence[str]) -> None:
        """Write an ``if`` that returns `MISS` if any of ``conditions`` is true."""
        line = f"if {' or '.join(conditions)}:"
        if len(line) < 100:
            self.w.add(line)
        else:  # one condition per line
            self.w.add("if (")
            for n, condition in enumerate(conditions):
                self.w.add(f"    {'or ' if n else ''}{condition}")
            self.w.add("):")
        self.w.add("    return MISS")

    def in_context(self, line: str, *, grad_mode: bool | None) -> None:
        """Write a line that runs in grad mode ``grad_mode``; None means the grad mode of the caller."""
        w = self.w
        if grad_mode is None:
            w.add(line)
        else:
            w.add("try:")
            w.add(f"    set_grad_mode({grad_mode})")  # inside of `try`: a KeyboardInterrupt may follow at once
            w.add("    " + line)
            w.add("finally:")
            w.add(f"    set_grad_mode({not grad_mode})")

    def with_grad(self, line: str) -> None:
        """Write a line that runs with grad mode on."""
        self.in_context(line, grad_mode=None if self.grad_on else True)
