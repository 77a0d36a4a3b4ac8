"""Records of tensors: inputs, outputs, storages, placeholders and results."""

from __future__ import annotations

from dataclasses import dataclass

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
        As torch prints them, without ``torch.``.
    shape, stride
        The sizes and the strides in elements, outermost dimension first.
    offset, byte_offset
        The storage offset, in elements and in bytes.
    nbytes
        The size of the tensor's elements in bytes.
    requires_grad, is_leaf
        The tensor's attributes of these names.
    type_name
        The qualified name of the tensor's Python type.
    inner
        The inner tensors of a wrapper subclass. The wrapper's ``nbytes`` is the sum of theirs.
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
        The argument's name. ``"grad_of_loss"`` is the gradient of an output. ``"base_of_x"`` is the synthetic base of
        ``x`` and the other arguments that share memory with it. ``"x.size(0)"`` is a size that varies, and ``"s"`` a
        number.
    value
        The value of a size or a number in the traced call; empty for tensors.
    kind
        The kind of the argument (``"parameter"``, ``"buffer"``, ``"input"``, ``"gradient"``), or ``"base"``,
        ``"size"``, ``"number"`` or ``"tangent"``.
    """

    name: str
    user_name: str
    value: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One value that the traced graph returns, or that the graph writes into an input itself.

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
        Whether the graph writes the value into the argument itself, instead of returning it.
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
        The caller's name for the argument: ``"x"``, ``"args[0]['w']"``, ``"model.weight"``.
    kind
        ``"parameter"``, ``"buffer"``, ``"input"`` or ``"python"``. A tensor that a cell changed outside of its graphs
        is ``"outside"``, or ``"alias"`` if the cell wrote it through another name, or ``"new"`` if it is a gradient
        that did not exist before. ``"gradient"`` is a placeholder for a gradient whose parts differ from the parts of
        its tensor.
    value
        The repr of an argument that is no tensor. For a wrapper, it is the wrapper's context: the data that it holds
        besides its parts.
    tensor
        The description of the tensor when the function was called. Sizes that vary are symbols.
    varies
        Whether the graph accepts other sizes of the tensor, or other values of the number.
    storage
        The number of its storage in this graph's ``storages``. Inputs with the same number share memory.
    duplicate_of
        The name of the earlier argument that is the very same tensor.
    overlaps
        The names of the other arguments that have bytes in common with this one.
    mutates_data, mutates_metadata, mutates_storage
        Whether the function changed its values, its sizes, strides or offset, or gave it another storage. None means
        unknown, because the graph was never traced.
    mutation_hidden_from_autograd
        Whether every write went through ``detach()`` or another alias that hides writes from autograd.
    mutation_under_no_grad
        Whether every write happened under ``no_grad`` or ``inference_mode``.
    mutation_type
        ``"not mutated"``, ``"mutated in graph"`` or ``"mutated out of graph"`` (the epilogue writes the new value).
    requires_grad_after
        ``requires_grad`` after the function returned.
    steps
        The in-place calls that changed its sizes, strides or autograd history, as code: ``"t_()"``.
    synthetic_base
        The number, within the graph, of the synthetic base that replaces this input and the inputs that share its
        memory or its autograd history. The graph takes a synthetic base if one of these inputs is mutated.
    part_of
        The name of the wrapper that holds this tensor as an attribute; empty if the tensor is an argument. The wrapper
        has a separate row above this one.
    placeholder
        The graph input that represents the argument: ``"primals_3"``. Empty for a wrapper, because the graph takes the
        wrapper's parts.
    gradient
        The node of the traced graph that computes its gradient. There are several if autograd sums them.
    group
        The group that the row belongs to: a position in its graph's ``input_groups``, or in its cell's ``groups``.
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
        One of the seven values of `aotlab.ir.metadata.OutputType`, in words.
    raw_type
        The qualified name of its Python type.
    tensor
        The description of the tensor; None if the output is no tensor.
    storage
        The number of its storage in this graph's ``storages``.
    base_kind, base
        The kind of its base (``"input"``, ``"intermediate"`` or ``"output"``), and the base's name.
    views
        The view ops that make the output from its base, as code (``"x.t()"``).
    relation
        The relation to the base as a sentence: ``"view of input x: x.t()"``.
    requires_grad
        Whether it requires grad.
    part_of
        The name of the wrapper that holds this tensor as an attribute. A base that the graph returns for an output that
        is a view has the name of this output.
    node
        The node of the traced graph that returns it.
    tangent
        The graph input that is its gradient: ``"tangents_1"``.
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
    """Rows of a table that the page shows as one row, counted before the report was cut.

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
        The position of the tensor's first byte in the storage, and the position after its last byte. If the tensor has
        strides, not all bytes of the range belong to it. Both are None if they are symbolic.
    mutated
        Whether the function writes the tensor. None means unknown, because the graph was never traced.
    writes, may_write
        The number of its bytes that are written, and the number of further bytes that may be written, depending on the
        values of an index or a mask. ``writes`` is None if the number is unknown.
    part_of
        The argument or output that is a wrapper around the tensor.
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
    """Bytes of a storage that the function writes: a run of consecutive bytes, which may repeat at regular steps.

    Attributes
    ----------
    start, length
        The first byte of the first run, and the number of bytes in each run.
    counts, steps
        For each dimension, outermost first: the number of repeats, and the distance in bytes from one repeat to the
        next.
    certain
        False if the function may write only some of these bytes: values decide which, or it is unknown.
    """

    start: int
    length: int
    counts: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    certain: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One storage: a piece of memory that inputs and outputs share.

    Attributes
    ----------
    number
        Its number in the report. All graphs that use the storage have the same number for it.
    owner
        ``"input"`` (the caller allocated it), ``"intermediate"`` (the graph allocated it, and several outputs may share
        it) or ``"output"`` (the graph allocated it for one output).
    nbytes
        Its size in bytes; None if the size is unknown.
    device
        The device that holds it.
    spans
        The tensors in it, each with its range of bytes.
    written
        The bytes that the function writes; None if they are unknown.
    group
        The group that the storage belongs to: a position in its graph's ``storage_groups``.
    """

    number: int
    owner: str
    nbytes: Size | None
    device: str
    spans: tuple[Span, ...] = ()
    written: tuple[Written, ...] | None = None
    group: int | None = None
