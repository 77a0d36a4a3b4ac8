"""Stage 2, deduplication: an argument that is passed twice becomes one input.

    def f(a, b):
        a.add_(1)
        return a * b
    f(x, x)

With two inputs, the graph would not know that a write to ``a`` is also a write to ``b``, and ``a is b`` would be False.
So the trace runs the function with one traced tensor for both parameters, and the entry guards which arguments are the
same object. With the strategy ``"drop"``, a duplicate has no placeholder in the graph. With ``"keep"`` it has one that
no op uses, for callers who need one placeholder per flat argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aotlab.capture.call import Call

Strategy = Literal["drop", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupeRecord:
    """The result of deduplication: the distinct tensor arguments.

    ``kept`` has their positions among the flat arguments, and ``names`` their names. ``positions`` has the positions of
    all tensor arguments; for each of these, ``source`` has the index in ``kept`` of the tensor that replaces it.
    """

    strategy: Strategy
    kept: tuple[int, ...]
    source: tuple[int, ...]
    positions: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def placeholders(self) -> tuple[int, ...]:
        """The positions of the flat arguments that have a placeholder in the graph."""
        return self.kept if self.strategy == "drop" else self.positions


def run(call: Call, strategy: Strategy) -> DedupeRecord:
    """Find the arguments that are the same tensor."""
    positions = call.tensor_positions
    kept = [i for i in positions if call.state.same_as[i] == i]
    index = {position: k for k, position in enumerate(kept)}
    return DedupeRecord(
        strategy=strategy,
        kept=tuple(kept),
        source=tuple(index[call.state.same_as[i]] for i in positions),
        positions=positions,
        names=tuple(call.state.names[i] for i in kept),
    )
