"""Functional forms of the user's custom ops that write to some of their arguments.

    fill(out, x)                                # is recorded as
    result, written = fill_functional(out, x)
    out.copy_(written)

The functional form runs the op on copies of the written arguments, and returns the results and the copies. It is
registered when a trace first calls the op.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

from aotlab._torch import OpOverload

_library = torch.library.Library("aotlab", "FRAGMENT")


@functools.cache
def written_arguments(op: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that a custom op writes.

    The result is empty for torch's own ops, and for an op for which this module cannot make a functional form.
    """
    if not isinstance(op, OpOverload) or op.namespace in ("aten", "prim", "prims", "aotlab"):
        return ()
    schema = op._schema
    plain = all(str(each.type) == "Tensor" and each.alias_info is None for each in schema.returns)
    written = tuple(n for n, each in enumerate(schema.arguments) if each.alias_info is not None)
    tensors = all(str(schema.arguments[n].type) == "Tensor" and not schema.arguments[n].kwarg_only for n in written)
    return written if plain and tensors else ()


@functools.cache
def functional_form(op: OpOverload) -> OpOverload:
    """Register and return an op that returns the results of ``op``, then the new values of the written arguments."""
    written, count = written_arguments(op), len(op._schema.returns)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        values = [value.clone() if n in written else value for n, value in enumerate(args)]
        returned = op(*values, **kwargs)
        results = (*(() if count == 0 else (returned,) if count == 1 else returned), *(values[n] for n in written))
        return results[0] if len(results) == 1 else results

    name = re.sub(r"\W", "_", str(op))
    inputs = re.sub(r"\(a\d*!\)", "", str(op._schema)).partition("(")[2].rpartition(" -> ")[0]
    _library.define(f"{name}({inputs} -> ({', '.join(['Tensor'] * (count + len(written)))})")
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"aotlab::{name}", kernel, lib=_library)
    return getattr(torch.ops.aotlab, name).default  # type: ignore[no-any-return]  # made at run time


def arguments_of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional arguments in the order of the schema, and the keyword-only arguments by name.

    A positional argument that is missing from the call gets its default value.
    """
    keyword_args, positional = dict(kwargs), list(args)
    for each in op._schema.arguments[len(args) :]:
        if not each.kwarg_only:
            positional.append(keyword_args.pop(each.name) if each.name in keyword_args else each.default_value)
    return positional, keyword_args
