"""Runs a graph that Dynamo captured, and leaves the modes as they were if an op in it raises.

Dynamo writes a ``with`` block, or a transform of ``torch.func``, as a node that enters and a node that leaves::

    mode = _enter_inference_mode(True)
    y = x.mul_(2)                       # raises: the next node is never reached
    _exit_inference_mode(mode)

In the user's program the block would have been left; here its mode would last until the object is collected.

Dynamo writes a checkpoint as a higher-order op, which draws other random numbers when it computes its body again: here
the checkpoint itself is called. So is ``.data``, and a user's `torch.autograd.Function` is one again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from aotlab import _torch as internals
from aotlab.errors import DoubleBackwardError, UserLine
from aotlab.trace.running import locate

_CARRIED = ("nn_module_stack", "source_fn_stack", "stack_trace", "custom")


def needs_care(graph: fx.Graph) -> bool:
    """Tell whether a graph has to be run by a `GraphRun`: changes modes, has checkpoints, or assigns to ``.data``."""
    targets = {*internals.MODE_EXITS, *internals.MODE_EXITS.values(), internals.SET_GRAD_ENABLED, internals.CHECKPOINT}
    targets |= {internals.SETS_DATA, internals.FUNCTION_APPLY}
    called = {node.target for node in graph.nodes if node.op == "call_function"}
    return not called.isdisjoint(targets) or any(map(internals.opens_transform, called))


class _Applied(torch.autograd.Function):
    """A user's function as Dynamo wrote it: two graphs, and which outputs and which of what is kept are special."""

    @staticmethod
    def forward(
        ctx: Any, forward: fx.GraphModule, backward: fx.GraphModule, settings: dict[str, Any], *given: Any
    ) -> Any:
        outputs, kept = GraphRun(forward).run(*given)
        several = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        saved = settings["saved_for_backward_idx"]
        ctx.mark_dirty(*(several[i] for i in settings.get("dirty_idx", ())))
        ctx.mark_non_differentiable(*(several[i] for i in settings["non_differentiable_idx"]))
        ctx.save_for_backward(*(kept[i] for i in saved))
        ctx.places, ctx.backward_graph = saved, backward
        ctx.others = [None if i in saved else value for i, value in enumerate(kept)]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "the backward of a torch.autograd.Function that Dynamo captured is to be differentiated",
                why="Dynamo writes it as if grad mode were off in it",
                suggestion="take aotlab.compile(…, frontend='direct'), or call it outside of the compiled function",
            )
        kept = list(ctx.others)
        if ctx.places:
            for i, value in zip(ctx.places, ctx.saved_tensors, strict=True):
                kept[i] = value
        found = GraphRun(ctx.backward_graph).run(*gradients, *kept)
        return None, None, None, *(found if isinstance(found, (tuple, list)) else [found])


class GraphRun(fx.Interpreter):
    """One run of a graph of Dynamo's; ``line`` reads, for the recorder, stack traces."""

    def __init__(self, graph: fx.GraphModule, line: Callable[[str], UserLine | None] | None = None) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # our errors name the line; torch's words about the graph would stand behind them
        self._line = line
        self._open: dict[int, tuple[Any, Any]] = {}  # what was entered: the object, and the function that leaves it
        self._dual_levels: list[int] = []  # of forward-mode differentiation, those that are open

    def run(self, *args: Any, **settings: Any) -> Any:
        """Run the whole graph."""
        grad_mode = torch.is_grad_enabled()
        transforms = internals.TransformState()
        try:
            return super().run(*args, **settings)
        except BaseException:
            for mode, leave in reversed(self._open.values()):
                leave(mode)
            transforms.restore(self._dual_levels)
            torch.set_grad_enabled(grad_mode)
            raise
        finally:
            self._open.clear()
            self._dual_levels.clear()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        self._node = n
        if self._line is None:
            return super().run_node(n)
        text = n.meta.get("stack_trace")
        locate(partial(self._line, text) if text else None, {key: n.meta[key] for key in _CARRIED if key in n.meta})
        try:
            return super().run_node(n)
        finally:
            locate(None, None)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function, and note which modes it enters or leaves."""
        if target is internals.CHECKPOINT:
            return self._checkpoint(args, kwargs)
        if target is internals.FUNCTION_APPLY:
            forward, backward, *given = args
            return _Applied.apply(forward, backward, kwargs, *given)  # type: ignore[no-untyped-call]  # untyped in torch
        if target is internals.DATA_OF:
            return args[0].data  # which the recorder sees
        if target is not None and target is internals.SETS_DATA:
            args[0].data = args[1]  # the same
            return args[0]
        result = super().call_function(target, args, kwargs)
        if isinstance(result, torch.SymBool):  # as wherever the program's own code compares sizes and numbers
            return bool(result)
        opens = internals.opens_dual_level(target)
        if opens is not None:
            self._dual_levels.append(result) if opens else self._dual_levels.pop()
        if target in internals.MODE_EXITS:
            self._open[id(result)] = (result, internals.MODE_EXITS[target])
        elif args:
            self._open.pop(id(args[0]), None)  # only the function that leaves a mode takes one
        return result

    def _checkpoint(self, args: Any, kwargs: Any) -> Any:
        body, *rest = args
        settings = internals.checkpoint_settings(kwargs)
        others = {name: value for name, value in kwargs.items() if name not in settings}
        contexts = getattr(body, "meta", {}).get(internals.CHECKPOINT_CONTEXTS)
        if contexts is not None:  # what a selective checkpoint keeps serves one backward
            settings["context_fn"] = contexts
        run = GraphRun(body, self._line).run
        # Dynamo hands over all that the body uses; a checkpoint keeps, and watches for writes, but the user's arguments
        found = [isinstance(each, fx.Node) and each.op == "placeholder" and each.target for each in self._node.args[1:]]
        own = [re.search(r"_(parameters|buffers)_", str(name)) is not None for name in found]

        def call(*given: Any) -> Any:
            left = iter(given)
            return run(*(value if is_own else next(left) for value, is_own in zip(rest, own, strict=True)), **others)

        return checkpoint(call, *(value for value, is_own in zip(rest, own, strict=True) if not is_own), **settings)
