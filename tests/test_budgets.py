"""How large the engine may be, so that one person reads it in an evening: lines, files, functions, the top level."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "aotlab"
#: Rooms above the engine, and what only they use of torch.
ABOVE = ["report", "verification", "bench", "rehearse", "notebook", "teach", "cli"]
FOR_THOSE = ["_torch/workbench.py", "_torch/samples.py", "_torch/rehearsal.py"]
#: Rooms that were added when the engine had its size, with their files in others, and how large they may be.
LATER = {
    "subclasses": (["subclasses", "ir/subclasses.py", "_torch/subclasses.py", "_torch/callers_symbols.py"], 2_096),
    "higher-order ops": (["quirks/higher_order.py", "_torch/higher_order.py"], 560),
    "effects": (["trace/effects.py"], 110),
    "export": (["export", "_torch/pre_dispatch.py"], 1_031),
}
#: What one reads to understand what happens to a call.
EVENING = [
    *("pipeline.py", "cache.py", "ir", "guards/call_state.py", "trace", "partition/stage.py", "partition/default.py"),
    "runtime",
]


def files(names: list[str]) -> set[Path]:
    """Return some files, and all in some folders."""
    return {path for name in names for path in [PACKAGE / name, *(PACKAGE / name).rglob("*.py")] if path.is_file()}


ADDED = files([name for names, _ in LATER.values() for name in names])
ENGINE = files(["."]) - files([*ABOVE, *FOR_THOSE]) - ADDED


def lines(paths: set[Path]) -> int:
    """Count the lines of files, docstrings and blank ones too."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


@pytest.mark.parametrize(
    ("paths", "limit"), [(ENGINE, 20_000), (files(EVENING) - ADDED, 9_000)], ids=["all", "evening"]
)
def test_engine(paths: set[Path], limit: int) -> None:
    """The engine as a whole, and what is read in an evening."""
    assert len(paths) > 40
    assert lines(paths) <= limit, "shorten something that serves fewer users, or move what other rooms need there"


@pytest.mark.parametrize(("names", "limit"), LATER.values(), ids=LATER)
def test_later(names: list[str], limit: int) -> None:
    """What was added to it."""
    assert 0 < lines(files(names)) <= limit


def test_what_is_left_out_is_not_used() -> None:
    """The engine uses nothing of what serves other rooms."""
    door = PACKAGE / "_torch" / "__init__.py"
    modules = {f"aotlab.{name.removesuffix('.py').replace('/', '.')}" for name in FOR_THOSE}
    imports = [
        each for each in ast.walk(ast.parse(door.read_text(encoding="utf-8"))) if isinstance(each, ast.ImportFrom)
    ]
    names = {alias.name for each in imports if each.module in modules for alias in each.names}
    assert "cold_caches" in names
    for path in ENGINE - {door}:
        assert names.isdisjoint(re.findall(r"\w+", path.read_text(encoding="utf-8"))), path


def test_top_level() -> None:
    """Files and folders at the top of the package."""
    others = ("__init__.py", "__main__.py", "__pycache__", "course", "py.typed")
    assert len([path for path in PACKAGE.iterdir() if path.name not in others]) <= 25


@pytest.mark.parametrize("path", sorted(ENGINE), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions(path: Path) -> None:
    """No file has more than 500 lines, no function more than 70."""
    assert lines({path}) <= 500
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [each.name for each in functions if (each.end_lineno or 0) - each.lineno >= 70] == []
