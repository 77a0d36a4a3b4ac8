"""Eager and an engine, side by side: the same calls on arguments of their own, compared in all that is observable.

`verify` is the public entry; `compare` is the same for any candidate, as the test-suite uses it; `judge`
compares two observations, however they were made.

Tolerance: on backends that run torch's own kernels values are equal bit for bit (NaN equals NaN, and -0.0 is not 0.0,
except in gradients: a sum with a zero, which autograd may or may not form, loses the sign). On Inductor they are within
``torch.testing.assert_close``'s defaults, or else their error against a float64 run is at most twice that of stock
``torch.compile``. When stock ``torch.compile`` is itself what is verified, the yardstick is eager's own error.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd
import torch

from aotlab import _torch as torch_internals
from aotlab.errors import UsageError
from aotlab.verification.clones import Cloner, random_state_restored, restored
from aotlab.verification.observables import (
    Backward,
    FinalState,
    Gradient,
    Observation,
    TensorState,
    observe,
)

#: Makes the callable to be observed from a function; it gets the copy of the function that is its side's own.
Candidate = Callable[[Callable[..., Any]], Callable[..., Any]]

#: How values are compared: bit for bit, or by the rule for compilers that reorder arithmetic.
Tolerance = Literal["exact", "close"]

Engine = Literal["aotlab", "upstream"]

#: Units in the last place by which sums of a handful of rounded terms may differ in another order.
SUMMATION = 8

#: Kinds of values that autograd may have summed in another order.
_SUMS = ("gradient", "step", "hook", "gradient afterwards")

#: Decides about two values that are not within ``assert_close``'s defaults: whether they are near enough after all.
Appeal = Callable[[str, torch.Tensor, torch.Tensor], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One observable, compared.

    ``kind`` is what was compared (``"value"``, ``"stride"``, …), ``subject`` of what (``"out[0]"``); ``call`` counts
    from 1. ``sentence`` says what differs, and is empty if ``equal``. ``against`` says with what: ``"python"``, the
    function's own code, run eagerly.
    """

    call: int
    kind: str
    subject: str
    expected: str
    actual: str
    equal: bool
    sentence: str = ""
    against: str = "python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One observable in which an engine differs from eager, with a sentence that says how."""

    kind: str
    subject: str
    expected: str
    actual: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What a verification found; true if nothing differs.

    Attributes
    ----------
    subject
        What was verified, as text.
    comparisons
        Every observable of every call.
    refused
        Why the engine refused the function, as a sentence; None if it did not.
    ran_eagerly
        How many calls the engine ran eagerly instead of compiling them: those agree, but say nothing about it.
    against
        With what it was compared: ``"python"``, the function's own code, run eagerly on copies.
    """

    subject: str
    comparisons: tuple[Comparison, ...]
    refused: str | None = None
    ran_eagerly: int = 0
    against: str = "python"

    @property
    def ok(self) -> bool:
        """Whether everything that was compared is equal."""
        return all(row.equal for row in self.comparisons)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences, in the order in which they were seen."""
        return tuple(
            Difference(
                kind=row.kind, subject=row.subject, expected=row.expected, actual=row.actual, sentence=row.sentence
            )
            for row in self.comparisons
            if not row.equal
        )

    @property
    def first(self) -> str | None:
        """The first difference as a sentence, None without any."""
        return next((row.sentence for row in self.comparisons if not row.equal), None)

    @property
    def table(self) -> pd.DataFrame:
        """One row per observable: ``kind``, ``subject``, ``expected``, ``actual``, ``equal``, ``call``."""
        columns = ("kind", "subject", "expected", "actual", "equal", "call")
        table = pd.DataFrame({name: [getattr(row, name) for row in self.comparisons] for name in columns})
        return table.astype({"equal": bool, "call": "int64"})

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        count = len(self.comparisons)
        text = f"all {count} observables equal to those of its Python, run eagerly"
        if not self.ok:
            text = f"{len(self.differences)} of {count} observables differ from its Python, run eagerly; {self.first}"
        if self.ran_eagerly:
            text += f"; {self.ran_eagerly} calls were not compiled and ran eagerly"
        return f"Verification of {self.subject}: {text}"

    def _repr_html_(self) -> str:
        table = self.table
        different, same = (table[table["equal"] == equal].drop(columns="equal") for equal in (False, True))
        found = [f"<p>{html.escape(repr(self))}</p>"]
        if len(different):
            found.append(different.to_html(notebook=True, index=False))
        if len(same):
            found.append(f"<details><summary>{len(same)} equal observables</summary>")
            found.append(f"{same.to_html(notebook=True, index=False)}</details>")
        return "".join(found)


def eager(function: Callable[..., Any]) -> Callable[..., Any]:
    """Leave ``function`` as it is: the reference of every comparison."""
    return function


def verify(
    fn: Callable[..., Any],
    *args: Any,
    engine: Engine = "aotlab",
    backend: Any = "inductor",
    backward: Backward = "all",
    calls: int = 2,
    **kwargs: Any,
) -> Verification:
    """Compare an engine with eager on everything that a caller of ``fn(*args, **kwargs)`` can observe.

    Nothing that is passed in is changed: every call gets copies which alias each other as the originals do, a
    module is copied, tensors that a plain function captures are put back afterwards, and so is the random state.

    Parameters
    ----------
    fn
        A function or an ``nn.Module``.
    engine
        ``"aotlab"``, or ``"upstream"`` for stock ``torch.compile``.
    backend
        ``"eager"`` runs the traced graph by torch's own kernels and is compared bit for bit; ``"inductor"`` and any
        other are compared within the tolerance of this module, with eager's random numbers, also where
        ``torch._inductor.config.fallback_random`` is not set.
    backward
        Which outputs are differentiated: ``"all"`` at once, only the ``"first"``, ``"each"`` by itself, or None.
    calls
        How often the call is repeated, so that the cached entry is compared as well.

    Returns
    -------
    Verification
        True if all is equal; ``first`` is a sentence about the first difference. A refusal by the engine is one.

    Raises
    ------
    UsageError
        The arguments cannot be copied faithfully.

    Examples
    --------
    >>> import torch
    >>> verify(lambda x: x.mul_(2), torch.ones(3), backend="eager").ok
    True
    """
    make = _engine(engine, backend)
    made: list[Any] = []

    def candidate(function: Callable[..., Any]) -> Callable[..., Any]:
        made.append(make(function))
        return made[-1]  # type: ignore[no-any-return]  # held loosely, as its counters are asked for below

    yardstick = eager if engine == "upstream" else _engine("upstream", "inductor")
    with nullcontext() if backend == "eager" else torch_internals.eager_draws_by_inductor():
        found = compare(
            fn,
            args,
            kwargs,
            candidate=candidate,
            backward=backward,
            calls=calls,
            tolerance="exact" if backend == "eager" else "close",
            yardstick=yardstick,
            subject=f"{_name(fn)} ({engine}, {_name(backend)})",
        )
    # A module is wrapped, and its wrapper holds the compiled function; stock torch.compile counts nothing.
    log = getattr(getattr(made[0], "compiled", made[0]), "calls", None)
    return replace(found, ran_eagerly=log.eager) if log is not None else found


def compare(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    candidate: Candidate,
    reference: Candidate = eager,
    backward: Backward = "all",
    calls: int = 2,
    tolerance: Tolerance = "exact",
    yardstick: Candidate | None = None,
    messages: bool = False,
    subject: str | None = None,
) -> Verification:
    """Compare ``candidate(fn)`` with ``reference(fn)`` on everything observable.

    Parameters
    ----------
    candidate, reference
        Turn a function into the callable that is observed. They are called once each, with their own copy of ``fn``
        if that is a module.
    backward, calls
        As in `verify`.
    tolerance
        ``"exact"`` or ``"close"``.
    yardstick
        With ``"close"``: what makes the callable whose error against float64 is allowed twice.
    messages
        Compare the first lines of exceptions' messages too, not only their types.
    subject
        How the result names what was compared.
    """
    given = kwargs or {}

    def run(make: Candidate, dtype: torch.dtype | None = None) -> list[Observation]:
        cloner = Cloner(fn, dtype=dtype)
        with random_state_restored(), restored(cloner.captured):
            function = make(cloner.function)
            return [observe(function, cloner.call(args, given), backward=backward) for _ in range(calls)]

    expected = run(reference)
    actual = run(candidate)
    higher = Higher(run, reference, yardstick) if yardstick is not None and tolerance == "close" else None
    rows: list[Comparison] = []
    for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
        appeal = higher.appeal(index) if higher is not None else None
        rows += judge(left, right, call=index + 1, tolerance=tolerance, appeal=appeal, messages=messages)
    return Verification(
        subject=subject or _name(fn),
        comparisons=tuple(rows),
        refused=next((row.sentence for row in rows if row.kind == "refused"), None),
    )


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
    units: int = 0,
) -> list[Comparison]:
    """Compare two observations of one call, observable by observable.

    Autograd does not promise in which order it sums what several uses of a tensor contribute to its gradient. Where
    such a sum is rounded, ``exact_gradients=False`` allows `SUMMATION` units in the last place of the largest element,
    or of 1, which terms that cancel may be.
    ``units`` allows so many for all values, to tell another rounding from a wrong value.

    ``terse=True`` leaves out what is equal, which is most of the work of writing it down.

    A refusal is a difference of its own kind, and so is every trace that it left on the arguments. When both raise,
    only the exceptions are compared: how far a program got before it raised is not kept.
    """
    page = _Page(
        call=call,
        exact=tolerance == "exact",
        appeal=appeal,
        exact_gradients=exact_gradients,
        terse=terse,
        units=units,
    )
    if actual.failure is not None and actual.failure.refused is not None:
        page.add("refused", "call", str(expected.failure or "no refusal"), str(actual.failure), False)
        for state in actual.tensors:
            page.add(
                "mutated before refusal", state.name, "untouched", "written" if state.version_moved else "untouched"
            )
        return page.rows
    if expected.failure is not None or actual.failure is not None:
        page.exceptions("call", expected.failure, actual.failure, messages)
        return page.rows
    page.add("container", "out", expected.container, actual.container)
    page.add("grad mode", "after the call", _mode(expected.grad_mode), _mode(actual.grad_mode))
    if page.exact:
        page.add("random state", "after the call", expected.random_state, actual.random_state)
    for left, right in _pairs(expected.leaves, actual.leaves):
        page.add("python type", left.name, left.type_name, right.type_name)
        page.add("python value", left.name, left.text, right.text)
    for before, after in _pairs(expected.tensors, actual.tensors):
        page.tensor(before, after, expected, actual)
    page.add(
        "differentiable",
        "call",
        ", ".join(expected.differentiated) or "none",
        ", ".join(actual.differentiated) or "none",
    )
    if not page.steps("before", expected, actual, messages):
        return page.rows
    if actual.backward_failure is not None and actual.backward_failure.refused is not None:
        page.add(
            "refused", "backward", str(expected.backward_failure or "no refusal"), str(actual.backward_failure), False
        )
        return page.rows
    if expected.backward_failure is not None or actual.backward_failure is not None:
        page.exceptions("backward", expected.backward_failure, actual.backward_failure, messages)
        return page.rows
    if page.exact and expected.differentiated:
        page.add("random state", "after the backward", expected.random_state_left, actual.random_state_left)
    theirs = {(gradient.leaf, gradient.step): gradient for gradient in actual.gradients}
    for wanted in expected.gradients:
        if (wanted.leaf, wanted.step) in theirs:
            page.gradient(wanted, theirs[wanted.leaf, wanted.step])
    page.hooks(expected, actual)
    if not page.steps("after", expected, actual, messages):
        return page.rows
    for ours, other in _pairs(expected.finally_, actual.finally_):
        page.finally_(ours, other)
    return page.rows


class _Page:
    """The comparisons of one call, as they are written."""

    def __init__(
        self,
        *,
        call: int,
        exact: bool,
        appeal: Appeal | None,
        exact_gradients: bool,
        terse: bool = False,
        units: int = 0,
    ) -> None:
        self.call = call
        self.exact = exact
        self.exact_gradients = exact_gradients
        self.units = units
        self.appeal = appeal
        self.terse = terse
        self.rows: list[Comparison] = []

    def add(
        self, kind: str, subject: str, expected: str, actual: str, equal: bool | None = None, sentence: str = ""
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
            )
        )

    def exceptions(self, subject: str, expected: Any, actual: Any, messages: bool) -> None:
        # The text shows the message in any case; it counts only if asked for.
        same = expected is not None and actual is not None and expected.type is actual.type
        self.add("exception", subject, str(expected or "none"), str(actual or "none"), same)
        if messages and same:
            self.add("exception message", subject, expected.message, actual.message)

    def steps(
        self, when: Literal["before", "after"], expected: Observation, actual: Observation, messages: bool
    ) -> bool:
        """Compare what came of what the caller did; False if what follows cannot be compared."""
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
        """Compare which hooks were called, how often, with what, and in what order where the gradient dictates one."""
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
        """Compare one tensor at the end, when the caller had done everything."""
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
        if not self.exact:
            same = _close(left, right)
        elif kind in _SUMS:
            same = _same_sum(left, right, self.units) or (
                not self.exact_gradients and _same_sum(left, right, SUMMATION, least=1.0)
            )
        elif self.units and (left.is_floating_point() or left.is_complex()):
            same = _same_sum(left, right, self.units)
        else:
            same = _identical(left, right)
        if not same and self.appeal is not None:
            same = self.appeal(key, left, right)
        if same and self.terse:
            return
        self.add(
            kind, subject, _preview(left), _preview(right), same, "" if same else _where(kind, subject, left, right)
        )

    def _strides(self, left: TensorState, right: TensorState) -> tuple[str, str, bool]:
        ours, theirs = left.spec.stride, right.spec.stride
        strided = len(ours) == len(theirs) == len(left.spec.shape)  # not so for sparse tensors
        if left.spec.shape != right.spec.shape or not strided:
            return str(ours), str(theirs), ours == theirs
        # The stride of a dimension with one element, or in a tensor with none, moves to no other element. Torch itself
        # chooses it differently for an in-place op and for the out-of-place op of the same name.
        empty = 0 in left.spec.shape
        kept = [index for index, size in enumerate(left.spec.shape) if size != 1 and not empty]
        return str(ours), str(theirs), all(ours[index] == theirs[index] for index in kept)

    def _offset(self, state: TensorState, observation: Observation) -> str:
        offset = state.spec.offset
        if self.exact or state.role != "output":
            return str(offset)
        # A compiler may place a new result anywhere in a buffer; only distances within it can be relied on.
        first = next(other for other in observation.tensors if other.name == state.shares_with)
        if first.role == "output" and isinstance(offset, int) and isinstance(first.spec.byte_offset, int):
            return f"{offset - first.spec.byte_offset // max(1, state.value.element_size())} from {first.name}"
        return str(offset)


class Higher:
    """The float64 run and the yardstick's, made only when a value is not close enough at once."""

    def __init__(
        self,
        run: Callable[[Candidate, torch.dtype | None], list[Observation]],
        reference: Candidate,
        yardstick: Candidate,
    ) -> None:
        self._run = run
        self._reference = reference
        self._yardstick = yardstick
        self._runs: tuple[list[Observation], list[Observation]] | None = None
        self._failed = False

    def appeal(self, index: int) -> Appeal:
        """Return what decides about the values of one call."""

        def decide(key: str, _expected: torch.Tensor, actual: torch.Tensor) -> bool:
            if self._runs is None and not self._failed:
                try:
                    self._runs = (self._run(self._reference, torch.float64), self._run(self._yardstick, None))
                except UsageError:
                    self._failed = True
            if self._runs is None:
                return False
            truth, measure = (_value_of(side[index], key) for side in self._runs)
            if truth is None or measure is None or not truth.shape == measure.shape == actual.shape:
                return False
            return _error(actual, truth) <= 2 * _error(measure, truth)

        return decide


def _value_of(observation: Observation, key: str) -> torch.Tensor | None:
    for state in observation.tensors:
        if state.name == key:
            return state.value
    for gradient in observation.gradients:
        if f"{gradient.leaf}.grad.{gradient.step}" == key:
            return gradient.value
    return None


def _error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest absolute error; infinite if NaNs and infinities are not where they should be."""
    if not value.numel():
        return 0.0
    wide = value.to(truth.dtype)
    finite = torch.isfinite(truth)
    if not torch.equal(finite, torch.isfinite(wide)) or not _identical(wide[~finite], truth[~finite]):
        return float("inf")
    return float((wide - truth)[finite].abs().max()) if bool(finite.any()) else 0.0


def _identical(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, but any NaN equals any NaN."""
    if left.is_complex():
        return _identical(torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj()))
    if left.layout != torch.strided or right.layout != torch.strided:
        return left.layout == right.layout and torch.equal(left.to_dense(), right.to_dense())
    if not left.is_floating_point():
        return torch.equal(left, right)
    same = (left == right) & (torch.signbit(left) == torch.signbit(right))
    return bool((same | (left.isnan() & right.isnan())).all())


def _same_sum(left: torch.Tensor, right: torch.Tensor, units: int, least: float = 0.0) -> bool:
    """Compare gradients: zeros have no sign, and elements may be ``units`` in the last place of the largest apart.

    If ``least`` is larger, of that: terms of about that size, as the fuzzer's weights make them, may cancel.
    """
    # Adding a zero turns -0.0 into 0.0 and changes nothing else.
    if _identical(left + 0, right + 0):
        return True
    if not units or left.layout != torch.strided:
        return False
    finite = torch.isfinite(left)
    if not torch.equal(finite, torch.isfinite(right)) or not _identical(left[~finite] + 0, right[~finite] + 0):
        return False
    allowed = units * torch.finfo(left.dtype).eps * left[finite].abs().max().clamp(min=least)
    return bool(((left - right)[finite].abs() <= allowed).all())


def _close(left: torch.Tensor, right: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(right, left, equal_nan=True, check_stride=False)
    except AssertionError:
        return False
    return True


def _pairs(expected: Any, actual: Any) -> Iterator[tuple[Any, Any]]:
    """Pair what bears the same name in the same role; what one side lacks shows in the container already."""

    def key(item: Any) -> tuple[Any, str]:
        return (getattr(item, "role", None), item.name)

    theirs = {key(item): item for item in actual}
    return ((item, theirs[key(item)]) for item in expected if key(item) in theirs)


def _begins_nowhere(state: TensorState, observation: Observation) -> bool:
    """Tell whether an output is a part without elements of memory that the program made.

    Where that part would begin hangs on the strides of dimensions with one element, which are not compared either.
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


def _name(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", type(value).__name__)


def _engine(engine: Engine, backend: Any) -> Candidate:
    """Find what compiles a function by ``engine`` for ``backend``."""
    if engine == "aotlab":
        from aotlab.frontends import api

        return lambda function: api.compile(function, backend=backend)
    if engine == "upstream":
        upstream = "aot_eager" if backend == "eager" else backend
        return lambda function: torch.compile(function, backend=upstream)
    raise UsageError(f"engine {engine!r} is none of 'aotlab', 'upstream'")


#: What a difference of each kind is called in a sentence.
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
    "storage": "`{subject}` lies in the storage of `{actual}`, in eager in that of `{expected}`",
    "storage bytes": "`{subject}` lies in a storage of {actual} bytes, in eager of {expected}",
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
    "differentiable": "what can be differentiated is {actual}, in eager {expected}",
    "gradient": "`{subject}`.grad is {actual}, in eager {expected}",
}
