"""Stage 4, trace: ONE run of the function says what it computes, what it mutates and what aliases what.

    def f(x, y):
        x.mul_(2)              # x is mutated
        z = x * y              # an intermediate
        return x.t(), z[0], z  # a view of an input, a view of an intermediate, the intermediate

The function runs on fake tensors inside functional wrappers. A wrapper behaves like the tensor that it stands for,
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

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import torch_internals as internals
from aotlab.errors import (
    CapturedTensorError,
    EscapeError,
    HigherOrderOpError,
    LeakedTensorError,
    MetadataMutationError,
    OutputError,
    RandomOpError,
    RefusedError,
    StorageMutationError,
    SymbolicShapeError,
    UserLine,
)
from aotlab.guards import global_state, restore_settings
from aotlab.ir.metadata import (
    InputAliasInfo,
    MutationType,
    OutputAliasInfo,
    OutputType,
    TangentInfo,
    TangentSource,
    ViewAndMutationMeta,
    ViewStep,
)
from aotlab.ir.specs import StorageNumbers, spec_of
from aotlab.recorder import EscapeGuard, Operation, Recorder, RunEagerly, Tape, overlaps_itself
from aotlab.stages.capture import Call
from aotlab.stages.dedupe import DedupeRecord
from aotlab.torch_internals import FakeTensorMode, OpOverload


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


@dataclass(kw_only=True, eq=False)
class Trace:
    """A trace with its live values: the tape, the wrappers' autograd graph, and what became of the inputs.

    Attributes
    ----------
    input_fakes
        The fake tensor of each kept input.
    placeholders
        (name, fake) for each graph input.
    forward_outputs
        The fake tensors that the forward graph returns.
    tangents
        The fake tangents, one per differentiable forward output, and ``roots``, the wrappers they belong to.
    tangent_outputs
        For each tangent, the position of its value among the forward outputs.
    leaves
        For each graph input, the wrapper to differentiate with respect to, or None.
    connected
        For each graph input, whether a gradient can reach it: those inputs have to go through autograd.
    state_masks
        For each tangent, a bit mask of the autograd nodes that it reaches and that hold saved tensors.
    """

    tape: Tape
    recorder: Recorder
    fake_mode: FakeTensorMode
    call_name: str
    input_fakes: list[Tensor]
    placeholders: list[tuple[str, Tensor]]
    forward_outputs: list[Tensor]
    write_back: list[tuple[Tensor, Tensor]]
    roots: list[Tensor]
    tangent_outputs: list[int]
    tangents: list[Tensor]
    tangent_wrappers: list[Tensor]
    leaves: list[Tensor | None]
    connected: list[bool]
    state_masks: list[int]
    backward_error: BaseException | None
    out_spec: Any
    out_constants: dict[int, Any]
    returned_outputs: list[int]
    metadata: ViewAndMutationMeta

    @property
    def training(self) -> bool:
        """Whether anything can be differentiated."""
        return bool(self.roots)

    def derive(self, pattern: Sequence[bool]) -> list[Tensor | None]:
        """Differentiate the forward outputs whose tangents are defined; None for an input that they do not reach.

        Raises
        ------
        RefusedError
            The backward uses something that a graph cannot hold.
        Exception
            Whatever the backward of the traced program raises.
        """
        chosen = [i for i, defined in enumerate(pattern) if defined]
        wanted = [leaf for leaf in self.leaves if leaf is not None]
        if not wanted:
            return [None] * len(self.leaves)
        first = len(self.tape.operations)
        self.recorder.phase = "backward"
        try:
            with _tracing(self.recorder), EscapeGuard(), internals.disable_autocast(), torch.no_grad():
                found: Sequence[Tensor | None] = torch.autograd.grad(
                    [self.roots[i] for i in chosen],
                    wanted,
                    [self.tangent_wrappers[i] for i in chosen],
                    retain_graph=True,
                    allow_unused=True,
                )
                values = iter([None if g is None else _value(g, "a gradient") for g in found])
        finally:
            self.recorder.phase = "forward"
        for operation in self.tape.operations[first:]:
            if operation.is_random:
                raise RandomOpError(
                    f"the backward draws random numbers by `{operation.target}`",
                    line=None if operation.place is None else operation.place(),
                    why="a compiled backward would draw other numbers than eager",
                )
        return [None if leaf is None else next(values) for leaf in self.leaves]


# --- entering the inputs -----------------------------------------------------------------------------------------


class _NonLeaf(torch.autograd.Function):
    """Give the traced program a non-leaf input: an identity for autograd that records no op.

    The wrapper may then be mutated in place, while gradients are taken with respect to the value before.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, fake: Tensor) -> Tensor:
        """Wrap the fake value once more."""
        return internals.to_functional(fake)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Pass the gradient on."""
        return gradient, None


@dataclass(slots=True, kw_only=True)
class _Input:
    name: str
    real: Tensor
    fake: Tensor
    wrapper: Tensor
    leaf: Tensor | None
    grad_fn: Any
    version: int
    storage: int


def _enter(tape: Tape, fake_mode: FakeTensorMode, name: str, real: Tensor) -> _Input:
    fake = tape.enter(internals.enter_fake(fake_mode, real))
    wrapper = internals.to_functional(fake)
    leaf = None
    if real.requires_grad:
        leaf = wrapper.requires_grad_(True)
        if not real.is_leaf:
            with torch.enable_grad():
                wrapper = _NonLeaf.apply(leaf, fake)  # type: ignore[no-untyped-call]  # untyped in torch
    return _Input(
        name=name,
        real=real,
        fake=fake,
        wrapper=wrapper,
        leaf=leaf,
        grad_fn=wrapper.grad_fn,
        version=internals.version_of(wrapper),
        storage=internals.storage_key(wrapper),
    )


@contextmanager
def _tracing(recorder: Recorder) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(internals.quiet_fake_tensors())
        stack.enter_context(internals.saved_tensor_hooks_hidden())
        stack.enter_context(internals.functionalization())
        stack.enter_context(internals.enable_python_dispatcher())
        stack.enter_context(recorder)
        yield


def _value(wrapper: Tensor, what: str) -> Tensor:
    """Return what a wrapper holds after all writes through its aliases."""
    if not internals.is_functional(wrapper):
        raise CapturedTensorError(
            f"{what} is a tensor that is not computed from the arguments",
            why="it would be frozen into the graph",
            suggestion="pass it as an argument",
        )
    internals.sync(wrapper)
    return internals.from_functional(wrapper)


# --- views -------------------------------------------------------------------------------------------------------

_view_ops: dict[OpOverload, bool] = {}
_ALIAS_OPS = frozenset((torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default))


def _is_view_op(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return False
    known = _view_ops.get(target)
    if known is None:
        schema = target._schema
        first = schema.arguments[0].alias_info if schema.arguments else None
        result = schema.returns[0].alias_info if schema.returns else None
        known = first is not None and not first.is_write and result is not None
        _view_ops[target] = known
    return known


def _view_parent(tape: Tape, value: Tensor) -> tuple[Tensor, ViewStep] | None:
    """Return the tensor of which ``value`` is a view, and the step; None if it is no view."""
    made = tape.producer(value)
    if made is None or not _is_view_op(made[0].target):
        return None
    operation, path = made
    step = ViewStep(
        target=str(operation.target),
        args=tuple(operation.args[1:]),
        kwargs=tuple(operation.kwargs.items()),
        item=path[0] if path else None,
    )
    return operation.args[0], step


def _views(tape: Tape, base: Tensor, value: Tensor) -> tuple[ViewStep, ...] | None:
    """Return the view ops that lead from ``base`` to ``value``; None if there is no such way."""
    steps: list[ViewStep] = []
    while value is not base:
        parent = _view_parent(tape, value)
        if parent is None:
            return None
        value, step = parent
        steps.append(step)
    return tuple(reversed(steps))


def _covers_storage(value: Tensor) -> bool:
    """Tell whether ``value`` begins its storage and is as large: whether returning it returns the whole storage."""
    return value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _canonical_base(tape: Tape, value: Tensor) -> Tensor:
    """Walk up from ``value`` to the nearest tensor that is a whole storage, and past mere aliases of it."""
    while True:
        parent = _view_parent(tape, value)
        if parent is None:
            return value
        if _covers_storage(value) and not (
            tape.producer(value)[0].target in _ALIAS_OPS and _covers_storage(parent[0])  # type: ignore[index]  # a view has a producer
        ):
            return value
        value = parent[0]


# --- reading off what happened -----------------------------------------------------------------------------------


def _input_info(index: int, item: _Input, tape: Tape, storages: StorageNumbers, keep: bool) -> InputAliasInfo:
    """Say what happened to one input, and refuse what the epilogue cannot do."""
    wrapper = item.wrapper
    final = _value(wrapper, f"`{item.name}`")
    line = _line_of(tape, final)
    if internals.was_storage_changed(wrapper):
        raise StorageMutationError(
            f"`{item.name}` is given another storage or another size",
            line=line,
            why="that is not supported yet",
            suggestion="return a new tensor",
            argument=item.name,
        )
    if internals.has_metadata_mutation(wrapper) or final.shape != item.fake.shape or final.dtype != item.fake.dtype:
        raise MetadataMutationError(
            f"`{item.name}` changes its sizes or strides in place",
            line=line,
            why="that is not supported yet",
            suggestion="use the out-of-place form, as t() for t_()",
            argument=item.name,
        )
    grad = wrapper.grad if wrapper.is_leaf else None
    if grad is not None or (item.leaf is not None and item.leaf.grad is not None):
        raise EscapeError(
            f"gradients were accumulated into `{item.name}` inside the function",
            why="they would be added to the traced tensor, not to the caller's",
            suggestion="use torch.autograd.grad inside, or call backward() outside",
            argument=item.name,
        )
    requires_grad = item.real.requires_grad
    if wrapper.is_leaf and wrapper.requires_grad != requires_grad:
        raise MetadataMutationError(
            f"`{item.name}` has its requires_grad changed to {wrapper.requires_grad}",
            why="that is not supported yet",
            suggestion="set it before the call",
            argument=item.name,
        )
    mutated = internals.has_data_mutation(wrapper) and final is not item.fake
    if mutated and overlaps_itself(item.real):
        raise RunEagerly(f"`{item.name}` overlaps itself and is written")
    visible = wrapper.grad_fn is not item.grad_fn
    # torch does not report writes through `.data` as hidden; that autograd's node did not change shows them
    hidden = internals.mutations_hidden_from_autograd(wrapper) or (requires_grad and not visible)
    under_no_grad = mutated and internals.mutations_under_no_grad(wrapper)
    return InputAliasInfo(
        index=index,
        name=item.name,
        spec=spec_of(item.real, storages),
        is_leaf=item.real.is_leaf,
        requires_grad=requires_grad,
        mutates_data=mutated,
        mutations_hidden_from_autograd=mutated and hidden and not under_no_grad,
        mutations_under_no_grad_or_inference_mode=under_no_grad,
        keep_input_mutations=keep,
        moves_version=internals.version_of(wrapper) != item.version,
        requires_grad_after=wrapper.requires_grad,
    )


def _line_of(tape: Tape, value: Tensor) -> UserLine | None:
    made = tape.producer(value)
    return made[0].place() if made is not None and made[0].place is not None else None


_PLAIN_RESULTS = (
    int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size, enum.Enum, type, slice, range,
)  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Outputs:
    """The outputs as read off, and what the forward graph must return for them."""

    infos: list[OutputAliasInfo] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    returned: list[tuple[int, Tensor, Tensor | None]] = field(default_factory=list)  # (output, value, root)
    bases: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)  # (value, root)


def _read_outputs(tape: Tape, leaves: Sequence[Any], names: Sequence[str], inputs: Sequence[_Input]) -> _Outputs:
    """Classify every output."""
    read = _Outputs()
    storages = StorageNumbers()
    input_storage = {internals.storage_key(i.wrapper): k for k, i in enumerate(inputs)}
    groups: dict[int, list[int]] = {}
    values: dict[int, Tensor] = {}
    infos: dict[int, OutputAliasInfo] = {}
    for i, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
        if not isinstance(leaf, Tensor):
            if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
                raise SymbolicShapeError(f"`{name}` is a symbolic number", why="that is not supported yet")
            if not isinstance(leaf, _PLAIN_RESULTS):
                raise OutputError(
                    f"`{name}` is a `{type(leaf).__module__}.{type(leaf).__qualname__}`",
                    why="a compiled call would return the same object each time, holding traced tensors perhaps",
                    suggestion="return tensors and plain values, or register the type with torch.utils._pytree",
                )
            read.constants[i] = leaf
            kind = type(leaf)
            infos[i] = OutputAliasInfo(
                index=i, name=name, output_type=OutputType.NON_ALIAS, raw_type=kind.__qualname__, spec=None
            )
            continue
        values[i] = _value(leaf, f"`{name}`")
        groups.setdefault(internals.storage_key(leaf), []).append(i)

    first_of: dict[int, int] = {}

    def info(i: int, kind: OutputType, base: int | None = None, views: tuple[ViewStep, ...] | None = None) -> None:
        first = first_of.setdefault(id(leaves[i]), i)
        infos[i] = OutputAliasInfo(
            index=i,
            name=names[i],
            output_type=kind,
            raw_type="torch.Tensor",
            spec=_wrapper_spec(leaves[i], storages),
            base_idx=base,
            requires_grad=leaves[i].requires_grad,
            views=views,
            same_as=None if first == i else first,
            under_no_grad=bool(views) and not (leaves[i].requires_grad and not leaves[i].is_leaf),
        )

    for key, members in groups.items():
        k = input_storage.get(key)
        if k is not None:
            _read_input_aliases(tape, leaves, values, names, members, k, inputs[k], info)
        else:
            _read_intermediate_group(tape, leaves, values, names, members, read, info)
    read.infos = [infos[i] for i in range(len(leaves))]
    return read


def _wrapper_spec(wrapper: Tensor, storages: StorageNumbers) -> Any:
    return spec_of(wrapper, storages)


def _read_input_aliases(
    tape: Tape,
    leaves: Sequence[Any],
    values: dict[int, Tensor],
    names: Sequence[str],
    members: Sequence[int],
    k: int,
    item: _Input,
    info: Callable[..., None],
) -> None:
    """Classify outputs that live in the storage of input ``k``."""
    base_value = internals.from_functional(item.wrapper)
    for i in members:
        output = leaves[i]
        if output is item.wrapper:
            info(i, OutputType.IS_INPUT, k, ())
            continue
        if output.requires_grad and not _is_view_of(output, item.wrapper):
            raise OutputError(
                f"`{names[i]}` shares memory with `{item.name}` but has an autograd history of its own",
                why="the epilogue can make views of an input only by ordinary view ops",
                suggestion="return a clone",
                argument=item.name,
            )
        views = _with_detach(_views(tape, base_value, values[i]), output, item.wrapper)
        if views is None and values[i].dtype != base_value.dtype:
            raise OutputError(
                f"`{names[i]}` views `{item.name}` as another dtype in a way that cannot be replayed",
                suggestion="return a clone",
                argument=item.name,
            )
        info(i, OutputType.ALIAS_OF_INPUT, k, views)


def _read_intermediate_group(
    tape: Tape,
    leaves: Sequence[Any],
    values: dict[int, Tensor],
    names: Sequence[str],
    members: Sequence[int],
    read: _Outputs,
    info: Callable[..., None],
) -> None:
    """Classify outputs that share the storage of one intermediate."""
    for i in members:
        if leaves[i].requires_grad and leaves[i].is_leaf and internals.base_of(leaves[i]) is None:
            raise OutputError(
                f"`{names[i]}` is a leaf that the function made to require grad",
                why="its gradient would be accumulated inside the graph, out of reach",
                suggestion="create it outside and pass it in",
            )
    distinct = list({id(leaves[i]): i for i in reversed(members)}.values())[::-1]
    differentiable = [leaves[i] for i in distinct if leaves[i].requires_grad]
    lone = leaves[distinct[0]]
    if len(distinct) == 1 and _covers_storage(values[distinct[0]]) and not (lone.requires_grad and lone.is_leaf):
        i = distinct[0]
        made = tape.producer(values[i])
        unsafe = made is not None and made[0].target is torch.ops.aten._unsafe_view.default
        info(i, OutputType.UNSAFE_VIEW_ALIAS if unsafe else OutputType.NON_ALIAS)
        read.returned.append((i, values[i], leaves[i] if leaves[i].requires_grad else None))
        for again in members[1:]:
            info(again, OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT, i, ())
        return

    roots = {id(r): r for r in (_or(internals.base_of(o), o) for o in differentiable)}
    starts = [_value(_or(internals.base_of(leaves[i]), leaves[i]), f"`{names[i]}`") for i in distinct]
    base = _common_base(tape, [_canonical_base(tape, start) for start in starts])
    root = next(iter(roots.values()), None)
    connected = root is None or all(_is_view_of(o, root) for o in differentiable)
    if base is None or not connected or (root is not None and _value(root, "a base") is not base):
        listed = ", ".join(f"`{names[i]}`" for i in distinct)
        raise OutputError(
            f"the outputs {listed} share memory in a way that cannot be made again from one tensor",
            suggestion="return clones",
        )
    owner = next((i for i in distinct if values[i] is base and leaves[i].requires_grad == (root is not None)), None)
    if owner is not None:
        info(owner, OutputType.NON_ALIAS)
        read.returned.append((owner, base, root))
        where, first = owner, OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT
        following = first
    else:
        where = len(read.bases)
        read.bases.append((base, root))
        first, following = OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT, OutputType.ALIAS_OF_INTERMEDIATE
    for i in members:
        if i == owner:
            continue
        views = _views(tape, base, values[i])
        if views is None and values[i].dtype != base.dtype:
            raise OutputError(f"`{names[i]}` views an intermediate as another dtype in a way that cannot be replayed")
        info(i, first, where, _with_detach(views, leaves[i], root))
        first = following


_DETACH = ViewStep(target="aten.detach.default")


def _with_detach(
    views: tuple[ViewStep, ...] | None, output: Tensor, base: Tensor | None
) -> tuple[ViewStep, ...] | None:
    """Add the detach that functionalization may have swallowed: views of a base that requires grad mirror it."""
    lost = base is not None and base.requires_grad and not output.requires_grad and views is not None
    if views == () and output.requires_grad and not output.is_leaf:
        return (ViewStep(target="aten.alias.default"),)
    if views == () or (lost and _DETACH not in views):  # type: ignore[operator]  # not None where lost
        return (*(views or ()), _DETACH)
    return views


def _is_view_of(output: Tensor, base: Tensor) -> bool:
    """Tell whether autograd takes ``output`` for a view of ``base`` and leads its gradient straight there.

    A view made under ``no_grad`` counts: it has no gradient function. A view of such a view does not count: its
    gradient ends at the former.
    """
    if output is base:
        return True
    if internals.base_of(output) is not base:
        return False
    node = output.grad_fn
    if node is None:
        return True
    while node is not base.grad_fn:
        if internals.is_custom_function_node(node):
            return False  # its backward is the user's, not a view's
        variable = getattr(node, "variable", None)  # of the node that accumulates into a leaf
        if variable is not None:
            return variable is base
        following = [edge for edge, _ in node.next_functions if edge is not None]
        if len(following) != 1:
            return False
        node = following[0]
    return True


def _or(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a


def _common_base(tape: Tape, candidates: list[Tensor]) -> Tensor | None:
    """Find the candidate of which all others are views; None if there is none."""
    for candidate in candidates:
        if all(_views(tape, candidate, other) is not None for other in candidates):
            return candidate
    tops = []
    for value in candidates:
        while (parent := _view_parent(tape, value)) is not None:
            value = parent[0]
        tops.append(value)
    return tops[0] if all(top is tops[0] for top in tops) else None


# --- the stage ---------------------------------------------------------------------------------------------------


def run(
    call: Call,
    dedupe: DedupeRecord,
    *,
    decompositions: dict[Any, Callable[..., Any]] | None,
    keep_input_mutations: bool,
    static_inputs: int,
    check_inputs: Callable[[tuple[InputAliasInfo, ...]], None],
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
    check_inputs
        Called as soon as it is known what happened to the inputs; may refuse.

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
    inputs = [_enter(tape, fake_mode, name, call.values[p]) for name, p in zip(dedupe.names, dedupe.kept, strict=True)]
    values = list(call.values)
    for position, source in zip(dedupe.positions, dedupe.source, strict=True):
        values[position] = inputs[source].wrapper
    lifted, args, kwargs = call.rebuild(values)
    settings = global_state()
    random_state = torch.get_rng_state()
    grad_mode = torch.is_grad_enabled()
    try:
        with _tracing(recorder):
            try:
                with EscapeGuard({internals.storage_key(i.wrapper): i.name for i in inputs}):
                    result = call.target.run(lifted, args, kwargs)
                left_grad_mode = torch.is_grad_enabled()
            finally:
                torch.set_grad_enabled(grad_mode)
            leaves, out_spec = internals.flatten(result)
            _check_containers(call, values, args, kwargs)
            infos = tuple(
                _input_info(k, item, tape, storages, keep=False)
                for storages in (StorageNumbers(),)
                for k, item in enumerate(inputs)
            )
            check_inputs(infos)
            names = _output_names(result)
            outputs = _read_outputs(tape, leaves, names, inputs)
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
    except Exception as error:
        raise TraceFailed(f"{type(error).__name__}: {error}") from error
    finally:
        if internals.any_autocast_enabled():
            torch.clear_autocast_cache()  # it would keep the traced tensors, for others to find
        if not torch.equal(random_state, torch.get_rng_state()):
            torch.set_rng_state(random_state)
            seeded = True
        else:
            seeded = False
    if seeded:
        raise RandomOpError(
            "the function seeds or sets a random generator",
            why="that would happen while tracing only",
            suggestion="seed outside of the compiled function",
        )
    changed = [n for (n, a), (_, b) in zip(settings, global_state(), strict=True) if a != b]
    if changed:
        restore_settings(settings)
        raise EscapeError(f"the function leaves a global setting changed: {', '.join(changed)}")
    return _finish(
        call, dedupe, tape, recorder, fake_mode, inputs, infos, outputs, out_spec,
        keep_input_mutations=keep_input_mutations,
        static_inputs=static_inputs,
        left_grad_mode=None if left_grad_mode == grad_mode else left_grad_mode,
    )  # fmt: skip


def _output_names(result: Any) -> list[str]:
    return ["out" + internals.path_text(path) for path in internals.paths(result)]


def _check_containers(call: Call, values: list[Any], args: Any, kwargs: Any) -> None:
    """Refuse a function that put something into a container of the caller's."""
    now, spec = internals.flatten((args, kwargs))
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
    inputs: list[_Input],
    infos: tuple[InputAliasInfo, ...],
    outputs: _Outputs,
    out_spec: Any,
    *,
    keep_input_mutations: bool,
    static_inputs: int,
    left_grad_mode: bool | None,
) -> tuple[TraceRecord, Trace]:
    """Make the tangents, differentiate, and write the joint graph."""
    finals = [internals.from_functional(i.wrapper) for i in inputs]
    visible = [i.mutates_data and inputs[k].wrapper.grad_fn is not inputs[k].grad_fn for k, i in enumerate(infos)]
    sources: list[tuple[TangentSource, int, Tensor | None, Tensor, str]] = []
    for k, seen in enumerate(visible):
        if infos[k].mutates_data:
            root = inputs[k].wrapper if seen and inputs[k].wrapper.requires_grad else None
            sources.append((TangentSource.MUTATED_INPUT, k, root, finals[k], f"mutated input {infos[k].name}"))
    for i, value, out_root in outputs.returned:
        sources.append((TangentSource.OUTPUT, i, out_root, value, outputs.infos[i].name))
    for i, (value, base_root) in enumerate(outputs.bases):
        sources.append((TangentSource.INTERMEDIATE_BASE, i, base_root, value, f"intermediate base {i}"))
    training = any(root is not None for _, _, root, _, _ in sources)

    write_back: list[tuple[Tensor, Tensor]] = []
    if keep_input_mutations and not training:
        # a write in the graph moves the version counter; where eager's does not, the epilogue writes
        infos = tuple(replace(i, keep_input_mutations=True) if i.moves_version else i for i in infos)
        kept = {i.index for i in infos if i.mutation_type is MutationType.MUTATED_IN_GRAPH}
        write_back = [(inputs[k].fake, finals[k]) for k in sorted(kept)]
        sources = [s for s in sources if s[0] is not TangentSource.MUTATED_INPUT or s[1] not in kept]

    prefix = ("primals_{}", 1) if training else ("arg{}_1", 0)
    placeholders: list[tuple[str, Tensor]] = []
    leaves: list[Tensor | None] = []
    kept_at = {p: k for k, p in enumerate(dedupe.kept)}
    for n, position in enumerate(dedupe.placeholders):
        known = kept_at.get(position)
        if known is None:  # a duplicate that keeps its placeholder, which nothing uses
            real = call.values[position]
            fake = tape.enter(fake_mode.from_tensor(real.detach().view_as(real), static_shapes=True))
        else:
            fake = inputs[known].fake
        placeholders.append((prefix[0].format(n + prefix[1]), fake))
        leaves.append(None if known is None else inputs[known].leaf)

    roots, tangents, wrappers, infos_t, positions = [], [], [], [], []
    for position, (source, index, root, value, _) in enumerate(sources):
        if root is None:
            continue
        with fake_mode:
            tangent = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        roots.append(root)
        tangents.append(tape.enter(tangent))
        wrappers.append(internals.to_functional(tangent))
        infos_t.append(TangentInfo(source=source, index=index, spec=spec_of(tangent)))
        positions.append(position)

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
        forward_outputs=[value for _, _, _, value, _ in sources],
        write_back=write_back,
        roots=roots,
        tangent_outputs=positions,
        tangents=tangents,
        tangent_wrappers=wrappers,
        leaves=leaves,
        connected=[leaf is not None for leaf in leaves],
        state_masks=_state_masks(roots),
        backward_error=None,
        out_spec=out_spec,
        out_constants=outputs.constants,
        returned_outputs=[i for i, _, _ in outputs.returned],
        metadata=metadata,
    )
    gradients = _differentiate(trace)
    if gradients:
        width = len(leaves)
        trace.connected = [any(g is not None for g in gradients[k::width]) for k in range(width)]
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
        outputs=tuple(what for _, _, _, _, what in sources),
        random_ops=tuple(str(o.target) for o in tape.operations if o.is_random),
        operations=len(tape.operations),
        backward_error=None if trace.backward_error is None else str(trace.backward_error),
    )
    return record, trace


def _differentiate(trace: Trace) -> list[Tensor | None]:
    """Return the gradients for all tangents together.

    If that raises, the function is compiled all the same: its backward raises when it is asked for, as in eager. What
    can be differentiated from single outputs still can; then those gradients are returned, one list after the other,
    so that the partitioner sees what their backwards need.
    """
    if not trace.training:
        return []
    count = len(trace.tangents)
    try:
        return trace.derive([True] * count)
    except RefusedError:
        raise
    except Exception as error:  # noqa: BLE001  # whatever the traced program's backward raises
        trace.backward_error = error
    gradients: list[Tensor | None] = []
    for i in range(count if count > 1 else 0):
        with suppress(Exception):
            gradients += trace.derive([i == j for j in range(count)])
    return gradients


def _state_masks(roots: Sequence[Tensor]) -> list[int]:
    """Say for each root which autograd nodes that hold saved tensors it reaches, as bits.

    With a single root it is enough to know whether there is any such node.
    """
    numbers: dict[Any, int] = {}
    holds: dict[Any, bool] = {}
    masks = []
    for root in roots:
        mask = 0
        seen: set[Any] = set()
        todo = [root.grad_fn]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node not in holds:
                holds[node] = internals.saves_tensors(node)
            if holds[node]:
                mask |= 1 << numbers.setdefault(node, len(numbers))
                if len(roots) == 1:
                    break
            todo += [following for following, _ in node.next_functions]
        masks.append(mask)
    return masks


def operations_of(trace: Trace) -> Sequence[Operation]:
    """List what was recorded, for the teaching notebooks and tests."""
    return trace.tape.operations
