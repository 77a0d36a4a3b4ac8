"""A store for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aotlab import config
from aotlab.runs import saving


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Store the runs in a temporary file, and return its path."""
    path = tmp_path / "data" / "runs.sqlite"
    monkeypatch.setenv("AOTLAB_RUNS", str(path))
    monkeypatch.setattr(saving, "_warned", set())
    with config.patch(save_runs=True):
        yield path
        saving.finish()
