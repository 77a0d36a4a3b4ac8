"""The helper functions and classes that a program uses, as source text.

The text of a program contains the source of the helpers that it names. So it runs without this package.
"""

from __future__ import annotations

import functools
import re
from typing import Any

_NUMBERS = """\
def numbers(seed, *shape, dtype=torch.float32):
    count = math.prod(shape)
    values = ((torch.arange(count, dtype=torch.float64) * 5 + seed * 3) % 11 - 5.5) / 2
    return values.reshape(shape).to(dtype).clone()
"""

_WEIGHTS = """\
def weights(tensor):  # what is handed to a backward
    steps = torch.arange(tensor.numel(), dtype=torch.float64)
    made = (((steps * 7) % 11 + 1) / 4 * (1 - 2 * (steps % 2))).reshape(tensor.shape).to(tensor.dtype)
    return made if type(tensor) is torch.Tensor else made + torch.zeros_like(tensor.detach())
"""

#: ``hook`` reads ``grad_fn`` before it registers the hook, because torch < 2.15 crashes if a hook is registered on a
#: view whose base was written after the view was made.
_HOOK = """\
def hook(tensor, name):  # what a hook is called with, call by call
    if tensor.grad_fn is not None or tensor.requires_grad:
        tensor.register_hook(lambda gradient: seen.append((name, gradient.detach().clone())))
"""

_RETAIN = """\
def retain(tensor):
    if tensor.grad_fn is not None:
        tensor.retain_grad()
"""

_TWO = """\
def two(tensor):  # a wrapper of two tensors, and the leaf behind it
    from torch.testing._internal.two_tensor import TwoTensor

    first, second = tensor.detach().clone(), tensor.detach().clone()
    second.copy_(first.flip(list(range(first.dim()))))
    leaf = TwoTensor(first, second).requires_grad_(tensor.requires_grad)
    return leaf, leaf if tensor.is_leaf else leaf * 1
"""

_DOUBLED = """\
class Doubled(torch.autograd.Function):  # saves nothing
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2
"""

_SQUARED = """\
class Squared(torch.autograd.Function):  # saves something that it has made
    @staticmethod
    def forward(ctx, value):
        half = value * 0.5
        ctx.save_for_backward(half)
        return half * half

    @staticmethod
    def backward(ctx, gradient):
        (half,) = ctx.saved_tensors
        return gradient * half
"""

_KEPT = """\
class Kept(torch.autograd.Function):  # keeps what it gets and something that it has made without telling autograd
    @staticmethod
    def forward(ctx, value):
        ctx.value, ctx.half = value, value * 0.5
        return ctx.half * value

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.half + ctx.value * 0.5)
"""

_VIEWED = """\
class Viewed(torch.autograd.Function):  # gives back a view of what it gets
    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2
"""

_PARTED = """\
class Parted(torch.autograd.Function):  # two outputs, of which it saves one
    @staticmethod
    def forward(ctx, value):
        double, negative = value * 2, -value
        ctx.save_for_backward(double)
        return double, negative

    @staticmethod
    def backward(ctx, one, two):
        (double,) = ctx.saved_tensors
        return one * double - two
"""

_WRITTEN = """\
class Written(torch.autograd.Function):  # writes to what it gets
    @staticmethod
    def forward(ctx, value):
        ctx.mark_dirty(value)
        return value.mul_(3)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3
"""

_NOISY = """\
class Noisy(torch.autograd.Function):  # its backward draws random numbers
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 + torch.rand_like(gradient)
"""

_LOGGED = """\
class Logged(torch.autograd.Function):  # its backward writes to its second argument
    @staticmethod
    def forward(ctx, value, log):
        ctx.log = log
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.log.add_(gradient.sum())
        return gradient * 2, None
"""

_OVERWRITES = """\
class Overwrites(torch.autograd.Function):  # its backward writes to its incoming gradient
    @staticmethod
    def forward(ctx, value):
        return value * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mul_(2)
"""

_LEADING = """\
def leading(tensor):  # as many rows as have a positive sum
    count = (tensor.detach().unsqueeze(-1).flatten(1).sum(1) > 0).sum().item()
    torch._check(count <= tensor.shape[0])
    return tensor[:count]
"""

_ROUTED = """\
def routed(tensor):  # sends each row to one of two experts
    positive, result = tensor.detach().unsqueeze(-1).flatten(1).sum(1) > 0, torch.zeros_like(tensor)
    for expert in range(2):
        (rows,) = (positive == expert).nonzero(as_tuple=True)
        result[rows] += tensor[rows] * (expert + 2)
    return result
"""

_GATHERED = """\
def gathered(tensor):  # frees the memory and allocates it again, as FSDP does
    values = tensor.detach().clone()
    torch.ops.inductor.resize_storage_bytes_(tensor, 0)
    torch.ops.inductor.resize_storage_bytes_(tensor, tensor.numel() * tensor.element_size())
    with torch.no_grad():
        tensor.copy_(values)
"""

#: Each call begins with ``state.restart(…)``, because eager and the engine share the object.
_STATE = """\
class State:
    def restart(self, steps):
        self.steps, self.counts, self.history = steps, {"n": steps}, []


state = State()
"""

#: The source of each helper, by the name of the helper.
_HELPERS = {
    "numbers": _NUMBERS,
    "weights": _WEIGHTS,
    "hook": f"seen = []\n\n\n{_HOOK}",
    "retain": _RETAIN,
    "two": _TWO,
    "Pair": 'Pair = collections.namedtuple("Pair", ["left", "right"])\n',
    "Box": "@dataclasses.dataclass\nclass Box:\n    left: object\n    right: object\n",
    "Doubled": _DOUBLED,
    "Squared": _SQUARED,
    "Kept": _KEPT,
    "Viewed": _VIEWED,
    "Parted": _PARTED,
    "Written": _WRITTEN,
    "Noisy": _NOISY,
    "Logged": _LOGGED,
    "Overwrites": _OVERWRITES,
    "leading": _LEADING,
    "routed": _ROUTED,
    "gathered": _GATHERED,
    "state": _STATE,
}

_WORDS = re.compile(r"[A-Za-z_]\w*")


def prelude(text: str) -> list[str]:
    """Return the lines that must precede ``text``: imports, and the helpers that it names."""
    words = set(_WORDS.findall(text))
    needed = [source for name, source in _HELPERS.items() if name in words]
    imports = ["import math"] if "numbers" in words else []
    imports = ["import collections"] * ("Pair" in words or "collections" in words) + imports
    imports = imports[:-1] + ["import dataclasses"] * ("Box" in words) + imports[-1:] if imports else imports
    lines = [*imports, "", "import torch"]
    if "checkpoint" in words:
        lines.append("from torch.utils.checkpoint import checkpoint")
    for source in needed:
        lines += ["", "", *source.splitlines()]
    return lines


@functools.cache
def helpers() -> dict[str, Any]:
    """Compile all helpers and return them by name, so that the writer can run single statements."""
    namespace: dict[str, Any] = {"__name__": "program"}
    source = "\n".join(prelude(" ".join(_HELPERS)))
    exec(compile(source, "<helpers>", "exec", dont_inherit=True), namespace)
    return {name: namespace[name] for name in _HELPERS}
