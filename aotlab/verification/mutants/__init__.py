"""The engine, broken on purpose: each mutant makes one mistake that a rewrite of a stage could make.

The random programs are worth what they catch. Each mutant here is a plausible bug (a rule of the run-time
wrapper left out, a guard forgotten, a wrong value saved); the test-suite installs them one after the other and
demands that the programs notice. A mutant patches functions of the stages for the length of a ``with`` block; functions
compiled before or after the block are not touched.

Examples
--------
>>> [mutant.name for mutant in MUTANTS][:3]
['epilogue skipped', 'mutation hidden from autograd', 'wrong mutated value']
"""

from __future__ import annotations

from aotlab.verification.mutants.backward import BACKWARD
from aotlab.verification.mutants.epilogue import EPILOGUE
from aotlab.verification.mutants.guards import GUARDS
from aotlab.verification.mutants.mutant import Mutant
from aotlab.verification.mutants.rare import RARE
from aotlab.verification.mutants.tracing import TRACING

#: All that the random programs catch.
MUTANTS: tuple[Mutant, ...] = EPILOGUE + GUARDS + BACKWARD + TRACING

__all__ = ["MUTANTS", "RARE", "Mutant"]
