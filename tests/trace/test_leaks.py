"""Traced tensors in the caller's objects: found, named, and taken back."""

from __future__ import annotations

import collections
import io
import threading

import pytest
import torch

import aotlab
from aotlab import _torch as internals
from aotlab.errors import LeakedTensorError
from aotlab.guards.leaks import Watch
from tests.engine_helpers import compiled, refusing


@pytest.fixture
def traced_tensor():
    """Give out a tensor as it is inside of a trace."""
    value = torch.ones(2)
    with internals.functionalization():
        yield internals.to_functional(value)


class Holder:
    """An object with attributes."""

    def __init__(self):
        self.items = []
        self.inner = None


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("value",)


@pytest.mark.parametrize(
    ("make", "put", "label"),
    [
        (lambda: {"a": 1}, lambda o, t: o.__setitem__("y", t), "root.y"),
        (lambda: {"a": 1}, lambda o, t: o.__setitem__("a", [t]), "root.a"),
        (lambda: [1], lambda o, t: o.append(t), "root[1]"),
        (lambda: [1, 2], lambda o, t: o.__setitem__(0, (t,)), "root[0]"),
        (lambda: {1}, lambda o, t: o.add(t), "root"),
        (Holder, lambda o, t: setattr(o, "inner", {"k": [t]}), "root.inner"),
        (Holder, lambda o, t: o.items.append(t), "root.items[0]"),
        (lambda: ([],), lambda o, t: o[0].append(t), "root[0][0]"),
        (lambda: {"a": {"b": []}}, lambda o, t: o["a"]["b"].append(t), "root['a']['b'][0]"),
        (lambda: collections.deque([1]), lambda o, t: o.append(t), "root"),
        (lambda: collections.defaultdict(list), lambda o, t: o["new"].append(t), "root.new"),
        (lambda: collections.OrderedDict(a=1), lambda o, t: o.update(b=t), "root.b"),
        (Slotted, lambda o, t: setattr(o, "value", t), "root.value"),
    ],
)
def test_leaks_are_found_and_undone(make, put, label, traced_tensor):
    """Wherever it lies, the place is named, and the object is as it was after `restore`."""
    root = make()
    before = repr(root) if not isinstance(root, (Holder, Slotted)) else None
    watch = Watch([("root", root)])
    assert watch.leaked() is None
    put(root, traced_tensor)
    found = watch.leaked()
    assert found is not None
    assert found.startswith(label.split("[")[0].split(".")[0])
    watch.restore()
    assert watch.leaked() is None
    if before is not None:
        assert repr(root) == before
    if isinstance(root, Holder):
        assert (root.items, root.inner) == ([], None)
    if isinstance(root, Slotted):
        assert not hasattr(root, "value")


def test_other_changes_are_no_leaks(traced_tensor):
    """A change without a traced tensor is none; real tensors are none."""
    root = {"a": [1]}
    watch = Watch([("root", root)])
    root["a"].append(2)
    root["real"] = None
    assert watch.leaked() is None
    watch.restore()
    assert root == {"a": [1]}


def test_cycles_and_depth(traced_tensor):
    """Objects that refer to each other, and deep nesting, are walked once."""
    a, b = Holder(), Holder()
    a.inner, b.inner = b, a
    nested = current = []
    for _ in range(200):
        current.append([])
        current = current[0]
    watch = Watch([("a", a), ("nested", nested)])
    current.append(traced_tensor)
    assert watch.leaked() is not None
    watch.restore()
    assert current == []
    b.items.append(traced_tensor)
    assert watch.leaked() is not None


def test_attributes_of_bound_objects():
    """A method that keeps what it computed on its object is refused, and the object is as before."""

    class Keeps:
        def __init__(self):
            self.last = None
            self.history = collections.deque(maxlen=3)

        def step(self, x):
            self.last = x * 2
            return x + 1

        def log(self, x):
            self.history.append(x * 2)
            return x + 1

        def __call__(self, x):
            self.last = x * 3
            return x

    for name in ("step", "log", "__call__"):
        keeps = Keeps()
        function = keeps if name == "__call__" else getattr(keeps, name)
        with refusing(LeakedTensorError):
            compiled(function)(torch.ones(2))
        assert keeps.last is None
        assert len(keeps.history) == 0


def test_leaks_through_arguments_of_arguments():
    """A dict that is passed in and filled is refused and emptied again."""
    cache = {}
    with refusing(LeakedTensorError):
        compiled(lambda x, memo: memo.setdefault("y", x * 2))(torch.ones(2), cache)
    assert cache == {}


class Box:
    """A namespace whose class attributes functions may set."""

    kept = None


def test_leak_through_a_class_attribute():
    """A traced tensor on a class is found, too."""

    def f(x):
        Box.kept = x * 2
        return x

    try:
        with refusing(LeakedTensorError):
            compiled(f)(torch.ones(2))
        assert Box.kept is None
    finally:
        Box.kept = None


def test_leak_through_a_function_attribute():
    """And on a function."""

    def f(x):
        f.kept = x * 2
        return x

    with refusing(LeakedTensorError):
        compiled(f)(torch.ones(2))
    assert not hasattr(f, "kept")


def test_leak_through_a_generator_of_the_closure():
    """A tensor that was on the caller's objects before is not mistaken for a leak."""
    kept = [torch.ones(2)]

    def f(x):
        return x * len(kept)

    assert compiled(f)(torch.ones(2)).tolist() == [1.0, 1.0]


def test_what_a_thread_of_a_package_changes_is_its_own():
    """Tqdm has a thread that looks after its bars, and notes when it last woke up."""
    tqdm = pytest.importorskip("tqdm").tqdm
    with tqdm(total=3, file=io.StringIO()) as bar:
        assert bar.monitor is not None
        stop = threading.Event()

        def wake():
            while not stop.is_set():
                bar.monitor.woken += 1

        thread = threading.Thread(target=wake)
        thread.start()

        @aotlab.compile(backend="eager")
        def f(x):
            bar.set_description  # noqa: B018  # the bar's class is reached, and with it the thread
            for _ in range(100):
                x = x + 1
            return x

        try:
            assert f(torch.ones(2)).tolist() == [101.0, 101.0]
        finally:
            stop.set()
            thread.join()
    assert f.calls.compiled == 1
