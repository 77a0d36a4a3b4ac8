"""Timing captured graphs: which forms and phases are timed, and that the user's objects stay unchanged."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from aotlab import _torch as internals
from aotlab import config, events
from aotlab.cache import CompiledFunction
from aotlab.errors import UsageError
from aotlab.frontends.dynamo_frontend import backend
from aotlab.guards.call_state import TensorFacts, tensor_facts
from aotlab.notebook import measure as module
from aotlab.notebook.measure import Captured, measure
from aotlab.report.model import MemoryCurve, TimingRow

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

#: Enough for a few rounds of what is tested here.
SECONDS = 0.2

FORWARD = [("eager", "forward"), ("aotlab", "forward")]
TRAINING = [(engine, phase) for phase in ("forward", "backward", "total") for engine in ("eager", "aotlab")]


class Notebook:
    """A stand-in for the magic that compiles functions and keeps the data that a measurement needs."""

    def __init__(self) -> None:
        self.captured: list[Captured] = []
        self.inputs: list[tuple[Any, ...] | None] = []
        self.notes: list[str] = []
        self.progress: list[str] = []
        self.curves: list[MemoryCurve] = []

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile ``function`` by Dynamo and the eager backend."""
        return torch.compile(function, backend=self._backend)

    def measure(self, seconds: float = SECONDS) -> tuple[TimingRow, ...]:
        """Measure all that was captured."""
        return measure(self.captured, self.progress.append, seconds, self.notes.append, self.curves.append)

    def _backend(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiled = backend(graph, example_inputs, options={"compiler": "eager"})
        number = len(self.captured)
        self.inputs.append(None)
        self.captured.append(
            Captured(
                frame=f"frame {number}",
                graph=graph,
                compiled=compiled,
                inputs=lambda number=number: self.inputs[number],
            )
        )

        def call(*args: Any) -> Any:
            self.inputs[number] = args
            return compiled(*args)

        return call


@pytest.fixture
def notebook() -> Notebook:
    """Make a notebook with nothing in it."""
    return Notebook()


def kinds(rows: Sequence[TimingRow]) -> list[tuple[str, str]]:
    """Return the engine and the phase of each timed row."""
    return [(row.engine, row.phase) for row in rows]


def test_training_graphs_have_all_phases(notebook: Notebook) -> None:
    """Where something requires grad, forward, backward and both together are timed under both engines."""
    weight = torch.randn(4, 4, requires_grad=True)
    notebook.compile(lambda x: (x @ weight).relu())(torch.randn(2, 4)).sum().backward()
    rows = notebook.measure()
    assert kinds(rows) == TRAINING
    assert {(row.frame, row.graph, row.device) for row in rows} == {("frame 0", 0, "cpu")}
    assert all(0 < row.min_ns <= row.p10_ns <= row.median_ns <= row.p90_ns for row in rows)
    assert all(row.repeats > 0 for row in rows)
    assert (notebook.progress, notebook.notes) == ([f"timing frame 0, at most {SECONDS:.1f} s"], [])
    product = 2 * 4 * 4
    for curve, engine in zip(notebook.curves, ("eager", "aotlab"), strict=True):
        assert (curve.engine, curve.frame, curve.graph, curve.device) == (engine, "frame 0", 0, "cpu")
        assert max(curve.forward) == 2 * product  # the product and its relu
        assert max(curve.backward) >= product + 4 * 4 * 4  # the result, and the gradient of the weight


def test_inference_graphs_have_a_forward_only(notebook: Notebook) -> None:
    """Nothing requires grad, or grad mode was off at the capture although it is on now: there is no backward."""
    weight = torch.randn(4, 4, requires_grad=True)
    notebook.compile(lambda x: x.sin())(torch.randn(4))
    with torch.no_grad():
        notebook.compile(lambda x: x @ weight)(torch.randn(2, 4))
    with torch.inference_mode():
        notebook.compile(lambda x: x @ weight)(torch.randn(2, 4))
    assert kinds(notebook.measure()) == 3 * FORWARD
    assert notebook.progress == [
        f"timing frame {number} ({number + 1} of 3), at most {SECONDS / 3:.1f} s" for number in range(3)
    ]


def test_the_modes_of_the_capture_are_the_measurements(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines run under the grad mode and autocast of the capture, whatever they are now; now stays as it is."""
    seen = set()
    spread = module._spread

    def spy(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        seen.add((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return spread(function, inputs)

    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        notebook.compile(lambda x: x @ x)(torch.randn(4, 4))
    monkeypatch.setattr(module, "_spread", spy)
    before = torch.get_autocast_dtype("cpu")
    assert kinds(notebook.measure()) == FORWARD
    assert seen == {(False, True, torch.float16)}
    assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == (True, False)
    assert torch.get_autocast_dtype("cpu") == before


def test_every_call_sees_the_inputs_as_they_are(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that writes its input gets a fresh copy each time, under all engines; the input itself stays."""
    sums = set()
    spread = module._spread

    def spy(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        sums.add((function.__qualname__, inputs[0].sum().item()))
        return spread(function, inputs)

    monkeypatch.setattr(module, "_spread", spy)
    x = torch.ones(4)
    notebook.compile(lambda x: x.mul_(2))(x)
    notebook.captured = [replace(each, stock="aot_eager") for each in notebook.captured]
    version = x._version
    notebook.measure()
    assert len(sums) == 4  # eager, stock, our entry, and the trial that tells whether the entry serves the copies
    assert {found for _, found in sums} == {8.0}
    assert (x.tolist(), x._version) == ([2.0] * 4, version)


def test_inputs_that_share_memory_do_so_when_measured(notebook: Notebook) -> None:
    """A view and its base are copied together, or the entry's guards would not hold for the copies."""
    base = torch.zeros(6)

    def function(view: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return view + whole[:3]

    notebook.compile(function)(base[3:], base)
    assert kinds(notebook.measure()) == FORWARD


def test_nothing_of_the_users_is_changed(notebook: Notebook) -> None:
    """Parameters, gradients, buffers, inputs, random numbers, grad mode, counters: all is as before."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout())
    x = torch.randn(8, 4, requires_grad=True)
    notebook.compile(lambda x: model(x) * 2)(x).sum().backward()

    def state() -> dict[str, Any]:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers()), "x": x}
        found: dict[str, Any] = {name: (tensor.tolist(), tensor._version) for name, tensor in tensors.items()}
        found |= {f"{name}.grad": id(tensor.grad) for name, tensor in tensors.items()}
        found |= {
            f"{name}.grad values": tensor.grad.tolist() for name, tensor in tensors.items() if tensor.grad is not None
        }
        compiled = notebook.captured[0].compiled.compiled
        return found | {
            "random": torch.get_rng_state().tolist(),
            "grad mode": torch.is_grad_enabled(),
            "calls": compiled.calls,
            "entries": [entry.number for entry in compiled.entries],
        }

    before = state()
    heard: list[events.Event] = []
    with events.listen(heard.append):
        assert kinds(notebook.measure()) == TRAINING
    assert state() == before
    assert heard == []


def test_an_interrupt_leaves_nothing_behind(notebook: Notebook) -> None:
    """A KeyboardInterrupt during a measurement is raised, and modes and random numbers are restored."""
    with torch.no_grad():
        notebook.compile(lambda x: x.add_(torch.rand(4)))(torch.zeros(4))
    calls = 0
    forward = notebook.captured[0].graph.forward

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return forward(*args)

    before = torch.get_rng_state()
    notebook.captured[0].graph.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        notebook.measure()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert notebook.notes == []


def test_tensors_that_the_graph_holds_are_put_back() -> None:
    """A graph that writes its own buffer leaves the buffer with its old values after the measurement."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.count.add_(1) + x

    class Tracer(fx.Tracer):
        proxy_buffer_attributes = True  # or the tracer itself would write the buffer

    counter = Counter()
    graph = fx.GraphModule(counter, Tracer().trace(counter))
    one = Captured(frame="f", graph=graph, compiled=graph, inputs=lambda: (torch.ones(2),))
    assert kinds(measure([one], lambda text: None, SECONDS)) == FORWARD
    assert graph.count.tolist() == [0.0, 0.0]


def test_non_leaves_are_measured(notebook: Notebook) -> None:
    """A graph between two others takes tensors that have a history, written or not."""
    leaf = torch.randn(4, requires_grad=True)
    notebook.compile(lambda h: (h * 2).sin())(leaf * 3)
    notebook.compile(lambda h: h.mul_(2).sin())(leaf * 3)
    assert kinds(notebook.measure()) == 2 * TRAINING
    assert notebook.notes == []


def test_the_backward_goes_as_far_as_the_input_that_was_written(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole backward of a written non-leaf is timed.

    Its gradient is computed for its value before the call.
    """
    gradients: list[torch.Tensor] = []
    grad = torch.autograd.grad

    def spy(*args: Any, **kwargs: Any) -> Any:
        found = grad(*args, **kwargs)
        gradients.extend(found)
        return found

    h = torch.randn(4, requires_grad=True) * 3
    notebook.compile(lambda h: h.mul_(2).sin())(h)
    monkeypatch.setattr(torch.autograd, "grad", spy)
    assert kinds(notebook.measure()) == TRAINING
    assert gradients
    # Both the result and the new value of `h` are differentiated.
    expected = 2 * (h.detach() * 2).cos() + 2
    assert all(torch.allclose(each, expected) for each in gradients)


def test_gone_inputs_have_stand_ins(notebook: Notebook) -> None:
    """Inputs that are gone are replaced by tensors of the same kind, down to strides, offset, history and type."""
    weight = nn.Parameter(torch.randn(3, 3))
    base = torch.randn(20)
    index = torch.tensor([2, 0])
    seen: list[tuple[Any, ...]] = []

    def function(window: torch.Tensor, history: torch.Tensor, index: torch.Tensor, factor: float) -> torch.Tensor:
        return (window @ weight)[index] * history * factor

    notebook.compile(function)(base.as_strided((3, 3), (1, 4), 5), weight[0] * 2, index, 2.5)
    entry = notebook.captured[0].compiled.compiled.entries[0]
    run = entry.run

    def spy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(tuple([tensor_facts(each) for each in args if isinstance(each, torch.Tensor)]))
        return run(args, kwargs)

    entry.run = spy
    notebook.inputs[0] = None
    assert kinds(notebook.measure()) == TRAINING
    facts = tuple([each for each in entry.state.leaves if isinstance(each, TensorFacts)])
    assert len(facts) == 4
    assert set(seen) == {facts}
    names = " and ".join([", ".join(entry.state.names[:-1]), entry.state.names[-1]])
    assert notebook.notes == [f"frame 0 was timed with new values for {names}, gone or changed since it ran"]


def test_only_what_is_gone_is_replaced(notebook: Notebook) -> None:
    """Of two inputs one is gone: the other one is measured as it is."""
    seen = set()

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    notebook.compile(function)(torch.ones(2), torch.full((2,), 7.0))
    entry = notebook.captured[0].compiled.compiled.entries[0]
    run = entry.run

    def spy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.add(tuple(args[1].tolist()))
        return run(args, kwargs)

    entry.run = spy
    notebook.inputs[0] = (None, torch.full((2,), 7.0))
    assert kinds(notebook.measure()) == FORWARD
    assert seen == {(7.0, 7.0)}
    assert notebook.notes == ["frame 0 was timed with new values for x, gone or changed since it ran"]


def test_an_input_that_the_graph_has_changed_has_a_stand_in(notebook: Notebook) -> None:
    """An input that the call gave a history is no input for the same entry; the others are as they are."""
    weight = torch.randn(4, requires_grad=True)

    def function(x: torch.Tensor) -> None:
        x.mul_(weight)

    notebook.compile(function)(torch.ones(4))
    assert kinds(notebook.measure()) == TRAINING
    assert notebook.notes == ["frame 0 was timed with new values for x, gone or changed since it ran"]


def test_nothing_to_time_is_an_error(notebook: Notebook) -> None:
    """If no graph could be timed, the error gives the reason for each. If there is no graph, it says so."""
    gone = Captured(frame="f", graph=fx.symbolic_trace(lambda x: x.sin()), compiled=torch.sin, inputs=lambda: None)
    with pytest.raises(UsageError, match="f was not timed: its inputs are gone"):
        measure([gone], notebook.progress.append, SECONDS)
    with pytest.raises(UsageError, match="nothing was compiled, so there is nothing to time"):
        Notebook().measure()


def test_settings_that_changed_are_a_reason_to_skip(notebook: Notebook) -> None:
    """Under other settings than the capture's, nothing is measured and nothing is compiled."""
    notebook.compile(lambda x: x.sin())(torch.ones(2))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(UsageError, match="frame 0 was not timed: its inputs are gone or have changed, or torch's"):
            notebook.measure()
    finally:
        torch.set_default_dtype(before)
    assert len(notebook.captured[0].compiled.compiled.entries) == 1


def test_what_runs_eagerly_is_skipped(notebook: Notebook) -> None:
    """A graph that the engine refused has no compiled form to be timed beside eager."""
    with pytest.warns(RuntimeWarning, match="runs eagerly"):
        notebook.compile(lambda x: x.unfold(0, 2, 1).mul_(2))(torch.ones(3))
    with pytest.raises(UsageError, match="frame 0 was not timed: it runs eagerly"):
        notebook.measure()


def test_a_backward_that_raises_leaves_the_forward(notebook: Notebook) -> None:
    """A function that eager cannot differentiate either is timed forward only, and the note gives the reason."""
    graph = fx.symbolic_trace(lambda x: x.sigmoid())

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("no derivative\nof this")

    one = Captured(frame="f", graph=graph, compiled=Broken.apply, inputs=lambda: (torch.ones(2, requires_grad=True),))
    rows = measure([one], notebook.progress.append, SECONDS, notebook.notes.append)
    assert kinds(rows) == FORWARD
    assert notebook.notes == ["f: only the forward was timed: the backward raises ValueError: no derivative"]


def test_an_error_of_one_graph_is_a_note(notebook: Notebook) -> None:
    """A graph that raises is noted with its error, and the next one is timed."""
    notebook.compile(lambda x: x.sin())(torch.ones(2))
    broken = Captured(
        frame="broken",
        graph=fx.symbolic_trace(lambda x: x.view(7)),
        compiled=torch.sin,
        inputs=lambda: (torch.ones(2),),
    )
    notebook.captured.insert(0, broken)
    assert {row.frame for row in notebook.measure()} == {"frame 0"}
    assert notebook.notes == ["broken was not timed: RuntimeError: shape '[7]' is invalid for input of size 2"]


def test_of_several_entries_the_one_for_the_inputs_is_measured(notebook: Notebook) -> None:
    """The rows name the graph that the inputs are for: by the report's index if it is known, else by age."""
    compiled = notebook.compile(lambda x: x.sin())
    compiled(torch.ones(2))
    only = notebook.captured[0]
    only.compiled(torch.ones(2, dtype=torch.float64))
    numbers = sorted(entry.number for entry in only.compiled.compiled.entries)
    found = {}
    for dtype in (torch.float32, torch.float64):
        notebook.inputs[0] = (torch.ones(2, dtype=dtype),)
        found[dtype] = {row.graph for row in notebook.measure()}
    assert found == {torch.float32: {0}, torch.float64: {1}}
    named = Captured(
        frame="f",
        graph=only.graph,
        compiled=only.compiled,
        inputs=lambda: (torch.ones(2, dtype=torch.float64),),
        graphs={numbers[1]: 17},
    )
    assert {row.graph for row in measure([named], notebook.progress.append, SECONDS)} == {17}


def test_a_graph_that_takes_sizes(notebook: Notebook) -> None:
    """Each engine receives the arguments that its graph takes.

    Dynamo's graph takes sizes and tensors, others take tensors only.
    """
    graph = fx.Graph()
    size, x = graph.placeholder("size"), graph.placeholder("x")
    graph.output((graph.call_function(torch.mul, (x, size)),))
    module, given = fx.GraphModule({}, graph), torch.ones(2)
    compiled = backend(fx.symbolic_trace(lambda x: (x * 2,)), [given], options={"compiler": "eager"})
    compiled(given)
    taken = Captured(
        frame="f",
        graph=module,
        compiled=compiled,
        inputs=lambda: (given,),
        whole=lambda inputs: (inputs[0].shape[0], *inputs),
        stock="aot_eager",
    )
    rows = measure([taken], notebook.progress.append, SECONDS, notebook.notes.append)
    assert [row.engine for row in rows] == ["eager", "upstream", "aotlab"]
    assert notebook.notes == []


def test_a_graph_that_leaves_grad_mode_off_does_not_turn_it_off() -> None:
    """Grad mode is put back after every call, so that the second call is timed as the first."""

    def function(x: torch.Tensor) -> torch.Tensor:
        result = x * 2
        torch.set_grad_enabled(False)
        return result

    graph = fx.GraphModule(nn.Module(), fx.Graph())
    graph.forward = function
    x = torch.ones(2, requires_grad=True)
    one = Captured(frame="f", graph=graph, compiled=function, inputs=lambda: (x,))
    assert kinds(measure([one], lambda text: None, SECONDS)) == TRAINING
    assert torch.is_grad_enabled()


class Clock:
    """A clock that only graphs move."""

    def __init__(self, cost_ns: int) -> None:
        self.now_ns = 0
        self.cost_ns = cost_ns
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.now_ns += self.cost_ns
        self.calls += 1
        return x + 0


@pytest.mark.parametrize(
    ("cost_ns", "most_seconds", "words"),
    [(1_000, 1.0, ""), (100_000, 1.0, ""), (30_000_000, 1.3, ""), (20_000_000_000, 50.0, "not comparable: 1 round")],
)
def test_the_time_is_limited(monkeypatch: pytest.MonkeyPatch, cost_ns: int, most_seconds: float, words: str) -> None:
    """A measurement keeps about to its limit; a slower call is tried once and timed once, which gives no ratio."""
    eager, ours = Clock(cost_ns), Clock(cost_ns)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: eager.now_ns + ours.now_ns)
    graph = fx.GraphModule(nn.Module(), fx.Graph())
    graph.forward = eager
    one = Captured(frame="f", graph=graph, compiled=ours, inputs=lambda: (torch.ones(2),))
    rows = measure([one], lambda text: None, 1.0)
    assert {row.median_ns for row in rows} == {cost_ns}
    assert [(row.incomparable, bool(row.ratios)) for row in rows] == [("", False), (words, not words)]
    assert (eager.now_ns + ours.now_ns) / 1e9 <= max(most_seconds, 5 * cost_ns / 1e9)
    assert ours.calls >= 2


def test_copies_of_large_inputs_are_not_heaped_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a graph that writes its input, only the call that is being timed has a copy."""
    graph = fx.symbolic_trace(lambda x: x.add_(1))
    one = Captured(frame="f", graph=graph, compiled=lambda x: x.add_(1), inputs=lambda: (torch.ones(1000),))
    copied: list[weakref.ref[Any]] = []
    alive = set()
    copy = module.copy_of

    def spy(*args: Any) -> Any:
        alive.add(sum(each() is not None for each in copied))
        made = copy(*args)
        copied.append(weakref.ref(made.inputs[0]))
        return made

    monkeypatch.setattr(module, "copy_of", spy)
    measure([one], lambda text: None, SECONDS)
    assert len(copied) > 10
    assert max(alive) <= 1


def test_the_phases_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole step's figures are the sum of the forward's and the backward's figures, for each engine."""
    clock = itertools.count(step=1000)  # every look at it takes a while, so that there is no time without a look

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.perf_counter_ns()
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                time.perf_counter_ns()
            return grad

    graph = fx.symbolic_trace(lambda x: x.sigmoid())
    one = Captured(frame="f", graph=graph, compiled=Slow.apply, inputs=lambda: (torch.ones(2, requires_grad=True),))
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(clock))
    rows = {(row.engine, row.phase): row.median_ns for row in measure([one], lambda text: None, 0.01)}
    ours = [rows["aotlab", phase] for phase in ("forward", "backward", "total")]
    eager = [rows["eager", phase] for phase in ("forward", "backward", "total")]
    assert (ours, eager) == ([2000, 4000, 6000], [1000, 1000, 2000])


def test_stock_is_timed_beside_both(notebook: Notebook) -> None:
    """Stock torch.compile is timed between eager and aotlab, for functions with and without mutations.

    It compiles again for the measurement.
    """
    weight = torch.randn(4, 4, requires_grad=True)
    notebook.compile(lambda x: (x @ weight).relu())(torch.randn(2, 4))
    notebook.compile(lambda x: x.mul_(2).sin())(torch.randn(4))
    notebook.compile(lambda x: x.sin().sum())(torch.randn(4, requires_grad=True))
    notebook.captured = [replace(each, stock="aot_eager") for each in notebook.captured]
    three = ("eager", "upstream", "aotlab")
    expected = [(engine, phase) for phase in ("forward", "backward", "total") for engine in three]
    rows = notebook.measure()
    assert kinds(rows) == [*expected, *[(engine, "forward") for engine in three], *expected]
    assert [[ratio.over for ratio in row.ratios] for row in rows[:3]] == [[], ["eager"], ["eager", "upstream"]]
    assert notebook.notes == []
    # An entry that was compiled for these inputs must not be used for other inputs.
    notebook.inputs[2] = (torch.randn(3, requires_grad=True),)
    notebook.captured[2].compiled(*notebook.inputs[2])
    assert kinds(notebook.measure()) == kinds(rows)
    assert notebook.notes == []


def test_stock_is_left_out_if_it_would_compile_for_long(notebook: Notebook) -> None:
    """Stock's time is estimated from aotlab's for all graphs together. A form that exists already is timed."""
    notebook.compile(lambda x: x.sin())(torch.ones(2))
    taken = notebook.captured[0]
    stock = replace(taken, stock="aot_eager", backend_s=4.0)
    for graphs, limit, upstream in (
        ([stock], 5.0, 1),
        ([stock, stock], 5.0, 0),
        ([stock, stock, replace(taken, stock=lambda *_: taken.compiled)], 5.0, 1),
    ):
        notes: list[str] = []
        rows = measure(graphs, notebook.progress.append, SECONDS, notes.append, stock_seconds=limit)
        assert [row.engine for row in rows].count("upstream") == upstream
        assert notes == (
            []
            if len(graphs) == 1
            else [
                "stock torch.compile was not timed: it would compile for about 8 s, as long as aotlab did. The button"
                " Measure times it"
            ]
        )


def test_what_stock_cannot_do_is_a_note(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where stock torch.compile raises, the others are timed."""

    def stock(*_: Any) -> Any:
        raise ValueError("not this graph")

    note = "frame 0: stock torch.compile was not timed: it raises ValueError: not this graph"
    notebook.compile(lambda x: x.sin())(torch.ones(2))
    notebook.captured = [replace(each, stock="inductor") for each in notebook.captured]
    for each in (stock, lambda *_: stock):  # when it compiles, and when it runs
        monkeypatch.setattr(module, "_stock", each)
        assert kinds(notebook.measure()) == FORWARD
    assert notebook.notes == [note, note]


def test_stock_is_not_timed_on_a_freed_storage(notebook: Notebook) -> None:
    """Stock's form of this graph reads a view of the freed parameter, and would crash Python."""

    def gathers(x, flat, values):
        torch.ops.inductor.resize_storage_bytes_(flat, 48)
        with torch.no_grad():
            flat.copy_(values)
        y = x @ flat[:9].view(3, 3) + flat[9:]
        torch.ops.inductor.resize_storage_bytes_(flat, 0)
        return y

    flat = nn.Parameter(torch.zeros(12))
    flat.untyped_storage().resize_(0)
    inputs = torch.ones(2, 3), flat, torch.ones(12)
    with torch.no_grad():
        notebook.compile(gathers)(*inputs)
    notebook.captured = [replace(each, stock="aot_eager") for each in notebook.captured]
    rows = notebook.measure()
    assert {engine for engine, _ in kinds(rows)} == {"eager", "aotlab"}
    assert [note.partition(": the graph")[0] for note in notebook.notes] == [
        "frame 0: stock torch.compile was not timed"
    ]


@pytest.mark.parametrize("stock", ["aot_eager", "inductor"])
def test_stock_is_called_without_dynamo(notebook: Notebook, monkeypatch: pytest.MonkeyPatch, stock: str) -> None:
    """The function that stock's backend would pass to Dynamo is called directly, and Dynamo compiles nothing."""
    made: list[Any] = []
    called: list[Any] = []
    stock_compiled, spread = internals.stock_compiled, module._spread

    def compile_by_stock(*args: Any) -> Any:
        made.append(stock_compiled(*args))
        return made[-1]

    def spy(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        called.append(function)
        return spread(function, inputs)

    weight = torch.randn(4, 4, requires_grad=True)
    notebook.compile(lambda x: (x @ weight).relu())(torch.randn(2, 4))
    notebook.captured = [replace(each, stock=stock) for each in notebook.captured]
    monkeypatch.setattr(internals, "stock_compiled", compile_by_stock)
    monkeypatch.setattr(module, "_spread", spy)
    with torch.compiler.set_stance("fail_on_recompile"):
        rows = notebook.measure()
    assert ("upstream", "total") in kinds(rows)
    assert notebook.notes == []
    assert len(made) == 1
    forms = {id(each): each for each in called}
    assert len(forms) == 4  # eager, stock, ours, and the trial that tells whether our entry serves the copies
    assert id(made[0]) in forms
    # A callable that `torch.compile` returned would have this attribute.
    assert not any(hasattr(each, "get_compiler_config") for each in forms.values())


def test_stock_is_told_which_inputs_stay(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's marks of parameters and buffers are still there when stock compiles the graph."""
    marked: list[bool] = []
    stock_compiled = internals.stock_compiled

    def compile_by_stock(graph: fx.GraphModule, *args: Any) -> Any:
        compiled = stock_compiled(graph, *args)
        nodes = graph.graph.find_nodes(op="placeholder")
        marked.extend(bool(node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")) for node in nodes)
        return compiled

    model = nn.BatchNorm1d(3)
    notebook.compile(lambda x: model(x))(torch.randn(2, 3))
    notebook.captured = [replace(each, stock="aot_eager") for each in notebook.captured]
    monkeypatch.setattr(internals, "stock_compiled", compile_by_stock)
    assert ("upstream", "total") in kinds(notebook.measure())
    assert sorted(marked) == [False, True, True, True, True, True]


def test_ours_is_called_as_dynamo_calls_it(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our form is timed by whole calls, with the choice of an entry and the counting; only the counts are others."""
    calls = []
    whole = CompiledFunction.__call__

    def spy(self: CompiledFunction, *args: Any) -> Any:
        calls.append(self)
        return whole(self, *args)

    notebook.compile(lambda x: x.sin())(torch.ones(2))
    function = notebook.captured[0].compiled.compiled
    before = function.calls
    monkeypatch.setattr(CompiledFunction, "__call__", spy)
    assert kinds(notebook.measure()) == FORWARD
    assert function.calls == before
    assert len(set(map(id, calls))) == 1
    assert (calls[0].calls.eager, calls[0].calls.total) == (0, len(calls))
    assert function not in calls


def test_what_runs_eagerly_by_then_is_not_timed_as_ours(notebook: Notebook) -> None:
    """Where calls of our form are served by eager, as when aotlab is switched off, no time is called ours."""
    notebook.compile(lambda x: x.sin())(torch.ones(2))
    message = "frame 0 was not timed: it ran eagerly when it was called again"
    with config.patch(enabled=False), pytest.raises(UsageError, match=message):
        notebook.measure()


def test_all_is_as_before_stock_was_timed(notebook: Notebook) -> None:
    """Settings, random numbers and the captured graph stay, also where the graph leaves grad mode off."""

    def function(x: torch.Tensor) -> torch.Tensor:
        result = torch.nn.functional.dropout(x * weight)
        torch.set_grad_enabled(False)
        return result

    weight = torch.randn(4, requires_grad=True)
    notebook.compile(function)(torch.randn(4))
    torch.set_grad_enabled(True)
    notebook.captured = [replace(each, stock="inductor") for each in notebook.captured]
    graph = notebook.captured[0].graph

    def state() -> dict[str, Any]:
        return {
            "grad mode": torch.is_grad_enabled(),
            "random": torch.get_rng_state().tolist(),
            "settings": internals.global_state(),
            "inductor": inductor_config.save_config(),
            "dynamo": dynamo_config.save_config(),
            "functorch": functorch_config.save_config(),
            "graph": graph.code,
            "nodes": [(node.name, sorted(node.meta)) for node in graph.graph.nodes],
            "meta": sorted(graph.meta),
            "marks": sorted(vars(weight)),
        }

    before = state()
    assert kinds(notebook.measure())[-1] == ("aotlab", "total")
    assert notebook.notes == []
    assert state() == before


def test_an_interrupt_while_stock_compiles(notebook: Notebook) -> None:
    """The interrupt is raised, modes and random numbers are restored, and the next measurement is complete."""
    calls = 0

    def interrupted(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return x.sin() + torch.rand(2)

    graph = fx.Graph()
    graph.output((graph.call_function(interrupted, (graph.placeholder("x"),)),))
    held = fx.GraphModule(nn.Module(), graph)
    one = Captured(frame="f", graph=held, compiled=held, inputs=lambda: (torch.ones(2),), stock="aot_eager")
    before = torch.get_rng_state()
    with torch.no_grad():
        with pytest.raises(KeyboardInterrupt):
            measure([one], notebook.progress.append, SECONDS)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    assert internals.TracingContext.try_get() is None
    assert calls == 2
    assert kinds(measure([one], notebook.progress.append, SECONDS)) == [
        (engine, "forward") for engine in ("eager", "upstream", "aotlab")
    ]


def test_inputs_that_are_not_written_are_copied_once(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls of both engines share one copy of a model's parameters, besides those of the trials."""
    weight = torch.randn(4, 4, requires_grad=True)
    notebook.compile(lambda x: (x @ weight).relu())(torch.randn(2, 4))
    copies = []
    copy = module.copy_of

    def spy(*args: Any) -> Any:
        copies.append(copy(*args))
        return copies[-1]

    monkeypatch.setattr(module, "copy_of", spy)
    assert kinds(notebook.measure()) == TRAINING
    assert len(copies) == 3


@pytest.mark.gpu
def test_graphs_on_cuda_are_timed_there(notebook: Notebook) -> None:
    """The rows name the GPU, and its random state is put back."""
    weight = torch.randn(64, 64, device="cuda", requires_grad=True)
    notebook.compile(lambda x: torch.nn.functional.dropout(x @ weight))(torch.randn(64, 64, device="cuda"))
    before = torch.cuda.get_rng_state()
    rows = notebook.measure()
    assert (kinds(rows), {row.device for row in rows}) == (TRAINING, {"cuda:0"})
    assert torch.equal(torch.cuda.get_rng_state(), before)
