"""The generator of the run-time function: the one place where the rules of the calling convention are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from aotlab import nesting
from aotlab import torch_internals as internals
from aotlab.analysis.history import Edge
from aotlab.analysis.windows import Base
from aotlab.backends.base import Boxed
from aotlab.errors import GraphInvariantError
from aotlab.guards import CallState, TensorFacts, ValueFacts, extent_bytes, overlapping_pairs
from aotlab.ir.graphs import output_args
from aotlab.ir.metadata import (
    InputAliasInfo,
    MetadataStep,
    MutationType,
    OutputAliasInfo,
    OutputType,
    TangentSource,
    ViewAndMutationMeta,
    ViewStep,
)
from aotlab.ir.specs import TensorSpec
from aotlab.nesting import Given, Leaf, Node
from aotlab.recorder import ends_its_storage, warn_again, would_raise
from aotlab.stages.capture import Call
from aotlab.stages.dedupe import DedupeRecord
from aotlab.stages.partition import PartitionRecord
from aotlab.stages.runtime import metadata
from aotlab.stages.runtime.backward import Backward
from aotlab.stages.runtime.history import history_of
from aotlab.stages.runtime.nests import Unpacker, can_be_written, write_given_guards, write_result
from aotlab.stages.runtime.saved import SavedValues
from aotlab.stages.runtime.writer import Writer
from aotlab.stages.trace import Source, Trace, Write
from aotlab.values import same_value

_METHODS = {
    "aten.t.default": "t",
    "aten.transpose.int": "transpose",
    "aten.view.default": "view",
    "aten.view.dtype": "view",
    "aten.unsqueeze.default": "unsqueeze",
    "aten.squeeze.default": "squeeze",
    "aten.squeeze.dim": "squeeze",
    "aten.squeeze.dims": "squeeze",
    "aten.permute.default": "permute",
    "aten.expand.default": "expand",
    "aten.select.int": "select",
    "aten.diagonal.default": "diagonal",
    "aten.detach.default": "detach",
    "aten.unbind.int": "unbind",
    "aten.split.Tensor": "split",
    "aten.split_with_sizes.default": "split_with_sizes",
    "aten.unfold.default": "unfold",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the generator puts together.

    ``settings_hold`` and ``tensors_hold`` are torch's C++ guards, made while the call's own settings were in force.
    """

    call: Call
    dedupe: DedupeRecord
    trace: Trace
    partition: PartitionRecord
    forward: Boxed
    backward: Sequence[Backward]
    settings_hold: Callable[[], bool]
    tensors_hold: Callable[..., bool]
    entry: int
    debug: bool


def generate(parts: Parts) -> tuple[str, dict[str, Any]]:
    """Write the source and gather what it refers to."""
    return Generator(parts).generate()


class Generator:
    """Writes the source of one entry's run-time function."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.meta: ViewAndMutationMeta = parts.trace.metadata
        self.state: CallState = parts.call.state
        self.w = Writer()
        self.expressions: dict[int, str] = {}  # flat position → expression
        self.grad_on = dict(self.state.settings)["grad mode"]
        self.multi: dict[tuple[str, str], tuple[str, set[int]]] = {}
        self.given: dict[Given, str] = {}
        self.results: dict[int, str] = {}  # forward output → expression
        self.outputs: dict[int, str] = {}  # the user's output → expression
        self.written: set[int] = set()  # which of the trace's writes are done
        self.changed: set[int] = set()  # which of the inputs are changed as the function did
        self.watched = self._watched()
        self.hooked: set[int] = set()  # which of the trace's hooks are registered
        self.made_carriers: set[str] = set()
        self.counted = False  # whether the versions of inputs that the graph writes are seen to
        self.heads: list[str] = []
        # an entry that takes a synthetic base is for calls that share memory in the very same way
        self.with_base = any(isinstance(source, Base) for source in parts.trace.placeholder_sources)

    def generate(self) -> tuple[str, dict[str, Any]]:
        """Write prologue, call and epilogue; return the source and what it refers to."""
        w = self.w
        w.namespace["forward"] = self.parts.forward
        w.namespace["set_grad_mode"] = internals.set_grad_mode
        w.namespace["disable_autocast"] = internals.disable_autocast
        body = w.lines
        w.add("# prologue: do the assumptions of the trace hold?")
        self._guards()
        w.add()
        if self.parts.trace.training and not self.parts.trace.is_whole:
            self._call_segments()
            w.add()
            w.add("# epilogue: what the caller can see besides")
        else:
            self._call_forward()
            self._hooks("input", "owner")
            w.add()
            w.add("# epilogue: what the caller can see")
            self._mutations(self.results)
        if self._settles():
            w.add("saved.remember_versions()")
        outputs = self._outputs(self.results)
        for kept, mask in self.watched.items():
            w.add(f"saved.watch({self._as_it_is(kept)}, {mask})")
        self._hooks("input", "changed", "owner", "root", "output")
        self._grad_mode_left()
        w.add(f"return {write_result(w, self.parts.trace.out_spec, outputs, self.given)}")
        source = "\n".join([*self.heads, "def run(args, kwargs):", *body]) + "\n"
        return source, w.namespace

    # --- prologue

    def _guards(self) -> None:
        w, parts, state = self.w, self.parts, self.state
        target = parts.call.target
        still_same = target.still_same()
        settings = dict(state.settings)
        conditions = [
            f"not {w.constant('settings_hold', parts.settings_hold)}()",
            f"{w.constant('inference_mode', torch.is_inference_mode_enabled)}() is not {settings['inference mode']}",
            f"{w.constant('function_modes', internals.function_mode_count)}() != {state.function_modes}",
            f"{w.constant('dispatch_modes', internals.dispatch_mode_count)}()",
            f"{w.constant('forward_ad', torch.autograd.forward_ad)}._current_level >= 0",
        ]
        function = getattr(target, "function", None)
        if isinstance(function, FunctionType):
            known = w.constant("function", function), w.constant("code", function.__code__)
            conditions.append(f"{known[0]}.__code__ is not {known[1]}")
        if state.function_modes:
            device = w.constant("default_device", settings["default device"])
            conditions.append(f"torch.get_default_device() != {device}")
        self._miss(conditions)
        if still_same is not None:
            self._miss([f"not {w.constant('reached_holds', still_same)}()"])
        self._unpack()
        kept = [self.expressions[i] for i in parts.dedupe.kept]
        for i in parts.dedupe.positions:
            if state.same_as[i] != i:
                self._miss([f"{self.expressions[i]} is not {self.expressions[state.same_as[i]]}"])
        if kept:
            self._miss([f"not {w.constant('tensors_hold', parts.tensors_hold)}({self._star(kept)})"])
        leaves = []
        for i in parts.dedupe.kept:
            facts = state.leaves[i]
            if isinstance(facts, TensorFacts) and facts.requires_grad and facts.type is Tensor:
                leaves.append(f"{'not ' if facts.is_leaf else ''}{self.expressions[i]}.is_leaf")
        if leaves:
            self._miss(leaves)
        for info in self.meta.input_info:
            if metadata.is_detached(info) or info.history_moves or (info.changes_unseen and parts.trace.training):
                self._miss([f"{self.expressions[parts.dedupe.kept[info.index]]}._base is not None"])
            if info.sees_behind:
                ends = w.constant("ends_its_storage", ends_its_storage)
                self._miss([f"not {ends}({self.expressions[parts.dedupe.kept[info.index]]})"])
            if metadata.needs_leave_of_autograd(info):
                allowed = w.constant("may_be_written", internals.may_be_written)
                self._miss([f"not {allowed}({self.expressions[parts.dedupe.kept[info.index]]})"])
        for k in parts.trace.offsets_read:
            position = parts.dedupe.kept[k]
            facts = state.leaves[position]
            assert isinstance(facts, TensorFacts)
            self._miss([f"{self.expressions[position]}.storage_offset() != {facts.offset}"])
        self._overlap_guard()
        self.given = write_given_guards(w, parts.trace.out_spec, self._miss)
        if parts.trace.warned:
            noted = w.constant("noted", parts.trace.warned)
            self._miss([f"{w.constant('would_raise', would_raise)}({noted})"])
            w.add(f"{w.constant('warn_again', warn_again)}({noted})  # as the function does, at each call")

    def _star(self, expressions: Sequence[str]) -> str:
        """Write an argument list, with ``*parameters`` for all the lifted ones where they stand in order."""
        count = self.parts.call.lifted_count
        if count and list(expressions[:count]) == [f"parameters[{i}]" for i in range(count)]:
            return ", ".join(["*parameters", *expressions[count:]])
        return ", ".join(expressions)

    def _miss(self, conditions: Sequence[str]) -> None:
        self.w.add(f"if {' or '.join(conditions)}:")
        self.w.add("    return MISS")

    def _unpack(self) -> None:
        """Write the code that takes the nested arguments apart, checking their nesting on the way."""
        w, call = self.w, self.parts.call
        if call.lifted_count:
            w.add(f"parameters = {w.constant('lifted', call.target.lifter())}()")
            for i in range(call.lifted_count):
                self.expressions[i] = f"parameters[{i}]"
        self._unpack_arguments(call.spec)

    def _unpack_arguments(self, tree: Node) -> None:
        """Write the code for ``args`` and ``kwargs``."""
        w, call = self.w, self.parts.call
        following = count(call.lifted_count)
        args, kwargs = tree.children
        assert isinstance(args, Node)
        assert isinstance(kwargs, Node)
        if not can_be_written(tree):
            w.add(f"leaves, nesting = {w.constant('tree_flatten', nesting.flatten)}((args, kwargs))")
            self._miss([f"nesting != {w.constant('expected_nesting', tree)}"])
            for i in range(call.lifted_count, len(call.values)):
                self._unpack_leaf(f"leaves[{i - call.lifted_count}]", i)
            return
        conditions = [f"len(args) != {len(args.children)}"]
        conditions.append(f"tuple(kwargs) != {kwargs.keys!r}" if kwargs.keys else "kwargs")
        self._miss(conditions)
        unpacker = Unpacker(w, self._miss, lambda expression: self._unpack_leaf(expression, next(following)))
        if len(args.children) > 1 and all(isinstance(child, Leaf) for child in args.children):
            positions = [next(following) for _ in args.children]
            w.add(f"{', '.join([self._name_leaf(i) for i in positions])} = args")
            for i in positions:
                self._value_guard(i)
        else:
            for i, child in enumerate(args.children):
                unpacker.unpack(child, f"args[{i}]")
        for key, child in zip(kwargs.keys, kwargs.children, strict=True):
            unpacker.unpack(child, f"kwargs[{key!r}]")
        unpacker.distinct()

    def _unpack_leaf(self, expression: str, position: int) -> None:
        self.w.add(f"{self._name_leaf(position)} = {expression}")
        self._value_guard(position)

    def _name_leaf(self, position: int) -> str:
        self.expressions[position] = self.w.local(self.state.names[position])
        return self.expressions[position]

    def _value_guard(self, position: int) -> None:
        facts = self.state.leaves[position]
        if not isinstance(facts, ValueFacts):
            return
        name, value = self.expressions[position], facts.value
        if facts.by_identity or value is None or isinstance(value, bool):
            expected = repr(value) if value is None or isinstance(value, bool) else self.w.constant(name, value)
            conditions = [f"{name} is not {expected}"]
            if facts.code is not None:
                conditions.append(f"{name}.__code__ is not {self.w.constant(f'code_of_{name}', facts.code)}")
            self._miss(conditions)
        elif type(value) in (int, str):
            self._miss([f"type({name}) is not {type(value).__name__}", f"{name} != {value!r}"])
        else:
            same = self.w.constant("same_value", same_value)
            self._miss([f"not {same}({name}, {self.w.constant(f'expected_{name}', value)})"])

    def _overlap_guard(self) -> None:
        kept = self.parts.dedupe.kept
        written = [i.index for i in self.meta.input_info if i.must_not_overlap]
        if not written or len(kept) < 2:
            return
        if self.with_base:
            at = {position: k for k, position in enumerate(kept)}
            expected = tuple((at[a], at[b], distance) for a, b, distance in self.state.overlapping)
            check = self.w.constant("shares_memory_otherwise", _pattern_checker(expected))
            self._miss([f"{check}({self._star([self.expressions[i] for i in kept])})"])
            for source in self.parts.trace.placeholder_sources:
                if isinstance(source, Base) and source.owners:
                    self._owner_guard(source)
            return
        extents = []
        for i in kept:
            facts = self.state.leaves[i]
            assert isinstance(facts, TensorFacts)
            extents.append(extent_bytes(facts.shape, facts.stride, facts.dtype.itemsize))
        if len(kept) == 2:
            a, b = (self.expressions[i] for i in kept)
            one, two = self.w.local("start"), self.w.local("start")
            self.w.add(f"{one}, {two} = {a}.data_ptr(), {b}.data_ptr()")
            self._miss([f"{one} < {two} + {extents[1]} and {two} < {one} + {extents[0]}"])
        else:
            check = self.w.constant("written_inputs_overlap", _overlap_checker(extents, written))
            self._miss([f"{check}({self._star([self.expressions[i] for i in kept])})"])
        self._history_guard(written)

    def _history_guard(self, written: Sequence[int]) -> None:
        """Write the check that a written input is not a view of what another input is a view of too."""
        may = [info.index for info in self.meta.input_info if info.requires_grad and not info.is_leaf]
        if len(may) < 2 or not set(may) & set(written):
            return
        names = [self.expressions[self.parts.dedupe.kept[k]] for k in may]
        owners = self.w.constant("share_a_base", _share_a_base)
        self._miss([f"{owners}({', '.join(names)})"])

    def _owner_guard(self, base: Base) -> None:
        members = [self.parts.call.values[self.parts.dedupe.kept[k]] for k in base.members]
        check = self.w.constant("owned_otherwise", _owner_checker(members))
        names = [self.expressions[self.parts.dedupe.kept[k]] for k in base.members]
        self._miss([f"{check}({', '.join(names)})"])

    # --- the compiled forward

    def _input_list(self) -> list[str]:
        listed = []
        for source in self.parts.trace.placeholder_sources:
            if isinstance(source, Base):
                first = self.expressions[self.parts.dedupe.kept[source.members[0]]]
                name = self.w.local("base")
                self.w.add(f"{name} = {self.w.constant('memory_of', _base_maker(source))}({first})")
                listed.append(name)
            else:
                listed.append(self.expressions[source])
        return listed

    def _through(self, source: Source, done: set[int]) -> str:
        """Return the expression of what stands for an edge of the traced autograd graph; write it if need be."""
        if source.kind in ("input", "owner"):
            return self._old(source) if self._is_written(source, done) else self._now(source)
        if source.kind == "changed":
            return self._now(source)
        if source.kind == "output":
            return self._output(source.index)
        if source.kind == "carrier":
            return f"carrier_{source.index}"
        position = self.parts.trace.roots[source.index]
        if position < len(self.parts.trace.writes):
            return self.expressions[self.parts.dedupe.kept[self.parts.trace.writes[position].index]]
        return self.results[position]

    def _as_it_is(self, source: Source) -> str:
        """Return the expression of what stands for an edge, whatever was done to it since."""
        return self._now(source) if source.kind in ("input", "owner") else self._through(source, set())

    def _now(self, source: Source) -> str:
        tensor = self.expressions[self.parts.dedupe.kept[source.index]]
        return f"{tensor}._base" if source.kind == "owner" else tensor

    def _old(self, source: Source) -> str:
        return f"before_{'base_of_' if source.kind == 'owner' else ''}{source.index}"

    def _is_written(self, source: Source, done: set[int]) -> bool:
        """Tell whether one of the visible writes ``done`` gives the tensor another history."""
        if self.meta.input_info[source.index].metadata_steps and source.index in self.changed:
            return True
        writes = [self.parts.trace.writes[n] for n in done]
        base = self._base_with(source.index)
        return any(
            write.visible and (write.index == source.index or (base is not None and write.index in base.members))
            for write in writes
        )

    def _base_with(self, k: int) -> Base | None:
        for source in self.parts.trace.placeholder_sources:
            if isinstance(source, Base) and k in source.members:
                return source
        return None

    def _autocast(self) -> bool:
        return any(value for name, value in self.state.settings if name in ("autocast on cpu", "autocast on cuda"))

    def _call_forward(self) -> None:
        """Write the call of the compiled forward; note the expression for each of its user-visible outputs."""
        w, trace = self.w, self.parts.trace
        count = len(trace.forward_outputs)
        w.add("# compiled forward")
        inputs = self._input_list()
        names = self.results
        if not trace.training:
            requires = any(i.requires_grad for i in self.meta.input_info)
            with_mode = self.grad_on and requires
            self._in_context(
                f"out = forward([{self._star(inputs)}])",
                grad_mode=False if with_mode else None,
                autocast_off=self._autocast(),
            )
            names.update({i: f"out[{i}]" for i in range(count)})
            for i in filter(self._needs_detach, range(count)):
                names[i] = w.local(self._output_label(i))
                w.add(f"{names[i]} = out[{i}].detach()")
            return
        slots, connected = trace.slots[0], trace.connected[0]
        through = [
            self._through(trace.sources[way[0]], set()) for way, c in zip(slots, connected, strict=True) if way and c
        ]
        beside = [e for e, c in zip(inputs, connected, strict=False) if not c]
        differentiable = trace.roots
        for i in range(count):
            names[i] = w.local(self._output_label(i))
        self._require_grad()
        w.add(f"box = [{', '.join(beside)}]")
        anchored = not through
        if anchored:  # the outputs require grad, but no input gets any; something has to say so
            through = [w.constant("anchor", torch.empty(0, requires_grad=True))]
        results = ", ".join(names[i] for i in differentiable)
        self._in_context(
            f"{results} = Compiled.apply(box, {self._star(through)})",
            grad_mode=None if self.grad_on else True,
            autocast_off=False,
        )
        self._own_nodes(differentiable, names, len(differentiable))
        others = [names[i] for i in range(count) if i not in differentiable] + ["saved"] * self._settles()
        if others:
            w.add(f"{', '.join(others)}{',' if len(others) == 1 else ''} = box")
        self._function_class(len(inputs), anchored=anchored)

    def _call_segments(self) -> None:
        """Write the call of the compiled forward and of one autograd node for each segment, with what stands between.

        A segment's node takes what the caller can see of the segments before it: their outputs as they are returned,
        and inputs as they are after their write.
        """
        w, trace = self.w, self.parts.trace
        count = len(trace.forward_outputs)
        w.add("# compiled forward")
        inputs = self._input_list()
        self._in_context(
            f"out = forward([{self._star(inputs)}])", grad_mode=False if self.grad_on else None,
            autocast_off=self._autocast(),
        )  # fmt: skip
        w.namespace["SavedValues"] = SavedValues
        w.add(f"saved = SavedValues({self._saved_expression(count)})")
        self._require_grad()
        self._hooks("input", "owner")
        self._keep_old_histories()
        self._change_without_writes()
        for i in range(count):
            if i not in trace.roots:
                self.results[i] = w.local(self._output_label(i))
                w.add(f"{self.results[i]} = out[{i}]{'.detach()' if self._needs_detach(i) else ''}")
        self._mutations(self.results)
        for number, part in enumerate(trace.segments):
            w.add()
            w.add(f"# segment {number + 1} of {len(trace.segments)}: an autograd node of its own")
            done = set(self.written)
            pairs = zip(trace.slots[number], trace.connected[number], strict=True)
            through = [self._through(trace.sources[way[0]], done) for way, c in pairs if way and c]
            anchored = not through
            if anchored:
                through = [w.constant("anchor", torch.empty(0, requires_grad=True))]
            positions = [trace.roots[n] for n in part.roots]
            names = [w.local(self._output_label(i)) for i in positions]
            carriers = [trace.sources[edge].index for edge in part.entries[len(part.roots) :]]
            values = [f"out[{i}]{'.detach()' if trace.is_view(i) else ''}" for i in positions]
            values += [f"{self._carrier(part.entries[len(part.roots) + n])}.detach()" for n in range(len(carriers))]
            results = [*names, *(f"carrier_{c}" for c in carriers)]
            comma = "," if len(results) == 1 else ""
            self._in_context(
                f"{', '.join(results)}{comma} = Segment_{number + 1}.apply(saved, ({', '.join(values)},), "
                f"{', '.join(through)})",
                grad_mode=None if self.grad_on else True,
                autocast_off=False,
            )
            self._segment_class(number, anchored=anchored)
            self.results.update(zip(positions, names, strict=True))
            self._own_nodes(positions, self.results, len(results))
            self.made_carriers.update(results)
            self._mutations(self.results)
            self._hooks("root", "carrier")

    def _hooks(self, *kinds: str) -> None:
        """Write what registers hooks on what is there: inputs before they are written, the others as they come."""
        for n, (kind, source, function) in enumerate(self.parts.trace.hooks):
            if n in self.hooked or source.kind not in kinds:
                continue
            if source.kind == "carrier" and f"carrier_{source.index}" not in self.made_carriers:
                continue
            if source.kind == "root" and self.parts.trace.roots[source.index] not in self.results:
                continue
            if kind == "retain_grad" and "output" not in kinds:
                continue  # it follows its tensor through writes, so the last moment is as good as the first
            self.hooked.add(n)
            target = self._as_it_is(source)
            if kind == "retain_grad":
                self.w.add(f"{target}.retain_grad()")
            else:
                method = "register_hook" if kind == "hook" else "register_post_accumulate_grad_hook"
                self.w.add(f"{target}.{method}({self.w.constant('hook', function)})")

    def _keep_old_histories(self) -> None:
        """Write what keeps the history that an input has before a segment's write, for the segments after it."""
        trace, w = self.parts.trace, self.w
        done: set[int] = set()
        later = {trace.writes[position].index for position in trace.roots if position < len(trace.writes)}
        first = {i.index for i in self.meta.input_info if i.metadata_steps and i.index not in later}
        for number, part in enumerate(trace.segments):
            for way, connected in zip(trace.slots[number], trace.connected[number], strict=True):
                if way is None or not connected:
                    continue
                source = trace.sources[way[0]]
                if source.kind in ("input", "owner") and (source.index in first or self._is_written(source, done)):
                    line = f"{self._old(source)} = {w.constant('history_of', history_of)}({self._now(source)})"
                    self._in_context(line, grad_mode=None if self.grad_on else True, autocast_off=False)
            done |= {n for n in range(len(trace.writes)) if n in [trace.roots[root] for root in part.roots]}

    def _carrier(self, edge: Edge) -> str:
        """Return the name of a tensor without memory that looks like the value whose gradient an edge carries."""
        shape, dtype, device = internals.edge_metadata(*edge)
        return self.w.constant("like", torch.empty((), dtype=dtype, device=device).expand(shape))

    def _segment_class(self, number: int, *, anchored: bool) -> None:
        """Write the autograd.Function of a segment; its forward only hands on what the compiled forward returned."""
        names = self.w.namespace
        names["Function"] = torch.autograd.Function
        names[f"backward_{number + 1}"] = self.parts.backward[number]
        anchor = ", None" if anchored else ""
        self.heads += [
            f"class Segment_{number + 1}(Function):",
            "    @staticmethod",
            "    def forward(ctx, saved, results, *inputs):",
            "        ctx.set_materialize_grads(False)",
            "        ctx.values = saved",
            "        return results",
            "",
            "    @staticmethod",
            "    def backward(ctx, *tangents):",
            f"        return None, None{anchor}, *backward_{number + 1}(ctx.values, tangents)",
            "",
            "",
        ]

    def _needs_detach(self, i: int) -> bool:
        """Tell whether forward output ``i`` reaches the caller as a view of something that only the graph knows.

        Made inside the Function, or without grad mode, such a view could not be written in place; an alias of it can.
        """
        return i >= len(self._mutated_out()) and self.parts.trace.is_view(i)

    def _own_nodes(self, positions: Sequence[int], names: Mapping[int, str], entries: int) -> None:
        """Write what gives outputs that the caller gets as they are an autograd node of their own.

        A node with several outputs runs the hooks of all of them whenever one gets a gradient, with None for the
        others; and autograd's bookkeeping of a tensor that was detached fails if gradients are retained before a write.
        """
        first = len(self.parts.trace.writes)
        last = first + len(self.parts.trace.returned_outputs)
        made_by = {
            first + n: self.meta.output_info[index].made_by for n, index in enumerate(self.parts.trace.returned_outputs)
        }
        for i in positions:
            function = made_by.get(i)
            if function is not None:  # a view by which autograd knows that nobody may write it
                view = self.w.constant(function, internals.viewing_function(function))
                line = f"{names[i]} = {view}({names[i]})"
                self._in_context(line, grad_mode=None if self.grad_on else True, autocast_off=False)
        own = [
            i
            for i in positions
            if first <= i < last and made_by[i] is None and (entries > 1 or self.parts.trace.is_view(i))
        ]
        if own:
            self.w.namespace["own_node"] = internals.give_own_node
            line = "; ".join(f"own_node({names[i]})" for i in own)
            self._in_context(line, grad_mode=None if self.grad_on else True, autocast_off=False)

    def _output_label(self, i: int) -> str:
        kinds = [("new", info.name) for info in self._mutated_out()]
        kinds += [("", o.name) for o in self._returned_outputs()]
        kinds += [("base", str(n)) for n in range(len(self.meta.intermediate_bases))]
        return " ".join(part for part in kinds[i] if part)

    def _in_context(self, line: str, *, grad_mode: bool | None, autocast_off: bool) -> None:
        w = self.w
        if autocast_off:
            w.add("with disable_autocast():")
            w.depth += 1
        if grad_mode is None:
            w.add(line)
        else:
            w.add(f"set_grad_mode({grad_mode})")
            w.add("try:")
            w.add("    " + line)
            w.add("finally:")
            w.add(f"    set_grad_mode({not grad_mode})")
        if autocast_off:
            w.depth -= 1

    def _function_class(self, inputs: int, *, anchored: bool) -> None:
        """Write the autograd.Function of an entry that has one segment."""
        trace = self.parts.trace
        (backward,) = self.parts.backward
        count = len(trace.forward_outputs)
        through = [i for i, connected in enumerate(trace.connected[0]) if connected]
        order, box_index = [], 0
        for i in range(inputs):
            if i in through:
                order.append(f"inputs[{through.index(i)}]")
            else:
                order.append(f"box[{box_index}]")
                box_index += 1
        if not box_index and len(through) == inputs:
            listed = "list(inputs)" if through else "[]"
        else:
            listed = f"[{', '.join(order)}]"
        names = self.w.namespace
        names["Function"] = torch.autograd.Function
        names["SavedValues"] = SavedValues
        names["backward"] = backward
        others = [i for i in range(count) if i not in trace.roots]
        lines = ["class Compiled(Function):", "    @staticmethod", "    def forward(ctx, box, *inputs):"]
        lines.append("        ctx.set_materialize_grads(False)")
        if self._autocast():
            lines += ["        with disable_autocast():", f"            out = forward({listed})"]
        else:
            lines.append(f"        out = forward({listed})")
        lines.append(f"        ctx.values = SavedValues({self._saved_expression(count)})")
        if box_index or others or self._settles():
            boxed = [f"out[{i}]{'.detach()' if self._needs_detach(i) else ''}" for i in others]
            boxed += ["ctx.values"] * self._settles()
            lines.append(f"        box[:] = [{', '.join(boxed)}]")
        returned = [f"out[{i}]{'.detach()' if trace.is_view(i) else ''}" for i in trace.roots]
        lines.append(f"        return {', '.join(returned)}")
        lines += ["", "    @staticmethod", "    def backward(ctx, *tangents):"]
        anchor = ", None" if anchored else ""
        lines.append(f"        return None{anchor}, *backward(ctx.values, tangents)")
        self.heads += [*lines, "", ""]

    def _saved_expression(self, count: int) -> str:
        """Write the list of saved values; an output is saved detached, lest it keep itself alive."""
        saved = self.parts.partition.saved
        if not any(s.is_returned for s in saved):
            return f"out[{count}:]"
        items = [f"out[{count + i}].detach()" if s.is_returned else f"out[{count + i}]" for i, s in enumerate(saved)]
        return f"[{', '.join(items)}]"

    # --- epilogue

    def _mutated_out(self) -> list[InputAliasInfo]:
        return [self.meta.input_info[write.index] for write in self.parts.trace.writes]

    def _watched(self) -> dict[Source, int]:
        """Return the inputs and outputs of which another write would go unnoticed.

        A saved value that is the caller's tensor, or shares its memory and version counter, notices itself.
        """
        trace = self.parts.trace
        if not trace.watch:
            return {}
        count = len(trace.forward_outputs)
        returned = output_args(self.parts.partition.forward.graph)
        saved = {internals.storage_key(node.meta["val"]) for node in returned[count:] if node is not None}
        written = {write.index for write in trace.writes}
        found = {}
        for source, mask in trace.watch.items():
            if source.kind == "input":
                own = trace.input_fakes[source.index]
                noticed = source.index not in written and self._base_with(source.index) is None
            else:
                info = self.meta.output_info[source.index]
                if info.same_as is not None or source.index not in trace.returned_outputs:
                    continue  # what it is made from is watched
                position = len(trace.writes) + trace.returned_outputs.index(source.index)
                own, noticed = trace.forward_outputs[position], True
            if not (noticed and internals.storage_key(own) in saved):
                found[source] = mask
        return found

    def _settles(self) -> bool:
        """Tell whether the saved values have to be told that the epilogue's own writes are done.

        A saved input may share its version counter with a written one without sharing memory.
        """
        trace = self.parts.trace
        changed = bool(trace.writes) or any(info.mutates_metadata for info in self.meta.input_info)
        changed = changed and any(s.is_input for s in self.parts.partition.saved)
        return trace.training and (changed or bool(self.watched))

    def _returned_outputs(self) -> list[OutputAliasInfo]:
        kinds = (OutputType.NON_ALIAS, OutputType.UNSAFE_VIEW_ALIAS, OutputType.CUSTOM_FUNCTION_VIEW)
        found = [o for o in self.meta.output_info if o.output_type in kinds and o.spec is not None]
        order = {i: n for n, i in enumerate(self.parts.trace.returned_outputs)}
        return sorted(found, key=lambda o: order[o.index])

    def _mutations(self, results: dict[int, str]) -> None:
        """Write the new values that are there into the caller's tensors, and take their other changes."""
        for n, write in enumerate(self.parts.trace.writes):
            if n in self.written or n not in results:
                continue
            self.written.add(n)
            self._change(self.meta.input_info[write.index], write, results[n])
        self._change_without_writes()
        if len(self.written) < len(self.parts.trace.writes) or self.counted:
            return
        self.counted = True
        for k in self.parts.trace.counted:
            bump = self.w.constant("increment_version", torch.autograd.graph.increment_version)
            self.w.add(f"{bump}({self.expressions[self.parts.dedupe.kept[k]]})")
        for info in self.meta.input_info:
            # a compiler's kernels write without counting; so do writes of nothing, which eager counts
            in_graph = info.mutation_type is MutationType.MUTATED_IN_GRAPH
            if info.moves_version and (in_graph or not info.mutates_data) and not info.mutates_metadata:
                bump = self.w.constant("increment_version", torch.autograd.graph.increment_version)
                self.w.add(f"{bump}({self.expressions[self.parts.dedupe.kept[info.index]]})")

    def _change(self, info: InputAliasInfo, write: Write | None, value: str) -> None:
        """Change one of the caller's tensors as the function did: its values, and all else."""
        target = self.expressions[self.parts.dedupe.kept[info.index]]
        base = self._base_with(info.index)
        for output in self.meta.output_info:
            if output.precedes_write and output.base_idx in (base.members if base is not None else (info.index,)):
                self._output(output.index)
        self.changed.add(info.index)
        self._steps(target, info, metadata.before_write(info))
        if write is not None:
            line = f"{target}.copy_({value})"
            if not write.counts:
                self.w.add(f"{target}.data.copy_({value})  # eager does not count this write either")
            elif write.visible:
                self._in_context(line, grad_mode=None if self.grad_on else True, autocast_off=False)
            else:
                quiet = self.grad_on and (info.requires_grad or info.requires_grad_after)
                self._in_context(line, grad_mode=False if quiet else None, autocast_off=False)
        self._steps(target, info, metadata.after_write(info))
        if info.requires_grad_set is not None and not self._requires_grad_first(info):
            self.w.add(f"{target}.requires_grad_({info.requires_grad_set})")

    def _change_without_writes(self) -> None:
        """Change those of the caller's tensors that get no new values."""
        written = {write.index for write in self.parts.trace.writes}
        for info in self.meta.input_info:
            if info.is_changed and info.index not in written | self.changed:
                self._change(info, None, "")

    def _steps(self, target: str, info: InputAliasInfo, steps: Sequence[MetadataStep]) -> None:
        """Take steps that change the caller's tensor other than in its values."""
        for line, grad_mode in metadata.lines(target, steps):
            grad_mode = grad_mode and not self._requires_grad_first(info)  # it did not require grad at that time
            self._in_context(line, grad_mode=None if grad_mode == self.grad_on else grad_mode, autocast_off=False)

    def _requires_grad_first(self, info: InputAliasInfo) -> bool:
        """Tell whether an input has to require grad before the graph runs, so that gradients find it."""
        return bool(info.requires_grad_set) and self.parts.trace.gets_gradient(info.index)

    def _require_grad(self) -> None:
        """Make those inputs require grad that the function made so, and that get gradients."""
        for info in filter(self._requires_grad_first, self.meta.input_info):
            self.w.add(f"{self.expressions[self.parts.dedupe.kept[info.index]]}.requires_grad_()")

    def _outputs(self, results: dict[int, str]) -> list[str]:
        """Write the outputs; return their expressions in the user's order."""
        w = self.w
        returned = self._returned_outputs()
        expressions = {output.index: self._output(output.index) for output in returned}
        if self.parts.debug:
            for output in returned:
                assert output.spec is not None
                check = w.constant("check_output", _output_checker(output))
                w.add(f"{check}({expressions[output.index]})")
            fresh = ", ".join([*(expressions[o.index] for o in returned)])
            check = w.constant("check_fresh", _fresh_checker([o.name for o in returned]))
            w.add(f"{check}([{fresh}], [{self._star([self.expressions[i] for i in self.parts.dedupe.kept])}])")
        return [self._output(i) for i in self._in_order()]

    def _in_order(self) -> list[int]:
        return list(range(len(self.meta.output_info)))

    def _output(self, i: int) -> str:
        """Return the expression of one of the user's outputs; write what makes it, once."""
        if i not in self.outputs:
            self.outputs[i] = self._make_output(self.meta.output_info[i])
        return self.outputs[i]

    def _make_output(self, output: OutputAliasInfo) -> str:
        w, meta, trace = self.w, self.meta, self.parts.trace
        if output.index in trace.out_constants:
            value = trace.out_constants[output.index]
            plain = isinstance(value, (int, str, bool, type(None))) and type(value).__module__ == "builtins"
            return repr(value) if plain else w.constant("constant", value)
        if output.same_as is not None:
            return self._output(output.same_as)
        if output.index in trace.returned_outputs:
            returned = self.results[len(trace.writes) + trace.returned_outputs.index(output.index)]
            if output.is_new_leaf:
                w.add(f"{returned}.requires_grad_()")
            return returned
        assert output.base_idx is not None
        if output.output_type in (OutputType.ALIAS_OF_INPUT, OutputType.IS_INPUT):
            base = self.expressions[self.parts.dedupe.kept[output.base_idx]]
            base_requires = meta.input_info[output.base_idx].requires_grad_after
        elif output.output_type is OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT:
            base = self._output(output.base_idx)
            base_requires = meta.output_info[output.base_idx].requires_grad
        else:
            base = self.results[len(trace.writes) + len(trace.returned_outputs) + output.base_idx]
            base_requires = any(
                t.source is TangentSource.INTERMEDIATE_BASE and t.index == output.base_idx for t in meta.tangents
            )
        if output.views == ():
            return base
        through = trace.made_through.get(output.index)
        if through is not None:
            other = meta.output_info[through]
            assert other.views is not None
            assert output.views is not None
            base, output = self._output(through), replace(output, views=output.views[len(other.views) :])
        name = w.local(output.name)
        want = not output.under_no_grad
        toggle = want if base_requires and want != self.grad_on else None
        self._write_views(name, base, output, toggle)
        if output.is_new_leaf:
            w.add(f"{name} = {name}.detach().requires_grad_()")
        return name

    def _write_views(self, name: str, base: str, output: OutputAliasInfo, grad_mode: bool | None) -> None:
        if output.views is None:
            spec = output.spec
            assert spec is not None
            self._in_context(
                f"{name} = {base}.as_strided({spec.shape}, {spec.stride}, {self._as_strided_offset(base, output)})",
                grad_mode=grad_mode,
                autocast_off=False,
            )
            return
        expression = base
        for n, step in enumerate(output.views):
            call = self._view_call(expression, step)
            if step.item is None:
                expression = call
                continue
            whole = ViewStep(target=step.target, args=step.args, kwargs=step.kwargs)
            key = (base, repr((*output.views[:n], whole, grad_mode)))  # arguments may be lists
            made, given = self.multi.get(key, ("", set()))
            if not made or step.item in given:  # each view is handed out once
                made, given = self.w.local("views"), set()
                self.multi[key] = (made, given)
                self._in_context(f"{made} = {call}", grad_mode=grad_mode, autocast_off=False)
            given.add(step.item)
            expression = f"{made}[{step.item}]"
        self._in_context(f"{name} = {expression}", grad_mode=grad_mode, autocast_off=False)

    def _as_strided_offset(self, base: str, output: OutputAliasInfo) -> str:
        assert output.spec is not None
        assert output.base_idx is not None
        if output.output_type is OutputType.ALIAS_OF_INPUT:
            here = self.parts.trace.final_offsets[output.base_idx]
            assert isinstance(output.spec.offset, int)
            return f"{base}.storage_offset() + {output.spec.offset - here}"
        return str(output.spec.offset)

    def _view_call(self, base: str, step: ViewStep) -> str:
        arguments = [self._literal(a) for a in step.args] + [f"{k}={self._literal(v)}" for k, v in step.kwargs]
        method = _METHODS.get(step.target)
        if method is not None and not step.kwargs:
            return f"{base}.{method}({', '.join(arguments)})"
        name = step.target.replace(".", "_")
        if name not in self.w.namespace:
            packet, overload = step.target.removeprefix("aten.").rsplit(".", 1)
            self.w.namespace[name] = getattr(getattr(torch.ops.aten, packet), overload)
        return f"{name}({', '.join([base, *arguments])})"

    def _literal(self, value: Any) -> str:
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self._literal(item) for item in value)
            return f"[{inner}]"
        if value is None or type(value) in (int, bool, float, str) or isinstance(value, torch.dtype):
            return repr(value)
        return self.w.constant("argument", value)

    def _grad_mode_left(self) -> None:
        if self.meta.grad_enabled_mutation is not None:
            self.w.add(f"set_grad_mode({self.meta.grad_enabled_mutation})")


def _base_maker(base: Base) -> Callable[[Tensor], Tensor]:
    """Make the function that makes a synthetic base from its first member."""
    shift, count, dtype = base.shift, base.count, base.dtype
    return lambda first: internals.memory_window(first, shift, count, dtype)


def _pattern_checker(expected: tuple[tuple[int, int, int], ...]) -> Callable[..., bool]:
    """Make a check of whether tensors share memory in another way than was traced."""

    def otherwise(*tensors: Tensor) -> bool:
        return overlapping_pairs(list(enumerate(tensors))) != expected

    return otherwise


def _share_a_base(*tensors: Tensor) -> bool:
    """Tell whether two of the tensors are views of one tensor."""
    owners = [id(t if (base := internals.base_of(t)) is None else base) for t in tensors]
    return len(set(owners)) < len(owners)


def _owner_checker(members: Sequence[Tensor]) -> Callable[..., bool]:
    """Make a check of whether tensors are views of other tensors, or of tensors of another kind, than was traced."""

    def facts(tensors: Sequence[Tensor]) -> list[Any]:
        first = tensors[0].data_ptr()
        owners: list[Any] = []
        found: list[Any] = []
        for tensor in tensors:
            owner = internals.base_of(tensor)
            number = next((i for i, known in enumerate(owners) if known is owner), len(owners))
            if number == len(owners):
                owners.append(owner)
            kind: tuple[Any, ...] = ()
            if owner is not None:
                kind = (owner.shape, owner.stride(), owner.dtype, owner.requires_grad, owner.is_leaf)
                kind = (*kind, owner.data_ptr() - first)
            found.append((number, kind))
        return found

    expected = facts(members)
    return lambda *tensors: facts(tensors) != expected


def _overlap_checker(extents: Sequence[int], written: Sequence[int]) -> Callable[..., bool]:
    """Make a check of whether the bytes of a written input overlap those of another input."""
    is_written = [i in written for i in range(len(extents))]
    lengths = tuple(zip(extents, is_written, strict=True))

    def overlap(*tensors: Tensor) -> bool:
        spans = sorted([(t.data_ptr(), n, w, t.device.type) for t, (n, w) in zip(tensors, lengths, strict=True) if n])
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


def _fresh_checker(names: Sequence[str]) -> Callable[[Sequence[Tensor], Sequence[Tensor]], None]:
    """Make the check that outputs which were traced as fresh share memory neither with inputs nor with each other."""

    def check(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        taken = {internals.storage_key(tensor): "an input" for tensor in inputs}
        for name, output in zip(names, outputs, strict=True):
            key = internals.storage_key(output)
            if key in taken:
                raise GraphInvariantError(
                    f"`{name}` shares memory with {taken[key]}; it was traced as a tensor of its own"
                )
            taken[key] = f"`{name}`"

    return check


def _same_steps(value: Tensor, spec: TensorSpec) -> bool:
    """Compare strides, but for those that lead to no other element: many a kernel chooses them other than its fake."""
    pairs = zip(value.shape, value.stride(), spec.stride, strict=True)
    return not value.numel() or all(seen == expected for size, seen, expected in pairs if size > 1)


def _output_checker(output: OutputAliasInfo) -> Callable[[Tensor], None]:
    """Make the check that ``config.debug_assert`` puts behind each compiled output."""
    spec = output.spec
    assert spec is not None

    def check(value: Tensor) -> None:
        seen = (tuple(value.shape), tuple(value.stride()), value.dtype, value.requires_grad)
        expected = (spec.shape, spec.stride, spec.dtype, output.requires_grad)
        if seen != expected and not (seen[0] == expected[0] and seen[2:] == expected[2:] and _same_steps(value, spec)):
            raise GraphInvariantError(
                f"`{output.name}` came back with (shape, strides, dtype, requires_grad) {seen}; traced as {expected}"
            )

    return check
