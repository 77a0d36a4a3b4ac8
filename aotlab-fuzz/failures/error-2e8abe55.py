# aotlab fuzz --engine aotlab, seed 9003: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# error: none in the `out[0].add_(1)`, eager RuntimeError: Output 0 of Viewed is a view and is being modified inplace. This view was created inside a custom Function [Viewed apply mul_ view]
# the `out[0].add_(1)` raises none where eager raises RuntimeError: Output 0 of Viewed is a view and is being modified inplace. This view was created inside a custom Function (or because an input was returned as-is) and the autograd logic to handle view+inplace would override the custom backward associated with the custom Function, leading to incorrect gradients. This behavior is forbidden. You can fix this by cloning the output of the custom Function.
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


class Viewed(torch.autograd.Function):  # gives back a view of what it gets
    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def program(a):
    v1 = a.view(-1)
    v2 = a * 2
    a.mul_(2)
    v3 = a.view(-1)
    v4 = Viewed.apply(v2)
    return v4


def inputs_0():  # the first call
    a_leaf = torch.tensor([[-1.25, 1.25], [-1.75, 0.75]]).requires_grad_()
    a = a_leaf * 1
    return (a,), {"a_leaf": a_leaf}


def before(out):  # what the caller does before the backward, one by one
    return [
        lambda: out[0].add_(1),
    ]


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0], backward='all', before=before)
print("\n".join(found))
assert found, "no difference: it is mended"
