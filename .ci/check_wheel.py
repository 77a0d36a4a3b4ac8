"""Check a wheel: it holds every file of the package, installs without Node, and aotlab works from it.

Usage: ``python .ci/check_wheel.py WHEEL VENV`` in the checkout. ``VENV`` is an empty virtual environment; the packages
that aotlab requires are lent to it by the environment whose Python runs this.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

# Run from the wheel, in a folder that is not the checkout.
PROBE = """
import importlib.metadata, sys
import aotlab

assert aotlab.__file__.startswith(sys.prefix), aotlab.__file__
assert importlib.metadata.version("aotlab") == aotlab.__version__
for name in aotlab.__all__:
    getattr(aotlab, name)

import torch

x = torch.ones(3, requires_grad=True)
torch.compile(lambda x: x.sin().sum(), backend="aotlab")(x).backward()
assert torch.allclose(x.grad, torch.ones(3).cos()), x.grad  # compiled kernels round for themselves
print("aotlab", aotlab.__version__, "from", aotlab.__file__)
"""

# What stands behind the command `jupyter labextension`, which is lent without its script.
LABEXTENSION = "import sys; from jupyterlab.labextensions import main; sys.exit(main())"
EXTENSION = "share/jupyter/labextensions/aotlab"


def main(wheel: Path, venv: Path) -> None:
    """Compare the wheel with the checkout, install it into the virtual environment, and try it there."""
    check_files(wheel)
    install(wheel, venv)
    check_extension(venv)
    subprocess.run([venv / "bin" / "python", "-c", PROBE], cwd=venv, check=True)


def check_files(wheel: Path) -> None:
    """Compare the wheel with the checkout: the package, what was built into it, the course and the extension."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packed = {name for name in names if name.startswith("aotlab/")}
    files = [path for path in Path("aotlab").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.as_posix() for path in files}
    expected |= {f"aotlab/course/{path.name}" for path in Path("notebooks").glob("*.ipynb")}
    # What the build makes need not be in the checkout, which may have been copied from git.
    expected |= {f"aotlab/report/static/dashboard.{kind}" for kind in ("js", "css")}
    assert packed == expected, f"only in the wheel or only in the package: {sorted(packed ^ expected)}"
    data = {name.partition(".data/data/")[2] for name in names if ".data/data/" in name}
    needed = {f"{EXTENSION}/install.json", f"{EXTENSION}/package.json", f"{EXTENSION}/static/style.js"}
    assert needed <= data, f"missing in the extension: {sorted(needed - data)}"
    assert any(re.fullmatch(rf"{EXTENSION}/static/remoteEntry\.\w+\.js", name) for name in data), sorted(data)
    # The bundles contain packages whose licences require that their texts are distributed with them.
    with zipfile.ZipFile(wheel) as archive:
        for folder in ("aotlab/report/static/", f"{EXTENSION}/static/"):
            scripts = [archive.read(name).decode() for name in names if folder in name and name.endswith(".js")]
            missing = [each for each in ("Chris Pettitt", "Mike Bostock") if not any(each in text for text in scripts)]
            assert not missing, f"{folder} lacks licences: {missing}"


def install(wheel: Path, venv: Path) -> None:
    """Install the wheel with pip, where there is no Node; then lend what it requires."""
    python = venv / "bin" / "python"
    with tempfile.TemporaryDirectory() as empty:
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel],
            env={**os.environ, "PATH": empty},
            check=True,
        )
    (site,) = venv.glob("lib/python*/site-packages")
    # A .pth file inside a folder lent in this way is not read, so the checkout's editable aotlab stays out.
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")


def check_extension(venv: Path) -> None:
    """Ask JupyterLab whether it finds the extension in this very environment, and whether it fits."""
    with tempfile.TemporaryDirectory() as empty:
        # Neither Node nor what a user or a system has of Jupyter.
        settings = {f"JUPYTER_{kind}": empty for kind in ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("JUPYTER")}
        done = subprocess.run(
            [venv / "bin" / "python", "-c", LABEXTENSION, "list"],
            cwd=venv,
            env={**kept, **settings, "PATH": empty, "HOME": empty},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
    # Colours are for people.
    listing = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    _, _, own = listing.partition(str(venv / "share" / "jupyter" / "labextensions"))
    found = re.search(r"^\s*aotlab v\S+ .*$", own, re.MULTILINE)
    assert found is not None, listing
    assert re.search(r"\benabled\b.*\bOK\b", found[0]), listing
    print("jupyter labextension list:", " ".join(found[0].split()))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
