"""A compiled function returns eager's types and object identities, and new containers at each call."""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from typing import Any, NamedTuple

import pytest
import torch

from aotlab.capture import nesting
from aotlab.errors import LeakedTensorError, OutputError, PythonValueError
from tests.engine_helpers import compiled, leaf, refusing, same


class Pair(NamedTuple):
    """A named tuple with a default and a method."""

    first: Any
    second: Any = 5

    def total(self):
        """Add both."""
        return self.first + self.second


@dataclasses.dataclass
class Plain:
    """An ordinary dataclass; counts how often it was initialised."""

    value: Any
    factor: float = 2.0
    made = 0

    def __post_init__(self):
        Plain.made = Plain.made + 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen one that holds another."""

    inner: Any
    note: str = "n"


@dataclasses.dataclass(slots=True)
class Slotted:
    """One with slots."""

    value: Any
    other: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlotted:
    """Both."""

    value: Any
    items: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(kw_only=True)
class Late:
    """A field without a value, and one that is no parameter."""

    value: Any
    derived: Any = dataclasses.field(init=False)

    def __post_init__(self):
        self.derived = self.value * 2


class Subclassed(dict):
    """A dictionary with additional attributes, whose ``__setitem__`` raises."""

    def __init__(self, value):
        super().__init__(v=value)
        self.note = [value]

    def __setitem__(self, key, value):
        raise TypeError("read only")


class Object:
    """A plain object."""

    def __init__(self, value):
        self.__hidden = value
        self.shown = {"v": value * 2}


class WithSlots:
    """An object with slots."""

    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value

    def __repr__(self):
        """Show the value."""
        return f"WithSlots({self.value.tolist()})"


class Colour(enum.Enum):
    """An enumeration."""

    RED = 1


class Listed(list):
    """A list subclass."""


def identical_twice(x):
    """Return one tensor several times."""
    y = x * 2
    return [y, y, (y, {"y": y})]


def shared_list(x):
    """Return one list several times."""
    inner = [x * 2]
    return inner, inner, [inner], {"k": inner}


def shared_object(x):
    """Return one object several times."""
    inner = Plain(x * 2)
    return inner, [inner, Pair(inner)], Frozen(inner)


PROGRAMS = {
    "tensor": lambda x: x * 2,
    "none": lambda x: None,
    "tuple": lambda x: (x * 2,),
    "empty": lambda x: ((), [], {}, x * 1),
    "list": lambda x: [x * 2, [x + 1]],
    "dict": lambda x: {"b": x * 2, "a": x + 1},
    "dict of dicts": lambda x: {"b": {"c": x * 2}, 3: None, (1, 2): x, None: x * 3, 1.5: 1, True: x + 1},
    "dict by objects": lambda x: {Colour.RED: x * 2, torch.float32: x, frozenset((1,)): 3, int: x + 1},
    "ordered": lambda x: collections.OrderedDict(b=x * 2, a=x),
    "defaultdict": lambda x: collections.defaultdict(list, a=[x * 2]),
    "deque": lambda x: collections.deque([x * 2, x], maxlen=4),
    "named tuple": lambda x: Pair(x * 2, second=[x]),
    "return type": lambda x: x.max(0),
    "return types": lambda x: [x.sort(), x.reshape(1, -1).min(dim=1), torch.linalg.slogdet(x.outer(x) + torch.eye(3))],
    "dataclass": lambda x: Plain(x * 2),
    "frozen": lambda x: Frozen(Frozen(x * 2), note="m"),
    "slots": lambda x: Slotted(x * 2),
    "frozen slots": lambda x: FrozenSlotted(x * 2, [x]),
    "derived field": lambda x: Late(value=x * 2),
    "dataclass in all": lambda x: {"k": [Plain((x * 2, Slotted(x)))], "t": Pair(Frozen(x + 1))},
    "object": lambda x: Object(x * 3),
    "scalars": lambda x: (1, True, 1.5, -0.0, 2j, "s", b"b", None, x * 1, Colour.RED, ..., range(3), slice(1, 2)),
    "sizes": lambda x: (x.shape, x.size(), x.stride(), x.dtype, x.device, x.layout, x.numel(), x.dim(), x * 1),
    "attributes of a size": lambda x: {"s": x[1:].shape, "n": x.shape[0], "t": tuple(x.shape)},
    "distribution": lambda x: torch.distributions.Normal(x * 2, torch.ones(3), validate_args=False),
    "same tensor": identical_twice,
    "nested deeply": lambda x: [[[[[[[[[[[[[[[[[[[[[[[[[x * 2]]]]]]]]]]]]]]]]]]]]]]]]],
}


EAGER = {
    "same list": shared_list,
    "same object": shared_object,
    "same tuple": lambda x: [(x * 2,)] * 2,
    "dict subclass": lambda x: Subclassed(x * 2),
    "list subclass": lambda x: Listed([x * 2, 1]),
    "counter": lambda x: (collections.Counter("aab"), x * 1),
    "set": lambda x: (x * 1, {1, 2}),
    "namespace": lambda x: types.SimpleNamespace(a=x * 2, b=[1]),
    "slots": lambda x: WithSlots(x * 3),
    "from outside": lambda x: (KEPT, x * 2),
    "part from outside": lambda x: (KEPT["numbers"], x * 2),
    "object from outside": lambda x: [HOLDER.plain, x * 2],
}


def portrait(value, seen=None):
    """Describe a value by types, contents and identities, tensors by their first appearance and values."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        new = id(value) not in seen
        number = seen.setdefault(id(value), len(seen))
        return ("tensor", type(value), number, value.tolist() if new else None, value.requires_grad)
    kind = type(value)
    held = nesting.attributes_of(value) if hasattr(value, "__dict__") or dataclasses.is_dataclass(value) else {}
    container = isinstance(value, (tuple, list, dict, collections.deque, set, frozenset)) or held
    if not container or isinstance(value, (torch.Size, enum.Enum, type)):
        return (kind, repr(value))
    if value and id(value) in seen and not isinstance(value, tuple):
        return ("again", seen[id(value)])
    number = seen.setdefault(id(value), len(seen)) if not isinstance(value, tuple) else None
    seen[("alive", len(seen))] = value
    items = list(value) if hasattr(value, "__iter__") else []
    # the order of elements with colliding hashes is insertion order, which eager does not promise
    if isinstance(value, (set, frozenset)):
        items.sort(key=repr)
    extra = (getattr(value, "default_factory", None), getattr(value, "maxlen", None))
    inside = [
        (repr(item), type(item), portrait(value[item], seen)) if isinstance(value, dict) else portrait(item, seen)
        for item in items
    ]
    return (kind, number, extra, inside, [(name, portrait(item, seen)) for name, item in held.items()])


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_outputs(name, grad):
    """Types, order, identities inside the result, and values are eager's; two calls share no object."""
    program = PROGRAMS[name]
    expected = portrait(program(leaf(3) if grad else leaf(3).detach()))
    g = compiled(program)
    results = [g(leaf(3) if grad else leaf(3).detach()) for _ in range(3)]
    assert [portrait(result) for result in results] == [expected] * 3
    assert (g.calls.compiled, len(g.entries)) == (3, 1)
    mutable = [
        {id(value) for value in _containers(result) if not isinstance(value, (tuple, frozenset))} for result in results
    ]
    assert not (mutable[0] & mutable[1])
    assert not (mutable[1] & mutable[2])


@pytest.mark.parametrize("name", EAGER)
def test_results_of_eager(name):
    """Results that no nesting describes run eagerly, with one notice and eager's object identities."""
    program, x = EAGER[name], leaf(3)
    g = compiled(program)
    with pytest.warns(RuntimeWarning, match="runs eagerly") as heard:
        results = [g(x) for _ in range(2)]
    assert [portrait(result) for result in results] == [portrait(program(x))] * 2
    assert (g.calls.eager, len(heard)) == (2, 1)
    if "outside" in name:
        assert results[0][0] is program(x)[0]


def _containers(value):
    found, todo = [], [value]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            todo += each.values()
        elif isinstance(each, (tuple, list, set, collections.deque)):
            todo += each
        elif not dataclasses.is_dataclass(each):
            continue
        todo += nesting.attributes_of(each).values()
        found.append(each)
    return found


@pytest.mark.parametrize("name", ["dict", "dataclass", "named tuple", "return types", "object", "same tensor"])
def test_gradients_through_containers(name):
    """Tensors inside a container are differentiated as in eager."""
    same(PROGRAMS[name], leaf(3), backward="all")
    same(PROGRAMS[name], leaf(3), backward="each")


DYNAMO = ["tuple", "list", "dict", "ordered", "named tuple", "return type", "dataclass", "same tensor", "sizes", "none"]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", DYNAMO)
def test_outputs_behind_dynamo(name, grad):
    """Dynamo flattens containers itself; we return its outputs unchanged."""
    torch._dynamo.reset()
    program = PROGRAMS[name]
    x = leaf(3) if grad else leaf(3).detach()
    expected = portrait(program(x))
    g = compiled(program, frontend="dynamo")
    assert [portrait(g(x)) for _ in range(2)] == [expected] * 2


def test_initialisers_do_not_run_again():
    """An object in the result is built from its attributes, so its constructor runs only while tracing."""
    x = torch.ones(2)

    @dataclasses.dataclass
    class Checked:
        value: Any

        def __post_init__(self):
            assert self.value is not None

    g = compiled(lambda x: Checked(x * 2))
    for _ in range(2):
        out = g(x)
        assert type(out) is Checked
        assert out.value.tolist() == [2.0, 2.0]


# --- arguments that are returned ----------------------------------------------------------------------------------

KEPT = {"numbers": [1, 2]}
WEIGHT = torch.ones(3)
HOLDER = types.SimpleNamespace(plain=Plain(1.0))


def test_arguments_come_back_as_themselves():
    """A container, object or function that is passed in and returned is the same object, with its contents."""

    def f(d, items, pair, plain, act, *rest, **named):
        d["w"].mul_(2)
        return d, items, [pair], plain, act, rest, named, d["inner"], rest[0]

    d = {"w": torch.ones(2), "inner": {"k": [torch.ones(1)]}}
    items, pair, plain = [torch.ones(2), 1], Pair([1]), Plain(torch.ones(2))
    g = compiled(f)
    for call in range(2):
        arguments = (d, items, pair, plain, torch.sin, [3], {"s": "t"})
        out = g(*arguments, extra=[1])
        expected = (d, items, None, plain, torch.sin, None, None, d["inner"], arguments[5])
        assert all(e is None or a is e for a, e in zip(out, expected, strict=True))
        assert type(out[2]) is list
        assert out[2][0] is pair
        assert (type(out[5]), type(out[6])) == (tuple, dict)
        assert out[5][1] is arguments[6]
        assert out[6] == {"extra": [1]}
        assert d["w"].tolist() == [2.0 ** (call + 1)] * 2
    assert g.calls.eager == 0


def test_another_container_of_the_same_form():
    """The entry also serves another dictionary, and returns that dictionary."""
    g = compiled(lambda d: (d, d["x"] * 2))
    for _ in range(3):
        d = {"x": torch.ones(1)}
        assert g(d)[0] is d
    assert len(g.entries) == 1


def test_part_of_an_argument_in_a_fresh_container():
    """A new list around an inner dictionary of the argument contains the caller's dictionary."""
    d = {"a": {"x": leaf(2)}}
    g = compiled(lambda d: [d["a"], d["a"]["x"] * 2])
    out = g(d)
    assert out[0] is d["a"]
    out[1].sum().backward()
    assert d["a"]["x"].grad.tolist() == [2.0, 2.0]


# --- arguments ---------------------------------------------------------------------------------------------------


def test_dataclass_arguments():
    """Tensors in a dataclass argument are inputs, are mutated and are differentiated; plain fields are guarded."""

    @dataclasses.dataclass
    class Step:
        x: Any
        scale: float = 2.0
        more: Any = None

        def apply(self):
            return self.x * self.scale

    def f(step):
        step.more["m"].add_(1)
        return step.apply() + step.more["m"].sum(), type(step) is Step

    same(f, Step(leaf(2), 3.0, {"m": torch.ones(2)}))
    same(f, Step(torch.ones(2), 3.0, {"m": torch.ones(2)}))
    g = compiled(f)
    for scale, entries in ((3.0, 1), (3.0, 1), (4.0, 2)):
        out, known = g(Step(torch.ones(2), scale, {"m": torch.zeros(2)}))
        assert out.tolist() == [scale + 2] * 2
        assert known
        assert len(g.entries) == entries
    assert "`step.scale` is 4.0" in g.recompiles[0]


@pytest.mark.parametrize("make", [Frozen, Slotted, FrozenSlotted, Plain, Pair], ids=lambda kind: kind.__name__)
def test_kinds_of_dataclass_arguments(make):
    """Frozen dataclasses, dataclasses with slots, and named tuples are supported as arguments."""

    def f(held, y):
        inner = next(iter(nesting.attributes_of(held).values())) if not isinstance(held, tuple) else held.first
        return (inner * y).sum(), type(held).__name__

    same(f, make(leaf(2)), torch.ones(2))
    same(f, make(torch.ones(2)), torch.ones(2))


def test_other_arguments_recompile():
    """Another class, another set of fields, another sharing of containers, or another type of key compiles again."""

    @dataclasses.dataclass
    class Other:
        value: Any
        factor: float = 2.0

    g = compiled(lambda h: (type(h).__name__, h.value * h.factor))
    assert g(Plain(torch.ones(1)))[0] == "Plain"
    assert g(Other(torch.ones(1)))[0].endswith("Other")
    extended = Plain(torch.ones(1))
    extended.more = 3
    assert g(extended)[0] == "Plain"
    assert len(g.entries) == 3
    assert all("are nested as" in reason for reason in g.recompiles)

    h = compiled(lambda a, b: (a is b, a[0] + b[0]))
    x = torch.ones(1)
    both = [x]
    assert h([x], [x])[0] is False
    with pytest.warns(RuntimeWarning, match="occurs twice"):
        assert h(both, both)[0] is True
    assert h([x], [x])[0] is False
    assert h(both, both)[0] is True
    assert (len(h.entries), h.calls.eager) == (1, 2)

    keys = compiled(lambda d: [type(key) for key in d])
    assert keys({1: x}) == [int]
    assert keys({True: x}) == [bool]
    assert keys({1.0: x}) == [float]
    assert len(keys.entries) == 3

    kinds = compiled(lambda d: (type(d).__name__, getattr(d, "default_factory", 0), getattr(d, "maxlen", 0), x.dtype))
    given = [
        {"a": x}, collections.OrderedDict(a=x), collections.defaultdict(list, a=x), collections.defaultdict(int, a=x),
        collections.deque([x]), collections.deque([x], maxlen=2),
    ]  # fmt: skip
    for _ in range(2):
        for each in given:
            expected = (type(each).__name__, getattr(each, "default_factory", 0), getattr(each, "maxlen", 0))
            assert kinds(each)[:3] == expected
    assert len(kinds.entries) == len(given)


def test_slices_of_tensors():
    """Tensors in a slice are inputs, and not constants."""
    g = compiled(lambda x, s: (x[: s.stop.shape[0]] * s.stop, s))
    for value in (2.0, 3.0):
        where = slice(None, torch.full((2,), value))
        out = g(torch.ones(3), where)
        assert out[0].tolist() == [value] * 2
        assert out[1] is where
    assert len(g.entries) == 1


class Registered:
    """A container that its user registered with pytree."""

    def __init__(self, items, name):
        self.items = items
        self.name = name


torch.utils._pytree.register_pytree_node(
    Registered, lambda r: (list(r.items), r.name), lambda items, name: Registered(list(items), name)
)


def test_registered_containers():
    """Registered containers are flattened and built by their registered functions. Their context is guarded.

    A registered container that is passed in and returned is the same object.
    """
    g = compiled(lambda r: (r, Registered([r.items[0] * 2], r.name + "!")))
    given = Registered([torch.ones(1)], "a")
    for _ in range(2):
        out = g(given)
        assert out[0] is given
        assert (type(out[1]), out[1].name, out[1].items[0].item()) == (Registered, "a!", 2.0)
    assert g(Registered([torch.ones(1)], "b"))[1].name == "b!"
    assert len(g.entries) == 2


# --- refused results and arguments --------------------------------------------------------------------------------


def _endless(x):
    loop = [x * 2]
    loop.append(loop)
    return loop


def _deep(x):
    for _ in range(400):
        x = [x]
    return x


class WithDel:
    """An object that says goodbye."""

    def __init__(self, x):
        self.x = x

    def __del__(self):
        self.x = None


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (_endless, "`out[1]` occurs twice, or contains itself"),
        (_deep, "is nested more than"),
        (lambda x: (x, (y for y in [x])), "`out[1]` is a `builtins.generator`"),
        (lambda x: iter([x]), "`out` is a `builtins.list_iterator`"),
        (lambda x: {"f": lambda: x}, "`out['f']` is a `builtins.function`"),
        (lambda x: WithDel(x * 2), "WithDel"),
        (lambda x: [torch.Generator()], "`out[0]` is a `torch._C.Generator`"),
        (lambda x: [{x: 1}], "`out[0]` has a key that is a `torch.Tensor`"),
        (lambda x: Plain(memoryview(b"a")), "`out.value` is a `builtins.memoryview`"),
    ],
)
def test_results_that_cannot_be_made_again(function, text):
    """A result that cannot be rebuilt is refused, with its place in the result."""
    with refusing(OutputError, match=None) as caught:
        compiled(function)(torch.ones(2))
    assert text in str(caught.value)
    assert caught.value.suggestion


def test_arguments_that_cannot_be_taken_apart():
    """Arguments that cannot be flattened are refused by name, and nothing runs.

    Examples are lists that contain themselves, sets of tensors, and objects with hidden state.
    """

    def f(x):
        raise AssertionError

    loop = [1]
    loop.append(loop)
    for value, text in (
        ([loop], "or contains itself"),
        ({torch.ones(1)}, "`x` is a `builtins.set`"),
        ([Plain(iter([1]))], "`x[0].value` is a `builtins.list_iterator`"),
        ({torch.ones(1): 1}, "`x` has a key that is a `torch.Tensor`"),
    ):
        with refusing(PythonValueError) as caught:
            compiled(f)(value)
        assert text in str(caught.value)


def test_changed_arguments_are_refused():
    """Assigning a field or adding an item to an argument is refused, and the caller's object is restored."""

    def assigns(held):
        held.value = held.value * 2
        return held.value

    def adds(held):
        held.value.append(1)

    plain = Plain(torch.ones(1))
    with refusing(LeakedTensorError):
        compiled(assigns)(plain)
    assert plain.value.tolist() == [1.0]
    listed = Plain([torch.ones(1)])
    with refusing(LeakedTensorError):
        compiled(adds)(listed)
    assert len(listed.value) == 1
