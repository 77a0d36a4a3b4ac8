"""Run blocks in this process or in worker processes.

Workers are spawned, not forked: a fork would copy the locks of torch's threads.

A program can kill its process, because torch crashes on some programs. Then another worker continues the block after
that program. If the program also kills a process that runs it eagerly, the program is discarded. Otherwise the crash is
a failure of the engine.
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

from aotlab.maintenance.fuzz import drawing
from aotlab.maintenance.fuzz.block import Block, Failure, Listener, Row, program_hash, run_block
from aotlab.maintenance.fuzz.plan import Plan
from aotlab.verification.clones import random_state_restored
from aotlab.verification.programs import run_program

#: A worker is replaced after this many blocks, because torch never frees some of the memory that programs use.
_RENEWED = 25

#: A worker is killed if it sends no message for this many seconds, plus the seconds for shrinking.
_HUNG = 120.0

Ran = Callable[[Row], object]
Failed = Callable[[Failure], object]


@contextmanager
def quiet_process() -> Iterator[None]:
    """Set up this process for many small programs, and restore torch's state afterwards.

    The restored state consists of the number of threads, the grad mode, the random states and the logging level.
    Dynamo is reset.
    """
    threads, grad, quiet = torch.get_num_threads(), torch.is_grad_enabled(), logging.root.manager.disable
    # Disable logging, because torch logs errors before it raises them.
    logging.disable(logging.CRITICAL)
    # A second thread is useless for tensors of six elements.
    torch.set_num_threads(1)
    # Freeze the existing objects, so that the garbage collector, which the engine runs often, does not examine them.
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
    """A block in progress: the results so far, and the current program.

    ``left`` has the indices of the programs that have not been run. `Block` explains the other fields.
    """

    number: int
    size: int
    left: deque[int]
    rows: list[Row] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    discarded: int = 0
    seconds: float = 0.0
    #: The current action (running or shrinking), and the index and the text of its program.
    at: tuple[str, int, str] | None = None
    #: True if a process died while it shrank a failure of this block.
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
    plan: Plan, blocks: list[tuple[int, int]], shrunk: Mapping[str, int], shrink: float, ran: Ran, failed: Failed
) -> Iterator[Block]:
    """Run blocks, given as (number, size), in this process, and yield the finished blocks.

    ``shrunk`` says how many failures of each coarse name were shrunk; the caller updates it when ``failed`` is called.
    ``shrink`` is the largest number of seconds for shrinking one failure. ``ran`` and ``failed`` are called after each
    program and each failure.
    """
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
            run_block(plan, number, tuple(block.left), shrunk_before=shrunk, shrink=shrink, listener=listener)
            block.seconds = time.perf_counter() - started
            yield block.finished()


def run_there(
    plan: Plan,
    blocks: list[tuple[int, int]],
    shrunk: Mapping[str, int],
    shrink: float,
    ran: Ran,
    failed: Failed,
    jobs: int,
) -> Generator[Block, None, None]:
    """Run blocks in ``jobs`` worker processes, and yield each block when it is finished. See `run_here`."""
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
                    worker.start(first, shrunk, 0.0 if first.unshrunk else shrink)
            # `wait` returns when a worker sends a message or its process ends. The timeout is for workers that hang.
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
    """A worker process, and the main process's end of the pipe to it.

    ``block`` is the block of programs that the worker runs now, or None if it waits for a block. ``blocks`` is the
    number of blocks that were sent to the worker so far. ``heard`` is the time of the worker's last message, or of the
    start of its block if that is later.
    """

    def __init__(self, plan: Plan) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, plan), daemon=True)
        self.process.start()
        theirs.close()
        self.block: _Unfinished | None = None
        self.blocks = 0
        self.heard = time.monotonic()

    def start(self, block: _Unfinished, shrunk: Mapping[str, int], shrink: float) -> None:
        """Send a block to the worker."""
        self.block = block
        self.blocks += 1
        self.heard = time.monotonic()
        self.pipe.send((block.number, tuple(block.left), dict(shrunk), shrink))

    def hear(self) -> Any:
        """Receive the worker's next message."""
        said = self.pipe.recv()
        self.heard = time.monotonic()
        return said

    def stop(self) -> int:
        """Terminate the process and return its exit code."""
        self.process.terminate()
        self.process.join()
        self.pipe.close()
        return self.process.exitcode or 0


def _died(plan: Plan, block: _Unfinished, code: int, ran: Ran, failed: Failed) -> None:
    """Record that the process of a worker ended with exit code ``code`` while it worked on ``block``.

    If the current program kills a process that runs it eagerly too, the program is discarded. Otherwise the program is
    a failure.
    """
    if block.at is None:
        # The process ended after the last program, or while it drew the next one. Drawing runs statements eagerly, so
        # the engine is not the cause, and the program is discarded.
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
    # A crash that depends on memory addresses does not happen every time.
    for _ in range(3):
        run_program(program, lambda function: function)


def _serve(pipe: Any, plan: Plan) -> None:
    """Run as a worker: receive and run blocks until the pipe closes."""
    # Ctrl-C goes to all processes of a terminal. Only the main process handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = Listener(
        at=lambda what, drawn: pipe.send(("at", (what, drawn.index, drawn.program.source))),
        ran=lambda *row: pipe.send(("ran", row)),
        failed=lambda failure: pipe.send(("failed", failure)),
    )
    with quiet_process(), suppress(EOFError, ConnectionError):
        while True:
            number, indices, shrunk, shrink = pipe.recv()
            started = time.perf_counter()
            run_block(plan, number, indices, shrunk_before=shrunk, shrink=shrink, listener=listener)
            pipe.send(("done", time.perf_counter() - started))
