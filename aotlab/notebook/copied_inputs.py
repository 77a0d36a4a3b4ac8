"""Copies of the inputs of a measured call, and new tensors in place of inputs that no longer exist."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aotlab.bench.timing import tensors_in
from aotlab.guards.call_state import CallState, TensorFacts, tensor_facts
from aotlab.verification import Cloner
from aotlab.verification.clones import attach

Inputs = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Copy:
    """The copied inputs of one call.

    ``tensors`` are all input tensors, and ``differentiable`` are those that require grad. ``leaves`` are the leaves of
    the autograd graphs of these tensors. If the graph writes an input, ``leaves`` are still leaves.
    """

    inputs: Inputs
    tensors: tuple[Tensor, ...]
    differentiable: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]


def copy_of(inputs: Inputs) -> Copy:
    """Copy the inputs. The copies alias each other as the inputs do."""
    # In inference mode, all copies would be inference tensors. So the mode is switched off while they are made.
    with torch.inference_mode(False), torch.set_grad_enabled(True):
        call = _CLONER.call(inputs, {})
    # A tensor that was passed twice must also be one object in the copy.
    other = {
        id(copy): _inference_tensor_over(copy)
        for original, copy in zip(inputs, call.args, strict=True)
        if isinstance(original, Tensor) and original.is_inference()
    }
    args = tuple([other.get(id(copy), copy) for copy in call.args])
    tensors = _distinct(tensor for tensor in tensors_in(args))
    behind = [tensor for _, tensor in call.watched]
    return Copy(
        inputs=args,
        tensors=tensors,
        differentiable=tuple([tensor for tensor in tensors if tensor.requires_grad]),
        leaves=_distinct(tensor for tensor in (*tensors, *behind) if tensor.is_leaf and tensor.requires_grad),
    )


def _inference_tensor_over(tensor: Tensor) -> Tensor:
    """Return an inference tensor over the same memory as ``tensor``."""
    with torch.inference_mode():
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        made = empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def stand_ins(state: CallState, inputs: Inputs | None) -> tuple[Inputs, tuple[str, ...]]:
    """Return inputs with the metadata that an entry was compiled for, and the names of the replaced inputs.

    ``state`` has the facts about the inputs for which the entry was compiled. An input that no longer exists, or whose
    metadata has changed, is replaced by a new tensor of the same kind (a stand-in).
    """
    values: list[Any] = []
    replaced: list[str] = []
    for position, facts in enumerate(state.leaves):
        now = inputs[position] if inputs is not None and len(inputs) == len(state.leaves) else None
        if not isinstance(facts, TensorFacts):
            values.append(facts.value)
        elif state.same_as[position] != position:
            values.append(values[state.same_as[position]])
        elif isinstance(now, Tensor) and tensor_facts(now) == facts:
            values.append(now)
        else:
            values.append(_stand_in(facts))
            replaced.append(state.names[position])
    return tuple(values), tuple(replaced)


def _stand_in(facts: TensorFacts) -> Tensor:
    """Return a new tensor with the metadata ``facts``. Its values are random, or zeros if they may be indices."""
    extent = 1 + sum((size - 1) * step for size, step in zip(facts.shape, facts.stride, strict=True))
    count = facts.offset + (extent if 0 not in facts.shape else 0)
    with torch.inference_mode(facts.is_inference), torch.set_grad_enabled(True):
        if facts.dtype.is_floating_point or facts.dtype.is_complex:
            # Not every dtype can be filled with random numbers directly.
            memory = torch.rand(count, device=facts.device).to(facts.dtype)
        else:
            memory = torch.zeros(count, dtype=facts.dtype, device=facts.device)
        tensor = memory.as_strided(facts.shape, facts.stride, facts.offset).detach()
        if issubclass(facts.type, nn.Parameter):
            return nn.Parameter(tensor, requires_grad=facts.requires_grad)
        if facts.requires_grad and not facts.is_leaf:
            return attach(tensor.clone().requires_grad_(), tensor)
        return tensor.requires_grad_(facts.requires_grad)


def _anything(*inputs: Any) -> None:
    """Accept any arguments. A `Cloner` needs a function for the names of the inputs that it copies."""


def _distinct(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple({id(tensor): tensor for tensor in tensors}.values())


_CLONER = Cloner(_anything)
