"""The boundary of a trace: what a program may do at Python's level that a graph cannot hold, and what is said of it.

    x.numpy()                # looks at memory: the graph would see that of this one trace
    if x.sum() > 0:          # asks for a value: a trace has none
    time.time()              # is another one at each call

`EscapeGuard` looks up what is called in these tables, and raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from aotlab import _torch as internals
from aotlab import errors
from aotlab.capture.signals import RunEagerly
from aotlab.errors import BY_DYNAMO, TAKE_DYNAMO
from aotlab.guards.places import called, name_of, user_line
from aotlab.trace.tape import tensors_in

_OUTSIDE = "move it out of the compiled function"
_OR_DYNAMO = f"{_OUTSIDE}, or {TAKE_DYNAMO}"
_STEP = f'{_OUTSIDE}; frontend="dynamo", or torch.compile(backend="aotlab"), runs a whole training step'


class Row(NamedTuple):
    """One way over the boundary: what it is called, why no graph can hold it, what to do instead."""

    what: str
    why: str = "the compiled function would see the memory of this one trace"
    instead: str = _OR_DYNAMO
    error: type[errors.RefusedError] = errors.EscapeError


_VALUES = "a trace has no values"
_IN_VAIN = "a traced tensor accumulates no gradient"
#: What may be asked of a tensor.
OF_A_TENSOR: Mapping[Any, Row] = {
    Tensor.numpy: Row("`numpy()`"),
    Tensor.__array__: Row("`__array__` (numpy)"),
    Tensor.data_ptr: Row("`data_ptr()`"),
    Tensor.__dlpack__: Row("`__dlpack__`"),
    Tensor.untyped_storage: Row("`untyped_storage()`"),
    Tensor.storage: Row("`storage()`"),
    Tensor.is_shared: Row("`is_shared()`"),
    Tensor.is_pinned: Row("`is_pinned()`"),
    Tensor.share_memory_: Row("`share_memory_()`", "it would move the memory of this one trace", _OUTSIDE),
    Tensor.__deepcopy__: Row("`copy.deepcopy`"),
    Tensor.__reduce_ex__: Row("a pickle"),
    Tensor.data.__set__: Row("an assignment to `.data`", "the trace cannot see what it does", _OUTSIDE),  # type: ignore[attr-defined]  # a slot wrapper
    internals.BASE_GETTER: Row("`_base`", "a trace has other views, and views of others"),
    internals.VERSION_GETTER: Row("`_version`", "a compiled call counts versions at other moments"),
    Tensor.grad.__get__: Row("`.grad`", "it belongs to the caller's tensor, not to the traced one", _STEP),  # type: ignore[union-attr]  # a getter
    Tensor.grad.__set__: Row("an assignment to `.grad`", "it would be lost", _STEP),  # type: ignore[union-attr]  # a setter
    Tensor.register_post_accumulate_grad_hook: Row("`register_post_accumulate_grad_hook()`", _IN_VAIN),
    Tensor.retain_grad: Row("`retain_grad()`", _IN_VAIN),
    Tensor.retains_grad.__get__: Row("`retains_grad`", _IN_VAIN),  # type: ignore[attr-defined]  # a getter
    Tensor.backward: Row("`backward()`", "gradients would be added to traced tensors, not to the caller's", _STEP),
    Tensor.tolist: Row("`tolist()`", _VALUES, error=errors.DataDependentError),
    Tensor.__repr__: Row("the text", _VALUES, error=errors.DataDependentError),
    Tensor.__format__: Row("the text", _VALUES, error=errors.DataDependentError),
}  # fmt: skip

#: What changes a tensor in place other than in its values.
CHANGES_SIZES = (
    Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_, Tensor.unsqueeze_,
    Tensor.detach_, torch.detach_, Tensor.resize_, Tensor.resize_as_, torch.resize_as_, Tensor.as_strided_,
    torch.as_strided_, Tensor.set_,
)  # fmt: skip
_OTHER_KERNEL = ("eager computes `{}` by another kernel than a trace records", "call it outside of the function")
#: What eager computes by another kernel: its result lies row by row, or it computes vectors only where they are needed.
LAID_OUT_BY_ROWS = (internals.ONE_HOT, functional.rrelu, torch.rrelu)
MAX_POOLS = (torch.max_pool1d, functional.max_pool1d)
_linalg = torch.linalg
WITH_VECTORS = (_linalg.eig, _linalg.eigh, _linalg.svd, torch.svd, Tensor.svd)
WITHOUT_VECTORS = (
    _linalg.svdvals, _linalg.eigvalsh, _linalg.cond, _linalg.matrix_norm, _linalg.matrix_rank, _linalg.norm,
    torch.norm, Tensor.norm, torch.nuclear_norm,
)  # fmt: skip
_BY_OTHER_KERNELS = (*LAID_OUT_BY_ROWS, *MAX_POOLS, *WITH_VECTORS, *WITHOUT_VECTORS)
_UNSAFE_VIEW = ("makes views that a trace takes for copies", "use split, chunk or view, to have it compiled")
_CHANGES = ("changes a tensor in place other than in its values", "call the method, to have it compiled")
#: Functions that are something else to functionalization than to eager, by name: why, and what to call instead.
EAGER_FUNCTIONS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "_unsafe_view"), _UNSAFE_VIEW),
    **dict.fromkeys((method.__name__ for method in CHANGES_SIZES), _CHANGES),  # as ops, which no quirk claims
    "lift_fresh": ("returns its very argument, which a trace takes for a view", "leave it out, to have it compiled"),
    "is_inference": ("is answered by the trace's own tensors", "ask outside of the function"),
    "polygamma_": ("is no op to a trace", "write `x.copy_(torch.polygamma(n, x))`, to have it compiled"),
    # functionalization forgets it, and the graph would write where there is no memory
    "resize_storage_bytes_": ("resizes a storage", "make a new tensor, to have it compiled"),
}

HOOKED = ("a hook is registered inside of the function", "register it outside, to have it compiled")
_CHANGED = ("`{}` changes a tensor in place other than in its values", "use the form that returns a new tensor")
_LOOKED_AT = ("`{}` looks at the place of a tensor in its storage", "compute with indices and shapes")
#: What quirks may claim; where none does, why it runs eagerly, and what to do instead.
CLAIMABLE: Mapping[Any, tuple[str, str]] = {
    Tensor.register_hook: HOOKED,
    **dict.fromkeys(CHANGES_SIZES, _CHANGED),
    Tensor.storage_offset: _LOOKED_AT,
    Tensor.as_strided: _LOOKED_AT,
    torch.as_strided: _LOOKED_AT,
    torch.autograd.grad: ("`torch.autograd.grad` is called inside of the function", "call it outside"),
    torch.lstm: ("an LSTM looks at grad mode when it runs", "compute with torch.nn.LSTMCell"),
    **dict.fromkeys(_BY_OTHER_KERNELS, _OTHER_KERNEL),
    **dict.fromkeys(internals.HIGHER_ORDER, ("`{}` is given functions", _OUTSIDE)),
    warnings.warn: ("it warns, as eager does at each call", "mend what it warns of"),
}
#: What is claimed whatever its first argument is: a tensor of a transform, or one from outside.
CLAIMED_ANYHOW = frozenset((torch.autograd.grad, *_BY_OTHER_KERNELS, *internals.HIGHER_ORDER))

_BRANCH = f"choose with torch.where, or {BY_DYNAMO}"
_NUMBER = f"keep it a tensor, pass the number as an argument, or {BY_DYNAMO}"
_TEXT = f"return it and print it outside, or {BY_DYNAMO}"
_KEEPS_SIZE = f"use torch.where or masked_fill, which keep the size, or {BY_DYNAMO}"
#: What asks for a value, by the name of what was called (torch has one op below all): what it asks, and the way out.
_ASKS_VALUES = {
    "__bool__": ("`if`, `while`, `assert` or `bool()` asks for the value of {}", _BRANCH),
    "__contains__": ("`in` asks for the values of {}", f"write `(x == value).any()`, or {BY_DYNAMO}"),
    "item": ("`.item()` asks for the value of {}", _NUMBER),
    **{f"__{kind}__": (f"`{kind}()` asks for the value of {{}}", _NUMBER) for kind in ("int", "float", "complex")},
    "__index__": ("an index or a length asks for the value of {}", _NUMBER),
    **dict.fromkeys(("__getitem__", "__setitem__"), ("an index asks for values of {}", _NUMBER)),
    "tolist": ("`tolist()` asks for the values of {}", f"return the tensor, or {BY_DYNAMO}"),
    "__repr__": ("`print`, `str()` or `repr()` asks for the values of {}", _TEXT),
    "__format__": ("a text asks for the values of {}", _TEXT),
    "equal": ("`equal` asks for the values of {}", f"keep `(a == b).all()` as a tensor, or {BY_DYNAMO}"),
    "allclose": ("`allclose` asks for the values of {}", f"keep `isclose(a, b).all()` as a tensor, or {BY_DYNAMO}"),
    "zeros": ("`zeros` takes its size from the values of {}", _NUMBER),
    "one_hot": ("`one_hot` counts its classes by the values of {}", "pass num_classes=, or compare with torch.arange"),
}
#: What has a result whose size depends on values: the way out.
_ASKS_SIZES = {
    **dict.fromkeys(("__getitem__", "__setitem__", "masked_select"), _KEEPS_SIZE),
    "repeat_interleave": "pass output_size=",
    "nonzero": f"compute with the mask itself, or {BY_DYNAMO}",
    "_pack_padded_sequence": f"pack outside of the function, or {BY_DYNAMO}",
}


def is_captured(tensor: Tensor) -> bool:
    """Tell whether a tensor is a real one that the function found outside of its arguments."""
    is_traced = internals.is_functional(tensor) or isinstance(tensor, internals.FakeTensor)
    return not (is_traced or tensor.is_meta or internals.is_transformed(tensor))


def check_look(func: Any, tensor: Tensor, name: str | None) -> None:
    """Refuse a look at a traced tensor by a row of `OF_A_TENSOR`, and any at a captured one."""
    row = OF_A_TENSOR.get(func)
    if row is not None and internals.is_functional(tensor):
        of = called(tensor, "a traced tensor") if name is None else f"`{name}`"
        raise row.error(
            f"{row.what} of {of} was asked for", line=user_line(), why=row.why, suggestion=row.instead, argument=name
        )
    if is_captured(tensor):
        row = row or Row(f"`{spoken_name(func)}`", instead=_OUTSIDE)
        raise row.error(
            f"{row.what} of {called(tensor)}, which is not an argument, was asked for",
            line=user_line(),
            why="it would happen while tracing only, and what it gave would be frozen into the graph",
            suggestion=f"pass the tensor as an argument, or {row.instead}",
        )


def refuse_unasked(name: str, *tensors: Any, **_: Any) -> NoReturn:
    """Stand for a function that asks no mode: one that touches a random generator, or takes tensors' memory."""
    of = " and ".join(called(tensor) for tensor in tensors if isinstance(tensor, Tensor))
    takes_memory = name in ("swap_tensors", "to_dlpack")
    raise (errors.EscapeError if takes_memory else errors.RandomOpError)(
        f"`torch.{name}`{of and f' of {of}'} was called inside the function",
        line=user_line(),
        why=f"{'tensors' if takes_memory else 'random generators'} would change or be read while tracing only",
        suggestion=_OUTSIDE if takes_memory else _OR_DYNAMO,
    )


def refuse_higher_order(op: object, line: errors.UserLine | None = None) -> NoReturn:
    """Refuse what holds functions, such as ``torch.cond``."""
    raise errors.HigherOrderOpError(
        f"`{op}` is given functions",
        line=line or user_line(),
        why="a trace would run them, and not see what they capture",
        suggestion=f"{_OUTSIDE}, or {BY_DYNAMO}",
    )


def leave_unasked(*args: Any, otherwise: Callable[..., Any], **kwargs: Any) -> Any:
    """Leave to eager what asks no mode: ``set_``, and ``apply_`` and the like, which read memory that is not there."""
    name, given = otherwise.__name__, tensors_in((args, kwargs))
    if not any(internals.is_functional(tensor) or (is_captured(tensor) and name != "set_") for tensor in given):
        return otherwise(*args, **kwargs)
    with internals.disable_torch_function():  # the mode is still on
        what, instead = f"`{name}` calls Python with each element of a tensor", "compute with whole tensors"
        if name == "set_":
            what, instead = f"`set_` gives {called(args[0])} other memory", "copy the values with `copy_`"
        raise RunEagerly(f"{what}, at {user_line()}", suggestion=f"{instead}, to have it compiled")


def op_name(func: Any) -> str:
    """Return the name of a function; of one overload of an op, that of the op."""
    return str(getattr(func, "__name__", "")).partition(".")[0]


def spoken_name(func: Any) -> str:
    """Return the name by which a user knows a function: of a property, that of the property."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(func.__self__, "__name__", name)) if name in ("__get__", "__set__") else name


def explain_escape(error: RuntimeError, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Say of an error of torch's about the trace's own tensors what the user did: write a captured one, or read one."""
    text = str(error)
    if "functional tensor" in text:
        written = next((tensor for tensor in tensors_in((args, kwargs)) if is_captured(tensor)), None)
        if written is not None:
            what, why = f"{called(written)}, which is not an argument, is written", "it would happen while tracing"
            instead = f"pass it as an argument, or {BY_DYNAMO}"
            raise errors.CapturedTensorError(what, line=user_line(), why=why, suggestion=instead) from error
    if "of BF16 type" in text:
        what = f"`{spoken_name(func)}` takes bfloat16 alone in a trace, at {user_line()}"
        raise RunEagerly(what, suggestion=f"cast its arguments, or {BY_DYNAMO}") from error
    if "data is not allocated yet" in text:
        raise RunEagerly(
            f"`{spoken_name(func)}` reads the values of a traced tensor, at {user_line()}",
            suggestion="use torch.stack in its place" if func is torch.tensor else "do that outside of the function",
        ) from error


def explain_question(
    error: errors.DataDependentError, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Say of a refusal what the user asked for; ``func`` is what was called, with what."""
    name, given = op_name(func), tensors_in((args, kwargs))
    if name in ("__getitem__", "__setitem__") and len(args) > 1:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        bounds = [(part.start, part.stop, part.step) if isinstance(part, slice) else part for part in index]
        given = tensors_in(bounds) or given[:1]  # the values of an index are asked for rather than the tensor's
    elif name in ("repeat_interleave", "masked_select"):
        given = given[1:] or given
    known = name_of(given[0]) if len(given) == 1 or (given and name in _ASKS_VALUES) else None
    text = "a tensor" if len(given) == 1 else "its arguments"
    if known is not None:
        text = f"`{known}`"
    elif 0 < len(error.inputs) <= 3:
        text = f"a tensor computed from {' and '.join(f'`{each}`' for each in error.inputs)}"
    plain = {"__getitem__": "x[…]", "__setitem__": "x[…] = …"}.get(name, name)
    if error.of_size:
        seen, suggestion = f"the size of what `{plain}` returns depends on the values of {{}}", _ASKS_SIZES.get(name)
        why = "a graph traced ahead of time has one size for each result"
    else:
        seen, suggestion = _ASKS_VALUES.get(name, (f"`{plain}` asks for the values of {{}}", None))
        why = "a trace has no values, and what it took for one would hold at every call"
    error.reword(seen=seen.format(text), why=why, suggestion=suggestion or _OR_DYNAMO)
    error.reword(argument=known if known in error.inputs else next(iter(error.inputs), None))
