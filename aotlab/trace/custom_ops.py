"""Ops of the user's that write some of their arguments: a graph holds a functional form, which writes copies of those.

    fill(out, x)                                # is recorded as
    result, written = fill_functional(out, x)
    out.copy_(written)
Such a form is registered when an op is first met.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from aotlab._torch import OpOverload

_library = torch.library.Library("aotlab", "FRAGMENT")


@functools.cache
def written_by(op: Any) -> tuple[int, ...]:
    """Return which arguments an op of the user's writes; none of an op that has no functional form here."""
    if not isinstance(op, OpOverload) or op.namespace in ("aten", "prim", "prims", "aotlab"):
        return ()
    schema = op._schema
    plain = all(str(each.type) == "Tensor" and each.alias_info is None for each in schema.returns)
    written = tuple(n for n, each in enumerate(schema.arguments) if each.alias_info is not None)
    tensors = all(str(schema.arguments[n].type) == "Tensor" and not schema.arguments[n].kwarg_only for n in written)
    return written if plain and tensors else ()


@functools.cache
def functional_form(op: OpOverload) -> OpOverload:
    """Register the op that returns what ``op`` does, and then what it would have written."""
    written, count = written_by(op), len(op._schema.returns)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = [value.clone() if n in written else value for n, value in enumerate(args)]
        found = op(*values, **kwargs)
        results = (*(() if count == 0 else (found,) if count == 1 else found), *(values[n] for n in written))
        return results[0] if len(results) == 1 else results

    name = re.sub(r"\W", "_", str(op))
    inputs = re.sub(r"\(a\d*!\)", "", str(op._schema)).partition("(")[2].rpartition(" -> ")[0]
    _library.define(f"{name}({inputs} -> ({', '.join(['Tensor'] * (count + len(written)))})")
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"aotlab::{name}", kernel, lib=_library)
    return getattr(torch.ops.aotlab, name).default  # type: ignore[no-any-return]  # made at run time


def arguments_of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Put arguments in the order of the schema; those that can only be named stay so."""
    rest, positional = dict(kwargs), list(args)
    for each in op._schema.arguments[len(args) :]:
        if not each.kwarg_only:
            positional.append(rest.pop(each.name) if each.name in rest else each.default_value)
    return positional, rest
