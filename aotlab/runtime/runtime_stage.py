"""Stage 7, runtime: generate the function that serves calls with the compiled graphs.

The earlier stages removed mutations, aliases and other effects from the graphs. The generated function restores them.
It is one straight-line Python function per compiled entry::

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

For training, there is one `Compiled` autograd node for each segment of the traced autograd graph. The write-backs whose
new values a node returns follow this node. Only inputs that can get a gradient are inputs of the node. The backward of
a node is compiled per pattern of defined tangents. `SavedValues` holds the saved values with the same checks as
autograd's own saved tensors. If a kernel raises, the call runs eagerly.

The modules `prologue`, `arguments`, `forward_call`, `mutations`, `output_expressions` and
`saved_values_writer` write the text, in this order. They share one `draft`. The record keeps the text, and `linecache`
shows it in tracebacks.
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
from aotlab.runtime.edge_tensors import Edges
from aotlab.runtime.emitting_quirk import emit_quirks
from aotlab.runtime.forward_call import ForwardCall, can_be_repeated
from aotlab.runtime.mutations import Mutations
from aotlab.runtime.output_expressions import Outputs, write_result
from aotlab.runtime.prologue import Prologue
from aotlab.runtime.saved_values_writer import SavedValuesWriter

__all__ = ["MISS", "Draft", "Miss", "Parts", "RuntimeRecord", "can_be_repeated", "generate", "run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeRecord:
    """The generated function: its file name in tracebacks, and its source."""

    name: str
    source: str


def run(parts: Parts) -> tuple[RuntimeRecord, Callable[[tuple[Any, ...], dict[str, Any]], Any]]:
    """Generate and compile the function that serves an entry's calls.

    The generated function returns the result of the user's function, or `MISS` if one of its guards fails.
    """
    source, namespace = generate(parts)
    name_in_file = re.sub(r"[^\w.]+", "_", parts.call.target.name)
    name = f"<aotlab {name_in_file} entry {parts.entry}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace["shown"] = linecache_token = _LinecacheToken()
    weakref.finalize(linecache_token, linecache.cache.pop, name, None).atexit = False
    exec(compile(source, name, "exec"), namespace)
    # Remove the function from its globals. Otherwise both would form a reference cycle, and a model that the user no
    # longer refers to would live until the garbage collector runs.
    return RuntimeRecord(name=name, source=source), namespace.pop("run")


class _LinecacheToken:
    """An object in the globals of a generated function that dies together with the function.

    When it dies, a finalizer removes the source text of the function, which tracebacks show, from `linecache`.
    """


def generate(parts: Parts) -> tuple[str, dict[str, Any]]:
    """Write prologue, forward call and epilogue. Return the source and its global namespace."""
    draft = Draft(parts)
    outputs = Outputs(draft)
    mutations, saving, edges = Mutations(draft, outputs), SavedValuesWriter(draft), Edges(draft, outputs)
    w = draft.w
    w.namespace["set_grad_mode"] = internals.set_grad_mode
    w.add("# prologue: do the assumptions of the trace hold?")
    prologue = Prologue(draft, saving.counted_together())
    prologue.write()
    w.add()
    ForwardCall(draft, edges, outputs, mutations, saving).write()
    emit_quirks(draft, "epilogue")
    saving.remember()
    output_expressions = outputs.write()
    saving.watch(edges)
    edges.register_hooks("input", "root", "output")
    final_grad_mode = draft.meta.grad_enabled_mutation
    if final_grad_mode is not None:
        w.add(f"set_grad_mode({final_grad_mode})")
    w.add(f"return {write_result(w, draft.trace.outputs.spec, output_expressions)}")
    prologue.guard_sizes()
    return "\n".join(["def run(args, kwargs):", *w.lines]) + "\n", w.namespace
