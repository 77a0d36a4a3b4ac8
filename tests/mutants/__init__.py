"""Deliberate bugs in the engine: each mutant makes one mistake that a rewrite of a stage could make.

The mutants measure how many bugs the random programs catch. Each mutant is a plausible bug: a rule of the run-time
wrapper is left out, a guard is forgotten, a wrong value is saved. The test suite installs them one after the other and
requires that the programs notice each of them. A mutant patches functions of the stages for the length of a ``with``
block. Functions that were compiled before or after the block are not affected.

Examples
--------
>>> [mutant.name for mutant in MUTANTS][:3]
['epilogue skipped', 'mutation hidden from autograd', 'wrong mutated value']
"""

from __future__ import annotations

from tests.mutants.backward import BACKWARD
from tests.mutants.epilogue import EPILOGUE
from tests.mutants.guards import GUARDS
from tests.mutants.mutant import Mutant
from tests.mutants.rare import RARE
from tests.mutants.tracing import TRACING

#: The mutants that the random programs catch.
MUTANTS: tuple[Mutant, ...] = EPILOGUE + GUARDS + BACKWARD + TRACING

__all__ = ["MUTANTS", "RARE", "Mutant"]
