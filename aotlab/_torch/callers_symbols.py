"""Calls with fake tensors whose sizes are symbols of the caller's shape environment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._sympy.printers import PythonPrinter

#: Whether the current compilation accepts fake tensors with symbolic sizes.
ADMITTED = ContextVar("admitted", default=False)
#: The namespace in which generated expressions are evaluated. Python's own `max` would compare two symbolic numbers,
#: which adds a guard; `torch.sym_max` does not.
OF_SIZES = {
    "math": math, "torch": torch,
    "max": lambda *numbers: reduce(torch.sym_max, numbers), "min": lambda *numbers: reduce(torch.sym_min, numbers),
}  # fmt: skip


def of_hints(tensor: Tensor) -> Tensor:
    """Return a detached alias of a real tensor, or, for a fake tensor, a new fake tensor with concrete sizes.

    Each symbolic size, stride or offset is replaced by its value in this call (its hint).
    """
    if not isinstance(tensor, FakeTensor):
        return tensor.detach()
    numbers: tuple[Any, ...] = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    *sizes, offset = (n.node.hint if isinstance(n, torch.SymInt) else n for n in numbers)
    shape, stride = sizes[: tensor.dim()], sizes[tensor.dim() :]
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    with FakeTensorMode():
        memory = torch.empty(offset + last + 1, dtype=tensor.dtype, device=tensor.device)
        alias = memory.as_strided(shape, stride, offset).detach()
        return alias.conj() if tensor.is_conj() else alias


def marked(value: Any) -> Any:
    """Return a fake tensor with concrete sizes in place of one with symbolic sizes; return other values unchanged.

    The result has the sizes of this call. The dimensions whose sizes were symbols are marked as dynamic, as by
    ``torch._dynamo.mark_dynamic``. A tensor with a symbolic size whose value is not known is returned unchanged.
    """
    sizes: list[Any] = [*value.shape] if type(value) is FakeTensor else []
    dims = {dim: size.node.hint for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt)}
    if dims and None not in dims.values():
        value = of_hints(value).requires_grad_(value.requires_grad)
        value._dynamo_dynamic_indices = {*dims}
    return value


def symbols_among(sizes: Sequence[Any]) -> set[Any]:
    """Return the symbols that occur in the given sizes or strides."""
    return {symbol for n in sizes if isinstance(n, torch.SymInt) for symbol in n.node.expr.free_symbols}


@contextmanager
def noting_guards(env: Any) -> Iterator[None]:
    """Store in ``env.asked``, at the end of the block, the guards that the shape environment ``env`` got in the block.

    In this block the user's program is traced. So these guards come from the program's own comparisons of sizes.
    """
    before = len(env.guards)
    yield
    env.asked = env.guards[before:]


def guards_of_program(module: fx.GraphModule) -> Callable[[Sequence[Any]], None]:
    """Return a function that repeats, on the inputs of a graph, the comparisons of sizes that the traced program made.

    The inputs of a call may be fake tensors with symbolic sizes. Then the comparisons add the same guards to the
    caller's shape environment as the uncompiled program would add.
    """
    places: dict[str, tuple[int, int]] = {}
    guards: list[Any] = []
    for n, node in enumerate(module.graph.find_nodes(op="placeholder")):
        for dim, size in enumerate(getattr(node.meta["val"], "shape", ())):
            if isinstance(size, torch.SymInt):
                places.setdefault(str(size.node._expr), (n, dim))
                guards = size.node.shape_env.asked
    texts = dict.fromkeys(PythonPrinter().doprint(guard.expr) for guard in guards)
    questions = [eval(f"lambda {', '.join(places)}: {text}", OF_SIZES) for text in texts]

    def ask(inputs: Sequence[Any]) -> None:
        for question in questions:
            bool(question(*(inputs[n].shape[dim] for n, dim in places.values())))

    return ask


def error_for_symbols(module: fx.GraphModule) -> str:
    """Return the text of the error that a graph raises when its ops run on fake tensors with symbolic sizes.

    The text is empty if no op raises. Some ops accept an integer as a size but no symbol.
    """
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    mode: Any = next(each.fake_mode for each in inputs if isinstance(each, FakeTensor))
    try:
        with mode, mode.shape_env.suppress_guards():
            fx.Interpreter(module).run(*inputs)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""
