"""What was done, in one small file of the user's: exercises, practice, and the level that practice is at.

The file is JSON, read as data and never executed. It lies in the user's data directory, or where the environment
variable ``AOTLAB_PROGRESS`` says. A damaged file is put aside; one that cannot be written costs no more than a note.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from aotlab.teach.shown import Shown

#: The hardest level of practice.
HARDEST = 4
#: What is kept of an exercise and of a topic of practice, as it is before the first try.
_KEPT: dict[str, dict[str, Any]] = {
    "exercises": {"topic": "", "done": False, "tries": 0, "hints": 0},
    "practice": {"level": 1, "asked": 0, "right": 0, "streak": 0},
}


def path() -> Path:
    """Return where the progress is kept."""
    if given := os.environ.get("AOTLAB_PROGRESS"):
        return Path(given)
    if sys.platform == "win32":
        home = Path(os.environ.get("APPDATA") or Path.home())
    elif sys.platform == "darwin":
        home = Path.home() / "Library" / "Application Support"
    else:
        home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return home / "aotlab" / "progress.json"


def read() -> dict[str, dict[str, dict[str, Any]]]:
    """Return what is kept; of a file that holds something else, what fits."""
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = {}
    kept: dict[str, dict[str, dict[str, Any]]] = {}
    for part, blank in _KEPT.items():
        entries = found.get(part) if isinstance(found, dict) else None
        kept[part] = {}
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            fits = isinstance(entry, dict) and all(type(entry.get(key)) is type(value) for key, value in blank.items())
            if fits:
                kept[part][name] = {key: entry[key] for key in blank}
    return kept


def change(part: str, name: str, update: Callable[[dict[str, Any]], None]) -> tuple[dict[str, Any], str]:
    """Change one entry, and return it, with a note if it could not be kept."""
    kept = read()  # anew, since another kernel may have written
    entry = kept[part].setdefault(name, dict(_KEPT[part]))
    update(entry)
    return entry, _write(kept)


def entry(part: str, name: str) -> dict[str, Any]:
    """Return what is kept of one exercise or topic."""
    return read()[part].get(name, dict(_KEPT[part]))


class Progress(Shown):
    """A map of what was done, topic by topic.

    Parameters
    ----------
    topics
        The names of the exercises of each topic, in order.
    """

    def __init__(self, topics: dict[str, list[str]]) -> None:
        kept = read()
        self.head = ("topic", "done", "exercises", "practice")
        rows = []
        for topic, names in topics.items():
            entries = {name: kept["exercises"].get(name, _KEPT["exercises"]) for name in names}
            marks = [f"{'✓' if each['done'] else '–'}\N{NO-BREAK SPACE}{name}" for name, each in entries.items()]
            trained = kept["practice"].get(topic)
            said = "" if trained is None else "level {level}: {right} of {asked} right".format(**trained)
            done = f"{sum(each['done'] for each in entries.values())} of {len(names)}" if names else ""
            rows.append((topic, done, ", ".join(marks), said))
        self.rows = rows
        self.note = f"Kept in `{path()}`."

    def export(self, to: str | Path) -> Path:
        """Write what is kept to a file of your own, and return its path."""
        to = Path(to)
        to.write_text(json.dumps(read(), indent=1) + "\n", encoding="utf-8")
        return to

    def reset(self) -> None:
        """Forget everything that was done."""
        _write({"exercises": {}, "practice": {}})


def _write(kept: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Write the file whole or not at all; return a note if it was not."""
    target = path()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _put_aside(target)
        with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False, encoding="utf-8") as file:
            file.write(json.dumps(kept, indent=1) + "\n")
        os.replace(file.name, target)
    except OSError as error:
        return f"Your progress could not be kept: {error}."
    return ""


def _put_aside(target: Path) -> None:
    """Keep a file that is not ours, or damaged, under another name."""
    try:
        json.loads(target.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except ValueError:
        with suppress(OSError):
            os.replace(target, target.with_suffix(".damaged"))
