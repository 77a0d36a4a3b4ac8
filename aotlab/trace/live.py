"""A trace with its live values: the tape, the wrappers' autograd graph, and what became of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import FakeTensorMode
from aotlab.capture.synthetic_bases import Base
from aotlab.ir.metadata import ViewAndMutationMeta
from aotlab.trace.deriver import Deriver, Tangents
from aotlab.trace.edges import Edge, next_edges
from aotlab.trace.inputs import value_of
from aotlab.trace.quirk import Quirk
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import SizeOf, Source, Write
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.tape import Tape
from aotlab.trace.views import view_parent


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInputs:
    """What the graph takes."""

    #: The fake tensor of each kept input.
    fakes: Sequence[Tensor]
    #: The name and fake tensor of each graph input; and the flat argument that it is, or the synthetic base.
    placeholders: Sequence[tuple[str, Any]]
    sources: Sequence[int | Base | SizeOf]
    #: The kept inputs whose offset in their storage the function looked at.
    offsets_read: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutputs:
    """What the function returned.

    ``spec`` is its nesting, ``constants`` are the outputs that are no tensors. ``made_through`` says for
    outputs that are views of other outputs that are views, of which one.
    """

    spec: Any
    constants: Mapping[int, Any]
    made_through: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SideEffects:
    """What the function did besides computing its outputs."""

    #: The input and the new value of what the graph itself writes.
    write_back: Sequence[tuple[Tensor, Tensor]]
    #: The hooks that it registered: what stands for the tensor, and the hook.
    hooks: Sequence[tuple[Source, Callable[..., Any]]]
    #: The quirks of the trace, which may write lines of the run-time function.
    quirks: Sequence[Quirk]
    #: The inputs with views that become invalid when the input is written.
    fragile: frozenset[int]
    #: The inputs of which views were made or used without autograd.
    viewed_unseen: frozenset[int]
    #: The inputs that it asked what they are to autograd.
    looked_at: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingNodes:
    """The autograd nodes that hold tensors, each with the number of its bit.

    ``masks`` has for each entry of each segment the bits of the nodes that it reaches; ``watch`` has the inputs and
    outputs that such nodes keep, or read by themselves, each with the bits of these nodes; ``once``, for each selective
    checkpoint, those of the nodes of which one backward uses up its cache.
    """

    bits: Mapping[Any, int]
    masks: Sequence[Sequence[int]]
    watch: Mapping[Source, int]
    once: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """What one run of the function showed, from which backwards are derived later."""

    call_name: str
    recorder: Recorder
    metadata: ViewAndMutationMeta
    inputs: GraphInputs
    outputs: ProgramOutputs
    side_effects: SideEffects
    #: What the forward graph returns: first the new values of ``writes``, then those of the outputs
    #: ``returned_outputs``, then the intermediate bases.
    forward_outputs: Sequence[Tensor]
    returned_outputs: Sequence[int]
    writes: Sequence[Write]
    #: The positions among the forward outputs of those that can be differentiated, and what is differentiated for them,
    #: which is held because torch 2.11 drops the node of a custom function with its result.
    roots: Sequence[int]
    root_wrappers: Sequence[Tensor]
    #: The parts of the autograd graph, `aotlab.trace.segments`.
    segments: Sequence[Segment]
    #: For each segment, its exits, in the order in which its backward returns gradients. An only segment has one for
    #: each graph input (None: no gradient goes there), then those of inputs whose synthetic base is the graph input.
    slots: Sequence[Sequence[Exit | None]]
    #: Whether a gradient can come to each of them.
    connected: Sequence[Sequence[bool]]
    #: What stands at run time for each edge.
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
        """The mode of all its fake tensors."""
        return self.recorder.fake_mode

    @property
    def training(self) -> bool:
        """Whether anything can be differentiated."""
        return bool(self.roots)

    @property
    def is_whole(self) -> bool:
        """Whether the autograd graph of the call is one node."""
        return len(self.segments) == 1 and self.segments[0].nodes is None

    @property
    def symbols(self) -> list[tuple[str, Any]]:
        """The graph inputs that are sizes, which every graph takes: behind the inputs, or the saved values."""
        return [each for each in self.inputs.placeholders if not isinstance(each[1], Tensor)]

    @property
    def size_names(self) -> list[str]:
        """The names of these sizes, by which expressions of them are written."""
        return [source.name for source in self.inputs.sources if isinstance(source, SizeOf)]

    @property
    def bases(self) -> list[Tensor]:
        """The fakes of the synthetic bases among the graph's inputs."""
        return [s.fake for s in self.inputs.sources if isinstance(s, Base) and s.fake is not None]

    @property
    def overwritten(self) -> list[Tensor]:
        """The fakes of the inputs that the epilogue writes, and of the synthetic bases whose memory it writes."""
        written = [write.index for write in self.writes]
        bases = [s for s in self.inputs.sources if isinstance(s, Base) and not set(written).isdisjoint(s.members)]
        return [*(self.inputs.fakes[k] for k in written), *(base.fake for base in bases if base.fake is not None)]

    @property
    def written_views(self) -> set[Edge]:
        """The edges of results that are views and that nodes of writes to them may keep with their histories."""
        return {
            edge
            for edge, source in self.sources.items()
            if source.kind == "output" and any(internals.is_copy_slices(node) for node, _ in next_edges(edge[0]))
        }

    def value_of(self, source: Source) -> Tensor | None:
        """Return the value of an input as it is left, or of an output that the graph returns; None for another."""
        if source.kind == "input":
            indices, others = [write.index for write in self.writes], self.inputs.fakes[source.index]
            return self.forward_outputs[indices.index(source.index)] if source.index in indices else others
        if source.index not in self.returned_outputs:
            return None
        return self.forward_outputs[len(self.writes) + self.returned_outputs.index(source.index)]

    def kept_by(self, nodes: Iterable[Any], *, of_torch: bool = False) -> list[Tensor]:
        """Return the values that autograd nodes keep, as far as the tape knows them; what is constant is left out.

        With ``of_torch``, so are checkpoints and custom Functions, which look at what they keep when they like.
        """
        found: dict[int, Tensor] = {}
        for node in nodes:
            is_custom = internals.is_custom_function_node(node)
            by_itself = [] if of_torch else internals.kept_by_checkpoint(node)
            attributes = vars(node).values() if is_custom else ()
            for kept in () if of_torch and is_custom else (*internals.saved_tensors_of(node), *by_itself, *attributes):
                if isinstance(kept, Tensor) and internals.is_functional(kept):
                    value = value_of(kept, "a kept value")
                    if self.tape.knows(value) and self.tape.constant(value) is None:
                        found[id(value)] = value
        return list(found.values())

    def through(self, segment: int) -> list[int]:
        """Return the slots that go through autograd, in the order in which they do.

        If all are leaves, autograd comes to them in eager's order, which their hooks can tell.
        """
        slots = [i for i, connected in enumerate(self.connected[segment]) if connected]
        places = {way[0]: i for i in slots if (way := self.slots[segment][i]) is not None}
        wanted = [places[edge] for edge in self.deriver.arrived if edge in places]
        if not self.is_whole or sorted(wanted) != slots:
            return slots
        placed = dict(zip(internals.turns(len(slots)), wanted, strict=True))
        return [placed[place] for place in range(len(slots))]

    def is_view(self, position: int) -> bool:
        """Tell whether a forward output is made by a view op."""
        return view_parent(self.tape, self.forward_outputs[position]) is not None

    def gradient_labels(self, segment: int) -> list[str]:
        """Name the gradients of a segment's backward."""
        sources = [None if way is None else self.sources.get(way[0]) for way in self.slots[segment]]
        named = [s is not None and s.kind == "input" and self.metadata.input_info[s.index].name for s in sources]
        return [f"the gradient of `{name}`" if name else "the gradient" for name in named]
