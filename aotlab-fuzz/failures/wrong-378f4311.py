# aotlab fuzz --engine aotlab, seed 9001: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# wrong: python value of an output [mul_ storage_offset view]
# `out` is 0, in eager 2
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


def program(a, b, c):
    v1 = a.view(-1)
    c.mul_(2)
    v2 = a * 2
    return c.storage_offset()


def inputs_0():  # the first call
    a = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]])
    b = a.detach()
    c_base = torch.tensor([[-1.25, 1.25], [-1.75, 0.75], [-2.25, 0.25]])
    c = c_base[1:]
    return (a, b, c,), {"c_base": c_base}


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0], backward='all')
print("\n".join(found))
assert found, "no difference: it is mended"
