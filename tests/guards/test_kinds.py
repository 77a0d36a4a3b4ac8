"""One test per kind of guard on arguments and settings.

Each test calls a compiled function, changes one thing, calls it again, changes it back, and calls it a third time. The
second call must be compiled again, with a sentence that names the change. The first entry must serve the third call.
All three results must be eager's, in inference and in training.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from aotlab import config as settings
from aotlab.errors import PythonValueError, RefusedError
from aotlab.guards.explain import difference
from tests.engine_helpers import behind, compiled, refusing
from tests.guards.two_calls import (
    MODES,
    ROOTS,
    assigned,
    dynamo_two_calls,
    entered,
    observed,
    set_attribute,
    two_calls,
    var,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


# --- tensors -----------------------------------------------------------------------------------------------------


def scaled(x):
    """Depend on every property of a tensor other than its values."""
    return x * (x.shape[0] + x.dim()), x * x.stride(0) if x.dim() else x * 2, str(x.dtype), x.requires_grad, x.is_leaf


TENSORS = {
    "shape": (lambda g: var([1.0, 2.0], grad=g), lambda g: var([1.0, 2.0, 3.0], grad=g),
              "`x` has shape (3,) where the compiled entry expects (2,)"),
    "rank": (lambda g: var([1.0, 2.0], grad=g), lambda g: var([[1.0], [2.0]], grad=g),
             "`x` has shape (2, 1) where the compiled entry expects (2,)"),
    "stride": (lambda g: var([[1.0, 2.0], [3.0, 4.0]], grad=g), lambda g: var([[1.0, 2.0], [3.0, 4.0]], grad=g).t(),
               "`x` has strides (1, 2) where the compiled entry expects (2, 1)"),
    "dtype": (lambda g: var([1.0, 2.0], grad=g), lambda g: var([1.0, 2.0], grad=g, dtype=torch.float64),
              "`x` has dtype torch.float64 where the compiled entry expects torch.float32"),
    "requires_grad": (lambda g: var([1.0, 2.0], grad=g), lambda g: var([1.0, 2.0], grad=not g),
                      "`x` has requires_grad="),
}  # fmt: skip


@MODES
@pytest.mark.parametrize("kind", TENSORS)
def test_tensor(kind, grad):
    """Each property of a tensor other than its values is guarded."""
    first, second, reason = TENSORS[kind]
    make = functools.partial(compiled, dynamic=False)  # otherwise the second entry serves all sizes
    two_calls(scaled, lambda: (first(grad),), lambda: (second(grad),), reason=reason, make=make)


@MODES
@pytest.mark.parametrize("kind", TENSORS)
def test_tensor_behind_dynamo(kind, grad):
    """Behind Dynamo, each property of a tensor is guarded too."""
    first, second, _ = TENSORS[kind]
    dynamo_two_calls(scaled, lambda: (first(grad),), lambda: (second(grad),))


def test_device_is_named():
    """The reason names the device, and a device without memory is refused even if an entry exists."""
    f = compiled(scaled)
    f(torch.ones(2))
    state = behind(f).entries[0].state
    (facts,) = state.leaves
    elsewhere = dataclasses.replace(state, leaves=(dataclasses.replace(facts, device=torch.device("cuda", 0)),))
    said = difference(state, elsewhere)
    assert said == "`x` is on cuda:0 where the compiled entry expects cpu"
    with refusing(RefusedError, match=r"`x` is .*meta"):
        f(torch.ones(2, device="meta"))


@pytest.mark.gpu
@MODES
def test_device(grad):
    """A tensor on the GPU instead of the CPU gets another entry."""
    two_calls(
        lambda x: (x * 2, str(x.device)),
        lambda: (var([1.0, 2.0], grad=grad, nonleaf=True),),
        lambda: (var([1.0, 2.0], grad=grad).cuda(),),
        reason="`x` is on cuda:0 where the compiled entry expects cpu",
    )


def test_is_leaf():
    """A leaf instead of a non-leaf gets another entry; in inference every tensor is a leaf."""
    two_calls(
        scaled,
        lambda: (var([1.0, 2.0], grad=True, nonleaf=True),),
        lambda: (var([1.0, 2.0], grad=True),),
        reason="`x` has is_leaf=True where the compiled entry expects False",
    )
    dynamo_two_calls(scaled, lambda: (var([1.0, 2.0], grad=True, nonleaf=True),), lambda: (var([1.0, 2.0], grad=True),))


class AsksInItsBackward(torch.autograd.Function):
    """Has another gradient for a leaf."""

    @staticmethod
    def forward(ctx, x):
        """Save the argument."""
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        """Read whether the saved tensor is a leaf."""
        return gradient * (5 if ctx.saved_tensors[0].is_leaf else 7)


@pytest.mark.parametrize(
    ("function", "entries"),
    [
        (lambda x: x.sin(), 1),
        (lambda x: AsksInItsBackward.apply(x), 2),
        (lambda x: torch.autograd.grad(AsksInItsBackward.apply(x).sum(), x)[0] * x, 2),
        (lambda x: x[:1] * x.sum(), 1),
        (lambda x: (x * 2, x.is_leaf), 2),
        (lambda x: (x * 2, x.grad_fn is None), 2),
        (lambda x: x.detach().mul_(2) + x, 2),
    ],
    ids=[
        "computes",
        "asks in its backward",
        "asks in a backward inside",
        "views",
        "asks",
        "asks for its history",
        "writes past autograd",
    ],
)
def test_leaves_where_it_does_not_show(function, entries):
    """A non-leaf uses a leaf's entry if the function neither writes it nor reads its autograd state."""
    made = compiled(function)
    for nonleaf in (False, True, False):
        arguments = functools.partial(lambda nonleaf: (var([1.0, 2.0], grad=True, nonleaf=nonleaf),), nonleaf)
        assert observed(function, arguments) == observed(made, arguments)
    assert len(behind(made).entries) == entries


@MODES
def test_tensor_type(grad):
    """A Parameter instead of a tensor gets another entry."""

    def parameter():
        made = nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=grad)
        ROOTS.append(made)
        return (made,)

    two_calls(
        lambda x: (x * 2, isinstance(x, nn.Parameter)),
        lambda: (var([1.0, 2.0], grad=grad),),
        parameter,
        reason="`x` is a Parameter where the compiled entry expects a Tensor",
    )


def test_inference_tensor():
    """A tensor that was made under inference_mode gets another entry than an ordinary one."""

    def inside():
        with torch.inference_mode():
            return (torch.ones(2),)

    two_calls(
        lambda x: x * 2,
        lambda: (torch.ones(2),),
        inside,
        reason="`x` has is_inference()=True where the compiled entry expects False",
    )


@MODES
def test_storage_offset(grad):
    """A storage offset is guarded only if the function reads it."""

    def window(start):
        return lambda: (var([1.0, 2.0, 3.0, 4.0], grad=grad)[start : start + 2],)

    two_calls(
        lambda x: x * (x.storage_offset() + 1),
        window(0),
        window(1),
        reason="`x` begins at element 1 of its storage where the compiled entry expects 0",
    )
    free = compiled(lambda x: x * 2)
    free(*window(0)())
    free(*window(1)())
    assert free.recompiles == ()
    dynamo_two_calls(lambda x: x * (x.storage_offset() + 1), window(0), window(1))


def test_bits_and_layouts_are_refused_after_a_compiled_call():
    """A lazy negative and another layout are refused by name, also when an entry exists."""
    f = compiled(lambda x: x * 2)
    plain = torch.tensor([1 + 2j])
    f(plain)
    f(torch.ones(2, 2))
    with refusing(RefusedError, match="`x` is .*sparse"):
        f(torch.ones(2, 2).to_sparse())
    f(torch.ones(1))
    with refusing(RefusedError, match="`x` is a view with the negative bit"):
        f(plain.conj().imag)
    assert f(plain).tolist() == [2 + 4j]


# --- settings ----------------------------------------------------------------------------------------------------


SETTINGS = {
    "no_grad": (lambda: entered(torch.no_grad), "grad mode is False where the compiled entry expects True"),
    "inference mode": (lambda: entered(torch.inference_mode), "mode is "),
    "autocast": (
        lambda: entered(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
        "autocast on cpu is True where the compiled entry expects False",
    ),
    "default dtype": (
        lambda: assigned(torch.set_default_dtype, torch.float64, torch.get_default_dtype),
        "default dtype is torch.float64 where the compiled entry expects torch.float32",
    ),
    "deterministic": (
        lambda: assigned(torch.use_deterministic_algorithms, True, torch.are_deterministic_algorithms_enabled),
        "deterministic algorithms is True where the compiled entry expects False",
    ),
    "precision": (
        lambda: assigned(torch.set_float32_matmul_precision, "medium", torch.get_float32_matmul_precision),
        "matmul precision is medium where the compiled entry expects highest",
    ),
    "autocast cache": (
        lambda: assigned(torch.set_autocast_cache_enabled, False, torch.is_autocast_cache_enabled),
        "autocast cache is False where the compiled entry expects True",
    ),
}


def by_settings(x):
    """Depend on the settings, as far as a traced function can."""
    flags = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision()
    more = torch.are_deterministic_algorithms_enabled(), torch.is_autocast_enabled("cpu")
    size = torch.get_default_dtype().itemsize
    return x @ x * size, str(torch.empty(1).device), torch.ones(2, device="cpu"), flags, more


@MODES
@pytest.mark.parametrize("name", SETTINGS)
def test_setting(name, grad):
    """Each global setting of torch is guarded."""
    pair, reason = SETTINGS[name]
    change, undo = pair()

    def make():
        return (var([[1.0, 2.0], [3.0, 5.0]], grad=grad, dtype=torch.float32).to("cpu"),)

    def fixed():
        with torch.device("cpu"):
            return make()

    two_calls(by_settings, fixed, reason=reason, change=change, undo=undo)


def test_autocast_dtype():
    """Autocast to another dtype, while autocast is on."""
    change, undo = entered(lambda: torch.autocast("cpu", dtype=torch.float16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        two_calls(
            lambda x: x @ x,
            lambda: (var([[1.0, 2.0], [3.0, 5.0]], grad=False),),
            reason="autocast dtype on cpu is torch.float16 where the compiled entry expects torch.bfloat16",
            change=change,
            undo=undo,
        )


@pytest.mark.parametrize("switch", ["eager", "apply"])
def test_saved_tensor_hooks_need_no_guard(switch):
    """Hooks on saved tensors are found at run time, without a guard.

    With the setting "apply", one entry serves calls with and without hooks. With "eager", calls with hooks run eagerly.
    """
    seen = []

    def pack(tensor):
        seen.append(tensor)
        return tensor

    f = compiled(lambda x: x.sin())
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    f(x).sum().backward()
    with (
        settings.patch(saved_tensors_hooks=switch),
        warnings.catch_warnings(),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        warnings.simplefilter("ignore")
        out = f(x)
    assert seen
    assert f.calls.eager == (switch == "eager")
    x.grad = None
    out.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    assert f.recompiles == ()


# --- Python values -----------------------------------------------------------------------------------------------


class Color(enum.Enum):
    """A plain value."""

    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    """An int that is more than an int."""

    LOW = 1
    HIGH = 2


class Name(str, enum.Enum):  # noqa: UP042  # a member that equals a string is the point
    """Strings that are more than strings."""

    A = "a"


VALUES = [
    (2, 3, "`y` is 3 where the compiled entry expects 2"),
    (1, True, "`y` is True where the compiled entry expects 1"),
    (True, 1, "`y` is 1 where the compiled entry expects True"),
    (1, 1.0, "`y` is 1.0 where the compiled entry expects 1"),
    (0.0, -0.0, "`y` is -0.0 where the compiled entry expects 0.0"),
    (math.nan, 1.0, "`y` is 1.0 where the compiled entry expects nan"),
    (1 + 0j, complex(1.0, -0.0), "`y` is (1-0j) where the compiled entry expects (1+0j)"),
    ("a", Name.A, "`y` is <Name.A: 'a'> where the compiled entry expects 'a'"),
    (None, 0, "`y` is 0 where the compiled entry expects None"),
    (Color.RED, Color.BLUE, "`y` is <Color.BLUE: 2> where the compiled entry expects <Color.RED: 1>"),
    (slice(0, 1), slice(0, True), "`y` is slice(0, True, None) where the compiled entry expects slice(0, 1, None)"),
    (range(2), range(3), "`y` is range(0, 3) where the compiled entry expects range(0, 2)"),
    (torch.float32, torch.float64, "`y` is torch.float64 where the compiled entry expects torch.float32"),
    (frozenset((1, 2)), frozenset((True, 2)), "`y` is frozenset({True, 2}) where the compiled entry expects frozens"),
    (np.float32(1), np.float64(1), "`y` is "),
    (np.int64(1), np.int64(2), "`y` is "),
    (np.float64("nan"), np.float64(0), "`y` is "),
    (np.float32("nan"), np.float32(0), "`y` is "),
    (np.float32(0.0), np.float32(-0.0), "`y` is "),
    (1.0, math.nan, "`y` is nan where the compiled entry expects 1.0"),
    (math.nan, math.inf, "`y` is inf where the compiled entry expects nan"),
    (0, False, "`y` is False where the compiled entry expects 0"),
    ("a", "b", "`y` is 'b' where the compiled entry expects 'a'"),
    (b"a", b"b", "`y` is b'b' where the compiled entry expects b'a'"),
    (Level.LOW, Level.HIGH, "`y` is <Level.HIGH: 2> where the compiled entry expects <Level.LOW: 1>"),
    (Level.LOW, 1, "`y` is 1 where the compiled entry expects <Level.LOW: 1>"),
    (torch.Size([2]), torch.Size([3]), "`y` is torch.Size([3]) where the compiled entry expects torch.Size([2])"),
    (torch.device("cpu"), torch.device("meta"), "`y` is "),
    (int, float, "`y` is <class 'float'> where the compiled entry expects <class 'int'>"),
    (Ellipsis, None, "`y` is None where the compiled entry expects Ellipsis"),
]


@MODES
@pytest.mark.parametrize(("first", "second", "reason"), VALUES, ids=[f"{a!r}-{b!r}" for a, b, _ in VALUES])
def test_value(first, second, reason, grad):
    """A Python argument, alone and in a list in a dictionary."""

    def f(x, y):
        factor = y if isinstance(y, (int, float)) and y == y else 2
        return x * factor, repr(y), type(y).__name__

    def nested(x, d):
        return f(x, d["k"][0])

    two_calls(
        f, lambda: (var([1.0, 2.0], grad=grad), first), lambda: (var([1.0, 2.0], grad=grad), second), reason=reason
    )
    two_calls(
        nested,
        lambda: (var([1.0, 2.0], grad=grad), {"k": [first]}),
        lambda: (var([1.0, 2.0], grad=grad), {"k": [second]}),
        reason=reason.replace("`y`", "`d['k'][0]`"),
    )


@pytest.mark.parametrize(("first", "second", "reason"), VALUES[:9], ids=[f"{a!r}-{b!r}" for a, b, _ in VALUES[:9]])
def test_value_behind_dynamo(first, second, reason):
    """Behind Dynamo, plain values are guarded too."""

    def f(x, y):
        return x * (2 if y else 3), y

    dynamo_two_calls(f, lambda: (var([1.0, 2.0], grad=True), first), lambda: (var([1.0, 2.0], grad=True), second))


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [(torch.ones(2), 3.0, "`y` is a float"), ((lambda x: x * 2), (lambda x: x * 3), "`y` is <function")],
    ids=["a tensor or a number", "functions"],
)
def test_argument_of_another_kind(first, second, reason):
    """A number instead of a tensor, or another function without a closure, gets another entry."""
    two_calls(
        lambda x, y: y(x) if callable(y) else x * y,
        lambda: (torch.ones(2), first),
        lambda: (torch.ones(2), second),
        reason=reason,
    )


def test_code_of_a_function_that_is_passed():
    """A function argument is compared by identity and code."""

    def twice(x):
        return x * 2

    change, undo = set_attribute(twice, "__code__", (lambda x: x * 3).__code__)
    two_calls(
        lambda x, y: y(x),
        lambda: (var([1.0, 2.0], grad=True), twice),
        reason="`y` has other code than the compiled entry expects",
        change=change,
        undo=undo,
    )


def test_a_view_that_may_not_be_written():
    """A write to a view that was made under no_grad raises eager's error, also after a compiled call."""
    f = compiled(lambda x: x.mul_(2))
    f(var([1.0, 2.0], grad=True, nonleaf=True))
    base = var([1.0, 2.0], grad=True, nonleaf=True)
    with torch.no_grad():
        view = base[:]
    with pytest.raises(RuntimeError, match="created in no_grad mode"):
        f(view)
    assert base.tolist() == [1.0, 2.0]


class Decorated(int):
    """An int with attributes."""


def test_values_with_attributes_are_refused():
    """A subclass of a plain type whose attributes could change cannot be guarded."""
    value = Decorated(2)
    f = compiled(lambda x, y: x * y)
    f(torch.ones(2), value)
    value.more = 3
    with refusing(PythonValueError, match=r"`y` is a .*Decorated"):
        compiled(lambda x, y: x * y)(torch.ones(2), value)


# --- nesting -----------------------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "a b")  # nothing to annotate
Other = collections.namedtuple("Pair", "a b")  # of the same name, which is the point


@dataclasses.dataclass
class Point:
    """A dataclass that pytree knows."""

    a: object
    b: object


if Point not in pytree.SUPPORTED_NODES:
    pytree.register_dataclass(Point)

NESTINGS = {
    "list-tuple": (lambda x: [x], lambda x: (x,), "nested as ((*,)) where"),
    "longer": (lambda x: [x], lambda x: [x, x + 1], "nested as ([*, *]) where the compiled entry expects ([*])"),
    "key": (lambda x: {"a": x}, lambda x: {"b": x}, "nested as ({'b': *}) where the compiled entry expects ({'a': *})"),
    "key 1-True": (lambda x: {1: x}, lambda x: {True: x}, "({True: *}) where the compiled entry expects ({1: *})"),
    "key 1-1.0": (lambda x: {1: x}, lambda x: {1.0: x}, "({1.0: *}) where the compiled entry expects ({1: *})"),
    "key 0.0": (lambda x: {0.0: x}, lambda x: {-0.0: x}, "({-0.0: *}) where the compiled entry expects ({0.0: *})"),
    "key str": (lambda x: {"a": x}, lambda x: {Name.A: x}, "{<Name.A: 'a'>: *}"),
    "key order": (lambda x: {"a": x, "b": 1.0}, lambda x: {"b": 1.0, "a": x}, "({'b': *, 'a': *}) where"),
    "tuple key": (lambda x: {(1, 2): x}, lambda x: {(True, 2): x}, "({(True, 2): *}) where"),
    "dict type": (lambda x: {"a": x}, lambda x: collections.OrderedDict(a=x), "OrderedDict('a': *)"),
    "maxlen": (
        lambda x: collections.deque([x], 3),
        lambda x: collections.deque([x], 4),
        "in containers or by keys of another type",
    ),
    "factory": (
        lambda x: collections.defaultdict(int, a=x),
        lambda x: collections.defaultdict(float, a=x),
        "in containers or by keys of another type",
    ),
    "namedtuple": (lambda x: Pair(x, 1), lambda x: Other(x, 1), "in containers or by keys of another type"),
    "dataclass": (lambda x: [x, 1], lambda x: Point(x, 1), "Point("),
    "elsewhere": (
        lambda x: [[x], []],
        lambda x: [[], [x]],
        "([[], [*]]) where the compiled entry expects ([[*], []])",
    ),
    "empty": (lambda x: [x, []], lambda x: [x, {}], "([*, {}]) where the compiled entry expects ([*, []])"),
}


def by_nesting(value):
    """Depend on how tensors are nested."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    keys = [(type(k).__name__, repr(k)) for k in value] if isinstance(value, dict) else None
    kind = value.maxlen if isinstance(value, collections.deque) else getattr(value, "default_factory", None)
    return leaves[0] * 2, type(value) is Pair, type(value).__qualname__, keys, len(leaves), kind


@MODES
@pytest.mark.parametrize("kind", NESTINGS)
def test_nesting(kind, grad):
    """The nesting of the arguments is guarded; keys are compared by type and value."""
    first, second, reason = NESTINGS[kind]
    two_calls(
        by_nesting,
        lambda: (first(var([1.0, 2.0], grad=grad)),),
        lambda: (second(var([1.0, 2.0], grad=grad)),),
        reason=reason,
    )


@pytest.mark.parametrize("kind", ["list-tuple", "longer", "key", "namedtuple", "empty"])
def test_nesting_behind_dynamo(kind):
    """The same holds behind Dynamo, for the nestings that Dynamo supports."""
    first, second, _ = NESTINGS[kind]
    dynamo_two_calls(
        lambda value: (pytree.tree_leaves(value)[0] * len(value), type(value) is Pair),
        lambda: (first(var([1.0, 2.0], grad=True)),),
        lambda: (second(var([1.0, 2.0], grad=True)),),
    )


# --- identity and overlap ----------------------------------------------------------------------------------------


def separate(grad):
    """Make two tensors."""
    return lambda: (var([1.0, 2.0], grad=grad, nonleaf=True), var([1.0, 2.0], grad=grad, nonleaf=True))


def one(grad):
    """Make one tensor, twice."""

    def make():
        x = var([1.0, 2.0], grad=grad, nonleaf=True)
        return x, x

    return make


def writes(x, y):
    """Write one argument and read the other."""
    x.mul_(2)
    return x + y * 3


@MODES
@pytest.mark.parametrize("function", [writes, lambda x, y: (x * y, x is y)], ids=["written", "read"])
def test_identity(function, grad):
    """Two arguments become one tensor, or one becomes two."""
    two_calls(
        function, separate(grad), one(grad), reason="`y` is the same tensor as `x`; the compiled entry expects two"
    )
    two_calls(function, one(grad), separate(grad), reason="`y` and `x` are two tensors; the compiled entry expects one")


def test_identity_pattern():
    """Which of three arguments are the same."""

    def make(pattern):
        def arguments():
            tensors = [var([1.0, 2.0], grad=True) for _ in range(3)]
            return tuple(tensors[i] for i in pattern)

        return arguments

    two_calls(
        lambda x, y, z: (x * y + z, x is y, y is z),
        make((0, 0, 1)),
        make((0, 1, 1)),
        reason="`y` and `x` are two tensors",
    )


@MODES
def test_identity_behind_dynamo(grad):
    """Behind Dynamo, identity is guarded too, in both directions."""
    for function in (writes, lambda x, y: x * y + y.sin()):
        for first, second in ((separate, one), (one, separate)):
            dynamo_two_calls(function, first(grad), second(grad))
