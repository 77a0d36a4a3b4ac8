"""The file with the stored runs.

The store is one SQLite file, ``runs.sqlite`` in the user's data directory. The environment variable ``AOTLAB_RUNS``
names another file. A row has the facts by which a run is found again, and the run's compressed report. Reading a report
executes nothing that is in the file.

Several processes may use the file at once: each transaction waits for the others. The file has no write-ahead log,
because such a log does not work on the network drives that have many users' home directories. The store keeps the
newest `MOST_RUNS` runs, and at most `MOST_BYTES` of reports. A damaged file is renamed, and a new one begins.
"""

from __future__ import annotations

import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TypeVar

from aotlab.config import data_folder
from aotlab.errors import AotlabError
from aotlab.report import ReportFormatError
from aotlab.report.codec import decode

#: The store keeps at most this many runs, and at most this many bytes of compressed reports.
MOST_RUNS, MOST_BYTES = 500, 256 << 20
#: A report with more bytes is not stored.
MOST_OF_ONE = MOST_BYTES // 8

#: SQLite keeps these two numbers in the file's head: they say which program and which version wrote the file.
_APPLICATION, _VERSION = 0x616F746C, 1
#: How many seconds a process waits for the transactions of others.
_PATIENCE = 20.0
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_TYPES = {"int": "INTEGER NOT NULL", "str": "TEXT NOT NULL", "int | None": "INTEGER"}

T = TypeVar("T")


class StoreError(AotlabError, OSError):
    """The stored runs cannot be read or written, or there is no such run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The facts about one stored run.

    Attributes
    ----------
    number
        The number by which the commands name the run. Numbers are not used again.
    created
        When the run began, as ISO 8601 with the offset from UTC.
    notebook
        The path of the notebook or script; empty if it is unknown.
    cell, execution_count
        The notebook's id of the cell, and the number in ``In [n]``.
    title
        The report's title, or else the first line of the code.
    code
        The code of the cell or script.
    verdict
        The verdict in a few words.
    duration_ns
        How long the run took.
    aotlab, torch, python
        The versions.
    device, backend
        The devices and the backends of the graphs, separated by commas.
    nbytes
        The size of the stored report.
    """

    number: int
    created: str
    notebook: str
    cell: str
    execution_count: int | None
    title: str
    code: str
    verdict: str
    duration_ns: int
    aotlab: str
    torch: str
    python: str
    device: str
    backend: str
    nbytes: int


_COLUMNS = [field.name for field in fields(Run)]


def path() -> Path:
    """Return the path of the store."""
    configured = os.environ.get("AOTLAB_RUNS", "")
    return Path(configured) if configured and configured.lower() != "off" else data_folder() / "runs.sqlite"


def save(key: str, run: Run, report: str) -> None:
    """Store a run and its report, and delete the oldest runs if there are too many.

    Parameters
    ----------
    key
        The name of the run. A stored run with the same name is replaced, and keeps its number.
    run
        The facts. ``number`` is ignored.
    report
        The JSON of the compressed report.

    Raises
    ------
    StoreError
        The run cannot be stored.
    """
    if len(report) > MOST_OF_ONE:
        raise StoreError(f"the report has {len(report) >> 20} MB; a stored report has at most {MOST_OF_ONE >> 20} MB")
    values = {**asdict(run), "key": key, "report": report}
    del values["number"]
    names, marks = ", ".join(values), ", ".join(f":{name}" for name in values)

    def write(db: sqlite3.Connection) -> None:
        if not db.execute(f"UPDATE runs SET ({names}) = ({marks}) WHERE key = :key", values).rowcount:
            db.execute(f"INSERT INTO runs ({names}) VALUES ({marks})", values)
        db.execute(
            "DELETE FROM runs WHERE number IN (SELECT number FROM (SELECT number, row_number() OVER newest AS place, "
            "sum(nbytes) OVER newest AS total FROM runs WINDOW newest AS (ORDER BY number DESC)) "
            "WHERE place > ? OR total > ?)",
            (MOST_RUNS, MOST_BYTES),
        )

    _transaction(write)


def runs() -> list[Run]:
    """Return all runs, the newest first. Raises StoreError if they cannot be read."""
    if not path().exists():
        return []
    select = f"SELECT {', '.join(_COLUMNS)} FROM runs ORDER BY number DESC"
    return list(_readable(_transaction(lambda db: db.execute(select).fetchall())))


def find(number: int) -> tuple[Run, str]:
    """Return a run and the JSON of its report. Raises StoreError if there is no such run."""
    select = f"SELECT {', '.join(_COLUMNS)}, report FROM runs WHERE number = ?"
    rows = _transaction(lambda db: db.execute(select, (number,)).fetchall()) if path().exists() else []
    for run in _readable(rows):
        if isinstance(text := rows[0][-1], str):
            return run, text
    raise StoreError(f"there is no stored run {number}")


def clear() -> int:
    """Delete all runs, and return their number. Raises StoreError if they cannot be deleted."""
    if not path().exists():
        return 0
    deleted = _transaction(lambda db: db.execute("DELETE FROM runs").rowcount)
    with suppress(sqlite3.Error), closing(_connect()) as db:
        db.execute("VACUUM")
    return deleted


def _readable(rows: Iterable[tuple[object, ...]]) -> Iterable[Run]:
    """Yield the rows as records. A row that another program damaged is left out."""
    for row in rows:
        with suppress(ReportFormatError):
            yield decode(Run, dict(zip(_COLUMNS, row, strict=False)))


def _transaction(work: Callable[[sqlite3.Connection], T]) -> T:
    """Call ``work`` in one transaction, and return its result. If the file is damaged, try again with a new file."""
    for attempt in range(3):
        before = _identity()
        try:
            with closing(_connect()) as db:
                # Even a reader takes the writers' lock, so that no other process sees a file without tables.
                db.execute("BEGIN IMMEDIATE")
                _create(db)
                result = work(db)
                db.execute("COMMIT")
                return result
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, StoreError):
                raise
            damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGED
            if attempt == 2 or not damaged:
                raise StoreError(f"the stored runs in `{path()}` cannot be read or written: {error}") from None
            _set_aside(before, error)
    raise AssertionError("the last attempt has returned or raised")


def _connect() -> sqlite3.Connection:
    path().parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(path(), timeout=_PATIENCE, isolation_level=None)
    db.execute("PRAGMA trusted_schema = OFF")
    return db


def _create(db: sqlite3.Connection) -> None:
    """Create the table in a new file. Raises StoreError if the file belongs to another program or version."""
    application, version = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    empty = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if (application, version) == (0, 0) and empty:
        columns = [f"{field.name} {_TYPES[str(field.type)]}" for field in fields(Run) if field.name != "number"]
        db.execute(
            "CREATE TABLE runs (number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, "
            f"{', '.join(columns)}, report TEXT NOT NULL)"
        )
        db.execute(f"PRAGMA application_id = {_APPLICATION}")
        db.execute(f"PRAGMA user_version = {_VERSION}")
    elif application != _APPLICATION:
        raise StoreError(f"`{path()}` belongs to another program; set AOTLAB_RUNS to another path")
    elif version != _VERSION:
        raise StoreError(f"`{path()}` was written by another version of aotlab; set AOTLAB_RUNS to another path")


def _identity() -> int | None:
    """Return a number that differs for another file at the same path; None if there is no file."""
    with suppress(OSError):
        return path().stat().st_ino
    return None


def _set_aside(identity: int | None, error: Exception) -> None:
    """Rename the damaged file and warn, unless another process has done so."""
    target = path().with_name(f"{path().stem}-damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.sqlite")
    if identity is None or identity != _identity():
        return
    with suppress(FileNotFoundError):
        # SQLite would apply the journal of the damaged file to the new file.
        os.replace(f"{path()}-journal", f"{target}-journal")
    with suppress(FileNotFoundError):
        os.replace(path(), target)
    warnings.warn(
        f"aotlab: the stored runs cannot be read ({error}). The file is now `{target}`, and a new store begins.",
        RuntimeWarning,
        stacklevel=2,
    )
