"""Rows about single ops and random numbers."""

from __future__ import annotations

from aotlab.errors import BY_DYNAMO
from aotlab.fallbacks.row import Fallback

ROWS: tuple[Fallback, ...] = (
    Fallback(
        id="inference-mode-between-ops",
        sentence="inference_mode is turned on or off between ops",
        suggestion="use no_grad there, or inference_mode around the whole function",
        program="""
def f(x):
    y = x * 2
    with torch.inference_mode():
        return y + 1

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="autocast-casts-differently",
        sentence="under autocast, `{op}` casts its operands differently in a trace than in eager",
        example={"op": "addmm_"},
        suggestion="cast the operands yourself, or call the op with autocast off",
        program="""
def f(x):
    with torch.autocast("cpu"):
        return torch.zeros(3, 3).addmm_(x, x)

args = (torch.ones(3, 3),)
""",
    ),
    Fallback(
        id="polygamma-in-place",
        sentence="a trace cannot record `{op}`",
        example={"op": "polygamma_"},
        suggestion="write `x.copy_(torch.polygamma(n, x))`",
        program="""
def f(x):
    return (x * 2).polygamma_(1)

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="takes-only-bfloat16-in-trace",
        sentence="`{op}` takes only bfloat16 in a trace",
        example={"op": "_grouped_mm"},
        suggestion=f"cast its arguments to bfloat16, or {BY_DYNAMO}",
        program="""
def f(x, w):
    return torch._grouped_mm(x, w, offs=torch.tensor([2, 4], dtype=torch.int32))

args = (torch.ones(4, 16), torch.ones(2, 16, 16))
""",
    ),
    Fallback(
        id="draws-in-order-of-memory",
        sentence="`{op}` draws random numbers into a tensor that is not contiguous, and a graph would draw them in "
        "another order than eager",
        example={"op": "normal"},
        suggestion="draw into a contiguous tensor, for example into the result of contiguous()",
        program="""
def f(x):
    return x[::2].normal_() * 2

args = (torch.ones(40),)
""",
    ),
    Fallback(
        id="effects-in-backward",
        sentence="a backward calls `{op}`, which has side effects",
        example={"op": "catalogue.tell.default"},
        suggestion="call it in the forward",
        program="""
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

@torch.library.custom_op("catalogue::tell", mutates_args=())
def tell(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

tell.register_fake(lambda x: torch.empty_like(x))
_register_effectful_op("catalogue::tell", _EffectType.ORDERED)

class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return tell(gradient)

def f(x, w):
    return Late.apply(x) @ w

args = (torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True))
""",
    ),
    Fallback(
        id="unregistered-effect",
        sentence="`{op}` returns nothing, and is not registered to have effects, so Inductor would drop the call",
        example={"op": "catalogue.silent.default"},
        suggestion="register its effects (torch.library), or let it return a tensor that is used",
        program="""
@torch.library.custom_op("catalogue::silent", mutates_args=())
def silent(x: torch.Tensor) -> None:
    pass

silent.register_fake(lambda x: None)

def f(x):
    silent(x)
    return x.sin()

args = (torch.ones(3),)
options = {"backend": "inductor"}
""",
    ),
    Fallback(
        id="transformer-kernel-differs",
        sentence="`{kind}` {what} if no gradient is needed",
        example={"kind": "TransformerEncoderLayer", "what": "returns autocast's dtype"},
        suggestion="create the module with enable_nested_tensor=False, or call it without autocast",
        program="""
layer = torch.nn.TransformerEncoderLayer(4, 1, 4, batch_first=True).eval().requires_grad_(False)

def f(x):
    with torch.autocast("cpu"):
        return layer(x)

args = (torch.ones(1, 2, 4),)
""",
    ),
    Fallback(
        id="complex-vectors-with-grad",
        sentence="`{op}` returns complex vectors that require grad, and eager's backward raises for some losses",
        example={"op": "linalg_eigh"},
        suggestion="call it outside of the function, or with a detached tensor",
        program="""
def f(x):
    return torch.linalg.eigh(x)[1].abs()

args = (torch.eye(2, dtype=torch.complex64, requires_grad=True),)
""",
    ),
    Fallback(
        id="function-unfit-for-op",
        sentence="a function passed to `{op}` {what}",
        example={"op": "cond", "what": "returns its argument, or one tensor twice", "instead": "return a clone"},
        suggestion="{instead}",
        program="""
def f(x):
    return torch.ops.higher_order.cond(x.sum() > 0, lambda x: (x,), lambda x: (x.sin(),), (x,))[0]

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="results-of-functions-differ",
        sentence="in `{op}`, {what} differ in their shapes, strides, dtypes or devices",
        example={"op": "cond", "what": "the results of its two functions"},
        suggestion="give them equal shapes, strides, dtypes and devices",
        program="""
def f(x):
    return torch.ops.higher_order.cond(x.sum() > 0, lambda x: (x.sin(),), lambda x: (x[:1].sin(),), (x,))[0]

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="loop-carries-numbers",
        sentence="`{op}` carries a number from one iteration to the next",
        example={"op": "while_loop"},
        suggestion="carry a tensor instead",
        program="""
def f(x):
    step = lambda i, x: (i + 1, x * 2)
    return torch.ops.higher_order.while_loop(lambda i, x: i < 3, step, (0, x), ())[1]

args = (torch.ones(3),)
""",
    ),
)
