"""Describe graph breaks: the places where Dynamo ended a graph, with the reasons in a few words."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from traceback import FrameSummary

import torch

from aotlab import _torch as internals
from aotlab.errors import UserLine
from aotlab.report.model import GraphBreakRow
from aotlab.report.text import DATA_LIBRARIES, in_cell, place, why_dynamo_stopped
from aotlab.report.verdict import ROUNDS

#: The directory of Dynamo's code. A stack may contain frames of this code, because Dynamo traces its own versions of
#: some builtin functions.
DYNAMO = str(Path(torch.__file__).parent / "_dynamo")


#: Dynamo's reason for a graph break at a line in the middle of which it cannot continue. It then ends the graph at an
#: earlier line, and Python runs the rest of the function.
STEPPED = "step_unsupported"


#: Match the name that Dynamo gives to the code after a graph break: the function's name and the line.
RESUMED = re.compile(rf"^{internals.RESUME_PREFIX}(.+)_at_(\d+)$")


#: Match, in Dynamo's explanation, the file of a function that Dynamo does not trace.
_SKIPPED = re.compile(r"filename: `([^`]+)`")


#: Match, in a path, the name of the installed package that the file belongs to.
_PACKAGE = re.compile(r"(?:site|dist)-packages[\\/](\w+)")


#: Match aotlab's reason for a graph break at an optimizer's step, which runs eagerly by design.
_STEP = re.compile(r"^aotlab: the step of (\w+)")


def graph_break(at: FrameSummary | None, reason: str, at_ns: int) -> GraphBreakRow:
    """Make the row of a graph break.

    ``at`` is the line where Dynamo stopped; None if the place is unknown. ``reason`` is Dynamo's explanation. ``at_ns``
    is the time since the recording began.
    """
    words = why_dynamo_stopped(reason)
    step = _STEP.search(reason)
    if at is None:
        return GraphBreakRow(frame="", words=words, reason=reason, at_ns=at_ns)
    line = in_cell(UserLine(file=at.filename, line=at.lineno or 0, function=function_of(at.name), code=at.line or ""))
    frame, library = f"{line.file}:{line.line}", _library(at.filename, reason)
    row = GraphBreakRow(frame=frame, where=place(line), line=line, words=words, reason=reason, at_ns=at_ns)
    if step is not None:
        return replace(row, library="torch.optim", words=f"steps {step[1]}, {ROUNDS}")
    return replace(row, library=library, words=f"calls {library}") if library else row


def _library(file: str, reason: str) -> str:
    """Return the name of the library whose call made Dynamo stop at a line of ``file``, if it is in `DATA_LIBRARIES`.

    For other graph breaks return ``""``. ``reason`` is Dynamo's explanation. A graph break at such a call is not a
    fault, because there is nothing to compile in the library's code.
    """
    skipped = _SKIPPED.search(reason)
    package = _PACKAGE.search(file if skipped is None else skipped[1])
    if package is not None and reason.startswith("logging.Logger"):  # an installed package writes to its log
        return "logging"
    name = "numpy" if "numpy function" in reason else "" if package is None else package[1]
    return name if name in DATA_LIBRARIES else ""


def function_of(name: str) -> str:
    """Return a function's name without the prefix and the suffix that Dynamo adds for the code after a graph break."""
    return RESUMED.sub(r"\1", name)


def dynamo_reasons() -> dict[str, int]:
    """Map each reason to the number of times that Dynamo stopped for it in this process; empty without Dynamo."""
    return internals.dynamo_reasons() if "torch._dynamo.utils" in sys.modules else {}
