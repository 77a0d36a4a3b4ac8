"""What a compiled graph's outputs must be, by what the traced graph's were: `config.debug_assert`.

A compiler may return anything; the epilogue and autograd take its word for sizes, strides, dtypes, devices, and for
which of the outputs share memory with each other or with the graph's inputs. With the assertions on, every output of
every call is looked at, gradients and saved values among them, and the error names the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from aotlab._torch import storage_key
from aotlab.errors import GraphInvariantError
from aotlab.ir.graphs import output_args, placeholders
from aotlab.ir.specs import StorageNumbers, TensorSpec, spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What was traced of one output.

    ``visible`` says whether anybody but the backward sees it: saved values may lie in memory as the compiler likes.
    """

    label: str
    spec: TensorSpec
    visible: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """What was traced of a graph: the numbers of its inputs' storages, and its outputs, numbered with them."""

    inputs: tuple[int | None, ...]
    outputs: tuple[Promise | None, ...]


def promises(module: fx.GraphModule, labels: Sequence[str]) -> Promises:
    """Read off a graph what its outputs are; ``labels`` name the first of them, nodes the others."""
    storages = StorageNumbers()
    values = [node.meta.get("val") for node in placeholders(module.graph)]
    inputs = tuple([storages.number(value) if isinstance(value, Tensor) else None for value in values])
    outputs: list[Promise | None] = []
    for i, node in enumerate(output_args(module.graph)):
        value = node.meta["val"] if isinstance(node, fx.Node) else None
        if node is None or not isinstance(value, Tensor):
            outputs.append(None)
            continue
        label = labels[i] if i < len(labels) else f"the saved value `{node.name}`"
        outputs.append(Promise(label=label, spec=spec_of(value, storages), visible=i < len(labels)))
    return Promises(inputs=inputs, outputs=tuple(outputs))


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
                number, owner = owners.setdefault(storage_key(value), (promise.spec.storage, promise.label))
                if number != promise.spec.storage:
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
    promised: Any = promise.spec
    pairs: list[tuple[str, Any, Any]] = [
        ("shape", tuple(value.shape), promised.shape),
        ("dtype", value.dtype, promised.dtype),
        ("device", value.device, promised.device),
    ]
    if promise.visible and kind != "backward":  # autograd takes gradients of any strides
        pairs.append(("strides", _strides(value.stride(), promised.shape), _strides(promised.stride, promised.shape)))
    for what, seen, expected in pairs:
        if seen != expected:
            raise GraphInvariantError(
                f"{promise.label} of the compiled {kind} came back with {what} {seen}; traced as {expected}: the "
                "compiler that was used does not keep to the graph"
            )


def _strides(stride: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that matter: those of dimensions with more than one element, none of an empty tensor."""
    return () if 0 in shape else tuple(step for step, size in zip(stride, shape, strict=True) if size > 1)
