"""Records of tensors: inputs, outputs, storages, placeholders and results."""

from __future__ import annotations

from dataclasses import dataclass

from aotlab.errors import UserLine
from aotlab.ir.specs import Size
from aotlab.report.text import sizes

#: The ordinary types of tensors, which texts do not mention.
PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter")


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerTensor:
    """An inner tensor of a wrapper subclass.

    Attributes
    ----------
    name
        The attribute of the wrapper that holds the inner tensor.
    tensor
        The description of the inner tensor.
    """

    name: str
    tensor: TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """The description of a tensor: `aotlab.ir.specs.TensorSpec` in plain values.

    Attributes
    ----------
    dtype, device, layout
        The tensor's dtype, device and layout as torch prints them, without ``torch.``.
    shape, stride
        The sizes, and the strides in elements, outermost dimension first.
    offset, byte_offset
        The storage offset, in elements and in bytes.
    nbytes
        The total size of the tensor's elements in bytes. For a wrapper subclass, the sum over its inner tensors.
    requires_grad, is_leaf
        The tensor's attributes of these names.
    type_name
        The qualified name of the tensor's Python type.
    inner
        The inner tensors of a wrapper subclass; empty for other tensors.
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
class Placeholder:
    """One input of a graph, and the user's name for it.

    Attributes
    ----------
    name
        The input's name in the code of all stages: ``"primals_3"``, ``"tangents_1"``.
    user_name
        The name of the argument that the placeholder represents. For a tangent, ``"grad_of_loss"`` is the gradient of
        the output ``loss``. For a synthetic base, ``"base_of_x"`` is the base of ``x`` and of the other arguments that
        share memory with ``x``. For a dynamic size, ``"x.size(0)"`` is the size of ``x`` in dimension 0.
    value
        The value of a size or a number in the traced call; empty for tensors.
    kind
        For an argument, its kind: ``"parameter"``, ``"buffer"``, ``"input"`` or ``"gradient"``. For other placeholders
        ``"base"`` (a synthetic base), ``"size"``, ``"number"`` or ``"tangent"``.
    """

    name: str
    user_name: str
    value: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One value that the traced graph returns, or that the graph itself copies into a mutated input.

    Attributes
    ----------
    name
        The node's name in the graph's code.
    kind
        ``"mutated parameter"``, ``"mutated buffer"``, ``"mutated input"``, ``"output"``, ``"base"`` (the intermediate
        base of outputs that are views) or ``"gradient"``.
    target
        The argument that receives the value as its new value or as its gradient, or the name of the output. The target
        of a gradient may also be another autograd node of the call: ``"node 1"``.
    in_graph
        Whether the graph itself copies the value into the mutated input. Otherwise the graph returns the value, and the
        epilogue copies it.
    """

    name: str
    kind: str
    target: str
    in_graph: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One argument, and its mutations by the function.

    Attributes
    ----------
    name
        The caller's name for the argument: ``"x"``, ``"args[0]['w']"``, ``"model.weight"``.
    kind
        For an argument: ``"parameter"``, ``"buffer"``, ``"input"`` (another tensor) or ``"python"`` (no tensor).
        ``"base"`` is the base of views that are arguments. It is an input of the graph, but no argument.
        ``"gradient"`` is a tensor without memory that the graph takes as an additional input, because the gradient of
        an argument has other parts than the argument. For a tensor that a cell changed outside of its graphs:
        ``"outside"``, ``"alias"`` (the cell wrote the tensor through another name) or ``"new"`` (a gradient that did
        not exist before the cell).
    value
        The repr of an argument that is not a tensor. For a wrapper, the repr of its context: the data that the wrapper
        holds besides its parts.
    tensor
        The description of the tensor when the function was called; None if the argument is not a tensor. Dynamic sizes
        are symbols.
    varies
        Whether the graph accepts other sizes of the tensor, or other values of the number.
    storage
        The number of the tensor's storage in this graph's ``storages``. Inputs with the same number share memory.
    duplicate_of
        The name of the earlier argument that is the same tensor object; None if there is no such argument.
    overlaps
        The names of the other arguments that have bytes in common with this argument.
    mutates_data, mutates_metadata, mutates_storage
        Whether the function changed the tensor's values; whether it changed the tensor's sizes, strides or offset;
        whether it replaced the tensor's storage. None means unknown, because the graph was never traced.
    mutation_hidden_from_autograd
        Whether every write went through ``detach()`` or another alias that hides writes from autograd.
    mutation_under_no_grad
        Whether every write happened under ``no_grad`` or ``inference_mode``.
    mutation_type
        ``"not mutated"``, ``"mutated in graph"`` (the graph writes the new value) or ``"mutated out of graph"`` (the
        epilogue writes the new value).
    requires_grad_after
        Whether the tensor required grad when the function returned.
    steps
        The in-place calls that changed the tensor's sizes, strides or autograd history, as code: ``"t_()"``.
    written_at
        The lines of the program that wrote the tensor's values, the last one first. Empty if they are unknown.
    synthetic_base
        The number, within the graph, of the synthetic base that replaces this input and the inputs that share its
        memory or its autograd history. The graph takes a synthetic base if one of these inputs is mutated.
    part_of
        The name of the wrapper that holds this tensor as an attribute; empty if the tensor is an argument. The wrapper
        has a separate row above the rows of its parts.
    placeholder
        The placeholder that represents the argument in the graph: ``"primals_3"``. Empty for a wrapper, because the
        graph takes the wrapper's parts.
    gradient
        The name of the traced graph's node that computes the gradient of the tensor. If several autograd nodes send
        gradients to the tensor, which autograd then sums, all their names, separated by commas.
    group
        The group that the row belongs to, as an index into the ``input_groups`` of the graph or the ``groups`` of the
        cell. None if the row belongs to no group.
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
    written_at: tuple[UserLine, ...] = ()
    synthetic_base: int | None = None
    part_of: str = ""
    placeholder: str = ""
    gradient: str = ""
    group: int | None = None

    @property
    def mutated(self) -> bool:
        """Whether the function changed the tensor in any way."""
        return bool(self.mutates_data or self.mutates_metadata or self.mutates_storage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One output, and the tensors that it shares memory with.

    Attributes
    ----------
    name
        The output's name, for example ``"out[0]"``.
    output_type
        How the output is related to inputs and other outputs: one of the seven values of
        `aotlab.ir.metadata.OutputType`.
    raw_type
        The qualified name of the output's Python type.
    tensor
        The description of the tensor; None if the output is not a tensor.
    storage
        The number of the output's storage in this graph's ``storages``.
    base_kind, base
        The kind of the tensor that the output is a view of (``"input"``, ``"intermediate"`` or ``"output"``), and the
        name of this base. None if the output has no base.
    views
        The view ops that make the output from its base, as code (``"x.t()"``).
    relation
        The relation to the base as a sentence: ``"view of input x: x.t()"``.
    requires_grad
        Whether the output requires grad.
    part_of
        The name of the wrapper that holds this tensor as an attribute. If the row is a base that the graph returns only
        because an output is a view of it, the name of this output. If the row is the new value of a mutated input, the
        name of this input. Empty otherwise.
    node
        The name of the node that the traced graph returns for the output.
    tangent
        The placeholder for the gradient with respect to the output: ``"tangents_1"``.
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
class Group:
    """Rows of a table that the page shows as one row. Rows that were removed to shorten the report are counted, too.

    Attributes
    ----------
    title
        The number of rows and their kind: ``"40 parameters of net"``.
    count, nbytes
        The number of rows, and their total size in bytes.
    """

    title: str
    count: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The range of bytes that one tensor covers in a storage.

    Attributes
    ----------
    name
        The tensor's name.
    role
        ``"input"`` or ``"output"``.
    start, stop
        The position of the tensor's first byte in the storage, and the position after its last byte. If the strides of
        the tensor leave gaps between its elements, the bytes in the gaps do not belong to the tensor. Both positions
        are None if a size, a stride or the offset is symbolic and has no known value.
    mutated
        Whether the function writes the tensor. None means unknown, because the graph was never traced.
    writes
        The number of the tensor's bytes that the function certainly writes; None if the number is unknown.
    may_write
        The number of the tensor's other bytes that the function writes or does not write, depending on the values of an
        index or a mask.
    part_of
        The name of the outermost argument or output that is a wrapper around the tensor; empty if there is no wrapper.
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
    """Bytes of a storage that the function writes: a run of consecutive bytes, or several such runs at equal distances.

    Attributes
    ----------
    start, length
        The position of the first run's first byte in the storage, and the number of bytes in each run.
    counts, steps
        The runs form a grid with any number of dimensions. For each dimension, outermost first: the number of runs
        along it, and the distance in bytes from the start of one run to the start of the next. Both are empty for a
        single run.
    certain
        False if the function perhaps writes only some of these bytes, because the values of an index or a mask select
        the bytes, or because the written bytes could not be determined.
    """

    start: int
    length: int
    counts: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One storage: the memory of one tensor or of several tensors that are aliases.

    Attributes
    ----------
    number
        The storage's number in the report. All graphs that use the storage have the same number for it.
    owner
        ``"input"`` (the caller allocated the storage), ``"intermediate"`` (the graph allocated it for an intermediate
        base, so several outputs may share it) or ``"output"`` (the graph allocated it for one output).
    nbytes
        The storage's size in bytes; None if the size is unknown.
    device
        The device of the memory.
    spans
        The tensors with this storage, each with its range of bytes.
    written
        The bytes of the storage that the function writes; None if the function writes none of its tensors, or if it was
        never traced.
    group
        The group that the storage belongs to, as an index into the graph's ``storage_groups``; None if the storage
        belongs to no group.
    """

    number: int
    owner: str
    nbytes: Size | None
    device: str
    spans: tuple[Span, ...] = ()
    written: tuple[Written, ...] | None = None
    group: int | None = None
