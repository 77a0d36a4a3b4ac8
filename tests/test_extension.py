"""The extension's sources agree with Python's side, are checked and tested, and are built when they have to be."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import aotlab
from aotlab.errors import RefusedError
from aotlab.ir.metadata import MutationType, OutputType
from aotlab.report.columns import meanings
from aotlab.report.mime import MIME_TYPE, bundle
from aotlab.report.model import Report
from aotlab.report.verdict import verdict
from tests.engine_helpers import refusing

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "extension"
SOURCES = sorted((FOLDER / "src").rglob("*.ts"))
STYLE = FOLDER / "style" / "report.css"
#: Names the kind of element, and is never fetched.
SVG = "http://www.w3.org/2000/svg"


def text(path: str) -> str:
    """Read a file of the extension."""
    return (FOLDER / path).read_text(encoding="utf-8")


def npm(*arguments: str, **environment: str) -> str:
    """Run an npm script of the extension, and return its output.

    The test is skipped if the packages are missing.
    """
    command = shutil.which("npm")
    if command is None or not (FOLDER / "node_modules" / "typescript").is_dir():
        pytest.skip("needs npm and extension/node_modules: `cd extension && npm ci --ignore-scripts`")
    done = subprocess.run(
        [command, *arguments],
        cwd=FOLDER,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def reports() -> list[Report]:
    """Make reports of several kinds: trained, mutated, recompiled, verified or not, refused, and nothing."""

    @aotlab.compile(backend="eager")
    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(1)
        return (x @ weight).relu().sum(), x.t()

    @aotlab.compile(backend="eager")
    def resized(x: torch.Tensor) -> torch.Tensor:
        x.untyped_storage().resize_(4)
        return x

    weight = torch.ones(3, 4, requires_grad=True)
    with Report.record("both") as both:
        for rows in (2, 5):
            step(torch.ones(rows, 3), weight)[0].backward()
        with refusing(RefusedError):
            resized(torch.ones(2))
    with Report.record("compiled") as compiled:
        step(torch.ones(2, 3), weight)
        step(torch.ones(7, 3), weight)
    with Report.record("refused") as refused, refusing(RefusedError):
        resized(torch.ones(3))
    with Report.record() as nothing:
        pass
    one = compiled.report()
    rows = aotlab.verify(lambda a, b: a.mul_(b), torch.ones(3), torch.ones(3), backend="eager").comparisons
    verified = one.with_verification(rows)
    wrong = {"engine": "aotlab", "kind": "stride", "subject": "out", "equal": False, "sentence": "it differs"}
    return [
        both.report(),
        one,
        verified,
        one.with_verification(rows, frame="another"),
        verified.with_verification([wrong]),
        refused.report(),
        nothing.report(),
    ]


# Both sides agree


def test_typescript_tests(tmp_path: Path) -> None:
    """The model, view and connection pass their own tests, and read Python's reports without loss."""
    made: list[dict[str, object]] = []
    for report in reports():
        found = verdict(report)
        forms = {
            "recorded": report.to_dict(),
            "sparse": report.to_dict(sparse=True),
            "shown": bundle(report)[MIME_TYPE],
        }
        made.append({**forms, "sentence": found.sentence, "state": found.state})
    path = tmp_path / "reports.json"
    path.write_text(json.dumps(made), encoding="utf-8")
    printed = npm("test", AOTLAB_REPORTS=str(path))
    counted = dict(re.findall(r"^[#ℹ] (pass|fail|skipped|cancelled|todo) (\d+)$", printed, re.MULTILINE))
    passed = int(counted.pop("pass"))
    assert counted == {"fail": "0", "skipped": "0", "cancelled": "0", "todo": "0"}
    assert passed > 0


def test_typescript_types() -> None:
    """The compiler finds nothing, under its strict settings."""
    npm("run", "check")
    settings = json.loads(text("tsconfig.json"))["compilerOptions"]
    assert settings["strict"]
    assert settings["noUncheckedIndexedAccess"]


def test_names_are_pythons() -> None:
    """The MIME type, the comm target and the version are the same on both sides."""
    from aotlab.notebook import live
    from aotlab.report.model import VERSION

    assert re.findall(r"^export const MIME_TYPE = '(.*)';$", text("src/model/report.ts"), re.MULTILINE) == [MIME_TYPE]
    assert re.findall(r"^export const VERSION = (.*);$", text("src/model/report.ts"), re.MULTILINE) == [str(VERSION)]
    assert re.findall(r"^export const TARGET = '(.*)';$", text("src/live/connection.ts"), re.MULTILINE) == [live.TARGET]
    assert json.loads(text("package.json"))["version"] == aotlab.__version__
    assert json.loads(text("package-lock.json"))["version"] == aotlab.__version__


def test_meanings_are_pythons() -> None:
    """The page's meanings of columns equal `Report.describe`. The file is written from `meanings()`."""
    assert json.loads(text("src/model/meanings.json")) == meanings()


def test_oldest_jupyterlab_is_the_same() -> None:
    """The extension asks JupyterLab for no newer version than aotlab does: else its console warns of it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest = next(each for each in project["dependencies"] if each.startswith("jupyterlab>="))
    package = json.loads(text("package.json"))
    wanted = {
        f"jupyterlab>={each.strip('^').removesuffix('.0')}"
        for each in (
            package["dependencies"]["@jupyterlab/notebook"],
            package["dependencies"]["@jupyterlab/rendermime"],
            package["jupyterlab"]["sharedPackages"]["@jupyterlab/notebook"]["requiredVersion"],
            package["jupyterlab"]["sharedPackages"]["@jupyterlab/rendermime"]["requiredVersion"],
        )
    }
    assert wanted == {oldest}


@pytest.mark.parametrize(("name", "kind"), [("MUTATION_TYPES", MutationType), ("OUTPUT_TYPES", OutputType)])
def test_legends_are_complete(name: str, kind: type[MutationType] | type[OutputType]) -> None:
    """Every mutation type and every output type has its explanation, and nothing else has."""
    found = re.search(
        rf"^export const {name}: .*? = \[\n(.*?)^\];$", text("src/view/legend.ts"), re.DOTALL | re.MULTILINE
    )
    assert found is not None
    explained = re.findall(r"^ +(?:\[)?'([^']*)', ?(?='|$)|^    '([^']*)',$", found[1], re.MULTILINE)
    assert sorted(each.value for each in kind) == sorted(first or second for first, second in explained)


# The code that the browser runs is harmless


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_sources_make_no_markup_and_no_requests(path: Path) -> None:
    """A report is untrusted: no source turns text into markup or code, none knows a way to the network."""
    source = path.read_text(encoding="utf-8").replace(SVG, "")
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    ways += r"|https?://|\bfetch\(|XMLHttpRequest|WebSocket|sendBeacon|EventSource|\bconsole\.\w"
    assert re.findall(ways, source) == []
    assert re.findall(r": any\b|\bas any\b|<any>|@ts-ignore", source) == []


def test_products_know_no_network() -> None:
    """The built files contain no address, and the widget's module imports nothing."""
    products = [ROOT / "aotlab" / "report" / "static" / f"dashboard.{kind}" for kind in ("js", "css")]
    if not all(path.is_file() for path in products):
        pytest.skip("the extension is not built here: `cd extension && npm run build`")
    products += sorted((FOLDER / "dist" / "labextension" / "static").glob("*.js"))
    for path in products:
        found = re.sub(r"http://www\.w3\.org/[\w/]+", "", path.read_text(encoding="utf-8"))  # XML's namespaces
        assert re.findall(r"https?://[^\s\"']*|@import|url\((?!#|\"#|`?\$)[^)]*\)", found) == [], path
    # The word alone is one of Python's, for its colour.
    assert re.findall(r"\bimport\s*(?:[\"'{*(]|[\w$]+\s+from\b)", products[0].read_text(encoding="utf-8")) == []


def test_style_works_without_a_theme() -> None:
    """Every theme variable has a fallback, and no colour is written outside of the variables."""
    style = re.sub(r"/\*.*?\*/", "", STYLE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r"var\(--(?:jp|vscode)-[\w-]+\)", style) == []
    rules = [line for line in style.splitlines() if not re.match(r"\s*--al-", line)]
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b|\brgba?\(", "\n".join(rules)) == []


def test_lock_pins_contents_and_no_registry() -> None:
    """Each package that npm installs is pinned by its contents. The user chooses the registry."""
    packages = json.loads(text("package-lock.json"))["packages"]
    fetched = {name: package for name, package in packages.items() if name}
    assert len(fetched) > 100
    assert [name for name, package in fetched.items() if "integrity" not in package] == []
    assert [name for name, package in fetched.items() if "resolved" in package] == []


# The build hook


@pytest.fixture
def hook() -> Any:
    """Import the hook, which is no part of the package."""
    pytest.importorskip("hatchling", reason="hatchling builds packages; the extra `dev` has it")
    spec = importlib.util.spec_from_file_location("aotlab_build_hook", FOLDER / "build_hook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class App:
    """The part of Hatch's application that the hook uses."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def abort(self, message: str) -> None:
        """End the build."""
        self.said.append(message)
        raise SystemExit(1)

    def display_warning(self, message: str) -> None:
        """Warn."""
        self.said.append(message)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a checkout with the extension's sources alone."""
    ignored = shutil.ignore_patterns("node_modules", "lib", "dist", "test")
    shutil.copytree(FOLDER, tmp_path / "extension", ignore=ignored)
    return tmp_path


@pytest.fixture(autouse=True)
def _wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AOTLAB_NO_EXTENSION", raising=False)


def started(hook: Any, checkout: Path, target: str = "wheel") -> Any:
    """Make the hook as Hatch makes it."""
    return hook.ExtensionBuildHook(str(checkout), {}, None, None, str(checkout / "out"), target, App())


def pretend(hook: Any, checkout: Path) -> None:
    """Write products as a build of these sources leaves them."""
    labextension = checkout / hook.LABEXTENSION
    (labextension / "static").mkdir(parents=True)
    (labextension / "package.json").write_text('{"jupyterlab": {"_build": {"load": "static/remoteEntry.1.js"}}}')
    (labextension / "static" / "remoteEntry.1.js").touch()
    (labextension / "install.json").touch()
    (checkout / hook.BUNDLE).mkdir(parents=True)
    for kind in ("js", "css"):
        (checkout / hook.BUNDLE / f"dashboard.{kind}").touch()
    (checkout / hook.CHECKSUM).write_text(hook._checksum(checkout))


def test_fresh_products_are_not_built_again(hook: Any, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the products are newer than the sources, they are installed, without a build and without PyPI."""
    pretend(hook, checkout)
    monkeypatch.setattr(hook, "_run", lambda *_: pytest.fail("something was run"))
    build = started(hook, checkout)
    assert build.dependencies() == []
    data: dict[str, Any] = {"shared_data": {}}
    build.initialize("standard", data)
    assert data == {"shared_data": {"extension/dist/labextension": "share/jupyter/labextensions/aotlab"}}


@pytest.mark.parametrize(
    "change",
    [
        "aotlab/report/static/dashboard.css",
        "extension/dist/labextension/install.json",
        "extension/dist/labextension/static/remoteEntry.1.js",
        "extension/dist/sources.sha256",
    ],
)
def test_a_missing_product_is_built(change: str, hook: Any, checkout: Path) -> None:
    """Without any one of the products a build is due."""
    pretend(hook, checkout)
    assert hook._fresh(checkout)
    (checkout / change).unlink()
    assert not hook._fresh(checkout)


@pytest.mark.parametrize("change", ["src/view/view.ts", "style/report.css", "package-lock.json", "scripts/widget.mjs"])
def test_changed_sources_are_built(change: str, hook: Any, checkout: Path) -> None:
    """After a change of any source a build is due, after a change of line ends or times none."""
    pretend(hook, checkout)
    path = checkout / "extension" / change
    before = path.read_bytes()
    path.write_bytes(before.replace(b"\n", b"\r\n"))
    os.utime(path, (2_000_000_000, 2_000_000_000))
    assert hook._fresh(checkout)
    path.write_bytes(before + b"\n")
    assert not hook._fresh(checkout)


def test_node_comes_from_pypi_where_there_is_none(
    hook: Any, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recent Node with npm is used. If it is missing or old, Node is installed from PyPI."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setattr(hook.sysconfig, "get_path", lambda _: str(tmp_path / "no scripts"))
    build = started(hook, checkout)
    assert build.dependencies() == [hook.BUILDER, hook.NODE]
    for version, expected in (("v18.20.1", [hook.BUILDER, hook.NODE]), ("v24.1.0", [hook.BUILDER])):
        for name in ("npm", "node"):
            (tools / name).write_text(f"#!/bin/sh\necho {version}\n")
            (tools / name).chmod(0o755)
        assert build.dependencies() == expected


def test_what_cannot_be_built_is_said(hook: Any, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing build names the command, the end of its output, and a way to continue without it."""
    monkeypatch.setattr(hook, "_node", lambda: None)
    build = started(hook, checkout)
    with pytest.raises(SystemExit):
        build.initialize("standard", {"shared_data": {}})
    assert "no npm" in build.app.said[0]
    assert "AOTLAB_NO_EXTENSION=1" in build.app.said[0]
    with pytest.raises(hook.BuildError, match=r"(?s)sh -c .* failed:\nthe registry is away$"):
        hook._run(["sh", "-c", "echo the registry is away; exit 3"], checkout, dict(os.environ))


def test_without_the_extension(hook: Any, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTLAB_NO_EXTENSION asks PyPI for nothing, builds nothing and installs nothing of it."""
    monkeypatch.setenv("AOTLAB_NO_EXTENSION", "1")
    monkeypatch.setattr(hook, "_build", lambda _: pytest.fail("something was built"))
    build = started(hook, checkout)
    data: dict[str, Any] = {"shared_data": {}}
    assert build.dependencies() == []
    build.initialize("standard", data)
    assert data == {"shared_data": {}}
    assert "AOTLAB_NO_EXTENSION" in build.app.said[0]
