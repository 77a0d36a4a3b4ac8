"""Random ops draw eager's numbers and leave the generator where eager leaves it, after the forward and the backward."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # as everybody writes it
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab import config
from aotlab.errors import RandomOpError
from tests.engine_helpers import compiled, leaf, record, refusing, same, targets

SIZE = (8, 4)


def attention(x):
    """Drop some of the attention."""
    q = x.view(1, 2, 4, 4)
    return F.scaled_dot_product_attention(q, q.sin(), q.cos(), dropout_p=0.3)


def filled(name, *args, dtype=torch.float32):
    """Return a program that fills new memory by the method of that name."""
    return lambda x: x * getattr(torch.empty(SIZE, dtype=dtype), name)(*args)


def in_part(x):
    """Draw into a part of an intermediate."""
    y = x * 1
    y[2:4].uniform_()
    return y


def distribution(kind, *args):
    """Return a program that draws from one of torch's distributions, reparametrized."""
    return lambda x: kind(x + 1, *args, validate_args=False).rsample()


FAMILIES = {
    "rand": lambda x: x * torch.rand(SIZE),
    "rand, float64": lambda x: x * torch.rand(SIZE, dtype=torch.float64),
    "rand, bfloat16": lambda x: x * torch.rand(SIZE, dtype=torch.bfloat16),
    "rand, out": lambda x: x * torch.rand(SIZE, out=torch.empty(SIZE)),
    "rand, unused": lambda x: (torch.rand(3), x * 2)[1],
    "randn": lambda x: x * torch.randn(SIZE),
    "randn, complex": lambda x: x * torch.randn(SIZE, dtype=torch.complex64),
    "randn, odd sizes": lambda x: x.sum() * torch.randn(15) + torch.randn(3, dtype=torch.float64)[0],
    "randint": lambda x: x * torch.randint(0, 5, SIZE),
    "randint_like": lambda x: x * torch.randint_like(x, 0, 5),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like, transposed": lambda x: x * torch.randn_like(x.t()).t(),
    "randperm": lambda x: x[torch.randperm(8)],
    "bernoulli": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "bernoulli, p": lambda x: x * torch.bernoulli(x.detach(), 0.3),
    "bernoulli, grad": lambda x: x * torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(x.detach().sigmoid()),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "dropout of none": lambda x: F.dropout(x, 0.0),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "dropout1d": lambda x: F.dropout1d(x.view(1, 8, 4), 0.4),
    "dropout2d": lambda x: F.dropout2d(x.view(1, 8, 2, 2), 0.4),
    "dropout3d": lambda x: F.dropout3d(x.view(1, 8, 2, 2, 1), 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, train=True)[0],
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "rrelu_": lambda x: F.rrelu(x - 0.5, training=True, inplace=True),
    "multinomial": lambda x: x[torch.multinomial(x.detach()[:, 0].exp(), 5, replacement=True)],
    "multinomial, each once": lambda x: x[torch.multinomial(x.detach()[:, 0].exp(), 5)],
    "normal, tensors": lambda x: x * torch.normal(x.detach(), x.detach().exp()),
    "normal, tensor and number": lambda x: x * torch.normal(x.detach(), 2.0),
    "normal, number and tensor": lambda x: x * torch.normal(2.0, x.detach().exp()),
    "normal, numbers": lambda x: x * torch.normal(2.0, 1.0, SIZE),
    "poisson": lambda x: x * torch.poisson(x.detach().exp()),
    "binomial": lambda x: x * torch.binomial(torch.full(SIZE, 5.0), x.detach().sigmoid()),
    "gamma": lambda x: torch._standard_gamma(x.exp()),
    "exponential_": filled("exponential_"),
    "geometric_": filled("geometric_", 0.3),
    "cauchy_": filled("cauchy_"),
    "log_normal_": filled("log_normal_"),
    "uniform_": filled("uniform_", -1, 2),
    "normal_": filled("normal_", 1, 2),
    "random_": filled("random_"),
    "random_, to": filled("random_", 5),
    "random_, from": filled("random_", 2, 5, dtype=torch.int64),
    "in place": lambda x: (x * 1).uniform_() + x,
    "in part": in_part,
    "gumbel_softmax": F.gumbel_softmax,
    "gumbel_softmax, hard": functools.partial(F.gumbel_softmax, hard=True),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x.view(1, 2, 4, 4), 2, output_size=2),
    "scaled_dot_product_attention": attention,
    "kaiming_uniform_": lambda x: x * nn.init.kaiming_uniform_(torch.empty(SIZE)),
    "xavier_normal_": lambda x: x * nn.init.xavier_normal_(torch.empty(SIZE)),
    "orthogonal_": lambda x: x * nn.init.orthogonal_(torch.empty(SIZE)),
    "sparse_": lambda x: x * nn.init.sparse_(torch.empty(SIZE), 0.3),
    "Normal": distribution(torch.distributions.Normal, 1.0),
    "Exponential": lambda x: torch.distributions.Exponential(x.exp(), validate_args=False).rsample(),
    "Gamma": lambda x: torch.distributions.Gamma(x.exp(), x.exp(), validate_args=False).rsample(),
    "Dirichlet": lambda x: torch.distributions.Dirichlet(x.exp(), validate_args=False).rsample(),
    "without grad": lambda x: x * torch.no_grad()(torch.rand)(SIZE),
    "several": lambda x: (x * torch.rand(SIZE), F.dropout(x, 0.5).sin(), torch.randn(2)),
}


def checkpointed(function, *, preserve):
    """Compute again in the backward, with the same numbers or with new ones."""
    return lambda x: checkpoint(function, x, use_reentrant=False, preserve_rng_state=preserve)


def min_cut(budget):
    """Compile with the rematerializing partitioner."""
    partitioner = functools.partial(aotlab.min_cut_rematerialization_partition, memory_budget=budget)
    return functools.partial(compiled, partitioner=partitioner)


WAYS = {
    "inference": (lambda f: f, False, compiled),
    "training": (lambda f: f, True, compiled),
    "training, at most what is needed": (lambda f: f, True, min_cut(1)),
    "training, half of it": (lambda f: f, True, min_cut(0.5)),
    "training, least memory": (lambda f: f, True, min_cut(0)),
    "checkpoint": (functools.partial(checkpointed, preserve=True), True, compiled),
}


@pytest.mark.parametrize("functional", [False, True], ids=["live", "functional"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_op(family, way, functional):
    """Values, gradients and the generator's state of two calls are eager's, and both are compiled."""
    wrap, grad, make = WAYS[way]
    if family == "rrelu" and "checkpoint" in way:
        pytest.skip("eager's own backward reads memory that its checkpoint has not written by then")
    x = leaf(*SIZE)
    torch.randn(1)  # a normal number is kept for the next draw
    with config.patch(functionalize_rng_ops=functional):
        same(wrap(FAMILIES[family]), x if grad else x.detach(), make=make)


def test_a_checkpoint_that_draws_new_numbers():
    """Its backward draws, so eager runs it."""
    same(checkpointed(F.dropout, preserve=False), leaf(*SIZE), eagerly=True)


@pytest.mark.parametrize("way", ["inference", "training", "checkpoint"])
@pytest.mark.parametrize(
    "family", ["randn, odd sizes", "randperm", "bernoulli", "dropout", "alpha_dropout", "normal_", "gumbel_softmax"]
)
def test_behind_dynamo(family, way):
    """The same behind Dynamo."""
    torch.compiler.reset()
    wrap, grad, _ = WAYS[way]
    program = wrap(FAMILIES[family])
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # nothing is left to eager
        for function in (program, compiled(program, frontend="dynamo")):
            torch.manual_seed(0)
            for _ in range(2):
                x = leaf(*SIZE).detach().requires_grad_(grad)
                y = function(x)
                found.append((y.tolist(), torch.rand(1).item()))
                if y.requires_grad:
                    y.sum().backward()
                    found.append((None if x.grad is None else x.grad.tolist(), torch.rand(1).item()))
    half = len(found) // 2
    assert found[half:] == found[:half]


def test_layers_that_draw():
    """An LSTM and a Transformer with dropout, trained for some steps, one generator throughout."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 4, 2, dropout=0.3)
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3)

        def forward(self, x):
            return self.layer(self.lstm(x)[0]).square().mean()

    found = []
    for make in (lambda m: m, compiled):
        torch.manual_seed(0)
        module = Both()
        with torch.backends.mkldnn.flags(enabled=False):  # a trace does without oneDNN's LSTM
            call, optimizer = make(module), torch.optim.SGD(module.parameters(), lr=0.1)
            losses = []
            for _ in range(3):
                optimizer.zero_grad()
                loss = call(torch.randn(3, 2, 4))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        found.append((losses, torch.rand(1).item()))
    assert found[0] == found[1]


# --- a backward that draws ---------------------------------------------------------------------------------------


class Noisy(torch.autograd.Function):
    """A product whose gradients are disturbed, by numbers some of which nobody uses."""

    @staticmethod
    def forward(ctx, x, w):
        """Save both."""
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, gradient):
        """Draw three times."""
        x, w = ctx.saved_tensors
        torch.rand(2)
        return gradient * w * torch.rand_like(gradient), gradient * x * F.dropout(gradient, 0.5)


def hooked(x, w):
    """Draw in a hook."""
    y = x.sin() * w
    y.register_hook(lambda gradient: gradient * torch.rand_like(gradient))
    return y.exp()


def two_results(x, w):
    """Return two, of which one needs the other's backward."""
    return Noisy.apply(x, w), Noisy.apply(w, x.sin()).sum()


def with_more(x, w):
    """Draw in the forward and in checkpoints besides."""
    a = Noisy.apply(x, w)
    b = Noisy.apply(a, w.sin())
    return F.dropout(b, 0.3) + checkpointed(lambda y: F.dropout(y) * torch.rand(SIZE), preserve=True)(a)


def one_of_two(x, w):
    """Draw on the way to one of the arguments only."""
    return Noisy.apply(x, x * 2) + w.sin()


DRAWING = {
    "one": lambda x, w: Noisy.apply(x.sin(), w).exp(),
    "a hook": hooked,
    "two results": two_results,
    "with more": with_more,
    "one of two": one_of_two,
}


def all_together(results, x, w):
    """Go back from all results, twice."""
    loss = sum(result.sum() for result in results)
    loss.backward(retain_graph=True)
    yield
    loss.backward()


def one_by_one(results, x, w):
    """Go back from each result."""
    for result in results:
        result.sum().backward(retain_graph=True)
        yield


def asked(results, x, w):
    """Ask for the gradient of one argument, then for the other's, then for both."""
    loss = sum(result.sum() for result in results)
    for wanted in ([w], [x], [w], [x, w]):
        for tensor, gradient in zip(wanted, torch.autograd.grad(loss, wanted, retain_graph=True), strict=True):
            tensor.grad = gradient
        yield


def under_anomaly_mode(results, x, w):
    """Run the backward in anomaly mode, which checks every gradient."""
    with warnings.catch_warnings(), torch.autograd.detect_anomaly():
        warnings.simplefilter("ignore")
        sum(result.sum() for result in results).backward()
    yield


def under_autocast(results, x, w):
    """Go back under autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sum(result.sum() for result in results).backward()
    yield


BACKWARDS = (all_together, one_by_one, asked, under_anomaly_mode, under_autocast)


def gradients(function, backward):
    """Return results, gradients and the next random number, at each stage of two calls."""
    torch.manual_seed(0)
    found = []
    for _ in range(2):
        x, w = leaf(*SIZE), leaf(*SIZE, seed=1)
        results = function(x, w)
        results = results if isinstance(results, tuple) else (results,)
        found += [result.tolist() for result in results]
        for _ in backward(results, x, w):
            found.append([None if each.grad is None else each.grad.tolist() for each in (x, w)])
            found.append(torch.get_rng_state().tolist())
    return found


@pytest.mark.parametrize("functional", [False, True], ids=["live", "functional"])
@pytest.mark.parametrize("backward", [all_together, asked], ids=lambda f: f.__name__)
@pytest.mark.parametrize("program", DRAWING)
def test_a_backward_that_draws(program, backward, functional):
    """It draws when it is run, as often and in the order that eager does: so eager runs it, but for what hooks do."""
    with config.patch(functionalize_rng_ops=functional), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f = compiled(DRAWING[program])
        assert gradients(DRAWING[program], backward) == gradients(f, backward)
    assert (f.calls.compiled, f.calls.eager) == ((2, 0) if program == "a hook" else (0, 2))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("backward", [all_together, asked], ids=lambda f: f.__name__)
@pytest.mark.parametrize("program", DRAWING)
def test_a_backward_that_draws_behind_dynamo(program, backward):
    """Compiled, or left to eager where Dynamo's graph is one that we refuse; eager's in any case."""
    torch.compiler.reset()
    expected = gradients(DRAWING[program], backward)
    torch.compiler.reset()
    assert gradients(compiled(DRAWING[program], frontend="dynamo"), backward) == expected


# --- generators of one's own -------------------------------------------------------------------------------------

OWN = {
    "captured": lambda x, g: x * torch.rand(SIZE, generator=g),
    "in place": lambda x, g: x * torch.empty(SIZE).bernoulli_(0.3, generator=g),
    "by position": lambda x, g: torch.poisson(x.exp(), g),
    "randperm": lambda x, g: x[torch.randperm(8, generator=g)],
    "an init function": lambda x, g: x * nn.init.normal_(torch.empty(SIZE), generator=g),
}


@pytest.mark.parametrize("program", OWN)
def test_a_generator_of_ones_own(program):
    """Directly it is refused, with the line, before anything is drawn; behind Dynamo it is eager's."""
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()

    def use(x):
        return OWN[program](x, generator)

    with refusing(RandomOpError, match="draws from a generator that is passed to it"):
        compiled(use)(leaf(*SIZE))
    assert torch.equal(generator.get_state(), before)
    torch.compiler.reset()
    expected = use(leaf(*SIZE)), generator.get_state()
    generator.set_state(before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = compiled(use, frontend="dynamo")(leaf(*SIZE)), generator.get_state()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# --- functional random numbers -----------------------------------------------------------------------------------


def dropped(x):
    """Drop twice."""
    return F.dropout(F.dropout(x.sin(), 0.3).exp(), 0.5).sin()


def test_the_state_goes_in_and_comes_out():
    """The graph that a compiler is given is a function of its inputs, of which the last is the generator's state."""
    seen = []

    def compiler(module, inputs):
        seen.append((module, inputs))
        return module

    with config.patch(functionalize_rng_ops=True):
        compiled(dropped, backend=compiler)(torch.ones(3))
    ((module, inputs),) = seen
    state = torch.get_rng_state()
    assert [(i.dtype, i.shape) for i in inputs[1:]] == [(state.dtype, state.shape)]
    assert not any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in module.graph.nodes)
    results = [module(torch.ones(3), state) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    expected = dropped(torch.ones(3))
    assert torch.equal(results[0][0], expected)
    assert torch.equal(results[0][1], torch.get_rng_state())


def test_a_mask_is_drawn_again_from_the_state():
    """For least memory the state is kept, and not the masks; without the switch the masks are."""
    kept, drawn = [], []
    for functional in (True, False):
        with config.patch(functionalize_rng_ops=functional):
            f = min_cut(0)(dropped)
            f(leaf(100, 100))
        split = record(f, "partition")
        kept.append(sum(saved.nbytes for saved in split.saved if not saved.is_input))
        drawn.append(sum("bernoulli" in target for target in targets(split.backward)))
    assert kept == [torch.get_rng_state().nbytes, 2 * 100 * 100]  # of bools
    assert drawn == [2, 0]


def test_a_graph_that_draws_nothing_is_as_it_was():
    """No state is passed where none is used."""
    with config.patch(functionalize_rng_ops=True):
        f = compiled(lambda x: checkpointed(torch.sin, preserve=True)(x) * 2)
        f(leaf(3)).sum().backward()
    assert not any("generator" in target for target in targets(record(f, "trace").module))


def test_a_kernel_that_raises_leaves_the_generator():
    """The graph has set nothing when it raises: eager runs the call and draws for itself."""

    def program(x, p):
        return x * torch.rand(3), torch.bernoulli(p)

    states = []
    for function in (program, compiled(program)):
        torch.manual_seed(0)
        with config.patch(functionalize_rng_ops=True):
            function(torch.ones(3), torch.ones(3) / 2)
            with pytest.raises(RuntimeError):
                function(torch.ones(3), torch.full((3,), 2.0))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("kernel", ["efficient", "cudnn"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_on_a_gpu(kernel, dropout):
    """The backward uses the forward's random state; torch tags the attention op as nondeterministic."""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")

    def attend(*args):
        return (op(*args, None, True, dropout)[0],)  # which is traced and not run: it has no kernel here

    args = [torch.randn(2, 4, 8, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    again = [aotlab.aot_export_joint_simple(attend, args, trace_joint=True)]
    if not dropout:
        twice = functools.partial(checkpoint, attend, use_reentrant=False)
        again += [aotlab.aot_export_joint_simple(twice, args, trace_joint=True)]
    for count, graph in enumerate(again, 1):
        called = targets(graph)
        assert sum(f"{kernel}_attention." in target for target in called) == count
        assert sum(f"{kernel}_attention_backward." in target for target in called) == 1
