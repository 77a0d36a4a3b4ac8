"""The contracts between the rooms, including what import-linter cannot see.

import-linter (run by ``.ci/run``, configured in ``pyproject.toml``) reads import statements, also in functions. This
module checks the rest: imports by string, torch's private names, and the time of imports.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import aotlab

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aotlab"
#: The one room that may name torch's private names.
DOOR = "aotlab._torch"
#: The rooms that know torch and nothing else.
ENGINE = {
    *("api", "export", "frontends", "pipeline", "cache", "quirks", "derivatives", "runtime", "partition", "backends"),
    *("trace", "capture", "guards", "ir", "_torch", "errors", "config", "events"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module of the package: its dotted name and its syntax tree."""

    name: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The first name below ``aotlab``; empty for the package itself."""
        return self.name.partition(".")[2].partition(".")[0]


@cache
def modules() -> dict[str, Module]:
    """Parse every module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = Module(name=name, tree=ast.parse(path.read_text(encoding="utf-8"), str(path)))
    return found


def imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield (line, module, name taken from it or "") of all import statements."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)


def string_imports(tree: ast.AST) -> Iterator[tuple[int, str | None]]:
    """Yield (line, module) of the calls that import by name; None if the name is not written there.

    A call that reads its name from a module's table of strings, as ``import_module(_LAZY[name])`` does, yields each of
    the table's names.
    """
    tables = {
        node.targets[0].id: [value.value for value in node.value.values if isinstance(value, ast.Constant)]
        for node in getattr(tree, "body", ())
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                target = node.args[0] if node.args else None
                literal = isinstance(target, ast.Constant) and isinstance(target.value, str)
                table = getattr(target.value, "id", "") if isinstance(target, ast.Subscript) else ""
                for name in tables.get(table) or [target.value if literal else None]:
                    yield node.lineno, name


@cache
def ranks() -> dict[str, int]:
    """Return the layer of every room in pyproject.toml's first contract. Siblings have the same layer."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    heights = {}
    for height, layer in enumerate(reversed(contracts[0]["layers"])):
        for room in layer.split("|"):
            heights[room.strip().strip("()")] = height
    return heights


def upward_strings(module: Module) -> list[str]:
    """List the strings of a module that name an aotlab module which it may not import."""
    wrong = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in modules():
            room = modules()[node.value].room
            if room and room != module.room and ranks()[room] >= ranks()[module.room]:
                wrong.append(f"{module.name}:{node.lineno} names {node.value}")
    return wrong


def torch_names(tree: ast.AST) -> dict[str, str]:
    """Map the local names for torch or for its attributes to their full names."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def is_private(name: str) -> bool:
    """Return whether a dotted name has a part with a leading underscore that is not one of Python's own names."""
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


#: What torch's classes keep to themselves: ``x._base`` is as private as ``torch._C``, wherever ``x`` came from.
PRIVATE_ATTRIBUTES = {
    name
    for owner in (
        torch.Tensor,
        torch.Generator,
        torch.UntypedStorage,
        torch.autograd.Function,
        fx.Graph,
        fx.Node,
        fx.GraphModule,
        nn.Module(),
        nn.Parameter,
    )
    for name in dir(owner)
    if is_private(name)
} - {"_boxed_call"}  # the mark of the boxed calling convention is for everybody (E7)


def private_torch_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the private names of torch that a module uses."""
    names = torch_names(tree)
    for line, module, taken in imports(tree):
        full = f"{module}.{taken}" if taken else module
        if full.partition(".")[0] == "torch" and is_private(full):
            yield line, full
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, owner = [node.attr], node.value
            while isinstance(owner, ast.Attribute):
                parts, owner = [owner.attr, *parts], owner.value
            # Only the first private part of a chain counts: the chains within it are walked as well.
            if not is_private(node.attr):
                continue
            if isinstance(owner, ast.Name) and owner.id in names:
                yield node.lineno, ".".join([names[owner.id], *parts])
            elif node.attr in PRIVATE_ATTRIBUTES and not (isinstance(owner, ast.Name) and owner.id in {"self", "cls"}):
                yield node.lineno, f"….{node.attr}"
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in {"getattr", "hasattr", "setattr"}:
            key = node.args[1] if len(node.args) > 1 else None
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                owner = node.args[0]
                of_torch = isinstance(owner, ast.Name) and owner.id in names and is_private(key.value)
                if of_torch or key.value in PRIVATE_ATTRIBUTES:
                    yield node.lineno, f"getattr: {key.value}"
    for line, target in string_imports(tree):
        if target and target.partition(".")[0] == "torch" and is_private(target):
            yield line, target


def python(code: str) -> str:
    """Run ``code`` in a separate process and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_module_stands_in_a_layer() -> None:
    """A new room has to be given its place in pyproject.toml."""
    assert {module.room for module in modules().values() if module.room} - set(ranks()) == set()


@pytest.mark.parametrize("name", [name for name in modules() if name != "aotlab"])
def test_strings_import_downwards(name: str) -> None:
    """A module that is reached by a string (a lazy table, import_module) is in a lower layer than the caller."""
    assert upward_strings(modules()[name]) == []


def test_upward_string_is_seen() -> None:
    """The check above catches a lazy table that points upwards, and lets one that points downwards pass."""
    source = '_LAZY = {"verify": "aotlab.verification", "spec": "aotlab.ir.specs"}'
    wrong = Module(name="aotlab.trace.trace_stage", tree=ast.parse(source))
    assert upward_strings(wrong) == ["aotlab.trace.trace_stage:1 names aotlab.verification"]


def test_imports_by_string_are_written_out() -> None:
    """Who imports by string writes the string there or, for PEP 562, into a table beside it: so it can be checked."""
    unknown = {
        (name, line)
        for name, module in modules().items()
        for line, target in string_imports(module.tree)
        if target is None
    }
    lazy = {
        (name, node.lineno)
        for name, module in modules().items()
        for function in module.tree.body
        if isinstance(function, ast.FunctionDef) and function.name == "__getattr__"
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
    }
    assert unknown - lazy == set()


@pytest.mark.parametrize("name", [name for name in modules() if not name.startswith(DOOR)])
def test_private_torch_names_stay_behind_the_door(name: str) -> None:
    """Only _torch uses torch's private names, as attribute, import or string."""
    assert list(private_torch_names(modules()[name].tree)) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch._C._foo()", ["torch._C._foo", "torch._C"]),
        ("import torch\nx: torch._ops.OpOverload", ["torch._ops"]),
        ("from torch._dynamo import utils", ["torch._dynamo.utils"]),
        ("from torch.utils import _pytree as pytree", ["torch.utils._pytree"]),
        ("import torch.utils._pytree as pytree", ["torch.utils._pytree"]),
        ("def f():\n    import torch._inductor", ["torch._inductor"]),
        ("from torch import fx\nfx._symbolic_trace", ["torch.fx._symbolic_trace"]),
        ("def f(x):\n    return x._base", ["…._base"]),
        ("def f(x):\n    return getattr(x, '_version')", ["getattr: _version"]),
        ("import importlib\nimportlib.import_module('torch._guards')", ["torch._guards"]),
        ("import torch\ntorch.compiler.reset(); torch.__version__; self._parameters; x._boxed_call", []),
    ],
)
def test_private_names_are_seen(source: str, expected: list[str]) -> None:
    """The check above sees each way to a private name, and leaves public names and our own alone."""
    assert [name for _, name in private_torch_names(ast.parse(source))] == expected


@pytest.mark.parametrize("name", [name for name, module in modules().items() if module.room in ENGINE])
def test_engine_knows_torch_and_nothing_else(name: str) -> None:
    """The engine's rooms import the standard library, torch and each other."""
    tree = modules()[name].tree
    named = [(line, module) for line, module, _ in imports(tree)]
    named += [(line, module) for line, module in string_imports(tree) if module]
    allowed = {"torch", "aotlab", *sys.stdlib_module_names}
    allowed |= {"triton"} if name == "aotlab._torch.rehearsal" else set()  # of `aotlab.rehearse`, above the engine
    assert [(line, module) for line, module in named if module.partition(".")[0] not in allowed] == []


def test_import_is_light() -> None:
    """``import aotlab`` loads at most torch and numpy. The public names load the rest at first use."""
    code = "import aotlab, sys; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = set(python(code).split())
    assert loaded & {"pandas", "IPython", "ipywidgets", "anywidget", "matplotlib", "hypothesis", "jupyterlab"} == set()


def test_using_the_engine_is_light() -> None:
    """Compiling a function does not load pandas or anything of Jupyter's or Hypothesis."""
    code = """
import sys
import torch
import aotlab

before = set(sys.modules)
aotlab.compile(lambda x: x * 2, backend="eager")(torch.ones(2))
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    loaded = set(python(code).split())
    assert loaded & {"pandas", "IPython", "ipywidgets", "anywidget", "matplotlib", "hypothesis", "jupyterlab"} == set()


@pytest.mark.parametrize("name", aotlab.__all__)
def test_public_names_resolve(name: str) -> None:
    """Every name in ``__all__`` can be had, also by ``from aotlab import …``, and is listed by ``dir``."""
    assert getattr(aotlab, name) is not None
    assert name in dir(aotlab)
    namespace: dict[str, object] = {}
    exec(f"from aotlab import {name}", namespace)
    assert namespace[name] is getattr(aotlab, name)


def test_lazy_names_are_the_type_checkers_names() -> None:
    """The names for type checkers, under TYPE_CHECKING, equal the names that ``__getattr__`` finds."""
    block = next(node for node in modules()["aotlab"].tree.body if isinstance(node, ast.If))
    seen = {taken: module for _, module, taken in imports(block)}
    assert seen == aotlab._ROOMS
    assert set(aotlab._ROOMS) < set(aotlab.__all__)


def test_no_room_bears_the_name_of_a_public_function() -> None:
    """Importing a submodule must not put a module in a public function's place."""
    rooms = {module.room for module in modules().values()}
    assert rooms & set(aotlab._ROOMS) == set()


@pytest.mark.parametrize("name", ["verifi", "pandas"])
def test_other_names_do_not_exist(name: str) -> None:
    """Misspelt and foreign names raise AttributeError, as in any module."""
    with pytest.raises(AttributeError, match=f"module 'aotlab' has no attribute '{name}'"):
        getattr(aotlab, name)
