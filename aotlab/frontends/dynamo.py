"""The Dynamo frontend: ``torch.compile(backend="aotlab")``.

Dynamo turns Python into graphs, one for each stretch between graph breaks, and hands each to our `backend`. What the
backend gives back carries guards of its own and traces from Dynamo's graph again when they fail: Dynamo does not come
back when inputs begin to share memory. A graph that cannot be compiled faithfully runs eagerly, with one warning.
"""

from __future__ import annotations

import functools
import re
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab import observe
from aotlab.backends import Backend, resolve
from aotlab.cache import CompiledFunction, next_number
from aotlab.capture import nesting
from aotlab.capture.call import ArgumentKind, Target
from aotlab.capture.varying import NUMBER, Varying
from aotlab.errors import GraphInvariantError, UsageError, UserLine
from aotlab.frontends.direct import FunctionTarget
from aotlab.frontends.graph_run import GraphRun, needs_care
from aotlab.guards.reached import Reached
from aotlab.partition.default import default_partition
from aotlab.subclasses import Options, function_for

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.*)')
_TORCH = str(Path(torch.__file__).parent)


def frames_of_stack(text: str | None) -> list[UserLine]:
    """Read the stack trace that Dynamo keeps with a node, outermost frame first."""
    return [
        UserLine(file=each["file"], line=int(each["line"]), function=each["function"], code=each["code"].strip())
        for each in _FRAME.finditer(text or "")
    ]


def line_of_stack(text: str | None) -> UserLine | None:
    """Read the innermost frame off the stack trace that Dynamo keeps with a node."""
    return next(reversed(frames_of_stack(text)), None)


class GraphTarget(Target):
    """A graph that Dynamo captured; it takes flat arguments and returns a flat tuple."""

    frontend = "dynamo"

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.function = graph.forward
        lines = [line_of_stack(n.meta.get("stack_trace")) for n in graph.graph.nodes if n.op == "call_function"]
        self.line = next((line for line in lines if line is not None), None)
        inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
        values = [n.meta.get("example_value") for n in inputs]
        #: The placeholders that are sizes of others, by position: of which one, and in which dimension.
        self.sizes = internals.sizes_of_others(values)
        #: Those that are floats, which Dynamo hands over as tensors.
        self.floats = {n for n, node in enumerate(inputs) if _take_float(graph, node)}
        self._names = [_source_name(n) for n in self.without_sizes(inputs)]
        module = _called_by_torch(graph) if self.line is None else None
        if module is not None:
            self._names = [name.removeprefix("fn.") for name in self._names]
        elif self.line is None:
            self.line = _first_line(graph)
        self.name = self.line.function if self.line is not None else "graph" if module is None else module.__name__
        attributes = dict(graph.named_parameters()) | dict(graph.named_buffers())
        self._attributes = list(attributes)
        #: What Dynamo lets vary, by flat argument; of a wrapper by its parts, behind which stands what else is assumed.
        self.varying: Varying = {}
        kept = [(n, values[n]) for n in self.without_sizes([*range(len(inputs))])]
        parts = [(n, part) for n, x in kept for part in (*internals.parts_of(x), *[None] * internals.is_wrapper(x))]
        for position, (n, part) in enumerate(parts, len(attributes)):
            is_number = n in self.floats or isinstance(part, torch.SymInt | torch.SymFloat)
            dims = {NUMBER} if is_number else internals.symbolic_dims(part)
            self.varying |= {position: dims} if dims else {}
        self._has_fakes = True
        self._forward: Callable[..., Any] | None = None
        self._needs_care = needs_care(graph.graph)

    def lifted(self) -> Sequence[Tensor]:
        """Return the tensors that the graph itself holds, if Dynamo left any there."""
        held = dict(self.graph.named_parameters()) | dict(self.graph.named_buffers())
        return [held[name] for name in self._attributes]

    def lifted_names(self) -> Sequence[tuple[str, ArgumentKind]]:
        """Name them."""
        return [(name, "parameter") for name in self._attributes]

    def reached(self) -> tuple[Reached, ...]:
        """Return nothing: Dynamo's own guards stand before the graph."""
        self._forget_fakes()
        return ()

    def _forget_fakes(self) -> None:
        """Drop what Dynamo noted of the caller's tensors: it is done with the graph when that is first called.

        The notes hold weak references to the tensors, which `torch.utils.swap_tensors` then refuses.
        """
        if not self._has_fakes:
            return
        self._has_fakes = False
        for module in self.graph.modules():
            if isinstance(module, fx.GraphModule):
                for node in module.graph.nodes:
                    for key in ("example_value", "grapharg"):
                        value = node.meta.pop(key, None)
                        if isinstance(value, internals.FakeTensor):
                            internals.forget_tensors(value.fake_mode)

    def run(self, lifted: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph node by node."""
        replaced = dict(zip(self._attributes, lifted, strict=True))
        with internals.reparametrize_module(self.graph, replaced) if replaced else nullcontext():
            return GraphRun(self.graph, line_of_stack).run(*self.with_sizes(args))

    def handed_on(self, args: Sequence[Any]) -> list[Any]:
        """Turn what Dynamo hands over into what the function takes."""
        return self.without_sizes([arg.item() if n in self.floats else arg for n, arg in enumerate(args)])

    def without_sizes(self, args: Sequence[Any]) -> list[Any]:
        """Leave out of what Dynamo hands over the sizes of tensors that it hands over as well."""
        return [value for n, value in enumerate(args) if n not in self.sizes]

    def with_sizes(self, args: Sequence[Any]) -> list[Any]:
        """Put them in again."""
        full = list(args)
        for n in sorted(self.sizes):
            full.insert(n, None)
        for n, (position, dim) in self.sizes.items():
            full[n] = full[position].shape[dim]
        return full

    def eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph as Dynamo wrote it."""
        args = tuple(self.with_sizes(args))
        if self._needs_care:
            return GraphRun(self.graph).run(*args)
        if self._forward is None:
            _ = self.graph.code  # else `forward` may not be written yet, and would go through `__call__`,
            self._forward = self.graph.forward  # which prints a page about each error, or fails at it with another one
        return self._forward(*args)

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Name arguments by what they are in the user's program; compiled autograd passes a list of tensors."""
        return nesting.paths([*zip(self._names, args, strict=True)])


def _take_float(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Let a placeholder be the float that Dynamo hands over as a tensor, and then takes out of it by `item`."""
    users = list(node.users)
    if not getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False) or any(u.target != "item" for u in users):
        return False
    for user in users:
        user.replace_all_uses_with(node)
        graph.graph.erase_node(user)
    graph.recompile()
    return True


def _first_line(graph: fx.GraphModule) -> UserLine | None:
    """Return the first line of the user's in a graph that calls methods only."""
    frames = (frame for node in graph.graph.nodes for frame in reversed(frames_of_stack(node.meta.get("stack_trace"))))
    return next((frame for frame in frames if not frame.file.startswith(_TORCH)), None)


def _source_name(node: fx.Node) -> str:
    """Turn Dynamo's name of a placeholder into that of the user's variable."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is not None:
        name = str(source.name() if callable(source.name) else source.name)
        if found := re.fullmatch(r"[LG]\['(\w+)'\](.*)", name):
            name = re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", found[1] + found[2])
            return re.sub(r"getattr\((\w+), '(\w+)'\)", r"\1.\2", name)
    return node.name


def _called_by_torch(graph: fx.GraphModule) -> type[torch.nn.Module] | None:
    """Return the type of the module of torch's that was compiled itself, which has no line of the user's."""
    stacks = (node.meta.get("nn_module_stack") for node in graph.graph.nodes if node.op == "call_function")
    path, kind = next((next(iter(stack.values())) for stack in stacks if stack), ("", None))
    return kind if path == "L['fn']" and isinstance(kind, type) else None


_began: list[tuple[int, int]] = []


def watch_captures() -> None:
    """Announce from now on, or from now on again, how long each capture by Dynamo takes, and where it broke off."""
    internals.hear_dynamo(_capture_begins, _capture_ends)


def _capture_begins(_event: Any) -> None:
    _began.append((time.perf_counter_ns(), len(internals.dynamo_breaks())))


def _capture_ends(_event: Any) -> None:
    if _began:
        began, breaks = _began.pop()
        observe.emit(observe.Spent(kind="dynamo", duration_ns=time.perf_counter_ns() - began))
        for each in internals.dynamo_breaks()[breaks:] if observe.listening() else ():
            observe.emit(observe.GraphBreak(stack=tuple(each.user_stack), reason=str(each.reason)))


@functools.cache
def prepare_dynamo() -> None:
    """Put into Dynamo, when it is first used with aotlab behind it, what keeps its captures to eager's meaning."""
    watch_captures()
    internals.let_dynamo_follow_eager(lambda found: found is backend or getattr(found, "is_aotlabs", False) is True)


def backend(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **unknown: Any
) -> Callable[..., Any]:
    """Compile a graph, as Dynamo gives it, for ``torch.compile(backend="aotlab")``; tracing waits for the first call.

    ``options`` are ``torch.compile``'s: ``"compiler"`` (``"inductor"``, ``"eager"`` or a function) and
    ``"partitioner"``. Raises `UsageError` for others, and for a ``mode``.

    Examples
    --------
    >>> import torch
    >>> @torch.compile(backend="aotlab", options={"compiler": "eager"})
    ... def f(x):
    ...     return x.add_(1)
    >>> f(torch.zeros(2))
    tensor([1., 1.])
    """
    prepare_dynamo()
    watch_captures()
    settings = dict(options or {})
    compiler = resolve(settings.pop("compiler", "inductor"))
    partitioner = settings.pop("partitioner", default_partition)
    if settings or unknown:
        wrong = ", ".join(map(repr, (*settings, *unknown)))
        raise UsageError(f"backend 'aotlab' does not know {wrong}; its options are 'compiler' and 'partitioner'")
    target = GraphTarget(graph)
    compiled = compile_graph(target, compiler, partitioner)
    call = internals.dynamo_disable(
        (lambda *args: compiled(*target.handed_on(args))) if target.sizes or target.floats else compiled.__call__
    )
    call.compiled = compiled  # type: ignore[attr-defined]  # for those who look behind it
    return call


#: The number of the function for each code that Dynamo captured, and what was made of each capture, by its name.
_numbers: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()
_captures: weakref.WeakValueDictionary[str, CompiledFunction] = weakref.WeakValueDictionary()


def compile_graph(
    target: GraphTarget, compiler: Backend, partitioner: Any, *, number: int | None = None, **settings: Any
) -> CompiledFunction:
    """Make the function that serves the calls of a graph from Dynamo; ``settings`` are those of `CompiledFunction`."""
    code, scope, failed = internals.dynamo_failed_guards() if observe.listening() else (None, {}, [])
    if number is None and code is not None:
        number = _numbers.setdefault(code, next_number())
    if number is not None and code is not None and failed:
        entries = [(_captures[name].entries if name in _captures else ())[:1] for name, _ in failed]
        guards = [(next((e.number for e in each), None), text) for each, (_, text) in zip(entries, failed, strict=True)]
        file = code.co_filename
        observe.emit(observe.CapturedAgain(function_id=number, file=file, failed=tuple(guards), scope=scope))
    made = Options(backend=compiler, partitioner=partitioner, keep_inference_input_mutations=True, dynamic=None)
    function = function_for(target, made, number=number, varying=target.varying, **settings)
    _captures[internals.dynamo_compile_id()[1]] = function
    return function


def compile_by_dynamo(
    function: Callable[..., Any], *, compiler: Any, partitioner: Any, dynamic: bool | None, fullgraph: bool = False
) -> Callable[..., Any]:
    """Compile ``function`` by `torch.compile` with our backend behind it."""
    prepare_dynamo()
    options = {"compiler": compiler, "partitioner": partitioner}
    made = torch.compile(function, backend=partial(backend, options=options), dynamic=dynamic, fullgraph=fullgraph)
    return _outside_of_transforms(function, made, backend_name=resolve(compiler).name)


# --- calls under a transform of ``torch.func``: Dynamo refuses those, and leaves that code alone from then on ---------


class _AsWritten(FunctionTarget):
    frontend = "dynamo"


def _not_compiled(*_args: object, **_kwargs: object) -> NoReturn:
    raise GraphInvariantError("a call under no transform came where only those under transforms go")


class ModuleBehindDynamo:
    """A module behind Dynamo: ``compiled`` is what `torch.compile` made of it, ``eagerly`` serves transforms."""

    def __init__(self, compiled: Callable[..., Any], eagerly: CompiledFunction) -> None:
        self.compiled, self.eagerly = compiled, eagerly
        self.__wrapped__ = eagerly.__wrapped__  # which says, as `CompiledFunction` does, what is compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it compiled, but under a transform."""
        if not torch.compiler.is_dynamo_compiling() and internals.under_transform():
            return self.eagerly(*args, **kwargs)
        return self.compiled(*args, **kwargs)


def _outside_of_transforms(
    original: Callable[..., Any], compiled: Callable[..., Any], *, backend_name: str
) -> Callable[..., Any]:
    """Return ``compiled``, made of ``original`` by Dynamo, for calls under no transform; the others run eagerly."""
    eagerly = CompiledFunction(_AsWritten(original), _not_compiled, backend_name=backend_name)
    if isinstance(original, torch.nn.Module):
        return ModuleBehindDynamo(compiled, eagerly)
    if not isinstance(compiled, FunctionType):
        return compiled  # of a class torch.compile changes the calls of its objects, and returns the class

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (eagerly if internals.under_transform() else compiled)(*args, **kwargs)

    return internals.as_made_by_dynamo(call)
