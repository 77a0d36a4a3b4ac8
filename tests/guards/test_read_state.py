"""State that a function reads besides its arguments is guarded: closures, globals, objects, containers, modules.

Each test calls a compiled function, changes one thing, calls it again, changes it back, and calls it a third time.
"""

from __future__ import annotations

import builtins
import collections
import copy
import dataclasses
import functools
import gc
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from aotlab import config as settings
from aotlab.errors import LeakedTensorError, PythonValueError, RefusedError
from aotlab.guards.guarded_values import snapshot
from tests.engine_helpers import compiled, refusing
from tests.guards.two_calls import (
    MODES,
    ROOTS,
    hook,
    set_attribute,
    set_attribute_of,
    set_item,
    two_calls,
    var,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


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
    """A class to which an object is changed."""

    rate = 7.0


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("empty", "scale")

    def __init__(self):
        self.scale = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass, whose instance is replaced by another one."""

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
    """Read attributes of several objects, directly and in functions that it calls."""
    return x * config.scale, x * space.scale, x * slotted.scale, x * module_of_the_users.SCALE, x * frozen.scale


def deeper(x):
    """Read nested attributes and items."""
    return x * config.inner.factor * space.weights[1] * config.parts[0].factor * config[2]


def by_methods(x):
    """Read by properties and methods."""
    return x * config.both, config.apply(x), config(x), config.by_class(x), config.plain(x)


def shadowed(x):
    """Call builtins, and read a global that may be undefined."""
    try:
        factor = LATER  # it is defined later
    except NameError:
        factor = 1
    return x * abs(-2) * factor


def by_getattr(x):
    """Read an attribute by a name that is computed at run time."""
    return x * (getattr(config, "un" + "read") + 1) * getattr(space, "missing", 1)


def roundabout(x):
    """Read by a metaclass."""
    return x * OfMeta.doubled


def plainly(x):
    """Read a global, a container, an array, and call a helper."""
    return helper(x) * SCALE * OPTIONS["scale"] * OPTIONS[1][1][0] * float(ARRAY[1])


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
    for function, owner, name, reason in (
        (held.apply, held, "scale", f"`self.scale`, {READ} 3.0 {EXPECTS} 2.0"),
        (held, Settings, "rate", f"`Settings.rate`, {READ} 3.0"),
        (held.by_class, Settings, "rate", f"`Settings.rate`, {READ} 3.0"),
    ):
        change, undo = set_attribute(owner, name, 3.0)
        two_calls(function, lambda: (var([1.0, 2.0], grad=grad),), reason=reason, change=change, undo=undo)


@MODES
def test_partial(grad):
    """The bound arguments of a partial, and its function's defaults, are guarded."""
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
    """An attribute that the code does not mention may change without a recompile."""
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
    """A tensor in a closure is guarded like an input, including its identity with other tensors."""
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
    """A snapshot keeps the objects that it compares by identity alive, so that no address is reused.

    It does not keep tensors alive.
    """
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
    "no bias": (lambda b: set_item(b.linear._parameters, "bias", None), f"`linear.bias`, {READ} not a tensor"),
    "requires_grad": (lambda b: set_attribute_of(b.linear.bias, "requires_grad"), "`linear.bias` has requires_grad="),
    "tied": (
        lambda b: set_item(b.norm._parameters, "bias", b.norm.weight), "`norm.bias` is the same tensor as `norm.w",
    ),
}  # fmt: skip


@MODES
@pytest.mark.parametrize("kind", MODULES)
def test_module(kind, grad):
    """Each component of a module is guarded."""
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
    """A parameter is removed and one with another name is added: the number is the same, and we raise no error."""
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


def test_changes_are_refused_and_undone():
    """A function that changes an object or a container that it can read is refused, and the change is undone."""
    counts, history, table = types.SimpleNamespace(n=()), [1], np.zeros(2)
    held = Settings()

    def attribute(x):
        counts.n += (1,)
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
        Settings.rate = (None,)
        return x

    def of_globals(x):
        global SCALE
        SCALE = (None,)
        return x

    for function, name in (
        (attribute, "counts.n"), (item, "history"), (array, "table"), (fresh, "held.appeared"),
        (of_class, "Settings.rate"), (of_globals, "SCALE"),
    ):  # fmt: skip
        with refusing(LeakedTensorError, match=f"the function changes `{name}`"):
            compiled(function)(torch.ones(2))
    assert (counts.n, history, table.tolist(), Settings.rate, SCALE) == ((), [1], [0.0, 0.0], 2.0, 2.0)
    assert not hasattr(held, "appeared")


def test_a_module_that_changes_what_it_reads():
    """A module that lists its calls in an object is refused, and the object is restored."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = types.SimpleNamespace(n=())

        def forward(self, x):
            self.config.n += (1,)
            return x * len(self.config.n)

    module = Counts()
    with refusing(LeakedTensorError, match=r"the function changes `self\.config\.n`"):
        compiled(module)(torch.ones(2))
    assert module.config.n == ()


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
    """A failed trace of a module restores its attributes, its objects and its globals."""

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
    """An error that a guard's comparison raises reaches the caller, and the call is not served."""

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


FACTOR = 2
CONTAINER: dict[str, object] = {"k": 2, "act": torch.relu, "deep": [collections.deque([1])]}
TENSOR: torch.Tensor | None = torch.ones(3)


def test_globals_of_module_forwards_and_their_methods_are_guarded(monkeypatch):
    """Values that a module's own methods read are guarded, also if a function calls the module."""

    class Scales(nn.Module):
        def helper(self, x):
            return x * FACTOR

        def forward(self, x):
            return self.helper(x)

    module = Scales()
    ours, through = compiled(module), compiled(lambda x: module(x))
    for factor in (2, 5):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        assert ours(torch.ones(1)).item() == factor
        assert through(torch.ones(1)).item() == factor


@pytest.mark.parametrize("change", ["value", "deque", "function"])
def test_contents_of_containers_are_guarded(monkeypatch, change):
    """Containers are guarded item by item, whatever their other items are."""
    changed = dict(CONTAINER)
    f = compiled(lambda x: CONTAINER["act"](x) * CONTAINER["k"] + CONTAINER["deep"][0][0])
    assert f(torch.ones(1)).item() == 3
    if change == "value":
        changed["k"] = 7
    elif change == "deque":
        changed["deep"] = [collections.deque([2])]
    else:
        changed["act"] = torch.neg
    monkeypatch.setitem(globals(), "CONTAINER", changed)
    assert f(torch.ones(1)).item() == {"value": 8, "deque": 4, "function": -1}[change]


def test_tensors_that_are_only_looked_at_are_guarded(monkeypatch):
    """A global tensor whose presence or shape is read is guarded, although its values are not used."""
    f = compiled(lambda x: x * 2 if TENSOR is not None else x)
    assert f(torch.ones(1)).item() == 2
    monkeypatch.setitem(globals(), "TENSOR", None)
    assert f(torch.ones(1)).item() == 1


@pytest.mark.parametrize(
    "container", [[1, 2.0, "some text", None], {"one": 1, 2: "two"}, (1, [2]), {1: {"inner": (1, 2)}}]
)
def test_equal_items_hold_and_others_do_not(container):
    """Items that are other objects hold if they are equal and of the same type; so do keys."""
    known = snapshot(container)
    assert known.holds(container)
    assert known.holds(eval(repr(container)))
    assert known.holds(copy.deepcopy(container))
    text = repr(container)
    for other in (text.replace("1", "True"), text.replace("1", "1.0"), text.replace("1", "3"), text.replace("2", "4")):
        assert known.holds(eval(other)) == (other == text)
