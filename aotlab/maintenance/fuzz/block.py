"""Run one block of programs and record the result of each program in plain data, for files and for other processes."""

from __future__ import annotations

import gc
import hashlib
import linecache
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from aotlab import config
from aotlab.maintenance.fuzz import cell, failures
from aotlab.maintenance.fuzz.drawing import Drawn, draw_block
from aotlab.maintenance.fuzz.engines import Watch
from aotlab.maintenance.fuzz.plan import Plan
from aotlab.verification.programs import Outcome

#: The result of a program. "accepted": the engine compiled the program for every call. "refused", "eager": the engine
#: refused a call, or ran a call eagerly. "alike": the program raises as in eager, before anything was compiled.
#: "dynamo": all its differences from eager also occur with Dynamo alone, without an engine behind it. "asserts": eager
#: itself fails an internal assertion of torch, so the right result is unknown. "static": the plan compiles for all
#: sizes, and the program was compiled for every call, but no compiled entry ran a call with other sizes than the sizes
#: for which the entry was traced. "wrong", "error" and "raises" are failures, which `failures.kind` explains.
Status = Literal["accepted", "static", "refused", "eager", "alike", "dynamo", "asserts", "wrong", "error", "raises"]

#: The results that are failures.
FAILED = ("wrong", "error", "raises")

#: How many failures of one coarse name (see `failures`) are shrunk. For the other failures with that name, only the
#: block and the index are stored.
SHRUNK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The result of one program.

    Attributes
    ----------
    program
        A hash of the text of the program.
    status
        The result; `Status` explains the values.
    reasons
        The reasons why the program was refused or ran eagerly. If the status is ``"dynamo"`` or ``"asserts"``, the
        coarse name of its differences.
    categories
        The features that the program uses, see `Program.categories`.
    graphs
        Hashes of the compiled graphs.
    served
        The number of calls, the number of compiled entries, and the number of calls that an entry ran although it was
        traced for other sizes.
    """

    program: str
    status: Status
    reasons: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ()
    served: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failing program.

    The program was drawn as number ``index`` of the block ``block``. ``program`` is the hash of its text, and ``name``
    is the coarse name of the failure (see `failures`). If the failure was shrunk, ``signature`` is its fine name, and
    ``cell`` is the text of a notebook cell that shows it.
    """

    block: int
    index: int
    program: str
    name: str
    signature: str | None = None
    cell: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The results of a finished block.

    ``discarded`` counts the programs that were rejected while they were drawn, or that crash eager. ``seconds`` is the
    time that the block took.
    """

    number: int
    size: int
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...] = ()
    discarded: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """The functions that `run_block` calls while it runs a block. If one of them raises, the block ends.

    Attributes
    ----------
    at
        Called when a program starts to run, or starts to be shrunk.
    ran
        Called when a program has been run, with its index, its row and the number of rejected attempts at drawing it.
    failed
        Called when a program has failed and shrinking is finished.
    """

    at: Callable[[Literal["running", "shrinking"], Drawn], object]
    ran: Callable[[int, Row, int], object]
    failed: Callable[[Failure], object]


def run_block(
    plan: Plan,
    number: int,
    indices: Iterable[int],
    *,
    shrunk_before: Mapping[str, int],
    shrink: float,
    listener: Listener,
) -> None:
    """Draw and run the programs of block ``number`` that have the given ``indices``.

    Parameters
    ----------
    shrunk_before
        How many failures of each coarse name the run has shrunk before this block.
    shrink
        The largest number of seconds for shrinking one failure; 0 turns shrinking off.
    listener
        Receives the results.
    """
    shrunk = Counter(shrunk_before)
    with _tidy():
        for drawn in draw_block(plan, number, indices):
            listener.at("running", drawn)
            row, outcome, name = _run(plan, drawn)
            if name is not None:
                signature = text = None
                if outcome is not None and shrunk[name] < SHRUNK:
                    shrunk[name] += 1
                    small = failures.small(drawn.program, outcome.differences)
                    if shrink > 0:
                        listener.at("shrinking", drawn)
                        small = failures.shrink(plan, drawn, name, small, shrink)
                    signature = small.signature
                    text, _ = cell.write(plan, small.program, f"{signature}\n{small.sentence}")
                listener.failed(
                    Failure(
                        block=number,
                        index=drawn.index,
                        program=row.program,
                        name=name,
                        signature=signature,
                        cell=text,
                    )
                )
            listener.ran(drawn.index, row, drawn.discarded)


def program_hash(source: str) -> str:
    """Return a hash of a program's text, by which runs recognize a program that was drawn before."""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def _run(plan: Plan, drawn: Drawn) -> tuple[Row, Outcome | None, str | None]:
    """Run one program; return its row, its outcome, and the coarse name of the failure if it fails."""
    program = program_hash(drawn.program.source)
    name: str | None
    categories = tuple(sorted(drawn.program.categories))
    try:
        outcome, watch = failures.run(plan, drawn.program)
    except Exception as error:  # noqa: BLE001  # the comparison itself failed, which must not end a long run
        name = f"error: comparing raised {type(error).__name__}: {str(error)[:200]}"
        return Row(program=program, status="error", categories=categories), None, name
    name = failures.coarse(outcome.differences) if outcome.status == "failed" else None
    status, reasons = _status(outcome, watch), tuple(sorted(set(outcome.refusals)))
    if status == "eager":
        reasons = (failures.why_eager(plan, drawn.program),)
    if status == "asserts":
        reasons = (failures.coarse(watch.asserts),)
    if status == "dynamo":
        reasons = (failures.coarse(watch.dynamos),)
    graphs = tuple(sorted(watch.graphs()))
    served = (watch.served.calls, watch.served.entries, watch.served.others)
    row = Row(program=program, status=status, reasons=reasons, categories=categories, graphs=graphs, served=served)
    return row, outcome, name


def _status(outcome: Outcome, watch: Watch) -> Status:
    if outcome.status == "failed":
        return failures.kind(outcome.differences)
    if watch.asserts:
        return "asserts"
    if watch.dynamos:
        return "dynamo"
    if outcome.status == "refused":
        return "refused"
    if watch.eager_calls:
        return "eager"
    if not watch.compiled:
        return "alike"
    return "static" if watch.dynamic and not watch.served.others else "accepted"


@contextmanager
def _tidy() -> Iterator[None]:
    """Run refused calls eagerly in the ``with`` block. Afterwards free the memory that the programs used.

    The freed memory is the text of the programs in `linecache`, and objects in reference cycles.
    """
    lines = set(linecache.cache)
    try:
        with config.patch(fallback="eager"):
            yield
    finally:
        for name in set(linecache.cache) - lines:
            if name.startswith("<"):
                del linecache.cache[name]
        gc.collect()
