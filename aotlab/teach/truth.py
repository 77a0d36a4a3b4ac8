"""What is true of a call: computed by making it, on copies, by eager and by aotlab; nothing is looked up.

Eager tells what is written, what shares memory, which gradients there are and what raises; aotlab's report tells what
is saved and what is compiled anew. Each fact comes with one sentence of why, made of what was observed.
"""

from __future__ import annotations

import linecache
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aotlab
from aotlab import _torch as torch_internals
from aotlab.errors import UsageError
from aotlab.report.model import Graph
from aotlab.verification.clones import Cloner, argument_tensors, random_state_restored, restored
from aotlab.verification.observables import Call, flatten

#: Subject → fact, for one question.
Facts = dict[str, "Fact"]
#: A tensor of more elements than this is taken to reach all bytes between its first and its last one.
_MANY = 10_000
#: The subject of what is saved and no input.
COMPUTED = "computed"
#: Ops that change in place what a tensor is, and no values.
_METADATA = re.compile(
    r"aten\.(as_strided|detach|requires_grad|resize|set|(un)?squeeze|swap(axes|dims)|t(ranspose)?)_\."
)
_LIBRARIES = tuple(str(Path(str(module.__file__)).parent) for module in (torch, aotlab))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What is true of one subject, and why."""

    value: object
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """A write of eager's: the user's line, and the bytes of the storage that were written."""

    code: str
    storage: int
    places: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The facts of one call by question, and the names of the tensors that went in and came out."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    facts: Mapping[str, Facts]
    failure: str = ""


@dataclass
class _Before:
    """What a tensor was like before the call."""

    tensor: torch.Tensor
    window: str = field(init=False)
    storage: int = field(init=False)
    nbytes: int = field(init=False)
    places: frozenset[int] = field(init=False)
    value: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.window, self.storage = window(self.tensor), torch_internals.storage_key(self.tensor)
        self.nbytes = self.tensor.untyped_storage().nbytes()
        self.places, self.value = places(self.tensor), self.tensor.detach().clone()


class _Writes(torch_internals.TorchDispatchMode):
    """Notes what is written, op by op, while eager runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.seen: list[Write] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        named = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
        result = func(*args, **kwargs)
        for argument in func._schema.arguments:
            target = named.get(argument.name)
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(target, torch.Tensor) and not _only_metadata(func):
                self.seen.append(
                    Write(code=_line(), storage=torch_internals.storage_key(target), places=places(target))
                )
        return result


def eager_truth(function: Callable[..., Any], args: tuple[Any, ...]) -> Truth:
    """Make the call eagerly, on copies, and a backward of all results that require grad."""
    with _copies(function) as (target, copies):
        call = copies(args)
        known = dict((*call.captured, *call.inputs))
        before = {name: _Before(tensor) for name, tensor in known.items()}
        try:
            with _Writes() as writes:
                result = target(*call.args)
            outputs = {name: leaf for name, leaf in flatten(result, "out")[1] if isinstance(leaf, torch.Tensor)}
            # a view whose history an in-place write made invalid raises at the first look
            roots = [tensor for tensor in outputs.values() if tensor.requires_grad]
            paths = {name: _path(roots, tensor) for name, tensor in known.items() if tensor.requires_grad}
        except Exception as error:  # noqa: BLE001  # what it raises is a fact
            raised = Fact(value="call", why=f"the call raises {_brief(error)}")
            return Truth(inputs=tuple(known), outputs=(), facts={"raises": {"": raised}}, failure=raised.why)
        facts = {
            "writes": {name: _written(was, writes.seen) for name, was in before.items()},
            "metadata": {name: _reshaped(was) for name, was in before.items()},
            "storage": {name: _moved(was) for name, was in before.items()},
            "shares": {name: _shares(name, tensor, known, outputs) for name, tensor in outputs.items()},
            "same": {name: _same(name, tensor, known, outputs) for name, tensor in outputs.items()},
        }
        raised = Fact(value="no", why="neither the call nor the backward raises")
        try:
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        except Exception as error:  # noqa: BLE001  # as above
            raised = Fact(value="backward", why=f"the backward raises {_brief(error)}")
        facts["raises"] = {"": raised}
        if raised.value == "no":
            facts["grad_none"] = {name: _gradient(known[name], path) for name, path in paths.items()}
        return Truth(inputs=tuple(known), outputs=tuple(outputs), facts=facts)


def compiled_facts(
    function: Callable[..., Any], args: tuple[Any, ...], again: tuple[Any, ...] | None
) -> dict[str, Facts]:
    """Compile the function for the call, on copies, and say what the report says is saved, and compiled anew.

    Raises
    ------
    RefusedError
        aotlab does not compile it.
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
    facts = {"saved": _saved(graphs[0], names)}
    if again is not None:
        reasons = [miss.sentence for graph in graphs[1:] for miss in graph.misses]
        why = "; ".join(reasons) or "all that the first graph assumes holds in the second call, too"
        facts["recompiles"] = {"": Fact(value=len(graphs) > 1, why=why)}
    return facts


def window(tensor: torch.Tensor) -> str:
    """Say where in its storage a tensor lies."""
    return f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, offset {tensor.storage_offset()}"


def places(tensor: torch.Tensor) -> frozenset[int]:
    """Return the bytes of its storage that a tensor's elements take."""
    size, first = tensor.element_size(), tensor.storage_offset()
    if not tensor.numel():
        return frozenset()
    last = first + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    elements: Sequence[int] = range(first, last + 1)
    if tensor.numel() <= _MANY:
        steps = [torch.arange(n) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)]
        grid = torch.tensor(first)
        for step in steps:
            grid = grid.unsqueeze(-1) + step
        elements = grid.flatten().tolist()
    return frozenset(element * size + byte for element in elements for byte in range(size))


# --- the facts, one by one -----------------------------------------------------------------------------------------


def _written(was: _Before, writes: Sequence[Write]) -> Fact:
    hits = [(write, len(write.places & was.places)) for write in writes if write.storage == was.storage]
    hit = next(((write, count) for write, count in hits if count), None)
    if hit is not None:
        size = was.tensor.element_size()
        reached = f"{-(-hit[1] // size)} of its {len(was.places) // size} elements"
        return Fact(value=True, why=f"`{hit[0].code}` writes to the memory of {reached}")
    same = (window(was.tensor), torch_internals.storage_key(was.tensor)) == (was.window, was.storage)
    if same and not _equal(was.tensor, was.value):
        return Fact(value=True, why="its values differ after the call, although no op of torch's wrote to them")
    if hits:
        return Fact(value=False, why=f"`{hits[0][0].code}` writes to its storage, but to none of its elements")
    if writes:
        return Fact(value=False, why=f"`{writes[0].code}` writes to another storage")
    return Fact(value=False, why="nothing is written in place")


def _reshaped(was: _Before) -> Fact:
    now = window(was.tensor)
    if now == was.window:
        return Fact(value=False, why=f"{now}, before and after")
    return Fact(value=True, why=f"{was.window} became {now}")


def _moved(was: _Before) -> Fact:
    if torch_internals.storage_key(was.tensor) != was.storage:
        return Fact(value=True, why="after the call it lies in another storage")
    now = was.tensor.untyped_storage().nbytes()
    if now != was.nbytes:
        return Fact(value=True, why=f"its storage has {now} bytes in place of {was.nbytes}")
    return Fact(value=False, why=f"the same storage of {now} bytes, before and after")


def _shares(
    name: str, tensor: torch.Tensor, known: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
) -> Fact:
    key = torch_internals.storage_key(tensor)
    others = [other for other in (*known, *outputs) if other != name]
    found = [other for other in others if torch_internals.storage_key({**known, **outputs}[other]) == key]
    if not found:
        return Fact(value=frozenset(), why="it has a storage of its own")
    return Fact(
        value=frozenset(found),
        why=f"it lies in the storage of {listed(found)}: {window(tensor)}",
    )


def _same(
    name: str, tensor: torch.Tensor, known: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
) -> Fact:
    earlier = list(outputs)[: list(outputs).index(name)]
    everything = {**outputs, **known}
    found = next((other for other in (*known, *earlier) if everything[other] is tensor), None)
    if found is not None:
        return Fact(value=found, why=f"it is the very tensor `{found}`, not a new one")
    shared = _shares(name, tensor, known, outputs)
    return Fact(value=None, why="it is a new tensor object" + (f"; {shared.why}" if shared.value else ""))


def _gradient(tensor: torch.Tensor, path: list[str] | None) -> Fact:
    if not tensor.is_leaf and not tensor.retains_grad:
        return Fact(value=True, why="it is no leaf: the gradient that arrives is passed on and not kept")
    if tensor.grad is None:
        return Fact(value=True, why="no path of autograd leads from a result to it")
    steps = " → ".join(path) if path else "itself"
    return Fact(value=False, why=f"autograd leads from a result to it: {steps}")


def _path(roots: Sequence[torch.Tensor], leaf: torch.Tensor) -> list[str] | None:
    """Name the autograd nodes on the shortest way from a result to ``leaf``."""
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
    why = "; ".join(saved.reason for saved in computed) or "the backward uses no value that the forward computes"
    facts[COMPUTED] = Fact(value=bool(computed), why=why)
    return facts


# --- helpers ---------------------------------------------------------------------------------------------------------


@contextmanager
def _copies(
    function: Callable[..., Any],
) -> Iterator[tuple[Callable[..., Any], Callable[[tuple[Any, ...]], Call]]]:
    """Give the function, and what copies arguments for it; what it reaches is put back as it was."""
    cloner = Cloner(function)

    def copies(args: tuple[Any, ...]) -> Call:
        for name, tensor in argument_tensors(function, args, {}):
            base = torch_internals.base_of(tensor)
            if base is not None and tensor.requires_grad and not tensor.is_leaf and not base.requires_grad:
                raise UsageError(
                    f"`{name}` is a view of a leaf that is itself a view, of which no copy is like it; "
                    "clone the leaf when you make it, as in `torch.arange(6.0).view(2, 3).clone().requires_grad_()`"
                )
        return cloner.call(args, {})

    kept = nullcontext() if isinstance(function, nn.Module) else restored(cloner.captured)
    with random_state_restored(), kept, torch.set_grad_enabled(torch.is_grad_enabled()):
        yield cloner.function, copies


def listed(names: Sequence[str]) -> str:
    """Join names as a sentence does."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}" if quoted else "none"


def _only_metadata(func: Any) -> bool:
    """Whether an op in place changes sizes, strides or the storage, and no values."""
    return _METADATA.match(str(func)) is not None


def _line() -> str:
    """Return the innermost line of the running program that belongs to no library."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            return linecache.getline(file, frame.f_lineno).strip() or f"line {frame.f_lineno}"
        frame = frame.f_back
    return "a line"


def _equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one.detach()), torch.nan_to_num(two))


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
