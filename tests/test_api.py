"""The public functions: compile, aot_function, aot_module, aot_module_simplified, and the boxed convention."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import aotlab
from aotlab import _torch as internals
from aotlab import events
from aotlab.cache import CompiledFunction
from aotlab.errors import PythonValueError, UsageError
from aotlab.frontends.api import AotModule
from tests.engine_helpers import (
    compiled,
    global_torch_state,
    heard_events,
    leaf,
    metadata,
    nonleaf,
    record,
    refusing,
    same,
    targets,
)


def by_aot_function(function):
    """Compile through upstream's signature."""
    return aotlab.aot_function(function, aotlab.nop)


class Collects:
    """A compiler that keeps its graphs and arguments."""

    def __init__(self):
        self.graphs = []
        self.inputs = []
        self.contexts = []

    def __call__(self, gm, example_inputs):
        self.graphs.append(gm)
        self.inputs.append(example_inputs)
        self.contexts.append(aotlab.get_aot_compilation_context())
        return gm


# --- aot_function ------------------------------------------------------------------------------------------------


def test_aot_function_is_eagers_equal():
    """Any pytree in, any pytree out; mutation, aliasing and gradients as in eager."""

    def f(x, options):
        x.mul_(options["scale"])
        return {"view": x.t(), "list": [x * options["w"], None]}

    same(f, nonleaf(2, 3), {"scale": 2.0, "w": leaf(2, 3)}, make=by_aot_function)
    same(f, torch.randn(2, 3), {"scale": 2, "w": torch.randn(2, 3)}, make=by_aot_function)


def test_compilers_are_called_with_graph_and_example_inputs():
    """Compilers get (GraphModule, fake example inputs) with placeholders as upstream names them."""
    forward, backward, inference = Collects(), Collects(), Collects()
    f = aotlab.aot_function(lambda x, y: (x * y).sin(), forward, backward, inference_compiler=inference)
    f(leaf(2, 3), leaf(3)).sum().backward()
    assert (len(forward.graphs), len(backward.graphs), len(inference.graphs)) == (1, 1, 0)
    f(torch.ones(2, 3), torch.ones(3))
    assert (len(forward.graphs), len(backward.graphs), len(inference.graphs)) == (1, 1, 1)

    def placeholders(gm):
        return [n.name for n in gm.graph.nodes if n.op == "placeholder"]

    assert placeholders(forward.graphs[0]) == ["primals_1", "primals_2"]
    assert placeholders(inference.graphs[0]) == ["arg0_1", "arg1_1"]
    assert placeholders(backward.graphs[0])[-1] == "tangents_1"
    assert not any("tangents" in name for name in placeholders(backward.graphs[0])[:-1])
    for collected in (forward, backward, inference):
        (gm,), (inputs,) = collected.graphs, collected.inputs
        assert isinstance(gm, torch.fx.GraphModule)
        nodes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        assert len(inputs) == len(nodes)
        for node, value in zip(nodes, inputs, strict=True):
            assert type(value).__name__ == "FakeTensor"
            assert node.meta["val"].shape == value.shape
            assert node.meta["tensor_meta"].shape == value.shape


def test_forward_compiler_is_the_default_for_the_others():
    """Without bw_compiler and inference_compiler the forward's compiler gets all graphs."""
    collected = Collects()
    f = aotlab.aot_function(lambda x: x.sin(), collected)
    f(leaf(2)).sum().backward()
    f(torch.ones(2))
    assert [c[0][0].split("_", 1)[1] for c in collected.contexts] == ["forward", "backward", "inference"]


def test_compilation_context():
    """A running compiler can read the graph's name, the model's name and a number that both halves share."""
    collected = Collects()
    f = aotlab.aot_function(lambda x: x.sin(), collected)
    f(leaf(2))
    (names, model, number), (backward_names, *_) = collected.contexts
    assert names == [f"{number}_forward"]
    assert backward_names == [f"{number}_backward"]
    assert model == "model"
    f(leaf(3))
    assert collected.contexts[2][2] > number
    assert [g.name for g in record(f, "compile").graphs] == [
        f"model__{collected.contexts[2][2]}_forward",
        f"model__{collected.contexts[2][2]}_backward",
    ]
    outside = aotlab.get_aot_compilation_context()
    assert isinstance(outside[0], list)


def test_decompositions():
    """Ops of the table are replaced while tracing, in the backward too, with eager's results."""

    def silu(x):
        return x * torch.sigmoid(x)

    table = {torch.ops.aten.silu.default: silu}
    f = aotlab.aot_function(torch.nn.functional.silu, aotlab.nop, decompositions=table)
    out = f(torch.randn(3))
    assert out.shape == (3,)
    assert targets(record(f, "trace").module) == ["aten.sigmoid.default", "aten.mul.Tensor"]
    g = aotlab.aot_function(torch.nn.functional.silu, aotlab.nop)
    g(torch.randn(3))
    assert targets(record(g, "trace").module) == ["aten.silu.default"]


def test_keep_inference_input_mutations():
    """With it the inference graph writes the input; without it the wrapper does."""
    for keep in (True, False):
        f = aotlab.aot_function(lambda x: x.mul_(2), aotlab.nop, keep_inference_input_mutations=keep)
        x = torch.ones(2)
        assert f(x) is x
        assert x.tolist() == [2.0, 2.0]
        assert metadata(f).keep_input_mutations is keep
        assert ("copy_" in f.entries[0].source) is not keep


def test_num_params_buffers():
    """The first arguments are marked as static inputs."""
    f = aotlab.aot_function(lambda w, x: w * x, aotlab.nop, num_params_buffers=1)
    f(leaf(2), torch.ones(2))
    assert metadata(f).static_input_indices == (0,)


def test_whose_memory_is_kept():
    """For each saved value, the partition says whether its memory belongs to an input or to an output."""
    f = aotlab.aot_function(lambda w, x: ((w * x).sin(), w.exp()), aotlab.nop)
    f(leaf(2), torch.ones(2))
    saved = record(f, "partition").saved
    assert [(s.is_input, s.is_output) for s in saved if s.line is not None] == [(False, False), (False, True)]


def test_partition_fn():
    """The partitioner is called with the joint graph and its inputs, and its split is used."""
    calls = []

    def partition(joint, inputs, *, num_fwd_outputs, **rest):
        calls.append((num_fwd_outputs, len(inputs[0]), len(inputs[1])))
        return aotlab.default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **rest)

    f = aotlab.aot_function(lambda x, y: (x * y, x + 1), aotlab.nop, partition_fn=partition)
    f(leaf(2), torch.ones(2))
    assert calls == [(2, 2, 2)]
    assert record(f, "partition").partitioner == "partition"


def test_static_argnums_are_usage_errors():
    """An unsupported argument is refused at compilation, with advice."""
    with pytest.raises(UsageError, match="static_argnums is not supported"):
        aotlab.aot_function(torch.sin, aotlab.nop, static_argnums=(0,))
    with pytest.raises(UsageError, match="static_argnums"):
        aotlab.aot_module(nn.Linear(1, 1), aotlab.nop, static_argnums=(0,))
    assert issubclass(UsageError, TypeError)


def test_signatures_are_upstreams():
    """aot_function has the parameters, order and defaults of the table of systems.

    Upstream's function has all of them, too.
    """
    from torch._functorch import aot_autograd as upstream

    ours = inspect.signature(aotlab.aot_function).parameters
    assert list(ours) == [
        "fn", "fw_compiler", "bw_compiler", "partition_fn", "decompositions", "num_params_buffers",
        "keep_inference_input_mutations", "inference_compiler", "dynamic", "static_argnums", "upstream",
    ]  # fmt: skip
    theirs = inspect.signature(upstream.aot_function).parameters
    assert [key for key in ours if key in theirs] == [key for key in theirs if key in ours]
    assert set(ours) - set(theirs) <= {"static_argnums", "upstream"}
    for key in ("bw_compiler", "decompositions", "num_params_buffers", "inference_compiler", "dynamic"):
        assert ours[key].default == theirs[key].default
    assert aotlab.compiled_function is aotlab.aot_function
    assert aotlab.compiled_module is aotlab.aot_module


# --- compile -----------------------------------------------------------------------------------------------------


def test_compile_as_decorator():
    """With and without arguments."""

    @aotlab.compile(backend="eager")
    def f(x):
        """Double."""
        return x * 2

    assert isinstance(f, CompiledFunction)
    assert f(torch.ones(2)).tolist() == [2.0, 2.0]
    g = aotlab.compile(lambda x: x * 2, backend="eager")
    assert isinstance(g, CompiledFunction)


def test_compile_of_a_module():
    """A module becomes a module."""
    module = nn.Linear(2, 2)
    f = compiled(module)
    assert isinstance(f, AotModule)
    assert torch.equal(f(torch.ones(1, 2)), module(torch.ones(1, 2)))


def test_compile_with_a_callable_backend():
    """A function (graph, inputs) is a backend."""
    collected = Collects()
    f = aotlab.compile(lambda x: x * 2, backend=collected)
    assert f(torch.ones(1)).item() == 2.0
    assert len(collected.graphs) == 1


def test_compile_choices_are_checked():
    """Wrong choices are usage errors that name the right ones."""
    for wrong, word in (
        ({"backend": "nonesuch"}, "inductor"),
        ({"frontend": "nonesuch"}, "dynamo"),
        ({"engine": "nonesuch"}, "upstream"),
    ):
        with pytest.raises(UsageError, match=word):
            aotlab.compile(torch.sin, **wrong)
    with pytest.raises(UsageError, match="function or a module"):
        aotlab.compile(3, backend="eager")
    with pytest.raises(UsageError, match="aot_module takes a module"):
        aotlab.aot_module(torch.sin, aotlab.nop)


def test_compile_engines():
    """engine="eager" is the function itself; "upstream" stock torch.compile."""
    assert aotlab.compile(torch.sin, engine="eager") is torch.sin
    f = aotlab.compile(lambda x: x.mul_(2), engine="upstream", backend="eager")
    x = torch.ones(2)
    assert f(x).tolist() == [2.0, 2.0]
    assert not isinstance(f, CompiledFunction)


def test_methods_and_callable_objects():
    """Bound methods, callable objects, builtins and partials can be compiled."""
    import functools

    class Scales:
        def __init__(self):
            self.factor = 3.0

        def method(self, x):
            return x * self.factor

        def __call__(self, x):
            return x + self.factor

    scales = Scales()
    same(scales.method, torch.ones(2))
    same(scales, torch.ones(2))
    same(torch.sin, leaf(2))
    same(functools.partial(torch.add, alpha=2), leaf(2), leaf(2))


# --- modules -----------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """A module with tied weights, a buffer that it counts in, a buffer that is not saved, and dropout."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(3)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("hidden", torch.ones(1), persistent=False)
        self.label = "network"

    def forward(self, x, scale=1.0):
        self.count.add_(1)
        return self.norm(self.second(self.first(x).tanh())) * scale + self.hidden

    def describe(self):
        return f"{self.label} {self.count.item()}"


def test_aot_module_is_eagers_equal():
    """Parameters and buffers are lifted, tied weights are one input, buffers are mutated, gradients arrive."""
    same(Network(), leaf(2, 3), calls=3, make=lambda m: aotlab.aot_module(m, aotlab.nop))
    same(Network().eval(), torch.randn(2, 3), 2.0, make=lambda m: aotlab.aot_module(m, aotlab.nop))


def test_tied_weights_are_one_input():
    """The tied weight has one placeholder, named after its first place."""
    f = compiled(Network())
    f(torch.ones(1, 3))
    names = record(f, "dedupe").names
    assert "first.weight" in names
    assert "second.weight" not in names
    kinds = {a.name: a.kind for a in record(f, "capture").arguments}
    assert kinds["first.weight"] == "parameter"
    assert kinds["count"] == "buffer"
    assert kinds["x"] == "input"


def test_aot_module_shares_everything():
    """Parameters, buffers, submodules, state_dict keys and attributes are the original's own."""
    module = Network()
    f = aotlab.aot_module(module, aotlab.nop)
    assert list(f.state_dict()) == list(module.state_dict())
    assert all(a is b for a, b in zip(f.parameters(), module.parameters(), strict=True))
    assert all(a is b for a, b in zip(f.buffers(), module.buffers(), strict=True))
    assert [n for n, _ in f.named_parameters()] == [n for n, _ in module.named_parameters()]
    assert [n for n, _ in f.named_modules()][1:] == [n for n, _ in module.named_modules()][1:]
    assert f.orig_module is module
    assert f.first is module.first
    assert f.label == "network"
    f(torch.ones(1, 3))
    assert f.describe() == module.describe() == "network 1.0"
    with pytest.raises(AttributeError):
        _ = f.nonesuch


def test_the_class_of_a_compiled_module():
    """Creating the class of a compiled module does not call the original class's ``__init_subclass__``.

    The class runs the original's call once, and makes modules like the original.
    """
    classes = []

    class Scaled(nn.Module):
        def __init_subclass__(cls, *, name="", **kwargs):
            super().__init_subclass__(**kwargs)
            classes.append(name)

        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def __call__(self, x):
            return super().__call__(x) + 1

        def forward(self, x):
            return x * self.scale

        def once(self, x):
            return self.forward(x)

        def twice(self):
            return type(self)(self.scale * 2)

        @classmethod
        def made(cls, scale):
            return cls(scale)

    class Named(Scaled, name="named"):
        pass

    module = aotlab.compile(Named(3.0), backend="eager")
    x = torch.ones(2)
    assert classes == ["named"]
    assert [model(x)[0].item() for model in (module, module.twice(), module.made(5.0))] == [4.0, 7.0, 6.0]
    assert module.forward(x)[0].item() == module.once(x)[0].item() == 3.0


def test_forward_without_hooks():
    """A direct call of ``forward`` runs no hooks of the original's; a call runs them once, whoever else has some."""
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda module, args, out: out * 2)
    f, x = aotlab.compile(module, backend="eager"), torch.ones(2)
    for _ in range(2):
        assert torch.equal(f(x), module(x))
        assert torch.equal(f.forward(x), module.forward(x))
    f.register_forward_hook(lambda module, args, out: out + 1)
    assert torch.equal(f(x), module(x) + 1)


def test_aot_module_train_and_eval():
    """Train and eval set both modules, and the flag is the original's."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout(1.0))
    f = aotlab.aot_module(module, aotlab.nop)
    f.eval()
    assert (module.training, module[1].training, f.training) == (False, False, False)
    with torch.no_grad():
        expected = module[0](torch.ones(1, 2))
        assert torch.equal(f(torch.ones(1, 2)), expected)
        f.train()
        assert module[1].training
        assert f(torch.ones(1, 2)).abs().sum().item() == 0.0
        module.eval()
        assert torch.equal(f(torch.ones(1, 2)), expected)


def test_aot_module_state_changes():
    """load_state_dict, to(dtype), zero_grad and requires_grad_ through either reach both."""
    module = nn.Linear(2, 2)
    f = aotlab.aot_module(module, aotlab.nop)
    x = torch.randn(3, 2)
    f(x).sum().backward()
    assert module.weight.grad is not None
    f.zero_grad()
    assert module.weight.grad is None
    f.load_state_dict(nn.Linear(2, 2).state_dict())
    assert torch.equal(f(x), module(x))
    f.double()
    assert module.weight.dtype == torch.float64
    assert torch.equal(f(x.double()), module(x.double()))
    f.requires_grad_(False)
    assert f(x.double()).requires_grad is False


def test_aot_module_in_an_optimizer_and_a_module():
    """It can be optimized and be a submodule."""
    module = nn.Linear(2, 1)
    outer = nn.Sequential(aotlab.aot_module(module, aotlab.nop), nn.Sigmoid())
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    before = module.weight.detach().clone()
    outer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, module.weight)


def test_deep_copy_of_an_aot_module():
    """A deep copy has separate parameters, and computes with them."""
    f = aotlab.aot_module(nn.Linear(2, 2), aotlab.nop)
    x = torch.ones(1, 2)
    before = f(x)
    other = copy.deepcopy(f)
    with torch.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    assert other(x).tolist() == [[0.0, 0.0]]
    assert torch.equal(f(x), before)
    assert other.orig_module.weight is other.weight


def test_aot_module_of_fake_parameters():
    """A module of fake parameters is planned without data."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        module = nn.Linear(2, 2)
        assert isinstance(aotlab.aot_module(module, aotlab.nop)(torch.ones(3, 2)), FakeTensor)


def test_module_arguments():
    """Modules take keyword arguments and nested ones."""

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x, *, options, flag=True):
            return {"out": x * self.weight * options["scale"] if flag else x}

    same(Takes(), leaf(2), kwargs={"options": {"scale": 3.0}})
    same(Takes(), leaf(2), kwargs={"options": {"scale": 3.0}, "flag": False})


def test_module_with_hooks():
    """Forward hooks and pre-hooks of a module and its submodules run."""
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    module[0].register_forward_hook(lambda m, args, out: out + 1)
    f = compiled(module)
    x = torch.randn(3, 2)
    assert torch.equal(f(x), module(x))


def test_parametrized_and_copied_modules():
    """A module under parametrization works; a deep copy of the original is not affected."""
    module = torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    f = compiled(module)
    x = torch.randn(2, 3)
    assert torch.equal(f(x), module(x))
    f(x).sum().backward()
    other = copy.deepcopy(module)
    assert torch.equal(other(x), module(x))
    assert pickle.dumps(module.state_dict())


# --- aot_module_simplified ---------------------------------------------------------------------------------------


class Flat(nn.Module):
    """A module with a flat calling convention."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, y):
        self.steps.add_(1)
        return self.linear(x) * y, x.t()


def test_aot_module_simplified():
    """Flat arguments, a tuple out, the three methods, and buffers mutated."""
    module = Flat()
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    f = aotlab.aot_module_simplified(module, (x, y), aotlab.nop)
    assert module.steps.item() == 0
    out = f(x, y)
    assert isinstance(out, tuple)
    assert module.steps.item() == 1
    expected = module(x, y)
    assert torch.equal(out[0], expected[0])
    assert out[1].data_ptr() == x.data_ptr()
    out[0].sum().backward()
    assert module.linear.weight.grad is not None
    f.zero_grad()
    assert module.linear.weight.grad is None
    assert dict(f.named_parameters()).keys() == dict(module.named_parameters()).keys()
    assert dict(f.named_buffers()).keys() == dict(module.named_buffers()).keys()


def test_aot_module_simplified_errors():
    """Nested arguments, and a module that returns no tuple, are usage errors; nothing was mutated by the latter."""

    class Bare(nn.Module):
        def forward(self, x):
            return x * 2

    with pytest.raises(UsageError, match="flat arguments"):
        aotlab.aot_module_simplified(Bare(), ([torch.ones(1)],), aotlab.nop)
    f = aotlab.aot_module_simplified(Bare(), (torch.ones(1),), aotlab.nop)
    with pytest.raises(UsageError, match="needs a tuple"):
        f(torch.ones(1))


def test_aot_module_simplified_keeps_duplicates():
    """Its graphs have one placeholder per parameter, buffer and tensor argument, duplicates included."""
    collected = Collects()
    module = Flat()
    x = torch.randn(2, 2)
    f = aotlab.aot_module_simplified(module, (x, x), collected)
    f(x, x)[0].sum().backward()
    (forward, _) = collected.graphs
    count = len([n for n in forward.graph.nodes if n.op == "placeholder"])
    assert count == len(list(module.parameters())) + len(list(module.buffers())) + 2


# --- boxed -------------------------------------------------------------------------------------------------------


def test_make_boxed_compiler():
    """A compiler whose results are boxed, whatever they were."""
    collected = Collects()
    compiler = aotlab.make_boxed_compiler(collected)
    f = aotlab.aot_function(lambda x: x.sin() * 2, compiler)
    x = leaf(3)
    f(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos() * 2)
    made = compiler(collected.graphs[0], collected.inputs[0])
    assert made._boxed_call is True


def test_public_names():
    """The names of the issue exist, and nothing is missing from ``__all__``."""
    wanted = {
        "aot_function", "aot_module", "aot_module_simplified", "compile", "default_partition", "make_boxed_func",
        "make_boxed_compiler", "get_aot_compilation_context", "config", "Report", "verify", "nop",
        "compiled_function", "compiled_module", "min_cut_rematerialization_partition", "aot_export_module",
        "aot_export_joint_simple",
    }  # fmt: skip
    assert wanted <= set(aotlab.__all__)
    assert all(hasattr(aotlab, name) for name in aotlab.__all__)


def test_a_call_that_is_left_to_eager_says_so_and_is_not_traced_again():
    """One warning with the user's line; a call that looks the same goes to eager at once, another is tried."""

    def f(x):
        return (x * 2).unfold(0, 2, 1).mul_(2)

    g = aotlab.compile(f, backend="eager")

    def is_traced(size):
        with heard_events() as heard:
            g(torch.ones(size))
        return any(isinstance(event, events.StageFinished) for event in heard)

    with pytest.warns(RuntimeWarning, match=r"f` runs eagerly: .*unfold.*, at .*test_api\.py") as caught:
        traced = [is_traced(size) for size in (3, 3, 4)]
    assert len(caught) == 1
    assert traced == [True, False, True]
    assert (g.calls.eager, g.calls.compiled) == (3, 0)


@pytest.mark.parametrize("where", ["replace_unguarded", "from_functional"])
def test_an_interrupt_leaves_nothing_behind(monkeypatch, where):
    """Wherever it hits while a call is compiled: torch is as it was, and the next call is compiled."""

    def interrupted(*args):
        raise KeyboardInterrupt

    f = compiled(lambda x: x * 2)
    before = global_torch_state()
    with monkeypatch.context() as patch:
        patch.setattr(internals, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            f(leaf(2))
    assert global_torch_state() == before
    f(leaf(2)).sum().backward()
    assert (f.calls.compiled, f.calls.eager) == (1, 0)


def test_a_decorated_method():
    """It gets its `self`: which Dynamo can look into, and the direct frontend refuses by name, with that way out."""

    class Scale:
        by = torch.full((2,), 3.0)

        @aotlab.compile(backend="eager", frontend="dynamo")
        def looked_into(self, x):
            return x * self.by

        @aotlab.compile(backend="eager")
        def direct(self, x):
            return x * self.by

    assert Scale().looked_into(torch.ones(2)).tolist() == [3.0, 3.0]
    with refusing(PythonValueError, match=r'`self` is a .*Scale`.*frontend="dynamo"'):
        Scale().direct(torch.ones(2))


def test_help_shows_the_docstring_of_what_was_compiled():
    """`help` shows the docstring of the user's function, and not of our class."""

    def step(x):
        """Take a step."""
        return x

    assert compiled(step).__doc__ == "Take a step."
