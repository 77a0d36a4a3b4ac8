"""The Dynamo frontend: ``torch.compile`` with our backend, on the eager compiler."""

from __future__ import annotations

import importlib.metadata
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import aotlab
from aotlab import config
from aotlab.errors import RefusedError, UsageError
from aotlab.events import CompileFailed, StageFinished
from aotlab.frontends import dynamo_frontend as dynamo
from aotlab.frontends.dynamo_frontend import backend, line_of_stack
from aotlab.ir.metadata import MutationType, OutputType, TangentSource
from tests.engine_helpers import heard_events, leaf, metadata, nonleaf, traced

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def by_dynamo(function, **settings):
    """Let Dynamo capture and our engine compile, on torch's own kernels."""
    return aotlab.compile(function, backend="eager", frontend="dynamo", **settings)


def agree(function, make, *, calls=2):
    """Assert that outputs, written arguments and gradients of leaves agree with eager."""
    results = []
    for candidate in (function, by_dynamo(function)):
        seen = []
        for _ in range(calls):
            args, leaves = make()
            torch.manual_seed(0)
            out = candidate(*args)
            flat = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
            differentiable = [t.sum() for t in flat if t.requires_grad]
            if differentiable:
                sum(differentiable).backward()
            seen.append(
                (
                    [t.detach() for t in flat],
                    [(tuple(t.stride()), t.requires_grad) for t in flat],
                    [t.detach() for t in args if isinstance(t, torch.Tensor)],
                    [t.grad for t in leaves],
                )
            )
        results.append(seen)
    for (outs, forms, args, grads), (outs2, forms2, args2, grads2) in zip(*results, strict=True):
        for a, b in zip([*outs, *args, *grads], [*outs2, *args2, *grads2], strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
        assert forms == forms2


def test_full_model_in_training():
    """An encoder layer: outputs and all gradients bit for bit."""
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    x = leaf(2, 5, 8)
    expected = module(x)
    expected.sum().backward()
    gradients = {n: p.grad.clone() for n, p in module.named_parameters()}
    module.zero_grad()
    x.grad = None
    out = by_dynamo(module)(x)
    assert torch.equal(out, expected)
    out.sum().backward()
    assert all(torch.equal(p.grad, gradients[n]) for n, p in module.named_parameters())


def test_graph_break():
    """Python between two graphs runs as Python; both graphs are compiled."""
    printed = []

    def f(x, w):
        y = x * w
        torch._dynamo.graph_break()
        printed.append(float(y.sum().detach()))
        return (y.sin() * w).sum()

    with heard_events() as heard:
        agree(f, lambda: ((a := leaf(3), b := leaf(3, seed=1)), (a, b)), calls=1)
    assert len([e for e in heard if isinstance(e, StageFinished) and e.stage == "runtime"]) >= 2
    assert len(printed) == 2
    assert printed[0] == printed[1]


def test_batch_norm_module():
    """Statistics are written, in training and eval."""
    ours, theirs = (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    compiled_module = by_dynamo(ours)
    for training in (True, True, False):
        ours.train(training)
        theirs.train(training)
        x = torch.randn(5, 3)
        assert torch.equal(compiled_module(x), theirs(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))


def test_autocast_and_no_grad_inside_the_graph():
    """Both are in Dynamo's graph, not around it."""

    def f(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
        with torch.no_grad():
            scale = y.float().abs().max()
        return (y.float() / scale).sin()

    agree(f, lambda: ((a := leaf(2, 3), b := leaf(3, 4, seed=1)), (a, b)))


def test_mutation_and_aliasing():
    """Mutated inputs, views of inputs and intermediates."""

    def f(x, w):
        x.mul_(w)
        z = (x * 2).sin()
        return x.t(), z[0], z

    def make():
        a, w = leaf(2, 3), leaf(2, 3, seed=1)
        return (a * 1, w), (a, w)

    agree(f, make)


def test_refused_graphs_run_eagerly_with_one_warning():
    """Behind Dynamo, a refusal becomes an eager run with right values, one warning and an event.

    With the fallback "error", it is an error.
    """

    def f(x):
        x.untyped_storage().resize_(24)
        return x * 2

    x = torch.randn(2, 3)
    y = x.clone()
    expected = f(y)
    g = by_dynamo(f)
    with heard_events() as heard, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outs = []
        for _ in range(2):
            z = x.clone()
            outs.append((g(z), z))
    for out, z in outs:
        assert torch.equal(out, expected)
        assert z.shape == y.shape
        assert torch.equal(z, y)
    ours = [w for w in caught if issubclass(w.category, RuntimeWarning) and "runs eagerly" in str(w.message)]
    failures = [e for e in heard if isinstance(e, CompileFailed)]
    if failures:  # on some versions Dynamo itself breaks the graph there, and nothing is left to refuse
        assert len(ours) == 1
        assert [e.outcome for e in failures] == ["ran eagerly"] * len(failures)


def test_errors_of_what_runs_eagerly(capfd):
    """They are eager's, and nothing is printed: torch's graphs report each error, and can fail at that."""

    def f(x):
        x[1:].add_(x[:-1])
        return x

    g = aotlab.compile(f, backend="eager", frontend="dynamo")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="single memory location"):
            g(torch.ones(4))
    assert "FX-traced" not in capfd.readouterr().err


def test_fallback_error_raises_behind_dynamo():
    """Under config.fallback="error" the refusal is raised, and nothing was written."""

    def f(x):
        x.mul_(2)
        return torch.view_as_complex(x).conj()[1:]

    base = torch.arange(6.0).view(3, 2)
    with config.patch(fallback="error"), pytest.raises(Exception) as caught:  # noqa: PT011  # Dynamo may wrap it
        by_dynamo(f)(base)
    error = caught.value
    while error is not None and not isinstance(error, RefusedError):
        error = error.__cause__ or error.__context__
    assert isinstance(error, RefusedError)
    assert base.flatten().tolist() == list(range(6))


def test_data_dependent_graphs():
    """Boolean masks and items break Dynamo's graph or are refused; values are eager's."""

    def f(x):
        y = x[x > 0]
        return y.sum() * x.sum().item()

    x = torch.randn(8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.allclose(by_dynamo(f)(x), f(x))


def test_custom_autograd_function_behind_dynamo():
    """A custom Function in Dynamo's graph (a higher-order op) is right, compiled or eagerly."""

    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 3

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 5

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agree(lambda x: Triple.apply(x) * 2, lambda: ((a := leaf(3),), (a,)))


def test_options():
    """The backend's options are checked."""
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(UsageError, match="'nonesuch'"):
        backend(gm, [torch.ones(1)], options={"nonesuch": 1})
    with pytest.raises(UsageError, match="'mode'"):
        backend(gm, [torch.ones(1)], mode="max-autotune")
    with pytest.raises(UsageError, match="inductor"):
        backend(gm, [torch.ones(1)], options={"compiler": "nonesuch"})
    call = backend(gm, [torch.ones(1)], options={"compiler": "eager", "partitioner": aotlab.default_partition})
    assert call(torch.ones(1)).item() == 2.0


def test_entry_point_name():
    """The project declares the backend under the name ``aotlab``; where it is installed, Dynamo knows it."""
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torch_dynamo_backends"] == {"aotlab": "aotlab.frontends.registered:backend"}
    assert dynamo.backend is backend
    installed = [e for e in importlib.metadata.entry_points(group="torch_dynamo_backends") if e.name == "aotlab"]
    if installed:
        assert installed[0].load() is backend
        assert "aotlab" in torch.compiler.list_backends()
        f = torch.compile(lambda x: x.mul_(2), backend="aotlab", options={"compiler": "eager"})
        assert f(torch.ones(2)).tolist() == [2.0, 2.0]


def test_registered_backend_by_name(monkeypatch):
    """``torch.compile(backend="aotlab")`` finds it by name, as the entry point does."""
    if "aotlab" not in torch.compiler.list_backends():
        from torch._dynamo.backends import registry

        registry.register_backend(backend, name="aotlab")
    f = torch.compile(lambda x: x.mul_(2), backend="aotlab", options={"compiler": "eager"})
    x = torch.ones(2)
    assert f(x).tolist() == [2.0, 2.0]
    assert x.tolist() == [2.0, 2.0]


def test_lines_and_names_are_the_users():
    """Nodes know the user's line through Dynamo's stack traces, arguments the user's names."""

    def f(first, second):
        y = first.sin()
        return (y * second).sum()

    with heard_events() as heard:
        by_dynamo(f)(leaf(3), leaf(3)).backward()
    records = {e.stage: e.record for e in heard if isinstance(e, StageFinished)}
    from aotlab.ir.fx_graphs import line_of

    assert [a.name for a in records["capture"].arguments] == ["first", "second"]
    assert records["capture"].frontend == "dynamo"
    lines = {
        (n.meta["phase"], str(n.target).split(".")[1]): line_of(n)
        for n in records["trace"].module.graph.nodes
        if n.op == "call_function"
    }
    assert lines["forward", "sin"].code == "y = first.sin()"
    assert lines["backward", "cos"].code == "y = first.sin()"
    backward = [
        n for n in records["trace"].module.graph.nodes if n.op == "call_function" and n.meta["phase"] == "backward"
    ]
    assert all("stack_trace" in n.meta for n in backward)


def test_module_stack_on_backward_nodes():
    """Dynamo's nn_module_stack is carried to forward and backward nodes."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with heard_events() as heard:
        by_dynamo(module)(leaf(1, 2)).sum().backward()
    graph = next(e.record for e in heard if isinstance(e, StageFinished) and e.stage == "trace").module.graph
    for name in ("tanh", "tanh_backward"):
        node = next(n for n in graph.nodes if n.op == "call_function" and str(n.target).split(".")[1] == name)
        assert node.meta["nn_module_stack"]


def test_line_of_stack():
    """The innermost frame of a stack trace in text form."""
    text = 'File "/a.py", line 1, in outer\n    inner()\n  File "/b.py", line 22, in inner\n    return x * 2\n'
    line = line_of_stack(text)
    assert (line.file, line.line, line.function, line.code) == ("/b.py", 22, "inner", "return x * 2")
    assert line_of_stack(None) is None
    assert line_of_stack("") is None


def test_recompiles_by_dynamo_and_by_us():
    """Other shapes come through Dynamo's guards, and are right."""
    g = by_dynamo(lambda x: x * x.shape[0], dynamic=False)
    for size in (2, 3, 2):
        assert g(torch.ones(size)).tolist() == [float(size)] * size


def test_symbols_that_nobody_asked_for_are_no_news():
    """When Dynamo makes symbols because a size changed there is no warning."""
    g = by_dynamo(lambda x: x.sin() * x.shape[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (2, 3, 5):
            assert torch.equal(g(torch.ones(size)), torch.ones(size).sin() * size)


def test_a_module_of_torchs_has_names():
    """Where no line is the user's the warning names the module that was compiled."""
    g = by_dynamo(nn.Linear(3, 3))
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        assert g(torch.ones(2, 3)).shape == (2, 3)
    said = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert ["`Linear` runs eagerly" in each for each in said] == [True]


def test_all_observables_through_dynamo():
    """The whole list of observables, through Dynamo."""

    def make(function):
        return by_dynamo(function)

    from aotlab.verification import compare

    def f(x, y):
        x.add_(y)
        return x.view(-1), (x * y).t()

    result = compare(f, (nonleaf(2, 3), leaf(2, 3)), candidate=make)
    assert result.first is None, result.first


def _backward_of_one_graph(x, model):
    loss = model(x).relu().sum()
    loss.backward()
    return loss * 2


def _backward_through_segments(x, model):
    y = model(x)
    z = y.exp()
    torch._dynamo.graph_break()
    y = y * 2
    loss = (y * 3).sum() + z.sum()
    torch._dynamo.graph_break()
    loss.backward()
    return loss * 2


def _backward_through_nodes_of_outputs(x, model):
    y = torch.complex(model(x), x)
    a, b = y.sin(), y.cos()
    torch._dynamo.graph_break()
    torch.view_as_real(a * b).sum().backward()
    return a.real * 2


def _backward_through_a_common_node(x, model):
    y = model(x)
    a = y.sin()
    q, r = torch.linalg.qr(y.t())
    torch._dynamo.graph_break()
    (q.sum() + r.sum() + a.sum()).backward()
    return a * 2


@pytest.mark.parametrize(
    "function",
    [
        _backward_of_one_graph,
        _backward_through_segments,
        _backward_through_nodes_of_outputs,
        _backward_through_a_common_node,
    ],
    ids=lambda f: f.__name__[1:],
)
def test_dynamo_looks_into_no_backward_of_ours(function):
    """With a backward inside the function Dynamo reads no more frames, and warns of no more, than without us."""
    seen = []
    for ours in (False, False, True):  # at first torch still imports this and that
        torch.compiler.reset()
        made = []

        def keep(graph, inputs, made=made, ours=ours):
            made.append(backend(graph, inputs, options={"compiler": "eager"}) if ours else graph.forward)
            return made[-1]

        torch.manual_seed(0)
        model, x = nn.Linear(3, 3), torch.linspace(-1, 1, 6).view(2, 3)
        counters["frames"].clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            values = [torch.compile(function, backend=keep)(x, model).tolist() for _ in range(2)]
        seen.append((dict(counters["frames"]), len(made), values, model.weight.grad.tolist()))
        if ours:
            assert all(each.compiled.calls.compiled for each in made)
    assert seen[1] == seen[2]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_records_are_those_of_a_direct_call(grad):
    """Behind Dynamo, the records of inputs, outputs, bases and tangents equal those for a direct call."""

    def f(x, w, b):
        x.mul_(w)
        with torch.no_grad():
            b.add_(1)
        y = (x * 2).sin()
        return x.t(), y[0], y, y.unbind(0)[1], x @ w.t()

    def make():
        x, w = (leaf(2, 3, seed=seed).detach().requires_grad_(grad) for seed in range(2))
        return x * 1, w, torch.ones(3)

    made = []

    def keep(graph, inputs):
        made.append(backend(graph, inputs, options={"compiler": "eager"}))
        return made[-1]

    torch._dynamo.reset()
    torch.compile(f, backend=keep)(*make())
    (behind_dynamo,) = made
    direct = metadata(traced(f, *make()))
    for found in (direct, metadata(behind_dynamo)):
        written = MutationType.MUTATED_OUT_GRAPH if grad else MutationType.MUTATED_IN_GRAPH
        assert [i.mutation_type for i in found.input_info] == [written, MutationType.NOT_MUTATED, written]
        assert [i.mutations_under_no_grad_or_inference_mode for i in found.input_info] == [False, False, True]
        assert [o.output_type for o in found.output_info] == [
            OutputType.ALIAS_OF_INPUT,
            OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT,
            OutputType.NON_ALIAS,
            OutputType.ALIAS_OF_INTERMEDIATE_BASE_IS_USER_OUTPUT,
            OutputType.NON_ALIAS,
        ]
        expected = [TangentSource.MUTATED_INPUT, TangentSource.OUTPUT, TangentSource.OUTPUT] if grad else []
        assert [t.source for t in found.tangents] == expected


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_list_and_an_out_behind_dynamo():
    """Dynamo's graph holds the tensors that are joined in a list of fx's own; the trace once crashed the process."""
    out, x = torch.zeros(4, 3), torch.ones(2, 3)
    options = {"compiler": "eager"}
    program = torch.compile(
        lambda x, out: (torch.cat([x, x * 2], out=out), out + 1)[1], backend=dynamo.backend, options=options
    )
    assert program(x, out).tolist() == [[2.0] * 3] * 2 + [[3.0] * 3] * 2
    assert out.tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
