"""One two-call test per kind of guard: the sentence, the values and gradients, and that the first entry serves again.

Each test calls a compiled function, changes one thing, calls it again, changes it back, and calls it a third time. The
second call must be compiled anew with a sentence that names what changed; the third must be served by the first entry;
and all three must be eager's, in inference and in training.
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import enum
import functools
import gc
import math
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from aotlab import config as settings
from aotlab.errors import LeakedTensorError, PythonValueError, RefusedError
from aotlab.frontends import dynamo
from aotlab.guards.explain import difference
from aotlab.guards.values import snapshot
from tests.engine_helpers import behind, compiled, refusing

ROOTS: list[torch.Tensor] = []
MODES = pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def var(values, *, grad, dtype=None, nonleaf=False):
    """Make a tensor of given values; its leaf is remembered, so that its gradient is looked at."""
    tensor = torch.tensor(values, dtype=dtype)
    if not grad or not tensor.dtype.is_floating_point:
        return tensor
    ROOTS.append(tensor.requires_grad_())
    return tensor * 1 if nonleaf else tensor


def described(value):
    """Turn a result into something that compares by value, nan and -0.0 included."""
    if isinstance(value, torch.Tensor):
        flags = str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad, value.is_leaf
        return *flags, [repr(v) for v in value.detach().flatten().tolist()]
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [described(v) for v in value]
    return repr(value)


def observed(run, make):
    """Call ``run`` with fresh arguments; return everything that a caller could see, gradients included."""
    ROOTS.clear()
    arguments = make()
    try:
        out = run(*arguments)
    except RefusedError:
        raise
    except Exception as error:  # noqa: BLE001  # eager's own, to be compared
        return type(error), str(error)
    tensors = [leaf for leaf in pytree.tree_leaves((out, arguments)) if isinstance(leaf, torch.Tensor)]
    roots = list(ROOTS)
    outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if outputs:
        torch.autograd.backward([o.sum().abs() if o.is_complex() else o.sum() for o in outputs])
    gradients = [None if root.grad is None else described(root.grad) for root in roots]
    return described(out), [described(t) for t in tensors], gradients


def nothing():
    """Change nothing: the arguments differ."""


def two_calls(function, first, second=None, *, reason, change=nothing, undo=nothing, make=compiled):
    """Assert what the module's text says; ``reason`` is the sentence, or a part of it."""
    made = make(function)
    try:
        for step, arguments in ((nothing, first), (change, second or first), (undo, first)):
            step()
            expected = observed(function, arguments)
            assert expected == observed(made, arguments)
        entries = behind(made).entries
        assert len(entries) == 2, behind(made).recompiles
        (said,) = behind(made).recompiles
        assert reason in said
        assert behind(made).calls.eager == 0
        assert [entry.calls for entry in entries] == [1, 2]
    finally:
        undo()
    return made


def by_dynamo(made):
    """Make a maker for `torch.compile` with our backend; what stands behind each graph is put into ``made``."""

    def backend(graph, inputs):
        call = dynamo.backend(graph, inputs, options={"compiler": "eager"})
        made.append(call.compiled)
        return call

    return lambda function: torch.compile(function, backend=backend)


def dynamo_two_calls(function, first, second=None, *, change=nothing, undo=nothing, reason=None):
    """Assert that each call behind Dynamo is eager's; with ``reason`` also that our own guards said so."""
    made = []
    f = by_dynamo(made)(function)
    try:
        for step, arguments in ((nothing, first), (change, second or first), (undo, first)):
            step()
            assert observed(function, arguments) == observed(f, arguments)
    finally:
        undo()
    assert sum(each.calls.compiled for each in made) == 3, [each.calls for each in made]
    if reason is not None:
        (said,) = [text for each in made for text in each.recompiles]
        assert reason in said
        assert len(made) == 1
    return made


# --- tensors -----------------------------------------------------------------------------------------------------


def scaled(x):
    """Depend on everything that a tensor is, besides its values."""
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
    """What a tensor is, besides its values."""
    first, second, reason = TENSORS[kind]
    make = functools.partial(compiled, dynamic=False)  # else the second entry serves all sizes
    two_calls(scaled, lambda: (first(grad),), lambda: (second(grad),), reason=reason, make=make)


@MODES
@pytest.mark.parametrize("kind", TENSORS)
def test_tensor_behind_dynamo(kind, grad):
    """The same behind Dynamo."""
    first, second, _ = TENSORS[kind]
    dynamo_two_calls(scaled, lambda: (first(grad),), lambda: (second(grad),))


def test_device_is_named():
    """An entry for one device says so of another, and one without memory is refused though there is an entry."""
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
    """A tensor on the GPU where there was one on the CPU."""
    two_calls(
        lambda x: (x * 2, str(x.device)),
        lambda: (var([1.0, 2.0], grad=grad, nonleaf=True),),
        lambda: (var([1.0, 2.0], grad=grad).cuda(),),
        reason="`x` is on cuda:0 where the compiled entry expects cpu",
    )


def test_is_leaf():
    """A leaf where there was a non-leaf; in inference every tensor is a leaf."""
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
        """Ask what it was."""
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
    """A non-leaf has the entry of a leaf where the function neither writes it nor looks at it past autograd."""
    made = compiled(function)
    for nonleaf in (False, True, False):
        arguments = functools.partial(lambda nonleaf: (var([1.0, 2.0], grad=True, nonleaf=nonleaf),), nonleaf)
        assert observed(function, arguments) == observed(made, arguments)
    assert len(behind(made).entries) == entries


@MODES
def test_tensor_type(grad):
    """A Parameter where there was a tensor."""

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
    """A tensor made under inference_mode where there was an ordinary one."""

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
    """An offset that the function reads, and that moves; one that it does not read is not looked at."""

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
    with refusing(RefusedError, match="`x` is a lazy negative"):
        f(plain.conj().imag)
    assert f(plain).tolist() == [2 + 4j]


# --- settings ----------------------------------------------------------------------------------------------------


def entered(*managers):
    """Make a (change, undo) pair that enters and leaves context managers."""
    made = []

    def change():
        for manager in managers:
            made.append(manager())
            made[-1].__enter__()

    def undo():
        while made:
            made.pop().__exit__(None, None, None)

    return change, undo


def assigned(setter, value, read):
    """Make a (change, undo) pair that calls a setter."""
    before = read()
    setter(before)  # on torch 2.15 setting what is set already leaves other settings than never setting it
    return lambda: setter(value), lambda: setter(before)


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
    """What is set for all of torch."""
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
    """Hooks on saved tensors are asked at run time; one entry serves with and without them, or eager with them."""
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
    """The same behind Dynamo."""

    def f(x, y):
        return x * (2 if y else 3), y

    dynamo_two_calls(f, lambda: (var([1.0, 2.0], grad=True), first), lambda: (var([1.0, 2.0], grad=True), second))


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


def test_classes_and_modules_of_the_users_are_refused():
    """A class or module that is passed could change without a check seeing it; torch's own are compared by identity."""
    for value in (Settings, module_of_the_users):
        with refusing(PythonValueError, match="`y` is a"):
            compiled(lambda x, y: x * 2)(torch.ones(2), value)
    two_calls(
        lambda x, y: (x * 2, y.__name__),
        lambda: (torch.ones(2), nn.Linear),
        lambda: (torch.ones(2), nn.ReLU),
        reason="`y` is <class 'torch.nn.modules.activation.ReLU'> where the compiled entry expects <class",
    )


def test_a_view_that_may_not_be_written():
    """A view made under no_grad, after a compiled call that writes: eager's error."""
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
    """How the arguments are nested; keys count by type and value."""
    first, second, reason = NESTINGS[kind]
    two_calls(
        by_nesting,
        lambda: (first(var([1.0, 2.0], grad=grad)),),
        lambda: (second(var([1.0, 2.0], grad=grad)),),
        reason=reason,
    )


@pytest.mark.parametrize("kind", ["list-tuple", "longer", "key", "namedtuple", "empty"])
def test_nesting_behind_dynamo(kind):
    """The same behind Dynamo, for what Dynamo takes."""
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
    """The same behind Dynamo, for both directions."""
    for function in (writes, lambda x, y: x * y + y.sin()):
        for first, second in ((separate, one), (one, separate)):
            dynamo_two_calls(function, first(grad), second(grad))


# --- what the function reads besides its arguments ---------------------------------------------------------------

SCALE = 2.0
OPTIONS = {"scale": 2.0, 1: [3.0, (4.0,)]}
ARRAY = np.array([2.0, 3.0], dtype=np.float32)


def helper(x, factor=2.0, *, offset=1.0):
    """Be called by the functions below."""
    return x * factor + offset


def triple(x, factor=2.0, *, offset=1.0):
    """Take the place of `helper`."""
    return x * factor * 3 + offset


class Settings:
    """An object of a user's class: attributes, a class attribute, a property, a method, a class method."""

    rate = 2.0
    shared: list[float] = [2.0]  # noqa: RUF012  # shared on purpose

    def __init__(self):
        self.scale = 2.0
        self.inner = types.SimpleNamespace(factor=2.0, calls=0)
        self.parts = [types.SimpleNamespace(factor=2.0)]
        self.unread = 0

    @property
    def both(self):
        """Read two attributes."""
        return self.scale * self.rate

    def apply(self, x):
        """Read one."""
        return x * self.scale

    def __call__(self, x):
        """Read one without being named."""
        return x * self.rate * self.scale

    def __getitem__(self, key):
        """Read one without being named."""
        return self.inner.factor * key

    @classmethod
    def by_class(cls, x):
        """Read a class attribute."""
        return x * cls.rate

    @staticmethod
    def plain(x):
        """Read a global."""
        return x * SCALE


class Changed(Settings):
    """A class of which an object can become one."""

    rate = 7.0


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("empty", "scale")

    def __init__(self):
        self.scale = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A dataclass, of which another one takes the place."""

    scale: float = 2.0


class Meta(type):
    """A metaclass with a property."""

    @property
    def doubled(cls):
        """Read an attribute of the class."""
        return cls.single * 2


class OfMeta(metaclass=Meta):
    """A class whose attribute its metaclass reads."""

    single = 1.0


config = Settings()
space = types.SimpleNamespace(scale=2.0, step=0, weights=[1.0, 2.0])
slotted = Slotted()
frozen = Frozen()
module_of_the_users = types.ModuleType("module_of_the_users")
module_of_the_users.SCALE = 2.0


def by_attribute(x):
    """Read attributes of several objects, directly and by what they call."""
    return x * config.scale, x * space.scale, x * slotted.scale, x * module_of_the_users.SCALE, x * frozen.scale


def deeper(x):
    """Read what lies further inside."""
    return x * config.inner.factor * space.weights[1] * config.parts[0].factor * config[2]


def by_methods(x):
    """Read by properties and methods."""
    return x * config.both, config.apply(x), config(x), config.by_class(x), config.plain(x)


def shadowed(x):
    """Call builtins, and read a global that need not be there."""
    try:
        factor = LATER  # it comes later
    except NameError:
        factor = 1
    return x * abs(-2) * factor


def by_getattr(x):
    """Read an attribute by a name that does not stand in the code as one."""
    return x * (getattr(config, "un" + "read") + 1) * getattr(space, "missing", 1)


def roundabout(x):
    """Read by a metaclass."""
    return x * OfMeta.doubled


def plainly(x):
    """Read a global, a container, an array, and call a helper."""
    return helper(x) * SCALE * OPTIONS["scale"] * OPTIONS[1][1][0] * float(ARRAY[1])


def set_item(owner, key, value):
    """Make a (change, undo) pair for an item."""
    missing = object()
    before = owner.get(key, missing) if isinstance(owner, dict) else owner[key]

    def undo():
        if before is missing:
            owner.pop(key, None)
        else:
            owner[key] = before

    return lambda: owner.__setitem__(key, value), undo


def set_attribute(owner, name, value):
    """Make a (change, undo) pair for an attribute."""
    missing = object()
    in_dictionary = hasattr(owner, "__dict__") and not name.startswith("__")
    before = vars(owner).get(name, missing) if in_dictionary else getattr(owner, name)

    def undo():
        if before is missing:
            if name in vars(owner):
                delattr(owner, name)
        else:
            setattr(owner, name, before)

    return lambda: setattr(owner, name, value), undo


READ = "which the function reads, is"
EXPECTS = "where the compiled entry expects"
REACHED = {
    "global": (plainly, set_item(globals(), "SCALE", 3.0), f"`SCALE`, {READ} 3.0 {EXPECTS} 2.0"),
    "global int": (plainly, set_item(globals(), "SCALE", 2), f"`SCALE`, {READ} 2 {EXPECTS} 2.0"),
    "dict item": (plainly, set_item(OPTIONS, "scale", 3.0), f"`OPTIONS['scale']`, {READ} 3.0 {EXPECTS} 2.0"),
    "nested item": (plainly, set_item(OPTIONS[1], 1, (5.0,)), f"`OPTIONS[1][1][0]`, {READ} 5.0 {EXPECTS} 4.0"),
    "dict": (plainly, set_item(globals(), "OPTIONS", {"scale": 3.0, 1: [3.0, (4.0,)]}), "`OPTIONS['scale']`"),
    "dict grows": (plainly, set_item(OPTIONS, "new", 1), "`OPTIONS`, which the function reads, has 3 items"),
    "array": (plainly, set_item(ARRAY, 1, np.float32(7)), f"`ARRAY`, {READ} the same array with other contents"),
    "another array": (plainly, set_item(globals(), "ARRAY", ARRAY.copy()), f"`ARRAY`, {READ} another array"),
    "helper": (plainly, set_item(globals(), "helper", triple), f"`helper`, {READ} another object"),
    "code": (plainly, set_attribute(helper, "__code__", triple.__code__), f"the code of helper, {READ} another"),
    "own code": (plainly, set_attribute(plainly, "__code__", (lambda x: x * 5).__code__), "the code of plainly"),
    "default": (plainly, set_attribute(helper, "__defaults__", (3.0,)), f"the defaults of helper[0], {READ} 3.0"),
    "more defaults": (
        plainly,
        set_attribute(helper, "__defaults__", (2.0, 2.0)),
        "the defaults of helper, which the function reads, has 2 items",
    ),
    "keyword default": (
        plainly,
        set_attribute(helper, "__kwdefaults__", {"offset": 2.0}),
        f"the keyword defaults of helper['offset'], {READ} 2.0",
    ),
    "appears": (shadowed, set_item(globals(), "LATER", 5), "`LATER`, which the function mentions, is there"),
    "shadows": (
        shadowed, set_item(globals(), "abs", lambda x: 7), "`abs`, which the function mentions, is there",
    ),
    "builtin": (shadowed, set_attribute(builtins, "abs", lambda x: 7), f"`abs`, {READ} another object"),
    "builtin appears": (shadowed, set_attribute(builtins, "LATER", 5), "`LATER`, which the function mentions"),
    "attribute": (by_attribute, set_attribute(config, "scale", 3.0), f"`config.scale`, {READ} 3.0 {EXPECTS} 2.0"),
    "namespace": (by_attribute, set_attribute(space, "scale", 2), f"`space.scale`, {READ} 2 {EXPECTS} 2.0"),
    "slot": (by_attribute, set_attribute(slotted, "scale", 3.0), f"`slotted.scale`, {READ} 3.0 {EXPECTS} 2.0"),
    "module": (
        by_attribute, set_attribute(module_of_the_users, "SCALE", 3.0), f"`module_of_the_users.SCALE`, {READ} 3.0",
    ),
    "another object": (by_attribute, set_item(globals(), "frozen", Frozen(3.0)), f"`frozen`, {READ} another object"),
    "tensor attribute": (
        by_attribute, set_attribute(config, "scale", np.float32(3)), "`config.scale`, which",
    ),
    "inner": (deeper, set_attribute(config.inner, "factor", 3.0), f"`config.inner.factor`, {READ} 3.0 {EXPECTS} 2.0"),
    "in a list": (deeper, set_attribute(config.parts[0], "factor", 3.0), f"`config.parts[0].factor`, {READ} 3.0"),
    "list attribute": (deeper, set_item(space.weights, 1, 5.0), f"`space.weights[1]`, {READ} 5.0 {EXPECTS} 2.0"),
    "property": (by_methods, set_attribute(config, "scale", 3.0), f"`config.scale`, {READ} 3.0 {EXPECTS} 2.0"),
    "class attribute": (by_methods, set_attribute(Settings, "rate", 3.0), f"`Settings.rate`, {READ} 3.0 {EXPECTS} 2.0"),
    "class attribute hidden": (by_methods, set_attribute(config, "rate", 3.0), "`config.rate`, which the function me"),
    "method": (
        by_methods, set_attribute(Settings, "apply", lambda self, x: x * 7), f"`Settings.apply`, {READ} another",
    ),
    "special method": (
        by_methods, set_attribute(Settings, "__call__", lambda self, x: x * 7), f"`Settings.__call__`, {READ} another",
    ),
    "class": (
        by_methods, set_attribute(config, "__class__", Changed),
        f"the class of config, {READ} another object",
    ),
    "static method": (by_methods, set_item(globals(), "SCALE", 3.0), f"`SCALE`, {READ} 3.0 {EXPECTS} 2.0"),
    "metaclass": (roundabout, set_attribute(OfMeta, "single", 3.0), f"`OfMeta.single`, {READ} 3.0 {EXPECTS} 1.0"),
    "getattr": (by_getattr, set_attribute(config, "unread", 3), f"`config.unread`, {READ} 3 {EXPECTS} 0"),
    "getattr of nothing": (by_getattr, set_attribute(space, "missing", 3), "the number of attributes of space,"),
}  # fmt: skip


@MODES
@pytest.mark.parametrize("kind", REACHED)
def test_reached(kind, grad):
    """Globals, builtins, helpers, defaults, containers, arrays, and attributes of objects that the code mentions."""
    function, (change, undo), reason = REACHED[kind]
    two_calls(function, lambda: (var([1.0, -2.0], grad=grad),), reason=reason, change=change, undo=undo)


def test_closures():
    """A rebound closure, a container in it, and a variable of it that was empty and is filled."""

    def make(factor, factors):
        def f(x):
            try:
                return x * factor * factors[0] * later
            except NameError:
                return x * factor * factors[0]

        def assign(name, value):
            nonlocal factor, later
            if name == "factor":
                factor = value
            else:
                later = value
                if value is None:
                    del later

        later = None
        del later
        return f, assign

    def arguments():
        return (var([1.0, 2.0], grad=True),)

    factors = [2.0]
    f, assign = make(2.0, factors)
    for (change, undo), reason in (
        (set_item(factors, 0, 3.0), f"`factors[0]`, {READ} 3.0 {EXPECTS} 2.0"),
        ((lambda: assign("factor", 3.0), lambda: assign("factor", 2.0)), f"`factor`, {READ} 3.0 {EXPECTS} 2.0"),
        ((lambda: assign("later", 5.0), lambda: assign("later", None)), f"`later`, {READ} 5.0 {EXPECTS} nothing"),
    ):
        two_calls(f, arguments, reason=reason, change=change, undo=undo)


def test_an_emptied_closure_is_eagers_error():
    """A variable of the closure that is deleted after the trace."""

    def make():
        factor = 2.0

        def f(x):
            return x * factor

        def empty():
            nonlocal factor
            del factor

        return f, empty

    f, empty = make()
    g = compiled(f)
    assert g(torch.ones(1)).item() == 2.0
    empty()
    with pytest.raises(NameError, match="free variable 'factor'"):
        g(torch.ones(1))


@MODES
def test_bound_method(grad):
    """A bound method: its object's attributes and its class'."""
    held = Settings()
    for owner, name, reason in (
        (held, "scale", f"`self.scale`, {READ} 3.0 {EXPECTS} 2.0"),
        (Settings, "apply", None),
    ):
        if reason is None:
            continue
        change, undo = set_attribute(owner, name, 3.0)
        two_calls(held.apply, lambda: (var([1.0, 2.0], grad=grad),), reason=reason, change=change, undo=undo)
    change, undo = set_attribute(Settings, "rate", 3.0)
    two_calls(
        held, lambda: (var([1.0, 2.0], grad=grad),), reason=f"`Settings.rate`, {READ} 3.0", change=change, undo=undo
    )
    two_calls(
        held.by_class,
        lambda: (var([1.0, 2.0], grad=grad),),
        reason=f"`Settings.rate`, {READ} 3.0",
        change=change,
        undo=undo,
    )


@MODES
def test_partial(grad):
    """What a partial binds, and its function's defaults."""
    bound = functools.partial(helper, factor=2.0)
    change, undo = set_item(bound.keywords, "factor", 3.0)
    two_calls(
        bound,
        lambda: (var([1.0, 2.0], grad=grad),),
        reason=f"`partial.keywords['factor']`, {READ} 3.0 {EXPECTS} 2.0",
        change=change,
        undo=undo,
    )


def test_unread_attributes_do_not_count():
    """What the code does not mention may change without a recompile."""
    f = compiled(by_attribute)
    f(torch.ones(2))
    config.unread += 1
    space.step += 1
    config.inner.calls += 1
    f(torch.ones(2))
    config.unread -= 1
    assert f.recompiles == ()
    assert [entry.calls for entry in f.entries] == [2]


def test_no_object_takes_the_place_of_another():
    """An object that got the address of one that is gone is another object."""
    parts = [Settings()]

    def f(x):
        return x * parts[0].scale * len(parts)

    g = compiled(f)
    assert g(torch.ones(1)).item() == 2.0
    for value in (3.0, 4.0, 5.0):
        parts.clear()
        parts.append(Settings())
        parts[0].scale = value
        assert g(torch.ones(1)).item() == value


def test_kind_of_a_tensor_outside():
    """A tensor in a closure is an input: guarded as those are, and by which others it is the same tensor as."""
    held, other = [torch.ones(2, 3)], torch.ones(2, 3)

    def f(x):
        return x * held[0].shape[0] * (2 if held[0] is other else 3)

    change, undo = set_item(held, 0, other)
    two_calls(f, lambda: (var([1.0], grad=True),), reason="the same tensor", change=change, undo=undo)
    two_calls(
        f,
        lambda: (var([1.0], grad=True),),
        reason="`held[0]`",
        change=held[0].t_,
        undo=lambda: held[0].t_() if held[0].shape == (3, 2) else None,
    )


def test_snapshots_keep_what_they_compare_by_identity():
    """No other object can get the address of one that a snapshot knows; tensors are not kept alive by it."""
    held = [object()]
    known = snapshot(held)
    for _ in range(20):
        held.clear()
        held.append(object())
        assert not known.holds(held)
    tensors = [torch.ones(2)]
    known, reference = snapshot(tensors), weakref.ref(tensors[0])
    assert known.holds(tensors)
    tensors.clear()
    gc.collect()
    assert reference() is None


# --- modules -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A module of a user's: plain attributes, a container, submodules, an object."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.drop = nn.Dropout(1.0)
        self.norm = nn.LayerNorm(2)
        self.act = nn.ReLU()
        self.scale = 2.0
        self.options = {"factor": 2.0}
        self.config = types.SimpleNamespace(factor=2.0)
        self.note = "unread"
        self.eval()

    def forward(self, x):
        """Read all of it."""
        h = self.act(self.norm(self.drop(self.linear(x))))
        return h * self.scale * self.options["factor"] * self.config.factor


def make_block():
    """Make a block whose parameters are the same every time."""
    torch.manual_seed(3)
    return Block()


MODULES = {
    "training": (lambda b: set_attribute(b.drop, "training", True), f"`drop.training`, {READ} True {EXPECTS} False"),
    "attribute": (lambda b: set_attribute(b, "scale", 3.0), f"`self.scale`, {READ} 3.0 {EXPECTS} 2.0"),
    "container": (lambda b: set_item(b.options, "factor", 3.0), f"`self.options['factor']`, {READ} 3.0"),
    "object": (lambda b: set_attribute(b.config, "factor", 3.0), f"`self.config.factor`, {READ} 3.0 {EXPECTS} 2.0"),
    "torch's attribute": (lambda b: set_attribute(b.norm, "eps", 1.0), f"`norm.eps`, {READ} 1.0 {EXPECTS} 1e-05"),
    "submodule": (lambda b: set_item(b._modules, "act", nn.Tanh()), f"`act`, {READ} another object"),
    "more submodules": (
        lambda b: set_item(b._modules, "new", nn.Tanh()), f"the number of submodules of self, {READ} 5 {EXPECTS} 4",
    ),
    "hook": (
        lambda b: hook(b.act, "register_forward_hook", lambda m, a, out: out * 3),
        f"the number of forward hooks of act, {READ} 1 {EXPECTS} 0",
    ),
    "pre-hook": (
        lambda b: hook(b.act, "register_forward_pre_hook", lambda m, a: (a[0] * 3 + 1,)),
        f"the number of forward pre-hooks of act, {READ} 1 {EXPECTS} 0",
    ),
    "own forward": (lambda b: set_attribute(b.act, "forward", lambda x: x * 5), f"`act.forward`, {READ} <function"),
    "class' forward": (
        lambda b: set_attribute(Block, "forward", lambda self, x: self.linear(x)), f"`Block.forward`, {READ} another",
    ),
    "no bias": (lambda b: set_item(b.linear._parameters, "bias", None), f"`linear.bias`, {READ} no tensor"),
    "requires_grad": (lambda b: set_attribute_of(b.linear.bias, "requires_grad"), "`linear.bias` has requires_grad="),
    "tied": (
        lambda b: set_item(b.norm._parameters, "bias", b.norm.weight), "`norm.bias` is the same tensor as `norm.w",
    ),
}  # fmt: skip


def hook(module, register, function):
    """Make a (change, undo) pair that registers a hook."""
    handles = []

    def undo():
        while handles:
            handles.pop().remove()

    return lambda: handles.append(getattr(module, register)(function)), undo


def set_attribute_of(tensor, name):
    """Make a (change, undo) pair that flips a tensor's requires_grad."""
    before = getattr(tensor, name)
    return lambda: setattr(tensor, name, not before), lambda: setattr(tensor, name, before)


@MODES
@pytest.mark.parametrize("kind", MODULES)
def test_module(kind, grad):
    """What a module is made of."""
    block = make_block().requires_grad_(grad)
    pair, reason = MODULES[kind]
    change, undo = pair(block)

    def parameters_too():
        for parameter in block.parameters():
            parameter.grad = None
            if parameter.requires_grad:
                ROOTS.append(parameter)
        return (var([[1.0, 2.0]], grad=grad),)

    two_calls(block, parameters_too, reason=reason, change=change, undo=undo)


@MODES
def test_hooks_of_all_modules(grad):
    """A hook for all modules that is registered after the trace."""
    block = nn.Sequential(nn.ReLU(), nn.ReLU())
    handles = []

    def function(x):
        return block(x) * 1

    def undo():
        while handles:
            handles.pop().remove()

    def change():
        handles.append(nn.modules.module.register_module_forward_hook(lambda m, a, out: out * 3))

    two_calls(
        function,
        lambda: (var([1.0, 2.0], grad=grad),),
        change=change,
        undo=undo,
        reason=f"the number of forward hooks of all modules, {READ} 1 {EXPECTS} 0",
    )


@MODES
def test_module_in_a_closure(grad):
    """A module without parameters that a function reaches: flags, hooks, submodules, attributes."""
    chain = nn.Sequential(nn.Dropout(1.0), nn.LeakyReLU(0.5)).eval()

    def f(x):
        return chain(x) * 2

    for (change, undo), reason in (
        (set_attribute(chain[0], "training", True), f"`chain.0.training`, {READ} True {EXPECTS} False"),
        (set_attribute(chain[1], "negative_slope", 0.1), f"`chain.1.negative_slope`, {READ} 0.1 {EXPECTS} 0.5"),
        (set_item(chain._modules, "1", nn.Tanh()), f"`chain.1`, {READ} another object"),
        (
            hook(chain[1], "register_forward_hook", lambda m, a, out: out * 3),
            "the number of forward hooks of chain.1",
        ),
    ):
        two_calls(f, lambda: (var([1.0, -2.0], grad=grad),), reason=reason, change=change, undo=undo)


def test_parameters_of_other_names():
    """A parameter is taken away and one of another name is added: as many as before, and no error of ours."""
    block = nn.Linear(2, 2)
    x = torch.tensor([1.0, 2.0])
    f = compiled(block)
    assert torch.equal(f(x), block(x))
    del block.bias
    block.other = nn.Parameter(torch.ones(2))
    block.bias = None
    block.register_parameter("third", None)
    assert torch.equal(f(x), block(x))
    assert len(f.compiled.recompiles) == 1
    assert "bias" in f.compiled.recompiles[0] or "the number of parameters" in f.compiled.recompiles[0]


# --- a function that changes what it reads -----------------------------------------------------------------------


def test_changes_are_refused_and_undone():
    """A function that changes what it can read is refused, and all that it changed is as before."""
    counts, history, table = types.SimpleNamespace(n=0), [1], np.zeros(2)
    held = Settings()

    def attribute(x):
        counts.n += 1
        return x

    def item(x):
        history.append(2)
        return x

    def array(x):
        table[0] += 1
        return x

    def fresh(x):
        held.appeared = 1
        return x

    def of_class(x):
        Settings.rate = 3.0
        return x

    def of_globals(x):
        global SCALE
        SCALE = 3.0
        return x

    for function, name in (
        (attribute, "counts.n"), (item, "history"), (array, "table"), (fresh, "held.appeared"),
        (of_class, "Settings.rate"), (of_globals, "SCALE"),
    ):  # fmt: skip
        with refusing(LeakedTensorError, match=f"the function changes `{name}`"):
            compiled(function)(torch.ones(2))
    assert (counts.n, history, table.tolist(), Settings.rate, SCALE) == (0, [1], [0.0, 0.0], 2.0, 2.0)
    assert not hasattr(held, "appeared")


def test_a_module_that_changes_what_it_reads():
    """The same for a module that counts its calls in an object."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = types.SimpleNamespace(n=0)

        def forward(self, x):
            self.config.n += 1
            return x * self.config.n

    module = Counts()
    with refusing(LeakedTensorError, match=r"the function changes `self\.config\.n`"):
        compiled(module)(torch.ones(2))
    assert module.config.n == 0


def test_a_backward_that_changes_what_it_reads():
    """The backward of a user's autograd.Function is traced, too: if it changes Python objects, it is refused."""
    seen = []

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(1)
            return gradient * 2

    f = compiled(lambda x: Counts.apply(x))
    with refusing(LeakedTensorError, match="the backward of a function changes `seen`"):
        f(torch.ones(2, requires_grad=True))
    assert seen == []
    assert f(torch.ones(2)).tolist() == [2.0, 2.0]


def test_what_a_failed_trace_did_is_taken_back():
    """A function that changes Python state and then cannot be traced: eager does it once, or nobody does."""
    counts, history, table = types.SimpleNamespace(n=0), [], np.zeros(2)

    def f(x):
        counts.n += 1
        history.append(counts.n)
        table[0] += 1
        counts.fresh = 1
        return x * x.sum().item()

    with refusing(RefusedError):
        compiled(f)(torch.ones(2))
    assert (counts.n, history, table[0], hasattr(counts, "fresh")) == (0, [], 0.0, False)
    with settings.patch(fallback="eager"), pytest.warns(RuntimeWarning, match="runs eagerly"):
        compiled(f)(torch.ones(2))
    assert (counts.n, history, table[0], counts.fresh) == (1, [1], 1.0, 1)


def test_what_a_failed_trace_of_a_module_did_is_taken_back():
    """The same for a module, its attributes, its objects and its globals."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.LSTM(2, 2)
            self.n = 0
            self.config = types.SimpleNamespace(n=0)

        def forward(self, x):
            self.n += 1
            self.config.n += 1
            OPTIONS["calls"] = 1
            return self.linear(x)[0] * x.sum().item()

    module = Counts()
    weights = [*module.parameters()]
    with refusing(RefusedError):
        compiled(module)(torch.ones(1, 1, 2))
    assert (module.n, module.config.n, "calls" in OPTIONS) == (0, 0, False)
    assert all(a is b for a, b in zip(module.parameters(), weights, strict=True))
    assert torch.equal(module.linear(torch.ones(1, 1, 2))[0], module.linear(torch.ones(1, 1, 2))[0])


def test_errors_in_guards_are_heard():
    """An error that a comparison raises reaches the caller; the call is not served and not swallowed."""

    class Rude(str):
        __slots__ = ()
        armed = False

        def __eq__(self, other):
            if self.armed:
                raise ValueError("not today")
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    held = [Rude("two")]
    f = compiled(lambda x: x * len(held[0]) - 1)
    f(torch.ones(1))
    held[0] = Rude("two")
    Rude.armed = True
    with pytest.raises(ValueError, match="not today"):
        f(torch.ones(1))
    Rude.armed = False
    assert f(torch.ones(1)).item() == 2.0
