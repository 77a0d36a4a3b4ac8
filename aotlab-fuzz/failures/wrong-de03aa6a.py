# aotlab fuzz --engine aotlab, seed 9002: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# wrong: step of an input [mul_ view]
# `torch.autograd.grad(out[0], a, weights(out[0]), allow_unused=True, retain_graph=True)` gives float32[2, 2] 0.25, -2, 1, -2.75, in eager None
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


def weights(tensor):  # what is handed to a backward
    steps = torch.arange(tensor.numel(), dtype=torch.float64)
    return (((steps * 7) % 11 + 1) / 4 * (1 - 2 * (steps % 2))).reshape(tensor.shape).to(tensor.dtype)


def program(a):
    v1 = a.view(-1)
    v2 = a * 2
    a.mul_(2)
    return (v1,)


def inputs_0():  # the first call
    a_leaf = torch.tensor([[-1.25, 1.25], [-1.75, 0.75], [-2.25, 0.25]]).requires_grad_()
    a_base = a_leaf * 1
    a = a_base[1:]
    return (a,), {"a_leaf": a_leaf, "a_base": a_base}


def before(out, a):  # what the caller does before the backward, one by one
    return [
        lambda: torch.autograd.grad(out[0], a, weights(out[0]), allow_unused=True, retain_graph=True),
    ]


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0], backward='all', before=before)
print("\n".join(found))
assert found, "no difference: it is mended"
