"""Copies of a call's arguments that alias each other as the originals do.

To compare two runs of a function that mutates its arguments, each run needs arguments of its own. A
plain ``clone()`` of each would lose what aliasing is about. Here

- the same object stays the same object, wherever it occurs: argument, parameter, nested in a list;
- tensors of one storage get windows of one copied storage, with the same offsets, strides and bytes, and
  one version counter;
- a view stays a view of (a copy of) its base, connected by autograd where the original is;
- a non-leaf that requires grad becomes a non-leaf again: a leaf of its own stands behind it, so that gradients
  have somewhere to go and in-place writes stay legal;
- modules are copied whole, tied weights stay tied.

Limits: views are rebuilt with ``as_strided`` from their base, so the name of their ``grad_fn`` differs, and a view made
by a multi-output op or changed in place loses what autograd remembered of that; a non-leaf view whose base requires no
grad (a view of a leaf that is itself a view) gets a leaf of its own; a view that requires grad
and has another dtype than its base cannot be rebuilt and is an error; tensors of one storage get one version
counter even if ``.data`` gave the originals two; two storage objects over the same memory (as made by
``torch.from_numpy`` of one array) come apart.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from aotlab import _torch as torch_internals
from aotlab.errors import UsageError
from aotlab.verification.observables import Call, children


class _Enter(torch.autograd.Function):
    """Give a tensor made elsewhere a ``grad_fn`` that hands its gradient to ``leaf`` unchanged."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # a gradient that does not come stays None
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return gradients[0], None


def attach(leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a non-leaf over ``tensor``'s memory whose gradient arrives at ``leaf``.

    It is no view, so it may be changed in place; it shares ``tensor``'s storage and version counter.
    """
    # Made inside the forward: an argument of the Function would come back as a view or lose its strides.
    with torch.enable_grad():
        result: torch.Tensor = _Enter.apply(leaf, tensor.detach)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


class Cloner:
    """Copies one function's arguments, call after call, for one side of a comparison.

    Parameters
    ----------
    function
        A module is copied, once; its copy is `function`, and its parameters change from call to call as the calls
        change them. Any other callable is used as it is, with the tensors that it captures (see `captured_tensors`);
        use `restored` around its calls.
    dtype
        If given, floating tensors become tensors of this dtype, complex ones its complex counterpart.

    Raises
    ------
    UsageError
        If something cannot be copied faithfully.
    """

    def __init__(self, function: Callable[..., Any], *, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._original = function
        found = captured_tensors(function)
        if isinstance(function, nn.Module):
            state = State(dtype=dtype)
            self.captured = tuple((name, state.tensor(tensor, name)) for name, tensor in found)
            self.function: Callable[..., Any] = state.copy(function)
            self._kept = state
        else:
            if dtype is not None and any(tensor.is_floating_point() or tensor.is_complex() for _, tensor in found):
                raise UsageError("tensors that a plain function captures cannot be converted to another dtype")
            self.captured = tuple(found)
            self.function = function
            self._kept = State(dtype=dtype)
            for _, tensor in found:
                self._kept.keep(tensor)
        self._watched = tuple(self._kept.watched)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Copy ``args`` and ``kwargs`` for one call; they are not changed."""
        state = self._kept.branch()
        named = argument_tensors(self._original, args, kwargs)
        inputs = tuple((name, state.tensor(tensor, name)) for name, tensor in named)
        new_args, new_kwargs = state.copy((args, dict(kwargs)))
        return Call(
            args=new_args, kwargs=new_kwargs, inputs=inputs, captured=self.captured, watched=tuple(state.watched)
        )


class State:
    """What has been copied so far: objects by their original's id, memory by its original storage."""

    def __init__(self, *, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._memo: dict[int, Any] = {}
        self._alive: list[object] = []
        self._roots: dict[object, torch.Tensor] = {}
        self.watched: list[tuple[str, torch.Tensor]] = []

    def branch(self) -> State:
        """Start a state that knows what this one knows and leaves it alone."""
        state = State(dtype=self._dtype)
        state._memo = dict(self._memo)
        state._alive = list(self._alive)
        state._roots = dict(self._roots)
        state.watched = list(self.watched)
        return state

    def keep(self, tensor: torch.Tensor) -> None:
        """Let ``tensor`` and its memory stand for themselves."""
        self._remember(tensor, tensor)
        if tensor.layout == torch.strided and type(tensor) in (torch.Tensor, nn.Parameter):
            self._roots[torch_internals.storage_key(tensor)] = _bytes_of(tensor)

    def copy(self, value: Any) -> Any:
        """Copy ``value`` deeply; tensors copied before are taken from there."""
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:
            raise UsageError(f"the call cannot be copied for a comparison: {error}") from error

    def tensor(self, original: torch.Tensor, name: str) -> torch.Tensor:
        """Copy one tensor, or find its copy."""
        if id(original) in self._memo:
            found: torch.Tensor = self._memo[id(original)]
            return found
        # one that is ordinary counts its versions wherever the comparison runs, and one that is not does nowhere
        with torch.inference_mode(original.is_inference()):
            return self._copy_of(original, name)

    def _copy_of(self, original: torch.Tensor, name: str) -> torch.Tensor:
        if isinstance(original, torch_internals.FakeTensor):
            raise UsageError(f"`{name}` is a fake tensor: there are no values to compare")
        plain = type(original) in (torch.Tensor, nn.Parameter) and original.layout == torch.strided
        if plain and original.is_neg() and not original.is_conj():
            raise UsageError(f"`{name}` has its negative bit set; pass its resolve_neg()")
        base = torch_internals.base_of(original) if plain else None
        through_other_views = base is not None and not base.requires_grad and not original.is_leaf
        if base is not None and not through_other_views:
            result = self._view(original, base, name)
        elif original.requires_grad and not original.is_leaf:
            memory = self._window(original) if plain else self._other(original, name)
            leaf = memory.detach().clone().requires_grad_()
            self.watched.append((f"leaf behind {name}", leaf))
            result = attach(leaf, memory)
        else:
            memory = self._window(original) if plain else self._other(original, name)
            if isinstance(original, nn.Parameter):
                result = nn.Parameter(memory, requires_grad=original.requires_grad)
            else:
                result = memory.requires_grad_(original.requires_grad)
        # Asking a non-leaf for its gradient warns.
        if original.is_leaf and original.grad is not None:
            result.grad = self._converted(original.grad.detach()).clone()
        return self._remember(original, result)

    def _view(self, original: torch.Tensor, base: torch.Tensor, name: str) -> torch.Tensor:
        known = id(base) in self._memo
        new_base = self.tensor(base, f"base of {name}")
        if not known:
            self.watched.append((f"base of {name}", new_base))
        if base.dtype == original.dtype:
            # A view of a differentiable base that is a leaf was made under no_grad.
            with torch.set_grad_enabled(not (base.requires_grad and original.is_leaf)):
                result = new_base.as_strided(original.shape, original.stride(), original.storage_offset())
                if base.is_conj() != original.is_conj():
                    result = result.conj()
            if original.requires_grad and not base.requires_grad:
                result.requires_grad_()
            return result
        if original.requires_grad:
            raise UsageError(
                f"`{name}` is a {original.dtype} view of a {base.dtype} tensor and requires grad; it cannot be "
                "rebuilt for a comparison"
            )
        return self._window(original)

    def _window(self, original: torch.Tensor) -> torch.Tensor:
        """Make a leaf with ``original``'s place in the copy of its storage."""
        with torch.no_grad():
            root = self._root(original)
            if root.dtype == torch.uint8:
                size = original.element_size()
                root = root[: root.numel() // size * size].view(original.dtype)
            window = root.detach().as_strided(original.shape, original.stride(), original.storage_offset())
            # A second detach makes it no view of anything; the version counter stays the root's.
            return window.conj() if original.is_conj() else window.detach()

    def _other(self, original: torch.Tensor, name: str) -> torch.Tensor:
        """Copy what is no plain tensor, without a history; of a wrapper the parts, as the tensors that they are."""
        if self._dtype is not None or not torch_internals.is_wrapper(original):
            return self._converted(original.detach()).clone()
        attributes, context = original.__tensor_flatten__()  # type: ignore[attr-defined]  # wrappers have it
        parts = {each: self.tensor(getattr(original, each), f"{name}.{each}") for each in attributes}
        made: torch.Tensor = type(original).__tensor_unflatten__(  # type: ignore[attr-defined]  # as above
            parts, context, original.shape, original.stride()
        )
        return made

    def _root(self, original: torch.Tensor) -> torch.Tensor:
        key = torch_internals.storage_key(original)
        if key not in self._roots:
            self._alive.append(original.untyped_storage())
            memory = _bytes_of(original).clone()
            if self._dtype is not None and (original.is_floating_point() or original.is_complex()):
                size = original.element_size()
                memory = self._converted(memory[: memory.numel() // size * size].view(original.dtype))
            self._roots[key] = memory
        root = self._roots[key]
        if root.dtype not in (torch.uint8, self._converted(original.new_empty(0)).dtype):
            raise UsageError("a storage that holds several dtypes cannot be converted to another dtype")
        return root

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._dtype is None:
            return tensor
        if tensor.is_complex():
            return tensor.to(self._dtype.to_complex())
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def _remember(self, original: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        self._memo[id(original)] = result
        # An id is only an id as long as its object lives.
        self._alive.append(original)
        return result


def argument_tensors(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """List the tensors among the arguments, named as the function names its parameters: ``x``, ``args[0]['w']``."""
    target = function.forward if isinstance(function, nn.Module) else function
    named: list[tuple[str, Any]]
    try:
        bound = inspect.signature(target).bind(*args, **kwargs)
        named = list(bound.arguments.items())
    except (TypeError, ValueError):
        # No signature, or a call that will raise: eager's own error is what is to be compared then.
        named = [("args", args), ("kwargs", kwargs)]
    return [pair for name, value in named for pair in _tensors_in(value, name, set())]


def captured_tensors(function: Callable[..., Any]) -> list[tuple[str, torch.Tensor]]:
    """List the tensors that ``function`` reaches without being given them, each once, by name.

    A module's parameters and buffers; for a function those in its closure, defaults, bound object and the globals that
    its code names, through the functions of the same module that it calls.
    """
    if isinstance(function, nn.Module):
        return _module_tensors(function, "")
    seen: set[int] = set()
    found: dict[int, tuple[str, torch.Tensor]] = {}
    pending: list[tuple[str, Any]] = [("", function)]
    while pending:
        name, value = pending.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, functools.partial):
            pending += [(name, value.func), (f"{name}args", value.args), (f"{name}keywords", value.keywords)]
        elif isinstance(value, types.MethodType):
            pending += [("self", value.__self__), (name, value.__func__)]
        elif isinstance(value, types.FunctionType):
            pending += _reached(value)
        else:
            for label, tensor in _tensors_in(value, name, set()):
                found.setdefault(id(tensor), (label, tensor))
            if name in ("", "self") and not isinstance(value, nn.Module | torch.Tensor):
                pending += list(getattr(value, "__dict__", {}).items())
    return list(found.values())


def _reached(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            # An empty cell: a name of the enclosing scope that is not bound yet.
            continue
    yield "defaults", function.__defaults__
    yield "keyword defaults", function.__kwdefaults__
    for name in dict.fromkeys(_globals_named(function.__code__)):
        value = function.__globals__.get(name)
        if not isinstance(value, types.FunctionType) or value.__module__ == function.__module__:
            yield name, value


def _tensors_in(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from _module_tensors(value, f"{name}.")
    elif id(value) not in seen:
        seen = seen | {id(value)}
        for _, label, child in children(value, name):
            yield from _tensors_in(child, label, seen)


def _module_tensors(module: nn.Module, prefix: str) -> list[tuple[str, torch.Tensor]]:
    return [(f"{prefix}{name}", tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())]


@contextmanager
def restored(tensors: tuple[tuple[str, torch.Tensor], ...]) -> Iterator[None]:
    """Put the values, ``requires_grad`` and gradients of ``tensors`` back at the end of a ``with`` block.

    Bytes are put back without moving a version counter. A non-leaf among them keeps the history that it got.
    """
    strided = [tensor for _, tensor in tensors if tensor.layout == torch.strided]
    memory = [(tensor.untyped_storage(), tensor.untyped_storage().clone()) for tensor in strided]
    flags = [
        (tensor, tensor.requires_grad, tensor.grad, _optional_clone(tensor.grad))
        for tensor in strided
        if tensor.is_leaf
    ]
    try:
        yield
    finally:
        for storage, saved in memory:
            storage.copy_(saved)
        for tensor, requires_grad, gradient, value in flags:
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
            if gradient is not None and value is not None:
                with torch.no_grad():
                    gradient.copy_(value)
            tensor.grad = gradient


@contextmanager
def random_state_restored() -> Iterator[None]:
    """Put the random generators' states back at the end of a ``with`` block."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices=devices):
        yield


def _optional_clone(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _globals_named(code: types.CodeType) -> Iterator[str]:
    """List the globals that code loads, in functions and comprehensions inside of it, too."""
    for step in dis.get_instructions(code):  # names of attributes and methods are in `co_names`, too
        if step.opname == "LOAD_GLOBAL":
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals_named(inner)
