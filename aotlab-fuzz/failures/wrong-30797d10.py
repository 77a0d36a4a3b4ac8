# aotlab fuzz --engine aotlab, seed 9001: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# wrong: value of an input [mul_ resize_ view]
# call 2: `a` differs in 1 of 4 elements: at (3,) eager has 4, the engine 9007199254740992
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


def program(a, b, c):
    a.mul_(2)
    a.mul_(2)
    v1 = a.view(-1)
    c.resize_(4)
    a.mul_(2)
    a.mul_(2)
    return (b,)


def inputs_0():  # the first call
    a = torch.tensor([-1, 1])
    b = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]])
    c = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]])
    return (a, b, c,), {}


def inputs_1():  # one input passed twice
    a = torch.tensor([-1, 1])
    b = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]])
    c = a
    return (a, b, c,), {}


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0, inputs_1], backward=None, exact=False)
print("\n".join(found))
assert found, "no difference: it is mended"
