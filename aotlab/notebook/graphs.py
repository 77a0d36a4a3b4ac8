"""The graphs that Dynamo captures from a notebook, each with its compiled form, its checks and its names."""

from __future__ import annotations

import operator
import re
import sys
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab import observe
from aotlab.backends import Backend
from aotlab.cache import Entry
from aotlab.errors import RefusedError
from aotlab.frontends.dynamo import GraphTarget, compile_graph, frames_of_stack
from aotlab.partition.default import default_partition
from aotlab.report.collect import function_of
from aotlab.runtime.draft import MISS
from aotlab.runtime.forward_call import ForwardFailed
from aotlab.verification import Comparison, compare


class RunInstead(BaseException):
    """A compiled graph failed before anything had happened: the code that it stands for has to run otherwise.

    Not an `Exception`: it crosses code of the user's, which must not catch it.

    Parameters
    ----------
    refused
        Whether the graph was refused, so that smaller ones may do, rather than failed.
    """

    def __init__(self, *, refused: bool) -> None:
        self.refused = refused
        super().__init__()


class NotebookTarget(GraphTarget):
    """A graph from Dynamo whose inputs have the names that the notebook's user knows.

    Parameters
    ----------
    graph
        What Dynamo captured.
    name
        What reports call it.
    names
        Returns the present names of tensors, by `id`.
    """

    def __init__(self, graph: fx.GraphModule, name: str, names: Callable[[], Mapping[int, tuple[str, Tensor]]]) -> None:
        super().__init__(graph)
        self.name = name
        self._present = names

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Name arguments by the notebook's variables, others as Dynamo does."""
        known = self._present()
        names = super().argument_names(args, kwargs)
        return [known[id(each)][0] if id(each) in known else name for each, name in zip(args, names, strict=True)]


class CapturedGraph:
    """One graph that Dynamo captured, and everything that serves it; Dynamo's code calls it.

    Parameters
    ----------
    graph, name
        What Dynamo captured, and what reports call it.
    names
        Returns the present names of tensors.
    backend
        What compiles it.
    number
        The number under which events tell of the code that it was captured from.
    device
        Where its inputs have to be, None if anywhere.
    verify
        Whether an entry is compared with eager before it is used.
    cell_file
        The file name of the cell's code.
    before
        Hears the number of an entry that is about to be compared.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        *,
        name: str,
        names: Callable[[], Mapping[int, tuple[str, Tensor]]],
        backend: Backend,
        number: int,
        device: torch.device | None,
        verify: bool,
        cell_file: str,
        progress: Callable[[str], None],
        before: Callable[[int], None],
    ) -> None:
        self.name = name
        graph, self._held = lift(graph)
        self.graph = graph
        self.ops = sum(node.op.startswith("call_") for node in graph.graph.nodes)
        self.verified: dict[int, tuple[Comparison, ...]] = {}
        self.unverified: dict[int, str] = {}
        self.served = 0
        self.failure: str | None = None
        self.refused: str | None = None
        self.surprising = False
        self._undo: list[tuple[Tensor, Tensor]] | None = None
        self._backend = backend
        self._device = device
        self._cell_file = cell_file
        self._inputs: tuple[Any, ...] = ()
        self._progress = progress
        self._before = before
        self._written: dict[int, list[tuple[str, weakref.ref[Tensor]]]] = {}
        self.moved: set[str] = set()  # the names of inputs whose metadata its entries change
        self._results: dict[int, list[weakref.ref[Tensor] | None]] = {}
        self._target = NotebookTarget(graph, name, names)
        self.compiled = compile_graph(
            self._target,
            backend,
            default_partition,
            number=number,
            tells=True,
            warn=False,
            accept=self._accept if verify or device is not None else None,
        )
        self._verify = verify
        self._newest: int | None = None

    def __call__(self, *given: Any) -> Any:
        """Serve a call from Dynamo's code."""
        args = tuple(self._target.handed_on((*self._held, *given)))
        # The first call tells whether the code around the graph raises: then what the graph wrote is taken back.
        values = {i: t.detach().clone() for i, t in enumerate(args) if _is_plain(t)} if not self.served else {}
        before = len(self.compiled.entries)
        versions = _versions(args)
        random = torch.get_rng_state() if not before or self._random() else None
        try:
            result = self.compiled(*args)
        except RefusedError as error:
            self.refused = str(error)
            if self._at_the_beginning():
                raise RunInstead(refused=True) from error
            return self._target.eager(args, {})
        except Exception as error:  # whatever it is, eager tells what it would have been
            if versions != _versions(args):
                raise  # something was written: what follows cannot be taken back
            self.failure = f"{type(error).__name__}: {error}"
            # The graph is functional: what failed in it has changed nothing.
            if random is not None:
                torch.set_rng_state(random)
            if self._at_the_beginning():
                raise RunInstead(refused=False) from None
            result = self._target.eager(args, {})
            self.surprising = True  # eager did not raise
            return result
        self.served += 1
        if values:
            self._undo = self._overwritten(args, values)
        if len(self.compiled.entries) != before or not self._inputs:
            self._remember(args, result)
        return result

    @property
    def whole(self) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
        """What puts the sizes that Dynamo's graph takes among the inputs again, if it takes any."""
        return self._target.with_sizes if self._target.sizes else None

    def inputs(self) -> tuple[Any, ...] | None:
        """Return the inputs of the latest compilation, None in the place of one that is gone; None before any."""
        found = [each() if isinstance(each, weakref.ref) else each for each in self._inputs]
        return tuple(found) if found else None

    def take_back(self) -> bool:
        """Give the inputs back the values that they had before the first call; False if that cannot be done."""
        if self._undo is None:
            return False
        with torch.no_grad():
            for tensor, value in self._undo:
                tensor.data.copy_(value)
        self._undo = None
        return True

    def settle(self) -> None:
        """Forget the values that inputs had before: the code around the graph has run."""
        self._undo = None

    def _overwritten(self, args: Sequence[Any], values: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]] | None:
        if not self.compiled.entries:
            return None
        entry = self.compiled.entries[0]
        kept = entry.records["dedupe"].kept
        found: list[tuple[Tensor, Tensor]] = []
        for info in entry.records["trace"].metadata.input_info:
            if info.metadata_steps:
                return None
            if info.mutates_data:
                if kept[info.index] not in values:
                    return None
                found.append((args[kept[info.index]], values[kept[info.index]]))
        return found

    def written(self) -> dict[str, Tensor | None]:
        """Return the inputs that its entries write, by name; None for one that is gone."""
        return {name: tensor() for each in self._written.values() for name, tensor in each}

    def result_names(self, known: Mapping[int, tuple[str, Tensor]]) -> dict[int, dict[str, str]]:
        """Return, by entry, what the notebook calls the results that reports call ``out[0]`` and so on."""
        named: dict[int, dict[str, str]] = {}
        for number, results in self._results.items():
            found: dict[str, str] = {}
            for index, each in enumerate(results):
                tensor = each() if each is not None else None
                if tensor is not None and id(tensor) in known:
                    found[f"out[{index}]"] = known[id(tensor)][0]
            named[number] = found
        return named

    def _random(self) -> bool:
        return any(entry.records["trace"].random_ops for entry in self.compiled.entries)

    def _remember(self, args: Sequence[Any], result: Any) -> None:
        """Keep what the report needs of a call that an entry served for the first time, without keeping it alive."""
        for each in args:
            if isinstance(each, Tensor):
                internals.unmark_static(each)
        self._inputs = tuple(weakref.ref(each) if isinstance(each, Tensor) else each for each in args)
        for entry in self.compiled.entries:
            if entry.number in self._results or not entry.calls:
                continue
            values = result if isinstance(result, tuple | list) else (result,)
            self._results[entry.number] = [weakref.ref(v) if isinstance(v, Tensor) else None for v in values]
            infos = entry.records["trace"].metadata.input_info
            kept = entry.records["dedupe"].kept
            self._written[entry.number] = [
                (info.name, weakref.ref(args[kept[info.index]]))
                for info in infos
                if info.mutates_data or info.mutates_metadata
            ]
            self.moved |= {info.name for info in infos if info.mutates_metadata}

    def _accept(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Compare a new entry with eager on copies of the inputs; say what speaks against it."""
        elsewhere = self._elsewhere(args)
        if elsewhere is not None:
            return elsewhere
        if not self._verify:
            return None
        self._progress(f"{self.name}: comparing with eager")
        self._before(entry.number)
        missed: list[bool] = []
        exact = self._backend.name == "eager"
        target = self._target

        def eagerly(*inputs: Any) -> Any:
            return target.eager(inputs, {})

        def by_entry(_function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*inputs: Any) -> Any:
                with suppress(ForwardFailed):  # then eager serves such calls
                    result = entry.run(inputs, {})
                    if result is not MISS:
                        return result
                    missed.append(True)
                return target.eager(inputs, {})

            return call

        began = time.perf_counter_ns()
        try:
            found = compare(
                eagerly,
                args,
                candidate=by_entry,
                calls=1,
                tolerance="exact" if exact else "close",
                yardstick=None if exact else _stock,
            )
        except Exception as error:  # noqa: BLE001  # inputs that cannot be copied are no reason not to run
            self.unverified[entry.number] = f"its inputs cannot be copied: {error}"
            return None
        finally:
            observe.emit(observe.Spent(kind="verification", duration_ns=time.perf_counter_ns() - began))
        if missed:
            self.unverified[entry.number] = "copies of its inputs do not meet its guards"
            return None
        self.verified[entry.number] = found.comparisons
        if found.ok:
            return None
        return f"its compiled form differs from eager: {found.first}"

    def _elsewhere(self, args: Sequence[Any]) -> str | None:
        if self._device is None:
            return None
        names = self._target.argument_names(tuple(args), {})
        for name, value in zip(names, args, strict=True):
            if isinstance(value, Tensor) and value.device != self._device and value.dim():
                return wrong_device(name, value, self._device)
        return None

    def _at_the_beginning(self) -> bool:
        """Tell whether Dynamo's code for a whole region is calling, in which nothing has happened before its graph."""
        code = calling_code(self._cell_file)
        return code is not None and code.co_name == "<module>"


def calling_code(cell_file: str) -> types.CodeType | None:
    """Return the code of a cell that called what is running, if nothing but torch and this package is in between."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != cell_file and _is_machinery(frame):
        frame = frame.f_back
    return frame.f_code if frame is not None and frame.f_code.co_filename == cell_file else None


def lift(graph: fx.GraphModule) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """Turn the tensors that a graph holds itself into its first inputs; return the new graph, and these inputs.

    Dynamo leaves an optimizer's parameters in the graph. As inputs they are named, guarded, copied and compared like
    all others. Dynamo goes on to use its own graph, which stays as it is.
    """
    held: dict[str, Tensor] = {}
    inputs: dict[str, fx.Node] = {}
    values = {n.target: operator.attrgetter(n.target)(graph) for n in graph.graph.nodes if n.op == "get_attr"}
    if not any(isinstance(value, Tensor) for value in values.values()):
        return graph, ()
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, val_map={}))
    first = next(iter(copied.nodes))
    for node in list(copied.nodes):
        tensor = values.get(node.target) if node.op == "get_attr" else None
        if not isinstance(tensor, Tensor):
            continue
        if node.target not in held:
            held[node.target] = tensor
            with copied.inserting_before(first):
                inputs[node.target] = copied.placeholder(re.sub(r"\W", "_", node.target))
        node.replace_all_uses_with(inputs[node.target])
        copied.erase_node(node)
    lifted = fx.GraphModule(graph, copied)
    vars(lifted)["compile_subgraph_reason"] = getattr(graph, "compile_subgraph_reason", None)
    return lifted, tuple(held.values())


def wrong_device(name: str, tensor: Tensor, device: torch.device) -> str:
    """Say that a tensor is not where it was asked to be, and how to bring it there."""
    return f"`{name}` is on {tensor.device}, not on {device}; move it: `{name} = {name}.to({str(device)!r})`"


def title_of(graph: fx.GraphModule, cell_file: str, first: int, last: int, function: str | None) -> str:
    """Name a graph by the lines of the cell that it comes from, or by the function whose code it is."""
    if function is not None:
        return function
    stacks = [frames_of_stack(node.meta.get("stack_trace")) for node in graph.graph.nodes]
    lines = {each.line for stack in stacks for each in stack if each.file == cell_file and first <= each.line <= last}
    called = next((function_of(stack[0].function) for stack in stacks if stack), "")
    if not lines and first < last and called.isidentifier():
        return called  # one of the lines calls it; it is captured by itself where Dynamo broke them off
    start, stop = (min(lines), max(lines)) if lines else (first, last)
    return f"line {start}" if start == stop else f"lines {start}–{stop}"


def _is_machinery(frame: types.FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in ("aotlab", "torch")


def _stock(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _versions(values: Sequence[Any]) -> list[int]:
    return [internals.version_of(each) for each in values if isinstance(each, Tensor) and not each.is_inference()]


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta


def dynamo_callable(graph: CapturedGraph) -> Callable[..., Any]:
    """Return what Dynamo's code is to call; Dynamo does not look into it."""
    return internals.dynamo_disable(graph.__call__)
