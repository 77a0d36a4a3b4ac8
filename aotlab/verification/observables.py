"""Make one call and record everything that a user can observe of it. Every comparison compares two such records.

The record contains the facts that the code that makes the call could see:

- the exception or the returned values;
- the state of the tensors that were passed in, and which tensors share memory;
- the grad mode and the random state after the call;
- the gradients of the leaves.

`observe` makes the call and returns the record. `aotlab.verification.judgement` compares two records.

Side effects on Python objects other than tensors, warnings, printed text and timing are not observed.
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
from aotlab.ir.extents import within_its_storage
from aotlab.ir.specs import StorageNumbers, TensorSpec, spec_of

#: The text in torch's error messages that marks a bug in torch itself.
INTERNAL_ASSERTION = "INTERNAL ASSERT FAILED"

#: Which outputs are differentiated after a call. ``"all"``: all at once. ``"first"``: only the first. ``"each"``: one
#: after the other. ``"reversed"``: one after the other, the last one first. ``"twice"``: all at once, two times, the
#: first time with ``retain_graph``. None: none of them.
Backward = Literal["all", "first", "each", "reversed", "twice"] | None
_BACKWARDS = (*get_args(get_args(Backward)[0]), None)

#: A function that takes the program, or a copy of the module, and returns the callable that is observed.
Candidate = Callable[[Callable[..., Any]], Callable[..., Any]]

#: Types whose ``repr`` contains the whole value.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size)

#: The role of a tensor in the call. A watched tensor is not an argument, but the call can change it: it is the base of
#: an argument that is a view, or the leaf from which a non-leaf argument was computed.
Role = Literal["input", "captured", "watched", "output"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallerStep:
    """Something that the caller does with the results after the call, for example ``out[0].mul_(2)``.

    ``text`` is its source, and ``run`` performs it. ``differentiates`` says whether the step runs a backward. If a step
    that differentiates raises, the remaining steps are not run, because torch does not specify the gradients after a
    failed backward.
    """

    text: str
    run: Callable[[], Any]
    differentiates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """The arguments of one call, and the tensors whose state is observed.

    Attributes
    ----------
    args, kwargs
        The arguments of the function.
    inputs
        The tensors in the arguments, as a flat list by name. A tensor that is passed twice is listed twice.
    captured
        Parameters, buffers and other tensors that the function reads without receiving them as arguments.
    watched
        The bases of inputs that are views, and the leaves from which non-leaf inputs were computed.
    grad_mode
        The grad mode in which the function is called. None leaves the current one.
    before, after
        Functions that take the list of returned tensors and make the caller's steps before and after the backward.
    seen
        A list to which the caller's hooks append the name of their tensor and the gradient that they received.
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
    """The state of one tensor after the call and before any backward.

    ``same_as`` is the first name under which this object appears among the tensors of the call. ``shares_with`` is the
    first name of a tensor in the same storage. If there is no such earlier tensor, they equal ``name``.
    ``version_moved`` says whether the call incremented the version counter; it is None for outputs and for tensors
    without a counter. ``retains_grad`` says whether a non-leaf retains its gradient. ``value`` is a copy.
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
    """A returned value that is not a tensor: the qualified name of its type, and its ``repr``."""

    name: str
    type_name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradient:
    """A copy of the ``grad`` of a leaf after one of the backwards.

    ``leaf`` is the name of the leaf. A non-leaf that retains its gradient is treated as a leaf. ``step`` counts the
    backwards from 0. ``value`` is None if ``grad`` is None, which differs from a gradient of zeros.
    """

    leaf: str
    step: int
    value: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception: its type, the first line of its message, and whether the call or the backward raised it."""

    phase: Literal["call", "backward"]
    type: type[Exception]
    message: str

    @property
    def refused(self) -> str | None:
        """The reason of a refusal: the name of its class without ``Error``. None if the exception is not a refusal."""
        return self.type.__name__.removesuffix("Error") if issubclass(self.type, RefusedError) else None

    def __str__(self) -> str:
        return f"{self.type.__name__}: {self.message}" if self.message else self.type.__name__


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """The result of one `CallerStep`: an exception, or copies of the tensors that the step returned.

    ``values`` contains None for a derivative that autograd left undefined. ``when`` says whether the step ran before or
    after the backward.
    """

    name: str
    when: Literal["before", "after"]
    differentiates: bool
    failure: Failure | None
    values: tuple[torch.Tensor | None, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HookCall:
    """One call of one of the caller's hooks: the name of its tensor, and a copy of the gradient that it received."""

    name: str
    value: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinalState:
    """The state of a tensor after all steps of the caller: its metadata as text, and copies of its value and ``grad``.

    If reading the tensor raises, ``text`` is the type of the error, and ``value`` and ``gradient`` are None.
    """

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
        The exception that the call raised. Then the fields about outputs and gradients are empty.
    container
        How the outputs are nested, as text: ``"tuple(Tensor, dict(a=value))"``.
    tensors
        Inputs, captured tensors, watched tensors and outputs, in this order.
    leaves
        The returned values that are not tensors.
    grad_mode
        Whether grad mode was on when the call returned or raised.
    random_state, random_state_left
        A digest of the random generators' states after the call, and after its backwards if none of them raised.
    differentiated
        The names of the tensors from which the backward started: outputs that require grad, and mutated inputs whose
        new value requires grad.
    gradients
        For each backward, the gradient of every leaf.
    backward_failure
        The exception that a backward raised.
    steps
        The results of the caller's steps before and after the backward.
    hooks
        The calls of the caller's hooks, in their order.
    hook_order
        Pairs of tensor names. The hook of the first tensor must run before the hook of the second, because the gradient
        flows through the first tensor and then through the second.
    finally_
        The state of all tensors after the last step. It is recorded only if the call has a function that makes steps.
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


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` unchanged: the reference of every comparison."""
    return function


def observe(function: Callable[..., Any], call: Call, *, backward: Backward = "all") -> Observation:
    """Call ``function`` once and record everything that its caller can observe.

    The grad mode is restored after the call. Gradients accumulate into the leaves of ``call``.

    Parameters
    ----------
    function
        Called with the arguments of ``call``.
    call
        The arguments and the caller's steps. The function may change the arguments.
    backward
        Which outputs are differentiated after the call, with the gradients that `cotangent` makes. An input that the
        function mutated and that requires grad afterwards is treated as an output.

    Returns
    -------
    Observation
        If the function raised an ``Exception``, ``failure`` is set. Only exceptions like ``KeyboardInterrupt``
        propagate.

    Raises
    ------
    UsageError
        If ``backward`` is not one of the values of `Backward`. The function is not called.
    """
    if backward not in _BACKWARDS:
        choices = ", ".join(map(repr, _BACKWARDS))
        raise UsageError(
            f"backward={backward!r} does not say which outputs are to be differentiated; pass one of {choices}"
        )
    caller_tensors = [("input", *named) for named in call.inputs]
    caller_tensors += [("captured", *named) for named in call.captured]
    caller_tensors += [("watched", *named) for named in call.watched]
    caller_tensors += [(role, *part) for role, name, tensor in caller_tensors for part in _parts(name, tensor)]
    versions = {id(tensor): _version(tensor) for _, _, tensor in caller_tensors}
    leaves_before = {id(tensor) for _, _, tensor in caller_tensors if tensor.is_leaf and tensor.requires_grad}
    result, failure, grad_mode = _called(function, call)
    random_state = _random_state()

    container, returned = flatten(result, "out") if failure is None else ("", [])
    outputs = [(name, value) for name, value in returned if isinstance(value, torch.Tensor)]
    try:
        states = _states(caller_tensors, outputs, versions)
    except RuntimeError as error:
        # An in-place write can make the autograd history of a view invalid. Then reading the view raises, and the
        # exception is recorded as an error of the call.
        failure, container, returned, outputs, states = _failure("call", error), "", [], [], ()
    moved = {state.name for state in states if state.version_moved}
    roots = [(name, tensor) for name, tensor in outputs if tensor.requires_grad]
    roots += [
        (name, tensor)
        for role, name, tensor in caller_tensors
        if name in moved and tensor.requires_grad and not tensor.is_leaf
    ]
    tensors = [(name, tensor) for _, name, tensor in caller_tensors] + outputs
    steps: list[Step] = []
    differentiated: tuple[str, ...] = ()
    gradients: tuple[Gradient, ...] = ()
    backward_failure: Failure | None = None
    hook_order: tuple[tuple[str, str], ...] = ()
    if failure is None:
        passed = _take_steps("before", call.before, outputs, steps)
        if call.seen is not None:
            hook_order = _passed_in_turn(
                [*caller_tensors, *(("output", f"out[{n}]", t) for n, (_, t) in enumerate(outputs))]
            )
        if passed:
            # The caller's steps may have made a tensor retain its gradient.
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


def _called(function: Callable[..., Any], call: Call) -> tuple[Any, Failure | None, bool]:
    """Call the function; return its result, the exception that it raised, and whether grad mode was on at its end."""
    grad_mode_before = torch.is_grad_enabled()
    if call.grad_mode is not None:
        torch.set_grad_enabled(call.grad_mode)
    try:
        return function(*call.args, **call.kwargs), None, torch.is_grad_enabled()
    except Exception as error:  # noqa: BLE001  # the error is an observation, too
        return None, _failure("call", error), torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(grad_mode_before)


def described(
    results: Mapping[str, Any], caller_tensors: Sequence[tuple[str, torch.Tensor]], versions: Mapping[int, int | None]
) -> Observation:
    """Record the results and the state of the tensors after code that this module did not run, as `observe` would.

    The magic ``%%aotcompile`` uses this function for a run of a cell. ``results`` maps names to values, and
    ``caller_tensors`` lists the tensors that existed before. ``versions`` maps the id of each such tensor to its
    version counter before the run. Objects that are neither tensors nor plain Python values are recorded by their type
    only.
    """
    nested = {name: flatten(value, name) for name, value in results.items()}
    leaves = [leaf for _, below in nested.values() for leaf in below]
    outputs = [(name, value) for name, value in leaves if isinstance(value, torch.Tensor)]
    return Observation(
        failure=None,
        container=", ".join(f"{name}={text}" for name, (text, _) in nested.items()),
        tensors=_states([("input", *named) for named in caller_tensors], outputs, versions),
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
    """Describe as text how ``value`` is nested, and list its leaves, each with the expression that leads to it.

    Tuples (named ones too), lists, mappings and dataclass instances are containers. Anything else is a leaf.

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
    """Yield the children of a container as (key, full name, child); yield nothing for a leaf."""
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
    """Make the gradient with which the backward of output number ``index`` starts.

    Its elements are not all equal, so that swapped outputs and transposed gradients make a difference. They are
    multiples of 1/8 between -11/8 and 11/8 and never zero, so that sums are exact in every floating dtype.
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
    """Run the caller's steps and record their results; return False if a step that differentiates raised."""
    if make is None:
        return True
    for step in make([tensor for _, tensor in outputs]):
        failure: Failure | None = None
        copies: tuple[torch.Tensor | None, ...] = ()
        try:
            result = step.run()
            # Record a None only if the step differentiates, because there None is a derivative that autograd left
            # undefined. Ignore all other values that are not tensors.
            copies = tuple(
                _copy(value) if isinstance(value, torch.Tensor) else None
                for value in (result if isinstance(result, tuple) else (result,))
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
    """Return the pairs of tensors for which the gradient flows through the first and later through the second.

    For other pairs, autograd may choose any order of the hooks. Outputs are named as the caller names them: ``out[0]``.
    """
    edges: dict[str, tuple[Any, int]] = {}
    for _, name, tensor in tensors:
        try:
            if tensor.requires_grad:
                edge = torch.autograd.graph.get_gradient_edge(tensor)
                edges[name] = edge.node, edge.output_nr
        except (RuntimeError, AssertionError, AttributeError):
            # The autograd history of the tensor is invalid, or the tensor is an inference tensor.
            continue
    pairs = []
    for name, start in edges.items():
        # Compare edges, not nodes: an op with several outputs, like `unbind`, has one node for all of them.
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
        # One of the caller's steps made the autograd history of the tensor invalid, so reading `is_leaf` raises.
        return False
    return tensor.requires_grad or id(tensor) in leaves_before


def _final_state(name: str, tensor: torch.Tensor) -> FinalState:
    try:
        gradient = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
        text = f"{tensor.dtype}{list(tensor.shape)}, requires_grad {tensor.requires_grad}, is_leaf {tensor.is_leaf}"
        return FinalState(
            name=name, text=text, value=_copy(tensor), gradient=None if gradient is None else _copy(gradient)
        )
    except RuntimeError as error:
        text = type(error).__name__
        if INTERNAL_ASSERTION in str(error):  # a bug in torch; the fuzzer ignores it
            text = f"{text}: {INTERNAL_ASSERTION}"
        return FinalState(name=name, text=text, value=None, gradient=None)


def _states(
    caller_tensors: list[tuple[str, str, torch.Tensor]],
    outputs: list[tuple[str, torch.Tensor]],
    versions: Mapping[int, int | None],
) -> tuple[TensorState, ...]:
    storages = StorageNumbers()
    first_object: dict[int, str] = {}
    first_storage: dict[int, str] = {}
    states = []
    of_outputs = [part for name, tensor in outputs for part in _parts(name, tensor)]
    for role, name, tensor in [*caller_tensors, *(("output", *named) for named in (*outputs, *of_outputs))]:
        spec = spec_of(tensor, storages)
        if torch_internals.is_wrapper(tensor):  # a wrapper has no memory besides the memory of its parts
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
        if torch_internals.is_wrapper(tensor):  # copy the elements of all parts, as one tensor
            parts = [_copy(part).reshape(-1) for _, part in _parts("", tensor)]
            return torch.cat(parts) if parts else torch.empty(0)
        return tensor.detach().clone() if within_its_storage(tensor) else torch.empty(0)


def _parts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """List the parts of a wrapper subclass by name; the list is empty for any other tensor."""
    if not torch_internals.is_wrapper(tensor):
        return []
    attributes, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # subclasses have it
    return [(f"{name}.{attribute}", getattr(tensor, attribute)) for attribute in attributes]


def _version(tensor: torch.Tensor) -> int | None:
    # An inference tensor has no version counter, and reading it raises.
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
    # The default repr contains the address of the object, so the texts of two equal objects would differ.
    return f"<{_type_name(value)}>" if type(value).__repr__ is object.__repr__ else repr(value)
