"""Stage 6, compile: pass each graph to the backend, which returns a boxed callable.

A *boxed* callable takes one list and empties it, so that it can free each input after its last use. While a compiler
runs, it can call `get_aot_compilation_context` to learn which graph it compiles.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab import config, events
from aotlab.backends.base import Backend, Boxed, CompileRequest, GraphKind, KernelSource, boxed
from aotlab.backends.states import keeping_states, with_states
from aotlab.errors import GraphInvariantError
from aotlab.ir.fx_graphs import NodeRecord, node_records, output_args, placeholders, readable
from aotlab.ir.specs import Size, StorageNumbers, SymExpr, TensorSpec, spec_of
from aotlab.partition.default import is_tangent
from aotlab.partition.partition_stage import PartitionRecord
from aotlab.trace.live_trace import Trace
from aotlab.trace.records import TraceRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGraphRecord:
    """One compiled graph.

    ``code`` and ``nodes`` are the graph as readable Python and its nodes, before the compiler changed it. ``passed``
    are the nodes after the compiler's passes; empty if the compiler changed no op. ``wrapper`` is the code that the
    compiler generated around the kernels, or None. ``compile_ns`` is the compiler's time in nanoseconds.
    """

    kind: GraphKind
    name: str
    backend: str
    code: str
    wrapper: str | None
    kernels: tuple[KernelSource, ...]
    compile_ns: int
    nodes: tuple[NodeRecord, ...]
    passed: tuple[NodeRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRecord:
    """The result of the stage: the forward and, unless it is compiled later, the backward."""

    graphs: tuple[CompiledGraphRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardRecord:
    """A backward that was compiled after this stage, when it was needed, for one pattern of defined tangents.

    ``pattern`` says for each tangent whether it is defined, that is, not None.
    """

    pattern: tuple[bool, ...]
    graph: CompiledGraphRecord


@dataclass(eq=False)
class CompilationContext:
    """Data that the graphs of one entry share: the entry's number, a name, and the backend's own state.

    ``number`` is the entry's number. ``detailed`` says whether the records contain the readable code and the nodes of
    the graphs. Only the listeners of `aotlab.events` need these, and writing them takes time.
    """

    number: int
    model_name: str = "model"
    shared: dict[str, Any] = field(default_factory=dict)
    detailed: bool = field(default_factory=events.listening)


_current: ContextVar[tuple[list[str], str, int]] = ContextVar("aotlab_graph", default=([], "model", 0))


def get_aot_compilation_context() -> tuple[list[str], str, int]:
    """Return the names of the graph that is compiled now (``["0_forward"]``), the model's name and the entry's number.

    Outside of a compilation, return ``([], "model", 0)``. Source: upstream's
    ``torch._functorch._aot_autograd.logging_utils.get_aot_compilation_context``.
    """
    names, model, number = _current.get()
    return list(names), model, number


def compile_graph(
    module: fx.GraphModule,
    kind: GraphKind,
    backend: Backend,
    trace: Trace,
    context: CompilationContext,
    visible_outputs: int,
    labels: Sequence[str] = (),
) -> tuple[Boxed, CompiledGraphRecord]:
    """Compile one graph; return the boxed callable and its record.

    ``visible_outputs`` is the number of outputs that the caller can see. ``labels`` are the names of the first outputs
    in error messages of `config.debug_assert`.
    """
    name = f"{context.number}_{kind}"
    results = len(output_args(module.graph))
    devices = with_states(module)
    inputs = placeholders(module.graph)
    # In a backward, the saved values that the forward computed are static inputs. Tangents and saved inputs of the
    # caller are not.
    if kind == "backward":
        input_fakes = [fake for _, fake in trace.inputs.placeholders if isinstance(fake, Tensor)]
        caller_storages = {internals.storage_key(fake) for fake in input_fakes if fake.layout == torch.strided}
        values = [None if is_tangent(node) else node.meta["val"] for node in inputs]
        tensors = [(i, value) for i, value in enumerate(values) if isinstance(value, Tensor)]
        storage_keys = [None if value.layout != torch.strided else internals.storage_key(value) for _, value in tensors]
        static: Sequence[int] = [
            i for (i, _), key in zip(tensors, storage_keys, strict=True) if key not in caller_storages
        ]
    else:
        static = trace.metadata.static_input_indices
    code = readable(module, f"{context.model_name}_{name}") if context.detailed else ""
    nodes = node_records(module.graph) if context.detailed else ()
    request = CompileRequest(
        module=module,
        example_inputs=tuple(node.meta["val"] for node in inputs),
        kind=kind,
        fake_mode=trace.fake_mode,
        static_inputs=tuple(static),
        visible_outputs=visible_outputs,
        graph_id=context.number,
        shared=context.shared,
    )
    # before the compiler changes the graph
    expected = _TracedOutputs(module, labels, kind) if config.debug_assert else None
    events.emit(events.GraphStarted(entry=context.number, graph=kind))
    started = time.perf_counter_ns()
    token = _current.set(([name], context.model_name, context.number))
    try:
        compiled = backend.compile(request)
    finally:
        _current.reset(token)
    compile_ns = time.perf_counter_ns() - started
    passed = node_records(module.graph) if context.detailed else ()
    record = CompiledGraphRecord(
        kind=kind,
        name=f"{context.model_name}__{name}",
        backend=backend.name,
        code=code,
        wrapper=backend.source(compiled),
        kernels=tuple(replace(kernel, graph=name) for kernel in backend.kernels(compiled)),
        compile_ns=compile_ns,
        nodes=nodes,
        passed=passed if [each.target for each in passed] != [each.target for each in nodes] else (),
    )
    call = boxed(compiled) if expected is None else expected.checked(boxed(compiled))
    return (keeping_states(call, devices, results) if devices else call), record


def run(
    traced: TraceRecord, partition: PartitionRecord, trace: Trace, backend: Backend, context: CompilationContext
) -> tuple[CompileRecord, Boxed, Boxed | None]:
    """Compile the forward and, unless that is deferred to its first run, the backward."""
    kind: GraphKind = "forward" if trace.training else "inference"
    labels = [f"`{label}`" for label in traced.outputs]
    is_deferred = config.lazy_backward or not trace.is_whole or (backend.lazy_backward and not context.detailed)
    with torch.no_grad(), internals.disable_autocast():
        visible = partition.num_forward_outputs
        forward, record = compile_graph(partition.forward, kind, backend, trace, context, visible, labels)
        if partition.backward is None or is_deferred:
            return CompileRecord(graphs=(record,)), forward, None
        labels = trace.gradient_labels(0)
        backward, late_record = compile_graph(partition.backward, "backward", backend, trace, context, 0, labels)
    return CompileRecord(graphs=(record, late_record)), forward, backward


# --- `config.debug_assert`: compare the outputs of compiled graphs with the traced ones ------------------------------


class _TracedOutputs:
    """The traced specs of a graph's outputs, with which `config.debug_assert` compares the outputs of each run.

    A spec also says with which other outputs or inputs an output shares memory. ``labels`` are the names of the first
    outputs. The other outputs are saved values, whose strides and shared memory are not checked.
    """

    def __init__(self, module: fx.GraphModule, labels: Sequence[str], kind: GraphKind) -> None:
        storages = StorageNumbers()
        self._kind = kind
        self._visible = len(labels)
        values = [node.meta["val"] for node in placeholders(module.graph)]
        self._inputs = [storages.number(value) if isinstance(value, Tensor) else None for value in values]
        self._outputs: list[tuple[str, TensorSpec] | None] = []
        for i, node in enumerate(output_args(module.graph)):
            value = node.meta["val"] if isinstance(node, fx.Node) else None
            label = labels[i] if i < len(labels) else f"the saved value `{node}`"
            self._outputs.append((label, spec_of(value, storages)) if isinstance(value, Tensor) else None)

    def checked(self, compiled: Boxed) -> Boxed:
        """Wrap a compiled graph so that it raises `GraphInvariantError` if an output differs from the trace."""

        def call(inputs: list[Any]) -> Sequence[Any]:
            # keeps the inputs alive, so that no output can get the storage key of a freed input
            inputs_alive = [*inputs]
            outputs = compiled(inputs)
            owners: dict[int, tuple[int | None, str]] = {}
            for i, (value, number) in enumerate(zip(inputs_alive, self._inputs, strict=True)):
                if isinstance(value, Tensor) and value.numel():
                    owners.setdefault(internals.storage_key(value), (number, f"input {i} of the graph"))
            for i, (value, promise) in enumerate(zip(outputs, self._outputs, strict=True)):
                if promise is not None:
                    self._check(value, *promise, visible=i < self._visible, owners=owners)
            return outputs

        call._boxed_call = True  # type: ignore[attr-defined]  # the mark that upstream's users look for
        return call

    def _check(
        self, value: Any, label: str, spec: Any, *, visible: bool, owners: dict[int, tuple[int | None, str]]
    ) -> None:
        if not isinstance(value, Tensor):
            raise self._broken(label, f"is a `{type(value).__qualname__}`, not a tensor")
        actual: dict[str, object] = {"shape": tuple(value.shape), "dtype": value.dtype, "device": value.device}
        shape = _with_symbols(spec.shape, value.shape)
        traced: dict[str, object] = {"shape": shape, "dtype": spec.dtype, "device": spec.device}
        if visible and self._kind != "backward":  # autograd takes gradients of any strides
            strides = value.stride(), _with_symbols(spec.stride, value.stride())
            actual["strides"], traced["strides"] = (_strides(each, value.shape) for each in strides)
            actual["requires_grad"], traced["requires_grad"] = value.requires_grad, False  # graphs run under no_grad
        for key, fact in actual.items():
            if fact != traced[key]:
                raise self._broken(label, f"has {key} {fact}, but {traced[key]} in the graph")
        if value.numel() and visible:
            number, owner = owners.setdefault(internals.storage_key(value), (spec.storage, label))
            if number != spec.storage:
                raise self._broken(label, f"shares memory with {owner}, but is a new tensor in the graph")

    def _broken(self, label: str, difference: str) -> GraphInvariantError:
        return GraphInvariantError(
            f"{label} of the compiled {self._kind} {difference}: the compiler does not respect the graph"
        )


def _with_symbols(traced: Sequence[Size], actual: Sequence[int]) -> tuple[Size, ...]:
    """Return the traced sizes or strides, with the actual number in place of each symbolic size."""
    pairs = zip_longest(traced, actual)
    return tuple(
        [actual_size if isinstance(size, SymExpr) else size for size, actual_size in pairs if size is not None]
    )


def _strides(stride: Sequence[Size], shape: Sequence[int]) -> tuple[Size, ...]:
    """Return the strides of dimensions with more than one element; an empty tuple for an empty tensor."""
    return () if 0 in shape else tuple(step for step, size in zip(stride, shape, strict=True) if size > 1)
