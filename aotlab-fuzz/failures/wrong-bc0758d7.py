# aotlab fuzz --engine aotlab, seed 9001: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# wrong: gradient of an input [detach mul_ rand_like register_hook relu view]
# a.grad differs in 2 of 2 elements: at (0, 0) eager has -0.875, the engine -0.375
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


def program(a):
    a.detach().mul_(2)
    v1 = a[::2]
    v2 = a.view(-1)
    v2.register_hook(lambda gradient: gradient * 2)
    v3 = a + torch.rand_like(a)
    v4 = a.relu()
    v5 = a.view(-1)
    return (v5, v2.view(-1),)


def inputs_0():  # the first call
    a = torch.tensor([[-1.25, 1.25]]).requires_grad_()
    return (a,), {}


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0], backward='all', exact=False)
print("\n".join(found))
assert found, "no difference: it is mended"
