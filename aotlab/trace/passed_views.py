"""Views that the caller does not get and that gradients have to pass all the same.

    def f(x):
        v, w = x.unbind(0)
        return v.exp(), w

A hook on ``w`` is called with None when a gradient comes from the first output, since ``v`` and ``w`` have one node in
common. So it is here if the gradient passes ``v``: the epilogue makes that as if it were an output.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from aotlab.capture.signals import RunEagerly
from aotlab.errors import OutputError
from aotlab.ir.metadata import OutputAliasInfo
from aotlab.trace.chronicle import Chronicle
from aotlab.trace.edges import Edge, edge_of, edges_behind, next_edges
from aotlab.trace.inputs import Entered
from aotlab.trace.outputs import OutputReader, Outputs
from aotlab.trace.tape import Tape


def all_outputs(
    tape: Tape, leaves: Sequence[Any], names: Sequence[str], inputs: Sequence[Entered], chronicle: Chronicle
) -> Outputs:
    """Classify the outputs and behind them, as if they were returned too, the views that gradients pass.

    Raises
    ------
    RunEagerly
        Such a view cannot be made again.
    """
    outputs = OutputReader(tape, leaves, names, inputs, chronicle).run()
    views = _views_passed(outputs, inputs, chronicle)
    if not views:
        return outputs
    labels = [*names, *("view on the way" for _ in views)]
    try:
        return OutputReader(tape, [*leaves, *views], labels, inputs, chronicle).run()
    except OutputError as error:
        raise RunEagerly(f"a view that gradients pass cannot be made again: {error}") from error


def _views_passed(outputs: Outputs, inputs: Sequence[Entered], chronicle: Chronicle) -> list[Tensor]:
    """Return the views that gradients pass and that were made together with an output."""
    several = chronicle.several
    if not several:
        return []
    views = [t for i, t in outputs.tensors.items() if outputs.infos[i].views and t.grad_fn is not None]
    nodes = {edge_of(view)[0] for view in views}
    found = [view for group in several for view in group if view.grad_fn in nodes]
    known = [*outputs.tensors.values(), *(item.wrapper for item in inputs)]
    passed = edges_behind([edge_of(tensor) for tensor in known if tensor.grad_fn is not None])
    return [view for view in found if not any(view is tensor for tensor in known) and edge_of(view) in passed]


def check_passed(outputs: Outputs, inputs: Sequence[Entered], through: Mapping[int, int]) -> None:
    """See to it that outputs that are made by views are made through those that are made by strides.

    ``through`` says for views of outputs that are views of which one; see `aotlab.trace.sources.made_through`.

    Raises
    ------
    RunEagerly
        Its gradient would go past one of them.
    """
    by_strides = {edge_of(outputs.tensors[info.index]) for info in outputs.infos if is_made_by_strides(info, outputs)}
    for i, edge in ways_back(outputs, inputs) if by_strides else ():
        if edge in by_strides and not is_made_through(i, edge, outputs, through):
            raise RunEagerly(f"`{outputs.infos[i].name}` is a view of a view that is made by sizes and strides")


def is_made_by_strides(info: OutputAliasInfo, outputs: Outputs) -> bool:
    """Tell whether an output has a history and is made by sizes and strides, so that no other is made from it."""
    return info.is_made_by_views and info.views is None and outputs.tensors[info.index].grad_fn is not None


def is_made_through(i: int, edge: Edge, outputs: Outputs, through: Mapping[int, int]) -> bool:
    """Tell whether an output is made from the one at an edge, perhaps by others in between."""
    j: int | None = i
    while j is not None and edge_of(outputs.tensors[j]) != edge:
        j = through.get(j)
    return j is not None


def ways_back(outputs: Outputs, inputs: Sequence[Entered]) -> Iterator[tuple[int, Edge]]:
    """Go through the outputs that are made by views, each with the edges that its gradient passes on its way back."""
    ends = {edge_of(item.wrapper) for item in inputs if item.wrapper.requires_grad}
    ends.update(item.edge for item in inputs if item.edge is not None)
    roots = [*(root for _, _, root in outputs.returned), *(root for _, root in outputs.bases)]
    ends.update(edge_of(root) for root in roots if root is not None)
    for i, tensor in outputs.tensors.items():
        info = outputs.infos[i]
        if info.is_made_by_views and tensor.grad_fn is not None:
            yield from ((i, edge) for edge in _way_back(tensor, ends))


def _way_back(tensor: Tensor, ends: Collection[Edge]) -> Iterator[Edge]:
    """Go from a view to what it is a view of, along the edges that its gradient goes."""
    edges = next_edges(edge_of(tensor)[0])
    while len(edges) == 1 and edges[0] not in ends:
        yield edges[0]
        edges = next_edges(edges[0][0])
