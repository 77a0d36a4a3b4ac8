"""The graphs that Dynamo captures from a notebook, each with its compiled form, its verification and its names."""

from __future__ import annotations

import operator
import re
import sys
import time
import traceback
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab import events
from aotlab.backends import Backend
from aotlab.backends.inductor_backend import kernels_announced
from aotlab.cache import CompiledFunction, Entry, next_number
from aotlab.errors import RefusedError
from aotlab.frontends.dynamo_frontend import GraphTarget, compile_graph, frames_of_stack
from aotlab.frontends.tensor_names import Named, names_on_stack
from aotlab.ir.extents import within_its_storage
from aotlab.partition.partition_stage import Partitioner
from aotlab.report.dynamo_breaks import function_of
from aotlab.runtime.draft import MISS
from aotlab.runtime.forward_call import ForwardFailed
from aotlab.verification import Comparison, compare


class RunInstead(BaseException):
    """Raised if a graph was refused or its compiled form failed, before the graph had any effect.

    The callable of the region or function that contains the graph catches this exception. Then it runs the Python code
    instead, eagerly or as smaller graphs. The class is not a subclass of `Exception`, because the exception passes
    through the user's code, which must not catch it.

    Parameters
    ----------
    refused
        True if the graph was refused; smaller graphs may then succeed. False if the compiled form raised an error.
    """

    def __init__(self, *, refused: bool) -> None:
        self.refused = refused
        super().__init__()


class NotebookTarget(GraphTarget):
    """A graph from Dynamo whose inputs are named after the notebook's variables.

    Parameters
    ----------
    graph
        The graph that Dynamo captured.
    name
        The graph's name in reports.
    names
        A function that takes the tensors for which names are needed, and returns the current names of the notebook's
        tensors, by `id`.
    """

    def __init__(self, graph: fx.GraphModule, name: str, names: Callable[[Sequence[Any]], Named]) -> None:
        super().__init__(graph)
        self.name = name
        self._present = names

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Return names for arguments, taken from the notebook's variables, else from variables on the stack.

        An argument that no variable refers to has the name that Dynamo gives it.
        """
        present = self._present(args)
        if any(isinstance(each, Tensor) and id(each) not in present for each in args):
            present = {**names_on_stack(), **present}
        names = super().argument_names(args, kwargs)
        return [present[id(each)][0] if id(each) in present else name for each, name in zip(args, names, strict=True)]


class CapturedGraph:
    """One graph that Dynamo captured, with its compiled entries and their verification.

    The code that Dynamo generated for the user's function calls this object.

    Parameters
    ----------
    graph, name
        The graph that Dynamo captured, and its name in reports.
    names
        See `NotebookTarget`.
    backend
        The backend that compiles the graph.
    partitioner
        The partitioner that chooses the values that the forward saves.
    number
        The number, in events, of the code object from which the graph was captured.
    device
        The device on which the graph's inputs must be; None if any device is allowed.
    verify
        Whether each entry is compared with eager before it is used.
    cell_file
        The file name of the cell's code.
    before
        Called with the number of a new entry before the entry is compared with eager.

    Attributes
    ----------
    verified, unverified
        The comparison of each entry with eager, and for the other entries the reason why they could not be compared.
        The key is the number of the entry.
    served_calls
        The number of calls that the compiled entries have served.
    failure, surprising
        The error that the compiled form raised, if any, and whether eager did not raise it.
    refused
        The message of the refusal, if the graph was refused.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        *,
        name: str,
        names: Callable[[Sequence[Any]], Named],
        backend: Backend,
        partitioner: Partitioner,
        number: int,
        device: torch.device | None,
        verify: bool,
        cell_file: str,
        before: Callable[[int], None],
    ) -> None:
        self.name = name
        graph, self._held = lift(graph)
        self.graph = graph
        self.ops = sum(node.op.startswith("call_") for node in graph.graph.nodes)
        self.verified: dict[int, tuple[Comparison, ...]] = {}
        self.unverified: dict[int, str] = {}
        self.served_calls = 0
        self.failure: str | None = None
        self.refused: str | None = None
        self.surprising = False
        self._undo: list[tuple[Tensor, Tensor]] | None = None
        self._backend = backend
        self._partitioner = partitioner
        self._device = device
        self._cell_file = cell_file
        self._inputs: tuple[Any, ...] = ()
        self._before = before
        self._written: dict[int, list[tuple[str, weakref.ref[Tensor]]]] = {}
        self._argument_names: dict[int, dict[str, str]] = {}
        #: Compiles a function. The errors of its result limit the errors of Inductor's kernels; see `compare`.
        self.yardstick: Callable[..., Any] = _stock
        #: Returns the code that stock `torch.compile` made for the graph. None if stock has not compiled the graph.
        self.stock: Callable[..., Any] | None = None
        self.moved: set[str] = set()  # the names of inputs whose metadata the entries change
        self._results: dict[int, list[weakref.ref[Tensor] | None]] = {}
        self._target = NotebookTarget(graph, name, names)
        stacks = [frames_of_stack(node.meta.get("stack_trace")) for node in graph.graph.nodes]
        #: The cell's lines whose ops are in the graph, and the lines that Python ran to call the captured code.
        self.lines = {each.line for stack in stacks for each in stack if each.file == cell_file}
        self.callers = self._target.callers
        self._verify = verify
        self.compiled: Any = self._compile(number, self._accept if verify or device is not None else None)

    def compiled_with(self, partitioner: Partitioner) -> CompiledFunction:
        """Return another compiled form of the graph, with another partitioner.

        It compiles at its first call. Each entry is compared with eager before it is used, and refused if it differs.
        """
        return compile_graph(
            self._target,
            self._backend,
            partitioner,
            number=next_number(),
            raises_refusals=True,
            warn=False,
            accept=partial(self._accept, always=True),
        )

    def _compile(self, number: int, accept: Callable[..., str | None] | None) -> Any:
        """Return the compiled form of the graph, an `aotlab.cache.CompiledFunction` or a callable like it.

        ``number`` identifies it in events. ``accept`` examines each new entry before it is used.
        """
        return compile_graph(
            self._target,
            self._backend,
            self._partitioner,
            number=number,
            raises_refusals=True,
            warn=False,
            accept=accept,
        )

    def __call__(self, *inputs: Any) -> Any:
        """Serve a call from Dynamo's code."""
        args = tuple(self._target.arguments_of_compiled((*self._held, *inputs)))
        # Copies of the inputs of the first call. If the code around the graph raises afterwards, the writes of the
        # graph are undone from these copies.
        values = {i: t.detach().clone() for i, t in enumerate(args) if _is_plain(t)} if not self.served_calls else {}
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
        except Exception as error:  # run eagerly instead: eager gives the right result or error
            if versions != _versions(args):
                raise  # an input was written, and the write cannot be undone
            self.failure = f"{type(error).__name__}: {error}"
            # The graph is functional, so a failure inside it has changed nothing.
            if random is not None:
                torch.set_rng_state(random)
            if self._at_the_beginning():
                raise RunInstead(refused=False) from None
            result = self._target.eager(args, {})
            self.surprising = True  # eager did not raise
            return result
        self.served_calls += 1
        if values:
            self._undo = self._overwritten(args, values)
        if len(self.compiled.entries) != before or not self._inputs:
            self._remember(args, result)
        return result

    @property
    def whole(self) -> Callable[[Sequence[Any]], Sequence[Any]] | None:
        """A function that turns inputs of the compiled form into inputs of Dynamo's graph, or None.

        Dynamo's graph also takes dynamic sizes as inputs. The compiled form does not: it reads the sizes from its
        tensors. The function inserts the sizes, so that Dynamo's graph can run on the inputs of the compiled form. If
        Dynamo's graph takes no sizes, there is no such function.
        """
        return self._target.with_sizes if self._target.sizes else None

    def inputs(self) -> tuple[Any, ...] | None:
        """Return the inputs of the call that compiled the latest entry, or None if there was no such call yet.

        The tuple has None for each tensor that no longer exists or whose storage was freed.
        """
        inputs = [each() if isinstance(each, weakref.ref) else each for each in self._inputs]
        freed = [isinstance(each, Tensor) and not within_its_storage(each) for each in inputs]
        return tuple(None if gone else each for each, gone in zip(inputs, freed, strict=True)) if inputs else None

    def take_back(self) -> bool:
        """Restore the values that the written inputs had before the first call; return False if that is impossible."""
        if self._undo is None:
            return False
        with torch.no_grad():
            for tensor, value in self._undo:
                if within_its_storage(tensor):
                    tensor.data.copy_(value)
        self._undo = None
        return True

    def settle(self) -> None:
        """Drop the saved values of the inputs, because the code around the graph has finished."""
        self._undo = None

    def _overwritten(self, args: Sequence[Any], values: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]] | None:
        if not self.compiled.entries:
            return None
        entry = self.compiled.entries[0]
        positions = entry.records.dedupe.kept
        overwritten: list[tuple[Tensor, Tensor]] = []
        for info in entry.records.trace.metadata.input_info:
            if info.mutates_metadata:
                return None
            if info.mutates_data:
                if positions[info.index] not in values:
                    return None
                overwritten.append((args[positions[info.index]], values[positions[info.index]]))
        return overwritten

    def written(self) -> dict[str, Tensor | None]:
        """Return the inputs that the entries write, by name. The value is None for an input that no longer exists."""
        return {name: tensor() for each in self._written.values() for name, tensor in each}

    def result_names(self, present: Mapping[int, tuple[str, Tensor]]) -> dict[int, dict[str, str]]:
        """Return the notebook's names for the results and the arguments of each entry, by the entry's number.

        The names are keyed by the names in reports (``out[0]``) and in comparisons (``inputs[0]``). ``present`` has the
        notebook's tensors and their names, by `id`.
        """
        named = {number: dict(names) for number, names in self._argument_names.items()}
        for number, results in self._results.items():
            names: dict[str, str] = {}
            for index, each in enumerate(results):
                tensor = each() if each is not None else None
                if tensor is not None and id(tensor) in present:
                    names[f"out[{index}]"] = present[id(tensor)][0]
            named[number] = {**named.get(number, {}), **names}
        return named

    def _random(self) -> bool:
        return any(entry.records.trace.random_ops for entry in self.compiled.entries)

    def _remember(self, args: Sequence[Any], result: Any) -> None:
        """Record the facts that the report needs about an entry's first call, without keeping its tensors alive."""
        for each in args:
            if isinstance(each, Tensor):
                internals.unmark_static(each)
        self._inputs = tuple(weakref.ref(each) if isinstance(each, Tensor) else each for each in args)
        for entry in self.compiled.entries:
            if entry.number in self._results or not entry.calls:
                continue
            values = result if isinstance(result, tuple | list) else (result,)
            self._results[entry.number] = [weakref.ref(v) if isinstance(v, Tensor) else None for v in values]
            self._written[entry.number] = [(name, weakref.ref(each)) for name, each in self._mutated(entry, args)]

    def _mutated(self, entry: Any, args: Sequence[Any]) -> list[tuple[str, Tensor]]:
        """Return the names and tensors of the inputs that an entry writes, and add to `moved`."""
        written, moved = written_inputs(entry, args)
        self.moved |= moved
        return written

    def _accept(
        self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], *, always: bool = False
    ) -> str | None:
        """Compare a new entry with eager on copies of the inputs; return a reason to reject the entry, or None.

        ``always`` compares the entry although the user switched the comparison off.
        """
        elsewhere = self._elsewhere(args)
        if elsewhere is not None:
            return elsewhere
        if not (self._verify or always):
            return None
        self._before(entry.number)
        missed: list[bool] = []
        exact = self._backend.name == "eager"
        target = self._target

        def eagerly(*inputs: Any) -> Any:
            return target.eager(inputs, {})

        def by_entry(_function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*inputs: Any) -> Any:
                # If the compiled forward raises in a call of the user, the call runs eagerly. Do the same here.
                with suppress(ForwardFailed):
                    result = entry.run(inputs, {})
                    if result is not MISS:
                        return result
                    missed.append(True)
                return target.eager(inputs, {})

            return call

        events.emit(events.Begun(kind="verification", subject=self.name))
        began = time.perf_counter_ns()
        try:
            with nullcontext() if exact else kernels_announced(entry.number, "upstream"):
                verification = compare(
                    eagerly,
                    args,
                    candidate=by_entry,
                    calls=1,
                    tolerance="rounded" if exact else "close",
                    yardstick=None if exact else self.yardstick,
                )
        except Exception as error:  # noqa: BLE001  # an entry whose inputs cannot be copied is used unverified
            self.unverified[entry.number] = f"its inputs cannot be copied: {error}"
            return None
        finally:
            events.emit(events.Spent(kind="verification", duration_ns=time.perf_counter_ns() - began))
        if missed:
            self.unverified[entry.number] = "copies of its inputs do not meet its guards"
            return None
        names = self._target.argument_names(args, {})
        self._argument_names[entry.number] = {f"inputs[{i}]": name for i, name in enumerate(names)}
        self.verified[entry.number] = verification.comparisons
        first = next((row.sentence for row in verification.comparisons if not row.equal and self._matters(row)), None)
        return None if first is None else f"its compiled form differs from eager: {renamed(first, names)}"

    def _matters(self, _difference: Comparison) -> bool:
        """Tell whether an entry with this difference from eager must not be used."""
        return True

    def _elsewhere(self, args: Sequence[Any]) -> str | None:
        if self._device is None:
            return None
        names = self._target.argument_names(tuple(args), {})
        for name, value in zip(names, args, strict=True):
            if isinstance(value, Tensor) and value.device != self._device and value.dim():
                return wrong_device(name, value, self._device)
        return None

    def _at_the_beginning(self) -> bool:
        """Tell whether the caller of the graph is Dynamo's code for a whole region.

        Dynamo's code has had no effect yet when it calls its graph. So the region can still run in another way.
        """
        code = calling_code(self._cell_file)
        return code is not None and code.co_name == "<module>"


def calling_code(cell_file: str) -> types.CodeType | None:
    """Return the code object of the cell that called the current function, directly or through torch and aotlab.

    Return None if frames of other code are in between, or if the cell did not call the current function.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != cell_file and _is_machinery(frame):
        frame = frame.f_back
    return frame.f_code if frame is not None and frame.f_code.co_filename == cell_file else None


def lift(graph: fx.GraphModule) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    """Return a copy of a graph whose first inputs are the tensors that were attributes, and these tensors.

    Dynamo leaves an optimizer's parameters in the graph as attributes. As inputs, they are named, guarded, copied and
    compared like all other inputs. Dynamo's own graph is not changed, because Dynamo continues to use it.
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
    """Return a sentence that says that a tensor is on another device than requested, and how to move it."""
    return f"`{name}` is on {tensor.device}, not on {device}; move it: `{name} = {name}.to({str(device)!r})`"


def title_of(
    graph: fx.GraphModule, cell_file: str, first: int, last: int, function: str | None, functions: Collection[str]
) -> str:
    """Return a name for a graph: the function that it comes from, or its lines in the cell.

    The graph belongs to a part of the cell: to ``function``, or to a region, if ``function`` is None. The part has the
    lines ``first`` to ``last``. ``functions`` are the functions that the cell defines. A graph of a region is named
    after a function if all its ops come from one function of the cell. If none of its ops comes from the lines of the
    region, it is named after the function that Dynamo captured, if that can be found.
    """
    if function is not None:
        return function
    stacks = [frames_of_stack(node.meta.get("stack_trace")) for node in graph.graph.nodes]
    names = {_first_of(functions, ((f.file, f.function) for f in stack), cell_file) for stack in stacks if stack}
    if len(names) == 1 and (name := names.pop()):
        return name
    lines = {each.line for stack in stacks for each in stack if each.file == cell_file and first <= each.line <= last}
    called = next((function_of(stack[0].function) for stack in stacks if stack), "")
    if not lines and first < last and called.isidentifier():
        return called  # a line of the region calls this function; Dynamo captured it separately after a graph break
    running = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in traceback.walk_stack(None)]
    if not lines and (name := _first_of(functions, reversed(running), cell_file)):
        return name
    start, stop = (min(lines), max(lines)) if lines else (first, last)
    return f"line {start}" if start == stop else f"lines {start}–{stop}"


def _first_of(functions: Collection[str], frames: Iterable[tuple[str, str]], cell_file: str) -> str:
    """Return the first function in ``frames`` that the cell defines, or "". A frame is a pair (file, function)."""
    names = (function_of(name) for file, name in frames if file == cell_file)
    return next((name for name in names if name in functions), "")


def written_inputs(entry: Entry, args: Sequence[Any]) -> tuple[list[tuple[str, Tensor]], set[str]]:
    """Return the names and tensors of the inputs that an entry writes, and the names of those with new metadata.

    ``args`` are the flat arguments of a call that the entry serves, the lifted inputs first.
    """
    infos = entry.records.trace.metadata.input_info
    written = [info for info in infos if info.mutates_data or info.mutates_metadata]
    tensors = [(info.name, _input_of(entry, args, info.index)) for info in written]
    return tensors, {info.name for info in infos if info.mutates_metadata}


def _input_of(entry: Entry, args: Sequence[Any], index: int) -> Tensor:
    """Return the caller's tensor of an input of the graph: an argument, or the base of one."""
    position = entry.records.dedupe.kept[index]
    if position < len(args):
        tensor: Tensor = args[position]
        return tensor
    view = next(views[0] for base, *views in entry.records.trace.bases if base == index)
    base = internals.base_of(_input_of(entry, args, view))
    assert base is not None
    return base


def renamed(text: str, names: Sequence[str]) -> str:
    """Replace ``inputs[0]`` and so on in a text by the names of the arguments."""
    return re.sub(
        r"inputs\[(\d+)\]", lambda match: names[int(match[1])] if int(match[1]) < len(names) else match[0], text
    )


def _is_machinery(frame: types.FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in ("aotlab", "torch")


def _stock(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _versions(values: Sequence[Any]) -> list[int]:
    return [internals.version_of(each) for each in values if isinstance(each, Tensor) and not each.is_inference()]


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta and within_its_storage(value)
    )


def dynamo_callable(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call``, which runs a graph, in the form that Dynamo's code calls. Dynamo does not trace into it."""
    return internals.dynamo_disable(call)
