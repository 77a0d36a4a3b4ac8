"""What a hook holds besides the gradient that it is given.

    def f(x, y):
        z = x * y
        x.register_hook(lambda gradient: gradient * z)
        return z

In eager the closure holds the very tensors of the call. In a trace it holds the traced ones, which have no values. So
the tensors are noted as if they were returned, and each compiled call registers a copy of the hook that holds its own.
Only what a copy can be made of is gone through: functions with their closures and defaults, partials, bound methods of
tensors, and lists, tuples and dicts. A traced tensor elsewhere, as in an attribute of an object, is refused.

A hook may keep other state: a list that it appends to, a variable that it counts in. What is outside of the call is
shared by all calls, in eager as here. What is made in the call is made once here, by the trace: it is refused.
"""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from aotlab import torch_internals as internals
from aotlab.errors import HooksError, UserLine

_DEPTH = 4
_MUTABLE = (list, dict, set, bytearray, deque)


def held_tensors(function: Any, line: UserLine | None) -> dict[str, Tensor]:
    """Return the traced tensors that a hook holds, by the name that it has for them.

    Raises
    ------
    HooksError
        It holds one where a copy of the hook could not be given another.
    """
    found: dict[str, Tensor] = {}
    entered: set[int] = set()
    todo: list[tuple[str, Any]] = [("the hook", function)]
    while todo:
        name, value = todo.pop()
        if id(value) in entered:
            continue
        entered.add(id(value))
        if isinstance(value, Tensor):
            if internals.is_functional(value):
                key = name
                while key in found:
                    key += "'"
                found[key] = value
            continue
        inner = _parts(name, value)
        if inner is not None:
            todo += inner
        elif _holds_traced(value, _DEPTH):
            raise HooksError(
                f"a hook holds a tensor of the call in `{name}`, a `{type(value).__qualname__}`",
                line=line,
                why="it would see the traced tensor, not the one of the call",
                suggestion="let the hook's closure hold the tensor itself",
            )
    return found


def _parts(name: str, value: Any) -> list[tuple[str, Any]] | None:
    """List what a value that can be copied holds; None for other values."""
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        found = [(free, cell.cell_contents) for free, cell in cells if _is_filled(cell)]
        found += [(f"a default of `{value.__name__}`", each) for each in value.__defaults__ or ()]
        return found + list((value.__kwdefaults__ or {}).items())
    if isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, Tensor):
        return [(value.__name__, value.__self__)]
    if isinstance(value, types.MethodType) and isinstance(value.__self__, Tensor):
        return [(value.__func__.__name__, value.__self__)]
    if type(value) is functools.partial:
        return [(name, each) for each in (value.func, *value.args, *value.keywords.values())]
    if type(value) in (list, tuple):
        return [(name, each) for each in value]
    if type(value) is dict:
        return [(name, each) for each in value.values()]
    return None


class HookCopies:
    """The hooks of one compiled call, each a copy that gets to hold the call's own tensors.

    They are registered when their tensors are there, and told what they hold when all of the call's tensors are.
    """

    __slots__ = ("_functions", "_held", "_late")

    def __init__(self, functions: Sequence[Callable[..., Any] | None], held: Sequence[Tensor]) -> None:
        self._functions = functions
        self._held = held
        self._late = [_Late() for _ in functions]

    def __getitem__(self, n: int) -> Callable[..., Any]:
        """Return the hook ``n``."""
        return self._late[n]

    def hold(self, *tensors: Tensor) -> None:
        """Give the hooks the tensors of this call, in the order of the traced ones."""
        copier = _Copier({id(traced): own for traced, own in zip(self._held, tensors, strict=True)})
        for late, function in zip(self._late, self._functions, strict=True):
            late.function = copier.copy(function)


class _Late:
    __slots__ = ("function",)
    function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


class _Copier:
    """Copies what holds traced tensors; what is held in two places is copied once."""

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[int, Any] = {}

    def copy(self, value: Any) -> Any:
        """Return ``value`` with other tensors, itself if it holds none of the traced ones."""
        if id(value) in self._tensors:
            return self._tensors[id(value)]
        if id(value) not in self._made:
            self._made[id(value)] = value  # what holds itself is found again on the way
            if self._is_concerned(value, set()):
                self._make(value)
        return self._made[id(value)]

    def _is_concerned(self, value: Any, entered: set[int]) -> bool:
        if id(value) in self._tensors:
            return True
        if id(value) in entered or isinstance(value, Tensor):
            return False
        entered.add(id(value))
        return any(self._is_concerned(part, entered) for _, part in _parts("", value) or ())

    def _make(self, value: Any) -> None:
        made = self._made
        if isinstance(value, types.FunctionType):
            cells = tuple(self._cell(cell) for cell in value.__closure__ or ())
            own = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
            made[id(value)] = own
            own.__defaults__ = None if value.__defaults__ is None else tuple(map(self.copy, value.__defaults__))
            if value.__kwdefaults__ is not None:
                own.__kwdefaults__ = {key: self.copy(each) for key, each in value.__kwdefaults__.items()}
            own.__qualname__ = value.__qualname__
            own.__dict__.update(value.__dict__)
            for cell, new in zip(value.__closure__ or (), cells, strict=True):
                if new is not cell:
                    new.cell_contents = self.copy(cell.cell_contents)
        elif isinstance(value, types.BuiltinMethodType | types.MethodType):
            made[id(value)] = getattr(self.copy(value.__self__), value.__name__)
        elif type(value) is functools.partial:
            keywords = {key: self.copy(each) for key, each in value.keywords.items()}
            made[id(value)] = functools.partial(self.copy(value.func), *map(self.copy, value.args), **keywords)
        elif type(value) is list:
            own_list: list[Any] = []
            made[id(value)] = own_list
            own_list += map(self.copy, value)
        elif type(value) is tuple:
            made[id(value)] = tuple(map(self.copy, value))
        else:
            own_dict: dict[Any, Any] = {}
            made[id(value)] = own_dict
            own_dict.update((key, self.copy(each)) for key, each in value.items())

    def _cell(self, cell: Any) -> Any:
        if not _is_filled(cell) or not self._is_concerned(cell.cell_contents, set()):
            return cell  # state that all calls share
        return self._made.setdefault(id(cell), types.CellType())


def refuse_state_of_the_call(function: Any, line: UserLine | None) -> None:
    """Refuse a hook that keeps state which eager makes anew in each call.

    Raises
    ------
    HooksError
        It assigns to a variable of the call, or holds a container or is an object that nothing outside holds.
    """
    frames = list(_running())
    if not frames or _is_outside(function, frames):
        return
    what = _state_of(function, frames)
    if what is not None:
        raise HooksError(
            f"a hook {what}",
            line=line,
            why="eager has another one in each call, and a trace has one for all calls",
            suggestion="make it outside of the compiled function, or register the hook there",
        )


def _state_of(function: Any, frames: Sequence[types.FrameType]) -> str | None:
    """Say what state of the call a hook keeps; None if it keeps none that can be seen."""
    if isinstance(function, types.FunctionType):
        outer = {name for frame in frames for name in frame.f_code.co_freevars}
        assigned = _assigned(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name in assigned and name not in outer:
                return f"assigns to `{name}`, a variable of the call"
            if _is_filled(cell) and _is_new_container(cell.cell_contents, frames):
                return f"holds `{name}`, a `{type(cell.cell_contents).__qualname__}` of the call"
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        new = next((each for each in defaults if _is_new_container(each, frames)), None)
        return None if new is None else f"has a default that is a `{type(new).__qualname__}` of the call"
    owner = function.__self__ if isinstance(function, types.MethodType | types.BuiltinMethodType) else function
    if _is_new_container(owner, frames):
        return f"is a method of a `{type(owner).__qualname__}` of the call"
    if isinstance(owner, Tensor | nn.Module | type | functools.partial) or not _has_vars(owner) or not vars(owner):
        return None
    return None if _is_outside(owner, frames) else f"is an object of the call, a `{type(owner).__qualname__}`"


def _is_new_container(value: Any, frames: Sequence[types.FrameType]) -> bool:
    return isinstance(value, _MUTABLE) and not _holds_traced(value, _DEPTH) and not _is_outside(value, frames)


def _running() -> Iterator[types.FrameType]:
    """Go through the frames of the traced function and of what it called, innermost first; no library's are among them.

    The recorder's own stand between; what else of aotlab is met called the function.
    """
    package, room = __name__.split(".")[:2]
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_globals.get("__name__", "").split(".")
        if names[0] == package and names[1:2] != [room]:
            return
        if names[0] not in (package, "torch"):
            yield frame
        frame = frame.f_back


def _assigned(code: types.CodeType) -> set[str]:
    """Return the variables of outer functions that the code, or code in it, assigns to or deletes."""
    found = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
    }
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _assigned(const) & set(code.co_freevars)
    return found


def _is_outside(value: Any, frames: Sequence[types.FrameType]) -> bool:
    """Tell whether what outlives the call holds ``value``: a global, an outer variable, an argument, one of these."""
    code = frames[-1].f_code
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    known = [frames[-1].f_locals[name] for name in arguments if name in frames[-1].f_locals]
    known = [each for each in known if not isinstance(each, _MUTABLE)]  # a call is traced with copies of these
    for frame in frames:
        known += [frame.f_locals[name] for name in frame.f_code.co_freevars if name in frame.f_locals]
        known += [each for each in frame.f_locals.values() if isinstance(each, nn.Module)]
        known += frame.f_globals.values()
    return any(value is each or (_has_vars(each) and _is_attribute(value, each)) for each in known)


def _is_attribute(value: Any, owner: Any) -> bool:
    return any(value is each for each in vars(owner).values())


def _holds_traced(value: Any, depth: int) -> bool:
    """Look for a traced tensor wherever Python lets us look, to the given depth."""
    if isinstance(value, Tensor):
        return internals.is_functional(value)
    if not depth:
        return False
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        inner: list[Any] = list(value)
    elif isinstance(value, dict):
        inner = list(value.values())
    else:
        inner = [each for _, each in _parts("", value) or ()]
        inner += [value.__self__, value.__func__] if isinstance(value, types.MethodType) else []
        inner += list(vars(value).values()) if _has_vars(value) else []
    return any(_holds_traced(item, depth - 1) for item in inner)


def _has_vars(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if the name is not bound yet
    except ValueError:
        return False
    return True
