"""Rows about tensor subclasses."""

from __future__ import annotations

from aotlab.fallbacks.row import Fallback

ROWS: tuple[Fallback, ...] = (
    Fallback(
        id="subclass-in-both-grad-modes",
        sentence="{name} is {done} both in grad mode and under no_grad",
        example={"name": "a tensor subclass", "done": "changed"},
        suggestion="do both with grad mode on, or both under no_grad",
        program="""
from torch.testing._internal.two_tensor import TwoTensor

def f(x):
    x.mul_(2)
    with torch.no_grad():
        x.mul_(2)

args = (TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_() * 1,)
""",
    ),
    Fallback(
        id="subclass-changed-and-shared",
        sentence="{name}, a tensor subclass that requires grad, is changed, and {other} shares its memory",
        example={"name": "`x`", "other": "another argument"},
        suggestion="clone one of them",
        program="""
from torch.testing._internal.two_tensor import TwoTensor

def f(x, y):
    x.add_(1)
    return y * 2

x = TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_() * 1
args = (x, x.a)
""",
    ),
    Fallback(
        id="subclass-leaf-changed",
        sentence="`{name}` is a leaf that requires grad, and is changed in grad mode",
        example={"name": "x"},
        suggestion="change it under no_grad",
        program="""
from torch.testing._internal.two_tensor import TwoTensor

def f(x):
    try:
        x.add_(1)
    except RuntimeError:
        return x.detach() * 2

args = (TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_(),)
""",
    ),
    Fallback(
        id="subclass-changed-beyond-values",
        sentence="the function changes sizes, parts or attributes of `{name}` in place, and not only its values",
        example={"name": "x"},
        suggestion="make this change outside of the function",
        program="""
from torch.testing._internal.two_tensor import TwoTensor

def f(x):
    x.a = x.b
    return x * 2

args = (TwoTensor(torch.ones(3), torch.zeros(3)),)
""",
    ),
    Fallback(
        id="container-beside-subclass-changed",
        sentence="the function changes a container that is passed together with a tensor subclass",
        suggestion="return the new values, and change the container outside of the function",
        program="""
from torch.testing._internal.two_tensor import TwoTensor

def f(x, results):
    results.append(x.a * 2)
    return x * 2

args = (TwoTensor(torch.ones(3), torch.ones(3)), [])
""",
    ),
    Fallback(
        id="subclass-view-returned",
        sentence="the function returns a view of a tensor subclass that a compiled call cannot regenerate: {why}",
        example={"why": "`out` is a detached view"},
        suggestion="return a clone of the view",
        program="""
from torch.testing._internal.two_tensor import TwoTensor

def f(x):
    return x.view(-1).detach()

args = (TwoTensor(torch.ones(2, 3), torch.ones(2, 3)),)
""",
    ),
    Fallback(
        id="subclass-part-returned",
        sentence="`{name}` is a part of a tensor subclass that requires grad",
        example={"name": "out"},
        suggestion="return a clone of the part",
        program="""
from torch.testing._internal.two_tensor import TwoTensor

def f(x):
    return x.a

args = (TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_(),)
""",
    ),
    Fallback(
        id="subclass-made-to-require-grad",
        sentence="`{name}` is a leaf that the function made to require grad",
        example={"name": "out"},
        suggestion="make it outside of the function, and pass it as an argument",
        program="""
from torch.testing._internal.two_tensor import TwoTensor

def f(x):
    return TwoTensor(x, x)

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="subclass-beside-what-it-computes",
        sentence="{name} is a tensor subclass, and a value computed from it is also returned or written",
        example={"name": "`x`"},
        suggestion="return it detached, or write a clone of it",
        program="""
from torch.testing._internal.two_tensor import TwoTensor

def f(x):
    x.exp_()
    return x * 3

args = (TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_() * 1,)
""",
    ),
    Fallback(
        id="subclass-and-plain-gradient",
        sentence="a plain argument gets a plain gradient from one result, and a tensor subclass from another",
        suggestion="compute the results in two functions",
        program="""
from torch.testing._internal.two_tensor import TwoTensor

def f(x, y):
    return x * y, y * 2

x = TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_()
args = (x, torch.ones(3, requires_grad=True))
""",
    ),
    Fallback(
        id="subclass-parts-without-gradient",
        sentence="gradients flow through {name}, a `{kind}`, and not all of its parts are real floating-point numbers",
        example={"name": "`out`", "kind": "TwoTensor"},
        suggestion="call the function under no_grad, or with plain tensors",
        program="""
from torch.testing._internal.two_tensor import TwoTensor

def f(x):
    return x.square()

part = torch.ones(3, dtype=torch.complex64)
args = (TwoTensor(part, part.clone()).requires_grad_(),)
""",
    ),
    Fallback(
        id="computes-with-sparse-gradient",
        sentence="the gradient of a weight is sparse, and is more than the gradient of one lookup: {why}",
        example={"why": "the weight is looked up twice"},
        suggestion="use sparse=False",
        program="""
from torch.nn.functional import embedding

def f(weight, i, j):
    return embedding(i, weight, sparse=True) * embedding(j, weight, sparse=True)

args = (torch.ones(4, 2, requires_grad=True), torch.tensor([0, 1]), torch.tensor([2, 3]))
""",
    ),
    Fallback(
        id="fake-tensors-with-symbols",
        sentence="fake tensors have symbols for sizes, and no trace can serve all of these sizes: {why}",
        example={"why": "arguments share memory"},
        suggestion="pass fake tensors of fixed sizes",
        program="""
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

def f(x, y):
    return x * y

x = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(4), static_shapes=False)
args = (x, x.view(-1))
""",
    ),
    Fallback(
        id="subclass-traced-too-often",
        sentence="four traces of the function wrote different tensor subclasses, or computed different gradients",
        suggestion="make the function do the same in each call",
        program="""
from threading import Thread
from torch.testing._internal.two_tensor import TwoTensor

def f(*tensors):
    number = int(Thread().name[7:])  # another one at each call: Thread-1, Thread-2
    tensors[number % 9].mul_(1)

leaf = TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_()
args = tuple(leaf * 1 for _ in range(9))
""",
    ),
    Fallback(
        id="checkpoint-writes-subclass",
        sentence="a checkpoint writes `{name}`, a part of a tensor subclass",
        example={"name": "t.a"},
        suggestion="write the subclass outside of the checkpoint",
        program="""
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

def f(x, t):
    return checkpoint(lambda v: (v * t.add_(1)).sin(), x, use_reentrant=False).sum()

args = torch.ones(3, requires_grad=True), TwoTensor(torch.ones(3), torch.ones(3))
""",
    ),
)
