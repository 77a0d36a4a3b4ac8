"""Checkpointed functions that change the state they depend on. In eager, each backward runs them again."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointError,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import aotlab
from aotlab.frontends.dynamo_frontend import backend
from tests.engine_helpers import alike, behind, compiled, leaf, record


def checkpointed(function, *args):
    """Use checkpoint as everybody does."""
    return checkpoint(function, *args, use_reentrant=False)


def by_number(*bodies):
    """Return a program whose checkpointed function is another at each run; the last one stays."""

    def program(x, w):
        runs = []

        def body(y):
            runs.append(y)
            return bodies[min(len(runs), len(bodies)) - 1](y)

        return checkpointed(body, x)

    return program


def counted(x, w):
    """Compute with a Python number that changes."""
    count = [1.0]

    def body(y):
        count[0] += 1
        return (y * count[0]).sin()

    return checkpointed(body, x)


def counted_in_a_constant(x, w):
    """Compute with a constant that is made from a Python counter."""
    count = [1.0]

    def body(y):
        count[0] += 1
        return (y * torch.tensor(count[0])).sin()

    return checkpointed(body, x)


def counted_in_a_tensor(x, w):
    """Compute with a tensor of the call that is written."""
    count = torch.ones(3)

    def body(y):
        count.add_(1)
        return (y * count).sin()

    return checkpointed(body, x)


def chosen(y, number):
    """Call an op that takes functions, one of which computes with a constant."""
    return torch.ops.higher_order.cond(
        y.sum() > 0, lambda a: (a * torch.tensor(number),), lambda a: (a * torch.tensor(3.0),), (y,)
    )[0].sin()


def counted_in_a_graph(x, w):
    """Compute so with a number that changes."""
    count = [1.0]

    def body(y):
        count[0] += 1
        return chosen(y, count[0])

    return checkpointed(body, x)


def kept_in_a_list(x, w):
    """Compute with a tensor that another one takes the place of."""
    state = [w * 1]

    def body(y):
        state[0] = state[0] + 1
        return (y * state[0]).sin()

    return checkpointed(body, x)


def written_view(x, w):
    """Save a value in the autograd node of a write to a view, where the trace cannot see it."""
    runs = []

    def body(y):
        runs.append(y)
        made = y * 1
        made[:1].mul_(made[1:2] if len(runs) != 2 else made[2:] * 2)
        return made

    return checkpointed(body, x)


def refused(y):
    """Raise in Python."""
    raise ValueError("not again")


CHANGING = {
    "once otherwise": by_number(torch.sin, lambda y: (y * 2).sin(), torch.sin),
    "a number": counted,
    "a constant": counted_in_a_constant,
    "a constant in a graph": counted_in_a_graph,
    "a tensor": counted_in_a_tensor,
    "another tensor": kept_in_a_list,
    "a view": written_view,
}

RAISING = {
    "an error once": by_number(torch.sin, refused, torch.sin),
    "another number of tensors once": by_number(lambda y: y.sin().exp(), torch.sin, lambda y: y.sin().exp()),
    "another number of tensors": by_number(lambda y: y.sin().exp(), torch.sin),
}


def outcome(function, x, w):
    """Call twice, with two backwards each."""
    found = []
    for _ in range(2):
        a, b = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = function(a, b)
        found.append(y.tolist())
        for _ in range(2):
            try:
                y.sum().backward(retain_graph=True)
            except (ValueError, CheckpointError) as error:
                found.append((type(error), str(error)))
            found.append([None if each.grad is None else each.grad.tolist() for each in (a, b)])
    return found


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        *((program, "a checkpoint computes other results when it runs") for program in CHANGING.values()),
        *((program, "the backward raises") for program in RAISING.values()),
    ],
    ids=[*CHANGING, *RAISING],
)
def test_a_function_whose_second_run_differs(program, reason):
    """A function whose second run in eager computes other values, or raises, runs eagerly with a notice."""
    x, w = leaf(3), leaf(3, seed=1)
    f = compiled(program)
    with pytest.warns(RuntimeWarning, match=reason):
        found = outcome(f, x, w)
    assert outcome(program, x, w) == found
    assert (f.calls.compiled, f.calls.eager) == (0, 2)


def appended(x, w):
    """Append the intermediate to a list, and read only the list's length."""
    kept = []

    def body(y):
        kept.append(y.sin())
        return kept[-1].exp()

    return checkpointed(body, x) * len(kept)


def with_constants(x, w):
    """Create the same constants in every run."""
    return checkpointed(lambda y: (y * torch.tensor(2.0)).sin()[torch.tensor([0, 2])].exp() * torch.ones(2), x)


def written_behind(x, w):
    """Write a captured tensor after the checkpoint: eager's backward reads the new value."""
    captured = w * 1
    y = checkpointed(lambda y: (y * captured).sin(), x)
    captured.mul_(3)
    return y


STEADY = {
    "another backward": by_number(torch.sin, lambda y: (y * 2).sin()),
    "ops that save the same": by_number(torch.sin, torch.cos, torch.sin),
    "appended": appended,
    "constants": with_constants,
    "a graph": lambda x, w: checkpointed(lambda y: chosen(y, 2.0), x),
    "written behind": written_behind,
}


@pytest.mark.parametrize("kind", STEADY)
def test_a_function_that_is_the_same_in_each_backward(kind):
    """A function that does the same in every backward is compiled, even if its run in the forward differed."""
    program, x, w = STEADY[kind], leaf(3), leaf(3, seed=1)
    f = compiled(program)
    assert outcome(program, x, w) == outcome(f, x, w)
    assert (f.calls.compiled, f.calls.eager) == (2, 0)


USES = {"not at all": torch.ones_like, "computes": torch.sin, "draws": torch.bernoulli}


@pytest.mark.parametrize("use", USES)
def test_a_function_that_writes_an_argument_of_the_call(use):
    """A checkpointed function that writes an argument writes it again in each backward.

    Each write starts from the argument's current value.
    """

    def program(x, w):
        def body(y):
            w.add_(0.1)
            return USES[use](w) * y.sin()

        return checkpointed(body, x)

    def outcome(function):
        found = []
        for call in range(2):
            torch.manual_seed(call)
            x, w = leaf(3), torch.full((3,), 0.2)
            y = function(x, w)
            y.sum().backward()
            found.append((y.tolist(), x.grad.tolist(), w.tolist()))
        return found

    f = compiled(program)
    assert outcome(program) == outcome(f)
    assert (f.calls.compiled, f.calls.eager) == (2, 0)


class Blocks(nn.Module):
    """Two blocks that are computed again in the backward, the second one twice in a row."""

    def __init__(self, *more):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.2), *more)
        self.second = nn.Linear(8, 8)
        self.end = nn.Linear(8, 2)

    def forward(self, x):
        """Return two results that share their first layers."""
        y = checkpointed(self.first, x)
        for _ in range(2):
            y = checkpointed(self.second, y).relu()
        return self.end(y).sum(), checkpointed(self.end, y).square().mean()


def train(module, call, wanted=(0, 1)):
    """Take ten steps, from some of the results."""
    optimizer = torch.optim.Adam(module.parameters())
    found = []
    for step in range(10):
        torch.manual_seed(step)
        results = call(torch.randn(8, 4))
        sum(results[i] for i in wanted).backward()
        found.append([result.item() for result in results])
        optimizer.step()
        optimizer.zero_grad()
    return found, [each.tolist() for each in (*module.parameters(), *module.buffers())]


def blocks(*more):
    """Make the same module each time."""
    torch.manual_seed(0)
    return Blocks(*more)


@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("wanted", [(0, 1), (0,), (1,)], ids=str)
def test_training_with_checkpointed_modules(wanted, frontend):
    """A backward that runs a module again uses the traced parameters.

    Afterwards the module has its own parameters again.
    """
    torch.compiler.reset()
    module = blocks()
    parameters = list(module.parameters())
    f = compiled(module, frontend=frontend)
    found = train(module, f, wanted)
    expected = blocks()
    assert train(expected, expected, wanted) == found
    assert all(one is other for one, other in zip(parameters, module.parameters(), strict=True))
    if frontend == "direct":
        assert (behind(f).calls.compiled, len(behind(f).entries)) == (10, 1)


def test_a_checkpointed_lstm():
    """After a backward that runs an LSTM again, its flat list of weights holds its own parameters."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.LSTM(4, 3, batch_first=True)

        def forward(self, x):
            return [checkpointed(lambda y: self.body(y)[0], x).sum(), x.sum()]

    def run(call):
        torch.manual_seed(0)
        module = Recurrent()
        losses, _ = train(module, call(module), (0,))
        pairs = zip(module.body._flat_weights, module.body.parameters(), strict=True)
        assert all(kept is parameter for kept, parameter in pairs)
        return torch.tensor(losses)

    with pytest.warns(RuntimeWarning, match="computes other results when it runs"):  # so say torch's fakes
        found = run(compiled)
    assert torch.equal(run(lambda module: module), found)


def late(change):
    """Return the gradients of a checkpoint, or its error, where the caller does something before the backward."""

    def outcome(call):
        x, w = leaf(3), leaf(3, seed=1)
        y = call(lambda x, w: checkpointed(lambda value: (value * w).sin(), x))(x, w)
        with torch.no_grad():
            change(x, w)
        try:
            y.sum().backward()
        except RuntimeError as error:
            return type(error)
        return [None if each.grad is None else each.grad.tolist() for each in (x, w)]

    return outcome(lambda function: function), outcome(compiled)


def test_late_changes():
    """A later write to a checkpoint's argument raises, as in eager.

    A later write to a captured tensor also raises. Eager would read the new value instead.
    """
    expected, found = late(lambda x, w: None)
    assert expected == found
    expected, found = late(lambda x, w: x.mul_(2))
    assert (expected, found) == (RuntimeError, RuntimeError)
    expected, found = late(lambda x, w: w.mul_(2))
    assert (type(expected), found) == (list, RuntimeError)


def selected(function, x, **settings):
    """Checkpoint a function: recompute everything except sines and matrix products."""
    chosen = [torch.ops.aten.sin.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, chosen, **settings)
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


class Selected(nn.Module):
    """Two selective checkpoints, the second of which uses the first, and a layer outside them."""

    def __init__(self):
        """Make the layers."""
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.2), nn.Linear(8, 4), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 4), nn.GELU())
        self.around = nn.Linear(4, 4)

    def forward(self, x):
        """Return a result of each."""
        y = selected(self.first, x)
        return y.sin().sum(), self.around(x).square().sum(), selected(self.second, y).sum()


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0,), (1,), (2,)], ids=str)
@pytest.mark.parametrize("frontend", ["direct", "dynamo"])
@pytest.mark.parametrize("dynamic", [False, None], ids=["static", "varying"])
def test_selective_checkpoints(frontend, wanted, dynamic):
    """Selective checkpoints give eager's values, gradients and errors.

    A saved value serves only one backward, even under `retain_graph=True`.
    """

    def steps(call, module):
        found = []
        for size in (3, 5, 6):
            torch.manual_seed(size)
            x = torch.randn(size, 4, requires_grad=True)
            results = call(x)
            sum(results[i] for i in wanted).backward(retain_graph=True)
            try:
                results[wanted[0]].backward()
            except RuntimeError as error:
                found.append(str(error))
            found.append([results[i].item() for i in wanted] + x.grad.tolist())
            found += [None if each.grad is None else each.grad.tolist() for each in module.parameters()]
        return found

    torch.compiler.reset()
    module, expected = Selected(), Selected()
    f = compiled(module, frontend=frontend, dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert steps(expected, expected) == steps(f, module)
    if frontend == "direct":
        assert (behind(f).calls.compiled, len(behind(f).entries)) == (3, 3 if dynamic is False else 2)


@pytest.mark.parametrize("partition", [aotlab.default_partition, aotlab.min_cut_rematerialization_partition])
@pytest.mark.parametrize("by", ["eager", pytest.param("inductor", marks=pytest.mark.tier("full"))])
def test_what_selective_checkpoints_save(by, partition):
    """Besides inputs, the forward saves only values that the policy marks and that the backward needs.

    Here this is the first product.
    """

    def program(x, w):
        return selected(lambda value: (value @ w).tanh().exp().cos(), x).sum()

    x, w = leaf(2, 3), leaf(3, 3, seed=1)
    f = compiled(program, backend=by, partitioner=partition)
    loss = f(x, w)
    loss.backward()
    saved = record(f, "partition").saved
    assert sorted(each.spec.shape for each in saved) == [(2, 3), (2, 3), (3, 3)]
    assert sum(each.is_input for each in saved) == 2
    expected = [x.grad, w.grad]
    x.grad = w.grad = None
    torch.testing.assert_close(program(x, w), loss)
    program(x, w).backward()
    torch.testing.assert_close([x.grad, w.grad], expected)


def written_in_it(x):
    """Write a saved value after another value has been computed from it."""

    def body(value):
        y = value.sin()
        z = y.exp()
        y.add_(1)
        return z * y

    return body


def inside_of_it(x):
    """Nest a checkpoint in a selective one."""
    return lambda value: checkpointed(lambda inner: inner.sin().exp().cos(), value.exp())


def steady_in_it(x):
    """Draw, too."""
    return lambda value: nn.functional.dropout(value.sin().cos()).exp()


@pytest.mark.parametrize("mutation", [False, True], ids=["", "with mutations allowed"])
@pytest.mark.parametrize("kind", [written_in_it, inside_of_it, steady_in_it])
@pytest.mark.parametrize("way", ["once", "twice", "of higher order"])
def test_ways_through_a_selective_checkpoint(kind, way, mutation):
    """Gradients or errors are eager's. A call that writes a saved value runs eagerly."""

    def program(x):
        return selected(kind(x), x, allow_cache_entry_mutation=mutation).sum()

    def outcome(function):
        torch.manual_seed(0)
        x = leaf(4)
        try:
            y = function(x)
            (gradient,) = torch.autograd.grad(y, x, create_graph=way == "of higher order", retain_graph=True)
            if way != "once":
                (gradient.sin().sum() if way == "of higher order" else y).backward()
        except RuntimeError as error:
            return str(error)
        return gradient.tolist(), None if x.grad is None else x.grad.tolist()

    f = compiled(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if kind is written_in_it else "error", RuntimeWarning)
        assert outcome(program) == outcome(f)
    assert f.calls.eager == (kind is written_in_it)


def test_a_backward_for_one_input_uses_up_what_is_on_its_way():
    """A backward for one input frees only the values on its path.

    A second backward, through the other selective checkpoint, still succeeds.
    """

    def program(x, w):
        y = selected(lambda value: value.sin().exp(), x) * selected(lambda value: value.sin().cos(), w)
        return y.sum(), y.exp().sum()

    def outcome(function):
        x, w = leaf(3), leaf(3, seed=1)
        found, (y, _) = [], function(x, w)
        for each in (x, w, x):
            try:
                found.append(torch.autograd.grad(y, each, retain_graph=True)[0].tolist())
            except RuntimeError as error:
                found.append(str(error))
        return found

    f = compiled(program)
    expected = outcome(program)
    assert [type(each) for each in expected] == [list, list, str]
    assert outcome(f) == expected
    assert f.calls.compiled == 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", [*CHANGING, *RAISING, *STEADY])
def test_behind_dynamo(kind):
    """Behind Dynamo, which runs a function with side effects itself or breaks the graph there, results are eager's."""
    program, x, w = {**CHANGING, **RAISING, **STEADY}[kind], leaf(3), leaf(3, seed=1)

    def use(function):
        return outcome(function, x, w)

    if not alike(use, program):
        pytest.skip("Dynamo alone gives something else than eager")
    torch.compiler.reset()
    by_us = functools.partial(backend, options={"compiler": "eager"})
    assert use(program) == use(torch.compile(program, backend=by_us))


class Nested(nn.Module):
    """Checkpoints a layer inside of a checkpoint, with more around."""

    def __init__(self, depth, before, after, drop):
        """Make the layers."""
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.before = nn.Linear(4, 4) if before else nn.Identity()
        self.after = nn.Linear(4, 4) if after else nn.Identity()
        self.dropout = nn.Dropout(0.5 if drop else 0.0)
        self.depth = depth

    def forward(self, x):
        """Nest."""

        def outermost(value):
            return self.after(self._nest(self.before(value), self.depth)).sin()

        return checkpointed(outermost, x)

    def _nest(self, value, depth):
        if depth == 1:
            return checkpointed(self.inner, value)
        return checkpointed(lambda v: self.dropout(self._nest(v.tanh(), depth - 1)), value)


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("before", "after"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_layer_in_nested_checkpoints(depth, before, after, drop):
    """The values that an inner checkpoint saves belong to the outer one, and nothing is run again to find them."""
    torch.manual_seed(0)
    model = Nested(depth, before, after, drop)

    def use(function):
        model.zero_grad()
        torch.manual_seed(1)
        function(torch.ones(3, 4)).sum().backward()
        return [p.grad.tolist() for p in model.parameters()], torch.get_rng_state().tolist()

    candidate = compiled(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert [use(candidate), use(candidate)] == [use(model)] * 2
    assert behind(candidate).calls.compiled == 2
