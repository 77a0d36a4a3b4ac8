"""The engines that the fuzzer can test. Each engine records how many calls ran eagerly and which graphs were compiled.

A `Watch` compiles one program with one engine and records its calls; `watch` makes the watch that a plan needs. Its
method ``candidate`` is the argument of `run_program`. All engines run their graphs with torch's own kernels, so that
values can be compared bit for bit.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from aotlab.cache import CompiledFunction
from aotlab.frontends import api
from aotlab.frontends import dynamo_frontend as frontend
from aotlab.maintenance.fuzz.plan import Plan
from aotlab.partition.default import default_partition
from aotlab.partition.min_cut import min_cut_rematerialization_partition
from aotlab.verification.comparisons import Difference
from aotlab.verification.observables import flatten

Function = Callable[..., Any]

#: The shapes of the tensors that one call passes.
_Sizes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Served:
    """Counts of one program: its ``calls``, its compiled ``entries``, and ``others``.

    ``others`` is the number of calls that ran an entry that was traced for other sizes.
    """

    calls: int = 0
    entries: int = 0
    others: int = 0


class Watch:
    """One program on one engine: compiles the program and records its calls.

    Attributes
    ----------
    dynamic
        True if the program is compiled for all sizes at once, else None.
    served
        The counts of the calls and entries.
    eager_calls
        How many calls returned a result that was computed eagerly.
    dynamos
        The differences from eager that also occur with Dynamo alone, without the engine. `failures.run` sets them.
    asserts
        The differences from eager, if eager itself fails an internal assertion of torch. `failures.run` sets them.
    """

    def __init__(self, *, sizes: bool = False) -> None:
        self.dynamic: bool | None = sizes or None
        self.served = Served()
        self._made_for: dict[int, _Sizes] = {}
        self.eager_calls = 0
        self.dynamos: tuple[Difference, ...] = ()
        self.asserts: tuple[Difference, ...] = ()

    def candidate(self, function: Function) -> Function:
        """Compile ``function``."""
        raise NotImplementedError

    @property
    def compiled(self) -> bool:
        """Whether anything was compiled."""
        return bool(self.graphs())

    def graphs(self) -> frozenset[str]:
        """Return the distinct graphs, as hashes."""
        raise NotImplementedError

    def close(self) -> None:
        """Reset the state of the process that the engine keeps for the program, for example Dynamo's compiled code."""

    def _watched(self, function: Function, parts: Callable[[], Sequence[CompiledFunction]]) -> Function:
        """Return a function that calls ``function`` and counts the calls in ``served`` and ``eager_calls``.

        ``parts`` returns the compiled functions behind ``function``: one, or one for each graph that Dynamo captured.
        """

        def call(*args: Any) -> Any:
            before, eager = _calls(parts()), _eager(parts())
            sizes = tuple(tuple(leaf.shape) for _, leaf in flatten(args, "")[1] if isinstance(leaf, torch.Tensor))
            self.served.calls += 1
            result = function(*args)
            # Count only calls that return. If the program raises, the engine runs it eagerly to raise the same error.
            # That eager run is not counted.
            self.eager_calls += _eager(parts()) > eager
            now = _calls(parts())
            for number in now.keys() - before.keys():
                self._made_for[number] = sizes
            by = [number for number, count in now.items() if count > before.get(number, 0)]
            self.served.entries = len(now)
            self.served.others += any(self._made_for.get(number, sizes) != sizes for number in by)
            return result

        return call


class Direct(Watch):
    """aotlab on the function itself."""

    partitioner: Function = staticmethod(default_partition)

    def candidate(self, function: Function) -> Function:
        """Compile ``function``."""
        compiled = self._compiled = api.compile(
            function, backend="eager", partitioner=self.partitioner, dynamic=self.dynamic
        )
        return self._watched(compiled, lambda: [compiled])

    def graphs(self) -> frozenset[str]:
        """Return hashes of the joint graphs of all entries; if nothing is differentiated, of the forward graphs."""
        return _graphs([self._compiled])


class BehindDynamo(Watch):
    """aotlab behind ``torch.compile``."""

    partitioner: Function = staticmethod(default_partition)

    def candidate(self, function: Function) -> Function:
        """Compile ``function``."""
        self._parts: list[CompiledFunction] = []

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Function:
            call = frontend.backend(graph, inputs, options={"compiler": "eager", "partitioner": self.partitioner})
            self._parts.append(call.compiled)  # type: ignore[attr-defined]  # set for those who look behind it
            return call

        # Dynamo then captures sizes and numbers that depend on values, as in `aotlab.compile`.
        frontend.prepare_dynamo()
        backend.is_aotlabs = True  # type: ignore[attr-defined]  # read by code that `prepare_dynamo` installs in Dynamo
        compiled = torch.compile(function, backend=backend, dynamic=self.dynamic)
        return self._watched(compiled, lambda: self._parts)

    def graphs(self) -> frozenset[str]:
        """Return hashes of the graphs of all entries, for all graphs that Dynamo captured."""
        return _graphs(self._parts)

    def close(self) -> None:
        """Reset Dynamo."""
        torch.compiler.reset()


class MinCut(Direct):
    """aotlab on the function itself, with the min-cut partitioner, which rematerializes values."""

    partitioner: Function = staticmethod(min_cut_rematerialization_partition)


class MinCutBehindDynamo(BehindDynamo):
    """aotlab behind ``torch.compile``, with the min-cut partitioner, which rematerializes values."""

    partitioner: Function = staticmethod(min_cut_rematerialization_partition)


class Upstream(Watch):
    """Torch's ``aot_function`` on the function itself.

    A function that ``aot_function`` compiled has no guards, so a second call with other arguments may return a wrong
    result. Therefore the program is compiled again for each call.
    """

    def candidate(self, function: Function) -> Function:
        """Compile ``function``."""
        from functorch.compile import aot_function  # type: ignore[import-untyped]

        self._graphs: set[str] = set()

        def compiler(graph: fx.GraphModule, _inputs: Sequence[Any]) -> Function:
            self._graphs.add(graph_hash(graph.graph))
            return graph

        return lambda *args: aot_function(function, compiler)(*args)

    def graphs(self) -> frozenset[str]:
        """Return hashes of the forward and backward graphs."""
        return frozenset(self._graphs)


class UpstreamBehindDynamo(Watch):
    """Stock ``torch.compile`` with the backend ``aot_eager``. Its graphs are not recorded."""

    backend = "aot_eager"

    def candidate(self, function: Function) -> Function:
        """Compile ``function``."""
        return torch.compile(function, backend=self.backend, dynamic=self.dynamic)

    @property
    def compiled(self) -> bool:
        """Always true: it is unknown whether anything was compiled."""
        return True

    def graphs(self) -> frozenset[str]:
        """Return nothing: the graphs are unknown."""
        return frozenset()

    def close(self) -> None:
        """Reset Dynamo."""
        torch.compiler.reset()


class DynamoAlone(UpstreamBehindDynamo):
    """Dynamo with its backend ``eager``, which runs the graphs unchanged. Differences here are caused by Dynamo."""

    backend = "eager"

    def close(self) -> None:
        """Reset Dynamo, and run the garbage collector.

        If a graph raises inside of inference mode, a reference cycle through the traceback can keep the mode's guard
        object alive. Inference mode then stays on until the collector destroys this object.
        """
        super().close()
        gc.collect()


def watch(plan: Plan) -> Watch:
    """Return a new watch, for one program on the engine of ``plan``."""
    kinds: dict[tuple[str, bool], type[Watch]] = {
        ("aotlab", False): Direct,
        ("aotlab", True): BehindDynamo,
        ("upstream", False): Upstream,
        ("upstream", True): UpstreamBehindDynamo,
    }
    kind = kinds[plan.engine, plan.dynamo]
    if plan.min_cut:
        kind = {Direct: MinCut, BehindDynamo: MinCutBehindDynamo}.get(kind, kind)
    return kind(sizes=plan.sizes)


def graph_hash(graph: fx.Graph) -> str:
    """Return a hash of the names, targets and arguments of a graph's nodes, in order. Shapes are not hashed.

    Hashing the graph's generated code would take ten times as long.
    """
    text = "\n".join(f"{node.name}={node.op}:{node.target}{node.args}{node.kwargs}" for node in graph.nodes)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _calls(parts: Sequence[CompiledFunction]) -> dict[int, int]:
    return {number: count for part in parts for number, count in part.calls.per_entry.items()}


def _eager(parts: Sequence[CompiledFunction]) -> int:
    return sum(part.calls.eager for part in parts)


def _graphs(functions: Sequence[CompiledFunction]) -> frozenset[str]:
    return frozenset(
        graph_hash(entry.records.trace.module.graph) for function in functions for entry in function.entries
    )
