"""Fake results whose strides are put right."""

from __future__ import annotations

import pytest
import torch

import aotlab
from aotlab.recorder import fakes


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 1), (2, 0, 1)])
@pytest.mark.parametrize("right", [None, False], ids=["as it is", "as in torch 2.11"])
def test_transforms_of_real_values(dims: tuple[int, ...], right: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The strides of a transform are the kernel's, also where torch's fake has others."""
    if right is not None:
        monkeypatch.setattr(fakes, "_fft_strides_are_right", lambda: right)
    function = lambda x: torch.fft.rfftn(x, dim=dims)  # noqa: E731
    for x in (torch.randn(4, 5, 6), torch.randn(6, 5, 4).transpose(0, 2)):
        with aotlab.config.patch(debug_assert=True, fallback="error"):
            result = aotlab.compile(function, backend="eager")(x)
        assert function(x).stride() == result.stride()
        assert torch.equal(function(x), result)
