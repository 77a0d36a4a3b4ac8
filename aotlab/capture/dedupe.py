"""Stage 2, dedupe: an argument that is passed twice becomes one input.

    def f(a, b):
        a.add_(1)
        return a * b
    f(x, x)

If ``a`` and ``b`` were two inputs of the graph, the graph would not know that the write to one is a
write to the other, and ``a is b`` would be False. So the second is dropped: the function runs with one
traced tensor in both places, and the entry guards which arguments were the same object.

The strategy ``"drop"`` leaves the duplicate out of the graph; ``"keep"`` gives it a placeholder that nothing uses, for
callers who rely on one for each flat argument (`aot_module_simplified`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aotlab.capture.call import Call

Strategy = Literal["drop", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DedupeRecord:
    """Which tensor arguments remain.

    ``kept`` are positions among the flat arguments; ``source`` gives, for every tensor argument in order, the
    position in ``kept`` that serves it; ``positions`` are those tensor arguments' positions; ``names`` are the names
    of the kept ones.
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
