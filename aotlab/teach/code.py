"""The code that a report holds: graphs, and the wrapper that calls them."""

from __future__ import annotations

from aotlab.errors import UsageError
from aotlab.report.views import Views
from aotlab.teach.shown import Shown

#: What can be shown: the stage, and how its title begins.
_PARTS = {
    "joint": ("trace", "joint graph"),
    "forward": ("partition", "forward graph"),
    "backward": ("partition", "backward graph"),
    "wrapper": ("runtime", "generated runtime wrapper"),
}


class Code(Shown):
    """Lines of code."""

    def __init__(self, text: str) -> None:
        self.code = text


def code(report: Views, part: str = "forward") -> Code:
    """Show the code of the last graph of a report: ``"joint"``, ``"forward"``, ``"backward"`` or ``"wrapper"``.

    The wrapper is shown from where it calls the graph; before that, it looks whether all that was assumed holds.

    Raises
    ------
    UsageError
        There is no such part; of a function without gradients there is no joint graph and no backward.
    """
    graphs = [graph for frame in report.report().frames for graph in frame.graphs if graph.stages]
    stage, title = _PARTS.get(part, ("", ""))
    stages = graphs[-1].stages if graphs else ()
    found = [code.text for each in stages if each.name == stage for code in each.codes if code.title.startswith(title)]
    if not found:
        raise UsageError(f"the report has no code {part!r}; there may be {', '.join(_PARTS)}")
    return Code(found[-1].partition("# compiled forward\n")[2] if part == "wrapper" else found[-1])
