"""The databases of samples that torch includes for its own tests."""

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
    """Undo, at the end of a block that imports torch's test helpers, the side effects of this import.

    Raise `UsageError` if a package that the helpers need is missing.
    """
    # The helpers call `disable_global_flags`, which forbids assignments to flags such as `torch.backends.cudnn.enabled`
    # in the whole process.
    flags = torch.backends.disable_global_flags.__globals__
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
    """Return the OpInfo entries of torch's tests. Each entry describes an operator and generates arguments for it."""
    with _database():
        from torch.testing._internal.common_methods_invocations import op_db

        return tuple(op_db)


@functools.cache
def module_database() -> tuple[Any, ...]:
    """Return the ModuleInfo entries of torch's tests.

    Each entry describes a module class, and generates arguments for its constructor and for its call.
    """
    with _database():
        from torch.testing._internal.common_modules import module_db

        return tuple(module_db)


def samples_do_not_seed() -> contextlib.AbstractContextManager[None]:
    """For the length of a block, let torch's database call random operators without seeding torch's generator first."""
    import torch.testing._internal.common_methods_invocations

    entries: Any = torch.testing._internal.common_methods_invocations

    return replaced(entries, "wrapper_set_seed", lambda function, *args, **kwargs: function(*args, **kwargs))
