"""What a compiled graph's outputs must be, by what the traced graph's were: `config.debug_assert`.

A compiler may return anything; the epilogue and autograd take its word for sizes, strides, dtypes, devices, and for
which of the outputs share memory with each other or with the graph's inputs. With the assertions on, every output of
every call is looked at, gradients and saved values among them, and the error names the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from aotlab._torch import storage_key
from aotlab.errors import GraphInvariantError
from aotlab.ir.graphs import output_args, placeholders


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What was traced of one output.

    ``memory`` numbers the storages of the graph's inputs and outputs: equal numbers share memory. ``visible`` says
    whether anybody but the backward sees it: saved values may lie in memory as the compiler likes.
    """

    label: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    memory: int | None
    visible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """What was traced of a graph: the storages of its inputs, and its outputs."""

    inputs: tuple[int | None, ...]
    outputs: tuple[Promise | None, ...]


def promises(module: fx.GraphModule, labels: Sequence[str]) -> Promises:
    """Read off a graph what its outputs are; ``labels`` name the first of them, nodes the others."""
    numbers: dict[int, int] = {}

    def memory(value: Any) -> int | None:
        return numbers.setdefault(storage_key(value), len(numbers)) if isinstance(value, Tensor) else None

    def promise(i: int, node: fx.Node | None) -> Promise | None:
        value = node.meta["val"] if isinstance(node, fx.Node) else None
        if node is None or not isinstance(value, Tensor):
            return None
        return Promise(
            label=labels[i] if i < len(labels) else f"the saved value `{node.name}`",
            shape=tuple(value.shape),
            stride=tuple(value.stride()),
            dtype=value.dtype,
            device=value.device,
            memory=memory(value),
            visible=i < len(labels),
        )

    inputs = tuple([memory(node.meta.get("val")) for node in placeholders(module.graph)])
    outputs = tuple([promise(i, node) for i, node in enumerate(output_args(module.graph))])
    return Promises(inputs=inputs, outputs=outputs)


def hold_to(compiled: Callable[[list[Any]], Sequence[Any]], promised: Promises, kind: str) -> Callable[..., Any]:
    """Wrap a boxed callable in the assertions.

    Raises `GraphInvariantError` at a call, for the first output that is not what was traced.
    """

    def call(inputs: list[Any]) -> Sequence[Any]:
        owners: dict[int, tuple[int | None, str]] = {}
        for i, (value, number) in enumerate(zip(inputs, promised.inputs, strict=True)):
            if isinstance(value, Tensor) and value.numel():
                # kept alive by the caller or not: a storage's key is compared only with outputs of this very call
                owners.setdefault(storage_key(value), (number, f"input {i} of the graph"))
        alive = [value.untyped_storage() for value in inputs if isinstance(value, Tensor)]
        outputs = compiled(inputs)
        for value, promise in zip(outputs, promised.outputs, strict=True):
            if promise is None:
                continue
            _check(value, promise, kind)
            if value.numel() and promise.visible:
                number, owner = owners.setdefault(storage_key(value), (promise.memory, promise.label))
                if number != promise.memory:
                    raise GraphInvariantError(
                        f"{promise.label} of the compiled {kind} shares memory with {owner}; it was traced as a tensor "
                        "of its own: the compiler that was used does not keep to the graph"
                    )
        del alive
        return outputs

    call._boxed_call = True  # type: ignore[attr-defined]  # the mark that upstream's users look for
    return call


def _check(value: Any, promise: Promise, kind: str) -> None:
    if not isinstance(value, Tensor):
        raise GraphInvariantError(
            f"{promise.label} of the compiled {kind} is a `{type(value).__qualname__}`, no tensor"
        )
    pairs: list[tuple[str, Any, Any]] = [
        ("shape", tuple(value.shape), promise.shape),
        ("dtype", value.dtype, promise.dtype),
        ("device", value.device, promise.device),
    ]
    if promise.visible and kind != "backward":  # autograd takes gradients of any strides
        pairs.append(("strides", _strides(value.stride(), promise.shape), _strides(promise.stride, promise.shape)))
    for what, seen, expected in pairs:
        if seen != expected:
            raise GraphInvariantError(
                f"{promise.label} of the compiled {kind} came back with {what} {seen}; traced as {expected}: the "
                "compiler that was used does not keep to the graph"
            )


def _strides(stride: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that matter: those of dimensions with more than one element, none of an empty tensor."""
    return () if 0 in shape else tuple(step for step, size in zip(stride, shape, strict=True) if size > 1)
