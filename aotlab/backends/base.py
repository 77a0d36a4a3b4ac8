"""The interface of backends: a backend turns one graph into one callable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab._torch import FakeTensorMode
from aotlab.errors import UsageError
from aotlab.ir.fx_graphs import output_args

GraphKind = Literal["forward", "backward", "inference"]
Compiler = Callable[[fx.GraphModule, Sequence[Tensor]], Callable[..., Any]]
Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSource:
    """A kernel that a compiler generated, or the call of a library kernel (then ``language`` is ``extern``).

    ``source`` is the text of the kernel or of the call. ``graph`` is the name of the compiled graph, and ``nodes`` are
    the names of its nodes that the kernel computes. ``from_cache`` says whether the compiler took the kernel's graph
    from its cache on disk; if it uses a cache and did not, ``cache_miss`` says why. ``measures`` are numbers about the
    compiled kernel (its registers, for example), each with the name that a report shows.
    """

    name: str
    language: Literal["triton", "c++", "python", "extern"]
    source: str
    graph: str = ""
    nodes: tuple[str, ...] = ()
    from_cache: bool = False
    cache_miss: str = ""
    measures: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileRequest:
    """One graph to compile.

    ``static_inputs`` are the positions of inputs whose addresses do not change between calls. The caller can see the
    first ``visible_outputs`` outputs, so they must have the strides that were traced. All graphs of one compiled entry
    have the same ``graph_id`` and the same dict ``shared``, in which the backend may store data.
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
    """Abstract base class of all backends."""

    name = "backend"
    #: Whether a compiled graph that writes inputs does so after all of its operations that may raise.
    writes_last = False
    #: Whether results of compiled graphs equal eager's bit for bit. Then autograd must sum gradients in eager's order.
    exact = False
    #: Whether random ops must draw eager's numbers.
    exact_draws = True
    #: Whether to compile a backward only when it runs for the first time. This is for backends that compile fast. If
    #: somebody listens to the events of `aotlab.events`, the backward is compiled together with the forward.
    lazy_backward = False
    #: Whether compiled graphs accept fake tensors as inputs.
    takes_fakes = True

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """Return a table that maps ops to their decompositions, which the trace records in place of the ops."""
        return {}

    def needs_states(self, module: fx.GraphModule | None) -> bool:
        """Tell whether the random ops of a graph must take the states of generators as inputs.

        ``module`` is a traced graph. If it is None, tell whether this is so for all graphs of this backend.
        """
        return False

    def takes(self, module: fx.GraphModule) -> bool:
        """Tell whether the backend can compile a graph for all values of the symbolic sizes and floats in it."""
        return True

    def prepare(self, module: fx.GraphModule, fake_mode: FakeTensorMode) -> None:
        """Rewrite the joint graph of a training call in place, before it is partitioned."""

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Compile one graph.

        The result takes the inputs of the graph one by one. If it has the attribute ``_boxed_call = True``, it takes
        one list of them and may empty it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no compile()")

    def kernels(self, compiled: Any) -> tuple[KernelSource, ...]:
        """Return the kernels of a callable that `compile` returned."""
        return ()

    def source(self, compiled: Any) -> str | None:
        """Return the code that the compiler generated around the kernels, or None."""
        return None


class EagerBackend(Backend):
    """Runs the fx graph op by op. It is slow and exact; tests of semantics use it."""

    name = "eager"
    writes_last = True
    exact = True
    lazy_backward = True

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Return the graph's generated Python code as a boxed callable, which frees each input after its last use."""
        return internals.boxed_forward_of(request.module)


class CallableBackend(Backend):
    """A backend of one to three compiler functions with upstream's signature.

    The signature is ``(graph_module, example_inputs) -> callable``.
    """

    def __init__(
        self,
        forward: Compiler,
        backward: Compiler | None = None,
        inference: Compiler | None = None,
        decompositions: dict[Any, Callable[..., Any]] | None = None,
    ) -> None:
        for compiler in (forward, *(function for function in (backward, inference) if function is not None)):
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
        """Return the decompositions that were passed to the constructor."""
        return self._decompositions

    def compile(self, request: CompileRequest) -> Callable[..., Any]:
        """Call the compiler for this kind of graph."""
        module, compiler = request.module, self._compilers[request.kind]
        internals.write_at_once(module)
        # whether each output is a tensor; a gradient that does not exist is None
        expected = tuple(isinstance(node, fx.Node) for node in output_args(module.graph))
        compiled = compiler(module, list(request.example_inputs))
        name = str(getattr(compiler, "__name__", type(compiler).__name__))
        if not callable(compiled):
            raise UsageError(
                f"the compiler `{name}` returned {_described(compiled)} for the {request.kind} graph; it has to return "
                "a function of the graph's inputs, or of one list of them that is marked with `_boxed_call = True`"
            )
        if compiled is module:
            return compiled  # the graph itself needs no check
        return _checked(boxed(compiled), expected, f"the {request.kind} that the compiler `{name}` returned")


def _described(value: object) -> str:
    return "None" if value is None else f"a `{type(value).__qualname__}`"


def _checked(compiled: Boxed, expected: tuple[bool, ...], graph_name: str) -> Boxed:
    """Wrap a compiled graph so that it raises `UsageError` if its outputs do not match the outputs of the fx graph.

    ``expected`` says for each output whether it is a tensor. ``graph_name`` is the name of the graph in messages.
    """
    count = len(expected)
    types_checked = False

    def call(inputs: list[Any]) -> Sequence[Any]:
        nonlocal types_checked
        outputs = compiled(inputs)
        if type(outputs) not in (tuple, list) or len(outputs) != count:
            returned = f"{len(outputs)} outputs" if isinstance(outputs, (tuple, list)) else _described(outputs)
            raise UsageError(f"{graph_name} returned {returned}; the graph has {count} outputs, in a tuple or list")
        for i, output in enumerate(() if types_checked else outputs):
            if expected[i] and not isinstance(output, Tensor):
                raise UsageError(
                    f"{graph_name} returned {_described(output)} as output {i}, where the graph has a tensor"
                )
        types_checked = True
        return outputs

    call._boxed_call = True  # type: ignore[attr-defined]  # the mark that upstream's users look for
    return call


def boxed(compiled: Callable[..., Any]) -> Boxed:
    """Return ``compiled`` with the boxed calling convention: it takes one list of inputs, which it may empty."""
    if getattr(compiled, "_boxed_call", False):
        return compiled
    if isinstance(compiled, fx.GraphModule):
        return internals.boxed_forward_of(compiled)

    def call(inputs: list[Any]) -> Sequence[Any]:
        return compiled(*inputs)  # type: ignore[no-any-return]  # compilers are typed loosely

    call._boxed_call = True  # type: ignore[attr-defined]  # the mark that upstream's users look for
    return call
