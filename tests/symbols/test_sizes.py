"""One compilation for all sizes: programs called with several sizes, beside eager, bit for bit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils import _pytree as pytree

import aotlab
from aotlab import _torch as internals
from aotlab import events
from aotlab._torch.symbolic_sizes import MOST_SYMBOLS
from aotlab.trace import memo

SIZES = (6, 4, 9, 32, 7, 16)


def need(*shape: int) -> Tensor:
    """Make a tensor that requires grad."""
    return torch.randn(*shape, requires_grad=True)


def channels_last(*shape: int) -> Tensor:
    """Make one whose memory is in the order of channels last."""
    return torch.randn(*shape).to(memory_format=torch.channels_last).requires_grad_()


Make = Callable[[int], tuple[Tensor, ...]]

#: A function and what makes its arguments for a size; and how many compilations serve all of `SIZES`.
PROGRAMS: dict[str, tuple[Callable[..., Any], Make, int]] = {
    "matmul": (lambda x, w: (x @ w).relu().sum(), lambda n: (need(n, 4), need(4, 3)), 1),
    "matrices of three dimensions": (
        lambda x, w: functional.linear(x @ w, w, x.new_ones(4)) @ x.transpose(1, 2),
        lambda n: (need(2, n, 4), need(4, 4)),
        1,
    ),
    "a written input": (lambda x: x.add_(1), lambda n: (torch.randn(n, 4),), 1),
    "a written input, a view": (lambda x, y: (x.add_(1), y.t())[1], lambda n: (torch.randn(n, 4), need(n, 2)), 1),
    "a view that is written": (lambda x: (x[1:].mul_(2), x)[1] * 2, lambda n: (torch.randn(n, 4),), 1),
    "mean": (lambda x: x.mean(), lambda n: (need(n, 4),), 1),
    "view": (lambda x: x.view(-1, 2) * 2, lambda n: (need(n, 4),), 1),
    "flatten": (lambda x: x.flatten(), lambda n: (need(n, 4),), 1),
    "a size is returned": (lambda x: (x.sum(), x.shape[0]), lambda n: (need(n, 4),), 1),
    "sizes in what is returned": (lambda x: (x * 2, x.shape, x.size(0) * 2 + 1), lambda n: (need(n, 4),), 1),
    "a size as a number": (lambda x: x * x.shape[0] ** -0.5, lambda n: (need(n, 4),), 1),
    "sizes on the right of numbers": (
        lambda x: (x.sum() * (0.1 * x.shape[0] * 0.2), 0.1 * x.shape[0] * 0.7),
        lambda n: (need(n, 4),),
        1,
    ),
    "upsampling, made flat": (
        lambda x: functional.interpolate(x, scale_factor=(1.5, 0.6), mode="bilinear").flatten(1).sum(1),
        lambda n: (need(2, 3, n, 9),),
        1,
    ),
    "arange": (lambda x: x + torch.arange(x.shape[0])[:, None], lambda n: (need(n, 4),), 1),
    "cat": (lambda x, y: torch.cat([x, y]), lambda n: (need(n, 4), need(n + 3, 4)), 1),
    "expand": (lambda x, b: (x + b.expand(x.shape[0], 4)).exp(), lambda n: (need(n, 4), need(4)), 1),
    "an alias of an intermediate": (lambda x: (x * 2)[1:], lambda n: (need(n, 4),), 1),
    "two that share memory": (lambda x: ((y := x * 2), y.view(-1)), lambda n: (need(n, 4),), 1),
    "two outputs": (lambda x, w: ((x @ w).tanh(), (x * 2).sin()), lambda n: (need(n, 4), need(4, 6)), 1),
    "layer norm": (lambda x: functional.layer_norm(x, (x.shape[-1],)), lambda n: (need(3, n),), 1),
    "batch norm": (
        lambda x, m, v: functional.batch_norm(x, m, v, training=True),
        lambda n: (need(n, 4), torch.zeros(4), torch.ones(4)),
        1,
    ),
    "group norm": (lambda x: functional.group_norm(x, 2), lambda n: (need(n, 4, 5),), 1),
    "attention": (
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v),
        lambda n: (need(2, 2, n, 4), need(2, 2, n, 4), need(2, 2, n, 4)),
        1,
    ),
    "convolution": (
        lambda x, k: functional.conv2d(x, k, padding=1).relu(),
        lambda n: (channels_last(2, 3, n, n), need(4, 3, 3, 3)),
        1,
    ),
    # torch 2.11 asks whether the sizes are even
    "pooling": (
        lambda x: functional.max_pool2d(x, 2),
        lambda n: (need(2, 3, n, n),),
        1 if torch.__version__ >= "2.12" else 2,
    ),
    "upsampling": (
        lambda x: functional.interpolate(functional.interpolate(x, scale_factor=2), scale_factor=1.5, mode="bilinear"),
        lambda n: (channels_last(2, 3, n, n + 1),),
        1,
    ),
    "upsampling by copies": (lambda x: functional.interpolate(x, scale_factor=1.5), lambda n: (need(2, 3, n, 5),), 1),
    "upsampling to the size of another": (
        lambda x, y: functional.interpolate(x, size=y.shape[2:], mode="bicubic") * y,
        lambda n: (need(2, 3, n, 4), need(2, 3, n + 2, 9)),
        1,
    ),
    "cross entropy": (
        lambda x, t: functional.cross_entropy(x, t),
        lambda n: (need(n, 4), torch.arange(n) % 4),
        1,
    ),
    "a mask": (
        lambda x: x.masked_fill(torch.ones(x.shape[0], x.shape[0]).triu(1).bool()[:, :4], 0),
        lambda n: (need(n, 4),),
        2,
    ),
    "a branch on a size": (lambda x: x * 2 if x.shape[0] > 5 else x * 3, lambda n: (need(n, 4),), 2),
    "gather": (lambda x, i: x.gather(0, i), lambda n: (need(n, 4), torch.arange(4 * n).view(n, 4) % n), 1),
    "chunk": (lambda x: x.chunk(2)[0], lambda n: (need(n, 4),), 1),
    "a recurrent cell": (
        lambda x, h, w, v: torch.lstm_cell(x, (h, h.cos()), w, v)[0],
        lambda n: (need(n, 3), need(n, 2), need(8, 3), need(8, 2)),
        1,
    ),
    "sequences of several lengths": (
        lambda x, y: nn.utils.rnn.pad_sequence([x, y.exp()], padding_value=3.0),
        lambda n: (need(n, 2), need(2 * n, 2)),
        1,
    ),
    "cumsum": (lambda x: x.cumsum(0).flip(0), lambda n: (need(n, 4),), 1),
    "reshape of a permutation": (
        lambda x: torch.stack([x, x * 2]).permute(1, 0, 2).reshape(x.shape[0], -1),
        lambda n: (need(n, 4),),
        1,
    ),
    "a gradient inside": (
        lambda x: torch.autograd.grad((x**3).sum(), x, create_graph=True)[0],
        lambda n: (need(n, 4),),
        1,
    ),
    "embedding": (
        lambda i, e: functional.embedding(i, e),
        lambda n: (torch.arange(2 * n).view(2, n) % 7, need(7, 4)),
        1,
    ),
    "every other column": (lambda x: x[:, ::2] * x.numel(), lambda n: (need(n, 8),), 2),
    "the smaller of two sizes": (
        lambda x: torch.arange(x.diagonal().shape[0]) * x.sum(),
        lambda n: (need(n, 5),),
        2,
    ),
    "a size of one": (lambda x, y: (x + y).sum(0), lambda n: (need(n - 3, 4), need(n - 3, 1)), 2),
}


def observed(result: Any, arguments: Sequence[Tensor]) -> list[Any]:
    """Run a backward from all results, and return the observables of the results and of the arguments."""
    leaves = pytree.tree_leaves(result)
    roots = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if roots:
        sum(root.square().sum() for root in roots).backward()
    seen: list[Any] = []
    for leaf in leaves:
        seen.append((leaf.detach().tolist(), leaf.stride()) if isinstance(leaf, Tensor) else leaf)
    return seen + [(a.detach().tolist(), None if a.grad is None else a.grad.tolist()) for a in arguments]


def copies(arguments: Sequence[Tensor]) -> list[Tensor]:
    """Copy arguments."""
    return [each.detach().clone().requires_grad_(each.requires_grad) for each in arguments]


def assert_as_eager(function: Callable[..., Any], compiled: Callable[..., Any], make: Make) -> None:
    """Call both with arguments of all sizes."""
    for n in SIZES:
        torch.manual_seed(n)
        arguments = make(n)
        others = copies(arguments)
        assert observed(function(*arguments), arguments) == observed(compiled(*others), others), n


@pytest.mark.parametrize("partitioner", [aotlab.default_partition, aotlab.min_cut_rematerialization_partition])
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_compilation_serves_all_sizes(name: str, partitioner: Any) -> None:
    """Results, writes and gradients of a compiled call equal eager's, also for sizes that were not traced."""
    function, make, most = PROGRAMS[name]
    compiled = aotlab.compile(function, backend="eager", dynamic=True, partitioner=partitioner)
    assert_as_eager(function, compiled, make)
    assert len(compiled.entries) <= most
    assert compiled.calls.eager == 0


LSTMS = {
    "plain": {},
    "layers": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "dropout": {"num_layers": 2, "dropout": 0.5},
    "no biases": {"num_layers": 2, "bias": False},
    "projections": {"proj_size": 1},
}


OF_BACKENDS = [
    *[(kind, "eager") for kind in LSTMS],  # Inductor's dropout draws other numbers
    *[pytest.param(kind, "inductor", marks=pytest.mark.tier("full")) for kind in ("plain", "layers", "no biases")],
    pytest.param("projections", "inductor", marks=pytest.mark.tier("long")),  # each length is compiled
]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("kind", "backend"), OF_BACKENDS)
def test_lstm(kind: str, backend: str, grad: bool) -> None:
    """Sequences of all lengths are served by one compilation, as eager's kernel computes them."""
    model = nn.LSTM(3, 2, **LSTMS[kind])
    compiled = aotlab.compile(lambda x: model(x)[0].tanh(), backend=backend, dynamic=True)
    for n in SIZES[:3]:
        found = []
        for function in (lambda x: model(x)[0].tanh(), compiled):
            torch.manual_seed(n)
            x = need(n, n + 1, 3)
            with torch.set_grad_enabled(grad):
                y = function(x)
            inputs = [x, *model.parameters()]
            found.append([y, *(torch.autograd.grad(y.square().sum(), inputs) if grad else ())])
        limits = {"rtol": 0, "atol": 0} if backend == "eager" else {}
        torch.testing.assert_close(*found, **limits)
    assert compiled.calls.eager == 0
    assert len(compiled.entries) == 1 or kind == "projections"


@pytest.mark.parametrize("name", PROGRAMS)
def test_behind_dynamo(name: str, fresh_dynamo: None) -> None:
    """So it is with the sizes that Dynamo makes symbols of."""
    function, make, most = PROGRAMS[name]
    compiled = torch.compile(function, backend="aotlab", options={"compiler": "eager"}, dynamic=True)
    finished: list[events.CompileFinished] = []

    def hear(event: events.Event) -> None:
        if isinstance(event, events.CompileFinished):
            finished.append(event)

    with events.listen(hear):
        assert_as_eager(function, compiled, make)
    assert 0 < len(finished) <= most + 2


def test_backwards_of_other_kinds() -> None:
    """Of some results only, and differentiated again, for sizes that were not traced."""

    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w).tanh() * x.shape[0], (x * 2).sin()

    compiled = aotlab.compile(function, backend="eager", dynamic=True)
    for n in SIZES:
        grads = []
        for call in (function, compiled):
            torch.manual_seed(n)
            x, w = need(n, 4), need(4, 6)
            (first,) = torch.autograd.grad(call(x, w)[0].sum(), x, create_graph=True)
            (first.square().sum() + call(x, w)[n % 2].mean()).backward()
            grads.append([each.grad for each in (x, w)])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)), n
    assert len(compiled.entries) <= 2


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_marks(dynamic: bool | None) -> None:
    """A size that the user marks is dynamic from the first call, or always specialized."""
    for mark in (torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic):
        made = aotlab.compile(lambda x: x * 2, backend="eager", dynamic=dynamic)
        for n in SIZES:
            mark(x := torch.ones(n), 0)
            made(x)
        assert len(made.entries) == (len(SIZES) if dynamic is False else 1)
    static = aotlab.compile(lambda x: x * 2, backend="eager", dynamic=dynamic)
    for n in SIZES:
        torch._dynamo.mark_static(x := torch.ones(n), 0)
        static(x)
    assert len(static.entries) == len(SIZES)


def test_large_and_small() -> None:
    """How large gradients are decides nothing: an entry traced for a few numbers serves many, differentiated twice."""
    compiled = aotlab.compile(lambda x: x.sin() * 2, backend="eager", dynamic=True)
    for n in (3, 5000):
        x = need(n, 4)
        for function in (compiled, lambda x: x.sin() * 2):
            (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            assert torch.equal(second, -2 * x.sin())
    assert len(compiled.entries) == 1


def test_many_sizes_share_symbols() -> None:
    """Beyond 16, sizes that are equal in the traced call are one symbol; a call in which they differ is a case."""

    def joined(*tensors: Tensor) -> Tensor:
        return torch.cat(tensors) * 2

    def call(function: Callable[..., Any], sizes: Sequence[int]) -> list[Any]:
        torch.manual_seed(0)
        arguments = [need(n, 3) for n in sizes]
        return observed(function(*arguments), arguments)

    def symbols(function: Any) -> list[int]:
        return [len(re.findall(r"^ +s\d+ = ", entry.source, re.MULTILINE)) for entry in function.entries]

    compiled, count = aotlab.compile(joined, backend="eager"), MOST_SYMBOLS + 1
    alike, others = ([[n, *[n + more] * (count - 1)] for n in (4, 5, 6)] for more in (0, 3))
    for sizes in (*alike, *others, alike[0]):
        assert call(joined, sizes) == call(compiled, sizes), sizes
    assert symbols(compiled) == [2, 1, 0]
    assert "`tensors[1].size(0) == tensors[0].size(0)`" in compiled.recompiles[1]

    few = aotlab.compile(joined, backend="eager")
    for n in (4, 5):
        call(few, [n] * MOST_SYMBOLS)
    assert symbols(few) == [MOST_SYMBOLS, 0]


def test_by_itself() -> None:
    """The second size brings an entry for all sizes of that dimension; the first of another dimension one for both."""
    made = aotlab.compile(lambda x: x.sin().sum(0), backend="eager")
    for shape, entries in (((6, 4), 1), ((9, 4), 2), ((3, 4), 2), ((3, 5), 3), ((7, 8), 3), ((1, 8), 4), ((1, 3), 4)):
        x = torch.randn(*shape)
        assert torch.equal(made(x), x.sin().sum(0))
        assert len(made.entries) == entries, shape


def test_what_was_assumed_is_said() -> None:
    """A call whose sizes fail the guards is compiled with a reason, and the report lists the guards."""
    compiled = aotlab.compile(lambda x, y: (x + y, x.shape[0]), backend="eager", dynamic=True)
    with aotlab.Report.record() as report:
        compiled(torch.randn(6, 4), torch.randn(6, 4))
        compiled(torch.randn(8, 3), torch.randn(8, 3))
        compiled(torch.randn(8, 3), torch.randn(1, 3))
    (reason,) = compiled.recompiles
    assert "y" in reason
    sizes = report.guards[report.guards["kind"] == "size"]["sentence"]
    assert any("`y.size(0) == x.size(0)`" in sentence for sentence in sizes)


def test_what_cannot_be_of_any_size_is_compiled_for_each() -> None:
    """Numbers of values that Python needs run eagerly, as with sizes that stay; `len` is the size of the call."""
    for dynamic in (False, True):
        item = aotlab.compile(lambda x: x * int(x.sum().item()), backend="eager", dynamic=dynamic)
        with pytest.warns(RuntimeWarning, match="needs the value"):
            item(torch.ones(2))
    sliced = aotlab.compile(lambda x: (x * 2, slice(0, x.shape[0])), backend="eager", dynamic=True)
    assert [sliced(torch.ones(n))[1] for n in (3, 5)] == [slice(0, 3), slice(0, 5)]
    counted = aotlab.compile(lambda x: x * len(x), backend="eager", dynamic=True)
    for n in (3, 5):
        assert torch.equal(counted(torch.ones(n)), torch.full((n,), float(n)))
    assert len(counted.entries) == 2


def test_values_that_hang_on_sizes(fresh_dynamo: None) -> None:
    """A program may read values of constants that depend on a size, as Hugging Face's masks do.

    Dynamo captures this for all sizes.
    """

    def function(x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0])
        return x * 2 if torch.compiler.is_compiling() or (positions.diff() == 1).all() else x

    compiled = aotlab.compile(function, backend="eager")
    with pytest.warns(RuntimeWarning, match="is captured by Dynamo"):
        assert_as_eager(function, compiled, lambda n: (need(n, 4),))
    assert (len(compiled.entries), compiled.calls.eager, compiled.calls.by_dynamo) == (1, 0, len(SIZES) - 1)
    for fallback in ("error", "eager"):
        with aotlab.config.patch(fallback=fallback):
            alone = aotlab.compile(function, backend="eager")
            assert_as_eager(function, alone, lambda n: (need(n, 4),))
        assert len(alone.entries) == len(SIZES)
    whole = aotlab.compile(function, backend="eager", fullgraph=True)
    without = aotlab.aot_function(function, aotlab.nop, dynamic=True)
    for each in (whole, without):
        assert_as_eager(function, each, lambda n: (need(n, 4),))
        assert each.calls.eager == each.calls.by_dynamo == 0


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", [
        "matmul", "a written input, a view", "layer norm", "attention", "a size is returned", "a size as a number",
        "upsampling by copies",
    ],
)  # fmt: skip
def test_by_inductor(name: str) -> None:
    """Inductor's kernels serve all sizes."""
    function, make, most = PROGRAMS[name]
    compiled = aotlab.compile(function, dynamic=True)
    for n in SIZES:
        torch.manual_seed(n)
        arguments = make(n)
        others = copies(arguments)
        seen, expected = observed(compiled(*others), others), observed(function(*arguments), arguments)
        torch.testing.assert_close(seen, expected, rtol=1.3e-6, atol=1e-5)  # those of float32
    assert len(compiled.entries) <= most


def strided(*shape: int) -> Tensor:
    """Make every other column of a tensor."""
    return torch.arange(2.0 * math.prod(shape)).view(*shape[:-1], -1)[..., ::2]


#: Programs that were wrong once, what makes an argument of a shape, and the shapes, call by call.
CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], tuple[tuple[tuple[int, ...], ...], ...]]] = {
    "a stride that follows from no size": (
        lambda x: (x.mul_(x.numel()), x.stride())[1],
        strided,
        (((3, 4),), ((5, 4),), ((5, 6),)),
    ),
    "a view of what was written": (
        lambda x: (x.mul_(3), x.view_as(x))[1],
        lambda *shape: torch.ones(shape, requires_grad=True) * 1,
        (((5, 4),), ((6, 4),), ((6, 3),)),
    ),
    "another number of dimensions": (
        lambda x: (x * 2).flatten(),
        torch.ones,
        (((4, 3, 4),), ((4,),), ((3, 3),), ((5, 4, 3),)),
    ),
    "a size of 0 that something is divided by": (
        lambda x: x.flip(0).chunk(2)[-1],
        torch.ones,
        (((5, 4),), ((0, 4),), ((9, 3),), ((1, 4),)),
    ),
    "a size of 0 in a quotient, and under a power": (
        lambda x, y: x * (2 if len(x) / y.shape[0] < 2 and y.shape[0] ** -1 < 1 else 3) if y.shape[0] else x,
        torch.ones,
        (((5,), (4,)), ((5,), (0,)), ((9,), (3,))),
    ),
    "a pad of nothing, which copies": (
        lambda x: torch.nn.functional.pad(x, (0, x.shape[-1] % 2)),
        lambda *shape: torch.ones(shape).t(),
        (((4, 4),), ((5, 4),), ((6, 3),), ((8, 2),)),
    ),
    "as many results as sizes say together": (
        lambda x: x.reshape(-1).unbind()[1],
        strided,
        (((8, 15),), ((6, 24),), ((8, 15),)),
    ),
    "a number from a size that was specialized": (
        lambda x: (x * x.shape[0] ** -0.5).unbind(0)[0],
        torch.ones,
        (((4,),), ((5,),)),
    ),
    "one rule or another": (
        lambda x: x[x.shape[0] // 2 :].permute(2, 0, 1).reshape(x[x.shape[0] // 2 :].shape),
        torch.ones,
        (((3, 4, 4),), ((3, 0, 5),), ((3, 9, 9),), ((4, 5, 5),), ((6, 2, 3),)),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_were_wrong_once(name: str) -> None:
    """Each call equals eager, with every entry that may serve it."""
    function, make, calls = CALLS[name]
    compiled = aotlab.compile(function, backend="eager", dynamic=True)
    for shapes in calls:
        ours, theirs = [make(*shape) for shape in shapes], [make(*shape) for shape in shapes]
        assert observed(compiled(*ours), ours) == observed(function(*theirs), theirs), shapes
    assert compiled.calls.eager == 0


#: A function, whether all sizes vary at once, and the arguments of each call.
MIXED: dict[str, tuple[Callable[..., Any], bool | None, Sequence[tuple[Any, ...]]]] = {
    "fewer dimensions than those that varied": (
        lambda x: x * 2,
        None,
        [(torch.ones(shape),) for shape in ((2, 3, 4), (2, 3, 5), (7,), (), (2, 3, 9))],
    ),
    "a size that became a number, then none": (
        lambda x: x * len(x) if x.dim() else x * 2,
        True,
        [(torch.ones(shape),) for shape in ((5,), (), (4, 3), (6,))],
    ),
    "a number that varies, then none": (
        lambda x, s=None: x if s is None else x * s + (s > 4),
        None,
        [(torch.ones(2), *rest) for rest in ((2,), (3,), (None,), (), (4,), (2.5,), (None,))],
    ),
    "a number that varies, then a tensor": (
        lambda x, s: x * s,
        None,
        [(torch.ones(3), s) for s in (0.5, 0.25, torch.tensor(3.0), torch.ones(3), 4.5, torch.ones(1, 3))],
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_other_kinds_of_arguments_than_those_that_varied(name: str) -> None:
    """An entry's guards on sizes and numbers are checked only for calls that have them."""
    function, dynamic, calls = MIXED[name]
    compiled = aotlab.compile(function, backend="eager", dynamic=dynamic)
    for arguments in calls:
        assert torch.equal(compiled(*arguments), function(*arguments)), arguments
    assert compiled.calls.eager == 0
    assert len(compiled.recompiles) == len(compiled.entries) - 1


def test_what_a_later_backward_assumes() -> None:
    """A size that is specialized when a backward is derived is guarded, because that graph contains the number."""
    sizes = internals.Sizes(["x"], 2)
    fake = sizes.enter(FakeTensorMode(shape_env=sizes.env), 0, torch.ones(5, 4), [0, 1])
    names = [name for _, name, _, _ in sizes.symbols()]
    sizes.guards(lambda position, what, dim: f"{what}_{dim}")
    assert sizes.assumed_since(names) is None
    assert int(fake.shape[0]) == 5
    holds = sizes.assumed_since(names)
    assert holds is not None
    assert (holds(5, 4), holds(5, 7), holds(6, 4)) == (True, True, False)
    assert "size_0 == 5" in [text for text, _ in sizes.guards(lambda position, what, dim: f"{what}_{dim}")]


def _asked(monkeypatch: pytest.MonkeyPatch, layers: int, size: int = 3) -> int:
    """Count the calls into torch's fake mode during the first step of a model with this number of layers."""
    count, call = 0, internals.call_by_fake_mode

    def counting(*args: Any) -> Any:
        nonlocal count
        count += 1
        return call(*args)

    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Softmax(-1)) for _ in range(layers)))
    with monkeypatch.context() as patched:
        patched.setattr(internals, "call_by_fake_mode", counting)
        aotlab.compile(model, backend="eager", dynamic=True)(torch.randn(size, 4)).sum().backward()
    return count


def test_repeated_layers_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op on tensors of sizes that were met before, all the same symbols, does not ask torch's fake again."""
    counts = []
    for layers in (2, 8):
        monkeypatch.setattr(memo, "_cache", (None, {}))
        counts.append(_asked(monkeypatch, layers))
    assert counts[0] == counts[1] > 0


def test_another_trace_knows_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second model of the same layers calls the fake mode only for ops that make a guard, here one.

    For another size, all calls are made again.
    """
    monkeypatch.setattr(memo, "_cache", (None, {}))
    first, second, other_size = _asked(monkeypatch, 1), _asked(monkeypatch, 1), _asked(monkeypatch, 1, size=5)
    assert first > 5 < other_size
    assert second == 1


def _when_divisible(x: Tensor) -> Tensor:
    return x.view(x.size(0) // 4, 4) * 2 if x.size(0) % 4 == 0 else x * 2


def _when_equal(x: Tensor, y: Tensor) -> Tensor:
    return x + y if x.size(0) == y.size(0) else x * 2


def _when_large(x: Tensor) -> Tensor:
    return (x * 2)[5:].shape[0] if x.size(0) > 7 else 3


@pytest.mark.parametrize(
    ("first", "second", "sizes", "others"),
    [
        (_when_divisible, lambda x: x.view(x.size(0) // 4, 4) * 2, (8,), (10,)),
        (_when_equal, lambda x, y: x + y, (4, 4), (4, 6)),
        (_when_equal, lambda x, y: torch.cat([x, y]), (4, 4), (4, 6)),
        (_when_large, lambda x: (x * 2)[5:].shape[0], (8,), (3,)),
    ],
    ids=["divisible", "equal", "of any sizes", "large"],
)
@pytest.mark.parametrize("turn", [1, -1], ids=["assumed first", "assumed last"])
def test_another_trace_assumes_for_itself(
    first: Callable[..., Any], second: Callable[..., Any], sizes: tuple[int, ...], others: tuple[int, ...], turn: int
) -> None:
    """A guard on sizes from one program's trace is added again for another program with the same ops."""
    for function in (first, second)[::turn]:
        compiled = aotlab.compile(function, backend="eager", dynamic=True)
        for chosen in (sizes, others):
            arguments = [torch.randn(n) for n in chosen]
            results = []
            for each in (function, compiled):
                try:
                    results.append(each(*arguments))
                except RuntimeError as error:
                    results.append(str(error))
            assert type(results[0]) is type(results[1])
            assert torch.equal(*results) if isinstance(results[0], Tensor) else results[0] == results[1]
