"""Rows about gradients, hooks and checkpoints."""

from __future__ import annotations

from aotlab.fallbacks.row import Fallback

ROWS: tuple[Fallback, ...] = (
    Fallback(
        id="inference-mode-then-grad-mode-changed",
        sentence="the function enters inference mode, and leaves grad mode changed",
        suggestion="restore grad mode before the function returns",
        program="""
def f(x):
    with torch.inference_mode():
        y = x * 2
    torch.set_grad_enabled(False)
    return y

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="grad-mode-in-inference-mode",
        sentence="grad mode is turned on under inference_mode",
        suggestion="use no_grad in place of inference_mode",
        program="""
def f(x):
    with torch.inference_mode(), torch.enable_grad():
        return x * 2

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="history-of-no-grad-view",
        sentence="{name} is a view that was made under no_grad, and its history is read or changed",
        example={"name": "`x`"},
        suggestion="make the view with grad mode on, or read its history outside of the function",
        program="""
def f(x):
    return x * 2 if x.is_leaf else x * 3

with torch.no_grad():
    view = torch.ones(3, requires_grad=True)[:2]
args = (view,)
""",
    ),
    Fallback(
        id="view-set-to-require-grad",
        sentence="{name} is a view, and is made to require grad",
        example={"name": "`view`"},
        suggestion="clone the view first",
        program="""
def f(x):
    view = x[:2]
    view.requires_grad_()
    return view * 2

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="saved-tensors-hooks-inside",
        sentence="`saved_tensors_hooks` are set inside of the function",
        suggestion="set them around the call",
        program="""
def f(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        return x.sin()

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="quirk-is-off",
        sentence="`{op}` is called, and the quirk {quirk} is switched off",
        example={"op": "register_hook", "quirk": "hooks"},
        suggestion="add {quirk} to aotlab.config.quirks",
        program="""
aotlab.config.quirks = ()

def f(x):
    y = x * 2
    y.register_hook(lambda gradient: gradient * 3)
    return y

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="checkpoint-draws-on-gpu",
        sentence="a checkpoint draws random numbers on a GPU, and a graph cannot read the state of that generator",
        suggestion="draw the random numbers outside of the checkpoint",
        program="""
from torch.utils.checkpoint import checkpoint

def f(x):
    return checkpoint(lambda x: x.sin() * torch.rand_like(x), x, use_reentrant=False)

args = (torch.ones(3, device="cuda", requires_grad=True),)
""",
    ),
    Fallback(
        id="inference-tensor-requires-grad",
        sentence="an argument or a parameter that requires grad was made in inference mode",
        suggestion="make it outside of inference mode, or call the function under no_grad()",
        program="""
def f(x):
    return x * 2

with torch.inference_mode():
    args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="anomaly-mode",
        sentence="the function is called in anomaly mode, which checks each autograd node of eager",
        suggestion="call it outside of torch.autograd.detect_anomaly()",
        program="""
torch.autograd.set_detect_anomaly(True)

def f(x):
    return x * 2

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="partitioner-drops-unused-op",
        sentence="the partitioner would drop `{op}`, an unused op that may raise or draws random numbers",
        example={"op": "aten.gather.default"},
        suggestion="use aotlab.default_partition",
        program="""
from torch._functorch.partitioners import min_cut_rematerialization_partition

def f(x, i):
    x.sin().gather(0, i)
    return x.sin() * x

args = (torch.ones(3, requires_grad=True), torch.tensor([1]))
options = {"partitioner": min_cut_rematerialization_partition}
""",
    ),
    Fallback(
        id="changes-requires-grad",
        sentence="the function changes whether `{name}` requires grad, and aotlab cannot repeat this change",
        example={"name": "x"},
        suggestion="call requires_grad_() outside of the function",
        program="""
def f(x):
    y = x * 2
    x.requires_grad_(False)
    return y

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="view-of-new-leaf",
        sentence="the function returns a view of a leaf that it made to require grad, but not the leaf ({outputs})",
        example={"outputs": "`out`"},
        suggestion="return the leaf too, or make it outside of the function and pass it in",
        program="""
def f(x):
    leaf = (x * 2).requires_grad_()
    return leaf[:1]

args = (torch.ones(3),)
""",
    ),
    Fallback(
        id="backward-raises",
        sentence="the backward raises {error}",
        example={"error": "RuntimeError: one of the variables needed for gradient computation"},
        suggestion="call the function under torch.no_grad() if you need no gradient",
        program="""
def f(x):
    y = x.exp()
    y.add_(1)
    return y

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="inference-tensor-kept",
        sentence="a custom Function or a checkpoint may save an inference tensor, which autograd does not allow",
        suggestion="pass a clone of the tensor that is made outside of inference_mode",
        program="""
from torch.utils.checkpoint import checkpoint

def f(x, w):
    return checkpoint(lambda v: (v + w).sin(), x, use_reentrant=False)

with torch.inference_mode():
    w = torch.ones(3)
args = torch.ones(3, requires_grad=True), w
""",
    ),
    Fallback(
        id="backward-writes-in-place",
        sentence="the backward writes in place to a tensor that the function computed, or to shared memory",
        suggestion="compute a new tensor instead of the written one",
        program="""
class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.half = x / 2
        return ctx.half.sin()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.half.cos_().mul_(gradient / 2)

def f(x):
    return Half.apply(x)

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="writes-view-with-grad-base",
        sentence="the function writes `{name}`, a view of a tensor that requires grad or has a hook",
        example={"name": "x"},
        suggestion="pass that tensor, or a clone of the view",
        program="""
def f(x):
    x.mul_(2)
    return x * 1

view = (torch.ones(2, requires_grad=True) * 1)[:1]
view.register_hook(lambda gradient: gradient * 2)
args = (view,)
""",
    ),
    Fallback(
        id="writes-view-that-retains-grad",
        sentence="the function writes `{name}`, which retains its gradient and is a view or changes its sizes",
        example={"name": "x"},
        suggestion="pass a clone of the view",
        program="""
def f(x):
    x.mul_(2)
    return x * 1

x = (torch.ones(4, requires_grad=True) * 1)[:2]
x.retain_grad()
args = (x,)
""",
    ),
    Fallback(
        id="returns-some-of-several-views",
        sentence="an output is one of several views that one call made, and gradients flow through another of them",
        suggestion="return all of the views or none",
        program="""
def f(x):
    first, second = x.unbind(0)
    return first, second.exp()

args = (torch.ones(2, 3, requires_grad=True) * 1,)
""",
    ),
    Fallback(
        id="gradient-reaches-no-input",
        sentence="a gradient that reaches no input calls hooks or a custom Function, or may raise",
        suggestion="detach the tensors that need no gradient",
        program="""
def f(x):
    y = x * 2
    with torch.no_grad():
        v = y.view(-1)
    return y, v.sin()

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="no-grad-view-of-leaf-view",
        sentence="`{name}` requires grad, its base does not, and a view of `{name}` is made with grad mode off",
        example={"name": "x"},
        suggestion="pass a tensor that is not a view",
        program="""
def f(x):
    with torch.no_grad():
        scale = x.view(-1).sum()
    return x * scale

args = (torch.ones(4)[1:].requires_grad_(),)
""",
    ),
    Fallback(
        id="selective-checkpoint-keeps-written",
        sentence="the function writes in place to a tensor that a selective checkpoint saves",
        suggestion="write a clone of the tensor",
        program="""
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts as contexts

def inner(x):
    y = x.sin()
    z = y.exp()
    y.detach().mul_(2)
    return z * 2

def f(x):
    keep = lambda: contexts([torch.ops.aten.sin.default], allow_cache_entry_mutation=True)
    return checkpoint(inner, x, use_reentrant=False, context_fn=keep)

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="backwards-share-written-input",
        sentence="the backward writes `{name}`, which several autograd nodes of the call read or write",
        example={"name": "b"},
        suggestion="write `{name}` outside of checkpoints and backwards",
        program="""
from torch.utils.checkpoint import checkpoint

def f(x, y, b):
    def inner(v):
        return (v * b.add_(1)).sin()
    return [checkpoint(inner, v, use_reentrant=False) for v in (x, y)]

args = (*torch.ones(2, 3, requires_grad=True), torch.zeros(3))
""",
    ),
    Fallback(
        id="checkpoint-differs-when-repeated",
        sentence="a checkpoint computes other results when it runs its function again{raises}",
        example={"raises": ""},
        suggestion="let the function change no object that it reads",
        program="""
from torch.utils.checkpoint import checkpoint

def f(x):
    turns = [1, 2, 3]
    return checkpoint(lambda v: (v * turns.pop()).sin(), x, use_reentrant=False)

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="hook-holds-call-object",
        sentence="a hook {state}",
        example={"state": "holds `seen`, a `list` of the call"},
        suggestion="let hooks hold only objects from outside of the function, or register them there",
        program="""
def f(x):
    seen = []
    y = x * 2
    y.register_hook(lambda gradient: seen.append(gradient))
    return y

args = (torch.ones(3, requires_grad=True),)
""",
    ),
    Fallback(
        id="view-of-hooked-view",
        sentence="{name} is a view of a view with a hook",
        example={"name": "`out`"},
        suggestion="return a clone of it",
        program="""
def f(x):
    view = x.view(-1)
    view.register_hook(torch.neg)
    return view[1:]

args = (torch.ones(2, 2, requires_grad=True),)
""",
    ),
    Fallback(
        id="hook-on-no-grad-view",
        sentence="a hook is registered on a view that was made under no_grad",
        suggestion="make the view with grad mode on",
        program="""
def f(x):
    with torch.no_grad():
        view = x.view(-1)
    view.register_hook(torch.neg)
    return view * 2

args = (torch.ones(2, 2, requires_grad=True),)
""",
    ),
    Fallback(
        id="another-hook-on-written-view",
        sentence="a view that has a hook is written, and gets another hook",
        suggestion="register the hook on a clone of the view",
        program="""
def f(x):
    view = (x * 2).view(-1)
    view.register_hook(torch.neg)
    view.mul_(3)
    view.register_hook(torch.exp)
    return view * 2

args = (torch.ones(2, 2, requires_grad=True),)
""",
    ),
    Fallback(
        id="hook-may-get-none",
        sentence="a hook on one of several results of an op may be called with None",
        suggestion="register the hook on a clone of the result",
        program="""
def f(x):
    first, second = x.unbind(0)
    first.register_hook(torch.neg)
    return first * 2, second * 3

args = (torch.ones(2, 2, requires_grad=True),)
""",
    ),
    Fallback(
        id="grad-inside",
        sentence="the function calls `torch.autograd.grad`, and {what}",
        example={"what": "hooks are registered before it"},
        suggestion="compile a function that returns the loss, and call torch.autograd.grad outside of it",
        program="""
def f(x):
    y = x * 2
    y.register_hook(torch.neg)
    return torch.autograd.grad(y.sum(), x)[0]

args = (torch.ones(3, requires_grad=True),)
""",
    ),
)
