"""Fake tensors whose sizes are symbols of the caller's."""

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

#: Whether what is compiled takes such tensors.
ADMITTED = ContextVar("admitted", default=False)
#: What is read where numbers are computed: Python's own `max` would ask which of two symbolic ones is larger.
OF_SIZES = {
    "math": math, "torch": torch,
    "max": lambda *numbers: reduce(torch.sym_max, numbers), "min": lambda *numbers: reduce(torch.sym_min, numbers),
}  # fmt: skip


def of_hints(tensor: Tensor) -> Tensor:
    """Return a detached alias; of a fake tensor another one, of the sizes that its symbols stand for in this call."""
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
    """Return a fake tensor of the sizes of this call in place of one with symbols, marked as by ``mark_dynamic``."""
    sizes: list[Any] = [*value.shape] if type(value) is FakeTensor else []
    dims = {dim: size.node.hint for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt)}
    if dims and None not in dims.values():
        value = of_hints(value).requires_grad_(value.requires_grad)
        value._dynamo_dynamic_indices = {*dims}
    return value


def symbols_among(sizes: Sequence[Any]) -> set[Any]:
    """Return the symbols that sizes or strides are computed of."""
    return {symbol for n in sizes if isinstance(n, torch.SymInt) for symbol in n.node.expr.free_symbols}


@contextmanager
def noting_guards(env: Any) -> Iterator[None]:
    """Note what is asked of sizes meanwhile, which is by the traced program itself."""
    before = len(env.guards)
    yield
    env.asked = env.guards[before:]


def guards_of_program(module: fx.GraphModule) -> Callable[[Sequence[Any]], None]:
    """Return what asks the sizes of a graph's inputs what the traced program asked, so that guards come of it."""
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
    """Return the error of a graph when its ops are run on fake tensors: some kernels take no symbols for integers."""
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    mode: Any = next(each.fake_mode for each in inputs if isinstance(each, FakeTensor))
    try:
        with mode, mode.shape_env.suppress_guards():
            fx.Interpreter(module).run(*inputs)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""
