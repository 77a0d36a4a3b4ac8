"""Check that aotlab raises if eager raises, even if nobody uses the result: ``aotlab verify ops --errors``.

    def call(anchor, a, b):
        a @ b                # raises for a float and a boolean operand; nobody uses the result
        return anchor * 2

A trace has no values, and it does not know which kernels exist. So an engine may remove an op whose result is unused as
dead code, and the error is lost. Two kinds of calls are made for each operator: the calls that torch's database lists
as erroneous, and the first sample with the dtype of one operand changed. All calls of a sample use one compiled
function. The first call has the original dtypes, so the later calls test the guards too. Every call is made for
inference and for training.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aotlab import _torch as torch_internals
from aotlab._torch import pytree
from aotlab.frontends import api
from aotlab.maintenance.op_database.outcome import Outcome, Result, result_of
from aotlab.maintenance.op_database.variants import Variant, seeded
from aotlab.verification.clones import random_state_restored

#: The dtypes to which an operand is changed.
_OTHERS = (torch.int64, torch.bool, torch.complex64)

#: The largest number of erroneous calls from the database for one operator.
_MOST = 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Series:
    """The calls of one compiled function.

    ``calls`` has a label and the flat arguments of each call. ``spec`` is the pytree structure of the arguments.
    """

    spec: Any
    calls: tuple[tuple[str, list[Any]], ...]


def error_variants() -> tuple[Variant, ...]:
    """List one variant of the form ``"errors"`` for each operator; `judge_errors` makes its calls."""
    entries = {info.full_name: info for info in reversed(torch_internals.op_database())}
    return tuple(
        Variant(entry=name, form="errors", dtype=torch.float32, info=info)
        for name, info in reversed(entries.items())
        if torch.float32 in info.supported_dtypes("cpu") or info.error_inputs_func is not None
    )


def judge_errors(variant: Variant, *, seconds: float | None = None) -> Result:
    """Make the calls of an operator with eager and with aotlab, and tell whether both raise the same errors.

    Parameters
    ----------
    variant
        One of `error_variants`.
    seconds
        After this many seconds, no other function is compiled and called.
    """
    started = time.perf_counter()
    outcomes: list[tuple[Outcome, str]] = []
    with warnings.catch_warnings(), torch_internals.samples_do_not_seed(), seeded(variant.name):
        warnings.simplefilter("ignore")  # samples cause deprecation warnings, and aotlab warns if it runs eagerly
        try:
            for series, training in itertools.product(_series(variant), (False, True)):
                if training and not variant.info.supports_autograd:
                    continue
                outcomes += _judge(variant.info.op, series, training=training)
                if seconds is not None and time.perf_counter() - started > seconds:
                    break
        except _NoSamplesError as error:
            outcomes.append((Outcome.NOT_COMPARED, str(error)))
    return result_of(variant, outcomes, started, nothing="torch has no samples of this operator with plain tensors")


class _NoSamplesError(Exception):
    """Torch's own code raised an exception while it made the samples."""


def _series(variant: Variant) -> Iterator[_Series]:
    info = variant.info
    try:
        samples, errors = [], []
        if variant.dtype in info.supported_dtypes("cpu"):
            samples = list(itertools.islice(info.sample_inputs("cpu", variant.dtype, set_seed=False), 1))
        if info.error_inputs_func is not None:
            errors = [case.sample_input for case in itertools.islice(info.error_inputs("cpu"), _MOST)]
    except Exception as error:
        raise _NoSamplesError(f"torch cannot make its samples: {type(error).__name__}: {error}") from error
    for number, sample in enumerate(errors):
        flat, spec = _flat(sample)
        if flat is not None:
            yield _Series(spec=spec, calls=((f"error {number}", flat),))
    for sample in samples:
        flat, spec = _flat(sample)
        if flat is not None:
            where = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
            changed = [
                (f"tensor {number} as {str(dtype).removeprefix('torch.')}", _changed(flat, i, dtype))
                for number, i in enumerate(where)
                for dtype in _OTHERS
            ]
            yield _Series(spec=spec, calls=(("as it is", flat), *changed))


def _flat(sample: Any) -> tuple[list[Any] | None, Any]:
    """Flatten the arguments of a sample; return them and their pytree structure.

    Return None instead of the arguments if there is no tensor among them, or if a tensor is a subclass, sparse, or not
    on the CPU.
    """
    flat, spec = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    tensors = [value for value in flat if isinstance(value, Tensor)]
    plain = all(type(t) is Tensor and t.device.type == "cpu" and t.layout is torch.strided for t in tensors)
    return (flat, spec) if tensors and plain else (None, spec)


def _changed(flat: list[Any], index: int, dtype: torch.dtype) -> list[Any]:
    return [value.detach().to(dtype) if i == index else value for i, value in enumerate(flat)]


def _judge(operator: Callable[..., Any], series: _Series, *, training: bool) -> Iterator[tuple[Outcome, str]]:
    def call(anchor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        operator(*args, **kwargs)
        return anchor * 2

    compiled = api.compile(call, backend="eager")
    mode = " in training" if training else ""
    for label, flat in series.calls:
        expected, actual = (_raised(function, flat, series.spec, training) for function in (call, compiled))
        if _text(actual) != _text(expected):
            yield Outcome.DIFFERENT, f"{label}{mode}: eager gives {_text(expected)}, aotlab {_text(actual)}"
        else:
            yield (Outcome.EQUAL if expected is None else Outcome.RAISES), f"{label}{mode}: {_text(expected)}"


def _raised(function: Callable[..., Any], flat: list[Any], spec: Any, training: bool) -> Exception | None:
    def fresh(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        able = value.dtype.is_floating_point or value.dtype.is_complex
        return value.detach().clone().requires_grad_(training and able)

    args, kwargs = pytree.tree_unflatten([fresh(value) for value in flat], spec)
    try:
        with random_state_restored():
            function(torch.ones(1, requires_grad=training), *args, **kwargs)
    except Exception as error:  # noqa: BLE001  # whatever the operator raises
        return error
    return None


def _text(error: Exception | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {error}"
