"""Time captured graphs and traced functions beside eager. The button in the dashboard's timing tab runs this.

A graph that Dynamo captured can run in two forms: eagerly, op by op, and compiled by aotlab. Both forms are timed in
turns (`aotlab.bench.timing`). If it is requested, the form that stock ``torch.compile`` makes of the graph is a third
one. The same holds for a function or region that the direct frontend traced. Its eager form is the Python code itself,
so its times include this code.

The inputs are copies that alias each other as the original inputs do. All calls run under the grad mode, inference
mode and autocast settings of the capture.

The measurement does not change the user's tensors, gradients, random state, call counters and compiled entries. An
entry is called through a separate `CompiledFunction`, so the calls appear neither in the counters nor in a recording.
Only stock's form is compiled for the measurement. If an input no longer exists, or its metadata has changed (for
example, because the graph itself gave the tensor a history), a tensor of the same kind replaces the input, and a
sentence in the report says so.

If the graph writes inputs, all inputs are copied again before every call, untimed, so that each call sees the same
values. A training graph is timed in whole steps: a forward and its backward. The clock is read between them, so the two
times add up to the step. Each form is called as Dynamo's code would call it. Eager's form is the graph's Python code.
aotlab's and stock's forms are the callables that the backend returns to Dynamo, including their checks and counters for
each call. The times do not include Dynamo's own part of a call, such as its guards, nor the Python code between graphs.
The eager and compiled forms of a traced function read tensors from their places, for example a module's parameters. So
the copies of these tensors are in these places during the measurement.
The main thread must not run anything else during a measurement. `aotlab.notebook.live` ensures this. An interrupt ends
a measurement and leaves no changes.
"""

from __future__ import annotations

import math
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab._torch.compiling import compiling, never_lost
from aotlab.bench.memory import memory_curve
from aotlab.bench.timing import FEWEST_ROUNDS, Case, Comparison, Parts, compare, tensors_in, training_parts
from aotlab.cache import CompiledFunction, Entry
from aotlab.errors import UsageError
from aotlab.guards.call_state import TensorFacts
from aotlab.ir.fx_graphs import copied_graph, nodes_in
from aotlab.notebook.copied_inputs import Copy, Inputs, copy_of, stand_ins
from aotlab.report.model import MemoryCurve, TimingRow
from aotlab.report.text import listed
from aotlab.runtime.draft import MISS
from aotlab.verification.clones import captured_tensors, random_state_restored, restored

#: The time limit, in seconds, for all graphs of one click together. It may be exceeded if a single call is slower.
SECONDS = 5.0

#: The intended duration of a sample, in ns. A sample contains as many calls as the fastest engine makes in this time.
_SAMPLE_NS = 1_000_000

#: A measurement ends if the ratios are known to this accuracy; see `aotlab.bench.timing.Paired.spread`.
_SPREAD = 0.02

#: The largest number of rounds. Usually the accuracy or the time limit ends the measurement earlier.
_ROUNDS = 1000

#: This many samples of each engine are discarded at first, if they take at most a tenth of the time limit.
_WARMUP = 2

#: With ``--time``, stock ``torch.compile`` is timed only if aotlab's backend compiled for at most this many seconds.
STOCK_SECONDS = 12.0

Run = Callable[[Inputs], Any]
#: Calls a form of a graph with flat inputs.
Call = Callable[[Callable[..., Any], Inputs], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Captured:
    """A graph that Dynamo captured, its compiled form, and a function that returns inputs for both.

    Attributes
    ----------
    frame
        The name of the frame that contains the graph, as in the report.
    graph
        The graph that Dynamo captured, or the function that the direct frontend traced. Calling it runs it eagerly.
    compiled
        The `aotlab.cache.CompiledFunction` of the same graph, or an object that has this function in its attribute
        ``compiled``. Any other callable with the same arguments works, too, and is called directly.
    inputs
        Returns the current example inputs, with None for each tensor that no longer exists. Returns None if there are
        no inputs to return.
    whole
        A function that adds to the inputs of ``compiled`` the sizes that only ``graph`` takes as inputs. None if
        ``graph`` takes no sizes.
    graphs
        The index in the report of each compiled entry, by the entry's number. An entry that is not in this mapping gets
        its position in the order of compilation.
    engine
        The name of the engine that made ``compiled``, for the rows.
    stock
        The name of the ``torch.compile`` backend with which stock ``torch.compile`` compiles the graph for comparison,
        or a function that returns the compiled form. If None, stock ``torch.compile`` is not timed.
    backend_s
        The seconds that the backend took to compile aotlab's graphs, an estimate of the time that stock
        ``torch.compile`` needs.
    before
        Another compiled form of the graph and its entry, which are timed as the engine ``"before"``.
    calling
        Returns a context manager that yields a function, which calls one form of the graph with flat inputs.
    """

    frame: str
    graph: fx.GraphModule | types.FunctionType
    compiled: Callable[..., Any]
    inputs: Callable[[], Inputs | None]
    whole: Callable[[Inputs], Sequence[Any]] | None = None
    graphs: Mapping[int, int] = field(default_factory=dict)
    engine: str = "aotlab"
    stock: str | Callable[..., Any] | None = None
    backend_s: float = 0.0
    before: tuple[Callable[..., Any], Entry] | None = None
    calling: Callable[[], AbstractContextManager[Call]] = lambda: nullcontext(_spread)


class _Skipped(Exception):  # noqa: N818  # not an error, but a signal inside of this module
    """Raised if a graph cannot be timed. The text gives the user the reason."""


def measure(
    captured: Sequence[Captured],
    progress: Callable[[str], None],
    seconds: float = SECONDS,
    note: Callable[[str], None] | None = None,
    curve: Callable[[MemoryCurve], None] | None = None,
    stock_seconds: float = math.inf,
) -> tuple[TimingRow, ...]:
    """Time each graph's forward, backward and their sum, beside eager and, if requested, stock ``torch.compile``.

    Must be called on the thread that runs the user's code, while nothing else runs there.

    Parameters
    ----------
    captured
        The graphs. If a graph has several compiled entries, the one that serves the inputs is timed.
    progress
        Called with a short text before each graph.
    seconds
        The time limit for all graphs together. A graph whose calls are slower is still timed, once.
    note
        Called with a sentence for each result that is missing or unusual: a graph that runs eagerly, a backward that
        fails in eager too, inputs that were replaced. If None, the sentences are dropped.
    curve
        Called with the memory over time of each graph and engine. If None, the memory is not measured.
    stock_seconds
        Stock ``torch.compile`` is not timed if its compilations of all graphs probably take longer.

    Returns
    -------
    tuple[TimingRow, ...]
        For each graph, rows for the phase ``"forward"`` with the engines ``"eager"``, ``"upstream"`` (stock
        ``torch.compile``) and ``"aotlab"``. If something requires grad, also ``"backward"`` and ``"total"`` (their
        sum).

    Raises
    ------
    UsageError
        Nothing could be timed. The message contains the sentences that ``note`` receives.

    Examples
    --------
    >>> graph = fx.symbolic_trace(lambda x: x.sin())
    >>> one = Captured(frame="f", graph=graph, compiled=torch.sin, inputs=lambda: (torch.ones(3),))
    >>> [(row.engine, row.phase) for row in measure([one], progress=lambda text: None, seconds=0.1)]
    [('eager', 'forward'), ('aotlab', 'forward')]
    """
    rows: list[TimingRow] = []
    skipped: list[str] = []

    def skip(sentence: str) -> None:
        skipped.append(sentence)
        if note is not None:
            note(sentence)

    expected_s = sum(each.backend_s for each in captured if isinstance(each.stock, str))
    if expected_s > stock_seconds:
        captured = [replace(each, stock=None) if isinstance(each.stock, str) else each for each in captured]
        skip(
            "stock torch.compile was not timed: it would compile for about"
            f" {expected_s:.0f} s, as long as aotlab did. The button Measure times it"
        )
    for number, each in enumerate(captured, start=1):
        place = f" ({number} of {len(captured)})" if len(captured) > 1 else ""
        progress(f"timing {each.frame}{place}, at most {seconds / len(captured):.1f} s")
        try:
            rows += _measure_one(each, seconds / len(captured), skip, curve)
        except _Skipped as reason:
            skip(f"{each.frame} was not timed: {reason}")
        except Exception as error:  # noqa: BLE001  # the user's code may fail; other graphs can be timed
            skip(f"{each.frame} was not timed: {_line(error)}")
    if not rows:
        raise UsageError(" ".join(skipped) if skipped else "nothing was compiled, so there is nothing to time")
    return tuple(rows)


# --- one graph ---------------------------------------------------------------------------------------------------


def _measure_one(
    captured: Captured, seconds: float, skip: Callable[[str], None], curve: Callable[[MemoryCurve], None] | None
) -> list[TimingRow]:
    held = captured_tensors(captured.graph) if isinstance(captured.graph, fx.GraphModule) else []
    with ExitStack() as undo:
        undo.enter_context(random_state_restored())
        undo.enter_context(restored(tuple(held)))
        call = undo.enter_context(captured.calling())
        entry, inputs, replaced = _entry_for(captured, call)
        fresh = partial(copy_of, inputs)
        alone = None if entry is None else _alone(captured.compiled, entry)
        eager: Run = partial(call, _given_sizes(_function(captured.graph), captured))
        called = captured.compiled if alone is None else internals.dynamo_disable(alone.__call__)
        undo.enter_context(_settings(entry))
        behaviour = _behaviour(eager, fresh, entry)
        stock = captured.stock if callable(captured.stock) else partial(_stock, captured) if captured.stock else None
        graphs = [captured.graph] if isinstance(captured.graph, fx.GraphModule) else []
        graphs += [entry.records.trace.module] if entry is not None else []
        if stock and any("resize_storage_bytes_" in str(node.target) for node in nodes_in(graphs)):
            stock = None
            skip(
                f"{captured.frame}: stock torch.compile was not timed: the graph resizes a storage, and stock's code"
                " may read a view's memory after it was freed, which can end the process"
            )
        runs = {"eager": behaviour.wrap(eager), captured.engine: behaviour.wrap(partial(call, called))}
        if captured.before is not None:
            before = internals.dynamo_disable(_alone(*captured.before).__call__)
            runs["before"] = behaviour.wrap(partial(call, before))
        timer = _Timer(
            call=call,
            runs=runs,
            stock=stock,
            ready=fresh if behaviour.mutates else _always(fresh()),
            behaviour=behaviour,
            held=tuple([tensor for _, tensor in held if tensor.requires_grad]),
            device=_device(inputs),
        )
        timed = timer.timed(seconds, lambda text: skip(f"{captured.frame}: {text}"))
        index = _index(captured, entry)
        try:
            if curve is not None:
                for each in timer.memory_curves():
                    curve(replace(each, frame=captured.frame, graph=index))
        except Exception as error:  # noqa: BLE001  # torch's profiler may be in use
            skip(f"{captured.frame}: memory was not measured: {_line(error)}")
        if alone is not None and alone.calls.eager:
            raise _Skipped("it ran eagerly when it was called again")
    if replaced:
        skip(f"{captured.frame} was timed with new values for {listed(replaced)}, gone or changed since it ran")
    return timed.rows(frame=captured.frame, graph=index)


def _alone(compiled: Any, entry: Entry) -> CompiledFunction:
    """Return a compiled function that contains only ``entry``, and counts its own calls.

    The measured calls then do not appear in the counters of ``compiled``, and no other entry serves them.
    """
    function = getattr(compiled, "compiled", compiled)
    alone = CompiledFunction(function._target, _not_anew, backend_name="", warn=False)
    vars(alone).update(_entries=(replace(entry, calls=0),), _announce=_tell_nobody)
    return alone


def _not_anew(*_: Any) -> NoReturn:
    """Refuse to compile a new entry during a measurement. The arguments are ignored."""
    raise _Skipped("its guards do not hold for a copy of its inputs, or for what it reads now")


def _tell_nobody(*_: Any, **__: Any) -> None:
    """Ignore an event about a measured call."""


def _given_sizes(run: Callable[..., Any], captured: Captured) -> Callable[..., Any]:
    """Return a form of ``run`` that adds the sizes of inputs, so that its caller passes only the inputs themselves."""
    whole = captured.whole
    return run if whole is None else lambda *inputs: run(*whole(inputs))


def _stock(captured: Captured, inputs: Inputs) -> Callable[..., Any]:
    """Return the form that stock ``torch.compile`` makes of a traced function, or its backend of a captured graph.

    For the graph, it is the callable that Dynamo would get from the backend. The form of a function is compiled at its
    first call.
    """
    if not isinstance(captured.graph, fx.GraphModule):
        return torch.compile(captured.graph, backend=str(captured.stock), dynamic=False)
    # If the graph changes grad mode, the backend's trace of it may leave grad mode changed. So grad mode is restored.
    with compiling(), never_lost(), torch.set_grad_enabled(torch.is_grad_enabled()):
        arguments = tuple(inputs if captured.whole is None else captured.whole(inputs))
        compiled = internals.stock_compiled(copied_graph(captured.graph), arguments, str(captured.stock))
        return _given_sizes(compiled, captured)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Behaviour:
    """The behaviour of a graph in one trial call.

    ``mutates`` is true if the graph writes an input. ``outputs`` are the indices of the output tensors that require
    grad. ``written`` are the indices, in ``Copy.tensors``, of the inputs that the graph writes and that require grad
    and are non-leaves after the write. A backward starts from these outputs and these inputs. ``grad_mode`` is the mode
    to restore after each call, or None if the graph does not change grad mode.
    """

    mutates: bool
    outputs: tuple[int, ...]
    written: tuple[int, ...]
    grad_mode: bool | None

    def wrap(self, run: Run) -> Run:
        """Return a form of ``run`` that restores grad mode after each call, if the graph changes grad mode."""
        if self.grad_mode is None:
            return run
        return partial(_with_grad_mode, run, self.grad_mode)

    def roots(self, copy: Copy, result: Any) -> list[Tensor]:
        """Return the tensors from which the backward of a call starts."""
        tensors = tensors_in(result)
        return [*[tensors[i] for i in self.outputs], *[copy.tensors[i] for i in self.written]]


def _behaviour(eager: Run, fresh: Callable[[], Copy], entry: Entry | None) -> _Behaviour:
    copy = fresh()
    before = [internals.version_of(tensor) for tensor in copy.tensors]
    grad_mode = torch.is_grad_enabled()
    try:
        outputs = tensors_in(eager(copy.inputs))
        changed = torch.is_grad_enabled() != grad_mode
    finally:
        torch.set_grad_enabled(grad_mode)
    moved = [internals.version_of(t) != version for t, version in zip(copy.tensors, before, strict=True)]
    positions = {id(tensor): index for index, tensor in reversed(list(enumerate(outputs)))}
    return _Behaviour(
        # A write to an inference tensor does not show in `moved`, because the tensor has no version counter. But an
        # entry that writes an input checks at each call which inputs overlap.
        mutates=any(moved) or (entry is not None and entry.state.watches_overlap),
        outputs=tuple(sorted(index for index in positions.values() if outputs[index].requires_grad)),
        written=tuple(
            [
                index
                for index, tensor in enumerate(copy.tensors)
                if moved[index] and tensor.requires_grad and not tensor.is_leaf and id(tensor) not in positions
            ]
        ),
        grad_mode=grad_mode if changed else None,
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Timer:
    """Times the forms of one graph.

    ``call`` calls a form with flat inputs. ``runs`` has the forms by engine. ``stock`` compiles the form of stock
    ``torch.compile`` for given inputs. It is None if this form is not timed. ``ready`` returns the inputs of one call.
    If calls change their inputs, ``ready`` makes new copies for each call. Otherwise all calls share one copy, because
    the inputs may be large. ``held`` are the tensors that require grad and are attributes of the graph. ``backward``
    says whether the backward is timed.
    """

    call: Call
    runs: dict[str, Run]
    stock: Callable[[Inputs], Callable[..., Any]] | None
    ready: Callable[[], Copy]
    behaviour: _Behaviour
    held: tuple[Tensor, ...]
    device: torch.device
    backward: bool = False

    def timed(self, seconds: float, skip: Callable[[str], None]) -> Comparison:
        """Time all engines in turns. Each sample is a whole call, split into phases.

        If there is time, aotlab is timed twice, so that the difference shows the noise. ``skip`` is called with a
        sentence for each result that is missing.
        """
        self.backward = trains = bool(self.behaviour.outputs or self.behaviour.written)
        if self.stock is not None:
            try:
                compiled = self.stock(self.ready().inputs)
                self.runs["upstream"] = self.behaviour.wrap(partial(self.call, compiled))
                self._once(self._case("upstream", trains))
                # Dynamo has marked the parameters, and guards would see the marks.
                for tensor in () if self.behaviour.mutates else self.ready().tensors:
                    internals.unmark_static(tensor)
            except Exception as error:  # noqa: BLE001  # stock may fail
                skip(f"stock torch.compile was not timed: it raises {_line(error)}")
                self.runs.pop("upstream", None)
        end_ns = time.perf_counter_ns() + round(seconds * 1e9)
        cases, costs = self._tried(False, seconds)
        if trains:
            try:
                cases, costs = self._tried(True, seconds)
            except Exception as error:  # noqa: BLE001  # the user's backward fails in eager too
                self.backward = False
                skip(f"only the forward was timed: the backward raises {_line(error)}")
        left_ns = max(end_ns - time.perf_counter_ns(), 0)
        round_ns = sum(costs) + costs[-1]
        # More rounds are better than longer samples: a median of two says little.
        inner = max(1, min(_SAMPLE_NS // min(costs), left_ns // (10 * round_ns)))
        # Rounds are made in pairs, with both orders of the engines. FEWEST_ROUNDS is odd, so one round is added.
        fits = (FEWEST_ROUNDS + 1) * inner * round_ns <= max(2 * left_ns, 10**9)
        return compare(
            cases,
            rounds=_ROUNDS if fits else 1,
            warmup=_WARMUP if _WARMUP * inner * round_ns <= left_ns / 10 else 0,
            inner=inner,
            limit_ns=left_ns,
            fewest=FEWEST_ROUNDS,
            spread=_SPREAD,
            device=self.device,
            again=cases[-1].name if fits else None,
        )

    def memory_curves(self) -> Iterator[MemoryCurve]:
        """Measure the memory over time of one call with each engine. All engines must have run before."""
        for engine in self.runs:
            parts = self._case(engine, self.backward).parts
            assert parts is not None
            curves = memory_curve(parts(), device=self.device)
            yield MemoryCurve(
                engine=engine, device=str(self.device), forward=curves["forward"], backward=curves.get("backward", ())
            )

    def _tried(self, backward: bool, seconds: float) -> tuple[list[Case], list[int]]:
        """Make a case for each engine, with aotlab's as the last one, and try each case.

        Return the cases, and the cost of one call of each case, in ns. If ``backward`` is true, a call has a forward
        and a backward.
        """
        cases = [
            self._case(engine, backward) for engine in ("eager", "upstream", "before", "aotlab") if engine in self.runs
        ]
        return cases, [self._try(case, seconds) for case in cases]

    def _case(self, engine: str, backward: bool) -> Case:
        def parts() -> Parts:
            copy = self.ready()
            forward = partial(self.runs[engine], copy.inputs)
            if backward:
                return training_parts(forward, partial(self.behaviour.roots, copy), self._leaves(copy))
            return iter([("forward", forward)])

        return Case(name=engine, parts=parts)

    def _leaves(self, copy: Copy) -> list[Tensor]:
        # The backward stops at the inputs, so that the autograd nodes from which a non-leaf input was copied are not
        # timed. But if the graph writes inputs, a written input is a result of the graph, so the backward must run to
        # the leaves.
        return [*(copy.leaves if self.behaviour.mutates else copy.differentiable), *self.held]

    def _try(self, case: Case, seconds: float) -> int:
        """Return the cost, in ns, of preparing and making one call.

        The cost is the minimum of up to four calls, or the cost of a single call if this call is slow.
        """
        tries = [self._once(case)]
        while len(tries) < 4 and sum(tries) < seconds * 1e9 / 40:
            tries.append(self._once(case))
        return max(1, min(tries))

    def _once(self, case: Case) -> int:
        assert case.parts is not None
        begin = self._now()
        for _, call in case.parts():
            call()
        return self._now() - begin

    def _now(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter_ns()


def call_on_copies(captured: Captured, function: Callable[..., Any]) -> None:
    """Call another compiled form of a graph on copies of the inputs of ``captured``, so that it is compiled.

    Like a measurement, the call changes neither the user's tensors nor the random state. Raises `UsageError` if there
    are no inputs.
    """
    held = captured_tensors(captured.graph) if isinstance(captured.graph, fx.GraphModule) else []
    with random_state_restored(), restored(tuple(held)), captured.calling() as call:
        try:
            entry, inputs, _ = _entry_for(captured, call)
        except _Skipped as reason:
            raise UsageError(f"{captured.frame} was not compiled: {reason}") from None
        with _settings(entry):
            call(function, copy_of(inputs).inputs)


# --- small parts -------------------------------------------------------------------------------------------------


def _entry_for(captured: Captured, call: Call) -> tuple[Entry | None, Inputs, tuple[str, ...]]:
    """Return the compiled entry that serves the inputs, the inputs, and the names of replaced inputs.

    If an input no longer exists, or no entry serves the inputs now, the newest entry is returned, and new tensors
    replace the inputs that no longer exist or whose metadata has changed. The entry is None if ``captured.compiled`` is
    not one of our compiled functions.
    """
    inputs = captured.inputs()
    function = getattr(captured.compiled, "compiled", captured.compiled)
    if not isinstance(function, CompiledFunction):
        if inputs is None:
            raise _Skipped("its inputs are gone")
        return None, inputs, ()
    if not function.entries:
        raise _Skipped("it runs eagerly")
    if inputs is not None:
        for entry in function.entries:
            if _serves(entry, inputs, call):
                return entry, inputs, ()
    entry = function.entries[0]
    inputs, replaced = stand_ins(entry.state, inputs)
    if not _serves(entry, inputs, call):
        raise _Skipped("its inputs are gone or have changed, or torch's settings have changed. Run the cell again")
    return entry, inputs, replaced


def _serves(entry: Entry, inputs: Inputs, call: Call) -> bool:
    tensors = [isinstance(each, Tensor) for each in inputs]
    if tensors != [isinstance(facts, TensorFacts) for facts in entry.state.leaves]:
        return False  # some tensors no longer exist, or these are the inputs of another entry
    # If an entry's guards do not hold, its run returns MISS and has no effect. So the entry can be tried.
    with _settings(entry):
        return call(_tried(entry), copy_of(inputs).inputs) is not MISS


def _tried(entry: Entry) -> Callable[..., Any]:
    """Return a function that takes a call's arguments, and runs only ``entry``."""
    return lambda *args, **kwargs: entry.run(args, kwargs)


@contextmanager
def _settings(entry: Entry | None) -> Iterator[None]:
    """Run a block under the modes of the capture that context managers can set; restore the current modes after it."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))  # a graph may change grad mode
        if entry is not None:
            settings = dict(entry.state.settings)
            stack.enter_context(torch.inference_mode(settings["inference mode"]))
            stack.enter_context(torch.set_grad_enabled(settings["grad mode"]))
            for name, enabled in settings.items():
                device = name.removeprefix("autocast on ")
                if device != name and enabled != torch.is_autocast_enabled(device):
                    dtype = settings[f"autocast dtype on {device}"]
                    stack.enter_context(torch.autocast(device, dtype, enabled, settings["autocast cache"]))
        yield


def _index(captured: Captured, entry: Entry | None) -> int:
    if entry is None:
        return 0
    function: Any = getattr(captured.compiled, "compiled", captured.compiled)
    numbers = sorted(each.number for each in function.entries)
    return captured.graphs.get(entry.number, numbers.index(entry.number))


def _function(graph: fx.GraphModule | types.FunctionType) -> Callable[..., Any]:
    return internals.forward_of(graph) if isinstance(graph, fx.GraphModule) else graph


def _spread(function: Callable[..., Any], inputs: Inputs) -> Any:
    return function(*inputs)


def _with_grad_mode(run: Run, mode: bool, inputs: Inputs) -> Any:
    try:
        return run(inputs)
    finally:
        torch.set_grad_enabled(mode)


def _always(copy: Copy) -> Callable[[], Copy]:
    return lambda: copy


def _device(inputs: Inputs) -> torch.device:
    devices = [tensor.device for tensor in tensors_in(inputs)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
