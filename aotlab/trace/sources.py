"""The run-time values (`Source`) that replace edges of the traced autograd graph.

`divide_into_segments` finds the edges that the caller can reach at run time: the edge of an input, of a root, or of an
output that is a view. It cuts the graph at these edges. `place_hooks` finds the run-time value for each hook that the
function registered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aotlab import _torch as internals
from aotlab.capture.signals import RunEagerly
from aotlab.ir.metadata import OutputType, TangentSource
from aotlab.trace.autograd_edges import Edge, edge_of, edges_behind, next_edges
from aotlab.trace.findings import Findings
from aotlab.trace.forward_outputs import ForwardOutputs, Returned
from aotlab.trace.gradient_buckets import cuts_at_buckets
from aotlab.trace.inputs import TracedInput
from aotlab.trace.output_aliases import Outputs
from aotlab.trace.records import Hook, Source
from aotlab.trace.segments import Segment, cut_into_segments, edges_left_unsummed, edges_to_cut


def divide_into_segments(
    findings: Findings, forward: ForwardOutputs, *, exact: bool
) -> tuple[dict[Edge, Source], list[Segment]]:
    """Find the run-time value of each edge that the caller can reach, and cut the autograd graph at these edges.

    Return the run-time values by edge, and the segments. With ``exact`` the graph is also cut where gradients of
    several segments are summed, so that autograd sums them in eager's order.
    """
    inputs, edges = findings.inputs, forward.edges
    input_sources = {item.edge: Source("input", k) for k, item in enumerate(inputs) if item.edge is not None}
    new_leaves = [info.index for info in findings.outputs.infos if info.is_new_leaf]
    input_sources |= {edge_of(findings.outputs.tensors[i]): Source("output", i) for i in new_leaves}
    views = _view_edges(findings, forward.roots)
    sources = {**{edge: source for edge, (source, _) in views.items()}, **input_sources}
    for n, edge in reversed(list(enumerate(edges))):
        sources.setdefault(edge, Source("root", n))
    # If a node has several results and one of them is an output or has a hook, the edges to its other results are cut
    # too, because in eager a gradient along such an edge also calls the node's hooks.
    shared = {edge[0] for edge, item in zip(edges, forward.roots, strict=True) if item.source is TangentSource.OUTPUT}
    shared.update(hook.edge[0] for hook in findings.hooks)
    cuts = {hook.edge for hook in findings.hooks} | {e for e in edges_behind(edges) if e[0] in shared} - set(edges)
    if (capacities := internals.bucket_capacities()) is not None:
        sizes = {item.edge: item.fake.nbytes for item in inputs if item.edge is not None}
        cuts |= cuts_at_buckets(edges, sizes, capacities)

    def divide_at(also: Collection[Edge]) -> list[Segment]:
        seen_from = {edge: made_from for edge, (_, made_from) in views.items()}
        return cut_into_segments(
            edges,
            list(input_sources),
            seen_from,
            cuts=cuts.union(also),
            alike=bool(findings.recorder.subclass_mode),
            nested=any(item.view_of is not None for item in inputs),
        )

    divided = divide_at(())
    if exact:
        also: set[Edge] = set()
        while new := edges_to_cut(divided) - also:
            also |= new
            divided = divide_at(also)
        unsummed = edges_left_unsummed(divided, {*edges, *views})
        divided = (
            [replace(segment, unsummed=unsummed.intersection(segment.stops)) for segment in divided]
            if unsummed
            else divided
        )
    later = {edge for segment in divided for edge in segment.entries}
    for segment in divided:  # a segment must not need the history that a later segment makes
        if any(edge in later and (edge not in sources or sources[edge].kind == "root") for edge in segment.stops):
            named = ", ".join(f"`{item.label}`" for item in forward.roots)
            raise RunEagerly("outputs-without-common-base", outputs=named)
        later.difference_update(segment.entries)
    return sources, divided


def _view_edges(findings: Findings, roots: Sequence[Returned]) -> dict[Edge, tuple[Source, tuple[int, ...]]]:
    """Return the edges of tensors that autograd or the epilogue makes as views of other tensors.

    These are the outputs that the epilogue makes with view ops, and the inputs whose history autograd regenerates
    because their base was written or their sizes changed. Each edge is mapped to its run-time value, and to the index
    of the root from which this view is made (an empty tuple if the view is made from a tensor that is not a root).
    """
    outputs = findings.outputs
    number = {(item.source, item.index): n for n, item in enumerate(roots)}
    views: dict[Edge, tuple[Source, tuple[int, ...]]] = {}
    for k, item in enumerate(findings.inputs):
        if (item.view_of is not None or item.steps) and item.traced.requires_grad:
            root = number.get((TangentSource.MUTATED_INPUT, k if item.view_of is None else item.view_of))
            if root is None or item.view_of is not None:  # otherwise it is the edge of the root
                views[edge_of(item.traced)] = Source("view", k), () if root is None else (root,)
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
        views.setdefault(edge_of(leaf), (Source("output", info.index), made_from))
    return views


def parent_outputs(outputs: Outputs, inputs: Sequence[TracedInput]) -> dict[int, int]:
    """Return the outputs that the epilogue makes from another output that is a view, for example ``v[0]`` from ``v``.

    The result maps the index of ``v[0]`` among the outputs to the index of ``v``. The gradient of ``v[0]`` then flows
    through ``v``, as in eager.
    """
    infos = outputs.infos
    at = {edge_of(t): i for i, t in reversed(outputs.tensors.items()) if infos[i].views and t.grad_fn is not None}
    through: dict[int, int] = {}
    for i, edge in edges_to_bases(outputs, inputs) if len(at) > 1 else ():
        info, outer = infos[i], infos[at.get(edge, i)]
        alike = info.output_type == outer.output_type or (info.aliases_intermediate and outer.aliases_intermediate)
        if info is not outer and info.views and outer.views and info.base_idx == outer.base_idx and alike:
            count = len(outer.views)
            if count < len(info.views) and info.views[:count] == outer.views:
                through.setdefault(i, outer.index)
    return through


def place_hooks(hooks: Sequence[Hook], sources: Mapping[Edge, Source]) -> list[tuple[Source, Callable[..., Any]]]:
    """Return each hook with the run-time value on which it is registered.

    Hooks that no gradient can reach are left out.
    """
    return [(source, hook.function) for hook in hooks if (source := sources.get(hook.edge)) is not None]


def check_multi_output_views(findings: Findings) -> None:
    """Run eagerly if an output is one of several views from one call, and gradients flow through another of them.

        def f(x):
            v, w = x.unbind(0)
            return v, w.exp()

    In eager, ``v`` and ``w`` share one autograd node. A backward from ``w.exp()`` calls a hook on ``v`` with None. In
    a compiled call, this backward would not run the node of ``v``.
    """
    outputs, inputs = findings.outputs, findings.inputs
    tensors = [*outputs.tensors.values(), *(item.traced for item in inputs)]
    several = {
        tensor.grad_fn
        for i, tensor in outputs.tensors.items()
        if outputs.infos[i].views and tensor.grad_fn is not None and internals.is_one_of_several_views(tensor)
    }
    if several:
        edges = {edge_of(tensor) for tensor in tensors if tensor.grad_fn is not None}
        if any(node in several for node, _ in edges_behind(edges) - edges):
            raise RunEagerly("returns-some-of-several-views")


def edges_to_bases(outputs: Outputs, inputs: Sequence[TracedInput]) -> Iterator[tuple[int, Edge]]:
    """Yield pairs of the index of an output that the epilogue makes with view ops, and an edge.

    Along the edges that are paired with an output, its gradient flows until it reaches an input, a root, or a node with
    several next edges.
    """
    ends = {edge_of(item.traced) for item in inputs if item.traced.requires_grad}
    ends.update(item.edge for item in inputs if item.edge is not None)
    roots = [*(root for _, _, root in outputs.returned), *(root for _, root in outputs.bases)]
    ends.update(edge_of(root) for root in roots if root is not None)
    for i, tensor in outputs.tensors.items():
        edges = next_edges(tensor.grad_fn) if outputs.infos[i].views and tensor.grad_fn is not None else []
        while len(edges) == 1 and edges[0] not in ends:
            yield i, edges[0]
            edges = next_edges(edges[0][0])
