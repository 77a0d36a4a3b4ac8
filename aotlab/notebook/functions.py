"""Functions that a cell defines, compiled for the calls to come."""

from __future__ import annotations

import functools
import inspect
import types
from typing import TYPE_CHECKING, Any

from aotlab import _torch as internals
from aotlab import config
from aotlab.notebook.graphs import RunInstead
from aotlab.notebook.names import watch_arguments
from aotlab.notebook.tracebacks import cleaned
from aotlab.trace.running import is_tracing

if TYPE_CHECKING:
    from aotlab.notebook.compiled_cell import CompiledCell

#: How often a function is handed to Dynamo anew of which no call has been captured yet.
MOST_TRIES = 8


def compiled_function(cell: CompiledCell, name: str, function: object, lines: tuple[int, int]) -> object:
    """Return ``function`` so that its calls compile, and appear in the report of ``cell``.

    What is no plain function (a generator, a coroutine function, what a decorator made of it) is returned as it is.
    """
    if not isinstance(function, types.FunctionType):
        return function
    kind = inspect.unwrap(function)
    if inspect.isgeneratorfunction(kind) or inspect.iscoroutinefunction(kind) or inspect.isasyncgenfunction(kind):
        return function
    call = cell.compile_function(function, name, lines)
    part = cell.part_of(name)

    tries = 0

    @internals.dynamo_disable  # code that Dynamo has captured in part comes here as well
    def run(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        nonlocal call, tries
        if part.calls and not part.graphs and tries < MOST_TRIES:
            # Dynamo does not look again at code of which it captured nothing, though another call may compute.
            tries += 1
            call = cell.compile_again(_copied(function), part)
        part.calls += 1
        part.off = not config.enabled
        if part.off or part.differs:
            part.in_eager = True
            return function(*args, **kwargs)
        watched = [] if is_tracing() else watch_arguments(args, kwargs)  # called by a function that is traced
        try:
            with cell.compiling(part), cell.trial(part, function, args, kwargs) as trial:
                result = call(*args, **kwargs)
            return function(*args, **kwargs) if cell.differs(part, trial, result) else result
        except RunInstead:
            return function(*args, **kwargs)
        except BaseException as error:
            cleaned(error, cell.file)
            raise
        finally:
            cell.settle(part)
            cell.note_outside(part, function, watched)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return run(*args, **kwargs)

    signature: Any = wrapper
    internals.leave_frame_to_python(signature.__code__)
    signature.__defaults__, signature.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    # Code that Dynamo captures and that calls this function gets the function, not what surrounds it here.
    wrapper._torchdynamo_inline = function  # type: ignore[attr-defined]  # Dynamo's convention
    return wrapper


def _copied(function: types.FunctionType) -> types.FunctionType:
    """Return the same function with code of its own."""
    code = function.__code__.replace()
    copied = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    return copied
