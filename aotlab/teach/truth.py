"""Facts about a call. They are computed from runs of the call on copies, eagerly and compiled by aotlab.

The eager run shows which tensors are written, which share memory, which gradients exist, and whether the call raises.
aotlab's report shows which values are saved, and whether a second call is compiled again. Each fact has a sentence with
the reason, which comes from the observations.
"""

from __future__ import annotations

import linecache
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import aotlab
from aotlab import _torch as torch_internals
from aotlab.errors import UsageError
from aotlab.report.model import Graph
from aotlab.verification.clones import Cloner, argument_tensors, captured_tensors, random_state_restored, restored
from aotlab.verification.observables import Call, flatten

#: Subject → fact, for one question. A subject is the name of a tensor, or ``""`` for the whole call.
Facts = dict[str, "Fact"]
#: The subject for saved values that are not inputs.
COMPUTED = "computed"
#: Ops that change the metadata of a tensor in place, and no values.
_METADATA = re.compile(
    r"aten\.(as_strided|detach|requires_grad|resize|set|(un)?squeeze|swap(axes|dims)|t(ranspose)?)_\."
)
#: The end of the reason that the default partitioner gives for every saved value.
_FOR_ALL = "; this partitioner recomputes nothing"
_LIBRARIES = tuple(str(Path(str(module.__file__)).parent) for module in (torch, aotlab))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """The answer to one question for one subject, and the reason. A subject is a tensor or the whole call.

    For a yes-or-no question, ``value`` is a bool. For the questions `shares` and `same`, it is the set of the names of
    the other tensors.
    """

    value: object
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The true answers to the questions about one call, and the names of its inputs and outputs.

    ``facts`` maps the name of each question to the facts that answer it.
    ``input_facts`` has facts about the inputs, for the questions `shares` and `same`: which inputs share a storage, and
    which inputs are the same tensor.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    facts: Mapping[str, Facts]
    input_facts: Mapping[str, Facts]


class _Before:
    """The state of an input before the call, for comparison with the input after the call."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.value = tensor, tensor.detach().clone()
        self.window, self.places = window(tensor), places(tensor)
        self.storage, self.nbytes = torch_internals.storage_key(tensor), tensor.untyped_storage().nbytes()


class _Writes(torch_internals.TorchDispatchMode):
    """A dispatch mode that records, during the eager run, which lines write, and to which inputs.

    Attributes
    ----------
    lines
        The lines that write values, in order.
    hits
        For each input that is written: the first line that writes to it, and how many of its bytes this line covers.
    beside
        For each input: the first line that writes to its storage, whether or not to the input's own elements.
    turned
        For each input whose metadata is changed in place: the last line that does so.
    """

    def __init__(self, before: Mapping[str, _Before], function: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.before = before
        self.file = getattr(getattr(function, "__code__", None), "co_filename", "")
        self.lines: list[str] = []
        self.hits: dict[str, tuple[str, int]] = {}
        self.beside: dict[str, str] = {}
        self.turned: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        named = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for each in func._schema.arguments:
            target = named.get(each.name)
            if each.alias_info is None or not each.alias_info.is_write or not isinstance(target, torch.Tensor):
                continue
            line = _line(self.file)
            if _METADATA.match(str(func)):
                self.turned |= {name: line for name, was in self.before.items() if was.tensor is target}
            else:
                self._note(line, target)
        return result

    def _note(self, line: str, target: torch.Tensor) -> None:
        self.lines.append(line)
        for name, was in self.before.items():
            if torch_internals.storage_key(target) == was.storage:
                both = [each[: was.nbytes] for each in (places(target), was.places)]
                count = int((both[0] & both[1][: len(both[0])]).sum())
                self.hits |= {name: (line, count)} if count and name not in self.hits else {}
                self.beside.setdefault(name, line)


def eager_truth(function: Callable[..., Any], args: tuple[Any, ...]) -> Truth:
    """Run the call eagerly on copies, then a backward of all results that require grad. Return the facts."""
    with _copies(function) as (target, copies):
        call = copies(args)
        inputs = dict((*call.captured, *call.inputs))
        before = {name: _Before(tensor) for name, tensor in inputs.items()}
        try:
            with _Writes(before, function) as writes:
                result = target(*call.args)
            outputs = {name: leaf for name, leaf in flatten(result, "out")[1] if isinstance(leaf, torch.Tensor)}
            # reading the grad_fn of a view raises if an in-place write made the view's history invalid
            roots = [tensor for tensor in outputs.values() if tensor.requires_grad]
            paths = {name: _path(roots, tensor) for name, tensor in inputs.items() if tensor.requires_grad}
        except Exception as error:  # noqa: BLE001  # an error is a fact
            raised = Fact(value="call", why=f"the call raises {_brief(error)}")
            return Truth(inputs=tuple(inputs), outputs=(), facts={"raises": {"": raised}}, input_facts={})
        facts = {
            "writes": {name: _written(name, was, writes) for name, was in before.items()},
            "metadata": {name: _reshaped(was) for name, was in before.items()},
            "storage": {name: _moved(was) for name, was in before.items()},
            "shares": {name: _shares(name, {**inputs, **outputs}) for name in outputs},
            "same": {name: _same(name, {**inputs, **outputs}) for name in outputs},
        }
        input_facts = {
            "shares": {name: _shares(name, inputs) for name in inputs},
            "same": {name: _same(name, inputs) for name in inputs},
        }
        raised = Fact(value="no", why="neither the call nor the backward raises")
        try:
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        except Exception as error:  # noqa: BLE001  # as above
            raised = Fact(value="backward", why=f"the backward raises {_brief(error)}")
        facts["raises"] = {"": raised}
        if raised.value == "no":
            facts["grad_none"] = {name: _gradient(inputs[name], path) for name, path in paths.items()}
        return Truth(inputs=tuple(inputs), outputs=tuple(outputs), facts=facts, input_facts=input_facts)


def compiled_facts(
    function: Callable[..., Any], args: tuple[Any, ...], again: tuple[Any, ...] | None
) -> dict[str, Facts]:
    """Compile the function for the call, on copies. Return the facts about saved values and recompiles from the report.

    Raises
    ------
    RefusedError
        aotlab does not compile the function.
    UsageError
        Compilation is switched off.
    """
    with _copies(function) as (target, copies), warnings.catch_warnings(), aotlab.config.patch(fallback="error"):
        warnings.simplefilter("ignore")
        first = copies(args)
        names = dict((*first.captured, *first.inputs))
        compiled = aotlab.compile(target, backend="eager")
        with aotlab.Report.record() as recording:
            compiled(*first.args)
            if again is not None:
                compiled(*copies(again).args)
    graphs = [graph for frame in recording.report().frames for graph in frame.graphs]
    if not graphs:
        raise UsageError("all compilation is switched off; aotlab.enable() switches it on")
    facts = {"saved": _saved(graphs[0], names)}
    if again is not None:
        misses = [miss.sentence for graph in graphs[1:] for miss in graph.misses]
        reasons = [each.replace("the compiled entry", "the first graph") for each in misses]
        why = "; ".join(reasons) or "all guards of the first graph hold in the second call, too"
        facts["recompiles"] = {"": Fact(value=len(graphs) > 1, why=why)}
    return facts


def tensors_of(function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
    """Return the tensors of a call by name: first the tensors that the function captures, then the arguments."""
    return dict((*captured_tensors(function), *argument_tensors(function, args, {})))


def window(tensor: torch.Tensor) -> str:
    """Describe the window of a tensor onto its storage. For a wrapper, describe the windows of its parts."""
    if torch_internals.is_wrapper(tensor):
        names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]  # wrappers have it
        parts = {name: getattr(tensor, name) for name in names}
        shown = [f"{name} ({str(each.dtype).removeprefix('torch.')}, {window(each)})" for name, each in parts.items()]
        return f"a {type(tensor).__name__} of {' and '.join(shown)}"
    return f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, offset {tensor.storage_offset()}"


def places(tensor: torch.Tensor) -> npt.NDArray[np.bool_]:
    """Return a mask of the bytes of the storage that the elements of a tensor occupy."""
    size = tensor.element_size()
    marks = np.zeros(tensor.untyped_storage().nbytes(), dtype=bool)
    if tensor.numel():
        strides = (*(step * size for step in tensor.stride()), 1)
        begin = marks[int(tensor.storage_offset()) * size :]
        np.lib.stride_tricks.as_strided(begin, (*tensor.shape, size), strides)[...] = True
    return marks


# --- the facts, one by one -----------------------------------------------------------------------------------------


def _written(name: str, was: _Before, writes: _Writes) -> Fact:
    if name in writes.hits:
        line, count = writes.hits[name]
        size = was.tensor.element_size()
        reached = f"{-(-count // size)} of its {int(was.places.sum()) // size} elements"
        return Fact(value=True, why=f"`{line}` writes to the memory of {reached}")
    same = (window(was.tensor), torch_internals.storage_key(was.tensor)) == (was.window, was.storage)
    if same and not torch.equal(was.tensor.detach().nan_to_num(), was.value.nan_to_num()):
        return Fact(value=True, why="its values differ after the call, although no op of torch wrote to it")
    if name in writes.beside:
        return Fact(value=False, why=f"`{writes.beside[name]}` writes to its storage, but to none of its elements")
    if name in writes.turned and not same:
        return Fact(value=False, why=f"`{writes.turned[name]}` changes its window, and writes no element")
    why = f"`{writes.lines[0]}` writes to another storage" if writes.lines else "nothing is written in place"
    return Fact(value=False, why=why)


def _reshaped(was: _Before) -> Fact:
    now = window(was.tensor)
    if now == was.window:
        return Fact(value=False, why=f"{now}, before and after")
    return Fact(value=True, why=f"{was.window} became {now}")


def _moved(was: _Before) -> Fact:
    if torch_internals.storage_key(was.tensor) != was.storage:
        return Fact(value=True, why="after the call it has another storage")
    now = was.tensor.untyped_storage().nbytes()
    if now != was.nbytes:
        return Fact(value=True, why=f"its storage has {now} bytes in place of {was.nbytes}")
    return Fact(value=False, why=f"the same storage of {now} bytes, before and after")


def _shares(name: str, tensors: Mapping[str, torch.Tensor]) -> Fact:
    keys = {each: torch_internals.storage_key(tensor) for each, tensor in tensors.items()}
    others = [each for each, key in keys.items() if key == keys[name] and each != name]
    if not others:
        return Fact(value=frozenset(), why="it has a storage of its own")
    return Fact(value=frozenset(others), why=f"it shares the storage of {listed(others)}: {window(tensors[name])}")


def _same(name: str, tensors: Mapping[str, torch.Tensor]) -> Fact:
    others = [each for each, tensor in tensors.items() if tensor is tensors[name] and each != name]
    if others:
        return Fact(value=frozenset(others), why=f"{listed([name, *others])} are one tensor, not several")
    shared = _shares(name, tensors)
    return Fact(value=frozenset(), why="it is a new tensor object" + (f"; {shared.why}" if shared.value else ""))


def _gradient(tensor: torch.Tensor, path: list[str] | None) -> Fact:
    if not tensor.is_leaf and not tensor.retains_grad:
        return Fact(value=True, why="it is not a leaf, so its gradient is passed on and not stored")
    if tensor.grad is None:
        return Fact(value=True, why="no path in the autograd graph leads from a result to it")
    steps = " → ".join(path) if path else "itself"
    return Fact(value=False, why=f"a path in the autograd graph leads from a result to it: {steps}")


def _path(roots: Sequence[torch.Tensor], leaf: torch.Tensor) -> list[str] | None:
    """Return the names of the autograd nodes on the shortest path from a result to ``leaf``.

    Return None if there is no such path.
    """
    start = [(root.grad_fn, [root.grad_fn.name()]) for root in roots if root.grad_fn is not None]
    seen, pending = set[Any](), deque[tuple[Any, list[str]]](start)
    while pending:
        node, path = pending.popleft()
        if getattr(node, "variable", None) is leaf or node is leaf.grad_fn:
            return path
        if node not in seen:
            seen.add(node)
            pending += [
                (following, [*path, following.name().rpartition("::")[2]])
                for following, _ in node.next_functions
                if following
            ]
    return None


def _saved(graph: Graph, names: Mapping[str, torch.Tensor]) -> Facts:
    called = {placeholder.name: placeholder.user_name for placeholder in graph.placeholders}
    nothing = (
        "no op of the backward uses it" if graph.training else "nothing requires grad, so that there is no backward"
    )
    facts = {name: Fact(value=False, why=nothing) for name in names}
    computed = [saved for saved in graph.saved if not saved.is_input]
    facts |= {
        called.get(saved.name, saved.name): Fact(value=True, why=saved.reason)
        for saved in graph.saved
        if saved.is_input
    }
    why = "; ".join(re.sub(f"{_FOR_ALL}$", "", saved.reason) for saved in computed)
    why = why or "the backward uses no value that the forward computes"
    facts[COMPUTED] = Fact(value=bool(computed), why=why)
    return facts


# --- helpers ---------------------------------------------------------------------------------------------------------


@contextmanager
def _copies(
    function: Callable[..., Any],
) -> Iterator[tuple[Callable[..., Any], Callable[[tuple[Any, ...]], Call]]]:
    """Provide the function, and a function that copies its arguments. Restore the captured tensors at the end."""
    cloner = Cloner(function)

    def copies(args: tuple[Any, ...]) -> Call:
        for name, tensor in argument_tensors(function, args, {}):
            base = torch_internals.base_of(tensor)
            if base is not None and tensor.requires_grad and not tensor.is_leaf and not base.requires_grad:
                raise UsageError(
                    f"`{name}` is a view of a leaf that is itself a view, and it cannot be copied; "
                    "clone the leaf when you make it, as in `torch.arange(6.0).view(2, 3).clone().requires_grad_()`"
                )
        return cloner.call(args, {})

    restoring = nullcontext() if isinstance(function, nn.Module) else restored(cloner.captured)
    with random_state_restored(), restoring, torch.set_grad_enabled(torch.is_grad_enabled()):
        yield cloner.function, copies


def listed(names: Sequence[str]) -> str:
    """Join names as in a sentence: with commas, and with "and" before the last one."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}" if quoted else "none"


def _line(program: str) -> str:
    """Return the innermost running line that is in the program's file, or in a file outside of the libraries."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == program or not file.startswith(_LIBRARIES):
            return linecache.getline(file, frame.f_lineno).strip() or f"line {frame.f_lineno}"
        frame = frame.f_back
    return "a line"


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
