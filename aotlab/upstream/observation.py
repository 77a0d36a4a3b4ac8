"""Observe stock `torch.compile` while a program runs."""

from __future__ import annotations

import datetime
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from aotlab import _torch as internals
from aotlab.report.model import Report, TimelineRow, Views
from aotlab.upstream.compilations import Compilation
from aotlab.upstream.trace_log import CompileId, TraceLog
from aotlab.upstream.trace_report import compilations_of, report_of, timeline_rows

_AGAIN = "To compile again, observe with `aotlab.observe(caches=False)`."


class Observation(Views[Report]):
    """A report of what stock `torch.compile` compiles, while it is being recorded.

    An observation has all attributes and methods of a `Report`. During the ``with`` block they describe the
    compilations so far, and after the block the finished report. ``observation.report()`` returns the plain, frozen
    `Report`.

    Parameters
    ----------
    name
        A title for the report.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name or "stock torch.compile"
        self._log = TraceLog(name="this process")
        self._lock = threading.Lock()
        self._identifier = uuid.uuid4().hex
        self._created = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        self._begin_ns = time.perf_counter_ns()
        self._end_ns: int | None = None
        self._built: tuple[object, Report] | None = None
        self._parsed: tuple[int, dict[CompileId, Compilation]] | None = None

    def __repr__(self) -> str:
        return f"<Observation: {self.report().verdict.splitlines()[0]} .report() is the frozen Report>"

    def __getattr__(self, name: str) -> object:
        """Return a field or a method of the report."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.report(), name)

    def hear(self, metadata: Mapping[str, Any], payload: str) -> None:
        """Add a record of torch's structured trace."""
        with self._lock:
            self._log.add(metadata, payload)

    def log(self) -> TraceLog:
        """Return the records so far."""
        with self._lock:
            log = self._log
            return replace(log, records=list(log.records), files=internals.interned_files() | log.files)

    def compile_id(self, frame: int, number: int) -> CompileId:
        """Return the id of the present compilation with these numbers of Dynamo."""
        return self._log.compile_id(frame, number)

    def end(self) -> None:
        """Fix the time of the observation."""
        self._end_ns = time.perf_counter_ns()

    def compilations(self) -> dict[CompileId, Compilation]:
        """Return all compilations so far."""
        log = self.log()
        if self._parsed is None or self._parsed[0] != len(log.records):
            self._parsed = len(log.records), compilations_of(log)
        return self._parsed[1]

    def timeline_of(self, names: Mapping[CompileId, tuple[str, int]]) -> list[TimelineRow]:
        """Return the time line of some compilations. ``names`` has their frames and their graphs in these frames.

        The times are times of the clock.
        """
        found = self.compilations()
        phases = [phase for key in names if key in found for phase in found[key].phases]
        return list(timeline_rows(phases, names))

    def report(self) -> Report:
        """Return the report of all compilations so far."""
        log = self.log()
        made_of = len(log.records), self._end_ns
        if self._built is None or self._built[0] != made_of:
            report = report_of([log], name=self._name, again=_AGAIN)
            report = replace(
                report,
                identifier=self._identifier,
                created=self._created,
                duration_ns=(self._end_ns or time.perf_counter_ns()) - self._begin_ns,
            )
            self._built = made_of, report
        return self._built[1]


@contextmanager
def observe(name: str | None = None, *, caches: bool = True) -> Iterator[Observation]:
    """Observe what stock `torch.compile` compiles during a ``with`` block, in all threads of this process.

    The observed code needs no change, and runs as it does without aotlab. The compilations take longer, because torch
    prints their graphs for the report; calls that compile nothing do not.

    Parameters
    ----------
    name
        A title for the report.
    caches
        Whether `torch.compile` may take compiled graphs from the caches of earlier runs. The stages that made such a
        graph do not run again, so the report does not have their results and their times. If False, each graph is
        compiled; kernels that were compiled before are still taken from the cache.

    Returns
    -------
    ContextManager[Observation]
        A context manager that returns the report. It has the tables of a report of aotlab's engine: arguments with
        their mutations, outputs, saved values, nodes with the user's lines, kernels, guards, recompiles, graph breaks,
        stages and times.

    Examples
    --------
    >>> import aotlab
    >>> import torch
    >>> def scale(x, factor):
    ...     x.mul_(factor)
    ...     return x.t()
    >>> with aotlab.observe() as report:
    ...     y = torch.compile(scale, backend="aot_eager")(torch.ones(2, 3), 2.0)
    >>> report.inputs[["name", "mutated"]].values.tolist()
    [['x', True]]
    >>> report.outputs["relation"].tolist()
    ['view of input x']
    """
    observation = Observation(name)
    settings = nullcontext() if caches else internals.compiling_without_caches()
    with settings, internals.structured_trace(observation.hear):
        try:
            yield observation
        finally:
            observation.end()
