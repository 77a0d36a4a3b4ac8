"""The checks that ``config.debug_assert`` puts behind the compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from aotlab import _torch as internals
from aotlab.errors import GraphInvariantError
from aotlab.ir.metadata import OutputAliasInfo
from aotlab.ir.specs import TensorSpec


def output_checker(output: OutputAliasInfo) -> Callable[[Tensor], None]:
    """Make the check that a compiled output is what was traced."""
    spec = output.spec
    assert spec is not None

    def check(value: Tensor) -> None:
        seen = (tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad)
        expected = (spec.shape, spec.stride, spec.dtype, output.requires_grad)
        if seen != expected and not (seen[0] == expected[0] and seen[2:] == expected[2:] and _same_steps(value, spec)):
            raise GraphInvariantError(
                f"`{output.name}` came back with (shape, strides, dtype, requires_grad) {seen}; traced as {expected}"
            )

    return check


def _same_steps(value: Tensor, spec: TensorSpec) -> bool:
    """Compare strides, but for those that lead to no other element: many a kernel chooses them other than its fake."""
    pairs = zip(value.shape, value.stride(), spec.stride, strict=True)
    return not value.numel() or all(seen == expected for size, seen, expected in pairs if size > 1)


def fresh_checker(names: Sequence[str]) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
    """Make the check that outputs which were traced as fresh share memory neither with inputs nor with each other."""

    def check(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        taken = {internals.storage_key(tensor): "an input" for tensor in inputs}
        for name, output in zip(names, outputs, strict=True):
            key = internals.storage_key(output)
            if key in taken:
                raise GraphInvariantError(
                    f"`{name}` shares memory with {taken[key]}; it was traced as a tensor of its own"
                )
            taken[key] = f"`{name}`"

    return check
