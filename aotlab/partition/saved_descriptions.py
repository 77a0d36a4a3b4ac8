"""Describe the saved values of a partition in words: their origin, and the reason why they are saved."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

from torch import fx

from aotlab.errors import UserLine
from aotlab.ir.fx_graphs import line_of, module_of, output_args, placeholders
from aotlab.ir.specs import StorageNumbers, TensorSpec, spec_of
from aotlab.partition.joint_analysis import memory_of
from aotlab.trace.live_trace import Trace

#: The reason for saving a value that the first-order backward does not use.
FOR_DERIVATIVES = "autograd saves it as well, for derivatives of higher order"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedValue:
    """A value that the forward saves for the backward.

    ``is_input`` says that it is an input of the function or shares memory with one, so that saving it takes no memory.
    ``is_output`` says the same for an output. ``is_returned`` says that the forward graph returns it in any case, as an
    output or as the new value of a mutated input. ``spec.storage`` is equal for saved values that share memory.
    ``used_by`` names the nodes of the backward that use it. ``reason`` says in words why it is saved. ``module`` is the
    path of the module that computed it.
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
    module: str = ""


def describe_saved(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    count: int,
    trace: Trace,
    saved_names: Sequence[str],
    copies: Collection[int],
) -> tuple[SavedValue, ...]:
    """Describe the saved values, which the forward returns after its first ``count`` outputs.

    ``saved_names`` are their names. ``copies`` are the positions of the saved values that are copies, made so that the
    backward can compute other values again from them.
    """
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
            origin = f"a copy of `{names.get(id(copied.meta['val']), copied.name)}`, which the caller may write"
        elif cloned:
            input_name = names.get(id(node.meta["saved_value"]), node.meta["saved_name"])
            origin = f"a clone of the input `{input_name}`, which the call overwrites"
        elif is_input:
            name = names.get(id(node.meta["val"]), node.name)
            origin = f"the input `{name}`" if node.op == "placeholder" else "a view of an input"
        elif new_value is not None:
            origin = f"the new value of `{new_value}`, before it is copied there"
        else:
            origin = "an output" if is_output else f"computed by `{node.name}`"
        spec = spec_of(node.meta["val"], None if cloned else storages)
        records.append(
            SavedValue(
                name=saved_names[n],
                spec=spec,
                nbytes=spec.nbytes if isinstance(spec.nbytes, int) else spec.nbytes.hint or 0,
                reason=f"{origin}; {_why(node, placeholder, is_input=is_input)}",
                line=line_of(node),
                is_input=is_input,
                is_output=is_output,
                is_returned=is_output or new_value is not None,
                used_by=tuple(user.name for user in placeholder.users),
                module=module_of(node),
            )
        )
    return tuple(records)


def _why(node: fx.Node, placeholder: fx.Node, *, is_input: bool) -> str:
    """Return, as text, why a value is saved: the nodes of the backward that use it, and the partitioner's reason.

    ``node`` is the value in the forward graph, and ``placeholder`` is its placeholder in the backward graph.
    """
    because = node.meta.get("kept_because")
    if because == FOR_DERIVATIVES:
        return FOR_DERIVATIVES
    users = [f"`{user.name}`" for user in placeholder.users if user.op != "output"]
    uses = ", ".join(users[:3]) + (" and others" if len(users) > 3 else "")
    why = f"the backward needs it for {uses}" if uses else "it is a gradient itself"
    return why if because is None or is_input else f"{why}; {because}"
