# aotlab fuzz --engine aotlab, seed 9001: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# error: none in the `torch.autograd.grad(out[0], c, weights(out[0]), allow_unused=True)`, eager RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have alrea [mul_]
# the `torch.autograd.grad(out[0], c, weights(out[0]), allow_unused=True)` raises none where eager raises RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). Specify retain_graph=True if you need to backward through the graph a second time or if you need to access saved tensors after calling backward.
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


def weights(tensor):  # what is handed to a backward
    steps = torch.arange(tensor.numel(), dtype=torch.float64)
    return (((steps * 7) % 11 + 1) / 4 * (1 - 2 * (steps % 2))).reshape(tensor.shape).to(tensor.dtype)


def program(a, b, c, d):
    a.mul_(2)
    a.mul_(2)
    a.mul_(2)
    v1 = a / 2
    return (v1,)


def inputs_0():  # the first call
    w_leaf = torch.tensor([-1.25, 1.25, -1.75, 0.75, -2.25, 0.25, -2.75, -0.25, 2.25]).requires_grad_()
    w = w_leaf * 1
    a = w[0:8:2].view(2, 2)
    b = w[1:9:2].view(2, 2)
    c = a
    d = a
    return (a, b, c, d,), {"w_leaf": w_leaf, "w": w}


def after(out, c):  # what the caller does after the backward, one by one
    return [
        lambda: torch.autograd.grad(out[0], c, weights(out[0]), allow_unused=True),
    ]


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0], backward='all', after=after, exact=False)
print("\n".join(found))
assert found, "no difference: it is mended"
