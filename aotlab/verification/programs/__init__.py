"""Draw small random programs with views, in-place ops, aliases and grad modes; compare an engine with eager on them.

To *draw* a program means to choose its parts at random. A `Program` is text: a function, a function per call that makes
the inputs, and the *caller's steps*, expressions that use the results as a user would (``out[0].mul_(2)``).
Hypothesis can draw it, and then reduces a failing program to a few lines. Each statement is run eagerly while it is
drawn. So nearly all statements are valid without a model of torch's shape rules. A few statements that raise are kept
on purpose; there the engine must raise the same type of exception.

Values are multiples of 1/4 and cotangents are multiples of 1/8. So sums and products are exact in any order, and an
engine can be compared with eager bit for bit. Programs with ``sin`` and similar functions, or with products of many
factors, are not `Program.exact`. Their results are still compared bit for bit. Their gradients may differ by the
rounding of a sum whose order autograd chooses. Programs whose eager result depends on uninitialized memory, or on the
order in which a kernel visits elements, are not drawn (see `defined`).

The modules, in order:

- `choices`: make the random decisions, with Hypothesis or with a seed;
- `program` and `prelude`: the record of a program, and the helper functions in its text;
- `recipes`, `changes` and `sizes`: draw the inputs of the first call and of the later calls;
- `statements`, `rare`, `writer` and `defined`: draw the body of the function;
- `caller`: draw the caller's steps after the call;
- `drawing`, `related` and `wrapped`: draw whole programs of three kinds;
- `running` and `shrinking`: run a program, and make a failing program smaller.

The strategies need Hypothesis, the extra ``fuzz``; `program_of` does not.

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
