"""What a user can observe of a call: the record on which every comparison stands.

A call is observed from outside, as its caller would: what it raised or returned, what became of the
tensors that went in, which tensors share memory, the grad mode and random state it left behind, and
which gradient reaches which leaf. `observe` makes one call and writes all of that down;
`aotlab.verification.differential` compares two such records.

Not observed: side effects on Python objects other than tensors, warnings, printed text, timing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from aotlab import _torch as torch_internals
from aotlab.errors import RefusedError, UsageError
from aotlab.ir.specs import StorageNumbers, TensorSpec, spec_of

#: How torch's errors say that they are mistakes of torch's own.
INTERNAL_ASSERTION = "INTERNAL ASSERT FAILED"

#: Which outputs are differentiated after a call: all at once, only the first, one after the other, that in reverse, all
#: twice over (the first time with ``retain_graph``), none.
Backward = Literal["all", "first", "each", "reversed", "twice"] | None
_BACKWARDS = (*get_args(get_args(Backward)[0]), None)

#: Values that their text tells whole.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size)

#: What a tensor is to the call. A watched tensor does not go in, but the call can reach it: the base
#: of a view that goes in, or the leaf behind a non-leaf.
Role = Literal["input", "captured", "watched", "output"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallerStep:
    """One thing that the caller does with what came back: its ``text``, and what does it.

    After a step that ``differentiates`` has raised, nothing more is done: how far a backward got is not defined.
    """

    text: str
    run: Callable[[], Any]
    differentiates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """The live arguments of one call, and the tensors by whose state the call is judged.

    Attributes
    ----------
    args, kwargs
        What the function is called with.
    inputs
        The tensors among them, flat, by name; one that is passed twice stands here twice.
    captured
        Parameters, buffers and other tensors that the function reaches by itself.
    watched
        Bases of view inputs and leaves behind non-leaf inputs.
    grad_mode
        The grad mode in which the function is called; None for the one that is in force.
    before, after
        What the caller does before and after the backward, made from the list of the returned tensors.
    seen
        A list to which hooks of the caller add a name and the gradient that they got.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: tuple[tuple[str, torch.Tensor], ...] = ()
    captured: tuple[tuple[str, torch.Tensor], ...] = ()
    watched: tuple[tuple[str, torch.Tensor], ...] = ()
    grad_mode: bool | None = None
    before: Callable[[list[torch.Tensor]], Sequence[CallerStep]] | None = None
    after: Callable[[list[torch.Tensor]], Sequence[CallerStep]] | None = None
    seen: list[tuple[str, torch.Tensor]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorState:
    """One tensor as it was after the call and before any backward.

    ``same_as`` is the first name under which this very object appears, ``shares_with`` the first name in its storage;
    both are ``name`` itself for a tensor that is alone. ``version_moved`` says whether its version counter
    differs from before the call; None for outputs and where torch keeps no counter. ``retains_grad`` says whether a
    non-leaf keeps its gradient. ``value`` is a copy.
    """

    name: str
    role: Role
    spec: TensorSpec
    same_as: str
    shares_with: str
    version_moved: bool | None
    retains_grad: bool
    value: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonLeaf:
    """A returned value that is no tensor: the qualified name of its type, and its text."""

    name: str
    type_name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradient:
    """``leaf.grad`` after backward number ``step``: a copy, or None, which is not the same as zeros.

    A tensor that retains its gradient counts as a leaf.
    """

    leaf: str
    step: int
    value: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception: its type, the first line of its message, and the half of the program that raised it."""

    phase: Literal["call", "backward"]
    type: type[Exception]
    message: str

    @property
    def refused(self) -> str | None:
        """The reason by which refusals are counted; None if this is an error of another kind."""
        return self.type.__name__.removesuffix("Error") if issubclass(self.type, RefusedError) else None

    def __str__(self) -> str:
        return f"{self.type.__name__}: {self.message}" if self.message else self.type.__name__


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What came of one thing that the caller did: an error, or the tensors (and Nones) that it gave, as copies.

    It was done before or after the backward.
    """

    name: str
    when: Literal["before", "after"]
    differentiates: bool
    failure: Failure | None
    values: tuple[torch.Tensor | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HookCall:
    """One call of a hook of the caller's: its name, and a copy of the gradient."""

    name: str
    value: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinalState:
    """A tensor when the caller had done everything: what it was then, as text, a copy, and its gradient."""

    name: str
    text: str
    value: torch.Tensor | None
    gradient: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """Everything that was observed of one call.

    Attributes
    ----------
    failure
        What the call raised; everything about outputs and gradients is then empty.
    container
        How the outputs are nested, as text: ``"tuple(Tensor, dict(a=value))"``.
    tensors
        Inputs, captured tensors, watched tensors and outputs, in this order.
    leaves
        The returned values that are no tensors.
    grad_mode
        Whether grad mode was on when the call returned or raised.
    random_state, random_state_left
        A digest of the random generators' states after the call, and after its backwards, if none raised.
    differentiated
        The names of what was backwarded: outputs, and inputs whose new value requires grad.
    gradients
        For each backward, the gradient of every leaf.
    backward_failure
        What a backward raised.
    steps
        What came of the things that the caller did before and after the backward.
    hooks
        The calls of the caller's hooks, in their order.
    hook_order
        Pairs of names of which the first one's hook must be called before the second one's, because the gradient
        passes through both.
    finally_
        All tensors at the end; only where the caller did something.
    """

    failure: Failure | None
    container: str
    tensors: tuple[TensorState, ...]
    leaves: tuple[PythonLeaf, ...]
    grad_mode: bool
    random_state: str
    differentiated: tuple[str, ...]
    gradients: tuple[Gradient, ...]
    backward_failure: Failure | None
    steps: tuple[Step, ...] = ()
    hooks: tuple[HookCall, ...] = ()
    hook_order: tuple[tuple[str, str], ...] = ()
    finally_: tuple[FinalState, ...] = ()
    random_state_left: str = ""


def observe(function: Callable[..., Any], call: Call, *, backward: Backward = "all") -> Observation:
    """Call ``function`` once and write down what its caller can observe.

    The grad mode is put back as it was before the call; gradients accumulate into the leaves of ``call``.

    Parameters
    ----------
    function
        Called with the arguments of ``call``.
    call
        The live arguments. They are changed as the function changes them.
    backward
        Which outputs are differentiated afterwards, with fixed, uneven cotangents. An input that the function
        mutated and that requires grad afterwards counts as an output.

    Returns
    -------
    Observation
        With ``failure`` set if the function raised; nothing but ``KeyboardInterrupt`` and its like is raised.

    Raises
    ------
    UsageError
        There is no such ``backward``; the function was not called.
    """
    if backward not in _BACKWARDS:
        ways = ", ".join(map(repr, _BACKWARDS))
        raise UsageError(
            f"backward={backward!r} does not say which outputs are to be differentiated; pass one of {ways}"
        )
    known = [("input", *named) for named in call.inputs]
    known += [("captured", *named) for named in call.captured]
    known += [("watched", *named) for named in call.watched]
    known += [(role, *part) for role, name, tensor in known for part in _parts(name, tensor)]
    versions = {id(tensor): _version(tensor) for _, _, tensor in known}
    leaves_before = {id(tensor) for _, _, tensor in known if tensor.is_leaf and tensor.requires_grad}
    grad_mode_before = torch.is_grad_enabled()
    failure: Failure | None = None
    result: Any = None
    if call.grad_mode is not None:
        torch.set_grad_enabled(call.grad_mode)
    try:
        result = function(*call.args, **call.kwargs)
    except Exception as error:  # noqa: BLE001  # what it raises is what is observed
        failure = _failure("call", error)
    grad_mode = torch.is_grad_enabled()
    torch.set_grad_enabled(grad_mode_before)
    random_state = _random_state()

    container, returned = flatten(result, "out") if failure is None else ("", [])
    outputs = [(name, value) for name, value in returned if isinstance(value, torch.Tensor)]
    try:
        states = _states(known, outputs, versions)
    except RuntimeError as error:
        # A view whose history an in-place write made invalid raises at the first look; so the call counts as raising.
        failure, container, returned, outputs, states = _failure("call", error), "", [], [], ()
    moved = {state.name for state in states if state.version_moved}
    roots = [(name, tensor) for name, tensor in outputs if tensor.requires_grad]
    roots += [
        (name, tensor) for role, name, tensor in known if name in moved and tensor.requires_grad and not tensor.is_leaf
    ]
    tensors = [(name, tensor) for _, name, tensor in known] + outputs
    steps: list[Step] = []
    differentiated: tuple[str, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    backward_failure: Failure | None = None
    hook_order: tuple[tuple[str, str], ...] = ()
    if failure is None:
        passed = _take_steps("before", call.before, outputs, steps)
        if call.seen is not None:
            hook_order = _passed_in_turn([*known, *(("output", f"out[{n}]", t) for n, (_, t) in enumerate(outputs))])
        if passed:
            # What the caller did may have made a tensor retain its gradient.
            leaves = _distinct([named for named in tensors if _keeps_gradient(named[1], leaves_before)])
            differentiated, gradients, backward_failure = _differentiate(_distinct(roots), leaves, backward)
        if passed and backward_failure is None:
            _take_steps("after", call.after, outputs, steps)
    called = {name for name, _ in call.seen or ()}
    acted = failure is None and (call.before is not None or call.after is not None)
    return Observation(
        failure=failure,
        container=container,
        tensors=states,
        leaves=tuple(
            PythonLeaf(name=name, type_name=_type_name(value), text=_text(value))
            for name, value in returned
            if not isinstance(value, torch.Tensor)
        ),
        grad_mode=grad_mode,
        random_state=random_state,
        random_state_left=_random_state() if backward_failure is None else "",
        differentiated=differentiated,
        gradients=gradients,
        backward_failure=backward_failure,
        steps=tuple(steps),
        hooks=tuple(HookCall(name=name, value=_copy(value)) for name, value in call.seen or ()),
        hook_order=tuple(pair for pair in hook_order if called.issuperset(pair)),
        finally_=tuple(_final_state(name, tensor) for name, tensor in _distinct(tensors)) if acted else (),
    )


def described(
    results: Mapping[str, Any], known: Sequence[tuple[str, torch.Tensor]], versions: Mapping[int, int | None]
) -> Observation:
    """Write down what a call that was made elsewhere has left: by name what it gave, and the tensors that went in.

    Of objects that are neither tensors nor plain values the type counts.
    """
    nested = {name: flatten(value, name) for name, value in results.items()}
    leaves = [leaf for _, below in nested.values() for leaf in below]
    outputs = [(name, value) for name, value in leaves if isinstance(value, torch.Tensor)]
    return Observation(
        failure=None,
        container=", ".join(f"{name}={text}" for name, (text, _) in nested.items()),
        tensors=_states([("input", *named) for named in known], outputs, versions),
        leaves=tuple(
            PythonLeaf(name=name, type_name=_type_name(value), text=_text(value) if type(value) in _PLAIN else "")
            for name, value in leaves
            if not isinstance(value, torch.Tensor)
        ),
        grad_mode=torch.is_grad_enabled(),
        random_state=_random_state(),
        differentiated=(),
        gradients=(),
        backward_failure=None,
    )


def flatten(value: Any, name: str) -> tuple[str, list[tuple[str, Any]]]:
    """List the leaves of ``value`` with their names, and describe how they are nested.

    Tuples (named ones too), lists, mappings and dataclass instances are containers; anything else is a leaf.

    Examples
    --------
    >>> flatten((1, {"a": None}), "out")
    ('tuple(value, dict(a=value))', [('out[0]', 1), ("out[1]['a']", None)])
    """
    items = list(children(value, name))
    if not items:
        if isinstance(value, torch.Tensor):
            return "Tensor", [(name, value)]
        empty = isinstance(value, tuple | list | Mapping)
        return (f"{_type_name(value)}()", []) if empty else ("value", [(name, value)])
    parts, leaves = [], []
    for key, label, child in items:
        text, below = flatten(child, label)
        parts.append(f"{key}={text}" if key else text)
        leaves += below
    return f"{_type_name(value)}({', '.join(parts)})", leaves


def children(value: Any, name: str) -> Iterator[tuple[str, str, Any]]:
    """Give the parts of a container as (key, full name, part); nothing for a leaf."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        for key, child in zip(value._fields, value, strict=True):
            yield key, f"{name}.{key}", child
    elif isinstance(value, tuple | list):
        for index, child in enumerate(value):
            yield "", f"{name}[{index}]", child
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield str(key), f"{name}[{key!r}]", child
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield field.name, f"{name}.{field.name}", getattr(value, field.name)


def cotangent(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """Make the cotangent of output number ``index``: uneven, never zero, exact in every floating dtype.

    Uneven, so that swapped outputs and transposed gradients show; multiples of 1/8 up to 11/8, so that sums are exact.
    """
    steps = torch.arange(tensor.numel(), dtype=torch.float64)
    values = ((steps * 7 + index * 3) % 11 + 1) / 8 * (1 - 2 * ((steps + index) % 2))
    values = values.reshape(tensor.shape).to(dtype=tensor.dtype, device=tensor.device)
    return torch.zeros_like(tensor) + values if torch_internals.is_wrapper(tensor) else values


def _differentiate(
    roots: list[tuple[str, torch.Tensor]], leaves: list[tuple[str, torch.Tensor]], backward: Backward
) -> tuple[tuple[str, ...], tuple[Gradient, ...], Failure | None]:
    if backward == "first":
        roots = roots[:1]
    if backward is None or not roots:
        return (), (), None
    cotangents = [cotangent(tensor, index) for index, (_, tensor) in enumerate(roots)]
    every = list(range(len(roots)))
    groups = {"each": [[index] for index in every], "reversed": [[index] for index in every[::-1]]}.get(
        backward, [every, every] if backward == "twice" else [every]
    )
    gradients: list[Gradient] = []
    failure = None
    for step, group in enumerate(groups):
        try:
            torch.autograd.backward(
                [roots[index][1] for index in group],
                [cotangents[index] for index in group],
                retain_graph=step + 1 < len(groups),
            )
        except Exception as error:  # noqa: BLE001  # as above
            failure = _failure("backward", error)
        gradients += [
            Gradient(leaf=name, step=step, value=None if leaf.grad is None else _copy(leaf.grad))
            for name, leaf in leaves
        ]
        if failure is not None:
            break
    return tuple(name for name, _ in roots), tuple(gradients), failure


def _take_steps(
    when: Literal["before", "after"],
    make: Callable[[list[torch.Tensor]], Sequence[CallerStep]] | None,
    outputs: list[tuple[str, torch.Tensor]],
    taken: list[Step],
) -> bool:
    """Do what the caller does and write it down; False if there is no point in going on."""
    if make is None:
        return True
    for step in make([tensor for _, tensor in outputs]):
        failure: Failure | None = None
        copies: tuple[torch.Tensor | None, ...] = ()
        try:
            given = step.run()
            # A derivative that is None counts; whatever else a statement gives does not.
            copies = tuple(
                _copy(value) if isinstance(value, torch.Tensor) else None
                for value in (given if isinstance(given, tuple) else (given,))
                if isinstance(value, torch.Tensor) or (value is None and step.differentiates)
            )
        except Exception as error:  # noqa: BLE001  # as above
            failure = _failure("backward", error)
        taken.append(
            Step(name=step.text, when=when, differentiates=step.differentiates, failure=failure, values=copies)
        )
        if failure is not None and step.differentiates:
            return False
    return True


def _passed_in_turn(tensors: Sequence[tuple[str, str, torch.Tensor]]) -> tuple[tuple[str, str], ...]:
    """Say of which tensors the gradient passes the first and, on from there, the second.

    Between other tensors the order is autograd's own affair. Outputs are called as the caller calls them: ``out[0]``.
    """
    edges: dict[str, tuple[Any, int]] = {}
    for _, name, tensor in tensors:
        try:
            if tensor.requires_grad:
                edge = torch.autograd.graph.get_gradient_edge(tensor)
                edges[name] = edge.node, edge.output_nr
        except (RuntimeError, AssertionError):
            # Its history is invalid.
            continue
    pairs = []
    for name, start in edges.items():
        # by the edge, since one node may be that of several outputs, as of `unbind`
        passed: set[tuple[Any, int]] = set()
        reached, pending = {start[0]}, [start[0]]
        while pending:
            following = {edge for edge in pending.pop().next_functions if edge[0] is not None}
            passed |= following
            nodes = {node for node, _ in following} - reached
            reached |= nodes
            pending += nodes
        pairs += [(name, other) for other, edge in edges.items() if edge in passed]
    return tuple(pairs)


def _keeps_gradient(tensor: torch.Tensor, leaves_before: set[int]) -> bool:
    try:
        if not tensor.is_leaf:
            return tensor.retains_grad
    except RuntimeError:
        # What the caller did made its history invalid.
        return False
    return tensor.requires_grad or id(tensor) in leaves_before


def _final_state(name: str, tensor: torch.Tensor) -> FinalState:
    try:
        kept = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
        text = f"{tensor.dtype}{list(tensor.shape)}, requires_grad {tensor.requires_grad}, is_leaf {tensor.is_leaf}"
        return FinalState(name=name, text=text, value=_copy(tensor), gradient=None if kept is None else _copy(kept))
    except RuntimeError as error:
        text = type(error).__name__
        if INTERNAL_ASSERTION in str(error):  # a mistake of torch's, of which the fuzzer makes nothing
            text = f"{text}: {INTERNAL_ASSERTION}"
        return FinalState(name=name, text=text, value=None, gradient=None)


def _states(
    known: list[tuple[str, str, torch.Tensor]],
    outputs: list[tuple[str, torch.Tensor]],
    versions: Mapping[int, int | None],
) -> tuple[TensorState, ...]:
    storages = StorageNumbers()
    first_object: dict[int, str] = {}
    first_storage: dict[int, str] = {}
    states = []
    of_outputs = [part for name, tensor in outputs for part in _parts(name, tensor)]
    for role, name, tensor in [*known, *(("output", *named) for named in (*outputs, *of_outputs))]:
        spec = spec_of(tensor, storages)
        if torch_internals.is_wrapper(tensor):  # the memory that counts is its parts'
            spec = dataclasses.replace(spec, storage_bytes=None)
        before = versions.get(id(tensor)) if role != "output" else None
        states.append(
            TensorState(
                name=name,
                role=role,  # type: ignore[arg-type]  # mypy widens the literals of a list to str
                spec=spec,
                same_as=first_object.setdefault(id(tensor), name),
                shares_with=name if spec.storage is None else first_storage.setdefault(spec.storage, name),
                version_moved=None if before is None else _version(tensor) != before,
                retains_grad=not tensor.is_leaf and tensor.retains_grad,
                value=_copy(tensor),
            )
        )
    return tuple(states)


def _distinct(named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    return [(name, tensor) for name, tensor in named if not (id(tensor) in seen or seen.add(id(tensor)))]  # type: ignore[func-returns-value]  # add returns None on purpose


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if torch_internals.is_wrapper(tensor):  # the elements of all that it wraps
            parts = [_copy(part).reshape(-1) for _, part in _parts("", tensor)]
            return torch.cat(parts) if parts else torch.empty(0)
        return tensor.detach().clone()


def _parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Name the tensors that a subclass wraps; there are none in another tensor."""
    if not torch_internals.is_wrapper(tensor):
        return []
    attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # subclasses have it
    return [(f"{name}.{attribute}", getattr(tensor, attribute)) for attribute in attributes]


def _version(tensor: torch.Tensor) -> int | None:
    # An inference tensor has no version counter, and asking for it raises.
    return None if tensor.is_inference() else torch_internals.version_of(tensor)


def _failure(phase: Literal["call", "backward"], error: Exception) -> Failure:
    lines = str(error).strip().splitlines()
    return Failure(phase=phase, type=type(error), message=lines[0] if lines else "")


def _random_state() -> str:
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for state in torch.cuda.get_rng_state_all():
            digest.update(state.numpy().tobytes())
    return digest.hexdigest()[:12]


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _text(value: object) -> str:
    # The default repr holds an address, by which equal objects would differ.
    return f"<{_type_name(value)}>" if type(value).__repr__ is object.__repr__ else repr(value)
