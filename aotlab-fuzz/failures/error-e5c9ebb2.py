# aotlab fuzz --engine aotlab, seed 9003: aotlab 0.1.0 (6b687cedd5), torch 2.13.0+cpu
# error: none in the call, eager RuntimeError: setStorage: sizes [0], strides [0], storage offset 0, and itemsize 0 requiring a storage size of 0 are out [as_strided mul_]
# the call raises none where eager raises RuntimeError: setStorage: sizes [1], strides [1], storage offset 0, and itemsize 8 requiring a storage size of 8 are out of bounds for storage of size 0
import torch
import aotlab
from aotlab.verification.fuzz.compare import differences


def program(a, b, c):
    a.mul_(2)
    a.mul_(2)
    a.mul_(2)
    a.mul_(2)
    v1 = a.as_strided((1,), (1,))
    return (c,)


def inputs_0():  # the first call
    a = torch.zeros(2, 0, dtype=torch.int64)
    b = torch.zeros(2, 0, dtype=torch.float32)
    c = torch.zeros(2, 0, dtype=torch.float32)
    return (a, b, c,), {}


compiled = aotlab.compile(program, backend="eager")
# eagerly, then compiled
found = differences(program, compiled, [inputs_0], backward='all', exact=False)
print("\n".join(found))
assert found, "no difference: it is mended"
