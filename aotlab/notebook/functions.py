"""Functions that a cell defines, compiled for the calls to come."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

from aotlab import config
from aotlab.notebook.compiled_cell import CompiledCell
from aotlab.notebook.graphs import RunInstead
from aotlab.notebook.tracebacks import cleaned


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

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        part.calls += 1
        part.off = not config.enabled
        if not config.enabled:
            return function(*args, **kwargs)
        try:
            with cell.compiling(part):
                return call(*args, **kwargs)
        except RunInstead:
            return function(*args, **kwargs)
        except BaseException as error:
            cleaned(error, cell.file)
            raise

    signature: Any = wrapper
    signature.__defaults__, signature.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    # Code that Dynamo captures and that calls this function gets the function, not what surrounds it here.
    wrapper._torchdynamo_inline = function  # type: ignore[attr-defined]  # Dynamo's convention
    return wrapper
