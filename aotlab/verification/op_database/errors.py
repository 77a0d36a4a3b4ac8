"""``aotlab verify ops --errors``: where eager refuses a call, so must aotlab, though nobody uses the result.

    def call(anchor, a, b):
        a @ b                # raises for a float and a boolean operand; nobody looks at what it gives
        return anchor * 2

A trace has no values and does not know which kernels there are, so such an op is easily dropped as dead code. For each
operator there are the calls that torch's database gives as erroneous, and its first sample with one operand after the
other in another dtype: all by one compiled function, whose first call has the dtypes of the sample, so that guards are
tried as well. All of it is done for inference and for training.
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
from aotlab.verification.clones import random_state_restored
from aotlab.verification.op_database.outcome import Outcome, Result, result_of
from aotlab.verification.op_database.variants import Variant, seeded

#: The dtypes that an operand gets in place of its own.
_OTHERS = (torch.int64, torch.bool, torch.complex64)

#: How many erroneous calls of the database are tried for one operator.
_MOST = 24


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Series:
    """Calls of one compiled function, each with its label, as flat arguments."""

    spec: Any
    calls: tuple[tuple[str, list[Any]], ...]


def error_variants() -> tuple[Variant, ...]:
    """List each operator once; the form of these variants is ``"errors"``."""
    entries = {info.full_name: info for info in reversed(torch_internals.op_database())}
    return tuple(
        Variant(entry=name, form="errors", dtype=torch.float32, info=info)
        for name, info in reversed(entries.items())
        if torch.float32 in info.supported_dtypes("cpu") or info.error_inputs_func is not None
    )


def judge_errors(variant: Variant, *, seconds: float | None = None) -> Result:
    """Make the calls of an operator by eager and by aotlab, and say whether both raise the same.

    Parameters
    ----------
    seconds
        After this time no further series is begun.
    """
    started = time.perf_counter()
    found: list[tuple[Outcome, str]] = []
    with warnings.catch_warnings(), torch_internals.samples_do_not_seed(), seeded(variant.name):
        warnings.simplefilter("ignore")  # the samples warn of what is deprecated, and aotlab of what runs eagerly
        try:
            for series, training in itertools.product(_series(variant), (False, True)):
                if training and not variant.info.supports_autograd:
                    continue
                found += _judge(variant.info.op, series, training=training)
                if seconds is not None and time.perf_counter() - started > seconds:
                    break
        except _NoSamplesError as error:
            found.append((Outcome.NOT_COMPARED, str(error)))
    return result_of(variant, found, started, nothing="torch has no samples of it with plain tensors")


class _NoSamplesError(Exception):
    """Torch's own code raised while it made the samples."""


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
    """Flatten a sample's arguments; None in their place if there is no tensor, or one that is not plain."""
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
    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        able = value.dtype.is_floating_point or value.dtype.is_complex
        return value.detach().clone().requires_grad_(training and able)

    args, kwargs = pytree.tree_unflatten([own(value) for value in flat], spec)
    try:
        with random_state_restored():
            function(torch.ones(1, requires_grad=training), *args, **kwargs)
    except Exception as error:  # noqa: BLE001  # whatever the operator raises
        return error
    return None


def _text(error: Exception | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {error}"
