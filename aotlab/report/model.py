"""The report: what happened, as plain frozen records that can be written, read and compared.

A `Report` holds no tensors, no graphs and no live objects: strings, numbers, and records of these. It is what the
notebook's widgets, the extension, the run history and the HTML page read, so its JSON form is a promise. Schema
version 1 is additive: later aotlabs may add fields, readers ignore fields that they do not know, and a field that is
missing takes its default.

    Report
    ├── cell, environment
    ├── frames                 one per function that was compiled or called
    │   ├── calls              counters, and the last thousand one by one
    │   ├── refusals           what could not be compiled, and what happened instead
    │   └── graphs             one per compiled entry
    │       ├── stages         wall time, size, and the code that the stage handed on
    │       ├── nodes          per stage, with the user's line
    │       ├── inputs, outputs, storages, autograd, saved
    │       ├── compiled       what the backend compiled; kernels
    │       └── guards
    ├── graph_break_rows
    ├── timing_rows            filled by whoever measured
    └── verification_rows      filled by whoever verified

All sizes in bytes say so in their name; all times are in nanoseconds. Times that say ``at_ns`` count from the
beginning of the recording.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from aotlab.errors import UsageError, UserLine
from aotlab.ir.specs import Size
from aotlab.report.codec import ReportFormatError, decode, encode, schema
from aotlab.report.text import known_size, sizes
from aotlab.report.views import DRAWING, Views

if TYPE_CHECKING:
    from aotlab.report.collect import Recording

VERSION = 1
MIME_TYPE = "application/vnd.aotlab.report.v1+json"
SCHEMA_ID = "urn:aotlab:report:v1"

#: The types of tensors that need no word.
PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter")

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that took part.

    Attributes
    ----------
    kind
        ``"cpu"``, ``"cuda"`` and so on.
    index
        Which of its kind; None for the CPU.
    name
        What the vendor calls it.
    """

    kind: str
    index: int | None = None
    name: str = ""

    def __str__(self) -> str:
        place = self.kind if self.index is None else f"{self.kind}:{self.index}"
        return f"{place} ({self.name})" if self.name else place


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """One of the engine's switches, as it was set.

    Attributes
    ----------
    name
        Its name in `aotlab.config`.
    value
        Its value; the repr of values that are not plain.
    """

    name: str
    value: bool | int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where the report was made.

    Attributes
    ----------
    aotlab, torch, python
        Versions.
    platform
        Operating system and machine.
    threads
        How many threads torch uses for one CPU op.
    devices
        The CPU, and accelerators that the process had used.
    config
        The engine's switches when the recording began.
    """

    aotlab: str
    torch: str
    python: str
    platform: str
    threads: int | None = None
    devices: tuple[Device, ...] = ()
    config: tuple[Switch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerTensor:
    """A tensor inside of a wrapper subclass.

    Attributes
    ----------
    name
        The attribute that holds it.
    tensor
        What it looks like.
    """

    name: str
    tensor: TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What a tensor looks like; `aotlab.ir.specs.TensorSpec` in plain values.

    Attributes
    ----------
    dtype, device, layout
        As torch prints them, without ``torch.``.
    shape, stride
        In elements, outermost dimension first.
    offset, byte_offset
        Where it begins in its storage, in elements and in bytes.
    nbytes
        The bytes that its elements take.
    requires_grad, is_leaf
        As autograd had them.
    type_name
        The qualified name of its Python type.
    inner
        The tensors inside of a wrapper subclass; its ``nbytes`` are theirs together.
    """

    dtype: str
    device: str
    layout: str = "strided"
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    offset: Size = 0
    byte_offset: Size = 0
    nbytes: Size = 0
    requires_grad: bool = False
    is_leaf: bool = True
    type_name: str = "torch.Tensor"
    inner: tuple[InnerTensor, ...] = ()

    def __str__(self) -> str:
        return f"{self.dtype}{sizes(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A piece of code that a stage handed on.

    Attributes
    ----------
    title
        What it is, for example ``"joint graph"``.
    language
        ``"python"``, ``"c++"``, ``"triton"`` or ``"extern"``.
    text
        The code.
    """

    title: str
    language: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the pipeline.

    Attributes
    ----------
    name
        Its name in `aotlab.pipeline`.
    duration_ns
        Wall time, without that of backwards which were derived meanwhile: they are stages of their own.
    node_count
        How many ops the graph that it handed on has; None where there is no graph.
    summary
        What it did, in a clause.
    codes
        The graphs or the program that it handed on, readable.
    """

    name: str
    duration_ns: int
    node_count: int | None = None
    summary: str = ""
    codes: tuple[Code, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a graph, and where it comes from.

    Attributes
    ----------
    stage, part
        The stage that handed it on, and which of its graphs holds it (``"joint"``, ``"forward"``, …).
    name, op, target
        As fx has them; ``target`` is the op's full name.
    phase
        ``"forward"`` or ``"backward"``: during which half of the trace it was recorded.
    dtype, shape, device, nbytes
        Its value, where that is a tensor.
    inputs
        The names of the nodes that it reads.
    users
        How many nodes read it.
    line
        The user's line that caused it; for a node of the backward, that of the forward op that it differentiates.
    """

    stage: str
    part: str
    name: str
    op: str
    target: str
    phase: str
    dtype: str | None = None
    shape: tuple[Size, ...] | None = None
    device: str | None = None
    nbytes: Size | None = None
    inputs: tuple[str, ...] = ()
    users: int = 0
    line: UserLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholder:
    """What a graph takes, and what the user calls it.

    Attributes
    ----------
    name
        Its name in the code of all stages: ``"primals_3"``, ``"tangents_1"``.
    user_name
        The argument's name; ``"grad_of_loss"`` for the gradient of an output, ``"base_of_x"`` for the memory that
        ``x`` shares with others; ``"x.size(0)"`` for a size that varies, ``"s"`` for a number.
    value
        What a size or a number was in the traced call; empty for tensors.
    kind
        The argument's (``"parameter"``, ``"buffer"``, ``"input"``, ``"gradient"``), ``"base"``, ``"size"``,
        ``"number"`` or ``"tangent"``; empty in older reports.
    """

    name: str
    user_name: str
    value: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One value that the traced graph returns, or writes into an input itself.

    Attributes
    ----------
    name
        The node's name in its code.
    kind
        ``"mutated parameter"``, ``"mutated buffer"``, ``"mutated input"``, ``"output"``, ``"base"`` (of which outputs
        are views) or ``"gradient"``.
    target
        The argument that gets it for its new value or as its gradient, or the output's name; of a gradient also another
        node of those that a call hangs into the caller's autograd graph: ``"node 1"``.
    in_graph
        Whether the graph writes the argument itself, and does not return the value.
    """

    name: str
    kind: str
    target: str
    in_graph: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One argument, and what the function did to it.

    Attributes
    ----------
    name
        The caller's name for it: ``"x"``, ``"args[0]['w']"``, ``"model.weight"``.
    kind
        ``"parameter"``, ``"buffer"``, ``"input"`` or ``"python"``; of what a cell changed outside of its graphs
        ``"outside"``, ``"alias"`` (through another name) or ``"new"`` (a gradient that there was not before);
        ``"gradient"`` for what stands in the graph for a gradient that is made of other parts than its tensor.
    value
        The repr of an argument that is no tensor; of a wrapper, what it says of itself besides its parts.
    tensor
        What it looked like when the function was called. Sizes that vary are symbols.
    varies
        Whether the graph serves other sizes of it, or other numbers, too.
    storage
        Its storage in this graph's ``storages``; inputs with the same number share memory.
    duplicate_of
        The name of the earlier argument that is the very same tensor.
    overlaps
        The names of other arguments whose bytes it shares.
    mutates_data, mutates_metadata, mutates_storage
        Its values changed; its sizes, strides or offset changed; it was given other memory. None: not known,
        because the graph was never traced.
    mutation_hidden_from_autograd
        Every write went through ``detach()`` or the like.
    mutation_under_no_grad
        Every write happened under ``no_grad`` or ``inference_mode``.
    mutation_type
        ``"not mutated"``, ``"mutated in graph"`` or ``"mutated out of graph"`` (the epilogue writes it).
    requires_grad_after
        ``requires_grad`` when the function had returned.
    steps
        What the function did in place to its sizes, strides or history, as code: ``"t_()"``.
    synthetic_base
        The number, within the graph, of the tensor that the graph takes in place of this input and the others whose
        memory or history it shares, because one of them is mutated.
    part_of
        The name of the wrapper that it is an attribute of, in a row of its own above; empty if it is an argument.
    placeholder
        The graph's input that stands for it: ``"primals_3"``; empty for a wrapper, which stands for its parts.
    gradient
        The node of the traced graph that is its gradient; several where autograd sums them.
    """

    name: str
    kind: str
    value: str | None = None
    tensor: TensorInfo | None = None
    varies: bool = False
    storage: int | None = None
    duplicate_of: str | None = None
    overlaps: tuple[str, ...] = ()
    mutates_data: bool | None = None
    mutates_metadata: bool | None = None
    mutates_storage: bool | None = None
    mutation_hidden_from_autograd: bool | None = None
    mutation_under_no_grad: bool | None = None
    mutation_type: str | None = None
    requires_grad_after: bool | None = None
    steps: tuple[str, ...] = ()
    synthetic_base: int | None = None
    part_of: str = ""
    placeholder: str = ""
    gradient: str = ""

    @property
    def mutated(self) -> bool:
        """Whether anything about it changed."""
        return bool(self.mutates_data or self.mutates_metadata or self.mutates_storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One output, and what it shares memory with.

    Attributes
    ----------
    name
        For example ``"out[0]"``.
    output_type
        One of the seven of `aotlab.ir.metadata.OutputType`, in words.
    raw_type
        The qualified name of its Python type.
    tensor
        What it looks like; None if it is no tensor.
    storage
        Its storage in this graph's ``storages``.
    base_kind, base
        What it is made from: ``"input"``, ``"intermediate"`` or ``"output"``, and that one's name.
    views
        The views that lead from the base to it, as code (``"x.t()"``).
    relation
        The same as a sentence.
    requires_grad
        Whether it requires grad.
    part_of
        The name of the wrapper that it is an attribute of; of the base of views, an output that is one.
    node
        The node of the traced graph that returns it.
    tangent
        The graph's input that is its gradient: ``"tangents_1"``.
    """

    name: str
    output_type: str
    raw_type: str
    tensor: TensorInfo | None = None
    storage: int | None = None
    base_kind: str | None = None
    base: str | None = None
    views: str | None = None
    relation: str = ""
    requires_grad: bool = False
    part_of: str = ""
    node: str = ""
    tangent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPart:
    """Some consecutive lines of a cell that ran in one way.

    Attributes
    ----------
    first_line, last_line
        Where, counted from 1; the magic's own line counts.
    how
        ``"compiled"`` (some of it by compiled graphs), ``"eager"`` (handed to the compiler, which compiled nothing of
        it), ``"python"`` (plain Python, which was not handed to the compiler) or ``"not run"``.
    frames
        The names of the report's frames that hold its graphs.
    reason
        Why it, or some of it, is not compiled; empty if all of it is.
    compared
        With what compiled lines were compared: ``"python"`` (their own Python, run eagerly on copies), ``"graph"``
        (only the graph that Dynamo captured of them) or ``"nothing"``; empty for other lines, and in older reports.
    ways
        Of lines that are compiled only in part how each ran: ``"compiled"``, ``"in part"``, ``"eager"``, or empty for a
        line of a branch of which no graph holds anything; empty as a whole where that is not known.
    """

    first_line: int
    last_line: int
    how: str
    frames: tuple[str, ...] = ()
    reason: str = ""
    compared: str = ""
    ways: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The notebook cell that was compiled.

    Attributes
    ----------
    source
        Its text, as the user wrote it, the magic's line included.
    identifier
        The front end's id of the cell.
    execution_count
        The number in ``In [n]``.
    options
        What stood behind the magic's name.
    kind
        ``"statements"``, or ``"definitions"`` where the cell only defines functions, which compile when they are
        called.
    error
        The exception that ended the cell, as one line; None if it ran to its end.
    error_line
        The line of the cell that it came from; None if nobody knows.
    parts
        How its lines ran, in order.
    mutated_outside
        Tensors that the notebook held before the cell, and that the cell changed outside of every compiled graph: in
        Python, or while autograd accumulated gradients; and their gradients that are new.
    """

    source: str
    identifier: str | None = None
    execution_count: int | None = None
    options: str = ""
    kind: str = "statements"
    error: str | None = None
    error_line: int | None = None
    parts: tuple[CellPart, ...] = ()
    mutated_outside: tuple[Input, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The bytes of a storage that one tensor reaches.

    Attributes
    ----------
    name
        The tensor's.
    role
        ``"input"`` or ``"output"``.
    start, stop
        The first byte and the one after the last; with strides, not all bytes between belong to the tensor.
        None where they are symbolic.
    mutated
        Whether the function writes it. None: not known, because the graph was never traced.
    writes, may_write
        How many of its bytes are written, None where that is not known; and how many more may be, as the values of an
        index or a mask say.
    part_of
        The argument or output that is a wrapper around it.
    """

    name: str
    role: str
    start: int | None
    stop: int | None
    mutated: bool | None = False
    writes: int | None = None
    may_write: int = 0
    part_of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Bytes of a storage that the function writes: a run of bytes, repeated in steps.

    Attributes
    ----------
    start, length
        The first byte of the first run, and how many bytes each has.
    counts, steps
        How often it is repeated, and with how many bytes from one to the next, dimension by dimension, the outermost
        first.
    certain
        False if only some of them are written: values say which, or it is not known.
    """

    start: int
    length: int
    counts: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One piece of memory that inputs and outputs live in.

    Attributes
    ----------
    number
        Its number, unique in the report; a storage that two graphs know has one in each.
    owner
        ``"input"`` (the caller's), ``"intermediate"`` (made by the graph, several outputs may share it) or
        ``"output"`` (made by the graph for one output).
    nbytes
        Its size; None where it is not known.
    device
        Where it is.
    spans
        The tensors in it.
    written
        What of it the function writes; None if nothing is known of it.
    """

    number: int
    owner: str
    nbytes: Size | None
    device: str
    spans: tuple[Span, ...] = ()
    written: tuple[Written, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One value that the forward keeps for the backward.

    Attributes
    ----------
    name
        The node's name.
    tensor
        What it looks like.
    nbytes
        The bytes that its elements take.
    reason
        Why it is kept rather than computed again.
    is_input, is_output
        It is an input of the function or an output, so that keeping it takes no new memory.
    shares
        The name of another saved value whose memory it lies in, so that keeping both takes no more than that.
    used_by
        The nodes of the backward that read it.
    line
        The user's line that made it.
    """

    name: str
    tensor: TensorInfo
    nbytes: Size
    reason: str
    is_input: bool = False
    is_output: bool = False
    shares: str = ""
    used_by: tuple[str, ...] = ()
    line: UserLine | None = None

    @property
    def new_bytes(self) -> int:
        """The memory that keeping it takes, in bytes: none for what the caller holds, or what another value holds."""
        return 0 if self.is_input or self.is_output or self.shares else known_size(self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutogradNode:
    """One node that a call hangs into the caller's autograd graph.

    A call has several where its outputs hang on each other, or reach different inputs: then a gradient passes what the
    caller can see as it does in eager.

    Attributes
    ----------
    number
        Its number within the graph, from 0; the one that runs first in the forward comes first.
    makes
        The outputs, mutated inputs and intermediate bases that come out of it.
    goes_to
        Where its gradients go: inputs, outputs, other nodes.
    """

    number: int
    makes: tuple[str, ...] = ()
    goes_to: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel that the backend generated or calls.

    Attributes
    ----------
    name
        Its name.
    language
        ``"triton"``, ``"c++"``, ``"python"`` or ``"extern"``.
    graph_name, kind
        The compiled graph that it belongs to, and which that is: ``"forward"``, ``"backward"`` or ``"inference"``.
    source
        Its source.
    nodes
        The nodes of that graph which it computes; empty where the backend does not say so.
    registers, shared_bytes, spilled_bytes, blocks
        Of a rehearsed kernel: registers of a thread, shared memory of a block, what a thread spills, and how many
        blocks are launched. None where the kernel was not compiled for a card that is not there.
    bytes_read, bytes_written
        Of a rehearsed kernel: the bytes of the tensors that a call is given to read, and to write.
    """

    name: str
    language: str
    graph_name: str
    kind: str
    source: str
    nodes: tuple[str, ...] = ()
    registers: int | None = None
    shared_bytes: int | None = None
    spilled_bytes: int | None = None
    blocks: int | None = None
    bytes_read: int | None = None
    bytes_written: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledGraph:
    """One graph that the backend compiled.

    Attributes
    ----------
    kind
        ``"forward"``, ``"backward"`` or ``"inference"``.
    name
        For example ``"model__0_forward_1"``.
    backend
        The compiler's name.
    compile_ns
        How long the compiler took.
    node_count
        How many ops it was given.
    pattern
        For a backward that was derived for a pattern of tangents: which tangents were defined. Empty: all.
    """

    kind: str
    name: str
    backend: str
    compile_ns: int
    node_count: int = 0
    pattern: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One assumption of a compiled entry.

    Attributes
    ----------
    kind
        What is compared: ``"dtype"``, ``"identity"``, ``"grad mode"`` and so on.
    subject
        What it is about: an argument's name, or ``"global"``.
    sentence
        The assumption in words.
    line
        The line of the program that assumes it of a size or a number, where that is known.
    """

    kind: str
    subject: str
    sentence: str
    line: UserLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What the tables of a graph held before they were cut to fit a notebook.

    Attributes
    ----------
    stages, stages_ns
        The stages, and what they took together.
    nodes
        The nodes of the trace.
    inputs, mutated
        The arguments, and how many different ones were mutated.
    outputs, aliased
        The outputs, and how many share memory with something else.
    storages, shared, storage_bytes
        The storages, how many hold several tensors, and their bytes together.
    saved, saved_bytes, held_bytes
        The values that are saved for the backward, the memory that this takes, and that of values which the caller
        holds anyway.
    kernels, kernels_called
        The kernels, and how many of them are a library's.
    guards
        The guards.
    """

    stages: int = 0
    stages_ns: int = 0
    nodes: int = 0
    inputs: int = 0
    mutated: int = 0
    outputs: int = 0
    aliased: int = 0
    storages: int = 0
    shared: int = 0
    storage_bytes: int = 0
    saved: int = 0
    saved_bytes: int = 0
    held_bytes: int = 0
    kernels: int = 0
    kernels_called: int = 0
    guards: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Why an earlier graph did not serve a call: one of its guards failed.

    Attributes
    ----------
    graph
        The earlier graph's index; None if it was made of no graph of this report.
    subject, before, after
        What the guard is about, what the earlier graph expects, and what the call had; empty if that cannot be told.
    sentence
        The same as a sentence.
    line
        The line of the program that made the guard.
    suggestion
        What would avoid it.
    """

    graph: int | None = None
    subject: str = ""
    before: str = ""
    after: str = ""
    sentence: str
    line: UserLine | None = None
    suggestion: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One compiled entry of a frame: what the pipeline did, stage by stage.

    Attributes
    ----------
    index
        Its number within the frame.
    entry
        The engine's number for it, unique in the process that recorded it.
    status
        ``"compiled"``, ``"refused"``, ``"compiling"`` (the recording ended first) or ``"earlier"`` (compiled before
        the recording began, so that only its calls are known).
    frontend, backend
        Who captured the function, who compiled the graphs.
    tracer
        The tracer that ran.
    misses
        Why each earlier graph did not serve the call, the nearest first; empty for the first graph.
    training
        Whether a backward was made.
    grad_mode
        Whether grad mode was on at the call.
    at_ns, duration_ns
        When it was compiled, counted from the beginning of the recording, and how long that took.
    calls
        How many calls it served while recording.
    stages, nodes, placeholders, results, inputs, outputs, storages, autograd, saved, compiled, kernels, guards
        See the records of those names.
    random_ops
        The random ops in it.
    static_since
        Why sizes or numbers that were to vary do not: the graph is for those of its first call alone.
    backward_error
        What differentiating the function raised, in older reports; such a function runs eagerly now.
    reused
        Whether it was compiled before this run: the cell ran unchanged for a second time.
    counts
        What its tables held before they were cut; None if they are whole.
    """

    index: int
    entry: int
    status: str
    frontend: str = ""
    backend: str = ""
    tracer: str | None = None
    misses: tuple[Miss, ...] = ()
    training: bool | None = None
    grad_mode: bool | None = None
    at_ns: int | None = None
    duration_ns: int | None = None
    calls: int = 0
    stages: tuple[Stage, ...] = ()
    nodes: tuple[Node, ...] = ()
    placeholders: tuple[Placeholder, ...] = ()
    results: tuple[Result, ...] = ()
    inputs: tuple[Input, ...] = ()
    outputs: tuple[Output, ...] = ()
    storages: tuple[Storage, ...] = ()
    autograd: tuple[AutogradNode, ...] = ()
    saved: tuple[Saved, ...] = ()
    compiled: tuple[CompiledGraph, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    guards: tuple[Guard, ...] = ()
    random_ops: tuple[str, ...] = ()
    static_since: str = ""
    backward_error: str | None = None
    reused: bool = False
    counts: Counts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call.

    Attributes
    ----------
    at_ns
        When it ended, counted from the beginning of the recording.
    duration_ns
        How long it took, compilation included if it compiled.
    graph
        The graph that served it; None if it ran eagerly.
    compiled
        Whether it ran compiled code.
    cold
        Whether it waited for a compilation.
    """

    at_ns: int
    duration_ns: int
    graph: int | None
    compiled: bool
    cold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """The calls of one frame while recording.

    Attributes
    ----------
    total, compiled, eager
        How many there were, how many ran compiled code, how many ran eagerly.
    recent
        The last ones, at most a thousand, oldest first.
    """

    total: int = 0
    compiled: int = 0
    eager: int = 0
    recent: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A compilation that did not come about.

    Attributes
    ----------
    graph
        The graph's index in its frame.
    error
        The exception's class.
    reason
        The key under which refusals are counted, for example ``"RandomOp"``.
    message
        What the exception says.
    argument
        The argument concerned.
    line
        The user's line concerned.
    outcome
        ``"raised"`` or ``"ran eagerly"``.
    at_ns
        When, counted from the beginning of the recording.
    """

    graph: int
    error: str
    reason: str
    message: str
    argument: str | None = None
    line: UserLine | None = None
    outcome: str
    at_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """What a part of the recording's time went into; all rows together are its ``duration_ns``.

    Attributes
    ----------
    kind
        A stage's name; ``"dynamo"`` (capture), ``"between"`` (guards, and what lies between stages), ``"backward"``
        (compiled after the forward), ``"verification"``, ``"timing"``, ``"recording"`` (the report itself),
        ``"compiled"`` and ``"eager"`` (calls), ``"rest"`` (Python and all else).
    duration_ns
        The time, without that of other rows which lies within it.
    count
        How often.
    """

    kind: str
    duration_ns: int
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameCounts:
    """What a frame held before the report was cut.

    Attributes
    ----------
    graphs, refusals
        How many there were.
    compile_ns
        What compiling the graphs took.
    """

    graphs: int = 0
    refusals: int = 0
    compile_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One function that was compiled or called.

    Attributes
    ----------
    name
        Its name, unique in the report.
    function
        Its qualified name.
    line
        Where it is defined; of what Dynamo captured, where its first capture ended.
    graphs, refusals, calls
        See the records of those names.
    limit
        Which limit of Dynamo's it has reached, so that calls which none of its graphs fits run eagerly, and what
        would help; empty if it has reached none.
    counts
        What it held before the report was cut; None if it is whole.
    """

    name: str
    function: str
    line: UserLine | None = None
    graphs: tuple[Graph, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    calls: Calls = Calls()
    limit: str = ""
    counts: FrameCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBreakRow:
    """A place where Dynamo split a function, or left it to Python.

    Attributes
    ----------
    frame
        Where, as ``file:line``; empty if nobody knows.
    where
        The same as a reader knows it: a line of the report's cell by its number, of another cell by both numbers.
    line
        The same with its function and its code.
    cell_line
        The line of the report's cell that led there; None if none did.
    words
        Why, in a clause.
    reason
        As Dynamo words it.
    at_ns
        When, counted from the beginning of the recording.
    """

    frame: str
    where: str = ""
    line: UserLine | None = None
    cell_line: int | None = None
    words: str = ""
    reason: str
    at_ns: int = 0


#: Of timings is told how far the same code, timed twice, came from itself, where that is more than this.
QUIET = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How long one engine takes beside another, formed within each round.

    Attributes
    ----------
    over
        The other engine: ``"eager"`` or ``"upstream"``.
    median, p10, p90
        The median over the rounds, and the range of eight rounds in ten.
    noise
        Why it is no more than noise, as a clause; empty if neither its spread nor the A/A ratio says so.
    """

    over: str
    median: float
    p10: float
    p90: float
    noise: str = ""

    def __str__(self) -> str:
        """Write the ratio, and before it whether it is noise."""
        other = "torch.compile" if self.over == "upstream" else self.over
        return f"{'noise: ' if self.noise else ''}{self.median:.2f}× {other} ({self.p10:.2f}–{self.p90:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRow:
    """One measurement: many repeats of one phase under one engine.

    Attributes
    ----------
    engine
        ``"eager"``, ``"upstream"`` (stock ``torch.compile``) or ``"aotlab"``.
    phase
        ``"forward"``, ``"backward"`` or ``"total"``, which is the sum of both within each call.
    median_ns, min_ns, p10_ns, p90_ns
        Statistics over the repeats.
    repeats
        How many there were.
    device
        Where it ran.
    frame, graph
        What was measured, where it is one of this report's.
    ratios
        How it compares with eager, and with stock ``torch.compile``.
    again
        The A/A ratio: how many times as long the same code took when it was timed a second time; 0 if it was not.
    """

    engine: str
    phase: str
    median_ns: int
    min_ns: int
    p10_ns: int
    p90_ns: int
    repeats: int
    device: str = "cpu"
    frame: str | None = None
    graph: int | None = None
    ratios: tuple[Ratio, ...] = ()
    again: float = 0.0

    @property
    def noise(self) -> str:
        """Why its ratios may be noise; empty if nothing says so."""
        return "; ".join(dict.fromkeys(each.noise for each in self.ratios if each.noise))

    def beside(self, ratio: Ratio) -> str:
        """Say how much noise there is beside a ratio that is more than that; empty if it is little, or not known."""
        off = abs(self.again - 1) if self.again > 0 else 0.0
        return f"{off:.0%} noise" if off > QUIET and not ratio.noise else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRow:
    """One observable of one call, compared with eager's.

    Attributes
    ----------
    engine
        ``"aotlab"`` or ``"upstream"``.
    kind
        What was compared: ``"value"``, ``"stride"``, ``"storage"``, ``"gradient"`` and so on.
    subject
        Of what: an input's or output's name.
    equal
        Whether both agree, within the tolerance rule.
    expected, actual
        What eager and the engine had, as short texts.
    sentence
        The difference in words; empty if there is none.
    call
        Which call of the verification it belongs to, counted from 1.
    frame, graph
        What was compared, where it is one of this report's.
    against
        With what: ``"python"`` (the user's own code, run eagerly) or ``"graph"`` (the graph that Dynamo captured of it,
        run eagerly); empty in older reports.
    """

    engine: str
    kind: str
    subject: str
    equal: bool
    expected: str = ""
    actual: str = ""
    sentence: str = ""
    call: int | None = None
    frame: str | None = None
    graph: int | None = None
    against: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What happened to the user's tensors: one line of the page's head.

    Attributes
    ----------
    key
        What it is about, for programs: ``"error"``, ``"limit"``, ``"mutated"``, ``"new"``, ``"aliases"``,
        ``"varies"``, ``"static"`` or ``"saved"``.
    title
        The same, for readers.
    sentence
        What happened.
    """

    key: str
    title: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The head of the page, made before anything was cut from the report.

    Attributes
    ----------
    sentence
        The line.
    state
        ``"verified"``, ``"unverified"``, ``"different"``, ``"partly"`` or ``"nothing"``; see
        `aotlab.report.verdict.Verdict`.
    facts
        What was mutated, what shares memory, what is saved for the backward.
    frames
        How many functions were compiled or called.
    compared, different
        How many observables were compared with eager, and how many of them differ.
    status
        The line in a few words: ``"equal to eager"``.
    graphs, recompiles, refused
        How many graphs served, how many were made because no earlier one did, and how many were refused.
    mutated, new, outside
        How many tensors changed, how many gradients are new, and how many of both are told of outside of the graphs.
    breaks, eager_lines
        How many graph breaks there were, and how many lines of the cell ran eagerly.
    speed
        How the slowest graph compares with eager, ``"3.8× faster"``; empty if nothing was timed.
    counts
        The counts of all graphs, added up.
    """

    sentence: str
    state: str
    facts: tuple[Fact, ...] = ()
    frames: int = 0
    compared: int = 0
    different: int = 0
    status: str = ""
    graphs: int = 0
    recompiles: int = 0
    refused: int = 0
    mutated: int = 0
    new: int = 0
    outside: int = 0
    breaks: int = 0
    eager_lines: int = 0
    speed: str = ""
    counts: Counts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Views):
    """What happened while something was compiled and run.

    Reports come from `Report.record` and from `Report.load`. The tables (``report.inputs`` and so on) are pandas
    DataFrames made on demand; `describe` documents their columns.

    Attributes
    ----------
    version
        The version of this model: 1.
    name
        What the recorder called it.
    identifier
        What the recording process calls it, unique; a front end asks for the live report by it.
    created
        When the recording began, as ISO 8601 with the offset from UTC.
    duration_ns
        How long the recording took.
    cell
        The notebook cell, if it was one.
    environment
        Versions, devices, switches.
    frames
        The functions that were compiled or called.
    graph_break_rows, time_rows, timing_rows, verification_rows
        What the tables ``graph_breaks``, ``time``, ``timings`` and ``verification`` show.
    notes
        Sentences about the report itself: what could not be recorded, what was cut.
    summary
        The verdict of the whole report, in the form that a notebook's output embeds; None elsewhere.

    Examples
    --------
    >>> import aotlab, torch
    >>> @aotlab.compile(backend="eager")
    ... def double_(x):
    ...     return x.mul_(2)
    >>> with aotlab.Report.record() as report:
    ...     _ = double_(torch.ones(3))
    >>> report.inputs[["name", "mutates_data"]].values.tolist()
    [['x', True]]
    """

    version: int = VERSION
    name: str = ""
    identifier: str = ""
    created: str = ""
    duration_ns: int = 0
    cell: Cell | None = None
    environment: Environment
    frames: tuple[Frame, ...] = ()
    graph_break_rows: tuple[GraphBreakRow, ...] = ()
    time_rows: tuple[TimeRow, ...] = ()
    timing_rows: tuple[TimingRow, ...] = ()
    verification_rows: tuple[VerificationRow, ...] = ()
    notes: tuple[str, ...] = ()
    summary: Summary | None = None

    def report(self) -> Report:
        """Return this very report; `Recording` has the same method."""
        return self

    @staticmethod
    def record(name: str | None = None) -> AbstractContextManager[Recording]:
        """Record what aotlab does during a ``with`` block, in all threads.

        Parameters
        ----------
        name
            A title for the report.

        Returns
        -------
        AbstractContextManager
            It gives a `Recording`, which answers to everything that a report answers to, during the block and
            after it; ``recording.report()`` is the plain report.
        """
        recording: AbstractContextManager[Recording] = DRAWING["record"](name)
        return recording

    def with_timings(self, rows: Iterable[object]) -> Report:
        """Return a copy with ``rows`` added to the timings.

        Parameters
        ----------
        rows
            `TimingRow` objects, mappings with its keys, or other objects with its attributes.

        Raises
        ------
        UsageError
            A row lacks something, or has it with a wrong type.
        """
        return replace(self, timing_rows=(*self.timing_rows, *[_row(TimingRow, row) for row in rows]))

    def with_verification(self, rows: Iterable[object], *, engine: str = "aotlab", frame: str | None = None) -> Report:
        """Return a copy with ``rows`` added to the verification.

        Parameters
        ----------
        rows
            `VerificationRow` objects, mappings with its keys, or other objects with its attributes, such as the
            ``comparisons`` of what `aotlab.verify` returns.
        engine, frame
            What rows that do not say so are about.

        Raises
        ------
        UsageError
            A row lacks something, or has it with a wrong type.
        """
        known = {"engine": engine, "frame": frame}
        added = [_row(VerificationRow, row, known) for row in rows]
        return replace(self, verification_rows=(*self.verification_rows, *added))

    def with_cell(self, cell: Cell) -> Report:
        """Return a copy that names the notebook cell it came from."""
        return replace(self, cell=cell)

    def to_dict(self, *, sparse: bool = False) -> dict[str, object]:
        """Return the report as dicts, lists and plain values: what `to_json` writes.

        If ``sparse``, what has its default is left out, as in a notebook's output; `from_dict` reads either.
        """
        encoded = encode(self, sparse=sparse)
        assert isinstance(encoded, dict)
        return {"version": self.version, **encoded}

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the report as JSON text (ASCII)."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Read a report from JSON text.

        Nothing in the text is executed. Fields that are not known are ignored.

        Raises
        ------
        ReportFormatError
            The text is no JSON, no report, damaged, or of another version.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ReportFormatError(f"this is no aotlab report: not JSON ({error})") from None
        return cls.from_dict(value)

    @classmethod
    def from_dict(cls, value: object) -> Report:
        """Read a report from what `json.loads` returns; see `from_json`."""
        if not isinstance(value, dict) or "version" not in value or "environment" not in value:
            raise ReportFormatError("this is no aotlab report: it has no fields 'version' and 'environment'")
        version = value["version"]
        if version != VERSION or type(version) is not int:
            raise ReportFormatError(
                f"the report has version {version!r}; this aotlab reads version {VERSION}. "
                "Read it with the aotlab that wrote it, or a newer one"
            )
        return decode(cls, value)

    def save(self, path: str | Path) -> Path:
        """Write the report as JSON to ``path``, and return the path."""
        path = Path(path)
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report that `save` wrote; see `from_json` for what is checked.

        Raises
        ------
        ReportFormatError
            The file is no report of this version; the message names it.
        OSError
            The file cannot be read.
        """
        try:
            return cls.from_json(Path(path).read_bytes())
        except ReportFormatError as error:
            raise ReportFormatError(f"{path}: {error}") from None


def report_schema() -> dict[str, object]:
    """Build the JSON Schema of `Report`: what ``schema/report.v1.json`` holds."""
    return schema(Report, title="aotlab report, version 1", identifier=SCHEMA_ID)


def _row(kind: type[R], row: object, known: Mapping[str, object] | None = None) -> R:
    """Turn what a caller has into a record of ``kind``, checked; ``known`` fills in what the row does not say."""
    if isinstance(row, kind):
        return row
    values = {**(known or {}), **(row if isinstance(row, Mapping) else _attributes(row))}
    for name, value in values.items():
        if name.endswith("_ns") and isinstance(value, float):
            values[name] = round(value)
    try:
        return decode(kind, values, kind.__name__)
    except ReportFormatError as error:
        raise UsageError(str(error).replace("the report is damaged", "this row cannot be added to a report")) from None


def _attributes(row: object) -> dict[str, object]:
    if is_dataclass(row):
        return {field.name: getattr(row, field.name) for field in fields(row)}
    return dict(vars(row)) if hasattr(row, "__dict__") else {}
