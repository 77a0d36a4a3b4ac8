"""Implement ``aotlab verify ops``: run all variants or some of them, print the table, and write the results as JSON.

Some samples make a kernel crash or run forever. So variants run in worker processes. If a worker dies or exceeds its
time, the table names its variant, the campaign replaces the worker, and the other variants go on. Ctrl-C ends the
workers and prints the results so far.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TextIO

import torch

from aotlab import __version__
from aotlab.errors import UsageError
from aotlab.maintenance.op_database.engines import BehindDynamo, Direct, Engine
from aotlab.maintenance.op_database.errors import error_variants, judge_errors
from aotlab.maintenance.op_database.outcome import Outcome, Result, judge_variant
from aotlab.maintenance.op_database.sample import SAMPLE
from aotlab.maintenance.op_database.variants import CASES, variants

#: How many seconds one variant may take. After ``SECONDS``, no further call of the variant starts. After
#: ``HARD_SECONDS``, the worker is killed and the variant counts as out of time.
SECONDS, HARD_SECONDS = 20.0, 120.0

#: With ``--sample`` and ``--errors``, only every twelfth operator runs.
STEP = 12

#: A worker is replaced after this many variants, because torch keeps some memory for each variant.
_SHIFT = 400


def run(
    *,
    sample: bool,
    only: Sequence[str],
    thorough: bool,
    jobs: int,
    json_path: Path | None,
    out: TextIO,
    dynamo: bool = False,
    sizes: bool = False,
    errors: bool = False,
) -> int:
    """Run the chosen variants, print the table and return the exit status: 1 if a variant differs or crashes, else 0.

    Parameters
    ----------
    sample
        Run only the variants that the test suite runs.
    only
        Names of entries (``"add"``, ``"nn.Linear"``) or of single variants (``"add in-place float32"``).
    thorough
        Take all samples of a variant, without a time limit.
    jobs
        The number of worker processes.
    json_path
        The file for the results as JSON.
    dynamo
        Run aotlab behind ``torch.compile``.
    sizes
        Compile each call with ``dynamic=True``: for all sizes of its arguments, not only for the sizes in the sample.
    errors
        Instead of the variants, run calls for which eager raises, operator by operator.

    Raises
    ------
    UsageError
        If a name in ``only`` is not in the databases, if a package that the databases need is missing, or if more than
        one of ``dynamo``, ``sizes`` and ``errors`` is given.
    """
    if dynamo + sizes + errors > 1:
        raise UsageError("dynamo, sizes and errors exclude each other; give at most one of these options")
    names = _chosen(sample, only, errors)
    started = time.perf_counter()
    results: dict[str, Result] = {}
    interrupted = False
    manner = Manner(thorough=thorough, make=BehindDynamo if dynamo else partial(Direct, dynamic=sizes))
    print(f"{len(names)} variants, {jobs} worker{'s' if jobs > 1 else ''}, torch {torch.__version__}", file=out)
    try:
        for result in _results(names, manner, jobs):
            results[result.name] = result
            _progress(results, len(names), started, result.name, out)
    except KeyboardInterrupt:
        interrupted = True
    ordered = [results[name] for name in names if name in results]
    _clear(out)
    print(table(ordered), file=out)
    if errors:
        calls = sum(result.cases for result in ordered)
        print(f"{calls} calls, of which eager refuses {calls - sum(result.compiled for result in ordered)}", file=out)
    print(f"{len(ordered)} of {len(names)} variants in {time.perf_counter() - started:.0f} s", file=out)
    if json_path is not None:
        json_path.write_text(as_json(ordered, complete=not interrupted))
    if interrupted:
        raise KeyboardInterrupt
    return 1 if any(result.outcome.is_wrong for result in ordered) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """The settings with which the workers run each variant.

    ``thorough`` takes all samples without a time limit. ``make`` makes the engine that is compared with eager.
    """

    thorough: bool = False
    make: Callable[[], Engine] = Direct


def _chosen(sample: bool, only: Sequence[str], errors: bool) -> list[str]:
    every = error_variants() if errors else variants()
    names = [variant.name for variant in every]
    if sample and errors:
        names = names[::STEP]
    elif sample:
        there = set(names)
        names = [name for name in SAMPLE if name in there]
    if only:
        unknown = set(only) - {variant.entry for variant in every} - {variant.name for variant in every}
        if unknown:
            raise UsageError(f"torch {torch.__version__} has no operator, module or variant {sorted(unknown)[0]!r}")
        wanted = {variant.name for variant in every if variant.entry in only or variant.name in only}
        names = [name for name in names if name in wanted]
    return names


def table(results: Sequence[Result]) -> str:
    """Return the table as text: how many variants have each outcome, and a line for each variant that is not equal."""
    lines = []
    for outcome in Outcome:
        count = sum(result.outcome is outcome for result in results)
        if count:
            lines.append(f"{count:6}  {outcome.value}")
    for outcome in Outcome:
        those = [result for result in results if result.outcome is outcome]
        if outcome is Outcome.EQUAL or not those:
            continue
        lines += ["", f"{outcome.value}:"]
        lines += [f"  {result.name}: {result.reason}" for result in those]
    return "\n".join(lines)


def as_json(results: Sequence[Result], *, complete: bool) -> str:
    """Return the results as JSON, with the versions of aotlab, torch and Python."""
    rows = [
        {
            "name": result.name,
            "outcome": result.outcome.name.lower(),
            "reason": result.reason,
            "cases": result.cases,
            "compiled": result.compiled,
            "seconds": result.seconds,
        }
        for result in results
    ]
    page = {
        "aotlab": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "complete": complete,
        "variants": rows,
    }
    return json.dumps(page, indent=1) + "\n"


def _progress(results: dict[str, Result], total: int, started: float, name: str, out: TextIO) -> None:
    if not out.isatty():
        return
    done = len(results)
    left = (time.perf_counter() - started) / done * (total - done)
    wrong = sum(result.outcome.is_wrong for result in results.values())
    text = f"{done}/{total}, about {left:.0f} s left, {wrong} wrong; {name}"
    print(f"\r\x1b[K{text[: os.get_terminal_size(out.fileno()).columns - 1]}", end="", file=out, flush=True)


def _clear(out: TextIO) -> None:
    if out.isatty():
        print("\r\x1b[K", end="", file=out)


@dataclass(slots=True, kw_only=True)
class _Worker:
    """A worker process and the main process's end of its pipe.

    ``name`` is the name of its current variant, ``since`` the time at which that variant started, and ``done`` the
    number of variants that the worker has finished.
    """

    process: Any
    connection: Connection
    name: str | None = None
    since: float = 0.0
    done: int = 0

    @classmethod
    def start(cls, manner: Manner) -> _Worker:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, manner), daemon=True)
        process.start()
        theirs.close()
        return cls(process=process, connection=ours)

    def give(self, name: str) -> None:
        self.name, self.since = name, time.perf_counter()
        self.connection.send(name)

    def end(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join()


def _results(names: Sequence[str], manner: Manner, jobs: int) -> Iterator[Result]:
    """Run the variants in ``jobs`` worker processes and yield each result when its variant is finished."""
    waiting = list(reversed(names))
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(_Worker.start(manner))
                workers[-1].give(waiting.pop())
            hard = None if manner.thorough else HARD_SECONDS
            ready = wait([worker.connection for worker in workers], timeout=1.0)
            for worker in list(workers):
                assert worker.name is not None
                result = None
                if worker.connection in ready:
                    try:
                        result = worker.connection.recv()
                    except (EOFError, ConnectionError):
                        worker.process.join()
                        result = _lost(worker, Outcome.CRASHED, f"the process ended with {worker.process.exitcode}")
                elif hard is not None and time.perf_counter() - worker.since > hard + _START * (worker.done == 0):
                    result = _lost(worker, Outcome.OUT_OF_TIME, f"it ran for more than {hard:.0f} s")
                if result is None:
                    continue
                worker.done += 1
                lost = result.outcome in (Outcome.CRASHED, Outcome.OUT_OF_TIME)
                if lost or worker.done >= _SHIFT or not waiting:
                    worker.end()
                    workers.remove(worker)
                else:
                    worker.give(waiting.pop())
                yield result
    finally:
        for worker in workers:
            worker.end()


#: The seconds that a new worker may take to import torch and its databases. They are added to ``HARD_SECONDS``.
_START = 300.0


def _lost(worker: _Worker, outcome: Outcome, reason: str) -> Result:
    assert worker.name is not None
    seconds = round(time.perf_counter() - worker.since, 3)
    return Result(name=worker.name, outcome=outcome, reason=reason, cases=0, compiled=0, seconds=seconds)


def _work(connection: Connection, manner: Manner) -> None:
    """Run as a worker process: receive names of variants and send their results, until the pipe closes."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # a few samples print
    logging.disable(logging.CRITICAL)  # Dynamo logs each call that fails on fake tensors
    torch.set_num_threads(1)
    by_name = {variant.name: variant for variant in (*variants(), *error_variants())}
    limits: dict[str, Any] = {} if manner.thorough else {"seconds": SECONDS}
    try:
        while True:
            variant = by_name[connection.recv()]
            if variant.form == "errors":
                connection.send(judge_errors(variant, **limits))
            else:
                limit = None if manner.thorough else CASES
                connection.send(judge_variant(variant, limit=limit, make=manner.make, **limits))
    except (EOFError, KeyboardInterrupt):
        return
