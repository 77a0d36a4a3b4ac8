"""The databases of samples that ship in torch's own tests."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from aotlab._torch.replaced import replaced
from aotlab.errors import UsageError


@contextlib.contextmanager
def _database() -> Iterator[None]:
    """Load a database in the block, and undo what importing torch's test helpers changes; raises `UsageError`."""
    flags = torch.backends.disable_global_flags.__globals__  # they call it, which forbids assigning to such flags
    allowed = flags["__allow_nonbracketed_mutation_flag"]
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    random_state = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"torch's database of operators needs the package {error.name!r}, which is not installed: "
            "pip install 'aotlab[ops]'"
        ) from error
    finally:
        flags["__allow_nonbracketed_mutation_flag"] = allowed
        torch.set_rng_state(random_state)
        if cache is None:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


@functools.cache
def op_database() -> tuple[Any, ...]:
    """Return torch's OpInfo entries: each an operator with what it supports and samples of its arguments."""
    with _database():
        from torch.testing._internal.common_methods_invocations import op_db

        return tuple(op_db)


@functools.cache
def module_database() -> tuple[Any, ...]:
    """Return torch's ModuleInfo entries: each a module class with samples of how it is made and called."""
    with _database():
        from torch.testing._internal.common_modules import module_db

        return tuple(module_db)


def samples_do_not_seed() -> contextlib.AbstractContextManager[None]:
    """Let the database's random operators draw from the generator as it is; they would seed it at every call."""
    import torch.testing._internal.common_methods_invocations

    entries: Any = torch.testing._internal.common_methods_invocations

    return replaced(entries, "wrapper_set_seed", lambda function, *args, **kwargs: function(*args, **kwargs))
