"""What is compiled behind Dynamo, under a transform of ``torch.func``.

Dynamo refuses a frame that runs under a transform before it asks a backend, without a word, and leaves that code alone
for good. So what `aotlab.compile` makes with Dynamo does not let it see such calls: they run eagerly, and others stay
compiled. Of what ``torch.compile(backend="aotlab")`` made, we can but say it.
"""

from __future__ import annotations

import functools
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, NoReturn

import torch

from aotlab import _torch as internals
from aotlab import config, observe
from aotlab.cache import CompiledFunction, levels_to_caller, next_number
from aotlab.errors import GraphInvariantError, TransformError
from aotlab.frontends.direct import FunctionTarget

_WHERE = "a torch.func transform"
_WHY = "Dynamo compiles nothing there"
_INSTEAD = (
    'compile what calls the transform, in one graph; aotlab.compile(…, frontend="dynamo") at least keeps other calls '
    "compiled"
)


class _AsWritten(FunctionTarget):
    frontend = "dynamo"


def _not_compiled(*_args: object, **_kwargs: object) -> NoReturn:
    raise GraphInvariantError("a call under no transform came where only those under transforms go")


@dataclass(eq=False)
class ModuleBehindDynamo:
    """A module behind Dynamo: ``compiled`` is what `torch.compile` made of it, ``eagerly`` serves transforms."""

    compiled: Callable[..., Any]
    eagerly: CompiledFunction

    def __post_init__(self) -> None:
        """Say, as `CompiledFunction` does, what is compiled."""
        self.__wrapped__ = self.eagerly.__wrapped__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it compiled, but under a transform."""
        if not torch.compiler.is_dynamo_compiling() and internals.under_transform():
            return self.eagerly(*args, **kwargs)
        return self.compiled(*args, **kwargs)


def outside_of_transforms(
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


def _name(code: CodeType, local: dict[str, Any], everywhere: dict[str, Any]) -> str | None:
    """Name what is called, a module of torch's by its class; None for a helper of torch's or the standard library."""
    root = str(everywhere.get("__name__")).split(".", 1)[0]
    if root == "torch":
        return type(local["fn"]).__qualname__ if "fn" in local else None
    return None if root in sys.stdlib_module_names - {"__main__"} else code.co_qualname


class _Refusals:
    """Says once of each thing that `torch.compile` made that Dynamo refused it under a transform."""

    def __init__(self, backend: object) -> None:
        self._backend = backend
        self._told: weakref.WeakSet[object] = weakref.WeakSet()

    def __call__(self, made: object, code: CodeType, local: dict[str, Any], everywhere: dict[str, Any]) -> None:
        """Hear that Dynamo refused a frame of ``code`` for the backend ``made``; raise if nothing is to run eagerly."""
        name = _name(code, local, everywhere)
        if name is None or internals.innermost_backend(made) is not self._backend:
            return
        eagerly = config.fallback != "error"
        if made in self._told and eagerly:
            return
        self._told.add(made)
        error = TransformError(f"`{name}` is called under {_WHERE}", why=_WHY, suggestion=_INSTEAD)
        if observe.listening():
            self._announce(name, error, "ran eagerly" if eagerly else "raised")
        if not eagerly:
            raise error
        warnings.warn(
            f"`{name}` is called under {_WHERE} and runs eagerly: {_WHY}, and after that the same code nowhere until "
            f"torch.compiler.reset(); {_INSTEAD}",
            RuntimeWarning,
            stacklevel=levels_to_caller(),
        )

    @staticmethod
    def _announce(name: str, error: TransformError, outcome: Any) -> None:
        number = observe.next_entry()
        observe.emit(
            observe.CompileStarted(
                function=name,
                function_id=next_number(),
                entry=number,
                frontend="dynamo",
                backend="aotlab",
            )
        )
        observe.emit(observe.CompileFailed(entry=number, duration_ns=0, error=error, outcome=outcome))


@functools.cache
def tell_of_refusals(backend: object) -> None:
    """Say from now on, once of each, that Dynamo refused under a transform what it was to compile with ``backend``."""
    internals.hear_refused_transforms(_Refusals(backend))
