"""A cell split into regions and statements for Python.

The tests check the split, and that all parts together have the cell's meaning.
"""

from __future__ import annotations

import ast
import textwrap
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aotlab.notebook.cell import CellCode, linked, take_apart


def compile_tree(tree: Any, file: str, mode: str) -> types.CodeType:
    """Compile as a shell would, without Python's warning about the constants that replace regions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        code = compile(tree, file, mode)
    assert isinstance(code, types.CodeType)
    return code


@pytest.fixture
def namespace() -> dict[str, Any]:
    """Make the variables of a notebook."""
    model = torch.nn.Linear(2, 2)
    return {
        "torch": torch,
        "x": torch.ones(2),
        "n": 3,
        "model": model,
        "opt": torch.optim.SGD(model.parameters(), lr=0.1),
    }


def apart(text: str, namespace: dict[str, Any], **options: Any) -> CellCode:
    """Take a cell apart."""
    tree = ast.parse(textwrap.dedent(text).strip("\n"))
    return take_apart(tree, namespace=namespace, file="cell.py", compile_tree=compile_tree, **options)


def portrait(code: CellCode) -> str:
    """Return the lines that Python runs, and below them the regions and the reasons."""
    lines = [ast.unparse(each) for each in code.statements]
    for region in code.regions:
        pieces = f", {len(region.pieces)} pieces" if region.pieces else ""
        lines.append(
            f"region {region.number}: {region.first_line}-{region.last_line} binds {list(region.bound)}{pieces}"
        )
    lines += [f"python: {each.first_line}-{each.last_line} {each.reason}" for each in code.python]
    return "\n".join(lines)


GOLDEN: dict[str, tuple[str, str]] = {
    "a training loop": (
        """
        a = x + 1
        b = a * 2
        print(b)
        for step in range(100):
            opt.zero_grad()
            loss = model(x).sum()
            loss.backward()
            opt.step()
        loss
        """,
        """
        'aotlab region 0'()
        print(b)
        for step in range(100):
            opt.zero_grad()
            'aotlab region 1'()
            loss.backward()
            'aotlab region 2'()
        'aotlab result'(loss)
        region 0: 1-2 binds ['a', 'b'], 2 pieces
        region 1: 6-6 binds ['loss']
        region 2: 8-8 binds []
        python: 3-3 calls print
        python: 4-4 loops 100 times
        python: 5-5 calls .zero_grad()
        python: 7-7 calls .backward()
        python: 9-9 no computation with tensors
        """,
    ),
    "plain statements do not begin or end a region": (
        """
        k = 3
        y = x * k
        k = 4
        z = y * k
        k = 5
        import math
        k = 6
        """,
        """
        k = 3
        'aotlab region 0'()
        k = 5
        import math
        k = 6
        region 0: 2-4 binds ['y', 'k', 'z'], 3 pieces
        python: 1-1 no computation with tensors
        python: 5-5 no computation with tensors
        python: 6-6 imports
        python: 7-7 no computation with tensors
        """,
    ),
    "try, except, else, finally": (
        """
        try:
            y = x + 1
            z = y * 2
        except ValueError as error:
            y = x - 1
        else:
            w = y + z
        finally:
            done = True
        """,
        """
        try:
            'aotlab region 0'()
        except ValueError as error:
            'aotlab region 1'()
        else:
            'aotlab region 2'()
        finally:
            done = True
        region 0: 2-3 binds ['y', 'z'], 2 pieces
        region 1: 5-5 binds ['y']
        region 2: 7-7 binds ['w']
        python: 1-1 handles exceptions
        python: 9-9 no computation with tensors
        """,
    ),
    "the parts of a branch that cannot be captured whole": (
        """
        if n > 2:
            y = x + 1
            print(y)
        elif n > 1:
            y = x + 2
        else:
            y = x - 1
        """,
        """
        if n > 2:
            'aotlab region 0'()
            print(y)
        else:
            'aotlab region 1'()
        region 0: 2-2 binds ['y']
        region 1: 4-7 binds ['y']
        python: 1-1 calls print
        python: 3-3 calls print
        """,
    ),
    "a match, a with, a while": (
        """
        match n:
            case 3:
                y = x + 1
        with open("f") as f:
            z = x + 2
        while n:
            y = y + 1
            n -= 1
        """,
        """
        match n:
            case 3:
                'aotlab region 0'()
        with open('f') as f:
            'aotlab region 1'()
        while n:
            'aotlab region 2'()
            n -= 1
        region 0: 3-3 binds ['y']
        region 1: 5-5 binds ['z']
        region 2: 7-7 binds ['y']
        python: 1-2 matches patterns
        python: 4-4 enters a context
        python: 6-6 loops until something changes
        python: 8-8 no computation with tensors
        """,
    ),
    "a last expression belongs to the region before it": (
        """
        y = x * 2
        y.sum()
        """,
        """
        'aotlab result'('aotlab region 0'())
        region 0: 1-2 binds ['y'], 2 pieces
        """,
    ),
    "a last expression that is Python's": (
        """
        y = x * 2
        print(y)
        """,
        """
        'aotlab region 0'()
        'aotlab result'(print(y))
        region 0: 1-1 binds ['y']
        python: 2-2 calls print
        """,
    ),
    "a line that no function can hold, before the last expression": (
        """
        y = x * 2
        __debug__ = y
        y.sum()
        """,
        """
        'aotlab region 0'()
        __debug__ = y
        'aotlab result'(y.sum())
        region 0: 1-1 binds ['y']
        python: 2-2 no computation with tensors
        python: 3-3 cannot be cut out
        """,
    ),
    "nothing to compile": (
        """
        answer = 42
        answer
        """,
        """
        answer = 42
        'aotlab result'(answer)
        python: 1-1 no computation with tensors
        python: 2-2 no computation with tensors
        """,
    ),
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_golden(name: str, namespace: dict[str, Any]) -> None:
    """The printed parts of the sample cells: the regions, the statements left to Python, and the reasons."""
    text, expected = (textwrap.dedent(each).strip("\n") for each in GOLDEN[name])
    assert expected == portrait(apart(text, namespace))


@pytest.mark.parametrize(
    ("text", "defines_only"),
    [
        ("def f(v):\n    return v", True),
        ("'''What it is.'''\nimport math\nfrom os import path\ndef f(v):\n    return v\ndef g(v):\n    return v", True),
        ("@decorated\ndef f(v):\n    return v", True),
        ("async def f(v):\n    return v\ndef g(v):\n    return v", True),
        ("import math", False),
        ("def f(v):\n    return v\ny = f(x)", False),
        ("def f(v):\n    return v\nf", False),
        ("class A:\n    def f(self):\n        pass", False),
        ("class A:\n    pass\ndef f(v):\n    return v", False),
    ],
)
def test_what_is_a_cell_of_definitions(text: str, defines_only: bool, namespace: dict[str, Any]) -> None:
    """Imports, a docstring and functions, at least one of them a plain one; anything else makes it run at once."""
    code = apart(text, namespace)
    assert defines_only == code.defines_only
    if defines_only:
        assert code.regions == ()
        assert [each.name for each in ast.parse(text).body if isinstance(each, ast.FunctionDef)] == list(code.functions)


@pytest.mark.parametrize(
    ("interactivity", "shown"),
    [
        (
            "all",
            [
                "'aotlab shows'('aotlab region 0'())",
                "'aotlab shows'('aotlab region 1'())",
                "'aotlab result'('aotlab region 2'())",
            ],
        ),
        ("last_expr", ["'aotlab result'('aotlab region 0'())"]),
        ("none", ["'aotlab region 0'()"]),
    ],
)
def test_which_expressions_are_shown(interactivity: str, shown: list[str], namespace: dict[str, Any]) -> None:
    """It follows IPython's setting."""
    code = apart("x + 1\nx + 3\nx + 2", namespace, interactivity=interactivity)
    found = [ast.unparse(each) for each in code.statements]
    assert shown == found


def run(code: CellCode, namespace: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Run a split cell with its regions as plain functions. Return its displayed values and its result."""
    shown: list[Any] = []
    result: list[Any] = []
    regions: dict[int, Callable[[], Any]] = {
        each.number: types.FunctionType(each.code, namespace) for each in code.regions
    }
    for each in code.statements:
        compiled = compile_tree(ast.Module([each], []), "cell.py", "exec")
        exec(linked(compiled, regions, show=shown.append, result=result.append), namespace)
    return shown, result


SAMPLES = [
    "a = x + 1\nb = a * 2\nif n > 2:\n    b = b + 1\nelse:\n    c = 1\nb.sum()",
    "total = 0\nfor i in range(40):\n    total = total + (x * i).sum()\ntotal",
    "ys = [x * i for i in range(3)]\ni = 'kept'\nstacked = torch.stack(ys)\nstacked",
    "a, b = x, x + 1\na, b = b, a\n(a - b).sum()",
    "try:\n    y = x + 1\n    z = y.nothing\nexcept AttributeError as error:\n    w = y * 2\nw",
    "k = 0\nwhile k < 5:\n    if k == 3:\n        break\n    y = x * k\n    k += 1\nelse:\n    y = None\ny",
    "def f(v):\n    return v + x\ny = f(x)\nx = y * 2\nz = f(x)\nz",
    "with torch.no_grad():\n    y = model(x)\ny",
    "match n:\n    case 1:\n        y = x\n    case 3:\n        y = x * 3\ny",
    "y = x\ny += 1\ndel y\nx",
    "*first, last = x * 2\nlast",
    "class A:\n    scale = x * 2\n    def f(self):\n        return self.scale + x\nA().f()",
]


@pytest.mark.parametrize("text", SAMPLES)
def test_the_parts_together_do_what_the_cell_does(text: str) -> None:
    """A cell that was split and put together again does the same as the whole cell.

    It binds the same names in the same order, and displays the same values.
    """

    def fresh() -> dict[str, Any]:
        torch.manual_seed(0)
        return {"torch": torch, "x": torch.arange(3.0), "n": 3, "model": torch.nn.Linear(3, 2)}

    whole = fresh()
    body = ast.parse(text).body
    exec(compile(ast.Module(body[:-1], []), "cell.py", "exec"), whole)
    assert isinstance(body[-1], ast.Expr)
    expected = eval(compile(ast.Expression(body[-1].value), "cell.py", "eval"), whole)
    parts = fresh()
    _, (result,) = run(apart(text, parts), parts)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert list(whole) == list(parts)
    for name, value in whole.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(parts[name], value, rtol=0, atol=0)
        elif isinstance(value, (int, str)):
            assert value == parts[name], name


def test_lines_are_those_of_the_cell(namespace: dict[str, Any]) -> None:
    """An error in a region has its own line, in a frame with the name of module code."""
    text = "\n\ny = x * 2\nz = y + 1\nw = z.nothing\n"
    code = take_apart(ast.parse(text), namespace=namespace, file="cell.py", compile_tree=compile_tree)
    assert [(each.first_line, each.last_line) for each in code.regions] == [(3, 5)]
    with pytest.raises(AttributeError) as caught:
        run(code, namespace)
    frames = [
        each for each in caught.traceback if str(each.path) == "cell.py" or each.frame.code.raw.co_filename == "cell.py"
    ]
    last = frames[-1].frame.code.raw
    assert frames[-1].lineno + 1 == 5
    assert (last.co_name, last.co_qualname, last.co_filename) == ("<module>", "<module>", "cell.py")


def test_taking_apart_changes_neither_tree_nor_namespace(namespace: dict[str, Any]) -> None:
    """The tree that is given stays as it is, and no name is added."""
    tree = ast.parse("for i in range(99):\n    y = x + i\n    print(y)\ny")
    before, names = ast.dump(tree, include_attributes=True), set(namespace)
    take_apart(tree, namespace=namespace, file="cell.py", compile_tree=compile_tree)
    assert before == ast.dump(tree, include_attributes=True)
    assert names == set(namespace)
