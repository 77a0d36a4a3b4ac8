# aotlab fuzz --engine aotlab, seed 9001: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# wrong: requires_grad of an output [detach_]
# `out[0]`.requires_grad is False, in eager True
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


def program(a):
    v1 = a.mT
    a.detach_()
    return (v1,)


def inputs_0():  # the first call
    a = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]]).requires_grad_()
    return (a,), {}


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0], backward='all')
print("\n".join(found))
assert found, "no difference: it is mended"
