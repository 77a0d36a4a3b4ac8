"""What a user asked for, where a trace has no answer: the value of a tensor, or a size that depends on values.

    if y > 0:
        counts = F.one_hot(labels)

Torch has one op below both, ``aten._local_scalar_dense``. The user called it `if` and `one_hot`, and the ways out are
`torch.where` and ``num_classes=``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from aotlab.errors import BY_DYNAMO, DataDependentError
from aotlab.recorder.naming import name_of
from aotlab.recorder.tape import tensors_in

_VALUE = "a trace has no values, and what it took for one would hold at every call"
_SIZE = "a graph traced ahead of time has one size for each result"
_BRANCH = f"choose with torch.where, or {BY_DYNAMO}"
_MOST = 3  # inputs named in one message
_NUMBER = f"keep it a tensor, pass the number as an argument, or {BY_DYNAMO}"
_TEXT = f"return it and print it outside, or {BY_DYNAMO}"

#: By the name of what was called: what it asks of a tensor, and the way out.
_VALUES = {
    "__bool__": ("`if`, `while`, `assert` or `bool()` asks for the value of {}", _BRANCH),
    "__contains__": ("`in` asks for the values of {}", f"write `(x == value).any()`, or {BY_DYNAMO}"),
    "item": ("`.item()` asks for the value of {}", _NUMBER),
    "__int__": ("`int()` asks for the value of {}", _NUMBER),
    "__float__": ("`float()` asks for the value of {}", _NUMBER),
    "__complex__": ("`complex()` asks for the value of {}", _NUMBER),
    "__index__": ("an index or a length asks for the value of {}", _NUMBER),
    "__getitem__": ("an index asks for values of {}", _NUMBER),
    "__setitem__": ("an index asks for values of {}", _NUMBER),
    "tolist": ("`tolist()` asks for the values of {}", f"return the tensor, or {BY_DYNAMO}"),
    "__repr__": ("`print`, `str()` or `repr()` asks for the values of {}", _TEXT),
    "__format__": ("a text asks for the values of {}", _TEXT),
    "equal": ("`equal` asks for the values of {}", f"keep `(a == b).all()` as a tensor, or {BY_DYNAMO}"),
    "allclose": ("`allclose` asks for the values of {}", f"keep `isclose(a, b).all()` as a tensor, or {BY_DYNAMO}"),
    "one_hot": ("`one_hot` counts its classes by the values of {}", "pass num_classes="),
}
_SIZES = {
    "__getitem__": f"use torch.where or masked_fill, which keep the size, or {BY_DYNAMO}",
    "__setitem__": f"use torch.where or masked_fill, which keep the size, or {BY_DYNAMO}",
    "masked_select": f"use torch.where or masked_fill, which keep the size, or {BY_DYNAMO}",
    "repeat_interleave": "pass output_size=",
    "nonzero": f"compute with the mask itself, or {BY_DYNAMO}",
}


def explain(error: DataDependentError, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Say of a refusal what the user asked for; ``func`` is what was called, with what."""
    name = str(getattr(func, "__name__", "")).partition(".")[0]
    asked = _asked(name, args, kwargs or {})
    known = None if asked is None else name_of(asked)
    if asked is None and len(tensors_in((args, kwargs or {}))) > 1:
        text = "its arguments"
    elif known is not None:
        text = f"`{known}`"
    elif 0 < len(error.inputs) <= _MOST:
        text = f"a tensor computed from {' and '.join(f'`{each}`' for each in error.inputs)}"
    else:
        text = "a tensor"
    if error.of_size:
        if name:
            error.reword(seen=f"the size of what `{_plain(name)}` returns depends on the values of {text}")
        error.reword(why=_SIZE, suggestion=_SIZES.get(name, f"move it out of the compiled function, or {BY_DYNAMO}"))
    elif name in _VALUES:
        seen, suggestion = _VALUES[name]
        error.reword(seen=seen.format(text), why=_VALUE, suggestion=suggestion)
    elif name:
        error.reword(
            seen=f"`{_plain(name)}` asks for the values of {text}",
            why=_VALUE,
            suggestion=f"move it out of the compiled function, or {BY_DYNAMO}",
        )
    error.reword(argument=known if known in error.inputs else next(iter(error.inputs), None))


def _asked(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tensor whose values are asked for: of an index rather the index."""
    if name in ("__getitem__", "__setitem__") and len(args) > 1:
        parts = [p for i in (args[1] if isinstance(args[1], tuple) else (args[1],)) for p in _parts(i)]
        tensors = tensors_in(parts)
        return tensors[0] if tensors else next(iter(tensors_in(args)), None)
    if name in ("repeat_interleave", "masked_select") and len(tensors_in(args)) > 1:
        return tensors_in(args)[1]
    tensors = tensors_in((args, kwargs))
    return tensors[0] if len(tensors) == 1 or (tensors and name in _VALUES) else None


def _parts(index: Any) -> tuple[Any, ...]:
    return (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)


def _plain(name: str) -> str:
    return {"__getitem__": "x[…]", "__setitem__": "x[…] = …"}.get(name, name)
