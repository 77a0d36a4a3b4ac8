"""Compile the functions that a cell defines, for their calls in later cells."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

from aotlab import _torch as internals
from aotlab import config
from aotlab.notebook.cell_compiler import CellCompiler
from aotlab.notebook.cell_state import Trial
from aotlab.notebook.graphs import RunInstead
from aotlab.notebook.names import watch_arguments
from aotlab.notebook.tracebacks import cleaned
from aotlab.notebook.traced import NotTraced, TracedFunction, is_inside_a_trace

#: How often a function is passed to Dynamo again if none of its calls has been captured yet.
MOST_TRIES = 8


def compiled_function(compiler: CellCompiler, name: str, function: object, lines: tuple[int, int]) -> object:
    """Return a wrapper of ``function`` whose calls are compiled and appear in the report of the compiler's cell.

    ``lines`` are the first and the last line of the function in the cell. An object that is not a plain function is
    returned unchanged: a generator function, a coroutine function, another object that a decorator returned.
    """
    if not isinstance(function, types.FunctionType):
        return function
    kind = inspect.unwrap(function)
    if inspect.isgeneratorfunction(kind) or inspect.iscoroutinefunction(kind) or inspect.isasyncgenfunction(kind):
        return function
    call = compiler.compile_function(function, name, lines)
    part = compiler.state.parts[name]

    tries = 0

    @internals.dynamo_disable  # code that Dynamo captured only in part may call this
    def run(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal call, tries
        if is_inside_a_trace():
            return function(*args, **kwargs)  # the trace or the comparison of the caller includes this call
        if part.calls and not part.graphs and tries < MOST_TRIES:
            # Dynamo tries to capture a code object only once. If it captured nothing at the first call, a later call
            # may still compute with tensors. So the function gets a new code object.
            tries += 1
            call = compiler.compile(_copied(function), part)
        part.calls += 1
        part.off = not config.enabled
        if part.off or part.differs:
            part.in_eager = True
            return function(*args, **kwargs)
        watched = watch_arguments(args, kwargs)
        try:
            if isinstance(call, TracedFunction):
                try:
                    with compiler.compiling(part, traced=True):
                        return call(*args, **kwargs)
                except NotTraced as declined:
                    compiler.decline(part, call, str(declined))
                    call = compiler.compile(function, part)
            with compiler.compiling(part):
                trial = Trial(function=function, args=args, kwargs=kwargs, calls_before=part.calls_by_graph())
                with compiler.trying(part, trial):
                    result = call(*args, **kwargs)
            return function(*args, **kwargs) if compiler.differs(part, trial, result) else result
        except RunInstead:
            return function(*args, **kwargs)
        except BaseException as error:
            cleaned(error, compiler.state.file)
            raise
        finally:
            part.settle()
            compiler.note_outside(part, function, watched)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return run(*args, **kwargs)

    signature: Any = wrapper
    internals.leave_frame_to_python(signature.__code__)
    signature.__defaults__, signature.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    # If code that Dynamo captures calls this wrapper, Dynamo inlines the user's function without the wrapper.
    wrapper._torchdynamo_inline = function  # type: ignore[attr-defined]  # Dynamo's convention
    return wrapper


def separately_compiled(compiler: CellCompiler, name: str, lines: tuple[int, int]) -> Callable[..., Any]:
    """Return a callable that compiles and calls the cell's function ``name``.

    ``lines`` are the first and the last line of the function in the cell. Python runs some lines that call a function
    of the cell, because the lines depend on a number that changes in each round of a loop. These lines call the
    returned callable instead of the function, so that the function is compiled although no region contains the call. If
    the variable ``name`` refers to another object at the time of a call, this object is called, uncompiled.
    """
    compiled_parts: list[object] = []
    compiled: Any = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled_parts, compiled
        function = compiler.namespace[name]
        if not isinstance(function, types.FunctionType) or function.__code__.co_filename != compiler.state.file:
            return function(*args, **kwargs)
        # Each run of the cell creates a new function object. If its code, defaults and closure are the same objects as
        # before, the compiled form is used again.
        parts = [function.__code__, *(function.__defaults__ or ()), function.__kwdefaults__, function.__closure__]
        if len(parts) != len(compiled_parts) or not all(map(operator.is_, parts, compiled_parts)):
            compiled_parts, compiled = parts, compiled_function(compiler, name, function, lines)
        return compiled(*args, **kwargs)

    return call


def _copied(function: types.FunctionType) -> types.FunctionType:
    """Return a copy of ``function`` with a new code object, which Dynamo regards as code that it has not seen yet."""
    code = function.__code__.replace()
    copied = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    return copied
