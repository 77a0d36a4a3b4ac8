"""Run a graph that Dynamo captured as the user's program would run, and leave all modes if an op in it raises.

Dynamo writes a ``with`` block, or a transform of ``torch.func``, as a node that enters and a node that leaves::

    mode = _enter_inference_mode(True)
    y = x.mul_(2)                       # raises: the next node is never reached
    _exit_inference_mode(mode)

In the user's program, the exception would leave the ``with`` block. In the graph, the mode would stay active until the
mode object is garbage-collected.

Dynamo writes a checkpoint as a higher-order op. When this op computes its function again, it would draw other random
numbers. So the run calls `torch.utils.checkpoint` itself. Similarly, it uses the ``.data`` attribute and a
`torch.autograd.Function` in place of the ops that Dynamo writes for them.
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
from aotlab.trace.running_recorder import set_location

#: The keys of a node's metadata that the recorder copies to the ops that the node calls.
_CARRIED = ("nn_module_stack", "source_fn_stack", "stack_trace", "custom")


def needs_care(graph: fx.Graph) -> bool:
    """Tell whether only `GraphRun` can run a graph correctly.

    Such a graph changes modes, uses transforms, contains checkpoints or autograd functions, or assigns to ``.data``.
    """
    targets = {*internals.MODE_EXITS, *internals.MODE_EXITS.values(), internals.SET_GRAD_ENABLED, internals.CHECKPOINT}
    targets |= {internals.SETS_DATA, internals.FUNCTION_APPLY, torch.Tensor.set_}
    targets_called = {node.target for node in graph.nodes if node.op == "call_function"}
    return not targets_called.isdisjoint(targets) or any(map(internals.opens_transform, targets_called))


class _Applied(torch.autograd.Function):
    """A user's `torch.autograd.Function`, built from the two graphs and the settings that Dynamo captured."""

    @staticmethod
    def forward(
        ctx: Any, forward: fx.GraphModule, backward: fx.GraphModule, settings: dict[str, Any], *inputs: Any
    ) -> Any:
        outputs, values_of_forward = GraphRun(forward).run(*inputs)
        output_list = outputs if isinstance(outputs, (tuple, list)) else [outputs]
        saved = settings["saved_for_backward_idx"]
        ctx.mark_dirty(*(output_list[i] for i in settings.get("dirty_idx", ())))
        ctx.mark_non_differentiable(*(output_list[i] for i in settings["non_differentiable_idx"]))
        ctx.save_for_backward(*(values_of_forward[i] for i in saved))
        ctx.places, ctx.backward_graph = saved, backward
        ctx.others = [None if i in saved else value for i, value in enumerate(values_of_forward)]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "the backward of a torch.autograd.Function that Dynamo captured is differentiated",
                why="Dynamo captures such a backward as if grad mode were off",
                suggestion="use aotlab.compile(…, frontend='direct'), or call the Function outside of compiled code",
            )
        values_of_forward = list(ctx.others)
        if ctx.places:
            for i, value in zip(ctx.places, ctx.saved_tensors, strict=True):
                values_of_forward[i] = value
        gradients_of_inputs = GraphRun(ctx.backward_graph).run(*gradients, *values_of_forward)
        return (
            None,
            None,
            None,
            *(gradients_of_inputs if isinstance(gradients_of_inputs, (tuple, list)) else [gradients_of_inputs]),
        )


class GraphRun(fx.Interpreter):
    """Runs a graph that Dynamo captured, node by node.

    In a trace, ``line`` is a function that returns the user line for the text of a node's stack trace. The recorder
    stores this line with each op. Outside of a trace, ``line`` is None.
    """

    def __init__(self, graph: fx.GraphModule, line: Callable[[str], UserLine | None] | None = None) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # our errors name the user line already
        self._line = line
        self._open: dict[int, tuple[Any, Any]] = {}  # the active modes, with the functions that exit them
        self._dual_levels: list[int] = []  # the open levels of forward-mode differentiation

    def run(self, *args: Any, **settings: Any) -> Any:
        """Run the whole graph. If a node raises, leave the modes and transforms that the graph has entered."""
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
        """Run one node. In a trace, the recorder gets the node's user line and metadata for the ops of the node."""
        self._node = n
        if self._line is None:
            return super().run_node(n)
        text = n.meta.get("stack_trace")
        set_location(
            partial(self._line, text) if text else None, {key: n.meta[key] for key in _CARRIED if key in n.meta}
        )
        try:
            return super().run_node(n)
        finally:
            set_location(None, None)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run a node that calls a function, and keep track of the modes that the function enters or exits."""
        if target is internals.CHECKPOINT:
            return self._checkpoint(args, kwargs)
        if target is internals.FUNCTION_APPLY:
            forward, backward, *inputs = args
            return _Applied.apply(forward, backward, kwargs, *inputs)  # type: ignore[no-untyped-call]  # untyped in torch
        if target is internals.DATA_OF:
            return args[0].data  # the recorder must see this access
        if internals.lowers_version(target):
            return args[0]  # the last part of an assignment to ``.data``
        is_assignment = any(internals.lowers_version(user.target) for user in self._node.users)
        if is_assignment or (target is not None and target is internals.SETS_DATA):
            args[0].data = args[1]  # the recorder must see this assignment
            return args[0]
        result = super().call_function(target, args, kwargs)
        # In the user's program, a comparison of sizes gives a bool. Nobody knows it if the sizes depend on values.
        if isinstance(result, torch.SymBool) and not internals.unbacked_in(result):
            return bool(result)
        opens = internals.opens_dual_level(target)
        if opens is not None:
            self._dual_levels.append(result) if opens else self._dual_levels.pop()
        if target in internals.MODE_EXITS:
            self._open[id(result)] = (result, internals.MODE_EXITS[target])
        elif args:
            self._open.pop(id(args[0]), None)  # if the first argument is an open mode, the function exits it
        return result

    def _checkpoint(self, args: Any, kwargs: Any) -> Any:
        body, *operands = args
        settings = internals.checkpoint_settings(kwargs)
        other_kwargs = {name: value for name, value in kwargs.items() if name not in settings}
        contexts = getattr(body, "meta", {}).get(internals.CHECKPOINT_CONTEXTS)
        if contexts is not None:  # a selective checkpoint
            settings["context_fn"] = contexts
        run = GraphRun(body, self._line).run
        # Each tensor that the checkpointed function uses is an argument of Dynamo's op. `checkpoint` saves its
        # arguments, and raises in the backward if one of them was written since. In the user's program, parameters and
        # buffers are no arguments of the checkpoint, so they may be written. So they are not passed to `checkpoint`.
        placeholder_names = [
            isinstance(each, fx.Node) and each.op == "placeholder" and each.target for each in self._node.args[1:]
        ]
        is_attribute = [re.search(r"_(parameters|buffers)_", str(name)) is not None for name in placeholder_names]

        def call(*checkpointed: Any) -> Any:
            remaining = iter(checkpointed)
            return run(
                *(
                    value if is_attribute_ else next(remaining)
                    for value, is_attribute_ in zip(operands, is_attribute, strict=True)
                ),
                **other_kwargs,
            )

        return checkpoint(
            call,
            *(value for value, is_attribute_ in zip(operands, is_attribute, strict=True) if not is_attribute_),
            **settings,
        )
