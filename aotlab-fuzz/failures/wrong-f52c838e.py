# aotlab fuzz --engine aotlab, seed 9002: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# wrong: version of an input [mul_ unsqueeze_ view]
# call 2: the version counter of `b` is moved, in eager unmoved
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


def program(a, b, c):
    v1 = a * 2
    v2 = a.view(-1)
    v2.unsqueeze_(0)
    c.mul_(2)
    return (v2,)


def inputs_0():  # the first call
    a = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]])
    b = a.detach()
    c = torch.tensor([-1.25, 1.25])
    return (a, b, c,), {}


def inputs_1():  # no longer the same
    a = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]])
    b = a.detach().clone()
    c = torch.tensor([-1.25, 1.25])
    return (a, b, c,), {}


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0, inputs_1], backward='all')
print("\n".join(found))
assert found, "no difference: it is mended"
