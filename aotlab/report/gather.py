"""Gather the reports of all ranks of a distributed job: through the store of the process group, or in a folder.

Each rank writes its report as compressed JSON. Reading it executes nothing, which pickles would do. The store is used
rather than a collective, because a rank that waits in a collective cannot name the rank that is missing, and because
the collectives of the job must not change.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path

import torch.distributed as dist

from aotlab._torch import store_of_job
from aotlab.report.codec import ReportFormatError
from aotlab.report.mime import whole
from aotlab.report.model import Report
from aotlab.report.ranks import joined

#: The value of ``ranks`` that gathers the reports; any other value is the path of a folder.
GATHER = "gather"
#: The folder in the folder of `Report.record` for the reports of what stock `torch.compile` compiled.
STOCK = "stock"
#: After an error, rank 0 waits only this long for the other ranks, because they may wait for rank 0.
SECONDS_AFTER_ERROR = 5.0

#: The number of the gathering. It is equal on all ranks, because each rank enters the same blocks.
_gatherings = count()


def placed(report: Report, ended: str = "") -> Report:
    """Return ``report`` with the rank of this process, the number of processes, and the error that ended the block.

    A process without `torch.distributed` is rank 0 of one.
    """
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    else:  # torchrun sets these variables, also for a script that has left its process group
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return replace(report, rank=rank, world_size=size, ended=ended)


def exchanged(report: Report) -> Report:
    """Send the report to rank 0; on rank 0, return the report of all ranks.

    Rank 0 waits for the others as long as the timeout of the process group, and the result names the ranks that did not
    send a report. The other ranks do not wait. If there is no process group, the report of this process is returned
    with a note.
    """
    if report.world_size == 1:
        return joined([report], {})
    if (job := store_of_job()) is None:
        note = "the reports of the ranks were not gathered: there is no process group at the end of the block"
        return replace(report, notes=(*report.notes, note))
    store, seconds = job
    name = f"aotlab/report/{next(_gatherings)}"
    if report.rank:
        try:
            store.set(f"{name}/{report.rank}", _text(report))
        except RuntimeError as error:  # rank 0 has ended
            return replace(report, notes=(*report.notes, f"the report was not sent to rank 0: {error}"))
        return report
    patience = SECONDS_AFTER_ERROR if report.ended else seconds
    end = time.monotonic() + patience
    reports, missing = [report], {}
    for rank in range(1, report.world_size):
        try:
            store.wait([f"{name}/{rank}"], timedelta(seconds=max(end - time.monotonic(), 0.1)))
            reports.append(Report.from_json(store.get(f"{name}/{rank}")))
        except ReportFormatError as error:
            missing[rank] = f"sent a report that cannot be read: {error}"
        except RuntimeError:
            missing[rank] = f"sent no report within {patience:.0f} s"
    return joined(reports, missing)


def prepared(folder: Path) -> Path:
    """Create the folder for the reports of all ranks, delete an earlier report of this rank, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    in_group = dist.is_available() and dist.is_initialized()
    # Without a group and torchrun, the rank is not known yet, and the file of another rank must not be deleted.
    if (rank := str(dist.get_rank()) if in_group else os.environ.get("RANK")) is not None:
        (folder / f"rank-{rank}.json").unlink(missing_ok=True)
    return folder.absolute()  # the block may change the folder in which the process works


def written(report: Report, folder: Path) -> Report:
    """Write the report of this rank into ``folder``, and return the report."""
    path = folder / f"rank-{report.rank}.json"
    unfinished = path.with_suffix(".part")
    unfinished.write_text(_text(report), encoding="utf-8")
    unfinished.replace(path)  # a reader never sees half of a report
    return report


def read_all(folder: Path) -> list[Report]:
    """Read what ``aotlab run --ranks FOLDER`` wrote: a report for each engine that compiled something on any rank.

    If no engine compiled anything, the result has one report. If no rank wrote a report, it is empty.

    Raises
    ------
    ReportFormatError
        A file is not a report.
    """
    reports = [each for each in map(_read, (folder, folder / STOCK)) if each is not None]
    return [each for each in reports if each.frames or any(other.frames for other in each.rank_reports)] or reports[:1]


def _read(folder: Path) -> Report | None:
    """Read the reports that the ranks of a job wrote into ``folder``; None if it has no reports."""
    reports = [Report.load(path) for path in folder.glob("rank-*.json")]
    if not reports:
        return None
    # A file of an earlier job with more processes may be in the folder.
    size = max(reports, key=lambda each: each.created).world_size
    present = {each.rank: each for each in reports if each.rank is not None and each.rank < size}
    return joined(present.values(), dict.fromkeys(sorted({*range(size)} - {*present}), "wrote no report"))


def _text(report: Report) -> str:
    return json.dumps(whole(report), separators=(",", ":"))
