"""Guards on wrappers: another type, context, part or history gets another entry, with a reason."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import aotlab
from tests.subclasses.kinds import Quantized, Tagged, leaf, parts, plain, same, two


def strided():
    """Make a wrapper of transposed tensors."""
    return TwoTensor(plain(0, (4, 3)).t(), plain(1, (4, 3)).t())


CHANGES = {
    "type": (lambda: Tagged(plain(), "x"), two, "TwoTensor"),
    "context": (lambda: Tagged(plain(), "x"), lambda: Tagged(plain(), "y"), "'y'"),
    "sizes": (two, lambda: two(0, (5, 4)), r"`t.a` has shape \(5, 4\)"),
    "strides": (two, strided, "`t.a` has strides"),
    "dtype": (two, lambda: TwoTensor(plain().double(), plain().double()), "`t.a` has dtype"),
    "requires grad": (two, lambda: leaf(two()), "requires_grad=True"),
    "no leaf": (lambda: leaf(two()), lambda: leaf(two()) * 1, "is a leaf"),
    "nested": (two, lambda: TwoTensor(two(), two(1)), r"nested as \(TwoTensor\(a: TwoTensor"),
    "a tensor": (two, plain, "nested"),
    "after a tensor": (plain, two, "nested"),
    "metadata": (lambda: Quantized.of(plain()), lambda: Quantized.of(plain(), 4), "'bits': 4"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_entry(name):
    """The second call is compiled again, with the expected reason; the third and fourth are not."""
    first, second, reason = CHANGES[name]
    function = lambda t: (t * 2).sin()  # noqa: E731
    compiled = aotlab.compile(function, backend="eager", dynamic=False)
    for make in (first, second, first, second):
        assert same(compiled(make()), function(make()))
    assert len(compiled.entries) == 2
    (told,) = compiled.recompiles
    assert re.search(reason, told), told


def test_two_or_one():
    """Two wrappers, and one wrapper passed twice, get separate entries."""
    function = lambda t, u: (t * u, t is u)  # noqa: E731
    compiled = aotlab.compile(function, backend="eager")
    for t, u in ((two(), two(1)), (leaf(two()),) * 2, (leaf(two()), leaf(two(1))), (two(),) * 2, (two(), two(1))):
        assert same(compiled(t, u), function(t, u))
    assert len(compiled.entries) == 4


def test_names_of_parts():
    """The report of an entry names parts by their wrappers, and shows how they are wrapped."""
    compiled = aotlab.compile(lambda o, w: o["t"] * w, backend="eager")
    compiled({"t": two()}, TwoTensor(two(1), two(2)))
    records = compiled.entries[0].records
    names = [each.name for each in records.capture.arguments]
    assert names == ["o['t'].a", "o['t'].b", "type(o['t'])", "w.a.a", "w.a.b", "w.b.a", "w.b.b", "type(w)"]
    record = records.subclasses
    assert str(record.inputs[0].spec) == "TwoTensor(a, b)"
    assert record.inputs[1].fact.startswith("TwoTensor(a: TwoTensor(a, b), b: TwoTensor(a, b))")
    assert [item.kind for item in record.outputs] == ["new"]
    assert "__tensor_flatten__()" in record.source


def test_report(tmp_path):
    """A report names the graph's inputs by the attributes of the wrappers."""
    with aotlab.Report.record() as report:
        compiled = aotlab.compile(lambda t, w: torch.nn.functional.linear(t, w), backend="eager")
        compiled(leaf(two()), Quantized.of(plain(1, (5, 4)))).sum().backward()
    assert "1 call, 1 compiled, 0 eager" in str(report)
    report.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert all(name in page for name in ("t.a", "t.b", "w.data_", "w.scale"))


def test_arguments_named_otherwise(monkeypatch):
    """Keywords and missing or additional arguments behave as in eager."""
    function = lambda t, u=None, *, k=1: t * k if u is None else t * u  # noqa: E731
    compiled = aotlab.compile(function, backend="eager")
    assert same(compiled(two()), two())
    assert same(compiled(t=two()), two())
    assert same(compiled(two(), k=3), two() * 3)
    assert same(compiled(two(), u=two(1)), two() * two(1))
    assert same(compiled(two(), two(1)), two() * two(1))
    assert compiled.calls.eager == 0
    monkeypatch.setattr(aotlab.config, "fallback", "eager")
    with pytest.raises(TypeError, match="positional arguments"):
        compiled(two(), two(1), two(2))


class FunctionOnly(torch.Tensor):
    """A subclass that defines ``__torch_function__`` and has no parts."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Negate the result of `torch.sin`."""
        result = super().__torch_function__(func, types, args, kwargs or {})
        return -result if func is torch.sin else result


class Odd(Tagged):
    """A wrapper that names a non-tensor as a part."""

    def __tensor_flatten__(self):
        """Return a wrong list of parts."""
        return ["elem", "tag"], None


REFUSED = {
    "__torch_function__ alone": (lambda: plain().as_subclass(FunctionOnly), "FunctionOnly"),
    "parts that are no tensors": (lambda: Odd(plain(), "x"), "may name only tensors"),
    "jagged": (
        lambda: torch.nested.nested_tensor([plain(), plain(1, (2, 4))], layout=torch.jagged),
        "NestedTensor`, which is nested",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_eager_with_a_notice(name, monkeypatch):
    """A tensor subclass that cannot be unwrapped runs eagerly, and the notice says why."""
    make, text = REFUSED[name]
    monkeypatch.setattr(aotlab.config, "fallback", "eager")
    compiled = aotlab.compile(lambda t: torch.sin(t) * 2, backend="eager")
    for n in range(10):
        t, wanted = make(), make()
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            result = compiled(t)
        expected = torch.sin(wanted) * 2
        assert type(result) is type(expected)
        assert all(map(torch.equal, parts(result)[1], parts(expected)[1]))
        noted = [each for each in noted if "runs eagerly" in str(each.message)]
        assert len(noted) == (n == 0)
        assert all(re.search(text, str(each.message)) for each in noted)
    assert compiled.calls.eager == 10


def with_leaf(name):
    """Make a leaf that is left to eager, and an argument of it."""
    if name == "jagged":
        made = torch.nested.nested_tensor([plain(), plain(1, (2, 4))], layout=torch.jagged, requires_grad=True)
        return made, made
    made = plain().requires_grad_()
    return made, made.as_subclass(FunctionOnly)


@pytest.mark.parametrize("fallback", ["eager", "dynamo"])
@pytest.mark.parametrize("name", ["jagged", "__torch_function__ alone"])
def test_trained_eagerly(name, fallback, monkeypatch):
    """In training such a call runs eagerly too, with one notice, whatever the fallback; gradients are eager's."""
    monkeypatch.setattr(aotlab.config, "fallback", fallback)
    function = lambda t: torch.sin(t) * 2  # noqa: E731
    compiled = aotlab.compile(function, backend="eager")
    found = []
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        for call in (compiled, function) * 3:
            made, argument = with_leaf(name)
            result = call(argument)
            result.backward(torch.ones_like(result))
            found.append([*parts(result)[1], *parts(made.grad)[1]])
    for mine, wanted in zip(found[::2], found[1::2], strict=True):
        assert all(map(torch.equal, mine, wanted))
    notices = [str(each.message) for each in noted if "runs eagerly" in str(each.message)]
    assert len(notices) == 1
    assert re.search(REFUSED[name][1], notices[0])
    assert (compiled.calls.eager, compiled.calls.by_dynamo) == (3, 0)


class Made(torch.Tensor):
    """Is made by its class alone."""


def test_made_by_the_class(monkeypatch):
    """A tensor of a subclass that is made inside is returned as that subclass, also at the class's first use."""
    monkeypatch.setattr(aotlab.config, "fallback", "eager")
    for function in (Made, lambda x: Made(x)):
        with pytest.warns(RuntimeWarning, match="runs eagerly"):
            assert type(aotlab.compile(function, backend="eager")(plain())) is Made
