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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from aotlab import torch_internals
from aotlab.errors import RefusedError
from aotlab.ir.specs import StorageNumbers, TensorSpec, spec_of

#: Which outputs are differentiated after a call: all at once, only the first, one after the other, none.
Backward = Literal["all", "first", "each"] | None

#: What a tensor is to the call. A watched tensor does not go in, but the call can reach it: the base
#: of a view that goes in, or the leaf behind a non-leaf.
Role = Literal["input", "captured", "watched", "output"]


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
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    inputs: tuple[tuple[str, torch.Tensor], ...] = ()
    captured: tuple[tuple[str, torch.Tensor], ...] = ()
    watched: tuple[tuple[str, torch.Tensor], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorState:
    """One tensor as it was after the call and before any backward.

    ``same_as`` is the first name under which this very object appears, ``shares_with`` the first name in its storage;
    both are ``name`` itself for a tensor that is alone. ``version_moved`` says whether its version counter
    differs from before the call; None for outputs and where torch keeps no counter. ``value`` is a copy.
    """

    name: str
    role: Role
    spec: TensorSpec
    same_as: str
    shares_with: str
    version_moved: bool | None
    value: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonLeaf:
    """A returned value that is no tensor: the qualified name of its type, and its text."""

    name: str
    type_name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradient:
    """``leaf.grad`` after backward number ``step``: a copy, or None, which is not the same as zeros."""

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
    random_state
        A digest of the random generators' states after the call.
    differentiated
        The names of what was backwarded: outputs, and inputs whose new value requires grad.
    gradients
        For each backward, the gradient of every leaf.
    backward_failure
        What a backward raised.
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
    """
    known = [("input", *named) for named in call.inputs]
    known += [("captured", *named) for named in call.captured]
    known += [("watched", *named) for named in call.watched]
    versions = {id(tensor): _version(tensor) for _, _, tensor in known}
    leaves_before = {id(tensor) for _, _, tensor in known if tensor.is_leaf and tensor.requires_grad}
    grad_mode_before = torch.is_grad_enabled()
    failure: Failure | None = None
    result: Any = None
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
    leaves = [
        (name, tensor)
        for _, name, tensor in known
        if tensor.is_leaf and (tensor.requires_grad or id(tensor) in leaves_before)
    ]
    differentiated, gradients, backward_failure = (
        _differentiate(_distinct(roots), _distinct(leaves), backward) if failure is None else ((), (), None)
    )
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
        differentiated=differentiated,
        gradients=gradients,
        backward_failure=backward_failure,
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
    return values.reshape(tensor.shape).to(dtype=tensor.dtype, device=tensor.device)


def _differentiate(
    roots: list[tuple[str, torch.Tensor]], leaves: list[tuple[str, torch.Tensor]], backward: Backward
) -> tuple[tuple[str, ...], tuple[Gradient, ...], Failure | None]:
    if backward == "first":
        roots = roots[:1]
    if backward is None or not roots:
        return (), (), None
    cotangents = [cotangent(tensor, index) for index, (_, tensor) in enumerate(roots)]
    groups = [[index] for index in range(len(roots))] if backward == "each" else [list(range(len(roots)))]
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


def _states(
    known: list[tuple[str, str, torch.Tensor]], outputs: list[tuple[str, torch.Tensor]], versions: dict[int, int | None]
) -> tuple[TensorState, ...]:
    storages = StorageNumbers()
    first_object: dict[int, str] = {}
    first_storage: dict[int, str] = {}
    states = []
    for role, name, tensor in [*known, *(("output", *named) for named in outputs)]:
        spec = spec_of(tensor, storages)
        before = versions.get(id(tensor)) if role != "output" else None
        states.append(
            TensorState(
                name=name,
                role=role,  # type: ignore[arg-type]  # mypy widens the literals of a list to str
                spec=spec,
                same_as=first_object.setdefault(id(tensor), name),
                shares_with=name if spec.storage is None else first_storage.setdefault(spec.storage, name),
                version_moved=None if before is None else _version(tensor) != before,
                value=_copy(tensor),
            )
        )
    return tuple(states)


def _distinct(named: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    return [(name, tensor) for name, tensor in named if not (id(tensor) in seen or seen.add(id(tensor)))]  # type: ignore[func-returns-value]  # add returns None on purpose


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach().clone()


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
