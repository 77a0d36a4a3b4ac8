"""Python's questions about the values of inputs: cheap ones are answered in the trace, and each call is asked again."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref

import pytest
import torch

import aotlab
from aotlab.errors import DataDependentError
from aotlab.events import CompileFinished
from tests.engine_helpers import behind, compiled, heard_events, leaf, refusing

pytestmark = pytest.mark.tier("quick")


def any_of(x):
    """Ask for any element."""
    return x.sin() if (x > 1).any() else x * 3


def contains(x):
    """Ask for an element."""
    return x + 1 if 2.0 in x[[-1, 0]] else x.exp()


def writes(x):
    """Write before and after the question, in the branches."""
    x.mul_(2)
    if x.sum() > 1:
        x.add_(1)
        return x.sin()
    x.zero_()
    return x


def asks_twice(x):
    """Ask two questions."""
    if (x > 1).all():
        return x - 1
    return x if x.isfinite().all() else torch.zeros_like(x)


def equal(x):
    """Compare two tensors."""
    return x * 2 if torch.equal(x, x.relu()) else x.relu()


def transposes(x):
    """Change metadata before the question."""
    x = x.view(1, 2).clone()
    x.t_()
    return x * 2 if x[0, 0] > 1 else x


PROGRAMS = [any_of, contains, writes, asks_twice, equal, transposes]
INPUTS = [[2.0, 3.0], [-1.0, 0.5], [2.0, -0.5], [float("nan"), 1.0], [3.0, 2.0], [-1.0, 0.5]]


def observed(call, values, *, grad):
    """Return the result, the input, whether it was written, and the gradient."""
    start = torch.tensor(values, requires_grad=grad)
    x = start * 1
    result = call(x)
    if grad and result.requires_grad:
        result.sum().backward()
    return str((result.detach(), x.detach(), x._version > 0, start.grad, result.requires_grad))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.tier("full"))])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_answer_has_an_entry(program, grad, backend):
    """All calls are compiled, equal answers share an entry, and results, writes and gradients are eager's."""
    f = compiled(program, backend=backend)
    for values in INPUTS:
        if backend == "eager":
            assert observed(f, values, grad=grad) == observed(program, values, grad=grad)
        else:
            observed(f, values, grad=grad)
    log = behind(f).calls
    assert (log.compiled, log.eager, log.by_dynamo) == (len(INPUTS), 0, 0)
    assert 1 < len(behind(f).entries) < 4


def test_the_reason_names_the_line():
    """The guard and the reason of the second entry name the condition, its line, and both answers."""
    f = compiled(any_of)
    with heard_events() as heard:
        f(torch.ones(2))
    f(torch.ones(2) * 2)
    line = any_of.__code__.co_firstlineno + 2
    place = f"the condition in `return x.sin() if (x > 1).any() else x * 3` at {__file__}:{line} is"
    (finished,) = [event for event in heard if isinstance(event, CompileFinished)]
    assert ("condition", "inputs", f"{place} False") in finished.guards
    assert behind(f).recompiles == (f"{place} True where the compiled entry expects False",)
    f(torch.ones(2, dtype=torch.float64))
    assert "dtype" in behind(f).recompiles[-1]


class Normalization(torch.nn.Module):
    """Sets its scale in its first call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("is_set", torch.tensor(False))
        self.scale = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        """Ask the buffer."""
        if not self.is_set:
            self.scale.data.copy_(x.std(0))
            self.is_set.fill_(True)
        return x * self.scale


def test_a_flag_in_a_buffer():
    """The first call and the later calls have an entry each."""
    modules = Normalization(), Normalization()
    calls = modules[0], aotlab.compile(modules[1], backend="eager")
    for seed in range(3):
        x = leaf(5, 3, seed=seed).detach()
        assert torch.equal(calls[0](x), calls[1](x))
        assert torch.equal(modules[0].scale, modules[1].scale)
        assert modules[1].is_set
    assert behind(calls[1]).calls.per_entry == dict.fromkeys(behind(calls[1]).calls.per_entry, 1) | {
        behind(calls[1]).entries[0].number: 2
    }


def test_an_error_is_raised_by_eager():
    """A condition under which the function raises: the call raises eager's error, and others are compiled."""

    def checked(x):
        x.add_(1)
        assert x.isfinite().all(), "not finite"
        return x * 2

    f = compiled(checked)
    for _ in range(2):
        bad, good = torch.tensor([float("inf")]), torch.ones(1)
        with pytest.raises(AssertionError, match="not finite"):
            f(bad)
        assert bad._version == 1
        assert f(good).tolist() == [4.0]
    assert behind(f).calls.compiled == 2


def draws(x):
    """Ask a random number."""
    return x if torch.rand(()) > 0.5 else x * 2


def is_expensive(x):
    """Ask a product."""
    return x if (x[None] @ x[:, None]).all() else x * 2


def asks_long(x):
    """Ask after many ops."""
    for _ in range(20):
        x = x + 1
    return x if (x > 0).all() else x * 2


def asks_a_number(x):
    """Compute with the number."""
    return [1, 2, 3][int(x.sum() * 0)] * x


def sorts(x):
    """Sort, and ask."""
    return x if (x.sort().values[0] > 0).any() else x * 2


def decomposes(x):
    """Ask singular values."""
    return x if (torch.linalg.svdvals(x[None]) > 0).all() else x * 2


def counted(x):
    """Compute by a user's op."""
    return x if torch.ops.aotlab_tests_conditions.ask(x).all() else x * 2


@pytest.fixture(scope="module", autouse=True)
def user_op():
    """Define a custom op."""
    with torch.library._scoped_library("aotlab_tests_conditions", "DEF") as library:
        library.define("ask(Tensor x) -> Tensor")
        library.impl("ask", lambda x: x > 0, "CPU")
        library.impl("ask", lambda x: torch.empty_like(x, dtype=torch.bool), "Meta")
        yield


@pytest.mark.parametrize("function", [draws, is_expensive, sorts, decomposes, asks_long, asks_a_number, counted])
def test_what_is_not_answered(function):
    """A condition that is random, expensive or computed by a user's op is refused, and so is a number."""
    f = compiled(function)
    with refusing(DataDependentError):
        f(torch.ones(3))
    assert f.entries == ()


@pytest.mark.filterwarnings("ignore:.*captured by Dynamo")
@pytest.mark.usefixtures("fresh_dynamo")
def test_many_combinations_of_answers():
    """A loop that asks: after four entries, Dynamo gets the other calls."""

    def halves(x):
        n = 0
        while (x.abs() > 1).any():
            x, n = x / 2, n + 1
        return x * n

    f = compiled(halves)
    for exponent in [*range(7), 2, 0]:
        x = torch.tensor([2.0**exponent])
        assert torch.equal(f(x), halves(x))
    log = behind(f).calls
    assert (log.compiled - log.by_dynamo, log.by_dynamo, log.eager, len(behind(f).entries)) == (6, 3, 0, 4)


def test_sizes_that_vary():
    """A guard of a condition holds for all sizes of an entry."""

    def function(x):
        return x * 2 if (x > 0).sum() > 2 else x - 1

    f = compiled(function, dynamic=True)
    for size in (3, 4, 5, 6):
        for sign in (1, -1):
            x = torch.ones(size) * sign
            assert torch.equal(f(x), function(x))
    assert (behind(f).calls.compiled, len(behind(f).entries)) == (8, 2)


def raises(x):
    """Raise after a condition."""
    assert (x > 1).any()
    return x


@pytest.mark.parametrize("function", [any_of, raises])
def test_nothing_is_kept_alive(function):
    """Neither the guard nor a trace that failed keeps a tensor of the caller."""
    f, x = compiled(function), torch.ones(3)
    alive = weakref.ref(x)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(AssertionError):
            f(x)
        del x
        assert alive() is None
    finally:
        gc.enable()


def indexes(x, i):
    """Ask by an index, which may be wrong, after a write."""
    x.add_(1)
    try:
        if (x[i] > 100).any():
            return x * 2
    except IndexError:
        return x * 0
    return x * 3


@pytest.mark.filterwarnings("ignore:.*captured by Dynamo", "ignore:.*runs eagerly")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("order", [(1, 7, 1), (7, 1, 7)])
def test_a_condition_that_raises(order):
    """If an op of a guard raises an error, it is raised at its place in the program."""
    f = compiled(indexes)
    for index in order:
        results = []
        for call in (indexes, f):
            x = torch.arange(4.0)
            results.append((call(x, torch.tensor([index, 1])).tolist(), x.tolist()))
        assert results[0] == results[1]


def upper(X, x):  # noqa: N803  # the names differ only by case, and fx ignores case
    """Compare two arguments."""
    return x * 2 if (x > X).any() else x * 3


class Holder(torch.nn.Module):
    """Asks a buffer of a submodule."""

    def __init__(self):
        super().__init__()
        self.bn = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        """Ask."""
        return x if (self.bn.running_mean > 100).any() else self.bn(x)


def test_names_of_inputs():
    """The graph of a condition does not depend on the names of the inputs."""
    f, (a, b) = compiled(upper), (torch.ones(2), torch.ones(2) * 2)
    for args in ((a, b), (b, a)):
        assert torch.equal(f(*args), upper(*args))
    assert behind(f).calls.compiled == 2
    module = aotlab.compile(Holder(), backend="eager")
    module(torch.ones(4, 3))
    assert behind(module).calls.compiled == 1


@pytest.mark.usefixtures("fresh_dynamo")
def test_text_in_a_branch(capsys):
    """A function that prints because of a condition prints at each call."""

    def function(x):
        if (x > 1).any():
            print("large")
        return x * 2

    f = compiled(function)
    with pytest.warns(RuntimeWarning, match="the function prints text, perhaps because of a condition"):
        f(torch.ones(2) * 2)
    for _ in range(2):
        f(torch.ones(2) * 2)
    assert capsys.readouterr().out == "large\n" * 3


@pytest.mark.filterwarnings("ignore:.*captured by Dynamo")
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_log_record_in_a_branch(caplog):
    """A function that logs because of a condition does so once at each call."""

    def function(x):
        if (x > 1).any():
            logging.getLogger("conditions").warning("large")
        return x * 2

    f, factory = compiled(function), logging.getLogRecordFactory()
    for count in range(1, 4):
        f(torch.ones(2) * 2)
        assert caplog.messages.count("large") == count
    assert logging.getLogRecordFactory() is factory


@pytest.mark.filterwarnings("ignore:.*captured by Dynamo")
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_reason_is_of_this_call():
    """A condition that was not asked in a call is no reason for its entry."""

    def function(x, w):
        if (w > 0).any():
            x.add_(w)
        else:
            return x * int(w.sum())
        return x * 2

    f, w = compiled(function), torch.ones(2).requires_grad_()
    f(torch.zeros(2), w)
    f(torch.zeros(2), -torch.ones(2).requires_grad_())
    f(torch.zeros(3)[:2], w)
    assert len(behind(f).entries) == 2
    assert "condition" not in behind(f).recompiles[-1]


def test_an_export_answers_nothing():
    """An exported graph must be right for all values."""

    class Module(torch.nn.Module):
        def forward(self, x):
            return (any_of(x),)

    with pytest.raises(DataDependentError):
        aotlab.aot_export_module(Module(), (torch.ones(3),), trace_joint=False)
