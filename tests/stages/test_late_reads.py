"""What an attribute of a custom Function or a checkpoint's function uses is read by the backward as it is by then."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab import config
from aotlab.errors import MetadataMutationError
from tests.engine_helpers import alike, behind, compiled, leaf, record

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
FRONTENDS = pytest.mark.parametrize("frontend", ["direct", "dynamo"])

#: What a Function may keep: of its arguments, its result, or what it makes of them.
KEPT = {
    "x": lambda x, w, y: x,
    "w": lambda x, w, y: w,
    "w[:]": lambda x, w, y: w[:],
    "w.data": lambda x, w, y: w.data,
    "w * 2": lambda x, w, y: w * 2,
    "w.clone()": lambda x, w, y: w.clone(),
    "y": lambda x, w, y: y,
    "y.detach()": lambda x, w, y: y.detach(),
}


def keeping(attributes, saved, *, looks, hidden=False):
    """Make a Function that keeps ``attributes`` as such, saves ``saved``, and may not look at these."""

    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            y = x * w.sin()
            ctx.save_for_backward(*(KEPT[name](x, w, y) for name in saved))
            values = [KEPT[name](x, w, y) for name in attributes]
            if hidden:
                ctx.values = [values]
            elif values:
                ctx.first, ctx.others = values[0], values[1:]
            return y

        @staticmethod
        def backward(ctx, gradient):
            values = list(ctx.values[0]) if hidden else [ctx.first, *ctx.others] if attributes else []
            if looks:
                values += ctx.saved_tensors
            total = gradient
            for n, value in enumerate(values):
                total = total + gradient * value.cos() * (n + 1)
            return total, total * 0.5

    return Keeping


def a_function(draw):
    """Draw a Function."""
    attributes = draw.sample(sorted(KEPT), draw.choice([0, 1, 1, 2]))
    saved = draw.sample(sorted(KEPT), draw.choice([0, 0, 1, 2]))
    return keeping(attributes, saved, looks=draw.random() < 0.7, hidden=draw.random() < 0.2)


def a_program(draw, checkpoints=True):
    """Draw a program of such Functions, plain ops, writes and checkpoints."""
    steps = []
    kinds = ["apply"] * 4 + ["mul", "sin", "view", "write", "quiet", "checkpoint" if checkpoints else "apply"]
    for _ in range(draw.randint(1, 5)):
        steps.append((draw.choice(kinds), draw.randrange(6), draw.randrange(6), a_function(draw)))
    returned = [draw.randrange(8) for _ in range(draw.randint(1, 3))]

    def program(x, w, v):
        made = [x, w, v]
        for kind, i, j, function in steps:
            a, b = made[i % len(made)], made[j % len(made)]
            if kind == "apply":
                made.append(function.apply(a, b))
            elif kind == "mul":
                made.append(a * b)
            elif kind == "sin":
                made.append(a.sin())
            elif kind == "view":
                made.append(a.view(2, 3).view(-1))
            elif kind == "write":
                made[-1].mul_(1.5) if made[-1] is not x else w.add_(1)
            elif kind == "quiet":
                with torch.no_grad():
                    b.add_(0.25)
            else:
                made.append(checkpoint(lambda value, b=b: (value * b).sin() + b.exp(), a, use_reentrant=False))
        return [made[n % len(made)] if n % len(made) else made[-1] * 1 for n in returned]

    return program


def a_use(draw):
    """Draw what the caller does: writes, backwards."""
    actions = []
    for _ in range(draw.randint(1, 4)):
        if draw.random() < 0.6:
            actions.append((draw.choice(["add", "add", "data", "out", "out data"]), draw.randrange(3)))
        actions.append((draw.choice(["backward", "retain", "grad x", "grad w"]), draw.randrange(3)))
    grads = draw.choice([(True, False), (True, True), (True, False)])

    def use(function):
        source = torch.arange(1.0, 7.0).requires_grad_()
        other = (torch.arange(6.0) / 7).requires_grad_(grads[1])
        x, w, v = source + 0, other + 0 if grads[1] else other, torch.linspace(0, 1, 6)
        found = []
        try:
            outputs = function(x, w, v)
        except RuntimeError as error:
            return [type(error).__name__]
        for action, n in actions:
            target = (x, w, v)[n]
            out = outputs[n % len(outputs)]
            try:
                with torch.no_grad():
                    if action == "add":
                        target.add_(1)
                    elif action == "data":
                        target.data.add_(1)
                    elif action == "out":
                        out.add_(1)
                    elif action == "out data":
                        out.data.add_(1)
                if action in ("backward", "retain") and out.requires_grad:
                    torch.autograd.backward(out.sum(), retain_graph=action == "retain")
                    found.append([None if t.grad is None else t.grad.tolist() for t in (source, other)])
                elif action.startswith("grad") and out.requires_grad:
                    asked = x if action == "grad x" or not w.requires_grad else w
                    (gradient,) = torch.autograd.grad(out.sum(), asked, retain_graph=True, allow_unused=True)
                    found.append(None if gradient is None else gradient.tolist())
            except RuntimeError as error:
                return [*found, "again" if "second time" in str(error) else "written"]
        return [*found, [t.tolist() for t in (*outputs, x, w, v)]]

    return use


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_random_programs(first):
    """Functions that keep and save, checkpoints, writes and backwards in any order are eager's, and are compiled."""
    counts = [0, 0]
    for seed in range(first, first + 30):
        draw = random.Random(seed)
        program, uses = a_program(draw), [a_use(draw) for _ in range(3)]
        f = compiled(program)
        for use in uses:
            assert str(use(program)) == str(use(f)), seed
        counts[0] += behind(f).calls.compiled
        counts[1] += behind(f).calls.eager
    assert counts[0] > 20 * counts[1]


@pytest.mark.parametrize("first", [0, 10])
def test_random_programs_behind_dynamo(first):
    """Dynamo writes a Function as graphs; what is saved and what is kept otherwise are told apart there too."""
    for seed in range(first, first + 10):
        draw = random.Random(seed)
        program, use = a_program(draw, checkpoints=False), a_use(draw)
        torch.compiler.reset()
        expected, found = str(use(program)), str(use(compiled(program, frontend="dynamo")))
        assert expected == found or not alike(lambda f, use=use: str(use(f)), program), seed


Attribute = keeping(["w"], [], looks=False)
Saved = keeping([], ["w"], looks=True)
Both = keeping(["w"], ["x"], looks=False)
Result = keeping(["y.detach()"], [], looks=False)
Unrelated = keeping(["w * 2", "w.clone()"], [], looks=False)


def _written(x, w, function):
    w.mul_(2)
    return function.apply(x, w)


def _written_later(x, w, function):
    y = function.apply(x, w)
    w.mul_(2)
    return y


PROGRAMS = {
    "attribute": lambda x, w: Attribute.apply(x, w),
    "attribute of a view": lambda x, w: Attribute.apply(x, w.view(3, 2).t().reshape(-1)),
    "saved": lambda x, w: Saved.apply(x, w),
    "saved by another": lambda x, w: Attribute.apply(x, w) * w,
    "saved by another's way": lambda x, w: (Attribute.apply(x, w), x * w)[0],
    "both": lambda x, w: Both.apply(x, w),
    "result": lambda x, w: Result.apply(x, w),
    "unrelated": lambda x, w: Unrelated.apply(x, w),
    "written": lambda x, w: _written(x, w, Attribute),
    "written, saved": lambda x, w: _written(x, w, Saved),
    "written later": lambda x, w: _written_later(x, w, Attribute),
    "written later, saved": lambda x, w: _written_later(x, w, Saved),
}


def _of_writes(function):
    """Return the gradients of two backwards with writes before them, or the error."""
    found = []
    for writes in ("", "w", "x", "result", "w.data"):
        x, w = leaf(6), torch.arange(6.0)
        given, y = x + 0, None
        try:
            y = function(given, w)
            for _ in range(2):
                with torch.no_grad():
                    target = {"w": w, "x": given, "result": y, "w.data": w.data}.get(writes)
                    if target is not None:
                        target.add_(1)
                y.sum().backward()
                found.append(x.grad.tolist())
        except RuntimeError as error:
            found.append(str(error)[:40])
    return found


@FRONTENDS
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_writes_of_the_caller(program, frontend):
    """The new value where only an attribute has it; autograd's error where a node that is reached has saved it."""
    f = compiled(program, frontend=frontend)
    assert _of_writes(program) == _of_writes(f)


@pytest.mark.parametrize("name", ["attribute", "saved", "both", "written", "written later"])
def test_that_these_are_compiled(name):
    """None of them is left to eager."""
    f = compiled(PROGRAMS[name])
    f(leaf(6), torch.arange(6.0))
    assert (behind(f).calls.compiled, behind(f).calls.eager) == (1, 0)


@pytest.mark.parametrize("name", ["attribute", "saved", "both", "result", "unrelated", "written"])
def test_under_hooks(name, monkeypatch):
    """What is saved goes through ``saved_tensors_hooks``, also where the backward reads it; an attribute does not."""
    monkeypatch.setattr(config, "saved_tensors_hooks", "apply")
    found = []
    for call in (PROGRAMS[name], compiled(PROGRAMS[name])):
        x, w = leaf(6), torch.arange(6.0)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach() * 2, lambda t: t):
            y = call(x, w)
        with torch.no_grad():
            w.add_(1)
        y.sum().backward()
        found.append(x.grad.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize("function", [Attribute, Saved], ids=["attribute", "saved"])
def test_a_view_that_is_returned(function):
    """A write to a view of what is kept, which is no input and not itself an output."""

    def program(x, w):
        v = x * w
        return function.apply(x, v), v[:2], v[2:]

    def use(call):
        x = leaf(6)
        y, v, _ = call(x, torch.arange(6.0))
        with torch.no_grad():
            v.add_(1)
        try:
            y.sum().backward()
        except RuntimeError as error:
            return str(error)[:40]
        return x.grad.tolist()

    assert use(program) == use(compiled(program))


def test_what_is_computed_again():
    """A partitioner that computes a value of the forward again must not do so from what was written since."""

    def program(x, w):
        return Attribute.apply(x, w) + x * w.sin()

    def gradient(function):
        x, w = leaf(6), torch.arange(6.0)
        y = function(x, w)
        w.add_(1)
        y.sum().backward()
        return x.grad.tolist()

    f = compiled(program, partitioner=aotlab.min_cut_rematerialization_partition)
    assert gradient(f) == gradient(program)
    assert [value.name for value in record(f, "partition").saved] == ["primals_2", "sin"]


@FRONTENDS
def test_inference(frontend):
    """Where nothing is differentiated, nothing is kept."""
    f = compiled(PROGRAMS["written"], frontend=frontend)
    for w in (torch.arange(6.0), torch.arange(6.0) * 2):
        own = w.clone()
        assert PROGRAMS["written"](torch.ones(6), own).tolist() == f(torch.ones(6), w).tolist()
        assert own.tolist() == w.tolist()


def test_an_inference_tensor_as_an_attribute():
    """Autograd refuses to save one; an attribute may be one."""
    with torch.inference_mode():
        w = torch.arange(6.0)
    found = []
    for call in (PROGRAMS["attribute"], compiled(PROGRAMS["attribute"])):
        x = leaf(6)
        call(x, w).sum().backward()
        found.append(x.grad.tolist())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "change", [lambda w: w.t_(), lambda w: setattr(w, "data", torch.ones(2, 3))], ids=["t_", "data"]
)
@pytest.mark.parametrize("name", ["attribute", "written"])
def test_other_sizes_or_memory(name, change):
    """The backward was compiled for those that there were; it never computes with what is no longer the tensor."""
    found = []
    for call in (PROGRAMS[name], compiled(PROGRAMS[name])):
        x, w = leaf(2, 3), torch.arange(6.0).view(2, 3)
        y = call(x + 0, w)
        change(w)
        try:
            y.sum().backward()
            found.append(x.grad.tolist())
        except (RuntimeError, MetadataMutationError) as error:
            found.append(type(error))
    assert found[1] in (found[0], MetadataMutationError)


def test_a_backward_that_returns_what_it_keeps():
    """Nobody knows who reads it then: a write is an error, as the README says, and no wrong value."""

    class Returning(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.w = w
            return x * w.sum()

        @staticmethod
        def backward(ctx, gradient):
            return ctx.w, None

    x, w = leaf(3), torch.arange(3.0)
    y = compiled(Returning.apply)(x, w)
    w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_is_lent():
    """The record says which saved values a backward reads as they are by then."""
    f = compiled(lambda x, w: (Attribute.apply(x, w), Saved.apply(x, w)))
    f(leaf(6), torch.arange(6.0))
    saved = record(f, "partition")
    names = [value.name for value in saved.saved]
    assert [names[n] for n in saved.lent] == ["primals_2"]
    assert ((0,), frozenset((0,)), ()) == (saved.lent, saved.late, saved.loose)


def test_a_captured_input_of_a_checkpoint():
    """Eager computes the checkpoint again with what the tensor is by then; what was given to it may not be written."""

    def program(x, w):
        return checkpoint(lambda value: (value + w).sin() * w, x, use_reentrant=False)

    def use(function, change):
        x, w = leaf(3), torch.arange(3.0)
        given = x + 0
        y = function(given, w)
        with torch.no_grad():
            change(given, w)
        try:
            y.sum().backward()
        except RuntimeError as error:
            return str(error)[:40]
        return x.grad.tolist()

    for change in (lambda x, w: w.add_(1), lambda x, w: x.add_(1), lambda x, w: w.data.add_(1)):
        assert use(program, change) == use(compiled(program), change)


def test_a_written_input_with_inductor():
    """The value that is kept is the caller's memory there too, though Inductor writes the graph anew."""
    found = []
    for call in (PROGRAMS["written"], compiled(PROGRAMS["written"], backend="inductor")):
        x, w = leaf(6), torch.arange(6.0)
        y = call(x, w)
        w.add_(1)
        y.sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)


def test_an_alias_that_is_no_longer_one():
    """A write to an alias of the kept input is an error in calls in which it is one (`fuzz --seed 920000`)."""

    def f(x, y):
        return checkpoint(lambda value: value * value, x, use_reentrant=False)

    def use(g, *, aliased):
        x = leaf(3)
        y = x.detach() if aliased else x.detach().clone()
        out = g(x, y)
        y.mul_(2)
        try:
            out.sum().backward()
        except RuntimeError:
            return "an error"
        return x.grad.tolist()

    for first in (True, False):
        g = compiled(f)
        for aliased in (first, not first, first):
            assert use(f, aliased=aliased) == use(g, aliased=aliased)
        assert g.calls.compiled == 3
