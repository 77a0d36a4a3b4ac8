"""What a traced function did to its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as internals
from aotlab._torch import FakeTensorMode
from aotlab.capture.signals import RunEagerly
from aotlab.capture.synthetic_bases import Base
from aotlab.errors import CapturedTensorError, EscapeError, LeakedTensorError, MetadataMutationError, SubclassError
from aotlab.ir.metadata import InputAliasInfo
from aotlab.ir.specs import StorageNumbers, spec_of
from aotlab.trace.edges import Edge, edge_of, non_leaf
from aotlab.trace.tape import Tape
from aotlab.trace.write_calls import overlaps_itself


@dataclass(slots=True, kw_only=True)
class Entered:
    """An input as it entered the trace: the caller's tensor, its fake, and the wrapper that the function gets.

    ``edge`` is where its gradient goes, None if it gets none; ``history`` is the autograd node of the wrapper, or of
    what it is a view of, as it would be without writes; ``version`` and ``storage`` are the wrapper's at the start;
    ``base`` is the synthetic base that it is a window of, None if it has its memory to itself; ``steps`` are the
    calls that changed its sizes or strides, as the epilogue repeats them.
    """

    name: str
    real: Tensor
    fake: Tensor
    wrapper: Tensor
    edge: Edge | None
    history: Any
    version: int
    storage: int
    attributes: dict[str, Any]
    base: Base | None = None
    steps: list[str] = field(default_factory=list)

    @property
    def written_visibly(self) -> bool:
        """Whether autograd has seen a write; a view's own node is made anew after any write, so its base is asked."""
        return owner_of(self.wrapper).grad_fn is not self.history

    def check_attributes(self) -> None:
        """Refuse a function that hangs something on its argument, or swaps it for another tensor."""
        now, before = vars(self.wrapper), self.attributes
        changed = "__class__" if type(self.wrapper) is not Tensor else None
        if changed is None and now != before:
            changed = sorted(set(now) ^ set(before) or set(before))[0]
        if changed is not None:
            raise LeakedTensorError(
                f"the function sets the attribute `{changed}` of `{self.name}`",
                why="a compiled call would not",
                suggestion="return the value, or set it outside of the compiled function",
                argument=self.name,
                pattern=rf"\.{changed}\s*[-+*/]?=|attr\(",
            )


def enter(tape: Tape, fake_mode: FakeTensorMode, name: str, real: Tensor, fake: Tensor | None = None) -> Entered:
    """Make the traced stand-in of one input that has its memory to itself."""
    ordinary = real.requires_grad and not internals.is_inference(real)  # whose views require grad in that mode, too
    with torch.inference_mode(not ordinary) if torch.is_inference_mode_enabled() else nullcontext():
        fake = tape.enter(internals.enter_fake(fake_mode, real) if fake is None else fake)
        wrapper = internals.to_functional(fake)
    if real.requires_grad:
        wrapper.requires_grad_(True)
        if not real.is_leaf:
            wrapper = non_leaf(wrapper, lambda: internals.to_functional(fake))
    return entered(name, real, fake, wrapper, None)


def entered(name: str, real: Tensor, fake: Tensor, wrapper: Tensor, base: Base | None) -> Entered:
    """Note what the stand-in of an input is like before the program runs."""
    vars(wrapper).update({} if internals.is_fake(real) else vars(real))
    if isinstance(real, torch.nn.Parameter):
        vars(wrapper)["_is_param"] = True  # by which torch tells that any tensor stands for a parameter
    return Entered(
        name=name,
        real=real,
        fake=fake,
        wrapper=wrapper,
        edge=edge_of(wrapper) if real.requires_grad and not torch.is_inference_mode_enabled() else None,
        history=owner_of(wrapper).grad_fn,
        version=internals.version_of(wrapper),
        storage=internals.storage_key(wrapper),
        attributes=dict(vars(wrapper)),
        base=base,
    )


def owner_of(wrapper: Tensor) -> Tensor:
    """Return the tensor of which ``wrapper`` is a differentiable view, itself if it is none."""
    base = internals.base_of(wrapper)
    return wrapper if base is None else base


def value_of(wrapper: Tensor, what: str) -> Tensor:
    """Return what a wrapper holds after all writes through its aliases."""
    if internals.is_wrapper(wrapper):
        raise SubclassError(f"{what} is a `{type(wrapper).__qualname__}`", why="a graph holds plain tensors")
    if not internals.is_functional(wrapper):
        raise CapturedTensorError(
            f"{what} is a tensor that is not computed from the arguments",
            why="it would be frozen into the graph",
            suggestion="pass it as an argument",
        )
    internals.sync(wrapper)
    return internals.from_functional(wrapper)


def input_info(index: int, item: Entered, tape: Tape, storages: StorageNumbers) -> InputAliasInfo:
    """Say what happened to one input, and refuse what the epilogue cannot do."""
    wrapper = item.wrapper
    final = value_of(wrapper, f"`{item.name}`")
    _check_sizes(item, final, tape)
    if wrapper.is_leaf and wrapper.grad is not None:
        raise EscapeError(
            f"gradients were accumulated into `{item.name}` inside the function",
            why="they would be added to the traced tensor, not to the caller's",
            suggestion="use torch.autograd.grad inside, or call backward() outside",
            argument=item.name,
            pattern=r"\bbackward\(",
        )
    requires_grad, visible = item.real.requires_grad, item.written_visibly
    if wrapper.is_leaf and wrapper.requires_grad != requires_grad:
        instead = "call requires_grad_() outside of the function, to have it compiled"
        raise RunEagerly(f"`{item.name}` is made to require grad, or not to", suggestion=instead)
    mutated = internals.has_data_mutation(wrapper) and final is not item.fake
    if item.base is not None and visible:
        raise RunEagerly(f"`{item.name}` shares memory with another input, and a write gives it a history")
    if mutated and item.base is None and overlaps_itself(item.real):
        raise RunEagerly(f"`{item.name}` overlaps itself and is written")
    # under inference_mode around the call the wrapper counts nothing, where the caller's ordinary tensor does
    uncounted = mutated and wrapper.is_inference() and not item.real.is_inference()
    moved = uncounted or internals.version_of(wrapper) != item.version
    under_no_grad = mutated and internals.mutations_under_no_grad(wrapper)
    allowed = internals.may_be_written(item.real) if visible else not moved or internals.keeps_through_writes(item.real)
    if mutated and requires_grad and not under_no_grad and not allowed:
        raise RunEagerly(f"`{item.name}` is a view that may not be written in grad mode")
    if moved and not (mutated or item.steps) and item.base is None:
        raise RunEagerly(f"the version of `{item.name}` moves, and nothing is written")
    return InputAliasInfo(
        index=index,
        name=item.name,
        spec=spec_of(item.real, storages),
        is_leaf=item.real.is_leaf,
        requires_grad=requires_grad,
        mutates_data=mutated,
        mutates_metadata=bool(item.steps),
        metadata_steps=tuple(item.steps),
        # torch does not say which writes went through `detach()` or `.data`; that autograd's node did not change does
        mutations_hidden_from_autograd=mutated and requires_grad and not visible and not under_no_grad,
        mutations_under_no_grad_or_inference_mode=under_no_grad,
        moves_version=moved,
        requires_grad_after=wrapper.requires_grad,
    )


def _check_sizes(item: Entered, final: Tensor, tape: Tape) -> None:
    """Refuse an input that got other sizes, a dtype or memory in a way that nobody noticed before."""
    wrapper, real = item.wrapper, item.real
    unknown = not item.steps and (internals.has_metadata_mutation(wrapper) or final.shape != item.fake.shape)
    if unknown or internals.was_storage_changed(wrapper) or final.dtype != real.dtype:
        made = tape.producer(final)
        raise MetadataMutationError(
            f"`{item.name}` changes its sizes, its strides or its memory in place",
            line=made[0].place() if made is not None and made[0].place is not None else None,
            why="it does so in a way that the trace cannot follow",
            suggestion="use the out-of-place form, as t() for t_()",
            argument=item.name,
        )


def bases_of(inputs: Sequence[Entered]) -> list[Base]:
    """Return the synthetic bases that inputs are windows of."""
    return list({id(item.base): item.base for item in inputs if item.base is not None}.values())
