"""The backwards of one entry."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch.compiling import compiling, never_lost
from aotlab.backends.base import Boxed
from aotlab.errors import PartialBackwardError, TransformError
from aotlab.partition.stage import Split
from aotlab.runtime.batches import for_each_sample, is_transformed
from aotlab.runtime.saved import SavedValues, restride
from aotlab.trace.history import LASTING, kept_entries, leading_to
from aotlab.trace.live import Trace
from aotlab.trace.records import Pattern

#: A backward, and which of the saved values it takes.
CompiledBackward = tuple[Boxed, tuple[int, ...]]

#: For so many layouts of tangents a segment is compiled anew; those of others are copied.
_MOST_LAYOUTS = 16

if TYPE_CHECKING:
    from aotlab.derivatives.higher import Higher


class Backward:
    """The compiled backwards of one segment, one for each pattern of defined tangents that was asked for."""

    def __init__(
        self,
        trace: Trace,
        split: Split,
        segment: int,
        full: Boxed | None,
        compile_pattern: Callable[[Pattern, frozenset[int] | None], CompiledBackward],
        make_higher: Callable[[Backward], Higher],
        name: str,
        *,
        does_the_same: Callable[[Pattern], bool],
        exact: bool,
    ) -> None:
        self._trace = trace
        self._make_higher = make_higher
        self._higher: Higher | None = None
        self._compile = compile_pattern
        self._name = name
        self._exact = exact
        self._does_the_same = does_the_same
        self.masks = trace.saving.masks[segment]
        self.all_masks = [mask for masks in trace.saving.masks for mask in masks]
        self.strides = [tuple(trace.tangents.fakes[n].stride()) for n in trace.tangents.of_entries[segment]]
        self.wanted = trace.through(segment)
        self.anchors = _anchors(trace, segment)
        self._segment = segment
        self._masks_of_asked: dict[frozenset[int], int] = {}
        #: A backward for each pattern, and the autocast it was made for; and of those with strides that were
        #: tried, whether the one for the usual strides does the same.
        self._compiled: dict[tuple[Any, ...], CompiledBackward] = {}
        self._tried: dict[tuple[Any, ...], bool] = {}
        #: The pattern to look up, by strides that were met before.
        self._of_strides: dict[tuple[Any, ...], tuple[bool | tuple[int, ...], ...]] = {}
        if full is not None:
            self._compiled[(True,) * len(self.masks)] = full, tuple(range(len(split.saved_names)))

    def prepare(self) -> None:
        """Compile the backward for all tangents now."""
        pattern = (True,) * len(self.masks)
        with internals.disable_autocast():
            self._compiled[pattern] = self._compile(pattern, None)

    def _compile_once(self, key: tuple[Any, ...], pattern: Pattern, asked: frozenset[int] | None) -> CompiledBackward:
        """Compile the backward for a pattern, if no other thread does."""
        with compiling(), never_lost():
            known = self._compiled.get(key)
            if known is None:
                known = self._compiled[key] = self._compile(pattern, asked)
            return known

    def _with_strides(
        self, pattern: tuple[bool | tuple[int, ...], ...], tangents: list[Any], casting: tuple[Any, ...]
    ) -> tuple[bool | tuple[int, ...], ...]:
        """Return the pattern that says which strides the defined tangents have, if a backward for these does otherwise.

        Where none can be had, they are copied, in the list, into the strides that the backward was traced with: equal
        values, but what is summed in another order may be rounded otherwise.
        """
        strides = (pattern, casting, *[t.stride() if t.layout is torch.strided else None for t in tangents])
        if strides in self._of_strides:
            return self._of_strides[strides]
        places = [place for place, defined in enumerate(pattern) if defined]
        found = list(pattern)
        for place, tangent in zip(places, tangents, strict=True):
            if tangent.layout is torch.strided and tangent.stride() != self.strides[place]:
                found[place] = tangent.stride()
        key = (*found, *casting)
        if self._exact and key not in self._compiled and key not in self._tried:
            with compiling(), never_lost():
                self._try_strides(key, found, casting)
        if key in self._compiled or self._tried.get(key):
            self._of_strides[strides] = tuple(found) if key in self._compiled else pattern
            return self._of_strides[strides]
        for i, place in enumerate(places):
            if tangents[i].layout is not torch.strided or tangents[i].stride() != self.strides[place]:
                tangents[i] = restride(tangents[i], self.strides[place])
        return pattern

    def _try_strides(self, key: tuple[Any, ...], found: Pattern, casting: tuple[Any, ...]) -> None:
        """Note that the usual backward does for these strides, or compile one for them; if it is not done yet."""
        if key in self._compiled or key in self._tried or len(self._tried) >= _MOST_LAYOUTS:
            return
        does = False
        # what it needs may not have been saved for the usual strides; another error comes again for these
        with suppress(PartialBackwardError, RuntimeError):
            does = not casting and self._does_the_same(found)
            if not does:
                self._compiled[key] = self._compile(found, None)
        self._tried[key] = does

    def _of_higher_order(self) -> Higher:
        """Return the backwards under ``create_graph``, and those in which gradients of gradients come in."""
        if self._higher is None:
            with compiling(), never_lost():
                if self._higher is None:
                    self._higher = self._make_higher(self)
        return self._higher

    def __call__(self, saved: SavedValues, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of what went through ``apply``, in their order; raise what differentiating raises."""
        if saved.pending is not None or torch.is_grad_enabled():
            higher = self._of_higher_order()
            if torch.is_grad_enabled() or higher.is_awaited(saved):
                return higher(saved, tangents)
        if not self._exact and (is_transformed(tangents) or internals.forward_ad_active()):
            return self._by_samples(saved, tangents)
        return self._of_first_order(saved, tangents)

    def _by_samples(self, saved: SavedValues, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run kernels for each sample of batched gradients; they cannot take a tensor that stands for several."""
        if internals.forward_ad_active() and any(map(internals.has_tangent, tangents)):
            raise TransformError(
                f"the backward of compiled `{self._name}` was called with a dual tensor",
                why="compiled kernels have no forward mode",
                suggestion='compile with backend="eager", or call the original function',
            )
        kept = saved.kept()

        def of_one(given: list[Tensor | None]) -> list[Tensor | None]:
            saved.restore(kept)
            return self._of_first_order(saved, given)

        return for_each_sample(of_one, list(tangents), self._name)

    def _asked(self) -> frozenset[int] | None:
        """Return the slots whose gradients the backward that is being run was asked for; None if it is for all.

            y, z = a.sin() * c, c.exp()
            torch.autograd.grad(y.sum(), a)

        Autograd runs the nodes on the way to what is asked for: these alone let go of what they keep, and draw random
        numbers.
        """
        own = internals.current_node()
        edges = () if own is None else own.next_functions
        runs = [node is None or internals.is_to_be_run(node) for node, _ in edges]
        if all(runs) or not any(runs):
            return None
        return frozenset(slot for slot, is_run in zip(self.wanted, runs, strict=False) if is_run)

    def _mask_of(self, asked: frozenset[int]) -> int:
        """Return the bits of the nodes on the way to some slots."""
        if asked not in self._masks_of_asked:
            part, ways = self._trace.segments[self._segment], self._trace.slots[self._segment]
            nodes = leading_to(part, [way for i in asked if (way := ways[i]) is not None])
            bits = self._trace.saving.bits
            own = {1 << bits[node] for node in nodes if node in bits}  # several may have the same
            self._masks_of_asked[asked] = sum(own, LASTING)
        return self._masks_of_asked[asked]

    def _of_first_order(self, saved: SavedValues, tangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients where nobody differentiates them."""
        pattern: tuple[bool | tuple[int, ...], ...] = tuple(t is not None for t in tangents)
        if True not in pattern:
            return [None] * len(self.wanted)
        # eager's backward runs under the autocast of its own caller, whatever the forward ran under
        casting = internals.autocast_state() if internals.any_autocast_enabled() else ()
        mask = 0
        inputs: list[Any] = []
        others = False
        for tangent, own, stride in zip(tangents, self.masks, self.strides, strict=True):
            if tangent is not None:
                mask |= own
                others = others or tangent.stride() != stride
                inputs.append(tangent)
        if others:
            pattern = self._with_strides(pattern, inputs, casting)
        # eager runs, and lets draw and let go, what is on the way to the gradients that are asked for; where nothing is
        # drawn and there is one entry all nodes go together; else this takes time for each edge
        draws = self._trace.deriver.draws
        several = len(self.all_masks) > 1 and (saved.released or not internals.keeps_graph())
        asked = self._asked() if draws or several else None
        if asked is not None:
            mask &= self._mask_of(asked)
        key = (*pattern, *casting, *((asked,) if draws and asked is not None else ()))
        known = self._compiled.get(key)
        if known is None:
            known = self._compile_once(key, pattern, asked if draws else None)
        compiled, needs = known
        # from here on the list is the only owner of what this backward uses up, so that it is freed on the way
        arguments = saved.use(mask, needs)
        saved.release(mask, self.all_masks)
        arguments += inputs
        del inputs
        if casting:
            with internals.disable_autocast():
                gradients = compiled(arguments)
        else:
            gradients = compiled(arguments)
        return [gradients[i] for i in self.wanted]


#: A result of so many bytes, as a loss, may be kept only for what hangs on it.
_SMALL = 64


def _anchors(trace: Trace, segment: int) -> tuple[int, ...]:
    """Choose the results of a segment's node on which those of derivatives of derivatives hang.

    They are those that eager keeps, else the smallest. None if that takes memory; then an empty result is added.
    """
    part = trace.segments[segment]
    own = kept_entries(part, trace.saving.bits)
    if own:
        return own
    carriers = range(len(part.roots), len(part.entries))  # without memory
    if carriers:
        return (carriers[0],)
    sizes = [(value.numel() * value.itemsize, n) for n, value in enumerate(trace.tangents.fakes[n] for n in part.roots)]
    size, smallest = min(sizes)
    return (smallest,) if size <= _SMALL else ()
