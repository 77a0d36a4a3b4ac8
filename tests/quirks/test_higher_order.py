"""Ops that take functions: our graphs contain the functions' graphs.

This holds for forward, backward, higher-order derivatives and all sizes.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_over
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_op
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab import events
from tests.engine_helpers import heard_events, leaf

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
layers = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)


def layer_of(number, a):
    """Apply a layer, whose parameters are captured."""
    return layers[number](a.float()).to(a.dtype)


def choose(x, w):
    """Choose by a value, a layer with its parameters captured."""
    y = torch.cond(x.sum() > 0, lambda a: layer_of(0, a).sin(), lambda a: layer_of(1, a) * 2, (x,))
    return torch.cond(y.sum() > 0, lambda a: (a @ w).flatten(), lambda a: (a * w[0]).reshape(-1) + a.size(0), (y,))


def over_rows(x, w):
    """Compute something for each row, with two results of other shapes."""
    return map_over(lambda row, w: ((row @ w).relu(), row.sum()), x, w)


def recurrence(x, w):
    """Carry two values over the rows, and stack each step's results."""

    def step(carried, row):
        state, total = carried
        state = (state + row @ w).tanh()
        return (state, total + state.sum()), (state.sum(), state * total)

    return scan(step, (w[0].clone(), w.new_zeros(())), x)


def written(x, w):
    """Write the results of the steps, which their backward does not need."""
    state, rows = scan(lambda state, row: ((state + row @ w).tanh(), state * 2), w[0].clone(), x)
    state[0] = 5
    return state, rows.add_(1)


def nested(x, w):
    """Choose in each step."""

    def step(state, row):
        state = torch.cond(row.sum() > 0, lambda s, r: s * r, lambda s, r: s - r, (state, row))
        return state, state.sin()

    return scan(step, w[0].clone(), x)


def combine(x, w):
    """Use an associative scan, which decomposes into ordinary ops."""
    return associative_scan(lambda a, b: a * b, x @ w, 0, combine_mode="generic")


def change(x, w):
    """Write a tensor that a branch made, and write an op's result into an argument."""

    def changes(a):
        b = a.clone()
        b.add_(1)
        b[0] = 0
        return b * a

    y = torch.empty_like(x)
    y.copy_(torch.cond(x.sum() > 0, changes, lambda a: a * 2, (x,)))
    return y @ w


def loop(x, w):
    """Repeat until a value says stop."""
    return while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, (a @ w).tanh()), (torch.zeros((), dtype=torch.int64), x + 0)
    )


def again(x, w):
    """Use `cond`, `map` and a loop in checkpoints, one of them nested, so that the backward runs each again."""
    y = checkpoint(choose, x, w, use_reentrant=False).view_as(x)
    y, _ = checkpoint(over_rows, y, w, use_reentrant=False)
    return checkpoint(lambda y: checkpoint(loop, y.cos(), w, use_reentrant=False)[1], y, use_reentrant=False)


def _while(condition, body, carried):
    """Compute the result of `while_loop` with Python's ``while``."""
    while condition(*carried):
        carried = body(*carried)
    return carried


def repeated(x, w, steps, loop=while_loop):
    """Carry two floats and a counter, with captured parameters and sizes; an input is carried as it is."""

    def body(a, i, b):
        return layer_of(0, a).sin() + b, i + 1, (a * b).mean(0) * w[0] + a.size(0) / 9

    return loop(lambda a, i, b: (i < steps) & (a.sum() < 99), body, (x, torch.zeros((), dtype=torch.int64), w[1] * 2))


def repeated_inside(x, w, steps, loop=while_loop):
    """Repeat in each step."""

    def body(i, a):
        _, b = loop(lambda j, b: j < 2, lambda j, b: (j + 1, (b @ w).tanh()), (torch.zeros_like(i), a.sin()))
        return i + 1, b

    return loop(lambda i, a: i < steps, body, (torch.zeros((), dtype=torch.int64), x * 2))


def attend(x, w):
    """Attend with scores of one's own, by a captured bias."""
    q, k = (x.expand(1, 2, -1, -1).contiguous() for _ in range(2))
    return flex_attention(q, k, k * 2, score_mod=lambda score, b, h, i, j: score + w[i % 4, j % 4] * (i - j))


def called(function, size, *, grad, seed=0):
    """Return results, and gradients if wanted."""
    x, w = (leaf(*shape, seed=seed + n).detach().requires_grad_(grad) for n, shape in enumerate([(size, 4), (4, 4)]))
    results = pytree.tree_leaves(function(x, w))
    if not grad:
        return results
    total = sum((each**2).sum() for each in results if each.requires_grad)
    return [*results, *torch.autograd.grad(total, (x, w), allow_unused=True)]


INDUCTOR = pytest.param("inductor", marks=pytest.mark.tier("full"))


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
@pytest.mark.parametrize("program", [choose, over_rows, recurrence, written, nested, combine, change, loop, again])
@pytest.mark.filterwarnings("ignore:.*script_method", "ignore:flex_attention called without")
def test_trained(program, backend):
    """Results and gradients are eager's for four sizes, with two compilations and no eager run."""
    _compare(program, backend, grad=True)


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
@pytest.mark.parametrize("program", [choose, recurrence, loop, attend])
@pytest.mark.filterwarnings("ignore:.*script_method", "ignore:flex_attention called without")
def test_without_gradients(program, backend):
    """Without gradients, results are eager's too, also for loops that end by a value, and for attention on CPUs."""
    _compare(program, backend, grad=False)


def by_steps(x, w):
    """Compute the results of `recurrence` with Python's ``for``."""
    state, total, sums, products = w[0].clone(), w.new_zeros(()), [], []
    for row in x:
        state, before = (state + row @ w).tanh(), total
        total = total + state.sum()
        sums.append(state.sum())
        products.append(state * before)
    return (state, total), (torch.stack(sums), torch.stack(products))


def written_by_steps(x, w):
    """Compute the results of `written` with Python's ``for``."""
    state, rows = w[0].clone(), []
    for row in x:
        rows.append(state * 2)
        state = (state + row @ w).tanh()
    last = state.clone()
    last[0] = 5
    return last, torch.stack(rows) + 1


#: The references for `scan`. The gradients of torch's own `scan` are no reference: its backward multiplies by a stacked
#: copy of ``w.T``, for which some CPUs' kernels round differently than for ``w.T``. In torch 2.11 they are wrong if two
#: values are carried.
REFERENCES = {recurrence: by_steps, written: written_by_steps}


def _compare(program, backend, *, grad):
    reference = REFERENCES.get(program, program)
    compiled = aotlab.compile(program, backend=backend, frontend="dynamo")
    with warnings.catch_warnings(), heard_events() as heard:
        warnings.filterwarnings("error", ".*eagerly")
        for size in (4, 5, 8, 3):
            with nullcontext() if grad else torch.no_grad():
                wanted = called(reference, size, grad=grad)
                found = called(compiled, size, grad=grad)
            if backend == "eager":
                assert all(map(torch.equal, wanted, found)), size
            else:
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    count = sum(isinstance(event, events.CompileFinished) for event in heard)
    assert count == (4 if program is combine else 2)  # the number of steps depends on the size


@pytest.mark.parametrize("backend", ["eager", INDUCTOR])
@pytest.mark.parametrize("program", [repeated, repeated_inside])
@pytest.mark.filterwarnings("ignore:.*script_method")
def test_loops_of_any_number_of_steps(program, backend):
    """Gradients agree with Python's ``while`` for any number of steps, with two compilations.

    This includes zero steps, for which torch returns the gradients of one step.
    """
    compiled = aotlab.compile(program, backend=backend, frontend="dynamo")

    def outcome(function, size, steps, *more):
        x, w = (leaf(*shape, seed=n) for n, shape in enumerate([(size, 4), (4, 4)]))
        results = function(x, w, torch.tensor(steps), *more)
        total = sum((each**2).sum() for each in results if each.requires_grad)
        return [*results, *torch.autograd.grad(total, (x, w, *layers[0].parameters()), materialize_grads=True)]

    with warnings.catch_warnings(), heard_events() as heard:
        warnings.filterwarnings("error", ".*eagerly")
        for size in (4, 5, 6):
            for steps in (3, 0, 1):
                found, wanted = outcome(compiled, size, steps), outcome(program, size, steps, _while)
                assert [each.stride() for each in found] == [each.stride() for each in wanted]
                torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert sum(isinstance(event, events.CompileFinished) for event in heard) == 2


def test_derivatives_of_derivatives_of_loops():
    """A second derivative of a loop raises, because torch's own second derivative is wrong."""

    def program(x):
        return while_loop(lambda a: a.sum() < 9, lambda a: (a * a,), (x,))[0]

    x = torch.full((3,), 1.5).requires_grad_()
    result = aotlab.compile(program, backend="eager", frontend="dynamo")(x)
    (gradient,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, 4 * x**3)
    with pytest.raises(aotlab.errors.DoubleBackwardError, match="no rule for the derivative of `loop_backward`"):
        torch.autograd.grad(gradient.sum(), x)


def test_complex_numbers():
    """Ops with complex numbers are differentiated."""

    def program(x):
        return torch.cond(x.abs().sum() > 0, lambda x: x * x, lambda x: x * 2, (x,))

    compiled = torch.compile(program, backend="aotlab", options={"compiler": "eager"})
    x = torch.complex(leaf(3), leaf(3, seed=1)).detach().requires_grad_()
    assert torch.equal(*(torch.autograd.grad(f(x).abs().sum(), x)[0] for f in (program, compiled)))


def plainly(x, w):
    """Compute the result of `choose` with Python's ``if``."""
    y = layer_of(0, x).sin() if x.sum() > 0 else layer_of(1, x) * 2
    return (y @ w).flatten() if y.sum() > 0 else (y * w[0]).reshape(-1) + y.size(0)


def by_hand(x, w):
    """Compute the results of `over_rows` with Python's ``for``."""
    rows = [((row @ w).relu(), row.sum()) for row in x]
    return torch.stack([row for row, _ in rows]), torch.stack([total for _, total in rows])


@pytest.mark.parametrize(("program", "python"), [(choose, plainly), (over_rows, by_hand), (recurrence, by_steps)])
def test_derivatives_of_derivatives(program, python):
    """Second derivatives agree with plain Python. Torch's own ``cond`` has no second derivative."""

    def second(function):
        x, w = (leaf(4, 4, seed=seed).detach().double().requires_grad_() for seed in range(2))
        total = sum((each**3).sum() for each in pytree.tree_leaves(function(x, w)))
        first = torch.autograd.grad(total, (x, w), create_graph=True)
        return torch.autograd.grad(sum((each**2).sum() for each in first), (x, w))

    torch.testing.assert_close(second(torch.compile(program, backend="aotlab")), second(python))


def test_casts_of_the_forward():
    """A backward that recomputes a value casts it as the forward did."""

    def program(x, w):
        return torch.cond(x.sum() > 9, torch.mm, lambda x, w: (x @ w).sin(), (x, w))

    def outcome(function):
        x, w = leaf(4, 4), leaf(4, 4, seed=1)
        with torch.autocast("cpu", torch.bfloat16):
            result = function(x, w)
        return [result, *torch.autograd.grad(result.sum(), (x, w))]

    found = outcome(torch.compile(program, backend="aotlab", options={"compiler": "eager"}))
    assert all(map(torch.equal, found, outcome(lambda x, w: (x @ w).sin())))


def test_a_graph_of_its_own():
    """`aot_function` passes its compilers graphs that contain the graphs of both branches."""
    codes = []

    def compiler(graph, _):
        codes.append((graph.code, next(graph.children()).code))
        return graph

    x, w = leaf(4, 4), leaf(4, 4, seed=1)
    compiled = aotlab.aot_function(lambda x, w: torch.cond(x.sum() > 0, torch.mm, torch.add, (x, w)), compiler)
    with pytest.warns(RuntimeWarning, match="is captured by Dynamo: `cond` takes functions"):
        compiled(x, w).sum().backward()
    (forward, true), (backward, true_back) = codes
    assert "higher_order.cond(gt, true_graph_0, false_graph_0, (" in forward
    assert "aten.mm" in true
    assert "higher_order.cond(gt, true_graph_1, false_graph_1, (" in backward
    assert true_back.count("aten.mm") == 2


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:.* is captured by Dynamo")
def test_attention_called_directly():
    """A direct call keeps the scores unchanged, and the function that eager compiles internally still works."""
    q, k, v = (leaf(1, 2, 16, 8, seed=n).detach() for n in range(3))
    compiled = aotlab.compile(lambda *args: flex_attention(*args), backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*eagerly")
        found = compiled(q, k, v)
    assert torch.equal(found, flex_attention(q, k, v))


def test_attention_is_trained():
    """The backward of attention is compiled, with a mask and a learned bias.

    GPUs have this backward. On CPUs the test calls the op by its name.
    """
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 128, 128, device="cpu").as_tuple()
    tensors = [each for each in mask if isinstance(each, torch.Tensor)]

    def attention(q, k, v, bias, *tensors):
        rest = iter(tensors)
        blocks = tuple(next(rest) if isinstance(each, torch.Tensor) else each for each in mask)

        def score(score, b, h, i, j, bias):
            return score + bias[i % 8, j % 8]

        return flex_attention_op(q, k, v, score, blocks, 0.25, {}, (bias,), ())[:2]

    given = [*(leaf(1, 2, 128, 16, seed=n) for n in range(3)), leaf(8, 8)]
    found = []
    for each in (attention, aotlab.aot_function(attention, aotlab.nop)):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*eagerly")
            result, sums = each(*given, *tensors)
        found.append([result, sums, *torch.autograd.grad((result**2).sum() + sums.sum(), given)])
    assert all(map(torch.equal, found[0][:-1], found[1][:-1]))
    torch.testing.assert_close(found[0][-1], found[1][-1])


REFUSED = [
    (
        "carries a number from one iteration to the next",
        lambda x: x * while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2), (0, x.detach()))[1],
    ),
]


@pytest.mark.parametrize(("sentence", "program"), REFUSED)
def test_left_to_eager(sentence, program):
    """These programs run eagerly, with a notice that says why, and eager's results."""
    x, results = leaf(4), []
    compiled = aotlab.compile(program, backend="eager", frontend="dynamo")
    for each in (program, compiled):
        torch.manual_seed(0)
        with pytest.warns(RuntimeWarning, match=sentence) if each is compiled else nullcontext():
            result = each(x)
        results.append((result, *torch.autograd.grad(result.sum(), x)))
    assert all(map(torch.equal, *results))


def test_in_a_report():
    """Each graph is printed with the graphs of its functions."""
    x, w = leaf(4, 4), leaf(4, 4, seed=1)
    with aotlab.Report.record() as report:
        torch.compile(over_rows, backend="aotlab", options={"compiler": "eager"})(x, w)[0].sum().backward()
    codes = {code.title: code.text for stage in report.frames[0].graphs[0].stages for code in stage.codes}
    assert "= torch.ops.higher_order.map_impl(body_graph_0, [" in codes["forward graph"]
    assert "\n\ndef body_graph_0(self, arg0_1, arg1_1):\n" in codes["forward graph"]
    assert "\n\ndef body_graph_1(self, arg0_1, arg1_1, arg2_1, arg3_1):\n" in codes["backward graph"]
