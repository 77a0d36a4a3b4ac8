"""Run the fuzzer: start the blocks, save their results, stop after the time limit, and print the table."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from aotlab.errors import UsageError
from aotlab.maintenance.fuzz import corpus
from aotlab.maintenance.fuzz.block import FAILED, Block, Failure, Row
from aotlab.maintenance.fuzz.plan import Plan, engine_revision
from aotlab.maintenance.fuzz.progress import Progress
from aotlab.maintenance.fuzz.state import State
from aotlab.maintenance.fuzz.table import Summary, summarize
from aotlab.maintenance.fuzz.workers import run_here, run_there


class _TimeIsUp(Exception):  # noqa: N818  # a signal from within a block
    """Raised from within a block when the time limit of the run is over."""


def run(
    plan: Plan,
    *,
    save: Path,
    out: TextIO,
    err: TextIO,
    minutes: float | None = None,
    jobs: int = 1,
    shrink: float = 20.0,
    json_path: Path | None = None,
    corpus_file: Path | None = None,
    progress: bool | None = None,
) -> int:
    """Run the unfinished blocks of a plan and print the table.

    Parameters
    ----------
    save
        The folder for the state. Its subfolder ``failures`` gets a cell for each failure.
    out, err
        The streams for the table and for the progress bar.
    minutes
        The run stops after this many minutes. The results of the current block are lost.
    jobs
        The number of worker processes. 0 runs the programs in this process; then a program that crashes torch ends the
        run.
    shrink
        The largest number of seconds for shrinking one failure.
    json_path
        The file for the table as JSON; ``-`` prints the JSON instead of the table.
    corpus_file
        The file that counts the programs of all runs, see `corpus`.
    progress
        Whether the bar is shown; None shows it on a terminal only.

    Returns
    -------
    int
        0 if nothing failed, else 1.

    Raises
    ------
    UsageError
        If ``programs``, ``minutes`` or ``jobs`` is out of range, or if the state file or ``corpus_file`` has contents
        that the fuzzer did not write.
    KeyboardInterrupt
        After Ctrl-C, when the table of the finished blocks has been printed.
    """
    for name, number in (("programs", plan.programs), ("minutes", 1 if minutes is None else minutes)):
        if number <= 0:
            raise UsageError(f"{name} is {number}; it has to be more than 0")
    if jobs < 0:
        raise UsageError(f"jobs is {jobs}; it cannot be less than 0")
    if corpus_file is not None:
        corpus.load(corpus_file)  # if the file is wrong, raise before the run, not at its end
    state = State(save, plan)
    left = [(n, size) for n, size in plan.blocks() if n not in state.blocks or state.blocks[n].size < size]
    sizes = dict(plan.blocks())
    done = sum(size for n, size in sizes.items() if (n, size) not in left)
    bar = Progress(plan.programs, done, err, progress)
    keep = _Keep(save / "failures", state)
    deadline = None if minutes is None else time.monotonic() + minutes * 60

    def ran(row: Row) -> None:
        bar.ran(row.status in FAILED)
        if deadline is not None and time.monotonic() > deadline:
            raise _TimeIsUp

    interrupted = False
    blocks: Iterator[Block]
    if jobs == 0:
        blocks = run_here(plan, left, keep.shrunk, shrink, ran, keep.failed)
    else:
        blocks = run_there(plan, left, keep.shrunk, shrink, ran, keep.failed, jobs)
    try:
        for block in blocks:
            state.add(block)
            if corpus_file is not None and plan.is_whole(block.size):
                corpus.merge(corpus_file, plan, [block])
    except _TimeIsUp:
        pass
    except KeyboardInterrupt:
        interrupted = True
    finally:
        bar.close()
    # The state file may contain more blocks, from an earlier run with the same settings and more programs. Skip these.
    summary = summarize(block for n, block in state.blocks.items() if n in sizes)
    _print(plan, summary, keep.files, bar.rate, out, json_path, corpus_file)
    if interrupted:
        raise KeyboardInterrupt
    return 1 if summary.failures or keep.files else 0


class _Keep:
    """Writes failures to files when they are found, one file for each signature."""

    def __init__(self, folder: Path, state: State) -> None:
        self._folder = folder
        self.files: list[Path] = []
        #: How many failures of each coarse name were shrunk. After `block.SHRUNK` of them, a failure with that name is
        #: only counted, not shrunk.
        self.shrunk = Counter(
            failure.name for block in state.blocks.values() for failure in block.failures if failure.signature
        )

    def failed(self, failure: Failure) -> None:
        """Save a failure if no failure with the same signature has been saved."""
        if failure.cell is None or failure.signature is None:
            return
        self.shrunk[failure.name] += 1
        digest = hashlib.sha256(failure.signature.encode()).hexdigest()[:8]
        file = self._folder / f"{failure.name.partition(':')[0]}-{digest}.py"
        if not file.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            file.write_text(failure.cell, encoding="utf-8")
        if file not in self.files:
            self.files.append(file)


def _print(
    plan: Plan,
    summary: Summary,
    files: list[Path],
    rate: float,
    out: TextIO,
    json_path: Path | None,
    corpus_file: Path | None,
) -> None:
    total = corpus.carried(corpus.load(corpus_file), plan.engine) if corpus_file is not None else None
    if json_path is not None:
        value = {"run": plan.name, **summary.json(), "cells": [str(file) for file in files], "rate": round(rate, 2)}
        if total is not None:
            value["carried"] = {"accepted": total[0], "since a failure": total[1]}
        text = json.dumps(value, indent=1) + "\n"
        if str(json_path) == "-":
            out.write(text)
            return
        json_path.write_text(text, encoding="utf-8")
    how = "torch.compile" if plan.dynamo else "the function itself"
    where = "" if plan.engine == "upstream" else f" in {Path(__file__).parents[2]}"  # which can differ from the cwd
    what = f"{plan.engine} on {how}, seed {plan.key}; engine {engine_revision(plan.engine)}{where}"
    lines = [what, summary.text(), *(f"  saved {file}" for file in files)]
    if total is not None:
        lines.append(carried_text(plan.engine, *total))
    print("\n".join([*lines, f"{rate:.1f} programs per second"]), file=out)


def carried_text(engine: str, accepted: int, clean: int) -> str:
    """Return a line that says how many programs have been accepted in all runs of the corpus."""
    return f"carried: {accepted} programs accepted by {engine}, the last {clean} without a failure"
