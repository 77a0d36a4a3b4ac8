"""Fake tensors among the names of a notebook."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from aotlab.notebook.names import _bits


def test_they_have_no_bits() -> None:
    """Whether a cell wrote them is told by their versions alone: asking for their values raised."""
    with FakeTensorMode():
        assert _bits(torch.empty(3)) is None
    assert _bits(torch.ones(3)) is not None
