"""Small random programs of views, in-place ops, aliases and grad modes, and what an engine makes of them.

A `Program` is text: a function, for each of its calls a function that makes the inputs, and what the caller does with
the results. It is drawn by Hypothesis, so that a failing one shrinks to a few lines, and it is written by trying: every
statement is run eagerly while it is drawn, so that nearly all are valid without a model of torch's shape rules. A few
statements that raise are kept on purpose: there the engine has to raise the same type.

Values are multiples of 1/4 and cotangents multiples of 1/8, so that sums and products are exact in whatever order a
graph forms them and a comparison bit for bit means something. Programs with ``sin`` and its like, or with products of
many factors, are not `exact`: their results are still compared bit for bit, their gradients up to the order in which
autograd sums what several uses contribute. What eager leaves undefined is not drawn (see `defined`).

In order: `choices` (where decisions come from), `program` and `prelude` (the text), `recipes` and `changes` (the
inputs), `statements` and `writer` (the body), `caller` (what happens afterwards), `drawing` (the strategy), `running`
and `shrinking`.

Strategies need Hypothesis, the extra ``fuzz``; `program_of` does not.

Examples
--------
>>> from hypothesis import find
>>> program = find(programs(), lambda p: "mul_" in p.source)
>>> run_program(program, lambda function: function).status
'ok'
"""

from __future__ import annotations

from aotlab.verification.programs.drawing import program_of, programs
from aotlab.verification.programs.program import Program, Setup
from aotlab.verification.programs.running import Outcome, run_program
from aotlab.verification.programs.shrinking import shrink

__all__ = ["Outcome", "Program", "Setup", "program_of", "programs", "run_program", "shrink"]
