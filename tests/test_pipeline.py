"""The contents page: stages in order, their records, and an engine that is our own."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import types
import weakref

import pytest
import torch
import torch._dynamo.backends.common
import torch._dynamo.backends.debugging
import torch._inductor.compile_fx
from torch import nn

import aotlab
from aotlab import pipeline
from aotlab.backends.compile_stage import CompileRecord
from aotlab.capture.call import CaptureRecord
from aotlab.capture.dedupe import DedupeRecord
from aotlab.capture.synthetic_bases import SyntheticBasesRecord
from aotlab.errors import GraphInvariantError
from aotlab.events import CompileFailed, CompileFinished, CompileStarted, StageFinished
from aotlab.partition.partition_stage import PartitionRecord
from aotlab.runtime.runtime_stage import RuntimeRecord
from aotlab.trace.records import TraceRecord
from tests.engine_helpers import compiled, entry_of, heard_events, leaf, nonleaf, record, same, traced

STAGES = {
    "capture": CaptureRecord,
    "dedupe": DedupeRecord,
    "synthetic_bases": SyntheticBasesRecord,
    "trace": TraceRecord,
    "partition": PartitionRecord,
    "compile": CompileRecord,
    "runtime": RuntimeRecord,
}


def test_stages_are_announced_in_order():
    """Started, each stage with its frozen record, its time and the size of its graph, finished."""
    with heard_events() as heard:
        f = compiled(lambda x: x.sin())
        f(leaf(2))
    kinds = [type(e).__name__ for e in heard]
    assert kinds[0] == "CompileStarted"
    assert kinds[-2:] == ["CompileFinished", "Called"]
    stages = [e for e in heard if isinstance(e, StageFinished)]
    assert [e.stage for e in stages] == list(STAGES)
    number = entry_of(f).number
    for event, kind in zip(stages, STAGES.values(), strict=True):
        assert type(event.record) is kind
        assert event.record.__dataclass_params__.frozen
        assert not hasattr(event.record, "__dict__")
        assert event.entry == number
        assert event.duration_ns > 0
    nodes = {e.stage: e.nodes for e in stages}
    assert nodes == {
        "capture": None, "dedupe": None, "synthetic_bases": None, "trace": 3, "partition": 3, "compile": None,
        "runtime": None,
    }  # fmt: skip
    started, finished = (next(e for e in heard if isinstance(e, k)) for k in (CompileStarted, CompileFinished))
    assert finished.duration_ns >= sum(e.duration_ns for e in stages) * 0.9
    assert started.frontend == "direct"


def test_records_are_kept_with_the_entry():
    """An entry has all records, also when nobody listened."""
    f = traced(lambda x: x * 2, torch.ones(2))
    records = entry_of(f).records
    kinds = {field.name: type(getattr(records, field.name)) for field in dataclasses.fields(records)}
    assert kinds == {**STAGES, "subclasses": type(None)}


@pytest.mark.parametrize(
    "program",
    [
        lambda x, y: (x.sin(), y.mul_(2), y.t()),
        lambda x, y: (x.t(), (x * y)[0], x),
    ],
)
def test_entries_do_not_hold_real_tensors(program):
    """Nothing of an entry keeps a tensor of the caller's alive."""
    x, y = leaf(3), nonleaf(3)
    f = compiled(program)
    out = f(x, y)
    references = [weakref.ref(x), weakref.ref(y)]
    del x, y, out
    gc.collect()
    assert [r() for r in references] == [None, None]
    assert len(f.entries) == 1


def test_specs_in_records_are_plain():
    """Records without graphs consist of plain values at all levels."""
    f = traced(lambda x, y: (x.mul_(2), y.t()), torch.ones(2), leaf(2, 3))
    plain = (str, int, float, bool, type(None), torch.dtype, torch.device, torch.layout)

    def check(value, path):
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                check(getattr(value, field.name), f"{path}.{field.name}")
        elif isinstance(value, (tuple, frozenset)):
            for item in value:
                check(item, path)
        elif not isinstance(value, (*plain, torch.fx.GraphModule)) and type(value).__name__ not in (
            "OutputType", "TangentSource",
        ):  # fmt: skip
            pytest.fail(f"{path} is a {type(value)}")

    for name in STAGES:
        check(record(f, name), name)


def test_capture_record():
    """The record of a captured call: names, kinds, specs with shared storages, Python values, nesting, the line."""

    def f(x, options, flag=False):
        return x * options["w"]

    base = torch.arange(6.0)
    g = compiled(f)
    g(base[:3], {"w": base[3:], "n": 3}, flag=True)
    captured = record(g, "capture")
    assert [(a.name, a.kind) for a in captured.arguments] == [
        ("x", "input"), ("options['w']", "input"), ("options['n']", "python"), ("flag", "python"),
    ]  # fmt: skip
    x, w, n, flag = captured.arguments
    assert x.spec.storage == w.spec.storage
    assert (w.spec.offset, w.spec.byte_offset, w.spec.storage_bytes) == (3, 12, 24)
    assert (n.value, flag.value) == ("3", "True")
    assert captured.line.line == f.__code__.co_firstlineno
    assert (captured.grad_mode, captured.training) == (True, False)


def test_failures_are_announced():
    """A stage that raises is followed by CompileFailed and nothing else."""
    with heard_events() as heard, pytest.raises(ValueError, match="boom"):
        aotlab.aot_function(lambda x: x, lambda gm, i: (_ for _ in ()).throw(ValueError("boom")))(torch.ones(1))
    assert isinstance(heard[-1], CompileFailed)
    assert heard[-1].outcome == "raised"
    assert [e.stage for e in heard if isinstance(e, StageFinished)][-1] == "partition"


def test_debug_assert_checks_the_joint_graph(monkeypatch):
    """Under config.debug_assert the traced graph is checked."""
    calls = []
    monkeypatch.setattr(pipeline, "check_graph", lambda module, name, **rest: calls.append(name))
    compiled(lambda x: x * 2)(torch.ones(1))
    assert calls == []
    with aotlab.config.patch(debug_assert=True):
        compiled(lambda x: x * 2)(torch.ones(1))
    assert calls == ["joint"]


def test_a_broken_partitioner_is_an_invariant_error():
    """A graph that writes to its arguments does not get through."""

    def partition(joint, inputs, **rest):
        forward, backward = aotlab.default_partition(joint, inputs, **rest)
        node = next(n for n in forward.graph.nodes if n.op == "call_function")
        with forward.graph.inserting_after(node):
            forward.graph.call_function(torch.ops.aten.add_.Tensor, (node, 1))
        return forward, backward

    with pytest.raises(GraphInvariantError, match="writes to its argument"):
        compiled(lambda x: x.sin(), partitioner=partition)(leaf(2))


# --- the engine is ours ------------------------------------------------------------------------------------------


class PoisonedError(Exception):
    """Raised where upstream's code would have run."""


UPSTREAM = (
    "torch._functorch.aot_autograd",
    "torch._functorch._aot_autograd.collect_metadata_analysis",
    "torch._functorch._aot_autograd.graph_capture",
    "torch._functorch._aot_autograd.graph_capture_wrappers",
    "torch._functorch._aot_autograd.graph_compile",
    "torch._functorch._aot_autograd.input_output_analysis",
    "torch._functorch._aot_autograd.runtime_wrappers",
    "torch._functorch._aot_autograd.frontend_utils",
    "torch._functorch._aot_autograd.functional_utils",
    "torch._functorch._aot_autograd.subclass_utils",
    "torch._functorch._aot_autograd.logging_utils",
    "torch._functorch._aot_autograd.utils",
    "torch._functorch._aot_autograd.schemas",
    "torch._functorch.partitioners",
    "torch.fx.experimental.proxy_tensor",
)
#: What is no part of AOTAutograd although it lives there: Inductor reads these for its own bookkeeping.
HARMLESS = {
    "_maybe_handle_decomp", "boxed_nop_preserve_node_meta", "describe_next_node", "disable_proxy_modes_tracing",
    "get_aot_compilation_context", "get_aot_graph_name", "get_graph_being_compiled", "get_innermost_proxy_mode",
    "get_proxy_mode", "get_proxy_slot", "handle_sym_dispatch", "has_proxy_slot", "is_fun", "is_sym_node",
    "is_tensor_subclass", "make_boxed_compiler", "make_boxed_func", "maybe_disable_thunkify", "maybe_enable_thunkify",
    "maybe_handle_decomp", "py_sym_types", "setup_stacktrace_preservation_hooks",
    "unwrap_tensor_subclasses_with_indices_to_original",
}  # fmt: skip


def poison(monkeypatch, harmless=frozenset()):
    """Make every function of upstream's AOTAutograd, and make_fx, raise; return how many."""
    count = 0

    def poisoned(name):
        def function(*args, **kwargs):
            raise PoisonedError(name)

        return function

    for path in UPSTREAM:
        try:
            module = importlib.import_module(path)
        except ImportError:  # the file has another name on this torch; the front door below is always there
            continue
        for name, value in list(vars(module).items()):
            if not isinstance(value, types.FunctionType) or value.__module__ != path or name in harmless:
                continue
            monkeypatch.setattr(module, name, functools.wraps(value)(poisoned(f"{path}.{name}")))
            count += 1
    for path, name in (
        ("torch._functorch.aot_autograd", "AOTConfig"),
        ("torch.fx.experimental.proxy_tensor", "PythonKeyTracer"),
        ("torch.fx.experimental.proxy_tensor", "ProxyTorchDispatchMode"),
    ):
        # the class itself stays: others ask `isinstance` of it
        monkeypatch.setattr(getattr(importlib.import_module(path), name), "__init__", poisoned(f"{path}.{name}"))
        count += 1
    return count


def program(x, y, w):
    """Mutate, alias, differentiate."""
    x.mul_(y)
    z = (x @ w).sin()
    return x.t(), z[0], z, torch.nn.functional.layer_norm(z, (4,))


def test_poison_works(monkeypatch):
    """The poison stops upstream's own functions: the test below can fail."""
    count = poison(monkeypatch, HARMLESS)
    assert count > 150
    from torch._functorch.aot_autograd import aot_function
    from torch.fx.experimental.proxy_tensor import make_fx

    with pytest.raises(PoisonedError):
        aot_function(torch.sin, aotlab.nop)(leaf(2))
    with pytest.raises(PoisonedError):
        make_fx(torch.sin)(torch.ones(2))
    torch.compiler.reset()
    with pytest.raises(Exception, match="PoisonedError"):
        torch.compile(torch.sin, backend="aot_eager")(leaf(2))
    torch.compiler.reset()


def test_upstream_is_never_called(monkeypatch):
    """With upstream's AOTAutograd and make_fx poisoned, we trace, compile and run, training and inference."""
    arguments = (nonleaf(2, 3), leaf(2, 3, seed=1), leaf(3, 4, seed=2))
    plain = (torch.randn(2, 3), torch.randn(2, 3), torch.randn(3, 4))
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU())
    assert poison(monkeypatch, HARMLESS) > 150
    with pytest.raises(PoisonedError):
        torch._functorch.aot_autograd.aot_function(torch.sin, aotlab.nop)(leaf(2))
    same(program, *arguments)
    same(program, *arguments, backward="each")
    same(program, *plain)
    same(module, torch.randn(5, 3), make=lambda m: aotlab.aot_module(m, aotlab.nop))


def test_upstream_is_never_called_by_inductor(monkeypatch):
    """The same on Inductor, whose inner entry is all that we use."""

    def f(x, y):
        x.mul_(y)
        return x.t(), (x * y).sin().sum()

    # Inductor draws its own patterns by make_fx when it is first used; that is none of our tracing.
    aotlab.compile(lambda x: x.sin(), backend="inductor")(torch.ones(2))
    poison(monkeypatch, HARMLESS)
    expected = nonleaf(2, 3), leaf(2, 3, seed=1)
    actual = nonleaf(2, 3), leaf(2, 3, seed=1)
    out = aotlab.compile(f, backend="inductor")(*actual)
    wanted = f(*expected)
    wanted[1].backward()
    out[1].backward()
    torch.testing.assert_close(out[0], wanted[0])
    torch.testing.assert_close(actual[0], expected[0])
    torch.testing.assert_close(actual[1].grad, expected[1].grad)
