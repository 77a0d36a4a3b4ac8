"""What stands at run time for the ends and cuts of the traced autograd graph.

`divide` says where a gradient goes on from an edge, to an input, what that is a view of, or an output, and cuts the
graph there; `place_hooks` puts the function's own hooks there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.ir.metadata import OutputType, TangentSource
from aotlab.trace.edges import Edge, edge_of, edges_behind, next_edges
from aotlab.trace.forward_outputs import ForwardOutputs, Returned
from aotlab.trace.function import Findings
from aotlab.trace.inputs import Entered
from aotlab.trace.outputs import Outputs
from aotlab.trace.records import Hook, Source
from aotlab.trace.segments import Segment, segments, summed_apart, to_be_cut


def divide(findings: Findings, forward: ForwardOutputs, *, exact: bool) -> tuple[dict[Edge, Source], list[Segment]]:
    """Say what stands for each edge where gradients leave, and divide there; ``exact``: also for eager's sums."""
    inputs, outputs = findings.inputs, findings.outputs
    edges = forward.edges
    stands_for = {item.edge: Source("input", k) for k, item in enumerate(inputs) if item.edge is not None}
    seen = _seen(outputs, forward.roots)
    known = {**stands_for, **{edge: Source("output", i) for edge, (i, _) in seen.items() if edge not in stands_for}}
    for n, edge in reversed(list(enumerate(edges))):
        known.setdefault(edge, Source("root", n))
    # an edge that comes into the node of an output, or of a hook, beside it calls its hooks
    shared = {edge[0] for edge, item in zip(edges, forward.roots, strict=True) if item.source is TangentSource.OUTPUT}
    shared.update(hook.edge[0] for hook in findings.hooks)
    cuts = {hook.edge for hook in findings.hooks} | {e for e in edges_behind(edges) if e[0] in shared} - set(edges)

    def divided(also: Collection[Edge]) -> list[Segment]:
        seen_from = {edge: made_from for edge, (_, made_from) in seen.items()}
        return segments(edges, list(stands_for), seen_from, cuts=cuts.union(also), alike=bool(findings.recorder.above))

    parts = divided(())
    if exact:
        also: set[Edge] = set()
        while new := to_be_cut(parts) - also:
            also |= new
            parts = divided(also)
        apart = summed_apart(parts, {*edges, *seen})
        parts = [replace(part, apart=apart.intersection(part.stops)) for part in parts] if apart else parts
    later = {edge for part in parts for edge in part.entries}
    for part in parts:  # one may need the history that one after it makes
        if any(edge in later and (edge not in known or known[edge].kind == "root") for edge in part.stops):
            raise RunEagerly("writes to views give each other's histories")
        later.difference_update(part.entries)
    return known, parts


def _seen(outputs: Outputs, roots: Sequence[Returned]) -> dict[Edge, tuple[int, tuple[int, ...]]]:
    """Return the edges of outputs that the epilogue makes by views: (output, roots that it is made from)."""
    number = {(item.source, item.index): n for n, item in enumerate(roots)}
    found: dict[Edge, tuple[int, tuple[int, ...]]] = {}
    for info in outputs.infos:
        leaf = outputs.tensors.get(info.index)
        if leaf is None or not info.views or leaf.grad_fn is None:
            continue
        kind = {
            OutputType.ALIAS_OF_INPUT: TangentSource.MUTATED_INPUT,
            OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT: TangentSource.OUTPUT,
        }.get(info.output_type, TangentSource.INTERMEDIATE_BASE)
        assert info.base_idx is not None
        root = number.get((kind, info.base_idx))
        made_from = () if root is None else (root,)
        found.setdefault(edge_of(leaf), (info.index, made_from))
    return found


def made_through(outputs: Outputs, inputs: Sequence[Entered]) -> dict[int, int]:
    """Find the outputs whose gradients pass another output, as those of ``v[0]`` pass ``v``: they are made from it."""
    infos = outputs.infos
    at = {edge_of(t): i for i, t in reversed(outputs.tensors.items()) if infos[i].views and t.grad_fn is not None}
    found: dict[int, int] = {}
    for i, edge in ways_back(outputs, inputs) if len(at) > 1 else ():
        own, other = infos[i], infos[at.get(edge, i)]
        alike = own.output_type == other.output_type or (own.aliases_intermediate and other.aliases_intermediate)
        if own is not other and own.views and other.views and own.base_idx == other.base_idx and alike:
            count = len(other.views)
            if count < len(own.views) and own.views[:count] == other.views:
                found.setdefault(i, other.index)
    return found


def place_hooks(hooks: Sequence[Hook], known: Mapping[Edge, Source]) -> list[tuple[Source, Callable[..., Any]]]:
    """Say on what each hook is registered at run time; those that no gradient can reach are left out."""
    return [(source, hook.function) for hook in hooks if (source := known.get(hook.edge)) is not None]


def check_passed(findings: Findings) -> None:
    """Leave to eager views that gradients pass otherwise than in eager.

        def f(x):
            v, w = x.unbind(0)
            return v, w.exp()

    A hook on ``v`` would be called with None for the second output, as ``v`` and ``w`` have one node.
    """
    outputs, inputs = findings.outputs, findings.inputs
    tensors = [*outputs.tensors.values(), *(item.wrapper for item in inputs)]
    several = {
        tensor.grad_fn
        for i, tensor in outputs.tensors.items()
        if outputs.infos[i].views and tensor.grad_fn is not None and internals.is_one_of_several_views(tensor)
    }
    if several:
        known = {edge_of(tensor) for tensor in tensors if tensor.grad_fn is not None}
        if any(node in several for node, _ in edges_behind(known) - known):
            raise RunEagerly(
                "an output is one of several views that were made together, and gradients pass another one",
                suggestion="return all of them or none, to have it compiled",
            )


def ways_back(outputs: Outputs, inputs: Sequence[Entered]) -> Iterator[tuple[int, Edge]]:
    """Go through the outputs that are made by views, each with the edges that its gradient passes on its way back."""
    ends = {edge_of(item.wrapper) for item in inputs if item.wrapper.requires_grad}
    ends.update(item.edge for item in inputs if item.edge is not None)
    roots = [*(root for _, _, root in outputs.returned), *(root for _, root in outputs.bases)]
    ends.update(edge_of(root) for root in roots if root is not None)
    for i, tensor in outputs.tensors.items():
        edges = next_edges(tensor.grad_fn) if outputs.infos[i].views and tensor.grad_fn is not None else []
        while len(edges) == 1 and edges[0] not in ends:
            yield i, edges[0]
            edges = next_edges(edges[0][0])
