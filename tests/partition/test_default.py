"""The default partitioner: it saves the values that the backward uses and recomputes nothing."""

from __future__ import annotations

import inspect

import torch

import aotlab
from aotlab.ir.fx_graphs import output_args, placeholders
from aotlab.partition.default import default_partition, forward_nodes, is_tangent
from tests.engine_helpers import leaf, record, targets, traced


def joint(function, *args):
    """Trace a joint graph and split it; return all three and the number of forward outputs."""
    f = traced(function, *args)
    module = record(f, "trace").module
    count = record(f, "partition").num_forward_outputs
    forward, backward = default_partition(module, None, num_fwd_outputs=count)
    return module, forward, backward, count


def test_the_parts_compute_what_the_whole_does():
    """The forward and then the backward compute the joint graph's results."""
    module, forward, backward, count = joint(lambda x, w: ((x @ w).sin(), x * 2), leaf(2, 3), leaf(3, 4))
    primals = torch.randn(2, 3), torch.randn(3, 4)
    tangents = torch.randn(2, 4), torch.randn(2, 3)
    whole = module(*primals, *tangents)
    out = forward(*primals)
    gradients = backward(*out[count:], *tangents)
    assert all(torch.equal(a, b) for a, b in zip(out[:count], whole[:count], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(gradients, whole[count:], strict=True))


def test_no_op_is_in_both():
    """No op is computed twice."""
    module, forward, backward, _ = joint(lambda x: x.sin().exp().tanh(), leaf(3))
    assert sorted(targets(forward) + targets(backward)) == sorted(targets(module))
    assert all(n.meta["phase"] == "backward" for n in backward.graph.nodes if n.op == "call_function")


def test_unused_primals_and_none_gradients():
    """The forward takes all primals, and the backward only those that it needs; a missing gradient is None."""
    _, forward, backward, count = joint(lambda x, y, z: x.sin() + y, leaf(2), torch.ones(2), torch.ones(2))
    assert [n.name for n in placeholders(forward.graph)] == ["primals_1", "primals_2", "primals_3"]
    assert [n.name for n in placeholders(backward.graph)] == ["primals_1", "tangents_1"]
    assert [n is None for n in output_args(backward.graph)] == [False, True, True]
    assert len(output_args(forward.graph)) == count + 1


def test_multi_output_ops_stay_together():
    """The items of an op with several results are taken in the forward."""
    _, forward, backward, _ = joint(lambda x: torch.nn.functional.layer_norm(x, (4,)), leaf(2, 4))
    assert "aten.native_layer_norm.default" in targets(forward)
    assert "aten.native_layer_norm.default" not in targets(backward)
    assert not any(
        "getitem" in t and "native_layer_norm_backward" not in str(targets(backward)) for t in targets(backward)
    )


def test_metadata_stays_on_the_nodes():
    """The nodes of both parts keep their metadata: values, lines and phases."""
    module, forward, backward, _ = joint(lambda x: x.sin(), leaf(2))
    for part in (forward, backward):
        for node in part.graph.nodes:
            if node.op != "output":
                assert isinstance(node.meta["val"], torch.Tensor)
    assert module.graph is not forward.graph


def test_is_tangent():
    """Tangents are recognized by their name."""
    module, *_ = joint(lambda x: x.sin(), leaf(2))
    assert [is_tangent(n) for n in placeholders(module.graph)] == [False, True]
    needed = forward_nodes(module.graph, output_args(module.graph)[:1])
    assert {n.name for n in needed} == {"primals_1", "sin"}


def test_signature_is_upstreams():
    """Our partitioner and upstream's have the same parameters, so that each can replace the other."""
    from torch._functorch.partitioners import default_partition as upstream

    ours, theirs = (inspect.signature(f).parameters for f in (default_partition, upstream))
    assert list(ours) == list(theirs)
    assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]
    assert aotlab.default_partition is default_partition
