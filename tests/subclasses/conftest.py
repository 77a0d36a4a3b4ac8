"""Fixtures that the tests of subclasses share."""

from __future__ import annotations

import pytest

import aotlab
from tests.test_pipeline import HARMLESS, poison

#: Names that Dynamo reads while it captures.
_ASKED_BY_DYNAMO = {
    "_coor_enabled", "get_loaded_async_collective_tensor_type", "saved_tensors_hooks_are_inlineable",
    "top_saved_tensors_hooks",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _strict(monkeypatch, request):
    """Let nothing run eagerly, and nothing be upstream's doing; Inductor traces its patterns by upstream's make_fx."""
    monkeypatch.setattr(aotlab.config, "fallback", "error")
    if "inductor" not in request.node.name:
        poison(monkeypatch, HARMLESS | _ASKED_BY_DYNAMO)
