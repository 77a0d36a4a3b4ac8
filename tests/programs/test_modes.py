"""Grad mode, autocast, deterministic algorithms, inference mode and default dtype are eager's."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from aotlab.errors import EscapeError
from tests.engine_helpers import compiled, global_torch_state, leaf, nonleaf, refusing, same

FRONTENDS = ["direct", "dynamo"]


def bf16(*, enabled=True, cache=None):
    """Return autocast on the CPU."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled, cache_enabled=cache)


# --- grad mode ---------------------------------------------------------------------------------------------------


def leaves_off(x):
    """Switch grad mode off and leave it so."""
    y = x * 2
    torch.set_grad_enabled(False)
    return y, y * 3, x.view(-1)


def leaves_on(x):
    """Switch it on and leave it so."""
    y = x.detach() * 2
    torch.set_grad_enabled(True)
    return y, x * 3, x.view(-1)


def toggles(x):
    """Switch it several times and leave it as it was."""
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = x * 3
            torch.set_grad_enabled(False)
            c = x * 4
        d = x * 5
    return a, b, c, d, x * 6


@torch.no_grad()
def decorated(x):
    """Run without grad mode."""
    return x * 2, x.view(-1)


def mutates_then_leaves(x):
    """Write under grad mode, then switch it off, and write again."""
    x.mul_(2)
    torch.set_grad_enabled(False)
    x.add_(1)
    return x.sum()


@pytest.mark.parametrize("around", [True, False], ids=["grad mode on", "grad mode off"])
@pytest.mark.parametrize(
    "make", [lambda: leaf(3), lambda: leaf(3).detach(), lambda: nonleaf(3)], ids=["leaf", "plain", "nonleaf"]
)
@pytest.mark.parametrize("program", [leaves_off, leaves_on, toggles, decorated, mutates_then_leaves])
def test_grad_mode_inside(program, make, around):
    """Set, nested, left changed: outputs, their grad_fn and gradients, and the mode afterwards."""
    x = make()
    with torch.set_grad_enabled(around):
        if program is mutates_then_leaves and x.is_leaf and x.requires_grad and around:
            with pytest.raises(RuntimeError, match="leaf"):
                compiled(program)(x)
            return
        same(program, x)


@pytest.mark.parametrize("program", [leaves_off, leaves_on])
def test_grad_mode_left_behind_dynamo(program):
    """If the function changes grad mode and does not restore it, the caller finds eager's mode behind Dynamo too."""
    torch._dynamo.reset()
    found = []
    for function in (program, compiled(program, frontend="dynamo")):
        for _ in range(2):
            out = function(leaf(3))
            found.append((torch.is_grad_enabled(), [o.requires_grad for o in out]))
            torch.set_grad_enabled(True)
    assert found[2:] == found[:2]


# --- autocast ----------------------------------------------------------------------------------------------------


def mixed(x, w):
    """Compute with ops that autocast lowers, leaves and raises."""
    h = x @ w
    return torch.nn.functional.softmax(h, -1), (h.float().exp() @ w).pow(2).sum(), h


def nested_autocast(x, w):
    """Switch autocast on, off and on again inside."""
    with bf16():
        a = x @ w
        with bf16(enabled=False):
            b = a.float() @ w
            with bf16():
                c = b @ w
        d = c @ w
    return a, b, c, d, x @ w


def autocast_inside(x, w):
    """Switch it on for all."""
    with bf16():
        return mixed(x, w)


@pytest.mark.parametrize("around", [False, True], ids=["without", "around"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("program", [mixed, nested_autocast, autocast_inside])
def test_autocast(program, grad, around):
    """Autocast inside, around and nested gives eager's results and gradients bit for bit, and restores the settings."""
    x, w = leaf(4, 4), leaf(4, 4, seed=1)
    if not grad:
        x, w = x.detach(), w.detach()
    before = global_torch_state()
    with bf16(enabled=around):
        same(program, x, w)
    assert global_torch_state() == before


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("backward", [False, True], ids=["backward without", "backward under"])
@pytest.mark.parametrize("forward", [False, True], ids=["forward without", "forward under"])
@pytest.mark.parametrize("program", [mixed, nested_autocast, lambda x, w: (x @ w).sin().sum()])
def test_autocast_of_the_backward(program, forward, backward, frontend):
    """Eager casts in the backward by the autocast that is on around the backward, not the forward; so do we."""
    torch._dynamo.reset()
    gradients = []
    for function in (program, compiled(program, frontend=frontend)):
        for _ in range(2):
            x, w = leaf(8, 8), leaf(8, 8, seed=1)
            with bf16(enabled=forward):
                out = function(x, w)
            outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
            with bf16(enabled=backward):
                torch.autograd.backward(outs, [torch.full_like(o, 0.5) for o in outs])
            gradients.append((x.grad, w.grad))
    for found in gradients[1:]:
        assert [g.dtype for g in found] == [g.dtype for g in gradients[0]]
        assert all(torch.equal(a, b) for a, b in zip(gradients[0], found, strict=True))


def test_one_backward_per_autocast():
    """The backwards of one entry: without autocast, under bfloat16, under float16, and each again."""
    program = compiled(lambda x, w: (x @ w).sin().sum())
    reference = lambda x, w: (x @ w).sin().sum()  # noqa: E731
    for dtype in (None, torch.bfloat16, torch.float16, None, torch.bfloat16):
        gradients = []
        for function in (reference, program):
            x, w = leaf(8, 8), leaf(8, 8, seed=1)
            out = function(x, w)
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                out.backward()
            gradients.append((x.grad, w.grad))
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert len(program.entries) == 1


def test_autocast_with_weights_that_are_cast_once():
    """Autocast's cache of casted weights: filled and used as without us, and nothing of a trace in it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    g = compiled(model)
    for cache in (True, False):
        for _ in range(2):
            with bf16(cache=cache):
                x = torch.linspace(-1, 1, 8).reshape(2, 4)
                expected, actual = model(x), g(x)
                assert torch.equal(expected, actual)
                assert actual.dtype == torch.bfloat16
            gradients = []
            for out in (expected, actual):
                model.zero_grad()
                out.float().sum().backward()
                gradients.append([p.grad.clone() for p in model.parameters()])
            assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


ENCODER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
OWN_CASTS = {
    "affine_grid": lambda x: functional.affine_grid(x[:1, :2, :3], (1, 1, 3, 5), align_corners=False),
    "pinv": torch.linalg.pinv,
    "an encoder's layer": lambda x: ENCODER(x.relu()),
}


@pytest.mark.parametrize("name", OWN_CASTS)
def test_what_casts_by_itself_runs_eagerly(name):
    """Ops that cast inside their kernel run eagerly under autocast, because a graph would return another dtype."""
    with bf16(), torch.no_grad():
        same(OWN_CASTS[name], leaf(2, 8, 8).detach(), eagerly=True, backward=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_is_written_under_autocast(dtype):
    """``index_copy_`` of one dtype, for which autocast would cast nothing, is compiled."""

    def step(cache, x):
        cache.index_copy_(1, torch.tensor([1]), x)
        return cache.sum(1)

    with bf16(), torch.no_grad():
        same(step, torch.zeros(2, 3, dtype=dtype), torch.ones(2, 1, dtype=dtype), backward=None)


def test_autocast_left_on_is_refused():
    """A function that leaves autocast on: refused, and it is off."""

    def f(x):
        torch.set_autocast_enabled("cpu", True)
        return x @ x

    before = global_torch_state()
    x = torch.ones(2, 2)
    with refusing(EscapeError, match="autocast"):
        compiled(f)(x)
    assert global_torch_state() == before


# --- inference mode ----------------------------------------------------------------------------------------------


def inference_inside(x):
    """Compute under inference mode and clone the result out of it."""
    with torch.inference_mode():
        y = x * 2
    return y.clone(), x + 1


def inference_results(x):
    """Return a result that was made under inference mode, views of it, and views of ordinary tensors."""
    with torch.inference_mode():
        y = x * 2
        y.add_(1)
        z = x.view(-1)
    return y, y[1:], z, x.view(-1), x * 3


def writes_under_inference(x):
    """Write under inference mode."""
    with torch.inference_mode():
        x.detach().mul_((x * 2).exp())
        y = x.t()
    return x + 1, y


def looks_under_inference(x):
    """View as another dtype, and detach in place."""
    y = x * 2
    with torch.inference_mode():
        y.detach_()
        return y, x.view(torch.int32)


@pytest.mark.parametrize("make", [lambda: leaf(3), lambda: leaf(3).detach()], ids=["training", "inference"])
@pytest.mark.parametrize(
    "program", [inference_inside, inference_results, writes_under_inference, looks_under_inference]
)
def test_inference_mode_for_a_part(program, make):
    """A function that uses inference mode for a part runs eagerly."""
    same(program, make(), eagerly=True)
    with pytest.warns(RuntimeWarning, match=r"inference_mode is turned on or off between ops.*use no_grad there"):
        compiled(program)(make())
    results = [out.is_inference() for out in pytree.tree_leaves(compiled(program)(make()))]
    assert results == [out.is_inference() for out in pytree.tree_leaves(program(make()))]


@torch.inference_mode()
def decorated(x):
    """Compute under inference mode as a whole."""
    return (x * 2).sin()


def results_and_views(x):
    """Return a result of nested inference mode, an input, and views of both, and write."""
    with torch.inference_mode():
        y = x.detach().mul_(2).exp()
        with torch.inference_mode():
            return y, y[1:], x.view(-1), x, y.relu_()


def looks_around(x):
    """Read the modes before, inside and after the block."""
    before = torch.is_grad_enabled(), x.requires_grad
    with torch.inference_mode():
        y = x * (2 if torch.is_grad_enabled() else 3)
    return y, before, torch.is_grad_enabled(), y.shape


def under_autocast(x):
    """Compute in both modes."""
    with torch.inference_mode(), bf16():
        return x[:, None] @ x[None] * 2


INSIDE = [decorated, results_and_views, looks_around, under_autocast]


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("make", [lambda: leaf(3) * 1, lambda: leaf(3).detach()], ids=["training", "inference"])
@pytest.mark.parametrize("program", INSIDE)
def test_inference_mode_inside(program, make, grad, frontend, fresh_dynamo):
    """A function that enters inference mode first is compiled; its results are inference tensors, as in eager."""
    function = compiled(program, frontend=frontend)

    def called(function):
        x, seen = make(), []
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                seen.append([*pytree.tree_map_only(torch.Tensor, described, [function(x), x])])
                seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return seen

    def described(tensor):
        counted = None if tensor.is_inference() else tensor._version
        return tensor.is_inference(), tensor.requires_grad, tensor._is_view(), counted, tensor.dtype, tensor.tolist()

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert called(function) == called(program)
    assert frontend == "dynamo" or (function.calls.compiled, len(function.entries)) == (2, 1)


def test_inference_mode_inside_for_all_sizes():
    """One entry serves all sizes, whatever mode surrounds the call."""
    function = compiled(decorated, dynamic=True)
    for n, mode in ((2, torch.enable_grad), (3, torch.no_grad), (5, torch.inference_mode)):
        x = leaf(n)
        with mode():
            assert torch.equal(function(x), decorated(x))
    assert (function.calls.compiled, len(function.entries)) == (3, 1)


def test_modes_left_behind_inference_mode():
    """A function with inference mode that also leaves grad mode changed runs eagerly."""

    def leaves(x):
        with torch.inference_mode():
            y = x * 2
        torch.set_grad_enabled(False)
        return y

    with torch.enable_grad():
        same(leaves, leaf(3), eagerly=True, backward=None)


@pytest.mark.parametrize("program", [mixed, nested_autocast])
def test_inference_mode_around(program):
    """Around the call: the outputs are inference tensors, as in eager, of ordinary and of inference inputs."""
    x, w = leaf(4, 4), leaf(4, 4, seed=1)
    with torch.inference_mode():
        same(program, x, w, backward=None)
        inside = (x * 1, w * 1)
        assert inside[0].is_inference()
        g = compiled(program)
        for actual, expected in zip(g(*inside), program(*inside), strict=True):
            assert (actual.is_inference(), actual.requires_grad) == (expected.is_inference(), expected.requires_grad)
            assert torch.equal(actual, expected)
    outside = compiled(lambda x: x * 2)
    assert outside(inside[0]).is_inference() is False


COMPOSITES = {
    "a dropout that drops nothing": lambda x: functional.dropout(x, training=False),
    "a sum that transposes": lambda x: torch.einsum("ij->ji", x),
    "the tensor as it is": torch.atleast_2d,
    "a cell": lambda x: torch.gru_cell(x, x.cos(), x.repeat(3, 1), x.repeat(3, 1).sin()),
    "smoothed labels": lambda x: functional.cross_entropy(x, x.argmax(1), label_smoothing=0.1),
    "a quantile": lambda x: x.quantile(0.3, dim=1),
    "a dropout": lambda x: functional.dropout(x, 0.5),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_composite_ops_in_inference_mode(name):
    """In inference mode, the trace sees the writes and views of composite ops.

    Autograd does not decompose them there.
    """

    def program(x):
        y = COMPOSITES[name](x)
        z = y + 1
        y.mul_(2)
        return x * 2, y, z

    with torch.inference_mode():
        same(program, leaf(4, 4).detach(), backward=None)


def test_views_of_parameters_in_inference_mode():
    """A view of an ordinary tensor that requires grad requires it, too; by that, `matmul` chooses its kernel."""
    layer = nn.Linear(4, 4)
    with torch.inference_mode():
        assert layer.weight.t().requires_grad
        same(lambda x: (x * (2 if layer.weight.t().requires_grad else 3), layer(x)), torch.ones(2, 4), backward=None)


def test_a_cache_is_written_in_inference_mode():
    """In inference mode, a call that writes an ordinary tensor and views it afterwards is compiled.

    A decoder's cache is used in this way.
    """
    ours, wanted = torch.zeros(3, 4), torch.zeros(3, 4)

    def program(cache, x):
        cache[1].copy_(x)
        return cache[:2].t() @ cache[:2], cache[None]

    g = compiled(program)
    with torch.inference_mode():
        found, expected = g(ours, torch.ones(4)), program(wanted, torch.ones(4))
    assert g.calls.compiled == 1
    assert torch.equal(ours, wanted)
    assert torch.equal(found[0], expected[0])
    assert found[1]._base is ours


def test_parameters_made_in_inference_mode():
    """Outside inference mode, eager keeps no history for ops on parameters that were made inside.

    Such calls run eagerly.
    """
    with torch.inference_mode():
        layer, x = nn.Linear(4, 4), leaf(4, 4).detach()
    g = compiled(lambda x: layer(x).relu())
    with pytest.warns(RuntimeWarning, match="requires grad was made in inference mode"):
        result = g(x)
    assert torch.equal(result, layer(x).relu())
    assert not result.requires_grad
    with torch.no_grad():
        assert torch.equal(g(x), layer(x).relu())
    assert g.calls.compiled == 1


@pytest.mark.parametrize("ask", [lambda x: x.is_inference(), torch.is_inference], ids=["method", "function"])
def test_asking_for_inference_runs_eagerly(ask):
    """A trace's tensors would answer otherwise than the call's."""
    with torch.inference_mode():
        same(lambda x: x * 2 if ask(x) else x, leaf(3).detach(), eagerly=True, backward=None)


def test_saving_an_inference_tensor():
    """An inference tensor that must be saved for backward raises eager's error."""
    with torch.inference_mode():
        x = torch.ones(3)
    messages = []
    for function in (lambda x, w: (x * w).sum(), compiled(lambda x, w: (x * w).sum())):
        with pytest.raises(RuntimeError) as caught:
            function(x, leaf(3)).backward()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


# --- deterministic algorithms, default dtype ---------------------------------------------------------------------


@pytest.fixture
def deterministic():
    """Ask for deterministic algorithms."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_deterministic_mode(grad):
    """Ops that have a deterministic form use it; fresh memory is filled as torch fills it in that mode."""
    x = leaf(3) if grad else leaf(3).detach()

    def f(x):
        y = torch.zeros(3).index_add(0, torch.tensor([0, 0, 2]), x)
        z = torch.zeros(3).scatter_reduce(0, torch.tensor([0, 0, 2]), x, "sum")
        return y * z, x[torch.tensor([0, 0, 1])]

    same(f, x)
    empty = compiled(lambda x: torch.empty(3) if x.dim() else x)
    assert empty(torch.ones(1)).isnan().all()


def test_deterministic_mode_is_guarded():
    """A call in the other deterministic mode compiles again.

    An op without a deterministic form raises eager's error.
    """
    g = compiled(lambda x: x.cumsum(0))
    g(torch.ones(2))
    put = compiled(lambda x: (x * 2).put_(torch.tensor([0]), torch.ones(1)))
    assert put(torch.ones(2)).tolist() == [1.0, 2.0]
    torch.use_deterministic_algorithms(True)
    try:
        g(torch.ones(2))
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            put(torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert put(torch.ones(2)).tolist() == [1.0, 2.0]
    assert len(g.entries) == 2
    assert "deterministic" in g.recompiles[0]


@pytest.mark.parametrize(
    "setter",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        lambda: torch.set_default_device("meta"),
    ],
    ids=["dtype", "deterministic", "precision", "threads", "device"],
)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_settings_left_changed_are_refused(setter, grad):
    """Refused, and both the setting and the argument are as before."""

    def f(x):
        x.mul_(2)
        setter()
        return x * 2

    x = nonleaf(2) if grad else torch.ones(2)
    values, before = x.tolist(), global_torch_state()
    with refusing(EscapeError):
        compiled(f)(x)
    assert global_torch_state() == before
    assert torch.get_default_device() == torch.device("cpu")
    assert x.tolist() == values


@pytest.mark.parametrize(
    ("change", "back"),
    [
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
        (
            lambda: torch.set_float32_matmul_precision("medium"),
            lambda: torch.set_float32_matmul_precision("highest"),
        ),
    ],
    ids=["dtype", "deterministic", "precision"],
)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_settings_that_are_put_back(change, back, grad):
    """The graph would run under the call's setting: an op under another one is refused, with its line."""

    def f(x):
        x.mul_(2)
        change()
        try:
            return torch.ones(2) * x
        finally:
            back()

    x = nonleaf(2) if grad else torch.ones(2)
    values, before = x.tolist(), global_torch_state()
    with refusing(EscapeError, match="changes a global setting") as caught:
        compiled(f)(x)
    assert "torch.ones(2) * x" in str(caught.value)
    assert global_torch_state() == before
    assert x.tolist() == values


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_default_dtype_around(frontend):
    """Another default dtype around the call is another entry."""
    torch._dynamo.reset()
    g = compiled(lambda x: torch.ones(2) * 1.5 + x, frontend=frontend)
    assert g(torch.ones(2)).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert g(torch.ones(2, dtype=torch.float32)).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert g(torch.ones(2)).dtype == torch.float32


# --- function modes ----------------------------------------------------------------------------------------------


class Adds(TorchFunctionMode):
    """Adds a number to each result of `torch.relu`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call the function."""
        result = func(*args, **(kwargs or {}))
        return result + 100 if func is torch.relu else result


class Scales(TorchFunctionMode):
    """Scales each result."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call the function."""
        result = func(*args, **(kwargs or {}))
        return result * 1.5 if isinstance(result, torch.Tensor) and result.is_floating_point() else result


def in_one_graph(x):
    """Compute."""
    return torch.relu(x).sin() * 2


def in_two_graphs(x):
    """Compute, with a break between."""
    y = torch.relu(x)
    torch._dynamo.graph_break()
    return torch.relu(y) * 2


def makes_a_tensor(x):
    """Compute with a tensor of the default device."""
    return torch.relu(x) + torch.ones(3)


def enters_a_mode(x):
    """Enter a mode inside, with a break in it."""
    with Adds():
        y = torch.relu(x)
        torch._dynamo.graph_break()
        y = torch.relu(y)
    return torch.relu(y)


def one_device(*modes):
    """Return a context manager that enters some modes around a default device."""

    @contextlib.contextmanager
    def entered():
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            yield stack.enter_context(torch.device("cpu"))

    return entered


@pytest.mark.filterwarnings("ignore:.*a torch function mode")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("function", [in_one_graph, in_two_graphs, makes_a_tensor, enters_a_mode])
@pytest.mark.parametrize(
    "mode", [Adds, Scales, one_device(), one_device(Adds), one_device(Scales, Adds)],
    ids=["adds", "scales", "device", "adds, device", "scales, adds, device"],
)  # fmt: skip
def test_a_function_mode_acts_once(mode, function, frontend):
    """A function mode acts once on each call of the program, and not on calls without the mode."""
    f = compiled(function, frontend=frontend)
    found = []
    for call in (f, function):
        for around in (mode, mode, contextlib.nullcontext):
            x = leaf(3)
            with around():
                out = call(x)
                out.backward(torch.ones(3))
                found.append((out.tolist(), x.grad.tolist(), torch._C._len_torch_function_stack()))
    assert found[:3] == found[3:]
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mode", [Adds, one_device(Adds)], ids=["adds", "adds, device"])
def test_a_call_that_raises_leaves_the_function_modes(mode):
    """After an error in a graph the caller's modes are on."""

    def function(x, n):
        return torch.relu(x)[n] * 2

    f = compiled(function, frontend="dynamo")
    with mode():
        before = torch.overrides._get_current_function_mode_stack()
        assert f(torch.ones(3), torch.tensor([1])).tolist() == [202.0]
        with pytest.raises(IndexError):
            f(torch.ones(3), torch.tensor([7]))
        assert torch.overrides._get_current_function_mode_stack() == before


def test_a_refused_trace_puts_settings_back():
    """A function that changes a setting and is then refused leaves the setting as it was."""

    def f(x):
        torch.set_default_dtype(torch.float64)
        return x.numpy()

    with refusing(EscapeError):
        compiled(f)(torch.ones(2))
    assert torch.get_default_dtype() == torch.float32
