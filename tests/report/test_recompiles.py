"""Why a function was compiled again: the guard that failed of each earlier graph, the nearest first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aotlab
from aotlab.report import Report
from aotlab.report.html import fragment

BONUS = 3


class Model(nn.Module):
    """Reads arguments of all kinds, attributes and a global."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.times = 2

    def forward(self, x, others=(), flag=True, factor=None):
        y = self.layer(x) * self.times
        if flag:
            y = y + BONUS
        for other in others:
            y = y + other
        if factor is not None:
            y = y * factor
        return y * 2 if self.training else y


def _bonus(value):
    globals()["BONUS"] = value


X = torch.arange(32.0).reshape(4, 8)
#: The second call, after a call with `X` alone; then the found, the expected and the previous value.
SECOND = {
    "a bool": (lambda model: model(X, flag=False), "flag", "True", "False"),
    "a number": (lambda model: model(X, factor=2.0), "factor", "None", "2.0"),
    "a tensor for None": (lambda model: model(X, factor=X), "factor", "None", "a Tensor"),
    "another container": (lambda model: model(X, [X]), "type(others)", "tuple", "list"),
    "more items": (lambda model: model(X, (X,)), "len(others)", "0", "1"),
    "eval": (lambda model: model.eval()(X), "self.training", "True", "False"),
    "an attribute": (lambda model: (setattr(model, "times", 5), model(X)), "self.times", "2", "5"),
    "a global": (lambda model: (_bonus(7), model(X)), "BONUS", "3", "7"),
    "a size": (lambda model: model(X[:2].clone()), "x.size(0)", "4", "2"),
    "a dimension": (lambda model: model(X[0].clone()), "x.dim()", "2", "1"),
    "strides": (lambda model: model(X.t().contiguous().t()), "x.stride(0)", "8", "1"),
    "requires_grad": (lambda model: model(X.clone().requires_grad_()), "x.requires_grad", "False", "True"),
    "grad mode": (lambda model: torch.no_grad()(model)(X), "grad mode", "on", "off"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(fresh_dynamo):
    """Compile again, and restore the global."""
    yield
    _bonus(3)


def behind(function):
    """Compile behind Dynamo, without symbols."""
    return torch.compile(function, backend="aotlab", options={"compiler": "eager"}, dynamic=False)


@pytest.mark.parametrize("name", SECOND)
def test_guards_of_dynamo(name):
    """One frame has two graphs. The reason lists the failed guards of the first, with both values."""
    call, subject, before, after = SECOND[name]
    model = Model()
    compiled = behind(model)
    with Report.record() as recording:
        compiled(X)
        call(compiled)
    (frame,) = recording.frames
    first, second = frame.graphs
    (miss,) = second.misses
    assert first.misses == ()
    assert (miss.graph, miss.subject, miss.before, miss.after) == (0, subject, before, after)
    assert miss.suggestion
    assert "0x" not in miss.sentence
    assert "L[" not in miss.sentence
    assert "___" not in miss.sentence


def normalize(t, scale=1.0):
    """Scale to a norm."""
    return t / t.norm() * scale


def asks(t):
    """Ask whether it is a leaf."""
    return t * 2 if t.is_leaf else t * 3


def test_nearest_first():
    """A call that differs only in a number is nearer than one that differs in a tensor.

    Both have rows, with the line.
    """
    compiled = behind(normalize)
    with Report.record() as recording:
        compiled(X)
        compiled(X.double())
        compiled(X, 2.0)
    (frame,) = recording.frames
    near, far = frame.graphs[2].misses
    assert (near.graph, near.subject, near.before, near.after) == (0, "scale", "1.0", "2.0")
    assert (far.graph, far.subject, far.before, far.after) == (1, "t.dtype", "float64", "float32")
    assert near.line is not None
    assert near.line.file == __file__
    assert near.line.code == "return t / t.norm() * scale"
    table = recording.recompiles
    assert list(table["earlier"]) == [0, 0, 1]
    assert list(table["subject"]) == ["t.dtype", "scale", "t.dtype"]
    assert list(table["line"].dropna()) == [near.line.line]


#: Earlier calls, the call that is compiled for, and the number and subject of the nearest earlier graph.
NEAREST = {
    "a number, not a dtype": ([(X,), (X.double(),)], (X, 2.0), 0, "scale"),
    "one value of two": ([(X,), (X.double(), 2.0)], (X.half(),), 0, "t.dtype"),
    "a number and a dtype": ([(X,), (X.double(),), (X.double(), 3.0)], (X, 2.0), 0, "scale"),
    "a size and a dtype": ([(X,), (X.double(),)], (X[:2].clone(),), 0, "t.size(0)"),
    "the latest of equals": ([(X,), (X, 2.0)], (X, 3.0), 1, "scale"),
}


@pytest.mark.parametrize("how", ["behind Dynamo", "direct"])
@pytest.mark.parametrize("name", NEAREST)
def test_the_nearest_of_several(name, how):
    """The nearest earlier graph has the fewest differences; of several, the lightest one, and then the latest."""
    earlier, call, graph, subject = NEAREST[name]
    direct = aotlab.compile(normalize, backend="eager", dynamic=False)
    compiled = behind(normalize) if how == "behind Dynamo" else direct
    with Report.record() as recording:
        for args in (*earlier, call):
            compiled(*args)
    nearest = recording.frames[0].graphs[-1].misses[0]
    assert (nearest.graph, nearest.subject) == (graph, subject)


def test_advice_is_given_once():
    """The summary words the nearest graph alone for each recompile, and gives the same advice for all of them once."""
    compiled = behind(normalize)
    with Report.record() as recording:
        for scale in (1.0, 2.0, 3.0, 4.0):
            compiled(X, scale)
    text = fragment(recording.report())
    assert text.count("where the earlier graph expects") == 2 * 3  # in the table, and where each graph is described
    assert text.count("each value is compiled for itself") == 1
    assert "To avoid recompiles for <code>scale</code>: each value" in text


#: The same, traced directly.
DIRECT = {
    "a number": (lambda f: f(X, 2.0), "scale", "1.0", "2.0"),
    "another number": (lambda f: (f(X, 2.0), f(X, 3.0)), "scale", "2.0", "3.0"),
    "a size": (lambda f: f(X[:2].clone()), "t.size(0)", "4", "2"),
    "a dtype": (lambda f: f(X.double()), "t.dtype", "torch.float32", "torch.float64"),
    "strides": (lambda f: f(X.t().contiguous().t()), "t.stride", "(8, 1)", "(1, 4)"),
    "requires_grad": (lambda f: f(X.clone().requires_grad_()), "t.requires_grad", "False", "True"),
    "is_leaf": (lambda f: (f(LEAF), f(LEAF * 1)), "t.is_leaf", "True", "False"),
    "as by default": (lambda f: f(X, 1.0), "scale", "it to be left out", "1.0"),
}
LEAF = X.clone().requires_grad_()


@pytest.mark.parametrize("name", DIRECT)
def test_guards_of_the_direct_frontend(name):
    """The nearest earlier graph comes first."""
    call, subject, before, after = DIRECT[name]
    compiled = aotlab.compile(asks if name == "is_leaf" else normalize, backend="eager")
    with Report.record() as recording:
        compiled(X)
        call(compiled)
    miss = recording.frames[0].graphs[-1].misses[0]
    assert (miss.subject, miss.before, miss.after) == (subject, before, after)
    assert miss.suggestion


def positive(t):
    """Ask for a condition."""
    return t * 2 if (t > 0).all() else t


def test_the_guard_of_a_condition():
    """The guard and the recompile have the condition's line and its two answers."""
    compiled = aotlab.compile(positive, backend="eager")
    with Report.record() as recording:
        compiled(X + 1)
        compiled(X)
    (miss,) = recording.frames[0].graphs[-1].misses
    code = "return t * 2 if (t > 0).all() else t"
    assert (miss.subject, miss.before, miss.after) == (code, "True", "False")
    assert miss.sentence == f"the condition in `{code}` is False where the compiled entry expects True"
    assert miss.line is not None
    line = positive.__code__.co_firstlineno + 2
    assert (miss.line.file, miss.line.line) == (__file__, line)
    (guard,) = [guard for guard in recording.frames[0].graphs[-1].guards if guard.kind == "condition"]
    assert (guard.sentence, guard.line.line) == (f"the condition in `{code}` is False", line)


def test_another_compiled_form():
    """The first graph of a function that was compiled by somebody else before is no recompile."""
    torch.compile(normalize, backend="eager")(X)
    compiled = behind(normalize)
    with Report.record() as recording:
        compiled(X, 2.0)
    (frame,) = recording.frames
    assert [graph.misses for graph in frame.graphs] == [()]
    assert recording.recompiles.empty


def test_nothing_is_held():
    """The variables of a call are let go of."""
    compiled = behind(normalize)
    with Report.record():
        compiled(X)
        t = X.double()
        compiled(t)
        held = torch._C._storage_Use_Count(t.untyped_storage()._cdata)
    assert held <= 2
