"""A compiled module: the same parameters, buffers and submodules, and all that the original's class can do besides.

    model = aotlab.compile(Net())
    model.load_state_dict(torch.load(path))     # the original's keys, by the original's own method
    model.temperature = 2.0                     # for the original to read
    copy.deepcopy(model); pickle.dumps(model)   # compile for themselves

Hooks that are registered on it are called around the compiled call, so that those on its backward work, too.
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

from aotlab._torch import MODULE_DICTIONARIES, hooks_held

#: What every module has in its dictionary: here hooks and the like, which are its own.
_PLAIN = frozenset(vars(nn.Module())) - {"training"}
#: The methods of `nn.Module` that do not ask the original, besides those about hooks.
_OWN = frozenset(
    ("forward", "extra_repr", "compile", "modules", "named_modules", "_get_name", "_call_impl", "_wrapped_call_impl",
     "_slow_forward", "_replicate_for_data_parallel")
)  # fmt: skip
#: What Python looks up in classes alone.
_SPECIAL = frozenset(
    ("__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__contains__", "__reversed__", "__bool__")
)


class AotModule(nn.Module):
    """A module that computes what another one does, compiled, on the same parameters, buffers and submodules.

    All that it has is the original's, which stays usable as ``orig_module``; ``compiled`` is the `CompiledFunction`
    behind ``forward``, or holds what `torch.compile` made. Copies and pickles have an original of their own.
    """

    def __new__(cls, module: nn.Module, compiled: Callable[..., Any]) -> AotModule:
        """Make an object of a class that is one of ``module``'s, too: with its special methods and its arguments."""
        made: AotModule = super().__new__(_class_for(cast(Hashable, type(module))))
        return made

    def __init_subclass__(cls) -> None:
        """Tell nobody: a class of ``module``'s may keep a list of its subclasses."""

    def __init__(self, module: nn.Module, compiled: Callable[..., Any]) -> None:
        self.__dict__["orig_module"] = module
        nn.Module.__init__(self)
        # the very dictionaries of the original, so that neither can have what the other has not
        for name in MODULE_DICTIONARIES:
            self.__dict__[name] = module.__dict__[name]
        self.__dict__["__doc__"] = module.__doc__
        self.__dict__["compiled"] = compiled

    def __repr__(self) -> str:
        inner = repr(self.__dict__["orig_module"]).replace("\n", "\n  ")
        return f"AotModule(\n  (orig_module): {inner}\n)"

    __call__ = nn.Module.__call__  # the original's own is run by the call of that

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled form; inside of what Dynamo captures, the module itself becomes a part of that.

        Called directly, as by a method, it runs the original's ``forward`` alone, where a call does more than that.
        """
        original = self.orig_module
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        called = sys._getframe(2).f_globals.get("__name__") == nn.Module.__module__
        if not called and (any(hooks_held(original)) or type(original).__call__ is not nn.Module.__call__):
            return original.forward(*args, **kwargs)
        return self.compiled(*args, **kwargs)

    @property
    def training(self) -> bool:
        """The flag of the original."""
        return bool(self.__dict__["orig_module"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "compiled" in self.__dict__:  # else nn.Module sets it, which begins in training
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

    def _own(self) -> dict[str, Any]:
        """Return what it does not share with the original: its hooks."""
        return {name: self.__dict__[name] for name in _PLAIN.difference(MODULE_DICTIONARIES) & self.__dict__.keys()}

    def __deepcopy__(self, memo: dict[int, Any]) -> AotModule:
        made = AotModule(copy.deepcopy(self.orig_module, memo), copy.deepcopy(self.compiled, memo))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self._own(), memo))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return AotModule, (self.orig_module, self.compiled), self._own()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _asking(name: str) -> Callable[..., Any]:
    """Make a method that asks the original, and that returns the compiled module where that returns itself."""

    def method(self: AotModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.orig_module, name)(*args, **kwargs)
        return self if result is self.orig_module else result

    method.__name__ = name
    return method


@functools.cache
def _class_for(kind: Hashable) -> type[AotModule]:
    assert isinstance(kind, type)
    assert issubclass(kind, nn.Module)

    def forward(self: AotModule, *args: Any, **kwargs: Any) -> Any:
        return AotModule.forward(self, *args, **kwargs)

    members: dict[str, Any] = {name: _asking(name) for name in _SPECIAL if hasattr(kind, name)}
    members["forward"] = functools.wraps(kind.forward)(forward)
    members["__new__"] = lambda _, *args, **kwargs: kind(*args, **kwargs)  # what `type(self)(…)` is to make
    return type("AotModule", (AotModule, kind), members)


for _name, _value in vars(nn.Module).items():
    if isinstance(_value, FunctionType) and not (_name.startswith("__") or "_hook" in _name or _name in _OWN):
        setattr(AotModule, _name, _asking(_name))
