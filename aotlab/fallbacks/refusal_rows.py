"""Refusals: one row for each class of `aotlab.errors.RefusedError`.

An exception of such a class has one of many messages, which names the value and the line, and ends with the id of the
class. The row explains the class. The row's program causes one of the messages.
"""

from __future__ import annotations

from aotlab.fallbacks.row import Fallback

ROWS = (
    Fallback(
        id="data-dependent",
        sentence="Python code needs a number from a traced tensor, a condition that is expensive to compute or random, "
        "or a size that depends on values",
        suggestion="choose with torch.where, or keep the number in a tensor",
        program="""
def f(x):
    return x * int(x.sum())

args = (torch.ones(2),)
""",
    ),
    Fallback(
        id="escape",
        sentence="the function accesses the memory of a traced tensor, which has none, or it leaves a setting changed",
        suggestion="move the access out of the compiled function",
        program="""
def f(x):
    return x * x.numpy().size

args = (torch.ones(2),)
""",
    ),
    Fallback(
        id="captured-tensor",
        sentence="an op gets a tensor that is neither an argument nor found in a variable, an attribute or a container",
        suggestion="pass the tensor as an argument",
        program="""
from collections import deque

weights = deque([torch.ones(2)])

def f(x):
    return x + weights[0]

args = (torch.ones(2),)
""",
    ),
    Fallback(
        id="leaked-tensor",
        sentence="the function changes an object that outlives the call, for example stores a tensor in it",
        suggestion="return the tensor, and store it outside of the compiled function",
        program="""
def f(x):
    x.doubled = x * 2
    return x.doubled

args = (torch.ones(2),)
""",
    ),
    Fallback(
        id="python-value",
        sentence="an argument is an object, and no guard can tell when its contents change",
        suggestion="pass the tensors and plain values that the object holds",
        program="""
from types import SimpleNamespace

def f(x, settings):
    return x * settings.scale

args = (torch.ones(2), SimpleNamespace(scale=2.0))
""",
    ),
    Fallback(
        id="output",
        sentence="the function returns an object that is neither a tensor nor a plain value, a tensor with attributes, "
        "or a leaf that it made to require grad, and a compiled call cannot return these",
        suggestion="return plain tensors, plain values and containers of them",
        program="""
def f(x):
    return x * 2, iter([1, 2])

args = (torch.ones(2),)
""",
    ),
    Fallback(
        id="metadata-mutation",
        sentence="the function or its caller changes the sizes, strides or memory of a tensor that the entry uses",
        suggestion="use the form that returns a new tensor, for example t() instead of t_()",
        program="""
def f(x):
    return x.sin()

args = (torch.ones(2, requires_grad=True),)

def use(f, x):
    y = f(x)
    x.data = torch.ones(3)   # before the backward of the call
    y.sum().backward()
""",
    ),
    Fallback(
        id="random-op",
        sentence="the function draws random numbers that a graph cannot draw as eager does",
        suggestion="use torch's random ops with the default generator, or pass the number as an argument",
        program="""
import random

random.seed(0)

def f(x):
    return x * random.random()

args = (torch.ones(2),)
""",
    ),
    Fallback(
        id="higher-order-op",
        sentence="an op takes functions or changes its arguments, and the trace has no rule for it",
        suggestion="call the op outside of the compiled function",
        program="""
from torch.utils.checkpoint import checkpoint

def f(x):
    return checkpoint(torch.sin, x, use_reentrant=True)

args = (torch.ones(2, requires_grad=True),)
""",
    ),
    Fallback(
        id="hooks",
        sentence="a hook is registered, and a compiled call would not run it",
        suggestion="register hooks on parameters instead",
        program="""
f = torch.nn.Linear(2, 2)
f.register_full_backward_hook(lambda module, grad_input, grad_output: None)

args = (torch.ones(1, 2),)
""",
    ),
    Fallback(
        id="subclass",
        sentence="a tensor is of a subclass that aotlab cannot unwrap",
        suggestion="pass the plain tensors, or give the class `__tensor_flatten__` and `__tensor_unflatten__`",
        program="""
class Marked(torch.Tensor):
    pass

def f(x):
    return x * 2

args = (torch.ones(2).as_subclass(Marked),)
""",
    ),
    Fallback(
        id="unsupported-tensor",
        sentence="a tensor is sparse, quantized, nested, on the meta device, or of another kind that cannot be traced",
        suggestion="convert the tensor, for example with to_dense() or dequantize()",
        program="""
def f(x):
    return x * 2

args = (torch.eye(2).to_sparse(),)
""",
    ),
    Fallback(
        id="untraceable",
        sentence="tracing the function raised an error that eager does not raise",
        suggestion="move the op that raises it out of the compiled function",
        program="""
def f(x):
    return x.to_sparse().to_dense()

args = (torch.ones(2),)
""",
    ),
    Fallback(
        id="transform",
        sentence="a compiled function, or its backward, is called under a transform or mode that it cannot support",
        suggestion="compile the function that calls the transform",
        program="""
def f(x):
    return x * 2

args = (torch.ones(2),)

def use(f, x):
    return torch.vmap(f)(x)
""",
    ),
    Fallback(
        id="double-backward",
        sentence="the backward of a compiled function is differentiated, and no derivative of it can be computed",
        suggestion="call the original function where higher derivatives are needed",
        frontend="dynamo",
        program="""
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2

def f(x):
    return Double.apply(x)

args = (torch.ones(2, requires_grad=True),)

def use(f, x):
    torch.autograd.grad(f(x).sum(), x, create_graph=True)
""",
    ),
)
