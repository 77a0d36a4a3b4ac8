"""The file of progress: kept whole, read as data, and never worth an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotlab import teach
from aotlab.teach import progress_file


def test_progress_is_kept_exported_and_reset(file: Path, tmp_path: Path) -> None:
    """The progress is still there after a restart. It can be exported and reset."""
    teach.exercise("room").hint()
    teach.exercise("diagonal-stride").check(lambda n: n + 1)
    assert json.loads(file.read_text())["exercises"]["room"]["hints"] == 1
    rows = {row[0]: row for row in teach.progress().rows}
    assert rows["storages"][1:3] == (
        "1 of 3",
        "–\N{NO-BREAK SPACE}second-column, ✓\N{NO-BREAK SPACE}diagonal-stride, –\N{NO-BREAK SPACE}room",
    )
    copy = teach.progress().export(tmp_path / "copy.json")
    assert json.loads(copy.read_text()) == json.loads(file.read_text())
    teach.progress().reset()
    assert teach.progress().rows[0][1] == "0 of 3"
    assert [row[0] for row in teach.progress().rows][-2:] == ["compiler", "wild"]  # as the pages follow each other


@pytest.mark.parametrize(
    "text",
    ["", "{}", "import os", '{"exercises": {"room": {"done": "yes"}}}', '{"practice": {"x": 1}}'],
)
def test_a_damaged_file(file: Path, text: str) -> None:
    """Damaged entries are ignored, and later progress is saved.

    A file that is not JSON is kept under another name.
    """
    file.parent.mkdir()
    file.write_text(text)
    assert progress_file.read() == {"exercises": {}, "practice": {}}
    teach.exercise("room").hint()
    assert progress_file.entry("exercises", "room")["hints"] == 1
    aside = file.with_suffix(".damaged")
    assert (aside.read_text() if aside.exists() else None) == (text if text in ("", "import os") else None)


@pytest.mark.parametrize("text", ["[]", '{"exercises": 3}', '{"cells": [], "nbformat": 4}'])
def test_json_of_another_program(file: Path, text: str) -> None:
    """JSON that is not a progress file is not overwritten, and a note says so."""
    file.parent.mkdir()
    file.write_text(text)
    said = repr(teach.exercise("diagonal-stride").check(lambda n: n + 1))
    note = f"`{file}` is not a progress file; set AOTLAB_PROGRESS to another path"
    assert said.startswith(f"Right.\nYour progress could not be saved: {note}.")
    teach.progress().reset()
    assert file.read_text() == text


def test_a_folder_that_cannot_be_written(file: Path) -> None:
    """An answer is checked all the same, with a note."""
    file.parent.write_text("in the way")
    said = repr(teach.exercise("diagonal-stride").check(lambda n: n + 1))
    assert said.startswith("Right.\nYour progress could not be saved: ")


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the user's data directory, as each system has it."""
    monkeypatch.delenv("AOTLAB_PROGRESS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert progress_file.path() == tmp_path / "aotlab" / "progress.json"
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setenv("APPDATA", str(tmp_path / "roaming"))
    assert progress_file.path() == tmp_path / "roaming" / "aotlab" / "progress.json"
