"""Stage 1, capture: record the called function and its arguments as flat values.

The later stages need a flat list of tensors. It includes tensors in containers, and the parameters and buffers that a
module reads from itself::

    def f(x, opts): return x * opts["scale"] @ opts["w"]
    f(x, {"scale": 2.0, "w": w})

This call has the flat inputs ``x`` and ``opts['w']``, and the Python value ``opts['scale']``, which the entry guards.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from aotlab._torch import storage_id
from aotlab.capture import nesting
from aotlab.capture.signals import RunEagerly
from aotlab.errors import UserLine
from aotlab.guards.call_state import CallState, call_state
from aotlab.guards.guarded_values import NOTHING_MENTIONED, Mentioned
from aotlab.guards.reached import Reached
from aotlab.ir.fx_graphs import NodeRecord
from aotlab.ir.specs import StorageNumbers, TensorSpec, spec_of

#: The kind of a flat argument. A ``"base"`` is no argument: it is the base of a view (`aotlab.capture.view_bases`).
ArgumentKind = Literal["parameter", "buffer", "input", "python", "base"]


class Target:
    """The function that a frontend asks the engine to compile. Each frontend has a subclass.

    The methods of this base class lift no parameters and guard no Python state.
    """

    name: str
    line: UserLine | None
    frontend: str
    #: Whether numbers in the caller's Python objects may be inputs of the graph.
    lifts_numbers = True
    #: Whether compiled calls may set plain Python values that the traced function sets, for example a flag.
    repeats_changes = True
    #: The nodes of the graph that the frontend captured, if somebody listens to events.
    nodes: tuple[NodeRecord, ...] = ()

    @property
    def sets_constants(self) -> bool:
        """Whether the function has set plain Python values, other than numbers, in the latest trace."""
        return False

    def lifted(self) -> Sequence[Tensor]:
        """Return the current parameters and buffers, which become the first flat inputs."""
        return ()

    def lifter(self) -> Callable[[], Sequence[Tensor]]:
        """Return a function that reads the lifted tensors again from the places where they are stored now.

        A place is, for example, a key of a module's ``_parameters``. The function reads these places even if the
        structure of the target changes later.
        """
        return self.lifted

    def holder(self, lifted: Sequence[Tensor]) -> Callable[[], AbstractContextManager[None]]:
        """Return a function that returns a context manager.

        In this context, the user's modules hold the tensors ``lifted`` as their parameters and buffers. The trace needs
        the context for checkpoints. In the backward, a checkpoint runs its function again, and this function must then
        read the traced tensors.
        """
        return nullcontext

    def lifted_names(self) -> Sequence[tuple[str, ArgumentKind]]:
        """Return the name and kind of each lifted tensor, in the same order."""
        return ()

    def reached(self) -> tuple[Reached, ...]:
        """Return the values that the function reads besides its arguments."""
        return ()

    def mentioned(self) -> Mentioned:
        """Return the names of the attributes that the function may read from its arguments. Call `reached` first."""
        return NOTHING_MENTIONED

    def objects(self) -> list[Any]:
        """Return the Python objects that the function can reach through closures, globals and attributes.

        Call `run` first, because it records these objects.
        """
        return []

    def still_same(self) -> Callable[[], bool] | None:
        """Return a fast check that the values that `reached` returned are unchanged, or None if there are no values."""
        return None

    def run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function, in a trace, with the tensors ``lifted`` in place of its parameters and buffers."""
        raise NotImplementedError

    def end_trace(self) -> None:
        """Raise `RetraceNeeded` if the trace found a fact without which a trace of this call is wrong."""

    def after_call(self) -> Callable[[Any], Any] | None:
        """Return a function that converts the traced result into the result of the call, or None to leave it unchanged.

        The function writes plain values into the caller's Python objects, if the traced function changed some.
        """
        return None

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original function."""
        raise NotImplementedError

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Return the names of the flat arguments, in order."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentRecord:
    """One flat argument.

    For a tensor, ``spec`` describes it, and ``storage_id`` identifies its storage within this process. For a Python
    value, ``value`` is its ``repr``.
    """

    name: str
    kind: ArgumentKind
    spec: TensorSpec | None
    value: str | None = None
    storage_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRecord:
    """The called function and its arguments.

    ``arguments`` has the lifted parameters and buffers first, then the flat arguments. If two specs have the same
    storage number, their tensors share a storage. ``training`` is true if grad mode was on and an argument requires
    grad. Whether an output can be differentiated is not known yet: the trace finds it out. ``nodes`` are the nodes of
    the graph that the frontend captured; empty if the frontend captures no graph.
    """

    function: str
    line: UserLine | None
    frontend: str
    arguments: tuple[ArgumentRecord, ...]
    grad_mode: bool
    training: bool
    nodes: tuple[NodeRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A captured call.

    ``values`` are first the ``lifted_count`` lifted tensors, then the leaves of ``(args, kwargs)``. ``spec`` is the
    tree of ``(args, kwargs)``, and ``state`` has the facts that the guards of an entry compare.

    No object keeps a `Call` after compilation, because it holds the caller's tensors.
    """

    target: Target
    values: tuple[Any, ...]
    lifted_count: int
    spec: nesting.Node
    state: CallState
    #: If the function itself enters inference mode first, it is traced in that mode, and ``state`` is the state in that
    #: mode. Then ``outside`` is the state of the caller, otherwise None.
    outside: CallState | None = None
    #: If the bases of views are inputs (`aotlab.capture.view_bases`): the position of each view among ``values``, with
    #: the position of its base. Bases that are no arguments are the last ``values``. Then ``own`` is the state of the
    #: call without them, otherwise None.
    view_bases: Mapping[int, int] = field(default_factory=dict)
    own: CallState | None = None

    @property
    def tensor_positions(self) -> tuple[int, ...]:
        """The positions of the tensors among ``values``."""
        return tuple(i for i, value in enumerate(self.values) if isinstance(value, Tensor))

    def leaves_among(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return those of the flat ``values`` that are leaves of ``(args, kwargs)``."""
        return values[self.lifted_count : len(values) if self.own is None else len(self.own.leaves)]

    def rebuild(self, values: Sequence[Any]) -> tuple[list[Tensor], tuple[Any, ...], dict[str, Any]]:
        """Return (lifted, args, kwargs) with the flat ``values`` in place of those of the call."""
        args, kwargs = nesting.unflatten(self.leaves_among(values), self.spec)
        return list(values[: self.lifted_count]), tuple(args), dict(kwargs)


def names_of_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Name each flat argument after the parameter that takes it: ``x``, ``opts['w']``, ``args[0]``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    varargs = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    heads = [positional[i] if i < len(positional) else f"{varargs}[{i - len(positional)}]" for i in range(len(args))]
    return nesting.paths([*zip(heads, args, strict=True), *kwargs.items()])


def check_modes(values: Sequence[Any]) -> None:
    """Raise `RunEagerly` in anomaly mode, or if an inference tensor requires grad while grad mode is on."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    if torch.is_grad_enabled() and any(tensor.is_inference() for tensor in tensors):
        raise RunEagerly("inference-tensor-requires-grad")
    if torch.is_anomaly_enabled():
        raise RunEagerly("anomaly-mode")


def run(target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[CaptureRecord, Call]:
    """Capture one call of ``target``.

    Raise `RefusedError` if an argument cannot be guarded. Raise it also if a mode or a functorch transform is active
    that must see each op of the function, because a compiled call would bypass it.
    """
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
            tensor_spec = spec_of(value, storages)
            arguments.append(ArgumentRecord(name=name, kind=kind, spec=tensor_spec, storage_id=storage_id(value)))
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
        nodes=target.nodes,
    )
    return record, Call(target=target, values=values, lifted_count=len(lifted), spec=spec, state=state)
