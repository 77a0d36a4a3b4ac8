"""The recorder: the ops and values that it records, the programs that it refuses, and the graphs from its tape."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn

from aotlab._torch import FakeTensorMode
from aotlab.errors import (
    CapturedTensorError,
    DataDependentError,
    GraphInvariantError,
    HigherOrderOpError,
    SubclassError,
)
from aotlab.guards.user_code import user_line
from aotlab.ir.fx_graphs import line_of
from aotlab.trace.recorder import Recorder, running
from aotlab.trace.tape import Tape, Untraceable, tensors_in
from aotlab.trace.write_calls import overlaps_itself
from tests.both_ways import BOTH, Case, check_behind_dynamo, check_direct
from tests.engine_helpers import compiled, leaf, record, refusing, same, targets, traced


class Recording:
    """A tape with a recorder over plain fake tensors, without functionalization and autograd."""

    def __init__(self, decompositions=None):
        self.mode = FakeTensorMode(static_shapes=True)
        self.tape = Tape()
        self.recorder = Recorder(self.tape, self.mode, decompositions)

    def enter(self, real):
        return self.tape.enter(self.mode.from_tensor(real, static_shapes=True))

    def ops(self):
        return [str(operation.target) for operation in self.tape.operations]


# --- the tape ----------------------------------------------------------------------------------------------------


def test_ops_are_recorded_in_order():
    """Each op with its arguments, result, phase and the user's line; fakes are never computed with."""
    recording = Recording()
    x = recording.enter(torch.ones(2, 3))
    with recording.recorder:
        y = x.mul(2)
        z = y.t()
    assert recording.ops() == ["aten.mul.Tensor", "aten.t.default"]
    first, second = recording.tape.operations
    assert first.result is y
    assert second.args[0] is y
    assert (first.phase, first.index, second.index) == ("forward", 0, 1)
    assert first.code_position().code == "y = x.mul(2)"
    assert recording.tape.producer(z) == (second, ())
    assert recording.tape.producer(x) is None
    assert recording.tape.knows(z)
    assert not recording.tape.knows(torch.ones(1))


def test_graph_from_the_tape():
    """The graph has just the ops that its outputs need, and computes with real tensors."""
    recording = Recording()
    x, y = recording.enter(torch.ones(3)), recording.enter(torch.ones(3))
    with recording.recorder:
        product = x * y
        x.exp()
        total = product.sum()
    module = recording.tape.graph("Example", [("a", x), ("b", y)], [total, None, product])
    assert targets(module) == ["aten.mul.Tensor", "aten.sum.default"]
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    out = module(a, b)
    assert out[0].item() == 32.0
    assert out[1] is None
    assert torch.equal(out[2], a * b)


def test_graphs_may_begin_in_the_middle():
    """Any value of the tape can be a placeholder: what leads to it is left out."""
    recording = Recording()
    x = recording.enter(torch.ones(3))
    with recording.recorder:
        y = x.sin()
        z = y.cos()
    module = recording.tape.graph("Half", [("y", y)], [z])
    assert targets(module) == ["aten.cos.default"]
    with pytest.raises(GraphInvariantError, match="not among its inputs"):
        recording.tape.graph("Missing", [], [z])


def test_multi_output_ops():
    """Results of ops with several outputs are reached by getitem."""
    recording = Recording()
    x = recording.enter(torch.arange(6.0).reshape(2, 3))
    with recording.recorder:
        values, indices = torch.ops.aten.topk.default(x, 2)
        parts = torch.ops.aten.unbind.int(x)
    module = recording.tape.graph("Example", [("x", x)], [indices, values, parts[1]])
    real = torch.arange(6.0).reshape(2, 3)
    out = module(real)
    assert torch.equal(out[0], real.topk(2).indices)
    assert torch.equal(out[2], real[1])


def test_python_data_becomes_a_constant():
    """A tensor that the function makes from Python data becomes an attribute.

    Each graph holds the attributes it uses.
    """
    f = traced(lambda x: x * torch.tensor([1.0, 2.0]), torch.ones(2))
    module = record(f, "trace").module
    assert [n.op for n in module.graph.nodes if n.op == "get_attr"] == ["get_attr"]
    assert torch.equal(module(torch.ones(2))[0], torch.tensor([1.0, 2.0]))


def test_nested_arguments():
    """Lists of tensors as arguments, and optional tensors among them."""
    same(lambda x, y: torch.cat([x, y, x]), leaf(2), leaf(2))
    same(lambda x: x[torch.tensor([1, 0]), :, None], leaf(2, 3))
    same(lambda x: torch.stack([x, x * 2]).index_put((torch.tensor([0]),), x), leaf(3))


def test_tensors_in():
    """Tensors are found in lists, tuples and dictionaries."""
    a, b, c = torch.ones(1), torch.ones(1), torch.ones(1)
    found = tensors_in(([a, 3], (b, None), {"k": c}))
    assert [id(t) for t in found] == [id(a), id(b), id(c)]


def test_overlaps_itself():
    """Expanded tensors do; a size of one does not matter."""
    assert overlaps_itself(torch.ones(1).expand(3))
    assert not overlaps_itself(torch.ones(1).expand(1))
    assert not overlaps_itself(torch.ones(2, 3).t())


# --- decompositions ----------------------------------------------------------------------------------------------


def test_decompositions_are_recorded_instead():
    """A replaced op leaves its parts; one that declines stays."""
    table = {
        torch.ops.aten.silu.default: lambda x: x * torch.sigmoid(x),
        torch.ops.aten.sin.default: lambda x: NotImplemented,
    }
    recording = Recording(table)
    x = recording.enter(torch.ones(3))
    with recording.recorder:
        torch.ops.aten.silu.default(x)
        torch.ops.aten.sin.default(x)
    assert recording.ops() == ["aten.sigmoid.default", "aten.mul.Tensor", "aten.sin.default"]


def test_composite_ops_are_taken_apart():
    """Ops that are defined by others do not reach the graph."""
    ops = targets(
        record(
            traced(lambda x, w: torch.nn.functional.linear(x, w), torch.ones(2, 3), torch.ones(4, 3)), "trace"
        ).module
    )
    assert "aten.linear.default" not in ops
    assert "aten.mm.default" in ops


@pytest.mark.parametrize(
    "name",
    [
        "silu", "gelu", "mish", "softplus", "hardswish", "hardsigmoid", "elu", "selu", "celu", "glu", "logsigmoid",
        "leaky_relu", "softshrink", "hardtanh", "relu6", "tanhshrink", "softsign", "normalize",
    ],
)  # fmt: skip
def test_activations(name):
    """Activations for which eager has a fused kernel equal eager's bit for bit, although a decomposition exists."""
    function = getattr(torch.nn.functional, name)
    same(lambda x: function(x), leaf(4, 4))
    same(lambda x: function(x), torch.randn(4, 4))


@pytest.mark.parametrize(
    "loss",
    ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss"],
)
def test_losses(loss):
    """Losses are eager's to the bit."""
    function = getattr(torch.nn.functional, loss)
    same(lambda x, y: function(x, y), leaf(4, 3), torch.rand(4, 3))


def test_layers():
    """Convolution, pooling, embedding, recurrent cells, normalisation, attention, cross entropy."""
    torch.manual_seed(0)
    same(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.GroupNorm(3, 3), nn.SiLU(), nn.MaxPool2d(2)), leaf(1, 2, 6, 6))
    same(nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)), torch.tensor([[0, 4], [2, 2]]))
    same(nn.GRUCell(3, 4), leaf(2, 3), leaf(2, 4))
    same(nn.LSTMCell(3, 4), leaf(2, 3))
    same(nn.AvgPool1d(2), leaf(1, 2, 6))
    same(nn.ConvTranspose1d(2, 3, 3), leaf(1, 2, 5))
    same(nn.Bilinear(3, 3, 2), leaf(2, 3), leaf(2, 3))
    same(nn.CrossEntropyLoss(label_smoothing=0.1), leaf(4, 3), torch.tensor([0, 2, 1, 1]))
    same(nn.Upsample(scale_factor=2, mode="bilinear"), leaf(1, 1, 3, 3))
    same(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
        leaf(1, 2, 4, 8), leaf(1, 2, 4, 8, seed=1), leaf(1, 2, 4, 8, seed=2),
    )  # fmt: skip


def test_attention_modules():
    """Attention over three inputs, with and without weights returned; a whole small transformer."""
    torch.manual_seed(0)
    same(nn.MultiheadAttention(4, 2, batch_first=True), leaf(1, 3, 4), leaf(1, 3, 4, seed=1), leaf(1, 3, 4, seed=2))
    same(nn.MultiheadAttention(4, 2).eval(), torch.randn(3, 1, 4), torch.randn(3, 1, 4), torch.randn(3, 1, 4))
    same(nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), leaf(1, 3, 8), leaf(1, 2, 8))


def test_recurrent_layers():
    """LSTM and GRU modules work, although they also store their parameters in a flat list."""
    torch.manual_seed(0)
    lstm, x = nn.LSTM(3, 4, num_layers=2, batch_first=True), leaf(2, 5, 3)
    with torch.no_grad():
        same(lstm, x)
    same(lstm, x)  # by oneDNN's LSTM, which needs grad mode at run time
    same(nn.LSTM(3, 4, num_layers=2, bidirectional=True, proj_size=2).eval(), x.detach())
    same(nn.LSTM(3, 4, num_layers=2, bidirectional=True).eval(), x)
    same(nn.GRU(3, 4), leaf(5, 2, 3))
    same(nn.RNN(3, 4).eval(), torch.randn(5, 2, 3))


# --- remembered metadata -----------------------------------------------------------------------------------------


def test_repeated_ops_have_values_of_their_own():
    """An op that is recorded again on the same kind of tensors has new results with the right metadata."""
    recording = Recording()
    x = recording.enter(torch.ones(2, 3).t())
    with recording.recorder:
        results = [x.mul(2) for _ in range(3)]
        pairs = [torch.ops.aten.topk.default(x, 1, 0) for _ in range(2)]
    assert len({id(r) for r in results}) == 3
    assert {r.stride() for r in results} == {(x * 2).stride()}
    assert len({r.untyped_storage()._cdata for r in results}) == 3
    assert type(pairs[0]) is type(pairs[1])
    assert pairs[0][1].dtype == pairs[1][1].dtype == torch.int64
    assert pairs[0][0] is not pairs[1][0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda x: x.mul(1), lambda x: x.mul(1.0)),
        (lambda x: torch.add(x, 1), lambda x: torch.add(x, True)),
        (lambda x: x.sum(0, keepdim=False), lambda x: x.sum(0, keepdim=True)),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: x.to(torch.float64), lambda x: x.to(torch.float16)),
        (lambda x: torch.full((2,), 1), lambda x: torch.full((2,), 1.0)),
        (lambda x: torch.full((2,), 1), lambda x: torch.full((2,), True)),
        (lambda x: torch.arange(3), lambda x: torch.arange(3.0)),
        (lambda x: x.clone(), lambda x: x.t().clone()),
        (lambda x: x.clone(), lambda x: x.clone(memory_format=torch.contiguous_format)),
        (lambda x: x.t().clone(), lambda x: x.t().clone(memory_format=torch.contiguous_format)),
        (lambda x: x.view(-1).sin(), lambda x: x.view(-1)[1:].sin()),
        (lambda x: x * x, lambda x: x * x.t().contiguous().t()),
        (lambda x: x * torch.tensor(2), lambda x: x * torch.tensor([[2]])),
        (
            lambda x: x * torch.tensor(2.0, dtype=torch.float64),
            lambda x: x * torch.full((3, 3), 2.0, dtype=torch.float64),
        ),
        (lambda x: x.expand(2, 3, 3) * 1, lambda x: x.repeat(2, 1, 1) * 1),
        (lambda x: x.unbind(0)[0], lambda x: x.unbind(1)[0]),
        (lambda x: x.contiguous(), lambda x: x.t().contiguous()),
        (
            lambda x: torch.ops.aten.to.dtype(x, torch.float32),
            lambda x: torch.ops.aten.to.dtype(x, torch.float32, False, True),
        ),
        (lambda x: x.reshape(9), lambda x: x.t().reshape(9)),
        (lambda x: x.int() * 1, lambda x: x.int() * 1.5),
        (lambda x: x.split(1), lambda x: x.split(2)),
    ],
)
def test_remembered_metadata_tells_apart_what_differs(first, second):
    """Two ops that are alike but for an argument's type, a layout or a flag, one after the other, both orders."""
    same(lambda x: (first(x), second(x), first(x)), leaf(3, 3))
    same(lambda x: (second(x), first(x), second(x)), torch.randn(3, 3))


def described(tensor, argument):
    """Describe a fake result: all that later ops could depend on."""
    return (
        tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset(), tensor.is_conj(),
        tensor.is_neg(), tensor.untyped_storage().nbytes(),
        tensor.untyped_storage()._cdata == argument.untyped_storage()._cdata,
    )  # fmt: skip


ATEN = torch.ops.aten
REPEATED = {
    "bool or int": (lambda x: ATEN.add.Tensor(x, 1), lambda x: ATEN.add.Tensor(x, True), torch.tensor([True, False])),
    "int or float": (lambda x: ATEN.mul.Tensor(x, 2), lambda x: ATEN.mul.Tensor(x, 2.0), torch.arange(3)),
    "strides": (lambda x: ATEN.clone.default(x), lambda x: ATEN.clone.default(ATEN.t.default(x)), torch.ones(3, 3)),
    "strides of views": (lambda x: ATEN.view.default(x, [9]), lambda x: ATEN.unsqueeze.default(x, 0), torch.ones(3, 3)),
    "offsets": (
        lambda x: ATEN.slice.Tensor(ATEN.select.int(x, 0, 0), 0, 1, 3),
        lambda x: ATEN.slice.Tensor(ATEN.select.int(x, 0, 1), 0, 1, 3),
        torch.ones(3, 3),
    ),
    "which item": (lambda x: ATEN.select.int(x, 0, 0), lambda x: ATEN.select.int(x, 0, 2), torch.ones(3, 3)),
    "keepdim": (
        lambda x: ATEN.sum.dim_IntList(x, [0]),
        lambda x: ATEN.sum.dim_IntList(x, [0], True),
        torch.ones(3, 3),
    ),
    "dtype": (
        lambda x: ATEN._to_copy.default(x, dtype=torch.float64),
        lambda x: ATEN._to_copy.default(x, dtype=torch.int8),
        torch.ones(3),
    ),
    "conjugate": (
        lambda x: ATEN._conj.default(x),
        lambda x: ATEN._conj.default(x),
        torch.ones(3, dtype=torch.complex64),
    ),
    "resolved or not": (
        lambda x: ATEN.resolve_conj.default(x),
        lambda x: ATEN.resolve_conj.default(ATEN._conj.default(x)),
        torch.ones(3, dtype=torch.complex64),
    ),
    "clone of a conjugate": (
        lambda x: ATEN.clone.default(x),
        lambda x: ATEN.clone.default(ATEN._conj.default(x)),
        torch.ones(3, dtype=torch.complex64),
    ),
    "negative": (
        lambda x: ATEN._neg_view.default(x),
        lambda x: ATEN._neg_view.default(x),
        torch.ones(3),
    ),
    "expanded": (lambda x: ATEN.expand.default(x, [2, 3]), lambda x: ATEN.expand.default(x, [4, 3]), torch.ones(1, 3)),
    "as_strided": (
        lambda x: ATEN.as_strided.default(x, [2], [1], 0),
        lambda x: ATEN.as_strided.default(x, [2], [1], 1),
        torch.ones(4),
    ),
    "memory format": (
        lambda x: ATEN.clone.default(x),
        lambda x: ATEN.clone.default(x, memory_format=torch.contiguous_format),
        torch.ones(3, 2).t(),
    ),
    "dtype view": (lambda x: ATEN.view.dtype(x, torch.int32), lambda x: ATEN.view.dtype(x, torch.int16), torch.ones(4)),
}


@pytest.mark.parametrize("name", REPEATED)
def test_remembered_metadata_is_what_a_kernel_says(name):
    """The second of two like ops, and the second when repeated, is described as if nothing were remembered."""
    first, second, real = REPEATED[name]
    fresh = Recording()
    x = fresh.enter(real)
    with fresh.recorder:
        expected = described(second(x), x)
    recording = Recording()
    x = recording.enter(real)
    y = recording.enter(real.clone(memory_format=torch.preserve_format))
    with recording.recorder:
        first(x)
        first(y)
        results = [(second(x), x), (second(y), y), (second(x), x)]
    assert [described(*result) for result in results] == [expected] * 3
    assert len({id(result) for result, _ in results}) == 3


def test_complex_programs():
    """Conjugates and complex gradients, with ops that are repeated."""

    def f(x, y):
        a, b = x.conj(), (x * y).conj()
        return (
            (a * b).real,
            (b @ a).abs(),
            (x.conj() * y).resolve_conj(),
            torch.view_as_real(a * y.conj()),
            (x - y).angle(),
        )

    x, y = (torch.randn(3, dtype=torch.complex64).requires_grad_() for _ in range(2))
    same(f, x, y)
    same(f, x.detach(), y.detach())


def test_remembered_metadata_and_settings():
    """The default dtype inside the function is part of what is remembered."""

    def f(x):
        a = torch.ones(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            b = x @ x
        c = x @ x
        with torch.autocast("cpu", dtype=torch.float16):
            d = x @ x
        return a, b, c, d

    same(f, leaf(2, 2))


def test_remembered_metadata_of_aliasing_results():
    """Ops whose results alias their arguments, or each other, are aliases every time."""

    def f(x):
        y = x * 2
        z = x * 2
        return y.t(), y.t(), z.t(), z.view(9), y.detach(), y.split(1)[1], z.split(1)[1]

    same(f, leaf(3, 3))
    same(f, torch.randn(3, 3))


def test_remembered_metadata_of_contiguous_and_no_ops():
    """Ops that return their argument itself when there is nothing to do."""

    def f(x):
        y = x * 2
        return y.contiguous(), y.float(), y.t().contiguous(), y.to(torch.float32), y.reshape(3, 3), y.expand(3, 3)

    same(f, leaf(3, 3))
    same(f, torch.randn(3, 3))


# --- refusals ----------------------------------------------------------------------------------------------------


def test_foreign_tensors_are_refused():
    """A real tensor, a subclass, and a fake of another trace."""
    recording = Recording()
    x = recording.enter(torch.ones(2))
    real, parameter = torch.ones(2), nn.Parameter(torch.ones(2))
    foreign = FakeTensorMode().from_tensor(torch.ones(2))
    with recording.recorder:
        with refusing(CapturedTensorError, match=r"shape \(2,\) that is not an argument"):
            torch.ops.aten.mul.Tensor(x, real)
        with refusing(CapturedTensorError):
            torch.ops.aten.mul.Tensor(x, parameter)
        with pytest.raises(Untraceable, match="the trace did not record"):
            torch.ops.aten.mul.Tensor(x, foreign)
    assert recording.ops() == []


def test_subclasses_inside_are_refused():
    """A captured tensor of a subclass."""

    class Own(torch.Tensor):
        pass

    own = torch.ones(2).as_subclass(Own)
    with refusing((SubclassError, CapturedTensorError)):
        compiled(lambda x: x * own)(torch.ones(2))


def test_data_dependent_ops_are_refused():
    """If Python needs the size, the op and the line are named."""
    with refusing(DataDependentError, match="of the result of `nonzero` depends on the values of `x`") as caught:
        compiled(lambda x: list(x.nonzero()))(torch.ones(2))
    assert caught.value.line.code.startswith("compiled(lambda x: list(x.nonzero()))")
    assert caught.value.suggestion


def test_mutation_that_reaches_the_recorder_is_refused():
    """An op that still writes when it gets here has no rule in functionalization."""
    recording = Recording()
    x = recording.enter(torch.ones(2))
    with recording.recorder, refusing(HigherOrderOpError, match="changes its arguments"):
        torch.ops.aten.add_.Tensor(x, 1)


def test_the_stack_of_recorders_is_empty_afterwards():
    """Whatever happens, no recorder stays active."""
    for program in (lambda x: x * 2, lambda x: x.sum().item(), lambda x: 1 / 0):
        with contextlib.suppress(Exception):  # only the leaked state matters
            compiled(program)(torch.ones(2))
        assert running.recorders == []


# --- places ------------------------------------------------------------------------------------------------------


def test_user_line():
    """The innermost frame that is neither torch's nor the engine's nor the standard library's."""
    line = user_line()
    assert line.file == __file__
    assert line.code == "line = user_line()"
    assert line.function == "test_user_line"


def test_lines_through_library_functions():
    """Ops inside of torch.nn modules are the user's line that called the module."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            y = self.inner(x)
            return y * 2

    f = compiled(Outer())
    f(leaf(1, 2))
    lines = {
        str(n.target).split(".")[1]: line_of(n)
        for n in record(f, "trace").module.graph.nodes
        if n.op == "call_function"
    }
    assert lines["tanh"].code == "y = self.inner(x)"
    assert lines["tanh_backward"].code == "y = self.inner(x)"
    assert lines["mul"].code == "return y * 2"


def test_lines_of_several_files_and_lambdas():
    """Places remember code objects, so that two functions of one line are told apart by name."""

    def inner(x):
        return x.sin()

    def outer(x):
        return inner(x).cos()

    nodes = [n for n in record(traced(outer, torch.ones(1)), "trace").module.graph.nodes if n.op == "call_function"]
    assert [line_of(n).function for n in nodes] == ["inner", "outer"]


def test_traces_are_not_kept_alive_by_places(monkeypatch):
    """Places hold code, not frames: nothing of a call's locals stays."""
    import sys
    import types
    import weakref

    class Big:
        pass

    notes = types.ModuleType("notes")  # guards do not see lookups in `sys.modules`
    notes.seen = seen = []
    monkeypatch.setitem(sys.modules, "notes", notes)

    def f(x):
        big = Big()
        sys.modules["notes"].seen.append(weakref.ref(big))
        return x * 2

    g = compiled(f)
    g(torch.ones(2))
    gc.collect()
    assert [reference() for reference in seen] == [None]
    assert len(g.entries) == 1


def test_stack_traces():
    """Nodes of both halves carry the user's line as text too, where upstream's tools look for it."""

    def f(x):
        return x.sin()

    module = record(traced(f, leaf(3)), "trace").module
    texts = [node.meta["stack_trace"] for node in module.graph.nodes if node.op == "call_function"]
    assert len(texts) == 3
    assert all("test_recorder.py" in text and text.endswith("return x.sin()") for text in texts)


# --- values that have no literal, and marks --------------------------------------------------------------------------


def in_a_block(x):
    """Compute inside of a block that a profiler shows, beside one inside of a checkpoint."""
    with torch.profiler.record_function("outer", "with a text"):
        y = x.sin()
        with torch.profiler.record_function("inner"):
            y = torch.utils.checkpoint.checkpoint(in_blocks_of_a_loop, y, use_reentrant=False)
    return y * 2


def in_blocks_of_a_loop(x):
    """Open a block at each turn of a loop, and leave one by a return."""
    for n in range(3):
        with torch.profiler.record_function(f"turn {n}"):
            x = x.cos() + n
    with torch.profiler.record_function("last"):
        return x.tanh()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mode", BOTH)
@pytest.mark.parametrize("check", [check_direct, check_behind_dynamo])
@pytest.mark.parametrize("function", [in_a_block, in_blocks_of_a_loop])
def test_blocks_of_a_profiler_are_compiled(function, check, mode):
    """A block of `record_function` is compiled, and gives eager's results and gradients."""
    check(Case(program=function), mode)


def test_a_decorator_of_a_profiler():
    """`record_function` as a decorator changes itself at each call; Dynamo captures that."""
    decorated = torch.profiler.record_function("decorated")(lambda x: x.sin() * 2)
    f = compiled(decorated)
    with pytest.warns(RuntimeWarning, match="captured by Dynamo"):
        assert torch.equal(f(torch.ones(3)), torch.ones(3).sin() * 2)


_INF, _NAN = float("inf"), float("nan")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("check", [check_direct, check_behind_dynamo])
@pytest.mark.parametrize("imaginary", [-0.0, 2.0, _INF, -_INF, _NAN])
@pytest.mark.parametrize("real", [0.0, -2.0, _INF, _NAN])
def test_complex_numbers_in_a_graph(real, imaginary, check):
    """A graph multiplies by the very number of the program, also by one of which Python has no literal."""
    check(Case(program=lambda x: x * complex(real, imaginary)), "inference")


def quantized_net():
    """Make a net of layers whose weights are objects of torch's, not tensors."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
    return torch.ao.quantization.quantize_dynamic(net, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*quantize_per_tensor", "ignore:.*script_method")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.tier("full"))])
def test_objects_in_a_graph(backend):
    """A graph holds the packed weights of a quantized layer; weights that come later get another graph."""
    net, other, x = quantized_net(), quantized_net(), torch.ones(2, 3)
    f = compiled(net, backend=backend)
    assert torch.equal(f(x), net(x))
    net[0]._packed_params._packed_params = other[0]._packed_params._packed_params
    assert torch.equal(f(x), net(x))
    net[2].set_weight_bias(*other[2]._weight_bias())
    assert torch.equal(f(x), net(x))
    assert torch.equal(f(x), net(x))
    assert [entry.calls for entry in f.compiled.entries] == [2, 1, 1]
    weights = other[0]._packed_params._packed_params
    same(lambda x: torch.ops.quantized.linear_dynamic(x.sin(), weights) * 2, x)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_an_object_that_is_made_inside_is_not_frozen():
    """An op that packs weights makes a new object at each call: eager runs the function."""
    pack, linear = torch.ops.quantized.linear_prepack_fp16, torch.ops.quantized.linear_dynamic_fp16
    f = compiled(lambda x: linear(x, pack(x, x[0])))
    for x in (torch.ones(2, 2), torch.full((2, 2), 3.0)):
        assert torch.equal(f(x), linear(x, pack(x, x[0])))
    assert f.calls.eager == 2


NO_QUANTIZED_TENSORS = {
    "a custom op": lambda x: torch.ops.aotlab_tests.quantized_scale(x) + 1,
    "a custom op of torch's name": lambda x: torch.ops.aotlab_tests.quantize_per_tensor(x) + 1,
    "integers": lambda x: torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.1, 0, -128, 127, torch.int8) * 2,
    "a fake": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("check", [check_direct, check_behind_dynamo])
@pytest.mark.parametrize("program", NO_QUANTIZED_TENSORS)
def test_an_op_may_be_called_quantized(program, check):
    """An op that is only named after quantized tensors, and makes plain ones, is compiled."""
    import torch.ao.quantization.fx._decomposed  # which defines ops

    with torch.library._scoped_library("aotlab_tests", "DEF") as library:
        for name in ("quantized_scale", "quantize_per_tensor"):
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, lambda x: x * 2, "CompositeExplicitAutograd")
        check(Case(program=NO_QUANTIZED_TENSORS[program]), "inference")
