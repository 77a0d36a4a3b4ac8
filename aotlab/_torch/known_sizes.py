"""What is known of sizes that vary without a question to torch; what ops give on them, from trace to trace."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aotlab._torch.symbols import Sizes, expression_of, is_symbolic, steps_of


class SymbolicMemo:
    """What is ``known`` of ops under some settings, for the trace of some ``sizes``.

    Another trace may use what an op gave where torch knew the same of the same symbols, and the op made no guard.
    """

    def __init__(self, known: dict[Any, Any], sizes: Sizes) -> None:
        self._known, self._env = known, sizes.env
        self._here: dict[Any, Any] = {}
        self._asked: Any = None

    def get(self, key: Any) -> Any:
        """Return what is known; None if nothing is."""
        if key not in self._here:
            self._asked = (key, self._state())
            self._here[key] = self._read(self._known.get(self._asked))
        return self._here[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        """Remember what was asked for."""
        self._here[key] = value
        if value is not None and self._asked == (key, self._state()):
            with suppress(_Stepwise):
                self._known[self._asked] = self._written(value)

    def _state(self) -> tuple[Any, ...]:
        """Return all that torch knows of the symbols."""
        env = self._env
        known = (env.backed_var_to_val, env.var_to_range, env.replacements)
        return (*[tuple(each.items()) for each in known], *env.divisible, *[guard.expr for guard in env.guards])

    def _written(self, value: Any) -> Any:
        """Write nested sizes as expressions, which mean the same to another trace."""
        if isinstance(value, (list, tuple)):
            return tuple(map(self._written, value))
        if is_symbolic(value) and steps_of(value.node):
            raise _Stepwise
        return expression_of(value)

    def _read(self, written: Any) -> Any:
        """Make nested sizes of this trace of such expressions."""
        if isinstance(written, tuple):
            return tuple(map(self._read, written))
        if not hasattr(written, "xreplace"):
            return written
        if ("made", written) not in self._env.known:
            hint: Any = int(written.xreplace(self._env.backed_var_to_val))
            self._env.known["made", written] = self._env.create_symintnode(written, hint=hint)
        return self._env.known["made", written]


class _Stepwise(Exception):  # noqa: N818  # a signal
    """A number was computed of floats, and an expression does not say in which order."""


def surely_contiguous(shape: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Tell whether strides are written as those of contiguous memory; symbols are not compared."""
    wanted: Any = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if expression_of(step) != expression_of(wanted):
            return False
        wanted *= size
    return True


def is_zero(value: Any) -> bool:
    """Tell whether a number is 0 whatever its symbols are, without a guard."""
    expression = expression_of(value)
    return bool((expression.expand() if hasattr(expression, "expand") else expression) == 0)
