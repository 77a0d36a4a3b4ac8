"""Functions that would look behind a traced tensor, or do what a trace cannot see, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.errors import (
    BY_DYNAMO,
    CapturedTensorError,
    DataDependentError,
    EscapeError,
    HigherOrderOpError,
    RandomOpError,
    RefusedError,
    UserLine,
)
from aotlab.recorder.naming import called
from aotlab.recorder.places import user_line
from aotlab.recorder.signals import LeftToPython
from aotlab.recorder.tape import tensors_in

_MEMORY = "the compiled function would see the memory of this one trace"
#: What is refused of a traced tensor: with which error, what it is called, and why.
ESCAPES: dict[Any, tuple[type[RefusedError], str, str]] = {
    Tensor.numpy: (EscapeError, "`numpy()`", _MEMORY),
    Tensor.__array__: (EscapeError, "`__array__` (numpy)", _MEMORY),
    Tensor.data_ptr: (EscapeError, "`data_ptr()`", _MEMORY),
    Tensor.__dlpack__: (EscapeError, "`__dlpack__`", _MEMORY),
    Tensor.untyped_storage: (EscapeError, "`untyped_storage()`", _MEMORY),
    Tensor.is_shared: (EscapeError, "`is_shared()`", _MEMORY),
    Tensor.share_memory_: (EscapeError, "`share_memory_()`", "it would move the memory of this one trace"),
    Tensor.is_pinned: (EscapeError, "`is_pinned()`", _MEMORY),
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


#: What a training step does beside the forward. Dynamo leaves it to Python and compiles what stands around it.
TRAINING = frozenset((Tensor.grad.__get__, Tensor.grad.__set__, Tensor.backward))  # type: ignore[union-attr]  # a getter
WHOLE_STEP = '; frontend="dynamo", or torch.compile(backend="aotlab"), runs a whole training step'


def refuse_swap(first: Tensor, second: Tensor) -> NoReturn:
    """Stand for ``torch.utils.swap_tensors``."""
    raise EscapeError(
        f"`torch.utils.swap_tensors` of {called(first)} and {called(second)} was called inside the function",
        line=user_line(),
        why="it would exchange a traced tensor for another behind the trace's back",
        suggestion="move it out of the compiled function",
    )


def refuse_dlpack(tensor: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
    """Stand for ``to_dlpack``."""
    raise EscapeError(
        f"`to_dlpack` of {called(tensor)} was called inside the function",
        line=user_line(),
        why="the compiled function would see the memory of this one trace",
        suggestion=f"move it out of the compiled function, or {BY_DYNAMO}",
    )


def refuse_random_state(name: str) -> NoReturn:
    """Stand for what touches a random generator, such as ``torch.manual_seed``."""
    raise RandomOpError(
        f"`torch.{name}` was called inside the function: it seeds, sets or reads a random generator",
        line=user_line(),
        why="that would happen while tracing only",
        suggestion=f"do it outside of the compiled function, or {BY_DYNAMO}",
    )


def refuse_higher_order(op: object, line: UserLine | None = None) -> NoReturn:
    """Refuse what holds functions, such as ``torch.cond``."""
    raise HigherOrderOpError(
        f"higher-order op `{op}` has no tracing rule yet",
        line=line or user_line(),
        why="it holds functions, which would have to be traced on their own",
        suggestion="move it out of the compiled function",
    )


def leave_call_back(*args: Any, otherwise: Callable[..., Any], **kwargs: Any) -> Any:
    """Leave ``apply_`` and the like to eager: a trace has no elements, and they read memory that is not there."""
    if any(map(internals.is_functional, tensors_in((args, kwargs)))):
        raise LeftToPython(
            f"`{otherwise.__name__}` calls Python with each element of a tensor, at {user_line()}",
            suggestion="compute with whole tensors, to have it compiled",
        )
    if args and isinstance(args[0], Tensor) and is_captured(args[0]):
        raise LeftToPython(f"`{otherwise.__name__}` writes a tensor that is not an argument, at {user_line()}")
    return otherwise(*args, **kwargs)


def spoken_name(func: Any) -> str:
    """Return the name by which a user knows a function: of a property, that of the property."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(func.__self__, "__name__", name)) if name in ("__get__", "__set__") else name


def explain_escape(error: RuntimeError, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say of an error of torch's about the trace's own tensors what the user did.

    Raises
    ------
    CapturedTensorError
        A tensor that is no argument is written.
    LeftToPython
        A tensor's memory is read by a function that no trace can see into.
    """
    text = str(error)
    if "functional tensor" in text:
        written = next((tensor for tensor in tensors_in((args, kwargs)) if is_captured(tensor)), None)
        if written is not None:
            raise CapturedTensorError(
                f"{called(written)}, which is not an argument, is written",
                line=user_line(),
                why="the write would happen while tracing",
                suggestion=f"pass it as an argument, or {BY_DYNAMO}",
            ) from error
    if "data is not allocated yet" in text:
        raise LeftToPython(
            f"`{spoken_name(func)}` reads the values of a traced tensor, at {user_line()}",
            suggestion="use torch.stack in its place" if func is torch.tensor else "do that outside of the function",
        ) from error


def is_captured(tensor: Tensor) -> bool:
    """Tell whether a tensor is a real one that the function found outside of its arguments."""
    if internals.is_functional(tensor) or isinstance(tensor, internals.FakeTensor) or tensor.is_meta:
        return False
    return not internals.is_transformed(tensor)
