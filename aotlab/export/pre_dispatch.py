"""Graphs from before dispatch: an op that torch computes by other ops stands there as it was called.

    with torch.no_grad():              # _set_grad_enabled = torch._C._set_grad_enabled(False)
        y = linear(x, w)               # linear = torch.ops.aten.linear.default(x, w)
    return y.reshape(6)                # _set_grad_enabled_1 = torch._C._set_grad_enabled(True); view = …

A mode above autograd sees each op. Such a *composite* op runs on a tape of its own, on stand-ins of its arguments. If
it has neither written one nor returned its memory, it is recorded, and its results are new tensors. Else its parts are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aotlab import _torch as internals
from aotlab._torch import pytree
from aotlab._torch.pre_dispatch import OUT_DTYPE, PRE_DISPATCH, SchemaCheckMode, out_dtype_fallback
from aotlab._torch.replaced import replaced
from aotlab.errors import RefusedError
from aotlab.ir.graphs import is_random
from aotlab.trace.boundary import refuse_higher_order
from aotlab.trace.inputs import value_of
from aotlab.trace.running import here
from aotlab.trace.tape import Tape, tensors_in


def kept_as_called(run: Any, decompositions: Mapping[Any, Any], given: Sequence[Any]) -> Any:
    """Run a function that was ``given`` these; return what it does, without its history, which no graph has."""
    known: dict[int, Any] = {id(each): each for each in given}
    here.active[-1].draws_in_choices = True
    with internals.disable_torch_function():
        leaves = [(each, each.requires_grad) for each in given if isinstance(each, Tensor) and each.grad_fn is None]
    with _Composites(decompositions), _Calls():
        result = run()
    with internals.disable_torch_function():
        for tensor, requires_grad in leaves:
            if tensor.grad_fn is not None and internals.base_of(tensor) is None:
                tensor.detach_().requires_grad_(requires_grad)
        return pytree.tree_map_only(Tensor, lambda each: known.setdefault(id(each), _without_history(each)), result)


def _without_history(tensor: Tensor) -> Tensor:
    return internals.to_functional(value_of(tensor, "a tensor that is computed with or returned"))


class _Calls(TorchFunctionMode):
    """See what is no op below, changes of grad mode above all."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is internals.COND:
            return _cond(*args)
        if func is OUT_DTYPE or func is torch.lstm:  # a quirk knows the latter, whose kernel looks at grad mode
            with internals.disable_torch_function():
                return func(*args) if func is torch.lstm else _kept(func, args, {}, out_dtype_fallback)
        if isinstance(func, internals.HigherOrderOperator) and func not in internals.HIGHER_ORDER:
            refuse_higher_order(func)
        if func is internals.SET_GRAD_ENABLED:
            here.active[-1].append(func, args, {}, None)
        return func(*args, **(kwargs or {}))


def _cond(pred: Tensor, true: Any, false: Any, operands: Sequence[Any]) -> Any:
    """Call ``cond`` in the grad mode that is on, which its functions see."""
    flags: list[list[bool]] = []

    def seen(function: Any, *given: Any) -> Any:
        for each, operand in zip(given, operands, strict=True):
            if isinstance(each, Tensor):
                each.requires_grad_(operand.requires_grad)
        with _Calls():
            found = function(*given)
        flags.append([getattr(each, "requires_grad", False) for each in found])
        return found

    plain = pytree.tree_map_only(Tensor, _without_history, tuple(operands))
    results = internals.COND(pred, partial(seen, true), partial(seen, false), plain)
    return _Opaque.apply(results, [*map(any, zip(*flags, strict=True))], *operands)  # type: ignore[no-untyped-call]


class _Opaque(torch.autograd.Function):
    """Gives results a history that cannot be followed, those that have a flag."""

    @staticmethod
    def forward(ctx: Any, results: Sequence[Tensor], flags: Sequence[bool], *given: Any) -> Any:
        ctx.mark_non_differentiable(*(each for each, flag in zip(results, flags, strict=True) if not flag))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        seen = "the function computes a gradient of an op that pre_dispatch=True keeps"
        raise RefusedError(seen, suggestion="pass pre_dispatch=False, or compute the gradient outside")


class _Composites(SchemaCheckMode):
    """Keep composite ops, except those of ``decompositions``."""

    def __init__(self, decompositions: Mapping[Any, Any]) -> None:
        super().__init__()
        self.decompositions, self._dispatch_key = decompositions, PRE_DISPATCH

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = NotImplemented
        given = tensors_in((args, kwargs))
        devices = [each.device.type for each in given if internals.is_functional(each)]
        if len(devices) == len(given) > 0 and internals.has_composite_kernel_only(func, devices[0]):
            if func in self.decompositions:
                with self:
                    result = self.decompositions[func](*args, **kwargs)
            elif _makes_new(func) and not internals.any_autocast_enabled():
                with internals.disable_torch_function():
                    result = _kept(func, args, kwargs, func)
        return func(*args, **kwargs) if result is NotImplemented else result


@cache
def _makes_new(op: Any) -> bool:
    """Tell whether an op says that it neither writes nor returns its arguments; of dropout it is seen later."""
    says = any(each.alias_info is not None for each in (*op._schema.arguments, *op._schema.returns))
    return not says and (torch.Tag.maybe_aliasing_or_mutating not in op.tags or op is torch.ops.aten.dropout.default)


def _kept(op: Any, args: Any, kwargs: Any, parts: Any) -> Any:
    """Record a composite op, which calls ``parts``, as it is; NotImplemented if that would not say what it does."""
    recorder, tape, given = here.active[-1], Tape(), tensors_in((args, kwargs))
    stand_ins = {id(each): _without_history(each).requires_grad_(each.requires_grad) for each in given}
    values = {key: tape.enter(internals.from_functional(each)) for key, each in stand_ins.items()}
    of_args, of_kwargs = pytree.tree_map_only(Tensor, lambda each: stand_ins[id(each)], (args, kwargs))
    with replaced(recorder, "tape", tape):
        try:
            result = parts(*of_args, **of_kwargs)
            found = pytree.tree_map_only(Tensor, lambda each: value_of(each, f"a result of `{op}`"), result)
        except Exception:  # noqa: BLE001  # the parts, run as always, say what is wrong
            return NotImplemented
    made = tensors_in(found)
    own, others = ([*map(internals.storage_key, each)] for each in (made, tape.entered))
    aliases = not own or len({*own}) < len(own) or not {*own}.isdisjoint(others)
    draws = any(each.is_random for each in tape.operations) and not is_random(op)
    if aliases or draws or any(map(internals.has_data_mutation, stand_ins.values())):
        return NotImplemented
    args, kwargs = pytree.tree_map_only(Tensor, lambda each: values[id(each)], (args, kwargs))
    recorder.append(op, args, kwargs, found)
    flags = [each.requires_grad for each in tensors_in(result)]
    new = iter(_Opaque.apply([*map(internals.to_functional, made)], flags, *given))  # type: ignore[no-untyped-call]
    return pytree.tree_map_only(Tensor, lambda _: next(new), found)
