"""Containers of classes with methods and attributes: guarded by both, and read without running any of their code."""

from __future__ import annotations

import collections
import logging
import threading
import types

import pytest
import torch
from torch import nn

import aotlab
from aotlab.errors import LeakedTensorError, RefusedError
from aotlab.events import CompileFailed
from aotlab.guards.leaks import Watch
from aotlab.guards.reach import reach
from tests.engine_helpers import behind, compiled, heard_events, refusing


def container_of(base):
    """Make a class of containers whose every method of reading counts, and scales by an attribute."""
    count = threading.Semaphore(0)  # no guard reads the state of a semaphore

    def counted(name):
        plain = getattr(base, name)

        def method(self, *args):
            count.release()
            return plain(self, *args)

        return method

    class Own(base):
        factor = 2.0

        def __getitem__(self, key):
            count.release()
            return base.__getitem__(self, key) * self.factor

    for name in ("__iter__", "__len__", "__contains__", "items", "values", "keys", "get", "copy"):
        if hasattr(base, name):
            setattr(Own, name, counted(name))
    return Own, count


KINDS = {
    "dictionary": (dict, {"a": 1.0}, "a"),
    "ordered dictionary": (collections.OrderedDict, {"a": 1.0}, "a"),
    "counter": (collections.Counter, {"a": 1}, "a"),
    "list": (list, [1.0], 0),
    "deque": (collections.deque, [1.0], 0),
    "tuple": (tuple, [1.0], 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_its_class_does_is_guarded(kind):
    """A container subclass is guarded: attributes of the class and of the container, its methods and its elements."""
    base, content, key = KINDS[kind]
    own, _ = container_of(base)
    held = own(content)

    def f(x):
        return x * held[key]

    function = compiled(f)
    x = torch.ones(2)
    changes = [
        lambda: setattr(own, "factor", 3.0),
        lambda: setattr(held, "factor", 5.0),
        lambda: setattr(own, "__getitem__", lambda self, key: base.__getitem__(self, key) + 7),
    ]
    if base is not tuple:
        changes.append(lambda: base.__setitem__(held, key, 9))
    assert torch.equal(function(x), f(x))
    for number, change in enumerate(changes):
        change()
        assert torch.equal(function(x), f(x))
        assert torch.equal(function(x), f(x))
        assert len(behind(function).entries) == number + 2


@pytest.mark.parametrize("kind", KINDS)
def test_none_of_its_code_is_run_besides(kind):
    """The methods of a container class run only in the function's own trace, and not in compiled calls."""
    base, content, key = KINDS[kind]
    own, count = container_of(base)
    held = own(content)

    def f(x):
        return x * held[key] if x.dim() == 1 else x

    function = compiled(f)

    def uses(x):
        before = count._value
        function(x)
        return count._value - before

    assert uses(torch.ones(2)) == 1
    assert uses(torch.ones(2)) == 0
    assert uses(torch.ones(2, 2)) == 0
    assert uses(torch.ones(2, dtype=torch.float64)) == 1


class Makes(collections.OrderedDict):
    """Makes a module on each lookup, as transformers' table of activations does."""

    def __getitem__(self, key):
        """Make it."""
        return super().__getitem__(key)()


class Scaled(nn.Module):
    """Has a parameter that begins with a constant."""

    def __init__(self):
        """Begin with one."""
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        nn.init.ones_(self.scale)


ACTIVATIONS = Makes(relu=nn.ReLU, scaled=Scaled)


def _make(name):
    return ACTIVATIONS[name]


def test_a_table_that_makes_modules():
    """A function that only mentions a table of module classes makes no module and is compiled."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.activation = None

        def forward(self, x):
            activation = _make("scaled") if self.activation is None else self.activation
            return activation(x) * 2

    net = Net()
    net.activation = _make("relu")
    function = compiled(net)
    x = torch.randn(3)
    assert torch.equal(function(x), net(x))
    assert behind(function).calls.compiled == 1


Point = collections.namedtuple("Point", "x y")


class Scaling(Point):
    """A named tuple with a property."""

    factor = 2.0

    @property
    def scaled(self):
        """Read an attribute of the class."""
        return self.x * self.factor


def test_named_tuples(monkeypatch):
    """The code of a named tuple's property is guarded."""
    point = Scaling(1.0, 2.0)
    function = compiled(lambda x: x * point.scaled)
    x = torch.ones(2)
    assert torch.equal(function(x), x * 2)
    monkeypatch.setattr(Scaling, "factor", 3.0)
    assert torch.equal(function(x), x * 3)
    assert len(behind(function).entries) == 2


class Register(dict):
    """A dictionary with an additional attribute."""


@pytest.mark.parametrize("where", ["item", "attribute"])
def test_leaks(where):
    """A traced tensor that leaks into the container, as an item or an attribute, is found and removed."""
    register = Register(a=1)
    register.last = None

    def f(x):
        y = x * 2
        if where == "item":
            register["a"] = y
        else:
            register.last = y
        return y

    with refusing(LeakedTensorError, match="register"):
        compiled(f)(torch.ones(2))
    assert (dict(register), vars(register)) == ({"a": 1}, {"last": None})


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "tuple"])
def test_what_changed_is_put_back_past_its_methods(kind):
    """A class that forbids its changes has its contents back all the same, in their order."""
    base, content, _ = KINDS[kind]

    class Frozen(base):
        def forbidden(self, *args):
            raise TypeError("frozen")

        __setitem__ = __delitem__ = clear = update = extend = append = pop = forbidden

    held = Frozen.__new__(Frozen)
    if issubclass(base, dict):
        for key in ("b", "a", *content):
            base.__setitem__(held, key, 1)
    else:
        base.extend(held, [3, 1, 2])
    before = list(base.items(held)) if issubclass(base, dict) else list(base.__iter__(held))
    watch = Watch([("held", held)])
    base.clear(held)
    base.__setitem__(held, "new", 5) if issubclass(base, dict) else base.append(held, 5)
    watch.restore()
    assert before == (list(base.items(held)) if issubclass(base, dict) else list(base.__iter__(held)))


def _reads_by_name(x):
    logger.debug("called")
    return x * getattr(settings, name)


logger = logging.getLogger(__name__)
settings = types.SimpleNamespace(scale=2.0)
name = "scale"


def test_loggers(monkeypatch):
    """A logger's cache, which logging changes, is no guarded state, and a logger does not lead to all other loggers."""
    logger._cache.clear()
    x = torch.ones(2)
    function = compiled(_reads_by_name)
    assert torch.equal(function(x), x * 2)
    assert torch.equal(function(x), x * 2)
    assert len(behind(function).entries) == 1
    assert not [item.name for item in reach(_reads_by_name).state if "loggerDict" in item.name]


def test_the_level_of_a_logger():
    """A level that the code reads is guarded."""

    def f(x):
        return x * 2 if logger.level == logging.DEBUG else x

    function = compiled(f)
    x = torch.ones(2)
    assert torch.equal(function(x), x)
    logger.setLevel(logging.DEBUG)
    try:
        assert torch.equal(function(x), x * 2)
    finally:
        logger.setLevel(logging.NOTSET)


def test_what_raises_in_a_trace_alone_is_traced_once():
    """A call that looks the same runs eagerly at once; another one is traced, and so is one that eager refused, too."""

    def f(x):
        if torch._is_functional_tensor(x) and x.dim() == 1:
            raise ValueError("only in a trace")
        if x.dim() == 3:
            raise ValueError("always")
        return x + 1

    function = aotlab.compile(f, backend="eager")

    def failures(*shape):
        with heard_events() as heard:
            assert torch.equal(function(torch.ones(shape)), torch.full(shape, 2.0))
        return len([each for each in heard if isinstance(each, CompileFailed)])

    with pytest.warns(RuntimeWarning, match="only in a trace"):
        assert failures(2) == 1
    assert [failures(2), failures(2, 2), failures(2, 2), failures(3)] == [0, 0, 0, 1]
    for _ in range(2):
        with heard_events() as heard, pytest.raises(ValueError, match="always"):
            function(torch.ones(2, 2, 2))
        assert [type(each) for each in heard if isinstance(each, CompileFailed)] == [CompileFailed]


def test_a_refusal_that_is_known_is_an_error_under_the_other_fallback(monkeypatch):
    """A call that ran eagerly while the setting allowed it raises when the setting is "error"."""
    monkeypatch.setattr(aotlab.config, "fallback", "eager")
    function = aotlab.compile(lambda x: x.tolist(), backend="eager")
    with pytest.warns(RuntimeWarning, match="runs eagerly"):
        assert function(torch.ones(2)) == [1.0, 1.0]
    assert function(torch.ones(2)) == [1.0, 1.0]
    monkeypatch.setattr(aotlab.config, "fallback", "error")
    with refusing(RefusedError):
        function(torch.ones(2))
