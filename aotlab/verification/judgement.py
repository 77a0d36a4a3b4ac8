"""Compare two observations of one call, observable by observable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from aotlab.report.text import ROUNDED
from aotlab.verification.comparisons import Comparison
from aotlab.verification.float64 import Appeal
from aotlab.verification.observables import FinalState, Gradient, Observation, TensorState
from aotlab.verification.values import close, distance, identical, same_sum

#: How values are compared: bit for bit, up to rounding, or with the tolerance for compilers that reorder arithmetic.
Tolerance = Literal["exact", "rounded", "close"]

#: By how many units in the last place two sums of the same few terms may differ if they add the terms in another order.
SUMMATION = 8

#: With the tolerance ``"rounded"``, values may differ by at most this many units in the last place of the largest
#: element. A kernel that reads memory in another order, or that is vectorized differently, rounds differently.
ROUNDING = 8

#: The names of two of the rules by which values are compared. `Float64Appeal` gives the other rules their names.
EXACT = "bit for bit"
CLOSE = "assert_close's defaults"

#: Kinds of observables whose values may be sums of gradients. Autograd does not promise the order of such a sum.
_SUMS = ("gradient", "step", "hook", "gradient afterwards")


def judge(
    expected: Observation,
    actual: Observation,
    *,
    call: int = 1,
    tolerance: Tolerance = "exact",
    appeal: Appeal | None = None,
    messages: bool = False,
    exact_gradients: bool = True,
    terse: bool = False,
) -> list[Comparison]:
    """Compare two observations of one call, observable by observable.

    A refusal by the engine is a difference of the kind ``"refused"``. Then the other comparisons say for each argument
    whether the engine changed it before the refusal. If the call raises on one side or on both, only the exceptions are
    compared.

    Parameters
    ----------
    expected, actual
        The observations of eager and of the engine.
    call
        The number of the call, from 1.
    tolerance
        ``"exact"`` compares values bit for bit, ``"close"`` with ``torch.testing.assert_close``. ``"rounded"`` compares
        everything as ``"exact"`` does, but values may differ by `ROUNDING` units in the last place of the largest
        element. So a caller can distinguish another rounding from a wrong value.
    appeal
        Decides about a value that the tolerance rejects; see `aotlab.verification.float64`. Without ``appeal``, a
        rejected value is a difference.
    messages
        Compare the first lines of the exceptions' messages too.
    exact_gradients
        False if gradients are rounded. A tensor that is used several times receives a sum of gradients, and autograd
        does not promise the order of that sum. False allows a difference of `SUMMATION` units in the last place of the
        largest element, or of 1 if all elements are smaller, because larger terms of a sum may cancel.
    terse
        Leave out the observables that are equal, because their texts take most of the time of a comparison.
    """
    comparer = _Comparer(
        call=call,
        exact=tolerance != "close",
        rounded=tolerance == "rounded",
        appeal=appeal,
        exact_gradients=exact_gradients,
        terse=terse,
    )
    if actual.failure is not None and actual.failure.refused is not None:
        comparer.add("refused", "call", str(expected.failure or "no refusal"), str(actual.failure), False)
        for state in actual.tensors:
            comparer.add(
                "mutated before refusal", state.name, "untouched", "written" if state.version_moved else "untouched"
            )
        return comparer.rows
    if expected.failure is not None or actual.failure is not None:
        comparer.exceptions("call", expected.failure, actual.failure, messages)
        return comparer.rows
    comparer.add("container", "out", expected.container, actual.container)
    comparer.add("grad mode", "after the call", _mode(expected.grad_mode), _mode(actual.grad_mode))
    if comparer.exact:
        comparer.add("random state", "after the call", expected.random_state, actual.random_state)
    for left, right in _pairs(expected.leaves, actual.leaves):
        comparer.add("python type", left.name, left.type_name, right.type_name)
        comparer.add("python value", left.name, left.text, right.text)
    for before, after in _pairs(expected.tensors, actual.tensors):
        comparer.tensor(before, after, expected, actual)
    comparer.add(
        "differentiable",
        "call",
        ", ".join(expected.differentiated) or "none",
        ", ".join(actual.differentiated) or "none",
    )
    if not comparer.steps("before", expected, actual, messages):
        return comparer.rows
    if actual.backward_failure is not None and actual.backward_failure.refused is not None:
        comparer.add(
            "refused", "backward", str(expected.backward_failure or "no refusal"), str(actual.backward_failure), False
        )
        return comparer.rows
    if expected.backward_failure is not None or actual.backward_failure is not None:
        comparer.exceptions("backward", expected.backward_failure, actual.backward_failure, messages)
        return comparer.rows
    if comparer.exact and expected.differentiated:
        comparer.add("random state", "after the backward", expected.random_state_left, actual.random_state_left)
    theirs = {(gradient.leaf, gradient.step): gradient for gradient in actual.gradients}
    for wanted in expected.gradients:
        if (wanted.leaf, wanted.step) in theirs:
            comparer.gradient(wanted, theirs[wanted.leaf, wanted.step])
    comparer.hooks(expected, actual)
    if not comparer.steps("after", expected, actual, messages):
        return comparer.rows
    for ours, other in _pairs(expected.finally_, actual.finally_):
        comparer.finally_(ours, other)
    return comparer.rows


class _Comparer:
    """Collects the comparisons of one call in ``rows``. Its methods compare one group of observables each.

    `judge` explains the arguments; ``exact`` is True for the tolerances ``"exact"`` and ``"rounded"``.
    """

    def __init__(
        self,
        *,
        call: int,
        exact: bool,
        rounded: bool,
        appeal: Appeal | None,
        exact_gradients: bool,
        terse: bool = False,
    ) -> None:
        self.call = call
        self.exact = exact
        self.exact_gradients = exact_gradients
        self.rounded = rounded
        self.appeal = appeal
        self.terse = terse
        self.rows: list[Comparison] = []

    def add(
        self,
        kind: str,
        subject: str,
        expected: str,
        actual: str,
        equal: bool | None = None,
        sentence: str = "",
        **measured: Any,
    ) -> None:
        same = expected == actual if equal is None else equal
        if same and self.terse:
            return
        if not same:
            where = f"call {self.call}: " if self.call > 1 else ""
            sentence = where + (sentence or _SENTENCES[kind].format(subject=subject, expected=expected, actual=actual))
        self.rows.append(
            Comparison(
                call=self.call,
                kind=kind,
                subject=subject,
                expected=expected,
                actual=actual,
                equal=same,
                sentence="" if same else sentence,
                **measured,
            )
        )

    def exceptions(self, subject: str, expected: Any, actual: Any, messages: bool) -> None:
        # The row always shows the message. The message is compared only with ``messages=True``.
        same = expected is not None and actual is not None and expected.type is actual.type
        self.add("exception", subject, str(expected or "none"), str(actual or "none"), same)
        if messages and same:
            self.add("exception message", subject, expected.message, actual.message)

    def steps(
        self, when: Literal["before", "after"], expected: Observation, actual: Observation, messages: bool
    ) -> bool:
        """Compare the results of the caller's steps; return False if the rest of the call cannot be compared."""
        theirs = [step for step in actual.steps if step.when == when]
        for left, right in zip([step for step in expected.steps if step.when == when], theirs, strict=False):
            if right.failure is not None and right.failure.refused is not None:
                self.add("refused", left.name, str(left.failure or "no refusal"), str(right.failure), False)
                return False
            if left.failure is not None or right.failure is not None:
                self.exceptions(f"`{left.name}`", left.failure, right.failure, messages)
                if left.differentiates or left.failure is None or right.failure is None:
                    return False
            elif len(left.values) != len(right.values):
                self.add("step", left.name, f"{len(left.values)} tensors", f"{len(right.values)} tensors", False)
            else:
                for one, two in zip(left.values, right.values, strict=True):
                    self._optional("step", left.name, f"{left.name}.{when}", one, two)
        return True

    def hooks(self, expected: Observation, actual: Observation) -> None:
        """Compare the calls of the caller's hooks: how often each hook ran, and with which gradients.

        The order of two hooks is compared only if the gradient flows through one of the two tensors and later through
        the other.
        """
        names = [tuple(call.name for call in side.hooks) for side in (expected, actual)]
        if not any(names):
            return
        ours, theirs = (", ".join(sorted(each)) or "none" for each in names)
        self.add("hook calls", "the caller", ours, theirs)
        if ours != theirs:
            return
        for pair in expected.hook_order:
            ours, theirs = (", ".join(name for name in side if name in pair) for side in names)
            self.add("hook order", "the caller", ours, theirs)
        for name in dict.fromkeys(names[0]):
            calls = [[call for call in side.hooks if call.name == name] for side in (expected, actual)]
            for number, (left, right) in enumerate(zip(*calls, strict=True)):
                self._optional("hook", name, f"{name}.hook.{number}", left.value, right.value)

    def finally_(self, left: FinalState, right: FinalState) -> None:
        """Compare the final state of one tensor, after all steps of the caller."""
        self.add("state afterwards", left.name, left.text, right.text)
        if left.text == right.text:
            self._optional("value afterwards", left.name, f"{left.name}.finally", left.value, right.value)
            self._optional("gradient afterwards", left.name, f"{left.name}.grad.finally", left.gradient, right.gradient)

    def _optional(
        self, kind: str, subject: str, key: str, left: torch.Tensor | None, right: torch.Tensor | None
    ) -> None:
        if left is None or right is None:
            ours, theirs = ("None" if value is None else _preview(value) for value in (left, right))
            self.add(kind, subject, ours, theirs, left is None and right is None)
        else:
            self._value(kind, subject, key, left, right)

    def tensor(self, left: TensorState, right: TensorState, expected: Observation, actual: Observation) -> None:
        name = left.name
        self.add("identity", name, left.same_as, right.same_as)
        if left.same_as != name and left.same_as == right.same_as:
            return
        self.add("type", name, left.spec.type_name, right.spec.type_name)
        self.add("dtype", name, str(left.spec.dtype), str(right.spec.dtype))
        self.add("shape", name, str(left.spec.shape), str(right.spec.shape))
        self.add("stride", name, *self._strides(left, right))
        if not (_begins_nowhere(left, expected) and _begins_nowhere(right, actual)):
            self.add("offset", name, self._offset(left, expected), self._offset(right, actual))
        self.add("device", name, str(left.spec.device), str(right.spec.device))
        self.add("requires_grad", name, str(left.spec.requires_grad), str(right.spec.requires_grad))
        self.add("is_leaf", name, str(left.spec.is_leaf), str(right.spec.is_leaf))
        if left.retains_grad or right.retains_grad:
            self.add("retains_grad", name, str(left.retains_grad), str(right.retains_grad))
        self.add("storage", name, left.shares_with, right.shares_with)
        if self.exact or left.role != "output":
            self.add("storage bytes", name, str(left.spec.storage_bytes), str(right.spec.storage_bytes))
        if left.version_moved is not None or right.version_moved is not None:
            self.add("version", name, _moved(left.version_moved), _moved(right.version_moved))
        self._value("value", name, name, left.value, right.value)

    def gradient(self, left: Gradient, right: Gradient) -> None:
        subject = left.leaf if left.step == 0 else f"{left.leaf} after backward {left.step + 1}"
        self._optional("gradient", subject, f"{left.leaf}.grad.{left.step}", left.value, right.value)

    def _value(self, kind: str, subject: str, key: str, left: torch.Tensor, right: torch.Tensor) -> None:
        if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
            self.add(kind, subject, _describe(left), _describe(right), False)
            return
        rule = EXACT if self.exact else CLOSE
        if not self.exact:
            same = close(left, right)
        elif kind in _SUMS:
            same = same_sum(left, right, 0) or (
                not self.exact_gradients and same_sum(left, right, SUMMATION, least=1.0)
            )
        else:
            same = identical(left, right)
        if not same and self.rounded and (left.is_floating_point() or left.is_complex()):
            same, rule = same_sum(left, right, ROUNDING), ROUNDED
        if not same and self.appeal is not None:
            same, rule = self.appeal(key, right)
        if same and self.terse:
            return
        absolute, relative = (0.0, 0.0) if same and rule == EXACT else distance(left, right)
        sentence = "" if same else _where(kind, subject, left, right)
        measured = {"tolerance": rule, "absolute": absolute, "relative": relative}
        self.add(kind, subject, _preview(left), _preview(right), same, sentence, **measured)

    def _strides(self, left: TensorState, right: TensorState) -> tuple[str, str, bool]:
        ours, theirs = left.spec.stride, right.spec.stride
        strided = len(ours) == len(theirs) == len(left.spec.shape)  # sparse tensors have no strides
        if left.spec.shape != right.spec.shape or not strided:
            return str(ours), str(theirs), ours == theirs
        # A stride is irrelevant if the dimension has one element or the tensor has no elements, because the stride then
        # leads to no other element. Torch itself chooses other irrelevant strides for an in-place op than for the
        # out-of-place op of the same name.
        empty = 0 in left.spec.shape
        relevant = [index for index, size in enumerate(left.spec.shape) if size != 1 and not empty]
        return str(ours), str(theirs), all(ours[index] == theirs[index] for index in relevant)

    def _offset(self, state: TensorState, observation: Observation) -> str:
        offset = state.spec.offset
        if self.exact or state.role != "output":
            return str(offset)
        # A compiler may place a new result anywhere in a buffer. So compare only the distances between the outputs that
        # share this buffer.
        first = next(other for other in observation.tensors if other.name == state.shares_with)
        if first.role == "output" and isinstance(offset, int) and isinstance(first.spec.byte_offset, int):
            return f"{offset - first.spec.byte_offset // max(1, state.value.element_size())} from {first.name}"
        return str(offset)


def _pairs(expected: Any, actual: Any) -> Iterator[tuple[Any, Any]]:
    """Pair the items that have the same name and role.

    An item that only one side has is left out. The comparison of the container reports it.
    """

    def key(item: Any) -> tuple[Any, str]:
        return (getattr(item, "role", None), item.name)

    theirs = {key(item): item for item in actual}
    return ((item, theirs[key(item)]) for item in expected if key(item) in theirs)


def _begins_nowhere(state: TensorState, observation: Observation) -> bool:
    """Tell whether an output is an empty view of memory that the program allocated. Its offset is then not compared.

    The offset of such a view may depend on a stride that is not compared (see `_strides`). For example, the offset of
    ``x[1:]`` is the stride of the first dimension of ``x``, which is irrelevant if this dimension has one element.
    """
    if 0 not in state.spec.shape or state.role != "output":
        return False
    first = next(other for other in observation.tensors if other.name == state.shares_with)
    return first.role == "output"


def _where(kind: str, subject: str, left: torch.Tensor, right: torch.Tensor) -> str:
    what = f"{subject}.grad" if kind.startswith("gradient") else f"`{subject}`"
    if kind not in ("gradient", "value"):
        what = f"{what} ({kind})"
    if left.layout != torch.strided or not left.numel():
        return f"{what} has another value"
    unequal = ~((left == right) | ((left != left) & (right != right)))
    count = int(unequal.sum())
    if not count:
        return f"{what} has zeros of another sign"
    place = tuple(int(index) for index in unequal.nonzero()[0])
    return (
        f"{what} differs in {count} of {left.numel()} elements: at {place} eager has {left[place].item()}, "
        f"the engine {right[place].item()}"
    )


def _preview(tensor: torch.Tensor) -> str:
    text = _describe(tensor)
    if tensor.layout != torch.strided or not 0 < tensor.numel() <= 6:
        return text
    values = ", ".join(
        f"{value:.6g}" if isinstance(value, float) else str(value) for value in tensor.flatten().tolist()
    )
    return f"{text} {values}"


def _describe(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _moved(flag: bool | None) -> str:
    return {True: "moved", False: "unmoved", None: "no counter"}[flag]


def _mode(flag: bool) -> str:
    return "on" if flag else "off"


#: The sentence for a difference of each kind.
_SENTENCES = {
    "refused": "the {subject} was refused with {actual}, eager: {expected}",
    "mutated before refusal": "`{subject}` was {actual} although the call was refused",
    "exception": "the {subject} raises {actual} where eager raises {expected}",
    "exception message": "the {subject} raises with the message {actual!r} where eager says {expected!r}",
    "container": "the outputs are nested as {actual}, in eager as {expected}",
    "grad mode": "grad mode is {actual} {subject}, in eager it is {expected}",
    "random state": "the random state {subject} is {actual}, in eager {expected}",
    "python type": "`{subject}` is of type {actual}, in eager {expected}",
    "python value": "`{subject}` is {actual}, in eager {expected}",
    "identity": "`{subject}` is the same object as `{actual}`, in eager as `{expected}`",
    "type": "`{subject}` is a {actual}, in eager a {expected}",
    "dtype": "`{subject}` has dtype {actual}, in eager {expected}",
    "shape": "`{subject}` has shape {actual}, in eager {expected}",
    "stride": "`{subject}` has strides {actual}, in eager {expected}",
    "offset": "`{subject}` has storage offset {actual}, in eager {expected}",
    "device": "`{subject}` is on {actual}, in eager on {expected}",
    "requires_grad": "`{subject}`.requires_grad is {actual}, in eager {expected}",
    "is_leaf": "`{subject}`.is_leaf is {actual}, in eager {expected}",
    "storage": "`{subject}` shares the storage of `{actual}`, in eager the storage of `{expected}`",
    "storage bytes": "`{subject}` has a storage of {actual} bytes, in eager of {expected}",
    "retains_grad": "`{subject}`.retains_grad is {actual}, in eager {expected}",
    "step": "`{subject}` gives {actual}, in eager {expected}",
    "hook calls": "the hooks that were called are {actual}, in eager {expected}",
    "hook order": "the hooks were called in the order {actual}, in eager {expected}",
    "hook": "the hook of `{subject}` got {actual}, in eager {expected}",
    "state afterwards": "in the end `{subject}` is {actual}, in eager {expected}",
    "value afterwards": "in the end `{subject}` is {actual}, in eager {expected}",
    "gradient afterwards": "in the end `{subject}`.grad is {actual}, in eager {expected}",
    "version": "the version counter of `{subject}` is {actual}, in eager {expected}",
    "value": "`{subject}` is {actual}, in eager {expected}",
    "differentiable": "the differentiable tensors are {actual}, in eager {expected}",
    "gradient": "`{subject}`.grad is {actual}, in eager {expected}",
}
