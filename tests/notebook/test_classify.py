"""Which statements of a cell are worth handing to Dynamo, and the reasons that the report gives for the others."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from aotlab.notebook.classify import LONGEST_UNROLLED, Scope, batches_derivatives, bound_names


@pytest.fixture(scope="module")
def namespace() -> dict[str, Any]:
    """Make the variables of a notebook."""
    model = nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "torch": torch,
        "nn": nn,
        "np": np,
        "x": torch.ones(2),
        "model": model,
        "layers": nn.ModuleList([model]),
        "opt": sgd,
        "adam": torch.optim.Adam(model.parameters()),
        "schedule": torch.optim.lr_scheduler.StepLR(sgd, 1),
        "array": np.ones(2),
        "items": [1, 2],
        "n": 3,
        "many": LONGEST_UNROLLED + 1,
    }


def statement(text: str) -> ast.stmt:
    """Read one statement."""
    (found,) = ast.parse(text).body
    return found


@pytest.mark.parametrize(
    "text",
    [
        "y = x + 1",
        "x += 1",
        "x[0] = 1",
        "y, *rest = x",
        "(y := x + 1)",
        "y = x if n else -x",
        "y = [v * 2 for v in x]",
        "y = sum(v for v in x)",
        "y = model(x).sum()",
        "items.append(x * 2)",
        "opt.step()",
        "if n > 2:\n    y = x + 1\nelse:\n    y = x - 1",
        "with torch.no_grad():\n    y = x + 1",
        "with torch.autocast('cpu'):\n    y = x @ x",
        "for i in range(3):\n    x.add_(i)",
        "for i in range(n):\n    x.add_(i)",
        f"for i in range({LONGEST_UNROLLED}):\n    x.add_(i)",
        "for layer in layers:\n    y = layer(x)",
        "for a, b in zip(items, layers):\n    y = b(x) * a",
        "y = unknown(x)",
        "y = torch.cond(x.sum() > 0, lambda v: v + n, lambda v: v - n, (x,))",
        "y = torch.vmap(lambda v: v * x)(x)",
    ],
)
def test_what_becomes_part_of_a_region(namespace: dict[str, Any], text: str) -> None:
    """Tensor computation becomes part of a region, also in branches, short loops, comprehensions and grad modes."""
    scope = Scope(namespace)
    found = statement(text)
    assert scope.refusal(found, in_loop=False) is None
    assert scope.tensorish(found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os", "imports"),
        ("from os import path", "imports"),
        ("def f(v):\n    return v", "defines a function"),
        ("async def f(v):\n    return v", "defines a function"),
        ("class A:\n    pass", "defines a class"),
        ("y = lambda v: v + x", "makes a function"),
        ("items.sort(key=lambda v: v + x)", "makes a function"),
        ("y = torch.vmap(lambda v: v * np.ones(2))(x)", "calls numpy"),
        ("y = (v for v in x)", "makes a generator"),
        ("y = await x", "awaits"),
        ("y = [v async for v in x]", "awaits"),
        ("y = {v: [u async for u in v] for v in x}", "awaits"),
        ("y: float = x.sum()", "is annotated"),
        ("del x", "deletes"),
        ("global z", "declares names"),
        ("try:\n    y = x + 1\nexcept ValueError:\n    pass", "handles exceptions"),
        ("match n:\n    case 3:\n        y = x + 1", "matches patterns"),
        ("raise ValueError", "raises"),
        ("assert x.sum() > 0", "asserts"),
        ("while n:\n    x.add_(1)", "loops until something changes"),
        ("for i in range(3):\n    if x.sum() > i:\n        break", "may be left early"),
        ("for i in range(3):\n    y = x + i\nelse:\n    y = x", "has an else"),
        ("for v in x:\n    v.add_(1)", "loops a number of times that is known only when it runs"),
        ("for i in range(many):\n    x.add_(i)", f"loops {LONGEST_UNROLLED + 1} times"),
        ("with open('f') as f:\n    y = x + 1", "enters a context"),
        ("print(x + 1)", "calls print"),
        ("y = input()", "calls input"),
        ("y = eval('x + 1')", "calls eval"),
        ("x.sum().backward()", "calls .backward()"),
        ("y = x.sum().item()", "calls .item()"),
        ("y = x.numpy()", "calls .numpy()"),
        ("y = x.tolist()", "calls .tolist()"),
        ("x.requires_grad_()", "calls .requires_grad_()"),
        ("x.register_hook(print)", "calls .register_hook()"),
        ("opt.zero_grad()", "calls .zero_grad()"),
        ("schedule.step()", "steps a scheduler"),
        ("model.train()", "calls .train()"),
        ("model.to('cpu')", "moves a module"),
        ("x.grad = None", "assigns to .grad"),
        ("x.data = x + 1", "assigns to .data"),
        ("x.requires_grad = True", "assigns to .requires_grad"),
        ("torch.manual_seed(0)", "calls torch.manual_seed"),
        ("torch.set_default_dtype(torch.float64)", "calls torch.set_default_dtype"),
        ("torch.save(x, 'f')", "calls torch.save"),
        ("y = torch.compile(model)", "calls torch.compile"),
        ("y = torch.ones(2, requires_grad=True)", "makes a leaf"),
        ("y = nn.Linear(2, 2)", "makes a Linear"),
        ("y = nn.Parameter(x)", "makes a Parameter"),
        ("y = np.ones(2)", "calls numpy"),
        ("y = x + array", "works on a ndarray"),
    ],
)
def test_what_is_left_to_python_and_why(namespace: dict[str, Any], text: str, reason: str) -> None:
    """A statement stays with Python if Dynamo cannot capture it or would run it differently from eager.

    The report gives the reason.
    """
    assert reason == Scope(namespace).refusal(statement(text), in_loop=False)


@pytest.mark.parametrize(
    "text", ["k = 3", "k = n + 1", "n += 1", "y = x", "y = len(items)", "pass", "'words'", "dtype = torch.float32"]
)
def test_what_is_not_worth_a_region(namespace: dict[str, Any], text: str) -> None:
    """A statement that computes no tensor does not make a region."""
    scope = Scope(namespace)
    assert scope.refusal(statement(text), in_loop=False) is None
    assert not scope.tensorish(statement(text))


def test_an_inner_statement_counts(namespace: dict[str, Any]) -> None:
    """A statement is left to Python if any of its parts must be."""
    assert Scope(namespace).refusal(statement("if n:\n    y = x + 1\n    print(y)"), in_loop=False) == "calls print"
    # a loop's own break leaves the loop only
    assert Scope(namespace).refusal(statement("for i in items:\n    y = [v for v in x]"), in_loop=False) is None


def test_optimizers_that_round_otherwise_when_captured(namespace: dict[str, Any]) -> None:
    """Where results have to be eager's bits, Adam's step stays Python's; for Inductor's kernels it does not."""
    found = statement("adam.step()")
    reason = "steps Adam, which runs eagerly by design: its captured form rounds differently than eager"
    assert reason == Scope(namespace, exact=True).refusal(found, in_loop=False)
    assert Scope(namespace, exact=False).refusal(found, in_loop=False) is None
    assert Scope(namespace, exact=True).refusal(statement("opt.step()"), in_loop=False) is None


def test_batched_derivatives_of_derivatives(namespace: dict[str, Any]) -> None:
    """A cell that takes them is left to Python, for compiled graphs cannot take batches there."""
    for text, expected in {
        "torch.autograd.grad(x.sum(), x, create_graph=True)": False,
        "torch.autograd.grad(x, x, v, create_graph=True, is_grads_batched=True)": True,
        "torch.autograd.grad(x, x, v, create_graph=True, is_grads_batched=False)": False,
        "torch.autograd.grad(x, x, v, create_graph=False, is_grads_batched=True)": False,
        "jacobian(f, x, create_graph=n, vectorize=n)": True,
        "torch.autograd.functional.hessian(f, x)": False,
        "torch.autograd.functional.hessian(f, x, vectorize=True)": True,
        "from torch.autograd.functional import hessian\nhessian(f, x, vectorize=True)": True,
        "torch.autograd.functional.jacobian(f, x, vectorize=True)": False,
        "y = x + 1": False,
    }.items():
        assert expected == batches_derivatives(ast.parse(text)), text
    assert "several derivatives of derivatives at once" in str(
        Scope(namespace, batched=True).refusal(statement("y = x + 1"), in_loop=False)
    )


def test_a_name_means_what_the_cell_has_made_it(namespace: dict[str, Any]) -> None:
    """A name that the cell binds hides the notebook's name and Python's builtin of the same spelling."""
    scope = Scope(namespace)
    scope.learn(statement("n = x.sum()"))
    assert scope.tensorish(statement("k = n")) is False  # a copy of a name computes nothing
    assert scope.tensorish(statement("k = n + 1"))
    scope.learn(statement("n = 5"))
    assert not scope.tensorish(statement("k = n + 1"))
    assert scope.refusal(statement("print(x)"), in_loop=False) == "calls print"
    scope.learn(statement("print = torch.sum"))
    assert scope.refusal(statement("y = print(x)"), in_loop=False) is None
    assert not scope.tensorish(statement("y = len(items)"))
    scope.learn(statement("len = model"))
    assert scope.tensorish(statement("y = len(items)"))


def test_a_number_that_changes_in_each_round(namespace: dict[str, Any]) -> None:
    """In a Python loop, a statement with a number that changes in each round stays with Python.

    Dynamo would compile it again for each value.
    """
    scope = Scope(namespace)
    scope.kinds["step"] = "varying"
    reason = "depends on `step`, which has another value in each round"
    assert reason == scope.refusal(statement("y = x * step"), in_loop=True)
    assert scope.refusal(statement("y = x * n"), in_loop=True) is None
    assert scope.refusal(statement("y = x * step"), in_loop=False) is None


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        ("v = np.arange(3.0)", True),
        ("v = frame", True),
        ("v = frame.describe()['a']", True),
        ("v, w = pd.concat([frame]).a, x", False),
        ("v = torch.from_numpy(frame.values)", False),
        ("v = load()", False),
    ],
)
def test_objects_of_libraries_without_tensors(namespace: dict[str, Any], text: str, foreign: bool) -> None:
    """A name that the cell binds to such an object is known as one: statements that use it are Python's."""
    scope = Scope({**namespace, "pd": pd, "frame": pd.DataFrame()})
    scope.learn(statement(text))
    expected = "works on `v`, an object of another library" if foreign else None
    assert expected == scope.refusal(statement("y = v.mean()"), in_loop=False)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("y = model(items[step])", "loop over the items of `items` instead of their indices"),
        ("y = model(x) * (step + 1)", "make `step` a tensor by `torch.tensor(step)`"),
        ("y = x.sum() ** step", "make `step` a tensor by `torch.tensor(step)`"),
        ("print(model(x))", "compute the tensors on a line of their own"),
        ("found.append((x * 2).tolist())", "compute the tensors on a line of their own"),
        # These compute nothing, or nothing with tensors.
        ("print(step, x.item())", ""),
        ("history[step] = x.item()", ""),
        ("rate = 0.1 * step", ""),
        ("t = torch.tensor(step)", ""),
        ("writer.add_scalar('loss', x.item(), step)", ""),
        ("x.backward()", ""),
        ("print(len(items))", ""),
    ],
)
def test_advice_for_lines_that_stay_eager_in_loops(namespace: dict[str, Any], text: str, advice: str) -> None:
    """For a line in a loop that computes with tensors in Python, the report says how it could be compiled."""
    scope = Scope({**namespace, "items": [torch.ones(2)]})
    scope.kinds["step"] = "varying"
    found = statement(text)
    reason = scope.refusal(found, in_loop=True)
    if reason is None:
        assert not advice
        return
    assert advice == scope.advice(found, reason, in_loop=True)
    assert scope.advice(found, reason, in_loop=False) == ""


def test_the_names_that_statements_bind() -> None:
    """Every way to bind a name counts, in the order of the text; scopes within do not."""
    text = """
a = b = 1
c, (d, *e) = x
f: int = 1
g += 1
for h in i: j = 1
with k as l: pass
def m(): n = 1
class o: p = 1
import q.r, s as t
from u import v as w
(y := 1)
[z for zz in x if (aa := zz)]
try: pass
except E as bb: cc = 1
match x:
    case {"k": dd, **ee}: pass
    case [ff, *gg]: pass
    case A(hh) as ii: pass
del jj
lambda kk: (ll := kk)
x.attribute = 1
x[0] = 1
"""
    expected = "a b c d e f g h j l m o q t w y aa bb cc dd ee ff gg hh ii jj"
    assert sorted(expected.split()) == sorted(bound_names(ast.parse(text).body))
    assert list(bound_names(ast.parse("b = 1\na = 2\nb = 3").body)) == ["b", "a"]


def test_the_namespace_is_only_looked_at(namespace: dict[str, Any]) -> None:
    """To classify a name, nothing of the user's is called, and no property is read."""

    class Watched:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} was read")

        def __bool__(self) -> bool:
            raise AssertionError("it was asked for its truth")

    scope = Scope({**namespace, "watched": Watched()})
    assert scope.refusal(statement("y = watched.value + x"), in_loop=False) is None
    assert scope.tensorish(statement("y = watched.value + x"))
