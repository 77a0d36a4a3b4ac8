"""The real Python of a stretch of a cell, run eagerly on copies beforehand, to compare what the compiled code does.

What Dynamo captured may itself be something else than the code that it was captured from. So before the compiled form
of a region, or of a function, has done anything, its Python runs on copies of all that it reads; afterwards every
variable that it binds and every tensor that it writes is compared. That is done only where running the code twice shows
nowhere: where everything that it names, and everything that this names in turn, is a computation of torch's, a plain
value, or something that is copied. Of what cannot be told so, only the captured graph is compared.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from aotlab import _torch as internals
from aotlab.frontends.modules import AotModule
from aotlab.notebook.classify import PLAIN_METHODS, PLAIN_TORCH, PURE_BUILTINS
from aotlab.notebook.names import named_tensors
from aotlab.verification import Comparison, Observation, eager, judge
from aotlab.verification.clones import State, random_state_restored
from aotlab.verification.differential import Candidate, Higher
from aotlab.verification.observables import described

_PLAIN = (
    bool, int, float, complex, str, bytes, range, slice, type(None), type(...), torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_BUILTINS = PURE_BUILTINS | {"NotImplemented", "all", "any", "callable", "isinstance", "pow", "super", "type"}
#: Attributes that code may ask for, of whatever it is; all others must belong to what it reads, and are looked into.
_SAFE = frozenset({"__class__", "graph_break"}).union(
    *map(dir, (Tensor, torch, nn, nn.functional, torch.linalg, torch.fft, torch.special, torch.func, torch.amp, math)),
    *map(dir, (list, tuple, dict, set, str, float, nn.ModuleList, nn.ModuleDict)),
)
#: Those that it may not: they ask for what copies do not have, or change what is not copied.
_UNSAFE = (PLAIN_METHODS | PLAIN_TORCH) - {"grad", "requires_grad"}
_UNSAFE_BEGINNINGS = ("manual_seed", "register_", "set_", "use_")
_NEVER = frozenset((
    "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_NAME", "GET_AWAITABLE", "IMPORT_NAME", "LOAD_BUILD_CLASS", "STORE_NAME",
))  # fmt: skip
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_RUNS_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FOREIGN_TORCH = ("torch._dynamo", "torch.distributed", "torch.fx", "torch.jit", "torch.utils.data")
_BASES = ("torch", "builtins", "typing", "abc", "collections")
_REDEFINED = frozenset(
    {"__getattr__", "__getattribute__", "__setattr__", "__deepcopy__", "__reduce__", "__reduce_ex__"}
)
#: Methods that Python calls by itself, but not where no objects are made or shown.
_MAKERS = frozenset({"__init__", "__init_subclass__", "__new__", "__post_init__", "__repr__", "__str__"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_MODULES = frozenset(vars(nn.Module()))
_MUTATORS = frozenset((
    "add", "append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update",
))  # fmt: skip
_NOTE = "__slotnames__"
_MOST = 10_000
_MISSING = object()


class _SeenError(Exception):
    """Running the code twice could be seen."""


class _Reader:
    """Finds all that some code reads, and raises if it may do anything by which it shows that it ran twice."""

    def __init__(self, namespace: dict[str, Any], bound: Sequence[str]) -> None:
        self.namespace = namespace
        self._bound = bound
        self._present = named_tensors(namespace)
        self.read: dict[str, Any] = {}
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        self.functions: dict[str, types.FunctionType] = {}
        self.undoable = True
        self.owners: list[object] = []
        self._names: dict[str, None] = {}
        self._done: dict[int, object] = {}

    def finish(self) -> None:
        """Look at the names of attributes and methods, which any of the objects may have."""
        seen = (-1, -1)
        while seen != (len(self._names), len(self.owners)):
            seen = (len(self._names), len(self.owners))
            for name in list(self._names):
                self._attribute(name)

    def code(self, code: types.CodeType, known: Mapping[str, Any], *, own: bool, stores: bool = False) -> None:
        """Look at some code, whose globals are ``known``; ``own`` if it will run with copies of them."""
        if id(code) in self._done:
            return
        self._done[id(code)] = code
        if code.co_flags & _RUNS_LATER and code.co_name != "<genexpr>":
            raise _SeenError
        before = ""
        for each in dis.get_instructions(code):
            if each.opname in _NEVER or (each.opname == "STORE_GLOBAL" and not stores):
                raise _SeenError
            if each.opname == "STORE_ATTR":
                self.undoable = False
                if before not in ("LOAD_FAST", "LOAD_GLOBAL"):
                    raise _SeenError
            elif each.opname in _ATTRIBUTES:
                self._names[each.argval] = None
            elif each.opname == "LOAD_GLOBAL":
                self._global(each.argval, known, own=own)
            before = each.opname
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant, known, own=own)

    def value(self, value: Any, name: str, *, own: bool) -> None:
        """Look at a value; one that is not copied (not ``own``) must be nothing that can change."""
        if type(value) in _PLAIN or id(value) in self._done:
            return
        if len(self._done) > _MOST:
            raise _SeenError
        package = _package(value)
        if isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            safe = package in ("torch", "math")
        elif isinstance(value, type):
            safe = package == "torch" or issubclass(value, BaseException) or value.__module__ == "builtins"
        elif isinstance(value, types.MethodType):
            self.value(value.__self__, name, own=own)
            self.value(value.__func__, "", own=False)
            return
        elif isinstance(value, types.FunctionType):
            self.function(value)
            return
        else:
            safe = type(value).__module__ == "torch._ops"
            if not safe and own:
                self._done[id(value)] = value
                self._object(value, name)
                return
        if not safe:
            raise _SeenError

    def function(self, function: types.FunctionType) -> None:
        """Look at a function that the code may call; the notebook's own will run with copies of what it reads."""
        if _package(function) == "torch":
            return
        inner = vars(function).get("_torchdynamo_inline", function)  # of one that a cell has compiled
        self.fixed(inner)
        named = self.namespace.get(function.__name__) is function
        own = named and inner.__globals__ is self.namespace
        self.code(inner.__code__, inner.__globals__, own=own)
        if own:
            self.functions[function.__name__] = inner

    def fixed(self, function: types.FunctionType) -> None:
        """Look at what a function has got when it was made, and keeps."""
        held = [each.cell_contents for each in function.__closure__ or ()]
        for each in (*held, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.value(each, "", own=False)

    def _global(self, name: str, known: Mapping[str, Any], *, own: bool) -> None:
        if name in known:
            found = _uncompiled(known[name])
            if own:
                self.read[name] = found
            self.value(found, name, own=own)
        elif name not in _BUILTINS and not (own and name in self._bound):
            kind = vars(builtins).get(name)
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise _SeenError

    def _object(self, value: Any, name: str) -> None:
        kind = type(value)
        if isinstance(value, Tensor):
            self._tensor(value, name)
        elif kind in (list, tuple, set, frozenset):
            self.undoable = self.undoable and kind is tuple
            for index, each in enumerate(value):
                self.value(each, f"{name}[{index}]", own=True)
        elif kind is dict:
            self.undoable = False
            for key, each in value.items():
                self.value(key, "", own=True)
                self.value(each, f"{name}[{key!r}]", own=True)
        elif kind.__module__.startswith(_FOREIGN_TORCH) or any(vars(value).get(each) for each in _HOOKS):
            raise _SeenError
        elif isinstance(value, torch.optim.Optimizer):
            self.undoable = False
            self.owners.append(value)
            self._class(kind)
            self.value([group["params"] for group in value.param_groups], name, own=True)
            self.value(list(value.state.values()), f"{name}.state", own=True)
        else:
            self._parts(value, name)

    def _tensor(self, tensor: Tensor, name: str) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_inference():
            raise _SeenError
        self.tensors[id(tensor)] = self._present.get(id(tensor), (name, tensor))
        if tensor.is_leaf and tensor.grad is not None:
            self.value(tensor.grad, f"{name}.grad", own=True)

    def _parts(self, value: Any, name: str) -> None:
        module = isinstance(value, nn.Module)
        if not module and _package(value) == "torch":
            raise _SeenError
        self.undoable = self.undoable and module
        self.owners.append(value)
        self._class(type(value))
        held = vars(value).items()
        if module:
            held = [(key, each) for key, each in held if key not in _OF_MODULES]
            held += [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]
            held += value.named_children()
        for key, each in held:
            self.value(each, f"{name}.{key}", own=True)

    def _class(self, kind: type) -> None:
        for each in kind.__mro__:
            if _package(each) in _BASES:
                continue
            if _REDEFINED & vars(each).keys():
                raise _SeenError
            for name, member in vars(each).items():
                called = name == "forward" or (name.startswith("__") and name not in _MAKERS)
                if called and isinstance(member, types.FunctionType):
                    self.function(member)

    def _attribute(self, name: str) -> None:
        if name in _UNSAFE or name.startswith(_UNSAFE_BEGINNINGS):
            raise _SeenError
        self.undoable = self.undoable and name not in _MUTATORS
        held = name in _SAFE
        for owner in list(self.owners):
            held_by = internals.MODULE_DICTIONARIES if isinstance(owner, nn.Module) else ()
            if any(name in vars(owner)[each] for each in held_by):
                held = True
                continue
            found = inspect.getattr_static(owner, name, _MISSING)
            if found is _MISSING:
                continue
            held = True
            if isinstance(found, staticmethod | classmethod):
                found = found.__func__
            elif isinstance(found, property):
                found = found.fget
            if name not in vars(owner):  # what an object holds itself was looked at
                self.value(found, name, own=False)
        if not held:
            raise _SeenError


class Rehearsal:
    """What the Python of a stretch does with copies, to be compared with what its compiled form does.

    Attributes
    ----------
    undoable
        Whether everything that the stretch can write is a variable or a tensor.
    """

    def __init__(
        self,
        reader: _Reader,
        function: types.FunctionType,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        bound: Sequence[str],
        *,
        grad_mode: bool,
        exact: bool,
    ) -> None:
        self.undoable = reader.undoable
        self._function = function
        self._functions = reader.functions
        self._bound = bound
        kept = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
        own = {name: each for name, each in reader.read.items() if not isinstance(each, kept)}
        kinds = tuple({type(each): None for each in reader.owners})
        self._given = _Given(list(reader.tensors.values()), own, tuple(args), dict(kwargs), kinds)
        self._namespace = reader.namespace
        self._versions = self._given.versions()
        self._exact = exact
        self._grad_mode = grad_mode
        self._random = torch.get_rng_state()
        # Values that are not close at once are decided by more runs, from what was there before.
        self._before = None if exact else self._given.copied()
        self._expected = self._run(eager, self._before or self._given)

    def compare(self, result: Any) -> tuple[Comparison, ...]:
        """Compare what the compiled form has left and returned; of what is equal only the values are told."""
        found = self._state(result, self._namespace, self._given, self._versions)
        appeal = None
        if self._before is not None:
            appeal = Higher(self._again, eager, _stock).appeal(0)
        rows = judge(self._expected, found, tolerance="exact" if self._exact else "close", appeal=appeal)
        told = {each.name for each in found.tensors if each.role == "output" or each.version_moved}
        told |= {each.name for each in found.leaves}
        kept: dict[tuple[object, ...], Comparison] = {}
        for row in rows:
            rounded = not self._exact and row.kind == "python value" and _nearly(row)
            if (not row.equal and not rounded) or (row.kind in ("value", "python value") and row.subject in told):
                row = replace(row, equal=True, sentence="") if rounded else row
                kept.setdefault((row.kind, row.subject, row.equal), row)
        return tuple(kept.values())

    def _again(self, make: Candidate, dtype: torch.dtype | None = None) -> list[Observation]:
        assert self._before is not None
        return [self._run(make, self._before, dtype)]

    def _run(self, make: Candidate, given: _Given, dtype: torch.dtype | None = None) -> Observation:
        copied = given.copied(dtype)
        namespace = {**self._namespace, **copied.read}
        for name, each in self._functions.items():
            namespace[name] = _with_globals(each, namespace)
        function = self._function
        if function.__globals__ is self._namespace:
            function = _with_globals(function, namespace)
        versions = copied.versions()
        with random_state_restored(), torch.set_grad_enabled(self._grad_mode):
            torch.set_rng_state(self._random)
            result = make(function)(*copied.args, **copied.kwargs)
            return self._state(result, namespace, copied, versions)

    def _state(
        self, result: Any, namespace: Mapping[str, Any], given: _Given, versions: Mapping[int, int | None]
    ) -> Observation:
        results = {name: namespace[name] for name in self._bound if name in namespace}
        results |= {} if result is None else {"out": result}
        return described(results, given.tensors, versions)


@dataclass(frozen=True, slots=True)
class _Given:
    """All that some code reads: its tensors, by name, what it finds in its globals, and its arguments."""

    tensors: list[tuple[str, Tensor]]
    read: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kinds: tuple[type, ...]

    def versions(self) -> dict[int, int | None]:
        """Return how often each tensor was written, by its `id`."""
        return {id(each): internals.version_of(each) for _, each in self.tensors}

    def copied(self, dtype: torch.dtype | None = None) -> _Given:
        """Copy it, so that what aliases each other goes on to."""
        state = State(dtype=dtype)
        tensors = [(name, state.tensor(each, name)) for name, each in self.tensors]
        for (name, each), (_, copy) in zip(self.tensors, tensors, strict=True):
            if each.is_leaf and each.grad is not None:
                copy.grad = state.tensor(each.grad, f"{name}.grad")
            if not each.is_leaf and each.retains_grad:
                copy.retain_grad()
        # Copying an object leaves a note in its class.
        new = [kind for kind in self.kinds if _NOTE not in vars(kind)]
        try:
            read, args, kwargs = state.copy((self.read, self.args, self.kwargs))
            return _Given(tensors, read, args, kwargs, self.kinds)
        finally:
            for kind in new:
                if _NOTE in vars(kind):
                    delattr(kind, _NOTE)


def rehearse(
    function: types.FunctionType,
    namespace: dict[str, Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    bound: Sequence[str] = (),
    grad_mode: bool,
    exact: bool,
) -> Rehearsal | None:
    """Run the Python of a stretch on copies of what it reads; None where running it twice could be seen.

    Parameters
    ----------
    function
        The stretch; with ``args`` and ``kwargs`` if it is a function of the user's.
    namespace
        The notebook's variables.
    bound
        The variables that it binds.
    grad_mode
        Whether grad mode was on when the stretch began.
    exact
        Whether values have to be equal bit for bit.
    """
    reader = _Reader(namespace, bound)
    given = dict(kwargs or {})
    own = function.__globals__ is namespace
    try:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        for index, each in enumerate(args):
            reader.value(each, names[index] if index < len(names) else f"args[{index}]", own=True)
        for name, each in given.items():
            reader.value(each, name, own=True)
        reader.fixed(function)
        reader.code(function.__code__, function.__globals__, own=own, stores=bool(bound))
        reader.finish()
        return Rehearsal(reader, function, args, given, bound, grad_mode=grad_mode, exact=exact)
    except Exception:  # noqa: BLE001  # what cannot be copied, or not be run on copies, is compared with the graph only
        return None


def _uncompiled(value: Any) -> Any:
    """Return the module that `aotlab.compile` was given, which runs eagerly, unless the compiled one has hooks."""
    hooked = isinstance(value, AotModule) and any(vars(value).get(each) for each in _HOOKS)
    return value.orig_module if isinstance(value, AotModule) and not hooked else value


def _nearly(row: Comparison) -> bool:
    """Tell whether a Python number that was rounded from a tensor is the same but for that."""
    try:
        return math.isclose(float(row.expected), float(row.actual), rel_tol=1e-4, abs_tol=1e-5)
    except ValueError:
        return False


def _stock(function: Callable[..., Any]) -> Callable[..., Any]:
    assert isinstance(function, types.FunctionType)
    return torch.compile(_with_globals(function, function.__globals__, function.__code__.replace()), dynamic=False)


def _with_globals(
    function: types.FunctionType, namespace: dict[str, Any], code: types.CodeType | None = None
) -> types.FunctionType:
    made = types.FunctionType(
        code or function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _package(value: Any) -> str:
    """Return the package that a module, class, function or object comes from."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    named = isinstance(value, type | types.FunctionType | types.BuiltinFunctionType)
    return str((value if named else type(value)).__module__).partition(".")[0]
