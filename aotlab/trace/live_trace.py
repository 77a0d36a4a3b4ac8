"""A trace with its live objects: the tape, the traced tensors with their autograd graph, and facts about the inputs.

(`aotlab.trace.records.TraceRecord` is the frozen record of the same trace, without tensors.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import FakeTensorMode
from aotlab.capture.synthetic_bases import Base
from aotlab.guards.conditions import Condition
from aotlab.ir.metadata import ViewAndMutationMeta
from aotlab.trace.autograd_edges import Edge, next_edges
from aotlab.trace.deriver import Deriver, Tangents
from aotlab.trace.inputs import value_of
from aotlab.trace.quirk import Quirk
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import SizeOf, Source, Write
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.tape import Tape
from aotlab.trace.view_ops import view_parent


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInputs:
    """The inputs of the graph."""

    #: The fake tensor of each kept input (each input after deduplication).
    fakes: Sequence[Tensor]
    #: The name of each graph input, and its fake tensor or symbolic size. ``sources`` has the origin of its run-time
    #: value: the position of a flat argument, a synthetic base, or a size of an argument.
    placeholders: Sequence[tuple[str, Any]]
    sources: Sequence[int | Base | SizeOf]
    #: The indices of the kept inputs whose storage offset the function read.
    offsets_read: Sequence[int]
    #: The conditions on the inputs that Python asked for.
    conditions: Sequence[Condition]
    #: The kept inputs that are views of another kept input, each with the index of this base.
    view_of: Mapping[int, int] = field(default_factory=dict)
    #: The bases of views that replace these views among the graph's inputs, each followed by its views.
    families: Sequence[tuple[int, ...]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutputs:
    """The outputs of the user's function.

    ``spec`` is their pytree structure. ``constants`` has, by index, the outputs that are not tensors. If the epilogue
    makes output ``i`` as a view of output ``j``, and output ``j`` is itself a view, then ``parent_outputs[i]`` is
    ``j``.
    """

    spec: Any
    constants: Mapping[int, Any]
    parent_outputs: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideEffects:
    """The side effects of the function: everything except the computation of its outputs."""

    #: For each input that the graph itself writes: the input, and its new value.
    write_back: Sequence[tuple[Tensor, Tensor]]
    #: The hooks that the function registered: the run-time value on which the hook is registered, and the hook.
    hooks: Sequence[tuple[Source, Callable[..., Any]]]
    #: The quirks of the trace, which may add lines to the run-time function.
    quirks: Sequence[Quirk]
    #: The indices of the inputs with views that must not be used after the input is written.
    fragile_views: frozenset[int]
    #: The indices of the inputs whose views were made, or used, while grad mode was off.
    viewed_under_no_grad: frozenset[int]
    #: The indices of the inputs whose autograd state (`is_leaf` or `grad_fn`, for example) the function read.
    autograd_state_read: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingNodes:
    """The autograd nodes that save tensors for the backward.

    - ``bits`` maps each node to the index of its bit in the masks.
    - ``masks`` has for each entry of each segment the mask of the nodes that gradients reach from it.
    - ``watch`` has the inputs and outputs that the backward of a node reads. The mask of such a tensor has the nodes
      that save it, or that read it in their backward without saving it. If the caller writes the tensor after the call,
      a backward through these nodes must raise, as in eager.
    - ``once`` has for each selective checkpoint the mask of its nodes. One backward through such a node empties the
      checkpoint's cache, so a second one must raise.
    """

    bits: Mapping[Any, int]
    masks: Sequence[Sequence[int]]
    watch: Mapping[Source, int]
    once: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """The result of one run of the function, with live tensors and autograd nodes.

    A compiled entry holds the trace, because more backwards may be derived from it later: backwards for other defined
    tangents, for other strides, or of higher order.
    """

    call_name: str
    recorder: Recorder
    metadata: ViewAndMutationMeta
    inputs: GraphInputs
    outputs: ProgramOutputs
    side_effects: SideEffects
    #: The fake tensors of the forward graph's outputs: first the new values for ``writes`` (the epilogue's
    #: write-backs), then the user's outputs with the indices ``returned_outputs``, then the intermediate bases, then
    #: the symbolic numbers `bound_sizes`.
    forward_outputs: Sequence[Any]
    returned_outputs: Sequence[int]
    writes: Sequence[Write]
    #: The positions in ``forward_outputs`` of the roots, and the traced tensors from which their gradients are
    #: computed. These tensors are kept alive because torch 2.11 frees the node of a custom Function together with its
    #: result.
    roots: Sequence[int]
    traced_roots: Sequence[Tensor]
    #: The segments of the autograd graph (see `aotlab.trace.segments`).
    segments: Sequence[Segment]
    #: For each segment, the exits of its slots. If there is only one segment, it has one slot for each graph input
    #: (None if no gradient flows there). Then come the slots of inputs that a synthetic base replaces in the graph.
    slots: Sequence[Sequence[Exit | None]]
    #: For each slot, whether a gradient can reach it.
    connected: Sequence[Sequence[bool]]
    #: The run-time value that replaces each edge that the caller can reach, and each cut edge.
    sources: Mapping[Edge, Source]
    tangents: Tangents
    saving: SavingNodes
    deriver: Deriver

    @property
    def tape(self) -> Tape:
        """The ops that were recorded."""
        return self.recorder.tape

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The fake tensor mode of the trace."""
        return self.recorder.fake_mode

    @property
    def training(self) -> bool:
        """Whether an output or a mutated input can be differentiated. If not, there is no backward."""
        return bool(self.roots)

    @property
    def is_whole(self) -> bool:
        """Whether the call is a single node in the caller's autograd graph."""
        return len(self.segments) == 1 and self.segments[0].nodes is None

    @property
    def symbols(self) -> list[tuple[str, Any]]:
        """The symbolic sizes that a backward graph takes after the saved values, as pairs (name, symbol).

        The forward graph takes some of them as inputs, after its tensor inputs, and returns the others (`bound_sizes`).
        """
        sizes = [each for each in self.inputs.placeholders if not isinstance(each[1], Tensor)]
        return [*sizes, *self.bound_sizes.values()]

    @property
    def bound_sizes(self) -> dict[int, tuple[str, Any]]:
        """The sizes that depend on values, as pairs (name, symbol), by their positions in ``forward_outputs``."""
        outputs = enumerate(self.forward_outputs)
        return {i: (str(size.node._expr), size) for i, size in outputs if not isinstance(size, Tensor)}

    @property
    def size_names(self) -> list[str]:
        """The names of the symbolic sizes. The code of the generated function uses them."""
        inputs = [source.name for source in self.inputs.sources if isinstance(source, SizeOf)]
        return [*inputs, *(name for name, _ in self.bound_sizes.values())]

    @property
    def bases(self) -> list[Tensor]:
        """The fake tensors of the synthetic bases among the graph's inputs."""
        return [s.fake for s in self.inputs.sources if isinstance(s, Base) and s.fake is not None]

    @property
    def overwritten(self) -> list[Tensor]:
        """The fake tensors of the inputs that the epilogue writes, and of the synthetic bases of such inputs."""
        written = [write.index for write in self.writes]
        bases = [s for s in self.inputs.sources if isinstance(s, Base) and not set(written).isdisjoint(s.members)]
        return [*(self.inputs.fakes[k] for k in written), *(base.fake for base in bases if base.fake is not None)]

    @property
    def written_views(self) -> set[Edge]:
        """The edges of outputs that are views, and into whose memory the function wrote.

        The autograd node of such a write may save the view together with the view's autograd history. A second-order
        backward may then reach this history.
        """
        return {
            edge
            for edge, source in self.sources.items()
            if source.kind == "output" and any(internals.is_copy_slices(node) for node, _ in next_edges(edge[0]))
        }

    def value_of(self, source: Source) -> Tensor | None:
        """Return the fake tensor of an input or an output that replaces an autograd edge at run time.

        For an input, this is its value at the end of the function. For an output, it is the value that the graph
        returns. The result is None if the graph does not return the output, for example because it is a view that the
        epilogue makes.
        """
        if source.kind == "input":
            indices, fake = [write.index for write in self.writes], self.inputs.fakes[source.index]
            return self.forward_outputs[indices.index(source.index)] if source.index in indices else fake
        if source.index not in self.returned_outputs:
            return None
        output: Tensor = self.forward_outputs[len(self.writes) + self.returned_outputs.index(source.index)]
        return output

    def values_kept_by(self, nodes: Iterable[Any], *, of_torch: bool = False) -> list[Tensor]:
        """Return the values on the tape that the autograd ``nodes`` hold for their backward, without constants.

        With ``of_torch``, only the values that torch's own nodes save are returned. Checkpoints and custom Functions
        are left out, because they may read the values that they hold at any time.
        """
        values: dict[int, Tensor] = {}
        for node in nodes:
            is_custom = internals.is_custom_function_node(node)
            by_itself = [] if of_torch else internals.kept_by_checkpoint(node)
            attributes = vars(node).values() if is_custom else ()
            for saved in () if of_torch and is_custom else (*internals.saved_tensors_of(node), *by_itself, *attributes):
                if isinstance(saved, Tensor) and internals.is_functional(saved):
                    value = value_of(saved, "a kept value")
                    if self.tape.knows(value) and self.tape.constant(value) is None:
                        values[id(value)] = value
        return list(values.values())

    def gradient_slots(self, segment: int) -> list[int]:
        """Return the connected slots of a segment, in the order in which its autograd node returns their gradients.

        If all these slots lead to leaves, the order is chosen so that autograd accumulates the gradients of the leaves
        in eager's order. Hooks on the leaves can observe this order.
        """
        slots = [i for i, connected in enumerate(self.connected[segment]) if connected]
        slot_of = {exit_[0]: i for i in slots if (exit_ := self.slots[segment][i]) is not None}
        in_leaf_order = [slot_of[edge] for edge in self.deriver.leaf_order if edge in slot_of]
        if not self.is_whole or sorted(in_leaf_order) != slots:
            return slots
        slot_at = dict(zip(internals.turns(len(slots)), in_leaf_order, strict=True))
        return [slot_at[turn] for turn in range(len(slots))]

    def is_view(self, position: int) -> bool:
        """Tell whether a view op made the output at ``position`` of ``forward_outputs``."""
        value = self.forward_outputs[position]
        return isinstance(value, Tensor) and view_parent(self.tape, value) is not None

    def gradient_labels(self, segment: int) -> list[str]:
        """Return for each slot of a segment a text that names its gradient in messages."""
        sources = [None if exit_ is None else self.sources.get(exit_[0]) for exit_ in self.slots[segment]]
        named = [s is not None and s.kind == "input" and self.metadata.input_info[s.index].name for s in sources]
        return [f"the gradient of `{name}`" if name else "the gradient" for name in named]
