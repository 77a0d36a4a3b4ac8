"""Guards of conditions: Python code branches on a tensor that is computed from the inputs.

    if (tokens == pad).any():      # a condition
        warn()

A trace can take only one of the two branches. If the condition is cheap to compute from the inputs, the trace takes the
branch of its own call. The entry guards the answer: its prologue computes the condition for each call. If the answer is
another one, the entry does not serve the call. So each combination of answers has its own entry.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.errors import UserLine


@dataclass(slots=True, kw_only=True, eq=False)
class Condition:
    """A condition that a function asked for, and the guard of its answer.

    - ``inputs`` are the indices of the kept inputs from which ``compute`` computes the answer. ``expected`` is the
      answer for the traced call.
    - ``line`` is the user's line with the condition, if it is known.
    - ``found`` is the answer for the last call that was asked. It is None if an op raised an error, or if an earlier
      guard of the entry failed.
    """

    inputs: tuple[int, ...]
    compute: Callable[..., bool]
    expected: bool
    line: UserLine | None
    found: bool | None = field(default=None, init=False)

    def fails(self, *tensors: Tensor) -> bool:
        """Compute the condition for the inputs of a call, and tell whether the entry must not serve the call.

        If an op raises an error, eager raises it at its place, after other effects. So the entry must not serve the
        call, and the error is not raised here.
        """
        self.found = None
        with torch.no_grad(), internals.disable_autocast(), suppress(Exception):
            self.found = self.compute(*tensors)
        return self.found is not self.expected

    @property
    def _place(self) -> str:
        if self.line is None:
            return "a condition"
        code = f"`{self.line.code}` at " if self.line.code else ""
        return f"the condition in {code}{self.line.file}:{self.line.line}"

    def sentence(self) -> str:
        """Describe the guard, for the report."""
        return f"{self._place} is {self.expected}"

    def change(self) -> str:
        """Describe the failure of the guard, as the reason for a new entry."""
        return f"{self._place} is {not self.expected} where the compiled entry expects {self.expected}"
