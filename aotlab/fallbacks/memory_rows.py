"""Rows about mutation, views and shared memory."""

from __future__ import annotations

from aotlab.fallbacks.row import Fallback

_NEW_SIZES = "use the form that returns a new tensor, for example t() instead of t_()"

ROWS: tuple[Fallback, ...] = (
    Fallback(
        id="changes-sizes-of-leaf",
        sentence="`{op}` changes the sizes of a leaf that requires grad, or of a non-leaf under no_grad",
        example={"op": "t_"},
        suggestion=_NEW_SIZES,
        program="""
def f(x):
    y = x * 2
    with torch.no_grad():
        y.t_()
    return y

args = (torch.ones(2, 3, requires_grad=True),)
""",
    ),
    Fallback(
        id="out-is-no-copy",
        sentence="`{op}` writes into `out`, and copying its result into `out` would differ from eager: {why}",
        example={"op": "mul", "why": "`out` has another shape, dtype or device than the result"},
        suggestion="assign the result of the op instead of passing `out`",
        program="""
def f(x):
    return torch.mul(x, 2, out=torch.empty(0))

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="writes-one-of-aliases",
        sentence="`{op}` writes one of several arguments that share memory",
        example={"op": "_foreach_add_"},
        suggestion="write one tensor after the other, or pass a clone of one of them",
        program="""
def f(x):
    torch._foreach_add_([x, x[:2]], 1)
    return x

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="writes-overlapping-elements",
        sentence="`{op}` may write a tensor whose elements overlap in memory",
        example={"op": "fill_"},
        suggestion="write a clone of the tensor",
        program="""
def f(x):
    return x.expand(2, 3).fill_(2)

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="writes-grad-into-integers",
        sentence="`{op}` writes values that require grad into an integer tensor",
        example={"op": "copy_"},
        suggestion="detach the values before the write",
        program="""
def f(x):
    return torch.zeros(3, dtype=torch.int64).copy_(x) * x

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="write-does-not-fit",
        sentence="`{op}` writes a result of {result} into a tensor of {own}",
        example={"op": "clamp_", "result": "shape (3, 3)", "own": "shape (3,)"},
        suggestion="give the tensor the shape and dtype of the result first",
        program="""
def f(x):
    try:
        return x.clamp_(min=torch.ones(3, 3))
    except RuntimeError:
        return x * 2

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="write-restrides-aliased-tensor",
        sentence="`{op}` writes a tensor that has an alias, and the trace would give the tensor other strides",
        example={"op": "mul_"},
        program="""
def f(x):
    x.detach().mul_(2)
    return x * 1

args = (torch.arange(16.0).view(2, 8)[:, ::3],)
""",
    ),
    Fallback(
        id="reads-what-it-writes",
        sentence="`{op}` reads memory that it also writes",
        example={"op": "addmm_"},
        suggestion="pass a clone of the operand",
        program="""
def f(x):
    y = x * 2
    return y.addmm_(y, y)

args = (torch.ones(3, 3),)
""",
    ),
    Fallback(
        id="view-before-write",
        sentence="the function uses a view that was made before a write to the same memory",
        suggestion="make the view after the write",
        program="""
def f(x):
    view = x.t()
    x.detach().mul_(2)
    return view * 3

args = (torch.ones(2, 3, requires_grad=True) * 1,)
""",
    ),
    Fallback(
        id="view-with-larger-elements",
        sentence="the function views a part of a storage as {dtype}, which has larger elements",
        example={"dtype": "torch.complex64"},
        suggestion="clone the tensor before the view",
        program="""
def f(x, y):
    x.mul_(2)
    return y.view(torch.complex64) * 2

whole = torch.ones(8)
args = (whole[:4], whole[2:])
""",
    ),
    Fallback(
        id="writes-part-of-expanded",
        sentence="the function writes a part of an {way} tensor",
        example={"way": "expanded"},
        program="""
def f(x):
    x.expand(2, 3)[0].mul_(2)
    return x * 1

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="writes-behind-special-view",
        sentence="the function writes {name}, which {why}",
        example={"name": "`x`", "why": "is viewed as bool and as another dtype"},
        program="""
def f(x):
    numbers = x.view(torch.uint8)
    numbers.add_(1)
    return numbers * 1

args = (torch.tensor([True, False]),)
""",
    ),
    Fallback(
        id="aliases-differ-in-trace",
        sentence="`{op}` returns {result} in a trace, but not in eager",
        example={"op": "unsafe_split", "result": "a copy", "instead": "use split, chunk or view"},
        suggestion="{instead}",
        program="""
def f(x):
    return torch.unsafe_split(x, 2)[0] * 2

args = (torch.ones(4),)
""",
    ),
    Fallback(
        id="op-changes-sizes",
        sentence="the op `{op}` changes sizes, strides or memory in place",
        example={"op": "t_"},
        suggestion=_NEW_SIZES,
        program="""
def f(x):
    y = x * 2
    torch.ops.aten.t_(y)
    return y + 1

args = (torch.ones(2, 3),)
""",
    ),
    Fallback(
        id="resizes-storage",
        sentence="`{op}` resizes a storage",
        example={"op": "resize_storage_bytes_"},
        suggestion="make a new tensor",
        program="""
def f(x):
    y = x * 2
    torch.ops.inductor.resize_storage_bytes_(y, 64)
    return y

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="sets-other-memory",
        sentence="`{op}` gives {name} other memory",
        example={"op": "set_", "name": "`y`"},
        suggestion="copy the values with copy_",
        program="""
def f(x):
    y = x * 2
    y.set_(x)
    return y + 1

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="reads-uncertain-strides",
        sentence="the function reads the strides of {name}, which a trace does not know for dimensions of size one",
        example={"name": "`y`"},
        suggestion="compute with the shape, or with contiguous tensors",
        program="""
def f(x):
    y = x * 2
    return y * y.stride(0)

args = (torch.arange(3.0).reshape(3, 1, 1).permute(2, 1, 0),)
""",
    ),
    Fallback(
        id="output-before-write",
        sentence="`{output}` is a view of {base} that was made before a write to that tensor",
        example={"output": "out", "base": "`x`"},
        suggestion="make the view after the write",
        program="""
def f(x):
    turned = x.t()
    x.mul_(2)
    return turned

args = (torch.ones(2, 3, requires_grad=True) * 1,)
""",
    ),
    Fallback(
        id="output-of-several-inputs",
        sentence="an output shares memory with several inputs, and aotlab cannot tell of which one it is a view",
        suggestion="return a clone of the output",
        program="""
def f(x, y):
    x.mul_(2)
    return y.view(-1), x[0]

flat = torch.ones(4)
args = flat.view(2, 2).detach(), flat.view(2, 2).detach()
""",
    ),
    Fallback(
        id="view-with-own-history",
        sentence="`{output}` shares memory with `{name}`, but autograd does not treat it as a view of `{name}`",
        example={"output": "out", "name": "x"},
        suggestion="return a clone of the output",
        program="""
class Flatten(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view(-1))
    backward = staticmethod(lambda ctx, gradient: gradient.view(2, 3))

def f(x):
    return Flatten.apply(x)

args = (torch.ones(2, 3, requires_grad=True),)
""",
    ),
    Fallback(
        id="view-cannot-be-repeated",
        sentence="no view ops can regenerate the output `{output}` from its base",
        example={"output": "out"},
        suggestion="return a clone of the output",
        program="""
def f(x):
    return x.conj().imag

args = (torch.ones(3, dtype=torch.complex64),)
""",
    ),
    Fallback(
        id="inference-tensor-written",
        sentence="`{name}` was made under inference_mode and is written",
        example={"name": "x"},
        suggestion="call the function under torch.inference_mode(), or pass a clone that was made outside",
        program="""
def f(x):
    return x.detach().add_(1)

with torch.inference_mode():
    x = torch.ones(3)
args = (x,)
""",
    ),
    Fallback(
        id="no-synthetic-base",
        sentence="inputs share memory, one of them is written, and no synthetic base can replace them",
        suggestion="pass a clone of one of them",
        program="""
def f(x, y):
    x.mul_(2j)
    return y + 1

x = torch.ones(3, dtype=torch.complex64)
args = x, x.conj()
""",
    ),
    Fallback(
        id="shared-input-gains-history",
        sentence="a write gives `{name}` an autograd history, and `{name}` shares memory with another tensor",
        example={"name": "y"},
        suggestion="pass a clone of `{name}`",
        program="""
def f(x, y, w):
    return y.mul_(w).sum()

flat = torch.ones(4)
args = flat[:2].detach(), flat[1:3].detach(), torch.ones(2, requires_grad=True)
""",
    ),
    Fallback(
        id="shared-version-counter",
        sentence="{names} share a version counter, as parts of one buffer, and one of them is written",
        example={"names": "`x` and `y`"},
        suggestion="pass a clone of one of them",
        program="""
def f(x, y):
    z = x.abs()
    y.mul_(2)
    return z

flat = torch.zeros(8)
args = flat[:4].detach().requires_grad_(), flat[4:].detach()
""",
    ),
    Fallback(
        id="outputs-without-common-base",
        sentence="the outputs {outputs} share memory, and autograd does not treat them as views of one tensor",
        example={"outputs": "`out`"},
        suggestion="return clones",
        program="""
class Flatten(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view(-1))
    backward = staticmethod(lambda ctx, gradient: gradient.view(2, 3))

def f(x):
    return Flatten.apply(x * 2)

args = (torch.ones(2, 3, requires_grad=True),)
""",
    ),
    Fallback(
        id="version-moves-without-write",
        sentence="the function increases the version counter of `{name}`, but writes no values to `{name}`",
        example={"name": "x"},
        suggestion="call increment_version(), or normalize the weight that has `max_norm`, outside of the function",
        program="""
def f(x):
    torch.autograd.graph.increment_version(x)
    return x * 2

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="as-strided-beyond-tensor",
        sentence="`as_strided` reaches memory outside of the tensor",
        suggestion="pass a tensor that covers this memory",
        program="""
def f(x):
    return x.as_strided((4,), (1,)) * 2

args = (torch.ones(4)[:2],)
""",
    ),
    Fallback(
        id="depends-on-storage-offset",
        sentence="`{op}` depends on the storage offset of {name}, an argument that {why}",
        example={"op": "storage_offset", "name": "`x`", "why": "is written"},
        suggestion="call it outside of the function, or on a clone",
        program="""
def f(x):
    x.mul_(2)
    return x * x.storage_offset()

args = (torch.ones(4)[1:],)
""",
    ),
    Fallback(
        id="gives-other-elements",
        sentence="`{op}` changes the size or the memory of a tensor in place",
        example={"op": "resize_"},
        suggestion="make a new tensor",
        program="""
def f(x):
    y = x * 2
    y.resize_(2)
    return y + 1

args = (torch.ones(2, 2),)
""",
    ),
    Fallback(
        id="changes-sizes-of-argument",
        sentence="`{op}` changes the sizes or the history of {name}, an argument that {why}",
        example={"op": "detach_", "name": "`x`", "why": "is detached"},
        suggestion=_NEW_SIZES,
        program="""
def f(x):
    x.detach_()
    return x * 2

args = (torch.ones(2, 3, requires_grad=True) * 1,)
""",
    ),
    Fallback(
        id="changes-sizes-of-view",
        sentence="`{op}` changes the sizes or the history of a view, or of a tensor that has views",
        example={"op": "t_"},
        suggestion=_NEW_SIZES,
        program="""
def f(x):
    y = x * 2
    y[:1].t_()
    return y

args = (torch.ones(2, 3),)
""",
    ),
    Fallback(
        id="changes-sizes-with-hook",
        sentence="`{op}` changes the sizes or the history of a tensor with a hook",
        example={"op": "detach_"},
        suggestion="use the form that returns a new tensor, for example detach() instead of detach_()",
        program="""
def f(x):
    y = x * 2
    y.register_hook(torch.neg)
    y.detach_()
    return y + x

args = (torch.ones(3, requires_grad=True),)
""",
    ),
)
