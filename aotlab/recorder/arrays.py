"""The numpy array over a traced tensor's memory, as far as it is only written.

    x.detach().numpy()[...] = 2
    torch.from_numpy(x.detach().numpy()).mul_(2)

A write through the array is a write to the tensor that autograd does not see and that counts no version: what a write
through ``.data`` is, which the trace knows. So the function gets a stand-in that takes plain numbers and gives its
memory back as a tensor; whatever else is asked of it would need values, and is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from aotlab.errors import BY_DYNAMO, EscapeError, UserLine
from aotlab.recorder.places import user_line

try:
    _ARRAY: type = type(torch.empty(0).numpy())
except RuntimeError:  # numpy is not installed: then there are no arrays
    _ARRAY = object

#: The attribute of a tensor that was made of an array: it has a storage object of its own over the same memory.
OF_ARRAY = "_aotlab_of_array"

_DTYPES = frozenset(
    (
        torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
        torch.bool, torch.complex64, torch.complex128,
    )
)  # fmt: skip


def can_be_array(tensor: Tensor) -> bool:
    """Tell whether ``tensor.numpy()`` gives an array over its memory; eager has errors for the others."""
    strided = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return strided and not tensor.requires_grad and tensor.dtype in _DTYPES and not _is_lazy(tensor)


def _is_lazy(tensor: Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def refusal(array: TracedArray, line: UserLine | None) -> EscapeError:
    """Make the error for what cannot be had of a traced tensor's array."""
    name: str | None = vars(array)["_name"]
    return EscapeError(
        f"`numpy()` of {'a traced tensor' if name is None else f'`{name}`'} was asked for",
        argument=name,
        line=line,
        why="the compiled function would see the memory of this one trace",
        suggestion=f"move it out of the compiled function, or {BY_DYNAMO}",
    )


class TracedArray:
    """Stands for the array of a traced tensor.

    Parameters
    ----------
    tensor
        An alias of the tensor, without its history and its version counter.
    eager
        The signal that eager has to run the call.
    name
        What the user calls the tensor, if that is known.
    """

    __hash__ = None  # type: ignore[assignment]  # as an array's

    def __init__(self, tensor: Tensor, eager: type[Exception], name: str | None = None) -> None:
        self._name = name
        self._tensor = tensor
        self._eager = eager
        self._line = user_line()

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # an `isinstance` in the function decides as in eager
        return _ARRAY

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write a number to all of it or to a part, as numpy does."""
        tensor = self._tensor
        keys = key if type(key) is tuple else (key,)
        if not all(one is Ellipsis or type(one) in (int, slice) for one in keys) or not _fits(value, tensor.dtype):
            raise refusal(self, user_line())
        try:
            tensor[key] = value
        except (IndexError, TypeError, ValueError) as error:
            raise self._eager(f"writing to an array raised {type(error).__name__}") from error

    def __getattr__(self, name: str) -> NoReturn:
        raise refusal(self, user_line())


def _refuse(self: TracedArray, *args: Any, **kwargs: Any) -> NoReturn:
    raise refusal(self, user_line())


for _name in (
    "array", "array_ufunc", "array_function", "array_wrap", "dlpack", "len", "iter", "getitem", "delitem", "contains",
    "bool", "int", "float", "complex", "index", "repr", "str", "format", "eq", "ne", "lt", "le", "gt", "ge", "neg",
    "pos", "abs", "invert", "copy", "deepcopy", "reduce_ex",
    *(side + name for side in ("", "r", "i") for name in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
    )),
    "divmod", "rdivmod",
):  # fmt: skip
    # what Python and numpy look up on the class, past `__getattr__`
    setattr(TracedArray, f"__{_name}__", _refuse)


def is_traced_array(value: Any) -> bool:
    """Tell whether ``value`` is a `TracedArray`, which ``isinstance`` does not."""
    return type(value) is TracedArray


def line_of(array: TracedArray) -> UserLine | None:
    """Return the user's line that asked for the array."""
    line: UserLine | None = vars(array)["_line"]
    return line


def tensor_of(array: Any, otherwise: Callable[..., Tensor]) -> Tensor:
    """Do what `torch.from_numpy` does, for the array of a traced tensor as well."""
    if type(array) is not TracedArray:
        return otherwise(array)
    tensor: Tensor = vars(array)["_tensor"].data
    setattr(tensor, OF_ARRAY, True)
    return tensor


def _fits(value: Any, dtype: torch.dtype) -> bool:
    """Tell whether numpy and torch make the same of a number that is written to a tensor of ``dtype``."""
    if type(value) not in (bool, int, float):
        return False
    if dtype is torch.bool:
        return not (type(value) is float and math.isnan(value))
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    if type(value) is float:
        return value.is_integer() and _in_range(int(value), dtype)
    return _in_range(value, dtype)


def _in_range(value: int, dtype: torch.dtype) -> bool:
    info = torch.iinfo(dtype)
    return info.min <= value <= info.max
