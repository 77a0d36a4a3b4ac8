# aotlab fuzz --engine aotlab, seed 9002: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# wrong: value of an input [add_ as_strided mul_ view]
# `a_base` differs in 2 of 8 elements: at (0, 1) eager has 2.5, the engine 1.25
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


def program(a, b, c):
    v1 = a.view(-1)
    a.add_(2)
    v2 = a.as_strided((2, 2), (1, 2))
    v3 = a.view(-1)
    v2.mul_(2)
    return v3


def inputs_0():  # the first call
    a_base = torch.tensor([[-1.25, 1.25, -1.75, 0.75], [-2.25, 0.25, -2.75, -0.25]])
    a = a_base[..., ::2]
    b = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]]).requires_grad_()
    c = a
    return (a, b, c,), {"a_base": a_base}


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0], backward='all')
print("\n".join(found))
assert found, "no difference: it is mended"
