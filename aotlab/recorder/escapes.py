"""Ways around the trace, refused at the Python level."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aotlab import torch_internals as internals
from aotlab.errors import (
    DataDependentError,
    EscapeError,
    MetadataMutationError,
    RandomOpError,
    RefusedError,
    StorageMutationError,
)
from aotlab.recorder.corrections import corrected
from aotlab.recorder.hooks import Hooks
from aotlab.recorder.mode import casts_since, operations_so_far
from aotlab.recorder.places import user_line
from aotlab.recorder.tape import tensors_in


class RunEagerly(Exception):  # noqa: N818  # a signal, not an error: nothing of it reaches the caller
    """Raised in a trace when eager itself has to have its say, most often by raising its own error."""


def _refuse_swap(first: Tensor, second: Tensor) -> NoReturn:
    raise EscapeError(
        "`torch.utils.swap_tensors` was called inside the function",
        line=user_line(),
        why="it would exchange a traced tensor for another behind the trace's back",
        suggestion="move it out of the compiled function",
    )


def _refuse_dlpack(tensor: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
    raise EscapeError(
        "`to_dlpack` was called inside the function",
        line=user_line(),
        why="the compiled function would see the memory of this one trace",
        suggestion="move it out of the compiled function",
    )


def _refuse_random_state(name: str) -> NoReturn:
    raise RandomOpError(
        f"`torch.{name}` was called inside the function: it seeds, sets or reads a random generator",
        line=user_line(),
        why="that would happen while tracing only",
        suggestion="do it outside of the compiled function",
    )


_MEMORY = "the compiled function would see the memory of this one trace"
_ESCAPES: dict[Any, tuple[type[RefusedError], str, str]] = {
    Tensor.numpy: (EscapeError, "`numpy()`", _MEMORY),
    Tensor.__array__: (EscapeError, "`__array__` (numpy)", _MEMORY),
    Tensor.data_ptr: (EscapeError, "`data_ptr()`", _MEMORY),
    Tensor.__dlpack__: (EscapeError, "`__dlpack__`", _MEMORY),
    Tensor.untyped_storage: (EscapeError, "`untyped_storage()`", _MEMORY),
    Tensor.storage: (EscapeError, "`storage()`", _MEMORY),
    Tensor.data.__set__: (EscapeError, "an assignment to `.data`", "the trace cannot see what it does"),  # type: ignore[attr-defined]  # a slot wrapper
    internals.VERSION_GETTER: (EscapeError, "`_version`", "a compiled call counts versions at other moments"),
    Tensor.grad.__get__: (EscapeError, "`.grad`", "it belongs to the caller's tensor, not to the traced one"),  # type: ignore[union-attr]  # a getter
    Tensor.grad.__set__: (EscapeError, "an assignment to `.grad`", "it would be lost"),  # type: ignore[union-attr]  # a getter
    Tensor.backward: (EscapeError, "`backward()`", "gradients would be added to traced tensors, not to the caller's"),
    Tensor.tolist: (DataDependentError, "`tolist()`", "a trace has no values"),
    Tensor.__repr__: (DataDependentError, "the text", "a trace has no values"),
    Tensor.__format__: (DataDependentError, "the text", "a trace has no values"),
    Tensor.__deepcopy__: (EscapeError, "`copy.deepcopy`", _MEMORY),
    Tensor.__reduce_ex__: (EscapeError, "a pickle", _MEMORY),
}  # fmt: skip


class EscapeGuard(TorchFunctionMode):
    """Refuse, at the Python level, what would look behind a traced tensor or write around the trace.

    ``inputs`` has (position, name, wrapper) by `torch_internals.storage_key`; ``offsets_read`` collects the positions
    of inputs whose place in their storage the function looks at. ``shared`` are the keys of memory that several inputs
    share, where they have other places in the trace than in the caller's storages.
    """

    def __init__(
        self, inputs: Mapping[int, tuple[int, str, Tensor]] | None = None, shared: Collection[int] = ()
    ) -> None:
        super().__init__()
        self.inputs = inputs or {}
        self.shared = shared
        self.hooks = Hooks()
        self.windows = {key: _window(wrapper) for key, (_, _, wrapper) in self.inputs.items()}
        self.offsets_read: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let a function pass, or refuse it."""
        escape = _ESCAPES.get(func)
        if escape is not None and args and isinstance(args[0], Tensor) and internals.is_functional(args[0]):
            kind, what, why = escape
            raise kind(
                f"{what} of a traced tensor was asked for",
                line=user_line(),
                why=why,
                suggestion="move it out of the compiled function",
            )
        if func in _HOOKS and args and isinstance(args[0], Tensor) and internals.is_functional(args[0]):
            return self._hook(func, args, kwargs or {})
        if func in _RESHAPES_IN_PLACE and args and isinstance(args[0], Tensor) and internals.is_functional(args[0]):
            self._refuse_reshape(func, args[0])
        if func is torch.lstm and torch.is_grad_enabled():
            # oneDNN's LSTM looks at grad mode when it runs; in a compiled forward, which has none, it saves nothing
            with internals.without_onednn():
                return func(*args, **(kwargs or {}))
        if func in _LOOKS_AT_STORAGE and args and isinstance(args[0], Tensor) and internals.is_functional(args[0]):
            return self._look_at_storage(func, args, kwargs or {})
        written = kwargs.get("out") if kwargs else None
        in_place = _writes_in_place(func) and bool(args)
        if in_place:
            written = args[0]
        if not in_place and written is not None and eager_misreads(func, tensors_in((args, written))):
            raise RunEagerly(
                f"`{func.__name__}` with `out` takes tensors with gaps for contiguous ones, at {user_line()}"
            )
        correction = corrected(func)
        if written is None:
            return func(*args, **(kwargs or {})) if correction is None else correction(args, kwargs or {})
        if not isinstance(written, Tensor):
            versions, count = _versions(written), operations_so_far()
            result = func(*args, **(kwargs or {})) if correction is None else correction(args, kwargs or {})
            _count_write(versions)
            for each in tensors_in(written):
                _refuse_casts(func, casts_since(count, each), each, in_place=in_place)
            return result
        if overlaps_itself(written):
            raise RunEagerly(f"in-place write to a tensor that overlaps itself, at {user_line()}")
        operands = [other for other in tensors_in((args[1:], kwargs or {})) if other is not written]
        if any(overlaps_partly(written, other) for other in operands):
            raise RunEagerly(f"in-place write to a tensor that overlaps an operand in part, at {user_line()}")
        numbers = [value for value in args[1:] if type(value) in (int, float, complex)]
        if not keeps_dtype(func, written, [*operands, *numbers], rounds=bool(kwargs and kwargs.get("rounding_mode"))):
            raise RunEagerly(f"in-place write of a result of another dtype, at {user_line()}")
        base = internals.base_of(written)
        owner = written if base is None else base
        shape, stride, written_shape = owner.shape, owner.stride(), written.shape
        count = operations_so_far()
        version = None if in_place or written.is_inference() else internals.version_of(written)
        result = func(*args, **(kwargs or {})) if correction is None else correction(args, kwargs or {})
        unmoved = internals.is_functional(written) and internals.version_of(written) == version
        if unmoved and written.numel() and not internals.has_data_mutation(written):
            raise RunEagerly(f"`{func.__name__}` writes its `out` around the trace, at {user_line()}")
        _refuse_casts(func, casts_since(count, written), written, in_place=in_place)
        if in_place and func not in _RESHAPES_IN_PLACE and written.shape != written_shape:
            # functionalization lets the result of the out-of-place twin take the tensor's place, whatever its shape
            raise RunEagerly(f"in-place write of a result of another shape, at {user_line()}")
        if internals.is_functional(owner) and func not in _RESHAPES_IN_PLACE:
            keep_strides(owner, shape, stride)
        return result

    def __enter__(self) -> EscapeGuard:
        """Guard the block; some functions do not ask function modes and are replaced for its length."""
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._replaced = internals.replace_unguarded(_refuse_swap, _refuse_dlpack, _refuse_random_state)
        self._replaced.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End the guard."""
        self._replaced.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch

    def _hook(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note a hook for the run time; where eager has an error to raise, it does."""
        tensor = args[0]
        if func is _RETAINS_GRAD:
            return self.hooks.retains(tensor) or func(*args, **kwargs)
        leaf_only = func is Tensor.register_post_accumulate_grad_hook
        if not tensor.requires_grad or (leaf_only and not tensor.is_leaf):
            return func(*args, **kwargs)
        if func is Tensor.retain_grad:
            if not tensor.is_leaf and not self.hooks.retains(tensor):
                self.hooks.add("retain_grad", tensor)
            return None
        return self.hooks.add(_HOOKS[func], tensor, kwargs.get("hook", args[1] if len(args) > 1 else None))

    def _look_at_storage(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note that the entry depends on where an input begins, and refuse a window that reaches out of it."""
        key = internals.storage_key(args[0])
        if key in self.shared:
            raise RunEagerly(f"the place of an input in memory that it shares with another is looked at, {user_line()}")
        result = func(*args, **kwargs)
        if key in self.inputs:
            position, name, _ = self.inputs[key]
            self.offsets_read.add(position)
            start, stop = self.windows[key]
            if isinstance(result, Tensor) and result.numel():
                first, last = _window(result)
                if first < start or last > stop:
                    raise EscapeError(
                        f"`as_strided` reaches memory of `{name}`'s storage that is not part of `{name}`",
                        line=user_line(),
                        why="the graph sees the input only",
                        suggestion="pass the tensor that owns the memory",
                        argument=name,
                    )
        return result

    def _refuse_reshape(self, func: Any, tensor: Tensor) -> None:
        known = self.inputs.get(internals.storage_key(tensor))
        name = None if known is None else known[1]
        if func in (Tensor.set_, Tensor.resize_, Tensor.resize_as_):
            if name is None and func is not Tensor.set_:
                return
            raise StorageMutationError(
                f"`{func.__name__}` gives {f'`{name}`' if name else 'an intermediate'} another storage or size",
                line=user_line(),
                why="that is not supported yet",
                suggestion="return a new tensor",
                argument=name,
            )
        if name is not None:
            raise MetadataMutationError(
                f"`{func.__name__}` changes `{name}`, or a view of it, other than in its values",
                line=user_line(),
                why="that is not supported yet",
                suggestion=f"use the out-of-place form, as `{func.__name__.removesuffix('_')}`",
                argument=name,
            )


def _versions(written: Any) -> list[tuple[Tensor, int]]:
    """Note the versions of what a function is to write."""
    return [
        (each, internals.version_of(each))
        for each in (written if isinstance(written, list | tuple) else (written,))
        if isinstance(each, Tensor) and internals.is_functional(each) and not each.is_inference()
    ]


def _count_write(before: list[tuple[Tensor, int]]) -> None:
    """Count a write to each tensor that was written: eager does, the wrappers of functionalization not always."""
    for tensor, version in before:
        if internals.version_of(tensor) == version:
            torch.autograd.graph.increment_version(tensor)


_RETAINS_GRAD = Tensor.retains_grad.__get__  # type: ignore[attr-defined]  # a getter
_HOOKS: dict[Any, Any] = {
    Tensor.register_hook: "hook",
    Tensor.register_post_accumulate_grad_hook: "post_accumulate",
    Tensor.retain_grad: "retain_grad",
    _RETAINS_GRAD: "retain_grad",
}
_LOOKS_AT_STORAGE = frozenset((Tensor.storage_offset, Tensor.as_strided, torch.as_strided))


def _window(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte in its storage that ``tensor`` touches, and the one after the last."""
    size, offset = tensor.element_size(), int(tensor.storage_offset())
    last = offset + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return offset * size, (last + 1) * size


def keep_strides(wrapper: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> None:
    """Give a wrapper that was written the strides back that it had, where they differ.

    An op in place keeps its tensor's strides; its out-of-place twin, which functionalization puts in its stead, is free
    to choose, and what is computed from its result inherits the choice.
    """
    internals.sync(wrapper)
    if wrapper.shape != shape or internals.from_functional(wrapper).stride() == stride:
        return
    with torch.no_grad():
        fresh = torch.empty_strided(shape, stride, dtype=wrapper.dtype, device=wrapper.device)
        fresh.copy_(wrapper)
        internals.sync(fresh)
        internals.replace_value(wrapper, internals.from_functional(fresh))


_RESHAPES_IN_PLACE = frozenset(
    (
        Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_, Tensor.unsqueeze_,
        Tensor.as_strided_, Tensor.detach_, Tensor.set_, Tensor.resize_, Tensor.resize_as_,
    )
)  # fmt: skip
_in_place: dict[Any, bool] = {}


def _writes_in_place(func: Any) -> bool:
    known = _in_place.get(func)
    if known is None:
        name = getattr(func, "__name__", "")
        known = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        known = known or (
            name.startswith("__i") and name.endswith("__") and name not in ("__invert__", "__index__", "__int__")
        )
        _in_place[func] = known
    return known


#: In-place ops that promote as their out-of-place twins do and then refuse a result that does not fit.
_PROMOTES = frozenset(
    f"{name}_"
    for name in (
        "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "floor_divide", "pow",
        "float_power", "remainder", "fmod", "atan2", "arctan2", "hypot", "addcmul", "addcdiv", "lerp", "clamp", "clip",
        "copysign", "xlogy", "logaddexp", "rsub",
    )
)  # fmt: skip
_ALWAYS_FLOATING = frozenset(
    f"{name}_"
    for name in (
        "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "exp", "exp2",
        "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sigmoid", "reciprocal", "erf", "erfc", "erfinv",
        "lgamma", "digamma", "sinc", "logit", "div", "divide", "true_divide", "float_power", "ldexp", "polygamma",
    )
)  # fmt: skip


def eager_misreads(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Tell whether eager's kernel for ``out=`` takes one of ``tensors`` for contiguous although it is not.

    What it then reads or writes lies beside the tensor's elements. No graph does that, so eager has to do it.
    """
    careless = getattr(func, "__name__", "") in ("narrow_copy", "gelu", "avg_pool3d", "native_batch_norm")
    return careless and any(not tensor.is_contiguous() for tensor in tensors)


def keeps_dtype(func: Any, written: Tensor, operands: Sequence[Any], *, rounds: bool = False) -> bool:
    """Tell whether the result of an in-place op fits its tensor's dtype; functionalization would cast it silently.

    ``rounds`` says that a division rounds, and so stays among integers.
    """
    name = getattr(func, "__name__", "")
    if written.dtype.is_complex:
        return True
    if name in _ALWAYS_FLOATING and not written.is_floating_point() and not rounds:
        return False
    return name not in _PROMOTES or all(
        torch.can_cast(torch.result_type(written, operand), written.dtype) for operand in operands
    )


#: In-place functions that convert whatever they are given.
_CONVERTS = frozenset(("copy_", "__setitem__", "fill_", "masked_fill_", "index_fill_", "index_put_", "set_", "zero_"))


def _refuse_casts(func: Any, casts: Sequence[torch.dtype], written: Tensor, *, in_place: bool) -> None:
    """Leave a write that functionalization made possible by a cast to eager, which may have an error to raise.

    In place, eager casts where the kind of number stays; with ``out``, some functions do and some want the very dtype.
    """
    name = getattr(func, "__name__", "")
    if not casts or name in _CONVERTS or (in_place and all(torch.can_cast(cast, written.dtype) for cast in casts)):
        return
    raise RunEagerly(f"`{name}` writes a result of dtype {casts[0]} into {written.dtype}, at {user_line()}")


def overlaps_partly(written: Tensor, operand: Tensor) -> bool:
    """Tell whether two tensors on one storage share bytes without being the same window of it."""
    if not internals.is_functional(operand) or internals.storage_key(written) != internals.storage_key(operand):
        return False
    windows = [(t.shape, t.stride(), t.storage_offset()) for t in (written, operand)]
    if windows[0] == windows[1] or written.numel() == 0 or operand.numel() == 0:
        return False
    spans = []
    for tensor, (shape, stride, offset) in zip((written, operand), windows, strict=True):
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        spans.append((offset * tensor.element_size(), (last + 1) * tensor.element_size()))
    return spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]


def overlaps_itself(tensor: Tensor) -> bool:
    """Tell whether two indices of ``tensor`` surely share memory, as after ``expand``."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
