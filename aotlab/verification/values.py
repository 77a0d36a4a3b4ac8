"""Compare the elements of two tensors: bit for bit, as rounded sums, or within a tolerance."""

from __future__ import annotations

import torch


def largest(value: torch.Tensor) -> float:
    """Return the largest absolute value of the finite elements."""
    finite = _wide(value[torch.isfinite(value)])
    return float(finite.abs().max()) if finite.numel() else 0.0


def relative_error(error: float, value: torch.Tensor) -> float:
    """Divide ``error`` by the largest absolute value in ``value``; return 0 if all elements are zero."""
    scale = largest(value)
    return error / scale if scale else 0.0


def distance(left: torch.Tensor, right: torch.Tensor) -> tuple[float | None, float | None]:
    """Return the largest absolute difference, and this difference divided by the largest absolute value in ``left``.

    Differences that are not finite are ignored. Both results are None unless the tensors are strided and floating or
    complex.
    """
    if left.layout != torch.strided or not (left.is_floating_point() or left.is_complex()):
        return None, None
    gaps = (_wide(right) - _wide(left)).abs()
    gap = float(gaps[torch.isfinite(gaps)].max()) if bool(torch.isfinite(gaps).any()) else 0.0
    return gap, relative_error(gap, left)


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def largest_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest absolute difference of an element of ``value`` from the same element of ``truth``.

    The result is infinite if the two tensors have NaNs or infinities in different elements.
    """
    if not value.numel():
        return 0.0
    wide, truth = _wide(value), _wide(truth)
    finite = torch.isfinite(truth)
    if not torch.equal(finite, torch.isfinite(wide)) or not identical(wide[~finite], truth[~finite]):
        return float("inf")
    return float((wide - truth)[finite].abs().max()) if bool(finite.any()) else 0.0


def identical(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Tell whether two tensors are equal bit for bit; any NaN equals any NaN."""
    if left.is_complex():
        return identical(torch.view_as_real(left.resolve_conj()), torch.view_as_real(right.resolve_conj()))
    if left.layout != torch.strided or right.layout != torch.strided:
        return left.layout == right.layout and torch.equal(left.to_dense(), right.to_dense())
    if not left.is_floating_point():
        return torch.equal(left, right)
    same = (left == right) & (torch.signbit(left) == torch.signbit(right))
    return bool((same | (left.isnan() & right.isnan())).all())


def same_sum(left: torch.Tensor, right: torch.Tensor, units: int, least: float = 0.0) -> bool:
    """Compare two tensors whose elements are sums that were perhaps formed in different orders.

    The sign of a zero is ignored. Elements may differ by ``units`` units in the last place of the largest element of
    ``left``, or in the last place of ``least`` if all elements are smaller. The gradients that the fuzzer passes to a
    backward make terms of about the size 1. The sum of such terms can be small, because they can cancel. So `judge`
    passes 1 as ``least`` for gradients.
    """
    # Adding a zero turns -0.0 into 0.0 and changes nothing else.
    if identical(left + 0, right + 0):
        return True
    if not units or left.layout != torch.strided:
        return False
    finite = torch.isfinite(left)
    if not torch.equal(finite, torch.isfinite(right)) or not identical(left[~finite] + 0, right[~finite] + 0):
        return False
    allowed = units * torch.finfo(left.dtype).eps * left[finite].abs().max().clamp(min=least)
    return bool(((left - right)[finite].abs() <= allowed).all())


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Tell whether ``torch.testing.assert_close`` accepts ``right`` as close to ``left``, with its default tolerances.

    NaN equals NaN, and strides are not compared.
    """
    try:
        torch.testing.assert_close(right, left, equal_nan=True, check_stride=False)
    except AssertionError:
        return False
    return True


def close_but_for(error: float, truth: torch.Tensor, value: torch.Tensor) -> bool:
    """Tell whether ``value`` is close to ``truth`` if each element may have an additional absolute error of ``error``.

    Each element of ``value`` is moved towards ``truth`` by at most ``error``. Then `close` compares the two tensors.
    """
    exact, wide = _wide(truth), _wide(value)
    gap = wide - exact
    nearest = exact + gap.sgn() * (gap.abs() - error).clamp(min=0)
    nearest = torch.where(torch.isfinite(gap), nearest, wide)
    return close(truth.to(value.dtype), nearest.to(value.dtype))
