"""torch's higher-order ops (the op of ``torch.cond`` is one), and their lowering by Inductor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv as ShapeEnv
from torch.utils import _pytree as pytree


class _LoopBackward(HigherOrderOperator):
    """The op that computes the backward of a ``torch.while_loop``.

    It runs all steps of the loop again, and then differentiates them from the last to the first. ``steps`` is the
    number of steps, as a tensor. ``body`` is the function of one step. It takes the values that one step passes to the
    next, and the tensors ``additional_inputs``, which are the same at each step. ``carried`` are these values before
    the first step. ``gradients_and_sums`` are the gradients of the results of the loop, followed by zeros: one tensor
    of zeros for each tensor in ``additional_inputs`` that gets a gradient. The backward replaces the former by the
    gradients of ``carried``, and adds the gradients of ``additional_inputs`` to the latter. ``body_backward`` does this
    for one step: it takes the gradients and sums after the step, the values before the step, and ``additional_inputs``,
    and returns the gradients and sums before the step.

    On fake tensors one call of ``body_backward`` is enough, because the sizes of the gradients are the same at each
    step.
    """

    def __call__(
        self,
        body: Any,
        body_backward: Any,
        steps: Tensor,
        carried: Any,
        additional_inputs: Any,
        gradients_and_sums: Any,
    ) -> Any:
        if isinstance(steps, FakeTensor):
            return body_backward(*gradients_and_sums, *carried, *additional_inputs)
        return self.as_loops(body, body_backward, steps, carried, additional_inputs, gradients_and_sums)

    def as_loops(
        self,
        body: Any,
        body_backward: Any,
        steps: Tensor,
        carried: Any,
        additional_inputs: Any,
        gradients_and_sums: Any,
    ) -> Any:
        """Compute the backward with two loops that Inductor supports.

        The first loop runs the steps forward, and stacks the values that each step passes to the next. The second loop
        goes backwards through these stacks.
        """
        count = len(carried)
        _, *stacks = torch.ops.higher_order.while_loop_stack_output(
            lambda n, *given: n < given[-1],
            lambda n, *given: (n + 1, *body(*given[:-1])),
            (steps * 0, *carried),
            (*additional_inputs, steps),
        )

        def step_back(n: Tensor, *given: Any) -> Any:
            gradients, starts, ends, others = parts(
                given, len(gradients_and_sums), count, count, len(additional_inputs)
            )
            before = [torch.ops.aten.index(each, [(n - 1) * (n > 0)]) for each in ends]
            values = [torch.where(n == 0, start, each) for start, each in zip(starts, before, strict=True)]
            return (n - 1, *body_backward(*gradients, *values, *others))

        return WHILE_LOOP(
            lambda n, *_: n >= 0, step_back, (steps - 1, *gradients_and_sums), (*carried, *stacks, *additional_inputs)
        )[1:]


COND: Any = torch.ops.higher_order.cond
FLEX_ATTENTION: Any = flex_attention
FLEX_ATTENTION_BACKWARD: Any = flex_attention_backward
MAP: Any = map_impl
SCAN: Any = scan_op
WHILE_LOOP: Any = while_loop_op
LOOP_BACKWARD: Any = _LoopBackward("loop_backward")  # type: ignore[no-untyped-call]  # untyped in torch
#: The mode under which ``x[n]`` with a tensor ``n`` is an op that does not read the value of ``n`` in Python.
IndexesByTensors = TransformGetItemToIndex
HIGHER_ORDER = (COND, FLEX_ATTENTION, FLEX_ATTENTION_BACKWARD, LOOP_BACKWARD, MAP, SCAN, WHILE_LOOP)


@contextmanager
def with_shape_environment(module: fx.GraphModule, fake_mode: FakeTensorMode) -> Iterator[None]:
    """Prepare a graph for Inductor, and let Inductor make symbols for the length of a block.

    Inductor needs symbols for scalar values in loops. If the fake mode has no shape environment, it gets one, because
    Inductor does not use its cache on disk without one.
    """
    before = fake_mode.shape_env
    settings: Any = before and before.settings
    fake_mode.shape_env = env = before or ShapeEnv()
    if any(node.target in HIGHER_ORDER for node in module.graph.nodes):
        env.settings = dataclasses.replace(env.settings, allow_scalar_outputs=True)
        _expand(module)
    try:
        yield
    finally:
        fake_mode.shape_env = before
        if before is not None:
            before.settings = settings


def _expand(module: fx.GraphModule) -> None:
    """Replace each `LOOP_BACKWARD` op in a graph, in place, by two loops that Inductor supports.

    The ops in inner graphs, such as the body of another loop, are replaced, too.
    """
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            _expand(child)
    for node in module.graph.find_nodes(op="call_function", target=LOOP_BACKWARD):
        args: Any = fx.map_arg(
            node.args, lambda n: n.meta["val"] if "val" in n.meta else getattr(module, str(n.target))
        )
        expanded = make_fx(partial(LOOP_BACKWARD.as_loops, *args[:2]))(*args[2:])
        for each in expanded.graph.find_nodes(op="get_attr"):
            module.add_module(name := f"{node.name}_{each.target}", getattr(expanded, each.target))
            each.target = name
        with module.graph.inserting_before(node):
            pairs = zip(expanded.graph.find_nodes(op="placeholder"), pytree.tree_leaves(node.args[2:]), strict=True)
            results: Any = module.graph.graph_copy(expanded.graph, dict(pairs))
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    module.recompile()


def under_autocast_as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` under the autocast settings that are active now.

    The functions of a higher-order op are wrapped in this way, because they are traced later, when other settings may
    be active.
    """
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    settings = [(each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each)) for each in devices]

    def call(*args: Any) -> Any:
        with ExitStack() as stack:
            for each in settings:
                stack.enter_context(torch.autocast(*each))
            return function(*args)

    return call


def parts(values: Sequence[Any], *counts: int) -> Iterator[list[Any]]:
    """Split a sequence into consecutive lists of these lengths: counts 2 and 1 split [a, b, c] into [a, b] and [c]."""
    remaining = iter(values)
    return (list(islice(remaining, count)) for count in counts)
