"""Records of the mutations of a traced function's inputs, and of the aliases among its outputs.

The names come from upstream's ``torch._functorch._aot_autograd.schemas``. The records are our own, and frozen.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from aotlab.ir.specs import TensorSpec


class MutationType(Enum):
    """Where a mutated input gets its new value: in the compiled graph, or after the graph, in the epilogue."""

    NOT_MUTATED = "not mutated"
    MUTATED_IN_GRAPH = "mutated in graph"
    MUTATED_OUT_GRAPH = "mutated out of graph"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputAliasInfo:
    """The mutations of one tensor input, which is number ``index`` after deduplication.

    ``spec``, ``is_leaf`` and ``requires_grad`` describe the input at the start of the call. ``mutates_data`` is true if
    the function changed its values, ``mutates_metadata`` if it changed its sizes or strides, and ``mutates_storage`` if
    it gave the input other memory (then ``mutates_metadata`` is true as well). ``metadata_steps`` are the calls that
    changed its sizes or strides; the epilogue repeats these calls. ``mutations_hidden_from_autograd`` is true if each
    write went through ``detach()`` or ``.data``, so that autograd did not see it, and
    ``mutations_under_no_grad_or_inference_mode`` if each write happened in one of these modes. If
    ``keep_input_mutations`` is true, the compiled graph itself writes the input. ``moves_version`` is true if the
    function changed the input's version counter. Writes through ``.data`` do not change the counter, nor do kernels
    like the one of batch norm. ``requires_grad_after`` says whether the input required grad when the function returned.
    ``made_to_require_grad`` says that the function called ``requires_grad_()`` on an input that required none.
    """

    index: int
    name: str
    spec: TensorSpec
    is_leaf: bool
    requires_grad: bool
    mutates_data: bool = False
    mutates_metadata: bool = False
    mutates_storage: bool = False
    mutations_hidden_from_autograd: bool = False
    mutations_under_no_grad_or_inference_mode: bool = False
    keep_input_mutations: bool = False
    moves_version: bool = False
    requires_grad_after: bool = False
    made_to_require_grad: bool = False
    metadata_steps: tuple[str, ...] = ()

    @property
    def is_written_non_leaf(self) -> bool:
        """Whether the input is a non-leaf that requires grad and was written.

        If such an input is a view, the write also changes the history of its base, and autograd regenerates the
        ``grad_fn`` of the view from the ``grad_fn`` of the base. So the prologue checks whether the input is a view.
        """
        return self.requires_grad and not self.is_leaf and self.moves_version

    @property
    def mutation_type(self) -> MutationType:
        """Where the new value is written.

        ``keep_input_mutations`` alone does not decide this. Since a graph cannot change the metadata of an input, the
        epilogue writes an input whose metadata changes.
        """
        if not (self.mutates_data or self.mutates_metadata):
            return MutationType.NOT_MUTATED
        in_graph = self.keep_input_mutations and not self.mutates_metadata
        return MutationType.MUTATED_IN_GRAPH if in_graph else MutationType.MUTATED_OUT_GRAPH


class OutputType(Enum):
    """Whether an output is an alias of an input or of an intermediate. The names are upstream's."""

    NON_ALIAS = "non-alias"
    ALIAS_OF_INPUT = "alias of input"
    IS_INPUT = "is input"
    ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT = "alias of intermediate, base saved as output"
    ALIAS_OF_INTERMEDIATE = "alias of intermediate, base already saved"
    ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT = "alias of intermediate, base is user output"
    UNSAFE_VIEW_ALIAS = "unsafe view"


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewStep:
    """One view op of the chain of view ops that makes an output from its base.

    The first op is called with the base, and each further op with the result of the previous one. ``target`` is the
    op's full name (``"aten.transpose.int"``). ``args`` are its arguments after the tensor, and ``kwargs`` its keyword
    arguments as pairs. If the op returns several views, ``item`` is the index of the one that is used.
    """

    target: str
    args: tuple[object, ...] = ()
    kwargs: tuple[tuple[str, object], ...] = ()
    item: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputAliasInfo:
    """How the run-time function returns one flat output.

    ``spec`` describes the output as eager returns it; it is None if the output is not a tensor. ``raw_type`` is the
    name of the output's type. ``base_idx`` is the number of the input, intermediate base or user output of which the
    output is an alias; ``output_type`` says which of the three. ``views`` are the view ops that make the output from
    this base. ``same_as`` is the index of an earlier output that is the same object. ``made_under_no_grad`` marks a
    view that autograd does not connect to its base. ``precedes_write`` marks a view of an input that was written after
    the view was made, so the epilogue makes this view before it writes the input. ``made_together`` identifies the
    call that made the view. Several views have the same number if one call, for example of ``unbind``, made them,
    because they then share one autograd node. ``is_new_leaf`` marks a leaf that the function made with
    ``requires_grad_()``. ``made_in_function`` marks a view that a custom Function made of an intermediate that does not
    require grad.
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
    is_new_leaf: bool = False
    made_in_function: bool = False

    @property
    def aliases_intermediate(self) -> bool:
        """Whether the epilogue makes this output as a view of an intermediate that the graph returns."""
        return self.output_type.name.startswith("ALIAS_OF_INTERMEDIATE")


class TangentSource(Enum):
    """The kind of value whose gradient a tangent is.

    A `CUT` tangent flows along a cut edge. It is the gradient of a value that one segment computes and another uses. A
    `SIZE` is a number that depends on the values of tensors. It has no tangent.
    """

    MUTATED_INPUT = "mutated input"
    OUTPUT = "output"
    INTERMEDIATE_BASE = "intermediate base"
    CUT = "cut edge"
    SIZE = "size"


@dataclass(frozen=True, slots=True, kw_only=True)
class TangentInfo:
    """One tangent: the gradient of value number ``index`` among the values of the kind ``source``.

    ``spec`` describes the tangent itself.
    """

    source: TangentSource
    index: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewAndMutationMeta:
    """The facts about a traced function from which the run-time function is generated.

    The forward graph returns ``intermediate_bases`` because outputs are views of them. ``tangents`` are in the order of
    the joint graph. ``grad_enabled_mutation`` is the grad mode that the function leaves behind, or None if it does not
    change the mode. ``static_input_indices`` are the inputs that keep their addresses between calls (parameters and
    buffers). ``keep_input_mutations`` says whether the graph itself may write inputs. ``tokens`` and
    ``backward_tokens`` are the names of the ops with side effects in the forward and in the backward, in the order of
    their calls. In a graph, each of these ops can take a token that the previous op returns, so that a compiler cannot
    change their order (see `aotlab.trace.effects`).
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
