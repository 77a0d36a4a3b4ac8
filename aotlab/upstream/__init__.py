"""Reports of stock `torch.compile`: of the code in a block, or from a folder recorded with ``TORCH_TRACE``.

torch writes a log of each compilation: graphs, guards, reasons, generated code and times (its structured trace).
`trace_log` reads the records of a log. `printed_graphs` and `printed_metadata` read the texts in them, and
`compilations` makes the rows of a report from them. Nothing in a log is executed. `observation` receives the same
records while a program runs.
"""

from __future__ import annotations

from aotlab.upstream.compilations import graph_of, with_indices
from aotlab.upstream.observation import Observation, observe
from aotlab.upstream.storages import numbered
from aotlab.upstream.trace_log import CompileId
from aotlab.upstream.trace_report import read_trace

__all__ = ["CompileId", "Observation", "graph_of", "numbered", "observe", "read_trace", "with_indices"]
