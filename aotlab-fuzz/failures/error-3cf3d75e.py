# aotlab fuzz --engine aotlab, seed 9001: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# error: none in the backward, eager RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: [torch.Dou [@ amax relu_ t view]
# call 2: the backward raises none where eager raises RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: [torch.DoubleTensor [1]], which is output 0 of Relu, is at version 4; expected version 1 instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with torch.autograd.set_detect_anomaly(True, check_nan=False).
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


def program(a, b, c):
    a.relu_()
    v1 = a.amax(0)
    v2 = b @ b.t()
    v3 = a.view(-1)
    return (v3, v3,)


def inputs_0():  # the first call
    a = torch.tensor([-1.25], dtype=torch.float64)
    b = torch.tensor([[-1.25]], dtype=torch.float64)
    c_leaf = torch.tensor([-1.25], dtype=torch.float64).requires_grad_()
    c = c_leaf * 1
    return (a, b, c,), {"c_leaf": c_leaf}


def inputs_1():  # inputs that are windows
    a_buffer_leaf = torch.tensor([-1.25, 1.25, -1.75], dtype=torch.float64).requires_grad_()
    a_buffer = a_buffer_leaf * 1
    a = a_buffer[0:1].view(1)
    b = torch.tensor([[-1.25]], dtype=torch.float64)
    c = a_buffer[0:1].view(1)
    return (a, b, c,), {"a_buffer_leaf": a_buffer_leaf, "a_buffer": a_buffer}


def before(out):  # what the caller does before the backward, one by one
    return [
        lambda: out[0].mul_(2),
        lambda: out[0].mul_(2),
        lambda: out[0].mul_(2),
    ]


def after(out):  # what the caller does after the backward, one by one
    return [
        lambda: out[0].mul_(2),
    ]


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0, inputs_1], backward='all', before=before, after=after, exact=False)
print("\n".join(found))
assert found, "no difference: it is mended"
