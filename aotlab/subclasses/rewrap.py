"""Wrap the result of a torch call again, if the function returns it and also computes other results from it.

    y = model(x)            # y_a, y_b = Unwrap(y); y = Wrap(y_a, y_b)
    return y, loss(y)

The loss must depend on the parts of ``y``, so that its gradient flows through the ``y`` that the caller gets. The first
trace of the function finds the torch call that made ``y``, and notes its number (`RewrapMode.number_of_call`). The next
trace unwraps the result of that call and wraps it again, as in the comment. The run-time function does the same after
the compiled autograd node that computes the parts. So the caller's autograd graph goes through the caller's ``y``, and
the gradient and hooks of ``y`` see the gradient from the loss. If the function uses ``y`` several times, those
gradients are summed before the caller's gradient is added. This order may change the last bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from aotlab import _torch as internals
from aotlab.ir.subclass_records import SubclassSpec
from aotlab.subclasses.edges import GradientLayout, Unwrap, Wrap, unwrap_result
from aotlab.subclasses.parts import spec_of

#: The spec of the gradient of a wrapper, and the parts of the wrapper.
UnwrappedResult = tuple[SubclassSpec | None, Sequence[Tensor]]


class RewrapMode(TorchFunctionMode):
    """Numbers the torch calls of a traced function, from 1, and finds the call that made a wrapper.

    The results of the calls with the numbers ``calls`` are unwrapped and wrapped again.
    """

    def __init__(self, calls: Collection[int]) -> None:
        super().__init__()
        self._calls, self._count = calls, 0
        self._results: dict[int, tuple[int, Tensor, Any]] = {}
        self._unwrapped: dict[Any, UnwrappedResult] = {}

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a call, and note its number if the result is a wrapper."""
        result = func(*args, **kwargs or {})
        self._count += 1
        # a call that returns its argument, for example an in-place op, has made no wrapper
        is_argument = any(result is each for each in (*args, *(kwargs or {}).values()))
        with internals.disable_torch_function():
            if internals.is_wrapper(result) and result.grad_fn is not None and not is_argument:
                if self._count in self._calls:
                    tangent, parts = unwrap_result(result, "a result")
                    result = _wrap_with_grad(
                        spec_of(result, "a result", parts), GradientLayout("a result", tangent), parts
                    )
                    self._unwrapped[result.grad_fn] = tangent, parts
                self._results.setdefault(id(result), (self._count, result, result.grad_fn))
        return result

    def number_of_call(self, wrapper: Tensor) -> int:
        """Return the number of the torch call that made this wrapper, or 0 if its result cannot be wrapped again.

        The result is 0 if no call made the wrapper, if the wrapper is a view, if it was written after the call, or if
        this trace already wraps it again.
        """
        number, _, history = self._results.get(id(wrapper), (0, None, None))
        is_new = history is wrapper.grad_fn and internals.base_of(wrapper) is None
        return number if is_new and number not in self._calls else 0

    def unwrapped_result(self, wrapper: Tensor) -> UnwrappedResult | None:
        """Return the spec of the gradient, and the parts, of a wrapper that this mode wrapped again.

        The result is None for any other wrapper.
        """
        return self._unwrapped.get(wrapper.grad_fn)


def _wrap_with_grad(spec: SubclassSpec, layout: GradientLayout, parts: Sequence[Tensor]) -> Tensor:
    with torch.enable_grad():
        wrapper: Tensor = Wrap.apply(spec, layout, 0, False, *parts)  # type: ignore[no-untyped-call]  # untyped in torch
    return wrapper


def rewrap(spec: SubclassSpec, layout: GradientLayout, *parts: Tensor) -> Sequence[Tensor]:
    """Wrap the parts, unwrap the wrapper, and return the new parts, whose gradients flow through the wrapper.

    A compiled call runs this function. `take_wrapper` later gets the wrapper from the autograd node of the new parts.
    """
    wrapper = _wrap_with_grad(spec, layout, parts)
    new_parts: Sequence[Tensor] = Unwrap.apply(wrapper, layout)  # type: ignore[no-untyped-call]  # untyped in torch
    new_parts[0].grad_fn.wrapper = wrapper  # type: ignore[union-attr]
    return new_parts


def take_wrapper(part: Tensor) -> Tensor:
    """Return a wrapper that `rewrap` made. ``part`` is the first tensor that `rewrap` returned.

    The wrapper is removed from the autograd node of ``part``, which would otherwise keep it alive.
    """
    node: Any = part.grad_fn
    wrapper: Tensor = node.wrapper
    del node.wrapper
    return wrapper
