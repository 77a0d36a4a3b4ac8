"""The saved values of a partition in words: what each is, and why it is kept."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from torch import fx

from aotlab.errors import UserLine
from aotlab.ir.graphs import line_of, output_args, placeholders
from aotlab.ir.specs import StorageNumbers, TensorSpec, spec_of
from aotlab.partition.joint import memory_of
from aotlab.trace.live import Trace

#: Why something is saved that the first derivative does not use.
FOR_DERIVATIVES = "autograd keeps it as well, for derivatives of higher order"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedValue:
    """A value that the forward keeps for the backward.

    ``is_input`` says that it is, or shares the memory of, an input of the function, so that keeping it takes no memory;
    ``is_output`` likewise for an output of the function; ``is_returned`` says that the forward graph returns it in any
    case, as an output or as the new value of a mutated input; ``spec.storage`` is equal for saved values that share
    memory; ``used_by`` names the backward's nodes that use it; ``reason`` says in words why it is kept.
    """

    name: str
    spec: TensorSpec
    nbytes: int
    reason: str
    line: UserLine | None
    is_input: bool
    is_output: bool
    is_returned: bool = False
    used_by: tuple[str, ...]


def describe_saved(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    count: int,
    trace: Trace,
    saved_names: Sequence[str],
    copies: Collection[int],
) -> tuple[SavedValue, ...]:
    """Describe the values that the forward returns behind ``count`` outputs; ``copies`` serve recomputation."""
    storages = StorageNumbers()
    memory = partial(memory_of, storages=storages)
    returned = output_args(forward.graph)
    mutated = [trace.metadata.input_info[write.index].name for write in trace.writes]
    of_inputs = {memory(node) for node in placeholders(forward.graph)}
    of_outputs = {memory(node) for node in returned[len(mutated) : count] if node is not None}
    pairs = zip(returned[: len(mutated)], mutated, strict=True)
    new_values = {memory(node): name for node, name in pairs if node is not None}
    names = {id(fake): i.name for fake, i in zip(trace.inputs.fakes, trace.metadata.input_info, strict=True)}
    records = []
    for n, (node, placeholder) in enumerate(zip(returned[count:], placeholders(backward.graph), strict=False)):
        assert node is not None
        cloned = "saved_value" in node.meta
        number = None if cloned else memory(node)
        is_input = not cloned and number in of_inputs
        new_value = None if cloned or is_input else new_values.get(number)
        is_output = not (cloned or is_input) and number in of_outputs
        if n in copies:
            copied = node.all_input_nodes[0]
            where = f"a copy of `{names.get(id(copied.meta['val']), copied.name)}`, which the caller may write"
        elif cloned:
            kept = names.get(id(node.meta["saved_value"]), node.meta["saved_name"])
            where = f"a clone of the input `{kept}`, which the call overwrites"
        elif is_input:
            name = names.get(id(node.meta["val"]), node.name)
            where = f"the input `{name}`" if node.op == "placeholder" else "a view of an input"
        elif new_value is not None:
            where = f"the new value of `{new_value}`, before it is copied there"
        else:
            where = "an output" if is_output else f"computed by `{node.name}`"
        spec = spec_of(node.meta["val"], None if cloned else storages)
        records.append(
            SavedValue(
                name=saved_names[n],
                spec=spec,
                nbytes=spec.nbytes if isinstance(spec.nbytes, int) else spec.nbytes.hint or 0,
                reason=f"{where}; {_why(node, placeholder, is_input=is_input)}",
                line=line_of(node),
                is_input=is_input,
                is_output=is_output,
                is_returned=is_output or new_value is not None,
                used_by=tuple(user.name for user in placeholder.users),
            )
        )
    return tuple(records)


def _why(node: fx.Node, placeholder: fx.Node, *, is_input: bool) -> str:
    """Say why a value is saved, by what the backward does with it."""
    because = node.meta.get("kept_because")
    if because == FOR_DERIVATIVES:
        return FOR_DERIVATIVES
    users = [f"`{user.name}`" for user in placeholder.users if user.op != "output"]
    uses = ", ".join(users[:3]) + (" and others" if len(users) > 3 else "")
    why = f"the backward needs it for {uses}" if uses else "it is a gradient itself"
    return why if because is None or is_input else f"{why}; {because}"
