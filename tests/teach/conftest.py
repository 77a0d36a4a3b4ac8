"""Progress of tests is kept in a folder of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Redirect the file in which progress is kept, and return its path."""
    path = tmp_path / "progress" / "kept.json"
    monkeypatch.setenv("AOTLAB_PROGRESS", str(path))
    return path
