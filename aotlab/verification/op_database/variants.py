"""What there is to be run: each entry of torch's databases as variants, each variant as a few calls.

The databases have up to thousands of samples for one operator, most of them alike. A few are chosen that differ in
kind: in how many tensors there are and of how many dimensions, in keywords, in memory layout, in being empty. One is
also taken with every tensor laid out with gaps, which is where a compiler's own idea of strides shows, and one without
gradients; and calls that torch expects to raise.
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

#: How an operator is called, or in which mode a module is; `errors` has a form of its own.
Form = Literal["call", "in-place", "out", "train", "eval", "errors"]

#: The dtype with which an operator is run: the first of these that it supports.
_FIRST = (
    torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool, torch.bfloat16, torch.float16,
)  # fmt: skip

#: Dtypes with which it is run as well, where it supports them.
_ALSO = (torch.complex64, torch.int64)

#: How many samples are looked at to choose from; some operators have thousands, and making them takes the time.
_LOOKED_AT = 48

#: What a variant is limited to if the caller says nothing.
CASES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """An entry of the databases in one form and one dtype; ``name`` is unique, the same in all versions of torch."""

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
    """One call: a function or module and its arguments. ``differentiated`` says whether a backward follows."""

    label: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    differentiated: bool


@functools.cache
def variants() -> tuple[Variant, ...]:
    """List all variants, operators first, in the databases' order.

    Raises
    ------
    UsageError
        A package that torch's own tests need is not installed.
    """
    found = [variant for info in torch_internals.op_database() for variant in _of_operator(info)]
    found += [variant for info in torch_internals.module_database() for variant in _of_module(info)]
    # An entry that is there twice is the same operator with other samples; the first speaks for both.
    return tuple({variant.name: variant for variant in reversed(found)}.values())[::-1]


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
    """Make the calls of ``variant``, one after the other; the same ones each time.

    Parameters
    ----------
    limit
        How many samples are taken; None for all that there are.
    """
    with seeded(variant.name):
        if variant.is_module:
            chosen = list(_module_samples(variant, limit))
        else:
            chosen = list(_operator_samples(variant, limit))
    yield from chosen


@contextmanager
def seeded(name: str) -> Iterator[None]:
    """Let samples depend on nothing but the variant's name, and leave the random generators as they were."""
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
        # In place, a tensor is not broadcast: eager raises. One such sample is enough, if there is no other.
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
    except Exception:  # noqa: BLE001  # not every sample can be laid out so (sparse ones): then there is none
        return
    yield from _operator_cases(variant, spread, f"sample {number} with gaps", differentiated, 1)


def _is_extended(value: Any) -> bool:
    """Tell whether there is anything to lay out: a tensor with more than one element."""
    if isinstance(value, torch.Tensor):
        return value.numel() > 1
    return isinstance(value, list | tuple) and any(_is_extended(item) for item in value)


def _operator_cases(variant: Variant, sample: Any, label: str, differentiated: bool, number: int) -> Iterator[Case]:
    args, kwargs = _own((sample.input, *sample.args)), _own(dict(sample.kwargs))
    function = _plain(variant.info.op)
    if variant.form == "in-place":
        function = _plain(variant.info.inplace_variant)
        args = (_writable(args[0]), *args[1:])
    elif variant.form == "out":
        kwargs["out"] = _results_like(function, args, kwargs, spread=number % 2 == 1)
        if kwargs["out"] is None:
            return
    yield Case(label=label, function=function, args=args, kwargs=kwargs, differentiated=differentiated)


def _own(value: Any) -> Any:
    """Give what requires grad and is a window of another dtype memory of its own: no comparison could rebuild it."""
    if isinstance(value, torch.Tensor):
        base = torch_internals.base_of(value)
        foreign = base is not None and base.dtype != value.dtype and value.requires_grad
        return value.detach().clone().requires_grad_() if foreign else value
    if type(value) in (list, tuple):
        return type(value)(_own(item) for item in value)
    return {name: _own(item) for name, item in value.items()} if type(value) is dict else value


def _plain(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Make an ordinary function of a built-in, a lambda or a callable object."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return operator(*args, **kwargs)

    return call


def _writable(value: Any) -> Any:
    """Give a tensor that may be written in place: a leaf that requires grad may not."""
    if isinstance(value, torch.Tensor):
        return value.clone() if value.is_leaf and value.requires_grad else value
    if isinstance(value, list | tuple):
        return type(value)([_writable(item) for item in value])
    return value


def _results_like(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, spread: bool) -> Any:
    """Make tensors to write the results into; None if the results are not tensors, or the call raises."""
    try:
        with random_state_restored(), torch.no_grad():
            results = function(*args, **kwargs)
    except Exception:  # noqa: BLE001  # what it raises is seen where it is called for its results
        return None

    def like(result: torch.Tensor) -> torch.Tensor:
        made = torch.full((*result.shape, 2), 1, dtype=result.dtype)[..., 0] if spread else result.clone()
        return made.fill_(0)

    if isinstance(results, torch.Tensor):
        return like(results) if results.layout == torch.strided else None
    if isinstance(results, list | tuple) and all(isinstance(result, torch.Tensor) for result in results):
        return tuple(like(result) for result in results)
    return None


def _first(samples: Any, limit: int | None) -> list[Any]:
    return list(samples if limit is None else itertools.islice(samples, _LOOKED_AT))


def _choose(samples: Any, limit: int | None) -> list[Any]:
    """Take the first sample of each kind, then others from the whole range."""
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
    """Take ``count`` of ``values``, the first and the last among them."""
    return [values[round(step * (len(values) - 1) / max(1, count - 1))] for step in range(count)]


def _kind(value: Any) -> Any:
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
        made = sample.constructor_input
        module = info.module_cls(*made.args, **made.kwargs).to(variant.dtype).train(training)
        label = f"sample {index}" + (f" ({sample.desc})" if sample.desc else "")
        given = sample.forward_input
        yield Case(label=label, function=module, args=given.args, kwargs=dict(given.kwargs), differentiated=True)
