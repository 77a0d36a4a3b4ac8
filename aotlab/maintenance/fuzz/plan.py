"""The settings of a run of the fuzzer: the engine, the kind and number of the programs, and the seed.

Programs are grouped in blocks. Each program has a seed that is made of the run's seed, the number of its block and its
index in the block. So the program is the same in every process and every run. A stopped run continues with the blocks
that are not finished.
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

#: The number of programs in a block. A block takes some seconds. An interrupt loses the work of the current block only.
BLOCK = 200

#: Subpackages that cannot change the behaviour of a compiled function. They are not part of the engine's revision.
_AROUND = ("bench", "cli", "maintenance", "notebook", "rehearse", "report", "teach", "verification")

#: The files that decide which programs are drawn and how two runs are compared.
_GENERATOR = ("maintenance/fuzz/drawing.py", "verification/*.py", "verification/programs/*.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of one run.

    Attributes
    ----------
    engine
        aotlab, or torch's own engine.
    programs
        How many different programs are run, including the programs that an interrupted run has finished.
    seed
        Decides which programs are drawn.
    grad
        Draw only programs that have something to differentiate.
    dynamo
        Run the engine behind ``torch.compile`` instead of on the function itself.
    min_cut
        Use aotlab with `aotlab.min_cut_rematerialization_partition` at its full budget, which gives the same values as
        eager.
    related
        Draw short programs about two related inputs, see `aotlab.verification.programs.related`.
    sizes
        Draw programs that use the sizes of their arguments. They are compiled for all sizes, and the sizes differ
        between calls.
    subclasses
        Draw programs whose arguments are tensor subclasses.
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
        """The seed and the options as text: ``"7 grad dynamo"``. The seed of each program begins with this text."""
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
        """The name of the run for files: the engine, the key, the engine's revision and the generator's version.

        Runs with the same name draw the same programs and have the same results.
        """
        key = self.key.replace(" ", "-")
        return f"{self.engine}-{key}-{engine_revision(self.engine)}-{generator_version()}"

    @staticmethod
    def is_whole(size: int) -> bool:
        """Tell whether a block of this size has the full number of programs."""
        return size == BLOCK

    def blocks(self) -> list[tuple[int, int]]:
        """List the blocks as (number, size); the last block may have fewer programs."""
        whole, last = divmod(self.programs, BLOCK)
        return [(number, BLOCK) for number in range(whole)] + ([(whole, last)] if last else [])


@cache
def engine_revision(engine: Engine) -> str:
    """Return the revision of an engine. For upstream, it is torch's version; for aotlab, a hash of aotlab's sources.

    Subpackages that cannot change a compiled function are left out of the hash.
    """
    if engine == "upstream":
        return f"torch-{torch.__version__}".replace("+", "-")
    root = Path(__file__).parents[2]
    files = [path for path in sorted(root.rglob("*.py")) if path.relative_to(root).parts[0] not in _AROUND]
    return _hash(root, files)


@cache
def generator_version() -> str:
    """Return the version of the generator: a hash of the sources that draw and compare programs."""
    root = Path(__file__).parents[2]
    return _hash(root, [path for pattern in _GENERATOR for path in sorted(root.glob(pattern))])


def _hash(root: Path, files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"\n{path.relative_to(root).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]
