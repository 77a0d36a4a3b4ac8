"""The function that the engine compiles: it takes and returns plain tensors, and wraps and unwraps in its body.

    f(x, y)                                    # x is a TwoTensor
    body((x.a, x.b, "TwoTensor(a, b)"), y)     # puts x together, calls f, takes the result apart

Beside the parts stands as text what else is assumed of the wrapper; the engine guards it as it does any Python value.
The body is run by the trace alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import parts_of
from aotlab.capture import nesting
from aotlab.capture.call import ArgumentKind, Target
from aotlab.capture.signals import RunEagerly
from aotlab.guards.call_state import check_tensor
from aotlab.guards.reached import Reached
from aotlab.guards.values import Mentioned
from aotlab.ir.subclasses import AnchoredGradient, SubclassInput
from aotlab.subclasses.edges import Again, Anchor, Gradient, GradientOfInput, Unwrap, Ways, Wrap, apart_of
from aotlab.subclasses.mode import AboveFunctionalization, LeavesStayLeaves
from aotlab.subclasses.parts import is_differentiable, sizes, spec_of, state_of, together
from aotlab.subclasses.passing import Passing, passed
from aotlab.subclasses.results import Results, read_results
from aotlab.trace.running import here

if TYPE_CHECKING:
    from aotlab.runtime.draft import Draft


@dataclass(slots=True)
class Entered:
    """An input in the trace: the wrapper, what it was before the function ran, the autograd node that made it."""

    item: SubclassInput
    wrapper: Tensor
    parts: list[Tensor]
    version: int
    history: Any
    state: tuple[Any, ...]


class Unwrapped(Target):
    """The target with its wrappers taken apart, for one kind of call; ``ways`` says what is known of the inputs."""

    def __init__(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any], ways: Ways) -> None:
        self.target = target
        self.name, self.line, self.frontend = target.name, target.line, target.frontend
        self.function = getattr(target, "function", None)
        self._reached = target.reached()
        lifted, self._kinds = list(target.lifted()), list(target.lifted_names())
        leaves, self.tree = nesting.flatten((args, kwargs))
        names = [*(name for name, _ in self._kinds), *target.argument_names(args, kwargs)]
        values = [*lifted, *leaves]
        self.lifted_count = len(lifted)
        self.inputs: list[SubclassInput] = []
        first: dict[int, int] = {}
        for n, (name, value) in enumerate(zip(names, values, strict=True)):
            if isinstance(value, Tensor) and not internals.is_wrapper(value):
                check_tensor(value, name)
            if internals.is_wrapper(value) or _is_watched(n, value, ways) or id(value) in first:
                k = first.setdefault(id(value), len(self.inputs))
                made = _input(name, self._kind(n), n, value, k, ways)
                if k < len(self.inputs):  # the same tensor: what is known is known of the first
                    made = replace(self.inputs[k], name=name, kind=self._kind(n), position=n)
                self.inputs.append(made)
        ours = {item.position for item in self.inputs}
        self._plain_lifted = [n for n in range(len(lifted)) if n not in ours]
        self._names, self._ways = names, ways
        self._check_hidden(values)
        self.gradients = [GradientOfInput(each, (), ways) for each in self.inputs]  # of the last trace
        self.results: Results | None = None
        self.passing: set[int] = set()  # outputs, in the written function
        self._given: list[Tensor] = []
        self._calls = frozenset(ways.passing)

    def _kind(self, n: int) -> str:
        return self._kinds[n][1] if n < self.lifted_count else "input"

    def _check_hidden(self, values: Sequence[Any]) -> None:
        """Refuse a write to a wrapper with a history whose memory is also another argument's."""
        memory: dict[int, int] = {}
        for n, value in enumerate(values):
            for tensor in parts_of(value) if isinstance(value, Tensor) else ():
                key = internals.storage_key(tensor)
                other = memory.setdefault(key, n)
                pair = [item for item in self.inputs if item.hidden and item.position in (n, other)]
                if other != n and values[other] is not value and pair:
                    raise RunEagerly(f"`{pair[0].name}` shares memory with another argument, and is changed")

    # --- what the engine asks

    def reached(self) -> tuple[Reached, ...]:
        """Return what the function reads."""
        return self._reached

    def mentioned(self) -> Mentioned:
        """Return which attributes it may read."""
        return self.target.mentioned()

    def lifted(self) -> Sequence[Tensor]:
        """Return what is lifted and no wrapper."""
        return self.lifter()()

    def lifter(self) -> Callable[[], Sequence[Tensor]]:
        """Return a function that reads that."""
        read, plain = self.target.lifter(), self._plain_lifted

        def read_plain() -> list[Tensor]:
            found = read()
            return [found[n] for n in plain]

        return read_plain

    def lifted_names(self) -> Sequence[tuple[str, ArgumentKind]]:
        """Name it."""
        return [self._kinds[n] for n in self._plain_lifted]

    def holder(self, lifted: Sequence[Tensor]) -> Callable[[], AbstractContextManager[None]]:
        """Return what puts the traced parameters, wrappers too, in their place again."""
        return self.target.holder(self._given)

    def objects(self) -> list[Any]:
        """Return the objects that the function reaches."""
        return self.target.objects()

    def still_same(self) -> Callable[[], bool] | None:
        """Return the check of what the function reaches."""
        return self.target.still_same()

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Name the parts by their wrappers and attributes."""
        of_inputs = {item.position: self._names_of(item) for item in self.inputs}
        lifted = [name for n in range(self.lifted_count) for name in of_inputs.get(n, [])]
        rest = range(self.lifted_count, len(self._names))
        return lifted + [name for n in rest for name in of_inputs.get(n, [self._names[n]])]

    @staticmethod
    def _names_of(item: SubclassInput) -> list[str]:
        return [*item.paths, *item.anchors, f"type({item.name})"]

    @property
    def structure(self) -> str:
        """Write how the arguments are nested, for sentences about another call."""
        specs = {item.position: str(item.spec or "*") for item in self.inputs}
        flat = (specs.get(n, "*") for n in range(self.lifted_count, len(self._names)))
        return f"({', '.join([*(specs[n] for n in specs if n < self.lifted_count), *flat])})"

    # --- a call

    def taken_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the body for a call of the function."""
        leaves, _ = nesting.flatten((args, kwargs))
        values = [*self.target.lifted(), *leaves]
        groups: list[tuple[Any, ...]] = []
        for item, gradient in zip(self.inputs, self.gradients, strict=True):
            if item.same_as < len(groups):
                groups.append(groups[item.same_as])
            else:
                groups.append((*tensors_of(values[item.position], item, gradient, values), item.fact))
        for item, group in zip(self.inputs, groups, strict=True):
            values[item.position] = group
        lifted = [item.position for item in self.inputs if item.position < self.lifted_count]
        args, kwargs = nesting.unflatten(values[self.lifted_count :], self.tree)
        return (*(values[n] for n in lifted), *args), kwargs

    def run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put the wrappers together, call the function, and take its result apart."""
        here.active[-1].above = mode = AboveFunctionalization()
        with mode:
            return self._run(lifted, args, kwargs, mode)

    def _run(
        self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], mode: AboveFunctionalization
    ) -> Any:
        with internals.disable_torch_function():
            flat = iter(nesting.flatten((args, kwargs))[0])
            plain = dict(zip(self._plain_lifted, lifted, strict=True))
            by_position = {item.position: item for item in self.inputs}
            entered: list[Entered] = []
            values: list[Any] = []
            for n in range(len(self._names)):
                if n in by_position:
                    entered.append(self._enter(by_position[n], flat, entered))
                    values.append(entered[-1].wrapper)
                else:
                    values.append(plain[n] if n in plain else next(flat))
            self._given = values[: self.lifted_count]
            mode.values = values
            given_args, given_kwargs = nesting.unflatten(values[self.lifted_count :], self.tree)
        with LeavesStayLeaves(each.wrapper for each in entered if each.item.is_leaf), Passing(self._calls) as passing:
            result = self.target.run(self._given, tuple(given_args), given_kwargs)
        with internals.disable_torch_function():
            now, tree = nesting.flatten((given_args, given_kwargs))
            if tree != self.tree or any(a is not b for a, b in zip(now, values[self.lifted_count :], strict=True)):
                raise RunEagerly("a container that is given beside a tensor subclass is changed")
            if not mode.lookups.keys() <= {item.position for item in self.inputs if item.anchors}:
                self._ways.gradients |= mode.lookups
                raise Again
            given = {id(part): None for part, _ in nesting.parts_of((given_args, given_kwargs))} | {
                id(each): None for each in self.target.objects()
            }
            self.results, returned = read_results(
                result, entered, _containers(given, values), self._ways, {*mode.mixed}, passing
            )
        return returned

    def between(self, draft: Draft, positions: Sequence[int]) -> None:
        """Write that parts of what others are computed of pass the wrapper that the caller gets."""
        assert self.results is not None
        outputs, writes = draft.trace.returned_outputs, len(draft.trace.writes)
        own = {outputs[i - writes]: i for i in positions if writes <= i < writes + len(outputs)}
        for n, each in enumerate([*self.results.outputs, *self.results.besides]):
            if each.passes and each.spec is not None and each.first in own:
                names = ", ".join(draft.results[own[each.first + k]] for k in range(each.spec.count))
                gradient = draft.w.constant("gradient", Gradient(f"output {n}", each.tangent))
                given = f"{draft.w.constant('spec', each.spec)}, {gradient}, {names}"
                draft.with_grad(f"{names}, = {draft.w.shared('passed', passed)}({given})")
                self.passing.add(n)

    def _enter(self, item: SubclassInput, flat: Iterator[Any], entered: list[Entered]) -> Entered:
        parts, anchors = [next(flat) for _ in item.paths], [next(flat) for _ in item.anchors]
        next(flat)
        if item.same_as < len(entered):
            return replace(entered[item.same_as], item=item)
        if item.gradient is not None:
            gradient = self.gradients[item.same_as] = GradientOfInput(item, parts, self._ways)
            given = item.spec, gradient, len(anchors), item.hidden, *anchors, *parts
            with torch.enable_grad():
                made = Wrap.apply(*given)  # type: ignore[no-untyped-call]  # untyped in torch
        else:
            parts = [apart_of(part) for part in parts] if item.hidden else parts
            made = parts[0] if item.spec is None else together(item.spec, parts)
        return Entered(
            item=item,
            wrapper=made,
            parts=parts_of(made),
            version=0 if made.is_inference() else internals.version_of(made),
            history=made.grad_fn,
            state=state_of(made),
        )


def _containers(given: dict[int, None], values: Sequence[Any]) -> dict[int, None]:
    """Leave of what a function is given, by ``id``, only what is no tensor and no plain value."""
    leaves = {id(value) for value in values}
    return {key: None for key in given if key not in leaves}


def _is_watched(position: int, value: Any, ways: Ways) -> bool:
    """Tell whether a plain tensor is an input here, because its gradient is a wrapper or may be."""
    may_be = ways.watches and isinstance(value, Tensor) and value.requires_grad
    return may_be or position in ways.gradients


def _input(name: str, kind: str, position: int, tensor: Tensor, same_as: int, ways: Ways) -> SubclassInput:
    gradient: Literal["parts"] | AnchoredGradient | None = None
    spec = spec_of(tensor, name) if internals.is_wrapper(tensor) else None
    if tensor.requires_grad and not torch.is_inference_mode_enabled():
        gradient = ways.gradients.get(position, "parts")
        if gradient == "parts" and not is_differentiable(parts_of(tensor)):
            layout = [] if spec is None else spec.layout.size
            gradient = AnchoredGradient(spec=None, anchors=((tensor.dtype, tuple(layout)),))
    return SubclassInput(
        name=name,
        kind=kind,
        position=position,
        spec=spec,
        same_as=same_as,
        requires_grad=tensor.requires_grad,
        is_leaf=tensor.is_leaf,
        gradient=gradient,
        hidden=position in ways.hidden,
    )


def tensors_of(tensor: Tensor, item: SubclassInput, gradient: Gradient, inputs: Sequence[Any]) -> Sequence[Tensor]:
    """Return what is given to the body for a wrapper: its parts, perhaps with a history, and its anchors."""
    if item.gradient == "parts":
        with torch.enable_grad():
            found: Sequence[Tensor] = Unwrap.apply(tensor, gradient)  # type: ignore[no-untyped-call]
        return found
    parts = [part.detach() if part.requires_grad else part for part in parts_of(tensor)]
    if item.gradient is not None:
        anchors = [(dtype, sizes(size, [*parts, *inputs])) for dtype, size in item.gradient.anchors]
        with torch.enable_grad():
            parts += Anchor.apply(tensor, gradient, *anchors)  # type: ignore[no-untyped-call]
    return parts
