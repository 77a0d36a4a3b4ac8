"""Time captured graphs beside eager: what the button in the dashboard's timing tab does.

What Dynamo captured can be run twice: as the graph of torch ops that it is, and as the compiled form of that graph.
Both are timed in turns (`aotlab.bench.timing`), with what stock ``torch.compile`` makes of the graph where that is
asked for, on copies of the inputs that alias each other as the inputs do, under the grad mode, inference mode and
autocast of the capture. The user's tensors, gradients, random state, call counters and compiled entries stay as they
are: an entry is called through a function made for that, so that neither the counters nor a recording see it, and
nothing but stock's form is compiled anew. Where an input is gone, or looks no longer as it did (a tensor that the graph
itself has given a history, say), a tensor of the same kind takes its place, and a sentence says so.

An input that the graph writes is copied afresh for every call, untimed, so that each call sees the same values. A
training graph is timed by whole steps, with the clock read between the forward and the backward, so that these add up
to the step. Each form is called as Dynamo's code would call it: eager's is the graph's Python, ours and stock's are
what the backend returns to Dynamo, with what it checks and counts at each call. What is not in the times: Dynamo's own
part of a call, its guards among it, and the Python between graphs. The main thread must not be running anything else
meanwhile; `aotlab.notebook.live` sees to that. An interrupt ends a measurement and leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from aotlab import _torch as internals
from aotlab._torch.compiling import compiling, never_lost
from aotlab.bench.timing import Case, Comparison, Parts, compare, tensors_in, training_parts
from aotlab.cache import CompiledFunction, Entry
from aotlab.errors import UsageError
from aotlab.guards.call_state import CallState, TensorFacts, tensor_facts
from aotlab.report.model import TimingRow
from aotlab.report.text import listed
from aotlab.runtime.draft import MISS
from aotlab.verification import Cloner
from aotlab.verification.clones import attach, captured_tensors, random_state_restored, restored

#: How long all graphs of one click may take together, in seconds, where no single call is that slow.
SECONDS = 5.0

#: A sample is made of so many calls that the fastest engine fills this time.
_SAMPLE_NS = 1_000_000

#: How many rounds are wanted; the limit of time usually comes first.
_ROUNDS = 30

Inputs = tuple[Any, ...]
Run = Callable[[Inputs], Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Captured:
    """A graph that Dynamo captured, its compiled form, and a way to inputs for both.

    Attributes
    ----------
    frame
        The report's name for the frame that holds the graph.
    graph
        What Dynamo captured; calling it runs it eagerly.
    compiled
        The `aotlab.cache.CompiledFunction` of the same graph, or what our Dynamo backend wrapped around it. Any other
        callable that takes the same arguments will do; it is called as it is then.
    inputs
        Returns the example inputs as they are now, with None in the place of tensors that are gone; None if all are.
    whole
        Puts among inputs what only the graph takes: sizes of others. None if there is nothing.
    graphs
        The index in the report of each compiled entry, by the entry's number; entries that are not in it are counted
        in the order in which they were compiled.
    stock
        The backend by which stock ``torch.compile`` compiles the graph to be timed beside; None: it is not.
    """

    frame: str
    graph: fx.GraphModule
    compiled: Callable[..., Any]
    inputs: Callable[[], Inputs | None]
    whole: Callable[[Inputs], Sequence[Any]] | None = None
    graphs: Mapping[int, int] = field(default_factory=dict)
    stock: str | None = None


class _Skipped(Exception):  # noqa: N818  # a signal within this module; its text is for the user
    """A graph cannot be timed."""


def measure(
    captured: Sequence[Captured],
    progress: Callable[[str], None],
    seconds: float = SECONDS,
    note: Callable[[str], None] | None = None,
) -> tuple[TimingRow, ...]:
    """Time each graph's forward, backward and both together, beside eager and, if asked for, stock ``torch.compile``.

    Must be called on the thread that runs the user's code, while nothing else runs there.

    Parameters
    ----------
    captured
        The graphs. Of several compiled entries of one, that is timed which the inputs are for.
    progress
        Called with a short text before each graph.
    seconds
        How long all graphs may take together. A graph whose calls are slower than that is still timed, once.
    note
        Called with a sentence for what is missing or not as it seems: a graph that runs eagerly, a backward that eager
        cannot do either, inputs that were replaced. None: the sentences are dropped.

    Returns
    -------
    tuple[TimingRow, ...]
        For each graph the phase ``"forward"`` under the engines ``"eager"``, ``"upstream"`` (stock ``torch.compile``)
        and ``"aotlab"``; where something requires grad, ``"backward"`` and ``"total"`` (their sum) as well.

    Raises
    ------
    UsageError
        Nothing could be timed; the message holds the sentences.

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

    for number, each in enumerate(captured, start=1):
        place = f" ({number} of {len(captured)})" if len(captured) > 1 else ""
        progress(f"timing {each.frame}{place}")
        try:
            rows += _measure_one(each, seconds / len(captured), skip)
        except _Skipped as reason:
            skip(f"{each.frame} was not timed: {reason}")
        except Exception as error:  # noqa: BLE001  # user's code fails in any way; the other graphs can be timed
            skip(f"{each.frame} was not timed: {_line(error)}")
    if not rows:
        raise UsageError(" ".join(skipped) if skipped else "nothing was compiled, so there is nothing to time")
    return tuple(rows)


# --- one graph ---------------------------------------------------------------------------------------------------


def _measure_one(captured: Captured, seconds: float, skip: Callable[[str], None]) -> list[TimingRow]:
    held = captured_tensors(captured.graph)
    with ExitStack() as undo:
        undo.enter_context(random_state_restored())
        undo.enter_context(restored(tuple(held)))
        entry, inputs, replaced = _entry_for(captured)
        fresh = partial(_copy, Cloner(_anything), inputs)
        alone = None if entry is None else _alone(captured.compiled, entry)
        eager: Run = partial(_spread, _given_sizes(internals.forward_of(captured.graph), captured))
        called = captured.compiled if alone is None else internals.dynamo_disable(alone.__call__)
        undo.enter_context(_settings(entry))
        behaviour = _behaviour(eager, fresh, entry)
        stock = None if captured.stock is None else partial(_stock, captured)
        timer = _Timer(
            runs={"eager": behaviour.wrap(eager), "aotlab": behaviour.wrap(partial(_spread, called))},
            stock=stock,
            ready=fresh if behaviour.mutates else _always(fresh()),
            behaviour=behaviour,
            held=tuple([tensor for _, tensor in held if tensor.requires_grad]),
            device=_device(inputs),
        )
        timed = timer.timed(seconds, lambda text: skip(f"{captured.frame}: {text}"))
        if alone is not None and alone.calls.eager:
            raise _Skipped("it ran eagerly when it was called again")
    if replaced:
        skip(f"{captured.frame} was timed with other values for {listed(replaced)}, gone or changed since it ran")
    return timed.rows(frame=captured.frame, graph=_index(captured, entry))


def _alone(compiled: Any, entry: Entry) -> CompiledFunction:
    """Make a function that does at each call what the compiled one does, with one entry, and counts for itself."""
    function = getattr(compiled, "compiled", compiled)
    alone = CompiledFunction(function._target, _not_anew, backend_name="", warn=False)
    vars(alone).update(_entries=(replace(entry, calls=0),), _announce=_tell_nobody)
    return alone


def _not_anew(*_: Any) -> NoReturn:
    raise _Skipped("its guards do not hold for a copy of its inputs")


def _tell_nobody(*_: Any, **__: Any) -> None:
    """Announce no call."""


def _given_sizes(run: Callable[..., Any], captured: Captured) -> Callable[..., Any]:
    """Let what takes the inputs of Dynamo's graph be called without the sizes among them."""
    whole = captured.whole
    return run if whole is None else lambda *inputs: run(*whole(inputs))


def _stock(captured: Captured, inputs: Inputs) -> Callable[..., Any]:
    """Let a backend of stock ``torch.compile`` compile a graph, and return what it would hand to Dynamo."""
    # A trace of a graph that changes the grad mode may leave it changed.
    with compiling(), never_lost(), torch.set_grad_enabled(torch.is_grad_enabled()):
        given = tuple(inputs if captured.whole is None else captured.whole(inputs))
        compiled = internals.stock_compiled(_copied(captured.graph), given, str(captured.stock))
        return _given_sizes(compiled, captured)


def _copied(graph: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph and those within it, with the same tensors."""
    copied = fx.GraphModule(graph, deepcopy(graph.graph))
    for name, inner in list(copied.named_children()):
        if isinstance(inner, fx.GraphModule):
            setattr(copied, name, _copied(inner))
    return copied


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Copy:
    """Copied inputs of one call.

    ``tensors`` are all that go in, ``differentiable`` those of them that require grad, and ``leaves`` the leaves behind
    these, which stay what they are when an input is written.
    """

    inputs: Inputs
    tensors: tuple[Tensor, ...]
    differentiable: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]


def _copy(cloner: Cloner, inputs: Inputs) -> _Copy:
    # Whatever mode the graph runs in: what is made in inference mode is an inference tensor, and else it is none.
    with torch.inference_mode(False), torch.set_grad_enabled(True):
        call = cloner.call(inputs, {})
    # What was passed twice is one object in the copy as well.
    other = {
        id(copy): _inference_tensor_over(copy)
        for given, copy in zip(inputs, call.args, strict=True)
        if isinstance(given, Tensor) and given.is_inference()
    }
    args = tuple([other.get(id(copy), copy) for copy in call.args])
    tensors = _distinct(tensor for tensor in tensors_in(args))
    behind = [tensor for _, tensor in call.watched]
    return _Copy(
        inputs=args,
        tensors=tensors,
        differentiable=tuple([tensor for tensor in tensors if tensor.requires_grad]),
        leaves=_distinct(tensor for tensor in (*tensors, *behind) if tensor.is_leaf and tensor.requires_grad),
    )


def _inference_tensor_over(tensor: Tensor) -> Tensor:
    """Return an inference tensor in the place of ``tensor``, over the same memory."""
    with torch.inference_mode():
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Behaviour:
    """What one trial call shows of a graph.

    ``mutates``: it writes an input. ``outputs``: which of its output tensors can be differentiated. ``written``: which
    inputs, by position among the copy's tensors, it turns into something that can be. ``grad_mode``: what to put back
    after each call, None if it leaves grad mode alone.
    """

    mutates: bool
    outputs: tuple[int, ...]
    written: tuple[int, ...]
    grad_mode: bool | None

    def wrap(self, run: Run) -> Run:
        """Let ``run`` leave grad mode as it was."""
        if self.grad_mode is None:
            return run
        return partial(_with_grad_mode, run, self.grad_mode)

    def roots(self, copy: _Copy, result: Any) -> list[Tensor]:
        """Choose what a backward starts from."""
        tensors = tensors_in(result)
        return [*[tensors[i] for i in self.outputs], *[copy.tensors[i] for i in self.written]]


def _behaviour(eager: Run, fresh: Callable[[], _Copy], entry: Entry | None) -> _Behaviour:
    copy = fresh()
    before = [internals.version_of(tensor) for tensor in copy.tensors]
    grad_mode = torch.is_grad_enabled()
    try:
        outputs = tensors_in(eager(copy.inputs))
        changed = torch.is_grad_enabled() != grad_mode
    finally:
        torch.set_grad_enabled(grad_mode)
    moved = [internals.version_of(t) != version for t, version in zip(copy.tensors, before, strict=True)]
    known = {id(tensor): index for index, tensor in reversed(list(enumerate(outputs)))}
    return _Behaviour(
        # Inference tensors count no versions; the entry knows without.
        mutates=any(moved) or (entry is not None and entry.state.watches_overlap),
        outputs=tuple(sorted(index for index in known.values() if outputs[index].requires_grad)),
        written=tuple(
            [
                index
                for index, tensor in enumerate(copy.tensors)
                if moved[index] and tensor.requires_grad and not tensor.is_leaf and id(tensor) not in known
            ]
        ),
        grad_mode=grad_mode if changed else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Timer:
    """The forms of one graph by engine, and what timing them takes; ``stock`` makes one more, of inputs.

    ``ready`` gives each call its inputs: fresh ones if calls change them, else the same for all, as they may be large.
    """

    runs: dict[str, Run]
    stock: Callable[[Inputs], Callable[..., Any]] | None
    ready: Callable[[], _Copy]
    behaviour: _Behaviour
    held: tuple[Tensor, ...]
    device: torch.device

    def timed(self, seconds: float, skip: Callable[[str], None]) -> Comparison:
        """Time all engines in turns, each by whole calls of which the phases are parts, and one of them twice."""
        trains = bool(self.behaviour.outputs or self.behaviour.written)
        if self.stock is not None:
            try:
                compiled = self.stock(self.ready().inputs)
                self.runs["upstream"] = self.behaviour.wrap(partial(_spread, compiled))
                self._once(self._case("upstream", trains))
            except Exception as error:  # noqa: BLE001  # what stock torch.compile cannot do is no reason not to time ours
                skip(f"stock torch.compile was not timed: it raises {_line(error)}")
                self.runs.pop("upstream", None)
        end_ns = time.perf_counter_ns() + round(seconds * 1e9)
        cases, costs = self._tried(False, seconds)
        if trains:
            try:
                cases, costs = self._tried(True, seconds)
            except Exception as error:  # noqa: BLE001  # what the user's backward raises, eager's would too
                skip(f"only the forward was timed: the backward raises {_line(error)}")
        left_ns = max(end_ns - time.perf_counter_ns(), 0)
        round_ns = sum(costs) + costs[-1]
        # Rather more rounds than longer samples: a median of two says little.
        inner = max(1, min(_SAMPLE_NS // min(costs), left_ns // (10 * round_ns)))
        fits = 2 * inner * round_ns <= max(2 * left_ns, 10**9)
        return compare(
            cases,
            rounds=_ROUNDS if fits else 1,
            warmup=0,
            inner=inner,
            limit_ns=left_ns,
            device=self.device,
            again="aotlab" if fits else None,
        )

    def _tried(self, backward: bool, seconds: float) -> tuple[list[Case], list[int]]:
        """Make a case for each engine, ours last, and call each; also return what that costs, in ns."""
        cases = [self._case(engine, backward) for engine in ("eager", "upstream", "aotlab") if engine in self.runs]
        return cases, [self._try(case, seconds) for case in cases]

    def _case(self, engine: str, backward: bool) -> Case:
        def parts() -> Parts:
            copy = self.ready()
            forward = partial(self.runs[engine], copy.inputs)
            if backward:
                return training_parts(forward, partial(self.behaviour.roots, copy), self._leaves(copy))
            return iter([("forward", forward)])

        return Case(name=engine, parts=parts)

    def _leaves(self, copy: _Copy) -> list[Tensor]:
        # Up to the inputs and no further, so that what stands behind a copied non-leaf is not timed. That an input
        # which gets written is not: by then it is an output.
        return [*(copy.leaves if self.behaviour.mutates else copy.differentiable), *self.held]

    def _try(self, case: Case, seconds: float) -> int:
        """Return what preparing and making one call cost, in ns: the least of some calls, or of one if that is slow."""
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


# --- small parts -------------------------------------------------------------------------------------------------


def _entry_for(captured: Captured) -> tuple[Entry | None, Inputs, tuple[str, ...]]:
    """Find the compiled entry that serves the inputs, the inputs, and the names of those that had to be replaced.

    If no entry serves the inputs as they are now, or they are gone, it is the newest, with stand-ins for those which do
    not look as they did. The entry is None if ``captured.compiled`` is no compiled function of ours.
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
            if _serves(entry, inputs):
                return entry, inputs, ()
    entry = function.entries[0]
    inputs, replaced = _stand_ins(entry.state, inputs)
    if not _serves(entry, inputs):
        raise _Skipped("its inputs are gone or have changed, or torch's settings have. Run the cell again")
    return entry, inputs, replaced


def _serves(entry: Entry, inputs: Inputs) -> bool:
    tensors = [isinstance(each, Tensor) for each in inputs]
    if tensors != [isinstance(facts, TensorFacts) for facts in entry.state.leaves]:
        return False  # some are gone, or they are for another entry
    # An entry whose guards do not hold says so before it does anything.
    with _settings(entry):
        return entry.run(_copy(Cloner(_anything), inputs).inputs, {}) is not MISS


def _stand_ins(state: CallState, inputs: Inputs | None) -> tuple[Inputs, tuple[str, ...]]:
    """Make inputs as those of the capture were, from those that still look so and others of the same kind."""
    made: list[Any] = []
    replaced: list[str] = []
    for position, facts in enumerate(state.leaves):
        now = inputs[position] if inputs is not None and len(inputs) == len(state.leaves) else None
        if not isinstance(facts, TensorFacts):
            made.append(facts.value)
        elif state.same_as[position] != position:
            made.append(made[state.same_as[position]])
        elif isinstance(now, Tensor) and tensor_facts(now) == facts:
            made.append(now)
        else:
            made.append(_stand_in(facts))
            replaced.append(state.names[position])
    return tuple(made), tuple(replaced)


def _stand_in(facts: TensorFacts) -> Tensor:
    """Make a tensor of the same kind, with random numbers in it, or zeros where they may be indices."""
    extent = 1 + sum((size - 1) * step for size, step in zip(facts.shape, facts.stride, strict=True))
    count = facts.offset + (extent if 0 not in facts.shape else 0)
    with torch.inference_mode(facts.is_inference), torch.set_grad_enabled(True):
        if facts.dtype.is_floating_point or facts.dtype.is_complex:
            # Not every type has random numbers of its own.
            memory = torch.rand(count, device=facts.device).to(facts.dtype)
        else:
            memory = torch.zeros(count, dtype=facts.dtype, device=facts.device)
        tensor = memory.as_strided(facts.shape, facts.stride, facts.offset).detach()
        if issubclass(facts.type, nn.Parameter):
            return nn.Parameter(tensor, requires_grad=facts.requires_grad)
        if facts.requires_grad and not facts.is_leaf:
            return attach(tensor.clone().requires_grad_(), tensor)
        return tensor.requires_grad_(facts.requires_grad)


@contextmanager
def _settings(entry: Entry | None) -> Iterator[None]:
    """Put the modes of the capture in place, and those of now back; only the modes which context managers set."""
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))  # a graph may leave it changed
        if entry is not None:
            known = dict(entry.state.settings)
            stack.enter_context(torch.inference_mode(known["inference mode"]))
            stack.enter_context(torch.set_grad_enabled(known["grad mode"]))
            for name, enabled in known.items():
                device = name.removeprefix("autocast on ")
                if device != name and enabled != torch.is_autocast_enabled(device):
                    dtype = known[f"autocast dtype on {device}"]
                    stack.enter_context(torch.autocast(device, dtype, enabled, known["autocast cache"]))
        yield


def _index(captured: Captured, entry: Entry | None) -> int:
    if entry is None:
        return 0
    function: Any = getattr(captured.compiled, "compiled", captured.compiled)
    numbers = sorted(each.number for each in function.entries)
    return captured.graphs.get(entry.number, numbers.index(entry.number))


def _spread(function: Callable[..., Any], inputs: Inputs) -> Any:
    return function(*inputs)


def _with_grad_mode(run: Run, mode: bool, inputs: Inputs) -> Any:
    try:
        return run(inputs)
    finally:
        torch.set_grad_enabled(mode)


def _always(copy: _Copy) -> Callable[[], _Copy]:
    return lambda: copy


def _anything(*inputs: Any) -> None:
    """Take any arguments; its signature names them."""


def _distinct(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple({id(tensor): tensor for tensor in tensors}.values())


def _device(inputs: Inputs) -> torch.device:
    devices = [tensor.device for tensor in tensors_in(inputs)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
