"""Stage 1, capture: what was called, with which tensors.

The later stages want a flat list of tensors, also of what is nested, and of what a module reads from itself::

    def f(x, opts): return x * opts["scale"] @ opts["w"]
    f(x, {"scale": 2.0, "w": w})

becomes the flat inputs ``x`` and ``opts['w']``, and ``opts['scale']`` a Python value that the entry guards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from aotlab.capture import nesting
from aotlab.capture.signals import RunEagerly
from aotlab.errors import UserLine
from aotlab.guards.call_state import CallState, call_state
from aotlab.guards.reached import Reached
from aotlab.guards.values import NOTHING_MENTIONED, Mentioned
from aotlab.ir.specs import StorageNumbers, TensorSpec, spec_of

if TYPE_CHECKING:
    from aotlab.runtime.draft import Draft

ArgumentKind = Literal["parameter", "buffer", "input", "python"]


class Target:
    """What a frontend asks to be compiled; by default it has no parameters to lift and no Python state to guard."""

    name: str
    line: UserLine | None
    frontend: str

    def lifted(self) -> Sequence[Tensor]:
        """Return the parameters and buffers of this moment, which become the first flat inputs."""
        return ()

    def lifter(self) -> Callable[[], Sequence[Tensor]]:
        """Return a function that reads what `lifted` reads now, also when the target changes its shape later."""
        return self.lifted

    def holder(self, lifted: Sequence[Tensor]) -> Callable[[], AbstractContextManager[None]]:
        """Return what puts ``lifted`` in their place again, for a function that the backward runs once more."""
        return nullcontext

    def lifted_names(self) -> Sequence[tuple[str, ArgumentKind]]:
        """Name them, in the same order."""
        return ()

    def reached(self) -> tuple[Reached, ...]:
        """Return what the function reads besides its arguments."""
        return ()

    def mentioned(self) -> Mentioned:
        """Return which attributes of its arguments the function may read; asked after `reached`."""
        return NOTHING_MENTIONED

    def objects(self) -> list[Any]:
        """Return the objects that the function reaches; asked after `run`."""
        return []

    def still_same(self) -> Callable[[], bool] | None:
        """Return a fast check of `reached` and of where what is lifted hangs, None if there is nothing to check."""
        return None

    def run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function with ``lifted`` in place of its own parameters and buffers."""
        raise NotImplementedError

    def between(self, draft: Draft, positions: Sequence[int]) -> None:
        """Write what comes behind the autograd node that makes the forward outputs at ``positions``."""

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original function."""
        raise NotImplementedError

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Name the flat arguments, in their order."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentRecord:
    """One flat argument: ``spec`` describes a tensor, ``value`` is the text of a Python value."""

    name: str
    kind: ArgumentKind
    spec: TensorSpec | None
    value: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRecord:
    """What was called.

    ``arguments`` has the lifted parameters and buffers first, then the flat arguments; equal storage numbers of their
    specs show shared memory. ``training``: grad mode was on, and an argument requires grad; whether
    anything can be differentiated is found by the trace.
    """

    function: str
    line: UserLine | None
    frontend: str
    arguments: tuple[ArgumentRecord, ...]
    grad_mode: bool
    training: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A captured call: flat ``values``, lifted ones first, and ``spec``, the tree of (args, kwargs). Never kept."""

    target: Target
    values: tuple[Any, ...]
    lifted_count: int
    spec: nesting.Node
    state: CallState
    #: The state outside of the inference mode that the function enters itself, if it does.
    outside: CallState | None = None

    @property
    def tensor_positions(self) -> tuple[int, ...]:
        """The positions of the tensors among ``values``."""
        return tuple(i for i, value in enumerate(self.values) if isinstance(value, Tensor))

    def rebuild(self, values: Sequence[Any]) -> tuple[list[Tensor], tuple[Any, ...], dict[str, Any]]:
        """Nest flat values as the caller did; return (lifted, args, kwargs)."""
        args, kwargs = nesting.unflatten(values[self.lifted_count :], self.spec)
        return list(values[: self.lifted_count]), tuple(args), dict(kwargs)


def names_of_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Name each flat argument by the parameter that takes it: ``x``, ``opts['w']``, ``args[0]``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    heads = [plain[i] if i < len(plain) else f"{rest}[{i - len(plain)}]" for i in range(len(args))]
    return nesting.paths([*zip(heads, args, strict=True), *kwargs.items()])


def check_modes(values: Sequence[Any]) -> None:
    """Have a call run eagerly in anomaly mode, or of tensors of inference mode of which eager keeps no history."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    if torch.is_grad_enabled() and any(tensor.is_inference() for tensor in tensors):
        raise RunEagerly(
            "an argument or a parameter that requires grad was made in inference mode",
            suggestion="make it outside of inference mode, or call it under no_grad(), to have it compiled",
        )
    if torch.is_anomaly_enabled():
        raise RunEagerly(
            "it is called in anomaly mode, which looks at what each autograd node of eager's returns",
            suggestion="call it outside of torch.autograd.detect_anomaly() to have it compiled",
        )


def run(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CaptureRecord, Call]:
    """Capture one call of ``target``; raises `RefusedError` at an argument or a mode that a graph could not respect."""
    reached = target.reached()
    lifted = list(target.lifted())
    names = [name for name, _ in target.lifted_names()] + target.argument_names(args, kwargs)
    leaves, spec = nesting.flatten((args, kwargs))
    values = (*lifted, *leaves)
    positional, by_name = spec.children
    named = (f"{key}={child}" for key, child in zip(by_name.keys, by_name.children, strict=True))
    state = call_state(
        structure=f"({', '.join([*map(str, positional.children), *named])})",
        nesting=spec,
        names=names,
        values=values,
        reached=reached,
        mentioned=target.mentioned(),
    )

    storages = StorageNumbers()
    kinds = [kind for _, kind in target.lifted_names()]
    arguments = []
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        if isinstance(value, Tensor):
            kind: ArgumentKind = kinds[i] if i < len(kinds) else "input"
            arguments.append(ArgumentRecord(name=name, kind=kind, spec=spec_of(value, storages)))
        else:
            arguments.append(ArgumentRecord(name=name, kind="python", spec=None, value=repr(value)))
    grad_mode = torch.is_grad_enabled()
    record = CaptureRecord(
        function=target.name,
        line=target.line,
        frontend=target.frontend,
        arguments=tuple(arguments),
        grad_mode=grad_mode,
        training=grad_mode and any(a.spec is not None and a.spec.requires_grad for a in arguments),
    )
    return record, Call(target=target, values=values, lifted_count=len(lifted), spec=spec, state=state)
