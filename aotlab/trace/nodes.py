"""What the caller's autograd graph will look like, in words: one node for the call or several."""

from __future__ import annotations

from collections.abc import Sequence

from aotlab.trace.forward_outputs import Returned
from aotlab.trace.live import Trace
from aotlab.trace.records import AutogradNode, Source


def autograd_nodes(trace: Trace, roots: Sequence[Returned]) -> tuple[AutogradNode, ...]:
    """Say what each autograd node of the call makes, and where its gradients go."""
    arrives = {entry: number for number, part in enumerate(trace.segments) for entry in part.entries[len(part.roots) :]}
    found = []
    for number, part in enumerate(trace.segments):
        makes = [roots[n].label for n in part.roots]
        if len(part.entries) > len(part.roots):
            makes.append("what other nodes use")
        goes_to: dict[str, None] = {}
        for way in trace.slots[number]:
            if way is not None:
                edge = way[0]
                text = f"node {arrives[edge]}" if edge in arrives else _named(trace, roots, trace.sources.get(edge))
                goes_to[text] = None
        found.append(AutogradNode(number=number, makes=tuple(makes), goes_to=tuple(goes_to)))
    return tuple(found)


def _named(trace: Trace, roots: Sequence[Returned], source: Source | None) -> str:
    if source is None:
        return "nothing that the caller sees"
    infos = trace.metadata.input_info
    match source.kind:
        case "input":
            return infos[source.index].name
        case "changed":
            return f"{infos[source.index].name} as it is afterwards"
        case "root":
            return roots[source.index].label
        case "output":
            return trace.metadata.output_info[source.index].name
        case "carrier":
            return "another node"
