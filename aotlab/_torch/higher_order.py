"""The higher-order ops that torch has, such as that of ``torch.cond``, and what they need of Inductor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

COND: Any = torch.ops.higher_order.cond
FLEX_ATTENTION: Any = flex_attention
FLEX_ATTENTION_BACKWARD: Any = flex_attention_backward
MAP: Any = map_impl
SCAN: Any = scan_op
WHILE_LOOP: Any = while_loop_op
#: The mode under which ``x[n]`` takes a tensor for ``n``, and asks for no value.
IndexesByTensors = TransformGetItemToIndex
HIGHER_ORDER = (COND, FLEX_ATTENTION, FLEX_ATTENTION_BACKWARD, MAP, SCAN, WHILE_LOOP)


@contextmanager
def symbols_for_loops(module: fx.GraphModule, fake_mode: FakeTensorMode) -> Iterator[None]:
    """Let Inductor make symbols in the block, as it does where it lowers a loop."""
    before = fake_mode.shape_env
    settings: Any = before and before.settings
    if any(node.target in HIGHER_ORDER for node in module.graph.nodes):
        fake_mode.shape_env = env = before or ShapeEnv()
        env.settings = dataclasses.replace(env.settings, allow_scalar_outputs=True)
    try:
        yield
    finally:
        fake_mode.shape_env = before
        if before is not None:
            before.settings = settings


def under_autocast_as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that is called under the autocast that is on now."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    settings = [(each, torch.get_autocast_dtype(each), torch.is_autocast_enabled(each)) for each in devices]

    def call(*args: Any) -> Any:
        with ExitStack() as stack:
            for each in settings:
                stack.enter_context(torch.autocast(*each))
            return function(*args)

    return call
