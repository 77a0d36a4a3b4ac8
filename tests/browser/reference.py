"""Run a notebook's cells in a plain IPython shell and write the reports that they display: no browser, no kernel.

Usage: ``python reference.py NOTEBOOK OUTPUT``. The output maps each cell's index, text cells included, to the tables of
the report that the cell displayed, as that report stood when all cells had run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat

#: The report's tables that the browser tests read.
TABLES = ("inputs", "outputs", "storages", "recompiles", "saved", "graph_breaks", "verification", "time")

Reference = dict[int, dict[str, Any]]


def reference(notebook: Path, output: Path) -> Reference:
    """Run this file in a separate process and return its result."""
    ran = subprocess.run([sys.executable, __file__, notebook, output], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return {int(index): found for index, found in json.loads(output.read_text(encoding="utf-8")).items()}


def main(notebook: Path) -> Reference:
    """Run the notebook's cells in order and collect its reports."""
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell

    from aotlab.notebook.live import find
    from aotlab.report.model import MIME_TYPE, Report
    from tests.browser.drawn import records

    shell = InteractiveShell.instance()
    publisher = CapturingDisplayPublisher()
    shell.display_pub = publisher
    shown: dict[int, list[dict[str, Any]]] = {}
    for index, cell in enumerate(nbformat.read(notebook, as_version=4).cells):
        if cell.cell_type == "code":
            publisher.outputs.clear()
            shell.run_cell(cell.source, store_history=True)
            shown[index] = list(publisher.outputs)

    reports: dict[int, Report] = {}
    for index, displays in shown.items():
        for display in displays:
            if MIME_TYPE in display["data"] and not display.get("update"):
                # What was displayed is the report as it stood then; what its cell defined may have been called since.
                live = find(display["data"][MIME_TYPE]["identifier"])
                assert live is not None
                reports[index] = live.report()
    return {
        index: {
            "verdict": report.verdict,
            "calls": {frame.name: frame.calls.total for frame in report.frames},
            **{name: records(getattr(report, name)) for name in TABLES},
        }
        for index, report in reports.items()
    }


if __name__ == "__main__":
    found = main(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
