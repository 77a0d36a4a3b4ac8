"""Whether an engine does what eager does: what is observable, both sides compared, and programs to try.

In order: `observables` (what a user can observe of a call), `clones` (arguments for a second run that alias
each other as the first ones do), `differential` (eager and an engine side by side), `programs` (random small
programs; strategies need the extra ``fuzz``), `mutants` (an engine broken on purpose, to test the tests).
"""

from __future__ import annotations

from aotlab.verification.clones import Cloner
from aotlab.verification.differential import Comparison, Difference, Verification, compare, eager, judge, verify
from aotlab.verification.observables import Call, Observation, observe

__all__ = [
    "Call",
    "Cloner",
    "Comparison",
    "Difference",
    "Observation",
    "Verification",
    "compare",
    "eager",
    "judge",
    "observe",
    "verify",
]
