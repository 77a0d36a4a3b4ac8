"""Classes, methods and attributes of libraries that are replaced after a function was compiled."""

from __future__ import annotations

import importlib
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as users write it
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.models.llama import modeling_llama

from aotlab.guards.guarded_values import MISSING, Names
from aotlab.guards.reached import Place, Reached
from tests.engine_helpers import behind, compiled

#: A function or module, and the change that follows its first call.
Case = tuple[Callable[..., Any], Callable[[], object]]


class Base:
    """The base class of `Scales`."""

    base = 2.0

    def inherited(self, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def static() -> float:
        return 2.0

    def __neg__(self) -> float:
        return -2.0


class Scales(Base):
    """An object with all that its class can provide: a method, a property, a call, a missing attribute."""

    factor = 2.0
    library = math

    def above(self, x: Tensor) -> Tensor:
        return super().inherited(x)

    def scale(self, x: Tensor) -> Tensor:
        return x * self.factor

    @property
    def offset(self) -> float:
        return 3.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * 5

    def __getattr__(self, name: str) -> float:
        return 7.0


class Part(nn.Module):
    """A module whose forward calls another method."""

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x)

    def scale(self, x: Tensor) -> Tensor:
        return x * 2


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def _kind_of(thing: object, kind: type) -> Callable[[], object]:
    return lambda: setattr(thing, "__class__", kind)


def _subclass(kind: type, **members: Any) -> type:
    return type(kind.__name__, (kind,), members)


def _fresh(kind: type) -> Any:
    """Return an object of a class that the test may change."""
    return _subclass(kind)()


def _change(thing: object, **members: Any) -> Callable[[], object]:
    def change() -> None:
        for name, member in members.items():
            setattr(type(thing), name, member)

    return change


def _submodule() -> Case:
    model = nn.Sequential(nn.Identity())
    return model, _kind_of(model[0], nn.Tanh)


def _module() -> Case:
    module = nn.Identity()
    return module, _kind_of(module, nn.Tanh)


def _users_module() -> Case:
    part = _fresh(Part)
    return part, _kind_of(part, _subclass(Part, scale=lambda self, x: -x))


def _object() -> Case:
    scales = _fresh(Scales)
    return lambda x: scales.scale(x), _kind_of(scales, _subclass(Scales, scale=lambda self, x: -x))


def _object_of_a_method() -> Case:
    scales = _fresh(Scales)
    return scales.scale, _kind_of(scales, _subclass(Scales, factor=property(lambda self: 4.0)))


def _parametrization() -> Case:
    model = nn.Sequential(nn.Linear(3, 3))
    return model, lambda: parametrize.register_parametrization(model[0], "weight", Doubled())


def _member(name: str, use: Callable[[Any], Callable[..., Any]], member: Any) -> Callable[[], Case]:
    """Return a case in which an object's class overrides an inherited ``member``."""

    def case() -> Case:
        scales = _fresh(Scales)
        return use(scales), _change(scales, **{name: member})

    return case


def _bases() -> Case:
    scales = _fresh(Scales)
    bases = (_subclass(Scales, scale=lambda self, x: -x),)
    return lambda x: scales.scale(x), lambda: setattr(type(scales), "__bases__", bases)


def _between() -> Case:
    middle = _subclass(Base)
    kind = type("Lowest", (middle,), {})
    kind.above = lambda self, x: super(kind, self).inherited(x)  # type: ignore[attr-defined]
    lowest = kind()
    return lambda x: lowest.above(x), lambda: setattr(middle, "inherited", lambda self, x: -x)


def _made_inside(name: str, use: Callable[[Any], Any], member: Any) -> Callable[[], Case]:
    """Return a case in which the class of an object that the function makes gets another special method."""

    def case() -> Case:
        kind = _subclass(Scales, **{name: getattr(Base, name)})
        return lambda x: x * use(kind()), lambda: setattr(kind, name, member)

    return case


def _init() -> Case:
    class Made:
        def __init__(self) -> None:
            self.factor = 2.0

    return lambda x: x * Made().factor, lambda: setattr(Made, "__init__", lambda self: setattr(self, "factor", 9.0))


def _shown(method: str, show: Callable[[Any], str]) -> Callable[[], Case]:
    def case() -> Case:
        kind, table = _subclass(Base, **{method: lambda self, *_: "a"}), {"a": 2.0, "b": 9.0}
        thing = kind()
        return lambda x: x * table[show(thing)], lambda: setattr(kind, method, lambda self, *_: "b")

    return case


def _member_of_module(name: str, *, inside: bool) -> Callable[[], Case]:
    def case() -> Case:
        part = _fresh(Part)
        return nn.Sequential(part) if inside else part, _change(part, **{name: lambda self, x: -x})

    return case


def _code() -> Case:
    part = _fresh(Part)
    type(part).scale = lambda self, x: x * 2
    return part, lambda: setattr(type(part).scale, "__code__", (lambda self, x: -x).__code__)


CLASSES: dict[str, Callable[[], Case]] = {
    "the class of a submodule": _submodule,
    "the class of the module": _module,
    "the class of a user's module": _users_module,
    "the class of an object": _object,
    "the class of a method's object": _object_of_a_method,
    "a parametrization": _parametrization,
    "a method": _member("scale", lambda each: lambda x: each.scale(x), lambda self, x: -x),
    "a property": _member("offset", lambda each: lambda x: x * each.offset, property(lambda self: 11.0)),
    "__call__": _member("__call__", lambda each: lambda x: each(x), lambda self, x: -x),
    "__getattr__": _member("__getattr__", lambda each: lambda x: x * each.missing, lambda self, name: 11.0),
    "a module's __call__": _member_of_module("__call__", inside=False),
    "a submodule's __call__": _member_of_module("__call__", inside=True),
    "a module's forward": _member_of_module("forward", inside=False),
    "a submodule's forward": _member_of_module("forward", inside=True),
    "the code of a method": _code,
    "an attribute that was inherited": _member("base", lambda each: lambda x: x * each.base, 9.0),
    "a static method that was inherited": _member(
        "static", lambda each: lambda x: x * each.static(), staticmethod(lambda: 9.0)
    ),
    "an operator that was inherited": _member("__neg__", lambda each: lambda x: x * -each, lambda self: 9.0),
    "a method above `super()`": _between,
    "the bases of a class": _bases,
    "an operator of an object made inside": _made_inside("__neg__", lambda each: -each, lambda self: 9.0),
    "__init__": _init,
    "__repr__": _shown("__repr__", repr),
    "__str__": _shown("__str__", str),
    "__format__": _shown("__format__", lambda thing: f"{thing}"),
}


FRONTENDS = pytest.mark.parametrize("frontend", ["direct", "dynamo"])


def check(case: Case, frontend: str, words: str = "") -> None:
    """Call a compiled function before and after a change; it must follow eager, and compile twice."""
    function, change = case
    torch.manual_seed(0)
    x, candidate = torch.randn(3, 3), compiled(function, frontend=frontend)
    for _ in range(2):
        assert torch.equal(function(x), candidate(x))
    before = function(x)
    change()
    assert not torch.equal(before, function(x))
    for _ in range(2):
        assert torch.equal(function(x), candidate(x))
    if frontend == "dynamo":
        return  # whose entries are Dynamo's
    log = behind(candidate)
    assert (len(log.entries), log.calls.eager) == (2, 0)
    assert words in log.recompiles[0]


@pytest.mark.usefixtures("fresh_dynamo")
@FRONTENDS
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_that_is_replaced(name: str, frontend: str) -> None:
    """A new class, method or property of an object is a reason to compile again."""
    check(CLASSES[name](), frontend)


class Chained(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.hardtanh(self.other(x))

    def other(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x)


def _by_default(x: Tensor, library: Any = F) -> Tensor:
    result: Tensor = library.gelu(x)
    return result


ENCODER = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
#: The compiled function, and the owner, the name and the new value of the attribute that is replaced.
LIBRARIES: dict[str, tuple[Callable[..., Any], Any, str, Any]] = {
    "F.gelu": (lambda x: F.gelu(x), F, "gelu", lambda x: x * 3),
    "torch.nn.functional.gelu": (lambda x: torch.nn.functional.gelu(x), F, "gelu", lambda x: x * 3),
    "a chain that another function shares": (
        Chained(), F, "silu", lambda x: x * 3,
    ),
    "by a string": (lambda x: getattr(F, "gelu")(x), F, "gelu", lambda x: x * 3),  # noqa: B009  # what is tested
    "a function that a module calls": (nn.GELU(), F, "gelu", lambda x, **_: x * 3),
    "F.scaled_dot_product_attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x),
        F, "scaled_dot_product_attention", lambda q, k, v: q * 3,
    ),
    "attention in an encoder": (
        lambda x: ENCODER(torch.stack([x, x], -1).reshape(1, -1, 2).repeat(1, 1, 2)),
        F, "scaled_dot_product_attention", lambda q, *_, **__: q * 3,
    ),
    "a library in an object": (
        (lambda held: lambda x: held.library.gelu(x))(types.SimpleNamespace(library=F)), F, "gelu", lambda x: x * 3,
    ),
    "a library in a dictionary": (
        (lambda held: lambda x: held["F"].gelu(x))({"F": F}), F, "gelu", lambda x: x * 3,
    ),
    "a library in a default": (lambda x: _by_default(x), F, "gelu", lambda x: x * 3),
    "a library in a class": ((lambda held: lambda x: x * held.library.pi)(Scales()), math, "pi", 3.0),
    "a unary operator": (lambda x: -x, torch.Tensor, "__neg__", lambda x: x * 3),
    "torch.softmax": (lambda x: torch.softmax(x, 0), torch, "softmax", lambda x, dim: x * 3),
    "a module in a closure": (
        (lambda library: lambda x: library.cat([x, x]))(torch), torch, "cat", lambda xs: xs[0] * 3,
    ),
    "nn.Linear.forward": (nn.Linear(3, 3), nn.Linear, "forward", lambda self, x: x * 3),
    "nn.Linear.forward of a submodule": (
        nn.Sequential(nn.Linear(3, 3)), nn.Linear, "forward", lambda self, x: x * 3,
    ),
    "a method that a class inherits": (
        nn.Sequential(nn.BatchNorm1d(3)).eval(), nn.BatchNorm1d, "forward", lambda self, x: x * 3,
    ),
    "nn.Module.__call__": (
        nn.Sequential(nn.Tanh()), nn.Module, "__call__", lambda self, x: self.forward(x) * 3,
    ),
    "Tensor.relu": (lambda x: x.relu(), torch.Tensor, "relu", lambda x: x * 3),
    "Tensor.norm": (lambda x: x.norm(), torch.Tensor, "norm", lambda x: x.sum()),
    "an operator": (lambda x: x * 2, torch.Tensor, "__mul__", lambda x, other: x + other),
    "math.pi": (lambda x: x * math.pi, math, "pi", 3.0),
    "a package's function": (
        lambda x: modeling_llama.rotate_half(x.repeat(1, 2)), modeling_llama, "rotate_half", lambda x: x * 3,
    ),
    "a function that a package's function calls": (
        lambda x: modeling_llama.apply_rotary_pos_emb(*[x.repeat(1, 2)[None]] * 4)[0],
        modeling_llama, "rotate_half", lambda x: x * 3,
    ),
}  # fmt: skip


@pytest.mark.usefixtures("fresh_dynamo")
@FRONTENDS
@pytest.mark.parametrize("name", LIBRARIES)
def test_an_attribute_of_a_library_that_is_replaced(name: str, frontend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function, method or constant of a library that the code reads by name is guarded, and the reason names it."""
    function, owner, attribute, replacement = LIBRARIES[name]
    check((function, lambda: monkeypatch.setattr(owner, attribute, replacement)), frontend, attribute)


PACKAGE = """
import functools
from torch import nn
from . import inner
SCALE, FLAG, TABLE = 2.0, True, {"a": 2.0}
def scaled(x): return x * SCALE
def flagged(x): return x * 2 if FLAG else x * 3
def looks_up(x): return x * TABLE["a"]
def default(x, factor=2.0): return x * factor
def other(function):
    @functools.wraps(function)
    def wrapper(*args): return function(*args)
    return wrapper
@other
def decorated(x): return inner.helper(x) * 2
def imports(x):
    from .inner import helper
    return helper(x)
def makes(x): return Scale().apply(x)
class Scale:
    def __init__(self): self.factor = 2.0
    def apply(self, x): return x * self.factor
    @staticmethod
    def static(x): return x * 2
    @classmethod
    def made(cls, x): return x * 2
"""
#: For each compiled function: the attribute of the package that is replaced, and its replacement.
PACKAGES: dict[str, tuple[Callable[[Any], Callable[..., Any]], Callable[[Any], tuple[Any, str, Any]]]] = {
    "a constant": (lambda p: lambda x: p.scaled(x), lambda p: (p, "SCALE", 9.0)),
    "a flag": (lambda p: lambda x: p.flagged(x), lambda p: (p, "FLAG", False)),
    "a table": (lambda p: lambda x: p.looks_up(x), lambda p: (p, "TABLE", {"a": 9.0})),
    "defaults": (lambda p: lambda x: p.default(x), lambda p: (p.default, "__defaults__", (9.0,))),
    "code": (lambda p: lambda x: p.scaled(x), lambda p: (p.scaled, "__code__", (lambda x: x * 9).__code__)),
    "a decorated function": (lambda p: lambda x: p.decorated(x), lambda p: (p.inner, "helper", lambda x: x * 9)),
    "an import inside": (lambda p: lambda x: p.imports(x), lambda p: (p.inner, "helper", lambda x: x * 9)),
    "a class made inside": (lambda p: lambda x: p.makes(x), lambda p: (p.Scale, "apply", lambda self, x: x * 9)),
    "__init__": (
        lambda p: lambda x: p.Scale().apply(x),
        lambda p: (p.Scale, "__init__", lambda self: setattr(self, "factor", 9.0)),
    ),
    "a static method": (lambda p: lambda x: p.Scale.static(x), lambda p: (p.Scale, "static", lambda x: x * 9)),
    "a class method": (
        lambda p: lambda x: p.Scale.made(x), lambda p: (p.Scale, "made", classmethod(lambda cls, x: x * 9)),
    ),
}  # fmt: skip


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a new package that is installed for the length of a test."""
    folder = tmp_path / "site-packages" / "installed"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(PACKAGE)
    (folder / "inner.py").write_text("def helper(x): return x + 1\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    yield importlib.import_module("installed")
    for name in ("installed", "installed.inner"):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("fresh_dynamo")
@FRONTENDS
@pytest.mark.parametrize("name", PACKAGES)
def test_what_a_package_has(name: str, frontend: str, package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The globals, defaults and classes of an installed package are guarded as the user's are."""
    make, replaced = PACKAGES[name]
    check((make(package), lambda: monkeypatch.setattr(*replaced(package))), frontend)


def test_other_attributes_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attribute that the code does not mention may be replaced."""
    candidate, x = compiled(lambda x: F.gelu(x).sum()), torch.ones(3)
    candidate(x)
    monkeypatch.setattr(F, "silu", lambda x: x)
    monkeypatch.setattr(torch, "softmax", lambda x: x)
    monkeypatch.setattr(torch.Tensor, "relu", lambda x: x)
    candidate(x)
    assert behind(candidate).recompiles == ()


def test_an_attribute_that_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the library's attribute is restored, the first entry serves again."""
    candidate, x = compiled(lambda x: F.gelu(x)), torch.ones(3)
    with monkeypatch.context() as patched:
        candidate(x)
        patched.setattr(F, "gelu", lambda x: x * 3)
        candidate(x)
    assert torch.equal(F.gelu(x), candidate(x))
    assert len(behind(candidate).entries) == 2


def test_the_guards_name_each_attribute_once() -> None:
    """The report has one sentence for each library, with the attributes that the code mentions."""
    candidate = compiled(lambda x: F.gelu(x) * math.pi + math.e)
    candidate(torch.ones(3))
    sentences = {item.sentence() for item in behind(candidate).entries[0].state.reached}
    assert {"`F.gelu` is the same object", "`math.e`, `math.pi` are the same objects"} <= sentences


def test_a_guard_of_many_names_is_one_short_sentence() -> None:
    """A model of transformers has thousands of guards, and each of some hundred names."""
    names = [f"name{n}" for n in range(100, 400)]
    absent = Place("unheld", types.SimpleNamespace(), frozenset(names))
    sentence = Reached(name="self.…", place=absent, expected=MISSING).sentence()
    assert sentence.startswith("`self.name100, name101, ")
    assert sentence.endswith("name107` and 292 more are missing")
    held = Place("attributes", math, tuple(names))
    sentence = Reached(name="math", place=held, expected=Names(tuple(names), ())).sentence()
    assert sentence.startswith("`math.name100`, `math.name101`, ")
    assert sentence.endswith("`math.name107` and 292 more are the same objects")
