"""Every operator and module of which torch itself ships samples, through aotlab and through eager.

Torch's own tests stand on two databases: OpInfo (operators: what each supports, and samples of its arguments) and
ModuleInfo (modules: how each is made and called). `variants` turns their entries into *variants*, an operator in one
form (called, in place, with ``out=``) and one dtype, or a module in training or evaluation; `outcome` runs one of them
by eager and by one of the `engines` and says what came of it; `errors` does that for calls that eager refuses; `sample`
names the 300 variants that every run of the tests takes; `campaign` is ``aotlab verify ops``.
"""

from __future__ import annotations

from aotlab.verification.op_database.campaign import run
from aotlab.verification.op_database.errors import error_variants, judge_errors
from aotlab.verification.op_database.outcome import Outcome, Result, judge_variant
from aotlab.verification.op_database.sample import SAMPLE
from aotlab.verification.op_database.variants import Case, Variant, cases_of, variants

__all__ = [
    "SAMPLE",
    "Case",
    "Outcome",
    "Result",
    "Variant",
    "cases_of",
    "error_variants",
    "judge_errors",
    "judge_variant",
    "run",
    "variants",
]
