"""The Dynamo frontend: ``torch.compile(backend="aotlab")``.

Dynamo turns Python code into graphs, one for each part between graph breaks, and passes each graph to our `backend`.
The callable that `backend` returns has its own guards besides Dynamo's, because Dynamo does not notice, for example,
that inputs begin to share memory. If these guards fail, the callable traces Dynamo's graph again. A graph that cannot
be compiled faithfully runs eagerly, with one warning.
"""

from __future__ import annotations

import functools
import re
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import dropwhile
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from aotlab import _torch as internals
from aotlab import events
from aotlab.backends import Backend, resolve
from aotlab.cache import CompiledFunction, next_number
from aotlab.capture import nesting
from aotlab.capture.call import ArgumentKind, Target
from aotlab.capture.dynamic_sizes import NUMBER, DynamicSizes
from aotlab.errors import CELL_FILE, GraphInvariantError, UsageError, UserLine
from aotlab.frontends.direct import FunctionTarget
from aotlab.frontends.graph_run import GraphRun, needs_care
from aotlab.frontends.tensor_names import names_on_stack
from aotlab.guards.inlined import check_of_inlined
from aotlab.guards.reached import Reached
from aotlab.guards.user_code import running_cells
from aotlab.ir.fx_graphs import captured_records, expression_of
from aotlab.partition.default import default_partition
from aotlab.subclasses import Options, function_for

_FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n\s*(?P<code>.*)')
_TORCH = str(Path(torch.__file__).parent)
#: The names that Dynamo gives to resume functions, which run the rest of a function after a graph break.
_RESUMED = re.compile(rf"^{internals.RESUME_PREFIX}(.+)_at_\d+$")


def frames_of_stack(text: str | None) -> list[UserLine]:
    """Return the frames of the stack trace that Dynamo stores with a node, outermost frame first."""
    return [
        UserLine(file=each["file"], line=int(each["line"]), function=each["function"], code=each["code"].strip())
        for each in _FRAME.finditer(text or "")
    ]


def line_of_stack(text: str | None, outside: tuple[UserLine, ...] = ()) -> UserLine | None:
    """Return the innermost frame of the stack trace ``text`` that Dynamo stores with a node, or None without frames.

    The ``callers`` of this line are the lines of notebook cells in the stack trace, followed by ``outside``: the lines
    of notebook cells that called the captured code.
    """
    frames = frames_of_stack(text)
    if not frames:
        return None
    callers = [each for each in reversed(frames[:-1]) if CELL_FILE.search(each.file)]
    return replace(frames[-1], callers=tuple(dict.fromkeys((*callers, *outside))))


class GraphTarget(Target):
    """A graph that Dynamo captured. It takes flat arguments and returns a flat tuple."""

    frontend = "dynamo"

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        self.function = graph.forward
        self.callers = _callers(graph)
        locate = partial(line_of_stack, outside=self.callers)
        self.nodes = captured_records(graph.graph, locate) if events.listening() else ()
        lines = [line_of_stack(n.meta.get("stack_trace")) for n in graph.graph.nodes if n.op == "call_function"]
        self.line = next((line for line in lines if line is not None), None)
        inputs = [n for n in graph.graph.nodes if n.op == "placeholder"]
        values = [n.meta.get("example_value") for n in inputs]
        #: Maps the position of a placeholder that is a size of a tensor to the tensor's position and the dimension.
        self.sizes = internals.sizes_of_others(values)
        #: The positions of placeholders that are floats in the user's program and that Dynamo passes as tensors.
        self.floats = {n for n, node in enumerate(inputs) if _replace_float_placeholder(graph, node)}
        self._names = [_variable_name(n) for n in self.without_sizes(inputs)]
        module = _called_by_torch(graph) if self.line is None else None
        if module is not None:
            self._names = [name.removeprefix("fn.") for name in self._names]
        elif self.line is None:
            self.line = _first_line(graph)
        self.name = self.line.function if self.line is not None else "graph" if module is None else module.__name__
        attributes = dict(graph.named_parameters()) | dict(graph.named_buffers())
        self._attributes = list(attributes)
        self._lifted_names: list[tuple[str, ArgumentKind]] = []
        #: Maps a position to the dimensions that Dynamo makes dynamic. Positions count the lifted inputs, then the flat
        #: arguments. In place of a wrapper subclass, the flat arguments have its parts, and then one more argument: a
        #: text with the other assumptions about the subclass.
        self.varying: DynamicSizes = {}
        remaining = [(n, values[n]) for n in self.without_sizes([*range(len(inputs))])]
        parts = [
            (n, part) for n, x in remaining for part in (*internals.parts_of(x), *[None] * internals.is_wrapper(x))
        ]
        for position, (n, part) in enumerate(parts, len(attributes)):
            is_number = n in self.floats or isinstance(part, torch.SymInt | torch.SymFloat)
            dims = {NUMBER} if is_number else internals.symbolic_dims(part)
            self.varying |= {position: dims} if dims else {}
        self._has_fakes = True
        self._forward: Callable[..., Any] | None = None
        self._needs_care = needs_care(graph.graph)

    def lifted(self) -> Sequence[Tensor]:
        """Return the tensors that are attributes of the graph, if Dynamo left any there."""
        attributes = dict(self.graph.named_parameters()) | dict(self.graph.named_buffers())
        return [attributes[name] for name in self._attributes]

    def lifted_names(self) -> Sequence[tuple[str, ArgumentKind]]:
        """Return the user's names of the lifted inputs, from the variables of the running program (`names_on_stack`).

        Dynamo's own names may say too little: the names of optimizer states, for example, contain only a position.
        """
        if self._attributes and not self._lifted_names:
            names_by_id = names_on_stack()
            pairs = zip(self._attributes, self.lifted(), strict=True)
            self._lifted_names = [(names_by_id.get(id(tensor), (name,))[0], "parameter") for name, tensor in pairs]
        return self._lifted_names

    def reached(self) -> tuple[Reached, ...]:
        """Return an empty tuple: Dynamo's own guards check closures, globals and so on before the graph is called."""
        self._forget_fakes()
        return ()

    def _forget_fakes(self) -> None:
        """Drop Dynamo's metadata about the caller's tensors. Dynamo does not need it after the first call of the graph.

        The metadata has weak references to the tensors, and `torch.utils.swap_tensors` refuses tensors with weak
        references.
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
            return GraphRun(self.graph, partial(line_of_stack, outside=self.callers)).run(*self.with_sizes(args))

    def arguments_of_compiled(self, args: Sequence[Any]) -> list[Any]:
        """Convert the arguments that Dynamo passes into the arguments of the compiled function.

        Sizes of other arguments are left out. The tensors in which Dynamo passes floats are converted to floats.
        """
        return self.without_sizes([arg.item() if n in self.floats else arg for n, arg in enumerate(args)])

    def without_sizes(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments without the sizes of other arguments. The trace reads these sizes from the tensors."""
        return [value for n, value in enumerate(args) if n not in self.sizes]

    def with_sizes(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments of Dynamo's graph: insert the sizes again that `without_sizes` removed."""
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
            # Reading `code` generates `forward`, so that it can be called directly. `GraphModule.__call__` would print
            # a page about each error of the user's program, or raise another error while it does so.
            _ = self.graph.code
            self._forward = self.graph.forward
        return self._forward(*args)

    def argument_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Return the names that the arguments have in the user's program.

        With compiled autograd, an argument may be a list of tensors, and each of its items gets a name.
        """
        return nesting.paths([*zip(self._names, args, strict=True)])


def _callers(graph: fx.GraphModule) -> tuple[UserLine, ...]:
    """Return the lines of notebook cells that called the code that Dynamo captured, innermost first.

    After a graph break, a function calls a resume function, which Dynamo has made of the rest of its code. Similarly, a
    cell calls a captured part of itself. Such frames belong to the captured code itself, so they are no callers.
    """
    stacks = (frames_of_stack(node.meta.get("stack_trace")) for node in graph.graph.nodes)
    captured = next((stack[0].function for stack in stacks if stack), "")
    function = _RESUMED.sub(r"\1", captured)
    callers = [each() for each in running_cells(sys._getframe(1))]
    if function != captured or function == "<module>":
        callers = [*dropwhile(lambda each: _RESUMED.sub(r"\1", each.function) == function, callers)]
    return tuple(callers)


def _replace_float_placeholder(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Make the placeholder ``node`` a float, if Dynamo passes a float of the user's program there as a tensor.

    This is possible only if the graph does nothing but call ``item`` on the tensor. The graph is changed in place: the
    placeholder replaces the results of ``item``. Return whether the graph was changed.
    """
    users = list(node.users)
    if not getattr(node.meta.get("grapharg"), "pass_arg_as_tensor", False) or any(u.target != "item" for u in users):
        return False
    for user in users:
        user.replace_all_uses_with(node)
        graph.graph.erase_node(user)
    graph.recompile()
    return True


def _first_line(graph: fx.GraphModule) -> UserLine | None:
    """Return the first line of the user in the stack traces of all nodes of a graph, or None.

    `GraphTarget` uses it for a graph without calls of functions, which only calls methods of tensors.
    """
    frames = (frame for node in graph.graph.nodes for frame in reversed(frames_of_stack(node.meta.get("stack_trace"))))
    return next((frame for frame in frames if not frame.file.startswith(_TORCH)), None)


def _variable_name(node: fx.Node) -> str:
    """Return the name of the user's variable for a placeholder, from the source that Dynamo stores with it."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is not None:
        name = expression_of(str(source.name() if callable(source.name) else source.name))
        return node.name if name is None else name
    return node.name


def _called_by_torch(graph: fx.GraphModule) -> type[torch.nn.Module] | None:
    """Return the class of the module, if the user compiled one of torch's own modules, such as an `nn.Linear`.

    The graph of such a module has no user line. The result is None for other graphs.
    """
    stacks = (node.meta.get("nn_module_stack") for node in graph.graph.nodes if node.op == "call_function")
    path, kind = next((next(iter(stack.values())) for stack in stacks if stack), ("", None))
    return kind if path == "L['fn']" and isinstance(kind, type) else None


#: For each capture by Dynamo that is running: the time of its beginning, and the number of earlier graph breaks.
_began: list[tuple[int, int]] = []


def watch_captures() -> None:
    """Register callbacks in Dynamo that emit events about each capture: its duration and its graph breaks.

    The callbacks are registered only once, and again after ``torch.compiler.reset()``.
    """
    internals.hear_dynamo(_capture_begins, _capture_ends)


def _capture_begins(_event: Any) -> None:
    _began.append((time.perf_counter_ns(), len(internals.dynamo_breaks())))
    events.emit(events.Begun(kind="dynamo"))


def _capture_ends(_event: Any) -> None:
    if _began:
        began, breaks = _began.pop()
        events.emit(events.Spent(kind="dynamo", duration_ns=time.perf_counter_ns() - began))
        for each in internals.dynamo_breaks()[breaks:] if events.listening() else ():
            events.emit(events.GraphBreak(stack=tuple(each.user_stack), reason=str(each.reason)))


@functools.cache
def prepare_dynamo() -> None:
    """Install hooks in Dynamo that make its captures agree with eager. This runs once, before Dynamo is first used."""
    watch_captures()
    internals.keep_argument_checks()
    internals.let_dynamo_follow_eager(
        lambda candidate: candidate is backend or getattr(candidate, "is_aotlabs", False) is True, check_of_inlined
    )


def backend(
    graph: fx.GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **unknown: Any
) -> Callable[..., Any]:
    """Compile a graph from Dynamo: the backend of ``torch.compile(backend="aotlab")``.

    The graph is traced at its first call. ``options`` are the options of ``torch.compile``: ``"compiler"``
    (``"inductor"``, ``"eager"`` or a function) and ``"partitioner"``. Raises `UsageError` for other options and for a
    ``mode``.

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
        raise UsageError(f"backend 'aotlab' has no option {wrong}; its options are 'compiler' and 'partitioner'")
    target = GraphTarget(graph)
    compiled = compile_graph(target, compiler, partitioner)
    call = internals.behind_dynamo(
        (lambda *args: compiled(*target.arguments_of_compiled(args)))
        if target.sizes or target.floats
        else compiled.__call__
    )
    call.compiled = compiled  # type: ignore[attr-defined]  # for inspection
    return call


#: Maps the code that Dynamo captured to the number that identifies the function in events.
_numbers: weakref.WeakKeyDictionary[CodeType, int] = weakref.WeakKeyDictionary()
#: Maps the name that Dynamo gives to a capture to the compiled function of the captured graph.
_captures: weakref.WeakValueDictionary[str, CompiledFunction] = weakref.WeakValueDictionary()


def compile_graph(
    target: GraphTarget, compiler: Backend, partitioner: Any, *, number: int | None = None, **settings: Any
) -> CompiledFunction:
    """Return the compiled function of a graph from Dynamo, and emit an event if Dynamo has captured the code again.

    ``number`` identifies the function in events; by default, all graphs of one code object have the same number.
    ``settings`` are arguments of `CompiledFunction`.
    """
    code, scope, failed = internals.dynamo_failed_guards() if events.listening() else (None, {}, [])
    if number is None and code is not None:
        number = _numbers.setdefault(code, next_number())
    if number is not None and code is not None and failed:
        entries = [(_captures[name].entries if name in _captures else ())[:1] for name, *_ in failed]
        rows = zip(entries, failed, strict=True)
        guards = [(next((e.number for e in each), None), text, differing) for each, (_, text, differing) in rows]
        file = code.co_filename
        events.emit(events.CapturedAgain(function_id=number, file=file, failed=tuple(guards), scope=scope))
    options = Options(backend=compiler, partitioner=partitioner, keep_inference_input_mutations=True, dynamic=None)
    function = function_for(target, options, number=number, varying=target.varying, **settings)
    _captures[internals.dynamo_compile_id()[1]] = function
    return function


def compile_by_dynamo(
    function: Callable[..., Any], *, compiler: Any, partitioner: Any, dynamic: bool | None, fullgraph: bool = False
) -> Callable[..., Any]:
    """Compile ``function`` by `torch.compile` with our backend.

    Calls under a transform of ``torch.func`` run eagerly.
    """
    prepare_dynamo()
    options = {"compiler": compiler, "partitioner": partitioner}
    settings: dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph}
    by_dynamo = partial(torch.compile, backend=partial(backend, options=options), **settings)
    return _outside_of_transforms(function, by_dynamo, backend_name=resolve(compiler).name)


# --- calls under a transform of ``torch.func``: Dynamo cannot capture them, and would skip the code at later calls, too


class _EagerTarget(FunctionTarget):
    frontend = "dynamo"


def _not_compiled(*_args: object, **_kwargs: object) -> NoReturn:
    raise GraphInvariantError("a call under no transform reached the code for calls under transforms")


class ModuleBehindDynamo:
    """The callable for a module that Dynamo captures, except at calls under a transform, which run eagerly.

    ``by_dynamo`` compiles the module by `torch.compile`, and ``compiled`` is the result. ``eager_function`` runs the
    calls under a transform, with a warning.
    """

    def __init__(self, by_dynamo: Callable[..., Any], eager_function: CompiledFunction) -> None:
        self.by_dynamo, self.eager_function = by_dynamo, eager_function
        self.__wrapped__: Any = eager_function.__wrapped__  # the original module, as on a `CompiledFunction`
        self._compile()

    def _compile(self) -> None:
        self.compiled, self._call_method = self.by_dynamo(self.__wrapped__), type(self.__wrapped__).__call__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled module. Under a transform, run the original eagerly."""
        if not torch.compiler.is_dynamo_compiling():
            if internals.under_transform():
                return self.eager_function(*args, **kwargs)
            if type(self.__wrapped__).__call__ is not self._call_method:  # `torch.compile` calls the old one
                self._compile()
        # `forward`, because `__call__` of the compiled module would run the global module hooks, or a replaced
        # `nn.Module.__call__`, a second time.
        return self.compiled.forward(*args, **kwargs)


def _outside_of_transforms(
    original: Callable[..., Any], by_dynamo: Callable[..., Any], *, backend_name: str
) -> Callable[..., Any]:
    """Compile ``original`` with Dynamo, except for calls under a transform of ``torch.func``, which run eagerly.

    ``by_dynamo`` compiles a callable with `torch.compile`. The returned callable runs ``original`` itself under a
    transform, and otherwise the result of ``by_dynamo``. ``backend_name`` is the name of the backend in the report. If
    ``original`` is a class, return the result of ``by_dynamo``, which also compiles calls under a transform.
    """
    eager_function = CompiledFunction(_EagerTarget(original), _not_compiled, backend_name=backend_name)
    if isinstance(original, torch.nn.Module):
        return ModuleBehindDynamo(by_dynamo, eager_function)
    compiled: Callable[..., Any] = by_dynamo(original)
    if not isinstance(compiled, FunctionType):
        return compiled  # if `original` is a class, torch.compile replaces its `__call__` and returns the class

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (eager_function if internals.under_transform() else compiled)(*args, **kwargs)

    return internals.as_made_by_dynamo(call)
