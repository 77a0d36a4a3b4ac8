"""Guards: the changes after which a second call compiles again, and the sentence that reports each."""

from __future__ import annotations

import functools
import math
import types

import pytest
import torch
from torch import nn

from aotlab.errors import (
    PythonValueError,
    SubclassError,
    TransformError,
    UnsupportedTensorError,
)
from aotlab.guards.explain import difference, same_value, sentences
from aotlab.guards.reach import reach
from tests.engine_helpers import compiled, entry_of, leaf, nonleaf, refusing, traced

# --- tensors -----------------------------------------------------------------------------------------------------


def test_leaf_that_would_be_written():
    """After a non-leaf was written, a leaf is eager's error and untouched."""
    f = compiled(lambda x: x.mul_(2))
    f(nonleaf(2))
    x = leaf(2)
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        f(x)
    assert torch.equal(x, before)


# --- settings ----------------------------------------------------------------------------------------------------


def test_default_device():
    """A default device, which factory functions use."""
    g = compiled(lambda x: (x * 2, torch.ones(2)))
    assert g(torch.ones(2))[1].device.type == "cpu"
    with torch.device("meta"):
        assert g(torch.ones(2, device="cpu"))[1].device.type == "meta"
    assert g(torch.ones(2))[1].device.type == "cpu"
    assert (len(g.entries), g.calls.eager) == (1, 1)  # a trace cannot represent meta tensors


# --- Python values -----------------------------------------------------------------------------------------------


def test_nan_is_nan():
    """Nan does not compile again and again."""
    f = compiled(lambda x, y: x * y)
    for nan in (math.nan, float("nan")):
        assert f(torch.ones(2), nan).isnan().all()
    assert f.recompiles == ()


def test_objects_are_refused():
    """An argument of a class of the user's, or a closure, cannot be guarded."""

    class Box:
        value = 2

    for value in (Box(), {1, 2}, functools.partial(torch.add, 1), iter([1])):
        with refusing(PythonValueError, match="`y` is a") as caught:
            compiled(lambda x, y: x * 2)(torch.ones(2), value)
        assert caught.value.argument == "y"


def test_same_value():
    """`same_value` compares plain values by type and value."""
    assert same_value(1.0, 1.0)
    assert same_value(math.nan, math.nan)
    assert not same_value(0.0, -0.0)
    assert not same_value(1, True)
    assert not same_value(1, 1.0)
    assert same_value((1, [2.0, {"a": None}]), (1, [2.0, {"a": None}]))
    assert not same_value((1, [2.0, {"a": None}]), (1, [2.0, {"a": 0}]))
    assert not same_value({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same_value([1], (1,))
    assert same_value(slice(1, None, 2), slice(1, None, 2))
    assert not same_value(slice(1, 2), slice(True, 2))
    assert not same_value(complex(0, 0.0), complex(0, -0.0))


# --- structure and identity --------------------------------------------------------------------------------------


def test_keyword_or_positional():
    """Passing the same argument by keyword gets another entry."""
    g = compiled(lambda x, y=2.0: x * y)
    assert g(torch.ones(1)).item() == 2.0
    assert g(torch.ones(1), 2.0).item() == 2.0
    assert g(torch.ones(1), y=2.0).item() == 2.0
    assert g(x=torch.ones(1), y=2.0).item() == 2.0
    given, named, both = g.recompiles
    assert given == "`y` is 2.0 where the compiled entry expects it to be left out"  # it is so by default
    assert "nested as (*, y=*)" in named
    assert "nested as (x=*, y=*)" in both


def test_what_is_left_out_is_its_default():
    """If only one of two calls passes a parameter, the other call has the default's value."""

    def scaled(x, scale=1.0, *, eps=0.0, **more):
        return x * scale + eps + sum(more.values())

    g = compiled(scaled)
    g(torch.ones(1))
    g(torch.ones(1), 2.0)
    g(torch.ones(1), eps=3.0)
    g(torch.ones(1), other=4.0)
    assert g.recompiles[0] == "`scale` is 2.0 where the compiled entry expects 1.0"
    assert "`eps` is 3.0 where the compiled entry expects 0.0" in g.recompiles
    assert g.recompiles[-1] == "`other` is 4.0 where the compiled entry expects it to be left out"
    h = compiled(scaled)
    h(torch.ones(1), 2.0)
    h(torch.ones(1))
    assert h.recompiles == ("`scale` is 1.0 where the compiled entry expects 2.0",)


# --- Python state that the function reaches ----------------------------------------------------------------------

SCALE = 2.0
SETTINGS = {"scale": 2.0, "parts": [1, 2]}


def helper(x):
    """Multiply by a global, for a function that calls this one."""
    return x * SCALE


def test_parameter_is_replaced():
    """A replaced parameter is used at once, and another shape compiles again."""
    module = nn.Linear(2, 3)
    g = compiled(module)
    x = torch.randn(3, 2)
    g(x)
    module.weight = nn.Parameter(torch.randn(3, 2))
    out = g(x)
    assert torch.equal(out, module(x))
    out.sum().backward()
    assert module.weight.grad is not None
    module.weight = nn.Parameter(torch.randn(5, 2))
    module.bias = None
    assert torch.equal(g(x), module(x))
    assert g.compiled.recompiles[-1]


# --- surroundings and kinds of tensors ---------------------------------------------------------------------------


def test_modes_are_refused():
    """Under dispatch modes and function modes a compiled function is refused."""
    f = compiled(lambda x: x.sin())
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Mode(), refusing(TransformError, match="dispatch mode"):
        f(torch.ones(3))

    class Function(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Function(), refusing(TransformError, match="function mode"):
        f(torch.ones(3))


def test_surroundings_are_guarded_after_the_trace():
    """An existing entry does not serve a call under a transform."""
    f = compiled(lambda x: x.sin())
    f(torch.ones(3))
    with pytest.warns(RuntimeWarning, match=r"torch\.func"):
        torch.func.grad(lambda x: f(x).sum())(torch.ones(3))
    with torch.autograd.forward_ad.dual_level():
        f(torch.ones(3))
    assert (f.calls.compiled, f.calls.eager) == (1, 2)


@pytest.mark.parametrize(
    ("make", "kind", "word"),
    [
        (lambda: torch.eye(3).to_sparse(), UnsupportedTensorError, "sparse"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, UnsupportedTensorError, "negative"),
        (lambda: torch.ones(3, device="meta"), UnsupportedTensorError, "meta"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            (UnsupportedTensorError, SubclassError),
            "nested",
        ),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), UnsupportedTensorError, "quantized"),
        (lambda: torch.ones(3).as_subclass(Own), SubclassError, "Own"),
    ],
    ids=["sparse", "neg", "meta", "nested", "quantized", "subclass"],
)
def test_kinds_of_tensors_are_refused(make, kind, word):
    """A kind of tensor that a trace cannot represent is refused by name."""
    with refusing(kind, word) as caught:
        compiled(lambda y, x: (y.add_(1), x))(torch.ones(2), make())
    assert caught.value.argument == "x"


class Own(torch.Tensor):
    """A subclass of the user's."""


def test_sentences_and_facts_agree():
    """`difference` of a state with itself is nothing; `sentences` lists every argument, setting and reached value."""
    f = traced(lambda x, y, z: (x.mul_(SCALE), y, z), torch.ones(2), leaf(3), 5)
    entry = entry_of(f)
    assert difference(entry.state, entry.state) is None
    rows = sentences(entry.state)
    kinds = {kind for kind, _, _ in rows}
    assert {"structure", "tensor", "value", "identity", "overlap", "setting", "reached"} <= kinds
    by_subject = {subject: text for kind, subject, text in rows if kind in ("tensor", "value")}
    assert by_subject["z"] == "`z` is 5"
    assert "requires grad and is a leaf" in by_subject["y"]
    assert any(subject == "SCALE" and "2.0" in text for _, subject, text in rows)


def test_reached_state():
    """The state that a function may read besides its arguments.

    It consists of closures, defaults and globals, also those of the functions that it calls.
    """
    inside = 3

    def f(x, y=4):
        return helper(x) * inside * SETTINGS["scale"] * y

    names = {item.name for item in reach(f).state}
    assert {"inside", "SCALE", "SETTINGS", "helper"} <= names
    assert any("default" in name for name in names)
    assert not any(isinstance(getattr(item.expected, "value", None), types.ModuleType) for item in reach(f).state)


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        (lambda: setattr(matmul, "allow_tf32", True), lambda: setattr(matmul, "allow_tf32", False)),
        (
            lambda: setattr(matmul, "allow_fp16_reduced_precision_reduction", False),
            lambda: setattr(matmul, "allow_fp16_reduced_precision_reduction", True),
        ),
        (
            lambda: setattr(matmul, "allow_bf16_reduced_precision_reduction", False),
            lambda: setattr(matmul, "allow_bf16_reduced_precision_reduction", True),
        ),
        (
            lambda: torch.use_deterministic_algorithms(True, warn_only=True),
            lambda: torch.use_deterministic_algorithms(False),
        ),
        (lambda: torch.set_num_threads(1), functools.partial(torch.set_num_threads, torch.get_num_threads())),
        (
            lambda: torch.set_float32_matmul_precision("high"),
            lambda: torch.set_float32_matmul_precision("highest"),
        ),
        (lambda: torch.set_autocast_cache_enabled(False), lambda: torch.set_autocast_cache_enabled(True)),
        (lambda: torch.set_autocast_enabled("xpu", True), lambda: torch.set_autocast_enabled("xpu", False)),
        (lambda: torch.set_autocast_enabled("cuda", True), lambda: torch.set_autocast_enabled("cuda", False)),
    ],
    ids=["tf32", "fp16", "bf16", "warn_only", "threads", "precision", "autocast cache", "xpu", "cuda"],
)
def test_every_setting_has_a_sentence(change, undo):
    """For each global setting that torch's own guard checks, the reason names the setting."""
    f = compiled(lambda x: x * 2)
    f(torch.ones(2))
    change()
    try:
        f(torch.ones(2))
        f(torch.ones(2))
    finally:
        undo()
    f(torch.ones(2))
    assert len(f.entries) <= 3  # on torch 2.15, undoing allow_tf32 leaves another setting than before
    assert [reason for reason in f.recompiles if "a guard did not hold" in reason] == []


matmul = torch.backends.cuda.matmul


def test_hooks_are_guarded_by_identity():
    """Replacing a module's forward hook by another one recompiles."""
    module = nn.Sequential(nn.Identity())
    f = compiled(module)
    hook = module[0].register_forward_hook(lambda m, i, o: o * 2)
    assert f(torch.ones(1)).item() == 2
    hook.remove()
    module[0].register_forward_hook(lambda m, i, o: o * 3)
    assert f(torch.ones(1)).item() == 3


def test_a_default_device_of_cpu_is_no_obstacle():
    """`torch.set_default_device("cpu")` leaves calls compiled."""
    try:
        torch.set_default_device("cpu")
        assert compiled(lambda x: x + torch.ones(3))(torch.ones(3)).tolist() == [2, 2, 2]
    finally:
        torch.set_default_device(None)
