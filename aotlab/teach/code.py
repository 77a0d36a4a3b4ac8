"""Show code from a report: graphs, and the generated run-time function that calls them."""

from __future__ import annotations

from aotlab.errors import UsageError
from aotlab.report.model import Report, Views
from aotlab.teach.shown import Shown

#: For each value of the argument ``part`` of `code`: the stage of the report that contains the code, and the beginning
#: of the code's title.
_PARTS = {
    "joint": ("trace", "joint graph"),
    "forward": ("partition", "forward graph"),
    "backward": ("partition", "backward graph"),
    "wrapper": ("runtime", "generated runtime wrapper"),
}


class Code(Shown):
    """Code that displays itself."""

    def __init__(self, text: str) -> None:
        self.code = text


def code(report: Views[Report], part: str = "forward") -> Code:
    """Show the code of the last graph of a report: ``"joint"``, ``"forward"``, ``"backward"`` or ``"wrapper"``.

    ``"wrapper"`` is the generated run-time function. The lines before the call of the compiled forward are not shown,
    because they check the guards.

    Raises
    ------
    UsageError
        The report has no such part. A function without gradients has no joint graph and no backward graph.
    """
    graphs = [graph for frame in report.report().frames for graph in frame.graphs if graph.stages]
    stage, title = _PARTS.get(part, ("", ""))
    stages = graphs[-1].stages if graphs else ()
    texts = [code.text for each in stages if each.name == stage for code in each.codes if code.title.startswith(title)]
    if not texts:
        raise UsageError(f"the report has no code {part!r}; there may be {', '.join(_PARTS)}")
    return Code(texts[-1].partition("# compiled forward\n")[2] if part == "wrapper" else texts[-1])
