"""A trace with its live values, from which later a backward for any pattern of tangents is derived."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import FakeTensorMode
from aotlab.capture.synthetic_bases import Base
from aotlab.ir.metadata import ViewAndMutationMeta
from aotlab.trace.differentiate import differentiate
from aotlab.trace.edges import Edge, next_edges
from aotlab.trace.escapes import EscapeGuard
from aotlab.trace.hooks import HookKind
from aotlab.trace.inputs import value_of
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import Pattern, Source, Write, is_full
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.surroundings import tracing
from aotlab.trace.tape import Tape
from aotlab.trace.views import view_parent
from aotlab.trace.warned import Warned


@dataclass(kw_only=True, eq=False)
class Trace:
    """A trace with its live values: the tape, the wrappers' autograd graph, and what became of the inputs.

    Attributes
    ----------
    input_fakes
        The fake tensor of each kept input.
    placeholders
        (name, fake) for each graph input, and ``placeholder_sources``: the flat argument that it is, or the synthetic
        base.
    forward_outputs
        The fake tensors that the forward graph returns; ``writes`` says where the first of them go. ``counted`` are the
        kept inputs whose version moves besides.
    roots
        The positions among the forward outputs of those that can be differentiated.
    root_wrappers
        What is differentiated for each of them. In torch 2.11 the node of a custom function lives no longer than what
        it made.
    segments
        The parts of the autograd graph, `aotlab.trace.segments`.
    entry_tangents
        For each segment, the numbers of the tangents that come into it.
    tangents
        The fake tangents, one per root, then one per carrier.
    slots
        For each segment, where its gradients leave it: for a segment that is the only one, an exit or None for each
        graph input, then those of inputs that are not inputs of the graph.
    connected
        For each slot, whether a gradient can reach it: those have to go through autograd.
    sources
        What stands at run time for each edge.
    full
        What `derive` found for each segment with all its tangents.
    made_through
        For outputs that are views of other outputs that are views, which one.
    visible_outputs
        How many of the outputs the user gets; the others are views that gradients pass.
    hooks
        The hooks that the function registered: the kind, what stands for the tensor, and the hook.
    sets_saved_hooks
        Whether the function sets ``saved_tensors_hooks``.
    differentiates
        Whether it calls ``torch.autograd.grad``.
    holder
        What puts the traced parameters and buffers in their place again, where a checkpoint runs its function for a
        backward.
    offsets_read
        The kept inputs whose offset in their storage the function looked at.
    final_offsets
        For each kept input, its offset when the function returned.
    warned
        What the function warned of.
    arrived
        The edges of leaves in the order in which autograd came to them, if the graph is one segment.
    bits
        The numbers of the autograd nodes that hold tensors.
    state_masks
        For each entry of each segment, a bit mask of the autograd nodes that it reaches and that hold tensors.
    watch
        The inputs and outputs that such nodes keep or read by themselves, with a mask of these nodes.
    saved_values
        The saved values as the trace has them, None for a clone; a compiler may put others into the graphs.
    fragile
        The inputs of which views were made that must not be used once their version has moved.
    viewed_unseen
        The inputs of which views were made without autograd.
    viewed_late
        The inputs of which views were used after a write.
    laid_out
        The fake tangents with other strides than those in ``tangents``, and their wrappers.
    drawn
        The indices of the operations that draw from a generator, or set one, when a backward that was last derived is
        run; ``drawn_of_full`` has them for each segment with all its tangents.
    """

    tape: Tape
    recorder: Recorder
    fake_mode: FakeTensorMode
    call_name: str
    input_fakes: list[Tensor]
    placeholders: list[tuple[str, Tensor]]
    placeholder_sources: list[int | Base]
    forward_outputs: list[Tensor]
    writes: list[Write]
    counted: list[int]
    write_back: list[tuple[Tensor, Tensor]]
    roots: list[int]
    root_wrappers: list[Tensor]
    segments: list[Segment]
    entry_tangents: list[list[int]]
    tangents: list[Tensor]
    tangent_wrappers: list[Tensor]
    slots: list[list[Exit | None]]
    connected: list[list[bool]]
    sources: dict[Edge, Source]
    full: dict[int, list[Tensor | None]]
    bits: dict[Any, int]
    state_masks: list[list[int]]
    watch: dict[Source, int]
    fragile: frozenset[int]
    viewed_unseen: frozenset[int]
    viewed_late: frozenset[int]
    arrived: list[Edge] = field(default_factory=list)
    out_spec: Any
    out_constants: dict[int, Any]
    offsets_read: tuple[int, ...]
    returned_outputs: list[int]
    made_through: dict[int, int]
    final_offsets: list[int]
    warned: tuple[Warned, ...]
    visible_outputs: int
    hooks: list[tuple[HookKind, Source, Callable[..., Any] | None]]
    sets_saved_hooks: bool
    differentiates: bool
    holder: Callable[[], AbstractContextManager[None]]
    metadata: ViewAndMutationMeta
    saved_values: tuple[Tensor | None, ...] = ()
    laid_out: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = field(default_factory=dict)
    drawn: tuple[int, ...] = ()
    drawn_of_full: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def backward_draws(self) -> bool:
        """Whether a backward draws random numbers: then what is run matters, and in which order."""
        return any(self.drawn_of_full.values())

    @property
    def training(self) -> bool:
        """Whether anything can be differentiated."""
        return bool(self.roots)

    @property
    def is_whole(self) -> bool:
        """Whether the autograd graph of the call is one node."""
        return len(self.segments) == 1 and self.segments[0].nodes is None

    @property
    def overwritten(self) -> list[Tensor]:
        """The fakes of the inputs that the epilogue writes."""
        return [self.input_fakes[write.index] for write in self.writes]

    @property
    def bases(self) -> list[Tensor]:
        """The fakes of the synthetic bases among the graph's inputs."""
        return [s.fake for s in self.placeholder_sources if isinstance(s, Base) and s.fake is not None]

    @property
    def overwritten_bases(self) -> list[Tensor]:
        """Those of them whose memory the epilogue writes."""
        written = {write.index for write in self.writes}
        bases = [s for s in self.placeholder_sources if isinstance(s, Base) and not written.isdisjoint(s.members)]
        return [base.fake for base in bases if base.fake is not None]

    @property
    def written_views(self) -> dict[Edge, Source]:
        """The results that are views and that nodes of writes to them may keep with their histories, by their edges."""
        return {
            edge: source
            for edge, source in self.sources.items()
            if source.kind == "output" and any(internals.is_copy_slices(node) for node, _ in next_edges(edge[0]))
        }

    def value_of(self, source: Source) -> Tensor | None:
        """Return the value of an input as it is left, or of an output that the graph returns; None for another."""
        if source.kind == "input":
            written = [n for n, write in enumerate(self.writes) if write.index == source.index]
            return self.forward_outputs[written[0]] if written else self.input_fakes[source.index]
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

    def gets_gradient(self, k: int) -> bool:
        """Tell whether a gradient can reach the kept input ``k``."""
        return any(
            connected and way is not None and self.sources[way[0]] == Source("input", k)
            for own, flags in zip(self.slots, self.connected, strict=True)
            for way, connected in zip(own, flags, strict=True)
        )

    def through(self, segment: int) -> list[int]:
        """Return the slots that go through autograd, in the order in which they do.

        If all are leaves it is one that lets autograd come to them in eager's order, which their hooks see.
        """
        slots = [i for i, connected in enumerate(self.connected[segment]) if connected]
        places = {way[0]: i for i in slots if (way := self.slots[segment][i]) is not None}
        wanted = [places[edge] for edge in self.arrived if edge in places]
        if not self.is_whole or sorted(wanted) != slots:
            return slots
        placed = dict(zip(internals.turns(len(slots)), wanted, strict=True))
        return [placed[place] for place in range(len(slots))]

    def is_view(self, position: int) -> bool:
        """Tell whether a forward output is made by a view op."""
        return view_parent(self.tape, self.forward_outputs[position]) is not None

    def gradient_labels(self, segment: int) -> list[str]:
        """Name the gradients of a segment's backward."""
        labels = []
        for way in self.slots[segment]:
            source = None if way is None else self.sources.get(way[0])
            known = source is not None and source.kind == "input"
            name = f" of `{self.metadata.input_info[source.index].name}`" if source is not None and known else ""
            labels.append(f"the gradient{name}")
        return labels

    def given(self, segment: int, pattern: Pattern) -> list[tuple[Tensor, Tensor] | None]:
        """Return the fake tensors, and their wrappers, for the tangents of a pattern; None for those not defined."""
        found: list[tuple[Tensor, Tensor] | None] = []
        for n, way in zip(self.entry_tangents[segment], pattern, strict=True):
            if isinstance(way, tuple):
                if (n, way) not in self.laid_out:
                    usual = self.tangents[n]
                    with self.fake_mode:
                        fake = torch.empty_strided(usual.shape, way, dtype=usual.dtype, device=usual.device)
                    self.laid_out[n, way] = self.tape.enter(fake), internals.to_functional(fake)
                found.append(self.laid_out[n, way])
            else:
                found.append((self.tangents[n], self.tangent_wrappers[n]) if way else None)
        return found

    def derive(
        self,
        segment: int,
        pattern: Pattern,
        *,
        autocast: bool = False,
        again: bool = False,
        asked: Collection[int] | None = None,
    ) -> list[Tensor | None]:
        """Run a segment's backward for the tangents of a pattern; None for a slot that they do not reach.

        Of ``asked``, if it is given, there are the slots whose gradients matter.

        With ``autocast`` it is run under the autocast that is on now, which then casts what the backward computes. With
        ``again`` it is run also where the result is known.

        Raises
        ------
        RefusedError
            The backward uses something that a graph cannot hold.
        Exception
            Whatever the backward of the traced program raises.
        """
        part, slots = self.segments[segment], self.slots[segment]
        ways = None if asked is None else [way for i in asked if (way := slots[i]) is not None]
        full = is_full(pattern)
        if full and segment in self.full and not autocast and not again and ways is None:
            self.drawn = self.drawn_of_full[segment]
            return self.full[segment]
        given = [None if found is None else found[1] for found in self.given(segment, pattern)]
        with self.recording_backward(autocast=autocast), torch.no_grad():
            arrived: list[Edge] | None = [] if full and not self.arrived else None
            found = differentiate(part, given, arrived, ways)
            values = {way: value_of(gradient, "a gradient") for way, gradient in found.items()}
        if arrived:
            self.arrived += arrived
        if full and not autocast and ways is None:
            # those that the first gradients, which stay, are made of
            self.drawn_of_full.setdefault(segment, self.drawn)
        return [None if way is None else values.get(way) for way in slots]

    @contextmanager
    def recording_backward(self, *, autocast: bool) -> Iterator[None]:
        """Record what autograd computes in a ``with`` block; what draws random numbers in it is in ``drawn`` then."""
        first = len(self.tape.operations)
        self.recorder.phase = "backward"
        self.recorder.states.begin()
        try:
            casting = nullcontext() if autocast else internals.disable_autocast()
            with self.holder(), tracing(self.recorder), EscapeGuard(), casting:
                yield
                self.recorder.states.end()
        finally:
            self.recorder.phase = "forward"
            if autocast:
                torch.clear_autocast_cache()  # it would keep the traced tensors, for others to find
        self.drawn = tuple(o.index for o in self.tape.operations[first:] if o.is_random and o.is_impure)
