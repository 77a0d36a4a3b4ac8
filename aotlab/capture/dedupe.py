"""Stage 2, dedupe: an argument that is passed twice becomes one input.

    def f(a, b):
        a.add_(1)
        return a * b
    f(x, x)

With two inputs the graph would not know that the write to ``a`` is one to ``b``, and ``a is b`` would be False. So the
function runs with one traced tensor in both places, and the entry guards which arguments were the same object. The
strategy ``"keep"`` gives a duplicate an unused placeholder, for callers who rely on one for each flat argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aotlab.capture.call import Call

Strategy = Literal["drop", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupeRecord:
    """Which tensor arguments remain.

    ``kept`` and ``names`` are the positions among the flat arguments and the names of those; ``positions`` the
    positions of all tensor arguments, and ``source`` says for each which place in ``kept`` serves it.
    """

    strategy: Strategy
    kept: tuple[int, ...]
    source: tuple[int, ...]
    positions: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Positions among the flat arguments that the graph has placeholders for."""
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
