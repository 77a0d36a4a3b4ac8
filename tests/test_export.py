"""Exported graphs, compared with eager bit for bit, and their signatures, compared with the modules."""

from __future__ import annotations

import copy
import inspect
import random
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import aotlab
from aotlab import config
from aotlab.errors import AotlabError, MetadataMutationError, OutputError, RefusedError, UsageError
from aotlab.export import GraphSignature
from tests.engine_helpers import global_torch_state, leaf
from tests.test_pipeline import HARMLESS, poison


class Of(nn.Module):
    """A module of a function, with its parameters, buffers and submodules as attributes."""

    def __init__(self, function, buffers=(), **attributes):
        super().__init__()
        self.function = function
        for name, value in attributes.items():
            if name in buffers:
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, *args):
        return self.function(self, *args)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens)).tanh().sum()


class Counting(nn.Module):
    """Two buffers with the same value, one that counts, and an input that is written."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("first", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("second", torch.zeros(3))

    def forward(self, x, seen):
        mean = x.mean(0)
        self.second.copy_(mean)
        self.first.copy_(mean)
        self.calls += 1
        seen.add_(self.calls)
        out = self.linear(x)
        return out.square().sum(), out.detach(), out.detach()[0], seen, mean, mean


class Twice(nn.Module):
    """A module that is registered at two places, so that its parameters have two names each."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)
        self.two = self.one

    def forward(self, x):
        return self.two(self.one(x).relu()).sum()


def attention(m, x):
    """Attend by halves of a projection."""
    q, k, v = m.qkv(x).view(2, 4, 3, 8).unbind(2)
    return nn.functional.scaled_dot_product_attention(q, k, v).square().mean()


def nested(m, pair, options):
    """Nest inputs and outputs."""
    x, y = pair
    return {"loss": (m.w * x + y * options["scale"]).sum(), "rest": [(x + 1).detach(), None, 3]}


@dataclass
class Pair:
    """A container that is no pytree."""

    first: torch.Tensor


def x43():
    """Make an input."""
    return torch.randn(4, 3)


#: name → (the module, its arguments, the number of the loss among its outputs, None without one)
CASES = {
    "linear": (lambda: nn.Linear(3, 2), lambda: (x43(),), None),
    "linear with a loss": (lambda: Of(lambda m, x: (m.linear(x).sum(),), linear=nn.Linear(3, 2)), lambda: (x43(),), 0),
    "batch norm in training": (
        lambda: Of(lambda m, x: m.net(x).square().sum(), net=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))),
        lambda: (x43(),),
        0,
    ),
    "an LSTM": (lambda: Of(lambda m, x: m.l(x)[0].sum(), l=nn.LSTM(3, 4)), lambda: (torch.randn(5, 2, 3),), 0),
    "a checkpoint": (
        lambda: Of(lambda m, x: checkpoint(lambda y: m.l(y).sin(), x, use_reentrant=False).sum(), l=nn.Linear(3, 3)),
        lambda: (x43(),),
        0,
    ),
    "weight norm": (
        lambda: Of(lambda m, x: m.l(x).sum(), l=nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))),
        lambda: (x43(),),
        0,
    ),
    "a transformer": (
        lambda: Of(lambda m, x: m.l(x).square().sum(), l=nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
        lambda: (torch.randn(2, 5, 8),),
        0,
    ),
    "convolution": (
        lambda: Of(lambda m, x: m.net(x).mean(), net=nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2))),
        lambda: (torch.randn(2, 2, 8, 8),),
        0,
    ),
    "tied embeddings": (Tied, lambda: (torch.tensor([1, 2, 2, 0]),), 0),
    "twice": (Twice, lambda: (x43(),), 0),
    "attention": (lambda: Of(attention, qkv=nn.Linear(8, 24)), lambda: (torch.randn(2, 4, 8),), 0),
    "dropout in eval": (
        lambda: Of(lambda m, x: m.net(x).sum(), net=nn.Sequential(nn.Linear(3, 2), nn.Dropout())).eval(),
        lambda: (x43(),),
        0,
    ),
    "buffers and inputs written": (Counting, lambda: (x43(), torch.zeros(2, dtype=torch.long)), 0),
    "nested": (
        lambda: Of(nested, w=nn.Parameter(torch.randn(3))),
        lambda: ((x43(), leaf(4, 3)), {"scale": 2.5, "unused": torch.ones(1)}),
        0,
    ),
    "the loss is no first output": (
        lambda: Of(lambda m, x: [m.w.detach() * 2, x, (m.w * x).sum().view(1)], w=nn.Parameter(torch.randn(3))),
        lambda: (x43(),),
        2,
    ),
    "the loss is a view": (
        lambda: Of(lambda m, x: ((m.w * x)[1, 2],), w=nn.Parameter(torch.randn(3))),
        lambda: (leaf(4, 3),),
        0,
    ),
    "an input that requires grad returned": (
        lambda: Of(lambda m, x: (x, x + m.w), w=nn.Parameter(torch.ones(1))), lambda: (leaf(1),), None
    ),
    "the loss is a parameter": (lambda: Of(lambda m: (m.w, m.w.detach() + 1), w=nn.Parameter(torch.ones(1))), tuple, 0),
    "one gradient for two": (
        lambda: Of(lambda m, x: (m.w + x).sum(), w=nn.Parameter(torch.randn(4, 3))), lambda: (leaf(4, 3),), 0
    ),
    "frozen": (
        lambda: Of(lambda m, x: (m.w * x * m.v).sum(), w=nn.Parameter(torch.randn(3), False), v=nn.Linear(3, 1).weight),
        lambda: (x43(),),
        0,
    ),
    "an input viewed and written": (
        lambda: Of(lambda m, x: (x.view(-1), x.add_(m.w), x[0]), w=nn.Parameter(torch.randn(3))),
        lambda: (x43(),),
        None,
    ),
    "a parameter written": (
        lambda: Of(lambda m, x: m.w.mul_(2) * x, w=nn.Parameter(torch.randn(3))), lambda: (x43(),), None
    ),
    "sizes returned": (lambda: Of(lambda m, x: (x.size(0), x * 2, x.numel() + 1, x.dtype)), lambda: (x43(),), None),
    "ops that stay": (lambda: Of(lambda m, x: (x * torch.tensor([1.0, 2.0, 3.0]), x.sum(0))), lambda: (x43(),), None),
}  # fmt: skip


def spectrum(m, x):
    """Transform a signal, by the function and by the method."""
    by_method = x.stft(16, window=torch.ones(16), return_complex=True)
    return (torch.stft(x, 16, window=torch.ones(16), return_complex=True) + by_method).abs()


def chosen(m, x):
    """Choose by a value, with operands in containers, and make a second choice inside."""

    def true(given, scale):
        y = given["y"].sin()
        y.add_(5)
        return torch.cond(y.sum() > 5, lambda y: [(y * 3).cos()], lambda y: [y + 1], (y,))[0], scale * 2

    def false(given, scale):
        return given["y"] * scale, scale + 1

    out, scale = torch.cond(x.sum() > 0, true, false, ({"y": m.l(x)}, m.scale * 3))
    return (out * scale).sum()


def chosen_around(m, x):
    """Choose between functions with closures over parameters, a buffer and a value, and make a second choice inside."""
    y = (x * m.scale).sin()

    def true(x):
        return torch.cond(y.sum() > 0, lambda: m.l(x) + y, lambda: y * m.b)

    return (torch.cond(x.sum() > 0, true, m.other, (x,)) * y).sum()


_AROUND = {"l": nn.Linear(3, 3), "other": nn.Linear(3, 3), "scale": nn.Parameter(torch.ones(3) * 2)}
CASES["a choice around"] = (lambda: Of(chosen_around, ("b",), b=torch.ones(3) * 4, **_AROUND), lambda: (x43(),), 0)
CASES["the other choice around"] = (CASES["a choice around"][0], lambda: (-x43().abs(),), 0)
CASES["a choice"] = (lambda: Of(chosen, l=nn.Linear(3, 3), scale=nn.Parameter(torch.ones(3) * 2)), lambda: (x43(),), 0)
CASES["the other choice"] = (CASES["a choice"][0], lambda: (-x43().abs(),), 0)


def values_of(module):
    """Return parameters and buffers by name, in the order of the graph."""
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return {**dict(parameters), **dict(buffers)}


def snapshot(tensors):
    """Copy values."""
    return [t.detach().clone() if isinstance(t, torch.Tensor) else t for t in tensors]


def assert_same(found, expected):
    """Compare bit for bit."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        else:
            assert a == b


def copied(args):
    """Copy arguments, as leaves."""
    return pytree.tree_map(
        lambda t: t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t, args
    )


def run_beside_eager(graph, signature, module, args, loss):
    """Run a graph beside the module itself, and compare all results according to the signature."""
    eager, given = copy.deepcopy(module), copied(args)
    own, leaves = values_of(module), pytree.tree_leaves(args)
    inputs = [*own.values(), *leaves]
    before = snapshot(inputs)
    with torch.no_grad():
        returned = graph(*inputs)
    assert_same(inputs, before)  # the graph writes nothing

    with torch.set_grad_enabled(loss is not None):
        result = eager(*given)
    outputs = pytree.tree_leaves(result)
    after, left = snapshot(values_of(eager).values()), snapshot(pytree.tree_leaves(given))
    outputs_after = snapshot(outputs)
    if loss is not None:
        outputs[loss].sum().backward() if outputs[loss].dim() else outputs[loss].backward()

    placed = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    names = [*own, *placed[len(own) :]]
    assert signature.user_inputs == placed[len(own) :]
    assert {**signature.inputs_to_parameters, **signature.inputs_to_buffers} == dict(zip(placed, own, strict=False))
    assert [*signature.parameters, *signature.buffers] == list(own)
    written = {
        **signature.parameters_to_mutate,
        **signature.buffers_to_mutate,
        **signature.user_inputs_to_mutate,
    }
    named = [getattr(node, "name", None) for node in graph.graph.output_node().args[0]]
    assert named[: len(written)] == list(written)
    new = dict(zip(written.values(), returned, strict=False))
    for name, was, value in zip(names, before, [*after, *left], strict=True):
        assert_same([new.get(name, was)], [value])  # a written value is new, all others are unchanged
    count = len(written) + len(signature.user_outputs)
    assert named[len(written) : count] == signature.user_outputs
    user_outputs = returned[len(written) : count]
    assert_same(pytree.tree_leaves(pytree.tree_unflatten(list(user_outputs), signature.out_spec)), outputs_after)
    assert pytree.tree_structure(result) == signature.out_spec
    assert pytree.tree_structure(((*own.values(), *args), {})) == signature.in_spec
    if loss is None:
        assert signature.backward_signature is None
        assert len(returned) == count
        return
    backward = signature.backward_signature
    assert backward.loss_output == signature.user_outputs[loss]
    found = {**backward.gradients_to_parameters, **backward.gradients_to_user_inputs}
    assert named[count:] == list(found)
    tensors = dict(zip(names, [*values_of(eager).values(), *pytree.tree_leaves(given)], strict=True))
    for name, gradient in zip(found.values(), returned[count:], strict=True):
        assert_same([gradient], [tensors[name].grad])
    with_gradient = {id(tensors[name]) for name in found.values()}
    assert with_gradient == {id(t) for t in tensors.values() if getattr(t, "requires_grad", False) and t.is_leaf}


def export(module, args, loss=None, **settings):
    """Export a module, and see that nothing of it or of the arguments changed."""
    held = [*values_of(module).values(), *pytree.tree_leaves(args)]
    before, versions = snapshot(held), [t._version for t in held if isinstance(t, torch.Tensor)]
    graph, signature = aotlab.aot_export_module(
        mod=module, args=args, trace_joint=loss is not None, output_loss_index=loss, **settings
    )
    assert_same(held, before)
    assert versions == [t._version for t in held if isinstance(t, torch.Tensor)]
    assert all(getattr(t, "grad", None) is None for t in held)
    writes = [n for n in graph.graph.nodes if n.op == "call_function" and getattr(n.target, "_schema", None)]
    assert not any(node.target._schema.is_mutable for node in writes)
    assert all(node.users for node in writes if node.target is torch.ops.aten.sym_size.int)
    return graph, signature


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", CASES)
def test_inference(name, dynamic):
    """Outputs and new values are eager's under no_grad."""
    torch.manual_seed(0)
    make, arguments, _ = CASES[name]
    module, args = make(), arguments()
    graph, signature = export(module, args, dynamic_shapes=dynamic)
    run_beside_eager(graph, signature, module, args, None)
    assert GraphSignature.from_json(signature.to_json()) == signature


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2] is not None])
def test_joint(name, dynamic):
    """The joint graph equals eager. Its gradients equal the gradients of the loss's backward."""
    torch.manual_seed(0)
    make, arguments, loss = CASES[name]
    module, args = make(), arguments()
    graph, signature = export(module, args, loss, dynamic_shapes=dynamic)
    run_beside_eager(graph, signature, module, args, loss)
    assert GraphSignature.from_json(signature.to_json()) == signature


@pytest.mark.parametrize("loss", [None, 0])
def test_other_sizes(loss):
    """A graph with symbolic sizes serves others; one for the sizes of its arguments does not."""
    module = Of(
        lambda m, x, y: (m.net(x) + y.size(0) * x.size(0)).square().sum().div(x.shape[0] + y.shape[0]),
        net=nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
    )
    graph, signature = export(module, (x43(), torch.ones(5)), loss, dynamic_shapes=True)
    for rows, length in (4, 5), (9, 2), (2, 7):
        run_beside_eager(graph, signature, module, (torch.randn(rows, 3), torch.ones(length)), loss)
    assert "x.size(1) == 3" in graph.meta["assumes"] or "args[0].size(1) == 3" in graph.meta["assumes"]
    sizes = CASES["sizes returned"][0]()
    graph_of_sizes, of_sizes = export(sizes, (x43(),), dynamic_shapes=True)
    run_beside_eager(graph_of_sizes, of_sizes, sizes, (torch.randn(6, 2),), None)
    static, signature = export(module, (x43(), torch.ones(5)), loss, dynamic_shapes=False)
    assert static.meta["assumes"] == ()
    with pytest.raises(AssertionError):
        run_beside_eager(static, signature, module, (x43(), torch.ones(7)), loss)


def test_sizes_that_cannot_vary():
    """If a kernel has fixed sizes only, the sizes of the arguments are assumed and listed.

    Other programs are refused.
    """
    for make, given in (lambda: nn.LSTM(3, 4), (5, 2, 3)), (lambda: Of(spectrum), (2, 64)):
        for pre_dispatch in (False, True):
            graph, _ = export(make(), (torch.randn(given),), dynamic_shapes=True, pre_dispatch=pre_dispatch)
            assert [rule.partition(" == ")[2] for rule in graph.meta["assumes"]] == [*map(str, given)]
            static, _ = export(make(), (torch.randn(given),), dynamic_shapes=False, pre_dispatch=pre_dispatch)
            assert not static.graph.find_nodes(op="call_function", target=torch.ops.aten.expand.default)
    module = Of(lambda m, x: sum(x.repeat(2, 1).unbind(0)))
    with pytest.raises(RefusedError, match=r"with sizes that vary.*dynamic_shapes=False"):
        export(module, (x43(),), dynamic_shapes=True)


def test_draws():
    """A graph draws eager's random numbers, including unused ones."""
    module = Of(lambda m, x: (torch.rand_like(x), m.w * x + torch.rand_like(x))[1].sum(), w=nn.Parameter(torch.ones(3)))
    x = x43()
    for loss in None, 0:
        graph, _ = export(module, (x,), loss)
        torch.manual_seed(1)
        expected = module(x)
        torch.manual_seed(1)
        assert_same(graph(module.w.detach(), x)[:1], [expected])


def test_marked_sizes():
    """By default only the marked sizes vary."""
    x = x43()
    torch._dynamo.mark_dynamic(x, 0)
    module = nn.Linear(3, 2)
    graph, signature = export(Of(lambda m, x: m.a(x) * x.size(0), a=module), (x,))
    run_beside_eager(graph, signature, Of(lambda m, x: m.a(x) * x.size(0), a=module), (torch.randn(6, 3),), None)


# --- signatures of random modules --------------------------------------------------------------------------------


class Random(nn.Module):
    """A random module: some of its parameters, buffers and inputs are tied, frozen, written or require grad."""

    def __init__(self, seed):
        super().__init__()
        choose = random.Random(seed)
        self.names, self.plan, self.written = [], [], []
        for n in range(choose.randint(1, 4)):
            tied = choose.choice(self.names) if self.names and choose.random() < 0.3 else None
            requires_grad = n == 0 or choose.random() < 0.7
            value = nn.Parameter(torch.randn(3), requires_grad) if tied is None else getattr(self, tied)
            self.names.append(f"p{n}")
            setattr(self, f"p{n}", value)
        self.buffer_names = [f"b{n}" for n in range(choose.randint(0, 3))]
        choose.shuffle(self.buffer_names)
        for name in self.buffer_names:
            self.register_buffer(name, torch.randn(3))
        self.written = [name for name in self.buffer_names if choose.random() < 0.5]
        self.inputs = [choose.choice(["plain", "written", "grad", "number"]) for _ in range(choose.randint(1, 4))]
        self.loss = choose.randint(0, 2)

    def arguments(self):
        of = {"plain": lambda: torch.randn(3), "written": lambda: torch.randn(3), "grad": lambda: leaf(3)}
        return tuple(2.0 if kind == "number" else of[kind]() for kind in self.inputs)

    def forward(self, *args):
        total = sum((getattr(self, name) * n for n, name in enumerate(self.names, 1)), torch.zeros(3))
        for kind, value in zip(self.inputs, args, strict=True):
            total = total * (value.clone() if kind == "written" else value) + value
            if kind == "written":
                value.mul_(0.5)
        for name in self.written:
            getattr(self, name).add_(total.detach())
        rest = [total.detach(), sum((getattr(self, name) for name in self.buffer_names), torch.zeros(3))]
        rest.insert(self.loss, total.square().sum())
        return tuple(rest)


@pytest.mark.parametrize("seed", range(30))
def test_random_modules(seed):
    """The signature agrees with the facts known from the module's construction."""
    torch.manual_seed(seed)
    module = Random(seed)
    args = module.arguments()
    for loss in None, module.loss:
        graph, signature = export(module, args, loss)
        run_beside_eager(graph, signature, module, args, loss)
        inputs = [f"arg{len(module.names) + len(module.buffer_names) + n}_1" for n in range(len(args))]
        assert signature.parameters == module.names
        assert signature.buffers == module.buffer_names
        assert signature.user_inputs == inputs
        assert list(signature.buffers_to_mutate.values()) == [n for n in module.buffer_names if n in module.written]
        kinds = list(zip(inputs, module.inputs, strict=True))
        assert list(signature.user_inputs_to_mutate.values()) == [name for name, kind in kinds if kind == "written"]
        assert signature.parameters_to_mutate == {}
        assert signature.input_tokens == signature.output_tokens == []
        if loss is not None:
            parameters = {id(p): name for name, p in reversed(list(values_of(module).items())) if p.requires_grad}
            backward = signature.backward_signature
            assert sorted(backward.gradients_to_parameters.values()) == sorted(parameters.values())
            assert list(backward.gradients_to_user_inputs.values()) == [name for name, k in kinds if k == "grad"]


@pytest.mark.parametrize(
    "name", ["linear with a loss", "batch norm in training", "buffers and inputs written", "frozen"]
)
@pytest.mark.parametrize("joint", [False, True])
def test_signature_is_upstreams(name, joint):
    """Upstream's function gives the same inputs and outputs."""
    from torch._functorch.aot_autograd import aot_export_module

    make, arguments, loss = CASES[name]
    inner, args = make(), arguments()

    def as_tuple(m, *given):
        out = m.inner(*given)
        return out if isinstance(out, tuple) else (out,)

    module = Of(as_tuple, inner=inner)
    settings = {"trace_joint": joint, "output_loss_index": loss if joint else None}
    ours, theirs = aotlab.aot_export_module(module, args, **settings)[1], aot_export_module(module, args, **settings)[1]
    for field in ("parameters", "buffers", "user_inputs", "inputs_to_parameters", "inputs_to_buffers"):
        assert getattr(ours, field) == getattr(theirs, field)
    assert ours.in_spec == theirs.in_spec
    assert ours.out_spec == theirs.out_spec
    for field in ("buffers_to_mutate", "user_inputs_to_mutate"):
        assert list(getattr(ours, field).values()) == list(getattr(theirs, field).values()) or "written" in name
    assert len(ours.user_outputs) == len(theirs.user_outputs)
    if joint:
        for field in ("gradients_to_parameters", "gradients_to_user_inputs"):
            mine, other = (getattr(each.backward_signature, field) for each in (ours, theirs))
            assert list(mine.values()) == list(other.values())


# --- what is refused ---------------------------------------------------------------------------------------------

W = {"w": lambda: nn.Parameter(torch.ones(3))}
GLOBAL = torch.ones(3)
SAME = torch.ones(4)


def hooked(m, x):
    """Register a hook."""
    y = m.w * x
    y.register_hook(lambda g: g * 2)
    return y.sum()


#: name → (the module's function, buffers, arguments, the loss, the error, its text)
class Product(torch.autograd.Function):
    """The product of two tensors."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, by):
        x, y = ctx.saved_tensors
        return by * y, (by * x).sum(0)


REFUSED = {
    "a parameter written": (
        lambda m, x: (m.w.data.mul_(2), (m.w * x).sum()), (), lambda: (x43(),), 1, RefusedError, "is written"
    ),
    "a history for a buffer": (
        lambda m, x: (m.b.add_(m.w), (m.w * x).sum())[1:], ("b",), lambda: (x43(),), 0, RefusedError, "gets an autograd"
    ),
    "an input that requires grad written": (
        lambda m, x: (x.data.mul_(2), (m.w * x).sum())[1:], (), lambda: (leaf(3),), 0, RefusedError, "is written"
    ),
    "sizes changed": (lambda m, x: x.t_().sum() + 1, (), lambda: (x43(),), None, MetadataMutationError, "new tensor"),
    "two with histories": (lambda m, x: ((m.w * x).sum(), m.w * x), (), lambda: (x43(),), 0, RefusedError, "detach"),
    "no scalar": (lambda m, x: m.w * x, (), lambda: (x43(),), 0, RefusedError, "scalar"),
    "no history": (lambda m, x: x.sum(), (), lambda: (x43(),), 0, RefusedError, "does not require grad"),
    "the loss is no tensor": (lambda m, x: (m.w.sum(), 3), (), lambda: (x43(),), 1, RefusedError, "require grad"),
    "no such output": (lambda m, x: m.w.sum(), (), lambda: (x43(),), 3, RefusedError, "there are 1 outputs"),
    "no gradient": (lambda m, x: (x * 2).sum(), (), lambda: (leaf(3),), 0, RefusedError, "no gradient reaches `w`"),
    "no gradient of an input": (
        lambda m, x, y: (m.w * x).sum(), (), lambda: (leaf(3), leaf(3)), 0, RefusedError, "no gradient reaches"
    ),
    "one tensor twice": (lambda m, x, y: x + y, (), lambda: (SAME, SAME), None, RefusedError, "the same tensor"),
    "memory shared and written": (
        lambda m, x, y: x.add_(1) + y, (), lambda: (SAME[:3], SAME[1:]), None, RefusedError, "pass clones"
    ),
    "another tensor": (lambda m, x: x + GLOBAL, (), lambda: (x43(),), None, RefusedError, "register it as a buffer"),
    "a hook": (hooked, (), lambda: (x43(),), 0, RefusedError, "hook"),
    "a function": (lambda m, x: (x, torch.sin), (), lambda: (x43(),), None, RefusedError, "return tensors"),
    "a branch": (lambda m, x: x if x.sum() > 0 else -x, (), lambda: (x43(),), None, RefusedError, "value"),
    "made to require grad": (
        lambda m, x: x.requires_grad_().sum(), (), lambda: (x43(),), None, RefusedError,
        r"`requires_grad_\(\)` is called",
    ),
    "a choice that uses more than it is given": (
        lambda m, x: torch.cond(x.sum() > 0, lambda y: y * GLOBAL, lambda y: y + 1, (x,)),
        (), lambda: (x43(),), None, RefusedError, "register it as a buffer",
    ),
    "an autograd function that is given more in a choice": (
        lambda m, x: torch.cond(x.sum() > 0, lambda y: Product.apply(y, m.w), lambda y: y + 1, (x,)).sum(),
        (), lambda: (x43(),), 0, RefusedError, "pass it as an operand",
    ),
    "an object": (lambda m, x: (x, object()), (), lambda: (x43(),), None, AotlabError, "return tensors"),
    "grad mode left": (
        lambda m, x: (torch.set_grad_enabled(True), x + 1)[1:], (), lambda: (x43(),), None, RefusedError, "grad mode"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """A program that a graph cannot express is refused with a remedy, before anything was mutated."""
    function, buffers, arguments, loss, error, text = REFUSED[name]
    module = (
        Of(function, buffers, w=nn.Parameter(torch.ones(3)), b=torch.zeros(3))
        if buffers
        else Of(function, w=nn.Parameter(torch.ones(3)))
    )
    args = arguments()
    held = [*values_of(module).values(), *args]
    before, versions, grads = snapshot(held), [t._version for t in held], [t.requires_grad for t in held]
    shapes, mode = [t.shape for t in held], torch.is_grad_enabled()
    with pytest.raises(error, match=text) as caught:
        aotlab.aot_export_module(module, args, trace_joint=loss is not None, output_loss_index=loss)
    assert_same(held, before)
    assert versions == [t._version for t in held]
    assert shapes == [t.shape for t in held]
    assert grads == [t.requires_grad for t in held]
    assert mode == torch.is_grad_enabled()
    assert not isinstance(caught.value, RefusedError) or caught.value.suggestion


def test_hooks_and_attributes_are_refused():
    """A hook on a parameter, and a Python attribute that the module changes, are refused. The attribute is restored."""
    module, x = Of(lambda m, x: (m.w * x).sum(), w=nn.Parameter(torch.ones(3))), x43()
    handle = module.w.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(RefusedError, match="has a hook"):
        aotlab.aot_export_module(module, (x,), trace_joint=True, output_loss_index=0)
    handle.remove()
    run_beside_eager(*export(module, (x,), 0), module, (x,), 0)
    counting = Of(lambda m, x: (setattr(m, "calls", m.calls + 1), x + 1)[1], calls=3)
    with pytest.raises(RefusedError, match="calls"):
        aotlab.aot_export_module(counting, (x,), trace_joint=False)
    assert counting.calls == 3


def test_containers_that_are_no_pytrees():
    """They would have no place in the specs."""
    with pytest.raises(RefusedError, match="holds a `Pair`"):
        aotlab.aot_export_module(Of(lambda m, x: Pair(x + 1)), (x43(),), trace_joint=False)
    with pytest.raises(RefusedError, match="not a pytree"):
        aotlab.aot_export_module(Of(lambda m, x: x.first + 1), (Pair(x43()),), trace_joint=False)


def test_surroundings(capsys):
    """A module's output is printed once. Torch's state is restored after an export, and after an interrupt."""
    x, before = x43(), global_torch_state()
    export(Of(lambda m, x: (print("hello"), x + 1)[1]), (x,))
    assert capsys.readouterr().out == "hello\n"

    def interrupt(m, x):
        torch.set_grad_enabled(True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        aotlab.aot_export_module(Of(interrupt), (x,), trace_joint=False)
    assert global_torch_state() == before
    with torch.autograd.detect_anomaly(check_nan=False), pytest.raises(RefusedError, match="anomaly"):
        aotlab.aot_export_module(Of(lambda m, x: x + 1), (x,), trace_joint=False)


def test_misuse():
    """Calls that can never work."""
    linear, args = nn.Linear(3, 2), (x43(),)
    with pytest.raises(UsageError, match="takes a module"):
        aotlab.aot_export_module(torch.sin, args, trace_joint=False)
    with pytest.raises(UsageError, match="pass trace_joint=False"):
        aotlab.aot_export_module(linear, args, trace_joint=True, output_loss_index=0, pre_dispatch=True)
    with pytest.raises(UsageError, match="pass its index as output_loss_index"):
        aotlab.aot_export_module(linear, args, trace_joint=True)
    with pytest.raises(UsageError, match="pass a tuple"):
        aotlab.aot_export_module(linear, args[0], trace_joint=False)
    with config.patch(functionalize_rng_ops=True), pytest.raises(UsageError, match="functionalize_rng_ops"):
        aotlab.aot_export_module(linear, args, trace_joint=False)
    with pytest.raises(UsageError, match="takes a function"):
        aotlab.aot_export_joint_simple(3, args, trace_joint=False)
    memory = torch.randn(6)
    with pytest.raises(RefusedError, match="share memory, and sizes vary"):
        aotlab.aot_export_module(
            Of(lambda m, x, y: x + y[0]), (memory[:4], memory[2:]), trace_joint=False, dynamic_shapes=True
        )
    with pytest.raises(RefusedError, match="sizes that vary"):
        aotlab.aot_export_module(
            Of(lambda m, x: x * len(f"{x.size(0):d}")), args, trace_joint=False, dynamic_shapes=True
        )  # fmt: skip


def test_signatures_are_those_of_the_table():
    """The parameters are upstream's, as far as the table of systems has them."""
    ours = inspect.signature(aotlab.aot_export_module).parameters
    own = ["mod", "args", "trace_joint", "output_loss_index", "pre_dispatch", "dynamic_shapes"]
    assert list(ours) == [*own, "decompositions"]
    assert [key for key, p in ours.items() if p.kind is p.KEYWORD_ONLY] == list(ours)[2:]
    simple = inspect.signature(aotlab.aot_export_joint_simple).parameters
    assert list(simple) == ["fn", "args", "trace_joint", "decompositions"]


def test_json_of_other_containers():
    """A nest that JSON has no form for is refused when it is written; text that names a module is not imported."""
    from collections import OrderedDict

    _, signature = export(Of(lambda m, x: OrderedDict(a=x + 1)), (x43(),))
    with pytest.raises(UsageError, match="OrderedDict"):
        signature.to_json()
    _, signature = export(Of(lambda m, x: [x + 1]), (x43(),))
    with pytest.raises(KeyError, match=r"os\.system"):
        GraphSignature.from_json(signature.to_json().replace('"list"', '"os.system"'))


def test_decompositions():
    """Ops in the decomposition table are replaced, forward and backward, for modules and functions."""
    aten = torch.ops.aten
    table = {aten.addmm.default: lambda bias, x, w: x @ w + bias, aten.t.default: lambda x: x.permute(1, 0)}
    module, x = nn.Linear(3, 2), x43()
    for loss, of in (None, module), (0, Of(lambda m, x: m.l(x).sum(), l=module)):
        graph, signature = export(of, (x,), loss, decompositions=table)
        assert not table.keys() & {node.target for node in graph.graph.nodes}
        run_beside_eager(graph, signature, of, (x,), loss)
    simple = aotlab.aot_export_joint_simple(lambda x: (x.t() * 2,), (x,), trace_joint=False, decompositions=table)
    assert aten.permute.default in {node.target for node in simple.graph.nodes}
    assert_same(simple(x), [x.t() * 2])


# --- of functions ------------------------------------------------------------------------------------------------


def several(x, y, scale):
    """Return outputs that depend on each other."""
    z = x * y
    return z, (z * scale).sin(), y + 1, None, (z * z).sum()


def test_simple_inference():
    """Without gradients the graph is called as the function is."""
    x, y = x43(), x43()
    graph = aotlab.aot_export_joint_simple(fn=several, args=[x, y, 2.0], trace_joint=False)
    assert_same(graph(x, y, 2.0), several(x, y, 2.0))
    graph = aotlab.aot_export_joint_simple(several, (x, y, 2.0), trace_joint=True)  # nothing requires grad
    assert_same(graph(x, y, 2.0), several(x, y, 2.0))


def test_simple_joint():
    """With them it is the joint graph, which partitioners split; its gradients are eager's for several outputs."""
    x, y = leaf(4, 3), torch.randn(4, 3)
    graph = aotlab.aot_export_joint_simple(several, (x, y, 2.0), trace_joint=True)
    expected = several(x, y, 2.0)
    tangents = [torch.randn_like(expected[i]) for i in (0, 1, 4)]
    torch.autograd.backward([expected[i] for i in (0, 1, 4)], tangents)
    found = graph(x.detach(), y, 2.0, *tangents)
    assert_same(found[:5], expected)
    assert_same(found[5:], [x.grad, None, None])
    forward, backward = aotlab.default_partition(graph, [x, y, 2.0], num_fwd_outputs=5)
    outputs = forward(x.detach(), y, 2.0)
    assert_same(outputs[:5], expected)
    assert_same(backward(*outputs[5:], *tangents)[:1], [x.grad])


#: name → (the function, its arguments, the text of the error)
REFUSED_SIMPLE = {
    "a write": (lambda x: (x.add_(1),), lambda: (x43(),), "writes its argument"),
    "an alias": (lambda x: (x.t(),), lambda: (x43(),), "return a clone"),
    "an input returned": (lambda x: (x,), lambda: (x43(),), "return a clone"),
    "two aliases": (lambda x: ((y := x + 1), y[0]), lambda: (x43(),), "return a clone"),
    "a container": (lambda x: (x[0] + 1,), lambda: ([x43()],), "as separate arguments"),
    "a bare tensor": (lambda x: x + 1, lambda: (x43(),), "flat tuple"),
    "nested outputs": (lambda x: (x + 1, [x + 2]), lambda: (x43(),), "flat tuple"),
    "another tensor": (lambda x: (x + GLOBAL,), lambda: (x43(),), "not an argument"),
}


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", REFUSED_SIMPLE)
def test_simple_refused(name, joint):
    """Functions that do not fit the simple calling convention are refused, and the arguments stay unchanged."""
    function, arguments, text = REFUSED_SIMPLE[name]
    args = arguments()
    before = snapshot(pytree.tree_leaves(args))
    with pytest.raises(RefusedError, match=text):
        aotlab.aot_export_joint_simple(function, args, trace_joint=joint)
    assert_same(pytree.tree_leaves(args), before)
    assert issubclass(OutputError, RefusedError)


# --- with others -------------------------------------------------------------------------------------------------


def test_upstream_is_never_called(monkeypatch):
    """With upstream's AOTAutograd poisoned, graphs are exported and run."""
    torch.manual_seed(0)
    assert poison(monkeypatch, HARMLESS) > 150
    for name in "batch norm in training", "tied embeddings", "buffers and inputs written", "nested":
        make, arguments, loss = CASES[name]
        module, args = make(), arguments()
        for dynamic in False, True:
            run_beside_eager(*export(module, args, dynamic_shapes=dynamic), module, args, None)
            run_beside_eager(*export(module, args, loss, dynamic_shapes=dynamic), module, args, loss)
    test_simple_joint()


def test_history_inside():
    """A graph without gradients takes no tangents, though the program turns grad mode on."""
    module, x = Of(lambda m, x: torch.enable_grad()(lambda: x * m.w)(), w=nn.Parameter(torch.randn(3))), x43()
    run_beside_eager(*export(module, (x,)), module, (x,), None)


def test_compiled_module_is_exported():
    """Of a compiled module, that inside is exported, here and by torch.export."""
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    compiled, x = aotlab.compile(module, backend="eager"), x43()
    run_beside_eager(*export(compiled, (x,)), module, (x,), None)
    calls = compiled.compiled.calls
    for strict in False, True:
        program = torch.export.export(compiled, (x,), strict=strict)
        assert set(program.state_dict) == set(module.state_dict())
        assert_same([program.module()(x)], [copy.deepcopy(module)(x)])
        assert set(program.graph_signature.parameters) == {name for name, _ in module.named_parameters()}
    assert calls.compiled == calls.eager == 0
