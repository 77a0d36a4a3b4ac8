"""The report's data model: plain frozen records of everything that happened, which can be saved, loaded and compared.

A `Report` holds no tensors, no graphs and no live objects. It consists of strings, numbers, and records of these. The
notebook's widgets, the JupyterLab extension, the run history and the HTML page all read it, so its JSON form is stable.
Later versions of aotlab may add fields to schema version 1, but do not remove or change any. Readers ignore fields that
they do not know, and use the default of a field that is missing.

    Report
    ├── cell, environment
    ├── frames                 one per function that was compiled or called
    │   ├── calls              counters, and the last thousand calls one by one
    │   ├── refusals           compilations that failed, and whether the call raised or ran eagerly
    │   └── graphs             one per compiled entry
    │       ├── stages         wall time, size, and the code that the stage produced
    │       ├── nodes          per stage, with the user's line
    │       ├── inputs, outputs, storages, autograd, saved
    │       ├── steps          the calls of the program, and the epilogue, with the bytes that each reads and writes
    │       ├── compiled       the graphs that the backend compiled
    │       ├── memory         the modelled lifetimes of the storages
    │       ├── choices        the values that could be saved, and the choice of each memory budget
    │       ├── collectives    the collectives of `torch.distributed`
    │       ├── kernels        the kernels of these graphs
    │       └── guards
    ├── graph_break_rows
    ├── engine_rows            two engines side by side
    ├── run_rows               two runs side by side
    ├── rank_rows              the differences between the ranks
    ├── rank_reports           the reports of the other ranks
    ├── timing_rows            added by the caller who measured
    ├── memory_curves          measured memory, added like the timings
    ├── applied_rows           choices of saved values that were compiled and measured
    └── verification_rows      added by the caller who verified

A field that holds a size in bytes has "bytes" in its name. All times are in nanoseconds. An ``at_ns`` counts from the
beginning of the recording. If a report is too large for a notebook, its tables and texts are *cut*; see
`aotlab.report.cut`.
"""

from __future__ import annotations

from aotlab.errors import UserLine
from aotlab.report.model.calls import Call, Calls, Frame, FrameCounts, Refusal
from aotlab.report.model.cells import Cell, CellPart, GraphBreakRow, Running
from aotlab.report.model.choices import AppliedChoice, BudgetRow, Choices
from aotlab.report.model.environment import Device, Environment, Switch
from aotlab.report.model.graphs import (
    AutogradNode,
    Code,
    Collective,
    CompiledGraph,
    Counts,
    Graph,
    Guard,
    Kernel,
    Miss,
    Node,
    Saved,
    Stage,
)
from aotlab.report.model.measured import (
    QUIET,
    EngineRow,
    Fact,
    RankRow,
    Ratio,
    RunRow,
    Summary,
    TimelineRow,
    TimeRow,
    TimingRow,
    VerificationRow,
    WaitRow,
)
from aotlab.report.model.memory import MEMORY_KINDS, LiveTensor, Memory, MemoryCurve
from aotlab.report.model.report import MIME_TYPE, SCHEMA_ID, VERSION, Report, report_schema
from aotlab.report.model.steps import Access, Step
from aotlab.report.model.tensors import (
    PLAIN_TYPES,
    Group,
    InnerTensor,
    Input,
    Output,
    Placeholder,
    Result,
    Span,
    Storage,
    TensorInfo,
    Written,
)
from aotlab.report.views import Views

__all__ = [
    "MEMORY_KINDS",
    "MIME_TYPE",
    "PLAIN_TYPES",
    "QUIET",
    "SCHEMA_ID",
    "VERSION",
    "Access",
    "AppliedChoice",
    "AutogradNode",
    "BudgetRow",
    "Call",
    "Calls",
    "Cell",
    "CellPart",
    "Choices",
    "Code",
    "Collective",
    "CompiledGraph",
    "Counts",
    "Device",
    "EngineRow",
    "Environment",
    "Fact",
    "Frame",
    "FrameCounts",
    "Graph",
    "GraphBreakRow",
    "Group",
    "Guard",
    "InnerTensor",
    "Input",
    "Kernel",
    "LiveTensor",
    "Memory",
    "MemoryCurve",
    "Miss",
    "Node",
    "Output",
    "Placeholder",
    "RankRow",
    "Ratio",
    "Refusal",
    "Report",
    "Result",
    "RunRow",
    "Running",
    "Saved",
    "Span",
    "Stage",
    "Step",
    "Storage",
    "Summary",
    "Switch",
    "TensorInfo",
    "TimeRow",
    "TimelineRow",
    "TimingRow",
    "UserLine",
    "VerificationRow",
    "Views",
    "WaitRow",
    "Written",
    "report_schema",
]
