"""A function that reads state that no guard can watch runs eagerly.

State that is reached through other objects is guarded.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import functools
import io
import itertools
import logging
import operator
import queue
import random
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from aotlab.errors import LeakedTensorError, PythonValueError
from aotlab.guards.reach import reach
from tests.engine_helpers import behind, compiled, refusing


def _three(function: Callable[[Tensor], Any]) -> list[float]:
    return [float(function(torch.ones(()))) for _ in range(3)]


ITERATORS: dict[str, Callable[[], Any]] = {
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([1, 2]),
    "list": lambda: iter([1, 2, 3, 4]),
    "dict": lambda: iter({1: 0, 2: 0, 3: 0, 4: 0}),
    "generator": lambda: (i for i in range(9)),
    "map": lambda: map(int, "12345"),
    "file": lambda: map(int, io.StringIO("1\n2\n3\n4\n")),
    "numpy": lambda: numpy.arange(9).flat,
}


@pytest.mark.parametrize("kind", ITERATORS)
@pytest.mark.parametrize("where", ["closure", "default", "attribute", "item", "bound", "partial", "module"])
def test_a_captured_iterator(kind: str, where: str) -> None:
    """A captured iterator, however it is reached, is advanced at each call, as in eager, with a notice."""

    def make() -> Callable[[Tensor], Tensor]:
        it = ITERATORS[kind]()
        holder = types.SimpleNamespace(numbers=it)
        held = [it]
        step = it.__next__
        if where == "module":

            class Numbered(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.numbers = it

                def forward(self, x: Tensor) -> Tensor:
                    return x * float(next(self.numbers))

            return Numbered()
        ways: dict[str, Callable[..., Tensor]] = {
            "closure": lambda x: x * float(next(it)),
            "default": lambda x, it=it: x * float(next(it)),
            "attribute": lambda x: x * float(next(holder.numbers)),
            "item": lambda x: x * float(next(held[0])),
            "bound": lambda x: x * float(step()),
            "partial": functools.partial(lambda it, x: x * float(next(it)), it),
        }
        return ways[where]

    expected = _three(make())
    candidate = compiled(make())
    with pytest.warns(RuntimeWarning, match="no guard can check everything that the function reads: it "):
        actual = _three(candidate)
    assert expected == actual
    assert behind(candidate).calls.eager == 3


def test_iterators_made_inside_are_compiled() -> None:
    """An iterator that the function itself makes over guarded values belongs to one call, and is compiled."""
    values = [1, 2]

    def function(x: Tensor) -> Tensor:
        it = iter(values)
        return x * next(it) + sum(i * v for i, v in zip(range(2), map(int, values), strict=True))

    candidate = compiled(function)
    assert [candidate(torch.ones(())).item() for _ in range(2)] == [3.0, 3.0]
    assert behind(candidate).calls.compiled == 2


@pytest.mark.parametrize("name", ["numbers", "other"])
def test_an_iterator_read_by_a_computed_name(name: str) -> None:
    """If the code mentions `getattr`, all attributes of the user's objects are considered."""
    holder = types.SimpleNamespace(numbers=itertools.count(), other=itertools.count())
    candidate = compiled(lambda x: x * next(getattr(holder, name)))
    with pytest.warns(RuntimeWarning, match="no guard can check everything that the function reads: it "):
        actual = _three(candidate)
    assert actual == [0.0, 1.0, 2.0]


def test_the_counters_of_a_package() -> None:
    """State that only an installed package's code reads does not prevent compilation.

    An example is a counter that numbers the package's objects.
    """
    source = """
def number():
    eval("1")
    return next(COUNT) * 0 + 2
"""
    package: dict[str, Any] = {"__name__": "package", "COUNT": itertools.count()}
    exec(compile(source, "/lib/site-packages/package.py", "exec"), package)
    number = package["number"]
    assert reach(lambda x: x * number()).unseen is None
    shared = package["COUNT"]
    assert reach(lambda x: x * number() * next(shared)).unseen is not None


class _Counted:
    """Can be referred to weakly."""


@pytest.mark.parametrize("kind", ["in a dictionary", "in an object", "weakly"])
def test_what_lies_in_a_register_of_a_package(kind: str) -> None:
    """An object in a package's registry is not guarded until the user's code names it.

    Until then it is the package's internal state.
    """
    source = """
class Register:
    pass

def number():
    return (len(REGISTER.data) if hasattr(REGISTER, "data") else len(REGISTER)) * 0 + 2
"""
    package: dict[str, Any] = {"__name__": "package"}
    exec(compile(source, "/lib/site-packages/package.py", "exec"), package)
    number, counted = package["number"], _Counted()
    if kind == "in a dictionary":
        register: Any = {"inner": [itertools.count()]}
    elif kind == "in an object":
        register = package["Register"]()
        register.data = {"inner": itertools.count()}
    else:
        register = weakref.WeakValueDictionary({1: counted})
    package["REGISTER"] = register
    assert reach(lambda x: x * number()).unseen is None
    assert reach(lambda x: x * number() * len(register.__class__.__name__)).unseen is not None
    inner = register["inner"] if kind == "in a dictionary" else register.data
    assert reach(lambda x: x * number() * len(inner)).unseen is not None


def test_a_method_of_what_lies_in_a_register_of_a_package() -> None:
    """An object that the user's code reads by a method is the user's state.

    This holds even if a package's registry contains the object too.
    """
    source = "def number():\n    return len(REGISTER) * 0 + 2\n"
    package: dict[str, Any] = {"__name__": "package"}
    exec(compile(source, "/lib/site-packages/package.py", "exec"), package)

    class Reader:
        def __init__(self) -> None:
            self.numbers = itertools.count()

        def read(self) -> int:
            return next(self.numbers)

    reader = Reader()
    package["REGISTER"], number, read = [reader], package["number"], reader.read
    assert reach(lambda x: x * number()).unseen is None
    assert reach(lambda x: x * number() * read()).unseen is not None


def test_an_iterator_that_no_code_names() -> None:
    """An iterator next to an attribute that the code reads is not an obstacle."""
    holder = types.SimpleNamespace(scale=2.0, numbers=itertools.count())
    candidate = compiled(lambda x: x * holder.scale)
    assert candidate(torch.ones(())).item() == 2.0
    assert behind(candidate).calls.compiled == 1


class Scaled:
    """Has a number, and a method that reads it."""

    scale = 2

    def read(self) -> int:
        """Read it."""
        return self.scale


def _singled() -> Any:
    @functools.singledispatch
    def scale(kind: Any) -> int:
        return 1

    return scale


def _on_a_tensor() -> list[Any]:
    tensor = torch.ones(1)
    tensor.held = [2, 3]  # type: ignore[attr-defined]
    return [tensor]


def _in_itself() -> dict[str, Any]:
    loop: dict[str, Any] = {"k": 2}
    loop["left"] = loop["right"] = loop
    return loop


def _put(index: Any, value: Any) -> Callable[[Any], None]:
    return lambda held: held.__setitem__(index, value)


OWNER = Scaled()
HOLDING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytearray": (lambda: bytearray(b"\x02\x03"), _put(0, 9), lambda b: b[0]),
    "array": (lambda: array.array("d", [2.0, 3.0]), _put(1, 9.0), lambda a: a[1]),
    "c_int": (lambda: ctypes.c_int(2), lambda c: setattr(c, "value", 9), lambda c: c.value),
    "c array": (lambda: (ctypes.c_int * 2)(2, 3), _put(1, 9), lambda c: c[1]),
    "pointer": (lambda: ctypes.pointer(ctypes.c_int(2)), _put(0, 9), lambda c: c[0]),
    "user dict": (lambda: collections.UserDict(k=2), _put("k", 9), lambda d: d["k"]),
    "user list": (lambda: collections.UserList([2]), _put(0, 9), lambda d: d[0]),
    "chain of maps": (lambda: collections.ChainMap({"k": 2}), _put("k", 9), lambda d: d["k"]),
    "queue": (lambda: queue.Queue(), lambda q: q.put(1), lambda q: q.qsize() + 1),
    "simple queue": (lambda: queue.SimpleQueue(), lambda q: q.put(1), lambda q: q.qsize() + 1),
    "in a container": (lambda: [bytearray(b"\x02")], lambda q: q[0].append(1), lambda q: len(q[0])),
    "view of a dictionary": (lambda: {1: 2}.keys(), lambda k: k.mapping, lambda k: len(k)),
    "attrgetter": (lambda: operator.attrgetter("scale"), lambda _: setattr(OWNER, "scale", 9), lambda g: g(OWNER)),
    "methodcaller": (lambda: operator.methodcaller("read"), lambda _: setattr(OWNER, "scale", 9), lambda c: c(OWNER)),
    "generic function": (_singled, lambda f: f.register(int, lambda kind: 9), lambda f: f(3)),
    "weak reference": (lambda: weakref.ref(OWNER), lambda _: setattr(OWNER, "scale", 9), lambda r: r().scale),
    "weak proxy": (lambda: weakref.proxy(OWNER), lambda _: setattr(OWNER, "scale", 9), lambda p: p.scale),
    "weak method": (lambda: weakref.WeakMethod(OWNER.read), lambda _: setattr(OWNER, "scale", 9), lambda m: m()()),
    "weak dictionary": (lambda: weakref.WeakValueDictionary(k=OWNER), lambda d: d.clear(), lambda d: len(d) + 1),
    "very many items": (lambda: list(range(2_049)), _put(7, 0), lambda values: values[7]),
    "a large array": (lambda: numpy.ones(10_000), _put(7, 9), lambda values: float(values[7])),
    "a cycle": (_in_itself, _put("k", 9), lambda d: d["k"]),
    "a list on a tensor": (_on_a_tensor, lambda held: held[0].held.append(1), lambda held: len(held[0].held)),
}


GUARDED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "mapping proxy": (
        lambda: types.MappingProxyType(vars(OWNER)),
        lambda _: setattr(OWNER, "own", 9),
        lambda p: p.get("own", 2),
    ),
    "context variable": (
        lambda: contextvars.ContextVar("number", default=2),
        lambda number: number.set(9),
        lambda number: number.get(),
    ),
}


@pytest.mark.parametrize("kind", GUARDED)
def test_what_is_guarded(kind: str) -> None:
    """Values behind a mapping proxy or a context variable are read again at each call.

    Transformers' models use both.
    """
    make, change, read = GUARDED[kind]
    held = make()
    candidate = compiled(lambda x: x * read(held))
    actual = [candidate(torch.ones(())).item() for _ in range(2)]
    change(held)
    actual.append(candidate(torch.ones(())).item())
    vars(OWNER).pop("own", None)
    assert actual == [2.0, 2.0, 9.0]
    assert (behind(candidate).calls.compiled, len(behind(candidate).entries)) == (3, 2)


@pytest.mark.parametrize("kind", HOLDING)
def test_what_runs_eagerly(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """State behind such an object may change without a guard, so each call runs eagerly, with one notice."""
    monkeypatch.setattr(OWNER, "scale", 2)
    make, change, read = HOLDING[kind]
    held = make()
    candidate = compiled(lambda x: x * read(held))
    before = float(read(held))
    with pytest.warns(
        RuntimeWarning,
        match="no guard can check everything that the function reads: it reads `held"
        r"|`held\[0\].held`, which the function may read",
    ):
        actual = [candidate(torch.ones(())).item() for _ in range(2)]
    change(held)
    actual.append(candidate(torch.ones(())).item())
    assert [before, before, float(read(held))] == actual
    assert behind(candidate).calls.eager == 3


def test_views_of_a_dictionary() -> None:
    """A view of a dictionary that the function makes belongs to one call, and is compiled."""
    values = {"a": 1, "b": 2}
    inside = compiled(lambda x: x * sum(values.values()))
    actual = [inside(torch.ones(())).item()]
    values["c"] = 3
    actual.append(inside(torch.ones(())).item())
    assert actual == [3.0, 6.0]
    assert behind(inside).calls.compiled == 2


def test_methods_written_in_c() -> None:
    """A captured method of a list or a dictionary leads to its object, which is guarded."""
    values = {"k": 2}
    get = values.get
    candidate = compiled(lambda x: x * get("k"))
    actual = [candidate(torch.ones(())).item()]
    values["k"] = 5
    actual.append(candidate(torch.ones(())).item())
    assert actual == [2.0, 5.0]
    kept: list[Tensor] = []
    keep = kept.append

    def function(x: Tensor) -> Tensor:
        y = x * 2
        keep(y)
        return y

    with refusing(LeakedTensorError):
        compiled(function)(torch.ones(()))
    assert kept == []


K = 2


@pytest.mark.parametrize("how", ["globals", "eval", "exec"])
def test_names_that_stand_in_no_code(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that reads names by `globals`, `eval` or `exec` runs eagerly, also in a function that is called."""

    def by_exec() -> int:
        found: dict[str, int] = {}
        exec(f"found['k'] = {__name__!r}", {"found": found})
        exec("found['k'] = K", {"K": K, "found": found})
        return found["k"]

    ways: dict[str, Callable[[], int]] = {
        "globals": lambda: globals()["K"],
        "eval": lambda: eval("K"),
        "exec": by_exec,
    }
    read = ways[how]
    candidate = compiled(lambda x: x * read())
    with pytest.warns(
        RuntimeWarning, match=f"no guard can check .*: it calls `{how}`, which may read anything, in .*unseen"
    ):
        actual = [candidate(torch.ones(())).item()]
    monkeypatch.setitem(globals(), "K", 9)
    actual.append(candidate(torch.ones(())).item())
    assert actual == [2.0, 9.0]
    assert behind(candidate).calls.eager == 2


def test_a_function_of_that_name() -> None:
    """A user's own function or method called `eval` is an ordinary function."""
    source = "def eval(x):\n    return x * 2\ndef function(x, m):\n    return eval(x)\n"
    namespace: dict[str, Any] = {"__name__": "users"}
    exec(source, namespace)
    candidate = compiled(lambda x: namespace["function"](x, None))
    assert candidate(torch.ones(())).item() == 2.0
    assert behind(candidate).calls.compiled == 1


@pytest.mark.parametrize("make", [lambda: random.Random(3), lambda: numpy.random.default_rng(3)], ids=["py", "numpy"])
def test_generators_of_random_numbers(make: Callable[[], Any]) -> None:
    """A user's own generator of random numbers gives another number at each call, as in eager."""
    ours, eagers = make(), make()
    candidate = compiled(lambda x: x * ours.random())
    with pytest.warns(RuntimeWarning, match="no guard can check everything that the function reads: it "):
        actual = _three(candidate)
    assert _three(lambda x: x * eagers.random()) == actual
    assert len(set(actual)) == 3


@pytest.mark.parametrize("module", [random, numpy.random], ids=["py", "numpy"])
def test_random_numbers_of_a_module(module: Any) -> None:
    """A call that draws a module's random numbers runs eagerly with eager's numbers.

    The trace's draws have no effect.
    """
    module.seed(5)
    expected = _three(lambda x: x * module.random())
    module.seed(5)
    with pytest.warns(RuntimeWarning, match="draws from"):
        assert _three(compiled(lambda x: x * module.random())) == expected


def test_a_file_that_is_written() -> None:
    """A file that is only written, as by a log, does not prevent compilation; a file that is read does."""
    written, read = sys.__stderr__, io.StringIO("2\n3\n")

    def logs(x: Tensor) -> Tensor:
        assert written is not None
        written.write("")
        return x * 2

    candidate, reader = compiled(logs), compiled(lambda x: x * float(read.readline()))
    assert candidate(torch.ones(())).item() == 2.0
    assert behind(candidate).calls.compiled == 1
    with pytest.warns(RuntimeWarning, match="`read`, a `StringIO`"):
        actual = [reader(torch.ones(())).item() for _ in range(2)]
    assert actual == [2.0, 3.0]


def test_a_function_as_an_argument() -> None:
    """A function argument that no guard can watch is refused by name."""
    with refusing(PythonValueError, match=r"`g` is a function that no guard can check, .* it calls `globals`"):
        compiled(lambda x, g: x * g())(torch.ones(()), lambda: globals()["K"])


def test_what_usual_code_has_is_compiled() -> None:
    """A logger does not prevent compilation, even if `getattr` is mentioned and all its attributes are considered."""
    logger = logging.getLogger("aotlab.test")
    handler = logging.StreamHandler(io.StringIO())
    logger.addHandler(handler)
    try:

        def function(x: Tensor) -> Tensor:
            getattr(logger, "debug")("a call")  # noqa: B009  # by a string is the point
            return x * 2

        assert reach(function).unseen is None
        logger.warning("this is remembered by the logger")
        candidate = compiled(lambda x: (logger.warning("a call"), x * 2)[1])
        assert candidate(torch.ones(())).item() == 2.0
        assert behind(candidate).calls.compiled == 1
    finally:
        logger.removeHandler(handler)


def test_code_that_a_package_generates() -> None:
    """State that only a package's generated code reads, as in its dataclasses' methods, is the package's own."""
    space: dict[str, Any] = {
        "__file__": "/x/site-packages/p.py",
        "held": types.SimpleNamespace(it=operator.attrgetter("a")),
    }
    exec("def helper(x):\n    held.it\n    return x * 2", space)
    helper = space["helper"]
    candidate = compiled(lambda x: helper(x))
    assert candidate(torch.ones(())).item() == 2.0
    assert behind(candidate).calls.eager == 0
