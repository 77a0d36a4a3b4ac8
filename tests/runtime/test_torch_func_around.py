"""Compiled functions under the transforms of ``torch.func`` run eagerly, with one notice."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

import aotlab
from aotlab import config, events
from aotlab.errors import TransformError
from tests.engine_helpers import compiled, refusing
from tests.func_helpers import (
    MAKES_AROUND,
    assert_same,
    behind_dynamo,
    body,
    by_us_behind_dynamo,
    numbers,
    outcome,
    scalar,
)

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::UserWarning")]


def network():
    """Make a small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def each_transform(make):
    """Call the compiled function under each transform separately."""
    x = numbers(4)
    results = [
        vmap(make(body))(numbers(3, 4)),
        vmap(make(lambda x, y: (x * y, y)), in_dims=(1, None), out_dims=(1, 0))(numbers(3, 4), numbers(3)),
        vmap(make(body), chunk_size=2)(numbers(5, 4)),
        grad(make(scalar))(x),
        grad(make(lambda x: (scalar(x), x.cos())), has_aux=True)(x),
        grad_and_value(make(scalar))(x),
        jvp(make(body), (x,), (x,)),
        jacrev(make(body))(x),
        jacfwd(make(body))(x),
        hessian(make(scalar))(x),
    ]
    out, function = vjp(make(body), x)
    results += [out, function(x)]
    return results


def nested(make):
    """Call the compiled function under several nested transforms."""
    return (
        vmap(grad(make(scalar)))(numbers(3, 4)),
        grad(lambda x: grad(make(scalar))(x).sum())(numbers(4)),
        vmap(vmap(make(body)))(numbers(2, 3, 4)),
        grad(lambda x: vmap(make(body))(x).sum())(numbers(3, 4)),
        jvp(grad(make(scalar)), (numbers(4),), (numbers(4),)),
    )


def first_wrapped(make):
    """Call it with tensors of a transform first, and with plain ones between."""
    f = make(body)
    return (
        vmap(f)(numbers(3, 4)),
        f(numbers(3, 4)),
        vmap(f)(numbers(3, 4)),
        f(numbers(3, 4)),
        jvp(f, *[(numbers(4),)] * 2),
    )


def first_plain(make):
    """Call it without transforms first, and then under transforms."""
    f = make(body)
    plain = f(numbers(3, 4))
    return plain, vmap(f)(numbers(3, 4)), grad(lambda x: f(x).sum())(numbers(3, 4)), f(numbers(3, 4))


def gradients_per_sample(make):
    """Take the gradients of a compiled module for each sample."""
    model = make(network())
    parameters = {name: value.detach() for name, value in network().named_parameters()}

    def loss(parameters, x, y):
        return (functional_call(model, parameters, (x,)) - y).square().sum()

    if not isinstance(model, (aotlab.AotModule, nn.Sequential)):  # an OptimizedModule prefixes the names
        parameters = {f"_orig_mod.{name}": value for name, value in parameters.items()}
    return vmap(grad(loss), in_dims=(None, 0, 0))(parameters, numbers(3, 4), numbers(3, 2))


def ensemble(make):
    """Run several models at once."""
    models = [network() for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0])
    call = make(lambda p, b, x: functional_call(base, (p, b), (x,)))
    return vmap(call, in_dims=(0, 0, None))(parameters, buffers, numbers(5, 4))


def written(make):
    """Write a batched tensor and an unbatched tensor."""
    x, y, captured = numbers(3, 4), numbers(4), torch.zeros(4)
    first = make(lambda x: x.mul_(2).sin())
    first(numbers(3, 4))

    def writes(z):
        captured.add_(1)
        return z + captured

    results = [vmap(first)(x), vmap(make(lambda x, y: x.add_(y)), in_dims=(0, None))(x, y)]
    return [*results, vmap(make(writes))(numbers(3, 4)), x, y, captured, grad(make(lambda x: (x * 1).mul_(x).sum()))(y)]


def captured_from_a_transform(make):
    """Read a tensor of the transform that is no argument."""
    held = {"w": numbers(4)}
    f = make(lambda y: (y * held["w"]).sum())

    def outer(x):
        held["w"] = x
        try:
            return f(numbers(4)) + make(lambda y: (y * x).sum())(numbers(4))
        finally:
            held["w"] = numbers(4)

    return vmap(outer)(numbers(3, 4)), grad(outer)(numbers(4))


def only_plain_arguments(make):
    """Give it none of the transform's tensors."""
    f, ones = make(body), make(lambda: torch.ones(4))
    f(numbers(4)), ones()
    return grad(lambda x: (x * f(numbers(4)) * ones()).sum())(numbers(4)), vmap(lambda x: x * f(numbers(4)))(
        numbers(3, 4)
    )


def differentiated_outside(make):
    """Compute gradients of a transform's result."""
    x = numbers(4).requires_grad_()
    out, tangent = jvp(make(body), (x,), (numbers(4),))
    return torch.autograd.grad((out + tangent).sum() + grad(make(scalar))(x).sum() + vmap(make(body))(x).sum(), x)


PROGRAMS = (
    each_transform, nested, first_wrapped, first_plain, gradients_per_sample, ensemble, written,
    captured_from_a_transform, only_plain_arguments, differentiated_outside,
)  # fmt: skip


@pytest.mark.parametrize("make", MAKES_AROUND.values(), ids=MAKES_AROUND)
@pytest.mark.parametrize("program", PROGRAMS)
def test_is_eagers(program, make):
    """Results, and torch's state afterwards, are eager's; the compiled function keeps nothing of a transform."""
    expected, _, state = outcome(program, lambda f: f)
    found, _, state_after = outcome(program, make)
    assert_same(expected, found)
    assert state_after == state


def writes_unbatched(make):
    """Write a value that differs per sample to an unbatched tensor."""
    y = numbers(4)
    return vmap(make(lambda x, y: y.mul_(x)), in_dims=(0, None))(numbers(3, 4), y)


def writes_captured(make):
    """Write a captured tensor under grad, which torch forbids."""
    captured = torch.zeros(4)

    def f(x):
        captured.add_(1)
        return (x * captured).sum()

    return grad(make(f))(numbers(4))


def batch_statistics(make):
    """Write unbatched statistics."""
    model = make(nn.BatchNorm1d(4))
    model(numbers(3, 4))
    return vmap(model)(numbers(2, 3, 4))


def raises(make):
    """Raise an error of the user's."""

    def f(x):
        raise ValueError("mine")

    return vmap(make(f))(numbers(3, 4))


def asks_for_values(make):
    """Ask for a value."""
    return vmap(make(lambda x: x * x.sum().item()))(numbers(3, 4))


@pytest.mark.parametrize("program", [writes_unbatched, writes_captured, batch_statistics, raises, asks_for_values])
def test_errors_are_eagers(program):
    """An error under a transform is raised as in eager, and the transform's level is closed."""
    expected, _, state = outcome(program, lambda f: f)
    found, _, state_after = outcome(program, compiled)
    assert_same(expected, found)
    assert state_after == state


@pytest.mark.parametrize("make", MAKES_AROUND.values(), ids=MAKES_AROUND)
@pytest.mark.parametrize("randomness", ["error", "different", "same"])
def test_random_ops(randomness, make):
    """Under vmap, random ops follow vmap's ``randomness``, even if no argument of the function is batched."""

    def drop(make):
        f = make(lambda x: torch.dropout(x, 0.5, True) + torch.rand(4))
        return f(numbers(4)), vmap(f, randomness=randomness)(numbers(3, 4)), f(numbers(4))

    def draw(make):
        f = make(lambda: torch.rand(4))
        return f(), vmap(lambda x: x + f(), randomness=randomness)(numbers(3, 4)), f()

    for program in (drop, draw):
        expected, _, state = outcome(program, lambda f: f)
        found, _, state_after = outcome(program, make)
        assert_same(expected, found, texts=make is compiled)  # Dynamo adds a page to the error
        assert state_after == state


def test_one_notice():
    """There is one notice per function, whatever the transform. The report has the reason of each call."""
    f, g = compiled(body), compiled(scalar)
    with pytest.warns(RuntimeWarning, match="`body` is called under a torch.func transform and runs eagerly") as caught:
        vmap(f)(numbers(3, 4))
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vmap(f)(numbers(3, 4))
        grad(lambda x: f(x).sum())(numbers(4))
        with torch.autograd.forward_ad.dual_level():
            f(numbers(4))
        f(numbers(4))
    with pytest.warns(RuntimeWarning, match="`scalar`"):
        grad(g)(numbers(4))
    assert (f.calls.compiled, f.calls.eager) == (1, 4)
    for _ in range(2):
        with aotlab.Report.record() as recording:
            vmap(f)(numbers(3, 4))
            jvp(f, (numbers(4),), (numbers(4),))
            f(numbers(4))
        (frame,) = recording.report().frames
        assert (frame.calls.compiled, frame.calls.eager) == (1, 2)
        assert [(each.error, each.outcome) for each in frame.refusals] == [("TransformError", "ran eagerly")] * 2
        assert "a torch.func transform" in frame.refusals[0].message


def test_linearize():
    """`linearize` gets eager's function, because it traces its argument. Dynamo therefore refuses it."""

    def use(make):
        out, function = linearize(make(body), numbers(4))
        return out, function(numbers(4))

    expected, _, state = outcome(use, lambda f: f)
    found, notices, state_after = outcome(use, compiled)
    assert_same(expected, found)
    assert state_after == state
    assert len(notices) == 1


def test_without_tensors():
    """A function without arguments runs eagerly under a transform.

    It has no tensor whose guards would notice the transform.
    """
    f = compiled(lambda: torch.ones(4))
    f()
    with pytest.warns(RuntimeWarning, match="runs eagerly there"):
        vmap(lambda x: x + f())(numbers(3, 4))
    f()
    assert (f.calls.compiled, f.calls.eager) == (2, 1)


def test_asked_for_an_error():
    """With ``fallback="error"``, a call under a transform raises our error, and the transform's level is closed."""
    f = compiled(body)
    f(numbers(4))
    with config.patch(fallback="error"):
        for use in (lambda: vmap(f)(numbers(3, 4)), lambda: jvp(f, (numbers(4),), (numbers(4),))):
            with refusing(TransformError, match=r"is called under a torch\.func transform"):
                use()
        f(numbers(4))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    assert (f.calls.compiled, f.calls.eager) == (2, 0)


def test_inside_of_a_trace():
    """A compiled function under a transform in another compiled function becomes part of that function's graph."""
    inner = compiled(body)
    outer = compiled(lambda x: vmap(inner)(x) + grad(lambda y: inner(y).sum())(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = outer(numbers(3, 4))
    assert torch.equal(found, vmap(body)(numbers(3, 4)) + grad(lambda y: body(y).sum())(numbers(3, 4)))
    assert outer.calls.compiled == 1


class Scaled(nn.Module):
    """A module with code of the user's."""

    def __init__(self):
        """Make a layer."""
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        """Call the layer."""
        return self.layer(x) * 2


def events_of(use):
    """Call ``use``; return it with the kinds of events that were heard, and the notices."""
    heard = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with events.listen(lambda event: heard.append(type(event).__name__)):
            result = use()
    return result, heard, [str(each.message) for each in caught if each.category is RuntimeWarning]


@pytest.mark.parametrize("first", ["transform", "plain"])
@pytest.mark.parametrize("of", ["function", "module"])
def test_one_notice_by_us_behind_dynamo(of, first):
    """A function of `aotlab.compile` with Dynamo runs eagerly with one notice, and its other calls stay compiled."""
    original = body if of == "function" else Scaled()
    f, x = by_us_behind_dynamo(original), numbers(3, 4)
    if first == "plain":
        assert "CompileFinished" in events_of(lambda: f(x))[1]
    found, heard, notices = events_of(lambda: vmap(f)(x))
    assert torch.equal(found, vmap(original)(x))
    assert heard == ["CompileStarted", "CompileFailed", "Called"]
    (notice,) = notices
    name = "body" if of == "function" else "Scaled"
    assert notice.startswith(f"`{name}` is called under a torch.func transform and runs eagerly there")
    for transform in (vmap, lambda f: jacrev(f), lambda f: lambda x: jvp(f, (x,), (x,))):
        assert events_of(lambda transform=transform: transform(f)(x))[2] == []
    _, heard, notices = events_of(lambda: f(x))
    assert ("CompileFinished" in heard) == (first == "transform")
    assert "Called" in heard
    assert notices == []


def test_copies_and_pickles_by_us_behind_dynamo():
    """A copy of a module behind Dynamo calls the copy's layers under a transform."""
    model, x = by_us_behind_dynamo(Scaled()), numbers(3, 4)
    model(x)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            made.layer.weight.mul_(3)
        for call in (made, vmap(made)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert torch.equal(call(x), torch.nn.functional.linear(x, made.layer.weight, made.layer.bias) * 2)
        assert not torch.equal(made(x), model(x))


def test_method_by_us_behind_dynamo():
    """A decorated method receives its object, also under a transform."""

    class Holder:
        factor = 3

        @aotlab.compile(backend="eager", frontend="dynamo")
        def times(self, x):
            return x * self.factor

    holder, x = Holder(), numbers(3, 4)
    with pytest.warns(RuntimeWarning, match="times` is called under a torch"):
        assert torch.equal(vmap(holder.times)(x), x * 3)
    assert torch.equal(holder.times(x), x * 3)
    assert Holder.times.__name__ == "times"


@pytest.mark.parametrize("make", [behind_dynamo, by_us_behind_dynamo], ids=["dynamo", "by us"])
def test_graph_break_inside_of_a_transform(make):
    """If Dynamo breaks the graph inside a transform that a compiled function calls, that part runs eagerly."""

    def broken(y):
        torch._dynamo.graph_break()
        return y.sin()

    f, x = make(lambda x: vmap(broken)(x) * 2), numbers(3, 4)
    assert torch.equal(f(x), x.sin() * 2)
    assert torch.equal(f(x), x.sin() * 2)


def test_asked_for_an_error_behind_dynamo():
    """Behind Dynamo too, ``fallback="error"`` raises our error for a transform, whose level is closed."""
    x = numbers(3, 4)
    with config.patch(fallback="error"):
        for _ in range(2):
            with refusing(TransformError, match=r"is called under a torch\.func transform"):
                vmap(by_us_behind_dynamo(body))(x)
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def test_inside_of_what_dynamo_traces():
    """Under a transform in another compiled function, a function behind Dynamo becomes part of that graph."""
    f, model, x = by_us_behind_dynamo(body), by_us_behind_dynamo(Scaled()), numbers(3, 4)
    if torch.__version__.startswith("2.11"):  # whose Dynamo cannot trace vmap of anything that torch.compile made
        inner = lambda x: vmap(lambda row: f(row))(x)  # noqa: E731
    else:
        inner = lambda x: vmap(f)(x)  # noqa: E731
    outer = torch.compile(
        lambda x: (inner(x), vmap(lambda row: model(row))(x), f(x), model(x)),
        backend="aotlab",
        options={"compiler": "eager"},
        fullgraph=True,
    )
    found, heard, notices = events_of(lambda: outer(x))
    for one, other in zip(
        found, (vmap(body)(x), vmap(model.orig_module)(x), body(x), model.orig_module(x)), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert (heard.count("CompileStarted"), heard.count("CompileFailed"), notices) == (1, 0, [])
    direct = compiled(lambda x: vmap(f)(x))  # a function may not capture the model, as it has parameters
    found, heard, notices = events_of(lambda: direct(x))
    assert torch.equal(found, vmap(body)(x))
    assert (heard.count("CompileStarted"), heard.count("CompileFailed"), notices) == (1, 0, [])


def test_compiled_again():
    """If torch compiles a compiled function again, in one graph, it compiles the original function."""
    f = torch.compile(by_us_behind_dynamo(body), backend="aotlab", options={"compiler": "eager"}, fullgraph=True)
    found, heard, notices = events_of(lambda: f(numbers(4)))
    assert torch.equal(found, body(numbers(4)))
    assert (heard.count("CompileFinished"), notices) == (1, [])
