"""What a run of the fuzzer is: which engine, which programs, how many; and what its results belong to.

Programs come in blocks. Each program is drawn from a seed of its own, made of the run's seed, its block and its place
there, so that it is the same whenever and in whichever process it is drawn. A run can be stopped and goes on with the
first block that is not finished.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from aotlab import config

Engine = Literal["aotlab", "upstream"]

#: Programs in a block: some seconds' work, and what an interrupt can lose.
BLOCK = 200

#: The rooms that cannot change what a compiled function does: what measures, draws and explains it.
_AROUND = ("bench", "cli", "course", "notebook", "report", "teach", "verification")

#: The files that decide which programs are drawn and how two runs are compared.
_GENERATOR = ("programs*.py", "programs/*.py", "clones.py", "differential.py", "observables.py", "fuzz/drawing.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run.

    Attributes
    ----------
    engine
        Ours, or torch's own.
    programs
        How many different programs are run, those counted that an earlier, interrupted run has left.
    seed
        Decides which ones.
    grad
        Only programs with something to differentiate.
    dynamo
        Behind ``torch.compile`` rather than on the function itself.
    min_cut
        Our engine with `aotlab.min_cut_rematerialization_partition` at its full budget, which does what eager does.
    related
        Short programs about two inputs that have to do with each other, see `aotlab.verification.programs.related`.
    sizes
        Programs about their arguments' sizes, compiled once for all sizes and called with several.
    subclasses
        Programs whose arguments are tensor subclasses.
    without
        The quirks that are switched off, see `aotlab.config.quirks`.
    """

    engine: Engine = "aotlab"
    programs: int = 1000
    seed: int = 0
    grad: bool = False
    dynamo: bool = False
    min_cut: bool = False
    related: bool = False
    sizes: bool = False
    subclasses: bool = False
    without: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Name what the programs of a run depend on besides the sources: ``"7 grad dynamo"``."""
        switches = {"grad": self.grad, "dynamo": self.dynamo, "min-cut": self.min_cut}
        switches |= {"related": self.related, "sizes": self.sizes, "subclasses": self.subclasses}
        without = [f"without-{name}" for name in self.without]
        return " ".join([str(self.seed), *(name for name, is_on in switches.items() if is_on), *without])

    @property
    def quirks(self) -> tuple[str, ...]:
        """The quirks that are on."""
        return tuple(name for name in config.quirks if name not in self.without)

    @property
    def name(self) -> str:
        """Name the run by all that its results depend on, fit for a file's name."""
        key = self.key.replace(" ", "-")
        return f"{self.engine}-{key}-{engine_revision(self.engine)}-{generator_version()}"

    @staticmethod
    def is_whole(size: int) -> bool:
        """Tell whether a block has all its programs."""
        return size == BLOCK

    def blocks(self) -> list[tuple[int, int]]:
        """List the blocks as (number, size); only the last one may be short."""
        whole, rest = divmod(self.programs, BLOCK)
        return [(number, BLOCK) for number in range(whole)] + ([(whole, rest)] if rest else [])


@cache
def engine_revision(engine: Engine) -> str:
    """Tell engines apart: torch's version for upstream, and for ours a hash of the sources that compile and run."""
    if engine == "upstream":
        return f"torch-{torch.__version__}".replace("+", "-")
    root = Path(__file__).parents[2]
    files = [path for path in sorted(root.rglob("*.py")) if path.relative_to(root).parts[0] not in _AROUND]
    return _hash(root, files)


@cache
def generator_version() -> str:
    """Tell generators apart: a hash of the sources that draw and compare."""
    root = Path(__file__).parents[1]
    return _hash(root, [path for pattern in _GENERATOR for path in sorted(root.glob(pattern))])


def _hash(root: Path, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"\n{path.relative_to(root).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]
