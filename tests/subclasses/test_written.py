"""Writes to wrappers: with and without history, through views, and with shared memory."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab.errors import RefusedError
from aotlab.subclasses.target import UnwrappedTarget
from tests.subclasses.kinds import Quantized, beside_eager, leaf, parts, plain, same, two


def after(write, result=lambda t: t * 3):
    """Return a function that writes an argument and returns a value computed from it."""

    def function(t, *others):
        write(t, *others)
        return result(t)

    return function


def under_no_grad(write):
    """Write under no_grad."""

    def function(t, *others):
        with torch.no_grad():
            write(t, *others)

    return function


WRITES = {
    "in place": lambda t: t.add_(1),
    "twice": lambda t: t.add_(1).mul_(2),
    "copied into": lambda t: t.copy_(t * 2),
    "through a view": lambda t: t[0].mul_(2),
    "a part": lambda t: t.a.add_(1),
    "an item": lambda t: t.__setitem__((0, slice(1)), 7.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_without_gradients(name):
    """The caller's wrapper, its parts and its version counter are eager's."""
    beside_eager(after(WRITES[name]), lambda: (two(),))


@pytest.mark.parametrize("name", sorted(WRITES.keys() - {"a part"}))
def test_a_buffer(name):
    """A write to a wrapper in a module's buffer agrees with eager."""

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", two())

        def forward(self, x):
            WRITES[name](self.state)
            return self.state * x

    mine, wanted = Net(), Net()
    compiled = aotlab.compile(mine, backend="eager")
    for step in range(3):
        assert same(compiled(plain(step)), wanted(plain(step)))
    assert same(mine.state, wanted.state)
    assert compiled.compiled.calls.compiled == 3


def history(function):
    """Return a function that calls the given one with a non-leaf argument."""

    def outer(t, *others):
        return function(t * 1, *others)

    return outer


def both(write):
    """Return a function that writes an argument and returns a value computed from it."""

    def function(t, *others):
        write(t, *others)
        return t.sin()

    return function


@pytest.mark.parametrize("name", sorted(WRITES.keys() - {"a part"}))
def test_with_gradients(name):
    """A written wrapper has eager's history."""
    compiled = aotlab.compile(WRITES[name], backend="eager")
    found = []
    for call in (compiled, WRITES[name]):
        for _ in range(2):
            t = leaf(two())
            argument = t * 1
            call(argument)
            assert argument.grad_fn is not None
            argument.exp().sum().backward()
            found.append((t.grad, argument.detach(), argument._version))
    assert same(found[:2], found[2:], versions=False)
    assert (compiled.calls.eager, len(compiled.entries)) == (0, 1)


def test_by_what_requires_grad():
    """A wrapper without a history gets one from a tensor with a history that is written into it."""
    compiled = aotlab.compile(lambda t, x: t.mul_(x), backend="eager")
    found = []
    for call in (compiled, lambda t, x: t.mul_(x)):
        t, x = two(), leaf(two(3))
        call(t, x)
        assert t.requires_grad
        t.sin().sum().backward()
        found.append((x.grad, t.detach()))
    assert same(*found, versions=False)
    assert compiled.calls.compiled == 1


WITH_HOOKS = {
    "a result": lambda t, u: (t.add_(1), t * u)[1],
    "another that is written": lambda t, u: (t.add_(1), u.mul_(t))[0],
}


@pytest.mark.parametrize("name", WITH_HOOKS)
def test_hooks_of_written_ones(name):
    """A hook on a wrapper that a write gave a history sees the gradients of the call's other results too."""
    function, seen = WITH_HOOKS[name], []
    with aotlab.config.patch(fallback="eager"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in (function, aotlab.compile(function, backend="eager")):
            t, u = leaf(two()) * 1, leaf(two(3)) * 1
            result = call(t, u)
            t.register_hook(seen.append)
            (result.sum() + u.sum()).backward()
    assert same(*seen)
    assert "a value computed from it is also returned or written" in str(caught[0].message)


def test_under_no_grad():
    """A leaf is written under no_grad, as by an optimizer, with eager's result."""
    beside_eager(after(under_no_grad(lambda t: t.sub_(0.5))), lambda: (leaf(two()),))


def test_a_quantized_one():
    """A quantized wrapper's own in-place op writes both of its parts."""
    beside_eager(after(lambda w, g: w.sub_(g), lambda w: w + 0.0), lambda: (Quantized.of(plain(1)), plain(2)))


def test_a_leaf():
    """A write to a leaf that eager refuses does not happen."""
    t = leaf(two())
    compiled = aotlab.compile(lambda t: t.add_(1), backend="eager")
    with pytest.raises(RefusedError, match="is a leaf that requires grad"):
        compiled(t)
    assert same(t, leaf(two()))


def test_returned():
    """A written wrapper is returned as the same object. Returned views of it see later writes."""
    compiled = aotlab.compile(lambda t: (t.mul_(2), t.t(), t[1]), backend="eager")
    for make in (two, lambda: leaf(two()) * 1):
        t, wanted = make(), make()
        ours, theirs = compiled(t), (wanted.mul_(2), wanted.t(), wanted[1])
        assert ours[0] is t
        assert same(ours, theirs)
        assert [view._base is t for view in ours[1:]] == [view._base is wanted for view in theirs[1:]]
        for _, view, row in (ours, theirs):
            view.add_(1)
            row.add_(1)
        assert same(t, wanted)
        assert torch.equal(ours[1].a, t.a.t())


def test_shared_parts():
    """A write to a wrapper is visible in a tensor or another wrapper that shares its memory."""
    function = lambda t, u: (t.add_(1), u * 2)[1]  # noqa: E731
    cases = [lambda t: (t, TwoTensor(t.b, t.a)), lambda t: (t, t.a), lambda t: (t, t), lambda t: (t, t.a[1:])]
    for share in cases:
        beside_eager(function, lambda share: share(two()), steps=[share] * 2)


def test_shared_parts_with_history():
    """A write to a wrapper with a history that shares memory with another argument is refused."""
    argument = leaf(two()) * 1
    with pytest.raises(RefusedError, match="is changed, and another argument shares its memory"):
        aotlab.compile(lambda t, x: (t.add_(1), x * 2)[1], backend="eager")(argument, argument.a)
    assert same(argument.detach(), two() * 1)


def test_a_part_returned():
    """A returned part of a wrapper is the same object. If the wrapper requires grad, the call is refused."""
    t = two()
    assert aotlab.compile(lambda t: t.a, backend="eager")(t) is t.a
    with pytest.raises(RefusedError, match="is a part of a tensor subclass that requires grad"):
        aotlab.compile(lambda t: t.a, backend="eager")(leaf(t))


ELSE = {
    "its sizes": (lambda t: t.t_(), "in place, and not only its values"),
    "an attribute": (lambda t: setattr(t, "note", "t"), "in place, and not only its values"),
    "a part replaced": (lambda t: setattr(t, "a", t.b), "in place, and not only its values"),
}


@pytest.mark.parametrize("name", ELSE)
def test_else(name, monkeypatch):
    """Other changes of a wrapper run eagerly, with a notice that names the change."""
    change, text = ELSE[name]
    monkeypatch.setattr(aotlab.config, "fallback", "eager")
    compiled = aotlab.compile(after(change), backend="eager")
    ours, theirs = two(), two()
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        assert same(compiled(ours), after(change)(theirs))
    assert text in str(noted[0].message)
    assert same(ours, theirs)
    assert parts(ours)[0] == parts(theirs)[0]


SIZES = {
    "t_": lambda t: t.t_(),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    "transpose_, and written": lambda t: t.transpose_(0, 1).mul_(2),
    "of a view": lambda t: t[1:].t_(),
    "of a result": lambda t: (t * 2).unsqueeze_(0),
}


@pytest.mark.parametrize("fallback", ["eager", "dynamo"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_in_place(name, grad, fallback, monkeypatch):
    """An op that changes sizes in place runs eagerly with one notice; results, argument and gradients are eager's."""
    monkeypatch.setattr(aotlab.config, "fallback", fallback)
    function = lambda t: (SIZES[name](t) * 3, t.sin())  # noqa: E731
    compiled = aotlab.compile(function, backend="eager")
    found = []
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        for call in (compiled, function) * 2:
            base = two().requires_grad_(grad)
            argument = base * 1
            result = call(argument)
            if grad:
                (result[0].sum() + result[1].sum() + argument.exp().sum()).backward()
            found.append((result, argument, base.grad))
    assert same(found[0], found[1], versions=False)
    assert same(found[2], found[3], versions=False)
    notices = [str(each.message) for each in noted if "runs eagerly" in str(each.message)]
    assert len(notices) == 1
    assert "changes sizes, strides or memory in place" in notices[0]
    assert (compiled.calls.eager, compiled.calls.by_dynamo) == (2, 0)


@pytest.mark.parametrize("fallback", ["eager", "dynamo", "error"])
def test_sizes_of_a_leaf(fallback, monkeypatch):
    """An abandoned trace keeps no autograd node of the leaf, which would have the leaf's old sizes."""
    monkeypatch.setattr(aotlab.config, "fallback", fallback)
    function = after(under_no_grad(lambda t: t.swapaxes_(1, 0)))
    compiled, found = aotlab.compile(function, backend="eager"), []
    for call in (compiled, function):
        argument = leaf(two())
        if fallback == "error":
            with contextlib.suppress(RefusedError):
                compiled(argument)
            call = function
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = call(argument)
        sum(each.sum() for each in (result, *argument.tensor_split(2, 1))).backward()
        found.append((argument.detach(), argument.grad))
    assert same(*found, versions=False)


def _plain(n, t, y):
    n.add_(1)
    return (y * t * n).sin()


def _wrapper(n, t, y):
    t.add_(1)
    return (y * t * n).sin()


#: The write before a checkpoint, the checkpoint's function, and whether it is compiled.
CHECKPOINTED = {
    "beside it": (lambda n, t: None, _plain, True),
    "before": (lambda n, t: t.mul_(2), lambda n, t, y: (y * t.cos()).sin(), True),
    "a wrapper": (lambda n, t: None, _wrapper, False),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_in_checkpoints(name, monkeypatch):
    """Each backward reads the buffers' current values and writes them again; a write of a wrapper runs eagerly."""
    before, body, is_compiled = CHECKPOINTED[name]
    monkeypatch.setattr(aotlab.config, "fallback", "eager")

    def outcome(compile):
        n, t, x = torch.ones(3, 4), two(), leaf(plain(5))

        def function(y):
            before(n, t)
            return checkpoint(lambda y: body(n, t, y), y, use_reentrant=False).sum()

        call, found = compile(function), []
        results = [call(x), call(x)]
        for result in results:
            result.backward()
            found += [n.clone(), n._version, t.clone(), t._version, x.grad]
            x.grad = None
        return found

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = outcome(lambda f: aotlab.compile(f, backend="eager"))
    assert same(found, outcome(lambda f: f))
    assert ["a checkpoint writes `t.a`, a part of" in str(each.message) for each in warned] == [True] * (
        not is_compiled
    )


def test_few_traces(monkeypatch):
    """One trace finds all written wrappers, and one finds the gradients of all plain inputs."""
    traces = []
    run = UnwrappedTarget.run

    def counted(*args):
        traces.append(1)
        return run(*args)

    def write(*tensors):
        for x in tensors:
            x.mul_(2)

    def multiply(w, *tensors):
        return sum(w * x for x in tensors)

    monkeypatch.setattr(UnwrappedTarget, "run", counted)
    beside_eager(write, lambda: tuple(two(i).requires_grad_() * 1 for i in range(6)))
    assert len(traces) == 2
    traces.clear()
    beside_eager(multiply, lambda: (two().requires_grad_(), *(two().a.requires_grad_() for _ in range(6))))
    assert len(traces) == 3
