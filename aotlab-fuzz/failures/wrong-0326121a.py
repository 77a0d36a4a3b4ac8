# aotlab fuzz --engine aotlab, seed 9002: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# wrong: python value of an output [mul_ storage_offset]
# `out` is 0, in eager 2
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


def program(a, b, c):
    a.mul_(2)
    a.mul_(2)
    b.mul_(2)
    return b.storage_offset()


def inputs_0():  # the first call
    a = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]])
    b_base = torch.tensor([[-1.25, 1.25], [-1.75, 0.75], [-2.25, 0.25]])
    b = b_base[1:]
    c = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]])
    return (a, b, c,), {"b_base": b_base}


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0], backward='all', exact=False)
print("\n".join(found))
assert found, "no difference: it is mended"
