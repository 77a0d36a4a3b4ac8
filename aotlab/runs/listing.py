"""The table of the stored runs, and the Parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from aotlab.errors import UsageError
from aotlab.report import COLUMNS, Report, ReportFormatError
from aotlab.report.markup import clean
from aotlab.report.tables import table
from aotlab.report.text import duration
from aotlab.runs import saving, store
from aotlab.runs.store import Run

if TYPE_CHECKING:
    import pandas as pd


def listing(words: Iterable[str] = ()) -> pd.DataFrame:
    """Return the table of the runs, the newest first.

    ``words`` chooses the runs whose notebook, code, title, versions, device, backend or verdict contain all of them.
    Raises StoreError if the runs cannot be read.
    """
    import pandas as pd

    saving.finish()
    texts = [(run, " ".join(map(str, asdict(run).values())).lower()) for run in store.runs()]
    chosen = [_row(run) for run, text in texts if all(word.lower() in text for word in words)]
    columns = ["run", "when", "notebook", "cell", "title", "result", "took", "backend", "device", "torch"]
    return pd.DataFrame(chosen, columns=columns).set_index("run")


def _row(run: Run) -> dict[str, object]:
    return {
        "run": run.number,
        "when": _when(run.created),
        "notebook": clean(Path(run.notebook).name),
        "cell": "" if run.execution_count is None else f"[{run.execution_count}]",
        "title": clean(run.title[:60]),
        "result": clean(run.verdict),
        "took": duration(run.duration_ns),
        "backend": clean(run.backend),
        "device": clean(run.device),
        "torch": clean(run.torch),
    }


def _when(created: str) -> str:
    try:
        return f"{datetime.fromisoformat(created):%Y-%m-%d %H:%M}"
    except ValueError:
        return ""


def export(folder: Path) -> list[Path]:
    """Write the runs and the tables of their reports as Parquet files, and return the paths of the files.

    ``runs.parquet`` has one row per run. Each other file has the rows of one table of all reports; the column ``run``
    has the number of the run. A report that cannot be read is left out.

    Raises
    ------
    UsageError
        pyarrow is not installed.
    StoreError
        The runs cannot be read.
    """
    import pandas as pd

    if find_spec("pyarrow") is None:
        raise UsageError("Parquet files need pyarrow: pip install 'aotlab[parquet]'")
    saving.finish()
    stored = store.runs()
    folder.mkdir(parents=True, exist_ok=True)
    tables: dict[str, list[pd.DataFrame]] = {name: [] for name in COLUMNS}
    for run in reversed(stored):
        try:
            report = Report.from_dict(json.loads(store.find(run.number)[1]))
        except (ReportFormatError, ValueError):
            continue
        for name, parts in tables.items():
            rows = table(report, name)
            if len(rows):
                rows.insert(0, "run", run.number)
                parts.append(rows)
    runs = pd.DataFrame([asdict(run) for run in reversed(stored)])
    whole = {"runs": runs, **{name: pd.concat(parts, ignore_index=True) for name, parts in tables.items() if parts}}
    paths = []
    for name, rows in whole.items():
        rows.attrs = {}
        rows.to_parquet(folder / f"{name}.parquet", index=False)
        paths.append(folder / f"{name}.parquet")
    return paths
