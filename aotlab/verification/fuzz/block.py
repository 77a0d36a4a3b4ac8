"""Run one block of programs, and write down what became of each in a form that goes to a file and between processes."""

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
from aotlab.verification.fuzz import cell, failures
from aotlab.verification.fuzz.drawing import Drawn, draw_block
from aotlab.verification.fuzz.engines import Watch
from aotlab.verification.fuzz.plan import Plan
from aotlab.verification.programs import Outcome

#: What can become of a program. "alike" means that it raises before there was anything to compile, as in eager;
#: "dynamo" that it differs, but in nothing in which it does not differ with Dynamo alone, without an engine behind it.
#: "asserts" that eager itself ends in an assertion of torch's own, so that nobody can say what is right; "static" that
#: it was compiled for every call, but, though it was to be for all sizes, never for others than those of the call.
Status = Literal["accepted", "static", "refused", "eager", "alike", "dynamo", "asserts", "wrong", "error", "raises"]

#: Those that are failures.
FAILED = ("wrong", "error", "raises")

#: Failures of one coarse name that are shrunk; of what comes after that, only the places are kept.
SHRUNK = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One program.

    Attributes
    ----------
    program
        A hash of its text.
    status
        What became of it.
    reasons
        Why it was refused or ran eagerly, or in what Dynamo differs.
    categories
        What it is about.
    graphs
        Its graphs, as hashes.
    served
        Its calls, the entries that were made, and the calls that an entry served which was traced for other sizes.
    """

    program: str
    status: Status
    reasons: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ()
    served: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failing program: where it was drawn, its coarse name, and its signature and cell if it was shrunk."""

    block: int
    index: int
    program: str
    name: str
    signature: str | None = None
    cell: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A finished block; ``discarded`` programs were begun and given up by the generator."""

    number: int
    size: int
    rows: tuple[Row, ...]
    failures: tuple[Failure, ...] = ()
    discarded: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who is told, program by program; what it raises ends the block.

    Attributes
    ----------
    at
        A program begins to be run, or to be shrunk.
    ran
        It has been run; the number says how many attempts at drawing it were discarded.
    failed
        It failed, and is as small as it gets.
    """

    at: Callable[[Literal["running", "shrinking"], Drawn], object]
    ran: Callable[[int, Row, int], object]
    failed: Callable[[Failure], object]


def run_block(
    plan: Plan, number: int, indices: Iterable[int], *, known: Mapping[str, int], shrink: float, listener: Listener
) -> None:
    """Draw and run these programs of a block.

    Parameters
    ----------
    known
        How many failures of each coarse name were shrunk before.
    shrink
        Seconds for shrinking one failure; 0 keeps it as it was drawn.
    """
    shrunk = Counter(known)
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
    """Hash a program's text."""
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def _run(plan: Plan, drawn: Drawn) -> tuple[Row, Outcome | None, str | None]:
    """Run one program; return its row, and the coarse name of the failure if it fails."""
    program = program_hash(drawn.program.source)
    name: str | None
    categories = tuple(sorted(drawn.program.categories))
    try:
        outcome, watch = failures.run(plan, drawn.program)
    except Exception as error:  # noqa: BLE001  # the comparison itself broke; that must not end a night's run
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
    """Leave what is refused to eager, and nothing behind: neither lines of programs, read by tracebacks, nor cycles."""
    lines = set(linecache.cache)
    try:
        with config.patch(fallback="eager"):
            yield
    finally:
        for name in set(linecache.cache) - lines:
            if name.startswith("<"):
                del linecache.cache[name]
        gc.collect()
