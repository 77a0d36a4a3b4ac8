"""What the inputs and outputs of an exported graph are; the names are those of upstream's records, the code is ours."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import fx

from aotlab._torch import pytree
from aotlab.errors import UsageError
from aotlab.ir.graphs import output_args, placeholders


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardSignature:
    """Of a joint graph: which output is the gradient of which parameter or input, and which one is the loss."""

    gradients_to_parameters: dict[str, str]
    gradients_to_user_inputs: dict[str, str]
    loss_output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSignature:
    """What goes into an exported graph, ``(*parameters, *buffers, *user inputs)``, and what comes out.

    It returns ``(*new values of what is mutated, *user outputs, *gradients)``. Inputs and outputs go by the names of
    their nodes, parameters and buffers by those in the module; an output that is no tensor has none. ``in_spec`` and
    ``out_spec`` are the nesting, as `torch.utils._pytree` has it, of ``((*parameters, *buffers, *args), {})`` and of
    the result.
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
        """Write it down; raises `UsageError` if the nesting has other containers than tuples, lists and dicts."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        for name in ("in_spec", "out_spec"):
            fields[name] = _written(pytree.tree_unflatten([_LEAF] * fields[name].num_leaves, fields[name]))
        backward = self.backward_signature
        return json.dumps({**fields, "backward_signature": None if backward is None else asdict(backward)})

    @classmethod
    def from_json(cls, text: str) -> GraphSignature:
        """Read what `to_json` wrote; no code is run by it."""
        fields = json.loads(text)
        for name in ("in_spec", "out_spec"):
            fields[name] = pytree.tree_structure(_read(fields[name]))
        backward = fields.pop("backward_signature")
        return cls(**fields, backward_signature=None if backward is None else BackwardSignature(**backward))


_LEAF = object()


def _written(value: Any) -> Any:
    """Write a nest as lists: the name of the container and what is in it, null for a leaf."""
    if value is _LEAF:
        return None
    if type(value) in (tuple, list):
        return [type(value).__name__, *map(_written, value)]
    if type(value) is not dict or not all(type(key) in (str, int, float, bool, type(None)) for key in value):
        raise UsageError(f"a `{type(value).__qualname__}` cannot be written as JSON; nest tuples, lists and dicts")
    return ["dict", *([key, _written(child)] for key, child in value.items())]


def _read(form: Any) -> Any:
    if form is None:
        return _LEAF
    kind, *children = form
    if kind == "dict":
        return {key: _read(child) for key, child in children}
    made: Iterator[Any] = map(_read, children)
    return {"tuple": tuple, "list": list}[kind](made)


def signature_of(
    module: fx.GraphModule, parameters: list[str], buffers: list[str], *, output_count: int, writes: Sequence[int],
    gradients: Sequence[int], loss: int | None, in_spec: Any, out_spec: Any,
) -> GraphSignature:  # fmt: skip
    """Name what goes into a graph and comes out; ``writes`` and ``gradients`` are the inputs with such outputs."""
    inputs = [node.name for node in placeholders(module.graph)]
    outputs = [getattr(node, "name", None) for node in output_args(module.graph)]
    first, last = len(parameters), len(parameters) + len(buffers)
    names = [*parameters, *buffers, *inputs[last:]]
    user_outputs = outputs[len(writes) : len(writes) + output_count]

    def named(some: Sequence[str | None], of: Sequence[int], start: int, stop: int) -> dict[str, str]:
        return {str(out): names[n] for out, n in zip(some, of, strict=True) if start <= n < stop}

    new, backward = outputs[: len(writes)], None
    if loss is not None:
        found = outputs[len(writes) + output_count :]
        backward = BackwardSignature(
            gradients_to_parameters=named(found, gradients, 0, last),
            gradients_to_user_inputs=named(found, gradients, last, len(names)),
            loss_output=str(user_outputs[loss]),
        )
    return GraphSignature(
        parameters=parameters,
        buffers=buffers,
        user_inputs=inputs[last:],
        user_outputs=user_outputs,
        inputs_to_parameters=dict(zip(inputs[:first], parameters, strict=True)),
        inputs_to_buffers=dict(zip(inputs[first:last], buffers, strict=True)),
        buffers_to_mutate=named(new, writes, first, last),
        parameters_to_mutate=named(new, writes, 0, first),
        user_inputs_to_mutate=named(new, writes, last, len(names)),
        in_spec=in_spec,
        out_spec=out_spec,
        backward_signature=backward,
    )
