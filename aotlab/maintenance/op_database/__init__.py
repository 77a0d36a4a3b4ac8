"""Run every operator and module for which torch ships samples, with aotlab and with eager.

Torch's own tests use two databases. OpInfo lists the operators, the properties of each, and samples of its arguments.
ModuleInfo lists the modules and how each is constructed and called.

- `variants` makes *variants* from their entries. A variant is an operator in one form (called, in place, with ``out=``)
  and one dtype, or a module in training or evaluation mode.
- `outcome` runs one variant with eager and with one of the `engines`, and classifies the result.
- `errors` does the same for calls for which eager raises.
- `sample` names the 300 variants that every run of the test suite checks.
- `campaign` implements ``aotlab verify ops``.
"""

from __future__ import annotations

from aotlab.maintenance.op_database.campaign import run
from aotlab.maintenance.op_database.errors import error_variants, judge_errors
from aotlab.maintenance.op_database.outcome import Outcome, Result, judge_variant
from aotlab.maintenance.op_database.sample import SAMPLE
from aotlab.maintenance.op_database.variants import Case, Variant, cases_of, variants

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
