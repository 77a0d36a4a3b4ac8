"""The tensors of tensor parallelism (``torch.distributed.tensor.DTensor``), of which each process has a part."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aotlab._torch.modes import disable_torch_function, no_dispatch_modes
from aotlab._torch.replaced import replaced
from aotlab._torch.symbolic_sizes import is_symbolic
from aotlab._torch.wrapper_subclasses import functionalization_left_out


def is_mesh(value: object) -> bool:
    """Tell whether a value is a `DeviceMesh`, which never changes. Dynamo passes it to a graph as an input."""
    mesh = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", ())
    return isinstance(value, mesh)


@contextmanager
def shapes_computed_apart() -> Iterator[None]:
    """Keep `DTensor`'s own computation of the shape of a result out of the trace, for the length of a block.

    `DTensor` calls an op with fake tensors to learn the global shape of its result. These calls are not part of the
    program. If sizes are symbolic, the calls need the fake mode of the trace, and are traced. Nothing uses their
    results.
    """
    planner = getattr(sys.modules.get("torch.distributed.tensor._sharding_prop"), "ShardingPropagator", None)
    if planner is None:
        yield
        return
    original = planner._propagate_tensor_meta_non_cached

    def apart(self: Any, schema: Any) -> Any:
        if any(is_symbolic(size) for spec in schema.args_spec for size in spec.tensor_meta.shape):
            return original(self, schema)
        with no_dispatch_modes(), functionalization_left_out(), disable_torch_function():
            return original(self, schema)

    with replaced(planner, "_propagate_tensor_meta_non_cached", apart):
        yield
