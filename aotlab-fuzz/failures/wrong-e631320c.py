# aotlab fuzz --engine aotlab, seed 9003: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# wrong: hook calls of an input [add_]
# the hooks that were called are a, in eager none
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


seen = []


def hook(tensor, name):  # what a hook is called with, call by call
    if tensor.grad_fn is not None or tensor.requires_grad:
        tensor.register_hook(lambda gradient: seen.append((name, gradient.detach().clone())))


def program(a):
    a.add_(2)
    return (a,)


def inputs_0():  # the first call
    a_leaf = torch.tensor([[-1.25, 1.25], [-1.75, 0.75], [-2.25, 0.25]]).requires_grad_()
    a_base = a_leaf * 1
    a = a_base[1:]
    hook(a, "a")
    return (a,), {"a_leaf": a_leaf, "a_base": a_base}


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0], backward='all', seen=seen)
print("\n".join(found))
assert found, "no difference: it is mended"
