"""The reader's progress in one small file: exercises, practice, and the level of practice.

The file is JSON. It is read as data and never executed. It is stored in the user's data directory, or at the path in
the environment variable ``AOTLAB_PROGRESS``. A damaged file is renamed and replaced. JSON of another kind is left as it
is. If the file cannot be written, the reader gets a note and no error.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aotlab.config import data_folder
from aotlab.teach.shown import Shown

#: The hardest level of practice.
HARDEST = 4
#: The entry of an exercise and of a topic of practice before the first try.
_BLANK: dict[str, dict[str, Any]] = {
    "exercises": {"topic": "", "done": False, "tries": 0, "hints": 0},
    "practice": {"level": 1, "asked": 0, "right": 0, "streak": 0},
}


def path() -> Path:
    """Return the path of the progress file."""
    if configured := os.environ.get("AOTLAB_PROGRESS"):
        return Path(configured)
    return data_folder() / "progress.json"


def read() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the stored entries. Ignore entries of the file that do not have the expected form."""
    try:
        data = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        data = {}
    stored: dict[str, dict[str, dict[str, Any]]] = {}
    for part, blank in _BLANK.items():
        entries = data.get(part) if isinstance(data, dict) else None
        stored[part] = {}
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            fits = isinstance(entry, dict) and all(type(entry.get(key)) is type(value) for key, value in blank.items())
            if fits:
                stored[part][name] = {key: entry[key] for key in blank}
    return stored


def change(part: str, name: str, update: Callable[[dict[str, Any]], None]) -> tuple[dict[str, Any], str]:
    """Change one entry, and return it, with a note if the file could not be written."""
    stored = read()  # read again, because another kernel may have changed the file
    entry = stored[part].setdefault(name, dict(_BLANK[part]))
    update(entry)
    return entry, _write(stored)


def entry(part: str, name: str) -> dict[str, Any]:
    """Return the stored entry of one exercise or topic."""
    return read()[part].get(name, dict(_BLANK[part]))


class Progress(Shown):
    """A table of the reader's progress, by topic.

    Parameters
    ----------
    topics
        The names of the exercises of each topic, in order.
    """

    def __init__(self, topics: dict[str, list[str]]) -> None:
        stored = read()
        self.head = ("topic", "done", "exercises", "practice")
        rows = []
        for topic, names in topics.items():
            entries = {name: stored["exercises"].get(name, _BLANK["exercises"]) for name in names}
            marks = [f"{'✓' if each['done'] else '–'}\N{NO-BREAK SPACE}{name}" for name, each in entries.items()]
            trained = stored["practice"].get(topic)
            said = "" if trained is None else "level {level}: {right} of {asked} right".format(**trained)
            done = f"{sum(each['done'] for each in entries.values())} of {len(names)}" if names else ""
            rows.append((topic, done, ", ".join(marks), said))
        self.rows = rows
        self.note = f"Kept in `{path()}`."

    def export(self, to: str | Path) -> Path:
        """Write the progress to another file, and return the path of that file."""
        to = Path(to)
        to.write_text(json.dumps(read(), indent=1) + "\n", encoding="utf-8")
        return to

    def reset(self) -> None:
        """Delete all progress."""
        _write({"exercises": {}, "practice": {}})


def _write(entries: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Write the file completely or not at all. Return a note if it was not written."""
    target = path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _put_aside(target)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False, encoding="utf-8") as file:
            file.write(json.dumps(entries, indent=1) + "\n")
        os.replace(file.name, target)
    except OSError as error:
        return f"Your progress could not be saved: {error}."
    return ""


def _put_aside(target: Path) -> None:
    """Rename the file if it is not valid JSON, so that `_write` does not destroy it.

    Raises
    ------
    FileExistsError
        If the file is valid JSON and not a progress file. Then it belongs to another program.
    """
    try:
        data = json.loads(target.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except ValueError:
        with suppress(OSError):
            os.replace(target, target.with_suffix(".damaged"))
    else:
        if not (isinstance(data, dict) and all(part in _BLANK and isinstance(data[part], dict) for part in data)):
            raise FileExistsError(f"`{target}` is not a progress file; set AOTLAB_PROGRESS to another path")
