"""The generator of the run-time function: prologue, call and epilogue, in this order."""

from __future__ import annotations

from typing import Any

from aotlab import _torch as internals
from aotlab.runtime.draft import Draft, Parts
from aotlab.runtime.edges import Edges
from aotlab.runtime.forward_call import ForwardCall
from aotlab.runtime.keeping import Keeping
from aotlab.runtime.mutations import Mutations
from aotlab.runtime.nests import write_result
from aotlab.runtime.outputs import Outputs
from aotlab.runtime.prologue import Prologue
from aotlab.runtime.segment_calls import SegmentCalls
from aotlab.trace.warned import warn_again


def generate(parts: Parts) -> tuple[str, dict[str, Any]]:
    """Write the source and gather what it refers to."""
    return Generator(parts).generate()


class Generator:
    """Writes the source of one entry's run-time function."""

    def __init__(self, parts: Parts) -> None:
        self._draft = Draft(parts)
        self._outputs = Outputs(self._draft)
        self._mutations = Mutations(self._draft, self._outputs)
        self._keeping = Keeping(self._draft)
        self._edges = Edges(self._draft, self._outputs)

    def generate(self) -> tuple[str, dict[str, Any]]:
        """Write prologue, call and epilogue; return the source and what it refers to."""
        draft, edges, w = self._draft, self._edges, self._draft.w
        w.namespace["forward"] = draft.parts.forward
        w.namespace["set_grad_mode"] = internals.set_grad_mode
        w.namespace["disable_autocast"] = internals.disable_autocast
        body = w.lines
        w.add("# prologue: do the assumptions of the trace hold?")
        Prologue(draft, self._keeping.counted_together()).write()
        w.add()
        if draft.trace.training and not draft.trace.is_whole:
            SegmentCalls(draft, edges, self._outputs, self._mutations, self._keeping).write()
            w.add()
            w.add("# epilogue: what the caller can see besides")
        else:
            ForwardCall(draft, edges, self._mutations, self._keeping).write()
            edges.register_hooks("input")
            w.add()
            w.add("# epilogue: what the caller can see")
            self._mutations.write(draft.results)
        self._keeping.remember()
        if draft.trace.effects.warned:  # not before the graph ran: where that raises, eager warns
            noted = w.constant("noted", draft.trace.effects.warned)
            w.add(f"{w.constant('warn_again', warn_again)}({noted})  # as the function does, at each call")
        outputs = self._outputs.write()
        self._keeping.watch(edges)
        edges.register_hooks("input", "changed", "root", "output")
        self._leave_grad_mode()
        w.add(f"return {write_result(w, draft.trace.outputs.spec, outputs[: draft.trace.outputs.visible])}")
        source = "\n".join([*draft.heads, "def run(args, kwargs):", *body]) + "\n"
        return source, w.namespace

    def _leave_grad_mode(self) -> None:
        left = self._draft.meta.grad_enabled_mutation
        if left is not None:
            self._draft.w.add(f"set_grad_mode({left})")
