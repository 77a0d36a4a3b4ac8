"""Fake results whose strides are put right."""

from __future__ import annotations

import pytest
import torch

import aotlab
from aotlab.trace import fakes


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


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_shuffled_channels(layout):
    """They keep their memory format, by which dropout draws; torch's fake does not, and other elements were dropped."""
    x = torch.rand(2, 4, 4, 5).to(memory_format=layout)
    for function in (
        lambda x: torch.nn.functional.channel_shuffle(x, 2),
        lambda x: torch.nn.functional.dropout(torch.nn.functional.channel_shuffle(x, 2), 0.5),
    ):
        results = []
        for candidate in (function, aotlab.compile(function, backend="eager")):
            torch.manual_seed(0)
            results.append(candidate(x))
        assert results[0].stride() == results[1].stride()
        assert torch.equal(*results)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize("sizes", [(3, 2), (6,), (1, 3, 2), (2, 3)])
def test_a_view_around_a_dimension_of_size_one(backend, is_used, sizes):
    """Fakes take tensors for viewable that are not; the error is eager's, used or not, and not other values."""

    def f(x):
        view = x.view(sizes)
        return view * 2 if is_used else x * 2

    x = torch.arange(6.0).reshape(3, 1, 2).permute(2, 1, 0)
    for frontend in ("direct", "dynamo"):
        call = aotlab.compile(f, backend=backend, frontend=frontend)
        if sizes == (2, 3):
            assert torch.equal(f(x), call(x))
        else:
            with pytest.raises(RuntimeError, match="view size is not compatible"):
                call(x)
