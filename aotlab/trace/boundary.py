"""The boundary of a trace: tables of the Python operations that a graph cannot contain, with their error messages.

    x.numpy()                # reads memory: a graph would contain the values of this one trace
    if x.sum() > 0:          # needs a value: a traced tensor has no values
    time.time()              # returns a different number at each call

`EscapeGuard` sees each torch function that the program calls. If a table contains the function, `EscapeGuard` raises an
error, runs the compiled call eagerly, or calls the handler of a quirk. The table determines which of these it does.
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
from aotlab.guards.user_code import called, name_of, user_line
from aotlab.trace.tape import tensors_in

_OUTSIDE = "move it out of the compiled function"
_OR_DYNAMO = f"{_OUTSIDE}, or {TAKE_DYNAMO}"
_GRADIENTS = f"{_OUTSIDE}, or {BY_DYNAMO}"
_STEP = f'{_OUTSIDE}; to run a whole training step, use frontend="dynamo" or torch.compile(backend="aotlab")'


class Refused(NamedTuple):
    """The parts of the error message for an operation that a graph cannot contain, and the class of the error.

    ``operation`` is a verb and a name, for example "calls `numpy()` on". ``why`` is the reason.
    """

    operation: str
    why: str = "a traced tensor has no memory"
    suggestion: str = _OR_DYNAMO
    error: type[errors.RefusedError] = errors.EscapeError


_VALUES = "a traced tensor has no values"
_IN_VAIN = "a traced tensor accumulates no gradient"
#: Methods and attributes of a tensor. If the program uses one of them on a traced tensor, an error is raised.
REFUSED_ON_TENSORS: Mapping[Any, Refused] = {
    Tensor.numpy: Refused("calls `numpy()` on"),
    Tensor.__array__: Refused("calls `__array__` (numpy) on"),
    Tensor.data_ptr: Refused("calls `data_ptr()` on"),
    Tensor.__dlpack__: Refused("calls `__dlpack__` on"),
    Tensor.untyped_storage: Refused("calls `untyped_storage()` on"),
    Tensor.storage: Refused("calls `storage()` on"),
    Tensor.is_shared: Refused("calls `is_shared()` on"),
    Tensor.is_pinned: Refused("calls `is_pinned()` on"),
    Tensor.share_memory_: Refused("calls `share_memory_()` on", suggestion=_OUTSIDE),
    Tensor.__deepcopy__: Refused("calls `copy.deepcopy` on"),
    Tensor.__reduce_ex__: Refused("pickles"),
    Tensor.data.__set__: Refused("assigns to `.data` of", "a trace cannot record the assignment", _OUTSIDE),  # type: ignore[attr-defined]  # a slot wrapper
    internals.BASE_GETTER: Refused("reads `_base` of", "a traced tensor may have another base than in eager"),
    internals.VERSION_GETTER: Refused("reads `_version` of", "version counters grow at other times than in eager"),
    Tensor.grad.__get__: Refused("reads `.grad` of", "the gradient belongs to the caller's tensor", _GRADIENTS),  # type: ignore[union-attr]  # a getter
    Tensor.grad.__set__: Refused("assigns to `.grad` of", "the assignment would be lost", _GRADIENTS),  # type: ignore[union-attr]  # a setter
    Tensor.register_post_accumulate_grad_hook: Refused("calls `register_post_accumulate_grad_hook()` on", _IN_VAIN),
    Tensor.retain_grad: Refused("calls `retain_grad()` on", _IN_VAIN),
    Tensor.retains_grad.__get__: Refused("reads `retains_grad` of", _IN_VAIN),  # type: ignore[attr-defined]  # a getter
    Tensor.backward: Refused("calls `backward()` on", "the caller's tensors would get no gradients", _STEP),
    Tensor.tolist: Refused("calls `tolist()` on", _VALUES, error=errors.DataDependentError),
    Tensor.__repr__: Refused("prints or formats", _VALUES, error=errors.DataDependentError),
    Tensor.__format__: Refused("prints or formats", _VALUES, error=errors.DataDependentError),
}  # fmt: skip

#: In-place functions that change a tensor's sizes, strides or storage rather than its values.
CHANGES_SIZES = (
    Tensor.t_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.squeeze_, Tensor.unsqueeze_,
    Tensor.detach_, torch.detach_, Tensor.resize_, Tensor.resize_as_, torch.resize_as_, Tensor.as_strided_,
    torch.as_strided_,
)  # fmt: skip
#: Functions whose calls the quirk `kernels` corrects. The results of `CONTIGUOUS_IN_EAGER` and `MAX_POOLS` may be
#: contiguous in eager where the recorded ops return other strides. For the vectors that `WITH_VECTORS` compute, eager's
#: backward checks values. For `WITHOUT_VECTORS`, eager computes vectors only if a gradient needs them.
CONTIGUOUS_IN_EAGER = (internals.ONE_HOT, functional.rrelu, torch.rrelu)
MAX_POOLS = (torch.max_pool1d, functional.max_pool1d)
_linalg = torch.linalg
WITH_VECTORS = (_linalg.eig, _linalg.eigh, _linalg.svd, torch.svd, Tensor.svd)
WITHOUT_VECTORS = (
    _linalg.svdvals, _linalg.eigvalsh, _linalg.cond, _linalg.matrix_norm, _linalg.matrix_rank, _linalg.norm,
    torch.norm, Tensor.norm, torch.nuclear_norm,
)  # fmt: skip
_BY_OTHER_KERNELS = (*CONTIGUOUS_IN_EAGER, *MAX_POOLS, *WITH_VECTORS, *WITHOUT_VECTORS)
#: The method and the assignment that give a tensor other memory.
SETS_MEMORY, ASSIGNS_DATA = Tensor.set_, Tensor.data.__set__  # type: ignore[attr-defined]  # a slot wrapper
#: The op that allocates or frees the storage of a tensor. Functionalization would lose the call.
RESIZES_STORAGE = (torch.ops.inductor.resize_storage_bytes_, torch.ops.inductor.resize_storage_bytes_.default)
#: Functions that must run eagerly, because functionalization gives them another result than eager. Each name is mapped
#: to the id of a row of `aotlab.fallbacks`, and to the values for the fields in braces in the row's sentence.
EAGER_FUNCTIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **dict.fromkeys(
        ("unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "_unsafe_view"),
        ("aliases-differ-in-trace", {"result": "a copy", "instead": "use split, chunk or view"}),
    ),
    "lift_fresh": ("aliases-differ-in-trace", {"result": "a view", "instead": "use the argument itself"}),
    # for calls of the ops with these names (``torch.ops.aten.t_``); quirks handle calls of the methods
    **dict.fromkeys((method.__name__ for method in (*CHANGES_SIZES, SETS_MEMORY)), ("op-changes-sizes", {})),
    "is_inference": ("asks-is-inference", {}),
    "polygamma_": ("polygamma-in-place", {}),
}

#: Functions that a quirk may *claim*: `EscapeGuard` then calls a handler of the quirk instead of the function. The
#: values are the names of the quirks. If the quirk is switched off, the call runs eagerly.
CLAIMABLE: Mapping[Any, str] = {
    Tensor.register_hook: "hooks",
    **dict.fromkeys(CHANGES_SIZES, "metadata_changes"),
    **dict.fromkeys((Tensor.storage_offset, Tensor.as_strided, torch.as_strided), "storage_offsets"),
    torch.autograd.grad: "gradients",
    torch.lstm: "lstm",
    **dict.fromkeys(_BY_OTHER_KERNELS, "kernels"),
    **dict.fromkeys(internals.HIGHER_ORDER, "hops"),
    warnings.warn: "warnings",
    **dict.fromkeys(RESIZES_STORAGE, "storage_sizes"),
    **dict.fromkeys((SETS_MEMORY, ASSIGNS_DATA), "other_memory"),
}
#: Functions of `CLAIMABLE` that are claimed even if their first argument is not a traced tensor (a tensor of a
#: functorch transform, say, or a tensor from outside the function).
CLAIMED_ALWAYS = frozenset((torch.autograd.grad, *_BY_OTHER_KERNELS, *internals.HIGHER_ORDER, *RESIZES_STORAGE))

_BRANCH = f"choose with torch.where, or {BY_DYNAMO}"
_NUMBER = f"keep it a tensor, pass the number as an argument, or {BY_DYNAMO}"
_TEXT = f"return it and print it outside, or {BY_DYNAMO}"
_KEEPS_SIZE = f"use torch.where or masked_fill, which keep the size, or {BY_DYNAMO}"
#: Functions that need a tensor's values, by name: the text of the error, and a suggestion. (Many of them call the same
#: op, so the message must depend on the function.)
_NEEDS_VALUES = {
    "__bool__": ("`if`, `while`, `assert` or `bool()` needs the value of {}", _BRANCH),
    "__contains__": ("`in` needs the values of {}", f"write `(x == value).any()`, or {BY_DYNAMO}"),
    "item": ("`.item()` needs the value of {}", _NUMBER),
    **{f"__{kind}__": (f"`{kind}()` needs the value of {{}}", _NUMBER) for kind in ("int", "float", "complex")},
    "__index__": ("an index or a length needs the value of {}", _NUMBER),
    **dict.fromkeys(("__getitem__", "__setitem__"), ("an index needs the values of {}", _NUMBER)),
    "tolist": ("`tolist()` needs the values of {}", f"return the tensor, or {BY_DYNAMO}"),
    "__repr__": ("`print`, `str()` or `repr()` needs the values of {}", _TEXT),
    "__format__": ("formatting needs the values of {}", _TEXT),
    "equal": ("`equal` needs the values of {}", f"keep `(a == b).all()` as a tensor, or {BY_DYNAMO}"),
    "allclose": ("`allclose` needs the values of {}", f"keep `isclose(a, b).all()` as a tensor, or {BY_DYNAMO}"),
    "zeros": ("`zeros` takes its size from the values of {}", _NUMBER),
    "one_hot": ("`one_hot` counts classes in the values of {}", "pass num_classes=, or compare with torch.arange"),
}
#: Functions with a result whose size depends on values, by name, and a suggestion for the user.
_SIZE_NEEDS_VALUES = {
    **dict.fromkeys(("__getitem__", "__setitem__", "masked_select"), _KEEPS_SIZE),
    "repeat_interleave": "pass output_size=",
    "nonzero": f"compute with the mask itself, or {BY_DYNAMO}",
    "_pack_padded_sequence": f"pack outside of the function, or {BY_DYNAMO}",
}


def is_captured(tensor: Tensor) -> bool:
    """Tell whether a tensor is real, so that the traced function did not get it as an argument (but from a closure)."""
    is_traced = internals.is_functional(tensor) or isinstance(tensor, internals.FakeTensor)
    return not (is_traced or tensor.is_meta or internals.is_transformed(tensor))


def check_access(func: Any, tensor: Tensor, name: str | None) -> None:
    """Raise if the program calls ``func`` on a tensor and the trace cannot give the result that eager gives.

    `EscapeGuard` calls this for functions that read or change more than values. On a traced tensor, the functions in
    `REFUSED_ON_TENSORS` are refused. On a captured tensor (see `is_captured`), every function for which `EscapeGuard`
    calls this is refused. ``name`` is the name of the tensor if it is an input, otherwise None.
    """
    row = REFUSED_ON_TENSORS.get(func)
    if row is not None and internals.is_functional(tensor):
        of = called(tensor, "a traced tensor") if name is None else f"`{name}`"
        raise row.error(
            f"the function {row.operation} {of}",
            line=user_line(),
            why=row.why,
            suggestion=row.suggestion,
            argument=name,
        )
    if is_captured(tensor):
        row = row or Refused(f"uses `{user_name(func)}` of", suggestion=_OUTSIDE)
        raise row.error(
            f"the function {row.operation} {called(tensor)}, which is not an argument",
            line=user_line(),
            why="this would run only while the function is traced, and its result would be a constant of the graph",
            suggestion=f"pass the tensor as an argument, or {row.suggestion}",
        )


def refuse_unguarded(name: str, *tensors: Any, **_: Any) -> NoReturn:
    """Raise an error. During the trace, this function replaces functions that no `TorchFunctionMode` sees.

    The replaced function has the name ``name``. It uses a random generator (as `torch.manual_seed` does), or it swaps
    or exports the memory of ``tensors``.
    """
    of = " and ".join(called(tensor) for tensor in tensors if isinstance(tensor, Tensor))
    takes_memory = name in ("swap_tensors", "to_dlpack")
    raise (errors.EscapeError if takes_memory else errors.RandomOpError)(
        f"the function calls `torch.{name}`{of and f' on {of}'}",
        line=user_line(),
        why=f"it would use {'tensors' if takes_memory else 'random generators'} only while the function is traced",
        suggestion=_OUTSIDE if takes_memory else _OR_DYNAMO,
    )


def refuse_higher_order(op: object, line: errors.UserLine | None = None) -> NoReturn:
    """Raise the error for a higher-order op (an op that takes functions, for example ``torch.cond``)."""
    raise errors.HigherOrderOpError(
        f"`{op}` takes functions",
        line=line or user_line(),
        why="a trace cannot see the tensors that these functions capture",
        suggestion=f"{_OUTSIDE}, or {BY_DYNAMO}",
    )


def check_unguarded_method(
    claimed: Callable[[], Callable[..., Any] | None], *args: Any, otherwise: Callable[..., Any], **kwargs: Any
) -> Any:
    """Run eagerly if the program calls ``apply_``, ``map_`` or ``map2_`` on a traced tensor.

    No `TorchFunctionMode` sees these three methods, nor ``set_``, so this function replaces them during the trace. A
    graph cannot contain them: for example, ``apply_`` reads memory that a traced tensor does not have. All but ``set_``
    also run eagerly for a captured tensor (see `is_captured`). For ``set_``, the function calls
    `EscapeGuard.claimed`, to which ``claimed`` is a weak reference. ``otherwise`` is the original method, which is
    called for other tensors.
    """
    name, tensors = otherwise.__name__, tensors_in((args, kwargs))
    if not any(internals.is_functional(tensor) or (is_captured(tensor) and name != "set_") for tensor in tensors):
        return otherwise(*args, **kwargs)
    with internals.disable_torch_function():  # `EscapeGuard` is still active, and must not see the engine's own calls
        if name == "set_":
            handler = claimed()
            assert handler is not None
            return handler(otherwise, args, kwargs)
        raise RunEagerly("applies-python-per-element", op=name, at=user_line())


def op_name(func: Any) -> str:
    """Return the name of a function; for an overload of an op, the name of the op."""
    return str(getattr(func, "__name__", "")).partition(".")[0]


def user_name(func: Any) -> str:
    """Return the name of a function for messages; for the getter or setter of a property, the property's name."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(func.__self__, "__name__", name)) if name in ("__get__", "__set__") else name


def explain_escape(error: RuntimeError, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Replace an error that torch raises about traced tensors by an error about the user's program.

    There are three such errors. The program wrote to a captured tensor, it called a function that accepts only bfloat16
    in a trace, or it read the values of a traced tensor. For any other error, this function does nothing.
    """
    text = str(error)
    if "functional tensor" in text:
        written = next((tensor for tensor in tensors_in((args, kwargs)) if is_captured(tensor)), None)
        if written is not None:
            fact = f"the function writes {called(written)}, which is not an argument"
            why = "the write would happen only while the function is traced"
            instead = f"pass it as an argument, or {BY_DYNAMO}"
            raise errors.CapturedTensorError(fact, line=user_line(), why=why, suggestion=instead) from error
    if "of BF16 type" in text:
        raise RunEagerly("takes-only-bfloat16-in-trace", op=user_name(func), at=user_line()) from error
    if "data is not allocated yet" in text:
        instead = "use torch.stack" if func is torch.tensor else _OUTSIDE
        raise RunEagerly("reads-values", op=user_name(func), instead=instead, at=user_line()) from error


def explain_values_needed(
    error: errors.DataDependentError, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Change the message of ``error``, so that it names the function that the user called, and not the op.

    The recorder raised ``error`` because an op needs the values of a tensor. The user called ``func(*args, **kwargs)``,
    and this function called the op.
    """
    name, operands = op_name(func), tensors_in((args, kwargs))
    if name in ("__getitem__", "__setitem__") and len(args) > 1:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        bounds = [(part.start, part.stop, part.step) if isinstance(part, slice) else part for part in index]
        operands = tensors_in(bounds) or operands[:1]  # the values of the index are needed, not those of the tensor
    elif name in ("repeat_interleave", "masked_select"):
        operands = operands[1:] or operands
    operand_name = name_of(operands[0]) if len(operands) == 1 or (operands and name in _NEEDS_VALUES) else None
    text = "a tensor" if len(operands) == 1 else "its arguments"
    if operand_name is not None:
        text = f"`{operand_name}`"
    elif 0 < len(error.inputs) <= 3:
        text = f"a tensor computed from {' and '.join(f'`{each}`' for each in error.inputs)}"
    plain = {"__getitem__": "x[…]", "__setitem__": "x[…] = …"}.get(name, name)
    if error.of_size:
        fact, suggestion = (
            f"the size of the result of `{plain}` depends on the values of {{}}",
            _SIZE_NEEDS_VALUES.get(name),
        )
        why = "a graph traced ahead of time has one size for each result"
    else:
        fact, suggestion = _NEEDS_VALUES.get(name, (f"`{plain}` needs the values of {{}}", None))
        why = "a traced tensor has no values, and a graph must be right for all values"
    error.reword(seen=fact.format(text), why=why, suggestion=suggestion or _OR_DYNAMO)
    error.reword(argument=operand_name if operand_name in error.inputs else next(iter(error.inputs), None))
