"""``aotlab run --nproc``: run a script in several processes with torchrun, and report the compilations of all ranks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from aotlab.report import Report
from aotlab.report.gather import read_all
from aotlab.runs import saving


def run(
    script: Path, arguments: Sequence[str], *, processes: int, stock: bool, caches: bool, waits: bool = False
) -> tuple[list[Report], int]:
    """Run a script as ``torchrun --standalone --nproc-per-node PROCESSES SCRIPT ARGUMENTS`` does.

    Each process runs ``aotlab run --ranks FOLDER`` and writes its reports into a temporary folder. The other
    parameters and the result are as in `aotlab.cli.script.run`. The exit status is the status of the first process that
    failed; stderr names its rank. There are no reports if all processes were killed.
    """
    with TemporaryDirectory(prefix="aotlab-ranks-") as folder:
        chosen = {"--observe": stock, "--no-caches": not caches, "--waits": waits}
        options = ["--ranks", folder, *[option for option, is_on in chosen.items() if is_on]]
        job = ["--standalone", f"--nproc-per-node={processes}", "-m", "aotlab", "run", *options]
        status = _status([*job, str(script), *arguments])
        reports = read_all(Path(folder))
    for report in reports:
        saving.keep(report, notebook=str(script.resolve()))
    return reports, status


def _status(words: Sequence[str]) -> int:
    """Run torchrun with these arguments, and return the exit status."""
    try:
        torchrun.run(torchrun.parse_args(words))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        print(f"aotlab: rank {rank} {ended}, and torchrun ended the other processes", file=sys.stderr)
        return 128 - code if code < 0 else code
    except SignalException as error:  # ctrl-C, or a signal to this process
        return 128 + error.sigval.value
    return 0
