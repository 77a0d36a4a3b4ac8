"""Record pre-dispatch graphs, in which a composite op appears as it was called.

    with torch.no_grad():              # _set_grad_enabled = torch._C._set_grad_enabled(False)
        y = linear(x, w)               # linear = torch.ops.aten.linear.default(x, w)
    return y.reshape(6)                # _set_grad_enabled_1 = torch._C._set_grad_enabled(True); view = …

A dispatch mode above autograd sees each op. A *composite* op, which torch computes by other ops, first runs on a
separate tape, with copies of its arguments. If the op neither writes an argument nor returns memory of an argument, the
op itself is recorded, and its results are new tensors. Otherwise the ops that compute it are recorded.
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
from aotlab._torch.pre_dispatch_level import OUT_DTYPE, PRE_DISPATCH, SchemaCheckMode, out_dtype_fallback
from aotlab._torch.replaced import replaced
from aotlab.errors import RefusedError
from aotlab.ir.fx_graphs import is_random
from aotlab.trace.boundary import refuse_higher_order
from aotlab.trace.inputs import value_of
from aotlab.trace.recorder import running
from aotlab.trace.tape import Tape, tensors_in


def keep_composites(run: Any, decompositions: Mapping[Any, Any], inputs: Sequence[Any]) -> Any:
    """Run the function ``run`` and record its composite ops; return its result without autograd history.

    ``inputs`` are the lifted inputs and the arguments. If the function returns one of them, the result contains the
    same object. If a write gives an input an autograd history, the input is detached again, because the graph has no
    autograd history.
    """
    results_by_id: dict[int, Any] = {id(each): each for each in inputs}
    with internals.disable_torch_function():
        leaves = [(each, each.requires_grad) for each in inputs if isinstance(each, Tensor) and each.grad_fn is None]
    with _Composites(decompositions), _Calls():
        result = run()
    with internals.disable_torch_function():
        for tensor, requires_grad in leaves:
            if tensor.grad_fn is not None and internals.base_of(tensor) is None:
                tensor.detach_().requires_grad_(requires_grad)
        return pytree.tree_map_only(
            Tensor, lambda each: results_by_id.setdefault(id(each), _without_history(each)), result
        )


def _without_history(tensor: Tensor) -> Tensor:
    return internals.to_functional(value_of(tensor, "a tensor that is computed with or returned"))


class _Calls(TorchFunctionMode):
    """Records calls that `_Composites`, a dispatch mode, does not see as ops: above all, changes of grad mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is internals.COND:
            return _cond(*args)
        if func is OUT_DTYPE or func is torch.lstm:  # a quirk handles `lstm`, because its kernel reads grad mode
            with internals.disable_torch_function():
                return func(*args) if func is torch.lstm else _record_composite(func, args, {}, out_dtype_fallback)
        if isinstance(func, internals.HigherOrderOperator) and func not in internals.HIGHER_ORDER:
            refuse_higher_order(func)
        if func is internals.SET_GRAD_ENABLED:
            running.recorders[-1].append(func, args, {}, None)
        return func(*args, **(kwargs or {}))


def _cond(pred: Tensor, true: Any, false: Any, operands: Sequence[Any]) -> Any:
    """Call the ``cond`` op on tensors without history, so that its functions run in the present grad mode.

    Inside the two functions, the operands require grad as outside. A result requires grad if the result of one of the
    functions does; an attempt to differentiate it raises (`_Opaque`).
    """
    flags: list[list[bool]] = []

    def with_history(function: Any, *operand_copies: Any) -> Any:
        for each, operand in zip(operand_copies, operands, strict=True):
            if isinstance(each, Tensor):
                each.requires_grad_(operand.requires_grad)
        with _Calls():
            results_of_function = function(*operand_copies)
        flags.append([getattr(each, "requires_grad", False) for each in results_of_function])
        return results_of_function

    plain = pytree.tree_map_only(Tensor, _without_history, tuple(operands))
    results = internals.COND(pred, partial(with_history, true), partial(with_history, false), plain)
    return _Opaque.apply(results, [*map(any, zip(*flags, strict=True))], *operands)  # type: ignore[no-untyped-call]


class _Opaque(torch.autograd.Function):
    """Makes the results of an op that is recorded as it was called require grad, as in eager.

    The op is a composite op or ``cond``. An attempt to differentiate its results raises `RefusedError`. ``flags``
    says for each result whether it requires grad.
    """

    @staticmethod
    def forward(ctx: Any, results: Sequence[Tensor], flags: Sequence[bool], *operands: Any) -> Any:
        ctx.mark_non_differentiable(*(each for each, flag in zip(results, flags, strict=True) if not flag))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        message = "the function computes a gradient of an op that pre_dispatch=True does not decompose"
        raise RefusedError(message, suggestion="pass pre_dispatch=False, or compute the gradient in eager")


class _Composites(SchemaCheckMode):
    """Records composite ops as they are called, except the ops in ``decompositions``."""

    def __init__(self, decompositions: Mapping[Any, Any]) -> None:
        super().__init__()
        self.decompositions, self._dispatch_key = decompositions, PRE_DISPATCH

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any = NotImplemented
        tensors = tensors_in((args, kwargs))
        devices = [each.device.type for each in tensors if internals.is_functional(each)]
        if len(devices) == len(tensors) > 0 and internals.has_composite_kernel_only(func, devices[0]):
            if func in self.decompositions:
                with self:
                    result = self.decompositions[func](*args, **kwargs)
            elif _returns_only_new_tensors(func) and not internals.any_autocast_enabled():
                with internals.disable_torch_function():
                    result = _record_composite(func, args, kwargs, func)
        return func(*args, **kwargs) if result is NotImplemented else result


@cache
def _returns_only_new_tensors(op: Any) -> bool:
    """Tell whether an op's schema says that it neither writes nor aliases its arguments.

    The result is true for dropout, although dropout may return its argument, because `_record_composite` checks this at
    each call.
    """
    declares_alias = any(each.alias_info is not None for each in (*op._schema.arguments, *op._schema.returns))
    return not declares_alias and (
        torch.Tag.maybe_aliasing_or_mutating not in op.tags or op is torch.ops.aten.dropout.default
    )


def _record_composite(op: Any, args: Any, kwargs: Any, decomposition: Any) -> Any:
    """Record a composite op as it was called, and return its results.

    ``decomposition`` is called on a separate tape, and computes the results by other ops. If this run shows that the op
    writes an argument, returns memory of an argument, or calls a random op although it is not random itself, return
    NotImplemented and record nothing.
    """
    recorder, tape, tensors = running.recorders[-1], Tape(), tensors_in((args, kwargs))
    stand_ins = {id(each): _without_history(each).requires_grad_(each.requires_grad) for each in tensors}
    values = {key: tape.enter(internals.from_functional(each)) for key, each in stand_ins.items()}
    copied_args, copied_kwargs = pytree.tree_map_only(Tensor, lambda each: stand_ins[id(each)], (args, kwargs))
    with replaced(recorder, "tape", tape):
        try:
            result = decomposition(*copied_args, **copied_kwargs)
            traced_results = pytree.tree_map_only(Tensor, lambda each: value_of(each, f"a result of `{op}`"), result)
        except Exception:  # noqa: BLE001  # the op is then called again in the usual way, and raises its own error
            return NotImplemented
    result_tensors = tensors_in(traced_results)
    result_storages, input_storages = ([*map(internals.storage_key, each)] for each in (result_tensors, tape.entered))
    aliases = (
        not result_storages
        or len({*result_storages}) < len(result_storages)
        or not {*result_storages}.isdisjoint(input_storages)
    )
    draws = any(each.is_random for each in tape.operations) and not is_random(op)
    if aliases or draws or any(map(internals.has_data_mutation, stand_ins.values())):
        return NotImplemented
    args, kwargs = pytree.tree_map_only(Tensor, lambda each: values[id(each)], (args, kwargs))
    recorder.append(op, args, kwargs, traced_results)
    flags = [each.requires_grad for each in tensors_in(result)]
    outputs = iter(_Opaque.apply([*map(internals.to_functional, result_tensors)], flags, *tensors))  # type: ignore[no-untyped-call]
    return pytree.tree_map_only(Tensor, lambda _: next(outputs), traced_results)
