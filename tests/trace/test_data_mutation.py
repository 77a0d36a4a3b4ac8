"""Writes to inputs, directly and through views: values, gradients, version counters and metadata."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aotlab.ir.metadata import MutationType, TangentSource
from tests.engine_helpers import compiled, leaf, metadata, nonleaf, record, same, targets, traced


def test_mutated_input_without_gradients():
    """An in-place write arrives in the caller's tensor, and its version counter moves."""
    same(lambda x: x.mul_(2).sum(), torch.randn(3))


def test_mutated_input_with_gradient_flow():
    """A written non-leaf continues the autograd graph: values computed from it differentiate through the write."""

    def f(x, y):
        x.mul_(y)
        x.add_(1)
        return x * 2

    same(f, nonleaf(2, 3), leaf(2, 3, seed=1))


def test_mutation_makes_an_input_require_grad():
    """A plain input that is written with a value that requires grad requires grad afterwards."""

    def f(x, w):
        x.copy_(w * 2)
        return (x * x).sum()

    same(f, torch.zeros(3), leaf(3))
    result = traced(f, torch.zeros(3), leaf(3))
    assert metadata(result).input_info[0].requires_grad is False
    assert metadata(result).input_info[0].requires_grad_after is True


def test_mutation_of_a_leaf_under_no_grad():
    """An optimizer's step: a leaf is written under no_grad and stays a leaf."""

    def f(w, g):
        with torch.no_grad():
            w.sub_(g, alpha=0.1)
        return (w * 3).sum()

    same(f, leaf(3), torch.randn(3))


def test_leaf_written_under_no_grad_after_its_use():
    """The gradient uses the value from before the write."""

    def f(w):
        y = w * w.detach().clone()
        with torch.no_grad():
            w.mul_(3)
        return y.sum()

    same(f, leaf(3))


def test_mutation_through_detach():
    """A write through detach() changes the values and is hidden from autograd."""

    def f(x):
        x.detach().mul_(2)
        return x * 3

    same(f, leaf(4))
    same(f, nonleaf(4))
    info = metadata(traced(f, nonleaf(4))).input_info[0]
    assert (info.mutates_data, info.mutations_hidden_from_autograd) == (True, True)
    assert info.mutations_under_no_grad_or_inference_mode is False


def test_mutation_through_data():
    """A write through ``.data`` changes the values, hidden from autograd."""

    def f(x):
        x.data.mul_(2)
        return x * 3

    same(f, leaf(4))
    same(f, nonleaf(4))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1],
        lambda x: x.t(),
        lambda x: x.view(-1)[2:5],
        lambda x: x.unsqueeze(0).transpose(0, 2),
        lambda x: x.diagonal(),
        lambda x: x.unbind(0)[1],
        lambda x: x.narrow(1, 1, 2).select(0, 1),
    ],
    ids=["select", "t", "view-slice", "transposed", "diagonal", "unbind-nograd", "narrow"],
)
def test_mutation_through_views(view, request):
    """A write through a view of an input reaches the input, and gradients do not flow to the overwritten elements."""
    multi_output = "unbind" in request.node.callspec.id

    def f(x):
        part = view(x)
        if multi_output:
            with torch.no_grad():
                part.zero_()
        else:
            part.mul_(5)
        return x.sum(), x * 2

    same(f, torch.randn(2, 3))
    same(f, nonleaf(2, 3))


def test_views_see_mutation_of_their_base():
    """A view taken before a write to its base shows the new values, gradients included."""

    def f(x):
        row = x[0]
        x.mul_(3)
        return row * row

    same(f, torch.randn(2, 3))
    same(f, nonleaf(2, 3))


def test_setitem_with_gradients():
    """Assigning to a slice of an input takes gradients from there and gives them to the value."""

    def f(x, y):
        x[0] = y
        return (x * x).sum()

    same(f, nonleaf(2, 3), leaf(3, seed=1))


def test_input_that_is_a_view():
    """Writing an input that is a window of a larger tensor leaves the rest of that tensor alone."""
    base = leaf(4, 4) * 1
    same(lambda x: x.mul_(2).sum(), base[1:3, 1:3])
    same(lambda x: x.mul_(2).sum(), torch.randn(4, 4)[1:3, 1:3])
    same(lambda x: x.mul_(2), torch.randn(4, 4).t()[::2])


def test_two_inputs_mutated_in_turn():
    """Writes that depend on each other are done in order."""

    def f(x, y):
        x.add_(y)
        y.mul_(x)
        x.sub_(y)

    same(f, nonleaf(3), nonleaf(3, seed=1), eagerly=True)  # its backward raises
    same(f, torch.randn(3), torch.randn(3))


def test_mutated_input_that_is_saved_for_backward():
    """The backward uses the value that the input had when it was used, not the one written later."""

    def f(x, w):
        y = x.clone() * w
        x.mul_(2)
        return y.sum()

    same(f, torch.randn(3), leaf(3))
    x, w = torch.randn(3), leaf(3)
    f_compiled = traced(f, x.clone(), w)
    now = x.clone()
    f_compiled(now, w).backward()
    assert torch.equal(w.grad, x)
    assert torch.equal(now, x * 2)


def test_batch_norm_statistics():
    """Batch norm's running statistics and its counter, which a kernel writes, are written back in training."""
    module = nn.BatchNorm1d(3)
    same(module, torch.randn(5, 3), calls=3)
    module.eval()
    same(module, torch.randn(5, 3), calls=2)


def test_functional_batch_norm_on_plain_inputs():
    """The same for buffers that are plain arguments."""

    def f(x, mean, variance):
        return torch.nn.functional.batch_norm(x, mean, variance, training=True)

    same(f, leaf(5, 3), torch.zeros(3), torch.ones(3))


def test_inplace_on_a_leaf_that_requires_grad_is_eagers_error():
    """Eager's own RuntimeError, with eager's text."""
    same(lambda x: x.add_(1), leaf(3), eagerly=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place operation"):
        compiled(lambda x: x.add_(1))(leaf(3))


def test_is_leaf_inside_the_function():
    """``is_leaf``, ``requires_grad`` and ``grad_fn is None`` inside the function are eager's."""

    def f(a, b, c):
        facts = [(t.is_leaf, t.requires_grad, t.grad_fn is None) for t in (a, b, c, a * 2, c * 2)]
        return a + b + c, facts

    same(f, leaf(2), nonleaf(2), torch.randn(2))


def test_writes_that_change_nothing():
    """A write of nothing to an empty tensor, and a copy of a tensor into itself, are harmless."""

    def f(x, y):
        x.mul_(2)
        y.copy_(y)
        return y * 1

    same(f, torch.empty(0, 3), torch.randn(2))


def test_integers_and_bools_mutate():
    """Tensors of dtypes without gradients are written too."""

    def f(count, flags):
        count.add_(1)
        flags.logical_not_()
        return count * 2

    same(f, torch.arange(3), torch.tensor([True, False]))


def test_mutation_in_inference_mode():
    """Under inference_mode around the call inputs are written."""

    def g(x):
        return x.mul_(2), x.t()

    with torch.inference_mode():
        x = torch.randn(2, 3)
        expected = x * 2
        out, view = compiled(g)(x)
        assert out is x
        assert torch.equal(x, expected)
        assert view.data_ptr() == x.data_ptr()
        assert view.is_inference()


def test_inputs_under_no_grad():
    """Called under no_grad, nothing is differentiated, and mutation of what requires grad is allowed."""

    def f(x):
        x.mul_(2)
        return x + 1, x.t()

    with torch.no_grad():
        for x in (leaf(2, 3), nonleaf(2, 3)):
            same(f, x)
            assert record(traced(f, x), "trace").training is False


def test_mutation_metadata():
    """InputAliasInfo tells plain, hidden and no_grad writes apart, and the one rule says who writes."""

    def f(plain, hidden, quiet, alone):
        plain.mul_(2)
        hidden.detach().mul_(2)
        with torch.no_grad():
            quiet.mul_(2)
        return (plain + hidden + quiet + alone).sum()

    info = metadata(traced(f, nonleaf(2), nonleaf(2), leaf(2), leaf(2))).input_info
    assert [i.name for i in info] == ["plain", "hidden", "quiet", "alone"]
    assert [i.mutates_data for i in info] == [True, True, True, False]
    assert [i.mutations_hidden_from_autograd for i in info] == [False, True, False, False]
    assert [i.mutations_under_no_grad_or_inference_mode for i in info] == [False, False, True, False]
    assert [i.is_leaf for i in info] == [False, False, True, True]
    assert [i.mutation_type for i in info] == [MutationType.MUTATED_OUT_GRAPH] * 3 + [MutationType.NOT_MUTATED]
    meta = metadata(traced(f, nonleaf(2), nonleaf(2), leaf(2), leaf(2)))
    assert meta.tangents[0].source is TangentSource.MUTATED_INPUT
    assert [t.index for t in meta.tangents if t.source is TangentSource.MUTATED_INPUT] == [0]


def test_inference_mutations_stay_in_the_graph():
    """In inference the graph itself writes the input; in training the epilogue writes it."""
    f = traced(lambda x: x.mul_(2).sum(), torch.randn(3))
    assert metadata(f).input_info[0].mutation_type is MutationType.MUTATED_IN_GRAPH
    assert "aten.copy_.default" in targets(record(f, "trace").module)
    g = traced(lambda x: x.mul_(2).sum(), nonleaf(3))
    assert metadata(g).input_info[0].mutation_type is MutationType.MUTATED_OUT_GRAPH
    assert metadata(g).keep_input_mutations is False


def test_inputs_that_overlap_themselves():
    """Writing an expanded input runs eagerly and is eager's error."""
    same(lambda x: x.mul_(2), torch.ones(1).expand(3), eagerly=True)
    same(lambda x: x * 2, torch.ones(1).expand(3))
    same(lambda x: x + x.t(), torch.ones(3, 1).expand(3, 3))


@pytest.mark.parametrize(
    "make",
    [lambda: leaf(2, 3).view(-1), lambda: (leaf(2, 3) * 1).unbind(0)[0]],
    ids=["view of a leaf", "item of unbind"],
)
def test_views_that_may_not_be_written(make):
    """An input that eager would not let be written in place raises eager's error, with eager's effects so far."""

    def f(x, y):
        y.mul_(2)
        x.add_(1)
        return x

    outcomes = []
    for function in (f, compiled(f)):
        x = torch.zeros(3)
        with pytest.raises(RuntimeError) as caught:
            function(x, make())
        outcomes.append((str(caught.value), x.tolist()))
    assert outcomes[0] == outcomes[1]


INPLACE = {
    "copy_": lambda x: x.copy_(x.flip(0)),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([0, 1]), x[1:3] * 2),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 0.5),
    "scatter_": lambda x: x.scatter_(0, torch.tensor([0, 2]), 1.5),
    "clamp_": lambda x: x.clamp_(0, 1),
    "cumsum_": lambda x: x.cumsum_(0),
    "relu_": lambda x: torch.nn.functional.relu_(x),
    "sigmoid_": lambda x: x.sigmoid_(),
    "setitem mask": lambda x: x.__setitem__(x > 0, 0.0),
    "setitem index": lambda x: x.__setitem__([0, 2], x[:2] * 3),
    "addcmul_": lambda x: x.addcmul_(x.detach().clone(), torch.ones(4), value=0.5),
    "lerp_": lambda x: x.lerp_(x * 2, 0.3),
    "pow_": lambda x: x.abs_().add_(1).pow_(2.5),
    "iadd": lambda x: x.__iadd__(x[0] * 1),
    "fill_": lambda x: x.fill_(3.0),
    "zero_": lambda x: x.zero_(),
    "out=": lambda x: torch.mul(x.detach().clone(), 2, out=x) if not x.requires_grad else x.mul_(2),
    "index_put_": lambda x: x.index_put_((torch.tensor([1, 1]),), x[:2] * 1, accumulate=True),
    "swap halves": lambda x: x.copy_(torch.cat([x[2:], x[:2]])),
}


@pytest.mark.parametrize("name", INPLACE)
def test_in_place_ops(name):
    """Every kind of in-place op, with and without gradients, also on a window of something larger."""

    def f(x):
        INPLACE[name](x)
        return x * x

    same(f, nonleaf(4))
    same(f, torch.randn(4))
    # with gaps, a tensor of which there is an alias is written by eager
    same(f, torch.randn(4, 3)[:, 1], eagerly=name == "addcmul_")


def test_in_place_with_partial_overlap():
    """Writing a tensor from another window of itself is eager's error."""
    for write in (lambda x: x.__iadd__(x[0]), lambda x: x.index_put_((torch.tensor([1, 1]),), x[:2])):
        same(lambda x, write=write: write(x), torch.randn(4), eagerly=True)
    same(lambda x: x[:2].add_(x[2:]), torch.randn(4))
    same(lambda x: x.add_(x), torch.randn(4))
