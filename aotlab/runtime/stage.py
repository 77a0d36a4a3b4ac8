"""Stage 7, runtime: write the function that stands between the caller and the compiled graphs.

What the earlier stages took away, this one gives back, in one straight-line Python function per entry::

    def run(args, kwargs):
        # prologue: do the assumptions of the trace hold?
        if len(args) != 2 or kwargs:
            return MISS
        x, y = args
        if not tensors_hold(x, y):
            return MISS

        # compiled forward
        results = forward([x, y])
        saved = SavedValues(results[2:])
        out_1, = Compiled.apply(backward, saved, (results[1],), y)

        # epilogue: what the caller can see
        x.copy_(results[0])              # the mutation
        out_0 = x.t()                    # an output that aliases an input
        return (out_0, out_1)

For training there is one `Compiled` autograd node for each segment of the traced autograd graph, followed by the writes
that it has the values for. Only inputs that can get a gradient go through it; its backward is compiled for the tangents
that are defined. `SavedValues` does what autograd does for its own. A call whose kernels raise is run eagerly.

The text is written in this order by `prologue` and `arguments`; `forward_call`; `mutations`, `outputs`; `saved`, which
share one `draft`. It is kept in the record, and by `linecache` for tracebacks.
"""

from __future__ import annotations

import linecache
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aotlab import _torch as internals
from aotlab.runtime.draft import MISS, Draft, Miss, Parts
from aotlab.runtime.edges import Edges
from aotlab.runtime.forward_call import ForwardCall, can_be_repeated
from aotlab.runtime.mutations import Mutations
from aotlab.runtime.outputs import Outputs, write_result
from aotlab.runtime.prologue import Prologue
from aotlab.runtime.saved import Keeping

__all__ = ["MISS", "Miss", "Parts", "RuntimeRecord", "can_be_repeated", "generate", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeRecord:
    """The generated function: its file name in tracebacks, and its source."""

    name: str
    source: str


def run(parts: Parts) -> tuple[RuntimeRecord, Callable[[tuple[Any, ...], dict[str, Any]], Any]]:
    """Make the function that serves an entry's calls: it returns what the user's would, or `MISS` by its guards."""
    source, namespace = generate(parts)
    safe = re.sub(r"[^\w.]+", "_", parts.call.target.name)
    name = f"<aotlab {safe} entry {parts.entry}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace["shown"] = shown = _Shown()
    weakref.finalize(shown, linecache.cache.pop, name, None).atexit = False
    exec(compile(source, name, "exec"), namespace)
    # not among its own globals: in a cycle a model that was dropped would live until the garbage collector comes
    return RuntimeRecord(name=name, source=source), namespace.pop("run")


class _Shown:
    """Stands for the source: that is shown in tracebacks for as long as the function is there."""


def generate(parts: Parts) -> tuple[str, dict[str, Any]]:
    """Write prologue, call and epilogue; return the source and what it refers to."""
    draft = Draft(parts)
    outputs = Outputs(draft)
    mutations, keeping, edges = Mutations(draft, outputs), Keeping(draft), Edges(draft, outputs)
    w = draft.w
    w.namespace["set_grad_mode"] = internals.set_grad_mode
    w.add("# prologue: do the assumptions of the trace hold?")
    prologue = Prologue(draft, keeping.counted_together())
    prologue.write()
    w.add()
    ForwardCall(draft, edges, outputs, mutations, keeping).write()
    keeping.remember()
    for quirk in draft.trace.side_effects.quirks:
        quirk.emit(draft, "epilogue")
    made = outputs.write()
    keeping.watch(edges)
    edges.register_hooks("input", "root", "output")
    left = draft.meta.grad_enabled_mutation
    if left is not None:
        w.add(f"set_grad_mode({left})")
    w.add(f"return {write_result(w, draft.trace.outputs.spec, made)}")
    prologue.assume()
    return "\n".join(["def run(args, kwargs):", *w.lines]) + "\n", w.namespace
