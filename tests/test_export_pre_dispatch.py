"""Graphs from before dispatch: which ops they contain, and that they compute eager's results."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan_op
from torch._higher_order_ops.out_dtype import out_dtype
from torch._ops import HigherOrderOperator, OpOverload
from torch.nn import functional
from torch.utils import _pytree as pytree

import aotlab
from aotlab.errors import RefusedError, UsageError
from tests.engine_helpers import global_torch_state
from tests.test_export import CASES, Of, assert_same, export, run_beside_eager, snapshot, values_of, x43
from tests.test_pipeline import HARMLESS, poison

aten = torch.ops.aten


def ops(graph):
    """List the ops of a graph. The graphs of inner functions are nested lists."""
    found = []
    for node in graph.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(graph, node.target), torch.fx.GraphModule):
            found.append(ops(getattr(graph, node.target)))
        elif node.target is torch._C._set_grad_enabled:
            found.append("grad on" if node.args[0] else "grad off")
        elif isinstance(node.target, OpOverload | HigherOrderOperator) and node.target is not aten.sym_size.int:
            found.append(node.target.__name__.partition(".")[0])
    return found


def written_under_no_grad(m, x):
    """Write to a tensor with a history, under no_grad."""
    y = x + 2
    with torch.no_grad():
        y.add_(2)
    return x * 2 + y


def grad_mode_changed_twice(m, x):
    """Nest grad modes."""
    with torch.no_grad():
        y = x @ m.w
        with torch.enable_grad():
            z = functional.linear(x, m.w)
    return y + z


def chosen(m, x):
    """Choose between functions that write their intermediates, with and without grad mode."""

    def true(x, w):
        with torch.no_grad():
            y = x.sin()
        return functional.linear(y, w).add_(5).cos()

    def false(x, w):
        return x.cos().add_(6) @ w

    out = torch.cond(x.sum() > m.least, true, false, [x, m.w])
    return out + 3, out + 4


def chosen_in_a_choice(m, x):
    """Choose in a function that was chosen."""

    def inner(y):
        with torch.no_grad():
            z = y.clone().add_(5)
        return z.cos() + functional.softmax(y, 1)

    def outer(x):
        y = x.sin().add_(5)
        return torch.cond(y.sum() > 4, inner, torch.cos, [y]) * 2

    return torch.cond(x.sum() > m.least, outer, torch.sin, [x])


def written_by_a_view(m, x):
    """Write to a part of a kept op's result."""
    y = x[0] @ m.w
    y[1:].mul_(2)
    return y, y.view(1, 3)


def under_autocast(m, x):
    """Cast, and do not."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.l(x)
    return m.l(x), y


def square(**buffers):
    """Make a parameter, and buffers."""
    return {"w": nn.Parameter(torch.randn(3, 3)), **buffers}


def choice(function, least):
    """Make a module that chooses by a sum with the threshold ``least``."""
    return lambda: Of(function, w=nn.Parameter(torch.randn(3, 3)), least=least)


def image():
    """Make an input."""
    return (torch.randn(2, 1, 4, 4),)


_CHOICE = ["sum", "gt", ["grad off", "sin", "grad on", "linear", "add", "cos"], ["cos", "add", "matmul"], "cond"]
_INNER = [["grad off", "clone", "add", "grad on", "cos", "softmax", "add"], ["cos"], "cond", "mul"]
_NESTED = ["sum", "gt", ["sin", "add", "sum", "gt", *_INNER], ["sin"], "cond"]
_AUTOCAST = ["_to_copy", "_to_copy", "_to_copy", "t", "addmm"]
_INSTANCE_NORM = [
    *("repeat", "repeat", "view", "_native_batch_norm_legit_functional", "alias", "view", "mean", "copy", "alias"),
    *("alias", "view", "mean", "copy", "alias", "view"),
]
#: name → (the module, its arguments, what its graph calls)
ROWS = {
    "linear": (lambda: nn.Linear(3, 2), lambda: (x43(),), ["linear"]),
    "written under no_grad": (
        lambda: Of(written_under_no_grad),
        lambda: (x43(),),
        ["add", "grad off", "add", "grad on", "mul", "add"],
    ),
    "grad mode changed twice": (
        lambda: Of(grad_mode_changed_twice, **square()),
        lambda: (x43(),),
        ["grad off", "matmul", "grad on", "linear", "grad off", "grad on", "add"],
    ),
    "a composite op in place": (
        lambda: Of(lambda m, x: aten.absolute_.default(x.clone())),
        lambda: (x43(),),
        ["clone", "abs"],
    ),
    "written and viewed": (
        lambda: Of(lambda m, x: (x @ x.t()).add_(2).view(1, -1).sum()),
        lambda: (x43(),),
        ["t", "matmul", "add", "view", "sum"],
    ),
    "written by a view": (
        lambda: Of(written_by_a_view, **square()),
        lambda: (x43(),),
        ["select", "matmul", "slice", "mul", "slice_scatter", "view"],
    ),
    "another dtype": (
        lambda: Of(
            lambda m, x: out_dtype(aten.mm.default, torch.int32, (x + 2).add_(5), m.w),
            ["w"],
            w=torch.randint(-128, 127, (3, 3), dtype=torch.int8),
        ),
        lambda: (torch.randint(-128, 127, (4, 3), dtype=torch.int8),),
        ["add", "add", "out_dtype"],
    ),
    "a buffer written": (
        lambda: Of(lambda m, x: (m.b.add_(4), x.sum() + m.b.sum())[1], ["b"], b=torch.zeros(2, 2)),
        lambda: (x43(),),
        ["add", "sum", "sum", "add"],
    ),
    "a mean of weights": (
        lambda: Of(lambda m, x: (m.b.mul_(0.5).add_(m.w), x + m.b)[1], ["b"], **square(b=torch.ones(3, 3))),
        lambda: (torch.randn(3, 3),),
        ["mul", "add", "add"],
    ),
    "batch norm in training": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3)),
        image,
        ["conv2d", "add", "_native_batch_norm_legit_functional"],
    ),
    "batch norm in eval": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3)).eval(),
        image,
        ["conv2d", "_native_batch_norm_legit_no_training"],
    ),
    "instance norm, which does not say that it writes": (
        lambda: nn.InstanceNorm2d(1, track_running_stats=True),
        image,
        _INSTANCE_NORM,
    ),
    "reshape": (lambda: Of(lambda m, x: x.reshape(2, -1).sum()), lambda: (x43(),), ["view", "sum"]),
    "contiguous": (lambda: Of(lambda m, x: aten.contiguous.default(x).sum()), lambda: (x43(),), ["sum"]),
    "not contiguous": (
        lambda: Of(lambda m, x: aten.contiguous.default(x.t()).sum()),
        lambda: (x43(),),
        ["t", "clone", "sum"],
    ),
    "dropout that returns its argument, written": (
        lambda: Of(lambda m, x: functional.dropout(x * 2, 0.1, training=False).add_(1)),
        lambda: (x43(),),
        ["mul", "add"],
    ),
    "a sum of products": (
        lambda: Of(lambda m, x: torch.einsum("ij,kj->ik", x, x)),
        lambda: (x43(),),
        ["einsum"],
    ),
    "einsum, which does not say that it returns a view": (
        lambda: Of(lambda m, x: torch.einsum("ij->ji", x)),
        lambda: (x43(),),
        ["permute"],
    ),
    "norm and attention": (
        lambda: Of(lambda m, x: functional.scaled_dot_product_attention(*[m.n(x)] * 3), n=nn.LayerNorm(3)),
        lambda: (torch.randn(2, 4, 3),),
        ["layer_norm", "scaled_dot_product_attention"],
    ),
    "an LSTM": (lambda: nn.LSTM(3, 2), lambda: (torch.randn(4, 1, 3),), ["zeros", "zeros", "lstm"]),
    "a number asked of a constant": (
        lambda: Of(lambda m, x: x * torch.arange(3).sum().item()),
        lambda: (x43(),),
        ["arange", "sum", "mul"],
    ),
    "a buffer written with what requires grad": (
        lambda: Of(lambda m, x: (m.b.add_(m.l(x)), x * 2)[1], ["b"], b=torch.zeros(4, 3), l=nn.Linear(3, 3)),
        lambda: (x43(),),
        ["linear", "add", "mul"],
    ),
    "under autocast": (lambda: Of(under_autocast, l=nn.Linear(3, 3)), lambda: (x43(),), [*_AUTOCAST, "linear"]),
    "a choice": (choice(chosen, -1e9), lambda: (torch.randn(2, 3),), [*_CHOICE, "add", "add"]),
    "the other choice": (choice(chosen, 1e9), lambda: (torch.randn(2, 3),), [*_CHOICE, "add", "add"]),
    "a choice in a choice": (choice(chosen_in_a_choice, -1e9), lambda: (torch.randn(2, 3),), _NESTED),
    "the other choice of two": (choice(chosen_in_a_choice, 1e9), lambda: (torch.randn(2, 3),), _NESTED),
}


def made(cases, name):
    """Make a module and its arguments."""
    torch.manual_seed(0)
    return cases[name][0](), cases[name][1]()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", ROWS)
def test_ops(monkeypatch, name, dynamic):
    """Composite ops are kept as called, except for writes and views in them. Upstream's AOTAutograd is not used."""
    given = made(ROWS, name)
    with monkeypatch.context() as patch:
        assert poison(patch, HARMLESS) > 150
        graph, signature = export(*given, dynamic_shapes=dynamic, pre_dispatch=True)
    sized = ["expand"] if dynamic and name == "an LSTM" else []  # it is given tensors of the sizes of this call
    assert [op for op in ops(graph) if op not in sized] == ROWS[name][2]
    run_beside_eager(graph, signature, *given, None)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "a parameter written"])
def test_values(name, dynamic):
    """Programs that export below dispatch export before dispatch with the same results."""
    given = made(CASES, name)
    run_beside_eager(*export(*given, dynamic_shapes=dynamic, pre_dispatch=True), *given, None)


TRAINED = ["linear", "written by a view", "batch norm in eval", "norm and attention", "an LSTM", "a choice"]


@pytest.mark.parametrize("name", TRAINED)
def test_training(name):
    """A graph that keeps ops can be differentiated. Its gradients equal those from eager's kernels, bit for bit."""
    torch.manual_seed(0)
    make, arguments, _ = ROWS[name]
    module, args = make(), arguments()
    graph, _ = export(module, args, pre_dispatch=True)
    own = values_of(module).values()
    parameters = [each for each in own if each.requires_grad]
    assert parameters
    found = torch.autograd.grad(graph(*own, *args)[0].sum(), parameters)
    assert torch.is_grad_enabled()
    assert_same(found, torch.autograd.grad(pytree.tree_leaves(module(*args))[0].sum(), parameters))


@pytest.mark.parametrize(
    "module", [nn.Dropout(), nn.Dropout2d(), nn.LSTM(4, 4, 2, dropout=0.5)], ids=["dropout", "2d", "LSTM"]
)
def test_draws(module):
    """A graph draws eager's random numbers."""
    x = torch.randn(3, 2, 4, 4) if isinstance(module, nn.Dropout2d) else torch.randn(3, 2, 4)
    graph, _ = export(module, (x,), pre_dispatch=True)
    own = values_of(module).values()
    torch.manual_seed(1)
    expected = pytree.tree_leaves(module(x))
    torch.manual_seed(1)
    assert_same(graph(*own, x), expected)
    assert ops(graph)[-1:] == {nn.Dropout: ["dropout"], nn.Dropout2d: ["mul"], nn.LSTM: ["lstm"]}[type(module)]


def drawn(m, x):
    """Draw in the functions that are chosen from, differently."""
    return torch.cond(x.sum() > m.least, lambda x: x + torch.randn(4, 3), lambda x: x * torch.rand_like(x), [x]) * 2


@pytest.mark.parametrize("least", [-1e9, 1e9], ids=["one", "the other"])
def test_draws_in_a_choice(least):
    """The graph draws in the function that is taken."""
    module, x = choice(drawn, least)(), torch.randn(4, 3)
    own = values_of(module).values()
    for pre_dispatch in (True, False):
        graph, _ = export(module, (x,), pre_dispatch=pre_dispatch)
        for seed in (1, 2):
            torch.manual_seed(seed)
            expected = module(x)
            torch.manual_seed(seed)
            assert_same(graph(*own, x), [expected])


def asks(m, x):
    """Return grad mode and `requires_grad` of tensors as a number."""

    def shown(y):
        return y * (1 + torch.is_grad_enabled()) * (3 + 2 * y.requires_grad)

    y = shown(m.l(x))
    with torch.no_grad():
        z = shown(functional.gelu(y))
    return shown(z) + shown(torch.cond(x.sum() > m.least, lambda y: shown(shown(y.softmax(1))), torch.sin, [y]).sum())


@pytest.mark.parametrize("enabled", [False, True], ids=["off", "on"])
def test_grad_mode(enabled):
    """Grad mode, and `requires_grad` of tensors, equal eager's at the place of the export call."""
    module, x = Of(asks, l=nn.Linear(3, 3), least=-1e9), x43()
    with torch.set_grad_enabled(enabled):
        graph, _ = export(module, (x,), pre_dispatch=True)
        assert_same(graph(*values_of(module).values(), x), [module(x)])
        assert torch.is_grad_enabled() == enabled
    turned = [each for each in ops(graph) if "grad" in each]
    assert turned == ["grad off", "grad on" if enabled else "grad off"]


def test_decompositions():
    """Decompositions of composite ops are applied and may call other composite ops.

    Lower ops are decomposed as usual.
    """
    table = {
        aten.linear.default: lambda x, w, b=None: aten.matmul.default(x, w.t()) + b,
        aten.cos.default: lambda x: (x + torch.pi / 2).sin(),
        aten.softmax.int: lambda *args: NotImplemented,
    }
    module = Of(lambda m, x: m.l(x).cos().softmax(1), l=nn.Linear(3, 2))
    graph, _ = export(module, (x43(),), pre_dispatch=True, decompositions=table)
    assert ops(graph) == ["t", "matmul", "add", "add", "sin", "_softmax"]
    x = x43()
    torch.testing.assert_close(graph(*values_of(module).values(), x)[0], module(x))


def gradient_inside(m, x):
    """Differentiate an op that is kept."""
    return torch.autograd.grad(m.l(x).sum(), m.l.weight)[0]


def another_grad_mode(m, x):
    """Leave grad mode off."""
    torch.set_grad_enabled(False)
    return x * 2


#: name → (the module's function, its arguments, the text of the error)
REFUSED = {
    "a gradient inside": (gradient_inside, x43, "pass pre_dispatch=False"),
    "another grad mode": (another_grad_mode, x43, "leaves grad mode changed"),
    "functions": (lambda m, x: associative_scan_op(torch.add, [x], ()), x43, "takes functions"),
    "a parameter written": (lambda m, x: m.l.weight.mul_(2).sum() + x, x43, "leaf Variable that requires grad"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    """A program that cannot be exported is refused with its line, and nothing was changed."""
    function, argument, said = REFUSED[name]
    module, x = Of(function, l=nn.Linear(3, 3)), argument()
    held = [*values_of(module).values(), x]
    before, state = snapshot(held), global_torch_state()
    with pytest.raises(RefusedError, match=rf"(?s){said}") as caught:
        aotlab.aot_export_module(module, (x,), trace_joint=False, pre_dispatch=True)
    assert "aotlab/export" not in str(caught.value)
    assert_same(held, before)
    assert global_torch_state() == state


def test_ops_of_users():
    """A composite op of a user's is kept, unless it draws or returns one memory twice and does not say so."""
    with torch.library._scoped_library("pre_dispatch_tests", "FRAGMENT") as library:
        for name, returned, function in (
            ("twice", "Tensor", lambda x: x * 2),
            ("noisy", "Tensor", lambda x: x + torch.rand_like(x)),
            ("pair", "(Tensor, Tensor)", lambda x: ((y := x * 3), y[0])),
        ):
            library.define(f"{name}(Tensor x) -> {returned}")
            library.impl(name, function, "CompositeImplicitAutograd")
        own, x = torch.ops.pre_dispatch_tests, x43()

        def several(m, x):
            whole, part = own.pair(own.noisy(own.twice(x)))
            whole.add_(1)
            return part * 2

        graph, _ = export(Of(several), (x,), pre_dispatch=True)
        assert ops(graph) == ["twice", "rand_like", "add", "mul", "add", "select", "mul"]
        torch.manual_seed(0)
        expected = several(None, x)
        torch.manual_seed(0)
        assert_same(graph(x), [expected])


def test_interrupt():
    """After an interrupt torch is as it was, and the next export finds nothing of this one."""
    module, x = nn.Linear(3, 2), x43()
    state = global_torch_state()

    def interrupt(m, x):
        with torch.no_grad():
            m.l(x)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        aotlab.aot_export_module(Of(interrupt, l=module), (x,), trace_joint=False, pre_dispatch=True)
    assert global_torch_state() == state
    graph, _ = export(module, (x,))
    assert ops(graph) == ["t", "addmm"]


def test_misuse():
    """A graph that keeps ops has no gradients in it."""
    with pytest.raises(UsageError, match="pass trace_joint=False"):
        aotlab.aot_export_module(nn.Linear(3, 2), (x43(),), trace_joint=True, output_loss_index=0, pre_dispatch=True)


def test_saved(tmp_path):
    """Changes of grad mode are saved, too."""
    module, x = Of(grad_mode_changed_twice, **square()), x43()
    graph, signature = export(module, (x,), pre_dispatch=True)
    loaded, again = aotlab.export.load(aotlab.export.save(tmp_path / "graph.json", graph, signature))
    assert ops(loaded) == ops(graph)
    run_beside_eager(loaded, again, module, (x,), None)
