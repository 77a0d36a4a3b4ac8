"""Blocks in processes. Each is started anew, not forked: a fork would take torch's threads' locks along.

A program can kill its process: torch crashes on some. Then another process takes the block up behind it. If eager dies
of the program as well it is discarded, else the engine has failed.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

import torch

from aotlab.verification.clones import random_state_restored
from aotlab.verification.fuzz import drawing
from aotlab.verification.fuzz.block import Block, Failure, Listener, Row, program_hash, run_block
from aotlab.verification.fuzz.plan import Plan
from aotlab.verification.programs import run_program

#: Blocks after which a process is replaced: what torch keeps for ever is thereby bounded.
_RENEWED = 25

#: Seconds without a word, besides those for shrinking, after which a process counts as hung.
_HUNG = 120.0

Ran = Callable[[Row], object]
Failed = Callable[[Failure], object]


@contextmanager
def quiet_process() -> Iterator[None]:
    """Run many small programs without waste, and leave torch as it was: threads, modes, random numbers, Dynamo."""
    threads, grad, quiet = torch.get_num_threads(), torch.is_grad_enabled(), logging.root.manager.disable
    # Torch logs what it then raises.
    logging.disable(logging.CRITICAL)
    # A second thread has nothing to do on tensors of six elements.
    torch.set_num_threads(1)
    # What lives already is kept out of the collections, of which the engine makes many.
    gc.collect()
    gc.freeze()
    try:
        with random_state_restored(), torch.enable_grad():
            yield
    finally:
        gc.unfreeze()
        logging.disable(quiet)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.compiler.reset()


@dataclass(slots=True, kw_only=True)
class _Unfinished:
    """A block as it grows: what is left of it, and where it is at."""

    number: int
    size: int
    left: deque[int]
    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    discarded: int = 0
    seconds: float = 0.0
    #: What is done to which program: its place and text.
    at: tuple[str, int, str] | None = None
    #: Failures on whose shrinking a process died.
    unshrunk: bool = False

    def ran(self, index: int, row: Row, discarded: int) -> None:
        self.left.remove(index)
        self.rows.append(row)
        self.discarded += discarded
        self.at = None
        self.unshrunk = False

    def finished(self) -> Block:
        return Block(
            number=self.number,
            size=self.size,
            rows=tuple(self.rows),
            failures=tuple(self.failures),
            discarded=self.discarded,
            seconds=self.seconds,
        )


def run_here(
    plan: Plan, blocks: list[tuple[int, int]], known: Mapping[str, int], shrink: float, ran: Ran, failed: Failed
) -> Iterator[Block]:
    """Run blocks in this process; ``known`` may grow meanwhile."""
    with quiet_process():
        for number, size in blocks:
            started = time.perf_counter()
            block = _Unfinished(number=number, size=size, left=deque(range(size)))

            def hear(index: int, row: Row, discarded: int, block: _Unfinished = block) -> None:
                block.ran(index, row, discarded)
                ran(row)

            def note(failure: Failure, block: _Unfinished = block) -> None:
                block.failures.append(failure)
                failed(failure)

            listener = Listener(at=lambda *_: None, ran=hear, failed=note)
            run_block(plan, number, tuple(block.left), known=known, shrink=shrink, listener=listener)
            block.seconds = time.perf_counter() - started
            yield block.finished()


def run_there(
    plan: Plan,
    blocks: list[tuple[int, int]],
    known: Mapping[str, int],
    shrink: float,
    ran: Ran,
    failed: Failed,
    jobs: int,
) -> Generator[Block, None, None]:
    """Run blocks in ``jobs`` processes, in whatever order they end; ``known`` may grow meanwhile."""
    waiting = deque(_Unfinished(number=number, size=size, left=deque(range(size))) for number, size in blocks)
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(_Worker(plan))
            for worker in list(workers):
                if worker.block is None and (not waiting or worker.blocks >= _RENEWED):
                    worker.stop()
                    workers.remove(worker)
                elif worker.block is None:
                    first = waiting.popleft()
                    worker.start(first, known, 0.0 if first.unshrunk else shrink)
            # `wait` tells at once of a message and of a death; the timeout is for those who hang.
            ready = connection.wait([worker.pipe for worker in workers], timeout=1.0)
            for worker in list(workers):
                block = worker.block
                if block is None:
                    continue
                if worker.pipe not in ready:
                    if time.monotonic() - worker.heard > _HUNG + shrink:
                        worker.process.kill()
                    continue
                try:
                    what, value = worker.hear()
                except (EOFError, ConnectionError):
                    workers.remove(worker)
                    _died(plan, block, worker.stop(), ran, failed)
                    if block.left:
                        waiting.appendleft(block)
                    else:
                        yield block.finished()
                    continue
                if what == "at":
                    block.at = value
                elif what == "ran":
                    block.ran(*value)
                    ran(value[1])
                elif what == "failed":
                    block.failures.append(value)
                    failed(value)
                else:
                    block.seconds += value
                    worker.block = None
                    yield block.finished()
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A process, our end of the pipe to it, and the block that it is at."""

    def __init__(self, plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, plan), daemon=True)
        self.process.start()
        theirs.close()
        self.block: _Unfinished | None = None
        self.blocks = 0
        self.heard = time.monotonic()

    def start(self, block: _Unfinished, known: Mapping[str, int], shrink: float) -> None:
        """Give it a block."""
        self.block = block
        self.blocks += 1
        self.heard = time.monotonic()
        self.pipe.send((block.number, tuple(block.left), dict(known), shrink))

    def hear(self) -> Any:
        """Return what it says next."""
        said = self.pipe.recv()
        self.heard = time.monotonic()
        return said

    def stop(self) -> int:
        """End it, whatever it is at; return its exit code."""
        self.process.terminate()
        self.process.join()
        self.pipe.close()
        return self.process.exitcode or 0


def _died(plan: Plan, block: _Unfinished, code: int, ran: Ran, failed: Failed) -> None:
    """Decide what the death of a process says of the program that it was at."""
    if block.at is None:
        # It died while it drew, which is running eagerly statement by statement, or when it was done with all.
        if block.left:
            block.left.popleft()
            block.discarded += 1
        return
    what, index, source = block.at
    block.at = None
    if what == "shrinking":
        block.unshrunk = True
        return
    if _dies_in_eager(plan, block.number, index):
        block.left.remove(index)
        block.discarded += 1
        return
    name = f"error: the process died with exit code {code}"
    program = program_hash(source)
    comment = f"# {name}; seed {plan.key}, block {block.number}, program {index}\n"
    failure = Failure(
        block=block.number,
        index=index,
        program=program,
        name=name,
        signature=f"{name} {program}",
        cell=comment + source,
    )
    row = Row(program=program, status="error")
    block.failures.append(failure)
    block.ran(index, row, 0)
    failed(failure)
    ran(row)


def _dies_in_eager(plan: Plan, number: int, index: int) -> bool:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_run_eagerly, args=(plan, number, index), daemon=True)
    process.start()
    try:
        process.join(_HUNG)
    finally:
        process.kill()
        process.join()
    return process.exitcode != 0


def _run_eagerly(plan: Plan, number: int, index: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program = drawing.draw(plan, number, index).program
    # A crash that hangs on where memory lies does not come every time.
    for _ in range(3):
        run_program(program, lambda function: function)


def _serve(pipe: Any, plan: Plan) -> None:
    """Be a worker: take blocks until the pipe closes; if nobody is left to hear it, it ends without a word."""
    # ctrl-C goes to all processes of a terminal; the first one says what happens.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = Listener(
        at=lambda what, drawn: pipe.send(("at", (what, drawn.index, drawn.program.source))),
        ran=lambda *row: pipe.send(("ran", row)),
        failed=lambda failure: pipe.send(("failed", failure)),
    )
    with quiet_process(), suppress(EOFError, ConnectionError):
        while True:
            number, indices, known, shrink = pipe.recv()
            started = time.perf_counter()
            run_block(plan, number, indices, known=known, shrink=shrink, listener=listener)
            pipe.send(("done", time.perf_counter() - started))
