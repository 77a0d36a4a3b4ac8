"""The signature of an exported graph. Classes and fields have the same names as in upstream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import fx

from aotlab._torch import pytree
from aotlab.errors import UsageError
from aotlab.ir.fx_graphs import output_args, placeholders


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardSignature:
    """The backward part of a joint graph's signature.

    ``gradients_to_parameters`` and ``gradients_to_user_inputs`` map the names of outputs that are gradients to the
    parameters and inputs that they belong to. ``loss_output`` is the name of the output that is the loss.
    """

    gradients_to_parameters: dict[str, str]
    gradients_to_user_inputs: dict[str, str]
    loss_output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSignature:
    """The inputs and outputs of an exported graph.

    The graph takes ``(*parameters, *buffers, *user inputs)`` and returns ``(*new values of mutated inputs, *user
    outputs, *gradients)``. Inputs and outputs are identified by the names of their nodes, parameters and buffers by
    their names in the module. An output that is not a tensor has no name (None). The fields ``…_to_mutate`` map the
    name of each output that is a new value to the buffer, parameter or input that gets this value. ``in_spec`` and
    ``out_spec`` are the pytree structures (`torch.utils._pytree`) of ``((*parameters, *buffers, *args), {})`` and of
    the result. ``input_tokens`` and ``output_tokens`` exist only because upstream has them, and are always empty.
    """

    parameters: list[str]
    buffers: list[str]
    user_inputs: list[str]
    user_outputs: list[str | None]
    inputs_to_parameters: dict[str, str]
    inputs_to_buffers: dict[str, str]
    buffers_to_mutate: dict[str, str]
    parameters_to_mutate: dict[str, str]
    user_inputs_to_mutate: dict[str, str]
    in_spec: Any
    out_spec: Any
    backward_signature: BackwardSignature | None = None
    input_tokens: list[str] = field(default_factory=list)
    output_tokens: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """Return the signature as JSON.

        Raises `UsageError` if a pytree has containers other than tuples, lists and dicts.
        """
        fields = {name: getattr(self, name) for name in self.__slots__}
        for name in ("in_spec", "out_spec"):
            fields[name] = _to_json_form(pytree.tree_unflatten([_LEAF] * fields[name].num_leaves, fields[name]))
        backward = self.backward_signature
        return json.dumps({**fields, "backward_signature": None if backward is None else asdict(backward)})

    @classmethod
    def from_json(cls, text: str) -> GraphSignature:
        """Return the signature from a text that `to_json` wrote. This runs no code from the text."""
        fields = json.loads(text)
        for name in ("in_spec", "out_spec"):
            fields[name] = pytree.tree_structure(_from_json_form(fields[name]))
        backward = fields.pop("backward_signature")
        return cls(**fields, backward_signature=None if backward is None else BackwardSignature(**backward))


_LEAF = object()


def _to_json_form(value: Any) -> Any:
    """Return the JSON form of a pytree whose leaves are all `_LEAF`.

    A container becomes a list of the name of its type and its items. A leaf becomes null.
    """
    if value is _LEAF:
        return None
    if type(value) in (tuple, list):
        return [type(value).__name__, *map(_to_json_form, value)]
    if type(value) is not dict or not all(type(key) in (str, int, float, bool, type(None)) for key in value):
        raise UsageError(f"a `{type(value).__qualname__}` cannot be written as JSON; use only tuples, lists and dicts")
    return ["dict", *([key, _to_json_form(child)] for key, child in value.items())]


def _from_json_form(form: Any) -> Any:
    if form is None:
        return _LEAF
    kind, *children = form
    if kind == "dict":
        return {key: _from_json_form(child) for key, child in children}
    children_read: Iterator[Any] = map(_from_json_form, children)
    return {"tuple": tuple, "list": list}[kind](children_read)


def signature_of(
    module: fx.GraphModule, parameters: list[str], buffers: list[str], *, output_count: int, writes: Sequence[int],
    gradients: Sequence[int], loss: int | None, in_spec: Any, out_spec: Any,
) -> GraphSignature:  # fmt: skip
    """Return the signature of an exported graph.

    ``parameters`` and ``buffers`` are their names in the module. ``writes`` are the positions of the inputs whose new
    values the graph returns. ``gradients`` are the positions of the inputs whose gradients it returns. ``output_count``
    is the number of user outputs, and ``loss`` the position of the loss among them (None without gradients).
    """
    inputs = [node.name for node in placeholders(module.graph)]
    outputs = [getattr(node, "name", None) for node in output_args(module.graph)]
    buffer_start, input_start = len(parameters), len(parameters) + len(buffers)
    names = [*parameters, *buffers, *inputs[input_start:]]
    user_outputs = outputs[len(writes) : len(writes) + output_count]

    def named(output_names: Sequence[str | None], positions: Sequence[int], start: int, stop: int) -> dict[str, str]:
        return {str(output): names[n] for output, n in zip(output_names, positions, strict=True) if start <= n < stop}

    new_values, backward = outputs[: len(writes)], None
    if loss is not None:
        gradient_names = outputs[len(writes) + output_count :]
        backward = BackwardSignature(
            gradients_to_parameters=named(gradient_names, gradients, 0, input_start),
            gradients_to_user_inputs=named(gradient_names, gradients, input_start, len(names)),
            loss_output=str(user_outputs[loss]),
        )
    return GraphSignature(
        parameters=parameters,
        buffers=buffers,
        user_inputs=inputs[input_start:],
        user_outputs=user_outputs,
        inputs_to_parameters=dict(zip(inputs[:buffer_start], parameters, strict=True)),
        inputs_to_buffers=dict(zip(inputs[buffer_start:input_start], buffers, strict=True)),
        buffers_to_mutate=named(new_values, writes, buffer_start, input_start),
        parameters_to_mutate=named(new_values, writes, 0, buffer_start),
        user_inputs_to_mutate=named(new_values, writes, input_start, len(names)),
        in_spec=in_spec,
        out_spec=out_spec,
        backward_signature=backward,
    )
