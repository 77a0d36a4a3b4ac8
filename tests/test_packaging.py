"""The packaging files and the README agree with each other, with CI, and with the code."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import aotlab
from aotlab.report import COLUMNS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
#: What conda calls by another name.
CONDA_NAMES = {"pytorch": "torch"}
#: What environment.yml has besides: a compiler, and the installer of aotlab itself.
CONDA_ONLY = {"cxx-compiler", "pip"}


def blocks(language: str) -> list[str]:
    """Return the README's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def requirements(texts: list[str]) -> dict[str, SpecifierSet]:
    """Map package names to versions."""
    return {parsed.name: parsed.specifier for parsed in map(Requirement, texts)}


def test_readme_is_short() -> None:
    """The README is short, because it is for newcomers."""
    assert len(README.splitlines()) <= 125


def test_conda_and_pip_agree() -> None:
    """environment.yml requires the packages and versions of pyproject.toml, including Python."""
    entries = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    conda = requirements([entry for entry in entries if isinstance(entry, str)])
    conda = {CONDA_NAMES.get(name, name): versions for name, versions in conda.items() if name not in CONDA_ONLY}
    assert conda == requirements([*PROJECT["dependencies"], f"python{PROJECT['requires-python']}"])
    assert [entry["pip"] for entry in entries if isinstance(entry, dict)] == [["--editable ."]]


def test_version_is_written_once() -> None:
    """The build reads aotlab's own version, and the newest entry of the changelog is about it."""
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    assert configuration["tool"]["hatch"]["version"] == {"path": "aotlab/__init__.py"}
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == aotlab.__version__


def test_entry_points_exist() -> None:
    """The command and Dynamo's backend are where pyproject.toml says."""
    named = [PROJECT["scripts"]["aotlab"], PROJECT["entry-points"]["torch_dynamo_backends"]["aotlab"]]
    for entry in named:
        module, _, name = entry.partition(":")
        assert callable(getattr(__import__(module, fromlist=[name]), name))


def test_ci_runs_the_readme_commands() -> None:
    """The README has two commands, each one line to copy, and CI runs them word for word."""
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    commands = [block.splitlines() for block in blocks("sh")]
    assert [len(command) for command in commands] == [1, 1]
    assert [command[0] for command in commands if command[0] not in lines] == []
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_ci_is_valid_bash() -> None:
    """.ci/run parses."""
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True, timeout=20)


def test_readme_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's Python blocks, run one after the other, print the text below each."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    printed = []
    for number, source in enumerate(blocks("python")):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(source, f"README.md block {number}", "exec"), namespace)
        printed.append(out.getvalue())
    assert printed == blocks("text")


def test_tables_are_named() -> None:
    """The page on the architecture names every table of a report."""
    architecture = (ROOT / "aotlab" / "README.md").read_text(encoding="utf-8")
    assert [name for name in COLUMNS if f"`{name}`" not in architecture] == []


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(((?!https?:)[^)#]+)\)", README))))
def test_readme_links(path: str) -> None:
    """The targets of the README's links exist."""
    assert (ROOT / path).exists()


def test_readme_knows_the_commands() -> None:
    """Every `aotlab …` command that the README names exists."""
    from aotlab import cli

    known = set(re.findall(r"^    (\w+)\b", cli._parser().format_help(), re.MULTILINE))
    named = set(re.findall(r"aotlab (demo|bench|doctor|lab|verify|report|runs|run|fuzz|acceptance)\b", README))
    assert named <= known
    assert known <= named
