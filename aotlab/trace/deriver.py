"""Deriving backwards from a trace, for any of its tangents; what was derived is remembered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.trace.differentiate import differentiate
from aotlab.trace.edges import Edge
from aotlab.trace.escapes import guard_of_backward
from aotlab.trace.inputs import value_of
from aotlab.trace.recorder import Recorder
from aotlab.trace.records import Pattern, is_full
from aotlab.trace.segments import Exit, Segment
from aotlab.trace.surroundings import tracing
from aotlab.trace.write_calls import may_overlap_itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Tangents:
    """The fake tangents, one for each root, then one for each carrier.

    ``wrappers`` stand for them under autograd; ``of_entries`` has for each segment the numbers of those that come in.
    """

    fakes: Sequence[Tensor]
    wrappers: Sequence[Tensor]
    of_entries: Sequence[Sequence[int]]


def tangent_like(recorder: Recorder, value: Tensor) -> Tensor:
    """Make what stands for the gradient of ``value``: it has memory for each of its elements."""
    with recorder.fake_mode:
        # also where that is expanded or unfolded
        shared = may_overlap_itself(value.shape, value.stride())
        strides = torch.empty(value.shape, device="meta").stride() if shared else value.stride()
        fake = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return recorder.tape.enter(fake)


class Deriver:
    """Runs the backwards of a trace under its recorder, and remembers what came of it.

    Parameters
    ----------
    recorder, segments, slots, tangents
        The trace's.
    holder
        Puts the traced parameters in their place again, where a checkpoint runs its function for a backward.

    Attributes
    ----------
    full
        The gradients for each segment with all its tangents.
    arrived
        The edges of leaves in the order in which autograd came to them, if the graph is one segment.
    drawn
        The operations that draw random numbers, or set a generator, in the backward that was derived last.
    """

    def __init__(
        self,
        recorder: Recorder,
        segments: Sequence[Segment],
        slots: Sequence[Sequence[Exit | None]],
        tangents: Tangents,
        holder: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.recorder = recorder
        self.segments = segments
        self.slots = slots
        self.tangents = tangents
        self.holder = holder
        self.full: dict[int, list[Tensor | None]] = {}
        self.arrived: list[Edge] = []
        self.drawn: tuple[int, ...] = ()
        self._drawn_in_full: dict[int, tuple[int, ...]] = {}
        self._restrided: dict[tuple[int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}

    @property
    def draws(self) -> list[tuple[int, ...]]:
        """The operations that draw in each segment's backward for all tangents, of those segments that draw."""
        return [drawn for drawn in self._drawn_in_full.values() if drawn]

    def given(self, segment: int, pattern: Pattern) -> list[tuple[Tensor, Tensor] | None]:
        """Return the fake tensors, and their wrappers, for the tangents of a pattern; None for those not defined."""
        return [
            self._restride(n, way) if isinstance(way, tuple) else self._usual(n) if way else None
            for n, way in zip(self.tangents.of_entries[segment], pattern, strict=True)
        ]

    def _usual(self, n: int) -> tuple[Tensor, Tensor]:
        return self.tangents.fakes[n], self.tangents.wrappers[n]

    def _restride(self, n: int, strides: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if (n, strides) not in self._restrided:
            usual = self.tangents.fakes[n]
            with self.recorder.fake_mode:
                fake = torch.empty_strided(usual.shape, strides, dtype=usual.dtype, device=usual.device)
            self._restrided[n, strides] = self.recorder.tape.enter(fake), internals.to_functional(fake)
        return self._restrided[n, strides]

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
        full = is_full(pattern) and not autocast and ways is None
        if full and segment in self.full and not again:
            self.drawn = self._drawn_in_full[segment]
            return self.full[segment]
        given = [None if found is None else found[1] for found in self.given(segment, pattern)]
        with self.recording(autocast=autocast), torch.no_grad():
            arrived: list[Edge] | None = [] if is_full(pattern) and not self.arrived else None
            found = differentiate(part, given, arrived, ways)
            values = {way: value_of(gradient, "a gradient") for way, gradient in found.items()}
        self.arrived += arrived or ()
        gradients = [None if way is None else values.get(way) for way in slots]
        if full:  # the first ones stay, and what draws the numbers that they are made of
            self.full.setdefault(segment, gradients)
            self._drawn_in_full.setdefault(segment, self.drawn)
        return gradients

    @contextmanager
    def recording(self, *, autocast: bool) -> Iterator[None]:
        """Record what autograd computes in a ``with`` block; what draws random numbers in it is in ``drawn`` then."""
        operations = self.recorder.tape.operations
        first = len(operations)
        self.recorder.phase = "backward"
        self.recorder.states.begin()
        try:
            casting = nullcontext() if autocast else internals.disable_autocast()
            with self.holder(), tracing(self.recorder), guard_of_backward(self.recorder.quirks), casting:
                yield
                self.recorder.states.end()
        finally:
            self.recorder.phase = "forward"
            if autocast:
                torch.clear_autocast_cache()  # it would keep the traced tensors, for others to find
        self.drawn = tuple(o.index for o in operations[first:] if o.is_random and o.is_impure)
