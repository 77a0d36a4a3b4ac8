"""The quirks: corners that are compiled by one file each; without them, they run eagerly.

The core does not import this room. A new quirk is a file here, its class in `ALL`, its name in `aotlab.config.quirks`,
and a row in `aotlab.trace.boundary.CLAIMABLE` for those who switch it off.
"""

from __future__ import annotations

from aotlab import config
from aotlab.quirks.draws import Draws
from aotlab.quirks.gradients import Gradients
from aotlab.quirks.higher_order import HigherOrder
from aotlab.quirks.hooks import Hooks
from aotlab.quirks.kernels import Kernels
from aotlab.quirks.lstm import Lstm
from aotlab.quirks.moves import Moves
from aotlab.quirks.warned import Warnings
from aotlab.quirks.windows import Windows
from aotlab.trace.quirk import Quirk

ALL: tuple[type[Quirk], ...] = (Hooks, Moves, Windows, Gradients, Warnings, Draws, Lstm, Kernels, HigherOrder)


def chosen() -> list[Quirk]:
    """Make the quirks of `aotlab.config.quirks` for one trace; raise ValueError at a name that no quirk has."""
    known = {quirk.name: quirk for quirk in ALL}
    for name in config.quirks:
        if name not in known:
            raise ValueError(f"aotlab.config.quirks names no quirk {name!r}; there are {', '.join(known)}")
    return [quirk() for name, quirk in known.items() if name in config.quirks]
