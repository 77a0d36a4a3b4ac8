"""Compiled entries: the choice of an entry, the counters, and the behaviour if nothing can be compiled."""

from __future__ import annotations

import copy
import gc
import time
import warnings
import weakref

import pytest
import torch

import aotlab
from aotlab import _torch as internals
from aotlab import config
from aotlab.cache import CompiledFunction, Declined
from aotlab.errors import (
    CapturedTensorError,
    DataDependentError,
    MetadataMutationError,
    RecompileLimitError,
    RefusedError,
)
from aotlab.events import Called, CompileFailed, CompileFinished, CompileStarted
from tests.engine_helpers import compiled, global_torch_state, heard_events, leaf, nonleaf, refusing

#: A tensor that functions use without being given it.
CAPTURED = (torch.ones(2),)


def test_entries_and_calls_are_counted():
    """Each call is counted for the entry that served it. The newest entry is first."""
    f = compiled(lambda x: x * 2, dynamic=False)
    for size in (2, 3, 2, 2, 3):
        f(torch.ones(size))
    newest, oldest = f.entries
    assert newest.number > oldest.number
    assert f.calls.per_entry == {oldest.number: 3, newest.number: 2}
    assert (f.calls.total, f.calls.compiled, f.calls.eager) == (5, 5, 0)
    assert oldest.reason is None
    assert f.recompiles == (newest.reason,)


def test_the_reason_is_told_against_the_nearest_entry():
    """With several entries, the sentence compares with the one that differs least."""
    f = compiled(lambda x: x * 2)
    f(torch.ones(2))
    f(torch.ones(3, 3, dtype=torch.float64))
    f(torch.ones(4))
    assert f.recompiles[1] == "`x` has shape (4,) where the compiled entry expects (2,)"


X, Y, DOUBLE = torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.float64)
NESTED_AS = "the arguments are nested as ([*, *]) where the compiled entry expects"
#: The calls before, the next call, and its difference from the nearest entry.
NESTED = {
    "a value left out": ([(DOUBLE, 2.0), (X,)], (X, 2.0), "`scale` is 2.0 where the compiled entry expects 1.0"),
    "a value before a tensor": ([(X,), (DOUBLE, 2.0)], (X, 2.0), "`scale` is 2.0 where the compiled entry expects 1.0"),
    "items count": (
        [([X, 1.0],), ([X, 2.0, 2.0, 2.0],)],
        ([X, 1.0, 1.0],),
        "the arguments are nested as ([*, *, *]) where the compiled entry expects ([*, *])",
    ),
    "fewer items more": ([([X],), ([X] * 4,)], ([X, Y],), f"{NESTED_AS} ([*])"),
    "an item before a list": ([([DOUBLE, X],), ([X],)], ([X, Y],), "`x[0]` has dtype torch.float32 where"),
}


@pytest.mark.parametrize("name", NESTED)
def test_the_nearest_entry_of_those_nested_otherwise(name):
    """The nearest entry is found by counting all differences. Differences in the nesting of containers weigh more."""
    earlier, call, sentence = NESTED[name]

    def program(x, scale=1.0):
        return sum(x) * scale

    f = compiled(program)
    for args in (*earlier, call):
        assert torch.equal(f(*args), program(*args))
    assert f.recompiles[-1].startswith(sentence)


def test_the_nearest_entry_by_what_else_counts():
    """The nearest entry also depends on settings, lifted values, identity, and an offset that the function reads."""
    scale = 1.0

    def program(x, y):
        return x * scale + y * y.storage_offset()

    f = compiled(program)
    base = torch.arange(8.0)

    def call(start, size=2, *, grad=True, same=False):
        with torch.set_grad_enabled(grad):
            y = base[start : start + size]
            x = y if same else torch.ones(size)
            assert torch.equal(f(x, y), program(x, y))

    call(0)
    call(1, 3, grad=False)
    call(0, 3, grad=False)
    assert f.recompiles[-1] == "`y` begins at element 0 of its storage where the compiled entry expects 1"
    call(0, 3)
    assert (
        f.recompiles[-1] == "`x` has shape (3,) where the compiled entry expects (2,)"
        or "grad mode" in f.recompiles[-1]
    )
    scale = 2.0
    call(1, 3, grad=False)
    assert f.recompiles[-1] == "`scale`, which the function reads, is 2.0 where the compiled entry expects 1.0"
    call(1, 3, grad=False, same=True)
    assert f.recompiles[-1] == "`y` is the same tensor as `x`; the compiled entry expects two"
    assert len(f.entries) == 6
    assert f.calls.eager == 0


@pytest.mark.parametrize("what", ["scale", "offset", "same", "grad", "overlap"])
def test_everything_counts_for_which_entry_is_nearest(what):
    """Of two entries that differ in ``n`` from a call, the older one is nearest if the newer differs in more."""
    scale = 1.0

    def program(x, y, n):
        if what == "overlap":
            x.mul_(2)
        return x * scale * n + y * (y.storage_offset() if what == "offset" else 1)

    f = compiled(program, dynamic=False)

    def call(n, *, other):
        nonlocal scale
        scale = 2.0 if what == "scale" and other else 1.0
        base = torch.arange(8.0)
        x, y = base[0:2], base[4:6]
        if what == "same":
            y = x if other else y
        elif other and what in ("offset", "overlap"):
            y = base[5:7] if what == "offset" else base[1:3]
        with torch.set_grad_enabled(not (what == "grad" and other)):
            f(x, y, n)

    call(1, other=False)
    call(2, other=True)
    call(3, other=False)
    assert f.recompiles[1] == "`n` is 3 where the compiled entry expects 1"


def test_limit_after_other_kinds_of_reasons():
    """The limit counts entries of all kinds; afterwards every call is still right, and old entries serve."""
    scale = 1.0

    def program(x):
        return x * scale

    with config.patch(recompile_limit=3):
        f = compiled(program, dynamic=False)
        for scale in (1.0, 2.0, 3.0):
            assert f(torch.ones(1)).item() == scale
        scale = 4.0
        with pytest.warns(RuntimeWarning, match=r"compiled 3 times.*the last reason: `scale`, which"):
            assert f(torch.ones(1)).item() == 4.0
        for scale in (1.0, 2.0, 5.0, 3.0):
            assert f(torch.ones(1)).item() == scale
        assert (f.calls.compiled, f.calls.eager) == (6, 2)


def test_refusals_that_are_remembered_are_few():
    """A function that is refused in ever new forms remembers the latest of them only, and stays right."""
    with config.patch(fallback="eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        f = compiled(lambda x: x * int(x.sum().item()))
        for n in range(1, 80):
            assert f(torch.ones(n)).sum().item() == n * n
        assert len(f._refused) == 64


def test_repr_and_name():
    """A compiled function's repr describes it, and it keeps the function's name."""

    def program(x):
        return x * 2

    f = compiled(program)
    assert isinstance(f, CompiledFunction)
    f(torch.ones(2))
    assert "program" in repr(f)
    assert "1 entr" in repr(f)
    assert f.__name__.endswith("program")
    assert f.__wrapped__ is program
    assert f.entries[0].records.capture.function.endswith("program")


def test_recompile_limit_warns_and_runs_eagerly():
    """Beyond the limit new signatures run eagerly, right, with one warning that says why; old entries still serve."""
    with config.patch(recompile_limit=2):
        f = compiled(lambda x: x.mul_(2), dynamic=False)
        f(torch.ones(1))
        f(torch.ones(2))
        x = torch.ones(3)
        with pytest.warns(RuntimeWarning, match=r"recompile_limit.*the last reason: `x` has shape") as caught:
            assert f(x) is x
        assert [w.filename for w in caught] == [__file__]
        assert x.tolist() == [2.0] * 3
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            f(torch.ones(3))
            f(torch.ones(2))
        assert len(f.entries) == 2
        assert (f.calls.eager, f.calls.compiled) == (2, 3)


def test_recompile_limit_as_an_error():
    """Under config.fallback="error" it is raised, and nothing was run."""
    with config.patch(recompile_limit=1, fallback="error"):
        f = compiled(lambda x: x.mul_(2))
        f(torch.ones(1))
        x = torch.ones(2)
        with pytest.raises(RecompileLimitError, match="compiled 1 times"):
            f(x)
        assert x.tolist() == [1.0, 1.0]
        f(torch.ones(1))


def test_refusals_raise_by_default():
    """A public function raises the refusal at every call that is refused, and compiles the other calls."""

    def f(x, escape):
        return x * 2 if not escape else x * int(x.sum().item())

    g = compiled(f)
    for _ in range(2):
        with refusing(DataDependentError):
            g(torch.ones(2), True)
    assert g(torch.ones(2), False).tolist() == [2.0, 2.0]
    assert len(g.entries) == 1


@pytest.fixture
def eager_fallback():
    """Run refused calls eagerly."""
    with config.patch(fallback="eager"):
        yield


def _branch(x):
    return x * 2 if x[None] @ x[:, None] * x.sum() > 0 else x - 1  # not cheap to compute twice


@pytest.mark.usefixtures("fresh_dynamo")
def test_fallback_dynamo():
    """If Dynamo can capture a refused call, Dynamo compiles it, with one warning. Other calls have an entry."""
    g = compiled(lambda x, asks: _branch(x) if asks else x + 1)
    with pytest.warns(RuntimeWarning, match="is captured by Dynamo: `if`") as caught, heard_events() as heard:
        assert g(torch.ones(2), True).tolist() == [2.0, 2.0]
    assert g(-torch.ones(2), True).tolist() == [-2.0, -2.0]
    assert [w.filename for w in caught] == [__file__]
    assert [e.outcome for e in heard if isinstance(e, CompileFailed)] == ["captured by Dynamo"]
    assert any(isinstance(e, CompileFinished) for e in heard)  # a graph of Dynamo's
    assert all(e.entry is not None for e in heard if isinstance(e, Called))  # and none of the calls was eager
    assert g(torch.ones(2), False).tolist() == [2.0, 2.0]
    assert (g.calls.by_dynamo, g.calls.eager, g.calls.compiled, len(g.entries)) == (2, 0, 3, 1)
    for _ in range(8):
        g(torch.ones(2), True)
    assert g.calls.by_dynamo == 10


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore:.*is captured by Dynamo")
def test_state_behind_the_fallback():
    """A counter, a list and an attribute that a module writes are written once a call, as in eager."""

    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.seen, self.maps = torch.nn.Linear(2, 2), 0, []

        def forward(self, x):
            self.seen += 1
            self.last = self.layer(x)
            self.maps.append(self.last.sum())
            return self.last.relu()

    module = Counting()
    twin = copy.deepcopy(module)
    g = compiled(module)
    for seed in range(4):
        x = leaf(3, 2, seed=seed)
        results = [each(x) for each in (g, twin)]
        assert torch.equal(*results)
        weights = [module.layer.weight, twin.layer.weight]
        assert torch.equal(*torch.autograd.grad([r.sum() for r in results], weights))
        assert torch.equal(module.last, twin.last)
    assert (module.seen, len(module.maps)) == (4, 4)
    assert all(map(torch.equal, module.maps, twin.maps))
    assert g.compiled.calls.by_dynamo == 4
    module.maps, module.last = [], None  # torch copies no result of autograd
    other = copy.deepcopy(g)
    with torch.no_grad():
        other.layer.weight.zero_()
    assert torch.equal(other(x), other.orig_module.layer.bias.expand(3, 2).relu())
    assert (module.seen, other.seen) == (4, 5)


def test_fullgraph():
    """With `fullgraph=True`, a function that cannot be compiled as a whole is refused."""
    g = compiled(_branch, fullgraph=True)
    with pytest.raises(RefusedError, match="`if`"):
        g(torch.ones(2))
    assert compiled(lambda x: x + 1, fullgraph=True)(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(Exception, match=r"[Dd]ata-dependent"):
        compiled(_branch, fullgraph=True, frontend="dynamo")(torch.ones(2))


@pytest.mark.usefixtures("eager_fallback")
def test_fallback_eager():
    """A refused call runs eagerly with one warning, and is not traced again."""

    def f(x, y):
        y.add_(1)
        return x * int(x.sum().item())

    g = compiled(f)
    y = torch.zeros(2)
    with pytest.warns(RuntimeWarning, match="runs eagerly") as caught:
        assert g(torch.ones(2), y).tolist() == [2.0, 2.0]
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with heard_events() as heard:
            assert g(torch.full((2,), 3.0), y).tolist() == [18.0, 18.0]
    assert y.tolist() == [2.0, 2.0]
    assert not [e for e in heard if isinstance(e, CompileStarted)]
    assert (g.calls.eager, g.entries) == (2, ())


@pytest.mark.usefixtures("eager_fallback")
def test_fallback_eager_with_other_signatures():
    """A refusal for one signature does not affect another."""

    def f(x, escape):
        return x * 2 if not escape else x * int(x.sum().item())

    g = compiled(f)
    with pytest.warns(RuntimeWarning):
        g(torch.ones(2), True)
    assert g(torch.ones(2), False).tolist() == [2.0, 2.0]
    assert g.calls.compiled == 1


def test_refused_calls_do_not_keep_arguments_alive():
    """A remembered refusal, which refuses similar calls at once, contains facts and no tensors."""
    g = compiled(lambda x: x * int(x.sum().item()))
    x = torch.ones(2)
    reference = weakref.ref(x)
    with pytest.warns(RuntimeWarning):
        g(x)
    del x
    gc.collect()
    assert reference() is None
    assert g(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * int(x.sum().item()),  # refused with a specific class
        lambda x: x * (time.time() > 0),  # left to eager by a signal
        lambda x: x * CAPTURED[0],  # a tensor that is no argument
        lambda x: x * len([x.sum().tolist()]),
    ],
)
def test_one_policy(function):
    """Whatever is not compiled runs eagerly with one warning; under config.fallback="error" its sentence is raised."""
    with config.patch(fallback="eager"), pytest.warns(RuntimeWarning) as caught:
        assert torch.equal(compiled(function)(torch.ones(2)), function(torch.ones(2)))
    (warning,) = caught
    with refusing(RefusedError) as raised:
        compiled(function)(torch.ones(2))
    assert str(warning.message) == f"`{function.__qualname__}` runs eagerly: {raised.value}"


def test_failed_traces_run_eagerly_with_a_warning():
    """A program that eager can run and the trace cannot runs eagerly, once warned; an error under fallback="error"."""

    class Odd:
        """A thing that behaves otherwise for traced tensors."""

        def __call__(self, x):
            if type(x.untyped_storage).__name__ and torch._is_functional_tensor(x):
                raise ValueError("cannot bear traced tensors")
            return x * 2

    odd = Odd()

    def f(x):
        return odd(x)

    g = compiled(f)
    with pytest.warns(RuntimeWarning, match="cannot bear traced tensors") as caught:
        assert g(torch.ones(2)).tolist() == [2.0, 2.0]
    assert [w.filename for w in caught] == [__file__]
    with config.patch(fallback="error"), pytest.raises(Exception, match="cannot bear traced tensors"):
        compiled(f)(torch.ones(2))


def test_refusal_heard_events():
    """A refusal's event contains the error, its time and the alternative that runs."""
    with heard_events() as heard, refusing(DataDependentError):
        compiled(lambda x: int(x.sum().item()))(torch.ones(2))
    (failed,) = [e for e in heard if isinstance(e, CompileFailed)]
    assert isinstance(failed.error, DataDependentError)
    assert failed.outcome == "raised"
    assert failed.duration_ns > 0
    with config.patch(fallback="eager"), heard_events() as heard, pytest.warns(RuntimeWarning):
        compiled(lambda x: int(x.sum().item()))(torch.ones(2))
    (failed,) = [e for e in heard if isinstance(e, CompileFailed)]
    assert failed.outcome == "ran eagerly"
    (called,) = [e for e in heard if isinstance(e, Called)]
    assert called.entry is None


def test_events_of_calls():
    """While somebody listens every call is announced, with the entry that served it."""
    f = compiled(lambda x: x * 2)
    with heard_events() as heard:
        f(torch.ones(2))
        f(torch.ones(2))
    calls = [e for e in heard if isinstance(e, Called)]
    number = f.entries[0].number
    assert [(c.entry, c.compiled) for c in calls] == [(number, True), (number, False)]
    (started,) = [e for e in heard if isinstance(e, CompileStarted)]
    assert {c.function_id for c in calls} == {started.function_id}
    (finished,) = [e for e in heard if isinstance(e, CompileFinished)]
    assert started.entry == finished.entry == number
    assert started.misses == ()
    assert started.backend == "eager"
    assert finished.guards


@pytest.mark.parametrize(
    "moment",
    ["function", "function under modes", "fake kernel", "backward", "gradients", "partition", "compile", "runtime"],
)
def test_interrupt_during_compilation(moment, monkeypatch):
    """Ctrl-C at any stage of a compilation leaves all global state and the arguments as they were; then it works."""
    from aotlab import _torch as torch_internals
    from aotlab.backends import compile_stage as compile
    from aotlab.partition import partition_stage as partition
    from aotlab.runtime import runtime_stage as runtime

    armed = [True]

    def stop():
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            if moment == "backward":
                stop()
            return gradient * 2

    def f(x, y):
        y.add_(1)
        torch.rand(2)
        if moment == "function":
            stop()
        if moment == "function under modes":
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                stop()
        return Stop.apply(x).sin()

    def interrupting(owner, name):
        original = getattr(owner, name)

        def replacement(*args, **kwargs):
            stop()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, replacement)

    places = {
        "fake kernel": (torch_internals, "call_by_fake_mode"),
        "gradients": (torch.autograd, "grad"),
        "partition": (partition, "run"),
        "compile": (compile, "compile_graph"),
        "runtime": (runtime, "run"),
    }
    if moment in places:
        interrupting(*places[moment])
    g = compiled(f)
    x, y = leaf(3), torch.zeros(3)
    torch.manual_seed(5)
    before = global_torch_state()
    with pytest.raises(KeyboardInterrupt):
        g(x, y)
    assert global_torch_state() == before
    assert (y.tolist(), y._version, x.grad) == ([0.0] * 3, 0, None)
    assert g.entries == ()
    armed[0] = False
    torch.manual_seed(5)
    out = g(x, y)
    out.sum().backward()
    assert y.tolist() == [1.0] * 3
    assert torch.equal(out.detach(), (x.detach() * 2).sin())
    assert torch.equal(x.grad, (x.detach() * 2).cos() * 2)


def test_compiler_errors_are_raised_and_leave_nothing():
    """An error of the backend's compiler is raised unchanged, before anything was mutated."""

    def broken(gm, inputs):
        raise ValueError("no code today")

    f = aotlab.aot_function(lambda x: x.mul_(2), broken)
    before = global_torch_state()
    x = nonleaf(2)
    version = x._version
    with pytest.raises(ValueError, match="no code today"):
        f(x)
    assert global_torch_state() == before
    assert x._version == version
    assert f.entries == ()


def test_recursion():
    """A compiled function that calls itself is one graph."""

    def f(x, depth):
        return x if depth == 0 else g(x * 2, depth - 1)

    g = compiled(f)
    try:
        assert g(torch.ones(2), 3).tolist() == [8.0, 8.0]
    except CapturedTensorError:
        pytest.fail("the inner call saw the traced tensor as foreign")


def test_metadata_refusal_is_counted_by_reason():
    """Refusals have a short reason under which reports count them."""

    def steps_unseen(x):
        with internals.disable_torch_function():
            x.t_()

    with refusing(MetadataMutationError) as caught:
        compiled(steps_unseen)(torch.ones(2, 3))
    assert caught.value.reason == "MetadataMutation"


def test_declined_carries_its_cause():
    """`Declined` is the signal between pipeline and cache."""
    refusal = RefusedError("seen", suggestion="do otherwise")
    declined = Declined(refusal)
    assert (declined.refusal, declined.state, str(declined)) == (refusal, None, "seen; do otherwise")


def test_disabled_functions_run_eagerly_and_come_back():
    """`aotlab.disable` switches compiled functions off; `aotlab.enable` brings their entries back."""
    f = compiled(lambda x: x + 1)
    f(torch.ones(2))
    aotlab.disable()
    try:
        f(torch.ones(3))
        assert (f.calls.eager, len(f.entries)) == (1, 1)
    finally:
        aotlab.enable()
    f(torch.ones(2))
    assert (f.calls.compiled, len(f.entries)) == (2, 1)
