"""A compiled module, which shares its state with the original module and behaves like an instance of its class.

    model = aotlab.compile(Net())
    model.load_state_dict(torch.load(path))     # calls the original's method, with the original's keys
    model.temperature = 2.0                     # sets the attribute of the original
    copy.deepcopy(model); pickle.dumps(model)   # the copy has its own copy of the original, and compiles again

Hooks that are registered on the compiled module run around the compiled call, so that backward hooks work, too. Global
module hooks run only for the original and its submodules, as in eager.

The hooks of a module that FSDP2 has sharded exchange parameters and gradients with other processes. They run around the
compiled call, too, so the compiled module shares them with the original, and only the original's ``forward`` is
compiled. Of a `DistributedDataParallel`, the inner module is compiled (`InsideParallel`).
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, cast

from torch import nn
from torch.compiler import is_dynamo_compiling

from aotlab._torch import (
    FORWARD_HOOKS,
    MODULE_DICTIONARIES,
    children_held,
    hooks_held,
    is_sharded,
    own_hooks_only,
    share_sharding,
)

#: The attributes that every module has in its ``__dict__``. A compiled module has its own values of these attributes,
#: for example its own forward hooks, except that it shares the dictionaries in `MODULE_DICTIONARIES` with the original.
_PLAIN = frozenset(vars(nn.Module())) - {"training"}
#: The dictionaries of a module's hooks, except those in `MODULE_DICTIONARIES`.
_HOOKS = {name for name in _PLAIN.difference(MODULE_DICTIONARIES) if "_hooks" in name}
#: The methods of `nn.Module` that are not forwarded to the original. Methods about hooks are not forwarded, either.
_OWN = frozenset(
    ("forward", "extra_repr", "compile", "modules", "named_modules", "_get_name", "_call_impl", "_wrapped_call_impl",
     "_slow_forward", "_replicate_for_data_parallel")
)  # fmt: skip
#: The file of `nn.Module`. If the caller of ``forward`` is in this file, the user called the module, not ``forward``.
_CALLS = nn.Module.__init__.__code__.co_filename
#: Special methods that Python looks up in the class and not in the instance. So the class must have them.
_SPECIAL = frozenset(
    ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__", "__reversed__", "__bool__")
)


class AotModule(nn.Module):
    """The compiled form of a module. It shares parameters, buffers and submodules with the original.

    ``orig_module`` is the original, which stays usable. All other attributes are read from the original and set on the
    original. ``compiled`` is the callable that ``forward`` calls: a `CompiledFunction`, or the result of
    `torch.compile`. A copy of the compiled module, also by pickle, has its own copy of the original.
    """

    def __new__(cls, module: nn.Module, compiled: Callable[..., Any]) -> AotModule:
        """Make an object whose class is a subclass of `AotModule` and of the class of ``module``."""
        made: AotModule = super().__new__(_class_for(cast(Hashable, type(module))))
        return made

    def __init_subclass__(cls) -> None:
        """Keep Python from calling the ``__init_subclass__`` of the user's class, which may register its subclasses."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self.__dict__["orig_module"] = module
        nn.Module.__init__(self)
        # the same dictionary objects as the original's, so that both always have the same parameters and submodules
        for name in (*MODULE_DICTIONARIES, *(_HOOKS if is_sharded(module) else ())):
            self.__dict__[name] = module.__dict__[name]
        if is_sharded(module):
            share_sharding(module, self)
        self.__dict__["__doc__"] = module.__doc__
        self.__dict__["compiled"] = compiled

    def __repr__(self) -> str:
        inner = repr(self.__dict__["orig_module"]).replace("\n", "\n  ")
        return f"AotModule(\n  (orig_module): {inner}\n)"

    __call__ = nn.Module.__call__  # not the user's `__call__`, because the compiled function calls it
    _call_impl = own_hooks_only("_call_impl")
    _get_backward_hooks = own_hooks_only("_get_backward_hooks")
    _get_backward_pre_hooks = own_hooks_only("_get_backward_pre_hooks")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled function. While Dynamo captures the caller, call the original, which Dynamo can inline.

        The compiled function runs the original's hooks and its ``__call__``, but in eager a direct call of ``forward``
        runs neither. So if code calls ``forward`` directly, and the original has hooks or its own ``__call__``, the
        original's ``forward`` runs without compilation.
        """
        original = self.orig_module
        if is_dynamo_compiling():
            shares_hooks = getattr(self, FORWARD_HOOKS) is getattr(original, FORWARD_HOOKS)
            return (original.forward if shares_hooks else original)(*args, **kwargs)
        is_called_by_torch = sys._getframe(2).f_code.co_filename == _CALLS
        if not is_called_by_torch and (any(hooks_held(original)) or type(original).__call__ is not nn.Module.__call__):
            return original.forward(*args, **kwargs)
        return self.compiled(*args, **kwargs)

    @property
    def training(self) -> bool:
        """The original's ``training`` flag."""
        return bool(self.__dict__["orig_module"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "compiled" in self.__dict__:  # not while `nn.Module.__init__` sets it
            self.orig_module.training = mode

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["orig_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or name in ("training", "__class__"):
            super().__setattr__(name, value)
        else:
            setattr(self.orig_module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.orig_module, name)

    def _unshared_attributes(self) -> dict[str, Any]:
        """Return the attributes that the compiled module does not share with the original, for example its hooks."""
        return {name: self.__dict__[name] for name in _PLAIN.difference(MODULE_DICTIONARIES) & self.__dict__.keys()}

    def __deepcopy__(self, memo: dict[int, Any]) -> AotModule:
        copied = AotModule(copy.deepcopy(self.orig_module, memo), copy.deepcopy(self.compiled, memo))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self._unshared_attributes(), memo))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return AotModule, (self.orig_module, self.compiled), self._unshared_attributes()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class InsideParallel:
    """The callable for a `DistributedDataParallel`: its own code runs in Python, and calls the compiled inner module.

    ``function`` is the compiled function of the inner module. Its attributes are attributes of this object, too.
    """

    def __init__(self, parallel: nn.Module, function: Callable[..., Any]) -> None:
        self.parallel, self.function = parallel, function
        self._inner = AotModule(parallel.get_submodule("module"), function)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["function"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original with the compiled inner module in the place of its module."""
        children = children_held(self.parallel)
        before, children["module"] = children["module"], self._inner
        try:
            return self.parallel(*args, **kwargs)
        finally:
            children["module"] = before


def _forwarded(name: str) -> Callable[..., Any]:
    """Return a method that calls the original's method ``name``, as in ``compiled.eval()``.

    If the original's method returns the original, the new method returns the compiled module.
    """

    def method(self: AotModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.orig_module, name)(*args, **kwargs)
        return self if result is self.orig_module else result

    method.__name__ = name
    return method


@functools.cache
def _class_for(kind: Hashable) -> type[AotModule]:
    """Return the class of compiled modules whose originals have the class ``kind``. It derives from ``kind``, too."""
    assert isinstance(kind, type)
    assert issubclass(kind, nn.Module)

    def forward(self: AotModule, *args: Any, **kwargs: Any) -> Any:
        return AotModule.forward(self, *args, **kwargs)

    members: dict[str, Any] = {name: _forwarded(name) for name in _SPECIAL if hasattr(kind, name)}
    members["forward"] = functools.wraps(kind.forward)(forward)
    # if a method of the user's class calls `type(self)(…)`, it gets an uncompiled module of this class
    members["__new__"] = lambda _, *args, **kwargs: kind(*args, **kwargs)
    return type("AotModule", (AotModule, kind), members)


for _name, _value in vars(nn.Module).items():
    if isinstance(_value, FunctionType) and not (_name.startswith("__") or "_hook" in _name or _name in _OWN):
        setattr(AotModule, _name, _forwarded(_name))
