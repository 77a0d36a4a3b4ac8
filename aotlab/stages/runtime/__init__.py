"""Stage 7, runtime: write the function that stands between the caller and the compiled graphs.

The graphs are pure; the caller's function was not. What the earlier stages took away, this one gives back, as one
straight-line Python function per entry, with no case in it that the metadata rules out::

    def run(args, kwargs):
        # guards: is this a call that the entry was compiled for?
        if len(args) != 2 or kwargs: return MISS
        x, y = args
        if not tensors_hold(x, y): return MISS
        # compiled forward
        new_x, out_2 = Compiled.apply(x, y)
        # epilogue
        x.copy_(new_x)                   # the mutation
        out_0 = x.t()                    # an output that aliases an input
        return (out_0, out_2[0], out_2)

A kernel that raises leaves everything as it was, where eager has written ``x`` by then; so the call of the compiled
forward stands in a ``try``, and a call whose kernels raise is run eagerly, from its beginning (`failing`).

Only inputs that can get a gradient go through ``apply``; everything else passes by it in a list. The text is kept in
the record, and registered with `linecache`, so that tracebacks show it.

For training there is one `torch.autograd.Function` per entry. Its backward is compiled for the tangents that are
defined; saved values are kept by `SavedValues`, which does what autograd does for its own.

`generator` puts the function together from its parts, each written by a file of its own, in the order of the text:
`prologue` and `arguments`; `forward_call` or, for a graph in several segments, `segment_calls`; `mutations`, `outputs`
and `view_calls`. They share one `draft`. What runs later is in `memory_checks`, `debug_checks`, `saved`, `backward`.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from aotlab import torch_internals as internals
from aotlab.stages.runtime.backward import Backward, Compiled
from aotlab.stages.runtime.draft import Parts
from aotlab.stages.runtime.failing import ForwardFailed, can_be_repeated
from aotlab.stages.runtime.generator import Generator, generate
from aotlab.stages.runtime.higher import Higher
from aotlab.stages.runtime.saved import SavedValues, restride
from aotlab.stages.runtime.writer import MISS, Miss

__all__ = [
    "MISS",
    "Backward",
    "Compiled",
    "ForwardFailed",
    "Generator",
    "Higher",
    "Miss",
    "Parts",
    "RuntimeRecord",
    "SavedValues",
    "can_be_repeated",
    "generate",
    "restride",
    "run",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeRecord:
    """The generated function: its file name in tracebacks, and its source."""

    name: str
    source: str


def run(parts: Parts) -> tuple[RuntimeRecord, Callable[[tuple[Any, ...], dict[str, Any]], Any]]:
    """Write, compile and return the function that serves one entry's calls.

    It takes ``args`` and ``kwargs`` and returns what the user's function would, or `MISS` if the guards do not hold.
    """
    source, namespace = generate(parts)
    safe = re.sub(r"[^\w.]+", "_", parts.call.target.name)
    name = f"<aotlab {safe} entry {parts.entry}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)
    for each in list(namespace.values()):
        backward = getattr(each, "backward", None) if isinstance(each, type) else None
        if isinstance(backward, FunctionType) and backward.__code__.co_filename == name:
            internals.unseen_by_dynamo(backward)
    return RuntimeRecord(name=name, source=source), namespace["run"]
