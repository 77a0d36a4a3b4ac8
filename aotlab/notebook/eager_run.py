"""Run the Python code of a region eagerly on copies first, to compare it with the compiled form.

The graph that Dynamo captured may itself differ from the code that it was captured from. So before the compiled form
of a region or a function has any effect, its Python code runs on copies of everything that it reads. Afterwards the
results of the two runs are compared: every variable that the code binds, and every tensor that it writes. The code runs
on copies only if running it twice cannot be observed. So everything that it refers to, directly or indirectly, must be
a torch computation, a plain value, or something that is copied. If this is not certain, only the captured graph is
compared with eager.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from aotlab import _torch as internals
from aotlab.frontends.compiled_module import AotModule
from aotlab.frontends.tensor_names import named_tensors
from aotlab.notebook.classify import PLAIN_METHODS, PLAIN_TORCH, PURE_BUILTINS
from aotlab.verification import Comparison, Observation, eager, judge
from aotlab.verification.clones import State, random_state_restored
from aotlab.verification.float64 import Float64Appeal
from aotlab.verification.judgement import EXACT
from aotlab.verification.observables import Candidate, described

_PLAIN = (
    bool, int, float, complex, str, bytes, range, slice, type(None), type(...), torch.dtype, torch.device,
    torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_BUILTINS = PURE_BUILTINS | {"NotImplemented", "all", "any", "callable", "isinstance", "pow", "super", "type"}
#: Names of attributes that code may read from any object. All other attributes must belong to objects that the code
#: reads, and `_Reader` checks their values.
_SAFE = frozenset({"__class__", "graph_break"}).union(
    *map(dir, (Tensor, torch, nn, nn.functional, torch.linalg, torch.fft, torch.special, torch.func, torch.amp, math)),
    *map(dir, (list, tuple, dict, set, str, float, nn.ModuleList, nn.ModuleDict)),
)
#: Names of attributes that code must not use, because copies do not support them, or because they change state that is
#: not copied.
UNSAFE = (PLAIN_METHODS | PLAIN_TORCH) - {"grad", "requires_grad"}
UNSAFE_BEGINNINGS = ("manual_seed", "register_", "set_", "use_")
#: Bytecode instructions that code must not contain if it runs on copies.
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
#: Special methods that Python calls only to create or show objects. They are not checked.
_MAKERS = frozenset({"__init__", "__init_subclass__", "__new__", "__post_init__", "__repr__", "__str__"})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_MODULES = frozenset(vars(nn.Module()))
#: Methods that may change a container. aotlab cannot undo such a change.
_MUTATORS = frozenset((
    "add", "append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update",
))  # fmt: skip
#: The attribute in which `copyreg` caches the names of a class's slots when an object of the class is copied.
_NOTE = "__slotnames__"
_MOST = 10_000
_MISSING = object()


class _SeenError(Exception):
    """Raised if running the code twice could be observed. Then the code must not run on copies."""


class _Reader:
    """Finds everything that some code reads, and raises `_SeenError` if running the code twice could be observed.

    Parameters
    ----------
    namespace
        The notebook's variables.
    bound
        The variables that the code binds.

    Attributes
    ----------
    read
        The variables that the code reads.
    tensors
        The tensors that the code can reach, with their names, by `id`.
    functions
        The notebook's functions that the code can call, by name. They will run with copies of their globals.
    undoable
        Whether the code can write only variables and tensors, so that its effects can be undone.
    owners
        The modules, optimizers and other objects that the code can reach.
    """

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
        """Check the attributes that the code reads.

        Bytecode does not say to which object an attribute belongs. So each name is looked up in every object of
        ``owners``. This can find more code, which has more names and objects. So the lookups are repeated until they
        find nothing new.
        """
        seen = (-1, -1)
        while seen != (len(self._names), len(self.owners)):
            seen = (len(self._names), len(self.owners))
            for name in list(self._names):
                self._attribute(name)

    def code(self, code: types.CodeType, variables: Mapping[str, Any], *, copied: bool, stores: bool = False) -> None:
        """Check a code object.

        ``variables`` are the globals of the code. ``copied`` is true if the code will run with copies of its globals.
        ``stores`` is true if the code may bind globals.
        """
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
                self._global(each.argval, variables, copied=copied)
            before = each.opname
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant, variables, copied=copied)

    def value(self, value: Any, name: str, *, copied: bool) -> None:
        """Check a value that the code can reach.

        ``name`` is the expression that leads to the value. Comparisons use it as the name of a tensor. ``copied`` is
        true if the code will get a copy of the value. If it will get the value itself, the value must be immutable.
        """
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
            self.value(value.__self__, name, copied=copied)
            self.value(value.__func__, "", copied=False)
            return
        elif isinstance(value, types.FunctionType):
            self.function(value)
            return
        else:
            safe = type(value).__module__ == "torch._ops"
            if not safe and copied:
                self._done[id(value)] = value
                self._object(value, name)
                return
        if not safe:
            raise _SeenError

    def function(self, function: types.FunctionType) -> None:
        """Check a function that the code may call.

        The notebook's own functions will run with copies of their globals.
        """
        if _package(function) == "torch":
            held = [each.cell_contents for each in function.__closure__ or ()]
            # A function that holds an object would still use the original object, and not the copy. For example, a
            # learning rate scheduler replaces `optimizer.step` by a function that refers to the optimizer. If the copy
            # of the optimizer made a step, this function would change the original.
            if any(isinstance(each, (weakref.ref, Tensor, nn.Module, torch.optim.Optimizer)) for each in held):
                raise _SeenError
            return
        inner = vars(function).get("_torchdynamo_inline", function)  # the user's function inside our wrapper
        self.fixed(inner)
        named = self.namespace.get(function.__name__) is function
        copied = named and inner.__globals__ is self.namespace
        self.code(inner.__code__, inner.__globals__, copied=copied)
        if copied:
            self.functions[function.__name__] = inner

    def fixed(self, function: types.FunctionType) -> None:
        """Check the objects that a function received when it was created: its closure and its defaults."""
        held = [each.cell_contents for each in function.__closure__ or ()]
        for each in (*held, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.value(each, "", copied=False)

    def _global(self, name: str, variables: Mapping[str, Any], *, copied: bool) -> None:
        if name in variables:
            value = _uncompiled(variables[name])
            if copied:
                self.read[name] = value
            self.value(value, name, copied=copied)
        elif name not in _BUILTINS and not (copied and name in self._bound):
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
                self.value(each, f"{name}[{index}]", copied=True)
        elif kind is dict:
            self.undoable = False
            for key, each in value.items():
                self.value(key, "", copied=True)
                self.value(each, f"{name}[{key!r}]", copied=True)
        elif kind.__module__.startswith(_FOREIGN_TORCH) or any(vars(value).get(each) for each in _HOOKS):
            raise _SeenError
        elif isinstance(value, torch.optim.Optimizer):
            self.undoable = False
            self.owners.append(value)
            self._class(kind)
            self.value([group["params"] for group in value.param_groups], name, copied=True)
            self.value(list(value.state.values()), f"{name}.state", copied=True)
        else:
            self._parts(value, name)

    def _tensor(self, tensor: Tensor, name: str) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided or tensor.is_inference():
            raise _SeenError
        self.tensors[id(tensor)] = self._present.get(id(tensor), (name, tensor))
        if (gradient := internals.gradient_of(tensor)) is not None:
            self.value(gradient, f"{name}.grad", copied=True)

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
            self.value(each, f"{name}.{key}", copied=True)

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
        if name in UNSAFE or name.startswith(UNSAFE_BEGINNINGS):
            raise _SeenError
        self.undoable = self.undoable and name not in _MUTATORS
        held = name in _SAFE
        for owner in list(self.owners):
            held_by = internals.MODULE_DICTIONARIES if isinstance(owner, nn.Module) else ()
            if any(name in vars(owner)[each] for each in held_by):
                held = True
                continue
            member = inspect.getattr_static(owner, name, _MISSING)
            if member is _MISSING:
                continue
            held = True
            if isinstance(member, staticmethod | classmethod):
                member = member.__func__
            elif isinstance(member, property):
                member = member.fget
            if name not in vars(owner):  # the object's own attributes were checked already
                self.value(member, name, copied=False)
        if not held:
            raise _SeenError


class EagerRun:
    """A run of the Python code of a region or function on copies, for comparison with the compiled form.

    Attributes
    ----------
    undoable
        Whether the code can write only variables and tensors, so that its effects can be undone.
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
        yardstick: Candidate | None,
    ) -> None:
        self.undoable = reader.undoable
        self._function = function
        self._functions = reader.functions
        self._bound = bound
        uncopied = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
        read = {name: each for name, each in reader.read.items() if not isinstance(each, uncopied)}
        kinds = tuple({type(each): None for each in reader.owners})
        self._inputs = _Inputs(list(reader.tensors.values()), read, tuple(args), dict(kwargs), kinds)
        self._namespace = reader.namespace
        self._versions = self._inputs.versions()
        self._exact = exact
        self._yardstick = yardstick or _stock
        self._grad_mode = grad_mode
        self._random = torch.get_rng_state()
        # If a value is not close to eager's, a float64 run and a run of the yardstick decide whether it is accepted
        # (`Float64Appeal`). These two runs start from these copies of the inputs.
        self._before = None if exact else self._inputs.copied()
        self._expected = self._run(eager, self._before or self._inputs)

    def compare(self, result: Any) -> tuple[Comparison, ...]:
        """Compare the compiled form's effects and its ``result`` with the Python run; return rows of the comparison.

        All differences are returned. Of the equal rows, only those about values are returned: the values of the result,
        of the variables that the code binds, and of the tensors that it wrote.
        """
        actual = self._state(result, self._namespace, self._inputs, self._versions)
        appeal = None
        if self._before is not None:
            appeal = Float64Appeal(self._again, eager, self._yardstick).appeal(0, self._expected)
        rows = judge(self._expected, actual, tolerance="rounded" if self._exact else "close", appeal=appeal)
        inexact = any(row.tolerance != EXACT for row in rows if row.kind == "value")
        told = {each.name for each in actual.tensors if each.role == "output" or each.version_moved}
        told |= {each.name for each in actual.leaves}
        unique: dict[tuple[object, ...], Comparison] = {}
        for row in rows:
            rounded = inexact and row.kind == "python value" and _nearly(row)
            if (not row.equal and not rounded) or (row.kind in ("value", "python value") and row.subject in told):
                row = replace(row, equal=True, sentence="") if rounded else row
                unique.setdefault((row.kind, row.subject, row.equal), row)
        return tuple(unique.values())

    def _again(self, make: Candidate, dtype: torch.dtype | None = None) -> list[Observation]:
        assert self._before is not None
        return [self._run(make, self._before, dtype)]

    def _run(self, make: Candidate, inputs: _Inputs, dtype: torch.dtype | None = None) -> Observation:
        copied = inputs.copied(dtype)
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
        self, result: Any, namespace: Mapping[str, Any], inputs: _Inputs, versions: Mapping[int, int | None]
    ) -> Observation:
        results = {name: namespace[name] for name in self._bound if name in namespace}
        results |= {} if result is None else {"out": result}
        return described(results, inputs.tensors, versions)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Everything that some code reads: tensors with their names, globals by name, and the arguments of the call.

    ``kinds`` are the classes of the modules, optimizers and other objects that the code can reach.
    """

    tensors: list[tuple[str, Tensor]]
    read: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kinds: tuple[type, ...]

    def versions(self) -> dict[int, int | None]:
        """Return the version counter of each tensor, by the tensor's `id`."""
        return {id(each): internals.version_of(each) for _, each in self.tensors}

    def copied(self, dtype: torch.dtype | None = None) -> _Inputs:
        """Return a copy in which tensors alias each other as the originals do.

        If ``dtype`` is given, floating-point and complex tensors are converted to its precision.
        """
        state = State(dtype=dtype)
        tensors = [(name, state.tensor(each, name)) for name, each in self.tensors]
        for (name, each), (_, copy) in zip(self.tensors, tensors, strict=True):
            if (gradient := internals.gradient_of(each)) is not None:
                copy.grad = state.tensor(gradient, f"{name}.grad")
            if not internals.is_leaf(each) and each.retains_grad:
                copy.retain_grad()
        # Copying an object adds the attribute `__slotnames__` to its class. The user could see it, so it is removed
        # from the classes that did not have it before.
        new = [kind for kind in self.kinds if _NOTE not in vars(kind)]
        try:
            read, args, kwargs = state.copy((self.read, self.args, self.kwargs))
            return _Inputs(tensors, read, args, kwargs, self.kinds)
        finally:
            for kind in new:
                if _NOTE in vars(kind):
                    delattr(kind, _NOTE)


def run_on_copies(
    function: types.FunctionType,
    namespace: dict[str, Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    bound: Sequence[str] = (),
    grad_mode: bool,
    exact: bool,
    yardstick: Candidate | None = None,
) -> EagerRun | None:
    """Run the Python code of a region or function on copies of everything that it reads.

    Return None, without a run, if running the code twice could be observed.

    Parameters
    ----------
    function, args, kwargs
        The code of a region, which has no arguments; or a function of the user, with the arguments of the call.
    namespace
        The notebook's variables.
    bound
        The variables that the region binds.
    grad_mode
        Whether grad mode was on when the call began.
    exact
        Whether the compiled form's values must be bitwise equal to eager's.
    yardstick
        If they need not be equal, the callable whose error against a float64 run they may have, twice. The default is
        stock `torch.compile`.
    """
    reader = _Reader(namespace, bound)
    keywords = dict(kwargs or {})
    copied = function.__globals__ is namespace
    try:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        for index, each in enumerate(args):
            reader.value(each, names[index] if index < len(names) else f"args[{index}]", copied=True)
        for name, each in keywords.items():
            reader.value(each, name, copied=True)
        reader.fixed(function)
        reader.code(function.__code__, function.__globals__, copied=copied, stores=bool(bound))
        reader.finish()
        return EagerRun(reader, function, args, keywords, bound, grad_mode=grad_mode, exact=exact, yardstick=yardstick)
    except Exception:  # noqa: BLE001  # if the run on copies fails, only the captured graph is compared
        return None


def _uncompiled(value: Any) -> Any:
    """If ``value`` is a module that `aotlab.compile` returned, return the original module, which runs eagerly.

    A compiled module that has hooks, and any other value, is returned unchanged.
    """
    hooked = isinstance(value, AotModule) and any(vars(value).get(each) for each in _HOOKS)
    return value.orig_module if isinstance(value, AotModule) and not hooked else value


def _nearly(row: Comparison) -> bool:
    """Tell whether two Python numbers that were computed from tensors are equal up to rounding."""
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
    copy = types.FunctionType(
        code or function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _package(value: Any) -> str:
    """Return the top-level package of a module, class, function or object."""
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    named = isinstance(value, type | types.FunctionType | types.BuiltinFunctionType)
    return str((value if named else type(value)).__module__).partition(".")[0]
