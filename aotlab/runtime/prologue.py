"""The prologue asks whether the assumptions of the trace hold for this call.

The cheap and the general come first: settings, the function itself, the nesting of the arguments, torch's own guards of
tensors; then what only this trace depends on, such as where an input begins or which inputs share memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab.capture.synthetic_bases import Base
from aotlab.guards.call_state import TensorFacts
from aotlab.guards.values import attributes_differ
from aotlab.ir.extents import counted_together, extent_bytes, overlapping_pairs
from aotlab.ir.metadata import InputAliasInfo
from aotlab.runtime.arguments import Arguments
from aotlab.runtime.draft import Draft
from aotlab.trace.records import SizeOf


class Prologue:
    """Writes the guards.

    ``together`` are inputs that have to count with each other as they did; see `Keeping.counted_together`.
    """

    def __init__(self, draft: Draft, together: Collection[int] = ()) -> None:
        self.draft = draft
        self.together = set(together)
        self.parts = draft.parts
        self.state = draft.state
        self.w = draft.w

    def write(self) -> None:
        """Write all guards."""
        self._surroundings()
        Arguments(self.draft).write()
        self._tensors()
        self._sizes()
        self._attributes()
        for info in self.draft.meta.input_info:
            self._may_be_changed(info)
        for k in self.draft.trace.inputs.offsets_read:
            facts = self.state.leaves[self.parts.dedupe.kept[k]]
            assert isinstance(facts, TensorFacts)
            self.draft.miss([f"{self.draft.kept(k)}.storage_offset() != {facts.offset}"])
        self._overlaps()
        for info in self.draft.meta.input_info:  # what gets a history by a write: a view would share it
            if info.requires_grad_after and not info.requires_grad:
                self.draft.miss([f"{self.draft.kept(info.index)}._base is not None"])
        for quirk in self.draft.trace.side_effects.quirks:
            quirk.emit(self.draft, "prologue")

    def _surroundings(self) -> None:
        """Write the checks of the settings, and of the function and what it reaches."""
        w, state, target = self.w, self.state, self.parts.call.target
        settings = dict(state.settings)
        reads: list[tuple[str, Any]] = [
            (f"{{}}() is {settings['inference mode']}", torch.is_inference_mode_enabled),
            (f"{{}}() == {state.function_modes}", internals.function_mode_count),
            (f"{{}}() == {state.dispatch_modes}", internals.dispatch_mode_count),
            ("{}._current_level < 0", torch.autograd.forward_ad),
        ]
        if state.dispatch_modes:
            reads.append(("{}()", internals.only_fake_modes))
        if self.draft.trace.training:
            reads.append(("not {}()", torch.is_anomaly_enabled))
        if not self.parts.dedupe.kept:  # the guards of tensors would see it
            reads.append(("not {}()", internals.transforms_active))
        conditions = []
        for switch in internals.SWITCHES:  # they decide which ops some functions are traced as
            if switch.counts(state.mentioned.names):
                expected = settings[switch.name]
                if isinstance(expected, bool):
                    reads.append(("{}()" if expected else "not {}()", switch.read))
                else:
                    read = w.call(switch.name.removeprefix("torch.backends."), switch.read)
                    conditions.append(f"{read} != {w.constant('expected', expected)}")
        function = getattr(target, "function", None)
        if isinstance(function, FunctionType):
            code = w.constant("code", function.__code__)
            conditions.append(f"{w.constant('function', function)}.__code__ is not {code}")
        if state.function_modes:
            device = w.constant("default_device", settings["default device"])
            conditions.append(f"torch.get_default_device() != {device}")
        first = w.call("settings_hold", self.parts.settings_hold), w.call("surroundings_hold", check_of(tuple(reads)))
        self.draft.miss([*(f"not {check}" for check in first), *conditions])
        still_same = target.still_same()
        if still_same is not None:
            self.draft.miss([f"not {w.call('reached_holds', still_same)}"])

    def _attributes(self) -> None:
        """Write the checks of what hangs on the tensors by names that the function's code mentions."""
        mentioned, w = self.state.mentioned, self.w
        for i in self.parts.dedupe.kept:
            facts = self.state.leaves[i]
            assert isinstance(facts, TensorFacts)
            if not facts.attributes and not mentioned.by_string:
                continue  # code that mentions what is not there raises, unless it asks first
            tensor = self.draft.expressions[i]
            expected = w.constant("attributes", facts.attributes), w.constant("mentioned", mentioned)
            condition = w.call("attributes_differ", attributes_differ, tensor, *expected)
            self.draft.miss([condition if facts.attributes else f"{tensor}.__dict__ and {condition}"])

    def _tensors(self) -> None:
        """Write the checks of which arguments are one tensor, and of what the tensors are."""
        draft, parts, state = self.draft, self.parts, self.state
        for i in parts.dedupe.positions:
            if state.same_as[i] != i:
                draft.miss([f"{draft.expressions[i]} is not {draft.expressions[state.same_as[i]]}"])
        if parts.dedupe.kept:
            kept = draft.star([draft.expressions[i] for i in parts.dedupe.kept])
            draft.miss([f"not {self.w.call('tensors_hold', parts.tensors_hold, kept)}"])
        leaves = []
        for k, i in enumerate(parts.dedupe.kept):
            facts = state.leaves[i]
            if isinstance(facts, TensorFacts) and facts.type is Tensor and self._matters_whether_leaf(k):
                leaves.append(f"{'not ' if facts.is_leaf else ''}{draft.expressions[i]}.is_leaf")
        if leaves:
            draft.miss(leaves)
        self._views_of_others()

    def _matters_whether_leaf(self, k: int) -> bool:
        """Tell whether an input's being a leaf shows in what the function does: it writes it, views it, or may ask."""
        effects, info = self.draft.trace.side_effects, self.draft.meta.input_info[k]
        changed = info.moves_version or info.mutates_data or info.mutates_metadata
        asked = k in effects.looked_at or any(map(self.state.mentioned.counts, ("is_leaf", "grad_fn")))
        seen = asked or k in effects.viewed_unseen or self.draft.base_with(k) is not None
        return info.requires_grad and (changed or seen)

    def _sizes(self) -> None:
        """Write what names the sizes that vary."""
        sources = [source for source in self.draft.trace.inputs.sources if isinstance(source, SizeOf)]
        for source in sources:
            self.draft.sizes[source] = source.name
            given = self.draft.expressions[source.position]
            read = f"{given}.numel()" if self._is_flat(source.position) else f"{given}.shape[{source.dim}]"
            self.w.add(f"{source.name} = {given if source.dim is None else read}")
        self._rules_at = len(self.w.lines)

    def _is_flat(self, position: int) -> bool:
        """Tell whether an argument has one dimension: how many elements it has is known faster than its size."""
        facts = self.state.leaves[position]
        return isinstance(facts, TensorFacts) and len(facts.shape) == 1

    def assume(self) -> None:
        """Write what was assumed of the sizes that vary, of all that was written by now."""
        sizes, end = self.draft.trace.recorder.sizes, len(self.w.lines)
        if sizes is None:
            return
        known = {(source.position, source.dim): source.name for source in self.draft.sizes}
        reads: dict[str, str] = {}

        def name(position: int, what: str, dim: int | None) -> str:
            given = self.draft.expressions[position]
            if what == "value":
                return given
            if dim is None:
                return f"{given}.{what}()"
            if what == "size" and (position, dim) in known:
                return known[position, dim]
            if what == "size" and self._is_flat(position):
                return f"{given}.numel()"
            read = f"{given}.{'shape' if what == 'size' else 'stride()'}"  # half of what `size(dim)` takes
            if read not in reads:
                reads[read] = self.w.local(read)
            return f"{reads[read]}[{dim}]"

        rules = [text for text, _ in sizes.guards(name)]
        if rules:
            for read, local in reads.items():
                self.w.add(f"{local} = {read}")
            self.draft.miss([f"not ({' and '.join(rules)})"])
            rules, self.w.lines[end:] = self.w.lines[end:], []
            self.w.lines[self._rules_at : self._rules_at] = rules

    def _views_of_others(self) -> None:
        """Write the checks that inputs are no views of what requires no grad, where views of them tell."""
        for k in sorted(self.draft.trace.side_effects.viewed_unseen):
            facts = self.state.leaves[self.parts.dedupe.kept[k]]
            tensor = self.draft.kept(k)
            if isinstance(facts, TensorFacts) and facts.requires_grad:
                plain = facts.is_leaf and not facts.is_view
                over = self.w.call("is_over_another", internals.is_over_another, tensor)
                self.draft.miss([f"{tensor}._base is not None" if plain else over])

    def _may_be_changed(self, info: InputAliasInfo) -> None:
        """Guard that an input may be written as the traced one was."""
        draft, w = self.draft, self.w
        tensor = draft.kept(info.index)
        grad_mode = draft.grad_on or draft.trace.training
        # the history of a view would change, and that of what it is a view of
        if info.is_written_non_leaf and grad_mode:
            draft.miss([f"{tensor}._base is not None"])
            return
        if info.is_written_non_leaf and draft.trace.training:
            draft.miss([f"{tensor}.retains_grad and {tensor}._base is not None"])
        unseen = info.mutations_under_no_grad_or_inference_mode or info.mutations_hidden_from_autograd
        if info.mutates_data and info.requires_grad and not unseen:
            draft.miss([f"not {w.call('may_be_written', internals.may_be_written, tensor)}"])

    # --- memory that inputs share

    def _overlaps(self) -> None:
        """Write the check that written inputs share memory exactly as they did."""
        written = [i.index for i in self.draft.meta.input_info if i.mutates_data]
        if not written:
            self._counters()  # a step that changes no values moves a version as well
            return
        if any(isinstance(source, Base) for source in self.draft.trace.inputs.sources):
            at = {position: k for k, position in enumerate(self.parts.dedupe.kept)}
            expected = tuple((at[a], at[b], distance) for a, b, distance in self.state.overlapping)
            check = otherwise(overlapping_pairs, expected)  # for calls that share memory in the very same way
            tensors = self.draft.star(self.draft.all_kept())
            self.draft.miss([self.w.call("shares_memory_otherwise", check, tensors)])
            for info in self.draft.meta.input_info:
                if info.requires_grad and self.draft.base_with(info.index) is not None:
                    self.draft.miss([f"{self.draft.kept(info.index)}._base is not None"])
        elif len(self.parts.dedupe.kept) > 1 and self.draft.trace.symbols:
            tensors = self.draft.star(self.draft.all_kept())
            self.draft.miss([self.w.call("share_memory", otherwise(overlapping_pairs, ()), tensors)])
        elif len(self.parts.dedupe.kept) > 1:
            self._apart(written)
        self._counters()

    def _counters(self) -> None:
        """Guard which inputs share a version counter: a write to one spoils saved values and views of the others."""
        at = {position: k for k, position in enumerate(self.parts.dedupe.kept)}
        watched = {source.index for source in self.draft.trace.saving.watch if source.kind == "input"}
        watched |= {at[position] for pair in self.state.counters for position in pair}
        watched |= self.draft.trace.side_effects.fragile
        moved = {info.index for info in self.draft.meta.input_info if info.moves_version}
        order = sorted(moved | watched | self.together if moved and watched else self.together)
        if len(order) > 1:
            members = [self.parts.call.values[self.parts.dedupe.kept[k]] for k in order]
            check = otherwise(counted_together, counted_together(list(enumerate(members))))
            self.draft.miss([self.w.call("counted_otherwise", check, *map(self.draft.kept, order))])

    def _apart(self, written: Sequence[int]) -> None:
        tensors = self.draft.all_kept()
        address: Callable[[Tensor], int] = Tensor.data_ptr
        extents = []
        for i in self.parts.dedupe.kept:
            facts = self.state.leaves[i]
            assert isinstance(facts, TensorFacts)
            extents.append(extent_bytes(facts.shape, facts.stride, facts.dtype.itemsize))
            address = internals.address_of if facts.type is internals.FakeTensor else address
        if len(tensors) == 2 and address is Tensor.data_ptr:
            a, b = tensors
            one, two = self.w.local("start"), self.w.local("start")
            self.w.add(f"{one}, {two} = {a}.data_ptr(), {b}.data_ptr()")
            self.draft.miss([f"{one} < {two} + {extents[1]} and {two} < {one} + {extents[0]}"])
        else:
            check = overlap_checker(extents, written, address)
            self.draft.miss([self.w.call("written_inputs_overlap", check, self.draft.star(tensors))])


# --- checks that a call makes


@cache
def check_of(reads: tuple[tuple[str, Any], ...]) -> Callable[[], bool]:
    """Write a check of settings, one for all entries that assume the same; in a text ``{}`` stands for an object."""
    namespace = {f"read_{n}": read for n, (_, read) in enumerate(reads)}
    texts = [text.format(name) for name, (text, _) in zip(namespace, reads, strict=True)]
    exec(f"def holds():\n return {' and '.join(texts)}", namespace)
    holds: Callable[[], bool] = namespace.pop("holds")
    return holds


def otherwise(find: Callable[[list[tuple[int, Tensor]]], object], expected: object) -> Callable[..., bool]:
    """Make a check of whether ``find`` says of numbered tensors something else than ``expected``."""
    return lambda *tensors: find(list(enumerate(tensors))) != expected


def overlap_checker(extents: Sequence[int], written: Sequence[int], address: Callable[..., int]) -> Callable[..., bool]:
    """Make a check of whether the bytes of a written input overlap those of another input."""
    is_written = [i in written for i in range(len(extents))]
    lengths = tuple(zip(extents, is_written, strict=True))

    def overlap(*tensors: Tensor) -> bool:
        spans = sorted([(address(t), n, w, t.device.type) for t, (n, w) in zip(tensors, lengths, strict=True) if n])
        end, written_end = 0, 0
        for start, length, is_one, _ in spans:
            if start < written_end or (is_one and start < end):
                return True
            stop = start + length
            if stop > end:
                end = stop
            if is_one and stop > written_end:
                written_end = stop
        return False

    return overlap
