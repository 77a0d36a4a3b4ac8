"""Write the guards of the prologue, which check whether the assumptions of the trace hold for this call.

Cheap and general guards come first: settings, the function itself, the pytree structure of the arguments, torch's
guards of tensors. Then come guards that only some traces need, for example the storage offset of an input, or the
inputs that share memory.
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
from aotlab.guards.guarded_values import Names, attributes_differ
from aotlab.ir.extents import counted_together, extent_bytes, overlapping_pairs
from aotlab.ir.metadata import InputAliasInfo
from aotlab.runtime.arguments import Arguments
from aotlab.runtime.draft import Draft
from aotlab.runtime.emitting_quirk import emit_quirks
from aotlab.trace.records import SizeOf


class Prologue:
    """Writes the guards of an entry.

    ``must_share_counter`` are the indices of kept inputs that must share version counters exactly as in the traced
    call; see `SavedValuesWriter.counted_together`.
    """

    def __init__(self, draft: Draft, must_share_counter: Collection[int] = ()) -> None:
        self.draft = draft
        self.must_share_counter = set(must_share_counter)
        self.parts = draft.parts
        self.state = draft.state
        self.w = draft.w
        views = draft.trace.inputs.view_of
        self.family = {*views, *views.values()}  # the inputs that are bases, or views of such a base

    def write(self) -> None:
        """Write all guards."""
        for condition in self.draft.trace.inputs.conditions:
            self.w.add(f"{self.w.constant('condition', condition)}.found = None")
        self._surroundings()
        Arguments(self.draft).write()
        self._view_bases()
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
        # If a write gives an input an autograd history, and the input is a view, then its base gets a history as well.
        # An entry that was traced without such a base does not handle that.
        for info in self.draft.meta.input_info:
            is_unwritten = info.made_to_require_grad and not info.moves_version
            if info.requires_grad_after and not (info.requires_grad or info.index in self.family or is_unwritten):
                self.draft.miss([f"{self.draft.kept(info.index)}._base is not None"])
        for condition in self.draft.trace.inputs.conditions:
            tensors = map(self.draft.kept, condition.inputs)
            self.draft.miss([self.w.call("condition_fails", condition.fails, *tensors)])
        emit_quirks(self.draft, "prologue")

    def _surroundings(self) -> None:
        """Write the guards of torch's settings, of the function, and of the values that the function reaches."""
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
        if not self.parts.dedupe.kept:  # if there are tensor arguments, torch's guards of tensors check this
            reads.append(("not {}()", internals.transforms_active))
        methods = [item.expected for item in state.reached if item.inline and isinstance(item.expected, Names)]
        for name, method in {pair: None for names in methods for pair in zip(names.names, names.value, strict=True)}:
            reads.append((f"torch.Tensor.{name} is {{}}", method))
        conditions = []
        for switch in internals.SWITCHES:  # settings that decide which ops torch's functions call
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
        checks = (
            w.call("settings_hold", self.parts.settings_hold),
            w.call("surroundings_hold", compiled_check(tuple(reads))),
        )
        self.draft.miss([*(f"not {check}" for check in checks), *conditions])
        still_same = target.still_same()
        if still_same is not None:
            self.draft.miss([f"not {w.call('reached_holds', still_same)}"])

    def _view_bases(self) -> None:
        """Write the lines that read the bases that are inputs, and the guards that the arguments are views of them."""
        draft, w = self.draft, self.w
        for i, base in self.parts.call.view_bases.items():
            view = draft.expressions[i]
            if base in draft.expressions:
                draft.miss([f"{view}._base is not {draft.expressions[base]}"])
            else:
                draft.expressions[base] = w.local(f"base_of_{view}")
                w.add(f"{draft.expressions[base]} = {view}._base")
            draft.miss([f"not {w.shared('is_strided_view', internals.is_strided_view)}({view})"])

    def _attributes(self) -> None:
        """Write the guards of the Python attributes of tensors.

        Only those attributes are guarded that the function's code may read: it mentions their names, or computes names.
        """
        mentioned, w = self.state.mentioned, self.w
        for i in self.parts.dedupe.kept:
            facts = self.state.leaves[i]
            assert isinstance(facts, TensorFacts)
            if not facts.attributes and not mentioned.by_string:
                # The tensor had none of the attributes that the code names, and the traced run raised no
                # AttributeError. So the code reads no such attribute of this tensor.
                continue
            tensor = self.draft.expressions[i]
            expected = w.constant("attributes", facts.attributes), w.constant("mentioned", mentioned)
            condition = w.call("attributes_differ", attributes_differ, tensor, *expected)
            self.draft.miss([condition if facts.attributes else f"{tensor}.__dict__ and {condition}"])

    def _tensors(self) -> None:
        """Write the guards of tensors: which arguments are the same tensor, and the metadata of each tensor."""
        draft, parts, state = self.draft, self.parts, self.state
        for i in parts.dedupe.positions:
            if state.same_as[i] != i:
                draft.miss([f"{draft.expressions[i]} is not {draft.expressions[state.same_as[i]]}"])
        if parts.dedupe.kept:
            distinct_tensors = draft.star([draft.expressions[i] for i in parts.dedupe.kept])
            draft.miss([f"not {self.w.call('tensors_hold', parts.tensors_hold, distinct_tensors)}"])
        leaves = []
        for k, i in enumerate(parts.dedupe.kept):
            facts = state.leaves[i]
            if isinstance(facts, TensorFacts) and facts.type is Tensor and self._matters_whether_leaf(k):
                leaves.append(f"{'not ' if facts.is_leaf else ''}{draft.expressions[i]}.is_leaf")
        if leaves:
            draft.miss(leaves)
        self._guard_bases()

    def _matters_whether_leaf(self, k: int) -> bool:
        """Tell whether the entry depends on whether kept input ``k`` is a leaf.

        That is so if the function writes the input, makes views of it under ``no_grad``, or may read ``is_leaf``.
        """
        effects, info = self.draft.trace.side_effects, self.draft.meta.input_info[k]
        changed = info.moves_version or info.mutates_data or info.mutates_metadata
        may_read_leafness = k in effects.autograd_state_read or any(
            map(self.state.mentioned.counts, ("is_leaf", "grad_fn"))
        )
        is_visible = may_read_leafness or k in effects.viewed_under_no_grad or self.draft.base_with(k) is not None
        return info.requires_grad and (changed or is_visible)

    def _sizes(self) -> None:
        """Write lines that store the symbolic sizes, which are graph inputs, in local variables."""
        sources = [source for source in self.draft.trace.inputs.sources if isinstance(source, SizeOf)]
        for source in sources:
            self.draft.sizes[source] = source.name
            argument = self.draft.expressions[source.position]
            read = f"{argument}.numel()" if self._is_flat(source.position) else f"{argument}.shape[{source.dim}]"
            self.w.add(f"{source.name} = {argument if source.dim is None else read}")
        self._size_guards_start = len(self.w.lines)

    def _is_flat(self, position: int) -> bool:
        """Tell whether an argument has one dimension. Then ``numel()`` gives its size faster than ``shape``."""
        facts = self.state.leaves[position]
        return isinstance(facts, TensorFacts) and len(facts.shape) == 1

    def guard_sizes(self) -> None:
        """Write the guards of the symbolic sizes, and move them to the other guards.

        This must be called after the rest of the function is written, because writing it may add guards on sizes.
        """
        sizes, end = self.draft.trace.recorder.sizes, len(self.w.lines)
        if sizes is None:
            return
        size_names = {(source.position, source.dim): source.name for source in self.draft.sizes}
        reads: dict[str, str] = {}

        def name(position: int, quantity: str, dim: int | None) -> str:
            argument = self.draft.expressions[position]
            if quantity == "value":
                return argument
            if dim is None:
                return f"{argument}.{quantity}()"
            if quantity == "size" and (position, dim) in size_names:
                return size_names[position, dim]
            if quantity == "size" and self._is_flat(position):
                return f"{argument}.numel()"
            read = f"{argument}.{'shape' if quantity == 'size' else 'stride()'}"  # takes half the time of `size(dim)`
            if read not in reads:
                reads[read] = self.w.local(read)
            return f"{reads[read]}[{dim}]"

        rules = [text for text, _ in sizes.guards(name)]
        if rules:
            for read, local in reads.items():
                self.w.add(f"{local} = {read}")
            self.draft.miss([f"not ({' and '.join(rules)})"])
            rules, self.w.lines[end:] = self.w.lines[end:], []
            self.w.lines[self._size_guards_start : self._size_guards_start] = rules

    def _guard_bases(self) -> None:
        """Write a guard on the base of each input of which the function made or used a view under ``no_grad``.

        Autograd treats the function's view differently if the input is itself a view and the base of the input does not
        require grad.
        """
        for k in sorted(self.draft.trace.side_effects.viewed_under_no_grad):
            facts = self.state.leaves[self.parts.dedupe.kept[k]]
            tensor = self.draft.kept(k)
            if isinstance(facts, TensorFacts) and facts.requires_grad:
                plain = facts.is_leaf and not facts.is_view
                has_differing_base = self.w.call("is_over_another", internals.is_over_another, tensor)
                self.draft.miss([f"{tensor}._base is not None" if plain else has_differing_base])

    def _may_be_changed(self, info: InputAliasInfo) -> None:
        """Write the guard that autograd permits the function's in-place write of an input, as in the traced call."""
        draft, w = self.draft, self.w
        tensor = draft.kept(info.index)
        grad_mode = draft.grad_on or draft.trace.training
        if info.index in self.family:  # `is_strided_view` has checked it
            return
        # A write to a view would change the history of the view and of its base, so the input must not be a view.
        if info.is_written_non_leaf and grad_mode:
            retains = f" or {tensor}.retains_grad" if info.metadata_steps else ""
            draft.miss([f"{tensor}._base is not None{retains}"])
            return
        is_hidden_from_autograd = info.mutations_under_no_grad_or_inference_mode or info.mutations_hidden_from_autograd
        if info.mutates_data and info.requires_grad and not is_hidden_from_autograd:
            draft.miss([f"not {w.call('may_be_written', internals.may_be_written, tensor)}"])

    # --- memory that inputs share

    def _overlaps(self) -> None:
        """Write the guard that mutated inputs share memory exactly as in the traced call."""
        mutated = [i.index for i in self.draft.meta.input_info if i.mutates_data]
        if not mutated:
            self._counters()  # a change of metadata (`x.t_()`) may increment a version counter as well
            return
        if self.family or any(isinstance(source, Base) for source in self.draft.trace.inputs.sources):
            kept_index = {position: k for k, position in enumerate(self.parts.dedupe.kept)}
            expected = tuple((kept_index[a], kept_index[b], distance) for a, b, distance in self.state.overlapping)
            check = differs_from(overlapping_pairs, expected)  # the entry serves calls with exactly these overlaps
            tensors = self.draft.star(self.draft.all_kept())
            self.draft.miss([self.w.call("shares_memory_otherwise", check, tensors)])
            for info in self.draft.meta.input_info:
                if info.requires_grad and self.draft.base_with(info.index) is not None:
                    self.draft.miss([f"{self.draft.kept(info.index)}._base is not None"])
        elif len(self.parts.dedupe.kept) > 1 and self.draft.trace.symbols:
            tensors = self.draft.star(self.draft.all_kept())
            self.draft.miss([self.w.call("share_memory", differs_from(overlapping_pairs, ()), tensors)])
        elif len(self.parts.dedupe.kept) > 1:
            self._guard_no_overlap(mutated)
        self._counters()

    def _counters(self) -> None:
        """Write the guard that the same inputs share version counters as in the traced call.

        A write to one input invalidates the saved values and the views of the inputs that share its counter.
        """
        kept_index = {position: k for k, position in enumerate(self.parts.dedupe.kept)}
        watched = {source.index for source in self.draft.trace.saving.watch if source.kind == "input"}
        watched |= {kept_index[position] for pair in self.state.counters for position in pair}
        watched |= self.draft.trace.side_effects.fragile_views
        moved = {info.index for info in self.draft.meta.input_info if info.moves_version}
        order = sorted(moved | watched | self.must_share_counter if moved and watched else self.must_share_counter)
        if len(order) > 1:
            members = [self.parts.call.values[self.parts.dedupe.kept[k]] for k in order]
            check = differs_from(counted_together, counted_together(list(enumerate(members))))
            self.draft.miss([self.w.call("counted_otherwise", check, *map(self.draft.kept, order))])

    def _guard_no_overlap(self, mutated: Sequence[int]) -> None:
        tensors = self.draft.all_kept()
        address: Callable[[Tensor], int] = Tensor.data_ptr
        extents = []
        for i in self.parts.dedupe.kept:
            facts = self.state.leaves[i]
            assert isinstance(facts, TensorFacts)
            extents.append(extent_bytes(facts.shape, facts.stride, facts.dtype.itemsize))
            is_freed = extents[-1] and self.parts.call.values[i].untyped_storage().nbytes() == 0
            address = internals.address_of if facts.type is internals.FakeTensor or is_freed else address
        if len(tensors) == 2 and address is Tensor.data_ptr:
            a, b = tensors
            start_a, start_b = self.w.local("start"), self.w.local("start")
            self.w.add(f"{start_a}, {start_b} = {a}.data_ptr(), {b}.data_ptr()")
            self.draft.miss([f"{start_a} < {start_b} + {extents[1]} and {start_b} < {start_a} + {extents[0]}"])
        else:
            check = overlap_checker(extents, mutated, address)
            self.draft.miss([self.w.call("written_inputs_overlap", check, self.draft.star(tensors))])


# --- functions that the prologue calls


@cache
def compiled_check(reads: tuple[tuple[str, Any], ...]) -> Callable[[], bool]:
    """Compile a function that checks settings; entries that assume the same settings share one function.

    Each item of ``reads`` is the text of a condition and an object, and ``{}`` in the text is replaced by the name of
    the object: ``("not {}()", torch.is_anomaly_enabled)``.
    """
    namespace = {f"read_{n}": read for n, (_, read) in enumerate(reads)}
    texts = [text.format(name) for name, (text, _) in zip(namespace, reads, strict=True)]
    namespace["torch"] = torch
    exec(f"def holds():\n return {' and '.join(texts)}", namespace)
    holds: Callable[[], bool] = namespace.pop("holds")
    return holds


def differs_from(find: Callable[[list[tuple[int, Tensor]]], object], expected: object) -> Callable[..., bool]:
    """Return a function of tensors that tells whether a fact about them differs from ``expected``.

    ``find`` returns the fact for a list of pairs (number, tensor), for example the pairs of tensors that overlap.
    """
    return lambda *tensors: find(list(enumerate(tensors))) != expected


def overlap_checker(extents: Sequence[int], mutated: Sequence[int], address: Callable[..., int]) -> Callable[..., bool]:
    """Return a function of the inputs that tells whether a mutated input overlaps another input in memory.

    ``extents`` has the number of bytes from the first to the last element of each input. ``mutated`` are the positions
    of the mutated inputs. ``address`` returns the address of a tensor's first element.
    """
    is_mutated = [i in mutated for i in range(len(extents))]
    lengths = tuple(zip(extents, is_mutated, strict=True))

    def overlap(*tensors: Tensor) -> bool:
        spans = sorted([(address(t), n, w, t.device.type) for t, (n, w) in zip(tensors, lengths, strict=True) if n])
        end, mutated_end = 0, 0
        for start, length, mutates, _ in spans:
            if start < mutated_end or (mutates and start < end):
                return True
            stop = start + length
            if stop > end:
                end = stop
            if mutates and stop > mutated_end:
                mutated_end = stop
        return False

    return overlap
