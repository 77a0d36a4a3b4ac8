"""Stage 1, capture: what was called, with which tensors.

A function takes any nesting of tensors and plain values; the later stages want a flat list of
tensors. A module reads its parameters from itself; the later stages want them as inputs::

    def f(x, opts): return x * opts["scale"] @ opts["w"]
    f(x, {"scale": 2.0, "w": w})

becomes the flat inputs ``x`` and ``opts['w']``, with ``opts['scale']`` a Python value that the entry
guards. Nothing is run here and nothing is copied: the stage only looks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from aotlab import torch_internals as internals
from aotlab.errors import UserLine
from aotlab.guards import CallState, call_state
from aotlab.ir.specs import StorageNumbers, TensorSpec, spec_of
from aotlab.reached import Reached

ArgumentKind = Literal["parameter", "buffer", "input", "python"]


class Target(Protocol):
    """What a frontend asks to be compiled."""

    name: str
    line: UserLine | None
    frontend: str

    def lifted(self) -> Sequence[Tensor]:
        """Return the parameters and buffers of this moment, which become the first flat inputs."""

    def lifter(self) -> Callable[[], Sequence[Tensor]]:
        """Return a function that reads what `lifted` reads now, also when the target changes its shape later."""

    def lifted_names(self) -> Sequence[tuple[str, ArgumentKind]]:
        """Name them, in the same order."""

    def reached(self) -> tuple[Reached, ...]:
        """Return what the function reads besides its arguments."""

    def still_same(self) -> Callable[[], bool] | None:
        """Return a fast check of `reached` and of where what is lifted hangs, None if there is nothing to check."""

    def run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function with ``lifted`` in place of its own parameters and buffers."""

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original function."""

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Name the flat arguments, in pytree order."""


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

    ``arguments`` has the lifted parameters and buffers first, then the flat arguments; specs number their storages
    within the record, so that shared memory shows. ``in_spec`` is the nesting as text. ``training`` says whether
    grad mode was on and an argument requires grad.
    """

    function: str
    line: UserLine | None
    frontend: str
    arguments: tuple[ArgumentRecord, ...]
    in_spec: str
    grad_mode: bool
    training: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A captured call with its live values, for the stages that follow; never kept beyond the compilation.

    ``values`` are the flat arguments, lifted ones first; ``rebuild`` nests a flat list again and returns (lifted,
    args, kwargs); ``spec`` is the pytree spec of (args, kwargs).
    """

    target: Target
    values: tuple[Any, ...]
    lifted_count: int
    spec: Any
    state: CallState

    @property
    def tensor_positions(self) -> tuple[int, ...]:
        """The positions of the tensors among ``values``."""
        return tuple(i for i, value in enumerate(self.values) if isinstance(value, Tensor))

    def rebuild(self, values: Sequence[Any]) -> tuple[list[Tensor], tuple[Any, ...], dict[str, Any]]:
        """Nest flat values as the caller did."""
        args, kwargs = internals.unflatten(values[self.lifted_count :], self.spec)
        return list(values[: self.lifted_count]), tuple(args), dict(kwargs)


def names_of_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Name each flat argument by the parameter that takes it: ``x``, ``opts['w']``, ``args[0]``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    names = []
    for keys in internals.paths((args, kwargs)):
        where, top, inner = keys[0], keys[1], keys[2:]
        if where.idx == 0:
            head = plain[top.idx] if top.idx < len(plain) else f"{rest}[{top.idx - len(plain)}]"
        else:
            head = str(top.key)
        names.append(head + internals.path_text(inner))
    return names


def run(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CaptureRecord, Call]:
    """Capture one call of ``target``.

    Raises
    ------
    RefusedError
        An argument cannot be traced or guarded, or the call stands under a mode that the graph could not respect.
    """
    reached = target.reached()
    lifted = list(target.lifted())
    leaves, spec = internals.flatten((args, kwargs))
    values = (*lifted, *leaves)
    names = [name for name, _ in target.lifted_names()] + target.argument_names(args, kwargs)
    state = call_state(nesting=spec, names=names, values=values, reached=reached)

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
        in_spec=state.structure,
        grad_mode=grad_mode,
        training=grad_mode and any(a.spec is not None and a.spec.requires_grad for a in arguments),
    )
    return record, Call(target=target, values=values, lifted_count=len(lifted), spec=spec, state=state)
