# aotlab fuzz --engine aotlab, seed 9002: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# error: none in the call, eager RuntimeError: expected m0 and m0 to have the same dtype, but got: double != long int [@ mul_]
# the call raises none where eager raises RuntimeError: expected m1 and m2 to have the same dtype, but got: double != long int
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


def program(a, b, c):
    a.mul_(2)
    a.mul_(2)
    a.mul_(2)
    v1 = b @ a
    return c


def inputs_0():  # the first call
    a = torch.tensor([[-1, 1], [-1, 0]])
    b = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]], dtype=torch.float64)
    c = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]], dtype=torch.float64)
    return (a, b, c,), {}


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0], backward='all')
print("\n".join(found))
assert found, "no difference: it is mended"
