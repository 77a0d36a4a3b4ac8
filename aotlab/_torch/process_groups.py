"""The processes of a `torch.distributed` job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def store_of_job() -> tuple[Store, float] | None:
    """Return the store that the processes of the default group share, and the group's timeout in seconds.

    The result is None if there is no group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store, store.timeout.total_seconds()
