"""The traced inputs, and a description of the mutations of each."""

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
from aotlab.trace.autograd_edges import Edge, edge_of, non_leaf
from aotlab.trace.tape import Tape
from aotlab.trace.write_calls import may_overlap_itself, overlaps_itself


@dataclass(slots=True, kw_only=True)
class TracedInput:
    """An input of the trace, with its state before the function runs.

    - ``real`` is the caller's tensor, ``fake`` its fake tensor, ``traced`` the traced tensor that the function gets.
    - ``edge`` is the autograd edge of its gradient, or None if it gets no gradient.
    - ``history`` is the ``grad_fn`` of the traced tensor, or of its base if it is a view.
    - ``version`` and ``storage`` are the version and the storage key of the traced tensor.
    - ``attributes`` are the Python attributes of the traced tensor, copied from the caller's tensor.
    - ``base`` is the synthetic base of which the input is a window, or None if it shares no memory.
    - ``view_of`` is the index of the input that is the base of this input, or None. ``has_views`` says whether other
      inputs have this input as their base (see `aotlab.capture.view_bases`).
    - ``steps`` are the calls by which the function changed the input's sizes or strides, as code for the epilogue. This
      list is filled during the run.
    - ``takes_memory`` says whether the function gave the input other memory, and ``keeps_other_memory`` whether it left
      the input there. This is noted during the run.
    - ``final`` is the fake tensor of the values that the input's own memory has after the run.
    """

    name: str
    real: Tensor
    fake: Tensor
    traced: Tensor
    edge: Edge | None
    history: Any
    version: int
    storage: int
    attributes: dict[str, Any]
    base: Base | None = None
    view_of: int | None = None
    has_views: bool = False
    steps: list[str] = field(default_factory=list)
    takes_memory: bool = False
    keeps_other_memory: bool = False
    final: Tensor = field(init=False)

    @property
    def is_family(self) -> bool:
        """Whether this input is a base that is an input, or a view of such a base."""
        return self.has_views or self.view_of is not None

    @property
    def written_visibly(self) -> bool:
        """Whether the function wrote to this input, or to its base, in a way that autograd saw.

        Such a write changes the ``grad_fn``. For a view, the ``grad_fn`` of its base is compared, because autograd
        regenerates the ``grad_fn`` of a view after any write.
        """
        return owner_of(self.traced).grad_fn is not self.history

    def check_attributes(self) -> None:
        """Refuse a function that sets an attribute of the input, or changes its class."""
        now, initial = vars(self.traced), self.attributes
        changed = "__class__" if type(self.traced) is not Tensor else None
        if changed is None and now != initial:
            changed = sorted(set(now) ^ set(initial) or set(initial))[0]
        if changed is not None:
            raise LeakedTensorError(
                f"the function sets the attribute `{changed}` of `{self.name}`",
                why="a compiled call would not repeat the change",
                suggestion="return the value, or set it outside of the compiled function",
                argument=self.name,
                pattern=rf"\.{changed}\s*[-+*/]?=|attr\(",
            )


def enter_input(
    tape: Tape, fake_mode: FakeTensorMode, name: str, real: Tensor, fake: Tensor | None = None
) -> TracedInput:
    """Make the traced tensor of one input that shares no memory with another.

    ``fake`` is the fake tensor of the input if it has symbolic sizes. If ``fake`` is None, it is made here.
    """
    # A tensor that requires grad, and is no inference tensor, is entered outside of inference mode, because in eager
    # its views require grad even under inference_mode.
    ordinary = real.requires_grad and not internals.is_inference(real)
    with torch.inference_mode(not ordinary) if torch.is_inference_mode_enabled() else nullcontext():
        fake = tape.enter(internals.enter_fake(fake_mode, real) if fake is None else fake)
        traced = internals.to_functional(fake)
    if real.requires_grad:
        traced.requires_grad_(True)
        if not real.is_leaf:
            traced = non_leaf(traced, lambda: internals.to_functional(fake))
        elif real.grad_dtype != real.dtype:
            traced.grad_dtype = real.grad_dtype  # autograd casts gradients to this dtype
    return note_initial_state(name, real, fake, traced, None)


def note_initial_state(name: str, real: Tensor, fake: Tensor, traced: Tensor, base: Base | None) -> TracedInput:
    """Record the state of a traced input before the function runs."""
    vars(traced).update({} if internals.is_fake(real) else vars(real))
    if isinstance(real, torch.nn.Parameter):
        vars(traced)["_is_param"] = True  # torch takes a tensor with this attribute for a parameter
    return TracedInput(
        name=name,
        real=real,
        fake=fake,
        traced=traced,
        edge=edge_of(traced) if real.requires_grad and not torch.is_inference_mode_enabled() else None,
        history=owner_of(traced).grad_fn,
        version=internals.version_of(traced),
        storage=internals.storage_key(traced),
        attributes=dict(vars(traced)),
        base=base,
    )


def owner_of(traced: Tensor) -> Tensor:
    """Return the tensor of which ``traced`` is a differentiable view, or ``traced`` if it is not a view."""
    base = internals.base_of(traced)
    return traced if base is None else base


def value_of(traced: Tensor, label: str) -> Tensor:
    """Return the current fake tensor of a traced tensor, after all writes through its aliases."""
    if internals.is_wrapper(traced):
        raise SubclassError(f"{label} is a `{type(traced).__qualname__}`", why="a graph has only plain tensors")
    if not internals.is_functional(traced):
        raise CapturedTensorError(
            f"{label} is a tensor that is not computed from the arguments",
            why="its values would become constants of the graph",
            suggestion="pass it as an argument",
        )
    internals.sync(traced)
    return internals.from_functional(traced)


def input_info(index: int, item: TracedInput, tape: Tape, storages: StorageNumbers) -> InputAliasInfo:
    """Describe the mutations of input number ``index``; refuse a mutation that the epilogue cannot repeat."""
    traced = item.traced
    final = item.final = value_of(traced, f"`{item.name}`")
    _check_sizes(item, final, tape)
    if traced.is_leaf and traced.grad is not None:
        raise EscapeError(
            f"gradients were accumulated into `{item.name}` inside the function",
            why="they would be added to the traced tensor, not to the caller's tensor",
            suggestion="use torch.autograd.grad inside of the function, or call backward() outside of it",
            argument=item.name,
            pattern=r"\bbackward\(",
        )
    requires_grad, visible = item.real.requires_grad, item.written_visibly
    made_to_require_grad = traced.is_leaf and traced.requires_grad and not requires_grad
    ends_requiring = traced.is_leaf and requires_grad and not traced.requires_grad
    if ends_requiring or (made_to_require_grad and (item.base is not None or item.is_family)):
        raise RunEagerly("changes-requires-grad", name=item.name)
    if made_to_require_grad:
        item.edge = edge_of(traced)
    mutated = internals.has_data_mutation(traced) and final is not item.fake
    if item.base is not None and visible:
        raise RunEagerly("shared-input-gains-history", name=item.name)
    # Eager's in-place op may write an element several times if several indices address it. The epilogue writes it once.
    if mutated and item.base is None and may_overlap_itself(item.real.shape, item.real.stride()):
        raise RunEagerly("writes-part-of-expanded", way="expanded" if overlaps_itself(item.real) else "unfolded")
    # Under inference_mode the traced tensor has no version counter. The caller's tensor has one, unless it is an
    # inference tensor.
    uncounted = mutated and traced.is_inference() and not item.real.is_inference()
    moved = uncounted or internals.version_of(traced) != item.version
    under_no_grad = mutated and internals.mutations_under_no_grad(traced)
    allowed = internals.may_be_written(item.real) if visible else not moved or internals.keeps_through_writes(item.real)
    if mutated and requires_grad and not under_no_grad and not allowed:
        raise RunEagerly("writes-view-with-grad-base", name=item.name)
    if moved and not (mutated or item.steps or item.takes_memory or item.is_family) and item.base is None:
        raise RunEagerly("version-moves-without-write", name=item.name)
    return InputAliasInfo(
        index=index,
        name=item.name,
        spec=spec_of(item.real, storages),
        is_leaf=item.real.is_leaf,
        requires_grad=requires_grad,
        mutates_data=mutated,
        mutates_metadata=bool(item.steps) or item.keeps_other_memory,
        mutates_storage=item.keeps_other_memory,
        metadata_steps=tuple(item.steps),
        # torch does not record which writes went through `detach()` or `.data`. But such a write does not change
        # `grad_fn`, so it is recognized by that.
        mutations_hidden_from_autograd=mutated and requires_grad and not visible and not under_no_grad,
        mutations_under_no_grad_or_inference_mode=under_no_grad,
        moves_version=moved,
        requires_grad_after=traced.requires_grad,
        made_to_require_grad=made_to_require_grad,
    )


def _check_sizes(item: TracedInput, final: Tensor, tape: Tape) -> None:
    """Refuse an input whose sizes, dtype or storage changed in a way that the trace could not record."""
    traced, real = item.traced, item.real
    unknown = not item.steps and (internals.has_metadata_mutation(traced) or final.shape != item.fake.shape)
    if unknown or internals.was_storage_changed(traced) or final.dtype != real.dtype:
        producer = tape.producer(final)
        raise MetadataMutationError(
            f"the function changes the sizes, strides or memory of `{item.name}` in place",
            line=producer[0].code_position()
            if producer is not None and producer[0].code_position is not None
            else None,
            why="the trace cannot record this change",
            suggestion="use the form that returns a new tensor, for example t() instead of t_()",
            argument=item.name,
        )


def bases_of(inputs: Sequence[TracedInput]) -> list[Base]:
    """Return the synthetic bases of the inputs, each once."""
    return list({id(item.base): item.base for item in inputs if item.base is not None}.values())
