"""Copies of a call's arguments that alias each other as the originals do.

To compare two runs of a function that mutates its arguments, each run needs its own arguments. A plain ``clone()`` of
each argument would lose the aliases. These copies keep them:

- An object that occurs several times (as an argument, as a parameter, nested in a list) stays one object.
- Tensors that share a storage become views of one copied storage, with the same offsets, strides and bytes. They share
  one version counter.
- A view stays a view of a copy of its base. Autograd connects the two copies if it connects the originals.
- The copy of a non-leaf that requires grad is a non-leaf. The cloner adds a leaf and computes the copy from this leaf.
  So the gradient of the copy can be observed in the leaf, and in-place writes to the copy stay legal.
- A module is copied whole, and tied weights stay tied.

Limits:

- Views are rebuilt with ``as_strided`` from their base, so the name of their ``grad_fn`` differs. Autograd has
  special rules for a view that a multi-output op (``unbind``) made, and for a view that was changed in place. These
  rules do not apply to the copy.
- A non-leaf view whose base does not require grad (a view of a leaf that is itself a view) gets a leaf of its own. Its
  gradient does not reach the copy of the original leaf.
- A view that requires grad and has another dtype than its base cannot be rebuilt; this raises `UsageError`.
- Tensors that share a storage get one version counter, even if ``.data`` gave the originals two.
- Two storage objects over the same memory (``torch.from_numpy`` makes them if it is called twice on one array) become
  two separate copies.
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
from aotlab.ir.extents import needed_bytes
from aotlab.verification.observables import Call, children


class _Enter(torch.autograd.Function):
    """Return the tensor of ``make()``, with a ``grad_fn`` that passes the tensor's gradient to ``leaf`` unchanged.

    `attach` uses this Function to make a non-leaf over existing memory.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # an undefined gradient stays None
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return gradients[0], None


def attach(leaf: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a non-leaf over ``tensor``'s memory whose gradient is accumulated in ``leaf``.

    The result is not a view for autograd, so it may be changed in place. It shares ``tensor``'s storage and version
    counter.
    """
    # The forward makes the tensor itself. If the tensor were an argument of the Function, the output would be a view of
    # the argument, or a copy that lost its strides.
    with torch.enable_grad():
        result: torch.Tensor = _Enter.apply(leaf, tensor.detach)  # type: ignore[no-untyped-call]  # untyped in torch
    return result


class Cloner:
    """Copies the arguments of one function for each call of it. Each side of a comparison uses a separate cloner.

    Parameters
    ----------
    function
        A module is copied once, and the copy is the attribute ``function``. All calls use this copy, so later calls see
        the changes that earlier calls made to its parameters. Any other callable is not copied and uses the original
        tensors that it captures (see `captured_tensors`). Run its calls inside of `restored`, which undoes their
        changes to these tensors.
    dtype
        If given, floating tensors are converted to this dtype, and complex tensors to its complex counterpart.

    Raises
    ------
    UsageError
        If something cannot be copied faithfully.
    """

    def __init__(self, function: Callable[..., Any], *, dtype: torch.dtype | None = None) -> None:
        self._dtype = dtype
        self._original = function
        captured = captured_tensors(function)
        if isinstance(function, nn.Module):
            state = State(dtype=dtype)
            self.captured = tuple((name, state.tensor(tensor, name)) for name, tensor in captured)
            self.function: Callable[..., Any] = state.copy(function)
            self._captured_state = state
        else:
            if dtype is not None and any(tensor.is_floating_point() or tensor.is_complex() for _, tensor in captured):
                raise UsageError("tensors that a plain function captures cannot be converted to another dtype")
            self.captured = tuple(captured)
            self.function = function
            self._captured_state = State(dtype=dtype)
            for _, tensor in captured:
                self._captured_state.keep(tensor)
        self._watched = tuple(self._captured_state.watched)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Copy ``args`` and ``kwargs`` for one call. The originals are not changed."""
        state = self._captured_state.branch()
        named = argument_tensors(self._original, args, kwargs)
        inputs = tuple((name, state.tensor(tensor, name)) for name, tensor in named)
        new_args, new_kwargs = state.copy((args, dict(kwargs)))
        return Call(
            args=new_args, kwargs=new_kwargs, inputs=inputs, captured=self.captured, watched=tuple(state.watched)
        )


class State:
    """The copies that a `Cloner` has made so far: objects by the id of the original, memory by the original storage.

    ``watched`` lists the copied bases of views and the added leaves, by name. The caller passes none of them, but the
    call can change them.
    """

    def __init__(self, *, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._memo: dict[int, Any] = {}
        self._alive: list[object] = []
        self._roots: dict[object, torch.Tensor] = {}
        self.watched: list[tuple[str, torch.Tensor]] = []

    def branch(self) -> State:
        """Return a new state that contains the copies of this state; copies added later do not change this state."""
        state = State(dtype=self._dtype)
        state._memo = dict(self._memo)
        state._alive = list(self._alive)
        state._roots = dict(self._roots)
        state.watched = list(self.watched)
        return state

    def keep(self, tensor: torch.Tensor) -> None:
        """Record ``tensor`` and its memory as the copies of themselves, so that the call uses the originals.

        A plain function reads its captured tensors without the cloner, so copies cannot replace these tensors. An
        argument that is a view of a captured tensor must share memory with the captured tensor itself.
        """
        self._remember(tensor, tensor)
        if tensor.layout == torch.strided and type(tensor) in (torch.Tensor, nn.Parameter):
            self._roots[torch_internals.storage_key(tensor)] = _bytes_of(tensor)

    def copy(self, value: Any) -> Any:
        """Copy ``value`` deeply. Tensors that were already copied are reused."""
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:
            raise UsageError(f"the call cannot be copied for a comparison: {error}") from error

    def tensor(self, original: torch.Tensor, name: str) -> torch.Tensor:
        """Return the copy of one tensor; make it if it does not exist yet."""
        if id(original) in self._memo:
            copy: torch.Tensor = self._memo[id(original)]
            return copy
        # The copy must be an inference tensor exactly if the original is one, whatever mode the comparison runs in:
        # only ordinary tensors have a version counter.
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
            leaf = torch.zeros_like(memory).requires_grad_()
            self.watched.append((f"leaf behind {name}", leaf))
            result = attach(leaf, memory)
        else:
            memory = self._window(original) if plain else self._other(original, name)
            if isinstance(original, nn.Parameter):
                result = nn.Parameter(memory, requires_grad=original.requires_grad)
            else:
                result = memory.requires_grad_(original.requires_grad)
        # Copy only the gradient of a leaf, because reading the gradient of a non-leaf warns.
        if original.is_leaf and original.grad is not None:
            result.grad = self._converted(original.grad.detach()).clone()
        return self._remember(original, result)

    def _view(self, original: torch.Tensor, base: torch.Tensor, name: str) -> torch.Tensor:
        had_copy = id(base) in self._memo
        new_base = self.tensor(base, f"base of {name}")
        if not had_copy:
            self.watched.append((f"base of {name}", new_base))
        if base.dtype == original.dtype:
            # If the base requires grad and the view is a leaf, the view was made under no_grad. So make its copy under
            # no_grad.
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
        """Return a leaf that views the copied storage with ``original``'s size, stride and offset."""
        with torch.no_grad():
            root = self._root(original)
            if root.dtype == torch.uint8:
                size = original.element_size()
                root = root[: root.numel() // size * size].view(original.dtype)
            # A tensor may be larger than its storage, if the storage was freed. No view of a copy may be.
            storage, size = root.untyped_storage(), root.untyped_storage().nbytes()
            if needed_bytes(original) > size:
                storage.resize_(needed_bytes(original))
            window = root.detach().as_strided(original.shape, original.stride(), original.storage_offset())
            if needed_bytes(original) > size:
                storage.resize_(size)
            # Autograd does not treat the result of the second detach as a view. But this result shares the version
            # counter of `root`, the tensor over the whole copied storage.
            return window.conj() if original.is_conj() else window.detach()

    def _other(self, original: torch.Tensor, name: str) -> torch.Tensor:
        """Copy a tensor subclass, or a tensor that is not strided, without its autograd history.

        The parts of a wrapper subclass are copied one by one, and the copies are wrapped again.
        """
        if self._dtype is not None or not torch_internals.is_wrapper(original):
            return self._converted(original.detach()).clone()
        attributes, context = original.__tensor_flatten__()  # type: ignore[attr-defined]  # wrappers have it
        parts = {each: self.tensor(getattr(original, each), f"{name}.{each}") for each in attributes}
        wrapper: torch.Tensor = type(original).__tensor_unflatten__(  # type: ignore[attr-defined]  # as above
            parts, context, original.shape, original.stride()
        )
        return wrapper

    def _root(self, original: torch.Tensor) -> torch.Tensor:
        """Return the tensor over the whole copy of ``original``'s storage; copy the storage at the first request."""
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
        # Keep the original alive, because copies are found by the id of the original, and Python reuses the id of a
        # deleted object.
        self._alive.append(original)
        return result


def argument_tensors(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[tuple[str, torch.Tensor]]:
    """List the tensors in the arguments, each with the expression that leads to it: ``x``, ``args[0]['w']``."""
    target = function.forward if isinstance(function, nn.Module) else function
    named: list[tuple[str, Any]]
    try:
        bound = inspect.signature(target).bind(*args, **kwargs)
        named = list(bound.arguments.items())
    except (TypeError, ValueError):
        # Either the function has no signature, or the arguments do not fit and the call will raise. Raise nothing here,
        # so that the comparison sees the error that eager raises.
        named = [("args", args), ("kwargs", kwargs)]
    return [pair for name, value in named for pair in _tensors_in(value, name, set())]


def captured_tensors(function: Callable[..., Any]) -> list[tuple[str, torch.Tensor]]:
    """List the tensors that ``function`` reads without receiving them as arguments, each once, by name.

    For a module, these are its parameters and buffers. For a function, they come from its closure, its defaults, its
    bound object and the globals that its code names. Functions of the same module that it calls are searched too.
    """
    if isinstance(function, nn.Module):
        return _module_tensors(function, "")
    seen: set[int] = set()
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
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
                tensors.setdefault(id(tensor), (label, tensor))
            if name in ("", "self") and not isinstance(value, nn.Module | torch.Tensor):
                pending += list(getattr(value, "__dict__", {}).items())
    return list(tensors.values())


def _reached(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            # The cell is empty, because the variable of the enclosing scope is not bound yet.
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
    """Restore the memory, values, ``requires_grad`` and gradients of ``tensors`` at the end of a ``with`` block.

    Restoring the bytes or the memory does not increment a version counter. A non-leaf keeps the ``grad_fn`` that it
    got in the block.
    """
    strided = [tensor for _, tensor in tensors if tensor.layout == torch.strided]
    memory = [(tensor.untyped_storage(), tensor.untyped_storage().clone()) for tensor in strided]
    views = [(tensor, tensor.detach()) for tensor in strided]
    flags = [
        (tensor, tensor.requires_grad, tensor.grad, _optional_clone(tensor.grad))
        for tensor in strided
        if tensor.is_leaf
    ]
    try:
        yield
    finally:
        for storage, saved in memory:
            if storage.nbytes() != saved.nbytes():
                storage.resize_(saved.nbytes())
            storage.copy_(saved)
        for tensor, view in views:
            # The block may have given the tensor other memory (`w.data = …`), or another shape (`w.t_()`).
            if not tensor.is_set_to(view):
                tensor.data = view
        for tensor, requires_grad, gradient, value in flags:
            if tensor.is_leaf:
                tensor.requires_grad_(requires_grad)
            if gradient is not None and value is not None:
                with torch.no_grad():
                    gradient.copy_(value)
            tensor.grad = gradient


@contextmanager
def random_state_restored() -> Iterator[None]:
    """Restore the states of the random generators at the end of a ``with`` block."""
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
    """List the names of the globals that a code object loads, also in the functions and comprehensions inside of it."""
    for step in dis.get_instructions(code):  # `co_names` also contains the names of attributes and methods
        if step.opname == "LOAD_GLOBAL":
            yield step.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals_named(inner)
