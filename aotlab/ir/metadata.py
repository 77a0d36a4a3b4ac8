"""What a traced function does to its inputs and how its outputs relate to them.

The names are those of upstream's ``torch._functorch._aot_autograd.schemas``; the records are our own, frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from aotlab.ir.specs import TensorSpec


class MutationType(Enum):
    """Where a mutated input gets its new value."""

    NOT_MUTATED = "not mutated"
    MUTATED_IN_GRAPH = "mutated in graph"
    MUTATED_OUT_GRAPH = "mutated out of graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputAliasInfo:
    """What the function did to one tensor input, the ``index``-th when duplicates were dropped.

    ``spec``, ``is_leaf`` and ``requires_grad`` are as at the call; ``metadata_steps`` the calls that changed its sizes
    or strides, as the epilogue repeats them. ``mutations_hidden_from_autograd``: every write went through ``detach()``
    or the like. ``keep_input_mutations``: the compiled graph itself writes. ``moves_version``: its version counter
    moved, as it does not for ``.data`` and kernels such as batch norm's.
    """

    index: int
    name: str
    spec: TensorSpec
    is_leaf: bool
    requires_grad: bool
    mutates_data: bool = False
    mutates_metadata: bool = False
    mutations_hidden_from_autograd: bool = False
    mutations_under_no_grad_or_inference_mode: bool = False
    keep_input_mutations: bool = False
    moves_version: bool = False
    requires_grad_after: bool = False
    metadata_steps: tuple[str, ...] = ()

    @property
    def is_written_non_leaf(self) -> bool:
        """Whether a non-leaf was written: if it is a view, autograd regenerates its `grad_fn` from its base."""
        return self.requires_grad and not self.is_leaf and self.moves_version

    @property
    def mutation_type(self) -> MutationType:
        """Decide where the new value is written: the one rule."""
        if not (self.mutates_data or self.mutates_metadata):
            return MutationType.NOT_MUTATED
        in_graph = self.keep_input_mutations and not self.mutates_metadata
        return MutationType.MUTATED_IN_GRAPH if in_graph else MutationType.MUTATED_OUT_GRAPH


class OutputType(Enum):
    """How an output relates to inputs and intermediates."""

    NON_ALIAS = "non-alias"
    ALIAS_OF_INPUT = "alias of input"
    IS_INPUT = "is input"
    ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT = "alias of intermediate, base saved as output"
    ALIAS_OF_INTERMEDIATE = "alias of intermediate, base already saved"
    ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT = "alias of intermediate, base is user output"
    UNSAFE_VIEW_ALIAS = "unsafe view"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewStep:
    """One view op on the way from a base to an output: ``target`` applied to the tensor before and ``args``.

    ``target`` is the op's full name (``"aten.transpose.int"``); ``args`` are its arguments after the tensor,
    ``kwargs`` its keywords as pairs; ``item`` picks one result of a multi-output view.
    """

    target: str
    args: tuple[object, ...] = ()
    kwargs: tuple[tuple[str, object], ...] = ()
    item: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputAliasInfo:
    """How one flat output is given back.

    ``spec`` is the output as eager would return it, None if it is no tensor; ``base_idx`` the input, intermediate base
    or user output that it aliases, as ``output_type`` says; ``views`` lead there; ``same_as`` is the index of an
    earlier output that is the same object. ``made_under_no_grad``: a view that autograd does not connect to its base.
    ``precedes_write``: a view of an input that was written later: the epilogue makes it before its writes.
    ``made_together`` is a number shared by views by one call, as of ``unbind``, which is one autograd node.
    """

    index: int
    name: str
    output_type: OutputType
    raw_type: str
    spec: TensorSpec | None
    base_idx: int | None = None
    requires_grad: bool = False
    views: tuple[ViewStep, ...] = ()
    same_as: int | None = None
    made_under_no_grad: bool = False
    precedes_write: bool = False
    made_together: int | None = None

    @property
    def aliases_intermediate(self) -> bool:
        """Whether the epilogue makes this output from an intermediate that the graph returns."""
        return self.output_type.name.startswith("ALIAS_OF_INTERMEDIATE")


class TangentSource(Enum):
    """What a tangent is the gradient of; a cut edge's is of a value between two segments of the backward."""

    MUTATED_INPUT = "mutated input"
    OUTPUT = "output"
    INTERMEDIATE_BASE = "intermediate base"
    CUT = "cut edge"


@dataclass(frozen=True, slots=True, kw_only=True)
class TangentInfo:
    """One tangent: what it is the gradient of (``source``, with its ``index`` there), and what it looks like."""

    source: TangentSource
    index: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewAndMutationMeta:
    """Everything that the run-time function must know of a traced function.

    The forward graph returns ``intermediate_bases`` for outputs; ``tangents`` are in the joint graph's order;
    ``grad_enabled_mutation`` is the grad mode left behind, None if left alone; ``static_input_indices`` keep addresses.
    ``keep_input_mutations``: the graph was to write inputs itself. ``tokens`` and ``backward_tokens`` are the ops with
    ordered effects: each may take the last one's token.
    """

    input_info: tuple[InputAliasInfo, ...]
    output_info: tuple[OutputAliasInfo, ...]
    intermediate_bases: tuple[TensorSpec, ...] = ()
    tangents: tuple[TangentInfo, ...] = ()
    keep_input_mutations: bool = False
    grad_enabled_mutation: bool | None = None
    static_input_indices: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    backward_tokens: tuple[str, ...] = ()
