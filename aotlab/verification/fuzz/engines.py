"""The engines that can be fuzzed, each with a look at what it did: what ran eagerly, which graphs came out.

`watch` gives out a fresh `Watch` for one program; its ``candidate`` is what `run_program` takes.
Whatever an engine offers, values are those of torch's own kernels, so that they can be compared bit for bit.
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
from aotlab.frontends import dynamo as frontend
from aotlab.partition.default import default_partition
from aotlab.partition.min_cut import min_cut_rematerialization_partition
from aotlab.verification.differential import Difference
from aotlab.verification.fuzz.plan import Plan
from aotlab.verification.observables import flatten

Function = Callable[..., Any]

#: The sizes of a call's tensors.
_Sizes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Served:
    """How often a program was called, how many entries were made, and how many calls one served of other sizes."""

    calls: int = 0
    entries: int = 0
    others: int = 0


class Watch:
    """One program on one engine: compiles it, and can tell afterwards what became of it.

    Attributes
    ----------
    dynamic
        True if one compilation is to serve all sizes.
    served
        What became of the calls.
    eager_calls
        How many calls returned a result that eager had computed.
    dynamos
        What differs from eager without the engine as well: Dynamo's own differences.
    asserts
        The differences of a program at which eager itself ends in an internal assertion of torch.
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
        """Return the distinct graphs, as hashes of their code."""
        raise NotImplementedError

    def close(self) -> None:
        """Forget what the engine keeps of the program in the process."""

    def _watched(self, function: Function, parts: Callable[[], Sequence[CompiledFunction]]) -> Function:
        """Call ``function`` and note by which entries of its ``parts`` that was served."""

        def call(*args: Any) -> Any:
            before, eager = _calls(parts()), _eager(parts())
            sizes = tuple(tuple(leaf.shape) for _, leaf in flatten(args, "")[1] if isinstance(leaf, torch.Tensor))
            self.served.calls += 1
            result = function(*args)
            # A call that raises may well have run eagerly: that is how the user's own error is raised.
            self.eager_calls += _eager(parts()) > eager
            now = _calls(parts())
            for number in now.keys() - before.keys():
                self._made_for[number] = sizes
            by = [number for number, count in now.items() if count > before.get(number, 0)]
            self.served.entries = len(now)
            self.served.others += any(self._made_for[number] != sizes for number in by)
            return result

        return call


class Direct(Watch):
    """Our engine on the function itself."""

    partitioner: Function = staticmethod(default_partition)

    def candidate(self, function: Function) -> Function:
        """Compile ``function``."""
        compiled = self._compiled = api.compile(
            function, backend="eager", partitioner=self.partitioner, dynamic=self.dynamic
        )
        return self._watched(compiled, lambda: [compiled])

    def graphs(self) -> frozenset[str]:
        """Return the joint graphs of all entries, or the forward graphs where nothing is differentiated."""
        return _graphs([self._compiled])


class BehindDynamo(Watch):
    """Our engine behind ``torch.compile``."""

    partitioner: Function = staticmethod(default_partition)

    def candidate(self, function: Function) -> Function:
        """Compile ``function``."""
        self._parts: list[CompiledFunction] = []

        def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Function:
            call = frontend.backend(graph, inputs, options={"compiler": "eager", "partitioner": self.partitioner})
            self._parts.append(call.compiled)  # type: ignore[attr-defined]  # set for those who look behind it
            return call

        compiled = torch.compile(function, backend=backend, dynamic=self.dynamic)
        return self._watched(compiled, lambda: self._parts)

    def graphs(self) -> frozenset[str]:
        """Return the graphs of all entries of all parts that Dynamo made."""
        return _graphs(self._parts)

    def close(self) -> None:
        """Reset Dynamo."""
        torch.compiler.reset()


class MinCut(Direct):
    """The same with the partitioner that computes again."""

    partitioner: Function = staticmethod(min_cut_rematerialization_partition)


class MinCutBehindDynamo(BehindDynamo):
    """The same with the partitioner that computes again."""

    partitioner: Function = staticmethod(min_cut_rematerialization_partition)


class Upstream(Watch):
    """Torch's ``aot_function`` on the function itself.

    What it compiled has no guards, so that every call gets one of its own: what it makes of a second call with other
    arguments is nothing that it promises anything about.
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
        """Return the forward and backward graphs."""
        return frozenset(self._graphs)


class UpstreamBehindDynamo(Watch):
    """Stock ``torch.compile`` with the backend ``aot_eager``, whose graphs are not seen."""

    backend = "aot_eager"

    def candidate(self, function: Function) -> Function:
        """Compile ``function``."""
        return torch.compile(function, backend=self.backend, dynamic=self.dynamic)

    @property
    def compiled(self) -> bool:
        """Nothing is known about it."""
        return True

    def graphs(self) -> frozenset[str]:
        """Nothing is known about them."""
        return frozenset()

    def close(self) -> None:
        """Reset Dynamo."""
        torch.compiler.reset()


class DynamoAlone(UpstreamBehindDynamo):
    """Dynamo with its backend ``eager``, which runs the graphs as they are: what differs here is Dynamo's own doing."""

    backend = "eager"

    def close(self) -> None:
        """Reset Dynamo, and let go of the modes that a graph has entered and, as it raised, not left."""
        super().close()
        gc.collect()


def watch(plan: Plan) -> Watch:
    """Make the engine of a run ready for one program."""
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
    """Hash what a graph computes: its nodes in order, with their names, targets and arguments, but no shapes.

    Generating the code of a graph takes ten times as long.
    """
    text = "\n".join(f"{node.name}={node.op}:{node.target}{node.args}{node.kwargs}" for node in graph.nodes)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _calls(parts: Sequence[CompiledFunction]) -> dict[int, int]:
    return {number: count for part in parts for number, count in part.calls.per_entry.items()}


def _eager(parts: Sequence[CompiledFunction]) -> int:
    return sum(part.calls.eager for part in parts)


def _graphs(functions: Sequence[CompiledFunction]) -> frozenset[str]:
    return frozenset(
        graph_hash(entry.records["trace"].module.graph) for function in functions for entry in function.entries
    )
