"""Read and check the values of the command line."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from aotlab.errors import UsageError


def count(text: str) -> int:
    """Read a count: a whole number from 1."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: pass a whole number from 1")
    return int(text)


def device(text: str) -> str:
    """Read the name of a device: auto, cpu, cuda or cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of auto, cpu, cuda, cuda:N")
    return text


def port(text: str) -> int:
    """Read the number of a port."""
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 65536):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: pass a number from 1 to 65535")
    return int(text)


def jobs(text: str) -> int:
    """Read a number of processes."""
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes")
    return int(text)


def check_writable(path: Path | None) -> None:
    """Raise an error if no file can be written at ``path``."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {folder}")
    if path.is_dir():
        raise UsageError(f"{path} cannot be written: it is a folder; name a file in it")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise UsageError(f"{path} cannot be written: permission denied")


def add_report_files(command: argparse.ArgumentParser) -> None:
    """Add the options for the files of a report."""
    command.add_argument("--json", type=Path, metavar="PATH", help="also write the report as JSON to this file")
    command.add_argument(
        "--html",
        type=Path,
        metavar="PATH",
        default=Path("aotlab-report.html"),
        help="the file for the HTML report (default: ./aotlab-report.html)",
    )


def report_files(options: argparse.Namespace) -> tuple[Path | None, Path]:
    """Return the files for the report as JSON and HTML. A script may change the folder, so the paths are absolute."""
    for path in (options.json, options.html):
        check_writable(path)
    return None if options.json is None else options.json.absolute(), options.html.absolute()
