"""Partitioning: the saved values and their reasons, derived backwards, and rules for every partitioner."""

from __future__ import annotations

import torch
from torch import nn

import aotlab
from aotlab.errors import RandomOpError, RefusedError
from aotlab.ir.fx_graphs import output_args, placeholders
from tests.engine_helpers import compiled, leaf, nonleaf, record, refusing, same, targets, traced


def saved(function, *args):
    """Return the saved values of a call."""
    return record(traced(function, *args), "partition").saved


def test_saved_values_and_reasons():
    """Each saved value has its bytes, its users, a reason, and flags for inputs and outputs."""
    values = {s.name: s for s in saved(lambda x, w: (x @ w).sin(), leaf(2, 3), leaf(3, 4))}
    product = values["mm"]
    assert (product.nbytes, product.is_input, product.is_output) == (32, False, False)
    assert product.used_by == ("cos",)
    assert "computed by `mm`" in product.reason
    assert "`cos`" in product.reason
    assert product.line.code.startswith("values = {")
    assert values["primals_1"].is_input
    assert "the input `x`" in values["primals_1"].reason


def test_saved_outputs():
    """An output that the backward uses takes no additional memory."""
    (value,) = saved(lambda x: x.exp(), leaf(3))
    assert (value.is_output, value.is_input) == (True, False)
    assert "an output" in value.reason


def test_nothing_is_saved_without_need():
    """Linear functions save nothing; inference has no backward."""
    assert saved(lambda x: x * 2 + 1, leaf(3)) == ()
    part = record(traced(lambda x: x.sin(), torch.ones(3)), "partition")
    assert (part.saved, part.backward, part.partitioner) == ((), None, "none")


def test_forward_and_backward_fit():
    """The forward's additional outputs match the backward's placeholders before the tangents."""
    part = record(traced(lambda x, y: ((x * y).sin(), (x @ y.t())[0]), leaf(2, 3), leaf(2, 3)), "partition")
    returned = output_args(part.forward.graph)
    count = part.num_forward_outputs
    names = [n.name for n in placeholders(part.backward.graph)]
    assert len(returned) == count + len(part.saved)
    assert [s.name for s in part.saved] == [n.name for n in returned[count:]]
    assert names[: len(part.saved)] == [s.name for s in part.saved]
    assert [n.startswith("tangents_") for n in names] == [False] * len(part.saved) + [True] * (
        len(names) - len(part.saved)
    )


def test_a_view_of_an_input_is_saved_as_the_input():
    """A view of an input is saved as the input, so that its version counter is checked.

    The backward makes the view again.
    """
    part = record(traced(lambda x: x.t().sin(), leaf(2, 3)), "partition")
    assert [(s.name, s.is_input) for s in part.saved] == [("primals_1", True)]
    assert any(t.startswith(("aten.t.", "aten.transpose.", "aten.permute.")) for t in targets(part.backward))
    part = record(traced(lambda x: (x.exp(), x.exp()[0].sin()), leaf(2, 3)), "partition")
    assert all(s.is_input or s.is_output or s.line is not None for s in part.saved)
    same(lambda x: x.t().sin(), leaf(2, 3))
    same(lambda x, w: (x.view(3, 2) @ w.t()[:2]).sin(), leaf(2, 3), leaf(4, 2))


def test_partitions_of_mutated_inputs_save_clones():
    """A partitioner that saves an input which the call overwrites saves a clone."""

    def greedy(joint, inputs, *, num_fwd_outputs, **rest):
        """Save only inputs and recompute everything else."""
        graph = joint.graph
        outputs = output_args(graph)
        primals = [n for n in graph.nodes if n.op == "placeholder" and "tangents" not in n.name]
        tangents = [n for n in graph.nodes if n.op == "placeholder" and "tangents" in n.name]

        def extract(inputs, outputs):
            new = torch.fx.Graph()
            copies = {}
            for node in inputs:
                copies[node] = new.placeholder(node.name)
                copies[node].meta = dict(node.meta)
            for node in graph.nodes:
                if node.op not in ("placeholder", "output") and all(a in copies for a in node.all_input_nodes):
                    copies[node] = new.node_copy(node, lambda n: copies[n])
            new.output(tuple(None if n is None else copies[n] for n in outputs))
            new.eliminate_dead_code()
            return torch.fx.GraphModule(joint, new)

        return (
            extract(primals, [*outputs[:num_fwd_outputs], *primals]),
            extract([*primals, *tangents], outputs[num_fwd_outputs:]),
        )

    def f(x, w):
        y = x.clone() * w
        x.mul_(2)
        return y.sin()

    def make(function):
        return compiled(function, partitioner=greedy)

    for x in (torch.randn(3), nonleaf(3)):
        same(f, x, leaf(3), make=make)
    g = make(f)
    g(torch.randn(3), leaf(3))
    by_name = {s.name: s for s in record(g, "partition").saved}
    assert "a clone of the input `x`, which the call overwrites" in by_name["primals_1"].reason
    assert by_name["primals_1"].is_input is False
    assert by_name["primals_2"].is_input is True


def test_a_random_op_in_the_backward_is_refused():
    """A partitioner that would draw again in the backward is refused."""

    def moves_everything(joint, inputs, *, num_fwd_outputs, **rest):
        forward, backward = aotlab.default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **rest)
        first = next(n for n in backward.graph.nodes if n.op != "placeholder")
        with backward.graph.inserting_before(first):
            node = backward.graph.call_function(torch.ops.aten.rand.default, ([3],))
            node.meta["val"] = None
        next(n for n in backward.graph.nodes if n.op == "output").args = ((node,),)
        return forward, backward

    with refusing(RandomOpError, match="of the forward into the backward"):
        compiled(lambda x: x.sin(), partitioner=moves_everything)(leaf(3))


def test_upstreams_default_partition_in_ours():
    """Upstream's default_partition splits our joint graph, with eager's results."""
    from functorch.compile import default_partition

    def f(x, w):
        x.mul_(2)
        z = (x @ w).sin()
        return x.t(), z[0], z, z.detach()

    def make(function):
        return aotlab.aot_function(function, aotlab.nop, partition_fn=default_partition)

    same(f, nonleaf(2, 3), leaf(3, 4), make=make)
    same(f, nonleaf(2, 3), leaf(3, 4), make=make, backward="each")
    same(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        leaf(2, 5, 8),
        make=lambda m: compiled(m, partitioner=default_partition),
    )


def test_upstreams_min_cut_in_ours():
    """Upstream's min-cut partitioner splits our joint graph; partial backwards are right or refused."""
    from functorch.compile import min_cut_rematerialization_partition

    def f(x, w):
        x.mul_(2)
        z = (x @ w).sin().exp()
        return x.t(), z[0], z

    def make(function):
        return aotlab.aot_function(function, aotlab.nop, partition_fn=min_cut_rematerialization_partition)

    same(f, nonleaf(2, 3), leaf(3, 4), make=make)
    g = make(lambda x: (x.sin().cos().exp(), x.tanh()))
    x = leaf(3)
    out = g(x)
    refused = None
    try:
        out[1].sum().backward()
    except RefusedError as error:
        refused = str(error)
    if refused is not None:
        assert "default_partition" in refused
        assert x.grad is None
    else:
        assert torch.allclose(x.grad, 1 - x.detach().tanh() ** 2)


def test_our_default_partition_in_upstreams():
    """Ours splits upstream's joint graph."""
    from functorch.compile import aot_function, nop

    f = aot_function(lambda x, w: ((x @ w).sin(), x * 2), nop, partition_fn=aotlab.default_partition)
    x, w = leaf(2, 3), leaf(3, 4)
    out = f(x, w)
    (out[0].sum() + out[1].sum()).backward()
    y, v = leaf(2, 3), leaf(3, 4)
    ((y @ v).sin().sum() + (y * 2).sum()).backward()
    assert torch.equal(x.grad, y.grad)
    assert torch.equal(w.grad, v.grad)
