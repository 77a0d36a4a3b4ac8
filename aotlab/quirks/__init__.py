"""The quirks: each rare case is compiled by one file. If a quirk is switched off, its case runs eagerly.

The core does not import this package. A new quirk is a file here, with its class in `ALL` and its name in
`aotlab.config.quirks`. It also needs a row in `aotlab.trace.boundary.CLAIMABLE`, so that its case runs eagerly for
users who switch the quirk off.
"""

from __future__ import annotations

from aotlab import config
from aotlab.quirks.gradients import Gradients
from aotlab.quirks.higher_order import HigherOrder
from aotlab.quirks.hooks import Hooks
from aotlab.quirks.kernels import Kernels
from aotlab.quirks.lstm import Lstm
from aotlab.quirks.metadata_changes import MetadataChanges
from aotlab.quirks.other_memory import OtherMemory
from aotlab.quirks.random_order import RandomOrder
from aotlab.quirks.repeated_warnings import RepeatedWarnings
from aotlab.quirks.storage_offsets import StorageOffsets
from aotlab.quirks.storage_sizes import StorageSizes
from aotlab.trace.quirk import Quirk

ALL: tuple[type[Quirk], ...] = (
    Hooks, MetadataChanges, StorageOffsets, Gradients, RepeatedWarnings, RandomOrder, Lstm, Kernels, HigherOrder,
    StorageSizes, OtherMemory,
)  # fmt: skip


def chosen() -> list[Quirk]:
    """Make the quirks of `aotlab.config.quirks` for one trace; raise ValueError if a name is unknown."""
    quirks = {quirk.name: quirk for quirk in ALL}
    for name in config.quirks:
        if name not in quirks:
            raise ValueError(
                f"aotlab.config.quirks contains {name!r}, which is not a quirk; there are {', '.join(quirks)}"
            )
    return [quirk() for name, quirk in quirks.items() if name in config.quirks]


def for_export() -> list[Quirk]:
    """Make the quirks for an export: without a run-time function, nothing allocates or frees the storages."""
    return [quirk for quirk in chosen() if not isinstance(quirk, StorageSizes)]
