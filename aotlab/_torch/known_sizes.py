"""Questions about symbolic sizes that add no guard, and a cache of fake results that traces share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from aotlab._torch.symbolic_sizes import Sizes, expression_of, is_symbolic, steps_of, unbacked_in


class SymbolicMemo:
    """The cache of fake results of ops with symbolic sizes, for one trace. The recorder looks results up in it.

    ``shared`` is a cache that all traces share. There, sizes are stored as expressions, because a symbolic size belongs
    to one trace. A trace may use a shared result only if its shape environment knows the same facts about the same
    symbols as the environment of the trace that stored it, and only if the op added no guard.
    """

    def __init__(self, shared: dict[Any, Any], sizes: Sizes) -> None:
        self._shared, self._env = shared, sizes.env
        self._of_this_trace: dict[Any, Any] = {}
        self._last_lookup: Any = None

    def get(self, key: Any) -> Any:
        """Return the stored value of ``key``, with sizes of this trace, or None if there is no value."""
        if key not in self._of_this_trace:
            self._last_lookup = (key, self._state())
            self._of_this_trace[key] = self._to_sizes(self._shared.get(self._last_lookup))
        return self._of_this_trace[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Store the value of ``key``.

        Other traces get the value only if ``key`` was looked up last, and no guard was added since.
        """
        self._of_this_trace[key] = value
        if value is not None and self._last_lookup == (key, self._state()):
            with suppress(_Stepwise):
                self._shared[self._last_lookup] = self._to_expressions(value)

    def _state(self) -> tuple[Any, ...]:
        """Return everything that the shape environment knows about the symbols, as a part of a shared key."""
        env = self._env
        tables = (env.backed_var_to_val, env.var_to_range, env.replacements)
        return (*[tuple(each.items()) for each in tables], *env.divisible, *[guard.expr for guard in env.guards])

    def _to_expressions(self, value: Any) -> Any:
        """Return nested sizes as expressions, which are valid in any trace."""
        if isinstance(value, (list, tuple)):
            return tuple(map(self._to_expressions, value))
        if is_symbolic(value) and steps_of(value.node):
            raise _Stepwise
        return expression_of(value)

    def _to_sizes(self, expression: Any) -> Any:
        """Convert nested expressions into sizes of this trace."""
        if isinstance(expression, tuple):
            return tuple(map(self._to_sizes, expression))
        if not hasattr(expression, "xreplace"):
            return expression
        if ("made", expression) not in self._env.known:
            hint: Any = int(expression.xreplace(self._env.backed_var_to_val))
            self._env.known["made", expression] = self._env.create_symintnode(expression, hint=hint)
        return self._env.known["made", expression]


class _Stepwise(Exception):  # noqa: N818  # a signal
    """Raised for a number that was computed from floats, because its expression may reorder the operations.

    Another trace could not compute the number from the expression with the same rounding.
    """


def surely_contiguous(shape: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Tell whether a tensor of this shape and these strides is contiguous for all values of the symbols in them.

    Only expressions are compared, so no guard is added.
    """
    expected: Any = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if expression_of(step) != expression_of(expected):
            return False
        expected *= torch.sym_max(size, 1) if unbacked_in(size) else size  # so torch computes the strides
    return True


def is_zero(value: Any) -> bool:
    """Tell whether a number is 0 for all values of its symbols, without adding a guard."""
    expression = expression_of(value)
    return bool((expression.expand() if hasattr(expression, "expand") else expression) == 0)
