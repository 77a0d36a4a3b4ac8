"""What a backend is: something that turns one graph into one callable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab._torch import FakeTensorMode
from aotlab.errors import UsageError
from aotlab.ir.graphs import output_args

GraphKind = Literal["forward", "backward", "inference"]
Compiler = Callable[[fx.GraphModule, Sequence[Tensor]], Callable[..., Any]]
Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """A kernel that a compiler wrote, or calls (``extern``), for ``nodes`` of ``graph``; its text or the call.

    ``measures`` are numbers of what became of it, by the names that they have in a report.
    """

    name: str
    language: Literal["triton", "c++", "python", "extern"]
    source: str
    graph: str = ""
    nodes: tuple[str, ...] = ()
    measures: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """One graph to compile.

    ``static_inputs`` are the inputs whose addresses will not change; of the first ``visible_outputs`` outputs the
    strides must be kept; the graphs of one entry share ``graph_id`` and ``shared``, for the backend's own use.
    """

    module: fx.GraphModule
    example_inputs: tuple[Tensor, ...]
    kind: GraphKind
    fake_mode: FakeTensorMode
    static_inputs: tuple[int, ...]
    visible_outputs: int
    graph_id: int
    shared: dict[str, Any]


class Backend:
    """Base of all backends; on its own it is abstract."""

    name = "backend"
    #: Whether a compiled graph that writes inputs does so behind everything in it that may raise.
    writes_last = False
    #: Whether compiled graphs compute bit for bit what eager does, so that the order of sums matters.
    exact = False
    #: Whether a backward is compiled when it is first run, where nobody watches: it takes no time to speak of.
    lazy_backward = False
    #: Whether compiled graphs can be run on fake tensors.
    takes_fakes = True

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """Return the ops that the trace shall replace, with their replacements."""
        return {}

    def needs_states(self, module: fx.GraphModule | None) -> bool:
        """Tell whether random ops have to take states of generators: in any case, or in a graph that was traced."""
        return False

    def takes(self, module: fx.GraphModule) -> bool:
        """Tell whether it can compile a graph for all values of the numbers in it."""
        return True

    def prepare(self, module: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
        """Rewrite the joint graph of a training call in place, before it is partitioned."""

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Compile one graph: the result takes its inputs one by one or, if ``_boxed_call``, in a list to empty."""
        raise NotImplementedError(f"{type(self).__name__} has no compile()")

    def kernels(self, compiled: Any) -> tuple[KernelSource, ...]:
        """Return the kernels of something that `compile` returned."""
        return ()

    def source(self, compiled: Any) -> str | None:
        """Return the code that the compiler wrote around the kernels."""
        return None


class EagerBackend(Backend):
    """Run the fx graph op by op: slow and exact; semantics are tested on it."""

    name = "eager"
    writes_last = True
    exact = True
    lazy_backward = True

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Return the graph's own Python, boxed: each input dies when it was used last."""
        return internals.boxed_forward_of(request.module)


class CallableBackend(Backend):
    """A backend from up to three compilers of upstream's form ``(graph_module, example_inputs) -> callable``."""

    def __init__(
        self,
        forward: Compiler,
        backward: Compiler | None = None,
        inference: Compiler | None = None,
        decompositions: dict[Any, Callable[..., Any]] | None = None,
    ) -> None:
        for compiler in (forward, *(given for given in (backward, inference) if given is not None)):
            if not callable(compiler):
                raise UsageError(f"a compiler has to be a function (graph_module, example_inputs), not {compiler!r}")
        self._compilers: dict[GraphKind, Compiler] = {
            "forward": forward,
            "backward": backward or forward,
            "inference": inference or forward,
        }
        self._decompositions = decompositions or {}
        self.name = str(getattr(forward, "__name__", type(forward).__name__))

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """Return the decompositions it was made with."""
        return self._decompositions

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Call the compiler for this kind of graph."""
        module, compiler = request.module, self._compilers[request.kind]
        internals.write_at_once(module)
        expected = tuple(isinstance(node, fx.Node) for node in output_args(module.graph))  # the others are None
        compiled = compiler(module, list(request.example_inputs))
        name = str(getattr(compiler, "__name__", type(compiler).__name__))
        if not callable(compiled):
            raise UsageError(
                f"the compiler `{name}` returned {_described(compiled)} for the {request.kind} graph; it has to return "
                "a function of the graph's inputs, or of one list of them that is marked with `_boxed_call = True`"
            )
        if compiled is module:
            return compiled  # nothing can be wrong with it
        return _checked(boxed(compiled), expected, f"the {request.kind} that the compiler `{name}` returned")


def _described(value: object) -> str:
    return "None" if value is None else f"a `{type(value).__qualname__}`"


def _checked(compiled: Boxed, expected: tuple[bool, ...], what: str) -> Boxed:
    """Let a compiled graph return what it is to return, or say what it returned."""
    count = len(expected)
    looked = False

    def call(inputs: list[Any]) -> Sequence[Any]:
        nonlocal looked
        outputs = compiled(inputs)
        if type(outputs) not in (tuple, list) or len(outputs) != count:
            seen = f"{len(outputs)} outputs" if isinstance(outputs, (tuple, list)) else _described(outputs)
            raise UsageError(f"{what} returned {seen}; the graph has {count} outputs, in a tuple or list")
        for i, output in enumerate(() if looked else outputs):
            if expected[i] and not isinstance(output, Tensor):
                raise UsageError(f"{what} returned {_described(output)} as output {i}, where the graph has a tensor")
        looked = True
        return outputs

    call._boxed_call = True  # type: ignore[attr-defined]  # the mark that upstream's users look for
    return call


def boxed(compiled: Callable[..., Any]) -> Boxed:
    """Give ``compiled`` the boxed calling convention: one list of inputs, which it may empty."""
    if getattr(compiled, "_boxed_call", False):
        return compiled
    if isinstance(compiled, fx.GraphModule):
        return internals.boxed_forward_of(compiled)

    def call(inputs: list[Any]) -> Sequence[Any]:
        return compiled(*inputs)  # type: ignore[no-any-return]  # compilers are typed loosely

    call._boxed_call = True  # type: ignore[attr-defined]  # the mark that upstream's users look for
    return call
