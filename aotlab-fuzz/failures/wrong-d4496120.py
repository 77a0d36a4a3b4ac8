# aotlab fuzz --engine aotlab, seed 9003: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# wrong: value of an input [resize_]
# `c` differs in 2 of 4 elements: at (2,) eager has 1.401298464324817e-45, the engine 5482.53125
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


def program(a, b, c):
    c.resize_(4)
    return (c,)


def inputs_0():  # the first call
    a = torch.tensor([[-1.25, 1.25]]).requires_grad_()
    b = torch.tensor([[-1, 1], [-1, 0]])
    c_base = torch.tensor([[-1.25, 1.25]])
    c = c_base.expand(2, 2)
    return (a, b, c,), {"c_base": c_base}


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0], backward='all')
print("\n".join(found))
assert found, "no difference: it is mended"
