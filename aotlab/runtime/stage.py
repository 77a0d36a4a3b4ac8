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
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from aotlab import _torch as internals
from aotlab.runtime.backward import Backward, Compiled
from aotlab.runtime.draft import Parts
from aotlab.runtime.failing import ForwardFailed, can_be_repeated
from aotlab.runtime.generator import Generator, generate
from aotlab.runtime.saved import SavedValues, restride
from aotlab.runtime.writer import MISS, Miss

__all__ = [
    "MISS",
    "Backward",
    "Compiled",
    "ForwardFailed",
    "Generator",
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

    It has globals of its own. Among them are functions that lead to the caller's parameters and closures; in those of
    the classes for autograd they would be part of a cycle, for a class refers to itself, and a model that was dropped
    would live until the garbage collector comes.
    """
    source, namespace = generate(parts)
    safe = re.sub(r"[^\w.]+", "_", parts.call.target.name)
    name = f"<aotlab {safe} entry {parts.entry}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace["shown"] = shown = _Shown()
    weakref.finalize(shown, linecache.cache.pop, name, None).atexit = False
    exec(compile(source, name, "exec"), namespace)
    made = namespace["run"]
    served = FunctionType(made.__code__, dict(namespace), made.__name__)
    needed = {"shown", "__builtins__"}
    for each in list(namespace.values()):
        own = _functions_of(each, name) if isinstance(each, type) else []
        for function in own:
            needed.update(_globals_in(function.__code__))
            if function.__name__ == "backward":
                internals.unseen_by_dynamo(function)
    for unneeded in namespace.keys() - needed:
        del namespace[unneeded]
    return RuntimeRecord(name=name, source=source), served


class _Shown:
    """Stands for the source: that is shown in tracebacks for as long as a function from it is there."""


def _functions_of(made: type, name: str) -> list[FunctionType]:
    """Return the functions of a class that the source with this name defines."""
    own = (each.__func__ for each in vars(made).values() if isinstance(each, staticmethod))
    return [each for each in own if isinstance(each, FunctionType) and each.__code__.co_filename == name]


def _globals_in(code: CodeType) -> set[str]:
    """Return the names that code, and code within it, may look up among its globals."""
    inner = (_globals_in(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)
