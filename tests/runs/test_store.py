"""The file with the stored runs: several processes, damage, limits, hostile contents, and the switch."""

from __future__ import annotations

import json
import multiprocessing
import os
import sqlite3
import subprocess
import sys
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from aotlab import config
from aotlab.report import Report, ReportFormatError
from aotlab.report.model import Environment
from aotlab.runs import listing, saving, store
from aotlab.runs.store import Run, StoreError

ENVIRONMENT = Environment(aotlab="1", torch="2", python="3", platform="x")
REPORT = Report(identifier="one", created="2026-01-02T03:04:05+00:00", environment=ENVIRONMENT)
FORK = multiprocessing.get_context("fork")


def run(**facts: Any) -> Run:
    """Make the facts of a run."""
    texts = dict.fromkeys(
        ("created", "notebook", "cell", "title", "code", "verdict", "aotlab", "torch", "python", "device", "backend"),
        "",
    )
    return Run(**{**texts, "number": 0, "execution_count": None, "duration_ns": 5, "nbytes": 10, **facts})


def titles() -> list[str]:
    """Return the titles of the stored runs, the newest first."""
    return [each.title for each in store.runs()]


def _save_many(process: int, count: int) -> None:
    for number in range(count):
        store.save(f"{process} {number}", run(title=f"{process} {number}"), "{}")


def test_several_processes_write_at_once() -> None:
    """Every run of every process is stored once, with its own number, also if the file did not exist before."""
    processes = [FORK.Process(target=_save_many, args=(process, 12)) for process in range(4)]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    assert [each.exitcode for each in processes] == [0] * 4
    assert sorted(titles()) == sorted(f"{process} {number}" for process in range(4) for number in range(12))
    assert sorted(each.number for each in store.runs()) == list(range(1, 49))


def test_a_killed_process_damages_nothing(recwarn: pytest.WarningsRecorder) -> None:
    """After a kill at any moment, the runs that were stored before are there, and others can be stored."""
    for attempt in range(5):
        before = titles()
        writer = FORK.Process(target=_save_many, args=(attempt, 1000))
        writer.start()
        time.sleep(0.01 + 0.03 * attempt)
        writer.kill()
        writer.join()
        assert titles()[-len(before) :] == before or not before
    store.save("last", run(title="last"), "{}")
    assert titles()[0] == "last"
    assert [str(each.message) for each in recwarn] == []


@pytest.mark.parametrize("damage", ["text", "truncated", "overwritten", "no table"])
def test_a_damaged_file_is_set_aside(file: Path, damage: str) -> None:
    """One warning names the file with the old contents; the new file works."""
    _save_many(1, 60)
    content = file.read_bytes()
    if damage == "no table":
        with closing(sqlite3.connect(file)) as db:
            db.execute("DROP TABLE runs")
    else:
        forms = {
            "text": b"these are no runs\n" * 100,
            "truncated": content[: len(content) // 2],
            "overwritten": content[:4096] + b"\xff" * (len(content) - 4096),
        }
        file.write_bytes(forms[damage])
    broken = file.read_bytes()
    with pytest.warns(RuntimeWarning, match="a new store begins") as warned:
        store.save("new", run(title="new"), "{}")
    assert titles() == ["new"]
    (aside,) = file.parent.glob("runs-damaged-*.sqlite")
    assert aside.read_bytes() == broken
    assert str(aside) in str(warned[0].message)


def test_a_file_of_another_program_is_left_alone(file: Path) -> None:
    """Nor is a file of a newer aotlab changed. The error says what to do."""
    file.parent.mkdir()
    with closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE cookies (name)")
    before = file.read_bytes()
    with pytest.raises(StoreError, match="belongs to another program; set AOTLAB_RUNS"):
        store.runs()
    assert before == file.read_bytes()
    file.unlink()
    _save_many(1, 1)
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA user_version = 2")
    with pytest.raises(StoreError, match="another version of aotlab"):
        store.save("x", run(), "{}")


def test_the_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest runs go first: if there are too many, and if they are too large together."""
    monkeypatch.setattr(store, "MOST_RUNS", 3)
    for number in range(5):
        store.save(f"{number}", run(title=f"{number}", nbytes=100), "{}")
    assert titles() == ["4", "3", "2"]
    monkeypatch.setattr(store, "MOST_BYTES", 250)
    store.save("5", run(title="5", nbytes=100), "{}")
    assert titles() == ["5", "4"]
    monkeypatch.setattr(store, "MOST_OF_ONE", 10)
    with pytest.raises(StoreError, match="a stored report has at most"):
        store.save("6", run(), "x" * 11)
    assert store.clear() == 2
    assert titles() == []
    store.save("7", run(), "{}")
    assert store.runs()[0].number == 7  # numbers are not used again


def test_a_run_is_replaced_by_its_later_report() -> None:
    """A report that grows, as of a cell with functions, keeps its number; a later run of the cell is another run."""
    saving.keep(REPORT, notebook="/a/b.ipynb")
    saving.keep(Report(identifier="one", created=REPORT.created, name="later", environment=ENVIRONMENT))
    saving.keep(Report(identifier="one", created="2026-01-02T03:04:06+00:00", environment=ENVIRONMENT))
    saving.finish()
    assert [(each.number, each.title, each.torch) for each in store.runs()] == [(2, "", "2"), (1, "later", "2")]
    number, report = saving.load(1)
    assert (number.number, report.name, report.identifier) == (1, "later", "run-1-one")
    with pytest.raises(StoreError, match="there is no stored run 3"):
        saving.load(3)


def test_hostile_contents(file: Path) -> None:
    """A row of wrong types is left out, a damaged report is an error, and the table escapes texts."""
    for number, title in enumerate(("<script>alert(1)</script>", "\x1b[31mred", "plain")):
        store.save(f"{number}", run(title=title), json.dumps({"version": 1, "environment": "cos\nsystem\n(S'id'\ntR."}))
    with closing(sqlite3.connect(file)) as db:
        db.execute("UPDATE runs SET duration_ns = 'soon' WHERE number = 3")
        db.commit()
    assert titles() == ["\x1b[31mred", "<script>alert(1)</script>"]
    table = listing.listing()
    assert "<script>" not in table._repr_html_()  # type: ignore[operator]
    assert "\x1b" not in table.to_string()
    with pytest.raises(ReportFormatError, match="damaged"):
        saving.load(1)
    with pytest.raises(StoreError, match="no stored run 3"):
        saving.load(3)


def test_the_switch(file: Path) -> None:
    """`config.save_runs` and AOTLAB_RUNS=off store nothing."""
    with config.patch(save_runs=False):
        saving.keep(REPORT)
    saving.finish()
    assert not file.exists()
    program = "from aotlab import config; print(config.save_runs)"
    for value, expected in (("off", "False"), (str(file), "True")):
        environment = {**os.environ, "AOTLAB_RUNS": value}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.stdout.strip() == expected


def test_a_store_that_cannot_be_written(file: Path) -> None:
    """Each problem gives one warning, and no error."""
    file.parent.write_text("in the way")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            saving.keep(REPORT)
        saving.finish()
    assert ["this run was not stored" in str(each.message) for each in warned] == [True]


def test_runs_are_found_by_words() -> None:
    """All words must be in the facts or in the code."""
    store.save("a", run(notebook="/x/Train.ipynb", code="loss.backward()", torch="2.13"), "{}")
    store.save("b", run(notebook="/x/other.ipynb", code="y = 1", torch="2.13", execution_count=4), "{}")
    assert listing.listing(["train", "BACKWARD"]).index.tolist() == [1]
    assert listing.listing(["2.13"])[["notebook", "cell"]].values.tolist() == [
        ["other.ipynb", "[4]"],
        ["Train.ipynb", ""],
    ]
    assert len(listing.listing(["nowhere"])) == 0
