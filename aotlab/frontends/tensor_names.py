"""Find names of a program's tensors, as the user would write them: ``net.l.weight``, ``opt.state[…]``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from aotlab._torch import gradient_of
from aotlab.guards.user_code import is_users

_IPYTHON = frozenset({"In", "Out", "exit", "quit", "get_ipython"})
_LONGEST = 200  # the most items of a list or dict that are searched by default
_DEEPEST = 3  # the most containers and objects that the path to a tensor leads through

#: Maps the `id` of a tensor to a pair: the tensor's name and the tensor.
Named = dict[int, tuple[str, Tensor]]


def named_tensors(namespace: Mapping[str, Any], longest: int | None = _LONGEST) -> Named:
    """Return the tensors that can be reached from the variables in a notebook's namespace, by `id`.

    Each tensor has the first name that was found. Variables can contain tensors directly, in lists, tuples and dicts,
    in modules, in optimizers, and as attributes of objects whose class was defined in the notebook. The gradient of
    ``x`` has the name ``x.grad``. An optimizer's state for a parameter has the name ``opt.state[name]['key']``. Only
    the first ``longest`` items of a list or dict are searched. If ``longest`` is None, all items are searched.
    """
    names: Named = {}
    _add(names, namespace, longest, "__main__")
    return names


def names_on_stack() -> Named:
    """Return the tensors in the variables of the user's running functions, by `id`, with their names.

    The search ends at the Python module or notebook cell whose top-level code is running. If a tensor has several
    names, the name in the outermost function is used. If a method of an optimizer is running, the optimizer (``self``)
    is searched, too, although the method belongs to torch.
    """
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code) or str(frame.f_globals.get("__name__")).startswith("torch.optim."):
            frames.append(frame)
            if frame.f_locals is frame.f_globals:
                break
        frame = frame.f_back
    names: Named = {}
    for frame in reversed(frames):
        variables = dict(frame.f_locals)
        if not is_users(frame.f_code):
            variables = {"self": variables.get("self")}
        _add(names, variables, _LONGEST, str(frame.f_globals.get("__name__")))
        if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
            frame.f_locals.clear()  # `f_locals` is a copy, which keeps the values alive until the function returns
    return names


def _add(names: Named, namespace: Mapping[str, Any], longest: int | None, home: str) -> None:
    """Add to ``names`` the tensors that can be reached from the variables in ``namespace`` and have no name yet.

    Attributes of an object are searched only if its class is defined in the Python module ``home``. At most ``longest``
    items of a list or dict are searched.
    """
    optimizers: dict[str, Optimizer] = {}
    count_before = len(names)
    for name, value in list(namespace.items()):
        if name.startswith("_") or name in _IPYTHON:
            continue
        for path, object_ in _reached(name, value, longest, 0, home):
            if isinstance(object_, Optimizer):
                optimizers[path] = object_
            else:
                names.setdefault(id(object_), (path, object_))
    for path, tensor in list(names.values())[count_before:]:
        gradient = gradient_of(tensor)
        if gradient is not None:
            names.setdefault(id(gradient), (f"{path}.grad", gradient))
    for path, optimizer in optimizers.items():
        for place, tensor in list(_of_optimizer(path, optimizer, names)):
            names.setdefault(id(tensor), (place, tensor))


def _reached(path: str, value: Any, longest: int | None, depth: int, home: str) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and optimizers in a value, each with its path; ``path`` is the path of the value itself."""
    if isinstance(value, Tensor | Optimizer):
        yield path, value
    elif isinstance(value, nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield f"{path}.{name}", tensor
    elif depth < _DEEPEST:
        if type(value) in (list, tuple):
            for index, item in enumerate(value[:longest]):
                yield from _reached(f"{path}[{index}]", item, longest, depth + 1, home)
        elif type(value) is dict:
            for key, item in list(value.items())[:longest]:
                yield from _reached(f"{path}[{key!r}]", item, longest, depth + 1, home)
        elif type(value).__module__ == home and hasattr(value, "__dict__"):
            for name, item in list(vars(value).items())[:longest]:
                yield from _reached(f"{path}.{name}", item, longest, depth + 1, home)


def _of_optimizer(path: str, optimizer: Optimizer, names: Named) -> Iterator[tuple[str, Tensor]]:
    """Yield the state tensors, parameters and gradients of an optimizer, each with its name."""
    position = 0
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            name = names[id(parameter)][0] if id(parameter) in names else ""
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield f"{path}.state[{name or position}][{key!r}]", value
            name = name or f"{path}.param_groups[{index}]['params'][{number}]"
            yield name, parameter
            if parameter.grad is not None:
                yield f"{name}.grad", parameter.grad
            position += 1
