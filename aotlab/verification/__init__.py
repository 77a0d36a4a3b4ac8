"""Compare an engine with eager: record both, compare the records, and generate programs to try.

The modules, in order:

- `observables`: make a call and record everything that a user can observe of it;
- `clones`: copy the arguments for a second run; the copies alias each other as the originals do;
- `comparisons`: the records that a comparison returns;
- `values` and `float64`: compare the elements of two tensors;
- `judgement`: compare two observations of one call;
- `differential`: run eager and an engine side by side and compare them;
- `calls`: make the arguments for a program that is given as a Python module;
- `programs`: small random programs (the Hypothesis strategies need the extra ``fuzz``).
"""

from __future__ import annotations

from aotlab.verification.clones import Cloner
from aotlab.verification.comparisons import Comparison, Difference, Verification
from aotlab.verification.differential import compare, verify
from aotlab.verification.judgement import judge
from aotlab.verification.observables import Call, Observation, eager, observe

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
