"""How large each room may be, in statements, and the limits on files, functions and the top level."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "aotlab"
pytestmark = pytest.mark.tier("quick")
#: Statements per room, docstrings not counted. A ratchet: a change that raises a limit gives its reason.
LIMITS = {
    "__init__.py": 27,
    "__main__.py": 5,
    "_torch": 2_620,
    "backends": 801,
    "bench": 356,
    "cache.py": 315,
    "capture": 510,
    "cli": 1_029,
    "config.py": 45,
    "derivatives": 579,
    "errors.py": 87,
    "export": 654,
    "fallbacks": 42,
    "frontends": 913,
    "guards": 1_791,
    "ir": 443,
    "maintenance": 3_198,
    "notebook": 4_798,
    "events.py": 95,
    "partition": 1_103,
    "pipeline.py": 217,
    "quirks": 980,
    "rehearse": 173,
    "report": 5_834,
    "runtime": 1_281,
    "subclasses": 1_192,
    "teach": 1_503,
    "trace": 3_811,
    "runs": 240,
    "upstream": 1_128,
    "verification": 2_254,
}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def files(room: str) -> list[Path]:
    """Return the Python files of a room."""
    path = PACKAGE / room
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def statements(path: Path) -> int:
    """Count the statements of a file, without docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    docstrings = sum(isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node) is not None for node in nodes)
    return sum(isinstance(node, ast.stmt) for node in nodes) - docstrings


def test_every_room_has_a_limit() -> None:
    """A new room gets a limit, and a room that is gone loses its limit."""
    others = ("__pycache__", "course", "py.typed", "README.md")
    assert {path.name for path in PACKAGE.iterdir() if path.name not in others} == LIMITS.keys()


@pytest.mark.parametrize(("room", "limit"), LIMITS.items(), ids=LIMITS)
def test_room(room: str, limit: int) -> None:
    """A room has at most as many statements as its limit."""
    assert 0 < sum(map(statements, files(room))) <= limit


FILES = [path for room in LIMITS for path in files(room)]


def length(node: ast.AST, last: int) -> int:
    """Count the lines of a file or function up to line ``last``, without docstrings, which may be of any length."""
    documented = [each for each in ast.walk(node) if isinstance(each, _WITH_DOCSTRING) and ast.get_docstring(each)]
    docstrings = [each.body[0] for each in documented]
    return last - getattr(node, "lineno", 1) + 1 - sum((each.end_lineno or 0) - each.lineno + 1 for each in docstrings)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions(path: Path) -> None:
    """No file has more than 500 lines besides docstrings, no function more than 70."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert length(tree, len(text.splitlines())) <= 500
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert [each.name for each in functions if length(each, each.end_lineno or 0) > 70] == []
