"""Records of a compiled graph: stages, nodes, saved tensors, autograd nodes, kernels and guards."""

from __future__ import annotations

from dataclasses import dataclass

from aotlab.errors import UserLine
from aotlab.ir.specs import Size
from aotlab.report.model.choices import Choices
from aotlab.report.model.memory import Memory
from aotlab.report.model.steps import Step
from aotlab.report.model.tensors import Group, Input, Output, Placeholder, Result, Storage, TensorInfo
from aotlab.report.text import known_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A piece of code that a stage produced.

    Attributes
    ----------
    title
        A name for the code, for example ``"joint graph"``.
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
        The stage's name in `aotlab.pipeline`.
    duration_ns
        The stage's wall time, without the time of backwards that were derived during the stage, because each of these
        backwards has a separate row.
    node_count
        The number of ops in the graph that the stage produced; None if the stage produced no graph.
    summary
        The result of the stage, in a few words.
    codes
        The graphs or the program that the stage produced, as readable code.
    """

    name: str
    duration_ns: int
    node_count: int | None = None
    summary: str = ""
    codes: tuple[Code, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node of a graph, with the user's line that caused it.

    Attributes
    ----------
    stage, part
        The stage that produced the node, and the graph of the stage that contains the node (``"joint"``,
        ``"forward"``, …). The stage ``"passes"`` has the graphs after the backend's own passes.
    name, op, target
        The fx node's attributes of these names. ``target`` is the op's full name.
    phase
        ``"forward"`` or ``"backward"``: the half of the trace during which the node was recorded.
    dtype, shape, device, nbytes
        The description of the node's value; None if the value is no tensor.
    inputs
        The names of the nodes that this node reads.
    users
        The number of nodes that read this node.
    line
        The user's line that caused the node. For a node of the backward, it is the line of the forward op that the node
        differentiates.
    module
        The path of the module that ran the op, for example ``transformer.h.3.mlp``. For a node of the backward, it is
        the path for the forward op. Empty if no module ran it.
    view
        Whether the value has only memory of the node's inputs, as a view has.
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
    module: str = ""
    view: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of `torch.distributed` in a graph: all processes of a group must call it.

    Attributes
    ----------
    part
        The graph that contains it: ``"inference graph"``, ``"forward graph"`` or ``"backward graph"``.
    name
        The name of the fx node.
    op
        The collective: ``"all_reduce"``, ``"all_gather_into_tensor"`` and so on.
    input_bytes, output_bytes
        The size of the tensors that the process passes to it, and the size of its result.
    line
        The user's line that caused it.
    """

    part: str
    name: str
    op: str
    input_bytes: int
    output_bytes: int
    line: UserLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """One value that the forward saves for the backward.

    Attributes
    ----------
    name
        The name of the node that computes the value.
    tensor
        The description of the value.
    nbytes
        The size of the value's elements in bytes.
    reason
        Why the forward saves the value instead of letting the backward compute it again.
    is_input, is_output
        Whether the value is an input, and whether it is an output, of the function. Saving an input or an output takes
        no new memory.
    shares
        The name of the largest saved value in the same storage, if the storage is too small to hold that value, this
        value and the larger saved values besides each other. Then this value counts as no new memory. Empty otherwise.
    used_by
        The nodes of the backward that read the value.
    line
        The user's line that computed the value.
    module
        The path of the module that computed the value, for example ``transformer.h.3.mlp``. Empty for an input, and for
        a value that no module computed.
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
    module: str = ""

    @property
    def new_bytes(self) -> int:
        """The new memory that saving the value takes, in bytes; 0 if the caller or another saved value holds it."""
        return 0 if self.is_input or self.is_output or self.shares else known_size(self.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutogradNode:
    """One node that a call adds to the caller's autograd graph.

    A call adds several nodes if one output depends on another, or if different outputs depend on different inputs. With
    several nodes, the gradients that the caller can observe flow along the same edges as in eager mode.

    Attributes
    ----------
    number
        The node's number within the graph, in the order of the forward, from 0.
    makes
        The outputs, mutated inputs and intermediate bases that have this node as their ``grad_fn``.
    goes_to
        The inputs, outputs and other nodes that receive the gradients that this node computes.
    """

    number: int
    makes: tuple[str, ...] = ()
    goes_to: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel that the backend generated, or that it calls from a library.

    Attributes
    ----------
    name
        The kernel's name.
    language
        ``"triton"``, ``"c++"``, ``"python"`` or ``"extern"``.
    graph_name, kind
        The name of the compiled graph that the kernel belongs to, and the kind of that graph: ``"forward"``,
        ``"backward"`` or ``"inference"``.
    source
        The kernel's source code.
    nodes
        The names of the nodes that the kernel computes; empty if the backend does not report them.
    from_cache
        Whether Inductor took the compiled graph with this kernel from its cache on disk.
    cache_miss
        Why Inductor did not find the graph in its cache, as words: what differs from the nearest of the last graphs
        that aotlab recorded. Empty if the graph was found, or if no cache was used.
    registers, shared_bytes, spilled_bytes, blocks
        Only for a kernel that was compiled for a GPU that this machine does not have (a rehearsal): the number of GPU
        registers of a thread, the shared memory of a thread block, the bytes that a thread spills, and the number of
        thread blocks that a call launches. None for all other kernels.
    bytes_read, bytes_written
        Only for a rehearsed kernel: the bytes of the tensors that a call reads and writes. None for all other kernels.
    """

    name: str
    language: str
    graph_name: str
    kind: str
    source: str
    nodes: tuple[str, ...] = ()
    from_cache: bool = False
    cache_miss: str = ""
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
        The graph's name, for example ``"model__0_forward_1"``.
    backend
        The name of the backend.
    compile_ns
        The time that the backend took.
    node_count
        The number of ops in the graph that the backend received.
    pattern
        For a backward that was compiled after the forward: for each tangent, whether it is defined (not ``None``).
        Empty for the graphs that the stage ``compile`` compiled.
    """

    kind: str
    name: str
    backend: str
    compile_ns: int
    node_count: int = 0
    pattern: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """One guard of a compiled entry: a condition that is checked at each call.

    Attributes
    ----------
    kind
        The property that is compared: ``"dtype"``, ``"identity"``, ``"grad mode"`` and so on.
    subject
        The name of the argument that is checked, or ``"global"``.
    sentence
        The condition in words.
    line
        For a guard on a size or a number: the user's line that caused the guard, or None if the line is unknown.
    """

    kind: str
    subject: str
    sentence: str
    line: UserLine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The counts and sums of a graph's tables, computed before the tables were cut to fit a notebook.

    Attributes
    ----------
    stages, stages_ns
        The number of stages, and the sum of their times.
    nodes
        The number of nodes of the graph that the stage ``trace`` produced.
    inputs, mutated
        The number of arguments, and the number of mutated arguments. A mutated tensor that is passed twice is counted
        once.
    outputs, aliased
        The number of outputs, and the number of outputs that are views of a base or are the base itself.
    storages, shared, storage_bytes
        The number of storages, the number of storages with several tensors, and the size of all storages in bytes.
    saved, saved_bytes, held_bytes
        The number of values that are saved for the backward, the new memory that saving them takes, and the size of the
        saved values that are inputs or outputs, which the caller holds anyway.
    kernels, kernels_called
        The number of kernels, and the number of kernels among them that come from a library.
    guards
        The number of guards.
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
    """The reason why an earlier graph did not accept a call: the guard that failed.

    Attributes
    ----------
    graph
        The index of the earlier graph; None if that graph is not in this report.
    subject, before, after
        The name of the value that the guard checks, the value that the earlier graph expects, and the value in the
        call. Each is empty if unknown.
    sentence
        The failed guard as a sentence.
    line
        The user's line that caused the guard; None if the line is unknown.
    suggestion
        A change that would avoid the recompile.
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
    """One compiled entry of a frame, with the result of each stage of the pipeline.

    Attributes
    ----------
    index
        The graph's number within the frame, from 0.
    entry
        The engine's number for the compiled entry, unique in the process that recorded it.
    status
        ``"compiled"``, ``"refused"``, ``"compiling"`` (the recording ended before the compilation did) or ``"earlier"``
        (the graph was compiled before the recording began, so the report has only its calls).
    frontend, backend
        The frontend that captured the function, and the backend that compiled the graphs.
    misses
        Why each earlier graph did not accept the call that compiled this graph, starting with the most similar graph;
        empty for the first graph.
    training
        Whether the entry has a backward.
    grad_mode
        Whether grad mode was on during the call that compiled the graph.
    at_ns, duration_ns
        When the compilation began, counted from the beginning of the recording, and how long it took.
    calls
        The number of calls that the graph served during the recording.
    stages, nodes, placeholders, results, inputs, outputs, storages, steps, autograd, saved, compiled, kernels, guards
        The rows of the graph's tables; the record of each row explains them.
    input_groups, storage_groups
        The groups of inputs and the groups of storages that a page shows as one row each.
    collectives
        The collectives of `torch.distributed` in the graph.
    random_ops
        The ops of the graph's forward that draw random numbers.
    static_since
        The reason why some sizes or numbers that should be dynamic are not dynamic. The graph accepts only the values
        that they had in its first call. Empty if there is no such size or number.
    reused
        Whether the graph was compiled in an earlier run of the unchanged cell.
    counts
        The counts of the graph's tables before the report was cut. They are computed when the report is prepared for a
        page or a notebook's output, and are None until then.
    cut
        Whether rows or code may be missing, because the report was cut to fit a notebook.
    memory
        The memory of a training step with this graph, modelled from its ops; None if the graphs are unknown, or if the
        record was left out because the report was cut.
    choices
        The choices of saved values; None if nothing is saved, or if the record was left out because the report was cut.
    """

    index: int
    entry: int
    status: str
    frontend: str = ""
    backend: str = ""
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
    steps: tuple[Step, ...] = ()
    autograd: tuple[AutogradNode, ...] = ()
    saved: tuple[Saved, ...] = ()
    compiled: tuple[CompiledGraph, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    guards: tuple[Guard, ...] = ()
    input_groups: tuple[Group, ...] = ()
    storage_groups: tuple[Group, ...] = ()
    collectives: tuple[Collective, ...] = ()
    random_ops: tuple[str, ...] = ()
    static_since: str = ""
    reused: bool = False
    counts: Counts | None = None
    cut: bool = False
    memory: Memory | None = None
    choices: Choices | None = None
