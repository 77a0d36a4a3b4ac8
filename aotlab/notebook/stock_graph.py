"""The graphs of a cell that stock `torch.compile` compiles: ``%%aotcompile --engine upstream`` and ``both``."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab import events
from aotlab.errors import RefusedError
from aotlab.ir.fx_graphs import copied_graph
from aotlab.notebook.graphs import CapturedGraph
from aotlab.upstream.trace_log import CompileId
from aotlab.verification import Comparison, eager

#: The stock backend for each value of the option ``--backend``.
STOCK = {"inductor": "inductor", "eager": "aot_eager"}


@dataclass(slots=True, kw_only=True)
class StockEntry:
    """A graph that stock `torch.compile` compiled, with the fields of an `aotlab.cache.Entry` that a cell needs.

    ``run`` takes the positional and the keyword arguments of a call.
    """

    number: int
    run: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    calls: int = 0


class StockFunction:
    """The compiled form of one graph: a callable like `aotlab.cache.CompiledFunction`, with at most one entry.

    Parameters
    ----------
    name, number
        The name of the function in reports, and its number in events.
    backend
        The name of the stock backend.
    compile_graph
        Compiles the graph, and returns a callable that takes the arguments of a call.
    accept
        Examines the entry before its first call. It takes ``(entry, args, kwargs)``, and returns a reason for not using
        the entry, or None.

    Attributes
    ----------
    entry_number
        The number of the entry in events.
    entries
        The entry, if it may be used.
    """

    def __init__(
        self,
        name: str,
        number: int,
        backend: str,
        compile_graph: Callable[[], Callable[[Sequence[Any]], Any]],
        accept: Callable[..., str | None] | None,
    ) -> None:
        self.number = number
        self.entries: tuple[StockEntry, ...] = ()
        self._name = name
        self._accept = accept
        self._refusal: RefusedError | None = None
        self._entry: StockEntry | None = None
        self.entry_number = events.next_entry()
        events.emit(events.Begun(kind="upstream", subject=name))
        began, failure = time.perf_counter_ns(), None
        try:
            run = compile_graph()
            self._entry = StockEntry(number=self.entry_number, run=lambda args, _kwargs: run(args))
        except internals.dynamo_restart():
            raise  # Dynamo captures the code again, and compiles the graph of the second capture
        except Exception as error:  # noqa: BLE001  # stock's error; the graph runs eagerly
            text = (str(error).strip().splitlines() or [""])[0]
            failure = f"stock torch.compile raised {type(error).__name__}: {text}"
        events.emit(
            events.CompileStarted(
                function=name, function_id=number, entry=self.entry_number, frontend="dynamo", backend=backend
            )
        )
        self._duration_ns = self._spent(began)
        if failure is not None:
            self._refuse(failure)

    def __call__(self, *args: Any) -> Any:
        """Run the compiled graph; raise a `RefusedError` if it could not be compiled, or differs from eager."""
        self.examine(args)
        if self._refusal is not None or self._entry is None:
            raise self._refusal or RefusedError("stock torch.compile made no code")
        began = time.perf_counter_ns()
        result = self._entry.run(args, {})
        cold = not self._entry.calls
        self._entry.calls += 1
        events.emit(
            events.Called(
                function=self._name,
                function_id=self.number,
                entry=self.entry_number,
                duration_ns=time.perf_counter_ns() - began,
                compiled=cold,
            )
        )
        return result

    @property
    def uncounted(self) -> Callable[..., Any] | None:
        """The compiled graph, as a function whose calls are not counted; None if stock could not compile it."""
        entry = self._entry
        return None if entry is None else lambda *args: entry.run(args, {})

    def examine(self, args: tuple[Any, ...]) -> None:
        """Compare the compiled graph with eager on copies of the arguments, before its first call."""
        if self.entries or self._refusal is not None or self._entry is None:
            return
        objection = self._accept(self._entry, args, {}) if self._accept is not None else None
        if objection is not None:
            self._refuse(objection)
            return
        self.entries = (self._entry,)
        events.emit(events.CompileFinished(entry=self.entry_number, duration_ns=self._duration_ns, guards=()))

    def _spent(self, began: int) -> int:
        duration = time.perf_counter_ns() - began
        events.emit(events.Spent(kind="upstream", duration_ns=duration))
        return duration

    def _refuse(self, reason: str) -> None:
        self._refusal = RefusedError(reason)
        events.emit(
            events.CompileFailed(
                entry=self.entry_number, duration_ns=self._duration_ns, error=self._refusal, outcome="ran eagerly"
            )
        )


class StockGraph(CapturedGraph):
    """A graph that Dynamo captured and that a stock backend compiles.

    It is made while Dynamo calls its backend. So the stock backend runs under the same conditions as in
    `torch.compile`.

    Parameters
    ----------
    graph, example_inputs
        The arguments that Dynamo passes to a backend.
    compile_id
        The id of the compilation in torch's structured trace.
    settings
        The other arguments of `CapturedGraph`.
    """

    def __init__(
        self, graph: fx.GraphModule, example_inputs: Sequence[Any], compile_id: CompileId | None, **settings: Any
    ) -> None:
        self.compile_id = compile_id
        self.beside: CapturedGraph | None = None
        self._original = graph, example_inputs
        self._changed: list[int] = []
        super().__init__(copied_graph(graph), **settings)
        self.yardstick = eager  # the errors of stock's own code cannot limit themselves
        del self._original

    def _compile(self, number: int, accept: Callable[..., str | None] | None) -> StockFunction:
        backend = STOCK[self._backend.name]
        return StockFunction(self.name, number, backend, lambda: self._by_stock(backend), accept)

    def _by_stock(self, backend: str) -> Callable[[Sequence[Any]], Any]:
        graph, example_inputs = self._original
        # Only Inductor needs the setting, which also keeps random draws that nobody uses.
        with internals.eager_draws_by_inductor() if backend == "inductor" else nullcontext():
            compiled = internals.stock_backend(backend)(graph, example_inputs)
        held, floats = self._held, self._target.floats

        def run(args: Sequence[Any]) -> Any:
            inputs = self._target.with_sizes(args)
            for position in floats:  # the user's floats, which Dynamo passes as tensors
                inputs[position] = torch.tensor(inputs[position], dtype=torch.float64)
            with _lent(held, inputs[: len(held)]):
                # a stock backend may return a list, which Dynamo's code accepts
                return tuple(compiled(*inputs[len(held) :]))

        return run

    def input_name(self, name: str) -> str:
        """Return the notebook's name for an input of the graph. ``name`` is Dynamo's expression for it.

        Dynamo's placeholder for ``self.groups[0]`` is ``L_self_groups_0_``; an attribute is ``self___groups_0``.
        """
        nodes = self._target.without_sizes(list(self.graph.graph.find_nodes(op="placeholder")))
        given = next(iter(self._argument_names.values()), {}).values()
        by_letters = {
            _letters(re.sub(r"^[LG]_", "", str(node.target))): each for node, each in zip(nodes, given, strict=False)
        }
        return by_letters.get(_letters(name), name)

    def examine(self, *inputs: Any) -> None:
        """Compare the compiled graph with eager, before the first call. ``inputs`` are the inputs of Dynamo's graph."""
        self.compiled.examine(tuple(self._target.arguments_of_compiled((*self._held, *inputs))))

    def result_names(self, present: Mapping[int, tuple[str, Tensor]]) -> dict[int, dict[str, str]]:
        """Return the notebook's names for the results, those of the other engine's form if that one runs."""
        if self.beside is None:
            return super().result_names(present)
        names = next(iter(self.beside.result_names(present).values()), {})
        return {entry.number: names for entry in self.compiled.entries}

    def _overwritten(self, args: Sequence[Any], values: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]] | None:
        """Return the written inputs with their earlier values; None if sizes were written, which cannot be undone."""
        if any(args[i].shape != value.shape for i, value in values.items()):
            return None
        self._changed = [i for i, value in values.items() if not torch.equal(args[i], value)]
        return [(args[i], values[i]) for i in self._changed]

    def _mutated(self, _entry: Any, args: Sequence[Any]) -> list[tuple[str, Tensor]]:
        names = self._target.argument_names(tuple(args), {})
        return [(names[i], args[i]) for i in self._changed]

    def _random(self) -> bool:
        return False

    def _matters(self, difference: Comparison) -> bool:
        # Stock's code does not count all writes. The report says so, but the values are right.
        return difference.kind != "version"


def _letters(text: str) -> str:
    return re.sub(r"\W|_", "", text)


@contextmanager
def _lent(tensors: Sequence[Tensor], copies: Sequence[Tensor]) -> Iterator[None]:
    """Give tensors the memory of their copies for a block, so that code which contains the tensors uses the copies.

    Stock's code contains the tensors in a graph's attributes. If it writes them, the writes of the copies are counted.
    """
    pairs = [(each, copy) for each, copy in zip(tensors, copies, strict=True) if each is not copy]
    before = [(each.data, internals.version_of(each)) for each, _ in pairs]
    try:
        for each, copy in pairs:
            each.data = copy.data
        yield
    finally:
        for (each, copy), (data, version) in zip(pairs, before, strict=True):
            each.data = data
            if internals.version_of(each) != version:
                torch.autograd.graph.increment_version(copy)
