"""Check a wheel: it holds every file of the package, and aotlab works from it.

Usage: ``python .ci/check_wheel.py WHEEL VENV`` in the checkout. ``VENV`` is an empty virtual environment; the packages
that aotlab requires are lent to it by the environment whose Python runs this.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
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


def main(wheel: Path, venv: Path) -> None:
    """Compare the wheel with the package's folder, unpack it into the virtual environment and run the probe there."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("aotlab/")}
        files = [path for path in Path("aotlab").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        expected = {path.as_posix() for path in files}
        assert packed == expected, f"only in the wheel or only in the package: {sorted(packed ^ expected)}"
        (site,) = venv.glob("lib/python*/site-packages")
        # A wheel is unpacked where it is to be imported from: without scripts, that is all of an installation.
        archive.extractall(site)
    # A .pth file inside a folder lent in this way is not read, so the checkout's editable aotlab stays out.
    (site / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    subprocess.run([venv / "bin" / "python", "-c", PROBE], cwd=venv, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
