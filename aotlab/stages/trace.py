"""Stage 4, trace: ONE run of the function says what it computes, what it mutates and what aliases what.

    def f(x, y):
        x.mul_(2)              # x is mutated
        z = x * y              # an intermediate
        return x.t(), z[0], z  # a view of an input, a view of an intermediate, the intermediate

The function runs on fake tensors inside functional wrappers, which are torch's own (its functionalization, in C++).
A wrapper behaves like the tensor that it stands for,
mutation included, but passes on only pure ops, which the recorder below writes down::

    mul = x * 2                # the new value of x; the epilogue will copy it into the caller's x
    z   = mul * y

When the function returns, the wrappers are asked what happened: which inputs were written, and how; which outputs
are inputs, or share their storage, or share an intermediate's. An output that shares memory with something else is
not returned by the graph: its *base* is, and the views that lead from the base to it are noted
(``x -> t()``, ``z -> select(0, 0)``), so that the epilogue can make a true alias.

Only now it is known what can receive a gradient: each mutated input, fresh output and intermediate base that requires
grad gets a *tangent*, and `torch.autograd.grad` runs under the same recorder. What stands on the tape then is the
joint graph::

    joint(primals, tangents) = (mutated inputs, outputs, bases, gradients of the primals)

The autograd graph of the wrappers is kept: when later a backward starts from some of the outputs only, its graph is
derived in the same way, and an input that those do not reach gets None, as in eager.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from aotlab import nesting
from aotlab import torch_internals as internals
from aotlab.analysis import Entered, Outputs, Places, enter, input_info, read_outputs, value_of
from aotlab.analysis.history import (
    Edge,
    Exit,
    Segment,
    differentiate,
    edge_of,
    next_edges,
    node_bits,
    reachable,
    segments,
    state_masks,
    users_of,
    watches,
)
from aotlab.analysis.views import view_parent
from aotlab.analysis.windows import Base, enter_base, enter_windows, extent
from aotlab.errors import (
    CapturedTensorError,
    EscapeError,
    HigherOrderOpError,
    LeakedTensorError,
    RandomOpError,
    RefusedError,
)
from aotlab.guards import global_state, restore_settings
from aotlab.ir.metadata import (
    InputAliasInfo,
    MutationType,
    OutputType,
    TangentInfo,
    TangentSource,
    ViewAndMutationMeta,
)
from aotlab.ir.specs import StorageNumbers, spec_of
from aotlab.recorder import (
    Chronicle,
    EscapeGuard,
    Hook,
    HookKind,
    Recorder,
    Reshapes,
    RunEagerly,
    Tape,
    Untraceable,
    Warned,
    WarningTape,
    overlaps_itself,
    would_raise,
)
from aotlab.stages.capture import Call
from aotlab.stages.dedupe import DedupeRecord
from aotlab.torch_internals import FakeTensorMode


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord:
    """The joint graph (or, without anything to differentiate, the forward graph) and what the run showed.

    ``inputs`` names the placeholders that stand for inputs, ``outputs`` says what each forward output is,
    ``random_ops`` lists the ops that draw random numbers. ``backward_error`` is the text of the error that
    differentiating raised; the compiled function raises it when its backward is asked for.
    """

    tracer: str
    module: fx.GraphModule
    metadata: ViewAndMutationMeta
    training: bool
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    random_ops: tuple[str, ...]
    operations: int
    backward_error: str | None


class TraceFailed(Exception):  # noqa: N818  # a signal to the pipeline, which then lets eager speak
    """The traced program raised something that is neither a refusal nor aotlab's own."""


@dataclass(frozen=True, slots=True)
class Write:
    """A value that the epilogue writes into the caller's tensor, the kept input ``index``.

    ``visible`` says that autograd sees the write; ``counts`` that it moves the version counter; ``only_counts`` that
    the value gets there by a write to another tensor on the same memory, which has another counter.
    """

    index: int
    visible: bool
    counts: bool
    only_counts: bool = False


SourceKind = Literal["input", "changed", "owner", "root", "output", "carrier"]


@dataclass(frozen=True, slots=True)
class Source:
    """What stands at run time for an edge of the traced autograd graph.

    ``"input"``: the kept input ``index``; ``"changed"``: the same after it changed its sizes or strides.
    ``"owner"``: the tensor that member ``index`` of the kept inputs is a view of.
    ``"root"``: the differentiable forward output ``index``. ``"output"``: the user's output ``index``, a view.
    ``"carrier"``: the carrier ``index``.
    """

    kind: SourceKind
    index: int


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
    segments
        The parts of the autograd graph, `aotlab.analysis.history`.
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
    hooks
        The hooks that the function registered: the kind, what stands for the tensor, and the hook.
    offsets_read
        The kept inputs whose offset in their storage the function looked at.
    final_offsets
        For each kept input, its offset when the function returned.
    warned
        What the function warned of.
    state_masks
        For each entry of each segment, a bit mask of the autograd nodes that it reaches and that hold saved tensors.
    watch
        The inputs and outputs that such nodes keep, with a mask of these nodes.
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
    segments: list[Segment]
    entry_tangents: list[list[int]]
    tangents: list[Tensor]
    tangent_wrappers: list[Tensor]
    slots: list[list[Exit | None]]
    connected: list[list[bool]]
    sources: dict[Edge, Source]
    full: dict[int, list[Tensor | None]]
    state_masks: list[list[int]]
    watch: dict[Source, int]
    backward_error: BaseException | None
    out_spec: Any
    out_constants: dict[int, Any]
    offsets_read: tuple[int, ...]
    returned_outputs: list[int]
    made_through: dict[int, int]
    final_offsets: list[int]
    warned: tuple[Warned, ...]
    hooks: list[tuple[HookKind, Source, Callable[..., Any] | None]]
    metadata: ViewAndMutationMeta

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

    def gets_gradient(self, k: int) -> bool:
        """Tell whether a gradient can reach the kept input ``k``."""
        return any(
            connected and way is not None and self.sources[way[0]] == Source("input", k)
            for own, flags in zip(self.slots, self.connected, strict=True)
            for way, connected in zip(own, flags, strict=True)
        )

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

    def derive(
        self, segment: int, pattern: Sequence[bool], *, autocast: bool = False, again: bool = False
    ) -> list[Tensor | None]:
        """Run a segment's backward for the tangents that are defined; None for a slot that they do not reach.

        With ``autocast`` it is run under the autocast that is on now, which then casts what the backward computes. With
        ``again`` it is run also where the result is known.

        Raises
        ------
        RefusedError
            The backward uses something that a graph cannot hold.
        Exception
            Whatever the backward of the traced program raises.
        """
        if all(pattern) and segment in self.full and not autocast and not again:
            return self.full[segment]
        part, slots = self.segments[segment], self.slots[segment]
        numbers = self.entry_tangents[segment]
        given = [self.tangent_wrappers[n] if d else None for n, d in zip(numbers, pattern, strict=True)]
        first = len(self.tape.operations)
        self.recorder.phase = "backward"
        try:
            casting = nullcontext() if autocast else internals.disable_autocast()
            with _tracing(self.recorder), EscapeGuard(), casting, torch.no_grad():
                found = differentiate(part, given)
                values = {way: value_of(gradient, "a gradient") for way, gradient in found.items()}
        finally:
            self.recorder.phase = "forward"
            if autocast:
                torch.clear_autocast_cache()  # it would keep the traced tensors, for others to find
        for operation in self.tape.operations[first:]:
            if operation.is_random:
                raise RandomOpError(
                    f"the backward draws random numbers by `{operation.target}`",
                    line=None if operation.place is None else operation.place(),
                    why="a compiled backward would draw other numbers than eager",
                )
        return [None if way is None else values.get(way) for way in slots]


@contextmanager
def _tracing(recorder: Recorder) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(internals.quiet_fake_tensors())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))  # it looks at values
        stack.enter_context(internals.saved_tensor_hooks_hidden())
        stack.enter_context(internals.functionalization())
        stack.enter_context(internals.enable_python_dispatcher())
        stack.enter_context(internals.eager_kernels())
        stack.enter_context(recorder)
        yield


def run(
    call: Call,
    dedupe: DedupeRecord,
    *,
    decompositions: dict[Any, Callable[..., Any]] | None,
    keep_input_mutations: bool,
    static_inputs: int,
    bases: Sequence[Base] = (),
) -> tuple[TraceRecord, Trace]:
    """Run the function once on fake tensors and differentiate it.

    Parameters
    ----------
    call, dedupe
        From the stages before.
    decompositions
        Ops to replace while recording.
    keep_input_mutations
        Let an inference graph write mutated inputs itself.
    static_inputs
        How many of the first inputs are parameters and buffers.
    bases
        The inputs that share memory.

    Raises
    ------
    RefusedError
        The program cannot be compiled faithfully.
    RunEagerly, TraceFailed
        Eager has to run this call.
    """
    fake_mode = FakeTensorMode(static_shapes=True)
    tape = Tape()
    recorder = Recorder(tape, fake_mode, decompositions)
    inputs = _enter_inputs(tape, recorder, call, dedupe, bases)
    values = list(call.values)
    for position, source in zip(dedupe.positions, dedupe.source, strict=True):
        values[position] = inputs[source].wrapper
    places = Places(call.target)
    warned = WarningTape()
    lifted, args, kwargs = call.rebuild(values, places.made)
    settings = global_state()
    random_state = _RandomState()
    grad_mode = torch.is_grad_enabled()
    try:
        with _tracing(recorder):
            try:
                known = {i.storage: (k, i.name, i.wrapper) for k, i in enumerate(inputs) if i.base is None}
                shared = {i.storage for i in inputs if i.base is not None}
                escapes = EscapeGuard(known, shared, Reshapes(inputs))
                with warned, escapes:
                    result = call.target.run(lifted, args, kwargs)
                left_grad_mode = torch.is_grad_enabled()
            finally:
                torch.set_grad_enabled(grad_mode)
            for item in inputs:
                item.check_attributes()
                item.take_new_edge()
            _check_containers(call, values, args, kwargs)
            leaves, names, out_spec = places.read_result(result)
            storages = StorageNumbers()
            infos = tuple(input_info(k, item, tape, storages) for k, item in enumerate(inputs))
            infos = _uncounted_writes(inputs, infos)
            for info, item in zip(infos, inputs, strict=True):
                if info.mutates_data and item.real.is_inference() and not torch.is_inference_mode_enabled():
                    # the epilogue, outside of the function's inference mode, could not write it
                    text = f"`{item.name}` was made under inference_mode and is written"
                    raise RefusedError(text, argument=item.name)
            outputs = read_outputs(tape, leaves, names, inputs, escapes.chronicle.precedes_a_write)
    except (RefusedError, RunEagerly):
        raise
    except RuntimeError as error:
        if "support functionalizing operators" in str(error):
            raise HigherOrderOpError(
                f"a custom op cannot be functionalized ({str(error).splitlines()[0][:200]})",
                why="its write could not be taken out of the graph",
                suggestion="move it out of the compiled function",
            ) from error
        if "functional tensor" in str(error):
            raise CapturedTensorError(
                "a tensor that is not an argument is written inside the function",
                why="the write would happen while tracing",
                suggestion="pass it as an argument",
            ) from error
        raise TraceFailed(f"{type(error).__name__}: {error}") from error
    except KeyboardInterrupt:
        raise  # the user's, who wants this to end
    except Untraceable as error:
        raise TraceFailed(str(error)) from error
    except BaseException as error:  # SystemExit among them: eager raises it after it did what comes before
        raise TraceFailed(_first_line(error)) from error
    finally:
        if internals.any_autocast_enabled():
            torch.clear_autocast_cache()  # it would keep the traced tensors, for others to find
        drew = random_state.restore()
        changed = [name for (name, was), (_, now) in zip(settings, global_state(), strict=True) if was != now]
        if changed:
            restore_settings(settings)
    if drew is not None:
        raise RandomOpError(
            f"the function draws from {drew}",
            why="the number would be the same at every call",
            suggestion="pass it as an argument",
        )
    if changed:
        raise EscapeError(f"the function leaves a global setting changed: {', '.join(changed)}")
    if would_raise(warned.noted):
        raise RunEagerly("a warning of the function is turned into an error")
    return _finish(
        call, dedupe, tape, recorder, fake_mode, inputs, infos, outputs, out_spec,
        keep_input_mutations=keep_input_mutations,
        static_inputs=static_inputs,
        left_grad_mode=None if left_grad_mode == grad_mode else left_grad_mode,
        offsets_read=tuple(sorted(escapes.offsets_read)),
        warned=tuple(warned.noted),
        hooks=escapes.hooks.all,
        chronicle=escapes.chronicle,
    )  # fmt: skip


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0].strip()}"


@dataclass(frozen=True, slots=True)
class _Returned:
    """One output of the forward graph: what it is, its value, and the wrapper to differentiate (None: nothing to)."""

    source: TangentSource
    index: int
    value: Tensor
    root: Tensor | None
    label: str


class _RandomState:
    """Python's and numpy's random state before a trace; torch's own generator is guarded by `EscapeGuard`."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = self._numpy_state()

    @staticmethod
    def _numpy_state() -> Any:
        numpy = sys.modules.get("numpy")  # the engine does not need numpy; the traced function may
        if numpy is None:
            return None
        state = numpy.random.get_state(legacy=False)["state"].items()
        return [(name, part.tobytes() if hasattr(part, "tobytes") else part) for name, part in state]

    def restore(self) -> str | None:
        """Put Python's state back if it changed; return which generator was drawn from."""
        drew = "`numpy.random`" if self._numpy_state() != self._numpy else None
        if random.getstate() != self._python:
            drew = "Python's `random`"
            random.setstate(self._python)
        return drew


def _enter_inputs(
    tape: Tape, recorder: Recorder, call: Call, dedupe: DedupeRecord, bases: Sequence[Base]
) -> list[Entered]:
    """Make the traced stand-ins of all inputs."""
    fake_mode = recorder.fake_mode
    tensors = [call.values[position] for position in dedupe.kept]
    found: dict[int, Entered] = {}
    for base in bases:
        names = [dedupe.names[k] for k in base.members]
        enter_base(tape, fake_mode, base, tensors[base.members[0]].device)
        with _tracing(recorder):
            entered = enter_windows(base, names, [tensors[k] for k in base.members])
        found.update(zip(base.members, entered, strict=True))
    for k, (name, real) in enumerate(zip(dedupe.names, tensors, strict=True)):
        if k not in found:
            found[k] = enter(tape, fake_mode, name, real)
    return [found[k] for k in range(len(tensors))]


def _uncounted_writes(inputs: Sequence[Entered], infos: tuple[InputAliasInfo, ...]) -> tuple[InputAliasInfo, ...]:
    """Take all windows of a base for written that was written without any version counter telling through which."""
    written: set[int] = set()
    for base in {id(i.base): i.base for i in inputs if i.base is not None}.values():
        changed = any(internals.from_functional(inputs[k].wrapper) is not inputs[k].fake for k in base.members)
        if (
            internals.has_data_mutation(base.wrapper)
            and changed
            and not any(infos[k].mutates_data for k in base.members)
        ):
            written.update(base.members)
    return tuple(replace(info, mutates_data=True) if info.index in written else info for info in infos)


def _check_containers(call: Call, values: list[Any], args: Any, kwargs: Any) -> None:
    """Refuse a function that put something into a container of the caller's."""
    now, spec = nesting.flatten((args, kwargs))
    before = values[call.lifted_count :]
    if spec != call.spec or any(a is not b for a, b in zip(now, before, strict=False)):
        raise LeakedTensorError(
            "the function changes a list or dict that it was given",
            why="a compiled call would not",
            suggestion="return the new container",
        )


def _finish(
    call: Call,
    dedupe: DedupeRecord,
    tape: Tape,
    recorder: Recorder,
    fake_mode: FakeTensorMode,
    inputs: list[Entered],
    infos: tuple[InputAliasInfo, ...],
    outputs: Outputs,
    out_spec: Any,
    *,
    keep_input_mutations: bool,
    static_inputs: int,
    left_grad_mode: bool | None,
    offsets_read: tuple[int, ...],
    warned: tuple[Warned, ...],
    hooks: Sequence[Hook],
    chronicle: Chronicle,
) -> tuple[TraceRecord, Trace]:
    """Make the tangents, differentiate, and write the joint graph."""
    finals = [internals.from_functional(i.wrapper if i.whole is None else i.whole) for i in inputs]
    returned: list[_Returned] = []
    every = _writes(inputs, infos)
    writes = [write for write in every if not write.only_counts]
    for write in writes:
        wrapper = inputs[write.index].wrapper
        root = wrapper if write.visible and wrapper.requires_grad else None
        label = f"mutated input {infos[write.index].name}"
        returned.append(_Returned(TangentSource.MUTATED_INPUT, write.index, finals[write.index], root, label))
    for i, value, root in outputs.returned:
        returned.append(_Returned(TangentSource.OUTPUT, i, value, root, outputs.infos[i].name))
    for i, (value, root) in enumerate(outputs.bases):
        returned.append(_Returned(TangentSource.INTERMEDIATE_BASE, i, value, root, f"intermediate base {i}"))
    training = any(item.root is not None for item in returned)

    write_back: list[tuple[Tensor, Tensor]] = []
    if keep_input_mutations and not training:
        # a write in the graph moves the version counter; where eager's does not, the epilogue writes
        infos = tuple(
            replace(i, keep_input_mutations=True) if i.moves_version and inputs[k].base is None else i
            for k, i in enumerate(infos)
        )
        kept = {i.index for i in infos if i.mutation_type is MutationType.MUTATED_IN_GRAPH}
        write_back = [(inputs[k].fake, finals[k]) for k in sorted(kept)]
        returned = [r for r in returned if r.source is not TangentSource.MUTATED_INPUT or r.index not in kept]
        writes = [write for write in writes if write.index not in kept]

    placeholders, sources = _placeholders(call, dedupe, tape, fake_mode, inputs, writes, training=training)
    positions = [position for position, item in enumerate(returned) if item.root is not None]
    roots = [returned[position] for position in positions]
    edges = [edge_of(item.root) for item in roots if item.root is not None]
    infos = _moving_histories(inputs, infos, edges, chronicle)
    written = {id(inputs[write.index].base) for write in every if inputs[write.index].base is not None}
    stands_for = _input_sources(inputs, written)
    seen = _seen(outputs, inputs, roots)
    known = {**stands_for, **{edge: Source("output", i) for edge, (i, _) in seen.items() if edge not in stands_for}}
    for n, edge in reversed(list(enumerate(edges))):
        known.setdefault(edge, Source("root", n))
    stepped = {edge_of(i.wrapper): k for k, i in enumerate(inputs) if infos[k].metadata_steps and i.wrapper.grad_fn}
    changed: dict[Edge, tuple[int, ...]] = {edge: () for edge in stepped if edge not in known}
    known.update({edge: Source("changed", stepped[edge]) for edge in changed})
    parts = segments(
        edges,
        list(stands_for),
        {**{edge: base for edge, (_, base) in seen.items()}, **changed},
        cuts={hook.edge for hook in hooks if hook.kind == "hook"},
        nested=any(_is_nested(i, inputs, written) for i in inputs),
    )

    tangents, infos_t = [], []
    for item in roots:
        value = item.value
        with fake_mode:
            tangent = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        tangents.append(tape.enter(tangent))
        infos_t.append(TangentInfo(source=item.source, index=item.index, spec=spec_of(tangent)))
    entries: list[list[int]] = []
    for part in parts:
        entries.append(list(part.roots))
        for edge in part.entries[len(part.roots) :]:
            shape, dtype, device = internals.edge_metadata(*edge)
            with fake_mode:
                tangent = tape.enter(torch.empty(shape, dtype=dtype, device=device))
            known[edge] = Source("carrier", len(tangents) - len(roots))
            entries[-1].append(len(tangents))
            index = len(tangents) - len(roots)
            infos_t.append(TangentInfo(source=TangentSource.CARRIER, index=index, spec=spec_of(tangent)))
            tangents.append(tangent)
    wrappers = [internals.to_functional(tangent) for tangent in tangents]
    if parts and parts[0].nodes is None:
        at = {dedupe.kept[known[way[0]].index]: way for way in parts[0].exits if known[way[0]].kind == "input"}
        first: list[Exit | None] = [None if isinstance(p, Base) else at.pop(p, None) for p in sources]
        slots = [[*first, *(way for way in parts[0].exits if way not in first)]]
    else:
        slots = [list(part.exits) for part in parts]

    bits = node_bits(parts)
    watched = [Source("input", k) for k in range(len(inputs))] + [Source("output", i) for i in outputs.tensors]
    wrappers_of = [i.wrapper for i in inputs] + list(outputs.tensors.values())
    watch = {
        source: mask
        for source, mask in zip(watched, watches(bits, wrappers_of, chronicle.kept_by), strict=True)
        if mask
    }

    metadata = ViewAndMutationMeta(
        input_info=infos,
        output_info=tuple(outputs.infos),
        intermediate_bases=tuple(spec_of(value) for value, _ in outputs.bases),
        tangents=tuple(infos_t),
        keep_input_mutations=keep_input_mutations and not training,
        grad_enabled_mutation=left_grad_mode,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        static_input_indices=tuple(range(static_inputs)),
    )
    trace = Trace(
        tape=tape,
        recorder=recorder,
        fake_mode=fake_mode,
        call_name=call.target.name,
        input_fakes=[i.fake for i in inputs],
        placeholders=placeholders,
        placeholder_sources=sources,
        forward_outputs=[item.value for item in returned],
        writes=writes,
        counted=[write.index for write in every if write.only_counts],
        write_back=write_back,
        roots=positions,
        segments=parts,
        entry_tangents=entries,
        tangents=tangents,
        tangent_wrappers=wrappers,
        slots=slots,
        connected=[[way is not None for way in own] for own in slots],
        sources=known,
        full={},
        state_masks=state_masks(parts, bits),
        watch=watch,
        backward_error=None,
        out_spec=out_spec,
        out_constants=outputs.constants,
        offsets_read=offsets_read,
        warned=warned,
        returned_outputs=[i for i, _, _ in outputs.returned],
        made_through=_made_through(outputs),
        final_offsets=[int(i.wrapper.storage_offset()) for i in inputs],
        hooks=_place_hooks(hooks, known, outputs, inputs),
        metadata=metadata,
    )
    gradients = _differentiate(trace)
    if training:
        _check_histories(trace, inputs)
    named_tangents = [(f"tangents_{n + 1}", t) for n, t in enumerate(tangents)]
    module = tape.graph(
        "Joint" if training else "Forward",
        [*placeholders, *named_tangents],
        [*trace.forward_outputs, *gradients],
        keep_impure="forward",
        write_back=write_back,
    )
    record = TraceRecord(
        tracer="aotlab",
        module=module,
        metadata=metadata,
        training=training,
        inputs=tuple(name for name, _ in placeholders),
        outputs=tuple(item.label for item in returned),
        random_ops=tuple(str(o.target) for o in tape.operations if o.is_random),
        operations=len(tape.operations),
        backward_error=None if trace.backward_error is None else str(trace.backward_error),
    )
    return record, trace


def _writes(inputs: Sequence[Entered], infos: Sequence[InputAliasInfo]) -> list[Write]:
    """Decide into which of the caller's tensors the epilogue writes.

    Of tensors that share memory those are written that the program wrote, and the others only where that leaves bytes
    of theirs out.
    """
    found: list[Write] = []
    for k, info in enumerate(infos):
        if info.mutates_data and inputs[k].base is None:
            found.append(Write(k, inputs[k].written_visibly, info.moves_version))
    for base in {id(i.base): i.base for i in inputs if i.base is not None}.values():
        if not internals.has_data_mutation(base.wrapper) or not any(
            internals.from_functional(inputs[k].wrapper) is not inputs[k].fake for k in base.members
        ):
            continue
        covered: list[tuple[int, int]] = []
        order = sorted(base.members, key=lambda k: (not infos[k].moves_version, -extent(inputs[k].real)))
        for k in order:
            real = inputs[k].real
            if overlaps_itself(real):
                continue  # eager lets nobody write it: what it shows was written through the others
            visible = inputs[k].written_visibly
            start = real.data_ptr()
            inside = any(a <= start and start + extent(real) <= b for a, b in covered)
            if inside and not visible:
                if infos[k].moves_version and not any(_count_together(inputs[w.index], inputs[k]) for w in found):
                    found.append(Write(k, visible=False, counts=True, only_counts=True))
                continue
            found.append(Write(k, visible, infos[k].moves_version))
            if internals.is_dense(real):
                covered.append((start, start + extent(real)))
    return sorted(found, key=lambda write: (write.only_counts, write.index))


def _count_together(a: Entered, b: Entered) -> bool:
    return internals.share_version(a.real, b.real)


def _placeholders(
    call: Call,
    dedupe: DedupeRecord,
    tape: Tape,
    fake_mode: FakeTensorMode,
    inputs: Sequence[Entered],
    writes: Sequence[Write],
    *,
    training: bool,
) -> tuple[list[tuple[str, Tensor]], list[int | Base]]:
    """Name the graph's inputs: the flat arguments, and for those that share memory which is written their base."""
    written = {id(inputs[write.index].base) for write in writes}
    prefix = ("primals_{}", 1) if training else ("arg{}_1", 0)
    kept_at = {p: k for k, p in enumerate(dedupe.kept)}
    fakes: list[Tensor] = []
    sources: list[int | Base] = []
    for position in dedupe.placeholders:
        k = kept_at.get(position)
        if k is None:  # a duplicate that keeps its placeholder, which nothing uses
            real = call.values[position]
            fakes.append(tape.enter(fake_mode.from_tensor(real.detach().view_as(real), static_shapes=True)))
            sources.append(position)
            continue
        base = inputs[k].base
        if base is None or id(base) not in written:
            fakes.append(inputs[k].fake)
            sources.append(position)
        elif base not in sources:
            fakes.append(base.fake)
            sources.append(base)
    return [(prefix[0].format(n + prefix[1]), fake) for n, fake in enumerate(fakes)], sources


def _is_nested(item: Entered, inputs: Sequence[Entered], written: Collection[int]) -> bool:
    """Tell whether the gradient of an input may go on to another end of the graph: to what it is a view of."""
    owner = internals.base_of(item.wrapper) if item.base is not None else None
    return owner is not None and (id(item.base) in written or any(other.wrapper is owner for other in inputs))


def _input_sources(inputs: Sequence[Entered], written: Collection[int]) -> dict[Edge, Source]:
    """Return the edges at which the traced autograd graph ends.

    What inputs are views of is among them only if one of them was written; else all gradients pass the inputs.
    """
    found = {item.edge: Source("input", k) for k, item in enumerate(inputs) if item.edge is not None}
    for base in {id(i.base): i.base for i in inputs if id(i.base) in written}.values():
        for owner, wrapper in zip(base.owners, base.owner_edges, strict=True):
            member = next(k for k in base.members if internals.base_of(inputs[k].real) is owner)
            found[wrapper] = Source("owner", member)
    return found


def _seen(
    outputs: Outputs, inputs: Sequence[Entered], roots: Sequence[_Returned]
) -> dict[Edge, tuple[int, tuple[int, ...]]]:
    """Return the edges of outputs that the epilogue makes by views: (output, roots that it is made from)."""
    number = {(item.source, item.index): n for n, item in enumerate(roots)}
    found: dict[Edge, tuple[int, tuple[int, ...]]] = {}
    for info in outputs.infos:
        leaf = outputs.tensors.get(info.index)
        if leaf is None or not info.views or info.under_no_grad or leaf.grad_fn is None:
            continue
        kind = {
            OutputType.ALIAS_OF_INPUT: TangentSource.MUTATED_INPUT,
            OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT: TangentSource.OUTPUT,
        }.get(info.output_type, TangentSource.INTERMEDIATE_BASE)
        assert info.base_idx is not None
        sources = [info.base_idx]
        if kind is TangentSource.MUTATED_INPUT and inputs[info.base_idx].base is not None:
            sources = inputs[info.base_idx].base.members  # a write to any of them may give the view its history
        made_from = tuple(number[kind, k] for k in sources if (kind, k) in number)
        found.setdefault(edge_of(leaf), (info.index, made_from))
    return found


def _made_through(outputs: Outputs) -> dict[int, int]:
    """Find the outputs whose gradients pass another output, as those of ``v[0]`` pass ``v``: they are made from it."""
    views = {i: t for i, t in outputs.tensors.items() if outputs.infos[i].views and t.grad_fn is not None}
    if len(views) < 2:
        return {}
    at = {edge_of(t): i for i, t in reversed(views.items())}
    found: dict[int, int] = {}
    for i, tensor in views.items():
        own = outputs.infos[i]
        node = tensor.grad_fn
        while node is not None:
            edges = next_edges(node)
            if len(edges) != 1:
                break
            j = at.get(edges[0])
            if j is not None and j != i:
                other = outputs.infos[j]
                assert own.views is not None
                assert other.views is not None
                same = (other.output_type, other.base_idx) == (own.output_type, own.base_idx) or (
                    other.aliases_intermediate and own.aliases_intermediate and other.base_idx == own.base_idx
                )
                if same and len(other.views) < len(own.views) and own.views[: len(other.views)] == other.views:
                    found[i] = j
                break
            node = edges[0][0]
    return found


def _place_hooks(
    hooks: Sequence[Hook], known: Mapping[Edge, Source], outputs: Outputs, inputs: Sequence[Entered]
) -> list[tuple[HookKind, Source, Callable[..., Any] | None]]:
    """Say on what each hook is registered at run time; those that no gradient can reach are left out."""
    found: list[tuple[HookKind, Source, Callable[..., Any] | None]] = []
    for hook in hooks:
        if hook.kind == "retain_grad":
            source = next((Source("input", k) for k, i in enumerate(inputs) if i.wrapper is hook.tensor), None)
            if source is None:
                source = next((Source("output", i) for i, t in outputs.tensors.items() if t is hook.tensor), None)
        else:
            source = known.get(hook.edge)
        if source is not None:
            found.append((hook.kind, source, hook.function))
    return found


def _differentiate(trace: Trace) -> list[Tensor | None]:
    """Return the gradients for all tangents together.

    If that raises, the function is compiled all the same: its backward raises when it is asked for, as in eager. What
    can be differentiated from single outputs still can; then those gradients are returned, one list after the other,
    so that the partitioner sees what their backwards need.
    """
    if not trace.training:
        return []
    gradients: list[Tensor | None] = []
    for number, part in enumerate(trace.segments):
        count = len(part.entries)
        try:
            found = trace.derive(number, [True] * count)
            trace.connected[number] = [gradient is not None for gradient in found]
            trace.full[number] = found
            gradients += found
        except RefusedError:
            raise
        except Exception as error:  # whatever the traced program's backward raises
            if "use_reentrant=True" in str(error):
                raise HigherOrderOpError(
                    "a checkpoint with use_reentrant=True is used inside the function",
                    why="it calls a backward of its own, which a graph cannot hold",
                    suggestion="pass use_reentrant=False",
                ) from error
            trace.backward_error = _without_frames(error)
            singles: list[Tensor | None] = []
            for i in range(count if count > 1 else 0):
                with suppress(Exception):
                    singles += trace.derive(number, [i == j for j in range(count)])
            reached = reachable(part)
            trace.connected[number] = [way is not None and way[0] in reached for way in trace.slots[number]]
            gradients += singles
    return gradients


def _moving_histories(
    inputs: Sequence[Entered], infos: tuple[InputAliasInfo, ...], roots: Sequence[Edge], chronicle: Chronicle
) -> tuple[InputAliasInfo, ...]:
    """Find the inputs that are used after a write that autograd does not see.

    Autograd makes the history of a view anew after any write, so that what hangs on the old one is not found from the
    view any more. The traced input is no view.
    """
    found = []
    for info, item in zip(infos, inputs, strict=True):
        unseen = info.mutates_data and info.moves_version and not item.written_visibly
        if unseen and info.requires_grad and not info.is_leaf and item.base is None and item.edge is not None:
            first = chronicle.first_write(item.wrapper)
            users = users_of(item.edge, roots)
            if any(first is None or internals.sequence_of(node) >= first for node in users):
                if internals.base_of(item.real) is not None:
                    raise RunEagerly(f"`{item.name}` is a view and is used after a write that autograd does not see")
                info = replace(info, history_moves=True)
        found.append(info)
    return tuple(found)


def _check_histories(trace: Trace, inputs: Sequence[Entered]) -> None:
    """Leave to eager what autograd makes of an input's history when its sizes change without autograd's knowledge."""
    for k, (info, item) in enumerate(zip(trace.metadata.input_info, inputs, strict=True)):
        if not info.metadata_steps:
            continue
        if item.wrapper.is_leaf and item.wrapper.shape != item.fake.shape and trace.gets_gradient(k):
            raise RunEagerly(f"`{info.name}` is a leaf that changes its shape and gets a gradient")
        if info.changes_unseen and internals.base_of(item.real) is not None:
            raise RunEagerly(f"`{info.name}` is a view that changes its sizes under no_grad: its history is made again")


def _without_frames(error: BaseException) -> BaseException:
    """Drop what would keep the traced call's tensors alive."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
