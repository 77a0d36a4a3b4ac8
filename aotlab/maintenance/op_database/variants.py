"""Turn each entry of torch's databases into variants, and each variant into a few calls.

The databases have up to thousands of samples for one operator, and most of them are similar. A few samples are chosen
that differ in the number and the dimensions of the tensors, in keywords, in memory layout, and in being empty. One
sample also runs with gaps between the elements of every tensor, because a compiler may choose other strides for such a
call than eager. One sample also runs without gradients. Calls for which torch's database expects an exception run too.
"""

from __future__ import annotations

import functools
import itertools
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from aotlab import _torch as torch_internals
from aotlab.verification.clones import random_state_restored

#: How an operator is called, or the mode of a module. The form ``"errors"`` is used for `errors.error_variants` only.
Form = Literal["call", "in-place", "out", "train", "eval", "errors"]

#: An operator runs with the first of these dtypes that it supports.
_FIRST = (
    torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool, torch.bfloat16, torch.float16,
)  # fmt: skip

#: An operator also runs with each of these dtypes that it supports.
_ALSO = (torch.complex64, torch.int64)

#: The calls of a variant are chosen from this many samples. Some operators have thousands of samples, and most of the
#: time is spent on making them.
_LOOKED_AT = 48

#: The default limit for the number of samples of a variant.
CASES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """An entry of the databases in one form and one dtype.

    ``entry`` is the name of the entry, and ``info`` is torch's ``OpInfo`` or ``ModuleInfo``. ``name`` is unique and the
    same in all versions of torch.
    """

    entry: str
    form: Form
    dtype: torch.dtype
    info: Any = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """The entry's name, the form and the dtype: ``"nn.functional.relu in-place float32"``."""
        return f"{self.entry} {self.form} {str(self.dtype).removeprefix('torch.')}"

    @property
    def is_module(self) -> bool:
        """Whether this is a module and not an operator."""
        return self.form in ("train", "eval")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One call: a function or module and its arguments.

    ``label`` names the sample. ``differentiated`` says whether a backward follows the call.
    """

    label: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    differentiated: bool


@functools.cache
def variants() -> tuple[Variant, ...]:
    """List all variants, operators first, in the order of the databases.

    Raises
    ------
    UsageError
        If a package that torch's own tests need is not installed.
    """
    listed = [variant for info in torch_internals.op_database() for variant in _of_operator(info)]
    listed += [variant for info in torch_internals.module_database() for variant in _of_module(info)]
    # Two entries with the same name are the same operator with different samples. The first entry is used.
    return tuple({variant.name: variant for variant in reversed(listed)}.values())[::-1]


def _of_operator(info: Any) -> Iterator[Variant]:
    supported = info.supported_dtypes("cpu")
    first = _first_dtype(info)
    if first is None:
        return
    forms: list[Form] = ["call"]
    if info.inplace_variant is not None:
        forms.append("in-place")
    if info.supports_out:
        forms.append("out")
    for dtype in dict.fromkeys((first, *(dtype for dtype in _ALSO if dtype in supported))):
        for form in forms:
            yield Variant(entry=info.full_name, form=form, dtype=dtype, info=info)


def _first_dtype(info: Any) -> torch.dtype | None:
    supported = info.supported_dtypes("cpu")
    return next((dtype for dtype in _FIRST if dtype in supported), None)


def _of_module(info: Any) -> Iterator[Variant]:
    dtype = next((dtype for dtype in _FIRST if dtype in info.dtypes), None)
    if dtype is None:
        return
    modes: tuple[Form, ...] = ("train", "eval")
    for mode in modes:
        yield Variant(entry=info.name, form=mode, dtype=dtype, info=info)


def cases_of(variant: Variant, *, limit: int | None = CASES) -> Iterator[Case]:
    """Yield the calls of ``variant``. Their random values are the same in every run.

    Parameters
    ----------
    limit
        The largest number of samples; None for all of them.
    """
    with seeded(variant.name):
        if variant.is_module:
            chosen = list(_module_samples(variant, limit))
        else:
            chosen = list(_operator_samples(variant, limit))
    yield from chosen


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Seed the random generators from the variant's name, and restore their states at the end of the ``with`` block."""
    seed = zlib.crc32(name.encode())
    python, numpy = random.getstate(), np.random.get_state()
    with random_state_restored():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _differentiable(variant: Variant) -> bool:
    info, dtype = variant.info, variant.dtype
    if variant.form == "out" or not (dtype.is_floating_point or dtype.is_complex):
        return False  # autograd refuses ``out=``
    if variant.form == "in-place" and not info.supports_inplace_autograd:
        return False
    return bool(info.supports_autograd) and dtype in info.supported_backward_dtypes("cpu")


def _operator_samples(variant: Variant, limit: int | None) -> Iterator[Case]:
    differentiated = _differentiable(variant)
    samples = variant.info.sample_inputs("cpu", variant.dtype, requires_grad=differentiated, set_seed=False)
    if variant.form == "in-place":
        # Eager raises if an in-place op would have to broadcast its target. Put these samples last, so that the others
        # are chosen first.
        samples = sorted(_first(samples, limit), key=lambda sample: bool(sample.broadcasts_input))
    chosen = _choose(samples, limit)
    for number, sample in enumerate(chosen):
        yield from _operator_cases(variant, sample, f"sample {number}", differentiated, number)
    if variant.form == "call" and variant.dtype == _first_dtype(variant.info) and variant.info.error_inputs_func:
        for number, error in enumerate(_first(variant.info.error_inputs_func(variant.info, "cpu"), limit)[:limit]):
            yield from _operator_cases(variant, error.sample_input, f"error {number}", False, 0)
    if not chosen:
        return
    number = next((n for n, sample in enumerate(chosen) if _is_extended(sample.input)), 0)
    if differentiated:
        plain = chosen[number].transform(lambda value: value.detach() if isinstance(value, torch.Tensor) else value)
        yield from _operator_cases(variant, plain, f"sample {number} without gradients", False, 0)
    try:
        spread = chosen[number].noncontiguous()
    except Exception:  # noqa: BLE001  # some samples, such as sparse ones, cannot be noncontiguous
        return
    yield from _operator_cases(variant, spread, f"sample {number} with gaps", differentiated, 1)


def _is_extended(value: Any) -> bool:
    """Tell whether a value contains a tensor with more than one element. Only then can gaps change its layout."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 1
    return isinstance(value, list | tuple) and any(_is_extended(item) for item in value)


def _operator_cases(variant: Variant, sample: Any, label: str, differentiated: bool, number: int) -> Iterator[Case]:
    args, kwargs = _rebuildable((sample.input, *sample.args)), _rebuildable(dict(sample.kwargs))
    function = _plain(variant.info.op)
    if variant.form == "in-place":
        function = _plain(variant.info.inplace_variant)
        args = (_writable(args[0]), *args[1:])
    elif variant.form == "out":
        kwargs["out"] = _results_like(function, args, kwargs, spread=number % 2 == 1)
        if kwargs["out"] is None:
            return
    yield Case(label=label, function=function, args=args, kwargs=kwargs, differentiated=differentiated)


def _rebuildable(value: Any) -> Any:
    """Clone tensors that require grad and are views of a base with another dtype: `Cloner` cannot rebuild them."""
    if isinstance(value, torch.Tensor):
        base = torch_internals.base_of(value)
        foreign = base is not None and base.dtype != value.dtype and value.requires_grad
        return value.detach().clone().requires_grad_() if foreign else value
    if type(value) in (list, tuple):
        return type(value)(_rebuildable(item) for item in value)
    return {name: _rebuildable(item) for name, item in value.items()} if type(value) is dict else value


def _plain(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a Python function that calls ``operator``: a built-in, a lambda or another callable object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    return call


def _writable(value: Any) -> Any:
    """Replace leaves that require grad by clones of them, because autograd forbids writes to these leaves."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.is_leaf and value.requires_grad else value
    if isinstance(value, list | tuple):
        return type(value)([_writable(item) for item in value])
    return value


def _results_like(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, spread: bool) -> Any:
    """Make tensors for ``out=`` with the shapes and dtypes of a call's results. ``spread`` adds gaps between elements.

    Return None if a result is not a dense tensor, or if the call raises.
    """
    try:
        with random_state_restored(), torch.no_grad():
            results = function(*args, **kwargs)
    except Exception:  # noqa: BLE001  # the same error is reported when the results are compared
        return None

    def like(result: torch.Tensor) -> torch.Tensor:
        target = torch.full((*result.shape, 2), 1, dtype=result.dtype)[..., 0] if spread else result.clone()
        return target.fill_(0)

    if isinstance(results, torch.Tensor):
        return like(results) if results.layout == torch.strided else None
    if isinstance(results, list | tuple) and all(isinstance(result, torch.Tensor) for result in results):
        return tuple(like(result) for result in results)
    return None


def _first(samples: Any, limit: int | None) -> list[Any]:
    return list(samples if limit is None else itertools.islice(samples, _LOOKED_AT))


def _choose(samples: Any, limit: int | None) -> list[Any]:
    """Choose at most ``limit`` samples: the first sample of each kind (see `_kind`), then others at even distances."""
    seen = _first(samples, limit)
    if limit is None or len(seen) <= limit:
        return seen
    kinds: dict[Any, int] = {}
    for index, sample in enumerate(seen):
        kinds.setdefault(_kind((sample.input, sample.args, sample.kwargs)), index)
    order = [*kinds.values()]
    if len(order) > limit:
        order = _evenly(order, limit)
    spare = _evenly(range(len(seen)), limit + 1)
    return [seen[index] for index in sorted(list(dict.fromkeys([*order, *spare]))[:limit])]


def _evenly(values: Sequence[int], count: int) -> list[int]:
    """Return ``count`` evenly spaced elements of ``values``, including the first and the last."""
    return [values[round(step * (len(values) - 1) / max(1, count - 1))] for step in range(count)]


def _kind(value: Any) -> Any:
    """Return the kind of a sample: the dimensions, dtypes and layouts of tensors, and the types of other values."""
    if isinstance(value, torch.Tensor):
        dense = value.layout == torch.strided
        return (value.dim(), value.dtype, value.numel() == 0, dense and value.is_contiguous(), value.layout)
    if isinstance(value, list | tuple):
        return tuple(_kind(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _kind(item)) for name, item in value.items())
    return type(value)


def _module_samples(variant: Variant, limit: int | None) -> Iterator[Case]:
    info, training = variant.info, variant.form == "train"
    samples = info.module_inputs_func(info, device="cpu", dtype=variant.dtype, requires_grad=True, training=training)
    every = [sample for sample in _first(samples, limit) if sample.forward_input is not None]
    count = len(every) if limit is None else min(limit, len(every))
    for step in range(count):
        index = round(step * (len(every) - 1) / max(1, count - 1))
        sample = every[index]
        construction = sample.constructor_input
        module = info.module_cls(*construction.args, **construction.kwargs).to(variant.dtype).train(training)
        label = f"sample {index}" + (f" ({sample.desc})" if sample.desc else "")
        call = sample.forward_input
        yield Case(label=label, function=module, args=call.args, kwargs=dict(call.kwargs), differentiated=True)
