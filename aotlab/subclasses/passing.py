"""A wrapper is returned, and so is what is computed of it: what is computed hangs on the wrapper's parts.

    y = model(x)            # y_a, y_b = Unwrap(y); y = Wrap(y_a, y_b)
    return y, loss(y)

So it is traced, once an earlier trace has found it, and the same is written behind the compiled autograd node that
makes the parts: the caller's graph goes through the caller's ``y``, whose gradient and hooks see what the loss sends.
What several uses of ``y`` inside send is summed before it meets what the caller sends: that may differ in a last bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aotlab import _torch as internals
from aotlab.ir.subclasses import SubclassSpec
from aotlab.subclasses.edges import Gradient, Unwrap, Wrap, unwrapped
from aotlab.subclasses.parts import spec_of

#: How the gradient of a wrapper is taken apart, and its parts.
Way = tuple[SubclassSpec | None, Sequence[Tensor]]


class Passing(TorchFunctionMode):
    """Numbers the calls of a traced function; the wrappers that ``calls`` return are put together of their parts."""

    def __init__(self, calls: Collection[int]) -> None:
        super().__init__()
        self._calls, self._count = calls, 0
        self._made: dict[int, tuple[int, Tensor, Any]] = {}
        self._ways: dict[Any, Way] = {}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note what a call returns."""
        result = func(*args, **kwargs or {})
        self._count += 1
        is_given = any(result is each for each in (*args, *(kwargs or {}).values()))  # and written, perhaps
        with internals.disable_torch_function():
            if internals.is_wrapper(result) and result.grad_fn is not None and not is_given:
                if self._count in self._calls:
                    tangent, parts = unwrapped(result, "a result")
                    result = _whole(spec_of(result, "a result", parts), Gradient("a result", tangent), parts)
                    self._ways[result.grad_fn] = tangent, parts
                self._made.setdefault(id(result), (self._count, result, result.grad_fn))
        return result

    def number(self, wrapper: Tensor) -> int:
        """Return the number of the call that returned a wrapper as it is, of one that can go another way; or else 0."""
        number, _, history = self._made.get(id(wrapper), (0, None, None))
        is_new = history is wrapper.grad_fn and internals.base_of(wrapper) is None
        return number if is_new and number not in self._calls else 0

    def way(self, wrapper: Tensor) -> Way | None:
        """Return how a wrapper was put together, if it was."""
        return self._ways.get(wrapper.grad_fn)


def _whole(spec: SubclassSpec, gradient: Gradient, parts: Sequence[Tensor]) -> Tensor:
    with torch.enable_grad():
        made: Tensor = Wrap.apply(spec, gradient, 0, False, *parts)  # type: ignore[no-untyped-call]  # untyped in torch
    return made


def passed(spec: SubclassSpec, gradient: Gradient, *parts: Tensor) -> Sequence[Tensor]:
    """Return the parts of the wrapper of some parts; their autograd node keeps it for `taken`."""
    made = _whole(spec, gradient, parts)
    found: Sequence[Tensor] = Unwrap.apply(made, gradient)  # type: ignore[no-untyped-call]  # untyped in torch
    found[0].grad_fn.whole = made  # type: ignore[union-attr]
    return found


def taken(part: Tensor) -> Tensor:
    """Return the wrapper of which a part was made by `passed`."""
    node: Any = part.grad_fn
    made: Tensor = node.whole
    del node.whole
    return made
