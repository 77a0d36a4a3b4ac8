"""Traced tensors in the caller's objects: found, named, and taken back."""

from __future__ import annotations

import collections
import functools
import io
import threading

import pytest
import torch
from torch import nn

import aotlab
from aotlab import _torch as internals
from aotlab.errors import LeakedTensorError
from aotlab.guards.leaks import Watch
from tests.engine_helpers import behind, compiled, global_torch_state, refusing


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
    """A change that involves no traced tensor is not a leak, and real tensors are not leaks."""
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
    """A method that stores a traced value on its object is refused, and the object is restored."""

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


class Box:
    """A namespace whose class attributes functions may set."""

    kept = None


LEAK = None


def _into_a_global():
    def f(x):
        global LEAK
        LEAK = x * 2
        return x * 3

    return f, lambda: LEAK


def _into_a_closure():
    kept = 0

    def f(x):
        nonlocal kept
        kept = x * 2
        return x * 3

    return f, lambda: kept


def _into_a_list_of_a_closure():
    kept = []
    return lambda x: (kept.append(x * 2), x * 3)[1], kept.copy


def _into_a_default():
    def f(x, memo={}):  # noqa: B006  # that is the point
        memo["y"] = x * 2
        return x * 3

    return f, lambda: [*f.__defaults__[0]]


def _into_a_list_argument():
    given = [torch.ones(1)]
    return lambda x, out=given: (out.append(x * 2), x * 3)[1], given.copy, given


def _into_a_dict_argument():
    given = {}
    return lambda x, memo: memo.setdefault("y", x * 2), given.copy, given


def _into_an_object():
    holder = Holder()

    def f(x):
        holder.inner = x * 2
        return x * 3

    return f, lambda: holder.inner


def _into_a_class():
    def f(x):
        Box.kept = x * 2
        return x

    return f, lambda: Box.kept


def _into_a_function():
    def f(x):
        f.kept = x * 2
        return x

    return f, lambda: hasattr(f, "kept")


class Keeps(nn.Module):
    """Keeps an activation in an attribute."""

    last = None

    def forward(self, x):
        self.last = x * 2
        return x


def _into_a_module():
    module = Keeps()
    return module, lambda: module.last


def _into_a_module_of_a_closure():
    module = Keeps()
    return lambda x: module(x), lambda: module.last


def _into_a_list_of_a_module():
    class KeepsAll(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = []

        def forward(self, x):
            self.kept.append(x * 2)
            return x

    module = KeepsAll()
    return module, module.kept.copy


def _into_a_buffer():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count = self.count + 1
            return x * self.count

    module = Counts()
    return module, lambda: (id(module.count), module.count.tolist())


LEAKS = {
    _into_a_global: "LEAK",
    _into_a_closure: "kept",
    _into_a_list_of_a_closure: "kept",
    _into_a_default: None,
    _into_a_list_argument: "out",
    _into_a_dict_argument: "memo",
    _into_an_object: "holder",
    _into_a_class: "Box",
    _into_a_function: None,
    _into_a_module: "last",
    _into_a_module_of_a_closure: "module",
    _into_a_list_of_a_module: "kept",
    _into_a_buffer: "count",
}


@pytest.mark.parametrize("make", LEAKS, ids=lambda make: make.__name__.strip("_"))
def test_a_leak_is_refused(make):
    """A function that keeps a traced tensor is refused, and its state and torch's settings are as before."""
    function, read, *arguments = make()
    before, state = read(), global_torch_state()
    f = compiled(function)
    for _ in range(2):
        with refusing(LeakedTensorError, LEAKS[make]):
            f(torch.ones(2), *arguments)
    assert (read(), global_torch_state()) == (before, state)
    assert behind(f).entries == ()


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


class Tables(nn.Module):
    """Makes a table once for each size, as rotary embeddings do."""

    @functools.lru_cache  # noqa: B019  # as many models do
    def table(self, size: int) -> dict[str, list[torch.Tensor]]:
        """Make the table."""
        return {"of": [torch.arange(float(size))]}

    def forward(self, x):
        """Use it."""
        return x * self.table(3)["of"][0]


def test_a_cache_in_c_keeps_no_traced_tensor():
    """A trace that would store tensors in `functools.lru_cache` is refused, and the cache is restored."""

    @functools.lru_cache(None)
    def table(size):
        return torch.arange(float(size))

    table(2)
    module = Tables()
    for function in (lambda x: x * table(3), module):
        with refusing(LeakedTensorError, match=r"`the cache of (Tables\.)?table`"):
            compiled(function)(torch.ones(3))
        assert function(torch.ones(3)).tolist() == [0.0, 1.0, 2.0]


def test_a_cache_of_numbers_is_kept():
    """A cache that holds no tensor is no obstacle, and is as it was."""

    @functools.lru_cache  # as many models do
    def double(number):
        return number * 2

    double(1)
    assert compiled(lambda x: x * double(3))(torch.ones(2)).tolist() == [6.0, 6.0]
    assert double.cache_info().currsize == 2
