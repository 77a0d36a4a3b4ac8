"""The processes of a `torch.distributed` job."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _autograd as autograd
from torch._C import _profiler as profiler

from aotlab.errors import UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

#: Match the profiler's name of a collective: gloo's span from the call to the result, or NCCL's kernel on the GPU. A
#: kernel runs until the data of all ranks has arrived.
_COLLECTIVE = re.compile(r"gloo:(\w+)|nccl(?:Dev)?Kernel_([A-Za-z]+)")


def store_of_job() -> tuple[Store, float] | None:
    """Return the store that the processes of the default group share, and the group's timeout in seconds.

    The result is None if there is no group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store, store.timeout.total_seconds()


@contextmanager
def timed_collectives(spans: list[tuple[str, int, int]]) -> Iterator[None]:
    """Append each collective of the block to ``spans``: its name, begin and end in ns. The profiler measures them.

    `torch.profiler` would record each op, which takes 9 KB of memory per op. Torch marks the spans of collectives with
    the scope of user code, so this profiler records only this scope, and on a GPU the kernels.

    Raises
    ------
    UsageError
        The profiler is on already.
    """
    if autograd._profiler_enabled():
        raise UsageError("the waiting times of collectives need torch's profiler, and it is on already")
    settings = profiler.ProfilerConfig(
        profiler.ProfilerState.KINETO, False, False, False, False, False, profiler._ExperimentalConfig()
    )
    activities = torch.profiler.supported_activities()
    enable: Any = autograd._enable_profiler  # torch's stub lacks the scopes
    autograd._prepare_profiler(settings, activities)
    enable(settings, activities, {profiler.RecordScope.USER_SCOPE})
    try:
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the kernels of the last collectives may still run
    finally:
        if autograd._profiler_enabled():
            for event in autograd._disable_profiler().events():
                if found := _COLLECTIVE.match(event.name()):
                    name = found[1] or re.sub("(?<=[a-z])(?=[A-Z])", "_", found[2]).lower()
                    spans.append((name, event.start_ns(), event.end_ns()))
        else:
            warnings.warn("there are no waiting times: the code used torch's profiler itself", stacklevel=2)
