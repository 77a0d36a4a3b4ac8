"""The trace: what one run of a function finds out about mutation, aliasing and gradients.

Semantics are compared with eager on the eager backend, bit for bit, by `tests.engine_helpers.same`.
"""

from __future__ import annotations

import collections
import gc
import inspect
import itertools
import random
import threading
import traceback
from collections import namedtuple

import pytest
import torch
from torch import nn

import aotlab
from aotlab import _torch as internals
from aotlab.errors import (
    CapturedTensorError,
    DataDependentError,
    EscapeError,
    HooksError,
    LeakedTensorError,
    MetadataMutationError,
    OutputError,
    RandomOpError,
    RefusedError,
    UntraceableError,
)
from aotlab.ir.graphs import line_of
from aotlab.ir.metadata import MutationType, OutputType, TangentSource
from aotlab.verification import compare
from tests.engine_helpers import (
    compiled,
    global_torch_state,
    leaf,
    metadata,
    nonleaf,
    record,
    refusing,
    same,
    targets,
    traced,
)
from tests.functions import Viewed

Pair = namedtuple("Pair", ["left", "right"])


# --- C1: data mutation -------------------------------------------------------------------------------------------


def test_mutated_input_without_gradients():
    """An in-place write arrives in the caller's tensor, and its version counter moves."""
    same(lambda x: x.mul_(2).sum(), torch.randn(3))


def test_mutated_input_with_gradient_flow():
    """A written non-leaf continues the autograd graph: what is computed from it later differentiates through."""

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
    """The gradient is that of the value before the write."""

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
    """A write through a view of an input reaches the input, and gradients go around what was overwritten."""
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
    same(f, nonleaf(2, 3), eagerly=True)


def test_setitem_with_gradients():
    """Assigning to a slice of an input takes gradients from there and gives them to the value."""

    def f(x, y):
        x[0] = y
        return (x * x).sum()

    same(f, nonleaf(2, 3), leaf(3, seed=1))


def test_input_that_is_a_view():
    """Writing an input that is a window of a larger tensor leaves the rest of that tensor alone."""
    base = leaf(4, 4) * 1
    same(lambda x: x.mul_(2).sum(), base[1:3, 1:3], eagerly=True)
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
    """Without anything to differentiate the graph itself writes the input (C4's rule), and training never does."""
    f = traced(lambda x: x.mul_(2).sum(), torch.randn(3))
    assert metadata(f).input_info[0].mutation_type is MutationType.MUTATED_IN_GRAPH
    assert "aten.copy_.default" in targets(record(f, "trace").module)
    g = traced(lambda x: x.mul_(2).sum(), nonleaf(3))
    assert metadata(g).input_info[0].mutation_type is MutationType.MUTATED_OUT_GRAPH
    assert metadata(g).keep_input_mutations is False


# --- C5: outputs that are or alias inputs ------------------------------------------------------------------------


def test_output_is_an_input():
    """The caller gets the very object back, mutated or not."""
    same(lambda x: x, leaf(3))
    same(lambda x: x.mul_(2), nonleaf(3))
    same(lambda x, y: (y, x, y), torch.randn(3), leaf(3))
    x = torch.randn(2)
    f = compiled(lambda x: (x, x))
    assert f(x)[0] is x
    assert f(x)[1] is x
    assert [o.output_type for o in metadata(f).output_info] == [OutputType.IS_INPUT] * 2


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x.view(3, 2),
        lambda x: x[1:],
        lambda x: x[:, 1],
        lambda x: x[0, 1],
        lambda x: x.unsqueeze(1).expand(2, 4, 3),
        lambda x: x.permute(1, 0).unsqueeze(-1).squeeze(),
        lambda x: x.diagonal(),
        lambda x: x.as_strided((2, 2), (3, 1), 1),
        lambda x: x.unfold(1, 2, 1),
        lambda x: x.reshape(-1),
        lambda x: x.flatten().narrow(0, 1, 4).view(2, 2),
        lambda x: x.view_as(x),
        lambda x: x.movedim(0, 1),
        lambda x: x.alias() if hasattr(x, "alias") else torch.ops.aten.alias(x),
        lambda x: torch.atleast_3d(x),
    ],
)
def test_views_of_inputs(view):
    """A view of an input comes back as a view of the caller's tensor: storage, offset, strides and gradients."""
    same(lambda x: view(x), torch.randn(2, 3))
    same(lambda x: view(x), leaf(2, 3))
    same(lambda x: (view(x), x * 2), nonleaf(2, 3))


def test_views_of_mutated_inputs():
    """A view of a written input shares its memory, and differentiates through the write."""

    def f(x):
        before = x.t()
        x.mul_(3)
        return before, x[0], x * x

    same(f, nonleaf(2, 3), eagerly=True)
    same(lambda x: f(x)[1:], nonleaf(2, 3))
    same(f, torch.randn(2, 3))


def test_detached_views_of_inputs():
    """A detached alias shares memory and has no gradient."""

    def f(x):
        return x.detach(), x.detach().t(), x.t().detach(), x * 2

    same(f, leaf(2, 3))
    same(f, nonleaf(2, 3))
    same(f, torch.randn(2, 3))


def test_detached_views_may_be_written():
    """A detached view is no view made under no_grad: it may be written afterwards."""

    def f(x):
        y = x * 2
        return x.t().detach(), x.detach()[0], y.detach()[1], y

    def g(x):
        view = x.t().detach()
        x.mul_(2)
        return view, x.detach()[0]

    for function in (f, compiled(f), g, compiled(g)):
        x = nonleaf(2, 3)
        for view in function(x):
            if not view.requires_grad:
                view.mul_(2)
        factor = 4 if function in (f,) or getattr(function, "__wrapped__", None) is f else 8
        assert torch.equal(x.detach()[0, 0], leaf(2, 3).detach()[0, 0] * factor)


def test_views_of_inputs_under_no_grad():
    """A view that was made under no_grad is as eager has it."""

    def f(x):
        with torch.no_grad():
            quiet = x.t()
        return quiet, x * 2

    same(f, leaf(2, 3))
    same(f, nonleaf(2, 3))


def test_views_under_enable_grad_in_a_no_grad_call():
    """Grad mode that the function switches on for a view is on for the view that the caller gets."""

    def f(x):
        with torch.enable_grad():
            loud = x.t()
        return loud, x * 2

    with torch.no_grad():
        same(f, leaf(2, 3))
        same(f, nonleaf(2, 3))


@pytest.mark.parametrize(
    "split", [lambda x: x.unbind(0), lambda x: x.split(1), lambda x: x.chunk(2), lambda x: x.split([1, 1])]
)
def test_multi_output_views_of_inputs(split):
    """unbind, split and chunk give views of the caller's tensor."""
    same(lambda x: split(x), torch.randn(2, 3))
    same(lambda x: split(x), nonleaf(2, 3))
    same(lambda x: (split(x)[1], x * 2), leaf(2, 3))


def test_multi_output_view_may_not_be_written():
    """Writing one of several views is eager's error, also after the call."""
    x = nonleaf(2, 3)
    out = compiled(lambda x: x.unbind(0))(x)
    with pytest.raises(RuntimeError, match="output of a function that returns multiple views"):
        out[0].mul_(2)


def test_dtype_views_of_inputs():
    """A view as another dtype shares the bytes."""
    same(lambda x: x.view(torch.int32), torch.randn(2, 4))
    same(lambda x: x.view(torch.int32)[1:], torch.randn(2, 4))
    same(lambda x: (x.view(torch.int16), x), torch.randn(2, 4))


def test_real_and_complex_views_of_inputs():
    """view_as_real and view_as_complex of an input, gradients included."""
    same(lambda x: torch.view_as_real(x), torch.randn(2, 3, dtype=torch.complex64))
    same(lambda x: torch.view_as_complex(x), leaf(3, 2))
    same(lambda x: torch.view_as_complex(x * 2), leaf(3, 2))
    same(lambda x: x.real, torch.randn(3, dtype=torch.complex64))


def test_lazy_conjugates_are_not_wrong():
    """An output with the conjugate bit is eager's, or refused."""
    x = torch.randn(3, dtype=torch.complex64)
    try:
        out = compiled(lambda x: x.conj())(x)
    except aotlab.errors.RefusedError:
        return
    assert out.is_conj()
    assert torch.equal(out, x.conj())


def test_offset_of_an_input_is_respected():
    """An input that begins inside a storage gives views at the right place, for as_strided too."""
    whole = torch.arange(24.0).reshape(4, 6)
    same(lambda x: (x.t(), x[1:], x.as_strided((2,), (1,), x.storage_offset())), whole[1:3])


def test_output_aliases_two_calls():
    """Every call's view is of that call's input."""
    f = compiled(lambda x: x[1:])
    for _ in range(3):
        x = torch.randn(4)
        assert f(x).data_ptr() == x.data_ptr() + x.element_size()


# --- C6: outputs that alias intermediates ------------------------------------------------------------------------


def test_several_views_of_one_intermediate():
    """Views of one intermediate share one storage, and gradients of all add up."""

    def f(x):
        y = x * 2
        return y.t(), y[0], y.view(-1)[1:]

    same(f, leaf(2, 3))
    same(f, torch.randn(2, 3))
    types = [o.output_type for o in metadata(traced(f, leaf(2, 3))).output_info]
    assert types == [
        OutputType.ALIAS_OF_INTERMEDIATE_SAVE_AS_OUTPUT,
        OutputType.ALIAS_OF_INTERMEDIATE,
        OutputType.ALIAS_OF_INTERMEDIATE,
    ]
    assert len(metadata(traced(f, leaf(2, 3))).intermediate_bases) == 1


def test_base_is_also_returned():
    """Where the intermediate itself is returned, the others are its views and no base is added."""

    def f(x):
        y = x.sin()
        return y[1:], y, y.t()

    same(f, leaf(2, 3))
    same(f, torch.randn(2, 3))
    meta = metadata(traced(f, leaf(2, 3)))
    assert [o.output_type for o in meta.output_info] == [
        OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT,
        OutputType.NON_ALIAS,
        OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT,
    ]
    assert meta.intermediate_bases == ()
    assert [o.base_idx for o in meta.output_info] == [1, None, 1]


@pytest.mark.parametrize("split", [lambda y: y.unbind(0), lambda y: y.split(1), lambda y: y.chunk(2, dim=1)])
def test_multi_output_views_of_intermediates(split):
    """unbind, split and chunk of an intermediate share its storage as in eager."""
    same(lambda x: split(x * 2), leaf(2, 4))
    same(lambda x: split(x * 2), torch.randn(2, 4))
    same(lambda x: (split(x * 2)[0], x), leaf(2, 4))


def test_a_single_view_of_an_intermediate():
    """A lone window keeps its offset and the size of its storage."""
    same(lambda x: (x * 2)[1:], leaf(4))
    same(lambda x: (x * 2)[1:], torch.randn(4))
    same(lambda x: (x * 2).t(), leaf(2, 3))
    same(lambda x: (x * 2).expand(3, 4), leaf(4))


def test_detached_alias_of_an_intermediate():
    """A detached view and the intermediate it came from share memory; only one has a gradient."""

    def f(x):
        y = x * 2
        return y, y.detach(), y.detach()[1:]

    same(f, leaf(4))
    same(lambda x: (x * 2).detach(), leaf(4))
    same(lambda x: ((x * 2).detach(), x * 3), leaf(4))


def test_intermediate_mutated_through_a_view():
    """An intermediate that is written through its view before it is returned has the final values."""

    def f(x):
        y = x.clone()
        y[0].mul_(2)
        y.add_(1)
        view = y.t()
        view[1].add_(1)
        return y, view

    same(f, leaf(2, 3))
    same(f, torch.randn(2, 3))


def test_two_intermediates_stay_apart():
    """Outputs of different storages do not come to share one."""

    def f(x):
        y, z = x * 2, x * 3
        return y[0], z[0], y[1], z[1]

    same(f, leaf(2, 3))
    meta = metadata(traced(f, leaf(2, 3)))
    assert [o.base_idx for o in meta.output_info] == [0, 1, 0, 1]
    assert sum(o.aliases_intermediate for o in meta.output_info) == 4


def test_same_output_twice():
    """The same object in two places of the result is one object again."""

    def f(x):
        y = x * 2
        view = y[0]
        return y, y, {"again": y, "view": view, "view again": view}

    same(f, leaf(2, 3))
    same(lambda x: (x * 2,) * 2, torch.randn(3))


def test_dtype_views_of_intermediates():
    """An intermediate beside its bytes as another dtype."""
    same(lambda x: (x * 2).view(torch.int32), torch.randn(4))

    def f(x):
        y = x * 2
        return y, y.view(torch.int32)

    same(f, torch.randn(4))


def test_unsafe_views():
    """Reshape after a matrix product (``_unsafe_view``) is no alias."""
    same(lambda x, w: x @ w, leaf(2, 3, 4), leaf(4, 5))
    meta = metadata(traced(lambda x, w: x @ w, leaf(2, 3, 4), leaf(4, 5)))
    assert meta.output_info[0].output_type is OutputType.UNSAFE_VIEW_ALIAS


def test_views_made_before_and_returned_after_detach():
    """Aliases of an intermediate with and without history, offsets included."""

    def f(x):
        y = (x * 2).view(-1)
        return y[2:], y.detach()[1:], y[:1].detach()

    same(f, leaf(2, 3))


def test_constants_made_inside():
    """Tensors that do not depend on the arguments are new at every call."""

    def f(x):
        return x + torch.ones(3), torch.zeros(2), torch.arange(4), torch.tensor([1.0, 2.0]), torch.tensor(3)

    same(f, leaf(3))
    made = compiled(f)
    one, two = made(leaf(3)), made(leaf(3))
    one[1].add_(1)
    one[3].add_(1)
    assert torch.equal(two[1], torch.zeros(2))
    assert torch.equal(made(leaf(3))[3], torch.tensor([1.0, 2.0]))


# --- other outputs -----------------------------------------------------------------------------------------------


def test_python_values_and_containers():
    """Python values, None, nested containers and named tuples come back as they are."""

    def f(x):
        y = x * 2
        return {
            "a": [y, None, (1, "text", 2.5)],
            "b": Pair(left=y[0], right=torch.float32),
            "size": x.shape,
            "empty": [],
            "flag": True,
        }

    same(f, leaf(2, 3))
    out = compiled(f)(leaf(2, 3))
    assert isinstance(out["b"], Pair)
    assert isinstance(out["size"], torch.Size)


def test_nothing_is_returned():
    """A function that returns None, or no tensor."""
    same(lambda x: None, torch.randn(2))
    same(lambda x: 3, leaf(2))
    same(lambda: torch.ones(2))
    same(lambda: None)


def test_containers_are_new_at_every_call():
    """A list that the function returns is not the same list the next time."""
    f = compiled(lambda x: [x * 2, [1]])
    first, second = f(torch.ones(1)), f(torch.ones(1))
    first[1].append(2)
    assert second[1] == [1]
    assert f(torch.ones(1))[1] == [1]


def test_objects_are_refused_as_outputs():
    """An output that is neither a tensor, a plain value nor made of such is refused by name."""
    x = torch.ones(2)
    with refusing(OutputError, match=r"`out\[1\]` is a .*iterator"):
        compiled(lambda x: (x.add_(1), iter([x])))(x)
    assert torch.equal(x, torch.ones(2))


def test_outputs_requires_grad_metadata():
    """OutputAliasInfo knows requires_grad, spec and name of each output."""

    def f(x, y):
        return {"a": x * y, "b": (y * 2).detach()}

    info = metadata(traced(f, leaf(2), torch.randn(2))).output_info
    assert [o.name for o in info] == ["out['a']", "out['b']"]
    assert [o.requires_grad for o in info] == [True, False]
    assert [o.spec.shape for o in info] == [(2,), (2,)]


def test_requires_grad_inside():
    """A new tensor that the function makes a leaf is eager's own."""

    def f(x):
        return (x * 2).detach().requires_grad_()

    same(f, torch.randn(3), eagerly=True)


def test_custom_function_outputs():
    """A custom autograd.Function: its own backward is traced, non-differentiable and marked outputs included."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            flags = x > 0
            ctx.mark_non_differentiable(flags)
            return x * 2, flags

        @staticmethod
        def backward(ctx, gradient, _):
            (x,) = ctx.saved_tensors
            return gradient * 2 + x * 0

    same(lambda x: Twice.apply(x * 1), leaf(3))


def test_custom_function_views():
    """A custom Function that returns a view of its input, or writes it, is eager's equal, compiled or not."""

    class View(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view(-1)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.view(2, 3) * 3

    class Write(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    for function, argument in ((View, leaf(2, 3)), (Write, nonleaf(2, 3))):
        for program in (
            lambda x, f=function: f.apply(x),
            lambda x, f=function: f.apply(x * 1).sum(),
            lambda x, f=function: f.apply(x * 1),
            lambda x, f=function: (lambda y: (y, f.apply(y)))(x * 1),
        ):
            assert not compare(program, (argument,), candidate=compiled).differences
        # of a view from before the write, eager makes the history again
        same(lambda x, f=function: (lambda y: (y[0], f.apply(y)))(x * 1), argument, eagerly=True)


def test_views_of_a_custom_function_view_keep_its_backward():
    """Also where the argument is itself a view of another tensor that both have as their base."""
    x = leaf(2, 4)
    for argument in (x[0, 0].expand(2, 4), x.view(-1), x):
        f = traced(lambda x: Viewed.apply(x).view(-1) * 1, argument)
        out = f(argument)
        assert torch.autograd.grad(out.sum(), x)[0].sum() == 16
        with refusing(RefusedError):
            traced(lambda x: Viewed.apply(x).view(-1), argument)


# --- T1: the joint graph -----------------------------------------------------------------------------------------


def test_joint_graph_content():
    """The joint graph takes primals and tangents and returns outputs, then one gradient per primal."""
    f = traced(lambda x, y: x.sin() * y, leaf(2), torch.randn(2))
    module = record(f, "trace").module
    names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    assert names == ["primals_1", "primals_2", "tangents_1"]
    output = next(n for n in module.graph.nodes if n.op == "output").args[0]
    assert len(output) == 3
    assert output[2] is None
    x, y, t = torch.randn(2), torch.randn(2), torch.randn(2)
    out, grad, none = module(x, y, t)
    assert torch.equal(out, x.sin() * y)
    assert torch.equal(grad, t * y * x.cos())
    assert none is None


def test_joint_graph_is_functional_and_has_metadata():
    """No op of a training graph writes anything; all values have ``val`` and ``tensor_meta``."""

    def f(x, y):
        x.mul_(y)
        x[0].add_(1)
        return x.t()

    module = record(traced(f, nonleaf(2, 3), leaf(2, 3)), "trace").module
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    assert calls
    assert not [n for n in calls if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable]
    for node in module.graph.nodes:
        if node.op == "output":
            continue
        assert isinstance(node.meta["val"], torch.Tensor), node
        assert node.meta["tensor_meta"].shape == node.meta["val"].shape
        assert node.meta["tensor_meta"].dtype == node.meta["val"].dtype


def test_user_lines_on_forward_and_backward_nodes():
    """Each node knows the user's line; a node of the backward that of the forward op that it differentiates."""

    def f(x):
        y = x.sin()
        z = y.exp()
        return z.sum()

    module = record(traced(f, leaf(3)), "trace").module
    first = f.__code__.co_firstlineno
    seen = {
        (n.meta["phase"], str(n.target).split(".")[1]): line_of(n).line - first
        for n in module.graph.nodes
        if n.op == "call_function"
    }
    assert seen["forward", "sin"] == 1
    assert seen["forward", "exp"] == 2
    assert seen["forward", "sum"] == 3
    assert seen["backward", "cos"] == 1
    assert seen["backward", "expand"] == 3
    backward = [n for n in module.graph.nodes if n.meta.get("partitioner_tag") == "is_backward"]
    assert {n.meta["phase"] for n in backward} == {"backward"}
    assert all(line_of(n).code for n in backward)


def test_dead_code_is_not_in_the_graph():
    """What nothing uses is left out."""

    def f(x):
        x.exp()
        return x.sin()

    assert targets(record(traced(f, torch.randn(2)), "trace").module) == ["aten.sin.default"]


def test_the_function_runs_once():
    """One compilation runs the user's function once, never twice."""
    runs = threading.Semaphore(0)

    def f(x):
        runs.release()  # counts, and is not seen by the guards: a lock of the standard library's
        return (x * 2).t(), x.mul_(2)

    g = compiled(f)
    g(nonleaf(2, 3))[0].sum().backward()
    g(nonleaf(2, 3))
    assert runs._value == 1


def test_inner_autograd_grad():
    """torch.autograd.grad inside the function is part of the program."""

    def f(x):
        y = (x * x).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return (g * x).sum()

    same(f, leaf(3))
    same(f, nonleaf(3))


def test_checkpoint_inside():
    """torch.utils.checkpoint inside the function recomputes to the same gradients."""
    from torch.utils.checkpoint import checkpoint

    def f(x, w):
        return checkpoint(lambda a, b: (a @ b).sin(), x, w, use_reentrant=False).sum()

    same(f, leaf(2, 3), leaf(3, 4, seed=1))


# --- grad mode and autocast (C12) --------------------------------------------------------------------------------


def test_grad_mode_inside_the_function():
    """no_grad and enable_grad blocks inside the function cut the graph where eager cuts it."""

    def f(x):
        with torch.no_grad():
            a = x * 2
        b = x * a
        with torch.enable_grad():
            c = x * 3
        return a, b, c

    same(f, leaf(3))
    same(f, nonleaf(3))


def test_grad_mode_left_changed():
    """A grad mode that the function leaves behind is left behind by every call."""

    def off(x):
        y = x * 2
        torch.set_grad_enabled(False)
        return y

    same(off, leaf(3))
    f = compiled(off)
    for _ in range(2):
        f(leaf(3))
        assert torch.is_grad_enabled() is False
        torch.set_grad_enabled(True)
    assert metadata(f).grad_enabled_mutation is False

    def on(x):
        torch.set_grad_enabled(True)
        return x * 2, x.t()

    with torch.no_grad():
        same(on, leaf(2, 3))


@pytest.mark.parametrize("around", ["function", "call", "both"])
def test_autocast(around):
    """bfloat16 autocast inside the function, around its call, and both: results and gradients bit for bit."""

    def inner(x, w):
        return (x @ w).sin(), x @ w.detach()

    def f(x, w):
        if around == "call":
            return inner(x, w)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner(x, w)

    if around == "function":
        same(f, leaf(2, 3), leaf(3, 4, seed=1))
        return
    with torch.autocast("cpu", dtype=torch.bfloat16):
        same(f, leaf(2, 3), leaf(3, 4, seed=1))
        out = compiled(f)(leaf(2, 3), leaf(3, 4))
        assert out[0].dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("forward", "backward"), [(True, True), (True, False), (False, False), (False, True)])
def test_backward_inside_and_outside_of_autocast(forward, backward):
    """Wherever the autocast block ends, before or after the backward, gradients are eager's."""

    def f(x, w):
        return (x @ w).sin().sum()

    gradients = []
    for make in (lambda f: f, compiled):
        x, w = leaf(8, 8), leaf(8, 8, seed=1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward):
            out = make(f)(x, w)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward):
            out.backward()
        gradients.append((x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


# --- refusals: before anything was mutated, with argument and line -----------------------------------------------


def line_in(function, text):
    """Return the number of the line of ``function`` that has ``text``."""
    lines, first = inspect.getsourcelines(function)
    return first + next(n for n, line in enumerate(lines) if text in line)


def refused(function, *args, kind, match=None, line=None, argument=None):
    """Assert that the call is refused, that nothing was changed, and that the error says where."""
    state = global_torch_state()
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    before = [(t.detach().clone(), t._version, t.shape, t.stride(), t.grad) for t in tensors]
    f = compiled(function)
    for _ in range(2):
        with refusing(kind, match) as caught:
            f(*args)
    assert type(caught.value) is kind
    for tensor, (value, version, shape, stride, grad) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor.detach(), value)
        assert (tensor.shape, tensor.stride(), tensor.grad) == (shape, stride, grad)
    if line is not None:
        assert caught.value.line is not None, str(caught.value)
        assert caught.value.line.line == line_in(function, line), caught.value.line
        assert caught.value.line.file == __file__
        assert str(caught.value.line) in str(caught.value)
    assert caught.value.argument == argument
    assert global_torch_state() == state
    assert f.entries == ()
    return caught.value


def test_metadata_mutation_by_ops_is_refused():
    """t_ and friends on an input where no function mode gets to see them."""

    def f(y, x):
        y.add_(1)
        with internals.disable_torch_function():
            x.t_()
        return y

    refused(f, torch.ones(2, 3), torch.ones(2, 3), kind=MetadataMutationError, match="`x`", argument="x")


def test_metadata_mutation_by_overloads():
    """Eager takes them."""

    def f(y, x):
        y.add_(1)
        torch.ops.aten.t_.default(x)
        torch.ops.aten.unsqueeze_(x, 0)
        return y

    same(f, torch.ones(2, 3), torch.ones(2, 3), eagerly=True)


def test_metadata_mutation_of_intermediates_is_fine():
    """On an intermediate they are only views."""

    def f(x):
        y = x * 2
        y.t_()
        y.unsqueeze_(0)
        return y, y.squeeze_(0)

    same(f, torch.randn(2, 3))


def test_storage_resize_is_refused():
    """untyped_storage().resize_ of an input."""

    def f(x):
        y = x * 2
        x.untyped_storage().resize_(0)
        return y

    x = torch.ones(3)
    refused(f, x, kind=EscapeError, line="resize_(0)", argument="x")
    assert x.untyped_storage().nbytes() == 12


@pytest.mark.parametrize(
    ("escape", "kind"),
    [
        (lambda y: y.numpy(), EscapeError),
        (lambda y: y.detach().numpy().sum(), EscapeError),
        (lambda y: __import__("numpy").asarray(y), EscapeError),
        (lambda y: __import__("numpy").sin(y.detach()), EscapeError),
        (lambda y: y.data_ptr(), EscapeError),
        (lambda y: torch.utils.dlpack.to_dlpack(y), EscapeError),
        (lambda y: torch.from_dlpack(y), EscapeError),
        (lambda y: y.grad, EscapeError),
        (lambda y: setattr(y, "grad", torch.zeros(3)), EscapeError),
        (lambda y: y._version, EscapeError),
        (lambda y: y.untyped_storage(), EscapeError),
        (lambda y: y.storage().tolist(), EscapeError),
        (lambda y: __import__("copy").deepcopy(y.detach()), EscapeError),
        (lambda y: __import__("pickle").dumps(y.detach()), EscapeError),
        (lambda y: y.tolist(), DataDependentError),
        (lambda y: y.sum().item(), DataDependentError),
        (lambda y: float(y.sum()), DataDependentError),
        (lambda y: int(y.sum()), DataDependentError),
        (lambda y: bool(y.sum() > 0), DataDependentError),
        (lambda y: range(3)[y.sum().long()], DataDependentError),
        (lambda y: str(y), DataDependentError),
        (lambda y: f"{y}", DataDependentError),
        (lambda y: f"{y.sum():.3f}", DataDependentError),
        (lambda y: repr(y), DataDependentError),
        (lambda y: y.nonzero(), DataDependentError),
        (lambda y: y[y > 0], DataDependentError),
        (lambda y: torch.unique(y), DataDependentError),
        (lambda y: torch.equal(y, y * 2), DataDependentError),
        (lambda y: torch.allclose(y, y * 2), DataDependentError),
        (lambda y: 1.0 in y, DataDependentError),
        (lambda y: torch.utils.swap_tensors(y, torch.zeros(3)), EscapeError),
    ],
)
def test_escapes_are_refused(escape, kind):
    """What asks for memory or values of a traced tensor, or writes around the trace, is refused at its line."""

    def f(x, z):
        z.add_(1)
        y = x * 2
        _ = escape(y)
        return y

    x, z = leaf(3), torch.zeros(3)
    with refusing(kind) as caught:
        compiled(f)(x, z)
    assert type(caught.value) is kind
    assert torch.equal(z, torch.zeros(3))
    assert caught.value.line is not None
    assert caught.value.line.file == __file__


@pytest.mark.parametrize(
    "escape", [lambda x: x.numpy(), lambda x: x.data_ptr(), lambda x: x.tolist(), lambda x: str(x)]
)
def test_escapes_of_inputs_are_refused(escape):
    """The same on an input itself, at the exact line."""

    def f(x):
        x.add_(1)
        kept = escape(x)
        return x, kept

    x = torch.zeros(3)
    with refusing((EscapeError, DataDependentError)) as caught:
        compiled(f)(x)
    assert caught.value.line.file == __file__
    assert torch.equal(x, torch.zeros(3))


def test_line_of_an_escape():
    """The error names the line that asked."""

    def f(x):
        y = x * 2
        kept = y.data_ptr()
        return y, kept

    refused(f, torch.ones(2), kind=EscapeError, match="data_ptr", line="kept = y.data_ptr()")


def test_swapping_an_input_is_refused():
    """swap_tensors would swap the traced tensor, not the caller's."""

    def f(x):
        torch.utils.swap_tensors(x, torch.zeros(3))
        return x * 1

    refused(f, torch.ones(3), kind=EscapeError, line="swap_tensors")


def test_backward_inside_is_refused():
    """backward() inside would leave gradients on traced tensors."""

    def f(x):
        (x * x).sum().backward()
        return x * 2

    x = leaf(3)
    refused(f, x, kind=EscapeError, line="backward()")
    assert x.grad is None

    def g(x):
        torch.autograd.backward((x * x).sum())
        return x * 2

    refused(g, x, kind=EscapeError, argument="x")
    assert x.grad is None


CAPTURED = (torch.ones(3),)


def test_captured_tensors_are_refused():
    """A tensor in a tuple cannot be replaced for the trace: what is read would be frozen into the graph."""

    def f(x):
        return x * CAPTURED[0]

    refused(f, torch.ones(3), kind=CapturedTensorError, match="not an argument", line="x * CAPTURED[0]")


def test_mutated_captured_tensors_are_refused():
    """Nor is it written while tracing."""
    total = (torch.zeros(3),)
    (only,) = total

    def f(x):
        total[0].add_(x)
        return x * 2

    def g(x):
        total[0].zero_()
        return x * 2

    def h(x):
        total[0][0] = 1.0
        return x * 2

    def through_a_view(x):
        total[0][1:].mul_(x[1:])
        return x * 2

    def into(x):
        torch.mul(x, 2, out=total[0])
        return x

    only.fill_(5)
    version = only._version
    for each in (f, g, h, through_a_view, into):
        refused(each, torch.ones(3), kind=CapturedTensorError)
        assert (only.tolist(), only._version) == ([5.0, 5.0, 5.0], version)


def test_captured_tensor_as_output():
    """A captured tensor that is returned untouched is that very tensor, as in eager."""
    f = compiled(lambda x: (x * 2, CAPTURED[0]))
    for _ in range(2):
        assert f(torch.ones(3))[1] is CAPTURED[0]


def test_captured_leaf_would_miss_its_gradient():
    """It is refused rather than left without a gradient."""
    weights = (leaf(3),)
    refused(lambda x: (x * weights[0]).sum(), torch.ones(3), kind=CapturedTensorError)


LEAK = None


def test_leak_through_a_global():
    """A traced tensor that is stored in a global is refused, and the global is put back."""

    def f(x):
        global LEAK
        LEAK = x * 2
        return x * 3

    refused(f, torch.ones(2), kind=LeakedTensorError, match="LEAK")
    assert LEAK is None


def test_leak_through_a_closure():
    """The same for a nonlocal variable."""
    kept = 0

    def f(x):
        nonlocal kept
        kept = x * 2
        return x * 3

    refused(f, torch.ones(2), kind=LeakedTensorError, match="kept")
    assert kept == 0


def test_leak_through_a_list_of_a_closure():
    """Appending a traced tensor to a list of the caller's is refused, and the list is as it was."""
    kept = []

    def f(x):
        kept.append(x * 2)
        return x * 3

    refused(f, torch.ones(2), kind=LeakedTensorError)
    assert kept == []


def test_leak_through_a_dict_of_a_global():
    """The same for a dictionary that is a default argument."""

    def f(x, memo={}):  # noqa: B006  # that is the point
        memo["y"] = x * 2
        return x * 3

    refused(f, torch.ones(2), kind=LeakedTensorError)
    assert f.__defaults__ == ({},)


def test_leak_through_a_list_argument():
    """Appending to a list that was passed in is refused, and the list is as it was."""

    def f(x, out):
        out.append(x * 2)
        return x * 3

    given = [torch.ones(1)]
    with refusing(LeakedTensorError):
        compiled(f)(torch.ones(2), given)
    assert len(given) == 1


def test_leak_through_an_attribute_of_an_object():
    """A traced tensor stored on an object that the function reaches by its closure is refused and taken back."""

    class Holder:
        value = None

    holder = Holder()

    def f(x):
        holder.value = x * 2
        return x * 3

    refused(f, torch.ones(2), kind=LeakedTensorError)
    assert holder.value is None


def test_leak_through_a_module_attribute():
    """A module that keeps an activation is refused; its attributes are as before."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.last = None

        def forward(self, x):
            y = self.layer(x)
            self.last = y
            return y

    module = Keeps()
    f = compiled(module)
    with refusing(LeakedTensorError, match="last"):
        f(torch.ones(1, 2))
    assert module.last is None


def test_leak_through_a_list_of_a_module():
    """The same for a list that hangs on a module."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = []

        def forward(self, x):
            self.kept.append(x * 2)
            return x

    module = Keeps()
    with refusing(LeakedTensorError):
        compiled(module)(torch.ones(2))
    assert module.kept == []


def test_leak_through_a_reassigned_buffer():
    """``self.buffer = …`` in a module is refused, and the buffer is the one it was."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count = self.count + 1
            return x * self.count

    module = Counts()
    buffer = module.count
    with refusing(LeakedTensorError, match="count"):
        compiled(module)(torch.ones(2))
    assert module.count is buffer
    assert torch.equal(buffer, torch.zeros(1))


def test_leak_through_an_attribute_of_a_submodule_in_a_function():
    """A function over a module of its closure: what the module keeps is found there too."""

    class Keeps(nn.Module):
        last = None

        def forward(self, x):
            self.last = x * 2
            return x

    module = Keeps()
    with refusing(LeakedTensorError):
        compiled(lambda x: module(x))(torch.ones(2))
    assert module.last is None


def test_attributes_of_arguments():
    """An attribute that the function hangs on its argument is refused; one that was there before can be read."""

    def hangs(x):
        x.note = x * 2
        return x * 3

    x = torch.ones(2)
    refused(hangs, x, kind=LeakedTensorError, match="`note`", argument="x")
    assert not hasattr(x, "note")

    x.factor = 5.0
    assert compiled(lambda x: x * x.factor)(x).tolist() == [5.0, 5.0]


def test_seeding_inside_is_refused():
    """manual_seed inside the function would happen while tracing only; the generator is as it was."""

    def f(x):
        torch.manual_seed(3)
        return x * 2

    state = torch.get_rng_state()
    refused(f, torch.ones(2), kind=RandomOpError, match="seed")
    assert torch.equal(torch.get_rng_state(), state)


def test_random_ops_in_inference():
    """Without gradients random ops draw eager's numbers, and leave the generator where eager leaves it."""

    def f(x):
        return x + torch.rand(3), torch.nn.functional.dropout(x, 0.5), torch.randperm(4), x.bernoulli_(0.3)

    same(f, torch.randn(3), calls=3)


def test_random_ops_in_training():
    """In training they are eager's, or refused; the backward never draws."""

    def f(x):
        return (torch.nn.functional.dropout(x, 0.5) * torch.rand_like(x)).sum()

    try:
        same(f, leaf(64), calls=3)
    except AssertionError as error:
        assert "RandomOp" in str(error)  # noqa: PT017


def test_random_numbers_in_a_backward():
    """A backward that draws draws when it runs, eager's numbers, and leaves the generator where eager does."""

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.rand_like(gradient)

    def run(call):
        x, y = leaf(3), torch.zeros(3)
        torch.manual_seed(0)
        call(x, y)[0].sum().backward()
        return x.grad, y, torch.rand(2)

    def noisy(x, y):
        return Noisy.apply(x), y.add_(1)

    assert all(map(torch.equal, run(noisy), run(compiled(noisy))))


def test_unused_random_ops_still_draw():
    """A random number that nobody uses still moves the generator."""

    def f(x):
        torch.rand(5)
        return x * 2

    same(f, torch.ones(2), calls=3)
    same(f, leaf(2), calls=3)


def test_mutable_custom_ops_are_refused():
    """A custom op that writes its argument is refused, and does not write."""
    with torch.library._scoped_library("aotlab_tests", "FRAGMENT") as library:
        library.define("write(Tensor(a!) x, Tensor y) -> ()")
        library.impl("write", lambda x, y: (x.copy_(y), None)[1], "CPU")
        library.impl("write", lambda x, y: None, "Meta")

        def f(x, y):
            torch.ops.aotlab_tests.write(x, y)
            return x * 2

        x = torch.ones(2)
        with refusing(UntraceableError):
            compiled(f)(x, torch.zeros(2))
        assert torch.equal(x, torch.ones(2))


def test_functional_custom_ops_work():
    """A functional custom op with a Meta kernel and a registered gradient is traced."""

    @torch.library.custom_op("aotlab_tests::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    triple.register_fake(lambda x: torch.empty_like(x))
    triple.register_autograd(lambda ctx, gradient: gradient * 3)
    same(lambda x: triple(x) * 2, leaf(3))
    same(lambda x: triple(x) * 2, torch.randn(3))


def test_global_settings_left_changed():
    """Global settings that a function leaves changed are refused and put back."""

    def f(x):
        torch.set_default_dtype(torch.float64)
        return x * 2

    try:
        with refusing(EscapeError, match="default dtype"):
            compiled(f)(torch.ones(2))
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_overlapping_inputs_that_are_written():
    """Windows of one storage of which one is written: what is written shows in the other."""

    def f(x, y):
        x.mul_(2)
        return x + y

    base = torch.arange(6.0)
    same(f, base[:4], base[2:])
    same(lambda x, y: x + y, base[:4], base[2:])
    same(f, base[:3], base[3:])


def test_inputs_that_overlap_themselves():
    """Writing an expanded input runs eagerly and is eager's error."""
    same(lambda x: x.mul_(2), torch.ones(1).expand(3), eagerly=True)
    same(lambda x: x * 2, torch.ones(1).expand(3))
    same(lambda x: x + x.t(), torch.ones(3, 1).expand(3, 3))


# --- errors of the function itself -------------------------------------------------------------------------------


def test_exceptions_are_eagers():
    """What the function raises is what the caller gets: type, text and attributes."""

    class MineError(Exception):
        pass

    error = MineError("own", 3)

    def f(x):
        if x.shape[0] == 2:
            raise error
        return x * 2

    with pytest.raises(MineError) as caught:
        compiled(f)(torch.ones(2))
    assert caught.value is error
    for bad in (lambda x: x @ torch.ones(7, 7), lambda x: x.view(99), lambda x: x[object()], lambda x: x.nope):
        same(bad, torch.ones(2, 3), eagerly=True)


def test_exceptions_come_with_eagers_partial_effects():
    """What eager wrote before it raised is written, once."""

    def f(x):
        x.add_(1)
        raise ValueError("after the write")

    x = torch.zeros(2)
    g = compiled(f)
    with pytest.raises(ValueError, match="after the write"):
        g(x)
    assert torch.equal(x, torch.ones(2))
    with pytest.raises(ValueError, match="after the write"):
        g(x)
    assert torch.equal(x, torch.full((2,), 2.0))


def test_exceptions_leave_the_state_alone():
    """An error in the function leaves grad mode, autocast, modes and random state as eager would."""

    def f(x):
        torch.rand(3)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            raise ValueError("inside")

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="inside"):
        f(torch.ones(2))
    expected = global_torch_state()
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="inside"):
        compiled(f)(torch.ones(2))
    assert global_torch_state() == expected


def test_traceback_shows_the_users_line():
    """The traceback of such an error ends in the user's function."""

    def f(x):
        return x.view(99)

    try:
        compiled(f)(torch.ones(2))
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        assert "x.view(99)" in [frame.line for frame in frames][-1]


@pytest.mark.parametrize("autocast", [False, True])
def test_traced_tensors_die_with_their_function(autocast):
    """Nothing of a trace outlives the compiled function, autocast's cache of casted weights included."""
    from torch._subclasses.fake_tensor import FakeTensor

    def alive():
        gc.collect()
        return {id(item) for item in gc.get_objects() if issubclass(type(item), FakeTensor)}

    before = alive()  # those of other tests, which may die meanwhile
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        f = compiled(nn.Linear(3, 3))
        f(leaf(2, 3)).float().sum().backward()
        assert alive() - before != set()
        del f
        assert alive() - before == set()


def test_calls_inside_other_traces():
    """A compiled function that is called inside another one becomes part of that one's graph."""
    inner = compiled(lambda x: x.sin())
    f = traced(lambda x: inner(x) * 2, leaf(2))
    assert "aten.sin.default" in targets(record(f, "trace").module)
    same(lambda x: inner(x) * 2, leaf(2))


# --- what took a search to find ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(0.5, False), (0.0, True)], ids=["eval", "p=0"])
def test_dropout_that_does_nothing(arguments):
    """Dropout in eval mode is the identity: the input itself, which a write to the result reaches."""
    same(lambda x: torch.nn.functional.dropout(x, arguments[0], training=arguments[1]), torch.randn(3))
    same(lambda x: torch.nn.functional.dropout(x, arguments[0], training=arguments[1]), leaf(3))
    same(lambda x: torch.nn.functional.dropout(x, arguments[0], training=arguments[1]).add_(1), torch.randn(3))
    same(nn.Sequential(nn.Linear(2, 2), nn.Dropout(arguments[0]).train(arguments[1])), leaf(1, 2))


def test_backward_hooks_are_refused():
    """Hooks that a compiled backward would not run: of modules, and on autograd nodes."""
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        module = nn.Sequential(nn.Linear(2, 2))
        calls = itertools.count()
        getattr(module[0], register)(lambda *args, c=calls: next(c) and None)
        with refusing(HooksError):
            compiled(module)(leaf(1, 2))
        assert next(calls) == 0


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


def test_results_that_are_named_tuples_of_torch():
    """max, sort, topk and decompositions give their own result types."""
    same(lambda x: (x.max(0), x.sort(), torch.linalg.svd(x, full_matrices=False)), leaf(3, 2))
    assert type(compiled(lambda x: x.max(0))(leaf(3, 2))) is torch.return_types.max


def test_memory_formats():
    """channels_last inputs and outputs keep their strides."""
    x = leaf(1, 2, 4, 4).detach().to(memory_format=torch.channels_last).requires_grad_()
    same(lambda x: torch.nn.functional.conv2d(x, torch.ones_like(x[:, :, :1, :1])), x)
    same(lambda x: x.contiguous(memory_format=torch.channels_last) * 2, leaf(2, 2, 4, 4))
    same(lambda x: (x * 2, x.clone(), torch.empty_like(x).zero_()), x)


def test_custom_functions_of_all_styles():
    """once_differentiable, setup_context, needs_input_grad, set_materialize_grads, several outputs, each by itself."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x)
            ctx.needs = ctx.needs_input_grad
            return x * y

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, gradient):
            assert ctx.needs == (True, False)
            return gradient * ctx.saved_tensors[0], None

    class Split(torch.autograd.Function):
        @staticmethod
        def forward(x, factor):
            return x * factor, x + 1

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.factor = inputs[1]
            ctx.set_materialize_grads(False)

        @staticmethod
        def backward(ctx, first, second):
            total = first * ctx.factor if first is not None else 0
            return (total + second if second is not None else total), None

    class Fills(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, first, second):
            return first * 2 + second * 5

    same(lambda x, y: Once.apply(x, y), leaf(3), torch.ones(3))
    for backward in ("all", "first", "each"):
        same(lambda x: Split.apply(x, 3.0), leaf(3), backward=backward)
        same(lambda x: Fills.apply(x), leaf(3), backward=backward)


def test_transforms_inside():
    """torch.func transforms inside the function are part of the program."""
    same(lambda x: torch.func.vmap(lambda row: row.sin() * 2)(x), leaf(2, 3))
    same(lambda x: torch.func.grad(lambda y: (y**2).sum())(x), leaf(3))
    same(lambda x: torch.func.jacrev(lambda y: y**2)(x), leaf(3))
    same(lambda x: torch.func.jvp(lambda y: y**2, (x,), (torch.ones_like(x),)), leaf(3))


def test_containers_that_pytree_knows():
    """OrderedDict, defaultdict and dictionaries with other keys than strings."""
    same(lambda x: collections.OrderedDict(b=x * 1, a=x * 2), leaf(3))
    same(lambda x: collections.defaultdict(list, {"k": [x * 1]}), leaf(3))
    same(lambda x: {1: x * 1, (2, 3): x * 2, None: x}, leaf(3))
    out = compiled(lambda x: collections.deque([x * 1, x]))(torch.ones(1))
    assert type(out) is collections.deque


def test_awkward_plain_results():
    """Plain values whose text does not give them back."""
    same(lambda x: (x, float("inf"), float("nan"), -0.0, 1e300, 1 + 2j), leaf(2))
    same(lambda x, key: {key: x * 2}, leaf(2), 'it\'s "q" \\ \n {0}')
    same(lambda x: (x.device, x.dtype, x.layout, x.ndim, range(3), slice(0, 2), b"x"), leaf(3))


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


def test_generators_are_refused():
    """A random generator of the caller's cannot stand in a graph; it is not moved."""
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()

    def f(x):
        return x + torch.rand(2, generator=generator)

    refused(f, torch.ones(2), kind=RandomOpError, line="generator=generator")
    assert torch.equal(generator.get_state(), state)


def test_python_random_is_refused():
    """Python's own random numbers would be frozen into the graph; their generator is left as it was."""
    random.seed(0)
    state = random.getstate()
    refused(lambda x: x * random.random(), torch.ones(2), kind=RandomOpError)
    assert random.getstate() == state


def test_conjugates():
    """Lazy conjugates and negatives inside the function, returned, resolved, and their parts."""

    def make(grad=False):
        return torch.randn(3, dtype=torch.complex64).requires_grad_(grad)

    same(lambda x: (x.resolve_conj(), x.conj().resolve_conj(), x.conj().resolve_conj()), make())
    same(lambda x: ((x * 2).conj(), (x * 3).conj()), make(grad=True))
    same(lambda x: (x.conj().clone(), (x * 2).conj().clone(), x.clone(), (x * 2).conj().resolve_conj()), make())
    same(lambda x: (x.conj().conj() * 1, (x * 2).conj() * 1, (x * 3).conj() * 1), make())
    same(lambda x: x.conj().mul_(2j), make())
    same(lambda x: x.imag.mul_(2), make())
    same(lambda x: (x.imag, (x * 2).imag), make())
    same(lambda x: ((x * 2).conj().imag * 1, x.conj().imag * 2), make())
    for returned in (lambda x: x.conj().imag, lambda x: (x * 3).conj().imag, lambda x: x.conj().conj()):
        assert not compare(returned, (make(),), candidate=compiled).differences
