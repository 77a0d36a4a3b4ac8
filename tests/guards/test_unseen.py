"""What a function reaches and no guard can watch runs eagerly; what lies behind other objects is guarded."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import functools
import gc
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
from aotlab.reach import reach
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
    """Wherever it hangs, each call takes the next from it, as in eager, and a sentence says so."""

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
    with pytest.warns(RuntimeWarning, match="whose state may be another at each call"):
        actual = _three(candidate)
    assert expected == actual
    assert behind(candidate).calls.eager == 3


def test_iterators_made_inside_are_compiled() -> None:
    """An iterator of the function's own, over what is guarded, is none of another call's."""
    values = [1, 2]

    def function(x: Tensor) -> Tensor:
        it = iter(values)
        return x * next(it) + sum(i * v for i, v in zip(range(2), map(int, values), strict=True))

    candidate = compiled(function)
    assert [candidate(torch.ones(())).item() for _ in range(2)] == [3.0, 3.0]
    assert behind(candidate).calls.compiled == 2


@pytest.mark.parametrize("name", ["numbers", "other"])
def test_an_iterator_read_by_a_computed_name(name: str) -> None:
    """Where `getattr` is mentioned, all attributes of the user's objects count."""
    holder = types.SimpleNamespace(numbers=itertools.count(), other=itertools.count())
    candidate = compiled(lambda x: x * next(getattr(holder, name)))
    with pytest.warns(RuntimeWarning, match="whose state may be another at each call"):
        actual = _three(candidate)
    assert actual == [0.0, 1.0, 2.0]


def test_the_counters_of_a_package() -> None:
    """What only the code of an installed package reads, as to number its objects, lets a function be compiled."""
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
    """What is found in such a thing counts as the thing does: the package's affair, until the user's code names it."""
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
    """What the user's code reads by a method is the user's affair, whoever holds the object besides."""
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


def test_a_refused_call_leaves_context_variables_alone() -> None:
    """Neither one that had only its default, nor one that was set."""
    unset: contextvars.ContextVar[Any] = contextvars.ContextVar("unset", default=None)
    count = contextvars.ContextVar("count", default=0)

    def caches(x: torch.Tensor) -> torch.Tensor:
        if unset.get() is None:
            unset.set(torch.ones(2))
        return x + unset.get()

    def counts(x: torch.Tensor) -> torch.Tensor:
        count.set(count.get() + 1)
        return x * count.get()

    for _ in range(2):
        for function in (caches, counts):
            with refusing(LeakedTensorError):
                compiled(function)(torch.ones(2))
        assert (unset.get(), count.get()) == (None, _)
        count.set(_ + 1)


def test_an_iterator_that_no_code_names() -> None:
    """What hangs beside what is read costs nothing."""
    holder = types.SimpleNamespace(scale=2.0, numbers=itertools.count())
    candidate = compiled(lambda x: x * holder.scale)
    assert candidate(torch.ones(())).item() == 2.0
    assert behind(candidate).calls.compiled == 1


class Pair(ctypes.Structure):
    """A structure of C."""

    _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_int))


def _put(index: Any, value: Any) -> Callable[[Any], None]:
    return lambda held: held.__setitem__(index, value)


CHANGING: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "bytearray": (lambda: bytearray(b"\x02\x03"), _put(0, 9), lambda b: b[0]),
    "bytearray that grows": (lambda: bytearray(b"\x02"), lambda b: b.append(1), len),
    "array": (lambda: array.array("d", [2.0, 3.0]), _put(1, 9.0), lambda a: a[1]),
    "c_int": (lambda: ctypes.c_int(2), lambda c: setattr(c, "value", 9), lambda c: c.value),
    "c array": (lambda: (ctypes.c_int * 2)(2, 3), _put(1, 9), lambda c: c[1]),
    "c structure": (lambda: Pair(2, 3), lambda c: setattr(c, "b", 9), lambda c: c.b),
    "user dict": (lambda: collections.UserDict(k=2), _put("k", 9), lambda d: d["k"]),
    "user list": (lambda: collections.UserList([2]), _put(0, 9), lambda d: d[0]),
    "queue": (lambda: queue.Queue(), lambda q: q.put(1), lambda q: q.qsize() + 1),
    "a container of one": (lambda: [bytearray(b"\x02")], lambda q: q[0].append(1), lambda q: len(q[0])),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_contents_that_change(kind: str) -> None:
    """They are compared: another content is compiled for, and an unchanged one finds its entry."""
    make, change, read = CHANGING[kind]
    held = make()
    candidate = compiled(lambda x: x * read(held))
    before = float(read(held))
    actual = [candidate(torch.ones(())).item() for _ in range(2)]
    change(held)
    after = float(read(held))
    actual.append(candidate(torch.ones(())).item())
    assert before != after
    assert [before, before, after] == actual
    assert len(behind(candidate).entries) == 2
    assert behind(candidate).calls.compiled == 3


@pytest.mark.parametrize("kind", ["bytearray", "array", "c_int", "c structure"])
def test_contents_that_the_function_changes(kind: str) -> None:
    """It is refused, and they are as before."""
    make, change, read = CHANGING[kind]
    held = make()
    before = read(held)

    def function(x: Tensor) -> Tensor:
        change(held)
        return x * read(held)

    with refusing(LeakedTensorError, match="the function changes `held`"):
        compiled(function)(torch.ones(()))
    assert before == read(held)


def test_bytes_among_very_many() -> None:
    """One in a container that is compared by the identity of its items is looked into as well."""
    held: list[Any] = [bytearray(b"\x02"), *range(3_000)]
    candidate = compiled(lambda x: x * held[0][0])
    actual = [candidate(torch.ones(())).item()]
    held[0][0] = 9
    actual.append(candidate(torch.ones(())).item())
    assert actual == [2.0, 9.0]


def test_a_pointer() -> None:
    """What it points to may change: the function runs eagerly."""
    number = ctypes.c_int(2)
    pointer = ctypes.pointer(number)
    candidate = compiled(lambda x: x * pointer[0])
    with pytest.warns(RuntimeWarning, match="`pointer`, a `LP_c_int`"):
        actual = [candidate(torch.ones(())).item()]
    number.value = 9
    actual.append(candidate(torch.ones(())).item())
    assert actual == [2.0, 9.0]


def test_too_many_bytes() -> None:
    """What cannot be compared cheaply is refused, as a numpy array is."""
    held = bytearray(70_000)
    with refusing(PythonValueError, match="`held`, which the function reads, is a bytearray of 70000 bytes"):
        compiled(lambda x: x * len(held))(torch.ones(()))


def test_a_mapping_proxy() -> None:
    """Its dictionary is guarded, also that of one in a container."""
    inner, deep = {"k": 2}, {"k": 3}
    proxy, held = types.MappingProxyType(inner), [types.MappingProxyType(deep)]
    candidate = compiled(lambda x: x * proxy["k"] * held[0]["k"])
    actual = [candidate(torch.ones(())).item()]
    inner["k"] = 5
    actual.append(candidate(torch.ones(())).item())
    deep["k"] = 7
    actual += [candidate(torch.ones(())).item() for _ in range(2)]
    assert actual == [6.0, 15.0, 35.0, 35.0]
    assert len(behind(candidate).entries) == 3
    reason = "`proxy['k']`, which the function reads, is 5 where the compiled entry expects 2"
    assert reason == behind(candidate).recompiles[0]


def test_a_chain_of_maps() -> None:
    """A map within it is guarded, and so is which maps there are."""
    inner = {"k": 2}
    chain = collections.ChainMap({}, inner)
    candidate = compiled(lambda x: x * chain["k"])
    actual = [candidate(torch.ones(())).item()]
    inner["k"] = 5
    actual.append(candidate(torch.ones(())).item())
    chain.maps.insert(0, {"k": 7})
    actual.append(candidate(torch.ones(())).item())
    assert actual == [2.0, 5.0, 7.0]
    assert len(behind(candidate).entries) == 3


def test_views_of_a_dictionary() -> None:
    """A captured view runs eagerly; one that is made inside does not."""
    values = {"a": 1, "b": 2}
    view = values.values()
    outside, inside = compiled(lambda x: x * sum(view)), compiled(lambda x: x * sum(values.values()))
    with pytest.warns(RuntimeWarning, match="`view`, a `dict_values`"):
        actual = [outside(torch.ones(())).item(), inside(torch.ones(())).item()]
    values["c"] = 3
    actual += [outside(torch.ones(())).item(), inside(torch.ones(())).item()]
    assert actual == [3.0, 3.0, 6.0, 6.0]
    assert behind(outside).calls.eager == 2
    assert behind(inside).calls.compiled == 2


def test_lookups_of_operator() -> None:
    """What an `attrgetter`, an `itemgetter` or a `methodcaller` looks up is guarded."""

    class Held:
        def __init__(self) -> None:
            self.scale = 2
            self.inner = types.SimpleNamespace(deep=3)

        def times(self, other: int) -> int:
            return self.hidden * other

        hidden = 1

    held, items = Held(), [5]
    by_name, by_path = operator.attrgetter("scale"), operator.attrgetter("inner.deep")
    by_item, by_call = operator.itemgetter(0), operator.methodcaller("times", other=1)
    candidate = compiled(lambda x: x * by_name(held) * by_path(held) * by_item(items) * by_call(held))
    actual = [candidate(torch.ones(())).item() for _ in range(2)]
    held.scale = 3
    actual.append(candidate(torch.ones(())).item())
    held.inner.deep = 4
    actual.append(candidate(torch.ones(())).item())
    items[0] = 1
    actual.append(candidate(torch.ones(())).item())
    held.hidden = 10
    actual.append(candidate(torch.ones(())).item())
    assert actual == [30.0, 30.0, 45.0, 60.0, 12.0, 120.0]
    assert behind(candidate).calls.compiled == 6
    assert len(behind(candidate).entries) == 5


@pytest.mark.parametrize("by_name", [False, True])
def test_what_a_methodcaller_passes_on(by_name: bool) -> None:
    """Its arguments are guarded, by place and by name."""
    numbers = [2]
    total = operator.methodcaller("mul", other=numbers) if by_name else operator.methodcaller("mul", numbers)

    class Sums:
        def mul(self, other: list[int]) -> int:
            return sum(other)

    sums = Sums()
    candidate = compiled(lambda x: x * total(sums))
    actual = [candidate(torch.ones(())).item()]
    numbers.append(3)
    actual.append(candidate(torch.ones(())).item())
    assert actual == [2.0, 5.0]


def test_methods_written_in_c() -> None:
    """A captured method of a list or a dictionary leads to what it belongs to."""
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
    """What reads them by `globals`, `eval` or `exec` runs eagerly, also in a function that is called."""

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
    with pytest.warns(RuntimeWarning, match=f"it calls `{how}`, which may read what no guard watches, in .*unseen"):
        actual = [candidate(torch.ones(())).item()]
    monkeypatch.setitem(globals(), "K", 9)
    actual.append(candidate(torch.ones(())).item())
    assert actual == [2.0, 9.0]
    assert behind(candidate).calls.eager == 2


def test_a_function_of_that_name() -> None:
    """One of the user's own called `eval` is none of them; nor is a method of that name."""
    source = "def eval(x):\n    return x * 2\ndef function(x, m):\n    return eval(x)\n"
    namespace: dict[str, Any] = {"__name__": "users"}
    exec(source, namespace)
    candidate = compiled(lambda x: namespace["function"](x, None))
    assert candidate(torch.ones(())).item() == 2.0
    assert behind(candidate).calls.compiled == 1


def test_a_generic_function() -> None:
    """A type that is registered later is seen, and so is what the registered functions read."""
    factor = types.SimpleNamespace(by=3)

    @functools.singledispatch
    def scale(kind: Any) -> int:
        return 1

    @scale.register(int)
    def _(kind: int) -> int:
        return factor.by

    class Owner:
        @functools.singledispatchmethod
        def scale(self, kind: Any) -> int:
            return 1

    owner = Owner()
    candidate = compiled(lambda x, kind: x * scale(kind) * owner.scale(kind))
    actual = [candidate(torch.ones(()), kind).item() for kind in (3, "text")]
    factor.by = 4
    actual.append(candidate(torch.ones(()), 3).item())
    scale.register(str, lambda kind: 5)
    actual.append(candidate(torch.ones(()), "text").item())
    vars(Owner)["scale"].register(str, lambda self, kind: 7)
    actual += [candidate(torch.ones(()), "text").item() for _ in range(2)]
    assert actual == [3.0, 1.0, 4.0, 5.0, 35.0, 35.0]
    assert behind(candidate).calls.compiled == 6


def test_a_simple_queue() -> None:
    """No traced tensor stays in it: the function runs eagerly."""
    kept: queue.SimpleQueue[Tensor] = queue.SimpleQueue()

    def function(x: Tensor) -> Tensor:
        y = x * 2
        kept.put(y)
        return y + 1

    candidate = compiled(function)
    with pytest.warns(RuntimeWarning, match="`kept`, a `SimpleQueue`"):
        actual = [candidate(torch.ones(())).item() for _ in range(2)]
    assert actual == [3.0, 3.0]
    assert [kept.get().item() for _ in range(2)] == [2.0, 2.0]
    assert kept.empty()


def test_a_queue() -> None:
    """One that is written in Python is looked into: a traced tensor in it is refused, and is there no longer."""
    kept: queue.Queue[Tensor] = queue.Queue()

    def function(x: Tensor) -> Tensor:
        y = x * 2
        kept.put(y)
        return y

    with refusing(LeakedTensorError, match=r"`kept\.queue"):
        compiled(function)(torch.ones(()))
    assert kept.empty()


@pytest.mark.parametrize("make", [lambda: random.Random(3), lambda: numpy.random.default_rng(3)], ids=["py", "numpy"])
def test_generators_of_random_numbers(make: Callable[[], Any]) -> None:
    """One of the user's own gives another number at each call, as in eager."""
    ours, eagers = make(), make()
    candidate = compiled(lambda x: x * ours.random())
    with pytest.warns(RuntimeWarning, match="whose state may be another at each call"):
        actual = _three(candidate)
    assert _three(lambda x: x * eagers.random()) == actual
    assert len(set(actual)) == 3


def test_a_file_that_is_written() -> None:
    """Where a log goes does not keep a function from being compiled; where text is read from does."""
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
    """One that no guard can watch is refused by name."""
    with refusing(PythonValueError, match=r"`g` is a function that no guard can watch, .* it calls `globals`"):
        compiled(lambda x, g: x * g())(torch.ones(()), lambda: globals()["K"])


def test_weak_references_are_no_iterators() -> None:
    """A weak proxy, whose type has the methods of all types, is compiled."""

    class Owner:
        scale = 2

    owner = Owner()
    proxy = weakref.proxy(owner)
    candidate = compiled(lambda x: x * proxy.scale)
    assert candidate(torch.ones(())).item() == 2.0
    assert behind(candidate).calls.compiled == 1


class Scaled:
    """Has a number, and a method that reads it."""

    scale = 2

    def read(self) -> int:
        """Read it."""
        return self.scale


def _by_reference(owner: Scaled) -> Callable[[Tensor], Tensor]:
    reference = weakref.ref(owner)
    return lambda x: x * reference().scale  # type: ignore[union-attr]


def _by_method(owner: Scaled) -> Callable[[Tensor], Tensor]:
    method = weakref.WeakMethod(owner.read)
    return lambda x: x * method()()  # type: ignore[misc]


def _by_dictionary(owner: Scaled) -> Callable[[Tensor], Tensor]:
    owners = weakref.WeakValueDictionary(a=owner)
    return lambda x: x * owners["a"].scale


def _by_set(owner: Scaled) -> Callable[[Tensor], Tensor]:
    owners = weakref.WeakSet([owner])
    return lambda x: x * sum(each.scale for each in owners)


WEAK = (_by_reference, _by_method, _by_dictionary, _by_set)


@pytest.mark.parametrize("kind", WEAK)
def test_what_only_a_weak_reference_leads_to(kind: Callable[[Scaled], Callable[[Tensor], Tensor]]) -> None:
    """No guard could watch it without keeping it alive: eager. Beside a usual reference the same is compiled."""
    owners, x = [Scaled()], torch.ones(())
    function = kind(owners[0])
    candidate = compiled(function)
    with pytest.warns(RuntimeWarning, match="a weak reference to what nothing else leads to"):
        assert candidate(x).item() == 2.0
    owners[0].scale = 3
    assert candidate(x).item() == 3.0
    assert behind(candidate).calls.compiled == 0
    beside = compiled(lambda x: function(x) + len(owners))
    assert beside(x).item() == 4.0
    owners[0].scale = 4
    assert beside(x).item() == 5.0
    assert behind(beside).calls.eager == 0
    gone = weakref.ref(owners[0])
    owners.clear()
    del beside
    gc.collect()
    assert gone() is None


def test_a_weak_reference_to_what_is_gone() -> None:
    """It stays so."""
    owner = Scaled()
    reference = weakref.ref(owner)
    del owner
    candidate = compiled(lambda x: x * (2 if reference() is None else 3))
    assert [candidate(torch.ones(())).item() for _ in range(2)] == [2.0, 2.0]
    assert behind(candidate).calls.compiled == 2


def test_a_module_that_knows_its_parent_weakly() -> None:
    """The parent is looked at anyway."""

    class Child(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * self.parent().scale * (1 + self.around().training)

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child, self.scale = Child(), 2
            self.child.parent = weakref.ref(self)

        def forward(self, x: Tensor) -> Tensor:
            return self.child(x)

    parent = Parent()
    around = nn.Sequential(parent)
    parent.child.around = weakref.ref(around)
    candidate = compiled(nn.Sequential(around))
    assert candidate(torch.ones(())).item() == 4.0
    parent.scale = 3
    assert candidate(torch.ones(())).item() == 6.0
    around.training = False
    assert candidate(torch.ones(())).item() == 3.0
    assert behind(candidate).calls.eager == 0


def test_what_usual_code_has_is_compiled() -> None:
    """A logger, whose attributes all count where `getattr` is mentioned, does not count as unseen."""
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
