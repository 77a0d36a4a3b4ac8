"""``aotlab runs``: list, show, compare, export and delete the stored runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aotlab.cli.arguments import check_writable, count

if TYPE_CHECKING:
    from aotlab.report import Report


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``runs`` to the command line."""
    runs = commands.add_parser(
        "runs",
        allow_abbrev=False,
        help="list, show and compare the stored reports of earlier cells and scripts",
        description="List the stored runs, the newest first. aotlab stores the reports of %%aotcompile and of `aotlab "
        "run` in one file in your data directory: the newest 500 runs, at most 256 MB. AOTLAB_RUNS=FILE stores them in "
        "another file, and AOTLAB_RUNS=off stores nothing.",
    )
    runs.set_defaults(command=_list, words=[])
    actions = runs.add_subparsers(title="actions", metavar="ACTION")
    find = actions.add_parser("list", help="list the runs", description="List the runs that contain all words.")
    find.add_argument(
        "words", nargs="*", metavar="WORD", help="a word of the notebook, code, title, result or versions"
    )
    find.set_defaults(command=_list)
    show = actions.add_parser("show", help="print the report of a run", description="Print the report of a run.")
    show.add_argument("run", type=count, nargs="?", metavar="N", help="the number of the run (default: the newest)")
    show.set_defaults(command=_show)
    diff = actions.add_parser("diff", help="compare two runs", description="Print the differences between two runs.")
    diff.add_argument(
        "before", type=count, nargs="?", metavar="A", help="the earlier run (default: the newest but one)"
    )
    diff.add_argument("after", type=count, nargs="?", metavar="B", help="the later run (default: the newest)")
    diff.set_defaults(command=_diff)
    for each in (show, diff):
        each.add_argument("--json", type=Path, metavar="PATH", help="also write the report as JSON to this file")
        each.add_argument("--html", type=Path, metavar="PATH", help="also write the page to this file")
    export = actions.add_parser(
        "export",
        help="write all runs as Parquet files",
        description="Write runs.parquet, and one file with the rows of all runs for each table of the reports.",
    )
    export.add_argument("folder", type=Path, metavar="FOLDER", help="the folder for the files")
    export.set_defaults(command=_export)
    clear = actions.add_parser("clear", help="delete all stored runs", description="Delete all stored runs.")
    clear.set_defaults(command=_clear)


def _list(options: argparse.Namespace, _: Sequence[str]) -> int:
    from aotlab.runs.listing import listing
    from aotlab.runs.store import path

    rows = listing(options.words)
    nothing = "no stored run contains these words" if options.words else f"there are no stored runs in {path()}"
    print(rows.to_string() if len(rows) else nothing)
    return 0


def _show(options: argparse.Namespace, _: Sequence[str]) -> int:
    _check(options)
    from aotlab.runs.saving import load

    return _write(load(options.run)[1], options)


def _diff(options: argparse.Namespace, _: Sequence[str]) -> int:
    _check(options)
    from aotlab.runs.saving import difference

    return _write(difference(options.before, options.after), options)


def _check(options: argparse.Namespace) -> None:
    check_writable(options.json)
    check_writable(options.html)


def _write(report: Report, options: argparse.Namespace) -> int:
    print(report)
    if options.json is not None:
        print(f"JSON: {report.save(options.json)}")
    if options.html is not None:
        print(f"HTML: {report.to_html(options.html)}")
    return 0


def _export(options: argparse.Namespace, _: Sequence[str]) -> int:
    from aotlab.runs.listing import export

    paths = export(options.folder)
    print(f"{len(paths)} files in {options.folder}")
    return 0


def _clear(_options: argparse.Namespace, _: Sequence[str]) -> int:
    from aotlab.runs.store import clear

    print(f"{clear()} stored runs are deleted")
    return 0
