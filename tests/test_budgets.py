"""How large the engine may be, so that it can be read in an evening: lines, files, functions, what lies at the top."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "aotlab"
#: Rooms above the engine, and what only they use of torch.
ABOVE = {"report", "verification", "bench", "rehearse", "notebook", "teach", "cli"}
FOR_THOSE = {"_torch/workbench.py", "_torch/samples.py", "_torch/rehearsal.py"}
#: Systems that were added when the engine had its size, each in files of its own, and how large they may be.
LATER = {"quirks/higher_order.py": 410, "_torch/higher_order.py": 60, "backends/effects.py": 60}
LATER |= {"_torch/known_sizes.py": 85, "partition/sizes.py": 40, "ir/size_rules.py": 80}
LATER |= {"ir/subclasses.py": 180, "_torch/subclasses.py": 65}
LATER |= {"export/__init__.py": 180, "export/made.py": 310, "export/saved.py": 170, "export/signature.py": 140}
LATER |= {"subclasses/__init__.py": 120, "subclasses/around.py": 325, "subclasses/edges.py": 260}
LATER |= {"subclasses/mode.py": 85, "subclasses/parts.py": 130, "subclasses/results.py": 250}
LATER |= {"subclasses/passing.py": 90, "subclasses/target.py": 300}
#: What one reads to understand what happens to a call, in this order.
EVENING = [
    *("pipeline.py", "cache.py", "ir", "guards/call_state.py", "trace", "partition/stage.py", "partition/default.py"),
    "runtime",
]


def engine() -> list[Path]:
    """Return the files of the engine: all below `aotlab.report`."""
    paths = (path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py")))
    left_out = FOR_THOSE | LATER.keys()
    return [PACKAGE / path for path in paths if path.parts[0] not in ABOVE and path.as_posix() not in left_out]


def lines(path: Path) -> int:
    """Count the lines of a file, docstrings and blank ones too."""
    return len(path.read_text(encoding="utf-8").splitlines())


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the name and length of each function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1


def test_engine() -> None:
    """The engine as a whole."""
    assert sum(map(lines, engine())) <= 20_000


@pytest.mark.parametrize(("name", "limit"), LATER.items())
def test_later(name: str, limit: int) -> None:
    """What was added to it."""
    assert lines(PACKAGE / name) <= limit


def test_subclasses() -> None:
    """The room of tensor subclasses."""
    assert sum(map(lines, (PACKAGE / "subclasses").glob("*.py"))) <= 1_520


def test_what_is_left_out_is_not_used() -> None:
    """The engine uses nothing of what is not counted."""
    door = PACKAGE / "_torch" / "__init__.py"
    names = {
        alias.name
        for node in ast.walk(ast.parse(door.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and f"{node.module}.py".removeprefix("aotlab.").replace("_torch.", "_torch/") in FOR_THOSE
        for alias in node.names
    }
    assert "cold_caches" in names
    for path in engine():
        if path != door:
            assert names.isdisjoint(re.findall(r"\w+", path.read_text(encoding="utf-8"))), path


def test_evening() -> None:
    """What is read in an evening."""
    read = [path for name in EVENING for path in ([PACKAGE / name] if "." in name else (PACKAGE / name).rglob("*.py"))]
    assert len(read) > len(EVENING)
    assert sum(lines(path) for path in read if path.relative_to(PACKAGE).as_posix() not in LATER) <= 8_890


def test_top_level() -> None:
    """Files and folders at the top of the package."""
    entries = [path.name for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "course", "py.typed")]
    assert len(entries) <= 29


@pytest.mark.parametrize("path", engine(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions(path: Path) -> None:
    """No file has more than 500 lines, no function more than 70."""
    assert lines(path) <= 500
    assert [name for name, length in functions(ast.parse(path.read_text(encoding="utf-8"))) if length > 70] == []
