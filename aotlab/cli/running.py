"""``aotlab run``: its options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from aotlab.cli.arguments import add_report_files, count, report_files
from aotlab.errors import UsageError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``run`` to the command line."""
    run = commands.add_parser(
        "run",
        allow_abbrev=False,
        usage="aotlab run [--all] [--cell N] [--options TEXT] [--observe] [--no-caches] [--nproc N | --ranks FOLDER] "
        "[--waits] [--json PATH] [--html PATH] FILE ...",
        help="run a script or a notebook, and make a page of what is compiled",
        description="Run a Python script or a notebook, and report what is compiled, as one HTML page. Of a "
        "script, the report has the functions that the script compiles; with --all, aotlab compiles the functions that "
        "it calls. Of a notebook, aotlab compiles each cell. The arguments after FILE are the script's own. The output "
        "and the exit status are the script's; aotlab writes to stderr.",
    )
    run.add_argument(
        "--all", action="store_true", help="compile the script like a cell with %%%%aotcompile, and compare with eager"
    )
    run.add_argument("--cell", type=count, metavar="N", help="compile only the N-th cell with code of the notebook")
    run.add_argument(
        "--options",
        metavar="TEXT",
        help="for --all and notebooks: the options of %%%%aotcompile, for example --options='--backend eager --time'",
    )
    run.add_argument("--observe", action="store_true", help="report only what stock torch.compile compiles")
    run.add_argument(
        "--no-caches", action="store_true", help="with --observe: take no graphs from the caches of earlier runs"
    )
    several = run.add_mutually_exclusive_group()
    several.add_argument(
        "--nproc", type=count, metavar="N", help="run the script in N processes with torchrun, and make one page of all"
    )
    several.add_argument(
        "--ranks",
        type=Path,
        metavar="FOLDER",
        help="write only the report of this process, a rank of a distributed job, into the folder; `aotlab report "
        "FOLDER` makes the page of all ranks",
    )
    run.add_argument(
        "--waits",
        action="store_true",
        help="with --nproc or --ranks: measure with torch's profiler how long each rank waits in collectives",
    )
    add_report_files(run)
    run.add_argument("script", type=Path, metavar="FILE", help="the Python file or the notebook")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    run.set_defaults(command=_run)


def _run(options: argparse.Namespace, _: Sequence[str]) -> int:
    json, html = report_files(options)
    if not options.script.is_file():
        raise UsageError(f"there is no file {options.script}")
    if options.no_caches and not options.observe:
        raise UsageError("--no-caches is about the caches of stock torch.compile: add --observe")
    notebook = options.script.suffix == ".ipynb"
    if options.cell is not None and not notebook:
        raise UsageError("--cell is about notebooks, and this is a script")
    if options.observe and (notebook or options.all):
        raise UsageError("--observe is about the script's own torch.compile: use --options='--engine upstream'")
    if options.options is not None and not (notebook or options.all):
        raise UsageError("--options needs --all or a notebook")
    if (notebook or options.all) and (options.nproc or options.ranks):
        raise UsageError("--nproc and --ranks are for scripts, without --all")
    if options.waits and not (options.nproc or options.ranks):
        raise UsageError("--waits is about several processes: add --nproc or --ranks")
    from aotlab.cli import script

    words = options.script, options.arguments
    settings = {"stock": options.observe, "caches": not options.no_caches, "waits": options.waits}
    if notebook or options.all:
        reports, status = script.run_cells(*words, options.options or "", cell=options.cell)
    elif options.nproc is not None:
        from aotlab.cli import several

        reports, status = several.run(*words, processes=options.nproc, **settings)
    else:
        reports, status = script.run(*words, **settings, ranks=options.ranks)
    if reports:
        script.write(reports, json, html, sys.stderr)  # stdout belongs to the script
    return status
